"""Sources of data: local files and folders, URLs, the Hub, or random tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tilewright.core import platform
from tilewright.core.files import is_hub_id
from tilewright.core.registry import ImplementationUnavailable
from tilewright.trainer.data.csv_file import CsvFile
from tilewright.trainer.data.fields import Data, Dataset
from tilewright.trainer.data.json_file import JsonFile
from tilewright.trainer.data.rows import Documents, Range, Rows
from tilewright.trainer.data.typed_file import ArrowFile, ParquetFile, SetFile

FORMATS = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zip", ".zst")
# URL scheme -> the package that reads it, for those that the configuration names.
READERS = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("abfs", "abfss", "az"), "adlfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
}
DUMMY_SAMPLES = 512
# Formats of files of rows.
FILES = {"json": JsonFile, "csv": CsvFile, "parquet": ParquetFile, "arrow": ArrowFile}
GUESSED = ("json", "csv")  # formats whose columns have no types
# Attributes of the datasets package's configurations that say which files they are, and the types,
# which rows have.
OF_CONFIG = ("name", "version", "data_dir", "data_files", "description", "features")


def _files(path: pathlib.Path, kind: str | None) -> tuple[str, list[str]]:
    """(format, files) of a local file or folder. kind: the configured format; in a folder, only
    such files.
    """
    if path.is_file():
        files, kinds = [path], {kind or FORMATS.get(path.suffix)}
    else:
        files = sorted(
            p for p in path.rglob("*") if p.suffix in FORMATS and kind in (None, FORMATS[p.suffix])
        )
        kinds = {FORMATS[p.suffix] for p in files}
    known = sorted(kind for kind in kinds if kind is not None)
    if len(kinds) != 1 or not known:
        raise ValueError(
            f"{path}: needs files of one kind ({', '.join(FORMATS)}; or ds_type), "
            f"found {known or 'none of them'}"
        )
    return known[0], list(map(str, files))


def _saved(path: pathlib.Path) -> bool:
    """Whether the datasets package wrote it, as one set or as a mapping of splits."""
    return (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()


def _only(loaded, entry: Dataset):
    """One set out of a mapping of splits."""
    if not isinstance(loaded, dict):
        if entry.split is not None:
            raise ValueError(f"{entry.path}: holds one data set without splits, not {entry.split}")
        return loaded
    names = sorted(loaded)
    split = names[0] if entry.split is None and len(names) == 1 else entry.split
    if split not in names:
        raise ValueError(
            f"{entry.path}: has the splits {', '.join(names)}; set split to one of them"
        )
    return loaded[split]


def titles(entries: list[Dataset]) -> list[str]:
    """Names of data sets: the last part of the path, with a number where it is another's too."""
    names: list[str] = []
    for entry in entries:
        stem = pathlib.PurePath(entry.path.rstrip("/")).stem or entry.path
        name = ":".join(filter(None, (stem, entry.name, entry.split)))
        same = sum(n == name or n.rpartition("#")[0] == name for n in names)
        names.append(f"{name}#{same + 1}" if same else name)
    return names


def check_sources(entries: list[Dataset], *, cached: bool = False) -> None:
    """Raises FileNotFoundError for a path that does not exist and cannot be a Hub id (a data file's
    name cannot), and ImplementationUnavailable for a URL whose scheme needs a package that is not
    installed. Reads nothing.

    cached: a URL may have been prepared before, which needs no package.
    """
    for entry in entries:
        scheme, address, _ = entry.path.partition("://")
        reader = READERS.get(scheme.rpartition("::")[2].lower())
        path = pathlib.Path(entry.path)
        if (
            not address
            and not path.exists()
            and (path.suffix in (*FORMATS, *COMPRESSED) or not is_hub_id(entry.path))
        ):
            raise FileNotFoundError(f"{entry.path}: no such file or folder")
        if address and reader and not cached and (reason := platform.no_module(reader)):
            raise ImplementationUnavailable(f"{entry.path}: {reason}")


