"""The data of a forward or backward pass: documents of tokens, and inputs of the loss beside them.

They come one by one, in protobuf or JSON, and are held as a few arrays from then on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from tilewright.server.frames import Arrays
from tilewright.server.refused import Refused

INPUT = "input."  # before the names of inputs among the arrays
TOKENS, LENGTHS = "tokens", "lengths"
ROUTES = "routed_experts"  # recorded of each token, among arrays: int16 [tokens, width]
# dtype of the wire -> numpy's, and by how many bytes an element is stored.
DTYPES = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8"), "int32": np.dtype("<i4")}
MOST_ELEMENTS = 1 << 26  # of an array of a request, 8 bytes each


class Room:
    """How many numbers the sparse tensors of a request may stand for: a request is not for more
    memory than it is large, by far.
    """

    def __init__(self, size: int):
        self._left = 4 * size + (1 << 22)

    def take(self, count: int, at: str) -> None:
        """Raises Refused."""
        self._left -= count
        if self._left < 0:
            raise Refused(
                422, f"{at}: the sparse tensors of the request are too large for its bytes"
            )


class Datum(NamedTuple):
    """One document. inputs: by name, arrays of float32 or int64, [tokens] or [tokens, k]."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


class Data(NamedTuple):
    """Documents, one after the other.

    tokens: int64 [sum of lengths].   lengths: int64 [documents].
    inputs: by name, [sum of lengths] or [sum of lengths, k].
    """

    tokens: np.ndarray
    lengths: np.ndarray
    inputs: Arrays

    @classmethod
    def joined(cls, each: Sequence[Datum]) -> Data:
        """Raises Refused where they do not have the same inputs, of the same widths."""
        names = [*each[0].inputs]
        for i, datum in enumerate(each):
            if {*datum.inputs} != {*names}:
                odd = sorted({*datum.inputs} ^ {*names})[0]
                raise Refused(
                    422,
                    f"datum {i}: loss_fn_inputs has {', '.join(sorted(datum.inputs))}, and datum 0 "
                    f"{', '.join(sorted(names))}: all data of a request have the same ({odd})",
                )
            for name, array in datum.inputs.items():
                if array.ndim not in (1, 2) or len(array) != len(datum.tokens):
                    raise Refused(
                        422,
                        f"datum {i}: {name} has the shape {[*array.shape]}, and model_input "
                        f"{len(datum.tokens)} tokens",
                    )
        columns = {name: [datum.inputs[name] for datum in each] for name in names}
        lengths = np.array([len(datum.tokens) for datum in each], np.int64)
        tokens = np.concatenate([datum.tokens for datum in each])
        return cls(tokens, lengths, {n: _stacked(n, rows) for n, rows in columns.items()})

    def arrays(self) -> Arrays:
        own = {TOKENS: self.tokens, LENGTHS: self.lengths}
        return own | {f"{INPUT}{name}": array for name, array in self.inputs.items()}

    @classmethod
    def of(cls, arrays: Arrays) -> Data:
        """From what `arrays` has given."""
        inputs = {n.removeprefix(INPUT): a for n, a in arrays.items() if n.startswith(INPUT)}
        return cls(arrays[TOKENS], arrays[LENGTHS], inputs)

    @property
    def trained(self) -> int:
        """How many tokens are trained on: those whose weight, if they have one, is not 0."""
        weights = self.inputs.get("weights")
        if weights is None:
            return len(self.tokens)
        return int((weights != 0).reshape(len(weights), -1).any(1).sum())

    @property
    def starts(self) -> np.ndarray:
        """Where each document begins, and the end of the last."""
        return np.concatenate(([0], np.cumsum(self.lengths)))


def _stacked(name: str, rows: list[np.ndarray]) -> np.ndarray:
    """The rows of all documents. Those with fewer columns get more: token -1 with weight 0."""
    width = max(row.shape[1] if row.ndim == 2 else 0 for row in rows)
    if not width:
        return np.concatenate(rows)
    if width * sum(map(len, rows)) > MOST_ELEMENTS:
        raise Refused(422, f"{name}: {width} a token are more than {MOST_ELEMENTS} numbers in all")
    fill = -1 if rows[0].dtype.kind == "i" else 0
    wide = []
    for i, row in enumerate(rows):
        if row.ndim != 2:
            raise Refused(422, f"datum {i}: {name} has one number a token, and others {width}")
        wide.append(np.pad(row, ((0, 0), (0, width - row.shape[1])), constant_values=fill))
    return np.concatenate(wide)


# ---- from the wire


def elements(shape: Iterable[int], at: str) -> int:
    """The number of elements of a shape. Raises Refused for one that cannot be."""
    sizes = [*shape]
    if any(type(n) is not int or n < 0 for n in sizes) or math.prod(sizes) > MOST_ELEMENTS:
        raise Refused(
            422, f"{at}: its shape is {sizes}; accepted are up to {MOST_ELEMENTS} numbers"
        )
    return math.prod(sizes)


def from_bytes(data: bytes, dtype: np.dtype, shape: Sequence[int], at: str) -> np.ndarray:
    """An array of the wire, as float32 or int64. shape: () of one whose length its bytes say."""
    count, rest = divmod(len(data), dtype.itemsize)
    shape = [*shape] or [count]
    if rest or elements(shape, at) != count:
        raise Refused(
            422, f"{at}: it has {len(data)} bytes, and {[*shape]} of {dtype.name} are "
            f"{elements(shape, at) * dtype.itemsize}"
        )  # fmt: skip
    array = np.frombuffer(data, dtype).reshape(shape)
    return array.astype(np.float32 if dtype.kind == "f" else np.int64)


