"""Which values of several sections do not go together, where no reader of one knows the other."""

from __future__ import annotations

from tilewright.trainer.checkpoint.fields import Checkpointing
from tilewright.trainer.columns import TOKENS
from tilewright.trainer.config.train import Evaluation
from tilewright.trainer.data.columns.column import COLUMNS
from tilewright.trainer.data.fields import Data, held_out
from tilewright.trainer.data.types.dataset_type import DATASETS
from tilewright.trainer.losses.fields import Objective
from tilewright.trainer.losses.loss import LOSSES
from tilewright.trainer.losses.preference_fields import Preference
from tilewright.trainer.optim.fields import Rate
from tilewright.trainer.optim.schedules import too_short
from tilewright.trainer.parallel.fields import Batching
from tilewright.trainer.section import Problem


def columns_are_there(objective: Objective, data: Data) -> Problem | None:
    """What a loss reads of a batch is there."""
    paths = ("train.loss",)
    wanted = [c for c in LOSSES[objective.loss].columns if c not in TOKENS]
    if absent := [c for c in wanted if c not in COLUMNS.names()]:
        has = ", ".join([*TOKENS, *COLUMNS.names()])
        return Problem(paths, f"reads {', '.join(absent)} of a batch; columns are {has}")
    needed = [c for c in wanted if COLUMNS[c].default is None]
    if needed and any(e.path == "dummy" for e in data.prepared):
        return Problem(paths, f"reads {', '.join(needed)} of a batch, which dummy data do not have")
    return None


def prompts_are_cut(preference: Preference, data: Data) -> Problem | None:
    """Rows of some type have a prompt that is cut."""
    cut = any(DATASETS[e.type].prompts for e in data.datasets)
    if preference.max_prompt_len is None or cut:
        return None
    paths = ("preference.max_prompt_len", "data.datasets")
    return Problem(paths, "no row of these types has a prompt that is cut")


def prompts_are_left(preference: Preference, data: Data) -> Problem | None:
    """Some tokens of a prompt are left beside an answer."""
    bins = data.sample_packing_sequence_len
    entries = [e for e in data.datasets if DATASETS[e.type].prompts]
    short = any(min(e.max_seq_len or bins, bins) < 22 for e in entries)
    if preference.max_prompt_len is None or not short:
        return None
    return Problem(
        ("preference.max_prompt_len", "data.sample_packing_sequence_len", "data.datasets"),
        "a document holds half of a bin, or of max_seq_len, and 10 tokens of it are an answer's: "
        "no prompt is left; accepted are 22 tokens and more",
    )


def decay_is_long_enough(rate: Rate, steps: Batching) -> Problem | None:
    """A schedule has its steps, where their number is known; `Plan` checks it where it is not."""
    if not (rate.lr_warmup_steps or rate.lr_constant_steps or rate.lr_decay_steps):
        return None
    ended = rate.lr_decay_steps is not None and not rate.lr_warmup_ratio
    known = steps.max_steps or int(ended)
    if not known or not (why := too_short(known, rate)):
        return None
    names = ("decay_style", "warmup_steps", "decay_steps", "constant_steps")
    return Problem((*(f"train.lr_{name}" for name in names), "train.max_steps"), why)


def best_is_evaluated(saved: Checkpointing, evaluation: Evaluation) -> Problem | None:
    """What is the best follows from evaluations."""
    if saved.best_metric is None or evaluation.eval_strategy != "no":
        return None
    return Problem(("train.best_metric", "train.eval_strategy"), "nothing is evaluated")


def best_is_held_out(saved: Checkpointing, evaluation: Evaluation, data: Data) -> Problem | None:
    """What is the best follows from data that are held out."""
    if saved.best_metric is None or held_out(data, evaluation.do_test):
        return None
    paths = ("train.best_metric", "data.test_datasets", "data.val_set_size")
    return Problem(paths, "there is nothing to evaluate on")


CHECKS = (
    decay_is_long_enough,
    columns_are_there,
    prompts_are_cut,
    prompts_are_left,
    best_is_evaluated,
    best_is_held_out,
)
