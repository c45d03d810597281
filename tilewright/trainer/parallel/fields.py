"""What layouts read of a configuration: the mesh, how layers are computed, the sizes of steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from tilewright.core import platform
from tilewright.core.torch_names import no_zero_bubble
from tilewright.trainer.losses.fields import NO_TOKENS, Objective, scored
from tilewright.trainer.losses.preference.row import PREFERENCES
from tilewright.trainer.losses.preference_fields import Preference
from tilewright.trainer.models.fields import Model
from tilewright.trainer.optim.fields import Optim
from tilewright.trainer.optim.row import OPTIMIZERS
from tilewright.trainer.section import Needs, Resume, Section, Stated, field

FSDP2 = Needs("data_parallel_mode", ["fsdp2"])
SIZES = Needs("data_parallel_mode", ["fsdp2"], neutral=(1,))
STAGES = Needs("pipeline_parallel_size", but=1, why="there is one stage")
RECOMPUTED = Needs("enable_gradient_checkpointing", [True], "nothing is recomputed")

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


class Parallel(Section):
    """Processes, and what each of them holds."""

    data_parallel_mode: Literal["none", "ddp", "fsdp2"] = field(
        "fsdp2",
        Resume.LAYOUT,
        Needs(
            "pipeline_parallel_size",
            [1],
            "the schedules accumulate gradients of fsdp2's parameters; with it, data_parallel_shard_size: 1 "
            "makes replicas of pipelines",
        ),
    )
    """none: one process; ddp: replicas; fsdp2: sharded parameters."""
    data_parallel_shard_size: int = field(-1, Resume.LAYOUT, SIZES)
    """Processes of a shard group that read batches of their own; -1: all that remain. All processes
    are stages x replicas x shards x ring x Ulysses x tensor-parallel.
    """
    data_parallel_replicate_size: int = field(-1, Resume.LAYOUT, SIZES)
    """Replicas of shard groups (HSDP); -1: automatic."""
    tensor_parallel_size: int = field(
        1,
        Resume.LAYOUT,
        Needs(
            "data_parallel_mode",
            ["fsdp2"],
            "of these only fsdp2 takes parameters that are sharded already; with it, "
            "data_parallel_shard_size: 1 makes replicas of tensor-parallel groups",
        ),
        Needs(
            "lora.enable_qlora",
            [False],
            "every process has all of a quantized matrix, whose scales are those of blocks that a "
            "shard would cut, so it would save neither memory nor time",
        ),
        Needs(
            "model.merge_qkv",
            [False],
            "each rank needs rows of queries, of keys and of values, which are not one shard of a "
            "merged matrix; set merge_qkv: false",
        ),
        Needs(
            "model.batch_invariant",
            [False],
            "in which order the ranks' sums are added depends on where in the batch a token is",
        ),
        ge=1,
    )
    """Neighboring processes that share the matrices of each layer, and between layers each
    sequence; divides the MLP's width and the vocabulary. Where it does not divide the heads, or
    they have one norm (OLMo 2), each computes attention whole.
    """
    pipeline_parallel_size: int = field(1, Resume.LAYOUT, ge=1)
    """Processes over which the layers are spread, as stages of a pipeline."""
    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = field(
        "1F1B",
        Resume.LAYOUT,
        STAGES,
        Needs(
            "enable_compile",
            [False],
            "compiled code computes the gradients of inputs and weights at once, and cannot be "
            "split",
            neutral=WHOLE,
        ),
        Needs(
            "enable_reentrant",
            [False],
            "reentrant recomputation cannot compute the gradients of inputs and weights apart",
            neutral=WHOLE,
        ),
    )
    """The order in which stages run the gradient_accumulation_steps micro-batches."""
    virtual_pipeline_size: int = field(
        1,
        Resume.LAYOUT,
        STAGES,
        Needs("pipeline_parallel_schedule", MANY, "1F1B and GPipe run one stage on each process"),
        ge=1,
    )
    """Stages of each process."""
    pipeline_split: list[int] | None = field(None, Resume.LAYOUT, STAGES, min_length=2)
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
        Needs(
            "model.batch_invariant",
            [False],
            "no implementation of moe_mlp claims that a row's bits do not depend on the batch",
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
        "all", Resume.LAYOUT, FSDP2
    )
    """Which processes that share a sequence shard parameters too; others are replicas (HSDP)."""
    layout_args: dict[str, dict[str, Any]] = field({}, Resume.LAYOUT)
    """Options of layouts that have no field here, by the layout's name."""
    reshard_after_forward: bool | None = field(
        None,
        Resume.LAYOUT,
        FSDP2,
        Needs(
            "enable_full_shard",
            [True],
            "ZeRO-2 keeps parameters after the forward pass",
            neutral=(False,),
        ),
    )
    """Free gathered parameters after forward; null: as enable_full_shard, false in pipelines."""
    ep_outside: bool = field(
        False,
        Resume.LAYOUT,
        FSDP2,
        Needs("expert_parallel_size", but=1, why="there is nothing to place"),
    )
    """false: the processes that share a layer's experts are neighbors; true: those that shard one
    expert.
    """
    enable_full_shard: bool = field(True, Resume.LAYOUT, FSDP2)
    """FSDP2: shard parameters too (ZeRO-3); false: ZeRO-2."""
    enable_forward_prefetch: bool = field(True, Resume.LAYOUT, FSDP2)
    """FSDP2: gather the next unit during the forward pass."""

    @property
    def reshard(self) -> bool:
        """FSDP2's reshard_after_forward: ZeRO-3 if true, ZeRO-2 if false."""
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        # The schedule keeps parameters gathered from micro-batch to micro-batch.
        return self.enable_full_shard and self.pipeline_parallel_size == 1

    @property
    def context_parallel_size(self) -> int:
        """Number of processes that share a sequence."""
        return self.ringattn_parallel_size * self.ulysses_parallel_size


