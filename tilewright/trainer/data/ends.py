"""What begins a text and what ends an answer: tokens that a tokenizer or a chat template adds."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.trainer.checkpoint.hf_names import local_folder
from tilewright.trainer.data.fields import Dataset
from tilewright.trainer.data.types.dataset_type import DATASETS
from tilewright.trainer.models.fields import Model

BEGUN = (
    "samples begin with what the tokenizer puts before a text (BOS), which was not added once more"
)
ENDED = "samples end with the end token, which was not added once more"
ENDLESS = (
    "answers are learned without a token at which a model stops: the chat template has none after "
    "them"
)


def stops_of(model: Model, entries: Iterable[Dataset]) -> tuple[int, ...]:
    """The tokens at which generation stops, by generation_config.json of the model's folder and of
    the tokenizer's; none where no data set of `entries` has a tokenizer.
    """
    stops: set[int] = set()
    if not any(DATASETS[e.type].tokenizer for e in entries):
        return ()
    for path in {model.model_path or model.config_path, model.tokenizer_path} - {None}:
        try:
            folder = pathlib.Path(local_folder(str(path), model.revision))
        except FileNotFoundError:
            continue
        file = (folder.parent if folder.is_file() else folder) / "generation_config.json"
        if not file.is_file():
            continue
        try:
            given = json.loads(file.read_text()).get("eos_token_id")
        except (AttributeError, ValueError) as error:
            raise ValueError(f"{file}: cannot be read: {error}") from error
        stops |= {i for i in (given if isinstance(given, list) else [given]) if type(i) is int}
    return tuple(sorted(stops))


def without_twice(ids: Sequence[int] | np.ndarray, before: int) -> int:
    """How many first tokens are there twice: put before a text that begins with them.   before: how
    many were put there.
    """
    return before if before and list(ids[:before]) == list(ids[before : 2 * before]) else 0


@dataclass(frozen=True)
class Ends:
    """Tokens that end answers.

    stops: at which generation stops.   special: which no text has, but for BOS.   added: those, and
    others that no merging makes.   appended: what ends an answer that its template leaves open;
    None: nothing.
    """

    stops: frozenset[int]
    special: frozenset[int]
    added: frozenset[int]
    appended: int | None

    @classmethod
    def of(cls, tokenizer: Any, stops: Collection[int] = ()) -> Ends:
        """stops: of `stops_of`."""
        end, decoder = tokenizer.eos_token_id, tokenizer.added_tokens_decoder
        every_stop = frozenset(stops) | ({end} - {None})
        known = {*tokenizer.all_special_ids}
        special = known | {i for i, token in decoder.items() if token.special}
        return cls(
            every_stop,
            frozenset(special - ({getattr(tokenizer, "bos_token_id", None)} - every_stop)),
            frozenset(known | {*decoder}),
            min(every_stop, default=None) if end is None else end,
        )

    def of_answer(
        self, ids: Sequence[int], blank: Sequence[bool], first: int, last: int
    ) -> int | None:
        """Where the tokens `first` to `last` of an answer end with what ends it: a token of its
        own, or the next one, with which a template may begin the next message. None: nothing does.

        blank: whether a token is white space.
        """
        own = next((ids[i] for i in reversed(range(first, last)) if not blank[i]), None)
        if own in self.stops:
            return last
        after = next((i for i in range(last, len(ids)) if not blank[i]), None)
        if after is not None and ids[after] in self.stops:
            return after + 1
        if first == last or own in self.special:
            return last
        return after + 1 if after is not None and ids[after] in self.special else None


@functools.lru_cache(maxsize=16)
def ended_by_the_next(tokenizer: Any, template: str, ends: Ends) -> bool:
    """Whether a message of the assistant is ended by the first token of the next one, as GLM's are,
    so that something must be appended to the last one.   template: the tokenizer's.
    """
    said = (("user", "a"), ("assistant", "b"), ("user", "c"))
    turns = [{"role": role, "content": content} for role, content in said]
    try:
        one, two = (
            tokenizer.apply_chat_template(turns[:n], tokenize=False, chat_template=template)
            for n in (2, 3)
        )
    except Exception:  # raised by templates, for what they do not know
        return False
    if not two.startswith(one):
        return False
    rest = tokenizer(two[len(one) :].lstrip(), add_special_tokens=False)["input_ids"]
    return bool(rest) and rest[0] in ends.stops | ends.special
