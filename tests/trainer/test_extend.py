"""The pages docs/trainer/extend*.md: each of their files is a row of a table, in a copy of the
package in which nothing else is edited.
"""

import dataclasses
import functools
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
import yaml

import tilewright

pytest.importorskip("datasets")
from tilewright.trainer import tables
from tilewright.trainer.config import Config
from tilewright.trainer.data import cache_key
from tilewright.trainer.losses.loss import Loss
from tilewright.trainer.optim.schedules import Schedule, schedule
from tilewright.trainer.plugins.callback import Plugin, callbacks
from tilewright.trainer.tables import CALLBACKS, DATASETS, SCHEDULES, Table

pytestmark = pytest.mark.packages
ROOT = pathlib.Path(tilewright.__file__).parents[1]
PAGES = [p.read_text() for p in sorted((ROOT / "docs/trainer").glob("extend*.md"))]
FILES = dict(
    re.findall(r'```python title="(tilewright/trainer/\S+)"\n(.*?)```', "".join(PAGES), re.S)
)
SHAPE = {
    "model_type": "seed_oss",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
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
from tilewright.trainer.tables import LOSSES

seen = []

def harder(per_token, batch):
    seen.extend(batch["difficulty"].tolist())
    return per_token.sum(), count_labels(batch)

LOSSES.add("harder", Loss(harder, columns=("labels", "difficulty")))
assert train.main(["config.yaml"]) == 0
print(sorted({d for d in seen if d > 0}))
"""


def write_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {
        token: i for i, token in enumerate(["<s>", "</s>", "<pad>", *map(chr, range(32, 126))])
    }
    plain = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    wrapped.save_pretrained(folder)


def environment(paths):
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(paths)}


def run(folder, paths, *arguments, python=sys.executable):
    return subprocess.run(
        [python, *arguments],
        cwd=folder,
        env=environment(paths) | {"PYTHON_EXEC": str(python)},  # of torchrun's ranks
        capture_output=True,
        text=True,
        check=False,
    )


def prepared(folder, **train):
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(SHAPE))
    write_tokenizer(folder / "model")
    rows = [
        {
            "instruction": f"What is {n}?",
            "input": "" if n % 2 else "Think.",
            "output": f"{n}.",
            "difficulty": n / 4,
        }
        for n in range(24)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    tree = {
        "model": {"config_path": "model"},
        "data": {
            "datasets": [{"path": "rows.jsonl", "type": "instructions"}],
            "dataset_prepared_path": "prepared",
            "sample_packing_sequence_len": 64,
            "pad_to_multiple_of": 8,
            "val_set_size": 4,
        },
        "train": {
            "output_dir": "out",
            "data_parallel_mode": "none",
            "enable_mixed_precision": False,
            "enable_gradient_checkpointing": False,
            "max_steps": 4,
            "save_epochs": 0,
            "lr": 1e-2,
            **train,
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))


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
        yield functools.partial(run, python=python)


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
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    # (1 - p)^2 of the cross-entropy, with p = 1 / 97 at the start
    first = steps[0]
    assert math.isclose(first["cross_entropy"], math.log(97), rel_tol=0.02)
    assert 0.9 < first["loss"] / first["cross_entropy"] < 1
    assert steps[-1]["cross_entropy"] < first["cross_entropy"]
    want = [1e-2 * (1 - math.sqrt(i / 3)) for i in range(4)]
    assert [row["lr"] for row in steps] == pytest.approx(want)
    losses = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    best = min(losses, key=losses.get)
    assert json.loads((tmp_path / "out/best.json").read_text()) == {
        "step": best,
        "eval_loss": losses[best],
    }
    again = "train.load_checkpoint_path=auto", "train.max_steps=5"
    trainer = "-m", "tilewright.trainer.train", "config.yaml"
    resumed = trains(tmp_path, tree, *trainer, *(f"--{a}" for a in again))
    assert resumed.returncode == 0, resumed.stderr
    other = "--train.optimizer_args", '{"beta2": 0.5}'
    resumed = trains(tmp_path, tree, *trainer, *(f"--{a}" for a in again), *other)
    assert resumed.returncode == 1 and "was written with another optimizer" in resumed.stderr


def test_a_pipeline_reports_what_one_process_does(tmp_path, tree, trains):
    """The further sums of a loss are of the last stage alone."""
    options = {"gradient_accumulation_steps": 2, "save_hf_weights": False, "z_loss": 0.1}
    prepared(tmp_path, loss="focal", **options)
    trainer, found = ("-m", "tilewright.trainer.train", "config.yaml", "--train.max_steps=1"), {}
    ranks = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    stages = "--train.data_parallel_mode=fsdp2", "--train.pipeline_parallel_size=2"
    for name, command in (("one", trainer), ("two", (*ranks, *trainer, *stages))):
        done = trains(tmp_path, tree, *command, f"--train.output_dir={name}")
        assert done.returncode == 0, done.stdout + done.stderr
        rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        found[name] = next(row["cross_entropy"] for row in rows if "cross_entropy" in row)
    assert found["two"] == pytest.approx(found["one"], rel=1e-5) and found["one"] > 4


def test_copies_of_the_page_train_apart(tmp_path, tree, trains):
    """Plain descent that averages after each step is data parallelism. All copies begin with the
    weights that one of them reads. A checkpoint between two averages has one model, with which a
    run goes on as it would have.
    """
    prepared(tmp_path, max_grad_norm=0.0, lr_decay_style="constant")
    ranks = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"

    def losses(name, every, *more, **options):
        if every:
            options["layout_args"] = json.dumps({"local_sgd": {"copies": 2, "every": every}})
        given = [f"--train.{k}={v}" for k, v in {"output_dir": name, **options}.items()]
        given += more
        done = trains(
            tmp_path, tree, *ranks, "-m", "tilewright.trainer.train", "config.yaml", *given
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows = [*map(json.loads, lines)]
        return [
            [row[key] for row in rows if key in row] for key in ("loss", "grad_norm", "eval_loss")
        ]

    plain = {"optimizer": "sgd", "lr": 0.5, "max_steps": 3, "data_parallel_mode": "ddp"}
    want, norms, _ = losses("replicas", None, **plain, save_hf_weights=False)
    found, own, evaluated = losses("each", 1, **plain)
    assert found == pytest.approx(want, rel=1e-5) and own[0] > 1.1 * norms[0]
    certified = json.loads((tmp_path / "each/certificate.json").read_text())["facts"]["layout"]
    assert certified["local"] == certified["processes"] == 2 and "apart" not in certified
    weights = "--model.model_path=each/checkpoints/global_step_3/hf"
    third = {"data_parallel_mode": "fsdp2", "max_steps": 4, "save_hf_weights": False}
    third["eval_strategy"] = "epoch"  # not where a checkpoint is written
    apart, _, begins = losses("third", 3, weights, **third, save_steps=2, eval_on_start=True)
    assert begins[0] == pytest.approx(evaluated[-1], rel=1e-5)
    third["load_checkpoint_path"] = "third/checkpoints/global_step_2"
    again, *_ = losses("again", 3, weights, **third)
    assert again == apart[2:]


def test_a_loss_reads_the_column_of_the_page(tmp_path, tree, trains):
    prepared(tmp_path, loss="harder", max_steps=None, num_train_epochs=1)
    done = trains(tmp_path, tree, "-c", READER)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == str([n / 4 for n in range(1, 24)])


def test_a_type_of_another_version_is_prepared_anew(tmp_path, monkeypatch):
    """Rows of version 0 have the names that prepared sets had before there were versions."""
    (tmp_path / "a.txt").write_text("text")
    parts = {"model": {"config_path": "x"}, "train": {"output_dir": "o"}}
    entries = [{"path": str(tmp_path / "a.txt"), "type": "text"}]
    config = Config(**parts, data={"datasets": entries, "dataset_prepared_path": str(tmp_path)})
    monkeypatch.setattr(cache_key, "_tokenizer", lambda *_: None)
    names, row = [], DATASETS["text"]
    for version in (0, 1, 2):
        changed = dataclasses.replace(row, version=version)
        monkeypatch.setitem(DATASETS._rows, "text", changed)
        names.append(
            cache_key.cache_key(
                config.data.datasets, config.data, config.model, config.train.seed, 97, True, {}
            )
        )
    assert len({*names}) == 3


def test_options_and_names_that_do_not_fit_are_refused(tmp_path, tree, trains):
    prepared(tmp_path, optimizer="lion", optimizer_args={"beta3": 0.9})
    trainer = "-m", "tilewright.trainer.train", "config.yaml"
    done = trains(tmp_path, tree, *trainer)
    assert done.returncode == 2
    said = (
        r"^train\.optimizer_args = .*: beta3 is no option of the optimizer, which has beta1, beta2"
    )
    assert re.search(said, done.stderr)
    done = trains(tmp_path, tree, *trainer, "--train.optimizer", "adamw")
    assert done.returncode == 2 and re.search("only .* lion .* read this", done.stderr)
    done = trains(
        tmp_path, tree, *trainer, "--train.callbacks", "[report]", "--train.optimizer_args", "{}"
    )
    assert done.returncode == 2 and "report is there where other fields ask for it" in done.stderr
    done = trains(tmp_path, tree, *trainer, "--train.loss", "focl", "--train.optimizer_args", "{}")
    assert done.returncode == 2 and "did you mean focal?" in done.stderr
    for given, said in (
        ('{"local": {}}', "local is no layout with options; accepted: local_sgd"),
        (
            '{"local_sgd": {"size": 2}}',
            "size is no option of the layout local_sgd, which has copies",
        ),
        ('{"local_sgd": {"copies": 0}}', "copies: input should be greater than or equal to 1"),
        ('{"local_sgd": {"copies": 2}}', "local_sgd.copies = 2: 1 processes do not divide by 2"),
    ):
        options = "--train.layout_args", given, "--train.optimizer_args", "{}"
        done = trains(tmp_path, tree, *trainer, *options)
        assert done.returncode == 2 and said.lower() in done.stderr.lower(), done.stderr


def test_an_entry_point_is_a_row(tmp_path):
    """Of a package that is installed beside this one; one that does not import is refused by
    name.
    """
    package = tmp_path / "site"
    info = package / "my_losses-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-losses\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tilewright.losses]\nfocal = my_losses:FOCAL\nbroken = my_losses:NO\nother = json:dumps\n"
    )
    code = FILES["tilewright/trainer/losses/focal.py"].replace(
        'LOSSES.add("focal", Loss', "FOCAL = Loss"
    )
    code = code.replace('("cross_entropy",)))', '("cross_entropy",))')
    (package / "my_losses.py").write_text(code)
    script = (
        "from tilewright.trainer.tables import LOSSES\n"
        "print(LOSSES.names(), LOSSES['focal'].reports)\n"
        "for name in ('broken', 'other'):\n"
        "    try: LOSSES[name]\n"
        "    except ValueError as error: print(error)\n"
    )
    done = run(tmp_path, f"{package}:{ROOT}", "-c", script)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    names = sorted({*tables.LOSSES.names(), "broken", "focal", "other"})
    assert said[0] == f"{names} ('cross_entropy',)"
    assert re.match(
        "the entry point my_losses:NO of my-losses gives no row of losses: Attr", said[1]
    )
    assert "other must be a tilewright.trainer.losses.loss:Loss" in said[2]


GROUPS = {name: table for name, table in vars(tables).items() if isinstance(table, Table)}
PLANTED = """
import copy, dataclasses
from tilewright.trainer import tables
from tilewright.trainer.parallel.layouts import Layout
from tilewright.trainer.plugins.callback import Callback, Plugin

def __getattr__(name):  # a row like the table's first
    table = getattr(tables, name)
    return copy.copy(table[next(n for n in table.names() if n != "planted")])

LAYOUTS = Layout(45, lambda mesh: True, lambda *_: print("its layout"))
CALLBACKS = Plugin(lambda run: print("its callback") or Callback(run), wanted=lambda run: True)
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A package with a row for every table, and what each table finds of it."""
    package = tmp_path_factory.mktemp("planted")
    info = package / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    points = [f"[tilewright.{t.name}]\nplanted = planted_rows:{n}\n" for n, t in GROUPS.items()]
    (info / "entry_points.txt").write_text("".join(points))
    (package / "planted_rows.py").write_text(PLANTED)
    script = (
        "from tilewright.trainer import tables\n"
        f"for name in {[*GROUPS]}:\n"
        "    table = getattr(tables, name)\n"
        "    print(name, 'planted' in table.names(), type(table['planted']).__name__)\n"
    )
    done = run(package, f"{package}:{ROOT}", "-c", script)
    assert done.returncode == 0, done.stderr
    return package, done.stdout.splitlines()


@pytest.mark.parametrize("name", GROUPS)
def test_every_table_is_extended_by_entry_points(planted, name):
    assert f"{name} True {GROUPS[name].row.partition(':')[2]}" in planted[1]


def test_a_layout_and_a_callback_of_another_package_are_in_a_run_that_does_not_name_them(
    tmp_path, tree, trains, planted
):
    prepared(tmp_path, max_steps=1, save_hf_weights=False)
    trainer = "-m", "tilewright.trainer.train", "config.yaml"
    done = trains(tmp_path, f"{planted[0]}:{tree}", *trainer)
    assert done.returncode == 0, done.stderr
    assert "its layout" in done.stdout and "its callback" in done.stdout


def table(*points):
    """A table of losses with these entry points, (name, object)."""
    found = Table("losses", "tilewright.trainer.losses", "tilewright.trainer.losses.loss:Loss")
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
    rows = {
        name: Plugin(lambda run, name=name: made.append(name), order)
        for name, order in (("a", 60), ("b", 10), ("c", 40), ("d", 5))
    }
    monkeypatch.setattr(CALLBACKS, "_rows", rows)
    train = types.SimpleNamespace(callbacks=["a", "b", "c"])
    callbacks(types.SimpleNamespace(config=types.SimpleNamespace(train=train)))
    assert made == ["b", "c", "a"]


def test_a_schedule_that_leaves_its_interval_ends_the_run(monkeypatch):
    monkeypatch.setitem(SCHEDULES._rows, "wild", Schedule(lambda done: 2.0))
    train = types.SimpleNamespace(lr=1.0, lr_min=0.0, lr_start=0.0, lr_decay_style="wild")
    vars(train).update(lr_warmup_ratio=0.0, lr_decay_ratio=1.0, lr_warmup_steps=0)
    train.lr_decay_steps = None
    with pytest.raises(ValueError, match="wild: its share must be 0 to 1"):
        schedule(0, 4, train)
