"""The benchmark of preference training: the trainer and TRL take the same steps."""

import json

import pytest

from bench.__main__ import main

pytest.importorskip("pydantic")
pytest.importorskip("datasets")
pytest.importorskip("trl")
pytestmark = pytest.mark.packages


def test_the_trainer_and_trl_take_the_same_steps(tmp_path, capsys):
    options = {"layers": 1, "tokens": 32, "steps": 3, "rounds": 1, "out": tmp_path}
    arguments = [str(x) for name, value in options.items() for x in (f"--{name}", value)]
    assert main(["preference", *arguments]) == 0, "losses agree"
    document = json.loads((tmp_path / "preference.json").read_text())
    rows = {(row["provider"], row["recomputed"]): row for row in document["rows"]}
    assert [(c["trainer"], c["trl"]) for c in document["comparisons"]] == [
        ("nothing", "nothing"),
        ("mlp", "nothing"),
        ("layers", "layers"),
    ]
    for found in document["comparisons"]:
        ours, theirs = rows["trainer", found["trainer"]], rows["trl", found["trl"]]
        assert 0 < found["losses_differ"] < 1e-4 and len({*ours["losses"]}) == 3
        assert ours["losses"][0] == pytest.approx(theirs["losses"][0], rel=1e-7)
        assert found["times_as_fast"] == pytest.approx(theirs["median_s"] / ours["median_s"])
        assert 0 < ours["above_mib"] < ours["peak_mib"]
    assert "times_as_fast" in capsys.readouterr().out
