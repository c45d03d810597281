"""What other products call the fields of a configuration: `dialects/PRODUCT.toml`, by their names.

Here, too: what stands for each row of their configurations, and the conversions of their values.
"""

from __future__ import annotations

import enum
import functools
import json
import pathlib
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, field_validator

from tilewright.trainer.field_tree import leaves, show, without_index
from tilewright.trainer.section import RowOf, properties

FOLDER = pathlib.Path(__file__).with_suffix("")
FOLLOWED = "xorl"  # whose names the fields have


class State(enum.StrEnum):
    """What is done with a row of another configuration."""

    FIELD = "a field"
    SETTINGS = "other fields"
    SENTENCE = "otherwise"
    REFUSED = "refused"
    MISSING = "not yet"


# ---- conversions: a value there -> the value here; ValueError for one that has none


def opposite(value: Any) -> bool:
    return not _flag(value)


def mode(greater_is_better: Any) -> str:
    return "max" if _flag(greater_is_better) else "min"


def auto_or_no(value: Any) -> str:
    return "auto" if _flag(value) else "no"


def bucket(add_tail: Any) -> str:
    return "bucket" if _flag(add_tail) else "renormalize"


def none_below_zero(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError
    return None if value < 0 else value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    f.__name__: f for f in (opposite, mode, auto_or_no, bucket, none_below_zero)
}


# ---- the files


class Entry(BaseModel):
    """What stands for a name of a product, or for the name with a value, `name: value`.

    ours: the field that takes it.   convert: the conversion of its values; None: they stay.
    settings: fields that say the same, with an example's values; "null" is null.
    sentence: what is done; with a `state` why there is nothing, or what is missing.
    there: the default or the meaning in the product whose names the fields have, "none" if it has
        no such field; `sentence` says why it is another here.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ours: str | None = None
    convert: str | None = None
    settings: dict[str, Any] = {}
    sentence: str = ""
    state: State = State.SENTENCE
    there: str | None = None

    @field_validator("settings")
    @classmethod
    def _null(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """TOML has none."""
        return {path: None if value == "null" else value for path, value in settings.items()}

    def row(self, name: str) -> Row | None:
        """Where no field takes it as it is."""
        if self.settings:
            return Row(name, State.SETTINGS, self.settings)
        return Row(name, self.state, self.sentence) if self.sentence else None


class Row(NamedTuple):
    """name: with the value that is meant, if only one is.   here: fields, settings or a sentence.

    `here` is a list of paths, settings by path, or a sentence.
    """

    name: str
    state: State
    here: list[str] | dict[str, Any] | str


@functools.cache
def dialects() -> Mapping[str, Mapping[str, Entry]]:
    """The entries, by product and name."""
    files = sorted(FOLDER.glob("*.toml"), key=lambda file: file.name.lower())
    read = {file.stem: tomllib.loads(file.read_text("utf-8")) for file in files}
    return {
        product: {name: Entry.model_validate(entry) for name, entry in entries.items()}
        for product, entries in read.items()
    }


@functools.cache
def _names() -> Mapping[str, Mapping[str, list[str]]]:
    names: dict[str, dict[str, list[str]]] = {}
    for product, entries in dialects().items():
        for name, entry in entries.items():
            if entry.ours is not None:
                names.setdefault(entry.ours, {}).setdefault(product, []).append(name)
    return names


def names_of(path: str) -> Mapping[str, list[str]]:
    """What a field is called elsewhere, by product, where that is another name."""
    return _names().get(_of_entries(path), {})


def difference(path: str) -> tuple[str, str] | None:
    """A default or meaning in the documentation that the fields follow, and why it is another."""
    entry = dialects()[FOLLOWED].get(_of_entries(path))
    return None if entry is None or entry.there is None else (entry.there, entry.sentence)


def _of_entries(path: str) -> str:
    """The entries of both lists of data sets have the same fields."""
    return path.replace("data.test_datasets.", "data.datasets.")


# ---- hints for a key that does not exist


def taken_by(name: str) -> Entry | None:
    """The entry of a name that a field takes."""
    entries = (own[name] for own in dialects().values() if name in own)
    return next((entry for entry in entries if entry.ours), None)


def converted(entry: Entry, given: Any) -> str:
    """ " = VALUE" with what its conversion makes of a value; "" without one, or if none fits.

    given: text of a command line, or a value of a file.
    """
    if entry.convert is None:
        return ""
    try:
        value = yaml.safe_load(given) if isinstance(given, str) else given
        return f" = {show(CONVERSIONS[entry.convert](value))}"
    except (ValueError, yaml.YAMLError):
        return ""


def said(name: str) -> str:
    """What stands for a name of another configuration, in a sentence, or ""."""
    phrases = []
    for product, entries in dialects().items():
        if name in entries and (row := entries[name].row(name)):
            why = f"{row.state}: " * (row.state in (State.REFUSED, State.MISSING))
            phrases.append(f"{product}'s {name}: {why}{written(row.here)}")
    return "; ".join(phrases)


# ---- rows of other configurations


def named(model: type[BaseModel], product: str, name: str) -> list[str]:
    """The fields with a name, in our words or a product's."""
    last, paths = name.rpartition(".")[2], []
    for path in leaves(model):
        names = {path, path.rpartition(".")[2], *names_of(path).get(product, ())}
        if {name, last} & names and not path.startswith("data.test_datasets."):
            paths.append(path)
    return [name] if name in paths else paths


def by_value(model: type[BaseModel], product: str, name: str, value: str) -> Row | None:
    """The row for a value that names a row of a table, here as there; None: it names none."""
    entry = dialects().get(product, {}).get(name, Entry())
    paths = [*entry.settings] or named(model, product, name)
    rows = [m for path in paths[:1] for m in _field(model, path).metadata if isinstance(m, RowOf)]
    if not rows or value not in rows[0].table.names():
        return None
    return Row(f"{name}: {value}", State.SETTINGS, {paths[0]: value})


def _field(model: type[BaseModel], path: str) -> Any:
    return leaves(model)[without_index(path)]


def rows(model: type[BaseModel], product: str, names: Iterable[str]) -> Iterator[Row]:
    """The rows of these names, in order; values of them that the product's file has follow.

    Raises KeyError for a name that has no state.
    """
    entries = {} if product == FOLLOWED else dialects().get(product, {})
    own, listed = {n: row for n, entry in entries.items() if (row := entry.row(n))}, [*names]
    for name in listed:
        key, colon, value = name.partition(": ")
        paths = named(model, product, key)
        if name in own:
            yield own[name]
        elif colon and (row := by_value(model, product, key, value)) is not None:
            yield row
        elif colon or not (paths or any(n.startswith(f"{key}: ") for n in own)):
            raise KeyError(f"{product} has {name}, which is nothing here")
        elif paths:
            field = properties(_field(model, paths[0]))
            why = "" if field.accepted else field.refused
            yield Row(name, State.REFUSED, why) if why else Row(name, State.FIELD, paths)
        for n, row in own.items():
            if not colon and n.startswith(f"{key}: ") and n not in listed:
                yield row


def written(here: list[str] | dict[str, Any] | str) -> str:
    """Settings as they are written, or the sentence that stands for them."""
    if isinstance(here, str):
        return here
    if isinstance(here, list):
        return " or ".join(f"`{path}`" for path in here)
    return ", ".join(f"`{path}: {json.dumps(v).strip(chr(34))}`" for path, v in here.items())
