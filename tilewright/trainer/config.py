"""The training configuration: every field, what it means, what is refused and why.

YAML with the sections model, data, train and lora; `--section.field value` overrides it. Nothing is ignored: an unknown
key, a value of the wrong kind and a value that cannot work in this version are errors, all reported at once.
"""

from __future__ import annotations

import difflib
import json
import pathlib
import re
import sys
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tilewright import platform


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, a line each."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("\n".join(problems))


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())


def field(default: Any, description: str, **limits: Any) -> Any:
    return Field(default, description=description, **limits)


Ratio = {"ge": 0.0, "le": 1.0}


class Model(_Section):
    model_path: str | None = field(None, "Folder with config.json and safetensors, or a Hugging Face Hub id. Null: random weights.")
    config_path: str | None = field(None, "Folder with config.json. Default: model_path.")
    tokenizer_path: str | None = field(None, "Folder with the tokenizer. Default: config_path.")
    attn_implementation: str = field("auto", "Attention implementation, a name of `tilewright explain attention`, or auto.")
    moe_implementation: str | None = field(None, "Expert implementation; null lets the registry choose.")
    ep_dispatch: Literal["alltoall", "deepep"] = field("alltoall", "Expert-parallel dispatch.")
    deepep_buffer_size_gb: float = field(2.0, "DeepEP buffer a GPU, GB.")
    deepep_num_sms: int = field(20, "Multiprocessors for DeepEP's kernels; even.")
    deepep_async_combine: bool = field(False, "Overlap DeepEP's combine with the next layer.")
    merge_qkv: bool = field(True, "One projection for q, k and v.")
    basic_modules: list[str] = field([], "Class or attribute names of further modules that FSDP2 shards as units.")
    foundation: dict[str, Any] = field({}, "Extra foundation-model configuration.")
    encoders: dict[str, Any] = field({}, "Multimodal encoders.")


class Dataset(_Section):
    path: str = field(..., "Folder, file, Hugging Face Hub id or URL; `dummy` for synthetic tokens.")
    type: Literal["tokenized", "text"] = field("tokenized", "tokenized: input_ids (and labels). text: raw text, tokenised with tokenizer_path; a file is a document.")
    name: str | None = field(None, "Hub configuration (subset).")
    split: str | None = field(None, "Split; default train.")
    revision: str | None = field(None, "Hub commit or tag.")
    trust_remote_code: bool = field(False, "Run a data set's own code.")
    data_files: str | list[str] | None = field(None, "Files to load; needs ds_type.")
    ds_type: Literal["json", "csv", "parquet", "arrow", "text"] | None = field(None, "Format of data_files.")
    max_seq_len: int | None = field(None, "Longest sample, tokens: longer tokenized samples are cut, longer texts are split.", ge=2)
    shards: int | None = field(None, "Split into this many pieces and take one.", ge=1)
    shards_idx: int | None = field(None, "The piece to take, from 0.", ge=0)
    preprocess_shards: int | None = field(None, "Tokenise in this many pieces, to bound memory.", ge=1)

    @model_validator(mode="after")
    def _together(self):
        if self.data_files is not None and self.ds_type is None:
            raise ValueError("data_files needs ds_type")
        if self.shards_idx is not None and self.shards is None:
            raise ValueError("shards_idx needs shards")
        if self.shards is not None and (self.shards_idx or 0) >= self.shards:
            raise ValueError(f"shards_idx must be below shards = {self.shards}, got {self.shards_idx}")
        if self.shards is not None and self.preprocess_shards is not None:
            raise ValueError("shards and preprocess_shards exclude each other")
        return self


