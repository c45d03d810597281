"""Every token is trained on once per epoch, whatever its source, the packing and the number of
ranks.
"""

import functools
import http.server
import importlib
import itertools
import json
import logging
import math
import os
import pathlib
import random
import re
import shutil
import ssl
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
import torch

pytest.importorskip("datasets")
pytest.importorskip("pydantic")

import datasets
import fsspec
from preparing import prepare_of, write_rows

from tilewright.trainer.columns import IGNORE
from tilewright.trainer.config import Config
from tilewright.trainer.data import batches as module_of_batches
from tilewright.trainer.data import cache_key, packing, sources
from tilewright.trainer.data import prepare as preparing
from tilewright.trainer.data.batches import Bins, collate, evaluation_batches
from tilewright.trainer.data.json_file import JsonFile
from tilewright.trainer.data.packing import pack
from tilewright.trainer.data.prepared import check_targets, split_validation

pytestmark = pytest.mark.packages

ROOT = next(p for p in pathlib.Path(__file__).resolve().parents if (p / "pyproject.toml").is_file())
VOCAB = 1000


def Batches(bins, config, **options):
    return module_of_batches.Batches(bins, config.data, config.train, **options)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def make(tmp_path):
    """A configuration of small bins; `datasets` are paths or entries, and fields of train are given
    by name.
    """

    def make(*entries, train=None, model=None, test=(), **fields):
        def listed(given):
            return [
                {"path": str(e)} if not isinstance(e, dict) else e | {"path": str(e["path"])}
                for e in given
            ]

        fields = {
            "dataset_prepared_path": str(tmp_path / "prepared"),
            "sample_packing_sequence_len": 16,
            "pad_to_multiple_of": 8,
            "datasets": listed(entries or ["dummy"]),
            "test_datasets": listed(test),
        } | fields
        return Config(
            model={"config_path": str(tmp_path / "tokenizer")} | (model or {}),
            data=fields,
            train={"output_dir": "out"} | (train or {}),
        )

    return make


class Characters:
    """A tokenizer with one token per character. Counts its calls."""

    eos_token_id = 0

    def __init__(self, offset=0):
        self.offset, self.calls = offset, []

    def __call__(self, text, add_special_tokens=True):
        self.calls.append(text)
        return {"input_ids": [ord(c) + self.offset for c in text]}

    def __reduce__(self):  # datasets hashes the mapped function: exclude the count
        return Characters, (self.offset,)


def none():
    raise AssertionError("nothing is to be tokenized")


def prepared(config, tokenizer=none, entries=None, **options):
    return prepare_of(config, tokenizer, VOCAB, entries, **options)


def jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def samples(number, *, longest=14, seed=0):
    """Rows of distinct tokens, so that each can be traced. None is 0, which fills batches."""
    rng = random.Random(seed)
    tokens = iter(rng.sample(range(1, VOCAB), VOCAB - 1))
    return [
        {"input_ids": [next(tokens) for _ in range(rng.randint(2, longest))]} for _ in range(number)
    ]


def rows(dataset):
    return [list(x) for x in dataset["input_ids"]]


def bins_of(make, number=50, **fields):
    made = datasets.Dataset.from_list([r | {"labels": r["input_ids"]} for r in samples(number)])
    return Bins(made, make(**fields).data)


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


# ---- packing

LENGTHS = [np.random.default_rng(seed).integers(1, 65, 10 * seed).tolist() for seed in range(1, 21)]
EDGES = [[], [64], [1], [64, 64], [64, 1, 63, 2], [1] * 64, [1] * 65, [33] * 9]


@pytest.mark.parametrize(
    "method, group", [("sequential", 100), ("multipack", 7), ("multipack", 10**6)]
)
def test_every_document_is_in_one_bin_and_no_bin_overflows(method, group):
    for lengths in LENGTHS + EDGES:
        bins = pack(lengths, 64, method, group)
        assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
        assert all(len(b) and sum(lengths[i] for i in b) <= 64 for b in bins)
        assert [list(b) for b in bins] == [sorted(b) for b in bins]


def test_sequential_keeps_order_and_closes_a_bin_only_when_it_must():
    for lengths in LENGTHS + EDGES:
        bins = pack(lengths, 64)
        assert [i for b in bins for i in b] == list(range(len(lengths)))
        for b, following in itertools.pairwise(bins):
            assert sum(lengths[i] for i in b) + lengths[following[0]] > 64


def test_multipack_needs_no_more_bins_than_sequential():
    for lengths in LENGTHS + EDGES:
        assert len(pack(lengths, 64, "multipack")) <= len(pack(lengths, 64))
    assert len(pack([40, 40, 24, 24], 64, "multipack")) == 2 < len(pack([40, 40, 24, 24], 64))


def test_multipack_is_first_fit_decreasing():
    """Against the definition, written out."""
    for lengths in LENGTHS:
        bins, room = [], []
        for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            j = next((j for j, r in enumerate(room) if r >= lengths[i]), None)
            if j is None:
                j = len(bins)
                bins.append([])
                room.append(64)
            bins[j].append(i)
            room[j] -= lengths[i]
        assert [list(b) for b in pack(lengths, 64, "multipack")] == [sorted(b) for b in bins]


@pytest.mark.parametrize("method", [None, "fork"])
def test_processes_pack_groups_alike(method, monkeypatch):
    lengths, started = joined(LENGTHS), []
    real = packing.ProcessPoolExecutor

    def pool(count, mp_context, **options):
        started.append(mp_context.get_start_method())
        return real(2, mp_context=mp_context, **options)

    monkeypatch.setattr(packing, "ProcessPoolExecutor", pool)
    expected = pack(lengths, 64, "multipack", 300)
    got = pack(lengths, 64, "multipack", 300, method)
    assert [list(b) for b in got] == [list(b) for b in expected]
    pack(lengths, 64, "multipack", 10**6, method)  # one group: no process
    assert started == [method] * (method is not None)


def test_bins_of_real_lengths_are_full():
    """Speeches, lines and a distribution with a long tail."""
    plays = (ROOT / "examples/data/shakespeare/train").glob("*.txt")
    text = "".join(p.read_text() for p in plays)
    words = lambda parts: [n for p in parts if (n := len(re.findall(r"\w+|[^\w\s]", p)))]  # noqa: E731
    tail = np.clip(np.random.default_rng(0).lognormal(5.5, 1.2, 50_000), 2, 4096).astype(int)
    for lengths, capacity in (
        (words(text.split("\n\n")), 1024),
        (words(text.splitlines()), 256),
        (tail, 4096),
    ):
        assert len(lengths) > 500
        bins = pack(lengths, capacity, "multipack")
        assert sum(lengths) >= 0.98 * capacity * len(bins)


def test_packing_takes_n_log_n_steps():
    lengths = np.random.default_rng(0).integers(1, 65, 4096)
    # 5 times the steps of 1024; a search through all bins takes 16 times.
    assert (
        4 < steps(pack, lengths, 64, "multipack") / steps(pack, lengths[:1024], 64, "multipack") < 6
    )


def steps(function, *arguments):
    """Calls of a function, and the lines that it runs, with all that it calls."""
    count = 0

    def trace(*_):
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*arguments)
    finally:
        sys.settrace(before)
    return count


def test_groups_are_packed_apart():
    assert [list(b) for b in pack([32] * 6, 64, "multipack", 3)] == [[0, 1], [2], [3, 4], [5]]


def test_pack_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="document 1 has 65 tokens, a bin holds 64"):
        pack([1, 65], 64)
    with pytest.raises(ValueError, match="method must be sequential or multipack, got 'best'"):
        pack([1], 64, "best")


