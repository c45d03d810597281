"""The trainer's configuration: every field, what it means, and which values this version refuses.

A field that is accepted does what its description says. What cannot work is refused with one sentence (REFUSED and
`problems`), never ignored. Names, types and meanings follow xorl's local training configuration; DIFFERENCES lists
where a default or a meaning departs from it, and why. Reading files and command lines is in `overrides.py`.

    python -m tilewright.trainer.config check config.yaml --train.lr 2e-5     # prints the resolved YAML, or the errors
    python -m tilewright.trainer.config docs docs/configuration.md            # writes the reference
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from tilewright import platform
from tilewright.trainer import overrides as reading
from tilewright.trainer.overrides import ConfigError

__all__ = ["Config", "ConfigError", "Data", "DatasetEntry", "Lora", "Model", "Train", "from_command_line", "load",
           "resolved", "to_yaml"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False,
                              coerce_numbers_to_str=True, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python's True is an int: `micro_batch_size: true` would mean 1."""
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("a boolean does not fit here")
        return value

    def _fill(self, **values: Any) -> None:
        # Only from validators, while the model is being built: afterwards it is frozen.
        for name, value in values.items():
            object.__setattr__(self, name, value)


class Model(Section):
    model_path: str | None = Field(None, description="Folder (or Hub id) with weights; null: random weights.")
    config_path: str | None = Field(None, description="Folder with config.json, or the file; null: as model_path.")
    tokenizer_path: str | None = Field(None, description="Folder with the tokenizer; null: as config_path.")
    attn_implementation: str = Field("auto", description="Attention: auto, or a name of `tilewright explain attention`.")
    moe_implementation: str | None = Field(None, description="Experts: null (automatic), or an implementation's name.")
    ep_dispatch: Literal["alltoall", "deepep"] = Field("alltoall", description="Expert-parallel dispatch.")
    deepep_buffer_size_gb: float = Field(2.0, gt=0, description="DeepEP's buffer per GPU, in GB.")
    deepep_num_sms: int = Field(20, gt=0, description="Streaming multiprocessors that DeepEP uses.")
    deepep_async_combine: bool = Field(False, description="Overlap DeepEP's combine with the next layer.")
    merge_qkv: bool = Field(True, description="Keep the query, key and value projections as one qkv_proj.")
    basic_modules: list[str] = Field([], description="Further module names to shard as FSDP units of their own.")
    foundation: dict[str, Any] = Field({}, description="Further configuration of a foundation model.")
    encoders: dict[str, Any] = Field({}, description="Multimodal encoders by kind (image, video, audio).")

    @model_validator(mode="after")
    def _paths(self) -> Model:
        self._fill(config_path=self.config_path or self.model_path)
        folder = self.config_path
        if folder is not None and folder.endswith(".json"):
            folder = folder.rpartition("/")[0] or "."
        self._fill(tokenizer_path=self.tokenizer_path or folder)
        return self


class DatasetEntry(Section):
    path: str = Field(description="File, folder, Hub id, s3://, gs://, abfs:// or https:// address, or dummy.")
    type: Literal["tokenized", "text"] = Field(
        "tokenized", description="tokenized: rows with input_ids and, if there, labels; text: tokenised on preparation.")
    name: str | None = Field(None, description="Configuration (subset) of a Hub dataset.")
    split: str | None = Field(None, description="Split, such as train or train[:10%]; null: the only one.")
    revision: str | None = Field(None, description="Commit or tag of a Hub dataset.")
    trust_remote_code: bool = Field(False, description="Run a dataset's own code.")
    data_files: str | list[str] | None = Field(None, description="Files or patterns within path; needs ds_type.")
    ds_type: Literal["json", "csv", "parquet", "arrow", "text"] | None = Field(
        None, description="Format of the files; null: by their suffix.")
    max_seq_len: int | None = Field(
        None, ge=2, description="Tokens kept of a longer sample (tokenized), or tokens of a piece of a document (text).")
    shards: int | None = Field(None, ge=1, description="Take one of this many parts of the dataset.")
    shards_idx: int | None = Field(None, ge=0, description="Which part, from 0.")
    preprocess_shards: int | None = Field(None, ge=1, description="Prepare in this many chunks, one after the other.")


