"""Linear attention over a sharded sequence (gloo processes) against the whole sequence in one:
results, gradients, and communication.
"""

import tempfile

import pytest
import torch
import torch.distributed as dist
from helpers import DEVICE, join_group, processes
from sequences import LAYOUTS, Count, close, of_this

from tilewright.core.registry import ImplementationUnavailable
from tilewright.ops import causal_conv1d, gated_delta_rule
from tilewright.ops.attention.context_parallel import ContextParallel, shard
from tilewright.ops.linear_attention.causal_conv1d import CAUSAL_CONV1D
from tilewright.ops.linear_attention.context_parallel import (
    context_parallel_causal_conv1d,
    context_parallel_gated_delta_rule,
)
from tilewright.ops.linear_attention.gated_delta_rule import GATED_DELTA_RULE

S, DK, DV, C = 144, 8, 6, 5
CROSSING = (0, 7, 7, 70, 71, 73, 130, S)  # intervals begin at multiples of 18
AT_BOUNDARIES = (0, 36, 72, 108, S)

# name -> batch, key and value heads, cu_seqlens (or None), options
RULES = {
    "sequences": (2, 4, 4, None, {"use_qk_l2norm": True}),
    "one_document": (1, 4, 8, (0, S), {"scale": 0.5}),
    "crossing": (1, 4, 8, CROSSING, {"use_qk_l2norm": True}),
    "ends_with_intervals": (1, 4, 4, AT_BOUNDARIES, {}),
    "fewer_keys_than_ranks": (1, 1, 4, CROSSING, {"use_qk_l2norm": True}),
    "lacking_heads": (1, 3, 6, CROSSING, {"use_qk_l2norm": True}),
}

# name -> batch, length, taps, cu_seqlens, bias, activation
CONVOLUTIONS = {
    "sequences": (2, 48, 4, None, True, "silu"),
    "crossing": (1, S, 4, CROSSING, False, "silu"),
    "ends_with_intervals": (1, S, 4, AT_BOUNDARIES, True, None),
    "empty_documents_first": (1, 48, 3, (0, 0, 0, 25, 48, 48), True, None),
    "intervals_of_one_token": (1, 8, 8, (0, 5, 8), True, "silu"),
    "short_sequences": (3, 8, 8, None, False, None),
    "no_tokens": (1, 0, 4, (0, 0), True, None),
}
FUSED, RESULTS = "cpp", ("o", "dq", "dk", "dv", "dg", "dbeta")


def available(op, name=FUSED):
    return not op.implementation(name).why_not("cpu", torch.float32)


def bounds(ends):
    return None if ends is None else torch.tensor(ends, dtype=torch.int32)


def rule_problem(name, dtype):
    """q, k, v, g and beta of the whole sequence; the output's gradient and options."""
    B, HK, HV, ends, options = RULES[name]
    gen = torch.Generator().manual_seed(len(name))
    tensors = [
        (torch.randn(B, S, H, D, generator=gen) * D**-0.5).to(dtype)
        for H, D in ((HK, DK), (HK, DK), (HV, DV))
    ]
    tensors.append(-0.2 * torch.randn(B, S, HV, generator=gen).exp())
    tensors.append(torch.rand(B, S, HV, generator=gen))
    dout = torch.randn(B, S, HV, DV, generator=gen).to(dtype)
    return tensors, dout, {**options, "cu_seqlens": bounds(ends)}


def convolution_problem(name, dtype):
    B, n, taps, ends, bias, activation = CONVOLUTIONS[name]
    gen = torch.Generator().manual_seed(len(name))
    tensors = [torch.randn(*s, generator=gen) for s in ((B, n, C), (C, taps), (C,))]
    dout = torch.randn(B, n, C, generator=gen).to(dtype)
    tensors = [t.to(dtype) for t in tensors[: 2 + bias]]
    return tensors, dout, {"activation": activation, "cu_seqlens": bounds(ends)}


def with_gradients(fn, tensors, dout):
    own = [t.detach().clone().requires_grad_() for t in tensors]
    out = fn(*own)
    return [out.detach(), *torch.autograd.grad(out, own, dout)]


def rule_in_one(tensors, dout, options, implementation, dtype=None):
    def rule(*own):
        return gated_delta_rule(*own, implementation=implementation, **options)[0]

    if dtype is not None:
        tensors, dout = [t.to(dtype) for t in tensors], dout.to(dtype)
    return with_gradients(rule, tensors, dout)


def rule_over_ranks(tensors, dout, where, options, implementation):
    def rule(*own):
        return context_parallel_gated_delta_rule(
            *own, where, implementation=implementation, **options
        )

    return with_gradients(rule, [shard(t, 1, where) for t in tensors], shard(dout, 1, where))


def convolution_over_ranks(tensors, dout, where, options, implementation):
    def convolve(x, weight, bias=None):
        return context_parallel_causal_conv1d(
            x, weight, where, bias, implementation=implementation, **options
        )

    own = [shard(tensors[0], 1, where), *tensors[1:]]
    found = with_gradients(convolve, own, shard(dout, 1, where))
    for t in found[2:]:  # this rank's share
        dist.all_reduce(t)
    return found


