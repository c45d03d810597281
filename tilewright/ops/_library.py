"""How a pair of launchers becomes a `torch.library` operator that autograd and torch.compile understand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_LIBRARY = torch.library.Library("tilewright", "FRAGMENT")


def define(name: str, fn: Callable, fake: Callable, *, mutates: Sequence[str] = ()) -> Callable:
    """Registers `tilewright::name` for CPU and CUDA tensors and returns the operator.

    fn: the launcher; its annotations give the schema (see torch.library.infer_schema).
    fake: same signature, returns empty tensors of the right shapes, dtypes and strides.
    mutates: names of arguments that `fn` writes.

    The low-level Library is used, not torch.library.custom_op: same operator, about half the host time a call.
    """
    _LIBRARY.define(name + torch.library.infer_schema(fn, mutates_args=mutates),
                    tags=(torch.Tag.pt2_compliant_tag,))
    for backend in ("CPU", "CUDA"):
        _LIBRARY.impl(name, fn, backend)
    torch.library.register_fake(f"tilewright::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.tilewright, name).default


def adopt(name: str, fake: Callable) -> Callable:
    """The same for an operator that the C++ extension has defined: adds its fake and returns it."""
    torch.library.register_fake(f"tilewright::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.tilewright, name).default


def differentiate(op: Callable, backward: Callable, setup_context: Callable) -> None:
    """Gives an operator its autograd formula (torch.library.register_autograd)."""
    torch.library.register_autograd(op.name().split(".")[0], backward, setup_context=setup_context, lib=_LIBRARY)
