"""Reads committed raw results: every folder of bench/results, and the tables of tuned constants.

Each number keeps its device, date and commit as its `Source`. Nothing is dropped here: the user of
`Raw` selects among several results with `newest`.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from bench.page.named import named_now
from tilewright.bench import report, store
from tilewright.kernels import tuning

# Stages whose documents have results, not rows.
CHECKS = ("smoke", "parity", "graph", "big", "sanitize", "counters")
FIELDS = {
    **dict.fromkeys(CHECKS, ("op", "case", "results")),
    **dict.fromkeys(("time", "goals"), ("rows", "roofline")),
    "overhead": ("rows",),
    "roofline": ("roofline",),
    store.SUMMARY: ("complete", "units"),
}
END_TO_END = "end_to_end.json"
CHECK_STATUSES = ("holds", "broken", "unavailable", "error")


@dataclass(frozen=True)
class Source:
    """The origin of a number.

    folder: name below the results folder.
    path: path of the file, for errors and to break ties.
    """

    folder: str
    path: str
    meta: dict[str, Any] = field(compare=False, hash=False)

    @property
    def device(self) -> tuple[str, str]:
        return self.meta["device_type"], self.meta["device"]

    @property
    def when(self) -> datetime:
        date = datetime.fromisoformat(self.meta["date"])
        return date if date.tzinfo else date.replace(tzinfo=UTC)

    @property
    def age(self) -> tuple[datetime, str]:
        """A sort key, newest last; equal dates by path, so that the order does not depend on the
        file system.
        """
        return self.when, self.path

    @property
    def day(self) -> str:
        return self.when.astimezone(UTC).date().isoformat()

    @property
    def commit(self) -> str:
        """The short commit; without git, the digest of the sources."""
        if self.meta.get("commit"):
            return self.meta["commit"][:10] + (" + local changes" if self.meta.get("dirty") else "")
        return f"sources {self.meta['source'][:10]}" if self.meta.get("source") else "unknown"


@dataclass(frozen=True)
class Group:
    """The rows of one (op, case, dtype) that were timed in the same interleaved rounds, by
    provider.
    """

    source: Source
    op: str
    case: str
    dtype: str
    rows: dict[str, dict[str, Any]]
    roofline: dict[str, Any]

    @property
    def auto(self) -> dict[str, Any] | None:
        return next((r for r in self.rows.values() if r["auto"]), None)


@dataclass(frozen=True)
class Entry:
    """One record that is not a timed row: a check's result, a row of overhead, a model's step, a
    measured roof, a table of constants.
    """

    source: Source
    kind: str
    op: str
    case: str
    data: dict[str, Any]


@dataclass
class Folder:
    """A folder of results.

    complete: None if its files do not record it.
    units: the units of a suite, by name.
    """

    name: str
    kind: str
    sources: list[Source] = field(default_factory=list)
    complete: bool | None = None
    units: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


@dataclass
class Raw:
    """All raw results."""

    groups: list[Group] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    folders: list[Folder] = field(default_factory=list)

    def of(self, kind: str, device: tuple[str, str] | None = None) -> list[Entry]:
        return [e for e in self.entries if e.kind == kind and device in (None, e.source.device)]

    def devices(self) -> list[tuple[str, str]]:
        """(device type, name) of each device, the one with the newest result first. Tables of
        constants are not results.
        """
        newest_age: dict[tuple[str, str], tuple] = {}
        for source in [s for f in self.folders for s in f.sources]:
            newest_age[source.device] = max(newest_age.get(source.device, source.age), source.age)
        return sorted(newest_age, key=lambda d: (newest_age[d], d), reverse=True)


T = TypeVar("T", Group, Entry)
K = TypeVar("K", bound=Hashable)


def newest(items: Iterable[T], key: Callable[[T], K]) -> dict[K, T]:
    """The item with the newest date for each key, in order of the keys' first occurrence."""
    chosen: dict[K, T] = {}
    for item in items:
        k = key(item)
        if k not in chosen or item.source.age > chosen[k].source.age:
            chosen[k] = item
    return chosen


