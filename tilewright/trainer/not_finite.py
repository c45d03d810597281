"""Finds the layer at which a step's activations stop being finite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tilewright.trainer.engine import Batch, Engine
from tilewright.trainer.losses.loss import Loss


def first_layer(engine: Engine, batches: Sequence[Batch], loss: Loss) -> str | None:
    """The path of the first module, in the order of computation, whose output is not finite in
    another forward pass over a step's micro-batches; None where all are. Every rank must call it.
    """
    passed: list[str] = []
    # Hooks are not in compiled code.
    with _watched(engine.model, passed), torch.compiler.set_stance("force_eager"):
        engine.forward(batches, loss, training=True)
    # A later stage of a pipeline gets what an earlier one computed.
    order = {path: i for i, (path, _) in enumerate(engine.parts.whole.named_modules())}
    paths = [path for own in engine.mesh.control.gather(passed[:1]) for path in own]
    return min(paths, key=lambda path: order[path], default=None)


@contextlib.contextmanager
def _watched(model: nn.Module, passed: list[str]) -> Iterator[None]:
    """Appends the paths of modules whose outputs are not finite, innermost first."""

    def watch(path: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            floats = [t for t in parts if torch.is_tensor(t) and t.is_floating_point()]
            if not passed and not all(bool(t.isfinite().all()) for t in floats):
                passed.append(path)

        return look

    hooks = [m.register_forward_hook(watch(path)) for path, m in model.named_modules() if path]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
