"""ERNIEKit's conversations, and Alpaca's as it reads them.

Source: docs/datasets.md of PaddlePaddle/ERNIE.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from tilewright.trainer.data import chat
from tilewright.trainer.data.types.dataset_type import DATASETS, Asked, DatasetType, Refused


def _samples(
    asked: Asked, system: str, src: list[str], tgt: list[str], label: list[int] | None = None
) -> list[chat.Sample]:
    """Samples of the user's and the assistant's turns.   label: 1 for each learned item of tgt."""
    texts = itertools.chain(*zip(src, tgt, strict=True))
    learned = None
    if label is not None and not all(label):
        learned = {2 * i + 1 + bool(system) for i, one in enumerate(label) if one}
    messages = chat.turns(texts, "user", system)
    return chat.conversation(asked, messages, learned)


def _erniekit(asked: Asked) -> Callable[[dict[str, Any]], list[chat.Sample]]:
    chat.check_tokenizer(asked.path, asked.kind, asked.tokenizer)

    def samples(row: dict[str, Any]) -> list[chat.Sample]:
        src, tgt, label = chat.strings(row, "src"), chat.strings(row, "tgt"), row.get("label")
        if len(src) != len(tgt):
            raise Refused(f"it has {len(src)} src and {len(tgt)} tgt; accepted is as many of each")
        if label is not None and (
            not isinstance(label, list)
            or len(label) != len(tgt)
            or any(one not in (0, 1) for one in label)
        ):
            raise Refused(f"its label must be {len(tgt)} values of 0 and 1, got {label!r:.80}")
        if label is not None and not any(label):
            raise Refused("its label has no 1, so that nothing is learned")
        return _samples(asked, chat.text(row, "system"), src, tgt, label)

    return samples


def _alpaca(asked: Asked) -> Callable[[dict[str, Any]], list[chat.Sample]]:
    chat.check_tokenizer(asked.path, asked.kind, asked.tokenizer)

    def samples(row: dict[str, Any]) -> list[chat.Sample]:
        earlier = [] if row.get("history") is None else row["history"]
        if not isinstance(earlier, list) or not all(
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) for t in pair)
            for pair in earlier
        ):
            raise Refused(f"its history must be pairs of strings, got {earlier!r:.80}")
        instruction, output, more = (
            chat.text(row, name) for name in ("instruction", "output", "input")
        )
        if not instruction + more or not output:
            raise Refused("its instruction or its output is empty")
        src = [question for question, _ in earlier] + [instruction + more]
        return _samples(asked, chat.text(row, "system"), src, [a for _, a in earlier] + [output])

    return samples


DATASETS.add(
    "erniekit",
    DatasetType(
        (("src", "tgt"),), _erniekit, optional=("system", "label"), says="ERNIEKit's conversations"
    ),
)
DATASETS.add(
    "alpaca",
    DatasetType(
        (("instruction", "output"),),
        _alpaca,
        optional=("input", "system", "history"),
        says="instructions",
    ),
)
