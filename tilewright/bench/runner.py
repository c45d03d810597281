"""Runs many small units of work within a time budget, robust to crashes and hangs, with one line
of a file per unit.

A `Unit` produces one JSON document. `work` runs the units of one process in sequence and skips
those whose documents are there from the same sources, options and device. `supervise` runs such
processes: it kills one that hangs or runs out of time, records the unit it was running, and starts
another process for the rest. So a call always ends in time, a crash costs one unit, and the next
call resumes: first units that were not reached, then failed ones, last those out of time.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright.bench import timing
from tilewright.bench.providers import BASELINES
from tilewright.bench.store import FILE, append, documents, write_json

SCHEMA = 1
FINISH = 5.0  # seconds reserved at the end of a budget for writing results
# seconds that a worker may spend outside of units: importing, planning, or hanging at exit
SILENT = 120.0
DYING = 10.0  # seconds to wait for a killed process; one stuck in a driver never ends
ATTEMPTS = 3  # per failing unit: another process may have used up the GPU's memory
LOST = 70  # exit code of a process that lost its CUDA context


@dataclass(frozen=True)
class Unit:
    """One unit of work.

    name: "kind/rest".
    make: returns the document, without "meta".
    limit: seconds after which it is killed, counted from its start or its last `save`.
    blank: the document to write, with an "error", if `make` fails; what it saved stays.
    options: what the result depends on besides sources, versions and device.
    source: digest of the result's sources; None: that of the call's "meta".
    """

    name: str
    make: Callable[[], dict[str, Any]]
    blank: dict[str, Any]
    limit: float = 180.0
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str | None = None

    def about(self, meta: dict[str, Any]) -> dict[str, Any]:
        """The call's "meta", with this unit's source."""
        return meta if self.source is None else {**meta, "source": self.source}


def _ours(document: dict[str, Any], kinds: Sequence[str]) -> Iterator[str]:
    """Outcomes of this library's implementations: failures of peers and unavailable
    implementations are left out.
    """
    for r in document.get("results", ()):
        if r["status"] in kinds and r["implementation"] not in BASELINES:
            yield f"{r['implementation']} {r['dtype']}: {r['reason']}"
    for r in document.get("rows", ()):
        if r.get("status") in kinds and r["provider"] not in BASELINES:
            yield f"{r['provider']}: {r['reason']}"


def failures(document: dict[str, Any]) -> list[str]:
    """Failures of this library's implementations."""
    error = document.get("error")
    return [error] if error else list(_ours(document, ("broken", "failed", "error")))


def raised(document: dict[str, Any]) -> bool:
    """Whether a document records an exception and is worth another attempt."""
    return bool(document.get("error")) or any(_ours(document, ("error",)))


def same(document: dict[str, Any], meta: dict[str, Any], keep: bool = False) -> bool:
    """Whether a document comes from this device and, unless `keep`, from these sources and
    versions.
    """
    names = ("device",) if keep else ("device", "source", "versions")
    return all(document["meta"].get(n) == meta.get(n) for n in names)


def current(
    unit: Unit,
    document: dict[str, Any] | None,
    meta: dict[str, Any],
    keep: bool = False,
    since: float = float("inf"),
) -> dict[str, Any] | None:
    """The unit's document if it is complete, and from these options and this device; else None.

    keep: accept any sources and versions.
    since: when this call began; units that failed before are run again, up to ATTEMPTS times.
    """
    try:
        if document is None or document.get("unfinished"):
            return None
        if not same(document, unit.about(meta), keep):
            return None
        if json.loads(json.dumps(unit.options)) != document.get("options", {}):
            return None
        again = since != float("inf") and raised(document) and document.get("at", 0.0) < since
        return None if again and document.get("attempts", 1) < ATTEMPTS else document
    except (KeyError, TypeError, AttributeError):
        return None


# The state of the unit that this process runs, and its file, which the supervisor reads.
_running: list[tuple[pathlib.Path, dict[str, Any]]] = []


def save(parts: dict[str, Any]) -> None:
    """Keeps parts of the running unit's document, in case its process ends before it does."""
    for path, state in _running:
        state["document"].update(parts)
        state.update(saved=True, ends=time.time() + state["limit"])
        write_json(path, state)


