"""Single instructions of the emulator against NumPy: those of other people's kernels, atomics, and
products of tensor cores in TF32.
"""

import numpy as np
import pytest
import torch

from tilewright_lab.emulator import Counts, Kernel, Memory
from tilewright_lab.emulator.faults import Fault, Unsupported

KERNEL = """
.file 1 "kernels.py"
.visible .entry one(
    .param .u64 a_ptr,
    .param .u64 b_ptr,
    .param .u64 c_ptr,
    .param .u64 d_ptr
)
.reqntid {threads}
{{
    .reg .pred %p<9>;
    .reg .b32 %r<40>;
    .reg .b64 %rd<40>;
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %rd0, %r0, 8;
    ld.param.b64 %rd1, [a_ptr];
    ld.param.b64 %rd2, [b_ptr];
    ld.param.b64 %rd3, [c_ptr];
    ld.param.b64 %rd4, [d_ptr];
    add.s64 %rd5, %rd1, %rd0;
    add.s64 %rd6, %rd2, %rd0;
    add.s64 %rd7, %rd3, %rd0;
    add.s64 %rd8, %rd4, %rd0;
    .loc 1 7 3
    {body}
    ret;
}}
"""
LOAD = """
    ld.global.b{bits} {r}11, [%rd5];
    ld.global.b{bits} {r}12, [%rd6];
    ld.global.b{bits} {r}13, [%rd7];
"""


def executed(body, a, b, c, threads=32):
    """What the threads wrote: 64 bits each."""
    memory, out = Memory(), torch.full((threads,), -1)
    given = [torch.from_numpy(np.ascontiguousarray(x).view(np.int64)) for x in (a, b, c)]
    values = [memory.put(t) for t in (*given, out)]
    Kernel(KERNEL.format(body=body, threads=threads)).run(memory, values, (1, 1, 1))
    memory.take_back()
    return out.numpy()


def numbers(seed, kind):
    """32 numbers, each in 64 bits: any bits, or floating point of all sizes with specials."""
    g = np.random.default_rng(seed)
    if kind in ("b32", "b64"):
        x = g.integers(0, 1 << 64, 32, np.uint64)
        return x if kind == "b64" else x & np.uint64(0xFFFFFFFF)
    x = g.standard_normal(32) * 10.0 ** g.integers(-3, 12, 32)
    x[:9] = 0.0, -0.0, 0.5, 1.5, -2.5, np.inf, -np.inf, np.nan, -0.3
    if kind == "f64":
        return x.view(np.uint64)
    return x.astype(np.float32).view(np.uint32).astype(np.uint64)


def f32(x):
    return x.astype(np.uint32).view(np.float32)


def f64(x):
    return x.view(np.float64)


def bits32(x):
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def clipped(x, low, high, rounding=np.trunc):
    return [0 if np.isnan(v) else int(min(max(rounding(v), low), high)) for v in x.astype(object)]


def reversed_bits(x):
    return np.array([int(f"{int(v):032b}"[::-1], 2) for v in x], np.uint32)


def s32(x):
    return x.astype(np.int32)


def s64(x):
    return x.view(np.int64)


def high(a, b):
    """The upper halves of products."""
    found = [(int(x) * int(y) >> 64) % 2**64 for x, y in zip(a, b, strict=True)]
    return np.array(found, np.uint64)


