"""Packed bins as micro-batches, per rank, resumable at any step.

A batch is one packed row:
    input_ids [1, T], labels [1, T] (shifted: labels[t] follows token t of the same document; the
    last is -100), position_ids [1, T] (from 0 in every document), real bool [1, T] (false for
    padding), cu_seqlens int32 [documents + 1], and further columns that are asked for: [1, T] or
    [1, T, width] if they are per token, [documents] if they are per document, and with any of them
    `lengths` [documents], the number of each one's tokens that the rank has; with dropout, bin_ends
    int32 [bins]: the first token after each bin. Padding is a document of its own.
Where a loss asks for it (`mismatched`), a batch also has `mismatched`, a batch of the documents'
prompts with the answers of other documents: each with that of the one before, in the order of a
step's bins, round the step. It has `documents`, their number.
With the column `prefix` a document's first tokens, as many as it says, are left out: they are those
of the nearest document before it that has none, and its position_ids begin after them.
With context parallelism what is per token is this rank's shard of the row, and the ranks of one row
read the same bins.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow.compute
import torch

from tilewright.ops.attention.context_parallel import ContextParallel, shard
from tilewright.trainer import interrupts
from tilewright.trainer.columns import IGNORE, MISMATCHED, TOKENS
from tilewright.trainer.data import packing
from tilewright.trainer.data.columns.column import Column
from tilewright.trainer.data.encode import has_target
from tilewright.trainer.data.fields import Data
from tilewright.trainer.data.units import rows_of, starts_of, unfolded, values_of
from tilewright.trainer.parallel.fields import Batching
from tilewright.trainer.parallel.mesh import padding

BIN_ENDS, PREFIX = "bin_ends", "prefix"
FILLER = "filler"  # with the further columns of a document that is padding
pc: Any = pyarrow.compute  # which makes its functions when it is imported
# (input_ids, labels), or with a third item: further columns by name.
Document = tuple[Any, ...]
NONE: Mapping[str, Column] = {}
# A bin's index; where documents are mismatched, also that of the bin before it.
Key = int | tuple[int, int] | None
DOCUMENT = {"document": Column("document", "int64", fill=-1)}
HASHED = 1 << 22  # tokens of a data set whose samples are all hashed


def lengths_of(dataset) -> np.ndarray:
    """The number of tokens of each sample, int64, from Arrow's offsets: no token is read."""
    stored = dataset.data.column("input_ids")
    lengths = np.concatenate(
        [np.empty(0, np.int64)]
        + [pc.list_value_length(chunk).to_numpy(zero_copy_only=False) for chunk in stored.chunks]
    ).astype(np.int64)
    rows = rows_of(dataset)
    return lengths if rows is None else lengths[rows]


