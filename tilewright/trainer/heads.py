"""Which head a run's model has, and where its weights come from."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Collection

from tilewright.trainer.checkpoint import hf
from tilewright.trainer.models.items import number
from tilewright.trainer.models.model_config import ModelConfig

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
    config = hf.read_config(folder)
    given = (*tokenizer, config.get("pad_token_id"), config.get("eos_token_id"))
    for token in given:
        token = token[0] if isinstance(token, list) and token else token
        if type(token) is int:
            return token
    return None


def drawn(folder: str | pathlib.Path, shape: ModelConfig) -> tuple[Collection[str], float]:
    """The weights of a model of this shape that a folder does not hold, since it is that of a
    language model; and their standard deviation, as in transformers.
    """
    try:
        config = hf.read_config(folder)
    except FileNotFoundError:  # weights alone
        config = {}
    names = config.get("architectures") or []
    scored = any(str(name).endswith("ForSequenceClassification") for name in names)
    missing = [] if shape.head != "reward" or scored else [SCORE]
    return missing, number(config, "initializer_range", DEVIATION, float) if missing else 0.0
