"""The compile gate: compiles every GPU kernel of the registry for its target GPUs, without a GPU.

Each implementation's `tunables` and `gate` give specs, for the heuristics' launch configurations
and for all those in the committed tables. Each spec is compiled for every architecture. The gate
fails on:

- a kernel that does not compile
- spilled registers or any local memory
- more shared memory than the GPU has
- a need of the spec (wide loads and stores, matrix or copy instructions) that PTX or machine code
  does not meet
- fewer blocks per SM than the launch configuration counts on
- anything worse than the committed budget: more registers or shared memory, more instructions per
  element in a streaming kernel, narrower global loads or stores, a smaller share of wide ones, a
  matrix or copy instruction no longer used, a kernel without a budget, a budget without a kernel

A budget belongs to one version of one compiler (budgets/triton-3.9.0.json). For a version without
such a file, only the rules that need no budget are checked.

A budget records the digest of the source, launch configuration and needs that it was written for.
Kernels with another digest are compiled, and the first of each family of ops; --all: all.

    tilewright gate --registry [--op OP] [--arch 90] [--all] [--update] [--space] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tilewright.core.registry import Op
from tilewright.kernels import tuning
from tilewright.selection import operations
from tilewright_lab.gate import machine_code
from tilewright_lab.gate import space as gate_space
from tilewright_lab.gate.compilers import (
    ARCHS,
    COMPILERS,
    Compiler,
    Result,
    collect,
    compile_all,
    key_of,
    launched,
)
from tilewright_lab.gate.verdict import (
    BUDGETED,
    budgeted,
    judge,
    problems,
    table,
    unmet,
    write_budgets,
)


@dataclass
class Plan:
    """The compilations of one run.

    digests: by spec name.
    known: budgets by compiler name; None: no budget file.
    left_out: unchanged tasks that are not compiled.
    """

    specs: dict[str, Any]
    archs: tuple[int, ...]
    compilers: dict[type, Compiler]
    tasks: list[tuple[str, int]]
    digests: dict[str, str]
    known: dict[str, dict[str, Any] | None]
    left_out: set[tuple[str, int]]


def main(
    argv: list[str],
    others: Callable[[], dict[str, Any]] | None = None,
    archs: Sequence[int] = ARCHS,
    prog: str = "tilewright gate --registry",
) -> int:
    """Exit code. 0: passed; 1: a failure; 2: the gate cannot run here, with the reason.

    others: gives specs, by name, that are compiled in place of the registry's; a budget of which
        they have none is no failure.
    archs: what is compiled for without --arch.
    prog: the command's name.
    """
    ops = operations()
    parser = _parser(ops, prog)
    args = parser.parse_args(argv)
    if others is not None and (args.space or args.update):
        parser.error("--space and --update are of the registry's own kernels")
    start = time.time()
    names = {c.name for c in COMPILERS.values()}
    if unknown := set(args.require) - names:
        parser.error(
            f"argument --require: no compiler {', '.join(sorted(unknown))}; have "
            f"{', '.join(c.name for c in COMPILERS.values())}"
        )
    absent = {c.name: reason for c in COMPILERS.values() if (reason := c.missing())}
    for name, reason in absent.items():
        if name in args.require:
            print(f"{prog}: {reason}", file=sys.stderr)
            return 2
    args.arch, args.whole = args.arch or archs, others is None and not args.space
    specs = collect(ops.values(), args.space, absent) if others is None else others()
    if args.op:
        specs = {name: spec for name, spec in specs.items() if name.split("/")[0] in args.op}
    if not specs:
        print(
            f"{prog}: no kernels to compile for {', '.join(args.op or ops)}",
            file=sys.stderr,
        )
        return 2
    plan, notes = _plan(args, specs, absent)
    tasks = [task for task in plan.tasks if task not in plan.left_out]
    if args.space and not args.update:
        rejected = gate_space.known(ops.values(), tasks)
        tasks = [task for task in tasks if task not in rejected]
        notes.append(f"{len(rejected)} candidates left the spaces already ({tuning.REJECTED.name})")
    results = compile_all(specs, tasks, args.jobs)
    failures = []
    for kind, compiler in plan.compilers.items():
        compiler_results = [r for r in results if type(specs[r.name]) is kind]
        failures += _judge(args, plan, compiler, compiler_results, notes)
    versions = {c.name: c.version() for c in plan.compilers.values()}
    if args.json:
        report = {"compilers": versions, "results": [asdict(r) for r in results]}
        print(json.dumps({**report, "failures": failures, "notes": notes}, indent=1))
        return 1 if failures else 0
    print(table(results, plan.archs))
    for line in (*notes, *(f"FAILED {line}" for line in failures)):
        print(line)
    by = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(
        f"{len(specs)} kernels, {len(results)} compilations by {by} in {time.time() - start:.0f} "
        f"s: {len(failures) or 'no'} failures"
    )
    return 1 if failures else 0


def _plan(
    args: argparse.Namespace, specs: dict[str, Any], absent: dict[str, str]
) -> tuple[Plan, list[str]]:
    """The plan, and notes about everything that is not compiled."""
    archs = tuple(sorted(set(args.arch)))
    notes = [
        f"sm_{a}: {reason}; of its machine code nothing was checked"
        for a in archs
        if (reason := machine_code.cannot_disassemble(a))
    ]
    notes += [f"kernels in {name} were skipped: {reason}" for name, reason in absent.items()]
    compilers = {kind: c for kind, c in COMPILERS.items() if c.name not in absent}
    known = {
        c.name: json.loads(path.read_text()) if (path := c.budget_file()).exists() else None
        for c in compilers.values()
    }
    digests = {name: COMPILERS[type(spec)].digest(spec) for name, spec in specs.items()}

    def unchanged(name: str, arch: int) -> bool:
        budget = (known[COMPILERS[type(specs[name])].name] or {}).get(key_of(name, arch), {})
        return budgeted(name) and digests[name] == budget.get("digest")

    tasks = launched(specs, archs)
    same = [] if args.all else [task for task in tasks if unchanged(*task)]
    # A change of what no digest has, such as ptxas, shows in these.
    first = {_family(name): (name, arch) for name, arch in reversed(tasks)}
    left_out = {*same} - {*first.values()}
    if same:
        notes.append(
            f"{len(same)} of {len(tasks)} did not change since their budgets were written: "
            f"{len(left_out)} of them were not compiled (--all compiles them)"
        )
    return Plan(specs, archs, compilers, tasks, digests, known, left_out), notes


def _family(name: str) -> str:
    """The package of a spec's op; the op's name, if the registry has none of it."""
    op = operations().get(name.split("/")[0])
    module = getattr(op and op.public, "__module__", None)
    return module.rpartition(".")[0] if module else name.split("/")[0]


def _judge(
    args: argparse.Namespace,
    plan: Plan,
    compiler: Compiler,
    results: list[Result],
    notes: list[str],
) -> list[str]:
    """Failures of one compiler's kernels. With --update, writes their budgets instead of comparing
    with them, or, with --space, the candidates that leave the spaces.
    """
    if args.space and args.update:
        ops, version = operations().values(), compiler.version()
        number = gate_space.write(ops, version, results, plan.specs)
        notes.append(f"wrote {tuning.REJECTED.name}: {number} candidates")
        return []
    path, budgets = compiler.budget_file(), plan.known[compiler.name]
    present = {key_of(*task) for task in plan.tasks}

    def in_scope(key: str) -> bool:
        return (
            args.whole
            and (not args.op or key.split("/")[0] in args.op)
            and int(key.rsplit("_", 1)[1]) in plan.archs
        )

    stale = [key for key in budgets or () if key not in present and in_scope(key)]
    if args.update:
        budgets = {key: b for key, b in (budgets or {}).items() if key not in stale}
        for r in results:
            if r.facts and budgeted(r.name):  # failures are compiled again next time
                fails = problems(r, plan.specs[r.name]) or unmet(r, plan.specs[r.name])
                facts = {
                    k: v for k, v in asdict(r.facts).items() if k in BUDGETED and v is not None
                }
                budgets[r.key] = facts if fails else {"digest": plan.digests[r.name], **facts}
        write_budgets(path, budgets)
        notes.append(f"wrote {path.name}: {len(budgets)} budgets")
        stale = []
    elif budgets is None:
        have = (
            ", ".join(sorted(p.stem for p in path.parent.glob(f"{compiler.name}-*.json"))) or "none"
        )
        notes.append(
            f"no budgets for {compiler.name} {compiler.version()} (there are: {have}): only "
            "compilation, spills, local memory, needs and the GPUs' limits were checked"
        )
    return judge(results, plan.specs, budgets, stale)


def _parser(ops: dict[str, Op], prog: str) -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--op", action="append", choices=list(ops), help="only this op's kernels (repeatable)")
    add(
        "--arch",
        action="append",
        type=int,
        choices=ARCHS,
        help="only this compute capability (repeatable)",
    )
    add(
        "--all",
        action="store_true",
        help="compile all kernels that did not change since their budget was written, instead "
        "of the first of each family of ops",
    )
    add(
        "--update",
        action="store_true",
        help="write the budgets instead of checking them; with --space, the list of candidates "
        "that spill",
    )
    add(
        "--space",
        action="store_true",
        help="compile every candidate configuration of every search instead: none may spill, "
        "exceed the shared memory, or have narrower accesses than its kernel requires",
    )
    add(
        "--require",
        type=lambda names: names.split(","),
        default=["triton"],
        metavar="COMPILERS",
        help="comma-separated compilers that must be available; kernels of unavailable ones are "
        "skipped, with the reason (default: triton)",
    )
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="number of processes (default: one per core)",
    )
    return parser
