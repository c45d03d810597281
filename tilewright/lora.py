"""Linear layers that are frozen, dense or quantised, with low-rank adapters: LoRA (arXiv
2106.09685) and QLoRA (arXiv 2305.14314). `adapt.py` puts them into models, `lora_experts.py` has
those for experts.

In `base.*` a layer keeps what it was; its adapters are `lora_A` and `lora_B`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tilewright import _torch
from tilewright.ops.aqn import AQN
from tilewright.ops.block_fp8 import BlockFP8, quantize_block_fp8
from tilewright.ops.nf4 import quantize_nf4
from tilewright.ops.nf4_format import BLOCKS, NF4
from tilewright.ops.nvfp4 import NVFP4, quantize_nvfp4
from tilewright.ops.quantize import Quantized
from tilewright.ops.quantized_linear import dequantize, quantized_linear

# ---- quantised formats


@dataclasses.dataclass(frozen=True)
class QuantFormat:
    """How weights are quantised. Called with a dense weight, it returns it quantised.

    name: nvfp4 | block_fp8 | nf4.   group_size: elements that share a scale: 16 for nvfp4; the edge
        of the square blocks of block_fp8, 1 to 128, by default 128; 32 to 4096, a power of two, for
        nf4, by default 64.
    """

    name: str
    group_size: int | None = None

    def __post_init__(self):
        if self.name not in FORMATS:
            raise ValueError(f"name must be one of {list(FORMATS)}, got {self.name!r}")
        if self.group_size is None:
            object.__setattr__(self, "group_size", DEFAULT_GROUPS[self.name])
        if wrong := wrong_group_size(self.name, self.group_size):
            raise ValueError(wrong)

    def __call__(self, weight: torch.Tensor) -> Quantized:
        if self.name == "nf4":
            return quantize_nf4(weight, block_size=self.group_size)
        if self.name == "block_fp8":
            return quantize_block_fp8(weight, block=(self.group_size, self.group_size))
        return quantize_nvfp4(weight)


# name -> class, the group sizes that exist, and how a sentence calls them
FORMATS = {
    "nvfp4": (NVFP4, (16,), "16"),
    "block_fp8": (BlockFP8, range(1, 129), "1 to 128"),
    "nf4": (NF4, BLOCKS, ", ".join(map(str, BLOCKS))),
}

DEFAULT_GROUPS = {"nvfp4": 16, "block_fp8": 128, "nf4": 64}  # of published checkpoints


def wrong_group_size(name: str, size: int) -> str | None:
    """A sentence if the format has no such groups."""
    _, sizes, shown = FORMATS[name]
    return (
        None
        if type(size) is int and size in sizes
        else f"{name} has groups of {shown}, got {size!r}"
    )


def format_of(q: Quantized) -> QuantFormat | str:
    """The format that q is in, or its description, if it is one that `QuantFormat` does not
    make.
    """
    if isinstance(q, NF4):
        return QuantFormat("nf4", q.block_size)
    if isinstance(q, NVFP4):
        return QuantFormat("nvfp4", 16)
    rows, columns = q.block
    return (
        QuantFormat("block_fp8", rows)
        if rows == columns <= 128
        else f"block_fp8 of {rows} x {columns} blocks"
    )


def quantize_as(q: Quantized, weight: torch.Tensor) -> Quantized:
    """weight in q's format with q's options; it still says that it was of q's dtype."""
    if isinstance(q, NF4):
        new = quantize_nf4(weight, double_quant=q.offset is not None, block_size=q.block_size)
    elif isinstance(q, NVFP4):
        new = quantize_nvfp4(weight)
    else:
        new = quantize_block_fp8(weight, block=q.block)
    return dataclasses.replace(new, dtype=q.dtype)


