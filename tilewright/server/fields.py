"""The configuration of a server: one flat YAML, each field of which is the trainer's or its own.

docs/server.md has an example.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, create_model

from tilewright.trainer.config import Config
from tilewright.trainer.config.overrides import read_yaml, validated
from tilewright.trainer.field_tree import ConfigError, leaves
from tilewright.trainer.section import Section


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
    nproc_per_node: int = Field(
        0, ge=0, description="Processes that `auto` starts; 0: one a GPU, or one."
    )
    api_host: str = Field("127.0.0.1", description="Where the API listens; loopback alone.")
    api_port: int = Field(5555, ge=0, le=65535, description="On which port; 0: a free one.")
    api_token_file: str | None = Field(
        None, description="A file with the key; null: one that is drawn, in output_dir/api.key."
    )
    max_body_mb: float = Field(256, gt=0, description="The largest request.")
    max_pending: int = Field(100, ge=1, description="Requests that may wait; then 429.")
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


# Defaults that are not the trainer's.
DEFAULTS: Mapping[str, Any] = {
    "enable_lora": True,
    "lora_rank": 32,
    "enable_forward_prefetch": False,
    "sample_packing_sequence_len": 32000,
}
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
    *("sample_packing_sequence_len", "pad_to_multiple_of", "enable_lora", "lora_rank"),
    *("lora_alpha", "lora_target_modules", "enable_qlora", "quant_format", "quant_group_size"),
)
# What the reference has and this server does not: any value is refused with the sentence.
NOT_YET = {
    "pipeline_parallel_size": "stages of a pipeline are not served yet",
    "pipeline_parallel_schedule": "stages of a pipeline are not served yet",
    "pp_variable_seq_lengths": "stages of a pipeline are not served yet",
    "optimizer": "clients ask for adamw in each request; the server has no other one yet",
    **dict.fromkeys(
        ("muon_lr", "muon_momentum", "muon_nesterov", "muon_ns_steps", "muon_adjust_lr_fn"),
        "muon is not served yet",
    ),
    "load_checkpoint_path": "a client loads checkpoints, by load_weights",
    "load_weights_mode": "weights are read from safetensors",
    "ce_mode": "the implementation of the losses is chosen as `tilewright explain` says",
    "storage_limit": "no limit of files is kept yet",
    "idle_session_timeout": "sessions do not end by themselves yet",
    "skip_initial_checkpoint": "no checkpoint is written before a client asks for one",
    "enable_self_test": "there is no self-test yet",
    "log_gradient_norms": "norms of gradients by kind are not reported yet",
    "log_router_stats": "statistics of routers are in every result",
    "moe_shared_lora": "experts have adapters of their own",
    "moe_hybrid_shared_lora": "experts have adapters of their own",
    "merge_lora_interval": "merging would change the base below the other models",
    "reset_optimizer_on_merge": "merging would change the base below the other models",
    "freeze_router": "all but adapters is frozen",
    "sync_inference_method": "weights are not sent to inference engines yet",
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
        name: (Any, Field(None, description=f"Refused: {why}.")) for name, why in NOT_YET.items()
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
        f"server.{name} = {getattr(server, name)}: {why}"
        for name, why in NOT_YET.items()
        if getattr(server, name) is not None
    ]
    for name in ("worker_bind_host", "worker_bind_port", "worker_bind_address"):
        if (value := getattr(server, name)) != Own.model_fields[name].default:
            problems.append(_unbound(name, value))
    if server.engine_connect_host is not None:
        problems.append(_unbound("engine_connect_host", server.engine_connect_host))
    if not server.enable_lora:
        problems.append(
            "server.enable_lora = false: models of full weights are not served yet; set it to true"
        )
    if server.api_host not in ("127.0.0.1", "localhost", "::1"):
        problems.append(
            f"server.api_host = {server.api_host}: the API has no TLS; accepted are loopback "
            "addresses, to which a proxy or a tunnel leads"
        )
    return problems


def _unbound(name: str, value: Any) -> str:
    return (
        f"server.{name} = {value}: nothing is bound, since the API and rank 0 share a log; leave "
        "the default, and start workers on other machines by torchrun with --mode connect"
    )


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
    if server.lora_target_modules is None:
        # The head, too: clients ask for an adapter on it.
        tree["lora"]["lora_target_modules"] = ["*"]
    tree["lora"]["exclude_modules"] = server.qlora_exclude_modules
    # Moments' factors and rates come with each step.
    tree["train"] |= {"save_steps": 0, "save_epochs": 0}
    if not server.enable_qlora:  # nothing reads these then
        for name in ("exclude_modules", "quant_format", "quant_group_size"):
            tree["lora"].pop(name)
    return tree


def _renamed(line: str) -> str:
    """A sentence of the trainer with the server's names."""
    names = {path: f"server.{name}" for name, path in PATHS.items()}
    pattern = "|".join(rf"(?<![\w.]){re.escape(path)}\b" for path in names)
    return re.sub(pattern, lambda match: names[match[0]], line)
