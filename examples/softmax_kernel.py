"""A Triton kernel and its launcher for docs/emulate.md: `tilewright emulate` runs them on a CPU."""

import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * stride
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row + at, mask=at < columns, other=-float("inf")).to(tl.float32)
    power = tl.exp(x - tl.max(x))
    tl.store(y_ptr + row + at, power / tl.sum(power), mask=at < columns)


def softmax(x):
    assert x.is_cuda, "a kernel needs a GPU"
    y = torch.empty_like(x)
    rows, columns = x.shape
    _softmax[(rows,)](x, y, x.stride(0), columns, BLOCK=triton.next_power_of_2(columns))
    return y


@triton.jit
def _softmax_without_mask(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * stride
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row + at, mask=at < columns, other=-float("inf")).to(tl.float32)
    power = tl.exp(x - tl.max(x))
    tl.store(y_ptr + row + at, power / tl.sum(power))


def softmax_without_mask(x):
    y = torch.empty_like(x)
    _softmax_without_mask[(x.shape[0],)](
        x, y, x.stride(0), x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1])
    )
    return y


def plain(x):
    return x.softmax(-1)
