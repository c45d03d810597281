"""A training step as `tilewright check-layout` takes it, and its run in one rank."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tilewright.core.files import load_tensors, save_tensors
from tilewright.core.registry import short
from tilewright.core.torch_names import TorchDispatchMode
from tilewright.trainer.parallel import exchange

SEED = 0
# Collectives of the check.
GATHERING = ("gathering the weights", "gathering the gradients")
# Those that a step may compute in, the narrowest last. Scales of powers of two are no such dtype.
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)
# What wrappers put into parameters' names.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


class Refused(Exception):
    """A step that cannot be checked. Its text is one sentence."""


@dataclasses.dataclass(kw_only=True)
class Step:
    """One training step of a rank: what a function given to `tilewright check-layout` returns.

    It runs in this order: loss, backward, synchronize, then the gradients are read, clip,
    reported_loss, optimizer.step.

    Args:
        model: Its parameters may be whole on each rank, DTensors (FSDP2, tensor parallelism), or
            parts that `names` and `parts` describe. DistributedDataParallel and torch.compile add
            no prefix to names here.
        loss: Called once, without arguments. Returns a tensor with one element, whose backward
            gives the gradients; or one that needs none, if the call ran the backward itself; or
            None on a rank without a loss, such as a pipeline's first stage.
        tokens: Number of tokens in this rank's loss.
        optimizer: Has `step()`. None: no step is compared.
        synchronize: Called after the backward: your own all-reduce.
        clip: Called after that: clips the gradients, and returns their norm before, as the step
            reports it. None: no norm is compared.
        reported_loss: The loss per token as the step would log it, on every rank.
        names: The one process's name of each of this rank's parameters, as a mapping, in which
            names that stay may be absent, or as a function.
        parts: For parameters of which a rank has a part and which are no DTensors, by the one
            process's name: takes the one process's tensor and returns what this rank has of it. It
            may slice, chunk, index and transpose.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> step = Step(model=layer, loss=lambda: layer(torch.ones(3, 2)).mean(), tokens=3)
        >>> step.loss().shape
        torch.Size([])
    """

    model: nn.Module
    loss: Callable[[], torch.Tensor | None]
    tokens: int
    optimizer: Any = None
    synchronize: Callable[[], object] | None = None
    clip: Callable[[], float | torch.Tensor] | None = None
    reported_loss: Callable[[], float | torch.Tensor] | None = None
    names: Mapping[str, str] | Callable[[str], str] | None = None
    parts: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = dataclasses.field(
        default_factory=dict
    )


@dataclasses.dataclass
class Measured:
    """What a rank's step gave. Tensors are whole, except those of `parts`.

    order: names in the order in which the backward finished their gradients, in one process.
    kinds: "copy", "part" or "sharded" (a DTensor) by name.
    dtype: the narrowest floating dtype that the forward or the backward computed in.
    number: the narrowest of numbers (one element) in them, in clip or in reported_loss.
    drew: whether they drew random numbers.
    idle: names of parameters that require a gradient and have none.
    buffers: names of those that the step changed, in one process.
    early: gradients before synchronize(), of parameters that are no DTensors.
    stale: a parameter that had a gradient before the step, or "".
    """

    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    updates: dict[str, torch.Tensor]
    order: list[str]
    kinds: dict[str, str]
    dtype: torch.dtype
    number: torch.dtype
    loss: float | None
    tokens: int
    norm: float | None
    reported: float | None
    drew: bool
    idle: list[str]
    buffers: list[str]
    early: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    stale: str = ""


WHOLE = ("weights", "gradients", "updates", "early")  # the fields of tensors


class _Narrowest(TorchDispatchMode):
    """The narrowest floating dtype of operators' results, and of those with one element."""

    dtype = number = torch.float64

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else (result,):
            if isinstance(t, torch.Tensor) and t.dtype.to_real() in DTYPES:
                self.dtype = narrower(self.dtype, t.dtype.to_real())
                if t.numel() == 1:
                    self.number = narrower(self.number, t.dtype.to_real())
        return result


def narrower(*dtypes: torch.dtype) -> torch.dtype:
    return max(dtypes, key=DTYPES.index)


def gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Each rank's value, which JSON can hold."""
    return exchange.gather(value, group)


def dtypes(dtype: torch.dtype, group: dist.ProcessGroup) -> list[torch.dtype]:
    """Each rank's dtype."""
    return [getattr(torch, name) for name in gathered(short(dtype), group)]


def written(measured: Measured, path: str) -> None:
    """Writes it for `read`."""
    tensors, rest = {}, {}
    for field in dataclasses.fields(measured):
        value = getattr(measured, field.name)
        if field.name in WHOLE:
            tensors |= {f"{field.name}/{name}": t for name, t in value.items()}
        else:
            rest[field.name] = short(value) if isinstance(value, torch.dtype) else value
    save_tensors(path, tensors, rest)


def read(path: str) -> Measured:
    """What `written` wrote."""
    tensors, rest = load_tensors(path)
    parts: dict[str, dict[str, torch.Tensor]] = {name: {} for name in WHOLE}
    for name, t in tensors.items():
        kind, _, parameter = name.partition("/")
        parts[kind][parameter] = t
    narrow = {name: getattr(torch, rest[name]) for name in ("dtype", "number")}
    return Measured(**{**rest, **parts, **narrow})


