"""The pages docs/trainer/extend*.md: each of their files is a row of a table, in a copy of the
package in which nothing else is edited.
"""

import dataclasses
import functools
import importlib
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import forked
import pytest

import tilewright

pytest.importorskip("datasets")
pytest.importorskip("transformers")

import tokenizers
from preparing import config_of, write_rows
from training import QWEN3, rows, write_config
from transformers import PreTrainedTokenizerFast

from tilewright.trainer.callbacks import CALLBACKS, Plugin
from tilewright.trainer.data import cache_key
from tilewright.trainer.data.encode import Use
from tilewright.trainer.data.types.dataset_type import DATASETS
from tilewright.trainer.losses.loss import Loss
from tilewright.trainer.optim.row import SCHEDULES, Schedule
from tilewright.trainer.optim.schedules import schedule
from tilewright.trainer.plugins.callback import add_callbacks
from tilewright.trainer.tables import Table

pytestmark = pytest.mark.packages
ROOT = pathlib.Path(tilewright.__file__).parents[1]
PAGES = [p.read_text() for p in sorted((ROOT / "docs/trainer").glob("extend*.md"))]
FILES = dict(
    re.findall(r'```python title="(tilewright/trainer/\S+)"\n(.*?)```', "".join(PAGES), re.S)
)
SHAPE = {
    **QWEN3,
    "model_type": "seed_oss",
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
TRAINER = "-m", "tilewright.trainer.train", "config.yaml"
RANKS = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
SCRIPT = """
import sys
import torch
from transformers import AutoModelForCausalLM
from tilewright.trainer import train
from tilewright.trainer.checkpoint import hf
from tilewright.trainer.models.model import Ops, Transformer

assert train.main(["config.yaml"]) == 0
folder = "out/checkpoints/global_step_4/hf"
theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
ours = Transformer(hf.load_config(folder), Ops.resolve())
hf.load_weights(ours, folder)
ids = torch.arange(40).view(2, 20)
with torch.no_grad():
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)
print("bias", float(ours.model.layers[0].self_attn.qkv_proj.bias.abs().max()) > 0)
"""


READER = """
from tilewright.trainer import train
from tilewright.trainer.losses.loss import Loss, count_labels
from tilewright.trainer.losses.loss import LOSSES

seen = []

def harder(per_token, batch):
    seen.extend(batch["difficulty"].tolist())
    return per_token.sum(), count_labels(batch)

LOSSES.add("harder", Loss(harder, columns=("labels", "difficulty")))
assert train.main(["config.yaml"]) == 0
print(sorted({d for d in seen if d > 0}))
"""
# Prints the exit code of each command, and what it says.
COMMANDS = """
import contextlib, io, json, sys
from tilewright.trainer import train

for given in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = train.main(["config.yaml", *given])
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, said.getvalue()]))
"""


def write_tokenizer(folder):
    names = ["<s>", "</s>", "<pad>", *map(chr, range(32, 126))]
    vocab = {token: i for i, token in enumerate(names)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=" "))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained(folder)


def environment(paths):
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(paths)}


def run(python, folder, paths, *arguments):
    return subprocess.run(
        [python, *arguments],
        cwd=folder,
        env=environment(paths) | {"PYTHON_EXEC": str(python)},  # of torchrun's ranks
        capture_output=True,
        text=True,
        check=False,
    )


def prepared(folder, **train):
    rows = [
        {"instruction": f"What is {n}?", "input": "" if n % 2 else "Think.", "output": f"{n}."}
        for n in range(24)
    ]
    write_rows(folder / "rows.jsonl", [row | {"difficulty": n / 4} for n, row in enumerate(rows)])
    write_config(
        folder,
        SHAPE,
        data__datasets=[{"path": "rows.jsonl", "type": "instructions"}],
        data__sample_packing_sequence_len=64,
        data__val_set_size=4,
        **{"train__max_steps": 4} | {f"train__{name}": value for name, value in train.items()},
    )
    write_tokenizer(folder / "model")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the package with the page's files, and no edit."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(
        ROOT / "tilewright", tree / "tilewright", ignore=shutil.ignore_patterns("__pyc*")
    )
    assert len(FILES) == 9
    for name, code in FILES.items():
        assert not (tree / name).exists()
        (tree / name).write_text(code)
    return tree


