"""Stages that run launches under NVIDIA's tools: compute-sanitizer and Nsight Compute."""

from __future__ import annotations

import csv
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bench.stages.checks import own_on_gpus, result
from tilewright import selection
from tilewright.bench import contract, sources, timing
from tilewright.bench.runner import Unit
from tilewright.bench.units import smallest
from tilewright.core import registry
from tilewright.core.registry import Op

# Ops whose kernels index by data, share accumulators or overwrite their inputs, most used first.
LAUNCHED = (
    "moe_mlp",
    "grouped_gemm",
    "attention",
    "permute",
    "unpermute",
    "route",
    "cross_entropy",
    "rmsnorm",
    "rope",
    "adamw_",
)
PROCESSES = 2  # of memcheck: most of a process's time is importing PyTorch under the tool
SECONDS = 55.0  # of a tool's process, within its unit's limit
# Kernels whose limit is least known: a table look-up per element, two sums over each row, and
# the product with an epilogue. (op, case, kernel, passes.)
COUNTED = (
    ("dequantize_nf4", "llama-3-8b-down", "_nf4_dequantize", "forward"),
    ("rmsnorm", "qwen3-8b", "_backward", "forward_backward"),
    ("moe_mlp", "qwen3-30b-a3b_32768", "_gemm", "forward"),
)
LAUNCHES = 4  # of them: the MoE has two products
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats", "WarpStateStats")
BEGIN, RAISED = "tilewright launches ", "tilewright raised "


def launch(ops: Sequence[str], cases: Sequence[str] = (), passes: Sequence[str] = ()) -> None:
    """Runs ops' Triton implementations, and prints which one begins; for a process under a tool.

    cases, passes: a timed case of each op (default: its smallest), and "forward" if no graph is to
        be recorded.
    Returns at the first exception, since a lost context would fail all later launches.
    """
    for i, name in enumerate(ops):
        print(f"{BEGIN}{name}", flush=True)
        op = selection.operations()[name]
        case = (
            next(c for c in op.cases if c.name == cases[i] and "cuda" in c.tags)
            if cases
            else smallest(op)
        )
        assert case is not None, "every op has a contract case"
        kwargs = case.make("cuda", torch.bfloat16, 0)
        try:
            if passes and passes[i] == "forward":
                with torch.no_grad():
                    op.public(**kwargs, implementation=own_on_gpus(op))
            else:
                contract.run(op, own_on_gpus(op), kwargs)
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{RAISED}{timing.first_line(error)}", flush=True)
            return


def _program(*arguments: object) -> list[str]:
    called = ", ".join(map(repr, arguments))
    code = f"from bench.stages import tools; tools.launch({called})"
    return [sys.executable, "-u", "-c", code]


def _output(command: Sequence[str]) -> tuple[str, str | None]:
    """What a command printed, and why it did not end well, or None."""
    # A session of its own: the tool's child holds the GPU, and would outlive it.
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        text, _ = child.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        return child.communicate()[0], f"did not end within {SECONDS:g} s"
    return text, f"exit code {child.returncode}" if child.returncode else None


def _digest(ops: Iterable[Op]) -> str:
    return " ".join(sources.digest(op, "cuda") for op in ops)


# ---- compute-sanitizer


def sanitize_units(ops: Sequence[Op]) -> list[Unit]:
    """One unit of the LAUNCHED ops among these, whose processes run side by side: memcheck of all,
    some in each process, and racecheck of those without bulk copies, whose barriers it does not
    know.
    """
    by_name = {op.name: op for op in ops if "triton" in op.names()}
    asked = [by_name[n] for n in LAUNCHED if n in by_name]
    plain = [op.name for op in asked if not copies_in_bulk(op)]
    names = [op.name for op in asked]
    parts = [("memcheck", names[i::PROCESSES]) for i in range(PROCESSES)]
    parts = [part for part in (*parts, ("racecheck", plain)) if part[1]]
    if not parts:
        return []

    def make():
        with ThreadPoolExecutor(len(parts)) as pool:
            rows = [r for results in pool.map(lambda p: _sanitized(*p), parts) for r in results]
        return {"op": ", ".join(names), "case": "launches", "results": rows}

    blank = {"op": ", ".join(names), "case": "launches", "results": []}
    options = {"processes": parts}
    return [Unit("sanitize/launches", make, blank, 60.0, options, _digest(asked))]


