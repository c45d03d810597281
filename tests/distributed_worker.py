"""What each process of a distributed test runs: see `launch` in test_trainer.py.

    python -m torch.distributed.run --nproc-per-node N distributed_worker.py FOLDER

Takes one training step in every mode that FOLDER/modes.json lists, on the bins of FOLDER/bins.pt, and rank 0 writes
loss, tokens, norm and full gradients to FOLDER/<mode>.pt.
"""

import json
import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tilewright.trainer import hf, train
from tilewright.trainer.config import load
from tilewright.trainer.data import collate
from tilewright.trainer.model import Ops
from tilewright.trainer.parallel import clip_gradients, init_distributed, unwrap


def one_step(config, world, bins):
    """Each rank takes the micro-batches that trainer/data.py would give it: (a * world + rank)."""
    t = config.train
    model = train.build_model(config, hf.load_config(config.model.config_path), world, Ops.resolve(dtype=torch.float32))
    step = []
    for a in range(t.gradient_accumulation_steps):
        start = (a * world.size + world.rank) * t.micro_batch_size
        step.append(collate(bins[start:start + t.micro_batch_size], config.data.pad_to_multiple_of))
    loss, tokens = train.train_step(model, step, config, world)
    norm = clip_gradients(list(model.parameters()), 0.0)
    grads = {}
    for name, p in unwrap(model).named_parameters():
        grads[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return {"loss": loss, "tokens": tokens, "norm": norm, "grads": grads}


def main(folder):
    folder = pathlib.Path(folder)
    bins = torch.load(folder / "bins.pt", weights_only=False)
    world = None
    for name, arguments in json.loads((folder / "modes.json").read_text()).items():
        config = load(str(folder / "config.yaml"), arguments)
        world = world or init_distributed(config.train)
        found = one_step(config, world, bins)
        if world.main:
            torch.save(found, folder / f"{name}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