@pytest.mark.parametrize(
    "fields, same",
    [
        ({"sample_packing_method": "multipack"}, False),
        ({"sample_packing_method": "multipack", "sample_packing_sequentially": True}, True),
        ({"sample_packing_method": "multipack", "sample_packing_sequentially": False}, False),
        ({"sample_packing_method": "multipack", "sample_packing_group_size": 1}, None),
        ({}, True),
    ],
)
def test_method_and_group_are_the_configured_ones(make, fields, same):
    bins, sequential = bins_of(make, **fields), bins_of(make)
    if same is None:
        assert len(bins) == 50  # one bin per group of one
    else:
        assert ([list(b) for b in bins.bins] == [list(b) for b in sequential.bins]) == same
    assert bins.tokens == sum(len(r["input_ids"]) for r in samples(50))


# ---- a batch


def test_batch_at_the_borders_of_documents():
    first = (np.array([10, 11, 12]), np.array([10, 11, 12]))
    second = (np.array([20, 21]), np.array([IGNORE, 21]))
    batch = collate([[first], [second]], 8)
    assert batch["input_ids"].tolist() == [[10, 11, 12, 20, 21, 0, 0, 0]]
    assert batch["labels"].tolist() == [[11, 12, IGNORE, 21, IGNORE, IGNORE, IGNORE, IGNORE]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch["real"].tolist() == [[True] * 5 + [False] * 3]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 8] and batch["cu_seqlens"].dtype == torch.int32
    assert all(batch[k].dtype == torch.int64 for k in ("input_ids", "labels", "position_ids"))
    whole = collate([[first], [second]], 5)
    assert whole["input_ids"].shape == (1, 5) and whole["cu_seqlens"].tolist() == [0, 3, 5]
    assert collate([[(np.array([1, 2]), np.array([IGNORE, IGNORE]))]], 1)["labels"].tolist() == [
        [IGNORE, IGNORE]
    ]


@pytest.mark.parametrize("multiple, tp", [(1, 1), (8, 1), (6, 4)])
def test_micro_batches_are_padded_no_further_than_needed(make, multiple, tp):
    """Of training and of evaluation: to the next multiple of what all ranks can divide."""
    fields = {"pad_to_multiple_of": multiple, "sample_packing_sequence_len": 32}
    bins = bins_of(make, **fields)
    loader = Batches(bins, make(**fields, train={"micro_batch_size": 2}), tp=tp)
    found = [batch for [batch] in itertools.islice(loader.steps(), loader.steps_per_epoch)]
    found += evaluation_batches(bins, 2, 0, 1, tp=tp)
    step, padded = math.lcm(multiple, tp), 0
    for batch in found:
        width, real = batch["input_ids"].shape[1], int((batch["input_ids"] != 0).sum())
        assert width == -(-real // step) * step
        padded += width > real
    assert len(found) > 10 and (padded > 0) == (step > 1)


@pytest.mark.parametrize("method", ["sequential", "multipack"])
def test_a_label_is_the_next_token_of_the_same_document(make, method):
    bins = bins_of(make, sample_packing_method=method)
    following = {a: b for r in samples(50) for a, b in itertools.pairwise(r["input_ids"])}
    seen = 0
    for i in range(len(bins)):
        batch = collate([bins[i]], 8)
        ends = set((batch["cu_seqlens"][1:] - 1).tolist())
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        for at, (token, label) in enumerate(zip(ids, labels, strict=True)):
            padding = at >= sum(len(ids) for ids, _ in bins[i])
            assert label == (IGNORE if padding or at in ends else following[token])
            seen += label != IGNORE
        assert (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist() == batch["cu_seqlens"][
            :-1
        ].tolist()
        assert batch["input_ids"].shape[1] % 8 == 0
    assert seen == len(following)


# ---- reading

TOKENS = [[5, 6, 7], [8, 9], [1, 2, 3, 4]]


def write(folder, suffix, columns):
    folder.mkdir(exist_ok=True)
    path, made = folder / f"a.{suffix}", datasets.Dataset.from_dict(columns)
    if suffix == "arrow":
        made.save_to_disk(folder / "saved")
        next((folder / "saved").glob("*.arrow")).rename(path)
        shutil.rmtree(folder / "saved")
    else:
        {
            "jsonl": made.to_json,
            "json": made.to_json,
            "parquet": made.to_parquet,
            "csv": made.to_csv,
        }[suffix](path)
    return path


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("how", ["file", "folder", "data_files", "ds_type"])
def test_tokens_are_read_from_every_format(tmp_path, make, suffix, how):
    path = write(tmp_path / "data", suffix, {"input_ids": TOKENS})
    kind = "json" if suffix == "jsonl" else suffix
    if how == "ds_type":
        path = path.rename(path.with_suffix(".part"))
    entry = {
        "file": path,
        "folder": path.parent,
        "ds_type": {"path": path, "ds_type": kind},
        "data_files": {"path": path.parent, "data_files": path.name, "ds_type": kind},
    }[how]
    got = prepared(
        make(entry, shuffle_merged_datasets=False, shuffle_before_merging_datasets=False)
    )
    assert rows(got) == TOKENS and got["labels"][:] == got["input_ids"][:]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet", "arrow", "txt"])
def test_text_is_read_from_every_format(tmp_path, make, suffix):
    if suffix == "txt":
        (tmp_path / "data").mkdir()
        (tmp_path / "data/a.txt").write_text("ab\n\ncd")  # each file is one document
    else:
        write(tmp_path / "data", suffix, {"text": ["ab\n\ncd"], "other": [3]})
    got = prepared(make({"path": tmp_path / "data", "type": "text"}), Characters)
    assert rows(got) == [[97, 98, 10, 10, 99, 100, 0]]
    assert got.column_names == ["input_ids", "labels", "source_row"]


def test_files_of_a_mixed_folder_are_chosen_by_ds_type(tmp_path, make):
    jsonl(tmp_path / "data/a.jsonl", [{"input_ids": [1, 2]}])
    (tmp_path / "data/README.txt").write_text("about")
    assert rows(prepared(make({"path": tmp_path / "data", "ds_type": "json"}))) == [[1, 2]]
    with pytest.raises(ValueError, match=r"needs files of one kind.*found \['json', 'text'\]"):
        prepared(make(tmp_path / "data"))


def test_data_files_take_patterns_and_lists(tmp_path, make):
    for i in range(4):
        jsonl(tmp_path / f"data/{'ab'[i % 2]}{i}.jsonl", [{"input_ids": [i, i]}])
    entry = {"path": tmp_path / "data", "ds_type": "json"}
    assert sorted(rows(prepared(make(entry | {"data_files": "a*.jsonl"})))) == [[0, 0], [2, 2]]
    assert sorted(rows(prepared(make(entry | {"data_files": ["a0.jsonl", "b3.jsonl"]})))) == [
        [0, 0],
        [3, 3],
    ]


def test_splits(tmp_path, make):
    path = jsonl(tmp_path / "a.jsonl", [{"input_ids": [i, i]} for i in range(10)])
    assert sorted(rows(prepared(make({"path": path, "split": "train[:20%]"})))) == [[0, 0], [1, 1]]
    with pytest.raises(ValueError, match="validation"):
        prepared(make({"path": path, "split": "validation"}))
    one = datasets.Dataset.from_dict({"input_ids": [[1, 2]]})
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=one, test=one.map(lambda r: {"input_ids": [3, 4]})).save_to_disk(
        tmp_path / "two"
    )
    datasets.DatasetDict(test=one).save_to_disk(tmp_path / "only")
    assert (
        rows(prepared(make(tmp_path / "one")))
        == rows(prepared(make(tmp_path / "only")))
        == [[1, 2]]
    )
    assert rows(prepared(make({"path": tmp_path / "two", "split": "test"}))) == [[3, 4]]
    for entry, message in (
        ({"path": tmp_path / "two"}, "has the splits test, train; set split"),
        ({"path": tmp_path / "two", "split": "dev"}, "has the splits test, train; set split"),
        ({"path": tmp_path / "one", "split": "train"}, "without splits"),
        ({"path": tmp_path / "one", "ds_type": "json"}, "knows its format"),
    ):
        with pytest.raises(ValueError, match=message):
            prepared(make(entry))


@pytest.mark.parametrize(
    "entry, fields, expected",
    [
        (
            {"path": "org/set", "name": "sub", "revision": "abc", "split": "dev"},
            {"hf_use_auth_token": False},
            (("org/set",), {"name": "sub", "revision": "abc", "split": "dev", "token": False}),
        ),
        (
            {"path": "org/set"},
            {},
            (("org/set",), {"name": None, "revision": None, "split": None, "token": None}),
        ),
        (
            {
                "path": "org/set",
                "data_files": ["a.csv", "b.csv"],
                "ds_type": "csv",
                "revision": "abc",
            },
            {"hf_use_auth_token": True},
            ([f"hf://datasets/org/set@abc/{x}.csv" for x in "ab"], True),
        ),
        (
            {"path": "s3://b/x.parquet"},
            {},
            (["s3://b/x.parquet"], None),
        ),
        (
            {"path": "https://b/x/", "data_files": "*.json", "ds_type": "json"},
            {},
            (["https://b/x/*.json"], None),
        ),
    ],
)
def test_what_the_network_is_asked_for(make, monkeypatch, tmp_path, entry, fields, expected):
    asked, path = [], str(jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}]))
    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return datasets.Dataset.from_dict({"input_ids": [[1, 2]]})

    def downloaded(files, token):
        asked.append((files, token))
        return [(path, file) for file in files]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sources, "downloaded", downloaded)
    monkeypatch.setattr(sources, "_opened", lambda kind, path, shown: JsonFile(path, shown))
    monkeypatch.setattr(cache_key, "version", lambda entry, token: None)
    monkeypatch.setattr(sources.platform, "no_module", lambda name: None)
    assert {*map(tuple, rows(prepared(make(entry, **fields))))} == {(1, 2)}
    assert asked == [expected]


