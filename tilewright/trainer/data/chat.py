"""Conversations, and prompts with completions, as tokens whose labels are the answers alone.

A sample is (input_ids, labels); labels are -100 outside the answers. The text of a conversation is
what the tokenizer's chat template renders, and is tokenized as a whole, so that its tokens are
those that the model sees when it is used.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from tilewright.trainer.columns import IGNORE
from tilewright.trainer.data.types.dataset_type import Refused

ROLES = ("system", "developer", "user", "assistant", "tool")
SHARE_GPT = {"human": "user", "gpt": "assistant"}
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

Sample = tuple[list[int], list[int]]


def check_tokenizer(path: str, kind: str, tokenizer: Any, *, template: bool = True) -> None:
    """Raises ValueError if `tokenizer` cannot prepare rows of this type.

    path: of the data set.
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


def chat(tokenizer: Any, row: dict[str, Any]) -> list[Sample]:
    """The samples of a row with `messages` or `conversations` and, if there, `tools`."""
    column = "messages" if row.get("messages") is not None else "conversations"
    return _answers(tokenizer, _messages(row, column), _tools(row), 0)


def prompt_completion(tokenizer: Any, row: dict[str, Any]) -> list[Sample]:
    """The samples of a row with `prompt` and `completion`: strings, or lists of messages."""
    kinds = {name: type(row.get(name)) for name in ("prompt", "completion")}
    if kinds["prompt"] is kinds["completion"] is str:
        return [_continued(tokenizer, row["prompt"], row["completion"])]
    if kinds["prompt"] is kinds["completion"] is list:
        prompt = _messages(row, "prompt")
        messages = prompt + _messages(row, "completion")
        return _answers(tokenizer, messages, _tools(row), len(prompt))
    found = " and ".join("null" if k is type(None) else k.__name__ for k in kinds.values())
    raise Refused(f"prompt and completion must be strings, or lists of messages, not {found}")


def conversation(
    tokenizer: Any, messages: list[dict[str, Any]], learned: Collection[int] | None = None
) -> list[Sample]:
    """The samples of messages.   learned: which of them are answers; None: all the assistant's."""
    return _answers(tokenizer, messages, None, 0, learned)


def strings(row: dict[str, Any], name: str) -> list[str]:
    """A column of a text or of texts, none of them empty."""
    given = [row[name]] if isinstance(row[name], str) else row[name]
    if not isinstance(given, list) or not all(isinstance(s, str) and s for s in given):
        raise Refused(f"its {name} must be strings that are not empty, got {given!r:.80}")
    return given


def text(row: dict[str, Any], name: str) -> str:
    """A column of a text, empty if there is none."""
    if (found := row.get(name)) is not None and not isinstance(found, str):
        raise Refused(f"its {name} must be a string, got {found!r:.80}")
    return found or ""


def turns(texts: Iterable[str], first: str, system: Any = None) -> list[dict[str, Any]]:
    """Messages of the user and the assistant in turn, after the system's, if it has any text."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, *({"role": roles[i % 2], "content": t} for i, t in enumerate(texts))]


def _continued(tokenizer: Any, prompt: str, completion: str) -> Sample:
    if not completion:
        raise Refused("its completion is empty")
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
    return ids, labels


def _messages(row: dict[str, Any], column: str) -> list[dict[str, Any]]:
    """The messages of a column, in the form that templates read."""
    given = row.get(column)
    if not isinstance(given, list) or not given:
        said = "null" if given is None else f"a {type(given).__name__}"
        raise Refused(
            f"its {column} {'are empty' if given == [] else f'must be a list, not {said}'}"
        )
    return [_message(m, f"{column}[{i}]") for i, m in enumerate(given)]


def _message(given: Any, at: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise Refused(f"{at} must have role and content, and is {given!r:.60}")
    message = {k: v for k, v in given.items() if v is not None}  # null: not given
    if "role" not in message and "from" in message:  # the ShareGPT form
        sender = message.pop("from")
        message["role"] = SHARE_GPT.get(sender, sender)
        message["content"] = message.pop("value", None)
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


def _answers(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    first: int,
    learned: Collection[int] | None = None,
) -> list[Sample]:
    """The samples of a conversation, whose answers are the assistant's messages from `first` on, or
    of them those that are learned.

    A message that opens the conversation answers nothing; what follows the last answer is left out.
    """
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= max(1, first)]
    if learned is not None:
        answers = [i for i in answers if i in learned]
    if not answers:
        raise Refused("it has no answer: no message of the assistant that follows another message")
    messages = messages[: answers[-1] + 1]
    try:
        # Blocks mark every message of the assistant: also the prompt's, and what opens it.
        marked = (
            not first
            and learned is None
            and messages[0]["role"] != "assistant"
            and MARKED.search(tokenizer.get_chat_template(tools=tools))
        )
        texts = (
            [_marked(tokenizer, messages, tools)]
            if marked
            else list(_chains(tokenizer, messages, tools, answers))
        )
    except Refused:
        raise
    except Exception as error:  # raised by templates, for what they do not know
        reason = " ".join(str(error).split())[:200]
        raise Refused(f"the chat template cannot render it: {reason}") from error
    return [_labeled(tokenizer, text, spans, trim=not marked) for text, spans in texts]


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


def _labeled(tokenizer: Any, text: str, spans: list[tuple[int, int]], *, trim: bool) -> Sample:
    """A token that has text of an answer has a label; a token may also have text before it.

    trim: spans may end with white space after the token that ends the turn, which is never
    generated.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    labels = [IGNORE] * len(ids)
    ends = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    at = 0
    for start, stop in spans:
        while at < len(ids) and offsets[at][1] <= start:
            at += 1
        first = at
        while at < len(ids) and offsets[at][0] < stop:
            at += 1
        last = at
        while last > first and text[slice(*offsets[last - 1])].isspace():
            last -= 1
        if not (trim and last > first and ids[last - 1] in ends):
            last = at
        labels[first:last] = ids[first:last]
    return ids, labels
