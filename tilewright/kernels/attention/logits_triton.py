"""What attention's kernels have in common: their constants, where a tile lies, which keys its rows
see, and its logits in base 2.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tilewright.kernels.launchers import next_power_of_2
from tilewright.kernels.math_triton import reciprocal

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


# Types of a tensor's strides from one batch, head and row to the next.
STRIDES = ("i32",) * 3


class Fixed(NamedTuple):
    """What is constant in a launch.

    GROUP: query heads of a key head.
    D, WIDTH, REST, DV, WIDTH_V: as `widths` gives them.
    PACKED: whether there are documents.
    FIRST_HEAD: the number of q's first head, for dropout; as an argument it would make kernels
        without dropout spill.
    SINKS: in forward.
    PRECISION: `input_precision` of products.
    """

    GROUP: int
    D: int
    WIDTH: int
    REST: int
    DV: int
    WIDTH_V: int
    PACKED: bool = False
    CAUSAL: bool = True
    WINDOW: bool = False
    SOFTCAP: bool = False
    DROPOUT: bool = False
    FIRST_HEAD: int = 0
    SINKS: bool = False
    PRECISION: str | None = None

    @property
    def width(self) -> int:
        """The width by which launch configurations are chosen."""
        return max(self.WIDTH + self.REST, self.WIDTH_V)


def widths(D: int, DV: int) -> tuple[int, int, int, int, int]:
    """D, WIDTH, REST, DV and WIDTH_V: keys have D columns, in parts of WIDTH and REST, and values
    DV in one of WIDTH_V. Parts are powers of 2, as Triton's blocks are.
    """
    width, values = (next_power_of_2(max(16, n)) for n in (D, DV))
    # Latent attention's 192 and 128. With values as wide as keys 256 and no rest: the sums of both
    # would not leave registers for a second part.
    if 128 < D <= 192 and values <= 128:
        return D, 128, 64, DV, values
    return D, width, 0, DV, values


@triton.jit
def place(tiles_ptr, cu_ptr, capacity, S, Sk, t, tiled, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Locates tile t of a tensor of `tiled` rows: whether it exists, its batch, its first row in
    its document, the document's start, and its numbers of queries and keys.
    """
    if PACKED:
        there = t < tl.load(tiles_ptr + 3 * capacity)
        document = tl.load(tiles_ptr + t, mask=there, other=0)
        row = tl.load(tiles_ptr + capacity + t, mask=there, other=0)
        end = tl.load(tiles_ptr + 2 * capacity + t, mask=there, other=0)
        # cu_seqlens is not checked on a GPU; the map treats rows past its end as a document of
        # their own.
        begin = tl.minimum(tl.maximum(tl.load(cu_ptr + document).to(tl.int32), 0), row)
        batch = t * 0
        first = row - begin
        queries = end - begin
        keys = queries
    else:
        batch = t // tl.cdiv(tiled, BLOCK)
        there = t >= 0
        begin = t * 0
        first = (t - batch * tl.cdiv(tiled, BLOCK)) * BLOCK
        queries = S + begin
        keys = Sk + begin
    return there, batch, first, begin, queries, keys


@triton.jit
def tanh(x):
    """tanh through exp2, whose overflow is an infinity that gives 1."""
    e = tl.exp2(tl.abs(x) * 2.8853900817779268)
    y = 1.0 - 2.0 * reciprocal(e + 1.0)
    z = x * x  # the series where that cancels
    small = x * (
        1.0 + z * (-0.3333333333333333 + z * (0.13333333333333333 - z * 0.05396825396825397))
    )
    return tl.where(z < 0.04, small, tl.where(x < 0, -y, y))


@triton.jit
def logits(s, scale, cap, SOFTCAP: tl.constexpr):
    """Logits times log2(e) from products s, and the derivative of the softcap (s itself without
    one).
    """
    if SOFTCAP:
        y = tanh(s * (scale / cap))
        return y * (cap * LOG2E), 1.0 - y * y
    return s * (scale * LOG2E), s


@triton.jit
def seen(rows, columns, keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which columns each row sees, by position."""
    mask = (columns < keys) & (rows == rows)
    if CAUSAL:
        mask = mask & (columns <= rows)
    if WINDOW:
        mask = mask & (rows - columns < window)
    return mask


@triton.jit
def blocks_of_keys(
    first, last, keys, window, STEP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """Blocks of STEP keys for queries at positions `first` to `last`: the start of the first, the
    start and end of those that need no mask, and the end.
    """
    low = first * 0
    free = low
    high = keys
    full = keys // STEP * STEP
    if CAUSAL:
        high = tl.maximum(tl.minimum(keys, last + 1), 0)
        full = tl.minimum(full, tl.maximum(first + 1, 0) // STEP * STEP)
    if WINDOW:
        low = tl.minimum(tl.maximum(0, first - window + 1) // STEP * STEP, high)
        free = (tl.maximum(0, last - window + 1) + STEP - 1) // STEP * STEP
    full = tl.maximum(full, low)
    free = tl.minimum(tl.maximum(free, low), full)
    return low, free, full, high


@triton.jit
def rows_of(
    first,
    last,
    queries,
    offset,
    window,
    STEP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The range of query rows that see keys at positions `first` to `last`."""
    low = first * 0
    high = queries
    if CAUSAL:
        low = tl.minimum(tl.maximum(first - offset, 0) // STEP * STEP, queries)
    if WINDOW:
        high = tl.maximum(tl.minimum(queries, last - offset + window), low)
    return low, high


@triton.jit
def power_of(lse):
    """The shift of logits in base 2. Rows without keys, and rows that do not exist, get
    probabilities of 0.
    """
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
