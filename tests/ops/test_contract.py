"""The numerics contract over the whole registry: new implementations are tested without an edit
here.
"""

import functools

import pytest
import torch
from helpers import DEVICE, skip_if_refused, skip_unless_usable, threads
from torch.utils import _pytree as pytree

from tilewright.bench import contract, tensors
from tilewright.ops import OPS
from tilewright.ops.quantize import Quantized
from tilewright.ops.quantized_linear import dequantize
from tilewright.registry import FLOATS, Implementation, Op, short


def grid(tag):
    """Orders a case's implementations together, since they share a reference."""
    for op in OPS.values():
        for i, case in enumerate(c for c in op.cases if tag in c.tags):
            for dtype in FLOATS:
                for impl in op.implementations:
                    # In Triton's interpreter float16 differs from float32 only in loads and stores.
                    again = (
                        impl.name == "triton"
                        and DEVICE == "cpu"
                        and dtype == torch.float16
                        and i % 4
                    )
                    if impl.name == "eager" or again:
                        continue
                    gpu = tag == "big" or (impl.name == "triton" and dtype == torch.bfloat16)
                    marks = [pytest.mark.gpu] if gpu else []
                    yield pytest.param(
                        op,
                        impl.name,
                        case,
                        dtype,
                        i,
                        marks=marks,
                        id=f"{op.name}-{impl.name}-{case.name}-{short(dtype)}",
                    )


@functools.lru_cache(len(contract.LAYOUTS))
def judged_by(op, case, dtype, seed, layout):
    """Arguments of the named op, and their reference."""
    kwargs = next(c for c in OPS[op].cases if c.name == case).make(DEVICE, dtype, seed)
    return kwargs, contract.reference(OPS[op], kwargs, dtype, layout)


@pytest.mark.parametrize("op, name, case, dtype, i", list(grid("contract")))
def test_matches_eager(op, name, case, dtype, i, poisoned):
    skip_unless_usable(op, name, dtype)
    layouts = list(enumerate(contract.LAYOUTS))
    if (
        name == "triton" and DEVICE == "cpu"
    ):  # the interpreter is slow: an op's cases alternate between layouts
        layouts = [layouts[i % len(layouts)]]
    for seed, layout in layouts:
        kwargs, by = judged_by(op.name, case.name, dtype, seed, layout)
        # C++ kernels divide their work among threads.
        number = 2 if name == "cpp" else torch.get_num_threads()
        with skip_if_refused(), threads(number):
            broken = contract.broken(contract.judge(op, name, kwargs, by))
        assert not broken, f"{layout} gradients: " + "; ".join(map(str, broken))


@pytest.mark.parametrize("op, name, case, dtype, i", list(grid("big")))
def test_matches_eager_beyond_2_31_elements(op, name, case, dtype, i):
    if DEVICE != "cuda":
        pytest.skip("more than 2^31 elements: only on a CUDA device")
    skip_unless_usable(op, name, dtype)
    broken = contract.check_big(op, name, case, DEVICE, dtype)
    assert not broken, "; ".join(map(str, broken))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "op, name, case",
    [
        pytest.param(op, impl.name, case, id=f"{op.name}-{impl.name}-{case.name}")
        for op in OPS.values()
        for impl in op.implementations
        for case in op.cases
        if "contract" in case.tags
    ],
)
def test_cuda_graph_capture(op, name, case):
    if DEVICE != "cuda":
        pytest.skip("no CUDA device")
    dtype = next(
        d
        for d in (torch.bfloat16, *op.implementation(name).dtypes)
        if d in op.implementation(name).dtypes
    )
    skip_unless_usable(op, name, dtype)
    if reason := contract.no_capture(op, name, case):
        pytest.skip(reason)
    with skip_if_refused():
        broken = contract.check_capture(op, name, case, dtype)
    assert not broken, "; ".join(map(str, broken))


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_eager_twin_gradcheck(op):
    """The definition's gradients are right, in float64, against finite differences."""
    checked = differentiable = 0
    for case in op.cases:
        if "contract" not in case.tags:
            continue
        kwargs = contract.convert(case.make("cpu", torch.float32, 0), torch.float64)
        names = [n for n, v in kwargs.items() if isinstance(v, torch.Tensor) and v.requires_grad]
        differentiable += len(names)
        if (
            not 0 < sum(kwargs[n].numel() for n in names) <= 2500
        ):  # finite differences take one call per element
            continue

        def call(*tensors, kwargs=kwargs, names=names):
            outs = contract.leaves(
                op.public(
                    **{**kwargs, **dict(zip(names, tensors, strict=True))}, implementation="eager"
                )
            )
            return tuple(o for o in outs if o.is_floating_point() and o.requires_grad)

        assert torch.autograd.gradcheck(call, [kwargs[n] for n in names], fast_mode=True)
        checked += 1
    if not differentiable:
        pytest.skip("no input of it is differentiable")
    assert checked, f"{op.name} has no case small enough for gradcheck"


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_inputs_of_a_case_are_zeros_only_if_it_says_so(op):
    """Zeros hide scales, signs and the order of elements."""
    for case in op.cases:
        if "contract" not in case.tags or "zeros" in case.name:
            continue
        kwargs = case.make("cpu", torch.float32, 0)
        for value in pytree.tree_leaves(kwargs, lambda v: isinstance(v, Quantized)):
            t = dequantize(value) if isinstance(value, Quantized) else value
            if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel():
                assert t.any(), f"{case.name}: all of a tensor {list(t.shape)} is zero"


