"""Public docstrings: their sections, and the examples of all modules, which doctest runs."""

import doctest
import importlib
import inspect
import pathlib
import re

import pytest

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
SECTIONS = ("Args:", "Returns:", "Raises:", "Example:")


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    if "transformers" in name:
        pytest.importorskip("transformers")
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted and not results.failed


def missing(function):
    """Sections that its docstring lacks, and parameters that no line of it describes."""
    text = inspect.getdoc(function) or ""
    heads = re.findall(r"^ {4}([\w*, ]+)(?: \([^)]*\))?:", text, re.MULTILINE)
    described = {name.strip("* ") for head in heads for name in head.split(",")}
    absent = [s for s in SECTIONS if f"\n{s}\n" not in text]
    return absent + [p for p in inspect.signature(function).parameters if p not in described]


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
