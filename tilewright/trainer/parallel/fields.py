"""What layouts read of a configuration: the mesh, how layers are computed, the sizes of steps."""

from __future__ import annotations

from typing import Any, Literal

from tilewright.core import platform
from tilewright.core.torch_names import no_zero_bubble
from tilewright.trainer.options import wrong_options
from tilewright.trainer.parallel.row import LAYOUTS
from tilewright.trainer.section import Accepts, Only, Refuse, Resume, Section, field

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


def _few(config: Any) -> str | None:
    t = config.train
    return too_few(
        t.pipeline_parallel_schedule, t.gradient_accumulation_steps, t.pipeline_parallel_size
    )


def _splits_otherwise(config: Any) -> bool:
    t = config.train
    stages = t.pipeline_parallel_size * t.virtual_pipeline_size
    return t.pipeline_split is not None and len(t.pipeline_split) != stages


def _wrong_layouts(config: Any) -> str | None:
    known = [name for name in LAYOUTS.names() if LAYOUTS[name].options is not None]
    for name, given in config.train.layout_args.items():
        if name not in known:
            return f"{name} is no layout with options; accepted: {', '.join(known) or 'none'}"
        if wrong := wrong_options(LAYOUTS[name].options, given, f"layout {name}"):
            return wrong
    return None


class Parallel(Section):
    """Processes, and what each of them holds."""

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


class Batching(Parallel):
    """How many samples a step, and the run, take."""

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
    seed: int = field(42, Resume.OTHER_ORDER, ge=0, lt=2**32)
    """Seed of weights and shuffling."""


class Width(Section):
    """How long bins are."""

    sample_packing_sequence_len: int = field(32000, Resume.OTHER_BINS, ge=2)
    """Tokens of a packed bin, at most."""
    pad_to_multiple_of: int = field(128, Resume.ROUNDING, ge=1)
    """Micro-batches are padded to a multiple of this many tokens; with context parallelism to the
    least common multiple of this and 2 x ring x Ulysses.
    """
