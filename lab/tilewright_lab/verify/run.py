"""Runs a scene in the model and in its references, and compares every module."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from tilewright.bench import contract
from tilewright_lab.verify.modules import (
    SLACK,
    Masks,
    Replayer,
    Row,
    attention_masks,
    compare,
    factor_of,
    kept_rows,
    observed,
    slack_of,
)
from tilewright_lab.verify.record import Call, Recorder, leaves
from tilewright_lab.verify.reference import Twin, said
from tilewright_lab.verify.scenes import Scene

WHOLE = "(end to end)"
DETACHED = "is detached: no gradient passes it"


class Ran(NamedTuple):
    """A scene's run in one model: its calls, output leaves, and gradients by parameters' names."""

    calls: list[Call]
    output: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]

    def masks(self) -> Masks:
        return {
            call.key: {k: v for k, v in call.arguments[1].items() if "mask" in k}
            for call in self.calls
        }

    def choices(self) -> dict[tuple[str, int], list[torch.Tensor]]:
        """Integers that modules returned: experts."""
        choices = {}
        for call in self.calls:
            ints = [
                t
                for t in leaves(call.output).values()
                if isinstance(t, torch.Tensor) and t.dtype == torch.int64
            ]
            if ints:
                choices[call.key] = ints
        return choices


def run(
    model: nn.Module, modules: dict[str, nn.Module], parameters: dict[str, Any], scene: Scene
) -> Ran:
    """Forward and backward, without touching `.grad`."""
    recorder = Recorder(modules, gradients=True)
    with recorder.recording():
        output = model(**scene.batch)
    values = {
        n: t
        for n, t in leaves(output).items()
        if isinstance(t, torch.Tensor) and t.is_floating_point()
    }
    wanted = {n: p for n, p in parameters.items() if p.requires_grad}
    if "loss" in values:
        ends, upstream = [values["loss"]], None
    else:
        ends = [t for t in values.values() if t.requires_grad]
        upstream = contract.upstream([t.detach() for t in ends], "contiguous")
        if scene.kept is not None:
            upstream = [_without_padding(g, scene.kept) for g in upstream]
    got: Iterable[torch.Tensor | None] = ()
    starts = [*wanted.values(), *recorder.starts]
    if starts and ends and ends[0].requires_grad:
        got = torch.autograd.grad(ends, starts, upstream, allow_unused=True)
    gradients: dict[str, torch.Tensor | None] = dict(zip(wanted, got, strict=False))
    return Ran(recorder.calls, {n: t.detach() for n, t in values.items()}, gradients)


def _without_padding(g: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    if g.shape[:2] != kept.shape:
        return g
    return g * kept.reshape(*kept.shape, *([1] * (g.dim() - 2)))


class Compared(NamedTuple):
    """rows: the modules'.   whole: end to end.   unchecked: reasons by path.   ran, truth: the runs
    of the model and of the reference in float64.   flips: tokens that chose other experts.
    replayers: replayers of the references, in float64 and in the model's dtype.
    """

    rows: list[Row]
    whole: list[Row]
    unchecked: dict[str, str]
    ran: Ran
    truth: Ran
    flips: int
    replayers: list[Replayer]


class _Entry(NamedTuple):
    label: tuple[str, str, str, str]
    result: torch.Tensor | None
    truth: torch.Tensor
    eager: torch.Tensor
    calls: tuple[Call, ...]
    key: str | int  # the name in `Replay.values`, or the id of a reference's parameter


def compare_scene(
    model: nn.Module, modules: dict[str, nn.Module], scene: Scene, wide: Twin, eager: Twin,
    parameters: dict[str, nn.Parameter],
) -> Compared:  # fmt: skip
    """parameters: of the model, by the names in the references' `parameters`."""
    ran = run(model, modules, parameters, scene)
    twins = []
    for twin in (wide, eager):
        inner = {p: m for p in modules if (m := twin.module(p)) is not None}
        with twin.computing():
            twins.append(run(twin.model, inner, twin.parameters, scene))
    replayers = [Replayer(t, r.masks()) for t, r in zip((wide, eager), twins, strict=True)]
    entries, unchecked = _entries(ran, scene, replayers, parameters)
    rows = _rows(entries, scene, replayers[0])
    rows += _detached(ran, twins[0], scene)
    flips = _flips(ran, twins[0], scene)
    whole = _whole(ran, twins[0], twins[1], scene, wide, eager)
    return Compared(rows, whole, unchecked, ran, twins[0], flips, replayers)


