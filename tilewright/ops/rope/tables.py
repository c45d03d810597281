"""Tables of cos and sin for `rope`: by position, with the frequencies of models whose context was
extended; and by token, for positions with three axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tilewright.core.takes import takes
from tilewright.ops.rope.rope import checked_positions


@takes("dim % 2 == 0", base="number (1, inf)", dim="int [2, inf)", length="int [0, inf)")
def rope_tables(
    base: float,
    dim: int,
    length: int,
    scaling: dict[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes the tables of cos and sin that `rope` reads, for positions 0 to length - 1.

    Computed in float32. Pair i turns by base^(-2 i / dim) radians per position, modified by
    `scaling`:

    - default: no settings.
    - linear: factor.
    - dynamic: factor, original_max_position_embeddings (the model's max_position_embeddings).
    - llama3: factor, low_freq_factor, high_freq_factor, original_max_position_embeddings.
    - yarn: factor, original_max_position_embeddings; it may have beta_fast (32), beta_slow (1),
      truncate (True), and attention_factor, or mscale and mscale_all_dim.
    - longrope: short_factor and long_factor (dim / 2 numbers each),
      original_max_position_embeddings, and attention_factor or the factor that it follows from.

    Args:
        base: the model's rope_theta, > 1.
        dim: rotated features of a head, even.
        length: rows. For dynamic and longrope also the length of the sequence, on which their
            frequencies depend beyond original_max_position_embeddings.
        scaling: settings by their names in a configuration's rope_parameters (rope_scaling), whose
            others are ignored; None: default.
        device: the result's device; default: torch's default device.

    Returns:
        (cos, sin), each float32 [length, dim / 2], times the attention factor (1 but for yarn and
        longrope).

    Raises:
        TypeError, ValueError: invalid arguments; an unknown rope_type, and settings that are
            missing or no positive numbers.

    Example:
        >>> yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        >>> cos, sin = tilewright.ops.rope_tables(1e6, 128, 8, yarn)
        >>> cos.shape, f"{cos[0, 0]:.4f}"
        (torch.Size([8, 64]), '1.1386')

    Source: arXiv:2104.09864; dynamic: NTK-aware scaling by the length; llama3: Llama 3.1's
    configuration; yarn: arXiv:2309.00071; longrope: arXiv:2402.13753; settings as transformers
    reads them.
    """
    scaling = {} if scaling is None else scaling
    kind = _checked(scaling, dim)
    exponent = torch.arange(0, dim, 2, device=device, dtype=torch.int64).float() / dim
    inv_freq = ROPE_TYPES[kind].frequencies(base, exponent, scaling, length)
    angle = torch.outer(torch.arange(length, device=exponent.device).float(), inv_freq)
    cos, sin, amplitude = angle.cos(), angle.sin(), _amplitude(kind, scaling)
    return (cos, sin) if amplitude == 1 else (amplitude * cos, amplitude * sin)


