"""The experts of a mixture-of-experts layer as one op: gather, up-projection, SwiGLU,
down-projection, weighted sum.

T = tokens, K = experts per token, R = T K rows, E = experts, H = model width, I = inner width of an
expert. Rows are sorted by expert (`sort_by_expert`); token(r), e(r) and w(r) are a row's token,
expert and weight:

    pre[r] = gate_up_proj[e(r)] x[token(r)] + gate_up_bias[e(r)]
    h[r]   = silu(gate) * up, where pre[r] = [gate; up], or another `Gate` of them
    y[t]   = the sum over t's rows of w(r) (down_proj[e(r)] h[r] + down_bias[e(r)])

Saved for backward: x, pre and the routing (`saved_bytes`); the backward needs neither the result of
the down-projection nor its gradient. With dh[r] = down_proj[e(r)]^T dy[token(r)],

    dw(r)         = <dh[r], h[r]> + <dy[token(r)], down_bias[e(r)]>
    dpre[r]       = dSwiGLU(pre[r], w(r) dh[r])
    ddown_proj[e] = the sum over e's rows of dy[token(r)] (w(r) h[r])^T
    ddown_bias[e] = the sum over e's rows of w(r) dy[token(r)]

as in SonicMoE, arXiv:2512.14080. The products gather x themselves, so no copy of it sorted by
expert is saved.

Quantized weights are frozen. Each is dequantized, all experts in one launch, for its one product,
and again in the backward. Saved for backward: their codes and scales, pre and the routing; not x,
which only gradients of weights need.
"""

from __future__ import annotations

from functools import partial

import torch

from tilewright.core import checks
from tilewright.core.registry import FLOATS, Goal, Judged, Op, in_triton, no_kernels
from tilewright.core.takes import takes
from tilewright.kernels.moe.operators import map_size
from tilewright.ops import cases
from tilewright.ops.activation.activation import Gate, gate_eager
from tilewright.ops.moe import moe_quack
from tilewright.ops.moe.experts import (
    BIASED,
    BIASES,
    EXPERTS,
    SIZES,
    SWIGLU,
    Projections,
    over_grouped_gemm,
)
from tilewright.ops.moe.grouped_gemm import grouped_gemm_eager
from tilewright.ops.moe.moe_cases import CASES
from tilewright.ops.moe.moe_fused import (
    NO_BIASES,
    Biases,
    add_bias,
    load_composed,
    load_gluon,
    load_triton,
)
from tilewright.ops.moe.permute import checked_index, permute_eager, unpermute_eager
from tilewright.ops.quant import aqn
from tilewright.ops.quant.aqn import AQN
from tilewright.ops.quant.quantize import Quantized


