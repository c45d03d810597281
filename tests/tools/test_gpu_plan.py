"""A dry run of bench/gpu.sh on the CPU: its real stages, over three ops with tiny cases."""

import collections
import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess

import forked
import pytest

from tilewright.bench import store
from tilewright.kernels import tuning
from tilewright.ops.loss.head import CHUNK

ROOT = pathlib.Path(__file__).parents[2]
FIRST = "smoke products ab goals host check"  # one call of the suite
STAGES = [*FIRST.split(), "search", "again", "rest", "tests", "report"]
BLOCKS = [FIRST, "search", "again", "rest", "tests", "report"]

# The scaled-down plan, added to a copy of the package. What is searched for one op never meets its
# goal.
PLAN = """
from tilewright.core.registry import Case, Goal

def _scaled_down(op, *, reaches):
    tiny = next(c for c in op.cases if "contract" in c.tags)
    op.cases = (Case("tiny", tiny.make, tiny.cost, frozenset({"contract"})),
                Case("cpu-small", tiny.make, tiny.cost, frozenset({"cpu"})))
    op.goals = (Goal("", "forward", "roofline_percent", at_least=1e-9 if reaches else 1e9, dtypes=("bfloat16",)),)
    return op

OPS = {n: _scaled_down(OPS[n], reaches=n != "linear_cross_entropy")
       for n in ("linear_cross_entropy", "rmsnorm", "rope")}
"""
# Samples are short and few: the numbers are not checked.
TIMING = """
measure_roofline = functools.partial(measure_roofline, copy_bytes=2**22, matmul=64, samples=2)

class CpuClock(CpuClock):
    def __init__(self, sample_seconds=0.0):
        super().__init__(0.0)
"""
RUN = """
Settings.__init__.__defaults__ = (3, 1.0, 0.0, 1.0, True)
"""
OVERHEAD = """
import functools
overhead = functools.partial(overhead, sample_seconds=0.0)
"""
# Workers are forked from the call, after its imports: this saves a second or two of CPU time each.
FORKS = f"""
from types import SimpleNamespace
import torch

FINISH = 0.5
{inspect.getsource(forked.Child)}
subprocess = SimpleNamespace(Popen=Child, TimeoutExpired=subprocess.TimeoutExpired)
"""


def environment(tree):
    variables = {"OUT": tree / "out", "TRITON_CACHE_DIR": tree / "build/cache", "PYTHONPATH": ""}
    variables |= {"TORCH_COMPILE_DISABLE": 1, "OMP_NUM_THREADS": 1, "TRITON_INTERPRET": 0}
    return {**os.environ, **{name: str(value) for name, value in variables.items()}}


@pytest.fixture(scope="module")
def python(tree):
    """The script's, which forks from one that has imported the bench of the tree."""
    imports = "import torch._dynamo\nfrom bench import search, suite\nfrom bench.page import build"
    variables = environment(tree) | {"PYTHONPATH": f"{tree}:{tree}/lab"}
    with forked.python(imports, tree, variables, "pytest") as command:
        yield command


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    tree = tmp_path_factory.mktemp("plan")
    for folder, *more in (("tilewright", "*.so", "tuned"), ("bench",), ("lab/tilewright_lab",)):
        ignore = shutil.ignore_patterns("__pycache__", "results", *more)
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=ignore)
    for path in (ROOT / "tilewright").glob("*.so"):
        (tree / "tilewright" / path.name).symlink_to(path)
    for path, text in (
        ("tilewright/ops/__init__.py", PLAN),
        ("tilewright/bench/timing.py", TIMING),
        ("tilewright/bench/run.py", RUN),
        ("tilewright/bench/runner.py", FORKS),
        ("bench/overhead.py", OVERHEAD),
    ):
        with (tree / path).open("a") as file:
            file.write(text)
    for folder in ("tests/ops", "tests/nn", "bench/results", "docs", "csrc", "out"):
        (tree / folder).mkdir(parents=True)
    (tree / "bench/results/reasons.toml").touch()
    (tree / "tests/ops/test_one.py").write_text("def test_one():\n    assert True\n")
    return tree


def call(tree, python, *stages):
    """Calls the script: its exit code, that of each stage, and what it said."""
    done = subprocess.run(
        ["bash", "bench/gpu.sh", "bench/results/dry", "60", *stages],
        cwd=tree,
        env=environment(tree) | {"PYTHON": str(python)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    found = re.findall(r"== ([a-z ]+): exit code (\d+);", done.stdout)
    return done.returncode, {block: int(code) for block, code in found}, done.stdout


def made(tree):
    """How often each unit of the suite was run, by the stream."""
    lines = (tree / "out/results.jsonl").read_text().splitlines()
    return collections.Counter(json.loads(line)["unit"] for line in lines)


def searched(tree):
    found = store.documents(tree / "bench/results/dry/tune")
    return {name: document["at"] for name, document in found.items() if name != store.SUMMARY}


def test_every_stage_makes_its_part_and_the_next_call_makes_nothing_again(tree, python):
    """Stages' shares of the minutes, and what is cut, are test_suite.py's."""
    code, found, said = call(tree, python, *STAGES)
    assert list(found) == BLOCKS, said
    assert code == 0 and set(found.values()) == {0} and "passed before" not in said, said
    times = made(tree)
    goals = {f"goals/{op}.cpu-small.bfloat16" for op in ("rope", "linear_cross_entropy")}
    units = {"roofline", "smoke/rope.tiny", "parity/rmsnorm.tiny", "overhead/rope"}
    assert goals | units <= set(times)
    assert any(unit.startswith("ab/linear_cross_entropy.cpu-small") for unit in times)
    # Only the goals' cases for which the search found other constants are timed again.
    again = {unit for unit, n in times.items() if n > 1 and "linear_cross_entropy" not in unit}
    assert again == set(), times
    (table,) = (tree / "tilewright/kernels/tuned").glob("*/linear_cross_entropy.json")
    (entry,) = tuning.read(table)["launches"]["chunk"]
    assert entry["config"] in CHUNK.candidates(**entry["key"])
    assert (tree / "out/results.tar.gz").exists()
    assert (tree / "bench/results/dry/tests.passed").exists()
    before = searched(tree)
    code, found, said = call(tree, python, "goals", "search", "tests")
    assert code == 0 and made(tree) == times, "what is there is not made again"
    assert searched(tree) == before != {} and "passed before" in said
