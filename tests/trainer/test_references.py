"""References that move, and those that a pass computes before the first step."""

import functools
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
from chats import of_words
from pairs import plain, rows, same, trained
from ranks import fsdp2, metrics, run_modes
from transformers import LlamaConfig, LlamaForCausalLM

from tilewright.trainer import build, precomputed
from tilewright.trainer.config import ConfigError, load
from tilewright.trainer.data import logprobs
from tilewright.trainer.data.logprobs import Damaged, Found, key_of, write

pytestmark = pytest.mark.packages
settings = pairs.settings

LORA = ["--lora.enable_lora=true", "--lora.lora_rank=4", "--train.optimizer=adamw"]
MOVING = ["--preference.reference_update_steps=1", "--preference.reference_ema=0.6"]
TWICE = ["--preference.reference_update_steps=2"]
HALF = ["--train.max_steps=2", "--train.save_strategy=steps", "--train.save_steps=2"]
ONE = "--train.max_steps=1"
AGAIN = "--train.load_checkpoint_path=auto"
EVALUATED = "--data.val_set_size=20"
# Options of a dense model and of adapters whose reference moves.
KINDS = {"dense": MOVING, "lora": [*LORA, *MOVING, EVALUATED]}


def cache(folder, name):
    return ["--preference.reference=precomputed", f"--preference.reference_cache={folder / name}"]


def other(settings):
    return f"--preference.reference_path={settings[0] / 'other'}"


def named(options):
    return f"of_{hash(tuple(options))}"


@pytest.fixture(scope="module")
def of(settings):
    """A run in one process with these options, which is made once."""
    return functools.cache(lambda *options: trained(settings, named(options), *options))


@pytest.fixture(scope="module")
def alone(of):
    return of()


@pytest.fixture(scope="module")
def read(settings):
    """A run whose reference is in the folder "cache"."""
    return trained(settings, "read", *cache(settings[0], "cache"))


DDP = ["--train.data_parallel_mode=ddp"]
MODES = {
    "run_ddp": DDP,
    "run_fsdp2": fsdp2(),
    "run_ring": fsdp2(ringattn_parallel_size=2),
    "run_tp": fsdp2(tensor_parallel_size=2),
    "run_pipeline": fsdp2(pipeline_parallel_size=2),
}
ONLINE = {
    "run_pipeline_model": [],
    "run_pipeline_adapters_off": LORA,
}
STOPPED = {
    "ddp_dense": [*DDP, *KINDS["dense"]],
    "fsdp2_dense": fsdp2(reshard_after_forward=False) + KINDS["dense"],
    "fsdp2_lora": fsdp2(reshard_after_forward=False) + KINDS["lora"],
}


@pytest.fixture(scope="module")
def spread(settings):
    """Runs on two ranks."""
    folder, path = settings
    modes = {}

    def add(name, options, out=None):
        # As many bins a step as one process takes.
        bins = 8 if any("parallel_size" in o for o in options) else 4
        place = f"--train.output_dir={folder / (out or name)}"
        accumulated = f"--train.gradient_accumulation_steps={bins}"
        modes[name] = [path, place, "--model.merge_qkv=false", *options, accumulated]

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