class Data(Section):
    datasets: list[DatasetEntry] = Field(min_length=1, description="What to train on.")
    test_datasets: list[DatasetEntry] = Field([], description="What to evaluate on.")
    dataset_prepared_path: str = Field("last_prepared_dataset", description="Folder for prepared datasets.")
    select_columns: list[str] | None = Field(None, description="Columns to read; null: all.")
    sample_packing_method: Literal["sequential", "multipack"] = Field(
        "sequential", description="sequential: in order; multipack: first-fit decreasing within a group.")
    sample_packing_sequence_len: int = Field(32000, ge=2, description="Tokens of a packed bin, at most.")
    sample_packing_group_size: int = Field(100000, ge=1, description="Samples that multipack packs together.")
    sample_packing_sequentially: bool | None = Field(None, description="true: sequential whatever the method.")
    sample_packing_mp_start_method: Literal["fork", "spawn", "forkserver"] | None = Field(
        None, description="Start method of packing processes.")
    eval_sample_packing: bool | None = Field(None, description="false: one document a bin in evaluation.")
    dataloader_num_workers: int = Field(0, ge=0, description="Worker processes that read batches; 0: none.")
    dataloader_prefetch_factor: int | None = Field(
        None, ge=1, description="Batches read ahead by each worker; null: 2 with workers.")
    dataloader_pin_memory: bool = Field(True, description="Pin batches in memory where there is a CUDA device.")
    dataloader_drop_last: bool = Field(
        True, description="Drop the last incomplete global batch of an epoch; false: fill it with empty bins.")
    pad_to_multiple_of: int = Field(128, ge=1, description="Micro-batches are padded to a multiple of this many tokens.")
    val_set_size: int | float | None = Field(
        None, description="Held out of datasets for evaluation: a number of samples, or a fraction below 1.")
    shuffle_merged_datasets: bool = Field(True, description="Shuffle all samples, and the bins in every epoch.")
    shuffle_before_merging_datasets: bool = Field(True, description="Shuffle each dataset before merging.")
    dataset_num_proc: int | None = Field(None, ge=1, description="Processes for preparation; null: one per processor.")
    dataset_shard_num: int | None = Field(None, ge=1, description="Split the merged dataset into this many shards.")
    dataset_shard_idx: int | None = Field(None, ge=0, description="Which of those shards to use, from 0.")
    num_dataset_shards_to_save: int | None = Field(None, ge=1, description="Files of a prepared dataset; null: one.")
    skip_prepare_dataset: bool = Field(False, description="Load dataset_prepared_path as it is.")
    push_dataset_to_hub: str | None = Field(None, description="Push the prepared dataset to this Hub repository.")
    hf_use_auth_token: bool | None = Field(None, description="Send the Hub token.")

    @model_validator(mode="after")
    def _prefetch(self) -> Data:
        if self.dataloader_num_workers and self.dataloader_prefetch_factor is None:
            self._fill(dataloader_prefetch_factor=2)
        return self


