"""The reference of a pydantic model's fields: help, a page, a JSON schema, one field explained."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tilewright.trainer.config.field_tree import kind, leaves
from tilewright.trainer.config.section import RowOf


def _default(field: Any) -> str:
    return "required" if field.default is PydanticUndefined else json.dumps(field.default)


def help_text(model: type[BaseModel], refused: dict[str, tuple[str, str]]) -> str:
    """refused: path -> (the accepted values, why)."""
    lines = []
    for path, field in leaves(model).items():
        note = " [only {}: {}]".format(*refused[path]) if path in refused else ""
        lines.append(
            f"--{path} ({kind(field.annotation)}; {_default(field)})\n    {field.description}{note}"
        )
    return "\n".join(lines)


def markdown(
    model: type[BaseModel],
    title: str,
    refused: dict[str, tuple[str, str]],
    differences: dict[str, tuple[str, str]],
) -> str:
    """The reference: a table per section, and the differences from the documentation that it
    follows.
    """

    def cell(text: str) -> str:
        return text.replace("|", "\\|")

    tables: dict[str, list[str]] = {}
    for path, field in leaves(model).items():
        section, _, name = path.rpartition(".")
        note = " **Only {}:** {}.".format(*refused[path]) if path in refused else ""
        tables.setdefault(section, []).append(
            f"| `{name}` | {cell(_type(field))} | `{_default(field)}` | "
            f"{cell(field.description + note)} | {resume_of(field).partition(':')[0]} |"
        )
    out = [title.strip()]
    for section, rows in tables.items():
        entries = (
            " (each entry of it, and of `data.test_datasets`)" if section == "data.datasets" else ""
        )
        if section == "data.test_datasets":
            continue  # the same fields
        out += [
            f"\n## {section}{entries}\n\n| field | type | default | meaning | resume |"
            "\n|---|---|---|---|---|",
            *rows,
        ]
    out.append(
        "\n## Differences from xorl's documentation\n\n| field | there | here, and why "
        "|\n|---|---|---|"
    )
    out += [
        f"| `{path}` | {cell(there)} | {cell(why)} |" for path, (there, why) in differences.items()
    ]
    return "\n".join(out) + "\n"


def schema(model: type[BaseModel]) -> str:
    """JSON schema, for editors. What fields need of each other is not in it."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(dialect | model.model_json_schema(), indent=1)


LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def limits(field: Any) -> str:
    """The range of a number, or the least length of a list; "" without one."""
    found = [
        f"{words} {getattr(limit, name)}"
        for limit in field.metadata
        for name, words in LIMITS.items()
        if hasattr(limit, name)
    ]
    found += [f"{m.min_length} or more long" for m in field.metadata if hasattr(m, "min_length")]
    return ", ".join(found)


def _type(field: Any) -> str:
    if rows := [m for m in field.metadata if isinstance(m, RowOf)]:
        return " | ".join(rows[0].table.names())
    return f"{kind(field.annotation)}{', ' * bool(limits(field))}{limits(field)}"


def resume_of(field: Any) -> str:
    """What a change of the field does where a run resumes."""
    return field.json_schema_extra["resume"]


def explain(
    model: type[BaseModel],
    path: str,
    needs: list[str],
    difference: tuple[str, str] | None = None,
) -> str:
    """Type, range, default and meaning of one field, what a change does where a run resumes, the
    requirements of its values, and its difference from xorl's documentation. Raises KeyError for an
    unknown path.
    """
    field = leaves(model)[path]
    lines = [
        path,
        f"  type:    {_type(field)}",
        f"  default: {_default(field)}",
        f"  meaning: {field.description}",
        f"  resume:  {resume_of(field)}",
        *(f"  rule:    {sentence}" for sentence in needs),
        *([f"  in xorl: {difference[0]}; here: {difference[1]}"] if difference else []),
    ]
    return "\n".join(lines)