def of_layouts(train: Parallel, optim: Optim) -> Iterator[Stated]:
    """Sizes are those of a mesh, and the optimizer can train its shards."""
    for name in ("data_parallel_shard_size", "data_parallel_replicate_size"):
        size = getattr(train, name)
        yield size < 1 and size != -1, "must be -1, or 1 or more", name
    sharded = train.data_parallel_mode == "fsdp2"
    why = OPTIMIZERS[optim.optimizer].needs_whole
    yield sharded, why, "train.optimizer", "train.data_parallel_mode"
    alone = train.cp_fsdp_mode != "all" and train.context_parallel_size == 1
    sizes = "ringattn_parallel_size", "ulysses_parallel_size"
    yield alone, "no sequence is spread", "cp_fsdp_mode", *sizes


class Compute(Parallel):
    """Precision, memory and speed of a process."""

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
        Needs(
            "enable_reentrant",
            [False],
            "the experts' activations are recomputed without reentering the backward",
        ),
    )
    """null: recompute experts with their layer, communication too; moe_act: activations only."""
    enable_activation_offload: bool = field(False, Resume.COST)
    """Keep what layers save for backward in CPU memory until the backward pass."""
    activation_gpu_limit: float = field(
        0.0, Resume.COST, Needs("enable_activation_offload", [True], "nothing is offloaded"), ge=0
    )
    """GB (10^9 bytes) of it that stay on the GPU: the last layers'."""
    sparse_head: bool = field(False, Resume.ROUNDING)
    """Tokens without a label (prompts, padding) leave before the head: its products have as many
    rows as there are labels, rounded up to 128.
    """
    enable_compile: bool = field(False, Resume.ROUNDING)
    """torch.compile the layers."""
    init_device: Literal["auto", "cpu", "cuda", "meta", "npu"] = field(
        "auto",
        Resume.COST,
        Needs(
            "data_parallel_mode",
            why="fsdp2 builds the model on meta; leave it at auto",
            but="fsdp2",
            neutral=("meta", "npu"),
        ),
        Needs(
            "data_parallel_mode",
            ["fsdp2"],
            "only fsdp2 builds the model on meta; leave it at auto",
            neutral=("cpu", "cuda", "npu"),
        ),
        refused="no op and no process group here runs on NPUs",
        accepted=("auto", "cpu", "cuda", "meta"),
    )
    """Where the model is built; auto: meta for fsdp2, else cuda, or cpu where there is none. With
    lora.enable_qlora always meta.
    """
    load_weights_mode: Literal["broadcast", "all_ranks"] = field(
        "broadcast", Resume.COST, certified=False
    )
    """broadcast: rank 0 (of a pipeline, the first of each stage) reads the weights and sends them;
    all_ranks: each reads.
    """
    enable_full_determinism: bool = field(
        False,
        Resume.ROUNDING,
        Needs(
            "allow_cuda_launch_blocking",
            [True],
            "full determinism needs allow_cuda_launch_blocking: true",
        ),
    )
    """Deterministic algorithms only; slow."""
    allow_cuda_launch_blocking: bool = field(False, Resume.THIS_START)
    """Run although CUDA_LAUNCH_BLOCKING is set."""
    ignore_memory_plan: bool = field(False, Resume.THIS_START)
    """Start although the plan of memory does not fit into the device."""


