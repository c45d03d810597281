"""Candidates that the compile gate rejects leave the search spaces."""

import contextlib
import json

import pytest

pytest.importorskip("triton")

from tilewright.kernels import tuning
from tilewright.ops import OPS
from tilewright_lab.gate import space as gate_space
from tilewright_lab.gate.compilers import Facts, Result, collect

ROPE = {"rope": OPS["rope"]}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """An empty list of rejected candidates."""
    path = tmp_path / "rejected.json"
    path.write_text("[\n]\n")
    monkeypatch.setattr(tuning, "REJECTED", path)
    tuning.rejected.cache_clear()
    with contextlib.ExitStack() as stack:
        stack.callback(tuning.rejected.cache_clear)
        yield path


def result(name, arch, spill=0):
    return Result(name, arch, Facts(32, spill, spill, 0, 128, 128, ()))


def running(monkeypatch, version):
    """A process of this Triton."""
    monkeypatch.setattr(tuning.platform, "describe", lambda: {"triton": version})
    tuning.rejected.cache_clear()


def test_a_candidate_that_spills_leaves_the_space_of_its_architecture(table, monkeypatch):
    specs = collect(ROPE.values(), space=True)
    by_spec = gate_space.candidates(ROPE.values())
    assert set(specs) <= set(by_spec)
    [tunable] = {t.name: t for i in OPS["rope"].implementations for t in i.tunables()}.values()
    key = tunable.named(tunable.keys[0])
    _, *others = tunable.candidates(90, **key)
    name, bad = next((n, c) for n, c in by_spec.items() if n in specs and c.config == others[0])
    rest = [n for n in specs if n != name]
    results = [result(name, 90, spill=8), *(result(n, 90) for n in rest)]
    assert gate_space.write(ROPE.values(), "3.6.0", results, specs) == 1
    [row] = json.loads(table.read_text())
    assert row == {
        "launch": tunable.name,
        "arch": 90,
        "triton": "3.6.0",
        "key": bad.key,
        "config": bad.config,
    }
    running(monkeypatch, "3.6.0")
    named = bad.key
    assert bad.config not in tunable.candidates(90, **named)
    assert bad.config in tunable.candidates(100, **named)
    assert bad.config in tunable.candidates(**named)
    assert tunable.candidates(90, **named)[0] == tunable.heuristic(**named)
    # The gate does not compile it again; another Triton's verdict stays when it is written anew.
    tasks = [(name, 90), (name, 100), (rest[0], 90)]
    assert gate_space.known(ROPE.values(), tasks) == {(name, 90)}
    assert gate_space.write(ROPE.values(), "3.9.0", [result(name, 90)], specs) == 1
    assert gate_space.write(ROPE.values(), "3.6.0", [result(name, 90)], specs) == 0


def test_a_candidate_leaves_the_space_of_the_triton_under_which_it_spills(table, monkeypatch):
    """For a Triton that the gate did not run, it leaves if it spills under any."""
    [tunable] = {t.name: t for i in OPS["rope"].implementations for t in i.tunables()}.values()
    key = tunable.named(tunable.keys[0])
    usual, under_36, under_39, *_ = tunable.candidates(**key)
    rows = [
        {"launch": tunable.name, "arch": 90, "triton": version, "key": key, "config": config}
        for version, config in (("3.6.0", under_36), ("3.9.0", under_39))
    ]
    table.write_text(json.dumps(rows))
    for version, gone in (
        ("3.6.0", [under_36]),
        ("3.9.0+cpu", [under_39]),
        ("3.7.0", [under_36, under_39]),
    ):
        running(monkeypatch, version)
        left = tunable.candidates(90, **key)
        assert [c for c in (usual, under_36, under_39) if c not in left] == gone, version


def test_the_committed_list_is_of_launches_that_exist():
    tunables = {t.name: t for op in OPS.values() for i in op.implementations for t in i.tunables()}
    for row in json.loads(tuning.REJECTED.read_text()):
        tunable = tunables[row["launch"]]
        assert set(row["key"]) == set(tunable.fields)
        assert set(row["config"]) == set(tunable.heuristic(**row["key"]))
        assert row["config"] != tunable.heuristic(**row["key"])
