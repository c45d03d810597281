"""When a run evaluates, on how much, and that training goes on as if it had not."""

import itertools
import json
import math
import random
import shutil
import signal
from fractions import Fraction

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from training import EPOCHS, engine_of, rows, run, tensors, three_steps, write_config
from whole import data_of

from tilewright.trainer import launch, loop, train
from tilewright.trainer.config import ConfigError, load
from tilewright.trainer.data.batches import evaluation_batches
from tilewright.trainer.engine import Engine
from tilewright.trainer.interrupts import Interrupts, Stopped
from tilewright.trainer.losses.language_modeling import language_modeling
from tilewright.trainer.losses.loss import LOSSES, Loss, count_labels
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.plan import Plan

pytestmark = pytest.mark.packages

HELD = {"data__val_set_size": 7}
STEPS = {"train__eval_strategy": "steps"}
ONES = {"train__eval_micro_batch_size": 1}
EPOCH = {"train__eval_strategy": "epoch"}


def evaluated(folder):
    return [row["step"] for row in rows(folder) if "eval_loss" in row]


@pytest.fixture
def asked(monkeypatch):
    """The number of batches of each forward pass."""
    found, real = [], Engine.forward

    def forward(self, batches, loss):
        found.append(len(batches))
        return real(self, batches, loss)

    monkeypatch.setattr(Engine, "forward", forward)
    return found


def settings_of(**train):
    least = ["--train.output_dir=-", '--data.datasets=[{"path": "dummy"}]', "--model.config_path=-"]
    fields = (f"--train.{name}={json.dumps(value)}" for name, value in train.items())
    return load(None, [*least, "--data.val_set_size=7", *fields]).train


