"""Experts with a frozen base and low-rank adapters: `moe_mlp` with W + scale B A in place of every
W.

Symbols are those of moe.py, and r = rank. For each expert's three projections, with W frozen,
A [E, r, in] and B [E, out, r]:

    pre[r] = [gate; up], where p = W_p x[token] + scale B_p (A_p x[token]) for p = gate, up
    h[r]   = silu(gate) * up
    y[t]   = the sum over t's rows of w(r) (W_down h[r] + scale B_down (A_down h[r]))

Each base weight is multiplied once, as in `moe_mlp`, and is never added to, copied or concatenated;
the rest are products of rank r. A factor that all experts share has a leading size of 1 and is not
expanded: on the token side (A of gate and up, B of down) it is one product over the T tokens, not
over their T K rows.

Saved for backward: x, pre, the routing and A's results (`saved_bytes`). With u = scale B^T dy,

    dA     = the sum over rows of u input^T
    dB     = scale times the sum over rows of dy (A input)^T
    dinput = W^T dy + A^T u

and no gradient of a base weight is computed. A quantized base is dequantized in both passes.
"""

from __future__ import annotations

from functools import partial

import torch

from tilewright.core import checks
from tilewright.core.registry import FLOATS, Judged, Op
from tilewright.core.takes import takes
from tilewright.ops.activation.activation import SILU, act_mul_eager
from tilewright.ops.moe.experts import EXPERTS, SIZES, Projections, over_grouped_gemm
from tilewright.ops.moe.grouped_gemm import GROUPED_GEMM, grouped_gemm_eager
from tilewright.ops.moe.moe_lora_cases import CASES
from tilewright.ops.moe.moe_lora_cases import MODES as MODES
from tilewright.ops.moe.moe_lora_fused import Adapters, load
from tilewright.ops.moe.permute import checked_index, permute_eager, unpermute_eager
from tilewright.ops.quant import aqn
from tilewright.ops.quant.aqn import AQN
from tilewright.ops.quant.quantize import Quantized

ADAPTERS = Adapters._fields


# Wide: what moe_mlp takes, and two weights of each of three adapters.
@checks.autocast("products", "x", "gate_up_proj", "down_proj", *ADAPTERS)
@takes(
    *SIZES,
    "A in (1, E)",  # of gate and up, both for all experts or both for each
    "B in (1, E)",
    "gate_rank >= 1",
    "up_rank >= 1",
    "down_rank >= 1",
    **EXPERTS,
    gate_A="x [A, gate_rank, H]",
    gate_B="x [B, I, gate_rank]",
    up_A="x [A, up_rank, H]",
    up_B="x [B, I, up_rank]",
    down_A="x [E, down_rank, I] | [1, down_rank, I]",
    down_B="x [E, H, down_rank] | [1, H, down_rank]",
    scale="number",
)
def moe_lora(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor | Quantized,
    down_proj: torch.Tensor | Quantized,
    expert_index: torch.Tensor,
    expert_weight: torch.Tensor,
    gate_A: torch.Tensor,
    gate_B: torch.Tensor,
    up_A: torch.Tensor,
    up_B: torch.Tensor,
    down_A: torch.Tensor,
    down_B: torch.Tensor,
    *,
    scale: float,
    noise: AQN | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """`moe_mlp` over frozen weights, dense or quantized, with W + scale * B A in place of each W,
    of gate and up (the halves of gate_up_proj) and of down_proj; adapters of each expert, or
    shared.

    Products accumulate in float32 and are rounded to x's dtype, and so are sums of base and
    adapter, gate, up, and silu(gate) * up; the sum over k is in float32, rounded once. Under
    torch.autocast x, adapters and dense base weights are cast to its dtype. Differentiable once in
    x, expert_weight and the adapters. A factor's gradient is 0 for an expert without tokens; a
    shared factor's is the sum over experts. Rows of x without experts on this rank are read, and
    must be finite. Saved for backward: the arguments, gate and up, A's results, and the order of
    rows (`saved_bytes`). A quantized weight is saved as its own tensors and dequantized again.
    Deterministic.

    Args:
        x: [T, H] fp32 | bf16 | fp16 (fp64 with eager), any strides.
        gate_up_proj: [E, 2 I, H], gates before ups, frozen: in x's dtype, or quantized.
        down_proj: [E, H, I], likewise.
        expert_index: [T, K] int32 or int64, 0 to E - 1; E for a slot whose expert is not on this
            rank, which adds nothing and gets no gradient.
        expert_weight: [T, K], any floating dtype, used in float32.
        gate_A, up_A: [E, r, H] in x's dtype; r may differ per projection. A leading size of 1 is a
            factor that all experts share; gate and up must agree in this.
        gate_B, up_B: [E, I, r], likewise.
        down_A: [E, r, I], likewise.
        down_B: [E, H, r], likewise.
        scale: a number, the adapters' scale.
        noise: added to quantized weights as in `dequantize_nf4`: gate_up_proj gets noise.layer,
            down_proj noise.layer + 1.
        implementation: "auto", or one that `tilewright explain moe_lora` lists.

    Returns:
        [T, H], contiguous, in x's dtype.

    Raises:
        TypeError, ValueError: Invalid arguments, or a base weight that requires a gradient.
        IndexError: An index out of range (not checked on CUDA, where a check would synchronize: it
            counts as E).
        ImplementationUnavailable: A named implementation that cannot run here.

    Example:
        >>> from tilewright.ops import moe_lora
        >>> x, gate_up, down = torch.ones(3, 4), torch.ones(2, 6, 4), torch.ones(2, 4, 3)
        >>> index, weight = torch.tensor([[0], [1], [1]]), torch.full((3, 1), 0.5)
        >>> shapes = (2, 1, 4), (2, 3, 1), (2, 1, 4), (2, 3, 1), (2, 1, 3), (2, 4, 1)
        >>> adapters = [torch.zeros(shape) for shape in shapes]
        >>> moe_lora(x, gate_up, down, index, weight, *adapters, scale=2.0).shape
        torch.Size([3, 4])

    Source: LoRA, arXiv:2106.09685, on the experts of `moe_mlp`.
    """
    adapters = Adapters(gate_A, gate_B, up_A, up_B, down_A, down_B)
    aqn.arguments(noise)
    for name, w in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        if isinstance(w, Quantized):
            continue
        if w.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} must not require a gradient: under adapters it is frozen")
        if noise is not None:
            raise ValueError("noise is for quantized weights, got it with tensors")
    index = checked_index(expert_index, gate_up_proj.shape[0])
    weight = expert_weight.to(torch.promote_types(x.dtype, torch.float32))
    return MOE_LORA.pick(implementation, x)(
        x, gate_up_proj, down_proj, index, weight, adapters, float(scale), noise
    )


