"""Tests specific to sort_by_expert, permute and unpermute; parity with the eager twins is in
test_contract.py.
"""

import contextlib

import pytest
import torch
from helpers import DEVICE, launches, skip_unless_usable, threads

from tilewright.ops import OPS, permute, sort_by_expert, unpermute

PERMUTE, UNPERMUTE = OPS["permute"], OPS["unpermute"]
EVERY = pytest.mark.parametrize("name", PERMUTE.names())
FUSED = pytest.mark.parametrize("name", ["triton", "cpp"])
assert UNPERMUTE.names() == PERMUTE.names()


def indices(T, E, K, sentinels=0.3, dtype=torch.int64):
    index = torch.rand(T, E, device=DEVICE).argsort(1)[:, :K]
    index[torch.rand(T, K, device=DEVICE) < sentinels] = E
    return index.to(dtype)


def by_hand(index, E):
    """The order in plain Python."""
    slots = sorted(range(index.numel()), key=lambda s: (int(index.flatten()[s]), s))
    offsets = [sum(int(e) <= last for e in index.flatten()) for last in range(E)]
    position = [-1] * index.numel()
    for row, s in enumerate(slots[: offsets[-1]]):
        position[s] = row
    return offsets, slots, position


# ---- sorting


@EVERY
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "T, E, K", [(0, 3, 2), (1, 1, 1), (50, 5, 3), (140, 7, 1), (9, 300, 4), (40, 300, 4)]
)
def test_order_is_the_one_by_hand(name, dtype, T, E, K):
    skip_unless_usable(PERMUTE, name, torch.float32)
    index = indices(T, E, K, dtype=dtype)
    order = sort_by_expert(index, E, implementation=name)
    assert [t.flatten().tolist() for t in order] == list(by_hand(index, E))
    assert all(t.dtype == torch.int32 for t in order) and order.position.shape == index.shape


@pytest.mark.parametrize("T, kernels", [(16, ["_place"]), (17, ["_histogram", "_place"])])
def test_one_tile_of_slots_takes_one_launch(T, kernels, monkeypatch):
    pytest.importorskip("triton")
    from tilewright.kernels.moe import permute_triton

    index = torch.zeros(T, 8, dtype=torch.int64)
    for sort in (permute_triton.sort, permute_triton.sort_and_map):
        found = launches(monkeypatch, lambda sort=sort: sort(index, 4), {permute_triton: ""})
        assert [name for name in found if not name.startswith("aten::")] == kernels


@FUSED
def test_runs_of_several_tiles(name):
    """More slots than one tile per program: its later tiles continue its earlier ones."""
    skip_unless_usable(PERMUTE, name, torch.float32)
    index = indices(50 if name == "triton" else 40000, 6, 2)
    launched = contextlib.nullcontext()
    if name == "triton":
        from tilewright.kernels.moe.permute_triton import SORT

        config = {"RUNS": 2, "TILE": 16, "num_warps": 4}
        launched = SORT.override(index.device, (6,), config)
    with launched:
        found, expected = (sort_by_expert(index, 6, implementation=n) for n in (name, "eager"))
    for f, e in zip(found, expected, strict=True):
        assert torch.equal(f, e)


def test_sort_compiles_and_is_checked_when_it_runs():
    torch._dynamo.reset()
    compiled = torch.compile(sort_by_expert, fullgraph=True, backend="aot_eager")
    index = indices(6, 4, 2)
    for f, e in zip(compiled(index, 4), sort_by_expert(index, 4), strict=True):
        assert torch.equal(f, e)
    if DEVICE == "cpu":
        index[3, 1] = 5
        with pytest.raises(IndexError, match=r"\[3, 1\] is 5; accepted are 0 to 3, and 4 for a"):
            compiled(index, 4)


@FUSED
def test_kernels_take_an_index_outside_for_a_sentinel(name):
    """As on CUDA, where values are not checked."""
    skip_unless_usable(PERMUTE, name, torch.float32)
    index = torch.tensor([[0, 2**40], [-1, 1], [3, -(2**31)], [2, 0]], device=DEVICE)
    x = torch.randn(4, 5, device=DEVICE)
    clean = torch.where((index < 0) | (index > 3), 3, index)
    found, expected = PERMUTE.resolve(name, DEVICE)(x, index, 3), PERMUTE.eager(x, clean, 3)
    for f, e in zip(found, expected, strict=True):
        assert torch.equal(f, e)


# ---- moving rows


