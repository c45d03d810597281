"""What a public docstring must have."""

import inspect
import re


def missing(function, never_raises=False):
    """Sections missing from its docstring, and undocumented parameters."""
    text = inspect.getdoc(function) or ""
    heads = re.findall(r"^ {4}([\w*, ]+)(?: \([^)]*\))?:", text, re.MULTILINE)
    described = {name.strip("* ") for head in heads for name in head.split(",")}
    parameters = inspect.signature(function).parameters
    sections = ["Returns:", "Example:"]
    if parameters:
        sections += ["Args:"] if never_raises else ["Args:", "Raises:"]
    absent = [s for s in sections if f"\n{s}\n" not in text]
    return absent + [p for p in parameters if p not in described]
