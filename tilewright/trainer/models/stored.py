"""How a model's parameters are stored in a Hugging Face folder."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

QKV = ("q_proj", "k_proj", "v_proj")
FUSED = {"qkv_proj": QKV, "gate_up_proj": ("gate_proj", "up_proj")}


class Rows(NamedTuple):
    """Rows of a tensor.   all: how many it has."""

    first: int
    end: int
    all: int


class Stored:
    """Projections and experts one by one, under Hugging Face's names. A family that stores them
    otherwise has a subclass.

    fused: projections, by their names in FUSED, that are one tensor on disk, too, and have one
        adapter, as in transformers.
    """

    def __init__(self, fused: tuple[str, ...] = ()):
        self.fused = fused

    def sources(self, name: str, config: Any) -> list[str]:
        """The tensors on disk that are fused into one parameter, in order."""
        stem, _, last = name.rpartition(".experts.")
        if stem:
            parts = FUSED["gate_up_proj"] if last == "gate_up_proj" else ("down_proj",)
            experts = range(config.num_experts)
            return [f"{stem}.experts.{e}.{part}.weight" for e in experts for part in parts]
        projection = _projection(name)
        if projection in QKV and "qkv_proj" in self.fused:
            return [name.replace(projection, "qkv_proj")]
        if projection in self.fused or projection not in FUSED:
            return [name]
        return [name.replace(projection, part) for part in FUSED[projection]]

    def rows(self, name: str, config: Any) -> Rows | None:
        """Those of its only source that a parameter is; None: all."""
        projection = _projection(name)
        if projection not in QKV or "qkv_proj" not in self.fused:
            return None
        widths, at = _widths(config), QKV.index(projection)
        first = sum(widths[:at])
        return Rows(first, first + widths[at], sum(widths))

    def fuse(self, name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        """A parameter of its sources."""
        _, of_experts, last = name.rpartition(".experts.")
        if last == "gate_up_proj":
            pairs = zip(tensors[::2], tensors[1::2], strict=True)
            return torch.stack([torch.cat(pair) for pair in pairs])
        if of_experts:
            return torch.stack(tensors)
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def split(self, name: str, full: torch.Tensor, config: Any) -> list[torch.Tensor]:
        """The inverse of `fuse`."""
        _, of_experts, last = name.rpartition(".experts.")
        if of_experts:
            return [half for e in full for half in e.chunk(2)] if "up" in last else list(full)
        projection = _projection(name)
        if projection in self.fused or projection not in FUSED:
            return [full]
        return list(full.split(_widths(config)) if projection == "qkv_proj" else full.chunk(2))

    def is_left(self, name: str, config: Any) -> bool:
        """Whether a tensor on disk that no parameter is made from is no mistake."""
        return False


def _projection(name: str) -> str:
    """The last name of the module that has a parameter."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _widths(config: Any) -> list[int]:
    """Rows of queries, keys and values."""
    kv = config.num_key_value_heads * config.head_dim
    return [config.num_attention_heads * config.head_dim, kv, kv]
