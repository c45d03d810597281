"""Preference training in which a pair's prompt is computed once: the numbers of whole documents."""

import math
import random

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import transformers
from pairs import SMALL, VOCAB, samples, trained
from shapes import SHAPES
from small import built, data_set, evaluations, layouts, two_ranks, write_run
from training import MOE, write_config

from tilewright.trainer.columns import IGNORE
from tilewright.trainer.config import ConfigError, load
from tilewright.trainer.data.batches import collate

pytestmark = pytest.mark.packages

SHARED = "--preference.share_prefix=true"
ORPO = "--preference.loss=orpo"
KIND = "preference_tokenized"
NUMBERS = ("loss", "grad_norm", "reward_margin", "logprob_chosen", "logprob_rejected")


def pairs(count, seed):
    rng = random.Random(seed)

    def ids(low, high):
        return [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]

    rows = [
        {"prompt_ids": ids(1, 20), "chosen_ids": ids(1, 8), "rejected_ids": ids(1, 8)}
        for _ in range(count)
    ]
    rows[0]["prompt_ids"] = [3]  # from which both answers are predicted
    rows[1]["rejected_ids"][:1] = rows[1]["chosen_ids"][:1]  # answers that begin alike
    rows[1]["rejected_ids"].append(5)
    return rows


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """(folder, path of a configuration)."""
    folder = tmp_path_factory.mktemp("shared")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    return folder, write_run(
        folder,
        "preference",
        ("pairs.jsonl", KIND),
        pairs(24, 1),
        length=96,
        train={"gradient_accumulation_steps": 16, "max_steps": 2},
        data={"dataloader_drop_last": False},
    )


@pytest.fixture(scope="module")
def whole(settings):
    """A run with two documents for each pair."""
    return trained(settings, "whole")


@pytest.fixture(scope="module")
def orpo(settings):
    return trained(settings, "orpo", ORPO)


def same(found, expected, rel=1e-4):
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        for name in NUMBERS:
            assert a[name] == pytest.approx(b[name], rel=rel, abs=rel / 10), name


# ---- data