def convolution_in_one(tensors, dout, options, implementation, dtype=None):
    def convolve(*own):
        return causal_conv1d(*own, implementation=implementation, **options)

    if dtype is not None:
        tensors, dout = [t.to(dtype) for t in tensors], dout.to(dtype)
    return with_gradients(convolve, tensors, dout)


def _everything(rank, world, folder):
    torch.set_num_threads(1)
    join_group(rank, world, folder)
    some = ("sequences", "crossing", "lacking_heads", "empty_documents_first")
    for ring, ulysses in LAYOUTS[world]:  # a ring of two, and two of Ulysses, are among four too
        where = of_this(ring, ulysses)
        for name in RULES:
            if world > 2 or name in some:
                _rule_equals_one_process(name, where)
        for name in CONVOLUTIONS:
            if world > 2 or name in some:
                _convolution_equals_one_process(name, where)
        _a_document_alone(where)
        _what_travels(where)
        _no_second_derivative(where)
        _autocast(where)
    if world == 2:
        _refusals(where)
    dist.barrier()
    dist.destroy_process_group()


def _rule_equals_one_process(name, where):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        tensors, dout, options = rule_problem(name, dtype)
        if dtype == torch.float64:
            tensors = [t.double() for t in tensors]
        want = rule_in_one(tensors, dout, options, "eager", torch.float64)
        found = rule_over_ranks(tensors, dout, where, options, "eager")
        for what, a, b, t in zip(RESULTS, found, want, (dout, *tensors), strict=True):
            assert a.dtype == t.dtype
            close(a, shard(b, 1, where), (where.layout(), name, what), tolerance)
    if not available(GATED_DELTA_RULE):
        return
    _, HK, HV, *_ = RULES[name]
    for dtype in (torch.float32, torch.bfloat16):
        tensors, dout, options = rule_problem(name, dtype)
        want = rule_in_one(tensors, dout, options, FUSED)
        found = rule_over_ranks(tensors, dout, where, options, FUSED)
        own_keys = HV % where.size == 0 and HK % where.size == 0
        for what, a, b in zip(RESULTS, found, want, strict=True):
            b = shard(b, 1, where)
            if own_keys or what not in ("dq", "dk"):
                assert a.equal(b), (where.layout(), name, what, dtype)
            else:
                close(a, b.double(), (name, what), 1e-5 if dtype == torch.float32 else 3e-2)


def _convolution_equals_one_process(name, where):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        tensors, dout, options = convolution_problem(name, dtype)
        truth = convolution_in_one(tensors, dout, options, "eager", torch.float64)
        fused = dtype != torch.float64 and available(CAUSAL_CONV1D)
        for implementation in ("eager", FUSED) if fused else ("eager",):
            one = convolution_in_one(tensors, dout, options, implementation)
            found = convolution_over_ranks(tensors, dout, where, options, implementation)
            what = (where.layout(), name, implementation, dtype)
            wanted = shard(one[0], 1, where)
            if implementation == FUSED or options["activation"] is None:
                assert found[0].equal(wanted), what
            elif wanted.numel():  # PyTorch rounds silu by where an element lies
                close(found[0], wanted.double(), what, tolerance)
            if found[0].numel():
                for a, b in zip(found[1:], [shard(truth[1], 1, where), *truth[2:]], strict=True):
                    assert a.dtype == dtype
                    close(a, b, what, tolerance)


def _a_document_alone(where):
    """A document's bits do not depend on the others, nor on what stands before it."""
    for problem, over_ranks, op in (
        (rule_problem, rule_over_ranks, GATED_DELTA_RULE),
        (convolution_problem, convolution_over_ranks, CAUSAL_CONV1D),
    ):
        if not available(op):
            continue
        tensors, dout, options = problem("crossing", torch.float32)
        first = over_ranks(tensors, dout, where, options, FUSED)[0]
        inside = shard((torch.arange(S) >= 73) & (torch.arange(S) < 130), 0, where)
        others = [t.clone() for t in tensors]
        for t in others:
            if t.shape[:2] == (1, S):
                t[:, :73] += 1
                t[:, 130:] = 0
        again = over_ranks(others, dout, where, options, FUSED)[0]
        assert first[:, inside].equal(again[:, inside])
        assert not first[:, ~inside].equal(again[:, ~inside]) or inside.all()


