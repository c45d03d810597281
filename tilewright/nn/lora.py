"""Frozen linear layers, dense or quantized, with low-rank adapters: LoRA (arXiv 2106.09685), QLoRA
(arXiv 2305.14314) and DoRA (arXiv 2402.09353). `adapt.py` adds them to models; `lora_experts.py`
has those for experts.

`base.*` is the original layer; its adapters are `lora_A` and `lora_B`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tilewright.core import torch_names
from tilewright.nn.quantized_layers import Quantized, QuantizedLinear, quantize_as
from tilewright.nn.sharded import assign, is_sharded, local, share, whole
from tilewright.ops.quant.quantized_linear import dequantize


class _AddProducts(torch.autograd.Function):
    """y[:, rows] += low[:, part] @ B[rows]^T for each part, in place.

    In place, because adding to a slice of y would otherwise rewrite all of y, forward and backward:
    a third of a layer's time, measured on a CPU with Llama 3 8B's qkv_proj. Safe, because y is the
    output of a layer that saves only its input for backward.
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
    """The scale of adapters of this rank. Raises ValueError for an invalid rank or alpha."""
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"rank must be an int >= 1, got {rank!r}")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be a finite number > 0, got {alpha!r}")
    return alpha / (math.sqrt(rank) if rslora else rank)


