"""What says what is learned is obeyed or refused: marks of messages, masks of tokens, ends of
answers, columns of losses, and the rows that are held out.
"""

import dataclasses
import json
import logging

import numpy as np
import pytest

pytest.importorskip("datasets")
pytest.importorskip("transformers")

import datasets
import pyarrow as pa
from chats import CHATML, MARKED, PLAIN, REASONED, characters, messages, runs
from preparing import config_of, prepare_of, write_rows
from whole import data_of, preparing

from tilewright.trainer.columns import IGNORE
from tilewright.trainer.config import Dataset
from tilewright.trainer.data import chat, masks
from tilewright.trainer.data.batches import Bins
from tilewright.trainer.data.columns.column import COLUMNS
from tilewright.trainer.data.ends import BEGUN, ENDLESS
from tilewright.trainer.data.marks import MARKS
from tilewright.trainer.data.prepared import split_validation
from tilewright.trainer.data.read_columns import check_columns
from tilewright.trainer.data.rows import HEAD
from tilewright.trainer.data.types.dataset_type import DATASETS, Asked, Refused
from tilewright.trainer.parallel.mesh import Mesh

pytestmark = [pytest.mark.packages, pytest.mark.usefixtures("own_cache")]


def config(folder, *sets, length=64, **fields):
    """sets: (type, rows)."""
    entries = [
        {"path": write_rows(folder / f"{i}.jsonl", rows), "type": kind}
        for i, (kind, rows) in enumerate(sets)
    ]
    return config_of(folder, *entries, sample_packing_sequence_len=length, **fields)


def text(tokenizer, ids):
    return "".join(tokenizer.decode([int(i)]) for i in ids)


def learned(tokenizer, samples):
    """The texts of runs of labels, sample by sample."""
    return [[text(tokenizer, run) for run in runs(labels)] for _, labels, *_ in samples]


# ---- marks of messages

# Other tools' marks, for parts of messages, for shares, and for the opposite.
OTHERS = (
    *("train_detail", "training_detail", "loss_scale", "loss_weight", "loss_weights"),
    *("step_loss_mask", "mask", "masked", "is_trainable", "train_on_turn", "learn", "ignore"),
    "sample_weight",
)
OFF, ON, BAD = (0, False, 0.0), (1, True, 1.0, None), (0.5, 2, -1, "no", "0", [0], float("nan"))


def marked(role="assistant", **marks):
    turns = messages(("user", "a"), ("assistant", "bad"), ("user", "b"), ("assistant", "good"))
    turns[("user", "assistant").index(role)] |= marks
    return turns


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("name", MARKS)
def test_a_mark_is_obeyed_or_refused(name, template):
    tokenizer = characters(template)
    for value in (*OFF, *ON):
        found = chat.chat(tokenizer, {"messages": marked(**{name: value})})
        right = ["good<|im_end|>"] if value in OFF else ["bad<|im_end|>", "good<|im_end|>"]
        assert learned(tokenizer, found) == [right], value
        plain = chat.chat(tokenizer, {"messages": marked()})
        assert found[0][0] == plain[0][0], "a template sees no mark"
    for value in BAD:
        with pytest.raises(Refused, match=rf"^messages\[1\] has {name} = .*accepted are 0 and 1"):
            chat.chat(tokenizer, {"messages": marked(**{name: value})})


@pytest.mark.parametrize(
    "turns, said",
    [
        (marked(weight=0, train=True), "weight = 0 and train = True, which contradict"),
        (marked("user", train=True), r"messages\[0\] has train = True and the role 'user'; only"),
        ([marked(loss=1)[1], *marked()], r"messages\[0\] is marked to be learned, and opens"),
        (marked(train=False)[:2], "none of its answers is learned: a mark of each says so"),
        *((marked(**{name: 1.0}), f"has {name}, which is not read") for name in OTHERS),
    ],
)
def test_marks_that_cannot_be_obeyed_are_refused(turns, said):
    with pytest.raises(Refused, match=said):
        chat.chat(characters(), {"messages": turns})


