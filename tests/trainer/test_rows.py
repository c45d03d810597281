"""A row is learned as its file says, whatever other rows, blocks, files and formats hold; a field
of another type than the type of data reads is refused by file and line.
"""

import bz2
import copy
import datetime
import decimal
import gzip
import itertools
import json
import logging
import re
import zipfile

import pytest

pytest.importorskip("datasets")
pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from chats import CHATML, TOOLS, characters
from preparing import config_of, prepare_of, write_rows, write_table

from tilewright.trainer.data import rows as module_of_rows
from tilewright.trainer.data.columns.column import COLUMNS
from tilewright.trainer.data.defects import kind_of
from tilewright.trainer.data.sources import place_of
from tilewright.trainer.data.types.dataset_type import DATASETS, Asked

pytestmark = [pytest.mark.packages, pytest.mark.usefixtures("own_cache")]

CALLS = "{% for c in m['tool_calls'] or [] %}CALL{{ c['function'] | tojson }}{% endfor %}"
TEMPLATE = TOOLS + CHATML.replace(
    "{{ m['content'] + '<|im_end|>'", "{{ m['content'] }}" + CALLS + "{{ '<|im_end|>'"
)
TOKENIZER = characters(TEMPLATE)
# What readers of files take for dates, numbers, flags and nulls, or for JSON.
VALUES = (
    *("1999-12-24", "1999-12-24T10:00:00", "1999-12-24T10:00:00.000Z", "1999-12-24 00:00", "10:00"),
    *("NA", "N/A", "NaN", "nan", "null", "None", "inf", "-inf", "true", "True", "false", "007"),
    *("1", "-1", "1.0", "1.10", "1e5", "1E400", "0x10", "1_000", "1" * 23, " 5", "5 ", "+5", ".5"),
    *('{"a": 1}', "[1, 2]", '"text"', "{", "#", "a,b", 'say "hi"', "a;b\tc", "one\ntwo", "} {"),
)


def said(role, content):
    return {"role": role, "content": content}


def ranked(v):
    return {"response": [[v], ["no"]], "sort": [2, 1]}


# A row of each type whose texts are v, and what a table of text alone has in its place.
SCORES = {"chosen_score": 1.5, "rejected_score": 1}
IDS = {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7]}
PAIR_IDS = {"prompt_ids": [5], "completion_ids": [6]}
ROWS = {
    "text": lambda v: {"text": v},
    "chat": lambda v: {"messages": [said("user", v), said("assistant", v)]},
    "prompt_completion": lambda v: {"prompt": v, "completion": v},
    "erniekit": lambda v: {"src": [v], "tgt": [v], "system": v, "label": [1]},
    "alpaca": lambda v: TABLES["alpaca"](v) | {"history": [[v, v]]},
    "preference": lambda v: {"prompt": v, "chosen": v, "rejected": "no"} | SCORES,
    "preference_erniekit": lambda v: {"src": [v], "tgt": [], "system": v} | ranked(v),
    "unpaired_preference": lambda v: {"prompt": v, "completion": v, "label": True},
    "tokenized": lambda v: {"input_ids": [5, 6, 7], "labels": [5, 6, 7]},
    "preference_tokenized": lambda v: IDS | SCORES,
    "unpaired_preference_tokenized": lambda v: PAIR_IDS | {"label": False},
}
TABLES = {
    **{kind: ROWS[kind] for kind in ("text", "prompt_completion", "preference")},
    "unpaired_preference": ROWS["unpaired_preference"],
    "erniekit": lambda v: {"src": v, "tgt": v, "system": v},
    "alpaca": lambda v: {"instruction": v, "input": v, "output": v, "system": v},
}
FORMATS = ("jsonl", "json", "parquet", "arrow", "csv")


# What a type of data reads of files of one kind is the same: Python's objects, Arrow's columns, or
# cells. All types are read from one format of each kind, and two from each other one.
PAIRS = [
    *((kind, form) for form in ("jsonl", "parquet") for kind in DATASETS.names()),
    *((kind, "csv") for kind in TABLES),
    *(("chat", "json"), ("text", "json"), ("chat", "arrow"), ("tokenized", "arrow")),
]


