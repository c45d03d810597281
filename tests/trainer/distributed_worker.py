"""What each process of a distributed test runs: see `launch` in test_trainer.py.

    python -m torch.distributed.run --nproc-per-node N distributed_worker.py FOLDER

For every mode that FOLDER/modes.json lists, on the bins of FOLDER/bins.pt: takes one training step,
of which rank 0 writes loss, tokens, norm and full gradients to FOLDER/<mode>.pt, or, where the mode
starts with "train", several, of which it writes what `several_steps` returns. A mode that starts
with "run" is a whole run, whose arguments are a configuration's path and what changes it.
"""

import dataclasses
import json
import pathlib
import sys

import torch
import torch.distributed as dist
from helpers import leave
from torch.distributed.tensor import DTensor

from tilewright.trainer import adapters, checkpoint, hf, train
from tilewright.trainer.config import load
from tilewright.trainer.data import collate, padding
from tilewright.trainer.optim import build_optimizer
from tilewright.trainer.parallel import clip_gradients, context_parallel, init_distributed, unwrap


def build(config, world):
    shape = hf.load_config(config.model.config_path)
    return train.build_model(config, shape, world, train.choose_ops(config, shape, world))


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def micro_batches(config, world, bins):
    """Each rank takes the micro-batches that trainer/data.py would give it: (a * world + rank).
    Or its parts.
    """
    t, step = config.train, []
    for a in range(t.gradient_accumulation_steps):
        start = (a * world.data_size + world.data_rank) * t.micro_batch_size
        step.append(
            collate(
                bins[start : start + t.micro_batch_size], padding(config.data, world.cp), world.cp
            )
        )
    return step


def one_step(config, world, bins):
    model = build(config, world)
    loss, tokens, _ = train.train_step(model, micro_batches(config, world, bins), config, world)
    norm = clip_gradients(list(model.parameters()), 0.0)
    return {
        "loss": loss,
        "tokens": tokens,
        "norm": norm,
        "grads": {
            name: full(p.grad) for name, p in unwrap(model).named_parameters() if p.requires_grad
        },
    }


def several_steps(config, world, bins, steps=4):
    """Losses, norms before clipping, the routers' statistics, all-to-alls of the first step,
    and the weights.
    """
    model = build(config, world)
    optimizer = build_optimizer(unwrap(model), config.train)
    found = {"loss": [], "norm": [], "router": []}
    for i in range(steps):
        adapters.before_step(unwrap(model), config, i)
        with Count() as count:
            loss, _, router = train.train_step(
                model, micro_batches(config, world, bins[i:] + bins[:i]), config, world
            )
        found.setdefault("all_to_alls", count.calls)
        norm = clip_gradients(list(model.parameters()), config.train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        adapters.after_step(unwrap(model), optimizer, config, i + 1)
        for key, value in (("loss", loss), ("norm", norm), ("router", router)):
            found[key].append(value)
    found["weights"] = {name: full(p.detach()) for name, p in unwrap(model).named_parameters()}
    return model, optimizer, found


class Count:
    """Counts calls of all_to_all_single."""

    def __enter__(self):
        self.calls, self.real = 0, dist.all_to_all_single

        def counted(*args, **kwargs):
            self.calls += 1
            return self.real(*args, **kwargs)

        dist.all_to_all_single = counted
        return self

    def __exit__(self, *_):
        dist.all_to_all_single = self.real


def moments(optimizer):
    return [full(value) for state in optimizer.state.values() for value in state.values()]


def save(folder, model, optimizer, world, state):
    saver = checkpoint.Saver(str(folder), world, False)
    saver.save(1, unwrap(model), optimizer, state)
    return saver.folder(1)


STATE = {"run": {}, "ops": {}}


def main(folder):
    folder = pathlib.Path(folder)
    bins = (
        torch.load(folder / "bins.pt", weights_only=False)
        if (folder / "bins.pt").is_file()
        else None
    )
    world = None
    for name, arguments in json.loads((folder / "modes.json").read_text()).items():
        whole = name.startswith("run")
        config = (
            load(arguments[0], arguments[1:])
            if whole
            else load(str(folder / "config.yaml"), arguments)
        )
        world = world or init_distributed(config.train)
        world = dataclasses.replace(
            world, cp=context_parallel(config.train, world.size, world.device.type)
        )
        if whole:
            train.train(config, world)
            continue
        if name.startswith("train"):
            model, optimizer, found = several_steps(config, world, bins)
            if name == "train_and_save":
                written = save(folder, model, optimizer, world, STATE)
                hf.save_weights(model, folder / "hf")
            if (
                name == "train_after_loading"
            ):  # what another mode saved, into models that are spread otherwise
                again = build(config, world)
                checkpoint.restore(
                    written,
                    again,
                    other := build_optimizer(again, config.train),
                    world,
                    run={},
                    ops={},
                )
                found["restored"] = {n: full(p.detach()) for n, p in again.named_parameters()}
                found["moments"] = moments(other)
                for mode in hf.LOAD_MODES:
                    read = build(config, world)
                    hf.load_weights(read, folder / "hf", mode=mode)
                    found[mode] = {n: full(p.detach()) for n, p in read.named_parameters()}
            if name == "train_and_save":
                found["moments"] = moments(optimizer)
        else:
            found = one_step(config, world, bins)
        if world.main:
            torch.save(found, folder / f"{name}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    leave()
