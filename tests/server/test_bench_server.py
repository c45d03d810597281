"""`python -m bench server`: what its raw file has, of small measures."""

import json
import math

import pytest
import torch.distributed as dist

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from bench import server
from bench.__main__ import main

# What a row has beside the measure's name: numbers that are positive, but for differences.
FIELDS = {
    "kill": {"seconds"},
    "empty": {
        "kind",
        *(f"{n}_{q}_ms" for n in ("request", "fsync", "in_process") for q in ("p50", "p99")),
    },
    "step": {"tokens", "http_s", "in_process_s", "share"},
    "models": {
        *("models", "tokens_of_a_step", "many_tokens_per_s", "one_tokens_per_s", "share"),
        "counted_bytes",
    },
    "wire": {"encoding", "tokens", "bytes", "seconds", "times_protobuf"},
}


def test_each_measure_is_in_the_raw_file_beside_what_it_is_compared_with(tmp_path, capsys):
    try:
        assert main(["server", "--quick", "--out", str(tmp_path)]) == 0
    finally:
        dist.destroy_process_group()
    document = json.loads((tmp_path / "server.json").read_text())
    assert {"device", "versions", "date", "commit"} <= {*document["meta"]}
    assert document["load"]["processors"] >= 1
    rows = document["rows"]
    assert [row["measure"] for row in rows] == [
        "kill",
        *2 * ["empty"],
        "step",
        "models",
        *2 * ["wire"],
    ]
    for row in rows:
        assert FIELDS[row["measure"]] <= {*row}
        values = [row[n] for n in FIELDS[row["measure"]] if not isinstance(row[n], str)]
        assert all(math.isfinite(value) and value > 0 for value in values), row
        assert f"measure {row['measure']}" in capsys.readouterr().out or row is not rows[0]
    sizes = {row["encoding"]: row["bytes"] for row in rows if row["measure"] == "wire"}
    # Tokens of 4 bytes, targets of 8 and weights of 4, and what a datum has beside them.
    assert 16 * 2000 < sizes["protobuf"] < 20 * 2000 and sizes["json"] > 6 * 2000
    assert rows[3]["samples_s"].keys() == {"http", "in_process"}
    assert server.QUICK.rounds == len(rows[3]["shares"])
