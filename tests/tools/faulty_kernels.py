"""Kernels for test_emulate.py: right ones, and one planted fault each."""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


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
def _functions(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    y = tl.sin(x) + tl.cos(x) + tl.exp(x) + tl.log(tl.abs(x) + 1) + tl.floor(x) + tl.ceil(x)
    tl.store(out_ptr + at, y + tl.erf(x) + tl.sigmoid(x) + tl.rsqrt(x * x + 1) + tl.exp2(x))


def functions(x):
    out = torch.empty_like(x)
    _functions[(1,)](x, out, BLOCK=x.numel())
    return out


def plain_functions(x):
    y = x.sin() + x.cos() + x.exp() + (x.abs() + 1).log() + x.floor() + x.ceil()
    return y + x.erf() + x.sigmoid() + (x * x + 1).rsqrt() + x.exp2()


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
    assert torch.cuda.get_device_properties(x.device).multi_processor_count > 8
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        _add[(triton.cdiv(x.numel(), 256),)](x, y, out, x.numel(), BLOCK=256)
    torch.cuda.synchronize()
    return out


def add_on_cuda():
    return add(torch.randn(300, device="cuda"), torch.randn(300).cuda())


def plain_add(x, y):
    return x + y


def adds_two_percent(x, y):
    """About five times the error of a sum in bfloat16."""
    return add(x, y) * 1.02


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


def added(x, y):
    return doubled(x) + y


def forgets_y(x, y):
    return doubled(x) + y.detach()


def plain_added(x, y):
    return x + x + y


def with_sum(x):
    return doubled(x), x.sum().detach()


def plain_with_sum(x):
    return x + x, x.sum()


@triton.jit
def _of_pair(pair):
    tl.store(pair[0], pair[1])


def of_pair(x):
    _of_pair[(1,)]((x, 2.0))


def of_x(x, y):
    return x + x + y.detach()


def squared(x, y):
    return x * x


def stores_the_same(x, y):
    """Writes y, and x with what it held."""
    nothing = torch.zeros_like(x)
    _add[(1,)](x, nothing, x, x.numel(), BLOCK=256)
    _add[(1,)](x, nothing, y, x.numel(), BLOCK=256)


@triton.jit
def _fill(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), 1.0)


def fill():
    _fill[(1,)](torch.empty(1024), BLOCK=1024)


# ---- faults


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


def the_last():
    return torch.tensor([2])


@triton.jit
def _races_on(out_ptr):
    tl.store(out_ptr, tl.program_id(0))
    tl.store(out_ptr + 1 + tl.program_id(0), 0)  # one program too many


def races_on():
    _races_on[(3,)](torch.zeros(3, dtype=torch.int32))


@triton.jit
def _waits(flag_ptr):
    if tl.program_id(0) == 0:
        while tl.atomic_add(flag_ptr, 0) == 0:  # for a later program
            pass
    else:
        tl.atomic_xchg(flag_ptr, 1)


def waits():
    _waits[(2,)](torch.zeros(1, dtype=torch.int32))


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
    tl.store(out_ptr + at, x * tl.sum(x))  # 512 numbers per thread live until the sum is there


def spills(x):
    out = torch.empty_like(x)
    _spills[(1,)](x, out, BLOCK=16384, num_warps=1)
    return out


@triton.jit
def _too_much(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)))


def less_shared(x):
    """The sum of the second launch needs no shared memory."""
    out = torch.empty_like(x)
    for warps in (4, 1):
        _spills[(1,)](x, out, BLOCK=128, num_warps=warps)


def too_much(x):
    """128 KiB of shared memory, which sm_120 does not have."""
    out = torch.empty(x.shape, dtype=torch.float32)
    _too_much[(1,)](x, x, out, N=x.shape[0])


def product(x, y):
    out = torch.empty(x.shape, dtype=torch.float32)
    _too_much[(1,)](x, y, out, N=x.shape[0])
    return out


def in_clusters(x):
    out = torch.empty_like(x)
    _add[(1,)](x, x, out, x.numel(), BLOCK=256, num_ctas=2)


