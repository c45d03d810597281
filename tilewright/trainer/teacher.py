"""Writes what a teacher says of documents: torchrun -m tilewright.trainer.teacher config.yaml --to
FOLDER [...]

Rows of type `tokenized` with the columns that train.loss = distillation reads, in a Parquet file
for each process of data parallelism. The configuration is the trainer's; the weights are those that
`tilewright.trainer.evaluate` takes. Every document of data.test_datasets, or of data.datasets where
there are none, gets its row, whatever data.val_set_size and limits of evaluations say;
distillation.top_k and distillation.temperature say what is written.
"""

from __future__ import annotations

if __name__ == "__main__":
    from tilewright.core.platform import require

    require("trainer")  # else the imports below end in a traceback

import functools
import logging
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tilewright.core import platform
from tilewright.core.files import check_writable
from tilewright.trainer import build, launch
from tilewright.trainer.columns import IGNORE, TOKENS
from tilewright.trainer.config import Train, from_command_line
from tilewright.trainer.data.batches import Bins
from tilewright.trainer.data.columns.column import COLUMNS
from tilewright.trainer.data.encode import lists
from tilewright.trainer.data.teacher_files import with_temperature
from tilewright.trainer.engine import Engine, reproducible
from tilewright.trainer.evaluate import Scorer, scorer_of
from tilewright.trainer.losses.distillation_fields import Distillation
from tilewright.trainer.losses.loss import count_labels
from tilewright.trainer.models.head import TokenLosses
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.scoring import batches_of, documents, passes

PROGRAM = "python -m tilewright.trainer.teacher"
OPTIONS = {"--to FOLDER": "Where the rows are written. It must not be there, or be empty."}
GROUP = 1 << 16  # tokens of a row group, at least

Row = dict[str, np.ndarray]


def distributions(
    per_token: TokenLosses, batch: Mapping[str, Any], *, top_k: int, temperature: float
) -> tuple[torch.Tensor, ...]:
    """The most probable tokens [B, S, k] and their log-probabilities, or those of labels [B, S], as
    a loss for `Engine`.
    """
    labels = batch["labels"]
    if top_k:
        columns = per_token.most_probable(top_k, temperature)
    else:
        nothing = labels.new_empty((*labels.shape, 0))
        columns = (per_token.listed(nothing, temperature).label.clamp_max(0.0),)
    return columns[-1].double().sum(), count_labels(batch), *columns


def rows(
    engine: Engine, bins: Bins, size: int, top_k: int, temperature: float
) -> Iterator[list[Row]]:
    """The rows of this process's documents, of one micro-batch at a time. Every rank must exhaust
    it.

    bins: `numbered`.   size: bins of a micro-batch.
    """
    of_teacher = functools.partial(distributions, top_k=top_k, temperature=temperature)
    names = ("teacher_ids", "teacher_logprobs") if top_k else ("teacher_logprob",)
    batches = batches_of(bins, size, engine.mesh)
    with engine.evaluating():
        for batch, whole in passes(engine.parts, engine.mesh, batches, of_teacher):
            arrays = [t.cpu().numpy() for t in whole or ()]
            yield list(_of_documents(batch, bins, arrays, names)) if arrays else []


def _of_documents(
    batch: Mapping[str, torch.Tensor],
    bins: Bins,
    arrays: Sequence[np.ndarray],
    names: Sequence[str],
) -> Iterator[Row]:
    """arrays: the labels of a packed row [T], and what is named [T, ...]."""
    labels, *said = arrays
    for number, first, end in documents(batch):
        document = bins.dataset[number]
        row = {name: np.asarray(document[name]) for name in TOKENS}
        # A batch has at t what belongs to the token that follows.
        learned = labels[first : end - 1] != IGNORE
        for name, values in zip(names, said, strict=True):
            column = COLUMNS[name]
            own = np.full((end - first, *values.shape[1:]), column.fill, column.dtype)
            own[1:][learned] = values[first : end - 1][learned]
            row[name] = own
        yield row