class Train(Section):
    # parallelism
    data_parallel_mode: Literal["none", "ddp", "fsdp2"] = Field(
        "fsdp2", description="none: one process; ddp: replicas; fsdp2: sharded parameters.")
    data_parallel_shard_size: int = Field(-1, description="Processes of a shard group; -1: all that remain.")
    data_parallel_replicate_size: int = Field(-1, description="Replicas of shard groups (HSDP); -1: automatic.")
    tensor_parallel_size: int = Field(1, ge=1, description="Tensor parallelism.")
    pipeline_parallel_size: int = Field(1, ge=1, description="Pipeline stages.")
    pipeline_parallel_schedule: Literal["1F1B", "GPipe"] = Field("1F1B", description="Pipeline schedule.")
    pp_variable_seq_lengths: bool = Field(True, description="Agree on sequence lengths at each pipeline step.")
    expert_parallel_size: int = Field(1, ge=1, description="Expert parallelism.")
    ulysses_parallel_size: int = Field(1, ge=1, description="Ulysses context parallelism.")
    ringattn_parallel_size: int = Field(1, ge=1, description="Ring attention.")
    cp_fsdp_mode: Literal["all", "ulysses_only", "ring_only", "none"] = Field(
        "all", description="Which context-parallel ranks shard parameters.")
    reshard_after_forward: bool | None = Field(
        None, description="Free gathered parameters after the forward pass; null: as enable_full_shard.")
    ep_outside: bool = Field(False, description="Place expert parallelism outside the FSDP mesh.")
    # optimizer
    optimizer: Literal["adamw", "anyprecision_adamw", "sgd", "muon"] = Field("adamw", description="Optimizer.")
    optimizer_dtype: Literal["fp32", "bf16"] = Field(
        "bf16", description="Dtype of the states of anyprecision_adamw and muon; adamw's are of the parameters' dtype.")
    lr: float = Field(5e-5, gt=0, description="Peak learning rate.")
    lr_min: float = Field(1e-7, ge=0, description="Learning rate at the end of the decay.")
    lr_start: float = Field(0.0, ge=0, description="Learning rate at the start of the warmup.")
    lr_warmup_ratio: float = Field(0.0, ge=0, le=1, description="Fraction of all steps for the linear warmup.")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field("constant", description="After the warmup.")
    lr_decay_ratio: float = Field(1.0, ge=0, le=1, description="Fraction of all steps after which the decay has ended.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay (adamw), L2 term (sgd).")
    no_decay_modules: list[str] = Field([], description="No weight decay where a module's name contains one of these.")
    no_decay_params: list[str] = Field([], description="No weight decay where a parameter's name contains one of these.")
    max_grad_norm: float = Field(1.0, ge=0, description="Gradients are clipped to this global norm; 0: not clipped.")
    muon_lr: float = Field(0.02, gt=0, description="Muon: learning rate of matrices.")
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="Muon: momentum.")
    muon_nesterov: bool = Field(True, description="Muon: Nesterov momentum.")
    muon_ns_steps: int = Field(5, ge=1, description="Muon: Newton-Schulz iterations.")
    muon_adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = Field(None, description="Muon: scaling of lr.")
    # batches
    micro_batch_size: int = Field(1, ge=1, description="Bins a process takes in one forward pass.")
    gradient_accumulation_steps: int = Field(1, ge=1, description="Forward passes before an optimizer step.")
    num_train_epochs: int = Field(1, ge=1, description="Passes over the data.")
    max_steps: int | None = Field(None, ge=1, description="Optimizer steps in all; overrides epochs.")
    # memory and speed
    enable_mixed_precision: bool = Field(True, description="Compute in bfloat16, keep parameters in float32.")
    enable_gradient_checkpointing: bool = Field(True, description="Recompute activations in the backward pass.")
    enable_reentrant: bool = Field(False, description="Reentrant checkpointing.")
    recompute_modules: list[Literal["self_attn", "mlp"]] | None = Field(
        None, min_length=1, description="Recompute only these in each layer; null: whole layers.")
    moe_checkpoint_method: Literal["moe_act"] | None = Field(None, description="Checkpointing of experts.")
    enable_full_shard: bool = Field(True, description="FSDP2: shard parameters too (ZeRO-3); false: ZeRO-2.")
    enable_forward_prefetch: bool = Field(True, description="FSDP2: gather the next unit during the forward pass.")
    enable_activation_offload: bool = Field(False, description="Keep activations in CPU memory.")
    activation_gpu_limit: float = Field(0.0, ge=0, description="GB of activations that stay on the GPU.")
    enable_compile: bool = Field(False, description="torch.compile the layers.")
    init_device: Literal["auto", "cpu", "cuda", "meta", "npu"] = Field(
        "auto", description="Where the model is built; auto: meta for fsdp2, else cuda, or cpu where there is none.")
    load_weights_mode: Literal["broadcast", "all_ranks"] = Field(
        "broadcast", description="broadcast: rank 0 reads the weights and sends them; all_ranks: each reads.")
    enable_full_determinism: bool = Field(False, description="Deterministic algorithms only; slow.")
    allow_cuda_launch_blocking: bool = Field(False, description="Run although CUDA_LAUNCH_BLOCKING is set.")
    empty_cache_steps: int = Field(500, ge=0, description="torch.cuda.empty_cache() every so many steps; 0: never.")
    gc_steps: int = Field(500, ge=0, description="Collect garbage every so many steps only; 0: when Python likes.")
    # checkpoints
    output_dir: str = Field(description="Folder for checkpoints, logs and the resolved configuration.")
    ckpt_manager: Literal["dcp"] = Field("dcp", description="dcp: torch.distributed.checkpoint.")
    save_steps: int = Field(0, ge=0, description="Save every so many optimizer steps; 0: not by steps.")
    save_epochs: float = Field(1.0, ge=0, description="Save every so many epochs, fractions too; 0: not by epochs.")
    save_async: bool = Field(False, description="Write checkpoints while training goes on.")
    save_hf_weights: bool = Field(True, description="Write Hugging Face safetensors with the last checkpoint.")
    load_checkpoint_path: str | None = Field(None, description="Checkpoint to resume from; auto: the latest, if any.")
    # logging
    log_format: Literal["progress_bar", "structured"] = Field(
        "progress_bar", description="progress_bar, or structured: key=value lines.")
    use_wandb: bool = Field(False, description="Log to Weights & Biases.")
    wandb_project: str = Field("tilewright", description="W&B project.")
    wandb_name: str | None = Field(None, description="W&B run name.")
    wandb_tags: list[str] | None = Field(None, description="W&B tags.")
    wandb_log_interval: int = Field(1, ge=1, description="Log to W&B every so many steps.")
    # profiling
    enable_profiling: bool = Field(False, description="Run PyTorch's profiler.")
    profile_start_step: int = Field(1, ge=0, description="First step that is profiled.")
    profile_end_step: int = Field(2, ge=1, description="Step at which profiling ends.")
    profile_trace_dir: str = Field("./trace", description="Folder for traces.")
    profile_record_shapes: bool = Field(True, description="Record input shapes.")
    profile_profile_memory: bool = Field(True, description="Record memory.")
    profile_with_stack: bool = Field(True, description="Record Python stacks.")
    profile_rank0_only: bool = Field(True, description="Profile rank 0 only; false: every rank.")
    seed: int = Field(42, ge=0, description="Seed of weights and shuffling.")

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
        return self.enable_full_shard if self.reshard_after_forward is None else self.reshard_after_forward

    def mesh(self, world_size: int) -> tuple[int, int]:
        """(replicas, shards), whose product is world_size. Raises ConfigError if the sizes do not fit."""
        if self.data_parallel_mode == "none" and world_size > 1:
            raise ConfigError([f"train.data_parallel_mode = none: trains one process, but {world_size} were started"])
        if self.data_parallel_mode != "fsdp2":
            return world_size, 1
        replicas, shards = self.data_parallel_replicate_size, self.data_parallel_shard_size
        if shards == -1:
            shards = world_size // max(1, replicas)
        if replicas == -1:
            replicas = world_size // shards
        if replicas * shards != world_size:
            raise ConfigError([f"train.data_parallel_shard_size = {self.data_parallel_shard_size}, train.data_parallel_"
                               f"replicate_size = {self.data_parallel_replicate_size}: do not make {world_size} processes"])
        return replicas, shards