FIELD = np.uint64(0x7FF << 5)
LESS64 = "setp.lt.f64 %p1, %rd11, %rd12; selp.b64 %rd14, 5, 6, %p1"
LESS_AND = (
    "setp.ge.s32 %p2, %r12, 0; setp.lt.and.s32 %p1, %r11, %r12, %p2; selp.b32 %r14, 5, 6, %p1"
)
BALLOT = "setp.ge.s32 %p2, %r11, 0; vote.sync.ballot.b32 %r14, %p2, -1"
# instruction (destination, then a, b, c), type of the operands, bits of the result, truth
CASES = [
    ("add.f64 %rd14, %rd11, %rd12", "f64", 64, lambda a, b, c: f64(a) + f64(b)),
    ("mul.rn.f64 %rd14, %rd11, %rd12", "f64", 64, lambda a, b, c: f64(a) * f64(b)),
    ("div.rn.f64 %rd14, %rd11, %rd12", "f64", 64, lambda a, b, c: f64(a) / f64(b)),
    ("max.f64 %rd14, %rd11, %rd12", "f64", 64, lambda a, b, c: np.fmax(f64(a), f64(b))),
    ("add.f64 %rd14, %rd11, 0d3FF8000000000000", "f64", 64, lambda a, b, c: f64(a) + 1.5),
    ("cvt.f64.f32 %rd14, %r11", "f32", 64, lambda a, b, c: f32(a).astype(np.float64)),
    ("cvt.rn.f64.s32 %rd14, %r11", "b32", 64, lambda a, b, c: a.astype(np.int32).astype(np.float64)),
    ("cvt.rn.f32.f64 %r14, %rd11", "f64", 32, lambda a, b, c: bits32(f64(a).astype(np.float32))),
    ("cvt.rni.f32.f32 %r14, %r11", "f32", 32, lambda a, b, c: bits32(np.rint(f32(a)))),
    ("cvt.rmi.f32.f32 %r14, %r11", "f32", 32, lambda a, b, c: bits32(np.floor(f32(a)))),
    ("cvt.rpi.f32.f32 %r14, %r11", "f32", 32, lambda a, b, c: bits32(np.ceil(f32(a)))),
    ("cvt.rni.s32.f32 %r14, %r11", "f32", 32, lambda a, b, c: clipped(f32(a), -(2**31), 2**31 - 1, np.rint)),
    ("cvt.rzi.s64.f32 %rd14, %r11", "f32", 64, lambda a, b, c: clipped(f32(a), -(2**63), 2**63 - 1)),
    ("cvt.rmi.u32.f32 %r14, %r11", "f32", 32, lambda a, b, c: clipped(f32(a), 0, 2**32 - 1, np.floor)),
    ("cvt.rna.tf32.f32 %r14, %r11", "b32", 32, lambda a, b, c: (a + 0x1000).astype(np.uint32) & 0xFFFFE000),
    ("copysign.f32 %r14, %r11, %r12", "f32", 32, lambda a, b, c: bits32(np.copysign(f32(b), f32(a)))),
    ("rsqrt.approx.f32 %r14, %r11", "f32", 32, lambda a, b, c: bits32(1 / np.sqrt(f32(a).astype(np.float64)))),
    ("tanh.approx.f32 %r14, %r11", "f32", 32, lambda a, b, c: bits32(np.tanh(f32(a).astype(np.float64)))),
    ("sin.approx.f32 %r14, %r11", "f32", 32, lambda a, b, c: bits32(np.sin(f32(a)))),
    ("lop3.b32 %r14, %r11, %r12, %r13, 0xE8", "b32", 32, lambda a, b, c: a & b | b & c | a & c),
    ("lop3.b32 %r14, %r11, %r12, %r13, 0x1E", "b32", 32, lambda a, b, c: a ^ (b | c)),
    ("brev.b32 %r14, %r11", "b32", 32, lambda a, b, c: reversed_bits(a)),
    ("clz.b32 %r14, %r11", "b32", 32, lambda a, b, c: [32 - int(v).bit_length() for v in a]),
    ("bfi.b32 %r14, %r11, %r12, 5, 11", "b32", 32, lambda a, b, c: b & ~FIELD | a << 5 & FIELD),
    ("mul.hi.u64 %rd14, %rd11, %rd12", "b64", 64, lambda a, b, c: high(a, b)),
    ("mul.hi.s64 %rd14, %rd11, %rd12", "b64", 64, lambda a, b, c: high(s64(a), s64(b))),
    (LESS64, "f64", 64, lambda a, b, c: np.where(f64(a) < f64(b), 5, 6)),
    (LESS_AND, "b32", 32, lambda a, b, c: np.where((s32(a) < s32(b)) & (s32(b) >= 0), 5, 6)),
    (BALLOT, "b32", 32, lambda a, b, c: [sum(1 << i for i in np.flatnonzero(s32(a) >= 0))] * 32),
    ("membar.gl; fence.acq_rel.gpu; mov.b32 %r14, %r11", "b32", 32, lambda a, b, c: a),
]  # fmt: skip


@pytest.mark.parametrize("instruction, kind, bits, truth", CASES, ids=[c[0][:28] for c in CASES])
def test_an_instruction_computes_what_numpy_does(instruction, kind, bits, truth):
    a, b, c = (numbers(seed, kind) for seed in range(3))
    wide = "64" in kind
    load = LOAD.format(bits=64 if wide else 32, r="%rd" if wide else "%r")
    store = f"; st.global.b{bits} [%rd8], {'%rd14' if bits == 64 else '%r14'};"
    with np.errstate(all="ignore"):
        expected = np.asarray(truth(a, b, c))
    if expected.dtype == object:  # integers beyond 64 bits' sign
        expected = np.array([int(v) % 2**64 for v in expected], np.uint64)
    found = executed(load + instruction + store, a, b, c)
    if expected.dtype == np.float64:
        assert np.array_equal(found.view(np.float64), expected, equal_nan=True)
        return
    found, expected = (v.astype(np.int64).astype(f"u{bits // 8}") for v in (found, expected))
    if kind[0] == "f" and bits == 32 and ".s32" not in instruction and ".u32" not in instruction:
        assert np.array_equal(found.view(np.float32), expected.view(np.float32), equal_nan=True)
    else:
        assert np.array_equal(found, expected)