def _sanitized(tool: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """The results of ops in one process under one of the sanitizer's tools."""

    def results(outcomes):
        return [
            {**result(tool, torch.bfloat16, status, reason and f"{n}: {reason}"), "op": n}
            for n, status, reason in outcomes
        ]

    program = shutil.which("compute-sanitizer")
    if program is None:
        reason = "compute-sanitizer is not installed"
        return results((n, "unavailable", reason) for n in names)
    # PyTorch and Triton ask the driver for what may be missing, which is no error of a kernel.
    options = ("--tool", tool, "--report-api-errors", "no", "--error-exitcode", "77")
    text, problem = _output([program, *options, *_program(list(names))])
    if "Device not supported" in text:
        reason = "compute-sanitizer does not support this device"
        return results((n, "unavailable", reason) for n in names)
    return results(verdicts(names, text, problem))


def kernels(op: Op) -> Iterator[Any]:
    """The specs of the Gluon and Triton kernels of an op's usual launches."""
    for impl in (i for i in op.implementations if i.name in ("gluon", "triton")):
        yield from impl.gate()
        for tunable in impl.tunables():
            for key in map(tunable.named, tunable.keys):
                yield from tunable.specs(key, tunable.heuristic(**key))


def copies_in_bulk(op: Op) -> bool:
    """Whether a kernel of the op uses the tensor memory accelerator of compute capability 9.0."""
    return any("tma" in getattr(spec, "uses", {}).get(90, ()) for spec in kernels(op))


def verdicts(
    names: Sequence[str], text: str, problem: str | None
) -> Iterator[tuple[str, str, str | None]]:
    """(op, status, reason) by the output of a tool over `launch`: what it printed between the
    beginning of an op and that of the next is about that op.
    """
    heads, *parts = text.split(BEGIN)
    about = {part.partition("\n")[0].strip(): part.partition("\n")[2] for part in parts}
    errors = {name: _errors(lines) for name, lines in about.items()}
    last = next(reversed(about), None)
    for name in names:
        threw = about.get(name, "").partition(RAISED)[2].partition("\n")[0]
        if name not in about:
            reason = f"not reached: {last or heads.strip()[-300:]} ended the process"
            yield name, "unavailable" if last else "error", reason
        elif errors[name]:
            yield name, "broken", "; ".join(errors[name][:12])
        elif threw or (problem and name == last and not any(errors.values())):
            yield name, "error", threw or problem
        else:
            yield name, "holds", None


def _errors(text: str) -> list[str]:
    """The lines of a tool about errors, without its summaries."""
    lines = [s.strip("= ") for s in text.splitlines() if s.startswith("=========")]
    return [line for line in lines if line and "SUMMARY" not in line]


# ---- Nsight Compute


def counter_units(here: Iterable[tuple[Op, registry.Case]]) -> list[Unit]:
    """One unit, so that PyTorch is imported once: counters of the COUNTED kernels among these
    cases.
    """
    by_name = {(op.name, case.name): op for op, case in here}
    asked = [row for row in COUNTED if row[:2] in by_name]
    return [_counter_unit([by_name[row[:2]] for row in asked], asked)] if asked else []


def _counter_unit(ops: Sequence[Op], asked: Sequence[tuple[str, str, str, str]]) -> Unit:
    names, cases, kernels_, passes = (list(column) for column in zip(*asked, strict=True))
    document = functools.partial(dict, op=", ".join(names), case="ncu")

    def outcome(status: str, reason: str | None, rows: Sequence[dict[str, str]] = ()):
        return document(
            results=[result("triton", torch.bfloat16, status, reason)], counters=list(rows)
        )

    def make():
        program = shutil.which("ncu")
        if program is None:
            return outcome("unavailable", "Nsight Compute is not installed")
        options = ["--clock-control", "none", "--kernel-name", f"regex:^({'|'.join(kernels_)})$"]
        options += ["--launch-count", str(LAUNCHES), "--csv", "--page", "details"]
        options += [o for section in SECTIONS for o in ("--section", section)]
        text, problem = _output([program, *options, *_program(names, cases, passes)])
        rows = counters(text)
        if rows:
            return outcome("holds", None, rows)
        # A tool that is not permitted to read them says nothing about the kernels.
        return outcome("unavailable", f"{problem or 'no counters'}: {text.strip()[-600:]}")

    return Unit(
        "counters/kernels",
        make,
        document(results=[], counters=[]),
        60.0,
        {"asked": asked, "sections": SECTIONS},
        _digest(ops),
    )


def counters(text: str) -> list[dict[str, str]]:
    """The rows of `ncu --csv --page details`, which follow what the program printed."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    fields = {
        "kernel": "Kernel Name",
        "section": "Section Name",
        "metric": "Metric Name",
        "unit": "Metric Unit",
        "value": "Metric Value",
    }
    return [
        {name: row[column] for name, column in fields.items()}
        for row in csv.DictReader(line for line in lines[start:] if line.startswith('"'))
        if row.get("Metric Name")
    ]
