"""Reward models: the loss against TRL's trainer, whole runs against transformers' models, folders
that both read.
"""

import importlib
import itertools
import json
import types
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import transformers
from pairs import SMALL, rows, trained, trls_trainer
from safetensors.torch import load_file
from small import built, by_hand, data_set, evaluations, layouts, two_ranks, write_run
from whole import scored

from tilewright.trainer.checkpoint import hf
from tilewright.trainer.checkpoint.hf_head import padding_of
from tilewright.trainer.config import ConfigError, load
from tilewright.trainer.losses.reward import reward
from tilewright.trainer.models.families.architecture import FAMILIES
from tilewright.trainer.models.head import Around
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.ops_choice import Ops
from tilewright.trainer.models.reward_head import Scores
from tilewright.trainer.parallel.mesh import Mesh

pytestmark = pytest.mark.packages

END, STEPS = 2, 2
KIND = "preference_tokenized"
NAMES = ("loss", "grad_norm", "reward_accuracy", "reward_margin", "reward_chosen")


# ---- the loss


def trls(chosen, rejected, margin, coefficient):
    """The loss and the reports of TRL's trainer on rewards that a model would give."""
    trainer = pytest.importorskip("trl").RewardTrainer
    this = trls_trainer(args=types.SimpleNamespace(center_rewards_coefficient=coefficient))
    outputs = types.SimpleNamespace(logits=torch.cat((chosen, rejected))[:, None])
    ids = torch.ones(2 * len(chosen), 3, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": ids}
    if margin is not None:
        inputs["margin"] = margin
    loss = trainer.compute_loss(this, lambda **_: outputs, inputs)
    return loss, {name: values[0] for name, values in this._metrics["eval"].items()}


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
    scores = Scores(given[None], Around(Ops.resolve()))
    return reward(scores, batch, center_rewards_coefficient=coefficient or 0.0)


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
    accuracy, gap, up, down, *parts = (float(t) / 7 for t in found)
    assert accuracy == pytest.approx(reports["accuracy"], rel=1e-6)
    assert gap == pytest.approx(reports["margin"], rel=1e-6)
    assert (up + down) / 2 == pytest.approx(reports["mean_reward"], rel=1e-6)
    if coefficient:
        pair, center = parts
        assert pair == pytest.approx(float(trls(chosen, rejected, margin, None)[0]), rel=1e-12)
        assert pair + coefficient * center == pytest.approx(float(expected), rel=1e-12)


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
    """The documents are [5 2 2], [2 2], [7] and [3 2 4], with 2 as padding."""
    ids = torch.tensor([[5, 2, 2, 2, 2, 7, 3, 2, 4]])
    batch = {
        "input_ids": ids,
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1, 2]]),
        "lengths": torch.tensor([3, 2, 1, 3]),
    }
    scores, around = torch.arange(9.0)[None].requires_grad_(), Around(Ops.resolve())
    found = Scores(scores, around._replace(padding=2)).rewards(batch)
    assert found.tolist() == [0.0, 3.0, 5.0, 8.0]
    assert Scores(scores, around).rewards(batch).tolist() == [2.0, 4.0, 5.0, 8.0]
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
    path = write_run(
        folder,
        "reward",
        ("pairs.jsonl", KIND),
        pairs,
        model="scored",
        train={"gradient_accumulation_steps": 8, "max_steps": STEPS},
    )
    return folder, path


SAVED = ["--train.save_hf_weights=true", "--train.save_strategy=auto"]


@pytest.fixture(scope="module")
def alone(settings):
    held = data_set(settings[0] / "held.jsonl", rows(9, 5), KIND, "test_datasets")
    return trained(settings, "alone", *SAVED, held)


