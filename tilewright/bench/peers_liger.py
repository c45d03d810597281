"""Liger-Kernel's ops, called with the arguments of tilewright's."""

from __future__ import annotations

import torch

from tilewright.bench.peer import PLAIN_LOSS, Unsupported, dense, only


def _vector(weight):
    if weight.dim() != 1:
        raise Unsupported("liger-kernel takes one weight row, not one a head")


def rmsnorm(x, weight, eps=1e-6, *, bias=None, offset=0.0, cast="llama", noise=None):
    from liger_kernel.ops import LigerRMSNormFunction

    _vector(weight)
    only("liger-kernel", {"bias": bias, "noise": noise}, bias=None, noise=None)
    # Not in place: that would overwrite the upstream gradient, which all providers share.
    return LigerRMSNormFunction.apply(x, weight, eps, offset, cast, False)


def add_rmsnorm(x, residual, weight, eps=1e-6, *, bias=None, offset=0.0, cast="llama", noise=None):
    from liger_kernel.ops import LigerFusedAddRMSNormFunction

    _vector(weight)
    only("liger-kernel", {"bias": bias, "noise": noise}, bias=None, noise=None)
    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, offset, cast, False)


def silu_mul(gate, up=None):
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction

    if up is not None:
        return LigerSiLUMulFunction.apply(gate, up)
    # It takes two dimensions.
    rows = LigerFusedGateUpSiLUMulFunction.apply(gate.reshape(-1, gate.shape[-1]))
    return rows.reshape(*gate.shape[:-1], -1)


def gelu_mul(gate, up=None, *, approximate="tanh"):
    from liger_kernel.ops import LigerGELUMulFunction

    only("liger-kernel", {"approximate": approximate}, approximate="tanh")
    return LigerGELUMulFunction.apply(*(gate.chunk(2, -1) if up is None else (gate, up)))


def cross_entropy(
    logits,
    target,
    *,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    class_weight=None,
    reduction="mean",
    inplace=False,
    **more,
):
    from liger_kernel.transformers.functional import liger_cross_entropy

    only("liger-kernel", more, **PLAIN_LOSS)
    loss = liger_cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        weight=class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        lse_square_scale=z_loss,
        label_smoothing=label_smoothing,
        softcap=softcap,
    )
    # It returns the loss in the logits' dtype; the op's contract is float32.
    return (loss.reshape(target.shape) if reduction == "none" else loss).float()


# Wide: the options of the op that it is compared with.
def linear_cross_entropy(
    x,
    weight,
    target,
    *,
    bias=None,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    class_weight=None,
    reduction="mean",
    accumulate="fp32",
    chunk_size=None,
    **more,
):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    only("liger-kernel", more, **PLAIN_LOSS)
    loss = liger_fused_linear_cross_entropy(
        x.reshape(-1, x.shape[-1]),
        weight,
        target.reshape(-1),
        bias=bias,
        ce_weight=class_weight,
        ignore_index=ignore_index,
        lse_square_scale=z_loss,
        label_smoothing=label_smoothing,
        reduction=reduction,
        softcap=softcap,
        accum_dtype=torch.float32 if accumulate == "fp32" else None,
    )
    return (loss.reshape(target.shape) if reduction == "none" else loss).float()


def rope(q, k, cos, sin, *, rotary_dim=None, inplace=False, **more):
    from liger_kernel.ops import LigerRopeFunction

    only("liger-kernel", more, interleaved=False, position_ids=None, cu_seqlens=None)
    if k is None:
        raise Unsupported("liger-kernel rotates q and k together, not q alone")
    if cos.dim() == 2:
        cos, sin = cos[: q.shape[2]], sin[: q.shape[2]]
    R = q.shape[-1] if rotary_dim is None else rotary_dim
    return LigerRopeFunction.apply(q, k, cos, sin, None, 1, R)


def moe_mlp(x, gate_up_proj, down_proj, expert_index, expert_weight, **more):
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    dense("liger-kernel", gate_up_proj, more)
    return LigerFusedMoEFunction.apply(
        x, gate_up_proj, down_proj, expert_index.int(), expert_weight
    )
