"""The section train: how it is trained."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import field_validator, model_validator

from tilewright.core import platform
from tilewright.trainer.callbacks import CALLBACKS
from tilewright.trainer.checkpoint.fields import Checkpointing, Output
from tilewright.trainer.data.fields import nothing_held_out, nothing_scored
from tilewright.trainer.losses.fields import NO_TOKENS, Objective, scored
from tilewright.trainer.models.fields import Dropouts
from tilewright.trainer.optim.fields import Optim
from tilewright.trainer.options import with_options, wrong_options
from tilewright.trainer.parallel.fields import Batching, Compute
from tilewright.trainer.section import Only, Refuse, Resume, RowOf, Section, field


def _wrong_callbacks(config: Any) -> str | None:
    names = config.train.callbacks
    if len({*names}) < len(names):
        return "each can be there once"
    own = [name for name in names if CALLBACKS[name].wanted is not None]
    return f"{own[0]} is there where other fields ask for it" if own else None


def _wrong_callback_args(config: Any) -> str | None:
    known, named = with_options(CALLBACKS), config.train.callbacks
    for name, given in config.train.callback_args.items():
        if name not in known:
            return f"{name} is no callback with options; accepted: {', '.join(known) or 'none'}"
        if CALLBACKS[name].wanted is None and name not in named:
            return f"train.callbacks does not name {name}"
        if wrong := wrong_options(CALLBACKS[name].options, given, f"callback {name}"):
            return wrong
    return None


def _batches(name: str) -> Refuse:
    """The rule of a limit that is a count or a share."""

    def wrong(config: Any) -> bool:
        most = getattr(config.train, name) or 0
        return most < 0 or (isinstance(most, float) and most > 1)

    return Refuse("must be a number of batches (0: all) or a share up to 1.0").when(wrong)


HELD_OUT = Refuse(nothing_held_out, "data.test_datasets", "data.val_set_size")
EVALUATED = Only("eval_strategy", but="no").because("nothing is evaluated")
SCORED = Refuse(
    nothing_scored, "eval_strategy", "do_test", "data.test_datasets", "data.val_set_size"
)


class Evaluation(Section):
    """What is evaluated, and when."""

    eval_strategy: Literal["auto", "no", "steps", "epoch"] = field(
        "auto",
        Resume.EVALUATION,
        HELD_OUT.when(lambda c: c.train.eval_strategy in ("steps", "epoch")),
        Refuse("say every how many", "eval_steps").when(
            lambda c: c.train.eval_strategy == "steps" and c.train.eval_steps is None
        ),
        certified=False,
    )
    """When there is something to evaluate on. auto: before the first step, with each checkpoint of
    save_steps and save_epochs, at the end of each epoch and of the run; steps: every eval_steps;
    epoch: every eval_epochs; no: never.
    """
    eval_steps: int | None = field(
        None,
        Resume.EVALUATION,
        Only("eval_strategy", "steps").because("only eval_strategy: steps counts steps"),
        ge=1,
        certified=False,
    )
    """Evaluate every so many optimizer steps."""
    eval_epochs: float = field(
        1.0,
        Resume.EVALUATION,
        Only("eval_strategy", "epoch").because("only eval_strategy: epoch counts epochs"),
        gt=0,
        certified=False,
    )
    """Evaluate every so many epochs, fractions too: in the step that reaches them."""
    eval_on_start: bool | None = field(
        None,
        Resume.EVALUATION,
        Only("eval_strategy", but="no", neutral=(False,)).because("nothing is evaluated"),
        HELD_OUT.when(lambda c: c.train.eval_on_start),
        certified=False,
    )
    """Evaluate before the first step of a run; null: where eval_strategy is auto."""
    eval_sanity_batches: int = field(
        0, Resume.EVALUATION, EVALUATED, HELD_OUT, ge=0, certified=False
    )
    """Whenever the command starts, evaluate so many batches before its first step, and discard the
    result: what cannot be evaluated ends it early.
    """
    eval_max_batches: int | float | None = field(
        None,
        Resume.EVALUATION,
        EVALUATED.in_training(),
        HELD_OUT.in_training(),
        _batches("eval_max_batches"),
    )
    """Evaluate so many batches of each data set, the first ones, or a share of all of them, if it
    has a decimal point: 1 is one batch, 1.0 all. null or 0: all. A batch is a forward pass of all
    processes: eval_micro_batch_size bins on each that reads its own.
    """
    eval_micro_batch_size: int | None = field(None, Resume.EVALUATION, SCORED.in_training(), ge=1)
    """Bins in a forward pass of an evaluation or a test; null: micro_batch_size."""
    eval_accuracy: bool = field(
        False,
        Resume.EVALUATION,
        SCORED.in_training(),
        Refuse(NO_TOKENS, "loss").when(lambda c: c.train.eval_accuracy and scored(c)),
    )
    """Also report eval_accuracy, or test_accuracy: the share of labels that are the most probable
    token.
    """
    do_test: bool = field(
        False,
        Resume.EVALUATION,
        Refuse("there is nothing to test on", "data.test_datasets").when(
            lambda c: c.train.do_test and not c.data.test_datasets
        ),
    )
    """Evaluate on test_datasets once, after the last step, and report test_loss and so on, instead
    of during training, for which val_set_size holds samples out.
    """
    test_max_batches: int | float | None = field(
        None,
        Resume.EVALUATION,
        Only("do_test", True).because("nothing is tested"),
        _batches("test_max_batches"),
    )
    """Batches of each of these sets, as eval_max_batches counts them; null or 0: all."""


class Routing(Section):
    """Which experts tokens take."""

    router_replay: bool = field(
        False,
        Resume.OTHER_CONTENTS,
        Refuse(
            "an engine's records are of its tokens, so every data set must be of type tokenized"
        ).when(
            lambda c: c.train.router_replay and any(e.type != "tokenized" for e in c.data.prepared)
        ),
        Refuse("dummy data have no recorded routes").when(
            lambda c: c.train.router_replay and any(e.path == "dummy" for e in c.data.prepared)
        ),
    )
    """Send tokens to the experts that an inference engine recorded in the column routed_experts."""
    router_replay_compare_steps: int = field(
        0,
        Resume.OUTPUT,
        Only("router_replay", True).because("nothing is replayed"),
        Refuse(NO_TOKENS, "loss").when(
            lambda c: c.train.router_replay_compare_steps > 0 and scored(c)
        ),
        ge=0,
    )
    """Every so many steps, report the log-probabilities of tokens with recorded and with today's
    experts, which takes two more forward passes; 0: never.
    """
    freeze_router: bool = field(False, Resume.OTHER_STATES)
    """Keep the weights that choose experts as they are."""


class Reporting(Output):
    """What a run reports."""

    log_format: Literal["progress_bar", "structured"] = field("progress_bar", Resume.OUTPUT)
    """progress_bar, or structured: key=value lines."""
    log_steps: int | None = field(None, Resume.OUTPUT, ge=1)
    """Report the first step and every so many in the terminal or on standard output; null: each,
    or, of a progress bar without a terminal, some twenty in all. metrics.jsonl has every step.
    """
    use_wandb: bool = field(False, Resume.OUTPUT, Refuse(lambda _: platform.no_module("wandb")))
    """Log to Weights & Biases."""
    wandb_project: str = field("tilewright", Resume.OUTPUT)
    """W&B project."""
    wandb_name: str | None = field(None, Resume.OUTPUT)
    """W&B run name."""
    wandb_tags: list[str] | None = field(None, Resume.OUTPUT)
    """W&B tags."""
    wandb_log_interval: int = field(1, Resume.OUTPUT, ge=1)
    """Log to W&B every so many steps."""
    use_tensorboard: bool = field(
        False, Resume.OUTPUT, Refuse(lambda _: platform.no_module("tensorboard"))
    )
    """Log to TensorBoard: event files in log_dir."""
    log_dir: str | None = field(
        None,
        Resume.PLACE,
        Only("use_tensorboard", True).because("no event file is written"),
        min_length=1,
    )
    """Folder for TensorBoard's event files; null: output_dir/tensorboard."""
    plot_loss: bool = field(
        False, Resume.OUTPUT, Refuse(lambda _: platform.no_module("matplotlib"))
    )
    """Draw output_dir/loss.png at the end: the loss of training and evaluation."""
    log_norms: list[Literal["gradients", "parameters"]] = field([], Resume.OUTPUT)
    """Report norms by kind of module, of gradients before clipping (grad_norm/attention) and of
    trained parameters after the step (param_norm/attention).
    """
    callbacks: list[Annotated[str, RowOf(CALLBACKS)]] = field(
        [], Resume.NEXT_STEP, Refuse(_wrong_callbacks)
    )
    """Callbacks beside those that other fields ask for."""
    callback_args: dict[str, dict[str, Any]] = field(
        {}, Resume.NEXT_STEP, Refuse(_wrong_callback_args)
    )
    """Options of callbacks that have no field here, by the callback's name."""
    certify: bool = field(True, Resume.OUTPUT)
    """Write certificate.json: what is known to change the run's bits."""
    checksum_steps: int = field(0, Resume.OUTPUT, Only("certify", True), ge=0)
    """Write checksums of modules' outputs, gradients and trained weights to checksums.jsonl every
    so many steps; 0: never.
    """
    assert_deterministic: str | None = field(
        None, Resume.THIS_START, Only("certify", True), min_length=1
    )
    """An earlier run, by its output_dir or a file in it: refuse to start where the certificates
    differ, or ranks do, and end at the first step that is not the same bit for bit.
    """
    enable_profiling: bool = field(False, Resume.OUTPUT)
    """Run PyTorch's profiler."""
    profile_start_step: int = field(1, Resume.OUTPUT, ge=0)
    """First step that is profiled."""
    profile_end_step: int = field(
        2,
        Resume.OUTPUT,
        Refuse("profiling must end after it starts", "profile_start_step").when(
            lambda c: c.train.profile_end_step <= c.train.profile_start_step
        ),
        ge=1,
    )
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
