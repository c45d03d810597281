"""The Llama that benchmarks of training compare, with random weights and tokens."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}  # of products; weights are float32, as in training
SEED = 0


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a Llama, by default that of SmolLM2-135M with 8 of its 30 layers."""

    tokens: int = 1024
    layers: int = 8
    hidden: int = 576
    inner: int = 1536
    heads: int = 9
    kv_heads: int = 3
    vocabulary: int = 49152
    rope_theta: float = 10000.0

    @property
    def name(self) -> str:
        known = dataclasses.replace(self, tokens=1024, layers=8) == Shape()
        return f"{'smollm2-135m' if known else f'llama-{self.hidden}'}_{self.layers}_layers_{self.tokens}_tokens"


def of_transformers(shape: Shape) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    attention: dict[str, Any] = {"attn_implementation": "sdpa"}  # a field of no config's class
    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            vocab_size=shape.vocabulary,
            max_position_embeddings=max(2048, shape.tokens),
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            **attention,
        )
    )


def tokens_of(shape: Shape) -> torch.Tensor:
    return torch.randint(
        shape.vocabulary, (1, shape.tokens), generator=torch.Generator().manual_seed(SEED + 1)
    )
