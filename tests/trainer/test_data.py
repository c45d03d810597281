"""Every token is trained on once per epoch, whatever its source, the packing and the number of
ranks.
"""

import importlib
import itertools
import logging
import math
import pathlib
import random
import re
import shutil
import sys
import types

import numpy as np
import pytest
import torch

pytest.importorskip("datasets")
pytest.importorskip("pydantic")

import datasets
import pyarrow as pa
from preparing import (
    IN_ORDER,
    config_of,
    prepare_of,
    served,
    unreachable_hub,
    write_rows,
    write_table,
)

from tilewright.trainer.columns import IGNORE
from tilewright.trainer.data import batches as module_of_batches
from tilewright.trainer.data import cache_key, packing, sources
from tilewright.trainer.data.batches import Bins, collate, evaluation_batches
from tilewright.trainer.data.json_file import JsonFile
from tilewright.trainer.data.packing import pack
from tilewright.trainer.data.prepared import check_targets, split_validation

pytestmark = [pytest.mark.packages, pytest.mark.usefixtures("own_cache")]

ROOT = next(p for p in pathlib.Path(__file__).resolve().parents if (p / "pyproject.toml").is_file())
VOCAB = 1000


def Batches(bins, config, **options):
    return module_of_batches.Batches(bins, config.data, config.train, **options)


@pytest.fixture
def make(tmp_path):
    """A configuration of smaller bins."""

    def make(*entries, model=None, **fields):
        model = {"config_path": str(tmp_path / "tokenizer")} | (model or {})
        bins = {"sample_packing_sequence_len": 16, "pad_to_multiple_of": 8}
        return config_of(tmp_path, *entries, model=model, **bins | fields)

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


def test_sequential_keeps_order_and_closes_a_bin_only_when_it_must():
    for lengths in LENGTHS + EDGES:
        bins = pack(lengths, 64)
        assert [i for b in bins for i in b] == list(range(len(lengths)))
        filled = [sum(lengths[i] for i in b) for b in bins]
        assert all(0 < tokens <= 64 for tokens in filled)
        for tokens, following in zip(filled, bins[1:], strict=False):
            assert tokens + lengths[following[0]] > 64


@pytest.mark.parametrize("group", [7, 10**6])
def test_multipack_is_first_fit_decreasing_of_each_group(group):
    """Against the definition, written out."""
    for lengths in LENGTHS + EDGES:
        wanted = []
        for start in range(0, len(lengths), group):
            bins, room = [], []
            some = range(start, min(start + group, len(lengths)))
            for i in sorted(some, key=lambda i: (-lengths[i], i)):
                j = next((j for j, r in enumerate(room) if r >= lengths[i]), None)
                if j is None:
                    j = len(bins)
                    bins.append([])
                    room.append(64)
                bins[j].append(i)
                room[j] -= lengths[i]
            wanted += map(sorted, bins)
        assert [list(b) for b in pack(lengths, 64, "multipack", group)] == wanted


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


def test_pack_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="document 1 has 65 tokens, a bin holds 64"):
        pack([1, 65], 64)
    with pytest.raises(ValueError, match="method must be sequential or multipack, got 'best'"):
        pack([1], 64, "best")


def test_method_and_group_are_the_configured_ones(make):
    def packed(**fields):
        bins = bins_of(make, **fields)
        assert bins.tokens == sum(len(r["input_ids"]) for r in samples(50))
        return [list(b) for b in bins.bins]

    multipack = {"sample_packing_method": "multipack"}
    assert packed(**multipack) != packed()
    assert packed(**multipack, sample_packing_sequentially=True) == packed()
    assert len(packed(**multipack, sample_packing_group_size=1)) == 50


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
    """Training and evaluation pad to the next multiple of what all ranks can divide."""
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


# ---- reading

