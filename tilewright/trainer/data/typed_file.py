"""Files that declare the types of their columns: Parquet, Arrow, and sets of the datasets package.
Each is read by its own types, and only in the columns that are asked for.

An Arrow struct has the keys of all rows, so that a null of it may be none of the row's own: keys
that are null are left out. Columns of JSON text (`datasets.Json`) say themselves what is null.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from tilewright.trainer.data import rows
from tilewright.trainer.data.defects import Defect
from tilewright.trainer.data.nested import is_list
from tilewright.trainer.data.types.dataset_type import Refused


class _Typed(rows.File):
    """What both kinds share."""

    _kept: tuple[Any, tuple[Any, int]] | None = None  # columns, and what `_of` made of them

    def _of(self, names: list[str]) -> tuple[Any, int]:
        """What slices of rows are tables of, with these columns, and its bytes."""
        raise NotImplementedError

    def _table(self, columns: tuple[str, ...] | None) -> tuple[Any, int]:
        """The same with those of its columns that are asked for, which it keeps."""
        if self._kept is None or self._kept[0] != columns:
            names = [n for n in self.names if columns is None or n in columns]
            self._kept = columns, self._of(names)
        return self._kept[1]

    def parts(self, first: int, stop: int, asking: rows.Asking) -> Iterator[tuple[int, int]]:
        if first < stop:
            mean = max(1, self._table(asking.columns)[1] // len(self))
            step = max(1, min(rows.MOST_ROWS, rows.PIECE // mean))
            for at in range(first, stop, step):
                yield at, min(at + step, stop)

    def read(self, first: int, stop: int, asking: rows.Asking) -> Iterator[rows.Row]:
        if asking.columns is not None and not {*self.names} & {*asking.columns}:
            yield from (asking.of({}) for _ in range(first, stop))
            return
        table = self._table(asking.columns)[0][first:stop]
        try:
            read: list[rows.Row] = [asking.of(row) for row in _rows(table, asking.arrow)]
        except UnicodeDecodeError as error:
            if stop - first == 1:
                at = error.start + 1
                yield Refused(f"it is not UTF-8: {error.reason} at byte {at} of a text")
                return
            read = [row for i in range(first, stop) for row in self.read(i, i + 1, asking)]
        yield from read


def _rows(table: pa.Table, arrow: bool) -> Iterator[dict[str, Any]]:
    columns = {}
    for name in table.column_names:
        column, own = table.column(name), _own(table.schema.field(name).type)
        if arrow:  # a list as an array; a string has no values
            columns[name] = [
                c.values if isinstance(c, pa.ListScalar) else c.as_py() for c in column
            ]
        else:
            columns[name] = column.to_pylist() if own is None else [*map(own, column.to_pylist())]
    for i in range(table.num_rows):
        yield {name: values[i] for name, values in columns.items()}


def _own(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """A function that takes a value of this type, as Python has it, to what its row holds: JSON is
    parsed, and fields that are null are left out. None: the row holds the value as it is.
    """
    if isinstance(kind, pa.JsonType):
        return lambda text: None if text is None else json.loads(text)
    if isinstance(kind, pa.BaseExtensionType):
        return _own(kind.storage_type)
    if pa.types.is_struct(kind):
        fields = {kind.field(i).name: _own(kind.field(i).type) for i in range(kind.num_fields)}
        return lambda given: (
            given
            and {
                k: v if (own := fields[k]) is None else own(v)
                for k, v in given.items()
                if v is not None
            }
        )
    if is_list(kind) and (inner := _own(kind.value_type)) is not None:
        return lambda given: given and [*map(inner, given)]
    return None


def _features(schema: pa.Schema) -> dict[str, Any]:
    """None for a column whose type the datasets package does not know."""
    import datasets

    features = {}
    for field in schema:
        try:
            own = datasets.Features.from_arrow_schema(pa.schema([field], schema.metadata))
            features[field.name] = own[field.name]
        except (ValueError, TypeError, KeyError, NotImplementedError):
            features[field.name] = None
    return features


class SetFile(_Typed):
    """A set of the datasets package."""

    def __init__(self, loaded: Any, shown: str):
        self.dataset, self.shown = loaded, shown
        self.nbytes = loaded.data.nbytes * len(loaded) // max(1, loaded.data.num_rows)

    def __len__(self) -> int:
        return len(self.dataset)

    @functools.cached_property
    def names(self) -> list[str]:
        return [*self.dataset.column_names]

    @functools.cached_property
    def features(self) -> Mapping[str, Any]:
        return {**self.dataset.features}

    def _of(self, names: list[str]) -> tuple[Any, int]:
        selected = self.dataset.select_columns(names).with_format("arrow")
        return selected, selected.data.nbytes


class TypedFile(_Typed):
    """A file of Parquet or Arrow. What is read of it is first written as plain Arrow to a file
    without a name, which processes share: a part of a row group cannot be read alone.
    """

    def __init__(self, path: str, shown: str | None = None):
        self.path, self.shown = path, shown or path
        self.nbytes = os.path.getsize(path)
        try:
            self.schema, self._count = self._opened()
        except Exception as error:  # readers' exceptions have no common base
            raise ValueError(f"{self.shown}: {Defect('', error)}") from error

    def _opened(self) -> tuple[pa.Schema, int]:
        """The schema, and the number of rows."""
        raise NotImplementedError

    def _batches(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        """All rows, of these columns."""
        raise NotImplementedError

    @functools.cached_property
    def names(self) -> list[str]:
        return [*dict.fromkeys(self.schema.names)]

    @functools.cached_property
    def features(self) -> Mapping[str, Any]:
        return _features(self.schema)

    def __len__(self) -> int:
        return self._count

    def _of(self, names: list[str]) -> tuple[Any, int]:
        from datasets import config

        schema = pa.schema([self.schema.field(n) for n in names])
        folder = config.HF_DATASETS_CACHE
        os.makedirs(folder, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".arrow") as aside:
            with pa.OSFile(aside.name, "wb") as out, pa.ipc.new_stream(out, schema) as stream:
                for batch in self._named(self._batches(names)):
                    stream.write_batch(batch)
            table = pa.ipc.open_stream(pa.memory_map(aside.name)).read_all()
        return table, table.nbytes

    def _named(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Raises ValueError, with the row, where reading them fails."""
        row = 0
        try:
            for batch in batches:
                yield batch
                row += batch.num_rows
        except Exception as error:  # readers' exceptions have no common base
            raise ValueError(f"{self.shown}: {Defect(f'from row {row + 1} on', error)}") from error


