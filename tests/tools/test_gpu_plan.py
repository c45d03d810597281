"""A dry run of bench/gpu.sh on the CPU: its real stages, over three ops with tiny cases, in
interrupted calls.
"""

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

# The scaled-down plan, added to a copy of the package. In a call that is to be cut, a timed case is
# never made. What is searched for one op never meets its goal.
PLAN = """
import os
import time
from tilewright.core.registry import Case, Goal

def _scaled_down(op, *, reaches):
    tiny = next(c for c in op.cases if "contract" in c.tags)
    def make(device, dtype, seed):
        if os.environ["HANG"]:
            time.sleep(600)
        return tiny.make(device, dtype, seed)
    op.cases = (Case("tiny", tiny.make, tiny.cost, frozenset({"contract"})),
                Case("cpu-small", make, tiny.cost, frozenset({"cpu"})))
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
    return {
        **os.environ,
        "OUT": str(tree / "out"),
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": "",
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tree / "build/cache"),
    }


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
    shutil.copytree(
        ROOT / "tilewright",
        tree / "tilewright",
        symlinks=True,
        ignore=shutil.ignore_patterns("__pycache__", "*.so", "tuned"),
    )
    for path in (ROOT / "tilewright").glob("*.so"):
        (tree / "tilewright" / path.name).symlink_to(path)
    for path, text in (
        ("ops/__init__.py", PLAN),
        ("bench/timing.py", TIMING),
        ("bench/run.py", RUN),
        ("bench/runner.py", FORKS),
    ):
        with (tree / "tilewright" / path).open("a") as file:
            file.write(text)
    for folder in ("bench", "lab/tilewright_lab"):
        left = shutil.ignore_patterns("__pycache__", "results", "carry.py", "gpu.sh")
        shutil.copytree(ROOT / folder, tree / folder, ignore=left)
    with (tree / "bench/overhead.py").open("a") as file:
        file.write(OVERHEAD)
    for folder in ("tests/ops", "tests/nn", "bench/results", "docs", "csrc", "out"):
        (tree / folder).mkdir(parents=True)
    script, least = (ROOT / "bench/gpu.sh").read_text(), "(m > 0.1 ? m : 0.1)"
    assert least in script
    (tree / "bench/gpu.sh").write_text(script.replace(least, "(m > 0.05 ? m : 0.05)"))
    shutil.copy(ROOT / "bench/carry.py", tree / "bench")
    (tree / "bench/results/reasons.toml").touch()
    (tree / "tests/ops/test_one.py").write_text("def test_one():\n    assert True\n")
    return tree


def call(tree, python, minutes, *stages, hang=""):
    """Calls the script: its exit code, that of each stage, and what it said."""
    variables = {"PYTHON": str(python), "HANG": hang}
    done = subprocess.run(
        ["bash", "bench/gpu.sh", "bench/results/dry", str(minutes), *stages],
        cwd=tree,
        env=environment(tree) | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # A stage that was cut may have left its line unfinished.
    found = re.findall(r"== ([a-z ]+): exit code (\d+);", done.stdout)
    return done.returncode, {block: int(code) for block, code in found}, done.stdout


def made(tree):
    """How often each unit of the suite was run, by the stream."""
    stream = tree / "out/results.jsonl"
    lines = (
        stream.read_text().splitlines() if stream.exists() else []
    )  # a busy machine may have finished nothing yet
    return collections.Counter(json.loads(line)["unit"] for line in lines)


def searched(tree):
    found = store.documents(tree / "bench/results/dry/tune")
    return {name: document["at"] for name, document in found.items() if name != store.SUMMARY}


def test_every_stage_ends_in_time_and_is_resumed(tree, python):
    """Cases that are never made cost a call the stages that time, and no more; the next has an
    hour. Stages' shares of the minutes are those of test_suite.py's dry run.
    """
    cut = ["goals", "search", "rest", "tests"]
    code, found, said = call(tree, python, 0.55, *cut, hang="yes")
    assert code == 3, f"a call that was cut is not done\n{said}"
    assert list(found) == cut, said
    assert set(found.values()) <= {0, 3} and found["goals"] == found["rest"] == 3, said
    first, tested = made(tree), found["tests"] == 0
    code, found, said = call(tree, python, 60, *STAGES)
    assert list(found) == BLOCKS, said
    assert ("passed before" in said) == tested, "what has passed is not tested again"
    assert code == 0 and set(found.values()) == {0}, said
    times = made(tree)
    assert first <= times and {
        "roofline",
        "goals/rope.cpu-small.bfloat16",
        "goals/linear_cross_entropy.cpu-small.bfloat16",
        "smoke/rope.tiny",
        "parity/rmsnorm.tiny",
        "overhead/rope",
    } <= set(times)
    assert any(unit.startswith("ab/linear_cross_entropy.cpu-small") for unit in times)
    # Only the goals' cases for which the search found other constants are timed again.
    assert {
        unit for unit, n in times.items() if n > 1 and "linear_cross_entropy" not in unit
    } == set(), times
    (table,) = (tree / "tilewright/kernels/tuned").glob("*/linear_cross_entropy.json")
    (entry,) = tuning.read(table)["launches"]["chunk"]
    assert entry["config"] in CHUNK.candidates(**entry["key"])
    assert (tree / "out/results.tar.gz").exists() and (
        tree / "bench/results/dry/tests.passed"
    ).exists()
    before = searched(tree)
    code, found, said = call(tree, python, 60, "goals", "search")
    assert code == 0 and made(tree) == times, "what is there is not made again"
    assert searched(tree) == before != {}
