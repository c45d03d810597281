"""Stages of goals and of dispatch overhead."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from bench import overhead
from bench.page import goals
from tilewright.bench import peers, run, sources, store
from tilewright.bench.runner import Unit
from tilewright.bench.units import BY_NAME, constants, threads, time_unit
from tilewright.core import platform, registry
from tilewright.core.registry import Op, short

# The limit of a unit of goals or of host time: each takes a few seconds, and what takes longer
# hangs.
SECONDS = 60.0


# The products of this library: matmuls and the optimizer, which take most of a step, by op and the
# end of the case's name ("": all). Their goals are measured first, in this order.
PRODUCTS = {
    "moe_mlp": "",
    "grouped_gemm": "",
    "linear_cross_entropy": "",
    "linear_logprob": "",
    "adamw_": "",
    "attention": "_8k",
}
# In comparisons, by op: this peer tunes its kernels for each case for longer than a unit has.
TUNES = {"moe_mlp": "liger"}
GOAL_ROUNDS = 5
# Peers that take seconds to a minute a case (compiling, or a loop over experts) are timed here only
# if a goal compares with them; the stage `time` has them all.
SLOW = (
    "flex",
    "transformers",
    "transformers-grouped",
    "bitsandbytes-compiled",
    "torchao-compiled",
)


@dataclass(frozen=True)
class Aim:
    """A case of a goal."""

    op: Op
    case: registry.Case
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"goals/{self.op.name}.{self.case.name}.{short(self.dtype)}"

    @property
    def of_a_product(self) -> bool:
        return self.op.name in PRODUCTS and self.case.name.endswith(PRODUCTS[self.op.name])


Aims = dict[Aim, list[registry.Goal]]


def goal_units(
    order: Callable[[Aims], Sequence[Aim]],
    ops: Iterable[Op],
    device: str,
    settings: run.Settings,
    out: pathlib.Path,
    cases: Sequence[str] | None,
) -> list[Unit]:
    """The goals that `order` takes of all, in its order."""
    aims = _aims(ops, device, cases)
    return [_goal_unit(aim, aims[aim], device, settings, out) for aim in order(aims)]


def products(aims: Aims) -> list[Aim]:
    """Goals of the PRODUCTS, in their order."""
    order = list(PRODUCTS)
    return sorted((a for a in aims if a.of_a_product), key=lambda a: order.index(a.op.name))


def others(aims: Aims) -> list[Aim]:
    """All other goals: one case of each streaming op, then the second ones and so on; last the
    cases without a goal of bandwidth, such as the longest of attention, whose truth takes seconds.
    """
    seen: dict[str, int] = {}
    order = []
    for aim, about in aims.items():
        if not aim.of_a_product:
            streams = any(g.metric == "roofline_percent" for g in about)
            order.append((not streams, seen.setdefault(aim.op.name, 0), aim))
            seen[aim.op.name] += 1
    return [aim for *_, aim in sorted(order, key=lambda entry: entry[:2])]


def _aims(ops: Iterable[Op], device: str, cases: Sequence[str] | None) -> Aims:
    """The cases of this device's goals, each with all goals about it."""
    aims: Aims = {}
    for op in ops:
        for goal, case, dtype in goals_on(op, device):
            if cases is None or case.name in cases:
                aims.setdefault(Aim(op, case, dtype), []).append(goal)
    return aims


def _goal_unit(
    aim: Aim,
    about: Sequence[registry.Goal],
    device: str,
    settings: run.Settings,
    out: pathlib.Path,
) -> Unit:
    """Times what `auto` takes, what the goals are about and compare with, and the peers; briefly,
    without a profile.
    """
    op = aim.op
    compared = {g.other for g in about} - {"", "best"}
    if any(g.other == "best" for g in about):
        usable = op.usable(device, aim.dtype)
        # `gluon` is faster here than `triton`, or launches the same.
        compared |= {*usable} - {"eager", "triton" if "gluon" in usable else ""}
    fast = [name for name in peers.PEERS if name not in SLOW]
    named = (op.choose(device, aim.dtype), *(g.by for g in about), *sorted(compared), *fast)
    names = [name for name in named if name != TUNES.get(op.name)]
    briefly = replace(settings, rounds=min(settings.rounds, GOAL_ROUNDS), isolated=False)
    return replace(
        time_unit(
            op,
            aim.case,
            device,
            aim.dtype,
            briefly,
            out,
            only=[n for n in dict.fromkeys(names) if n],
        ),
        name=aim.name,
        limit=SECONDS,
    )


def goals_on(op: Op, device: str) -> Iterator[tuple[registry.Goal, registry.Case, torch.dtype]]:
    """The goals of an op for this device, with each of their cases and its dtype (default:
    bfloat16).
    """
    capability = "{}.{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else None
    for goal in op.goals:
        if goal.holds_for(platform.device_name(device), capability):
            for case in run.timed(op, device, goal.cases or None):
                for dtype in [BY_NAME[n] for n in goal.dtypes] or [torch.bfloat16]:
                    if any(dtype in i.dtypes for i in op.implementations if i.name != "eager"):
                        yield goal, case, dtype


def unmet(op: Op, device: str, out: pathlib.Path) -> set[tuple[str, torch.dtype]]:
    """(case, dtype) of this device's goals that the results in a folder show to be missed. What was
    not measured, or not beside the provider to compare with, is unknown and not among them.
    """
    documents = {name: document for name, _, document in store.read(out)}
    missed = set()
    for goal, case, dtype in goals_on(op, device):
        document = documents.get(Aim(op, case, dtype).name) or {}
        rows = {r["provider"]: r for r in document.get("rows") or ()}
        peak = ((document.get("roofline") or {}).get("flops_per_second") or {}).get(short(dtype))
        judged = goals.judge(goal, rows, peak)
        if judged is not None and not judged.met:
            missed.add((case.name, dtype))
    return missed


def overhead_unit(
    op: Op,
    device: str,
    dtypes: Sequence[torch.dtype],
    settings: run.Settings,
    not_launched: bool = False,
) -> Unit:
    def make():
        implementation = "triton" if not_launched else None
        with overhead.not_launched() if not_launched else contextlib.nullcontext():
            rows = [
                r
                for dtype in dtypes
                for r in overhead.overhead(
                    [op],
                    device,
                    dtype,
                    rounds=15,
                    sample_seconds=settings.sample_seconds / 2,
                    implementation=implementation,
                )
            ]
        return {"rows": rows}

    return Unit(
        f"overhead/{op.name}" + (".not-launched" if not_launched else ""),
        make,
        {"rows": []},
        SECONDS,
        options={
            "dtypes": [short(d) for d in dtypes],
            "sample_seconds": settings.sample_seconds,
            "constants": constants(op, device),
            **threads(device),
        },
        source=sources.of_measured(op, device),
    )
