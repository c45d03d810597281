"""Tensor cores of sm_100 in the emulator: products of all kinds against NumPy, and what it finds if
the order of a kernel is wrong. Whole kernels are in test_triton_ptx.py.
"""

import re

import numpy as np
import pytest
import torch

from tilewright_lab.emulator import Counts, Kernel, Memory
from tilewright_lab.emulator.faults import Fault, Unsupported

# One step of a product, 128 x 16, in tensor memory: d in the columns 0 to 15, scales from 16 and
# 20, and a from 24 on, if it is there. In shared memory: a, b, and 512 bytes of scales of each.
KERNEL = """
.file 1 "kernels.py"
.visible .entry product(
    .param .u64 image_ptr,
    .param .u64 out_ptr
)
.reqntid 128
{
    .reg .pred %p<9>;
    .reg .b32 %r<60>;
    .reg .b64 %rd<40>;
    .shared .align 1024 .b8 buffer[6144];
    .shared .align 16 .b8 place[16];
    mov.u32 %r0, %tid.x;
    ld.param.b64 %rd0, [image_ptr];
    ld.param.b64 %rd1, [out_ptr];
    setp.lt.u32 %p0, %r0, 32;
    setp.eq.u32 %p1, %r0, 0;
    setp.lt.u32 %p2, %r0, 0;
    .loc 1 7 3
    @%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], 32;
    @%p0 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    @%p1 mbarrier.init.shared::cta.b64 [place+8], 1;
    mov.b32 %r2, buffer;
    mul.lo.s32 %r3, %r0, 48;
    add.s32 %r4, %r2, %r3;
    cvt.u64.u32 %rd2, %r3;
    add.s64 %rd3, %rd0, %rd2;
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd3];
    st.shared.v4.b32 [%r4], {%r10, %r11, %r12, %r13};
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd3+16];
    st.shared.v4.b32 [%r4+16], {%r10, %r11, %r12, %r13};
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd3+32];
    st.shared.v4.b32 [%r4+32], {%r10, %r11, %r12, %r13};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    ld.shared.b32 %r1, [place];
    and.b32 %r5, %r0, 96;
    shl.b32 %r6, %r5, 16;
    add.s32 %r7, %r1, %r6;
    mov.b32 %r10, 0x3F800000;
    CLEAR
    tcgen05.wait::st.sync.aligned;
    FEED
    bar.sync 0;
    shr.u32 %r8, %r2, 4;
    cvt.u64.u32 %rd4, %r8;
    or.b64 %rd5, %rd4, DESCRIBED;
    add.s64 %rd6, %rd5, 256;
    add.s64 %rd7, %rd5, FIRST;
    add.s64 %rd8, %rd5, SECOND;
    mov.b32 %r9, INSTRUCTION;
    SCALES
    @%p1 tcgen05.mma.cta_group::1.kind::KIND;
    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [place+8];
    again:
    mbarrier.try_wait.parity.shared::cta.b64 %p4, [place+8], 0;
    @!%p4 bra.uni again;
    LOAD
    tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %rd9, %r0, 64;
    add.s64 %rd10, %rd1, %rd9;
    st.global.v4.b32 [%rd10], {%r20, %r21, %r22, %r23};
    st.global.v4.b32 [%rd10+16], {%r24, %r25, %r26, %r27};
    st.global.v4.b32 [%rd10+32], {%r28, %r29, %r30, %r31};
    st.global.v4.b32 [%rd10+48], {%r32, %r33, %r34, %r35};
    bar.sync 0;
    @%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;
    ret;
}
"""
REGISTERS = ", ".join(f"%r{i}" for i in range(20, 36))
LOAD = f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{REGISTERS}}}, [%r7];"
CLEAR = f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%r7], {{{', '.join(['%r10'] * 16)}}};"
COPIES = """
    @%p1 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r1+16], %rd7;
    @%p1 tcgen05.cp.cta_group::1.warpx4.32x128b [%r1+20], %rd8;
    add.s32 %r14, %r1, 16;
    add.s32 %r15, %r1, 20;
"""
# A row of a from shared memory into tensor memory: chunks of 16 bytes that are 128 apart.
FEED = """
    shr.u32 %r40, %r0, 3;
    shl.b32 %r40, %r40, 8;
    and.b32 %r41, %r0, 7;
    shl.b32 %r41, %r41, 4;
    add.s32 %r40, %r40, %r41;
    add.s32 %r40, %r40, %r2;
    ld.shared.v4.b32 {%r42, %r43, %r44, %r45}, [%r40];
    ld.shared.v4.b32 {%r46, %r47, %r48, %r49}, [%r40+128];
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r7+24], {%r42, %r43, %r44, %r45, %r46, %r47, %r48, %r49};
    tcgen05.wait::st.sync.aligned;
"""
LEADING, STRIDE = 128, 256  # of the canonical layout without a swizzle
DESCRIBED = (LEADING >> 4) << 16 | (STRIDE >> 4) << 32 | 1 << 46
M128, N16 = 8 << 24, 2 << 17
BF16 = M128 | N16 | 1 << 4 | 1 << 7 | 1 << 10
FEWER = (STRIDE - 128 >> 4) << 32  # of scales: rows of 16 bytes, so that 8 of them have 128
NAMES = {
    "FIRST": str((4608 >> 4) - FEWER),
    "SECOND": str((5120 >> 4) - FEWER),
    "KIND": "f16 [%r1], %rd5, %rd6, %r9, 1",
    "INSTRUCTION": str(BF16),
    "DESCRIBED": str(DESCRIBED),
    "SCALES": "",
    "CLEAR": CLEAR,
    "FEED": "",
    "LOAD": LOAD,
}


