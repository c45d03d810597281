"""Runs many small pieces of work within a budget of time, each in a file of its own, whatever they do.

A `Unit` makes one JSON document. `work` makes those of one process, one after another, and skips what is on disk from
the same sources on the same device. `supervise` runs such processes and watches them: it ends one that hangs or that
time has run out for, writes down what it was at, and starts another for the rest. So a call always ends in time, a
crash costs one unit, and the next call goes on where this one stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.bench import timing
from tilewright.bench.report import write_json

SCHEMA = 1
FINISH = 4.0   # seconds at the end of a budget that are kept for writing what was found


@dataclass(frozen=True)
class Unit:
    """One piece of work.

    name: "kind/rest", and the path of its file below the folder.   make: returns the document, without "meta".
    blank: the document to write, with an "error", if it cannot be made.   limit: seconds after which it is given up.
    """

    name: str
    make: Callable[[], dict[str, Any]]
    blank: dict[str, Any]
    limit: float = 180.0

    def path(self, out: pathlib.Path) -> pathlib.Path:
        return out / f"{self.name}.json"


def current(unit: Unit, out: pathlib.Path, meta: dict[str, Any], keep: bool = False) -> dict[str, Any] | None:
    """The unit's document, if it is on disk and was made by these sources on this device. keep: by any sources."""
    try:
        document = json.loads(unit.path(out).read_text())
        same = ("device",) if keep else ("device", "source", "versions")
        return document if all(document["meta"].get(n) == meta.get(n) for n in same) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def work(units: Iterable[Unit], out: pathlib.Path, until: float, meta: dict[str, Any], *, keep: bool = False,
         slot: str = "0", say: Callable[[str], object] = print, describe: Callable[[dict], str] = lambda d: "") -> None:
    """Makes what is missing. Begins no unit after `until` (seconds since the epoch)."""
    state = out / f"running-{slot}.json"
    try:
        for unit in units:
            if current(unit, out, meta, keep) is not None:
                continue
            if time.time() >= until:
                break
            write_json(state, {"unit": unit.name, "since": time.time(), "limit": unit.limit, "meta": meta,
                               "blank": unit.blank})
            begun = time.perf_counter()
            try:
                document = unit.make()
            except Exception as error:   # what one unit raises must not lose the others
                document = {**unit.blank, "error": timing.first_line(error)}
            seconds = time.perf_counter() - begun
            write_json(unit.path(out), {"schema": SCHEMA, "meta": meta, "seconds": seconds, **document})
            state.unlink()   # a process that dies now dies between units
            say(f"{unit.name} ({seconds:.1f} s) {document.get('error') or describe(document)}")
    finally:
        state.unlink(missing_ok=True)


def supervise(commands: Sequence[Sequence[str]], out: pathlib.Path, until: float, *,
              say: Callable[[str], object] = print, poll: float = 0.1) -> None:
    """Runs the commands side by side, each a process that calls `work` with its index as slot, until all have ended.

    One that dies, or is at a unit for longer than its limit, is started again after that unit was written down as
    failed. At `until` what still runs is killed, and the unit it was at is left for the next call.
    """
    running: dict[int, subprocess.Popen] = {}
    failures = dict.fromkeys(range(len(commands)), 0)

    def start(i):
        (out / f"running-{i}.json").unlink(missing_ok=True)
        running[i] = subprocess.Popen(list(commands[i]), start_new_session=True)

    try:
        for i in range(len(commands)):
            start(i)
        while running:
            time.sleep(poll)
            late = time.time() >= until
            for i, process in list(running.items()):
                state = _read(out / f"running-{i}.json")
                code = process.poll()
                reason = None
                if code is not None:
                    del running[i]
                    if code == 0 or late:
                        continue
                    reason = f"its process died: {_died(code)}"
                elif late:
                    _kill(process)
                    del running[i]
                    (out / f"running-{i}.json").unlink(missing_ok=True)
                    if state:
                        say(f"{state['unit']}: out of time, left for the next call")
                    continue
                elif state and time.time() - state["since"] > state["limit"]:
                    _kill(process)
                    del running[i]
                    reason = f"did not end within {state['limit']:g} s"
                else:
                    continue
                if state:
                    write_json(out / f"{state['unit']}.json",
                               {"schema": SCHEMA, "meta": state["meta"], "seconds": time.time() - state["since"],
                                **state["blank"], "error": reason})
                    say(f"{state['unit']}: {reason}")
                else:   # died between units, as when it cannot even start: not for ever
                    failures[i] += 1
                    say(f"worker {i}: {reason}")
                if failures[i] < 2:
                    start(i)
    finally:
        for i, process in running.items():
            _kill(process)
            (out / f"running-{i}.json").unlink(missing_ok=True)


def _died(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


def _kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):   # the whole session: compilers it has started too
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def split(units: Sequence[Unit], worker: int, of: int) -> Iterator[Unit]:
    """The share of one of several workers."""
    return (u for i, u in enumerate(units) if i % of == worker)


def again(arguments: Sequence[str], *more: str) -> list[str]:
    """This command in another process, with more arguments."""
    return [sys.executable, "-m", "tilewright.bench", *arguments, *more]
