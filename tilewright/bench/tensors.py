"""Tensors of a call: their deviation from truth, copies in another dtype, upstream gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from tilewright._torch import pytree
from tilewright.bench.piece import Index
from tilewright.ops.quantize import Quantized

CHUNK = (
    2**24
)  # elements compared at a time: float64 temporaries of 128 MiB each, for tensors of any size


def error(result: torch.Tensor, truth: torch.Tensor) -> tuple[float, tuple[int, ...]]:
    """Largest deviation, relative to the element or to the tensor's root mean square if that is
    larger; and where.

    Relative to the element, so that a wrong value is not hidden by a larger one elsewhere; but not
    below the root mean square, because an element that is small by cancellation carries the
    rounding of its large terms. Infinities must be equal; a NaN where truth has none is an infinite
    error, so an element that was never written is one too.
    """
    if result.shape != truth.shape:
        return float("inf"), tuple(result.shape)
    return error_of_parts([(result, truth, ())])


def error_of_parts(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor, Index]],
) -> tuple[float, tuple[int, ...]]:
    """`error` of a tensor of which parts are at hand: (result, truth, where that part is)."""
    flat = [(r.reshape(-1), t.reshape(-1)) for r, t, _ in pairs]
    scale, worst, at = 0.0, -1.0, (0, 0)
    if pairs[0][1].dtype.is_floating_point:
        squares, count = 0.0, 0
        for values in (t[piece].double() for _, t in flat for piece in chunks(t)):
            finite = values.isfinite()  # no index by it: its size would be a wait for the device
            squares += float(values.where(finite, 0.0).square().sum())
            count += int(finite.sum(dtype=torch.float64))
        scale = (squares / max(count, 1)) ** 0.5
    for i, (r, t) in enumerate(flat):
        for piece in chunks(t):
            value, place = _deviation(r[piece], t[piece], scale).max(0)
            value, place = torch.stack((value, place.double())).tolist()  # one wait for the device
            if value > worst:
                worst, at = value, (i, piece.start + int(place))
    if worst < 0:
        return 0.0, ()
    _, truth, index = pairs[at[0]]
    inside = (int(n) for n in torch.unravel_index(torch.tensor(at[1]), truth.shape))
    return worst, tuple(
        n + (index[d].start or 0 if d < len(index) else 0) for d, n in enumerate(inside)
    )


def chunks(t: torch.Tensor) -> list[slice]:
    return [slice(at, at + CHUNK) for at in range(0, t.numel(), CHUNK)]


def _deviation(r: torch.Tensor, t: torch.Tensor, scale: float) -> torch.Tensor:
    if not t.dtype.is_floating_point:
        return (r != t).double()
    r, t = r.double(), t.double()
    inf = float("inf")
    wrong = (r - t).abs() / t.abs().clamp_min(max(scale, 1e-30))
    wrong = torch.where(t.isfinite(), wrong.nan_to_num(nan=inf, posinf=inf), inf)
    return torch.where((r == t) | (r.isnan() & t.isnan()), 0.0, wrong)


def leaves(value: Any) -> list[torch.Tensor]:
    """Tensors in a result or in arguments: a tensor, or a tuple, dictionary or quantized tensor
    of tensors and else.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def convert(kwargs: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """Fresh leaves with the same values: in `dtype`, or (None) in their own. Integers and options
    are passed on, and so is what a quantized tensor holds; `dtype` is then that in which it is
    read.
    """
    new = {}
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            # Strides are part of a case, and `to` would pack a row-strided tensor.
            fresh = torch.empty_strided(
                value.shape, value.stride(), dtype=dtype or value.dtype, device=value.device
            )
            new[name] = fresh.copy_(value.detach()).requires_grad_(value.requires_grad)
        elif isinstance(value, torch.Tensor):
            new[name] = value.clone()
        elif isinstance(value, Quantized):
            new[name] = dataclasses.replace(
                pytree.tree_map_only(torch.Tensor, torch.clone, value), dtype=dtype or value.dtype
            )
        else:
            new[name] = value
    return new


LAYOUTS = ("contiguous", "strided", "expanded")


def upstream(outs: list[torch.Tensor], layout: str, seed: int = 1) -> list[torch.Tensor]:
    """Gradients to feed back, drawn in float64 and rounded to each output's dtype, in a memory
    layout of choice.
    """
    found = []
    for i, out in enumerate(outs):
        g = torch.Generator(device=out.device).manual_seed(seed + 1000 * i)
        if layout == "expanded":  # one value for all, stride 0: what .sum().backward() sends
            found.append(
                torch.randn((), device=out.device, dtype=torch.float64, generator=g)
                .to(out.dtype)
                .expand(out.shape)
            )
            continue
        grad = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        flat = grad.view(-1)
        for piece in chunks(flat):  # float64 of all of it would be four times as much
            flat[piece] = torch.randn(
                flat[piece].shape, device=out.device, dtype=torch.float64, generator=g
            )
        if layout == "strided" and grad.dim():
            wide = torch.empty(
                (*grad.shape[:-1], 2 * grad.shape[-1]), dtype=grad.dtype, device=grad.device
            )
            wide[..., ::2] = grad
            grad = wide[..., ::2]
        found.append(grad)
    return found
