"""Runs many small pieces of work within a budget of time, each in a file of its own, whatever they
do.

A `Unit` makes one JSON document. `work` makes those of one process, one after another, and skips
what is on disk from the same sources, with the same options, on the same device. `supervise` runs
such processes and watches them: it ends one that hangs or that time has run out for, writes down
what it was at, and starts another for the rest. So a call always ends in time, a crash costs one
unit, and the next call goes on where this one stopped: first with what it did not reach, then with
what it had no time to finish, and it tries anew what failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
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
from tilewright.bench.store import write_json

SCHEMA = 1
FINISH = 5.0  # seconds at the end of a budget that are kept for writing what was found
# seconds that a worker may be at no unit: it imports, compiles its plan, or hangs as it ends
SILENT = 120.0
DYING = 10.0  # seconds that a killed process may take; one that is stuck in a driver takes for ever
ATTEMPTS = 3  # at what failed: a GPU may have been out of memory because somebody else was there
LOST = 70  # exit code of a process whose CUDA context is gone
POSTPONED = "postponed.json"


def _has_error(document: dict[str, Any]) -> bool:
    return bool(document.get("error"))


@dataclass(frozen=True)
class Unit:
    """One piece of work.

    name: "kind/rest", and the path of its file below the folder.   make: returns the document,
    without "meta".
    limit: seconds after which it is given up, from its begin or from when its file was last
    written.
    blank: the document to write, with an "error", if it cannot be made; a unit that writes its file
        itself while it is made, marked "unfinished", keeps what it wrote.
    options: what the result depends on beside sources, versions and device.
    failed: whether a document says that something raised, so that it is worth another attempt.
    source: digest of the sources that the result comes from; None: that of the call's "meta".
    """

    name: str
    make: Callable[[], dict[str, Any]]
    blank: dict[str, Any]
    limit: float = 180.0
    options: Mapping[str, Any] = field(default_factory=dict)
    failed: Callable[[dict[str, Any]], bool] = _has_error
    source: str | None = None

    def about(self, meta: dict[str, Any]) -> dict[str, Any]:
        """ "meta" of the call, as it is of this unit."""
        return meta if self.source is None else {**meta, "source": self.source}

    def path(self, out: pathlib.Path) -> pathlib.Path:
        return out / f"{self.name}.json"


def same(document: dict[str, Any], meta: dict[str, Any], keep: bool = False) -> bool:
    """Whether a document was made on this device and (but with keep) by these sources and
    versions.
    """
    names = ("device",) if keep else ("device", "source", "versions")
    return all(document["meta"].get(n) == meta.get(n) for n in names)


def current(
    unit: Unit,
    out: pathlib.Path,
    meta: dict[str, Any],
    keep: bool = False,
    since: float = float("inf"),
) -> dict[str, Any] | None:
    """The unit's document, if it need not be made: it is on disk, whole, with these options and on
    this device.

    keep: made by any sources and versions.   since: when this call began; what failed before then
    is made again, until it has failed ATTEMPTS times.
    """
    try:
        document = json.loads(unit.path(out).read_text())
        if not same(document, unit.about(meta), keep):
            return None
        if json.loads(json.dumps(unit.options)) != document.get("options", {}) or document.get(
            "unfinished"
        ):
            return None
        again = since != float("inf") and unit.failed(document) and document.get("at", 0.0) < since
        return None if again and document.get("attempts", 1) < ATTEMPTS else document
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _attempts(unit: Unit, out: pathlib.Path, meta: dict[str, Any], keep: bool) -> int:
    """Which attempt this is since the unit could last be made with these sources and options."""
    before = current(unit, out, meta, keep)
    return before.get("attempts", 1) + 1 if before is not None and unit.failed(before) else 1


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
    """Makes what is missing. Begins no unit after `until` (seconds since the epoch).

    stream: a file to which each document is appended when it is made, in one line, under "unit" its
        name: what is kept of a machine that is taken away.
    now: fields of "meta" that are taken after each unit anew, such as the date and the clocks.
    """
    state = out / f"running-{slot}.json"
    postponed = _read(out / POSTPONED) or {}

    def last(unit):  # what was never tried comes first
        found = current(unit, out, meta, keep)
        return unit.name in postponed, found is not None and unit.failed(found)

    try:
        for unit in sorted(units, key=last):
            if current(unit, out, meta, keep, since) is not None:
                continue
            if time.time() >= until:
                break
            common = {
                "schema": SCHEMA,
                "options": dict(unit.options),
                "attempts": _attempts(unit, out, meta, keep),
            }
            running = {
                "unit": unit.name,
                "since": time.time(),
                "limit": unit.limit,
                "parts": list(unit.blank),
                "blank": {**common, **unit.blank, "meta": unit.about(meta)},
            }
            write_json(state, running)
            begun = time.perf_counter()
            try:
                try:
                    document = unit.make()
                    problem = None
                except Exception as error:  # what one unit raises must not lose the others
                    document = {
                        **_so_far(unit.path(out), unit.blank, list(unit.blank)),
                        "error": timing.first_line(error),
                    }
                    problem = error
                if problem is not None:
                    timing.still_there(problem)
            except timing.DeviceLost as lost:
                write_json(
                    state, {**running, "lost": str(lost)}
                )  # the supervisor writes it down and starts another
                sys.stdout.flush()
                os._exit(LOST)
            document = {
                **common,
                "meta": {**unit.about(meta), **now()},
                "seconds": time.perf_counter() - begun,
                "at": time.time(),
                **document,
            }
            try:
                write_json(unit.path(out), document)
            except ValueError as error:  # a number that JSON does not have
                document = {**document, **unit.blank, "error": timing.first_line(error)}
                write_json(unit.path(out), document)
            if stream is not None:
                with stream.open("a") as file:  # one write: lines of several workers do not mix
                    file.write(json.dumps({"unit": unit.name, **document}, allow_nan=False) + "\n")
            state.unlink()  # a process that dies now dies between units
            print(
                f"{unit.name} ({document['seconds']:.1f} s) "
                f"{document.get('error') or describe(document)}",
                flush=True,
            )
    finally:
        state.unlink(missing_ok=True)


def _so_far(path: pathlib.Path, blank: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """`blank`, with these parts of what a unit has written before it ended in the middle."""
    before = _read(path)
    return (
        {**blank, **{n: before[n] for n in parts if n in before}}
        if before and before.get("unfinished")
        else blank
    )


def end_with_parent(parent: int) -> None:
    """A worker whose supervisor, this process, is killed is killed too (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it was gone before the kernel was told
        os._exit(1)


class Unusable(Exception):
    """A folder for results that cannot be written, or that another call is at work in."""


@contextlib.contextmanager
def alone(out: pathlib.Path) -> Iterator[None]:
    """Makes the folder and holds it for this call. Raises Unusable where that cannot be."""
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


def supervise(
    commands: Sequence[Sequence[str]],
    out: pathlib.Path,
    until: float,
    *,
    say: Callable[[str], object] = print,
    poll: float = 0.1,
    silent: float = SILENT,
) -> bool:
    """Runs the commands side by side, each a process that calls `work` with its index as slot,
    until all have ended.

    One that dies, or is at a unit for longer than its limit, is started again after that unit was
    written down as failed. At `until` what still runs is killed, and the unit it was at is left for
    the next call, which takes it last.
    Returns whether no worker was given up: one that twice died, or was silent, at no unit.
    """
    running: dict[int, subprocess.Popen] = {}
    heard: dict[int, float] = {}  # when a worker was last seen at a unit
    failures = dict.fromkeys(range(len(commands)), 0)

    def start(i):
        (out / f"running-{i}.json").unlink(missing_ok=True)
        running[i], heard[i] = (
            subprocess.Popen(list(commands[i]), start_new_session=True),
            time.time(),
        )

    def stop(*which):
        processes = [running.pop(i) for i in which]
        for process in processes:
            kill(process)
        deadline = time.time() + DYING
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.time()))

    def terminated(*_):
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGTERM)
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, terminated)
    try:
        for i in range(len(commands)):
            start(i)
        while running:
            time.sleep(poll)
            late = time.time() >= until
            for i, process in list(running.items()):
                code = process.poll()
                state = _read(out / f"running-{i}.json")
                heard[i] = time.time() if state else heard[i]
                reason = None
                if code is not None:
                    stop(i)  # compilers that it had started are still there
                    if code == 0 or late:
                        continue
                    reason = (state or {}).get("lost") or f"its process died: {_died(code)}"
                elif late:
                    stop(i)
                    if state:
                        write_json(
                            out / POSTPONED,
                            {**(_read(out / POSTPONED) or {}), state["unit"]: time.time()},
                        )
                        say(f"{state['unit']}: out of time, left for the next call")
                    continue
                elif state and time.time() - _begun(state, out) > state["limit"]:
                    stop(i)
                    reason = f"did not end within {state['limit']:g} s"
                elif not state and time.time() - heard[i] > silent:
                    stop(i)
                    reason = f"was at no unit for {silent:g} s"
                else:
                    continue
                if state:
                    path, now = out / f"{state['unit']}.json", time.time()
                    write_json(
                        path,
                        {
                            **_so_far(path, state["blank"], state["parts"]),
                            "at": now,
                            "seconds": now - state["since"],
                            "error": reason,
                        },
                    )
                    say(f"{state['unit']}: {reason}")
                else:  # died between units, as when it cannot even start: not for ever
                    failures[i] += 1
                    say(f"worker {i}: {reason}")
                if failures[i] < 2:
                    start(i)
        return max(failures.values()) < 2
    finally:
        stop(*running)
        for i in range(len(commands)):
            (out / f"running-{i}.json").unlink(missing_ok=True)
        late_units = (_read(out / POSTPONED) or {}).items()
        if waiting := {n: t for n, t in late_units if not _made_since(out / f"{n}.json", t)}:
            write_json(out / POSTPONED, waiting)
        else:
            (out / POSTPONED).unlink(missing_ok=True)
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, before)


