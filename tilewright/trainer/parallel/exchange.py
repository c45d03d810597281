"""What ranks tell each other beside tensors: JSON as bytes. Nothing is pickled, so that a message
is data to the rank that receives it and never code.

Every rank of a group, the sender too, gets what JSON makes of a value: lists for tuples, strings
for the keys of a dictionary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

ProcessGroup = dist.ProcessGroup | None
E = TypeVar("E", bound=BaseException)


def _bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(message: torch.Tensor) -> Any:
    return json.loads(message.numpy().tobytes())


def gather(value: Any, group: ProcessGroup = None) -> list[Any]:
    """Each rank's value, in order. Every rank of the group must call it."""
    own = _bytes(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([own.numel()]), group=group)
    lengths = torch.cat(sizes).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: own.numel()] = own
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return [_value(part[:n]) for part, n in zip(parts, lengths, strict=True)]


def broadcast(value: Any, group: ProcessGroup = None, source: int = 0) -> Any:
    """The value of the rank `source` of the group. Every rank of it must call it."""
    sends = dist.get_rank(group) == source
    message = _bytes(value if sends else None)
    size = torch.tensor([message.numel()])
    dist.broadcast(size, group=group, group_src=source)
    if not sends:
        message = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(message, group=group, group_src=source)
    return _value(message)


def send(value: Any, group: ProcessGroup, to: int) -> None:
    """Sends a value to the rank `to` of the group, which calls `receive`."""
    message = _bytes(value)
    dist.send(torch.tensor([message.numel()]), group=group, group_dst=to)
    dist.send(message, group=group, group_dst=to)


def receive(group: ProcessGroup, source: int) -> Any:
    """What the rank `source` of the group sends."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, group=group, group_src=source)
    message = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(message, group=group, group_src=source)
    return _value(message)


# ---- exceptions

# Those that arrive on other ranks as what they are. Any other one arrives as the first of its base
# classes that is among them.
KNOWN: dict[str, Callable[[str], BaseException]] = {
    kind.__name__: kind
    for kind in (
        KeyboardInterrupt,
        FileExistsError,
        FileNotFoundError,
        IsADirectoryError,
        NotADirectoryError,
        PermissionError,
        OSError,
        TypeError,
        ValueError,
        RuntimeError,
    )
}


def crosses_ranks(kind: type[E]) -> type[E]:
    """Marks an exception that is made of one message: it arrives on other ranks as what it is."""
    KNOWN[kind.__name__] = kind
    return kind


def described(problem: BaseException | None) -> list[str] | None:
    """An exception as JSON."""
    if problem is None:
        return None
    names = [kind.__name__ for kind in type(problem).__mro__ if kind.__name__ in KNOWN]
    if names:
        return [names[0], str(problem)]
    return ["RuntimeError", f"{type(problem).__name__}: {problem}"]


def raised(description: list[str]) -> BaseException:
    """The exception that another rank has described."""
    name, message = description
    return KNOWN[name](message)
