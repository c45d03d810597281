"""The timed providers (an op's implementations, its compiled eager twin, other libraries) and the
correctness gate before the clock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.bench import contract
from tilewright.bench.peers import PEERS
from tilewright.core.library import plain_operators
from tilewright.core.registry import Op

# Tilewright's own implementations are compared with these.
BASELINES = ("eager", "compile", "torch", *PEERS)


@dataclass(frozen=True)
class Provider:
    """One way to compute an op.

    call: takes the case's keyword arguments; None if the provider has no such op.
    reason: why it cannot run here, or None.
    consumes: it overwrites its inputs and is timed on its own copy.
    draws: it draws random values of its own.
    """

    name: str
    call: Callable[..., Any] | None
    reason: str | None = None
    consumes: bool = False
    draws: bool = False


def providers(op: Op, device: str, dtype: torch.dtype) -> list[Provider]:
    """Every provider of an op, usable here or not; baselines first."""
    result = []
    for impl in op.implementations:
        reason = impl.why_not(device, dtype)
        if reason is None and impl.name == "triton" and device == "cpu":
            reason = "Triton's interpreter is for tests, its times mean nothing"
        result.append(
            Provider(impl.name, functools.partial(op.public, implementation=impl.name), reason)
        )
    result.append(Provider("compile", compiled(op)))
    for name, peer in PEERS.items():
        result.append(
            Provider(
                name,
                peer.ops.get(op.name),
                peer.why_not(op.name, device),
                consumes=op.name in peer.consumes,
                draws=op.name in peer.draws,
            )
        )
    return sorted(result, key=lambda p: BASELINES.index(p.name) if p.name in BASELINES[:3] else 3)


def compiled(op: Op, backend: str | Callable = "inductor") -> Callable[..., Any]:
    """torch.compile of an op's eager twin, as PyTorch's operators alone.

    A twin has operators of tilewright where values are checked, or where a compiler must not round
    otherwise; none of them would be in a user's own PyTorch code.
    """

    def eager(**kwargs):
        return op.public(**kwargs, implementation="eager")

    run = torch.compile(eager, backend=backend, fullgraph=True, dynamic=False)

    def call(**kwargs):
        with plain_operators():
            return run(**kwargs)

    return call


def gate(
    op: Op, provider: Provider, kwargs: dict[str, Any], by: contract.Reference
) -> list[contract.Finding]:
    """Checks a provider's numerics contract on the inputs that will be timed. Returns the findings
    that break it; empty if it holds.

    The eager twin is the definition and always holds.
    """
    if provider.name == "eager":
        return []
    call = provider.call
    assert call is not None  # it has no reason
    if provider.draws:
        outs, twins = (
            contract.leaves(function(**kwargs))
            for function in (call, functools.partial(op.public, implementation="eager"))
        )
        if [(o.shape, o.dtype) for o in outs] != [(t.shape, t.dtype) for t in twins]:
            raise ValueError(f"{provider.name} returns another shape or dtype than {op.name}")
        return []
    if provider.name in op.names():
        return contract.broken(contract.judge(op, provider.name, kwargs, by))

    def public(*, implementation, **kwargs):
        return eager(**kwargs) if implementation == "eager" else call(**kwargs)

    eager = functools.partial(op.public, implementation="eager")
    judged = Op(op.name, public, op.eager, (), op.cases, op.atol, op.judged)
    return contract.broken(contract.judge(judged, provider.name, kwargs, by))
