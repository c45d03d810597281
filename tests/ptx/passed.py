"""Runs of compiled kernels that have passed with the same code, and are drawn at random since.

A group is an op, or all runs that are of no op. Its digest is made of the op's sources and what
they import, the emulator, the tests, the budget of counts, versions, and variables that Triton
compiles by. passed.json has the digests of groups whose runs have all passed: `make ptx-all` runs
everything and writes it, and a run that fails later removes its group.
"""

import functools
import hashlib
import json
import os
import pathlib
import platform
import random

import numpy
import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars

from tilewright.bench import sources
from tilewright.bench.page.files import counts_of
from tilewright.registry import Op
from tilewright.tools import emulator

FILE = pathlib.Path(__file__).with_name("passed.json")
SHARE = 10  # one run in so many is repeated
# Variables of Triton that name places, or that these runs set.
APART = {"TRITON_CACHE_DIR", "TRITON_DUMP_DIR", "TRITON_HOME", "TRITON_INTERPRET"}


def groups(runs):
    """Name of a group -> its op, or None; and the names of its runs."""
    found = {}
    for name, arguments in runs.items():
        op = next((a for a in arguments if isinstance(a, Op)), None)
        found.setdefault(op.name if op else "others", (op, []))[1].append(name)
    return found


@functools.cache
def common():
    """What the runs of all ops depend on."""
    files = [*pathlib.Path(emulator.__file__).parent.glob("*.py"), *FILE.parent.glob("*.py")]
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


def digest(op):
    """Of everything that the runs of an op depend on; op None: of all ops."""
    of_op = sources.digest(op) if op else sources.everything()
    return hashlib.sha256(f"{common()}\n{of_op}".encode()).hexdigest()[:16]


def drawn(runs, seed):
    """The names to run: all of a group that has changed, and some of each other one."""
    known = json.loads(FILE.read_text())
    draw, found = random.Random(seed), set()
    for group, (op, names) in groups(runs).items():
        same = known.get(group) == digest(op)
        found.update(draw.sample(names, -(-len(names) // SHARE)) if same else names)
    return found


def settle(runs, failures, everything):
    """Keeps what the runs found, everything or some.

    failures: name of a run that has ended -> what was wrong, or nothing.
    """
    if not everything:
        known = json.loads(FILE.read_text())
        left = {
            group: digest
            for group, digest in known.items()
            if not any(map(failures.get, groups(runs).get(group, (None, ()))[1]))
        }
        if left != known:
            save(left)
    elif failures.keys() == runs.keys():
        write(runs, failures)


def write(runs, failures):
    """failures: name of a run -> what was wrong, or nothing."""
    passed = {
        group: digest(op)
        for group, (op, names) in groups(runs).items()
        if not any(failures[name] for name in names)
    }
    save(passed)


def save(passed):
    FILE.write_text(json.dumps(dict(sorted(passed.items())), indent=1) + "\n")
