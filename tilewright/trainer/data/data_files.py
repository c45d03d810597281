"""Digests of a data file and of its lines, by which two versions of it say where they differ."""

from __future__ import annotations

import functools
import hashlib
import pathlib
from typing import Any, NamedTuple

import xxhash

# Files of text lines; others are known as a whole.
OF_LINES = (".json", ".jsonl", ".csv", ".txt")
MOST = 256  # blocks of a file, an even number
PIECE = 1 << 20  # a longer line is read in pieces


class Digests(NamedTuple):
    """sha256: of the bytes.   lines: their number.   every: lines of a block, a power of 2; 0 where
    lines mean nothing.   blocks: 16 digits of each, separated by spaces.
    """

    sha256: str
    lines: int = 0
    every: int = 0
    blocks: str = ""

    def within(self, most: int) -> Digests:
        """The digests with at most so many blocks."""
        fewer = self
        while len(fewer.blocks.split()) > max(1, most):
            fewer = fewer.coarser()
        return fewer

    def coarser(self) -> Digests:
        """The digests with twice the lines in a block."""
        blocks = _pairs(self.blocks.split())
        return self._replace(every=2 * self.every, blocks=" ".join(blocks))


def _pairs(blocks: list[str]) -> list[str]:
    pairs = [blocks[i : i + 2] for i in range(0, len(blocks), 2)]
    return [p[0] if len(p) == 1 else xxhash.xxh3_64_hexdigest("".join(p).encode()) for p in pairs]


def digests(path: str) -> Digests:
    with open(path, "rb") as file:
        if pathlib.Path(path).suffix not in OF_LINES:
            return Digests(hashlib.file_digest(file, "sha256").hexdigest())
        whole, block, blocks, lines, every = hashlib.sha256(), xxhash.xxh3_64(), [], 0, 1
        piece = b""
        for piece in iter(functools.partial(file.readline, PIECE), b""):
            whole.update(piece)
            block.update(piece)
            if piece.endswith(b"\n"):
                lines += 1
                if lines % every == 0:
                    blocks.append(block.hexdigest())
                    block.reset()
                if len(blocks) == MOST:
                    blocks, every = _pairs(blocks), 2 * every
        rest = not piece.endswith(b"\n")
        if lines % every or (piece and rest):
            blocks.append(block.hexdigest())
    return Digests(whole.hexdigest(), lines + bool(piece and rest), every, " ".join(blocks))


def are_digests(files: Any) -> bool:
    """Whether `moved` can compare them."""
    kinds = {"file": str, "sha256": str, "lines": int, "every": int, "blocks": str}
    return isinstance(files, list) and all(
        isinstance(f, dict) and all(type(f.get(name)) is kind for name, kind in kinds.items())
        for f in files
    )


def moved(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    """What differs between the files of this run and those of another one: `Digests`, and their
    "file"s, in the order in which they are read.
    """
    pairs, alone, rest = [], [], list(theirs)
    for one in ours:
        name = pathlib.Path(one["file"]).name
        other = next((f for f in rest if pathlib.Path(f["file"]).name == name), None)
        if other is None:
            alone.append(one)
        else:
            pairs.append((one, other))
            rest.remove(other)
    if len(alone) == len(rest):  # renamed
        pairs += zip(alone, rest, strict=True)
        alone = rest = []
    changes = [f"{a['file']} {_where(a, b)}" for a, b in pairs if a["sha256"] != b["sha256"]]
    changes += [f"{one['file']} is not in that one" for one in alone]
    changes += [f"{one['file']} is not in this run" for one in rest]
    if changes:
        more = len(changes) - 1
        return changes[0] + (f" (and {more} more file{'s' if more > 1 else ''})" if more else "")
    if [f["sha256"] for f in ours] != [f["sha256"] for f in theirs]:
        return "the same files are read in another order"
    return "its files are the same, and prepared otherwise"


def _where(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The first lines that differ."""
    ours, theirs = (Digests(**{name: f[name] for name in Digests._fields}) for f in (one, other))
    if not (ours.every and theirs.every):
        return "differs"
    while ours.every != theirs.every:
        if ours.every < theirs.every:
            ours = ours.coarser()
        else:
            theirs = theirs.coarser()
    a, b = ours.blocks.split(), theirs.blocks.split()
    shorter = min(len(a), len(b))
    at = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    first, last = at * ours.every + 1, (at + 1) * ours.every
    if first > ours.lines:
        return f"ends before line {first}, where that one goes on"
    last = min(last, max(ours.lines, theirs.lines))
    return f"differs in line {first}" if first == last else f"differs in lines {first} to {last}"
