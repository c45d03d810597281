"""Every planted fault: what `tilewright verify`, `check-layout`, `emulate` and `gate` find of it.

    python -m tests.plants      # writes table.jsonl: rows that are not of today's sources

tests/tools/test_plants.py, test_check_layout.py and test_emulate.py run them too, but for those of
the first kind that others find in their way.
"""

import sys

from tests.plants.sweep import SWEEP, TABLE, TOOLS, digests

if __name__ == "__main__":
    old = SWEEP.old()
    for tool, (module, names, *_) in TOOLS.items():
        left = [name for name in names if f"{tool} {name}" in old]
        for name, result in module.results(left) if left else ():
            unit = f"{tool} {name}"
            print(unit, "|", result.splitlines()[0], flush=True)
            row = {"unit": unit, "wrong": [] if result == "as said" else [result]}
            TABLE.write({**row, "digest": digests()[unit]}, digests())
    print(SWEEP.told())
    sys.exit(bool(SWEEP.wrong()))
