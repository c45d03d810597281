"""Which checkpoints are written, with which parts, and which stay: strategies, the best, kills."""

import math
import os
import pathlib
import shutil

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from preparing import write_rows
from training import QWEN3, rows, run, tensors, three_steps, write_config

from tilewright.trainer import loop
from tilewright.trainer.checkpoint import run_folder
from tilewright.trainer.checkpoint.best import Best
from tilewright.trainer.checkpoint.checkpoint_files import (
    read_metadata,
    read_state,
    verify,
    write_state,
)
from tilewright.trainer.parallel.mesh import Mesh

pytestmark = pytest.mark.packages

HELD = {"data__val_set_size": 4}
BEST = {
    "train__save_hf_weights": False,
    "train__eval_strategy": "steps",
    "train__eval_steps": 1,
    "train__best_metric": "eval_loss",
}
OVER_LOSS = {"metric": "eval_loss", "mode": "min"}
AUTO = "--train.load_checkpoint_path=auto"


def there(folder):
    return sorted(
        int(p.name.rpartition("_")[2]) for p in (folder / "out/checkpoints").glob("global_step_*")
    )


def best_of(folder, step):
    found = read_state(folder / f"out/checkpoints/global_step_{step}")["best"]
    assert found.pop("over").endswith("most=None")
    return found


def report(patch, given):
    """Evaluations report these numbers."""
    names = "eval_loss", "eval_perplexity"
    patch.setattr(loop, "evaluation", lambda *_, **__: dict.fromkeys(names, given.pop(0)))
    return given


@pytest.fixture
def losses(monkeypatch):
    return report(monkeypatch, [])


@pytest.mark.parametrize(
    "settings, steps",
    [
        ({"save_strategy": "no"}, [6]),
        ({"save_strategy": "steps", "save_steps": 4}, [4, 6]),
        ({"save_strategy": "epoch"}, [3, 6]),
        ({"save_strategy": "epoch", "save_epochs": 2}, [6]),
        ({"save_strategy": "best"}, [1, 2, 5, 6]),
        ({"save_strategy": "epoch", "save_best": True}, [1, 2, 3, 5, 6]),
        ({"save_best": True, "best_mode": "max", "save_epochs": 0}, [1, 3, 6]),
        ({"save_steps": 4}, [3, 4, 6]),
    ],
    ids=str,
)
def test_a_run_saves_when_its_strategy_says(settings, steps, losses, tmp_path):
    best = BEST if "best" in str(settings) else {}
    losses += [3.0, 2.0, 4.0, 2.0, 1.0, 1.5]
    options = {**three_steps(tmp_path, **HELD), **best}
    options |= {f"train__{name}": value for name, value in settings.items()}
    path = pathlib.Path(write_config(tmp_path, **options))
    if "save_epochs" not in settings:  # which `write_config` gives
        path.write_text(path.read_text().replace("  save_epochs: 0\n", ""))
    run(str(path), "--train.save_hf_weights=false")
    assert there(tmp_path) == steps


def test_a_resumed_run_knows_the_best_and_what_is_resumed_from_stays(losses, tmp_path, capsys):
    path = write_config(tmp_path, **HELD, **BEST, train__save_steps=1, train__save_total_limit=2)
    losses += [4.0, 2.0, 3.0, 3.0]
    run(path, "--train.max_steps=4")
    assert there(tmp_path) == [2, 4]
    want = {**OVER_LOSS, "value": 2.0, "step": 2}
    assert best_of(tmp_path, 4) == want
    assert "the best checkpoint is global_step_2: eval_loss=2\n" in capsys.readouterr().out
    losses += [3.0, 2.0]
    run(path, AUTO)  # 2 is the best still, and 4 is resumed from
    assert there(tmp_path) == [2, 4, 6] and best_of(tmp_path, 6) == want
    losses += [1.0, 5.0]
    run(path, AUTO, "--train.max_steps=8")
    assert there(tmp_path) == [6, 7, 8] and best_of(tmp_path, 8) == {**want, "value": 1, "step": 7}
    losses += [0.5]
    run(path, AUTO, "--train.max_steps=9", "--train.best_mode=max")  # no comparison with others
    assert best_of(tmp_path, 9) == {**want, "mode": "max", "value": 0.5, "step": 9}
    assert not losses


