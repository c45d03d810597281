"""What each rank of a distributed test runs, from `run_modes` in ranks.py.

For every mode that FOLDER/modes.json lists, which may name a folder in FOLDER, on the bins.pt and
the config.yaml of its folder: takes one training step, of which rank 0 writes loss, tokens, norm
and full gradients to <mode>.pt, or, where the mode starts with "train" or "overflow", what
`several_steps` or `overflow` returns. A mode that starts with "run" is a whole run, whose arguments
are a configuration's path and what changes it; those of `REFUSED` end with an error. One that
starts with "memory" has such arguments too: each rank writes the most bytes that two steps
allocate.
"""

import functools
import json
import math
import pathlib
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from whole import built, parts_of, scored, taught

from bench.memory import most_allocated
from tilewright.kernels import tuning
from tilewright.nn import sharded
from tilewright.trainer import build as made
from tilewright.trainer import train
from tilewright.trainer.build import choose_ops, compute_dtype
from tilewright.trainer.checkpoint import checkpoint, hf
from tilewright.trainer.config import load
from tilewright.trainer.data.batches import collate
from tilewright.trainer.data.columns.column import COLUMNS
from tilewright.trainer.engine import Engine, NotFinite
from tilewright.trainer.losses.language_modeling import language_modeling
from tilewright.trainer.optim import matrices
from tilewright.trainer.parallel import mesh
from tilewright.trainer.plugins import adapters


def build(config, ranks):
    shape = hf.load_config(config.model.config_path, config.model.foundation)
    return shape, choose_ops(config.model, shape, ranks, compute_dtype(config.train))


def engine_of(config, ranks):
    shape, ops = build(config, ranks)
    return built(config, shape, ranks, ops)


def full(tensor):
    return sharded.whole(tensor.detach())


def whole(ranks, tensors):
    """Full tensors by name, of all stages of a pipeline."""
    tensors, group = {name: full(t) for name, t in tensors.items()}, ranks.pipeline.group
    if group is None:
        return tensors
    parts = [None] * ranks.pipeline.size
    dist.all_gather_object(parts, tensors, group=group)
    for name in {n for i, p in enumerate(parts) for n in p if any(n in q for q in parts[:i])}:
        first, second = (p[name] for p in parts if name in p)  # of a tied weight
        assert torch.equal(first, second), name
    return {name: t for part in parts for name, t in part.items()}


def micro_batches(config, ranks, bins):
    """The micro-batches that trainer/batches.py would give each rank: (a * world + rank). Or its
    parts.
    """
    t, step = config.train, []
    multiple = mesh.padding(config.data.pad_to_multiple_of, ranks.context, ranks.layout.tp)
    _, _, *own = bins[0][0]
    further = {n: replace(COLUMNS[n], width=v.shape[1]) for o in own for n, v in o.items()}
    for a in range(t.gradient_accumulation_steps):
        start = (a * ranks.layout.data + ranks.batch_rank) * t.micro_batch_size
        some = bins[start : start + t.micro_batch_size]
        step.append(collate(some, multiple, ranks.context, further))
    return step


def one_step(config, ranks, bins):
    engine = engine_of(config, ranks)
    sums = engine.forward_backward(micro_batches(config, ranks, bins), language_modeling)
    norm = float(engine.divide())
    return {
        "loss": sums.mean,
        "tokens": sums.denominator,
        "norm": norm,
        "grads": gradients(engine),
    }


def gradients(engine):
    named = engine.model.named_parameters()
    return whole(engine.mesh, {name: p.grad for name, p in named if p.requires_grad})


def weights(model, ranks):
    return whole(ranks, {name: p.detach() for name, p in model.named_parameters()})