class Lora(Section):
    enable_lora: bool = Field(False, description="Train low-rank adapters.")
    lora_rank: int = Field(16, ge=1, description="Rank of the adapters.")
    lora_alpha: float = Field(16, gt=0, description="Scale; the adapters are scaled by alpha / rank.")
    lora_target_modules: list[str] | None = Field(None, description="Modules with adapters; null: all projections.")
    save_lora_only: bool = Field(False, description="Write only the adapters to Hugging Face checkpoints.")
    enable_qlora: bool = Field(False, description="Quantise the base weights; implies enable_lora.")
    quant_format: Literal["nvfp4", "block_fp8", "nf4"] = Field("nvfp4", description="Quantised format.")
    quant_group_size: int = Field(16, ge=1, description="Elements that share a scale.")
    exclude_modules: list[str] | None = Field(None, description="Modules that stay bfloat16.")
    merge_lora_interval: int = Field(0, ge=0, description="Merge adapters every so many steps; 0: never.")
    reset_optimizer_on_merge: bool = Field(False, description="Forget optimizer states at each merge.")
    enable_aqn: bool = Field(False, description="Adaptive quantisation noise.")
    aqn_alpha: float = Field(1.0, ge=0, description="Scale of that noise.")

    @model_validator(mode="after")
    def _implied(self) -> Lora:
        if self.enable_qlora and "enable_lora" not in self.model_fields_set:
            self._fill(enable_lora=True)
        return self


