"""Tests specific to grouped_gemm, and the fused launches of a mixture-of-experts MLP; parity with
the eager twin is in test_contract.py.
"""

import itertools
import pathlib
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICE, skip_unless_usable, threads

from tilewright.bench import contract
from tilewright.core.registry import FLOATS, short
from tilewright.ops import grouped_gemm
from tilewright.ops.moe.grouped_gemm import GROUPED_GEMM

ROOT = pathlib.Path(__file__).parents[2]
NAMES = [n for n in GROUPED_GEMM.names() if n != "eager"]
EVERY = pytest.mark.parametrize("name", NAMES)
BIT16 = (
    torch.bfloat16 if DEVICE == "cuda" else torch.float16
)  # the interpreter truncates to bfloat16


def made(counts, tail, n, k, dtype=torch.float32):
    """x, weight, offsets and dy, with NaN in the tail."""
    ends = torch.tensor(counts).cumsum(0)
    rows = int(ends[-1]) + tail
    x, dy = (torch.randn(rows, columns, device=DEVICE).to(dtype) for columns in (k, n))
    x[rows - tail :] = dy[rows - tail :] = float("nan")
    weight = torch.randn(len(counts), n, k, device=DEVICE).to(dtype)
    return x, weight, ends.to(torch.int32).to(DEVICE), dy


def step(name, x, weight, offsets, dy):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = grouped_gemm(x, weight, offsets, implementation=name)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]


def truth(x, weight, offsets, dy):
    """In float64, by masks rather than slices: independent of the eager twin."""
    row = torch.arange(x.shape[0], device=x.device)
    expert = torch.searchsorted(offsets, row.to(torch.int32), right=True)
    live = (expert < len(offsets))[:, None]
    x, dy = x.double().masked_fill(~live, 0), dy.double().masked_fill(~live, 0)
    masks = [(expert == e)[:, None].double() for e in range(len(offsets))]
    weight = weight.double()
    return [
        sum(m * (x @ w.t()) for m, w in zip(masks, weight, strict=True)),
        sum(m * (dy @ w) for m, w in zip(masks, weight, strict=True)),
        torch.stack([(m * dy).t() @ x for m in masks]),
    ]


def close(found, expected, eps):
    for f, e in zip(found, expected, strict=True):
        error, where = contract.error(f, e)
        assert error <= eps, (error, where)


@pytest.mark.parametrize("name", GROUPED_GEMM.names())
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_equals_a_definition_by_masks(name, dtype):
    skip_unless_usable(GROUPED_GEMM, name, dtype)
    inputs = made((5, 0, 40, 1), 6, 20, 36, dtype)
    # One rounding, half an eps of the element; float32: sums of 40 products.
    eps = (8 if dtype == torch.float32 else 1) * torch.finfo(dtype).eps
    close(step(name, *inputs), truth(*inputs), eps)


def test_float64_is_exact():
    inputs = [t.double() if t.is_floating_point() else t for t in made((3, 0, 5), 2, 7, 9)]
    close(step("eager", *inputs), truth(*inputs), 1e-14)


@EVERY
def test_infinite_weights_stay_with_their_expert(name):
    """A tile past a weight's edge must not read the next expert's: 0 * inf is NaN."""
    for dtype in (torch.float32, BIT16):
        if GROUPED_GEMM.implementation(name).why_not(DEVICE, dtype):
            continue
        for n, k in ((16, 48), (7, 5)):
            x, weight, offsets, dy = made((4, 3, 2), 1, n, k, dtype)
            weight[1] = float("inf")
            for f in step(name, x, weight, offsets, dy)[:2]:
                assert f[[0, 1, 2, 3, 7, 8, 9]].isfinite().all() and not f[4:7].isfinite().any()


