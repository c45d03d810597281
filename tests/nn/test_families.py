"""A sample of `python -m tests.families accelerated`: one family for each way in which families
differ. After `accelerate`, every call that works without it gives the same result.
"""

import pytest
from helpers import keep_tables

from tests.families import accelerated, each

pytestmark = pytest.mark.packages

# What they are a sample of, and what accelerate leaves of them beside what a model has not.
SAMPLE = {
    ("llama", "causal"): ("grouped heads", ()),
    ("gemma2", "causal"): ("softcaps, windows, and eager attention by default", ()),
    ("gpt_oss", "causal"): ("sinks, experts with biases", ()),
    ("deepseek_v3", "causal"): ("latent attention, interleaved rotation", ()),
    ("gpt2", "causal"): ("dropout of attention in training, learned positions", ()),
    ("mamba", "causal"): ("no attention", ("attention",)),
    ("qwen4_exp_text", "causal"): ("computes with its mask", ("attention", "norm")),
    ("bert", "masked"): ("sees later tokens", ("loss",)),
    ("modernbert", "masked"): ("windows to both sides", ("loss",)),
    ("t5", "seq2seq"): ("an encoder and a decoder", ("attention", "loss", "norm", "mlp")),
    ("chameleon", "image-text"): ("writes into its logits", ()),
    ("qwen2_vl", "image-text"): ("positions on three axes", ()),
}


@pytest.mark.parametrize("family, head", SAMPLE)
def test_what_worked_before_accelerate_works_the_same(family, head, monkeypatch):
    keep_tables(monkeypatch)
    row = accelerated.check(family, head)
    assert "calls" in row, row
    wrong = {n: found for n, found in row["calls"].items() if found not in ("same", "no")}
    assert not wrong, (wrong, row["causes"])
    assert sum(found == "same" for found in row["calls"].values()) >= 10, row["calls"]
    assert set(row["restored"].values()) == {"same"}
    left = {part for part, said in row["parts"].items() if not said.startswith("changed")}
    none = {part for part, said in row["parts"].items() if "has none" in said}
    assert left - none <= set(SAMPLE[family, head][1]), row["parts"]


def test_a_difference_is_seen(monkeypatch):
    """The sweep itself, against a planted fault of each kind."""
    keep_tables(monkeypatch)
    layers, rmsnorm = accelerated.integration.layers, accelerated.integration.layers.ops.rmsnorm
    monkeypatch.setattr(layers.ops, "rmsnorm", lambda x, *a, **k: rmsnorm(x, *a, **k) * 1.001)
    row = accelerated.check("llama", "causal", {"eval", "train", "greedy"})
    assert row["calls"]["eval"].startswith("wrong") and row["calls"]["train"].startswith("wrong")
    assert set(row["causes"]) == {"norm"}

    def refuse(*arguments, **options):
        raise ValueError("planted")

    monkeypatch.setattr(layers.ops, "rmsnorm", refuse)
    row = accelerated.check("llama", "causal", {"eval"})
    assert row["calls"]["eval"] == "refused: ValueError: planted"


def test_the_committed_table_is_of_all_families_and_its_page_is_of_it():
    """Whoever installs another transformers writes it again; for the version of the table, each
    family stands there.
    """
    table = each.table_of("accelerated")
    rows = table.rows()
    assert (table.file.parent / "README.md").read_text() == accelerated.table([*rows.values()])
    (first, *_) = rows.values()
    if first["versions"]["transformers"] != each.versions("accelerated")["transformers"]:
        pytest.skip(f"the table is of transformers {first['versions']['transformers']}")
    assert each.SWEEPS["accelerated"].digests().keys() <= rows.keys()
