"""The benchmark of training runs: what it gives both trainers is the same, and what it reports."""

import dataclasses
import json

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("pydantic")

from bench import layouts
from bench.llama import Shape
from tilewright.bench import store
from tilewright.trainer.config import load

TINY = Shape(tokens=128, layers=2, hidden=32, inner=48, heads=4, kv_heads=2, vocabulary=96)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    model, data = layouts.write_inputs(tmp_path_factory.mktemp("inputs"), TINY, 3, None)
    return [
        layouts.Job(*which, "process", "float32", "mlp", TINY.tokens, 3, model, data)
        for which in [("transformers",), ("trainer",)]
    ]


def test_both_train_the_same(jobs, tmp_path, monkeypatch):
    """The losses of three steps of AdamW, in one process, at a learning rate at which another beta
    shows. Readings of memory are numbered here: what this process holds is of other tests.
    """
    asked, found = [], []
    monkeypatch.setattr(layouts, "LR", 0.01)
    monkeypatch.setattr(layouts, "status_mib", lambda field: asked.append(field) or len(asked))
    for job in jobs:
        folder = tmp_path / job.provider
        folder.mkdir()
        store.write_json(folder / "job.json", dataclasses.asdict(job))
        store.write_json(folder / "config.yaml", layouts.configuration(job, folder))
        layouts.rank(folder)
        found.append(json.loads((folder / "rank0.json").read_text()))
    theirs, ours = found
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert len(set(ours["losses"])) == 3
    for each in found:
        assert len(each["seconds"]) == 2 and min(each["seconds"]) > 0
        assert len(each["cpu_seconds"]) == 2
    assert asked == ["VmRSS", "VmHWM"] * 2
    assert [(each["imported_mib"], each["peak_mib"]) for each in found] == [(1, 2), (3, 4)]


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_the_trainer_accepts_each_layout(layout, jobs, tmp_path):
    ranks = layouts.LAYOUTS[layout][0]
    job = dataclasses.replace(jobs[1], layout=layout)
    config = layouts.configuration(job, tmp_path)
    store.write_json(tmp_path / "config.yaml", config)
    t = load(str(tmp_path / "config.yaml")).train
    shared = t.tensor_parallel_size * t.pipeline_parallel_size * t.context_parallel_size
    assert ranks % shared == 0 and job.rows == ranks // shared * t.gradient_accumulation_steps


def test_rows_are_of_all_rounds(jobs, monkeypatch):
    """The order of launches is turned around."""
    order = []

    def launch(job):
        order.append(job.provider)
        i = len(order)
        return {
            "seconds": [1.0 * i, 2.0 * i],
            "cpu_seconds": [4.0 / i, 4.0 / i],
            "losses": [3.0, 2.0],
            "peak_mib": 100.0 * i,
            "imported_mib": 50.0,
        }

    monkeypatch.setattr(layouts, "launch", launch)
    theirs, ours = layouts.measure(TINY, jobs, 2)
    assert order == ["transformers", "trainer", "trainer", "transformers"]
    assert ours["samples_s"] == [2.0, 4.0, 3.0, 6.0] and ours["median_s"] == 3.5
    assert ours["tokens_per_second"] == pytest.approx(128 / 3.5)
    assert (theirs["peak_mib"], ours["peak_mib"]) == (400.0, 300.0)
    said = layouts.table([theirs, ours]).splitlines()[-1]
    assert "| 0.86 | 1.7 | 1.50 |" in said and "| 0.75 |" in said


def test_arguments_are_checked(capsys):
    with pytest.raises(SystemExit):
        layouts.main(["--layout", "ddp,zigzag"])
    assert "unknown 'zigzag'" in capsys.readouterr().err
