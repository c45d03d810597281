"""What each process of a distributed test runs: see `launch` in test_trainer.py.

    python -m torch.distributed.run --nproc-per-node N distributed_worker.py FOLDER

For every mode that FOLDER/modes.json lists, which may name a folder in FOLDER, on the bins.pt and
the config.yaml of its folder: takes one training step, of which rank 0 writes loss, tokens, norm
and full gradients to <mode>.pt, or, where the mode starts with "train", several, of which it writes
what `several_steps` returns. A mode that starts with "run" is a whole run, whose arguments are a
configuration's path and what changes it. One that starts with "memory" has such arguments too: each
rank writes the most bytes that two steps allocate.
"""

import json
import pathlib
import sys

import torch
import torch.distributed as dist
from helpers import leave
from torch.distributed.tensor import DTensor

from tilewright.trainer import adapters, checkpoint, hf, memory_plan, mesh, train
from tilewright.trainer.batches import collate, padding
from tilewright.trainer.build import build_engine, build_model, choose_ops, compute_dtype
from tilewright.trainer.config import load
from tilewright.trainer.loss import language_modeling


def build(config, ranks):
    shape = hf.load_config(config.model.config_path)
    return shape, choose_ops(config.model, shape, ranks, compute_dtype(config.train))


def engine_of(config, ranks):
    shape, ops = build(config, ranks)
    return build_engine(config, shape, ranks, ops)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def micro_batches(config, ranks, bins):
    """The micro-batches that trainer/batches.py would give each rank: (a * world + rank). Or its
    parts.
    """
    t, step = config.train, []
    multiple = padding(config.data.pad_to_multiple_of, ranks.context)
    for a in range(t.gradient_accumulation_steps):
        start = (a * ranks.layout.data + ranks.batch_rank) * t.micro_batch_size
        step.append(collate(bins[start : start + t.micro_batch_size], multiple, ranks.context))
    return step


def one_step(config, ranks, bins):
    engine = engine_of(config, ranks)
    sums = engine.forward_backward(micro_batches(config, ranks, bins), language_modeling)
    norm = float(engine.divide())
    return {
        "loss": sums.mean,
        "tokens": sums.denominator,
        "norm": norm,
        "grads": {
            name: full(p.grad) for name, p in engine.model.named_parameters() if p.requires_grad
        },
    }


def several_steps(config, ranks, bins, steps=4):
    """Losses, norms before clipping, the routers' statistics, all-to-alls of the first step, and
    the weights.
    """
    engine, t = engine_of(config, ranks), config.train
    found = {"loss": [], "norm": [], "router": []}
    for i in range(steps):
        adapters.before_step(engine.model, config.lora, t.seed, i)
        batches = micro_batches(config, ranks, bins[i:] + bins[:i])
        with Count() as count:
            sums = engine.forward_backward(batches, language_modeling)
        found.setdefault("all_to_alls", count.calls)
        norm = engine.optim_step(max_norm=t.max_grad_norm)
        adapters.after_step(engine.model, engine.optimizer, config.lora, t.seed, i + 1)
        for key, value in (("loss", sums.mean), ("norm", norm), ("router", sums.router())):
            found[key].append(value)
    found["weights"] = {name: full(p.detach()) for name, p in engine.model.named_parameters()}
    return engine, found


def most_allocated(config, ranks):
    """The most bytes of tensors at one time while a model is built and takes two steps."""
    draw = torch.Generator().manual_seed(0)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        engine = engine_of(config, ranks)
        batch = memory_plan.full_batch(config, ranks)
        vocabulary = engine.model.config.vocab_size
        batch["input_ids"] = torch.randint(vocabulary, batch["input_ids"].shape, generator=draw)
        for _ in range(2):
            for _ in range(config.train.gradient_accumulation_steps):
                engine.forward_backward([batch], language_modeling)
            engine.optim_step(max_norm=config.train.max_grad_norm)
    events, changes = profile.profiler.kineto_results.experimental_event_tree(), []
    while events:
        event = events.pop()
        events += event.children
        if event.name == "[memory]":
            what = event.extra_fields
            changes.append((event.start_time_ns, what.ptr, what.alloc_size))
    live, total, most = {}, 0, 0  # without what was allocated before
    for _, address, size in sorted(changes, key=lambda change: change[0]):
        if size > 0:
            live[address] = size
            total += size
        else:
            total -= live.pop(address, 0)
        most = max(most, total)
    return most


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


def save(folder, engine, state):
    saver = checkpoint.Saver(str(folder), engine.mesh, False)
    return engine.save(saver, 1, state)


STATE = {"run": {}, "ops": {}}


def main(folder):
    root, ranks = pathlib.Path(folder), None
    for path, arguments in json.loads((root / "modes.json").read_text()).items():
        folder, name = (root / path).parent, pathlib.PurePath(path).name
        whole = name.startswith(("run", "memory"))
        file, *arguments = arguments if whole else (folder / "config.yaml", *arguments)
        config = load(str(file), arguments)
        bins = None if whole else torch.load(folder / "bins.pt", weights_only=False)
        if ranks is None:
            ranks = mesh.join(config.train)
        else:
            ranks = mesh.build(config.train, ranks.rank, ranks.size, ranks.device)
        if name.startswith("memory"):
            (folder / f"{name}_{ranks.rank}").write_text(str(most_allocated(config, ranks)))
            continue
        if whole:
            train.train(config, ranks)
            continue
        if name.startswith("train"):
            engine, found = several_steps(config, ranks, bins)
            if name == "train_and_save":
                written = save(folder, engine, STATE)
                engine.export(folder / "hf")
                found["moments"] = moments(engine.optimizer)
            if name == "train_after_loading":
                # load what another mode saved, into models that are sharded differently
                again = engine_of(config, ranks)
                again.load([written], {}, {})
                found["restored"] = {n: full(p.detach()) for n, p in again.model.named_parameters()}
                found["moments"] = moments(again.optimizer)
                for mode in hf.LOAD_MODES:
                    read = build_model(config, again.model.config, ranks, again.model.ops)
                    hf.load_weights(read, folder / "hf", mode=mode)
                    found[mode] = {n: full(p.detach()) for n, p in read.named_parameters()}
        else:
            found = one_step(config, ranks, bins)
        if ranks.main:
            torch.save(found, folder / f"{name}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    leave()
