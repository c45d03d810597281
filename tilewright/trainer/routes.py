"""Recorded routes: the experts that an inference engine chose, which training replays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from tilewright.nn import read_routed_experts
from tilewright.trainer.model_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Routes:
    """What a model's recorded routes look like.

    layers: of the model.   routed: those with experts.   top_k: experts per token.
    """

    layers: int
    routed: tuple[int, ...]
    top_k: int
    experts: int

    @classmethod
    def of(cls, config: ModelConfig) -> Routes:
        """Raises ValueError for a model without experts."""
        layers = config.num_hidden_layers
        routed = tuple(i for i in range(layers) if config.is_moe(i))
        if not routed:
            raise ValueError("train.router_replay = True: the model has no experts")
        return cls(layers, routed, config.num_experts_per_tok, config.num_experts)

    @property
    def width(self) -> int:
        """Numbers per token."""
        return len(self.routed) * self.top_k

    def read(self, given: Any, tokens: int) -> np.ndarray:
        """A cell of the data: int16 [tokens, width], -1 for a token without a record.

        given: as in `read_routed_experts`, lists as an Arrow array.   tokens: of the sample.
        Raises TypeError or ValueError.
        """
        if given is None:
            raise ValueError("it has no routed_experts")
        found = read_routed_experts(
            _nested(given) if isinstance(given, pa.Array) else given,
            layers=self.layers,
            top_k=self.top_k,
            experts=self.experts,
            routed=self.routed,
            tokens=tokens,
        )
        return found.transpose(0, 1).reshape(tokens, self.width).to(torch.int16).numpy()


def _nested(values: pa.Array) -> np.ndarray:
    """Lists of lists as an array, without Python's numbers."""
    shape: list[int] = [len(values)]
    while pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        lengths = pc.unique(pc.list_value_length(values)).to_pylist()
        if len(lengths) > 1 or None in lengths:
            raise ValueError(
                f"routed experts have no shape: lists of lengths {sorted(map(str, lengths))}"
            )
        shape.append(lengths[0] if lengths else 0)
        values = values.flatten()
    if values.null_count:
        raise ValueError("an expert in routed_experts is null")
    return values.to_numpy(zero_copy_only=False).reshape(shape)