def test_what_else_a_message_has_is_no_mark():
    keys = ("name", "tool_call_id", "thinking", "lossless", "trainer", "weighty", "unmasked", "id")
    more = dict.fromkeys(keys, "x") | dict.fromkeys(OTHERS)  # null: not given
    for turns in (marked(**more), marked()[1:2] + marked(), marked("user", weight=0)):
        assert learned(characters(), chat.chat(characters(), {"messages": turns}))


def test_marks_of_files_and_of_every_type_of_messages_are_obeyed(tmp_path):
    tokenizer = characters()
    share = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "no", "weight": 0}]
    share += [{"from": "human", "value": "b"}, {"from": "gpt", "value": "yes"}]
    completion = marked(loss=False)[1:]
    sets = (
        ("chat", [{"messages": marked(train=False)}, {"messages": marked()}]),
        ("chat", [{"conversations": share}]),
        ("prompt_completion", [{"prompt": marked()[:1], "completion": completion}]),
    )
    found = prepare_of(config(tmp_path, *sets, length=256), lambda: tokenizer, 200, shuffle=False)
    got = learned(tokenizer, zip(found["input_ids"], found["labels"], strict=True))
    good, bad = "good<|im_end|>", "bad<|im_end|>"
    assert got == [[good], [bad, good], ["yes<|im_end|>"], [good]]
    asked = Asked("d", "preference", 400, tokenizer, {"chosen": None, "completion": None})
    row = {"prompt": marked()[:1], "chosen": completion, "rejected": marked()[1:]}
    pair = DATASETS["preference"].samples(asked)(row)
    assert learned(tokenizer, pair) == [[good], [bad, good]]
    row = {"prompt": marked()[:1], "completion": completion, "label": False}
    assert learned(tokenizer, DATASETS["unpaired_preference"].samples(asked)(row)) == [[good]]
    # ERNIEKit's own marks are read as before.
    row = {"src": ["a", "b"], "tgt": ["no", "yes"], "label": [0, 1]}
    assert learned(tokenizer, DATASETS["erniekit"].samples(asked)(row)) == [["yes<|im_end|>"]]


# ---- masks of tokens

IDS = [5, 6, 7, 8, 9]


def documents(**row):
    given = {"input_ids": IDS} | row
    arrow = {name: None if value is None else pa.array(value) for name, value in given.items()}
    samples = DATASETS["tokenized"].samples(Asked("d", "tokenized", 64, None, {}))(arrow)
    return [
        (ids.tolist(), [t for t in labels.tolist() if t != IGNORE]) for ids, labels, *_ in samples
    ]


MASK = [0, 0, 1, 1, 1]
AGREES = [IGNORE, IGNORE, 7, 8, 9]


@pytest.mark.parametrize("name", (*masks.PARTS, masks.WHOLE))
def test_a_mask_is_obeyed_or_refused(name):
    for mask in (MASK, [bool(m) for m in MASK], [float(m) for m in MASK]):
        assert documents(**{name: mask}) == [(IDS, [7, 8, 9])]
        assert documents(**{name: mask}, labels=AGREES) == [(IDS, [7, 8, 9])]
    with pytest.raises(Refused, match=f"its labels and its {name} contradict each other: token 2"):
        documents(**{name: MASK}, labels=IDS)
    with pytest.raises(Refused, match=f"its {name} and its attention_mask contradict .* token 5"):
        documents(**{name: MASK}, attention_mask=[1, 1, 1, 1, 0])


@pytest.mark.parametrize("name", masks.READ)
def test_a_column_of_a_row_that_does_not_fit_is_refused(name):
    half = f"its {name} (has 0.5 at token 2; accepted are 0|must be int)"
    for values, said in (
        (["a"] * 5, f"its {name} must"),
        ([1, None, 1, 1, 1], f"its {name} must"),
        ([1, 1, 1, 1], name),
        ([0, 0.5, 1, 1, 1], half),
    ):
        with pytest.raises(Refused, match=said):
            documents(**{name: values})
    assert documents(**{name: None}) == [(IDS, IDS)]


FIRST = [0, 1, 2, 0, 1]  # positions of two documents