TOKENS = [[5, 6, 7], [8, 9], [1, 2, 3, 4]]


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet", "arrow"])
def test_files_of_any_name_have_the_format_of_their_entry(tmp_path, make, suffix):
    """Those that are named as their format are read in test_rows.py."""
    path = write_rows(tmp_path / f"data/a.{suffix}", [{"input_ids": ids} for ids in TOKENS])
    path = path.rename(path.with_suffix(".part"))
    for entry in ({"path": path}, {"path": path.parent, "data_files": path.name}):
        entry["ds_type"] = "json" if suffix == "jsonl" else suffix
        got = prepared(make(entry, **IN_ORDER))
        assert rows(got) == TOKENS and got["labels"][:] == got["input_ids"][:]


def test_files_of_a_mixed_folder_are_chosen_by_ds_type(tmp_path, make):
    write_rows(tmp_path / "data/a.jsonl", [{"input_ids": [1, 2]}])
    (tmp_path / "data/README.txt").write_text("about")
    assert rows(prepared(make({"path": tmp_path / "data", "ds_type": "json"}))) == [[1, 2]]
    with pytest.raises(ValueError, match=r"needs files of one kind.*found \['json', 'text'\]"):
        prepared(make(tmp_path / "data"))


def test_data_files_take_patterns_and_lists(tmp_path, make):
    for i in range(4):
        write_rows(tmp_path / f"data/{'ab'[i % 2]}{i}.jsonl", [{"input_ids": [i, i]}])
    entry = {"path": tmp_path / "data", "ds_type": "json"}
    for names, found in (("a*.jsonl", (0, 2)), (["a0.jsonl", "b3.jsonl"], (0, 3))):
        got = prepared(make(entry | {"data_files": names}))
        assert sorted(rows(got)) == [[i, i] for i in found]


def test_splits(tmp_path, make):
    path = write_rows(tmp_path / "a.jsonl", [{"input_ids": [i, i]} for i in range(10)])
    assert sorted(rows(prepared(make({"path": path, "split": "train[:20%]"})))) == [[0, 0], [1, 1]]
    one, other = (datasets.Dataset.from_dict({"input_ids": [ids]}) for ids in ([1, 2], [3, 4]))
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=one, test=other).save_to_disk(tmp_path / "two")
    datasets.DatasetDict(test=one).save_to_disk(tmp_path / "only")
    for name in ("one", "only"):
        assert rows(prepared(make(tmp_path / name))) == [[1, 2]]
    assert rows(prepared(make({"path": tmp_path / "two", "split": "test"}))) == [[3, 4]]
    for name, entry, message in (
        ("a.jsonl", {"split": "validation"}, "validation"),
        ("two", {}, "has the splits test, train; set split"),
        ("two", {"split": "dev"}, "has the splits test, train; set split"),
        ("one", {"split": "train"}, "without splits"),
        ("one", {"ds_type": "json"}, "knows its format"),
    ):
        with pytest.raises(ValueError, match=message):
            prepared(make({"path": tmp_path / name, **entry}))


PART = {"name": "sub", "revision": "abc", "split": "dev"}
TABLES = {"data_files": ["a.csv", "b.csv"], "ds_type": "csv", "revision": "abc"}


