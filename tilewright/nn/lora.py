"""Linear layers that are frozen, dense or quantized, with low-rank adapters: LoRA (arXiv
2106.09685) and QLoRA (arXiv 2305.14314). `adapt.py` puts them into models, `lora_experts.py` has
those for experts.

In `base.*` a layer keeps what it was; its adapters are `lora_A` and `lora_B`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tilewright import _torch
from tilewright.nn.quantized import QuantizedLinear, quantize_as
from tilewright.nn.sharded import assign, local, share, whole
from tilewright.ops.quantized_linear import dequantize


class _AddProducts(torch.autograd.Function):
    """y[:, rows] += low[:, part] @ B[rows]^T for each part, in place.

    In place, because a part of y cannot be added to otherwise without writing all of y again,
    forward and backward: a third of a layer's time, measured on a CPU with Llama 3 8B's qkv_proj. y
    is the product of a layer that keeps its input only, so nothing needs what y was.
    """

    @staticmethod
    def forward(ctx, y, low, B, slices, rank):
        ctx.mark_dirty(y)
        ctx.save_for_backward(low, B)
        ctx.slices, ctx.rank = slices, rank
        flat, at = y.view(-1, y.shape[-1]), 0
        for i, (start, stop) in enumerate(slices):
            flat[:, start:stop].addmm_(
                low[:, i * rank : (i + 1) * rank], B[at : at + stop - start].t()
            )
            at += stop - start
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        low, B = ctx.saved_tensors
        dlow, dB = torch.empty_like(low), torch.empty_like(B)
        flat, at = dy.reshape(-1, dy.shape[-1]), 0
        for i, (start, stop) in enumerate(ctx.slices):
            part, rows = slice(i * ctx.rank, (i + 1) * ctx.rank), slice(at, at + stop - start)
            dlow[:, part] = flat[:, start:stop] @ B[rows]
            torch.mm(flat[:, start:stop].t(), low[:, part], out=dB[rows])
            at += stop - start
        return dy, dlow, dB, None, None


def adapter_scale(rank: int, alpha: float, rslora: bool) -> float:
    """What adapters of that rank are multiplied by. Raises ValueError for a rank or an alpha
    that cannot be.
    """
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"rank must be an int >= 1, got {rank!r}")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be a finite number > 0, got {alpha!r}")
    return alpha / (math.sqrt(rank) if rslora else rank)


def init_A(A: torch.Tensor, generator: torch.Generator | None) -> None:
    """The values that an A [..., in] begins with: kaiming_uniform with a = sqrt(5)."""
    bound = 1 / math.sqrt(A.shape[-1])
    assign(A, torch.empty(A.shape).uniform_(-bound, bound, generator=generator))


class LoRALinear(nn.Module):
    """A frozen linear layer with an adapter: base(x) + scale * (x A^T) B^T.

    base: nn.Linear or QuantizedLinear; it is frozen.   rank: r.
    alpha: scale is alpha / rank, or with rslora alpha / sqrt(rank) (arXiv 2312.03732).
    parts: of a layer that fuses several projections, their names and rows, in order. Each has an
        adapter of its own, as if it stood alone; the products with A are one.   targets: which of
        them have one; all by default.
    dtype: of the adapters. They are computed in it, or in autocast's.

    lora_A [parts * r, K]: each part's A begins as uniform in +- 1 / sqrt(K), which is PEFT's and
    nn.Linear's. lora_B [rows, r], of the parts with adapters: begins as zeros, so that the first
    output is the base's.
    """

    base: nn.Linear | QuantizedLinear

    def __init__(
        self,
        base: nn.Linear | QuantizedLinear,
        rank: int,
        alpha: float,
        *,
        rslora: bool = False,
        parts: Mapping[str, int] | None = None,
        targets: Iterable[str] | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        if not isinstance(base, (nn.Linear, QuantizedLinear)):
            raise TypeError(
                f"base must be an nn.Linear or a QuantizedLinear, got {type(base).__name__}"
            )
        scale = adapter_scale(rank, alpha, rslora)
        parts = dict(parts) if parts else {"": base.out_features}
        if sum(parts.values()) != base.out_features or min(parts.values()) < 1:
            raise ValueError(
                f"parts must have the base's {base.out_features} rows between them, got {parts}"
            )
        asked = set(parts if targets is None else targets)
        if not asked or asked - set(parts):
            raise ValueError(f"targets must be some of {list(parts)}, got {sorted(asked)}")
        targets = [name for name in parts if name in asked]
        self.base = base.requires_grad_(False)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.rank, self.alpha, self.rslora, self.parts = rank, alpha, rslora, parts
        self.scale = scale
        starts = dict(zip(parts, _offsets(parts.values()), strict=False))
        self.slices = {name: (starts[name], starts[name] + parts[name]) for name in targets}
        rows = sum(parts[name] for name in targets)
        device = next(t.device for t in (*base.parameters(), *base.buffers()))
        self.lora_A = nn.Parameter(
            torch.empty(len(targets) * rank, self.in_features, device=device, dtype=dtype)
        )
        self.lora_B = nn.Parameter(torch.empty(rows, rank, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Begins anew. generator: a CPU one, for values that do not depend on the device or on
        sharding.
        """
        if not self.lora_A.is_meta:
            init_A(self.lora_A, generator)
            self.lora_B.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lead = x.shape[:-1]
        x = x.reshape(
            math.prod(lead), x.shape[-1]
        )  # a matrix: what comes of it is no view, and can be added to
        y = self.base(x)
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else self.lora_A.dtype
        wide = torch.promote_types(y.dtype, dtype)  # adapters of few bits take none from the base
        low = (
            F.linear(x.to(dtype), self.lora_A.to(dtype)) * self.scale
        )  # kept for the backward: x and this
        low, B, out = low.to(wide), self.lora_B.to(wide), y.to(wide)
        slices = tuple(self.slices.values())
        if len(self.parts) == 1:
            out = torch.addmm(out, low, B.t())
        elif torch.compiler.is_compiling() or _torch.is_view(out) or not out.is_contiguous():
            out = self._separately(out, low, B)
        else:
            out = _AddProducts.apply(out, low, B, slices, self.rank)
        return out.to(y.dtype).view(*lead, self.out_features)

    def _separately(self, y, low, B):
        """The same, out of place: what a compiler fuses."""
        found, at, i = [], 0, 0
        for name, rows in zip(self.parts, y.split(list(self.parts.values()), 1), strict=True):
            if name in self.slices:
                r, n = self.rank, rows.shape[1]
                rows = torch.addmm(rows, low[:, i * r : (i + 1) * r], B[at : at + n].t())
                i, at = i + 1, at + n
            found.append(rows)
        return torch.cat(found, 1)

    def delta(self) -> torch.Tensor:
        """What the adapters add to the weight, float32 [N, K]. Of sharded ones every rank must
        call it.
        """
        A, B = whole(self.lora_A).float(), whole(self.lora_B).float()
        delta, at = A.new_zeros(self.out_features, self.in_features), 0
        for i, (start, stop) in enumerate(self.slices.values()):
            torch.mm(
                B[at : at + stop - start],
                A[i * self.rank : (i + 1) * self.rank],
                out=delta[start:stop],
            )
            at += stop - start
        return delta.mul_(self.scale)

    @torch.no_grad()
    def merged_weight(self) -> torch.Tensor:
        """The weight with its adapters, float32 [N, K]; changes nothing. Of sharded ones every
        rank must call it.
        """
        weight = (
            self.base.dense()
            if isinstance(self.base, QuantizedLinear)
            else whole(self.base.weight).float()
        )
        return weight + self.delta()

    @torch.no_grad()
    def merge_(self, generator: torch.Generator | None = None) -> None:
        """Adds the adapters to the weight, in float32, then rounded to its dtype or quantised again
        in its format; and begins new ones.
        """
        delta, base = self.delta(), self.base
        if isinstance(base, QuantizedLinear):
            new, at = [], 0
            for q in base.weights():
                stop = at + q.shape[0]
                touched = any(a < stop and at < b for a, b in self.slices.values())
                new.append(
                    quantize_as(q, dequantize(q, dtype=torch.float32) + delta[at:stop])
                    if touched
                    else q
                )
                at = stop
            base.fill(new)
        else:
            own = local(base.weight)
            own.copy_(own.float() + share(delta, base.weight))
        self.reset_parameters(generator)

    def adapters(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Each part's name ("" if it is not fused), A [r, K] and B [rows, r]. Of sharded ones every
        rank must call it.
        """
        A, B, at = whole(self.lora_A.detach()), whole(self.lora_B.detach()), 0
        for i, (name, (start, stop)) in enumerate(self.slices.items()):
            yield name, A[i * self.rank : (i + 1) * self.rank], B[at : at + stop - start]
            at += stop - start

    @torch.no_grad()
    def load_adapters(self, found: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The reverse, of all parts at once."""
        assign(
            self.lora_A, torch.cat([found[name][0].to(self.lora_A.dtype) for name in self.slices])
        )
        assign(
            self.lora_B, torch.cat([found[name][1].to(self.lora_B.dtype) for name in self.slices])
        )

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale:g}, adapters={list(self.slices)}"


def _offsets(sizes: Iterable[int]) -> list[int]:
    found = [0]
    for size in sizes:
        found.append(found[-1] + size)
    return found
