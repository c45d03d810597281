"""The protocol's messages in protobuf, written and read by the numbers of their fields."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
NUMBERS = {np.dtype("<f4"): FLOAT32, np.dtype("<i8"): INT64, np.dtype("<i4"): INT32}
VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5  # wire types
BLOCK = 1 << 17  # the largest of zstd


# ---- fields


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1  # a negative one has 64 bits
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def field(number: int, value: bytes | str | int | float) -> bytes:
    """A float is a double, and bytes may be a message."""
    if isinstance(value, int):
        return varint(number << 3 | VARINT) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | EIGHT) + struct.pack("<d", value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | BYTES) + varint(len(data)) + data


def entry(number: int, name: str, value: bytes | float) -> bytes:
    """One entry of a map."""
    return field(number, field(1, name) + field(2, value))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The number and value of each field: an int, a double, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == VARINT:
            value, at = _varint(data, at)
        elif kind == EIGHT:
            [value], at = struct.unpack_from("<d", data, at), at + 8
        elif kind == BYTES:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
            assert len(value) == size, "the message is cut"
        else:
            assert kind == FOUR, f"wire type {kind}"
            value, at = data[at : at + 4], at + 4
        yield key >> 3, value


def message(data: bytes) -> dict[int, list[Any]]:
    """The values of each field, by number."""
    values: dict[int, list[Any]] = {}
    for number, value in fields(data):
        values.setdefault(number, []).append(value)
    return values


def mapping(entries: Sequence[bytes], default: Any = b"") -> dict[str, Any]:
    """A map. default: the value of an entry that has none, which is 0 of its type."""
    pairs = [message(one) for one in entries]
    return {pair[1][0].decode(): pair.get(2, [default])[0] for pair in pairs}


# ---- requests


class Tensor(NamedTuple):
    """An input of a loss. encoded: the bytes of `dense` or of `sparse_csr`, with their field."""

    encoded: bytes
    dtype: int
    shape: tuple[int, ...]


def little(array: Any) -> np.ndarray:
    """float32, int64 or int32, little-endian."""
    array = np.asarray(array)
    plain = array.dtype.newbyteorder("<")
    kind = plain if plain in NUMBERS else np.dtype("<f4" if array.dtype.kind == "f" else "<i8")
    return np.ascontiguousarray(array, kind)


def dense(array: Any) -> Tensor:
    array = little(array)
    return Tensor(field(1, array.tobytes()), NUMBERS[array.dtype], array.shape)


def bfloat16(array: Any) -> Tensor:
    """The upper halves of numbers that bfloat16 has."""
    halves = (np.ascontiguousarray(array, "<f4").view("<u4") >> 16).astype("<u2")
    return Tensor(field(1, halves.tobytes()), BFLOAT16, halves.shape)


def sparse(rows: Sequence[Sequence[Any]], width: int, dtype: str) -> Tensor:
    """The first entries of each row."""
    values = np.array([value for row in rows for value in row], dtype)
    starts = np.cumsum([0, *map(len, rows)]).astype("<i8")
    columns = np.array([i for row in rows for i in range(len(row))], "<i8")
    parts = (values.tobytes(), starts.tobytes(), columns.tobytes())
    csr = b"".join(field(i + 1, part) for i, part in enumerate(parts))
    return Tensor(field(2, csr), NUMBERS[values.dtype], (len(rows), width))


def tensor(given: Any) -> bytes:
    own = given if isinstance(given, Tensor) else dense(given)
    shape = b"".join(varint(n) for n in own.shape)
    return own.encoded + field(3, own.dtype) + field(4, shape)


Datum = tuple[Any, Mapping[str, Any]]  # tokens, and the loss's inputs by name


def datum(tokens: Any, inputs: Mapping[str, Any], chunk: int = 1) -> bytes:
    """chunk: 1, text; 2 and 3, which servers refuse, images and sound."""
    text = field(1, np.asarray(tokens, "<i4").tobytes())
    encoded = b"".join(entry(2, name, tensor(value)) for name, value in inputs.items())
    return field(1, field(chunk, text)) + encoded


def request(
    model: str,
    seq: int,
    data: Sequence[Datum | bytes],
    loss: str = "cross_entropy",
    config: Mapping[str, float] | None = None,
    *,
    newer: bool = True,
    forward: bool = False,
) -> bytes:
    """A ForwardBackwardRequest. newer: the loss's options are in loss_fn_config_v2."""
    each = [one if isinstance(one, bytes) else datum(*one) for one in data]
    options = [
        entry(7, name, field(1, float(value))) if newer else entry(5, name, float(value))
        for name, value in (config or {}).items()
    ]
    return b"".join(
        (
            field(1, model),
            field(2, seq),
            *(field(3, one) for one in each),
            field(4, loss),
            *options,
            field(6, 1) if forward else b"",
        )
    )


