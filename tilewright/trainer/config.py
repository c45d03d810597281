"""The trainer's configuration: every field, what it means, and which values this version refuses.

A field that is accepted does what its description says. What cannot work is refused with one
sentence (`rules.py`), never ignored. Names, types and meanings follow xorl's local training
configuration; DIFFERENCES lists where a default or a meaning departs from it, and why.
`overrides.py` reads files and command lines.

    python -m tilewright.trainer.config check config.yaml --train.lr 2e-5   # the resolved YAML, or
    the errors python -m tilewright.trainer.config docs docs/configuration.md          # writes the
    reference
"""

from __future__ import annotations

if __name__ == "__main__":
    from tilewright.platform import require

    require("trainer")  # else the imports below end in a traceback

import sys
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from tilewright import platform
from tilewright.trainer import overrides as reading
from tilewright.trainer.overrides import ConfigError
from tilewright.trainer.rules import ACCEPTED, REFUSED, problems

__all__ = [
    "Config",
    "ConfigError",
    "Data",
    "Dataset",
    "Lora",
    "Model",
    "Train",
    "from_command_line",
    "load",
    "resolved",
]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python's True is an int: `micro_batch_size: true` would mean 1."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("a boolean does not fit here")
        return value

    @field_validator("*")
    @classmethod
    def _fits(cls, value: Any) -> Any:
        """Python's integers have no end; those of arrays and files do."""
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("does not fit in 64 bits")
        return value

    def _fill(self, **values: Any) -> None:
        # Only from validators, while the model is being built: afterwards it is frozen.
        for name, value in values.items():
            object.__setattr__(self, name, value)


def field(default: Any, description: str, **limits: Any) -> Any:
    return Field(default, description=description, **limits)


class Model(Section):
    model_path: str | None = field(None, "Folder (or Hub id) with weights; null: random weights.")
    config_path: str | None = field(
        None, "Folder with config.json, or the file; null: as model_path."
    )
    tokenizer_path: str | None = field(None, "Folder with the tokenizer; null: as config_path.")
    attn_implementation: str = field(
        "auto",
        "Attention: auto, eager, sdpa, native, triton, flash_attention_3 or flash_attention_4.",
    )
    moe_implementation: str | None = field(
        None, "Experts: null (automatic), or a name of `tilewright explain moe_mlp`."
    )
    ep_dispatch: Literal["alltoall", "deepep"] = field(
        "alltoall",
        "How tokens travel to their experts; deepep needs the package deep_ep, and is untested on "
        "GPUs.",
    )
    deepep_buffer_size_gb: float = field(2.0, "DeepEP's buffer per GPU, in GB.", gt=0)
    deepep_num_sms: int = field(
        20, "Streaming multiprocessors that DeepEP uses; an even number.", gt=0
    )
    deepep_async_combine: bool = field(False, "Overlap DeepEP's combine with the next layer.")
    merge_qkv: bool = field(True, "Keep the query, key and value projections as one qkv_proj.")
    router_fp32: bool = field(
        True, "Keep the router's logits in float32 rather than rounding them to bfloat16."
    )
    lm_head_fp32: bool = field(
        True, "Keep the head's logits in float32 rather than rounding them to bfloat16."
    )
    rmsnorm_native: bool = field(
        False, "PyTorch's F.rms_norm instead of the fused kernels, and x + residual by itself."
    )
    activation_native: bool = field(
        False,
        "F.silu(gate) * up, rounded in between, instead of the fused kernel; in layers without "
        "experts.",
    )
    rope_native: bool = field(False, "PyTorch's operators instead of the fused rotation.")
    attention_cast_bf16: bool = field(
        False,
        "Round queries and keys to bfloat16 after the rotation; in bfloat16 training they are "
        "that already.",
    )
    batch_invariant: bool = field(
        False,
        "A token's logits have the same bits whatever else is in the batch: implementations that "
        "claim it, "
        "matrix products of 128 rows at a time, and all logits of a batch in memory. Slower.",
    )
    basic_modules: list[str] = field(
        [], "Further module names to shard as FSDP units of their own."
    )
    foundation: dict[str, Any] = field({}, "Further configuration of a foundation model.")
    encoders: dict[str, Any] = field({}, "Multimodal encoders by kind (image, video, audio).")

    @model_validator(mode="after")
    def _paths(self) -> Model:
        self._fill(config_path=self.config_path or self.model_path)
        folder = self.config_path
        if folder is not None and folder.endswith(".json"):
            folder = folder.rpartition("/")[0] or "."
        self._fill(tokenizer_path=self.tokenizer_path or folder)
        return self


