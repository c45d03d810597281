"""A run that goes on is the run that was stopped: what it is made of, by content, and what it has
reported, counted and kept, whatever the moment of the stop.
"""

import collections
import contextlib
import io
import itertools
import json
import pathlib
import random
import shutil
import threading
import typing

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("pydantic")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import pairs  # noqa: E402
from chats import of_words  # noqa: E402
from pairs import SMALL, VOCAB  # noqa: E402
from small import write_run  # noqa: E402
from training import MOE, write_config  # noqa: E402

from tilewright.trainer import loop, train  # noqa: E402
from tilewright.trainer.checkpoint import checkpoint, run_folder  # noqa: E402
from tilewright.trainer.checkpoint.checkpoint_files import read_state, write_state  # noqa: E402
from tilewright.trainer.config import Model, load  # noqa: E402
from tilewright.trainer.config.train import Train  # noqa: E402
from tilewright.trainer.data import batches  # noqa: E402
from tilewright.trainer.data.columns.column import COLUMNS  # noqa: E402
from tilewright.trainer.data.contents import of_tokenizer  # noqa: E402
from tilewright.trainer.interrupts import Interrupts, Stopped  # noqa: E402
from tilewright.trainer.parallel.mesh import Mesh, join  # noqa: E402
from tilewright.trainer.plugins.proof.assertion import OF_TIME  # noqa: E402

pytestmark = pytest.mark.packages

AUTO = "--train.load_checkpoint_path=auto"


def trained(path, *options):
    """What a run in this process says."""
    said, config = io.StringIO(), load(str(path), list(options))
    joined = config.train.save_async  # a group of processes writes
    try:
        with contextlib.redirect_stdout(said):
            train.train(config, join(config.train) if joined else Mesh())
    finally:
        if joined:
            dist.destroy_process_group()
    return said.getvalue()


def metrics(folder):
    return [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


# ---- what it is made of


def write_model(folder, seed):
    torch.manual_seed(seed)
    shape = transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 1})
    transformers.LlamaForCausalLM(shape).save_pretrained(folder)


WORDS = [f"w{i}" for i in range(3, 60)]
TEMPLATE = (
    "{% for m in messages %}{{ m.content }} </s>{% if not loop.last %} {% endif %}{% endfor %}"
)


def write_tokenizer(folder, words=WORDS, template=TEMPLATE):
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    of_words([*names.values(), *words], template, **names).save_pretrained(folder)


