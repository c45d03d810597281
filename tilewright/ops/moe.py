"""The experts of a mixture-of-experts layer as one op: gather, up-projection, SwiGLU,
down-projection, weighted sum.

T = tokens, K = experts per token, R = T K rows, E = experts, H = width of the model, I = inner
width of an expert. With rows in the order of their experts (`sort_by_expert`), and token(r), e(r),
w(r) of a row r:

    pre[r] = gate_up_proj[e(r)] x[token(r)] + gate_up_bias[e(r)]
    h[r]   = silu(gate) * up, where pre[r] = [gate; up], or what another `Gate` makes of them
    y[t]   = the sum over t's rows of w(r) (down_proj[e(r)] h[r] + down_bias[e(r)])

Saved for backward are x, pre and the routing (`saved_bytes`), because the backward needs neither
the result of the down-projection nor its gradient. With dh[r] = down_proj[e(r)]^T dy[token(r)],

    dw(r)         = <dh[r], h[r]> + <dy[token(r)], down_bias[e(r)]>
    dpre[r]       = dSwiGLU(pre[r], w(r) dh[r])
    ddown_proj[e] = the sum over e's rows of dy[token(r)] (w(r) h[r])^T
    ddown_bias[e] = the sum over e's rows of w(r) dy[token(r)]

as in SonicMoE, arXiv:2512.14080. x is gathered in the products, so no copy of it in the order of
the experts is saved.

Quantized weights are frozen. Each is dequantized, all experts in one launch, for the one product
that it is in, and again in the backward. Saved are their codes and scales, pre and the routing; x
is not, since only gradients of weights need it.
"""

from __future__ import annotations

from functools import partial

import torch

from tilewright import platform
from tilewright.ops import _checks, aqn, cases, moe_quack
from tilewright.ops._experts import SWIGLU, check_routing, over_grouped_gemm, projection_noises
from tilewright.ops._moe_cases import CASES
from tilewright.ops._moe_fused import add_bias, load_composed, load_triton, map_size
from tilewright.ops._weights import dequantize
from tilewright.ops.activation import Gate, gate_eager
from tilewright.ops.aqn import AQN
from tilewright.ops.grouped_gemm import grouped_gemm_eager
from tilewright.ops.permute import permute_eager, unpermute_eager
from tilewright.ops.quantize import Quantized
from tilewright.registry import Goal, Implementation, Op, no_kernels, short


