"""Tests specific to rope; parity with the eager twin is in test_contract.py."""

import itertools

import pytest
import torch
from helpers import DEVICE, skip_unless_usable

from tilewright.core import checks, layout
from tilewright.kernels.rope.operators import Rotation
from tilewright.ops import rope
from tilewright.ops.rope.rope import ROPE, document_positions

# In `tilewright.ops` the name is the function.

EVERY = pytest.mark.parametrize("name", ROPE.names())
# A rotation is two products and a sum, each rounded once, of values up to about 4.
CLOSE = {"rtol": 4 * torch.finfo(torch.float32).eps, "atol": 8 * torch.finfo(torch.float32).eps}
B, HQ, HK, S, D, P = 2, 4, 2, 7, 16, 24


def tables(rows=P, width=D):
    angle = torch.outer(
        torch.arange(rows).double(), 10000.0 ** (-torch.arange(0, width, 2).double() / width)
    )
    return angle.cos().float().to(DEVICE), angle.sin().float().to(DEVICE)


def heads(n, *, batch=B, seq=S, width=D):
    """[B, n, S, D] with a projection's strides: [B, S, n, D] transposed."""
    return torch.randn(batch, seq, n, width, device=DEVICE).transpose(1, 2)


COS, SIN = tables()


# ---- references


def complex_rotation(x, cos, sin, positions, interleaved):
    """Pairs as complex numbers, times exp(i angle), in float64; features beyond the tables' width
    are unchanged.
    """
    R = 2 * cos.shape[1]
    turn, rest = x[..., :R].double(), x[..., R:].double()
    pairs = turn.unflatten(-1, (-1, 2)) if interleaved else torch.stack(turn.chunk(2, -1), -1)
    unit = torch.complex(cos.double(), sin.double())[positions]  # [S, R / 2] or [B, S, R / 2]
    unit = unit if unit.dim() == 2 else unit.unsqueeze(1)
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * unit)
    turned = pairs.flatten(-2) if interleaved else torch.cat(pairs.unbind(-1), -1)
    return torch.cat((turned, rest), -1)


@pytest.mark.packages
@EVERY
def test_equals_transformers_llama(name):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    skip_unless_usable(ROPE, name, torch.float32)
    config = llama.LlamaConfig(
        hidden_size=HQ * D, num_attention_heads=HQ, head_dim=D, max_position_embeddings=64
    )
    q, k = heads(HQ), heads(HK)
    positions = torch.randint(0, 64, (B, S), device=DEVICE)
    cos, sin = llama.LlamaRotaryEmbedding(config).to(DEVICE)(
        q, positions
    )  # [B, S, D]: one row per token
    expected = llama.apply_rotary_pos_emb(q, k, cos, sin)
    for found, wanted in zip(rope(q, k, cos, sin, implementation=name), expected, strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)


@EVERY
@pytest.mark.parametrize("interleaved", [False, True], ids=["half_split", "interleaved"])
@pytest.mark.parametrize("R", [D, 6], ids=["whole", "partial"])
@pytest.mark.parametrize("ids", ["none", "S", "BS"])
def test_equals_complex_multiplication(name, interleaved, R, ids):
    skip_unless_usable(ROPE, name, torch.float32)
    q, k = heads(HQ), heads(HK)
    cos, sin = tables(width=R)
    position_ids = {
        "none": None,
        "S": torch.randint(0, P, (S,), device=DEVICE, dtype=torch.int32),
        "BS": torch.randint(0, P, (B, S), device=DEVICE),
    }[ids]
    positions = torch.arange(S, device=DEVICE) if position_ids is None else position_ids
    options = {"interleaved": interleaved, "rotary_dim": R, "position_ids": position_ids}
    found = rope(q, k, cos, sin, **options, implementation=name)
    for x, y in zip((q, k), found, strict=True):
        expected = complex_rotation(x, cos, sin, positions, interleaved)
        torch.testing.assert_close(y.double(), expected, **CLOSE)
        assert torch.equal(y[..., R:], x[..., R:])
        assert y.stride() == x.stride() or name == "eager"  # the layout [B, S, H, D] is preserved


