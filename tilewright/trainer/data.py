"""From files or the Hub to prepared samples: load, tokenize, cache, split.

A sample has input_ids and labels (default: the same; -100 is ignored). `batches.py` packs samples
into batches.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.trainer import chat
from tilewright.trainer.config import Config, Data, Dataset
from tilewright.trainer.loss import IGNORE
from tilewright.trainer.sources import check_sources, dummy, read_raw

log = logging.getLogger("tilewright")
# Increment when the same settings prepare other data, to invalidate earlier caches.
PREPARATION = 2


def _longest(entry: Dataset, data: Data) -> int:
    return min(
        entry.max_seq_len or data.sample_packing_sequence_len, data.sample_packing_sequence_len
    )


def _columns():
    """The columns of every prepared set: merged sets must agree."""
    import datasets

    return datasets.Features(
        {name: datasets.Sequence(datasets.Value("int32")) for name in ("input_ids", "labels")}
    )


def _check_range(path: str, ids: list[int], vocab: int, *also: int) -> None:
    """An index outside the embedding would end a GPU run with an assertion that names no sample."""
    if outside := set(ids) - set(also):
        worst = max(outside, key=lambda i: (i < 0, i))
        if not 0 <= worst < vocab:
            raise ValueError(f"{path}: token {worst} is not in the model's vocabulary of {vocab}")


def _tokenize(raw, entry: Dataset, data: Data, tokenizer, vocab: int) -> Any:
    """Splits text into samples of at most max_seq_len tokens (default: a bin), with the end token
    after each document.
    """
    if "text" not in raw.column_names:
        other = (
            "; for samples that are tokens set type to tokenized"
            if "input_ids" in raw.column_names
            else ""
        )
        raise ValueError(
            f"{entry.path}: type text needs a column `text`, has {raw.column_names}{other}"
        )
    kind = getattr(raw.features["text"], "dtype", "list")
    if kind not in ("string", "large_string"):
        raise ValueError(f"{entry.path}: the column `text` must hold strings, not {kind}")
    longest = _longest(entry, data)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def pieces(batch):
        out = []
        for text in batch["text"]:
            if text is None:
                raise ValueError(f"{entry.path}: a row has no text")
            ids = tokenizer(text, add_special_tokens=False)["input_ids"] + end
            _check_range(entry.path, ids, vocab)
            out += [ids[i : i + longest] for i in range(0, len(ids), longest)]
        out = [p for p in out if len(p) > 1]  # a single token has no target
        return {"input_ids": out, "labels": out}

    return raw.map(
        pieces,
        batched=True,
        remove_columns=raw.column_names,
        num_proc=data.dataset_num_proc,
        features=_columns(),
    )


def _check_tokenized(raw, entry: Dataset, data: Data, vocab: int) -> Any:
    """Checks and cuts samples that are already tokenized."""
    if "input_ids" not in raw.column_names:
        other = "; for samples that are text set type to text" if "text" in raw.column_names else ""
        raise ValueError(
            f"{entry.path}: type tokenized needs a column `input_ids`, has "
            f"{raw.column_names}{other}"
        )
    raw = raw.select_columns([c for c in ("input_ids", "labels") if c in raw.column_names])
    for name, feature in raw.features.items():
        kind = getattr(getattr(feature, "feature", None), "dtype", "")
        if not kind.startswith(("int", "uint")):
            raise ValueError(
                f"{entry.path}: the column `{name}` must hold lists of integers, not {feature}"
            )
    longest = _longest(entry, data)

    def cut(row):
        ids, labels = row["input_ids"], row.get("labels")
        if ids is None:
            raise ValueError(f"{entry.path}: a row has no input_ids")
        labels = ids if labels is None else labels
        if len(labels) != len(ids):
            raise ValueError(
                f"{entry.path}: a sample has {len(ids)} input_ids and {len(labels)} labels"
            )
        _check_range(entry.path, ids, vocab)
        _check_range(entry.path, labels, vocab, IGNORE)
        return {"input_ids": ids[:longest], "labels": labels[:longest]}

    before = sum(len(x) > longest for x in raw["input_ids"] if x is not None)
    if before:
        log.warning(
            "%s: %d of %d samples were longer than %d tokens and were cut",
            entry.path,
            before,
            len(raw),
            longest,
        )
    raw = raw.map(cut, num_proc=data.dataset_num_proc, features=_columns())
    return raw.filter(lambda row: len(row["input_ids"]) > 1)


CHAT = {
    "chat": (chat.chat, (("messages",), ("conversations",))),
    "prompt_completion": (chat.prompt_completion, (("prompt", "completion"),)),
}


def _converse(raw, entry: Dataset, data: Data, tokenizer, vocab: int) -> Any:
    """Samples of rows with messages, or with a prompt and a completion; cut to max_seq_len."""
    samples_of, needed = CHAT[entry.type]
    if not any(set(columns) <= set(raw.column_names) for columns in needed):
        either = " or ".join(" and ".join(f"`{c}`" for c in columns) for columns in needed)
        raise ValueError(
            f"{entry.path}: type {entry.type} needs a column {either}, has {raw.column_names}"
        )
    messages = not isinstance(getattr(raw.features.get("prompt"), "dtype", None), str)
    chat.check_tokenizer(entry.path, entry.type, tokenizer, template=messages)
    longest = _longest(entry, data)

    def samples(row, i):
        out = {"input_ids": [], "labels": [], "unlabeled": []}
        try:
            made = samples_of(tokenizer, {name: row[name][0] for name in row})
        except chat.Refused as error:
            raise ValueError(f"{entry.path}: row {i[0] + 1}: {error}") from error
        for ids, labels in made:
            _check_range(entry.path, ids, vocab)
            out["input_ids"].append(ids[:longest])
            out["labels"].append(labels[:longest])
            out["unlabeled"].append(set(labels[1:longest]) <= {IGNORE})
        return out

    import datasets

    made = raw.map(
        samples,
        batched=True,
        batch_size=1,
        with_indices=True,
        remove_columns=raw.column_names,
        num_proc=data.dataset_num_proc,
        features=datasets.Features({**_columns(), "unlabeled": datasets.Value("bool")}),
    )
    kept = made.filter(lambda row: not row["unlabeled"]).remove_columns("unlabeled")
    if len(kept) < len(made):
        log.warning(
            "%s: %d of %d samples have no answer within %d tokens and were left out",
            entry.path,
            len(made) - len(kept),
            len(made),
            longest,
        )
    return kept


def _selected(raw, entry: Dataset, data: Data):
    if data.select_columns is None:
        return raw
    if absent := [c for c in data.select_columns if c not in raw.column_names]:
        raise ValueError(
            f"data.select_columns: {absent} not in {entry.path}, which has {raw.column_names}"
        )
    return raw.select_columns(data.select_columns)


def _build(
    entries: list[Dataset], config: Config, tokenizer: Callable[[], Any], vocab: int, shuffle: bool
):
    import datasets

    check_sources(entries)
    data, seed, parts = config.data, config.train.seed, []
    for i, entry in enumerate(entries):
        # Training and evaluation must not share documents.
        raw = (
            dummy(data, vocab, (seed, i, int(shuffle)))
            if entry.path == "dummy"
            else read_raw(entry, data)
        )
        raw = _selected(raw, entry, data)
        if entry.shards is not None:
            raw = raw.shard(entry.shards, entry.shards_idx)
        if data.dataset_shard_num is not None:
            raw = raw.shard(data.dataset_shard_num, data.dataset_shard_idx)
        make = _check_tokenized
        if entry.type != "tokenized":
            make = functools.partial(
                _tokenize if entry.type == "text" else _converse, tokenizer=tokenizer()
            )
        count = entry.preprocess_shards or 1
        made = [
            make(raw.shard(count, j, contiguous=True), entry, data, vocab=vocab)
            for j in range(min(count, len(raw)))
        ]  # an empty chunk would keep its columns
        if not sum(map(len, made)):
            log.warning("%s: holds no sample of two tokens or more", entry.path)
            continue
        part = datasets.concatenate_datasets(made)
        if shuffle and data.shuffle_before_merging_datasets:
            part = part.shuffle(seed=seed)
        parts.append(part)
    if not parts:
        raise ValueError("the data sets hold no sample of two tokens or more")
    merged = datasets.concatenate_datasets(parts)
    return merged.shuffle(seed=seed) if shuffle and data.shuffle_merged_datasets else merged


def _fingerprint(entries: list[Dataset], config: Config, vocab: int, shuffle: bool) -> str:
    """Changes whenever the prepared data would: hashes the settings, and size and time of every
    local file.
    """
    keys = (
        "select_columns",
        "sample_packing_sequence_len",
        "shuffle_merged_datasets",
        "dataset_shard_num",
        "shuffle_before_merging_datasets",
        "dataset_shard_idx",
    )
    tokenizer = config.model.tokenizer_path
    read: list[pathlib.Path] = []
    for path in (pathlib.Path(entry.path) for entry in entries):
        read += [path] if path.is_file() else sorted(path.rglob("*")) if path.is_dir() else []
    # Not its subfolders: a model's checkpoints may be there.
    if any(entry.type != "tokenized" for entry in entries):
        read += sorted(
            p
            for p in pathlib.Path(tokenizer).glob("*")
            if p.suffix in (".json", ".model", ".txt", ".jinja")
        )
    local = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in read if f.is_file()]
    what = [
        PREPARATION,
        [e.model_dump() for e in entries],
        {k: getattr(config.data, k) for k in keys},
        local,
        vocab,
        shuffle,
        config.train.seed,
        tokenizer,
    ]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def prepare(
    entries: list[Dataset],
    config: Config,
    tokenizer: Callable[[], Any],
    vocab: int,
    *,
    shuffle: bool = True,
    main: bool = True,
    barrier: Callable[[], None] = lambda: None,
):
    """The merged, tokenized data set with columns input_ids and labels, from the cache if present.

    main: this process builds and saves (rank 0); the others wait at `barrier` and read its result.
    """
    import datasets

    data = config.data
    root = pathlib.Path(data.dataset_prepared_path)
    folder = root / _fingerprint(entries, config, vocab, shuffle)
    if data.skip_prepare_dataset:
        return _as_it_is(root, folder, test=entries is data.test_datasets)
    for entry in entries:
        if pathlib.Path(entry.path).is_dir() and root.resolve().is_relative_to(
            pathlib.Path(entry.path).resolve()
        ):
            raise ValueError(
                f"data.dataset_prepared_path = {root}: lies in the data set {entry.path}, and "
                "would be read as part of it"
            )
    if main:
        if not folder.is_dir():
            built = _build(entries, config, tokenizer, vocab, shuffle)
            aside = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(aside, ignore_errors=True)
            built.save_to_disk(
                str(aside), num_shards=min(data.num_dataset_shards_to_save or 1, len(built))
            )
            aside.rename(folder)
        told = folder / "pushed.txt"  # the target folder: the same at every start
        pushed = told.read_text().splitlines() if told.is_file() else []
        if data.push_dataset_to_hub and data.push_dataset_to_hub not in pushed:
            split = "test" if entries is data.test_datasets else "train"
            prepared = datasets.load_from_disk(str(folder))
            prepared.push_to_hub(data.push_dataset_to_hub, split=split, token=True, private=True)
            told.write_text("".join(f"{name}\n" for name in (*pushed, data.push_dataset_to_hub)))
    barrier()
    return datasets.load_from_disk(str(folder))


def _as_it_is(root: pathlib.Path, folder: pathlib.Path, test: bool):
    import datasets

    if not (root / "dataset_info.json").is_file():
        if not folder.is_dir():
            raise FileNotFoundError(
                f"data.skip_prepare_dataset: no prepared data set at {root} or {folder}"
            )
        return datasets.load_from_disk(str(folder))
    if test:
        raise ValueError(
            f"data.skip_prepare_dataset: {root} is one data set, to train on; for evaluation set "
            "data.val_set_size instead of data.test_datasets"
        )
    prepared = datasets.load_from_disk(str(root))
    if absent := {"input_ids", "labels"} - {*prepared.column_names}:
        raise ValueError(
            f"data.skip_prepare_dataset: {root} has no column {' or '.join(sorted(absent))}"
        )
    return prepared


def split_validation(dataset, size: int | float | None, seed: int):
    """Returns (training, validation or None), both in the original order. size: a count, or a
    fraction below 1.
    """
    if size is None:
        return dataset, None
    count = int(size) if size >= 1 else max(1, round(len(dataset) * size))
    if count >= len(dataset):
        raise ValueError(f"data.val_set_size = {size} leaves no training sample of {len(dataset)}")
    order = np.random.default_rng(seed).permutation(len(dataset))
    return dataset.select(np.sort(order[count:])), dataset.select(np.sort(order[:count]))
