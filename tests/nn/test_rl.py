"""tilewright.integrations.rl: what actors of verl and SkyRL call. tests/nn/test_trl.py compares a
sharded vocabulary with a whole one.
"""

import inspect

import pytest
import torch
import torch.nn.functional as F

from tilewright.integrations import rl


def inputs(*shape, V=37):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, V, generator=g, requires_grad=True)
    return logits, torch.randint(V, shape, generator=g)


def eager(logits, labels, temperature=1.0):
    logp = F.log_softmax(logits / temperature, -1)
    return logp.gather(-1, labels[..., None])[..., 0], -(logp.exp() * logp).sum(-1)


def gradient(loss, *tensors):
    return torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("inplace", [True, False])
def test_logprobs_from_logits(inplace):
    logits, labels = inputs(2, 5)
    expected, _ = eager(logits, labels, 0.7)
    w = torch.arange(10.0).view(2, 5)
    (wanted,) = gradient((expected * w).sum(), logits)
    own = logits * 1  # what a model returns
    found = rl.logprobs_from_logits(own, labels, inplace, temperature=0.7)
    (grad,) = gradient((found * w).sum(), logits)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grad, wanted)
    assert torch.equal(own, logits) != inplace


def test_compiled_logits_are_not_overwritten():
    logits, labels = inputs(2, 5)
    expected, _ = eager(logits, labels)
    (wanted,) = gradient(expected.sum(), logits)
    own = logits * 1
    compiled = torch.compile(rl.logprobs_from_logits, backend="eager", fullgraph=True)
    (grad,) = gradient(compiled(own, labels).sum(), logits)
    torch.testing.assert_close(grad, wanted)
    assert torch.equal(own, logits)


def test_bfloat16_logits_give_float32():
    logits, labels = inputs(3)
    low = logits.detach().bfloat16()
    found = rl.logprobs_from_logits(low, labels), rl.entropy_from_logits(low)
    for a, b in zip(found, eager(low.float(), labels), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("chunk_size", [None, 2, 100])
def test_entropy_from_logits(chunk_size):
    logits, labels = inputs(2, 5)
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]])
    _, expected = eager(logits, labels, 1.3)
    found = rl.entropy_from_logits(logits, True, mask, chunk_size, temperature=1.3)
    torch.testing.assert_close(found, expected * mask)
    torch.testing.assert_close(
        gradient(found.sum(), logits)[0], gradient((expected * mask).sum(), logits)[0]
    )
    assert not rl.entropy_from_logits(logits, requires_grad=False).requires_grad
    with pytest.raises(ValueError, match=r"^attention_mask must have shape \[2, 5\]"):
        rl.entropy_from_logits(logits, attention_mask=mask[:, :4])


@pytest.mark.parametrize("shape", [(5,), (2, 2, 5)])
def test_chunks_are_of_the_last_dimension_but_one(shape):
    logits, labels = inputs(*shape)
    found = rl.entropy_from_logits(logits, chunk_size=2)
    torch.testing.assert_close(found, eager(logits, labels)[1])


def test_logprobs_and_entropy():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 8, generator=g, requires_grad=True)
    weight = torch.randn(37, 8, generator=g, requires_grad=True)
    labels = torch.randint(37, (2, 5), generator=g)
    labels[0, 1] = -100
    found = rl.logprobs_and_entropy(x, weight, labels.int(), 0.7)
    valid = labels != -100
    expected = [t * valid for t in eager(x @ weight.T, labels.clamp_min(0), 0.7)]
    w = torch.arange(10.0).view(2, 5)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(
        gradient((found[0] * w + found[1]).sum(), x, weight),
        gradient((expected[0] * w + expected[1]).sum(), x, weight),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


# verl 1dda039 and SkyRL a956457: parameters that their callers pass, in order.
SIGNATURES = {
    "logprobs_from_logits": ("logits", "labels", "inplace_backward"),
    "entropy_from_logits": ("logits", "requires_grad", "attention_mask", "chunk_size"),
    "logprobs_and_entropy": ("hidden_states", "vocab_weights", "input_ids", "temperature"),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    parameters = inspect.signature(getattr(rl, name)).parameters
    assert tuple(parameters)[: len(SIGNATURES[name])] == SIGNATURES[name]