def exported(settings, name="alone", step=STEPS):
    return settings[0] / name / "checkpoints" / f"global_step_{step}" / "hf"


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
    model = theirs(settings[0] / "scored")
    model.model.embed_tokens.padding_idx = None  # whose row would not be trained

    def terms(batches):
        losses, gaps = [], []
        for chosen, rejected, margin in itertools.chain(*map(documents, batches)):
            up, down = (model(ids).logits[0, 0] for ids in (chosen, rejected))
            loss = -torch.nn.functional.logsigmoid(up - down - margin)
            losses.append(loss + coefficient * (up + down) ** 2)
            gaps.append((up - down).detach())
        gaps = torch.stack(gaps)
        return torch.stack(losses).mean(), gaps.mean(), (gaps > 0).double().mean()

    return by_hand(settings, model, STEPS, terms)


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_a_run_is_one_of_transformers_model(coefficient, settings, alone):
    option = f"--reward.center_rewards_coefficient={coefficient}"
    found = trained(settings, "centered", option) if coefficient else alone
    for row, (loss, gap, accuracy) in zip(found, plain(settings, coefficient), strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["reward_margin"] == pytest.approx(gap, rel=1e-3, abs=1e-5)
        assert row["reward_accuracy"] == pytest.approx(accuracy)
        assert row["reward_chosen"] - row["reward_rejected"] == pytest.approx(gap, abs=1e-4)
        assert ("center_loss" in row) == (coefficient > 0)
        if coefficient:
            parts = row["preference_loss"] + coefficient * row["center_loss"]
            assert parts == pytest.approx(row["loss"], rel=1e-12)


LAYOUTS = layouts(4)
LORA = ["--lora.enable_lora=true", "--lora.lora_rank=4", "--train.optimizer=adamw"]
MODES = {f"run_{name}": options for name, options in LAYOUTS.items()}
WITH_ADAPTERS = {f"run_lora_{name}": LAYOUTS[name] for name in ("ddp", "fsdp2", "pp")}
SCORING = {f"evaluate_rewards_{n}": LAYOUTS[n] for n in ("fsdp2", "ring", "ulysses", "pp")}
INVARIANT = ["--model.batch_invariant=true", "--model.merge_qkv=false"]


@pytest.fixture(scope="module")
def adapters(settings):
    """Arguments of runs of adapters, from a language model."""
    model = f"--model.model_path={settings[0] / 'model'}"
    return [*LORA, *SAVED, "--lora.save_lora_only=true", model]


@pytest.fixture(scope="module")
def spread(settings, alone, adapters):
    modes = dict(MODES)
    for name, options in WITH_ADAPTERS.items():
        modes[name] = [*adapters, *options]
    for name, options in SCORING.items():
        model = f"--model.model_path={exported(settings)}"
        modes[name] = [model, *INVARIANT, *options]
    return two_ranks(settings, modes)


@pytest.fixture(scope="module")
def adapted(settings, adapters):
    return trained(settings, "lora_alone", *adapters, "--model.merge_qkv=false")


@pytest.mark.parametrize("name", WITH_ADAPTERS)
def test_ranks_with_adapters_train_and_save_as_one_process(name, spread, adapted, settings):
    same(spread[name], adapted)
    saved, own = (
        load_file(exported(settings, n) / "adapter_model.safetensors") for n in (name, "lora_alone")
    )
    assert saved.keys() == own.keys() and "base_model.model.score.weight" in own
    for key, tensor in own.items():
        torch.testing.assert_close(saved[key], tensor, rtol=1e-3, atol=1e-4)


def same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        for name in NAMES:
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("name", MODES)
def test_ranks_train_as_one_process(name, spread, alone):
    same(spread[name], alone)


@pytest.mark.parametrize(
    "options",
    [
        [
            "--train.micro_batch_size=4",
            "--train.gradient_accumulation_steps=2",
            "--train.enable_gradient_checkpointing=true",
        ],
        ["--model.batch_invariant=true"],
    ],
    ids=["micro_batches, recomputed", "batch_invariant"],
)
def test_a_step_does_not_depend_on_how_it_is_computed(options, settings, alone):
    same(trained(settings, options[0][8:30], *options), alone)


def test_evaluation_reports_rewards(settings, alone):
    first, *_ = evaluations(settings[0] / "alone")
    gap = first["eval_reward_chosen"] - first["eval_reward_rejected"]
    assert first["eval_reward_margin"] == pytest.approx(gap)
    assert 0 < first["eval_reward_accuracy"] < 1


# ---- folders


def score(settings, path, *options, name="scores"):
    """The reward of each document, by `evaluate`."""
    folder, config = settings
    file, given = folder / f"{name}.jsonl", f"--model.model_path={path}"
    scored(load(config, [given, "--train.loss=language_modeling", *options]), Mesh(), file)
    return [json.loads(line)["reward"] for line in file.read_text().splitlines()]


def texts(settings):
    for row in map(json.loads, (settings[0] / "pairs.jsonl").read_text().splitlines()):
        for name in ("chosen_ids", "rejected_ids"):
            yield torch.tensor(row["prompt_ids"] + row[name])


@torch.no_grad()
def theirs_of(path, documents, batch=8):
    """Rewards by transformers, in batches that are padded on the right."""
    model, found = theirs(path), []
    padding = model.config.pad_token_id
    for i in range(0, len(documents), batch):
        some = documents[i : i + batch]
        ids = torch.nn.utils.rnn.pad_sequence(some, batch_first=True, padding_value=padding)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(d) for d in some], True)
        found += model(ids, attention_mask=mask).logits[:, 0].tolist()
    return found


