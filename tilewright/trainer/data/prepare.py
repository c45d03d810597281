"""Tokenizes rows, in worker processes for large data, and writes them part by part: memory does not
grow with the data.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
import multiprocessing
import os
import pathlib
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pyarrow as pa
from tqdm import tqdm

from tilewright.core import platform
from tilewright.trainer.columns import SCHEMA
from tilewright.trainer.data.encode import (
    ANY,
    Columns,
    Encoded,
    Encoder,
    RefusedRow,
    Use,
    check_columns,
    longest,
    unread,
)
from tilewright.trainer.data.fields import Data, Dataset
from tilewright.trainer.data.rows import Documents, Part, Rows
from tilewright.trainer.data.types.dataset_type import DATASETS, Refused, number
from tilewright.trainer.data.types.text import PIECE
from tilewright.trainer.data.types.tokenized import NotIntegers
from tilewright.trainer.data.units import Units

log = logging.getLogger("tilewright")
TOLD = 10  # rows that are skipped and named in the log
LARGE = 64 << 20  # bytes that are worth processes
# Parts after which processes are replaced: pages of mapped files stay in a process's memory.
RENEW = (256 << 20) // PIECE

Source = Rows | Documents


class Job:
    """The encoding of some rows, as processes inherit it."""

    def __init__(self, source: Source, encoder: Encoder):
        self.source, self.encoder = source, encoder

    def __call__(self, part: Part) -> Encoded:
        return self.encoder(self.source.read(part))


def workers(entry: Dataset, asked: int | None, nbytes: int) -> int:
    """The number of processes; 0: this one."""
    if asked is not None or entry.path == "dummy":
        return asked or 0
    return (platform.dataset_processes() or len(os.sched_getaffinity(0))) if nbytes > LARGE else 0


def encoded(job: Job, count: int) -> Iterator[Encoded]:
    """The encoded parts of a source, in order. count: of processes, 0 for none."""
    parts = job.source.parts()
    if not count:
        yield from map(job, parts)
        return
    for some in iter(lambda: list(itertools.islice(parts, RENEW)), []):
        # Forked, so that they share the tokenizer and the mapped rows.
        fork = multiprocessing.get_context("fork")
        pool = ProcessPoolExecutor(
            min(count, len(some)), mp_context=fork, initializer=_begin, initargs=(job,)
        )
        try:
            yield from _in_order(pool, some, 2 * count + 1)
        finally:
            pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, parts: list[Part], ahead: int) -> Iterator[Encoded]:
    """Results in order, with at most `ahead` parts begun or waiting to be taken."""
    running: collections.deque[Future[Encoded]] = collections.deque()
    for part in parts:
        running.append(pool.submit(_work, part))
        if len(running) >= ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


_job: Job | None = None  # of a worker process


def _begin(job: Job) -> None:
    """Runs in a new process."""
    global _job
    _job = job
    follow_parent()


def follow_parent() -> None:
    """Lets the parent process decide when this one ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(part: Part) -> Encoded:
    assert _job is not None
    return _job(part)


class Writer:
    """Writes samples to a file as they come."""

    def __init__(self, path: pathlib.Path, schema: pa.Schema = SCHEMA):
        self.file = pa.OSFile(str(path), "wb")
        self.stream = pa.ipc.new_stream(self.file, schema)
        self.samples = self.tokens = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self.samples += batch.num_rows
        self.tokens += len(batch.column("input_ids").flatten())
        if batch.num_rows:
            self.stream.write_batch(batch)

    def close(self) -> None:
        self.stream.close()
        self.file.close()


@dataclasses.dataclass
class Counts:
    """Numbers of samples.   made: written.   targets: of these, with a target.   unlabeled: without
    one, written or left out.   short: left out, with fewer than two tokens.   skipped: rows that
    cannot be used.
    """

    made: int = 0
    targets: int = 0
    unlabeled: int = 0
    short: int = 0
    skipped: int = 0

    def __add__(self, other: Counts) -> Counts:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Counts(*map(sum, pairs))

    def nothing(self) -> str:
        """Why no sample has a target."""
        if self.skipped and not self.unlabeled:
            return (
                f"{self.skipped} rows were skipped (data.on_bad_row = skip), and the others hold no "
                "sample of two tokens or more"
            )
        if not self.unlabeled:
            return "they hold no sample of two tokens or more"
        if self.made:
            return f"none of the {self.unlabeled} samples has a label after its first token"
        return (
            f"none of the {self.unlabeled} samples has an answer within the tokens to which it is "
            "cut (data.sample_packing_sequence_len, or max_seq_len of the data set)"
        )


def _is_whole(n: object) -> bool:
    return type(n) is int or (isinstance(n, float) and n.is_integer())


def _first_other(source: Rows, column: str) -> str:
    """The place of the first row of a file whose value is no list of integers, or of the first row
    if each is one: a number with a fraction makes floating-point numbers of all others.
    """
    rows = source.select_columns([column])
    for part in rows.parts():
        for row, values in rows.read(part):
            if isinstance(values, Refused):
                continue
            value = values[column]
            if value is None:  # refused by itself
                continue
            if not isinstance(value, list) or not all(n is None or _is_whole(n) for n in value):
                return source.place(row)
    return source.place(source.first)


def _check_late(source: Source, entry: Dataset, columns: Columns, skip: bool, loss: str) -> None:
    """Checks the columns of all rows: one may begin late. Raises ValueError."""
    try:
        check_columns(entry, source.every_column(), {}, columns, loss)
    except ValueError:
        nothing: Any = source.select_columns([])
        for part in () if skip else nothing.parts():
            for row, found in nothing.read(part):
                if isinstance(found, Refused):  # for which there is no column
                    raise ValueError(f"{nothing.place(row)}: {found}") from None
        raise


