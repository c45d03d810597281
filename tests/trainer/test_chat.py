"""Conversations and prompts become the tokens of the tokenizer's template, with labels on the
answers alone; what cannot be used is refused by file and line.
"""

import json
import logging
import pathlib
import re

import pytest

pytest.importorskip("datasets")
pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import pyarrow as pa
from chats import CHATML, MARKED, PLAIN, REASONED, TOOLS, TURNS, characters, messages, runs
from preparing import IN_ORDER, config_of, prepare_of, write_rows, write_table
from transformers import AutoTokenizer

from tilewright.trainer.columns import IGNORE
from tilewright.trainer.data import chat

pytestmark = pytest.mark.packages

ROOT = next(p for p in pathlib.Path(__file__).resolve().parents if (p / "pyproject.toml").is_file())
SMOLLM2 = ROOT / ".cache/smollm2"
OTHER_PROMPT = TURNS + "{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}"
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    + CHATML
)


@pytest.fixture
def made(tmp_path, own_cache):
    """What is prepared of entries, in the order of their files."""

    def made(*entries, tokenizer=None, **fields):
        config = config_of(tmp_path, *entries, **IN_ORDER | fields)
        return prepare_of(config, lambda: tokenizer or characters(), 200)

    return made


def seen(tokenizer, sample):
    """A sample's text, with [ ] around what is trained on."""
    ids, labels = sample
    assert len(ids) == len(labels)
    assert all(x in (i, IGNORE) for i, x in zip(ids, labels, strict=True))
    out, on = "", False
    for token, label in zip(ids, labels, strict=True):
        if on != (label != IGNORE):
            on = not on
            out += "[" if on else "]"
        out += tokenizer.decode([token])
    return out + "]" * on


def shown(tokenizer, prepared):
    return [seen(tokenizer, (r["input_ids"], r["labels"])) for r in prepared]


TWO = messages(
    ("system", "s"), ("user", "a"), ("assistant", "bc"), ("user", "d"), ("assistant", "e")
)
TWO_SEEN = (
    "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
    "<|im_start|>assistant\n[bc<|im_end|>]\n<|im_start|>user\nd<|im_end|>\n"
    "<|im_start|>assistant\n[e<|im_end|>]\n"
)


@pytest.mark.parametrize("template", [CHATML, MARKED, TOOLS + CHATML, TOOLS + MARKED])
def test_answers_alone_have_labels(template):
    tokenizer = characters(template)
    [sample] = chat.chat(tokenizer, {"messages": TWO})
    assert seen(tokenizer, sample) == TWO_SEEN
    assert sample[0] == tokenizer.apply_chat_template(TWO)["input_ids"]
    # The ShareGPT form, and a question that nobody answers.
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in TWO]
    turns.append({"from": "human", "value": "?"})
    assert chat.chat(tokenizer, {"conversations": turns}) == [sample]
    turns = [{"role": turn["from"], "content": turn["value"]} for turn in turns]
    assert chat.chat(tokenizer, {"messages": turns}) == [sample]
    tools = [{"name": "f", "parameters": {"x": {"type": "string"}, "unset": None}}]
    for given in (tools, json.dumps(tools)):
        [with_tools] = chat.chat(tokenizer, {"messages": TWO, "tools": given})
        expected = tokenizer.apply_chat_template(TWO, tools=tools)["input_ids"]
        assert with_tools[0] == expected
        assert (len(expected) > len(sample[0])) == template.startswith(TOOLS)
        assert seen(tokenizer, with_tools).endswith(TWO_SEEN)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_what_an_answer_is(template):
    tokenizer = characters(template)
    turns = messages(("assistant", "hi"), ("user", "a"), ("assistant", "b"), ("tool", "4"))
    turns += messages(("assistant", " c\n"))
    [sample] = chat.chat(tokenizer, {"messages": turns})
    # What opens a conversation answers nothing. White space of an answer is its own.
    assert seen(tokenizer, sample) == (
        "<|im_start|>assistant\nhi<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\n[b<|im_end|>]\n<|im_start|>tool\n4<|im_end|>\n"
        "<|im_start|>assistant\n[ c\n<|im_end|>]\n"
    )
    # Without a token that ends a turn, the line end does.
    plain = characters(PLAIN)
    [sample] = chat.chat(plain, {"messages": TWO[1:]})
    assert seen(plain, sample) == "u:a\na:[bc\n]u:d\na:[e\n]"
    call = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    [sample] = chat.chat(tokenizer, {"messages": TWO[1:2] + call})
    assert seen(tokenizer, sample).endswith("assistant\n[<|im_end|>]\n")