@pytest.fixture
def configured(tmp_path):
    count = itertools.count()

    def configured(path, kind, entry=(), **fields):
        entry = {"path": path, "type": kind, **dict(entry)}
        own = {"dataset_prepared_path": str(tmp_path / f"prepared{next(count)}")}
        bins = {"sample_packing_sequence_len": 512}
        return config_of(tmp_path, entry, **own | bins | fields)

    return configured


@pytest.fixture
def learned(configured):
    """The tokens, the labels and further columns of what is prepared."""

    def learned(path, kind, columns=None, entry=(), **fields):
        config = configured(path, kind, entry, **fields)
        found = prepare_of(config, lambda: TOKENIZER, 200, shuffle=False, columns=columns)
        named = [found[n][:] for n in ("input_ids", "labels", *(columns or ()))]
        return [*zip(*named, strict=True)]

    return learned


def samples(kind, rows):
    """What a type of data makes of rows as they are."""
    of = DATASETS[kind].samples(Asked("-", kind, 512, TOKENIZER, ()))
    return [(list(map(int, s[0])), list(map(int, s[1]))) for row in rows for s in of(row)]


def decoded(tokens):
    return "".join(TOKENIZER.convert_ids_to_tokens([t for t in tokens if t >= 0]))


def plain(found):
    """What is learned of each text."""
    shown = (decoded(labels) for _, labels, *_ in found)
    return [text.removeprefix("<s>").removesuffix("<|im_end|>") for text in shown]


@pytest.mark.parametrize("kind, form", PAIRS)
def test_a_text_is_learned_as_its_file_says(kind, form, tmp_path, learned, monkeypatch):
    """What looks like a date, a number or a null: after other text, in a block of a few rows, and
    alone in each of several files.
    """
    made = TABLES[kind] if form == "csv" else ROWS[kind]
    rows = [made("words"), *map(made, VALUES), made("words")]
    expected = samples(kind, rows)
    if DATASETS[kind].tokenizer:  # the type's own reading is of these very texts
        assert all(v in "".join(decoded(ids) for ids, _ in expected) for v in VALUES)
    write_rows(tmp_path / f"one.{form}", rows)
    assert learned(tmp_path / f"one.{form}", kind) == expected
    monkeypatch.setattr(module_of_rows, "MOST_ROWS", 3)
    monkeypatch.setattr(module_of_rows, "PIECE", 100)
    assert learned(tmp_path / f"one.{form}", kind, dataset_num_proc=2) == expected
    for i, row in enumerate(rows):
        write_rows(tmp_path / f"many/{i:03}.{form}", [row])
    assert learned(tmp_path / "many", kind) == expected


UNREAD = (
    *(None, "1999-12-24", "text", 3, 2.5, True, 2**80, [], [1], ["a"], [None], {"a": 1}),
    *({"b": {"c": None}}, {"a": "text"}, [{"a": 1}], [[1], "a"], {}, float("nan")),
)


@pytest.mark.parametrize("kind", ROWS)
def test_columns_that_nobody_reads_never_matter(kind, tmp_path, learned):
    rows = [ROWS[kind](f"text {i}") for i in range(len(UNREAD) + 1)]
    expected = samples(kind, rows)
    for form, order in (("jsonl", 1), ("json", -1)):
        values = iter(UNREAD[::order])
        some = [row | {"note": next(values)} if i else row for i, row in enumerate(rows)]
        write_rows(tmp_path / f"a.{form}", some)
        assert learned(tmp_path / f"a.{form}", kind) == expected
        write_rows(tmp_path / f"b.{form}", some[::-1])
        assert learned(tmp_path / f"b.{form}", kind) == samples(kind, rows[::-1])
    kinds = (1, "text", [1], {"a": 1}, {"b": ["x"]}, None, datetime.datetime(2000, 1, 1), 2.5)
    for form in ("parquet", "arrow"):
        for i, value in enumerate(kinds):
            extra = {"note": value, f"own{i}": value}
            write_rows(tmp_path / f"{form}/{i}.{form}", [rows[i] | extra])
        write_rows(tmp_path / f"{form}/9.{form}", [rows[9]])
        assert learned(tmp_path / form, kind) == samples(kind, [*rows[: len(kinds)], rows[9]])


