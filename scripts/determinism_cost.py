"""What determinism costs on a CPU, in ratios of interleaved medians of CPU seconds.

    python scripts/determinism_cost.py [--rounds 9] [--out X.json]

checksums: a training step and the checksums of as many numbers as gradients and weights, and of
    what modules return, over the step alone (`train.checksum_steps`).
outputs: the same with what modules return alone.
algorithms: a step with torch.use_deterministic_algorithms, over one without
    (`train.enable_full_determinism`).
unpermute: the op, whose sums are of a token's rows in the order of its choices, over index_add_,
    which adds rows in the order of experts.

One process and one thread; the model has 8 layers, H = 512, a vocabulary of 8,192 and random
weights, in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import time

import torch

from tilewright import ops
from tilewright.core import platform
from tilewright.trainer.build import engine_around
from tilewright.trainer.config import Config
from tilewright.trainer.data.batches import collate
from tilewright.trainer.losses.language_modeling import language_modeling
from tilewright.trainer.models.initialize import init_weights
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.ops_choice import Ops
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.plugins.proof.checksums import Checksums
from tilewright.trainer.plugins.proof.computation import Outputs

TOKENS = 1024
SHAPE = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": TOKENS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def interleaved(rounds, *calls):
    """Medians of the CPU seconds of each call, in turns; the first round is not counted."""
    seconds = [[] for _ in calls]
    for i in range(rounds + 1):
        for taken, call in zip(seconds, calls, strict=True):
            begun = time.process_time()
            call()
            if i:
                taken.append(time.process_time() - begun)
    return [statistics.median(taken) for taken in seconds]


def training(rounds):
    config = Config(
        model={"config_path": "unused"},
        data={"datasets": [{"path": "dummy"}]},
        train={"output_dir": "unused", "data_parallel_mode": "none"}
        | {"enable_mixed_precision": False, "enable_gradient_checkpointing": False},
    )
    model = Transformer(ModelConfig.from_hf(SHAPE), Ops.resolve())
    init_weights(model, 0)
    engine = engine_around(Parts(model), config.train, Mesh(), 1.0)
    ids = torch.randint(SHAPE["vocab_size"], (TOKENS,), generator=torch.Generator().manual_seed(0))
    batch = collate([[(ids.numpy(), ids.numpy())]], 1)
    sums = Checksums(Parts(model), Mesh())

    def step():
        engine.forward_backward([batch], language_modeling)
        engine.optim_step(1e-6, 1.0)

    def checksums():  # gradients are as large as weights, and gone after the step
        sums.read(torch.stack((sums.of_trained(), sums.of_trained())))

    def with_algorithms():
        torch.use_deterministic_algorithms(True)
        step()
        torch.use_deterministic_algorithms(False)

    outputs, recording = Outputs(Parts(model), Mesh()), []
    outputs.record(lambda: bool(recording))

    def with_outputs():
        recording.append(True)
        step()
        outputs.drop()
        recording.clear()

    plain, taken, recorded, deterministic = interleaved(
        rounds, step, checksums, with_outputs, with_algorithms
    )
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    return {
        "parameters_millions": millions,
        "tokens": TOKENS,
        "step_seconds": plain,
        "checksum_seconds": taken,
        "checksums": (recorded + taken) / plain,
        "outputs": recorded / plain,
        "checksum_seconds_per_billion": taken / millions * 1e3,
        "algorithms": deterministic / plain,
    }


def unpermuting(rounds, T=2048, K=8, E=64, H=2048):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(T, H, generator=g)
    index = torch.rand(T, E, generator=g).argsort(1)[:, :K].contiguous()
    weight = torch.rand(T, K, generator=g)
    made = ops.permute(x, index, E)
    rows, position = made.rows, made.position
    slots = torch.empty(T * K, dtype=torch.int64)
    slots[position.flatten().long()] = torch.arange(T * K)

    def added():
        scaled = rows * weight.flatten()[slots][:, None]
        return torch.zeros(T, H).index_add_(0, slots // K, scaled)

    def op():
        return ops.unpermute(rows, weight, position)

    torch.testing.assert_close(op(), added(), rtol=1e-4, atol=1e-4)
    ours, theirs = interleaved(rounds, op, added)
    return {"shape": {"T": T, "K": K, "E": E, "H": H}, "seconds": ours, "unpermute": ours / theirs}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out = f" --out {arguments.out.name}" if arguments.out else ""
    document = {
        "command": f"python scripts/determinism_cost.py --rounds {arguments.rounds}{out}",
        "environment": platform.describe(),
        "load": os.getloadavg(),
        "training": training(arguments.rounds),
        "unpermute": unpermuting(arguments.rounds),
    }
    text = json.dumps(document, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