def test_two_ranks_score_as_one_process(settings, spread):
    own = score(settings, exported(settings), *INVARIANT)
    for name in SCORING:
        lines = (settings[0] / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line)["reward"] for line in lines] == own, name


def test_a_folder_scores_as_in_transformers(settings, alone):
    path = exported(settings)
    written = json.loads((path / "config.json").read_text())
    assert written["architectures"] == ["LlamaForSequenceClassification"]
    assert (written["pad_token_id"], written["id2label"]) == (END, {"0": "LABEL_0"})
    own, documents = score(settings, path), list(texts(settings))
    assert len(own) == len(documents) == 240
    assert own == pytest.approx(theirs_of(path, documents), rel=1e-5, abs=1e-5)
    assert max(own) - min(own) > 1
    model, told = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, output_loading_info=True
    )
    assert type(model).__name__ == written["architectures"][0] and model.config.num_labels == 1
    assert not told["missing_keys"] and not told["unexpected_keys"]


def test_a_run_goes_on_from_its_folder(settings, alone):
    path = exported(settings)
    found = trained(settings, "on", f"--model.model_path={path}", "--train.max_steps=1")
    again = built(settings, f"--model.model_path={path}")
    assert again.shape.head == "reward" and again.shape.pad_token_id == END
    stored = theirs(path).score.weight
    assert torch.equal(again.engine.model.score.weight, stored) and found[0]["grad_norm"] > 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_models_folder_gets_a_head_as_transformers_draws_it(tied, settings):
    folder = settings[0]
    start, name = folder / "model", f"from_language_model_{tied}"
    if tied:
        start = folder / "tied"
        config = transformers.LlamaConfig(**SMALL | {"tie_word_embeddings": True}, eos_token_id=END)
        transformers.LlamaForCausalLM(config).save_pretrained(start)
    given = f"--model.model_path={start}"
    model: Any = built(settings, given).engine.model
    # initializer_range of the folder is 0.3, transformers' default 0.02.
    drawn = model.score.weight.detach()
    assert 0.2 < drawn.std() < 0.4 and drawn.shape == (1, 32)
    torch.manual_seed(0)
    assert 0.2 < theirs_from_language_model(start).score.weight.std() < 0.4
    found = trained(settings, name, given, *SAVED)
    saved = exported(settings, name)
    assert hf.read_config(saved)["pad_token_id"] == END and found[0]["grad_norm"] > 0
    expected = theirs_of(saved, list(texts(settings)))
    assert score(settings, saved) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_padding_is_the_tokenizers_or_else_the_end_token(tmp_path):
    def of(tokenizer=(None, None), **config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return padding_of(tmp_path, tokenizer)

    assert of((3, 4), pad_token_id=5) == 3 and of((None, 4), pad_token_id=5) == 4
    assert of(pad_token_id=5, eos_token_id=6) == 5 and of(eos_token_id=[6, 7]) == 6
    assert of() is None


def theirs_from_language_model(path):
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=1, dtype=torch.float32
    )


@pytest.mark.parametrize(("start", "merged"), [("model", False), ("scored", True)])
def test_adapters_train_the_head_whole_and_peft_reads_both(start, merged, settings):
    peft, folder = pytest.importorskip("peft"), settings[0]
    name = f"lora_{start}_{merged}"
    lora = [f"--model.model_path={folder / start}", *LORA, "--train.lr=0.05"]
    lora += [f"--lora.save_lora_only={str(not merged).lower()}", *SAVED]
    trained(settings, name, *lora)
    path = exported(settings, name)
    lora += [f"--train.load_checkpoint_path={path.parent}", "--train.loss=reward"]
    own = score(settings, folder / start, *lora)
    if merged:
        model = theirs(path)
    else:
        written = json.loads((path / "adapter_config.json").read_text())
        assert (written["task_type"], written["modules_to_save"]) == ("SEQ_CLS", ["score"])
        base = theirs_from_language_model(folder / start)
        base.config.pad_token_id = END
        untrained = base.score.weight.detach().clone()
        model = peft.PeftModel.from_pretrained(base, path)
        assert type(model).__name__ == "PeftModelForSequenceClassification"
        assert not torch.equal(model.base_model.model.score.weight, untrained)
    with torch.no_grad():
        expected = [model(ids[None]).logits.item() for ids in texts(settings)]
    assert own == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert max(own) - min(own) > 1