@pytest.mark.parametrize(
    "row, right",
    [
        ({"attention_mask": [1, 1, 1, 0, 0]}, [[5, 6, 7]]),
        ({"attention_mask": [0, 0, 1, 1, 1]}, [[7, 8, 9]]),
        ({"attention_mask": [0, 1, 1, 1, 0], "position_ids": [0, 1, 2, 3, 4]}, [[6, 7, 8]]),
        ({"attention_mask": [0, 1, 1, 1, 1], "position_ids": [1, 0, 1, 0, 1]}, [[6, 7], [8, 9]]),
        ({"attention_mask": [1, 1, 0, 1, 1], "position_ids": FIRST}, [[5, 6], [8, 9]]),
        ({"attention_mask": [1, 1, 1, 1, 0], "seq_lengths": [2, 2]}, [[5, 6], [7, 8]]),
        ({"position_ids": FIRST}, [[5, 6, 7], [8, 9]]),
        ({"seq_lengths": [3, 2]}, [[5, 6, 7], [8, 9]]),
        ({"seq_lengths": [3, 2], "position_ids": FIRST}, [[5, 6, 7], [8, 9]]),
        ({"completion_mask": [0, 1, 1, 1, 1], "assistant_masks": [0, 1, 0, 1, 0]}, [[6, 8]]),
        ({"labels": IDS, "loss_mask": [0, 1, 1, 0, 1], "seq_lengths": [3, 2]}, [[5, 6, 7], [8, 9]]),
        ({"attention_mask": [0] * 5}, "its attention_mask has no 1"),
        ({"attention_mask": [1, 1, 0, 1, 1]}, "has a 0 before token 4, within a document"),
        ({"attention_mask": [1, 1, 2, 1, 1]}, "has 2 at token 3; accepted are 0 and 1"),
        ({"attention_mask": [1, 1, 1, 1, 0], "labels": IDS}, "labels and its attention_mask con"),
        ({"position_ids": [0, 1, 5, 6, 7]}, "count from 0 in each document; token 3 has 5"),
        ({"seq_lengths": [3, 3]}, "its seq_lengths must be above 0 and have the sum 5"),
        ({"seq_lengths": [5, 0]}, "its seq_lengths must be above 0"),
        ({"seq_lengths": [2, 3], "position_ids": FIRST}, "begins at token 3 by one of"),
        ({"loss_mask": MASK, "completion_mask": [0, 1, 1, 1, 1]}, "loss_mask and its completion"),
        ({"completion_mask": [0, 1, 0, 0, 0], "assistant_masks": MASK}, "no token is 1 in both"),
    ],
)
def test_padding_and_packed_documents_are_read_or_refused(row, right):
    if isinstance(right, str):
        with pytest.raises(Refused, match=right):
            documents(**row)
    else:
        assert [found[1] for found in documents(**row)] == right


def test_columns_of_tokens_are_cut_as_the_row_is(tmp_path):
    padded = {"attention_mask": [0, 1, 1, 1, 1], "position_ids": [0, 0, 1, 0, 1]}
    rows = [
        {"input_ids": IDS, "weight": [1, 2, 3, 4, 5], **padded},
        {"input_ids": IDS, "weight": [0.5] * 5, "seq_lengths": [2, 3]},
    ]
    made = config(tmp_path, ("tokenized", rows))
    columns = {"weight": COLUMNS["weight"]}
    found = prepare_of(made, lambda: None, 97, shuffle=False, columns=columns)
    assert found["input_ids"] == [[6, 7], [8, 9], [5, 6], [7, 8, 9]]
    assert found["weight"] == [[2, 3], [4, 5], [0.5] * 2, [0.5] * 3]


def unchecked(monkeypatch, kind):
    """A type of data that takes any features."""
    own = dataclasses.replace(DATASETS[kind], check=lambda *_: None)
    monkeypatch.setattr(DATASETS, "_rows", DATASETS._rows | {kind: own})
    return own


@pytest.mark.parametrize("kind", [k for k, row in DATASETS.items() if not row.tokenizer])
def test_a_mask_that_is_not_read_is_refused_of_rows_of_tokens(kind, monkeypatch):
    own, entry = unchecked(monkeypatch, kind), Dataset(path="d", type=kind)
    unread = {"response_mask", "labels_mask", "cu_seqlens", "seq_idx", "document_ids", "doc_lens"}
    unread |= {"loss_weights", "token_weights", "label_ids", "target_ids", "lengths"}
    for name in unread | ({*masks.READ} - {*own.columns}):
        with pytest.raises(ValueError, match=f"type {kind} does not read the column `{name}`"):
            check_columns(entry, [*own.needed[0], name], {}, {})
    others = "special_tokens_mask", "token_type_ids", "doc_id"
    check_columns(entry, [*own.needed[0], *others], {}, {})


