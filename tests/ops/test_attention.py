"""Tests specific to attention; parity with the eager twin is in test_contract.py."""

import contextlib
import importlib.metadata
import itertools
import sys
import types

import pytest
import torch
from helpers import DEVICE, launches, skip_if_refused, skip_unless_usable, threads
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright import ImplementationUnavailable
from tilewright.core import explain, platform
from tilewright.core.registry import FLOATS, short
from tilewright.ops import attention, products
from tilewright.ops.attention import vendors
from tilewright.ops.attention.attention import (
    ATTENTION,
    Request,
    attention_part,
    attention_part_backward,
)
from tilewright.ops.attention.context_parallel import (
    ContextParallel,
    context_parallel_attention,
)
from tilewright.ops.attention.options import Variant
from tilewright.ops.attention.prefixes import prefixes_of

EVERY = pytest.mark.parametrize("name", ATTENTION.names())
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=short)
HQ, HK, D = 4, 2, 8
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # float32 sums of a few dozen terms of size one


def heads(n, seq, *, width=D, batch=1, dtype=torch.float32):
    """[B, n, S, D] with a projection's strides: [B, S, n, D] transposed."""
    return torch.randn(batch, seq, n, width, device=DEVICE).to(dtype).transpose(1, 2)


def qkv(seq, **options):
    return [heads(n, seq, **options) for n in (HQ, HK, HK)]


