"""What is asked for, and how a token is drawn from logits."""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

import torch


class Asked(NamedTuple):
    """One sample of a prompt.

    tokens: the prompt's.   seed, sample: with the position of a token, what its random number
    depends on.   max_tokens: at most so many follow.   temperature: 0 takes the most probable
    token.   top_k: draws among so many; -1 for all.   top_p: and among those that together have
    this probability.   ends: tokens that end a sample, and are its last.   stops: texts that do.
    topk: the most probable tokens at each of its tokens, so many.   scored: tokens whose
    log-probabilities are told at each, too.
    """

    tokens: list[int]
    max_tokens: int
    seed: int = 0
    sample: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    ends: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    topk: int = 0
    scored: tuple[int, ...] = ()


def number(seed: int, sample: int, position: int) -> float:
    """A number from 0 to 1, the same whatever else is drawn: uniform over 2^53 values."""
    given = struct.pack("<QQQ", seed % (1 << 64), sample, position)
    digest = hashlib.blake2b(given, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def drawn(logits: torch.Tensor, asked: Asked, place: float) -> int:
    """The token at a place, from 0 to 1, of the cumulated distribution of logits [V]: in the order
    of tokens, or where top_k or top_p leave some out, the most probable first.
    """
    if not asked.temperature:
        return int(logits.argmax())
    p = (logits.double() / asked.temperature).softmax(-1)
    if asked.top_k < 0 and asked.top_p >= 1:
        return min(int(torch.searchsorted(p.cumsum(-1), place, right=True)), len(p) - 1)
    ordered, ids = p.sort(descending=True, stable=True)
    return int(ids[reached(ordered, asked.top_k, asked.top_p, place)])


def reached(p: torch.Tensor, top_k: int, top_p: float, place: float) -> int:
    """Which of these probabilities, the largest first, is at a place of what top_k and top_p leave
    of their cumulated distribution. They are overwritten.
    """
    if top_k > 0:
        p[top_k:] = 0
    before = p.cumsum(-1) - p
    p[before >= top_p * p.sum()] = 0
    return int((p.cumsum(-1) > place * p.sum()).int().argmax())
