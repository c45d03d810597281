"""Preparation names refused rows, takes bounded memory, and is shared by jobs."""

import ctypes
import fcntl
import gc
import http.server
import itertools
import logging
import multiprocessing
import os
import pathlib
import signal
import threading
import time
import types

import numpy as np
import pytest
from helpers import until

pytest.importorskip("datasets")
pytest.importorskip("pydantic")

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
from preparing import (
    IN_ORDER,
    config_of,
    prepare_of,
    served,
    unreachable_hub,
    write_rows,
    write_table,
)

from tilewright.core import files, platform
from tilewright.trainer.checkpoint import hf
from tilewright.trainer.config import Dataset
from tilewright.trainer.data import cache_key, data_files, packing, rows
from tilewright.trainer.data import prepare as preparing
from tilewright.trainer.data.batches import lengths_of
from tilewright.trainer.data.prepared import split_validation
from tilewright.trainer.data.read_columns import check_columns
from tilewright.trainer.data.types import text as text_rows
from tilewright.trainer.data.types.dataset_type import DATASETS

pytestmark = pytest.mark.packages


class Bytes:
    """A tokenizer with a token per byte, that begins a text with token 1 and ends it with 0."""

    eos_token_id = 0

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [1] * add_special_tokens + list(text.encode())}


@pytest.fixture
def made(tmp_path, own_cache):
    """What is prepared of an entry, in the order of its files."""

    def made(entry, tokenizer=Bytes, **fields):
        model = {"config_path": str(tmp_path / "tokenizer")}
        config = config_of(tmp_path, entry, model=model, **IN_ORDER | fields)
        return prepare_of(config, tokenizer, 256)

    return made


def none():
    raise AssertionError("nothing is to be tokenized")


def some(count, bad=None):
    """Rows of tokens, one of which is refused."""
    return [{"input_ids": [1, 2, 3] if i != bad else [1, 999]} for i in range(count)]


def texts(path, *given):
    """An entry of these texts."""
    return {"path": write_rows(path, [{"text": t} for t in given]), "type": "text"}


@pytest.fixture
def forked():
    """Starts processes that run a function, with what this one has imported. They end with the
    test: Python waits for its processes when it exits.
    """
    started = []

    def forked(function, *arguments):
        process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
        process.start()
        started.append(process)
        return process

    yield forked
    for process in started:
        process.kill()
        process.join()


# ---- refused rows


SHARD = {"shards": 3, "shards_idx": 2}, {"dataset_shard_num": 2, "dataset_shard_idx": 1}


@pytest.mark.parametrize(
    "suffix, entry, fields",
    [
        (".jsonl", {}, {}),
        (".parquet", {}, {}),
        (".arrow", {}, {}),
        (".jsonl", *SHARD),
        (".parquet", *SHARD),
        (".arrow", {"split": "train[50%:]"}, {}),
        (".jsonl", {"preprocess_shards": 7}, {}),
        (".parquet", {}, {"dataset_num_proc": 2}),
    ],
)
def test_a_refused_row_is_named_by_file_and_line(
    suffix, entry, fields, tmp_path, made, monkeypatch
):
    monkeypatch.setattr(rows, "MOST_ROWS", 4)
    write_rows(tmp_path / f"data/a{suffix}", some(30))
    path = write_rows(tmp_path / f"data/b{suffix}", some(30, bad=20))
    at = "line 21" if suffix == ".jsonl" else "row 21"
    with pytest.raises(ValueError, match=rf"^{path}: {at}: token 999 is not in the model's vocab"):
        made({"path": path.parent, **entry}, none, **fields)
    assert not [*(tmp_path / "prepared").glob("[0-9a-f]*[0-9a-f]")]


def test_a_row_of_a_saved_set_is_named(tmp_path, made):
    datasets.Dataset.from_list(some(3, bad=1)).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/saved: row 2: token 999"):
        made({"path": tmp_path / "saved"}, none)