class Data(_Section):
    datasets: list[Dataset] = field(..., "Training data.", min_length=1)
    test_datasets: list[Dataset] = field([], "Evaluation data.")
    dataset_prepared_path: str | None = field("last_prepared_dataset", "Where tokenised data is cached, by content.")
    select_columns: list[str] | None = field(None, "Columns to keep; default input_ids and labels.")
    sample_packing_method: Literal["sequential", "multipack"] = field("sequential", "sequential: in order. multipack: first-fit decreasing in groups.")
    sample_packing_sequence_len: int = field(32000, "Length of a bin, tokens.", ge=2)
    sample_packing_group_size: int = field(100000, "Samples packed together by multipack.", ge=1)
    sample_packing_sequentially: bool | None = field(None, "True: sequential whatever the method.")
    sample_packing_mp_start_method: Literal["fork", "spawn", "forkserver"] | None = field(None, "Start method of packing processes.")
    eval_sample_packing: bool | None = field(None, "False: one document a bin in evaluation.")
    dataloader_num_workers: int = field(0, "Loader processes.", ge=0)
    dataloader_prefetch_factor: int | None = field(None, "Batches prefetched by a worker; null with no workers.", ge=1)
    dataloader_pin_memory: bool = field(True, "Pin host memory where there is a GPU.")
    dataloader_drop_last: bool = field(True, "Drop the last incomplete step of an epoch.")
    pad_to_multiple_of: int = field(128, "Pad a packed batch to a multiple of this many tokens.", ge=1)
    val_set_size: int | float | None = field(None, "Held-out samples: a count, or a fraction below 1.", gt=0)
    shuffle_merged_datasets: bool = field(True, "Shuffle after merging.")
    shuffle_before_merging_datasets: bool = field(True, "Shuffle each data set first.")
    dataset_num_proc: int | None = field(None, "Tokenising processes; default: one.", ge=1)
    dataset_shard_num: int | None = field(None, "Split each data set into this many shards.", ge=1)
    dataset_shard_idx: int | None = field(None, "The shard to take.", ge=0)
    num_dataset_shards_to_save: int | None = field(None, "Files that the prepared data set is saved as.", ge=1)
    skip_prepare_dataset: bool = field(False, "Load dataset_prepared_path as it is.")
    push_dataset_to_hub: str | None = field(None, "Hub repository to push the prepared data set to.")
    hf_use_auth_token: bool | None = field(None, "Use the stored Hub token.")