@pytest.fixture(scope="module")
def trains(tree):
    """`run`, in a Python that has imported the copy's trainer, but read no table."""
    imports = (
        "import datasets, torch.distributed.run, transformers\n"
        "from tilewright.trainer import train\n"
        f"assert train.__file__.startswith('{tree}')"
    )
    with forked.python(imports, tree, environment(tree)) as python:
        yield functools.partial(run, python)


def test_each_file_of_the_page_is_a_row(tmp_path, tree, trains):
    prepared(
        tmp_path,
        loss="focal",
        optimizer="lion",
        optimizer_args={"beta2": 0.9},
        lr_decay_style="square_root",
        lr_min=0.0,
        callbacks=["best"],
    )
    done = trains(tmp_path, tree, "-c", SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "bias True"
    found = rows(tmp_path)
    steps = [row for row in found if "loss" in row]
    # (1 - p)^2 of the cross-entropy, with p = 1 / 97 at the start
    first = steps[0]
    assert math.isclose(first["cross_entropy"], math.log(97), rel_tol=0.02)
    assert 0.9 < first["loss"] / first["cross_entropy"] < 1
    assert steps[-1]["cross_entropy"] < first["cross_entropy"]
    want = [1e-2 * (1 - math.sqrt(i / 3)) for i in range(4)]
    assert [row["lr"] for row in steps] == pytest.approx(want)
    losses = {row["step"]: row["eval_loss"] for row in found if "eval_loss" in row}
    best = min(losses, key=losses.get)
    written = json.loads((tmp_path / "out/best.json").read_text())
    assert written == {"step": best, "eval_loss": losses[best]}
    again = "--train.load_checkpoint_path=auto", "--train.max_steps=5"
    resumed = trains(tmp_path, tree, *TRAINER, *again)
    assert resumed.returncode == 0, resumed.stderr
    resumed = trains(tmp_path, tree, *TRAINER, *again, "--train.optimizer_args", '{"beta2": 0.5}')
    assert resumed.returncode == 1 and "was written with another optimizer" in resumed.stderr


def test_a_pipeline_reports_what_one_process_does(tmp_path, tree, trains):
    """The further sums of a loss are of the last stage alone."""
    options = {"gradient_accumulation_steps": 2, "save_hf_weights": False, "z_loss": 0.1}
    prepared(tmp_path, loss="focal", max_steps=1, **options)
    stages = "--train.data_parallel_mode=fsdp2", "--train.pipeline_parallel_size=2"
    found = []
    for command in (TRAINER, (*RANKS, *TRAINER, *stages, "--train.output_dir=two/out")):
        done = trains(tmp_path, tree, *command)
        assert done.returncode == 0, done.stdout + done.stderr
        folder = tmp_path / "two" if "two/out" in command[-1] else tmp_path
        found += [row["cross_entropy"] for row in rows(folder) if "loss" in row]
    assert found[1] == pytest.approx(found[0], rel=1e-5) and found[0] > 4


def test_copies_of_the_page_train_apart(tmp_path, tree, trains):
    """Plain descent that averages after each step is data parallelism. All copies begin with the
    weights that one of them reads. A checkpoint between two averages has one model, with which a
    run goes on as it would have.
    """
    prepared(tmp_path, max_grad_norm=0.0, lr_decay_style="constant")

    def losses(name, every, *more, **options):
        if every:
            options["layout_args"] = json.dumps({"local_sgd": {"copies": 2, "every": every}})
        options["output_dir"] = f"{name}/out"
        given = [f"--train.{k}={v}" for k, v in options.items()]
        done = trains(tmp_path, tree, *RANKS, *TRAINER, *given, *more)
        assert done.returncode == 0, done.stdout + done.stderr
        found = rows(tmp_path / name)
        return [[r[key] for r in found if key in r] for key in ("loss", "grad_norm", "eval_loss")]

    plain = {"optimizer": "sgd", "lr": 0.5, "max_steps": 2, "data_parallel_mode": "ddp"}
    want, norms, _ = losses("replicas", None, **plain, save_hf_weights=False)
    found, own, evaluated = losses("each", 1, **plain)
    assert found == pytest.approx(want, rel=1e-5) and own[0] > 1.1 * norms[0]
    certified = json.loads((tmp_path / "each/out/certificate.json").read_text())["facts"]["layout"]
    assert certified["local"] == certified["processes"] == 2 and "apart" not in certified
    weights = "--model.model_path=each/out/checkpoints/global_step_2/hf"
    third = {"data_parallel_mode": "fsdp2", "max_steps": 4, "save_hf_weights": False}
    third["eval_strategy"] = "epoch"  # not where a checkpoint is written
    apart, _, begins = losses("third", 3, weights, **third, save_steps=2, eval_on_start=True)
    assert begins[0] == pytest.approx(evaluated[-1], rel=1e-5)
    third["load_checkpoint_path"] = "third/out/checkpoints/global_step_2"
    again, *_ = losses("again", 3, weights, **third)
    assert again == apart[2:]


def test_a_loss_reads_the_column_of_the_page(tmp_path, tree, trains):
    prepared(tmp_path, loss="harder", max_steps=None, num_train_epochs=1)
    done = trains(tmp_path, tree, "-c", READER)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == str([n / 4 for n in range(1, 24)])


def test_a_type_of_another_version_is_prepared_anew(tmp_path, monkeypatch):
    """Rows of version 0 have the names that prepared sets had before there were versions."""
    path = write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
    config = config_of(tmp_path, {"path": path, "type": "text"})
    data, names = config.data, []
    for version in (0, 1, 2):
        changed = dataclasses.replace(DATASETS["text"], version=version)
        monkeypatch.setitem(DATASETS._rows, "text", changed)
        use = Use(data, 97, {})
        asked = data.datasets, use, config.model, config.train.seed, True
        names.append(cache_key.cache_key(*asked))
    assert len({*names}) == 3


def test_options_and_names_that_do_not_fit_are_refused(tmp_path, tree, trains):
    prepared(tmp_path, optimizer="lion", optimizer_args={"beta3": 0.9})
    plain = "--train.optimizer_args", "{}"
    layouts = {
        '{"local": {}}': "local is no layout with options; accepted: local_sgd",
        '{"local_sgd": {"size": 2}}': "size is no option of the layout local_sgd, which has copies",
        '{"local_sgd": {"copies": 0}}': "copies: input should be greater than or equal to 1",
        '{"local_sgd": {"copies": 2}}': "local_sgd.copies = 2: 1 processes do not divide by 2",
    }
    expected = [
        ((), r"train\.optimizer_args = .*: beta3 is no option of the optimizer, which has beta1"),
        (("--train.optimizer", "adamw"), "only .* lion .* read this"),
        (("--train.callbacks", "[report]", *plain), "report is there where other fields ask for"),
        (("--train.loss", "focl", *plain), r"did you mean focal\?"),
        *((("--train.layout_args", given, *plain), said) for given, said in layouts.items()),
    ]
    commands = json.dumps([given for given, _ in expected])
    done = trains(tmp_path, tree, "-c", COMMANDS, commands)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    for (given, said), (code, printed) in zip(expected, found, strict=True):
        assert code == 2 and re.search(f"(?i){said}", printed), (given, printed)


# By its name, the module that has a table beside its rows' class.
HOMES = {
    "LOSSES": "losses.loss",
    "PREFERENCES": "losses.preference.row",
    "OPTIMIZERS": "optim.row",
    "SCHEDULES": "optim.row",
    "DATASETS": "data.types.dataset_type",
    "COLUMNS": "data.columns.column",
    "FAMILIES": "models.families.architecture",
    "LAYOUTS": "parallel.row",
    "CALLBACKS": "callbacks",
}
TRAINER_MODULES = {name: f"tilewright.trainer.{module}" for name, module in HOMES.items()}
GROUPS = {n: getattr(importlib.import_module(m), n) for n, m in TRAINER_MODULES.items()}
PLANTED = (
    f"MODULES = {TRAINER_MODULES}"
    + """
import copy, dataclasses, importlib
from tilewright.trainer.parallel.row import Layout
from tilewright.trainer.callbacks import Plugin
from tilewright.trainer.plugins.callback import Callback

def __getattr__(name):  # a row like the table's first
    table = getattr(importlib.import_module(MODULES[name]), name)
    return copy.copy(table[next(n for n in table.names() if n != "planted")])

LAYOUTS = Layout(45, lambda mesh: True, lambda *_: print("its layout"))
CALLBACKS = Plugin(lambda run: print("its callback") or Callback(run), wanted=lambda run: True)
"""
)


FIND = (
    f"MODULES = {TRAINER_MODULES}"
    + """
import importlib, json

tables = {n: getattr(importlib.import_module(m), n) for n, m in MODULES.items()}

def found(name):
    table = tables[name]
    row = table["planted"]
    kinds = row.__mro__ if isinstance(row, type) else (type(row),)
    return "planted" in table.names(), table.row in kinds

def refused(name):
    try:
        tables["LOSSES"][name]
    except ValueError as error:
        return str(error)

rows = {name: found(name) for name in tables}
losses, reports = tables["LOSSES"].names(), tables["LOSSES"]["sharp"].reports
print(json.dumps([rows, losses, reports, refused("no_row"), refused("other")]))
"""
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory, tree):
    """A package beside the trainer with a row for every table, and losses of which two are none;
    and what the tables find of it.
    """
    package = tmp_path_factory.mktemp("planted")
    info = package / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    points = {n: f"[tilewright.{t.name}]\nplanted = planted_rows:{n}\n" for n, t in GROUPS.items()}
    points["LOSSES"] += "sharp = of_loss:SHARP\nno_row = of_loss:NO\nother = json:dumps\n"
    (info / "entry_points.txt").write_text("".join(points.values()))
    (package / "planted_rows.py").write_text(PLANTED)
    code = FILES["tilewright/trainer/losses/focal.py"]
    code = code.replace('LOSSES.add("focal", Loss', "SHARP = Loss")
    (package / "of_loss.py").write_text(code.replace('("cross_entropy",)))', '("cross_entropy",))'))
    done = run(sys.executable, package, f"{package}:{tree}", "-c", FIND)
    assert done.returncode == 0, done.stderr
    return package, json.loads(done.stdout.splitlines()[-1])


def test_every_table_is_extended_by_entry_points(planted):
    assert planted[1][0] == {name: [True, True] for name in GROUPS}


def test_an_entry_point_is_a_row(planted):
    """One that does not import, or gives another object, is refused by name."""
    _, (_, names, reports, no_row, other) = planted
    assert {"no_row", "other", "planted", "sharp"} < {*names} and names == sorted(names)
    assert reports == ["cross_entropy"]
    assert no_row.startswith("the entry point of_loss:NO of planted gives no row of losses: Attr")
    assert "other must be a tilewright.trainer.losses.loss:Loss" in other


def test_a_layout_and_a_callback_of_another_package_are_in_a_run_that_does_not_name_them(
    tmp_path, tree, trains, planted
):
    prepared(tmp_path, max_steps=1, save_hf_weights=False)
    done = trains(tmp_path, f"{planted[0]}:{tree}", *TRAINER)
    assert done.returncode == 0, done.stderr
    assert "its layout" in done.stdout and "its callback" in done.stdout


OPTIONS = """
from typing import Literal

from pydantic import BaseModel, Field

from tilewright.trainer.callbacks import Plugin
from tilewright.trainer.data.types.dataset_type import DATASETS, DatasetType
from tilewright.trainer.losses.loss import Loss, count_labels
from tilewright.trainer.optim.row import Schedule
from tilewright.trainer.plugins.callback import Callback

class OfLoss(BaseModel):
    gamma: float = Field(2.0, ge=0)

def focal(per_token, batch, gamma):
    nll = per_token.values()
    return ((1 - (-nll).exp()) ** gamma * nll).sum(), count_labels(batch)

class OfCallback(BaseModel):
    word: Literal["up", "down"] = "up"

class Says(Callback):
    def __init__(self, run, word):
        super().__init__(run)
        self.word = word

    def after_step(self, step):
        print(f"{self.word} {step.number}")

class OfSchedule(BaseModel):
    floor: float = Field(0.0, ge=0, le=1)

class OfType(BaseModel):
    field: str = "text"

def samples(asked):
    read = DATASETS["text"].samples(asked)
    return lambda row: read({"text": row[asked.options["field"]]})

LOSS = Loss(focal, options=OfLoss)
CALLBACK = Plugin(Says, options=OfCallback)
SCHEDULE = Schedule(lambda done, floor: max(1 - done, floor), options=OfSchedule)
TYPE = DatasetType((("one", "other"),), samples, options=OfType)
"""


def test_rows_of_another_package_have_options(tmp_path, tree, trains):
    """A loss, a callback, a schedule and a type of data set, from a file."""
    package = tmp_path / "package"
    info = package / "options-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: options\nVersion: 1.0\n")
    points = {
        "losses": "LOSS",
        "callbacks": "CALLBACK",
        "schedules": "SCHEDULE",
        "datasets": "TYPE",
    }
    (info / "entry_points.txt").write_text(
        "".join(f"[tilewright.{t}]\nwith_options = of_options:{n}\n" for t, n in points.items())
    )
    (package / "of_options.py").write_text(OPTIONS)
    name = "with_options"
    prepared(
        tmp_path,
        loss=name,
        loss_args={"gamma": 0.0},
        lr_decay_style=name,
        lr_decay_args={"floor": 0.75},
        lr_min=0.0,
        callbacks=[name],
        callback_args={name: {"word": "down"}},
        max_steps=3,
        save_hf_weights=False,
    )
    write_rows(tmp_path / "rows.jsonl", [{"one": "", "other": f"{n} is a text"} for n in range(24)])
    data = [{"path": "rows.jsonl", "type": name, "type_args": {"field": "other"}}]
    given = "--data.datasets", json.dumps(data), "--data.val_set_size", "null"
    paths = f"{package}:{tree}"
    done = trains(tmp_path, paths, *TRAINER, *given)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [row for row in rows(tmp_path) if "loss" in row]
    assert steps[0]["loss"] == pytest.approx(math.log(97), rel=0.02)  # with gamma 0
    assert [row["lr"] for row in steps] == pytest.approx([1e-2, 0.75e-2, 0.75e-2])
    assert [f"down {n}" in done.stdout for n in (1, 2, 3)] == [True] * 3
    data[0]["type_args"] = {"fields": "other"}
    expected = [
        (("--train.loss_args", '{"beta": 1}'), "beta is no option of the loss, which has gamma"),
        (("--train.loss_args", '{"gamma": -1}'), "gamma: input should be greater than or equal to"),
        (("--train.loss", "language_modeling"), "train.loss_args = .*only with_options reads this"),
        (
            ("--train.lr_decay_args", '{"roof": 1}'),
            "roof is no option of the schedule, which has fl",
        ),
        (
            ("--train.lr_decay_args", '{"floor": 2}'),
            "floor: input should be less than or equal to 1",
        ),
        (
            ("--train.lr_decay_style", "linear"),
            "train.lr_decay_args = .*only with_options reads thi",
        ),
        (
            ("--train.callback_args", '{"with_options": {"words": 1}}'),
            "words is no option of the callback with_options, which has word",
        ),
        (
            ("--train.callback_args", '{"with_options": {"word": 1}}'),
            "word: input should be 'up' or",
        ),
        (
            ("--train.callback_args", '{"report": {}}'),
            "report is no callback with options; accepted",
        ),
        (
            ("--train.callbacks", "[]"),
            "train.callback_args = .*train.callbacks does not name with_o",
        ),
        (
            ("--data.datasets", json.dumps(data)),
            "fields is no option of the type with_options, which has field",
        ),
        (("--data.datasets.0.type", "text"), "type_args = .*only with_options reads this"),
    ]
    commands = json.dumps([[*given, *change] for change, _ in expected])
    done = trains(tmp_path, paths, "-c", COMMANDS, commands)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    for (change, said), (code, printed) in zip(expected, found, strict=True):
        assert code == 2 and re.search(f"(?i){said}", printed), (change, printed)


