"""The tree of a pydantic model's fields by dotted path."""

from __future__ import annotations

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


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, BaseModel) else str(value)


def show(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value, default=_plain)
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
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"  # that stands for a value
    return names.get(origin or annotation, str(annotation))


def without_index(path: str) -> str:
    return ".".join(p for p in path.split(".") if not p.isdigit())
