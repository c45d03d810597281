"""YAML and `--section.field value` into a pydantic model, with every error reported at once.

Written here, since jsonargparse, tyro, pydantic-settings and OmegaConf end at the first wrong
argument or value: the other errors, of the file too, would come to light one start after the other.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from tilewright.trainer.config.dialects import converted, said, taken_by
from tilewright.trainer.field_tree import (
    ConfigError,
    kind,
    leaves,
    show,
    submodel,
    without_index,
)
from tilewright.trainer.section import Broken

MOST_VALUES, DEEPEST, LONGEST_NUMBER = 100_000, 50, 100


class _Loader(yaml.SafeLoader):
    """Rejects duplicate keys, of which YAML would silently keep the last one, and files that take
    more memory or a deeper stack to read than any configuration: a few lines of nested aliases can
    stand for billions of values.
    """

    def __init__(self, stream: Any):
        super().__init__(stream)
        self.values = self.depth = 0  # composed nodes, with aliases expanded
        self.sizes: dict[str, int] = {}  # anchor -> expanded size of its node, once complete

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        alias, before = isinstance(event, yaml.AliasEvent), self.values
        if alias and event.anchor in self.anchors and event.anchor not in self.sizes:
            raise ComposerError(
                None, None, f"alias *{event.anchor} is within what it stands for", event.start_mark
            )
        self.values += self.sizes.get(event.anchor, 0) if alias else 1
        self.depth += 1
        if self.values > MOST_VALUES or self.depth > DEEPEST:
            most = f"{MOST_VALUES:,} values (an alias counts as everything it stands for)"
            if self.depth > DEEPEST:
                most = f"{DEEPEST} levels of nesting"
            raise ComposerError(None, None, f"the file has more than {most}", event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        if not alias and event.anchor is not None:
            self.sizes[event.anchor] = self.values - before
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = node.tag.rpartition(":")[2]
        if kind in ("int", "float") and len(node.value) > LONGEST_NUMBER:
            problem = f"numbers of more than {LONGEST_NUMBER} characters are not read"
        else:
            try:
                return super().construct_object(node, deep)
            # From Python's int, float and date (2020-02-31); the others are PyYAML's, for
            # `!!bool x` and the like.
            except (ValueError, KeyError, AttributeError):
                problem = f"{node.value!r} is no {kind}"
        raise ConstructorError(None, None, problem, node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":  # <<: *defaults
                continue
            name = self.construct_object(key, deep=True)
            if not isinstance(name, str):
                raise ConstructorError(None, None, f"key {name!r} is not a string", key.start_mark)
            if name.replace("-", "_") in seen:
                raise ConstructorError(None, None, f"key {name!r} is given twice", key.start_mark)
            seen.add(name.replace("-", "_"))
        return super().construct_mapping(node, deep)


def read_yaml(path: str) -> dict:
    try:
        with open(path, encoding="utf-8") as file:
            data = yaml.load(file, _Loader)  # a SafeLoader: plain data only
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror or error}"]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: {' '.join(str(error).split())}"]) from error
    if not isinstance(data, dict | None):
        raise ConfigError([f"{path}: holds {kind(type(data))}, not sections"])
    return data or {}


def _underscored(data: Any, model: type[BaseModel]) -> Any:
    """Replaces hyphens in keys by underscores, where the model has such a field, and empty sections
    by {}.
    """
    if isinstance(data, list):
        return [_underscored(item, model) for item in data]
    if not isinstance(data, dict):
        return data
    out = {}
    for key, value in data.items():
        plain = key.replace("-", "_")
        field = model.model_fields.get(plain)
        inner, listed = submodel(field.annotation) if field else (None, False)
        if inner is not None:
            value = {} if value is None and not listed else _underscored(value, inner)
        out[plain if field else key] = value
    return out


def _value(text: str) -> Any:
    """Parses null, lists, mappings and quoted strings; other values, such as 1e-5, are left to the
    field's type.
    """
    if text == "null":
        return None
    return yaml.load(text, _Loader) if text[:1] in ("[", "{", '"') else text


def apply(data: dict, model: type[BaseModel], arguments: list[str]) -> list[str]:
    """Applies `--a.b value` and `--a.b=value` to `data`. Returns the errors."""
    errors, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            errors.append(f"{word}: not an override; write --section.field value")
            continue
        key, equals, text = word[2:].partition("=")
        path = key.replace("-", "_")
        if not equals:
            if not rest or rest[0].startswith("--"):
                errors.append(f"--{key}: no value given")
                continue
            text = rest.pop(0)
        if without_index(path) not in leaves(model):
            whole = "a section; give its fields" if path in model.model_fields else None
            errors.append(f"--{key} = {text}: {whole or unknown(model, path, text)}")
            continue
        try:
            value = _value(text)
        except yaml.YAMLError as error:
            errors.append(f"{path} = {text}: not JSON: {' '.join(str(error).split())}")
            continue
        if not _write(data, path.split("."), value):
            indexed = re.fullmatch(r"(.*?)\.\d+\.(.*)", path)
            whole, name = indexed.groups() if indexed else path.rsplit(".", 1)
            item = json.dumps([{name: value}])
            errors.append(
                f"{path} = {text}: there is nothing at {path.rpartition('.')[0]} to change; give the "
                f"whole list, as --{whole} '{item}'"
            )
    return errors


def _write(data: Any, parts: list[str], value: Any) -> bool:
    """Whether there is a list for every index in the path."""
    keys: list[Any] = [int(part) if part.isdigit() else part for part in parts]
    for key, inner in zip(keys, [*keys[1:], None], strict=True):
        if isinstance(key, int):
            if not isinstance(data, list) or key >= len(data):
                return False
        elif not isinstance(data, dict):
            return False
        elif isinstance(inner, str):
            data.setdefault(key, {})
        if inner is None:
            data[key] = value
        else:
            data = data[key] if isinstance(data, list) else data.get(key)
    return True


# ---- hints


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


# Below it names agree by chance: learning_rate has half of log_format's letters, in their order.
ALIKE = 0.75


def unknown(model: type[BaseModel], path: str, given: Any = None) -> str:
    """The hint for a key that does not exist: where it belongs, its name here, what is said of it
    elsewhere, or similar keys anywhere in the tree.   given: its value.
    """
    at, _, name = without_index(path).rpartition(".")
    known = {p: p.rpartition(".") for p in (*leaves(model), *(() if at else model.model_fields))}
    if places := [section for section, _, own in known.values() if own == name]:
        return f"unknown key; {name} belongs under {' or '.join(places)}"
    # Among similar names, those of the named section.
    alike = {
        p: _likeness(name, own) + 0.1 * _likeness(at, section)
        for p, (section, _, own) in known.items()
        if _likeness(name, own) >= ALIKE
    }
    meant = [p for p in alike if alike[p] == max(alike.values())]
    entry = taken_by(name)
    if entry is None and (sentence := said(name)):
        return f"unknown key; {sentence}"
    here = entry.ours if entry is not None else None
    if entry is not None and here and at not in {known[p][0] for p in meant} - {known[here][0]}:
        return f"unknown key; did you mean {here}{converted(entry, given)}?"
    return f"unknown key; did you mean {' or '.join(meant)}?" if meant else "unknown key"


# ---- validation


def build(
    model: type[BaseModel], path: str | None, arguments: list[str], *, training: bool = True
) -> Any:
    """The validated model. Raises ConfigError with all errors.   training: see `Broken`."""
    given = read_yaml(path) if path is not None else {}
    return validated(model, given, arguments, training=training)


def validated(
    model: type[BaseModel], given: dict, arguments: list[str], *, training: bool = True
) -> Any:
    """The same of what a file would hold."""
    data = _underscored(given, model)
    for section in model.model_fields:
        data.setdefault(section, {})
    errors = apply(data, model, arguments)
    invalid: set[str] = set()
    while True:
        broken = Broken()
        broken.training = training
        try:
            config: Any = model.model_validate(data, context=broken)
            break
        except ValidationError as error:
            known = len(invalid)
            errors += _explain(model, data, error, invalid)
            if len(invalid) == known:  # no invalid part could be removed
                raise ConfigError(list(dict.fromkeys(errors))) from error
    errors += [p.line(config) for p in broken if not invalid & set(p.paths)]
    if errors:
        raise ConfigError(list(dict.fromkeys(errors)))
    return config


def _explain(
    model: type[BaseModel], data: dict, error: ValidationError, invalid: set[str]
) -> list[str]:
    """One line per invalid location, which is also removed from `data`."""
    first: dict[tuple, Any] = {}
    for e in error.errors():
        first.setdefault(_existing(data, e["loc"], e["type"] == "missing"), e)
    lines = []
    # Later list entries first, so that removing one does not move the others.
    for at in sorted(first, key=lambda at: [(isinstance(p, int), p) for p in at], reverse=True):
        path, reason, value = ".".join(map(str, at)), first[at]["type"], first[at]["input"]
        if any(place.startswith(f"{path}.") for place in invalid):
            pass  # a list whose entry has been removed
        elif reason == "missing":
            lines.append(f"{path}: required")
        elif reason == "extra_forbidden":
            lines.append(f"{path} = {show(value)}: {unknown(model, path, value)}")
        else:
            field = leaves(model).get(without_index(path))
            wanted = f"; expected {kind(field.annotation)}" if field else ""
            text = first[at]["msg"].removeprefix("Value error, ")
            if reason == "model_type":  # a section, or an entry of a list
                text, wanted = "expected a mapping", ""
            lines.append(f"{path} = {show(value)}: {text[:1].lower()}{text[1:]}{wanted}")
        invalid.add(path)
        if reason == "model_type" and len(at) == 1:
            data[path] = {}
        else:
            _take_out(model, data, at)
    return lines[::-1]


def _existing(data: Any, location: tuple, missing: bool) -> tuple:
    """A location without the names of union members that pydantic adds at its end."""
    for depth, part in enumerate(location):
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return location[: depth + missing]
    return location


def _take_out(model: type[BaseModel], data: Any, at: tuple) -> None:
    """Removes a missing or invalid value. An example stands in for one that is required, and for an
    entry, so that the rules can check the rest in the same run.
    """
    for part in at[:-1]:
        data = data[part]
    last, field = at[-1], leaves(model).get(without_index(".".join(map(str, at))))
    if field is not None and field.examples:
        # It may be removed later in its turn.
        data[last] = copy.deepcopy(
            field.examples[0][0] if isinstance(last, int) else field.examples[0]
        )
    elif isinstance(data, list) or last in data:
        del data[last]
