"""Reads results of searches, and writes the tables of tuned launch configurations."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tilewright import selection
from tilewright.bench import runner, sources, store
from tilewright.core import platform
from tilewright.kernels import tuning


def crashed(before: dict[str, Any] | None, meta: dict[str, Any]) -> list[list]:
    """[launch, key, configuration] of those that ended the process in an earlier attempt with
    these sources.   before: that attempt's document.
    """
    try:
        if before is None or not runner.same(before, meta):
            return []
        return before["crashed"] + (
            [before["trying"]] if before.get("error") and before["trying"] else []
        )
    except (KeyError, TypeError):
        return []


def key_of(entry: dict[str, Any]) -> tuple[str, str]:
    return entry["launch"], json.dumps(entry["key"], sort_keys=True)


def entries_in(documents: Mapping[str, Any], meta: dict[str, Any]) -> list[dict[str, Any]]:
    """Every entry found on this device with these sources and versions, oldest first, with its
    time and unit.   documents: by the names of their units.
    """
    entries, ops = [], selection.operations()
    for name, document in documents.items():
        try:
            op = ops.get(name.partition("/")[2].partition(".")[0])
            about = document["meta"]
            if runner.same(
                document, meta if op is None else {**meta, "source": sources.digest(op)}
            ):
                more = {"unit": name, "date": about["date"], "versions": about["versions"]}
                more |= {n: about.get(n) for n in ("commit", "dirty")}
                entries += [{**e, **more, "own": list(e)} for e in document.get("entries", ())]
        except (KeyError, TypeError, AttributeError):  # of another call
            continue
    return sorted(entries, key=lambda e: e["date"])


def write_tables(
    documents: Mapping[str, Any], tables: pathlib.Path, meta: dict[str, Any]
) -> list[pathlib.Path]:
    """Writes the entries into tables/<device>/<op>.json, and keeps existing entries for other
    keys.
    """
    device = meta["device"]
    by_op: dict[str, dict[tuple[str, str], dict]] = {}
    for entry in entries_in(documents, meta):
        op, launch = entry["launch"].split("/")
        by_op.setdefault(op, {})[launch, key_of(entry)[1]] = entry
    written = []
    for op, entries in by_op.items():
        path = tables / platform.slug(device) / f"{op}.json"
        launches = tuning.read(path)["launches"] if path.exists() else {}
        for (launch, _), entry in entries.items():
            other_entries = [e for e in launches.get(launch, ()) if e["key"] != entry["key"]]
            slim = {
                k: v
                for k, v in entry.items()
                if k not in ("launch", "tried", "rejected", "unit", "own")
            }
            launches[launch] = sorted(
                [*other_entries, slim], key=lambda e: json.dumps(e["key"], sort_keys=True)
            )
        store.write_json(
            path,
            {
                "schema": tuning.SCHEMA,
                "device": device,
                "device_type": meta["device_type"],
                "launches": dict(sorted(launches.items())),
            },
        )
        written.append(path)
    return written


def table(entries: Sequence[dict[str, Any]]) -> str:
    """One line per key: the gain over the heuristic, and the configuration."""
    lines = []
    for e in entries:
        key = " ".join(f"{k}={v}" for k, v in e["key"].items())
        new = {k: v for k, v in e["config"].items() if v != e["heuristic"][k]}
        gain = e["heuristic_us"] / e["median_us"] if e["median_us"] and e["heuristic_us"] else 1.0
        lines.append(
            f"{e['launch']:<32} {key:<44} {e['median_us'] or 0:10.1f} us  {gain:5.2f}x the heuristic  "
            + (", ".join(f"{k}={v}" for k, v in new.items()) or "(the heuristic)")
        )
    return "\n".join(lines)