def compare_forward(
    model: nn.Module, modules: dict[str, nn.Module], scene: Scene, earlier: Compared, *,
    gradients: bool,
) -> Compared:  # fmt: skip
    """Values alone, in the mode that the model is in; `gradients`: whether a graph is recorded.

    earlier: what the same batch gave, for the references' masks.
    """
    recorder = Recorder(modules, gradients=False)
    with torch.set_grad_enabled(gradients), recorder.recording():
        model(**scene.batch)
    ran = Ran(recorder.calls, {}, {})
    entries, _ = _entries(ran, scene, earlier.replayers, {})
    rows = _rows(entries, scene, earlier.replayers[0])
    return earlier._replace(rows=rows, whole=[], unchecked={}, ran=ran)


def _rows(entries: list[_Entry], scene: Scene, wide: Replayer) -> list[Row]:
    rows = []
    for entry in entries:
        path, what = entry.label[1:3]
        atol = slack_of(entry.calls, what, type(wide.twin.module(path)).__name__)
        result = None if entry.result is None else kept_rows(entry.result, scene.kept)
        truth, eager = (kept_rows(t, scene.kept) for t in (entry.truth, entry.eager))
        row = compare(result, truth, eager, entry.label, atol)
        if row.units > 1 and math.isfinite(row.error):
            row = _conditioned(row, entry, scene, wide)
        rows.append(row)
    return rows


def _entries(ran: Ran, scene: Scene, replayers: list[Replayer], parameters):
    wide, eager = (r.twin for r in replayers)
    forwards = {c.path: m.forward for c in ran.calls if (m := wide.module(c.path)) is not None}
    entries: list[_Entry] = []
    unchecked: dict[str, str] = {}
    partner = {
        id(p): id(eager.parameters[n]) for n, p in wide.parameters.items() if n in eager.parameters
    }
    totals: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]] = ({}, {})
    owners: dict[int, list[Call]] = {}
    for call in ran.calls:
        if call.path not in forwards:
            unchecked[call.path] = "the configuration's class has no such module"
            continue
        try:
            truth, twin = (r.replay(call) for r in replayers)
        except Exception as error:
            unchecked[call.path] = said(error)
            continue
        own = observed(call, forwards[call.path], forwards)
        blind = _reads_padding(call, scene, replayers[0])
        by = ", ".join(call.picks)
        for name, value in truth.values.items():
            if name not in own and not name.startswith("gradient"):
                continue  # such as attention weights, which only the eager twin returns
            if blind and name.startswith("gradient"):
                continue
            if own.get(name, value).shape != value.shape and _of_positions(name):
                continue  # for all rows at once
            label = (scene.name, call.path, name, by)
            entries.append(_Entry(label, own.get(name), value, twin.values[name], (call,), name))
        for total, replayed in zip(totals, (truth, twin), strict=True):
            for key, g in replayed.parameters.items():
                total[key] = total[key] + g if key in total else g
        for key in truth.parameters:
            owners.setdefault(key, []).append(call)
    for name, p in wide.parameters.items():
        if id(p) not in totals[0] or name not in ran.gradients:
            continue
        calls = owners.pop(id(p), None)
        if calls is None:
            continue  # tied, and compared by its other name
        g, shown = ran.gradients[name], f"gradient of {name.rpartition('.')[2]}"
        g = torch.zeros_like(parameters[name]) if g is None else g
        own = name.rpartition(".")[0]
        path = own if own in forwards else calls[0].path
        if not name.startswith(path + "."):
            shown = f"gradient of {name}"
        label = (scene.name, path, shown, ", ".join(calls[0].picks))
        twin_g = totals[1].get(partner[id(p)])
        twin_g = torch.zeros_like(p) if twin_g is None else twin_g
        entries.append(_Entry(label, g, totals[0][id(p)], twin_g, tuple(calls), id(p)))
    return entries, unchecked


def _of_positions(name: str) -> bool:
    return name.startswith(("input position_ids of", "input input of"))


