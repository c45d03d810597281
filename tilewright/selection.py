"""Choices by the names of ops: what a name stands for, what `auto` is pinned to, and
implementations that other packages add.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from tilewright.core.installed import installed
from tilewright.core.registry import PINS, WATCHERS, Implementation, Op, instead_of


def operations() -> dict[str, Op]:
    """All ops by name."""
    from tilewright.ops import OPS  # here: `import tilewright` is to stay quick

    return OPS


def resolve(
    op: str,
    implementation: str = "auto",
    device_type: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Callable:
    """`Op.resolve` by the op's name.

    Args:
        op: The op's name.
        implementation: A name that `tilewright explain` lists, or "auto".
        device_type: Where it will be called; None: "cuda" if there is a device, else "cpu".
        dtype: That of the op's first tensor.

    Returns:
        The implementation's function, which takes the arguments of the op's public function.

    Raises:
        ValueError: The op or the implementation does not exist.
        ImplementationUnavailable: The implementation cannot run there.

    Example:
        >>> import torch, tilewright
        >>> rmsnorm = tilewright.resolve("rmsnorm", "eager", "cpu")
        >>> rmsnorm(torch.ones(2, 8), torch.ones(8)).shape
        torch.Size([2, 8])
    """
    return known(op).resolve(implementation, device_type, dtype)


def register_implementation(
    op: str, implementation: Implementation, *, before: str | None = None
) -> None:
    """Adds an implementation to an op, for this process.

    It is then listed by `tilewright explain`, resolved by its name, held to the numerics contract
    by `tilewright check`, and benchmarked. `auto` may choose it on the device types in its
    `devices`. Compiled code that calls the op is compiled again.

    Args:
        op: The op's name.
        implementation: Its `load` returns the callable, which takes what the op's public function
            passes on.
        before: The name of an implementation that it precedes in the order of `auto`. By default it
            comes after those of this library and before the eager twin.

    Returns:
        None. A later call with this name is refused.

    Raises:
        ValueError: The op does not exist, `before` does not, or the name is taken.
        TypeError: `implementation` is no Implementation.

    Example:
        >>> import tilewright
        >>> def load():
        ...     from acme import kernels
        ...
        ...     return kernels.hadamard  # takes (x, size, seed, inverse)
        >>> acme = tilewright.Implementation("acme", load)
        >>> tilewright.register_implementation("hadamrd", acme)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: unknown op 'hadamrd'; did you mean 'hadamard'? have [...]
    """
    known(op).add(implementation, before=before)


def known(op: str) -> Op:
    """The op of that name. Raises ValueError if there is none."""
    ops = operations()
    if op not in ops:
        raise ValueError(f"unknown op {op!r}{instead_of(op, ops)}")
    return ops[op]


def misplaced() -> list[str]:
    """A sentence for each installed entry point that names no op."""
    ops = operations()
    return [
        f"{entry}: unknown op {op!r}{instead_of(op, ops)}"
        for op, entries in installed().items()
        if op not in ops
        for entry in entries
    ]


@contextlib.contextmanager
def use(implementation: str | None = None, /, **by_op: str) -> Iterator[None]:
    """Pins what `auto` stands for inside the block.

    An explicit `implementation=` still wins. The pin holds for the whole process, not for one
    thread, because autograd recomputes checkpointed blocks in threads of its own; so put a whole
    training step inside the block.

    Args:
        implementation: For every op that has an implementation of this name; "auto" undoes an outer
            pin.
        **by_op: For single ops, by their names.

    Returns:
        A context manager. Leaving it takes its pins back, in whatever order blocks that overlap
        are left.

    Raises:
        ValueError: An op or an implementation does not exist.

    Example:
        >>> import torch, tilewright
        >>> from tilewright.ops import rmsnorm
        >>> with tilewright.use("eager", rope="auto"):
        ...     y = rmsnorm(torch.ones(2, 8), torch.ones(8))
    """
    ops = operations()
    pins = {n: implementation for n, op in ops.items() if implementation in ("auto", *op.names())}
    if implementation is not None and not pins:
        names = dict.fromkeys(("auto", *(name for op in ops.values() for name in op.names())))
        raise ValueError(
            f"no op has an implementation {implementation!r}{instead_of(implementation, names)}"
        )
    for name, choice in by_op.items():
        op = known(name)
        if choice != "auto":
            op.implementation(choice)
        pins[name] = choice
    _change_blocks(_BLOCKS.append, pins)
    try:
        yield
    finally:
        _change_blocks(_leave, pins)


# The pins of the blocks of `use` that are open, in the order in which they were entered. They may
# be left in another: in two threads, two tasks, a generator that is not exhausted.
_BLOCKS: list[dict[str, str]] = []
_PINNING = threading.Lock()


def _change_blocks(change: Callable[[dict[str, str]], None], pins: dict[str, str]) -> None:
    """Changes the open blocks, and PINS with them: of two that pin an op, the later one holds."""
    with _PINNING:
        change(pins)
        merged = {op: name for block in _BLOCKS for op, name in block.items()}
        PINS.update(merged)
        for op in PINS.keys() - merged.keys():
            del PINS[op]


def _leave(pins: dict[str, str]) -> None:
    at = next(i for i, block in enumerate(_BLOCKS) if block is pins)
    del _BLOCKS[at]


class _Forgetful(dict):
    """A cache that stays empty, so that every look-up resolves."""

    def __setitem__(self, key, value):
        return


@contextlib.contextmanager
def watching(seen: Callable[[str, str], None]) -> Iterator[None]:
    """Calls seen(op's name, implementation's name) whenever an op is called within the block, also
    as a part of another. Calls in compiled code are not seen.
    """
    # Blocks may overlap without nesting, as those of `use`.
    with _PINNING:
        WATCHERS.append(seen)
        for op in operations().values():
            op.forget_choices(_Forgetful)
    try:
        yield
    finally:
        with _PINNING:
            del WATCHERS[next(i for i, other in enumerate(WATCHERS) if other is seen)]
            if not WATCHERS:
                for op in operations().values():
                    op.forget_choices(dict)