def stored(folder):
    """The log-probabilities of each document of a folder, by its key; and the reference."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            keys, ends, each = (opened.get_tensor(n) for n in logprobs.NAMES)
            reference = json.loads(opened.metadata()["reference"])
        found |= dict(zip((k.tobytes() for k in keys), np.split(each, ends[:-1]), strict=True))
    return found, reference


def values(folder):
    """The log-probability of each document of a folder, by its key."""
    return {key: each.astype(np.float64).sum() for key, each in stored(folder)[0].items()}


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


def test_other_orders_and_bins_read_the_same_values(read, settings, monkeypatch):
    options = [
        *("--train.seed=7", "--train.max_steps=2", "--train.micro_batch_size=2"),
        *("--data.dataloader_drop_last=true", "--train.gradient_accumulation_steps=3"),
        *("--data.sample_packing_method=multipack", "--data.sample_packing_sequence_len=128"),
    ]
    online = trained(settings, "online_otherwise", *options)
    monkeypatch.setattr(precomputed, "_compute", lambda *_: pytest.fail("computed again"))
    found = trained(settings, "read_otherwise", *options, *cache(settings[0], "cache"))
    same(found, online)


def test_the_default_folder_is_that_of_the_reference(settings, alone, monkeypatch):
    read = ["--preference.reference=precomputed", ONE]
    for again in ("", "_again"):
        [own] = trained(settings, f"default{again}", *read)
        [elsewhere] = trained(settings, f"default_other{again}", *read, other(settings))
        first, second = map(values, (settings[0] / "prepared").glob("reference_*"))
        assert own["loss"] == alone[0]["loss"] != elsewhere["loss"]
        assert first.keys() == second.keys() and first != second
        monkeypatch.setattr(precomputed, "_compute", lambda *_: pytest.fail("computed again"))
    same([elsewhere], trained(settings, "default_online", other(settings), ONE))


def test_a_model_whose_numbers_are_all_there_is_not_loaded(settings, tmp_path, monkeypatch):
    options = [*cache(tmp_path, "cache"), other(settings), ONE]
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
    changed = shutil.copytree(settings[0] / "other", tmp_path / "other")
    weights = load_file(changed / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    options[2] = f"--preference.reference_path={changed}"
    with pytest.raises(ValueError, match=r"another reference than this run's: \{'weights'"):
        trained(settings, "complete_other", *options)
    assert loaded == ["other", "model", "model"]


def test_another_reference_is_refused_with_both(read, settings):
    folder, _ = settings
    weights = stored(folder / "cache")[1]["weights"]
    for change, said in (
        (other(settings), rf"another reference than this run's: \{{'weights'.*{weights}"),
        (
            "--model.attn_implementation=eager",
            r"\{'ops': .*'attention': '(cpp|sdpa)'.*'attention': 'eager'",
        ),
        ("--model.batch_invariant=true", r"\{'numerics': "),
    ):
        with pytest.raises(ValueError, match=said):
            trained(settings, "wrong", *cache(folder, "cache"), change)


def test_another_chat_template_matches_nothing_and_is_named(settings, tmp_path, caplog):
    """A folder that was made with one template serves a run with another in no document."""
    folder = tmp_path / "model"
    shutil.copytree(settings[0] / "model", folder)
    turns = "{% for m in messages %}{{ m['role'] }} %s {{ m['content'] }} {% endfor %}"
    opens = "{% if add_generation_prompt %}assistant %s {% endif %}"

    def written(mark):
        template = (turns + opens).replace("%s", mark)
        numbers = [*map(str, range(pairs.VOCAB))]
        of_words(numbers, template, eos_token="1").save_pretrained(folder)

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
        ONE,
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
    [row] = trained(settings, "deep_once", deep, ONE)
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
    key, absent = key_of(np.arange(3), np.arange(3)), key_of(np.arange(3), np.arange(1, 4))
    write(tmp_path, {key: np.array([-1.5, -2.0])}, {"weights": "abc"})
    found = Found(tmp_path, {"weights": "abc"})
    assert found[key].tolist() == [-1.5, -2.0] and key in found and absent not in found
    with pytest.raises(ValueError, match=f"{absent.hex()} under the reference .*abc"):
        found[absent]


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
    trained(settings, "killed", *cache(tmp_path, "cache"), ONE)
    assert not before.keys() & {*computed} and len(before) + len(computed) == 240
    assert values(tmp_path / "cache") == values(settings[0] / "cache")
    assert not [*(tmp_path / "cache").glob("*.partial")]


def test_documents_that_are_new_are_added(read, settings, tmp_path, monkeypatch):
    shutil.copytree(settings[0] / "cache", tmp_path / "cache")
    (tmp_path / "held.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in [*rows(9, 5), *rows(2, 1)])
    )
    data = json.dumps([{"path": str(tmp_path / "held.jsonl"), "type": "preference_tokenized"}])
    options = [f"--data.test_datasets={data}", ONE]
    trained(settings, "held", *options, *cache(tmp_path, "cache"))
    assert len(values(tmp_path / "cache")) == 258
    before = evaluations(settings[0] / "held")[0]
    assert before["eval_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert before["eval_drift"] == pytest.approx(0, abs=1e-4)


def test_the_second_model_is_gone_before_there_is_a_policy(settings, tmp_path, monkeypatch):
    made, real, gone = [], build.build_model, []

    def watched(*arguments, **options):
        gc.collect()
        gone.extend(m() is None for m in made)
        parts = real(*arguments, **options)
        made.append(weakref.ref(parts.model))
        return parts

    monkeypatch.setattr(build, "build_model", watched)
    trained(settings, "freed", *cache(tmp_path, "other"), other(settings), ONE)
    assert gone == [True] and len(made) == 2
    made.clear()
    trained(settings, "freed_2", *cache(tmp_path, "own"), ONE)
    assert len(made) == 1  # the policy computes what it begins as


QLORA = ["--lora.enable_qlora=true", "--lora.quant_format=nf4", "--lora.quant_group_size=32"]


@pytest.mark.parametrize(
    "options",
    [LORA, [*LORA, *QLORA], ["--train.enable_mixed_precision=true"]],
    ids=["adapters", "quantized", "bfloat16"],
)
def test_the_pass_rounds_as_the_policy_does(options, of, settings, tmp_path):
    name = "".join(o[-8:] for o in options)
    found = trained(settings, f"read_{name}", *options, *cache(tmp_path, "cache"))
    assert [r["loss"] for r in found] == [r["loss"] for r in of(*options)]
    assert found[0]["loss"] == math.log(2)


def test_a_resumed_run_reads_again(settings, read, monkeypatch):
    out = [*cache(settings[0], "cache")]
    trained(settings, "half", *out, *HALF)
    monkeypatch.setattr(precomputed, "_compute", lambda *_: pytest.fail("computed again"))
    found = trained(settings, "half", *out, AGAIN)
    assert [r["loss"] for r in found[-2:]] == [r["loss"] for r in read[-2:]]


def test_the_first_step_is_held_to_a_bound(settings, read, tmp_path, capsys):
    folder, _ = settings
    options = ["--model.batch_invariant=true", ONE, *cache(tmp_path, "invariant")]
    trained(settings, "invariant", *options)
    capsys.readouterr()
    bins = ["--data.sample_packing_sequence_len=128", "--train.micro_batch_size=2"]
    trained(settings, "invariant_2", *options, *bins)
    assert "have margins of exactly 0" in capsys.readouterr().out
    # Values of other weights under this reference's name: what no checksum can see.
    found, reference = stored(folder / "cache")
    for name, size in (("slightly", 1e-6), ("wrong", 1e-3)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, {key: v * (1 + size) for key, v in found.items()}, reference)
    trained(settings, "slightly", ONE, *cache(tmp_path, "slightly"))
    assert "differ by up to" in capsys.readouterr().out
    said = "pairs differ by more than 1e-05 nats for each nat and token"
    with pytest.raises(ValueError, match=said) as told:
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
def test_references_are_computed_in_pipelines(name, spread, of):
    same(metrics(spread / name), of(*ONLINE[name]))


# ---- references that move


@pytest.mark.parametrize("options", [[], LORA], ids=["dense", "adapters"])
def test_a_reference_becomes_the_policy(options, of):
    """The first step after that is as the first step of all."""
    without, found = of(*options), of(*options, *TWICE)
    assert [r["loss"] for r in found[:2]] == [r["loss"] for r in without[:2]]
    assert found[2]["loss"] == math.log(2) and found[2]["drift"] == 0.0
    assert found[1]["drift"] > 0 and found[3]["drift"] > 0 and without[2]["drift"] > 0


def test_a_run_is_trls_tr_dpo(settings):
    callbacks = pytest.importorskip("trl.trainer.callbacks")

    def after(policy, other, done):
        if done % 2 == 0:
            callbacks.SyncRefModelCallback._sync_target_model(policy, other, 0.6)

    found = trained(settings, "tr_dpo", *TWICE, "--preference.reference_ema=0.6")
    expected = plain(settings, after=after)
    for row, (loss, margin, _) in zip(found, expected, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["reward_margin"] == pytest.approx(margin, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_bits_of_one_that_was_not(kind, of, settings):
    half, options = f"half_{kind}", KINDS[kind]
    trained(settings, half, *options, *HALF)
    found = trained(settings, half, *options, AGAIN)
    assert [r["loss"] for r in found[-2:]] == [r["loss"] for r in of(*options)[-2:]]
    stays = [option for option in options if option not in MOVING]
    with pytest.raises(ValueError, match=r"holds a reference that has moved .* one that does not"):
        trained(settings, half, *stays, AGAIN, "--train.max_steps=6")


@pytest.mark.parametrize("name", STOPPED)
def test_ranks_that_resume_have_those_bits(name, spread):
    whole, parts = metrics(spread / f"run_{name}_whole"), metrics(spread / f"run_{name}")
    assert [r["loss"] for r in parts] == [r["loss"] for r in whole] and len(whole) == 4


def test_an_evaluation_compares_with_what_has_moved(spread, of, settings):
    """Between forward passes of the policy, whose weights stay gathered under FSDP2."""
    of(*KINDS["lora"])
    folders = settings[0] / named(KINDS["lora"]), spread / "run_fsdp2_lora_whole"
    one, found = (evaluations(folder)[-1] for folder in folders)
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
        ([*TWICE, "--preference.reference=column"], "what moves"),
        ([*TWICE, "--preference.loss=simpo"], "what moves"),
        ([*TWICE, "--preference.reference=precomputed"], "what moves"),
        ([*TWICE, "--preference.reference=model", *LORA], "second set"),
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
    one = [shared, f"--data.datasets={data}", ONE]
    one.append("--train.gradient_accumulation_steps=1")
    trained(settings, "again", *one, *cache(tmp_path, "again"))
    assert len(values(tmp_path / "again")) == 8


def test_random_weights_are_refused_as_a_precomputed_reference(settings):
    options = ["--model.model_path=null", f"--model.config_path={settings[0] / 'model'}"]
    with pytest.raises(ConfigError, match="no fingerprint"):
        load(settings[1], [*options, "--preference.reference=precomputed"])