ROW = b'{"input_ids": [1, 2], "text": "ab"}\n'
LONG = b'{"input_ids": [1, 2], "x": "' + b"y" * 12_000 + b'"}\n'
# Contents of files, and what is said of them after their names.
DEFECTS = {
    "last line cut": (ROW * 3 + ROW[:20], "line 4: it ends within a JSON value"),
    "last line cut and ended": (ROW * 3 + ROW[:20] + b"\n", "line 4: it ends within a JSON value"),
    "garbage": (ROW * 2 + b"garbage\n" + ROW, "line 3: it is not JSON: Expecting value at char"),
    "text without an end": (ROW + b'{"text": "ab}\n' + ROW, "line 2: it ends within a JSON value"),
    "line cut": (ROW * 2 + b'{"input_ids": [1,2,\n' + ROW * 2, "line 3: it ends within a JSON"),
    "blank lines before": (b"\n \n" + ROW + b"\n{\n" + ROW, "line 5: it ends within a JSON value"),
    "blank lines alone": (b"\n\n  \n", "there is nothing in it$"),
    # Lines and rows are not counted anew in the reader's next block of ten megabytes.
    "second block": (LONG * 1000 + b"garbage\n" + ROW, "line 1001: it is not JSON: Expecting val"),
    "row of the second block": (
        (LONG + b"\n") * 1000 + ROW.replace(b"2", b"999"),
        "line 2001: token 999 is not in the model's",
    ),
    "array": (b'[\n{"input_ids": [1]},\n{"input_ids": [1}]\n]', "line 3: it is not JSON: Expec"),
    "array cut": (b'[\n{"input_ids": [1]},\n{"input_', "line 3: it is not JSON: Unterminated"),
    "key not in UTF-8": (ROW + b'{"\xffids": [1]}\n', "line 2: it is not UTF-8: .* at byte 3"),
}


@pytest.mark.parametrize("case", DEFECTS)
def test_what_cannot_be_read_is_named_by_file_and_line(case, tmp_path, made):
    """Beside a file that can."""
    content, said = DEFECTS[case]
    write_rows(tmp_path / "data/a.jsonl", some(5))
    path = tmp_path / "data/b.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{path}: {said}"):
        made({"path": path.parent}, none)


