"""References that move, and those that a pass computes before the first step."""

import gc
import json
import math
import pathlib
import shutil
import weakref

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

pytest.importorskip("pydantic")
pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import pairs
from pairs import plain, rows, same, trained
from ranks import metrics, run_modes
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tilewright.trainer import build, precomputed, train
from tilewright.trainer.config import ConfigError, load
from tilewright.trainer.data import logprobs
from tilewright.trainer.data.logprobs import Damaged, Found, key_of, write
from tilewright.trainer.parallel.mesh import Mesh

pytestmark = pytest.mark.packages
settings = pairs.settings

LORA = ["--lora.enable_lora=true", "--lora.lora_rank=4", "--train.optimizer=adamw"]
MOVING = ["--preference.reference_update_steps=1", "--preference.reference_ema=0.6"]
HALF = ["--train.max_steps=2", "--train.save_strategy=steps", "--train.save_steps=2"]
AGAIN = "--train.load_checkpoint_path=auto"
EVALUATED = "--data.val_set_size=20"
FSDP2 = ["--train.data_parallel_mode=fsdp2"]


def cache(folder, name):
    return ["--preference.reference=precomputed", f"--preference.reference_cache={folder / name}"]


@pytest.fixture(scope="module")
def alone(settings):
    return trained(settings, "alone")


@pytest.fixture(scope="module")
def read(settings, alone):
    """A run whose reference is in the folder "cache"."""
    return trained(settings, "read", *cache(settings[0], "cache"))


MODES = {
    "run_ddp": ["--train.data_parallel_mode=ddp"],
    "run_fsdp2": FSDP2,
    "run_ring": [*FSDP2, "--train.ringattn_parallel_size=2"],
    "run_tp": [*FSDP2, "--train.tensor_parallel_size=2"],
    "run_pipeline": [*FSDP2, "--train.pipeline_parallel_size=2"],
}
ONLINE = {
    "run_pipeline_model": [],
    "run_pipeline_adapters_off": LORA,
}
GATHERED = [*FSDP2, "--train.reshard_after_forward=false"]
STOPPED = {
    f"{mode}_{kind}": [*layout, *MOVING, *more]
    for mode, layout in (("ddp", ["--train.data_parallel_mode=ddp"]), ("fsdp2", GATHERED))
    for kind, more in (("dense", ()), ("lora", [*LORA, EVALUATED]))
}


def accumulated(options):
    """As many bins a step as one process takes."""
    alone = any("parallel_size" in o for o in options)
    return [*options, f"--train.gradient_accumulation_steps={8 if alone else 4}"]


@pytest.fixture(scope="module")
def spread(settings):
    """Runs on two ranks."""
    folder, path = settings
    modes = {}

    def add(name, options, out=None):
        place = f"--train.output_dir={folder / (out or name)}"
        modes[name] = [path, place, "--model.merge_qkv=false", *accumulated(options)]

    for name, options in MODES.items():
        add(name, [*options, *cache(folder, f"of_{name}")])
    for name, options in ONLINE.items():
        add(name, [*MODES["run_pipeline"], *options])
    for name, options in STOPPED.items():
        add(f"run_{name}_whole", options)
        add(f"run_{name}_half", [*options, *HALF], f"run_{name}")
        add(f"run_{name}_rest", [*options, AGAIN], f"run_{name}")
    run_modes(2, folder, modes)
    return folder


def evaluations(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "eval_loss" in row]


# ---- precomputed


