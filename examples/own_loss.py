"""A loss of one's own on the head of a transformers model, without its logits: see
docs/tutorials/own_loss.md.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tilewright.ops import linear_logprob


def policy_loss(model, input_ids, labels, advantage, entropy_weight=0.01):
    """Minus the advantage times the log-probability of each token that has a label, and minus some
    of the entropy; a mean over these tokens.
    """
    hidden = model.model(input_ids).last_hidden_state[:, :-1]
    target = labels[:, 1:]  # the token that a position predicts
    logprob, entropy = linear_logprob(hidden, model.lm_head.weight, target)
    per_token = -advantage[:, 1:] * logprob - entropy_weight * entropy
    return per_token[target != -100].mean()


def with_logits(model, input_ids, labels, advantage, entropy_weight=0.01):
    """The same from logits."""
    logprobs = model(input_ids).logits[:, :-1].float().log_softmax(-1)
    target = labels[:, 1:]
    logprob = logprobs.gather(-1, target.clamp_min(0)[..., None])[..., 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    per_token = -advantage[:, 1:] * logprob - entropy_weight * entropy
    return per_token[target != -100].mean()


def main():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = LlamaForCausalLM(config)
    input_ids = torch.randint(8192, (2, 64))
    labels = input_ids.clone()
    labels[:, :16] = -100  # a prompt
    advantage = torch.randn(2, 64)
    losses, gradients = [], []
    for loss_of in (policy_loss, with_logits):
        model.zero_grad()
        loss = loss_of(model, input_ids, labels, advantage)
        loss.backward()
        losses.append(loss.item())
        gradients.append(model.lm_head.weight.grad.clone())
    print(f"loss {losses[0]:.4f}, from logits {losses[1]:.4f}")
    difference = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    print(f"gradient of the head: relative difference {difference:.0e}")


if __name__ == "__main__":
    main()
