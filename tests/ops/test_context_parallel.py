"""Attention over a sharded sequence (gloo processes) against the whole sequence in one: layout,
results, gradients, and communication.
"""

import itertools
import tempfile
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import DEVICE, join_group, processes
from sequences import LAYOUTS, Count, close, of_this

from tilewright.core.registry import ImplementationUnavailable
from tilewright.ops.attention import context_parallel as cp
from tilewright.ops.attention.attention import ATTENTION, Request, attention
from tilewright.ops.attention.context_parallel import (
    ContextParallel,
    context_parallel_attention,
    positions,
    shard,
)

S, D = 48, 8
PREFIXES = ((20, 21, 5, 19), (21, 40, 5, 15))
CROSSING = (0, 5, 5, 20, 21, 21, 40, 48)  # chunks begin at multiples of 6 or 12

ALL = {"sinks": True, "window": 9, "softcap": 2.0}

# name -> batch, query and key heads, cu_seqlens (or None), options
CASES = {
    "sequences": (2, 4, 2, None, {}),
    "one_document": (1, 4, 2, (0, S), {}),
    "crossing": (1, 4, 2, CROSSING, {}),
    "as_many_heads": (1, 4, 4, CROSSING, {"scale": 0.3}),
    "heads_that_do_not_divide": (1, 12, 3, (0, 0, 31, S), {}),
    "document_in_one_chunk": (1, 4, 1, (0, 1, 4, 44, S, S), {}),
    "ends_with_chunks": (1, 4, 2, (0, 12, 24, 36, S), {}),
    "window": (1, 4, 2, CROSSING, {"window": 5}),
    "window_across_chunks": (2, 4, 2, None, {"window": 17}),
    "window_of_one": (1, 4, 2, CROSSING, {"window": 1}),
    "window_of_all": (1, 4, 2, CROSSING, {"window": 100}),
    "softcap": (1, 4, 2, CROSSING, {"softcap": 1.5}),
    "sinks": (2, 4, 2, None, {"sinks": True}),
    "values": (1, 4, 2, CROSSING, {"values": 12, "sinks": True}),
    "all_of_it": (1, 8, 2, CROSSING, {**ALL, "scale": 0.5}),
    "prefixes": (1, 4, 2, CROSSING, {"prefixes": PREFIXES}),
    "prefixes_and_all": (1, 8, 2, CROSSING, {"prefixes": PREFIXES, **ALL}),
    "both_ways": (2, 4, 2, None, {"causal": False}),
    # Neither a ring of two, beside two of Ulysses, nor one of four divides them.
    "lacking_heads": (1, 6, 3, CROSSING, {"sinks": True, "window": 9}),
    "documents_both_ways": (1, 4, 2, CROSSING, {"causal": False, "sinks": True}),
}


def ranks(ring, ulysses):
    return [ContextParallel(ulysses, ring, u, r) for r in range(ring) for u in range(ulysses)]


# ---- the layout