class Bins(torch.utils.data.Dataset):
    """A data set packed into bins. bins[i] is a list of documents.

    columns: further columns of documents. Batches have those with numbers.
    numbered: batches also have `document`, the number of each in the data set.
    mismatched: batches also have `mismatched`: an index is of `keyed`.
    """

    def __init__(
        self,
        dataset,
        data: Data,
        *,
        packed: bool = True,
        columns: Mapping[str, Column] = NONE,
        numbered: bool = False,
        mismatched: bool = False,
    ):
        self.mismatched = mismatched
        self._read = {name: c for name, c in columns.items() if c.batched}
        # A set that was saved elsewhere may lack columns with a default.
        self._absent = self._read.keys() - {*dataset.column_names}
        self.columns = self._read | (DOCUMENT if numbered else {})
        self._names = [*TOKENS, *(name for name in self._read if name not in self._absent)]
        self.dataset, self.data = dataset.with_format("numpy", columns=self._names), data
        lengths = lengths_of(dataset)
        # Tokens of each document that are those of one before it.
        self.shared = _shared(dataset, lengths) if PREFIX in self._read else np.zeros_like(lengths)
        self.lengths = lengths = lengths - self.shared
        self.tokens = int(lengths.sum())
        units = starts_of(dataset, self._read)
        if packed:
            method = (
                "sequential" if data.sample_packing_sequentially else data.sample_packing_method
            )
            bins = packing.pack(
                lengths if units is None else self._joined(units),
                data.sample_packing_sequence_len,
                method,
                data.sample_packing_group_size,
                data.sample_packing_mp_start_method,
            )
        else:
            bins = [np.array([i]) for i in range(len(lengths) if units is None else len(units) - 1)]
        self.bins = bins if units is None else [unfolded(b, units) for b in bins]
        self.sizes = np.array([lengths[b].sum() for b in self.bins], dtype=np.int64)  # tokens

    def _joined(self, units: np.ndarray) -> np.ndarray:
        """The number of tokens of each unit."""
        tokens, most = (
            np.add.reduceat(self.lengths, units[:-1]),
            self.data.sample_packing_sequence_len,
        )
        if tokens.max() > most:
            i = int(tokens.argmax())
            of_unit = f"documents {units[i]} to {units[i + 1] - 1} of one pair have"
            raise ValueError(f"{of_unit} {tokens[i]} tokens, a bin holds {most}")
        return tokens

    @property
    def full(self) -> float:
        """The part of the bins that holds tokens."""
        return self.tokens / max(1, len(self) * self.data.sample_packing_sequence_len)

    def identity(self) -> dict[str, int | str]:
        """The compatibility key of a position in these bins."""
        return {"bins": len(self), "tokens": self.tokens, "contents": self.fingerprint()}

    def fingerprint(self) -> str:
        """A hash of the contents. They are read once."""
        return self._hashes[0]

    def parts(self) -> dict[str, str]:
        """The same of what the contents are made of, by `Column.part`."""
        return dict(self._hashes[1])

    @property
    def _hashed(self) -> int:
        """How many samples are hashed: all of them, or as many as have four million tokens."""
        return max(2, min(len(self.lengths), HASHED * len(self.lengths) // max(1, self.tokens)))

    @property
    def sampled(self) -> bool:
        """Whether some samples are not hashed."""
        return self._hashed < len(self.lengths)

    @functools.cached_property
    def _hashes(self) -> tuple[str, dict[str, str]]:
        """A hash of every sample's length, and of the contents of samples spread over the data;
        and such a hash for each part of them.
        """
        at = np.linspace(0, len(self.lengths) - 1, self._hashed).astype(np.int64)
        rows = self.dataset[np.unique(at)]
        whole = hashlib.sha256(self.lengths.tobytes())
        parts = {"data": whole.copy()}
        for name in self._names:
            part = "data" if name in TOKENS else self._read[name].part
            own = parts.setdefault(part, hashlib.sha256())
            for sample in rows[name]:
                values = np.asarray(sample)
                kind = np.int64 if values.dtype.kind in "iu" else np.float64
                for digest in (whole, own):
                    digest.update(values.astype(kind).tobytes())
        return whole.hexdigest()[:16], {name: d.hexdigest()[:16] for name, d in parts.items()}

    def origin(self, document: int) -> str:
        """The column `origin` of a document; "" of a set without it."""
        if "origin" not in self.dataset.column_names:
            return ""
        return self.dataset.with_format(None)[document]["origin"]

    def only(self, numbers: list[int]) -> Bins:
        """Some of the bins, for evaluation."""
        some = copy.copy(self)
        some.bins, some.sizes = [self.bins[i] for i in numbers], self.sizes[numbers]
        return some

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, i: Key) -> list[Document]:
        if i is None:  # filler, so that every rank has a batch
            return [_filler(2, self.columns)]
        if isinstance(i, tuple):
            return self._with_mismatched(*i)
        numbers = self.bins[i]
        rows = self.dataset[numbers]
        if not self.columns:
            return list(zip(*(rows[name] for name in TOKENS), strict=True))
        further: dict[str, list] = {}
        for name, column in self._read.items():
            if name in self._absent:
                stored = self.lengths[numbers] + self.shared[numbers]
                further[name] = [column.read(None, int(n)) for n in stored]
            else:
                further[name] = [column.shaped(v) for v in rows[name]]
        if "document" in self.columns:
            further["document"] = list(numbers)
        each = ({name: values[j] for name, values in further.items()} for j in range(len(numbers)))
        documents = list(zip(*(rows[name] for name in TOKENS), each, strict=True))
        return self._without_prefixes(documents) if PREFIX in self._read else documents

    def _without_prefixes(self, documents: list[Document]) -> list[Document]:
        """Raises ValueError for a prefix that is not that of the document before it."""
        suffixes, whole = [], np.empty(0, np.int64)
        for ids, labels, further in documents:
            if not (n := int(further[PREFIX])):
                whole = ids
            elif not np.array_equal(whole[:n], ids[:n]) or (labels[1 : n + 1] != IGNORE).any():
                raise ValueError(
                    f"prefix = {n}: these tokens of a document of {len(ids)} must be those of the "
                    "nearest document before it whose prefix is 0, and predict no label"
                )
            by_token = {k for k, c in self.columns.items() if c.each == "token"}
            further = {k: v[n:] if k in by_token else v for k, v in further.items()}
            suffixes.append((ids[n:], labels[n:], further))
        return suffixes

    def _with_mismatched(self, i: int, before: int) -> list[Document]:
        """The documents of bin i, each with its mismatched one, or None if there is no other."""
        documents, last = self[i], self.dataset[int(self.bins[before][-1])]
        earlier = [tuple(last[name] for name in TOKENS), *(d[:2] for d in documents[:-1])]
        if i == before and len(documents) == 1:
            earlier = [None]
        most = self.data.sample_packing_sequence_len
        return [
            (*own[:2], {**dict(*own[2:]), MISMATCHED: mismatch(own[:2], other, most)})
            for own, other in zip(documents, earlier, strict=True)
        ]


def _shared(dataset: Any, lengths: np.ndarray) -> np.ndarray:
    """The column prefix. Raises ValueError for one that leaves nothing of its document."""
    shared = values_of(dataset, PREFIX)
    if (wrong := shared >= lengths).any():
        i = int(wrong.argmax())
        raise ValueError(f"document {i} has {lengths[i]} tokens, and a prefix of {shared[i]}")
    return shared


def mismatch(own: Document, other: Document | None, most: int) -> Document | None:
    """The prompt of one document with the answer of another, cut to `most` tokens; None if either
    has none. An answer begins with the first label.
    """
    if other is None or not (has_target(own[1]) and has_target(other[1])):
        return None
    ends = [1 + int((d[1][1:] != IGNORE).argmax()) for d in (own, other)]
    ids = np.concatenate((own[0][: ends[0]], other[0][ends[1] :]))[:most]
    labels = np.concatenate((np.full(ends[0], IGNORE, np.int64), other[1][ends[1] :]))[:most]
    return ids, labels


def keyed(bins: list[int | None]) -> list[Key]:
    """The bins of a step with the one before each, round the step. Empty ones are the last."""
    there = [i for i in bins if i is not None]
    return [None if i is None else (i, there[k - 1]) for k, i in enumerate(bins)]


def _filler(tokens: int, columns: Mapping[str, Column]) -> Document:
    """A document of padding, without a label."""
    further = {name: c.filled(tokens) for name, c in columns.items()}
    return np.zeros(tokens, np.int64), np.full(tokens, IGNORE, np.int64), {**further, FILLER: True}


def collate(
    bins: list[list[Document]],
    multiple: int,
    cp: ContextParallel | None = None,
    columns: Mapping[str, Column] = NONE,
    *,
    ends: bool = False,
    mismatched: bool = False,
    aligned: bool = False,
) -> dict[str, Any]:
    """Concatenates bins into one packed row, or a rank's shard of it. Padding is a document of its
    own, with every label ignored; without a document the row is padding, so that every rank has a
    batch.

    columns: the documents' further ones.
    aligned: labels, and columns of targets, are those that a token predicts, as a batch has them,
        and not its own.
    ends: with those of the bins, of which the last may be before padding.
    mismatched: with a batch of the mismatched documents, which all have; see `Bins`.
    """
    of_bins = np.cumsum([sum(len(d[0]) for d in b) for b in bins])
    documents = [d for b in bins for d in b]
    lengths = [len(d[0]) for d in documents]
    if pad := -sum(lengths) % multiple or (0 if documents else multiple):
        documents.append(_filler(pad, columns))
        lengths.append(pad)
    ids = np.concatenate([d[0] for d in documents])
    labels = (d[1] if aligned else np.append(d[1][1:], IGNORE) for d in documents)
    shifted = np.concatenate([*labels])
    begins = [d[2][PREFIX] if PREFIX in columns else 0 for d in documents]
    positions = np.concatenate([np.arange(n) + a for n, a in zip(lengths, begins, strict=True)])
    row = {"input_ids": ids, "labels": shifted, "position_ids": positions}
    tensors = {name: torch.from_numpy(t).long() for name, t in row.items()}
    real = np.repeat([len(d) < 3 or FILLER not in d[2] for d in documents], lengths)
    tensors["real"] = torch.from_numpy(real)
    of_documents = {}
    for name, column in columns.items():
        values = [d[2][name] for d in documents]
        if column.each == "token":
            row = np.concatenate(values if aligned else [column.shifted(v) for v in values])
            tensors[name] = torch.from_numpy(row.astype(column.dtype, copy=False))
        else:
            of_documents[name] = torch.from_numpy(np.array(values, column.dtype))
    cp = cp or ContextParallel()
    if columns:
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        of_documents["lengths"] = torch.bincount(shard(numbers, 0, cp), minlength=len(lengths))
    return {
        **{name: shard(t[None], 1, cp) for name, t in tensors.items()},
        **of_documents,
        "cu_seqlens": torch.from_numpy(np.cumsum([0, *lengths])).int(),
        **({BIN_ENDS: torch.from_numpy(of_bins).int()} if ends else {}),
        **({MISMATCHED: _mismatched(bins, multiple, cp)} if mismatched else {}),
    }


def _mismatched(bins: list[list[Document]], multiple: int, cp: ContextParallel) -> dict[str, Any]:
    mismatched = [d[2].get(MISMATCHED) for b in bins for d in b]
    there = [d for d in mismatched if d is not None]
    batch = collate([there or [_filler(2, NONE)]], multiple, cp)
    return {**batch, "documents": torch.tensor(len(there))}


class Batches:
    """One rank's micro-batches, grouped by optimizer step, resumable at any step.

    rank, world_size: data parallelism's; ranks of one `cp` have the same. A step takes world_size
    * micro_batch_size * accumulation bins. The position is an epoch and the number of its bins that
    are used up, whatever the number of ranks, so a run can resume with another one.
    """

    def __init__(
        self,
        bins: Bins,
        data: Data,
        train: Batching,
        *,
        rank: int = 0,
        world_size: int = 1,
        pin: bool = False,
        cp: ContextParallel | None = None,
        tp: int = 1,
        ends: bool = False,
    ):
        self.data, self.cp, self.tp = data, cp or ContextParallel(), tp
        self.bins, self.rank, self.world, self.pin = bins, rank, world_size, pin
        self.micro, self.accumulation, self.seed = (
            train.micro_batch_size,
            train.gradient_accumulation_steps,
            train.seed,
        )
        self.ends = ends
        self.per_step = world_size * self.micro * self.accumulation
        self.steps_per_epoch = self._steps_in(len(bins))
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"an optimizer step takes {self.per_step} bins (ranks x micro_batch_size x "
                f"gradient_accumulation_steps) and the data fill {len(bins)}; use smaller bins or "
                f"steps"
            )
        self.epoch = self.used = 0
        self.tokens = 0  # handed out so far, to all ranks together

    def _steps_in(self, bins: int) -> int:
        whole, rest = divmod(bins, self.per_step)
        return whole + (rest > 0 and not self.data.dataloader_drop_last)

    @property
    def position(self) -> int:
        """The number of optimizer steps of this size up to the present position in the data."""
        return (self.epoch + 1) * self.steps_per_epoch - self._steps_in(len(self.bins) - self.used)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "used": self.used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        # Other data, which a run can accept, may have fewer bins.
        self.epoch, self.used = state["epoch"], min(state["used"], len(self.bins))

    def order(self, epoch: int) -> np.ndarray:
        """Indices of all bins in the order of an epoch."""
        if not self.data.shuffle_merged_datasets:
            return np.arange(len(self.bins))
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.bins))

    def _mine(self) -> Iterator[list[Key]]:
        """Indices of this rank's micro-batches from the present position to the end of the
        epoch.
        """
        order = self.order(self.epoch)
        for first in range(self.used, len(order), self.per_step):
            step: list[int | None] = list(map(int, order[first : first + self.per_step]))
            if len(step) < self.per_step:
                if self.data.dataloader_drop_last:
                    return
                step += [None] * (self.per_step - len(step))
            keys: list[Key] = keyed(step) if self.bins.mismatched else [*step]
            for a in range(self.accumulation):
                start = (a * self.world + self.rank) * self.micro
                yield keys[start : start + self.micro]

    def steps(self) -> Iterator[list[dict[str, Any]]]:
        """Yields the micro-batches of each following step, epoch after epoch, without end."""
        while True:
            layout = self.cp, self.tp, self.ends
            loader = _loader(self.bins, list(self._mine()), self.data, self.pin, *layout)
            step, sizes = [], self.bins.sizes[self.order(self.epoch)]
            for batch in loader:
                step.append(batch)
                if len(step) == self.accumulation:
                    # The position after this step, set before yielding: a checkpoint is written
                    # after the step, before the next one is requested.
                    self.tokens += int(sizes[self.used : self.used + self.per_step].sum())
                    self.used = min(self.used + self.per_step, len(self.bins))
                    yield step
                    step = []
            self.epoch, self.used = self.epoch + 1, 0