# ---- one file


def _check(document: Any, *fields: str) -> None:
    """Raises ValueError unless it is an object of this schema with these fields."""
    if not isinstance(document, dict) or document.get("schema") != report.SCHEMA:
        schema = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise ValueError(f"schema must be {report.SCHEMA}, got {schema!r}")
    for name in fields:
        if name not in document:
            raise ValueError(f"has no {name!r}")


def _source(meta: dict[str, Any], path: str, folder: str) -> Source:
    source = Source(folder, path, meta)
    for name in ("device_type", "device", "date"):
        if not isinstance(meta.get(name), str):
            raise ValueError(f"meta has no {name!r}")
    _ = source.when  # an invalid date must raise here, where the file is named
    return source


def _groups(document: dict[str, Any], source: Source) -> Iterator[Group]:
    report.check(document["rows"])
    rows_by_case: dict[tuple[str, str, str], dict[str, dict]] = {}
    for r in document["rows"]:
        for figures in filter(None, (r[p] for p in report.PASSES)):
            if not all(figures[f"{q}_ms"] > 0 for q in ("median", "p20", "p80")):
                raise ValueError(f"{' '.join(report.key(r))}: a time must be positive")
        rows_by_case.setdefault((r["op"], r["case"], r["dtype"]), {})[r["provider"]] = r
    for name, rows in rows_by_case.items():
        yield Group(source, *name, rows, document["roofline"])


def _check_result(result: dict[str, Any]) -> dict[str, Any]:
    """A result of a check with every field. Raises KeyError or ValueError."""
    if result["status"] not in CHECK_STATUSES:
        raise ValueError(f"status must be one of {CHECK_STATUSES}, got {result['status']!r}")
    tensors = [
        {"name": t["name"], "share": _share(t["error"], t["budget"])}
        for t in result.get("tensors", ())
    ]
    return {
        "implementation": result["implementation"],
        "dtype": result["dtype"],
        "status": result["status"],
        "reason": result.get("reason"),
        "tensors": tensors,
    }


def _share(error: float | None, budget: float) -> float:
    """Error divided by budget. JSON has no infinity: an infinite error is null."""
    if error is None:
        return math.inf
    return error / budget if budget else (math.inf if error else 0.0)


def _overhead(document: dict[str, Any], source: Source) -> Iterator[Entry]:
    for r in document["rows"]:
        data = {
            "implementation": r["implementation"],
            "dtype": r["dtype"],
            "grad": bool(r["grad"]),
            "us": {level: t and float(t["median"]) for level, t in r["us"].items()},
            "overhead_us": r["overhead_us"],
            "errors": dict(r["errors"]),
        }
        yield Entry(source, "overhead", r["op"], r["case"], data)


TIMES = ("median_ms", "p20_ms", "p80_ms")
ERRORS = ("loss_error", "gradient_error", "worst_gradient_error")


def _end_to_end(document: dict[str, Any], source: Source) -> Iterator[Entry]:
    for r in document["rows"]:
        if "status" in r:  # whole optimizer steps
            yield Entry(source, "steps", "", r["case"], r)
            continue
        data = {
            "dtype": r["dtype"],
            "provider": r["provider"],
            **{n: float(r[n]) for n in (*TIMES, *ERRORS)},
            "peak_mib": None if r["peak_mib"] is None else float(r["peak_mib"]),
        }
        if not all(data[n] > 0 for n in TIMES):
            raise ValueError(f"{r['case']} {r['dtype']} {r['provider']}: a time must be positive")
        yield Entry(source, "end_to_end", "", r["case"], data)


# ---- one folder


