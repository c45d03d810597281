"""Reward models: the loss against TRL's trainer, whole runs against transformers' models, folders
that both read.
"""

import collections
import importlib
import itertools
import json
import pathlib
import types
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("pydantic")
transformers = pytest.importorskip("transformers")

from ranks import run_modes  # noqa: E402
from test_preference import SMALL, metrics, rows  # noqa: E402

from tilewright.trainer import build, evaluate, train  # noqa: E402
from tilewright.trainer.checkpoint import hf  # noqa: E402
from tilewright.trainer.config import ConfigError, load  # noqa: E402
from tilewright.trainer.losses.reward import reward  # noqa: E402
from tilewright.trainer.models.head import Around  # noqa: E402
from tilewright.trainer.models.model_config import ModelConfig  # noqa: E402
from tilewright.trainer.models.ops_choice import Ops  # noqa: E402
from tilewright.trainer.models.reward_head import REWARD, Scores  # noqa: E402
from tilewright.trainer.parallel.mesh import Mesh  # noqa: E402

pytestmark = pytest.mark.packages

END, STEPS = 2, 4
NAMES = ("loss", "grad_norm", "reward_accuracy", "reward_margin", "reward_chosen")


# ---- the loss


def trls(chosen, rejected, margin, coefficient):
    """The loss and the reports of TRL's trainer on rewards that a model would give."""
    trainer = pytest.importorskip("trl").RewardTrainer
    assert importlib.import_module(trainer.__module__)
    this = types.SimpleNamespace(
        model=types.SimpleNamespace(training=True),
        accelerator=types.SimpleNamespace(
            gather_for_metrics=lambda t: t,
            gather=lambda t: t,
            device=torch.device("cpu"),
        ),
        args=types.SimpleNamespace(center_rewards_coefficient=coefficient),
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    outputs = types.SimpleNamespace(logits=torch.cat((chosen, rejected))[:, None])
    ids = torch.ones(2 * len(chosen), 3, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": ids}
    if margin is not None:
        inputs["margin"] = margin
    loss = trainer.compute_loss(this, lambda **_: outputs, inputs)
    return loss, {name: values[0] for name, values in this._metrics["train"].items()}


def ours(chosen, rejected, margin, coefficient):
    """Documents of one token each."""
    n = len(chosen)
    given = torch.stack((chosen, rejected), 1).flatten()
    margins = torch.zeros(n) if margin is None else margin
    batch = {
        "input_ids": torch.full((1, 2 * n), 5),
        "position_ids": torch.zeros(1, 2 * n, dtype=torch.long),
        "lengths": torch.ones(2 * n, dtype=torch.long),
        "role": torch.tensor([0, 1] * n),
        "margin": margins.repeat_interleave(2),
    }
    return reward(Scores(given[None]), batch, center_rewards_coefficient=coefficient or 0.0)


@pytest.mark.parametrize("coefficient", [None, 0.01, 0.5])
@pytest.mark.parametrize("with_margin", [False, True])
def test_the_loss_is_trls(with_margin, coefficient):
    g = torch.Generator().manual_seed(0)
    chosen, rejected, margin = (torch.randn(7, generator=g).double() for _ in range(3))
    margin = margin if with_margin else None
    expected, reports = trls(chosen, rejected, margin, coefficient)
    total, count, *found = ours(chosen, rejected, margin, coefficient)
    assert count == 7
    torch.testing.assert_close(total / count, expected, rtol=1e-12, atol=0)
    accuracy, gap, up, down = (float(t) / 7 for t in found)
    assert accuracy == pytest.approx(reports["accuracy"], rel=1e-6)
    assert gap == pytest.approx(reports["margin"], rel=1e-6)
    assert (up + down) / 2 == pytest.approx(reports["mean_reward"], rel=1e-6)


@pytest.mark.parametrize("gap", [1e4, -1e4, 0.0], ids=str)
def test_extremes_are_finite_and_gradients_are_those_of_the_formula(gap):
    chosen = torch.tensor([gap], dtype=torch.float64).requires_grad_()
    rejected = torch.zeros(1, dtype=torch.float64).requires_grad_()
    total, *_ = ours(chosen, rejected, torch.tensor([0.5]), 0.01)
    slope = -torch.sigmoid(torch.tensor(0.5 - gap, dtype=torch.float64)).item()
    up, down = torch.autograd.grad(total, (chosen, rejected))
    assert up.item() == pytest.approx(slope + 0.02 * gap, rel=1e-12)
    assert down.item() == pytest.approx(-slope + 0.02 * gap, rel=1e-12)


def test_a_reward_is_that_of_the_last_token_before_padding():
    """Of documents [5 2 2], [2 2], [7] and [3 2 4], with 2 as padding."""
    ids = torch.tensor([[5, 2, 2, 2, 2, 7, 3, 2, 4]])
    batch = {
        "input_ids": ids,
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1, 2]]),
        "lengths": torch.tensor([3, 2, 1, 3]),
    }
    scores = torch.arange(9.0)[None].requires_grad_()
    found = Scores(scores, 2).rewards(batch)
    assert found.tolist() == [0.0, 3.0, 5.0, 8.0]
    assert Scores(scores).rewards(batch).tolist() == [2.0, 4.0, 5.0, 8.0]
    (grad,) = torch.autograd.grad(found.sum(), scores)
    assert grad[0].nonzero()[:, 0].tolist() == [0, 3, 5, 8]


