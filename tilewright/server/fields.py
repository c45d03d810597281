"""The configuration of a server: one flat YAML, each field of which is the trainer's or its own.

docs/server.md has an example.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model

from tilewright.server.hosts import allowed
from tilewright.trainer.config import Config
from tilewright.trainer.config.overrides import read_yaml, validated
from tilewright.trainer.field_tree import ConfigError, leaves
from tilewright.trainer.section import Section

URL = re.compile(r"https?://[^/\s]+/?")
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)B")
UNITS = {unit: 1000**i for i, unit in enumerate(["", "K", "M", "G", "T", "P"])}


def size(text: str) -> int:
    """Bytes of `10GB`: units are powers of 1000. Raises ValueError."""
    if (match := SIZE.fullmatch(text.strip().upper())) is None:
        raise ValueError(f"must be a size such as 500MB, 10GB or 2TB, got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def _size(text: str) -> str:
    size(text)
    return text


class Own(Section):
    """What the server reads itself."""

    model_name: str | None = Field(
        None, description="What clients call the base; null: model_path."
    )
    qlora_exclude_modules: list[str] | None = Field(
        None, description="lora.exclude_modules of the trainer."
    )
    enable_packing: bool = Field(
        True, description="Put several documents of a request in one sequence, isolated."
    )
    freeze_router: bool = Field(
        True, description="Keep routers as they are, of a model with experts."
    )
    ce_mode: Literal["compiled", "eager"] = Field(
        "compiled",
        description="Losses by the implementation that `tilewright explain` marks, or the eager twin.",
    )
    load_weights_mode: Literal["auto", "safetensors"] = Field(
        "auto", description="What model_path holds: safetensors in either case."
    )
    storage_limit: Annotated[str, AfterValidator(_size)] = Field(
        "10TB", description="The most that output_dir holds; more is not saved (StorageLimitError)."
    )
    idle_session_timeout: float = Field(
        7200,
        ge=0,
        description="Seconds without a request or heartbeat; then saved, unloaded, samplers dropped; 0: never.",
    )
    skip_initial_checkpoint: bool = Field(
        False, description="Do not save a model as weights/000000 when it is created."
    )
    enable_self_test: bool = Field(
        False, description="A pass of every loss before the server is ready."
    )
    log_gradient_norms: bool = Field(
        True, description="The gradient's norm by kind of layer in what optim_step returns."
    )
    log_router_stats: bool = Field(
        True, description="The routers' statistics in the metrics of passes, with experts."
    )
    sampler: Literal["embedded", "vllm", "sglang", "none"] = Field(
        "embedded",
        description="What follows prompts by more than a token: a process of its own, from the first "
        "request of one on; an engine at sampler_url; or nothing, and what clients add.",
    )
    sampler_url: str | None = Field(
        None, description="Of vllm or sglang: http://HOST:PORT, within inference_allowlist."
    )
    inference_allowlist: list[str] = Field(
        ["127.0.0.0/8", "::1", "localhost"],
        description="Names of hosts, and networks, at which weights and prompts may be sent.",
    )
    sampler_cache_tokens: int = Field(
        32768, ge=16, description="Tokens that the embedded sampler keeps keys and values of."
    )
    sampling_logprobs: Literal["trainer", "engine"] = Field(
        "trainer",
        description="Log-probabilities of samples: of the forward pass of training, or the "
        "sampler's own.",
    )
    sync_inference_method: Literal["nccl_broadcast", "gloo_broadcast"] = Field(
        "nccl_broadcast", description="How all weights are sent to an engine; gloo is for CPUs."
    )
    sync_every_steps: int = Field(
        0,
        ge=0,
        description="After so many steps of a model, added engines are sent it under its name; 0: on "
        "request.",
    )
    nproc_per_node: int = Field(
        0, ge=0, description="Processes that `auto` starts; 0: one a GPU, or one."
    )
    api_host: str = Field("127.0.0.1", description="Where the API listens; loopback alone.")
    api_port: int = Field(5555, ge=0, le=65535, description="On which port; 0: a free one.")
    api_token_file: str | None = Field(
        None, description="A file with the key; null: one that is drawn, in output_dir/api.key."
    )
    max_body_mb: float = Field(256, gt=0, description="The largest request.")
    max_pending: int = Field(100, ge=1, description="Requests of a key that may wait; then 429.")
    gap_timeout: float = Field(
        120, gt=0, description="Seconds that requests wait for a number before theirs."
    )
    checkpoint_every: int = Field(
        20, ge=1, description="Optimizer steps of a model between its checkpoints."
    )
    future_ttl: float = Field(3600, gt=0, description="Seconds that a sent result stays.")
    result_max_age: float = Field(86400, gt=0, description="Seconds that any result stays.")
    log_max_gb: float = Field(100, gt=0, description="The log's greatest size; then 429.")
    worker_connection_timeout: float = Field(
        120, gt=0, description="Seconds within which workers must be ready."
    )
    worker_max_retries: int = Field(
        3, ge=0, description="How often the API or the workers are started again."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Of logs.")
    worker_bind_host: str = Field("0.0.0.0", description="Nothing is bound: the log is the queue.")
    worker_bind_port: int = Field(5556, description="As worker_bind_host.")
    worker_bind_address: str = Field("auto", description="As worker_bind_host.")
    engine_connect_host: str | None = Field(None, description="As worker_bind_host.")


# Where the reference's processes find each other: their defaults alone are accepted.
UNBOUND = ("worker_bind_host", "worker_bind_port", "worker_bind_address", "engine_connect_host")
# Defaults that are not the trainer's.
DEFAULTS: Mapping[str, Any] = {
    "enable_lora": True,
    "lora_rank": 32,
    "enable_forward_prefetch": False,
    "sample_packing_sequence_len": 32000,
}
# Those that nothing reads without adapters.
OF_ADAPTERS = (
    *("lora_rank", "lora_alpha", "lora_target_modules", "quant_format", "quant_group_size"),
    *("moe_shared_lora", "moe_hybrid_shared_lora"),
)
OF_TRAINER = (
    *("model_path", "config_path", "tokenizer_path", "attn_implementation", "moe_implementation"),
    *("ep_dispatch", "deepep_buffer_size_gb", "deepep_num_sms", "deepep_async_combine"),
    *("merge_qkv", "basic_modules", "foundation", "encoders", "router_fp32", "lm_head_fp32"),
    *("rmsnorm_native", "activation_native", "rope_native", "attention_cast_bf16"),
    *("batch_invariant", "data_parallel_mode", "data_parallel_shard_size"),
    *("data_parallel_replicate_size", "tensor_parallel_size", "expert_parallel_size"),
    *("ulysses_parallel_size", "ringattn_parallel_size", "cp_fsdp_mode", "reshard_after_forward"),
    *("seed", "enable_mixed_precision", "enable_gradient_checkpointing", "enable_full_shard"),
    *("enable_activation_offload", "enable_compile", "enable_reentrant"),
    *("enable_forward_prefetch", "init_device", "optimizer_dtype", "output_dir", "ckpt_manager"),
    *("sample_packing_sequence_len", "pad_to_multiple_of", "enable_full_determinism"),
    *("enable_lora", "enable_qlora", *OF_ADAPTERS),
)
_MUON = "muon is not served yet"
_STAGES = "stages of a pipeline are not served yet"
_BASE = "it would change the base below the other models"
# What the reference has and this server does not: the one value that is what it does, and why any
# other is refused.
ONE_VALUE: Mapping[str, tuple[Any, str]] = {
    "pipeline_parallel_size": (1, _STAGES),
    "pipeline_parallel_schedule": ("1F1B", _STAGES),
    "pp_variable_seq_lengths": (True, _STAGES),
    "optimizer": ("adamw", "clients ask for adamw in each request; no other one is served yet"),
    "muon_lr": (0.02, _MUON),
    "muon_momentum": (0.95, _MUON),
    "muon_nesterov": (True, _MUON),
    "muon_ns_steps": (5, _MUON),
    "muon_adjust_lr_fn": (None, _MUON),
    "load_checkpoint_path": ("", "a client loads checkpoints, by load_weights"),
    "merge_lora_interval": (0, _BASE),
    "reset_optimizer_on_merge": (False, _BASE),
}


def _paths() -> dict[str, str]:
    """The path in the trainer's configuration of each field that is the trainer's."""
    by_name = {path.rpartition(".")[2]: path for path in leaves(Config)}
    return {name: by_name[name] for name in OF_TRAINER}


PATHS = _paths()


def _every() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    known = leaves(Config)
    for name, path in PATHS.items():
        field = known[path]
        default = DEFAULTS.get(name, field.get_default())
        if name in ("model_path", "output_dir"):
            default, kind = ..., str
        else:
            kind = field.annotation
        fields[name] = (kind, Field(default, description=field.description))
    return fields | {
        # The value's type, by which the command line is read.
        name: (
            type(value) if value is not None else str | None,
            Field(value, description=f"Only {value!r}: {why}."),
        )
        for name, (value, why) in ONE_VALUE.items()
    }


Server: Any = create_model("Server", __base__=Own, **_every())


_Root = create_model("_Root", __base__=Section, server=(Server, ...))


def load(path: str | None, overrides: list[str]) -> tuple[Own, Config]:
    """The server's configuration, and the trainer's that follows from it.

    Raises ConfigError with every error.
    """
    server = validated(_Root, {"server": read_yaml(path) if path else {}}, overrides).server
    if problems := [*_problems(server)]:
        raise ConfigError(problems)
    try:
        return server, validated(Config, _tree(server), [])
    except ConfigError as error:
        raise ConfigError([_renamed(line) for line in error.problems]) from error


def _problems(server: Any) -> list[str]:
    problems = [
        f"server.{name} = {getattr(server, name)}: {why}; accepted is {value!r}"
        for name, (value, why) in ONE_VALUE.items()
        if getattr(server, name) != value
    ]
    problems += [
        f"server.{name} = {getattr(server, name)}: nothing is bound, since the API and rank 0 share "
        "a log; leave the default, and start workers on other machines by torchrun with --mode "
        "connect"
        for name in UNBOUND
        if getattr(server, name) != Own.model_fields[name].default
    ]
    if not server.enable_lora and not server.enable_qlora:
        given = sorted(server.model_fields_set & {*OF_ADAPTERS, "qlora_exclude_modules"})
        problems += [
            f"server.{name} = {getattr(server, name)}: with enable_lora = false all weights train, "
            "and nothing reads it"
            for name in given
        ]
    elif not server.freeze_router:
        problems.append("server.freeze_router = false: with enable_lora adapters alone train")
    remote = server.sampler in ("vllm", "sglang")
    if remote != (server.sampler_url is not None):
        problems.append(
            f"server.sampler_url = {server.sampler_url}: sampler is {server.sampler!r}; "
            + ("it needs the URL of one" if remote else "only vllm and sglang have a URL")
        )
    elif remote and not URL.fullmatch(server.sampler_url):
        problems.append(f"server.sampler_url = {server.sampler_url}: accepted is http://HOST:PORT")
    elif remote and not allowed(server.sampler_url, server.inference_allowlist):
        problems.append(
            f"server.sampler_url = {server.sampler_url}: its host is not in inference_allowlist, "
            f"{server.inference_allowlist}"
        )
    if server.api_host not in ("127.0.0.1", "localhost", "::1"):
        problems.append(
            f"server.api_host = {server.api_host}: the API has no TLS; accepted are loopback "
            "addresses, to which a proxy or a tunnel leads"
        )
    return problems


def _tree(server: Any) -> dict[str, Any]:
    """As a file of the trainer's would hold it."""
    tree: dict[str, Any] = {"data": {"datasets": [{"path": "dummy"}]}}
    for name, path in PATHS.items():
        unread = name == "enable_forward_prefetch" and server.data_parallel_mode != "fsdp2"
        if unread and name not in server.model_fields_set:
            continue  # the server's default
        section, _, own = path.partition(".")
        tree.setdefault(section, {})[own] = getattr(server, name)
    if server.config_path is None:
        tree["model"]["config_path"] = server.model_path
    # Moments' factors and rates come with each step.
    tree["train"] |= {"save_steps": 0, "save_epochs": 0}
    if server.enable_full_determinism:  # nothing is launched by the server that this would slow
        tree["train"]["allow_cuda_launch_blocking"] = True
    lora = tree["lora"]
    if not (server.enable_lora or server.enable_qlora):
        tree["lora"] = {"enable_lora": False}
        return tree
    lora["enable_lora"] = True
    if server.lora_target_modules is None:
        # The head, too: clients ask for an adapter on it.
        lora["lora_target_modules"] = ["*"]
    lora["exclude_modules"] = server.qlora_exclude_modules
    if not server.enable_qlora:  # nothing reads these then
        for name in ("exclude_modules", "quant_format", "quant_group_size"):
            lora.pop(name)
    return tree


def _renamed(line: str) -> str:
    """A sentence of the trainer with the server's names."""
    names = {path: f"server.{name}" for name, path in PATHS.items()}
    pattern = "|".join(rf"(?<![\w.]){re.escape(path)}\b" for path in names)
    return re.sub(pattern, lambda match: names[match[0]], line)