# Long: the parts of a step in their order, each announced before it starts.
def measure(
    function: Callable[..., Step],
    layout: str,
    group: dist.ProcessGroup,
    at: Callable[[str], None],
) -> tuple[Step, Measured]:
    """Builds and runs a step.

    group: all ranks, not the step's own group: a collective that a rank leaves out must not meet
    another here.   at: is told each part of the step before it starts.
    """
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    at("the function")
    step = function(layout, group.rank(), group.size())
    _check(step)
    held = _parameters(step)
    kinds = {
        name: "sharded" if isinstance(p, DTensor) else "part" if name in step.parts else "copy"
        for name, p in held.items()
    }
    at(GATHERING[0])
    weights = {name: _whole(p) for name, p in held.items()}
    order: list[str] = []
    for name, p in held.items() if group.size() == 1 else ():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    buffers = _buffers(step.model) if group.size() == 1 else {}
    early: dict[str, torch.Tensor] = {}
    stale = next((n for n, p in held.items() if p.grad is not None and _whole(p.grad).any()), "")
    random_state = torch.get_rng_state()
    with _Narrowest() as narrowest:
        loss = _forward_backward(step, at)
    drew = not torch.equal(torch.get_rng_state(), random_state)
    if step.synchronize is not None:
        if group.size() > 1:
            early = {
                name: p.grad.detach().clone()
                for name, p in held.items()
                if p.grad is not None and not isinstance(p.grad, DTensor)
            }
        at("synchronize()")
        step.synchronize()
    at(GATHERING[1])
    gradients = _gradients(held, group)
    norm = reported = None
    with _Narrowest() as later:
        if step.clip is not None:
            at("clip()")
            norm = _number("clip()", step.clip())
        if step.reported_loss is not None:
            at("reported_loss()")
            reported = _number("reported_loss()", step.reported_loss())
    updates = {}
    if step.optimizer is not None:
        at("optimizer.step()")
        step.optimizer.step()
        at(GATHERING[0])
        updates = {name: _difference(_whole(p), weights[name]) for name, p in held.items()}
    after = _buffers(step.model) if buffers else {}
    return step, Measured(
        weights=weights,
        gradients=gradients,
        updates=updates,
        order=list(dict.fromkeys(order)),
        kinds=kinds,
        dtype=narrowest.dtype,
        number=narrower(narrowest.number, later.number),
        loss=loss,
        tokens=int(step.tokens),
        norm=norm,
        reported=reported,
        drew=drew,
        idle=[n for n, p in held.items() if p.requires_grad and n not in gradients],
        buffers=[n for n, b in buffers.items() if n in after and not torch.equal(b, after[n])],
        early=early,
        stale=stale,
    )


def _forward_backward(step: Step, at: Callable[[str], None]) -> float | None:
    at("loss()")
    loss = step.loss()
    if loss is None:
        return None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise Refused(f"loss() returned {_described(loss)}; it must be a tensor of one element")
    if loss.requires_grad:
        at("backward()")
        loss.backward()
    return _number("loss()", loss)


def _check(step: Any) -> None:
    if not isinstance(step, Step):
        raise Refused(
            f"the function returned {_described(step)}; it must be a tilewright_lab.check_layout.Step"
        )
    if not isinstance(step.model, nn.Module):
        raise Refused(f"Step.model is {_described(step.model)}; it must be a torch.nn.Module")
    if isinstance(step.tokens, bool) or not isinstance(step.tokens, int) or step.tokens < 0:
        raise Refused(f"Step.tokens is {step.tokens!r}; it must be an integer of 0 or more")
    for name in ("loss", "synchronize", "clip", "reported_loss"):
        value = getattr(step, name)
        if not callable(value) and (value is not None or name == "loss"):
            raise Refused(f"Step.{name} is {_described(value)}; it must be a function")
    if step.optimizer is not None and not callable(getattr(step.optimizer, "step", None)):
        raise Refused(f"Step.optimizer is {_described(step.optimizer)}, which has no step()")


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _number(what: str, value: Any) -> float:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise Refused(f"{what} returned {_described(value)}; it must be a number")
    if not math.isfinite(value):
        raise Refused(f"{what} returned {float(value)}; it must be finite")
    return float(value)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model in DistributedDataParallel and torch.compile, in any order."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: _whole(buffer) for name, buffer in _unwrapped(model).named_buffers()}


def _parameters(step: Step) -> dict[str, nn.Parameter]:
    """The model's parameters by the one process's names."""
    model = _unwrapped(step.model)
    held: dict[str, nn.Parameter] = {}
    for name, p in model.named_parameters():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        if isinstance(step.names, Mapping):
            name = step.names.get(name, name)
        elif step.names is not None:
            name = step.names(name)
        if not isinstance(name, str):
            raise Refused(f"Step.names gives {_described(name)}; it must give a name")
        name = str.__str__(name)  # of an enumeration's member, which another process cannot load
        if name in held:
            raise Refused(f"Step.names gives {name!r} to two parameters")
        held[name] = p
    return held


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def _difference(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    if after.element_size() == 1:  # float8 cannot be subtracted, and small integers wrap around
        after, before = after.double(), before.double()
    return after - before


def _gradients(
    held: Mapping[str, nn.Parameter], group: dist.ProcessGroup
) -> dict[str, torch.Tensor]:
    """A rank whose shard has no gradient takes part in gathering it: others would wait."""
    somewhere = set().union(*gathered([n for n, p in held.items() if p.grad is not None], group))
    gradients = {}
    for name, p in held.items():
        grad = p.grad
        if grad is None and name in somewhere and isinstance(p, DTensor):
            grad = torch.zeros_like(p)
        if grad is not None:
            gradients[name] = _whole(grad)
    return gradients