def saved_bytes(
    T: int,
    K: int,
    E: int,
    H: int,
    I: int,
    ranks: tuple[int, int, int],
    itemsize: int,
    *,
    shared_A: bool = False,
    shared_B: bool = False,
) -> int:
    """Bytes that one call of a fused implementation saves for backward, beside base and adapters:
    x, gate and up, A's results, the weights of the routing, and slots, positions and offsets.

    ranks: the ranks of gate, up and down.   shared_A: whether gate and up share A, whose results
    are then per token, not per row.   shared_B: whether down shares B, likewise.
    """
    R, (gate, up, down) = T * K, ranks
    low = (T if shared_A else R) * (gate + up) + (T if shared_B else R) * down
    return itemsize * (T * H + R * 2 * I + low) + 4 * (3 * R + E)


# ---- the definition


def moe_lora_eager(x, gate_up_proj, down_proj, expert_index, expert_weight, adapters, scale, noise):
    gate_A, gate_B, up_A, up_B, down_A, down_B = adapters
    gate_up, down = Projections.of(gate_up_proj, down_proj, noise).dense(x.dtype, "eager")
    rows, offsets, _, position = permute_eager(x, expert_index, gate_up.shape[0])
    gate, up = grouped_gemm_eager(rows, gate_up, offsets).chunk(2, -1)
    gate = _adapted(gate, rows, gate_A, gate_B, offsets, scale)
    up = _adapted(up, rows, up_A, up_B, offsets, scale)
    h = act_mul_eager(torch.cat((gate, up), -1), None, SILU)
    down = _adapted(grouped_gemm_eager(h, down, offsets), h, down_A, down_B, offsets, scale)
    return unpermute_eager(down, expert_weight, position)


def _adapted(base, rows, A, B, offsets, scale):
    E = offsets.shape[0]
    low = grouped_gemm_eager(rows, A.expand(E, -1, -1), offsets)
    delta = grouped_gemm_eager(low, B.expand(E, -1, -1), offsets)
    acc = torch.promote_types(base.dtype, torch.float32)
    return (base.to(acc) + scale * delta.to(acc)).to(base.dtype)


MOE_LORA = Op(
    "moe_lora",
    moe_lora,
    moe_lora_eager,
    tuple(over_grouped_gemm(i.name, partial(load, i.name)) for i in GROUPED_GEMM.built_in),
    CASES,
    # Root mean squares of errors are the twin's (0.9 to 1.1 times, by tensor, over 6 seeds and all
    # cases). But a factor's gradient is a sum over few rows of values rounded nine times or so, in
    # another order here, and its largest error is that of a few rows: beyond twice the twin's it
    # reached 5 eps in float32, 6 in bfloat16 with AVX-512, and 8.1 in float32 with AVX2 (12 seeds,
    # every layout of gradients).
    # Half of the error that is detected in an ordinary element is thrice the twin's own error.
    judged=Judged(
        detects={
            torch.bfloat16: {
                "out 0": 0.35,
                "grad x": 0.3,
                "grad expert_weight": 0.33,
                "grad gate_A": 0.33,
                "grad gate_B": 0.39,
                "grad up_A": 0.23,
                "grad up_B": 0.34,
                "grad down_A": 0.31,
                "grad down_B": 0.3,
            },
            torch.float16: {
                "out 0": 0.038,
                "grad x": 0.031,
                "grad expert_weight": 0.024,
                "grad gate_A": 0.051,
                "grad gate_B": 0.049,
                "grad up_A": 0.036,
                "grad up_B": 0.04,
                "grad down_A": 0.079,
                "grad down_B": 0.031,
            },
        }
    ),
    atol={t: (16 if t == torch.float32 else 8) * torch.finfo(t).eps for t in FLOATS},
    eager_reads_host="contract",
)
