"""What optimizers and schedules read of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from tilewright.trainer.models.lora_fields import Lora
from tilewright.trainer.optim.per_step import Number, PerStep
from tilewright.trainer.optim.row import OPTIMIZERS, SCHEDULES
from tilewright.trainer.options import with_options
from tilewright.trainer.section import Needs, Resume, RowOf, Section, Stated, field


def _optimizers(field: str) -> list[str]:
    """The optimizers that read a field."""
    return [name for name, row in OPTIMIZERS.items() if field in row.fields]


def _read(field: str) -> Needs:
    return Needs("optimizer", lambda: _optimizers(field))


def _shaped(field: str) -> Needs:
    """Fields of a schedule's shape."""
    return Needs("lr_decay_style", lambda: [n for n, r in SCHEDULES.items() if field in r.fields])


class Rate(Section):
    """The learning rate."""

    lr: float = field(5e-5, Resume.NEXT_STEP, gt=0)
    """Peak learning rate."""
    lr_min: float = field(1e-7, Resume.NEXT_STEP, ge=0)
    """Learning rate at the end of the decay; the least one, for square_annealing and schedules
    without an end.
    """
    lr_start: float = field(0.0, Resume.NEXT_STEP, ge=0)
    """Learning rate at the start of the warmup."""
    lr_warmup_ratio: float = field(0.0, Resume.NEXT_STEP, ge=0, le=1)
    """Fraction of all steps for the linear warmup."""
    lr_warmup_steps: int = field(0, Resume.NEXT_STEP, ge=0)
    """Steps of the linear warmup; 0: as lr_warmup_ratio says."""
    lr_decay_style: Annotated[str, RowOf(SCHEDULES)] = field("constant", Resume.NEXT_STEP)
    """After the warmup."""
    lr_decay_args: dict[str, Any] = field(
        {}, Resume.NEXT_STEP, Needs("lr_decay_style", lambda: with_options(SCHEDULES))
    )
    """Options of the schedule that have no field here."""
    lr_decay_ratio: float = field(1.0, Resume.NEXT_STEP, ge=0, le=1)
    """Fraction of all steps after which the decay has ended."""
    lr_decay_steps: int | None = field(
        None,
        Resume.NEXT_STEP,
        Needs("lr_decay_style", lambda: [n for n, row in SCHEDULES.items() if row.ends]),
        ge=1,
    )
    """Steps after which the decay has ended, with the warmup; null: as lr_decay_ratio says."""
    lr_constant_steps: int = field(0, Resume.NEXT_STEP, _shaped("lr_constant_steps"), ge=0)
    """Steps at a constant rate: wsd, warmup_hold: at the peak, after the warmup; cosine_annealing:
    at lr_min, before the end.
    """
    lr_cycles: float | None = field(None, Resume.NEXT_STEP, _shaped("lr_cycles"), gt=0)
    """Waves of the cosine in the decay, null: 0.5; cosine_with_restarts: descents, null: 1."""
    lr_power: float = field(1.0, Resume.NEXT_STEP, _shaped("lr_power"), gt=0)
    """polynomial, warmup_hold: the decay's power."""
    lr_step_size: int | None = field(None, Resume.NEXT_STEP, _shaped("lr_step_size"), ge=1)
    """step: steps after which the rate is multiplied by lr_gamma."""
    lr_gamma: float | None = field(None, Resume.NEXT_STEP, _shaped("lr_gamma"), gt=0, le=1)
    """step: what the rate is multiplied by every lr_step_size steps; exponential: in each step."""