def test_threads_take_turns_at_atomics():
    """Sums, maxima and compare-and-swap of 64 threads on one place; each sees another old value."""
    a = np.arange(64, dtype=np.uint64) + 1
    zero = np.zeros(64, np.uint64)
    body = "ld.global.b32 %r11, [%rd5]; atom.global.gpu.acq_rel.add.u32 %r12, [%rd2], %r11; "
    body += "atom.global.gpu.relaxed.max.s32 %r13, [%rd3], %r11; st.global.b32 [%rd8], %r12;"
    memory, out, total, most = Memory(), torch.zeros(64), torch.zeros(64), torch.zeros(64)
    out, total, most = out.long(), total.long(), most.long()
    given = torch.from_numpy(a.view(np.int64).copy())
    values = [memory.put(t) for t in (given, total, most, out)]
    Kernel(KERNEL.format(body=body, threads=64)).run(memory, values, (1, 1, 1))
    memory.take_back()
    assert total[0] == 64 * 65 // 2 and most[0] == 64
    assert np.array_equal(out.numpy(), np.cumsum(a) - a) and not zero.any()
    # In floating point, two of a vector, and in bfloat16, without a result.
    body = (
        "ld.global.b32 %r11, [%rd5]; red.global.gpu.relaxed.add.v2.f32 [%rd2], {%r11, %r11}; "
        "mov.b32 %r12, 0x3F803F80; red.global.gpu.relaxed.add.noftz.bf16x2 [%rd3], %r12;"
    )
    memory = Memory()
    given, total, most = (
        torch.full((64,), 0.25).view(torch.int32),
        torch.zeros(128),
        torch.zeros(64),
    )
    given = torch.stack((given, given), 1).view(torch.int64).flatten()
    values = [memory.put(t) for t in (given, total, most, out)]
    Kernel(KERNEL.format(body=body, threads=64)).run(memory, values, (1, 1, 1))
    memory.take_back()
    assert total[:3].tolist() == [16.0, 16.0, 0.0]
    assert most.view(torch.bfloat16)[:3].tolist() == [64.0, 64.0, 0.0]


def test_a_plain_access_beside_an_atomic_one_is_a_race():
    a = np.zeros(64, np.uint64)
    for body in (
        "atom.global.gpu.relaxed.add.u32 %r12, [%rd2], 1; ld.global.b32 %r11, [%rd2];",
        "ld.global.b32 %r11, [%rd2]; atom.global.gpu.relaxed.add.u32 %r12, [%rd2], 1;",
    ):
        with pytest.raises(Fault, match="another thread of the program") as found:
            executed(body, a, a, a, threads=64)
        assert found.value.kind == "race" and found.value.line == "kernels.py:7"


def test_a_barrier_orders_accesses_of_one_block_and_not_of_two():
    write = "mov.u32 %r9, 3; st.global.b32 [%rd2], %r9;"
    swap = "xor.b32 %r8, %r0, 33; mul.wide.u32 %rd9, %r8, 8; add.s64 %rd10, %rd4, %rd9; "
    other = f"{swap} st.global.b32 [%rd8], %r0; {{}} ld.global.b32 %r10, [%rd10];"
    a = np.zeros(64, np.uint64)
    executed(other.format("bar.sync 0;"), a, a, a, threads=64)
    with pytest.raises(Fault, match=r"reads a tensor.* writes in this launch"):
        executed(other.format(""), a, a, a, threads=64)
    # All threads and blocks write the same, or what they are.
    for value, wrong in (("3", False), ("%r0", True)):
        body = write.replace("mov.u32 %r9, 3", f"mov.u32 %r9, {value}")
        kernel, memory = Kernel(KERNEL.format(body=body, threads=64)), Memory()
        values = [memory.put(torch.zeros(64)) for _ in range(4)]
        if wrong:
            with pytest.raises(Fault, match="write different values"):
                kernel.run(memory, values, (2, 1, 1))
        else:
            kernel.run(memory, values, (2, 1, 1))
    body = "mov.u32 %r9, %ctaid.x; @%p1 bra $END; st.global.b32 [%rd2], %r9; $END:"
    kernel, memory = (
        Kernel(KERNEL.format(body="setp.ne.b32 %p1, %r0, 0; " + body, threads=64)),
        Memory(),
    )
    values = [memory.put(torch.zeros(64)) for _ in range(4)]
    with pytest.raises(Fault, match="which block 0 of the grid writes another value to"):
        kernel.run(memory, values, (2, 1, 1))


