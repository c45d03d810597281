"""The order in which a step computes, and checksums of what a model's modules return in it.

Checksums are taken of the embedding, of each module of a layer (norms, attention, MLP) and of the
last norm. A layer whose code is one compiled graph has a single checksum. The head has none: it is
computed within the loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from tilewright.trainer.models.model import Transformer
from tilewright.trainer.parallel.compiling import is_compiled
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.plugins.proof.checksums import ROW, checksum, factors

# Parts of names in the order of the forward: modules are registered in another one.
FORWARD = (
    "model",
    "embed_tokens",
    "layers",
    "input_layernorm",
    "self_attn",
    *("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"),
    *("qkv_proj", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "sinks", "o_proj"),
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "mlp",
    *("gate", "experts", "shared_experts", "gate_up_proj", "down_proj"),
    "post_feedforward_layernorm",
    "norm",
    *("lm_head", "score"),
)


PLACES = {part: number for number, part in enumerate(FORWARD)}


def place(name: str) -> list[float]:
    """Sorts names of modules and of their parameters by the forward that computes with them."""
    return [int(p) if p.isdecimal() else _place(p) for p in name.split(".")]


def _place(part: str) -> float:
    """A norm that the list lacks is called after what it follows: post_mlp_layernorm."""
    before = part.removeprefix("post_").removesuffix("_layernorm")
    return PLACES.get(part, PLACES.get(before, len(FORWARD)) + 0.5 * (before != part))


def in_forward(names: Iterable[str]) -> list[str]:
    return sorted(names, key=place)


def in_backward(names: Iterable[str]) -> list[str]:
    return in_forward(names)[::-1]


class Outputs:
    """The outputs of the modules of a model that is spread over ranks. Every rank must make one.

    names: the modules of all ranks, in the order of the forward.
    """

    def __init__(self, parts: Parts, mesh: Mesh):
        self.own = dict(_recorded(parts.model))
        of_ranks = mesh.control.gather(list(self.own))
        self.names = in_forward(dict.fromkeys(chain.from_iterable(of_ranks)))
        self.parts, self.mesh, self.factor = parts, mesh, factors(ROW, mesh.device)
        self.recording = False
        self.drop()

    def drop(self) -> None:
        """Forgets what has been recorded."""
        self.sums = torch.zeros(len(self.names), dtype=torch.int64, device=self.mesh.device)
        self.seen: Counter[str] = Counter()

    def record(self, wanted: Callable[[], bool]) -> None:
        """Records forward passes with gradients from now on.   wanted: asked before each."""

        def begin(*_: Any) -> None:
            self.recording = torch.is_grad_enabled() and wanted()

        # A layer that is recomputed is called again, but not by the model.
        def end(*_: Any) -> None:
            self.recording = False

        for root in self.parts.roots:
            root.register_forward_pre_hook(begin)
            root.register_forward_hook(end)
        for name, module in self.own.items():
            module.register_forward_hook(partial(self._add, name))

    def _add(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not self.recording:
            return
        for t in output if isinstance(output, tuple) else (output,):
            # Results that are swapped, also between micro-batches, have another sum.
            self.seen[name] += 1
            own = checksum(t, self.factor) * (2 * self.seen[name] + 1)
            self.sums[self.names.index(name)] += own

    def part(self) -> torch.Tensor:
        """int64 [names]: this rank's part, as `Checksums.of` has it."""
        return self.sums * (2 * self.mesh.rank + 1)


def _recorded(model: Transformer) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are called from code outside of a graph."""
    decoder = model.model
    ends = [("embed_tokens", decoder.embed_tokens), ("norm", decoder.norm)]
    yield from ((f"model.{name}", module) for name, module in ends if module is not None)
    for number, block in decoder.layers.named_children():
        name = f"model.layers.{number}"
        if is_compiled(block.forward):
            yield name, block
        else:
            yield from ((f"{name}.{part}", module) for part, module in block.named_children())
