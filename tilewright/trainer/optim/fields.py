"""What optimizers and schedules read of a configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from tilewright.trainer.optim.per_step import Number, PerStep
from tilewright.trainer.optim.row import OPTIMIZERS, SCHEDULES
from tilewright.trainer.options import with_options, wrong_options
from tilewright.trainer.section import Only, Refuse, Resume, RowOf, Section, field


def _decays(config: Any) -> bool:
    return SCHEDULES[config.train.lr_decay_style].decays


def _ending() -> list[str]:
    """The schedules that end where lr_decay_steps says."""
    return [name for name, row in SCHEDULES.items() if row.ends]


def _endless(config: Any) -> bool:
    """Whether the schedule has no end, but for `constant`, which has always taken all fields."""
    style = config.train.lr_decay_style
    return style != "constant" and not SCHEDULES[style].ends


def _shaped(field: str) -> Only:
    """Fields of a schedule's shape."""
    return Only(
        "lr_decay_style", table=lambda: [n for n, row in SCHEDULES.items() if field in row.fields]
    )


def _needed(field: str) -> Refuse:
    return Refuse(lambda c: f"{c.train.lr_decay_style} needs it", "lr_decay_style").when(
        lambda c: field in SCHEDULES[c.train.lr_decay_style].needs and not getattr(c.train, field)
    )


def _wrong_schedule(config: Any) -> str | None:
    row = SCHEDULES[config.train.lr_decay_style]
    return wrong_options(row.options, config.train.lr_decay_args, "schedule")


def _wrong_options(config: Any) -> str | None:
    row = OPTIMIZERS[config.train.optimizer]
    return wrong_options(row.options, config.train.optimizer_args, "optimizer")


def _optimizers(field: str) -> list[str]:
    """The optimizers that read a field."""
    return [name for name, row in OPTIMIZERS.items() if field in row.fields]


def _ignored(field: str) -> Refuse:
    """Where the optimizer does not read what every other one does."""
    return Refuse(lambda c: OPTIMIZERS[c.train.optimizer].ignores.get(field), "optimizer").when(
        lambda c: (
            field in OPTIMIZERS[c.train.optimizer].ignores
            and getattr(c.train, field) != type(c.train).model_fields[field].default
        )
    )


def _read(field: str) -> Only:
    return Only("optimizer", table=lambda: _optimizers(field))


def _bf16(name: str, *optimizers: str) -> Refuse:
    """optimizers: those of IN_DTYPE that read the field, if not all."""
    return Refuse(
        "must be at most 0.996: a state in bfloat16 that loses less than 1 / 256 in a step rounds "
        "to where it was; fp32 keeps it",
        "optimizer_dtype",
    ).when(
        lambda c: (
            c.train.optimizer in (optimizers or _optimizers("optimizer_dtype"))
            and c.train.optimizer_dtype == "bf16"
            and not getattr(c.train, name) <= 1 - 2**-8
        )
    )


