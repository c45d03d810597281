"""Labels of a loss, ignored rows, and the handling of a target out of range.

The losses read targets on the device, so that no loss synchronizes: a target that is neither in the
vocabulary nor ignore_index makes its row's loss and gradient NaN, and the divisor of "mean" does
not count it. On a CPU, and within `checked_targets`, it is an IndexError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch

from tilewright.core.library import define
from tilewright.core.torch_names import ProcessGroup

# Declarations (core.takes) that the losses share: an index, also of no class, is an int64.
TARGET, IGNORE_INDEX = "int64 [*T]", "int [-2**63, 2**63)"


class Labels(NamedTuple):
    """The targets of a loss and their weights, as the public functions take them."""

    target: torch.Tensor
    class_weight: torch.Tensor | None = None
    token_weight: torch.Tensor | None = None
    num_tokens: torch.Tensor | float | None = None
    group: ProcessGroup | None = None

    def for_kernels(self) -> Labels:
        """Contiguous; class weights in float32, token weights [T], num_tokens a constant."""
        target, class_weight, token_weight, num_tokens, group = self
        return Labels(
            target.contiguous(),
            None if class_weight is None else class_weight.to(torch.float32).contiguous(),
            None if token_weight is None else token_weight.reshape(-1).contiguous(),
            num_tokens.detach() if isinstance(num_tokens, torch.Tensor) else num_tokens,
            group,
        )


# ---- targets out of range

_CHECKED: ContextVar[bool] = ContextVar("checked_targets", default=False)


@contextlib.contextmanager
def checked_targets() -> Iterator[None]:
    """A context within which losses on CUDA tensors check their targets, as losses on CPU tensors
    always do.

    They raise an IndexError that names the first target out of range and its row. Without it, such
    a target makes its row's loss and gradient NaN.

    The check costs each loss one synchronization with the device; it is meant for tests and for the
    first step of a run. It is made when a loss runs, so compiled code makes it too. While a CUDA
    graph is captured no value can be read, and such a target gives NaN.

    Returns:
        A context manager.

    Example:
        >>> with tilewright.ops.checked_targets():
        ...     loss = tilewright.ops.cross_entropy(torch.zeros(2, 4), torch.tensor([1, 2]))
    """
    token = _CHECKED.set(True)
    try:
        yield
    finally:
        _CHECKED.reset(token)


def _may_read(target: torch.Tensor) -> bool:
    return not target.is_cuda or (_CHECKED.get() and not torch.cuda.is_current_stream_capturing())


def check(target: torch.Tensor, V: int, ignore_index: int) -> None:
    """Raises IndexError for the first target that is neither in [0, V) nor ignore_index, if the
    host may read it.
    """
    if not _may_read(target):
        return
    outside = ~within(target, V) & (target != ignore_index)
    if outside.any():
        first = outside.nonzero()[0].tolist()
        raise IndexError(
            f"target{first or ''} is {int(target[tuple(first)])}; accepted are 0 to {V - 1} and "
            f"ignore_index ({ignore_index})"
        )


def within(target: torch.Tensor, V: int) -> torch.Tensor:
    """Whether each target is one of V columns."""
    return (target >= 0) & (target < V)


def present(target: torch.Tensor, V: int, ignore_index: int) -> torch.Tensor:
    """`presence` without the check."""
    ignored = target == ignore_index
    return (~ignored).to(torch.float32).masked_fill_(~within(target, V) & ~ignored, float("nan"))


def _presence(target: torch.Tensor, V: int, ignore_index: int) -> torch.Tensor:
    check(target, V, ignore_index)
    return present(target, V, ignore_index)


def _like(target: torch.Tensor, V: int, ignore_index: int) -> torch.Tensor:
    return torch.empty_like(target, dtype=torch.float32, memory_format=torch.contiguous_format)


# An operator, so that torch.compile defers the check of values to run time, with a result that is
# used, so that it is not removed.
presence = define("target_presence", _presence, _like, plain=present)
"""presence(target int64 [...], V, ignore_index) -> float32 [...]: 1 for a row to learn from, 0
where target is ignore_index, NaN where it is neither that nor in [0, V) and `check` may not read
it."""


def divisor(
    valid: torch.Tensor, y_weight: torch.Tensor | None, num_tokens: torch.Tensor | float | None
) -> torch.Tensor | float:
    """The divisor of "mean": num_tokens, or the sum of the non-ignored targets'
    weights; 1 for 0.
    """
    if num_tokens is None:
        num_tokens = (valid == 1).to(valid.dtype)
        num_tokens = (num_tokens if y_weight is None else num_tokens * y_weight).sum()
    if isinstance(num_tokens, torch.Tensor):
        num_tokens = num_tokens.detach()
        return torch.where(num_tokens == 0, 1, num_tokens)
    return num_tokens or 1


def weight_of(target: torch.Tensor, class_weight: torch.Tensor | None) -> torch.Tensor | None:
    """[T], the class weight of each target; some class's weight for an invalid target."""
    return (
        None if class_weight is None else class_weight[target.clamp(0, class_weight.shape[0] - 1)]
    )