@EVERY
def test_each_packed_document_is_rotated_as_if_alone(name):
    skip_unless_usable(ROPE, name, torch.float32)
    lengths = [5, 1, 0, 8]
    q, k = heads(HQ, batch=1, seq=14), heads(HK, batch=1, seq=14)
    cu = torch.tensor([0, 5, 6, 6, 14], dtype=torch.int32, device=DEVICE)
    assert document_positions(cu, 14).tolist() == [i for n in lengths for i in range(n)]
    packed = rope(q, k, COS, SIN, cu_seqlens=cu, implementation=name)
    alone = [
        rope(a, b, COS, SIN, implementation=name)
        for a, b in zip(q.split(lengths, 2), k.split(lengths, 2), strict=True)
    ]
    for whole, parts in zip(packed, zip(*alone, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts, 2))


@EVERY
def test_documents_run_on_over_rows_of_a_batch(name):
    skip_unless_usable(ROPE, name, torch.float32)
    q = heads(HQ)
    cu = torch.tensor(
        [0, 3, 2 * S], device=DEVICE
    )  # the second begins in row 0 and ends with row 1
    expected = torch.tensor([*range(3), *range(2 * S - 3)], device=DEVICE).view(B, S)
    found = rope(q, None, COS, SIN, cu_seqlens=cu, implementation=name)[0]
    assert torch.equal(
        found, rope(q, None, COS, SIN, position_ids=expected, implementation=name)[0]
    )


@EVERY
@pytest.mark.parametrize("interleaved", [False, True])
def test_backward_is_the_rotation_by_the_opposite_angle(name, interleaved):
    skip_unless_usable(ROPE, name, torch.float32)
    q, k = heads(HQ).requires_grad_(), heads(HK).requires_grad_()
    ids = torch.randint(0, P, (B, S), device=DEVICE)
    options = {"interleaved": interleaved, "position_ids": ids, "implementation": name}
    outs = rope(q, k, COS, SIN, **options)
    grads = [torch.randn_like(o) for o in outs]
    found = torch.autograd.grad(outs, (q, k), grads)
    for f, e in zip(found, rope(*grads, COS, -SIN, **options), strict=True):
        torch.testing.assert_close(f, e, **CLOSE)
    for only in (0, 1):  # one of the two results is unused
        outs = rope(q, k, COS, SIN, **options)
        grad = torch.autograd.grad(outs[only], (q, k), grads[only], allow_unused=True)
        assert torch.equal(grad[only], found[only])
        assert grad[1 - only] is None or not grad[1 - only].any()


@EVERY
def test_no_tokens(name):
    skip_unless_usable(ROPE, name, torch.float32)
    for batch, n, seq in ((0, 2, 4), (2, 0, 4), (2, 2, 0)):
        q = heads(n, batch=batch, seq=seq)
        # The strides of a product are 0 where it has no elements.
        product = q.new_zeros(batch, seq, n, D).transpose(1, 2) * 1
        for inplace, k in itertools.product((False, True), (q.clone(), product)):
            found = rope(q, k, COS, SIN, inplace=inplace, implementation=name)
            assert all(f.shape == q.shape for f in found)
        rope(q, None, COS, SIN, position_ids=torch.arange(seq, device=DEVICE), implementation=name)
    empty = rope(heads(2, seq=0), None, COS[:0], SIN[:0], implementation=name)[0]
    assert empty.shape == (B, 2, 0, D)


# ---- in place


class Projection(torch.nn.Module):
    """The steps before attention: one projection, its slices viewed as heads, some pointwise work,
    and rope.
    """

    def __init__(self, name, how="slice"):
        super().__init__()
        self.qkv = torch.nn.Linear(12, (HQ + 2 * HK) * D, device=DEVICE)
        self.name, self.how = name, how

    def forward(self, x, inplace, position_ids=None):
        n, m = HQ * D, HK * D
        qkv = self.qkv(x)
        if self.how == "split":
            q, k, v = qkv.split((n, m, m), -1)
        else:
            q, k, v = qkv[..., :n], qkv[..., n : n + m], qkv[..., n + m :]
        q, k, v = (t.view(*x.shape[:2], -1, D).transpose(1, 2) for t in (q, k, v))
        options = {"inplace": inplace, "position_ids": position_ids}
        return *rope(q, k, COS, SIN, **options, implementation=self.name), v


