"""The table of all runs of compiled kernels: a row for each op."""

import functools
import pathlib

from tests.lib.sweeps import ROOT, Sweep, Table
from tests.ptx import compiled
from tilewright.bench import sources
from tilewright.selection import operations

TABLE = Table(pathlib.Path(__file__).with_name("table.jsonl"))


@functools.cache
def groups():
    """op -> names of runs."""
    found = {}
    for name, run in compiled.runs().items():
        found.setdefault(compiled.op_of(name, run[2:]), []).append(name)
    return found


@functools.cache
def digests():
    """Digests of each op's sources, the emulator's, the runs', and the compiler's version."""
    folder = ROOT / "lab/tilewright_lab"
    paths = [*(folder / "emulator").glob("*.py"), pathlib.Path(compiled.__file__)]
    common = sources.of_files(paths, compiled.triton.__version__)
    found = {}
    for op in groups():
        own = sources.everything() if op == "several" else sources.digest(operations()[op])
        found[op] = sources.of_files([], common, own)
    for unit, (test, ops) in TESTS.items():
        of_ops = (sources.digest(operations()[op]) for op in ops)
        found[unit] = sources.of_files([ROOT / test.partition("::")[0]], common, *of_ops)
    return found


# Further units: tests that run whole.
TESTS = {
    "bytes of fused quantization": (
        "tests/ops/test_fused_quantize.py::test_compiled_kernels_give_the_bytes",
        ("silu_mul_quantize", "rmsnorm_quantize", "add_rmsnorm_quantize", "quantize_mxfp8"),
    ),
    "kernels in CuTe DSL": (
        "tests/ptx/test_cute.py::test_the_contract_holds",
        ("rmsnorm", "add_rmsnorm", "cross_entropy"),
    ),
}
SWEEP = Sweep(
    f"compiled kernels of Triton {compiled.triton.__version__}, emulated from their PTX",
    "python -m tests.ptx",
    digests,
    TABLE.rows,
)
