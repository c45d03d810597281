"""Block-scaled FP8: float8_e4m3fn with one float32 scale per block of a matrix, 128 x 128 for
weights and 1 x 128 for activations, as in DeepSeek-V3's checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tilewright.core import checks
from tilewright.core.library import from_kernels
from tilewright.core.registry import DispatchOn, Judged, Op
from tilewright.core.takes import takes
from tilewright.kernels.quant.operators import FP8, Codes
from tilewright.ops import cases
from tilewright.ops.quant import aqn, fp8, quantize, stored_scales
from tilewright.ops.quant.aqn import AQN
from tilewright.ops.quant.block_cases import (
    all_cases,
    dequantize_case,
    quantize_case,
    timed_cases,
)

MOST_ELEMENTS = 2**14  # per block: the Triton kernel holds one in registers


@dataclass(frozen=True)
class BlockFP8(quantize.Quantized):
    """A tensor in block-scaled FP8. Made by `quantize_block_fp8` or `BlockFP8.from_safetensors`.

    data: float8_e4m3fn [..., R, C].   scale_inv: float32 [..., ceil(R / block[0]),
        ceil(C / block[1])]; an element is its code's value times its block's scale_inv.
    block: rows and columns.   dtype: the dtype of the tensor that was quantized.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    block: tuple[int, int]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def to_safetensors(self, prefix: str = "weight") -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint: `prefix` and `prefix_scale_inv`."""
        return {prefix: self.data, f"{prefix}_scale_inv": self.scale_inv}

    @classmethod
    def from_safetensors(
        cls,
        tensors: Mapping[str, torch.Tensor],
        prefix: str = "weight",
        *,
        block: tuple[int, int] = (128, 128),
        dtype: torch.dtype = torch.bfloat16,
    ) -> BlockFP8:
        """The inverse of `to_safetensors`. block: the configuration's weight_block_size. Raises
        KeyError for a missing tensor, and TypeError or ValueError, naming the tensor, for
        inconsistent ones. Reads scales on the host.
        """
        data = quantize.key(tensors, prefix)
        scale, name = quantize.float_scales(tensors, f"{prefix}_scale_inv"), f"{prefix}_scale_inv"
        rows, columns = _block(block)
        quantize.part(prefix, data, quantize.E4M3, data.shape, data)
        quantize.part(name, scale, torch.float32, fp8.scales_shape(data.shape, rows, columns), data)
        stored_scales.check(name, scale, lambda zero: _blank(data, zero, rows, columns))
        return cls(data, scale, (rows, columns), dtype)


quantize.register(BlockFP8, ("data", "scale_inv"))


def _blank(data: torch.Tensor, zero: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Which blocks have no code but 0, and -0."""
    codes = (data.view(torch.uint8) & 0x7F).view(-1, *data.shape[-2:])  # of a row one matrix
    of_blocks = quantize.pad_to(quantize.pad_to(codes, -1, columns), -2, rows)
    of_blocks = of_blocks.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    return (of_blocks == 0).all(-1).all(-2).view(zero.shape)


@checks.autocast("inputs")
@takes(x="float [..., C]", seed=quantize.SEED, transpose="bool")
def quantize_block_fp8(
    x: torch.Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    seed: int | None = None,
    transpose: bool = False,
    implementation: str = "auto",
) -> BlockFP8 | tuple[BlockFP8, BlockFP8]:
    """Quantizes x to block-scaled FP8; with `transpose` its transpose too.

    Computed in float32. With m a block's largest magnitude (at least 2^-100 unless 0):
    scale_inv = m / 448 and the codes are those of x * (1 / m * 448); scale_inv is 1 for a block of
    zeros. Not differentiable: x is detached. Deterministic, and the same in every implementation.

    Args:
        x: [..., R, C], or [C] for blocks of one row; fp32 | bf16 | fp16 (fp64 with eager, through
            fp32); finite. R and C need not be multiples of the block.
        block: rows and columns of a block of the last two dimensions, 16,384 elements at most:
            (128, 128) for weights, (1, 128) for activations.
        seed: None rounds to nearest, ties to even. An int selects stochastic rounding, as in
            `quantize_nvfp4`.
        transpose: returns (q, q of x.mT) with the same options, bit for bit as two calls would:
            in blocks of 1 x 128, the operands of a layer's forward and of its weight gradient. x
            has 2 dimensions or more. Triton reads x once for blocks whose sides are powers of two
            up to 128 and no seed, C++ for blocks one side of which divides the other.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        A BlockFP8 of x's shape and dtype; with `transpose` a pair.

    Raises:
        TypeError, ValueError: Invalid arguments.
        ValueError: x is not finite (not checked on CUDA, where a check would synchronize: such a
            block's scale_inv is not finite, and its codes are unspecified).
        ImplementationUnavailable: A named implementation that cannot run here.

    Example:
        >>> from tilewright.ops import quantize_block_fp8
        >>> q = quantize_block_fp8(torch.full((2, 256), 448.0), block=(1, 128))
        >>> q.data.dtype, q.scale_inv
        (torch.float8_e4m3fn, tensor([[1., 1.],
                [1., 1.]]))
    """
    quantize.on_device("x", x)
    rows, columns = _block(block)
    matrices = quantize.as_3d(x.detach(), least=1 + (rows > 1 or transpose))
    run = QUANTIZE_BLOCK_FP8.pick(implementation, matrices)
    codes = run(matrices, FP8(rows, columns, False, seed, transpose))
    return of_codes(codes, x.shape, (rows, columns), x.dtype)