def test_a_template_that_renders_earlier_answers_differently_gives_a_sample_per_answer():
    tokenizer = characters(REASONED)
    first, second = chat.chat(tokenizer, {"messages": TWO[1:]})
    assert seen(tokenizer, first).endswith(
        "a<|im_end|>\n<|im_start|>assistant\n[(so)bc<|im_end|>]\n"
    )
    assert seen(tokenizer, second).endswith(
        "assistant\nbc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n"
        "<|im_start|>assistant\n[(so)e<|im_end|>]\n"
    )
    for ids, count in ((first[0], 2), (second[0], 4)):
        assert ids == tokenizer.apply_chat_template(TWO[1 : 1 + count])["input_ids"]


def test_prompts_and_completions():
    tokenizer = characters()
    [sample] = chat.prompt_completion(tokenizer, {"prompt": "2+2=", "completion": "4"})
    assert seen(tokenizer, sample) == "<s>2+2=[4<|im_end|>]"
    [sample] = chat.prompt_completion(tokenizer, {"prompt": "", "completion": "ab"})
    assert seen(tokenizer, sample) == "<s>[ab<|im_end|>]"
    for template in (CHATML, MARKED):  # the prompt's answers are none
        tokenizer = characters(template)
        row = {"prompt": TWO[:4], "completion": TWO[4:]}
        [sample] = chat.prompt_completion(tokenizer, row)
        assert seen(tokenizer, sample) == re.sub(r"\[(bc<.im_end.>)\]", r"\1", TWO_SEEN)
        assert sample[0] == tokenizer.apply_chat_template(TWO)["input_ids"]


@pytest.mark.skipif(not (SMOLLM2 / "config.json").is_file(), reason=".cache/smollm2 is not there")
def test_tokens_of_a_real_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    turns = messages(
        ("user", "Who?"), ("assistant", "\n\nJulia\u00e9 "), ("user", ""), ("assistant", "x")
    )
    [sample] = chat.chat(tokenizer, {"messages": turns})
    assert sample[0] == tokenizer.apply_chat_template(turns)["input_ids"]
    assert [tokenizer.decode([i for i in run if i != IGNORE]) for run in runs(sample[1])] == [
        # The first token of this answer holds the line end before it, too.
        "\n\n\nJulia\u00e9 <|im_end|>",
        "x<|im_end|>",
    ]
    # A token that holds the end of the prompt and the beginning of the completion has a label.
    [(ids, labels)] = chat.prompt_completion(tokenizer, {"prompt": "A: ", "completion": "yes"})
    assert ids == [*tokenizer("A: yes")["input_ids"], tokenizer.eos_token_id]
    assert tokenizer.decode([x for x in labels if x != IGNORE]) == " yes<|im_end|>"


# ---- from files


def lines(path, *rows):
    return write_rows(path, rows)


ASKED = messages(("user", "a"), ("assistant", "b"))


def test_types_merge(tmp_path, made):
    sets = {
        "chat": {"messages": ASKED},
        "prompt_completion": {"prompt": "a", "completion": "b"},
        "text": {"text": "ab"},
        "tokenized": {"input_ids": [1, 2]},
    }
    got = made(*({"path": lines(tmp_path / f"{k}.jsonl", r), "type": k} for k, r in sets.items()))
    assert shown(characters(), got) == [
        f"<|im_start|>user\na<|im_end|>\n{ANSWER}",
        "<s>a[b<|im_end|>]",
        "[<s>ab<|im_end|>]",
        "[<|im_end|><s>]",
    ]


ERNIE = {"system": "s", "src": ["a", "d"], "tgt": ["bc", "e"]}
ALPACA = {"instruction": "a", "output": "b"}
ANSWER = "<|im_start|>assistant\n[b<|im_end|>]\n"


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_erniekits_turns_are_those_of_a_conversation(tmp_path, made, template):
    marked = [{**ERNIE, "label": label} for label in ([1, 1], [0, 1], [1, 0])]
    path = lines(tmp_path / "a.jsonl", ERNIE, *marked, {"src": "a", "tgt": "b"})
    tokenizer = characters(template)
    got = made({"path": path, "type": "erniekit"}, tokenizer=tokenizer)
    both, same, last, first, plain = shown(tokenizer, got)
    assert both == same == TWO_SEEN
    assert last == re.sub(r"\[(bc<.im_end.>)\]", r"\1", TWO_SEEN)
    # What follows the last answer that is learned is left out.
    assert first == TWO_SEEN[: TWO_SEEN.index("]") + 1] + "\n"
    assert plain == f"<|im_start|>user\na<|im_end|>\n{ANSWER}"