class Train(_Section):
    output_dir: str = field(..., "Checkpoints, logs and the resolved configuration.")
    data_parallel_mode: Literal["none", "ddp", "fsdp2"] = field("fsdp2", "none, ddp, or fsdp2 (ZeRO).")
    data_parallel_shard_size: int = field(-1, "Ranks of a shard group; -1: all.", ge=-1)
    data_parallel_replicate_size: int = field(-1, "Replicas (HSDP); -1: as many as shard groups.", ge=-1)
    tensor_parallel_size: int = field(1, "Tensor-parallel ranks.")
    pipeline_parallel_size: int = field(1, "Pipeline stages.")
    pipeline_parallel_schedule: Literal["1F1B", "GPipe"] = field("1F1B", "Pipeline schedule.")
    pp_variable_seq_lengths: bool = field(True, "Agree on a sequence length each pipeline step.")
    expert_parallel_size: int = field(1, "Expert-parallel ranks.")
    ulysses_parallel_size: int = field(1, "Ulysses ranks.")
    ringattn_parallel_size: int = field(1, "Ring-attention ranks.")
    cp_fsdp_mode: Literal["all", "ulysses_only", "ring_only", "none"] = field("all", "Which context-parallel ranks FSDP shards over.")
    reshard_after_forward: bool | None = field(None, "FSDP2: free gathered weights after the forward; null: as enable_full_shard says.")
    ep_outside: bool = field(False, "Expert parallelism outside the FSDP mesh.")
    optimizer: Literal["adamw", "anyprecision_adamw", "sgd", "muon"] = field("adamw", "Optimizer.")
    optimizer_dtype: Literal["fp32", "bf16"] = field("bf16", "State dtype of anyprecision_adamw and muon; adamw keeps the parameters' dtype.")
    lr: float = field(5e-5, "Peak learning rate.", ge=0)
    lr_min: float = field(1e-7, "Learning rate at the end of the decay.", ge=0)
    lr_start: float = field(0.0, "Learning rate at the first warm-up step.", ge=0)
    lr_warmup_ratio: float = field(0.0, "Fraction of all steps that warm up.", **Ratio)
    lr_decay_style: Literal["constant", "linear", "cosine"] = field("constant", "After the warm-up.")
    lr_decay_ratio: float = field(1.0, "Fraction of all steps at which the decay ends.", **Ratio)
    weight_decay: float = field(0.0, "Decoupled weight decay.", ge=0)
    no_decay_modules: list[str] = field([], "Substrings of module names without weight decay.")
    no_decay_params: list[str] = field([], "Substrings of parameter names without weight decay.")
    max_grad_norm: float = field(1.0, "Clip the global gradient norm; 0: off.", ge=0)
    muon_lr: float = field(0.02, "Learning rate of Muon's matrices.")
    muon_momentum: float = field(0.95, "Muon's momentum.")
    muon_nesterov: bool = field(True, "Nesterov momentum in Muon.")
    muon_ns_steps: int = field(5, "Newton-Schulz steps.")
    muon_adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = field(None, "Muon's scaling of the learning rate.")
    micro_batch_size: int = field(1, "Bins a rank and forward.", ge=1)
    gradient_accumulation_steps: int = field(1, "Forwards an optimizer step.", ge=1)
    num_train_epochs: int = field(1, "Passes over the data.", ge=1)
    max_steps: int | None = field(None, "Optimizer steps; overrides epochs.", ge=1)
    enable_mixed_precision: bool = field(True, "bfloat16 compute, float32 weights and gradient sums.")
    enable_gradient_checkpointing: bool = field(True, "Recompute activations in the backward.")
    enable_reentrant: bool = field(False, "Reentrant checkpointing.")
    recompute_modules: list[Literal["self_attn", "mlp"]] | None = field(None, "Only these; null: whole layers.")
    moe_checkpoint_method: Literal["moe_act"] | None = field(None, "moe_act: recompute expert activations only.")
    enable_full_shard: bool = field(True, "FSDP2: True ZeRO-3, False ZeRO-2.")
    enable_forward_prefetch: bool = field(True, "FSDP2: gather the next layer's weights during this one.")
    enable_activation_offload: bool = field(False, "Keep activations in host memory.")
    activation_gpu_limit: float = field(0.0, "GB of activations to keep on the GPU.")
    enable_compile: bool = field(False, "torch.compile each layer.")
    init_device: Literal["auto", "cpu", "cuda", "meta", "npu"] = field("auto", "Where weights are made; auto: meta for fsdp2, else the training device.")
    load_weights_mode: Literal["broadcast", "all_ranks"] = field("broadcast", "Rank 0 reads and sends, or every rank reads.")
    enable_full_determinism: bool = field(False, "Deterministic algorithms only.")
    allow_cuda_launch_blocking: bool = field(False, "Permit CUDA_LAUNCH_BLOCKING=1.")
    empty_cache_steps: int = field(500, "torch.cuda.empty_cache() every so many steps; 0: never.", ge=0)
    gc_steps: int = field(500, "gc.collect() every so many steps, off between; 0: leave Python's collector on.", ge=0)
    ckpt_manager: Literal["dcp"] = field("dcp", "Checkpoint format.")
    save_steps: int = field(0, "Checkpoint every so many steps; 0: off.", ge=0)
    save_epochs: float = field(1, "Checkpoint every so many epochs, fractions allowed; 0: off.", ge=0)
    save_async: bool = field(False, "Write checkpoints while training goes on.")
    save_hf_weights: bool = field(True, "Write Hugging Face weights into the last checkpoint.")
    load_checkpoint_path: str | None = field(None, "Checkpoint to resume from; auto: the newest in output_dir.")
    log_format: Literal["progress_bar", "structured"] = field("progress_bar", "tqdm, or key=value lines.")
    use_wandb: bool = field(False, "Log to Weights & Biases.")
    wandb_project: str = field("tilewright", "W&B project.")
    wandb_name: str | None = field(None, "W&B run name.")
    wandb_tags: list[str] | None = field(None, "W&B tags.")
    wandb_log_interval: int = field(1, "Steps between W&B rows.", ge=1)
    enable_profiling: bool = field(False, "Run torch.profiler.")
    profile_start_step: int = field(1, "First profiled step.", ge=0)
    profile_end_step: int = field(2, "Profiling stops before this step.", ge=1)
    profile_trace_dir: str = field("./trace", "Folder for traces.")
    profile_record_shapes: bool = field(True, "Record shapes.")
    profile_profile_memory: bool = field(True, "Record memory.")
    profile_with_stack: bool = field(True, "Record Python stacks.")
    profile_rank0_only: bool = field(True, "Profile rank 0 only.")
    seed: int = field(42, "Seed of everything random.")