class Dataset(Section):
    path: str = field(
        ...,
        "File, folder, Hub id, s3://, gs://, abfs:// or https:// address (which need the extra s3, "
        "gs, abfs or http), or dummy.",
    )
    type: Literal["tokenized", "text"] = field(
        "tokenized",
        "tokenized: rows with input_ids and, if there, labels; text: tokenised on preparation.",
    )
    name: str | None = field(None, "Configuration (subset) of a Hub dataset.")
    split: str | None = field(
        None, "Split, such as train or train[:10%]; null: the only one. Files are one split, train."
    )
    revision: str | None = field(None, "Commit or tag of a Hub dataset.")
    trust_remote_code: bool = field(False, "Run a dataset's own code.")
    data_files: str | list[str] | None = field(
        None, "Files or patterns within path (a folder, Hub id or address); needs ds_type."
    )
    ds_type: Literal["json", "csv", "parquet", "arrow", "text"] | None = field(
        None, "Format of the files; null: by their suffix. Of a folder, only such files are read."
    )
    max_seq_len: int | None = field(
        None,
        "Tokens kept of a longer sample (tokenized), or tokens of a piece of a document (text).",
        ge=2,
    )
    shards: int | None = field(None, "Take one of this many parts of the dataset.", ge=1)
    shards_idx: int | None = field(None, "Which part, from 0.", ge=0)
    preprocess_shards: int | None = field(
        None, "Prepare in this many chunks, one after the other.", ge=1
    )


class Data(Section):
    datasets: list[Dataset] = field(..., "What to train on.", min_length=1)
    test_datasets: list[Dataset] = field([], "What to evaluate on.")
    dataset_prepared_path: str = field("last_prepared_dataset", "Folder for prepared datasets.")
    select_columns: list[str] | None = field(None, "Columns to read; null: those that type names.")
    sample_packing_method: Literal["sequential", "multipack"] = field(
        "sequential", "sequential: in order; multipack: first-fit decreasing within a group."
    )
    sample_packing_sequence_len: int = field(32000, "Tokens of a packed bin, at most.", ge=2)
    sample_packing_group_size: int = field(100000, "Samples that multipack packs together.", ge=1)
    sample_packing_sequentially: bool | None = field(None, "true: sequential whatever the method.")
    sample_packing_mp_start_method: Literal["fork", "spawn", "forkserver"] | None = field(
        None, "Start method of packing processes."
    )
    eval_sample_packing: bool | None = field(None, "false: one document a bin in evaluation.")
    dataloader_num_workers: int = field(0, "Worker processes that read batches; 0: none.", ge=0)
    dataloader_prefetch_factor: int | None = field(
        None, "Batches read ahead by each worker; null: 2 with workers.", ge=1
    )
    dataloader_pin_memory: bool = field(True, "Pin batches in memory where there is a CUDA device.")
    dataloader_drop_last: bool = field(
        True, "Drop the last incomplete global batch of an epoch; false: fill it with empty bins."
    )
    pad_to_multiple_of: int = field(
        128,
        "Micro-batches are padded to a multiple of this many tokens; with context parallelism to "
        "the least common "
        "multiple of this and 2 x ring x Ulysses.",
        ge=1,
    )
    val_set_size: int | float | None = field(
        None, "Held out of datasets for evaluation: a number of samples, or a fraction below 1."
    )
    shuffle_merged_datasets: bool = field(True, "Shuffle all samples, and the bins in every epoch.")
    shuffle_before_merging_datasets: bool = field(True, "Shuffle each dataset before merging.")
    dataset_num_proc: int | None = field(
        None, "Processes for preparation; null: this one alone.", ge=1
    )
    dataset_shard_num: int | None = field(
        None, "Take one of this many parts of every dataset.", ge=1
    )
    dataset_shard_idx: int | None = field(None, "Which of those parts, from 0.", ge=0)
    num_dataset_shards_to_save: int | None = field(
        None, "Files of a prepared dataset; null: one.", ge=1
    )
    skip_prepare_dataset: bool = field(False, "Load dataset_prepared_path as it is.")
    push_dataset_to_hub: str | None = field(
        None, "Push what was prepared to this Hub repository, privately."
    )
    hf_use_auth_token: bool | None = field(None, "Send the Hub token; null: if there is one.")

    @model_validator(mode="after")
    def _prefetch(self) -> Data:
        if self.dataloader_num_workers and self.dataloader_prefetch_factor is None:
            self._fill(dataloader_prefetch_factor=2)
        return self