def _loader(
    bins: Bins,
    indices: list[list[Key]],
    data: Data,
    pin: bool,
    cp: ContextParallel,
    tp: int,
    ends: bool = False,
) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(
        bins,
        batch_sampler=indices,
        collate_fn=functools.partial(
            collate,
            multiple=padding(data.pad_to_multiple_of, cp, tp),
            cp=cp.layout(),
            columns={n: c.plain() for n, c in bins.columns.items()},
            ends=ends,
            mismatched=bins.mismatched,
        ),
        num_workers=data.dataloader_num_workers,
        prefetch_factor=data.dataloader_prefetch_factor,
        pin_memory=pin and data.dataloader_pin_memory,
        worker_init_fn=interrupts.ignored,
        # Without one it draws from the global generator, whose state a resumed run restores.
        generator=torch.Generator(),
    )


def evaluation_batches(
    bins: Bins,
    size: int,
    rank: int,
    world_size: int,
    pin: bool = False,
    cp: ContextParallel | None = None,
    tp: int = 1,
    most: float | None = None,
) -> torch.utils.data.DataLoader:
    """Every bin once over all ranks, `size` per micro-batch; ranks get the same number of batches,
    filled up with empty ones. Bins are read and padded by their own settings.

    most: batches of each rank, the first ones: an int, or a share of them, rounded up; None or 0:
        all.
    """
    every = list(range(len(bins)))
    keys: list[Key] = keyed([*every]) if bins.mismatched else [*every]
    groups = [keys[i : i + size] for i in range(0, len(bins), size)]
    groups.extend([None] for _ in range(-len(groups) % world_size))
    own = groups[rank::world_size][: _batches(len(bins), size, world_size, most)]
    return _loader(bins, own, bins.data, pin, cp or ContextParallel(), tp)


def _batches(bins: int, size: int, world_size: int, most: float | None) -> int:
    """The number of batches of each rank. See `evaluation_batches`."""
    every = math.ceil(math.ceil(bins / size) / world_size)
    if not most:
        return every
    return min(every, most if isinstance(most, int) else math.ceil(most * every))


def evaluated_bins(bins: Bins, size: int, world_size: int, most: float | None) -> list[np.ndarray]:
    """The bins that `evaluation_batches` has over all ranks."""
    return bins.bins[: _batches(len(bins), size, world_size, most) * world_size * size]