@takes(
    "cos: P > 0",
    cos="constant float [P, W]",
    sin="constant float [cos]",
    position_ids="int64 | int32 [3, B, S]",
    interleaved="bool",
)
def mrope_tables(
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    sections: Sequence[int],
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes tables by token for multimodal positions (M-RoPE), whose pairs turn by the position on
    one of three axes: time, height and width. `rope` reads them as cos and sin.

    Args:
        cos, sin: [P, R / 2], of `rope_tables`. Not differentiable: refused if they require a
            gradient.
        position_ids: integers [3, B, S], rows of the tables on each axis; for text the three are
            equal.
        sections: the numbers of pairs of each axis, whose sum is R / 2: mrope_section of a
            configuration.
        interleaved: False: the pairs of time, then height, then width, as Qwen2-VL and Qwen2.5-VL.
            True: pair 3 i + 1 is of height and 3 i + 2 of width, as many as `sections` has, and
            the others of time, as Qwen3-VL.

    Returns:
        (cos, sin), each [B, S, R / 2] in its table's dtype.

    Raises:
        TypeError, ValueError: invalid arguments.
        IndexError: a position outside the tables. On a CUDA device, where a check would
            synchronize, it gives NaN.

    Example:
        >>> cos, sin = tilewright.ops.rope_tables(1e4, 16, 9)
        >>> position_ids = torch.tensor([[[0, 1]], [[0, 2]], [[0, 3]]])
        >>> by_token, _ = tilewright.ops.mrope_tables(cos, sin, position_ids, (4, 2, 2))
        >>> torch.equal(by_token[0, 1, 4:6], cos[2, 4:6])
        True

    Source: arXiv:2409.12191; interleaved as transformers' Qwen3VLTextRotaryEmbedding.
    """
    (P, W), parts = cos.shape, tuple(sections)
    if len(parts) != 3 or min(parts) < 0 or sum(parts) != W:
        raise ValueError(
            f"sections must be three numbers >= 0 whose sum is R / 2 = {W}, got {sections!r}"
        )
    time, height, width = parts
    if interleaved:
        places = slice(1, 3 * height, 3), slice(2, 3 * width, 3)
        if (height, width) != tuple(len(range(W)[at]) for at in places):
            raise ValueError(
                f"sections must give height and width at most each third pair of {W}, got "
                f"{sections!r}"
            )
    else:
        places = slice(time, time + height), slice(time + height, W)
    ids = checked_positions(position_ids, P)
    outside = ((ids < 0) | (ids >= P)).unsqueeze(-1)
    ids = ids.clamp(0, P - 1)

    def by_token(table):
        rows = table.detach()[ids[0]].masked_fill(outside[0], float("nan"))
        for axis, at in zip((1, 2), places, strict=True):
            of_axis = table.detach()[:, at][ids[axis]]
            rows[..., at] = of_axis.masked_fill(outside[axis], float("nan"))
        return rows

    return by_token(cos), by_token(sin)


# ---- types of scaling


def _default(base, exponent, scaling, length):
    return 1.0 / base**exponent


def _linear(base, exponent, scaling, length):
    return 1.0 / base**exponent / scaling["factor"]


def _dynamic(base, exponent, scaling, length):
    """NTK-aware: a larger base, so that the slowest pair turns as with positions divided."""
    context, factor, R = (
        scaling["original_max_position_embeddings"],
        scaling["factor"],
        _width(exponent),
    )
    stretch = factor * max(length, context) / context - (factor - 1)
    return 1.0 / (base * stretch ** (R / (R - 2))) ** exponent


def _llama3(base, exponent, scaling, length):
    """Llama 3.1: stretches long wavelengths, keeps short ones, interpolates between."""
    inv_freq = 1.0 / base**exponent
    factor, low, high = (scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    smooth = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq


def _yarn(base, exponent, scaling, length):
    """Keeps features that rotate more than beta_fast times in the original context, stretches those
    with fewer rotations than beta_slow, interpolates between by index.
    """
    inv_freq = 1.0 / base**exponent
    R, context = _width(exponent), scaling["original_max_position_embeddings"]

    def index(rotations):
        return R * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = index(scaling.get("beta_fast") or 32)
    high = index(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, R - 1)
    high += 0.001 * (low == high)
    indices = torch.arange(R // 2, device=inv_freq.device, dtype=torch.float32)
    stretched = ((indices - low) / (high - low)).clamp(0, 1)
    return stretched * inv_freq / scaling["factor"] + (1 - stretched) * inv_freq


def _longrope(base, exponent, scaling, length):
    """A factor for each pair, searched for the model; others within the original context."""
    long = length > scaling["original_max_position_embeddings"]
    factors = torch.tensor(scaling["long_factor" if long else "short_factor"])
    return 1.0 / (factors.to(exponent.device, torch.float32) * base**exponent)


def _width(exponent):
    return 2 * len(exponent)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """By how much YaRN scales queries and keys whose context is `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _amplitude(kind, scaling):
    """The factor of cos and sin."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    given, factor = scaling.get("attention_factor"), scaling.get("factor")
    if given is not None:
        return given
    if kind == "longrope":
        context = scaling["original_max_position_embeddings"]
        return math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0
    own, every = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if own and every:
        return yarn_mscale(factor, own) / yarn_mscale(factor, every)
    return yarn_mscale(factor)


class RopeType(NamedTuple):
    """frequencies: (base, exponent, settings, length) -> radians per position.
    required, optional: names of settings.   by_length: whether the frequencies depend on it.
    """

    frequencies: Callable[..., torch.Tensor]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    by_length: bool = False


CONTEXT = "original_max_position_embeddings"
FACTORS = ("short_factor", "long_factor")  # a number for each pair
ROPE_TYPES = {
    "default": RopeType(_default),
    "linear": RopeType(_linear, ("factor",)),
    "llama3": RopeType(_llama3, ("factor", "low_freq_factor", "high_freq_factor", CONTEXT)),
    "yarn": RopeType(
        _yarn,
        ("factor", CONTEXT),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
    "dynamic": RopeType(_dynamic, ("factor", CONTEXT), by_length=True),
    "longrope": RopeType(
        _longrope, (*FACTORS, CONTEXT), ("factor", "attention_factor"), by_length=True
    ),
}


def _checked(scaling: dict[str, Any], dim: int) -> str:
    """The type of scaling, whose settings are there and valid."""
    if not isinstance(scaling, dict):
        raise TypeError(f"scaling must be a dict or None, got {type(scaling).__name__}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise ValueError(f"scaling: rope_type must be one of {list(ROPE_TYPES)}, got {kind!r}")
    kind_of = ROPE_TYPES[kind]
    absent = [name for name in kind_of.required if scaling.get(name) is None]
    if kind == "longrope" and all(scaling.get(name) is None for name in kind_of.optional):
        absent.append("factor or attention_factor")
    if absent:
        raise ValueError(f"scaling: rope_type {kind!r} needs {', '.join(absent)}")
    if kind == "dynamic" and dim < 4:
        raise ValueError(f"dim must be at least 4 for rope_type 'dynamic', got {dim}")
    for name in (*kind_of.required, *kind_of.optional):
        value = scaling.get(name)
        if value is None or name == "truncate":
            continue
        values = list(value) if name in FACTORS else [value]
        if name in FACTORS and len(values) != dim // 2:
            raise ValueError(
                f"scaling: {name} must have dim / 2 = {dim // 2} numbers, got {values}"
            )
        if not all(_is_positive(v) for v in values):
            raise ValueError(f"scaling: {name} must be finite and > 0, got {value!r}")
    return kind


def _is_positive(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value < math.inf
