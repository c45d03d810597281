"""Sources of data: local files and folders, URLs, the Hub, or random tokens."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from tilewright.core import platform
from tilewright.core.files import is_hub_id
from tilewright.core.registry import ImplementationUnavailable
from tilewright.trainer.config import Data, Dataset
from tilewright.trainer.data import defects
from tilewright.trainer.data.rows import Documents, Rows, in_files

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
    found = sorted(kind for kind in kinds if kind is not None)
    if len(kinds) != 1 or not found:
        raise ValueError(
            f"{path}: needs files of one kind ({', '.join(FORMATS)}; or ds_type), "
            f"found {found or 'none of them'}"
        )
    return found[0], list(map(str, files))


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
    import datasets
    from datasets.exceptions import DatasetGenerationError

    kind, files = located(entry)
    token = data.hf_use_auth_token

    def by_row(row: int) -> str:
        return f"{entry.path}: row {row + 1}"

    if kind is None and files:
        return Rows(_only(datasets.load_from_disk(entry.path), entry), by_row)
    if kind is None:  # a Hub id
        options: dict[str, Any] = {
            "name": entry.name,
            "revision": entry.revision,
            "split": entry.split,
        }
        try:
            loaded: Any = datasets.load_dataset(entry.path, **options, token=token)
        except OSError as error:
            raise FileNotFoundError(
                f"{entry.path}: no file here, and the Hub does not give it: {error}"
            ) from error
        return Rows(loaded if entry.split is not None else _only(loaded, entry), by_row)
    split = entry.split or "train"
    plain = not any("://" in f or f.endswith(COMPRESSED) for f in files)
    try:
        if kind == "text":
            return Documents(_selected(_downloaded(files, token), split))
        options = {"data_files": {"train": files}, "split": split, "token": token}
        if "://" in files[0]:  # else a file that has changed is not downloaded again
            options["download_config"] = datasets.DownloadConfig(use_etag=True)
        loaded = datasets.load_dataset(kind, **options)
    except Exception as error:  # readers of URLs raise exceptions without a common base
        of_data = isinstance(error, DatasetGenerationError | StopIteration)
        if "://" in files[0] and not of_data:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise OSError(f"{entry.path}: cannot be read: {reason}") from error
        if not of_data and not isinstance(error, OSError | ValueError):
            raise
        if plain and (found := defects.find(files, kind)):
            raise ValueError(found) from error
        # StopIteration, which says nothing, is of empty files.
        reason = " ".join(str(error.__cause__ or error).split()) or "there is nothing in it"
        wrong = OSError if isinstance(error, OSError) else ValueError
        raise wrong(f"{entry.path}: cannot be read as {kind}: {reason}") from error

    def by_line(row: int) -> str:
        whole = loaded.info.splits["train"].num_examples
        return (plain and in_files(files, kind, _absolute(row, split, whole))) or by_row(row)

    return Rows(loaded, by_line)


def _absolute(row: int, split: str, count: int) -> int:
    """The row of a split's row among all `count` rows."""
    import datasets

    for part in datasets.ReadInstruction.from_spec(split).to_absolute({"train": count}):
        if row < part.to - part.from_:
            return part.from_ + row
        row -= part.to - part.from_
    return row


def _selected(files: list[str], split: str) -> list[str]:
    """The files, each of which is a document, of a split."""
    import datasets

    parts = datasets.ReadInstruction.from_spec(split).to_absolute({"train": len(files)})
    return [file for part in parts for file in files[part.from_ : part.to]]


def _downloaded(files: list[str], token: bool | None) -> list[str]:
    """Local, decompressed copies of files that are elsewhere, or compressed."""
    import datasets
    from datasets.data_files import DataFilesList

    if not any("://" in f or f.endswith(COMPRESSED) for f in files):
        return files
    manager = datasets.DownloadManager(download_config=datasets.DownloadConfig(token=token))
    found = DataFilesList.from_patterns(files, download_config=manager.download_config)
    return list(manager.iter_files(manager.download_and_extract(list(found))))


def dummy(data: Data, vocab: int, seed: tuple[int, ...]) -> Rows:
    """Random documents of random lengths."""
    import datasets

    rng = np.random.default_rng(seed)
    longest = data.sample_packing_sequence_len
    rows = [
        rng.integers(0, vocab, rng.integers(max(2, longest // 8), longest + 1))
        for _ in range(DUMMY_SAMPLES)
    ]
    made = datasets.Dataset.from_dict({"input_ids": rows})
    return Rows(made, lambda row: f"dummy: row {row + 1}")
