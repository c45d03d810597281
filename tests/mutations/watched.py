"""The tests that ought to see a fault, in order, in a process of their own: started by __main__.py
in the copy that has the fault.

    python -m tests.mutations.watched REPORT SECONDS FAULT   # FAULT: JSON

Writes what happened to REPORT, a line of JSON for each event; ends at the first red test, or after
SECONDS between two tests.
"""

from __future__ import annotations

import inspect
import json
import pathlib
import re
import sys
import time

import pytest

from .choose import RUNS_OF, files, words
from .faults import Fault


class Watch:
    def __init__(self, report: pathlib.Path, seconds: float, fault: Fault):
        self.report, self.end = report, time.monotonic() + seconds
        self.own, self.others = files(fault)
        self.seen_by = fault.seen_by
        runs = RUNS_OF.get(pathlib.PurePath(fault.file).stem)
        self.runs = None if runs is None else re.compile(runs)
        self.name, modules = words(fault)
        self.named = re.compile(rf"\b{re.escape(self.name)}\b")
        self.of_module = re.compile("|".join(map(re.escape, modules)))

    def say(self, **event) -> None:
        with self.report.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def place(self, item) -> tuple[int, int] | None:
        """Where a test comes: those that name the function, then by file; None: it is not run."""
        file = item.nodeid.partition("::")[0]
        if self.runs is not None:  # of compiled kernels, which take long
            wanted = self.runs.search(item.nodeid) and "planted" not in item.nodeid
            return (0, 0) if wanted else None
        try:
            text = inspect.getsource(item.function) + item.nodeid
        except (OSError, AttributeError):
            text = item.nodeid
        named = self.named.search(text)
        if self.seen_by and item.nodeid.startswith(self.seen_by):
            return -1, 0
        if file in self.own:
            return (0 if named else 1), self.own.index(file)
        if named or self.of_module.search(text):
            return (0 if named else 2), 9 + self.others.index(file)
        return None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items) -> None:
        placed = [(place, item) for item in items if (place := self.place(item)) is not None]
        chosen = [item for _, item in sorted(placed, key=lambda pair: pair[0])]
        kept = set(map(id, chosen))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = chosen
        self.say(event="chosen", tests=len(items))

    def pytest_runtest_logstart(self, nodeid) -> None:
        self.say(event="started", test=nodeid)

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash else str(report.longrepr)
            self.say(event="red", test=report.nodeid, why=why.strip().partition("\n")[0][:200])

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            why = str(report.longrepr).strip().splitlines()[-1][:200]
            self.say(event="red", test=report.nodeid, why=why)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        result = yield
        if nextitem is not None and time.monotonic() > self.end:
            item.session.shouldstop = "the limit has passed"
            self.say(event="limit")
        return result


def main() -> int:
    report, seconds, fault = sys.argv[1:]
    watch = Watch(pathlib.Path(report), float(seconds), Fault(**json.loads(fault)))
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=short"]
    code = pytest.main([*options, *watch.own, *watch.others], plugins=[watch])
    watch.say(event="end", code=int(code))
    return 0


if __name__ == "__main__":
    sys.exit(main())
