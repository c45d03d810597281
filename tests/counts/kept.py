"""What some tests cover, line by line, so that shorter tests can be held against longer ones.

    python -m tests.counts.kept run OUT.json PATH ...       # these tests, under coverage
    python -m tests.counts.kept lost BEFORE.json AFTER.json # what AFTER covers no longer

A file or a function may be in several reports: `lost` takes any number of AFTER, and joins them.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence

from tests.counts.__main__ import ROOT, configured, files

# File -> lines, and branches as [from, to], that were run.
Covered = dict[str, dict[str, list]]


def read(folder: pathlib.Path) -> Covered:
    return {
        name: {"lines": file["executed_lines"], "branches": file["executed_branches"]}
        for name, file in files(folder, [folder]).items()
        if file["executed_lines"]
    }


def run(out: str, arguments: Sequence[str]) -> int:
    """pytest's exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        config = configured(folder / "run.cfg", folder / "coverage")
        command = f"-m coverage run --rcfile={config} -m pytest -q".split()
        ended = subprocess.run([sys.executable, *command, *arguments], cwd=ROOT).returncode
        pathlib.Path(out).write_text(json.dumps(read(folder)))
    return ended


def lost(before: Covered, after: Iterable[Covered]) -> dict[str, dict[str, list]]:
    """File -> lines and branches of `before` that are in none of `after`."""
    found: dict[str, dict[str, list]] = {}
    after = list(after)
    for name, kinds in before.items():
        for kind, there in kinds.items():
            kept = {str(x) for covered in after for x in covered.get(name, {}).get(kind, ())}
            if gone := [x for x in there if str(x) not in kept]:
                found.setdefault(name, {})[kind] = gone
    return found


def main(arguments: Sequence[str]) -> int:
    what, first, *rest = arguments
    if what == "run":
        return run(first, rest)
    covered = [json.loads(pathlib.Path(name).read_text()) for name in (first, *rest)]
    gone = lost(covered[0], covered[1:])
    for name, kinds in sorted(gone.items()):
        for kind, values in kinds.items():
            print(f"{name}: {kind} {', '.join(map(str, values))}")
    return int(bool(gone))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
