"""A call on the emulated GPU: its results, what its launches did, and its error."""

from __future__ import annotations

import inspect
import math
import pathlib
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tilewright.bench import contract
from tilewright.bench.tensors import convert, error, leaves, upstream
from tilewright.core.files import load_tensors
from tilewright_lab.cuda_stand_in import Unset
from tilewright_lab.emulator.driver import Driver, Launch
from tilewright_lab.emulator.faults import Fault
from tilewright_lab.emulator.memory import span
from tilewright_lab.kernel_target import Call, Rejected, told


@dataclass(frozen=True)
class Compared(contract.Finding):
    """The error of one result. why: what breaks it whatever its error; empty: nothing."""

    why: str = ""

    @property
    def holds(self) -> bool:
        return not self.why and super().holds


@dataclass
class Report:
    """What a call did.

    kernels: per kernel its launches and counts.   breaks: what fails the command.
    allowed: what was found, of kinds that were allowed.   errors: against the reference.
    """

    arch: int
    kernels: list[dict[str, Any]] = field(default_factory=list)
    breaks: list[Fault] = field(default_factory=list)
    allowed: list[Fault] = field(default_factory=list)
    errors: list[Compared] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        return {
            "arch": self.arch,
            "kernels": self.kernels,
            "breaks": [f.facts() for f in self.breaks],
            "allowed": [f.facts() for f in self.allowed],
            "errors": [asdict(f) | {"holds": f.holds} for f in self.errors],
        }


# ---- the run


@dataclass
class Results:
    """Outputs and gradients of a call, by name.

    grads: upstream gradients, by the number of the output.   names: the outputs' names.
    """

    tensors: dict[str, torch.Tensor]
    grads: dict[int, torch.Tensor]
    names: list[str]


def arguments_of(call: Call) -> dict[str, Any]:
    """The arguments by name, or by place if the function has no signature."""
    if call.kernel is not None:
        names = call.kernel.arg_names
    else:
        try:
            names = list(inspect.signature(call.target).parameters)
        except ValueError:
            names = []
    given = [names[i] if i < len(names) else f"argument {i}" for i in range(len(call.arguments))]
    return {**dict(zip(given, call.arguments, strict=True)), **call.named}


def differentiable(call: Call) -> None:
    """Asks for the gradients of all floating-point arguments, unless some require them already."""
    floats = [t for t in leaves(list(arguments_of(call).values())) if t.is_floating_point()]
    if call.kernel is not None or not floats:
        raise Rejected("--backward: needs a host function with floating-point tensors as arguments")
    if not any(t.requires_grad for t in floats):
        for t in floats:
            t.requires_grad_()


