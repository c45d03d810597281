"""Tests specific to gated_delta_rule; parity with the eager twin is in test_contract.py."""

import itertools

import pytest
import torch
from helpers import skip_unless_usable, threads

from tilewright.ops import gated_delta_rule
from tilewright.ops.linear_attention.gated_delta_rule import GATED_DELTA_RULE


def drawn(B, S, HK, HV, DK, DV, *, seed=0, dtype=torch.float64, N=None):
    """q, k, v, g, beta and, for N sequences, states; keys with a norm of about 1."""
    gen = torch.Generator().manual_seed(seed)

    def new(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    q, k, v = new(B, S, HK, DK), new(B, S, HK, DK) * DK**-0.5, new(B, S, HV, DV)
    g, beta = -0.2 * new(B, S, HV).exp(), new(B, S, HV).sigmoid()
    state = (new(N or B, HV, DK, DV),)
    return [t.to(dtype).requires_grad_() for t in (q, k, v, g, beta, *state)]


def recurrence(q, k, v, g, beta, state, scale=None, normalize=False):
    """One token at a time. Returns the outputs and the last state."""
    if normalize:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    groups, out = v.shape[2] // q.shape[2], []
    q, k = (t.repeat_interleave(groups, 2) for t in (q, k))
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        write = beta[:, t, :, None] * (v[:, t] - read)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], write)
        out.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1), state


def both(inputs, name, **options):
    """The outputs and the last state."""
    *given, state = inputs
    options |= {"initial_state": state, "output_final_state": True}
    return gated_delta_rule(*given, **options, implementation=name)


def gradients(results, inputs, seed=3):
    gen = torch.Generator().manual_seed(seed)
    weights = [torch.randn(r.shape, generator=gen, dtype=r.dtype) for r in results]
    return torch.autograd.grad(results, inputs, weights, allow_unused=True)


@pytest.mark.parametrize(
    "B, S, HK, HV, DK, DV, options",
    [
        (2, 1, 1, 1, 4, 3, {}),
        (1, 64, 1, 2, 4, 3, {"scale": 0.7}),
        (2, 130, 2, 4, 8, 5, {}),
        (1, 200, 1, 3, 5, 8, {"use_qk_l2norm": True}),
    ],
)
def test_chunks_equal_the_recurrence_in_float64(B, S, HK, HV, DK, DV, options):
    inputs = drawn(B, S, HK, HV, DK, DV)
    found = both(inputs, "eager", **options)
    expected = recurrence(*inputs, options.get("scale"), options.get("use_qk_l2norm", False))
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-11, atol=1e-12)
    for f, e in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-10, atol=1e-11)


def test_packed_documents_start_from_their_own_states():
    bounds = (0, 70, 70, 71, 199, 200)
    inputs = drawn(1, 200, 1, 2, 4, 3, N=5)
    *rows, states = inputs
    found = both(inputs, "eager", cu_seqlens=torch.tensor(bounds))
    alone = []
    for i, (a, b) in enumerate(itertools.pairwise(bounds)):
        own = states[i : i + 1]
        document = [t[:, a:b] for t in rows]
        alone.append(recurrence(*document, own) if a < b else (document[2], own))
    expected = torch.cat([o for o, _ in alone], 1), torch.cat([s for _, s in alone])
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-11, atol=1e-12)
    for f, e in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-10, atol=1e-11)


@pytest.mark.packages
@pytest.mark.parametrize(
    "form", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"]
)
def test_equals_transformers(form):
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    *inputs, state = drawn(2, 70, 2, 4, 16, 8, dtype=torch.float32)
    found = both([*inputs, state], "eager", use_qk_l2norm=True)
    expected = getattr(qwen, form)(
        *inputs, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"v": torch.zeros(1, 4, 3, 8)}, r"v must have shape .* with HV % HK == 0"),
        ({"initial_state": torch.zeros(2, 2, 8, 8)}, r"initial_state must .* or N == B"),
        ({"scale": 0.0}, r"scale must be a number in \(0, inf\) in float32 or None, got 0.0"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "cu_seqlens must end at 4, .*got 3"),
    ],
)
def test_bad_input_is_one_clear_error(changes, message):
    q, g = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2)
    given = {"q": q, "k": q, "v": q, "g": g, "beta": g, **changes}
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**given)


