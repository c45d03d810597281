"""Shared parts of the quantized formats: rounding to few bits, random bits, checks. The formats are
in nf4.py, nvfp4.py, block_fp8.py and mxfp8.py.

All implementations of a `quantize_*` give the same bytes: each step is one correctly rounded
float32 operation or an integer one, and the eager twins define the steps. Nothing here is
differentiable: weights are frozen, and a gradient through rounding depends on the training recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from tilewright.core import checks, torch_names
from tilewright.core.installed import PACKAGE
from tilewright.core.library import Operator, declare, define, from_kernels
from tilewright.core.registry import Implementation, in_cpp, in_triton, short
from tilewright.core.takes import FLOAT
from tilewright.core.torch_names import pytree
from tilewright.kernels.quant.operators import Codes

E4M3 = torch.float8_e4m3fn
LARGEST_E4M3, LARGEST_E2M1 = 448.0, 6.0
OUTPUTS = FLOAT

# Projections of timed cases: Llama 3 8B's down, DeepSeek V3's output.
SHAPES = {"llama-3-8b-down": (4096, 14336), "deepseek-v3-o": (7168, 16384)}


class Quantized:
    """Base class of the quantized tensors NF4, NVFP4, BlockFP8 and MXFP8, each a frozen dataclass
    and a pytree node.

    data: the codes.   shape, dtype: those of the tensor that was quantized.   names: the fields
    that are tensors.
    """

    names: ClassVar[tuple[str, ...]]
    data: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensors(self) -> list[torch.Tensor]:
        return [t for n in self.names if (t := getattr(self, n)) is not None]

    @property
    def requires_grad(self) -> bool:
        """Whether one of its tensors requires a gradient, though it gets none."""
        return any(t.requires_grad for t in self.tensors())

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Memory of its tensors, in bytes."""
        return sum(t.nbytes for t in self.tensors())


def register(cls, tensors: tuple[str, ...]):
    """Registers a dataclass as a pytree node: its tensors are the children, all else is the
    context, which is compared.
    """
    cls.names = tensors
    rest = tuple(n for n in cls.__dataclass_fields__ if n not in tensors)

    def flatten(q):
        return [getattr(q, n) for n in tensors], tuple(getattr(q, n) for n in rest)

    def flatten_with_keys(q) -> tuple[list[tuple[Any, Any]], tuple]:
        return [(pytree.GetAttrKey(n), getattr(q, n)) for n in tensors], flatten(q)[1]

    def unflatten(children, context):
        return cls(
            **dict(zip(tensors, children, strict=True)), **dict(zip(rest, context, strict=True))
        )

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"{PACKAGE}.{cls.__name__}",
    )
    return cls


# ---- implementations


class Fused(NamedTuple):
    """A format's operators of one implementation.   quantize: what calls them, where they are
    several.
    """

    quantize: Callable
    dequantize: Operator


def implementations(
    triton: Callable, cpp: Callable, **gates: Any
) -> tuple[Implementation, Implementation]:
    """The two that the ops of this family have, from what loads them."""
    return (
        in_triton(triton, **gates),
        in_cpp(cpp),
    )


def gates(format: str) -> Callable[[], list]:
    """Compile-gate entries of `quantize_<format>`: one result, and the fused ones."""

    def specs():
        one = from_kernels("quant.quantize_triton", f"{format}_quantize_gate")
        return [*one(), *from_kernels("fused_quantize.fused_quantize_triton", f"{format}_gate")()]

    return specs


def both(quantize_one: Callable[[torch.Tensor], Codes], x: torch.Tensor) -> Codes:
    """The codes of x and of its transpose, from those of one."""
    return Codes(*quantize_one(x)[:2], *quantize_one(x.mT.contiguous())[:2])


# ---- checks


SEED = "int [0, 2**63)"


def on_device(name: str, x: torch.Tensor) -> None:
    if x.is_meta:
        return
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on a CPU or CUDA device, got {x.device}")


