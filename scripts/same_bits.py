"""Whether two commits of the trainer compute the same bits.

    python scripts/same_bits.py record A.json        # at the first commit
    python scripts/same_bits.py compare A.json       # at the second, on the same machine
    python scripts/same_bits.py compare A.json B.json

Trains small models of every kind and layout for four steps, two of them after a resume, and records
a hash of the checksums of all outputs, gradients and weights of each step, the losses and the
exported weights. `compare` exits with 1 and the names of the runs that differ; B.json gets both
hashes of each run, with what they were computed on.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
from tests.written.make import EXPERTS, LORA, NF4, SHAPE, train, write_model  # noqa: E402
from tilewright.core import platform  # noqa: E402

TWO = {**SHAPE, "num_hidden_layers": 2}
FSDP2 = {"data_parallel_mode": "fsdp2"}
# name -> shape of the model, ranks, section -> fields
RUNS = {
    "dense": (SHAPE, 1, {}),
    "bfloat16, recomputed": (
        TWO,
        1,
        {"train": {"enable_mixed_precision": True, "enable_gradient_checkpointing": True}},
    ),
    "muon": (TWO, 1, {"train": {"optimizer": "muon", "lr_decay_style": "cosine"}}),
    "anyprecision_adamw": (SHAPE, 1, {"train": {"optimizer": "anyprecision_adamw"}}),
    "sgd": (SHAPE, 1, {"train": {"optimizer": "sgd", "lr_decay_style": "linear"}}),
    "evaluation": (SHAPE, 1, {"data": {"val_set_size": 4, "sample_packing_method": "multipack"}}),
    "lora": (SHAPE, 1, {"lora": LORA}),
    "merged lora": (SHAPE, 1, {"lora": {**LORA, "merge_lora_interval": 2}}),
    "qlora with noise": (SHAPE, 1, {"lora": {**NF4, "enable_aqn": True}}),
    "experts": (EXPERTS, 1, {}),
    "lora of experts": (EXPERTS, 1, {"lora": LORA}),
    "fsdp2": (TWO, 2, {"train": FSDP2}),
    "fsdp2 with lora": (TWO, 2, {"train": FSDP2, "lora": LORA}),
    "ddp": (SHAPE, 2, {"train": {"data_parallel_mode": "ddp"}}),
    "expert parallel": (EXPERTS, 2, {"train": {**FSDP2, "expert_parallel_size": 2}}),
    "tensor parallel": (
        {**TWO, "num_key_value_heads": 2},
        2,
        {"train": {**FSDP2, "tensor_parallel_size": 2}, "model": {"merge_qkv": False}},
    ),
    "ulysses": (TWO, 2, {"train": {**FSDP2, "ulysses_parallel_size": 2}}),
    "ring": (TWO, 2, {"train": {**FSDP2, "ringattn_parallel_size": 2}}),
    "pipeline": (
        TWO,
        2,
        {"train": {**FSDP2, "pipeline_parallel_size": 2, "gradient_accumulation_steps": 2}},
    ),
    "pipeline with lora": (
        {**TWO, "tie_word_embeddings": True},
        2,
        {
            "train": {**FSDP2, "pipeline_parallel_size": 2, "gradient_accumulation_steps": 2},
            "lora": LORA,
        },
    ),
}


def run(folder: pathlib.Path, shape: dict, ranks: int, fields: dict) -> str:
    write_model(folder, shape, fields, {"checksum_steps": 1, "gradient_accumulation_steps": 2})
    train(folder, ranks, "--train.max_steps", "2")
    train(folder, ranks, "--train.load_checkpoint_path", "auto")
    digest = hashlib.sha256()
    rows = (folder / "out/metrics.jsonl").read_text().splitlines()
    for row in map(json.loads, rows):
        kept = {k: row[k] for k in ("step", "loss", "grad_norm", "eval_loss") if k in row}
        digest.update(json.dumps(kept, sort_keys=True).encode())
    for path in sorted((folder / "out").glob("checksums*.jsonl")):
        digest.update(path.read_bytes())
    for path in sorted((folder / "out").rglob("hf/*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def main() -> int:
    command, file = sys.argv[1], pathlib.Path(sys.argv[2])
    digests = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, what in RUNS.items():
            digests[name] = run(pathlib.Path(folder, name), *what)
            print(f"{name}: {digests[name]}", flush=True)
    if command == "record":
        file.write_text(json.dumps(digests, indent=1) + "\n")
        return 0
    before = json.loads(file.read_text())
    if sys.argv[3:]:
        about = {"date": str(datetime.date.today()), "load": os.getloadavg()}
        both = {name: [before.get(name), own] for name, own in digests.items()}
        row = {"about": {**about, **platform.provenance()}, "before and after": both}
        pathlib.Path(sys.argv[3]).write_text(json.dumps(row, indent=1) + "\n")
    differ = [name for name in digests if digests[name] != before.get(name)]
    print(
        f"differ: {', '.join(differ)}"
        if differ
        else f"{len(digests)} runs are the same bit for bit"
    )
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
