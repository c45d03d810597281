"""config.json, and the names of tensors in a Hugging Face folder.

Reading fuses parameters, and writing splits them again, bit for bit.
"""

from __future__ import annotations

import difflib
import pathlib
from typing import Any

import torch

from tilewright.core.files import is_hub_id, read_json
from tilewright.trainer.models.fields import Model
from tilewright.trainer.models.model_config import ModelConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CHAT_TEMPLATES = "additional_chat_templates"  # a folder, beside chat_template.jinja


def load_config(path: str | pathlib.Path, foundation: dict[str, Any] | None = None) -> ModelConfig:
    """Reads a folder with config.json, or the file itself.

    foundation: entries that replace those of the file. Raises ValueError for an unsupported model,
    and for an entry that changes nothing.
    """
    given, stored = foundation or {}, read_config(path)
    config = ModelConfig.from_hf({**stored, **given})
    read = config.to_hf()
    for name, value in given.items():
        if _matters(name, stored, given, config):
            continue
        if name not in read:
            near = difflib.get_close_matches(name, read, 1)
            raise ValueError(
                f"model.foundation: {name} is no entry that a {config.model_type} model is made from"
                + (f"; did you mean {near[0]}?" if near else "")
            )
        there = read[name]
        if isinstance(value, dict) and isinstance(there, dict):
            there = {k: there.get(k) for k in value}
        if there != value:
            raise ValueError(
                f"model.foundation: {name} = {value!r} would be {there!r} all the same; give the "
                "entry that config.json has for it"
            )
    return config


def _matters(name: str, stored: dict[str, Any], given: dict[str, Any], config: ModelConfig) -> bool:
    """Whether the model would be another one without this entry."""
    others = {k: v for k, v in given.items() if k != name}
    try:
        return ModelConfig.from_hf({**stored, **others}) != config
    except ValueError:  # it is needed
        return True


def local_folder(path: str, revision: str | None = None) -> str:
    """The path of a local folder, or of a Hugging Face Hub id after downloading it. Raises
    FileNotFoundError, naming it, if it is neither.

    revision: a commit, tag or branch of the Hub id.
    """
    if pathlib.Path(path).exists():
        return path
    if not is_hub_id(path):
        raise FileNotFoundError(f"{path}: no such file or folder")
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(
            path,
            revision=revision,
            allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
        )
    except (OSError, ValueError) as error:  # no network, no such repository, or not a valid id
        raise FileNotFoundError(
            f"{path}: no such file or folder, and the Hub does not give "
            f"{'it' if revision is None else f'its revision {revision}'} "
            f"({' '.join(str(error).split())[:200]})"
        ) from error


def shape_of(model: Model) -> ModelConfig:
    """`load_config` of what a configuration names."""
    assert model.config_path is not None  # a rule of the configuration
    return load_config(local_folder(model.config_path, model.revision), model.foundation)


def read_config(path: str | pathlib.Path) -> dict:
    file = pathlib.Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no config.json there")
    return read_json(file)


def sources(name: str, config: ModelConfig) -> list[str]:
    """The tensors on disk that are fused into one parameter, in order."""
    family = config.architecture
    for here, there in family.renamed:
        name = name.replace(here, there)
    stem, _, last = name.rpartition(".experts.")
    if stem and not family.stacked_experts:
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        return [
            f"{stem}.experts.{e}.{part}.weight" for e in range(config.num_experts) for part in parts
        ]
    if name.rpartition(".")[0].endswith("qkv_proj"):
        return [name.replace("qkv_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
    if name.endswith("gate_up_proj.weight"):
        return [name.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")]
    return [name]


def fuse(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    _, of_experts, last = name.rpartition(".experts.")
    if of_experts and len(tensors) == 1 and (last.endswith("_bias") or tensors[0].dim() == 3):
        return _from_stacked(last, tensors[0])
    if last == "gate_up_proj":
        return torch.stack(
            [torch.cat(pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]
        )
    if of_experts:
        return torch.stack(tensors)
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def split(name: str, full: torch.Tensor, config: ModelConfig) -> list[torch.Tensor]:
    """The inverse of `fuse`."""
    _, of_experts, last = name.rpartition(".experts.")
    if of_experts and config.architecture.stacked_experts:
        return [_to_stacked(last, full)]
    if of_experts:
        return [half for expert in full for half in expert.chunk(2)] if "up" in last else list(full)
    if name.rpartition(".")[0].endswith("qkv_proj"):
        kv = config.num_key_value_heads * config.head_dim
        return list(full.split((config.num_attention_heads * config.head_dim, kv, kv)))
    return list(full.chunk(2)) if name.endswith("gate_up_proj.weight") else [full]


def _from_stacked(name: str, stored: torch.Tensor) -> torch.Tensor:
    """Experts that gpt-oss stores as [E, inputs, outputs], with outputs gate, up, gate, up, ...;
    their biases [E, outputs].
    """
    if name.startswith("gate_up_proj"):
        stored = torch.cat((stored[..., ::2], stored[..., 1::2]), -1)
    return stored if name.endswith("_bias") else stored.transpose(1, 2)


def _to_stacked(name: str, full: torch.Tensor) -> torch.Tensor:
    full = full if name.endswith("_bias") else full.transpose(1, 2)
    return torch.stack(full.chunk(2, -1), -1).flatten(-2) if "up" in name else full
