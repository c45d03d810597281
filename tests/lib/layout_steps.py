"""Training steps that test_check_layout.py gives to `tilewright check-layout`: right in several
layouts, and the same with one fault each.
"""

import enum
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tilewright_lab.check_layout import Step
from tilewright_lab.check_layout import ranks as check_layout_ranks

VOCAB, HIDDEN, WIDE, EXPERTS = 24, 8, 16, 4
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
LENGTHS = (9, 3, 7, 5)  # tokens of each row: ranks that share rows have unequal numbers


class Join(torch.autograd.Function):
    """All ranks' rows of x, and the sum of their gradients."""

    @staticmethod
    def forward(ctx, x, rows):
        ctx.rows = rows
        return torch.cat(collected(x, rows))

    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous()
        dist.all_reduce(dy)
        return dy.split(ctx.rows)[dist.get_rank()], None


class Part(torch.autograd.Function):
    """This rank's rows of the sum of all ranks' x."""

    @staticmethod
    def forward(ctx, x, rows):
        ctx.rows, x = rows, x.clone()
        dist.all_reduce(x)
        return x.split(rows)[dist.get_rank()]

    @staticmethod
    def backward(ctx, dy):
        return torch.cat(collected(dy.contiguous(), ctx.rows)), None


def collected(x, rows):
    """Tensors of all ranks, with these numbers of rows; Gloo takes equal ones."""
    padded = F.pad(x, (0, 0, 0, max(rows) - len(x)))
    parts = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(parts, padded)
    return [part[:n] for part, n in zip(parts, rows, strict=True)]


class Enter(torch.autograd.Function):
    """Into tensor parallelism: gradients are summed."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous()
        dist.all_reduce(dy)
        return dy


class Leave(torch.autograd.Function):
    """Out of tensor parallelism: activations are summed."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy


class Experts(nn.Module):
    """The first `len(weight)` of EXPERTS from `first` on; every token's best one. rows: each rank's
    number of tokens, where experts are sharded.
    """

    def __init__(self, rows=None):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / 3)
        self.rows, self.first = rows, 0

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1, keepdim=True)
        if self.rows is not None:
            x, chosen = (Join.apply(t, self.rows) for t in (x, chosen.to(x)))
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.weight):
            y = y + (chosen == self.first + i) * (x @ expert)
        return weight * (y if self.rows is None else Part.apply(y, self.rows))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN, bias=False)
        self.split = False

    def forward(self, x):
        if not self.split:
            return self.down(self.up(x).tanh())
        return Leave.apply(self.down(self.up(Enter.apply(x)).tanh()))


class Model(nn.Module):
    def __init__(self, rows=None):
        super().__init__()
        self.embed, self.mlp = nn.Embedding(VOCAB, HIDDEN), Mlp()
        self.experts, self.norm = Experts(rows), nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.mlp(x)
        return self.head(self.norm(x + self.experts(x)))


def rows_of(first=0, step=1):
    """(inputs, targets) of every step-th row."""
    draw = torch.Generator().manual_seed(7)
    rows = [torch.randint(VOCAB, (n + 1,), generator=draw) for n in LENGTHS]
    rows = rows[first::step]
    return torch.cat([r[:-1] for r in rows]), torch.cat([r[1:] for r in rows])


def norm_of(grads):
    return torch.nn.utils.get_total_norm(list(grads))


def grads_of(model):
    return [p.grad for p in model.parameters()]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


# ---- data parallelism: the loss is the sum over a rank's tokens by the tokens of all ranks