def of_rate(rate: Rate) -> Iterator[Stated]:
    """The rate has one warmup and one decay, with all that their shape needs."""
    style, row = rate.lr_decay_style, SCHEDULES[rate.lr_decay_style]
    yield row.decays and rate.lr_min > rate.lr, "the decay would rise", "lr_min", "lr"
    by_ratio, by_steps = rate.lr_warmup_ratio > 0, rate.lr_warmup_steps > 0
    falls = (by_ratio or by_steps) and rate.lr_start > rate.lr
    yield falls, "the warmup would fall", "lr_start", "lr"
    twice = "the warmup has two lengths; give one"
    yield by_steps and by_ratio, twice, "lr_warmup_steps", "lr_warmup_ratio"
    early = row.decays and rate.lr_decay_ratio < rate.lr_warmup_ratio
    why = "the decay would end before the warmup"
    yield early, why, "lr_decay_ratio", "lr_warmup_ratio"
    ended = rate.lr_decay_ratio != 1
    # `constant` has no end either, and has always taken all fields.
    endless = style != "constant" and not row.ends
    yield endless and ended, f"{style} has no end", "lr_decay_ratio", "lr_decay_style"
    twice = rate.lr_decay_steps is not None and ended
    yield twice, "the decay has two ends; give one", "lr_decay_steps", "lr_decay_ratio"
    for name in ("lr_constant_steps", "lr_step_size", "lr_gamma"):
        absent = name in row.needs and not getattr(rate, name)
        yield absent, f"{style} needs it", name, "lr_decay_style"
    cut = style == "cosine_with_restarts" and (rate.lr_cycles or 1) % 1
    yield cut, "hard restarts need a whole number of cycles", "lr_cycles", "lr_decay_style"


class Optim(Rate):
    """The optimizer, and its groups of parameters."""

    optimizer: Annotated[str, RowOf(OPTIMIZERS)] = field("adamw", Resume.OTHER_STATES)
    """Optimizer."""
    optimizer_args: dict[str, Any] = field(
        {}, Resume.OTHER_STATES, Needs("optimizer", lambda: with_options(OPTIMIZERS)), later=True
    )
    """Options of the optimizer that have no field here, under PyTorch's names."""
    optimizer_dtype: Literal["fp32", "bf16"] = field(
        "bf16", Resume.OTHER_STATES, _read("optimizer_dtype")
    )
    """Dtype of the states of anyprecision_adamw and muon; adamw's are of the parameters' dtype."""
    adam_beta1: Number = field(0.9, Resume.NEXT_STEP, _read("adam_beta1"), ge=0, lt=1)
    """Adam and its kin: decay of the first moment; or a mapping, as weight_decay."""
    adam_beta2: Number = field(0.95, Resume.NEXT_STEP, _read("adam_beta2"), ge=0, lt=1)
    """Adam and its kin: decay of the second moment; or a mapping, as weight_decay."""
    adam_epsilon: float = field(1e-8, Resume.NEXT_STEP, _read("adam_epsilon"), gt=0)
    """Adam and its kin: added to the root of the second moment."""
    weight_decay: Number = field(0.0, Resume.NEXT_STEP, ge=0)
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
    max_grad_norm: Number = field(1.0, Resume.NEXT_STEP, ge=0)
    """Gradients are clipped to this global norm, 0: not clipped; or a mapping, as weight_decay."""
    muon_lr: float = field(0.02, Resume.NEXT_STEP, _read("muon_lr"), gt=0)
    """Muon: peak learning rate of hidden matrices; all else is trained by AdamW."""
    muon_momentum: Number = field(0.95, Resume.NEXT_STEP, _read("muon_momentum"), ge=0, lt=1)
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


def of_optimizer(optim: Optim, lora: Lora) -> Iterator[Stated]:
    """The optimizer can train what is asked of it, and reads what is given."""
    row = OPTIMIZERS[optim.optimizer]
    yield (
        lora.enable_lora and row.apart_lr is not None,
        "only adapters are trained, and those by AdamW: muon would have no matrix",
        "optimizer",
        "lora.enable_lora",
    )
    for name in ("lr_warmup_ratio", "lr_warmup_steps", "lr_decay_style", "weight_decay"):
        given = getattr(optim, name) != Optim.model_fields[name].default
        yield given, row.ignores.get(name), name, "optimizer"
    norm = optim.max_grad_norm
    why = "on the way to 0 clipping would become total, and at 0 end; end it above"
    yield isinstance(norm, PerStep) and not norm > 0, why, "max_grad_norm"