@pytest.mark.parametrize(
    "prompt, chosen, rejected, prefix",
    [
        ([5, 6, 7], [8], [9], 2),
        ([5], [8], [9], 0),
        ([5, 6], [8, 1], [8, 2], 1),  # the answers' common token is predicted in both
    ],
    ids=str,
)
def test_all_of_a_prompt_but_its_last_token_is_shared(prompt, chosen, rejected, prefix):
    row = {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
    found = samples(row, kind="preference_tokenized")
    assert [f[2]["prefix"] for f in found] == [0, prefix]


def test_a_batch_has_the_prompt_once_and_every_label(settings):
    shared, apart = (built(settings, *m).batches.bins for m in ([SHARED], []))
    assert len(shared) < len(apart) and shared.tokens == shared.sizes.sum() < apart.tokens
    assert (shared.lengths + shared.shared == apart.lengths).all() and shared.shared.any()

    def documents(bins):
        """(labels, tokens, positions) of each, of all bins, in order of their labels."""
        found = []
        for i in range(len(bins)):
            batch = collate([bins[i]], 1, columns=bins.columns)
            cuts = batch["cu_seqlens"].tolist()[1:-1]
            labels, *more = (
                [t.tolist() for t in batch[name][0].tensor_split(cuts)]
                for name in ("labels", "input_ids", "position_ids")
            )
            answers = ([t for t in one if t != IGNORE] for one in labels)
            found += zip(answers, *more, strict=True)
        return sorted(found)

    left_out = 0
    for mine, other in zip(documents(shared), documents(apart), strict=True):
        n = len(other[1]) - len(mine[1])
        assert mine == (other[0], other[1][n:], other[2][n:])
        left_out += n
    assert left_out == shared.shared.sum()


@pytest.mark.parametrize(
    "token, prefix, said",
    [(4, 1, "must be those of"), (0, 2, "predict no label"), (0, 3, "has 3 tokens, and a prefix")],
)
def test_a_prefix_that_is_none_is_refused(token, prefix, said, settings, tmp_path):
    """The rows are tokens, whose columns are the user's."""
    same = {"labels": [IGNORE, IGNORE, 3], "pair": 1}
    rows = [
        {**same, "input_ids": [i * token, 2, 3], "role": i, "prefix": i * prefix} for i in range(2)
    ]
    with pytest.raises(ValueError, match=said):
        trained(settings, "refused", SHARED, data_set(tmp_path / "rows.jsonl", rows))


# ---- runs


def test_a_run_has_the_numbers_of_whole_documents(settings, whole):
    found = trained(settings, "shared", SHARED)
    same(found, whole, rel=1e-5)
    assert found[0]["loss"] == math.log(2) and found[0]["drift"] == 0.0 < found[-1]["drift"]
    assert found[-1]["tokens"] < whole[-1]["tokens"]


@pytest.mark.parametrize(
    "options",
    [
        ["--train.enable_gradient_checkpointing=true"],
        ["--model.batch_invariant=true", "--model.merge_qkv=false"],
        ["--model.attn_implementation=eager"],
        ["--train.micro_batch_size=4", "--train.gradient_accumulation_steps=4"],
    ],
    ids=lambda options: options[0].partition(".")[2],
)
def test_however_it_is_computed(options, settings, whole):
    same(trained(settings, options[0][8:30], SHARED, *options), whole)


def test_with_adapters_and_without_a_reference(settings, orpo):
    same(trained(settings, "orpo_shared", ORPO, SHARED), orpo)
    lora = ["--lora.enable_lora=true", "--lora.lora_rank=4"]
    apart, shared = (trained(settings, f"lora_{len(m)}", *lora, *m) for m in ([], [SHARED]))
    same(shared, apart)


def test_a_reference_in_a_column(settings, tmp_path):
    """The rows are tokens: numbers per token are left out as their tokens are."""
    lines = []
    for i, row in enumerate(pairs(12, 3)):
        prompt, prefixes = row["prompt_ids"], (0, len(row["prompt_ids"]) - 1)
        for role, (name, prefix) in enumerate(zip(("chosen", "rejected"), prefixes, strict=True)):
            ids = prompt + row[f"{name}_ids"]
            labels = [IGNORE] * len(prompt) + row[f"{name}_ids"]
            logprobs = [-0.1 * (i + t) for t in range(len(ids))]
            made = {"input_ids": ids, "labels": labels, "reference_logprob": logprobs}
            lines.append(made | {"pair": i, "role": role, "prefix": prefix})
    options = ["--preference.reference=column", data_set(tmp_path / "rows.jsonl", lines)]
    apart, shared = (
        trained(settings, f"column_{len(more)}", *options, *more) for more in ([], [SHARED])
    )
    same(shared, apart)
    assert shared[0]["drift"] == pytest.approx(apart[0]["drift"]) and apart[0]["drift"] > 1


def test_both_passes_round_alike(settings):
    rounded = ["--train.enable_mixed_precision=true", "--train.max_steps=1"]
    [first] = trained(settings, "bfloat16", SHARED, *rounded)
    assert first["loss"] == math.log(2) and first["drift"] == 0.0


def test_evaluations_share_prefixes_too(settings):
    data = data_set(settings[0] / "held.jsonl", pairs(7, 2), KIND, "test_datasets")
    found = []
    for name, more in (("held", []), ("held_shared", [SHARED, "--data.eval_sample_packing=false"])):
        trained(settings, name, data, "--train.max_steps=1", *more)
        found.append(evaluations(settings[0] / name)[-1])
    for name in ("eval_loss", "eval_reward_margin", "eval_logprob_rejected"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-5, abs=1e-6), name


FAMILIES = SHAPES | {"qwen3_moe": MOE}


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_moe"])
def test_families(name, tmp_path, settings):
    """Windows, sinks, experts, and latent attention; weights are drawn."""
    path = write_config(
        tmp_path,
        FAMILIES[name],
        data__datasets=[{"path": str(settings[0] / "pairs.jsonl"), "type": KIND}],
        data__sample_packing_sequence_len=96,
        data__dataloader_drop_last=False,
        train__loss="preference",
        train__gradient_accumulation_steps=16,
        train__max_steps=1,
        train__save_hf_weights=False,
        preference__loss="simpo",
    )
    apart, shared = (trained((tmp_path, path), f"out{len(m)}", *m) for m in ([], [SHARED]))
    same(shared, apart, rel=2e-4)
    assert apart[0]["tokens"] > shared[0]["tokens"]


# A step is an epoch, whatever the bins hold.
MODES = {f"run_{name}": [SHARED, *options] for name, options in layouts(8).items()}
MODES["run_pp"].append(ORPO)


@pytest.fixture(scope="module")
def spread(settings):
    return two_ranks(settings, MODES)


@pytest.mark.parametrize("name", MODES)
def test_ranks_train_as_one_process_on_whole_documents(name, spread, whole, orpo):
    same(spread[name], orpo if ORPO in MODES[name] else whole)


def test_a_resumed_run_shares_as_before(settings):
    save = ["--train.save_strategy=steps", "--train.save_steps=1", "--train.max_steps=1"]
    trained(settings, "half", *save)
    with pytest.raises(ValueError, match="bins"):
        trained(settings, "half", SHARED, "--train.load_checkpoint_path=auto")


@pytest.mark.parametrize(
    "option, said",
    [
        ("--train.attention_dropout=0.1", "both answers'"),
        ("--train.hidden_dropout=0.1", "both answers'"),
        ("--train.ffn_dropout=0.1", "both answers'"),
        ("--train.enable_compile=true", "as constants"),
        ("--train.loss=language_modeling", "preference"),
    ],
)
def test_what_cannot_be_shared_is_refused(option, said, settings):
    with pytest.raises(ConfigError, match=said) as error:
        load(settings[1], [SHARED, option])
    assert "preference.share_prefix = true" in str(error.value).lower()
