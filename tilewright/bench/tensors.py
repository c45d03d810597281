"""Tensors of a call: their error against truth, casts to another dtype, upstream gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from tilewright.bench.piece import Index
from tilewright.core.torch_names import pytree
from tilewright.ops.quant.quantize import Quantized

# Elements compared at a time: float64 temporaries of 128 MiB each, for tensors of any size.
CHUNK = 2**24
SAMPLE = 2**20  # elements that a median is taken of


def error(result: torch.Tensor, truth: torch.Tensor) -> tuple[float, tuple[int, ...]]:
    """Largest deviation, relative to the element or to the tensor's root mean square, whichever is
    larger; and its index.

    It is relative to the element, so that a larger value elsewhere does not hide a wrong one; but
    not below the root mean square, because an element that is small by cancellation carries the
    rounding of its large terms. Infinities must be equal. A NaN where truth has none is an infinite
    error, and so is an element that was never written.
    """
    if result.shape != truth.shape:
        return float("inf"), tuple(result.shape)
    return error_of_parts([(result, truth, ())])


def error_of_parts(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor, Index]],
) -> tuple[float, tuple[int, ...]]:
    """`error` of a tensor given in parts: (result, truth, index of the part)."""
    return deviation_of_parts(pairs, root_mean_square([t for _, t, _ in pairs]))


def root_mean_square(parts: Sequence[torch.Tensor]) -> float:
    """The root mean square of a tensor's finite elements, given in parts; 0 for integers."""
    if not parts[0].dtype.is_floating_point:
        return 0.0
    squares, count = 0.0, 0
    for values in (t[piece].double() for t in _flat(parts) for piece in chunks(t)):
        finite = values.isfinite()  # no boolean indexing: it would synchronize with the device
        squares += float(values.where(finite, 0.0).square().sum())
        count += int(finite.sum(dtype=torch.float64))
    return (squares / max(count, 1)) ** 0.5


def ordinary(parts: Sequence[torch.Tensor], least: float = 0.0) -> float:
    """The median magnitude of the finite elements above `least` of a tensor that is given in parts.
    A large tensor's is the median of evenly spaced elements. 0 for integers, and where there are
    none.
    """
    flat = _flat(parts)
    if not flat[0].dtype.is_floating_point:
        return 0.0
    step = -(-sum(t.numel() for t in flat) // SAMPLE) or 1
    some = torch.cat([t[::step].double().abs() for t in flat])
    some = some.where(some.isfinite() & (some > least), float("nan"))
    median = float(some.nanmedian()) if some.numel() else 0.0
    return median if median == median else 0.0


def deviation_of_parts(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor, Index]], scale: float
) -> tuple[float, tuple[int, ...]]:
    """`error_of_parts` relative to the element or to `scale`, whichever is larger."""
    flat = [(r.reshape(-1), t.reshape(-1)) for r, t, _ in pairs]
    worst, at = -1.0, (0, 0)
    for i, (r, t) in enumerate(flat):
        for piece in chunks(t):
            value, place = _deviation(r[piece], t[piece], scale).max(0)
            value, place = torch.stack((value, place.double())).tolist()  # one synchronization
            if value > worst:
                worst, at = value, (i, piece.start + int(place))
    if worst < 0:
        return 0.0, ()
    _, truth, index = pairs[at[0]]
    inside = (int(n) for n in torch.unravel_index(torch.tensor(at[1]), truth.shape))
    return worst, tuple(
        n + (index[d].start or 0 if d < len(index) else 0) for d, n in enumerate(inside)
    )


def _flat(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t.reshape(-1) for t in parts]


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
    """The tensors in a result or in arguments, which are a tensor, tuple, dictionary or quantized
    tensor with tensors and other values.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def convert(kwargs: dict[Any, Any], dtype: torch.dtype | None) -> dict[Any, Any]:
    """New leaves with the same values, in `dtype` or (None) in their own dtypes, also in lists.
    Integers, options and the contents of quantized tensors are passed on; `dtype` is then the dtype
    that a quantized tensor dequantizes to.
    """
    new = {}
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            # Strides are part of a case, and `to` would make a row-strided tensor contiguous.
            fresh = torch.empty_strided(
                value.shape, value.stride(), dtype=dtype or value.dtype, device=value.device
            )
            new[name] = fresh.copy_(value.detach()).requires_grad_(value.requires_grad)
        elif isinstance(value, torch.Tensor):
            new[name] = value.clone()
        elif isinstance(value, list):
            numbered = convert(dict(enumerate(value)), dtype)
            new[name] = [numbered[i] for i in range(len(value))]
        elif isinstance(value, Quantized):
            new[name] = dataclasses.replace(
                pytree.tree_map_only(torch.Tensor, torch.clone, value), dtype=dtype or value.dtype
            )
        else:
            new[name] = value
    return new


LAYOUTS = ("contiguous", "strided", "expanded")


def upstream(outs: list[torch.Tensor], layout: str, seed: int = 1) -> list[torch.Tensor]:
    """Upstream gradients, drawn in float64 and rounded to each output's dtype, in the given memory
    layout.
    """
    grads = []
    for i, out in enumerate(outs):
        g = torch.Generator(device=out.device).manual_seed(seed + 1000 * i)
        if layout == "expanded":  # one value with strides 0, as from .sum().backward()
            grads.append(
                torch.randn((), device=out.device, dtype=torch.float64, generator=g)
                .to(out.dtype)
                .expand(out.shape)
            )
            continue
        grad = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        flat = grad.view(-1)
        for piece in chunks(flat):  # all of it in float64 would be four times as large
            flat[piece] = torch.randn(
                flat[piece].shape, device=out.device, dtype=torch.float64, generator=g
            )
        if layout == "strided" and grad.dim():
            wide = torch.empty(
                (*grad.shape[:-1], 2 * grad.shape[-1]), dtype=grad.dtype, device=grad.device
            )
            wide[..., ::2] = grad
            grad = wide[..., ::2]
        grads.append(grad)
    return grads