@checks.autocast("products", "x", "gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
@takes(*SIZES, BIASED, **EXPERTS, **BIASES)
def moe_mlp(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor | Quantized,
    down_proj: torch.Tensor | Quantized,
    expert_index: torch.Tensor,
    expert_weight: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate: Gate = SWIGLU,
    noise: AQN | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """The experts of an MoE layer:
    y[t] = sum_k expert_weight[t, k] * (down_proj[e] (silu(gate) * up) + down_bias[e]),
    [gate; up] = gate_up_proj[e] x[t] + gate_up_bias[e], e = expert_index[t, k].

    Products accumulate in float32; gate, up, silu(gate) * up and the rows of the down-projection
    are each rounded to x's dtype (products once more where a bias is added afterwards), the sum
    over k (in its order) is in float32, rounded once. Under torch.autocast x, biases and dense
    weights are cast to its dtype. Differentiable once in x, gate_up_proj, down_proj, expert_weight
    and biases; the gradient of an expert without tokens is 0. Saved for backward: the arguments
    (except gate_up_bias), gate and up, and the order of rows (`saved_bytes`); with quantized
    weights their own tensors, no dequantized copy, and not x. Deterministic.

    Args:
        x: [T, H] fp32 | bf16 | fp16 (fp64 with eager), any strides.
        gate_up_proj: [E, 2 I, H], gates before ups, in x's dtype; or quantized (NF4, NVFP4,
            BlockFP8), then frozen and dequantized to x's dtype.
        down_proj: [E, H, I], in x's dtype; quantized if gate_up_proj is.
        expert_index: [T, K] int32 or int64, 0 to E - 1; E for a slot whose expert is not on this
            rank, which adds nothing and gets no gradient.
        expert_weight: [T, K], any floating dtype, used in float32.
        gate_up_bias: [E, 2 I], in the order of gate_up_proj's rows, in x's dtype; None: no bias.
            Unsupported with quantized weights.
        down_bias: [E, H]; otherwise as gate_up_bias.
        gate: replaces silu(gate) * up, and says whether gates and ups are interleaved (see `Gate`).
            With quantized weights only the default.
        noise: added to quantized weights as by `dequantize_*`: gate_up_proj gets noise.layer,
            down_proj noise.layer + 1; the same in forward and backward. None: no noise.
        implementation: "auto", or one that `tilewright explain moe_mlp` lists.

    Returns:
        [T, H], contiguous, in x's dtype; with quantized weights bit for bit as with the dequantized
        ones.

    Raises:
        TypeError, ValueError: Invalid arguments.
        IndexError: An index out of range (not checked on CUDA, where a check would synchronize: it
            counts as E).
        ImplementationUnavailable: A named implementation that cannot run here.

    Example:
        >>> from tilewright.ops import moe_mlp
        >>> x, gate_up, down = torch.ones(3, 4), torch.ones(2, 6, 4), torch.ones(2, 4, 3)
        >>> index, weight = torch.tensor([[0], [1], [1]]), torch.full((3, 1), 0.5)
        >>> moe_mlp(x, gate_up, down, index, weight).shape
        torch.Size([3, 4])

    Source: the experts of Mixtral, arXiv:2401.04088, and Qwen3-MoE, in the layout of transformers
    5; biases and `Gate`: gpt-oss, arXiv:2508.10925. See the module's docstring for the backward.
    """
    biases = Biases(gate_up_bias, down_bias)
    _check_quantized(gate_up_proj, down_proj, biases, gate, noise)
    index = checked_index(expert_index, gate_up_proj.shape[0])
    weight = expert_weight.to(torch.promote_types(x.dtype, torch.float32))
    return MOE_MLP.pick(implementation, x)(
        x, gate_up_proj, down_proj, index, weight, noise, biases, gate
    )


def saved_bytes(
    T: int,
    K: int,
    E: int,
    H: int,
    I: int,
    itemsize: int,
    quantized: bool = False,
    triton: bool = False,
) -> int:
    """Bytes that one call of a fused implementation saves for backward, beside weights and biases:
    x (not with quantized weights), gate and up, the weights of the routing, slots, positions and
    offsets, and with Triton the map of tiles.
    """
    tiles = map_size(T * K, E) if triton else 0
    return (
        itemsize * (0 if quantized else T * H)
        + itemsize * T * K * 2 * I
        + 4 * (3 * T * K + E + tiles)
    )


def _check_quantized(gate_up_proj, down_proj, biases, gate, noise):
    """Raises TypeError or ValueError for options that weights of this kind do not support."""
    weights = {"gate_up_proj": gate_up_proj, "down_proj": down_proj}
    frozen = [name for name, t in weights.items() if isinstance(t, Quantized)]
    if len(frozen) == 1:
        raise TypeError(
            "gate_up_proj and down_proj must both be tensors or both be quantized, got only "
            f"{frozen[0]} quantized"
        )
    aqn.arguments(noise)
    if noise is not None and not frozen:
        raise ValueError("noise is for quantized weights, got it with tensors")
    if not isinstance(gate, Gate):
        raise TypeError(f"gate must be a Gate, got {type(gate).__name__}")
    if frozen:
        given = [name for name, t in zip(biases._fields, biases, strict=True) if t is not None]
        for name in given if gate.is_swiglu else [*given, "gate"]:
            raise ValueError(f"{name} is for weights that are tensors, got it with quantized ones")


# ---- the definition


def moe_mlp_eager(
    x,
    gate_up_proj,
    down_proj,
    expert_index,
    expert_weight,
    noise=None,
    biases=NO_BIASES,
    gate=SWIGLU,
):
    gate_up, down = Projections.of(gate_up_proj, down_proj, noise).dense(x.dtype, "eager")
    rows, offsets, _, position = permute_eager(x, expert_index, gate_up.shape[0])
    pre = add_bias(grouped_gemm_eager(rows, gate_up, offsets), biases.gate_up_bias, offsets)
    rows = grouped_gemm_eager(gate_eager(pre, gate), down, offsets)
    rows = add_bias(rows, biases.down_bias, offsets)
    return unpermute_eager(rows, expert_weight, position)


def _composed(name):
    return load_composed(name).moe_mlp


def _tunables():
    from tilewright.kernels.moe import grouped_gemm_triton

    return _with_sorting(grouped_gemm_triton)


def _gluon_tunables():
    from tilewright.kernels.moe import specialized

    return _with_sorting(specialized)


def _with_sorting(products):
    from tilewright.kernels.moe import permute_triton

    return (*products.FUSED, *products.TUNABLES, permute_triton.SORT, permute_triton.COLLECT)


MOE_MLP = Op(
    "moe_mlp",
    moe_mlp,
    moe_mlp_eager,
    (
        over_grouped_gemm("gluon", lambda: load_gluon().moe_mlp, tunables=_gluon_tunables),
        in_triton(lambda: load_triton().moe_mlp, tunables=_tunables),
        *(
            over_grouped_gemm(name, partial(_composed, name), tunables=no_kernels)
            for name in ("cpp", "native")
        ),
        over_grouped_gemm(
            "quack", lambda: moe_quack.load().moe_mlp, tunables=no_kernels, does=moe_quack.explain
        ),
    ),
    CASES,
    # The gradient of an expert weight is <dh, h> in the fused implementations and <dy, row> in the
    # twin, and each cancels where the other does not. Over 12 seeds and all cases the excess beyond
    # twice the twin's own error reached 5 eps in float32; in 16 bits the operands' rounding errors
    # are larger than that.
    # Gradients in float32 are sums of rounded products too, with the slack of the inputs' dtype.
    # The same two products: what cancels is relative to the root mean square, which is two to four
    # times as large as an ordinary element.
    judged=Judged(
        of_sums=True,
        detects={
            torch.bfloat16: {
                "out 0": 0.15,
                "grad x": 0.15,
                "grad gate_up_proj": 0.65,
                "grad down_proj": 0.21,
                "grad expert_weight": 0.18,
                "grad gate_up_bias": 0.14,
                "grad down_bias": 0.084,
            },
            torch.float16: {
                "grad gate_up_proj": 0.056,
                "grad down_proj": 0.038,
                "grad gate_up_bias": 0.023,
            },
        },
    ),
    atol={t: (8 if t == torch.float32 else 0.5) * torch.finfo(t).eps for t in FLOATS},
    goals=(
        *(
            Goal(
                device,
                pass_name,
                "tflop_per_s",
                at_least=least,
                cases=("qwen3-30b-a3b_32768",),
                dtypes=("bfloat16",),
            )
            for device in ("H100", "H200")
            for pass_name, least in (("forward", 520), ("backward", 440))
        ),
        *(
            Goal(
                cases.HOPPER,
                "forward_backward",
                f"over {other}",
                at_least=least,
                cases=("qwen3-30b-a3b_32768",),
                dtypes=("bfloat16",),
            )
            for other, least in (("native", 1.3), ("liger", 1.4))
        ),
        *(
            Goal("EPYC", "forward_backward", f"over {other}", at_least=least)
            for other, least in (("transformers", 1.5), ("transformers-grouped", 1.1))
        ),
    ),
    eager_reads_host="contract",
)