def ends(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def step(tensors, grad, name, **options):
    """Output and gradients, with fresh leaves."""
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    out = attention(*tensors, implementation=name, **options)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


@EVERY
@DTYPES
def test_documents_are_isolated(name, dtype):
    """What a document holds, NaN too, changes no bit of the others' outputs and gradients, also in
    blocks that it shares with them.
    """
    skip_unless_usable(ATTENTION, name, dtype)
    tensors, grad = qkv(24, dtype=dtype), heads(HQ, 24, dtype=dtype)
    sinks = torch.zeros(HQ, device=DEVICE)
    more = [{}, {"causal": False}, {"window": 4}, {"softcap": 2.0}, {"sinks": sinks}]
    slow = name == "triton" and DEVICE == "cpu"  # the interpreter
    for options in more[: 2 if slow else None]:
        options = {"cu_seqlens": ends(0, 7, 15, 24), **options}
        try:
            before = step(tensors, grad, name, **options)
        except ImplementationUnavailable:
            continue
        for factor in (-3, float("nan")):
            changed = [t.clone() for t in (*tensors, grad)]
            for t in changed:
                t[:, :, 7:15] = t[:, :, 7:15] * factor + 1
            after = step(changed[:3], changed[3], name, **options)
            for a, b in zip(after, before, strict=True):
                same = (a == b).all(-1).all(1)[0]
                assert same[:7].all() and same[15:].all() and not same[7:15].all()


# ---- the definition


def defined(q, k, v, *, cu=(), causal=True, window=None, softcap=None, sinks=None, scale=None):
    """Spelled out per query, in float64."""
    q, k, v = (t.double() for t in (q, k, v))
    scale = scale or q.shape[-1] ** -0.5
    B, H, S, _ = q.shape
    Sk, out = k.shape[2], q.new_zeros(B, H, S, v.shape[3])
    for b in range(B):
        for h in range(H):
            for i in range(S):
                at = i + Sk - S
                begin = max((c for c in cu if c <= at), default=0)
                end = min((c for c in cu if c > at), default=Sk)
                columns = [
                    j
                    for j in range(begin, end)
                    if not causal or (j <= at and (not window or at - j < window))
                ]
                logits = scale * k[b, h // (H // k.shape[1]), columns] @ q[b, h, i]
                logits = softcap * torch.tanh(logits / softcap) if softcap else logits
                weight = logits.exp()
                total = weight.sum() + (sinks[h].double().exp() if sinks is not None else 0)
                out[b, h, i] = weight @ v[b, h // (H // k.shape[1]), columns] / total
    return out


VARIANTS = {
    "plain": {"batch": 2},
    "full": {"batch": 2, "causal": False},
    "scale": {"scale": 0.7, "cu": (0, 3, 21)},
    "tiny_scale": {"scale": 1e-30, "cu": (0, 3, 21)},
    "last_query": {"batch": 2, "queries": 1},  # as with cached keys
    "last_queries": {"batch": 2, "queries": 4},
    "last_queries_full": {"batch": 2, "queries": 4, "causal": False},
    "window": {"window": 3},
    "window_of_one": {"window": 1},
    "window_of_all": {"window": 2**31 - 1},
    "softcap": {"softcap": 0.7},
    "large_softcap": {"softcap": 1e6},
    "sinks": {"sinks": True},
    "packed_window": {"window": 4, "cu": (0, 2, 9, 9, 21)},
    "all": {"window": 5, "softcap": 1.5, "sinks": True, "cu": (0, 8, 21)},
    "full_sinks": {"causal": False, "sinks": True},
}


def drawn(variant, widths=(D, D), dtype=torch.float32):
    """Leaves, an upstream gradient, and the options of `defined`. The 21 keys are no multiple of a
    block.
    """
    torch.manual_seed(1)
    options = dict(VARIANTS[variant])
    batch, queries = options.pop("batch", 1), options.pop("queries", 21)
    sizes = (HQ, queries, widths[0]), (HK, 21, widths[0]), (HK, 21, widths[1])
    leaves = [heads(n, s, width=w, batch=batch, dtype=dtype).requires_grad_() for n, s, w in sizes]
    if options.get("sinks"):
        leaves.append(torch.randn(HQ, device=DEVICE, requires_grad=True))
        options["sinks"] = leaves[3]
    return leaves, heads(HQ, queries, width=widths[1], batch=batch, dtype=dtype), options


def call(leaves, name, *, cu=(), **options):
    cu_seqlens = ends(*cu) if cu else None
    return attention(*leaves[:3], cu_seqlens=cu_seqlens, implementation=name, **options)


def assert_same_with_gradients(out, expected, leaves, grad):
    near = {"rtol": 1e-12, "atol": 1e-12} if out.dtype == torch.float64 else {}
    torch.testing.assert_close(out.double(), expected, **(near or CLOSE))
    for f, e in zip(
        torch.autograd.grad(out, leaves, grad),
        torch.autograd.grad(expected, leaves, grad.double()),
        strict=True,
    ):
        torch.testing.assert_close(f, e, **(near or {"rtol": 1e-4, "atol": 2e-5}))


@EVERY
@pytest.mark.parametrize(
    "variant, widths, dtype",
    [
        *((variant, (D, D), torch.float32) for variant in VARIANTS),
        *((variant, (D, D), torch.float64) for variant in ("plain", "full")),
        # Values that are narrower and wider than keys.
        *((variant, (24, 16), torch.float32) for variant in ("window", "all")),
        *((variant, (8, 20), torch.float32) for variant in ("softcap", "full_sinks")),
    ],
    ids=lambda value: short(value) if isinstance(value, torch.dtype) else str(value),
)
def test_options_are_what_they_say(name, variant, widths, dtype):
    """Outputs and gradients, including the sinks', against the definition."""
    skip_unless_usable(ATTENTION, name, dtype)
    leaves, grad, options = drawn(variant, widths, dtype)
    with skip_if_refused():
        out = call(leaves, name, **options)
    assert_same_with_gradients(out, defined(*leaves[:3], **options), leaves, grad)


@EVERY
@pytest.mark.parametrize(
    "seq, widths, variant",
    [
        (140, (D, D), {}),
        (140, (D, D), {"window": 40}),
        (140, (D, D), {"causal": False}),
        (140, (D, D), {"cu": (0, 70, 130, 131, 140)}),
        (140, (D, D), {"window": 33, "softcap": 2.0, "cu": (0, 110, 140)}),
        # Keys of 129 to 192 columns are two parts in Triton, the second of which may end early.
        (70, (192, 128), {}),
        (70, (160, 24), {"cu": (0, 40, 70)}),
        (70, (136, 144), {"window": 20}),
        (70, (24, 40), {"cu": (0, 40, 70), "causal": False}),
    ],
    ids=str,
)
def test_many_tiles(name, seq, widths, variant):
    """Blocks of keys that need no mask, and those before and after them."""
    skip_unless_usable(ATTENTION, name, torch.float32)
    options = dict(variant)
    options["cu_seqlens"] = ends(*options.pop("cu")) if "cu" in options else None
    torch.manual_seed(2)
    tensors = [heads(n, seq, width=w) for n, w in zip((2, 1, 1), (widths[0], *widths), strict=True)]
    grad = heads(2, seq, width=widths[1])
    with skip_if_refused():
        found = step(tensors, grad, name, **options)
    for f, e in zip(found, step(tensors, grad, "eager", **options), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-4, atol=2e-5)


ZEROS = "aten::new_zeros"  # of dq's sums and turns


@pytest.mark.parametrize(
    "name, capability, options, more",
    [
        (
            "gluon",
            (9, 0),
            {},
            ["roles_forward", "_delta", ZEROS, ZEROS, "roles_backward", "_round"],
        ),
        ("triton", (9, 0), {}, ["_forward", "_backward_q", "_backward_kv"]),
        ("triton", (10, 0), {}, ["_forward", "_backward_q", "_backward_kv"]),
        # Its tiles of 64 keys need a map of their own.
        (
            "gluon",
            (9, 0),
            {"softcap": 2.0},
            ["roles_forward", "_backward_q", "_map_documents", "_backward_kv"],
        ),
    ],
    ids=["hopper", "triton on hopper", "blackwell", "softcap"],
)
def test_forward_and_backward_share_a_map_of_tiles(name, capability, options, more, monkeypatch):
    """All launches of packed documents: one cast, by the check of cu_seqlens, and no read on the
    host.
    """
    if not platform.interpreting():
        pytest.skip("launches in Triton's interpreter, which TRITON_INTERPRET asks for")
    q, k, v = (heads(n, 300, width=128, dtype=torch.bfloat16).requires_grad_() for n in (4, 2, 2))
    cu, grad = ends(0, 40, 40, 171, 300).long(), torch.ones_like(q)

    def run():
        out = attention(q, k, v, cu_seqlens=cu, implementation=name, **options)
        torch.autograd.grad(out, [q, k, v], grad)

    found = launched(monkeypatch, capability, run)
    assert found == ["aten::_to_copy", "_map_documents", *more]


def test_a_map_of_tiles_is_of_the_documents_of_its_call():
    """cu_seqlens that change between calls, and between forward and backward: in place, past their
    version, and other ones at their address.
    """
    skip_unless_usable(ATTENTION, "triton", torch.float32)
    tensors, grad = qkv(80), heads(HQ, 80)
    first, second = ends(0, 10, 80), ends(0, 71, 80)
    want = {x: step(tensors, grad, "triton", cu_seqlens=x) for x in (first, second)}
    for how in ("in place", "past its version", "at its address"):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        cu = first.long()
        out = attention(*leaves, cu_seqlens=cu, implementation="triton")
        if how == "in place":
            cu.copy_(second)
        elif how == "past its version":
            cu.data.copy_(second)
        else:
            memory = cu.untyped_storage()
            memory.copy_(second.long().untyped_storage())
            cu = torch.empty(0, dtype=torch.int64).set_(memory)
        assert all(map(torch.equal, torch.autograd.grad(out, leaves, grad), want[first][1:])), how
        assert all(map(torch.equal, step(tensors, grad, "triton", cu_seqlens=cu), want[second]))


@pytest.mark.parametrize("documents", [(0, 5), (0, 0, 3, 5), (0, 1, 2, 2, 5)])
def test_a_map_of_tiles_is_a_function_of_the_documents(documents):
    skip_unless_usable(ATTENTION, "triton", torch.float32)
    from tilewright.kernels.attention import attention_triton as k

    cu, found = ends(*documents).long(), []
    allocate = k.operators.map_documents
    for before in (0, -1):
        memory = allocate(cu, 5, 2).fill_(before)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(k.operators, "map_documents", lambda *_, memory=memory: memory)
            found.append(k.map_documents(cu, 5, 2))
    assert torch.equal(*found)
    bounds, tiles, capacity = k._parts(found[0], 5, 2)
    assert bounds.tolist() == [*documents, *[0] * (len(documents) % 2)]
    document, row, end = (tiles[i * capacity : (i + 1) * capacity] for i in range(3))
    lengths = [b - a for a, b in itertools.pairwise(documents)]
    want = [
        (e, a, documents[e + 1])
        for e, n in enumerate(lengths)
        for a in range(documents[e], documents[e] + n, 2)
    ]
    count = int(tiles[3 * capacity])
    assert [*zip(*(t[:count].tolist() for t in (document, row, end)), strict=True)] == want


@pytest.mark.parametrize("window", [0, 72], ids=["causal", "window"])
def test_triton_masks_blocks_at_the_edge_alone(monkeypatch, window):
    """Some blocks of logits in forward and backward have no mask, and every mask hides something.
    (The compile gate checks that no loop divides.)
    """
    if not platform.interpreting():
        pytest.skip("counts in Triton's interpreter, which TRITON_INTERPRET asks for")
    skip_unless_usable(ATTENTION, "triton", torch.float32)
    from tilewright.kernels.attention import attention_triton as k

    masks, blocks = [], []
    monkeypatch.setattr(k, "seen", lambda *a, own=k.seen: masks.append(own(*a)) or masks[-1])
    monkeypatch.setattr(k, "logits", lambda *a, own=k.logits: blocks.append(0) or own(*a))
    q, *kv = (t[:, :1] for t in qkv(128))
    out, lse = k.forward(q, *kv, None, None, Variant(window=window), 0)
    k.backward(out, q, *kv, out, lse, None, None, Variant(window=window), 0)
    assert masks and all(not m.handle.data.all() for m in masks)
    assert len(blocks) >= (1.3 if window else 2) * len(masks), (len(blocks), len(masks))


def test_sdpa_of_other_values_allocates_no_scores():
    """PyTorch's kernel of a CPU takes one width, and its other path has S x S scores."""
    S = 256
    tensors = [torch.randn(1, n, S, w, requires_grad=True) for n, w in ((4, 24), (2, 24), (2, 16))]
    assert largest("sdpa", tensors) <= 4 * S * 24
    assert largest("eager", tensors) >= S * S, "the recorder sees nothing"


PREFIXED = ends(0, 1, 10, 14, 16, 19, 19, 23)  # the third and fifth begin as the second does
PREFIXES = ((10, 14, 1, 6), (16, 19, 1, 10))


@EVERY
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 3}, {"window": 8, "softcap": 2.0}, {"sinks": True}],
    ids=str,
)
def test_documents_after_a_prefix_are_whole_documents(name, options):
    """Outputs, and gradients: of a prefix's keys the sum over all documents that begin with it."""
    skip_unless_usable(ATTENTION, name, torch.float32)
    if options.get("sinks"):
        options = {"sinks": heads(1, HQ)[0, 0, :, 0]}
    tensors, grad = qkv(23), heads(HQ, 23)
    with skip_if_refused():
        found = step(tensors, grad, name, cu_seqlens=PREFIXED, prefixes=PREFIXES, **options)
    rows = [*range(10), *range(1, 6), *range(10, 16), *range(1, 10), *range(16, 23)]
    own = [i for i in range(len(rows)) if not (10 <= i < 15 or 21 <= i < 30)]
    again = torch.zeros(1, HQ, len(rows), D, device=DEVICE)
    again[:, :, own] = grad
    cu = ends(0, 1, 10, 19, 21, 33, 33, 37)
    out, *gradients = step(
        [t[:, :, rows] for t in tensors], again, "eager", cu_seqlens=cu, **options
    )
    of = torch.tensor(rows, device=DEVICE)
    sums = [
        torch.zeros_like(t).index_add_(2, of, g) for t, g in zip(tensors, gradients, strict=True)
    ]
    for a, b in zip(found, (out[:, :, own], *sums), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_whole_documents_have_the_bits_that_they_have_without_prefixes():
    tensors, grad = qkv(23), heads(HQ, 23)
    grad[:, :, 10:14] = grad[:, :, 16:19] = 0  # of what the others add to their prefix
    for name in ("sdpa", "eager"):
        plain = step(tensors, grad, name, cu_seqlens=PREFIXED)
        found = step(tensors, grad, name, cu_seqlens=PREFIXED, prefixes=PREFIXES)
        for a, b in zip(plain, found, strict=True):
            for rows in (slice(0, 10), slice(14, 16), slice(19, 23)):
                assert torch.equal(a[:, :, rows], b[:, :, rows])


def test_prefixes_are_one_graph():
    fn, tensors = torch.compile(attention, fullgraph=True, backend="eager"), qkv(23)
    options = {"cu_seqlens": PREFIXED, "prefixes": PREFIXES, "implementation": "eager"}
    torch.testing.assert_close(fn(*tensors, **options), attention(*tensors, **options), **CLOSE)


def test_prefixes_are_of_the_whole_document_before():
    assert prefixes_of((0, 9, 12, 14, 20), (0, 4, 6, 0)) == ((9, 12, 0, 4), (12, 14, 0, 6))
    assert prefixes_of((0, 3), (0,)) == ()


@pytest.mark.parametrize(
    "prefixes, options, message",
    [
        (((10, 14, 1, 11),), {}, "prefixes must be .* key_end <= first"),
        (((10, 14, 1, 6), (10, 14, 1, 6)), {}, "in order, got"),
        (((10, 14, 1, 6), (16, 19, 10, 12)), {}, "are in a document with a prefix"),
        (((10, 13, 1, 6),), {}, "no document of rows 10 to 13"),
        (((10, 14, 2, 6),), {}, "none that begins with rows 2 to 6"),
        (((16, 19, 1, 12),), {}, "none that begins with rows 1 to 12"),
        (PREFIXES, {"causal": False}, "prefixes need causal=True"),
        (PREFIXES, {"dropout_p": 0.1, "seed": 1}, "prefixes need causal=True and dropout_p = 0"),
        (PREFIXES, {"cu_seqlens": None}, "prefixes need cu_seqlens"),
    ],
    ids=str,
)
def test_what_are_no_prefixes_is_refused(prefixes, options, message):
    with pytest.raises(ValueError, match=message):
        attention(
            *(t.cpu() for t in qkv(23)),
            **{"cu_seqlens": PREFIXED.cpu(), "prefixes": prefixes} | options,
        )


def test_documents_are_one_graph_of_the_eager_twin():
    """The values of cu_seqlens are not read on the host; other values of the same length reuse the
    graph.
    """
    torch._dynamo.reset()
    options = {"window": 4, "softcap": 3.0, "sinks": heads(1, 1).flatten()[0].expand(HQ)}
    tensors, grad = qkv(17), heads(HQ, 17)
    compiled = torch.compile(
        lambda q, k, v, cu: attention(q, k, v, cu_seqlens=cu, implementation="eager", **options),
        fullgraph=True,
        backend="eager",
    )
    for cu in (ends(0, 5, 5, 17), ends(0, 0, 11, 17)):
        expected = step(tensors, grad, "eager", cu_seqlens=cu, **options)
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = compiled(*leaves, cu)
        for f, e in zip((out, *torch.autograd.grad(out, leaves, grad)), expected, strict=True):
            torch.testing.assert_close(f, e, **CLOSE)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "name, how",
    [
        *((name, "dynamic") for name in ("eager", "sdpa", "triton")),
        *((name, "marked") for name in ("eager", "sdpa", "auto")),
    ],
)
def test_one_graph_serves_other_batches_and_lengths(name, how):
    """Also where the compiler makes the head width symbolic; it may be specialized."""
    torch._dynamo.reset()
    counter = CompileCounter()

    def expect(*tensors):
        expected = attention(*tensors, implementation="eager")
        torch.testing.assert_close(compiled(*tensors), expected, **CLOSE)

    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, implementation=name),
        fullgraph=True,
        backend=counter,
        dynamic=True if how == "dynamic" else None,
    )
    # The interpreter is slow.
    for B, S, width in ((5, 7, 16), (3, 12, 16), (6, 11, 24))[:: 2 if name == "triton" else 1]:
        tensors = [torch.randn(B, n, S, width) for n in (4, 2, 2)]
        if how == "marked":
            for t, dim in itertools.product(tensors, (0, 2, 3)):
                torch._dynamo.mark_dynamic(t, dim)
        expect(*tensors)
        assert counter.frame_count == 1 or width == 24
    if how == "dynamic":
        expect(*[torch.randn(3, 4, 6, 20)] * 3)
    torch._dynamo.reset()


