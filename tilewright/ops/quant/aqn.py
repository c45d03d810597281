"""Adaptive quantization noise (AQN): normal values that depend on (seed, step, layer, element)
alone.

The generator is counter-based, so nothing is stored: forward, recomputation and backward draw the
same values, on any device. Compiled code turns step, seed and layer into symbols when they first
change, so a training step does not recompile; alpha is a constant of the graph of a fused operator,
which is compiled once per value.
`dequantize_*` adds the noise in registers, in units of the local quantization step; norms add it to
their weight before the kernel reads it (QeRL, arXiv 2510.11696).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.core import checks
from tilewright.core.library import from_kernels
from tilewright.core.registry import Case, Cost, DispatchOn, Op
from tilewright.core.takes import takes
from tilewright.kernels.quant.operators import Noise, draw_noise
from tilewright.ops import cases
from tilewright.ops.quant import quantize


@dataclass(frozen=True)
class AQN:
    """Describes the noise: its scale, and what it is drawn from.

    alpha: scale, >= 0. On a quantized weight, in units of the local quantization step; on a norm's
        weight, the standard deviation. 0 is no noise, bit for bit.
    seed: 0 to 2^63 - 1.   step: training step, 0 to 2^31 - 1.   layer: the weight's index, 0 to
        2^32 - 1; weights with the same index get the same noise.
    """

    alpha: float
    seed: int
    step: int = 0
    layer: int = 0

    def __post_init__(self):
        _check_fields(self.alpha, self.seed, self.step, self.layer)


@takes(alpha="number [0, inf)", seed=quantize.SEED, step="int [0, 2**31)", layer="int [0, 2**32)")
def _check_fields(alpha: float, seed: int, step: int, layer: int) -> None:
    pass


@checks.autocast("inputs")
@takes(noise="an AQN", dtype=quantize.OUTPUTS)
def aqn_noise(
    size: int | Sequence[int],
    noise: AQN,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = torch.float32,
    implementation: str = "auto",
) -> torch.Tensor:
    """Draws adaptive quantization noise, which `noise=` of other ops adds: mean 0 and variance 1,
    before it is multiplied by alpha.

    Element i (row-major) belongs to block i // 4 of Philox4x32-10 (Salmon et al., SC 2011) with key
    seed and counter words (block, block >> 32, layer, 2^31 + step). Its words w give
    u = ((w >> 8) + 1/2) / 2^24, and these sqrt(-2 ln u0) times cos and sin of 2 pi u1, and
    sqrt(-2 ln u2) times cos and sin of 2 pi u3 (Box and Muller, 1958). So no magnitude exceeds
    5.89. Computed in float32 (the eager twin: float64) and rounded once. Not differentiable.
    Deterministic: same arguments, same bits, per implementation and kind of device; implementations
    agree to a few units in the last place.

    Args:
        size: shape of the result, an int or several.
        noise: the noise; its alpha is not used.
        device: of the result; default: torch's default device.
        dtype: fp32 (None, too) | bf16 | fp16 (fp64 with eager).
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        A contiguous tensor of that size and dtype.

    Raises:
        TypeError, ValueError: Invalid arguments.
        ImplementationUnavailable: A named implementation that cannot run here.

    Example:
        >>> from tilewright.ops import AQN, aqn_noise
        >>> noise = AQN(0.1, seed=3)
        >>> torch.equal(aqn_noise(5, noise, device="cpu"), aqn_noise((5,), noise, device="cpu"))
        True
    """
    shape = (size,) if isinstance(size, (int, torch.SymInt)) else tuple(size)
    for n in shape:
        if not isinstance(n, (int, torch.SymInt)) or isinstance(n, bool):
            raise TypeError(f"size must be an int or a sequence of ints, got {size!r}")
        if n < 0:
            raise ValueError(f"size must not be negative, got {size!r}")
    dtype = torch.float32 if dtype is None else dtype
    like = torch.empty(0, device=device)
    run = AQN_NOISE.pick(implementation, DispatchOn(like.device, dtype))
    return run(like, 0, math.prod(shape), _unscaled(noise), dtype).view(shape)


@takes(
    step="int [0, inf)",
    total_steps="int [1, inf)",
    start="number (0, inf)",
    end="number (0, inf)",
    stages="int [2, inf)",
)
def aqn_schedule(step: int, total_steps: int, *, start: float, end: float, stages: int) -> float:
    """QeRL's standard deviation for a training step: 0 in the first stage, then from `start` in the
    second to `end` in the last by equal factors.

    Args:
        step: counted from 0; steps from total_steps on get the last stage's value.
        total_steps: >= 1, divided into `stages` equal stages (to within a step).
        start, end: > 0 and finite.
        stages: >= 2; with two, the second has `start`.

    Returns:
        The alpha of that step's noise.

    Raises:
        TypeError, ValueError: Invalid arguments.

    Example:
        >>> from tilewright.ops import aqn_schedule
        >>> [aqn_schedule(step, 3, start=0.5, end=0.125, stages=3) for step in range(3)]
        [0.0, 0.5, 0.125]

    Source: arXiv 2510.11696, section 3.3 (adaptive quantization noise).
    """
    stage = min(step * stages // total_steps, stages - 1)
    if stage == 0:
        return 0.0
    return start * (end / start) ** ((stage - 1) / max(stages - 2, 1))


# ---- for ops that add noise

NONE = Noise(0.0, 0, 0, 0)


def arguments(noise: AQN | None) -> Noise:
    """The noise as operators take it. Raises TypeError for anything but an AQN or None."""
    if noise is None:
        return NONE
    if not isinstance(noise, AQN):
        raise TypeError(f"noise must be an AQN or None, got {type(noise).__name__}")
    if noise.alpha == 0:  # compiled code then has one graph for no noise, whatever the other fields
        return NONE
    return Noise(float(noise.alpha), noise.seed, noise.step, noise.layer)


def _unscaled(noise: AQN) -> Noise:
    """The noise with an alpha of 1, for draws, which do not use alpha: compiled code should not
    depend on it.
    """
    return Noise(1.0, noise.seed, noise.step, noise.layer)


def add(values: torch.Tensor, noise: AQN, implementation: str = "auto") -> torch.Tensor:
    """values + noise.alpha * noise, in values' dtype. Differentiable in values.

    implementation: the implementation of the op that adds noise to its weight. The noise comes from
    `aqn_noise`'s implementation of that name if it exists, else from "auto", which for a named
    implementation ignores `use`.
    """
    run = AQN_NOISE.part(values, like=implementation)
    n = run(values.new_empty(0), 0, values.numel(), _unscaled(noise), values.dtype)
    return values + noise.alpha * n.view(values.shape)


def add_eager(
    values: torch.Tensor, scale: torch.Tensor, units: float, noise: Noise
) -> torch.Tensor:
    """values + alpha * units * scale * noise in values' dtype: the end of a format's definition."""
    if not noise.alpha:
        return values
    n = noise_eager(values.new_empty(0), 0, values.numel(), noise, values.dtype)
    return values + noise.alpha * units * scale * n.view(values.shape)


# ---- the definition


def _noise_eager(like, first, n, noise, dtype):
    skip = first % 4
    words = quantize.philox(
        noise.seed,
        n + skip,
        like.device,
        (noise.layer, 0x80000000 | noise.step),
        first // 4,
        whole=True,
    )
    u = ((words >> 8).double() + 0.5) * 2.0**-24
    r = torch.sqrt(-2.0 * torch.log(u[:, ::2]))
    angle = 2.0 * math.pi * u[:, 1::2]
    values = torch.stack([r * torch.cos(angle), r * torch.sin(angle)], -1)
    return values.view(-1)[skip : skip + n].to(dtype)


# An operator, so that a compiler cannot round it one way in forward and another way in the
# recomputation. In float64: float32 cannot hold the last bit of u, which near 1 is half of ln u.
noise_eager = draw_noise.define("aqn_eager_noise", _noise_eager, plain=_noise_eager)


# ---- fused implementations


@functools.cache
def _triton():
    from tilewright.kernels.quant import aqn_triton

    return draw_noise.define("aqn_triton_noise", aqn_triton.noise)


@functools.cache
def _cpp():
    return draw_noise.adopt("aqn_cpp_noise")


# ---- cases

SOME = AQN(0.75, seed=2**40 + 11, step=70, layer=3)  # for other ops' cases


def _case(name, size, noise=SOME, tags=cases.CONTRACT):
    def make(device, dtype, seed):
        return {
            "size": size,
            "noise": AQN(noise.alpha, noise.seed + seed, noise.step, noise.layer),
            "device": device,
            "dtype": dtype,
        }

    return Case(name, make, lambda itemsize: Cost(math.prod(size) * itemsize, 0, 0, 0), tags)


# A case has no tensor whose dtype could be raised, so truth is the twin in the result's own dtype.
# float32: three units in the last place, from the logarithm, its root, the polynomials and their
# product (measured: 2.1 at most in 10^8 values).
# 16 bits: one unit, because values on the two sides of a tie round apart.
ATOL = {
    torch.float32: 3 * torch.finfo(torch.float32).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
    torch.float16: torch.finfo(torch.float16).eps,
}

AQN_NOISE = Op(
    "aqn_noise",
    aqn_noise,
    noise_eager,
    quantize.implementations(_triton, _cpp, gate=from_kernels("quant.aqn_triton", "gate")),
    (
        _case("ragged", (5, 33)),
        _case("experts", (3, 7, 24), AQN(1.0, 1, 2**31 - 1, 2**32 - 1)),
        _case("one", (1,)),
        _case("scalar", ()),
        _case("no_elements", (3, 0)),
        _case("llama-3-8b-down", quantize.SHAPES["llama-3-8b-down"], tags=cases.CUDA),
        _case("llama-3-8b-down", quantize.SHAPES["llama-3-8b-down"], tags=cases.CPU),
    ),
    atol=ATOL,
)
