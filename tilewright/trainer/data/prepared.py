"""From files or the Hub to prepared samples: load, tokenize, cache, split.

A sample has input_ids and labels (default: the same; -100 is ignored). `batches.py` packs samples
into batches. A prepared set is a folder with the samples in Arrow files, in the order in which they
were read, order.npy, if they are shuffled, and the checksums of all these files.

Not by `Dataset.map` and `shuffle`: their cache has no lock between jobs and no checksums, a refused
row would end it in a worker's traceback, and they know no units (rows that stay together). The
order is numpy's permutation there, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

from tilewright.core.files import replace_folder
from tilewright.trainer.columns import IGNORE, TOKENS
from tilewright.trainer.data import sealed
from tilewright.trainer.data.cache_key import cache_key
from tilewright.trainer.data.encode import Columns, Counts, Use, has_target, schema
from tilewright.trainer.data.ends import stops_of
from tilewright.trainer.data.fields import Data, Dataset
from tilewright.trainer.data.mixing import mixed
from tilewright.trainer.data.prepare import Writer, prepare_entry, split_file
from tilewright.trainer.data.read_columns import not_instructed
from tilewright.trainer.data.rows import MOST_ROWS
from tilewright.trainer.data.sources import check_sources, dummy, read_raw
from tilewright.trainer.data.types.dataset_type import DATASETS, WHOLE, Prompts
from tilewright.trainer.data.types.tokenized import NotIntegers
from tilewright.trainer.data.units import Units, has_rows, held_together, unfolded
from tilewright.trainer.models.fields import Model

pc: Any = pyarrow.compute  # which makes its functions when it is imported
log = logging.getLogger("tilewright")
ORDER = "order.npy"


def _source(entry: Dataset, data: Data, vocab: int, seed: tuple[int, ...]):
    """The rows of an entry that are asked for."""
    source = dummy(data, vocab, seed) if entry.path == "dummy" else read_raw(entry, data)
    if data.select_columns is not None:
        names = list(source.column_names)
        if not {*data.select_columns} <= {*names}:
            names = source.every_column()  # one may begin late
        if absent := [c for c in data.select_columns if c not in names]:
            raise ValueError(
                f"data.select_columns: {absent} not in {entry.path}, which has {names}"
            )
        source = source.select_columns(data.select_columns)
    if entry.max_samples is not None:
        source = source.head(entry.max_samples)
    if entry.shards is not None:
        source = source.shard(entry.shards, entry.shards_idx or 0)
    if data.dataset_shard_num is not None:
        source = source.shard(data.dataset_shard_num, data.dataset_shard_idx or 0)
    return source


def _build(
    entries: list[Dataset],
    use: Use,
    seed: int,
    tokenizer: Callable[[], Any],
    shuffle: bool,
    folder: pathlib.Path,
) -> None:
    """Writes a prepared set."""
    check_sources(entries)
    data, order, begun = use.data, [], time.monotonic()
    path, counts = folder / "samples.arrow", Counts()
    units = Units(use.columns)
    with contextlib.closing(Writer(path, schema(use.columns))) as writer:
        for i, entry in enumerate(entries):
            # Training and evaluation must not share documents.
            source = _source(entry, data, use.vocab, (seed, i, int(shuffle)))
            loaded = tokenizer() if DATASETS[entry.type].tokenizer else None
            # The numbers of samples, or of units where some samples belong together.
            first = len(units.first) if units.names else writer.samples
            own = prepare_entry(source, entry, i, loaded, writer, units, use)
            if not own["made"] and not own["unlabeled"]:
                log.warning("%s: holds no sample of two tokens or more", entry.path)
            counts.update(own)
            part = np.arange(first, len(units.first) if units.names else writer.samples)
            if shuffle and data.shuffle_before_merging_datasets:
                part = np.random.default_rng(seed).permutation(part)
            order.append(part)
    if not counts["targets"]:
        listed = ", ".join(entry.path for entry in entries)
        raise ValueError(f"{listed}: nothing can be learned: {counts.nothing()}")
    weights = [entry.weight for entry in entries if entry.weight is not None] or None
    how = data.mixing if shuffle else "concat"  # what is evaluated on is not mixed
    merged = mixed(order, how, weights, data.samples_per_epoch, seed)
    if shuffle and data.shuffle_merged_datasets:
        merged = np.random.default_rng(seed).permutation(merged)
    if units.names:
        merged = unfolded(merged, np.array([*units.first, writer.samples]))
    if shuffle:
        np.save(folder / ORDER, merged)
    if (count := min(data.num_dataset_shards_to_save or 1, writer.samples)) > 1:
        split_file(path, count)
    sealed.seal(folder)
    log.info(
        "data: prepared %d samples of %d tokens in %.1f s",
        writer.samples,
        writer.tokens,
        time.monotonic() - begun,
    )


def check_targets(dataset, what: str) -> None:
    """Raises ValueError if no sample of a prepared set has a target. Reads up to the first."""
    labels = dataset.select_columns(["labels"]).with_format("arrow")
    for first in range(0, len(labels), MOST_ROWS):
        lists = labels[first : first + MOST_ROWS].column("labels").combine_chunks()
        if any(has_target(row.values.to_numpy()) for row in lists):
            return
    raise ValueError(
        f"{what}: nothing can be learned: none of the {len(labels)} samples has a label after its "
        "first token"
    )


def _load(folder: pathlib.Path):
    """A prepared set, as it was checked by the process that builds."""
    import datasets

    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: not there; every process must see this folder")
    names = sealed.names(folder)
    files = [datasets.Dataset.from_file(str(folder / n)) for n in names if n.endswith(".arrow")]
    merged = datasets.concatenate_datasets(files)
    return merged.select(np.load(folder / ORDER)) if ORDER in names else merged


@contextlib.contextmanager
def alone(path: pathlib.Path) -> Iterator[None]:
    """Only one process prepares a set: others wait. The system releases the lock of a process that
    has ended, and processes that it had started do not have it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            log.info("data: another process is preparing the same data; waiting for it")
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


