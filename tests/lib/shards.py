"""The order of test files, and their shards: by the seconds that each took (tests/seconds.json).

    python tests/lib/shards.py JUNIT.xml ...     # writes tests/seconds.json, from pytest --junitxml
    python tests/lib/shards.py 2/4 lint docs ... # prints those of these that are in shard 2 of 4

A file is run by one process, since its tests share fixtures. The longest files start first: if one
started last, the other processes would wait for it.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence

ROOT = pathlib.Path(__file__).parents[2]
FILE = ROOT / "tests/seconds.json"
# Not long, but on a GPU what says first whether the rest is worth its time.
FIRST = "tests/ops/test_gpu_risks.py"


def parsed(text: str) -> tuple[int, int]:
    """Shard i of n, from "i/n". Raises ValueError."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    i, n = map(int, found.groups()) if found else (0, 0)
    if not 1 <= i <= n:
        raise ValueError(f"a shard is I/N with 1 <= I <= N, such as 2/4, got {text!r}")
    return i, n


@functools.cache
def seconds() -> dict[str, float]:
    """Test file, relative to the repository -> seconds, summed over its tests."""
    return json.loads(FILE.read_text())


def ordered(files: Iterable[str]) -> list[str]:
    """The longest first, after FIRST and those that have not been timed."""
    known = seconds()
    return sorted({*files}, key=lambda f: (f != FIRST, -known.get(f, float("inf")), f))


def shard(files: Iterable[str], i: int, n: int) -> set[str]:
    """The files of shard i of n, whose sums of seconds are about the same."""
    known, sums, found = seconds(), [0.0] * n, set()
    typical = sorted(known.values())[len(known) // 2] if known else 1.0
    for file in ordered(files):
        at = sums.index(min(sums))
        sums[at] += known.get(file, typical)
        if at == i - 1:
            found.add(file)
    return found


def in_turn(names: Sequence[str], i: int, n: int) -> list[str]:
    """Those of these names that are in shard i of n."""
    return [*names[i - 1 :: n]]


def cases(junit: str) -> Iterable[tuple[str, str, ET.Element]]:
    """File, name and element of each test of a report."""
    for case in ET.parse(junit).iter("testcase"):
        parts = case.get("classname", "").split(".")
        while parts and not (ROOT / ("/".join(parts) + ".py")).is_file():
            parts.pop()  # a class within the file
        if parts:
            yield "/".join(parts) + ".py", case.get("name", ""), case


def write(reports: Sequence[str]) -> None:
    sums: dict[str, float] = {}
    for report in reports:
        for file, _, case in cases(report):
            sums[file] = sums.get(file, 0.0) + float(case.get("time", 0))
    rows = (f"{json.dumps(file)}: {sums[file]:.0f}" for file in sorted(sums))
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    first, *rest = sys.argv[1:]
    if first.endswith(".xml"):
        write([first, *rest])
    else:
        print(*in_turn(rest, *parsed(first)))
