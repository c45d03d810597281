"""What only a GPU shows: asynchronous copies against products, loops of no rounds, blocks that wait
for each other, CUDA graphs, the cache of launches, a second device. The likeliest damage comes
first.

Each runs at its own size on a GPU (`large`), and at a small one wherever Triton runs, where the
interpreter shows that the test itself is right. What may hang runs in a process with a limit there.
Elsewhere: sanitizers of named implementations (tests/tools/test_nvidia_tools.py, bench/stages),
more than 2^31 elements and the capture of every op (test_contract.py).
"""

import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
from unittest import mock

import pytest
import torch
from helpers import DEVICE, skip_unless_usable, specialized

from tilewright.bench import contract
from tilewright.bench.units import smallest
from tilewright.kernels.device import hopper
from tilewright.kernels.launch import no_launch_cache
from tilewright.ops import OPS, adamw_, attention, rmsnorm, rope
from tilewright.ops.attention import attention as of_attention
from tilewright.ops.moe import grouped_gemm_cases, moe_cases

ROOT = pathlib.Path(__file__).parents[2]
GPU = DEVICE == "cuda"
BF16, F32 = torch.bfloat16, torch.float32
DTYPE = BF16 if GPU else F32  # the interpreter truncates on a cast to bfloat16
# Seconds of a process on a GPU, which imports PyTorch and compiles: that takes some ten.
LIMIT = 180


def sized(small, large):
    """Parametrizes a test over a size for every machine and one for a GPU."""
    sizes = [
        pytest.param(small, id="small"),
        pytest.param(large, id="large", marks=pytest.mark.gpu),
    ]
    return pytest.mark.parametrize("size", sizes)


@pytest.fixture(autouse=True)
def _fits(request):
    """Skips what needs a GPU, with the registry's reason."""
    if request.node.get_closest_marker("gpu") and not GPU:
        pytest.skip(OPS["rmsnorm"].implementation("triton").why_not("cuda", BF16))
    for name in ("rmsnorm", "moe_mlp"):
        skip_unless_usable(OPS[name], "triton", DTYPE)