def _checked(source: Source, entry: Dataset, columns: Columns, skip: bool, loss: str) -> Source:
    """The source with the columns that are read. Raises ValueError for columns of another kind."""
    kind = DATASETS[entry.type]
    try:
        check_columns(entry, [*source.column_names], {}, columns, loss)
    except ValueError:
        _check_late(source, entry, columns, skip, loss)
    for rows, path, features in source.declared():
        try:
            kind.check(path, features)
        except NotIntegers as wrong:
            raise NotIntegers(_first_other(rows, wrong.column), wrong.column, wrong.kind) from wrong
    if isinstance(source, Documents):
        return source
    chosen = source.asking.columns  # by data.select_columns
    source = source.select_columns((*kind.columns, *columns))

    def refused(name: str) -> str | None:
        there = chosen is None or name in chosen
        return unread(entry, name, columns, loss) if there else None

    numbers = {n: number for n, c in columns.items() if c.batched}
    asking = source.asking._replace(
        cells=numbers | {**kind.cells},
        arrow=kind.arrow,
        refused=functools.cache(refused),
    )
    return dataclasses.replace(source, asking=asking)


def _say_left_out(
    path: str, most: int, made: int, cut: int, unlabeled: int, short: int, kept: bool
) -> None:
    """Logs which samples of an entry were cut or left out.   most: tokens of a sample.   kept:
    whether samples without labels are kept.
    """
    total = made + short + (0 if kept else unlabeled)
    if cut:
        log.warning(
            "%s: %d of %d samples were longer than %d tokens and were cut",
            path, cut, total, most,
        )  # fmt: skip
    if unlabeled and not kept:
        log.warning(
            "%s: %d of %d samples have no answer within %d tokens and were left out",
            path, unlabeled, total, most,
        )  # fmt: skip
    elif 2 * unlabeled > total:
        log.warning(
            "%s: %d of %d samples have no label after their first token, so that nothing is "
            "learned from them",
            path, unlabeled, total,
        )  # fmt: skip
    if short:
        log.warning("%s: %d samples of fewer than two tokens were left out", path, short)


def prepare_entry(
    source: Source,
    entry: Dataset,
    data: Data,
    tokenizer,
    vocab: int,
    writer: Writer,
    columns: Columns,
    units: Units,
    number: int = 0,
    use: Use = ANY,
) -> Counts:
    """Writes the samples of an entry. tokenizer: None if not needed.   columns: further ones of
    samples.   units: those of the samples that have been written.   number: the entry's number.
    """
    most, kind = longest(entry, data), DATASETS[entry.type]
    units.begin_set(kind.yields)
    names = source.column_names
    skip = data.on_bad_row == "skip"
    source = _checked(source, entry, columns, skip, use.prompts.loss)
    encoder = Encoder(entry, most, vocab, tokenizer, names, columns, skip, number, use)
    count = workers(entry, data.dataset_num_proc, source.nbytes)
    chunks = entry.preprocess_shards or 1
    before, cut, unlabeled, short, skipped = writer.samples, 0, 0, 0, 0
    told: collections.Counter[str] = collections.Counter()
    try:
        # A bar on a terminal alone.
        with tqdm(desc=entry.path, unit=" samples", disable=None) as bar:
            for j in range(chunks):
                for part in encoded(Job(source.shard(chunks, j), encoder), count):
                    writer.write(units.numbered(part.batch, writer.samples))
                    bar.update(part.batch.num_rows)
                    cut, unlabeled = cut + part.cut, unlabeled + part.unlabeled
                    short += part.short
                    told.update(part.told)
                    for refused in part.skipped[: max(0, TOLD - skipped)]:
                        log.warning(
                            "%s: %s; skipped", source.place(refused.row), refused.reason
                        )  # fmt: skip
                    skipped += len(part.skipped)
    except RefusedRow as refused:
        raise ValueError(f"{source.place(refused.row)}: {refused.reason}") from refused
    except BrokenProcessPool as ended:
        raise OSError(
            f"a process that prepares {entry.path} has ended, perhaps for lack of memory; set "
            "data.dataset_num_proc lower"
        ) from ended
    if skipped:
        log.warning("%s: %d rows in all were skipped", entry.path, skipped)
    for sentence, times in told.items():
        log.warning("%s: %d %s", entry.path, times, sentence)
    made, kept = writer.samples - before, kind.keeps_unlabeled
    _say_left_out(entry.path, most, made, cut, unlabeled, short, kept)
    return Counts(made, made - unlabeled if kept else made, unlabeled, short, skipped)


def split_file(path: pathlib.Path, count: int, samples: int) -> None:
    """Replaces a file of samples by `count` files of about as many samples each."""
    ends = [samples * (i + 1) // count for i in range(count)]
    with pa.OSFile(str(path)) as file:
        stream = pa.ipc.open_stream(file)
        at, done, writer = 0, 0, Writer(_part(path, 0, count), stream.schema)
        for batch in stream:
            taken = 0
            while taken < batch.num_rows:
                take = min(batch.num_rows - taken, ends[at] - done)
                writer.write(batch.slice(taken, take))
                taken, done = taken + take, done + take
                if done == ends[at] and at + 1 < count:
                    writer.close()
                    at += 1
                    writer = Writer(_part(path, at, count), stream.schema)
        writer.close()
    path.unlink()


def _part(path: pathlib.Path, i: int, count: int) -> pathlib.Path:
    return path.with_name(f"{path.stem}-{i:05d}-of-{count:05d}.arrow")