class ParquetFile(TypedFile):
    def _opened(self) -> tuple[pa.Schema, int]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path) as file:
            return file.schema_arrow, file.metadata.num_rows

    def _batches(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path, memory_map=True, pre_buffer=False) as file:
            groups = (file.metadata.row_group(i) for i in range(file.num_row_groups))
            mean = sum(g.total_byte_size for g in groups) // max(1, len(self))
            step = max(1, min(rows.MOST_ROWS, 8 * rows.PIECE // max(1, mean)))
            yield from file.iter_batches(step, columns=names)


class ArrowFile(TypedFile):
    def _opened(self) -> tuple[pa.Schema, int]:
        batches, count = self._stored(), 0
        schema = next(batches)
        try:
            for batch in batches:
                count += batch.num_rows
        except Exception as error:  # readers' exceptions have no common base
            raise Defect(f"from row {count + 1} on", error) from error
        return schema, count

    def _stored(self) -> Iterator[Any]:
        """The schema, then the batches."""
        with pa.memory_map(self.path) as file:
            try:
                stream = pa.ipc.open_stream(file)
            except pa.ArrowInvalid:  # Arrow's file format
                file.seek(0)
                reader = pa.ipc.open_file(file)
                yield reader.schema
                for i in range(reader.num_record_batches):
                    yield reader.get_batch(i)
                return
            yield stream.schema
            yield from stream

    def _batches(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        batches = self._stored()
        next(batches)  # the schema
        for batch in batches:
            batch = batch.select(names)
            try:  # Arrow would read where a damaged file's offsets point
                batch.validate(full=True)
            except pa.ArrowInvalid as error:
                if "UTF8" not in str(error):  # which is the row's own matter
                    raise
            yield batch
