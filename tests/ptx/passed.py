"""Runs of compiled kernels that have passed with the same code, and are drawn at random since.

A group is an op, or all runs that are of no op. Its digest is made of the op's sources and what
they import, the emulator, the tests and the versions of Triton and PyTorch. passed.json has the
digests of groups whose runs have all passed: `make ptx-all` runs everything and writes it.
"""

import functools
import hashlib
import json
import pathlib
import random

import torch
import triton

from tilewright.bench import sources
from tilewright.registry import Op
from tilewright.tools import emulator

FILE = pathlib.Path(__file__).with_name("passed.json")
SHARE = 10  # one run in so many is repeated


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
    parts = [triton.__version__, torch.__version__]
    return "\n".join([*parts, *(sources.meaning(path.read_text()) for path in sorted(files))])


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


def write(runs, failures):
    """failures: name of a run -> what was wrong, or nothing."""
    passed = {
        group: digest(op)
        for group, (op, names) in groups(runs).items()
        if not any(failures[name] for name in names)
    }
    FILE.write_text(json.dumps(dict(sorted(passed.items())), indent=1) + "\n")
