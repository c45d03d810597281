"""A server beside the trainer: the same data have the same losses."""

import json

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from serving import LONGEST, Served, write_model, write_server
from training import rows, run, write_config

pytestmark = pytest.mark.packages
STEPS = 4


def test_supervised_training_has_the_losses_of_the_trainer(tmp_path):
    """With adapters, AdamW and clipping; one document a step."""
    folder = write_model(tmp_path / "model")
    draw = np.random.default_rng(3)
    texts = [draw.integers(0, 97, LONGEST).tolist() for _ in range(STEPS)]
    lines = "".join(json.dumps({"input_ids": text}) + "\n" for text in texts)
    (tmp_path / "texts.jsonl").write_text(lines)
    path = write_config(
        tmp_path / "trainer",
        model__model_path=str(folder),
        model__config_path=str(folder),
        data__datasets=[{"path": str(tmp_path / "texts.jsonl"), "type": "tokenized"}],
        data__shuffle_merged_datasets=False,
        data__shuffle_before_merging_datasets=False,
        data__sample_packing_sequence_len=LONGEST,
        train__optimizer="adamw",
        train__lr=2e-2,
        train__max_steps=STEPS,
        train__weight_decay=0.1,
        train__max_grad_norm=0.1,
        train__enable_mixed_precision=False,
        lora__enable_lora=True,
        lora__lora_rank=8,
        lora__lora_alpha=16,
    )
    run(path)
    wanted = [row for row in rows(tmp_path / "trainer") if "loss" in row]
    losses, norms = [], []
    with Served(write_server(tmp_path / "server", folder)) as served:
        adamw = {"learning_rate": 2e-2, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8}
        created = {"model_id": "one", "base_model": served.base, "optimizer_config": adamw}
        created["lora_config"] = {"rank": 8, "alpha": 16, "seed": 42}
        served.result(served.post("create_model", created))
        for step, text in enumerate(texts):
            datum = {"model_input": {"input_ids": text}, "loss_fn_inputs": {"labels": text}}
            own = {"data": [datum], "loss_fn": "causallm_loss"}
            body = {"model_id": "one", "seq_id": 2 * step + 1, "forward_backward_input": own}
            answer = served.result(served.post("forward_backward", body))
            losses.append(answer["metrics"]["loss:sum"] / (len(text) - 1))
            body = {"model_id": "one", "seq_id": 2 * step + 2, "gradient_clip": 0.1}
            norms.append(served.result(served.post("optim_step", body))["metrics"]["grad_norm"])
    assert losses[-1] != losses[0] and norms[0] > 0.1
    np.testing.assert_allclose(losses, [row["loss"] for row in wanted], rtol=1e-5)
    np.testing.assert_allclose(norms, [row["grad_norm"] for row in wanted], rtol=1e-4)