@pytest.mark.parametrize(
    "path, entry, token, expected",
    [
        ("org/set", PART, False, (("org/set",), {**PART, "token": False})),
        ("org/set", {}, None, (("org/set",), dict.fromkeys((*PART, "token")))),
        ("org/set", TABLES, True, ([f"hf://datasets/org/set@abc/{x}.csv" for x in "ab"], True)),
        ("s3://b/x.parquet", {}, None, (["s3://b/x.parquet"], None)),
        ("https://b/x/", {"data_files": "*.json"}, None, (["https://b/x/*.json"], None)),
    ],
)
def test_what_the_network_is_asked_for(path, entry, token, expected, make, monkeypatch, tmp_path):
    asked, here = [], str(write_rows(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}]))

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return datasets.Dataset.from_dict({"input_ids": [[1, 2]]})

    def downloaded(files, token):
        asked.append((files, token))
        return [(here, file) for file in files]

    unreachable_hub(monkeypatch, load_dataset)
    monkeypatch.setattr(cache_key, "version", lambda entry, token: None)
    monkeypatch.setattr(sources, "downloaded", downloaded)
    monkeypatch.setattr(sources, "FILES", dict.fromkeys(sources.FILES, JsonFile))
    monkeypatch.setattr(sources.platform, "no_module", lambda name: None)
    if "data_files" in entry:
        entry = {"ds_type": "json", **entry}
    config = make({"path": path, **entry}, hf_use_auth_token=token)
    assert {*map(tuple, rows(prepared(config)))} == {(1, 2)}
    assert asked == [expected]


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
                write_rows(path, [{"text": text}])
        on_hub(monkeypatch, kind, files)
        for split, wanted in (
            ("train", texts["train"]),
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
    """The datasets package's cache has them where the Hub cannot be asked."""
    made = datasets.Dataset.from_dict({"input_ids": [[1, 2]]})
    unreachable_hub(monkeypatch, lambda *a, **k: made)
    monkeypatch.setattr(cache_key, "version", lambda entry, token: "commit")
    assert rows(prepared(make("org/set"))) == [[1, 2]]
    made.info.builder_name = "csv"
    said = "org/other: the Hub does not give its files of csv"
    with pytest.raises(FileNotFoundError, match=said):
        prepared(make("org/other"))


def test_addresses_are_read(tmp_path, make):
    """From this machine. A missing file and an unresponsive server give one sentence."""
    pytest.importorskip("aiohttp")
    path = write_rows(tmp_path / "served/a.jsonl", [{"input_ids": ids} for ids in TOKENS])
    with served(path.parent) as at:
        for entry in (f"{at}/a.jsonl", {"path": at, "data_files": "a.jsonl", "ds_type": "json"}):
            assert sorted(rows(prepared(make(entry)))) == sorted(TOKENS)
        said = rf"^{at}/b.jsonl: cannot be read: FileNotFoundError: Unable to find"
        with pytest.raises(OSError, match=said):
            prepared(make(f"{at}/b.jsonl"))
    for name in ("c.jsonl", "*.jsonl"):
        with pytest.raises(OSError, match=rf"^{at}: cannot be read: \w+: \S.*$"):
            prepared(make({"path": at, "data_files": name, "ds_type": "json"}))


def test_whatever_a_file_system_raises_is_one_sentence(make, monkeypatch):
    """s3fs, gcsfs and adlfs pass on their libraries' exceptions, which have no common base."""

    class NoCredentialsError(Exception):
        pass

    def downloaded(files, token):
        raise NoCredentialsError("Unable to\n\tlocate credentials")

    monkeypatch.setattr(sources, "downloaded", downloaded)
    monkeypatch.setattr(sources.platform, "no_module", lambda name: None)
    said = "s3://b/x.jsonl: cannot be read: NoCredentialsError: Unable to locate credentials"
    with pytest.raises(OSError, match=f"^{said}$"):
        prepared(make("s3://b/x.jsonl"))


def test_dummy_data(make):
    config = make(test=["dummy"])
    got = rows(prepared(config))
    assert len(got) == sources.DUMMY_SAMPLES
    assert all(2 <= len(r) <= 16 and 0 <= min(r) <= max(r) < VOCAB for r in got)
    assert len({len(r) for r in got}) > 5
    elsewhere = {"dataset_prepared_path": config.data.dataset_prepared_path + "2"}
    assert got == rows(prepared(make(**elsewhere)))
    assert got != rows(prepared(make(train={"seed": 1})))
    held = rows(prepared(config, entries=config.data.test_datasets, shuffle=False))
    evaluated = {tuple(r) for r in held}
    assert not [r for r in got if len(r) > 4 and tuple(r) in evaluated], "what was trained on"
    part = {"path": "dummy", "shards": 4, "shards_idx": 1, "max_seq_len": 4}
    assert len(prepared(make(part))) == len(got) // 4


# ---- preparation


def test_long_samples_are_cut_and_counted(tmp_path, make, caplog):
    lengths = (3, 20, 10, 40)
    made = [{"input_ids": [*range(n)], "labels": [IGNORE, *range(1, n)]} for n in lengths]
    path = write_rows(tmp_path / "a.jsonl", made)
    for entry, longest, cut in (({}, 16, 2), ({"max_seq_len": 5}, 5, 3)):
        with caplog.at_level(logging.WARNING, "tilewright"):
            got = prepared(make({"path": path, **entry}))
        assert sorted(map(len, rows(got))) == sorted(min(n, longest) for n in lengths)
        assert all(list(r["labels"]) == [IGNORE, *r["input_ids"][1:]] for r in got)
        said = f"{cut} of 4 samples were longer than {longest} tokens and were cut"
        assert said in caplog.text


def test_text_is_cut_into_pieces_that_join_to_the_documents(tmp_path, make):
    """As few as can be, the last of which has two tokens or more."""
    texts = ["x" * n for n in (1, 14, 15, 16, 31, 32, 33, 100)]
    path = write_rows(tmp_path / "a.jsonl", [{"text": t} for t in texts])
    got = rows(prepared(make({"path": path, "type": "text"}, **IN_ORDER), Characters))
    assert {*map(len, got)} <= {*range(2, 17)}
    assert len(got) == sum(-(-(len(t) + 1) // 16) for t in texts)
    assert "".join(map(chr, joined(got))) == "".join(t + "\0" for t in texts)
    got = rows(prepared(make({"path": path, "type": "text", "max_seq_len": 7}), Characters))
    assert max(map(len, got)) == 7


def test_samples_without_a_target_are_counted(tmp_path, make, caplog):
    """More than half of them is a warning. They are context of the others' bins, and stay."""
    labeled = {"input_ids": [1, 2], "labels": [IGNORE, 2]}
    unlabeled = {"input_ids": [3, 4], "labels": [3, IGNORE]}
    few = write_rows(tmp_path / "few.jsonl", [labeled, unlabeled])
    many = write_rows(tmp_path / "many.jsonl", [labeled, unlabeled, unlabeled])
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
    whole = [[i, i] for i in range(11)]
    path = write_rows(tmp_path / "a.jsonl", [{"input_ids": ids} for ids in whole])
    for parts in (
        [make({"path": path, "shards": 3, "shards_idx": i}) for i in range(3)],
        [make(path, dataset_shard_num=3, dataset_shard_idx=i) for i in range(3)],
    ):
        found = [rows(prepared(part)) for part in parts]
        assert sorted(joined(found)) == whole and all(3 <= len(part) <= 4 for part in found)
    for chunks in (1, 4, 30):  # also more chunks than rows
        assert sorted(rows(prepared(make({"path": path, "preprocess_shards": chunks})))) == whole


def test_order_of_merged_data(tmp_path, make):
    paths = [
        write_rows(tmp_path / f"{k}.jsonl", [{"input_ids": [100 * k + i, 0]} for i in range(30)])
        for k in range(2)
    ]

    def order(merged, before, seed=42):
        fields = dict(zip(IN_ORDER, (merged, before), strict=True))
        return [r[0] for r in rows(prepared(make(*paths, **fields, train={"seed": seed})))]

    plain = order(False, False)
    assert plain == [*range(30), *range(100, 130)]
    assert order(False, True) != plain and sorted(order(False, True)[:30]) == plain[:30]
    assert max(order(True, False)[:30]) >= 100 and sorted(order(True, True)) == plain
    assert order(True, True) == order(True, True) != order(True, True, seed=1)


def test_integers_of_other_widths_merge(tmp_path, make):
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path, width in zip(paths, (pa.int16(), pa.int64()), strict=True):
        write_table(path, pa.table({"input_ids": pa.array(TOKENS, pa.list_(width))}))
    assert sorted(rows(prepared(make(*paths)))) == sorted(TOKENS * 2)


def test_columns(tmp_path, make):
    row = {"input_ids": [1, 2], "labels": [IGNORE, 2], "text": "ab"}
    path = write_rows(tmp_path / "a.jsonl", [row])
    assert prepared(make(path))[0]["labels"] == [IGNORE, 2]
    assert prepared(make(path, select_columns=["input_ids"]))[0]["labels"] == [1, 2]
    for kind, names, said in (
        ("tokenized", ["labels"], "type tokenized needs a column `input_ids`, has .'labels'"),
        ("text", ["text", "x"], r"data.select_columns: \['x'\] not in .*a.jsonl, which has"),
    ):
        with pytest.raises(ValueError, match=said):
            prepared(make({"path": path, "type": kind}, select_columns=names), Characters)


def targets(*labels):
    return {"input_ids": [1] * len(labels), "labels": labels}


@pytest.mark.parametrize(
    "rows, kind, message",
    [
        ([{"tokens": [1, 2]}], "tokenized", r"needs a column `input_ids`, has \['tokens'\]$"),
        ([{"text": "ab"}], "tokenized", r"has \['text'\]; for samples that are text set type to"),
        ([{"input_ids": [1, 2]}], "text", r"has \['input_ids'\]; for samples that are tokens set"),
        ([targets(1) | {"input_ids": [1, 2]}], "tokenized", "it has 2 input_ids and 1 labels"),
        ([targets(*[1] * 21) | {"input_ids": [1] * 20}], "tokenized", "20 input_ids and 21 lab"),
        ([targets("a", "b")], "tokenized", "`labels` must hold lists of integers"),
        ([targets(1, 1), {"input_ids": None}], "tokenized", "line 2: it has no input_ids"),
        ([{"input_ids": [1, None]}], "tokenized", "line 1: a token in it is null"),
        ([{"input_ids": [1, VOCAB]}], "tokenized", f"token {VOCAB} is not in .* of {VOCAB}"),
        ([{"input_ids": [1, -1]}], "tokenized", "token -1 is not in the model's vocabulary"),
        ([{"input_ids": [1, IGNORE]}], "tokenized", "token -100 is not in the model's vocabulary"),
        ([targets(-1, 2)], "tokenized", "token -1 is not in the model's vocabulary"),
        ([targets(1, 5000)], "tokenized", "token 5000 is not in the model's vocabulary"),
        ([{"text": "a"}, {"text": None}], "text", "line 2: it has no text"),
        ([{"text": "\u2192"}], "text", "token 8594 is not in the model's vocabulary"),
        ([{"input_ids": [1]}], "tokenized", "nothing can be learned: they hold no sample of two"),
        # No token precedes the first, whose label is then no target.
        ([targets(1, IGNORE), targets(IGNORE, IGNORE)], "tokenized", "none of the 2 samples has"),
        # The only label is beyond the cut.
        ([targets(*[IGNORE] * 18, 1, 1)], "tokenized", "none of the 1 samples has a label after"),
    ],
)
def test_unusable_rows_are_named(rows, kind, message, tmp_path, make):
    path = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match=f"a.jsonl.*{message}"):
        prepared(make({"path": path, "type": kind}), Characters)
    assert not list((tmp_path / "prepared").glob("[0-9a-f]*"))


@pytest.mark.parametrize("processes", [None, 2])
def test_unusable_rows_are_skipped_and_counted_and_the_first_ten_named(
    processes, tmp_path, make, caplog
):
    lines = [{"input_ids": [1, 5000 if i % 3 == 1 else 2 + i]} for i in range(40)]
    fields = {"on_bad_row": "skip", "dataset_num_proc": processes}
    path = write_rows(tmp_path / "a.jsonl", lines)
    found = prepared(make({"path": path, "preprocess_shards": 2}, **fields), shuffle=False)
    assert rows(found) == [line["input_ids"] for line in lines if line["input_ids"][1] != 5000]
    said = [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()]
    assert len(said) == 11 and "a.jsonl: line 2: token 5000 is not in" in said[0]
    assert "line 29: " in said[9] and said[10].endswith("a.jsonl: 13 rows in all were skipped")
    with pytest.raises(ValueError, match="line 2: token 5000"):  # and not the set of before
        prepared(make(path), shuffle=False)
    path = write_rows(tmp_path / "b.jsonl", lines[1:2])
    none_left = r"1 rows were skipped \(data.on_bad_row = skip\), and the o"
    with pytest.raises(ValueError, match=none_left):
        prepared(make(path, **fields))


def test_texts_that_are_not_utf8_are_skipped_alone(tmp_path, make, caplog):
    (tmp_path / "bad.txt").write_bytes(b"a\xff")
    (tmp_path / "good.txt").write_text("ab")
    column = pa.array([b"ab", b"a\xff", b"cd"])
    column = pa.StringArray.from_buffers(3, *column.buffers()[1:])
    write_table(tmp_path / "c.parquet", pa.table({"text": column}))
    names = "bad.txt", "good.txt", "c.parquet"
    config = make(*({"path": tmp_path / n, "type": "text"} for n in names), on_bad_row="skip")
    found = rows(prepared(config, Characters, shuffle=False))
    assert found == [[97, 98, 0], [97, 98, 0], [99, 100, 0]]
    assert "bad.txt: from line 1 on: it is not UTF-8" in caplog.text


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


def test_unusable_files_are_named(tmp_path, make):
    for name in ("a.jsonl", "a.bin", "empty/a.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for error, name, entry, said in (
        (ValueError, "a.jsonl", {"data_files": "b", "ds_type": "json"}, "is a file, so data_files"),
        (FileNotFoundError, "nowhere/x.jsonl", {}, r"nowhere/x.jsonl: no such file or folder"),
        (ValueError, "empty", {}, r"needs files of one kind .* found none of them"),
        (ValueError, "a.bin", {}, "found none of them"),
    ):
        with pytest.raises(error, match=said):
            prepared(make({"path": tmp_path / name, **entry}))


# ---- the cache


@pytest.fixture
def text(tmp_path):
    """An entry, and the folder of its tokenizer."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_text("{}")
    rows = [{"text": t} for t in ("abc", "defg", "hi")]
    return {"path": write_rows(tmp_path / "data/a.jsonl", rows), "type": "text"}


def test_cache_is_used_again(make, text):
    first = Characters()
    before = rows(prepared(make(text), lambda: first))
    assert sorted(c for c in first.calls if c != "a") == ["abc", "defg", "hi"]
    assert rows(prepared(make(text))) == before  # `none` would raise
    batches = {"pad_to_multiple_of": 4, "sample_packing_method": "multipack"}
    config = make(text, **batches, train={"lr": 1.0, "micro_batch_size": 2})
    assert rows(prepared(config)) == before


def test_cache_is_not_used_when_what_it_depends_on_changed(make, text, tmp_path, monkeypatch):
    text["path"] = text["path"].parent
    plain = make(text)
    prepared(plain, Characters)

    def not_used(config, vocab=VOCAB, **options):
        with pytest.raises(AssertionError, match="nothing is to be tokenized"):
            prepare_of(config, none, vocab, **options)

    not_used(make({**text, "max_seq_len": 3}))
    not_used(make(text, sample_packing_sequence_len=8))
    not_used(make(text, shuffle_merged_datasets=False))
    not_used(make(text, train={"seed": 1}))
    not_used(plain, vocab=500)
    not_used(plain, shuffle=False)
    for new in (tmp_path / "tokenizer/chat_template.jinja", text["path"] / "b.jsonl"):
        new.write_text('{"text": "more"}')
        not_used(plain)
        new.unlink()
    prepared(plain)  # it is there still
    with monkeypatch.context() as patch:
        patch.setattr(cache_key, "PREPARATION", -1)
        not_used(plain)

    def absent(path, revision):
        raise FileNotFoundError

    # Tokenizers on the Hub, which cannot be asked: no file identifies them.
    monkeypatch.setattr(cache_key, "local_folder", absent)
    prepared(make(text, model={"tokenizer_path": "org/one"}), Characters)
    not_used(make(text, model={"tokenizer_path": "org/other"}))


ACCIDENTS = {
    "cut": lambda content, at, rng: content[:at],
    "one bit": lambda content, at, rng: replaced(content, at, bytes([content[at] ^ 4])),
    "numbers": lambda content, at, rng: replaced(content, at, rng.bytes(400)),
    "a hole": lambda content, at, rng: replaced(content, at, bytes(64)),
    "too long": lambda content, at, rng: content + rng.bytes(8),
    "removed": lambda *_: None,
}


def replaced(content, at, part):
    return content[:at] + part[: len(content) - at] + content[at + len(part) :]


@pytest.mark.parametrize(
    "other, suffix, said",
    [
        ([1, 2.5, 3], "jsonl", "lists with 2.5"),
        ([1, float("nan")], "jsonl", "lists with nan"),
        ("text", "jsonl", "a string, 'text'"),
        ({"a": 1}, "jsonl", "an object, {'a': 1}"),
        ([1, float("inf")], "parquet", "List"),
    ],
)
def test_one_row_of_another_type_is_named(other, suffix, said, make, tmp_path):
    """In test_rows.py are more, of every type of data."""
    rows = [{"input_ids": [1, 2, 3]} for _ in range(30)]
    rows[17] = {"input_ids": other}
    schema = pa.schema({"input_ids": pa.list_(pa.float64())}) if suffix == "parquet" else None
    path = write_rows(tmp_path / f"rows.{suffix}", rows, schema)
    where = {"jsonl": "line", "parquet": "row"}[suffix]
    said = f"{path}: {where} 18: the column `input_ids` must hold lists of integers, not {said}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        prepared(make(path))


def test_an_integer_of_more_than_eight_bytes_is_named(make, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [1, 2**80]}])
    with pytest.raises(ValueError, match=f"^{path}: line 2: "):
        prepared(make(path))


@pytest.mark.parametrize("skip", [False, True], ids=["rebuilt", "refused"])
def test_a_damaged_cache_is_never_read(make, skip, tmp_path, caplog, monkeypatch):
    """After each accident to any of its files the data are prepared again, or, where that is
    switched off, one sentence says which file it is.
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
    for file, accident in itertools.product(files, ACCIDENTS):
        victim = root / file
        content = victim.read_bytes()
        made = ACCIDENTS[accident](content, int(rng.integers(len(content))), rng)
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
            assert again == (not same), (accident, victim.name)
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
        write_rows(text["path"], [{"text": "another"}])
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
    skip = {"skip_prepare_dataset": True}
    said = r"data.skip_prepare_dataset: no prepared data set at"
    with pytest.raises(FileNotFoundError, match=said):
        prepared(make(text, **skip))
    whole = rows(prepared(make(text), Characters))
    assert rows(prepared(make(text, **skip))) == whole
    own = tmp_path / "own"
    datasets.Dataset.from_dict({"input_ids": TOKENS, "labels": TOKENS}).save_to_disk(own)
    config = make("org/unused", test=["org/other"], **skip, dataset_prepared_path=str(own))
    assert rows(prepared(config)) == TOKENS
    with pytest.raises(ValueError, match="is one data set, to train on"):
        prepared(config, entries=config.data.test_datasets, shuffle=False)
    bare = tmp_path / "bare"
    datasets.Dataset.from_dict({"input_ids": TOKENS}).save_to_disk(bare)
    with pytest.raises(ValueError, match="has no column labels"):
        prepared(make("org/unused", **skip, dataset_prepared_path=str(bare)))


@pytest.mark.parametrize("number, files", [(None, 1), (2, 2), (30, 3)])
def test_files_of_a_prepared_dataset(make, text, tmp_path, number, files):
    assert len(prepared(make(text, num_dataset_shards_to_save=number), Characters)) == 3
    assert len(list((tmp_path / "prepared").rglob("*.arrow"))) == files


def test_what_is_pushed(make, text, monkeypatch):
    pushed, said, failing = [], [], []

    def push(self, name, **options):
        if failing:
            raise failing.pop()
        pushed.append((len(self), name, options))

    monkeypatch.setattr(datasets.Dataset, "push_to_hub", push)
    config = make(text, test=["dummy"], push_dataset_to_hub="a/b", hf_use_auth_token=True)
    for entries in (config.data.datasets, config.data.datasets, config.data.test_datasets):
        prepared(config, Characters, entries=entries, agreed=(True, said.append))
    prepared(config, Characters, agreed=(False, lambda name: said[0]))
    options = {"token": True, "private": True}
    first = [(3, "a/b", {"split": "train"} | options), (512, "a/b", {"split": "test"} | options)]
    assert pushed == first  # no new upload at every start
    config = make(text, push_dataset_to_hub="c/d", hf_use_auth_token=True)
    failing.append(OSError("no network"))
    with pytest.raises(OSError, match="no network"):
        prepared(config, Characters)
    for _ in range(2):  # from the cache: the next start retries a failed upload
        prepared(config, Characters)
    assert [name for _, name, _ in pushed] == ["a/b", "a/b", "c/d"]


# ---- validation


@pytest.mark.parametrize("size, count", [(7, 7), (0.25, 25), (0.001, 1), (99, 99)])
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
    bins = Bins(bins_of(make).dataset.with_format(None), make().data, packed=packed)
    ranks = [list(evaluation_batches(bins, 3, rank, world)) for rank in range(world)]
    assert len({len(r) for r in ranks}) == 1
    assert learned(joined(ranks)) == following(samples(50))
    if not packed:
        assert len(bins) == 50 and all(len(bins[i]) == 1 for i in range(50))


def learned(batches):
    """The labels of batches, sorted."""
    return sorted(t for b in batches for t in b["labels"].flatten().tolist() if t != IGNORE)


def following(rows):
    """What learns from rows, of which the first token follows none."""
    return sorted(t for r in rows for t in r["input_ids"][1:])


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


def test_order_depends_on_seed_and_epoch_alone(make):
    bins = bins_of(make)
    steps = Batches(bins, make()).steps_per_epoch

    def order(epoch, shuffle=True, **train):
        config = make(train=train, shuffle_merged_datasets=shuffle)
        return taken(bins, config, 1, steps, {"epoch": epoch, "used": 0})[0]

    torch.manual_seed(1)
    np.random.seed(1)
    a = order(0)
    torch.manual_seed(2)
    np.random.seed(2)
    assert a == order(0) == order(0, lr=1.0) and a not in (order(1), order(0, seed=7))
    plain = [tokens(collate([bins[i]], 8)) for i in range(steps)]
    assert order(0, shuffle=False) == order(3, shuffle=False) == plain


def test_two_epochs_whatever_the_ranks(make):
    """Resumed again and again with other ranks, accumulation and workers, over two epochs, every
    sample comes once per epoch, in the order of one rank.
    """
    fields = {"pad_to_multiple_of": 1, "dataloader_drop_last": False}
    bins = bins_of(make, 120)

    def configured(micro, accumulation, workers):
        train = {"micro_batch_size": micro, "gradient_accumulation_steps": accumulation}
        return make(**fields, dataloader_num_workers=workers, train=train)

    whole = joined(taken(bins, configured(1, 1, 0), 1, 2 * len(bins))[0])
    seen, state = [], {"epoch": 0, "used": 0}
    layouts = [(4, 1, 2, 0), (1, 2, 1, 0), (3, 1, 1, 0), (2, 1, 3, 0)]  # ranks, micro, ...
    for world, micro, accumulation, workers in [layouts[0], (2, 1, 2, 1), *layouts * 9]:
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
    train = {"micro_batch_size": 2, "gradient_accumulation_steps": 2}
    config = make(pad_to_multiple_of=1, dataloader_drop_last=drop, train=train)
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
        assert sorted(t for t in seen if t) == firsts(bins)
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
    path = write_rows(tmp_path / "a.jsonl", samples(60))
    fields = {"sample_packing_method": "multipack", "dataloader_drop_last": False}
    config = make(path, **fields, train={"micro_batch_size": 3})
    made = prepared(config)
    assert made.column_names == ["input_ids", "labels", "source_row"]
    batches = Batches(Bins(made, config.data), config)
    steps = itertools.islice(batches.steps(), batches.steps_per_epoch)
    assert learned(joined(steps)) == following(samples(60))
