"""Log-probabilities of documents under a reference, known by the documents' contents.

A folder of safetensors files, each with some documents' keys [n, 32] uint8, the ends [n] int64 of
their parts of `logprobs` [labels] float32, and, as metadata, what the reference is, a checksum of
all these, and what tokenized the documents. A file is written aside and renamed: what is there is
whole.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tilewright.core.files import writing
from tilewright.trainer.columns import IGNORE

KEY = "S32"
NAMES = ("keys", "ends", "logprobs")


class Damaged(ValueError):
    """A file is not as it was written."""


def key_of(ids: np.ndarray, labels: np.ndarray) -> bytes:
    """SHA-256 of a document's tokens and labels.   labels: as batches have them, shifted."""
    digest = hashlib.sha256(np.ascontiguousarray(ids, "<i8").data)
    digest.update(np.ascontiguousarray(labels, "<i8").data)
    return digest.digest()


def _checksum(about: str, arrays: Iterable[np.ndarray]) -> str:
    digest = xxhash.xxh3_64(about.encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def write(
    folder: pathlib.Path,
    logprobs: Mapping[bytes, np.ndarray],
    reference: Mapping[str, Any],
    rank: int = 0,
    tokenizer: str = "",
) -> None:
    """Writes a file of documents, under a name made from their keys.

    logprobs: float32 [labels] by key.   reference: its fingerprint, JSON.   rank: the process's,
    for the name aside.   tokenizer: a hash of what made tokens of the documents; "": their rows had
    tokens.
    """
    arrays = {
        "keys": np.frombuffer(b"".join(logprobs), np.uint8).reshape(-1, 32),
        "ends": np.cumsum([len(v) for v in logprobs.values()], dtype=np.int64),
        "logprobs": np.concatenate([v.astype(np.float32) for v in logprobs.values()]),
    }
    about = json.dumps(reference, sort_keys=True)
    name = hashlib.sha256(arrays["keys"].data).hexdigest()[:16]
    aside = folder / f".{name}.{rank}.partial"
    checksum = _checksum(about, (arrays[n] for n in NAMES))
    said = {"reference": about, "checksum": checksum, "tokenizer": tokenizer}
    with writing(aside):
        save_file(arrays, aside, said)
    aside.replace(folder / f"{name}.safetensors")


def clear(folder: pathlib.Path) -> None:
    """Removes what killed processes were writing."""
    for aside in folder.glob(".*.partial"):
        aside.unlink()


def _read(
    file: pathlib.Path, reference: Mapping[str, Any], checked: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Its arrays, and what tokenized the documents. Raises as `Found`."""
    try:
        with safe_open(file, "np") as opened:
            about = opened.metadata() or {}
            keys, ends, values = (opened.get_tensor(name) for name in NAMES)
        theirs, said = json.loads(about["reference"]), about["checksum"]
    except (SafetensorError, KeyError, OSError, ValueError) as error:
        raise Damaged(f"{file}: cannot be read as log-probabilities ({error})") from error
    own = json.loads(json.dumps(reference))
    if differ := {
        k: (theirs.get(k), own.get(k)) for k in {**theirs, **own} if theirs.get(k) != own.get(k)
    }:
        raise ValueError(
            f"{file} holds log-probabilities under another reference than this run's: {differ} "
            "(file, run); name another folder in preference.reference_cache, or none"
        )
    if checked and (checksum := _checksum(about["reference"], (keys, ends, values))) != said:
        raise Damaged(
            f"{file}: has the checksum {checksum}, and says {said}; delete it, and its documents "
            "are computed again"
        )
    return keys, ends, values, about.get("tokenizer", "")


class Found:
    """What the files of a folder hold.

    checked: compare their checksums.
    tokenizers: the hashes of what tokenized the documents, where that is known.
    Raises ValueError for a file of another reference, and Damaged for one that has changed.
    """

    def __init__(self, folder: pathlib.Path, reference: Mapping[str, Any], checked: bool = True):
        self.folder, self.reference = folder, reference
        files = [_read(f, reference, checked) for f in sorted(folder.glob("*.safetensors"))]
        keys = [np.ascontiguousarray(k).view(KEY).reshape(-1) for k, *_ in files]
        self.tokenizers = {t for *_, t in files} - {""}
        self._values = np.concatenate([np.empty(0, np.float32), *(v for _, _, v, _ in files)])
        ends, at = [np.zeros(1, np.int64)], 0
        for _, e, v, _ in files:
            ends.append(e + at)
            at += len(v)
        self._ends, every = np.concatenate(ends), np.concatenate([np.empty(0, KEY), *keys])
        # The first of two files that hold a document counts: on every rank, and when resumed.
        self._keys, self._at = np.unique(every, return_index=True)

    def __len__(self) -> int:
        return len(self._keys)

    def _place(self, key: bytes) -> int | None:
        i = int(np.searchsorted(self._keys, np.array(key, KEY)))
        there = i < len(self._keys) and self._keys[i].ljust(32, b"\0") == key
        return int(self._at[i]) if there else None

    def __contains__(self, key: bytes) -> bool:
        return self._place(key) is not None

    def __getitem__(self, key: bytes) -> np.ndarray:
        """float32 [labels]. Raises ValueError for a document that no file holds."""
        at = self._place(key)
        if at is None:
            raise ValueError(
                f"{self.folder} holds no log-probabilities of the document with the SHA-256 "
                f"{key.hex()} under the reference {self.reference}"
            )
        return self._values[self._ends[at] : self._ends[at + 1]]


def documents(
    ids: np.ndarray, labels: np.ndarray, ends: Iterable[int], shared: Iterable[int] | None = None
) -> Iterator[tuple[slice, np.ndarray, bytes]]:
    """Where in a packed row each document with labels is, which of its tokens have one, and its
    key.

    ids, labels: [T].   ends: ends of documents, from 0 on.
    shared: how many first tokens each document has from the nearest one before it that has none.
    The row does not repeat them; they are in the key, since an answer's log-probabilities are those
    after its prompt.
    """
    first, *rest = ends
    whole = slice(first, first)
    for end, n in zip(rest, [0] * len(rest) if shared is None else shared, strict=True):
        span, first = slice(first, end), end
        whole = whole if n else span
        learned = labels[span] >= 0
        if learned.any():
            prompt = ids[whole][:n]
            key = key_of(
                np.concatenate((prompt, ids[span])),
                np.concatenate((np.full_like(prompt, IGNORE), labels[span])),
            )
            yield span, learned, key
