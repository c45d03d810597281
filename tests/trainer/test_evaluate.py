"""Scores of documents: those of transformers, and the same bits however documents are packed and
spread over ranks.
"""

import json
import math
import random
import shutil

import pytest
import torch
import yaml

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import transformers
import whole
from ranks import run_modes
from safetensors.torch import load_file
from small import SHAPE, data_set, evaluations, write_rows

from tilewright.trainer import evaluate, train
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.config import ConfigError, load
from tilewright.trainer.data import prepared
from tilewright.trainer.data.sources import titles
from tilewright.trainer.models import head
from tilewright.trainer.parallel.mesh import Mesh

pytestmark = pytest.mark.packages

VOCAB, BIN = 62, 48
LLAMA = SHAPE | {"vocab_size": VOCAB}


def rows(count, seed):
    rng = random.Random(seed)
    found = []
    for i in range(count):
        ids = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 40))]
        labels = [t if rng.random() < 0.8 else IGNORE for t in ids[:-1]] + [ids[-1]]
        found.append({"input_ids": ids, "labels": labels, "id": f"{seed}-{i}"})
    return found


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """(folder, path of a configuration of two data sets and a Llama with weights)."""
    folder = tmp_path_factory.mktemp("evaluate")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(
        folder / "model"
    )
    for name, count, seed in (("first", 17, 1), ("second", 6, 2)):
        write_rows(folder / f"{name}.jsonl", rows(count, seed))
    tree = {
        "model": {"model_path": str(folder / "model"), "batch_invariant": True},
        "data": {
            "datasets": [{"path": str(folder / "first.jsonl")}],
            "test_datasets": [
                {"path": str(folder / f"{name}.jsonl")} for name in ("first", "second")
            ],
            "dataset_prepared_path": str(folder / "prepared"),
            "sample_packing_sequence_len": BIN,
            "pad_to_multiple_of": 8,
        },
        "train": {
            "output_dir": str(folder / "out"),
            "data_parallel_mode": "none",
            "enable_mixed_precision": False,
            "enable_gradient_checkpointing": False,
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder, str(folder / "config.yaml")


def scored(path, file, *options):
    whole.scored(load(path, list(options)), Mesh(), file, each_token=True)
    return file.read_text()


@pytest.fixture(scope="module")
def alone(settings):
    folder, path = settings
    return scored(path, folder / "alone.jsonl")


def test_scores_are_transformers_own(settings, alone):
    folder, _ = settings
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    lines = [json.loads(line) for line in alone.splitlines()]
    documents = [("first", i, row) for i, row in enumerate(rows(17, 1))]
    documents += [("second", i, row) for i, row in enumerate(rows(6, 2))]
    for line, (name, i, row) in zip(lines, documents, strict=True):
        assert (line["dataset"], line["document"], line["id"]) == (name, i, row["id"])
        with torch.no_grad():
            logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1]
        logp, y = logits.log_softmax(-1), torch.tensor(row["labels"][1:])
        seen = y != IGNORE
        want = logp[seen, y[seen]]
        assert line["tokens"] == len(want) == len(line["logprobs"])
        torch.testing.assert_close(torch.tensor(line["logprobs"]).double(), want, rtol=0, atol=1e-5)
        assert line["logprob"] == math.fsum(line["logprobs"])
        if not len(want):
            assert line["mean_logprob"] is line["entropy"] is line["accuracy"] is None
            continue
        assert line["mean_logprob"] == pytest.approx(want.mean().item(), abs=1e-5)
        entropy = -(logp.exp() * logp).sum(-1)[seen].mean().item()
        assert line["entropy"] == pytest.approx(entropy, abs=1e-5)
        hits = (logits.argmax(-1) == y)[seen].double().mean().item()
        assert line["accuracy"] == pytest.approx(hits, abs=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        ["--train.micro_batch_size=3"],
        ["--data.eval_sample_packing=false"],
        ["--data.sample_packing_sequence_len=200", "--data.sample_packing_method=multipack"],
        ["--data.pad_to_multiple_of=1"],
    ],
    ids=lambda options: options[0].partition(".")[2],
)
def test_bits_do_not_depend_on_batches(options, settings, alone, tmp_path):
    assert scored(settings[1], tmp_path / "scores.jsonl", *options) == alone


