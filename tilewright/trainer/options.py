"""Options that a row of a table has for itself: the pydantic model that it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from tilewright.trainer.tables import Table


def given_options(options: type[BaseModel] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options by keyword, with the defaults of those that are not given."""
    return {} if options is None else options.model_validate(dict(given)).model_dump()


def with_options(table: Table[Any]) -> list[str]:
    """The rows that have some."""
    return [name for name, row in table.items() if row.options is not None]


def wrong_options(options: type[BaseModel] | None, given: Mapping[str, Any], of: str) -> str | None:
    """Why these are no options of a row, or None.   of: what the row is."""
    if options is None:
        return None  # other rules say so
    known = list(options.model_fields)
    if unknown := sorted(given.keys() - {*known}):
        return f"{unknown[0]} is no option of the {of}, which has {', '.join(known)}"
    try:
        options.model_validate(dict(given))
    except ValidationError as error:
        return reasons(error)
    return None


def wrong_options_of(table: Table[Any], name: str, given: Mapping[str, Any], of: str) -> str | None:
    """Why these are no options of the row with a name, or None.   of: what rows are."""
    known = with_options(table)
    if name not in known:
        return f"{name} is no {of} with options; accepted: {', '.join(known) or 'none'}"
    return wrong_options(table[name].options, given, f"{of} {name}")


def reasons(error: ValidationError) -> str:
    """What is wrong with a mapping, by its keys."""
    said = (e["msg"].removeprefix("Value error, ") for e in error.errors())
    keys = (map(str, e["loc"]) for e in error.errors())
    return "; ".join(": ".join([*at, text]) for at, text in zip(keys, said, strict=True))