# Long: a unit's life in its order, since what a crash leaves follows from where it came.
def work(
    units: Iterable[Unit],
    out: pathlib.Path,
    until: float,
    meta: dict[str, Any],
    *,
    keep: bool = False,
    since: float = float("inf"),
    slot: str = "0",
    describe: Callable[[dict], str] = lambda d: "",
    now: Callable[[], dict[str, Any]] = dict,
    stream: pathlib.Path | None = None,
) -> None:
    """Runs the units whose documents are missing. Starts none after `until` (seconds since the
    epoch).

    stream: a file to which each finished document is appended as one line, with its name under
        "unit", so that results survive the loss of the machine.
    now: returns fields of "meta" that are read after each unit, such as the date and the clocks.
    """
    state, existing = out / f"running-{slot}.json", documents(out)

    def last(unit):  # units that were never tried come first
        document = existing.get(unit.name)
        previous = current(unit, document, meta, keep)
        return bool(document and document.get("late")), bool(previous and raised(previous))

    try:
        for unit in sorted(units, key=last):
            document = existing.get(unit.name)
            if current(unit, document, meta, keep, since) is not None:
                continue
            if time.time() >= until:
                break
            previous, begin = current(unit, document, meta, keep), time.time()
            attempts = previous.get("attempts", 1) if previous and raised(previous) else 0
            common = {
                "schema": SCHEMA,
                "options": dict(unit.options),
                "attempts": attempts + 1,
                "meta": unit.about(meta),
            }
            running = {
                "unit": unit.name,
                "since": begin,
                "ends": begin + unit.limit,
                "limit": unit.limit,
                "saved": False,
                "document": {**common, **unit.blank},
            }
            write_json(state, running)
            _running[:] = [(state, running)]
            start = time.perf_counter()
            try:
                try:
                    document = unit.make()
                except Exception as error:  # one unit's failure must not lose the others
                    timing.raise_if_lost(error)
                    document = {**running["document"], "error": timing.first_line(error)}
            except timing.DeviceLost as lost:
                # The supervisor records it and starts another process.
                write_json(state, {**running, "lost": str(lost)})
                sys.stdout.flush()
                os._exit(LOST)
            document = {
                **common,
                "seconds": time.perf_counter() - start,
                "at": time.time(),
                **document,
                "meta": {**unit.about(meta), **now()},
            }
            try:
                append(out / FILE, unit.name, document)
            except ValueError as error:  # infinity or NaN
                document = {**document, **unit.blank, "error": timing.first_line(error)}
                append(out / FILE, unit.name, document)
            if stream is not None:
                append(stream, unit.name, document)
            state.unlink()  # a process that dies from here on dies between units
            print(
                f"{unit.name} ({document['seconds']:.1f} s) "
                f"{document.get('error') or describe(document)}",
                flush=True,
            )
    finally:
        _running.clear()
        state.unlink(missing_ok=True)


def begin_worker(parent: int) -> None:
    """Prepares a worker once it has imported everything. The kernel (Linux) shall kill it when its
    supervisor `parent` dies, and no garbage collection shall visit the present objects. Modules are
    a million objects, and capturing a CUDA graph or releasing a case's memory collects each time.
    """
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before prctl
        os._exit(1)


class Unusable(Exception):
    """A results folder that cannot be written, or that another call is using."""


