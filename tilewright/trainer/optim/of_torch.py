"""PyTorch's optimizers by name, with the options of their signatures."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from torch import nn

from tilewright.core.torch_names import on_shards
from tilewright.nn.sharded import shard
from tilewright.trainer.optim.matrices import Parts, merged
from tilewright.trainer.optim.optim import ADAM, betas_and_eps
from tilewright.trainer.optim.row import OPTIMIZERS, Optimizer

# The groups have these, or the trainer decides them.
OWNED = {"params", "lr", "weight_decay", "betas", "maximize"}
OWNED |= {"foreach", "fused", "capturable", "differentiable"}


def options_of(
    kind: type[torch.optim.Optimizer], *owned: str, needs: Mapping[str, str] = MappingProxyType({})
) -> type[BaseModel] | None:
    """A model of the arguments of an optimizer that are not OWNED, nor in `owned`; None if there
    are none. Values that the class refuses are refused with its sentence.

    needs: options that do nothing without another one, by name.
    """
    fields: dict[str, Any] = {
        name: (p.annotation, p.default)
        for name, p in inspect.signature(kind, eval_str=True).parameters.items()
        if name not in OWNED.union(owned)
    }

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", allow_inf_nan=False, validate_default=True)

        @field_validator("*", mode="before")
        @classmethod
        def _no_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
            if isinstance(value, bool) and fields[info.field_name or ""][0] is not bool:
                raise ValueError("a boolean does not fit here")
            return value

        @model_validator(mode="after")
        def _accepted(self) -> Any:
            values = self.model_dump()
            for name, other in needs.items():
                if values[name] and not values[other]:
                    raise ValueError(f"{name} does nothing without {other}")
            kind([torch.zeros(1)], **values)
            return self

    return create_model(f"{kind.__name__}Options", __base__=Options, **fields) if fields else None


def row(
    kind: type[torch.optim.Optimizer],
    fields: tuple[str, ...] = (),
    *,
    ignores: Mapping[str, str] | None = None,
    needs: Mapping[str, str] = MappingProxyType({}),
) -> Optimizer:
    """fields: ADAM, or none.   needs: as in `options_of`."""

    def build(groups: list[dict[str, Any]], apart: Any, **values: Any) -> torch.optim.Optimizer:
        return kind(groups, **betas_and_eps(values))

    options = options_of(kind, *(["eps"] if fields else []), needs=needs)
    return Optimizer(build, fields, options, ignores=ignores or {})


class Adafactor(torch.optim.Adafactor):
    """Adafactor by the model's own tensors: what a parameter merges or stacks has factors, a
    clipping and a rate of its own.
    """

    def __init__(
        self, groups: Any, *, merged: Mapping[nn.Parameter, Parts] | None = None, **options: Any
    ):
        super().__init__(groups, **options)
        self.merged = dict(merged or {})

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        for p in group["params"]:
            if p.grad is not None and p in self.merged and not self.state[p]:
                self.state[p] |= self._states(p, self.merged[p])
        has_complex = super()._init_group(group, *lists)
        each = [self._own(p, values) for p, *values in zip(*lists, strict=True)]
        for i, given in enumerate(lists):
            given[:] = [value for own in each for value in own[i]]
        return has_complex

    @staticmethod
    def _states(p: nn.Parameter, parts: Parts) -> dict[str, torch.Tensor]:
        """As PyTorch's of each tensor, together."""
        step = {"step": torch.zeros(())}  # as PyTorch's, on the CPU
        if p.dim() == 1 + parts.stacked:
            return {**step, "variance": torch.zeros_like(p)}
        rows, columns = p[..., :1], p[..., : max(1, len(parts.rows)), :]
        return {**step, "row_var": torch.zeros_like(rows), "col_var": torch.zeros_like(columns)}

    def _own(self, p: nn.Parameter, values: list[Any]) -> list[list[Any]]:
        """A parameter and what a step reads of it, of each tensor; views."""
        if p not in self.merged:
            return [[value] for value in (p, *values)]
        parts = self.merged[p]
        grad, rows, columns, variance, step = values
        own = parts.own(p)
        none = [None] * len(own)
        return [
            own,
            parts.own(grad),
            none if rows is None else parts.own(rows),
            none if columns is None else list(columns.flatten(0, -2).split(1)),
            none if variance is None else parts.own(variance),
            [step, *(step.clone() for _ in own[1:])],  # which a step raises, each
        ]


def adafactor(
    groups: list[dict[str, Any]], apart: Any, *, merged: Mapping[nn.Parameter, Parts], **values: Any
) -> torch.optim.Optimizer:
    return Adafactor(groups, merged=merged, **values)


FACTORED = (
    "it keeps sums of the squares of whole rows and columns, which no process has of a shard; "
    "ddp and none leave parameters whole"
)
FIRST = "rprop reads the learning rate of its first step alone"
PLAIN = on_shards(torch.optim.SGD, shard)
Rprop = on_shards(torch.optim.Rprop, shard)  # PyTorch's cannot be computed on DTensors
OPTIMIZERS.add("sgd", row(PLAIN, needs={"dampening": "momentum"}))
OPTIMIZERS.add("adam", row(torch.optim.Adam, ADAM))
OPTIMIZERS.add("adamax", row(torch.optim.Adamax, ADAM))
OPTIMIZERS.add("nadam", row(torch.optim.NAdam, ADAM))
OPTIMIZERS.add("radam", row(torch.optim.RAdam, ADAM))
OPTIMIZERS.add("adagrad", row(torch.optim.Adagrad))
OPTIMIZERS.add("adadelta", row(torch.optim.Adadelta))
OPTIMIZERS.add("rmsprop", row(torch.optim.RMSprop))
# Version 1 had one matrix of a merged parameter.
OPTIMIZERS.add(
    "adafactor",
    Optimizer(
        adafactor,
        options=options_of(torch.optim.Adafactor),
        merged=merged,
        version=2,
        needs_whole=FACTORED,
    ),
)
RATES = dict.fromkeys(("lr_decay_style", "lr_warmup_ratio", "lr_warmup_steps"), FIRST)
OPTIMIZERS.add("rprop", row(Rprop, ignores={"weight_decay": "rprop has no weight decay", **RATES}))