class Agreed(NamedTuple):
    """How processes agree on a prepared set.

    main: this one builds and saves (rank 0), and says at `broadcast` how its folder is named; the
    others wait there and read it. Another name could be theirs: files and answers of servers
    change.
    """

    main: bool = True
    broadcast: Callable[[str | None], str | None] = lambda name: name


ALONE = Agreed()


def prepare(
    entries: list[Dataset],
    data: Data,
    model: Model,
    seed: int,
    tokenizer: Callable[[], Any],
    vocab: int,
    *,
    shuffle: bool = True,
    columns: Columns | None = None,
    prompts: Prompts = WHOLE,
    agreed: Agreed = ALONE,
):
    """The merged, tokenized data set with columns input_ids, labels and further ones that are asked
    for, from the cache if present.

    model: whose tokenizer the samples are made with, known by its files.   tokenizer: makes it.
    prompts: how they are cut, and the loss.
    """
    columns, (main, broadcast) = columns or {}, agreed
    root = pathlib.Path(data.dataset_prepared_path)
    split = _split(entries, data)
    if is_saved(data):
        return _saved(root, split != "train", vocab, columns, prompts.loss, check=main)
    for entry in entries:
        if pathlib.Path(entry.path).is_dir() and root.resolve().is_relative_to(
            pathlib.Path(entry.path).resolve()
        ):
            raise ValueError(
                f"data.dataset_prepared_path = {root}: lies in the data set {entry.path}, and "
                "would be read as part of it"
            )
    check_sources(entries, cached=True)
    if not main:
        return _load(root / str(broadcast(None)))
    use = Use(data, vocab, columns, prompts, stops_of(model, entries))
    folder = root / cache_key(entries, use, model, seed, shuffle)
    if data.skip_prepare_dataset:
        if not folder.is_dir():
            raise FileNotFoundError(
                f"data.skip_prepare_dataset: no prepared data set at {root} or {folder}"
            )
        try:
            sealed.check(folder)
        except sealed.Damaged as damage:
            raise ValueError(f"data.skip_prepare_dataset: {damage}") from damage
    else:
        with alone(root / f".{folder.name}.lock"):
            try:
                if there := folder.is_dir():
                    sealed.check(folder)
            except sealed.Damaged as damage:
                log.warning("data: %s; preparing them again", damage)
                there = False
            if not there:
                aside = folder.with_name(f".{folder.name}.partial")
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir()
                _build(entries, use, seed, tokenizer, shuffle, aside)
                replace_folder(aside, folder)
            if data.push_dataset_to_hub:
                _push(folder, data.push_dataset_to_hub, split)
    broadcast(folder.name)
    return _load(folder)


def _split(entries: list[Dataset], data: Data) -> str:
    """What the Hub calls a prepared set: train, test, or test_N of several."""
    of_test = [i for i, e in enumerate(data.test_datasets, 1) if e is entries[0]]
    if not of_test:
        return "train"
    return "test" if len(data.test_datasets) == len(entries) else f"test_{of_test[0]}"


def _push(folder: pathlib.Path, target: str, split: str) -> None:
    told = folder / "pushed.txt"  # the target folder: the same at every start
    pushed = told.read_text(errors="replace").splitlines() if told.is_file() else []
    if target not in pushed:
        token: Any = True  # the saved one, which push_to_hub takes and its annotation does not
        _load(folder).push_to_hub(target, split=split, token=token, private=True)
        told.write_text("".join(f"{name}\n" for name in (*pushed, target)))


