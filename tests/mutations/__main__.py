"""Measures the tests: plants each fault of faults.json in a copy of the tree, and runs the tests
that ought to see it.

    python -m tests.mutations OUT.jsonl [--only ID,ID] [--limit 600] [--jobs 1]
    python -m tests.mutations OUT.jsonl --old        # those whose rows are not of today's sources
    python -m tests.mutations OUT.jsonl --clean      # the red tests without faults: all are green
    python -m tests.mutations OUT.jsonl --table      # writes README.md's table from OUT

A fault is a line of OUT, and the next call goes on with those that have none; the last line of a
fault counts. --only runs faults again. Tests that the limit ended before one was red make a fault
`unfinished`, which is not `green`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import pathlib
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

from . import cpp
from .faults import ROOT, Fault, load
from .table import digest, last_rows, old, write_table

HANGS = 100  # seconds that the last test has beyond the limit


def copied(target: pathlib.Path) -> None:
    """A copy of what git knows or would add, and of the built extensions."""
    said = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True,
        check=True,
    ).stdout.decode()  # fmt: skip
    built = [p.relative_to(ROOT) for p in (ROOT / "tilewright").glob("*.so")]
    for name in [*filter(None, said.split("\0")), *built]:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@contextlib.contextmanager
def planted(tree: pathlib.Path, fault: Fault):
    path = tree / fault.file
    before = path.read_text()
    # Python takes compiled code for that of a file of equal size and second.
    compiled = pathlib.Path(importlib.util.cache_from_source(str(path)))
    try:
        path.write_text(fault.applied(before))
        compiled.unlink(missing_ok=True)
        with cpp.built(tree, fault) if path.suffix == ".cpp" else contextlib.nullcontext():
            yield
    finally:
        path.write_text(before)
        compiled.unlink(missing_ok=True)


def environment(tree: pathlib.Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_WAIT_POLICY": "PASSIVE"}


def run(tree: pathlib.Path, fault: Fault, limit: float) -> dict:
    """A row: what its tests said of a fault."""
    began = time.monotonic()
    with planted(tree, fault), tempfile.TemporaryDirectory() as folder:
        report, log = pathlib.Path(folder, "report"), pathlib.Path(folder, "log")
        command = [sys.executable, "-m", "tests.mutations.watched", report, str(limit)]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, json.dumps(fault._asdict())], cwd=tree, env=environment(tree),
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(limit + HANGS)
            except subprocess.TimeoutExpired:
                pass
            finally:  # what a test has started and left, too
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        lines = report.read_text().splitlines() if report.exists() else []
        last = log.read_text().strip().splitlines()[-1:]
    return judged(fault, [json.loads(line) for line in lines], last, time.monotonic() - began)


def judged(fault: Fault, events: list[dict], last: list[str], seconds: float) -> dict:
    by_kind: dict[str, list[dict]] = {}
    for event in events:
        by_kind.setdefault(event["event"], []).append(event)
    started = [event["test"] for event in by_kind.get("started", [])]
    first, why = "", ""
    if reds := by_kind.get("red"):
        first, why = reds[0]["test"], reds[0]["why"]
    elif "end" not in by_kind:
        first, why = (
            started[-1] if started else "(the start)",
            f"hangs, or ends the process: {last}"[:200],
        )
    unseen = "unfinished" if "limit" in by_kind else "green"
    row = {k: v for k, v in fault._asdict().items() if k not in ("seen_by", "judgement")}
    return {
        **row,
        "chosen": sum(event["tests"] for event in by_kind.get("chosen", [])),
        "ran": len(started),
        "files": sorted({test.partition("::")[0] for test in started}),
        "result": "red" if first else unseen,
        "first": first,
        "why": why,
        "seconds": round(seconds, 1),
        "digest": digest(fault, first),
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT,
                                 capture_output=True, text=True).stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def run_all(faults: list[Fault], out: pathlib.Path, limit: float, jobs: int) -> None:
    waiting: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    for fault in faults:
        waiting.put(fault)
    writing = threading.Lock()

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            copied(pathlib.Path(folder))
            while True:
                try:
                    fault = waiting.get_nowait()
                except queue.Empty:
                    return
                row = run(pathlib.Path(folder), fault, limit)
                with writing, out.open("a") as file:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    print(
                        f"{row['id']} {row['result']} {row['seconds']} s", row["first"], flush=True
                    )

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def there(test: str) -> bool:
    """Whether a test still is, under its name."""
    file, _, name = test.partition("::")
    function = name.partition("[")[0].rpartition("::")[2]
    path = ROOT / file
    return bool(function) and path.is_file() and f"def {function}(" in path.read_text()


def clean(out: pathlib.Path) -> int:
    """Runs every test that was the first to be red, without a fault."""
    tests = sorted({row["first"] for row in last_rows(out).values() if "::" in row["first"]})
    with tempfile.TemporaryDirectory() as folder:
        copied(pathlib.Path(folder))
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
        return subprocess.run(
            [*command, *tests], cwd=folder, env=environment(pathlib.Path(folder))
        ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--only", default="", help="ids, with commas between them")
    parser.add_argument("--limit", type=float, default=600, help="seconds of each fault")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--old", action="store_true")
    parser.add_argument("--clean", action="store_true")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    out = given.out.resolve()
    if given.clean:
        return clean(out)
    if not given.table:
        only, faults = set(filter(None, given.only.split(","))), load()
        only |= set(old(out) if given.old else ())
        if wrong := only - {fault.id for fault in faults}:
            parser.error(f"--only: there are no faults {', '.join(sorted(wrong))}")
        done = last_rows(out)
        again = only or given.old
        chosen = [f for f in faults if (f.id in only if again else f.id not in done)]
        # What saw a fault before sees it first.
        seen = {name: row["first"] for name, row in done.items() if there(row["first"])}
        chosen = [f._replace(seen_by=seen.get(f.id, f.seen_by)) for f in chosen]
        run_all(chosen, out, given.limit, given.jobs)
    if given.table:
        write_table(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