PARTS = [n for n in ATTENTION.names() if n in ("eager", "triton", "cpp")]


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 1.1}, {"window": 6}, {"causal": False}, {"values": 20}],
    ids=["plain", "softcap", "window", "full", "values"],
)
def test_parts_make_the_whole(name, options):
    """Keys in three parts, merged by their log-sum-exps, and their gradients equal those of one
    call. The queries before a part see none of its keys.
    """
    skip_unless_usable(ATTENTION, name, torch.float32)
    S, cuts = 22, (0, 7, 16, 22)
    options = dict(options)
    width = options.pop("values", D)
    (q, k, _), v = qkv(S), heads(HK, S, width=width)
    grad = heads(HQ, S, width=width)
    whole = step((q, k, v), grad, name, **options)
    pieces = [(slice(a, b), a) for a, b in itertools.pairwise(cuts)]
    found = [
        attention_part(q, k[:, :, s], v[:, :, s], offset=-a, implementation=name, **options)
        for s, a in pieces
    ]
    lse = torch.stack([lse for _, lse in found]).logsumexp(0)
    out = sum(o * torch.exp(part - lse)[..., None] for o, part in found)
    torch.testing.assert_close(out, whole[0], **CLOSE)
    if options.get("causal", True):
        assert found[1][1][:, :, :7].isneginf().all() and not found[1][0][:, :, :7].any()
    grads = [
        attention_part_backward(
            grad, q, k[:, :, s], v[:, :, s], out, lse, offset=-a, implementation=name, **options
        )
        for s, a in pieces
    ]
    torch.testing.assert_close(sum(g[0] for g in grads), whole[1], **CLOSE)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([g[i] for g in grads], 2), whole[i + 1], **CLOSE)


def test_parts_of_documents():
    q, k, v = qkv(17)
    cu = ends(0, 5, 17)
    out, lse = attention_part(q, k, v, cu_seqlens=cu, implementation="eager")
    torch.testing.assert_close(
        out, attention(q, k, v, cu_seqlens=cu, implementation="eager"), **CLOSE
    )
    assert lse.shape == (1, HQ, 17)
    v[:, :, 3] = float("nan")  # reaches no other document
    out, lse = attention_part(q, k, v, cu_seqlens=cu, implementation="eager")
    found = attention_part_backward(
        heads(HQ, 17), q, k, v, out, lse, cu_seqlens=cu, implementation="eager"
    )
    assert all(t[:, :, 5:].isfinite().all() for t in (out, *found)) and found[0].isnan().any()
    empty = [t[:, :, :0] for t in (q, k, v)]
    assert attention_part(*empty, cu_seqlens=ends(0, 0), implementation="eager")[0].shape == (
        1,
        HQ,
        0,
        D,
    )
    with pytest.raises(
        ValueError, match="offset must be such that cu_seqlens is None or offset == 0, got 3"
    ):
        attention_part(q, k, v, cu_seqlens=cu, offset=3)
    with pytest.raises(TypeError, match=r"offset must be an int, got 1\.5"):
        attention_part(q, k, v, offset=1.5)
    with pytest.raises(ValueError, match=r"lse must have shape \[B, Hq, S\], where B = 1, Hq = 4"):
        attention_part_backward(q, q, k, v, q, lse[:, :1])


