"""The operators of attention: what every implementation's launchers take and return.

B = batch, Hq / Hk = query / key heads, S / Sk = query / key positions, D / Dv = the width of a
query's or key's / a value's head. q is [B, Hq, S, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv], out and
dout [B, Hq, S, Dv], sinks [Hq]. cu_seqlens are the bounds of packed documents, int64 [n + 1], with
B = 1. Triton's launchers take what `map_documents` makes of these bounds instead, so that a call's
forward and backward share a map of tiles. offset is the position of the first query minus the
position of the first key.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewright.core.library import declare
from tilewright.kernels.moe.operators import map_size


class Dropout(NamedTuple):
    """Dropout of probabilities, by counters (see `ops.attention`).

    threshold: a probability whose 32 random bits are below it is dropped; 0 (none) to 2^32.
    inverse: what the others are multiplied by.
    seed: the generator's key.   draw: the number of the call, in the counter.
    first_head: the number of q's first head, in the counter.
    """

    threshold: int = 0
    inverse: float = 1.0
    seed: int = 0
    draw: int = 0
    first_head: int = 0


class Variant(NamedTuple):
    """The variant of attention to compute. window: 0 for none.   softcap: 0.0 for none."""

    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    scale: float = 1.0
    dropout: Dropout = Dropout()


class Attended(NamedTuple):
    """out: [B, Hq, S, Dv].   lse: [B, Hq, S] float32, the natural log-sum-exp of a row's logits."""

    out: torch.Tensor
    lse: torch.Tensor


class Gradients(NamedTuple):
    """Gradients of q, k and v, and of sinks if there are any, in float32."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsinks: torch.Tensor | None


@declare
def map_documents(cu_seqlens: torch.Tensor, rows: int, block: int) -> torch.Tensor:
    """int64 [.., n + 1]: the bounds of documents first, then, as int32 and at a multiple of 16
    bytes, the map of their tiles of `block` rows (`grouped_gemm_triton.write_tiles`).
    """
    bounds = cu_seqlens.shape[0]
    longs = map_size(rows, bounds - 1, block) // 2 + 2
    return cu_seqlens.new_empty((1 + (longs + bounds - 1) // bounds, bounds))


@declare
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    variant: Variant,
    offset: int,
) -> Attended:
    return Attended(_rows_like(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32))


@declare
def attend_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    variant: Variant,
    offset: int,
) -> Gradients:
    dsinks = None if sinks is None else lse.new_empty(q.shape[1], dtype=torch.float32)
    return Gradients(_rows_like(q), _rows_like(k), _rows_like(v), dsinks)


def _rows_like(t: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """[B, H, S, D], in memory [B, S, H, D], the layout that a projection reads.   width: D, unless
    it is t's.
    """
    B, H, S, D = t.shape
    return t.new_empty(B, S, H, D if width is None else width).transpose(1, 2)
