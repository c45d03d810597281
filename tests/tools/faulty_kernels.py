"""Kernels for test_emulate.py: right ones, and one planted fault each."""

import torch
import triton
import triton.language as tl


@triton.jit
def _add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    y = tl.load(y_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x + y, mask=at < n)


def add(x, y):
    """As a launcher for a GPU: it asserts that its tensors are on one."""
    if not (x.is_cuda and x.device.type == "cuda" and x.get_device() == 0):
        raise TypeError("not on a GPU")
    assert torch.cuda.is_available() and torch.cuda.get_device_capability(x.device)[0] >= 8
    torch.cuda.get_device_properties(x.device).multi_processor_count
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        _add[(triton.cdiv(x.numel(), 256),)](x, y, out, x.numel(), BLOCK=256)
    torch.cuda.synchronize()
    return out


def add_on_cuda():
    return add(torch.randn(300, device="cuda"), torch.randn(300).cuda())


def plain_add(x, y):
    return x + y


def plain_subtract(x, y):
    return x - y


def in_part(x, y):
    """Adds only half of its elements."""
    out = torch.empty_like(x)
    _add[(1,)](x, y, out, x.numel() // 2, BLOCK=256)
    return out


def reads_unset(x):
    return add(x, torch.empty_like(x))


def sets_first(x):
    y = torch.empty_like(x)
    y.zero_()
    return add(x, y)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return add(x, x)

    @staticmethod
    def backward(ctx, dy):
        return add(dy.contiguous(), dy.contiguous())


class Tripled(Doubled):
    @staticmethod
    def backward(ctx, dy):
        return add(dy, dy) + dy


def doubled(x):
    return Doubled.apply(x)


def tripled(x):
    return Tripled.apply(x)


def twice(x):
    return x + x


# ---- faults


@triton.jit
def _no_mask(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)  # the mask is missing
    tl.store(out_ptr + at, x, mask=at < n)


def no_mask(x):
    out = torch.empty_like(x)
    _no_mask[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), BLOCK=128)
    return out


@triton.jit
def _says_aligned(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    start = tl.multiple_of(tl.program_id(0) * stride, 16)  # it is not
    at = tl.max_contiguous(start + tl.arange(0, BLOCK), BLOCK)
    tl.store(out_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.load(x_ptr + at))


def says_aligned(x):
    out = torch.empty(x.shape[0], 512, dtype=x.dtype)
    _says_aligned[(x.shape[0],)](x, out, x.stride(0), BLOCK=512)
    return out


@triton.jit
def _one_place(out_ptr):
    tl.store(out_ptr, tl.program_id(0))


def one_place():
    out = torch.zeros(1, dtype=torch.int32)
    _one_place[(3,)](out)
    return out


@triton.jit
def _shift(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at + 1)
    tl.store(x_ptr + at, x)  # another thread may not have loaded it yet


def shift(x):
    _shift[(1,)](x, BLOCK=256)


@triton.jit
def _total(x_ptr, total_ptr, count_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(total_ptr, tl.sum(x))
    if tl.atomic_add(count_ptr, 1) == tl.num_programs(0) - 1:  # the last program
        tl.store(out_ptr, tl.load(total_ptr) * 2)


def total(x):
    sums, count, out = torch.zeros(1), torch.zeros(1, dtype=torch.int32), torch.empty(1)
    _total[(x.numel() // 128,)](x, sums, count, out, BLOCK=128)
    return out


def plain_total(x):
    return x.sum()[None] * 2


@triton.jit
def _transpose(x_ptr, out_ptr, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + i * N + j)
    tl.store(out_ptr + i * N + j, tl.trans(x))


def transpose(x):
    out = torch.empty_like(x)
    _transpose[(1,)](x, out, N=x.shape[0])
    return out


@triton.jit
def _column(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at * stride))


def column(x):
    out = torch.empty(128, dtype=x.dtype)
    _column[(1,)](x, out, x.stride(0), BLOCK=128)
    return out


@triton.jit
def _does_not_compile(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), missing_name)  # noqa: F821


def does_not_compile(x):
    _does_not_compile[(1,)](x, BLOCK=128)


@triton.jit
def _unknown_instruction(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    x = tl.inline_asm_elementwise("bfind.u32 $0, $1;", "=r,r", [x], tl.int32, True, 1)
    tl.store(x_ptr + at, x)


def unknown_instruction(x):
    _unknown_instruction[(1,)](x, BLOCK=128)


@triton.autotune([triton.Config({"BLOCK": n}) for n in (128, 1024)], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def _tuned(x_ptr, out_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if BLOCK > 128:  # only this configuration is wrong
        tl.store(out_ptr + at, tl.load(x_ptr + at))
    else:
        tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


def tuned(x):
    out = torch.empty_like(x)
    _tuned[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    return out


@triton.jit
def _spills(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.debug_barrier()
    for i in range(8):
        x = x * tl.load(x_ptr + at + i * BLOCK)
        tl.store(out_ptr + at, tl.cumsum(x, 0))


def spills(x):
    out = torch.empty(8192)
    _spills[(1,)](x, out, BLOCK=8192, num_warps=1)
    return out


def raises(x):
    raise ValueError("what the function says")


def launches_nothing():
    return None


def some_inputs():
    return {"x": torch.randn(300), "y": torch.randn(300)}
