"""The table of kills: a row for each place, in a file of JSON lines."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.bench import sources
from tilewright_lab.server_torture.points import Place, places

LAB = pathlib.Path(__file__).parent
COUNTING = ("command.py", "table.py")  # how kills are counted changes none
# What a server computes and keeps; what its ops compute, their own tests hold.
SOURCES = ("server/*.py", "trainer/bank.py", "trainer/engine.py", "trainer/checkpoint/*.py")
PACKAGES = ("torch", "transformers", "fastapi", "uvicorn", "pydantic", "protobuf", "zstandard")
RANKS = (1, 2)
Row = dict[str, Any]


def unit(place: Place, ranks: int) -> str:
    return place.name if ranks == 1 else f"{place.name}, of {ranks} ranks"


def units() -> list[str]:
    return [unit(place, ranks) for ranks in RANKS for place in places(ranks)]


@functools.cache
def digest() -> str:
    """The digest of the sources that a row depends on."""
    paths = [path for pattern in SOURCES for path in sources.PACKAGE.glob(pattern)]
    own = [path for path in LAB.glob("*.py") if path.name not in COUNTING]
    return sources.of_files([*paths, *own])


@dataclasses.dataclass
class Table:
    """file: None: what is written is kept in memory alone."""

    file: pathlib.Path | None
    rows: dict[str, Row] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, file: pathlib.Path | None) -> Table:
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        return cls(file, {row["unit"]: row for row in map(json.loads, lines)})

    def kills(self, every: Sequence[str]) -> int:
        """How many there were by today's sources."""
        return sum(self._today(name).get("kills", 0) for name in every)

    def _today(self, name: str) -> Row:
        row = self.rows.get(name, {})
        return row if row.get("digest") == digest() else {}

    def add(self, seconds: Mapping[str, Sequence[float]], wrong: Mapping[str, list[str]]) -> None:
        """Adds kills by unit, with the seconds to the next result of each, and writes the file."""
        for name in {*seconds, *wrong}:
            row = self._today(name)
            every = sorted([*row.get("seconds", ()), *(round(s, 2) for s in seconds.get(name, ()))])
            self.rows[name] = {
                "unit": name,
                "kills": len(every),
                "wrong": [*row.get("wrong", ()), *wrong.get(name, ())],
                "median_s": round(statistics.median(every), 2) if every else None,
                "max_s": max(every, default=None),
                "seconds": every,
                "digest": digest(),
                **_now(),
            }
        if self.file is not None:
            known = [name for name in units() if name in self.rows]
            aside = self.file.with_suffix(".new")
            aside.write_text("".join(json.dumps(self.rows[name]) + "\n" for name in known))
            os.replace(aside, self.file)


def _now() -> Row:
    """The commit, the date and the versions of a row."""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    said = subprocess.run(command, cwd=LAB, capture_output=True, text=True)
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    date = datetime.date.today().isoformat()
    return {"commit": said.stdout.strip(), "date": date, "versions": versions}
