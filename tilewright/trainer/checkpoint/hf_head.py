"""The head of a run's model: where it is another than that of a folder."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from tilewright.trainer.checkpoint.hf_folder import Folder
from tilewright.trainer.checkpoint.hf_names import read_config
from tilewright.trainer.models.families.reading import number
from tilewright.trainer.models.model_config import ModelConfig, is_scored

SCORE = "score.weight"  # of a reward model
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DEVIATION = 0.02  # transformers' initializer_range


def with_head(shape: ModelConfig, head: str, padding: int | None) -> ModelConfig:
    """The shape with another head.   padding: of a reward model whose folder names none."""
    if head != "reward":
        return dataclasses.replace(shape, head=head, pad_token_id=None)
    if shape.pad_token_id is not None:
        padding = shape.pad_token_id
    return dataclasses.replace(shape, head=head, pad_token_id=padding)


def padding_of(folder: str | pathlib.Path, tokenizer: tuple[int | None, int | None]) -> int | None:
    """The padding token that transformers and TRL take, or else the end token: of the tokenizer,
    or of config.json where it has neither.

    tokenizer: its padding token and its end token.
    """
    config = read_config(folder)
    given = (*tokenizer, config.get("pad_token_id"), config.get("eos_token_id"))
    for token in given:
        token = token[0] if isinstance(token, list) and token else token
        if type(token) is int:
            return token
    return None


def stores_another_head(folder: Folder, shape: ModelConfig) -> bool:
    """Whether a folder of a model with a tied head stores one that is not the embedding, as merging
    adapters of the head into it leaves it. transformers then keeps both.
    """
    if not shape.tied or HEAD not in folder or EMBEDDING not in folder:
        return False
    return not folder.equal(HEAD, EMBEDDING)


def untied(path: str, shape: ModelConfig, given: Mapping[str, Any]) -> bool:
    """Whether a model of this shape has two weights although its config.json ties them.

    path: the folder of its weights.   given: entries that replace those of config.json.
    """
    try:
        other = stores_another_head(Folder(path), shape)
    except FileNotFoundError:  # who loads the weights says so
        return False
    if other and given.get("tie_word_embeddings"):
        raise ValueError(
            f"model.foundation: tie_word_embeddings = True, and {path} stores {HEAD}, which is not "
            f"{EMBEDDING}; leave it out, or remove {HEAD} from the folder"
        )
    return other


def drawn(folder: str | pathlib.Path, shape: ModelConfig) -> tuple[list[str], float]:
    """The weights of a model of this shape that a folder does not hold, since it is that of a
    language model; and their standard deviation, as in transformers.
    """
    try:
        config = read_config(folder)
    except FileNotFoundError:  # weights alone
        config = {}
    if shape.head != "reward" or is_scored(config):
        return [], DEVIATION
    return [SCORE], number(config, "initializer_range", DEVIATION, float)