def of_compute(
    compute: Compute, model: Model, preference: Preference, objective: Objective
) -> Iterator[Stated]:
    """It can be computed on this machine."""
    yield compute.sparse_head and scored(objective), NO_TOKENS, "sparse_head", "train.loss"
    modules = compute.recompute_modules
    apart = compute.moe_checkpoint_method and modules is not None and "mlp" not in modules
    why = "without mlp the experts are not recomputed"
    yield apart, why, "moe_checkpoint_method", "recompute_modules"
    no_cuda = platform.no_cuda()
    why = no_cuda and f"activations are in CPU memory already: {no_cuda}"
    yield compute.enable_activation_offload, why, "enable_activation_offload"
    yield compute.init_device == "cuda", no_cuda, "init_device"
    drawn = model.model_path is None and preference.reference_path is None
    all_read = compute.load_weights_mode == "all_ranks"
    why = "weights are drawn, not read"
    yield drawn and all_read, why, "load_weights_mode", "model.model_path"
    slow = platform.env_flag("CUDA_LAUNCH_BLOCKING") and not compute.allow_cuda_launch_blocking
    why = "CUDA_LAUNCH_BLOCKING is set, which slows training down; unset it"
    yield slow, why, "allow_cuda_launch_blocking"


class Batching(Parallel):
    """How many samples a step, and the run, take."""

    micro_batch_size: int = field(1, Resume.NEXT_STEP, ge=1)
    """Bins in a forward pass of a process, or of those that share a sequence."""
    gradient_accumulation_steps: int = field(1, Resume.NEXT_STEP, ge=1)
    """Forward passes before an optimizer step."""
    num_train_epochs: int = field(1, Resume.NEXT_STEP, ge=1, certified=False)
    """Passes over the data."""
    max_steps: int | None = field(None, Resume.NEXT_STEP, ge=1, certified=False)
    """Optimizer steps in all; overrides epochs."""
    seed: int = field(42, Resume.OTHER_ORDER, ge=0, lt=2**32)
    """Seed of weights and shuffling."""


def of_pipelines(train: Batching, objective: Objective, preference: Preference) -> Iterator[Stated]:
    """The schedule can run these stages and micro-batches here."""
    ranks, stages = train.pipeline_parallel_size, train.virtual_pipeline_size
    schedule, split = train.pipeline_parallel_schedule, train.pipeline_split
    mean = objective.loss == "preference" and PREFERENCES[preference.loss].kl
    yield (
        mean and ranks > 1,
        "a pipeline's log-ratios are on its last stage",
        "preference.loss",
        "train.pipeline_parallel_size",
    )
    named = "pipeline_parallel_schedule"
    yield ranks > 1 and schedule.endswith("ZeroBubble"), no_zero_bubble(), named
    why = "an interleaved schedule needs two or more stages on each process"
    few = ranks > 1 and stages == 1 and schedule.startswith("Interleaved")
    yield few, why, "virtual_pipeline_size", named
    other = ranks > 1 and stages != 2 and schedule == "ZBVZeroBubble"
    yield other, "ZBVZeroBubble needs two stages on each process", "virtual_pipeline_size", named
    sizes = "pipeline_parallel_size", "virtual_pipeline_size"
    why = f"needs a number for each stage, of which there are {' x '.join(sizes)}"
    yield split is not None and len(split) != ranks * stages, why, "pipeline_split", *sizes
    empty = split is not None and min(split) < 1
    yield empty, "a stage has one layer or more", "pipeline_split"
    steps = train.gradient_accumulation_steps
    why = too_few(schedule, steps, ranks)
    yield ranks > 1, why, "gradient_accumulation_steps", named, "pipeline_parallel_size"


class Width(Section):
    """How long bins are."""

    sample_packing_sequence_len: int = field(32000, Resume.OTHER_BINS, ge=2)
    """Tokens of a packed bin, at most."""
    pad_to_multiple_of: int = field(128, Resume.ROUNDING, ge=1)
    """Micro-batches are padded to a multiple of this many tokens; with context parallelism to the
    least common multiple of this and 2 x ring x Ulysses.
    """