def _what_travels(where):
    tensors, dout, options = rule_problem("crossing", torch.bfloat16)
    own = [shard(t, 1, where).requires_grad_() for t in tensors]
    with Count() as forward:
        o = context_parallel_gated_delta_rule(*own, where, **options)
    with Count() as backward:
        o.backward(shard(dout, 1, where))
    rounds = (where.ring_size > 1) + (where.ulysses_size > 1)
    assert len(forward.all_to_alls) == len(backward.all_to_alls) == 2 * rounds
    assert forward.sent == backward.sent == []
    if rounds == 1:  # 4 key heads and 8 value heads; g and beta in float32
        n, s = where.size, S // where.size
        columns = (2 * 4 * DK + 8 * DV + 8 * 4) // n
        assert forward.all_to_alls[0] == (n, s, 1, columns)
    gathered, real = [], dist.all_gather

    def gather(parts, t, **kwargs):
        gathered.append(tuple(t.shape))
        return real(parts, t, **kwargs)

    dist.all_gather = gather
    try:
        tensors, dout, options = convolution_problem("crossing", torch.float32)
        convolution_over_ranks(tensors, dout, where, options, "eager")
    finally:
        dist.all_gather = real
    assert len(gathered) == 2 * rounds and gathered[0] == gathered[rounds] == (6, 1, C)


def _no_second_derivative(where):
    tensors, dout, options = rule_problem("crossing", torch.float32)
    own = [shard(t, 1, where).requires_grad_() for t in tensors]
    o = context_parallel_gated_delta_rule(*own, where, **options)
    with pytest.raises(RuntimeError, match="Ulysses is differentiable once"):
        torch.autograd.grad(o, own, shard(dout, 1, where), create_graph=True)
    tensors, dout, options = convolution_problem("crossing", torch.float32)
    x = shard(tensors[0], 1, where).requires_grad_()
    y = context_parallel_causal_conv1d(x, tensors[1], where, implementation="eager", **options)
    with pytest.raises(RuntimeError, match="context_parallel_causal_conv1d is differentiable once"):
        torch.autograd.grad(y, x, shard(dout, 1, where), create_graph=True)


def _autocast(where):
    """q, k, v and x are cast as those of the ops in one process."""
    tensors, _, options = rule_problem("crossing", torch.float32)
    own = [shard(t, 1, where) for t in tensors]
    (x, weight), _, more = convolution_problem("crossing", torch.float32)
    x = shard(x, 1, where)

    def both(own, x, weight):
        rule = context_parallel_gated_delta_rule(*own, where, **options)
        return rule, context_parallel_causal_conv1d(x, weight, where, **more)

    low = [t.bfloat16() for t in own[:3]]
    wanted = both([*low, *own[3:]], x.bfloat16(), weight.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, both(own, x, weight), wanted))


def _refusals(where):
    """A ring of two. All errors are raised before communication."""
    tensors, _, options = rule_problem("crossing", torch.float32)
    own = [shard(t, 1, where) for t in tensors]
    x, weight, *_ = convolution_problem("crossing", torch.float32)[0]
    x = shard(x, 1, where)

    def rule(parts=own, there=where, **changed):
        return context_parallel_gated_delta_rule(*parts, there, **{**options, **changed})

    def convolve(x=x, there=where, **changed):
        return context_parallel_causal_conv1d(x, weight, there, **{**options, **changed})

    del options["use_qk_l2norm"]
    of_shard = options["cu_seqlens"].clamp_max(S // 2)
    for call, name in ((rule, "q"), (convolve, "x")):
        with pytest.raises(ValueError, match=f"cu_seqlens must end at {S}, the number of tokens"):
            call(cu_seqlens=of_shard)
        with pytest.raises(ValueError, match="cp must have a process group for ring_size = 2"):
            call(there=where.layout())
        odd = x[:, 1:] if call is convolve else [t[:, 1:] for t in own]
        with pytest.raises(ValueError, match=f"{name} must have an even number of tokens"):
            call(odd)
        two = x.repeat(2, 1, 1) if call is convolve else [torch.cat((t, t)) for t in own]
        with pytest.raises(ValueError, match="packed documents need B = 1"):
            call(two)
        with pytest.raises(ValueError, match="unknown implementation 'ring'"):
            call(implementation="ring")
    with pytest.raises(ImplementationUnavailable, match="takes q and k of width"):
        rule(implementation="triton")
    with pytest.raises(ValueError, match="v must have shape"):
        rule([*own[:2], own[2][:, :, :3], *own[3:]])


@pytest.mark.parametrize("world", LAYOUTS)
def test_linear_attention_of_a_spread_sequence_equals_one_process(world):
    if DEVICE == "cuda":
        pytest.skip("gloo takes CPU tensors: run without a CUDA device")
    with tempfile.TemporaryDirectory() as folder:
        processes(world, _everything, folder)


def test_a_sequence_on_one_rank_is_the_op():
    alone = ContextParallel()
    tensors, dout, options = rule_problem("crossing", torch.float32)
    found = rule_over_ranks(tensors, dout, alone, options, "eager")
    want = rule_in_one(tensors, dout, options, "eager")
    assert all(a.equal(b) for a, b in zip(found, want, strict=True))
    (x, weight), _, options = convolution_problem("crossing", torch.float32)
    one = context_parallel_causal_conv1d(x, weight, alone, **options)
    assert one.equal(causal_conv1d(x, weight, **options))
