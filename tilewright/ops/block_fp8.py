"""float8_e4m3fn with a float32 scale for each block of a matrix: 128 x 128 for weights and 1 x 128 for activations, as
DeepSeek-V3's checkpoints have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tilewright import platform
from tilewright.ops import cases, quantize
from tilewright.ops._library import define
from tilewright.ops.nvfp4 import all_cases, draw
from tilewright.registry import Case, Implementation, On, Op

LEAST = 2.0**-100   # what a smaller largest magnitude counts as: the inverse of its scale is finite
MOST_ELEMENTS = 2**14   # of a block: the Triton kernel holds one in registers


@dataclass(frozen=True)
class BlockFP8(quantize.Quantized):
    """A tensor in block-scaled FP8. Made by `quantize_block_fp8` or `BlockFP8.from_safetensors`.

    data: float8_e4m3fn [..., R, C].   scale_inv: float32 [..., ceil(R / block[0]), ceil(C / block[1])]; an element is
        its value times its block's.   block: rows and columns.   dtype: of the tensor that was quantised.
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
    def from_safetensors(cls, tensors: Mapping[str, torch.Tensor], prefix: str = "weight", *,
                         block: tuple[int, int] = (128, 128), dtype: torch.dtype = torch.bfloat16) -> BlockFP8:
        """The reverse. block: the configuration's weight_block_size. Raises KeyError for what is missing."""
        return cls(quantize.key(tensors, prefix), quantize.key(tensors, f"{prefix}_scale_inv").float(), tuple(block),
                   dtype)


quantize.register(BlockFP8, ("data", "scale_inv"))


def quantize_block_fp8(x: torch.Tensor, *, block: tuple[int, int] = (128, 128), seed: int | None = None,
                       implementation: str = "auto") -> BlockFP8:
    """x in block-scaled FP8.

    x: [..., R, C], or [C] for blocks of one row; fp32 | bf16 | fp16 (fp64 with eager, through fp32); finite. R and C
        need not divide.
    block: rows and columns of a block of the last two dimensions, 16,384 elements at most: (128, 128) for weights,
        (1, 128) for activations.
    seed: None rounds to nearest, ties to even. A number rounds up or down at random, as in `quantize_nvfp4`.
    implementation: "auto", or one of triton, cpp, eager.

    In float32, with m a block's largest magnitude (2^-100 if smaller, but not 0): scale_inv = m / 448 and the codes are
    of x * (1 / m * 448); scale_inv is 1 for a block of zeros.
    Not differentiable: x is detached. Deterministic, and the same in every implementation.
    Raises TypeError or ValueError for arguments that do not fit, ValueError for an x that is not finite (on CUDA, where
    looking would wait for the device, such a block's scale_inv is not finite), ImplementationUnavailable for a named
    implementation that cannot run here.
    """
    quantize.source(x)
    quantize.seed(seed)
    rows, columns = _block(block)
    if x.dim() == 0:
        raise ValueError("x must have at least 1 dimension, got a scalar")
    matrices = quantize.as_3d(x.detach(), least=1 + (rows > 1))
    data, inverse = QUANTIZE_BLOCK_FP8.pick(implementation, matrices)(matrices, rows, columns, seed)
    inverse = quantize.finite(inverse)
    lead = x.shape[:-2] + inverse.shape[1:2] * (x.dim() > 1)
    return BlockFP8(data.view(quantize.E4M3).view(x.shape), inverse.view(*lead, inverse.shape[2]), (rows, columns),
                    x.dtype)


