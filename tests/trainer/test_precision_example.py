"""examples/precision.py: its table, and that it goes on where it ended."""

import dataclasses
import pathlib
import sys

import pytest

for package in ("pydantic", "datasets", "transformers", "tokenizers", "matplotlib"):
    pytest.importorskip(package)

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import precision  # noqa: E402

pytestmark = pytest.mark.packages
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def test_each_precision_is_a_row_and_is_not_trained_twice(tmp_path, monkeypatch, capsys):
    size = dataclasses.replace(precision.SMALL, shape=TINY, steps=3, evaluated=1)
    monkeypatch.setattr(precision, "SMALL", size)
    names = ["float32", "bf16SR", "block_fp8"]
    assert precision.main(["--out", str(tmp_path), "--only", *names[:1]]) == 0
    assert precision.main(["--out", str(tmp_path), "--only", *names]) == 0
    monkeypatch.setattr(precision, "trained", lambda *_: pytest.fail("trained again"))
    capsys.readouterr()
    assert precision.main(["--out", str(tmp_path), "--only", *names]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    table = {cells[0]: cells[1:] for cells in (line.strip("| ").split(" | ") for line in lines[1:])}
    assert [*table] == names
    losses, _, cosines, sizes, by, *_ = zip(*table.values(), strict=True)
    assert len({*losses}) == 3 and all(5 < float(loss) < 8 for loss in losses)
    assert sizes == ("16.0", "8.0", "16.0")
    assert cosines[0] == "1.0000" and all(0.95 < float(c) <= 1 for c in cosines)
    assert by[2] in ("cpp", "eager") and not any(by[:2])
    assert {p.name for p in (tmp_path / "small").glob("*.*")} == {
        "loss.png",
        "rows.jsonl",
        "table.md",
    }


def test_unknown_precisions_are_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        precision.main(["--out", str(tmp_path), "--only", "fp4"])
    assert "unknown ['fp4']; there are float32, bfloat16 products" in capsys.readouterr().err
