"""The section preference: what train.loss = preference minimizes, and what it compares with."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from tilewright.trainer.losses.preference.row import PREFERENCES
from tilewright.trainer.section import Only, Refuse, Resume, RowOf, Rule, Section, field

PREFERRED = Only("train.loss", "preference")
COMPUTED = ("adapters_off", "model")  # references that are a second pass


def _field(default: Any, *rules: Rule, resume: Resume = Resume.NEXT_STEP, **more: Any) -> Any:
    """What train.loss = preference alone reads."""
    return field(default, resume, PREFERRED, *rules, **more)


def _option(name: str, default: float, *rules: Rule, **more: Any) -> Any:
    """An option of formulas."""
    readers = Only("loss", table=lambda: [n for n, row in PREFERENCES.items() if name in row.reads])
    return _field(default, readers, *rules, **more)


def kind_of_reference(config: Any) -> str:
    """What a run compares with: none, adapters_off, model, precomputed or column."""
    section = config.preference
    if config.train.loss != "preference" or not PREFERENCES[section.loss].reference:
        return "none"
    if section.reference != "auto":
        return section.reference
    return "adapters_off" if config.lora.enable_lora else "model"


def _learns_nothing(config: Any) -> bool:
    section = config.preference
    weights = section.kto_desirable_weight, section.kto_undesirable_weight
    return (
        "kto_desirable_weight" in PREFERENCES[section.loss].reads
        and not max(weights)
        and not section.sft_ratio
    )


class Preference(Section):
    loss: Annotated[str, RowOf(PREFERENCES)] = _field(
        "sigmoid",
        Refuse(
            "a pipeline's log-ratios are on its last stage", "train.pipeline_parallel_size"
        ).when(
            lambda c: (
                c.train.loss == "preference"
                and PREFERENCES[c.preference.loss].kl
                and c.train.pipeline_parallel_size > 1
            )
        ),
    )
    """The formula, of a table."""
    beta: float = _option("beta", 0.1, gt=0)
    """What log-ratios to the reference are multiplied by."""
    label_smoothing: float = _option("label_smoothing", 0.0, ge=0, lt=0.5)
    """The probability that a pair's answers are in the wrong order."""
    simpo_gamma: float = _option("simpo_gamma", 0.5, ge=0)
    """The margin that simpo aims at."""
    dpop_lambda: float = _option("dpop_lambda", 50.0, ge=0)
    """dpop's weight of a chosen answer that is less probable than under the reference."""
    loss_ratio: float = _field(1.0, gt=0)
    """What the formula is multiplied by, beside sft_ratio's term."""
    sft_ratio: float = _field(0.0, ge=0)
    """The mean negative log-probability of the tokens of all chosen answers of a step, or of
    desirable ones, times this is added to the loss.
    """
    offset_alpha: float = _option("offset_alpha", 0.0, resume=Resume.OTHER_CONTENTS, ge=0)
    """The margin to aim at: the logarithm of the difference of a pair's scores, times this."""
    kto_desirable_weight: float = _option(
        "kto_desirable_weight",
        1.0,
        Refuse("nothing is learned where both weights are 0", "kto_undesirable_weight").when(
            _learns_nothing
        ),
        ge=0,
    )
    """The weight of the loss of a desirable answer."""
    kto_undesirable_weight: float = _option("kto_undesirable_weight", 1.0, ge=0)
    """The weight of the loss of an undesirable answer."""
    kl_scope: Literal["micro_batch", "step"] = _field(
        "micro_batch", Only("loss", table=lambda: [n for n, row in PREFERENCES.items() if row.kl])
    )
    """What mean log-ratios are over. micro_batch: the micro-batches that all ranks compute at once;
    step: all of a step, or of an evaluation; kto_pair then takes one more forward pass.
    """
    max_prompt_len: int | None = field(
        None,
        Resume.OTHER_CONTENTS,
        Only("train.loss", "preference", "reward"),
        ge=1,
    )
    """Tokens that are kept of a longer prompt, of both answers the same: at most this many, and 10
    fewer than a document holds; null: all. What is cut is counted in the log.
    """
    truncation_mode: Literal["keep_start", "keep_end"] = field(
        "keep_start", Resume.OTHER_CONTENTS, Only("max_prompt_len", but=None)
    )
    """Which tokens of a longer prompt are kept: its first ones, or its last ones."""
    share_prefix: bool = _field(
        False,
        *(
            Only(f"train.{name}_dropout", 0.0).because(
                "one mask of a shared token would be both answers'"
            )
            for name in ("hidden", "attention", "ffn")
        ),
        Only("train.enable_compile", False).because(
            "compiled code would have each batch's prefixes as constants"
        ),
        Only("loss", table=lambda: [n for n, row in PREFERENCES.items() if row.paired]).because(
            "answers that are not paired share no prompt"
        ),
        resume=Resume.OTHER_BINS,
    )
    """Whether a pair's prompt is computed once: the rejected answer's document is what follows it.
    The loss and its gradients are those of two whole documents, and bins hold more pairs.
    """
    reference: Literal["auto", "adapters_off", "model", "precomputed", "column", "none"] = _field(
        "auto",
        Only(
            "loss",
            table=lambda: [n for n, row in PREFERENCES.items() if row.reference],
            neutral=("none",),
        ),
        Refuse("it reads mean log-ratios to a reference", "loss").when(
            lambda c: c.preference.reference == "none" and PREFERENCES[c.preference.loss].kl
        ),
        Refuse(
            "the data hold no log-probabilities of answers to other prompts, whose mean it reads; "
            f"accepted are auto, {', '.join(COMPUTED)}",
            "loss",
        ).when(
            lambda c: (
                PREFERENCES[c.preference.loss].kl
                and not PREFERENCES[c.preference.loss].paired
                and kind_of_reference(c) in ("precomputed", "column")
            )
        ),
        Refuse(
            "random weights have no fingerprint by which they would be known", "model.model_path"
        ).when(
            lambda c: (
                kind_of_reference(c) == "precomputed"
                and c.model.model_path is None
                and c.preference.reference_path is None
            )
        ),
        Refuse("there are no adapters", "lora.enable_lora").when(
            lambda c: c.preference.reference == "adapters_off" and not c.lora.enable_lora
        ),
        Refuse(
            "merging changes the weights without adapters, which are the reference",
            "lora.merge_lora_interval",
        ).when(lambda c: kind_of_reference(c) == "adapters_off" and c.lora.merge_lora_interval > 0),
    )
    """What answers are compared with. adapters_off: the model without its adapters; model: a second
    one, frozen; precomputed: what a pass before the first step has written; column: the column
    reference_logprob of the data; none: log-probabilities of 0, so that log-ratios are the
    policy's own; auto: adapters_off with LoRA, else model.
    """
    reference_path: str | None = _field(
        None,
        Refuse("no second model is read", "reference").when(
            lambda c: (
                c.preference.reference_path is not None
                and kind_of_reference(c) not in ("model", "precomputed")
            )
        ),
        resume=Resume.OTHER_CONTENTS,
        certified=False,
    )
    """The folder of the reference model; null: model.model_path."""
    reference_cache: str | None = _field(
        None, Only("reference", "precomputed"), resume=Resume.PLACE
    )
    """The folder of precomputed log-probabilities, of one reference; null: one for each reference,
    in data.dataset_prepared_path.
    """
    reference_update_steps: int | None = _field(
        None,
        Refuse("what moves is a model or adapters", "reference").when(
            lambda c: (
                c.preference.reference_update_steps is not None
                and kind_of_reference(c) not in COMPUTED
            )
        ),
        Refuse(
            "with adapters a second set of them moves; set preference.reference to adapters_off",
            "reference",
            "lora.enable_lora",
        ).when(
            lambda c: (
                c.preference.reference_update_steps is not None
                and kind_of_reference(c) == "model"
                and c.lora.enable_lora
            )
        ),
        ge=1,
    )
    """The reference moves to the policy after every so many steps; null: it stays."""
    reference_ema: float = field(
        1.0, Resume.NEXT_STEP, Only("reference_update_steps", but=None), gt=0, le=1
    )
    """How far the reference moves: the policy's share in the new one, of weights, or of adapters' A
    and B; 1: it becomes the policy.
    """