def step(model, fn, *args):
    q, k, v = fn(*args)
    loss = q.square().mean() + k.pow(3).mean() + (q[:, :HK] * k * v).sum() + v.sin().sum()
    return [t.detach().clone() for t in (q, k, v)], torch.autograd.grad(
        loss, list(model.parameters())
    )


@EVERY
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_in_place_on_slices_of_a_projection(name, compiled):
    """Equal to out of place, in results and gradients, including those of the untouched slice."""
    skip_unless_usable(ROPE, name, torch.float32)
    model, x = Projection(name), torch.randn(B, S, 12, device=DEVICE)
    ids = torch.randint(0, P, (B, S), device=DEVICE)
    expected = step(model, model, x, False, ids)
    torch._dynamo.reset()
    fn = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    found = step(model, fn, x, True, ids)
    for f, e in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-5, atol=1e-5)


@EVERY
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_in_place_overwrites_and_returns_its_arguments(name, compiled):
    skip_unless_usable(ROPE, name, torch.float32)
    qkv = torch.randn(B, S, HQ + 2 * HK, D, device=DEVICE)
    before = qkv.clone()
    q, k = qkv[:, :, :HQ].transpose(1, 2), qkv[:, :, HQ : HQ + HK].transpose(1, 2)
    expected = rope(q, k, COS, SIN, implementation=name)
    version = qkv._version
    torch._dynamo.reset()

    def call(q, k):
        return rope(q, k, COS, SIN, inplace=True, implementation=name)

    found = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(q, k)
    for x, f, e in zip((q, k), found, expected, strict=True):
        assert f.data_ptr() == x.data_ptr() and f.stride() == x.stride()
        assert torch.equal(x, e)
        assert compiled or f is x
    assert torch.equal(qkv[:, :, HQ + HK :], before[:, :, HQ + HK :])  # the values
    assert qkv._version > version  # so that autograd notices, as in the next test


@EVERY
def test_in_place_without_grad_takes_leaves(name):
    skip_unless_usable(ROPE, name, torch.float32)
    q = heads(HQ).requires_grad_()
    expected = rope(q.detach(), None, COS, SIN, implementation=name)[0]
    with torch.no_grad():
        rope(q, None, COS, SIN, inplace=True, implementation=name)
    assert torch.equal(q, expected) and q.is_leaf


def leaf(n):
    return heads(n).requires_grad_()


IN_PLACE = {
    "leaf": (lambda: (leaf(HQ), heads(HK)), "q, a leaf that requires grad.*inplace=False"),
    "leaf of keys": (lambda: (heads(HQ), leaf(HK)), "k, a leaf"),
    "view": (lambda: (leaf(HQ + 1)[:, 1:], heads(HK)), "q, a leaf that requires grad or a view"),
    "split": (
        lambda: ((leaf(HQ) * 1).split(HK, 1)[0], heads(HK)),
        "q.*as split.*take a slice",
    ),
    "chunk": (
        lambda: (heads(HQ), (leaf(HQ) * 1).chunk(2, 1)[1]),
        "k.*split, chunk and unbind",
    ),
    "unbind": (lambda: ((leaf(HQ)[None] * 1).unbind(0)[0], None), "q.*split, chunk and unbind"),
    "overlapping": (
        lambda: (torch.randn(200, device=DEVICE).as_strided((B, HQ, S, D), (32, 16, 8, 1)), None),
        r"q, whose elements share memory: shape \[2, 4, 7, 16\], strides \[32, 16, 8, 1\]",
    ),
    "expanded": (
        lambda: (heads(HQ), heads(1).expand(B, HK, S, D)),
        "k, an expanded tensor",
    ),
}


@EVERY
@pytest.mark.parametrize("case", IN_PLACE)
def test_in_place_where_it_is_not_possible(name, case):
    """One error, and nothing is written."""
    skip_unless_usable(ROPE, name, torch.float32)
    make, message = IN_PLACE[case]
    q, k = make()
    before = [t.detach().clone() for t in (q, k) if t is not None]
    with pytest.raises(ValueError, match=f"cannot overwrite {message}"):
        rope(q, k, COS, SIN, inplace=True, implementation=name)
    for t, b in zip((q, k), before, strict=False):
        assert torch.equal(t, b)