def within(check, *arguments):
    """Calls a function of this module; on a GPU in a process, which a launch that hangs cannot
    outlive.
    """
    if not GPU:
        check(*arguments)
        return
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "lab", ROOT / "tests/lib")))
    done = subprocess.run(
        [sys.executable, __file__, check.__name__, json.dumps(arguments)],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def holds(op, case):
    broken = contract.check(OPS[op], "triton", case, DEVICE, DTYPE)
    assert not broken, "; ".join(map(str, broken))


@contextlib.contextmanager
def taken(launch, config):
    """Launches of this name take these constants in place of the heuristic's. Yields the keys."""
    op = launch.partition("/")[0]
    by = "gluon" if launch in SPECIALIZED else "triton"
    [tunable] = [t for t in OPS[op].implementation(by).tunables() if t.name == launch]
    keys = []

    def chosen(device, *key):
        keys.append(key)
        return {**tunable.heuristic(**tunable.named(key)), **config}

    with mock.patch.object(tunable, "config", chosen):
        yield keys


def captured(call):
    """A function that makes a call's launches again: by a CUDA graph, where there is a GPU."""
    if not GPU:
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


# ---- products


@sized((13, 2, 1, 96, 80), (1024, 8, 2, 4096, 4096))
def test_gathered_rows_over_long_sums(size):
    """Tensor cores read, by another path, what asynchronous copies wrote to shared memory: 64 and
    more blocks of a sum reuse each stage.
    """
    holds("moe_mlp", moe_cases.case("long_sums", size))


def _experts_without_rows(sizes, counts):
    holds("grouped_gemm", grouped_gemm_cases.case("empty", *sizes, counts))


@sized(
    ((4, 40, 24, 16), (0, 30, 0, 0)),
    ((128, 4396, 1536, 2048), [4000 if e == 77 else 96 * (e == 78) for e in range(128)]),
)
def test_loops_of_no_rounds_end(size):
    """Empty experts, and tiles of rows that no expert has, go through the loop's barriers too."""
    within(_experts_without_rows, *size)


@sized((24, 16, 2, 32, 16), (8192, 128, 8, 2048, 768))
def test_weights_of_experts_with_few_gathered_rows(size):
    """The sum over an expert's rows is shorter than its pipeline."""
    holds("moe_mlp", moe_cases.case("few_rows", size, "skewed"))


# ---- rope in place


@sized((1, 3, 1, 20, 16), (2, 32, 8, 4096, 128))
def test_rope_in_place_has_the_bits_of_rope_for_every_configuration(size):
    """A thread overwrites what no other has still to read only if no element has two threads, which
    is the compiler's choice of a layout.
    """
    B, heads, kv_heads, tokens, width = size
    g = torch.Generator(DEVICE).manual_seed(0)
    q, k = (
        torch.randn(B, n, tokens, width, generator=g, device=DEVICE).to(DTYPE)
        for n in (heads, kv_heads)
    )
    angles = torch.rand(tokens, width // 2, generator=g, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    expected = rope(q, k, cos, sin, implementation="triton")
    [tunable] = OPS["rope"].implementation("triton").tunables()
    key = {"half": width // 2, "itemsize": q.element_size(), "HQ": heads, "HK": kv_heads}
    configs = tunable.candidates(90 if GPU else None, **key)
    for config in configs if GPU else configs[:2]:
        with taken(tunable.name, config) as keys:
            found = rope(q.clone(), k.clone(), cos, sin, inplace=True, implementation="triton")
        assert keys and all(map(torch.equal, found, expected)), config


# ---- CUDA graphs and the cache of launches


@sized([(33, 5), (7,)], [(4096, 4096), (12288, 4096), (4096,)])
def test_a_replayed_step_of_adamw_is_the_next_one(size):
    """The correction of the moments follows a step that is on the device."""
    g = torch.Generator(DEVICE).manual_seed(0)
    start, grads = ([torch.randn(s, generator=g, device=DEVICE) for s in size] for _ in range(2))

    def states():
        return [[t.clone() for t in start], *([torch.zeros_like(t) for t in start] for _ in "mv")]

    (p, m, v), counter = states(), torch.zeros((), dtype=F32, device=DEVICE)

    def step():
        counter.add_(1)
        adamw_(p, grads, m, v, step=counter, lr=0.1, implementation="triton")

    again = captured(step)
    counter.zero_()  # a capture begins with a call
    for tensors, first in zip((p, m, v), states(), strict=True):
        for t, f in zip(tensors, first, strict=True):
            t.copy_(f)
    for _ in range(3):
        again()
    expected = states()
    for i in range(1, 4):
        adamw_(expected[0], grads, *expected[1:], step=i, lr=0.1, implementation="triton")
    assert counter == 3
    # The corrections, of about 1, have a few roundings of float32.
    torch.testing.assert_close((p, m, v), tuple(expected), rtol=1e-6, atol=2e-7)


@sized((20, 48), (8192, 4096))
def test_a_captured_normalization_has_the_bits_of_a_call(size):
    """The order of the weight's sum depends on how many programs fit, which a first call asks."""
    x = torch.randn(size, device=DEVICE).to(DTYPE).requires_grad_()
    w = torch.randn(size[1], device=DEVICE).to(DTYPE).requires_grad_()
    results = {}

    def call(name):
        y = rmsnorm(x, w, implementation="triton")
        results[name] = (y.detach(), *torch.autograd.grad(y, (x, w), x.detach()))

    call("direct")
    captured(lambda: call("replayed"))()
    assert all(map(torch.equal, results["direct"], results["replayed"]))


@pytest.mark.parametrize("name", ["rmsnorm", "rope", "cross_entropy", "attention", "moe_mlp"])
def test_a_kept_launch_has_the_bits_of_tritons(name):
    case = smallest(OPS[name])
    kept, through_triton = [], []
    for results, context in (
        (kept, contextlib.nullcontext),
        (kept, contextlib.nullcontext),  # the second call is a kept one
        (through_triton, no_launch_cache),
    ):
        with context():
            found, _ = contract.run(OPS[name], "triton", case.make(DEVICE, DTYPE, 0))
            results[:] = found.values()
    assert all(map(torch.equal, kept, through_triton))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rmsnorm", "attention", "moe_mlp", "adamw_"])
def test_tensors_of_a_second_device_are_computed_there(name):
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device: a second is needed")
    case = smallest(OPS[name])
    found, _ = contract.run(OPS[name], "triton", case.make("cuda:1", DTYPE, 0))
    expected, _ = contract.run(OPS[name], "triton", case.make("cuda:0", DTYPE, 0))
    for label, t in found.items():
        assert t.device.index == 1
        torch.testing.assert_close(t.cpu(), expected[label].cpu())


# ---- documents


@sized((40, (0, 3, 17, 40)), (8192, (0, 100, 4096, 8192)))
def test_documents_whose_longest_is_not_told_are_the_same(size):
    tokens, documents = size
    case = of_attention._case(
        "told", 1, 2, 1, tokens, 16 if tokens < 64 else 128, documents=documents
    )
    kwargs = case.make(DEVICE, DTYPE, 0)
    longest = max(b - a for a, b in itertools.pairwise(documents))
    plain = {n: t.detach() for n, t in kwargs.items()}
    told, untold = (
        attention(**plain, **more, implementation="triton")
        for more in ({"max_seqlen": longest}, {})
    )
    assert torch.equal(told, untold)


# ---- specialized warps


# By launch: the op, and its configuration of specialized warps.
SPECIALIZED = {
    t.name: (op, specialized(t))
    for op in OPS.values()
    if "gluon" in op.names()
    for t in op.implementation("gluon").tunables()
    if t.name.startswith(f"{op.name}/") and specialized(t)
}
# Products with several tiles an SM, and with rows that do not fill the last one.
CASES = {
    "moe_mlp": lambda: moe_cases.case("specialized", (4099, 8, 2, 2048, 768)),
    "grouped_gemm": lambda: grouped_gemm_cases.case("specialized", 8, 20_011, 1536, 2048),
    "attention": lambda: of_attention._case("specialized", 1, 8, 2, 2048, 128),
}
# The recipe, and a small case, where an op's first one does not launch it.
RECIPES = {
    "low_precision_linear/by_rows_gluon": ("block_fp8", "aligned"),
    "low_precision_linear/scaled_gluon": ("mxfp8", "two_scales"),
    "low_precision_grouped_gemm/scaled_rows_gluon": ("mxfp8", "aligned"),
    "low_precision_grouped_gemm/scaled_weights_gluon": ("nvfp4", "aligned"),
}
BLACKWELL = tuple(launch for launch in RECIPES if "/scaled" in launch)


def _specialized(launch, large):
    """Holds the contract, twice with the same bits."""
    op, config = SPECIALIZED[launch]
    recipe, small = RECIPES.get(launch, ("", ""))
    timed = (c for c in op.cases if "cuda" in c.tags and c.name.startswith(recipe))
    own = CASES.get(op.name, lambda: next(timed))
    case = own() if large else smallest(op, (f"{recipe} {small}",) if small else None)
    kwargs = case.make(DEVICE, DTYPE, 0)
    with taken(launch, config if large else {}) as keys:
        assert not contract.compare(op, "gluon", kwargs, DTYPE)
        first, second = (contract.run(op, "gluon", kwargs)[0] for _ in range(2))
    assert keys, f"{launch} was not launched"
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "launch, large",
    [
        pytest.param(launch, large, id=f"{launch}-{size}", marks=pytest.mark.gpu)
        for large, size in ((False, "small"), (True, "large"))
        for launch in SPECIALIZED
    ],
)
def test_specialized_warps_hold_the_contract_and_end(launch, large):
    """Warps that load wait for those that multiply, and those for them."""
    skip_unless_usable(SPECIALIZED[launch][0], "gluon", DTYPE)
    needed = 10 if launch in BLACKWELL else 9
    # In block-scaled formats even a small case is of 10.0.
    if GPU and (large or needed > 9) and torch.cuda.get_device_capability()[0] != needed:
        pytest.skip(f"specialized warps are for compute capability {needed}.0")
    within(_specialized, launch, large)


BACKWARD = "attention/backward_kv"  # by two kernels, of which this is one


def _in_turns(size):
    """All gradients in one kernel, whose blocks add to dq in turns, against two kernels."""
    B, heads, kv_heads, tokens, width = size
    by, launch = ("gluon", "attention/backward_kv_gluon") if GPU else ("triton", BACKWARD)
    case = of_attention._case("turns", B, heads, kv_heads, tokens, width)
    kwargs = case.make(DEVICE, DTYPE, 0)
    apart, grads = contract.run(OPS["attention"], "triton", kwargs)
    config = SPECIALIZED[launch][1] if GPU else {}
    with taken(launch, config) as keys:
        runs = [contract.run(OPS["attention"], by, kwargs, grads=grads)[0] for _ in range(3)]
    assert keys, f"{launch} was not launched"
    for name, expected in apart.items():
        assert all(torch.equal(r[name], runs[0][name]) for r in runs), name
        # Two orders of the same sums, in a dtype of 8 bits.
        assert contract.error(runs[0][name], expected)[0] < 0.02, name


@sized((1, 2, 1, 40, 16), (1, 32, 4, 8192, 128))
def test_blocks_that_wait_for_their_turns_end_with_the_same_bits(size):
    """More blocks than run at a time: one that waits must not keep out what it waits for."""
    if GPU and not hopper(torch.device(DEVICE)):
        pytest.skip("specialized warps are for compute capability 9.0")
    within(_in_turns, size)


if __name__ == "__main__":
    globals()[sys.argv[1]](*json.loads(sys.argv[2]))