@pytest.mark.parametrize("kind", [k for k, row in DATASETS.items() if row.tokenizer])
def test_a_column_that_says_what_is_learned_of_texts_is_refused(kind):
    names, entry = DATASETS[kind].needed[0], Dataset(path="d", type=kind)
    for name in ("loss_mask", "completion_mask", "assistant_masks", "trainable", "loss_weight"):
        said = f"type {kind} does not read the column `{name}`; data"
        with pytest.raises(ValueError, match=said):
            check_columns(entry, [*names, name], {}, {})
    check_columns(entry, [*names, "loss", "train", "attention_mask", "input_ids"], {}, {})


# ---- what begins and ends samples

TEXTS = {
    "text": {"text": "<s>ab"},
    "prompt_completion": {"prompt": "<s>a", "completion": "b"},
    "preference": {"prompt": "<s>a", "chosen": "b", "rejected": "c"},
    "unpaired_preference": {"prompt": "<s>a", "completion": "b", "label": True},
}
RENDERED = {"chat", "erniekit", "alpaca", "preference_erniekit"}  # by the template alone


@pytest.mark.parametrize("kind", TEXTS)
def test_a_begin_token_of_a_text_is_not_doubled_and_counted(kind):
    assert {*TEXTS} | RENDERED == {k for k, row in DATASETS.items() if row.tokenizer}
    row, tokenizer = TEXTS[kind], characters()
    strings = dict.fromkeys(("prompt", "completion", "chosen"), datasets.Value("string"))
    plain = {k: v.replace("<s>", "") if isinstance(v, str) else v for k, v in row.items()}
    for given in (row, plain):
        asked = Asked("d", kind, 64, tokenizer, strings)
        found = list(DATASETS[kind].samples(asked)(given))
        for ids, labels, *_ in found:
            assert text(tokenizer, ids)[:4] == "<s>a" and len(ids) == len(labels)
            assert list(ids).count(tokenizer.bos_token_id) == 1
        assert asked.told[BEGUN] == (len(found) if given is row else 0)


def test_an_end_token_of_a_text_is_not_doubled():
    tokenizer = characters()
    asked = Asked("d", "text", 64, tokenizer, {})
    [(ids, _)] = DATASETS["text"].samples(asked)({"text": "ab<|im_end|>"})
    assert text(tokenizer, ids) == "<s>ab<|im_end|>"


# As GLM's: a turn ends where the next role begins.
NEXT_ROLE = (
    "<s>{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
BLOCKS = MARKED.replace(
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}",
    "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
)
TWO = messages(("user", "a"), ("assistant", "yo"), ("user", "b"), ("assistant", "bye"))
ANSWERS = {
    NEXT_ROLE: ["\nyo<|im_start|>", "\nbye<|im_end|>"],
    BLOCKS: ["yo<|im_end|>", "bye<|im_end|>"],
    CHATML: ["yo<|im_end|>", "bye<|im_end|>"],
    PLAIN: ["yo\n", "bye\n"],
}


@pytest.mark.parametrize(
    "template, told", [(NEXT_ROLE, True), *((template, False) for template in ANSWERS)]
)
def test_an_answer_is_learned_with_what_ends_it(template, told):
    assert BLOCKS != MARKED
    tokenizer = characters(template)
    stops = (tokenizer.convert_tokens_to_ids("<|im_start|>"),) if told else ()
    asked = Asked("d", "chat", 99, tokenizer, {}, stops=stops)
    found = DATASETS["chat"].samples(asked)({"messages": TWO})
    assert learned(tokenizer, found) == [ANSWERS[template]]
    assert asked.told[ENDLESS] == (2 if template == PLAIN else 0)
    [(ids, _)] = found
    plain = tokenizer.apply_chat_template(TWO)["input_ids"]
    assert ids == plain + [tokenizer.eos_token_id] * (template == NEXT_ROLE)


