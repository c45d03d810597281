"""Pairs of answers to one prompt, of which one is preferred, as two documents each: the chosen
answer, then the rejected one. Labels are the answers alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from tilewright.trainer.columns import IGNORE
from tilewright.trainer.data import chat
from tilewright.trainer.data.types.dataset_type import (
    DATASETS,
    Asked,
    DatasetType,
    Prompts,
    Refused,
    Sample,
    number,
)
from tilewright.trainer.data.types.tokenized import check_tokens, tokens

ROLES = ("chosen", "rejected")  # by number
LEAST = 10  # tokens that a cut prompt leaves of a document, as in ERNIEKit
YIELDS = ("pair", "role", "reward", "prefix")
SCORES = ("chosen_score", "rejected_score")
IDS = ("prompt_ids", "chosen_ids", "rejected_ids")


def _scores(row: dict[str, Any]) -> tuple[float, ...]:
    """Those of the chosen and of the rejected answer; nothing if there are none."""
    if all(row.get(name) is None for name in SCORES):
        return ()
    chosen, rejected = (_number(row.get(name), name) for name in SCORES)
    if chosen <= rejected:
        raise Refused(f"its chosen_score {chosen:g} is not above its rejected_score {rejected:g}")
    return chosen, rejected


def _number(given: Any, name: str) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise Refused(f"its {name} must be a finite number, got {given!r:.80}")
    return float(given)


def _pair(
    answers: list[chat.Sample], asked: Asked, scores: tuple[float, ...] = (), number: int = 0
) -> Iterator[Sample]:
    """The two documents. Each has at most half of a bin, so that both are in one: answers are cut
    from their ends.   number: the pair's number in its row.
    """
    if answers[0] == answers[1]:
        raise Refused("its chosen answer is its rejected one")
    half = asked.most // 2
    answers, told = with_shorter_prompt(answers, asked.prompts, half)
    cut = [(ids[:half], labels[:half]) for ids, labels in answers]
    for name, (_, labels) in zip(ROLES, cut, strict=True):
        if all(token == IGNORE for token in labels[1:]):
            raise Refused(
                f"its {name} answer has no token within {half}, half of the longest sample; a "
                "longer bin (data.sample_packing_sequence_len), max_seq_len, or a shorter prompt "
                "(preference.max_prompt_len) would leave one"
            )
    if cut[0] == cut[1]:
        raise Refused(f"its answers are equal within {half} tokens, to which they are cut")
    if longer := sum(len(ids) > half for ids, _ in answers):
        told[f"answers were cut at their ends, to documents of {half} tokens"] = longer
    asked.told.update(told)
    prefixes = 0, _shared(cut[0][0], *cut[1])
    for role, ((ids, labels), prefix) in enumerate(zip(cut, prefixes, strict=True)):
        own = {"reward": scores[role]} if scores else {}
        yield ids, labels, {"pair": number, "role": role, "prefix": prefix, **own}


def _shared(chosen: list[int], rejected: list[int], labels: list[int]) -> int:
    """How many first tokens both have that predict no label of the rejected answer: of a prompt all
    but the last one, from which each answer's first token is predicted.
    """
    count, most = 0, min(len(chosen), len(rejected) - 1)
    while count < most and chosen[count] == rejected[count] and labels[count + 1] == IGNORE:
        count += 1
    return count


def with_shorter_prompt(
    answers: list[chat.Sample], prompts: Prompts, most: int
) -> tuple[list[chat.Sample], dict[str, int]]:
    """Answers to one prompt, without the same of its tokens, and what is told of that.

    most: tokens of a document, of which an answer has LEAST.
    """
    if prompts.most is None:
        return answers, {}
    limit = min(prompts.most, most - LEAST)
    ends = [next((i for i, t in enumerate(of) if t != IGNORE), len(of)) for _, of in answers]
    common = 0  # the last token may belong to an answer too, and then is another one
    while common < min(ends) and len({ids[common] for ids, _ in answers}) == 1:
        common += 1
    if (over := min(max(ends) - limit, common)) <= 0:
        return answers, {}
    first = 0 if prompts.keep == "keep_end" else common - over
    shorter = [
        (ids[:first] + ids[first + over :], of[:first] + of[first + over :]) for ids, of in answers
    ]
    return shorter, {
        f"prompts were cut to {limit} tokens (preference.max_prompt_len, {prompts.keep})": 1
    }


def last(samples: list[chat.Sample], name: str) -> chat.Sample:
    """The sample of the whole conversation."""
    if len(samples) > 1:
        raise Refused(
            f"its {name} conversation has several answers, of which the chat template renders an "
            "earlier one in another way once it goes on; give the earlier turns in `prompt`"
        )
    return samples[0]


def _answers(row: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The prompt of a row, and the two answers to it: strings, or lists of messages."""
    prompt = row.get("prompt")
    both: list[Any] = [row.get(name) for name in ROLES]
    if any(isinstance(b, list) for b in both):
        if not all(isinstance(b, list) and b for b in both):
            raise Refused("chosen and rejected must both be strings, or lists of messages")
        if prompt is None:  # TRL's implicit prompt: what both begin with
            count = 0
            while count < min(map(len, both)) - 1 and both[0][count] == both[1][count]:
                count += 1
            if not count:
                raise Refused("it has no prompt, and chosen and rejected begin with other messages")
            return both[0][:count], [b[count:] for b in both]
        if not isinstance(prompt, list):
            raise Refused("its prompt must be a list of messages, as chosen and rejected are")
        return prompt, both
    if prompt is None and all(isinstance(b, str) and b for b in both):
        count = implicit_prompt(*both)
        return both[0][:count], [b[count:] for b in both]
    for name, answer in zip(ROLES, both, strict=True):
        if not isinstance(prompt, str) or not isinstance(answer, str):
            raise Refused(f"prompt and {name} must both be strings, or lists of messages")
        if not answer:
            raise Refused(f"its {name} answer is empty")
    return prompt, both


