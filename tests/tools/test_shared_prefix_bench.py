"""The benchmark of shared prompts: both take the same steps."""

import functools
import json

import pytest

from bench import shared_prefix
from bench.__main__ import main

pytest.importorskip("pydantic")
pytest.importorskip("datasets")
pytest.importorskip("transformers")
pytestmark = pytest.mark.packages


def test_passes_with_shared_prompts_have_the_same_log_probabilities(tmp_path, capsys, monkeypatch):
    small = functools.partial(shared_prefix.Shape, vocabulary=512)
    monkeypatch.setattr(shared_prefix, "Shape", small)
    options = {"layers": 1, "tokens": 36, "rounds": 2, "out": tmp_path}
    arguments = [str(x) for name, value in options.items() for x in (f"--{name}", value)]
    assert main(["shared-prefix", *arguments]) == 0, "they agree"
    rows = json.loads((tmp_path / "shared_prefix.json").read_text())["rows"]
    assert [r["prompt_to_answer"] for r in rows] == ["1:1", "3:1", "8:1"]
    for row, prompt in zip(rows, (18, 27, 32), strict=True):
        assert row["tokens"] == 2 * 2 * 36
        assert row["tokens_shared"] == row["tokens"] - 2 * (prompt - 1)  # all but its last token
        assert len(row["samples_s"]) == len(row["samples_shared_s"]) == 2
        assert row["logprobs_differ"] < 1e-5
        assert row["saved"] == 1 - row["median_shared_s"] / row["median_s"]
    assert "of what they promise" in capsys.readouterr().out
