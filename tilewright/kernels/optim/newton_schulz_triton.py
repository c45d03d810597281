"""Newton-Schulz iterations in Triton. The definition is tilewright/ops/optim/newton_schulz.py.

`_symmetric` computes the tiles on and below the diagonal of a product that is symmetric, and stores
each of them twice, once transposed. The other product, of the M x M update and the M x N iterate,
is PyTorch's. Factors in x's dtype, float32 accumulation.

x is read twice and its normalized iterate written once: `_norms` writes each program's part of the
norm of a matrix, and `_normalize` adds the parts, in order, and divides. Squares are those of x
over a power of two, which is exact, so that none leaves float32's range. One kernel would keep a
matrix on chip while its programs wait for each other. This would save the second read. For one
matrix of up to half of L2 (4,096 x 2,048 in bfloat16, 17 MB) that read is from L2; for 128 experts
of 768 x 2,048 it is 403 MB, 0.1 ms beside 2.6 TFLOP of products, more than 3 ms.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from tilewright.kernels.device import dot_precision, hopper, multiprocessors
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv, next_power_of_2
from tilewright.kernels.math_triton import largest_magnitude
from tilewright.kernels.optim.newton_schulz import iterate
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import ALONE, Others, Tunable, choose

TILE = 64  # rows and columns: with four warps, four 128-bit loads of bf16 per thread
PARTS = 256  # programs per matrix at most: every tile of `_normalize` reads their 2 KiB


@triton.jit
def _tile(x_ptr, tile, b, R, C, x_batch, x_row, TILE: tl.constexpr):
    """A tile of matrix b in float32, its rows and columns, and which of its elements exist."""
    across = tl.cdiv(C, TILE)
    r = tile // across * TILE + tl.arange(0, TILE)
    c = tile % across * TILE + tl.arange(0, TILE)
    mask = (r < R)[:, None] & (c < C)[None, :]
    at = x_ptr + b * x_batch + r.to(tl.int64)[:, None] * x_row + c[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32), r, c, mask


@triton.jit(do_not_specialize=["parts"])
def _norms(x_ptr, part_ptr, R, C, x_batch, x_row, parts, TILE: tl.constexpr):
    """part [B, 2, parts]: a power of two s next to a program's largest |x|, and its sum of
    (x / s)^2.
    """
    b = (tl.program_id(0) // parts).to(tl.int64)
    p = tl.program_id(0) % parts
    scale = tl.full([], 2.0**-126, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for tile in range(p, tl.cdiv(R, TILE) * tl.cdiv(C, TILE), parts):
        x, _, _, _ = _tile(x_ptr, tile, b, R, C, x_batch, x_row, TILE)
        # A NaN or an infinity makes the sum NaN, whatever the scale.
        most = tl.maximum(scale, largest_magnitude(tl.reshape(x, (TILE * TILE,)), 0))
        exponent = tl.minimum(most.to(tl.int32, bitcast=True) >> 23, 253)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        x *= inverse
        shrink = scale * inverse
        total = total * shrink * shrink + tl.sum(tl.reshape(x * x, (TILE * TILE,)), axis=0)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    at = part_ptr + b * 2 * parts + p
    tl.store(at, scale)
    tl.store(at + parts, total)


@triton.jit(do_not_specialize=["parts"])
def _normalize(
    x_ptr,
    part_ptr,
    w_ptr,
    R,
    C,
    x_batch,
    x_row,
    eps,
    parts,
    TALL: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """w [B, R, C], or [B, C, R] if TALL, is x / max(|x|, eps)."""
    tiles = tl.cdiv(R, TILE) * tl.cdiv(C, TILE)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    x, r, c, mask = _tile(x_ptr, tl.program_id(0) % tiles, b, R, C, x_batch, x_row, TILE)
    i = tl.arange(0, PARTS)
    at = part_ptr + b * 2 * parts + i
    scales = tl.load(at, mask=i < parts, other=0.0)
    sums = tl.load(at + parts, mask=i < parts, other=0.0)
    inverse = 1.0 / tl.max(scales, axis=0)
    shrink = scales * inverse
    norm = tl.sqrt(tl.sum(sums * shrink * shrink, axis=0))
    norm = tl.where(norm < eps * inverse, eps * inverse, norm)  # written so that NaN propagates
    y = (x * inverse * (1.0 / norm)).to(w_ptr.dtype.element_ty)
    w = w_ptr + b * R * C
    if TALL:
        to = w + c.to(tl.int64)[:, None] * R + r[None, :]
        tl.store(to, tl.trans(y), mask=tl.trans(mask))
    else:
        tl.store(w + r.to(tl.int64)[:, None] * C + c[None, :], y, mask=mask)


def _start(x, tall, eps):
    x = x if x.stride(2) == 1 else x.contiguous()
    B, R, C = x.shape
    tiles = cdiv(R, TILE) * cdiv(C, TILE)
    parts = min(tiles, PARTS)
    part = torch.empty((B, 2, parts), dtype=torch.float32, device=x.device)
    w = torch.empty((B, C, R) if tall else (B, R, C), dtype=x.dtype, device=x.device)
    sizes = R, C, x.stride(0), x.stride(1)
    launch(_norms, (B * parts,), x, part, *sizes, parts, TILE=TILE, num_warps=4)
    launch(
        _normalize,
        (B * tiles,),
        x,
        part,
        w,
        *sizes,
        eps,
        parts,
        TALL=tall,
        PARTS=next_power_of_2(parts),
        TILE=TILE,
        num_warps=4,
    )
    return w


@triton.jit
def _symmetric(
    left_ptr,
    right_ptr,
    addend_ptr,
    out_ptr,
    M,
    K,
    alpha,
    beta,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [B, M, M] = alpha left right^T + beta addend, with left and right [B, M, K]."""
    # Program p computes tile (i, j) with p = i (i + 1) / 2 + j and j <= i. The root is exact up to
    # 2^21 tiles.
    p = tl.program_id(0)
    i = ((tl.sqrt((8 * p + 1).to(tl.float32)) - 1) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > p, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= p, i + 1, i)
    j = p - i * (i + 1) // 2
    batch = tl.program_id(1).to(tl.int64)
    m, n = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    ks = tl.arange(0, BLOCK_K)
    left_at = left_ptr + batch * M * K + m.to(tl.int64)[:, None] * K + ks[None, :]
    right_at = right_ptr + batch * M * K + n.to(tl.int64)[:, None] * K + ks[None, :]
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = (k + ks < K)[None, :]
        a = tl.load(left_at + k, mask=(m < M)[:, None] & inside, other=0.0)
        b = tl.load(right_at + k, mask=(n < M)[:, None] & inside, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    acc = acc * alpha
    both = (m < M)[:, None] & (n < M)[None, :]
    at = batch * M * M + m.to(tl.int64)[:, None] * M + n[None, :]
    if ADD:
        acc += beta * tl.load(addend_ptr + at, mask=both, other=0.0).to(tl.float32)
    result = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, result, mask=both)
    if i != j:
        across = batch * M * M + n.to(tl.int64)[:, None] * M + m[None, :]
        tl.store(out_ptr + across, tl.trans(result), mask=tl.trans(both))


