"""The tree of a pydantic model's fields by dotted path, and hints for a path that is not in it."""

from __future__ import annotations

import difflib
import functools
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


class ConfigError(ValueError):
    """All errors of a configuration; `problems` holds one line each."""

    def __init__(self, lines: list[str]):
        super().__init__("\n".join(lines))
        self.problems = lines

    def __reduce__(self):  # it may come from another process
        return type(self), (self.problems,)


def submodel(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """(the model behind an annotation, whether it is a list of them)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    inner = typing.get_args(annotation)
    if (
        typing.get_origin(annotation) is list
        and isinstance(inner[0], type)
        and issubclass(inner[0], BaseModel)
    ):
        return inner[0], True
    return None, False


@functools.cache
def leaves(model: type[BaseModel], at: str = "") -> Mapping[str, Any]:
    """Dotted path -> FieldInfo of every field that is not a section, in order. List entries have no
    index.
    """
    out = {}
    for name, field in model.model_fields.items():
        inner, listed = submodel(field.annotation)
        if inner is None or listed:
            out[at + name] = field
        if inner is not None:
            out |= leaves(inner, f"{at}{name}.")
    return types.MappingProxyType(out)


def get(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = config[int(part)] if isinstance(config, list) else getattr(config, part)
    return config


def default_of(model: type[BaseModel], path: str) -> Any:
    return leaves(model)[path].default


def show(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value, default=str)
    return text if len(text) <= 200 else f"{text[:200]}..."


def kind(annotation: Any) -> str:
    """An annotation in a YAML reader's words."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return " | ".join(inner[1].table.names())
    if origin is typing.Literal:
        return " | ".join(map(show, inner))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(kind, inner))
    if origin is list:
        return "list" if submodel(annotation)[0] else f"list of {kind(inner[0])}"
    names = {
        str: "string",
        bool: "boolean",
        int: "integer",
        float: "number",
        dict: "mapping",
        list: "list",
        type(None): "null",
    }
    return names.get(origin or annotation, str(annotation))


def without_index(path: str) -> str:
    return ".".join(p for p in path.split(".") if not p.isdigit())


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


# Below it names agree by chance: learning_rate has half of log_format's letters, in their order.
ALIKE = 0.75


def unknown(model: type[BaseModel], path: str, elsewhere: Mapping[str, str]) -> str:
    """The hint for a key that does not exist: where it belongs, its name here, or similar keys
    anywhere in the tree. elsewhere: name in other libraries -> path here.
    """
    at, _, name = without_index(path).rpartition(".")
    known = leaves(model)
    sections = [*model.model_fields]
    if "." not in path:
        known = {**known, **dict.fromkeys(sections)}
    by_name: dict[str, list[str]] = {}
    for p in known:
        by_name.setdefault(p.rpartition(".")[2], []).append(p)
    if name in by_name:
        return f"unknown key; {name} belongs under {' or '.join(p.rpartition('.')[0] for p in by_name[name])}"
    likeness = {p: _likeness(name, p.rpartition(".")[2]) for p in known}
    # Among similar names, those of the named section.
    alike = {
        p: much + 0.1 * _likeness(at, p.rpartition(".")[0])
        for p, much in likeness.items()
        if much >= ALIKE
    }
    meant = [p for p in alike if alike[p] == max(alike.values())]
    if name in elsewhere and at not in {p.rpartition(".")[0] for p in meant} - {
        elsewhere[name].rpartition(".")[0]
    }:
        meant = [elsewhere[name]]
    return f"unknown key; did you mean {' or '.join(meant)}?" if meant else "unknown key"