@EVERY
def test_rows_at_any_stride(name):
    """The width is a multiple of 16 bytes, the row stride is not."""
    skip_unless_usable(PERMUTE, name, torch.float32)
    index, weight = indices(12, 5, 2), torch.rand(12, 2, device=DEVICE)
    x = torch.randn(12, 19, device=DEVICE)[:, 1:17]
    dy = torch.randn(12, 21, device=DEVICE)[:, 2:18]
    found = []
    for rows, up in ((x, dy), (x.contiguous(), dy.contiguous())):
        rows = rows.detach().requires_grad_()
        moved = permute(rows, index, 5, implementation=name)
        wide = moved.rows
        if rows.stride(0) != 16:
            wide = torch.zeros(24, 23, device=DEVICE)[:, 3:19].copy_(moved.rows)
        y = unpermute(wide, weight, moved.position, implementation=name)
        found.append([moved.rows, y, *torch.autograd.grad(y, rows, up)])
    for f, e in zip(*found, strict=True):
        assert torch.equal(f, e)


@EVERY
def test_there_and_back(name):
    """unpermute of permute is x times the sum of its weights."""
    skip_unless_usable(PERMUTE, name, torch.float32)
    x = torch.randn(20, 24, device=DEVICE, requires_grad=True)
    weight = torch.rand(20, 3, device=DEVICE)
    moved = permute(x, indices(20, 6, 3), 6, implementation=name)
    y = unpermute(moved.rows, weight, moved.position, implementation=name)
    total = torch.where(moved.position >= 0, weight, 0).sum(1, keepdim=True)
    torch.testing.assert_close(y, x * total)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], total.expand(20, 24))


@EVERY
@pytest.mark.parametrize("kind", ["some", "all"])
def test_rows_without_a_slot_are_not_read(name, kind):
    skip_unless_usable(PERMUTE, name, torch.float32)
    index = indices(15, 4, 2, sentinels=0.5 if kind == "some" else 2)
    offsets, _, position = sort_by_expert(index, 4)
    used = int(offsets[-1])
    assert used < 30 and (used > 0 or kind == "all")
    rows = torch.randn(30, 40, device=DEVICE)
    rows[used:] = float("nan")
    weight = torch.rand(15, 2, device=DEVICE)
    weight[position < 0] = float("nan")
    rows.requires_grad_()
    weight.requires_grad_()
    y = unpermute(rows, weight, position, implementation=name)
    drows, dweight = torch.autograd.grad(y.square().sum(), (rows, weight))
    assert y.isfinite().all() and drows.isfinite().all() and dweight.isfinite().all()
    assert (drows[used:] == 0).all() and (dweight[position < 0] == 0).all()
    assert (y[(position < 0).all(1)] == 0).all()
    if used:
        assert drows[:used].abs().amin(0).max() > 0


@EVERY
def test_the_rest_of_rows_is_zero_whatever_x_holds(name, poisoned):
    skip_unless_usable(PERMUTE, name, torch.float32)
    x = torch.full((6, 7), float("inf"), device=DEVICE)
    index = torch.full((6, 2), 3, device=DEVICE)
    index[2, 1] = 0
    rows = permute(x, index, 3, implementation=name).rows
    assert (rows[0] == float("inf")).all() and (rows[1:] == 0).all()


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradient_of_x_is_rounded_once(name, dtype):
    """A sum in the 16-bit dtype would lose the small terms: 2048 + 1 + ... + 1."""
    skip_unless_usable(PERMUTE, name, dtype)
    x = torch.zeros(1, 3, dtype=dtype, device=DEVICE, requires_grad=True)
    moved = permute(x, torch.arange(8, device=DEVICE)[None], 8, implementation=name)
    grad = torch.ones(8, 3, dtype=dtype, device=DEVICE)
    grad[0] = 2048
    (found,) = torch.autograd.grad(moved.rows, x, grad)
    assert (found == torch.tensor(2055.0).to(dtype)).all() and found.dtype == dtype
    y = unpermute(grad, None, moved.position, implementation=name)
    assert (y == found).all()