def unreachable(*arguments, **options):
    raise OSError("the Hub cannot be reached")


def on_hub(monkeypatch, kind, splits, **options):
    """Lets a set on the Hub have some files, as the datasets package tells of them."""
    loader = importlib.import_module(f"datasets.packaged_modules.{kind}.{kind}")
    files = {split: [str(f) for f in files] for split, files in splits.items()}
    config = getattr(loader, f"{kind.capitalize()}Config")(**options)
    config.data_files = datasets.data_files.DataFilesDict(
        {s: datasets.data_files.DataFilesList(f, [()] * len(f)) for s, f in files.items()}
    )
    builder = types.SimpleNamespace(name=kind, config=config)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda path, **options: builder)
    monkeypatch.setattr(cache_key, "version", lambda entry, token: "commit")


def test_a_set_on_the_hub_is_read_from_its_files(make, monkeypatch, tmp_path):
    """Not from what the datasets package guesses of them; splits are those of the set."""
    texts = {"train": ["words", "2000-01-02"], "test": ["1.10", "007"]}
    for kind in ("json", "csv", "parquet", "arrow"):
        files = {s: [tmp_path / f"{kind}/{s}{i}.{kind}" for i in range(2)] for s in texts}
        for split, paths in files.items():
            for path, text in zip(paths, texts[split], strict=True):
                path.parent.mkdir(exist_ok=True)
                write_rows(path, [{"text": text}])
        on_hub(monkeypatch, kind, files)
        for split, wanted in (
            ("train", texts["train"]),
            ("test", texts["test"]),
            ("train[50%:]+test[:1]", ["2000-01-02", "1.10"]),
        ):
            entry = {"path": "org/set", "type": "text", "split": split}
            found = prepared(make(entry, dataset_prepared_path=str(tmp_path / kind)), Characters)
            assert sorted("".join(map(chr, r[:-1])) for r in rows(found)) == sorted(wanted)
        with pytest.raises(ValueError, match="org/set: has the splits test, train; set split"):
            prepared(make({"path": "org/set", "type": "text"}), Characters)
    on_hub(monkeypatch, "csv", files, sep=";")
    with pytest.raises(ValueError, match="org/set: its card has sep = ';' for files of csv"):
        prepared(make({"path": "org/set", "type": "text", "split": "train"}), Characters)


def test_texts_whose_types_were_guessed_are_not_taken_from_the_cache(make, monkeypatch):
    """Of the datasets package, which has them where the Hub cannot be asked."""
    made = datasets.Dataset.from_dict({"input_ids": [[1, 2]]})
    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: made)
    monkeypatch.setattr(cache_key, "version", lambda entry, token: "commit")
    assert rows(prepared(make("org/set"))) == [[1, 2]]
    made.info.builder_name = "csv"
    with pytest.raises(
        FileNotFoundError, match="org/other: the Hub does not give its files of csv"
    ):
        prepared(make("org/other"))


def test_addresses_are_read(tmp_path, make):
    """From this machine. A missing file and an unresponsive server give one sentence."""
    pytest.importorskip("aiohttp")
    path = jsonl(tmp_path / "served/a.jsonl", [{"input_ids": ids} for ids in TOKENS])
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=path.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        at = f"http://127.0.0.1:{server.server_port}"
        for entry in (f"{at}/a.jsonl", {"path": at, "data_files": "a.jsonl", "ds_type": "json"}):
            config = make(entry)
            assert sorted(rows(prepared(config))) == sorted(TOKENS)
        absent = config.data.datasets[0].model_copy(
            update={"path": f"{at}/b.jsonl", "data_files": None}
        )
        with pytest.raises(
            OSError, match=rf"^{at}/b.jsonl: cannot be read: FileNotFoundError: Unable to find"
        ):
            prepared(config, entries=[absent])
        server.shutdown()
    for name in ("c.jsonl", "*.jsonl"):
        gone = config.data.datasets[0].model_copy(update={"data_files": name})
        with pytest.raises(OSError, match=rf"^{at}: cannot be read: \w+: \S.*$"):
            prepared(config, entries=[gone])


def test_an_address_by_https_is_read_if_its_certificate_is_trusted(tmp_path, make, monkeypatch):
    aiohttp = pytest.importorskip("aiohttp")
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command, which makes the certificate")
    path = jsonl(tmp_path / "served/a.jsonl", [{"input_ids": ids} for ids in TOKENS])
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    made += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=certificate)

    async def client(loop, **options):
        connector = aiohttp.TCPConnector(ssl=trusting)
        return aiohttp.ClientSession(connector=connector, **options)

    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=path.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        at = f"https://127.0.0.1:{server.server_port}/a.jsonl"
        with pytest.raises(OSError, match=rf"^{at}: cannot be read: .*Unable to find"):
            prepared(make(at))
        # In place of SSL_CERT_FILE, which aiohttp has read when it was imported.
        monkeypatch.setitem(fsspec.config.conf, "https", {"get_client": client})
        assert sorted(rows(prepared(make(at)))) == sorted(TOKENS)
        server.shutdown()


def test_whatever_a_file_system_raises_is_one_sentence(make, monkeypatch):
    """s3fs, gcsfs and adlfs pass on their libraries' exceptions, which have no common base."""

    class NoCredentialsError(Exception):
        pass

    def downloaded(files, token):
        raise NoCredentialsError("Unable to\n\tlocate credentials")

    monkeypatch.setattr(sources, "downloaded", downloaded)
    monkeypatch.setattr(sources.platform, "no_module", lambda name: None)
    for entry in (
        {"path": "s3://b/x.jsonl"},
        {"path": "org/set", "data_files": "x.json", "ds_type": "json"},
    ):
        with pytest.raises(OSError) as caught:
            prepared(make(entry))
        assert (
            str(caught.value)
            == f"{entry['path']}: cannot be read: NoCredentialsError: Unable to locate credentials"
        )