def test_the_picture_in_the_module():
    assert [positions(8, c).tolist() for c in ranks(2, 2)] == [[0, 1], [6, 7], [2, 3], [4, 5]]
    of_three = [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert [positions(12, c).tolist() for c in ranks(3, 1)] == of_three
    assert [positions(8, c).tolist() for c in ranks(1, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    of_six = [[0, 1, 2, 3], [4, 5, 18, 19], [20, 21, 22, 23]]
    of_six += [[6, 7, 8, 9], [10, 11, 12, 13], [14, 15, 16, 17]]
    assert [positions(24, c).tolist() for c in ranks(2, 3)] == of_six


@pytest.mark.parametrize("ring, ulysses", [(1, 1), (1, 3), (2, 1), (2, 2), (3, 4), (5, 2)])
def test_every_token_is_on_one_rank(ring, ulysses):
    n = 2 * ring * ulysses * 3 if ring * ulysses > 1 else 7
    found = [positions(n, c) for c in ranks(ring, ulysses)]
    assert {len(p) for p in found} == {n // (ring * ulysses)}
    assert torch.cat(found).sort().values.equal(torch.arange(n)) and found[0].dtype == torch.int64
    whole = torch.randn(2, n, 3, requires_grad=True)
    parts = [shard(whole, 1, c) for c in ranks(ring, ulysses)]
    assert all(part.equal(whole[:, p]) for part, p in zip(parts, found, strict=True))
    grads = [torch.autograd.grad(part.sum(), whole)[0] for part in parts]
    assert sum(grads).equal(torch.ones_like(whole))
    assert all(c.layout() == c for c in ranks(ring, ulysses))
    assert shard(whole[:, :0], 1, ranks(ring, ulysses)[-1]).shape == (2, 0, 3)


def test_a_sequence_that_does_not_fit_and_a_rank_that_is_not_there_are_refused():
    with pytest.raises(ValueError, match=r"of 12 tokens \(2 x 3 ring x 2 Ulysses ranks\), got 30"):
        shard(torch.zeros(30), 0, ContextParallel(2, 3))
    matrix = torch.zeros(2, 12), "from -2 to 1"
    for (t, accepted), dim in (
        (matrix, 2),
        (matrix, -3),
        ((torch.ones(()), "none of a scalar"), 0),
    ):
        for function in (shard, cp.unshard):
            said = rf"^dim must be a dimension of t \({accepted}\), got {dim}$"
            with pytest.raises(IndexError, match=said):
                function(t, dim, ContextParallel())
    with pytest.raises(ValueError, match="ring_rank must be from 0 to ring_size - 1, got 2 of 2"):
        ContextParallel(ring_size=2, ring_rank=2)


# ---- the plan of a ring, without processes


def apart(n, prefixes):
    """How many positions rows [n, n] are apart, and which are a query and a key of its prefix."""
    row, column = torch.arange(n)[:, None], torch.arange(n)
    distance, prefix = row - column, torch.zeros(n, n, dtype=torch.bool)
    for first, end, key_first, key_end in prefixes:
        distance[first:end, :first] -= first - key_end
        prefix[first:end, key_first:key_end] = True
    return distance, prefix


def mask(ends, n, causal, window, prefixes=()):
    document = torch.bucketize(torch.arange(n), torch.tensor(ends), right=True)
    distance, prefix = apart(n, prefixes)
    seen = (document[:, None] == document) | prefix
    if causal:
        seen &= distance >= 0
    return seen & (distance < window) if window else seen


def random_prefixes(ends, seed):
    """The prefixes of every second document, and of some more."""
    g, found, whole = torch.Generator().manual_seed(seed), [], None
    for a, b in itertools.pairwise(ends):
        if a == b:
            continue
        if whole is None or not torch.randint(0, 3, (), generator=g):
            whole = (a, b)
        else:
            most = whole[1] - whole[0]
            shared = int(torch.randint(1, most + 1, (), generator=g))
            found.append((a, b, whole[0], whole[0] + shared))
    return tuple(found)


def random_ends(n, seed):
    g = torch.Generator().manual_seed(seed)
    inside = torch.randint(0, n + 1, (seed % 7,), generator=g).tolist()
    return tuple(sorted([0, n, *inside]))


@pytest.mark.parametrize(
    "causal, window", [(True, None), (True, 1), (True, 5), (True, 14), (False, None)]
)
@pytest.mark.parametrize("ring", [2, 3, 4])
@pytest.mark.parametrize("prefixed", [False, True])
def test_a_plan_computes_each_pair_once_and_sends_what_is_seen_alone(
    ring, causal, window, prefixed
):
    n = 12 * ring
    for seed in range(12):
        ends = random_ends(n, seed)
        prefixes = random_prefixes(ends, seed) if prefixed and causal else ()
        want, (away, prefix) = mask(ends, n, causal, window, prefixes), apart(n, prefixes)
        layouts = ranks(ring, 1)
        plans = [cp.plan(ends, n, ring, c.ring_rank, causal, window, prefixes) for c in layouts]
        times = torch.zeros(n, n, dtype=torch.int64)
        for c, plan in zip(layouts, plans, strict=True):
            own = positions(n, c)
            for i, (begin, packed) in enumerate(plan.chunks):
                rows = slice(begin, begin + plan.rows)
                assert own[i * plan.rows] == begin
                assert packed == any(begin < e < begin + plan.rows for e in ends)
                times[rows, rows] += want[rows, rows] & ~prefix[rows, rows]
            for t, step in enumerate(plan.steps):
                source = layouts[(c.ring_rank - t) % ring]
                sender = plans[source.ring_rank].steps[t]
                assert step.receive == sender.send and (t > 0 or not step.receive)
                if causal and window is None and not prefixes:
                    assert len(step.blocks) <= 1
                there = positions(n, source)
                rows = there
                if t and step.receive:
                    rows = torch.cat([there[a:b] for a, b in step.receive])
                assert step.receive or not t or not step.blocks
                useful = torch.zeros(n, dtype=torch.bool)
                for block in step.blocks:
                    q, k = own[slice(*block.queries)], rows[slice(*block.keys)]
                    part = torch.ones(len(q), len(k), dtype=torch.int64)
                    if block.offset is not None:
                        distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
                        distance += block.offset
                        assert distance.equal(away[q[:, None], k])
                        part = (distance < window).long()
                    times[q[:, None], k] += part
                    useful[k[part.any(0)]] = True
                assert not t or not step.receive or bool(useful[rows].all())
        assert times.equal(want.long()), (ends, causal, window)


# ---- processes


def problem(name, dtype=torch.float32):
    """Whole q, k, v and sinks, if any; the output's gradient, cu_seqlens and options."""
    B, H, Hk, ends, options = CASES[name]
    options = dict(options)
    g = torch.Generator().manual_seed(len(name))
    Dv = options.pop("values", D)
    sizes = ((H, D), (Hk, D), (Hk, Dv))
    tensors = [torch.randn(B, h, S, width, generator=g).to(dtype) for h, width in sizes]
    dout = torch.randn(B, H, S, Dv, generator=g).to(dtype)
    if options.pop("sinks", False):
        tensors.append(torch.randn(H, generator=g).to(dtype))
    return tensors, dout, ends, options


def call(where, tensors, dout, ends, options, implementation="auto", host=False):
    """Output and gradients of this rank's part."""
    own = [shard(t, 2, where) if t.dim() == 4 else t for t in tensors]
    own = [t.detach().clone().requires_grad_() for t in own]
    with mock.patch.object(cp, "attention", wraps=attention) as under:
        out = context_parallel_attention(
            *own[:3],
            where,
            sinks=own[3] if own[3:] else None,
            ends=ends if host else None,
            cu_seqlens=None if ends is None else torch.tensor(ends, dtype=torch.int32),
            implementation=implementation,
            **options,
        )
    longest = max(b - a for a, b in itertools.pairwise(ends)) if host and ends else None
    assert [one.kwargs["max_seqlen"] for one in under.mock_calls] == [longest] * (
        where.ring_size == 1 or options.get("whole_documents", False)
    )
    assert out.dtype == (torch.bfloat16 if torch.is_autocast_enabled("cpu") else tensors[0].dtype)
    return [out.detach(), *torch.autograd.grad(out, own, shard(dout, 2, where))]


def one_process(tensors, dout, ends, options, dtype=torch.float64, implementation="eager"):
    own = [t.detach().to(dtype).requires_grad_() for t in tensors]
    out = attention(
        *own[:3],
        sinks=own[3] if own[3:] else None,
        implementation=implementation,
        cu_seqlens=None if ends is None else torch.tensor(ends),
        **options,
    )
    return [out.detach(), *torch.autograd.grad(out, own, dout.to(dtype))]


def of_rank(whole, where):
    return [shard(t, 2, where) if t.dim() == 4 else t for t in whole]


def _everything(rank, world, folder):
    torch.set_num_threads(1)
    join_group(rank, world, folder)
    names = CASES if world > 2 else ("crossing", "all_of_it", "prefixes_and_all", "both_ways")
    for ring, ulysses in LAYOUTS[world]:  # a ring of two, and two of Ulysses, are among four too
        where = of_this(ring, ulysses)
        assert where.layout() == ContextParallel(ulysses, ring, rank % ulysses, rank // ulysses)
        for name in names:
            if CASES[name][1] % ulysses == 0:
                _equals_one_process(name, where)
                _has_the_bits_of_one_process(name, where)
        _other_dtypes(where)
        _isolation(where)
        _what_travels(where)
        _no_second_derivative(where)
        whole = torch.randn(2, S, 3, generator=torch.Generator().manual_seed(1))
        assert cp.unshard(shard(whole, 1, where), 1, where).equal(whole)
    if world == 2:
        _refusals(where)
        _triton(where)
    dist.barrier()
    dist.destroy_process_group()


def _equals_one_process(name, where):
    tensors, dout, ends, options = problem(name)
    want = one_process(tensors, dout, ends, options)
    found = call(where, tensors, dout, ends, options)
    if name in ("crossing", "all_of_it"):  # deterministic
        again = call(where, tensors, dout, ends, options, host=True)
        assert all(a.equal(b) for a, b in zip(found, again, strict=True)), name
    if found[4:]:
        others = len(found[4]) * (1 - 1 / where.ulysses_size)
        assert where.ulysses_size == 1 or (found[4] == 0).sum() == others
        dist.all_reduce(found[4])  # each rank has those of its queries and heads
    names = ("out", "dq", "dk", "dv", "dsinks")
    for what, a, b in zip(names, found, of_rank(want, where), strict=False):
        close(a, b, (where.layout(), name, what))


def _has_the_bits_of_one_process(name, where):
    """With whole documents: by what `auto` takes of a CPU's invariant implementations, and by ours.
    Gradients of keys are sums over query heads, which other ranks have.
    """
    tensors, dout, ends, options = problem(name)
    for implementation in ("sdpa", "cpp"):
        impl = ATTENTION.implementation(implementation)
        if impl.why_not("cpu", torch.float32) or refused(impl, name):
            continue
        want = one_process(tensors, dout, ends, options, torch.float32, implementation)
        with Count() as count:
            whole = {**options, "whole_documents": True}
            found = call(where, tensors, dout, ends, whole, implementation)
        assert count.sent == count.received == []
        rounds = (where.ring_size > 1) + (where.ulysses_size > 1)
        assert len(count.all_to_alls) == 4 * rounds, name
        want = of_rank(want, where)
        assert all(a.equal(b) for a, b in zip(found[:2], want[:2], strict=True)), (name, where)
        if found[4:]:
            dist.all_reduce(found[4])
        for a, b in zip(found[2:], want[2:], strict=True):
            close(a, b.double(), (where.layout(), name, implementation))


def refused(implementation, name):
    """Whether it does not compute a case."""
    *_, ends, options = CASES[name]
    request = Request(
        head_dim=D,
        value_dim=options.get("values"),
        packed=ends is not None,
        gradient=True,
        prefixes="prefixes" in options,
        **{one: one in options for one in ("window", "softcap", "sinks")},
    )
    return implementation.refuses(request)


def _other_dtypes(where):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        tensors, dout, ends, options = problem("all_of_it", dtype)
        found = call(where, tensors, dout, ends, options, "eager")
        assert all(t.dtype == dtype for t in found)
        total = found[4].double()
        dist.all_reduce(total)
        want = of_rank(one_process(tensors, dout, ends, options), where)
        for a, b in zip((*found[:4], total), want, strict=True):
            close(a, b, (where.layout(), dtype), tolerance)
    tensors, dout, ends, options = problem("crossing")
    expected = call(where, [t.bfloat16() for t in tensors], dout.bfloat16(), ends, options)
    with torch.autocast("cpu", torch.bfloat16):  # as attention: q, k and v are cast
        found = call(where, tensors, dout.bfloat16(), ends, options)
    assert all(a.equal(b.to(a.dtype)) for a, b in zip(found, expected, strict=True))


def _isolation(where):
    """The bits of a document do not depend on other documents."""
    tensors, dout, ends, options = problem("crossing")
    changed = [t.clone() for t in (*tensors, dout)]
    for t in changed:
        t[:, :, 5:20] = 3 * t[:, :, 5:20] + 1
    own = positions(S, where)
    other = (own < 5) | (own >= 20)
    a, b = (call(where, t[:3], t[3], ends, options) for t in ((*tensors, dout), changed))
    for x, y in zip(a, b, strict=True):
        assert x[:, :, other].equal(y[:, :, other])
    assert bool(other.all()) or not a[0][:, :, ~other].equal(b[0][:, :, ~other])


def _what_travels(where):
    def count(name):
        tensors, dout, ends, options = problem(name)
        own = [t.detach().requires_grad_() for t in of_rank(tensors, where)]
        cu = None if ends is None else torch.tensor(ends)
        with Count() as forward:
            out = context_parallel_attention(*own, where, cu_seqlens=cu, **options)
        with Count() as backward:
            out.backward(shard(dout, 2, where))
        return forward, backward

    R, U, r = where.ring_size, where.ulysses_size, where.ring_rank
    chunk, s = S // (2 * R), S // (R * U)
    forward, backward = count("one_document")
    keys = 2 // U if U <= 2 else 1  # key heads per Ulysses rank
    if U == 1:
        assert forward.all_to_alls == backward.all_to_alls == []
    else:
        scatter, gather = (U, s, 1, (4 // U + 2 * keys) * D), (U, s, 1, 4 // U * D)
        assert forward.all_to_alls == [scatter, gather]
        assert backward.all_to_alls == [gather, scatter]
    # A later ring rank needs only the early chunk, an earlier one both.
    rows = [chunk if r + t < R else 2 * chunk for t in range(1, R)]
    sent = [((2 * n * keys * D,), torch.float32) for n in rows]
    assert forward.sent == sent and len(forward.received) == R - 1
    assert sorted(backward.received) == sorted([*forward.received, *sent])
    assert len(backward.sent) == 2 * (R - 1)
    if R == 2:  # documents end where chunks end
        for found in count("ends_with_chunks"):
            assert found.sent == found.received == []
        for found in count("window_of_one"):
            assert found.sent == found.received == []
        # The part of document 5 .. 20 before 12, and of 21 .. 40 before 36.
        forward, _ = count("crossing")
        of_row = 2 * keys * D
        assert [n for (n,), _ in forward.sent] == [of_row * (12 - 5 if r == 0 else 36 - 21)]
        forward, _ = count("window")  # at each boundary, as far back as the window
        assert [n for (n,), _ in forward.sent] == [of_row * 4]


def _no_second_derivative(where):
    tensors, dout, ends, _ = problem("crossing")
    own = [t.detach().requires_grad_() for t in of_rank(tensors, where)]
    out = context_parallel_attention(*own, where, cu_seqlens=torch.tensor(ends))
    with pytest.raises(RuntimeError, match="is differentiable once"):
        torch.autograd.grad(out, own, shard(dout, 2, where), create_graph=True)


def _refusals(where):
    """A ring of two. All errors are raised before communication."""
    tensors, _, ends, _ = problem("crossing")
    q, k, v = of_rank(tensors, where)
    cu = torch.tensor(ends)
    no_part = next(
        i.name for i in ATTENTION.implementations if i.refuses(Request(head_dim=D, part=True))
    )
    three = [t[:, :3] if i == 0 else t[:, :1] for i, t in enumerate((q, k, v))]
    moved, twice = (0, 6, 6, 20, 21, 21, 40, 48), [t.repeat(2, 1, 1, 1) for t in (q, k, v)]
    for parts, changed, message in (
        ((q, k, v), {"cu_seqlens": cu - 1}, "cu_seqlens must start at 0"),
        ((q, k, v), {"cu_seqlens": cu.clamp_max(24)}, "cu_seqlens must end at 48, the number of"),
        ((q, k, v), {"cu_seqlens": cu, "ends": ends[:-1]}, "ends must be the values of cu_seqlens"),
        ((q, k, v), {"cu_seqlens": cu, "ends": moved}, "ends must be the values of cu_seqlens"),
        ((q, k, v), {"ends": ends}, "give both, or cu_seqlens alone"),
        (twice, {"cu_seqlens": cu}, "packed documents need B = 1"),
        ([t[:, :, 1:] for t in (q, k, v)], {}, "q must have an even number of tokens"),
        ((q, k[:, :, 2:], v[:, :, 2:]), {}, "k must have shape .* with Sk == S"),
        ((q, k, v), {"sinks": torch.zeros(3)}, "sinks must have shape"),
        ((q, k, v), {"window": 3, "causal": False}, "window = 3 needs causal=True"),
        ((q, k, v), {"implementation": "ring"}, "unknown implementation 'ring'"),
    ):
        with pytest.raises(ValueError, match=message):
            context_parallel_attention(*parts, where, **changed)
    with pytest.raises(ImplementationUnavailable, match=rf"attention\[{no_part}\]: "):
        context_parallel_attention(q, k, v, where, implementation=no_part)
    with pytest.raises(ValueError, match="q must have a multiple of 2 heads"):
        context_parallel_attention(*three, replace(where, ulysses_size=2))
    with pytest.raises(ValueError, match="cp must have a process group for ring_size = 2"):
        context_parallel_attention(q, k, v, where.layout())


def _triton(where):
    if ATTENTION.implementation("triton").why_not("cpu", torch.float32):
        return
    tensors, dout, ends, options = problem("all_of_it")
    found = call(where, tensors, dout, ends, options, "triton")
    want = of_rank(one_process(tensors, dout, ends, options), where)
    for a, b in zip(found[:4], want, strict=False):
        close(a, b, "triton")


@pytest.mark.parametrize("world", LAYOUTS)
def test_a_spread_sequence_equals_one_process(world):
    if DEVICE == "cuda":
        pytest.skip("gloo takes CPU tensors: run without a CUDA device")
    with tempfile.TemporaryDirectory() as folder:
        processes(world, _everything, folder)


def test_a_sequence_on_one_rank_is_attention():
    tensors, dout, ends, options = problem("all_of_it")
    alone = ContextParallel.of()
    assert alone == ContextParallel() and alone.multiple == 1
    found, want = (
        call(alone, tensors, dout, ends, options),
        one_process(tensors, dout, ends, options),
    )
    for a, b in zip(found, want, strict=True):
        close(a, b, "alone")
    assert cp.unshard(tensors[0], 2, alone).equal(tensors[0])
    for (i, a), (j, b) in itertools.product(enumerate(ranks(2, 2)), repeat=2):
        assert (a == b) == (i == j)
