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
from tilewright.trainer.models.stored import Rows

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
    return config.architecture.stored.sources(name, config)


def fuse(name: str, tensors: list[torch.Tensor], config: ModelConfig) -> torch.Tensor:
    """A parameter, of its sources; where it is some of their rows, of those."""
    whole, rows = config.architecture.stored.fuse(name, tensors), rows_of(name, config)
    return whole if rows is None else whole[rows.first : rows.end]


def rows_of(name: str, config: ModelConfig) -> Rows | None:
    """The rows of its only source that a parameter is; None: all."""
    return config.architecture.stored.rows(name, config)


def split(name: str, full: torch.Tensor, config: ModelConfig) -> list[torch.Tensor]:
    """The inverse of `fuse`; of a parameter that is some rows of its source, those."""
    return config.architecture.stored.split(name, full, config)
