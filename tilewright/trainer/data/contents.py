"""What a run's samples are made of, by content: the data, what their columns hold of others, and
the tokenizer with its chat template.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from typing import Any

from tilewright.trainer.checkpoint import hf
from tilewright.trainer.checkpoint.hf_names import CHAT_TEMPLATES
from tilewright.trainer.checkpoint.made_of import Thing
from tilewright.trainer.data.batches import Bins
from tilewright.trainer.data.cache_key import files_of, tokenizer_folder
from tilewright.trainer.data.data_files import digests
from tilewright.trainer.data.fields import Data
from tilewright.trainer.data.prepared import is_saved
from tilewright.trainer.data.types.dataset_type import DATASETS
from tilewright.trainer.models.fields import Model

TEMPLATE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
VOCABULARIES = (".model", ".tiktoken")
# Items of tokenizer_config.json that say where and by what it was written; no text depends on them.
WRITTEN = {
    "is_local",
    "local_files_only",
    "name_or_path",
    "special_tokens_map_file",
    "tokenizer_file",
    "transformers_version",
}


def digest(what: Any) -> str:
    """A hash of what JSON can hold."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def of_samples(data: Data, bins: Bins) -> dict[str, Thing]:
    """The samples to train on, and what a teacher, an engine or a reference has written beside
    them (`Column.part`). Where not all samples are hashed, their files are.
    """
    root, saved = data.dataset_prepared_path, is_saved(data)
    places = [root] if saved else [*dict.fromkeys(entry.path for entry in data.datasets)]
    things = {part: Thing(digest, places) for part, digest in bins.parts().items()}
    if bins.sampled:
        files = (
            [digests(str(file)).sha256 for file in sorted(pathlib.Path(root).glob("*.arrow"))]
            if saved
            else [f["sha256"] for f in files_of(data.datasets, root, 1)]
        )
        things["data"] = Thing(digest([things["data"].digest, files]), places)
    return things


def tokenizes(data: Data) -> bool:
    """Whether samples are made with the tokenizer."""
    return any(DATASETS[e.type].tokenizer for e in (*data.datasets, *data.test_datasets))


def of_tokenizer(model: Model) -> dict[str, Thing]:
    """The tokenizer and its chat template, wherever in its folder that is; {} without one."""
    if (folder := tokenizer_folder(model)) is None:
        return {}
    files, templates = {}, {}
    for file in sorted(folder.iterdir()):
        if file.name == TEMPLATE:
            templates["default"] = file.read_text("utf-8", "replace")
        elif file.name == SETTINGS:
            files[file.name], within = _settings(file)
            templates = {**within, **templates}
        elif file.name in hf.TOKENIZER_FILES or file.suffix in VOCABULARIES:
            files[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    for file in sorted(folder.glob(f"{CHAT_TEMPLATES}/*.jinja")):
        templates[file.stem] = file.read_text("utf-8", "replace")
    parts, places = {"tokenizer": files, "template": templates}, [str(model.tokenizer_path)]
    return {name: Thing(digest(what), places) for name, what in parts.items() if what}


def _settings(file: pathlib.Path) -> tuple[Any, dict[str, str]]:
    """tokenizer_config.json without its templates and what is `WRITTEN`, and these by name."""
    text = file.read_bytes()
    try:
        settings = json.loads(text)
        given = settings.pop("chat_template", None) or {}
        settings = {name: value for name, value in settings.items() if name not in WRITTEN}
    except (ValueError, AttributeError):  # transformers says what is wrong with it
        return hashlib.sha256(text).hexdigest(), {}
    if isinstance(given, list):
        given = {str(one.get("name")): one.get("template") for one in given}
    return settings, given if isinstance(given, dict) else {"default": given}
