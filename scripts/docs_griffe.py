"""Adapts the package's docstrings to griffe, which reads them for the site."""

from __future__ import annotations

import re

import griffe

NAMES = re.compile(r"^( {4})(\*{0,2}\w+(?:, \*{0,2}\w+)+):", re.MULTILINE)
QUOTE = re.compile(r"^( *(?:[\w*, ]+: )?)>(?!>)", re.MULTILINE)  # Markdown's, where > is greater


class Docstrings(griffe.Extension):
    """`Example:` becomes the section that griffe calls `Examples:`. A line for several arguments
    (`k, v: as q`) becomes one line each. The module's docstring is not referred to, since an op's
    page begins with it.
    """

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


def _apart(section: str) -> list[str]:
    """The lines of an Args section, with one entry for each argument."""
    out = []
    for entry in re.split(r"\n(?= {4}\S)", section):
        if several := NAMES.match(entry):
            out += [f"    {n}:{entry[several.end() :]}" for n in several[2].split(", ")]
        else:
            out.append(entry)
    return out