def located(entry: Dataset) -> tuple[str | None, list[str]]:
    """(format, files) of what an entry names: local paths in the order in which they are read, or
    addresses. A set that the datasets package saved, and one on the Hub, has no format.
    """
    path, kind = pathlib.Path(entry.path), entry.ds_type
    remote = "://" in entry.path
    if entry.data_files is not None:
        if path.is_file():
            raise ValueError(f"{entry.path}: is a file, so data_files cannot be in it")
        names = [entry.data_files] if isinstance(entry.data_files, str) else entry.data_files
        if not remote and path.is_dir():
            return kind, [file for name in names for file in _matching(path, name)]
        revision = f"@{entry.revision}" if entry.revision else ""
        base = entry.path if remote else f"hf://datasets/{entry.path}{revision}"
        return kind, [f"{base.rstrip('/')}/{name}" for name in names]
    if remote:
        return kind or FORMATS.get(pathlib.PurePath(entry.path).suffix, "json"), [entry.path]
    if not path.exists():
        return None, []
    if path.is_dir() and _saved(path):
        if kind is not None:
            raise ValueError(
                f"{entry.path}: a saved data set knows its format; leave out ds_type = {kind}"
            )
        return None, sorted(str(p) for p in path.rglob("*") if p.is_file())
    return _files(path, kind)


def _matching(folder: pathlib.Path, pattern: str) -> list[str]:
    from datasets.data_files import resolve_pattern

    try:
        return resolve_pattern(pattern, str(folder.resolve()))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{folder}: holds no file {pattern} (data_files)") from error


def place_of(origin: str, entries: list[Dataset], data: Data) -> str:
    """The file and line, or row, of the column `origin`.   entries: those that were prepared."""
    number, row = map(int, origin.split(":"))
    rows: Any = read_raw(entries[number], data)
    return rows.place(row)


def read_raw(entry: Dataset, data: Data) -> Rows | Documents:
    """The rows of an entry. Raises ValueError or OSError with one sentence."""
    kind, files = located(entry)
    token = data.hf_use_auth_token
    if kind is None and files:
        import datasets

        return Rows.of([SetFile(_only(datasets.load_from_disk(entry.path), entry), entry.path)])
    if kind is None:
        kind, splits = _on_hub(entry, token)
    else:
        splits = {"train": files}
    if not isinstance(splits, Mapping):
        return Rows.of([splits])
    split = entry.split or next(iter(splits))
    if entry.split is None:
        _only(splits, entry)  # raises, if there are several
    named = {split: splits[split]} if split in splits else splits
    local = {name: _local(some, entry, token) for name, some in named.items()}
    if kind == "text":
        [(name, documents)] = local.items()
        ranges = _absolute(split, {name: len(documents)})
        some = [documents[i] for _, first, stop in ranges for i in range(first, stop)]
        return Documents([path for path, _ in some])
    return _joined(kind, local, split)


def _joined(kind: str, local: dict[str, list[tuple[str, str]]], split: str) -> Rows:
    """The rows of a split of files, each with the name that errors show."""
    if kind in GUESSED:  # a file of no bytes has no rows; alone, its reader names it
        full = {n: [f for f in files if os.path.getsize(f[0])] for n, files in local.items()}
        local = full if any(full.values()) else local
    read = {name: [FILES[kind](*file) for file in files] for name, files in local.items()}
    ranges, files = [], [file for some in read.values() for file in some]
    for name, first, stop in _absolute(split, {n: sum(map(len, r)) for n, r in read.items()}):
        before = 0
        for file in read[name]:
            own = max(first - before, 0), min(stop - before, len(file))
            if own[0] < own[1]:
                ranges.append(Range(files.index(file), *own))
            before += len(file)
    return Rows(files, ranges)


