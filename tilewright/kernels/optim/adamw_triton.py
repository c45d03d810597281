"""AdamW over many tensors in Triton, in one launch. The definition is
tilewright/ops/optim/adamw.py.

Programs read the addresses of their tensors from a table: a launch takes any number of tensors.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
import triton
import triton.language as tl

from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv
from tilewright.kernels.math_triton import reciprocal, tanh_and_derivative
from tilewright.kernels.spec import KernelSpec

TILE = 2048  # elements of a program: with 8 warps, a 128-bit load of bf16 per thread
WARPS = 8
NUMBERS = (
    *("decay", "rate1", "beta2", "rise2", "size", "root", "eps"),
    *("log_beta1", "log_beta2"),
)


@triton.jit
def _update(
    p_at,
    g_at,
    m_at,
    v_at,
    c_at,
    w_at,
    inside,
    places,
    tile,
    seed,
    count,
    clip,
    decay,
    rate1,
    beta2,
    rise2,
    size,
    root,
    eps,
    KAHAN: tl.constexpr,
    SHORT: tl.constexpr,
    TILE: tl.constexpr,
):
    """inside: the mask of all accesses, or None.   rate1: 1 - beta1, or beta1 if SHORT.
    places: the place of this tensor, or None.   tile, count: its tile, the number of the step.
    clip: what multiplies g, or None.
    """
    p = tl.load(p_at, mask=inside).to(tl.float32)
    g = tl.load(g_at, mask=inside).to(tl.float32)
    if clip is not None:
        g *= clip
    m = tl.load(m_at, mask=inside).to(tl.float32)
    v = tl.load(v_at, mask=inside).to(tl.float32)
    # From the nearer end: next to a large difference, the other one would lose its digits.
    m = g + rate1 * (m - g) if SHORT else m + rate1 * (g - m)
    v = beta2 * v + rise2 * g * g
    random = None
    if places is not None:
        random = _random_bits(places, tile, seed, count, TILE)
    _store(m_at, m, inside, random, 0x9E37)
    _store(v_at, v, inside, random, 0x58F1)
    change = decay * p - size * m * reciprocal(tl.sqrt(v) * root + eps)
    if KAHAN:
        change += tl.load(c_at, mask=inside).to(tl.float32)
    new = p + change
    _store(p_at, new, inside, random, 1)
    if w_at is not None:
        _store(w_at, new, inside, random, 1)
    if KAHAN:
        new = new.to(p_at.dtype.element_ty)
        rest = p - new.to(tl.float32) + change
        tl.store(c_at, rest.to(c_at.dtype.element_ty), mask=inside)


@triton.jit
def _store(at, x, inside, random, FACTOR: tl.constexpr):
    """Stores x, in bfloat16 rounded stochastically if there are random bits."""
    if random is not None and at.dtype.element_ty == tl.bfloat16:
        x = rounded(x, random * FACTOR & 0xFFFF)
    tl.store(at, x.to(at.dtype.element_ty), mask=inside)


@triton.jit
def rounded(x, random):
    """The result of arithmetic, whose NaN are quiet, with a value of bfloat16, the one that 16
    random bits choose.
    """
    bits = x.to(tl.uint32, bitcast=True)
    last = (bits & 0x7FFFFFFF) >= 0x7F7F0000  # the largest, or beyond
    up = tl.where(last, bits, bits + random)
    return (up & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _random_bits(places, tile, seed, count, TILE: tl.constexpr):
    """16 bits for each element of a tile: see `StochasticRounding`."""
    matrix, first = tl.load(places), tl.load(places + 1)
    width, pitch = tl.load(places + 2), tl.load(places + 3)
    if ((first | width | pitch) & 7) == 0:
        random = _of_blocks(matrix, first, width, pitch, tile, seed, count, TILE)
    else:
        random = _of_elements(matrix, first, width, pitch, tile, seed, count, TILE)
    return random


@triton.jit
def _of_blocks(matrix, first, width, pitch, tile, seed, count, TILE: tl.constexpr):
    """Where eight neighbors are those of a block: drawn once."""
    block = _in_matrix(first // 8, width // 8, pitch // 8, tile, TILE // 8)
    a, b, c, d = _words(block, matrix, seed, count)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (TILE,))


@triton.jit
def _of_elements(matrix, first, width, pitch, tile, seed, count, TILE: tl.constexpr):
    at = _in_matrix(first, width, pitch, tile, TILE)
    a, b, c, d = _words(at >> 3, matrix, seed, count)
    half = (at & 7).to(tl.uint32)
    word = tl.where(half < 4, tl.where(half < 2, a, b), tl.where(half < 6, c, d))
    return (word >> ((half & 1) * 16)) & 0xFFFF


@triton.jit
def _in_matrix(first, width, pitch, tile, N: tl.constexpr):
    """Element i of a tensor is element first + i // width * pitch + i % width of its matrix: those
    of a tile of N. Divisions of 64 bits are the tile's alone.
    """
    row = tile * N // width
    column = tile * N - row * width
    one = tl.minimum(width - column, N).to(tl.uint32)  # of the first row
    i = tl.arange(0, N).to(tl.uint32)
    after = (tl.maximum(i, one) - one) // tl.minimum(width, N).to(tl.uint32)
    rows = tl.where(i < one, 0, 1 + after)
    return first + row * pitch + column + i + rows.to(tl.int64) * (pitch - width)


@triton.jit
def _words(block, matrix, seed, count):
    """The four words of each block, uint32."""
    none = block * 0
    return tl.philox(
        seed,
        block.to(tl.uint32),
        ((block >> 32) + 0x10000000).to(tl.uint32),
        (none + matrix).to(tl.uint32),
        (none + count).to(tl.uint32),
    )


@triton.jit
def _address(table_ptr, like_ptr, ALIGNED: tl.constexpr):
    """A pointer of like_ptr's type from the table."""
    pointer = tl.load(table_ptr).to(like_ptr.dtype)
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _correction(step, log_beta):
    """1 - beta^step to a few ulp: where that cancels, so would its rounding in log_beta. With
    h = tanh(x / 2), 1 - exp(-x) is 2h / (1 + h), which does not cancel.
    """
    h, _ = tanh_and_derivative(-0.5 * log_beta * step)
    return 2.0 * h / (1.0 + h)