def several_steps(config, ranks, bins, steps=None, calls=1, evaluates=True):
    """Losses, norms before clipping, the routers' statistics, all-to-alls and clipped gradients of
    the first step, the loss of the second step's batches before it, and the weights.

    calls: by which each step's micro-batches are accumulated.   evaluates: or has no loss of the
    second step's batches.
    """
    engine, t = engine_of(config, ranks), config.train
    found = {"loss": [], "norm": [], "router": []}

    # Copies: DDP's are views of its buckets, which the next step overwrites.
    hook = engine.optimizer.register_step_pre_hook(
        lambda *_: found.update(grads={n: g.clone() for n, g in gradients(engine).items()})
    )
    for i in range(min(4, t.max_steps) if steps is None else steps):
        adapters.before_step(engine.parts, config.lora, t.seed, i)
        batches = micro_batches(config, ranks, bins[i:] + bins[:i])
        with Count() as count:
            size = len(batches) // calls
            parts = [batches[k : k + size] for k in range(0, len(batches), size)]
            sums = [engine.forward_backward(part, language_modeling) for part in parts]
        found.setdefault("all_to_alls", count.calls)
        if i == 1 and evaluates:
            # Between gradients and the step, both of which it must leave alone.
            evaluated = engine.forward(batches, language_modeling)
            found["evaluated"], found["evaluated_router"] = evaluated.mean, evaluated.router()
        norm = engine.optim_step(max_norm=t.max_grad_norm)
        hook.remove()
        adapters.after_step(engine.parts, engine.optimizer, config.lora, t.seed, i + 1, engine.mesh)
        loss, tokens = sum(part.totals for part in sums).tolist()
        router = sums[0].router() if calls == 1 else {}
        for key, value in (("loss", loss / tokens), ("norm", norm), ("router", router)):
            found[key].append(value)
    found["weights"] = weights(engine.model, ranks)
    return engine, found


def overflow(config, ranks, bins):
    """What a loss that is NaN on the last rank alone does: the errors of every rank's step, and
    whether all weights stay.
    """

    def loss(per_token, batch):
        total, tokens = language_modeling(per_token, batch)
        return total * (math.nan if ranks.rank == ranks.size - 1 else 1.0), tokens

    engine = engine_of(config, ranks)
    before = weights(engine.model, ranks)
    batches, error = micro_batches(config, ranks, bins), None
    engine.forward_backward(batches, loss)
    try:
        engine.optim_step(max_norm=1.0)
    except NotFinite as caught:
        error = str(caught)
    errors = [None] * ranks.size
    dist.all_gather_object(errors, error)
    after = weights(engine.model, ranks)
    return {"errors": errors, "same": all(torch.equal(t, after[n]) for n, t in before.items())}


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


