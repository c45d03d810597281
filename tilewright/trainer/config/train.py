"""The section train: how it is trained."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import field_validator, model_validator

from tilewright.core import platform
from tilewright.core.torch_names import no_zero_bubble
from tilewright.trainer.columns import TOKENS
from tilewright.trainer.config.data import nothing_held_out, nothing_scored
from tilewright.trainer.config.section import (
    Accepts,
    Only,
    Refuse,
    Resume,
    RowOf,
    Section,
    field,
)
from tilewright.trainer.optim.optim import wrong_options
from tilewright.trainer.optim.per_step import Number, PerStep
from tilewright.trainer.optim.schedules import too_short
from tilewright.trainer.tables import CALLBACKS, COLUMNS, LAYOUTS, LOSSES, OPTIMIZERS, SCHEDULES

if TYPE_CHECKING:
    from tilewright.trainer.config import Config

FSDP2 = Only("data_parallel_mode", "fsdp2")
SIZES = Only("data_parallel_mode", "fsdp2", neutral=(1,))
STAGES = Only("pipeline_parallel_size", but=1).because("there is one stage")
RECOMPUTED = Only("enable_gradient_checkpointing", True).because("nothing is recomputed")
WHOLE = ("GPipe", "Interleaved1F1B")  # one backward for inputs and weights, as 1F1B
MANY = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


def too_few(schedule: str, micro_batches: int, ranks: int) -> str | None:
    """Why a pipeline's schedule cannot run so many micro-batches."""
    if schedule == "1F1B" and micro_batches < ranks:
        return f"1F1B needs at least as many micro-batches as the {ranks} stages; GPipe takes any"
    rounds = max(1, micro_batches // ranks)
    if schedule.startswith("Interleaved") and micro_batches % rounds:
        return (
            f"{schedule} runs them in {rounds} rounds of equal size, so their number must divide "
            f"by {rounds}"
        )
    return None


def _size(name: str) -> Refuse:
    return Refuse("must be -1, or 1 or more").when(
        lambda c: getattr(c.train, name) < 1 and getattr(c.train, name) != -1
    )


def _few(config: Config) -> str | None:
    t = config.train
    return too_few(
        t.pipeline_parallel_schedule, t.gradient_accumulation_steps, t.pipeline_parallel_size
    )


def _splits_otherwise(config: Config) -> bool:
    t = config.train
    stages = t.pipeline_parallel_size * t.virtual_pipeline_size
    return t.pipeline_split is not None and len(t.pipeline_split) != stages


def _prepared(config: Config) -> list:
    data = config.data
    return [] if data.skip_prepare_dataset else [*data.datasets, *data.test_datasets]


def _decays(config: Config) -> bool:
    return SCHEDULES[config.train.lr_decay_style].decays


def _ending() -> list[str]:
    """The schedules that end where lr_decay_steps says."""
    return [name for name, row in SCHEDULES.items() if row.ends]


def _endless(config: Config) -> bool:
    """Of a schedule without an end; `constant` has always taken the fields of the others."""
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


def _too_short(config: Config) -> str | None:
    """Where the number of steps is known; `Plan` checks it where it is not."""
    t = config.train
    known = t.max_steps or (1 if t.lr_decay_steps is not None and not t.lr_warmup_ratio else 0)
    return too_short(known, t) if known else None


def _absent_columns(config: Config) -> str | None:
    wanted = [c for c in LOSSES[config.train.loss].columns if c not in TOKENS]
    if absent := [c for c in wanted if c not in COLUMNS.names()]:
        has = ", ".join([*TOKENS, *COLUMNS.names()])
        return f"reads {', '.join(absent)} of a batch; columns are {has}"
    needed = [c for c in wanted if COLUMNS[c].default is None]
    if needed and any(e.path == "dummy" for e in _prepared(config)):
        return f"reads {', '.join(needed)} of a batch, which dummy data do not have"
    return None


# Of a loss whose values per token are compared with those of a model that does not learn.
def _unshaped(field: str, neutral: float) -> Refuse:
    return Refuse("a preference is one of log-probabilities as they are", "loss").when(
        lambda c: c.train.loss == "preference" and getattr(c.train, field) != neutral
    )


def _scored(config: Config) -> bool:
    """Whether the model is a reward model."""
    return LOSSES[config.train.loss].head == "reward"


NO_TOKENS = "a reward model has one number for each document, and none for tokens"


def _wrong_callbacks(config: Config) -> str | None:
    names = config.train.callbacks
    if len({*names}) < len(names):
        return "each can be there once"
    own = [name for name in names if CALLBACKS[name].wanted is not None]
    return f"{own[0]} is there where other fields ask for it" if own else None


def _with_options() -> list[str]:
    """The optimizers that read optimizer_args."""
    return [name for name, row in OPTIMIZERS.items() if row.options is not None]


def _wrong_options(config: Config) -> str | None:
    row = OPTIMIZERS[config.train.optimizer]
    return wrong_options(row.options, config.train.optimizer_args, "optimizer")


def _wrong_layouts(config: Config) -> str | None:
    known = [name for name in LAYOUTS.names() if LAYOUTS[name].options is not None]
    for name, given in config.train.layout_args.items():
        if name not in known:
            return f"{name} is no layout with options; accepted: {', '.join(known) or 'none'}"
        if wrong := wrong_options(LAYOUTS[name].options, given, f"layout {name}"):
            return wrong
    return None


def _optimizers(field: str) -> list[str]:
    """The optimizers that read a field."""
    return [name for name, row in OPTIMIZERS.items() if field in row.fields]


def _ignored(field: str) -> Refuse:
    """Where the optimizer does not read what every other one does."""
    return Refuse(lambda c: OPTIMIZERS[c.train.optimizer].ignores.get(field), "optimizer").when(
        lambda c: (
            field in OPTIMIZERS[c.train.optimizer].ignores
            and getattr(c.train, field) != Train.model_fields[field].default
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


def _batches(name: str) -> Refuse:
    """Of a limit that is a count or a share."""

    def wrong(config: Config) -> bool:
        most = getattr(config.train, name) or 0
        return most < 0 or (isinstance(most, float) and most > 1)

    return Refuse("must be a number of batches (0: all) or a share up to 1.0").when(wrong)


def _wants(config: Config, *strategies: str) -> bool:
    return config.train.save_strategy in strategies


HELD_OUT = Refuse(nothing_held_out, "data.test_datasets", "data.val_set_size")
EVALUATED = Only("eval_strategy", but="no").because("nothing is evaluated")
SCORED = Refuse(
    nothing_scored, "eval_strategy", "do_test", "data.test_datasets", "data.val_set_size"
)


class Train(Section):
    # parallelism
    data_parallel_mode: Literal["none", "ddp", "fsdp2"] = field(
        "fsdp2",
        Resume.LAYOUT,
        Only("pipeline_parallel_size", 1).because(
            "the schedules accumulate gradients of fsdp2's parameters; with it, data_parallel_shard_size: 1 "
            "makes replicas of pipelines"
        ),
    )
    """none: one process; ddp: replicas; fsdp2: sharded parameters."""
    data_parallel_shard_size: int = field(
        -1, Resume.LAYOUT, SIZES, _size("data_parallel_shard_size")
    )
    """Processes of a shard group that read batches of their own; -1: all that remain. All processes
    are stages x replicas x shards x ring x Ulysses x tensor-parallel.
    """
    data_parallel_replicate_size: int = field(
        -1, Resume.LAYOUT, SIZES, _size("data_parallel_replicate_size")
    )
    """Replicas of shard groups (HSDP); -1: automatic."""
    tensor_parallel_size: int = field(
        1,
        Resume.LAYOUT,
        Only("data_parallel_mode", "fsdp2").because(
            "of these only fsdp2 takes parameters that are sharded already; with it, "
            "data_parallel_shard_size: 1 makes replicas of tensor-parallel groups"
        ),
        Only("lora.enable_qlora", False).because(
            "every process has all of a quantized matrix, whose scales are those of blocks that a "
            "shard would cut, so it would save neither memory nor time"
        ),
        Only("model.merge_qkv", False).because(
            "each rank needs rows of queries, of keys and of values, which are not one shard of a "
            "merged matrix; set merge_qkv: false"
        ),
        Only("model.batch_invariant", False).because(
            "in which order the ranks' sums are added depends on where in the batch a token is"
        ),
        ge=1,
    )
    """Neighboring processes that share the matrices of each layer, and between layers each
    sequence; divides the MLP's width and the vocabulary. Where it does not divide the heads, each
    computes attention whole.
    """
    pipeline_parallel_size: int = field(1, Resume.LAYOUT, ge=1)
    """Processes over which the layers are spread, as stages of a pipeline."""
    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = field(
        "1F1B",
        Resume.LAYOUT,
        STAGES,
        Refuse(lambda _: no_zero_bubble()).when(
            lambda c: (
                c.train.pipeline_parallel_size > 1
                and c.train.pipeline_parallel_schedule.endswith("ZeroBubble")
            )
        ),
        Only("enable_compile", False, neutral=WHOLE).because(
            "compiled code computes the gradients of inputs and weights at once, and cannot be "
            "split"
        ),
        Only("enable_reentrant", False, neutral=WHOLE).because(
            "reentrant recomputation cannot compute the gradients of inputs and weights apart"
        ),
    )
    """The order in which stages run the gradient_accumulation_steps micro-batches."""
    virtual_pipeline_size: int = field(
        1,
        Resume.LAYOUT,
        STAGES,
        Only("pipeline_parallel_schedule", *MANY).because(
            "1F1B and GPipe run one stage on each process"
        ),
        Refuse(
            "an interleaved schedule needs two or more stages on each process",
            "pipeline_parallel_schedule",
        ).when(
            lambda c: (
                c.train.pipeline_parallel_size > 1
                and c.train.virtual_pipeline_size == 1
                and c.train.pipeline_parallel_schedule.startswith("Interleaved")
            )
        ),
        Refuse("ZBVZeroBubble needs two stages on each process", "pipeline_parallel_schedule").when(
            lambda c: (
                c.train.pipeline_parallel_size > 1
                and c.train.virtual_pipeline_size != 2
                and c.train.pipeline_parallel_schedule == "ZBVZeroBubble"
            )
        ),
        ge=1,
    )
    """Stages of each process."""
    pipeline_split: list[int] | None = field(
        None,
        Resume.LAYOUT,
        STAGES,
        Refuse(
            "needs a number for each stage, of which there are pipeline_parallel_size x "
            "virtual_pipeline_size",
            "pipeline_parallel_size",
            "virtual_pipeline_size",
        ).when(_splits_otherwise),
        Refuse("a stage has one layer or more").when(
            lambda c: c.train.pipeline_split is not None and min(c.train.pipeline_split) < 1
        ),
        min_length=2,
    )
    """Numbers of layers of the stages, in order; null: such that the stage with the most parameters
    has the fewest, with embedding and head.
    """
    pp_variable_seq_lengths: bool = field(True, Resume.LAYOUT, STAGES)
    """Stages exchange hidden states as long as the longest micro-batch of each step, rounded up to
    an eighth of a full one; false: always as long as a full one.
    """
    expert_parallel_size: int = field(
        1,
        Resume.LAYOUT,
        FSDP2,
        Only("model.batch_invariant", False).because(
            "no implementation of moe_mlp claims that a row's bits do not depend on the batch"
        ),
        ge=1,
    )
    """Processes over which the experts of a layer are spread; divides those of a shard group."""
    ulysses_parallel_size: int = field(1, Resume.LAYOUT, FSDP2, ge=1)
    """Neighboring ranks that exchange a sequence's tokens for heads; divides the query heads."""
    ringattn_parallel_size: int = field(1, Resume.LAYOUT, FSDP2, ge=1)
    """Processes, or groups of Ulysses, that share each sequence and send keys and values; with
    batch_invariant they exchange heads, as Ulysses does, of any number.
    """
    cp_fsdp_mode: Literal["all", "ulysses_only", "ring_only", "none"] = field(
        "all",
        Resume.LAYOUT,
        FSDP2,
        Refuse("no sequence is spread", "ringattn_parallel_size", "ulysses_parallel_size").when(
            lambda c: c.train.cp_fsdp_mode != "all" and c.train.context_parallel_size == 1
        ),
    )
    """Which processes that share a sequence shard parameters too; others are replicas (HSDP)."""
    layout_args: dict[str, dict[str, Any]] = field({}, Resume.LAYOUT, Refuse(_wrong_layouts))
    """Options of layouts that have no field here, by the layout's name."""
    reshard_after_forward: bool | None = field(
        None,
        Resume.LAYOUT,
        FSDP2,
        Only("enable_full_shard", True, neutral=(False,)).because(
            "ZeRO-2 keeps parameters after the forward pass"
        ),
    )
    """Free gathered parameters after forward; null: as enable_full_shard, false in pipelines."""
    ep_outside: bool = field(
        False,
        Resume.LAYOUT,
        FSDP2,
        Only("expert_parallel_size", but=1).because("there is nothing to place"),
    )
    """false: the processes that share a layer's experts are neighbors; true: those that shard one
    expert.
    """
    loss: Annotated[str, RowOf(LOSSES)] = field(
        "language_modeling", Resume.OTHER_CONTENTS, Refuse(_absent_columns)
    )
    """What is minimized; language_modeling: the cross-entropy of the labels;
    weighted_language_modeling: with each token's weight, from the column weight; preference: what
    the section preference says; distillation: what the section distillation says; reward: a reward
    model's, of pairs.
    """
    loss_temperature: Number = field(
        1.0,
        Resume.NEXT_STEP,
        _unshaped("loss_temperature", 1.0),
        Refuse("a distillation's is distillation.temperature", "loss").when(
            lambda c: c.train.loss_temperature != 1.0 and c.train.loss == "distillation"
        ),
        Refuse(NO_TOKENS, "loss").when(lambda c: c.train.loss_temperature != 1.0 and _scored(c)),
        gt=0,
    )
    """Divides the logits of losses in training, and of a policy's in evaluations too; or a mapping,
    as weight_decay.
    """
    z_loss: Number = field(
        0.0,
        Resume.NEXT_STEP,
        _unshaped("z_loss", 0.0),
        Refuse("this loss is one of log-probabilities as they are", "loss").when(
            lambda c: c.train.z_loss != 0.0 and c.train.loss in ("policy", "distillation")
        ),
        Refuse(NO_TOKENS, "loss").when(lambda c: c.train.z_loss != 0.0 and _scored(c)),
        ge=0,
    )
    """The squared log-sum-exp of a token's logits times this is added to its loss in training, and
    reported with it; or a mapping, as weight_decay.
    """
    # optimizer
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
        Only("optimizer", table=_with_options),
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
        Refuse(
            _too_short, "lr_warmup_steps", "lr_decay_steps", "lr_constant_steps", "max_steps"
        ).when(
            lambda c: c.train.lr_warmup_steps or c.train.lr_constant_steps or c.train.lr_decay_steps
        ),
    )
    """After the warmup."""
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
    # dropout
    hidden_dropout: float = field(0.0, Resume.NEXT_STEP, ge=0, lt=1)
    """Probability of an element of attention's or an MLP's output to be dropped before it is added
    to the residual stream; the others are divided by 1 - p. Off in evaluation.
    """
    attention_dropout: float = field(
        0.0,
        Resume.NEXT_STEP,
        Only("ringattn_parallel_size", 1).because(
            "a mask draws the bits of four keys of a document at once, and a ring cuts documents at "
            "any key"
        ),
        ge=0,
        lt=1,
    )
    """The same for attention's weights after the softmax."""
    ffn_dropout: float = field(0.0, Resume.NEXT_STEP, ge=0, lt=1)
    """The same for the inner activations of MLPs that are no experts."""
    dropout_warmup_steps: int = field(
        0,
        Resume.NEXT_STEP,
        Refuse("nothing is dropped", "hidden_dropout", "attention_dropout", "ffn_dropout").when(
            lambda c: c.train.dropout_warmup_steps and not c.train.drops
        ),
        ge=0,
    )
    """Optimizer steps over which dropout's probabilities rise linearly from 0."""
    # batches
    micro_batch_size: int = field(1, Resume.NEXT_STEP, ge=1)
    """Bins in a forward pass of a process, or of those that share a sequence."""
    gradient_accumulation_steps: int = field(
        1,
        Resume.NEXT_STEP,
        Refuse(_few, "pipeline_parallel_schedule", "pipeline_parallel_size").when(
            lambda c: c.train.pipeline_parallel_size > 1
        ),
        ge=1,
    )
    """Forward passes before an optimizer step."""
    num_train_epochs: int = field(1, Resume.NEXT_STEP, ge=1, certified=False)
    """Passes over the data."""
    max_steps: int | None = field(None, Resume.NEXT_STEP, ge=1, certified=False)
    """Optimizer steps in all; overrides epochs."""
    # evaluation
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
        Refuse(NO_TOKENS, "loss").when(lambda c: c.train.eval_accuracy and _scored(c)),
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
    # memory and speed
    enable_mixed_precision: bool = field(True, Resume.ROUNDING)
    """Compute in bfloat16, keep parameters in float32."""
    enable_gradient_checkpointing: bool = field(True, Resume.COST)
    """Recompute activations in the backward pass."""
    enable_reentrant: bool = field(False, Resume.COST, RECOMPUTED)
    """Reentrant checkpointing."""
    recompute_modules: list[Literal["self_attn", "mlp"]] | None = field(
        None, Resume.COST, RECOMPUTED, min_length=1
    )
    """Recompute only these in each layer; null: whole layers."""
    moe_checkpoint_method: Literal["moe_act"] | None = field(
        None,
        Resume.COST,
        RECOMPUTED,
        Refuse("without mlp the experts are not recomputed", "recompute_modules").when(
            lambda c: (
                c.train.moe_checkpoint_method == "moe_act"
                and c.train.recompute_modules is not None
                and "mlp" not in c.train.recompute_modules
            )
        ),
        Only("enable_reentrant", False).because(
            "the experts' activations are recomputed without reentering the backward"
        ),
    )
    """null: recompute experts with their layer, communication too; moe_act: activations only."""
    router_replay: bool = field(
        False,
        Resume.OTHER_CONTENTS,
        Refuse(
            "an engine's records are of its tokens, so every data set must be of type tokenized"
        ).when(
            lambda c: c.train.router_replay and any(e.type != "tokenized" for e in _prepared(c))
        ),
        Refuse("dummy data have no recorded routes").when(
            lambda c: c.train.router_replay and any(e.path == "dummy" for e in _prepared(c))
        ),
    )
    """Send tokens to the experts that an inference engine recorded in the column routed_experts."""
    router_replay_compare_steps: int = field(
        0,
        Resume.OUTPUT,
        Only("router_replay", True).because("nothing is replayed"),
        Refuse(NO_TOKENS, "loss").when(
            lambda c: c.train.router_replay_compare_steps > 0 and _scored(c)
        ),
        ge=0,
    )
    """Every so many steps, report the log-probabilities of tokens with recorded and with today's
    experts, which takes two more forward passes; 0: never.
    """
    freeze_router: bool = field(False, Resume.OTHER_STATES)
    """Keep the weights that choose experts as they are."""
    enable_full_shard: bool = field(True, Resume.LAYOUT, FSDP2)
    """FSDP2: shard parameters too (ZeRO-3); false: ZeRO-2."""
    enable_forward_prefetch: bool = field(True, Resume.LAYOUT, FSDP2)
    """FSDP2: gather the next unit during the forward pass."""
    enable_activation_offload: bool = field(
        False,
        Resume.COST,
        Refuse(
            lambda _: (
                (cuda := platform.no_cuda()) and f"activations are in CPU memory already: {cuda}"
            )
        ),
    )
    """Keep what layers save for backward in CPU memory until the backward pass."""
    activation_gpu_limit: float = field(
        0.0,
        Resume.COST,
        Only("enable_activation_offload", True).because("nothing is offloaded"),
        ge=0,
    )
    """GB (10^9 bytes) of it that stay on the GPU: the last layers'."""
    enable_compile: bool = field(False, Resume.ROUNDING)
    """torch.compile the layers."""
    init_device: Literal["auto", "cpu", "cuda", "meta", "npu"] = field(
        "auto",
        Resume.COST,
        Accepts("auto", "cpu", "cuda", "meta").because(
            "no op and no process group here runs on NPUs"
        ),
        Only("data_parallel_mode", but="fsdp2", neutral=("meta", "npu")).because(
            "fsdp2 builds the model on meta; leave it at auto"
        ),
        Only("data_parallel_mode", "fsdp2", neutral=("cpu", "cuda", "npu")).because(
            "only fsdp2 builds the model on meta; leave it at auto"
        ),
        Refuse(lambda _: platform.no_cuda()).when(lambda c: c.train.init_device == "cuda"),
    )
    """Where the model is built; auto: meta for fsdp2, else cuda, or cpu where there is none. With
    lora.enable_qlora always meta.
    """
    load_weights_mode: Literal["broadcast", "all_ranks"] = field(
        "broadcast",
        Resume.COST,
        Refuse("weights are drawn, not read", "model.model_path").when(
            lambda c: (
                c.train.load_weights_mode == "all_ranks"
                and c.model.model_path is None
                and c.preference.reference_path is None
            )
        ),
        certified=False,
    )
    """broadcast: rank 0 (of a pipeline, the first of each stage) reads the weights and sends them;
    all_ranks: each reads.
    """
    enable_full_determinism: bool = field(
        False,
        Resume.ROUNDING,
        Only("allow_cuda_launch_blocking", True).because(
            "full determinism needs allow_cuda_launch_blocking: true"
        ),
    )
    """Deterministic algorithms only; slow."""
    allow_cuda_launch_blocking: bool = field(
        False,
        Resume.THIS_START,
        Refuse("CUDA_LAUNCH_BLOCKING is set, which slows training down; unset it").when(
            lambda c: (
                platform.env_flag("CUDA_LAUNCH_BLOCKING") and not c.train.allow_cuda_launch_blocking
            )
        ),
    )
    """Run although CUDA_LAUNCH_BLOCKING is set."""
    ignore_memory_plan: bool = field(False, Resume.THIS_START)
    """Start although the plan of memory does not fit into the device."""
    empty_cache_steps: int = field(500, Resume.COST, ge=0, certified=False)
    """torch.cuda.empty_cache() every so many steps; 0: never."""
    gc_steps: int = field(500, Resume.COST, ge=0, certified=False)
    """Collect garbage every so many steps only; 0: when Python likes."""
    # checkpoints
    output_dir: str = field(..., Resume.PLACE, min_length=1, examples=["outputs"])
    """Folder for checkpoints, logs and the resolved configuration."""
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
        EVALUATED,
        HELD_OUT,
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
    # logging
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
    # determinism
    checksum_steps: int = field(0, Resume.OUTPUT, ge=0)
    """Write checksums of modules' outputs, gradients and trained weights to checksums.jsonl every
    so many steps; 0: never.
    """
    assert_deterministic: str | None = field(None, Resume.THIS_START, min_length=1)
    """An earlier run, by its output_dir or a file in it: refuse to start where the certificates
    differ, or ranks do, and end at the first step that is not the same bit for bit.
    """
    # profiling
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
    seed: int = field(42, Resume.OTHER_ORDER, ge=0, lt=2**32)
    """Seed of weights and shuffling."""

    @field_validator("load_checkpoint_path")
    @classmethod
    def _empty_is_none(cls, value: str | None) -> str | None:
        return value or None

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

    @model_validator(mode="after")
    def _strategy(self) -> Train:
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

    @property
    def reshard(self) -> bool:
        """FSDP2's reshard_after_forward: ZeRO-3 if true, ZeRO-2 if false."""
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        # The schedule keeps parameters gathered from micro-batch to micro-batch.
        return self.enable_full_shard and self.pipeline_parallel_size == 1

    @property
    def drops(self) -> bool:
        """Whether anything is dropped."""
        return max(self.hidden_dropout, self.attention_dropout, self.ffn_dropout) > 0

    @property
    def board_dir(self) -> str:
        """The folder of TensorBoard's event files."""
        return self.log_dir or os.path.join(self.output_dir, "tensorboard")

    @property
    def context_parallel_size(self) -> int:
        """Number of processes that share a sequence."""
        return self.ringattn_parallel_size * self.ulysses_parallel_size