def data(layout, rank, world_size):
    """ddp, fsdp2, and hand-written, with faults."""
    model, total, fault = Model(), sum(LENGTHS), layout.partition("-")[2]
    ids, targets = rows_of(rank, world_size)
    if fault == "equal":
        ids, targets = (t.chunk(world_size)[rank] for t in rows_of())
    if fault == "same":  # as without a sampler
        ids, targets = rows_of()
    if fault == "overlap":  # a row too many
        ids, targets = torch.cat((ids, rows_of()[0][:1])), torch.cat((targets, rows_of()[1][:1]))
    if fault == "same_slice":
        ids, targets = rows_of(0, world_size)
    if fault == "fewer" and rank == 1:
        ids, targets = ids[:-1], targets[:-1]
    if fault == "shifted" and rank == 1:
        targets = targets.roll(1)
    if layout == "other_weights" and rank == 1:
        model = Model()
    averaged = layout.startswith(("ddp", "fsdp2")) or fault == "mean"
    factor = world_size / total if averaged else 1 / total
    if fault in ("local", "same"):
        factor = 1 / len(targets)
    if layout.startswith("ddp"):
        model = DistributedDataParallel(model)
    if fault == "compiled":
        model = torch.compile(model, backend="eager")
    if layout.startswith("fsdp2"):
        half = {"mp_policy": BF16} if fault == "bfloat16" else {}
        fully_shard(model.mlp, **half)
        fully_shard(model, **half)
    forward = model.module if fault == "around" else model

    sums = []

    def loss():
        logits = forward(ids)
        if fault == "float32":
            logits = logits.float()
        if fault == "mixed" and rank == 1:
            logits = logits.bfloat16().to(logits)
        sums.append(F.cross_entropy(logits, targets, reduction="sum"))
        return sums[0] * factor

    if fault == "stale" and world_size > 1:
        F.cross_entropy(model(ids), targets).backward()

    def synchronize():
        if fault == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        for name, grad in ((n, p.grad) for n, p in model.named_parameters()):
            if fault == "norms_alone" and name.startswith("norm"):
                continue
            if fault == "bfloat16":
                half = grad.bfloat16()
                dist.all_reduce(half)
                grad.copy_(half)
                continue
            if layout == "hand-again" or (fault == "one_again" and name == "head.weight"):
                dist.all_reduce(grad)
            dist.all_reduce(grad)
            if fault == "twice":
                grad /= world_size
            if fault == "scaled" and rank == 1:
                grad *= 3

    def clip():
        if fault == "counted":
            square = norm_of(grads_of(model)) ** 2
            dist.all_reduce(square)
            return square.sqrt()
        return norm_of(grads_of(model))

    def reported():
        mine = sums[0].detach().clone()
        if fault != "own_report":
            dist.all_reduce(mine)
        return mine / total

    optimizer = sgd(model)
    if fault == "left_out" and world_size > 1:
        optimizer = torch.optim.SGD(list(model.parameters())[:-1], lr=0.1)
    if fault == "own_rate":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
    own = layout.startswith(("hand", "other")) and fault != "none"
    own = own or layout == "ddp-again"
    return Step(
        model=model,
        loss=loss,
        tokens=len(targets),
        optimizer=optimizer,
        synchronize=synchronize if own else None,
        clip=clip,
        reported_loss=reported if layout.startswith("hand") else None,
    )


def tensor(layout, rank, world_size):
    """Every rank has all tokens and a part of the MLP."""
    ids, targets = rows_of()
    model, fault, parts = Model(), layout.partition("-")[2], {}
    if layout == "tensor_dtensor":
        mesh = init_device_mesh("cpu", (world_size,))
        plan = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
    elif world_size > 1:
        model.mlp.split = True
        for name, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
            module = model.mlp.get_submodule(name.partition(".")[0])

            def part(full, dim=dim):
                return full.chunk(world_size, dim)[rank]

            own = name.partition(".")[2]
            setattr(module, own, nn.Parameter(part(getattr(module, own).detach()).clone()))
            parts[f"mlp.{name}"] = part
    whole = [p for name, p in model.named_parameters() if name not in parts]

    def clip():
        if layout == "tensor_dtensor":
            return norm_of(getattr(g, "full_tensor", lambda g=g: g)() for g in grads_of(model))
        every = norm_of(grads_of(model)) ** 2
        copies = norm_of(p.grad for p in whole) ** 2
        square = every if fault == "counted" else every - copies
        if fault == "own_norm":
            return (square + copies / world_size).sqrt()
        dist.all_reduce(square)
        return (square if fault == "counted" else square + copies).sqrt()

    return Step(
        model=model,
        loss=lambda: F.cross_entropy(model(ids), targets),
        tokens=len(targets),
        optimizer=sgd(model),
        clip=clip,
        parts=parts,
    )