# ---- dropout

SEED, OFFSET = 2**61 + 2**32 + 5, 2**28 + 7


def random_bits(i, j, head):
    """The 32 bits of query i and key j, by Philox4x32-10 in Python's integers."""
    low = 2**32 - 1
    c, key = [j // 4, i, head, 2**29 + OFFSET], [SEED & low, SEED >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ key[0], b & low, a >> 32 ^ c[3] ^ key[1], a & low]
        key = [key[0] + 0x9E3779B9 & low, key[1] + 0xBB67AE85 & low]
    return c[j % 4]


def mask_of(p, batch, seq, cu=()):
    """Whether each pair is kept, [B, HQ, S, S]; of keys before a query's document, nothing."""
    kept = torch.zeros(batch, HQ, seq, seq, dtype=torch.bool, device=DEVICE)
    for b, h, i in itertools.product(range(batch), range(HQ), range(seq)):
        begin = max((c for c in cu if c <= i), default=0)
        for j in range(begin, seq):
            kept[b, h, i, j] = random_bits(i, j - begin, b * HQ + h) >= round(p * 2**32)
    return kept


def probe(name, p, seq, *, batch=1, **options):
    """Without logits and with the unit matrix for values, the output is the mask, scaled."""
    zero = torch.zeros(batch, HQ, seq, D, device=DEVICE)
    unit = torch.eye(seq, device=DEVICE).expand(batch, HQ, seq, seq)
    given = {"dropout_p": p, "seed": SEED, "offset": OFFSET, **options}
    return attention(zero, zero, unit, implementation=name, **given)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("cu", [(), (0, 3, 3, 13, 22)], ids=["whole", "packed"])
def test_the_mask_of_dropout_is_a_function_of_positions(name, cu):
    """Bit for bit, and the others are divided by 1 - p."""
    skip_unless_usable(ATTENTION, name, torch.float32)
    B, S = 1 if cu else 2, 22
    packed = {"cu_seqlens": ends(*cu)} if cu else {}
    found = probe(name, 0.3, S, batch=B, causal=False, **packed)
    plain = probe(name, 0.0, S, batch=B, causal=False, **packed)
    expected = torch.where(mask_of(0.3, B, S, cu), plain / (1 - 0.3), 0.0)
    assert torch.equal(found != 0, expected != 0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_the_heads_has_the_mask_of_all(name):
    skip_unless_usable(ATTENTION, name, torch.float32)
    torch.manual_seed(4)
    (q, k, v), grad = qkv(37), heads(HQ, 37)
    options = {"dropout_p": 0.4, "seed": SEED, "cu_seqlens": ends(0, 9, 37)}
    whole = step((q, k, v), grad, name, **options)
    for head in range(HK):  # of keys, and those of queries that read it
        of_q, of_k = slice(head * HQ // HK, (head + 1) * HQ // HK), slice(head, head + 1)
        own = q[:, of_q], k[:, of_k], v[:, of_k]
        found = step(own, grad[:, of_q], name, **options, first_head=of_q.start)
        for t, want, of in zip(found, whole, (of_q, of_q, of_k, of_k), strict=True):
            torch.testing.assert_close(t, want[:, of], **CLOSE)
    with pytest.raises(ValueError, match="first_head must be such that first_head == 0 or B == 1"):
        attention(*(t.expand(2, -1, -1, -1) for t in (q, k, v)), first_head=1)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("variant", ["window", "all", "full_sinks"])
def test_dropout_is_of_the_softmaxs_probabilities(name, variant):
    """Output and gradients in float64 with a mask that the test draws."""
    skip_unless_usable(ATTENTION, name, torch.float32)
    leaves, grad, options = drawn(variant, (D, 12))
    given = {"dropout_p": 0.4, "seed": SEED, "offset": OFFSET}
    out = call(leaves, name, **given, **options)
    # Probabilities are the outputs for the unit matrix, so that only dropout is this test's.
    unit = torch.eye(21, device=DEVICE, dtype=torch.float64).expand(1, HK, 21, 21)
    p = defined(*leaves[:2], unit, **options)
    p = torch.where(mask_of(0.4, 1, 21, options.get("cu", ())), p / (1 - 0.4), 0.0)
    expected = p @ leaves[2].double().repeat_interleave(HQ // HK, 1)
    assert_same_with_gradients(out, expected, leaves, grad)


def test_the_mask_of_dropout_does_not_depend_on_blocks():
    skip_unless_usable(ATTENTION, "triton", torch.float32)
    from tilewright.kernels.attention import attention_triton as k

    torch.manual_seed(7)
    S, cu = 70, (0, 9, 70)
    tensors, grad = qkv(S), heads(HQ, S)
    found = []
    for m, n in ((16, 16), (32, 64)):
        config = {"BLOCK_M": m, "BLOCK_N": n, "num_warps": 4, "num_stages": 1}
        with contextlib.ExitStack() as blocks:
            for tunable in k.TUNABLES:
                for large in (True, False):
                    key = 16, 4, large, False
                    blocks.enter_context(tunable.override(tensors[0].device, key, config))
            options = {"dropout_p": 0.4, "seed": SEED, "cu_seqlens": ends(*cu)}
            found.append(step(tensors, grad, "triton", **options))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("cu", [(), (0, 3, 150, 151, 290)], ids=["whole", "packed"])
def test_the_mask_of_dropout_in_cpp_is_that_of_eager(cu):
    """Over several blocks of queries and of keys."""
    skip_unless_usable(ATTENTION, "cpp", torch.float32)
    packed = {"cu_seqlens": ends(*cu)} if cu else {}
    for window in (None, 140):
        options = {"window": window, **packed}
        found, expected = (probe(name, 0.3, 290, **options) for name in ("cpp", "eager"))
        assert torch.equal(found != 0, expected != 0)
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("cu", [(), (0, 3, 150, 151, 290)], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_threads_do_not_change_the_bits_of_cpp(cu, dtype):
    """One head of keys, whose gradients are sums over runs of queries."""
    skip_unless_usable(ATTENTION, "cpp", dtype)
    torch.manual_seed(9)
    tensors, grad = [heads(n, 290, dtype=dtype) for n in (3, 1, 1)], heads(3, 290, dtype=dtype)
    options = {"dropout_p": 0.4, "seed": SEED, "cu_seqlens": ends(*cu) if cu else None}
    found = []
    for number in (1, 2, 5):
        with threads(number):
            found.append(step(tensors, grad, "cpp", **options))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    exact = step([t.double() for t in tensors], grad.double(), "eager", **options)
    for f, e in zip(found[0], exact, strict=True):
        assert (f.double() - e).norm() < 4 * torch.finfo(dtype).eps * e.norm()  # of sums


@EVERY
def test_no_dropout_has_the_bits_of_a_call_without_it(name):
    skip_unless_usable(ATTENTION, name, torch.float32)
    tensors, grad = qkv(21), heads(HQ, 21)
    options = {"dropout_p": 0.0, "seed": SEED, "offset": OFFSET}
    assert all(map(torch.equal, step(tensors, grad, name, **options), step(tensors, grad, name)))


@pytest.mark.parametrize("name", ["eager", "triton"])  # test_dynamic.py compiles that of `auto`
def test_another_seed_and_offset_do_not_recompile(name):
    skip_unless_usable(ATTENTION, name, torch.float32)
    torch._dynamo.reset()
    counter = CompileCounter()
    q, k, v = (t.detach() for t in qkv(9))

    def call(seed, offset):
        options = {"dropout_p": 0.5, "seed": seed, "offset": offset, "implementation": name}
        return attention(q, k, v, **options)

    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for seed, offset in ((5, 7), (6, 9), (2**40, 2**28), (8, 8)):
        torch.testing.assert_close(compiled(seed, offset), call(seed, offset), **CLOSE)
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_dropout_needs_a_seed_and_whole_sequences():
    q, k, v = qkv(6)
    with pytest.raises(ValueError, match="seed must be given where dropout_p is not 0"):
        attention(q, k, v, dropout_p=0.1)
    with pytest.raises(ImplementationUnavailable, match="does not compute dropout by counters"):
        attention(q, k, v, dropout_p=0.1, seed=1, implementation="sdpa")
    with pytest.raises(TypeError, match="no argument dropout_p: a mask of dropout has positions"):
        context_parallel_attention(q, k, v, ContextParallel(), dropout_p=0.1)
    for name, value in (("dropout_p", 1.0), ("seed", -1), ("offset", 2**29)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            attention(q, k, v, **{"dropout_p": 0.1, "seed": 1, name: value})


# ---- what implementations declare


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"window": 4}, "a sliding window without a mask of S x S"),
        ({"softcap": 1.0}, "a softcap"),
        ({"sinks": torch.zeros(HQ), "softcap": 1.0}, "a softcap, sinks"),
    ],
    ids=str,
)
def test_a_request_outside_is_refused_with_the_reason(options, reason):
    """The reason names implementations that support it, and `auto` takes one of them."""
    tensors = [t.cpu() for t in qkv(6)]
    said = rf"attention\[sdpa\]: does not compute {reason}.*usable here: \[.*'eager'"
    with pytest.raises(ImplementationUnavailable, match=said):
        attention(*tensors, implementation="sdpa", **options)
    out = attention(*tensors, **options)
    torch.testing.assert_close(out, attention(*tensors, implementation="eager", **options), **CLOSE)


def test_every_implementation_declares_what_it_lacks():
    """The unsupported options, by implementation."""
    options = ("window", "softcap", "sinks", "shorter", "dropout", "part")
    asks = {option: Request(head_dim=64, **{option: True}) for option in options} | {
        "wide": Request(head_dim=512),
        "odd": Request(head_dim=20),
        "prefixes": Request(head_dim=64, packed=True, shorter=True, prefixes=True),
        "packed": Request(head_dim=64, packed=True),
        "packed gradient": Request(head_dim=64, packed=True, gradient=True),
        "values": Request(head_dim=64, value_dim=32),
        "latent": Request(head_dim=192, value_dim=128),
        "wide values": Request(head_dim=64, value_dim=512),
    }
    refused = {
        i.name: {ask for ask, request in asks.items() if i.refuses(request)}
        for i in ATTENTION.implementations
    }
    flash = {"dropout", "part", "wide", "odd", "wide values"}
    assert refused == {
        "eager": set(),
        "gluon": {"dropout", "wide", "odd", "values", "wide values"},
        "triton": {"wide", "wide values"},
        "cpp": set(),
        "sdpa": {"window", "softcap", "sinks", "shorter", "dropout", "part"},
        "native": flash | {"softcap", "sinks", "shorter", "prefixes", "values", "latent"},
        "flash_attention_2": flash | {"sinks", "values", "latent"},
        "flash_attention_3": flash | {"sinks", "values"},
        "flash_attention_4": flash,
    }


def test_auto_on_a_cpu_takes_cpp_for_what_pytorch_does_not_compute():
    if reason := platform.no_cpp("cpu"):
        pytest.skip(reason)
    for option in ("dropout", "window", "softcap", "sinks", "part"):
        request = Request(head_dim=64, **{option: True})
        chosen = [ATTENTION.choose("cpu", dtype, request) for dtype in FLOATS]
        assert chosen == ["cpp", "cpp", "eager"], (option, FLOATS)


@pytest.mark.parametrize(
    "capability, ours, theirs_are_slower",
    [("AVX512", True, True), ("AVX512", False, False), ("AVX2", False, True)],
)
def test_auto_on_a_cpu_takes_cpp_where_pytorchs_is_slower(
    capability, ours, theirs_are_slower, monkeypatch
):
    if reason := platform.no_cpp("cpu"):
        pytest.skip(reason)
    monkeypatch.setattr(products, "takes", lambda dtype: ours)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for request in (None, Request(head_dim=64, packed=True)):
        chosen = [ATTENTION.choose("cpu", dtype, request) for dtype in FLOATS]
        assert chosen == ["cpp" if theirs_are_slower else "sdpa"] * 2 + ["sdpa"]


V2, V3, V4 = sorted(vendors.FLASH)


@pytest.mark.parametrize(
    "installed, capability, expected",
    [
        (  # gradients of version 4's packed kernels were wrong
            ("flash-attn-4", "flash-attn-3"),
            (9, 0),
            {"plain": V4, "packed": V3, "softcap": V4, "sinks": V4, "D=256": V4},
        ),
        (
            ("flash-attn-4", "flash-attn-3"),
            (10, 0),
            {"plain": V4, "packed": V4, "D=256": "native"},
        ),
        (("flash-attn-3",), (9, 0), {"plain": V3, "softcap": V3, "sinks": "gluon"}),
        (("flash-attn-3",), (10, 0), {"plain": "native", "softcap": "triton", "sinks": "triton"}),
        (("flash-attn",), (8, 0), {"plain": "native", "softcap": V2, "sinks": "triton"}),
        (("flash-attn",), (9, 0), {"plain": "gluon", "packed": "gluon", "softcap": V2}),
        (
            (),
            (9, 0),
            dict.fromkeys(
                ("plain", "packed", "softcap", "sinks", "D=64, packed", "a cache"), "gluon"
            )
            | dict.fromkeys(("D=64", "D=32, packed", "D=256"), "native")
            # No pass of theirs is faster in specialized warps, or has them.
            | dict.fromkeys(("D=256, sinks", "D=64, sinks", "dropout", "odd"), "triton"),
        ),
        ((), (8, 9), {"plain": "native", "packed": "native", "softcap": "triton"}),
    ],
)
def test_what_auto_takes_on_cuda(installed, capability, expected, monkeypatch):
    """FlashAttention, then PyTorch's, then tilewright's for requests those do not support."""
    on_cuda(monkeypatch, capability, *installed)

    def taken(dtype=torch.bfloat16, **request):
        return ATTENTION.choose("cuda", dtype, Request(**request))

    asks = {
        "plain": {},
        "packed": {"packed": True, "window": True, "gradient": True},
        "softcap": {"softcap": True},
        "sinks": {"sinks": True},
        "D=64": {"head_dim": 64},
        "D=64, packed": {"head_dim": 64, "packed": True},
        "D=32, packed": {"head_dim": 32, "packed": True},
        "D=256": {"head_dim": 256},
        "a cache": {"shorter": True},
        "D=256, sinks": {"head_dim": 256, "sinks": True},
        "D=64, sinks": {"head_dim": 64, "sinks": True, "window": True},
        "dropout": {"dropout": True},
        "odd": {"head_dim": 100},
    }
    for ask, name in expected.items():
        assert taken(**{"head_dim": 128, **asks[ask]}) == name, ask
    # Who is given kernels of version 2's class where version 3's would run is told so.
    told = {
        row.name
        for row in explain.rows([ATTENTION], "cuda", torch.bfloat16)
        if row.does and f"{V3}, which is not installed" in row.does
    }
    slower = {"native", "gluon", "triton", *({V2} if "flash-attn" in installed else ())}
    newest = {"flash-attn-3", "flash-attn-4"} & {*installed}
    assert told == (slower if capability == (9, 0) and not newest else set())
    # A ring's parts, odd widths and queries with a cache; float32; and requests none of them
    # supports.
    ours = "gluon" if capability == (9, 0) else "triton"
    assert taken(head_dim=128, part=True) == ours and taken(head_dim=100) == "triton"
    assert taken(head_dim=128, shorter=True, softcap=True, part=True) == ours
    assert taken(torch.float32, head_dim=128) == "triton"
    best = expected.get("packed", expected["plain"])
    latent = {"head_dim": 192, "value_dim": 128, "packed": True, "gradient": True}
    assert taken(**latent) == (best if best in (V3, V4) else ours)
    assert taken(head_dim=512) == "sdpa" and taken(head_dim=512, sinks=True) == "eager"


def on_cuda(monkeypatch, capability, *installed):
    """As on a CUDA device of this compute capability, with these packages of FlashAttention."""
    monkeypatch.setattr(platform, "no_cuda", lambda least=0: None)
    monkeypatch.setattr(
        platform, "no_distribution", lambda name, *oldest: None if name in installed else "not here"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "of no table")
    monkeypatch.setattr(vendors, "varlen", lambda: (None, True))


def launched(monkeypatch, capability, run):
    """What run() would launch on such a device, by the choices of launch configurations; "roles"
    stands before kernels with specialized warps.
    """
    from tilewright.kernels import tuning
    from tilewright.kernels.attention import (
        attention_backward_gluon,
        attention_gluon,
        attention_triton,
        specialized,
    )
    from tilewright.kernels.moe import grouped_gemm_triton

    for tunable in specialized.TUNABLES:
        monkeypatch.setattr(tunable, "_chosen", {})
    monkeypatch.setattr(tuning, "_arch", lambda device: 10 * capability[0] + capability[1])
    monkeypatch.setattr(attention_triton, "large_shared_memory", lambda device: True)
    monkeypatch.setattr(platform, "no_gluon", lambda device_type, capabilities: None)
    modules = {
        attention_triton: "",
        attention_gluon: "roles",
        attention_backward_gluon: "roles",
        grouped_gemm_triton: "",
    }
    with ATTENTION.fresh_choices():
        return launches(monkeypatch, run, modules)


ONE_LOOP = {"_forward", "_backward_q", "_backward_kv"}
# Calls, and the words of `explain` on a device of 9.0 about kernels of FlashAttention 2's class
# that they are given there: shape's width, or widths of keys and of values; options.
SLOW_CALLS = {
    "plain": (128, {}, None),
    "packed": (128, {"packed": True}, None),
    "window": (128, {"window": 40}, None),
    "sinks": (128, {"sinks": True}, None),
    "sinks, window": (64, {"sinks": True, "window": 40}, "forward of windows in rows of up to 64"),
    "a prefix's keys": (128, {"keys": 200}, None),
    "softcap": (128, {"softcap": 30.0}, "the backward of a softcap"),
    "softcap, rows of 64": (64, {"softcap": 30.0}, "the backward of a softcap"),
    "latent": ((192, 128), {}, "and of latent attention (192 and 128)"),
    "latent, packed": ((192, 128), {"packed": True}, "and of latent attention (192 and 128)"),
    "dropout": (128, {"dropout_p": 0.1, "seed": 1}, "every call"),
    "narrow values": ((128, 64), {}, "every call"),
    "wide values": ((96, 128), {}, "narrower or wider than keys"),
    "wide, sinks": (256, {"sinks": True}, "every call"),
    "wide": (256, {}, "dense attention is cuDNN's"),
    "wide, packed": (256, {"packed": True}, "documents and windows are FlashAttention 2's"),
    "odd": (100, {}, "every call"),
    "512": (512, {}, "rows of more than 256 elements"),
    "512, sinks": (512, {"sinks": True}, "`auto` then takes eager"),
}


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)], ids=["hopper", "blackwell"])
@pytest.mark.parametrize("call", SLOW_CALLS)
def test_no_call_is_given_a_slower_kernel_without_a_sentence(call, capability, monkeypatch):
    """Where neither FlashAttention 3 nor 4 is installed: what `auto` takes and launches, and what
    `explain` says of it.
    """
    widths, options, said = SLOW_CALLS[call]
    (wide, value), options = widths if isinstance(widths, tuple) else (widths, widths), {**options}
    keys, bf16 = options.pop("keys", 96), torch.bfloat16
    q, k, v = (
        heads(n, seq, width=width, dtype=bf16).requires_grad_()
        for n, seq, width in ((4, 96, wide), (2, keys, wide), (2, keys, value))
    )
    if options.pop("packed", False):
        options["cu_seqlens"] = ends(0, 40, 96)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(4)
    kind = Request(
        head_dim=wide,
        value_dim=None if value == wide else value,
        gradient=True,
        packed="cu_seqlens" in options,
        shorter=keys > 96,
        dropout="seed" in options,
        **{n: n in options for n in ("window", "softcap", "sinks")},
    )
    with monkeypatch.context() as patch:
        on_cuda(patch, capability)
        auto = ATTENTION.choose("cuda", bf16, kind)
        sentences = [r.does for r in explain.rows([ATTENTION], "cuda", bf16) if r.name == auto]
    if auto == "eager":  # its sentence is that of the last one that refuses
        sentences = [vendors.sdpa_does("cuda")]
    [sentence] = sentences
    if auto in ("gluon", "triton"):

        def run():
            out = attention(q, k, v, implementation=auto, **options)
            torch.autograd.grad(out, [q, k, v], torch.ones_like(out))

        slow = bool(ONE_LOOP & {*launched(monkeypatch, capability, run)})
        assert slow == (capability[0] == 10 or said is not None)
    newest = f"flash_attention_{capability[0] - 6}, which is not installed"
    if wide <= 256:
        assert newest in sentence
    if capability == (9, 0) or auto in ("sdpa", "eager"):
        assert said is None or said in sentence
    else:
        words = {"native": "documents and windows are FlashAttention 2's", "triton": "every call"}
        assert words[auto] in sentence