def test_in_place_needs_columns_next_to_each_other():
    with pytest.raises(ValueError, match="needs q with a contiguous last dimension"):
        rope(heads(HQ, width=2 * D)[..., ::2], None, COS, SIN, inplace=True)


def at(shape, strides, offset=0):
    """A view of a new buffer per call, but of the same buffer for the views of a pair."""
    return lambda buffer: buffer.as_strided(shape, strides, offset)


def pieces(width, *bounds, B=2, S=5, D=8):
    """[B, heads, S, D] of columns of a [B, S, width] buffer."""
    return [at((B, (b - a) // D, S, D), (S * width, D, width, 1), a) for a, b in bounds]


SHARED = {
    "same": (at((1, 2, 5, 8), (80, 40, 8, 1)),) * 2,
    "partly": (at((1, 2, 5, 8), (80, 40, 8, 1)), at((1, 2, 5, 8), (80, 40, 8, 1), 40)),
    "partly, k first": (at((1, 2, 5, 8), (80, 40, 8, 1), 40), at((1, 2, 5, 8), (80, 40, 8, 1))),
    "columns": pieces(64, (0, 32), (24, 48)),
    "columns, k first": pieces(64, (24, 48), (0, 32)),
    "one element": (at((1, 1, 1, 8), (8, 8, 8, 1)), at((1, 1, 1, 8), (8, 8, 8, 1), 7)),
    "around the period": (at((1, 1, 5, 8), (80, 80, 16, 1)), at((1, 1, 5, 8), (80, 80, 16, 1), 12)),
    "heads": (at((2, 2, 5, 8), (160, 16, 32, 1)), at((2, 1, 5, 8), (160, 16, 32, 1), 16)),
}
APART = {
    "projection": pieces(64, (0, 32), (32, 48)),
    "projection, k first": pieces(64, (16, 64), (0, 16)),
    "projection, one sequence": pieces(64, (0, 32), (32, 48), B=1),
    "projection, one token": pieces(64, (0, 32), (32, 48), S=1),
    "one after another": (at((2, 2, 5, 8), (80, 40, 8, 1)), at((2, 2, 5, 8), (80, 40, 8, 1), 160)),
    "next to each other in a batch": (
        at((2, 2, 5, 8), (240, 40, 8, 1)),
        at((2, 2, 5, 8), (240, 40, 8, 1), 80),
    ),
    "head by head": (at((2, 2, 5, 8), (240, 24, 48, 1)), at((2, 2, 5, 8), (240, 24, 48, 1), 8)),
    "every other head": (at((2, 2, 5, 8), (160, 16, 32, 1)), at((2, 2, 5, 8), (160, 16, 32, 1), 8)),
    "first and last tokens": (
        at((2, 2, 5, 8), (160, 80, 8, 1)),
        at((2, 2, 5, 8), (160, 80, 8, 1), 40),
    ),
}


@pytest.mark.parametrize("case", SHARED)
def test_in_place_on_q_and_k_that_share_memory_is_refused(case):
    """Before any implementation is asked."""
    buffer = torch.randn(1000, device=DEVICE)
    before, given = buffer.clone(), [view(buffer) for view in SHARED[case]]
    said = r"q and k that share memory.*shapes \[.*strides \[.*bytes from q to k"
    with pytest.raises(ValueError, match=said):
        rope(*given, *tables(width=8), inplace=True)
    assert torch.equal(buffer, before)


@EVERY
@pytest.mark.parametrize("case", APART)
def test_in_place_on_q_and_k_in_one_another_s_gaps(name, case):
    skip_unless_usable(ROPE, name, torch.float32)
    buffer = torch.randn(1000, device=DEVICE)
    q, k = (view(buffer) for view in APART[case])
    cos, sin = tables(width=8)
    expected = rope(q, k, cos, sin, implementation="eager")
    for f, e in zip(rope(q, k, cos, sin, inplace=True, implementation=name), expected, strict=True):
        torch.testing.assert_close(f, e, **CLOSE)


def test_memory_is_called_apart_only_where_it_is():
    """Against the sets of addresses, over random views."""
    g = torch.Generator().manual_seed(0)

    def pick(values):
        return values[int(torch.randint(len(values), (), generator=g))]

    buffer, seen = torch.zeros(4000), [0, 0]
    for _ in range(2000):
        views = [
            buffer.as_strided(
                [pick((1, 2, 3)) for _ in range(4)],
                [pick((24, 48, 96)), pick((2, 4, 8, 16)), pick((8, 12, 24)), 1],
                pick(range(40)),
            )
            for _ in range(2)
        ]
        addresses = [
            torch.arange(4000)
            .as_strided(v.shape, v.stride(), v.storage_offset())
            .flatten()
            .tolist()
            for v in views
        ]
        apart = layout.share_no_element(*views)
        assert not apart or not set(addresses[0]) & set(addresses[1])
        seen[apart] += 1
        for v, at_ in zip(views, addresses, strict=True):
            assert checks.overlaps_itself(v) or len(set(at_)) == len(at_)
    assert min(seen) > 200


@pytest.mark.parametrize("how", ["leaf", "split"])
def test_in_place_where_it_is_not_possible_compiled(how):
    torch._dynamo.reset()
    if how == "split":
        model = Projection("eager", "split")
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            torch.compile(model, fullgraph=True, backend="aot_eager")(
                torch.randn(B, S, 12, device=DEVICE), True
            )
    else:
        fn = torch.compile(
            lambda q: rope(q, None, COS, SIN, inplace=True), fullgraph=True, backend="aot_eager"
        )
        with pytest.raises(RuntimeError, match="cannot overwrite q, a leaf that requires grad"):
            fn(leaf(HQ))


# ---- bad input


@EVERY
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.skipif(DEVICE != "cpu", reason="positions on a CUDA device are not looked at")
def test_position_outside_the_tables(name, compiled):
    """The same error compiled or not; and no row outside the tables is read."""
    skip_unless_usable(ROPE, name, torch.float32)
    torch._dynamo.reset()

    def call(q, ids, inplace=False):
        return rope(q, None, COS, SIN, position_ids=ids, inplace=inplace, implementation=name)[0]

    fn = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    for b, s, wrong in ((0, 3, P), (1, 6, -1), (0, 0, 2**40)):
        ids = torch.zeros(B, S, dtype=torch.int64)
        ids[b, s] = wrong
        said = rf"position_ids\[{b}, {s}\] = {wrong} .* rows 0 to {P - 1}"
        with pytest.raises(IndexError, match=said):
            fn(heads(HQ), ids)
    if not compiled:
        q = heads(HQ)
        before = q.clone()
        with pytest.raises(IndexError, match="outside the tables"):
            call(q, ids, True)
        assert torch.equal(q, before)
    said = rf"S is {P + 1}: position {P} is outside the tables.* rows 0 to {P - 1}"
    with pytest.raises(IndexError, match=said):
        rope(heads(1, seq=P + 1), None, COS, SIN, implementation=name)
    q, cu = heads(1, batch=1, seq=P + 3), torch.tensor([0, 2, P + 3])  # a document of P + 1 tokens
    with pytest.raises(IndexError, match=rf"= {P} is outside the tables"):
        rope(q, None, COS, SIN, cu_seqlens=cu, implementation=name)


def test_cpp_operators_themselves_read_nothing_outside_the_tables():
    """Below the public function's checks, with the same error."""
    skip_unless_usable(ROPE, "cpp", torch.float32)
    ROPE.resolve("cpp")
    q = torch.zeros(1, 1, 3, D)
    ops = torch.ops.tilewright
    for call in (lambda *args: ops.rope_cpp(*args, False), ops.rope_cpp_):
        for ids, message in (
            (torch.tensor([[0, P, 1]]), rf"position_ids\[0, 1\] = {P} .* rows 0 to {P - 1}"),
            (torch.tensor([[0, 1, -5]]), r"position_ids\[0, 2\] = -5"),
            (torch.zeros(1, 2, dtype=torch.int64), "positions must be int64"),
        ):
            with pytest.raises(RuntimeError, match=message):
                call(q, None, COS, SIN, ids, False)
        with pytest.raises(
            RuntimeError, match="S is 3: position 2 is outside the tables, which have rows 0 to 1"
        ):
            call(q, None, COS[:2], SIN[:2], None, False)
        with pytest.raises(RuntimeError, match="cos and sin must be float"):
            call(q, None, COS, SIN[:3], None, False)
        for k in (q[:, :, :2], q.double(), q[0], q.expand(2, 1, 3, D)):
            with pytest.raises(RuntimeError, match="k must have q's dtype, batch, sequence"):
                call(q, k, COS, SIN, None, False)
    with pytest.raises(RuntimeError, match="must have a contiguous last dimension"):
        ops.rope_cpp_(torch.zeros(1, 1, D, 3).mT, None, COS, SIN, None, False)


@pytest.mark.parametrize("name", ["triton", "eager"])
def test_unchecked_positions_become_nan(name):
    """The fallback for a device without synchronization."""
    skip_unless_usable(ROPE, name, torch.float32)
    ids = torch.tensor([[0, P, 2, -1, 4, 2**40, 6]] * B, device=DEVICE)
    q, _ = ROPE.resolve(name, DEVICE)(heads(HQ), None, Rotation(COS, SIN, ids))
    wrong = torch.tensor([False, True, False, True, False, True, False], device=DEVICE)
    assert q[:, :, wrong].isnan().all() and not q[:, :, ~wrong].isnan().any()


Q, K = torch.randn(B, HQ, S, D), torch.randn(B, HK, S, D)
C, N = (t.cpu() for t in tables())


def packed(*ends):
    return {"cu_seqlens": torch.tensor(ends, dtype=torch.int32)}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"k": K[:, :, :3]}, r"k must have shape .*, where B = 2, S = 7, D = 16, got \[2, 2, 3"),
        ({"q": Q[..., :1], "k": None}, r"q must have shape \[B, H, S, D\] with D >= 2"),
        ({"rotary_dim": 3}, r"rotary_dim must be even and 2 to 16 \(head width\), got 3"),
        ({"rotary_dim": 18}, r"rotary_dim must be an int in \[2, D\] or None, where D = 16"),
        ({"sin": N[:5]}, r"sin must have shape \[cos\], where cos = \[24, 8\], got \[5, 8\]"),
        ({"cos": C[:, :5], "sin": N[:, :5]}, r"cos must have shape \[P, 8\] or \[P, 16\]"),
        ({"cos": C[:0], "sin": N[:0]}, r"cos must have shape .* with P > 0 or B \* S == 0"),
        ({"cos": C[None], "sin": N[None]}, r"cos .*, where S = 7, B = 2, got \[1, 24, 8\]"),
        (
            {"cos": C[None, :S], "sin": N[None, :S], "position_ids": torch.arange(S)},
            "neither position_ids",
        ),
        ({"position_ids": torch.arange(3)}, r"position_ids must have shape \[S\] or \[B, S\]"),
        ({"position_ids": torch.arange(S), **packed(0, 14)}, "exclude each other; got both"),
        (packed(0), r"cu_seqlens must have shape \[ends\] with ends > 1, got \[1\]"),
        (packed(1, 14), "cu_seqlens must start at 0, got 1"),
        (packed(0, 9, 5, 14), "cu_seqlens must not decrease, got 5 after 9 at index 2"),
        (packed(0, 13), "cu_seqlens must end at 14, the number of tokens, got 13"),
        (packed(0, 15), "cu_seqlens must end at 14.*got 15"),
    ],
)
def test_bad_input_is_one_clear_error(changes, message):
    with pytest.raises(ValueError, match=message):
        rope(**{"q": Q, "k": K, "cos": C, "sin": N, **changes})


def test_bad_documents_in_compiled_code():
    torch._dynamo.reset()
    fn = torch.compile(
        lambda q, cu: rope(q, None, C, N, cu_seqlens=cu, implementation="eager"),
        fullgraph=True,
        backend="aot_eager",
    )
    fn(Q, torch.tensor([0, 3, 14]))
    with pytest.raises(ValueError, match="cu_seqlens must not decrease, got 3 after 4"):
        fn(Q, torch.tensor([0, 4, 3, 14]))