def _fault(kind):
    """The eager twin of rmsnorm with a 2 % error in one element, of the output or of one
    gradient.
    """
    from tilewright.ops.rmsnorm import rmsnorm_eager

    class Fault(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t, where):
            ctx.where = where
            out = t.clone()
            if kind == "output":
                out.view(-1)[where] *= 1.02
            return out

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            if kind == "gradient":
                grad.view(-1)[ctx.where] *= 1.02
            return grad, None

    def ordinary(t):  # an element at the root mean square or a little above: not the largest
        size = t.double().abs().flatten()
        rms = size.square().mean().sqrt()
        return int(torch.where(size >= rms, size, float("inf")).argmin())

    def faulty(x, *rest):
        if kind == "output":
            y = rmsnorm_eager(x, *rest)
            return Fault.apply(y, ordinary(y.detach()))
        return rmsnorm_eager(Fault.apply(x, ordinary(x.detach())), *rest)

    return faulty


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("kind", ["output", "gradient", "unwritten", "none"])
def test_a_planted_fault_turns_the_contract_red(kind, dtype, monkeypatch):
    import dataclasses

    from tilewright.ops.rmsnorm import RMSNORM, rmsnorm_eager
    from tilewright.registry import Implementation, Op

    def unwritten(x, *rest):
        y = rmsnorm_eager(x, *rest)
        hole = torch.zeros_like(y)
        hole.view(-1)[3] = float("nan")
        return y + hole

    fn = {"unwritten": unwritten, "none": rmsnorm_eager}.get(kind) or _fault(kind)
    fake = Implementation("faulty", lambda: fn, devices=())
    op = Op("rmsnorm", None, RMSNORM.eager, (fake,), RMSNORM.cases)
    assert dataclasses.is_dataclass(op)

    def public(x, weight, eps=1e-6, *, bias=None, offset=0.0, cast="llama", implementation="auto"):
        return op.pick(implementation, x)(x, weight, bias, eps, offset, cast)

    op.public = public
    case = next(c for c in op.cases if c.name == "ragged")
    broken = contract.check(op, "faulty", case, "cpu", dtype)
    if kind == "none":
        assert not broken
    else:
        assert [b.name for b in broken] == ["grad x" if kind == "gradient" else "out 0"], broken


def test_error_is_the_same_in_pieces(monkeypatch):
    g = torch.Generator().manual_seed(0)
    truth = torch.randn(7, 33, dtype=torch.float64, generator=g)
    truth[2, 3] = float("inf")
    result = truth.float()
    result[5, 31] += 0.5
    whole = contract.error(result, truth)
    monkeypatch.setattr(tensors, "CHUNK", 10)
    assert contract.error(result, truth) == (pytest.approx(whole[0], rel=1e-12), (5, 31))
    result[6, 32] = float("nan")
    assert contract.error(result, truth) == (float("inf"), (6, 32))
    assert contract.error(torch.tensor([1, 2, 4]), torch.tensor([1, 2, 3])) == (1.0, (2,))


def test_large_cases_are_judged_by_their_last_rows():
    op, case = OPS["rmsnorm"], next(c for c in OPS["rmsnorm"].cases if c.name == "ragged")
    assert contract.check_big(op, "torch", case, "cpu", torch.float32) == []

    import unittest.mock

    fn = op.resolve("torch", "cpu")
    with unittest.mock.patch.object(
        op,
        "pick",
        lambda name, x: op.eager if name == "eager" else lambda x, *rest: fn(x.roll(1, 0), *rest),
    ):
        names = [f.name for f in contract.check_big(op, "torch", case, "cpu", torch.float32)]
    assert "out 0" in names


def test_what_cannot_be_recorded_says_why():
    cases = {c.name: c for c in OPS["attention"].cases if "contract" in c.tags}
    assert contract.no_capture(OPS["attention"], "sdpa", cases["gqa"]) is None
    assert "on the host" in contract.no_capture(OPS["attention"], "sdpa", cases["documents"])
    assert contract.no_capture(OPS["attention"], "triton", cases["documents"]) is None
    reads = Op("reads", None, None, (Implementation("gpu", None),), eager_reads_host="contract")
    assert "on the host" in contract.no_capture(reads, "eager", cases["gqa"])
    assert contract.no_capture(reads, "gpu", cases["gqa"]) is None
