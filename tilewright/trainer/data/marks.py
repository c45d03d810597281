"""Marks by which messages say whether they are learned, as other tools write them."""

from __future__ import annotations

import re
from typing import Any

from tilewright.trainer.data.types.dataset_type import Refused

# OpenAI's and Mistral's weight; train, training and trainable of axolotl and others; loss of
# ms-swift and xtuner; loss_mask of conversations for reinforcement learning.
MARKS = ("weight", "train", "training", "trainable", "loss", "loss_mask")
# Other tools' names, for marks of parts of a message, of how much is learned, or with 1 for 0.
OTHERS = re.compile(
    r"(.*_)?(loss(es)?|train(ing|able|ed)?|weights?|mask(s|ed)?|learn(ed|able)?|ignored?)(_.*)?"
)
# Columns that are marks, whatever else rows have; others of such a name may mean other things.
OF_ROWS = re.compile(
    r"(loss|completion|assistants?|labels?|targets?|response|prompt)_masks?|trainable"
    r"|((loss|sample|token)_)?weights|(loss|sample|token)_weight|loss_scales?"
)
ACCEPTED = "accepted are 0 and 1, or false and true"


def unmarked(message: dict[str, Any], at: str) -> tuple[dict[str, Any], bool | None]:
    """A message without its marks, and whether they say that it is learned; None: it has none.

    at: where it is, for errors. A null is no mark.
    """
    names = [*MARKS, *(name for name in message if name not in MARKS and OTHERS.fullmatch(name))]
    given = {name: message[name] for name in names if message.get(name) is not None}
    for name, value in given.items():
        if name not in MARKS:
            raise Refused(f"{at} has {name}, which is not read; {', '.join(MARKS)} are")
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise Refused(f"{at} has {name} = {value!r:.60}; {ACCEPTED}")
    rest = {name: value for name, value in message.items() if name not in names}
    if len({bool(value) for value in given.values()}) > 1:
        both = " and ".join(f"{name} = {value!r}" for name, value in given.items())
        raise Refused(f"{at} has {both}, which contradict each other")
    for name, value in given.items():
        if value and message["role"] != "assistant":
            raise Refused(
                f"{at} has {name} = {value!r} and the role {message['role']!r}; only messages of "
                "the assistant are learned"
            )
        return rest, bool(value)
    return rest, None
