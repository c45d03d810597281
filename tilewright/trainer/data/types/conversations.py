"""Conversations, and prompts with completions (see `data.chat`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewright.trainer.data import chat
from tilewright.trainer.data.types.dataset_type import DATASETS, Asked, DatasetType


def _chat(asked: Asked) -> Callable[[dict[str, Any]], list[chat.Sample]]:
    chat.check_tokenizer(asked.path, asked.kind, asked.tokenizer)
    return lambda row: chat.chat(asked.tokenizer, row, asked)


def _prompt_completion(asked: Asked) -> Callable[[dict[str, Any]], list[chat.Sample]]:
    chat.check_tokenizer(asked.path, asked.kind, asked.tokenizer, template=False)
    return lambda row: chat.prompt_completion(asked.tokenizer, row, asked)


DATASETS.add(
    "chat",
    DatasetType(
        (("messages",), ("conversations",)), _chat, optional=("tools",), says="conversations"
    ),
)
DATASETS.add(
    "prompt_completion",
    DatasetType(
        (("prompt", "completion"),), _prompt_completion, optional=("tools",), says="prompts"
    ),
)