class Config(Section):
    model: Model = Field(Model(), description="What is trained.")
    data: Data = Field(description="On what.")
    train: Train = Field(description="How.")
    lora: Lora = Field(Lora(), description="Adapters.")

    @model_validator(mode="after")
    def _rules(self, info: ValidationInfo) -> Config:
        found = list(problems(self))
        if isinstance(info.context, list):   # `load` reports them together with every other error
            info.context.extend(found)
        elif found:
            raise ValueError("\n".join(p.line(self) for p in found))
        return self


class Problem(NamedTuple):
    """A value that is refused: the fields it is about, the first of them at fault, and one sentence."""

    paths: tuple[str, ...]
    message: str

    def line(self, config: Config) -> str:
        return f"{', '.join(f'{p} = {reading.show(reading.get(config, p))}' for p in self.paths)}: {self.message}"


_TP, _PP, _EP, _CP, _MUON, _LORA, _OFFLOAD = (f"{what} not in this version" for what in (
    "tensor parallelism is", "pipeline parallelism is", "expert parallelism is", "context parallelism is",
    "muon and anyprecision_adamw are", "LoRA is", "activation offload is"))
# path -> the values that are accepted, and why no others.
REFUSED: dict[str, tuple[tuple, str]] = {
    "model.ep_dispatch": (("alltoall",), _EP), "model.deepep_buffer_size_gb": ((2.0,), _EP),
    "model.deepep_num_sms": ((20,), _EP), "model.deepep_async_combine": ((False,), _EP),
    "model.foundation": (({},), "only text models are in this version, configured by config.json alone"),
    "model.encoders": (({},), "only text models are in this version"),
    "data.sample_packing_mp_start_method": ((None,), "packing runs in the main process, so nothing would use it"),
    "train.tensor_parallel_size": ((1,), _TP),
    "train.pipeline_parallel_size": ((1,), _PP), "train.pipeline_parallel_schedule": (("1F1B",), _PP),
    "train.pp_variable_seq_lengths": ((True,), _PP),
    "train.expert_parallel_size": ((1,), _EP), "train.ep_outside": ((False,), _EP),
    "train.ulysses_parallel_size": ((1,), _CP), "train.ringattn_parallel_size": ((1,), _CP),
    "train.cp_fsdp_mode": (("all",), _CP),
    "train.optimizer": (("adamw", "sgd"), _MUON),
    **{f"train.{name}": ((Train.model_fields[name].default,), _MUON) for name in (
        "optimizer_dtype", "muon_lr", "muon_momentum", "muon_nesterov", "muon_ns_steps", "muon_adjust_lr_fn")},
    "train.moe_checkpoint_method": ((None,), "recomputing only the experts' activations is not in this version"),
    "train.enable_activation_offload": ((False,), _OFFLOAD), "train.activation_gpu_limit": ((0.0,), _OFFLOAD),
    "train.init_device": (("auto", "cpu", "cuda", "meta"), "NPU devices are not supported"),
    **{f"lora.{name}": ((field.default,), _LORA) for name, field in Lora.model_fields.items()},
}
# Fields that only FSDP2 reads, with the values that ask for nothing.
_FSDP2_ONLY = {"train.data_parallel_shard_size": (-1, 1), "train.data_parallel_replicate_size": (-1, 1),
               "train.reshard_after_forward": (None,), "train.enable_full_shard": (True,),
               "train.enable_forward_prefetch": (True,), "model.basic_modules": ([],)}


