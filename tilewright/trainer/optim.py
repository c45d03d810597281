"""Optimizers, parameter groups, and the learning rate as a function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from tilewright.trainer.config import Train


def lr_at(step: int, total: int, train: Train) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total`.

    It rises linearly from lr_start, at step 0, to lr over the first lr_warmup_ratio of the steps;
    then it stays, or falls to lr_min, linearly or along half a cosine, until lr_decay_ratio of the
    steps, and stays there.
    """
    warm = round(train.lr_warmup_ratio * total)
    if step < warm:
        return train.lr_start + (train.lr - train.lr_start) * step / warm
    if train.lr_decay_style == "constant":
        return train.lr
    end = max(round(train.lr_decay_ratio * total), warm + 1)
    done = min(1.0, (step - warm) / max(1, end - warm - 1))
    share = 1 - done if train.lr_decay_style == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return train.lr_min + (train.lr - train.lr_min) * share


def parameter_groups(model: nn.Module, train: Train) -> list[dict]:
    """Two groups, with weight decay and without; every trainable parameter is in exactly one.

    no_decay_modules match the module's path, no_decay_params the parameter's own name, both as
    substrings. Raises ValueError for one that matches nothing.
    """
    decay, no_decay = [], []
    names = [n.rpartition(".") for n, _ in model.named_parameters()]
    for field, part in (("no_decay_modules", 0), ("no_decay_params", 2)):
        for text in getattr(train, field):
            if not any(text in name[part] for name in names):
                raise ValueError(f"train.{field}: {text!r} matches no name in the model")
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        module, _, own = name.rpartition(".")
        exempt = any(s in module for s in train.no_decay_modules) or any(
            s in own for s in train.no_decay_params
        )
        (no_decay if exempt else decay).append(p)
    return [
        {"params": decay, "weight_decay": train.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, train: Train) -> torch.optim.Optimizer:
    """AdamW (betas 0.9, 0.95, eps 1e-8; one fused kernel) or plain SGD; states are float32, as
    the parameters are.
    """
    groups = [g for g in parameter_groups(model, train) if g["params"]]
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=train.lr)
    return torch.optim.AdamW(groups, lr=train.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
