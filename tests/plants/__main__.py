"""Every planted fault: what `tilewright verify`, `check-layout`, `emulate` and `gate` find of it.

    python -m tests.plants      # writes table.jsonl: rows that are not of today's sources

tests/tools/test_plants.py, test_check_layout.py and test_emulate.py run them too, but for those of
the first kind that others find in their way.
"""

import sys
from collections.abc import Iterator

from tests.lib.sweeps import Row, go_on
from tests.plants.sweep import SWEEP, TABLE, TOOLS


def found() -> Iterator[tuple[str, Row]]:
    """What the tools say of those whose rows are not of today's sources."""
    old = SWEEP.old()
    for tool, (module, names, *_) in TOOLS.items():
        left = [name for name in names if f"{tool} {name}" in old]
        for name, result in module.results(left) if left else ():
            yield f"{tool} {name}", {"wrong": [] if result == "as said" else [result]}


if __name__ == "__main__":
    go_on(SWEEP, TABLE, found())
    sys.exit(bool(SWEEP.wrong()))