def _detached(ran: Ran, truth: Ran, scene: Scene) -> list[Row]:
    """Outputs that no gradient can pass, while one arrives at them in the reference: of the
    innermost modules of which that is so, and not of those that follow.
    """
    right = {c.key: c for c in truth.calls}
    rows, cut = [], set()
    for call in reversed(ran.calls):  # inner modules before those that they are in
        twin = right.get(call.key)
        if twin is None or (twin.into and not call.into) or call.key in cut:
            continue
        values = call.output_leaves()
        for name, g in twin.out.items():
            if name in values and name not in call.out and bool(g.any()):
                what = f"{f'output {name}'.strip()} {DETACHED}"
                label = (scene.name, call.path, what)
                rows.append(Row(*label, math.inf, 0.0, 1.0, (), 0.0, 1.0, ", ".join(call.picks)))
                outer = call.parent
                while outer is not None:
                    cut.add(outer.key)
                    outer = outer.parent
    return rows


def _reads_padding(call: Call, scene: Scene, replayer: Replayer) -> bool:
    """Whether a gradient arrives at the padding of attention, because of a fault elsewhere: what it
    makes of that is arbitrary.
    """
    if scene.kept is None or not attention_masks(replayer.masks.get(call.key, {})):
        return False
    gradients = (g for g in call.out.values() if g.shape[:2] == scene.kept.shape)
    return any(bool(g[~scene.kept].any()) for g in gradients)


def _conditioned(row: Row, entry: _Entry, scene: Scene, replayer: Replayer) -> Row:
    """The row with a budget that includes how far one rounding of all recorded values moves the
    truth: sums that cancel, such as the gradient of a bias, have no better answer.
    """
    g = torch.Generator().manual_seed(0)
    jittered = Replayer(replayer.twin, replayer.masks, g)
    moved, moved_factor = 0.0, 0.0
    truth = kept_rows(entry.truth, scene.kept)
    for _ in range(2):
        value = None
        for call in entry.calls:
            replayed = jittered.replay(call)
            part = (
                replayed.values.get(entry.key)
                if isinstance(entry.key, str)
                else replayed.parameters.get(entry.key)
            )
            if part is not None:
                value = part if value is None else value + part
        if value is None:
            continue
        value = kept_rows(value, scene.kept)
        moved = max(moved, contract.error(value, truth)[0])
        moved_factor = max(moved_factor, abs(factor_of(value, truth)[0]))
    return dataclasses.replace(
        row,
        budget=row.budget + moved,
        factor_budget=row.factor_budget + 2 * moved_factor,
    )


def _flips(ran: Ran, truth: Ran, scene: Scene) -> int:
    """Tokens that chose other experts than in float64, where roundings decided."""
    count = 0
    right = truth.choices()
    for key, ints in ran.choices().items():
        for a, b in zip(ints, right.get(key, ()), strict=False):
            if a.shape == b.shape:
                a, b = (kept_rows(t, scene.kept).sort(-1).values for t in (a, b))
                count += int((a != b).any(-1).sum())
    return count


def _norm_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    size = float(truth.double().norm())
    return float((value.double() - truth.double()).norm()) / max(size, 1e-300)


def _whole(ran: Ran, truth: Ran, eager: Ran, scene: Scene, wide: Twin, twin: Twin) -> list[Row]:
    """Outputs and gradients of the whole model, by norms."""
    rows = []
    dtype = next(twin.model.parameters()).dtype

    def add(what, value, right, narrow):
        if value is None or value.shape != right.shape:
            return
        value, right, narrow = (kept_rows(t, scene.kept) for t in (value, right, narrow))
        atol = 4 * SLACK[dtype]
        error, own = _norm_error(value, right), _norm_error(narrow, right)
        rows.append(Row(scene.name, WHOLE, what, error, own, 2 * own + atol, (), 0.0, 1.0, ""))

    for name, right in truth.output.items():
        if name in eager.output and name.split(".")[0] in ("loss", "logits", "last_hidden_state"):
            add(name, ran.output.get(name), right, eager.output[name])
    largest = max((float(g.norm()) for g in truth.gradients.values() if g is not None), default=0.0)
    for name, right in truth.gradients.items():
        narrow, own = eager.gradients.get(name), ran.gradients.get(name)
        # Those that are 0 but for rounding are compared module by module alone.
        if right is not None and narrow is not None and float(right.norm()) > 1e-3 * largest:
            add(f"gradient of {name}", own, right, narrow)
    return rows
