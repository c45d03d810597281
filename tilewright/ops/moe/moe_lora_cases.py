"""The cases of `moe_lora`: small ones for the contract, and a published model, timed."""

from __future__ import annotations

import torch

from tilewright.core.registry import Case, Cost
from tilewright.ops import cases
from tilewright.ops.moe.experts import draw_routing
from tilewright.ops.quant.block_fp8 import quantize_block_fp8
from tilewright.ops.quant.nf4 import quantize_nf4
from tilewright.ops.quant.nvfp4 import quantize_nvfp4

MODES = {  # leading sizes of gate_A and up_A, gate_B and up_B, down_A, down_B; 0 represents E
    "per_expert": (0, 0, 0, 0),
    "shared": (1, 1, 1, 1),
    "hybrid_shared": (1, 0, 0, 1),
}
_QUANTIZE = {
    "nf4": lambda w: quantize_nf4(w, block_size=32, double_quant=True),
    "nvfp4": quantize_nvfp4,
    "block_fp8": lambda w: quantize_block_fp8(w, block=(16, 16)),
}


def case(
    name, sizes, ranks, mode="per_expert", kind="uniform", quantized=None, tags=cases.CONTRACT
):
    """sizes: T, E, K, H, I.   ranks: one, or those of gate, up and down."""
    T, E, K, H, I = sizes
    gate, up, down = (ranks,) * 3 if isinstance(ranks, int) else ranks

    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        draw = {"device": device, "dtype": dtype, "gen": g}
        shared_A, shared_B, down_A, down_B = (n or E for n in MODES[mode])
        base = {
            "gate_up_proj": cases.randn(E, 2 * I, H, scale=H**-0.5, requires_grad=False, **draw),
            "down_proj": cases.randn(E, H, I, scale=max(I, 1) ** -0.5, requires_grad=False, **draw),
        }
        if quantized:
            base = {n: _QUANTIZE[quantized](w) for n, w in base.items()}
        weight = cases.randn(T, K, device=device, dtype=torch.float32, gen=g).detach().softmax(-1)
        return {
            "x": cases.randn(T, H, **draw),
            **base,
            "expert_index": draw_routing(device, g, T, E, K, kind),
            "expert_weight": weight.requires_grad_(),
            "gate_A": cases.randn(shared_A, gate, H, scale=H**-0.5, **draw),
            "gate_B": cases.randn(shared_B, I, gate, scale=gate**-0.5, **draw),
            "up_A": cases.randn(shared_A, up, H, scale=H**-0.5, **draw),
            "up_B": cases.randn(shared_B, I, up, scale=up**-0.5, **draw),
            "down_A": cases.randn(down_A, down, I, scale=max(I, 1) ** -0.5, **draw),
            "down_B": cases.randn(down_B, H, down, scale=down**-0.5, **draw),
            "scale": 0.75,
        }

    def cost(itemsize):
        R, weights, rank = T * K, 3 * E * H * I, gate + up + down
        rows = itemsize * R * (4 * I + 2 * rank)  # pre and A's results are written and read
        base, low = 6 * R * H * I, 2 * R * rank * (H + I)
        return Cost(
            itemsize * (weights + 2 * T * H) + rows,
            itemsize * (weights + 3 * T * H) + rows,
            base + low,
            base + 2 * low,
        )

    return Case(name, make, cost, tags)


_QWEN = (128, 8, 2048, 768)
CASES = (
    *(
        case(f"sentinels_{mode}", (13, 4, 2, 20, 19), (3, 5, 2), mode, "sentinels")
        for mode in ("per_expert", "shared")
    ),
    case("aligned", (48, 4, 2, 64, 32), 8),
    case("half_idle_hybrid_shared", (29, 8, 3, 16, 24), 4, "hybrid_shared", "half"),
    case("only_sentinels", (7, 3, 2, 16, 8), 2, "hybrid_shared", "none"),
    case("one_expert", (11, 1, 1, 12, 10), 13, kind="sentinels"),  # and ranks above the widths
    case("no_tokens_shared", (0, 3, 2, 16, 8), 2, "shared"),
    case("nf4", (9, 3, 2, 16, 12), 2, quantized="nf4"),
    case(
        "nvfp4_hybrid_shared", (9, 3, 2, 32, 16), (2, 3, 4), "hybrid_shared", "sentinels", "nvfp4"
    ),
    case("block_fp8_shared", (9, 3, 2, 16, 24), 2, "shared", quantized="block_fp8"),
    *(
        case(f"qwen3-30b-a3b_{mode}_{T}", (T, *_QWEN), 16, mode, tags=cases.CUDA)
        for T, mode in ((8192, "per_expert"), (32768, "per_expert"), (32768, "hybrid_shared"))
    ),
    *(
        case(f"qwen3-30b-a3b-32e_{mode}_128", (128, 32, *_QWEN[1:]), 16, mode, tags=cases.CPU)
        for mode in MODES
    ),
)
