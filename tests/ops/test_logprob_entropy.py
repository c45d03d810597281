"""Tests specific to logprob_entropy, and to adapters of the ops on the head. Parity with the eager
twins is in test_contract.py, shards of the vocabulary are in test_cross_entropy.py.
"""

import functools
import inspect

import pytest
import torch
from helpers import DEVICE, skip_unless_usable

from tilewright.bench import contract
from tilewright.ops import OPS, linear_logprob, logprob_entropy

OP = OPS["logprob_entropy"]
NAMES = OP.names()


def grads(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "eager"])
def test_a_large_constant_costs_no_precision_at_any_temperature(name):
    skip_unless_usable(OP, name, torch.float32)
    g = torch.Generator().manual_seed(0)
    steps = torch.randint(-40, 40, (4, 300), generator=g).float().to(DEVICE) / 4
    y = torch.randint(300, (4,), generator=g).to(DEVICE)
    call = functools.partial(logprob_entropy, target=y, temperature=0.7)
    near, far = steps.clone().requires_grad_(), (steps + 2.0**20).requires_grad_()
    found = [call(x, implementation=name) for x in (near, far)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    of = [grads(lp.sum() - h.sum(), x)[0] for (lp, h), x in zip(found, (near, far), strict=True)]
    assert contract.error(of[1], of[0])[0] < 1e-5


@pytest.mark.parametrize("name", [n for n in NAMES if n != "eager"])
def test_inplace_overwrites_the_logits_once(name):
    skip_unless_usable(OP, name, torch.float32)
    x = torch.randn(5, 40, device=DEVICE)
    y = torch.randint(40, (5,), device=DEVICE)
    leaf = x.clone().requires_grad_()
    [truth] = grads(logprob_entropy(leaf, y, implementation=name)[0].sum(), leaf)
    logits = x.clone().requires_grad_() * 1
    logprob, _ = logprob_entropy(logits, y, inplace=True, implementation=name)
    [found] = torch.autograd.grad(logprob.sum(), logits, retain_graph=True)
    assert torch.equal(found, truth)
    assert torch.equal(logits.detach(), truth)
    assert found.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(logprob.sum(), logits)


# What each op on the head needs beside the head.
OPS_ON_THE_HEAD = {
    "linear_cross_entropy": {"reduction": "none"},
    "linear_logprob": {},
    "linear_policy_loss": {"advantage": torch.ones(7), "old_logprob": torch.full((7,), -3.0)},
    "linear_preference_loss": {
        "cu_seqlens": torch.tensor([0, 3, 7]),
        "ref_logprob": torch.full((2,), -9.0),
    },
}


def test_every_op_on_the_head_is_held():
    adapted = {n for n, op in OPS.items() if "lora_B" in inspect.signature(op.public).parameters}
    assert adapted == {*OPS_ON_THE_HEAD}


@pytest.mark.parametrize(
    "op, name", [(op, name) for op in OPS_ON_THE_HEAD for name in OPS[op].names()]
)
def test_a_zero_adapter_is_none_and_a_merged_one_the_same(op, name):
    skip_unless_usable(OPS[op], name, torch.float32)
    g = torch.Generator().manual_seed(0)
    x, w, a, b = (
        torch.randn(*shape, generator=g).to(DEVICE)
        for shape in ((7, 16), (50, 16), (3, 16), (50, 3))
    )
    y = torch.randint(50, (7,), generator=g).to(DEVICE)
    more = {n: v.to(DEVICE) if torch.is_tensor(v) else v for n, v in OPS_ON_THE_HEAD[op].items()}

    def call(w, **adapter):
        fn = functools.partial(OPS[op].public, chunk_size=4, implementation=name)
        found = fn(x, w, target=y, **more, **adapter)
        return [found] if torch.is_tensor(found) else [t for t in found if torch.is_tensor(t)]

    plain = call(w)
    for t, p in zip(call(w, lora_A=a, lora_B=b * 0), plain, strict=True):
        if name == "torch":  # of F.linear_cross_entropy, which takes no adapter
            torch.testing.assert_close(t, p)
        else:
            assert torch.equal(t, p)
    merged = call(w + 0.5 * b @ a)
    for t, p in zip(call(w, lora_A=a, lora_B=b, lora_scale=0.5), merged, strict=True):
        torch.testing.assert_close(t, p, rtol=1e-4, atol=1e-5)


X, W, Y = torch.randn(3, 8), torch.randn(10, 8), torch.tensor([1, 2, 3])
A, B = torch.randn(2, 8), torch.randn(10, 2)


@pytest.mark.parametrize(
    "adapter, message",
    [
        ({"lora_A": A}, "lora_B must be given"),
        ({"lora_B": B}, "lora_A must be given"),
        ({"lora_A": A[:, :7], "lora_B": B}, r"lora_A must have shape \[rank, H\], where H = 8"),
        ({"lora_A": A, "lora_B": B[:9]}, r"lora_B must have shape \[V, r\], where V = 10"),
        ({"lora_A": A[:1], "lora_B": B}, r"lora_B .* with r == rank, where rank = 1, got \[10, 2"),
        ({"lora_A": A[:0], "lora_B": B[:, :0]}, r"lora_A must have shape .* with rank >= 1"),
        ({"group": "tp"}, "group must be"),
    ],
)
def test_an_adapter_that_does_not_fit_is_named(adapter, message):
    with pytest.raises((TypeError, ValueError), match=message):
        linear_logprob(X, W, Y, **adapter)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"logits": W}, ValueError, "target must have shape"),
        ({"softcap": 1e-30, "temperature": 1e30}, ValueError, "must be a finite number"),
        ({"target": Y + 7}, IndexError, "accepted are 0 to 7"),
        ({"group": "tp"}, TypeError, "group must be"),
        ({"logits": X[:1].expand(3, 8), "inplace": True}, ValueError, "cannot overwrite logits"),
    ],
)
def test_bad_input_is_named(changes, error, message):
    with pytest.raises(error, match=message):
        logprob_entropy(**{"logits": X, "target": Y, **changes})