def expert(layout, rank, world_size):
    """Ranks have rows of their own, and a part of the experts."""
    ids, targets = rows_of(rank, world_size)
    counts = [sum(LENGTHS[r::world_size]) for r in range(world_size)]
    model, parts = Model(counts if world_size > 1 else None), {}
    if world_size > 1:
        parts["experts.weight"] = lambda full: full.chunk(world_size)[rank]
        full = model.experts.weight.detach()
        model.experts.weight = nn.Parameter(parts["experts.weight"](full).clone())
        model.experts.first = rank * EXPERTS // world_size
    # Means over ranks of the others' gradients want a loss that is so many times as large.
    doubled = layout == "expert-doubled"
    factor = world_size / sum(counts) if doubled else 1 / sum(counts)

    def synchronize():
        for name, p in model.named_parameters():
            if name not in parts:
                dist.all_reduce(p.grad)
                if doubled:
                    p.grad /= world_size

    return Step(
        model=model,
        loss=lambda: F.cross_entropy(model(ids), targets, reduction="sum") * factor,
        tokens=len(targets),
        optimizer=sgd(model),
        synchronize=synchronize,
        parts=parts,
    )


class Rest(nn.Module):
    """The second stage, whose modules have names of their own."""

    def __init__(self, model):
        super().__init__()
        self.moe, self.last, self.out = model.experts, model.norm, model.head

    def forward(self, x):
        return self.out(self.last(x + self.moe(x)))


def pipeline(layout, rank, world_size):
    """Two stages, which run the backward themselves."""
    ids, targets = rows_of()
    model = Model()
    if world_size == 1:
        return Step(
            model=model, loss=lambda: F.cross_entropy(model(ids), targets), tokens=len(targets)
        )
    if rank == 1:
        stage = Rest(model)

        def loss():
            x = torch.empty(len(ids), HIDDEN)
            dist.recv(x, 0)
            value = F.cross_entropy(stage(x.requires_grad_()), targets)
            value.backward()
            dist.send(x.grad, 0)
            return value.detach()

        def name(own):
            there = {"moe": "experts", "last": "norm", "out": "head"}
            module, _, rest = own.partition(".")
            return f"{there[module]}.{rest}"

        return Step(model=stage, loss=loss, tokens=len(targets), names=name)
    del model.experts, model.norm, model.head

    def first():
        x = model.embed(ids)
        x = x + model.mlp(x)
        dist.send(x.detach(), 1)
        gradient = torch.empty_like(x)
        dist.recv(gradient, 1)
        x.backward(gradient)

    return Step(model=model, loss=first, tokens=0)


# ---- what cannot be checked


def bad(layout, rank, world_size):
    """What layouts of one process return or raise."""
    if layout == "dict":
        return {"model": None}
    step = data("hand", rank, world_size)
    if layout == "text":
        step.loss = lambda: "4.2"
    elif layout == "rows":
        step.loss = lambda: torch.ones(3, requires_grad=True) * 2
    elif layout == "nan":
        step.loss = lambda: torch.tensor(math.nan)
    elif layout == "tokens":
        step.tokens = 1.5
    elif layout == "no_step":
        step.optimizer = 3
    elif layout == "norm":
        step.clip = lambda: None
    elif layout == "shape":
        step.model.embed = nn.Embedding(2 * VOCAB, HIDDEN)
    elif layout == "name":
        step.names = {"head.weight": "haed.weight"}
    elif layout == "parts":
        step.parts = {"experts.weight": lambda full: full[:3]}
        experts = step.model.experts
        experts.weight = nn.Parameter(experts.weight.detach()[:3])
    elif layout == "absent":
        step.model.norm = nn.LayerNorm(HIDDEN, elementwise_affine=False)
    return step


def raises(layout, rank, world_size):
    step = data("hand", rank, world_size)
    if rank == 1:
        step.loss = lambda: 1 // 0  # named
    return step


def hangs(layout, rank, world_size):
    """Rank 1 does not join the all-reduce; each has a child, that of rank 0 in a session of its
    own.   layout: a file for their ids.
    """
    step = data("hand", rank, world_size)
    if world_size > 1:
        sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(sleeps, start_new_session=rank == 0)
        with open(layout, "a") as file:
            file.write(f"{os.getpid()} {child.pid}\n")
    if rank == 1:
        step.synchronize = None
        step.clip = None
        step.reported_loss = None
        step.optimizer = None
    return step