@_checks.autocast("products", "x", "gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
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
    """y[t] = sum_k expert_weight[t, k] * (down_proj[e] (silu(gate) * up) + down_bias[e]),
    [gate; up] = gate_up_proj[e] x[t] + gate_up_bias[e], e = expert_index[t, k].

    Products are summed in float32; gate, up, silu(gate) * up and the rows of the down-projection
    are each rounded to x's dtype (products once more where a bias is added after that), the sum
    over k (in its order) is in float32, rounded once. Under torch.autocast x, biases and weights
    that are tensors are cast to its dtype. Differentiable in x, gate_up_proj, down_proj,
    expert_weight and biases, once; the gradient of an expert without tokens is 0. Kept for the
    backward: the arguments (but gate_up_bias), gate and up, and the order of rows (`saved_bytes`);
    with quantized weights their own tensors, not a dequantized one, and not x. Deterministic.

    Args:
        x: [T, H] fp32 | bf16 | fp16 (fp64 with eager), any strides.
        gate_up_proj: [E, 2 I, H], gates before ups, in x's dtype; or quantized (NF4, NVFP4,
            BlockFP8), and then frozen, and read in x's dtype.
        down_proj: [E, H, I], in x's dtype; quantized if gate_up_proj is.
        expert_index: [T, K] int32 or int64, 0 to E - 1; E for a slot whose expert is not here: it
            adds nothing and gets no gradient.
        expert_weight: [T, K], any floating dtype, used in float32.
        gate_up_bias: [E, 2 I], in the order of gate_up_proj's rows, in x's dtype; None for none.
            Not with quantized weights.
        down_bias: [E, H]; everything else as gate_up_bias.
        gate: what stands in the place of silu(gate) * up, and whether gates and ups are interleaved
            (see `Gate`). Only the default with quantized weights.
        noise: of quantized weights, what `dequantize_*` adds: to gate_up_proj noise, to down_proj
            noise of the next layer (noise.layer + 1); the same in forward and backward. None for
            nothing.
        implementation: "auto", or one that `tilewright explain moe_mlp` lists.

    Returns:
        [T, H], contiguous, in x's dtype; of quantized weights, bit for bit what dequantized ones
        give.

    Raises:
        TypeError, ValueError: Arguments that do not fit.
        IndexError: An index outside (on CUDA, where looking would wait for the device, it counts as
            E).
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
    index = _validate(
        x,
        gate_up_proj,
        down_proj,
        expert_index,
        expert_weight,
        noise,
        gate_up_bias,
        down_bias,
        gate,
    )
    weight = expert_weight.to(torch.promote_types(x.dtype, torch.float32))
    return MOE_MLP.pick(implementation, x)(
        x, gate_up_proj, down_proj, index, weight, noise, (gate_up_bias, down_bias), gate
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
    """Bytes that one call of a fused implementation saves for its backward, beside weights and
    biases: x (not if those are quantized), gate and up, the weights of the routing, slots,
    positions and offsets, and of Triton the map of tiles.
    """
    tiles = map_size(T * K, E) if triton else 0
    return (
        itemsize * (0 if quantized else T * H)
        + itemsize * T * K * 2 * I
        + 4 * (3 * T * K + E + tiles)
    )


def _validate(
    x, gate_up_proj, down_proj, expert_index, expert_weight, noise, gate_up_bias, down_bias, gate
):
    weights = {"gate_up_proj": gate_up_proj, "down_proj": down_proj}
    frozen = [name for name, t in weights.items() if isinstance(t, Quantized)]
    if len(frozen) == 1:
        raise TypeError(
            f"gate_up_proj and down_proj must both be tensors or both be quantized, got only "
            f"{frozen[0]} "
            "quantized"
        )
    for name, t in {"x": x, **({} if frozen else weights), "expert_weight": expert_weight}.items():
        _checks.floating(name, t)
    aqn.arguments(noise)
    if noise is not None and not frozen:
        raise ValueError("noise is for quantized weights, got it with tensors")
    if not isinstance(gate, Gate):
        raise TypeError(f"gate must be a Gate, got {type(gate).__name__}")
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    for name, is_set in {
        **{name: t is not None for name, t in biases.items()},
        "gate": gate != SWIGLU,
    }.items():
        if is_set and frozen:
            raise ValueError(f"{name} is for weights that are tensors, got it with quantized ones")
    held = {name: t.tensors()[0] if frozen else t for name, t in weights.items()}
    _checks.same_device(
        x=x, **held, expert_index=expert_index, expert_weight=expert_weight, **biases
    )
    if x.dim() != 2:
        raise ValueError(f"x must have shape [T, H], got {list(x.shape)}")
    if len(gate_up_proj.shape) != 3 or gate_up_proj.shape[1] % 2:
        raise ValueError(
            f"gate_up_proj must have shape [E, 2 I, H], got {list(gate_up_proj.shape)}"
        )
    E, I, H = gate_up_proj.shape[0], gate_up_proj.shape[1] // 2, x.shape[1]
    _checks.shape("gate_up_proj", gate_up_proj, (E, 2 * I, H), "[E, 2 I, H], with x's H")
    _checks.shape("down_proj", down_proj, (E, H, I), "[E, H, I] of gate_up_proj")
    for name, t in weights.items():
        if not frozen and t.dtype != x.dtype:
            raise TypeError(f"{name} must have x's dtype {short(x.dtype)}, got {short(t.dtype)}")
    if I == 0 and down_bias is not None:
        raise ValueError(
            "down_bias needs an inner width I that is not 0, got gate_up_proj of shape "
            f"{list(gate_up_proj.shape)}"
        )
    for (name, t), expected in zip(biases.items(), ((E, 2 * I), (E, H)), strict=True):
        if t is not None:
            _checks.floating(name, t)
            _checks.shape(name, t, expected, "that of its weight without the last dimension")
            if t.dtype != x.dtype:
                raise TypeError(
                    f"{name} must have x's dtype {short(x.dtype)}, got {short(t.dtype)}"
                )
    return check_routing(x, expert_index, expert_weight, E)


# ---- the definition


def moe_mlp_eager(
    x,
    gate_up_proj,
    down_proj,
    expert_index,
    expert_weight,
    noise=None,
    biases=(None, None),
    gate=SWIGLU,
):
    if isinstance(gate_up_proj, Quantized):
        gate_up_proj, down_proj = (
            dequantize(q, dtype=x.dtype, noise=own, implementation="eager")
            for q, own in zip((gate_up_proj, down_proj), projection_noises(noise), strict=True)
        )
    gate_up_bias, down_bias = biases
    rows, offsets, _, position = permute_eager(x, expert_index, gate_up_proj.shape[0])
    pre = add_bias(grouped_gemm_eager(rows, gate_up_proj, offsets), gate_up_bias, offsets)
    down = add_bias(
        grouped_gemm_eager(gate_eager(pre, gate), down_proj, offsets), down_bias, offsets
    )
    return unpermute_eager(down, expert_weight, position)


def _composed(name):
    return load_composed(name).moe_mlp


def _tunables():
    from tilewright.kernels import grouped_gemm_triton, permute_triton

    return (*grouped_gemm_triton.FUSED, *grouped_gemm_triton.TUNABLES, permute_triton.COLLECT)


MOE_MLP = Op(
    "moe_mlp",
    moe_mlp,
    moe_mlp_eager,
    (
        Implementation(
            "triton", lambda: load_triton().moe_mlp, platform.no_triton, tunables=_tunables
        ),
        *(
            over_grouped_gemm(name, partial(_composed, name), tunables=no_kernels)
            for name in ("cpp", "native")
        ),
        over_grouped_gemm(
            "quack", lambda: moe_quack.load().moe_mlp, tunables=no_kernels, does=moe_quack.explain
        ),
    ),
    CASES,
    # The gradient of a weight is <dh, h> in the fused ones and <dy, row> in the twin: one number by
    # two ways, each of which cancels where the other does not. Over 12 seeds and all cases the
    # excess beyond twice the twin's own error reached 5 eps in float32; in 16 bits roundings of the
    # operands are larger than that.
    atol={torch.float32: 8 * torch.finfo(torch.float32).eps},
    goals=(
        *(
            Goal(
                cases.DATACENTER,
                which,
                "matmul_percent",
                at_least=least,
                cases=("qwen3-30b-a3b_32768",),
                dtypes=("bfloat16",),
            )
            for which, least in (("forward", 63), ("backward", 53))
        ),
        *(
            Goal(
                cases.DATACENTER,
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
