"""The section train: how it is trained."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import field_validator, model_validator

from tilewright.core import platform
from tilewright.trainer.callbacks import CALLBACKS
from tilewright.trainer.checkpoint.fields import Checkpointing, Output
from tilewright.trainer.data.fields import Data, held_out
from tilewright.trainer.losses.fields import NO_TOKENS, Objective, scored
from tilewright.trainer.models.fields import Dropouts
from tilewright.trainer.optim.fields import Optim
from tilewright.trainer.parallel.fields import Batching, Compute
from tilewright.trainer.section import Needs, Resume, RowOf, Section, Stated, field

EVALUATED = Needs("eval_strategy", but="no", why="nothing is evaluated")


class Evaluation(Section):
    """What is evaluated, and when."""

    eval_strategy: Literal["auto", "no", "steps", "epoch"] = field(
        "auto", Resume.EVALUATION, certified=False
    )
    """When there is something to evaluate on. auto: before the first step, with each checkpoint of
    save_steps and save_epochs, at the end of each epoch and of the run; steps: every eval_steps;
    epoch: every eval_epochs; no: never.
    """
    eval_steps: int | None = field(
        None,
        Resume.EVALUATION,
        Needs("eval_strategy", ["steps"], "only eval_strategy: steps counts steps"),
        ge=1,
        certified=False,
    )
    """Evaluate every so many optimizer steps."""
    eval_epochs: float = field(
        1.0,
        Resume.EVALUATION,
        Needs("eval_strategy", ["epoch"], "only eval_strategy: epoch counts epochs"),
        gt=0,
        certified=False,
    )
    """Evaluate every so many epochs, fractions too: in the step that reaches them."""
    eval_on_start: bool | None = field(
        None,
        Resume.EVALUATION,
        Needs("eval_strategy", but="no", why="nothing is evaluated", neutral=(False,)),
        certified=False,
    )
    """Evaluate before the first step of a run; null: where eval_strategy is auto."""
    eval_sanity_batches: int = field(0, Resume.EVALUATION, EVALUATED, ge=0, certified=False)
    """Whenever the command starts, evaluate so many batches before its first step, and discard the
    result: what cannot be evaluated ends it early.
    """
    eval_max_batches: int | float | None = field(None, Resume.EVALUATION)
    """Evaluate so many batches of each data set, the first ones, or a share of all of them, if it
    has a decimal point: 1 is one batch, 1.0 all. null or 0: all. A batch is a forward pass of all
    processes: eval_micro_batch_size bins on each that reads its own.
    """
    eval_micro_batch_size: int | None = field(None, Resume.EVALUATION, ge=1)
    """Bins in a forward pass of an evaluation or a test; null: micro_batch_size."""
    eval_accuracy: bool = field(False, Resume.EVALUATION)
    """Also report eval_accuracy, or test_accuracy: the share of labels that are the most probable
    token.
    """
    do_test: bool = field(False, Resume.EVALUATION)
    """Evaluate on test_datasets once, after the last step, and report test_loss and so on, instead
    of during training, for which val_set_size holds samples out.
    """
    test_max_batches: int | float | None = field(
        None, Resume.EVALUATION, Needs("do_test", [True], "nothing is tested")
    )
    """Batches of each of these sets, as eval_max_batches counts them; null or 0: all."""


def of_evaluation(
    evaluation: Evaluation, data: Data, objective: Objective, training: bool
) -> Iterator[Stated]:
    """There is something to evaluate on, when it is evaluated."""
    strategy, on = evaluation.eval_strategy, ("data.test_datasets", "data.val_set_size")
    never, nothing = strategy == "no", not held_out(data, evaluation.do_test)
    limited = evaluation.eval_max_batches is not None and training
    yield limited and never, "nothing is evaluated", "eval_max_batches", "eval_strategy"
    for name, given in (
        ("eval_strategy", strategy in ("steps", "epoch")),
        ("eval_on_start", evaluation.eval_on_start),
        ("eval_sanity_batches", evaluation.eval_sanity_batches),
        ("eval_max_batches", limited),
    ):
        yield given and nothing, "there is nothing to evaluate on", name, *on
    unscored = training and not evaluation.do_test and (never or nothing)
    why = "nothing is evaluated" if never else "there is nothing to evaluate on"
    for name, given in (
        ("eval_micro_batch_size", evaluation.eval_micro_batch_size is not None),
        ("eval_accuracy", evaluation.eval_accuracy),
        ("data.eval_sample_packing", data.eval_sample_packing is not None),
    ):
        yield given and unscored, why, name, "eval_strategy", "do_test", *on
    unsaid = strategy == "steps" and evaluation.eval_steps is None
    yield unsaid, "say every how many", "eval_strategy", "eval_steps"
    for name in ("eval_max_batches", "test_max_batches"):
        most = getattr(evaluation, name) or 0
        beyond = most < 0 or (isinstance(most, float) and most > 1)
        yield beyond, "must be a number of batches (0: all) or a share up to 1.0", name
    yield evaluation.eval_accuracy and scored(objective), NO_TOKENS, "eval_accuracy", "loss"
    untested = evaluation.do_test and not data.test_datasets
    yield untested, "there is nothing to test on", "do_test", "data.test_datasets"
    both = data.val_set_size is not None and data.test_datasets and not evaluation.do_test
    why = "give one of them, or set train.do_test"
    yield both, why, "data.val_set_size", "data.test_datasets"


class Routing(Section):
    """Which experts tokens take."""

    router_replay: bool = field(False, Resume.OTHER_CONTENTS)
    """Send tokens to the experts that an inference engine recorded in the column routed_experts."""
    router_replay_compare_steps: int = field(
        0, Resume.OUTPUT, Needs("router_replay", [True], "nothing is replayed"), ge=0
    )
    """Every so many steps, report the log-probabilities of tokens with recorded and with today's
    experts, which takes two more forward passes; 0: never.
    """
    freeze_router: bool = field(False, Resume.OTHER_STATES)
    """Keep the weights that choose experts as they are."""


def of_routing(routing: Routing, data: Data, objective: Objective) -> Iterator[Stated]:
    """Recorded routes are those of the tokens."""
    replayed, entries = routing.router_replay, data.prepared
    why = "an engine's records are of its tokens, so every data set must be of type tokenized"
    yield replayed and any(e.type != "tokenized" for e in entries), why, "router_replay"
    why = "dummy data have no recorded routes"
    yield replayed and any(e.path == "dummy" for e in entries), why, "router_replay"
    compared = routing.router_replay_compare_steps > 0 and scored(objective)
    yield compared, NO_TOKENS, "router_replay_compare_steps", "loss"


class Reporting(Output):
    """What a run reports."""

    log_format: Literal["progress_bar", "structured"] = field("progress_bar", Resume.OUTPUT)
    """progress_bar, or structured: key=value lines."""
    log_steps: int | None = field(None, Resume.OUTPUT, ge=1)
    """Report the first step and every so many in the terminal or on standard output; null: each,
    or, of a progress bar without a terminal, some twenty in all. metrics.jsonl has every step.
    """
    use_wandb: bool = field(False, Resume.OUTPUT)
    """Log to Weights & Biases."""
    wandb_project: str = field("tilewright", Resume.OUTPUT)
    """W&B project."""
    wandb_name: str | None = field(None, Resume.OUTPUT)
    """W&B run name."""
    wandb_tags: list[str] | None = field(None, Resume.OUTPUT)
    """W&B tags."""
    wandb_log_interval: int = field(1, Resume.OUTPUT, ge=1)
    """Log to W&B every so many steps."""
    use_tensorboard: bool = field(False, Resume.OUTPUT)
    """Log to TensorBoard: event files in log_dir."""
    log_dir: str | None = field(
        None,
        Resume.PLACE,
        Needs("use_tensorboard", [True], "no event file is written"),
        min_length=1,
    )
    """Folder for TensorBoard's event files; null: output_dir/tensorboard."""
    plot_loss: bool = field(False, Resume.OUTPUT)
    """Draw output_dir/loss.png at the end: the loss of training and evaluation."""
    log_norms: list[Literal["gradients", "parameters"]] = field([], Resume.OUTPUT)
    """Report norms by kind of module, of gradients before clipping (grad_norm/attention) and of
    trained parameters after the step (param_norm/attention).
    """
    callbacks: list[Annotated[str, RowOf(CALLBACKS)]] = field([], Resume.NEXT_STEP)
    """Callbacks beside those that other fields ask for."""
    callback_args: dict[str, dict[str, Any]] = field({}, Resume.NEXT_STEP)
    """Options of callbacks that have no field here, by the callback's name."""
    certify: bool = field(True, Resume.OUTPUT)
    """Write certificate.json: what is known to change the run's bits."""
    checksum_steps: int = field(0, Resume.OUTPUT, Needs("certify", [True]), ge=0)
    """Write checksums of modules' outputs, gradients and trained weights to checksums.jsonl every
    so many steps; 0: never.
    """
    assert_deterministic: str | None = field(
        None, Resume.THIS_START, Needs("certify", [True]), min_length=1
    )
    """An earlier run, by its output_dir or a file in it: refuse to start where the certificates
    differ, or ranks do, and end at the first step that is not the same bit for bit.
    """
    enable_profiling: bool = field(False, Resume.OUTPUT)
    """Run PyTorch's profiler."""
    profile_start_step: int = field(1, Resume.OUTPUT, ge=0)
    """First step that is profiled."""
    profile_end_step: int = field(2, Resume.OUTPUT, ge=1)
    """Step at which profiling ends."""
    profile_trace_dir: str = field("./trace", Resume.OUTPUT)
    """Folder for traces."""
    profile_record_shapes: bool = field(True, Resume.OUTPUT)
    """Record input shapes."""
    profile_profile_memory: bool = field(True, Resume.OUTPUT)
    """Record memory."""
    profile_with_stack: bool = field(True, Resume.OUTPUT)
    """Record Python stacks."""
    profile_rank0_only: bool = field(True, Resume.OUTPUT)
    """Profile rank 0 only; false: every rank."""

    @property
    def board_dir(self) -> str:
        """The folder of TensorBoard's event files."""
        return self.log_dir or os.path.join(self.output_dir, "tensorboard")