@EVERY
def test_strides(name):
    """The same bits as contiguous inputs, except that torch may choose another kernel for them. On
    CUDA nothing copies offsets to check their values.
    """
    skip_unless_usable(GROUPED_GEMM, name, torch.float32)
    x, weight, offsets, dy = (t.nan_to_num(1) for t in made((5, 0, 12), 2, 8, 12))
    columns = torch.stack((offsets, torch.zeros_like(offsets)), 1)
    for given in (
        (torch.cat((x, x), 1)[:, :12], weight, offsets, dy),
        (*(t.repeat_interleave(2, -1)[..., ::2] for t in (x, weight, offsets, dy)),),
        (x, weight.mT.contiguous().mT, columns[:, 0], dy),
        (x[:1].expand(19, 12), weight, offsets, dy),
    ):
        expected = step(name, *(t.contiguous() for t in given))
        for f, e in zip(step(name, *given), expected, strict=True):
            exact = name in ("triton", "cpp")
            torch.testing.assert_close(f, e, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5)
            assert f.is_contiguous() or f.shape == weight.shape


@EVERY
def test_same_bits_again_and_whatever_the_neighbors(name):
    """An expert's results do not depend on the other experts' rows, nor, with this library's own
    products, on the number of threads.
    """
    skip_unless_usable(GROUPED_GEMM, name, torch.float32)
    x, weight, offsets, dy = made((7, 60, 3), 0, 12, 20)
    with threads(2):
        whole = step(name, x, weight, offsets, dy)
    with threads(1):
        again = step(name, x, weight, offsets, dy)
        own_rows = torch.tensor([60], dtype=torch.int32, device=DEVICE)
        alone = step(name, x[7:67], weight[1:2], own_rows, dy[7:67])
    if name in ("triton", "cpp"):
        own = name == "triton" or torch.backends.cpu.get_cpu_capability() == "AVX512"  # else ATen's
        for a, b in zip(whole, again, strict=True):
            assert torch.equal(a, b) if own else torch.allclose(a, b, rtol=1e-5, atol=1e-5)
        assert torch.equal(again[0][7:67], alone[0]) and torch.equal(again[2][1:2], alone[2])
    else:
        close([whole[0][7:67], whole[2][1:2]], [alone[0].double(), alone[2].double()], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("n, k", [(200, 70), (65, 300), (130, 1101), (1102, 33)])
def test_cpp_in_every_regime(dtype, n, k):
    """Experts of 1 to 250 rows cover each of its kernels; sizes are not multiples of blocks, and
    some sums span many panels.
    """
    skip_unless_usable(GROUPED_GEMM, "cpp", dtype)
    counts = (1, 2, 3, 4, 5, 23, 31, 32, 47, 48, 50, 0, 130, 250)
    inputs = made(counts, 3, n, k, dtype)
    eps = 8e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    close(step("cpp", *inputs), truth(*inputs), eps)


def test_cpp_operators_themselves_check():
    skip_unless_usable(GROUPED_GEMM, "cpp", torch.float32)
    GROUPED_GEMM.resolve("cpp", "cpu")
    ops = torch.ops.tilewright
    forward, of_weight = ops.grouped_gemm_cpp_forward, ops.grouped_gemm_cpp_backward_weight
    x, weight, offsets, dy = made((2, 3), 0, 4, 6)
    unordered = "offsets must not decrease and lie within 0 and 5"
    for wrong in (torch.tensor(ends, dtype=torch.int32) for ends in ([3, 2], [2, 6], [-1, 5])):
        for fn, args in (
            (forward, (x, weight)),
            (ops.grouped_gemm_cpp_backward_x, (dy, weight)),
            (of_weight, (dy, x)),
        ):
            with pytest.raises(RuntimeError, match=unordered):
                fn(*args, wrong)
    for fn, args, message in (
        (forward, (dy, weight), "weight must have x's columns"),
        (forward, (x, weight[:1]), "weight must have as many experts as offsets"),
        (forward, (x, weight.bfloat16()), "of the rows' dtype"),
        (of_weight, (dy[:3], x), "dy must have x's rows and dtype"),
    ):
        with pytest.raises(RuntimeError, match=message):
            fn(*args, offsets)


X, W, O = torch.randn(5, 6), torch.randn(2, 4, 6), torch.tensor([2, 5], dtype=torch.int32)


@pytest.mark.parametrize(
    "weight, offsets, message",
    [
        (W[:0], O[:0], r"weight must have shape \[E, N, K\] with E >= 1, got \[0, 4, 6\]"),
        (W[..., :5], O, r"weight must have shape \[E, N, K\], where K = 6, got \[2, 4, 5\]"),
        (W, O[:1], r"offsets must have shape \[E\], where E = 2, got \[1\]"),
        (W, O.flip(0), "not decrease and lie within 0 and 5, .*; got 2 at index 1 after 5"),
        (W, O + 1, "got 6 at index 1 after 3"),
        (W, O - 3, "got -1 at index 0$"),
    ],
)
def test_bad_input_is_one_clear_error(weight, offsets, message):
    with pytest.raises(ValueError, match=message):
        grouped_gemm(X, weight, offsets)


def test_compiled_code_checks_offsets_when_it_runs():
    compiled = torch.compile(grouped_gemm, fullgraph=True, backend="aot_eager")
    assert compiled(X, W, O).shape == (5, 4)
    with pytest.raises(ValueError, match="got 6 at index 1"):
        compiled(X, W, O + 1)


def test_reasons_not_to_run():
    why = {n: GROUPED_GEMM.implementation(n).why_not for n in NAMES}
    assert "CPU tensors, not cuda" in why["cpp"]("cuda")
    assert "not meta" in why["native"]("meta")
    if DEVICE == "cpu":
        assert why["native"]("cpu", torch.float16) is None
        assert why["native"]("cuda") == "no CUDA device"
        assert "quack" in why["quack"]("cuda") or "CUDA" in why["quack"]("cuda")


def test_quack_is_given_the_ends_of_the_experts_and_does_not_tune(monkeypatch):
    """Its kernels need a GPU: a stand-in takes its arguments and leaves the same unwritten."""

    def gemm(a, b, cu_seqlens_m=None, cu_seqlens_k=None, tuned=True):
        assert not tuned and (cu_seqlens_m is None) != (cu_seqlens_k is None)
        if cu_seqlens_k is not None:
            ends = itertools.pairwise(cu_seqlens_k.tolist())
            return torch.stack([a[:, i:j] @ b[i:j] for i, j in ends])
        y = a.new_full((a.shape[0], b.shape[2]), float("nan"))
        for w, (i, j) in zip(b, itertools.pairwise(cu_seqlens_m.tolist()), strict=True):
            y[i:j] = a[i:j] @ w
        return y

    module, quack = (
        sys.modules["tilewright.ops.moe.grouped_gemm"],
        ModuleType("quack.gemm_interface"),
    )
    quack.gemm = gemm
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", quack)
    monkeypatch.setattr(module.Fused, "define", lambda name, launches: launches)
    x, weight, offsets, dy = made((3, 0, 2), 2, 8, 12)
    library = module._quack.__wrapped__()
    found = [
        library.forward(x, weight, offsets),
        library.backward_x(dy, weight, offsets),
        library.backward_weight(dy, x, offsets),
    ]
    close(found, truth(x, weight, offsets, dy), 1e-5)


# ---- the Triton launches of a mixture-of-experts MLP: in the interpreter, or on a GPU


def routed(tokens, k, experts, seed=0):
    """expert_index [T, K] with sentinels, and offsets, slots, position by a stable sort."""
    g = torch.Generator().manual_seed(seed)
    index = torch.randint(0, experts + 1, (tokens, k), generator=g)
    index[index == 1] = 0  # an expert without rows
    order = index.flatten().argsort(stable=True)
    offsets = torch.bincount(index.flatten(), minlength=experts + 1)[:experts].cumsum(0)
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order))
    position = position.view(tokens, k).masked_fill(index == experts, -1)
    return [index, *(t.to(torch.int32).to(DEVICE) for t in (offsets, order, position))]


