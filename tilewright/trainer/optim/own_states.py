"""Optimizers whose states have dtypes of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


class WithOwnStates(torch.optim.Optimizer):
    """states: the dtype of each state that need not have its parameter's, by name."""

    states: Mapping[str, torch.dtype]

    def trained(self, closure: Any) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        """The parameters with a gradient, and their groups, for a step."""
        if closure is not None:
            raise ValueError("closure must be None: a step reads the gradients that are there")
        for group in self.param_groups:
            yield from ((p, group) for p in group["params"] if p.grad is not None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch casts states to the parameters' dtype; those of another one keep all digits."""
        super().load_state_dict(state_dict)
        saved = (i for group in state_dict["param_groups"] for i in group["params"])
        own = (p for group in self.param_groups for p in group["params"])
        for i, p in zip(saved, own, strict=True):
            given = state_dict["state"].get(i, {})
            for name in given.keys() & self.states.keys():
                self.state[p][name] = given[name].to(device=p.device, dtype=self.states[name])


def adamw_calls(
    counted: Iterable[tuple[nn.Parameter, dict[str, Any], torch.Tensor]],
) -> Iterator[tuple[dict[str, Any], list[nn.Parameter]]]:
    """The numbers of each call of `adamw_`, by keyword, and the parameters that have them.

    counted: parameters, their groups, and the numbers of their steps.
    """
    together: dict[tuple, list[nn.Parameter]] = {}
    names = "lr", "weight_decay", "betas", "eps"
    for p, group, step in counted:
        assert p.grad is not None
        key = int(step), *(group[name] for name in names), p.dtype, p.grad.dtype
        together.setdefault(key, []).append(p)
    for (step, *values), parameters in together.items():
        yield {"step": step, **dict(zip(names, values, strict=False))}, parameters
