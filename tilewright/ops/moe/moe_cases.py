"""The cases of `moe_mlp`: small ones for the contract, and published models, timed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from tilewright.core.registry import Case, Cost
from tilewright.ops import cases
from tilewright.ops.activation.activation import Gate
from tilewright.ops.moe.experts import draw_routing
from tilewright.ops.quant.block_fp8 import quantize_block_fp8
from tilewright.ops.quant.nf4 import quantize_nf4
from tilewright.ops.quant.nvfp4 import quantize_nvfp4

_FORMATS = {
    "nf4": (quantize_nf4, 4.5),
    "nvfp4": (quantize_nvfp4, 4.5),
    "block_fp8": (lambda w: quantize_block_fp8(w, block=(16, 16)), 8.13),
}


_GPT_OSS = Gate(alpha=1.702, limit=7.0, up_limit=7.0, up_offset=1.0, interleaved=True)


def case(name, sizes, kind="uniform", tags=cases.CONTRACT, format=None, **options):
    """sizes: T, E, K, H, I.   kind: as in `draw_routing`.   format: the format of quantized
    weights.   options: as in `_inputs`.
    """
    small = tags == cases.CONTRACT

    def make(device, dtype, seed):
        arguments = _inputs(sizes, kind, small, device, dtype, seed, **options)
        if format is not None:
            for weight in ("gate_up_proj", "down_proj"):
                arguments[weight] = _FORMATS[format][0](arguments[weight].detach())
        return arguments

    return Case(name, make, partial(_cost, sizes, format), tags)


def _inputs(sizes, kind, small, device, dtype, seed, *, biases=False, gate=None, transposed=False):
    """biases: with both.   transposed: weights in memory as [E, H, 2 I] and [E, I, H].

    In a small case whose gate has limits, x and the inputs of gates and ups are multiples of 1 and
    1/8: then sums are exact in every dtype, and none is near a limit, where rounding would decide
    whether there is a gradient.
    """
    (T, E, K, H, I), g = sizes, cases.generator(device, seed)
    draw = {"device": device, "dtype": dtype, "gen": g}
    exact = gate is not None and gate.limit is not None and small

    def near(t, step):
        return ((t.detach() / step).round() * step).requires_grad_() if exact else t

    def laid_out(t):
        return t.detach().mT.contiguous().mT.requires_grad_() if transposed else t

    arguments = {
        "x": near(cases.randn(T, H, **draw), 1),
        "gate_up_proj": laid_out(near(cases.randn(E, 2 * I, H, scale=H**-0.5, **draw), 1 / 8)),
        "down_proj": laid_out(cases.randn(E, H, I, scale=max(I, 1) ** -0.5, **draw)),
    }
    more = {} if gate is None else {"gate": gate}
    if biases:
        more |= {
            "gate_up_bias": near(cases.randn(E, 2 * I, **draw), 1 / 8),
            "down_bias": cases.randn(E, H, **draw),
        }
    arguments["expert_index"] = draw_routing(device, g, T, E, K, kind)
    weight = cases.randn(T, K, device=device, dtype=torch.float32, gen=g).detach().softmax(-1)
    return {**arguments, "expert_weight": weight.requires_grad_(), **more}


def _cost(sizes, format, itemsize):
    T, E, K, H, I = sizes
    R, weights = T * K, 3 * E * H * I
    rows = itemsize * 2 * R * 2 * I  # pre is written and read
    if format is not None:
        moved = int(_FORMATS[format][1] / 8 * weights) + itemsize * 2 * T * H + rows
        return Cost(moved, moved, 6 * R * H * I, 6 * R * H * I)
    return Cost(
        itemsize * (weights + 2 * T * H) + rows,
        itemsize * (2 * weights + 3 * T * H) + rows,
        6 * R * H * I,
        12 * R * H * I,
    )


_QWEN, _MIXTRAL = (128, 8, 2048, 768), (8, 2, 4096, 14336)

CASES = (
    case("ragged", (37, 5, 2, 24, 19)),
    case("aligned", (48, 4, 2, 64, 32)),
    case("half_idle", (29, 8, 3, 16, 24), "half"),
    case("one_expert_has_all", (33, 5, 1, 16, 16), "one"),
    case("sentinels", (31, 4, 2, 20, 16), "sentinels"),
    case("only_sentinels", (7, 3, 2, 16, 8), "none"),
    case("one_expert", (21, 1, 1, 12, 10)),
    case("every_expert", (9, 4, 4, 16, 16)),
    case("no_tokens", (0, 3, 2, 16, 8)),
    case("skewed", (64, 16, 4, 32, 16), "skewed"),
    case("biases", (37, 5, 2, 24, 19), "sentinels", biases=True),
    # Limits between the multiples of 1/8 of gates and ups.
    case(
        "gpt_oss",
        (37, 5, 2, 24, 19),
        "half",
        biases=True,
        transposed=True,
        gate=replace(_GPT_OSS, limit=1.06, up_limit=0.94),
    ),
    case(
        "gpt_oss_aligned",
        (48, 4, 2, 64, 32),
        biases=True,
        gate=replace(_GPT_OSS, limit=1.06, up_limit=0.94),
    ),
    case("clamped", (21, 3, 2, 16, 8), gate=Gate(limit=0.81, up_limit=1.19)),
    case("interleaved", (21, 3, 2, 20, 10), "sentinels", gate=Gate(interleaved=True)),
    case("gelu_tanh", (17, 3, 2, 16, 8), gate=Gate("gelu_tanh")),
    case("gelu", (17, 3, 2, 16, 8), gate=Gate("gelu")),
    case(
        "softcapped",
        (17, 3, 2, 16, 8),
        biases=True,
        gate=Gate("softcapped", limit=1.5, up_limit=2.5),
    ),
    case("no_tokens_biases", (0, 3, 2, 16, 8), biases=True, gate=_GPT_OSS),
    *(
        case(f"frozen_{format}", (13, 4, 2, 24, 10), "sentinels", format=format)
        for format in _FORMATS
    ),
    case("frozen_aligned", (21, 3, 2, 32, 16), format="nvfp4"),
    case("frozen_no_tokens", (0, 3, 2, 16, 8), format="nf4"),
    case("qwen3-30b-a3b_8192", (8192, *_QWEN), tags=cases.CUDA),
    case("qwen3-30b-a3b_32768", (32768, *_QWEN), tags=cases.CUDA),
    case("qwen3-30b-a3b_32768_skewed", (32768, *_QWEN), "skewed", tags=cases.CUDA),
    *(
        case(f"qwen3-30b-a3b_8192_{format}", (8192, *_QWEN), tags=cases.CUDA, format=format)
        for format in _FORMATS
    ),
    case("mixtral-8x7b_8192", (8192, *_MIXTRAL), tags=cases.CUDA),
    case(
        "gpt-oss-20b_8192",
        (8192, 32, 4, 2880, 2880),
        tags=cases.CUDA,
        biases=True,
        gate=_GPT_OSS,
        transposed=True,
    ),
    # A quarter of DeepSeek-V3's experts, and of Qwen3's on a CPU: all of them, with gradients and
    # the float64 reference, exceed the memory.
    case("deepseek-v3-64e_8192", (8192, 64, 8, 7168, 2048), tags=cases.CUDA),
    case("qwen3-30b-a3b-32e_128", (128, 32, *_QWEN[1:]), tags=cases.CPU),
    case("qwen3-30b-a3b-32e_512", (512, 32, *_QWEN[1:]), tags=cases.CPU),
    case("qwen3-30b-a3b-32e_128_skewed", (128, 32, *_QWEN[1:]), "skewed", tags=cases.CPU),
)
