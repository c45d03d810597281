"""The numerics contract over the whole registry: new implementations are tested without an edit
here.
"""

import functools

import pytest
import torch
from helpers import DEVICE, skip_if_refused, skip_unless_usable, threads
from small_cases import differentiable
from torch.utils import _pytree as pytree

from bench import faults, margins
from tilewright.bench import contract, tensors
from tilewright.core.cases import DETECTED
from tilewright.core.registry import (
    FLOATS,
    Implementation,
    ImplementationUnavailable,
    Op,
    short,
)
from tilewright.ops import OPS, quantize_block_fp8, quantize_mxfp8, silu_mul
from tilewright.ops.quant.quantize import Quantized
from tilewright.ops.quant.quantized_linear import dequantize


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
                    if impl.name == "eager" or dtype not in impl.dtypes or again:
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
    "op, name",
    [
        pytest.param(op, impl.name, id=f"{op.name}-{impl.name}")
        for op in OPS.values()
        for impl in op.implementations
        if impl.name != "cpp"  # which takes no CUDA tensors
    ],
)
def test_cuda_graph_capture(op, name):
    if DEVICE != "cuda":
        pytest.skip("no CUDA device")
    takes = op.implementation(name).dtypes
    dtype = next(d for d in (torch.bfloat16, *takes) if d in takes)
    skip_unless_usable(op, name, dtype)
    reasons, broken = {}, {}
    for case in (c for c in op.cases if "contract" in c.tags):
        if reason := contract.no_capture(op, name, case):
            reasons[case.name] = reason
            continue
        try:
            found = contract.check_capture(op, name, case, dtype)
        except ImplementationUnavailable as error:
            reasons[case.name] = str(error)
            continue
        broken |= {case.name: [*map(str, found)]} if found else {}
        reasons[case.name] = ""
    assert not broken
    if all(reasons.values()):
        pytest.skip(next(iter(reasons.values())))


@pytest.mark.parametrize("op", filter(differentiable, OPS.values()), ids=lambda op: op.name)
def test_eager_twin_gradcheck(op):
    """The definition's gradients are right, in float64, against finite differences."""
    checked = 0
    for case in op.cases:
        if "contract" not in case.tags:
            continue
        kwargs = contract.convert(case.make("cpu", torch.float32, 0), torch.float64)
        names = [n for n, v in kwargs.items() if isinstance(v, torch.Tensor) and v.requires_grad]
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


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_planted_faults_break_the_contract(op):
    """Zeros, another result, an argument, an ordinary element that is off: in every output and
    gradient, in every dtype. `python -m bench margins --faults` plants them in every
    layout of upstream gradients.
    """
    planted = set()
    for case in (c for c in op.cases if "contract" in c.tags):
        for dtype in FLOATS:
            for fault in faults.plant(op, case, dtype):
                assert fault.caught, f"{case.name}, {short(dtype)}: {fault.fault} as {fault.name}"
                planted.add((fault.name, dtype, fault.fault))
    results = {planted_in[:2] for planted_in in planted}
    assert results and all((*result, faults.ELEMENT) in planted for result in results)


@pytest.mark.parametrize(
    "op", [pytest.param(op, id=op.name) for op in OPS.values() if op.judged.detects]
)
def test_what_is_declared_beyond_two_percent_is_the_true_number(op):
    """At most twice what is detected, and only where 2 % is not."""
    found = {(r.dtype, r.result): r.detected for r in margins.rows(op, ())}
    for dtype, declared in op.judged.detects.items():
        for name, amount in declared.items():
            assert (short(dtype), name) in found and amount > DETECTED
            if (least := found[short(dtype), name]) is not None:  # integers and scales: planted
                assert DETECTED * 0.9 < least <= amount <= 2 * least, (short(dtype), name, least)


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_an_unwritten_element_breaks_the_contract_and_the_twin_holds_it(dtype):
    op = OPS["rmsnorm"]
    case = next(c for c in op.cases if c.name == "ragged")
    kwargs = case.make("cpu", dtype, 0)
    by = contract.reference(op, kwargs, dtype)
    results, _ = contract.run(op, "eager", kwargs, grads=by.grads)
    assert not contract.broken(contract.compared(op, results, kwargs, by))
    results["out 0"].view(-1)[3] = float("nan")
    assert [f.name for f in contract.broken(contract.compared(op, results, kwargs, by))] == [
        "out 0"
    ]


