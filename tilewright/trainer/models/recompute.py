"""Activation checkpointing by wrapping: the backward pass recomputes a method's activations instead
of saving them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Wrapped:
    """A function that does more around another one, `forward`."""

    forward: Callable


class Recomputed(Wrapped):
    """A function whose activations are recomputed in the backward pass.

    keeps: whether it takes, at the time of the call, a keyword `kept`: a list that the first call
    fills and the recomputation reads.
    """

    def __init__(
        self,
        forward: Callable,
        reentrant: bool = False,
        keeps: Callable[[], bool] | None = None,
    ):
        self.forward, self.reentrant, self.keeps = forward, reentrant, keeps

    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args)
        call = (
            functools.partial(self.forward, kept=[])
            if self.keeps and self.keeps()
            else self.forward
        )
        return checkpoint(call, *args, use_reentrant=self.reentrant)


def recompute(
    module: nn.Module, name: str, *, reentrant: bool, keeps: Callable[[], bool] | None = None
) -> None:
    """Wraps a method of one module; wrapping it again replaces the first wrapper."""
    setattr(module, name, Recomputed(inner(getattr(module, name)), reentrant, keeps))


def inner(function: Callable) -> Callable:
    """The function within wrappers, or the function itself."""
    while isinstance(function, Wrapped):
        function = function.forward
    return function
