"""Conversations, and prompts with completions, as tokens whose labels are the answers alone.

A sample is (input_ids, labels); labels are -100 outside the answers. The text of a conversation is
what the tokenizer's chat template renders, and is tokenized as a whole, so that its tokens are
those that the model sees when it is used.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from tilewright.trainer.columns import IGNORE
from tilewright.trainer.data.ends import (
    BEGUN,
    ENDLESS,
    Ends,
    ended_by_the_next,
    without_twice,
)
from tilewright.trainer.data.marks import MARKS, unmarked
from tilewright.trainer.data.types.dataset_type import Asked, Refused

ROLES = ("system", "developer", "user", "assistant", "tool")
SHARE_GPT = {"human": "user", "gpt": "assistant"}
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

Sample = tuple[list[int], list[int]]


def check_tokenizer(path: str, kind: str, tokenizer: Any, *, template: bool = True) -> None:
    """Raises ValueError if `tokenizer` cannot prepare rows of this type.

    path: the path of the data set.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{path}: type {kind} needs a tokenizer that gives the offsets of tokens, which "
            f"{type(tokenizer).__name__} does not"
        )
    if template:
        try:
            check_template(kind, tokenizer)
        except Refused as refused:
            raise ValueError(f"{path}: {refused}") from refused


def check_template(kind: str, tokenizer: Any) -> None:
    """Raises Refused, for a row of messages, if `tokenizer` has no chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise Refused(
            f"type {kind} needs a tokenizer with a chat template; model.tokenizer_path names one "
            "without"
        )


def chat(tokenizer: Any, row: dict[str, Any], asked: Asked | None = None) -> list[Sample]:
    """The samples of a row with `messages` or `conversations` and, if there, `tools`.

    asked: whose log is told of them.
    """
    column = "messages" if row.get("messages") is not None else "conversations"
    messages, marks = _messages(row, column)
    if messages[0]["role"] == "assistant" and marks[0]:
        raise Refused(
            f"{column}[0] is marked to be learned, and opens the conversation, so that it answers "
            "nothing"
        )
    asked = asked or _alone(tokenizer, "chat")
    return conversation(asked, messages, _learned(marks), _tools(row))


def prompt_completion(
    tokenizer: Any, row: dict[str, Any], asked: Asked | None = None
) -> list[Sample]:
    """The samples of a row with `prompt` and `completion`: strings, or lists of messages.

    asked: whose log is told of them.
    """
    asked = asked or _alone(tokenizer, "prompt_completion")
    if isinstance(row.get("completion"), list):
        check_template(asked.kind, tokenizer)
    kinds = {name: type(row.get(name)) for name in ("prompt", "completion")}
    if kinds["prompt"] is kinds["completion"] is str:
        return [_continued(asked, row["prompt"], row["completion"])]
    if kinds["prompt"] is kinds["completion"] is list:
        prompt, _ = _messages(row, "prompt")
        completion, marks = _messages(row, "completion")
        learned = _learned([None] * len(prompt) + marks)
        return conversation(asked, prompt + completion, learned, _tools(row), len(prompt))
    given = " and ".join("null" if k is type(None) else k.__name__ for k in kinds.values())
    raise Refused(f"prompt and completion must be strings, or lists of messages, not {given}")


def _alone(tokenizer: Any, kind: str) -> Asked:
    """For samples of no data set, whose log nobody reads."""
    return Asked("", kind, 0, tokenizer, ())


def strings(row: dict[str, Any], name: str) -> list[str]:
    """A column of a text or of texts, none of them empty."""
    given = [row[name]] if isinstance(row[name], str) else row[name]
    if not isinstance(given, list) or not all(isinstance(s, str) and s for s in given):
        raise Refused(f"its {name} must be strings that are not empty, got {given!r:.80}")
    return given


def text(row: dict[str, Any], name: str) -> str:
    """A column of a text, empty if there is none."""
    if (given := row.get(name)) is not None and not isinstance(given, str):
        raise Refused(f"its {name} must be a string, got {given!r:.80}")
    return given or ""


def turns(texts: Iterable[str], first: str, system: Any = None) -> list[dict[str, Any]]:
    """Messages of the user and the assistant in turn, after the system's, if it has any text."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, *({"role": roles[i % 2], "content": t} for i, t in enumerate(texts))]


