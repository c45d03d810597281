"""The tables of families: what their rows depend on."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import pathlib

from tests.lib.small_models import EVERY, kinds
from tests.lib.sweeps import ROOT, Sweep, Table
from tilewright.bench import sources

FOLDER = ROOT / "bench/results/families"
# What adapts, loads and saves models. What ops compute, their own tests hold.
SOURCES = ("integrations/**/*.py", "nn/**/*.py")
LIBRARY = ("small_models", "isolated")
HEADS = {"sampled": ("causal",)}  # default: every
PACKAGES = {  # whose versions count
    "sampled": ("torch", "transformers"),
    "accelerated": ("torch", "transformers"),
    "quantized": ("torch", "transformers", "bitsandbytes", "compressed-tensors"),
}


def versions(name: str) -> dict[str, str]:
    """The versions of the packages that are installed."""
    found = {}
    for package in PACKAGES[name]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def sweep(name: str, what: str, *patterns: str) -> Sweep:
    """name: of a module here.   what: of each family.   patterns: of further sources."""

    @functools.cache
    def digests() -> dict[str, str]:
        here = pathlib.Path(__file__).parent
        own = [here / f"{name}.py", *(ROOT / "tests/lib" / f"{n}.py" for n in LIBRARY)]
        of_library = () if name == "sampled" else SOURCES
        own += [p for of in (*of_library, *patterns) for p in (ROOT / "tilewright").glob(of)]
        digest = sources.of_files(own, str(versions(name)))
        heads = HEADS.get(name, EVERY)
        return {f"{head} {kind}": digest for head in heads for kind in kinds(head)}

    command = f"python -m tests.families {name}"
    what = f"{what} of families of transformers"
    return Sweep(what, command, digests, table_of(name).rows)


def table_of(name: str) -> Table:
    return Table(FOLDER / f"{name}.jsonl")


SWEEPS = {
    "accelerated": sweep("accelerated", "accelerate"),
    "quantized": sweep("quantized", "quantized loading", "ops/quant/*.py"),
    "sampled": sweep("sampled", "samples", "sampler/*.py"),
}