def test_alpacas_instructions_are_those_of_a_conversation(tmp_path, made):
    row = {"system": "s", "instruction": "d", "output": "e", "history": [["a", "bc"]]}
    path = lines(tmp_path / "a.jsonl", row, {**ALPACA, "input": "x"}, {**ALPACA, "input": ""})
    long, with_input, without = shown(characters(), made({"path": path, "type": "alpaca"}))
    assert long == TWO_SEEN
    assert with_input == f"<|im_start|>user\nax<|im_end|>\n{ANSWER}"
    assert without == f"<|im_start|>user\na<|im_end|>\n{ANSWER}"


def test_samples_are_cut_and_those_without_a_label_are_counted(tmp_path, made, caplog):
    long = {"messages": messages(("user", "a" * 80), ("assistant", "b"))}
    cut = {"messages": messages(("user", "a"), ("assistant", "b" * 80))}
    path = lines(tmp_path / "a.jsonl", {"messages": ASKED}, long, cut, long)
    with caplog.at_level(logging.WARNING, "tilewright"):
        got = made({"path": path, "type": "chat"})
    assert [len(r["input_ids"]) for r in got] == [23, 64]
    assert "a.jsonl: 3 of 4 samples were longer than 64 tokens and were cut" in caplog.text
    said = "a.jsonl: 2 of 4 samples have no answer within 64 tokens and were left out"
    assert said in caplog.text


def test_answers_that_are_all_cut_are_the_reason(tmp_path, made):
    """Also where a cut sample keeps a label at its first token, which nothing precedes."""
    long = messages(("user", "a" * 80), ("assistant", "b"))
    path = lines(tmp_path / "a.jsonl", {"messages": long}, {"messages": long})
    said = "a.jsonl: nothing can be learned: none of the 2 samples has an answer within the tokens"
    with pytest.raises(ValueError, match=said):
        made({"path": path, "type": "chat"})


def test_a_label_at_the_first_token_alone_is_no_answer(tmp_path, made, caplog, monkeypatch):
    monkeypatch.setattr(chat, "chat", lambda *_: [([1, 2, 3], [1, IGNORE, IGNORE])])
    path = lines(tmp_path / "a.jsonl", {"messages": ASKED})
    with pytest.raises(ValueError, match="none of the 1 samples has an answer"):
        made({"path": path, "type": "chat"})
    assert "1 of 1 samples have no answer" in caplog.text


def test_tools_of_different_shapes_are_told_apart(tmp_path, made):
    """Arrow gives all rows of a file the keys of any."""
    tools = [[{"name": "f", "x": {"a": 1}}], [{"name": "g", "y": ["b"]}], None]
    rows = [{"messages": ASKED, "tools": t} for t in tools]
    tokenizer = characters(TOOLS + CHATML)
    entry = {"path": lines(tmp_path / "a.jsonl", *rows), "type": "chat"}
    got = made(entry, tokenizer=tokenizer, sample_packing_sequence_len=256)
    assert [r["input_ids"] for r in got] == [
        tokenizer.apply_chat_template(ASKED, tools=t)["input_ids"] for t in tools
    ]