@pytest.mark.parametrize(
    "installed, capability, said, unsaid",
    [
        (("flash-attn-4",), (9, 0), f"which {V4} refuses", "warps are specialized for "),
        (("flash-attn-3",), (9, 0), "one loop", "not installed"),
        (("flash-attn-4",), (10, 0), "one loop", "not installed"),
        (("flash-attn-3",), (10, 0), f"{V4}, which is not installed", "9.0"),
        (("flash-attn",), (10, 0), f"{V4}, which is not installed", "9.0"),
        ((), (12, 0), "one loop", "not installed"),
    ],
)
def test_explain_names_what_is_not_installed_and_would_be_faster(
    installed, capability, said, unsaid, monkeypatch
):
    on_cuda(monkeypatch, capability, *installed)
    words = {r.name: r.does or "" for r in explain.rows([ATTENTION], "cuda", torch.bfloat16)}
    assert said in words["triton"] and unsaid not in words["native"] + words[V2]
    assert ("not installed" in words["triton"]) == ("not installed" in words["native"])
    if "flash-attn" in installed:
        assert said in words[V2]
    on_cuda(monkeypatch, (8, 0))
    assert not any(r.does for r in explain.rows([ATTENTION], "cuda", torch.bfloat16)[:5])


@pytest.mark.parametrize("version", vendors.FLASH)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("longest", [None, 7], ids=["read", "told"])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 3, "softcap": 2.0}, {"causal": False}, {"sinks": True}],
    ids=["plain", "window", "full", "sinks"],
)
def test_flash_attention_is_called_as_it_is_laid_out(
    version, packed, longest, options, monkeypatch
):
    """A stand-in module computes by the definition, with flash-attn's arguments and results."""
    options = dict(options)
    if options.pop("sinks", False):
        if version != V4:
            pytest.skip("only flash-attn 4 has sinks; the others refuse them")
        options["sinks"] = torch.randn(HQ, device=DEVICE, dtype=torch.float64)
    strict = "sinks" in options  # deterministic algorithms are requested, and passed on

    def stand_in(q, k, v, *, softmax_scale, causal, window_size, softcap, deterministic, **given):
        sinks, cu = given.pop("learnable_sink", None), given.get("cu_seqlens_q")
        if packed:
            assert given.pop("max_seqlen_q") == given.pop("max_seqlen_k") == (longest or 5)
            assert given.pop("cu_seqlens_q") is given.pop("cu_seqlens_k")
            assert cu.dtype == torch.int32
        assert not given and deterministic == strict
        assert sinks is None or sinks.dtype == torch.float32  # they do not support float64
        left, right = window_size
        assert (left is None if version == V4 else left == -1) or right == 0
        q, k, v = (t.unsqueeze(0) if packed else t for t in (q, k, v))
        out = attention(
            *(t.transpose(1, 2) for t in (q, k, v)),
            cu_seqlens=cu,
            causal=causal,
            scale=softmax_scale,
            softcap=softcap or None,
            sinks=sinks,
            window=left + 1 if right == 0 else None,
            implementation="eager",
        ).transpose(1, 2)
        out = out.squeeze(0) if packed else out
        return (out, None) if version == V4 else out

    module = types.SimpleNamespace(flash_attn_func=stand_in, flash_attn_varlen_func=stand_in)
    flash = vendors.FLASH[version]
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, flash.module, module)
    tensors = qkv(9, dtype=torch.bfloat16)
    cu = torch.tensor((0, 4, 9), dtype=torch.int32) if packed else None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: strict)
    sinks = options.get("sinks")
    variant = Variant(**{n: o for n, o in options.items() if n != "sinks"}, scale=0.3)
    found = flash.load()(*tensors, cu, variant, sinks, longest)
    monkeypatch.undo()
    assert torch.equal(
        found, attention(*tensors, cu_seqlens=cu, scale=0.3, implementation="eager", **options)
    )


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "repeated"])
@pytest.mark.parametrize("longest", [None, 7], ids=["read", "told"])
@pytest.mark.parametrize(
    "cu, options",
    [
        (None, {}),
        (None, {"window": 3}),
        ((0, 4, 9), {}),
        ((0, 4, 9), {"window": 2}),
        ((0, 4, 9), {"causal": False}),
    ],
    ids=["batch", "batch_window", "packed", "packed_window", "packed_full"],
)
def test_native_calls_varlen_attn_as_it_is_laid_out(grouped, cu, options, longest, monkeypatch):
    """A stand-in varlen_attn computes by the definition, with and without grouped heads, as
    PyTorch's versions.
    """
    seen = []

    def stand_in(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, **more):
        seen.append((cu_q.tolist(), max_q))
        assert cu_q is cu_k and cu_q.dtype == torch.int32 and max_q == max_k
        assert set(more) == ({"enable_gqa"} if grouped else set())
        assert more.get("enable_gqa", k.shape[1] != q.shape[1]) == (k.shape[1] != q.shape[1])
        left, right = window_size
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        out = attention(
            q,
            k,
            v,
            cu_seqlens=cu_q,
            causal=right == 0,
            window=left + 1 if left >= 0 else None,
            scale=scale,
            implementation="eager",
        )
        return out.squeeze(0).transpose(0, 1)

    monkeypatch.setattr(vendors, "varlen", lambda: (stand_in, grouped))
    tensors = qkv(9, batch=1 if cu else 2)
    ends_ = torch.tensor(cu) if cu else None
    variant = Variant(**options, scale=0.3)
    found = vendors.native()(*tensors, ends_, variant, None, longest)
    expected = attention(*tensors, cu_seqlens=ends_, scale=0.3, implementation="eager", **options)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert seen == ([([0, 4, 9], longest or 5)] if cu else [([0, 9, 18], 9)] if options else [])
    seen.clear()  # of large tensors, a head at a time
    monkeypatch.setattr(vendors, "MOST", 1)
    monkeypatch.setattr(vendors, "has_cuda_gradients", lambda *tensors: True)
    parts = vendors.native()(*tensors, ends_, variant, None, longest)
    torch.testing.assert_close(parts, expected, **CLOSE)
    assert len(seen) == (HQ if cu else 2 * HQ if options else 0)