def dequantize_block_fp8(q: BlockFP8, *, dtype: torch.dtype | None = None,
                         implementation: str = "auto") -> torch.Tensor:
    """The tensor that q stands for: value * scale_inv in float32, then rounded to the result's dtype.

    q: what `quantize_block_fp8` or `BlockFP8.from_safetensors` returns.
    dtype: of the result: fp32 | bf16 | fp16 (fp64 with eager); that of the quantised tensor by default.
    Returns a contiguous tensor of q.shape. Not differentiable. Deterministic.
    Raises TypeError or ValueError for a q that does not fit together, ImplementationUnavailable as
    `quantize_block_fp8`.
    """
    quantize.instance(q, BlockFP8)
    dtype = quantize.output_dtype(dtype, q.dtype)
    rows, columns = _block(q.block)
    quantize.part("q.data", q.data, quantize.E4M3, q.shape, q.data)
    shape = (*q.shape[:-2], *((-(-q.shape[-2] // rows),) if q.data.dim() > 1 else ()), -(-q.shape[-1] // columns))
    quantize.part("q.scale_inv", q.scale_inv, torch.float32, shape, q.data)
    run = DEQUANTIZE_BLOCK_FP8.pick(implementation, On(q.data.device, dtype))
    data = quantize.as_3d(q.data.contiguous().view(torch.uint8), "q.data", 1 + (rows > 1))
    return run(data, quantize.as_3d(q.scale_inv, "q.scale_inv"), rows, columns, dtype).view(q.shape)


def _block(block) -> tuple[int, int]:
    good = isinstance(block, (tuple, list)) and len(block) == 2
    if good:
        rows, columns = block
        good = isinstance(rows, int) and isinstance(columns, int) and 1 <= rows <= MOST_ELEMENTS and (
            1 <= columns <= MOST_ELEMENTS) and _power_of_2(rows) * _power_of_2(columns) <= MOST_ELEMENTS
    if not good:
        raise ValueError(f"block must be two positive ints (rows, columns), of at most {MOST_ELEMENTS} elements with "
                         f"both rounded up to powers of two, got {block!r}")
    return rows, columns


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


# ---- the definitions

def quantize_eager(x, rows, columns, seed):
    B, R, C = x.shape
    v = quantize.pad_to(quantize.pad_to(x.float(), -1, columns), -2, rows)
    blocks = v.view(B, v.shape[1] // rows, rows, v.shape[2] // columns, columns)
    most = blocks.abs().amax((2, 4))
    floor = most.clamp_min(LEAST)
    inverse = torch.where(most == 0, 1.0, floor / 448.0)
    scale = torch.where(most == 0, 1.0, floor.reciprocal() * 448.0)
    scaled = (blocks * scale[:, :, None, :, None]).view(v.shape)[:, :R, :C]
    random = None if seed is None else quantize.philox(seed, x.numel(), x.device).view(B, R, C)
    return quantize.to_e4m3(scaled.contiguous(), random), inverse


def dequantize_eager(data, inverse, rows, columns, dtype):
    acc = torch.promote_types(dtype, torch.float32)
    _, R, C = data.shape
    factor = inverse.to(acc).repeat_interleave(rows, 1)[:, :R].repeat_interleave(columns, 2)[:, :, :C]
    return (data.view(quantize.E4M3).to(acc) * factor).to(dtype)


# ---- fused implementations

_loaded: dict[str, tuple] = {}


def _fake_quantize(x, rows, columns, seed):
    B, R, C = x.shape
    return (x.new_empty(x.shape, dtype=torch.uint8),
            x.new_empty((B, (R + rows - 1) // rows, (C + columns - 1) // columns), dtype=torch.float32))


def _fake_dequantize(data, inverse, rows, columns, dtype):
    return data.new_empty(data.shape, dtype=dtype)


def _triton():
    if "triton" not in _loaded:
        from tilewright.kernels import quantize_triton as k

        _loaded["triton"] = (define("block_fp8_triton_quantize", k.block_fp8_quantize, _fake_quantize),
                             define("block_fp8_triton_dequantize", k.block_fp8_dequantize, _fake_dequantize))
    return _loaded["triton"]


def _cpp():
    if "cpp" not in _loaded:
        _loaded["cpp"] = quantize.of_extension("block_fp8", _fake_quantize, _fake_dequantize)
    return _loaded["cpp"]


# ---- cases

def _case(name, shape, quantised=False, **options):
    def make(device, dtype, seed):
        x = draw(device, dtype, seed, shape)
        return {"q": quantize_block_fp8(x, **options)} if quantised else {"x": x, **options}

    return Case(name, make)


def _variants(quantised):
    case = lambda *a, **k: _case(*a, quantised, **k)   # noqa: E731
    return [case("weights", (150, 130)), case("weights_experts", (2, 20, 33), block=(16, 32)),
            case("odd_blocks", (10, 50), block=(3, 7)), case("activations", (7, 200), block=(1, 128))]


_COMPILED = (torch.float32, torch.bfloat16)
QUANTIZE_BLOCK_FP8 = Op(
    "quantize_block_fp8", quantize_block_fp8, quantize_eager,
    (Implementation("triton", lambda: _triton()[0], platform.no_triton, gate=quantize.gate("block_fp8_quantize_gate")),
     Implementation("cpp", lambda: _cpp()[0], platform.no_cpp, ("cpu",), _COMPILED)),
    (*all_cases(lambda x: {"x": x, "block": (1, 128)}, 8.25), *_variants(False),
     _case("random", (5, 37), block=(1, 16), seed=1), _case("random_weights", (40, 50), block=(32, 32), seed=7)),
    goals=cases.near_copy(85, "forward"),
)
DEQUANTIZE_BLOCK_FP8 = Op(
    "dequantize_block_fp8", dequantize_block_fp8, dequantize_eager,
    (Implementation("triton", lambda: _triton()[1], platform.no_triton,
                    gate=quantize.gate("block_fp8_dequantize_gate")),
     Implementation("cpp", lambda: _cpp()[1], platform.no_cpp, ("cpu",), _COMPILED)),
    (*all_cases(lambda x: {"q": quantize_block_fp8(x, block=(1, 128))}, 8.25), *_variants(True)),
    goals=cases.near_copy(90, "forward"),
)
