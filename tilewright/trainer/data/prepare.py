"""Tokenizes rows, in worker processes for large data, and writes them part by part: memory does not
grow with the data.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import multiprocessing
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pyarrow as pa
from tqdm import tqdm

from tilewright.core import platform
from tilewright.trainer.columns import SCHEMA
from tilewright.trainer.data.encode import Counts, Encoded, Encoder, RefusedRow, Use
from tilewright.trainer.data.fields import Dataset
from tilewright.trainer.data.read_columns import checked
from tilewright.trainer.data.rows import Part, Source
from tilewright.trainer.data.types.dataset_type import DATASETS
from tilewright.trainer.data.types.text import PIECE
from tilewright.trainer.data.units import Units

log = logging.getLogger("tilewright")
TOLD = 10  # rows that are skipped and named in the log
LARGE = 64 << 20  # bytes that are worth processes
# Parts after which processes are replaced: pages of mapped files stay in a process's memory.
RENEW = (256 << 20) // PIECE


def workers(entry: Dataset, asked: int | None, nbytes: int) -> int:
    """The number of processes; 0: this one."""
    if asked is not None or entry.path == "dummy":
        return asked or 0
    return (platform.dataset_processes() or len(os.sched_getaffinity(0))) if nbytes > LARGE else 0


def encoded(source: Source, encoder: Encoder, count: int) -> Iterator[Encoded]:
    """The encoded parts of a source, in order. count: of processes, 0 for none."""

    def job(part: Part) -> Encoded:
        return encoder(source.read(part))

    parts = source.parts()
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


_job: Callable[[Part], Encoded] | None = None  # of a worker process


def _begin(job: Callable[[Part], Encoded]) -> None:
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


def _say_left_out(path: str, most: int, counts: Counts, kept: bool) -> None:
    """Logs which samples of an entry were cut or left out.   most: tokens of a sample.   kept:
    whether samples without labels are kept.
    """
    unlabeled = counts["unlabeled"]
    total = counts["made"] + counts["short"] + (0 if kept else unlabeled)
    if counts["cut"]:
        log.warning(
            "%s: %d of %d samples were longer than %d tokens and were cut",
            path, counts["cut"], total, most,
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
    if counts["short"]:
        log.warning("%s: %d samples of fewer than two tokens were left out", path, counts["short"])


def prepare_entry(
    source: Source,
    entry: Dataset,
    number: int,
    tokenizer: Any,
    writer: Writer,
    units: Units,
    use: Use,
) -> Counts:
    """Writes the samples of an entry.   number: the entry's.   tokenizer: None if not needed.
    units: those of the samples that have been written.
    """
    kind, names = DATASETS[entry.type], source.column_names
    units.begin_set(kind.yields)
    source = checked(source, entry, use)
    encoder = Encoder(entry, number, tokenizer, names, use)
    processes = workers(entry, use.data.dataset_num_proc, source.nbytes)
    chunks = entry.preprocess_shards or 1
    counts, told = Counts(), collections.Counter[str]()
    try:
        # A bar on a terminal alone.
        with tqdm(desc=entry.path, unit=" samples", disable=None) as bar:
            for j in range(chunks):
                for part in encoded(source.shard(chunks, j), encoder, processes):
                    writer.write(units.numbered(part.batch, writer.samples))
                    bar.update(part.batch.num_rows)
                    for bad in part.skipped[: max(0, TOLD - counts["skipped"])]:
                        log.warning("%s: %s; skipped", source.place(bad.row), bad.reason)
                    counts.update(part.counts)
                    told.update(part.told)
    except RefusedRow as refused:
        raise ValueError(f"{source.place(refused.row)}: {refused.reason}") from refused
    except BrokenProcessPool as ended:
        raise OSError(
            f"a process that prepares {entry.path} has ended, perhaps for lack of memory; set "
            "data.dataset_num_proc lower"
        ) from ended
    if counts["skipped"]:
        log.warning("%s: %d rows in all were skipped", entry.path, counts["skipped"])
    for sentence, times in told.items():
        log.warning("%s: %d %s", entry.path, times, sentence)
    _say_left_out(entry.path, encoder.most, counts, kind.keeps_unlabeled)
    return counts


def split_file(path: pathlib.Path, count: int) -> None:
    """Replaces a file of samples by `count` files of about as many samples each."""
    with pa.memory_map(str(path)) as file:
        samples = pa.ipc.open_stream(file).read_all()
        for i in range(count):
            part = path.with_name(f"{path.stem}-{i:05d}-of-{count:05d}.arrow")
            first, stop = (len(samples) * at // count for at in (i, i + 1))
            with contextlib.closing(Writer(part, samples.schema)) as writer:
                for batch in samples[first:stop].to_batches():
                    writer.write(batch)
    path.unlink()
