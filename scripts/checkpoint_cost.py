"""Times the load of a checkpoint with its checksums compared and without, in turns, and the
comparison alone.

    python scripts/checkpoint_cost.py [FOLDER]

FOLDER (default: the system's folder for temporary files) gets a checkpoint of 1 GB, which is
removed. Times are of a file in the page cache; the least of nine counts.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from tilewright.trainer import checkpoint, hf
from tilewright.trainer.build import build_engine, choose_ops
from tilewright.trainer.checkpoint_files import read_state, share, verify
from tilewright.trainer.config import load
from tilewright.trainer.mesh import join

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


def main(root: pathlib.Path) -> None:
    (root / "config.json").write_text(json.dumps(SHAPE))
    named = {"model.config_path": root, "train.output_dir": root / "out"}
    named |= {"data.datasets": '[{"path": "dummy"}]', "train.enable_mixed_precision": "false"}
    config = load(None, [f"--{name}={value}" for name, value in named.items()])
    mesh = join(config.train)
    shape = hf.load_config(str(root))
    engine = build_engine(config, shape, mesh, choose_ops(config.model, shape, mesh, torch.float32))
    for p in engine.parameters:
        p.grad = torch.ones_like(p)
    engine.optimizer.step()
    engine.zero()
    saver = checkpoint.Saver(str(root / "out"), mesh, False)
    folder = engine.save(saver, 1, {"run": {}, "ops": {}})
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    with_checksums, without, alone = [], [], []
    for _ in range(9):
        with_checksums.append(seconds(lambda: engine.load([folder], {}, {})))
        without.append(seconds(lambda: engine.load([folder], {}, {}, False)))
        alone.append(
            seconds(
                lambda: [verify(folder, part) for part in share(folder, read_state(folder), 0, 1)]
            )
        )
    print(f"{size / 1e9:.2f} GB on {mesh.device}; the least of 9, in seconds:")
    least, base = min(with_checksums), min(without)
    print(f"with checksums {least:.3f}, without {base:.3f} ({100 * (least / base - 1):+.1f} %)")
    print(f"the checksums alone {min(alone):.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as made:
        main(pathlib.Path(made))
