"""Preference training in which a pair's prompt is computed once: the numbers of whole documents."""

import json
import math
import random

import pytest
import torch
import yaml

pytest.importorskip("pydantic")
transformers = pytest.importorskip("transformers")

from pairs import SMALL, VOCAB, samples, trained  # noqa: E402
from ranks import metrics, run_modes  # noqa: E402
from shapes import SHAPES  # noqa: E402
from training import MOE, write_config  # noqa: E402

from tilewright.trainer import build, train  # noqa: E402
from tilewright.trainer.columns import IGNORE  # noqa: E402
from tilewright.trainer.config import ConfigError, load  # noqa: E402
from tilewright.trainer.data.batches import collate  # noqa: E402
from tilewright.trainer.parallel.mesh import Mesh  # noqa: E402

pytestmark = pytest.mark.packages

SHARED = "--preference.share_prefix=true"
NUMBERS = ("loss", "grad_norm", "reward_margin", "logprob_chosen", "logprob_rejected")
# A step is an epoch, whatever the bins hold: of one process, and of two.
STEP, HALF = (f"--train.gradient_accumulation_steps={n}" for n in (16, 8))


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
    (folder / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in pairs(24, 1)))
    tree = {
        "model": {"model_path": str(folder / "model"), "merge_qkv": False},
        "data": {
            "datasets": [{"path": str(folder / "pairs.jsonl"), "type": "preference_tokenized"}],
            "dataset_prepared_path": str(folder / "prepared"),
            "sample_packing_sequence_len": 96,
            "pad_to_multiple_of": 16,
            "dataloader_drop_last": False,
        },
        "train": {
            "output_dir": str(folder / "out"),
            "data_parallel_mode": "none",
            "loss": "preference",
            "gradient_accumulation_steps": 16,
            "max_steps": 3,
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


@pytest.fixture(scope="module")
def whole(settings):
    """Of two documents for each pair."""
    return trained(settings, "whole")


def same(found, expected, rel=1e-4):
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        for name in NUMBERS:
            assert a[name] == pytest.approx(b[name], rel=rel, abs=rel / 10), name


def bins_of(settings, *options):
    path = settings[1]
    config = load(path, [f"--train.output_dir={settings[0] / 'unused'}", *options])
    return build.build(config, Mesh()).batches.bins


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
    shared, apart = bins_of(settings, SHARED), bins_of(settings)
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
    """Of rows that are tokens, whose columns are the user's."""
    rows = [
        {
            "input_ids": [i * token, 2, 3],
            "labels": [IGNORE, IGNORE, 3],
            "pair": 1,
            "role": i,
            "prefix": i * prefix,
        }
        for i in range(2)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = json.dumps([{"path": str(tmp_path / "rows.jsonl"), "type": "tokenized"}])
    with pytest.raises(ValueError, match=said):
        trained(settings, "refused", SHARED, f"--data.datasets={data}")


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
        ["--model.batch_invariant=true"],
        ["--model.attn_implementation=eager"],
        ["--train.micro_batch_size=4", "--train.gradient_accumulation_steps=4"],
    ],
    ids=lambda options: options[0].partition(".")[2],
)
def test_however_it_is_computed(options, settings, whole):
    same(trained(settings, "_".join(options)[8:30], SHARED, *options), whole)


@pytest.mark.parametrize(
    "options", [["--lora.enable_lora=true", "--lora.lora_rank=4"], ["--preference.loss=orpo"]]
)
def test_with_adapters_and_without_a_reference(options, settings):
    apart, shared = (
        trained(settings, f"{options[0][2:8]}_{len(more)}", *options, *more)
        for more in ([], [SHARED])
    )
    same(shared, apart)


def test_a_reference_in_a_column(settings, tmp_path):
    """Of rows that are tokens: numbers per token are left out as their tokens are."""
    lines = []
    for i, row in enumerate(pairs(12, 3)):
        prompt, prefixes = row["prompt_ids"], (0, len(row["prompt_ids"]) - 1)
        for role, (name, prefix) in enumerate(zip(("chosen", "rejected"), prefixes, strict=True)):
            ids = prompt + row[f"{name}_ids"]
            labels = [IGNORE] * len(prompt) + row[f"{name}_ids"]
            logprobs = [-0.1 * (i + t) for t in range(len(ids))]
            made = {"input_ids": ids, "labels": labels, "reference_logprob": logprobs}
            lines.append(json.dumps(made | {"pair": i, "role": role, "prefix": prefix}) + "\n")
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    data = json.dumps([{"path": str(tmp_path / "rows.jsonl"), "type": "tokenized"}])
    options = ["--preference.reference=column", f"--data.datasets={data}"]
    apart, shared = (
        trained(settings, f"column_{len(more)}", *options, *more) for more in ([], [SHARED])
    )
    same(shared, apart)
    assert shared[0]["drift"] == pytest.approx(apart[0]["drift"]) and apart[0]["drift"] > 1


def test_both_passes_round_alike(settings):
    first, *_ = trained(settings, "bfloat16", SHARED, "--train.enable_mixed_precision=true")
    assert first["loss"] == math.log(2) and first["drift"] == 0.0


def test_evaluations_share_prefixes_too(settings):
    (settings[0] / "held.jsonl").write_text("".join(json.dumps(r) + "\n" for r in pairs(7, 2)))
    data = [{"path": str(settings[0] / "held.jsonl"), "type": "preference_tokenized"}]
    option, found = f"--data.test_datasets={json.dumps(data)}", []
    for name, more in (("held", []), ("held_shared", [SHARED, "--data.eval_sample_packing=false"])):
        trained(settings, name, option, *more)
        lines = (settings[0] / name / "metrics.jsonl").read_text().splitlines()
        found.append([r for r in map(json.loads, lines) if "eval_loss" in r][-1])
    for name in ("eval_loss", "eval_reward_margin", "eval_logprob_rejected"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-5, abs=1e-6), name


FAMILIES = SHAPES | {"qwen3_moe": MOE}


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_moe"])
def test_families(name, tmp_path, settings):
    """Windows, sinks, experts, and latent attention; weights are drawn."""
    data = [{"path": str(settings[0] / "pairs.jsonl"), "type": "preference_tokenized"}]
    path = write_config(
        tmp_path,
        FAMILIES[name],
        data__datasets=data,
        data__sample_packing_sequence_len=96,
        data__dataloader_drop_last=False,
        train__loss="preference",
        train__gradient_accumulation_steps=16,
        train__max_steps=2,
        train__save_hf_weights=False,
        preference__loss="simpo",
    )
    found = []
    for more in ([], [SHARED]):
        out = tmp_path / f"out{len(more)}"
        train.train(load(path, [f"--train.output_dir={out}", *more]), Mesh())
        found.append(metrics(out))
    same(found[1], found[0], rel=2e-4)
    assert found[0][0]["tokens"] > found[1][0]["tokens"]


FSDP2 = "--train.data_parallel_mode=fsdp2"
OPTIONS = {
    "run_ddp": ["--train.data_parallel_mode=ddp", HALF],
    "run_fsdp2": [FSDP2, HALF],
    "run_ring": [FSDP2, "--train.ringattn_parallel_size=2"],
    "run_ulysses": [FSDP2, "--train.ulysses_parallel_size=2"],
    "run_tp": [FSDP2, "--train.tensor_parallel_size=2"],
    "run_pp": [FSDP2, "--train.pipeline_parallel_size=2", "--preference.loss=simpo"],
}


@pytest.fixture(scope="module")
def spread(settings):
    folder, path = settings
    modes = {
        name: [path, f"--train.output_dir={folder / name}", SHARED, *options]
        for name, options in OPTIONS.items()
    }
    run_modes(2, folder, modes)
    return {name: metrics(folder / name) for name in OPTIONS}


@pytest.mark.parametrize("name", OPTIONS)
def test_ranks_train_as_one_process_on_whole_documents(name, spread, settings, whole):
    simpo = "--preference.loss=simpo"
    same(spread[name], trained(settings, "simpo", simpo) if simpo in OPTIONS[name] else whole)


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