def from_the_second(x):
    _add[(1,)](x[1:], x[1:], torch.empty_like(x), 1024, BLOCK=1024)


def exits(x):
    raise SystemExit(0)


def plain_product(x, y):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.to(wide) @ y.to(wide)


@triton.jit
def _gather(x_ptr, index_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.gather(tl.load(x_ptr + at), tl.load(index_ptr + at), 0))


def gather(x, index):
    out = torch.empty_like(x)
    _gather[(1,)](x, index, out, BLOCK=x.numel())
    return out


def every_32nd():
    at = torch.arange(1024)
    return {"x": torch.randn(1024), "index": (at * 32 % 1024 + at // 32).int()}


def plain_gather(x, index):
    return x[index.long()]


@triton.jit
def _reverse(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + BLOCK - 1 - at))


def reverse(x):
    """Writes through another view of the tensor that it returns."""
    out = torch.empty_like(x)
    _reverse[(1,)](x, out, BLOCK=x.numel())
    _add[(1,)](out, x, out.view(-1, 2), x.numel(), BLOCK=x.numel())
    return out


def plain_reverse(x):
    return x.flip(0) + x


def raises(x):
    raise ValueError("what the function says")


def launches_nothing():
    return None


def some_inputs():
    return {"x": torch.randn(300), "y": torch.randn(300)}


def for_the_kernel():
    x, y, out = torch.randn(200), torch.randn(200), torch.empty(200)
    return {"x_ptr": x, "y_ptr": y, "out_ptr": out, "n": 200}


def by_name(x_ptr, y_ptr):
    return {"out_ptr": x_ptr + y_ptr}


def of_rows(kernel, x, out, **options):
    """Launches a program for each row of x."""
    kernel[(len(x),)](x, out, x.shape[1], BLOCK=64, **options)
    return out


@triton.jit
def _sum_of_masked(x_ptr, y_ptr, n, BLOCK: tl.constexpr, AFTERWARDS: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + at, mask=at < n).to(tl.float32)
    if AFTERWARDS:
        x = tl.where(at < n, x, 0.0)
    tl.store(y_ptr + row, tl.sum(x))


def sum_of_masked(x, afterwards=False):
    y = x.new_empty(len(x), dtype=torch.float32)
    return of_rows(_sum_of_masked, x, y, AFTERWARDS=afterwards)


def masked_afterwards(x):
    return sum_of_masked(x, afterwards=True)


@triton.jit
def _least_of_masked(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + at, mask=at < n)
    tl.store(y_ptr + row, tl.min(x))


def least_of_masked(x):
    """Right only while what lies beyond a row is no less than its least element."""
    return of_rows(_least_of_masked, x, x.new_empty(len(x)))


@triton.jit
def _normed(x_ptr, y_ptr, n, BLOCK: tl.constexpr, ACCUMULATED: tl.constexpr):
    row, at = tl.program_id(0) * n, tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], ACCUMULATED)
    for first in range(0, n, BLOCK):
        x = tl.load(x_ptr + row + first + at).to(tl.float32)
        total += (x * x).to(ACCUMULATED)
    scale = tl.rsqrt(tl.sum(total.to(tl.float32)) / n)
    for first in range(0, n, BLOCK):
        x = tl.load(x_ptr + row + first + at).to(tl.float32)
        tl.store(y_ptr + row + first + at, (x * scale).to(tl.bfloat16))


def normed(x, accumulated=tl.float32):
    y = torch.empty_like(x)
    _normed[(len(x),)](x, y, x.shape[1], BLOCK=128, ACCUMULATED=accumulated)
    return y


def normed_in_bfloat16(x):
    return normed(x, tl.bfloat16)


def plain_normed(x):
    return x * (x * x).mean(-1, keepdim=True).rsqrt()


@triton.jit
def _to_the_next_row(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + at, mask=at < n)
    tl.store(out_ptr + (row + 1) * n + at, x, mask=at < n)  # one too far


def to_the_next_row(x):
    return of_rows(_to_the_next_row, x, torch.zeros_like(x))


def out_of_its_view(x):
    """There is room behind what it writes to."""
    return of_rows(_to_the_next_row, x, torch.zeros(2 * len(x), x.shape[1])[: len(x)])