def _continued(asked: Asked, prompt: str, completion: str) -> Sample:
    if not completion:
        raise Refused("its completion is empty")
    tokenizer = asked.tokenizer
    encoded = tokenizer(prompt + completion, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    labels = [
        token if end > len(prompt) else IGNORE for token, (_, end) in zip(ids, offsets, strict=True)
    ]
    if (end := tokenizer.eos_token_id) is not None:
        if ids[-1] != end:
            ids.append(end)
            labels.append(end)
        labels[-1] = end  # also if the tokenizer has added it, outside the text
    before = next((i for i, (_, stop) in enumerate(offsets) if stop), len(offsets))
    if twice := without_twice(ids, before):
        ids, labels = ids[twice:], labels[twice:]
        asked.told[BEGUN] += 1
    return ids, labels


def _learned(marks: list[bool | None]) -> list[int] | None:
    """Which messages may be learned; None: no mark says that one is not."""
    return [i for i, mark in enumerate(marks) if mark is not False] if False in marks else None


def _messages(row: dict[str, Any], column: str) -> tuple[list[dict[str, Any]], list[bool | None]]:
    """The messages of a column, in the form that templates read, and what marks say of each."""
    given = row.get(column)
    if not isinstance(given, list) or not given:
        said = "null" if given is None else f"a {type(given).__name__}"
        raise Refused(
            f"its {column} {'are empty' if given == [] else f'must be a list, not {said}'}"
        )
    each = [unmarked(_message(m, f"{column}[{i}]"), f"{column}[{i}]") for i, m in enumerate(given)]
    return [m for m, _ in each], [mark for _, mark in each]


def _message(given: Any, at: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise Refused(f"{at} must have role and content, and is {given!r:.60}")
    message = {k: v for k, v in given.items() if v is not None}  # null: not given
    if "role" not in message and "from" in message:  # the ShareGPT form
        sender = message.pop("from")
        message["role"] = sender
        message["content"] = message.pop("value", None)
    if isinstance(role := message.get("role"), str):
        message["role"] = SHARE_GPT.get(role, role)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        known = ", ".join([*ROLES, *SHARE_GPT])
        raise Refused(f"{at} has the role {role!r}; known are {known}")
    if content is None and role == "assistant" and message.get("tool_calls"):
        return message | {"content": ""}
    if not isinstance(content, str):
        said = "no content" if content is None else f"content of type {type(content).__name__}"
        raise Refused(f"{at} has {said}; a text is needed")
    return message


def _tools(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that a row offers: a list of JSON schemas, or that list as a JSON string."""
    import json

    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise Refused(f"its tools are not JSON: {error}") from error
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise Refused("its tools must be a list of JSON schemas, or that list as a string")
    return tools or None


def conversation(
    asked: Asked,
    messages: list[dict[str, Any]],
    learned: Collection[int] | None = None,
    tools: list[dict[str, Any]] | None = None,
    first: int = 0,
) -> list[Sample]:
    """The samples of a conversation, whose answers are the assistant's messages from `first` on. A
    message that opens it answers nothing; what follows the last answer is left out.

    learned: which messages may be learned; None: all.   tools: JSON schemas.
    """
    tokenizer = asked.tokenizer
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= max(1, first)]
    if not answers:
        raise Refused("it has no answer: no message of the assistant that follows another message")
    if learned is not None and not (answers := [i for i in answers if i in learned]):
        raise Refused(
            f"none of its answers is learned: a mark of each says so ({', '.join(MARKS)}: 0 or false)"
        )
    messages = messages[: answers[-1] + 1]
    try:
        template = tokenizer.get_chat_template(tools=tools)
        # Blocks mark every message of the assistant: also the prompt's, and what opens it.
        marked = not first and messages[0]["role"] != "assistant" and MARKED.search(template)
        texts = [_marked(tokenizer, messages, tools)] if marked else []
        if texts and learned is not None:
            turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
            [(text, spans)] = texts
            marked = len(spans) == len(turns)  # else nobody knows whose they are
            own = [span for i, span in zip(turns, spans, strict=False) if i in answers]
            texts = [(text, own)]
        if not marked:
            texts = list(_chains(tokenizer, messages, tools, answers))
    except Refused:
        raise
    except Exception as error:  # raised by templates, for what they do not know
        reason = " ".join(str(error).split())[:200]
        raise Refused(f"the chat template cannot render it: {reason}") from error
    ends, samples = Ends.of(tokenizer, asked.stops), []
    for text, spans in texts:
        ids, labels, opened = _labeled(tokenizer, text, spans, ends, trim=not marked)
        end = ends.appended if opened and opened[-1].at_end else None
        if end is not None and ended_by_the_next(tokenizer, template, ends):
            last = opened.pop()
            ids.append(end)
            labels[last.first :] = ids[last.first :]
        if opened:
            asked.told[ENDLESS] += len(opened)
        samples.append((ids, labels))
    return samples


Marked = tuple[str, list[tuple[int, int]]]  # a text, and (start, end) of the answers in it


def _marked(tokenizer: Any, messages: list[dict[str, Any]], tools: Any) -> Marked:
    """The text, with the answers that the template's `generation` blocks mark."""
    from transformers.utils.chat_template_utils import render_jinja_template

    # Two lists, whatever its annotation says.
    rendered: Any = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=tokenizer.get_chat_template(tools=tools),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    [text], [spans] = rendered
    if not any(end > start for start, end in spans):
        raise Refused("the chat template marks no answer in it")
    return text, spans


def _chains(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any, answers: Iterable[int]
) -> Iterator[Marked]:
    """Finds answers by rendering: an answer is what a conversation that ends with it has after its
    prompt.

    A template may render an answer in another way once the conversation goes on (Qwen3 drops the
    reasoning of earlier turns). The text up to that answer is then a sample of its own.
    """

    def render(count: int, prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            messages[:count], tools=tools, tokenize=False, add_generation_prompt=prompt
        )

    text, spans = "", []
    for i in answers:
        prompt, whole = render(i, True), render(i + 1, False)
        if not whole.startswith(prompt):
            raise Refused(
                f"the chat template does not begin message {i} as it begins an answer "
                "(add_generation_prompt), so the answer cannot be found; mark answers in the "
                "template by generation blocks"
            )
        if spans and not prompt.startswith(text):
            yield text, spans
            spans = []
        text, spans = whole, [*spans, (len(prompt), len(whole))]
    yield text, spans


class Open(NamedTuple):
    """An answer that nothing ends.   first: its first token.   at_end: nothing follows it."""

    first: int
    at_end: bool


def _labeled(
    tokenizer: Any, text: str, spans: list[tuple[int, int]], ends: Ends, *, trim: bool
) -> tuple[list[int], list[int], list[Open]]:
    """A sample, and its answers without an end. A token that has text of an answer has a label, and
    the one that ends it; a token may also have text before it.

    trim: spans may end with white space after the token that ends the turn, which is never
    generated.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    labels, opened = [IGNORE] * len(ids), []
    blank = [text[slice(*o)].isspace() for o in offsets]
    at = 0
    for start, stop in spans:
        while at < len(ids) and offsets[at][1] <= start:
            at += 1
        first = at
        while at < len(ids) and offsets[at][0] < stop:
            at += 1
        last = at
        while last > first and blank[last - 1]:
            last -= 1
        if not (trim and last > first and ids[last - 1] in ends.added):
            last = at
        if (end := ends.of_answer(ids, blank, first, last)) is None:
            opened.append(Open(first, all(blank[last:])))
        labels[first : end or last] = ids[first : end or last]
    return ids, labels, opened
