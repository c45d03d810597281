"""`python -m bench optim`, at its smallest."""

import json

from bench import optim
from bench.__main__ import main
from tilewright.core import platform


def test_every_way_has_its_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(platform, "no_module", lambda name: f"no {name} here")  # it would compile
    assert main(["optim", "--quick", "--out", str(tmp_path)]) == 0
    made = json.loads((tmp_path / "optim.json").read_text())
    rows = {row["way"]: row for row in made["rows"]}
    assert rows.keys() == optim.BYTES.keys() - {"bf16SR torchao"}
    assert rows["float32"]["times_as_fast_as_float32"] == 1.0
    for row in rows.values():
        assert len(row["seconds"]) == optim.QUICK.rounds and min(row["seconds"]) > 0
    assert "bf16SR" in capsys.readouterr().out