@pytest.mark.parametrize(
    "settings, steps",
    [
        ({}, [0, 3, 6]),
        ({"save_steps": 4}, [0, 3, 4, 6]),
        ({"eval_on_start": False}, [3, 6]),
        ({"eval_strategy": "steps", "eval_steps": 2}, [2, 4, 6]),
        ({"eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True}, [0, 4]),
        ({"eval_strategy": "epoch"}, [3, 6]),
        ({"eval_strategy": "epoch", "eval_epochs": 2, "save_steps": 1}, [6]),
        ({"eval_strategy": "epoch", "eval_epochs": 0.5}, [2, 3, 5, 6]),
        ({"eval_strategy": "no", "save_steps": 1}, []),
    ],
    ids=str,
)
def test_a_run_evaluates_when_its_strategy_says(settings, steps):
    """In two epochs of three steps."""
    plan = Plan(settings_of(num_train_epochs=2, save_epochs=0, **settings), 3)
    assert plan.total == 6
    assert [n for n in range(7) if plan.evaluates(n)] == steps


@pytest.mark.parametrize("epochs", ["0.5", "1.5", "0.1", "0.3", "2", "1e-2"])
def test_fractions_of_epochs_are_where_they_are_reached(epochs):
    """In the step that reaches each; also in a run that has taken other steps so far."""
    train = settings_of(num_train_epochs=4, save_epochs=float(epochs))
    for steps, shift in itertools.product((1, 3, 5, 7, 10), (0, -3)):
        plan, every = Plan(train, steps, shift), Fraction(epochs) * steps
        reached = {math.ceil(i * every) for i in range(1, 401) if i * every <= 4 * steps}
        todo = range(1, plan.total + 1)
        for found, want in (
            (plan.saves, reached | {4 * steps}),
            (plan.evaluates, reached | {(i + 1) * steps for i in range(4)}),
        ):
            assert [n for n in todo if found(n)] == sorted({n + shift for n in want} & {*todo})


def test_a_run_saves_and_evaluates_at_fractions_of_its_epochs(tmp_path):
    """Three steps an epoch, the second one of which reaches its half; again in a resumed run."""
    options = {**three_steps(tmp_path, **HELD), "train__save_hf_weights": False}
    path = write_config(tmp_path, **options, train__save_epochs=0.5)
    run(path)
    found = tmp_path / "out/checkpoints"
    saved = sorted(int(p.name.rpartition("_")[2]) for p in found.glob("global_step_*"))
    assert saved == [2, 3, 5, 6] and evaluated(tmp_path) == [0, 2, 3, 5, 6]
    for step in (5, 6):
        shutil.rmtree(found / f"global_step_{step}")
    run(path, "--train.load_checkpoint_path=auto")
    assert (found / "global_step_5").is_dir() and evaluated(tmp_path) == [0, 2, 3, 5, 6]


def test_epochs_of_a_run_that_goes_on_with_other_steps_are_those_of_the_data(tmp_path):
    """Evaluations at their ends, and numbers per step: two steps of an epoch, then four."""
    bins = len(data_of(load(write_config(tmp_path, **HELD)), Mesh())[0].bins)
    falling = {"schedule": "linear", "from": 0.5, "to": 0.1, "steps": 9}
    path = write_config(
        tmp_path,
        **{**EPOCHS, **EPOCH, **HELD, "train__save_hf_weights": False},
        train__max_grad_norm=falling,
        train__weight_decay=falling,
    )
    size = "--train.gradient_accumulation_steps={}".format
    run(path, size(math.ceil(bins / 2)), "--train.num_train_epochs=1")
    assert evaluated(tmp_path) == [2]
    more = ["--train.load_checkpoint_path=auto", "--train.num_train_epochs=3"]
    seen, step = [], Engine.optim_step

    def looking(self, factor, max_norm):
        seen.append((max_norm, max(g["weight_decay"] for g in self.optimizer.param_groups)))
        return step(self, factor, max_norm)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Engine, "optim_step", looking)
        run(path, size(math.ceil(bins / 4)), *more)
    assert evaluated(tmp_path) == [2, 6, 10] and len(seen) == 8
    # As if four steps of the present size had been taken.
    values = [0.5 - 0.05 * n for n in range(4, 9)] + [0.1] * 3
    assert seen == [pytest.approx((v, v)) for v in values]


def test_training_has_the_bits_that_it_has_without_evaluation(tmp_path, monkeypatch):
    """Evaluation draws random numbers here, as do steps."""
    drawn, step, evaluate = [], Engine.optim_step, Engine.forward

    def drawing(self, *arguments):
        drawn[-1].append(torch.rand(()).item())
        return step(self, *arguments)

    def careless(self, *arguments):
        torch.rand(5)
        return evaluate(self, *arguments)

    monkeypatch.setattr(Engine, "optim_step", drawing)
    monkeypatch.setattr(Engine, "forward", careless)
    found = []
    for i, settings in enumerate(
        (
            {"train__eval_strategy": "no"},
            {**STEPS, "train__eval_steps": 1, "train__eval_micro_batch_size": 3},
            {**EPOCH, "train__eval_on_start": True, **ONES, "train__eval_max_batches": 0.5},
            {**ONES, "train__eval_sanity_batches": 2, "train__eval_max_batches": 1},
        )
    ):
        folder = tmp_path / str(i)
        drawn.append([])
        options = {**three_steps(folder, **HELD), "train__save_steps": 4}
        run(write_config(folder, **{**options, **settings}))
        steps = [(r["loss"], r["grad_norm"], r["tokens"]) for r in rows(folder) if "loss" in r]
        found.append((steps, drawn[-1], tensors(folder, 6), evaluated(folder)))
    assert not found[0][3] and all(given[3] for given in found[1:])
    for steps, numbers, weights, _ in found[1:]:
        assert (steps, numbers) == found[0][:2] and len(numbers) == 6
        assert all(torch.equal(t, weights[name]) for name, t in found[0][2].items())


def test_runs_that_evaluate_and_save_otherwise_are_one_computation(tmp_path, capsys):
    """So one is certified by the other; what both evaluate is compared."""
    first = write_config(tmp_path / "a", **HELD, train__save_hf_weights=False)
    run(first)
    others = {
        "eval_steps": 3,
        "eval_on_start": True,
        "eval_sanity_batches": 1,
        "save_strategy": "best",
        "best_metric": "eval_loss",
        "best_mode": "max",
        "save_optimizer": False,
        "log_steps": 2,
    }
    options = {**HELD, **STEPS, **{f"train__{name}": value for name, value in others.items()}}
    text = write_config(tmp_path / "b", **options, train__save_hf_weights=False)
    run(text, f"--train.assert_deterministic={tmp_path / 'a/out'}")
    assert "deterministic: 6 steps are bit-identical" in capsys.readouterr().out
    assert evaluated(tmp_path / "b") == [0, 3, 6]
    part = f"--train.output_dir={tmp_path / 'c'}", "--train.eval_max_batches=1"
    with pytest.raises(ValueError, match=r"field train\.eval_max_batches is 1 in this run"):
        run(first, *part, f"--train.assert_deterministic={tmp_path / 'a/out'}")


def test_what_cannot_be_evaluated_ends_a_run_before_its_first_step(tmp_path, monkeypatch):
    """A resumed one too; what the few batches give is not reported."""
    asked, real = [], Engine.forward

    def evaluate(self, batches, loss):
        asked.append(len(batches))
        if len(asked) == 4:
            raise ValueError("planted")
        return real(self, batches, loss)

    monkeypatch.setattr(Engine, "forward", evaluate)
    settings = {**STEPS, "train__eval_steps": 2, "train__eval_sanity_batches": 3}
    path = write_config(tmp_path, **HELD, **settings, train__save_hf_weights=False)
    run(path, "--train.max_steps=4")
    assert asked[0] == 3 and min(asked[1:]) > 3 and evaluated(tmp_path) == [2, 4]
    with pytest.raises(ValueError, match="planted"):
        run(path, "--train.load_checkpoint_path=auto")
    assert asked[3] == 3 and rows(tmp_path)[-1]["step"] == 4


def bins_of(held, *arguments, **options):
    """Indices of the bins of each batch."""
    return list(evaluation_batches(held, *arguments, **options).batch_sampler)


def test_every_rank_evaluates_so_many_of_the_first_batches(tmp_path):
    config = load(write_config(tmp_path, **HELD, data__eval_sample_packing=False))
    [held] = data_of(config, Mesh())[1].values()
    assert len(held) == 7
    ranks = [bins_of(held, 2, rank, 2, most=1) for rank in (0, 1)]
    assert ranks == [[[0, 1]], [[2, 3]]]
    assert bins_of(held, 2, 0, 1, most=3) == [[0, 1], [2, 3], [4, 5]]
    for everything in (9, 0, 1.0):
        assert bins_of(held, 2, 0, 1, most=everything) == bins_of(held, 2, 0, 1)
    # Four batches on one rank, two on each of two, the last of them empty.
    for share, alone, of_two in ((0.01, 1, 1), (0.5, 2, 1), (0.51, 3, 2), (0.99, 4, 2)):
        assert len(bins_of(held, 2, 0, 1, most=share)) == alone
        assert [len(bins_of(held, 2, rank, 2, most=share)) for rank in (0, 1)] == [of_two] * 2


@pytest.mark.parametrize("given", ["1", "1.0", "1e-1"])
def test_a_limit_is_a_count_or_a_share_in_a_file_and_on_the_command_line(given, tmp_path):
    number = float(given) if "." in given or "e" in given else int(given)
    typed = load(write_config(tmp_path, **HELD), [f"--train.eval_max_batches={given}"])
    written = load(write_config(tmp_path, **HELD, train__eval_max_batches=number))
    for config in (typed, written):
        found = config.train.eval_max_batches
        assert (found, type(found)) == (number, type(number))


def test_the_size_of_a_batch_in_evaluation_changes_its_number_and_no_loss(tmp_path, asked):
    losses = []
    for size in (1, 2, 7):
        folder = tmp_path / str(size)
        options = {**HELD, "data__eval_sample_packing": False, "train__max_steps": 1}
        path = write_config(folder, **options, train__save_hf_weights=False)
        run(path, f"--train.eval_micro_batch_size={size}")
        losses.append([row["eval_loss"] for row in rows(folder) if "eval_loss" in row])
    assert asked == [7, 7, 4, 4, 1, 1]
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=1e-6)