def output_dtype(q: Quantized, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    if q.dtype not in OUTPUTS:
        raise TypeError(f"q.dtype must be one of {list(OUTPUTS)}, got {q.dtype!r}")
    return q.dtype


def part(
    name: str, t: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], data: torch.Tensor
) -> None:
    """One tensor of a quantized tensor."""
    if not isinstance(t, torch.Tensor) or t.dtype != dtype:
        got = short(t.dtype) if isinstance(t, torch.Tensor) else type(t).__name__
        raise TypeError(f"{name} must be a {short(dtype)} tensor, got {got}")
    checks.shape(name, t, shape, "that of the quantized tensor")
    checks.same_device(**{name: t, "the data": data})


def key(tensors, name: str) -> torch.Tensor:
    if name not in tensors:
        raise KeyError(f"{name} is missing; there are {sorted(tensors)[:8]}")
    return tensors[name]


def float_scales(tensors, name: str) -> torch.Tensor:
    """Scales from a file, of any floating-point dtype, in float32."""
    t = key(tensors, name)
    if not t.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {short(t.dtype)}")
    return t.float()


def _check_finite(scales: torch.Tensor, what: str) -> torch.Tensor:
    """Checks the scales of x's blocks (x is named by `what`), which are not finite (255 as E8M0
    bytes) where x is not. Returns a copy.
    """
    if (
        not scales.is_cuda
        and (bad := scales == 255 if scales.dtype == torch.uint8 else ~scales.isfinite()).any()
    ):
        where = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{what} must be finite (in float32), got an infinity or a NaN"
            + (f" in block {where}" if where else "")
        )
    return scales.clone()


@declare
def _checked(scales: torch.Tensor, what: str) -> torch.Tensor:
    return torch.empty_like(scales)


# An operator, so that torch.compile checks values at run time; the caller uses its result.
_checked_scales = _checked.define(
    "checked_scales", _check_finite, plain=lambda scales, what: scales
)


def finite(scales: torch.Tensor, name: str | None = "x") -> torch.Tensor:
    """The scales, checked on a CPU; unchecked on CUDA, where a check would synchronize, and for a
    tensor without a name.
    """
    return scales if scales.is_cuda or name is None else _checked_scales(scales, name)


def wrapped(codes: Codes, shape: tuple[int, ...], wrap: Callable[..., Any]) -> Any:
    """wrap(data, scale, shape) of codes and, if they have it, of their transpose: a pair then."""
    q = wrap(codes.data, codes.scale, shape)
    if codes.turned is None:
        return q
    return q, wrap(codes.turned, codes.turned_scale, (*shape[:-2], shape[-1], shape[-2]))