def test_a_resumed_run_with_adapters_has_its_head(settings):
    """A checkpoint of adapters alone holds the head too: it was drawn, and is no folder's."""
    lora = [f"--model.model_path={settings[0] / 'model'}", "--lora.enable_lora=true"]
    lora += ["--train.optimizer=adamw", "--train.save_strategy=steps", "--train.save_steps=1"]
    whole = trained(settings, "whole", *lora)
    trained(settings, "half", *lora, "--train.max_steps=1")
    found = trained(settings, "half", *lora, "--train.load_checkpoint_path=auto")
    assert [row["loss"] for row in found] == [row["loss"] for row in whole]


@pytest.mark.parametrize("mixed", ["false", "true"])
def test_a_reward_has_the_same_bits_in_every_batch(mixed, settings, alone):
    options = ["--model.batch_invariant=true", f"--train.enable_mixed_precision={mixed}"]
    found = {
        tuple(
            score(
                settings,
                exported(settings),
                *options,
                f"--train.micro_batch_size={size}",
                f"--data.sample_packing_sequence_len={length}",
                f"--data.pad_to_multiple_of={multiple}",
                f"--data.dataset_prepared_path={settings[0] / f'prepared_{length}'}",
            )
        )
        for size, length, multiple in ((1, 64, 16), (7, 64, 1), (3, 300, 128))
    }
    assert len(found) == 1


def test_what_reads_tokens_is_refused(settings):
    folder, path = settings
    held = f"--data.test_datasets=[{{path: {folder / 'pairs.jsonl'}, type: preference_tokenized}}]"
    for field in ("z_loss=0.1", "loss_temperature=2", "eval_accuracy=true"):
        with pytest.raises(ConfigError, match="a reward model has one number for each document"):
            load(path, [f"--train.{field}", held])
    with pytest.raises(ConfigError, match=r"center_rewards_coefficient = 0.1.*train\.loss"):
        load(path, ["--train.loss=preference", "--reward.center_rewards_coefficient=0.1"])
    with pytest.raises(ValueError, match=r"which has no score\.weight to give"):
        score(settings, folder / "model", "--train.loss=reward")
    with pytest.raises(ValueError, match="--per-token: a reward model"):
        scored(load(path), Mesh(), folder / "no.jsonl", each_token=True)
    plain = "--data.datasets=[{path: dummy}]"
    with pytest.raises(ValueError, match=r"unexpected score\.weight"):
        trained(settings, "no", "--train.loss=language_modeling", plain)


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"id2label": {"0": "a", "1": "b"}}, "num_labels = 2 is not supported; accepted: 1"),
        ({"id2label": None}, "num_labels = 2"),
        ({"pad_token_id": "x"}, "pad_token_id must be an integer, got 'x'"),
    ],
)
def test_a_classifier_is_refused(changed, said):
    config = transformers.LlamaConfig(**SMALL).to_dict()
    scored = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a"}}
    assert ModelConfig.from_hf({**config, **scored}).head == "reward"
    with pytest.raises(ValueError, match=said):
        ModelConfig.from_hf({**config, **scored, **changed})


def test_a_reward_model_of_every_family_is_a_class_of_transformers():
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    classes = auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    for name in FAMILIES.names():
        made = ModelConfig(name, 8, 8, 8, 1, 1, 1, 8, head="reward")
        assert made.to_hf()["architectures"] == [classes[name]]


def test_the_model_itself_gives_scores(settings):
    model: Any = built(settings).engine.model
    ids = torch.arange(12).view(2, 6)
    found, expected = model(ids), theirs(settings[0] / "scored")
    with torch.no_grad():
        hidden = expected.model(ids).last_hidden_state
        torch.testing.assert_close(found, expected.score(hidden), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="labels: a reward model has no loss of its own"):
        model(ids, labels=ids)
