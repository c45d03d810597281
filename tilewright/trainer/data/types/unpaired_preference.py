"""Answers that are desirable or not, one document each. Labels are the answer alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from tilewright.trainer.columns import IGNORE
from tilewright.trainer.data import chat
from tilewright.trainer.data.types.dataset_type import (
    DATASETS,
    Asked,
    DatasetType,
    Refused,
    Sample,
    flag,
)
from tilewright.trainer.data.types.preference import (
    check_text,
    last,
    tokens_of,
    with_shorter_prompt,
)
from tilewright.trainer.data.types.tokenized import check_tokens

YIELDS = ("desirable",)
IDS = ("prompt_ids", "completion_ids")


def _judged(row: dict[str, Any], sample: chat.Sample, asked: Asked) -> Sample:
    most = asked.most
    [sample], told = with_shorter_prompt([sample], asked.prompts, most)
    asked.told.update(told)
    if not isinstance(row["label"], bool):
        raise Refused(f"its label must be true or false, got {row['label']!r:.80}")
    if all(token == IGNORE for token in sample[1][1:most]):
        raise Refused(f"its completion has no token within {most}, the longest sample")
    return *sample, {"desirable": int(row["label"])}


def _unpaired(asked: Asked) -> Callable[[dict[str, Any]], Iterator[Sample]]:
    check_text(asked)
    chat.check_tokenizer(asked.path, asked.kind, asked.tokenizer, template=False)

    def samples(row: dict[str, Any]) -> Iterator[Sample]:
        made = chat.prompt_completion(asked.tokenizer, row, asked)
        yield _judged(row, last(made, "completion"), asked)

    return samples


def _tokenized(asked: Asked) -> Callable[[dict[str, Any]], Iterator[Sample]]:
    def samples(row: dict[str, Any]) -> Iterator[Sample]:
        [sample] = tokens_of(row, IDS)
        yield _judged(row, sample, asked)

    return samples


DATASETS.add(
    "unpaired_preference",
    DatasetType(
        (("prompt", "completion", "label"),),
        _unpaired,
        optional=("tools",),
        cells={"label": flag},
        says="answers that are desirable or not",
        yields=YIELDS,
        prompts=True,
    ),
)
DATASETS.add(
    "unpaired_preference_tokenized",
    DatasetType(
        ((*IDS, "label"),),
        _tokenized,
        cells={"label": flag},
        says="answers that are tokens, desirable or not",
        check=functools.partial(check_tokens, names=IDS),
        tokenizer=False,
        yields=YIELDS,
        prompts=True,
    ),
)
