"""What `tilewright verify` found: findings, the table, and where it is kept."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

from tilewright_lab.verify.modules import Row

WORST = 12  # modules that the table shows
MOST = 20  # findings that it shows
WHOLE_LIMIT = 4  # end to end, roundings compound in another order


@dataclasses.dataclass(frozen=True)
class Finding:
    """A break.

    module: its path in the model; the model's class name for the model itself.
    message: what differs, by how much, and why, as far as it was found.
    units: by how many contract units; infinite for what has no measure.
    """

    module: str
    message: str
    units: float = math.inf

    def __str__(self) -> str:
        return f"{self.module}: {self.message}"


def spoken(what: str) -> str:
    """A row's tensor in words."""
    kind, _, rest = what.partition(" ")
    if kind == "input":
        name, _, child = rest.partition(" of ")
        return f"{name} for {child}"
    if what.startswith("gradient to "):
        return f"gradient of the output of {what.removeprefix('gradient to ')}"
    return what


def number(value: float) -> str:
    if value >= 1000:
        return f"{value:.1e}"
    return f"{value:.3g}" if value >= 0.01 else "0.00" if value == 0 else f"{value:.0e}"


def apart(value: float, other: float, least: int = 2) -> tuple[str, str]:
    """Two numbers with as many digits as tell them apart, and `least` at least."""
    for digits in range(least, 17):
        pair = f"{value:.{digits}g}", f"{other:.{digits}g}"
        if pair[0] != pair[1] or value == other:
            return pair
    return repr(value), repr(other)


@dataclasses.dataclass
class Verification:
    """The result of `tilewright.verify`. `str()` is the table.

    model: its class.   dtype: the dtype of its parameters.   scenes: the inputs it ran on.
    findings: the breaks, values before gradients, worst first; empty if there are none.
    rows: a `Row` for every compared tensor, worst first.
    whole: those of the whole model, end to end.
    seen: which implementation ran where: (class, implementation, modules).
    left: what `accelerate` left, and why, by part; empty if it was not called.
    notes: what was not exercised or not compared, and why.
    """

    model: str
    dtype: str
    scenes: tuple[str, ...]
    findings: list[Finding]
    rows: list[Row]
    whole: list[Row]
    seen: Counter[tuple[str, str]]
    left: dict[str, str]
    notes: list[str]

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def worst(self) -> list[Row]:
        """The worst row of every module, worst module first."""
        first: dict[str, Row] = {}
        for row in self.rows:
            first.setdefault(row.path, row)
        return list(first.values())

    def name(self, path: str) -> str:
        return path or self.model

    def __str__(self) -> str:
        return self.table()

    def table(self, every: bool = False) -> str:
        """every: a line for every module, not for the worst alone."""
        lines = [
            f"verify: {self.model}, {self.dtype}, on {', '.join(self.scenes)} input; contract "
            "units: 1 is twice eager's error and a rounding",
            "",
        ]
        lines += [*self._findings(), ""]
        worst = self.worst()
        shown = worst if every else worst[:WORST]
        lines += self._rows(shown)
        if len(worst) > len(shown):
            lines.append(f"... and {len(worst) - len(shown)} more modules (--all)")
        lines += ["", "end to end"]
        for what in ("loss", "logits", "last_hidden_state", "gradient"):
            rows = [r for r in self.whole if r.what.startswith(what)]
            if rows:
                row = max(rows, key=lambda r: r.units)
                lines.append(
                    f"  {number(row.units):>8}  {row.what} ({row.scene}): error {row.error:.1e}, "
                    f"eager's {row.eager:.1e}"
                )
        lines += ["", "ran by"]
        for (kind, by), count in sorted(self.seen.items()):
            lines.append(f"  {count:>4} {kind}: {by}")
        lines += [f"  left {part}: {reason}" for part, reason in self.left.items()]
        if self.notes:
            lines += ["", "notes", *(f"  {note}" for note in self.notes)]
        return "\n".join(lines)

    def _findings(self) -> list[str]:
        if self.ok:
            return ["no findings"]
        lines = [f"{len(self.findings)} finding{'s' if len(self.findings) > 1 else ''}"]
        lines += [f"  {finding}" for finding in self.findings[:MOST]]
        if len(self.findings) > MOST:
            lines.append(f"  ... and {len(self.findings) - MOST} more")
        return lines

    def _rows(self, rows: list[Row]) -> list[str]:
        cells = [("units", "module", "tensor", "input", "error", "eager's", "ran by")]
        cells += [
            (
                number(r.units), self.name(r.path), spoken(r.what), r.scene, f"{r.error:.1e}",
                f"{r.eager:.1e}", r.by or "-",
            )
            for r in rows
        ]  # fmt: skip
        wide = [max(len(c[i]) for c in cells) for i in range(6)]
        return [
            "  ".join([c[0].rjust(wide[0]), *(c[i].ljust(wide[i]) for i in range(1, 6)), c[6]])
            for c in cells
        ]
