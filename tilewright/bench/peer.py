"""The class of peers, and helpers shared by their adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tilewright.core import platform
from tilewright.ops.activation.activation import Gate


class Unsupported(Exception):
    """The peer does not support this variant of the op; the message names the missing feature."""


@dataclass(frozen=True)
class Peer:
    """Another library that implements some of the ops.

    distribution: its name on the package index; results record its version.
    missing: device type -> None, or a sentence that says why it cannot run on that device type
        here.
    ops: op name -> a function with the arguments of the op's public function, which raises
        Unsupported for those that the peer does not support.
    consumes: names of the ops whose inputs it overwrites; those run on copies.
    elsewhere: other distributions of the same peer, used if `distribution` is not installed.
    of: the peer of which this is a way: a page compares with the fastest of a peer's ways; default:
        the only way of a peer of its own.
    draws: names of the ops whose random values are its own, which have nothing to be compared with
        but shape and dtype.
    """

    distribution: str
    missing: Callable[[str], str | None]
    ops: dict[str, Callable[..., Any]] = field(default_factory=dict)
    consumes: frozenset[str] = frozenset()
    elsewhere: tuple[str, ...] = ()
    of: str = ""
    draws: frozenset[str] = frozenset()

    def why_not(self, op_name: str, device: str) -> str | None:
        """None if the peer can run the op on this device type here, else the reason."""
        if op_name not in self.ops:
            return f"{self.distribution} has no such op, or none with this meaning"
        return self.missing(device)

    def installed(self) -> tuple[str, str] | None:
        """The installed distribution and its version."""
        for name in (self.distribution, *self.elsewhere):
            if version := version_of(name):
                return name, version
        return None


def version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def on_cuda(peer: str, module: str, capability: int) -> Callable[[str], str | None]:
    def missing(device):
        if reason := platform.no_module(module):
            return reason
        if device != "cuda":
            return f"{peer} takes CUDA tensors, not {device}"
        return platform.no_cuda(capability)

    return missing


def only(peer: str, options: dict[str, Any], **defaults) -> None:
    """Raises Unsupported if an option differs from the only value that the peer supports."""
    for name, value in options.items():
        tensor = isinstance(value, torch.Tensor)
        if tensor or name not in defaults or value != defaults[name]:
            raise Unsupported(f"{peer} does not take {name}" + ("" if tensor else f"={value!r}"))


PLAIN_LOSS = {
    "token_weight": None,
    "num_tokens": None,
    "return_lse": False,
    "return_entropy": False,
    "return_argmax": False,
    "group": None,
    "fp32_logits": False,
}


def dense(peer: str, weight: Any, more: dict[str, Any]) -> None:
    if not isinstance(weight, torch.Tensor):
        raise Unsupported(f"{peer} does not take quantized experts")
    only(peer, more, noise=None, gate_up_bias=None, down_bias=None, gate=Gate())