def kernels():
    skip_unless_usable(GROUPED_GEMM, "triton", torch.float32)
    from tilewright.kernels.moe import grouped_gemm_triton

    return grouped_gemm_triton


SIZES = pytest.mark.parametrize("hidden, inner", [(48, 144), (20, 77)], ids=["aligned", "odd"])
TYPES = pytest.mark.parametrize("dtype", [torch.float32, BIT16], ids=short)


def expert_rows(index, offsets, slots, k):
    """(expert, rows, their tokens) of each expert that has rows."""
    begin = 0
    for e, end in enumerate(offsets.tolist()):
        if begin < end:
            yield e, slice(begin, end), slots[begin:end].long() // k
        begin = end


@SIZES
@TYPES
@pytest.mark.parametrize("interleaved", [False, True])
def test_up_swiglu(hidden, inner, dtype, interleaved):
    """With biases, and transposed weights with interleaved gates and ups."""
    kernel, (index, *order) = kernels(), routed(25, 3, 4)
    offsets, slots, _ = order
    x = torch.randn(25, hidden, device=DEVICE).to(dtype)
    weight = (torch.randn(4, 2 * inner, hidden, device=DEVICE) * hidden**-0.5).to(dtype)
    bias = torch.randn(4, 2 * inner, device=DEVICE).to(dtype) if interleaved else None
    options = (bias, kernel.SILU_MUL._replace(INTERLEAVED=interleaved))
    rows = len(slots)
    expected = torch.zeros(rows, 2 * inner, dtype=torch.float64, device=DEVICE)
    for e, mine, tokens in expert_rows(index, offsets, slots, 3):
        expected[mine] = x[tokens].double() @ weight[e].double().t() + (
            0 if bias is None else bias[e].double()
        )
    if interleaved:
        weight = weight.mT.contiguous().mT
    with contract.poisoned():
        pre, h = kernel.up_swiglu(x, weight, order, True, *options)
        none, same = kernel.up_swiglu(x, weight, order, False, *options)
    assert none is None and torch.equal(h, same)
    eps = torch.finfo(dtype).eps
    close([pre], [expected], 8 * eps)
    # h is computed from the rounded pre-activation
    gate, up = (
        (pre.double()[:, ::2], pre.double()[:, 1::2]) if interleaved else pre.double().chunk(2, -1)
    )
    close([h], [F.silu(gate) * up], 8 * eps)
    tail = int(offsets[-1])
    assert tail < rows and not pre[tail:].any() and not h[tail:].any()