@triton.jit(do_not_specialize=["seed", "number"])
def _adamw(
    table_ptr,
    tiles_ptr,
    places_ptr,
    step_ptr,
    clip_ptr,
    p_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    c_ptr,
    w_ptr,
    seed: tl.int64,
    number: tl.int64,
    count,
    tiles,
    decay,
    rate1,
    beta2,
    rise2,
    size,
    root,
    eps,
    log_beta1,
    log_beta2,
    ALIGNED: tl.constexpr,
    KAHAN: tl.constexpr,
    SHORT: tl.constexpr,
    VECTOR: tl.constexpr,
    TILE: tl.constexpr,
):
    """table [5 to 7, count]: elements of each tensor, and the addresses of p, g, m, v, of c if
        KAHAN, and of w unless None.
    tiles [2, tiles]: the tensor of each program, and its tile in it.
    places [count, 4]: None, or where the elements of each tensor have their random bits.
    step: None, or the number of the step; size is then the learning rate, without its correction,
        and root is computed here.   number: without it.
    clip: None, or what multiplies the gradients.
    p, g, m, v, c, w: those of any one of the tensors, for their types.
    VECTOR: neighboring elements of a thread, the same in all accesses: values need not move between
        threads, and a thread writes the elements that it has read.
    """
    tensor = tl.load(tiles_ptr + tl.program_id(0))
    row = table_ptr + tensor
    tile = tl.load(tiles_ptr + tiles + tl.program_id(0)).to(tl.int64)
    first = tile * TILE
    n = tl.load(row)
    at = tl.max_contiguous(first + tl.arange(0, TILE), VECTOR)
    p_at = _address(row + count, p_ptr, ALIGNED) + at
    g_at = _address(row + 2 * count, g_ptr, ALIGNED) + at
    m_at = _address(row + 3 * count, m_ptr, ALIGNED) + at
    v_at = _address(row + 4 * count, v_ptr, ALIGNED) + at
    c_at = _address(row + 5 * count, c_ptr, ALIGNED) + at if KAHAN else None
    copied: tl.constexpr = w_ptr is not None
    w_at = _address(row + (6 if KAHAN else 5) * count, w_ptr, ALIGNED) + at if copied else None
    places = places_ptr + tensor * 4 if places_ptr is not None else None
    clip = tl.load(clip_ptr).to(tl.float32) if clip_ptr is not None else None
    if step_ptr is not None:
        step = tl.load(step_ptr).to(tl.float32)
        number = tl.load(step_ptr).to(tl.int64)
        size /= _correction(step, log_beta1)
        root = 1.0 / tl.sqrt(_correction(step, log_beta2))
    # Only the last tile is masked: a mask by a loaded number would make each access narrow.
    if first + TILE <= n:
        _update(
            p_at, g_at, m_at, v_at, c_at, w_at, None, places, tile, seed, number, clip,
            decay, rate1, beta2, rise2, size, root, eps, KAHAN, SHORT, TILE,
        )  # fmt: skip
    else:
        _update(
            p_at, g_at, m_at, v_at, c_at, w_at, at < n, places, tile, seed, number, clip,
            decay, rate1, beta2, rise2, size, root, eps, KAHAN, SHORT, TILE,
        )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _tiles(device: torch.device, stream: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """[2, tiles] int32, in the order of the tensors. A stream has its own: it is not waited for."""
    counts = torch.tensor([cdiv(n, TILE) for n in sizes])
    tensors = torch.arange(len(sizes)).repeat_interleave(counts)
    first = counts.cumsum(0) - counts
    tiles = torch.arange(len(tensors)) - first[tensors]
    return _sent(torch.stack((tensors, tiles)).to(torch.int32), device)


@functools.lru_cache(maxsize=64)
def _table(device: torch.device, stream: int, numbers: tuple[int, ...]) -> torch.Tensor:
    """Cached: addresses stay the same in most steps. A CUDA graph, which may not copy, needs the
    same contiguous tensors as the call before its capture, and less than 64 other calls after it.
    """
    return _sent(torch.tensor(numbers, dtype=torch.int64), device)


def _sent(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, without waiting for it."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t


def table(device: torch.device, sizes: tuple[int, ...], lists: tuple[list, ...]) -> torch.Tensor:
    """The argument of the kernel."""
    addresses = (t.data_ptr() for tensors in lists for t in tensors)
    return _table(device, _stream(device), tuple(itertools.chain(sizes, addresses)))


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def update(params, grads, exp_avgs, exp_avg_sqs, compensations, copies, places, seed, numbers):
    device, sizes = params[0].device, tuple(p.numel() for p in params)
    if not any(sizes):
        return
    lists = params, grads, exp_avgs, exp_avg_sqs, compensations, copies
    lists = tuple(tensors for tensors in lists if tensors)
    tiles = _tiles(device, _stream(device), sizes)
    addresses = table(device, sizes, lists)
    examples = [(tensors or [None])[0] for tensors in (*lists[:4], compensations, copies)]
    short, step = numbers.beta1 < 0.5, numbers.step
    on_device = isinstance(step, torch.Tensor)
    launch(
        _adamw,
        (tiles.shape[1],),
        addresses,
        tiles,
        places,
        step if on_device else None,
        numbers.clip,
        *examples,
        seed,
        0 if on_device else int(step),
        len(params),
        tiles.shape[1],
        -numbers.lr * numbers.weight_decay,
        numbers.beta1 if short else 1 - numbers.beta1,
        numbers.beta2,
        1 - numbers.beta2,
        *((numbers.lr, 1.0) if on_device else numbers.corrected()),
        numbers.eps,
        _log(numbers.beta1),
        _log(numbers.beta2),
        ALIGNED=not any(t.data_ptr() % 16 for tensors in lists for t in tensors),
        KAHAN=bool(compensations),
        SHORT=short,
        VECTOR=16 // max(t.element_size() for t in examples if t is not None),
        TILE=TILE,
        num_warps=WARPS,
    )


def _log(beta: float) -> float:
    """The logarithm of beta; for 0, any number whose exponential is negligible beside 1."""
    return math.log(beta) if beta else -100.0


def gate() -> list[KernelSpec]:
    return [
        KernelSpec.of(
            _adamw,
            f"{p} {state} states{' kahan' if kahan else ''}{'' if aligned else ' unaligned'}"
            f"{' short' if short else ''}{' step on device' if counter else ''}"
            f"{' stochastic' if random else ''}{' clipped' if clip else ''}"
            f"{f' {copy} copy' if copy else ''}",
            {
                "step": counter,
                "places": "i64" if random else None,
                "clip": clip,
                "w": copy,
                "table": "i64",
                "tiles": "i32",
                **dict.fromkeys("pgc" if kahan else "pg", p),
                **dict.fromkeys("mv", state),
            },
            {
                "ALIGNED": aligned,
                "KAHAN": kahan,
                "SHORT": short,
                "VECTOR": 4 if "fp32" in (p, state) else 8,
                "TILE": TILE,
                "num_warps": WARPS,
            },
            {**dict.fromkeys(NUMBERS, "fp32"), "seed": "i64", "number": "i64"},
            # Tensors off 16 bytes, such as views, are read and written by elements.
            load=128 if aligned else 32,
            store=128 if aligned else 32,
            elements=TILE,
        )
        for p, state, kahan, aligned, short, counter, random, clip, copy in (
            ("fp32", "fp32", False, True, False, None, False, None, None),
            ("fp32", "bf16", False, True, False, None, False, None, None),
            ("bf16", "bf16", True, True, False, None, False, None, None),
            ("fp32", "fp32", False, False, False, None, False, None, None),
            ("fp32", "fp32", False, True, True, None, False, None, None),
            ("fp32", "fp32", False, True, False, "fp32", False, None, None),
            ("bf16", "bf16", True, True, False, "i64", False, None, None),
            ("bf16", "bf16", False, True, False, None, False, None, None),
            ("bf16", "bf16", False, True, False, None, True, None, None),
            ("bf16", "bf16", False, True, False, "fp32", True, "fp32", None),
            ("fp32", "fp32", False, True, False, None, True, None, "bf16"),
            ("fp32", "fp32", False, True, False, None, False, "fp32", "bf16"),
        )
    ]
