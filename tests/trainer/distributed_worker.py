"""What each process of a distributed test runs: see `launch` in test_trainer.py.

    python -m torch.distributed.run --nproc-per-node N distributed_worker.py FOLDER

For every mode that FOLDER/modes.json lists, which may name a folder in FOLDER, on the bins.pt and
the config.yaml of its folder: takes one training step, of which rank 0 writes loss, tokens, norm
and full gradients to <mode>.pt, or, where the mode starts with "train", several, of which it writes
what `several_steps` returns. A mode that starts with "run" is a whole run, whose arguments are a
configuration's path and what changes it.
"""

import json
import pathlib
import sys

import torch
import torch.distributed as dist
from helpers import leave
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tilewright.trainer import adapters, checkpoint, hf, matrices, mesh, train
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
    multiple = padding(config.data.pad_to_multiple_of, ranks.context, ranks.layout.tp)
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
    """Losses, norms before clipping, the routers' statistics, all-to-alls and clipped gradients of
    the first step, and the weights.
    """
    engine, t = engine_of(config, ranks), config.train
    found = {"loss": [], "norm": [], "router": []}
    parameters = dict(engine.model.named_parameters())

    def keep_gradients(*_):
        found["grads"] = {n: full(p.grad) for n, p in parameters.items() if p.grad is not None}

    hook = engine.optimizer.register_step_pre_hook(keep_gradients)
    for i in range(steps):
        adapters.before_step(engine.model, config.lora, t.seed, i)
        batches = micro_batches(config, ranks, bins[i:] + bins[:i])
        with Count() as count:
            sums = engine.forward_backward(batches, language_modeling)
        found.setdefault("all_to_alls", count.calls)
        norm = engine.optim_step(max_norm=t.max_grad_norm)
        hook.remove()
        adapters.after_step(engine.model, engine.optimizer, config.lora, t.seed, i + 1)
        for key, value in (("loss", sums.mean), ("norm", norm), ("router", sums.router())):
            found[key].append(value)
    found["weights"] = {name: full(p.detach()) for name, p in engine.model.named_parameters()}
    return engine, found


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


def placements():
    """Results of `compute_whole` on shards, and on whole matrices, by placements of a 2 x 2 mesh.

    The computation mixes all elements of a matrix, so that a shard alone would give another result.
    """
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def mixed(stacks):
        return [(s.double() * s.double().sum((-2, -1), keepdim=True)).float() for s in stacks]

    def sharded(rows, columns, *placed):
        return [distribute_tensor(torch.randn(rows, columns), both, placed) for _ in range(3)]

    torch.manual_seed(5)
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 12, bias=False) for _ in range(3)))
    whole = [layer.weight.detach().clone() for layer in model]
    for layer, style in zip(
        model, (ColwiseParallel, RowwiseParallel, ColwiseParallel), strict=True
    ):
        parallelize_module(layer, both["tensor"], style())
    fully_shard(model, mesh=both["data"])
    kinds = {"fsdp2 x tp": (list(model.parameters()), whole)}
    for placed in ((Shard(0), Shard(1)), (Shard(1), Replicate()), (Replicate(), Shard(0))):
        tensors = sharded(5, 7, *placed)
        kinds[str(placed)] = tensors, [full(t) for t in tensors]
    # Each rank of "tensor" has rows of both halves, as of gate and up; "data" shards columns.
    strided = type(next(model.parameters()).placements[0])(0, split_factor=2)
    values = [torch.randn(8, 6) for _ in range(3)]
    i, j = both.get_coordinate()
    parts = [v.view(2, 2, 2, 6)[:, j].reshape(4, 6).chunk(2, 1)[i].contiguous() for v in values]
    halves = [
        DTensor.from_local(part, both, (Shard(1), strided), shape=(8, 6), stride=(6, 1))
        for part in parts
    ]
    kinds["halves"] = halves, values
    experts = [distribute_tensor(torch.randn(4, 6, 3), both, (Shard(1), Shard(0)))]
    kinds["experts"] = experts, [full(t) for t in experts]
    found = {}
    for name, (tensors, values) in kinds.items():
        same = matrices.alike(dict.fromkeys(tensors, matrices.Parts()))
        shards = {p: p.to_local().detach().clone().contiguous() for p in tensors}
        matrices.compute_whole(same, shards, mixed)
        results = [
            full(
                DTensor.from_local(s, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
            )
            for p, s in shards.items()
        ]
        for i, (a, b) in enumerate(zip(results, mixed(values), strict=True)):
            found[f"{name} {i}"] = a, b
    return found


STATE = {"run": {}, "ops": {}}


def main(folder):
    root, ranks = pathlib.Path(folder), None
    for path, arguments in json.loads((root / "modes.json").read_text()).items():
        folder, name = (root / path).parent, pathlib.PurePath(path).name
        whole = name.startswith("run")
        file, *arguments = arguments if whole else (folder / "config.yaml", *arguments)
        config = load(str(file), arguments)
        bins = None if whole else torch.load(folder / "bins.pt", weights_only=False)
        if ranks is None:
            ranks = mesh.join(config.train)
        else:
            ranks = mesh.build(config.train, ranks.rank, ranks.size, ranks.device)
        if whole:
            train.train(config, ranks)
            continue
        if name == "placements":
            found = placements()
        elif name.startswith("train"):
            engine, found = several_steps(config, ranks, bins, min(4, config.train.max_steps))
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