def test_a_checkpoint_without_an_evaluation_is_not_the_best(losses, tmp_path):
    """Nor is an evaluation without a checkpoint."""
    options = {**HELD, **BEST, "train__eval_steps": 2, "train__save_steps": 3}
    losses += [1.0, 4.0, 2.0]
    run(write_config(tmp_path, **options))
    assert there(tmp_path) == [3, 6]
    assert best_of(tmp_path, 3)["step"] is None and best_of(tmp_path, 6)["step"] == 6


def test_what_is_not_finite_is_never_best():
    for mode in ("min", "max"):
        best = Best("eval_accuracy", mode)
        for value in (math.nan, math.inf, -math.inf):
            assert not best.improved_by({"eval_accuracy": value})
        assert not best.improved_by({"eval_loss": 1.0})
        first = best.at(3, {"eval_accuracy": 0.5})
        assert (first.value, first.step) == (0.5, 3)
        assert first.at(4, {"eval_accuracy": 0.5}) is first
        better = 0.25 if mode == "min" else 0.75
        assert first.at(4, {"eval_accuracy": better}).step == 4
        assert first.at(4, {"eval_accuracy": 1 - better}) is first


@pytest.mark.parametrize("start", ["true", "false"])
def test_a_number_that_no_evaluation_reports_is_told_before_the_first_step(start, tmp_path):
    path = write_config(tmp_path, **{**HELD, **BEST, "train__best_metric": "eval_loss/a"})
    with pytest.raises(
        ValueError,
        match=r"best_metric = eval_loss/a: evaluations report eval_loss, eval_perplexity$",
    ):
        run(path, f"--train.eval_on_start={start}")
    assert not (tmp_path / "out/metrics.jsonl").exists()


def test_one_that_could_not_be_written_is_not_the_best(losses, tmp_path, monkeypatch, caplog):
    """An asynchronous one: the one before it stays."""
    real = run_folder.replace_folder

    def replace(aside, target):
        if target.name == "global_step_3":
            raise OSError(28, "No space left on device")
        real(aside, target)

    monkeypatch.setattr(run_folder, "replace_folder", replace)
    losses += [5.0, 3.0, 1.0, 4.0, 2.0, 6.0]
    options = {"train__save_steps": 1, "train__save_total_limit": 1, "train__save_async": True}
    run(write_config(tmp_path, **HELD, **BEST, **options))
    assert "global_step_3" in caplog.text
    assert best_of(tmp_path, 6)["step"] == 5 and there(tmp_path) == [5, 6]


# ---- parts


@pytest.mark.parametrize("mode, states", [("none", "true"), ("fsdp2", "false")])
def test_a_run_begins_with_the_weights_of_a_checkpoint(mode, states, tmp_path):
    """As from the same weights in Hugging Face's format: its steps, schedule and data from 0."""
    options = {
        "train__lr_decay_style": "cosine",
        "train__max_steps": 3,
        "train__data_parallel_mode": mode,
    }
    run(write_config(tmp_path / "a", **options, train__seed=5), f"--train.save_optimizer={states}")
    folder = tmp_path / "a/out/checkpoints/global_step_3"
    begun = write_config(tmp_path / "b", **options)
    given = f"--train.load_checkpoint_path={folder}", "--train.load_optimizer=false"
    run(begun, *given)
    run(write_config(tmp_path / "c", **options), f"--model.model_path={folder / 'hf'}")
    keys = "step", "loss", "lr", "grad_norm", "tokens"
    found = [[{k: r[k] for k in keys} for r in rows(tmp_path / name)] for name in "bc"]
    assert found[0] == found[1] and [r["step"] for r in found[0]] == [1, 2, 3]
    b, c = (tensors(tmp_path / name, 3) for name in "bc")
    assert all(torch.equal(t, c[name]) for name, t in b.items())
    with pytest.raises(ValueError, match=r"to auto and train\.load_optimizer to true to go on"):
        run(begun, *given)
    run(begun, AUTO, "--train.max_steps=4")  # as any other run
    assert rows(tmp_path / "b")[-1]["step"] == 4