def test_dummy_data(make):
    config = make(test=["dummy"])
    got = rows(prepared(config))
    assert len(got) == sources.DUMMY_SAMPLES and all(
        2 <= len(r) <= 16 and 0 <= min(r) <= max(r) < VOCAB for r in got
    )
    assert len({len(r) for r in got}) > 5
    assert got == rows(
        prepared(make(dataset_prepared_path=config.data.dataset_prepared_path + "2"))
    )
    assert got != rows(prepared(make(train={"seed": 1})))
    held = rows(prepared(config, entries=config.data.test_datasets, shuffle=False))
    assert not {tuple(r) for r in got if len(r) > 4} & {tuple(r) for r in held}, (
        "evaluated on what was trained on"
    )
    assert (
        len(prepared(make({"path": "dummy", "shards": 4, "shards_idx": 1, "max_seq_len": 4})))
        == len(got) // 4
    )


# ---- preparation


def test_long_samples_are_cut_and_counted(tmp_path, make, caplog):
    path = jsonl(
        tmp_path / "a.jsonl",
        [{"input_ids": list(range(n)), "labels": [IGNORE, *range(1, n)]} for n in (3, 20, 10, 40)],
    )
    with caplog.at_level(logging.WARNING, "tilewright"):
        got = prepared(make(path))
    assert sorted(map(len, rows(got))) == [3, 10, 16, 16]
    assert all(list(r["labels"]) == [IGNORE, *r["input_ids"][1:]] for r in got)
    assert "2 of 4 samples were longer than 16 tokens and were cut" in caplog.text
    with caplog.at_level(logging.WARNING, "tilewright"):
        got = prepared(make({"path": path, "max_seq_len": 5}))
    assert sorted(map(len, rows(got))) == [3, 5, 5, 5]
    assert "3 of 4 samples were longer than 5 tokens and were cut" in caplog.text


def test_text_is_cut_into_pieces_that_join_to_the_documents(tmp_path, make):
    texts = ["x" * n for n in (1, 15, 16, 33, 100)]
    path = jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts])
    got = rows(
        prepared(
            make(
                {"path": path, "type": "text"},
                shuffle_merged_datasets=False,
                shuffle_before_merging_datasets=False,
            ),
            Characters,
        )
    )
    assert max(map(len, got)) == 16 and min(map(len, got)) > 1
    assert "".join("".join("|" if i == 0 else chr(i) for i in r) for r in got) == "".join(
        t + "|" for t in texts
    )
    got = rows(prepared(make({"path": path, "type": "text", "max_seq_len": 7}), Characters))
    assert max(map(len, got)) == 7


def test_samples_of_one_token_are_left_out(tmp_path, make):
    path = jsonl(tmp_path / "a.jsonl", [{"input_ids": ids} for ids in ([1], [], [2, 3])])
    assert rows(prepared(make(path))) == [[2, 3]]


def test_samples_without_a_target_are_counted(tmp_path, make, caplog):
    """More than half of them is a warning. They are context of the others' bins, and stay."""
    labeled = {"input_ids": [1, 2], "labels": [IGNORE, 2]}
    unlabeled = {"input_ids": [3, 4], "labels": [3, IGNORE]}
    few = jsonl(tmp_path / "few.jsonl", [labeled, unlabeled])
    many = jsonl(tmp_path / "many.jsonl", [labeled, unlabeled, unlabeled])
    with caplog.at_level(logging.WARNING, "tilewright"):
        assert len(prepared(make(few))) == 2 and not caplog.messages
        assert len(prepared(make(many))) == 3
    [said] = caplog.messages
    assert "many.jsonl: 2 of 3 samples have no label after their first token" in said


def test_a_set_without_a_target_is_refused(tmp_path):
    """Wherever it comes from: prepared elsewhere, or what is left after a split."""
    made = datasets.Dataset.from_list(
        [{"input_ids": [1, 2], "labels": [1, IGNORE]}] * 1500
        + [{"input_ids": [3, 4], "labels": [3, 4]}]
    )
    check_targets(made, "all")
    check_targets(made.select([1500, 3]), "shuffled")
    for rest in (made.select(range(1500)), made.select([])):
        said = f"some: nothing can be learned: none of the {len(rest)} samples has a label"
        with pytest.raises(ValueError, match=said):
            check_targets(rest, "some")


def test_shards_part_the_data(tmp_path, make):
    all_rows = [{"input_ids": [i, i]} for i in range(11)]
    path = jsonl(tmp_path / "a.jsonl", all_rows)
    by_entry = [
        rows(prepared(make({"path": path, "shards": 3, "shards_idx": i}))) for i in range(3)
    ]
    by_data = [
        rows(prepared(make(path, dataset_shard_num=3, dataset_shard_idx=i))) for i in range(3)
    ]
    for parts in (by_entry, by_data):
        assert sorted(joined(parts)) == [r["input_ids"] for r in all_rows] and all(
            3 <= len(p) <= 4 for p in parts
        )
    for chunks in (1, 4, 30):  # also more chunks than rows
        assert sorted(rows(prepared(make({"path": path, "preprocess_shards": chunks})))) == sorted(
            joined(by_data)
        )


def test_processes_do_not_change_what_is_prepared(tmp_path, make):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x" * n} for n in range(1, 30)])
    entry = {"path": path, "type": "text"}
    one, two = (
        make(entry, dataset_num_proc=n, dataset_prepared_path=str(tmp_path / f"p{n}"))
        for n in (None, 2)
    )
    assert rows(prepared(one, Characters)) == rows(prepared(two, Characters))


def test_order_of_merged_data(tmp_path, make):
    paths = [
        jsonl(tmp_path / f"{c}.jsonl", [{"input_ids": [100 * k + i, 0]} for i in range(30)])
        for k, c in enumerate("ab")
    ]

    def order(merged, before, seed=42):
        return [
            r[0]
            for r in rows(
                prepared(
                    make(
                        *paths,
                        shuffle_merged_datasets=merged,
                        shuffle_before_merging_datasets=before,
                        train={"seed": seed},
                    )
                )
            )
        ]

    plain = order(False, False)
    assert plain == [*range(30), *range(100, 130)]
    assert order(False, True) != plain and sorted(order(False, True)[:30]) == plain[:30]
    assert max(order(True, False)[:30]) >= 100 and sorted(order(True, True)) == plain
    assert order(True, True) == order(True, True) != order(True, True, seed=1)


def test_integers_of_other_widths_merge(tmp_path, make):
    made = datasets.Dataset.from_dict({"input_ids": TOKENS})
    for name, width in (("a", "int16"), ("b", "int64")):
        made.cast_column("input_ids", datasets.Sequence(datasets.Value(width))).to_parquet(
            tmp_path / f"{name}.parquet"
        )
    assert sorted(rows(prepared(make(tmp_path / "a.parquet", tmp_path / "b.parquet")))) == sorted(
        TOKENS * 2
    )


def test_columns(tmp_path, make):
    path = jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2], "labels": [IGNORE, 2], "text": "ab"}])
    assert prepared(make(path))[0]["labels"] == [IGNORE, 2]
    assert prepared(make(path, select_columns=["input_ids"]))[0]["labels"] == [1, 2]
    with pytest.raises(
        ValueError, match=r"type tokenized needs a column `input_ids`, has .'labels'"
    ):
        prepared(make(path, select_columns=["labels"]))
    with pytest.raises(
        ValueError, match=r"data.select_columns: \['x'\] not in .*a.jsonl, which has"
    ):
        prepared(make({"path": path, "type": "text"}, select_columns=["text", "x"]), Characters)


