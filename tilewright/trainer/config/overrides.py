"""YAML and `--section.field value` into a pydantic model, with every error reported at once.

Independent of the fields' meanings, which are in `config.py` and `rules.py`. Written here, since
pydantic-settings and argparse end at the first unknown argument, before any error of the file and
with no suggestion, and OmegaConf takes an unknown key for a new one; neither changes an entry of a
list (`--data.datasets.0.path`).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from tilewright.trainer.config.field_tree import (
    ConfigError,
    kind,
    leaves,
    show,
    submodel,
    unknown,
    without_index,
)

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
            most = (
                f"{DEEPEST} levels of nesting"
                if self.depth > DEEPEST
                else (f"{MOST_VALUES:,} values (an alias counts as everything it stands for)")
            )
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


def apply(
    data: dict, model: type[BaseModel], arguments: list[str], elsewhere: Mapping[str, str]
) -> list[str]:
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
            errors.append(f"--{key} = {text}: {whole or unknown(model, path, elsewhere)}")
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
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if isinstance(data, list):
            if not part.isdigit() or int(part) >= len(data):
                return False
            key: Any = int(part)
        elif isinstance(data, dict) and not part.isdigit():
            key = part
        else:
            return False
        if last:
            data[key] = value
        elif parts[i + 1].isdigit() and not isinstance(
            data[key] if isinstance(data, list) else data.get(key), list
        ):
            # there is no list to change, and a mapping in its place would cause a second error
            return False
        elif isinstance(data, dict):
            data = data.setdefault(key, {})
        else:
            data = data[key]
    return True


# ---- validation

# Replacements for missing or invalid values, so that the rules can check the rest in the same run.
_STAND_INS = {"data.datasets": [{"path": "dummy"}], "train.output_dir": "-", "path": "dummy"}


def build(
    model: type[BaseModel], path: str | None, arguments: list[str], elsewhere: Mapping[str, str]
) -> Any:
    """The validated model. Raises ConfigError with all errors. elsewhere: see `unknown`."""
    data = _underscored(read_yaml(path) if path is not None else {}, model)
    for section in model.model_fields:
        data.setdefault(section, {})
    errors = apply(data, model, arguments, elsewhere)
    invalid: set[str] = set()
    while True:
        broken: list[Any] = []
        try:
            config = model.model_validate(data, context=broken)
            break
        except ValidationError as error:
            known = len(invalid)
            errors += _explain(model, data, error, invalid, elsewhere)
            if len(invalid) == known:  # no invalid part could be removed
                raise ConfigError(list(dict.fromkeys(errors))) from error
    errors += [p.line(config) for p in broken if not invalid & set(p.paths)]
    if errors:
        raise ConfigError(list(dict.fromkeys(errors)))
    return config


def _explain(
    model: type[BaseModel],
    data: dict,
    error: ValidationError,
    invalid: set[str],
    elsewhere: Mapping[str, str],
) -> list[str]:
    """One line per invalid location, which is also removed from `data`."""
    messages: dict[tuple, list[tuple[str, str, Any]]] = {}
    for e in error.errors():
        at = _existing(data, e["loc"], e["type"] == "missing")
        messages.setdefault(at, []).append((e["type"], e["msg"], e["input"]))
    lines = []
    # Later list entries first, so that removing one does not move the others.
    for at in sorted(messages, key=lambda at: [(isinstance(p, int), p) for p in at], reverse=True):
        path, (reason, message, value) = ".".join(map(str, at)), messages[at][0]
        if any(place.startswith(f"{path}.") for place in invalid):
            pass  # a list whose entry has been removed
        elif reason == "missing":
            lines.append(f"{path}: required")
        elif reason == "extra_forbidden":
            lines.append(f"{path} = {show(value)}: {unknown(model, path, elsewhere)}")
        else:
            field = leaves(model).get(without_index(path))
            wanted = f"; expected {kind(field.annotation)}" if field else ""
            text = message.removeprefix("Value error, ")
            if reason == "model_type":  # a section, or an entry of a list
                text, wanted = "expected a mapping", ""
            lines.append(f"{path} = {show(value)}: {text[:1].lower()}{text[1:]}{wanted}")
        invalid.add(path)
        if reason == "model_type" and len(at) == 1:
            data[path] = {}
        else:
            _take_out(data, at)
    return lines[::-1]


def _existing(data: Any, location: tuple, missing: bool) -> tuple:
    """A location without the names of union members that pydantic adds at its end."""
    out = []
    for part in location:
        inside = (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        )
        if not inside:
            return (*out, part) if missing else tuple(out)
        data = data[part]
        out.append(part)
    return tuple(out)


def _take_out(data: Any, at: tuple) -> None:
    *parents, last = at
    for part in parents:
        data = data[part]
    path = without_index(".".join(map(str, at)))
    stand_in = _STAND_INS.get(path, _STAND_INS.get(str(last)) if path.startswith("data.") else None)
    if path == "data.datasets" and isinstance(last, int):  # may be the only entry
        data[last] = {"path": "dummy"}
    elif stand_in is not None:
        data[last] = copy.deepcopy(stand_in)  # it may be removed later in its turn
    elif isinstance(data, list) or last in data:
        del data[last]