@pytest.mark.parametrize("batch", [1, 3])
def test_large_tensors_reach_pytorchs_kernels_in_parts(batch, monkeypatch):
    """Parts of the batch, or of the heads if that is one; a sequence of one head is not divided."""
    tensors, grad = qkv(9, batch=batch), heads(HQ, 9, batch=batch)
    whole = step(tensors, grad, "sdpa")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    seen, fused = [], vendors.F.scaled_dot_product_attention

    def recorded(q, k, v, **options):
        seen.append((*q.shape[:2], k.shape[1]))
        return fused(q, k, v, **options)

    monkeypatch.setattr(vendors.F, "scaled_dot_product_attention", recorded)
    for most, part in ((tensors[0][:1].numel() + 1, (1, HQ, HK)), (1, (1, 1, 1))):
        seen.clear()
        monkeypatch.setattr(vendors, "MOST", most)
        for a, b in zip(step(tensors, grad, "sdpa"), whole, strict=True):
            torch.testing.assert_close(a, b)
        assert set(seen) == {part} and len(seen) == batch * HQ // part[1]
    seen.clear()  # one head of keys, for all queries
    one = [tensors[0], *(t[:, :1] for t in tensors[1:])]
    for a, b in zip(step(one, grad, "sdpa"), step(one, grad, "eager"), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    assert set(seen) == {(1, 1, 1)} and len(seen) == batch * HQ
    with torch.no_grad():  # whose results are right
        attention(*tensors, implementation="sdpa")
    assert seen[-1] == (batch, HQ, HK)


@pytest.mark.parametrize("dim", [0, 2])
def test_an_exported_dimension_has_no_maximum(dim):
    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, implementation="sdpa")

    given = tuple(t.detach() for t in qkv(9, batch=2))
    size = torch.export.Dim("n")
    exported = torch.export.export(Attend(), given, dynamic_shapes=({dim: size},) * 3)
    torch.testing.assert_close(exported.module()(*given), Attend()(*given))