def gradients(result, arguments, grads) -> tuple[dict[str, Any], dict[int, torch.Tensor]]:
    """The gradients of the outputs with respect to the arguments that require them; None: autograd
    has none.

    grads: upstream gradients, by the number of the output; None: they are drawn.
    """
    outs = {i: t for i, t in enumerate(leaves(result)) if t.requires_grad}
    if grads is not None:
        outs = {i: t for i, t in outs.items() if i in grads}
    inputs = {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    if not outs or not inputs:
        raise Rejected("--backward: no output of the function depends on an argument by autograd")
    grads = grads or dict(zip(outs, upstream([*outs.values()], "contiguous"), strict=True))
    given = [grads[i].to(t.dtype) for i, t in outs.items()]
    of_inputs = torch.autograd.grad(
        [*outs.values()], list(inputs.values()), given, allow_unused=True
    )
    return {f"grad {n}": g for n, g in zip(inputs, of_inputs, strict=True)}, grads


def emulate(
    call: Call,
    driver: Driver,
    unset: Unset,
    backward: bool = False,
) -> Results:
    """Calls a host function or launches a kernel. Faults are in the driver afterwards."""
    written: dict[int, None] = {}

    def wrote(memory):
        unset.wrote(memory)
        for t, start in memory.tensors:
            if memory.written[start : start + span(t) * t.element_size()].any():
                written[t.data_ptr()] = None

    driver.unset, driver.wrote = unset.among, wrote
    arguments = arguments_of(call)
    result = call.run()
    tensors, grads = {}, {}
    if outs := leaves(result):
        tensors = {f"out {i}": t.detach() for i, t in enumerate(outs)}
    else:
        tensors = {
            n: t
            for n, t in arguments.items()
            if isinstance(t, torch.Tensor) and t.data_ptr() in written
        }
    names = list(tensors)
    if backward:
        more, grads = gradients(result, arguments, None)
        tensors |= {n: g for n, g in more.items() if g is not None}
    for name, t in tensors.items():
        if outs and (number := unset.elements(t)):
            driver.faults.append(
                Fault(
                    "uninitialized",
                    f"{name} {list(t.shape)} is returned with {number} elements that nothing wrote",
                )
            )
    return Results(tensors, grads, names)


def kernels_of(driver: Driver) -> list[dict[str, Any]]:
    """Per kernel: launches, programs, threads of a program, shared memory, and what it cost."""
    by_name: dict[str, list[Launch]] = {}
    for launch in driver.launches:
        by_name.setdefault(launch.name, []).append(launch)
    rows = []
    for name, launches in by_name.items():
        counts = (driver.counts or {}).get(name)
        rows.append(
            {
                "kernel": name,
                "launches": len(launches),
                "programs": sum(x * y * z for x, y, z in (launch.grid for launch in launches)),
                "threads": 32 * launches[-1].metadata.num_warps,
                "shared": max(launch.metadata.shared for launch in launches),
                **(counts.facts() if counts else {}),
                "needed": counts.needed if counts else {},
                "conflicts by line": dict(counts.by_line.most_common(3)) if counts else {},
                "sectors by line": dict(counts.apart.most_common(3)) if counts else {},
            }
        )
    return rows


def over_limits(rows: list[dict[str, Any]], conflicts: int | None, sectors: float | None):
    """Faults of kernels that cost more than is accepted."""
    for row in rows:
        if conflicts is not None and row["conflicts"] > conflicts:
            worst = max(row["conflicts by line"].items(), key=lambda item: item[1])
            yield _limit(
                row, f"has {row['conflicts']} bank conflicts{_at(worst)}; accepted: {conflicts}"
            )
        if sectors is None:
            continue
        for kind, needed in row["needed"].items():
            ratio = row["requested"][kind] / needed if needed else 0
            if ratio > sectors:
                worst = max(row["sectors by line"].items(), key=lambda item: item[1])
                yield _limit(
                    row,
                    f"has {ratio:.2f} times the sectors {kind} that its bytes need"
                    f"{_at(worst)}; accepted: {sectors}",
                )


def _at(worst: tuple[str, int]) -> str:
    return f", most of them at {worst[0]}" if worst[0] else ""


def _limit(row, what):
    fault = Fault("limit", what)
    fault.kernel = row["kernel"]
    return fault


# ---- references


def compared(
    call: Call, reference: Any, emulated: Results, kept: dict[str, Any], backward: bool
) -> list[Compared]:
    """Errors of the results against the reference in float64, on the same (rounded) arguments.

    kept: the arguments as they were before the call.
    """
    truth = _refer(call, reference, convert(kept, torch.float64), emulated, backward)
    eager = _refer(call, reference, _promoted(kept), emulated, backward)
    findings = []
    for name in (n for n in emulated.tensors if n in truth):
        t = emulated.tensors[name]
        rounded = eager[name].to(t.dtype)
        twin = error(rounded, truth[name])[0]
        deviation, where = error(t, truth[name])
        budget, why = 2 * twin + contract.ATOL.get(t.dtype, 0), ""
        if deviation <= budget:
            why = _shared(t, rounded, truth[name])
        if not math.isfinite(budget):
            dtype = str(t.dtype).removeprefix("torch.")
            why = f"the error of the reference in {dtype} is infinite, and sets no bound"
        findings.append(Compared(name, deviation, twin, budget, where, why=why))
    for name in (n for n in truth if n not in emulated.tensors and truth[n].any()):
        why = "the reference has it, and the call gives none"
        findings.append(Compared(name, math.inf, 0.0, 0.0, (), why=why))
    if not findings:
        raise Rejected(
            f"--reference: it returns nothing to compare with {', '.join(emulated.tensors) or 'no output'}"
        )
    return findings


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all elements are the same; a NaN is the same as another."""
    if one.is_floating_point():
        one, other = one.double(), other.double()
        return torch.equal(one.isnan(), other.isnan()) and torch.equal(
            one.nan_to_num(), other.nan_to_num()
        )
    return torch.equal(one, other)


def _promoted(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, those of 16 bits in float32: a reference that is written for any dtype would
    else accumulate in 16 bits, and its error bound nothing.
    """
    narrow = (torch.bfloat16, torch.float16)
    return {
        name: convert(
            {name: value}, torch.float32 if getattr(value, "dtype", None) in narrow else None
        )[name]
        for name, value in arguments.items()
    }


def _shared(result: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor) -> str:
    """What breaks a 16-bit result whose every element is within a rounding: a factor that a row's
    elements share, as where the norm of a row was accumulated in 16 bits. Roundings of the elements
    average out in it.
    """
    if result.dtype not in (torch.bfloat16, torch.float16) or truth.dim() < 2:
        return ""
    r, e, t = (x.double().reshape(-1, truth.shape[-1]) for x in (result, eager, truth))
    energy = t.square().sum(-1)
    # Not below that of an ordinary row: one that is small by cancellation has the roundings of
    # large terms. And the number of elements that a row consists of, by its energy.
    floor = energy.clamp_min(float(energy.mean())).clamp_min(1e-300)
    count = (energy.square() / t.pow(4).sum(-1).clamp_min(1e-300)).clamp_min(1)
    factor, own = (((x - t) * t).sum(-1) / floor for x in (r, e))
    # Eight standard deviations, and more, of a mean of so many roundings.
    accepted = 2 * own.abs() + torch.finfo(result.dtype).eps / 2 * 8 / count.sqrt()
    row = int((factor.abs() / accepted).nan_to_num().argmax())
    if not factor[row].abs() > accepted[row]:
        return ""
    return (
        f"row {row} is {1 + float(factor[row]):.4f} times the right one, accepted "
        f"{float(accepted[row]):.1e} off: a sum that its elements share is not accumulated in float32"
    )


def _refer(call, reference, arguments, emulated: Results, backward) -> dict[str, torch.Tensor]:
    given = arguments
    if call.kernel is not None:
        takes = inspect.signature(reference).parameters
        if not any(p.kind == p.VAR_KEYWORD for p in takes.values()):
            given = {n: v for n, v in arguments.items() if n in takes}
    count = len(call.arguments) if call.kernel is None else 0
    values = list(given.values())
    with told("--reference: the function fails"):
        result = reference(*values[:count], **dict(list(given.items())[count:]))
    if isinstance(result, dict):
        return result
    outs = leaves(result)
    if outs and len(outs) != len(emulated.names):
        raise Rejected(
            f"--reference: it returns {len(outs)} tensors for {', '.join(emulated.names) or 'no output'}"
        )
    if not outs:
        return {n: arguments[n] for n in emulated.names if n in arguments}
    tensors = {n: t.detach() for n, t in zip(emulated.names, outs, strict=True)}
    if backward:
        for name, g in gradients(result, arguments, emulated.grads)[0].items():
            tensors[name] = torch.zeros_like(arguments[name[5:]]) if g is None else g
    return tensors


def interpreted(arguments: list[str], emulated: Results) -> list[Compared]:
    """Compares with the same call in Triton's interpreter, in another process."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "results")
        command = [sys.executable, "-m", "tilewright", "emulate"]
        run = subprocess.run(
            ["env", "TRITON_INTERPRET=1", *command, *arguments, "--results-to", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode or not path.exists():
            said = run.stderr.strip().splitlines() or ["it said nothing"]
            raise Rejected(f"--reference interpreter: {said[-1]}")
        theirs, _ = load_tensors(path)
    findings = []
    for name, t in emulated.tensors.items():
        # The interpreter truncates where a GPU rounds, and sums in another order.
        budget = 8 * torch.finfo(t.dtype).eps if t.is_floating_point() else 0.0
        deviation, where = error(t, theirs[name].double() if budget else theirs[name])
        findings.append(Compared(name, deviation, 0.0, budget, where))
    return findings
