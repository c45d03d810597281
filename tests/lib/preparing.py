"""What the trainer's tests of data share."""

import contextlib
import csv
import functools
import http.server
import json
import threading

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from tilewright.trainer.config import Config
from tilewright.trainer.data.prepared import Agreed, prepare
from tilewright.trainer.data.types.dataset_type import Prompts

IN_ORDER = dict.fromkeys(("shuffle_merged_datasets", "shuffle_before_merging_datasets"), False)


def config_of(folder, *entries, test=(), model=None, train=None, **data):
    """A configuration of small bins, on random tokens if there are no entries. Those are paths, or
    have one; it is prepared in the folder, where its model is.
    """

    def listed(given):
        each = [e if isinstance(e, dict) else {"path": e} for e in given]
        return [{**e, "path": str(e["path"])} for e in each]

    usual = {
        "datasets": listed(entries or ["dummy"]),
        "test_datasets": listed(test),
        "dataset_prepared_path": str(folder / "prepared"),
        "sample_packing_sequence_len": 64,
    }
    return Config(
        model={"config_path": str(folder)} | (model or {}),
        data=usual | data,
        train={"output_dir": str(folder / "out")} | (train or {}),
    )


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
    path.parent.mkdir(parents=True, exist_ok=True)
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
    else:
        write_table(path, pa.Table.from_pylist(rows, schema))
    return path


def write_table(path, table, new=pa.ipc.new_stream):
    """Writes Parquet or Arrow.   new: what makes Arrow's file, of a stream or with an index."""
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table)


@contextlib.contextmanager
def served(folder, handler=http.server.SimpleHTTPRequestHandler):
    """The address at which this machine serves a folder's files."""
    made = functools.partial(handler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), made) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def unreachable_hub(monkeypatch, load_dataset):
    """The datasets package has a set in its cache, and cannot ask for its files."""

    def unreachable(*arguments, **options):
        raise OSError("the Hub cannot be reached")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