def image(a, b, scales=()):
    """Bytes of rows, and of scales of 128 rows, as they are in shared memory."""
    out = np.zeros(6144, np.uint8)
    for start, part in ((0, a), (4096, b)):
        row, j = np.arange(len(part))[:, None], np.arange(32)
        out[start + row // 8 * 256 + j // 16 * 128 + row % 8 * 16 + j % 16] = part
    for start, part in zip((4608, 5120), scales, strict=False):
        row, j = np.arange(len(part))[:, None], np.arange(part.shape[1])
        lane = row % 32
        out[start + lane // 8 * 128 + lane % 8 * 16 + row // 32 * 4 + j] = part
    return out


def executed(given, change=lambda text: text, counts=None, **names):
    """d [128, 16], its bits as each thread stores them."""
    text, names = KERNEL, {**NAMES, **names}
    for name, what in names.items():
        text = re.sub(rf"\b{name}\b", str(what), text)
    memory, out = Memory(), torch.zeros(128, 16)
    values = [memory.put(torch.from_numpy(given)), memory.put(out)]
    Kernel(change(text)).run(memory, values, (1, 1, 1), counts=counts)
    memory.take_back()
    return out.numpy()


def random(kind, rows, seed):
    """[rows, 32] bytes of a kind, and the numbers that they are."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 64, generator=g)
    if kind == "e2m1":
        raw = torch.randint(0, 256, (rows, 32), generator=g, dtype=torch.uint8).numpy()
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        table = np.concatenate((table, -table))
        return raw, np.stack((table[raw & 15], table[raw >> 4]), -1).reshape(rows, 64)
    dtype = {
        "f16": torch.float16,
        "bf16": torch.bfloat16,
        "tf32": torch.float32,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
    }[kind]
    x = x[:, : 32 // dtype.itemsize].to(dtype)
    raw = x.contiguous().view(torch.uint8).numpy()
    if kind == "tf32":
        x = (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    return raw, x.double().numpy()


# kind -> formats of a and b, and their codes.
PLAIN = [
    ("f16", "f16", 0, "bf16", 1),
    ("f16", "bf16", 1, "f16", 0),
    ("tf32", "tf32", 2, "tf32", 2),
    ("f8f6f4", "e4m3", 0, "e5m2", 1),
]


@pytest.mark.parametrize("fed", [False, True], ids=["shared", "fed"])
@pytest.mark.parametrize("kind, one, i, other, j", PLAIN, ids=[f"{p[0]}-{p[1]}" for p in PLAIN])
def test_a_product_adds_to_what_is_in_tensor_memory(kind, one, i, other, j, fed):
    (a_raw, a), (b_raw, b) = random(one, 128, 0), random(other, 16, 1)
    a_at, counts = "[%r1 + 24]" if fed else "%rd5", Counts()
    found = executed(
        image(a_raw, b_raw),
        counts=counts,
        FEED=FEED if fed else "",
        KIND=f"{kind} [%r1], {a_at}, %rd6, %r9, 1",
        INSTRUCTION=M128 | N16 | 1 << 4 | i << 7 | j << 10,
    )
    assert np.array_equal(found, (a @ b.T + 1).astype(np.float32))
    assert counts.products == 128 * 16 * a.shape[1]


def test_a_product_that_does_not_add_needs_nothing_before_it():
    (a_raw, a), (b_raw, b) = random("bf16", 128, 0), random("bf16", 16, 1)
    names = {"CLEAR": "", "KIND": NAMES["KIND"].replace(", 1", ", %p2")}
    assert np.array_equal(executed(image(a_raw, b_raw), **names), (a @ b.T).astype(np.float32))


def test_rows_of_64_are_in_half_of_the_lanes():
    (a_raw, a), (b_raw, b) = random("bf16", 64, 0), random("bf16", 16, 1)
    expected = np.ones((4, 32, 16))  # what was there
    expected[:, :16] += (a @ b.T).reshape(4, 16, 16)
    found = executed(image(a_raw, b_raw), INSTRUCTION=BF16 - M128 + (4 << 24))
    assert np.array_equal(found, expected.reshape(128, 16).astype(np.float32))


def test_sums_in_float16_take_half_of_a_column():
    (a_raw, a), (b_raw, b) = random("f16", 128, 0), random("f16", 16, 1)
    clear = "mov.b32 %r10, 0x3C00; " + CLEAR
    found = executed(image(a_raw, b_raw), CLEAR=clear, INSTRUCTION=M128 | N16)
    expected = (a @ b.T + 1).astype(np.float32).astype(np.float16)
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint16))


# Kind, format and its code, scales of a row, the first scales' bytes, powers of two.
SCALED = [
    ("mxf8f6f4.block_scale.block32", "e4m3", 0, 1, (0, 0), True),
    ("mxf8f6f4.block_scale.scale_vec::1X", "e5m2", 1, 1, (3, 1), True),
    ("mxf4.block_scale.block32", "e2m1", 1, 2, (2, 0), True),
    ("mxf4nvf4.block_scale.block16", "e2m1", 1, 4, (0, 0), False),
    ("mxf4nvf4.block_scale.scale_vec::4X", "e2m1", 1, 4, (0, 0), True),
    ("mxf4nvf4.block_scale.scale_vec::2X", "e2m1", 1, 2, (0, 2), False),
]


@pytest.mark.parametrize("kind, one, code, count, first, power", SCALED, ids=[s[0] for s in SCALED])
def test_scales_that_were_copied_multiply_rows(kind, one, code, count, first, power):
    (a_raw, a), (b_raw, b) = random(one, 128, 0), random(one, 16, 1)
    g = np.random.default_rng(0)
    scales, factors = [], []
    for rows, start in ((128, first[0]), (16, first[1])):
        raw = g.integers(*((120, 134) if power else (1, 127)), (rows, 4), np.uint8)
        scales.append(raw)
        used = torch.from_numpy(raw[:, start : start + count].copy())
        if power:
            numbers = np.exp2(used.double().numpy() - 127)
        else:
            numbers = used.view(torch.float8_e4m3fn).double().numpy()
        factors.append(np.repeat(numbers, a.shape[1] // count, 1))
    found = executed(
        image(a_raw, b_raw, scales),
        SCALES=COPIES,
        KIND=f"{kind} [%r1], %rd5, %rd6, %r9, [%r14], [%r15], 1",
        INSTRUCTION=M128
        | N16
        | code << 7
        | code << 10
        | power << 23
        | first[0] << 29
        | first[1] << 4,
    )
    expected = (a * factors[0]) @ (b * factors[1]).T + 1
    assert np.array_equal(found, expected.astype(np.float32))


@pytest.mark.parametrize("shape", ["16x256b", "16x32bx2", "pack"])
def test_threads_get_the_elements_of_a_shape(shape):
    (a_raw, a), (b_raw, b) = random("bf16", 128, 0), random("bf16", 16, 1)
    halves = [", ".join(f"%r{i + 8 * h}" for i in range(20, 28)) for h in range(2)]
    load = {
        "16x256b": [f"16x256b.x2.b32 {{{halves[h]}}}, [%r7 + {h << 20}];" for h in range(2)],
        # Threads 16 to 31 are 8 columns farther: lanes 0 to 15, then 16 to 31.
        "16x32bx2": [f"16x32bx2.x8.b32 {{{halves[h]}}}, [%r7 + {h << 20}], 8;" for h in range(2)],
        "pack": [f"32x32b.x8.pack::16b.b32 {{{h}}}, [%r7];" for h in halves],
    }[shape]
    found = executed(
        image(a_raw, b_raw), LOAD="".join(f"tcgen05.ld.sync.aligned.{part}" for part in load)
    )
    d = (a @ b.T + 1).astype(np.float32).reshape(4, 32, 16)
    t, i = np.arange(32)[:, None], np.arange(16)
    if shape == "pack":
        low = (d.view(np.uint32) & 0xFFFF).reshape(4, 32, 8, 2)
        expected = np.tile(low[..., 0] | low[..., 1] << 16, 2)
        assert np.array_equal(found.view(np.uint32), expected.reshape(128, 16))
        return
    half, i = i // 8 * 16, i % 8
    if shape == "16x256b":  # as an accumulator of mma
        expected = d[:, half + t // 4 + i // 2 % 2 * 8, t % 4 * 2 + i % 2 + i // 4 * 8]
    else:
        expected = d[:, half + t % 16, i + t // 16 * 8]
    assert np.array_equal(found, expected.reshape(128, 16))


WAIT = """again:
    mbarrier.try_wait.parity.shared::cta.b64 %p4, [place+8], 0;
    @!%p4 bra.uni again;"""
FREE = "@%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;"
ALLOCATE = "@%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], 32;"
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r7{}], {{%r10}};"
BUSY = "writes tensor memory that tensor cores may still access"
# What was planted: (text, its replacement, kind, message).
PLANTED = {
    "no wait for the commit": (WAIT, "", "race", "nobody has waited for a tcgen05.commit"),
    "no commit": ("@%p1 tcgen05.commit", "@%p2 tcgen05.commit", "barrier", "at an mbarrier"),
    "a wait of one warp": (
        WAIT,
        f"@!%p0 bra $late; {WAIT} $late:",
        "race",
        "the tensor cores wrote, with no barrier between",
    ),
    "a factor overwritten": (
        WAIT,
        f"st.shared.b32 [%r4], %r10; {WAIT}",
        "race",
        "writes what tensor cores may still be reading",
    ),
    "a sum overwritten": (WAIT, STORE.format("") + WAIT, "race", BUSY),
    "a factor in tensor memory overwritten": (WAIT, STORE.format("+25") + WAIT, "race", BUSY),
    "no fence": ("fence.proxy.async.shared::cta;", "", "race", "without a fence between"),
    "nothing to add to": (CLEAR, "", "uninitialized", "tensor memory that nothing has written"),
    "columns not allocated": (LOAD, LOAD.replace("[%r7]", "[%r7+32]"), "bounds", "allocated: "),
    "columns that are too many": ("[place], 32", "[place], 48", "bounds", "48 columns"),
    "freed before it is read": (
        LOAD,
        f"bar.sync 0; {FREE} bar.sync 0; {LOAD}",
        "bounds",
        "allocated: none",
    ),
    "freed while it is read": (
        "tcgen05.wait::ld.sync.aligned;",
        "",
        "race",
        "frees .* tcgen05.ld may still be reading",
    ),
    "freed twice": (FREE, FREE * 2, "bounds", "were not allocated as one"),
    "not freed": (FREE, "", "barrier", "no tcgen05.dealloc"),
    "allocated without the permit": (
        "ld.shared.b32 %r1",
        f"{ALLOCATE} ld.shared.b32 %r1",
        "barrier",
        "after the permit was given up",
    ),
    "no wait for a store": (
        "tcgen05.wait::st.sync.aligned;",
        "",
        "race",
        "without a tcgen05.wait::st",
    ),
    "no barrier after a store": (
        "bar.sync 0;\n    shr",
        "shr",
        "race",
        "tensor memory that another warp wrote",
    ),
    "lanes of another warp": (
        "and.b32 %r5, %r0, 96;",
        "mov.b32 %r5, 0;",
        "bounds",
        "warp 1 reaches lanes 32 to 63",
    ),
    "no base": ("f16 [%r1]", "f16 [%r3]", "bounds", "writes columns 0 to 15 of tensor memory"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name):
    old, new, kind, message = PLANTED[name]
    (a_raw, _), (b_raw, _) = random("bf16", 128, 0), random("bf16", 16, 1)

    def change(text):
        assert old in text
        return text.replace(old, new)

    names = {"FEED": FEED, "KIND": "f16 [%r1], [%r1 + 24], %rd6, %r9, 1"}
    with pytest.raises(Fault, match=message) as found:
        executed(image(a_raw, b_raw), change, **names)
    assert found.value.kind == kind
    assert found.value.line == "kernels.py:7" or name == "no commit"  # of all threads


def test_what_is_not_there_is_named():
    (a_raw, _), (b_raw, _) = random("bf16", 128, 0), random("bf16", 16, 1)
    given = image(a_raw, b_raw)
    for old, new in (
        ("tcgen05.mma.cta_group::1", "tcgen05.mma.cta_group::2"),
        ("tcgen05.mma.cta_group::1", "tcgen05.mma.ws.cta_group::1"),
        ("tcgen05.commit", "tcgen05.shift"),
    ):
        with pytest.raises(Unsupported, match=rf"no instruction `@%p1 {re.escape(new)}"):
            executed(given, lambda text, old=old, new=new: text.replace(old, new))
    for names in (
        {"INSTRUCTION": BF16 | 1 << 2},  # sparse
        {"INSTRUCTION": BF16 | 1 << 13},  # -a
        {"DESCRIBED": DESCRIBED | 1 << 61},  # a swizzle of units of 32 bytes
        {"KIND": "i8 [%r1], %rd5, %rd6, %r9, 1"},
    ):
        with pytest.raises(
            Unsupported, match=r"no instruction `@%p1 tcgen05\.mma\..*kernels\.py:7"
        ):
            executed(given, **names)
