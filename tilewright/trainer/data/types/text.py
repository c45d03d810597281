"""Documents, cut into samples of a bin's length."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tilewright.trainer.data.defects import kind_of
from tilewright.trainer.data.ends import BEGUN, ENDED, without_twice
from tilewright.trainer.data.types.dataset_type import DATASETS, Asked, DatasetType, Refused, Sample

# Characters that a tokenizer gets at once: its working memory is about a hundred bytes per token.
PIECE = 1 << 20
# A tokenizer splits text before the first character of a line, and before a space.
LINE = re.compile(r".*\n(?=\S)", re.DOTALL)
WORD = re.compile(r".+(?=\s)", re.DOTALL)


def _check(path: str, features: Any) -> None:
    kind = getattr(features.get("text"), "dtype", "list")
    if "text" in features and kind not in ("string", "large_string", "string_view", "null"):
        raise ValueError(f"{path}: the column `text` must hold strings, not {kind}")


def _samples(asked: Asked) -> Callable[[dict[str, Any]], Iterator[Sample]]:
    start_token, end_token = _around(asked.tokenizer)

    def samples(row: dict[str, Any]) -> Iterator[Sample]:
        """Samples of at most `asked.most` tokens, which join to the document and its end token."""
        text = row["text"]
        if text is None:
            raise Refused("it has no text")
        if not isinstance(text, str):
            said = f"{kind_of(text)}, {text!r:.60}"
            raise Refused(f"the column `text` must hold strings, not {said}")
        tokens = [start_token] if row.get("first", True) else []
        for piece in pieces(text):
            piece_ids = asked.tokenizer(piece, add_special_tokens=False)["input_ids"]
            tokens.append(np.array(piece_ids, np.int64))
        tokens += [end_token] if row.get("last", True) else []
        ids = np.concatenate(tokens)
        if row.get("first", True) and (twice := without_twice(ids, len(start_token))):
            ids = ids[twice:]
            asked.told[BEGUN] += 1
        if row.get("last", True) and (twice := without_twice(ids[::-1], len(end_token))):
            ids = ids[:-twice]
            asked.told[ENDED] += 1
        cuts = [*range(0, len(ids), asked.most), len(ids)]
        if len(ids) % asked.most == 1 and len(ids) > asked.most:
            cuts[-2] -= 1  # a single token has no target
        for first, stop in itertools.pairwise(cuts):
            yield ids[first:stop], ids[first:stop]

    return samples


def _around(tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """The tokens before and after a document: what the tokenizer puts before a text, and the end
    token.
    """
    plain, whole = (
        list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True)
    )
    starts = (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return np.array(whole[: next(starts, 0)], np.int64), np.array(end, np.int64)


def pieces(text: str) -> Iterator[str]:
    """Cuts a long text after line ends, else before spaces, into pieces of bounded size."""
    start = 0
    while len(text) - start > PIECE:
        window = text[start : start + PIECE]
        match = LINE.match(window) or WORD.match(window)
        stop = start + (match.end() if match else PIECE)
        yield text[start:stop]
        start = stop
    yield text[start:]


# Only an empty document is shorter than two tokens.
DATASETS.add(
    "text", DatasetType((("text",),), _samples, says="text", check=_check, counts_short=False)
)
