"""Runs of compiled kernels that have passed with the same code, and are drawn at random since.

A group is an op, or all runs that are of no op. Its digest is made of the op's sources and what
they import, the emulator, the tests, the budget of counts, versions, and variables that Triton
compiles by. A file has the digests of groups whose runs have all passed: a group that has changed
runs whole, which adds it if all pass; a run that fails later removes it; and `make ptx-all` runs
everything.
"""

import functools
import hashlib
import json
import os
import pathlib
import platform
import random
import re
from importlib import metadata

import numpy
import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars

from bench.page.files import counts_of
from tilewright.bench import sources
from tilewright.core.registry import Op
from tilewright.selection import operations
from tilewright_lab import emulator

FOLDER = pathlib.Path(__file__).parent
SHARE = 20  # one run in so many is repeated
WHY = f"has passed with this code; one run in {SHARE} is drawn, `make ptx-all` runs all"
# Variables of Triton that name places, or that these runs set.
APART = {"TRITON_CACHE_DIR", "TRITON_DUMP_DIR", "TRITON_HOME", "TRITON_INTERPRET"}


def op_of(name, arguments):
    """The op whose kernels a run compiles, which is among its arguments or a part of its name."""
    named = (operations().get(part) for part in re.split("[- /]", name))
    return next((a for a in (*arguments, *named) if isinstance(a, Op)), None)


def groups(runs):
    """Name of a group -> its op, or None; and the names of its runs."""
    found = {}
    for name, arguments in runs.items():
        op = op_of(name, arguments)
        found.setdefault(op.name if op else "others", (op, []))[1].append(name)
    return found


@functools.cache
def common():
    """What the runs of all ops depend on."""
    files = [*pathlib.Path(emulator.__file__).parent.glob("*.py"), *FOLDER.glob("*.py")]
    counts = counts_of(triton.__version__)
    parts = [
        *(m.__version__ for m in (triton, torch, numpy)),
        *platform.python_version_tuple()[:2],
        repr(sorted(variables().items())),
        counts.read_text() if counts.exists() else "",
    ]
    return "\n".join([*parts, *(sources.meaning(path.read_text()) for path in sorted(files))])


def variables():
    """The environment that Triton compiles by: its own variables, and those of LLVM."""
    own = {n: v for n, v in os.environ.items() if n.startswith("TRITON_") and n not in APART}
    return own | get_cache_invalidating_env_vars()


def everything():
    """Whether all is to run."""
    return os.environ.get("TILEWRIGHT_PTX") == "all"


class Passed:
    """The runs of one compiler's kernels.

    runs: name -> arguments, among which may be an op. package: the compiler, of which a new version
    runs all.
    """

    def __init__(self, file, runs, package):
        self.file, self.runs, self.package = FOLDER / file, runs, package

    def digest(self, op):
        """Of everything that the runs of an op depend on; op None: of all ops."""
        of_op = sources.digest(op) if op else sources.everything()
        known = common(), metadata.version(self.package), of_op
        return hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]

    def drawn(self, seed):
        """The names to run: all of a group that has changed, and some of each other one."""
        known = json.loads(self.file.read_text())
        draw, found = random.Random(seed), set()
        for group, (op, names) in groups(self.runs).items():
            same = known.get(group) == self.digest(op)
            found.update(draw.sample(names, -(-len(names) // SHARE)) if same else names)
        return found

    def chosen(self, selected):
        """Those of these names to run, and what names them again."""
        if everything() or len(selected) < len(self.runs):
            return set(selected), ""
        seed = random.randrange(1000)
        again = f"\nOne of those that drawn(seed={seed}) of {self.file.name} names."
        return self.drawn(seed), again

    def settle(self, failures):
        """Keeps what the runs found, all or some.

        failures: name of a run that has ended -> what was wrong, or nothing.
        """
        known, all_groups = json.loads(self.file.read_text()), groups(self.runs)
        left = {group: digest for group, digest in known.items() if group in all_groups}
        for group, (op, names) in all_groups.items():
            if any(map(failures.get, names)):
                left.pop(group, None)
            elif failures.keys() >= set(names):
                left[group] = self.digest(op)
        if left != known:
            self.file.write_text(json.dumps(dict(sorted(left.items())), indent=1) + "\n")
