"""The examples in docstrings."""

import doctest
import importlib
import pathlib

import pytest

import tilewright

PACKAGE = pathlib.Path(tilewright.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if "\n        >>> " in path.read_text() and path.name != "__main__.py"
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    if "transformers" in name:
        pytest.importorskip("transformers")
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted and not results.failed


def test_an_example_that_is_wrong_is_seen(capsys):
    parsed = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner().run(parsed).failed == 1
