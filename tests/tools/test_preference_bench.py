"""The benchmark of preference training: the trainer and TRL take the same steps."""

import functools
import json

import forked
import pytest

from bench import preference
from bench.__main__ import main

pytest.importorskip("pydantic")
pytest.importorskip("datasets")
pytest.importorskip("trl")
pytestmark = pytest.mark.packages

# The imports of both, and of what counts.
IMPORTS = """
import bench.predicted.step, bench.preference, tilewright.trainer.train
import datasets, transformers.models.llama.modeling_llama, trl.trainer.dpo_trainer
"""


@pytest.fixture(scope="module", autouse=True)
def forks():
    with forked.starts(preference, IMPORTS):
        yield


def call(*flags, **options):
    arguments = [str(x) for name, value in options.items() for x in (f"--{name}", value)]
    return main(["preference", *flags, *arguments])


def test_the_trainer_and_trl_take_the_same_steps(tmp_path, capsys, monkeypatch):
    small = functools.partial(preference.Shape, vocabulary=4096)
    monkeypatch.setattr(preference, "Shape", small)
    assert call(layers=1, tokens=32, steps=3, rounds=1, out=tmp_path) == 0, "losses agree"
    document = json.loads((tmp_path / "preference.json").read_text())
    rows = {(row["provider"], row["recomputed"]): row for row in document["rows"]}
    pairs = [("nothing", "nothing"), ("mlp", "nothing"), ("layers", "layers")]
    assert [(c["trainer"], c["trl"]) for c in document["comparisons"]] == pairs
    for found in document["comparisons"]:
        ours, theirs = rows["trainer", found["trainer"]], rows["trl", found["trl"]]
        assert 0 < found["losses_differ"] < 1e-4 and len({*ours["losses"]}) == 3
        assert ours["losses"][0] == pytest.approx(theirs["losses"][0], rel=1e-7)
        assert found["times_as_fast"] == pytest.approx(theirs["median_s"] / ours["median_s"])
        assert 0 < ours["above_mib"] < ours["peak_mib"] and ours["timed_above_mib"] > 0
    assert "times_as_fast" in capsys.readouterr().out


def test_a_step_is_counted_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(preference, "PROVIDERS", (("trainer", "nothing"), ("trl", "nothing")))
    tokens = 64  # so that a pair fills its bin, which is padded to a multiple of 128
    assert call("--count", layers=1, tokens=tokens, out=tmp_path) == 0
    rows = json.loads((tmp_path / "counted.json").read_text())["rows"]
    [ours, theirs] = [r for r in rows if r["products"] == "bfloat16"]
    layer = 2 * 2 * tokens * 576 * (960 + 576 + 3 * 1536)  # of two documents
    head = 2 * 2 * tokens * 576 * 49152
    # The reference's forward, the policy's, and two products for each in backward, in which the
    # trainer computes the logits again; TRL's head has the answers alone, three quarters.
    assert ours["tflop"] * 1e12 == 4 * layer + 5 * head
    assert theirs["tflop"] * 1e12 == pytest.approx(4 * layer + 4 * 0.75 * head, rel=0.05)
    assert ours["by_name"]["triton::_backward_q"] == 1, "attention is one of its kernels"
    assert 0 < ours["launches"] < theirs["launches"]
    assert all(r["peak_mib"] > 4 * 4 * 28e6 / 2**20 for r in rows), "two weights, two states"