def is_saved(data: Data) -> bool:
    """Whether the data are one prepared set that the datasets package saved, and no other files."""
    saved = pathlib.Path(data.dataset_prepared_path, "dataset_info.json")
    return data.skip_prepare_dataset and saved.is_file()


def _saved(root: pathlib.Path, test: bool, vocab: int, columns: Columns, loss: str, check: bool):
    """A set that the datasets package saved, with the columns of a prepared one.   check: read
    all tokens and further columns, since a token or an expert that does not exist would end a GPU
    run without a sentence.
    """
    import datasets

    if test:
        raise ValueError(
            f"data.skip_prepare_dataset: {root} is one data set, to train on; for evaluation set "
            "data.val_set_size instead of data.test_datasets"
        )
    try:
        prepared: Any = datasets.load_from_disk(str(root))
        for name in {*TOKENS, *columns} & {*prepared.column_names}:
            # Arrow would read where a damaged file's offsets point.
            prepared.data.column(name).validate(full=True)
    except Exception as error:  # readers' exceptions have no common base
        reason = " ".join(str(error).split())
        raise ValueError(f"data.skip_prepare_dataset: {root}: cannot be read: {reason}") from error
    needed = {*TOKENS, *(n for n, c in columns.items() if c.default is None)}
    if absent := needed - {*prepared.column_names}:
        raise ValueError(
            f"data.skip_prepare_dataset: {root} has no column {' or '.join(sorted(absent))}"
        )
    if loss and (why := not_instructed(prepared.column_names, columns, loss)):
        raise ValueError(f"data.skip_prepare_dataset: {root}: train.loss = {loss} {why}")
    for name in TOKENS:
        kind = prepared.data.column(name).type
        if not pa.types.is_integer(getattr(kind, "value_type", pa.null())):
            raise NotIntegers(f"data.skip_prepare_dataset: {root}", name, kind)
    if check:
        try:
            _check_samples(prepared, vocab)
            tokens = prepared.data.column("input_ids")
            for name, column in columns.items():
                if name not in prepared.column_names:
                    continue
                try:
                    column.check(prepared.data.column(name), tokens)
                except ValueError as error:
                    raise ValueError(column.said(name, error)) from error
        except ValueError as error:
            raise ValueError(f"data.skip_prepare_dataset: {root}: {error}") from error
    return prepared


def _check_samples(prepared, vocab: int) -> None:
    """Raises ValueError, with the row, if the encoder of tokenized rows would have refused one."""
    rows = prepared.select_columns(list(TOKENS)).with_format("arrow")
    for first in range(0, len(rows), MOST_ROWS):
        part = rows[first : first + MOST_ROWS]
        lists = [part.column(name).combine_chunks() for name in TOKENS]
        ids, labels = (
            pc.fill_null(pc.list_value_length(column), -1).to_numpy() for column in lists
        )
        if (wrong := (ids != labels) | (ids < 0)).any():
            at = int(wrong.argmax())
            has = f"{max(0, ids[at])} input_ids and {max(0, labels[at])} labels"
            raise ValueError(f"row {first + at + 1}: it has {has}")
        row_of = np.repeat(np.arange(len(ids)), ids)
        for column, accepted in zip(lists, (None, IGNORE), strict=True):
            flat = column.flatten()
            tokens = flat.fill_null(-1).to_numpy(zero_copy_only=False)
            wrong = ((tokens < 0) | (tokens >= vocab)) & (tokens != accepted)
            if wrong.any():
                at = int(wrong.argmax())
                why = f"token {tokens[at]} is not in the model's vocabulary of {vocab}"
                why = why if flat[at].is_valid else "a token in it is null"
                raise ValueError(f"row {first + row_of[at] + 1}: {why}")


def split_validation(dataset, size: int | float | None, seed: int, columns: Columns | None = None):
    """Returns (training, validation or None), both in the original order. size: a count, or a
    fraction below 1, of rows of the data, all samples of which are in one of them. Samples, or
    units of them, are counted where rows are not known.
    """
    if size is None:
        return dataset, None
    row_of = held_together(dataset, columns or {})
    of = int(row_of.max(initial=-1)) + 1
    count = int(size) if size >= 1 else max(1, round(of * size))
    if count >= of:
        what, why = "sample", ""
        if has_rows(dataset):
            what = "row"
            why = ": a row is held out as a whole, and a text file is one; data.test_datasets has others"
        raise ValueError(f"data.val_set_size = {size} leaves no training {what} of {of}{why}")
    is_held = np.zeros(of, bool)
    is_held[np.random.default_rng(seed).permutation(of)[:count]] = True
    held = is_held[row_of]
    return dataset.select((~held).nonzero()[0]), dataset.select(held.nonzero()[0])
