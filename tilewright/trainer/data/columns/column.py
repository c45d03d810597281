"""What documents have beside their tokens and labels: columns by name, each with its own rules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute

from tilewright.trainer.data.nested import is_nested, nested
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.tables import Table

pc: Any = pyarrow.compute  # which makes its functions when it is imported


@dataclass(frozen=True)
class Column:
    """A row of COLUMNS.

    No batch is sent between processes: stages of a pipeline, and ranks that share a sequence or
    matrices, each read the bins of their data-parallel rank, with all columns.

    each: "token" for numbers of every token: rows have a list as long as `input_ids`, of numbers or
        of lists of `width`, or one number that stands for all of them; files have them one after
        the other; batches have [1, T], or [1, T, width], cut, padded and sharded over
        context-parallel ranks as the tokens are. "document" for one value: batches have
        [documents], the same on all context-parallel ranks.
    dtype: numpy's name, in files and in batches; "str" is in files alone.
    fill: where a batch is padded, and of documents of no tokens to train on.
    default: where the rows of a data set have no such column; None: they must.
    target: the number belongs to the prediction of a token, as its label does: a batch has at t
        that of the token that follows t in the same document, and `fill` at the document's end.
    together: consecutive documents of one value are one unit of packing: always in one bin.
    instructs: it says what is learned, or how: a loss that does not read it refuses data that have
        it.
    least, most: the values that are accepted.
    width: numbers per token; None: one.
    among: numbers of tokens [n, width] -> which tokens' do not fit each other [n], and why.
    reader: (a row's value, tokens) -> array [tokens, width], for a column of another form. Raises
        TypeError or ValueError.
    checker: the same for the column of a prepared set: (its values, input_ids) -> raises ValueError
        for the first sample that `reader` would not have written.
    depends: what `reader` depends on, in JSON: prepared sets of another value are not used.
    of_model: the shape of a model -> the column as that model reads it.
    asked_by: the setting that needs it, in errors.
    part: what a run is made of that it holds, by the name that checkpoints have for it.
    """

    each: Literal["token", "document"]
    dtype: str
    fill: float = 0
    default: float | str | None = None
    target: bool = False
    together: bool = False
    instructs: bool = False
    least: float = -math.inf
    most: float = math.inf
    width: int | None = None
    among: Callable[[np.ndarray], tuple[np.ndarray, str]] | None = None
    reader: Callable[[Any, int], np.ndarray] | None = None
    checker: Callable[[pa.ChunkedArray, pa.ChunkedArray], None] | None = None
    depends: Any = None
    of_model: Callable[[ModelConfig], Column] | None = None
    asked_by: str = ""
    part: str = "data"

    def of(self, shape: ModelConfig, asked_by: str, width: int | None = None) -> Column:
        """The column as a model reads it.   width: where a loss decides on it."""
        column = self if self.of_model is None else self.of_model(shape)
        if width is not None:
            column = dataclasses.replace(column, width=width, depends={"width": width})
        return dataclasses.replace(column, asked_by=asked_by)

    @property
    def batched(self) -> bool:
        """Whether batches have it."""
        return self.dtype != "str"

    @property
    def type(self) -> pa.DataType:
        """The column's type in files of samples."""
        if not self.batched:
            return pa.string()
        one = pa.from_numpy_dtype(np.dtype(self.dtype))
        return pa.list_(one) if self.each == "token" else one

    def read(self, given: Any, tokens: int) -> Any:
        """A row's value for a document: an array [tokens], or [tokens, width], or one value.

        given: lists as Python's or Arrow's.   tokens: how many the row has.
        Raises TypeError or ValueError.
        """
        if self.reader is not None:
            return self.reader(given, tokens)
        if given is None:
            if self.default is None:
                raise ValueError("it is missing" + (f" ({self.asked_by})" if self.asked_by else ""))
            given = self.default
        if not self.batched:
            if isinstance(given, bool | float) or not isinstance(given, str | int):
                raise TypeError(f"it must be a string or an integer, got {given!r:.80}")
            return str(given)
        listed = isinstance(given, list | tuple | np.ndarray | pa.Array)
        if self.width is not None:
            return self._wide(given if listed else [given], tokens, self.width)
        if self.each == "document":
            return self._numbers([given] if not listed else given, 1)[0]
        if not listed:
            return np.repeat(self._numbers([given], 1), tokens)
        return self._numbers(given, tokens)

    def _numbers(self, given: Any, count: int) -> np.ndarray:
        if isinstance(given, pa.Array):
            given = given.to_pylist()
        if len(given) != count:
            raise ValueError(
                f"it has {len(given)} values, and the row {count} tokens"
                if self.each == "token"
                else "it must be one number, got a list"
            )
        wanted = np.dtype(self.dtype)
        accepted = int if wanted.kind in "iu" else (int, float)
        for i, value in enumerate(given):
            if isinstance(value, bool) or not isinstance(value, accepted):
                kind = "an integer" if accepted is int else "a number"
                raise TypeError(f"{self._at(i)} must be {kind}, got {value!r:.80}")
            if accepted is int and abs(value) > np.iinfo(wanted).max:
                raise ValueError(f"{self._at(i)} is {value}: accepted are integers of {wanted}")
            if not (math.isfinite(value) and self.least <= value <= self.most):
                raise ValueError(f"{self._at(i)} is {value}: {self._range()}")
        return np.array(given, wanted)

    def _wide(self, given: Any, tokens: int, width: int) -> np.ndarray:
        if is_nested(given):
            values = nested(given, "its numbers")
        else:
            values = np.asarray(given)
        if values.shape != (tokens, width):
            raise ValueError(
                f"it has the shape {[*values.shape]}; accepted is [{tokens}, {width}], the row's "
                f"tokens and {self.asked_by}"
            )
        wanted, flat = np.dtype(self.dtype), values.reshape(-1)
        if values.dtype.kind not in "iuf":
            raise TypeError(f"it holds {values.dtype}; accepted are numbers")
        if wanted.kind in "iu" and (broken := flat != np.trunc(flat)).any():
            # One such number suffices for a file's reader to make the column one of floats.
            i = int(broken.argmax())
            raise TypeError(f"token {i // width + 1}: {flat[i]}: accepted are integers")
        self._check_values(flat, lambda i: f"token {i // width + 1}")
        return values.astype(wanted)

    def _check_values(self, numbers: np.ndarray, at: Callable[[int], str]) -> None:
        """Raises ValueError for the first that does not fit.   at: says where it is."""
        fits = np.isfinite(numbers) & (numbers >= self.least) & (numbers <= self.most)
        if not fits.all():
            i = int((~fits).argmax())
            raise ValueError(f"{at(i)}: {numbers[i]}: {self._range()}")
        if self.width is not None and self.among is not None:
            wrong, why = self.among(numbers.reshape(-1, self.width))
            if wrong.any():
                raise ValueError(f"{at(int(wrong.argmax()) * self.width)}: {why}")

    def _at(self, i: int) -> str:
        return f"the value of token {i + 1}" if self.each == "token" else "it"

    def _range(self) -> str:
        if self.least == -math.inf and self.most == math.inf:
            return "accepted are finite numbers"
        if self.most == math.inf:
            return f"accepted are {self.least:g} and more"
        if self.least == -math.inf:
            return f"accepted are {self.most:g} and less"
        return f"accepted are {self.least:g} to {self.most:g}"

    def check(self, column: pa.ChunkedArray, tokens: pa.ChunkedArray) -> None:
        """Raises ValueError for the first sample of a prepared set whose value is not such.

        column: the values of all samples.   tokens: their input_ids.
        """
        if self.checker is not None:
            self.checker(column, tokens)
        elif column.type != self.type:
            raise ValueError(f"it holds {column.type}; accepted is {self.type}")
        elif self.batched:
            self._check_numbers(column, tokens)

    def _check_numbers(self, column: pa.ChunkedArray, tokens: pa.ChunkedArray) -> None:
        flat, of_sample = column, np.arange(len(column))
        if self.each == "token":
            lengths, wanted = (
                pc.fill_null(pc.list_value_length(c), -1).to_numpy() for c in (column, tokens)
            )
            wanted = wanted * (self.width or 1)
            if len(wrong := (lengths != wanted).nonzero()[0]):
                i = wrong[0]
                raise ValueError(
                    f"sample {i} has {lengths[i]} values; accepted are {wanted[i]}, "
                    f"{self.width or 'one'} per token"
                )
            flat, of_sample = pc.list_flatten(column), np.repeat(of_sample, lengths)
        # A null is NaN.
        self._check_values(flat.to_numpy(), lambda i: f"sample {of_sample[i]}")

    def said(self, name: str, error: Exception) -> str:
        """An error of `read` or `check`, in which functions of a column name it themselves."""
        return f"{name}: {error}" if self.reader is None else str(error)

    def filled(self, tokens: int) -> Any:
        """The value for a document of `tokens` tokens from which nothing is learned."""
        if self.each == "document":
            return np.dtype(self.dtype).type(self.fill) if self.batched else ""
        shape = (tokens,) if self.width is None else (tokens, self.width)
        return np.full(shape, self.fill, self.dtype)

    def shaped(self, value: Any) -> Any:
        """A value as it is read from a file of samples."""
        return value if self.width is None else value.reshape(-1, self.width)

    def plain(self) -> Column:
        """A copy for other processes, without functions."""
        return dataclasses.replace(self, among=None, reader=None, checker=None, of_model=None)

    def cut(self, value: Any, tokens: int) -> Any:
        return value[:tokens] if self.each == "token" else value

    def shifted(self, value: np.ndarray) -> np.ndarray:
        """As a batch has it, of a column of tokens."""
        return np.concatenate((value[1:], self.filled(1))) if self.target else value


COLUMNS = Table("columns", "tilewright.trainer.data.columns", Column)
