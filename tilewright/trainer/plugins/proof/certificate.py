"""The certificate of a run: what is known to change its bits, gathered from every rank.

Rank 0 writes it to the run's folder before the first step, to certificate.json, or, for a run that
resumes after step N, to certificate_N.json:

    {"schema", "start", "facts": {kind: {name: value}}, "trained": [names], "files": {name: [...]}}

start: optimizer steps done.   trained: the order of tensors in checksums.jsonl (`assertion.py`).
files: the data's, by the name of the fact that depends on them, with digests of their lines. They
say where data differ that are not the same, and earlier versions wrote none.
Not among the facts are fields that change no number, paths (their contents are), and how many steps
a run takes (the learning rate of each step is compared).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from tilewright.core import platform
from tilewright.core.files import read_json, write_text
from tilewright.core.installed import installed
from tilewright.kernels import tuning
from tilewright.ops.attention.vendors import FLASH
from tilewright.selection import operations
from tilewright.trainer.checkpoint.made_of import Thing
from tilewright.trainer.config import Data
from tilewright.trainer.data.batches import Batches, Bins
from tilewright.trainer.data.cache_key import files_of
from tilewright.trainer.data.contents import tokenizes
from tilewright.trainer.data.data_files import are_digests, moved
from tilewright.trainer.data.prepared import is_saved
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.plugins.callback import Callback
from tilewright.trainer.plugins.proof.checksums import Checksums
from tilewright.trainer.plugins.run import Run
from tilewright.trainer.section import certified

FILE = "certificate.json"
SCHEMA = 1
BLOCKS = 1024  # of lines, with a digest each: 17 KB
Facts = dict[str, dict[str, Any]]
# Implementations of this library that another package computes, and its name.
BEHIND = {
    **{name: flash.distribution for name, flash in FLASH.items()},
    "quack": "quack-kernels",
    "cute": "nvidia-cutlass-dsl",
}
# Facts that are hashes, which a sentence does not show: their names in it, by kind, or kind and
# name.
HASHES = {
    "launch": "the configuration of launch {}",
    "tuned table": "the tuned table of {}",
    "initial weight": "the initial weight of {}",
    "environment code": "the code of tilewright",
    "data contents": "the content of the data",
    "data evaluation": "the content of the evaluation data",
    "data order": "the order of samples",
    "data packing": "the packing of samples",
    "read": "the content of the {}",
}
# Other facts in a sentence, by kind, or kind and name.
NAMES = {
    "environment": "the environment's {}",
    "environment threads": "the number of threads",
    "setting": "the setting {}",
    "layout": "the layout's {}",
    "layout processes": "the number of processes",
    "field": "field {}",
    "model": "the model's {}",
    "implementation": "the implementation of {}",
    "package": "the version of {}",
    "data": "the data's {}",
    "the": "the {}",
}


class Difference(NamedTuple):
    kind: str
    name: str
    ours: Any
    theirs: Any

    def said(self, here: str, there: str) -> str:
        """The sentence.   here, there: where the two values are from."""
        if of := HASHES.get(self.kind) or HASHES.get(f"{self.kind} {self.name}"):
            return f"{of.format(self.name)} differs {here}"
        shown = ["not set" if v is None else repr(v) for v in (self.ours, self.theirs)]
        name = NAMES.get(f"{self.kind} {self.name}") or NAMES.get(self.kind, f"{self.kind} {{}}")
        return f"{name.format(self.name)} is {shown[0]} {here} and {shown[1]} {there}"


def facts(
    fields: Mapping[str, Any],
    deep_ep: bool,
    mesh: Mesh,
    data: tuple[Batches, dict[str, Bins]],
    belongs: Facts,
    chosen: dict[str, str],
) -> Facts:
    """This rank's, causes before what they have an effect on; without the initial weights.

    fields: what `certified` returns.   deep_ep: whether DeepEP sends tokens to experts.
    data: what `build.build_data` returns.   belongs: what `build.identity` returns, and as "read"
    what `things_read` does.   chosen: the implementation of each op.
    """
    batches, held = data
    device = platform.device_name(mesh.device.type)
    layout = dataclasses.asdict(mesh.layout)
    layout |= layout.pop("apart")
    by_kind = {
        "environment": platform.provenance(),
        "setting": {
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        },
        "layout": {"processes": mesh.size, **layout},
        "field": {**fields},
        "model": belongs["model"],
        "implementation": chosen,
        "package": packages(chosen, deep_ep),
        "launch": launches(chosen, mesh.device),
        "tuned table": {f"{op} for {device}": h for op, h in tuning.hashes(mesh.device).items()},
        "read": belongs["read"],
        "data": {
            **belongs["data"],
            "evaluation": " ".join(bins.fingerprint() for bins in held.values()) or None,
            "order": order(batches),
        },
    }
    return json.loads(json.dumps(by_kind))


def things_read(data: Data, things: Mapping[str, Thing]) -> dict[str, str]:
    """The hashes of what else a run is made of. Its base and samples are other facts, and no number
    depends on a tokenizer that is exported alone.
    """
    known = {"base", "data"} if tokenizes(data) else {"base", "data", "tokenizer", "template"}
    return {name: thing.digest for name, thing in things.items() if name not in known}


def order(batches: Batches) -> str:
    """SHA-256 of the order of samples in the first epoch, bin by bin. It and the seed give the
    order in every other.
    """
    digest = hashlib.sha256(np.asarray(batches.order(0), np.int64).tobytes())
    for samples in batches.bins.bins:
        digest.update(np.asarray([len(samples), *samples], np.int64).tobytes())
    return digest.hexdigest()


def packages(chosen: dict[str, str], deep_ep: bool) -> dict[str, str]:
    """The versions of other packages that compute for these implementations."""
    versions = {"deep_ep": version("deep_ep")} if deep_ep else {}
    for op, name in chosen.items():
        package = BEHIND.get(name)
        for entry in installed().get(op, ()):
            if entry.name == name and entry.point.dist is not None:
                package = entry.point.dist.name
        if package is not None:
            versions[package] = version(package)
    return versions


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout in PYTHONPATH
        return "unknown"


def launches(chosen: dict[str, str], device: torch.device) -> dict[str, str]:
    """SHA-256 of the configurations of each launch, for the keys that the compile gate compiles."""
    hashes = {}
    for op, name in chosen.items():
        for tunable in operations()[op].implementation(name).tunables():
            configs = [[tunable.named(k), tunable.config(device, *k)] for k in tunable.keys]
            text = json.dumps(configs, sort_keys=True)
            hashes[tunable.name] = hashlib.sha256(text.encode()).hexdigest()
    return hashes


def differences(ours: Facts, theirs: Facts) -> Iterator[Difference]:
    """The differences, by kind and name; what one of the two lacks is None there."""
    for kind in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get(kind, {}), theirs.get(kind, {})
        for name in dict.fromkeys((*a, *b)):
            if a.get(name) != b.get(name):
                yield Difference(kind, name, a.get(name), b.get(name))


def listed(sentences: list[str]) -> str:
    """The first few of them."""
    more = f"; and {len(sentences) - 3} more" if len(sentences) > 3 else ""
    return "; ".join(sentences[:3]) + more


def between_ranks(own: Facts, mesh: Mesh) -> str | None:
    """What ranks differ in from rank 0, if they do; the same on every rank."""
    first = mesh.control.broadcast(own if mesh.main else None)
    by_rank = [
        [Difference(*one) for one in of_rank]
        for of_rank in mesh.control.gather(list(differences(own, first)))
    ]
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, of_rank in enumerate(by_rank):
        for one in of_rank:
            ranks.setdefault((one.kind, one.name), []).append(rank)
    said = []
    for rank, of_rank in enumerate(by_rank):
        for one in of_rank:
            where = ranks[one.kind, one.name]
            if where[0] == rank:
                more = f" and {len(where) - 1} more" if len(where) > 1 else ""
                said.append(one.said(f"on rank {rank}{more}", "on rank 0"))
    return listed(said) if said else None


def files_of_data(data: Data) -> dict[str, list[dict[str, Any]]]:
    """What a certificate says of the data's files."""
    if is_saved(data):
        return {}
    split = data.datasets if data.val_set_size is not None else []
    root = data.dataset_prepared_path
    return {
        "contents": files_of(data.datasets, root, BLOCKS),
        "evaluation": files_of(data.test_datasets or split, root, BLOCKS),
    }


