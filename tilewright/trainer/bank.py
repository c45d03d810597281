"""Several tenants on one engine: adapters that train apart on the same frozen weights.

    bank = Bank(engine)
    bank.add("a", seed=1)
    bank.take("a")  # the engine holds a's adapters, and what a has accumulated
    engine.forward_backward(batches, loss)
    bank.take("b")  # a is parked as it is, in the middle of a step

What a tenant has is what training changes: its adapters and what is trained beside them, their
gradients, the denominators of the calls since its last step, the optimizer's states of its
parameters and its groups' settings, and the adapters' scales. A tenant among others has the bits of
one that trains alone. Every rank must make the same calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright.nn.sharded import shard
from tilewright.nn.weights import adapted
from tilewright.trainer.engine import Engine, moved
from tilewright.trainer.models.head import Shaping
from tilewright.trainer.plugins import adapters

Tensors = dict[str, torch.Tensor]


@dataclass
class Tenant:
    """What a parked tenant has; this rank's shards, by the names of parameters.

    values: trainable parameters.   gradients: those that there are.   states: optimizer states.
    groups: the settings of the optimizer's groups, in order.   peaks: their peak learning rates.
    totals: the loss and the denominator of the calls since the last step.   scales: by adapter.
    """

    values: Tensors
    gradients: Tensors = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    totals: torch.Tensor | None = None
    empty_steps: int = 0
    shaping: Shaping = Shaping()  # noqa: RUF009 (it is a tuple)
    scales: dict[str, float] = field(default_factory=dict)


def _trained(engine: Engine) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in engine.model.named_parameters() if p.requires_grad}


def _settings(engine: Engine) -> list[dict[str, Any]]:
    """Those of the optimizer's groups, in order."""
    groups = engine.optimizer.param_groups
    return [{k: v for k, v in group.items() if k != "params"} for group in groups]


def _set(engine: Engine, groups: list[dict[str, Any]], peaks: list[float]) -> None:
    for group, settings in zip(engine.optimizer.param_groups, groups, strict=True):
        group.update(settings)
    engine.peaks[:] = peaks


@torch.no_grad()
def park(engine: Engine) -> Tenant:
    """What the engine holds. Gradients and states are handed over: the engine has none afterwards;
    the values stay until others are taken up.
    """
    trained, optimizer = _trained(engine), engine.optimizer
    tenant = Tenant(
        {name: shard(p).clone() for name, p in trained.items()},
        # Those of DDP are views of its buckets.
        {name: p.grad.clone() for name, p in trained.items() if p.grad is not None},
        {name: optimizer.state.pop(p) for name, p in trained.items() if p in optimizer.state},
        _settings(engine),
        [*engine.peaks],
        engine.totals,
        engine.empty_steps,
        engine.model.shaping,
        {path: module.scale for path, module in adapted(engine.model)},
    )
    engine.zero()
    return tenant


@torch.no_grad()
def take_up(engine: Engine, tenant: Tenant) -> None:
    """Puts a parked tenant in the place of what the engine holds, which is lost unless it is
    parked. The tenant must not be used again: it hands over what it has.
    """
    engine.parts.reshard()  # what is gathered would be another tenant's
    engine.zero()
    trained, optimizer = _trained(engine), engine.optimizer
    for name, p in trained.items():
        shard(p).copy_(tenant.values[name])
        p.grad = tenant.gradients.get(name)
        optimizer.state.pop(p, None)
        if name in tenant.states:
            optimizer.state[p] = tenant.states[name]
    _set(engine, tenant.groups, tenant.peaks)
    engine.totals, engine.empty_steps = tenant.totals, tenant.empty_steps
    engine.model.shaping = tenant.shaping
    for path, module in adapted(engine.model):
        module.scale = tenant.scales[path]