def test_a_part_of_the_batches_has_the_loss_of_their_tokens(tmp_path):
    options = {**HELD, "data__eval_sample_packing": False, "train__max_steps": 1}
    path = write_config(tmp_path, **options)
    run(path, "--train.eval_max_batches=3")
    config = load(path)
    engine, [held] = engine_of(config), data_of(config, Mesh())[1].values()
    few = [batch for batch, _ in zip(evaluation_batches(held, 1, 0, 1), range(3), strict=False)]
    assert rows(tmp_path)[0]["eval_loss"] == engine.evaluate(few, language_modeling)


# ---- what is reported


def two_sets(folder, **changes):
    """A configuration with two sets to evaluate on, and one that has the rows of both."""
    rng = random.Random(0)
    made = {}
    for name, count in (("plays", 20), ("letters", 30)):
        made[name] = [
            {"input_ids": [rng.randrange(97) for _ in range(rng.randint(2, 20))]}
            for _ in range(count)
        ]
    made["both"] = made["plays"] + made["letters"]
    for name, documents in made.items():
        text = "".join(json.dumps(row) + "\n" for row in documents)
        (folder / f"{name}.jsonl").write_text(text)
    entries = {name: {"path": str(folder / f"{name}.jsonl")} for name in made}
    options = {"train__max_steps": 2, "train__save_hf_weights": False, **changes}
    several = write_config(
        folder / "several", data__test_datasets=[entries["plays"], entries["letters"]], **options
    )
    return several, write_config(folder / "one", data__test_datasets=[entries["both"]], **options)


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """(folder, path of a configuration of one set): runs on each of `two_sets`."""
    folder = tmp_path_factory.mktemp("sets")
    several, one = two_sets(folder, train__eval_accuracy=True)
    run(several)
    run(one)
    return folder, one