def between_runs(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What this run's certificate and another one differ in."""
    mine, facts = dict(ours["facts"]), dict(theirs["facts"])
    if ours["start"] != theirs["start"]:  # weights of other steps
        for kinds in (mine, facts):
            kinds.pop("initial weight", None)
    said = []
    for one in differences(mine, facts):
        said.append(one.said("in this run", "in that one"))
        files = [c.get("files", {}).get(one.name) for c in (ours, theirs)]
        if one.kind == "data" and all(files):
            said[-1] += f": {moved(*files)}"
    if theirs["trained"] != ours["trained"]:
        said.append("the trained tensors differ in this run")
    return said


def files_apart(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """What differs between the data's files of two runs, if their contents do: no sample that is
    hashed shows it.
    """
    files = [c.get("files", {}).get("contents") for c in (ours, theirs)]
    if not all(files) or len({tuple(f["sha256"] for f in some) for some in files}) == 1:
        return None
    return moved(*files)


def certify(
    own: Facts, checksums: Checksums, start: int, files: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """The certificate of the whole run. Every rank must call it.   files: see `files_of_data`."""
    values = checksums.weights()
    weights = {n: f"{v & (1 << 64) - 1:016x}" for n, v in zip(checksums.names, values, strict=True)}
    return {
        "schema": SCHEMA,
        "start": start,
        "facts": {**own, "initial weight": weights},
        "trained": checksums.trained,
        "files": files,
    }


def write(folder: str, certificate: dict[str, Any]) -> tuple[str, str]:
    """Writes the file, whose name and hash it returns."""
    text, start = json.dumps(certificate, indent=1) + "\n", certificate["start"]
    path = pathlib.Path(folder, f"certificate_{start}.json" if start else FILE)
    write_text(path, text)
    return path.name, hashlib.sha256(text.encode()).hexdigest()


def read(file: pathlib.Path) -> dict[str, Any]:
    """A certificate that `write` wrote. Raises ValueError if the file is none."""
    certificate = read_json(file)
    if certificate.get("schema") != SCHEMA:
        raise ValueError(
            f"{file.name} has the schema {certificate.get('schema')!r}; accepted is {SCHEMA}"
        )
    start, facts, trained = (certificate.get(name) for name in ("start", "facts", "trained"))
    files = certificate.get("files", {})  # none in those of earlier versions
    for name, fits in (
        ("start", type(start) is int),
        ("facts", isinstance(facts, dict) and all(isinstance(v, dict) for v in facts.values())),
        ("trained", isinstance(trained, list) and all(isinstance(n, str) for n in trained)),
        ("files", isinstance(files, dict) and all(map(are_digests, files.values()))),
    ):
        if not fits:
            raise ValueError(f"{file.name} is damaged: its {name!r} is missing or of another type")
    return certificate


class Certificate(Callback):
    """Certifies the run.

    checksums: its tensors'.   made: its certificate.   apart: in what ranks differ from rank 0.
    """

    def __init__(self, run: Run):
        super().__init__(run)
        config, mesh = run.config, run.mesh
        deep_ep = config.model.ep_dispatch == "deepep"
        belongs = {**run.identity, "read": things_read(config.data, run.made_of.now)}
        data = run.batches, run.held
        own = facts(certified(config), deep_ep, mesh, data, belongs, run.ops)
        files = files_of_data(config.data) if mesh.main else {}
        self.apart = between_ranks(own, mesh)
        self.checksums = Checksums(run.engine.parts, mesh)
        self.made = certify(own, self.checksums, run.start, files)

    def begin(self) -> None:
        run = self.run
        with run.mesh.control.agreeing(OSError):
            if run.mesh.main:
                name, digest = write(run.config.train.output_dir, self.made)
                run.metrics.say(f"certificate: {digest[:16]} in {name}")
        if self.apart:
            run.metrics.say(f"ranks differ: {self.apart}")


def of_run(run: Run) -> Certificate:
    """That of a run whose other callbacks need it."""
    return next(c for c in run.callbacks if isinstance(c, Certificate))
