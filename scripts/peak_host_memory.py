"""The most host memory that exporting a model to Hugging Face's files, and loading them, takes.

    python scripts/peak_host_memory.py [--layers 28] [--hidden 1536] [--world 1]

A Qwen3 shape (by default of 1.5 B parameters), with weights that are all zero, in bfloat16, is
exported in files of at most 5 GB and loaded again. Prints the model's bytes and the peak of
resident memory above it.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import torch

from tilewright.trainer.checkpoint import hf
from tilewright.trainer.models.model import Ops, Transformer
from tilewright.trainer.models.model_config import ModelConfig


def resident() -> int:
    """Bytes that are resident and of no file: mapped pages of the files that are read are cache."""
    lines = dict(
        line.split(":") for line in pathlib.Path("/proc/self/status").read_text().splitlines()
    )
    return int(lines["RssAnon"].split()[0]) * 1024


def measured(what: str, run: Callable[[], None], weights: int) -> None:
    before, most, ended = resident(), [0], threading.Event()

    def sample() -> None:
        while not ended.wait(0.001):
            most[0] = max(most[0], resident())

    sampler, begin = threading.Thread(target=sample), time.monotonic()
    sampler.start()
    run()
    ended.set()
    sampler.join()
    above, seconds = most[0] - before, time.monotonic() - begin
    print(
        f"{what}: at most {above / 2**20:.0f} MiB above the model's {weights / 2**20:.0f} MiB "
        f"({above / weights:.1%}), {seconds:.1f} s",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    for name, default in (("layers", 28), ("hidden", 1536), ("inner", 8960), ("vocab", 151936)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--shard-bytes", type=int, default=5 * 10**9)
    options = parser.parse_args()
    config = ModelConfig.from_hf(
        {
            "model_type": "qwen3",
            "vocab_size": options.vocab,
            "hidden_size": options.hidden,
            "intermediate_size": options.inner,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.hidden // 128,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        }
    )
    with torch.device("meta"):
        model = Transformer(config, Ops.resolve("eager")).bfloat16()
    model.to_empty(device="cpu")
    model.tie()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters in bfloat16")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="peak_host_memory"))
    try:
        measured(
            "export",
            lambda: hf.save_weights(model, folder, max_shard_bytes=options.shard_bytes),
            weights,
        )
        measured("load", lambda: hf.load_weights(model, folder), weights)
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
