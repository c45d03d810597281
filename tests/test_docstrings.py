"""Public docstrings: their sections, and their examples, which run on a CPU."""

import doctest
import importlib
import inspect

import pytest
import torch

import tilewright
from tilewright import ops

SECTIONS = ("Args:", "Returns:", "Raises:", "Example:")
# Modules whose public names have all sections. A docstring elsewhere is tested as far as it goes.
WRITTEN = {
    f"tilewright.ops.{name}"
    for name in (
        "activation",
        "attention",
        "context_parallel",
        "cross_entropy",
        "hadamard",
        "linear_cross_entropy",
        "linear_logprob",
        "qk_norm_rope",
        "rope",
    )
}


def public():
    """Functions of `tilewright.ops` and of modules with an `__all__` of their own."""
    found = {name: getattr(ops, name) for name in ops.__all__}
    for module in map(importlib.import_module, sorted(WRITTEN)):
        found |= {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    return {
        name: value
        for name, value in found.items()
        if inspect.isroutine(value)
        or (inspect.isclass(value) and value.__module__.startswith("tilewright.ops"))
    }


PUBLIC = public()


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name):
    value = PUBLIC[name]
    names = vars(importlib.import_module(value.__module__)) | {
        "torch": torch,
        "tilewright": tilewright,
    }
    runner, said = doctest.DocTestRunner(), []
    for test in doctest.DocTestFinder(recurse=False).find(value, name, globs=names):
        runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)


@pytest.mark.parametrize(
    "name", [n for n, v in PUBLIC.items() if v.__module__ in WRITTEN and inspect.isfunction(v)]
)
def test_sections_are_there_in_order(name):
    doc = inspect.getdoc(PUBLIC[name])
    short = name in ("positions", "shard", "unshard")
    places = [doc.find(f"\n{section}\n") for section in (("Example:",) if short else SECTIONS)]
    assert min(places) > 0 and places == sorted(places)
