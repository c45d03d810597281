"""Public docstrings: their sections, and the examples of all modules, run by doctest."""

import doctest
import importlib
import inspect
import pathlib
import re

import pytest
import torch
from docstrings import missing

import tilewright
from bench.page import api

PACKAGE = pathlib.Path(tilewright.__file__).parent
# kind_op writes the example of a module that calls it.
EXAMPLE = re.compile(r"^ +>>> |^[A-Z][A-Z0-9_]* = kind_op\(", re.MULTILINE)
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if EXAMPLE.search(path.read_text()) and path.name != "__main__.py"
)
SHOWN = {path: importlib.import_module(path) for path in api.MODULES}
# Names that a module's `__getattr__` imports are judged within a test: transformers is slow.
PUBLIC = {
    f"{path}.{name}": (module, name)
    for path, module in SHOWN.items()
    for name in module.__all__
    if name not in vars(module)
    or inspect.isroutine(vars(module)[name])
    or inspect.isclass(vars(module)[name])
}
OF_NN = ("base_weights", "format_of", "in_row_blocks", "print_trainable_parameters", "quantized")
NEVER_RAISE = {
    "tilewright.integrations.transformers.report_of",
    *(f"tilewright.nn.{name}" for name in (*OF_NN, "shape_of", "trainable_parameters")),
}


def needed_by(name):
    """Skips the test if a package is missing that the module of this name requires."""
    for package in ("transformers", "peft"):
        if f"integrations.{package}" in name:
            pytest.importorskip(package)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    needed_by(name)
    names = {"torch": torch, "tilewright": tilewright}
    results = doctest.testmod(importlib.import_module(name), extraglobs=names)
    assert results.attempted and not results.failed


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_function_has_every_section_and_parameter(name):
    needed_by(name)
    module, attribute = PUBLIC[name]
    value = getattr(module, attribute)
    if inspect.isclass(value):
        # A dataclass or a named tuple without a docstring has its signature as one.
        assert value.__dict__["__doc__"] and not value.__doc__.startswith(f"{value.__name__}(")
        return
    assert missing(value, name in NEVER_RAISE) == []
    assert name not in NEVER_RAISE or "raise " not in inspect.getsource(value)


@pytest.mark.parametrize("path", SHOWN)
def test_all_that_a_page_shows_is_held(path):
    needed_by(path)
    shown = {f"{path}.{name}" for name in api.members(SHOWN[path])}
    assert shown and shown <= set(PUBLIC)