class Lora(_Section):
    enable_lora: bool = field(False, "Train adapters.")
    lora_rank: int = field(16, "Rank.")
    lora_alpha: int = field(16, "Scale is alpha / rank.")
    lora_target_modules: list[str] | None = field(None, "Modules to adapt.")
    save_lora_only: bool = field(False, "Save adapters only.")
    enable_qlora: bool = field(False, "Quantise the base.")
    quant_format: Literal["nvfp4", "block_fp8", "nf4"] = field("nvfp4", "Format.")
    quant_group_size: int = field(16, "Group size.")
    exclude_modules: list[str] | None = field(None, "Modules not quantised.")
    merge_lora_interval: int = field(0, "Merge every so many steps.")
    reset_optimizer_on_merge: bool = field(False, "Reset the optimizer after a merge.")
    enable_aqn: bool = field(False, "Adaptive quantisation noise.")
    aqn_alpha: float = field(1.0, "Its magnitude.")


# Fields that this version cannot honour: what they must be left at, and the sentence that says why.
_PARALLEL = "this version trains data-parallel only"
_MUON = "muon is not in this version"
_LORA = "adapters and quantised weights are not in this version"
_EP = "expert parallelism is not in this version"
REFUSED: dict[str, str] = {
    "model.ep_dispatch": _EP, "model.deepep_buffer_size_gb": _EP, "model.deepep_num_sms": _EP,
    "model.deepep_async_combine": _EP, "model.foundation": "no model takes it", "model.encoders": "models are text-only",
    "train.tensor_parallel_size": _PARALLEL, "train.pipeline_parallel_size": _PARALLEL,
    "train.pipeline_parallel_schedule": _PARALLEL, "train.pp_variable_seq_lengths": _PARALLEL,
    "train.expert_parallel_size": _EP, "train.ep_outside": _EP, "train.ulysses_parallel_size": _PARALLEL,
    "train.ringattn_parallel_size": _PARALLEL, "train.cp_fsdp_mode": _PARALLEL, "train.moe_checkpoint_method": _EP,
    "train.muon_lr": _MUON, "train.muon_momentum": _MUON, "train.muon_nesterov": _MUON, "train.muon_ns_steps": _MUON,
    "train.muon_adjust_lr_fn": _MUON, "train.optimizer_dtype": "neither optimizer that reads it is in this version",
    "train.enable_activation_offload": "activation offload is not in this version",
    "train.activation_gpu_limit": "activation offload is not in this version",
    "data.sample_packing_mp_start_method": "packing is one vectorised pass in one process",
    **{f"lora.{name}": _LORA for name in Lora.model_fields},
}
REFUSED_VALUES = {
    ("train.optimizer", "muon"): _MUON, ("train.optimizer", "anyprecision_adamw"): "use adamw; it is the one here",
    ("train.init_device", "npu"): "only cpu, cuda and meta tensors are trained on",
}

