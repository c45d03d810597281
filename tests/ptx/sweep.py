"""The table of all runs of compiled kernels: a row for each op."""

import functools
import pathlib

from tests.lib.sweeps import ROOT, Sweep, of_files
from tests.ptx import compiled
from tilewright.bench import sources
from tilewright.selection import operations

FILE = pathlib.Path(__file__).with_name("table.jsonl")


@functools.cache
def groups():
    """op -> names of runs."""
    found = {}
    for name, run in compiled.runs().items():
        found.setdefault(compiled.op_of(name, run[2:]), []).append(name)
    return found


@functools.cache
def digests():
    """Of an op's sources, the emulator's, those of the runs, and the compiler's version."""
    folder = ROOT / "lab/tilewright_lab"
    paths = [*(folder / "emulator").glob("*.py"), pathlib.Path(compiled.__file__)]
    common = of_files(paths, compiled.triton.__version__)
    return {
        op: of_files(
            [],
            common,
            sources.everything() if op == "several" else sources.digest(operations()[op]),
        )
        for op in groups()
    }


SWEEP = Sweep(
    f"compiled kernels of Triton {compiled.triton.__version__}, emulated from their PTX",
    "python -m tests.ptx",
    FILE,
    digests,
)