# ---- runs


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """(folder, path of a configuration): eight bins a step, each of one or more pairs."""
    folder = tmp_path_factory.mktemp("reward")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, eos_token_id=END, pad_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    config.pad_token_id, config.num_labels = END, 1
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder / "scored")
    pairs = [{**row, "margin": i % 3 / 2} for i, row in enumerate(rows(120, 1))]
    for row in pairs[::2]:  # an end token at the end of some answers
        row["chosen_ids"] = [*row["chosen_ids"], END]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    tree = {
        "model": {"model_path": str(folder / "scored")},
        "data": {
            "datasets": [{"path": str(folder / "pairs.jsonl"), "type": "preference_tokenized"}],
            "dataset_prepared_path": str(folder / "prepared"),
            "sample_packing_sequence_len": 64,
            "pad_to_multiple_of": 16,
        },
        "train": {
            "output_dir": str(folder / "out"),
            "data_parallel_mode": "none",
            "loss": "reward",
            "gradient_accumulation_steps": 8,
            "max_steps": STEPS,
            "lr": 1e-2,
            "optimizer": "sgd",
            "lr_decay_style": "constant",
            "max_grad_norm": 0.0,
            "enable_mixed_precision": False,
            "enable_gradient_checkpointing": False,
            "save_hf_weights": False,
            "save_strategy": "no",
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder, str(folder / "config.yaml")


def trained(settings, name, *options):
    folder, path = settings
    train.train(load(path, [f"--train.output_dir={folder / name}", *options]), Mesh())
    return metrics(folder / name)


SAVED = ["--train.save_hf_weights=true", "--train.save_strategy=auto"]


@pytest.fixture(scope="module")
def alone(settings):
    return trained(settings, "alone", *SAVED)


def exported(settings, name="alone", step=STEPS):
    return settings[0] / name / f"checkpoint-{step}" / "hf"


def theirs(path):
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32
    )


def documents(batch):
    """(chosen, rejected, margin) of each pair."""
    ends = batch["cu_seqlens"].tolist()
    spans = [batch["input_ids"][:, slice(a, b)] for a, b in itertools.pairwise(ends)]
    for i, role in enumerate(batch["role"].tolist()):
        if role == 0:
            yield spans[i], spans[i + 1], batch["margin"][i]


def plain(settings, coefficient=0.0):
    """The reports of a loop over transformers' model, a document at a time."""
    folder, path = settings
    model = theirs(folder / "scored")
    model.model.embed_tokens.padding_idx = None  # whose row would not be trained
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    made = build.build(load(path, [f"--train.output_dir={folder / 'unused'}"]), Mesh())
    steps, found = made.batches.steps(), []
    for _ in range(STEPS):
        terms, gaps = [], []
        for batch in next(steps):
            for chosen, rejected, margin in documents(batch):
                up, down = (model(ids).logits[0, 0] for ids in (chosen, rejected))
                loss = -torch.nn.functional.logsigmoid(up - down - margin)
                terms.append(loss + coefficient * (up + down) ** 2)
                gaps.append((up - down).detach())
        loss, gaps = torch.stack(terms).mean(), torch.stack(gaps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append((loss.item(), gaps.mean().item(), (gaps > 0).double().mean().item()))
    return found


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_a_run_is_one_of_transformers_model(coefficient, settings, alone):
    option = f"--reward.center_rewards_coefficient={coefficient}"
    found = trained(settings, "centered", option) if coefficient else alone
    for row, (loss, gap, accuracy) in zip(found, plain(settings, coefficient), strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["reward_margin"] == pytest.approx(gap, rel=1e-3, abs=1e-5)
        assert row["reward_accuracy"] == pytest.approx(accuracy)
        assert row["reward_chosen"] - row["reward_rejected"] == pytest.approx(gap, abs=1e-4)


OPTIONS = {
    "run_ddp": ["--train.data_parallel_mode=ddp", "--train.gradient_accumulation_steps=4"],
    "run_fsdp2": ["--train.data_parallel_mode=fsdp2", "--train.gradient_accumulation_steps=4"],
    "run_ring": ["--train.data_parallel_mode=fsdp2", "--train.ringattn_parallel_size=2"],
    "run_ulysses": ["--train.data_parallel_mode=fsdp2", "--train.ulysses_parallel_size=2"],
    "run_tp": ["--train.data_parallel_mode=fsdp2", "--train.tensor_parallel_size=2"],
    "run_pp": ["--train.data_parallel_mode=fsdp2", "--train.pipeline_parallel_size=2"],
}


@pytest.fixture(scope="module")
def spread(settings):
    folder, path = settings
    modes = {
        name: [path, f"--train.output_dir={folder / name}", "--model.merge_qkv=false", *options]
        for name, options in OPTIONS.items()
    }
    run_modes(2, folder, modes)
    return {name: metrics(folder / name) for name in OPTIONS}


def same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        for name in NAMES:
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("name", OPTIONS)
def test_ranks_train_as_one_process(name, spread, alone):
    same(spread[name], alone)


@pytest.mark.parametrize(
    "options",
    [
        ["--train.micro_batch_size=4", "--train.gradient_accumulation_steps=2"],
        ["--train.enable_gradient_checkpointing=true"],
        ["--model.batch_invariant=true"],
    ],
    ids=["micro_batches", "recomputed", "batch_invariant"],
)
def test_a_step_does_not_depend_on_how_it_is_computed(options, settings, alone):
    same(trained(settings, "_".join(options)[8:30], *options), alone)
