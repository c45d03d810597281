"""NF4: 4-bit codes of a normal distribution's quantiles with a scale for each block, as
bitsandbytes stores them.

QLoRA, arXiv 2305.14314. Blocks run over the row-major elements of the whole tensor, whatever its
shape.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewright import platform
from tilewright.ops import _checks, aqn, cases, quantize
from tilewright.ops._library import define, from_kernels
from tilewright.ops.aqn import AQN
from tilewright.registry import Case, Cost, Goal, Implementation, On, Op, short

# float32 values of the 16 codes: quantiles of a normal distribution, scaled to [-1, 1], with an
# exact 0.
CODES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
STEP = CODES[8] / 2  # of noise, in scales: half the narrowest gap
ZERO = 7  # the code of 0, which pads an odd number of elements
NESTED_BLOCK = 256  # scales in a block of double quantisation
LEAST = 1e-38  # what a smaller scale counts as where it divides
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def codes_of() -> torch.Tensor:
    return torch.tensor(CODES, dtype=torch.float32)


def bounds_of() -> torch.Tensor:
    codes = codes_of()
    return (codes[:-1] + codes[1:]) / 2


def dynamic_map() -> torch.Tensor:
    """The 256 float32 values of the 8-bit code for scales: signed, in seven decades below 1 with 1,
    2, 4, ... 64 values each at the middles of even steps (dynamic tree quantisation, arXiv
    1511.04561), with 0 and 1.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = (10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
        values += [*middles, *(-m for m in middles)]
    return torch.tensor(sorted(values), dtype=torch.float32)


def pairs_of() -> torch.Tensor:
    """float32 [512]: the two numbers of each byte, the even element's first."""
    codes = codes_of()
    return torch.stack((codes.repeat_interleave(16), codes.repeat(16)), -1).view(-1)


_codes, _pairs, _bounds, _map = (
    quantize.constant(f"nf4_{name}", make, n)
    for name, make, n in (
        ("codes", codes_of, 16),
        ("pairs", pairs_of, 512),
        ("bounds", bounds_of, 15),
        ("map", dynamic_map, 256),
    )
)


@dataclass(frozen=True)
class NF4(quantize.Quantized):
    """A tensor in NF4. Made by `quantize_nf4` or `NF4.from_safetensors`.

    data: uint8 [ceil(n / 2)] of n elements, the even one in the high nibble.
    absmax: float32 [ceil(n / block_size)], each block's largest magnitude; with double quantisation
    its uint8 codes.
    nested_absmax, offset: float32 [ceil(blocks / 256)] and [], of double quantisation: a block's
        scale is map[absmax] * nested_absmax + offset. None without it.
    shape, dtype: of the tensor that was quantised.   block_size: elements a block.
    """

    data: torch.Tensor
    absmax: torch.Tensor
    nested_absmax: torch.Tensor | None
    offset: torch.Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    block_size: int

    def to_safetensors(self, prefix: str = "weight") -> dict[str, torch.Tensor]:
        """The tensors of a bitsandbytes checkpoint: `prefix`, `prefix.absmax`, `prefix.quant_map`,
        those of double quantisation, and `prefix.quant_state.bitsandbytes__nf4`, JSON in bytes.
        Reads offset on the host.
        """
        state = {
            "quant_type": "nf4",
            "blocksize": self.block_size,
            "dtype": short(self.dtype),
            "shape": list(self.shape),
        }
        found = {
            prefix: self.data[:, None],
            f"{prefix}.absmax": self.absmax,
            f"{prefix}.quant_map": _codes(self.data),
        }
        if self.offset is not None:
            state |= {
                "nested_blocksize": NESTED_BLOCK,
                "nested_dtype": "float32",
                "nested_offset": self.offset.item(),
            }
            found |= {
                f"{prefix}.nested_absmax": self.nested_absmax,
                f"{prefix}.nested_quant_map": _map(self.data),
            }
        found[f"{prefix}.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8, device=self.data.device
        )
        return found

    @classmethod
    def from_safetensors(cls, tensors: Mapping[str, torch.Tensor], prefix: str = "weight") -> NF4:
        """The reverse. Raises KeyError for a tensor that is missing, and TypeError or ValueError,
        naming the tensor, for another code or block size and for what does not fit together. Reads
        scales on the host.
        """
        data = quantize.key(tensors, prefix)
        name = f"{prefix}.quant_state.bitsandbytes__nf4"
        state = read_state(name, quantize.key(tensors, name), prefix)
        _same_map(f"{prefix}.quant_map", quantize.key(tensors, f"{prefix}.quant_map"), _codes(data))
        n, nested, offset = math.prod(state["shape"]), None, None
        blocks = -(-n // state["blocksize"])
        absmax = quantize.key(tensors, f"{prefix}.absmax")
        packed = data.reshape(-1).view(
            torch.uint8
        )  # bitsandbytes may store the bytes as another dtype
        quantize.part(prefix, packed, torch.uint8, (-(-n // 2),), data)
        if "nested_offset" in state:
            _same_map(
                f"{prefix}.nested_quant_map",
                quantize.key(tensors, f"{prefix}.nested_quant_map"),
                _map(data),
            )
            nested = quantize.key(tensors, f"{prefix}.nested_absmax")
            quantize.part(
                f"{prefix}.nested_absmax",
                nested,
                torch.float32,
                (-(-blocks // NESTED_BLOCK),),
                data,
            )
            quantize.scales(f"{prefix}.nested_absmax", nested)
            offset = torch.tensor(state["nested_offset"], dtype=torch.float32, device=data.device)
        quantize.part(
            f"{prefix}.absmax",
            absmax,
            torch.float32 if nested is None else torch.uint8,
            (blocks,),
            data,
        )
        quantize.scales(f"{prefix}.absmax", absmax)
        return cls(
            packed,
            absmax,
            nested,
            offset,
            tuple(state["shape"]),
            getattr(torch, state["dtype"]),
            state["blocksize"],
        )


def read_state(name: str, packed: torch.Tensor, prefix: str) -> dict:
    """What bitsandbytes' quant_state says, JSON in bytes. Raises TypeError or ValueError,
    naming what is wrong.
    """
    if packed.dtype != torch.uint8:
        raise TypeError(f"{name} must be a uint8 tensor, got {short(packed.dtype)}")
    try:
        state = json.loads(bytes(packed.reshape(-1).tolist()))
    except ValueError as error:
        raise ValueError(f"{name} must be JSON in bytes ({error})") from error
    if not isinstance(state, dict):
        raise ValueError(f"{name} must be a JSON object, got {type(state).__name__}")
    nested = ("nested_blocksize",) if "nested_offset" in state else ()
    for key in ("quant_type", "blocksize", "dtype", "shape", *nested):
        if key not in state:
            raise ValueError(f"{name} has no {key}; there are {', '.join(state)}")
    if state["quant_type"] != "nf4":
        raise ValueError(f"{prefix} must be NF4, got {state['quant_type']!r}")
    shape, offset = state["shape"], state.get("nested_offset", 0.0)
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"{name}: shape must be a list of integers of at least 0, got {shape!r}")
    if type(state["blocksize"]) is not int or state["blocksize"] not in BLOCKS:
        raise ValueError(
            f"{name}: blocksize must be one of {list(BLOCKS)}, got {state['blocksize']!r}"
        )
    _checks.choice(f"{name}: dtype", state["dtype"], tuple(map(short, quantize.OUTPUTS)))
    if nested and state["nested_blocksize"] != NESTED_BLOCK:
        raise ValueError(
            f"{name}: nested_blocksize must be {NESTED_BLOCK}, got {state['nested_blocksize']!r}"
        )
    if type(offset) not in (int, float) or not math.isfinite(offset):
        raise ValueError(f"{name}: nested_offset must be a finite number, got {offset!r}")
    return state


quantize.register(NF4, ("data", "absmax", "nested_absmax", "offset"))


def _same_map(name, found, expected):
    if found.shape != expected.shape or not torch.allclose(
        found.float(), expected, rtol=0, atol=1e-6
    ):
        raise ValueError(f"{name} must be bitsandbytes' own table, got other values")


@_checks.autocast("inputs")
def quantize_nf4(
    x: torch.Tensor,
    *,
    double_quant: bool = False,
    block_size: int = 64,
    implementation: str = "auto",
) -> NF4:
    """x in NF4, the bytes that bitsandbytes gives.

    x: any shape, fp32 | bf16 | fp16 (fp64 with eager, through fp32); finite. Blocks are of its
        row-major elements; the last may be shorter.
    double_quant: scales in 8 bits, in blocks of 256, less their mean.
    block_size: 32 to 4096, a power of two.
    implementation: "auto", or one of triton, cpp, eager.

    A scale is the block's largest magnitude m; a code is that of the value nearest to x * (1 / m),
    or x / m in a last block that is shorter, ties to the lower, all in float32. The scales' 8-bit
    codes are the nearest on a CUDA device; on a CPU those of the nearest of 65,536 even steps,
    since bitsandbytes looks them up in a table there.
    Not differentiable: x is detached. Deterministic, and the same in every implementation. Raises
    TypeError or ValueError for arguments that do not fit, ValueError for an x that is not finite
    (on CUDA, where looking would wait for the device, such a block's scale is not finite),
    ImplementationUnavailable for a named implementation that cannot run here.
    """
    quantize.source(x)
    _checks.choice("block_size", block_size, BLOCKS)
    flat = x.detach().reshape(-1).contiguous()
    data, absmax = QUANTIZE_NF4.pick(implementation, flat)(flat, block_size)
    absmax = quantize.finite(absmax)
    nested, offset = None, None
    if double_quant:
        absmax, nested, offset = _nest(absmax)
    return NF4(data, absmax, nested, offset, tuple(x.shape), x.dtype, block_size)


@_checks.autocast("inputs")
def dequantize_nf4(
    q: NF4,
    *,
    dtype: torch.dtype | None = None,
    noise: AQN | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """The tensor that q stands for: code values times scales in float32, then rounded to the
    result's dtype.

    q: what `quantize_nf4` or `NF4.from_safetensors` returns.
    dtype: of the result: fp32 | bf16 | fp16 (fp64 with eager); that of the quantised tensor by
    default.
    noise: adds alpha * n * step in float32, before the rounding, with n the `aqn_noise` of q.shape
        and step = 0.5 * 0.0795803 * scale, half the gap next to 0. None, or an alpha of 0, adds
        nothing.
    Returns a contiguous tensor of q.shape. Not differentiable. Deterministic. Raises TypeError or
    ValueError for a q that does not fit together, ImplementationUnavailable as `quantize_nf4`.
    """
    quantize.instance(q, NF4)
    dtype = quantize.output_dtype(dtype, q.dtype)
    of_noise = aqn.arguments(noise)
    _checks.choice("q.block_size", q.block_size, BLOCKS)
    n = math.prod(q.shape)
    nested = q.offset is not None
    scales = [q.absmax, q.nested_absmax, q.offset] if nested else [q.absmax]
    check_parts(q.data, scales, n, q.block_size)
    table = _map(q.data) if nested else None
    run = DEQUANTIZE_NF4.pick(implementation, On(q.data.device, dtype))
    out = run(
        q.data.contiguous(),
        q.absmax.contiguous(),
        q.nested_absmax,
        table,
        q.offset,
        n,
        q.block_size,
        dtype,
        *of_noise,
    )
    return out.view(q.shape)


def check_parts(
    data: torch.Tensor, scales: Sequence[torch.Tensor], elements: int, block_size: int
) -> None:
    """Raises TypeError or ValueError for tensors that are not those of so many elements.

    scales: absmax; with double quantization also nested_absmax and offset.
    """
    blocks, nested = -(-elements // block_size), len(scales) == 3
    quantize.part("q.data", data, torch.uint8, (-(-elements // 2),), data)
    absmax = torch.uint8 if nested else torch.float32
    quantize.part("q.absmax", scales[0], absmax, (blocks,), data)
    if nested:
        of_codes = (-(-blocks // NESTED_BLOCK),)
        quantize.part("q.nested_absmax", scales[1], torch.float32, of_codes, data)
        quantize.part("q.offset", scales[2], torch.float32, (), data)


# ---- the definitions


def quantize_eager(x, block):
    n = x.shape[0]
    v = x.float()
    whole = n // block * block
    absmax = quantize.pad_to(v, -1, block).view(-1, block).abs().amax(1)
    scaled = v[:whole].view(-1, block) * (1.0 / absmax[: whole // block].clamp_min(LEAST))[:, None]
    if n > whole:
        absmax = torch.cat([absmax[:-1], absmax[-1:].clamp_min(LEAST)])
        scaled = torch.cat([scaled.view(-1), v[whole:] / absmax[-1]])
    codes = torch.bucketize(scaled.view(-1), _bounds(x)).to(torch.uint8)
    if n % 2:
        codes = torch.cat([codes, codes.new_full((1,), ZERO)])
    return codes[::2] << 4 | codes[1::2], absmax


def dequantize_eager(
    data, absmax, nested_absmax, table, offset, n, block, dtype, alpha=0.0, seed=0, step=0, layer=0
):
    acc = torch.promote_types(dtype, torch.float32)
    codes = torch.stack([data >> 4, data & 15], -1).view(-1)[:n].long()
    if offset is not None:
        scale = table.to(acc)[absmax.long()]
        absmax = scale * nested_absmax.to(acc).repeat_interleave(NESTED_BLOCK)[
            : scale.shape[0]
        ] + offset.to(acc)
    scale = absmax.to(acc).repeat_interleave(block)[:n]
    values = _codes(data).to(acc)[codes] * scale
    if alpha:
        values = aqn.add_eager(values, alpha * STEP * scale, seed, step, layer)
    return values.to(dtype)


def _nest_scales(absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Double quantisation: codes, scales of blocks of codes, and the mean. A 64th of the work:
    torch for all.
    """
    n = absmax.shape[0]
    if n == 0:
        return absmax.new_empty(0, dtype=torch.uint8), absmax.new_empty(0), absmax.new_zeros(())
    offset = absmax.mean()
    blocks = quantize.pad_to(absmax - offset, -1, NESTED_BLOCK).view(-1, NESTED_BLOCK)
    most = blocks.abs().amax(1)
    scaled = (blocks * (1.0 / most.clamp_min(LEAST))[:, None]).clamp(-1, 1)
    table = _map(absmax)
    bounds = (table[:-1] + table[1:]) / 2
    if absmax.is_cuda:
        codes = torch.bucketize(scaled, bounds)
    else:
        step = ((scaled + 1.0) * 32767.5 + 0.5).int()  # bitsandbytes' table has 65,536 entries
        codes = torch.bucketize(step.double() * (2.0 / 65535.0) - 1.0, bounds.double())
        codes = torch.where(most[:, None] > 0, codes, 0)
    return codes.to(torch.uint8).view(-1)[:n].clone(), most, offset


# An operator: a compiler that takes the mean in another order would change bytes.
_nest = define(
    "nf4_nest",
    _nest_scales,
    lambda absmax: (
        torch.empty_like(absmax, dtype=torch.uint8),
        absmax.new_empty(-(-absmax.shape[0] // NESTED_BLOCK)),
        absmax.new_empty(()),
    ),
)


# ---- fused implementations


def _fake_quantize(x, block):
    n = x.shape[0]
    return x.new_empty((n + 1) // 2, dtype=torch.uint8), x.new_empty(
        (n + block - 1) // block, dtype=torch.float32
    )


def _fake_dequantize(data, absmax, nested_absmax, table, offset, n, block, dtype, *noise):
    return data.new_empty(n, dtype=dtype)


@functools.cache
def _triton():
    from tilewright.kernels import quantize_triton as k

    high = define(
        "nf4_triton_quantize", k.nf4_quantize, lambda x, bounds, block: _fake_quantize(x, block)
    )
    low = define(
        "nf4_triton_dequantize",
        k.nf4_dequantize,
        lambda data, pairs, *rest: _fake_dequantize(data, *rest),
    )

    def quantize_triton(x, block):
        return high(x, _bounds(x), block)

    def dequantize_triton(data, *rest):
        return low(data, _pairs(data), *rest)

    return (quantize_triton, dequantize_triton)


@functools.cache
def _cpp():
    return quantize.of_extension("nf4", _fake_quantize, _fake_dequantize)


# ---- cases


def _draw(device, dtype, seed, shape):
    """Normal values with blocks of zeros and blocks of very small numbers."""
    x = torch.randn(shape, device=device, generator=cases.generator(device, seed))
    flat = x.view(-1)
    flat[:96] = 0
    flat[200:300] *= 1e-20
    return x.to(dtype)


def _cases(make):
    small = {
        "ragged": (7, 33),
        "matrix": (16, 128),
        "one": (1,),
        "scalar": (),
        "no_elements": (0, 5),
        "half": (3, 96),
    }
    shapes = [(name, shape, cases.CONTRACT) for name, shape in small.items()]
    shapes += [
        (name, shape, tags)
        for tags in (cases.CUDA, cases.CPU)
        for name, shape in quantize.SHAPES.items()
        if tags is cases.CUDA or name == "llama-3-8b-down"
    ]
    return tuple(make(name, shape, tags) for name, shape, tags in shapes)


def _quantize_case(double, block=64):
    def make(name, shape, tags):
        n = math.prod(shape)
        return Case(
            f"{name} nested" if double else name,
            lambda device, dtype, seed: {
                "x": _draw(device, dtype, seed, shape),
                "double_quant": double,
                "block_size": block,
            },
            lambda itemsize: Cost(n * itemsize + n // 2 + n * 4 // 64, 0, 0, 0),
            tags,
        )

    return make


def _dequantize_case(double, block=64, **options):
    def make(name, shape, tags):
        n = math.prod(shape)

        def inputs(device, dtype, seed):
            return {
                "q": quantize_nf4(
                    _draw(device, dtype, seed, shape), double_quant=double, block_size=block
                ),
                **options,
            }

        return Case(
            f"{name} nested" if double else name,
            inputs,
            lambda itemsize: Cost(n * itemsize + n // 2 + n * 4 // 64, 0, 0, 0),
            tags,
        )

    return make


_COMPILED = (torch.float32, torch.bfloat16)
QUANTIZE_NF4 = Op(
    "quantize_nf4",
    quantize_nf4,
    quantize_eager,
    (
        Implementation(
            "triton",
            lambda: _triton()[0],
            platform.no_triton,
            gate=from_kernels("quantize_triton", "nf4_quantize_gate"),
        ),
        Implementation("cpp", lambda: _cpp()[0], platform.no_cpp, ("cpu",), _COMPILED),
    ),
    _cases(_quantize_case(False)) + _cases(_quantize_case(True)),
)
DEQUANTIZE_NF4 = Op(
    "dequantize_nf4",
    dequantize_nf4,
    dequantize_eager,
    (
        Implementation(
            "triton",
            lambda: _triton()[1],
            platform.no_triton,
            gate=from_kernels("quantize_triton", "nf4_dequantize_gate"),
        ),
        Implementation("cpp", lambda: _cpp()[1], platform.no_cpp, ("cpu",), _COMPILED),
    ),
    (
        *_cases(_dequantize_case(False)),
        *_cases(_dequantize_case(True)),
        _dequantize_case(False, noise=aqn.SOME)("noise", (3, 7, 33), cases.CONTRACT),
        _dequantize_case(True, noise=aqn.SOME)("noise", (5, 96), cases.CONTRACT),
    ),
    goals=(
        *cases.near_copy(90, "forward"),
        Goal(cases.DATACENTER, "forward", "over bitsandbytes", at_least=1.2),
        Goal("EPYC", "forward", "over bitsandbytes", at_least=3),
    ),
)