def table(*points):
    """A table of losses with these entry points, (name, object)."""
    found = Table("losses", "tilewright.trainer.losses", Loss)
    found._read = True
    for name, load in points:
        found._points[name] = types.SimpleNamespace(name=name, value=name, dist=None, load=load)
    return found


def test_a_name_has_one_row():
    row, losses = Loss(len), table(("taken", lambda: Loss(len)))
    losses.add("taken", row)
    with pytest.raises(ValueError, match="losses: the name 'taken' is taken"):
        losses.add("taken", row)
    with pytest.raises(ValueError, match="the entry point taken has the name of another row"):
        losses["taken"]
    losses.add("other", row)
    assert losses["other"] is row, "what is not asked for stops nothing"


def test_an_entry_point_is_loaded_once_and_when_it_is_asked_for():
    loaded, row, asking = [], Loss(len), threading.Semaphore(0)

    def load():
        for _ in range(4):  # threads that ask for it meanwhile
            asking.acquire(timeout=10)
        loaded.append(1)
        losses.add("late", row)  # as a file of the table's folder does
        return row

    losses = table(("late", load), ("broken", lambda: 1 / 0))
    assert list(losses.items()) == [] and losses.names() == ["broken", "late"]

    def ask(_):
        asking.release()
        return losses["late"]

    with ThreadPoolExecutor(4) as pool:
        assert all(found is row for found in pool.map(ask, range(4))) and loaded == [1]
    assert list(losses.items()) == [("late", row)]


