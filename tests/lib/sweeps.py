"""Tables of what is too long for `make test`, which runs a fixed part of each.

    python -m tests.lib.sweeps            # which rows are not of today's sources
    python -m tests.lib.sweeps --strict   # and exit code 1 if there are any, or if one is wrong

A sweep has a command, which goes on where it ended and writes a row for each unit, with the digest
of what the row depends on, the commit and the date.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
# As pytest has them, for commands that import this first.
sys.path[:0] = [p for p in (str(ROOT / "lab"), str(ROOT / "tests/lib")) if p not in sys.path]
Row = dict[str, Any]


class Sweep(NamedTuple):
    """what: of what the rows are.   digests: unit -> of what its row depends on, today.
    rows: unit -> row, of which `digest` is as it was, and `wrong` lists what does not hold.
    """

    what: str
    command: str
    digests: Callable[[], Mapping[str, str]]
    rows: Callable[[], Mapping[str, Row]]

    def old(self) -> list[str]:
        """Units without a row of today's sources."""
        rows = self.rows()
        return [u for u, now in self.digests().items() if rows.get(u, {}).get("digest") != now]

    def wrong(self) -> list[str]:
        return [unit for unit, row in self.rows().items() if row["wrong"]]

    def told(self) -> str:
        """One line."""
        old, of, wrong = self.old(), len(self.digests()), self.wrong()
        text = f"{self.what}: {of - len(old)} of {of} rows are of today's sources"
        if old:
            text += f"; not {', '.join(old[:6])}{' ...' if len(old) > 6 else ''} ({self.command})"
        return text + (f"; WRONG: {', '.join(wrong)}" if wrong else "")


class Table(NamedTuple):
    """A file of JSON lines, each the row of a unit."""

    file: pathlib.Path

    def rows(self) -> dict[str, Row]:
        """unit -> row, its last."""
        if not self.file.exists():
            return {}
        return {row["unit"]: row for row in map(json.loads, self.file.read_text().splitlines())}

    def write(self, row: Row, units: Container[str]) -> None:
        """Adds a row, or replaces it, with the commit and the date. Rows of other than these units
        go.
        """
        rows = {**self.rows(), row["unit"]: {**row, **now()}}
        aside = self.file.with_suffix(".new")
        aside.write_text("".join(json.dumps(rows[u]) + "\n" for u in sorted(rows) if u in units))
        os.replace(aside, self.file)


def go_on(sweep: Sweep, table: Table, found: Iterable[tuple[str, Row]]) -> None:
    """Writes rows as they are found, and says of each what is wrong.

    found: units and their rows, with `wrong`.
    """
    digests = sweep.digests()
    for unit, row in found:
        table.write({"unit": unit, **row, "digest": digests[unit]}, digests)
        print(f"{unit}: {'; '.join(row['wrong']) or 'as it should be'}", flush=True)
    print(sweep.told())


def beside(
    units: Iterable[str], row_of: Callable[[str], Row], jobs: int
) -> Iterator[tuple[str, Row]]:
    """Units and their rows.   row_of: is called by threads: the work is a process's."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(row_of, unit): unit for unit in units}
        for done in concurrent.futures.as_completed(waiting):
            yield waiting[done], done.result()


def now() -> Row:
    """The commit and the date of a row."""
    said = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return {"commit": said.stdout.strip(), "date": datetime.date.today().isoformat()}


def truth() -> Sweep:
    """The losses of the trainer beside float64: a row a layout."""
    folder = "bench/results/truth"

    def digests() -> dict[str, str]:
        from bench import truth

        return dict.fromkeys(truth.LAYOUTS, truth.code())

    def rows() -> dict[str, Row]:
        from bench import truth

        found: dict[str, Row] = {}
        for row in json.loads((ROOT / folder / truth.FILE).read_text())["rows"]:
            one = found.setdefault(row["layout"], {"digest": row.get("code"), "wrong": []})
            one["digest"] = one["digest"] if one["digest"] == row.get("code") else None
            one["wrong"] += [row["loss"]] if truth.share(row) > 1 else []
        return found

    return Sweep("losses beside float64", f"python -m bench truth --out {folder}", digests, rows)


def torture() -> Sweep:
    """Kills of a server: a row for each process, point and kind of request."""
    file = ROOT / "tests/server/torture.jsonl"

    def digests() -> dict[str, str]:
        from tilewright_lab.server_torture import table

        return dict.fromkeys(table.units(), table.digest())

    command = "tilewright server-torture --table tests/server/torture.jsonl"
    return Sweep("kills of a server", command, digests, Table(file).rows)


def every() -> list[Sweep]:
    from tests.families.each import SWEEPS
    from tests.mutations.sweep import SWEEP as faults
    from tests.plants.sweep import SWEEP as plants
    from tests.ptx.sweep import SWEEP as compiled

    return [compiled, plants, faults, *SWEEPS.values(), truth(), torture()]


def main(arguments: list[str]) -> int:
    bad = False
    for sweep in every():
        try:
            print(sweep.told())
            bad |= bool(sweep.old() or sweep.wrong())
        except ModuleNotFoundError as error:
            print(f"{sweep.what}: what they depend on is not installed: {error}")
            bad = True
    return int(bad and "--strict" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