def test_each_set_is_reported_and_all_together(reported):
    found, whole = (
        [row for row in rows(reported[0] / name) if "eval_loss" in row]
        for name in ("several", "one")
    )
    assert len(found) == len(whole) == 2
    names = ("eval_loss", "eval_perplexity", "eval_accuracy")
    parts = [f"{name}/{part}" for name in names for part in ("plays", "letters")]
    for row, all_rows in zip(found, whole, strict=True):
        assert row.keys() == {"step", *names, *parts}
        assert all_rows.keys() == {"step", *names}, "one set has no name"
        for name in names:
            assert row[name] == pytest.approx(all_rows[name], rel=1e-6), name
        assert row["eval_perplexity"] == math.exp(row["eval_loss"])
        assert row["eval_perplexity/plays"] == math.exp(row["eval_loss/plays"])
        low, high = sorted(row[f"eval_loss/{part}"] for part in ("plays", "letters"))
        assert low < row["eval_loss"] < high


def test_accuracy_is_the_share_of_most_probable_labels(reported):
    folder, path = reported
    config = load(path)
    engine, [held] = engine_of(config), data_of(config, Mesh())[1].values()
    hits = labels = 0
    for batch in evaluation_batches(held, 2, 0, 1):
        given = {name: batch[name] for name in ("input_ids", "position_ids", "cu_seqlens")}
        with torch.no_grad():
            logits = engine.model(**given, ends=tuple(batch["cu_seqlens"].tolist()))
        counted = batch["labels"] != -100
        hits += int((logits.argmax(-1) == batch["labels"])[counted].sum())
        labels += int(counted.sum())
    assert rows(folder / "one")[0]["eval_accuracy"] == hits / labels
    assert 0 < hits < labels


def test_what_a_loss_reports_is_reported_of_evaluations(tmp_path, monkeypatch):
    def reporting(per_token, batch):
        total = per_token.sum()
        return total, count_labels(batch), 3 * total.detach()

    made = Loss(reporting, reports=("thrice",))
    monkeypatch.setattr(LOSSES, "_rows", LOSSES._rows | {"reporting": made})
    run(two_sets(tmp_path, train__loss="reporting")[0])
    row = rows(tmp_path / "several")[0]
    assert "eval_perplexity" not in row, "of a loss in nats alone"
    assert row["eval_thrice"] == pytest.approx(3 * row["eval_loss"])
    assert row["eval_thrice/plays"] == pytest.approx(3 * row["eval_loss/plays"])


