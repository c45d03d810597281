"""Times the load of a checkpoint with its checksums compared and without, in turns, and the
comparison alone.

    python scripts/checkpoint_cost.py FILE.json

The system's folder for temporary files gets a checkpoint of 1 GB, which is removed. Times are of
files that are read from the disk, as where a run starts again, and of files in the page cache; all
are in FILE, and the least of nine counts.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from tilewright.core import platform
from tilewright.trainer.build import build_model, choose_ops, engine_around
from tilewright.trainer.checkpoint import checkpoint, hf
from tilewright.trainer.checkpoint.checkpoint_files import read_state, share, verify
from tilewright.trainer.config import load
from tilewright.trainer.parallel.mesh import join

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def main(root: pathlib.Path, target: pathlib.Path) -> None:
    (root / "config.json").write_text(json.dumps(SHAPE))
    named = {"model.config_path": root, "train.output_dir": root / "out"}
    named |= {"data.datasets": '[{"path": "dummy"}]', "train.enable_mixed_precision": "false"}
    config = load(None, [f"--{name}={value}" for name, value in named.items()])
    mesh = join(config.train)
    shape = hf.load_config(str(root))
    model, train = config.model, config.train
    ops = choose_ops(model, shape, mesh, torch.float32)
    parts = build_model(model, config.lora, shape, config.data, train, mesh, ops)
    engine = engine_around(parts, train, mesh, 1.0)
    for p in engine.parameters:
        p.grad = torch.ones_like(p)
    engine.optimizer.step()
    engine.zero()
    saver = checkpoint.Saver(str(root / "out"), mesh, False)
    folder = engine.save(saver, 1, {"run": {}, "ops": {}})
    files = [file for file in folder.rglob("*") if file.is_file()]

    def dropped() -> None:  # from the page cache
        for file in files:
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    ways: dict[str, Callable[[], object]] = {
        "with checksums": lambda: engine.load([folder], {}, {}),
        "without": lambda: engine.load([folder], {}, {}, False),
        "checksums alone": lambda: [
            verify(folder, part) for part in share(folder, read_state(folder), 0, 1)
        ],
    }
    times: dict[str, list[float]] = {}
    for _ in range(9):
        for name, call in ways.items():
            dropped()
            times.setdefault(f"{name}, from the disk", []).append(seconds(call))
            times.setdefault(f"{name}, from the page cache", []).append(seconds(call))
    about = {"date": str(datetime.date.today()), "load": os.getloadavg(), **platform.provenance()}
    row = {"about": about, "bytes": sum(f.stat().st_size for f in files), "seconds": times}
    target.write_text(json.dumps(row, indent=1) + "\n")
    print(f"{row['bytes'] / 1e9:.2f} GB on {mesh.device}; the least of 9, in seconds:")
    for name, samples in times.items():
        print(f"{name:40} {min(samples):.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(pathlib.Path(made), pathlib.Path(sys.argv[1]))
