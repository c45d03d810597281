"""The certificate of a run: all that its bits depend on, gathered from every rank.

Rank 0 writes it to certificate.json in the run's folder before the first step:

    {"schema", "start", "facts": {kind: {name: value}}, "trained": [names]}

start: optimizer steps done.   trained: the order of tensors in checksums.jsonl (`assertion.py`).
Not among the facts are fields that change no number, paths (their contents are), and how many steps
a run takes (the learning rate of each step is compared).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from tilewright import platform
from tilewright.kernels import tuning
from tilewright.selection import operations
from tilewright.trainer.batches import Batches
from tilewright.trainer.checksums import Checksums
from tilewright.trainer.config import Config
from tilewright.trainer.mesh import Mesh

FILE = "certificate.json"
SCHEMA = 1
Facts = dict[str, dict[str, Any]]
# Fields that change no number of a step, and those whose contents are other facts.
LEFT_OUT = {
    "model": {"model_path", "config_path", "tokenizer_path"},
    "data": {
        "datasets",
        "test_datasets",
        "dataset_prepared_path",
        "select_columns",
        "eval_sample_packing",
        "sample_packing_mp_start_method",
        "dataloader_num_workers",
        "dataloader_prefetch_factor",
        "dataloader_pin_memory",
        "val_set_size",
        "dataset_num_proc",
        "dataset_shard_num",
        "dataset_shard_idx",
        "num_dataset_shards_to_save",
        "skip_prepare_dataset",
        "push_dataset_to_hub",
        "hf_use_auth_token",
    },
    "train": {
        "num_train_epochs",
        "max_steps",
        "load_weights_mode",
        "allow_cuda_launch_blocking",
        "ignore_memory_plan",
        "empty_cache_steps",
        "gc_steps",
        "output_dir",
        "ckpt_manager",
        "save_steps",
        "save_epochs",
        "save_async",
        "save_total_limit",
        "save_hf_weights",
        "load_checkpoint_path",
        "checksum_steps",
        "assert_deterministic",
        "log_format",
        "use_wandb",
        "wandb_project",
        "wandb_name",
        "wandb_tags",
        "wandb_log_interval",
        "use_tensorboard",
        "plot_loss",
        "enable_profiling",
        "profile_start_step",
        "profile_end_step",
        "profile_trace_dir",
        "profile_record_shapes",
        "profile_profile_memory",
        "profile_with_stack",
        "profile_rank0_only",
    },
    "lora": {"save_lora_only"},
}
# Facts that are hashes, which a sentence does not show: their names in it, by kind, or kind and
# name.
HASHES = {
    "launch": "the configuration of launch {}",
    "tuned table": "the tuned table of {}",
    "initial weight": "the initial weight of {}",
    "environment code": "the code of tilewright",
    "data contents": "the content of the data",
    "data order": "the order of samples",
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
        return f"{self.kind} {self.name} is {shown[0]} {here} and {shown[1]} {there}"


def facts(
    config: Config, mesh: Mesh, batches: Batches, belongs: Facts, chosen: dict[str, str]
) -> Facts:
    """This rank's, causes before what they have an effect on; without the initial weights.

    belongs: what `build.identity` returns.   chosen: the implementation of each op.
    """
    device = platform.device_name(mesh.device.type)
    made = config.model_dump(mode="json")
    found = {
        "environment": platform.provenance(),
        "setting": {
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        },
        "layout": {"processes": mesh.size, **dataclasses.asdict(mesh.layout)},
        "field": {
            f"{section}.{name}": value
            for section, left_out in LEFT_OUT.items()
            for name, value in made[section].items()
            if name not in left_out
        },
        "model": belongs["model"],
        "implementation": chosen,
        "launch": launches(chosen, mesh.device),
        "tuned table": {f"{op} for {device}": h for op, h in tuning.hashes(mesh.device).items()},
        "data": {**belongs["data"], "order": order(batches)},
    }
    return json.loads(json.dumps(found))


def order(batches: Batches) -> str:
    """SHA-256 of the order of samples in the present epoch, bin by bin."""
    digest = hashlib.sha256(np.asarray(batches.order(), np.int64).tobytes())
    for samples in batches.bins.bins:
        digest.update(np.asarray([len(samples), *samples], np.int64).tobytes())
    return digest.hexdigest()


def launches(chosen: dict[str, str], device: torch.device) -> dict[str, str]:
    """SHA-256 of the configurations of each launch, for the keys that the compile gate compiles."""
    found = {}
    for op, name in chosen.items():
        for tunable in operations()[op].implementation(name).tunables():
            configs = [[tunable.named(k), tunable.config(device, *k)] for k in tunable.keys]
            text = json.dumps(configs, sort_keys=True)
            found[tunable.name] = hashlib.sha256(text.encode()).hexdigest()
    return found


def differences(ours: Facts, theirs: Facts) -> Iterator[Difference]:
    """By kind and name; what one of the two lacks is None there."""
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
    """In what ranks differ from rank 0, if they do, on every rank."""
    first = mesh.control.broadcast(own if mesh.main else None)
    by_rank = mesh.control.gather(list(differences(own, first)))
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, found in enumerate(by_rank):
        for one in found:
            ranks.setdefault((one.kind, one.name), []).append(rank)
    said = []
    for rank, found in enumerate(by_rank):
        for one in found:
            where = ranks[one.kind, one.name]
            if where[0] == rank:
                more = f" and {len(where) - 1} more" if len(where) > 1 else ""
                said.append(one.said(f"on rank {rank}{more}", "on rank 0"))
    return listed(said) if said else None


def certify(own: Facts, checksums: Checksums, start: int) -> dict[str, Any]:
    """The certificate of the whole run. Every rank must call it."""
    values = checksums.weights()
    weights = {n: f"{v & (1 << 64) - 1:016x}" for n, v in zip(checksums.names, values, strict=True)}
    return {
        "schema": SCHEMA,
        "start": start,
        "facts": {**own, "initial weight": weights},
        "trained": checksums.trained,
    }


def write(folder: str, certificate: dict[str, Any]) -> str:
    """Writes the file, and returns its hash."""
    text = json.dumps(certificate, indent=1) + "\n"
    path = pathlib.Path(folder, FILE)
    aside = path.with_name(f".{FILE}.partial")
    aside.write_text(text)
    aside.replace(path)
    return hashlib.sha256(text.encode()).hexdigest()
