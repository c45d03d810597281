"""The table of all planted faults: a row for each."""

from __future__ import annotations

import functools
import importlib.metadata
import pathlib

from tests.lib.sweeps import ROOT, Sweep, Table
from tilewright.bench import sources

from . import kernels, layout, verify

HERE = pathlib.Path(__file__)
LAB = ROOT / "lab/tilewright_lab"
TABLE = Table(HERE.with_name("table.jsonl"))
# Tool -> the module of its faults, their names, what judges them beside it, and packages.
TOOLS = {
    "verify": (verify, verify.PLANTS, ["lab/tilewright_lab/verify/*.py"], ["transformers"]),
    "check-layout": (
        layout,
        layout.NAMES,
        ["lab/tilewright_lab/check_layout/*.py", "tests/lib/layout_steps.py"],
        ["torch"],
    ),
    "emulate": (
        kernels,
        kernels.NAMES,
        [f"lab/tilewright_lab/{n}/**/*.py" for n in ("emulate", "emulator", "gate")]
        + ["tests/tools/faulty_kernels.py"],
        ["triton"],
    ),
}


@functools.cache
def digests() -> dict[str, str]:
    found = {}
    for tool, (module, names, patterns, packages) in TOOLS.items():
        paths = [HERE.with_name(f"{module.__name__.rpartition('.')[2]}.py")]
        paths += [path for pattern in patterns for path in ROOT.glob(pattern)]
        digest = sources.of_files(
            paths, *(f"{n} {importlib.metadata.version(n)}" for n in packages)
        )
        found |= {f"{tool} {name}": digest for name in names}
    return found


SWEEP = Sweep("faults planted for the tools", "python -m tests.plants", digests, TABLE.rows)