class Train(Section):
    # parallelism
    data_parallel_mode: Literal["none", "ddp", "fsdp2"] = field(
        "fsdp2", "none: one process; ddp: replicas; fsdp2: sharded parameters."
    )
    data_parallel_shard_size: int = field(
        -1,
        "Processes of a shard group that read batches of their own; -1: all that remain. All "
        "processes are "
        "replicas x shards x ring x Ulysses.",
    )
    data_parallel_replicate_size: int = field(-1, "Replicas of shard groups (HSDP); -1: automatic.")
    tensor_parallel_size: int = field(1, "Tensor parallelism.", ge=1)
    pipeline_parallel_size: int = field(1, "Pipeline stages.", ge=1)
    pipeline_parallel_schedule: Literal["1F1B", "GPipe"] = field("1F1B", "Pipeline schedule.")
    pp_variable_seq_lengths: bool = field(True, "Agree on sequence lengths at each pipeline step.")
    expert_parallel_size: int = field(
        1,
        "Processes over which the experts of a layer are spread; divides those of a shard group.",
        ge=1,
    )
    ulysses_parallel_size: int = field(
        1,
        "Neighbouring processes that share each sequence and exchange tokens for heads in "
        "attention; divides the "
        "query heads.",
        ge=1,
    )
    ringattn_parallel_size: int = field(
        1,
        "Processes, or groups of those of Ulysses, that share each sequence and send keys and "
        "values.",
        ge=1,
    )
    cp_fsdp_mode: Literal["all", "ulysses_only", "ring_only", "none"] = field(
        "all",
        "Which processes that share a sequence also shard parameters; the others are replicas "
        "(HSDP).",
    )
    reshard_after_forward: bool | None = field(
        None, "Free gathered parameters after the forward pass; null: as enable_full_shard."
    )
    ep_outside: bool = field(
        False,
        "false: the processes that share a layer's experts are neighbours; true: those that shard "
        "one expert.",
    )
    # optimizer
    optimizer: Literal["adamw", "anyprecision_adamw", "sgd", "muon"] = field("adamw", "Optimizer.")
    optimizer_dtype: Literal["fp32", "bf16"] = field(
        "bf16",
        "Dtype of the states of anyprecision_adamw and muon; adamw's are of the parameters' dtype.",
    )
    lr: float = field(5e-5, "Peak learning rate.", gt=0)
    lr_min: float = field(1e-7, "Learning rate at the end of the decay.", ge=0)
    lr_start: float = field(0.0, "Learning rate at the start of the warmup.", ge=0)
    lr_warmup_ratio: float = field(0.0, "Fraction of all steps for the linear warmup.", ge=0, le=1)
    lr_decay_style: Literal["constant", "linear", "cosine"] = field("constant", "After the warmup.")
    lr_decay_ratio: float = field(
        1.0, "Fraction of all steps after which the decay has ended.", ge=0, le=1
    )
    weight_decay: float = field(0.0, "Decoupled weight decay (adamw), L2 term (sgd).", ge=0)
    no_decay_modules: list[str] = field(
        [], "No weight decay where a module's name contains one of these."
    )
    no_decay_params: list[str] = field(
        [], "No weight decay where a parameter's name contains one of these."
    )
    max_grad_norm: float = field(
        1.0, "Gradients are clipped to this global norm; 0: not clipped.", ge=0
    )
    muon_lr: float = field(0.02, "Muon: learning rate of matrices.", gt=0)
    muon_momentum: float = field(0.95, "Muon: momentum.", ge=0, lt=1)
    muon_nesterov: bool = field(True, "Muon: Nesterov momentum.")
    muon_ns_steps: int = field(5, "Muon: Newton-Schulz iterations.", ge=1)
    muon_adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = field(
        None, "Muon: scaling of lr."
    )
    # batches
    micro_batch_size: int = field(
        1, "Bins in a forward pass of a process, or of those that share a sequence.", ge=1
    )
    gradient_accumulation_steps: int = field(1, "Forward passes before an optimizer step.", ge=1)
    num_train_epochs: int = field(1, "Passes over the data.", ge=1)
    max_steps: int | None = field(None, "Optimizer steps in all; overrides epochs.", ge=1)
    # memory and speed
    enable_mixed_precision: bool = field(True, "Compute in bfloat16, keep parameters in float32.")
    enable_gradient_checkpointing: bool = field(True, "Recompute activations in the backward pass.")
    enable_reentrant: bool = field(False, "Reentrant checkpointing.")
    recompute_modules: list[Literal["self_attn", "mlp"]] | None = field(
        None, "Recompute only these in each layer; null: whole layers.", min_length=1
    )
    moe_checkpoint_method: Literal["moe_act"] | None = field(
        None,
        "null: experts are recomputed with their layer, communication too; moe_act: their "
        "activations alone.",
    )
    freeze_router: bool = field(False, "Keep the weights that choose experts as they are.")
    enable_full_shard: bool = field(True, "FSDP2: shard parameters too (ZeRO-3); false: ZeRO-2.")
    enable_forward_prefetch: bool = field(
        True, "FSDP2: gather the next unit during the forward pass."
    )
    enable_activation_offload: bool = field(False, "Keep activations in CPU memory.")
    activation_gpu_limit: float = field(0.0, "GB of activations that stay on the GPU.", ge=0)
    enable_compile: bool = field(False, "torch.compile the layers.")
    init_device: Literal["auto", "cpu", "cuda", "meta", "npu"] = field(
        "auto",
        "Where the model is built; auto: meta for fsdp2, else cuda, or cpu where there is none. "
        "With "
        "lora.enable_qlora always meta.",
    )
    load_weights_mode: Literal["broadcast", "all_ranks"] = field(
        "broadcast", "broadcast: rank 0 reads the weights and sends them; all_ranks: each reads."
    )
    enable_full_determinism: bool = field(False, "Deterministic algorithms only; slow.")
    allow_cuda_launch_blocking: bool = field(False, "Run although CUDA_LAUNCH_BLOCKING is set.")
    empty_cache_steps: int = field(
        500, "torch.cuda.empty_cache() every so many steps; 0: never.", ge=0
    )
    gc_steps: int = field(
        500, "Collect garbage every so many steps only; 0: when Python likes.", ge=0
    )
    # checkpoints
    output_dir: str = field(
        ..., "Folder for checkpoints, logs and the resolved configuration.", min_length=1
    )
    ckpt_manager: Literal["dcp"] = field("dcp", "dcp: torch.distributed.checkpoint.")
    save_steps: int = field(0, "Save every so many optimizer steps; 0: not by steps.", ge=0)
    save_epochs: float = field(
        1.0, "Save every so many epochs, fractions too; 0: not by epochs.", ge=0
    )
    save_async: bool = field(False, "Write checkpoints while training goes on.")
    save_hf_weights: bool = field(True, "Write Hugging Face safetensors with the last checkpoint.")
    load_checkpoint_path: str | None = field(
        None, "Checkpoint to resume from; auto: the latest, if any."
    )
    # logging
    log_format: Literal["progress_bar", "structured"] = field(
        "progress_bar", "progress_bar, or structured: key=value lines."
    )
    use_wandb: bool = field(False, "Log to Weights & Biases.")
    wandb_project: str = field("tilewright", "W&B project.")
    wandb_name: str | None = field(None, "W&B run name.")
    wandb_tags: list[str] | None = field(None, "W&B tags.")
    wandb_log_interval: int = field(1, "Log to W&B every so many steps.", ge=1)
    # profiling
    enable_profiling: bool = field(False, "Run PyTorch's profiler.")
    profile_start_step: int = field(1, "First step that is profiled.", ge=0)
    profile_end_step: int = field(2, "Step at which profiling ends.", ge=1)
    profile_trace_dir: str = field("./trace", "Folder for traces.")
    profile_record_shapes: bool = field(True, "Record input shapes.")
    profile_profile_memory: bool = field(True, "Record memory.")
    profile_with_stack: bool = field(True, "Record Python stacks.")
    profile_rank0_only: bool = field(True, "Profile rank 0 only; false: every rank.")
    seed: int = field(42, "Seed of weights and shuffling.", ge=0, lt=2**32)

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
            self.enable_full_shard
            if self.reshard_after_forward is None
            else self.reshard_after_forward
        )

    @property
    def context_parallel_size(self) -> int:
        """Processes that share a sequence."""
        return self.ringattn_parallel_size * self.ulysses_parallel_size

    def data_mesh(self, world_size: int) -> tuple[int, int]:
        """(replicas, shards) of data parallelism: times the processes that share a sequence they
        make world_size. Raises ConfigError if the sizes do not fit.
        """
        if self.data_parallel_mode == "none" and world_size > 1:
            raise ConfigError(
                [
                    f"train.data_parallel_mode = none: trains one process, but {world_size} were "
                    f"started"
                ]
            )
        if self.data_parallel_mode != "fsdp2":
            return world_size, 1
        replicas, shards = self.data_parallel_replicate_size, self.data_parallel_shard_size
        data, rest = divmod(world_size, self.context_parallel_size)
        if rest:
            raise ConfigError(
                [
                    f"train.ringattn_parallel_size = {self.ringattn_parallel_size}, "
                    f"train.ulysses_parallel_size = {self.ulysses_parallel_size}: {world_size} "
                    f"processes do "
                    f"not divide by {self.context_parallel_size}"
                ]
            )
        if shards == -1:
            shards = data // max(1, replicas)
        if replicas == -1:
            replicas = data // max(1, shards)
        if replicas * shards != data:
            spread = (
                f" of {self.context_parallel_size} for each sequence"
                if self.context_parallel_size > 1
                else ""
            )
            raise ConfigError(
                [
                    f"train.data_parallel_shard_size = {self.data_parallel_shard_size}, "
                    f"train.data_parallel_replicate_size = {self.data_parallel_replicate_size}: "
                    f"do not make {world_size} processes{spread}"
                ]
            )
        return replicas, shards

    def mesh(self, world_size: int) -> tuple[int, int]:
        """(replicas, shards) of parameters, whose product is world_size: processes that share a
        sequence are one or the other, as cp_fsdp_mode says. Raises ConfigError if the sizes do not
        fit.
        """
        replicas, shards = self.data_mesh(world_size)
        for mode, size in (
            ("ulysses_only", self.ulysses_parallel_size),
            ("ring_only", self.ringattn_parallel_size),
        ):
            if self.cp_fsdp_mode in ("all", mode):
                shards *= size
            else:
                replicas *= size
        if self.data_parallel_mode == "fsdp2" and shards % self.expert_parallel_size:
            raise ConfigError(
                [
                    f"train.expert_parallel_size = {self.expert_parallel_size}: does not divide "
                    f"the "
                    f"{shards} processes of a shard group"
                ]
            )
        return replicas, shards