@contextlib.contextmanager
def locked(out: pathlib.Path) -> Iterator[None]:
    """Creates the folder and locks it for this call. Raises Unusable if that is impossible."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w")
    except OSError as error:
        raise Unusable(f"cannot write into {out}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Unusable(f"another call is at work in {out}") from error
        yield


# Long: its functions share the workers' state, which nothing else may change.
def supervise(
    commands: Sequence[Sequence[str]],
    out: pathlib.Path,
    until: float,
    *,
    say: Callable[[str], object] = print,
    stream: pathlib.Path | None = None,
    poll: float = 0.1,
    silent: float = SILENT,
) -> bool:
    """Runs the commands in parallel until all have ended, each a process that calls `work` with its
    index as slot.

    If one dies, or exceeds a unit's limit, that unit is recorded as failed and the process is
    started again. At `until` all running processes are killed; their units are left for the next
    call, which runs them last.

    stream: as for `work`, for the documents of units that did not end.

    Returns False if a worker was abandoned because it twice died or was silent between units.
    """
    running: dict[int, subprocess.Popen] = {}
    heard: dict[int, float] = {}  # when a worker was last seen running a unit
    failures = dict.fromkeys(range(len(commands)), 0)

    starting = interrupted = False

    def start(i: int):
        nonlocal starting
        (out / f"running-{i}.json").unlink(missing_ok=True)
        starting = True  # an exception within Popen would lose the process that it has started
        try:
            running[i] = subprocess.Popen(list(commands[i]), start_new_session=True)
        finally:
            starting = False
        heard[i] = time.time()
        if interrupted:
            raise KeyboardInterrupt

    def stop(*indices: int):
        processes = [running.pop(i) for i in indices]
        for process in processes:
            kill(process)
        deadline = time.time() + DYING
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.time()))

    def terminated(*_):
        nonlocal interrupted
        interrupted = True
        if not starting:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGTERM)
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, terminated)
    for path in out.glob("running-*.json"):  # of a call that was killed, and whose parts count
        if (left := _read(path)) and left.get("saved"):
            _record(left, out, "", True, stream)
        path.unlink()
    try:
        for i in range(len(commands)):
            start(i)
        while running:
            time.sleep(poll)
            late = time.time() >= until
            for i, process in list(running.items()):
                code, state = process.poll(), _read(out / f"running-{i}.json")
                heard[i] = time.time() if state else heard[i]
                if late:
                    reason = "out of time, left for the next call"
                elif code is not None:
                    reason = (state or {}).get("lost") or f"its process died: {_exit_text(code)}"
                elif state and time.time() > state["ends"]:
                    reason = f"did not end within {state['limit']:g} s"
                elif not state and time.time() - heard[i] > silent:
                    reason = f"was at no unit for {silent:g} s"
                else:
                    continue
                stop(i)  # and compilers that it started
                if code == 0:
                    continue
                if state:
                    _record(state, out, reason, late, stream)
                    say(f"{state['unit']}: {reason}")
                elif not late:  # died between units, perhaps unable to start
                    failures[i] += 1
                    say(f"worker {i}: {reason}")
                if not late and failures[i] < 2:
                    start(i)
        return max(failures.values()) < 2
    finally:
        stop(*running)
        for i in range(len(commands)):
            (out / f"running-{i}.json").unlink(missing_ok=True)
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, before)


def _record(
    state: dict[str, Any], out: pathlib.Path, reason: str, late: bool, stream: pathlib.Path | None
) -> None:
    """Writes why a unit did not end.   late: it may need just the time that was left, which is no
    failure: its document so far stays, and `work` takes it last.
    """
    name, document = state["unit"], state["document"]
    if late:
        before = None if state["saved"] else documents(out).get(name)
        before = before or {**document, "unfinished": True}
        append(out / FILE, name, {**before, "late": True})
        return
    now = time.time()
    document = {**document, "at": now, "seconds": now - state["since"], "error": reason}
    append(out / FILE, name, document)
    if stream is not None:
        append(stream, name, document)


def _exit_text(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


def kill(process: subprocess.Popen) -> None:
    """Kills a process that has a session of its own, with all its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _read(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def has_succeeded(document: dict[str, Any] | None) -> bool:
    """Whether a unit's document is there and records no error."""
    return bool(document) and not document.get("error")


def done() -> None:
    """Ends a worker immediately, since Python's and CUDA's exit handlers can hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def started(proc: pathlib.Path = pathlib.Path("/proc")) -> float:
    """When this process started, before any import; the current time if the system does not
    report it.
    """
    try:
        ticks = int((proc / "self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float((proc / "uptime").read_text().split()[0])
        return time.time() - max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.time()


def worker_command(arguments: Sequence[str], **task: Any) -> list[str]:
    """The command line of a module and its arguments as a worker with this task (see
    `parse_task`).
    """
    return [
        sys.executable,
        "-m",
        *arguments,
        "--task",
        json.dumps({**task, "parent": os.getpid()}),
    ]


def parse_task(argv: Sequence[str]) -> tuple[list[str], dict[str, Any] | None]:
    """A command's arguments, and its task from `worker_command`; None if it is not a worker."""
    argv = list(argv)
    return (
        (argv[:-2], json.loads(argv[-1]))
        if len(argv) > 1 and argv[-2] == "--task"
        else (argv, None)
    )