def moments(model, optimizer, ranks):
    """By the name of the parameter and of the moment."""
    named = {
        f"{name}.{key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
    return whole(ranks, named)


def rounded(config, ranks, steps=3):
    """Weights and states after steps whose gradients follow from the weights, element by element:
    the same under every layout.
    """
    engine = engine_of(config, ranks)
    for step in range(steps):
        for p in engine.parameters:
            if p.requires_grad:
                grad = (p.detach().float() * (100 + step)).sin()
                p.grad = grad.to(getattr(p, "grad_dtype", None) or p.dtype)
        engine.optimizer.step()
    found = weights(engine.model, ranks) | moments(engine.model, engine.optimizer, ranks)
    return {name: t for name, t in found.items() if not name.endswith(".step")}


def replicas(config, ranks, bins):
    """Whether every rank has the same bits as its replica after all steps, and the last loss."""
    engine, t = engine_of(config, ranks), config.train
    for i in range(t.max_steps):
        batches = micro_batches(config, ranks, bins[i % 4 :] + bins[: i % 4])
        sums = engine.forward_backward(batches, language_modeling)
        engine.optim_step(max_norm=t.max_grad_norm)
    own = [sharded.shard(p) for p in engine.parameters]
    own += [sharded.shard(s) for p in engine.parameters for s in engine.optimizer.state[p].values()]
    every = [None] * ranks.size
    dist.all_gather_object(every, [t.clone() for t in own])
    half = ranks.size // 2
    same = [
        all(torch.equal(a, b) for a, b in zip(every[i], every[i + half], strict=True))
        for i in range(half)
    ]
    return {"same": all(same), "loss": sums.mean, "weights": weights(engine.model, ranks)}


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
        for i, (p, value) in enumerate(zip(tensors, values, strict=True)):
            for dim in range(p.dim()):
                here = [n for run in matrices.rows_here(p, dim) for n in run]
                value = value.index_select(dim, torch.tensor(here, dtype=torch.long))
            found[f"{name} {i}, rows"] = p.to_local().detach(), value
    return found


REFUSED = ("run_tampered", "run_flipped", "run_damaged", "run_unwritable")
REFUSED += ("run_other", "run_other_ring", "run_other_pipeline")


def refused(config, ranks, name, folder):
    """The error of a run: of "run_tampered", in which rank 1 reads other tuned tables than the
    others, or "run_flipped", in which the last rank flips a bit of its shard of a gradient in the
    second step, or "run_other...", whose reference model has another weight.
    """
    tables, divide, steps, second = tuning.TABLES, Engine.divide, [], made.second_model

    def other(*arguments):
        parts = second(*arguments)
        named = dict(parts.model.named_parameters())
        with torch.no_grad():
            for norm in named.keys() & {"model.norm.weight"}:
                named[norm].mul_(1.5)
        return parts

    def flipping(self, *args):
        norm = divide(self, *args)
        steps.append(norm)
        if len(steps) == 2 and ranks.rank == ranks.size - 1:
            named = dict(self.model.named_parameters())
            gradient = named["model.layers.1.self_attn.o_proj.weight"].grad.to_local()
            gradient.view(-1).view(torch.int32)[7] ^= 1
        return norm

    if name == "run_tampered":
        tuning.TABLES = folder / f"tuned_{int(ranks.rank == 1)}"
    elif name == "run_flipped":
        Engine.divide = flipping
    elif name.startswith("run_other"):
        made.second_model = other
    try:
        train.train(config, ranks)
    except (OSError, ValueError) as error:
        return str(error)
    finally:
        tuning.TABLES, Engine.divide, made.second_model = tables, divide, second
    return ""


STATE = {"run": {}, "ops": {}}


class Groups:
    """The process groups of all modes. A mode gets those of earlier ones again, never one twice:
    each connects all its ranks, and has a thread that wakes up a hundred times a second.
    """

    def __init__(self):
        self.real, self.made, self.used = dist.new_group, {}, {}
        for module in (dist, dist.distributed_c10d, dist.device_mesh):
            module.new_group = self.new_group

    def new_group(self, ranks=None, timeout=None, backend=None, **options):
        key = ranks and tuple(ranks), timeout, backend
        number = self.used[key] = self.used.get(key, 0) + 1
        if (key, number) not in self.made:
            self.made[key, number] = self.real(ranks, timeout, backend, **options)
        return self.made[key, number]


def main(folder):
    root, ranks, groups = pathlib.Path(folder), None, Groups()
    for path, arguments in json.loads((root / "modes.json").read_text()).items():
        folder, name = (root / path).parent, pathlib.PurePath(path).name
        whole = name.startswith(("run", "memory", "evaluate", "teacher"))
        file, *arguments = arguments if whole else (folder / "config.yaml", *arguments)
        config = load(str(file), arguments)
        bins = None if whole else torch.load(folder / "bins.pt", weights_only=False)
        groups.used.clear()
        if ranks is None:
            ranks = mesh.join(config.train)
        else:
            ranks = mesh.build(config.train, ranks.rank, ranks.size, ranks.device)
        if name.startswith("memory"):
            (folder / f"{name}_{ranks.rank}").write_text(str(most_allocated(config, ranks)))
            continue
        if name.startswith("evaluate"):
            scored(config, ranks, folder / f"{name}.jsonl", each_token="rewards" not in name)
            continue
        if name.startswith("teacher"):
            taught(config, ranks, folder / name)
            continue
        if name in REFUSED:
            kind = name.removeprefix("run_")
            said = refused(config, ranks, name, folder)
            (folder / f"{kind}_{ranks.rank}.txt").write_text(said)
            continue
        if whole:
            train.train(config, ranks)
            continue
        if config.train.enable_compile:  # graphs, without what a compiler takes
            torch.compile = functools.partial(torch.compile, backend="eager")
        if name == "placements":
            found = placements()
        elif name.startswith("rounds"):
            found = rounded(config, ranks)
        elif name.startswith("replicas"):
            found = replicas(config, ranks, bins)
        elif name.startswith("overflow"):
            found = overflow(config, ranks, bins)
        elif name.startswith("train"):
            engine, found = several_steps(
                config,
                ranks,
                bins,
                calls=1 + name.endswith("_calls"),
                evaluates=not name.endswith("_compiled"),  # which would compile again
            )
            if name == "train_and_save":
                written = save(folder, engine, STATE)
                engine.export(folder / "hf")
                if config.lora.enable_lora:
                    engine.export(folder / "adapter", adapter_of="base")
                found["moments"] = moments(engine.model, engine.optimizer, ranks)
            if name == "train_after_loading":
                # load what another mode saved, into models that are sharded differently
                again = engine_of(config, ranks)
                again.load([written], {}, {})
                found["restored"] = weights(again.model, ranks)
                found["moments"] = moments(again.model, again.optimizer, ranks)
                for mode in hf.LOAD_MODES:
                    read = parts_of(config, again.model.config, ranks, again.model.ops)
                    hf.load_weights(read, folder / "hf", mode=mode)
                    found[mode] = weights(read.model, ranks)
        else:
            found = one_step(config, ranks, bins)
        if ranks.main:
            torch.save(found, folder / f"{name}.pt")
    dist.destroy_process_group()
