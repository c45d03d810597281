"""Public docstrings: their sections, and the examples of all modules, run by doctest."""

import doctest
import importlib
import inspect
import pathlib
import re

import pytest
import torch

import tilewright
from tilewright import ops

PACKAGE = pathlib.Path(tilewright.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if "\n        >>> " in path.read_text() and path.name != "__main__.py"
)
FUNCTIONS = {
    f"{module.__name__}.{name}": value
    for module in (tilewright, ops)
    for name in module.__all__
    if inspect.isroutine(value := getattr(module, name))
}


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    if "transformers" in name:
        pytest.importorskip("transformers")
    names = {"torch": torch, "tilewright": tilewright}
    results = doctest.testmod(importlib.import_module(name), extraglobs=names)
    assert results.attempted and not results.failed


def missing(function):
    """Sections missing from its docstring, and undocumented parameters."""
    text = inspect.getdoc(function) or ""
    heads = re.findall(r"^ {4}([\w*, ]+)(?: \([^)]*\))?:", text, re.MULTILINE)
    described = {name.strip("* ") for head in heads for name in head.split(",")}
    parameters = inspect.signature(function).parameters
    sections = ["Returns:", "Example:"]
    if parameters:
        sections += ["Args:", "Raises:"]
    absent = [s for s in sections if f"\n{s}\n" not in text]
    return absent + [p for p in parameters if p not in described]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_has_every_section_and_parameter(name):
    assert missing(FUNCTIONS[name]) == []


def test_what_is_missing_is_seen():
    def f(x, y):
        """Adds.

        Args:
            x: a number.

        Example:
            >>> f(1, 2)
            3
        """

    assert missing(f) == ["Returns:", "Raises:", "y"]
    parsed = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner().run(parsed, out=lambda text: None).failed == 1
