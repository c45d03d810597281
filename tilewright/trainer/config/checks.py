"""What the values of a configuration follow, beside what fields state themselves.

A function stands beside the fields that it is about, or here, where no reader of one knows the
other.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.trainer.callbacks import CALLBACKS
from tilewright.trainer.checkpoint.fields import Checkpointing, of_checkpoints
from tilewright.trainer.columns import TOKENS
from tilewright.trainer.config.train import (
    Evaluation,
    Train,
    of_callbacks,
    of_evaluation,
    of_reporting,
    of_routing,
)
from tilewright.trainer.data.columns.column import COLUMNS
from tilewright.trainer.data.fields import Data, held_out, of_data, of_dataset
from tilewright.trainer.data.types.dataset_type import DATASETS
from tilewright.trainer.losses.distillation_fields import of_distillation
from tilewright.trainer.losses.fields import Objective, of_objective
from tilewright.trainer.losses.loss import LOSSES
from tilewright.trainer.losses.policy_fields import of_policy
from tilewright.trainer.losses.preference_fields import Preference, of_preference
from tilewright.trainer.models.fields import of_dropouts, of_model
from tilewright.trainer.models.lora_fields import of_lora
from tilewright.trainer.optim.fields import Rate, of_optimizer, of_rate
from tilewright.trainer.optim.row import OPTIMIZERS, SCHEDULES
from tilewright.trainer.optim.schedules import too_short
from tilewright.trainer.options import with_options, wrong_options, wrong_options_of
from tilewright.trainer.parallel.fields import Batching, of_compute, of_layouts, of_pipelines
from tilewright.trainer.parallel.precision import of_moments, of_precision, of_recipe
from tilewright.trainer.parallel.row import LAYOUTS
from tilewright.trainer.section import Check, Stated


def of_options(train: Train) -> Iterator[Stated]:
    """Options are those of the row that they are for."""
    for table, chosen, given, of in (
        (LOSSES, "loss", "loss_args", "loss"),
        (SCHEDULES, "lr_decay_style", "lr_decay_args", "schedule"),
        (OPTIMIZERS, "optimizer", "optimizer_args", "optimizer"),
    ):
        row = table[getattr(train, chosen)]
        why = wrong_options(row.options, getattr(train, given), of)
        yield why, why, given, chosen
    layouts = (wrong_options_of(LAYOUTS, *own, "layout") for own in train.layout_args.items())
    callbacks = (
        _unnamed(train, own[0]) or wrong_options_of(CALLBACKS, *own, "callback")
        for own in train.callback_args.items()
    )
    for given, wrong in (("layout_args", layouts), ("callback_args", callbacks)):
        why = next(filter(None, wrong), None)
        yield why, why, given


def _unnamed(train: Train, name: str) -> str:
    known = name in with_options(CALLBACKS) and CALLBACKS[name].wanted is None
    return f"train.callbacks does not name {name}" * (known and name not in train.callbacks)


def columns_are_there(objective: Objective, data: Data) -> Iterator[Stated]:
    """What a loss reads of a batch is there."""
    wanted, why = [c for c in LOSSES[objective.loss].columns if c not in TOKENS], None
    needed = [c for c in wanted if c in COLUMNS.names() and COLUMNS[c].default is None]
    if absent := [c for c in wanted if c not in COLUMNS.names()]:
        has = ", ".join([*TOKENS, *COLUMNS.names()])
        why = f"reads {', '.join(absent)} of a batch; columns are {has}"
    elif needed and any(e.path == "dummy" for e in data.prepared):
        why = f"reads {', '.join(needed)} of a batch, which dummy data do not have"
    yield why, why, "loss"


def of_prompts(preference: Preference, data: Data) -> Iterator[Stated]:
    """Rows of some type have a prompt that is cut, and some tokens of it are left."""
    given = preference.max_prompt_len is not None
    entries = [e for e in data.datasets if DATASETS[e.type].prompts]
    why = "no row of these types has a prompt that is cut"
    yield given and not entries, why, "max_prompt_len", "data.datasets"
    bins = data.sample_packing_sequence_len
    yield (
        given and any(min(e.max_seq_len or bins, bins) < 22 for e in entries),
        "a document holds half of a bin, or of max_seq_len, and 10 tokens of it are an answer's: "
        "no prompt is left; accepted are 22 tokens and more",
        "max_prompt_len",
        "data.sample_packing_sequence_len",
        "data.datasets",
    )


def decay_is_long_enough(rate: Rate, steps: Batching) -> Iterator[Stated]:
    """A schedule has its steps, where their number is known; `Plan` checks it where it is not."""
    counted = rate.lr_warmup_steps or rate.lr_constant_steps or rate.lr_decay_steps
    ended = rate.lr_decay_steps is not None and not rate.lr_warmup_ratio
    known = steps.max_steps or int(ended)
    why = too_short(known, rate) if counted and known else None
    names = (f"lr_{name}_steps" for name in ("warmup", "decay", "constant"))
    yield why, why, "lr_decay_style", *names, "max_steps"


def of_best(saved: Checkpointing, evaluation: Evaluation, data: Data) -> Iterator[Stated]:
    """What is the best follows from evaluations of data that are held out."""
    given, on = saved.best_metric is not None, ("data.test_datasets", "data.val_set_size")
    never = evaluation.eval_strategy == "no"
    yield given and never, "nothing is evaluated", "best_metric", "eval_strategy"
    nothing = not held_out(data, evaluation.do_test)
    yield given and nothing, "there is nothing to evaluate on", "best_metric", *on


CHECKS: tuple[Check, ...] = (
    of_model,
    of_dropouts,
    of_lora,
    of_dataset,
    of_data,
    of_rate,
    of_optimizer,
    decay_is_long_enough,
    of_objective,
    of_preference,
    of_prompts,
    of_policy,
    of_distillation,
    columns_are_there,
    of_layouts,
    of_pipelines,
    of_compute,
    of_precision,
    of_recipe,
    of_moments,
    of_checkpoints,
    of_evaluation,
    of_best,
    of_routing,
    of_reporting,
    of_callbacks,
    of_options,
)