# Where a default differs from the reference configuration, and why.
DIFFERENCES = {
    "model.attn_implementation": ("flash_attention_3", "auto runs on any machine and says what it chose"),
    "train.use_wandb": ("true", "nothing leaves the machine unasked"),
    "train.wandb_project": ("Xorl", "our name"),
    "train.init_device": ("cuda", "auto makes what the data-parallel mode needs, with or without a GPU"),
    "data.dataloader_num_workers": ("8", "batches are ready token arrays; a worker process costs more than it saves"),
    "data.dataloader_prefetch_factor": ("2", "means nothing without workers"),
    "data.dataset_num_proc": ("CPU count", "one process is deterministic and fast enough for what fits a machine"),
}


class Config(_Section):
    """The whole configuration."""

    model: Model = Model()
    data: Data
    train: Train
    lora: Lora = Lora()

    def problems(self) -> list[str]:
        """Values that are well-formed but cannot work, alone or together."""
        found = []
        for path, reason in REFUSED.items():
            section, name = path.split(".")
            neutral = type(getattr(self, section)).model_fields[name].get_default(call_default_factory=True)
            value = getattr(getattr(self, section), name)
            if value != neutral:
                found.append(f"{path} = {show(value)} is not supported: {reason}; leave it at {show(neutral)}")
        for (path, value), reason in REFUSED_VALUES.items():
            section, name = path.split(".")
            if getattr(getattr(self, section), name) == value:
                found.append(f"{path} = {show(value)} is not supported: {reason}")
        m, d, t = self.model, self.data, self.train
        if m.model_path is None and m.config_path is None:
            found.append("model.model_path and model.config_path are both null; one must say what to train")
        if t.data_parallel_mode == "fsdp2" and t.init_device not in ("auto", "meta"):
            found.append(f"train.init_device = {t.init_device}: fsdp2 shards weights before they exist; use meta or auto")
        if t.data_parallel_mode != "fsdp2" and t.init_device == "meta":
            found.append(f"train.init_device = meta needs data_parallel_mode fsdp2, got {t.data_parallel_mode}")
        if t.lr_decay_style != "constant" and t.lr_min > t.lr:
            found.append(f"train.lr_min = {t.lr_min} must not be above train.lr = {t.lr}")
        if t.lr_warmup_ratio > t.lr_decay_ratio:
            found.append(f"train.lr_warmup_ratio = {t.lr_warmup_ratio} must not be above train.lr_decay_ratio = {t.lr_decay_ratio}")
        if t.recompute_modules is not None and not t.enable_gradient_checkpointing:
            found.append("train.recompute_modules needs enable_gradient_checkpointing: true")
        if t.profile_end_step <= t.profile_start_step:
            found.append(f"train.profile_end_step = {t.profile_end_step} must be above profile_start_step = {t.profile_start_step}")
        if t.use_wandb and (reason := platform.no_module("wandb")):
            found.append(f"train.use_wandb: {reason}")
        if platform.env_flag("CUDA_LAUNCH_BLOCKING") and not t.allow_cuda_launch_blocking:
            found.append("CUDA_LAUNCH_BLOCKING is set, which makes training slow; unset it or set train.allow_cuda_launch_blocking: true")
        if t.enable_full_determinism and not t.allow_cuda_launch_blocking:
            found.append("train.enable_full_determinism needs allow_cuda_launch_blocking: true")
        if d.dataloader_num_workers == 0 and d.dataloader_prefetch_factor is not None:
            found.append("data.dataloader_prefetch_factor needs dataloader_num_workers above 0")
        if isinstance(d.val_set_size, float) and d.val_set_size >= 1 and not d.val_set_size.is_integer():
            found.append(f"data.val_set_size = {d.val_set_size} must be a count or a fraction below 1")
        if (d.dataset_shard_num is None) != (d.dataset_shard_idx is None):
            found.append("data.dataset_shard_num and data.dataset_shard_idx go together")
        elif d.dataset_shard_num is not None and d.dataset_shard_idx >= d.dataset_shard_num:
            found.append(f"data.dataset_shard_idx = {d.dataset_shard_idx} must be below dataset_shard_num = {d.dataset_shard_num}")
        if d.push_dataset_to_hub and not d.hf_use_auth_token:
            found.append("data.push_dataset_to_hub needs hf_use_auth_token: true")
        if (d.push_dataset_to_hub or d.skip_prepare_dataset) and d.dataset_prepared_path is None:
            found.append("data.push_dataset_to_hub and data.skip_prepare_dataset need dataset_prepared_path")
        for i, s in enumerate((*d.datasets, *d.test_datasets)):
            if s.trust_remote_code:
                found.append(f"data.datasets[{i}].trust_remote_code = true is not supported: the datasets library no longer runs code from data sets")
            if s.type == "text" and s.path != "dummy" and not (m.tokenizer_path or m.config_path or m.model_path):
                found.append(f"data.datasets[{i}].type = text needs model.tokenizer_path")
        return found


