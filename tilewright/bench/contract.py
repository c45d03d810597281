"""The numerics contract: an implementation may lose at most twice what eager PyTorch loses in the same dtype.

For a case, *truth* is the eager twin in float64 on the same (already rounded) inputs. `error` measures a result
against it, and the contract is

    error(implementation) <= 2 * error(eager twin in this dtype) + atol

for every output and every gradient. Tests and benchmarks both call `check`; a benchmark prints no time for a case
that fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.registry import Case, Op

# In the units of `error`. 16-bit: the one rounding on store that is left when the twin happens to be exact. float32:
# four of them, since there the sums too are in the result's own precision and their order is free.
ATOL = {torch.float32: 2 * torch.finfo(torch.float32).eps,
        torch.bfloat16: torch.finfo(torch.bfloat16).eps / 2, torch.float16: torch.finfo(torch.float16).eps / 2}
ATOL[torch.float64] = 1e-12


def error(result: torch.Tensor, truth: torch.Tensor) -> tuple[float, tuple[int, ...]]:
    """Largest deviation, relative to the element or to the tensor's root mean square if that is larger; and where.

    Relative to the element, so that a wrong value is not hidden by a larger one elsewhere; but not below the root mean
    square, because an element that is small by cancellation carries the rounding of its large terms. Infinities must
    be equal; a NaN where truth has none is an infinite error, so an element that was never written is one too.
    """
    if result.shape != truth.shape:
        return float("inf"), tuple(result.shape)
    if truth.numel() == 0:
        return 0.0, ()
    if not truth.dtype.is_floating_point:
        wrong = (result != truth).double()
    else:
        r, t = result.double(), truth.double()
        finite = t.isfinite()
        scale = t[finite].square().mean().sqrt() if finite.any() else t.new_zeros(())
        wrong = (r - t).abs() / t.abs().maximum(scale).clamp_min(1e-30)
        same = (r == t) | (r.isnan() & t.isnan())
        wrong = torch.where(same, 0.0, torch.where(finite, wrong.nan_to_num(nan=float("inf"), posinf=float("inf")),
                                                   float("inf")))
    worst = int(wrong.argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), wrong.shape))
    return float(wrong.flatten()[worst]), where


def leaves(out: Any) -> list[torch.Tensor]:
    """Tensors in a result: a tensor, or a (named) tuple of tensors and Nones."""
    if isinstance(out, torch.Tensor):
        return [out]
    return [t for t in out if t is not None]


def convert(kwargs: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """Fresh leaves with the same values: in `dtype`, or (None) in their own. Integers and options are passed on."""
    new = {}
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            # Strides are part of a case, and `to` would pack a row-strided tensor.
            fresh = torch.empty_strided(value.shape, value.stride(), dtype=dtype or value.dtype, device=value.device)
            new[name] = fresh.copy_(value.detach()).requires_grad_(value.requires_grad)
        elif isinstance(value, torch.Tensor):
            new[name] = value.clone()
        else:
            new[name] = value
    return new


LAYOUTS = ("contiguous", "strided", "expanded")


def upstream(outs: list[torch.Tensor], layout: str, seed: int = 1) -> list[torch.Tensor]:
    """Gradients to feed back, drawn in float64 and rounded to each output's dtype, in a memory layout of choice."""
    found = []
    for i, out in enumerate(outs):
        g = torch.Generator(device=out.device).manual_seed(seed + 1000 * i)
        if layout == "expanded":   # one value for all, stride 0: what .sum().backward() sends
            found.append(torch.randn((), device=out.device, dtype=torch.float64, generator=g).to(out.dtype)
                         .expand(out.shape))
            continue
        grad = torch.randn(out.shape, device=out.device, dtype=torch.float64, generator=g).to(out.dtype)
        if layout == "strided" and grad.dim():
            wide = torch.empty((*grad.shape[:-1], 2 * grad.shape[-1]), dtype=grad.dtype, device=grad.device)
            wide[..., ::2] = grad
            grad = wide[..., ::2]
        found.append(grad)
    return found


def run(op: Op, implementation: str, kwargs: dict[str, Any], layout: str = "contiguous",
        grads: list[torch.Tensor] | None = None) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Calls the op and differentiates it. Returns results by name ("out 0", "grad x") and the upstream gradients."""
    outs = leaves(op.public(**kwargs, implementation=implementation))
    results = {f"out {i}": out.detach() for i, out in enumerate(outs)}
    differentiable = [o for o in outs if o.requires_grad]
    inputs = {n: v for n, v in kwargs.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    if not differentiable:
        return results, []
    if grads is None:
        grads = upstream(differentiable, layout)
    given = [g.to(o.dtype) if g.dtype != o.dtype else g for g, o in zip(grads, differentiable, strict=True)]
    found = torch.autograd.grad(differentiable, list(inputs.values()), given, allow_unused=True)
    for name, grad in zip(inputs, found, strict=True):
        if grad is not None:
            results[f"grad {name}"] = grad
    return results, grads


@dataclass(frozen=True)
class Finding:
    """One compared tensor: its error, eager's own, what is allowed, and where the worst element is."""

    name: str
    error: float
    eager: float
    budget: float
    where: tuple[int, ...]

    def __str__(self) -> str:
        return (f"{self.name}: error {self.error:.2e} at {list(self.where)} exceeds {self.budget:.2e} "
                f"(2 x eager's {self.eager:.2e} + slack)")


def check(op: Op, implementation: str, case: Case, device: str, dtype: torch.dtype, *, seed: int = 0,
          layout: str = "contiguous") -> list[Finding]:
    """Compares one implementation on one case; returns every tensor that breaks the contract (none: it holds)."""
    return compare(op, implementation, case.make(device, dtype, seed), dtype, layout)


def compare(op: Op, implementation: str, kwargs: dict[str, Any], dtype: torch.dtype,
            layout: str = "contiguous") -> list[Finding]:
    """`check` on inputs that are at hand."""
    eager, grads = run(op, "eager", convert(kwargs, None), layout)
    truth, _ = run(op, "eager", convert(kwargs, torch.float64), layout, grads)
    result, _ = run(op, implementation, convert(kwargs, None), layout, grads)
    atol = op.atol(dtype, kwargs) if callable(op.atol) else op.atol.get(dtype, ATOL[dtype])
    broken = []
    for name, t in truth.items():
        own, _ = error(eager[name], t)
        budget = 2 * own + atol
        if name not in result:
            broken.append(Finding(f"{name} (missing)", float("inf"), own, budget, ()))
            continue
        e, where = error(result[name], t)
        if not e <= budget:
            broken.append(Finding(name, e, own, budget, where))
        if result[name].dtype != eager[name].dtype:
            broken.append(Finding(f"{name} (dtype {result[name].dtype}, not {eager[name].dtype})", float("inf"), own,
                                  budget, ()))
    return broken
