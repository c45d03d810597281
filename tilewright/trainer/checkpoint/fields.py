"""What checkpoints read of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import field_validator, model_validator

from tilewright.trainer.section import Needs, Resume, Section, Stated, field


class Output(Section):
    """Where a run writes."""

    output_dir: str = field(..., Resume.PLACE, min_length=1, examples=["outputs"])
    """Folder for checkpoints, logs and the resolved configuration."""


class Checkpointing(Output):
    """What is saved, and what a run begins from."""

    ckpt_manager: Literal["dcp", "torch"] = field(
        "dcp",
        Resume.OUTPUT,
        refused="torch.save writes pickles, which run code when they are read",
        accepted=("dcp",),
    )
    """The format of checkpoints: dcp (torch.distributed.checkpoint)."""
    save_strategy: Literal["auto", "no", "steps", "epoch", "best"] = field("auto", Resume.OUTPUT)
    """A name for values of save_steps, save_epochs and save_best. auto: as they are; steps: by
    steps alone; epoch: by epochs alone; best: the best alone; no: none of them. The last step is
    saved in any case.
    """
    save_steps: int = field(0, Resume.OUTPUT, ge=0)
    """Save every so many optimizer steps; 0: not by steps."""
    save_epochs: float = field(1.0, Resume.OUTPUT, ge=0)
    """Save every so many epochs, fractions too: in the step that reaches them; 0: not by epochs."""
    save_async: bool = field(False, Resume.OUTPUT)
    """Write checkpoints while training goes on."""
    save_total_limit: int | None = field(None, Resume.OUTPUT, ge=1)
    """Checkpoints that stay in output_dir; null: all. The oldest go first, but never the
    newest, the best by best_metric, nor the one that the run resumed from: these count, and may be
    more.
    """
    best_metric: str | None = field(None, Resume.OUTPUT, min_length=1)
    """A number that evaluations report, such as eval_loss, by which a checkpoint is the best: of
    those that are written right after an evaluation. null: none is. Where nothing else is evaluated
    before the first step, one batch is, so that a name that is not reported is known there.
    """
    best_mode: Literal["min", "max"] | None = field(
        None, Resume.OUTPUT, Needs("best_metric", but=None, why="no checkpoint is the best")
    )
    """Whether the least or the most of best_metric is best; null: the least of a loss or a
    perplexity, the most of an accuracy.
    """
    save_best: bool = field(
        False, Resume.OUTPUT, Needs("best_metric", but=None, why="no checkpoint is the best")
    )
    """Save after each evaluation that is the best so far, too."""
    save_optimizer: bool = field(True, Resume.OUTPUT)
    """Write the optimizer's states with checkpoints; false: weights and position alone, and no run
    resumes from them, but with load_optimizer: false.
    """
    save_hf_weights: bool = field(True, Resume.OUTPUT)
    """Write Hugging Face safetensors with the last checkpoint."""
    load_checkpoint_path: str | None = field(None, Resume.THIS_START)
    """Folder to resume from; auto: the last complete in output_dir, if any; "" or null: none."""
    load_optimizer: bool = field(
        True, Resume.THIS_START, Needs("load_checkpoint_path", but=None, why="nothing is loaded")
    )
    """Resume with the optimizer's states; false: begin a new run with the weights of
    load_checkpoint_path, at step 0 of the schedule and the data.
    """
    verify_checkpoint: bool = field(True, Resume.THIS_START)
    """Compare the checksums of all files of a checkpoint that is loaded."""
    allow_other_base: bool = field(False, Resume.THIS_START)
    """Resume although model.model_path holds other weights than those the run began from. Adapters
    go on with these, unless merges have changed the former ones.
    """
    accept_changes: list[
        Literal["reference", "teacher", "tokenizer", "template", "data", "routes"]
    ] = field([], Resume.THIS_START)
    """Resume although these have other contents than when the checkpoint was written: the reference
    that answers are compared with, the columns of a teacher, the tokenizer, its chat template, the
    other samples, the recorded routes. The run goes on with what is there now, at its position.
    """

    @field_validator("load_checkpoint_path")
    @classmethod
    def _empty_is_none(cls, value: str | None) -> str | None:
        return value or None

    @model_validator(mode="after")
    def _strategy(self) -> Checkpointing:
        given, strategy = self.model_fields_set, self.save_strategy
        if strategy in ("no", "steps", "best") and "save_epochs" not in given:
            self._fill(save_epochs=0.0)
        if strategy == "best" and self.best_metric and "save_best" not in given:
            self._fill(save_best=True)
        return self

    @property
    def mode_of_best(self) -> str | None:
        """min or max; None if best_metric's name does not tell."""
        name = (self.best_metric or "").partition("/")[0]
        known = {"loss": "min", "perplexity": "min", "accuracy": "max"}
        return self.best_mode or next((m for part, m in known.items() if part in name), None)


def of_checkpoints(saved: Checkpointing) -> Iterator[Stated]:
    """A strategy is a name for values of the fields that it is about."""
    strategy, best = saved.save_strategy, saved.best_metric is not None
    own = "save_strategy"
    for kind, given, name in (
        ("epochs", strategy in ("no", "steps", "best") and saved.save_epochs, "save_epochs"),
        ("steps", strategy in ("no", "epoch", "best") and saved.save_steps, "save_steps"),
    ):
        why = f"it would save by {kind}; leave that field out, or set it to 0"
        yield given, why, own, name
    unsaid = strategy == "no" and saved.save_best
    yield unsaid, "it would save the best; leave that field out", own, "save_best"
    yield strategy == "steps" and not saved.save_steps, "say every how many", own, "save_steps"
    yield strategy == "epoch" and not saved.save_epochs, "say every how many", own, "save_epochs"
    unsaved = strategy == "best" and best and not saved.save_best
    yield unsaved, "it would not save the best; leave that field out", own, "save_best"
    yield strategy == "best" and not best, "no checkpoint is the best", own, "best_metric"
    why = "whether less or more of it is better does not follow from its name"
    yield best and saved.mode_of_best is None, why, "best_metric", "best_mode"
    why = "auto goes on with a run; name the folder whose weights to begin from"
    goes_on = not saved.load_optimizer and saved.load_checkpoint_path == "auto"
    yield goes_on, why, "load_optimizer", "load_checkpoint_path"
