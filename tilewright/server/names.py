"""Names of models and of what they save: paths on the wire, and folders below the server's."""

from __future__ import annotations

import pathlib
import re

from tilewright.server.refused import Refused

# The parts of a model that may have adapters: attention, MLPs or experts, and the head.
PARTS = ("attn", "mlp", "unembed")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
SCHEMES = ("tinker", "xorl")  # of paths: both name the same
PATH = re.compile(
    rf"(?:{'|'.join(SCHEMES)})://({NAME.pattern})/(weights|sampler_weights)/({NAME.pattern})"
)


def checked(what: str, name: str) -> str:
    """A name that a client gives. Raises Refused for one that is not accepted."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise Refused(
            400,
            f"{what} is {name!r:.80}; accepted are up to 128 letters, digits, '_', '.', ':' and "
            "'-', of which the first is a letter or a digit",
        )
    return name


def below(model: str) -> str:
    """What the paths of a model begin with."""
    return f"tinker://{model}/"


def path_of(model: str, kind: str, name: str) -> str:
    """kind: weights or sampler_weights."""
    return f"{below(model)}{kind}/{name}"


def canonical(path: str) -> str:
    """A path as the log has it. Raises Refused for another string."""
    return path_of(*parsed(path))


def parsed(path: str) -> tuple[str, str, str]:
    """The model, the kind and the name of a path. Raises Refused for another string."""
    match = PATH.fullmatch(path) if isinstance(path, str) else None
    if match is None:
        raise Refused(400, f"path is {path!r:.80}; accepted is tinker://MODEL/weights/NAME")
    model, kind, name = match.groups()
    return model, kind, name


def folder_of(root: pathlib.Path, path: str) -> pathlib.Path:
    """Where what has a path is, below the server's folder.

    Raises Refused for a path that leads out of it, by a link.
    """
    model, kind, name = parsed(path)
    folder = root / "models" / model / kind / name
    if not folder.resolve().is_relative_to(root.resolve()):
        raise Refused(400, f"path is {path!r}: it leads out of the server's folder")
    return folder


def synced_as(model: str, number: int | str = "") -> str:
    """The name of weights of a model that engines get under its own name; without a number what
    all of them begin with.
    """
    return f"{model}@{number}"