def test_a_byte_that_is_not_utf8_is_named_by_its_line(tmp_path, made):
    """If anything reads it: another column's does not matter."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(ROW * 3 + ROW.replace(b"ab", b"a\xff") + ROW)
    assert len(made({"path": path}, none)) == 5
    with pytest.raises(ValueError, match=rf"^{path}: line 4: it is not UTF-8: .* at byte 2 of a"):
        made({"path": path, "type": "text"})


@pytest.mark.parametrize(
    "suffix, cut, said",
    [
        (".parquet", 0.5, "Parquet magic bytes not found"),
        (".arrow", 0.5, "Not an Arrow file"),
        (".stream.arrow", 0.5, "from row 1001 on: Expected to be able to read"),
        (".stream.arrow", 0.001, ""),
    ],
)
def test_a_file_that_is_cut_is_named(suffix, cut, said, tmp_path, made):
    """And its row, where those before can be read: of batches of 1000 here."""
    path = tmp_path / f"b{suffix}"
    if suffix == ".stream.arrow":
        datasets.Dataset.from_list(some(3000)).save_to_disk(tmp_path / "saved")
        next((tmp_path / "saved").glob("*.arrow")).rename(path)
    else:
        write_table(path, pa.Table.from_pylist(some(3000)), pa.ipc.new_file)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * cut)])
    with pytest.raises(ValueError, match=rf"^{path}: {said}"):
        made({"path": path}, none)


def test_a_damaged_row_group_is_named_by_its_rows(tmp_path, made):
    path, written = tmp_path / "a.parquet", pa.Table.from_pylist(some(2000))
    pq.write_table(written, path, row_group_size=500, compression="zstd", use_dictionary=False)
    start = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[start + 40 : start + 60] = b"\xff" * 20
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{path}: from row \d+ on: "):
        made({"path": path}, none)


TOKENS, PAIR = {"input_ids": [1, 2]}, {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    "row, kind, said",
    [
        (TOKENS | {"label": [1, 2]}, "tokenized", "`label` is not read; `labels` would"),
        (TOKENS | {"Labels": [1, 2]}, "tokenized", "`Labels` is not read; `labels` would"),
        (PAIR | {"tool": "c"}, "prompt_completion", "`tool` is not read"),
    ],
)
def test_a_column_whose_name_is_nearly_read_is_warned_of(row, kind, said, caplog):
    features = datasets.Dataset.from_list([row]).features
    entry = Dataset(path="a.jsonl", type=kind)
    with caplog.at_level(logging.WARNING, "tilewright"):
        check_columns(entry, [*row], features, {})
        check_columns(entry, [*row, "id", "meta"], features, {})
    assert len(caplog.messages) == 2
    assert all(m.startswith(f"a.jsonl: the column {said}") for m in caplog.messages)
    caplog.clear()
    columns = [*DATASETS[kind].needed[0], *DATASETS[kind].optional, *row]  # the right one as well
    integers = datasets.List(datasets.Value("int64"))
    check_columns(entry, columns, {"input_ids": integers, "labels": integers}, {})
    assert not caplog.messages


def test_columns_of_alpaca_get_a_hint():
    said = "has .*; for samples that are instructions set type to alpaca$"
    with pytest.raises(ValueError, match=said):
        names = ["instruction", "input", "output"]
        check_columns(Dataset(path="a.jsonl", type="chat"), names, {}, {})


def test_text_that_is_not_utf8_is_refused(tmp_path, made, monkeypatch):
    monkeypatch.setattr(rows, "PIECE", 8)
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\nthree\nfo\xffur\n")
    said = rf"^{path}: from line 4 on: it is not UTF-8: .* at byte 16"
    with pytest.raises(ValueError, match=said):
        made({"path": path, "type": "text"})
    path.write_bytes(b"a\r\nb\rc")  # line ends of other systems
    monkeypatch.setattr(rows, "PIECE", 100)
    assert bytes(made({"path": path, "type": "text"})[0]["input_ids"]) == b"\x01a\nb\nc\x00"


# ---- long documents

LINES = "one two\nthree\n\n\n four " * 9
TEXTS = ["", "a", LINES, "x" * 50, "\n" * 30, "\u00e9" * 40, "ab \n" * 20]


@pytest.mark.parametrize("size", [16, 1 << 20])
def test_parts_join_to_the_document(tmp_path, made, monkeypatch, size):
    """Whatever the size of a part. The tokenizer's start and the end token are there once."""
    monkeypatch.setattr(rows, "PIECE", size)
    monkeypatch.setattr(text_rows, "PIECE", size)
    for text in TEXTS:
        assert "".join(text_rows.pieces(text)) == text
        assert max(map(len, text_rows.pieces(text))) <= size
    (tmp_path / "text").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / f"text/{i}.txt").write_text(text)
    entry = texts(tmp_path / "a.jsonl", *TEXTS)
    expected = b"".join(b"\1" + t.encode() + b"\0" for t in TEXTS)
    for path, count in itertools.product((entry["path"], tmp_path / "text"), (None, 2)):
        fields = {"dataset_num_proc": count, "sample_packing_sequence_len": 1 << 20}
        fields["dataset_prepared_path"] = str(tmp_path / f"{path.name}{count}")
        got = made({**entry, "path": path}, **fields)
        assert b"".join(bytes(r["input_ids"]) for r in got) == expected
        assert all(r["labels"] == r["input_ids"] for r in got)
    assert rows.Documents([str(tmp_path / "text/2.txt")]).nbytes == len(TEXTS[2])


def test_a_part_of_a_file_ends_where_a_line_does(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "PIECE", 12)
    path = tmp_path / "a.txt"
    for text, cuts in (
        ("one\ntwo\nthree\nfour", [8, 18]),
        ("one two three four", [7, 18]),
        ("\u00e9" * 10, [12, 20]),
        ("one\ntwo\n\n\n\nfour five", [11, 20]),
    ):
        path.write_text(text)
        parts = [p for part in rows.Documents([str(path)]).parts() for p in part]
        assert [stop for _, _, stop, _ in parts] == cuts, text
        assert [start for _, start, _, _ in parts] == [0, *cuts[:-1]]


