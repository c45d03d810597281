"""The section preference: what train.loss = preference minimizes, and what it compares with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from tilewright.trainer.losses.fields import Objective
from tilewright.trainer.losses.preference.row import PREFERENCES
from tilewright.trainer.models.fields import Model
from tilewright.trainer.models.lora_fields import Lora
from tilewright.trainer.section import Needs, Resume, RowOf, Section, Stated, field

PREFERRED = Needs("train.loss", ["preference"])
COMPUTED = ("adapters_off", "model")  # references that are a second pass


def _field(default: Any, *needs: Needs, resume: Resume = Resume.NEXT_STEP, **more: Any) -> Any:
    """What train.loss = preference alone reads."""
    return field(default, resume, PREFERRED, *needs, **more)


def _option(name: str, default: float, *needs: Needs, **more: Any) -> Any:
    """An option of formulas."""
    readers = Needs("loss", lambda: [n for n, row in PREFERENCES.items() if name in row.reads])
    return _field(default, readers, *needs, **more)


def kind_of_reference(config: Any) -> str:
    """What a run compares with: none, adapters_off, model, precomputed or column."""
    return _compared(config.preference, config.train, config.lora)


def _compared(preference: Preference, objective: Objective, lora: Lora) -> str:
    if objective.loss != "preference" or not PREFERENCES[preference.loss].reference:
        return "none"
    if preference.reference != "auto":
        return preference.reference
    return "adapters_off" if lora.enable_lora else "model"


class Preference(Section):
    loss: Annotated[str, RowOf(PREFERENCES)] = _field("sigmoid")
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
    kto_desirable_weight: float = _option("kto_desirable_weight", 1.0, ge=0)
    """The weight of the loss of a desirable answer."""
    kto_undesirable_weight: float = _option("kto_undesirable_weight", 1.0, ge=0)
    """The weight of the loss of an undesirable answer."""
    kl_scope: Literal["micro_batch", "step"] = _field(
        "micro_batch", Needs("loss", lambda: [n for n, row in PREFERENCES.items() if row.kl])
    )
    """What mean log-ratios are over. micro_batch: the micro-batches that all ranks compute at once;
    step: all of a step, or of an evaluation; kto_pair then takes one more forward pass.
    """
    max_prompt_len: int | None = field(
        None, Resume.OTHER_CONTENTS, Needs("train.loss", ["preference", "reward"]), ge=1
    )
    """Tokens that are kept of a longer prompt, of both answers the same: at most this many, and 10
    fewer than a document holds; null: all. What is cut is counted in the log.
    """
    truncation_mode: Literal["keep_start", "keep_end"] = field(
        "keep_start", Resume.OTHER_CONTENTS, Needs("max_prompt_len", but=None)
    )
    """Which tokens of a longer prompt are kept: its first ones, or its last ones."""
    share_prefix: bool = _field(
        False,
        *(
            Needs(
                f"train.{name}_dropout", [0.0], "one mask of a shared token would be both answers'"
            )
            for name in ("hidden", "attention", "ffn")
        ),
        Needs(
            "train.enable_compile",
            [False],
            "compiled code would have each batch's prefixes as constants",
        ),
        Needs(
            "loss",
            lambda: [n for n, row in PREFERENCES.items() if row.paired],
            "answers that are not paired share no prompt",
        ),
        resume=Resume.OTHER_BINS,
    )
    """Whether a pair's prompt is computed once: the rejected answer's document is what follows it.
    The loss and its gradients are those of two whole documents, and bins hold more pairs.
    """
    reference: Literal["auto", "adapters_off", "model", "precomputed", "column", "none"] = _field(
        "auto",
        Needs(
            "loss",
            lambda: [n for n, row in PREFERENCES.items() if row.reference],
            neutral=("none",),
        ),
    )
    """What answers are compared with. adapters_off: the model without its adapters; model: a second
    one, frozen; precomputed: what a pass before the first step has written; column: the column
    reference_logprob of the data; none: log-probabilities of 0, so that log-ratios are the
    policy's own; auto: adapters_off with LoRA, else model.
    """
    reference_path: str | None = _field(None, resume=Resume.OTHER_CONTENTS, certified=False)
    """The folder of the reference model; null: model.model_path."""
    reference_cache: str | None = _field(
        None, Needs("reference", ["precomputed"]), resume=Resume.PLACE
    )
    """The folder of precomputed log-probabilities, of one reference; null: one for each reference,
    in data.dataset_prepared_path.
    """
    reference_update_steps: int | None = _field(None, ge=1)
    """The reference moves to the policy after every so many steps; null: it stays."""
    reference_ema: float = field(
        1.0, Resume.NEXT_STEP, Needs("reference_update_steps", but=None), gt=0, le=1
    )
    """How far the reference moves: the policy's share in the new one, of weights, or of adapters' A
    and B; 1: it becomes the policy.
    """


def of_preference(
    preference: Preference, objective: Objective, lora: Lora, model: Model
) -> Iterator[Stated]:
    """There is a reference, and what is read of it."""
    row, kind = PREFERENCES[preference.loss], _compared(preference, objective, lora)
    weights = preference.kto_desirable_weight, preference.kto_undesirable_weight
    weighted = "kto_desirable_weight" in row.reads
    yield (
        weighted and not max(weights) and not preference.sft_ratio,
        "nothing is learned where both weights are 0",
        "kto_desirable_weight",
        "kto_undesirable_weight",
    )
    absent = preference.reference == "none" and row.kl
    yield absent, "it reads mean log-ratios to a reference", "reference", "loss"
    yield (
        row.kl and not row.paired and kind in ("precomputed", "column"),
        "the data hold no log-probabilities of answers to other prompts, whose mean it reads; "
        f"accepted are auto, {', '.join(COMPUTED)}",
        "reference",
        "loss",
    )
    drawn = model.model_path is None and preference.reference_path is None
    why = "random weights have no fingerprint by which they would be known"
    yield kind == "precomputed" and drawn, why, "reference", "model.model_path"
    absent = preference.reference == "adapters_off" and not lora.enable_lora
    yield absent, "there are no adapters", "reference", "lora.enable_lora"
    merged = kind == "adapters_off" and lora.merge_lora_interval > 0
    why = "merging changes the weights without adapters, which are the reference"
    yield merged, why, "reference", "lora.merge_lora_interval"
    unread = preference.reference_path is not None and kind not in ("model", "precomputed")
    yield unread, "no second model is read", "reference_path", "reference"
    moves = preference.reference_update_steps is not None
    why = "what moves is a model or adapters"
    yield moves and kind not in COMPUTED, why, "reference_update_steps", "reference"
    why = "with adapters a second set of them moves; set preference.reference to adapters_off"
    whole = moves and kind == "model" and lora.enable_lora
    yield whole, why, "reference_update_steps", "reference", "lora.enable_lora"