def show(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


# ---- loading

class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-5 as a string; this reads it as a number, as everyone means it."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(
    r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?$"), list("-+0123456789."))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][\d_]*)$"), list("-+0123456789"))
# Implicit resolvers are tried in the order they were added: integers must come before the float pattern above.
for _first, _resolvers in _Loader.yaml_implicit_resolvers.items():
    _Loader.yaml_implicit_resolvers[_first] = sorted(_resolvers, key=lambda r: not r[0].endswith(":int"))

SECTIONS: dict[str, type[_Section]] = {"model": Model, "data": Data, "train": Train, "lora": Lora}


def parse_overrides(arguments: list[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """`--section.field value` and `--section.field=value` as nested dictionaries, and what is wrong with them."""
    found: dict[str, dict[str, Any]] = {}
    problems = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        if not key.startswith("--") or key.count(".") != 1:
            problems.append(f"{word}: overrides look like --section.field value")
            continue
        if not equals:
            if not rest or re.match(r"--\w+\.", rest[0]):
                problems.append(f"{key}: no value given")
                continue
            value = rest.pop(0)
        section, name = key[2:].replace("-", "_").split(".")
        try:
            found.setdefault(section, {})[name] = yaml.load(value, _Loader)
        except yaml.YAMLError:
            problems.append(f"{key}: cannot read {value!r}")
    return found, problems


def _unknown(path: str, name: str, section: str | None) -> str:
    """The message for a key that does not exist: another section's, or a near spelling, if there is one."""
    for other, kind in SECTIONS.items():
        if other != section and name in kind.model_fields:
            return f"{path}: unknown key; {name} belongs under {other}"
    every = {f"{s}.{n}": n for s, kind in SECTIONS.items() for n in kind.model_fields}
    here = list(SECTIONS[section].model_fields) if section else list(SECTIONS)
    near = difflib.get_close_matches(name.replace("-", "_"), here, 1, 0.6)
    if near:
        return f"{path}: unknown key; did you mean {section + '.' if section else ''}{near[0]}?"
    far = difflib.get_close_matches(name, list(every.values()), 1, 0.7)
    target = next((k for k, n in every.items() if far and n == far[0]), None)
    return f"{path}: unknown key; did you mean {target}?" if target else f"{path}: unknown key; have {', '.join(sorted(here))}"


def _explain(error: dict[str, Any]) -> str:
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error["loc"]).lstrip(".")
    if error["type"] == "extra_forbidden":
        parts = [p for p in error["loc"] if isinstance(p, str)]
        if len(error["loc"]) > 2:   # inside a dataset entry
            near = difflib.get_close_matches(str(parts[-1]), list(Dataset.model_fields), 1, 0.6)
            return f"{path}: unknown key" + (f"; did you mean {near[0]}?" if near else f"; have {', '.join(Dataset.model_fields)}")
        return _unknown(path, parts[-1], parts[0] if len(parts) > 1 else None)
    if error["type"] == "missing":
        return f"{path}: required"
    message = error["msg"].removeprefix("Value error, ")
    value = error.get("input")
    return f"{path}: {message}" + (f", got {show(value)}" if not isinstance(value, dict) else "")


def build(tree: dict[str, Any]) -> Config:
    """A configuration from nested dictionaries. Raises ConfigError with every problem."""
    problems: list[str] = []
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        # Union members report one error each; a line a path is enough.
        lines = {tuple(p for p in e["loc"] if p not in ("int", "float", "str")): _explain(e) for e in error.errors(include_url=False)}
        problems = list(lines.values())
        # Refusals of what is well-formed are worth knowing in the same run.
        for path, reason in {**REFUSED}.items():
            section, name = path.split(".")
            given = (tree.get(section) or {}) if isinstance(tree.get(section), dict) else {}
            neutral = SECTIONS[section].model_fields[name].get_default(call_default_factory=True)
            if name in given and given[name] != neutral and not any(p.startswith(path) for p in problems):
                problems.append(f"{path} = {show(given[name])} is not supported: {reason}; leave it at {show(neutral)}")
        raise ConfigError(problems) from None
    if found := config.problems():
        raise ConfigError(found)
    return config


def load(path: str | pathlib.Path, overrides: list[str] = ()) -> Config:
    """Reads a YAML file and applies overrides. Raises ConfigError with every problem at once."""
    try:
        tree = yaml.load(pathlib.Path(path).read_text(), _Loader) or {}
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}: not YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(tree, dict):
        raise ConfigError([f"{path}: must hold the sections {', '.join(SECTIONS)}, got {type(tree).__name__}"])
    changes, problems = parse_overrides(list(overrides))
    for section, values in changes.items():
        given = tree.setdefault(section, {})
        if given is None:
            given = tree[section] = {}
        if isinstance(given, dict):
            given.update(values)
    try:
        config = build(tree)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    return config