def test_bits_do_not_depend_on_the_chunk_of_the_head(settings, alone, tmp_path, monkeypatch):
    monkeypatch.setattr(head, "SCORED", 128)
    long = ["--data.eval_sample_packing=true", "--train.micro_batch_size=20"]
    assert scored(settings[1], tmp_path / "scores.jsonl", *long) == alone


def sharded(*options, **sizes):
    """Arguments of ranks under FSDP2.   sizes: of groups of ranks, by name."""
    return [
        "--train.data_parallel_mode=fsdp2",
        *(f"--train.{name}_parallel_size={size}" for name, size in sizes.items()),
        *options,
    ]


ANY = "--model.batch_invariant=false"
LAYOUTS = {
    "evaluate_ddp": ["--train.data_parallel_mode=ddp"],
    "evaluate_fsdp2": sharded("--train.micro_batch_size=2"),
    "evaluate_ulysses": sharded(ulysses=2),
    "evaluate_ring": sharded(ringattn=4),
    "evaluate_both": sharded("--train.micro_batch_size=3", ringattn=2, ulysses=2),
    "evaluate_pp": sharded("--train.pipeline_parallel_schedule=GPipe", pipeline=2),
    # Without batch_invariant a ring adds up what it cuts a document into.
    "evaluate_sums": sharded(ANY, ringattn=2, ulysses=2),
    "evaluate_tp": sharded(ANY, "--model.merge_qkv=false", tensor=2),
}


# Other attention, whose heads these rings do not divide, and the sizes of ring and Ulysses.
WIDE = LLAMA | {"hidden_size": 48}
WINDOW = transformers.MistralConfig(
    **WIDE | {"num_attention_heads": 3, "num_key_value_heads": 1, "sliding_window": 7}
)
LATENT = transformers.DeepseekV3Config(
    **WIDE | {"num_attention_heads": 6, "num_key_value_heads": 6},
    first_k_dense_replace=2,
    q_lora_rank=None,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
)
MODELS = {"window": (WINDOW, 2, 1), "latent": (LATENT, 2, 2)}


@pytest.fixture(scope="module")
def spread(settings):
    folder, path = settings
    modes = {name: [path, *options] for name, options in LAYOUTS.items()}
    for name, (config, ring, ulysses) in MODELS.items():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        options = sharded(ringattn=ring, ulysses=ulysses)
        modes[f"evaluate_{name}"] = [path, f"--model.model_path={folder / name}", *options]
    run_modes(4, folder, modes)
    return {name: (folder / f"{name}.jsonl").read_text() for name in modes}


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "pp", "ulysses", "ring", "both"])
def test_bits_do_not_depend_on_ranks(layout, spread, alone):
    assert spread[f"evaluate_{layout}"] == alone


@pytest.mark.parametrize("name", MODELS)
def test_bits_of_other_attention_do_not_depend_on_a_ring(name, settings, spread, tmp_path):
    model = f"--model.model_path={settings[0] / name}"
    assert spread[f"evaluate_{name}"] == scored(settings[1], tmp_path / "scores.jsonl", model)


@pytest.mark.parametrize("layout", ["sums", "tp"])
def test_ranks_that_share_a_token_agree_within_rounding(layout, spread, alone):
    found, want = (
        [json.loads(line) for line in text.splitlines()]
        for text in (spread[f"evaluate_{layout}"], alone)
    )
    for a, b in zip(found, want, strict=True):
        for name in ("dataset", "document", "id", "tokens", "accuracy"):
            assert a[name] == b[name], name
        # rel: 17 float32 roundings, of logits as large as the result.
        assert a["logprobs"] == pytest.approx(b["logprobs"], rel=2e-6, abs=1e-5)
        assert a["entropy"] == pytest.approx(b["entropy"], abs=1e-5)


# ---- the command