def of_reporting(reporting: Reporting) -> Iterator[Stated]:
    """The package is there."""
    yield reporting.use_wandb, platform.no_module("wandb"), "use_wandb"
    yield reporting.use_tensorboard, platform.no_module("tensorboard"), "use_tensorboard"
    yield reporting.plot_loss, platform.no_module("matplotlib"), "plot_loss"
    backwards = reporting.profile_end_step <= reporting.profile_start_step
    why = "profiling must end after it starts"
    yield backwards, why, "profile_end_step", "profile_start_step"


def of_callbacks(reporting: Reporting) -> Iterator[Stated]:
    """Callbacks of these names have no field that asks for them, and stand there once."""
    names = reporting.callbacks
    twice = "each can be there once" if len({*names}) < len(names) else None
    asked = [name for name in names if CALLBACKS[name].wanted is not None]
    named = f"{asked[0]} is there where other fields ask for it" if asked else None
    yield names, twice or named, "callbacks"


class Housekeeping(Section):
    """Tasks between steps."""

    empty_cache_steps: int = field(500, Resume.COST, ge=0, certified=False)
    """torch.cuda.empty_cache() every so many steps; 0: never."""
    gc_steps: int = field(500, Resume.COST, ge=0, certified=False)
    """Collect garbage every so many steps only; 0: when Python likes."""


# pydantic collects the fields of the last base first.
class Train(
    Reporting,
    Checkpointing,
    Housekeeping,
    Routing,
    Evaluation,
    Batching,
    Dropouts,
    Optim,
    Objective,
    Compute,
):
    """All of them, flat: a function takes the one that it reads."""

    @field_validator("eval_strategy", "save_strategy", mode="before")
    @classmethod
    def _no_is_a_word(cls, value: Any) -> Any:
        """YAML's no is false."""
        return "no" if value is False else value

    @model_validator(mode="after")
    def _device(self) -> Train:
        if self.init_device == "auto":
            here = "cpu" if platform.no_cuda() else "cuda"
            self._fill(init_device="meta" if self.data_parallel_mode == "fsdp2" else here)
        return self