@pytest.mark.parametrize(
    "lines, kind, message",
    [
        (
            [{"tokens": [1, 2]}],
            "tokenized",
            r"type tokenized needs a column `input_ids`, has \['tokens'\]$",
        ),
        (
            [{"text": "ab"}],
            "tokenized",
            r"`input_ids`, has \['text'\]; for samples that are text set type to text$",
        ),
        (
            [{"input_ids": [1, 2]}],
            "text",
            r"has \['input_ids'\]; for samples that are tokens set type to tokenized$",
        ),
        ([{"tokens": [1, 2]}], "text", r"type text needs a column `text`, has \['tokens'\]$"),
        (
            [{"input_ids": [1, 2], "labels": [1]}],
            "tokenized",
            "a.jsonl: line 1: it has 2 input_ids and 1 labels",
        ),
        (
            [{"input_ids": [1] * 20, "labels": [1] * 21}],
            "tokenized",
            "it has 20 input_ids and 21 labels",
        ),
        (
            [{"input_ids": "1 2"}],
            "tokenized",
            "a.jsonl: line 1: the column `input_ids` must hold lists of integers, not a string, '1 2'",
        ),
        (
            [{"input_ids": [0.5, 1.5]}],
            "tokenized",
            "a.jsonl: line 1: the column `input_ids` must hold lists of integers, not lists with 0.5",
        ),
        (
            [{"input_ids": [1, 2], "labels": ["a", "b"]}],
            "tokenized",
            "`labels` must hold lists of integers",
        ),
        (
            [{"input_ids": [1, 2]}, {"input_ids": None}],
            "tokenized",
            "a.jsonl: line 2: it has no input_ids",
        ),
        (
            [{"input_ids": [1, VOCAB]}],
            "tokenized",
            f"token {VOCAB} is not in the model's vocabulary of {VOCAB}",
        ),
        ([{"input_ids": [1, None]}], "tokenized", "line 1: a token in it is null"),
        ([{"input_ids": [1, -1]}], "tokenized", "token -1 is not in the model's vocabulary"),
        ([{"input_ids": [1, IGNORE]}], "tokenized", "token -100 is not in the model's vocabulary"),
        (
            [{"input_ids": [1, 2], "labels": [-1, 2]}],
            "tokenized",
            "token -1 is not in the model's vocabulary",
        ),
        (
            [{"input_ids": [1, 2], "labels": [1, 5000]}],
            "tokenized",
            "token 5000 is not in the model's vocabulary",
        ),
        ([{"text": 3}], "text", "line 1: the column `text` must hold strings, not a number, 3"),
        ([{"text": ["a"]}], "text", "line 1: the column `text` must hold strings, not a list"),
        ([{"text": "a"}, {"text": None}], "text", "a.jsonl: line 2: it has no text"),
        ([{"text": "\u2192"}], "text", "token 8594 is not in the model's vocabulary"),
        (
            [{"input_ids": [1]}],
            "tokenized",
            "a.jsonl: nothing can be learned: they hold no sample of two tokens or more",
        ),
        (  # no token precedes the first, whose label is then no target
            [{"input_ids": [1, 2], "labels": labels} for labels in ([1, IGNORE], [IGNORE, IGNORE])],
            "tokenized",
            "a.jsonl: nothing can be learned: none of the 2 samples has a label after its first",
        ),
        (  # the only label is beyond the cut
            [{"input_ids": [1] * 20, "labels": [IGNORE] * 18 + [1, 1]}],
            "tokenized",
            "none of the 1 samples has a label after its first token",
        ),
    ],
)
def test_unusable_rows_are_named(tmp_path, make, lines, kind, message):
    with pytest.raises(ValueError, match=message):
        prepared(make({"path": jsonl(tmp_path / "a.jsonl", lines), "type": kind}), Characters)
    assert not list((tmp_path / "prepared").glob("[0-9a-f]*"))


@pytest.mark.parametrize("processes", [None, 2])
def test_unusable_rows_are_skipped_and_counted_and_the_first_ten_named(
    processes, tmp_path, make, caplog
):
    lines = [{"input_ids": [1, 5000 if i % 3 == 1 else 2 + i]} for i in range(40)]
    fields = {"on_bad_row": "skip", "dataset_num_proc": processes}
    path = jsonl(tmp_path / "a.jsonl", lines)
    config = make({"path": path, "preprocess_shards": 2}, **fields)
    found = prepared(config, shuffle=False)
    assert rows(found) == [line["input_ids"] for line in lines if line["input_ids"][1] != 5000]
    said = [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()]
    assert len(said) == 11 and "a.jsonl: line 2: token 5000 is not in" in said[0]
    assert "line 29: " in said[9] and said[10].endswith("a.jsonl: 13 rows in all were skipped")
    with pytest.raises(ValueError, match="line 2: token 5000"):  # and not the set of before
        prepared(make(tmp_path / "a.jsonl"), shuffle=False)
    with pytest.raises(
        ValueError, match=r"1 rows were skipped \(data.on_bad_row = skip\), and the o"
    ):
        prepared(make(jsonl(tmp_path / "b.jsonl", lines[1:2]), **fields))


def test_texts_that_are_not_utf8_are_skipped_alone(tmp_path, make, caplog):
    (tmp_path / "bad.txt").write_bytes(b"a\xff")
    (tmp_path / "good.txt").write_text("ab")
    config = make(
        *({"path": tmp_path / f"{name}.txt", "type": "text"} for name in ("bad", "good")),
        on_bad_row="skip",
    )
    assert rows(prepared(config, Characters, shuffle=False)) == [[97, 98, 0]]
    assert "bad.txt: from line 1 on: it is not UTF-8" in caplog.text
    import pyarrow as pa
    import pyarrow.parquet

    column = pa.array([b"ab", b"a\xff", b"cd"])
    column = pa.StringArray.from_buffers(3, *column.buffers()[1:])
    pyarrow.parquet.write_table(pa.table({"text": column}), tmp_path / "c.parquet")
    config = make({"path": tmp_path / "c.parquet", "type": "text"}, on_bad_row="skip")
    assert rows(prepared(config, Characters, shuffle=False)) == [[97, 98, 0], [99, 100, 0]]


@pytest.mark.parametrize(
    "text, place",
    [
        ('{"input_ids": [1, 2]}\n\n{"input_ids": [1, 5000]}\n', "line 3"),
        ('{"input_ids": [1, 2]} {"input_ids": [1, 5000]}\n', "row 2"),
        ('{"input_ids":\n [1, 2]}\n{"input_ids":\n [1, 5000]}\n', "row 2"),
        ('\n\n[{"input_ids": [1, 2]},\n {"input_ids": [1, 5000]}]\n', "row 2"),
    ],
)
def test_a_line_is_named_where_rows_are_lines_and_else_a_row(text, place, tmp_path, make):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=f"a.json: {place}: token 5000 is not in the model's voc"):
        prepared(make(tmp_path / "a.json"))


@pytest.mark.parametrize(
    "line, reason",
    [
        ('{"input_ids": [1], "input_ids": [2]}', "input_ids is there twice in one object"),
        (r'{"input_ids": [1], "a": "\ud800"}', "a string in it has half of a surrogate pair"),
    ],
)
def test_a_line_that_arrow_alone_refuses_is_named(line, reason, tmp_path, make):
    (tmp_path / "a.jsonl").write_text(f'{{"input_ids": [1, 2]}}\n{line}\n')
    with pytest.raises(ValueError, match=f"a.jsonl: line 2: {reason}"):
        prepared(make(tmp_path / "a.jsonl"))