def test_a_launch_goes_on_after_a_race_that_is_tolerated():
    """A thread reads what one of the other warp wrote to shared memory, with no barrier between."""
    body = (
        ".shared .align 16 .b8 buffer[256]; mov.b32 %r1, buffer; shl.b32 %r2, %r0, 2; "
        "add.s32 %r3, %r1, %r2; st.shared.b32 [%r3], %r0; xor.b32 %r4, %r2, 132; "
        "add.s32 %r5, %r1, %r4; ld.shared.b32 %r6, [%r5]; st.global.b32 [%rd8], %r6;"
    )
    kernel, memory = Kernel(KERNEL.format(body=body, threads=64)), Memory()
    memory.tolerated = frozenset(["race"])
    out = torch.zeros(64).long()
    kernel.run(memory, [memory.put(t) for t in (*torch.zeros(3, 64), out)], (1, 1, 1))
    memory.take_back()
    assert out.tolist() == [i ^ 33 for i in range(64)]
    [(place, note)] = memory.notes.items()
    assert place == ("race", "kernels.py:7") and note.what.startswith("reads shared memory that")


def test_a_product_in_tf32_is_that_of_truncated_numbers():
    g = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(s, generator=g) for s in ((16, 8), (8, 8), (16, 8)))
    lane = torch.arange(32)
    row, k = lane // 4, lane % 4
    regs = [a[row, k], a[row + 8, k], a[row, k + 4], a[row + 8, k + 4], b[k, row], b[k + 4, row]]
    sums = [c[row + 8 * (i // 2), 2 * k + i % 2] for i in range(4)]
    memory, out = Memory(), torch.zeros(32, 4)
    given = torch.stack(regs + sums, 1).contiguous()
    body = "mul.wide.u32 %rd9, %r0, 40; add.s64 %rd10, %rd1, %rd9; "
    body += "".join(f"ld.global.b32 %r{20 + i}, [%rd10+{4 * i}]; " for i in range(10))
    body += (
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r30, %r31, %r32, %r33}, "
        "{%r20, %r21, %r22, %r23}, {%r24, %r25}, {%r26, %r27, %r28, %r29}; "
        "mul.wide.u32 %rd9, %r0, 16; add.s64 %rd10, %rd4, %rd9; "
        "st.global.v4.b32 [%rd10], {%r30, %r31, %r32, %r33};"
    )
    values = [memory.put(t) for t in (given, torch.zeros(1), torch.zeros(1), out)]
    counts = Counts()
    Kernel(KERNEL.format(body=body, threads=32)).run(memory, values, (1, 1, 1), counts=counts)
    memory.take_back()
    low = [(t.view(torch.int32) & ~0x1FFF).view(torch.float32).double() for t in (a, b)]
    expected = (low[0] @ low[1] + c).float()
    found = torch.empty(16, 8)
    for i in range(4):
        found[row + 8 * (i // 2), 2 * k + i % 2] = out[:, i]
    assert torch.equal(found, expected) and counts.products == 16 * 8 * 8


def test_labels_of_inline_assembly_are_its_own():
    """Two of one text, which jump forward: the first does, the second does not."""
    assembly = """
    // begin inline asm
    {
    @%p1 bra.uni skip;
    add.s32 %r14, %r14, 1;
    skip:
    }
    // end inline asm
    """
    body = f"mov.b32 %r14, 5; setp.eq.u32 %p1, %r14, 5; {assembly} not.pred %p1, %p1; {assembly}"
    a = np.zeros(32, np.uint64)
    found = executed(f"{body} st.global.b32 [%rd8], %r14;", a, a, a)
    assert (found.astype(np.int32) == 6).all()


def test_what_is_not_there_is_named_with_its_line():
    a = np.zeros(32, np.uint64)
    with pytest.raises(Unsupported, match=r"no instruction `wmma\.load .*kernels\.py:7"):
        executed("wmma.load %r11, [%rd5];", a, a, a)
