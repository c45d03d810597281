"""Counts what a DPO step launches on a GPU, without one: the trainer's and TRL's.

    TRITON_INTERPRET=1 python -m bench.predicted.step ASKED

Both take two steps on tensors without values (`memory_tracker`), and the second is counted: each
operator that is no view is a launch of the bytes that it reads and writes. The trainer's ops count
by each launch of Triton. Attention's products are left out: they are the same. The peak is that of
both steps, of tensors alone. TRL computes its head by PyTorch's operators. ASKED is as `main` says;
`python -m bench preference --count` asks.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from typing import Any
from unittest import mock

import torch

from bench.llama import Shape, of_transformers
from tilewright.core.library import LAUNCHERS
from tilewright.core.torch_names import pytree
from tilewright.kernels import launch
from tilewright.trainer import memory_plan
from tilewright.trainer.config import load
from tilewright.trainer.memory_tracker import Tracker
from tilewright.trainer.models.ops_choice import Ops

CPU, END = torch.device("cpu"), "aten::_fused_adamw_"  # which ends a step
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


@dataclasses.dataclass
class Counts:
    """flops: of matrix products.   by_name: launches."""

    launches: int = 0
    bytes: int = 0
    flops: int = 0
    by_name: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, name: str, tensors: list[torch.Tensor]) -> None:
        self.launches += 1
        self.by_name[name] += 1
        distinct = {id(t): t.numel() * t.element_size() for t in tensors}
        self.bytes += sum(distinct.values())


class Counting(Tracker):
    """Also counts. steps: the counts of each that has ended."""

    made: list[Counting] = []  # noqa: RUF012 (the plan makes its own)

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.now, self.steps = Counts(), []
        self.made.append(self)

    def _call(self, func, given, args, kwargs):
        name = func._schema.name
        if name == "aten::index":  # a mask of which only the host knows how many it selects
            args = (args[0], [at for i in args[1] for at in _positions(i)])
        result = super()._call(func, given, args, kwargs)
        made = [t for t in pytree.tree_leaves(result) if torch.is_tensor(t)]
        held = {t.untyped_storage()._cdata for t in given}
        views = all(t.untyped_storage()._cdata in held for t in made)
        if name not in LAUNCHERS and not (views and not func._schema.is_mutable):
            if "empty" not in name:
                self.now.add(name, [*given, *made])
            if name in PRODUCTS:
                operands: Any = args[1:3] if "add" in name else args[:2]
                left, right = operands
                self.now.flops += 2 * left.numel() * right.shape[-1]
        if name == END:
            self.steps.append(self.now)
            self.now = Counts()
        return result


def _positions(index: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return (
        index.nonzero().unbind(1) if index is not None and index.dtype == torch.bool else (index,)
    )


class _Launch:
    """Stands in for a kernel's launches, and counts them."""

    cacheable = pretended = True

    def __init__(self, kernel: Any, types: Any) -> None:
        self.name = f"triton::{kernel.fn.__name__}"

    def launch(self, grid: Any, arguments: tuple, constants: Any) -> bool:
        held = (getattr(a, "base", a) for a in arguments)
        Counting.made[-1].now.add(self.name, [t for t in held if torch.is_tensor(t)])
        return True


def _product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **_: Any) -> None:
    """A product of the head, which is one launch on a GPU and several on a CPU."""
    counts = Counting.made[-1].now
    counts.add("aten::mm", [out, a, b])
    counts.flops += 2 * a.numel() * b.shape[-1]


def trainer(path: str, half: bool) -> Counting:
    """Counts the trainer's step of a configuration.   half: whether products are in bfloat16."""
    config = load(path, [f"--train.enable_mixed_precision={half}"])
    names: Any = {f.name: "triton" for f in dataclasses.fields(Ops) if f.name != "numerics"}
    launch.clear_launch_cache()
    with (
        mock.patch.object(memory_plan, "Tracker", Counting),
        mock.patch.object(memory_plan, "choose_ops", lambda *_: Ops(**names)),
        mock.patch.object(launch, "_CachedLaunch", _Launch),
        # As for tensors of a GPU.
        mock.patch("tilewright.ops.loss.targets._may_read", lambda target: False),
        mock.patch("tilewright.ops.products.takes", lambda dtype: False),
        mock.patch("tilewright.ops.products.multiplies", lambda factor: True),
        mock.patch("tilewright.ops.products.gemm_", _product),
    ):
        memory_plan.Planner(config, 1, CPU).plan(0)
    return Counting.made[-1]


def trl(shape: Shape, recomputed: bool, half: bool) -> Counting:
    """The sigmoid loss of a pair of `shape.tokens` each, a quarter of them the prompt."""
    from trl.trainer.utils import add_fused_lm_head

    ids = torch.zeros(2, shape.tokens, dtype=torch.long)
    labels = ids.clone()
    labels[:, : shape.tokens // 4] = -100
    inputs = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}

    def logps(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            output = model(**inputs, use_cache=False, fused_lm_head=True)
        return output.log_probs.sum(1)

    tracker = Counting(CPU)
    with tracker.watching():
        policy, reference = of_transformers(shape), of_transformers(shape)
        for model in (policy, reference):
            add_fused_lm_head(model)
            model.train()
        if recomputed:
            policy.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
        for _ in range(2):
            u, d = logps(policy)
            with torch.no_grad():
                v, e = logps(reference)
            (-torch.nn.functional.logsigmoid(0.1 * ((u - v) - (d - e)))).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def count(provider: str, recomputed: str, half: bool, path: str, shape: Shape) -> dict[str, Any]:
    if provider == "trl":
        tracker = trl(shape, recomputed == "layers", half)
    else:
        tracker = trainer(path, half)
    counts, (peak, _) = tracker.steps[1], tracker.peak({})
    return {
        "provider": provider,
        "recomputed": recomputed,
        "products": "bfloat16" if half else "float32",
        "launches": counts.launches,
        "gbytes": counts.bytes / 1e9,
        "tflop": counts.flops / 1e12,
        "peak_mib": sum(peak.values()) / 2**20,
        "by_name": dict(counts.by_name.most_common()),
    }


def main(asked: str) -> None:
    """asked: JSON of `count`'s arguments, with the layers and tokens of a shape."""
    given = json.loads(asked)
    print(json.dumps(count(**given | {"shape": Shape(**given["shape"])})))


if __name__ == "__main__":
    main(*sys.argv[1:])