def test_a_gradient_that_pytorchs_kernels_misread_is_copied():
    """That of a sum has strides of 0, whatever is transposed in between; every other column of
    another tensor is not contiguous.
    """
    seen = []
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    y = x * 1
    y.register_hook(lambda grad: seen.append(grad.stride()))
    out = vendors.ReadableGradient.apply(y)
    assert out.data_ptr() == y.data_ptr()
    (grad,) = torch.autograd.grad(3 * out.transpose(1, 2).sum(), x, retain_graph=True)
    assert torch.equal(grad, torch.full_like(x, 3.0)) and seen == [x.stride()]
    dense = torch.randn(2, 4, 3, 5).transpose(1, 2)
    out.backward(dense, retain_graph=True)
    assert seen[1] == dense.stride(), "others are not copied"
    columns = torch.randn(2, 3, 4, 10)[..., ::2]
    (grad,) = torch.autograd.grad(out, x, columns, retain_graph=True)
    assert torch.equal(grad, columns) and seen[2] == x.stride()
    assert torch.autograd.gradgradcheck(
        vendors.ReadableGradient.apply, x.detach().double().requires_grad_()
    )
    assert torch.equal(torch.func.vmap(vendors.ReadableGradient.apply)(x), x)
    assert torch.equal(torch.func.jvp(vendors.ReadableGradient.apply, (x,), (dense,))[1], dense)