class Lora(Section):
    enable_lora: bool = field(
        False, "Train low-rank adapters on projections of the decoder layers; all else is frozen."
    )
    lora_rank: int = field(16, "Rank of the adapters.", ge=1)
    lora_alpha: float = field(16, "Scale; the adapters are scaled by alpha / rank.", gt=0)
    lora_target_modules: list[str] | None = field(
        None,
        "Projections with adapters: names in their paths, or with * patterns of them; null: all.",
        min_length=1,
    )
    save_lora_only: bool = field(
        False,
        "true: write the adapters as peft reads them; false: dense weights with the adapters "
        "merged.",
    )
    enable_qlora: bool = field(
        False,
        "Quantise the projections, layer by layer as they are read; every process has them all. "
        "Implies "
        "enable_lora.",
    )
    quant_format: Literal["nvfp4", "block_fp8", "nf4"] = field(
        "nvfp4", "Quantised format; of a checkpoint that is quantised already, its own."
    )
    quant_group_size: int = field(
        16,
        "Elements that share a scale: 16 for nvfp4; edge of the square blocks of block_fp8, 1 to "
        "128; "
        "32 to 4096, a power of two, for nf4.",
        ge=1,
    )
    exclude_modules: list[str] | None = field(
        None,
        "Modules that are not quantised; null: those that a quantised checkpoint's configuration "
        "names.",
    )
    merge_lora_interval: int = field(
        0,
        "Merge adapters into the weights, which are quantised again, every so many steps; 0: "
        "never.",
        ge=0,
    )
    reset_optimizer_on_merge: bool = field(False, "Forget optimizer states at each merge.")
    enable_aqn: bool = field(
        False, "Adaptive quantisation noise on quantised weights, in training only."
    )
    aqn_alpha: float = field(
        1.0, "Scale of that noise, in units of the local quantisation step.", ge=0
    )

    @model_validator(mode="after")
    def _implied(self) -> Lora:
        if self.enable_qlora and "enable_lora" not in self.model_fields_set:
            self._fill(enable_lora=True)
        return self


