"""Adapts the package's docstrings to griffe, which reads them for the site."""

from __future__ import annotations

import importlib
import inspect
import re

import griffe

NAMES = re.compile(r"^( {4})(\*{0,2}\w+(?:, \*{0,2}\w+)+):", re.MULTILINE)
QUOTE = re.compile(r"^( *(?:[\w*, ]+: )?)>(?!>)", re.MULTILINE)  # Markdown's, where > is greater

OF_OP = re.compile(r"[A-Z][A-Z0-9_]*\.public")


class Docstrings(griffe.Extension):
    """`Example:` becomes the section that griffe calls `Examples:`. A line for several arguments
    (`k, v: as q`) becomes one line each. The module's docstring is not referred to, since an op's
    page begins with it. The public function of an op that makes it (`kind_op`) is no function in
    the source: it is read from the imported module.
    """

    def on_module_members(self, *, mod: griffe.Module, **kwargs) -> None:
        for name, member in list(mod.members.items()):
            if isinstance(member, griffe.Attribute) and OF_OP.fullmatch(str(member.value)):
                mod.set_member(name, _function(getattr(importlib.import_module(mod.path), name)))

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        text = text.replace("See the module's docstring for the formula. ", "")
        text = QUOTE.sub(r"\1\>", text)
        head, args, rest = text.partition("\nArgs:\n")
        if args:
            section, end, rest = rest.partition("\n\n")
            text = head + args + "\n".join(_apart(section)) + end + rest
        obj.docstring.value = text


def _function(made) -> griffe.Function:
    """What griffe would read of a function's `def`."""
    signature = inspect.signature(made)
    parameters = [
        griffe.Parameter(
            p.name,
            annotation=inspect.formatannotation(p.annotation),
            kind=griffe.ParameterKind(p.kind.description),
            default=None if p.default is p.empty else repr(p.default),
        )
        for p in signature.parameters.values()
    ]
    return griffe.Function(
        made.__name__,
        parameters=griffe.Parameters(*parameters),
        docstring=griffe.Docstring(inspect.getdoc(made) or ""),
    )


def _apart(section: str) -> list[str]:
    """The lines of an Args section, with one entry for each argument."""
    out = []
    for entry in re.split(r"\n(?= {4}\S)", section):
        if several := NAMES.match(entry):
            out += [f"    {n}:{entry[several.end() :]}" for n in several[2].split(", ")]
        else:
            out.append(entry)
    return out
