"""`python -m bench rollout`: what its raw file has, of small measures."""

import json
import math
import statistics

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from bench.__main__ import main

pytestmark = pytest.mark.packages


def test_each_measure_is_in_the_raw_file_beside_what_it_is_compared_with(tmp_path):
    assert main(["rollout", "--quick", "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "rollout.json").read_text())
    assert {"device", "versions", "date", "commit"} <= {*document["meta"]}
    sample, switch, publish, sync = document["rows"]
    measures = [row["measure"] for row in document["rows"]]
    assert measures == ["sample", "switch", "publish", "sync"]
    assert sample["new_tokens"] == switch["new_tokens"] == 7
    rates = sample["samples_tokens_per_s"]
    assert [*rates] == ["embedded", "one_by_one", "one_batch"]
    for other in ("one_by_one", "one_batch"):
        ratio = rates["embedded"][0] / rates[other][0]
        assert sample[f"times_{other}"] == pytest.approx(ratio)
    assert [*switch["samples_tokens_per_s"]] == ["two_adapters", "one_adapter"]
    assert 0 < publish["saved_s"] < publish["first_tokens_s"] < math.inf
    rates = sync["samples_bytes_per_s"]
    ratios = [a / b for a, b in zip(rates["sync"], rates["broadcast"], strict=True)]
    assert len(ratios) == 4
    assert sync["of_broadcast"] == pytest.approx(statistics.median(ratios))
    assert sync["bytes"] > sync["largest_tensor_bytes"] > 0
