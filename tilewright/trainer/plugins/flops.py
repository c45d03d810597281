"""Floating-point operations of a model and its adapters, of which the model knows nothing."""

from __future__ import annotations

from tilewright.nn.lora_experts import LoRAExperts
from tilewright.nn.weights import adapted, is_adapter
from tilewright.trainer.models.model import Transformer


def flops_per_token(model: Transformer, sequence: int) -> float:
    """Floating-point operations per token, forward and backward, counting the experts that a
    token is routed to.
    """
    c = model.config
    layers = range(c.num_hidden_layers)
    dense = 3 * c.hidden_size * c.intermediate_size
    sparse = (
        3
        * c.hidden_size
        * c.moe_intermediate_size
        * (c.num_experts_per_tok + (c.n_shared_experts or 0))
        + c.hidden_size * c.num_experts
    )
    mlp = sum(sparse if c.is_moe(i) else dense for i in layers)
    attention, per_key = c.attention_work()
    matrix = c.num_hidden_layers * attention + mlp + c.hidden_size * model.head.rows(c)
    score = per_key * sum(c.keys_seen(i, sequence) for i in layers)
    # Two per multiply-add in the forward, and two again for each factor's gradient; a frozen
    # matrix has none.
    adapters = sum(
        # A token pays for each expert that it is routed to, whether they share a factor or not.
        p.numel() * (c.num_experts_per_tok / p.shape[0] if isinstance(module, LoRAExperts) else 1.0)
        for _, module in adapted(model)
        for name, p in module.named_parameters()
        if is_adapter(name)
    )
    return (4.0 if adapters else 6.0) * matrix + 6.0 * (score + adapters)
