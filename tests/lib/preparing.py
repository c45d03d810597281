"""What the trainer's tests of data share."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq

from tilewright.trainer.data.prepared import Agreed, prepare
from tilewright.trainer.data.types.dataset_type import Prompts


def prepare_of(config, tokenizer, vocab, entries=None, agreed=(), **options):
    """`prepare` with a configuration's values, of its training data if not of other entries."""
    entries = config.data.datasets if entries is None else entries
    model, seed, preference = config.model, config.train.seed, config.preference
    prompts = Prompts(preference.max_prompt_len, preference.truncation_mode)
    return prepare(
        entries,
        config.data,
        model,
        seed,
        tokenizer,
        vocab,
        prompts=prompts,
        agreed=Agreed(*agreed),
        **options,
    )


def write_rows(path, rows, schema=None):
    """Writes a file of rows in the format of its name: parquet and arrow with Arrow's types for
    them, or those of a schema.
    """
    names = [*dict.fromkeys(name for row in rows for name in row)]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows, schema), path)
    else:
        table = pa.Table.from_pylist(rows, schema)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    return path