def test_documents_are_sharded_and_split(tmp_path, made):
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text(f"{i}")
    entry = {"path": tmp_path, "data_files": "*.txt", "ds_type": "text", "type": "text"}
    firsts = lambda got: [r["input_ids"][1] - 48 for r in got]  # noqa: E731
    outside = {"dataset_prepared_path": str(tmp_path.parent / f"{tmp_path.name}-prepared")}
    assert firsts(made(entry, **outside)) == [*range(10)]
    assert firsts(made({**entry, "split": "train[20%:50%]"}, **outside)) == [2, 3, 4]
    assert firsts(made({**entry, "shards": 4, "shards_idx": 1}, **outside)) == [3, 4, 5]
    with pytest.raises(FileNotFoundError, match=r"holds no file b\*.txt \(data_files\)"):
        made({**entry, "data_files": "b*.txt"}, **outside)


# ---- memory


def resident():
    """Bytes of this process that are of no file."""
    lines = dict(x.split(":") for x in pathlib.Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


class Words:
    """A fast tokenizer with a token per four bytes."""

    eos_token_id = 0

    def __call__(self, text, add_special_tokens=True):
        data = text.encode()
        return {"input_ids": np.frombuffer(data[: len(data) // 4 * 4], np.uint32) % 251}


def grown(made, path, out):
    """Writes the bytes that this process takes above its start for a data set."""
    gc.freeze()  # what the process forked from holds
    ctypes.CDLL(None).malloc_trim(0)  # else what was freed before would hide growth
    first, peak, ended = resident(), [0], threading.Event()

    def watch():
        while not ended.wait(0.002):
            peak[0] = max(peak[0], resident())

    thread = threading.Thread(target=watch)
    thread.start()
    data = made({"path": path, "type": "text"}, Words, sample_packing_sequence_len=1024)
    assert lengths_of(data).sum() > 1 << 20
    ended.set()
    thread.join()
    with open(out, "a") as file:
        file.write(f"{peak[0] - first}\n")


def test_memory_does_not_grow_with_the_data(tmp_path, made, forked):
    """A text file is one document. JSON is read 10 MB at a time."""
    line = ("to be or not to be " * 50 + "\n") * 16  # 15 KB
    paths = []
    for megabytes in (16, 60):
        one = tmp_path / f"text{megabytes}.txt"
        one.write_text(line * (megabytes * 66))
        many = texts(tmp_path / f"text{megabytes}.jsonl", *[line] * (megabytes * 66))
        paths += [str(one), str(many["path"])]
    # The allocator keeps what reading 10 MB at a time takes, and each child begins with it.
    warm = texts(tmp_path / "warm.jsonl", *[line] * 4000)
    made(warm, Words, sample_packing_sequence_len=1024)
    gc.collect()
    for path in paths:
        child = forked(grown, made, path, tmp_path / "grown")
        child.join()
        assert child.exitcode == 0
    more = [int(n) / (1 << 20) for n in (tmp_path / "grown").read_text().split()]
    for few, many in zip(more[:2], more[2:], strict=True):
        # 44 MB more of data, held once, would show twice over. Allocators differ by a few MiB, and
        # the highest of the samples may have been missed.
        assert many < few + 44, f"MiB above the start, for 16 and 60 MB: {more[:2]}, {more[2:]}"


def test_lengths_are_read_without_tokens(made, tmp_path, monkeypatch):
    path = write_rows(tmp_path / "a.parquet", [{"input_ids": [7] * n} for n in range(2, 40)])
    got = made({"path": path}, none, shuffle_merged_datasets=True)
    _, held = split_validation(got, 5, 0)
    expected = [[len(x) for x in one["input_ids"]] for one in (got, held)]
    assert sorted(expected[0]) == [*range(2, 40)] != expected[0]

    def read(*arguments, **options):
        raise AssertionError("a token is read")

    for name in ("__getitem__", "with_format", "iter"):
        monkeypatch.setattr(datasets.Dataset, name, read)
    assert [lengths_of(one).tolist() for one in (got, held)] == expected


# ---- processes


def test_large_data_take_processes_by_themselves(made, tmp_path, monkeypatch):
    entry, asked, real = texts(tmp_path / "a.jsonl", *["a"] * 50), [], preparing.encoded

    def encoded(source, encoder, count):
        asked.append(count)
        return real(source, encoder, count)

    monkeypatch.setattr(preparing, "encoded", encoded)
    monkeypatch.setattr(preparing, "RENEW", 2)
    monkeypatch.setattr(rows, "MOST_ROWS", 20)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.delenv("TILEWRIGHT_DATASET_NUM_PROC", raising=False)

    def prepared(name, **fields):
        got = made(entry, **fields, dataset_prepared_path=str(tmp_path / name))
        assert len(got) == 50

    prepared("small")
    prepared("asked", dataset_num_proc=2)
    monkeypatch.setattr(preparing, "LARGE", 10)
    prepared("large")
    prepared("one", dataset_num_proc=1)
    monkeypatch.setenv("TILEWRIGHT_DATASET_NUM_PROC", "2")
    prepared("environment")
    assert asked == [0, 2, 3, 1, 2]
    for value in ("0", "many"):
        monkeypatch.setenv("TILEWRIGHT_DATASET_NUM_PROC", value)
        with pytest.raises(ValueError, match=f"NUM_PROC = {value}: must be a number of processes"):
            platform.dataset_processes()


# ---- jobs that share


class Noted(Bytes):
    """Notes the process of each call, and never ends if it hangs."""

    def __init__(self, calls, hangs):
        self.calls, self.hangs = calls, hangs

    def __call__(self, text, add_special_tokens=True):
        if text != "a":
            with open(self.calls, "a") as out:
                out.write(f"{os.getpid()}\n")
            if self.hangs:
                time.sleep(600)
        return super().__call__(text, add_special_tokens)


def job(made, path, calls, hangs, said):
    handler = logging.FileHandler(said)
    logging.getLogger("tilewright").addHandler(handler)
    logging.getLogger("tilewright").setLevel(logging.INFO)
    got = made({"path": path, "type": "text"}, lambda: Noted(calls, hangs), dataset_num_proc=2)
    logging.getLogger("tilewright").info("has %d", len(got))


def test_jobs_share_and_a_killed_one_leaves_no_lock(tmp_path, made, forked):
    """The first is killed while its workers tokenize. Two others then prepare the data once, from
    files with other names.
    """
    paths = [tmp_path / name / "a.jsonl" for name in "ab"]
    for path in paths:
        texts(path, "one", "two", "three", "four")
    calls, told = tmp_path / "calls", [tmp_path / f"said{i}" for i in range(3)]
    killed = forked(job, made, paths[0], calls, True, told[0])
    until(calls.is_file)
    others = [forked(job, made, p, calls, False, t) for p, t in zip(paths, told[1:], strict=True)]
    waits = "data: another process is preparing the same data"
    until(lambda: all(t.is_file() and waits in t.read_text() for t in told[1:]))
    workers = {int(pid) for pid in calls.read_text().split()}
    killed.kill()
    for other in others:
        other.join(300)
        assert other.exitcode == 0
    assert [t.read_text().splitlines()[-1] for t in told[1:]] == ["has 4"] * 2
    assert len(calls.read_text().split()) - len(workers) == 4, "worked twice"
    until(lambda: not any(map(alive, workers)))
    left = [p for p in (tmp_path / "prepared").iterdir() if p.is_dir()]
    assert len(left) == 1 and not left[0].name.startswith(".")


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # nothing: a zombie
    except OSError:
        return False


# ---- the cache's key


def test_contents_are_the_key_and_not_paths_or_times(tmp_path, made):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_text("{}")
    entry = texts(tmp_path / "a.jsonl", "one")
    first = made(entry)["input_ids"][:]
    os.utime(entry["path"], ns=(0, 0))
    os.utime(tmp_path / "tokenizer/tokenizer.json", ns=(0, 0))
    assert made(entry, none)["input_ids"][:] == first
    moved = entry["path"].rename(tmp_path / "b.jsonl")
    assert made({**entry, "path": moved}, none, dataset_num_proc=2)["input_ids"][:] == first
    folder = tmp_path / "folder"
    folder.mkdir()
    moved.rename(folder / "c.jsonl")
    inside = {**entry, "path": folder}
    assert made(inside, none)["input_ids"][:] == first
    texts(folder / "c.jsonl", "two")
    second = made(inside)["input_ids"][:]
    assert second != first
    # A file of the same length, in the same nanosecond: then the notes are trusted.
    state = (folder / "c.jsonl").stat()
    texts(folder / "c.jsonl", "one")
    os.utime(folder / "c.jsonl", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert made(inside, none)["input_ids"][:] == second


def test_files_are_hashed_once(tmp_path, made, monkeypatch):
    entry = {"path": write_rows(tmp_path / "a.parquet", some(1))}
    made(entry, none)

    def digest(*arguments):
        raise AssertionError("a file is read again")

    monkeypatch.setattr(cache_key, "digests", digest)
    made(entry, none)
    (tmp_path / "prepared/hashes.json").write_text("torn {")
    with pytest.raises(AssertionError, match="a file is read again"):
        made(entry, none)


def test_an_address_is_known_by_its_etag(tmp_path, made, caplog):
    pytest.importorskip("aiohttp")
    tag = ["one"]

    class Handler(http.server.SimpleHTTPRequestHandler):
        def end_headers(self):
            self.send_header("ETag", tag[0])
            super().end_headers()

        def log_message(self, *arguments):
            pass

    path = write_rows(tmp_path / "served.jsonl", [{"input_ids": [1, 2]}])
    with served(tmp_path, Handler) as at:
        entry = {"path": f"{at}/{path.name}"}
        assert made(entry, none)["input_ids"][:] == [[1, 2]]
        write_rows(path, [{"input_ids": [3, 4]}])
        assert made(entry, none)["input_ids"][:] == [[1, 2]], "the tag is the same"
        tag[0] = "two"
        assert made(entry, none)["input_ids"][:] == [[3, 4]]
        (tmp_path / "served.txt").write_text("ab")
        text = {"path": f"{at}/served.txt", "type": "text"}
        assert bytes(made(text)["input_ids"][0]) == b"\1ab\0"
    with caplog.at_level(logging.WARNING, "tilewright"):
        assert made(entry, none)["input_ids"][:] == [[3, 4]]
    assert "served.jsonl: cannot ask whether it has changed (" in caplog.text


def test_a_set_on_the_hub_is_known_by_its_commit(made, monkeypatch):
    commit, asked = ["c1"], []

    class Api:
        def __init__(self, token):
            self.token = token

        def dataset_info(self, name, revision):
            asked.append((name, revision, self.token))
            return types.SimpleNamespace(sha=commit[0])

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    loaded = datasets.Dataset.from_dict({"input_ids": [[1, 2]]})
    unreachable_hub(monkeypatch, lambda *a, **k: loaded)
    entry = {"path": "org/set", "revision": "v1"}
    assert made(entry, none, hf_use_auth_token=True)["input_ids"][:] == [[1, 2]]
    loaded = datasets.Dataset.from_dict({"input_ids": [[3, 4]]})
    assert made(entry, none)["input_ids"][:] == [[1, 2]]
    commit[0] = "c2"
    assert made(entry, none)["input_ids"][:] == [[3, 4]]
    assert asked == [("org/set", "v1", token) for token in (True, None, None)]


def locked(path):
    with open(path, "w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os._exit(3)


def test_jobs_keep_each_others_notes(forked, tmp_path, monkeypatch):
    """Jobs that have begun with the same notes save theirs one at a time."""
    paths = [tmp_path / name for name in "ab"]
    both = [cache_key.Notes(tmp_path) for _ in paths]
    for path, notes in zip(paths, both, strict=True):
        path.write_text(path.name)
        notes.file(str(path))
    real, exits = pathlib.Path.replace, []

    def replace(self, target):
        other = forked(locked, tmp_path / ".hashes.json.lock")
        other.join()
        exits.append(other.exitcode)
        return real(self, target)

    monkeypatch.setattr(pathlib.Path, "replace", replace)
    for notes in both:
        notes.save()
    assert exits == [3, 3]
    assert sorted(cache_key.Notes(tmp_path).known) == list(map(str, paths))


def test_a_note_of_an_earlier_version_has_no_lines(tmp_path):
    """The file is read once more."""
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n")
    notes = cache_key.Notes(tmp_path)
    stat = path.stat()
    notes.known[str(path)] = [stat.st_size, stat.st_mtime_ns, "of that time"]
    found = notes.file(str(path))
    assert found == data_files.digests(str(path)) and found.lines == 1
    assert notes.file(str(path)) == found and notes.new.keys() == {str(path)}


def tokenizes(made, entry):
    """Whether an entry is prepared anew."""
    calls = []
    made(entry, lambda: calls.append(1) or Bytes())
    return bool(calls)


def test_a_tokenizer_on_the_hub_is_known_by_its_files(tmp_path, made, monkeypatch):
    monkeypatch.setattr(cache_key, "local_folder", lambda *_: str(tmp_path / "snapshot"))
    (tmp_path / "snapshot").mkdir()
    entry = texts(tmp_path / "a.jsonl", "one")
    for text in ("{}", '{"other": 1}'):
        (tmp_path / "snapshot/tokenizer.json").write_text(text)
        assert tokenizes(made, entry) and not tokenizes(made, entry)


def test_other_chat_templates_are_tokenizer_files(tmp_path, made):
    """They are in the key, and in what is exported, also into a folder that has some."""
    folder, name = tmp_path / "tokenizer", "additional_chat_templates/tool_use.jinja"
    (folder / name).parent.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    entry = texts(tmp_path / "a.jsonl", "one")
    for text in ("one", "other"):
        (folder / name).write_text(text)
        assert tokenizes(made, entry)
        with files.written_aside(tmp_path / "out") as aside:
            (aside / "weights").touch()
            for file in hf.tokenizer_files(folder):
                files.copy_into(file, aside)
            files.publish(aside, tmp_path / "out", "weights", "tokenizer.json", fits=True)
        assert (tmp_path / "out" / name).read_text() == text


def test_data_of_no_known_version_are_named(made, monkeypatch, caplog):
    def version(entry, token):
        if told is OSError:
            raise OSError
        return told

    monkeypatch.setattr(cache_key, "version", version)
    loaded = datasets.Dataset.from_dict({"input_ids": [[1, 2]]})
    unreachable_hub(monkeypatch, lambda *a, **k: loaded)
    for i, told in enumerate((None, OSError, "commit", [["a", ["tag"]], ["b", []]])):
        with caplog.at_level(logging.WARNING, "tilewright"):
            made({"path": f"org/set{i}"}, none)
        warned = f"org/set{i}: its server tells no version (ETag or commit), so that later changes"
        assert (warned in caplog.text) == (told != "commit")


def test_samples_that_are_too_short_are_counted(tmp_path, made, caplog):
    tokens = [{"input_ids": ids} for ids in ([1], [1] * 70, [], [1, 2])]
    with caplog.at_level(logging.WARNING, "tilewright"):
        assert len(made({"path": write_rows(tmp_path / "a.jsonl", tokens)}, none)) == 2
        assert "a.jsonl: 2 samples of fewer than two tokens were left out" in caplog.text
        assert "a.jsonl: 1 of 4 samples were longer than 64 tokens" in caplog.text
        caplog.clear()
        # The first is an end token alone.
        assert len(made(texts(tmp_path / "b.jsonl", "", "long"), Words)) == 1
        assert not caplog.text


class Killed(Bytes):
    """A worker that gets a certain text is killed."""

    def __call__(self, text, add_special_tokens=True):
        if text == "two" and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(text, add_special_tokens)


def test_a_killed_worker_is_one_sentence(tmp_path, made):
    entry = texts(tmp_path / "a.jsonl", "one", "two")
    said = f"^a process that prepares {entry['path']} has ended, perhaps for lac"
    with pytest.raises(OSError, match=said):
        made(entry, Killed, dataset_num_proc=2)


def handler(lengths, capacity):
    """In place of a group's bins: whether its process ignores SIGINT."""
    return [np.array([signal.getsignal(signal.SIGINT) == signal.SIG_IGN])]


@pytest.mark.parametrize("ranks, count", [("1", 4), ("2", 2), ("8", 1)])
def test_ranks_share_the_processes_that_pack(monkeypatch, ranks, count):
    """And leave signals to the rank."""
    counts, real = [], packing.ProcessPoolExecutor

    def pool(count, **options):
        counts.append(count)
        return real(1, **options)

    monkeypatch.setattr(packing, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(packing, "first_fit_decreasing", handler)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(4)})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    ignored = packing.multipack(np.ones(5, np.int64), 8, 1, "fork")
    assert counts == [count] and [int(x[0]) - i for i, x in enumerate(ignored)] == [1] * 5