@pytest.mark.parametrize("DK, DV", [(5, 19), (33, 7), (72, 130)])
def test_cpp_takes_any_width_on_any_number_of_threads(DK, DV):
    """Also three value heads per key head, documents of no, one and many chunks; the same bits."""
    skip_unless_usable(GATED_DELTA_RULE, "cpp", torch.float32)
    bounds = (0, 70, 70, 71, 230)
    inputs = drawn(1, 230, 2, 6, DK, DV, dtype=torch.float32, N=4)

    def step(name):
        found = both(inputs, name, use_qk_l2norm=DK == 33, cu_seqlens=torch.tensor(bounds))
        return [*found, *gradients(found, inputs)]

    expected, results = step("eager"), []
    for n in (1, 2, 3):
        with threads(n):
            results.append(step("cpp"))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    for f, e in zip(results[0], expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-4)


def test_cpp_operators_themselves_check_every_tensor():
    """Called below the public function's checks."""
    skip_unless_usable(GATED_DELTA_RULE, "cpp", torch.float32)
    GATED_DELTA_RULE.resolve("cpp", "cpu")
    q, v, g = torch.ones(1, 5, 2, 8) * 0.1, torch.ones(1, 5, 4, 6), torch.ones(1, 5, 4)
    state, bounds = torch.ones(2, 4, 8, 6), torch.tensor([0, 2, 5])
    both = {"q": q, "k": q, "v": v, "beta": g, "initial_state": state, "cu_seqlens": bounds}
    both |= {"scale": 1.0, "normalize": True}
    forward = {**both, "g": g}
    backward = {**both, "do": v, "dstate": state, "decay": g, "solved": torch.ones(1, 5, 4, 16)}
    of_both = (
        ({"q": q[0]}, r"q must be a CPU tensor \[B, S, HK, DK\]"),
        ({"k": q[:, :1]}, "k must have q's shape and dtype"),
        ({"k": q.bfloat16()}, "k must have q's shape and dtype"),
        ({"v": v[:, :, :3]}, r"v must be \[B, S, HV, DV\] of q's dtype"),
        ({"v": v.bfloat16()}, r"v must be \[B, S, HV, DV\] of q's dtype"),
        ({"beta": g.bfloat16()}, r"beta must be float32 \[B, S, HV\]"),
        ({"beta": g[:, :1]}, r"beta must be float32 \[B, S, HV\]"),
        ({"initial_state": state[:1]}, r"initial_state must be float32 \[N, HV, DK, DV\]"),
        ({"cu_seqlens": bounds.int()}, "cu_seqlens must be a vector of at least two int64"),
        ({"cu_seqlens": torch.tensor([0, 2, 4])}, "cu_seqlens must begin with 0 and end with 5"),
        ({"cu_seqlens": torch.tensor([0, 9, 5])}, "cu_seqlens must not decrease"),
    )
    of_forward = (({"g": g[:, :1]}, r"g must be float32 \[B, S, HV\]"),)
    of_backward = (
        ({"do": v[:, :1]}, "do must have v's shape and dtype"),
        ({"dstate": state[:1]}, r"dstate must be float32 \[N, HV, DK, DV\]"),
        ({"decay": g[:, :1]}, r"decay must be float32 \[B, S, HV\]"),
        ({"solved": torch.ones(1, 5, 4, 8)}, r"solved must be \[B, S, HV, 16\]"),
    )
    for name, right, more in (
        ("cpp", forward, of_forward),
        ("cpp_backward", backward, of_backward),
    ):
        call = getattr(torch.ops.tilewright, f"gated_delta_rule_{name}")
        call(**right)
        for wrong, message in (*of_both, *more):
            with pytest.raises(RuntimeError, match=message):
                call(**{**right, **wrong})