def test_the_command_prints_the_sums_of_each_set(settings, alone, tmp_path, capsys):
    file = tmp_path / "scores.jsonl"
    assert evaluate.main([settings[1], "--scores", str(file)]) == 0
    said = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in alone.splitlines()]
    for name in ("first", "second"):
        of_set = [line for line in lines if line["dataset"] == name]
        tokens = sum(line["tokens"] for line in of_set)
        loss = -math.fsum(line["logprob"] for line in of_set) / tokens
        [own] = [line for line in said if line.startswith(f"{name}: ")]
        assert own.startswith(
            f"{name}: documents={len(of_set)} tokens={tokens} loss={loss:.6g} "
            f"perplexity={math.exp(loss):.6g} accuracy="
        )
    for line in lines:
        del line["logprobs"]
    assert [json.loads(line) for line in file.read_text().splitlines()] == lines
    assert said[-1] == f"{file}: 23 documents"


def test_a_checkpoint_is_scored_as_its_export(settings, tmp_path, caplog):
    """Also without the optimizer's states, and without a warning of them."""
    out, before = f"--train.output_dir={tmp_path}", scored(settings[1], tmp_path / "before.jsonl")
    more = ["--train.max_steps=1", "--train.lr=0.01", "--train.save_epochs=0", "--train.seed=3"]
    assert train.main([settings[1], out, *more, "--train.save_optimizer=false"]) == 0
    caplog.clear()
    folder = tmp_path / "checkpoints/global_step_1"
    own = f"--train.load_checkpoint_path={folder}", f"--model.model_path={folder / 'hf'}"
    states, export = (
        scored(settings[1], tmp_path / f"{i}.jsonl", out, given) for i, given in enumerate(own)
    )
    assert states == export != before
    assert "computed differently" not in caplog.text


def test_a_head_beside_a_tied_embedding_is_scored_trained_resumed_and_exported(settings, tmp_path):
    """As merging adapters of a tied head writes it; beside the same weights, said to be two."""
    folder, path = settings
    shutil.copytree(folder / "model", tmp_path / "tied")
    file = tmp_path / "tied/config.json"
    written = json.loads(file.read_text())
    assert not written["tie_word_embeddings"]
    file.write_text(json.dumps({**written, "tie_word_embeddings": True}))
    tied = f"--model.model_path={tmp_path / 'tied'}"
    want = scored(path, tmp_path / "want.jsonl")
    assert scored(path, tmp_path / "found.jsonl", tied) == want
    more = ["--train.lr=0.01", "--train.save_epochs=0", "--train.seed=3", "--train.do_test=true"]
    more += ["--train.load_checkpoint_path=auto"]
    for name, weights in (("own", []), ("other", [tied])):
        own = [*weights, *more, f"--train.output_dir={tmp_path / name}"]
        assert train.main([path, *own, "--train.max_steps=1"]) == 0
        assert train.main([path, *own, "--train.max_steps=2"]) == 0  # resumed
    last = "checkpoints/global_step_2/hf"
    exports = [load_file(tmp_path / name / last / "model.safetensors") for name in ("own", "other")]
    assert "lm_head.weight" in exports[0] and exports[0].keys() == exports[1].keys()
    assert all(torch.equal(exports[0][name], t) for name, t in exports[1].items())
    exported = json.loads((tmp_path / "other" / last / "config.json").read_text())
    assert exported["tie_word_embeddings"] is False
    assert not torch.equal(exports[1]["lm_head.weight"], exports[1]["model.embed_tokens.weight"])


def test_evaluating_pushes_nothing(settings, tmp_path, monkeypatch):
    def pushed(*_):
        raise AssertionError("a data set is pushed")

    monkeypatch.setattr(prepared, "_push", pushed)
    hub = ["--data.push_dataset_to_hub=me/mine", "--data.hf_use_auth_token=true"]
    own = [*hub, f"--data.dataset_prepared_path={tmp_path / 'prepared'}"]
    assert scored(settings[1], tmp_path / "scores.jsonl", *own)


def test_weights_that_would_be_drawn_are_not_evaluated(settings):
    config = load(
        settings[1], ["--model.model_path=null", f"--model.config_path={settings[0]}/model"]
    )
    with pytest.raises(ValueError, match="there are no weights to evaluate"):
        evaluate.scorer_of(config, Mesh())


