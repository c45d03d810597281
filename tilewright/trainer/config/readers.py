"""Which modules of the trainer read a field of the configuration, found in their source.

An attribute counts where its object is a section: annotated as one, taken from a configuration, an
entry of a list, or a dataclass that is filled with a section's fields.
"""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from tilewright.trainer.field_tree import submodel
from tilewright.trainer.optim.row import OPTIMIZERS, SCHEDULES
from tilewright.trainer.parallel.row import LAYOUTS
from tilewright.trainer.section import Section

HERE = pathlib.Path(__file__).parent
Kinds = dict[str, type[BaseModel]]


@functools.cache
def readers(model: type[BaseModel]) -> Mapping[str, list[str]]:
    """Dotted path of a field -> the modules that read it, relative to `tilewright.trainer`."""
    sections = _sections(model)
    classes: Kinds = {kind.__name__: kind for kind in sections}
    attributes: Kinds = {}
    scopes, behind = {}, {}  # behind: what a method of a section reads
    for path in sorted(HERE.parent.rglob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
        if path.parent == HERE or path.stem.endswith("fields"):
            for method in (n for n in nodes if isinstance(n, ast.FunctionDef)):
                behind[method.name] = [
                    n.attr for n in ast.walk(method) if isinstance(n, ast.Attribute)
                ]
        else:
            module = ".".join(path.relative_to(HERE.parent).with_suffix("").parts)
            module = module.removesuffix(".__init__")
            scopes[module] = Scope(nodes, classes, attributes)
    modules: dict[str, list[str]] = {}
    for module, scope in scopes.items():
        scope.bind()  # again, with the classes and attributes of other modules
        for section, name in scope.reads():
            for path in (at + n for at in sections[section] for n in behind.get(name, [name])):
                if module not in modules.setdefault(path, []):
                    modules[path].append(module)
    named: list[tuple[Callable[..., Any], tuple[str, ...]]]
    named = [(row.build, row.fields) for _, row in OPTIMIZERS.items()]
    named += [(row.share, row.fields) for _, row in SCHEDULES.items()]
    for _, row in LAYOUTS.items():
        named.append((row.apply, tuple(a.field for a in row.axes if a.field)))
    for function, fields in named:  # by name, as their rows say
        module = function.__module__.removeprefix("tilewright.trainer.")
        for name in fields:
            if module not in modules.setdefault(f"train.{name}", []):
                modules[f"train.{name}"].append(module)
    return modules


def _sections(model: type[BaseModel], at: str = "") -> dict[type[BaseModel], list[str]]:
    """The sections of a tree, and those that they are made of, with what comes before the names of
    their fields.
    """
    kinds = (kind for kind in model.__mro__ if issubclass(kind, Section) and kind is not Section)
    prefixes: dict[type[BaseModel], list[str]] = {kind: [at] for kind in kinds}
    for name, field in model.model_fields.items():
        if inner := submodel(field.annotation)[0]:
            for kind, paths in _sections(inner, f"{at}{name}.").items():
                prefixes.setdefault(kind, []).extend(paths)
    return prefixes


class Scope:
    """The names of a module that stand for sections.

    classes, attributes: those of all modules, which it adds to.
    """

    def __init__(self, nodes: list[ast.AST], classes: Kinds, attributes: Kinds):
        kinds = (ast.Assign, ast.For, ast.comprehension, ast.AnnAssign, ast.Call)
        self.read = [n for n in nodes if isinstance(n, ast.Attribute)]
        # Parameters first: a body assigns from them.
        self.bound = [n for n in nodes if isinstance(n, ast.arg)]
        self.bound += [n for n in nodes if isinstance(n, kinds)]
        self.classes, self.attributes = classes, attributes
        self.names: Kinds = {}
        self.bind()

    def bind(self) -> None:
        for node in self.bound:
            match node:
                case ast.arg(arg=name, annotation=annotation) if annotation:
                    self._annotated(self.names, name, annotation)
                case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                    self._annotated(self.attributes, name, annotation)
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    for name, value in zip(names, values, strict=False):
                        self._assigned(self.names, name, value)
                case ast.Assign(targets=[name], value=value):
                    self._assigned(self.names, name, value)
                case ast.For(target=name, iter=value) | ast.comprehension(target=name, iter=value):
                    self._assigned(self.names, name, value)
                case ast.Call(func=name, keywords=[ast.keyword(arg=None, value=value)]):
                    # name(**{field: getattr(section, field) for ...})
                    for call in ast.walk(value):
                        if isinstance(call, ast.Call) and ast.unparse(call.func) == "getattr":
                            self._assigned(self.classes, name, call.args[0])

    def _annotated(self, to: Kinds, name: str, annotation: ast.AST) -> None:
        for node in ast.walk(annotation):
            if isinstance(node, ast.Name) and node.id in self.classes:
                to[name] = self.classes[node.id]

    def _assigned(self, to: Kinds, name: ast.AST, value: ast.AST) -> None:
        if kind := self.kind(value):
            to[ast.unparse(name).removeprefix("self.")] = kind

    def kind(self, node: ast.AST) -> type[BaseModel] | None:
        """The section that an expression is, or a list of entries has."""
        match node:
            case ast.Name(id=name):
                return self.names.get(name)
            case ast.Attribute(value=value, attr=name):
                if kind := self.kind(value):
                    field = kind.model_fields.get(name)
                    return submodel(field.annotation)[0] if field else None
                own = isinstance(value, ast.Name) and value.id == "self"
                return (own and self.names.get(name)) or self.attributes.get(name)
        return None

    def reads(self) -> Iterator[tuple[type[BaseModel], str]]:
        """The sections and the names of their attributes that the module uses."""
        for node in self.read:
            if kind := self.kind(node.value):
                yield kind, node.attr