class Bank:
    """Tenants of an engine, by name: those that are parked, and the one that it holds.

    Args:
        engine: with adapters, not yet trained: each tenant begins with its settings.

    Raises:
        ValueError: it has no adapters, or was trained.
    """

    def __init__(self, engine: Engine):
        if not any(True for _ in adapted(engine.parts.whole)):
            raise ValueError("engine: it has no adapters, so its tenants would share all weights")
        if engine.optimizer.state or engine.totals is not None:
            raise ValueError("engine: it was trained, and a tenant would begin with that")
        self.engine, self.held = engine, None
        self._parked: dict[str, Tenant] = {}
        self._first = park(engine)

    def __contains__(self, name: str) -> bool:
        return name == self.held or name in self._parked

    @property
    def names(self) -> list[str]:
        return [*([] if self.held is None else [self.held]), *self._parked]

    def add(self, name: str, seed: int) -> None:
        """A new tenant, which is taken: adapters drawn from a seed, and nothing else trained.

        Raises ValueError for a name that there is.
        """
        if name in self:
            raise ValueError(f"name: there is a tenant {name!r} already")
        self._park()
        first = self._first
        given = {n: v.clone() for n, v in first.values.items()}
        groups = [dict(group) for group in first.groups]
        new = Tenant(given, {}, {}, groups, [*first.peaks], None, 0, first.shaping, first.scales)
        take_up(self.engine, new)
        adapters.reset(self.engine.parts, adapters.generator(seed, 0))
        self.held = name

    def take(self, name: str) -> None:
        """Makes the engine hold a tenant. Raises KeyError for one that there is not."""
        if name == self.held:
            return
        tenant = self._parked.pop(name)
        self._park()
        take_up(self.engine, tenant)
        self.held = name

    def remove(self, name: str) -> None:
        """Frees what a tenant has. Raises KeyError for one that there is not."""
        if name == self.held:
            park(self.engine)
            self.held = None
        else:
            del self._parked[name]

    def move(self, device: torch.device) -> None:
        """Moves what parked tenants have, see `Engine.move`."""
        for tenant in (self._first, *self._parked.values()):
            tenant.values = moved(tenant.values, device)
            tenant.gradients = moved(tenant.gradients, device)
            tenant.states = {name: moved(own, device) for name, own in tenant.states.items()}

    def _park(self) -> None:
        if self.held is not None:
            self._parked[self.held] = park(self.engine)
            self.held = None


class Sole:
    """A bank for one tenant, which has all weights: of an engine without adapters.

    again: reads the weights that a tenant begins with, into the engine; every rank calls it.

    Raises ValueError where the engine was trained.
    """

    def __init__(self, engine: Engine, again: Callable[[], None]):
        if engine.optimizer.state or engine.totals is not None:
            raise ValueError("engine: it was trained, and a tenant would begin with that")
        self.engine, self.again, self.held = engine, again, None
        self._groups, self._peaks = _settings(engine), [*engine.peaks]
        self._shaping = engine.model.shaping
        self._fresh = True

    def __contains__(self, name: str) -> bool:
        return name == self.held

    def add(self, name: str, seed: int) -> None:
        """A new tenant. Nothing is drawn from the seed.

        Raises ValueError where there is one.
        """
        if self.held is not None:
            raise ValueError(f"name: {self.held!r} has the weights, of which there are one set")
        if not self._fresh:
            self.again()
        _set(self.engine, self._groups, self._peaks)
        self.engine.model.shaping, self.engine.empty_steps = self._shaping, 0
        self.held, self._fresh = name, False

    def take(self, name: str) -> None:
        """Raises KeyError for a tenant that there is not."""
        if name != self.held:
            raise KeyError(name)

    def remove(self, name: str) -> None:
        """Frees what a tenant has. Raises KeyError for one that there is not."""
        self.take(name)
        self.engine.zero()
        self.engine.optimizer.state.clear()
        self.held = None

    def move(self, device: torch.device) -> None:
        """As `Bank.move`: nothing is parked."""
