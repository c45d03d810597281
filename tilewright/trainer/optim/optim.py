"""Optimizers, parameter groups, and the schedule as a factor of each group's peak learning rate."""

from __future__ import annotations

import math
import re
from collections.abc import Collection

import torch
from torch import nn

from tilewright.trainer.config import Train
from tilewright.trainer.optim.matrices import matrices
from tilewright.trainer.optim.muon import Muon, Settings


def schedule(step: int, total: int, train: Train) -> float:
    """The factor of the peak learning rate in optimizer step `step` (from 0) of `total`.

    It rises linearly from lr_start / lr, at step 0, to 1 over the first lr_warmup_ratio of the
    steps; then it stays, or falls to lr_min / lr, linearly or along half a cosine, until
    lr_decay_ratio of the steps, and stays there.
    """
    warm = round(train.lr_warmup_ratio * total)
    if step < warm:
        start = train.lr_start / train.lr
        return start + (1 - start) * step / warm
    if train.lr_decay_style == "constant":
        return 1.0
    end = max(round(train.lr_decay_ratio * total), warm + 1)
    done = min(1.0, (step - warm) / max(1, end - warm - 1))
    share = 1 - done if train.lr_decay_style == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    least = train.lr_min / train.lr
    return least + (1 - least) * share


NUMBER = re.compile(r"\.\d+\.")  # of a layer, or of an expert


def parameter_groups(
    model: nn.Module, train: Train, matrices: Collection[nn.Parameter] = ()
) -> list[dict]:
    """Two groups, with weight decay and without, and two of matrices, whose learning rate is
    muon_lr; every trainable parameter is in exactly one.

    no_decay_modules are substrings of the path of a parameter's module, no_decay_params of its
    full name. Raises ValueError for one that no name contains.
    """
    # Of all stages of a pipeline: a name that is another's is no mistake here.
    names = [name for name, _ in getattr(model, "whole", model).named_parameters()]
    paths = [name.rpartition(".")[0] for name in names]
    for field, what in (("no_decay_modules", paths), ("no_decay_params", names)):
        for text in getattr(train, field):
            if not text:
                raise ValueError(f"train.{field}: '' is in every name; write a part of one")
            if not any(text in name for name in what):
                raise ValueError(
                    f"train.{field}: no name in the model contains {text!r}; names are "
                    f"{', '.join(dict.fromkeys(NUMBER.sub('.N.', name) for name in what))}"
                )
    groups = [
        {"params": [], "lr": lr, "weight_decay": weight_decay}
        for lr in (train.lr, train.muon_lr)
        for weight_decay in (train.weight_decay, 0.0)
    ]
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        path = name.rpartition(".")[0]
        exempt = any(text in path for text in train.no_decay_modules)
        exempt |= any(text in name for text in train.no_decay_params)
        groups[2 * (p in matrices) + exempt]["params"].append(p)
    return groups if matrices else groups[:2]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_optimizer(model: nn.Module, train: Train) -> torch.optim.Optimizer:
    """Each group starts at its peak learning rate."""
    chosen = matrices(model) if train.optimizer == "muon" else {}
    if train.optimizer == "muon" and not chosen:
        raise ValueError("train.optimizer = muon: the model has no trainable matrix")
    groups = [g for g in parameter_groups(model, train, set(chosen)) if g["params"]]
    betas = (train.adam_beta1, train.adam_beta2)
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups)
    if train.optimizer == "adamw":  # states in the parameters' dtype, float32; one fused kernel
        return torch.optim.AdamW(groups, betas=betas, eps=train.adam_epsilon, fused=True)
    settings = Settings(
        betas=betas,
        eps=train.adam_epsilon,
        states=DTYPES[train.optimizer_dtype],
        products=torch.bfloat16 if train.enable_mixed_precision else torch.float32,
        momentum=train.muon_momentum,
        nesterov=train.muon_nesterov,
        steps=train.muon_ns_steps,
        coefficients=train.muon_ns_coefficients,
        adjust=train.muon_adjust_lr_fn or "original",
    )
    return Muon(groups, settings, chosen)


def peaks(optimizer: torch.optim.Optimizer) -> list[float]:
    """The peak learning rates of a new optimizer's groups. Checkpoints hold current rates
    instead.
    """
    return [group["lr"] for group in optimizer.param_groups]


def set_lr(optimizer: torch.optim.Optimizer, peaks: list[float], factor: float) -> None:
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        group["lr"] = peak * factor
