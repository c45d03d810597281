"""What a Parquet file of a teacher's rows says of how they were written."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.parquet as pq

from tilewright.trainer.data.fields import Dataset
from tilewright.trainer.data.sources import located

KEY = b"tilewright.teacher"


def with_temperature(schema: pa.Schema, temperature: float) -> pa.Schema:
    """The schema of a file of rows at a temperature."""
    return schema.with_metadata({KEY: json.dumps({"temperature": temperature})})


def check_temperature(entries: Iterable[Dataset], temperature: float) -> None:
    """Raises ValueError for a local file whose rows are at another temperature than a student's.
    Files of other programs do not say at which they are.
    """
    for entry in entries:
        files = [] if entry.path == "dummy" else located(entry)[1]
        for file in files:
            if "://" in file or pathlib.Path(file).suffix != ".parquet":
                continue
            try:
                said = (pq.read_schema(file).metadata or {}).get(KEY)
                theirs = None if said is None else json.loads(said)["temperature"]
            except (OSError, ValueError, KeyError, TypeError):  # who reads the rows says so
                continue
            if theirs is not None and theirs != temperature:
                raise ValueError(
                    f"distillation.temperature = {temperature}: {file} has a teacher's "
                    f"log-probabilities at {theirs}; set it to that, or write the rows at this one"
                )
