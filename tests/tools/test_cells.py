"""What the tests of all ops cover: numbers that do not fall when files move or ops change."""

import json
import pathlib
import re
import subprocess
import sys

FILE = pathlib.Path(__file__).parents[1] / "cells.json"
# The tests whose cases are counted: (op, implementation, case, dtype) for the contract and for
# what is beyond 2^31 elements; (op, implementation) for the rest, each over many calls.
COUNTED = {
    "contract": "test_matches_eager",
    "contract beyond 2^31 elements": "test_matches_eager_beyond_2_31_elements",
    "CUDA graph": "test_cuda_graph_capture",
    "opcheck": "test_operators_pass_opcheck",
    "one graph": "test_compiles_as_one_graph_and_gives_the_same",
    "Inductor": "test_auto_compiles_through_inductor",
    "checkpointing": "test_recomputes_the_same_under_checkpointing",
    "autocast": "test_autocast_does_what_the_op_declares",
    "strides": "test_strides_change_nothing_or_are_refused_by_name",
    "second derivative": "test_a_second_derivative_is_right_or_refused",
}


def cells(session):
    """How many cases each of the counted tests has, as pytest collects them: in this session, if it
    has all of their files, else in another one.
    """
    tests = FILE.parent / "ops"
    files = [p for p in sorted(tests.glob("test_*.py")) if mentions(p.read_text())]
    options, items = session.config.option, session.items
    chosen = options.keyword or options.markexpr or options.deselect
    if not chosen and {item.path for item in items} >= {*files}:
        names = [item.originalname for item in items if item.path in files and "[" in item.name]
    else:
        command = "-m pytest --collect-only -q -n 0 -p no:cacheprovider"
        collected = subprocess.run(
            [sys.executable, *command.split(), *map(str, files)],
            cwd=FILE.parents[1],
            capture_output=True,
            text=True,
        )
        assert collected.returncode == 0, collected.stdout[-2000:] + collected.stderr[-2000:]
        names = re.findall(r"::(\w+)\[", collected.stdout)
    return {kind: names.count(test) for kind, test in COUNTED.items()}


def mentions(source):
    return any(f"def {test}(" in source for test in COUNTED.values())


def test_cells_do_not_fall(request, capsys):
    now, held = cells(request.session), json.loads(FILE.read_text())
    with capsys.disabled():
        print("\ncells: " + ", ".join(f"{n} {kind}" for kind, n in now.items()))
    fallen = {kind: (n, now.get(kind, 0)) for kind, n in held.items() if now.get(kind, 0) < n}
    assert not fallen, f"fewer than in {FILE.name} (before, now): {fallen}"
    assert now == held, f"more than in {FILE.name}: write {now}"


def test_what_make_quick_runs_is_there():
    root = FILE.parents[1]
    lines = (FILE.parent / "quick.txt").read_text().split("\n")[:-1]
    assert len(set(lines)) == len(lines) > 50
    for line in lines:
        path, _, test = line.partition("::")
        source = (root / path).read_text()
        assert not test or f"def {test.partition('[')[0]}(" in source, line