CHAT = {"messages": ASKED}
PAIR = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    "kind, good, changed, sentence",
    [
        ("chat", CHAT, {"messages": []}, "its messages are empty"),
        ("chat", CHAT, {"messages": None}, "its conversations must be a list, not null"),
        ("chat", CHAT, {"messages": ASKED[:1]}, "it has no answer: no message of the assistant"),
        ("chat", CHAT, {"messages": ASKED[1:]}, "it has no answer"),
        (
            *("chat", CHAT, {"messages": messages(("user", "a"), ("bot", "b"))}),
            r"messages\[1\] has the role 'bot'; known are system, developer, user, assistant, tool",
        ),
        (
            *("chat", CHAT, {"messages": messages((["user"], "a"), ("gpt", "b"))}),
            r"messages\[0\] has the role \['",
        ),
        ("chat", CHAT, {"messages": [{"role": "user"}]}, r"messages\[0\] has no content; a text"),
        ("chat", CHAT, {"messages": [{"content": "a"}]}, r"messages\[0\] has the role None"),
        ("chat", {**CHAT, "tools": "[]"}, {"tools": "{"}, "its tools are not JSON"),
        ("chat", {**CHAT, "tools": "[]"}, {"tools": "[1]"}, "its tools must be a list of JSON"),
        ("prompt_completion", PAIR, {"completion": ""}, "its completion is empty"),
        ("prompt_completion", PAIR, {"prompt": None}, "prompt and completion must be strings, or"),
        ("prompt_completion", PAIR, {"completion": None}, ".*, not str and null"),
        ("erniekit", ERNIE, {"tgt": ["b"]}, "it has 2 src and 1 tgt; accepted is as many of"),
        ("erniekit", ERNIE, {"src": ["a", ""]}, "its src must be strings that are not empty"),
        ("erniekit", ERNIE, {"label": [1]}, r"its label must be 2 values of 0 and 1, got \[1\]"),
        ("erniekit", ERNIE, {"label": [1, 2]}, "its label must be 2 values of 0 and 1"),
        ("erniekit", ERNIE, {"label": [0, 0]}, "its label has no 1, so that nothing is learned"),
        ("alpaca", ALPACA, {"instruction": ""}, "its instruction or its output is empty"),
        ("alpaca", ALPACA, {"output": None}, "its instruction or its output is empty"),
        ("alpaca", ALPACA, {"history": [["a"]]}, "its history must be pairs of strings"),
    ],
)
def test_unusable_rows_are_refused(kind, good, changed, sentence, tmp_path, made):
    path = lines(tmp_path / "a.jsonl", good, {**good, **changed}, good)
    with pytest.raises(ValueError, match=rf"^{path}: line 2: {sentence}"):
        made({"path": path, "type": kind})


def test_rows_that_no_file_could_hold_are_refused():
    """Arrow's columns have one type."""
    tokenizer = characters()
    for row, sentence in (
        ({"messages": "a"}, "its messages must be a list, not a str"),
        ({"messages": ["a"]}, r"messages\[0\] must have role and content, and is 'a'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"messages\[0\] has content of type list; a text is needed",
        ),
    ):
        with pytest.raises(chat.Refused, match=sentence):
            chat.chat(tokenizer, row)
    with pytest.raises(chat.Refused, match="strings, or lists of messages, not str and list"):
        chat.prompt_completion(tokenizer, {"prompt": "a", "completion": ASKED[1:]})


UNMARKED = MARKED.replace("== 'assistant'", "== 'model'")


@pytest.mark.parametrize(
    "template, turns, sentence",
    [
        (OTHER_PROMPT, ASKED, "the chat template does not begin message 1 as it begins an answer"),
        (STRICT, TWO, "the chat template cannot render it: no system turns"),
        (UNMARKED, ASKED, "the chat template marks no answer in it"),
    ],
)
def test_what_a_template_cannot_do_is_said(template, turns, sentence):
    with pytest.raises(chat.Refused, match=sentence):
        chat.chat(characters(template), {"messages": turns})


@pytest.mark.parametrize(
    "row, kind, sentence",
    [
        ({"text": "a"}, "chat", r"`messages` or `conversations`, has \['text'\]; for samples that"),
        (CHAT, "text", "a column `text`, .* for samples that are conversations set type to"),
        ({"prompt": "a"}, "prompt_completion", r"`prompt` and `completion`, has \['prompt'\]$"),
    ],
)
def test_columns_are_those_of_the_type(row, kind, sentence, tmp_path, made):
    with pytest.raises(ValueError, match=f"type {kind} needs .*{sentence}"):
        made({"path": lines(tmp_path / "a.jsonl", row), "type": kind})


class Slow:
    is_fast = False


def test_unusable_tokenizers_are_refused(tmp_path, made):
    conversations = {"path": lines(tmp_path / "a.jsonl", CHAT), "type": "chat"}
    strings = {"path": lines(tmp_path / "b.jsonl", PAIR), "type": "prompt_completion"}
    turns = {"prompt": ASKED[:1], "completion": ASKED[1:]}
    completions = {**strings, "path": lines(tmp_path / "c.jsonl", turns)}
    no_template = characters(None)
    for entry, tokenizer, said in (
        (conversations, no_template, "type chat needs a tokenizer with a chat template; model.tok"),
        (conversations, Slow(), r"needs a tokenizer that gives the offsets .* Slow does not"),
        (completions, no_template, "type prompt_completion needs a tokenizer with a chat"),
    ):
        with pytest.raises(ValueError, match=said):
            made(entry, tokenizer=tokenizer)
    large = dict.fromkeys(PAIR, pa.array(["a"], pa.large_string()))
    write_table(tmp_path / "d.arrow", pa.table(large))
    for name in ("b.jsonl", "d.arrow"):
        assert len(made({**strings, "path": tmp_path / name}, tokenizer=no_template)) == 1