# ---- results


class Passed(NamedTuple):
    """The result of a pass. fields: by name, an array for each datum."""

    metrics: dict[str, float]
    fields: dict[str, list[np.ndarray]]

    @property
    def logprobs(self) -> list[np.ndarray]:
        return self.fields["logprobs"]

    @property
    def loss(self) -> float:
        return self.metrics["loss:sum"]

    def bits(self) -> Any:
        """What is equal where each bit is."""
        own = {n: [(a.shape, a.tobytes()) for a in each] for n, each in self.fields.items()}
        return self.metrics, own


def passed(data: bytes) -> Passed:
    """A ForwardBackwardOutput."""
    output = message(data)
    records = [message(record) for record in output.get(2, [])]
    columns: dict[str, list[np.ndarray]] = {}
    for record in records:
        count = record.get(3, [0])[0]
        for name, value in mapping(record.get(2, [])).items():
            own = batched(value)
            assert len(own) == count, f"{name}: {len(own)} parts of {count} data"
            columns.setdefault(name, []).extend(own)
    return Passed(mapping(output.get(3, []), 0.0), columns)


def batched(data: bytes) -> list[np.ndarray]:
    """The arrays of a BatchedTensor."""
    own = message(data)
    kind = {number: dtype for dtype, number in NUMBERS.items()}[own[3][0]]
    trailing = numbers(own.get(4, []))
    offsets = np.frombuffer(own[2][0], "<i8")
    whole = own.get(1, [b""])[0]
    parts = [np.frombuffer(whole[a:b], kind) for a, b in pairwise(offsets)]
    return [part.reshape(-1, *trailing) for part in parts]


def numbers(values: Sequence[Any]) -> list[int]:
    """A repeated field, packed or not."""
    each: list[int] = []
    for value in values:
        if isinstance(value, int):
            each.append(value)
            continue
        at = 0
        while at < len(value):
            number, at = _varint(value, at)
            each.append(number)
    return each


class Sampled(NamedTuple):
    """A SampleResponse. prompt: log-probabilities of the prompt's tokens.   topk: the most probable
    tokens of each, and theirs, [tokens, k].
    """

    tokens: list[np.ndarray]
    logprobs: list[np.ndarray]
    prompt: np.ndarray
    topk: tuple[np.ndarray, np.ndarray] | None


def sampled(data: bytes) -> Sampled:
    own = message(data)
    each = [message(one) for one in own.get(1, [])]
    topk = None
    if 3 in own:
        rows = message(own[3][0])
        shape = rows[4][0], rows[3][0]
        ids, logprobs = (np.frombuffer(rows[i][0], kind) for i, kind in ((1, "<i4"), (2, "<f4")))
        topk = ids.reshape(shape), logprobs.reshape(shape)
    return Sampled(
        [np.frombuffer(one[2][0], "<i4") for one in each],
        [np.frombuffer(one[3][0], "<f4") for one in each],
        np.frombuffer(own.get(2, [b""])[0], "<f4"),
        topk,
    )


# ---- zstd: frames of blocks that are stored, or of one byte many times


def stored(data: bytes) -> bytes:
    parts = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)] or [b""]
    return _frame(len(data), [(0, len(part), part) for part in parts])


def zeros(size: int) -> bytes:
    """A small frame of so many zeros."""
    sizes = [min(BLOCK, size - at) for at in range(0, size, BLOCK)]
    return _frame(size, [(1, n, b"\0") for n in sizes])


def _frame(size: int, blocks: list[tuple[int, int, bytes]]) -> bytes:
    """blocks: kind, size, content."""
    head = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", size)  # one segment, its size in 4 bytes
    last = len(blocks) - 1
    each = [
        (n << 3 | kind << 1 | (i == last)).to_bytes(3, "little") + content
        for i, (kind, n, content) in enumerate(blocks)
    ]
    return head + b"".join(each)