def of_codes(
    codes: Codes, shape, block: tuple[int, int], dtype: torch.dtype, name: str = "x"
) -> BlockFP8 | tuple[BlockFP8, BlockFP8]:
    """An implementation's codes, whose inverse scales are [matrices, bands, across], and their
    transpose if they have it.   name: the name of the tensor that must be finite.
    """

    def wrap(data, inverse, shape):
        lead = (*shape[:-2], *inverse.shape[1:2]) if len(shape) > 1 else ()
        data = data.view(quantize.E4M3).view(shape)
        return BlockFP8(data, inverse.view(*lead, inverse.shape[2]), block, dtype)

    codes = codes._replace(scale=quantize.finite(codes.scale, name))
    return quantize.wrapped(codes, shape, wrap)


@checks.autocast("inputs")
@takes(q="a BlockFP8", dtype=quantize.OUTPUTS, noise="an AQN")
def dequantize_block_fp8(
    q: BlockFP8,
    *,
    dtype: torch.dtype | None = None,
    noise: AQN | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """Dequantizes q: value * scale_inv in float32, rounded to the result's dtype.

    Not differentiable. Deterministic.

    Args:
        q: the result of `quantize_block_fp8` or `BlockFP8.from_safetensors`.
        dtype: the result's dtype: fp32 | bf16 | fp16 (fp64 with eager); default: the dtype of the
            tensor that was quantized.
        noise: adds alpha * n * step in float32, before the rounding, where n is the `aqn_noise` of
            q.shape and step = 0.125 * scale_inv, the gap above 1. None, or an alpha of 0, adds
            nothing.
        implementation: "auto", or one that `tilewright explain dequantize_block_fp8` lists.

    Returns:
        A contiguous tensor of q.shape.

    Raises:
        TypeError, ValueError: q is inconsistent, or an argument invalid.
        ImplementationUnavailable: as `quantize_block_fp8`.

    Example:
        >>> from tilewright.ops import dequantize_block_fp8, quantize_block_fp8
        >>> dequantize_block_fp8(quantize_block_fp8(torch.tensor([[448.0, -3.5]])))
        tensor([[448.0000,  -3.5000]])
    """
    dtype = quantize.output_dtype(q, dtype)
    drawn = aqn.arguments(noise)
    rows, columns = _block(q.block)
    quantize.part("q.data", q.data, quantize.E4M3, q.shape, q.data)
    quantize.part(
        "q.scale_inv", q.scale_inv, torch.float32, fp8.scales_shape(q.shape, rows, columns), q.data
    )
    run = DEQUANTIZE_BLOCK_FP8.pick(implementation, DispatchOn(q.data.device, dtype))
    data = quantize.as_3d(q.data.contiguous().view(torch.uint8), "q.data", 1 + (rows > 1))
    scale = quantize.as_3d(q.scale_inv, "q.scale_inv")
    return run(data, scale, rows, columns, dtype, drawn).view(q.shape)


def _block(block) -> tuple[int, int]:
    good = isinstance(block, (tuple, list)) and len(block) == 2
    if good:
        rows, columns = block
        good = (
            isinstance(rows, int)
            and isinstance(columns, int)
            and 1 <= rows <= MOST_ELEMENTS
            and (1 <= columns <= MOST_ELEMENTS)
            and _power_of_2(rows) * _power_of_2(columns) <= MOST_ELEMENTS
        )
    if not good:
        raise ValueError(
            f"block must be two positive ints (rows, columns), of at most {MOST_ELEMENTS} "
            f"elements with "
            f"both rounded up to powers of two, got {block!r}"
        )
    return rows, columns


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


# ---- cases


_VARIANTS = (
    ("weights", (150, 130), (128, 128)),
    ("weights_experts", (2, 20, 33), (16, 32)),
    ("odd_blocks", (10, 50), (3, 7)),
    ("activations", (7, 200), (1, 128)),
)

_dequantize_case = functools.partial(dequantize_case, quantize_block_fp8)
QUANTIZE_BLOCK_FP8 = Op(
    "quantize_block_fp8",
    quantize_block_fp8,
    fp8.quantize_eager,
    fp8.quantizers("block_fp8"),
    (
        *all_cases(lambda x: {"x": x, "block": (1, 128)}, 8.25),
        *(quantize_case(name, shape, block=block) for name, shape, block in _VARIANTS),
        quantize_case("random", (5, 36), block=(3, 7), seed=1),
        quantize_case("random_weights", (40, 52), block=(32, 32), seed=7),
        quantize_case("transpose", (40, 37), block=(1, 16), transpose=True),
        quantize_case("transpose_activations", (7, 130), block=(1, 128), transpose=True),
        quantize_case("transpose_weights", (2, 20, 33), block=(16, 32), transpose=True, seed=3),
        quantize_case("transpose_odd_blocks", (10, 50), block=(3, 7), transpose=True),
        *timed_cases("transpose", 8.25, results=2, block=(1, 128), transpose=True),
    ),
    judged=Judged(exact=True),
    goals=cases.near_copy(85, "forward"),
)
DEQUANTIZE_BLOCK_FP8 = Op(
    "dequantize_block_fp8",
    dequantize_block_fp8,
    fp8.dequantize_eager,
    fp8.dequantizers(from_kernels("quant.quantize_triton", "block_fp8_dequantize_gate")),
    (
        *all_cases(lambda x: {"q": quantize_block_fp8(x, block=(1, 128))}, 8.25),
        *(_dequantize_case(name, shape, block=block) for name, shape, block in _VARIANTS),
        _dequantize_case("noise", (3, 10, 72), aqn.SOME, block=(16, 16)),
        _dequantize_case("noise_ragged", (5, 37), aqn.SOME, block=(3, 7)),
    ),
    goals=cases.near_copy(90, "forward"),
)
