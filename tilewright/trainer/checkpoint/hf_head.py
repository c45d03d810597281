"""The head of a run's model: where it is another than that of a folder."""

from __future__ import annotations

import dataclasses
import pathlib

from tilewright.trainer.checkpoint.hf_names import read_config
from tilewright.trainer.models.items import number
from tilewright.trainer.models.model_config import ModelConfig, is_scored

SCORE = "score.weight"  # of a reward model
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
