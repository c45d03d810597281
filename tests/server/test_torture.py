"""Kills of a server's processes at chosen points, and what a server without them has done."""

import os
import pathlib

import forked
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from tilewright_lab.server_torture import command, run, schedule, table
from tilewright_lab.server_torture.client import write_model
from tilewright_lab.server_torture.points import KINDS, Place, places

ROOT = pathlib.Path(__file__).parents[2]
SEED = (0, 0)
# Each point, and kinds of requests that differ in what they leave.
TEN = [
    Place("api", "arrived", "create_model"),
    Place("rank 0", "begun", "forward_backward"),
    Place("api", "accepted", "unload_model"),
    Place("rank 0", "applied", "optim_step"),
    Place("rank 0", "replayed", "forward_backward"),
    Place("api", "answered", "sample"),
    Place("rank 0", "committed", "load_weights"),
    Place("rank 0", "applied", "checkpoint"),
    Place("api", "accepted", "abort_gradient_epoch"),
    Place("rank 0", "applied", "save_weights_for_sampler"),
]


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Its processes are forked from one that has imported what they need."""
    folder = tmp_path_factory.mktemp("torture")
    imports = """
import tilewright_lab.server_torture.api, tilewright_lab.server_torture.launcher
import tilewright_lab.server_torture.worker, transformers.models.qwen3.modeling_qwen3
"""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "lab")))
    with forked.python(imports, ROOT, {**os.environ, "PYTHONPATH": paths}) as python:
        yield run.Setting(folder, write_model(folder / "model"), SEED, python=str(python))


@pytest.fixture(scope="module")
def undisturbed(setting):
    record = run.play("reference", setting, TEN, {})
    assert record.stuck is None and not record.seconds
    return record


def test_ten_kills_of_one_server_change_no_bit(setting, undisturbed):
    kills = {i: run.planned(place) for i, place in enumerate(TEN)}
    record = run.play("killed", setting, TEN, kills)
    assert run.verdict(undisturbed, record, len(TEN)) == {}
    assert record.seconds.keys() == kills.keys()
    kinds = {answer.call.kind for answer in record.answers}
    assert kinds == {*KINDS} - {"create_from"}
    assert {answer.call.protobuf for answer in record.answers} == {True, False}
    assert all(answer.content.startswith(b"200 ") for answer in record.answers)
    assert record.files and all(len(rows) > 2 for rows in record.log.values())


@pytest.mark.parametrize("fault", ["lost", "twice"])
def test_a_gradient_that_is_added_twice_is_noticed(fault, setting, undisturbed):
    """Its result is not committed, so that it is computed once more; or it is computed twice after
    a kill. The first result that differs is of the step after it.
    """
    number = {"lost": 1, "twice": 4}[fault]
    place = TEN[number]._replace(fault=fault, point={"lost": "applied"}.get(fault, "replayed"))
    record = run.play(fault, setting, TEN, {number: run.planned(place)})
    wrong = run.verdict(undisturbed, record, len(TEN))
    assert [*wrong] == [number]
    assert "the result of optim_step of" in wrong[number][0]


def test_a_schedule_has_the_requests_of_its_seed_and_every_place_has_its_own():
    every = places(2)

    def made(seed):
        return [*schedule.waves(every, seed, "s", "/base")]

    waves = made((1, 2))
    assert waves == made((1, 2)) and waves != made((1, 3))
    aimed = {wave.number: wave for wave in waves if wave.model is not None}
    assert [*aimed] == [*range(len(every))]
    for number, place in enumerate(every):
        hit = {c.model for c in aimed[number].calls if c.kind == place.kind}
        assert aimed[number].model in hit or place.kind == "checkpoint"
    by_model = {}
    for call in (call for wave in waves for call in wave.calls):
        if isinstance(call.body, dict) and call.body.get("seq_id") and call.kind != "sample":
            by_model.setdefault(call.model, []).append(call.body["seq_id"])
    assert all(numbers == sorted({*numbers}) for numbers in by_model.values())


def test_places_take_turns_and_a_table_says_how_many_there_were(tmp_path, monkeypatch):
    count = len(places(1))
    whole = command.in_turns(1, 5, 0, 2 * count)
    assert {*whole} == {*places(1)} and whole[:count] == whole[count:]
    assert command.in_turns(1, 5, 7, 9) == whole[7:16] and whole != command.in_turns(1, 6, 0, 9)
    file, units = tmp_path / "table.jsonl", table.units()
    monkeypatch.setattr(table, "_now", lambda: {"date": "today"})
    table.Table.read(file).add({units[0]: [3.0, 1.0]}, {})
    again = table.Table.read(file)
    again.add({units[0]: [2.0]}, {units[1]: ["it is another"]})
    rows = table.Table.read(file).rows
    assert again.kills(units) == 3 and [*rows] == units[:2]
    assert (rows[units[0]]["median_s"], rows[units[0]]["max_s"]) == (2.0, 3.0)
    assert rows[units[1]]["kills"] == 0 and rows[units[1]]["wrong"] == ["it is another"]
    monkeypatch.setattr(table, "digest", lambda: "other sources")
    assert again.kills(units) == 0


def test_a_command_that_finds_a_difference_fails(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(command.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "servers"))
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)

    def batch(setting, every):
        asked.append(len(every))
        return run.Record(seconds=dict.fromkeys(range(len(every)), 1.5)), dict(answers.pop(0))

    monkeypatch.setattr(run, "batch", batch)
    given = ["--kills", "50", "--table", str(tmp_path / "table.jsonl")]
    answers = [{}, {3: ["a result is another"]}]
    assert command.main(given) == 1 and asked == [20, 20]
    said = capsys.readouterr().out
    assert "1.5 s in the median" in said and ": a result is another" in said
    answers = [{}, {}]
    assert command.main(given) == 0 and asked[2:] == [20, 6], "three, and what was wrong, count"