@triton.jit
def _reads_on(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + at)  # into the next row, and of the last one past the end
    tl.store(out_ptr + row * n + at, x, mask=at < n)


def reads_on(x):
    return of_rows(_reads_on, x, torch.empty_like(x))


@triton.jit
def _sums_rows(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * n + at, mask=at < n)
    tl.store(out_ptr + at, tl.load(out_ptr + at, mask=at < n) + x, mask=at < n)  # no atomic


def sums_rows(x):
    return of_rows(_sums_rows, x, torch.zeros(x.shape[1]))


@triton.jit
def _by_scratch(x_ptr, scratch_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(scratch_ptr + at, tl.load(x_ptr + at))
    tl.store(out_ptr + at, tl.load(scratch_ptr + BLOCK - 1 - at))  # no barrier


def by_scratch(x):
    scratch, out = torch.empty_like(x), torch.empty_like(x)
    _by_scratch[(1,)](x, scratch, out, BLOCK=x.numel())
    return out


def shifted(x):
    """Into another tensor."""
    out = torch.empty(256)
    _copy_shifted[(1,)](x, out, BLOCK=256)
    return out


@triton.jit
def _copy_shifted(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at + 1))


def plain_shifted(x):
    return x[1:]


def plain_normed_in_float32(x):
    return plain_normed(x.float()).to(x.dtype)


# ---- specialized warps


@gluon.jit
def _hand_over(x_ptr, held, ready):
    at = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    held.store(gl.load(x_ptr + at))
    mbarrier.arrive(ready)


@gluon.jit
def _take_over(out_ptr, held, ready, WAITS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if WAITS:
        mbarrier.wait(ready, 0)
    gl.store(out_ptr + gl.arange(0, 128, layout), 2 * held.load(layout))  # by other warps


@gluon.jit
def _handed(x_ptr, out_ptr, WAITS: gl.constexpr):
    held = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    gl.warp_specialize(
        [(_take_over, (out_ptr, held, ready, WAITS)), (_hand_over, (x_ptr, held, ready))],
        [4],
        [24],
    )


def handed(x, waits=True):
    out = torch.empty_like(x)
    _handed[(1,)](x, out, WAITS=waits, num_warps=4)
    return out


def handed_too_soon(x):
    return handed(x, False)


# ---- tensor memory


@gluon.jit
def _in_tensor_memory(x_ptr, y_ptr, out_ptr, WAITS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rows, columns = (
        gl.arange(0, 128, gl.SliceLayout(1, layout)),
        gl.arange(0, 64, gl.SliceLayout(0, layout)),
    )
    at = rows[:, None] * 64 + columns[None, :]
    x = gl.allocate_shared_memory(gl.bfloat16, [128, 64], shared, gl.load(x_ptr + at))
    y = gl.allocate_shared_memory(gl.bfloat16, [128, 64], shared, gl.load(y_ptr + at))
    fence_async_shared()
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    held: gl.constexpr = blackwell.TensorMemoryLayout([128, 128], col_stride=1)
    total = blackwell.allocate_tensor_memory(gl.float32, [128, 128], held)
    blackwell.tcgen05_mma(x, y.permute((1, 0)), total, use_acc=False)
    blackwell.tcgen05_commit(ready)
    if WAITS:
        mbarrier.wait(ready, 0)
    of_row: gl.constexpr = gl.BlockedLayout([1, 128], [32, 1], [4, 1], [0, 1])
    m, n = (
        gl.arange(0, 128, gl.SliceLayout(1, of_row)),
        gl.arange(0, 128, gl.SliceLayout(0, of_row)),
    )
    gl.store(out_ptr + m[:, None] * 128 + n[None, :], total.load(of_row))


def in_tensor_memory(x, y, waits=True):
    out = torch.empty(128, 128)
    _in_tensor_memory[(1,)](x, y, out, WAITS=waits, num_warps=4)
    return out


def in_tensor_memory_too_soon(x, y):
    return in_tensor_memory(x, y, waits=False)


def plain_rows_product(x, y):
    return plain_product(x, y.T)