def table(given: Sequence[Row]) -> pa.Table:
    """Rows as Arrow has them: lists, and of numbers [tokens, k] lists of lists."""
    columns = {}
    for name in given[0]:
        values = [row[name] for row in given]
        flat = lists([v.reshape(-1) for v in values], values[0].dtype)
        if values[0].ndim == 2:
            k, tokens = values[0].shape[1], [len(v) for v in values]
            inner = np.arange(0, k * sum(tokens) + 1, k, dtype=np.int32)
            of_tokens = pa.ListArray.from_arrays(pa.array(inner), flat.values)
            ends = pa.array(np.cumsum([0, *tokens], dtype=np.int32))
            flat = pa.ListArray.from_arrays(ends, of_tokens)
        columns[name] = flat
    return pa.table(columns)


class Writer:
    """A Parquet file of rows at a temperature, which has its name once it is whole."""

    def __init__(self, file: pathlib.Path, temperature: float):
        self.temperature = temperature
        self.file, self.aside = file, file.with_name(f".{file.name}.partial")
        self.rows: list[Row] = []
        self.count, self._writer = 0, None

    def add(self, rows: list[Row]) -> None:
        self.rows += rows
        if sum(len(row["input_ids"]) for row in self.rows) >= GROUP:
            self._flush()

    def _flush(self) -> None:
        if self.rows:
            group = table(self.rows)
            schema = with_temperature(group.schema, self.temperature)
            self._writer = self._writer or pq.ParquetWriter(self.aside, schema)
            self._writer.write_table(group)
            self.count, self.rows = self.count + len(self.rows), []

    def close(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()
            self.aside.replace(self.file)


def _take(folder: pathlib.Path) -> None:
    """Makes the folder. Raises ValueError if it cannot be made, or has files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ValueError(f"--to {folder}: has files; give another folder")
    except OSError as error:
        raise ValueError(f"--to {folder}: cannot be written: {error.strerror}") from error


def _unwritable(file: pathlib.Path) -> ValueError | None:
    try:
        check_writable(file, "--to")
    except ValueError as error:
        return error
    return None


def write(
    train: Train, distillation: Distillation, scorer: Scorer, mesh: Mesh, folder: pathlib.Path
) -> None:
    """Writes the rows of every document. Every rank must call it.

    folder: which is not there, or has no files.
    """
    k, temperature, shape = distillation.top_k, distillation.temperature, scorer.shape
    if shape.head != "language_model":
        raise ValueError("a reward model has no distributions of tokens")
    if k > shape.vocab_size:
        raise ValueError(f"distillation.top_k = {k}: the model has {shape.vocab_size} tokens")
    build.of_main(mesh, lambda: _take(folder))
    writer = Writer(folder / f"{mesh.rank:05}.parquet", temperature)
    mesh.control.agree(_unwritable(writer.file))
    with reproducible(train.seed, train.enable_full_determinism):
        chosen, engine = list(scorer.sets), scorer.engine()
        for one in chosen:
            for some in rows(engine, one.bins, scorer.size, k, temperature):
                writer.add(some)
    writer.close()
    counts = mesh.control.gather(writer.count)
    if mesh.main:
        print(f"{folder}: {sum(counts)} documents")


@platform.command
def main(argv: list[str] | None = None) -> int:
    """Returns the exit code, as `launch.run` has it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    argv, to = list(sys.argv[1:] if argv is None else argv), []
    if "--to" in argv:
        at = argv.index("--to")
        to, argv = argv[at + 1 : at + 2], argv[:at] + argv[at + 2 :]
    config = from_command_line(argv, PROGRAM, OPTIONS, training=False)
    if not to or to[0].startswith("--"):
        print("--to needs a FOLDER", file=sys.stderr)
        return 2
    train, d = config.train, config.distillation

    def work(mesh: Mesh) -> None:
        write(train, d, scorer_of(config, mesh, whole=True), mesh, pathlib.Path(to[0]))

    return launch.run(train, work)


if __name__ == "__main__":
    launch.end(main)