def leaves(value, path=()):
    """(place, value) of a row's columns, and of the texts, numbers and flags in them."""
    if len(path) == 1 or (path and not isinstance(value, dict | list)):
        yield path, value
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))


def replaced(row, path, value):
    row = copy.deepcopy(row)
    at = row
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return row


OTHERS = (3, 1.5, True, "words", None, [3], ["words"], {"a": 1})
# Lists of texts may be one text; scores are any number; a label of ERNIEKit's may be true.
ALSO = {
    "erniekit": {("src",): "a string", ("tgt",): "a string", ("label", 0): "a boolean"},
    "preference_erniekit": {("src",): "a string", ("response", 0): "a string"}
    | {("response", i): "a string" for i in range(2)},
}


def fits(kind, at, kept, other):
    """Whether a type of data may find `other` where the row has `kept`."""
    needed = {name for names in DATASETS[kind].needed for name in names}
    if other is None:  # an instruction may be null, since there may be an input
        return len(at) == 1 and (at[0] not in needed or at[0] == "instruction")
    if kind_of(other) == ALSO.get(kind, {}).get(at):
        return True
    if isinstance(kept, list) and isinstance(other, list):
        return other == ["words"] or not kept or isinstance(kept[0], int)
    return kind_of(other) == kind_of(kept)


@pytest.mark.parametrize("kind, form", [pair for pair in PAIRS if pair[1] != "csv"])
def test_a_field_of_another_type_is_refused_by_file_and_line(kind, form, tmp_path, learned):
    good, seen, accepted = ROWS[kind]("words"), 0, []
    write_rows(tmp_path / f"data/a.{form}", [good])
    path = tmp_path / f"data/b.{form}"
    line = {"jsonl": "line 2: ", "json": "row 2: "}.get(form, "(row 1: |the column )")
    for at, kept in leaves(good):
        for other in OTHERS:
            if fits(kind, at, kept, other):
                continue
            rows = [replaced(good, at, other)]
            try:
                write_rows(path, [good, *rows] if form.startswith("json") else rows)
            except (pa.ArrowInvalid, pa.ArrowTypeError):  # such a file cannot be
                continue
            try:
                learned(path.parent, kind)
                accepted.append((at, other))
            except ValueError as error:
                assert re.match(f"^{path}: {line}.", str(error)) and "\n" not in str(error)
                seen += 1
    assert not accepted and seen >= 5


# ---- JSON


def call(arguments, **own):
    function = {"name": "f", "arguments": arguments}
    calls = [{"type": "function", "function": function}]
    asked = said("assistant", "") | {"tool_calls": calls}
    return {
        "messages": [said("user", "go"), asked, said("tool", "1"), said("assistant", "ok")],
        **own,
    }


def tool(**properties):
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    return [{"type": "function", "function": function}]


PLAIN = {"messages": [said("user", "hi"), said("assistant", "yo")]}
OBJECTS = (
    PLAIN,
    call({"city": "Paris", "unit": None}),
    call({"city": "Rome", "unit": "C", "at": "2000-01-02"}),
    call({"x": 12345678901234567890123}),
    call({"x": 2}),
    call({"x": [1, None, 1.0, {"y": None}], "z": {}}),
    call({"x": "1"}),
    call({}, tools=tool(a={"type": "number", "default": None})),
    call({}, tools=tool(a={"type": "number", "default": 1.5})),
    call({}, tools=tool(a={"type": "number", "default": 1})),
    call({}, tools=tool(b={"enum": ["1999-12-24", None, 1, True]})),
    call({}, tools=json.dumps(tool(b={"default": None}))),
    {"messages": [said("user", "hi") | {"name": "Ann"}, said("assistant", "yo")]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "1.10"}]},
)


