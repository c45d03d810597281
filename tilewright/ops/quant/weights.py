"""A weight as four arguments of an operator: a tensor, or a quantized one with the noise that is
added to it. So an operator that multiplies by weights has one schema for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tilewright.core.registry import DispatchOn, Op, short
from tilewright.ops.quant import aqn, nf4_format, quantize
from tilewright.ops.quant.aqn import AQN
from tilewright.ops.quant.block_fp8 import DEQUANTIZE_BLOCK_FP8, BlockFP8
from tilewright.ops.quant.fp8 import E8M0, MX_BLOCK
from tilewright.ops.quant.mxfp8 import DEQUANTIZE_MXFP8, MXFP8
from tilewright.ops.quant.nf4 import DEQUANTIZE_NF4
from tilewright.ops.quant.nf4_format import NF4
from tilewright.ops.quant.nvfp4 import DEQUANTIZE_NVFP4, NVFP4
from tilewright.ops.quant.quantize import Quantized

DEQUANTIZE: dict[type[Quantized], Op] = {
    NF4: DEQUANTIZE_NF4,
    NVFP4: DEQUANTIZE_NVFP4,
    BlockFP8: DEQUANTIZE_BLOCK_FP8,
    MXFP8: DEQUANTIZE_MXFP8,
}
FORMATS = ("dense", "nf4", "nvfp4", "block_fp8", "mxfp8")
_BLOCK_SIZES = {"nf4": 1, "block_fp8": 2}  # integers of a format's block; others have none


def dequantize(
    q: Quantized,
    *,
    dtype: torch.dtype | None = None,
    noise: AQN | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """`dequantize_nf4`, `dequantize_nvfp4`, `dequantize_block_fp8` or `dequantize_mxfp8`, by q's
    format, with the same arguments.
    """
    options = {} if noise is None else {"noise": noise}
    return DEQUANTIZE[type(q)].public(q, dtype=dtype, implementation=implementation, **options)


class Packed(NamedTuple):
    """A weight as arguments of an operator.

    data: the tensor itself, the only one that can have a gradient, or codes; FP8 as bytes, which
        share memory.
    scales: the other tensors of a quantized weight, in its order; FP8 and E8M0 as bytes.
    ints: the format's index in FORMATS; for a quantized weight also the noise's seed, step and
        layer, NF4's block_size or block FP8's rows and columns, and the weight's shape.
    alpha: the noise's scale, 0 for none.
    """

    data: torch.Tensor
    scales: list[torch.Tensor]
    ints: list[int]
    alpha: float

    @property
    def format(self) -> str:
        return FORMATS[self.ints[0]]

    @property
    def is_dense(self) -> bool:
        return self.ints[0] == 0

    @property
    def block(self) -> list[int]:
        return self.ints[4 : 4 + _BLOCK_SIZES.get(self.format, 0)]

    @property
    def shape(self) -> Sequence[int]:
        if self.is_dense:
            return self.data.shape
        return self.ints[4 + _BLOCK_SIZES.get(self.format, 0) :]


def _packed(format, data, scales, q, block=(), noise=None):
    drawn = aqn.arguments(noise)
    ints = [FORMATS.index(format), drawn.seed, drawn.step, drawn.layer, *block, *q.shape]
    return Packed(data, scales, ints, drawn.alpha)


def pack(weight: torch.Tensor | Quantized, noise: AQN | None = None) -> Packed:
    """Raises TypeError for other kinds of FP8, since their bytes would be misread."""
    if isinstance(weight, torch.Tensor):
        return Packed(weight, [], [0], 0.0)
    q = weight
    if isinstance(q, NF4):
        scales = [q.absmax] if q.offset is None else [q.absmax, q.nested_absmax, q.offset]
        return _packed("nf4", q.data, scales, q, (q.block_size,), noise)
    if isinstance(q, NVFP4):
        scales = [_bytes("scale", q.scale, quantize.E4M3), q.global_scale]
        return _packed("nvfp4", q.data, scales, q, (), noise)
    data = _bytes("data", q.data, quantize.E4M3)
    if isinstance(q, MXFP8):
        return _packed("mxfp8", data, [_bytes("scale", q.scale, E8M0)], q, (), noise)
    assert isinstance(q, BlockFP8)
    return _packed("block_fp8", data, [q.scale_inv], q, q.block, noise)


def _bytes(name, t, dtype):
    if t.dtype != dtype:
        raise TypeError(f"q.{name} must be a {short(dtype)} tensor, got {short(t.dtype)}")
    return t.view(torch.uint8)


def unpack(p: Packed, dtype: torch.dtype) -> tuple[Quantized, AQN | None]:
    """The quantized tensor, with this dtype, and its noise."""
    shape = tuple(p.shape)
    if p.format == "nf4":
        absmax, nested, offset = p.scales if len(p.scales) == 3 else (*p.scales, None, None)
        q = NF4(p.data, absmax, nested, offset, shape, dtype, p.block[0])
    elif p.format == "nvfp4":
        q = NVFP4(p.data, p.scales[0].view(quantize.E4M3), p.scales[1], shape, dtype)
    elif p.format == "mxfp8":
        q = MXFP8(p.data.view(quantize.E4M3), p.scales[0].view(E8M0), dtype)
    else:
        rows, columns = p.block
        q = BlockFP8(p.data.view(quantize.E4M3), p.scales[0], (rows, columns), dtype)
    return q, AQN(p.alpha, *p.ints[1:4]) if p.alpha else None


def dense(p: Packed, dtype: torch.dtype, implementation: str | None = None) -> torch.Tensor:
    """The dense tensor of a packed weight.

    implementation: as in `dequantize_*`; None: the `unpinned` one.
    """
    if p.is_dense:
        return p.data
    q, noise = unpack(p, dtype)
    if implementation is None:
        implementation = DEQUANTIZE[type(q)].unpinned(DispatchOn(p.data.device, dtype))
    return dequantize(q, dtype=dtype, noise=noise, implementation=implementation)


def _rows_alone(p: Packed) -> int:
    """Multiples of so many rows of a quantized matrix share no scale with others."""
    if p.format == "block_fp8":
        return p.block[0]
    if p.format != "nf4":
        return 1
    span = p.block[0] * (nf4_format.NESTED_BLOCK if len(p.scales) == 3 else 1)
    return span // math.gcd(span, p.shape[1])


def _cut(t: torch.Tensor, begin: int, end: int, of: int = 1) -> torch.Tensor:
    """Entries for [begin, end), each of which is for so many."""
    return t[begin // of : -(-end // of)]


def in_parts(p: Packed, rows: int) -> Iterator[tuple[slice, Packed]]:
    """A quantized matrix without noise, which depends on an element's position, in parts of about
    so many rows. Raises as `check_parts`.
    """
    check_parts(p)
    (N, K), alone, (first, *more) = p.shape, _rows_alone(p), p.scales
    rows = max(rows // alone, 1) * alone
    for begin in range(0, N, rows):
        end = min(begin + rows, N)
        if p.format == "nf4":
            span = begin * K, end * K
            data, scales = _cut(p.data, *span, 2), [_cut(first, *span, p.block[0])]
            if more:
                nested = _cut(more[0], *span, p.block[0] * nf4_format.NESTED_BLOCK)
                scales += [nested, more[1]]
        else:
            data, scales = p.data[begin:end], [_cut(first, begin, end, alone), *more]
        yield slice(begin, end), Packed(data, scales, [*p.ints[:-2], end - begin, K], 0.0)


def check_parts(p: Packed) -> None:
    """The checks of `dequantize_*`, for what reads a matrix's codes directly."""
    N, K = p.shape
    if p.format == "nf4":
        nf4_format.check_parts(p.data, p.scales, N * K, p.block[0])
    elif p.format == "nvfp4":
        quantize.part("q.data", p.data, torch.uint8, (N, -(-K // 2)), p.data)
        quantize.part("q.scale", p.scales[0], torch.uint8, (N, -(-K // 16)), p.data)
        quantize.part("q.global_scale", p.scales[1], torch.float32, (), p.data)
    elif p.format == "mxfp8":
        quantize.part("q.scale", p.scales[0], torch.uint8, (N, -(-K // MX_BLOCK)), p.data)
    else:
        rows, columns = p.block
        shape = (-(-N // rows), -(-K // columns))
        quantize.part("q.scale_inv", p.scales[0], torch.float32, shape, p.data)
