"""A server without adapters: one model, whose weights all train."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from serving import PLAIN, Served, documents, passed, trained, write_server
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.packages
IDS = torch.arange(24)[None] % 97


def write(folder, model_folder, **changes):
    return write_server(folder, model_folder, lora_rank=None, enable_lora=False, **changes)


def logits(served):
    with torch.no_grad():
        return served.workers.models.engine.model(IDS)


def test_all_weights_learn_and_are_exported(model_folder, tmp_path):
    with Served(write(tmp_path, model_folder)) as served:
        model, base = served.model(), logits(served)
        trained(served, model, 2)
        want = logits(served)
        norms = (
            served.result(served.passes(model, 7, documents()))
            and served.result(served.step(model, 8, learning_rate=0.0))["metrics"]
        )
        assert {"grad_norm/attention", "grad_norm/mlp", "grad_norm/norms"} < {*norms}
        save = {"model_id": model, "path": "last"}
        served.result(served.post("save_weights_for_sampler", save))
        folder = served.root / f"models/{model}/sampler_weights/last/model"
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(loaded(IDS).logits, want, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(base, want, atol=1e-2)
        full = {"model_id": model, "name": "whole", "dtype": "float32"}
        status, answer = served.at_once("save_full_weights_safetensors", full)
        assert status == 200 and answer["dtype"] == "float32" and answer["num_shards"] == 1
        info = served.post("get_info", {"model_id": model})[1]
        assert info["is_lora"] is False and info["lora_rank"] is None
        # The base answers as it was, and so do weights that were saved.
        session = model.partition(":")[0]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": IDS[0].tolist()}]}
        for number, (own, expected) in enumerate(
            (
                ({"base_model": served.base}, base),
                ({"model_path": f"tinker://{model}/sampler_weights/last"}, want),
            )
        ):
            sampler = {"session_id": session, "sampling_session_seq_id": number, **own}
            name = served.post("create_sampling_session", sampler)[1]["sampling_session_id"]
            body = {"sampling_session_id": name, "seq_id": 0, "prompt": prompt}
            body |= {"sampling_params": {"max_tokens": 1}, "prompt_logprobs": True}
            found = served.result(served.post("asample", body))["prompt_logprobs"][1:]
            lp = expected[0, :-1].log_softmax(-1).gather(1, IDS[0, 1:, None])[:, 0]
            np.testing.assert_allclose(found, lp, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits(served), want)


def test_there_is_one_model_at_a_time_and_each_begins_with_the_base(model_folder, tmp_path):
    with Served(write(tmp_path, model_folder)) as served:
        model = served.model()
        first = trained(served, model, 1)
        body = {"session_id": "other", "model_seq_id": 0, "base_model": served.base}
        answer = served.result(served.post("create_model", body))
        assert answer["category"] == "user" and f"which is {model}" in answer["error"]
        served.result(served.post("unload_model", {"model_id": model}))
        assert trained(served, served.model(), 1) == first


def test_a_model_of_all_weights_goes_on_after_a_kill_and_from_a_checkpoint(model_folder, tmp_path):
    with Served(write(tmp_path / "straight", model_folder)) as served:
        wanted = trained(served, served.model(), 4)
    file = write(tmp_path / "killed", model_folder, checkpoint_every=2)
    with Served(file) as served:
        model = served.model()
        found = trained(served, model, 3)
        save = {"model_id": model, "path": "three"}
        path = served.result(served.post("save_weights", save))["path"]
    with Served(file) as served:
        assert found + trained(served, model, 1, first=10, seed=6) == wanted
        load = {"model_id": model, "seq_id": 13, "path": path, "optimizer": True}
        served.result(served.post("load_weights", load))
        again = trained(served, model, 1, first=14, seed=6)
        assert again == wanted[9:]


def test_ranks_that_share_all_weights_train_as_one_process(model_folder, tmp_path):
    """By FSDP2 on one process: the same losses as without, within rounding."""
    found = []
    for mode in ("none", "fsdp2"):
        file = write(tmp_path / mode, model_folder, **{**PLAIN, "data_parallel_mode": mode})
        with Served(file) as served:
            model = served.model()
            own = trained(served, model, 2)
            found.append([passed(one)[0]["loss:sum"] for one in own if isinstance(one, bytes)])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)


def test_adapters_are_exported_merged(model_folder, tmp_path):
    with Served(write_server(tmp_path, model_folder)) as served:
        model = served.model()
        trained(served, model, 2)
        full = {"model_id": model, "name": "merged", "dtype": "float32"}
        status, answer = served.at_once("save_full_weights_safetensors", full)
        assert status == 200, json.dumps(answer)
        folder = served.root / f"models/{model}/sampler_weights/merged/model"
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(loaded(IDS).logits, logits(served), rtol=1e-4, atol=1e-4)
        # And in the JSON dialect, whose answers have the names of that.
        served.result(served.post("create_model", {"model_id": "one", "base_model": served.base}))
        full |= {"model_id": "one", "dtype": "bfloat16"}
        path = "xorl://one/sampler_weights/merged"
        assert served.at_once("save_full_weights_safetensors", full)[1] == {
            "path": path,
            "model_path": path,
            "num_shards": 1,
            "dtype": "bfloat16",
        }