def test_a_test_split_is_evaluated_once_after_the_last_step(tmp_path):
    path = two_sets(tmp_path, train__do_test=True, data__val_set_size=4)[0]
    run(path)
    found = [row for row in rows(tmp_path / "several") if "loss" not in row]
    tests = [row for row in found if "test_loss" in row]
    [last] = tests
    assert found[-1] is last and last["step"] == 2
    assert {"test_loss", "test_loss/plays", "test_loss/letters", "test_perplexity"} <= last.keys()
    during = [row for row in found if "eval_loss" in row]
    assert [row["step"] for row in during] == [0, 2]
    assert all("eval_loss/plays" not in row for row in during), "what was held out alone"


def test_a_test_split_is_cut_to_its_own_limit(tmp_path, asked):
    """A run that tests alone has the size and the accuracy of evaluations."""
    options = {"data__eval_sample_packing": False, "train__eval_strategy": "no"}
    path = two_sets(tmp_path, train__do_test=True, train__max_steps=1, **options)[0]
    one, four = ("--train.micro_batch_size=1",), ("--train.eval_micro_batch_size=4",)
    more = "--train.eval_accuracy=true"
    for i, (limit, size, batches) in enumerate(
        ((0, one, [20, 30]), (3, one, [3, 3]), (0.5, one, [10, 15]), (0, four, [5, 8]))
    ):
        asked.clear()
        place = f"--train.output_dir={tmp_path / str(i) / 'out'}"
        run(path, f"--train.test_max_batches={limit}", more, place, *size)
        assert asked == batches
        assert rows(tmp_path / str(i))[-1].keys() >= {"test_accuracy", "test_accuracy/plays"}


def test_a_test_split_needs_one(tmp_path):
    with pytest.raises(
        ConfigError, match=r"train\.do_test = true, data\.test_datasets = \[\]: there is n"
    ):
        load(write_config(tmp_path, train__do_test=True))


def test_a_test_follows_the_last_checkpoint_and_its_export(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(loop.Run, "export", lambda run: done.append("export"))
    monkeypatch.setattr(loop.Run, "test", lambda run: done.append("test"))
    run(write_config(tmp_path, train__max_steps=1))
    assert done == ["export", "test"]


def test_an_evaluation_that_a_signal_has_cut_off_is_made_up_for(tmp_path, monkeypatch):
    options = {**HELD, **STEPS, "train__eval_steps": 2, "train__max_steps": 4}
    path = write_config(tmp_path, **options)
    signals = iter([None, signal.SIGTERM])
    monkeypatch.setattr(Interrupts, "asked", lambda self: next(signals, None))
    with pytest.raises(Stopped, match="SIGTERM after step 2 of 4"):
        run(path)
    assert evaluated(tmp_path) == []
    run(path, "--train.load_checkpoint_path=auto")
    assert evaluated(tmp_path) == [2, 4]
    run(path, "--train.load_checkpoint_path=auto", "--train.max_steps=6")
    assert evaluated(tmp_path) == [2, 4, 6], "none twice"


def test_how_a_stopped_run_goes_on(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(launch, "run", lambda *_, again=None, **__: found.append(again) or 0)
    monkeypatch.setattr(train, "check_data", lambda data: None)
    path = write_config(tmp_path)
    named = ["--train.load_checkpoint_path=x", "--train.load_optimizer=false"]
    for argv in ([path], [path, *named], [path, "--train.save_optimizer=false"]):
        train.main(argv)
    assert found[0] == [path, "--train.load_checkpoint_path", "auto"]
    assert load(found[1][0], found[1][1:]).train.load_optimizer
    assert load(found[1][0], found[1][1:]).train.load_checkpoint_path == "auto"
    assert found[2] is None
