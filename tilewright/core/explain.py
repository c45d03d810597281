"""Which implementations of an op run on a device, which of them `auto` takes, and why the others
cannot run. The command `tilewright explain` prints it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from typing import NamedTuple

import torch

from tilewright.core import platform
from tilewright.core.registry import Op, short


class Row(NamedTuple):
    """One implementation on a device.

    reason: why it is not usable; None: it is.   does: a sentence on how it computes there, or None.
    """

    op: str
    name: str
    auto: bool
    reason: str | None
    does: str | None

    @property
    def state(self) -> str:
        return self.reason or (f"usable; {self.does}" if self.does else "usable")


def rows(ops: Iterable[Op], device_type: str, dtype: torch.dtype) -> list[Row]:
    """A row for every implementation, in the order in which `auto` looks at them."""
    # eager and sdpa need no more than a device
    no_device = platform.no_cuda() if device_type == "cuda" else None
    out = []
    for op in ops:
        auto = None if no_device else op.choose(device_type, dtype)
        for impl in op.implementations:
            reason = impl.why_not(device_type, dtype) or no_device
            does = None if reason else impl.does(device_type)
            out.append(Row(op.name, impl.name, impl.name == auto, reason, does))
    return out


def heading(device_type: str, dtype: torch.dtype) -> str:
    versions = "  ".join(f"{k} {v}" for k, v in platform.describe().items())
    lines = (
        versions,
        *platform.newer_than_tested(),
        f"for {short(dtype)} tensors on {device_type}",
    )
    return "\n".join(lines)


def table(every: list[Row]) -> str:
    """A line for every implementation; `auto` takes the one marked *."""
    wide, narrow = max(len(r.op) for r in every), max(len(r.name) for r in every)
    return "\n".join(
        f"{r.op:<{wide}} {'*' if r.auto else ' '} {r.name:<{narrow}}  {r.state}" for r in every
    )


def summary(every: list[Row]) -> str:
    """A line for every op, with the implementation that `auto` takes and the other usable ones;
    then the unusable ones, by reason.
    """
    ops = dict.fromkeys(r.op for r in every)
    lines = [("op", "auto", "also usable")]
    for op in ops:
        usable = [r for r in every if r.op == op and r.reason is None]
        auto = next((r.name for r in usable if r.auto), "none")
        lines.append((op, auto, ", ".join(r.name for r in usable if not r.auto)))
    wide, narrow = (max(len(line[i]) for line in lines) for i in (0, 1))
    text = [f"{op:<{wide}}  {auto:<{narrow}}  {more}".rstrip() for op, auto, more in lines]
    reasons: dict[tuple[str, str], list[str]] = {}
    for r in every:
        if r.reason is not None:
            reasons.setdefault((r.name, r.reason), []).append(r.op)
    if reasons:
        text += ["", "not usable here:"]
        narrow = max(len(name) for name, _ in reasons)
        for (name, reason), where in reasons.items():
            of = f"{len(where)} ops" if len(where) > 2 else ", ".join(where)
            text.append(f"{name:<{narrow}}  {reason} ({of})")
    return "\n".join(text)


def as_json(every: list[Row], device_type: str, dtype: torch.dtype) -> str:
    """The rows as one JSON object: environment, device, dtype, and ops by name."""
    ops: dict[str, dict] = {}
    for r in every:
        op = ops.setdefault(r.op, {"auto": None, "implementations": {}})
        op["implementations"][r.name] = {"usable": r.reason is None, "reason": r.reason}
        if r.does is not None:
            op["implementations"][r.name]["does"] = r.does
        if r.auto:
            op["auto"] = r.name
    about = {
        "environment": platform.describe(),
        "newer than tested": platform.newer_than_tested(),
        "device": device_type,
        "dtype": short(dtype),
    }
    return json.dumps({**about, "ops": ops}, indent=2)


def contract(op: Op) -> str:
    """The options that single implementations do not support, what torch.autocast does, the
    arguments as they are checked, what the public function passes on, and the op's documentation.
    """
    text, narrow = [], max(map(len, op.names()))
    for impl in op.implementations:
        if unsupported := dict.fromkeys(filter(None, map(impl.refuses, op.requests))):
            text.append(f"{impl.name:<{narrow}}  {'; '.join(unsupported)}")
    if op.requests:
        text = ["unsupported:", *text, ""]
    if op.autocast is not None:
        text += [f"under torch.autocast: {op.autocast}", ""]
    if op.takes is not None:
        text += ["takes:", *(f"  {line}" for line in op.takes.lines()), ""]
    passed = inspect.signature(op.eager).parameters.values()  # every implementation gets the same
    names = [p.name if p.kind is not p.VAR_POSITIONAL else f"*{p.name}" for p in passed]
    text += [f"an implementation gets: ({', '.join(names)})", ""]
    return "\n".join([*text, inspect.getdoc(op.public) or ""])
