"""Optimizers by name, and the groups of parameters that they get."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from tilewright.nn.weights import is_adapter
from tilewright.trainer.optim.fields import Optim
from tilewright.trainer.optim.per_step import at_step
from tilewright.trainer.optim.places import pieces
from tilewright.trainer.optim.row import OPTIMIZERS, Half
from tilewright.trainer.options import given_options

ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")


def betas_and_eps(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields ADAM, if they are there, under the names of PyTorch's arguments."""
    rest = {name: value for name, value in values.items() if name not in ADAM}
    if rest.keys() == values.keys():
        return rest
    beta1, beta2, eps = (values[name] for name in ADAM)
    return {"betas": (beta1, beta2), "eps": eps, **rest}


class Kind(NamedTuple):
    """What a group of parameters is.

    rate: the field of its peak learning rate, which `factor` multiplies.   exempt: from weight
    decay.
    """

    rate: str = "lr"
    factor: float = 1.0
    exempt: bool = False


NUMBER = re.compile(r"\.\d+\.")  # of a layer, or of an expert
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def rate_factors(model: nn.Module, bound: float, plus: float) -> Callable[[str], float]:
    """What the peak learning rate of a parameter is multiplied by, from its name.

    model: with the names of all layers, of which there are L.
    bound: the embedding's factor, at depth 0. At depth d it is bound + (1 - bound) d / (L + 2): the
        layers are at 1 to L, the final norm and the head at L + 2. A head that is tied to the
        embedding is at 0.
    plus: LoRA+ (arXiv:2402.12354): the further factor of adapters' matrices B.
    """
    layers = [int(at[1]) for name, _ in model.named_parameters() if (at := LAYER.search(name))]
    deepest = max(layers, default=-1) + 3

    def factor(name: str) -> float:
        at = LAYER.search(name)
        depth = int(at[1]) + 1 if at else 0 if "embed_tokens" in name else deepest
        is_b = is_adapter(name) and name.endswith("_B")
        return (bound + (1 - bound) * depth / deepest) * (plus if is_b else 1.0)

    return factor


def parameter_groups(
    model: nn.Module,
    rates: Mapping[str, float],
    weight_decay: float,
    no_decay: Mapping[str, Collection[str]],
    apart: Collection[nn.Parameter] = (),
    whole: nn.Module | None = None,
    factor: Callable[[str], float] = lambda name: 1.0,
) -> list[dict[str, Any]]:
    """Two groups for each rate, with weight decay and without, and two more for each other factor.
    Every trainable parameter is in one: those of `apart` at the second rate, all others at the
    first. Each has its `kind`.

    rates: by the name of the field.
    no_decay: no_decay_modules, substrings of the path of a parameter's module, and no_decay_params,
        of its full name.
    whole: the model with the names of all ranks' parameters: a name that is another's is no mistake
        here.
    factor: see `rate_factors`.

    Raises ValueError for a substring that no name contains.
    """
    names = [name for name, _ in (whole or model).named_parameters()]
    paths = [name.rpartition(".")[0] for name in names]
    for field, what in (("no_decay_modules", paths), ("no_decay_params", names)):
        for text in no_decay[field]:
            if not text:
                raise ValueError(f"train.{field}: '' is in every name; write a part of one")
            if not any(text in name for name in what):
                raise ValueError(
                    f"train.{field}: no name in the model contains {text!r}; names are "
                    f"{', '.join(dict.fromkeys(NUMBER.sub('.N.', name) for name in what))}"
                )
    groups: dict[Kind, dict[str, Any]] = {}

    def group_of(kind: Kind) -> dict[str, Any]:
        decay = 0.0 if kind.exempt else weight_decay
        made = {"params": [], "lr": rates[kind.rate] * kind.factor, "weight_decay": decay}
        return groups.setdefault(kind, {**made, "kind": kind})

    of_all, of_apart = ([*rates] * 2)[:2]
    for rate in rates:
        for exempt in (False, True):
            group_of(Kind(rate, 1.0, exempt))
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        path = name.rpartition(".")[0]
        exempt = any(text in path for text in no_decay["no_decay_modules"])
        exempt |= any(text in name for text in no_decay["no_decay_params"])
        rate = of_apart if p in apart else of_all
        group_of(Kind(rate, factor(name), exempt))["params"].append(p)
    return [*groups.values()]