@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_objects_of_rows_are_their_own(form, tmp_path, learned):
    """Nulls, integers of any length and keys, whatever others hold: in one file, in either order,
    and each alone. They are what the template renders of the row.
    """
    expected = samples("chat", OBJECTS)
    for row, (ids, _) in zip(OBJECTS[:-1], expected, strict=False):
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        text = TOKENIZER.apply_chat_template(row["messages"], tools=tools, tokenize=False)
        assert decoded(ids) == text
    shown = "".join(decoded(ids) for ids, _ in expected)
    assert '"unit": null' in shown and "12345678901234567890123}" in shown
    assert '"default": null' in shown and '"default": 1}' in shown
    write_rows(tmp_path / f"a.{form}", OBJECTS)
    assert learned(tmp_path / f"a.{form}", "chat") == expected
    write_rows(tmp_path / f"b.{form}", OBJECTS[::-1])
    assert learned(tmp_path / f"b.{form}", "chat") == samples("chat", OBJECTS[::-1])
    for i, row in enumerate(OBJECTS):
        write_rows(tmp_path / f"many/{i:02}.{form}", [row])
    assert learned(tmp_path / "many", "chat") == expected


@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_what_comes_after_many_megabytes_is_learned(form, tmp_path, learned):
    """Readers that guess take ten at a time."""
    padded = PLAIN | {"note": "z" * 12_000}
    dated = {"messages": [said("user", "2000-01-02"), said("assistant", "NA")]}
    late = [call({"a": None}), dated]
    write_rows(tmp_path / f"a.{form}", [padded] * 1000 + late)
    expected = samples("chat", [PLAIN, *late])
    assert learned(tmp_path / f"a.{form}", "chat") == expected[:1] * 1000 + expected[1:]


def test_a_column_that_begins_late_is_read(tmp_path, learned):
    """Also where the rows of which a file begins have it not."""
    path, asked = tmp_path / "a.jsonl", {"reward": COLUMNS["reward"]}
    rows = [{"input_ids": [5, 6]}] * 150 + [{"input_ids": [5, 6], "labels": [-100, 6], "id": "007"}]
    write_rows(path, rows)
    found = learned(path, "tokenized", {"id": COLUMNS["id"]})
    assert found[0][1] == [5, 6] and found[-1] == ([5, 6], [-100, 6], "007")
    found = learned(path, "tokenized", select_columns=["input_ids", "labels"])
    assert found[-1] == ([5, 6], [-100, 6])
    lacks = r"has no column reward, has \['input_ids', 'labels', 'id'\]; data of type preference"
    with pytest.raises(ValueError, match=lacks):
        learned(path, "tokenized", asked)
    rows[0] = rows[0] | {"reward": 1}
    write_rows(path, rows[150:] + rows)
    with pytest.raises(ValueError, match=f"^{path}: line 1: reward: it is missing"):
        learned(path, "tokenized", asked)