def _read_folder(raw: Raw, path: pathlib.Path) -> None:
    folder = Folder(path.name, "other")
    raw.folders.append(folder)
    folder.files = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    documents = list(store.read(path))
    for name, file, document in documents:
        with _naming(file, name):
            folder.sources.append(_read_document(raw, folder, name, document))
    if documents:
        # A suite that was killed before its end has no summary document.
        folder.kind = next(
            (
                a
                for n, _, d in documents
                if n == store.SUMMARY
                for a in d["meta"].get("argv", ())[:1]
            ),
            "suite",
        )
        folder.complete = folder.complete if documents[0][0] == store.SUMMARY else False
    elif (path / END_TO_END).exists():
        folder.kind = "end to end"
    elif path.name.startswith("training-"):
        folder.kind = "training"
    if (file := path / END_TO_END).exists():
        with _naming(file):
            document = store.parse(file.read_text())
            _check(document, "meta", "rows")
            source = _source(document["meta"], f"{path.name}/{END_TO_END}", path.name)
            raw.entries += _end_to_end(document, source)
            folder.sources.append(source)


@contextlib.contextmanager
def _naming(file: pathlib.Path, unit: str | None = None) -> Iterator[None]:
    """Adds the file and the unit to errors raised by its content."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"has no {error}" if isinstance(error, KeyError) else str(error)
        where = f"{file}: {unit}" if unit else str(file)
        raise ValueError(f"{where}: {reason}") from error


def _read_document(raw: Raw, folder: Folder, name: str, document: Any) -> Source:
    """Adds one document of a suite to `raw`; returns its source."""
    stage = name.partition("/")[0]
    _check(document, "meta", *FIELDS.get(stage, ()))
    source = _source(document["meta"], f"{folder.name}/{name}", folder.name)
    document = named_now(document)
    if name == store.SUMMARY:
        complete, units = document["complete"], document["units"]
        folder.complete = complete if complete is None else bool(complete)
        folder.units = {
            n: {"status": u["status"], "reason": u.get("reason")} for n, u in units.items()
        }
        return source
    # A failed unit records the reason; a newer successful one replaces it.
    raw.entries.append(Entry(source, "unit", "", name, {"error": document.get("error")}))
    if stage in ("time", "goals"):
        raw.groups += _groups(document, source)
    elif stage == "overhead":
        raw.entries += _overhead(document, source)
    elif stage in CHECKS:
        op, case = document["op"], document["case"]
        raw.entries += [
            Entry(source, stage, r.get("op", op), case, _check_result(r))
            for r in document["results"]
        ]
    if roof := document.get("roofline"):
        data = {
            "copy": float(roof["copy_bytes_per_second"]),
            "flops": {d: float(f) for d, f in roof["flops_per_second"].items()},
        }
        raw.entries.append(Entry(source, "roofline", "", "", data))
    return source


def _read_tuned(raw: Raw, path: pathlib.Path) -> None:
    document = tuning.read(path)
    with _naming(path):
        for launch, entries in document["launches"].items():
            # A table is written by many runs: each entry has its own date and sources.
            for e in entries:
                meta = {
                    "threads": None,
                    "argv": [],
                    **e,
                    "device": document["device"],
                    "device_type": document["device_type"],
                }
                data = {n: e[n] for n in ("config", "heuristic", "median_us", "heuristic_us")}
                raw.entries.append(
                    Entry(
                        _source(meta, f"{path.parent.name}/{path.name}", path.parent.name),
                        "tuned",
                        path.stem,
                        launch,
                        data,
                    )
                )


def read(results: pathlib.Path, tuned: pathlib.Path | None = None) -> Raw:
    """Reads every folder of `results` and every table of `tuned`. Raises ValueError, naming the
    file, for a broken one.
    """
    if not results.is_dir():
        raise ValueError(f"{results}: no such folder")
    raw = Raw()
    for folder in sorted(p for p in results.iterdir() if p.is_dir()):
        _read_folder(raw, folder)
    for path in sorted(tuned.glob("*/*.json")) if tuned else ():
        _read_tuned(raw, path)
    return raw
