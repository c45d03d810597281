"""Recorded routes: the experts that an inference engine chose, which training replays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import torch

from tilewright.nn import read_routed_experts
from tilewright.nn.routed_experts import check
from tilewright.trainer.data.nested import is_list, is_nested, nested
from tilewright.trainer.models.model_config import ModelConfig

pc: Any = pyarrow.compute  # which makes its functions when it is imported
CHECKED = 256  # samples of a prepared set that are checked at a time


@dataclasses.dataclass(frozen=True)
class Routes:
    """What a model's recorded routes look like.

    layers: the model's number of layers.   routed: those with experts.   top_k: experts per token.
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

        given: as in `read_routed_experts`, lists also as an Arrow array.   tokens: the sample's.
        Raises TypeError or ValueError.
        """
        if given is None:
            raise ValueError("it has no routed_experts")
        routes = read_routed_experts(
            nested(given, "routed experts") if is_nested(given) else given,
            layers=self.layers,
            top_k=self.top_k,
            experts=self.experts,
            routed=self.routed,
            tokens=tokens,
        )
        return routes.transpose(0, 1).reshape(tokens, self.width).to(torch.int16).numpy()

    def check(self, column: pa.ChunkedArray, tokens: pa.ChunkedArray) -> None:
        """Raises ValueError for the first sample of a prepared set whose routes are not such.

        column: those of each sample, token after token.   tokens: the tokens of each sample.
        """
        if not (is_list(column.type) and pa.types.is_integer(column.type.value_type)):
            raise ValueError(f"routed_experts are {column.type}; accepted are lists of integers")
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        counts = pc.fill_null(pc.list_value_length(tokens), 0).to_numpy()
        if len(wrong := (lengths != counts * self.width).nonzero()[0]):
            i = wrong[0]
            raise ValueError(
                f"sample {i} has {lengths[i]} numbers in routed_experts; accepted are "
                f"{counts[i] * self.width}, {self.width} for each of its {counts[i]} tokens"
            )
        first = 0
        for part in column.chunks:
            for at in range(0, len(part), CHECKED):
                some = part.slice(at, CHECKED)
                try:
                    self._check(some)
                except ValueError:
                    for i in range(len(some)):  # to name the sample
                        try:
                            self._check(some.slice(i, 1))
                        except ValueError as error:
                            raise ValueError(f"sample {first + i}: {error}") from error
                    raise
                first += len(some)

    def _check(self, samples: pa.Array) -> None:
        values = samples.flatten()
        if values.null_count:
            raise ValueError("an expert in routed_experts is null")
        experts = values.to_numpy(zero_copy_only=False).reshape(-1, len(self.routed), self.top_k)
        check(experts, self.experts, self.routed)
