"""What shows that a run is right is imported by the runs whose fields ask for it."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import pairs
from ranks import ROOT
from training import MOE, QWEN3, run, write_config

pytestmark = pytest.mark.packages
# Prints, for each run of a command line, the modules that are there after it.
RUNS = """
import json, sys
from tilewright.trainer import train

package = "tilewright.trainer.plugins.proof."
for given in json.loads(sys.argv[1]):
    assert train.main(given) == 0
    print("modules", *(n.removeprefix(package) for n in sys.modules if n.startswith(package)))
"""


def test_what_a_field_has_switched_off_is_not_imported(tmp_path):
    """The runs follow one another in a fresh process."""
    few = {"train__max_steps": 2, "train__save_strategy": "no", "train__save_hf_weights": False}

    def written(name, shape, rows, kind, **changes):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"data__datasets": [{"path": str(file), "type": kind}]}
        off = {"train__certify": False}
        return write_config(tmp_path / name, shape, **few, **off, **data, **changes)

    plain = write_config(tmp_path / "plain", QWEN3, **few)
    replay = {"train__router_replay": True, "train__router_replay_compare_steps": 1}
    preferred = pairs.rows(4, 1), "preference_tokenized"
    routed = {"input_ids": [*range(8)], "routed_experts": [[[0, 1], [2, 3]]] * 8}
    first = tmp_path / "first"
    asserts = f"--train.assert_deterministic={first}"
    # The options of each, and what it is the first to import.
    runs = [
        ([plain, "--train.certify=false"], set()),
        ([written("pairs", QWEN3, *preferred, train__loss="preference")], {"step_zero"}),
        ([written("routes", MOE, [routed] * 4, "tokenized", **replay)], {"replay"}),
        ([plain, f"--train.output_dir={tmp_path / 'as_it_is'}"], {"certificate", "checksums"}),
        (
            [plain, f"--train.output_dir={first}", "--train.checksum_steps=1"],
            {"recorder", "computation"},
        ),
        (
            [plain, f"--train.output_dir={tmp_path / 'again'}", asserts],
            {"assertion"},
        ),
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUNS, json.dumps([given for given, _ in runs])],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [{*s.split()[1:]} for s in done.stdout.splitlines() if s.startswith("modules")]
    assert [now - before for before, now in zip([set(), *lines], lines, strict=False)] == [
        own for _, own in runs
    ]
    assert "logprob_difference=" in done.stdout and "deterministic: 2 steps are" in done.stdout
    assert "have margins of exactly 0" in done.stdout


def test_a_run_without_a_certificate_leaves_none_of_its_steps(tmp_path):
    """What an earlier run in the folder has certified is of other weights."""
    folder = tmp_path / "out"
    path = write_config(tmp_path, train__max_steps=2, train__save_hf_weights=False)
    folder.mkdir()
    for name in ("certificate.json", "certificate_1.json"):
        (folder / name).write_text("{}")
    run(path, "--train.certify=false")
    assert not [*folder.glob("certificate*")]
