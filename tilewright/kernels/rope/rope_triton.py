"""Rotary position embedding in Triton. The definition is tilewright/ops/rope/rope.py.

A program rotates one token: all heads of q, then all heads of k, so that the table row is read
once. Inputs are [B, H, S, D] with any strides but a contiguous last dimension; the output may be
the input.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.core.layout import last_contiguous
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import next_power_of_2
from tilewright.kernels.rope.operators import Rotated, Rotation, rotate
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import Tunable


class Fixed(NamedTuple):
    """What is constant in a launch.

    HQ, HK: heads of q and k.   D: a head's features.   HALF: its rotated pairs.
    BLOCK_R, BLOCK_D: the pairs, and the unrotated features, that a tile covers.
    INTERLEAVED: pairs are neighbors.   INVERSE: by the opposite angles.
    HAS_POS: whether positions are given.   COPY: whether unrotated features are copied.
    """

    HQ: int
    HK: int
    D: int
    HALF: int
    BLOCK_R: int
    BLOCK_D: int
    INTERLEAVED: bool
    INVERSE: bool
    HAS_POS: bool
    COPY: bool


@triton.jit
def _heads(
    x_ptr,
    y_ptr,
    x_strides,
    y_strides,
    batch,
    token,
    angle,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Rotates all H heads of a token of a batch by the angle with this cos and sin."""
    cos, sin = angle
    HALF: tl.constexpr = FIXED.HALF
    BLOCK_R: tl.constexpr = FIXED.BLOCK_R
    x_ptr += batch * x_strides[0] + token * x_strides[2]
    y_ptr += batch * y_strides[0] + token * y_strides[2]
    i = tl.arange(0, BLOCK_R)
    for first in range(0, H, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        x = x_ptr + (h.to(tl.int64) * x_strides[1])[:, None]
        y = y_ptr + (h.to(tl.int64) * y_strides[1])[:, None]
        mask = (h < H)[:, None] & (i < HALF)[None, :]
        if FIXED.INTERLEAVED:  # one contiguous read, split in registers
            both = tl.arange(0, 2 * BLOCK_R)
            wide = (h < H)[:, None] & (both < 2 * HALF)[None, :]
            pair = tl.load(x + both[None, :], mask=wide, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(pair, (BLOCK_H, BLOCK_R, 2)))
            out = tl.join(a * cos[None, :] - b * sin[None, :], b * cos[None, :] + a * sin[None, :])
            tl.store(
                y + both[None, :],
                tl.reshape(out, (BLOCK_H, 2 * BLOCK_R)).to(y_ptr.dtype.element_ty),
                mask=wide,
            )
        else:
            a = tl.load(x + i[None, :], mask=mask, other=0.0).to(tl.float32)
            b = tl.load(x + (HALF + i)[None, :], mask=mask, other=0.0).to(tl.float32)
            tl.store(
                y + i[None, :],
                (a * cos[None, :] - b * sin[None, :]).to(y_ptr.dtype.element_ty),
                mask=mask,
            )
            tl.store(
                y + (HALF + i)[None, :],
                (b * cos[None, :] + a * sin[None, :]).to(y_ptr.dtype.element_ty),
                mask=mask,
            )
        if FIXED.COPY:  # the unrotated features
            d = 2 * HALF + tl.arange(0, FIXED.BLOCK_D)
            rest = (h < H)[:, None] & (d < FIXED.D)[None, :]
            tl.store(y + d[None, :], tl.load(x + d[None, :], mask=rest), mask=rest)


@triton.jit(do_not_specialize=["S", "P"])
def _rotate(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    pos_ptr,
    S,
    P,
    q_strides,
    k_strides,
    q_out_strides,
    k_out_strides,
    FIXED: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Strides are from one batch, head and token to the next."""
    HALF: tl.constexpr = FIXED.HALF
    BLOCK_R: tl.constexpr = FIXED.BLOCK_R
    t = tl.program_id(0).to(tl.int64)
    b = t // S
    s = t % S
    p = s
    if FIXED.HAS_POS:
        p = tl.load(pos_ptr + t)
    i = tl.arange(0, BLOCK_R)
    row = p + tl.zeros([BLOCK_R], tl.int64)
    # An id outside the tables reads nothing and rotates to NaN.
    inside = (i < HALF) & (row >= 0) & (row < P)
    at = row * HALF + i
    cos = tl.load(cos_ptr + at, mask=inside, other=float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=inside, other=float("nan")).to(tl.float32)
    if FIXED.INVERSE:
        sin = -sin
    angle = cos, sin
    _heads(q_ptr, q_out_ptr, q_strides, q_out_strides, b, s, angle, FIXED.HQ, BLOCK_H, FIXED)
    if FIXED.HK > 0:
        _heads(k_ptr, k_out_ptr, k_strides, k_out_strides, b, s, angle, FIXED.HK, BLOCK_H, FIXED)


def _heuristic(half: int, itemsize: int, HQ: int, HK: int) -> dict:
    """8 pairs per thread, a 128-bit load of 16-bit elements. For 64 features of 192, with which
    four warps spill, half as many threads.
    """
    warps = 4 if half > 32 else 2
    return {"BLOCK_H": max(1, 256 * warps // next_power_of_2(half)), "num_warps": warps}


def _space(half: int, itemsize: int, HQ: int, HK: int) -> list[dict]:
    """One or two 128-bit loads of each half per thread. Fewer than one pair would break in-place
    use: two threads would load an element that one of them overwrites. (With 64 features of 192, 16
    pairs per thread spill, and so do 8 on four warps.)
    """
    block_r, most = next_power_of_2(half), 16 if half > 32 else 8
    return [
        {"BLOCK_H": block_h, "num_warps": warps}
        for block_h in (4, 8, 16, 32)
        for warps in (1, 2, 4, 8)
        if block_h < 2 * max(HQ, HK)
        and 16 // itemsize <= block_h * block_r // (32 * warps) <= most
        and (half > 32 or (block_h * block_r, warps) != (1024, 4))
    ]


def _blocks(half: int, D: int) -> tuple[int, int]:
    """BLOCK_R and BLOCK_D."""
    rest = D - 2 * half
    return next_power_of_2(half), next_power_of_2(rest) if rest else 1


def _write(
    q: torch.Tensor, k: torch.Tensor | None, to: Rotated, rotation: Rotation, inverse: bool
) -> None:
    B, HQ, S, D = q.shape
    cos, sin, positions, interleaved = rotation
    half = cos.shape[1]
    if B * S == 0:
        return
    HK = 0 if k is None else k.shape[1]
    kk, k_out = (q, to.q) if k is None or to.k is None else (k, to.k)
    copied = 2 * half < D and q.data_ptr() != to.q.data_ptr()
    options = interleaved, inverse, positions is not None, copied
    fixed = Fixed(HQ, HK, D, half, *_blocks(half, D), *options)
    tensors = q, kk, to.q, k_out
    strides = [t.stride()[:3] for t in tensors]
    given = *tensors, cos, sin, positions, S, cos.shape[0], *strides
    config = ROTATE.config(q.device, half, q.element_size(), HQ, HK)
    launch(_rotate, (B * S,), *given, FIXED=fixed, **config)


def forward(q, k, rotation, inverse):
    q, k = last_contiguous(q), last_contiguous(k)
    rotated = rotate(q, k, rotation, inverse)
    _write(q, k, rotated, rotation, inverse)
    return rotated


def overwrite(q: torch.Tensor, k: torch.Tensor | None, rotation: Rotation) -> None:
    _write(q, k, Rotated(q, k), rotation, False)


def _specs(key: dict, config: dict) -> list[KernelSpec]:
    """Rotation of a whole head, by halves and interleaved; and of 64 features of 192."""
    half, data = key["half"], "bf16" if key["itemsize"] == 2 else "fp32"
    tensors, specs = ("q", "k", "q_out", "k_out"), []
    strides = dict.fromkeys((f"{t}_strides" for t in tensors), ("i32",) * 3)
    for d, interleaved in ((2 * half, False), (2 * half, True)) if half != 32 else ((192, True),):
        rest = d - 2 * half
        sizes = key["HQ"], key["HK"], d, half, *_blocks(half, d)
        label = f"{'interleaved' if interleaved else 'half-split'} D={d}{f' R={2 * half}' if rest else ''}"
        specs.append(
            KernelSpec.of(
                _rotate,
                f"rotate {label} {data}",
                {"cos": "fp32", "sin": "fp32", "pos": "i64", "*": data},
                {"FIXED": Fixed(*sizes, interleaved, False, True, rest > 0), **config},
                strides,
                divisible=tuple(strides),
                elements=config["BLOCK_H"] * d,
            )
        )
    return specs


ROTATE = Tunable(
    "rope",
    "rotate",
    ("half", "itemsize", "HQ", "HK"),
    "forward",
    _heuristic,
    _space,
    [(64, 2, 32, 8), (128, 2, 8, 4), (32, 2, 128, 128), (64, 4, 32, 8)],
    _specs,
)
TUNABLES = (ROTATE,)