def test_flash_attention_that_is_not_here_says_so(monkeypatch):
    monkeypatch.setattr(platform, "no_cuda", lambda: "no CUDA device")
    for name, flash in vendors.FLASH.items():

        def absent(distribution):
            raise importlib.metadata.PackageNotFoundError

        monkeypatch.setattr(importlib.metadata, "version", absent)
        assert flash.missing("cuda") == platform.not_installed(flash.distribution)
        for version in ("4.0.0b35", "4.0.0b4+cu13", "3.9"):
            monkeypatch.setattr(importlib.metadata, "version", lambda distribution, v=version: v)
            reason = f"flash-attn-4 {version} is too old: it takes 4.0.0b36 or later"
            assert flash.missing("cuda") == (reason if name.endswith("4") else "no CUDA device")
        for version in ("4.0.0b36", "4.0.0b101+cu13", "4.0.0", "4.0", "4.1.0b1"):
            monkeypatch.setattr(importlib.metadata, "version", lambda distribution, v=version: v)
            assert flash.missing("cuda") == "no CUDA device"
        assert flash.missing("cpu") == f"{flash.distribution} takes CUDA tensors, not cpu"
        with pytest.raises(ImplementationUnavailable, match="takes CUDA tensors"):
            attention(*(t.cpu().half() for t in qkv(4)), implementation=name)


class Largest(TorchDispatchMode):
    """Number of elements of the largest tensor that any operator returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.numel())
        return out


def largest(name, tensors, **options):
    with Largest() as seen:
        attention(*tensors, implementation=name, **options).sum().backward()
    return seen.elements


@pytest.mark.parametrize("name", [n for n in ATTENTION.names() if n != "eager"])
@DTYPES
def test_no_mask_is_built_for_packed_documents(name, dtype):
    """Forward and backward allocate nothing larger than the operands; [T, T] would be four times
    larger.
    """
    skip_unless_usable(ATTENTION, name, dtype)
    T = 128
    tensors = [t.requires_grad_() for t in qkv(T, dtype=dtype)]
    cu = ends(0, 50, 51, 100, T)
    assert HQ * T * D < T * T
    assert largest(name, tensors, cu_seqlens=cu) <= HQ * T * D
    assert largest("eager", tensors) >= T * T, "the recorder sees nothing"


def test_sdpa_keeps_one_result_of_packed_documents():
    """Beside what it is given, and not that of each document, too, which has the same bits."""
    T, cu = 40, ends(0, 7, 7, 8, 29, 40)
    tensors, grad = [t.cpu().requires_grad_() for t in qkv(T)], heads(HQ, T).cpu()
    kept = {}

    def keep(t):
        kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = attention(*tensors, cu_seqlens=cu.cpu(), implementation="sdpa")
        (out.transpose(1, 2).flatten(2) * torch.ones(1, requires_grad=True)).sum()
    logsumexp, ones = 4 * HQ * T, 4
    assert sum(kept.values()) == 4 * (2 * HQ + 2 * HK) * T * D + logsumexp + ones
    found = [out, *torch.autograd.grad(out, tensors, grad)]
    for a, b in ((0, 7), (7, 8), (8, 29), (29, 40)):
        own = step([t[:, :, a:b] for t in tensors], grad[:, :, a:b], "sdpa")
        assert all(torch.equal(f[:, :, a:b], o) for f, o in zip(found, own, strict=True))


@EVERY
def test_no_tokens(name):
    skip_unless_usable(ATTENTION, name, torch.float32)
    for batch, seq, cu in ((0, 5, None), (2, 0, None), (1, 0, ends(0, 0, 0))):
        tensors = qkv(seq, batch=batch)
        found = step(tensors, torch.empty(batch, HQ, seq, D, device=DEVICE), name, cu_seqlens=cu)
        assert [f.shape for f in found] == [t.shape for t in (tensors[0], *tensors)]


Q, K, V = torch.randn(1, HQ, 6, D), torch.randn(1, HK, 6, D), torch.randn(1, HK, 6, D)


FLASH_LAYOUT = r"k must have .*; the layout is \[B, H, S, D\].* pass q\.transpose\(1, 2\)"


def cu(*values):
    return torch.tensor(values, dtype=torch.int32)


def flash_layout(queries):
    """q, k and v as [B, S, H, D]."""
    return Q.transpose(1, 2)[:, -queries:], K.transpose(1, 2), V.transpose(1, 2)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"k": K[:, :, :5]}, r"v must have shape .*Sk = 5, got \[1, 2, 6, 8\]"),
        ({"k": K[:, :, :5], "v": V[:, :, :5]}, "k must have at least q's 6 positions.*got 5"),
        ({"q": Q[:, :, :5], "cu_seqlens": cu(0, 5)}, "cu_seqlens is None or Sk == S, where S = 5"),
        ({"window": 2, "causal": False}, "window = 2 needs causal=True"),
        ({"sinks": torch.zeros(2)}, r"sinks must have shape \[Hq\], where Hq = 4, got \[2\]"),
        ({"q": Q[:, :3]}, r"k must have a divisor of q's 3 heads, got \[1, 2, 6, 8\]$"),
        ({"k": K[:, :0], "v": V[:, :0]}, r"a divisor of q's 4 heads, got \[1, 0, 6, 8\]"),
        *((dict(zip("qkv", flash_layout(n), strict=True)), FLASH_LAYOUT) for n in (6, 1)),
        ({n: t[..., :0] for n, t in zip("qkv", (Q, K, V), strict=True)}, "q .* with D >= 1"),
        ({n: t[:, :0] for n, t in zip("qkv", (Q, K, V), strict=True)}, "q .* with Hq >= 1"),
        ({"cu_seqlens": cu(6)}, r"cu_seqlens must have shape \[bounds\] with bounds >= 2"),
        ({"cu_seqlens": cu(2, 6)}, "cu_seqlens must start at 0, got 2"),
        ({"cu_seqlens": cu(0, 4, 3, 6)}, "must not decrease, got 3 after 4 at index 2"),
        ({"cu_seqlens": cu(0, 5)}, "cu_seqlens must end at 6, the number of tokens, got 5"),
        ({"cu_seqlens": cu(0, 4, 9)}, "cu_seqlens must end at 6.*got 9"),
        (
            {n: t.expand(2, -1, -1, -1) for n, t in zip("qkv", (Q, K, V), strict=True)}
            | {"cu_seqlens": cu(0, 6)},
            "q must have shape .* with cu_seqlens is None or B == 1",
        ),
        (
            {n: t.to("meta") for n, t in zip("qkv", (Q, K, V), strict=True)}
            | {"cu_seqlens": cu(0, 6).to("meta")},
            "cu_seqlens must be on a device that holds values.*got one on meta",
        ),
        ({"v": torch.nested.nested_tensor([V[0]])}, "v must be a strided .dense.*nested"),
        ({"scale": 0.0}, r"scale must be a number in \(0, inf\) in float32 or None, got 0\.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_one_clear_error(changes, message):
    """Before any implementation is asked."""
    with pytest.raises((TypeError, ValueError), match=message):
        attention(**{"q": Q, "k": K, "v": V, **changes})


@pytest.mark.parametrize("major", [7, 8, 9, 10, 11, 12])
def test_what_flash_attention_lacks_is_known_on_every_device(major, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (major, 0))
    for flash in vendors.FLASH.values():
        assert flash.refuses(Request(head_dim=64)) is None
        assert flash.refuses(Request(head_dim=512)) is not None
    # Other widths of values, by package: (192, 128), (96, 64), (256, 128) and (128, 20).
    pairs = (192, 128), (96, 64), (256, 128), (128, 20)
    taken = {
        name[-1]: [flash.refuses(Request(head_dim=D, value_dim=Dv)) is None for D, Dv in pairs]
        for name, flash in vendors.FLASH.items()
    }
    assert taken["2"] == [False] * 4 and taken["3"] == [True, False, False, False]
    assert taken["4"] == [True, True, major == 9, False]