def orphaned(layout, rank, world_size):
    """As `hangs`; but the step ends with the parent, before the thread that waits for that end."""
    end, main = check_layout_ranks._end, threading.main_thread()
    check_layout_ranks._end = lambda pid: (
        end(pid) if threading.current_thread() is main else time.sleep(600)
    )
    step = hangs(layout, rank, world_size)
    if world_size > 1:
        multiprocessing.parent_process().join()
        raise SystemExit
    return step


def terminates(layout, rank, world_size):
    os.kill(multiprocessing.parent_process().pid, signal.SIGTERM)
    time.sleep(600)


def dies(layout, rank, world_size):
    if rank == 1:
        os._exit(7)
    return data("hand", rank, world_size)


# ---- what is unusual, in one process


class Name(enum.StrEnum):
    FIRST = "first.weight"
    LAYOUT = "named"


class Count(enum.IntEnum):
    TWO = 2


class Unusual(nn.Module):
    """Parameters of other dtypes, frozen and idle ones, and buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)
        self.down.bias.requires_grad_(False)
        self.idle = nn.Parameter(torch.ones(3))
        for name, dtype in (("eight", torch.float8_e4m3fn), ("packed", torch.uint8)):
            value = torch.arange(4.0).to(dtype)
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        self.phase = nn.Parameter(torch.polar(torch.ones(WIDE), torch.arange(WIDE) / WIDE))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("table", torch.ones(2))

    def forward(self, x):
        self.calls += 1
        y = (self.first(x) * self.phase).real.tanh()
        return F.linear(y, self.down.weight.to(y), self.down.bias)


def unusual(layout, rank, world_size):
    model, x = Unusual(), torch.randn(10, HIDDEN)
    if layout == "thawed":
        model.down.bias.requires_grad_(True)
    elif layout == "imaginary":
        model.phase.register_hook(lambda grad: grad + 1j)
    elif layout == "half":
        model.down.weight = nn.Parameter(model.down.weight.detach().bfloat16())

    def loss():
        y = model(x)
        if layout == "float8":
            y.detach().to(torch.float8_e8m0fnu)  # a scale
            y = y + (y - y.to(torch.float8_e5m2).to(y)).detach()
        if layout == "dropout":
            y = F.dropout(y)
        value = y.square().mean()
        return value.bfloat16().double() if layout == "rounded" else value

    rounded = {}
    if layout == "rounded_norm":
        rounded["clip"] = lambda: torch.ones(()).half().item()
    if layout == "rounded_report":
        rounded["reported_loss"] = lambda: torch.ones(()).bfloat16().item()
    names = {Name.FIRST.value: Name.FIRST}
    # Smaller than the rounding of a weight in bfloat16.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Step(model=model, loss=loss, tokens=10, optimizer=optimizer, names=names, **rounded)


unusual.layouts = {Name.LAYOUT: Count.TWO}


RIGHT = {
    "hand": (2, 4),
    "hand-mixed": 2,
    "ddp": 2,
    "ddp-float32": 2,
    "fsdp2-bfloat16": 2,
    "fsdp2": (1, 2, 4),
    "hand-equal": 2,
    "ddp-same": 2,
    "ddp-compiled": 2,
}
FAULTS = (
    *("ddp-around", "ddp-local", "fsdp2-local", "hand-none", "hand-mean", "hand-twice"),
    *("hand-counted", "hand-own_report", "hand-left_out", "other_weights"),
    *("hand-fewer", "hand-scaled", "hand-clipped", "hand-bfloat16", "hand-stale"),
    *("hand-shifted", "hand-again", "ddp-again"),
    *("hand-local", "hand-overlap", "hand-same_slice", "hand-one_again", "hand-norms_alone"),
    "hand-own_rate",
)

TENSOR = {"tensor": (2, 4), "tensor_dtensor": 2, "tensor-counted": 2, "tensor-own_norm": 2}
EXPERT = {"expert": (2, 4), "expert-doubled": (2, 4)}


def every(layout, rank, world_size):
    """All of them, in one launch."""
    kinds = {"tensor": tensor, "expert": expert, "pipeline": pipeline}
    kind = next((k for name, k in kinds.items() if layout.startswith(name)), data)
    return kind(layout, rank, world_size)


every.layouts = (
    RIGHT | dict.fromkeys(FAULTS, 2) | {"ddp-local": (2, 4)} | TENSOR | EXPERT | {"pipeline": 2}
)
