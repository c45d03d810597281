"""Training with matrices sharded over processes: the same losses, gradients, norms and weights as
in one process.
"""

import functools
import json
import pathlib

import numpy as np
import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import distributed_worker
from test_trainer import MOE, QWEN3, check_moves, fake_group, launch, make_bins, write_config
from torch.distributed.device_mesh import init_device_mesh

from tilewright.ops.context_parallel import ContextParallel
from tilewright.trainer import tensor_parallel
from tilewright.trainer.batches import padding
from tilewright.trainer.config import load
from tilewright.trainer.mesh import Mesh
from tilewright.trainer.model import Ops, Transformer
from tilewright.trainer.model_config import ModelConfig
from tilewright.trainer.tensor_parallel import TensorParallel

SHARDED = {
    "vocab_size": 100,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
}
TIED = {**QWEN3, **SHARDED}
EXPERTS = {**MOE, **SHARDED, "mlp_only_layers": [0]}
APART = {**TIED, "model_type": "llama", "tie_word_embeddings": False}


def arguments(tp, data=None, **more):
    """Of four processes that train on the eight bins of a step in two micro-batches."""
    settings = {
        "train.data_parallel_mode": "fsdp2",
        "train.tensor_parallel_size": tp,
        "train.micro_batch_size": 4 // (4 // tp if data is None else data),
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    return [f"--{name}={value}" for name, value in settings.items()]


RECOMPUTE = {"train__enable_gradient_checkpointing": "true"}
ADAM = {"train__optimizer": "adamw", "train__lr": "1e-3"}
LORA = {"lora__enable_lora": "true", "lora__lora_rank": 4}
MODES = {
    # A checkpoint of the first is read by the second of each shape, and by one process.
    "tied/train_and_save": arguments(2, **ADAM),
    "tied/train_after_loading": arguments(4, **ADAM),
    "apart/train_and_save": arguments(2, 1, **ADAM, train__ringattn_parallel_size=2),
    "apart/train_after_loading": arguments(1, **ADAM, train__data_parallel_replicate_size=2),
    "experts/train_and_save": arguments(1, **ADAM, train__expert_parallel_size=2),
    "experts/train_after_loading": arguments(2, **ADAM, train__expert_parallel_size=4),
    "tied/train_tp": arguments(4, train__enable_full_shard="false"),
    "tied/train_fsdp_tp": arguments(2, model__basic_modules="[mlp]"),
    "apart/train_hsdp_tp": arguments(2, train__data_parallel_shard_size=1, **RECOMPUTE),
    "apart/train_tp_ring": arguments(2, 1, train__ringattn_parallel_size=2),
    "apart/train_tp_ulysses": arguments(
        2, 1, train__ulysses_parallel_size=2, train__cp_fsdp_mode="none", **RECOMPUTE
    ),
    "experts/train_whole": arguments(2, **RECOMPUTE),
    "experts/train_replicas": arguments(2, train__data_parallel_shard_size=1),
    "experts/train_spread": arguments(
        2, train__expert_parallel_size=2, train__moe_checkpoint_method="moe_act", **RECOMPUTE
    ),
    "experts/train_outside": arguments(2, train__expert_parallel_size=2, train__ep_outside="true"),
    "experts/train_ring": arguments(
        2, 1, train__ringattn_parallel_size=2, train__expert_parallel_size=4
    ),
    "adapters/train_tp": arguments(2, **LORA),
    "adapters/train_part": arguments(
        4, **LORA, lora__lora_target_modules="[q_proj,up_proj,down_proj]"
    ),
    "adapted_experts/train_tp": arguments(2, **LORA, train__expert_parallel_size=2),
    "apart/train_in_bfloat16": arguments(2, train__enable_mixed_precision="true", **RECOMPUTE),
    "apart/train_compiled": arguments(2, train__enable_compile="true"),
    "apart/train_compiled_parts": arguments(
        2, 1, train__ringattn_parallel_size=2, train__enable_compile="true"
    ),
}
SHAPES = {
    "tied": TIED,
    "apart": APART,
    "experts": EXPERTS,
    "adapters": TIED,
    "adapted_experts": EXPERTS,
}


def bins():
    """As `make_bins`; the second of two ranks has no labels in the first step."""
    made = make_bins()
    for i in (2, 3, 6, 7):
        for _, labels in made[i]:
            labels[:] = -100
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three steps in four processes in each of those modes, and in one process."""
    root = tmp_path_factory.mktemp("sharded")
    paths = {
        # SGD shows a wrong gradient scale, which AdamW hides; gradients are clipped, too.
        name: write_config(
            root / name,
            shape,
            model__merge_qkv=False,
            train__gradient_accumulation_steps=2,
            train__optimizer="sgd",
            train__lr=0.5,
            train__max_grad_norm=0.2,
            data__pad_to_multiple_of=1,
        )
        for name, shape in SHAPES.items()
    }
    for name in SHAPES:
        torch.save(bins(), root / name / "bins.pt")
    (root / "modes.json").write_text(json.dumps(MODES))
    done = launch(4, [str(pathlib.Path(distributed_worker.__file__))], str(root))
    assert done.returncode == 0, done.stderr[-5000:]
    return root, paths, {mode: torch.load(root / f"{mode}.pt") for mode in MODES}


# What a mode does not change of the training in one process.
SAME = ("train.optimizer=", "train.lr=", "lora.")


@functools.cache
def in_one_process(path, options):
    return distributed_worker.several_steps(load(path, list(options)), Mesh(), bins())[1]


@pytest.mark.parametrize("mode", MODES)
def test_sharded_matrices_train_as_in_one_process(mode, trained):
    _, paths, found = trained
    options = [a for a in MODES[mode] if a.removeprefix("--").startswith(SAME)]
    options.append("--train.micro_batch_size=4")
    found, want = found[mode], in_one_process(paths[mode.partition("/")[0]], tuple(options))
    if mode.endswith("bfloat16"):
        assert found["loss"] != want["loss"]
        np.testing.assert_allclose(found["loss"], want["loss"], rtol=1e-2)
        np.testing.assert_allclose(found["norm"], want["norm"], rtol=3e-2)
        return
    np.testing.assert_allclose(found["loss"], want["loss"], rtol=1e-5)
    np.testing.assert_allclose(found["norm"], want["norm"], rtol=1e-5)
    for kind in ("grads", "weights"):
        assert found[kind].keys() == want[kind].keys()
        # AdamW divides by the gradient's size, which amplifies rounding errors of small gradients.
        limit = 1e-3 if kind == "weights" and "--train.optimizer=adamw" in options else 1e-5
        for name, value in want[kind].items():
            assert (found[kind][name] - value).abs().max() <= limit * value.abs().max(), name


@pytest.mark.parametrize("shape", ["tied", "apart", "experts"])
def test_checkpoints_move_between_layouts(shape, trained):
    """Weights and moments, and Hugging Face's files, bit for bit: into another layout and into one
    process.
    """
    root, paths, found = trained
    alike = {mode.partition("/")[2]: f for mode, f in found.items() if mode.startswith(f"{shape}/")}
    check_moves((root / shape, paths[shape], alike, None), "--model.merge_qkv=false")


# ---- in one process


def model_of(shape):
    return Transformer(ModelConfig.from_hf(shape), Ops.resolve(), merge_qkv=False)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "6 query heads do not divide by 4"),
        ({"num_key_value_heads": 2}, "2 key-value heads do not divide by 4"),
        ({"intermediate_size": 50}, "50 columns of the MLP do not divide by 4"),
        ({"vocab_size": 97}, "97 tokens of the vocabulary do not divide by 4"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_one_sentence(change, sentence):
    shape = ModelConfig.from_hf({**TIED, **change})
    with pytest.raises(ValueError, match=f"tensor_parallel_size = 4: the model's {sentence}"):
        tensor_parallel.check(shape, 4)
    tensor_parallel.check(ModelConfig.from_hf(TIED), 4)


def test_sizes_that_fsdp2_cannot_shard_are_one_sentence():
    with fake_group(8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("shard", "tp"))
        with torch.device("meta"):
            model = model_of({**TIED, "hidden_size": 34})
        tensor_parallel.shard_matrices(model, mesh["tp"])
        tensor_parallel.check_shards(model, 2)
        with pytest.raises(ValueError, match=r"embed_tokens.weight has 34 columns, which do not"):
            tensor_parallel.check_shards(model, 4)


def test_heads_are_divided_among_tensor_parallel_and_ulysses_ranks():
    model = model_of(TIED)
    model.tp = TensorParallel(size=4)
    with pytest.raises(ValueError, match=r"model's 2 query heads of a tensor-parallel rank \(of 4"):
        model.spread_sequence(ContextParallel(4))
    model.spread_sequence(ContextParallel(2))


def test_sequences_are_padded_to_a_multiple_of_all_ranks():
    assert padding(6, ContextParallel(2, 2), 3) == 24 and padding(1, ContextParallel(), 4) == 4
    embedding = tensor_parallel.VocabularyEmbedding(4, 2)
    embedding.tp = TensorParallel(size=4)
    with pytest.raises(ValueError, match="tensor_parallel_size = 4: 6 tokens of a sequence"):
        embedding(torch.zeros(1, 6, dtype=torch.int64))
