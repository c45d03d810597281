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
    inside,
    decay,
    rate1,
    beta2,
    rise2,
    size,
    root,
    eps,
    KAHAN: tl.constexpr,
    SHORT: tl.constexpr,
):
    """inside: the mask of all accesses, or None.   rate1: 1 - beta1, or beta1 if SHORT."""
    p = tl.load(p_at, mask=inside).to(tl.float32)
    g = tl.load(g_at, mask=inside).to(tl.float32)
    m = tl.load(m_at, mask=inside).to(tl.float32)
    v = tl.load(v_at, mask=inside).to(tl.float32)
    # From the nearer end: next to a large difference, the other one would lose its digits.
    m = g + rate1 * (m - g) if SHORT else m + rate1 * (g - m)
    v = beta2 * v + rise2 * g * g
    tl.store(m_at, m.to(m_at.dtype.element_ty), mask=inside)
    tl.store(v_at, v.to(v_at.dtype.element_ty), mask=inside)
    change = decay * p - size * m * reciprocal(tl.sqrt(v) * root + eps)
    if KAHAN:
        change += tl.load(c_at, mask=inside).to(tl.float32)
    new = (p + change).to(p_at.dtype.element_ty)
    tl.store(p_at, new, mask=inside)
    if KAHAN:
        rest = p - new.to(tl.float32) + change
        tl.store(c_at, rest.to(c_at.dtype.element_ty), mask=inside)


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


@triton.jit
def _adamw(
    table_ptr,
    tiles_ptr,
    step_ptr,
    p_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    c_ptr,
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
    """table [6, count]: elements of each tensor, and the addresses of p, g, m, v and c.
    tiles [2, tiles]: the tensor of each program, and its tile in it.
    step: None, or the number of the step; size is then the learning rate, without its correction,
        and root is computed here.
    p, g, m, v, c: those of any one of the tensors, for their types.
    VECTOR: neighboring elements of a thread, the same in all accesses: values need not move between
        threads, and a thread writes the elements that it has read.
    """
    row = table_ptr + tl.load(tiles_ptr + tl.program_id(0))
    first = tl.load(tiles_ptr + tiles + tl.program_id(0)).to(tl.int64) * TILE
    n = tl.load(row)
    at = tl.max_contiguous(first + tl.arange(0, TILE), VECTOR)
    p_at = _address(row + count, p_ptr, ALIGNED) + at
    g_at = _address(row + 2 * count, g_ptr, ALIGNED) + at
    m_at = _address(row + 3 * count, m_ptr, ALIGNED) + at
    v_at = _address(row + 4 * count, v_ptr, ALIGNED) + at
    c_at = _address(row + 5 * count, c_ptr, ALIGNED) + at if KAHAN else None
    if step_ptr is not None:
        step = tl.load(step_ptr).to(tl.float32)
        size /= _correction(step, log_beta1)
        root = 1.0 / tl.sqrt(_correction(step, log_beta2))
    # Only the last tile is masked: a mask by a loaded number would make each access narrow.
    if first + TILE <= n:
        _update(
            p_at, g_at, m_at, v_at, c_at, None,
            decay, rate1, beta2, rise2, size, root, eps, KAHAN, SHORT,
        )  # fmt: skip
    else:
        _update(
            p_at, g_at, m_at, v_at, c_at, at < n,
            decay, rate1, beta2, rise2, size, root, eps, KAHAN, SHORT,
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


def update(params, grads, exp_avgs, exp_avg_sqs, compensations, numbers):
    device, sizes = params[0].device, tuple(p.numel() for p in params)
    if not any(sizes):
        return
    lists = params, grads, exp_avgs, exp_avg_sqs, *([compensations] if compensations else [])
    tiles = _tiles(device, _stream(device), sizes)
    addresses = table(device, sizes, lists)
    examples = [tensors[0] for tensors in lists]
    if not compensations:
        examples.append(None)
    short, step = numbers.beta1 < 0.5, numbers.step
    on_device = isinstance(step, torch.Tensor)
    launch(
        _adamw,
        (tiles.shape[1],),
        addresses,
        tiles,
        step if on_device else None,
        *examples,
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
            f"{' short' if short else ''}{' step on device' if counter else ''}",
            {
                "step": counter,
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
            dict.fromkeys(NUMBERS, "fp32"),
            # Tensors off 16 bytes, such as views, are read and written by elements.
            load=128 if aligned else 32,
            store=128 if aligned else 32,
            elements=TILE,
        )
        for p, state, kahan, aligned, short, counter in (
            ("fp32", "fp32", False, True, False, None),
            ("fp32", "bf16", False, True, False, None),
            ("bf16", "bf16", True, True, False, None),
            ("fp32", "fp32", False, False, False, None),
            ("fp32", "fp32", False, True, True, None),
            ("fp32", "fp32", False, True, False, "fp32"),
            ("bf16", "bf16", True, True, False, "i64"),
        )
    ]