def test_unusable_files_are_named(tmp_path, make):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2')
    with pytest.raises(ValueError, match=r"a.jsonl: line 1: it ends within a JSON value"):
        prepared(make(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match="is a file, so data_files cannot be in it"):
        prepared(make({"path": tmp_path / "a.jsonl", "data_files": "b", "ds_type": "json"}))
    with pytest.raises(FileNotFoundError, match=r"nowhere/x.jsonl: no such file or folder"):
        prepared(make(tmp_path / "nowhere/x.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"needs files of one kind .* found none of them"):
        prepared(make(tmp_path / "empty"))
    (tmp_path / "a.bin").write_text("")
    with pytest.raises(ValueError, match="found none of them"):
        prepared(make(tmp_path / "a.bin"))


# ---- the cache


@pytest.fixture
def text(tmp_path):
    """An entry, and the folder of its tokenizer."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_text("{}")
    return {
        "path": jsonl(tmp_path / "data/a.jsonl", [{"text": t} for t in ("abc", "defg", "hi")]),
        "type": "text",
    }


def test_cache_is_used_again(make, text):
    first = Characters()
    before = rows(prepared(make(text), lambda: first))
    assert sorted(c for c in first.calls if c != "a") == ["abc", "defg", "hi"]
    assert rows(prepared(make(text))) == before  # `none` would raise
    # Batch settings do not matter.
    assert (
        rows(
            prepared(
                make(
                    text,
                    pad_to_multiple_of=4,
                    sample_packing_method="multipack",
                    train={"lr": 1.0, "micro_batch_size": 2},
                )
            )
        )
        == before
    )


def touch(path):
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**9))


@pytest.mark.parametrize(
    "change",
    [
        "content",
        "new file",
        "tokenizer",
        "tokenizer's content",
        "max_seq_len",
        "bin",
        "seed",
        "shuffle",
        "vocabulary",
        "use",
        "version",
    ],
)
def test_cache_is_not_used_when_what_it_depends_on_changed(
    make, text, tmp_path, change, monkeypatch
):
    text["path"] = text["path"].parent
    model = {}
    if change == "tokenizer":  # on the Hub, which cannot be asked: no file identifies it

        def absent(path, revision):
            raise FileNotFoundError

        monkeypatch.setattr(cache_key, "local_folder", absent)
        model = {"tokenizer_path": "org/one"}
    prepared(make(text, model=model), Characters)
    file, fields, options, vocab = text["path"] / "a.jsonl", {}, {}, VOCAB
    if change == "content":
        jsonl(file, [{"text": t} for t in ("abc", "defg", "ho")])
        touch(file)
    elif change == "new file":
        jsonl(file.with_name("b.jsonl"), [{"text": "more"}])
    elif change == "tokenizer":
        fields["model"] = {"tokenizer_path": "org/other"}
    elif change == "tokenizer's content":
        (tmp_path / "tokenizer/chat_template.jinja").write_text("{{ messages }}")
    elif change == "max_seq_len":
        text["max_seq_len"] = 3
    elif change == "bin":
        fields["sample_packing_sequence_len"] = 8
    elif change == "seed":
        fields["train"] = {"seed": 1}
    elif change == "shuffle":
        fields["shuffle_merged_datasets"] = False
    elif change == "vocabulary":
        vocab = 500
    elif change == "use":
        options["shuffle"] = False
    elif change == "version":
        monkeypatch.setattr(cache_key, "PREPARATION", -1)
    config = make(text, **fields)
    with pytest.raises(AssertionError, match="nothing is to be tokenized"):
        prepare_of(config, none, vocab, **options)


def test_a_half_written_cache_is_not_taken_for_a_finished_one(make, text, tmp_path, monkeypatch):
    config, written = make(text), preparing.Writer.write

    def killed(self, batch):
        written(self, batch)
        raise KeyboardInterrupt

    monkeypatch.setattr(preparing.Writer, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        prepared(config, Characters)
    monkeypatch.setattr(preparing.Writer, "write", written)
    [half] = (tmp_path / "prepared").glob(".*.partial")
    assert sorted(map(len, rows(prepared(config, Characters)))) == [3, 4, 5]
    [folder] = (tmp_path / "prepared").glob("[0-9a-f]*[0-9a-f]")
    assert folder.name in half.name and not half.exists()


def damaged(content, rng):
    """A file's contents after one of the usual accidents, or one that is rare."""
    content = bytearray(content)
    at = int(rng.integers(len(content)))
    match rng.integers(6):
        case 0:  # cut
            del content[at:]
        case 1:  # one bit
            content[at] ^= 1 << int(rng.integers(8))
        case 2:  # a few numbers
            content[at : at + 400] = rng.bytes(len(content[at : at + 400]))
        case 3:  # a hole
            content[at : at + 64] = bytes(len(content[at : at + 64]))
        case 4:  # too long
            content += rng.bytes(8)
        case _:
            return None  # removed
    return bytes(content)


@pytest.mark.parametrize(
    "other, kind, suffix",
    [
        ([1, 2.5, 3], "lists with 2.5", "jsonl"),
        ([1, 2.5, 3], "List", "parquet"),
        ([1, float("nan")], "lists with nan", "jsonl"),
        ([1, float("inf")], "List", "parquet"),
        ([1, True], "lists with True", "jsonl"),
        ([1, "x"], "lists with 'x'", "jsonl"),
        ("text", "a string, 'text'", "jsonl"),
        ({"a": 1}, "an object, {'a': 1}", "jsonl"),
        ([1, 2**80], None, "jsonl"),
    ],
)
def test_one_row_of_another_type_is_named(other, kind, suffix, make, tmp_path):
    rows = [{"input_ids": [1, 2, 3]} for _ in range(30)]
    rows[17] = {"input_ids": other}
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        jsonl(path, rows)
    else:
        datasets.Dataset.from_list(
            [{"input_ids": [float(n) for n in r["input_ids"]]} for r in rows]
        ).to_parquet(path)
    where = {"jsonl": "line", "parquet": "row"}[suffix]
    said = f"the column `input_ids` must hold lists of integers, not {kind}" if kind else ""
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {where} 18: {said}')}"):
        prepared(make(path))


@pytest.mark.parametrize("skip", [False, True], ids=["rebuilt", "refused"])
def test_a_damaged_cache_is_never_read(make, skip, tmp_path, caplog, monkeypatch):
    """100 accidents to any of its files, in the order of their names: the data are prepared again,
    or, where that is switched off, one sentence says which file it is.
    """
    monkeypatch.setattr(sources, "DUMMY_SAMPLES", 64)
    fields = {"num_dataset_shards_to_save": 2, "sample_packing_sequence_len": 32}
    wanted = rows(prepared(make(**fields)))
    root, whole, rng = tmp_path / "prepared", tmp_path / "whole", np.random.default_rng(skip)
    shutil.copytree(root, whole)
    files = sorted(p.relative_to(root) for p in root.rglob("*") if p.is_file())
    files = [f for f in files if ".lock" not in f.name]
    assert [f.name for f in files if f.parent.name] == [
        "checksums.json",
        "order.npy",
        "samples-00000-of-00002.arrow",
        "samples-00001-of-00002.arrow",
    ]
    for i in range(100):
        victim = root / files[i % len(files)]
        content = victim.read_bytes()
        made = damaged(content, rng)
        if made is None:
            victim.unlink()
        else:
            victim.write_bytes(made)
        caplog.clear()
        same = made == content or victim.parent == root  # the notes of hashes are no data
        config = make(**fields, skip_prepare_dataset=skip)
        if skip and not same:
            with pytest.raises(ValueError, match=f"^data.skip_prepare_dataset: {victim}: .+") as e:
                prepared(config)
            assert "\n" not in str(e.value)
        else:
            assert rows(prepared(config)) == wanted
            again = any(f"{victim}: " in m and "preparing them again" in m for m in caplog.messages)
            assert again == (not same), (i, victim.name)
        shutil.rmtree(root)
        shutil.copytree(whole, root)


def test_a_damaged_set_of_the_datasets_package_is_one_sentence(make, tmp_path):
    """Whose files have no checksums: they must be such that Arrow can follow their offsets."""
    root = tmp_path / "prepared"
    made = datasets.Dataset.from_list([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 300)
    made.save_to_disk(root)
    [file] = root.glob("*.arrow")
    content, rng = file.read_bytes(), np.random.default_rng(0)
    config = make(skip_prepare_dataset=True)
    start = content.index(np.arange(0, 900, 3, dtype=np.int32).tobytes())
    for case in (
        content[: len(content) // 2],
        content[:start] + rng.bytes(400) + content[start + 400 :],
        b"",
    ):
        file.write_bytes(case)
        with pytest.raises(ValueError, match=f"^data.skip_prepare_dataset: {root}: cannot be") as e:
            prepared(config)
        assert "\n" not in str(e.value)
    file.write_bytes(content)
    assert len(prepared(config)) == 300


def test_other_ranks_wait_and_read(make, text, tmp_path):
    """Read what the main process has prepared, also if a file has changed since."""
    config, said = make(text), []

    def broadcast(name):
        assert name is None
        prepared(config, Characters, agreed=(True, said.append))
        jsonl(text["path"], [{"text": "another"}])
        return said[0]

    got = rows(prepared(config, agreed=(False, broadcast)))
    assert sorted(map(len, got)) == [3, 4, 5] and len(said) == 1
    absent = tmp_path / "prepared" / "absent"
    with pytest.raises(FileNotFoundError, match=f"^{absent}: not there; every proc"):
        prepared(config, agreed=(False, lambda name: absent.name))


GOOD = [1, 2, 3]


@pytest.mark.parametrize(
    "ids, labels, message",
    [
        ([GOOD, GOOD], [GOOD, [1, 2]], "row 2: it has 3 input_ids and 2 labels"),
        ([GOOD, None], [GOOD, GOOD], "row 2: it has 0 input_ids and 3 labels"),
        ([GOOD, [1, None, 3]], [GOOD, GOOD], "row 2: a token in it is null"),
        ([GOOD, [1, 5000, 3]], [GOOD, GOOD], "row 2: token 5000 is not in the model's vocabulary"),
        ([GOOD, [1, IGNORE, 3]], [GOOD, GOOD], "row 2: token -100 is not in the model's vocab"),
        ([GOOD, GOOD], [GOOD, [1, 2, 5000]], "row 2: token 5000 is not in the model's vocabulary"),
        ([[1.5, 2.5]], [[1, 2]], "the column `input_ids` must hold lists of integers, not list"),
        (["text"], [GOOD], "the column `input_ids` must hold lists of integers, not string"),
    ],
)
def test_a_saved_set_with_unusable_rows_is_refused(ids, labels, message, tmp_path, make):
    config = make(skip_prepare_dataset=True, dataset_prepared_path=str(tmp_path / "own"))

    def read(**columns):
        datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "own")
        return prepared(config)

    assert len(read(input_ids=[GOOD], labels=[[IGNORE, 2, 3]])) == 1
    with pytest.raises(ValueError, match=f"^data.skip_prepare_dataset: .*{message}"):
        read(input_ids=ids, labels=labels)


def test_skip_prepare_dataset(make, text, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"data.skip_prepare_dataset: no prepared data set at"
    ):
        prepared(make(text, skip_prepare_dataset=True))
    whole = rows(prepared(make(text), Characters))
    assert rows(prepared(make(text, skip_prepare_dataset=True))) == whole
    own = tmp_path / "own"
    datasets.Dataset.from_dict({"input_ids": TOKENS, "labels": TOKENS}).save_to_disk(own)
    options = {"skip_prepare_dataset": True, "dataset_prepared_path": str(own)}
    assert rows(prepared(make("org/unused", **options))) == TOKENS
    config = make("org/unused", test=["org/other"], **options)
    with pytest.raises(ValueError, match="is one data set, to train on"):
        prepared(config, entries=config.data.test_datasets, shuffle=False)
    datasets.Dataset.from_dict({"input_ids": TOKENS}).save_to_disk(tmp_path / "bare")
    with pytest.raises(ValueError, match="has no column labels"):
        prepared(make("org/unused", **options | {"dataset_prepared_path": str(tmp_path / "bare")}))


@pytest.mark.parametrize("number, files", [(None, 1), (2, 2), (30, 3)])
def test_files_of_a_prepared_dataset(make, text, tmp_path, number, files):
    assert len(prepared(make(text, num_dataset_shards_to_save=number), Characters)) == 3
    assert len(list((tmp_path / "prepared").rglob("*.arrow"))) == files


def test_what_is_pushed(make, text, monkeypatch):
    pushed, said = [], []
    monkeypatch.setattr(
        datasets.Dataset,
        "push_to_hub",
        lambda self, name, **options: pushed.append((len(self), name, options)),
    )
    config = make(text, test=["dummy"], push_dataset_to_hub="a/b", hf_use_auth_token=True)
    for entries in (config.data.datasets, config.data.datasets, config.data.test_datasets):
        prepared(config, Characters, entries=entries, agreed=(True, said.append))
    prepared(config, Characters, agreed=(False, lambda name: said[0]))
    options = {"token": True, "private": True}
    first = [(3, "a/b", {"split": "train"} | options), (512, "a/b", {"split": "test"} | options)]
    assert pushed == first  # no new upload at every start
    config = make(text, push_dataset_to_hub="c/d", hf_use_auth_token=True)
    monkeypatch.setattr(
        datasets.Dataset,
        "push_to_hub",
        lambda *a, **k: (_ for _ in ()).throw(OSError("no network")),
    )
    with pytest.raises(OSError, match="no network"):
        prepared(config, Characters)
    monkeypatch.setattr(
        datasets.Dataset, "push_to_hub", lambda self, name, **_: pushed.append(name)
    )
    for _ in range(2):  # from the cache: the next start retries a failed upload
        prepared(config, Characters)
    assert pushed == [*first, "c/d"]


# ---- validation


@pytest.mark.parametrize("size, count", [(7, 7), (1, 1), (0.25, 25), (0.001, 1), (99, 99)])
def test_validation_is_held_out(size, count):
    whole = datasets.Dataset.from_dict({"input_ids": [[i, i] for i in range(100)]})
    training, held = split_validation(whole, size, seed=3)
    assert len(held) == count and sorted(rows(training) + rows(held)) == rows(whole)
    assert rows(training) == sorted(rows(training)), "the order of the data is kept"
    assert rows(held) == rows(split_validation(whole, size, seed=3)[1])
    if 1 < count < 99:
        assert rows(held) != rows(split_validation(whole, size, seed=4)[1])


def test_validation_must_leave_something():
    whole = datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 10})
    assert split_validation(whole, None, 0) == (whole, None)
    for size in (10, 11, 0.99):
        with pytest.raises(ValueError, match=r"leaves no training sample of 10"):
            split_validation(whole, size, 0)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("packed", [True, False])
def test_evaluation_sees_everything_once(make, world, packed):
    config = make(train={"micro_batch_size": 3})
    bins = Bins(bins_of(make).dataset.with_format(None), config.data, packed=packed)
    ranks = [
        list(evaluation_batches(bins, config.train.micro_batch_size, rank, world))
        for rank in range(world)
    ]
    assert len({len(r) for r in ranks}) == 1
    labels = [
        t
        for rank in ranks
        for batch in rank
        for t in batch["labels"].flatten().tolist()
        if t != IGNORE
    ]
    assert sorted(labels) == sorted(t for r in samples(50) for t in r["input_ids"][1:])
    if not packed:
        assert len(bins) == 50 and all(len(bins[i]) == 1 for i in range(50))


# ---- batches of ranks


def tokens(batch):
    """The first token of each document: all are distinct."""
    return batch["input_ids"][0][batch["cu_seqlens"][:-1].long()].tolist()


def taken(bins, config, world, steps, state=None):
    """The documents of each of the next steps, over all ranks, in the order of bins."""
    iterators = []
    for rank in range(world):
        batches = Batches(bins, config, rank=rank, world_size=world)
        if state is not None:
            batches.load_state_dict(state)
        iterators.append((batches, batches.steps()))
    out = []
    for _ in range(steps):
        ranks = [next(it) for _, it in iterators]
        assert all(len(r) == config.train.gradient_accumulation_steps for r in ranks)
        out.append(
            [t for micro in zip(*ranks, strict=True) for batch in micro for t in tokens(batch)]
        )
    [state] = {tuple(b.state_dict().items()) for b, _ in iterators}
    return out, dict(state)


def firsts(bins):
    return sorted(int(ids[0]) for i in range(len(bins)) for ids, _ in bins[i])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_share_the_bins(make, world):
    """Without padding documents, so that every document of an epoch is counted."""
    config = make(
        pad_to_multiple_of=1, train={"micro_batch_size": 2, "gradient_accumulation_steps": 2}
    )
    bins = bins_of(make, 120)
    bins.bins = bins.bins[:48]
    steps = 48 // (4 * world)
    assert Batches(bins, config, world_size=world).steps_per_epoch == steps
    epochs, state = taken(bins, config, world, 2 * steps)
    assert state["epoch"] == 1
    first, second = joined(epochs[:steps]), joined(epochs[steps:])
    assert sorted(first) == sorted(second) == firsts(bins) and first != second
    # The order of bins does not depend on the number of ranks.
    assert first == joined(taken(bins, config, 1, 12)[0])


def test_order_depends_on_seed_and_epoch_alone(make):
    bins = bins_of(make)
    steps = Batches(bins, make()).steps_per_epoch

    def order(epoch, **train):
        shuffle = train.pop("shuffle", True)
        return taken(
            bins,
            make(train=train, shuffle_merged_datasets=shuffle),
            1,
            steps,
            {"epoch": epoch, "used": 0},
        )[0]

    torch.manual_seed(1)
    np.random.seed(1)
    a = order(0)
    torch.manual_seed(2)
    np.random.seed(2)
    assert a == order(0) == order(0, lr=1.0) and a not in (order(1), order(0, seed=7))
    assert (
        order(0, shuffle=False)
        == order(3, shuffle=False)
        == [tokens(collate([bins[i]], 8)) for i in range(steps)]
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_goes_on_where_it_was(make, workers):
    config = make(
        pad_to_multiple_of=1,
        dataloader_num_workers=workers,
        train={"gradient_accumulation_steps": 2},
    )
    bins = bins_of(make)
    per_epoch = Batches(bins, config).steps_per_epoch
    whole, _ = taken(bins, config, 1, 2 * per_epoch)
    for done in (1, per_epoch - 1, per_epoch, per_epoch + 3) if not workers else (3,):
        begun, state = taken(bins, config, 1, done)
        rest, _ = taken(bins, config, 1, 2 * per_epoch - done, state)
        assert begun + rest == whole


@pytest.mark.parametrize("before, after", [(4, 1), (1, 4), (2, 4), (4, 2)])
def test_resuming_with_other_ranks_uses_the_same_bins(make, before, after):
    config = make(pad_to_multiple_of=1)
    bins = bins_of(make, 120)
    bins.bins = bins.bins[:48]
    begun, state = taken(bins, config, before, 8 // before)
    assert state == {"epoch": 0, "used": 8}
    rest, _ = taken(bins, config, after, 40 // after, state)
    assert joined(begun + rest) == joined(taken(bins, config, 1, 48)[0])


def test_two_epochs_whatever_the_ranks(make):
    """Resumed again and again with other ranks, accumulation and workers, over two epochs, every
    sample comes once per epoch, in the order of one rank.
    """
    fields = {"pad_to_multiple_of": 1, "dataloader_drop_last": False}
    bins = bins_of(make, 120)

    def configured(micro, accumulation, workers):
        train = {"micro_batch_size": micro, "gradient_accumulation_steps": accumulation}
        return make(**fields, dataloader_num_workers=workers, train=train)

    one = configured(1, 1, 0)
    whole = joined(taken(bins, one, 1, 2 * len(bins))[0])
    seen, state = [], {"epoch": 0, "used": 0}
    layouts = [(4, 1, 2, 0), (1, 2, 1, 0), (3, 1, 1, 0), (2, 1, 3, 0)]  # ranks, micro, ...
    for world, micro, accumulation, workers in [(2, 1, 2, 1), *layouts * 9]:
        config = configured(micro, accumulation, workers)
        for _ in range(1 if workers else 3):
            if state["epoch"] * len(bins) + state["used"] >= 2 * len(bins):
                break
            [step], state = taken(bins, config, world, 1, state)
            seen += step
        else:
            continue
        break
    assert 0 in seen  # of the empty bins that fill an epoch's last step
    assert [t for t in seen if t] == whole
    first, second = whole[: len(whole) // 2], whole[len(whole) // 2 :]
    assert sorted(first) == sorted(second) == firsts(bins) and first != second


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_the_last_incomplete_step(make, drop, world):
    config = make(
        pad_to_multiple_of=1,
        dataloader_drop_last=drop,
        train={"micro_batch_size": 2, "gradient_accumulation_steps": 2},
    )
    bins = bins_of(make, 120)
    bins.bins = bins.bins[:42]  # a step uses 4 or 8
    whole = 42 // (4 * world)
    batches = Batches(bins, config, world_size=world)
    assert batches.steps_per_epoch == whole + (not drop)
    epoch, state = taken(bins, config, world, batches.steps_per_epoch)
    seen = joined(epoch)
    if drop:
        assert len(set(seen)) == len(seen) and set(seen) < set(firsts(bins))
        assert state == {"epoch": 0, "used": whole * 4 * world}
    else:  # filled with empty bins: token 0, no label
        assert set(firsts(bins)) <= set(seen) and sorted(t for t in seen if t) == [
            t for t in firsts(bins) if t
        ]
        assert state == {"epoch": 0, "used": 42}
        last = Batches(bins, config, rank=world - 1, world_size=world)
        last.load_state_dict({"epoch": 0, "used": 4 * world * whole})
        assert (next(last.steps())[-1]["labels"] == IGNORE).all()
    _, state = taken(bins, config, world, 1, state)
    assert state["epoch"] == 1


def test_workers_do_not_change_batches(make):
    bins = bins_of(make)
    several = []
    for workers in (0, 2):
        steps = Batches(bins, make(dataloader_num_workers=workers), world_size=2, rank=1).steps()
        several.append([b for _ in range(5) for b in next(steps)])
    for a, b in zip(*several, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_too_little_data_for_a_step(make):
    bins = bins_of(make, 3)
    with pytest.raises(ValueError, match=r"an optimizer step takes 64 bins .* and the data fill"):
        Batches(bins, make(train={"gradient_accumulation_steps": 64}))
    config = make(train={"gradient_accumulation_steps": 64}, dataloader_drop_last=False)
    assert len(next(Batches(bins, config).steps())) == 64


def test_from_a_file_to_the_tokens_of_a_batch(tmp_path, make):
    """Every label of the file appears once, through the whole pipeline."""
    path = jsonl(tmp_path / "a.jsonl", samples(60))
    config = make(
        path,
        sample_packing_method="multipack",
        dataloader_drop_last=False,
        train={"micro_batch_size": 3},
    )
    batches = Batches(Bins(prepared(config), config.data), config)
    steps = batches.steps()
    got = [
        t
        for _ in range(batches.steps_per_epoch)
        for b in next(steps)
        for t in b["labels"].flatten().tolist()
    ]
    assert sorted(t for t in got if t != IGNORE) == sorted(
        t for r in samples(60) for t in r["input_ids"][1:]
    )