def join(parts: Sequence[Quantized]) -> list[Quantized]:
    """The matrices, one below the other, as one if its bytes are those of the parts; else the
    parts.

    They are not where a block would have to begin within another, or where what is one number for a
    tensor differs: NVFP4's global scale, or the offset of NF4's double quantisation.
    """
    first, *rest = parts
    if not rest or any(
        type(q) is not type(first) or q.shape[1] != first.shape[1] or q.dtype != first.dtype
        for q in rest
    ):
        return list(parts)

    def cat(field):
        return torch.cat([getattr(q, field) for q in parts])

    shape = (sum(q.shape[0] for q in parts), first.shape[1])
    if isinstance(first, NF4):
        if all(q.offset is None and q.block_size == first.block_size for q in parts) and all(
            math.prod(q.shape) % q.block_size == 0 for q in parts[:-1]
        ):
            return [dataclasses.replace(first, data=cat("data"), absmax=cat("absmax"), shape=shape)]
    elif isinstance(first, NVFP4):
        if all(torch.equal(q.global_scale, first.global_scale) for q in rest):
            return [dataclasses.replace(first, data=cat("data"), scale=cat("scale"), shape=shape)]
    elif all(q.block == first.block for q in rest) and all(
        q.shape[0] % q.block[0] == 0 for q in parts[:-1]
    ):
        return [dataclasses.replace(first, data=cat("data"), scale_inv=cat("scale_inv"))]
    return list(parts)


# ---- modules