def implicit_prompt(chosen: str, rejected: str) -> int:
    """The number of characters that both begin with, as TRL's extract_prompt takes them: at least
    one is left of each, and a space before the first difference is the answers'.
    """
    most = min(len(chosen), len(rejected)) - 1
    count = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    if chosen[count] != rejected[count] and chosen[:count].endswith(" "):
        count -= 1
    if not count:
        raise Refused("it has no prompt, and chosen and rejected begin with other characters")
    return count


def check_text(asked: Asked) -> None:
    """Raises ValueError for TRL's columns of pictures."""
    if pictures := {"images", "image"} & {*asked.columns}:
        raise ValueError(
            f"{asked.path}: type {asked.kind} reads no column `{min(pictures)}`: models here read "
            "text alone; data.select_columns leaves a column out"
        )


def _preference(asked: Asked) -> Callable[[dict[str, Any]], Iterator[Sample]]:
    check_text(asked)
    chat.check_tokenizer(asked.path, asked.kind, asked.tokenizer, template=False)

    def samples(row: dict[str, Any]) -> Iterator[Sample]:
        prompt, answers = _answers(row)
        made = []
        for name, answer in zip(ROLES, answers, strict=True):
            given = {"prompt": prompt, "completion": answer, "tools": row.get("tools")}
            made.append(last(chat.prompt_completion(asked.tokenizer, given, asked), name))
        return _pair(made, asked, _scores(row))

    return samples


def tokens_of(row: dict[str, Any], names: tuple[str, ...]) -> list[chat.Sample]:
    """The sample of each answer, from columns of tokens: a prompt and answers to it."""
    columns = []
    for name in names:
        given = row.get(name)
        if given is None or given == []:
            raise Refused(f"its {name} are {'null' if given is None else 'empty'}")
        if isinstance(given, list) and None in given:
            raise Refused(f"a token of its {name} is null")
        ids = tokens(given, name)
        assert ids is not None
        columns.append(ids.tolist())
    prompt, *answers = columns
    return [(prompt + a, [IGNORE] * len(prompt) + a) for a in answers]


def _tokenized(asked: Asked) -> Callable[[dict[str, Any]], Iterator[Sample]]:
    return lambda row: _pair(tokens_of(row, IDS), asked, _scores(row))


def _erniekit(asked: Asked) -> Callable[[dict[str, Any]], Iterator[Sample]]:
    """Rows with the user's turns `src`, the assistant's before the last of them `tgt`, and
    responses, of which the one with the greater `sort` is chosen: every pair of them.
    """
    chat.check_tokenizer(asked.path, asked.kind, asked.tokenizer)

    def samples(row: dict[str, Any]) -> Iterator[Sample]:
        src, tgt = chat.strings(row, "src"), chat.strings(row, "tgt")
        if len(src) != len(tgt) + 1:
            raise Refused(f"it has {len(src)} src and {len(tgt)} tgt; accepted is one src more")
        texts = [t for pair in itertools.zip_longest(src, tgt) for t in pair if t is not None]
        prompt = chat.turns(texts, "user", chat.text(row, "system"))
        ranks, responses = row["sort"], row["response"]
        if not isinstance(responses, list) or len(responses) < 2:
            raise Refused("its response must be a list of two responses or more")
        if not isinstance(ranks, list) or len(ranks) != len(responses):
            raise Refused(f"its sort must be {len(responses)} numbers, one per response")
        scores = [_number(score, "sort") for score in ranks]
        if len({*scores}) < len(scores):
            raise Refused(f"two of its responses have one value of sort: {scores}")
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        answers = [_response(asked, prompt, responses[i]) for i in order]
        for nth, (i, j) in enumerate(itertools.combinations(range(len(order)), 2)):
            both = scores[order[i]], scores[order[j]]
            yield from _pair([answers[i], answers[j]], asked, both, nth)

    return samples


def _response(asked: Asked, prompt: list[dict[str, Any]], given: Any) -> chat.Sample:
    texts = chat.strings({"response": given}, "response")
    if len(texts) % 2 == 0:
        raise Refused(f"a response has {len(texts)} turns, and must end with the assistant's")
    turns = chat.turns(texts, "assistant")
    given = {"prompt": prompt, "completion": turns}
    return last(chat.prompt_completion(asked.tokenizer, given, asked), "response")


DATASETS.add(
    "preference",
    DatasetType(
        (("chosen", "rejected"),),
        _preference,
        optional=("prompt", "tools", *SCORES),
        cells=dict.fromkeys(SCORES, number),
        says="pairs of answers",
        yields=YIELDS,
        prompts=True,
        version=1,
    ),
)
DATASETS.add(
    "preference_erniekit",
    DatasetType(
        (("src", "tgt", "response", "sort"),),
        _erniekit,
        optional=("system",),
        says="ERNIEKit's ranked responses",
        yields=YIELDS,
        prompts=True,
        version=1,
    ),
)
DATASETS.add(
    "preference_tokenized",
    DatasetType(
        (IDS,),
        _tokenized,
        optional=SCORES,
        cells=dict.fromkeys(SCORES, number),
        says="pairs of answers that are tokens",
        check=functools.partial(check_tokens, names=IDS),
        tokenizer=False,
        yields=YIELDS,
        prompts=True,
        version=1,
    ),
)