def test_elements_far_below_the_root_mean_square_are_judged():
    """They are the gradients of a softmax over many classes, of all but the targets. The root mean
    square does not see them.
    """
    op, (dtype, V) = OPS["cross_entropy"], (torch.bfloat16, 50_000)
    gen = torch.Generator().manual_seed(0)
    kwargs = {
        "logits": torch.randn(4, V, generator=gen).to(dtype).requires_grad_(),
        "target": torch.randint(V, (4,), generator=gen),
    }
    by = contract.reference(op, kwargs, dtype)
    results, _ = contract.run(op, "eager", kwargs, grads=by.grads)
    grad, truth = results["grad logits"], by.truth["grad logits"]["()"][1]
    first = by.bounds["grad logits"][0]
    wrong = grad.where(grad.abs() > 0.9 * first.budget * first.scale, 0)
    assert (wrong == 0).float().mean() > 0.8
    assert contract.error(wrong, truth)[0] <= first.budget
    found = contract.compared(op, {**results, "grad logits": wrong}, kwargs, by)
    assert [f.name for f in contract.broken(found)] == ["grad logits"]


@pytest.mark.parametrize("name", ["quantize_block_fp8", "quantize_mxfp8"])
def test_the_smallest_code_is_held_to_the_twins(name):
    op, dtype = OPS[name], torch.bfloat16
    kwargs = next(c for c in op.cases if c.name == "ragged").make("cpu", dtype, 0)
    by = contract.reference(op, kwargs, dtype)
    results, _ = contract.run(op, "eager", kwargs)
    size = results["out 0"].float().abs().flatten()
    results["out 0"].view(-1).view(torch.uint8)[size.where(size > 0, 1e9).argmin()] += 1
    assert [f.name for f in contract.broken(contract.compared(op, results, kwargs, by))] == [
        "out 0"
    ]


@pytest.mark.parametrize("up", [True, False])
def test_a_scale_a_binade_away_breaks_the_contract(up):
    """The codes of one block change with its scale, so that nearly the same values are stored."""
    op, dtype = OPS["silu_mul_quantize"], torch.bfloat16
    kwargs = next(c for c in op.cases if c.name == "mxfp8").make("cpu", dtype, 0)
    by = contract.reference(op, kwargs, dtype)
    results, _ = contract.run(op, "eager", kwargs)
    codes, scale = results["out 0"], results["out 1"]
    row = int(scale.float().flatten().argmax()) // scale.shape[-1]
    at = int(scale.float().view(-1, scale.shape[-1])[row].argmax())
    scale.view(torch.uint8).view(-1, scale.shape[-1])[row, at] += 1 if up else -1
    block = codes.view(-1, codes.shape[-1])[row, 32 * at : 32 * at + 32]
    block.copy_((block.float() * (0.5 if up else 2)).clamp(-448, 448).to(block.dtype))
    found = contract.broken(contract.compared(op, results, kwargs, by))
    assert "out 1" in [f.name for f in found]


@pytest.mark.parametrize("name", ["ragged", "mxfp8"])
def test_codes_may_differ_from_the_twins_only_where_a_tie_is_near(name):
    """Values that are a rounding apart have other codes, and scales of powers of two."""
    op, dtype = OPS["silu_mul_quantize"], torch.bfloat16
    kwargs = next(c for c in op.cases if c.name == name).make("cpu", dtype, 0)
    kwargs["gate"][0, 0, 0], kwargs["up"][0, 0, 0] = 128.0, 3.5  # 448: the largest of scale 1
    given = {n: kwargs[n] for n in ("gate", "up")}
    by = contract.reference(op, kwargs, dtype)
    y = silu_mul(**given, implementation="eager")

    def results(y):
        if name == "mxfp8":
            return contract.leaves(quantize_mxfp8(y))
        return contract.leaves(quantize_block_fp8(y, block=(1, 128)))

    def broken(y):
        found = {f"out {i}": t for i, t in enumerate(results(y))}
        return [f.name for f in contract.broken(contract.compared(op, found, kwargs, by))]

    ulp = y.clone().view(torch.int16)
    ulp.view(-1)[::2] += 1  # magnitudes, whatever the sign
    near = ulp.view(dtype)
    (codes, scale), (others, other) = results(y), results(near)
    assert (codes.float() != others.float()).sum() > 10 and (scale.float() != other.float()).any()
    assert broken(y) == broken(near) == []
    assert "out 0" in broken(y * 1.1)


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