def from_bfloat16(data: bytes, shape: Sequence[int], at: str) -> np.ndarray:
    """The same of bfloat16, of which numpy has none: the upper half of float32."""
    half = from_bytes(data, np.dtype("<u2"), shape, at)
    return (half.astype(np.uint32) << 16).view(np.float32)


def from_csr(
    values: np.ndarray,
    rows: np.ndarray,
    columns: np.ndarray,
    shape: Sequence[int],
    at: str,
    room: Room,
) -> np.ndarray:
    """A sparse matrix [tokens, k], whose entries that are not listed are 0, or of integers -1."""
    if len(shape) != 2:
        raise Refused(422, f"{at}: a sparse tensor has two dimensions, and this one {len(shape)}")
    room.take(elements(shape, at), at)
    counts = np.diff(rows)
    fits = len(rows) == shape[0] + 1 and len(values) == len(columns)
    if not fits or rows[0] != 0 or rows[-1] != len(values) or (counts < 0).any():
        raise Refused(422, f"{at}: its row pointers do not fit {shape[0]} rows")
    if ((columns < 0) | (columns >= shape[1])).any():
        raise Refused(422, f"{at}: a column is outside of its shape {[*shape]}")
    fill = -1 if values.dtype.kind == "i" else 0
    dense = np.full(shape, fill, values.dtype)
    dense[cells(rows, columns)] = values
    return dense


def cells(rows: ArrayLike, columns: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """The index of the entries of a sparse matrix, by its row pointers and columns."""
    counts = np.diff(rows)
    return np.repeat(np.arange(len(counts)), counts), np.asarray(columns)


def twice(ids: np.ndarray) -> np.ndarray:
    """Which rows of tokens [n, k] have one twice; -1 is none."""
    ordered = np.sort(ids, -1)
    return ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(-1)


def from_json(given: Any, at: str, room: Room) -> np.ndarray:
    """A tensor of the JSON dialects: a list of numbers, or {data, dtype, shape}."""
    shape: Any = None
    dtype = None
    if isinstance(given, Mapping):
        dtype, shape = given.get("dtype"), given.get("shape")
        if shape is not None and not isinstance(shape, list):
            raise Refused(422, f"{at}: its shape must be a list of integers, got {shape!r:.80}")
        if given.get("sparse_crow_indices") is not None:
            parts = (given.get(n) for n in ("sparse_crow_indices", "sparse_col_indices"))
            rows, columns = (from_json({"data": p, "dtype": "int64"}, at, room) for p in parts)
            values = from_json({"data": given.get("data"), "dtype": dtype}, at, room)
            return from_csr(values, rows, columns, shape or (), at, room)
        if dtype not in (None, *DTYPES):
            raise Refused(422, f"{at}: dtype is {dtype!r}; accepted are {', '.join(DTYPES)}")
        given = given.get("data")
    if not isinstance(given, list):
        raise Refused(422, f"{at}: it must be a list of numbers, or have `data` and `dtype`")
    try:
        array = np.array(given)
    except ValueError as error:
        raise Refused(422, f"{at}: its lists are not of one length") from error
    if not array.size:
        array = array.astype(np.float32)
    if array.dtype.kind not in "iuf":
        raise Refused(422, f"{at}: it holds {array.dtype.name}; accepted are numbers")
    wanted = DTYPES[dtype] if dtype else np.dtype("f4" if array.dtype.kind == "f" else "i8")
    if wanted.kind == "i" and array.dtype.kind == "f" and (array != np.trunc(array)).any():
        raise Refused(422, f"{at}: it holds fractions; accepted are integers")
    array = array.astype(np.float32 if wanted.kind == "f" else np.int64)
    if shape is not None:
        if elements(shape, at) != array.size:
            raise Refused(422, f"{at}: it has {array.size} numbers, and its shape is {shape}")
        array = array.reshape(shape)
    return array


# ---- what is accepted


def check(data: Data, vocabulary: int, longest: int) -> None:
    """Raises Refused for the first datum that cannot be computed.

    longest: how many tokens a document may have.
    """
    starts = data.starts
    for what, wrong in (
        ("has no tokens", data.lengths == 0),
        (
            f"is longer than the {longest} tokens of sample_packing_sequence_len",
            data.lengths > longest,
        ),
    ):
        if wrong.any():
            i = int(wrong.argmax())
            raise Refused(400, f"datum {i}: model_input {what}, it has {data.lengths[i]}")
    _within("model_input", data.tokens, 0, vocabulary, starts)
    for name, array in data.inputs.items():
        if array.dtype.kind == "f" and not (fine := np.isfinite(array)).all():
            at = int((~fine).reshape(len(array), -1).any(1).argmax())
            raise Refused(400, f"{_place(at, starts)}: {name} is {array[at]}, which is not finite")


def check_targets(name: str, targets: np.ndarray, vocabulary: int, starts: np.ndarray) -> None:
    """Raises Refused for a target that is no token; -1 stands for none among several."""
    _within(name, targets, -1 if targets.ndim == 2 else 0, vocabulary, starts)


def _within(name: str, ids: np.ndarray, least: int, vocabulary: int, starts: np.ndarray) -> None:
    wrong = (ids < least) | (ids >= vocabulary)
    if wrong.any():
        at = int(wrong.reshape(len(ids), -1).any(1).argmax())
        raise Refused(
            400, f"{_place(at, starts)}: {name} is {ids[at]}; accepted are tokens from {least} to "
            f"{vocabulary - 1}"
        )  # fmt: skip


def _place(at: int, starts: np.ndarray) -> str:
    datum = int(np.searchsorted(starts, at, "right")) - 1
    return f"datum {datum}, token {at - starts[datum]}"
