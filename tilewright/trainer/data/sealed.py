"""A folder whose files are known by their checksums, so that damage is found before it is read:
Arrow maps files into memory and trusts their offsets.
"""

from __future__ import annotations

import json
import pathlib
import zlib

SEAL = "checksums.json"
BLOCK = 1 << 24  # bytes that are read at a time


class Damaged(ValueError):
    """A folder is not as it was sealed."""


def _of_file(path: pathlib.Path) -> list[int]:
    """[size, CRC32]."""
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return [size, checksum]


def seal(folder: pathlib.Path) -> None:
    """Writes the sizes and checksums of a folder's files, and the checksum of that."""
    line = json.dumps({path.name: _of_file(path) for path in sorted(folder.iterdir())})
    (folder / SEAL).write_text(f"{line}\n{zlib.crc32(line.encode())}\n")


def names(folder: pathlib.Path) -> list[str]:
    """The sealed files. Raises Damaged."""
    return sorted(_sealed(folder))


def _sealed(folder: pathlib.Path) -> dict[str, list[int]]:
    try:
        line, _, checksum = (folder / SEAL).read_bytes().partition(b"\n")
        if checksum.strip() != str(zlib.crc32(line)).encode():
            raise ValueError("its own checksum is another")
        return json.loads(line)
    except (OSError, ValueError) as error:
        raise Damaged(f"{folder / SEAL}: cannot be read: {error}") from error


def check(folder: pathlib.Path) -> None:
    """Raises Damaged, with one sentence, if a sealed file is missing or has changed."""
    for name, wanted in _sealed(folder).items():
        try:
            stamp = _of_file(folder / name)
        except OSError as error:
            raise Damaged(f"{folder / name}: cannot be read: {error.strerror}") from error
        if stamp[0] != wanted[0]:
            raise Damaged(f"{folder / name}: has {stamp[0]} bytes, and had {wanted[0]}")
        if stamp != wanted:
            raise Damaged(f"{folder / name}: its contents have changed (CRC32)")
