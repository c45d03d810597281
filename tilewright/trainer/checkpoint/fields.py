"""What checkpoints read of a configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from tilewright.trainer.section import Accepts, Only, Refuse, Resume, Section, field


def _wants(config: Any, *strategies: str) -> bool:
    return config.train.save_strategy in strategies


class Output(Section):
    """Where a run writes."""

    output_dir: str = field(..., Resume.PLACE, min_length=1, examples=["outputs"])
    """Folder for checkpoints, logs and the resolved configuration."""


class Checkpointing(Output):
    """What is saved, and what a run begins from."""

    ckpt_manager: Literal["dcp", "torch"] = field(
        "dcp",
        Resume.OUTPUT,
        Accepts("dcp").because("torch.save writes pickles, which run code when they are read"),
    )
    """The format of checkpoints: dcp (torch.distributed.checkpoint)."""
    save_strategy: Literal["auto", "no", "steps", "epoch", "best"] = field(
        "auto",
        Resume.OUTPUT,
        Refuse("it would save by epochs; leave that field out, or set it to 0", "save_epochs").when(
            lambda c: _wants(c, "no", "steps", "best") and c.train.save_epochs
        ),
        Refuse("it would save by steps; leave that field out, or set it to 0", "save_steps").when(
            lambda c: _wants(c, "no", "epoch", "best") and c.train.save_steps
        ),
        Refuse("it would save the best; leave that field out", "save_best").when(
            lambda c: _wants(c, "no") and c.train.save_best
        ),
        Refuse("say every how many", "save_steps").when(
            lambda c: _wants(c, "steps") and not c.train.save_steps
        ),
        Refuse("say every how many", "save_epochs").when(
            lambda c: _wants(c, "epoch") and not c.train.save_epochs
        ),
        Refuse("it would not save the best; leave that field out", "save_best").when(
            lambda c: _wants(c, "best") and c.train.best_metric and not c.train.save_best
        ),
        Refuse("no checkpoint is the best", "best_metric").when(
            lambda c: _wants(c, "best") and c.train.best_metric is None
        ),
    )
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
    best_metric: str | None = field(
        None,
        Resume.OUTPUT,
        Refuse(
            "whether less or more of it is better does not follow from its name", "best_mode"
        ).when(lambda c: c.train.best_metric is not None and c.train.mode_of_best is None),
        min_length=1,
    )
    """A number that evaluations report, such as eval_loss, by which a checkpoint is the best: of
    those that are written right after an evaluation. null: none is. Where nothing else is evaluated
    before the first step, one batch is, so that a name that is not reported is known there.
    """
    best_mode: Literal["min", "max"] | None = field(
        None, Resume.OUTPUT, Only("best_metric", but=None).because("no checkpoint is the best")
    )
    """Whether the least or the most of best_metric is best; null: the least of a loss or a
    perplexity, the most of an accuracy.
    """
    save_best: bool = field(
        False, Resume.OUTPUT, Only("best_metric", but=None).because("no checkpoint is the best")
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
        True,
        Resume.THIS_START,
        Only("load_checkpoint_path", but=None).because("nothing is loaded"),
        Refuse(
            "auto goes on with a run; name the folder whose weights to begin from",
            "load_checkpoint_path",
        ).when(lambda c: not c.train.load_optimizer and c.train.load_checkpoint_path == "auto"),
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
