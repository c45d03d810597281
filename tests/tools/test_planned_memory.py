"""`python -m bench memory`: what it has measured it keeps."""

import json

import pytest
import torch

pytest.importorskip("pydantic")

from bench import memory
from bench.__main__ import main
from tilewright.trainer.models.model_config import ModelConfig

pytestmark = pytest.mark.packages


@pytest.fixture
def asked(monkeypatch):
    """The layouts and schedules that are measured."""
    found = []

    def measure(layout, schedules, folder):
        for schedule in schedules:
            found.append((layout, schedule))
            sizes = {"planned": 9 << 20, "counted": [10 << 20, 12 << 20]}
            yield schedule, [{"rank": rank, **sizes} for rank in (0, 2)]

    monkeypatch.setattr(memory, "measure", measure)
    return found


def test_a_call_measures_what_has_no_row(asked, tmp_path, capsys):
    given = ["memory", "--out", str(tmp_path), "--layout", "pp x tp"]
    assert main([*given, "--schedule", "GPipe"]) == 0
    assert main([*given, "--schedule", "GPipe,1F1B"]) == 0
    assert asked == [("pp x tp", "GPipe"), ("pp x tp", "1F1B")]
    rows = json.loads((tmp_path / memory.FILE).read_text())["rows"]
    found = [(r["schedule"], r["rank"]) for r in rows]
    assert found == [(schedule, rank) for schedule in ("1F1B", "GPipe") for rank in (0, 2)]
    line = "| pp x tp | 1F1B | 9.00, 9.00 | 10.00, 12.00, 10.00, 12.00 | 0.750 to 0.900 |"
    assert line in (tmp_path / "README.md").read_text() and line in capsys.readouterr().out


def test_routes_are_even():
    shape = ModelConfig.from_hf(memory.EXPERTS)
    routes = memory.even_routes(shape, 12)
    assert routes.shape == (1, 12, 4 * 2)
    assert torch.bincount(routes.flatten().long()).tolist() == [24] * 4


def test_the_committed_plans_are_within_what_the_documentation_says():
    [path] = (memory.ROOT / "bench/results").glob("memory-plan-*/memory.json")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 * len(memory.LAYOUTS) * len(memory.SCHEDULES)
    said = (memory.ROOT / "docs/trainer/memory.md").read_text()
    assert "nine layouts with five schedules" in said
    for row in rows:
        assert row["counted"] == pytest.approx([row["planned"]] * len(row["counted"]), rel=0.1)
