"""The tables of families: what their rows depend on."""

from __future__ import annotations

import functools
import importlib.metadata
import pathlib

from tests.lib.small_models import EVERY, kinds
from tests.lib.sweeps import ROOT, Sweep, Table, of_files

FOLDER = ROOT / "bench/results/families"
# What adapts, loads and saves models. What ops compute, their own tests hold.
SOURCES = ("integrations/**/*.py", "nn/**/*.py")


PACKAGES = {  # whose versions count
    "accelerated": ("torch", "transformers"),
    "quantized": ("torch", "transformers", "bitsandbytes", "compressed-tensors"),
}


def versions(name: str) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in PACKAGES[name]}


def sweep(name: str, what: str, *sources: str) -> Sweep:
    """name: of a module here.   what: of each family.   sources: further files of tilewright."""

    @functools.cache
    def digests() -> dict[str, str]:
        here = pathlib.Path(__file__).parent
        own = [here / f"{name}.py", *(ROOT / "tests/lib" / f"{n}.py" for n in LIBRARY)]
        own += [p for of in (*SOURCES, *sources) for p in (ROOT / "tilewright").glob(of)]
        digest = of_files(own, str(versions(name)))
        return {f"{head} {kind}": digest for head in EVERY for kind in kinds(head)}

    command = f"python -m tests.families {name}"
    what = f"{what} of families of transformers"
    return Sweep(what, command, digests, table(name).rows)


def table(name: str) -> Table:
    return Table(FOLDER / f"{name}.jsonl")


LIBRARY = ("small_models", "isolated")
SWEEPS = {
    "accelerated": sweep("accelerated", "accelerate"),
    "quantized": sweep("quantized", "quantized loading", "ops/quant/*.py"),
}
