"""Pipelines of stages train as one process does."""

import json
import pathlib

import numpy as np
import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import distributed_worker
from test_trainer import MOE, QWEN3, launch, make_bins, write_config

from tilewright.trainer.config import load
from tilewright.trainer.mesh import Mesh

DENSE = {**QWEN3, "num_hidden_layers": 4}  # tied embeddings
SPARSE = {**MOE, "num_hidden_layers": 4, "tie_word_embeddings": False}


def pipelined(stages, schedule="1F1B", **more):
    """Arguments with which four processes train on the eight bins of a step."""
    data = 4 // stages // more.get("ringattn_parallel_size", 1)
    settings = {
        "data_parallel_mode": "fsdp2",
        "pipeline_parallel_size": stages,
        "pipeline_parallel_schedule": schedule,
        "gradient_accumulation_steps": 8 // data // more.get("micro_batch_size", 1),
        **more,
    }
    return [f"--train.{name}={json.dumps(value)}" for name, value in settings.items()]


INTERLEAVED = {"virtual_pipeline_size": 2}
LAYOUTS = {
    "train_1f1b": pipelined(4),
    "train_fsdp": pipelined(2),
    "train_gpipe": pipelined(2, "GPipe", pipeline_split=[1, 3], micro_batch_size=2),
    "train_replicas": pipelined(2, data_parallel_replicate_size=2, pp_variable_seq_lengths=False),
    "train_interleaved": pipelined(2, "Interleaved1F1B", **INTERLEAVED),
    "train_zero_bubble": pipelined(2, "InterleavedZeroBubble", **INTERLEAVED),
}
RECOMPUTE = {"enable_gradient_checkpointing": True}
MODES = {
    **{f"dense/{name}": arguments for name, arguments in LAYOUTS.items()},
    **{
        f"sparse/{name}": arguments
        for name, arguments in {
            "train_fsdp": pipelined(2, **RECOMPUTE),
            "train_v": pipelined(2, "ZBVZeroBubble", **INTERLEAVED),
            "train_experts": pipelined(2, expert_parallel_size=2),
            "train_ring": pipelined(2, ringattn_parallel_size=2),
        }.items()
    },
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Four steps in four processes in each of those modes, and in one process."""
    folder, alone = tmp_path_factory.mktemp("pipelines"), {}
    for kind, shape in (("dense", DENSE), ("sparse", SPARSE)):
        path = write_config(
            folder / kind,
            shape,
            train__optimizer="sgd",
            train__lr=0.5,
            train__max_grad_norm=0.2,
            data__pad_to_multiple_of=1,
        )
        torch.save(make_bins(), folder / kind / "bins.pt")
        config = load(path, ["--train.micro_batch_size=8"])
        alone[kind] = distributed_worker.several_steps(config, Mesh(), make_bins())[1]
    (folder / "modes.json").write_text(json.dumps(MODES))
    done = launch(4, [str(pathlib.Path(distributed_worker.__file__))], str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return {mode: torch.load(folder / f"{mode}.pt") for mode in MODES}, alone


@pytest.mark.parametrize("mode", MODES)
def test_a_pipeline_trains_as_one_process(mode, trained):
    found, want = trained[0][mode], trained[1][mode.partition("/")[0]]
    assert min(want["norm"]) > 0.4  # twice the clipping norm
    np.testing.assert_allclose(found["loss"], want["loss"], rtol=1e-5)
    np.testing.assert_allclose(found["norm"], want["norm"], rtol=1e-5)
    for kind in ("grads", "weights"):
        assert found[kind].keys() == want[kind].keys()
        for name, t in want[kind].items():
            assert (found[kind][name] - t).abs().max() <= 1e-5 * t.abs().max(), name
    for a, b in zip(found["router"], want["router"], strict=True):
        assert a.keys() == b.keys() and a["expert_load"] == pytest.approx(b["expert_load"], rel=0.3)
