"""What is special to attention; parity with the eager twin is in test_contract.py."""

import re

import pytest
import torch
from helpers import DEVICE, skip_unless_usable
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.ops import attention
from tilewright.ops.attention import ATTENTION
from tilewright.registry import FLOATS, short

EVERY = pytest.mark.parametrize("name", ATTENTION.names())
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=short)
HQ, HK, D = 4, 2, 8
CLOSE = {"rtol": 1e-5, "atol": 1e-5}   # float32 sums of a few dozen terms of size one


def heads(n, seq, *, batch=1, dtype=torch.float32):
    """[B, n, S, D] as a projection gives it: [B, S, n, D] transposed."""
    return torch.randn(batch, seq, n, D, device=DEVICE).to(dtype).transpose(1, 2)


def qkv(seq, **options):
    return [heads(n, seq, **options) for n in (HQ, HK, HK)]


def ends(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def step(tensors, grad, name, **options):
    """Output and gradients, of fresh leaves."""
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    out = attention(*tensors, implementation=name, **options)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


@EVERY
@pytest.mark.parametrize("causal", [True, False])
def test_equals_the_formula_in_float64(name, causal):
    skip_unless_usable(ATTENTION, name, torch.float64)
    q, k, v = qkv(6, batch=2, dtype=torch.float64)
    out = attention(q, k, v, causal=causal, implementation=name)
    for b in range(2):
        for h in range(HQ):
            for i in range(6):
                seen = slice(0, i + 1 if causal else 6)
                group = h // (HQ // HK)
                weight = torch.exp(k[b, group, seen] @ q[b, h, i] / D ** 0.5)
                expected = weight @ v[b, group, seen] / weight.sum()
                torch.testing.assert_close(out[b, h, i], expected, rtol=1e-12, atol=1e-12)


@EVERY
@DTYPES
@pytest.mark.parametrize("causal", [True, False])
def test_documents_are_isolated(name, dtype, causal):
    """Whatever document A holds, B's outputs and gradients are the same bits; the other way round too."""
    skip_unless_usable(ATTENTION, name, dtype)
    S, cut = 23, 9
    tensors, grad = qkv(S, dtype=dtype), heads(HQ, S, dtype=dtype)
    options = {"cu_seqlens": ends(0, cut, S), "causal": causal}
    before = step(tensors, grad, name, **options)
    for touched, other in ((slice(0, cut), slice(cut, S)), (slice(cut, S), slice(0, cut))):
        changed = [t.clone() for t in (*tensors, grad)]
        for t in changed:
            t[:, :, touched] = t[:, :, touched] * -3 + 1
        after = step(changed[:3], changed[3], name, **options)
        for a, b in zip(after, before, strict=True):
            assert torch.equal(a[:, :, other], b[:, :, other])
            assert not torch.equal(a[:, :, touched], b[:, :, touched])


@EVERY
def test_packed_equals_each_document_alone(name):
    skip_unless_usable(ATTENTION, name, torch.float32)
    lengths = [1, 5, 0, 11]
    tensors, grad = qkv(17), heads(HQ, 17)
    packed = step(tensors, grad, name, cu_seqlens=ends(0, 1, 6, 6, 17))
    alone = [step(part[:3], part[3], name) for part in
             zip(*(t.split(lengths, 2) for t in (*tensors, grad)), strict=True)]
    for whole, parts in zip(packed, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(whole, torch.cat(parts, 2), **CLOSE)


@EVERY
@pytest.mark.parametrize("packed", [False, True])
def test_causal_sees_nothing_later(name, packed):
    """Changing position 6 changes no output before it, and without `causal` all of its document."""
    skip_unless_usable(ATTENTION, name, torch.float32)
    q, k, v = qkv(12)
    options = {"cu_seqlens": ends(0, 4, 12)} if packed else {}
    first = 4 if packed else 0
    later_k, later_v = k.clone(), v.clone()
    later_k[:, :, 6] += 1
    later_v[:, :, 6] -= 2
    for causal in (True, False):
        a = attention(q, k, v, causal=causal, implementation=name, **options)
        b = attention(q, later_k, later_v, causal=causal, implementation=name, **options)
        changed = (a != b).any(-1).all(1)[0].tolist()
        untouched = (a == b).all(-1).all(1)[0].tolist()
        start = 6 if causal else first
        assert changed == [i >= start for i in range(12)] and untouched == [i < start for i in range(12)]


@EVERY
def test_grouped_queries_equal_repeated_heads(name):
    """Query heads 0, 1 read key head 0 and so on; and a key head's gradient is the sum over its group."""
    skip_unless_usable(ATTENTION, name, torch.float32)
    (q, k, v), grad = qkv(9, batch=2), heads(HQ, 9, batch=2)
    out, dq, dk, dv = step((q, k, v), grad, name)
    repeated = step((q, *(t.repeat_interleave(HQ // HK, 1) for t in (k, v))), grad, name)
    torch.testing.assert_close(out, repeated[0], **CLOSE)
    torch.testing.assert_close(dq, repeated[1], **CLOSE)
    for found, wide in ((dk, repeated[2]), (dv, repeated[3])):
        torch.testing.assert_close(found, wide.unflatten(1, (HK, -1)).sum(2), **CLOSE)


@EVERY
@pytest.mark.parametrize("cu", [None, (0, 3, 10)], ids=["whole", "packed"])
def test_scale(name, cu):
    skip_unless_usable(ATTENTION, name, torch.float32)
    q, k, v = qkv(10)
    options = {"implementation": name, "cu_seqlens": None if cu is None else ends(*cu)}
    default = attention(q, k, v, **options)
    torch.testing.assert_close(attention(q, k, v, scale=D ** -0.5, **options), default, rtol=0, atol=0)
    torch.testing.assert_close(attention(2 * q, k, v, scale=0.5 * D ** -0.5, **options), default, **CLOSE)
    assert not torch.allclose(attention(q, k, v, scale=1.0, **options), default, atol=1e-2)
    # A scale of next to nothing: every allowed position weighs the same.
    for causal, seen in ((False, 3 if cu else 10), (True, 1)):
        flat = attention(q, k, v, scale=1e-30, causal=causal, **options)
        torch.testing.assert_close(flat[:, :, 0], v[:, :, :seen].mean(2).repeat_interleave(2, 1), **CLOSE)


@EVERY
def test_autocast_changes_nothing(name):
    skip_unless_usable(ATTENTION, name, torch.float32)
    tensors, grad = qkv(9), heads(HQ, 9)
    expected = step(tensors, grad, name)
    leaves = [t.clone().requires_grad_() for t in tensors]
    with torch.autocast(DEVICE, torch.bfloat16):
        out = attention(*leaves, implementation=name)
    for f, e in zip([out, *torch.autograd.grad(out, leaves, grad)], expected, strict=True):
        assert f.dtype == torch.float32 and torch.equal(f, e)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator returns."""

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


@DTYPES
def test_no_mask_is_built_for_packed_documents(dtype):
    """Forward and backward make nothing larger than the operands themselves; [T, T] would be eight times that."""
    skip_unless_usable(ATTENTION, "sdpa", dtype)
    T = 256
    tensors = [t.requires_grad_() for t in qkv(T, dtype=dtype)]
    cu = ends(0, 100, 101, 200, T)
    assert HQ * T * D < T * T
    assert largest("sdpa", tensors, cu_seqlens=cu) <= HQ * T * D
    assert largest("eager", tensors, cu_seqlens=cu) >= T * T, "the recorder sees nothing"


@EVERY
def test_no_tokens(name):
    skip_unless_usable(ATTENTION, name, torch.float32)
    for batch, seq, cu in ((0, 5, None), (2, 0, None), (1, 0, ends(0, 0, 0))):
        tensors = qkv(seq, batch=batch)
        found = step(tensors, torch.empty(batch, HQ, seq, D, device=DEVICE), name, cu_seqlens=cu)
        assert [f.shape for f in found] == [t.shape for t in (tensors[0], *tensors)]


Q, K, V = torch.randn(1, HQ, 6, D), torch.randn(1, HK, 6, D), torch.randn(1, HK, 6, D)


def call(name, *args, **options):
    return attention(*args, implementation=name, **options)


def packed(*values, dtype=torch.int32):
    return lambda name: call(name, Q, K, V, cu_seqlens=torch.tensor(values, dtype=dtype))


@EVERY
@pytest.mark.parametrize("bad, error, message", [
    (lambda n: call(n, [1.0], K, V), TypeError, "q must be a torch.Tensor, got list"),
    (lambda n: call(n, Q, K.long(), V), TypeError, "k must be one of float32.*int64"),
    (lambda n: call(n, Q, K, V.half()), TypeError, "v must have q's dtype torch.float32, got torch.float16"),
    (lambda n: call(n, Q[0], K, V), ValueError, r"q must have shape \[B, H, S, D\], got \[4, 6, 8\]"),
    (lambda n: call(n, Q, K[:, :, :5], V), ValueError, r"k must have shape \[1, a divisor of 4, 6, 8\].*2, 5, 8\]"),
    (lambda n: call(n, Q[:, :3], K, V), ValueError, "a divisor of 3"),
    (lambda n: call(n, Q, K[:, :0], V[:, :0]), ValueError, r"a divisor of 4.*got \[1, 0, 6, 8\]"),
    (lambda n: call(n, Q, K, V[:, :1]), ValueError, r"v must have shape \[1, 2, 6, 8\] \(that of k\)"),
    (lambda n: call(n, Q[..., :0], K[..., :0], V[..., :0]), ValueError, r"head width of at least 1.*\[1, 4, 6, 0\]"),
    (lambda n: call(n, Q[:, :0], K[:, :0], V[:, :0]), ValueError, r"at least one head.*\[1, 0, 6, 8\]"),
    (lambda n: call(n, Q, K.to("meta"), V), ValueError, "k is on meta, q on cpu"),
    (lambda n: attention(Q, K, V, implementation="flash"), ValueError, "unknown implementation 'flash'"),
    (lambda n: call(n, Q, K, V, cu_seqlens=[0, 6]), TypeError, "cu_seqlens must be a torch.Tensor, got list"),
    (packed(0.0, 6.0, dtype=torch.float32), TypeError, "cu_seqlens must be int32 or int64, got float32"),
    (packed(6), ValueError, r"cu_seqlens must have shape \[documents \+ 1\], got \[1\]"),
    (packed(2, 6), ValueError, "cu_seqlens must start at 0, got 2"),
    (packed(0, 4, 3, 6), ValueError, "cu_seqlens must not decrease, got 3 after 4 at index 2"),
    (packed(0, 5), ValueError, "cu_seqlens must end at 6, the number of tokens, got 5"),
    (packed(0, 4, 9), ValueError, "cu_seqlens must end at 6.*got 9"),
    (lambda n: call(n, *(t.expand(2, -1, -1, -1) for t in (Q, K, V)), cu_seqlens=torch.tensor([0, 6])), ValueError,
     "packed documents need B = 1"),
    (lambda n: call(n, *(t.to("meta") for t in (Q, K, V)), cu_seqlens=torch.tensor([0, 6], device="meta")), ValueError,
     "cu_seqlens must be on a device that holds values.*got one on meta"),
    (lambda n: call(n, Q.to_sparse(), K, V), TypeError, "q must be a strided .dense. tensor, got layout sparse_coo"),
    (lambda n: call(n, Q, K, torch.nested.nested_tensor([V[0]])), TypeError, "v must be a strided .dense.*nested"),
    *((lambda n, s=s: call(n, Q, K, V, scale=s), ValueError, f"scale must be a finite number > 0.*{re.escape(repr(s))}")
      for s in (0.0, -0.3, float("nan"), float("inf"), 1e300, 10**400, 1e-300)),
    *((lambda n, s=s: call(n, Q, K, V, scale=s), TypeError, f"scale must be a number, got {s!r}") for s in ("1", True)),
    *((lambda n, c=c: call(n, Q, K, V, causal=c), TypeError, f"causal must be a bool, got {c!r}")
      for c in (0, None, "yes")),
])
def test_bad_input_is_one_clear_error(name, bad, error, message):
    with pytest.raises(error, match=message):
        bad(name)