class Config(Section):
    model: Model = field(Model(), "What is trained.")
    data: Data = field(..., "On what.")
    train: Train = field(..., "How.")
    lora: Lora = field(Lora(), "Adapters.")

    @model_validator(mode="after")
    def _rules(self, info: ValidationInfo) -> Config:
        found = list(problems(self))
        if isinstance(info.context, list):  # `load` reports them together with every other error
            info.context.extend(found)
        elif found:
            raise ValueError("\n".join(p.line(self) for p in found))
        return self


def load(path: str | None, overrides: list[str] | None = None) -> Config:
    """The configuration in a YAML file, changed by `--section.field value` (or `=value`) arguments.

    Raises ConfigError with every misspelt key, wrong type, refused value and contradiction, one
    line each.
    """
    return reading.build(Config, path, overrides or [], ELSEWHERE)


def resolved(config: Config) -> str:
    """Every field with its value, as YAML. Loading it gives the same configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def from_command_line(
    argv: list[str] | None = None, program: str = "python -m tilewright.trainer.train"
) -> Config:
    """`config.yaml [--section.field value ...]`. Prints all errors and exits with 2, or prints
    the help and exits.
    """
    argv = sys.argv[1:] if argv is None else argv
    if not argv or {"-h", "--help"} & set(argv):
        print(
            f"usage: {program} config.yaml [--section.field value "
            f"...]\n\n{reading.help_text(Config, NOTES)}"
        )
        sys.exit(0 if argv else 2)
    path = None if argv[0].startswith("--") else argv[0]
    try:
        return load(path, argv[1 if path else 0 :])
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


NOTES = {
    path: (" or ".join(ACCEPTED.get(path, ["the default"])), why) for path, why in REFUSED.items()
}

# field -> the default or meaning in xorl's documentation, and why it is different here. `docs`
# prints it.
DIFFERENCES: dict[str, tuple[str, str]] = {
    "model.attn_implementation": (
        "flash_attention_3",
        "needs one kind of GPU; auto takes the best that runs here",
    ),
    "model.moe_implementation": (
        "eager, triton, native, quack",
        "the same, and cpp, which runs on CPUs",
    ),
    **dict.fromkeys(
        (
            "model.router_fp32",
            "model.lm_head_fp32",
            "model.rmsnorm_native",
            "model.activation_native",
            "model.rope_native",
            "model.attention_cast_bf16",
        ),
        ("of its server's configuration", "a trained model can be as its server computes it"),
    ),
    "model.batch_invariant": (
        "none",
        "ours: for numbers that do not depend on how a batch was made up",
    ),
    "model.deepep_async_combine": (
        "false",
        "the next operation reads the result, so nothing could overlap",
    ),
    "train.expert_parallel_size": (
        "1",
        "the same; it divides the processes of a shard group, and needs fsdp2",
    ),
    "train.data_parallel_shard_size": (
        "the world's size",
        "-1 is what remains of the processes after replicas, ring and Ulysses",
    ),
    "train.cp_fsdp_mode": (
        "how context parallelism interacts with FSDP",
        "the same, in full: ranks that do not shard are replicas",
    ),
    "data.pad_to_multiple_of": (
        "128",
        "the same; with context parallelism the least common multiple of it and 2 x ring x Ulysses",
    ),
    "train.ep_outside": (
        "place it outside the EP-FSDP mesh",
        "the same: the outer dimension of a shard group",
    ),
    "data.datasets.type": (
        "tokenized only",
        "text is ours: raw text, tokenised on preparation with tokenizer_path",
    ),
    "data.datasets.max_seq_len": (
        "truncate and filter",
        "samples are truncated, with a count in the log",
    ),
    "data.dataloader_num_workers": (
        "8",
        "batches are slices of a memory-mapped file; processes cost memory",
    ),
    "data.dataloader_prefetch_factor": (
        "2",
        "it must be null without workers; 2 with them, as there",
    ),
    "data.dataset_shard_num": (
        "splits the merged dataset",
        "splits each one first: the rest is not prepared",
    ),
    "data.dataset_num_proc": (
        "XORL_DATASET_NUM_PROC, or the processors",
        "starting some takes longer than small data",
    ),
    "data.sample_packing_mp_start_method": (
        "a start method",
        "packing takes seconds in one process",
    ),
    "train.init_device": (
        "cuda",
        "fsdp2, the default, needs meta; auto takes the device that fits",
    ),
    "train.enable_mixed_precision": (
        "BF16",
        "the same; stated in full: parameters and optimizer states stay float32",
    ),
    "train.save_epochs": ("1", "the same; 0 switches it off, for runs that are counted in steps"),
    "train.empty_cache_steps": ("500", "the same; 0 switches it off"),
    "train.gc_steps": ("500", "the same; 0 leaves garbage collection to Python"),
    "train.use_wandb": ("true", "needs an account and a network: opt in"),
    "lora.quant_group_size": (
        "16 for nvfp4, 128 for block_fp8, 64 for nf4 recommended",
        "the same; a size that a format does not have is refused",
    ),
    "lora.exclude_modules": (
        "kept as bfloat16",
        "kept as other weights are: float32, computed in bfloat16",
    ),
    "lora.merge_lora_interval": (
        "with an EMA of NVFP4's largest magnitude",
        "with that of the merged weight",
    ),
    "lora.enable_aqn": (
        "new noise in each forward pass",
        "one noise a step, made again where activations are: forward and backward see the same",
    ),
    "train.wandb_project": ("Xorl", "the project's own name"),
}


# Names of transformers' TrainingArguments, TRL and peft that are too unlike the field's -> the
# field.
ELSEWHERE = {
    "learning_rate": "train.lr",
    "lr_scheduler_type": "train.lr_decay_style",
    "warmup_steps": "train.lr_warmup_ratio",
    "optim": "train.optimizer",
    "per_device_train_batch_size": "train.micro_batch_size",
    "epochs": "train.num_train_epochs",
    "bf16": "train.enable_mixed_precision",
    "torch_compile": "train.enable_compile",
    "fsdp": "train.data_parallel_mode",
    "ddp": "train.data_parallel_mode",
    "resume_from_checkpoint": "train.load_checkpoint_path",
    "report_to": "train.use_wandb",
    "run_name": "train.wandb_name",
    "tokenizer_name": "model.tokenizer_path",
    "train_file": "data.datasets",
    "validation_file": "data.test_datasets",
    "max_length": "data.sample_packing_sequence_len",
    "max_seq_length": "data.sample_packing_sequence_len",
    "packing": "data.sample_packing_method",
    "preprocessing_num_workers": "data.dataset_num_proc",
    "r": "lora.lora_rank",
    "lora_r": "lora.lora_rank",
    "load_in_4bit": "lora.enable_qlora",
}


TITLE = """
# Configuration

Written by `python -m tilewright.trainer.config docs docs/configuration.md` from the fields in
`tilewright/trainer/config.py`. A configuration is a YAML file with the sections `model`, `data`, `train` and `lora`,
then any number of `--section.field value` or `--section.field=value` (hyphens and underscores are the same; lists and
mappings as JSON). All errors are reported at once, and the command ends with exit code 2. The resolved configuration
is written to `train.output_dir`; `python -m tilewright.trainer.config check config.yaml` prints it.
"""


@platform.command
def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["docs"] and len(argv) == 2:
        with open(argv[1], "w", encoding="utf-8") as file:
            file.write(reading.markdown(Config, TITLE, NOTES, DIFFERENCES))
        return 0
    if argv[:1] == ["check"]:
        print(
            resolved(from_command_line(argv[1:], "python -m tilewright.trainer.config check")),
            end="",
        )
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
