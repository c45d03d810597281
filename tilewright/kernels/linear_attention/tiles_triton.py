"""Tiles of rows of [B, S, ..] tensors, none of which has rows of two sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.kernels.launchers import cdiv
from tilewright.kernels.moe.grouped_gemm_triton import tile_map


class Tiles(NamedTuple):
    """map, cu_seqlens: the map and bounds of packed documents; None without.   capacity: the map's
    capacity.   count: how many tiles may exist.
    """

    map: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    capacity: int
    count: int


def tiles_of(B: int, S: int, cu_seqlens: torch.Tensor | None, block: int) -> Tiles:
    """Found on the device: no launch waits for cu_seqlens."""
    if cu_seqlens is None:
        return Tiles(None, None, 0, B * cdiv(S, block))
    tiles = tile_map(cu_seqlens[1:].to(torch.int32), S, block)
    capacity = tiles.shape[0] // 3
    return Tiles(tiles, cu_seqlens, capacity, capacity)


@triton.jit
def number_of_tiles(map_ptr, capacity, count, PACKED: tl.constexpr):
    """How many tiles there are."""
    if PACKED:
        count = tl.load(map_ptr + 3 * capacity)
    return count


@triton.jit
def place(map_ptr, cu_ptr, capacity, S, t, there, BLOCK, PACKED: tl.constexpr):
    """Locates tile t, if it is there: its first row, and the start and the end of its sequence, as
    rows of [B * S, ..].
    """
    if PACKED:
        document = tl.load(map_ptr + t, mask=there, other=0)
        row = tl.load(map_ptr + capacity + t, mask=there, other=0)
        end = tl.load(map_ptr + 2 * capacity + t, mask=there, other=0)
        # cu_seqlens is not checked on a GPU; the map treats rows past its end as a document of
        # their own.
        begin = tl.minimum(tl.maximum(tl.load(cu_ptr + document).to(tl.int32), 0), row)
    else:
        each = tl.cdiv(S, BLOCK)
        batch = t // each
        begin = batch * S
        row = begin + (t - batch * each) * BLOCK
        end = begin + S
    return row.to(tl.int64), begin.to(tl.int64), end.to(tl.int64)
