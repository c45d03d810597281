"""Small runs of the trainer: their configurations, and what they leave."""

import contextlib
import json
import math

import distributed_worker
import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from whole import built, data_of, parts_of

from tilewright.trainer import train
from tilewright.trainer.checkpoint import checkpoint, hf
from tilewright.trainer.config import load
from tilewright.trainer.data import batches
from tilewright.trainer.engine import Engine
from tilewright.trainer.losses.language_modeling import language_modeling
from tilewright.trainer.models.model import Ops, Transformer
from tilewright.trainer.optim import optim
from tilewright.trainer.parallel.mesh import Mesh, join
from tilewright.trainer.parallel.parts import Parts

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


def write_config(folder, shape=QWEN3, **changes):
    """A configuration of a small run on synthetic tokens; changes as train__lr=..."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model/config.json").write_text(json.dumps(shape))
    tree = {
        "model": {"config_path": str(folder / "model")},
        "data": {
            "datasets": [{"path": "dummy"}],
            "sample_packing_sequence_len": 32,
            "dataset_prepared_path": str(folder / "prepared"),
            "pad_to_multiple_of": 8,
        },
        "train": {
            "output_dir": str(folder / "out"),
            "data_parallel_mode": "none",
            "lr": 1e-2,
            "max_steps": 6,
            "enable_mixed_precision": False,
            "enable_gradient_checkpointing": False,
            "save_epochs": 0,
            # A collection goes through all that the tests' process holds.
            "gc_steps": 0,
        },
    }
    for key, value in changes.items():
        section, name = key.split("__")
        tree.setdefault(section, {})[name] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return str(folder / "config.yaml")


def shape_of(config):
    return hf.load_config(config.model.config_path)


def rows(folder):
    return [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


def tensors(folder, step):
    from safetensors.torch import load_file

    return load_file(folder / f"out/checkpoints/global_step_{step}/hf/model.safetensors")


def run(path, *arguments):
    config = load(path, list(arguments))
    try:
        train.train(config, join(config.train))
    finally:
        dist.destroy_process_group()


def schedule(**changes):
    return load(
        None,
        [
            "--train.output_dir",
            "-",
            "--data.datasets",
            '[{"path": "dummy"}]',
            "--model.config_path",
            "-",
            *(f"--train.{k}={v}" for k, v in changes.items()),
        ],
    ).train


# What a configuration needs that is loaded and never run.
LEAST = ["--train.output_dir=-", '--data.datasets=[{"path": "dummy"}]', "--model.config_path=-"]


def make_bins():
    """Eight bins of uneven documents; one has no valid label, another only one."""
    rng = np.random.default_rng(7)
    bins = []
    for lengths in ((9, 4), (13,), (3, 3, 3), (16,), (2, 14), (5, 6), (16,), (8, 8)):
        ids = [rng.integers(0, 97, n) for n in lengths]
        bins.append([(i, i.copy()) for i in ids])
    for _, labels in bins[3]:
        labels[:] = -100
    for _, labels in bins[6]:
        labels[:-1] = -100
    return bins


def step_in_one_process(path, bins, *arguments):
    config = load(path, list(arguments))
    t, held = config.train, engine_of(config)
    step = [
        batches.collate(bins[i : i + t.micro_batch_size], 8)
        for i in range(0, len(bins), t.micro_batch_size)
    ]
    assert len(step) == t.gradient_accumulation_steps
    sums = held.forward_backward(step, language_modeling)
    norm = float(held.divide())
    return {
        "loss": sums.mean,
        "tokens": sums.denominator,
        "norm": norm,
        "grads": {n: p.grad for n, p in held.model.named_parameters() if p.requires_grad},
    }


def engine_of(config, ranks=None):
    return built(config, shape_of(config), ranks or Mesh(), Ops.resolve())


def same(found, want, tolerance=1e-5):
    assert found["tokens"] == want["tokens"]
    assert found["loss"] == pytest.approx(want["loss"], rel=tolerance)
    assert found["norm"] == pytest.approx(want["norm"], rel=tolerance)
    assert found["grads"].keys() == want["grads"].keys()
    for name, grad in want["grads"].items():
        assert (found["grads"][name] - grad).abs().max() <= tolerance * grad.abs().max(), name


# Matrices whose update shows every difference; all else moves little, since AdamW's division
# amplifies rounding errors of small gradients.
MUON = [
    "--train.data_parallel_mode=fsdp2",
    "--train.optimizer=muon",
    "--train.optimizer_dtype=fp32",
    "--train.lr=1e-6",
    "--train.muon_lr=0.01",
    "--train.weight_decay=0.1",
]


def check_moves(trained, options=("--train.optimizer=adamw",)):
    """The checkpoint of `train_and_save` must load in the processes of `train_after_loading`, with
    another layout, and in one process. Returns the latter's model, and the saved
    state.
    """
    folder, path, found, _ = trained
    want, moved = found["train_and_save"], found["train_after_loading"]
    for kind in ("restored", *hf.LOAD_MODES):
        assert all(torch.equal(moved[kind][name], w) for name, w in want["weights"].items()), kind
    assert moved["moments"].keys() == want["moments"].keys()
    assert all(torch.equal(moved["moments"][name], m) for name, m in want["moments"].items())
    config = load(path, [*options])
    model = Transformer(shape_of(config), Ops.resolve(), config.model.merge_qkv)
    optimizer = optim.build_optimizer(model, config.train)
    checkpoint.restore(
        folder / "checkpoints/global_step_1", Parts(model), optimizer, Mesh(), run={}, ops={}
    )
    assert all(torch.equal(p, want["weights"][name]) for name, p in model.named_parameters())
    held = distributed_worker.moments(model, optimizer, Mesh())
    assert held.keys() == want["moments"].keys()
    assert all(torch.equal(held[name], m) for name, m in want["moments"].items())
    return model, want


@contextlib.contextmanager
def fake_group(size):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def resumed_equals_never_stopped(tmp_path, **options):
    options = {
        "train__save_steps": 2,
        "train__gradient_accumulation_steps": 2,
        "data__dataloader_drop_last": False,
        "train__lr_decay_style": "cosine",
        **options,
    }
    run(write_config(tmp_path / "a", **options))
    path = write_config(tmp_path / "b", **options)
    with stopped(5, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        run(path)
    torch.manual_seed(99)
    run(path, "--train.load_checkpoint_path", "auto")
    a, b = (
        [
            {k: r[k] for k in ("step", "loss", "lr", "grad_norm", "tokens")}
            for r in rows(tmp_path / n)
        ]
        for n in ("a", "b")
    )
    assert a == b
    final = tensors(tmp_path / "b", 6)
    assert all(torch.equal(t, final[n]) for n, t in tensors(tmp_path / "a", 6).items())
    assert not list((tmp_path / "b/out/checkpoints").glob(".*"))


@contextlib.contextmanager
def stopped(step, error):
    """Ends a run with that error once the gradients of that step are computed."""
    real, calls = Engine.optim_step, []

    def stops(*arguments):
        calls.append(1)
        if len(calls) == step:
            raise error
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "optim_step", stops)
        yield


LORA = {"lora__enable_lora": True, "lora__lora_rank": 4, "lora__lora_alpha": 8}
QLORA = {**LORA, "lora__enable_qlora": True}
NF4 = {**QLORA, "lora__quant_format": "nf4", "lora__quant_group_size": 64}


def build(path, *arguments):
    config = load(path, list(arguments))
    return config, parts_of(config, shape_of(config), Mesh(), Ops.resolve()).model


# Two epochs of three steps.
EPOCHS = {
    "train__max_steps": None,
    "train__num_train_epochs": 2,
    "data__dataloader_drop_last": False,
}


def three_steps(folder, **data):
    """Settings with three steps in an epoch, each of one forward pass."""
    bins = len(data_of(load(write_config(folder, **data)), Mesh())[0].bins)
    return {**EPOCHS, **data, "train__micro_batch_size": math.ceil(bins / 3)}