def problems(config: Config) -> Iterator[Problem]:
    """Everything that is refused in a configuration whose fields are valid one by one."""
    model, data, train, lora = config.model, config.data, config.train, config.lora
    get = reading.get
    for path, (accepted, why) in REFUSED.items():
        if get(config, path) not in accepted:
            yield Problem((path,), why)
    for path, neutral in _FSDP2_ONLY.items():
        if train.data_parallel_mode != "fsdp2" and get(config, path) not in neutral:
            yield Problem((path, "train.data_parallel_mode"), "this has an effect with fsdp2 only")
    for kind in ("datasets", "test_datasets"):
        for i, entry in enumerate(getattr(data, kind)):
            yield from _dataset_problems(f"data.{kind}.{i}.", entry, model)

    def rule(broken: bool, paths: str, message: str) -> Iterator[Problem]:
        if broken:
            yield Problem(tuple(paths.split()), message)

    cuda, wandb = platform.no_cuda(), platform.no_module("wandb")
    decays = train.lr_decay_style != "constant"
    val, held = data.val_set_size, data.test_datasets
    yield from rule(model.config_path is None, "model.model_path model.config_path", "one of them must be given")
    yield from rule(train.data_parallel_mode == "fsdp2" and train.init_device in ("cpu", "cuda"),
                    "train.init_device train.data_parallel_mode", "fsdp2 builds the model on meta: leave it at auto")
    yield from rule(train.init_device == "cuda" and cuda is not None, "train.init_device", str(cuda))
    for name in ("data_parallel_shard_size", "data_parallel_replicate_size"):
        yield from rule(getattr(train, name) != -1 and getattr(train, name) < 1, f"train.{name}", "must be -1, or 1 or more")
    yield from rule(not train.enable_full_shard and train.reshard_after_forward is True,
                    "train.reshard_after_forward train.enable_full_shard", "ZeRO-2 keeps parameters after the forward pass")
    yield from rule(decays and train.lr_min > train.lr, "train.lr_min train.lr", "the decay would rise")
    yield from rule(train.lr_warmup_ratio > 0 and train.lr_start > train.lr, "train.lr_start train.lr", "the warmup would fall")
    yield from rule(decays and train.lr_decay_ratio < train.lr_warmup_ratio, "train.lr_decay_ratio train.lr_warmup_ratio",
                    "the decay would end before the warmup")
    for name, neutral in (("enable_reentrant", False), ("recompute_modules", None)):
        yield from rule(not train.enable_gradient_checkpointing and getattr(train, name) != neutral,
                        f"train.{name} train.enable_gradient_checkpointing", "nothing is recomputed")
    yield from rule(train.enable_full_determinism and not train.allow_cuda_launch_blocking,
                    "train.enable_full_determinism train.allow_cuda_launch_blocking",
                    "full determinism needs allow_cuda_launch_blocking: true")
    yield from rule(platform.env_flag("CUDA_LAUNCH_BLOCKING") and not train.allow_cuda_launch_blocking,
                    "train.allow_cuda_launch_blocking", "CUDA_LAUNCH_BLOCKING is set, which slows training down; unset it")
    yield from rule(train.use_wandb and wandb is not None, "train.use_wandb", str(wandb))
    yield from rule(train.profile_end_step <= train.profile_start_step, "train.profile_end_step train.profile_start_step",
                    "profiling must end after it starts")
    yield from rule(not data.dataloader_num_workers and data.dataloader_prefetch_factor is not None,
                    "data.dataloader_prefetch_factor data.dataloader_num_workers", "without workers it must be null")
    yield from rule(val is not None and not (0 < val < 1 if isinstance(val, float) else val >= 1), "data.val_set_size",
                    "must be a number of samples (1 or more) or a fraction between 0 and 1")
    yield from rule(val is not None and bool(held), "data.val_set_size data.test_datasets", "give one of them")
    yield from _pair("data.dataset_shard_num", "data.dataset_shard_idx", data.dataset_shard_num, data.dataset_shard_idx)
    yield from rule(bool(data.push_dataset_to_hub) and not data.hf_use_auth_token,
                    "data.push_dataset_to_hub data.hf_use_auth_token", "pushing needs hf_use_auth_token: true")
    yield from rule(lora.enable_qlora and not lora.enable_lora, "lora.enable_lora lora.enable_qlora", "QLoRA implies LoRA")
    yield from rule(lora.reset_optimizer_on_merge and not lora.merge_lora_interval,
                    "lora.reset_optimizer_on_merge lora.merge_lora_interval", "there is no merge to reset at")


