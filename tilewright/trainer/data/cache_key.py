"""The name of a prepared data set: a hash of what it is made from.

Local files and the tokenizer's are known by their contents, whatever their paths and times. Data
that are elsewhere are known by their address and by the ETag or commit that the server tells. The
fingerprints of datasets are of local files' paths and times, and of pickled functions, which differ
where the samples do not.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import pathlib
from typing import Any

from tilewright.trainer.checkpoint.hf_names import CHAT_TEMPLATES, local_folder
from tilewright.trainer.data.data_files import Digests, digests
from tilewright.trainer.data.encode import Use, longest
from tilewright.trainer.data.fields import Dataset
from tilewright.trainer.data.sources import located
from tilewright.trainer.data.types.dataset_type import DATASETS
from tilewright.trainer.models.fields import Model
from tilewright.trainer.section import keyed

log = logging.getLogger("tilewright")
# Increment when the same settings prepare other data, to invalidate earlier caches.
PREPARATION = 6


class Notes:
    """Hashes of files, and what servers have said, kept beside the prepared sets: a file is read
    again only if its size or time has changed. Jobs share them.
    """

    def __init__(self, root: pathlib.Path):
        self.path = root / "hashes.json"
        self.known, self.new = self._saved(), {}

    def _saved(self) -> dict[str, Any]:
        try:
            saved = json.loads(self.path.read_text())
        except (OSError, ValueError):  # a new folder, or a torn file
            return {}
        return saved if isinstance(saved, dict) else {}

    def _note(self, name: str, what: Any) -> None:
        self.known[name] = self.new[name] = what

    def file(self, path: str) -> Digests:
        """The hashes of a file's contents."""
        stat, name = os.stat(path), os.path.realpath(path)
        state, fields = [stat.st_size, stat.st_mtime_ns], len(Digests._fields)
        noted = self.known.get(name)
        if not isinstance(noted, list) or noted[:2] != state or len(noted) != 2 + fields:
            self._note(name, [*state, *digests(path)])
        return Digests(*self.known[name][2:])

    def remote(self, entry: Dataset, token: bool | None) -> Any:
        """What the server of an entry's data says about their version; if it cannot be asked, what
        it said last.
        """
        name = json.dumps([entry.path, entry.name, entry.revision, entry.data_files])
        try:
            self._note(name, version(entry, token))
        except Exception as error:  # readers of URLs raise exceptions without a common base
            if name in self.known:
                log.warning(
                    "%s: cannot ask whether it has changed (%s); taking it as it was",
                    entry.path,
                    type(error).__name__,
                )
        if not known(said := self.known.get(name)):
            log.warning(
                "%s: its server tells no version (ETag or commit), so that later changes of it are "
                "not seen",
                entry.path,
            )
        return said

    def save(self) -> None:
        """Adds what is new to what other jobs have saved meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_name(f".{self.path.name}.partial")
        with self.path.with_name(f".{self.path.name}.lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            aside.write_text(json.dumps(self._saved() | self.new))
            aside.replace(self.path)


def version(entry: Dataset, token: bool | None) -> Any:
    """The commit of a set on the Hub, or (address, ETag) of each file."""
    _, files = located(entry)
    if not files:
        from huggingface_hub import HfApi

        return HfApi(token=token).dataset_info(entry.path, revision=entry.revision).sha
    import datasets
    from datasets.data_files import DataFilesList

    given = datasets.DownloadConfig(token=token)
    there = DataFilesList.from_patterns(files, download_config=given)
    return [[f, list(map(str, m))] for f, m in zip(there, there.origin_metadata, strict=True)]


def known(said: Any) -> bool:
    """Whether what `version` returns tells two versions of all files apart."""
    return bool(said) and (isinstance(said, str) or all(told for _, told in said))


def files_of(entries: list[Dataset], root: str, blocks: int) -> list[dict[str, Any]]:
    """The local files that entries are read from, as `data_files.moved` compares them.   root: the
    folder of prepared sets.   blocks: their number for all files, at most, but one for each.
    """
    notes = Notes(pathlib.Path(root))
    local = [f for e in entries if e.path != "dummy" for f in located(e)[1] if "://" not in f]
    made = [{"file": f, **notes.file(f).within(blocks // len(local))._asdict()} for f in local]
    notes.save()
    return made


def cache_key(entries: list[Dataset], use: Use, model: Model, seed: int, shuffle: bool) -> str:
    """Changes whenever the prepared data would."""
    data, columns, prompts = use.data, use.columns, use.prompts
    notes = Notes(pathlib.Path(data.dataset_prepared_path))

    def contents(entry: Dataset) -> Any:
        if entry.path == "dummy":
            return ["dummy", data.sample_packing_sequence_len]
        kind, files = located(entry)
        if files and "://" not in files[0]:
            return [kind, [[pathlib.PurePath(f).suffix, notes.file(f).sha256] for f in files]]
        return [kind, entry.path, notes.remote(entry, data.hf_use_auth_token)]

    kinds = [DATASETS[e.type] for e in entries]
    versions = [k.version for k in kinds]
    cut = prompts.most is not None and any(k.prompts for k in kinds)
    what = [
        PREPARATION,
        [[keyed(e), longest(e, data), contents(e)] for e in entries],
        keyed(data),
        use.vocab,
        shuffle,
        seed,
        _tokenizer(model, notes) if any(k.tokenizer for k in kinds) else None,
        *([{name: str(c.type) for name, c in columns.items()}] if columns else []),
        *([c.depends for c in columns.values() if c.depends is not None]),
        *([versions] if any(versions) else []),
        *([{"prompts": prompts[:2]}] if cut else []),
        *([{"stops": use.stops}] if use.stops else []),
        *([data.on_bad_row] if data.on_bad_row != "error" else []),
        *([data.mixing, data.samples_per_epoch] if shuffle and data.mixing != "concat" else []),
    ]
    notes.save()
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def tokenized_by(entries: list[Dataset], model: Model, root: str) -> str:
    """A hash of the tokenizer that makes tokens of entries, with its chat template; "" if all rows
    are tokens.   root: the folder of prepared sets.
    """
    if not any(DATASETS[e.type].tokenizer for e in entries):
        return ""
    notes = Notes(pathlib.Path(root))
    made = hashlib.sha256(json.dumps(_tokenizer(model, notes)).encode()).hexdigest()
    notes.save()
    return made[:16]


def tokenizer_folder(model: Model) -> pathlib.Path | None:
    """Where the tokenizer's files are; None: there is none, or the Hub does not give it."""
    if not model.tokenizer_path:
        return None
    try:
        folder = pathlib.Path(local_folder(model.tokenizer_path, model.revision))
    except FileNotFoundError:
        return None
    return folder if folder.is_dir() else None


def _tokenizer(model: Model, notes: Notes) -> Any:
    """The tokenizer's files; its id, and revision, if the Hub does not give them."""
    if (folder := tokenizer_folder(model)) is None:
        path, revision = model.tokenizer_path, model.revision
        return path if revision is None else [path, revision]
    # Not its other subfolders: a model's checkpoints may be there.
    files = sorted(
        p
        for p in (*folder.iterdir(), *folder.glob(f"{CHAT_TEMPLATES}/*.jinja"))
        if p.suffix in (".json", ".model", ".txt", ".jinja", ".tiktoken")
        and p.is_file()
        and not p.name.endswith(".index.json")
    )
    return [[str(p.relative_to(folder)), notes.file(str(p)).sha256] for p in files]