def values(folder):
    """The log-probability of each document of a folder, by its key."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            keys, ends, each = (opened.get_tensor(n) for n in logprobs.NAMES)
        parts = np.split(each.astype(np.float64), ends[:-1])
        found |= {k.tobytes(): p.sum() for k, p in zip(keys, parts, strict=True)}
    return found


def test_what_is_read_has_the_bits_of_what_is_computed(alone, read, settings):
    assert [(r["loss"], r["drift"]) for r in read] == [(r["loss"], r["drift"]) for r in alone]
    assert read[0]["loss"] == math.log(2) and len(values(settings[0] / "cache")) == 240


def test_a_document_is_known_by_its_tokens_and_labels(read, settings):
    row = rows(1, 1)[0]
    ids = np.array(row["prompt_ids"] + row["chosen_ids"])
    labels = np.append(ids[1:], -100)
    labels[: len(row["prompt_ids"]) - 1] = -100
    known = values(settings[0] / "cache")
    assert key_of(ids, labels) in known
    for other in (np.append(ids[1:], -100), np.where(labels == labels[-2], 3, labels)):
        assert key_of(ids, other) not in known
    ids[0] ^= 1  # another prompt, with the same answer
    assert key_of(ids, labels) not in known


def nearly(found, expected, rel=1e-6):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=rel), key.hex()


@pytest.mark.parametrize("name", MODES)
def test_ranks_compute_what_one_process_does(name, spread, alone, read, settings):
    # Sums in another order: a ring adds parts of attention, tensor parallelism parts of products.
    rel = 2e-6 if name in {"run_ring", "run_tp"} else 1e-6
    nearly(values(spread / f"of_{name}"), values(settings[0] / "cache"), rel)
    same(metrics(spread / name), alone)


def test_four_ranks_too(settings, alone, read, tmp_path):
    shutil.copy(settings[1], tmp_path / "config.yaml")
    options = [
        *cache(tmp_path, "cache"),
        "--train.gradient_accumulation_steps=2",
        "--model.merge_qkv=false",
    ]
    arguments = [settings[1], f"--train.output_dir={tmp_path / 'run'}", *FSDP2, *options]
    run_modes(4, tmp_path, {"run": arguments})
    nearly(values(tmp_path / "cache"), values(settings[0] / "cache"))
    same(metrics(tmp_path / "run"), alone)


@pytest.mark.parametrize(
    "options",
    [
        ["--train.seed=7"],
        ["--data.sample_packing_sequence_len=128", "--train.micro_batch_size=2"],
        ["--data.sample_packing_method=multipack", "--data.shuffle_merged_datasets=false"],
        ["--data.dataloader_drop_last=true", "--train.gradient_accumulation_steps=3"],
    ],
    ids=["shuffle", "bins", "packing", "drop_last"],
)
def test_other_orders_and_bins_read_the_same_values(options, read, settings, monkeypatch):
    options = ["--train.max_steps=2", *options]
    name = options[1].partition("=")[0][8:]
    online = trained(settings, f"online_{name}", *options)
    monkeypatch.setattr(precomputed, "_compute", lambda *_: pytest.fail("computed again"))
    same(trained(settings, f"read_{name}", *options, *cache(settings[0], "cache")), online)


def test_the_default_folder_is_that_of_the_reference(settings, alone, monkeypatch):
    folder, _ = settings
    read = ["--preference.reference=precomputed", "--train.max_steps=1"]
    other = f"--preference.reference_path={folder / 'other'}"
    for again in ("", "_again"):
        [own] = trained(settings, f"default{again}", *read)
        [elsewhere] = trained(settings, f"default_other{again}", *read, other)
        first, second = map(values, (folder / "prepared").glob("reference_*"))
        assert own["loss"] == alone[0]["loss"] != elsewhere["loss"]
        assert first.keys() == second.keys() and first != second
        monkeypatch.setattr(precomputed, "_compute", lambda *_: pytest.fail("computed again"))
    same([elsewhere], trained(settings, "default_online", other, "--train.max_steps=1"))


def test_a_model_whose_numbers_are_all_there_is_not_loaded(settings, tmp_path, monkeypatch):
    folder, _ = settings
    other = f"--preference.reference_path={folder / 'other'}"
    options = [*cache(tmp_path, "cache"), other, "--train.max_steps=1"]
    loaded, load_weights = [], build.hf.load_weights

    def loading(parts, path, **how):
        loaded.append(pathlib.Path(path).name)
        return load_weights(parts, path, **how)

    monkeypatch.setattr(build.hf, "load_weights", loading)
    first = trained(settings, "complete", *options)
    assert loaded == ["other", "model"]
    assert trained(settings, "complete_again", *options)[0]["loss"] == first[0]["loss"]
    assert loaded == ["other", "model", "model"]
    # Its files are read nevertheless: others of that name are another reference.
    changed = shutil.copytree(folder / "other", tmp_path / "other")
    weights = load_file(changed / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    options[2] = f"--preference.reference_path={changed}"
    with pytest.raises(ValueError, match=r"another reference than this run's: \{'weights'"):
        trained(settings, "complete_other", *options)
    assert loaded == ["other", "model", "model"]


def test_another_reference_is_refused_with_both(read, settings):
    folder, _ = settings
    other = f"--preference.reference_path={folder / 'other'}"
    with pytest.raises(ValueError, match=r"another reference than this run's: \{'weights'") as told:
        trained(settings, "wrong", *cache(folder, "cache"), other)
    with pytest.raises(
        ValueError, match=r"\{'ops': .*'attention': '(cpp|sdpa)'.*'attention': 'eager'"
    ):
        trained(settings, "wrong", *cache(folder, "cache"), "--model.attn_implementation=eager")
    kept = [
        json.loads(safe_open(f, "np").metadata()["reference"])["weights"]
        for f in (folder / "cache").glob("*.s*")
    ]
    assert kept[0] in str(told.value) and len(set(kept)) == 1
    with pytest.raises(ValueError, match=r"\{'numerics': "):
        trained(settings, "wrong", *cache(folder, "cache"), "--model.batch_invariant=true")


def test_another_chat_template_matches_nothing_and_is_named(settings, tmp_path, caplog):
    """A folder that was made with one template serves a run with another in no document."""
    folder = tmp_path / "model"
    shutil.copytree(settings[0] / "model", folder)
    turns = "{% for m in messages %}{{ m['role'] }} %s {{ m['content'] }} {% endfor %}"
    opens = "{% if add_generation_prompt %}assistant %s {% endif %}"

    def written(mark):
        made = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, "0"))
        made.pre_tokenizer = WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="1")
        tokenizer.chat_template = (turns + opens).replace("%s", mark)
        tokenizer.save_pretrained(folder)

    given = [
        {
            "prompt": [{"role": "user", "content": f"{i} 5"}],
            "chosen": [{"role": "assistant", "content": f"{i} 6"}],
            "rejected": [{"role": "assistant", "content": f"7 {i}"}],
        }
        for i in range(8, 20)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    options = [
        f"--model.model_path={folder}",
        f"--data.datasets={json.dumps([{'path': str(path), 'type': 'preference'}])}",
        "--train.gradient_accumulation_steps=1",
        "--train.max_steps=1",
        *cache(tmp_path, "cache"),
    ]
    said = "another tokenizer or chat template than this run's has made the documents in"
    for mark, documents in (("9", 24), ("8", 48)):
        written(mark)
        [row] = trained(settings, f"template_{mark}", *options)
        assert row["loss"] == math.log(2) and len(values(tmp_path / "cache")) == documents
        assert (said in caplog.text) == (mark == "8")
    caplog.clear()
    written("9")
    trained(settings, "template_again", *options)
    assert said not in caplog.text and len(values(tmp_path / "cache")) == 48


def test_a_reference_that_cannot_be_compared_with_is_refused(settings, tmp_path):
    def saved(name, change=lambda model: None, **shape):
        model = LlamaForCausalLM(LlamaConfig(**pairs.SMALL | shape))
        change(model)
        model.save_pretrained(tmp_path / name)
        return f"--preference.reference_path={tmp_path / name}"

    wide = saved("wide", vocab_size=80)
    for more in ([], cache(tmp_path, "wide_cache")):
        with pytest.raises(ValueError, match=f"{tmp_path}/wide: it has a vocabulary of 80, the mo"):
            trained(settings, "wide", wide, *more)
    deep = saved("deep", num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"with preference\.reference_update_steps it must have"):
        trained(settings, "deep", deep, "--preference.reference_update_steps=2")
    [row] = trained(settings, "deep_once", deep, "--train.max_steps=1")
    assert row["drift"] > 0  # of another depth, a reference that stays
    broken = saved("broken", lambda model: model.lm_head.weight.data[3].fill_(math.nan))
    with pytest.raises(ValueError, match=f"{tmp_path}/broken: lm_head.weight holds NaN"):
        trained(settings, "broken", broken)


def test_two_values_that_are_swapped_are_noticed(read, settings, tmp_path):
    shutil.copytree(settings[0] / "cache", tmp_path / "cache")
    [file] = (tmp_path / "cache").glob("*.safetensors")
    with safe_open(file, "np") as opened:
        arrays, about = {n: opened.get_tensor(n) for n in logprobs.NAMES}, opened.metadata()
    arrays["logprobs"][[3, 4]] = arrays["logprobs"][[4, 3]]
    save_file(arrays, file, about)
    with pytest.raises(Damaged, match=r"has the checksum .* and says .*; delete it"):
        trained(settings, "swapped", *cache(tmp_path, "cache"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(Damaged, match="cannot be read as log-probabilities"):
        trained(settings, "swapped", *cache(tmp_path, "cache"))


def test_a_document_that_is_not_there_is_named(tmp_path):
    key, other = key_of(np.arange(3), np.arange(3)), key_of(np.arange(3), np.arange(1, 4))
    write(tmp_path, {key: np.array([-1.5, -2.0])}, {"weights": "abc"})
    found = Found(tmp_path, {"weights": "abc"})
    assert found[key].tolist() == [-1.5, -2.0] and key in found and other not in found
    with pytest.raises(ValueError, match=f"{other.hex()} under the reference .*abc"):
        found[other]


class Killed(BaseException):
    """As SIGKILL, which nothing handles."""


def test_a_killed_pass_goes_on(read, settings, tmp_path, monkeypatch):
    written = []

    def killing(folder, found, *rest):
        if len(written) == 3:
            (folder / ".cut.0.partial").write_bytes(b"half")
            raise Killed
        written.append(len(found))
        write(folder, found, *rest)

    monkeypatch.setattr(precomputed, "FILE", 100)
    monkeypatch.setattr(precomputed, "write", killing)
    with pytest.raises(Killed):
        trained(settings, "killed", *cache(tmp_path, "cache"))
    before = values(tmp_path / "cache")
    assert 0 < len(before) == sum(written) < 240
    computed = []

    def counting(folder, found, *rest):
        computed.extend(found)
        write(folder, found, *rest)

    monkeypatch.setattr(precomputed, "write", counting)
    trained(settings, "killed", *cache(tmp_path, "cache"), "--train.max_steps=1")
    assert not before.keys() & {*computed} and len(before) + len(computed) == 240
    assert values(tmp_path / "cache") == values(settings[0] / "cache")
    assert not [*(tmp_path / "cache").glob("*.partial")]


def test_documents_that_are_new_are_added(read, settings, tmp_path, monkeypatch):
    shutil.copytree(settings[0] / "cache", tmp_path / "cache")
    (tmp_path / "held.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in [*rows(9, 5), *rows(2, 1)])
    )
    data = json.dumps([{"path": str(tmp_path / "held.jsonl"), "type": "preference_tokenized"}])
    options = [f"--data.test_datasets={data}", "--train.max_steps=1"]
    trained(settings, "held", *options, *cache(tmp_path, "cache"))
    assert len(values(tmp_path / "cache")) == 258
    before = evaluations(settings[0] / "held")[0]
    assert before["eval_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert before["eval_drift"] == pytest.approx(0, abs=1e-4)


def test_the_second_model_is_gone_before_there_is_a_policy(settings, tmp_path, monkeypatch):
    made, real, gone = [], build.build_model, []

    def watched(*arguments):
        gc.collect()
        gone.extend(m() is None for m in made)
        parts = real(*arguments)
        made.append(weakref.ref(parts.model))
        return parts

    monkeypatch.setattr(build, "build_model", watched)
    other = f"--preference.reference_path={settings[0] / 'other'}"
    monkeypatch.setattr(build.second_model, "__defaults__", (watched,))
    trained(settings, "freed", *cache(tmp_path, "other"), other, "--train.max_steps=1")
    assert gone == [True] and len(made) == 2
    made.clear()
    trained(settings, "freed_2", *cache(tmp_path, "own"), "--train.max_steps=1")
    assert len(made) == 1  # the policy computes what it begins as


QLORA = ["--lora.enable_qlora=true", "--lora.quant_format=nf4", "--lora.quant_group_size=32"]


@pytest.mark.parametrize(
    "options",
    [LORA, [*LORA, *QLORA], ["--train.enable_mixed_precision=true"]],
    ids=["adapters", "quantized", "bfloat16"],
)
def test_the_pass_rounds_as_the_policy_does(options, settings, tmp_path):
    name = "".join(o[-8:] for o in options)
    online = trained(settings, f"online_{name}", *options)
    found = trained(settings, f"read_{name}", *options, *cache(tmp_path, "cache"))
    assert [r["loss"] for r in found] == [r["loss"] for r in online]
    assert found[0]["loss"] == math.log(2)


def test_a_resumed_run_reads_again(settings, read, monkeypatch):
    out = [*cache(settings[0], "cache")]
    trained(settings, "half", *out, *HALF)
    monkeypatch.setattr(precomputed, "_compute", lambda *_: pytest.fail("computed again"))
    found = trained(settings, "half", *out, AGAIN)
    assert [r["loss"] for r in found[-2:]] == [r["loss"] for r in read[-2:]]


def test_the_first_step_is_held_to_a_bound(settings, read, tmp_path, capsys):
    folder, _ = settings
    bins = [
        "--data.sample_packing_sequence_len=128",
        "--train.micro_batch_size=2",
        "--train.max_steps=1",
    ]
    invariant = [*bins, "--model.batch_invariant=true", *cache(tmp_path, "invariant")]
    trained(
        settings,
        "invariant",
        "--model.batch_invariant=true",
        "--train.max_steps=1",
        *cache(tmp_path, "invariant"),
    )
    capsys.readouterr()
    trained(settings, "invariant_2", *invariant)
    assert "have margins of exactly 0" in capsys.readouterr().out
    # Values of other weights under this reference's name: what no checksum can see.
    for name, size in (("slightly", 1e-6), ("wrong", 1e-3)):
        for file in (folder / "cache").glob("*.safetensors"):
            with safe_open(file, "np") as opened:
                keys, ends, each = (opened.get_tensor(n) for n in logprobs.NAMES)
                reference = json.loads(opened.metadata()["reference"])
            parts = np.split(each * (1 + size), ends[:-1])
            (tmp_path / name).mkdir(exist_ok=True)
            write(
                tmp_path / name,
                dict(zip((k.tobytes() for k in keys), parts, strict=True)),
                reference,
            )
    trained(settings, "slightly", "--train.max_steps=1", *cache(tmp_path, "slightly"))
    assert "differ by up to" in capsys.readouterr().out
    with pytest.raises(
        ValueError, match="pairs differ by more than 1e-05 nats for each nat and token"
    ) as told:
        trained(settings, "far", *cache(tmp_path, "wrong"))
    assert f"{tmp_path / 'wrong'} holds other numbers than its reference has" in str(told.value)
    with pytest.raises(ValueError, match="pairs differ by more than"):
        trained(settings, "dropped", "--train.hidden_dropout=0.2", *cache(tmp_path, "dropped"))
    assert values(tmp_path / "dropped") == values(folder / "cache")  # the pass has no dropout


def test_a_reference_that_is_not_a_number_ends_the_run(settings, tmp_path, monkeypatch):
    real = precomputed.logprobs

    def broken(per_token, batch):
        total, count, found = real(per_token, batch)
        return total, count, torch.where(batch["labels"] == batch["labels"].max(), math.nan, found)

    monkeypatch.setattr(precomputed, "logprobs", broken)
    with pytest.raises(
        ValueError, match=r"with the SHA-256 [0-9a-f]{64} is nan under the reference"
    ):
        trained(settings, "nan", *cache(tmp_path, "cache"))


# ---- pipelines


@pytest.mark.parametrize("name", ONLINE)
def test_references_are_computed_in_pipelines(name, spread, alone, settings):
    options = ONLINE[name]
    expected = trained(settings, f"of_{name}", *options) if options else alone
    same(metrics(spread / name), expected)


# ---- references that move


@pytest.mark.parametrize("options", [[], LORA], ids=["dense", "adapters"])
def test_a_reference_becomes_the_policy(options, settings, alone):
    """The first step after that is as the first step of all."""
    without = trained(settings, f"stays_{len(options)}", *options)
    found = trained(
        settings, f"moves_{len(options)}", *options, "--preference.reference_update_steps=2"
    )
    assert [r["loss"] for r in found[:2]] == [r["loss"] for r in without[:2]]
    assert found[2]["loss"] == math.log(2) and found[2]["drift"] == 0.0
    assert found[1]["drift"] > 0 and found[3]["drift"] > 0 and without[2]["drift"] > 0


def test_a_run_is_trls_tr_dpo(settings):
    callbacks = pytest.importorskip("trl.trainer.callbacks")

    def after(policy, other, done):
        if done % 2 == 0:
            callbacks.SyncRefModelCallback._sync_target_model(policy, other, 0.6)

    options = ["--preference.reference_update_steps=2", "--preference.reference_ema=0.6"]
    found = trained(settings, "tr_dpo", *options)
    expected = plain(settings, after=after)
    for row, (loss, margin, _) in zip(found, expected, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["reward_margin"] == pytest.approx(margin, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("options", [[], LORA], ids=["dense", "adapters"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not(options, settings):
    half = f"moving_half_{len(options)}"
    whole = trained(settings, f"moving_{len(options)}", *options, *MOVING)
    trained(settings, half, *options, *MOVING, *HALF)
    found = trained(settings, half, *options, *MOVING, AGAIN)
    assert [r["loss"] for r in found[-2:]] == [r["loss"] for r in whole[-2:]]
    folder, path = settings
    stays = [f"--train.output_dir={folder / half}", *options, AGAIN]
    with pytest.raises(ValueError, match=r"holds a reference that has moved .* one that does not"):
        train.train(load(path, [*stays, "--train.max_steps=6"]), Mesh())


@pytest.mark.parametrize("name", STOPPED)
def test_ranks_that_resume_have_those_bits(name, spread):
    whole, parts = metrics(spread / f"run_{name}_whole"), metrics(spread / f"run_{name}")
    assert [r["loss"] for r in parts] == [r["loss"] for r in whole] and len(whole) == 4


def test_an_evaluation_compares_with_what_has_moved(spread, settings):
    """Between forward passes of the policy, whose weights stay gathered under FSDP2."""
    trained(settings, "evaluated", *LORA, *MOVING, EVALUATED)
    ends = [
        settings[0] / "evaluated",
        *(spread / f"run_{mode}_lora_whole" for mode in ("ddp", "fsdp2")),
    ]
    one, *several = [evaluations(folder)[-1] for folder in ends]
    for found in several:
        for name in ("eval_loss", "eval_drift", "eval_logprob_chosen"):
            assert found[name] == pytest.approx(one[name], rel=1e-4)
    assert one["eval_drift"] > 0


def test_a_run_may_begin_to_move(settings, alone):
    trained(settings, "later", *HALF)
    found = trained(settings, "later", AGAIN, "--preference.reference_update_steps=3")
    assert [r["loss"] for r in found[:3]] == [r["loss"] for r in alone[:3]]
    assert found[3]["drift"] == 0.0


@pytest.mark.parametrize(
    "options, said",
    [
        (["--preference.reference_ema=0.5"], "preference.reference_update_steps = null"),
        (["--preference.reference_ema=0"], "greater than 0"),
        (["--preference.reference_update_steps=0"], "at least 1|greater than or equal to 1"),
        (["--preference.reference_update_steps=2", "--preference.reference=column"], "what moves"),
        (["--preference.reference_update_steps=2", "--preference.loss=simpo"], "what moves"),
        (
            ["--preference.reference_update_steps=2", "--preference.reference=precomputed"],
            "what moves",
        ),
        (
            ["--preference.reference_update_steps=2", "--preference.reference=model", *LORA],
            "second set",
        ),
        (["--preference.reference_cache=x"], "precomputed"),
        (["--preference.ref_model_sync_steps=2"], "did you mean preference.reference_update_steps"),
        (["--preference.ref_model_mixup_alpha=2"], "did you mean preference.reference_ema"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_settings_that_do_not_go_together_are_refused(options, said, settings):
    with pytest.raises(ConfigError, match=said):
        load(settings[1], options)


def test_precomputed_numbers_are_those_of_shared_prompts_too(read, settings, tmp_path):
    """By the keys of whole documents: a cache serves with and without shared prompts."""
    shared = "--preference.share_prefix=true"
    online = trained(settings, "shared", shared)
    found = trained(settings, "shared_read", shared, *cache(tmp_path, "shared"))
    nearly(values(tmp_path / "shared"), values(settings[0] / "cache"))
    elsewhere = trained(settings, "shared_elsewhere", shared, *cache(settings[0], "cache"))
    for run in (found, elsewhere):
        assert len(online) == len(run) > 1
        for a, b in zip(run, online, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
            assert a["reward_margin"] == pytest.approx(b["reward_margin"], rel=1e-4, abs=1e-6)
    # An answer after two prompts is two documents.
    again = [{**row, "rejected_ids": [5, 6, 7]} for row in rows(4, 1)]
    (tmp_path / "again.jsonl").write_text("".join(json.dumps(r) + "\n" for r in again))
    data = json.dumps([{"path": str(tmp_path / "again.jsonl"), "type": "preference_tokenized"}])
    one = [shared, f"--data.datasets={data}", "--train.max_steps=1"]
    one.append("--train.gradient_accumulation_steps=1")
    trained(settings, "again", *one, *cache(tmp_path, "again"))
    assert len(values(tmp_path / "again")) == 8


def test_random_weights_are_refused_as_a_precomputed_reference(settings):
    options = ["--model.model_path=null", f"--model.config_path={settings[0] / 'model'}"]
    with pytest.raises(ConfigError, match="no fingerprint"):
        load(settings[1], [*options, "--preference.reference=precomputed"])
