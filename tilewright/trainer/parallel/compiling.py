"""torch.compile of layers: whole, or the parts around code that cannot be in a graph."""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch

from tilewright.core import torch_names
from tilewright.trainer.models.fields import Dropouts, Model
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.moe import MoE
from tilewright.trainer.models.positions import Sequence
from tilewright.trainer.models.recompute import inner
from tilewright.trainer.parallel.fields import Compute
from tilewright.trainer.parallel.low_precision import products_of
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.parallel.row import LAYOUTS, Layout

SEEDS = r".*\.seed$"  # of stochastic rounding (`Products.seed`)
log = logging.getLogger("tilewright")


def compile_layers(
    model: Transformer, train: Compute, dropout: Dropouts, basic_modules: list[str]
) -> None:
    """Compiles whole layers, each as one graph, or, where attention, experts or dropout, whose
    masks differ by step, cannot be in a graph, the code around them.

    Call it before `recompute_activations`: a graph break within a checkpointed function would leave
    all of it uncompiled.

    Raises ValueError for a module that FSDP2 would gather within a graph.
    """
    names = {
        name
        for path, module in next(iter(model.model.layers)).named_modules()
        if path
        for name in (path.rpartition(".")[2], type(module).__name__)
    }
    if inside := names & {*basic_modules}:
        raise ValueError(
            f"model.basic_modules, train.enable_compile = True: {', '.join(sorted(inside))} would "
            f"be gathered in the midst of a layer's compiled code; leave one of them out"
        )
    recomputes = train.enable_gradient_checkpointing
    experts_alone = recomputes and train.moe_checkpoint_method == "moe_act"
    in_parts = dropout.drops or (recomputes and train.recompute_modules is not None)
    compiled: dict[tuple[type, str], Compiled] = {}
    seeded = any(own.recipe == "nvfp4" for own in products_of(model).values())
    for block in model.model.blocks:
        attention, mlp = block.self_attn, block.mlp
        # Tokens sent to other ranks wait for them, and experts that are recomputed alone have their
        # own checkpoint. With ranks that share experts, or matrices, FSDP2
        # gathers them by themselves.
        own_unit = train.expert_parallel_size > 1 or train.tensor_parallel_size > 1
        apart = isinstance(mlp, MoE) and (own_unit or experts_alone)
        if attention.breaks or apart or in_parts:
            norms = (m for name, m in block.named_children() if name.endswith("layernorm"))
            of_mlp = ("gated", "output") if dropout.ffn_dropout else ("forward",)
            parts = [
                *((module, "forward") for module in norms),
                (attention, "project"),
                (attention, "output"),
                *([] if apart else [(mlp, name) for name in of_mlp]),
            ]
        else:
            parts = [(block, "forward")]
        for module, name in parts:
            kind = (type(mlp if module is block else module), name)
            if kind not in compiled:
                compiled[kind] = Compiled(getattr(type(module), name), SEEDS * seeded)
            setattr(module, name, functools.partial(compiled[kind], module))


class Compiled:
    """A method that is compiled once for all modules of a kind.

    Dynamo caches compiled code per code object, up to a limit for all that share it: this method
    gets its own copy of the code.

    changing: a regular expression of sources of ints that differ between modules and steps;
        compiled code specializes on every other one of a module.
    """

    def __init__(self, method: Callable, changing: str = ""):
        self.changes: Callable = contextlib.nullcontext
        if changing:
            sources = ",".join(filter(None, (torch.compiler.config.dynamic_sources, changing)))
            patch = cast(Any, torch.compiler.config).patch
            self.changes = functools.partial(patch, dynamic_sources=sources)
        self.name, code = method.__qualname__, method.__code__.replace()
        self.plain = types.FunctionType(
            code, method.__globals__, method.__name__, method.__defaults__, method.__closure__
        )
        self.run = torch.compile(self.plain, fullgraph=True)

    def __call__(self, *args: Any) -> Any:
        dynamo = torch_names.dynamo()
        # Batches have different lengths: a static size would recompile at once.
        for t in _tensors(args):  # x [B, S, H], cos [S, D], attended [B, heads, S, D]; ids [B, S]
            dynamo.maybe_mark_dynamic(t, t.dim() - (2 if t.is_floating_point() else 1))
        try:
            with self.changes():
                return self.run(*args)
        except dynamo.exc.FailOnRecompileLimitHit as error:
            log.warning(
                "train.enable_compile: %s has been compiled %d times and runs uncompiled from "
                "here on; TORCH_LOGS=recompiles says why",
                self.name,
                dynamo.config.recompile_limit,
            )
            log.debug("", exc_info=error)
            self.run = self.plain
        except dynamo.exc.Unsupported as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"train.enable_compile = True: {self.name} cannot be compiled: {reason}"
            ) from error
        return self.run(*args)


def _tensors(args: tuple[Any, ...]) -> list[torch.Tensor]:
    flat = [t for a in args for t in (a.tensors() if isinstance(a, Sequence) else [a])]
    return [t for t in flat if torch.is_tensor(t)]


def is_compiled(method: Callable) -> bool:
    method = inner(method)
    return isinstance(method, functools.partial) and isinstance(method.func, Compiled)


def compiled_parts(model: Transformer) -> dict[str, int]:
    """The compiled methods, and the number of their modules."""
    methods = (v for m in model.model.layers.modules() for v in vars(m).values())
    return dict(Counter(inner(v).func.name for v in methods if is_compiled(v)))


def _apply(parts: Parts, mesh: Mesh, train: Compute, dropout: Dropouts, names: Model) -> None:
    compile_layers(parts.model, train, dropout, names.basic_modules)


LAYOUTS.add(
    "compile",
    Layout(
        40,
        lambda mesh, train, *_: train.enable_compile,
        _apply,
        (Compute, Dropouts, Model),
    ),
)