MOST = 65_535  # programs along the second axis of a grid, of which there is one per matrix


def _as_if(B: int, M: int, device: torch.device) -> int:
    """The M by which a product's launch is configured. Small tiles are for devices that large ones
    do not fill, and read twice as much from L2, which limits them: matrices of 768 reached 39 % of
    a large product on an H100, those of 4,096 73 %. A batch of small matrices fills a device, too.
    """
    n = cdiv(M, 128)
    return max(M, LARGE) if B * n * (n + 1) // 2 >= 2 * multiprocessors(device) else M


def _product(others, left, right, alpha, addend, beta):
    B, M, K = left.shape
    out = torch.empty((B, M, M), dtype=left.dtype, device=left.device)
    key = _as_if(B, M, left.device), left.element_size(), hopper(left.device)
    config, run = choose(SYMMETRIC, others, left.device, key, left)
    if run is not None:
        run(left.contiguous(), right.contiguous(), alpha, addend, beta, out, config)
        return out
    config = {n: v for n, v in config.items() if v is not None}
    tiles = cdiv(M, config["BLOCK"])
    for first in range(0, B, MOST):
        part = slice(first, first + MOST)
        launch(
            _symmetric,
            (tiles * (tiles + 1) // 2, min(B - first, MOST)),
            left[part],
            right[part],
            None if addend is None else addend[part],
            out[part],
            M,
            K,
            alpha,
            beta,
            ADD=addend is not None,
            PRECISION=dot_precision(left),
            **config,
        )
    return out


def _general(left, right, beta):
    return torch.baddbmm(right, left, right, beta=beta) if beta else torch.bmm(left, right)


def newton_schulz(x, coefficients, eps, others: Others = ALONE):
    """x: [..., M, N], any strides.   coefficients: a, b, c of each step."""
    product = functools.partial(_product, others)
    return iterate(x, coefficients, eps, product, _general, _start)


_NAMES = ("BLOCK", "BLOCK_K", "num_warps", "num_stages", "maxnreg")
LARGE = 1024  # rows from which on tiles are of 128 x 128: see `_as_if`
LIMIT = 128  # registers per thread with which an SM holds two blocks of eight warps


def _heuristic(M: int, itemsize: int, hopper: bool) -> dict:
    """float32 has no tensor cores; its tiles would spill if larger. Tiles of
    128 x 128: on Hopper two blocks per SM, one of which multiplies while the other fills or writes.
    Without a limit, an addend takes 138 registers there; on Blackwell, where it takes 202, it
    spills with that limit.
    """
    if itemsize == 4:
        chosen = (64, 32, 8, 2, None)
    elif M >= LARGE:
        chosen = (128, 64, 8, 3, LIMIT if hopper else None)
    else:  # enough tiles for all SMs
        chosen = (64, 64, 4, 3, None)
    return dict(zip(_NAMES, chosen, strict=True))


def _space(M: int, itemsize: int, hopper: bool) -> list[dict]:
    if itemsize == 4:
        configs = [(64, 32, 4, 2, None), (64, 16, 8, 2, None)]
    else:
        limits = (None, LIMIT) if hopper else (None,)
        configs = [
            *((128, 32, 8, stages, limit) for stages in (3, 4) for limit in limits),
            (128, 64, 8, 3, None),
            (64, 64, 4, 4, None),
            (64, 32, 4, 4, None),
        ]
    return [dict(zip(_NAMES, values, strict=True)) for values in configs]


def _specs(key: dict, config: dict) -> list[KernelSpec]:
    t = {2: "bf16", 4: "fp32"}[key["itemsize"]]
    return [
        KernelSpec.of(
            _symmetric,
            f"{t} {config['BLOCK']}{' add' if add else ''}{' hopper' if key['hopper'] else ''}",
            dict.fromkeys(("left", "right", "out", *(("addend",) if add else ())), t),
            {**config, "ADD": add, "PRECISION": "ieee" if t == "fp32" else None},
            {"alpha": "fp32", "beta": "fp32"},
            divisible=("M", "K"),
            max_arch=99 if key["hopper"] else 999,
            per_sm=2 if config["maxnreg"] else 1,
            uses={} if t == "fp32" else {90: ("wgmma",), 100: ("tcgen05",)},
        )
        for add in (False, True)
    ]


SYMMETRIC = Tunable(
    "newton_schulz",
    "symmetric",
    ("M", "itemsize", "hopper"),
    "forward",
    _heuristic,
    _space,
    [(4096, 2, True), (4096, 2, False), (512, 2, False), (4096, 4, False)],
    _specs,
)
TUNABLES = (SYMMETRIC,)


def gate() -> list[KernelSpec]:
    """What precedes the products."""
    return [
        KernelSpec.of(
            kernel,
            f"{kernel.fn.__name__[1:]} {data}{' tall' if tall else ''}",
            {"part": "fp32", "*": data},
            {"TALL": tall, "PARTS": PARTS, "TILE": TILE, "num_warps": 4},
            {"eps": "fp32"},
            divisible=("R", "C", "x_batch", "x_row"),
            store=0 if kernel is _norms else 128,  # two numbers a program
            elements=TILE * TILE,
        )
        for data in ("bf16", "fp32")
        for kernel, tall in ((_norms, False), (_normalize, False), (_normalize, True))
    ]
