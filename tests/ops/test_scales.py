"""Inputs at the ends of a dtype's range: what is finite under the eager twin is finite under every
implementation, and as exact as the contract says.
"""

import pytest
import torch
from helpers import DEVICE, skip_unless_usable
from small_cases import whole_cases

from tilewright.bench import contract
from tilewright.core.registry import short
from tilewright.ops import OPS

F32, BF16 = torch.float32, torch.bfloat16
# Sums of terms that are near the largest number overflow in some orders and not in others.
SUMS = (
    "attention",
    "gated_delta_rule",
    "linear_cross_entropy",
    "linear_logprob",
    "linear_policy_loss",
    "linear_preference_loss",
    "unpermute",
    "grouped_gemm",
    "moe_mlp",
    "moe_lora",
    "quantized_linear",
    "fp8_linear",
    "low_precision_linear",
    "low_precision_grouped_gemm",
)
KNOWN = {
    # Fused attention computes scores again in its backward and compares them with a stored
    # log-sum-exp: an ulp of a score of 1e60 is beyond the exponential's range.
    ("attention", "triton"): "scores are recomputed",
    ("attention", "cpp"): "scores are recomputed",
    ("attention", "sdpa"): "scores are recomputed",
    # F.gelu's derivative is NaN where gate^3 overflows.
    ("gelu_mul", "torch"): "PyTorch's own derivative",
    # F.layer_norm's variance is NaN where the squares overflow.
    ("layernorm", "torch"): "PyTorch's own variance",
}


def first_of(kwargs):
    """The name of the first floating-point tensor, or gradients; None if there are none."""
    found = {n: v for n, v in kwargs.items() if n == "grads" or torch.is_tensor(v)}
    return next((n for n, v in found.items() if n == "grads" or v.is_floating_point()), None)


CALLS = [
    pytest.param(op, i.name, dtype, id=f"{op.name}-{i.name}-{short(dtype)}")
    for op in OPS.values()
    if first_of(next(c for c in op.cases if "contract" in c.tags).make("cpu", F32, 0)) is not None
    for i in op.implementations
    for dtype in (F32, BF16)
    if i.name != "eager" and dtype in i.dtypes
]


# The twin's error counts as this at least where PyTorch's own op is judged, which sums in an order
# that differs by processor: in so few elements the twin's error may be smaller by chance.
OF_TORCH = 8 * torch.finfo(F32).eps


def scaled(kwargs, largest):
    """The arguments, with a first floating-point tensor, or gradients, whose largest element has
    this magnitude.
    """
    name = first_of(kwargs)

    def one(t):
        wide = t.detach().double()
        new = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        limit = torch.finfo(t.dtype).max
        new.copy_((wide / wide.abs().max() * largest).clamp(-limit, limit))
        return new.requires_grad_(t.requires_grad)

    value = kwargs[name]
    return {**kwargs, name: list(map(one, value)) if name == "grads" else one(value)}


def outcome(op, name, kwargs, dtype=None, grads=None):
    """Results and upstream gradients, or the refusal of values that are not finite."""
    try:
        return contract.run(op, name, contract.convert(kwargs, dtype), grads=grads)
    except ValueError as error:
        assert "must be finite" in str(error)
        return None, grads


@pytest.mark.parametrize("op, name, dtype", CALLS)
def test_results_are_finite_and_right_where_eagers_are(op, name, dtype):
    skip_unless_usable(op, name, dtype)
    # The interpreter is slow.
    for case in whole_cases(op)[: 1 if name == "triton" and DEVICE == "cpu" else 2]:
        for largest in (1e-30, 1e30, torch.finfo(dtype).max):
            kwargs = scaled(case.make(DEVICE, dtype, 0), largest)
            if largest < 1e30 or (op.name, name) not in KNOWN:
                judge(op, name, dtype, kwargs, largest)


def judge(op, name, dtype, kwargs, largest):
    eager, grads = outcome(op, "eager", kwargs)
    found, _ = outcome(op, name, kwargs, None, grads)
    assert (eager is None) == (found is None), "one of them refuses"
    if eager is None:
        return
    truth, _ = outcome(op, "eager", kwargs, torch.float64, grads)
    for key, e in eager.items():
        atol = contract.slack(op, dtype, kwargs, key)
        atol = contract.ATOL[dtype] if atol is None else atol
        e, r, t = e.double(), found[key].double(), truth[key].double()
        both, where = e.isfinite() & r.isfinite(), f"{key} at {largest:.0e}"
        exempt = op.name in SUMS and largest > 1e30
        if not exempt:
            assert (r.isfinite() | ~e.isfinite()).all(), f"{where} is not finite"
        own = contract.error(e.where(both, 0), t.where(both, 0))[0]
        budget = 2 * max(own, OF_TORCH if name == "torch" else 0.0) + atol
        worst, at = contract.error(r.where(both, 0), t.where(both, 0))
        assert worst <= budget, f"{where}: {worst:.2e} > {budget:.2e} at {at}"
        if exempt:
            continue
        # Where an intermediate result of the twin alone overflows, the other one is right.
        more = r.isfinite() & ~e.isfinite() & t.isfinite()
        worst, at = contract.error(r.where(more, 0), t.where(more, 0))
        assert worst <= max(budget, 1e-5), f"{where}: {worst:.2e} at {at}, unlike eager's"
