"""Log-probabilities under a reference, computed once: by a pass over all data before the first
step, after which no second model is needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tilewright.ops.attention.context_parallel import shard, unshard
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.data.batches import PREFIX, Bins
from tilewright.trainer.data.logprobs import Found, clear, documents, key_of, write
from tilewright.trainer.data.prepared import alone
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.reference import Batch, Tensors, logprobs
from tilewright.trainer.scoring import batches_of, passes

log = logging.getLogger("tilewright")
# Labels of a file, 4 MiB: what a killed pass loses on each rank. A 7B model on one GPU takes some
# minutes for them.
FILE = 1 << 20
READ = 1024  # documents that are hashed at a time
# How far apart the two passes may be where a row's bits depend on the row that it is in
# (`Compared.bound`): some rounding errors of each token, which add up where all have one sign.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.03}


def folder_of(root: str, given: str | None, fingerprint: Mapping[str, Any]) -> pathlib.Path:
    """given: preference.reference_cache."""
    if given is not None:
        return pathlib.Path(given)
    text = json.dumps(fingerprint, sort_keys=True)
    return pathlib.Path(root, f"reference_{hashlib.sha256(text.encode()).hexdigest()[:16]}")


def _documents(batch: Batch, mesh: Mesh) -> Iterator[tuple[slice, np.ndarray, bytes]]:
    """`documents` of a micro-batch of all ranks that share it."""
    pair = torch.stack([batch[name][0].to(mesh.device) for name in ("input_ids", "labels")])
    ids, labels = unshard(pair, 1, mesh.context).cpu().numpy()
    shared = batch[PREFIX].tolist() if PREFIX in batch else None
    return documents(ids, labels, batch["cu_seqlens"].tolist(), shared)


class Precomputed:
    """A reference whose numbers are read.   own, bound: `reference.Compared`."""

    def __init__(self, cache: Found, mesh: Mesh, own: bool, bound: float):
        self.cache, self.mesh, self.own, self.bound = cache, mesh, own, bound

    def added(self, policy: Parts, batch: Batch) -> Batch:
        """A micro-batch with the column reference_logprob. Raises ValueError for a document that
        the pass has not seen.
        """
        row = np.zeros(int(batch["cu_seqlens"][-1]), np.float32)
        for span, learned, key in _documents(batch, self.mesh):
            row[span][learned] = self.cache[key]
        own = shard(torch.from_numpy(row)[None], 1, self.mesh.context)
        return {**batch, "reference_logprob": own}

    def moved(self) -> dict[str, Tensors]:
        return {}


def _missing(sets: Sequence[Bins], cache: Found) -> tuple[list[list[int]], int]:
    """The numbers of the bins that hold a document which is not there yet, and how many there
    are.
    """
    absent: set[bytes] = set()
    todo = []
    for bins in sets:
        of_document = np.empty(len(bins.lengths), np.int64)
        for number, some in enumerate(bins.bins):
            of_document[some] = number
        wanted: set[int] = set()
        for first in range(0, len(of_document), READ):
            rows = bins.dataset[first : first + READ]
            for i, (ids, labels) in enumerate(zip(rows["input_ids"], rows["labels"], strict=True)):
                shifted = np.append(labels[1:], IGNORE)
                if (shifted == IGNORE).all():
                    continue
                key = key_of(ids, shifted)
                if key not in cache and key not in absent:
                    absent.add(key)
                    wanted.add(int(of_document[first + i]))
        todo.append(sorted(wanted))
    return todo, len(absent)


class _Files:
    """Writes what a rank has computed, a file at a time."""

    def __init__(self, cache: Found, rank: int, tokenizer: str):
        self.cache, self.rank, self.tokenizer = cache, rank, tokenizer
        self.new: dict[bytes, np.ndarray] = {}
        self.done: set[bytes] = set()

    def add(self, key: bytes, values: np.ndarray) -> None:
        """Raises ValueError for a log-probability that is none."""
        if key in self.done or key in self.cache:
            return
        if not np.isfinite(values).all():
            raise ValueError(
                f"preference.reference: a log-probability of the document with the SHA-256 "
                f"{key.hex()} is {values[~np.isfinite(values)][0]} under the reference"
            )
        self.new[key] = values
        self.done.add(key)
        if sum(map(len, self.new.values())) >= FILE:
            self.flush()

    def flush(self) -> None:
        if self.new:
            cache = self.cache
            write(cache.folder, self.new, cache.reference, self.rank, self.tokenizer)
            self.new = {}


@torch.no_grad()
def _compute(
    parts: Parts, mesh: Mesh, sets: Sequence[Bins], todo: list[list[int]], size: int, files: _Files
) -> BaseException | None:
    """Computes and writes what is missing. Returns this rank's error: the others go on, and hear of
    it at the end.
    """
    problem = None
    for bins, numbers in zip(sets, todo, strict=True):
        batches = batches_of(bins.only(numbers), size, mesh)
        for batch, whole in passes(parts, mesh, batches, logprobs):
            rows = _documents(batch, mesh)
            if whole is None or problem is not None:
                continue
            values = whole[1].float().cpu().numpy()
            try:
                for span, learned, key in rows:
                    files.add(key, values[span][learned])
            except (OSError, ValueError) as error:
                problem = error
    try:
        files.flush()
    except OSError as error:
        problem = problem or error
    return problem


def computed(
    made: Callable[[], Parts],
    mesh: Mesh,
    sets: Sequence[Bins],
    folder: pathlib.Path,
    fingerprint: Mapping[str, Any],
    size: int,
    tokenizer: str = "",
) -> Found:
    """The log-probabilities of all documents of these sets: what a folder holds, and the rest once
    it is computed. Every rank must call it.

    made: gives the parts of a model as it was read, adapters adding zeros; it is called where
    something is to be computed.   size: bins, packed as in training, of a
    micro-batch.   tokenizer: see `logprobs.write`.
    Raises as `Found`, and ValueError for a log-probability that is not finite, on every rank.
    """
    begun, problem, todo, count = time.monotonic(), None, [], 0
    with contextlib.ExitStack() as stack:
        cache = None
        if mesh.main:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(alone(folder / ".lock"))
                clear(folder)
                cache = Found(folder, fingerprint)
                todo, count = _missing(sets, cache)
                if count and cache.tokenizers and tokenizer not in cache.tokenizers:
                    log.warning(
                        "reference: another tokenizer or chat template than this run's has made "
                        "the documents in %s",
                        folder,
                    )
                if count:
                    log.info(
                        "reference: %d documents to compute, %d are in %s",
                        count,
                        len(cache),
                        folder,
                    )
            except (OSError, ValueError) as error:
                problem = error
        mesh.control.agree(problem)
        todo = mesh.control.broadcast(todo)
        if cache is None:
            cache = Found(folder, fingerprint, checked=False)
        if any(todo):
            parts = made()
            parts.wrapped.eval()
            try:
                problem = _compute(
                    parts, mesh, sets, todo, size, _Files(cache, mesh.rank, tokenizer)
                )
            finally:
                parts.reshard()
                parts.wrapped.train()
            mesh.control.agree(problem)
            mesh.control.barrier()
            cache = Found(folder, fingerprint, checked=False)
            if mesh.main:
                log.info("reference: computed in %.1f s", time.monotonic() - begun)
    return cache