def test_stops_are_read_from_the_models_folder_and_their_lack_is_said_once(tmp_path, caplog):
    """The end of a turn may be no special token, of which generation_config.json alone tells."""
    ended = PLAIN.replace("'\n' }}", "'~' }}")
    assert ended != PLAIN
    tokenizer = characters(ended)
    made = config(tmp_path, ("chat", [{"messages": TWO}] * 3), length=99)
    with caplog.at_level(logging.WARNING, "tilewright"):
        prepare_of(made, lambda: tokenizer, 200)
    assert caplog.text.count("a token at which a model stops") == 1
    assert f"0.jsonl: 6 {ENDLESS}" in caplog.text
    caplog.clear()
    told = {"eos_token_id": [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("~")]}
    (tmp_path / "generation_config.json").write_text(json.dumps(told))
    with caplog.at_level(logging.WARNING, "tilewright"):
        found = prepare_of(made, lambda: tokenizer, 200)
    assert not caplog.text, "and they are another prepared set"
    assert text(tokenizer, found["input_ids"][0]).endswith("bye~")


# ---- columns of losses

DEFAULT = "language_modeling"
INSTRUCTS = [n for n, c in COLUMNS.items() if c.instructs]


@pytest.mark.parametrize("kind", DATASETS.names())
def test_a_column_that_the_loss_does_not_read_is_refused(kind, monkeypatch):
    assert {n for n, c in COLUMNS.items() if c.batched} == {*INSTRUCTS, "routed_experts"}
    own, entry, asked = unchecked(monkeypatch, kind), Dataset(path="d", type=kind), {}
    names = [*own.needed[0]]
    if own.yields:
        said = f"train.loss = {DEFAULT}: d has .* would all learn alike.*train.loss = preference"
        with pytest.raises(ValueError, match=said):
            check_columns(entry, names, {}, {}, DEFAULT)
        asked = {name: COLUMNS[name] for name in own.yields[:1]}
    others = ["id", "origin", "routed_experts", "source"]
    if own.tokenizer:  # who speaks, and the like
        others += {"pair", "role", "prefix"} - {*asked}
    check_columns(entry, [*names, *others], {}, asked, DEFAULT)
    for name in {*INSTRUCTS} - {*asked, *others}:
        said = rf"^d: train\.loss = {DEFAULT} does not read the column `{name}`"
        with pytest.raises(ValueError, match=said):
            check_columns(entry, [*names, name], {}, asked, DEFAULT)
        check_columns(entry, [*names, name], {}, asked)  # nothing learns from them


UNREAD = {
    "tokenized": ({"input_ids": IDS, "advantage": 1.0}, "the column `advantage`.*= policy would"),
    "preference_tokenized": (
        {"prompt_ids": [5], "chosen_ids": [6, 7], "rejected_ids": [8, 9]},
        "all learn alike",
    ),
}


@pytest.mark.parametrize("kind", UNREAD)
def test_a_run_names_its_loss_where_it_does_not_read_the_data(kind, tmp_path):
    row, said = UNREAD[kind]
    made = config(tmp_path, (kind, [row]))
    asked = {"entries": made.data.datasets, "columns": {}, "shuffle": False}
    with pytest.raises(ValueError, match=rf"train\.loss = {DEFAULT}.*{said}"):
        data_of(made, Mesh())
    with pytest.raises(ValueError, match=rf"train\.loss = {DEFAULT}.*{said}"):
        preparing(made, Mesh())(**asked)
    assert len(preparing(made, Mesh(), loss="")(**asked))