def constant(name: str, make: Callable[[], torch.Tensor], size: int) -> Callable:
    """An operator, like -> a copy of make()'s float32 table on like's device, cached per device. It
    is opaque to a compiler, which would otherwise trace the cache away and copy the table from the
    host in each call.
    """
    tables: dict[torch.device, torch.Tensor] = {}

    @torch_names.constant
    def fill(device: torch.device) -> None:
        if device not in tables:
            tables[device] = make().to(device)

    def cached(like: torch.Tensor) -> torch.Tensor:
        fill(like.device)
        return tables[like.device]

    def allocate(like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(size, dtype=torch.float32)

    return define(name, lambda like: cached(like).clone(), allocate, plain=cached)


# ---- rounding


def quotient(x: torch.Tensor, by: float) -> torch.Tensor:
    """x / by, correctly rounded. By a Python number, PyTorch multiplies on CUDA with the rounded
    reciprocal.
    """
    return x / torch.full_like(x, by)


def encode(
    v: torch.Tensor, mantissa: int, lowest: int, largest: float, random: torch.Tensor | None
) -> torch.Tensor:
    """Codes (int32, without signs) of |v| in a format with this many mantissa bits, whose smallest
    normal number is 2^lowest. Larger values saturate. Rounds to nearest, ties to even; or, given 32
    random bits per element, stochastically: up with probability equal to the distance from the
    lower neighbor in units in the last place.

    Neighboring numbers have neighboring codes, across exponents too, so a code is a count of
    units in the last place.
    """
    v = v.abs().clamp_max(largest)
    e = ((v.view(torch.int32) >> 23) - 127).clamp_min(lowest)
    # v / 2^(e - mantissa), exactly; at most 16.
    units = v * ((mantissa - e + 127) << 23).view(torch.float32)
    if random is None:
        n = units.round().int()
    else:
        n = ((units * 2.0**24).long() + (random >> 8) >> 24).int()
    return ((e - lowest) << mantissa) + n


def to_e4m3(v: torch.Tensor, random: torch.Tensor | None = None) -> torch.Tensor:
    """Bytes of float8_e4m3fn, v's sign included."""
    sign = v.view(torch.int32) >> 24 & 0x80
    return (encode(v, 3, -6, LARGEST_E4M3, random) | sign).to(torch.uint8)


def to_e2m1(v: torch.Tensor, random: torch.Tensor | None = None) -> torch.Tensor:
    """Codes 0 to 15: a sign bit, two exponent bits, one mantissa bit."""
    sign = v.view(torch.int32) >> 28 & 8
    return (encode(v, 1, 0, LARGEST_E2M1, random) | sign).to(torch.uint8)


def philox(
    key: int,
    count: int,
    device: torch.device,
    words: tuple[int, int] = (0, 0),
    first: int | torch.Tensor = 0,
    *,
    whole: bool = False,
) -> torch.Tensor:
    """32 random bits (int64) for each element i < count: word i % 4 of Philox4x32-10 (Salmon et
    al., SC 2011) with counter first + i // 4 and a 64-bit key. Depends on (key, words, first, i)
    only.

    words: the upper half of the counter, 32 bits each, which select a stream.
    first: a number, or one for each block [ceil(count / 4)].
    whole: return the four words of each block instead, [ceil(count / 4), 4].
    """
    low = 0xFFFFFFFF
    block = torch.arange(-(-count // 4), device=device) + first
    counter = (
        block & low,
        block >> 32 & low,
        torch.full_like(block, words[0]),
        torch.full_like(block, words[1]),
    )
    blocks = torch.stack(philox_words(key, counter), -1)
    return blocks if whole else blocks.view(-1)[:count]


def philox_words(key: int, counter: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The four words of 32 random bits (int64) of Philox4x32-10 for a 64-bit key.

    counter: its four words of 32 bits, in int64, which are broadcast together.
    """
    low = 0xFFFFFFFF
    c = list(counter)
    k0, k1 = key & low, key >> 32
    for _ in range(10):
        # A product of two 32-bit numbers may wrap to a negative int64; its bits are right, and the
        # mask selects the low 32.
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32 & low) ^ c[1] ^ k0, b & low, (a >> 32 & low) ^ c[3] ^ k1, a & low]
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return c


def pad_to(x: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """Zero-pads x at the end of a dimension given from the last (-1, -2)."""
    missing = -x.shape[dim] % multiple
    return torch.nn.functional.pad(x, (0, 0) * (-dim - 1) + (0, missing)) if missing else x


def as_3d(t: torch.Tensor, name: str = "x", least: int = 1) -> torch.Tensor:
    """Reshapes a tensor of any shape to a contiguous [matrices, rows, columns]."""
    if t.dim() < least:
        raise ValueError(
            f"{name} must have at least {least} dimension{'s' * (least > 1)} for such blocks, got "
            f"shape "
            f"{list(t.shape)}"
        )
    rows = t.shape[-2] if t.dim() > 1 else 1
    return t.reshape(math.prod(t.shape[:-2]), rows, t.shape[-1]).contiguous()