def test_a_checkpoint_without_states_holds_none_and_is_not_gone_on_with(tmp_path):
    path = write_config(tmp_path, train__save_optimizer=False, train__max_steps=2)
    run(path)
    folder = tmp_path / "out/checkpoints/global_step_2"
    names = read_metadata(folder / "dcp").state_dict_metadata
    assert names and all(name.startswith("model.") for name in names)
    assert read_state(folder)["data"]["used"] > 0
    before = (tmp_path / "out/metrics.jsonl").read_text()
    with pytest.raises(ValueError, match=r"no states of the optimizer .*load_optimizer = false"):
        run(path, AUTO, "--train.max_steps=4")
    assert (tmp_path / "out/metrics.jsonl").read_text() == before


def test_weights_of_another_model_are_not_begun_with(tmp_path):
    run(write_config(tmp_path / "a", train__max_steps=1))
    other = write_config(tmp_path / "b", {**QWEN3, "hidden_size": 48})
    folder = tmp_path / "a/out/checkpoints/global_step_1"
    with pytest.raises(ValueError, match="another model"):
        run(other, f"--train.load_checkpoint_path={folder}", "--train.load_optimizer=false")


# ---- kills


class Killed(BaseException):
    """As SIGKILL, which nothing handles."""


def killed_at(number, work):
    """Whether the work was ended before its file operation of that number."""
    left = [number]

    def counted(real):
        def operation(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(*arguments, **options)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("again", [False, True])
def test_a_kill_at_any_moment_leaves_whole_checkpoints_and_the_best(again, losses, tmp_path):
    """The moments are of a checkpoint's publication, with those that it supersedes, and of the
    clean-up by the next start.   again: the checkpoint replaces one of its step.
    """
    losses += [4.0, 2.0, 3.0, 3.0, 3.0]
    run(write_config(tmp_path, **HELD, **BEST, train__save_steps=1, train__max_steps=5))
    folder = tmp_path / "out/checkpoints"
    whole = tmp_path / "whole"
    if again:
        shutil.copytree(folder / "global_step_5", folder / ".global_step_5.partial")
    else:
        (folder / "global_step_5").rename(folder / ".global_step_5.partial")
    (folder / ".global_step_7.partial").mkdir()  # another one, that is still being written
    folder.rename(whole)

    def publish():
        run_folder.publish(
            folder / ".global_step_5.partial",
            folder / "global_step_5",
            2,
            ["global_step_2", "global_step_1"],
        )

    kills, number = 0, 0
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        kills += (killed := killed_at(number, publish))
        assert (folder / ".global_step_7.partial").is_dir()
        if not killed:
            break
        killed_at(number % 7, lambda: run_folder.recover(str(tmp_path / "out"), Mesh()))
        run_folder.recover(str(tmp_path / "out"), Mesh())
        steps = there(tmp_path)
        assert {1, 2, 5} <= {*steps} and not [*folder.glob(".*")]
        for step in steps:
            state = read_state(folder / f"global_step_{step}")
            verify(folder / f"global_step_{step}", state["files"])
        number += 1
    assert there(tmp_path) == [1, 2, 5] and kills > 10


def test_the_best_of_other_data_or_of_another_folder_does_not_count(losses, tmp_path, capsys):
    """Its value is one of other batches, or its checkpoint is not there."""
    path = write_config(tmp_path, **HELD, **BEST, train__save_steps=1, train__save_total_limit=9)
    losses += [2.0, 3.0]
    run(path, "--train.max_steps=2")
    assert best_of(tmp_path, 2)["step"] == 1
    losses += [5.0]
    run(path, AUTO, "--train.max_steps=3", "--train.eval_max_batches=1")
    state = read_state(tmp_path / "out/checkpoints/global_step_3")["best"]
    assert (state["value"], state["step"]) == (5.0, 3)
    losses += [6.0]
    elsewhere = tmp_path / "elsewhere/out"
    other = f"--train.load_checkpoint_path={tmp_path / 'out/checkpoints/global_step_2'}"
    run(path, "--train.max_steps=3", other, f"--train.output_dir={elsewhere}")
    assert best_of(elsewhere.parent, 3) == {**OVER_LOSS, "value": 6.0, "step": 3}
    said = f"global_step_1 (eval_loss=2), is not in {elsewhere / 'checkpoints'}\n"
    assert said in capsys.readouterr().out


# What an evaluation is of, as `Best.apart` tells it, by the arguments that change it.
OTHER_EVALUATIONS = {
    "--train.eval_max_batches=1": "of other batches, or of another loss or reference",
    "--train.best_metric=eval_perplexity": "by eval_loss",
    "--train.best_mode=max": "by the min of eval_loss",
    "--data.test_datasets=[{'path': 'OTHER'}]": "of other data sets",
    "--train.best_metric=null": "",
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The configuration of a run that evaluates on `held.jsonl` and has written three steps, of
    which the second is the best.
    """
    folder = tmp_path_factory.mktemp("begun")
    for name, token in (("held", 5), ("other", 6)):
        write_rows(folder / f"{name}.jsonl", [{"input_ids": [token] * 30}] * 4)
    options = {"data__test_datasets": [{"path": str(folder / "held.jsonl")}], **BEST}
    options |= {"train__save_steps": 1, "train__save_total_limit": 1, "train__max_steps": 3}
    path = write_config(folder, **options)
    with pytest.MonkeyPatch.context() as patch:
        report(patch, [3.0, 1.0, 2.0])
        run(path)
    return path


@pytest.mark.parametrize("change", OTHER_EVALUATIONS)
def test_the_best_by_another_evaluation_stays_and_is_said(change, begun, losses, tmp_path, capsys):
    """And is the best again where a run evaluates as it did."""
    folder, why = pathlib.Path(begun).parent, OTHER_EVALUATIONS[change]
    shutil.copytree(folder / "out", tmp_path / "out")
    assert there(tmp_path) == [2, 3]
    own = begun, AUTO, f"--train.output_dir={tmp_path / 'out'}"
    change = change.replace("OTHER", str(folder / "other.jsonl"))
    losses += [4.0, 5.0, 6.0, 3.0, 0.5]
    run(*own, change, "--train.max_steps=5")
    said = capsys.readouterr().out
    named = "the best so far, global_step_2 (eval_loss=1), stays"
    if why:
        named = f"the best checkpoint so far, global_step_2 (eval_loss=1), was the best {why}: "
    assert said.count(named) == 1 and 2 in there(tmp_path)
    run(*own, change, "--train.max_steps=6")
    assert 2 in there(tmp_path) and named not in capsys.readouterr().out
    run(*own, "--train.max_steps=7")
    assert best_of(tmp_path, 7)["step"] == 2 and best_of(tmp_path, 7)["value"] == 1.0
    run(*own, "--train.max_steps=8")
    assert best_of(tmp_path, 8)["step"] == 8 and not losses


def test_the_best_of_a_version_that_said_less_compares(losses, tmp_path):
    path = write_config(tmp_path, **HELD, **BEST, train__save_steps=1)
    losses += [2.0, 3.0]
    run(path, "--train.max_steps=2")
    folder = tmp_path / "out/checkpoints/global_step_2"
    state = read_state(folder)
    first, by, most = state["best"]["over"].split(" ")
    assert by.startswith("by=")
    state["best"]["over"] = f"{first} {most}"
    write_state(folder, state)
    losses += [2.5]
    run(path, AUTO, "--train.max_steps=3")
    assert best_of(tmp_path, 3)["step"] == 1


def test_a_name_that_depends_on_labels_is_known_without_them(tmp_path):
    """The first batch has no label."""
    lines = [{"input_ids": [5] * 30, "labels": [-100] * 30}]
    lines += [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}] * 3
    data = write_rows(tmp_path / "rows.jsonl", lines)
    path = write_config(
        tmp_path,
        data__test_datasets=[{"path": str(data)}],
        train__max_steps=2,
        train__eval_strategy="steps",
        train__eval_steps=1,
        train__eval_accuracy=True,
        train__eval_max_batches=1,
        train__eval_micro_batch_size=1,
        train__best_metric="eval_accuracy",
    )
    run(path)
    assert not [row for row in rows(tmp_path) if "eval_loss" in row], "and the run goes on"
    more = tmp_path / "more"
    run(path, "--train.eval_max_batches=2", f"--train.output_dir={more / 'out'}")
    assert sum("eval_accuracy" in row for row in rows(more)) == 2