ROW = '{"text": "a"}'
LAYOUTS = {
    "lines": (f"{ROW}\n\n  \n{ROW}", "aa"),
    "carriage returns": (f"{ROW}\r\n{ROW}\r\n", "aa"),
    "other line ends": (f'{{"text": "a\u2028b\x85c\u2029"}}\n{ROW}\r{ROW}', "a?b?c?aa"),
    "a mark of byte order": (f"\ufeff{ROW}\n{ROW}\n", "aa"),
    "such a mark and an array": (f"\ufeff [{ROW},{ROW}]\n", "aa"),
    "two on a line": (f"{ROW} {ROW}\n{ROW}{ROW}", "aaaa"),
    "several lines": ('{"text":\n "}\\n{"\n}\n{"text": "b"}\n', "}\n{b"),
    "braces in a text": ('{"text": "} {"}\n{"text": "}{"}\n', "} {}{"),
    "an array of texts": ('["a", "1.10"]', "a1.10"),
    "one object": (ROW, "a"),
    "escapes": (r'{"text": "\u0041\ud83d\ude00\n"}', "A?\n"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_rows_of_json_may_be_laid_out_in_any_way(case, tmp_path, learned, monkeypatch):
    content, expected = LAYOUTS[case]
    (tmp_path / "a.json").write_text(content, newline="")
    for piece in (1 << 20, 1):  # bytes of a part
        monkeypatch.setattr(module_of_rows, "PIECE", piece)
        assert "".join(plain(learned(tmp_path / "a.json", "text"))) == expected


LATER = "line 2: it is a"
DAMAGED = {
    "a list": (f"{ROW}\n[1]\n", f"{LATER} list, and must be an object"),
    "a text": (f'{ROW}\n"a"\n', f"{LATER} string, and must be an object"),
    "a number in an array": (f"[{ROW}, 5]", "row 2: it is a number, and must be an object"),
    "no comma": (f"[{ROW} {ROW}]", "line 1: it is not JSON: Expecting ',' delimiter at character"),
    "more than an array": (f"[{ROW}]\n{ROW}", "line 2: it is not JSON: Extra data at character 1"),
    "a key twice": (f'{ROW}\n{{"text": "a", "text": "b"}}', "line 2: text is there twice"),
    "within a value": (f'{ROW}\n{{"text": {{"y": 1, "y": 2}}}}', "line 2: y is there twice"),
    "half a pair": (f"{ROW}\n" + r'{"x": "\ud83d"}', "line 2: a string in it has half"),
    "digits": (f'{ROW}\n{{"text": {"1" * 5000}}}', "line 2: an integer in it has 5000 digits"),
    "depth": (f'{ROW}\n{{"x": {"[" * 10**5}}}', "line 2: it is nested too deeply"),
    "an array without rows": ("[]", "there is nothing in it"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_is_no_row_of_json_is_refused_by_its_place(case, tmp_path, learned):
    content, sentence = DAMAGED[case]
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=f"^{tmp_path}/a.json: {re.escape(sentence)}"):
        learned(tmp_path / "a.json", "text")


def test_what_is_not_read_may_be_what_cannot_be(tmp_path, learned):
    """In the first row, too, whose keys are columns."""
    wrong = ('{"k": 1, "k": 2}', "1" * 5000, '"caf\xe9"', '["\xe9", {"k": "\xe9"}]')
    lines = [f'{{"x": {one}, "text": "007"}}' for one in wrong]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="latin-1")
    assert learned(tmp_path / "a.jsonl", "text") == samples("text", [{"text": "007"}] * 4)


def test_a_damaged_line_is_skipped_where_that_is_asked(tmp_path, learned, caplog):
    (tmp_path / "a.jsonl").write_text(f'{ROW}\n{{"text": "b\n{ROW}\n')
    with caplog.at_level(logging.WARNING, "tilewright"):
        assert len(learned(tmp_path / "a.jsonl", "text", on_bad_row="skip")) == 2
    assert "a.jsonl: line 2: it ends within a JSON value; skipped" in caplog.text


# ---- tables of text


def test_cells_are_text_and_an_empty_one_is_null(tmp_path, learned):
    """Also with quotes, several lines, a mark of byte order and the line ends of other systems."""
    content = '\ufeffid,text\r\n007,"two\nlines, ""quoted"""\r\n\r\n1.0,NA\r1e5, 5\n,x'
    (tmp_path / "a.csv").write_text(content, newline="")
    found = learned(tmp_path / "a.csv", "text", {"id": COLUMNS["id"]})
    assert [row[2] for row in found] == ["007", "1.0", "1e5", ""]
    assert plain(found) == ['two\nlines, "quoted"', "NA", " 5", "x"]


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("text,n\na,1\n,2\n", "line 3: it has no text"),
        ('text,n\n"a\nb",1\n"",2\n', "line 4: it has no text"),
        ("text,n\na,1\nb,2,3\n", "line 3: it has 3 cells, and the header 2"),
        ('text,n\na,1\n"b,2\nc,3\n', "line 3: it ends within a quoted cell"),
        ("text,text\na,1\n", "line 2: the header has the column text twice"),
        (b"text\na\nb\xff\n", "line 3: it is not UTF-8: .* at byte 2 of a text"),
        ("", "there is nothing in it"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_by_file_and_line(
    content, sentence, tmp_path, learned
):
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ValueError, match=f"^{tmp_path}/a.csv: {sentence}"):
        learned(tmp_path / "a.csv", "text")


JUDGED = "prompt,completion,label\nq,a,true\nq,b,{}\n"
SCORED = "prompt,chosen,rejected,chosen_score,rejected_score\nq,a,b,{},{}\n"


def test_numbers_and_flags_of_tables_are_exact_or_refused(tmp_path, learned):
    path = tmp_path / "a.csv"

    def found(kind, text, *columns):
        path.write_text(text)
        return learned(path, kind, {name: COLUMNS[name] for name in columns})

    for cell, flag in (("true", 1), ("True", 1), ("FALSE", 0), ("false", 0)):
        rows = found("unpaired_preference", JUDGED.format(cell), "desirable")
        assert [row[2] for row in rows] == [1, flag]
    for cell in ("1", "yes", "", "NA", '"[true]"'):
        with pytest.raises(ValueError, match=f"^{path}: line 3: its label must be true or false"):
            found("unpaired_preference", JUDGED.format(cell), "desirable")
    for cells in (("2", "1"), ("1e1", "-.5"), ("1.10", "1")):
        rows = found("preference", SCORED.format(*cells), "reward")
        assert [row[2] for row in rows] == pytest.approx([*map(float, cells)])
    for cell in ("x", "inf", "nan", "true", "1_0", "0x1", "1,5"):
        with pytest.raises(ValueError, match=f"^{path}: line 2: its rejected_score must be a fin"):
            found("preference", SCORED.format(3, f'"{cell}"'), "reward")
    numbers = "text,reward,role,id\na,{},{},12345678901234567890123\n"
    [row] = found("text", numbers.format("0.1", "1"), "reward", "role", "id")
    assert row[2:] == (pytest.approx(0.1), 1, "12345678901234567890123")
    for name, cells in (("role", ("1", "1.0")), ("reward", ("x", "1")), ("role", ("1", "9" * 23))):
        with pytest.raises(ValueError, match=f"^{path}: line 2: {name}: it "):
            found("text", numbers.format(*cells), "reward", "role", "id")


# ---- files that declare types


@pytest.mark.parametrize("form", ["parquet", "arrow", "saved"])
def test_a_struct_has_the_keys_that_are_not_null_and_json_text_its_own(form, tmp_path, learned):
    """A struct has all rows' keys, so that its file cannot say which null is a row's own."""
    rows = [call({"a": 1}), call({"b": "1999-12-24"}), PLAIN]
    table, default = pa.Table.from_pylist(rows), tool(x={"default": None})
    wider = table.append_column("tools", pa.array([json.dumps(default)] * 3))
    kept = [row | {"tools": tool(x={"default": None, "n": 2**70})} for row in rows]
    exact = {
        name: pa.array([json.dumps(row[name]) for row in kept], pa.json_())
        for name in ("messages", "tools")
    }
    for i, (made, wanted) in enumerate(
        ((table, rows), (wider, [r | {"tools": default} for r in rows]), (pa.table(exact), kept))
    ):
        path = tmp_path / f"{i}.{form}"
        if form == "parquet":
            pq.write_table(made, path, row_group_size=2)
        elif form == "arrow":
            write_table(path, made, pa.ipc.new_file)
        else:
            datasets.Dataset(made).save_to_disk(path)
        assert learned(path, "chat") == samples("chat", wanted)


MOMENT = datetime.datetime(1999, 12, 24)
TYPES = (
    *(pa.array([v]) for v in (MOMENT, MOMENT.date(), MOMENT.time(), 5, 1.5, True, b"a", ["a"])),
    *(pa.array([v]) for v in (datetime.timedelta(1), {"a": 1}, decimal.Decimal("1.10"))),
)


@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_a_column_of_another_type_is_refused_by_its_file(form, tmp_path, learned):
    """The type that a file declares is what it says."""
    for kind, name in (("text", "text"), ("prompt_completion", "completion"), ("alpaca", "input")):
        for i, values in enumerate(TYPES):
            good = TABLES[kind]("words")
            table = pa.table({n: values if n == name else [v] for n, v in good.items()})
            folder = tmp_path / f"{kind}{i}"
            path = folder / f"b.{form}"
            if form == "saved":
                datasets.Dataset(table).save_to_disk(path)
            else:
                write_rows(folder / f"a.{form}", [good])
                write_table(path, table)
            with pytest.raises(ValueError, match=f"^{path}: (row 1: |the column `)"):
                learned(path if form == "saved" else folder, kind)


def test_texts_of_every_arrow_type_are_read(tmp_path, learned):
    told = pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())
    for (i, declared), form in itertools.product(enumerate(told), ("parquet", "arrow")):
        texts = pa.array(["1999-12-24", "007"]).cast(declared)
        path = tmp_path / f"{i}.{form}"
        write_table(path, pa.table(dict.fromkeys(("prompt", "completion", "text"), texts)))
        for kind in ("prompt_completion", "text"):
            wanted = [ROWS[kind](v) for v in ("1999-12-24", "007")]
            assert learned(path, kind) == samples(kind, wanted)


def test_a_mark_of_byte_order_is_no_text_of_a_document(tmp_path, learned):
    (tmp_path / "a.txt").write_text("\ufeffa\ufeff\r\nb", newline="")
    assert learned(tmp_path / "a.txt", "text") == samples("text", [{"text": "a\ufeff\nb"}])


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_a_file_of_no_bytes_beside_others_has_no_rows(form, tmp_path, learned):
    (folder := tmp_path / "data").mkdir()
    for name in "ac":
        (folder / f"{name}.{form}").touch()
    with pytest.raises(ValueError, match=f"^{folder}/a.{form}: there is nothing in it"):
        learned(folder, "text")
    write_rows(folder / f"b.{form}", [{"text": "007"}])
    assert learned(folder, "text") == samples("text", [{"text": "007"}])


# ---- where rows are


@pytest.mark.parametrize("form", FORMATS)
def test_columns_of_a_run_are_exact_and_rows_have_their_places(form, tmp_path, configured):
    names = ["007", "1.0", "2000-01-02", "NA"]
    rows = [{"text": f"t{i}", "id": name} for i, name in enumerate(names)]
    for i in range(2):
        write_rows(tmp_path / f"data/{i}.{form}", rows[2 * i : 2 * i + 2])
    config = configured(tmp_path / "data", "text", {"split": "train[1:]"})
    columns = {"id": COLUMNS["id"]}
    found = prepare_of(config, lambda: TOKENIZER, 200, shuffle=False, columns=columns)
    assert found["id"][:] == names[1:]
    at, first = {"jsonl": ("line", 1), "csv": ("line", 2)}.get(form, ("row", 1))
    places = [place_of(f"0:{i}", config.data.datasets, config.data) for i in range(3)]
    expected = [(0, first + 1), (1, first), (1, first + 1)]
    assert places == [f"{tmp_path}/data/{i}.{form}: {at} {n}" for i, n in expected]


def test_files_that_are_compressed_are_read_as_they_are_now(tmp_path, learned):
    """And named in errors by their own names and lines."""
    json_of, path = {"entry": {"ds_type": "json"}}, tmp_path / "a.jsonl.gz"
    for opened, name in ((gzip.open, path), (bz2.open, tmp_path / "a.jsonl.bz2")):
        for text in ("1999-12-24", "2000-01-02", "007"):
            with opened(name, "wt") as file:
                file.write(json.dumps({"text": text}))
            assert learned(name, "text", **json_of) == samples("text", [{"text": text}])
    with gzip.open(path, "wt") as file:
        file.write(f'{ROW}\n{{"text": 5}}\n')
    with pytest.raises(ValueError, match=f"^{path}: line 2: the column `text` must hold strings"):
        learned(path, "text", **json_of)
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("in/a.csv", "text\n007\n")
        file.writestr("in/b.csv", "text\nNA\n\n")
    found = learned(path, "text", entry={"ds_type": "csv"})
    assert found == samples("text", [{"text": "007"}, {"text": "NA"}])