@SIZES
@TYPES
@pytest.mark.parametrize(
    "split, interleaved", [(None, False), (4, False), (4, True), (0, False), (0, True)]
)
def test_down_dswiglu(monkeypatch, hidden, inner, dtype, split, interleaved):
    """split: the number of parts of a tile in the epilogue, 0 with a second kernel instead; tiles
    of 16 columns give several partial sums per row. With a bias where gates and ups are
    interleaved.
    """
    kernel, (index, *order) = kernels(), routed(25, 3, 4, seed=1)
    offsets, slots, _ = order
    if split is not None:
        config = {**kernel._constants(32, 16, 32, 4, 2, 1, split=split)}
        inner //= 3  # three tiles, the third whole or not
        monkeypatch.setattr(kernel, "_DSWIGLU", {"ROWS": 4, "COLUMNS": 16})
    rows, tail = len(slots), int(offsets[-1])
    dy = torch.randn(25, hidden, device=DEVICE).to(dtype)
    down = (torch.randn(4, hidden, inner, device=DEVICE) * inner**-0.5).to(dtype)
    pre = torch.randn(rows, 2 * inner, device=DEVICE).to(dtype)
    pre[tail:] = float("nan")  # not read
    weight = torch.rand(25, 3, device=DEVICE)
    bias = torch.randn(4, hidden, device=DEVICE).to(dtype) if interleaved else None
    leaf = pre.double().requires_grad_()
    gate, up = (leaf[:, ::2], leaf[:, 1::2]) if interleaved else leaf.chunk(2, -1)
    h = F.silu(gate) * up
    # The layer's gradient in float64, through autograd.
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    router = weight.double().requires_grad_()
    for e, mine, tokens in expert_rows(index, offsets, slots, 3):
        w = router.flatten()[slots[mine].long()]
        row = h[mine] @ down[e].double().t() + (0 if bias is None else bias[e].double())
        total = total + ((w[:, None] * row) * dy[tokens].double()).sum()
    dpre_true, drouter_true = torch.autograd.grad(total, (leaf, router))
    hw_true = weight.double().flatten()[slots.long()][:, None] * h.detach().to(dtype).double()

    def call(keep):
        options = kernel.SILU_MUL._replace(INTERLEAVED=interleaved)
        return kernel.down_dswiglu(dy, down, pre, weight, order, keep, bias, options)

    with contract.poisoned():
        if split is None:
            (dpre, drouter, hw), (_, _, none) = call(True), call(False)
        else:
            # The launch's key: the same launch configuration for both of its look-ups.
            key = kernel._key(inner, hidden, dy, rows, 4, kernel._fits(dy, down, inner))
            with kernel.DOWN_DSWIGLU.override(dy.device, key, config):
                (dpre, drouter, hw), (_, _, none) = call(True), call(False)
    assert none is None
    eps = torch.finfo(dtype).eps
    # A dozen roundings: a sum of products, the sigmoid, and six factors.
    close(
        [dpre[:tail], drouter, hw[:tail]],
        [dpre_true[:tail], drouter_true, hw_true[:tail]],
        12 * eps,
    )
    assert drouter.dtype == torch.float32 and not drouter[index.to(DEVICE) == 4].any()
    assert not dpre[tail:].any() and not hw[tail:].any()


