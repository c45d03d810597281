"""Keywords that PyTorch's functions have under another name are answered with the name here."""

import inspect

import pytest
import torch

from tilewright import nn, ops
from tilewright.core import checks

Q, TARGET = torch.ones(1, 2, 3, 8), torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    "call, sentence",
    [
        (
            lambda: ops.attention(Q, Q, Q, is_causal=True),
            "attention() has no argument is_causal: causal (default: True)",
        ),
        (
            lambda: ops.attention(Q, Q, Q, softmax_scale=1.0),
            "attention() has no argument softmax_scale: it is scale here",
        ),
        (
            lambda: ops.attention(Q, Q, Q, attn_mask=None),
            "attention() has no argument attn_mask: packed documents are cu_seqlens",
        ),
        (
            lambda: ops.attention(Q, Q, Q, cu_seqlen=None),
            "attention() has no argument cu_seqlen: did you mean cu_seqlens?",
        ),
        (
            lambda: ops.cross_entropy(Q[0, 0], TARGET, weight=torch.ones(8)),
            "cross_entropy() has no argument weight: it is class_weight here",
        ),
        (
            lambda: ops.linear_cross_entropy(Q[0, 0], linear_weight=Q[0, 0], target=TARGET),
            "linear_cross_entropy() has no argument linear_weight: it is weight here",
        ),
        (
            lambda: nn.RMSNorm(normalized_shape=8),
            "RMSNorm() has no argument normalized_shape: it is dim here",
        ),
        (
            lambda: nn.RMSNorm(8, elementwise_affine=False),
            "RMSNorm() has no argument elementwise_affine: the norm always has a weight",
        ),
        (
            lambda: nn.CrossEntropyLoss(weight=torch.ones(8)),
            "CrossEntropyLoss() has no argument weight: it is class_weight here",
        ),
        (lambda: nn.RMSNorm(8, colour=1), "RMSNorm() has no argument colour: see help()"),
    ],
)
def test_a_name_of_pytorch_is_answered_with_ours(call, sentence):
    with pytest.raises(TypeError) as error:
        call()
    assert str(error.value).startswith(sentence)


def test_the_signature_stays_and_a_name_that_exists_has_no_answer():
    def loss(x, class_weight=None):
        return x

    decorated = checks.torch_names(weight="class_weight")(loss)
    assert decorated(1, class_weight=2) == 1
    assert inspect.signature(decorated) == inspect.signature(loss)
    with pytest.raises(AssertionError):
        checks.torch_names(class_weight="x")(loss)