@pytest.mark.parametrize(
    "options, code, said",
    [
        (["--per-token"], 2, "--per-token needs --scores FILE"),
        (["--scores"], 2, "--scores needs a FILE"),
        (["--scores", "--per-token"], 2, "--scores needs a FILE"),
        (["--train.load_checkpoint_path=nowhere"], 1, "nowhere"),
        (["--train.load_checkpoint_path=auto"], 1, "auto: there is no checkpoint"),
        (
            ["--model.model_path=null", "--model.config_path=MODEL"],
            1,
            "model.model_path = null, train.load_checkpoint_path = null: give one of them",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_one_sentence(options, code, said, settings, capsys):
    folder, path = settings
    options = [o.replace("MODEL", str(folder / "model")) for o in options]
    try:
        found = evaluate.main([path, *options])
    except SystemExit as ended:
        found = ended.code
    printed = capsys.readouterr().err
    assert found == code and said in printed and "Traceback" not in printed


def test_sets_of_one_name_are_told_apart(settings):
    sets = [{"path": f"{folder}/x.jsonl"} for folder in "abc"]
    sets.insert(2, {"path": "org/y", "split": "test"})
    config = load(settings[1], [f"--data.datasets={json.dumps(sets)}"])
    assert titles(config.data.datasets) == ["x", "x#2", "y:test", "x#3"]


# ---- what is evaluated


def sums(settings, *options, capsys):
    """(name -> the line of each set, as numbers) of the command."""
    assert evaluate.main([settings[1], *options]) == 0
    lines = [
        line.split(": ") for line in capsys.readouterr().out.splitlines() if ": documents=" in line
    ]
    return {
        name: {key: float(value) for key, _, value in (p.partition("=") for p in rest.split())}
        for name, rest in lines
    }


def evaluated(settings, folder, *options):
    """The first evaluation of a run."""
    more = [f"--train.output_dir={folder}", "--train.max_steps=1", "--train.save_hf_weights=false"]
    assert train.main([settings[1], *more, *options]) == 0
    return evaluations(folder)[0]


@pytest.mark.parametrize("shuffled", ["true", "false"])
def test_held_out_rows_alone_are_evaluated_as_in_training(shuffled, settings, tmp_path, capsys):
    own = ["--data.test_datasets=[]", "--data.val_set_size=5"]
    own += [f"--data.shuffle_merged_datasets={shuffled}", "--train.eval_accuracy=true"]
    want = evaluated(settings, tmp_path, *own)
    file = tmp_path / "scores.jsonl"
    found = sums(settings, *own, "--scores", str(file), capsys=capsys)
    assert [*found] == ["held_out"] and found["held_out"]["documents"] == 5
    assert found["held_out"]["loss"] == pytest.approx(want["eval_loss"], rel=1e-5)
    assert found["held_out"]["accuracy"] == pytest.approx(want["eval_accuracy"], rel=1e-5)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["id"] for line in lines} < {row["id"] for row in rows(17, 1)}
    other = sums(settings, *own, "--train.seed=7", capsys=capsys)
    assert other["held_out"]["loss"] != found["held_out"]["loss"]


def test_held_out_pairs_stay_together(settings, tmp_path, capsys):
    rng = random.Random(4)

    def tokens(n):
        return [rng.randrange(VOCAB) for _ in range(n)]

    pairs = [
        {"prompt_ids": tokens(3), "chosen_ids": tokens(4), "rejected_ids": tokens(5)}
        for _ in range(9)
    ]
    data = data_set(tmp_path / "pairs.jsonl", pairs, "preference_tokenized")
    own = [data, "--data.test_datasets=[]"]
    own += ["--data.val_set_size=3", "--train.loss=preference", "--model.batch_invariant=false"]
    want = evaluated(settings, tmp_path / "run", *own)
    found = sums(settings, *own, capsys=capsys)["held_out"]
    assert (found["documents"], found["tokens"]) == (6, 27)
    both = want["eval_logprob_chosen"] + want["eval_logprob_rejected"]
    assert found["loss"] == pytest.approx(-3 * both / 27, rel=1e-5)


def test_a_run_s_limits_of_batches_are_those_of_evaluate(settings, tmp_path, capsys):
    whole = sums(settings, capsys=capsys)
    few = ["--train.eval_max_batches=2", "--train.eval_micro_batch_size=2"]
    want = evaluated(settings, tmp_path / "run", *few)
    found = sums(settings, *few, capsys=capsys)
    assert found["first"]["documents"] < whole["first"]["documents"]
    for name in ("first", "second"):
        assert found[name]["loss"] == pytest.approx(want[f"eval_loss/{name}"], rel=1e-5)
    assert sums(settings, "--train.eval_max_batches=1.0", capsys=capsys) == whole
    # Test sets have their own limit, beside rows that are held out of those to train on.
    tests = ["--train.do_test=true", "--train.test_max_batches=1", "--data.val_set_size=4"]
    found = sums(settings, *tests, capsys=capsys)
    assert [*found] == ["first", "second", "held_out"]
    assert found["first"]["documents"] < whole["first"]["documents"]
    assert found["held_out"]["documents"] == 4
    limit = sums(settings, *tests, "--train.eval_max_batches=1", capsys=capsys)
    assert limit["first"] == found["first"]
    assert limit["held_out"]["documents"] < 4
    # Without sets of their own, what is trained on is evaluated with the same limit.
    some = sums(settings, "--data.test_datasets=[]", *few, capsys=capsys)
    assert [*some] == ["first"] and some["first"]["documents"] < 17


def test_batches_without_a_label_are_a_sentence(settings, tmp_path, capsys):
    ids = [1, 2, 3]
    blank = [{"input_ids": ids, "labels": [IGNORE] * 3}, {"input_ids": ids}]
    data = data_set(tmp_path / "blank.jsonl", blank, field="test_datasets")
    own = [data, "--data.eval_sample_packing=false"]
    assert evaluate.main([settings[1], *own, "--train.eval_max_batches=1"]) == 1
    assert "blank: none of the 1 documents in the first batches" in capsys.readouterr().err
    assert evaluate.main([settings[1], *own]) == 0


def test_rules_of_training_alone_are_not_those_of_evaluate(settings, capsys):
    own = ["--data.test_datasets=[]", "--train.eval_strategy=no"]
    for field in ("train.eval_micro_batch_size=3", "data.eval_sample_packing=false"):
        with pytest.raises(ConfigError, match="nothing is evaluated"):
            load(settings[1], [*own, f"--{field}"])
        assert sums(settings, *own, f"--{field}", capsys=capsys)


def test_adapters_over_other_weights_are_refused(settings, tmp_path, capsys):
    folder, _ = settings
    torch.manual_seed(1)
    shape = transformers.AutoConfig.from_pretrained(folder / "model")
    transformers.LlamaForCausalLM(shape).save_pretrained(tmp_path / "other")
    own = ["--lora.enable_lora=true", "--model.batch_invariant=false"]
    own += ["--train.save_epochs=0", "--train.lr=0.05"]
    evaluated(settings, tmp_path, *own)
    own += [f"--train.load_checkpoint_path={tmp_path / 'checkpoints/global_step_1'}"]
    capsys.readouterr()
    right = sums(settings, *own, capsys=capsys)
    other = [*own, f"--model.model_path={tmp_path / 'other'}"]
    assert evaluate.main([settings[1], *other]) == 1
    assert "began from other weights" in capsys.readouterr().err
    assert sums(settings, *other, "--train.allow_other_base=true", capsys=capsys) != right


# ---- files


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (".", "is a folder; give a file"),
        ("nowhere/x.jsonl", "there is no folder"),
        ("file/x.jsonl", "there is no folder"),
        ("x" * 250 + ".jsonl", "cannot be written: File name too long"),
    ],
)
def test_a_file_that_cannot_be_written_is_found_before_anything_is_read(
    where, said, settings, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(evaluate, "scorer_of", None)  # what begins the evaluation
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    assert evaluate.main([settings[1], "--scores", str(tmp_path / where)]) == 1
    assert said in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