class QuantizedLinear(nn.Module):
    """A frozen linear layer over a quantised weight: `ops.quantized_linear`.

    weight: a quantised [N, K], or several, one below the other, that cannot be one (see `join`).
    bias: [N] or None; frozen. Its tensors are buffers of bytes, which casting a module,
    broadcasting buffers and checkpoints leave as they are. A quantised tensor on the meta device
    gives a layer to fill later, by `fill` or by a state dict.
    """

    noise_layers = 4  # numbers of `AQN.layer` that it may need
    dense_class: type[nn.Linear] = (
        nn.Linear
    )  # what it stands for, which `merge_and_unload` makes of it again

    def __init__(self, weight: Quantized | Sequence[Quantized], bias: torch.Tensor | None = None):
        super().__init__()
        self.fill([weight] if isinstance(weight, Quantized) else weight)
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise ValueError(f"bias must have shape [{self.out_features}], got {list(bias.shape)}")
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.noise: tuple[AQN, ...] | None = None

    def fill(self, weights: Sequence[Quantized]) -> None:
        """Takes other weights of the same size, on the same device or another."""
        if (
            not weights
            or any(len(q.shape) != 2 for q in weights)
            or len({q.shape[1] for q in weights}) > 1
        ):
            raise ValueError(
                f"weight must be quantised matrices of one width, got shapes "
                f"{[q.shape for q in weights]}"
            )
        if len(weights) > self.noise_layers:
            raise ValueError(
                f"weight must be at most {self.noise_layers} matrices, got {len(weights)}"
            )
        shape = (sum(q.shape[0] for q in weights), weights[0].shape[1])
        if hasattr(self, "_layout") and shape != (self.out_features, self.in_features):
            raise ValueError(
                f"weight must be [{self.out_features}, {self.in_features}], got {list(shape)}"
            )
        self.out_features, self.in_features = shape
        layout, buffers = (
            [],
            {},
        )  # of each weight: its class, its tensors' names, dtypes, shapes, and its other fields
        for i, q in enumerate(weights):
            tensors, rest = {}, {}
            for f in dataclasses.fields(q):
                value = getattr(q, f.name)
                if not isinstance(value, torch.Tensor):
                    rest[f.name] = value
                    continue
                name = f"{f.name}_{i}"
                tensors[f.name] = (name, value.dtype, tuple(value.shape))
                flat = value.detach().reshape(-1) if value.dim() == 0 else value.detach()
                buffers[name] = flat.contiguous().view(torch.uint8)
            layout.append((type(q), tensors, rest))
        for name in list(self._buffers):
            del self._buffers[name]
        for name, t in buffers.items():
            self.register_buffer(name, t)
        if layout != getattr(
            self, "_layout", None
        ):  # else the same object: what is compiled for it stays valid
            self._layout = layout

    def weights(self) -> list[Quantized]:
        """The quantised weights, on the layer's own memory."""
        return [
            kind(
                **{
                    field: getattr(self, name).view(dtype).view(shape)
                    for field, (name, dtype, shape) in tensors.items()
                },
                **rest,
            )
            for kind, tensors, rest in self._layout
        ]

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight that they stand for, [N, K]."""
        found = [dequantize(q, dtype=dtype) for q in self.weights()]
        return found[0] if len(found) == 1 else torch.cat(found)

    def set_noise(self, noise: AQN | None) -> None:
        """Noise for the forward passes to come, in training only; its numbers of layers are
        noise.layer and above.
        """
        self.noise = (
            None
            if noise is None
            else tuple(
                dataclasses.replace(noise, layer=noise.layer + i) for i in range(len(self._layout))
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(
            x.device.type
        ):  # as quantized_linear would, so that the bias gets its dtype too
            x = x.to(torch.get_autocast_dtype(x.device.type))
        noise = self.noise if self.training else None
        weights = self.weights()
        biases = (
            [None] * len(weights)
            if self.bias is None
            else self.bias.to(x.dtype).split([q.shape[0] for q in weights])
        )
        found = [
            quantized_linear(x, q, b, noise=None if noise is None else noise[i])
            for i, (q, b) in enumerate(zip(weights, biases, strict=True))
        ]
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, "
            f"weight={' + '.join(kind.__name__ for kind, _, _ in self._layout)}"
        )


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


def _scale(rank: int, alpha: float, rslora: bool) -> float:
    """What adapters of that rank are multiplied by. Raises ValueError for a rank or an alpha
    that cannot be.
    """
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"rank must be an int >= 1, got {rank!r}")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be a finite number > 0, got {alpha!r}")
    return alpha / (math.sqrt(rank) if rslora else rank)


def _begin(A: torch.Tensor, generator: torch.Generator | None) -> None:
    """The values that an A [..., in] begins with: kaiming_uniform with a = sqrt(5)."""
    bound = 1 / math.sqrt(A.shape[-1])
    _assign(A, torch.empty(A.shape).uniform_(-bound, bound, generator=generator))


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

    def __init__(
        self,
        base: nn.Module,
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
        scale = _scale(rank, alpha, rslora)
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
            _begin(self.lora_A, generator)
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
        A, B = _whole(self.lora_A).float(), _whole(self.lora_B).float()
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
            else _whole(self.base.weight).float()
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
            own = base.weight.to_local() if _sharded(base.weight) else base.weight
            own.copy_(own.float() + _share(delta, base.weight))
        self.reset_parameters(generator)

    def adapters(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Each part's name ("" if it is not fused), A [r, K] and B [rows, r]. Of sharded ones every
        rank must call it.
        """
        A, B, at = _whole(self.lora_A.detach()), _whole(self.lora_B.detach()), 0
        for i, (name, (start, stop)) in enumerate(self.slices.items()):
            yield name, A[i * self.rank : (i + 1) * self.rank], B[at : at + stop - start]
            at += stop - start

    @torch.no_grad()
    def load_adapters(self, found: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The reverse, of all parts at once."""
        _assign(
            self.lora_A, torch.cat([found[name][0].to(self.lora_A.dtype) for name in self.slices])
        )
        _assign(
            self.lora_B, torch.cat([found[name][1].to(self.lora_B.dtype) for name in self.slices])
        )

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale:g}, adapters={list(self.slices)}"


def _offsets(sizes: Iterable[int]) -> list[int]:
    found = [0]
    for size in sizes:
        found.append(found[-1] + size)
    return found


# ---- tensors that may be sharded (FSDP2)


def _sharded(t: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor  # here: it takes long to import

    return isinstance(t, DTensor)


def _whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if _sharded(t) else t


def _share(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's share of a tensor that every rank has."""
    if not _sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


def _assign(t: torch.Tensor, full: torch.Tensor) -> None:
    (t.to_local() if _sharded(t) else t).copy_(_share(full.to(t.device), t))