@SIZES
@TYPES
@pytest.mark.parametrize("gather", ["x", "dy"])
def test_weight_gradient_of_gathered_rows(hidden, inner, dtype, gather):
    kernel, (index, offsets, slots, _) = kernels(), routed(60, 3, 4, seed=2)
    whole = torch.randn(60, hidden, device=DEVICE).to(dtype)
    rows = torch.randn(len(slots), inner, device=DEVICE).to(dtype)
    rows[int(offsets[-1]) :] = float("nan")
    dy, x = (rows, whole) if gather == "x" else (whole, rows)
    expected = torch.zeros(4, dy.shape[1], x.shape[1], dtype=torch.float64, device=DEVICE)
    for e, mine, tokens in expert_rows(index, offsets, slots, 3):
        a, b = (rows[mine], whole[tokens]) if gather == "x" else (whole[tokens], rows[mine])
        expected[e] = a.double().t() @ b.double()
    with contract.poisoned():
        found = kernel.backward_weight(dy, x, offsets, slots, 3, gather)
    assert not found[1].any()
    close([found], [expected], 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "counts, tail, block",
    [
        ((5, 0, 40, 1), 6, 16),
        ((0, 0), 3, 16),
        ((64,), 0, 32),
        ((3, 3, 3), 0, 128),
        ((4000, 1), 500, 16),
    ],
    ids=str,
)
def test_tiles_cover_every_row_once(counts, tail, block):
    kernel = kernels()
    ends = torch.tensor(counts).cumsum(0).to(torch.int32).to(DEVICE)
    rows = sum(counts) + tail
    tiles = kernel.tile_map(ends, rows, block).cpu()
    capacity, count = len(tiles) // 3, int(tiles[-1])
    experts, first, end = tiles[:-1].view(3, capacity)[:, :count].tolist()
    covered = []
    for e, row, stop in zip(experts, first, end, strict=True):
        covered += [(r, e) for r in range(row, min(row + block, stop))]
    owner = [e for e, n in enumerate((*counts, tail)) for _ in range(n)]
    assert covered == list(enumerate(owner))