def test_what_a_loss_returns_is_what_it_declares():
    with pytest.raises(ValueError, match="reports: lr is a number of every step"):
        Loss(len, reports=("lr",))
    loss = Loss(lambda *_: (1, 2), reports=("entropy",))
    with pytest.raises(ValueError, match="and 1 more to report, got 2 in all"):
        loss(None, {})


def test_callbacks_are_called_in_their_order(monkeypatch):
    made, _ = [], CALLBACKS.names()  # before they are replaced
    orders = {"a": 60, "b": 10, "c": 40, "d": 5}
    rows = {n: Plugin(lambda run, n=n: made.append(n), order) for n, order in orders.items()}
    monkeypatch.setattr(CALLBACKS, "_rows", rows)
    train = types.SimpleNamespace(callbacks=["a", "b", "c"], callback_args={})
    run = types.SimpleNamespace(config=types.SimpleNamespace(train=train), callbacks=[])
    add_callbacks(run)
    assert made == ["b", "c", "a"] and len(run.callbacks) == 3


def test_a_schedule_that_leaves_its_interval_ends_the_run(monkeypatch):
    monkeypatch.setitem(SCHEDULES._rows, "wild", Schedule(lambda done: 2.0))
    train = types.SimpleNamespace(lr=1.0, lr_min=0.0, lr_start=0.0, lr_decay_style="wild")
    vars(train).update(lr_warmup_ratio=0.0, lr_decay_ratio=1.0, lr_warmup_steps=0)
    train.lr_decay_steps, train.lr_decay_args = None, {}
    with pytest.raises(ValueError, match="wild: its share must be 0 to 1"):
        schedule(0, 4, train)