def resolved(config: Config) -> str:
    """The whole configuration as YAML. Loading it again gives the same configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


# ---- documentation

def documentation() -> str:
    """docs/configuration.md."""
    lines = ["# Configuration", "",
             "Generated by `python -m tilewright.trainer.config docs`. A YAML file has the sections below; any field can be "
             "overridden on the command line: `--train.lr 1e-4`. Unknown keys, wrong values and fields that this version "
             "cannot honour are errors, reported together, with exit code 2.", ""]
    for name, kind in {"model": Model, "data": Data, "data.datasets[i]": Dataset, "train": Train, "lora": Lora}.items():
        lines += [f"## {name}", "", "| field | default | meaning |", "|---|---|---|"]
        for key, info in kind.model_fields.items():
            default = "required" if info.is_required() else show(info.get_default(call_default_factory=True))
            refused = REFUSED.get(f"{name}.{key}")
            lines.append(f"| {key} | {default} | {info.description}"
                         + (f" *Must stay at its default: {refused}.*" if refused else "") + " |")
        lines.append("")
    lines += ["## Where a default differs from the reference", "",
              "| field | reference | here | why |", "|---|---|---|---|"]
    for path, (theirs, why) in DIFFERENCES.items():
        section, key = path.split(".")
        ours = show(SECTIONS[section].model_fields[key].get_default(call_default_factory=True))
        lines.append(f"| {path} | {theirs} | {ours} | {why} |")
    lines += ["", "Refused values: " + "; ".join(f"`{p}: {v}` ({why})" for (p, v), why in REFUSED_VALUES.items()) + ".", ""]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """`docs` writes docs/configuration.md; `check FILE [overrides]` prints the resolved configuration."""
    if argv[:1] == ["docs"]:
        pathlib.Path("docs/configuration.md").write_text(documentation())
        return 0
    if len(argv) >= 2 and argv[0] == "check":
        try:
            print(resolved(load(argv[1], argv[2:])), end="")
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
        return 0
    print("usage: python -m tilewright.trainer.config {docs | check FILE [--section.field value ...]}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