class Rate(Section):
    """The learning rate."""

    lr: float = field(5e-5, Resume.NEXT_STEP, gt=0)
    """Peak learning rate."""
    lr_min: float = field(
        1e-7,
        Resume.NEXT_STEP,
        Refuse("the decay would rise", "lr").when(
            lambda c: _decays(c) and c.train.lr_min > c.train.lr
        ),
        ge=0,
    )
    """Learning rate at the end of the decay; the least one, for square_annealing and schedules
    without an end.
    """
    lr_start: float = field(
        0.0,
        Resume.NEXT_STEP,
        Refuse("the warmup would fall", "lr").when(
            lambda c: (
                (c.train.lr_warmup_ratio > 0 or c.train.lr_warmup_steps > 0)
                and c.train.lr_start > c.train.lr
            )
        ),
        ge=0,
    )
    """Learning rate at the start of the warmup."""
    lr_warmup_ratio: float = field(0.0, Resume.NEXT_STEP, _ignored("lr_warmup_ratio"), ge=0, le=1)
    """Fraction of all steps for the linear warmup."""
    lr_warmup_steps: int = field(
        0,
        Resume.NEXT_STEP,
        _ignored("lr_warmup_steps"),
        Refuse("the warmup has two lengths; give one", "lr_warmup_ratio").when(
            lambda c: c.train.lr_warmup_steps > 0 and c.train.lr_warmup_ratio > 0
        ),
        ge=0,
    )
    """Steps of the linear warmup; 0: as lr_warmup_ratio says."""
    lr_decay_style: Annotated[str, RowOf(SCHEDULES)] = field(
        "constant",
        Resume.NEXT_STEP,
        _ignored("lr_decay_style"),
    )
    """After the warmup."""
    lr_decay_args: dict[str, Any] = field(
        {},
        Resume.NEXT_STEP,
        Only("lr_decay_style", table=lambda: with_options(SCHEDULES)),
        Refuse(_wrong_schedule, "lr_decay_style").when(_wrong_schedule),
    )
    """Options of the schedule that have no field here."""
    lr_decay_ratio: float = field(
        1.0,
        Resume.NEXT_STEP,
        Refuse("the decay would end before the warmup", "lr_warmup_ratio").when(
            lambda c: _decays(c) and c.train.lr_decay_ratio < c.train.lr_warmup_ratio
        ),
        Refuse(lambda c: f"{c.train.lr_decay_style} has no end", "lr_decay_style").when(
            lambda c: _endless(c) and c.train.lr_decay_ratio != 1
        ),
        ge=0,
        le=1,
    )
    """Fraction of all steps after which the decay has ended."""
    lr_decay_steps: int | None = field(
        None,
        Resume.NEXT_STEP,
        Only("lr_decay_style", table=_ending),
        Refuse("the decay has two ends; give one", "lr_decay_ratio").when(
            lambda c: c.train.lr_decay_steps is not None and c.train.lr_decay_ratio != 1
        ),
        ge=1,
    )
    """Steps after which the decay has ended, with the warmup; null: as lr_decay_ratio says."""
    lr_constant_steps: int = field(
        0, Resume.NEXT_STEP, _shaped("lr_constant_steps"), _needed("lr_constant_steps"), ge=0
    )
    """Steps at a constant rate: wsd, warmup_hold: at the peak, after the warmup; cosine_annealing:
    at lr_min, before the end.
    """
    lr_cycles: float | None = field(
        None,
        Resume.NEXT_STEP,
        _shaped("lr_cycles"),
        Refuse("hard restarts need a whole number of cycles", "lr_decay_style").when(
            lambda c: (
                c.train.lr_decay_style == "cosine_with_restarts" and (c.train.lr_cycles or 1) % 1
            )
        ),
        gt=0,
    )
    """Waves of the cosine in the decay, null: 0.5; cosine_with_restarts: descents, null: 1."""
    lr_power: float = field(1.0, Resume.NEXT_STEP, _shaped("lr_power"), gt=0)
    """polynomial, warmup_hold: the decay's power."""
    lr_step_size: int | None = field(
        None, Resume.NEXT_STEP, _shaped("lr_step_size"), _needed("lr_step_size"), ge=1
    )
    """step: steps after which the rate is multiplied by lr_gamma."""
    lr_gamma: float | None = field(
        None, Resume.NEXT_STEP, _shaped("lr_gamma"), _needed("lr_gamma"), gt=0, le=1
    )
    """step: what the rate is multiplied by every lr_step_size steps; exponential: in each step."""