def _pair(num_path: str, index_path: str, num: int | None, index: int | None) -> Iterator[Problem]:
    if (num is None) != (index is None):
        yield Problem((num_path, index_path), "give both, or neither")
    elif num is not None and index >= num:
        yield Problem((index_path, num_path), "indices start at 0 and end below the number")


def _dataset_problems(at: str, entry: DatasetEntry, model: Model) -> Iterator[Problem]:
    if entry.trust_remote_code:
        yield Problem((f"{at}trust_remote_code",), "the package datasets no longer runs a dataset's own code")
    if entry.data_files is not None and entry.ds_type is None:
        yield Problem((f"{at}data_files", f"{at}ds_type"), "data_files needs ds_type")
    if entry.preprocess_shards is not None and entry.shards is not None:
        yield Problem((f"{at}preprocess_shards", f"{at}shards"), "give one of them")
    yield from _pair(f"{at}shards", f"{at}shards_idx", entry.shards, entry.shards_idx)
    if entry.type == "text" and entry.path == "dummy":
        yield Problem((f"{at}type", f"{at}path"), "dummy data is tokenized already")


def load(path: str | None, overrides: list[str] | None = None) -> Config:
    """The configuration in a YAML file, changed by `--section.field value` (or `=value`) arguments.

    Raises ConfigError with every misspelt key, wrong type, refused value and contradiction, one line each.
    """
    return reading.build(Config, path, overrides or [])


def resolved(config: Config) -> dict[str, Any]:
    """Every field with its value. Loading it gives the same configuration."""
    return config.model_dump(mode="json")


def to_yaml(config: Config) -> str:
    return yaml.safe_dump(resolved(config), sort_keys=False, allow_unicode=True)


def from_command_line(argv: list[str] | None = None, program: str = "python -m tilewright.trainer.train") -> Config:
    """`config.yaml [--section.field value ...]`. Prints all errors and exits with 2, or prints the help and exits."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or {"-h", "--help"} & set(argv):
        print(f"usage: {program} config.yaml [--section.field value ...]\n\n{reading.help_text(Config, REFUSED)}")
        sys.exit(0 if argv else 2)
    path = None if argv[0].startswith("--") else argv[0]
    try:
        return load(path, argv[1 if path else 0:])
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


# field -> the default or meaning in xorl's documentation, and why it is different here. `docs` prints it.
DIFFERENCES: dict[str, tuple[str, str]] = {
    "model.attn_implementation": ("flash_attention_3", "needs one kind of GPU; auto takes the best that runs here"),
    "data.datasets.type": ("tokenized only", "text is ours: raw text, tokenised on preparation with tokenizer_path"),
    "data.datasets.max_seq_len": ("truncate and filter", "samples are truncated, with a count in the log, none is dropped"),
    "data.dataloader_num_workers": ("8", "batches are slices of a memory-mapped file; processes must earn their memory"),
    "data.dataloader_prefetch_factor": ("2", "it must be null without workers; 2 with them, as there"),
    "data.dataset_num_proc": ("XORL_DATASET_NUM_PROC, or the processors", "no environment variable changes a run here"),
    "data.sample_packing_mp_start_method": ("a start method", "packing takes seconds in one process"),
    "train.init_device": ("cuda", "fsdp2, the default, needs meta; auto takes the device that fits"),
    "train.enable_mixed_precision": ("BF16", "the same; stated in full: parameters and optimizer states stay float32"),
    "train.save_epochs": ("1", "the same; 0 switches it off, for runs that are counted in steps"),
    "train.empty_cache_steps": ("500", "the same; 0 switches it off"),
    "train.gc_steps": ("500", "the same; 0 leaves garbage collection to Python"),
    "train.use_wandb": ("true", "needs an account and a network: opt in"),
    "train.wandb_project": ("Xorl", "the project's own name"),
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["docs"] and len(argv) == 2:
        with open(argv[1], "w", encoding="utf-8") as file:
            file.write(reading.markdown(Config, REFUSED, DIFFERENCES))
        return 0
    if argv[:1] == ["check"]:
        print(to_yaml(from_command_line(argv[1:], "python -m tilewright.trainer.config check")), end="")
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