def test_what_the_backward_keeps():
    """permute: only the positions. unpermute: rows only where the weights need a gradient."""
    skip_unless_usable(PERMUTE, "cpp", torch.float32)
    kept = []

    def keep(t):
        kept.append(t.shape)
        return t

    x = torch.randn(4, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        moved = permute(x, indices(4, 5, 2), 5, implementation="cpp")
    assert kept == [(4, 2)]
    for learned in (False, True):
        kept.clear()
        weight = torch.rand(4, 2, requires_grad=learned)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            unpermute(moved.rows, weight, moved.position, implementation="cpp")
        assert ((8, 6) in kept) == learned and (4, 2) in kept


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_weights_of_another_dtype(name, dtype):
    skip_unless_usable(PERMUTE, name, torch.float32)
    rows = torch.randn(8, 5, device=DEVICE)
    weight = torch.rand(4, 2, device=DEVICE).to(dtype).requires_grad_()
    position = sort_by_expert(indices(4, 3, 2), 3).position
    y = unpermute(rows, weight, position, implementation=name)
    assert torch.equal(y, unpermute(rows, weight.float(), position, implementation=name))
    assert torch.autograd.grad(y.sum(), weight)[0].dtype == dtype


@pytest.mark.parametrize("name", ["cpp"])
def test_the_same_bits_on_any_number_of_threads(name):
    skip_unless_usable(PERMUTE, name, torch.float32)
    x, weight = torch.randn(300, 70, requires_grad=True), torch.rand(300, 4, requires_grad=True)
    index = indices(300, 16, 4)
    found = []
    for n in (1, 2):
        with threads(n):
            moved = permute(x, index, 16, implementation=name)
            y = unpermute(moved.rows, weight, moved.position, implementation=name)
            found.append([*moved, y, *torch.autograd.grad(y.square().sum(), (x, weight))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# ---- bad input

X, I = torch.randn(3, 8), torch.tensor([[0, 1], [2, 0], [1, 2]])
P = torch.arange(6, dtype=torch.int32).view(3, 2)


@pytest.mark.parametrize(
    "args, error, message",
    [
        ((X, I[:2], 3), ValueError, r"expert_index .* \[T, K\], where T = 3, got \[2, 2\]"),
        ((X, I[:, :0], 3), ValueError, r"expert_index .* with K >= 1, got \[3, 0\]"),
        (
            (X, I, 1),
            IndexError,
            r"expert_index\[1, 0\] is 2; accepted are 0 to 0, and 1 for a slot",
        ),
        ((X, I - 1, 3), IndexError, r"expert_index\[0, 0\] is -1; accepted are 0 to 2"),
    ],
)
def test_permute_refuses(args, error, message):
    with pytest.raises(error, match=message):
        permute(*args)


ROWS = X.repeat(2, 1)


@pytest.mark.parametrize(
    "args, error, message",
    [
        ((X, None, P), ValueError, r"rows .*, where T = 3, K = 2, got \[3, 8\]"),
        ((X, None, P[:, :0]), ValueError, r"position .* with K >= 1, got \[3, 0\]"),
        ((ROWS, torch.ones(2, 3), P), ValueError, r"expert_weight .*T = 3, K = 2, got \[2, 3\]"),
        ((ROWS, None, P + 1), IndexError, "be 0 to 5, each once; got rows from 1 to 6"),
        ((ROWS, None, P // 2), IndexError, "be 0 to 5, each once; got rows from 0 to 2"),
        ((ROWS, None, P - 2), IndexError, "position must hold -1 or a row.*got rows from -2 to 3"),
    ],
)
def test_unpermute_refuses(args, error, message):
    with pytest.raises(error, match=message):
        unpermute(*args)


def test_unknown_implementation():
    with pytest.raises(ValueError, match=r"permute: .*'c'; have \['auto', 'triton', 'cpp'"):
        sort_by_expert(I, 3, implementation="c")


def test_cpp_operators_themselves_check_every_tensor():
    """Below the public functions' checks: no loop leaves its tensors."""
    skip_unless_usable(PERMUTE, "cpp", torch.float32)
    ops, rows, w = torch.ops.tilewright, ROWS, torch.ones(3, 2)
    ends = torch.tensor([6], dtype=torch.int32)
    for wrong, message in (
        (lambda: ops.permute_cpp_sort(I.float(), 3), "expert_index must be int32 or int64"),
        (lambda: ops.permute_cpp_sort(I.t(), 3), "expert_index must be a contiguous CPU tensor"),
        (lambda: ops.permute_cpp_spread(X[:2], P, ends), r"x must be \[3, 2?8?"),
        (lambda: ops.permute_cpp_spread(X, P + 1, ends), "position must be below 6, got 6"),
        (lambda: ops.permute_cpp_spread(X, P.long(), ends), "position must be an int32 matrix"),
        (lambda: ops.permute_cpp_spread(X, P, ends.long()), "offsets must be int32"),
        (lambda: ops.permute_cpp_collect(X, w, P), r"rows must be \[6, 8\]"),
        (lambda: ops.permute_cpp_collect(rows, w.double(), P), "weight must be float32"),
        (lambda: ops.permute_cpp_collect(rows, w[:2], P), "weight .* one for each position"),
        (lambda: ops.permute_cpp_collect(rows, w, P + 1), "position must be below 6, got 6"),
        (lambda: ops.permute_cpp_backward(X.bfloat16(), rows, w, P), "rows .* dtype of the others"),
        (lambda: ops.permute_cpp_backward(X[:2], rows, w, P), "dy must be"),
        (lambda: ops.permute_cpp_backward(X, rows, w, P + 1), "position must be below 6, got 6"),
    ):
        with pytest.raises(RuntimeError, match=message):
            wrong()