class Optim(Rate):
    """The optimizer, and its groups of parameters."""

    optimizer: Annotated[str, RowOf(OPTIMIZERS)] = field(
        "adamw",
        Resume.OTHER_STATES,
        Refuse(
            "only adapters are trained, and those by AdamW: muon would have no matrix",
            "lora.enable_lora",
        ).when(lambda c: c.lora.enable_lora and OPTIMIZERS[c.train.optimizer].apart_lr is not None),
        Refuse(lambda c: OPTIMIZERS[c.train.optimizer].needs_whole, "data_parallel_mode").when(
            lambda c: c.train.data_parallel_mode == "fsdp2"
        ),
    )
    """Optimizer."""
    optimizer_args: dict[str, Any] = field(
        {},
        Resume.OTHER_STATES,
        Only("optimizer", table=lambda: with_options(OPTIMIZERS)),
        Refuse(_wrong_options, "optimizer").when(_wrong_options),
        later=True,
    )
    """Options of the optimizer that have no field here, under PyTorch's names."""
    optimizer_dtype: Literal["fp32", "bf16"] = field(
        "bf16", Resume.OTHER_STATES, _read("optimizer_dtype")
    )
    """Dtype of the states of anyprecision_adamw and muon; adamw's are of the parameters' dtype."""
    adam_beta1: Number = field(
        0.9, Resume.NEXT_STEP, _read("adam_beta1"), _bf16("adam_beta1"), ge=0, lt=1
    )
    """Adam and its kin: decay of the first moment; or a mapping, as weight_decay."""
    adam_beta2: Number = field(
        0.95, Resume.NEXT_STEP, _read("adam_beta2"), _bf16("adam_beta2"), ge=0, lt=1
    )
    """Adam and its kin: decay of the second moment; or a mapping, as weight_decay."""
    adam_epsilon: float = field(1e-8, Resume.NEXT_STEP, _read("adam_epsilon"), gt=0)
    """Adam and its kin: added to the root of the second moment."""
    weight_decay: Number = field(0.0, Resume.NEXT_STEP, _ignored("weight_decay"), ge=0)
    """Weight decay, decoupled or an L2 term as the optimizer has it. Or a mapping with schedule,
    from, to, steps, start and the schedule's own fields: it changes from step to step.
    """
    no_decay_modules: list[str] = field([], Resume.OTHER_STATES)
    """No weight decay where the path of a parameter's module contains one of these."""
    no_decay_params: list[str] = field([], Resume.OTHER_STATES)
    """No weight decay where a parameter's full name (model.norm.weight) contains one of these."""
    layerwise_lr_bound: float = field(1.0, Resume.OTHER_STATES, gt=0, le=1, later=True)
    """b: the rate of a layer is lr (b + (1 - b) depth / (layers + 2)): the embedding is at depth 0,
    layers at 1, 2, ..., the final norm and the head at layers + 2.
    """
    max_grad_norm: Number = field(
        1.0,
        Resume.NEXT_STEP,
        Refuse("on the way to 0 clipping would become total, and at 0 end; end it above").when(
            lambda c: isinstance(c.train.max_grad_norm, PerStep) and not c.train.max_grad_norm > 0
        ),
        ge=0,
    )
    """Gradients are clipped to this global norm, 0: not clipped; or a mapping, as weight_decay."""
    muon_lr: float = field(0.02, Resume.NEXT_STEP, _read("muon_lr"), gt=0)
    """Muon: peak learning rate of hidden matrices; all else is trained by AdamW."""
    muon_momentum: Number = field(
        0.95, Resume.NEXT_STEP, _read("muon_momentum"), _bf16("muon_momentum", "muon"), ge=0, lt=1
    )
    """Muon: momentum; or a mapping, as weight_decay."""
    muon_nesterov: bool = field(True, Resume.NEXT_STEP, _read("muon_nesterov"))
    """Muon: Nesterov momentum."""
    muon_ns_steps: int = field(5, Resume.NEXT_STEP, _read("muon_ns_steps"), ge=1)
    """Muon: Newton-Schulz iterations."""
    muon_ns_coefficients: Literal["quintic", "polar_express"] = field(
        "quintic", Resume.NEXT_STEP, _read("muon_ns_coefficients")
    )
    """Muon: polynomials of the iterations; see newton_schulz."""
    muon_adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = field(
        None, Resume.NEXT_STEP, _read("muon_adjust_lr_fn")
    )
    """Muon: scaling of lr for an A x B matrix. original, or null: sqrt(max(1, A / B));
    match_rms_adamw: 0.2 sqrt(max(A, B)), for lr and weight decay as AdamW's.
    """
