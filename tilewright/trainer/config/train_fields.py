"""The fields of the section train."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import field_validator, model_validator

from tilewright.core import platform
from tilewright.trainer.config.section import (
    COST,
    LAYOUT,
    NEXT_STEP,
    OTHER_CONTENTS,
    OTHER_ORDER,
    OTHER_STATES,
    OUTPUT,
    PLACE,
    ROUNDING,
    THIS_START,
    RowOf,
    Section,
    field,
)
from tilewright.trainer.tables import CALLBACKS, LOSSES, OPTIMIZERS, SCHEDULES


class Train(Section):
    # parallelism
    data_parallel_mode: Literal["none", "ddp", "fsdp2"] = field(
        "fsdp2", "none: one process; ddp: replicas; fsdp2: sharded parameters.", LAYOUT
    )
    data_parallel_shard_size: int = field(
        -1,
        "Processes of a shard group that read batches of their own; -1: all that remain. All "
        "processes are stages x replicas x shards x ring x Ulysses x tensor-parallel.",
        LAYOUT,
    )
    data_parallel_replicate_size: int = field(
        -1, "Replicas of shard groups (HSDP); -1: automatic.", LAYOUT
    )
    tensor_parallel_size: int = field(
        1,
        "Neighboring processes that share the matrices of each layer, and between layers each "
        "sequence; divides the MLP's width and the vocabulary. Where it does not divide the heads, "
        "each computes attention whole.",
        LAYOUT,
        ge=1,
    )
    pipeline_parallel_size: int = field(
        1, "Processes over which the layers are spread, as stages of a pipeline.", LAYOUT, ge=1
    )
    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = field(
        "1F1B",
        "The order in which stages run micro-batches, of which there are "
        "gradient_accumulation_steps.",
        LAYOUT,
    )
    virtual_pipeline_size: int = field(1, "Stages of each process.", LAYOUT, ge=1)
    pipeline_split: list[int] | None = field(
        None,
        "Numbers of layers of the stages, in order; null: such that the stage with the most "
        "parameters has the fewest, with embedding and head.",
        LAYOUT,
        min_length=2,
    )
    pp_variable_seq_lengths: bool = field(
        True,
        "Stages exchange hidden states as long as the longest micro-batch of each step, rounded up "
        "to an eighth of a full one; false: always as long as a full one.",
        LAYOUT,
    )
    expert_parallel_size: int = field(
        1,
        "Processes over which the experts of a layer are spread; divides those of a shard group.",
        LAYOUT,
        ge=1,
    )
    ulysses_parallel_size: int = field(
        1,
        "Neighboring processes that share each sequence and exchange tokens for heads in "
        "attention; divides the query heads.",
        LAYOUT,
        ge=1,
    )
    ringattn_parallel_size: int = field(
        1,
        "Processes, or groups of those of Ulysses, that share each sequence and send keys and "
        "values.",
        LAYOUT,
        ge=1,
    )
    cp_fsdp_mode: Literal["all", "ulysses_only", "ring_only", "none"] = field(
        "all",
        "Which processes that share a sequence also shard parameters; the others are replicas "
        "(HSDP).",
        LAYOUT,
    )
    reshard_after_forward: bool | None = field(
        None,
        "Free gathered parameters after the forward pass; null: as enable_full_shard, and false "
        "with pipeline stages.",
        LAYOUT,
    )
    ep_outside: bool = field(
        False,
        "false: the processes that share a layer's experts are neighbors; true: those that shard "
        "one expert.",
        LAYOUT,
    )
    loss: Annotated[str, RowOf(LOSSES)] = field(
        "language_modeling",
        "What is minimized; language_modeling: the cross-entropy of the labels.",
        NEXT_STEP,
    )
    # optimizer
    optimizer: Annotated[str, RowOf(OPTIMIZERS)] = field("adamw", "Optimizer.", OTHER_STATES)
    optimizer_args: dict[str, Any] = field(
        {}, "Options of an optimizer that has no fields here, by name.", NEXT_STEP
    )
    optimizer_dtype: Literal["fp32", "bf16"] = field(
        "bf16",
        "Dtype of the states of anyprecision_adamw and muon; adamw's are of the parameters' dtype.",
        OTHER_STATES,
    )
    adam_beta1: float = field(0.9, "AdamW: decay of the first moment.", NEXT_STEP, ge=0, lt=1)
    adam_beta2: float = field(0.95, "AdamW: decay of the second moment.", NEXT_STEP, ge=0, lt=1)
    adam_epsilon: float = field(
        1e-8, "AdamW: added to the root of the second moment.", NEXT_STEP, gt=0
    )
    lr: float = field(5e-5, "Peak learning rate.", NEXT_STEP, gt=0)
    lr_min: float = field(1e-7, "Learning rate at the end of the decay.", NEXT_STEP, ge=0)
    lr_start: float = field(0.0, "Learning rate at the start of the warmup.", NEXT_STEP, ge=0)
    lr_warmup_ratio: float = field(
        0.0, "Fraction of all steps for the linear warmup.", NEXT_STEP, ge=0, le=1
    )
    lr_decay_style: Annotated[str, RowOf(SCHEDULES)] = field(
        "constant", "After the warmup.", NEXT_STEP
    )
    lr_decay_ratio: float = field(
        1.0, "Fraction of all steps after which the decay has ended.", NEXT_STEP, ge=0, le=1
    )
    weight_decay: float = field(
        0.0, "Decoupled weight decay (adamw), L2 term (sgd).", NEXT_STEP, ge=0
    )
    no_decay_modules: list[str] = field(
        [],
        "No weight decay where the path of a parameter's module contains one of these.",
        OTHER_STATES,
    )
    no_decay_params: list[str] = field(
        [],
        "No weight decay where a parameter's full name (model.layers.0.input_layernorm.weight) "
        "contains one of these.",
        OTHER_STATES,
    )
    max_grad_norm: float = field(
        1.0, "Gradients are clipped to this global norm; 0: not clipped.", NEXT_STEP, ge=0
    )
    muon_lr: float = field(
        0.02,
        "Muon: peak learning rate of hidden matrices; all else is trained by AdamW.",
        NEXT_STEP,
        gt=0,
    )
    muon_momentum: float = field(0.95, "Muon: momentum.", NEXT_STEP, ge=0, lt=1)
    muon_nesterov: bool = field(True, "Muon: Nesterov momentum.", NEXT_STEP)
    muon_ns_steps: int = field(5, "Muon: Newton-Schulz iterations.", NEXT_STEP, ge=1)
    muon_ns_coefficients: Literal["quintic", "polar_express"] = field(
        "quintic", "Muon: polynomials of the iterations; see newton_schulz.", NEXT_STEP
    )
    muon_adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = field(
        None,
        "Muon: scaling of lr for an A x B matrix. original, or null: sqrt(max(1, A / B)); "
        "match_rms_adamw: 0.2 sqrt(max(A, B)), for lr and weight decay as AdamW's.",
        NEXT_STEP,
    )
    # batches
    micro_batch_size: int = field(
        1,
        "Bins in a forward pass of a process, or of those that share a sequence.",
        NEXT_STEP,
        ge=1,
    )
    gradient_accumulation_steps: int = field(
        1, "Forward passes before an optimizer step.", NEXT_STEP, ge=1
    )
    num_train_epochs: int = field(1, "Passes over the data.", NEXT_STEP, ge=1)
    max_steps: int | None = field(
        None, "Optimizer steps in all; overrides epochs.", NEXT_STEP, ge=1
    )
    # memory and speed
    enable_mixed_precision: bool = field(
        True, "Compute in bfloat16, keep parameters in float32.", ROUNDING
    )
    enable_gradient_checkpointing: bool = field(
        True, "Recompute activations in the backward pass.", COST
    )
    enable_reentrant: bool = field(False, "Reentrant checkpointing.", COST)
    recompute_modules: list[Literal["self_attn", "mlp"]] | None = field(
        None, "Recompute only these in each layer; null: whole layers.", COST, min_length=1
    )
    moe_checkpoint_method: Literal["moe_act"] | None = field(
        None,
        "null: experts are recomputed with their layer, communication too; moe_act: their "
        "activations alone.",
        COST,
    )
    router_replay: bool = field(
        False,
        "Send tokens to the experts that an inference engine recorded, in the column "
        "routed_experts of tokenized data.",
        OTHER_CONTENTS,
    )
    router_replay_compare_steps: int = field(
        0,
        "Every so many steps, report the log-probabilities of tokens with recorded and with today's "
        "experts, which takes two more forward passes; 0: never.",
        OUTPUT,
        ge=0,
    )
    freeze_router: bool = field(
        False, "Keep the weights that choose experts as they are.", OTHER_STATES
    )
    enable_full_shard: bool = field(
        True, "FSDP2: shard parameters too (ZeRO-3); false: ZeRO-2.", LAYOUT
    )
    enable_forward_prefetch: bool = field(
        True, "FSDP2: gather the next unit during the forward pass.", LAYOUT
    )
    enable_activation_offload: bool = field(
        False, "Keep what layers save for backward in CPU memory until the backward pass.", COST
    )
    activation_gpu_limit: float = field(
        0.0, "GB (10^9 bytes) of it that stay on the GPU: the last layers'.", COST, ge=0
    )
    enable_compile: bool = field(False, "torch.compile the layers.", ROUNDING)
    init_device: Literal["auto", "cpu", "cuda", "meta", "npu"] = field(
        "auto",
        "Where the model is built; auto: meta for fsdp2, else cuda, or cpu where there is none. "
        "With lora.enable_qlora always meta.",
        COST,
    )
    load_weights_mode: Literal["broadcast", "all_ranks"] = field(
        "broadcast",
        "broadcast: rank 0 (of a pipeline, the first of each stage) reads the weights and sends them; "
        "all_ranks: each reads.",
        COST,
    )
    enable_full_determinism: bool = field(False, "Deterministic algorithms only; slow.", ROUNDING)
    allow_cuda_launch_blocking: bool = field(
        False, "Run although CUDA_LAUNCH_BLOCKING is set.", THIS_START
    )
    ignore_memory_plan: bool = field(
        False, "Start although the plan of memory does not fit into the device.", THIS_START
    )
    empty_cache_steps: int = field(
        500, "torch.cuda.empty_cache() every so many steps; 0: never.", COST, ge=0
    )
    gc_steps: int = field(
        500, "Collect garbage every so many steps only; 0: when Python likes.", COST, ge=0
    )
    # checkpoints
    output_dir: str = field(
        ..., "Folder for checkpoints, logs and the resolved configuration.", PLACE, min_length=1
    )
    ckpt_manager: Literal["dcp", "torch"] = field(
        "dcp", "The format of checkpoints: dcp (torch.distributed.checkpoint).", OUTPUT
    )
    save_steps: int = field(0, "Save every so many optimizer steps; 0: not by steps.", OUTPUT, ge=0)
    save_epochs: float = field(
        1.0, "Save every so many epochs, fractions too; 0: not by epochs.", OUTPUT, ge=0
    )
    save_async: bool = field(False, "Write checkpoints while training goes on.", OUTPUT)
    save_total_limit: int | None = field(
        None,
        "Checkpoints that stay in output_dir, the last ones written; null or 0: all.",
        OUTPUT,
        ge=0,
    )
    save_hf_weights: bool = field(
        True, "Write Hugging Face safetensors with the last checkpoint.", OUTPUT
    )
    load_checkpoint_path: str | None = field(
        None,
        "Checkpoint to resume from: its folder; auto: the last complete one in output_dir, if any; "
        '"" or null: none.',
        THIS_START,
    )
    verify_checkpoint: bool = field(
        True,
        "Compare the checksums of all files of a checkpoint that is loaded.",
        THIS_START,
    )
    allow_other_base: bool = field(
        False,
        "Resume although model.model_path holds other weights than those the run began from. "
        "Adapters go on with these, unless merges have changed the former ones.",
        THIS_START,
    )
    # logging
    log_format: Literal["progress_bar", "structured"] = field(
        "progress_bar", "progress_bar, or structured: key=value lines.", OUTPUT
    )
    use_wandb: bool = field(False, "Log to Weights & Biases.", OUTPUT)
    wandb_project: str = field("tilewright", "W&B project.", OUTPUT)
    wandb_name: str | None = field(None, "W&B run name.", OUTPUT)
    wandb_tags: list[str] | None = field(None, "W&B tags.", OUTPUT)
    wandb_log_interval: int = field(1, "Log to W&B every so many steps.", OUTPUT, ge=1)
    use_tensorboard: bool = field(
        False, "Log to TensorBoard: event files in output_dir/tensorboard.", OUTPUT
    )
    plot_loss: bool = field(
        False, "Draw output_dir/loss.png at the end: the loss of training and evaluation.", OUTPUT
    )
    callbacks: list[Annotated[str, RowOf(CALLBACKS)]] = field(
        [], "Callbacks beside those that other fields ask for.", NEXT_STEP
    )
    # determinism
    checksum_steps: int = field(
        0,
        "Write checksums of modules' outputs, gradients and trained weights to checksums.jsonl every "
        "so many steps; 0: never.",
        OUTPUT,
        ge=0,
    )
    assert_deterministic: str | None = field(
        None,
        "An earlier run, by its output_dir or a file in it: refuse to start where the certificates "
        "differ, or ranks do, and end at the first step that is not the same bit for bit.",
        THIS_START,
        min_length=1,
    )
    # profiling
    enable_profiling: bool = field(False, "Run PyTorch's profiler.", OUTPUT)
    profile_start_step: int = field(1, "First step that is profiled.", OUTPUT, ge=0)
    profile_end_step: int = field(2, "Step at which profiling ends.", OUTPUT, ge=1)
    profile_trace_dir: str = field("./trace", "Folder for traces.", OUTPUT)
    profile_record_shapes: bool = field(True, "Record input shapes.", OUTPUT)
    profile_profile_memory: bool = field(True, "Record memory.", OUTPUT)
    profile_with_stack: bool = field(True, "Record Python stacks.", OUTPUT)
    profile_rank0_only: bool = field(True, "Profile rank 0 only; false: every rank.", OUTPUT)
    seed: int = field(42, "Seed of weights and shuffling.", OTHER_ORDER, ge=0, lt=2**32)

    @field_validator("load_checkpoint_path")
    @classmethod
    def _empty_is_none(cls, value: str | None) -> str | None:
        return value or None

    @model_validator(mode="after")
    def _device(self) -> Train:
        if self.init_device == "auto":
            here = "cpu" if platform.no_cuda() else "cuda"
            self._fill(init_device="meta" if self.data_parallel_mode == "fsdp2" else here)
        return self

    @property
    def reshard(self) -> bool:
        """FSDP2's reshard_after_forward: ZeRO-3 if true, ZeRO-2 if false."""
        return (
            # The schedule keeps parameters gathered from micro-batch to micro-batch.
            self.enable_full_shard and self.pipeline_parallel_size == 1
            if self.reshard_after_forward is None
            else self.reshard_after_forward
        )

    @property
    def context_parallel_size(self) -> int:
        """Number of processes that share a sequence."""
        return self.ringattn_parallel_size * self.ulysses_parallel_size