def check_dropout(name: str, value: float) -> None:
    """Raises ValueError for a value that is no probability below 1."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a number from 0 to below 1, got {value!r}")


def init_A(A: torch.Tensor, generator: torch.Generator | None) -> None:
    """Initializes an A [..., in]: kaiming_uniform with a = sqrt(5)."""
    bound = 1 / math.sqrt(A.shape[-1])
    assign(A, torch.empty(A.shape).uniform_(-bound, bound, generator=generator))


class Ranks(Protocol):
    """The ranks that share a layer's matrix."""

    def own(self, t: torch.Tensor) -> torch.Tensor:
        """This rank's part of a vector that every rank has whole."""
        ...

    def total(self, t: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, without a gradient."""
        ...


class LoRALinear(nn.Module):
    """A frozen linear layer with an adapter: base(x) + scale * (x A^T) B^T.

    lora_A [parts * r, K] is initialized uniformly in +- 1 / sqrt(K), as in PEFT and nn.Linear;
    lora_B [rows, r], for the parts with adapters, with zeros, so that the initial output is the
    base's.

    With `use_dora` each of these rows of the sum, without the base's bias, is scaled by

        (|W| + change) / |W + scale B A|

    where || is a row's norm, of float32 sums, through which no gradient flows, and
    lora_magnitude_change [rows] begins with zeros: the factor is then exactly 1. |W| + change is
    PEFT's lora_magnitude_vector; a small change survives where parameters are cast to 16 bits, and
    weight decay draws it to 0. Dropout applies to the adapter's input alone, where PEFT also
    computes what it adds to W x from the input with dropout.

    Args:
        base: nn.Linear or QuantizedLinear; it is frozen.
        rank: r.
        alpha: The scale is alpha / rank, or with `rslora` alpha / sqrt(rank) (arXiv 2312.03732).
        rslora: See `alpha`.
        parts: Names and rows of the projections that the layer fuses, in order. Each has its own
            adapter, as if it were separate; the products with A are fused.
        targets: The parts that have an adapter; default: all.
        dtype: The adapters' dtype. They compute in it, or in autocast's dtype.
        dropout: The probability that an element of the adapter's input is zeroed in training
            mode; fused parts share a mask.
        use_dora: See above. Each call reads W once more, and dequantizes it if it is quantized.

    Raises:
        TypeError: `base` is another kind of module.
        ValueError: The rank, alpha, parts, targets or dropout are invalid.

    Example:
        >>> import torch
        >>> from tilewright.nn import LoRALinear
        >>> layer = LoRALinear(torch.nn.Linear(32, 16), rank=4, alpha=8)
        >>> x = torch.randn(2, 32)
        >>> torch.equal(layer(x), layer.base(x))
        True
    """

    base: nn.Linear | QuantizedLinear
    tp: Ranks | None = None
    # |W| [rows], where the base's weight is not there; see `magnitudes`.
    row_norms: torch.Tensor | None = None

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
        dropout: float = 0.0,
        use_dora: bool = False,
    ):
        super().__init__()
        if not isinstance(base, (nn.Linear, QuantizedLinear)):
            raise TypeError(
                f"base must be an nn.Linear or a QuantizedLinear, got {type(base).__name__}"
            )
        scale = adapter_scale(rank, alpha, rslora)
        check_dropout("dropout", dropout)
        parts = dict(parts) if parts else {"": base.out_features}
        if sum(parts.values()) != base.out_features or min(parts.values()) < 1:
            raise ValueError(
                f"parts must have the base's {base.out_features} rows between them, got {parts}"
            )
        requested = set(parts if targets is None else targets)
        if not requested or requested - set(parts):
            raise ValueError(f"targets must be some of {list(parts)}, got {sorted(requested)}")
        targets = [name for name in parts if name in requested]
        self.base = base.requires_grad_(False)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.rank, self.alpha, self.rslora, self.parts = rank, alpha, rslora, parts
        self.scale = scale
        self.dropout, self.use_dora = float(dropout), use_dora
        starts = dict(zip(parts, _offsets(parts.values()), strict=False))
        self.slices = {name: (starts[name], starts[name] + parts[name]) for name in targets}
        rows = sum(parts[name] for name in targets)
        device = next(t.device for t in (*base.parameters(), *base.buffers()))
        self.lora_A = nn.Parameter(
            torch.empty(len(targets) * rank, self.in_features, device=device, dtype=dtype)
        )
        self.lora_B = nn.Parameter(torch.empty(rows, rank, device=device, dtype=dtype))
        if use_dora:
            self.lora_magnitude_change = nn.Parameter(torch.empty(rows, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def scale(self) -> float:
        """The adapters' scale; 0 switches them off. Another value causes no recompile."""
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._scale, self._is_on = float(value), value != 0
        # On the CPU, where a kernel reads it without a synchronization, and neither a buffer, which
        # would be cast with the model, nor on meta, where there are no values.
        self._scale_tensor = torch.tensor(self._scale, dtype=torch.float64, device="cpu")

    def _scaled(self, t: torch.Tensor) -> torch.Tensor:
        """t times the scale, rounded once."""
        wide = torch.promote_types(t.dtype, torch.float32)
        return (t.to(wide) * self._scale_tensor).to(t.dtype)

    def factors(self, *, repeated: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
        """This rank's A [r, K] and B [rows, r], and the scale, for a caller that computes the
        products itself.

        repeated: every rank that has A whole computes all of its gradient, not a part of a sum.
        """
        A = self.lora_A
        A = A.to_local() if repeated and is_sharded(A) else local(A)
        return A, local(self.lora_B), self.scale

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initializes the adapters again.

        generator: on the CPU, for values that depend neither on the device nor on sharding.
        """
        if not self.lora_A.is_meta:
            init_A(self.lora_A, generator)
            self.lora_B.zero_()
            if self.use_dora:
                self.lora_magnitude_change.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lead = x.shape[:-1]
        # As a matrix: its product is not a view, and can be added to in place.
        x = x.reshape(math.prod(lead), x.shape[-1])
        y = self.base(x)
        autocast = torch.is_autocast_enabled(x.device.type)
        A, B = local(self.lora_A), local(self.lora_B)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else A.dtype
        # Adapters in a narrower dtype must not reduce the base's precision.
        wide = torch.promote_types(y.dtype, dtype)
        # Saved for backward: x and low.
        kept = F.dropout(x, self.dropout) if self.dropout and self.training else x
        low = self._scaled(F.linear(kept.to(dtype), A.to(dtype)))
        low, B, out = low.to(wide), B.to(wide), y.to(wide)
        if len(self.parts) == 1:
            out = torch.addmm(out, low, B.t())
        elif torch.compiler.is_compiling() or torch_names.is_view(out) or not out.is_contiguous():
            out = self._separately(out, low, B)
        else:
            ranks = self._ranks(y)
            slices = tuple((a // ranks, b // ranks) for a, b in self.slices.values())
            out = _AddProducts.apply(out, low, B, slices, self.rank)
        if self.use_dora and self._is_on:
            factor, bias = self._factor(y.shape[1]), self.base.bias
            out = out * factor
            if bias is not None:
                # What the base has added is not scaled. Where the factor is 1 nothing changes.
                own: Callable[[], torch.Tensor] | None = getattr(self.base, "own_bias", None)
                out = out + (1 - factor) * (bias if own is None else own())
        return out.to(y.dtype).view(*lead, y.shape[1])

    def _factor(self, rows: int) -> torch.Tensor:
        """The factor of DoRA for this rank's rows, float32 [rows]; 1 where there is no adapter."""
        change = local(self.lora_magnitude_change)
        ranks = self.out_features // rows
        parts = change.split([stop - start for start, stop in self.slices.values()])
        if ranks > 1:
            assert self.tp is not None  # it has sharded the rows
            parts = [self.tp.own(part) for part in parts]
        bare, merged = self._norms(ranks)
        change, factors, at = torch.cat(list(parts)), [], 0
        factor = (bare + change.to(bare.dtype)) / merged
        for name, n in self.parts.items():
            n //= ranks
            factors.append(factor[at : at + n] if name in self.slices else factor.new_ones(n))
            at += n if name in self.slices else 0
        return factors[0] if len(factors) == 1 else torch.cat(factors)

    @torch.no_grad()
    def _norms(self, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The norms |W| and |W + scale B A| of the rows with adapters on this rank, in float32
        (float64 for a float64 W).

            |w + s b A|^2 = |w|^2 + s b . (2 A w + s A A^T b)

        needs no matrix of W's size: a product with r columns, and one of r x r. Where B is 0 the
        two norms are the same bits. The product is rounded to W's dtype once; its error counts by
        the share of the adapter in the norm. Where the adapter cancels a row, only rounding error
        is left of the sum: the square is at least the rounding of |w|^2.
        """
        base = self.base
        W = base.dense() if isinstance(base, QuantizedLinear) else local(base.weight)
        wide = torch.promote_types(W.dtype, torch.float32)
        squares, added, at = [], [], 0
        with torch.autocast(W.device.type, enabled=False):
            A, B = (local(p).to(wide) for p in (self.lora_A, self.lora_B))
            for i, (start, stop) in enumerate(self.slices.values()):
                rows, a = W[start // ranks : stop // ranks], A[i * self.rank : (i + 1) * self.rank]
                b = self._scaled(B[at : at + len(rows)])
                at += len(rows)
                squares.append(torch.linalg.vector_norm(rows, dim=1, dtype=wide).square())
                product = F.linear(rows, a.to(W.dtype)).to(wide)
                added.append((b * (2 * product + b @ (a @ a.t()))).sum(1))
            sums = torch.stack((torch.cat(squares), torch.cat(added)))
            if W.shape[1] < self.in_features:
                assert self.tp is not None  # it has sharded the columns
                sums = self.tp.total(sums)
            square, more = sums
            limits = torch.finfo(wide)
            merged = torch.maximum(square + more, square * limits.eps).clamp_min(limits.tiny)
            return square.sqrt(), merged.sqrt()

    def _ranks(self, y):
        """Ranks over which the base's rows are sharded: each has the same fraction of every
        part.
        """
        return self.out_features // y.shape[1]

    def _separately(self, y, low, B):
        """Out of place, which a compiler fuses."""
        outputs, at, i = [], 0, 0
        ranks = self._ranks(y)
        widths = [n // ranks for n in self.parts.values()]
        for name, rows in zip(self.parts, y.split(widths, 1), strict=True):
            if name in self.slices:
                r, n = self.rank, rows.shape[1]
                rows = torch.addmm(rows, low[:, i * r : (i + 1) * r], B[at : at + n].t())
                i, at = i + 1, at + n
            outputs.append(rows)
        return torch.cat(outputs, 1)

    def delta(self) -> torch.Tensor:
        """The adapters' contribution to the weight, float32 [N, K]. Every rank of a sharded layer
        must call it.
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
        """The weight with its adapters, float32 [N, K]; a copy. Every rank of a sharded layer must
        call it.
        """
        return self._merged(self._dense(), self.delta(), self._change())

    def _dense(self) -> torch.Tensor:
        """The whole weight, float32."""
        if isinstance(self.base, QuantizedLinear):
            return self.base.dense()
        return whole(self.base.weight.detach()).float()

    def _change(self) -> torch.Tensor | None:
        """DoRA's change of the magnitude of every row, float32 [N]; None without DoRA."""
        if not self.use_dora:
            return None
        own, at = whole(self.lora_magnitude_change.detach()).float(), 0
        change = own.new_zeros(self.out_features)
        for start, stop in self.slices.values():
            change[start:stop] = own[at : at + stop - start]
            at += stop - start
        return change

    @staticmethod
    def _merged(
        weight: torch.Tensor, delta: torch.Tensor, change: torch.Tensor | None
    ) -> torch.Tensor:
        """Some rows of a weight with their adapters.   change: as `_change`."""
        total = weight + delta
        if change is None:
            return total
        norm = torch.linalg.vector_norm(total, dim=1).clamp_min(torch.finfo(total.dtype).tiny)
        magnitude = torch.linalg.vector_norm(weight, dim=1).clamp_min(torch.finfo(total.dtype).tiny)
        return total.mul_(((magnitude + change) / norm).unsqueeze(1))

    @torch.no_grad()
    def merge_(self, generator: torch.Generator | None = None) -> None:
        """Adds the adapters to the weight and initializes new ones.

        The sum is in float32, then rounded to the weight's dtype or quantized again in its format.
        """
        base = self.base
        if isinstance(base, QuantizedLinear):
            base.fill(self._sums(base))
        elif self.use_dora:
            local(base.weight).copy_(share(self.merged_weight(), base.weight))
        else:
            weight = local(base.weight)
            weight.copy_(weight.float() + share(self.delta(), base.weight))
        self.reset_parameters(generator)

    @torch.no_grad()
    def check_merge(self) -> None:
        """Raises ValueError if `merge_` would, and changes nothing."""
        if isinstance(self.base, QuantizedLinear):
            self._sums(self.base)

    def _sums(self, base: QuantizedLinear) -> list[Quantized]:
        """The base's parts with their adapters."""
        delta, change, new, at = self.delta(), self._change(), [], 0
        for q in base.weights():
            stop = at + q.shape[0]
            if any(a < stop and at < b for a, b in self.slices.values()):
                own = None if change is None else change[at:stop]
                dense = self._merged(dequantize(q, dtype=torch.float32), delta[at:stop], own)
                q = quantize_as(q, dense)
            new.append(q)
            at = stop
        return new

    def adapters(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yields each part's name ("" if the layer is not fused), A [r, K] and B [rows, r]. Every
        rank of a sharded layer must call it.
        """
        A, B, at = whole(self.lora_A.detach()), whole(self.lora_B.detach()), 0
        for i, (name, (start, stop)) in enumerate(self.slices.items()):
            yield name, A[i * self.rank : (i + 1) * self.rank], B[at : at + stop - start]
            at += stop - start

    @torch.no_grad()
    def base_norms(self) -> torch.Tensor:
        """|W| of the rows with adapters, float32 [rows]. Every rank of a sharded layer must call
        it.
        """
        if self.row_norms is not None:
            return self.row_norms
        norms = torch.linalg.vector_norm(self._dense(), dim=1)
        return torch.cat([norms[start:stop] for start, stop in self.slices.values()])

    def magnitudes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each part's name and DoRA's magnitudes |W| + change, float32 [rows]. Every rank of
        a sharded layer must call it.
        """
        norms, at = self.base_norms(), 0
        values = norms + whole(self.lora_magnitude_change.detach()).to(norms)
        for name, (start, stop) in self.slices.items():
            yield name, values[at : at + stop - start]
            at += stop - start

    @torch.no_grad()
    def load_adapters(
        self,
        pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        magnitudes: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Loads A and B of every part, as yielded by `adapters`, and with DoRA its magnitudes, as
        yielded by `magnitudes`.
        """
        for p, i in ((self.lora_A, 0), (self.lora_B, 1)):
            assign(p, torch.cat([pairs[name][i].to(p.dtype) for name in self.slices]))
        if self.use_dora:
            assert magnitudes is not None
            norms, p = self.base_norms(), self.lora_magnitude_change
            change = torch.cat([magnitudes[name].to(norms) for name in self.slices]) - norms
            assign(p, change.to(p.dtype))

    def extra_repr(self) -> str:
        more = f", dropout={self.dropout:g}" if self.dropout else ""
        more += ", use_dora=True" if self.use_dora else ""
        return f"rank={self.rank}, scale={self.scale:g}, adapters={list(self.slices)}{more}"


def _offsets(sizes: Iterable[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)]