def _begun(state: dict[str, Any], out: pathlib.Path) -> float:
    """When the unit was begun, or has last written down a part of what it finds."""
    try:
        return max(state["since"], (out / f"{state['unit']}.json").stat().st_mtime)
    except OSError:
        return state["since"]


def _made_since(path: pathlib.Path, when: float) -> bool:
    found = _read(path)
    return (
        bool(found)
        and not found.get("unfinished")
        and not found.get("error")
        and found.get("at", 0.0) > when
    )


def _died(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


def kill(process: subprocess.Popen) -> None:
    """Ends a process that was started in a session of its own, and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _read(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def has_failed(path: pathlib.Path) -> bool:
    """Whether a unit's file says that it could not be made."""
    try:
        return bool(json.loads(path.read_text()).get("error"))
    except OSError:
        return False
    except ValueError:
        return True


def done() -> None:
    """Ends a worker, at once: what Python and CUDA do at their end can hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def started() -> float:
    """When this process was started, before it imported anything; now, where the system does
    not tell.
    """
    try:
        ticks = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(pathlib.Path("/proc/uptime").read_text().split()[0])
        return time.time() - max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.time()


def split(units: Sequence[Unit], worker: int, of: int) -> Iterator[Unit]:
    """The share of one of several workers."""
    return (u for i, u in enumerate(units) if i % of == worker)


def again(arguments: Sequence[str], **task: Any) -> list[str]:
    """This command in another process, as a worker with this task (see `a_task`)."""
    return [
        sys.executable,
        "-m",
        "tilewright.bench",
        *arguments,
        "--task",
        json.dumps({**task, "parent": os.getpid()}),
    ]


def a_task(argv: Sequence[str]) -> tuple[list[str], dict[str, Any] | None]:
    """A command's arguments, and what `again` told its process to do (None: it is no worker)."""
    argv = list(argv)
    return (
        (argv[:-2], json.loads(argv[-1]))
        if len(argv) > 1 and argv[-2] == "--task"
        else (argv, None)
    )
