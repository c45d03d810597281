"""What is written raises its version counter, under every implementation: autograd then refuses a
backward that needs the former values, where it would compute a wrong gradient.
"""

import inspect

import pytest
import torch
from helpers import DEVICE, skip_unless_usable

from tilewright import ops
from tilewright.ops import OPS


def randn(*shape):
    return torch.randn(*shape, device=DEVICE)


def angles():
    a = randn(1, 3, 4)
    return a.cos(), a.sin()


def adamw(name):
    lists = [[randn(5), randn(2, 3)] for _ in range(5)]
    p, g, m, v, kahan = lists
    v = [t.abs() for t in v]
    written = [*p, *m, *v, *kahan]
    return written, lambda: ops.adamw_(
        p, g, m, v, step=1, lr=0.1, compensations=kahan, implementation=name
    )


def rope(name):
    q, k = randn(1, 2, 3, 8), randn(1, 1, 3, 8)
    return [q, k], lambda: ops.rope(q, k, *angles(), inplace=True, implementation=name)


def qk_norm_rope(name):
    qkv = randn(1, 3, 4 * 8)
    return [qkv], lambda: ops.qk_norm_rope(
        qkv, *angles(), num_heads=2, num_kv_heads=1, inplace=True, implementation=name
    )


def backward_of(loss):
    """Logits that the backward of loss(logits) overwrites."""
    logits = randn(3, 7)
    result = loss(logits.requires_grad_())
    return [logits], lambda: result.sum().backward()


def cross_entropy(name):
    target = torch.tensor([0, 3, 6], device=DEVICE)
    return backward_of(lambda x: ops.cross_entropy(x, target, inplace=True, implementation=name))


def logprob_entropy(name):
    target = torch.tensor([0, 3, 6], device=DEVICE)
    return backward_of(
        lambda x: torch.stack(ops.logprob_entropy(x, target, inplace=True, implementation=name)[:2])
    )


CALLS = {
    "adamw_": adamw,
    "rope": rope,
    "qk_norm_rope": qk_norm_rope,
    "cross_entropy": cross_entropy,
    "logprob_entropy": logprob_entropy,
}
LOSSES = ("cross_entropy", "logprob_entropy")


def test_every_op_that_writes_its_arguments_is_here():
    writes = {
        name
        for name, op in OPS.items()
        if name.endswith("_") or "inplace" in inspect.signature(op.public).parameters
    }
    assert writes == set(CALLS)


@pytest.mark.parametrize(
    "op, name, recorded",
    [
        pytest.param(op, i.name, recorded, id=f"{op}-{i.name}-{'grad' if recorded else 'no_grad'}")
        for op in CALLS
        for i in OPS[op].implementations
        for recorded in (True, False)
        if recorded or op not in LOSSES  # which write in their backward alone
    ],
)
def test_what_is_written_raises_its_version(op, name, recorded):
    skip_unless_usable(OPS[op], name, torch.float32)
    torch.manual_seed(0)
    written, call = CALLS[op](name)
    # A view shares the counter: a tensor that autograd saved may be one.
    views = [t.detach().view(-1) for t in written]
    before = [(t._version, t.detach().clone()) for t in written]
    with torch.set_grad_enabled(recorded):
        call()
    for t, view, (version, old) in zip(written, views, before, strict=True):
        # Losses of PyTorch's own functions leave the logits as they are.
        is_written = op not in LOSSES or name not in ("torch", "eager")
        assert is_written != torch.equal(t.detach(), old)
        assert not is_written or (t._version > version and view._version > version)


@pytest.mark.parametrize("name", [i.name for i in OPS["adamw_"].implementations])
def test_a_step_between_forward_and_backward_is_an_error(name):
    skip_unless_usable(OPS["adamw_"], name, torch.float32)
    w = torch.nn.Parameter(randn(4))
    loss = (w * w).sum()
    ops.adamw_([w], [randn(4)], [torch.zeros_like(w.data)], [torch.zeros_like(w.data)], step=1,
               lr=0.1, implementation=name)  # fmt: skip
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", [i.name for i in OPS["adamw_"].implementations])
def test_tensors_of_inference_are_written_all_the_same(name):
    skip_unless_usable(OPS["adamw_"], name, torch.float32)
    with torch.inference_mode():
        p, g, m, v = ([t] for t in (torch.ones(3), torch.ones(3), torch.zeros(3), torch.zeros(3)))
        p, g, m, v = ([t[0].to(DEVICE)] for t in (p, g, m, v))
        ops.adamw_(p, g, m, v, step=1, lr=0.1, implementation=name)
    assert not torch.equal(p[0], torch.ones_like(p[0]))
