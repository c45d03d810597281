"""What the folder of a run says of its steps: rows of metrics.jsonl and checksums.jsonl, and
certificates.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
from typing import Any

from tilewright.core.files import write_text

METRICS = "metrics.jsonl"
CHECKSUMS = "checksums.jsonl"


def rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a file, if it is there, whose last line may be incomplete after a killed run."""
    entries = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def certificates(folder: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    """A run's certificates, in the order of the steps that they start at, with these."""
    named = [(re.fullmatch(r"certificate(?:_(\d+))?\.json", p.name), p) for p in folder.iterdir()]
    return sorted((int(m[1] or 0), p) for m, p in named if m)


def drop_after(
    folder: pathlib.Path, step: int, owed: bool = False, tested: int | None = None
) -> None:
    """Leaves what a folder says up to a step: a resumed run repeats the later ones, and certifies
    itself.   owed: and the evaluation after that step.   tested: and the test after this one.
    """
    kept = _up_to(folder / METRICS, step)
    if owed:
        kept = [r for r in kept if r["step"] < step or "grad_norm" in r]
    kept = [r for r in kept if r["step"] != tested or "test_loss" not in r]
    _write(folder / METRICS, kept)
    if (sums := folder / CHECKSUMS).is_file():
        _write(sums, _up_to(sums, step))
    for start, certificate in certificates(folder):
        if start >= step:
            certificate.unlink()


def _up_to(path: pathlib.Path, step: int) -> list[dict[str, Any]]:
    return [r for r in rows(path) if r["step"] <= step] if step else []


def _write(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(r) + "\n" for r in rows))