def test_a_saved_set_has_no_column_that_the_loss_does_not_read(tmp_path):
    rows = {"input_ids": [IDS], "labels": [IDS], "weight": [[1.0] * 5]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")
    fields = {"dataset_prepared_path": str(tmp_path / "saved"), "skip_prepare_dataset": True}
    made = config(tmp_path, ("tokenized", []), **fields)
    with pytest.raises(ValueError, match=r"the column `weight`.*weighted_language_modeling would"):
        data_of(made, Mesh())


def test_a_column_that_begins_late_in_a_file_is_refused_with_its_line(tmp_path):
    """The columns of a file of JSON are known by its first rows alone."""
    late = HEAD + 7
    for name, said in (
        ("advantage", rf"train\.loss = {DEFAULT} does not read the column `advantage`"),
        ("valid_mask", "type tokenized does not read the column `valid_mask`"),
    ):
        rows = [{"input_ids": IDS} for _ in range(late + 2)]
        rows[late - 1][name] = None
        rows[late][name] = [1] * len(IDS)
        made = config(tmp_path, ("tokenized", rows))
        with pytest.raises(ValueError, match=rf"0\.jsonl: line {late + 1}: {said}"):
            data_of(made, Mesh())


@pytest.mark.parametrize("late", [0, HEAD + 7])
def test_a_column_that_select_columns_leaves_out_is_not_refused(late, tmp_path):
    rows = [{"input_ids": IDS} for _ in range(late + 2)]
    rows[late] |= {"advantage": 1.0, "valid_mask": [1] * 5}
    made = config(tmp_path, ("tokenized", rows), select_columns=["input_ids"])
    prepared = preparing(made, Mesh())
    assert len(prepared(made.data.datasets, columns={}, shuffle=False)) == len(rows)


# ---- rows that are held out


def halves(row):
    yield row["a"], row["a"]
    yield row["a"][::-1], row["a"][::-1]


ANSWERED = {"tgt": [], "response": [["a"], ["b"], ["c"]], "sort": [3, 2, 1]}
SEVERAL = {
    "preference_erniekit": lambda i: {"src": [f"q{i:02}"], **ANSWERED},
    "chat": lambda i: {"messages": [t | {"content": f"{t['content']}{i:02}"} for t in TWO]},
    "text": lambda i: {"text": f"{i:02}" * 150},
    "tokenized": lambda i: {"input_ids": [10 + i] * 9, "seq_lengths": [2, 3, 4]},
    "halves": lambda i: {"a": [10 + i, 10 + i, 90 - i, 90 - i]},
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_rows_are_held_out_whole(kind, tmp_path, monkeypatch):
    own = {"needed": (("a",),), "samples": lambda asked: halves, "arrow": False}
    plain = dataclasses.replace(DATASETS["tokenized"], **own, check=lambda *_: None)
    monkeypatch.setattr(DATASETS, "_rows", DATASETS._rows | {"halves": plain})
    tokenizer = characters(REASONED)
    rows = [SEVERAL[kind](i) for i in range(12)]
    made = config(tmp_path, (kind, rows[:7]), (kind, rows[7:]), length=200)
    columns = {n: COLUMNS[n] for n in ("pair", "role") if n in DATASETS[kind].yields}
    found = prepare_of(made, lambda: tokenizer, 200, columns=columns)
    each, rest = divmod(len(found), 12)
    assert each > 1 and not rest, "every row makes as many samples"
    for size, count in ((4, 4), (0.25, 3), (0.01, 1)):
        training, held = split_validation(found, size, 3, columns)
        ours, theirs = ({*part["source_row"]} for part in (training, held))
        assert len(theirs) == count and len(ours) == 12 - count and not ours & theirs
        assert len(held) == count * each, "all samples of a row"
        assert held["input_ids"] == split_validation(found, size, 3, columns)[1]["input_ids"]
    if kind == "halves":  # its rows are told apart by their tokens
        greatest = map(max, found["input_ids"])
        assert len({*zip(found["source_row"], greatest, strict=True)}) == 12
    with pytest.raises(ValueError, match="leaves no training row of 12"):
        split_validation(found, 12, 3, columns)


def test_equal_rows_are_units_of_their_own(tmp_path):
    a, b = (
        {"prompt_ids": [5, 6], "chosen_ids": [t] * 20, "rejected_ids": [9] * 20} for t in (7, 8)
    )
    columns = {n: COLUMNS[n] for n in ("pair", "role")}
    for rows in ([a, a, b], [a] * 8):
        made = config(tmp_path, ("preference_tokenized", rows), length=64)
        found = prepare_of(made, None, 97, columns=columns)
        assert len({*found["pair"]}) == len(rows) == len({*found["source_row"]})
        assert np.bincount(found["pair"]).tolist() == [2] * len(rows)
        assert len(Bins(found, made.data, columns=columns)) == len(rows)