def write_rows(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def ids(draw, n=12):
    return [draw.randrange(3, VOCAB) for _ in range(n)]


def documents(seed):
    draw = random.Random(seed)
    return [{"input_ids": ids(draw)} for _ in range(12)]


def preferences(reference):
    """reference: how a second model's numbers are read."""

    def written(folder):
        write_rows(folder / "rows.jsonl", pairs.rows(12, 0))
        section = {"reference": reference, "reference_path": str(folder / "thing"), "beta": 0.2}
        kind = "rows.jsonl", "preference_tokenized"
        write_run(folder, "preference", kind, preference=section)
        return lambda seed: write_model(folder / "thing", 1 + seed)

    return written


def columns(column, loss="language_modeling", shape=None, train=None, **sections):
    """Rows whose tokens are the same, and further columns of another seed.   column: (tokens,
    number of the row, draw) -> columns.   shape: the shape of drawn weights.
    """

    def written(folder):
        path = write_run(folder, loss, ("thing/rows.jsonl", "tokenized"), train=train, **sections)
        if shape is not None:
            (folder / "model/config.json").write_text(json.dumps(shape))
            config = pathlib.Path(path)
            config.write_text(config.read_text().replace("model_path", "config_path"))

        def change(seed):
            draw, rows = random.Random(seed), enumerate(documents(0))
            rows = [{**row, **column(row["input_ids"], i, draw)} for i, row in rows]
            write_rows(folder / "thing/rows.jsonl", rows)

        return change

    return written


def routed(tokens, number, draw):
    return {"routed_experts": [[draw.sample(range(4), 2)] * 2 for _ in tokens]}


def listed(tokens, number, draw):
    entries = [[i, (i + 1 + draw.randrange(VOCAB - 1)) % VOCAB] for i in tokens]
    return {"teacher_ids": entries, "teacher_logprobs": [[-0.5, -2.0]] * len(tokens)}


def compared(tokens, number, draw):
    values = [-draw.random() for _ in tokens]
    return {"pair": number // 2, "role": number % 2, "reference_logprob": values}


def samples(folder):
    write_run(folder, "language_modeling", ("thing/rows.jsonl", "tokenized"))
    return lambda seed: write_rows(folder / "thing/rows.jsonl", documents(seed))


def chats(**change):
    """Writes chats for a tokenizer that is another by `change`."""

    def written(folder):
        draw = random.Random(0)
        turns = [[" ".join(draw.choices(WORDS[:40], k=6)) for _ in "ab"] for _ in range(12)]
        roles = "user", "assistant"
        rows = [[{"role": r, "content": c} for r, c in zip(roles, t, strict=True)] for t in turns]
        write_rows(folder / "rows.jsonl", [{"messages": row} for row in rows])
        config = pathlib.Path(write_run(folder, "language_modeling", ("rows.jsonl", "chat")))
        given = f"model:\n  tokenizer_path: {folder / 'thing'}\n"
        config.write_text(config.read_text().replace("model:\n", given))
        return lambda seed: write_tokenizer(folder / "thing", **(change if seed else {}))

    return written


# What a run reads from the folder "thing", and the names of what is another there with the seed 1.
MADE_OF = {
    "a second model": (preferences("model"), ["reference"]),
    "precomputed numbers": (preferences("precomputed"), ["reference"]),
    "numbers": (columns(compared, "preference", preference={"reference": "column"}), ["reference"]),
    "a teacher": (columns(listed, "distillation", distillation={"top_k": 2}), ["teacher"]),
    "recorded routes": (columns(routed, shape=MOE, train={"router_replay": True}), ["routes"]),
    "rows": (samples, ["data"]),
    # Its last word is in no row: the samples are the same.
    "a tokenizer": (chats(words=[*WORDS, "other"]), ["tokenizer"]),
    "a tokenizer that makes other tokens": (chats(words=WORDS[::-1]), ["data", "tokenizer"]),
    "a template that says the same": (chats(template=TEMPLATE + "{# same #}"), ["template"]),
}


def begun(folder, written):
    """The configuration of a run, and a function that writes the folder "thing" of a seed."""
    write_model(folder / "model", 0)
    write = written(folder)
    write(0)
    return folder / "config.yaml", write


def test_every_thing_that_can_be_accepted_and_every_part_of_a_column_has_a_case():
    [names] = typing.get_args(Train.model_fields["accept_changes"].annotation)
    assert {*typing.get_args(names)} == {name for _, found in MADE_OF.values() for name in found}
    parts = {COLUMNS[name].part for name in COLUMNS.names()}
    assert parts == {"data", "reference", "teacher", "routes"} < {*typing.get_args(names)}
    assert COLUMNS["teacher_logprob"].part == COLUMNS["teacher_ids"].part == "teacher"


@pytest.mark.parametrize("case", MADE_OF)
def test_a_run_goes_on_with_what_it_was_made_of(case, tmp_path):
    """Elsewhere without a word; another one is refused, with both places and the field that accepts
    it, and is another one to the certificate.
    """
    written, names = MADE_OF[case]
    config, write = begun(tmp_path, written)
    trained(config, "--train.max_steps=2")
    (tmp_path / "thing").rename(tmp_path / "moved")
    here, there = config.read_text(), config.read_text().replace("/thing", "/moved")
    config.write_text(there)
    said = trained(config, AUTO, "--train.max_steps=3")
    assert "another" not in said and "version" not in said
    config.write_text(here)
    write(1)
    asserted = f"--train.assert_deterministic={tmp_path / 'out'}"
    other = f"--train.output_dir={tmp_path / 'other'}"
    with pytest.raises(ValueError, match=r"this run is not that one: .*the content of") as caught:
        trained(config, asserted, other, "--train.max_steps=2")
    for name in names:
        assert f"the content of the {name} differs in this run" in str(caught.value)
    before = metrics(tmp_path)
    shutil.rmtree(tmp_path / "prepared")
    with pytest.raises(ValueError) as caught:
        trained(config, AUTO, "--train.max_steps=4")
    refused = str(caught.value)
    assert f"was written with another {' and another '.join(names)}: " in refused
    assert f"or train.accept_changes to [{', '.join(names)}] to go on" in refused
    assert f"{tmp_path / 'moved'}" in refused and f"{tmp_path / 'thing'}" in refused
    assert metrics(tmp_path) == before
    assert not [*(tmp_path / "prepared").glob("reference_*/*.safetensors")]
    for name in names if len(names) > 1 else ():
        with pytest.raises(ValueError, match="was written with another"):
            trained(config, AUTO, "--train.max_steps=4", f'--train.accept_changes=["{name}"]')
    accepted = f"--train.accept_changes={json.dumps(names)}"
    trained(config, AUTO, "--train.max_steps=4", accepted)
    assert [r["step"] for r in metrics(tmp_path) if "loss" in r] == [1, 2, 3, 4]
    trained(config, AUTO, "--train.max_steps=5")  # it is this run's now


def test_a_base_is_also_the_reference_of_a_policy_that_begins_with_it(tmp_path, caplog):
    """`allow_other_base` is about the weights that a run trains, and adapters are compared with."""
    for i, name in enumerate(("model", "thing")):
        write_model(tmp_path / name, i)
    write_rows(tmp_path / "rows.jsonl", pairs.rows(12, 0))
    path = write_run(tmp_path, "preference", ("rows.jsonl", "preference_tokenized"))
    other, allowed = f"--model.model_path={tmp_path / 'thing'}", "--train.allow_other_base=true"
    trained(path, "--train.max_steps=1")
    with pytest.raises(ValueError, match="began from other weights") as caught:
        trained(path, AUTO, "--train.max_steps=2", other)
    for name in ("model", "thing"):
        assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(ValueError, match="was written with another reference: "):
        trained(path, AUTO, "--train.max_steps=2", other, allowed)
    trained(path, AUTO, "--train.max_steps=2", other, allowed, "--train.accept_changes=[reference]")
    lora = "--lora.enable_lora=true", "--train.optimizer=adamw"
    adapters = *lora, f"--train.output_dir={tmp_path / 'adapters'}"
    trained(path, "--train.max_steps=1", *adapters)
    trained(path, AUTO, "--train.max_steps=2", *adapters, other, allowed)
    assert "the run goes on with another reference, as accepted: " in caplog.text
    with pytest.raises(ValueError, match="was written with another reference: "):
        second = "--preference.reference=model", f"--preference.reference_path={tmp_path / 'model'}"
        trained(path, AUTO, "--train.max_steps=3", *adapters, other, *second)


def test_a_tokenizer_that_is_saved_again_is_the_same(tmp_path):
    """Also where transformers notes that it was read from a folder, and the template elsewhere."""
    write_tokenizer(tmp_path / "first")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "a")
    settings = json.loads((tmp_path / "a/tokenizer_config.json").read_text())
    assert settings["is_local"]
    template = (tmp_path / "a/chat_template.jinja").read_text()
    (tmp_path / "a/chat_template.jinja").unlink()
    settings |= {"chat_template": template, "transformers_version": "0"}
    (tmp_path / "a/tokenizer_config.json").write_text(json.dumps(settings))

    def things(name):
        model = Model(config_path="/", tokenizer_path=str(tmp_path / name))
        return {k: thing.digest for k, thing in of_tokenizer(model).items()}

    assert things("first") == things("a") and things("a").keys() == {"tokenizer", "template"}
    settings["clean_up_tokenization_spaces"] = True
    (tmp_path / "a/tokenizer_config.json").write_text(json.dumps(settings))
    assert things("first")["tokenizer"] != things("a")["tokenizer"]


def test_a_reference_of_another_shape_is_another_one(tmp_path):
    """Its weights are the same."""
    config, _ = begun(tmp_path, preferences("precomputed"))
    trained(config, "--train.max_steps=1")
    file = tmp_path / "thing/config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "rms_norm_eps": 0.5}))
    with pytest.raises(ValueError, match="was written with another reference: "):
        trained(config, AUTO, "--train.max_steps=2")


def test_a_checkpoint_that_did_not_record_them_is_gone_on_with_and_says_so_once(tmp_path, caplog):
    config, write = begun(tmp_path, preferences("model"))
    trained(config, "--train.max_steps=1")
    folder = tmp_path / "out/checkpoints/global_step_1"
    state = read_state(folder)
    write_state(folder, {k: state[k] for k in state.keys() - {"made_of", "empty_steps"}})
    write(1)
    trained(config, AUTO, "--train.max_steps=2")
    trained(config, AUTO, "--train.max_steps=3")
    lines = [m for m in caplog.messages if "did not record its reference" in m]
    assert len(lines) == 1 and "global_step_1" in lines[0]


def test_other_samples_beyond_the_hashed_ones_are_others(tmp_path, monkeypatch):
    """Their file is: not all samples of large data are hashed."""
    config, _ = begun(tmp_path, samples)
    monkeypatch.setattr(batches, "HASHED", 40)
    trained(config, "--train.max_steps=1")
    file, seen = tmp_path / "thing/rows.jsonl", []
    lines = file.read_text().splitlines(keepends=True)
    for i, line in enumerate(lines):
        row = json.loads(line)
        row["input_ids"][5] = (row["input_ids"][5] + 1) % VOCAB
        file.write_text("".join([*lines[:i], json.dumps(row) + "\n", *lines[i + 1 :]]))
        with pytest.raises(ValueError, match="was written with another data: ") as caught:
            trained(config, AUTO, "--train.max_steps=2")
        seen.append("'contents'" in str(caught.value))
    assert 0 < sum(seen) < len(seen)


def test_other_samples_beyond_the_hashed_ones_of_a_saved_set_are_others(tmp_path, monkeypatch):
    (config, _), saved = begun(tmp_path, samples), tmp_path / "saved"
    rows = [{**row, "labels": row["input_ids"]} for row in documents(0)]
    datasets.Dataset.from_list(rows).save_to_disk(str(saved))
    monkeypatch.setattr(batches, "HASHED", 40)
    read = "--data.skip_prepare_dataset=true", f"--data.dataset_prepared_path={saved}"
    trained(config, "--train.max_steps=1", *read)
    saved.rename(tmp_path / "moved")
    moved = read[0], f"--data.dataset_prepared_path={tmp_path / 'moved'}"
    trained(config, AUTO, "--train.max_steps=2", *moved)
    for row in rows[1:4]:
        ids = [*row["input_ids"][:5], row["input_ids"][5] % (VOCAB - 1) + 1, *row["input_ids"][6:]]
        others = [{**r, "input_ids": ids} if r is row else r for r in rows]
        shutil.rmtree(saved, ignore_errors=True)
        datasets.Dataset.from_list(others).save_to_disk(str(saved))
        with pytest.raises(ValueError, match="was written with another data: "):
            trained(config, AUTO, "--train.max_steps=3", *read)


def test_fewer_samples_that_are_accepted_begin_their_next_epoch(tmp_path):
    config, _ = begun(tmp_path, samples)
    length = "--data.sample_packing_sequence_len=12"
    trained(config, length, "--train.max_steps=8")
    rows = (tmp_path / "thing/rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "thing/rows.jsonl").write_text("".join(rows[:3]))
    accepted = "--train.accept_changes=[data]"
    trained(config, length, AUTO, "--train.max_steps=10", accepted)
    state = read_state(tmp_path / "out/checkpoints/global_step_10")
    assert state["data"] == {"epoch": 1, "used": 2}


# ---- when it was stopped


class Killed(BaseException):
    """As SIGKILL, which nothing handles."""


# What a run does, in the order of an evaluated step that is saved, and at its end.
MOMENTS = {
    "before an evaluation": (loop.Run, "evaluate", False),
    "in an evaluation": (loop, "evaluation", True),
    "after an evaluation": (loop.Run, "evaluate", True),
    "before a save": (loop.Run, "save", False),
    "in a save": (checkpoint.Saver, "_publish", False),
    "before old ones go": (run_folder, "prune", False),
    "after old ones went": (run_folder, "prune", True),
    "after a save": (loop.Run, "save", True),
    "before the export": (loop.Run, "export", False),
    "before the test": (loop.Run, "test", False),
    "after the test": (loop.Run, "test", True),
    "at the end": (loop.Run, "close", True),
}


@contextlib.contextmanager
def watched(moments, reached):
    """Within, `reached` is called with each of these moments when a run is there."""

    def around(moment, real, after):
        def call(*arguments, **options):
            found = real(*arguments, **options) if after else None
            reached(moment)
            return found if after else real(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for moment in moments:
            owner, name, after = MOMENTS[moment]
            patch.setattr(owner, name, around(moment, getattr(owner, name), after))
        yield


def killed_at(moment, number):
    """Within, a run ends at that moment, when it has been there so many times before."""
    calls = itertools.count()

    def reached(_):
        if next(calls) == number:
            raise Killed

    return watched([moment], reached)


@contextlib.contextmanager
def signaled_at(step):
    """Within, a signal arrives in that step."""
    steps = itertools.count(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Interrupts, "asked", lambda _: 15 if next(steps) == step else 0)
        yield


VALUES = 5.0, 3.0, 1.0, 4.0, 2.0  # after so many steps with a label


def by_steps(engine, sets, loss, **_):
    """An evaluation whose least and greatest values are those of steps in the middle."""
    found = {int(state["step"]) for state in engine.optimizer.state.values()} or {0}
    [steps] = found
    return {"eval_loss": VALUES[steps]} if sets else {}


STOPS = {
    "steps": {"save_steps": 2, "save_total_limit": 1},
    "best": {"save_strategy": "best", "best_metric": "eval_loss", "save_total_limit": 1},
    "best and epochs": {
        "best_metric": "eval_loss",
        "save_epochs": 0.5,
        "save_best": True,
        "save_total_limit": 2,
        "save_async": True,
    },
    "worst of some": {"best_metric": "eval_loss", "best_mode": "max", "save_steps": 3},
}
STEPS = 6


def a_run(folder, settings, **more):
    """In which two steps have no label, and what follows the last one is a test."""
    draw = random.Random(1)
    rows = [{"input_ids": ids(draw, 32)} for _ in range(STEPS // 2 + 2)]
    rows[0]["labels"] = [-100] * 32
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "test.jsonl", [{"input_ids": ids(draw, 32)}])
    given = {
        "num_train_epochs": 2,
        "max_steps": None,
        "do_test": True,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_hf_weights": False,
        **settings,
    }
    path = write_config(
        folder,
        data__datasets=[{"path": str(folder / "rows.jsonl")}],
        data__test_datasets=[{"path": str(folder / "test.jsonl")}],
        data__val_set_size=2,
        **{f"train__{name}": value for name, value in given.items()},
        **more,
    )
    if "save_strategy" in settings:  # which decides on it
        file = pathlib.Path(path)
        file.write_text(file.read_text().replace("  save_epochs: 0\n", ""))
    return path


def left_by(folder, said):
    """The rows without times, the last state, the last lines, and which checkpoints are there."""
    out = folder / "out"
    rows = [{k: v for k, v in row.items() if k not in OF_TIME} for row in metrics(folder)]
    state = read_state(max(checkpoint.complete(str(out)), key=checkpoint.step_of))
    kept = {k: state[k] for k in ("step", "data", "tokens", "empty_steps", "best") if k in state}
    lines = [n for n in said.splitlines() if "best checkpoint is" in n or "had no label" in n]
    there = {checkpoint.step_of(p) for p in checkpoint.complete(str(out))}
    assert not [*(out / "checkpoints").glob(".*")]
    return rows, kept, lines, there


def stops(settings, counts):
    """Names of stops, and what makes them: one at every second moment, the others in the next of
    STOPS, in each at another of the times that a run is there; and signals.   counts: by moment.
    """
    turn = [*STOPS].index(settings)
    for i, moment in enumerate(MOMENTS):
        if (i + turn) % 2:
            number = counts[moment] * (2 * turn + 1) // (2 * len(STOPS))
            yield f"{moment}, {number}", killed_at(moment, number)
    for step in range(1, STEPS):
        if "best" in settings or step == turn + 2:
            yield f"a signal in step {step}", signaled_at(step)


@pytest.mark.parametrize("settings", STOPS)
def test_a_run_that_was_stopped_leaves_what_one_that_was_not_leaves(
    settings, tmp_path, monkeypatch
):
    """At every moment. The checkpoints that were there when it went on may stay beside the rest."""
    monkeypatch.setattr(loop, "evaluation", by_steps)
    path = a_run(tmp_path, STOPS[settings])
    counts = collections.Counter()
    with watched(MOMENTS, lambda moment: counts.update([moment])):
        whole = left_by(tmp_path, trained(path))
    tests = [row for row in whole[0] if "test_loss" in row]
    assert len(tests) == 1 and whole[1]["empty_steps"] == 2 and "2 of 6 steps" in str(whole[2])
    best = whole[1].get("best", {}).get("step")
    assert best is None or best in whole[3]
    assert best is None or best < STEPS or "save_steps" in STOPS[settings]
    assert all(counts[moment] for moment in MOMENTS)
    for named, within in stops(settings, counts):
        shutil.rmtree(tmp_path / "out")
        with within, pytest.raises((Killed, Stopped)):
            trained(path)
        for thread in threading.enumerate():  # which would be gone with its process
            if "wait_and_publish" in thread.name:
                thread.join()
        folders = checkpoint.complete(str(tmp_path / "out"))
        rows, kept, lines, there = left_by(tmp_path, trained(path, AUTO))
        assert (rows, kept, lines) == whole[:3], named
        assert whole[3] <= there <= whole[3] | {checkpoint.step_of(p) for p in folders}, named


def test_an_evaluation_that_is_made_up_again_is_reported_once(tmp_path, monkeypatch):
    """The run is killed once it has made it up, and goes on from the same checkpoint."""
    monkeypatch.setattr(loop, "evaluation", by_steps)
    path = a_run(tmp_path, STOPS["steps"])
    with signaled_at(2), pytest.raises(Stopped):
        trained(path)
    for _ in range(2):
        with killed_at("after an evaluation", 0), pytest.raises(Killed):
            trained(path, AUTO)
    trained(path, AUTO)
    found = [row["step"] for row in metrics(tmp_path) if "eval_loss" in row]
    assert found == [1, 2, 3, 4, 5, 6]


def test_a_test_is_of_the_sets_that_are_there_and_reported_once(tmp_path):
    """The run had ended: its sets may be others now, and a run without sets keeps its test."""
    path = a_run(tmp_path, STOPS["steps"])
    found = []
    none = "--train.do_test=false", "--data.test_datasets=[]"
    for seed, options in ((0, ()), (0, [AUTO]), (1, [AUTO]), (2, [AUTO, *none])):
        write_rows(tmp_path / "test.jsonl", documents(seed))
        trained(path, *options)
        found += [[row["test_loss"] for row in metrics(tmp_path) if "test_loss" in row]]
    [[whole], [again], [other], [left]] = found
    assert whole == again != other == left


def test_what_a_kill_kept_from_going_goes_at_the_end_of_the_next_run(tmp_path):
    path = a_run(tmp_path, STOPS["steps"])
    with killed_at("before old ones go", 2), pytest.raises(Killed):
        trained(path)
    folders = [checkpoint.step_of(p) for p in checkpoint.complete(str(tmp_path / "out"))]
    assert folders == [4, 6]
    trained(path, AUTO)
    assert [p.name for p in checkpoint.complete(str(tmp_path / "out"))] == ["global_step_6"]
