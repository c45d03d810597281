"""The operators of rotary embedding and QK norm: what every implementation's launchers take and
return.

B = batch, H = heads (Hq of queries, Hk of keys and values), S = sequence, D = head width, R =
rotated features, P = table rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewright.core.layout import empty_dense_like, last_contiguous
from tilewright.core.library import declare


class Rotation(NamedTuple):
    """The angles per token.

    cos, sin: [P, R / 2], without gradients.
    positions: the table row per token, int64 [B, S]; None if token s of a sequence uses row s.
    interleaved: pairs are neighbors.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor | None = None
    interleaved: bool = False

    def for_kernels(self) -> Rotation:
        """The rotation with contiguous float32 tables."""
        cos, sin, positions, interleaved = self
        if cos.dtype is torch.float32 is sin.dtype and cos.is_contiguous() and sin.is_contiguous():
            return self
        return Rotation(cos.float().contiguous(), sin.float().contiguous(), positions, interleaved)

    def inverse(self) -> Rotation:
        return Rotation(self.cos, -self.sin, self.positions, self.interleaved)


class Rotated(NamedTuple):
    """q: [B, Hq, S, D].   k: [B, Hk, S, D], or None. With the strides of what was rotated."""

    q: torch.Tensor
    k: torch.Tensor | None


@declare
def rotate(q: torch.Tensor, k: torch.Tensor | None, rotation: Rotation, inverse: bool) -> Rotated:
    """inverse: by the opposite angles."""
    k_out = None if k is None else empty_dense_like(last_contiguous(k))
    return Rotated(empty_dense_like(last_contiguous(q)), k_out)


# ---- QK norm and rotation


class Heads(NamedTuple):
    """The numbers of heads in qkv [B, S, (Hq + 2 Hk) D], where a token's heads are adjacent: those
    of q, k and v.
    """

    q: int
    kv: int


class HeadNorm(NamedTuple):
    """The RMSNorm of each head, with weights [D]; None weights mean no norm."""

    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0


class Prepared(NamedTuple):
    """q, k: [B, H, S, D], in memory [B, S, H, D].   rstd: [B, S, Hq + Hk] float32, 1 / rms of each
    head; None without a norm.
    """

    q: torch.Tensor
    k: torch.Tensor
    rstd: torch.Tensor | None


class Gradients(NamedTuple):
    """Gradients of qkv, v's part included, and of the weights if there is a norm."""

    dqkv: torch.Tensor
    dq_weight: torch.Tensor | None
    dk_weight: torch.Tensor | None


@declare
def prepare(qkv: torch.Tensor, heads: Heads, norm: HeadNorm, rotation: Rotation) -> Prepared:
    """qkv: its last dimension is contiguous."""
    B, S, W = qkv.shape
    D = W // (heads.q + 2 * heads.kv)
    q, k = (qkv.new_empty(B, S, h, D).transpose(1, 2) for h in heads)
    if norm.q_weight is None:
        return Prepared(q, k, None)
    return Prepared(q, k, qkv.new_empty((B, S, heads.q + heads.kv), dtype=torch.float32))


@declare
def prepare_backward(
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    qkv: torch.Tensor | None,
    rstd: torch.Tensor | None,
    heads: Heads,
    norm: HeadNorm,
    rotation: Rotation,
) -> Gradients:
    """dq, dk, dv: [B, H, S, D]; one that is None is zero.   qkv, rstd: None without a norm."""
    d = next(d for d in (dq, dk, dv) if d is not None)
    B, _, S, D = d.shape
    weights = norm.q_weight, norm.k_weight
    return Gradients(
        d.new_empty(B, S, (heads.q + 2 * heads.kv) * D),
        *(None if w is None else torch.empty_like(w) for w in weights),
    )


def by_head(qkv: torch.Tensor, heads: Heads) -> torch.Tensor:
    """[B, S, Hq + 2 Hk, D]."""
    (B, S, W), total = qkv.shape, heads.q + 2 * heads.kv
    return qkv.view(B, S, total, W // total)


def slices(qkv: torch.Tensor, heads: Heads) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k as views of qkv, [B, H, S, D]. Autograd allows in-place writes to them, and pads
    each one's gradient.
    """
    whole = by_head(qkv, heads)
    q, k = whole.narrow(2, 0, heads.q), whole.narrow(2, heads.q, heads.kv)
    return q.transpose(1, 2), k.transpose(1, 2)


def values(qkv: torch.Tensor, heads: Heads) -> torch.Tensor:
    """v as a view of qkv, [B, Hk, S, D]."""
    return by_head(qkv, heads).narrow(2, heads.q + heads.kv, heads.kv).transpose(1, 2)
