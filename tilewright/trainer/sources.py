"""Sources of data: local files and folders, URLs, the Hub, or random tokens."""

from __future__ import annotations

import pathlib
import re

import numpy as np

from tilewright import platform
from tilewright.registry import ImplementationUnavailable
from tilewright.trainer.config import Data, Dataset

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
    if len(kinds) != 1 or None in kinds:
        raise ValueError(
            f"{path}: needs files of one kind ({', '.join(FORMATS)}; or ds_type), "
            f"found {sorted(kinds - {None}) or 'none of them'}"
        )
    return kinds.pop(), list(map(str, files))


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
            and (
                path.suffix in (*FORMATS, *COMPRESSED)
                or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", entry.path)
            )
        ):
            raise FileNotFoundError(f"{entry.path}: no such file or folder")
        if address and reader and not cached and (reason := platform.no_module(reader)):
            raise ImplementationUnavailable(f"{entry.path}: {reason}")


def read_raw(entry: Dataset, data: Data):
    import datasets

    path, kind, options = pathlib.Path(entry.path), entry.ds_type, {"token": data.hf_use_auth_token}
    remote = "://" in entry.path
    if entry.data_files is None and not remote and not path.exists():  # a Hub id
        options |= {"name": entry.name, "revision": entry.revision, "split": entry.split}
        try:
            loaded = datasets.load_dataset(entry.path, **options)
        except OSError as error:
            raise FileNotFoundError(
                f"{entry.path}: no file here, and the Hub does not give it: {error}"
            ) from error
        return loaded if entry.split is not None else _only(loaded, entry)
    if entry.data_files is not None:
        if path.is_file():
            raise ValueError(f"{entry.path}: is a file, so data_files cannot be in it")
        revision = f"@{entry.revision}" if entry.revision else ""
        base = entry.path if remote or path.is_dir() else f"hf://datasets/{entry.path}{revision}"
        names = [entry.data_files] if isinstance(entry.data_files, str) else entry.data_files
        files = [f"{base.rstrip('/')}/{name}" for name in names]
    elif remote:
        kind, files = kind or FORMATS.get(pathlib.PurePath(entry.path).suffix, "json"), [entry.path]
    elif _saved(path):
        if kind is not None:
            raise ValueError(
                f"{entry.path}: a saved data set knows its format; leave out ds_type = {kind}"
            )
        return _only(datasets.load_from_disk(entry.path), entry)
    else:
        kind, files = _files(path, kind)
    if kind == "text":  # one document per file; the library's default is one per line
        options["sample_by"] = "document"
    try:
        return datasets.load_dataset(
            kind, data_files={"train": files}, split=entry.split or "train", **options
        )
    except (
        datasets.exceptions.DatasetGenerationError,
        StopIteration,
    ) as error:  # the latter for empty files
        reason = " ".join(str(error.__cause__ or error).split()) or "there is nothing in it"
        raise ValueError(f"{entry.path}: cannot be read as {kind}: {reason}") from error
    except Exception as error:  # readers of URLs raise exceptions without a common base
        if "://" not in files[0]:
            raise
        reason = " ".join(str(error).split())[:300]
        raise OSError(f"{entry.path}: cannot be read: {type(error).__name__}: {reason}") from error


def dummy(data: Data, vocab: int, seed: tuple[int, ...]):
    """Random documents of random lengths."""
    import datasets

    rng = np.random.default_rng(seed)
    longest = data.sample_packing_sequence_len
    rows = [
        rng.integers(0, vocab, rng.integers(max(2, longest // 8), longest + 1))
        for _ in range(DUMMY_SAMPLES)
    ]
    return datasets.Dataset.from_dict({"input_ids": rows})