@pytest.mark.parametrize("R, E", [(0, 3), (1, 1), (40, 5), (1000, 16), (700, 130), (20000, 3)])
def test_the_sort_writes_the_map_of_its_tiles(R, E):
    """Also with sentinels, experts without rows, and more tiles than its programs write at once."""
    from tilewright.kernels.moe import permute_triton

    g = torch.Generator().manual_seed(R)
    index = torch.randint(0, E + 2, (R, 1), generator=g).to(DEVICE)
    index[index == 1] = 0
    order, tiles = permute_triton.sort_and_map(index, E)
    assert all(map(torch.equal, order, permute_triton.sort(index, E)))
    expected = kernels().tile_map(order.offsets, R)
    capacity, count = len(tiles) // 3, int(expected[-1])
    assert tiles[-1] == count
    ours, others = (t[:-1].view(3, capacity) for t in (tiles, expected))
    assert torch.equal(ours[:, :count], others[:, :count]) and not ours[:, count:].any()


def test_bad_offsets_stay_inside_the_tensors():
    """On a GPU the values are not checked: whatever they are, every access is in bounds, and each
    row is written.
    """
    kernel = kernels()
    for wrong in ([40, 0, 40], [-5, 90, 20], [2**31 - 1] * 3, [-(2**31)] * 3, [40, 0, 40, 0, 40]):
        x, weight = torch.randn(40, 8, device=DEVICE), torch.randn(len(wrong), 8, 8, device=DEVICE)
        offsets = torch.tensor(wrong, dtype=torch.int32, device=DEVICE)
        tiles = kernel.tile_map(offsets, 40, 16).cpu()
        capacity, count = len(tiles) // 3, int(tiles[-1])
        assert count <= capacity
        _, first, end = tiles[:-1].view(3, capacity)[:, :count]
        assert (first >= 0).all() and (end <= 40).all()
        assert kernel.forward(x, weight, offsets).shape == (40, 8)
        assert kernel.backward_weight(x, x, offsets).isfinite().all()


def test_more_tiles_than_32_bits_can_count_stay_inside_the_table():
    """Invalid offsets can request this: here 2^31 tiles of one row, with room for ten."""
    kernel = kernels()
    R, room = 2**30, 10
    offsets = torch.tensor([R, 0, R], dtype=torch.int32, device=DEVICE)
    tiles = torch.full((3 * room + 1,), -1, dtype=torch.int32, device=DEVICE)
    kernel._map_tiles[(4,)](offsets, tiles, 3, R, room, BLOCK_M=1, BLOCK=16, EXPERTS=4)
    assert tiles.tolist() == [0] * room + list(range(room)) + [R] * room + [room]


def test_what_a_descriptor_cannot_take_is_seen():
    """Unaligned memory (16 bytes), rows at other multiples, experts that share memory."""
    kernel = kernels()
    flat = torch.empty(4 * 64 + 1, dtype=torch.bfloat16, device=DEVICE)
    whole, wide = flat[:-1].view(4, 64), torch.empty(4, 36, dtype=torch.bfloat16, device=DEVICE)
    assert kernel._aligned(whole)
    assert not any(map(kernel._aligned, (flat[1:].view(4, 64), whole[:, 1:], wide)))
    one = torch.randn(1, 16, 32, device=DEVICE)
    shared = one.expand(3, -1, -1)
    w, _ = kernel._weights(shared, False)
    assert w.stride(0) >= 16 * 32 and torch.equal(w, shared)
