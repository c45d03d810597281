"""Times every provider of every op on its timed cases. A row has a time only if the contract
holds.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pathlib
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from tilewright.bench import contract, peers, pieces, report, sources, store, timing
from tilewright.bench.peer import Unsupported
from tilewright.bench.providers import BASELINES, Provider, gate, providers
from tilewright.core import platform
from tilewright.core.registry import Case, ImplementationUnavailable, Op, short

SEED = 0
COPY = "copy of as many bytes"  # key of copies timed beside the providers; not a provider's name


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement.

    rounds, max_seconds: per case (see timing.interleave).
    sample_seconds: shortest sample on a CPU.
    isolated: whether kernel times are profiled, and calls timed on an idle device (CUDA only).
    baseline_slack: a baseline within this multiple of the contract's budget is timed, and marked.
        At 1 the contract is the same for all. Never applied to tilewright's implementations.
    """

    rounds: int = 15
    max_seconds: float = 60.0
    sample_seconds: float = 0.008
    baseline_slack: float = 1.0
    isolated: bool = True


# ---- one case


def passes(provider: Provider, kwargs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """The timed callables: "forward" records no autograd graph; "forward_backward" is a training
    step's use of the op; "backward" is the second half of that, with its forward untimed.

    The upstream gradient is drawn here. Only ops with differentiable outputs have a backward. It
    returns gradients and does not accumulate them: accumulation copies what two inputs share and
    what is not laid out as its input, which the backward of the op before would take as it is.
    """
    plain = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    inputs = [v for v in kwargs.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    call = provider.call
    assert call is not None  # it has no reason

    def forward():
        with torch.no_grad():
            return call(**plain)

    outs = contract.leaves(call(**kwargs)) if inputs else []
    differentiable = [i for i, o in enumerate(outs) if o.requires_grad]
    if not differentiable:
        return {"forward": forward}
    grads = contract.upstream([outs[i] for i in differentiable], "contiguous")
    del outs  # it would keep its graph alive

    graph: list[torch.Tensor] = []

    def record():
        outputs = contract.leaves(call(**kwargs))
        graph[:] = [outputs[i] for i in differentiable]

    def backward():
        torch.autograd.grad(graph, inputs, grads, allow_unused=True)
        graph.clear()  # else its memory would stay allocated in other providers' rounds

    def forward_backward():
        record()
        backward()

    return {
        "forward": forward,
        "backward": timing.After(record, backward),
        "forward_backward": forward_backward,
    }


# Long: a case's steps in their order, which share its inputs, tasks and rows.
def measure(
    op: Op,
    case: Case,
    device: str,
    dtype: torch.dtype,
    roofline: timing.Roofline,
    clock: timing.CpuClock | timing.CudaClock,
    settings: Settings,
    only: Iterable[str] | None = None,
    say: Callable[[str], object] | None = None,
) -> list[dict]:
    """Measures the rows of one (op, case, dtype): the gate, then interleaved rounds.

    The rounds time the providers that passed, and copies with the least traffic of each pass, which
    shares of the roof refer to.
    only: names of providers; default: all.   say: is told the first call's time of each provider
        that passed the gate, and roughly how long the rest takes.
    """
    began = time.perf_counter()
    auto = op.choose(device, dtype)
    rows, inputs = {}, {}
    tasks: dict[tuple[str, Any], Callable[[], object]] = {}  # by provider and pass, or bytes
    left = [p for p in providers(op, device, dtype) if only is None or p.name in only]
    left = [p.name for p in left if not p.reason]
    if say is not None:
        say(
            f"{op.name} {case.name} {short(dtype)}: computes the truth in float64, then checks "
            f"{', '.join(left)}"
        )
    kwargs = case.make(device, dtype, SEED)
    reference = contract.reference(op, kwargs, dtype, cut=pieces.of(op, kwargs))
    for provider in providers(op, device, dtype):
        if only is not None and provider.name not in only:
            continue
        row = rows[provider.name] = report.row(
            op.name, case.name, short(dtype), provider.name, auto=provider.name == auto
        )
        if provider.reason:
            row.update(status="unavailable", reason=provider.reason)
            continue
        try:
            broken = gate(op, provider, kwargs, reference)
            row["contract"] = "; ".join(map(str, broken)) or (
                report.DRAWS
                if provider.draws
                else "definition"
                if provider.name == "eager"
                else "holds"
            )
            row["looked_at"] = reference.sample
            slack = settings.baseline_slack if provider.name in BASELINES else 1.0
            if any(not finding.error <= slack * finding.budget for finding in broken):
                row.update(status="failed", reason=row["contract"])
                continue
            call_kwargs = (
                contract.convert(kwargs, None)
                if provider.consumes or kwargs.get("inplace")
                else kwargs
            )
            inputs[provider.name] = call_kwargs
            for name, fn in passes(provider, call_kwargs).items():
                tasks[provider.name, name] = fn
            row["status"] = "ok"
            if say is not None:
                first, *_ = (fn for (name, _), fn in tasks.items() if name == provider.name)
                took, passed = clock.sample(first, 1), time.perf_counter() - began
                checked = left.index(provider.name) + 1
                checks = passed / checked * (len(left) - checked)
                rounds = settings.rounds * len(left) * 3 * max(took, settings.sample_seconds)
                rest = checks + min(rounds, settings.max_seconds)
                say(
                    f"    {provider.name}: the first pass takes {1e3 * took:.4g} ms, contract holds; "
                    f"{passed:.0f} s passed, about {rest:.0f} s left"
                )
        except (Unsupported, ImplementationUnavailable) as error:
            row.update(status="unavailable", reason=str(error))
        except Exception as error:  # one provider's failure must not lose the others
            timing.raise_if_lost(error, provider.name)
            row.update(status="error", reason=timing.first_line(error))
    del reference  # holds float64 copies of every result
    free(device, compiled=False)
    cost = case.cost(dtype.itemsize)
    for bytes_ in {cost.forward_bytes, cost.backward_bytes}:
        if copy := timing.copy_of(bytes_, device):
            tasks[COPY, bytes_] = copy
    timings, errors = timing.interleave(
        tasks,
        clock,
        rounds=settings.rounds,
        max_seconds=settings.max_seconds,
        seed=SEED,
        isolated=settings.isolated,
    )
    for (name, _), reason in errors.items():
        if name != COPY:  # the roofline's large copy replaces a failed one
            rows[name].update(status="error", reason=reason)
    # Leaves only providers in `timings`.
    copies = {
        bytes_: timings.pop((name, bytes_)).median for name, bytes_ in list(timings) if name == COPY
    }
    floors, large = roofline.floors(cost, short(dtype), copies), roofline.floors(cost, short(dtype))
    work = {
        "forward": (cost.forward_bytes, cost.forward_flops),
        "backward": (cost.backward_bytes, cost.backward_flops),
        "forward_backward": (
            cost.forward_bytes + cost.backward_bytes,
            cost.forward_flops + cost.backward_flops,
        ),
    }
    for (name, pass_name), pass_timing in timings.items():
        if rows[name]["status"] == "ok":
            rows[name][pass_name] = report.figures(
                pass_timing, *work[pass_name], floors[pass_name], large[pass_name]
            )
    if device == "cuda":
        for (name, pass_name), fn in tasks.items():
            if pass_name == "forward_backward" and rows[name]["status"] == "ok":
                # Gradients of earlier calls would count as allocated before.
                for t in contract.leaves(inputs[name]):
                    t.grad = None
                rows[name]["peak_mib"] = peak_mib(fn)
    report.compare_with_baselines(list(rows.values()))
    return list(rows.values())


def peak_mib(fn) -> float:
    """Peak memory of a call beyond what is allocated before, which includes inputs and upstream
    gradients.
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def free(device: str, compiled: bool = True) -> None:
    """Releases a case's cached memory and its compiled graphs, whose number Dynamo limits."""
    if compiled:
        torch.compiler.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


# ---- where and with what


def _git(*args: str) -> str | None:
    """Output of git in the checkout that tracks this file; None if there is none."""
    source_file = pathlib.Path(__file__)
    try:
        # An installed package may be inside an unrelated checkout.
        tracked = subprocess.run(
            ["git", "ls-files", "--error-unmatch", source_file.name],
            cwd=source_file.parent,
            capture_output=True,
        )
        if tracked.returncode:
            return None
        done = subprocess.run(
            ["git", *args], cwd=source_file.parent, capture_output=True, text=True
        )
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def clocks() -> dict[str, float | None] | None:
    """Current clocks of the first CUDA device, by nvidia-smi; None if unavailable."""
    names = ("sm_mhz", "memory_mhz", "power_w", "temperature_c")
    try:
        process = subprocess.run(
            [
                "nvidia-smi",
                "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu",
                "--format=csv,noheader,nounits",
                "-i",
                "0",
            ],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    values = {}
    for name, text in zip(names, process.stdout.split(","), strict=False):
        with contextlib.suppress(ValueError):  # "[N/A]": not reported by this device
            values[name] = float(text)
    return values or None


def moment(device: str) -> dict[str, Any]:
    """Metadata that changes between results: the date, the machine's load and the clocks."""
    return {
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "clocks": clocks() if device == "cuda" else None,
    }


def metadata(
    device: str,
    settings: Settings,
    argv: list[str],
    commit: str | None = None,
    *,
    trainer: bool = False,
) -> dict[str, Any]:
    """The metadata of a measurement: device, versions, commit, date and settings.

    commit: the commit of the sources, or a file of `record_commit`, for a copy of the sources whose
        git, if any, does not know it.
    trainer: whether the trainer is measured too.
    """
    versions = {**platform.describe(), **peers.versions()}
    known, dirty = recorded_commit(commit)
    if known is None:
        known = _git("rev-parse", "HEAD")
        # Reports and tables written by earlier calls do not change what is measured.
        changed = _git(
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--",
            ":/tilewright",
            ":/csrc",
            ":/setup.py",
            ":(top,exclude)tilewright/kernels/tuned",
            *(() if trainer else (":(top,exclude)tilewright/trainer",)),
            ":(top,exclude)tilewright/integrations",
        )
        dirty = None if changed is None else bool(changed)
    return {
        "device_type": device,
        "device": platform.device_name(device),
        "capability": None
        if device == "cpu"
        else "{}.{}".format(*torch.cuda.get_device_capability()),
        "cpu": versions.pop("cpu"),
        "threads": int(versions.pop("threads")),
        "versions": versions,
        "commit": known,
        "dirty": dirty,
        "source": sources.digest(),
        **moment(device),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "argv": argv,
        "settings": {**vars(settings), "seed": SEED},
    }


def record_commit(path: pathlib.Path) -> None:
    """Writes the commit and a digest of the sources, for a copy of them without git."""
    commit = _git("rev-parse", "HEAD")
    dirty = commit and bool(_git("status", "--porcelain", "--untracked-files=no"))
    store.write_json(path, {"commit": commit, "dirty": dirty, "source": sources.everything()})


def recorded_commit(commit: str | None) -> tuple[str | None, bool | None]:
    """The commit and whether there were local changes, as given or as recorded in a file; None if
    the sources are not those of the record.
    """
    if not commit or not commit.endswith(".json"):
        return commit, None
    path = pathlib.Path(commit)
    record = json.loads(path.read_text()) if path.exists() else {}
    if record.get("source") != sources.everything():
        return None, None
    return record["commit"], record["dirty"]


# ---- what there is to time


def timed(op: Op, device: str, names: Iterable[str] | None = None) -> list[Case]:
    return [c for c in op.cases if device in c.tags and (names is None or c.name in names)]


def listing(ops: Iterable[Op], device: str, dtypes: list[torch.dtype]) -> str:
    """Lists ops, their cases timed on the device, and providers: usable, or the reason why not."""
    lines = []
    for op in ops:
        cases = ", ".join(c.name for c in timed(op, device)) or "none"
        lines.append(f"{op.name}: cases timed on {device}: {cases}")
        reasons: dict[str, dict[str, str]] = {}
        for dtype in dtypes:
            for provider in providers(op, device, dtype):
                reasons.setdefault(provider.name, {})[short(dtype)] = provider.reason or "usable"
        width = max(map(len, reasons))
        for name, by_dtype in reasons.items():
            if len(set(by_dtype.values())) == 1:
                lines.append(f"  {name:<{width}}  {next(iter(by_dtype.values()))}")
            else:
                lines.append(
                    f"  {name:<{width}}  " + "; ".join(f"{d}: {r}" for d, r in by_dtype.items())
                )
        lines.append("")
    return "\n".join(lines)