def _absolute(split: str, counts: dict[str, int]) -> list[tuple[str, int, int]]:
    """The splits, and the ranges of their rows, that are named.   counts: rows of each."""
    import datasets

    parts = datasets.ReadInstruction.from_spec(split).to_absolute(counts)
    return [(part.splitname, part.from_, part.to) for part in parts]


def _on_hub(entry: Dataset, token: bool | None) -> tuple[str, Any]:
    """(format, addresses of each split's files) of a set on the Hub; of another format than those
    that are read here, the set as the datasets package makes it.
    """
    import datasets

    given = {"name": entry.name, "revision": entry.revision, "token": token}
    split: Any = entry.split  # None, too, which the annotation does not say
    with contextlib.suppress(OSError):  # load_dataset says why
        builder = datasets.load_dataset_builder(entry.path, **given)
        if builder.name in FILES and builder.config.data_files:
            _check_options(entry.path, builder)
            return builder.name, {str(s): list(f) for s, f in builder.config.data_files.items()}
    try:
        loaded: Any = datasets.load_dataset(entry.path, **given, split=split)
    except OSError as error:
        raise FileNotFoundError(
            f"{entry.path}: no file here, and the Hub does not give it: {error}"
        ) from error
    loaded = loaded if entry.split is not None else _only(loaded, entry)
    if loaded.info.builder_name in GUESSED:  # from the cache, where files cannot be had
        raise FileNotFoundError(
            f"{entry.path}: the Hub does not give its files of {loaded.info.builder_name}, and the "
            "cache of the datasets package has their texts as values of types that were guessed"
        )
    return "", SetFile(loaded, entry.path)


def _check_options(path: str, builder: Any) -> None:
    """Raises ValueError for a way of reading that a set's card asks for, and that is none here."""
    own = builder.config
    for field in dataclasses.fields(own):
        given, usual = getattr(own, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            usual = field.default_factory()
        if field.name not in OF_CONFIG and given != usual:
            raise ValueError(
                f"{path}: its card has {field.name} = {given!r:.80} for files of {builder.name}, "
                "which is not read here; download them, and convert them to jsonl"
            )


def _local(files: list[str], entry: Dataset, token: bool | None) -> list[tuple[str, str]]:
    """Local, decompressed copies of files, and the names that errors show."""
    if not any("://" in f or f.endswith(COMPRESSED) for f in files):
        return [(f, f) for f in files]
    try:
        return downloaded(files, token)
    except Exception as error:  # readers of URLs raise exceptions without a common base
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise OSError(f"{entry.path}: cannot be read: {reason}") from error


def downloaded(files: list[str], token: bool | None) -> list[tuple[str, str]]:
    import datasets
    from datasets import config
    from datasets.data_files import DataFilesList

    given = datasets.DownloadConfig(token=token)
    matches, local = DataFilesList.from_patterns(files, download_config=given), []
    for file in matches:
        own = given
        if "://" not in file:  # what was decompressed before may be of another content
            stat = os.stat(file)
            folder = f"{config.HF_DATASETS_CACHE}/{stat.st_size}-{stat.st_mtime_ns}"
            own = datasets.DownloadConfig(cache_dir=folder)
        manager = datasets.DownloadManager(download_config=own)
        made: Any = manager.download_and_extract(file)
        for path in manager.iter_files([made]):
            inner = os.path.relpath(path, made) if os.path.isdir(made) else ""
            local.append((path, f"{file}/{inner}" if inner else file))
    return local


def dummy(data: Data, vocab: int, seed: tuple[int, ...]) -> Rows:
    """Random documents of random lengths."""
    import datasets

    rng = np.random.default_rng(seed)
    longest = data.sample_packing_sequence_len
    rows = [
        rng.integers(0, vocab, rng.integers(max(2, longest // 8), longest + 1))
        for _ in range(DUMMY_SAMPLES)
    ]
    return Rows.of([SetFile(datasets.Dataset.from_dict({"input_ids": rows}), "dummy")])