def build_optimizer(
    model: nn.Module,
    optim: Optim,
    whole: nn.Module | None = None,
    plus: float = 1.0,
    half: Half | None = None,
) -> torch.optim.Optimizer:
    """Each group starts at its peak learning rate.

    whole: see `parameter_groups`.   plus: see `rate_factors`.   half: of parameters in bfloat16.
    """
    row = OPTIMIZERS[optim.optimizer]
    apart = row.apart(model)
    if row.apart_lr is not None and not apart:
        raise ValueError(f"train.optimizer = {optim.optimizer}: the model has no trainable matrix")
    rates = {"lr": optim.lr}
    if row.apart_lr is not None:
        rates[row.apart_lr] = getattr(optim, row.apart_lr)
    no_decay = {
        "no_decay_modules": optim.no_decay_modules,
        "no_decay_params": optim.no_decay_params,
    }
    decay = at_step(optim.weight_decay, 0)  # `set_values` sets that of each step
    factor = rate_factors(whole or model, optim.layerwise_lr_bound, plus)
    groups = parameter_groups(model, rates, decay, no_decay, set(apart), whole, factor)
    values: dict[str, Any] = {name: at_step(getattr(optim, name), 0) for name in row.fields}
    values |= given_options(row.options, optim.optimizer_args)
    if row.merged is not None:
        values["merged"] = row.merged(model)
    filled = [g for g in groups if g["params"]]
    if half is not None:
        assert row.of_half is not None  # a rule of the configuration
        return row.of_half(filled, half, pieces(model), **values)
    return row.build(filled, apart, **values)


def peaks(optimizer: torch.optim.Optimizer) -> list[float]:
    """The peak learning rates of a new optimizer's groups. Checkpoints hold current rates
    instead.
    """
    return [group["lr"] for group in optimizer.param_groups]


def kinds(optimizer: torch.optim.Optimizer) -> list[Kind]:
    """The kind of each group of a new optimizer. A group that `parameter_groups` has not made, and
    that decays nothing, is exempt.
    """
    return [
        group.get("kind") or Kind(exempt=not group.get("weight_decay"))
        for group in optimizer.param_groups
    ]


# Where a group has the value of a field: its key, and the place in a tuple there.
IN_GROUPS = {
    "weight_decay": ("weight_decay", None),
    "adam_beta1": ("betas", 0),
    "adam_beta2": ("betas", 1),
    "adam_epsilon": ("eps", None),
    "muon_momentum": ("momentum", None),
}


def set_values(
    optimizer: torch.optim.Optimizer,
    kinds: list[Kind],
    peaks: list[float],
    values: Mapping[str, float],
) -> None:
    """Sets the values of fields that change from step to step: in the groups, and of learning rates
    in their peaks.

    Raises ValueError, and sets nothing, for a field that the groups have no place for.
    """
    of_rates = {kind.rate for kind in kinds}
    for name in values:
        key, _ = IN_GROUPS.get(name, (name, None))
        if name not in of_rates and any(key not in group for group in optimizer.param_groups):
            raise ValueError(
                f"train.{name}: the optimizer's groups have no {key}, so it cannot change from "
                "step to step"
            )
    for name, value in values.items():
        for i, (group, kind) in enumerate(zip(optimizer.param_groups, kinds, strict=True)):
            if name in of_rates:
                peaks[i] = value * kind.factor if kind.rate == name else peaks[i]
                continue
            key, at = IN_GROUPS[name]
            if at is not None:
                group[key] = tuple(value if i == at else v for i, v in enumerate(group[key]))
            elif key != "weight_decay" or not kind.exempt:
                group[key] = value


def set_lr(optimizer: torch.optim.Optimizer, peaks: list[float], factor: float) -> None:
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        group["lr"] = peak * factor
