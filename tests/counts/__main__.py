"""What the tests cover: cells of ops, and lines and branches of the code.

    python -m tests.counts FOLDER             # writes tests/counts.json; goes on where FOLDER ends
    python -m tests.counts --cells JUNIT.xml  # cells alone, from a report of pytest --junitxml

The first needs coverage (https://coverage.readthedocs.io) and all that `make test` needs, and takes
an hour or two on two cores: the suite runs in parts, each under coverage, in processes that tests
start too. Kernels' Python is counted as Triton's interpreter runs it.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests.counts import cells
from tests.lib.sweeps import now

ROOT = pathlib.Path(__file__).parents[2]
FILE = ROOT / "tests/counts.json"
PARTS = 8
CONFIG = """
[run]
branch = true
parallel = true
source = {sources}
data_file = {data}
patch = _exit, fork, subprocess
core = ctrace
disable_warnings = no-data-collected, module-not-imported, already-imported, couldnt-parse
"""
SOURCES = ("tilewright", "lab/tilewright_lab", "bench")


def configured(file: pathlib.Path, data: pathlib.Path) -> str:
    """The path of a configuration of coverage, which this writes."""
    sources = ",".join(str(ROOT / name) for name in SOURCES)
    file.write_text(CONFIG.format(sources=sources, data=data))
    return str(file)


def run(folder: pathlib.Path, part: int) -> None:
    report, own = folder / f"{part}.xml", folder / str(part)
    if report.exists():
        return
    own.mkdir(parents=True, exist_ok=True)
    for old in own.iterdir():  # of a run that was stopped
        old.unlink()
    config = configured(folder / f"{part}.cfg", own / "coverage")
    shown = folder / f"{part}.partial.xml"
    command = f"-m coverage run --rcfile={config} -m pytest -q -n 3 --dist loadfile"
    command += f" --no-loadscope-reorder --fixed-part --shard={part}/{PARTS} --junitxml={shown}"
    environment = {**os.environ, "TILEWRIGHT_REQUIRE": "cpp,triton", "OMP_WAIT_POLICY": "PASSIVE"}
    with (folder / f"{part}.log").open("w") as log:
        ended = subprocess.run(
            [sys.executable, *command.split()], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
    if ended.returncode not in (0, 1):  # 1: some tests failed
        raise SystemExit(f"part {part} ended with {ended.returncode}: {folder / f'{part}.log'}")
    shown.rename(report)


def files(folder: pathlib.Path, parts: Sequence[pathlib.Path]) -> dict[str, Any]:
    """File -> what coverage reports of it, from the data that processes left in the parts."""
    import coverage

    whole = coverage.Coverage(config_file=configured(folder / "all.cfg", folder / "coverage"))
    whole.combine(list(map(str, parts)), keep=True)
    whole.json_report(outfile=str(folder / "all.json"))
    found = json.loads((folder / "all.json").read_text())["files"]
    return {os.path.relpath(ROOT / name, ROOT): file for name, file in found.items()}


def covered(folder: pathlib.Path) -> dict[str, dict[str, list[int]]]:
    """Package -> lines and branches: how many were run, of how many."""
    found: dict[str, dict[str, list[int]]] = {}
    for name, file in files(folder, [folder / str(i) for i in range(1, PARTS + 1)]).items():
        path = pathlib.PurePath(name)
        package = "/".join(path.parts[: min(2, len(path.parts) - 1)])
        sums = found.setdefault(package, {"lines": [0, 0], "branches": [0, 0]})
        s = file["summary"]
        for kind, pair in (
            ("lines", (s["covered_lines"], s["num_statements"])),
            ("branches", (s["covered_branches"], s["num_branches"])),
        ):
            sums[kind] = [a + b for a, b in zip(sums[kind], pair, strict=True)]
    return dict(sorted(found.items()))


def write(reports: Sequence[str], folder: pathlib.Path | None) -> None:
    found = {**now(), "tests": cells.outcomes(reports), "cells": cells.counted(reports)}
    if folder is not None:
        found["covered"] = covered(folder)
    FILE.write_text(cells.shown(found))


def main(arguments: Sequence[str]) -> None:
    if arguments[0] == "--cells":
        write(arguments[1:], None)
        return
    folder = pathlib.Path(arguments[0]).resolve()
    for part in range(1, PARTS + 1):
        run(folder, part)
    write([str(folder / f"{part}.xml") for part in range(1, PARTS + 1)], folder)


if __name__ == "__main__":
    main(sys.argv[1:])
