"""Writes bench/margins.json, which `make docs` makes a page of (of some ops, prints the page): the
share of what the numerics contract allows that each implementation's error takes, and how small an
error the contract detects, for each op, result and dtype.

    python -m bench margins [--op OP,..] [--implementation NAME,..] [--faults]

With --faults it plants the faults of `bench.faults` in every contract case and writes nothing.

Exit code: 0; 1 if an implementation breaks the contract, a fault does not, or an op declares
another detectable error than it has (`Judged.detects`); 2 for invalid arguments.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from bench import faults
from bench.page.text import table
from tilewright.bench import contract, report, run
from tilewright.bench.options import chosen, names
from tilewright.core import platform
from tilewright.core.cases import DETECTED
from tilewright.core.registry import FLOATS, ImplementationUnavailable, Op, short
from tilewright.core.torch_names import pytree
from tilewright.selection import operations

COMMAND = "python -m bench margins"
INTERPRETED = (
    " (`triton` in its interpreter, which takes no bfloat16: one of the three per case, in float16 "
    "in every fourth case)"
)
FILE = pathlib.Path(__file__).with_name("margins.json")


class Row(NamedTuple):
    """A result of an op in a dtype, in all contract cases.

    shares: implementation -> its largest error as a share of the budget.
    detected: the least error of an ordinary element that always breaks the contract; None where
        there is no such number.
    """

    op: str
    result: str
    dtype: str
    shares: dict[str, float]
    detected: float | None


def rows(op: Op, implementations: Iterable[str] | None = None) -> Iterator[Row]:
    """implementations: default: those that run here."""
    for dtype in FLOATS:
        by_label: dict[str, tuple[dict[str, float], list[float]]] = {}
        usable = [
            n for n in op.usable("cpu", dtype) if implementations is None or n in implementations
        ]
        for i, case in enumerate(c for c in op.cases if "contract" in c.tags):
            for seed, layout in enumerate(contract.LAYOUTS):
                kwargs = case.make("cpu", dtype, seed)
                labels = _labels(op, kwargs)
                by = contract.reference(op, kwargs, dtype, layout)
                for name in by.truth:
                    _, detected = by_label.setdefault(labels.get(name, name), ({}, []))
                    least = faults.detectable(by, name)
                    detected += [] if least is None else [least]
                for implementation in usable:
                    if implementation == "triton" and not _interpreted(dtype, i, seed):
                        continue
                    try:
                        findings = contract.judge(op, implementation, kwargs, by)
                    except ImplementationUnavailable:
                        continue
                    for f in findings:
                        shares, _ = by_label[labels.get(f.name, f.name)]
                        shares[implementation] = max(shares.get(implementation, 0.0), f.share)
                        if not f.holds:
                            print(f"{op.name}[{implementation}], {case.name}, {short(dtype)}: {f}")
        for label, (shares, detected) in by_label.items():
            yield Row(op.name, label, short(dtype), shares, max(detected, default=None))


def _interpreted(dtype: torch.dtype, case: int, layout: int) -> bool:
    """Whether Triton's interpreter runs this: it is slow, and truncates on a cast to bfloat16. An
    op's cases alternate between layouts, and float16, which differs from float32 in loads and
    stores alone, runs in every fourth.
    """
    few = dtype == torch.float16 and case % 4
    return dtype != torch.bfloat16 and not few and case % len(contract.LAYOUTS) == layout


def _labels(op: Op, kwargs: dict[str, Any]) -> dict[str, str]:
    """The outputs of one list under one name, that of the list in the result."""
    outs = op.public(**contract.convert(kwargs, None), implementation="eager")
    if not (isinstance(outs, tuple) and any(isinstance(o, list) for o in outs)):
        return {}
    paths, _ = pytree.tree_flatten_with_path(outs)
    # The result is a tuple, so a path begins with an index.
    firsts = [cast("pytree.SequenceKey[Any]", path[0]) for path, _ in paths]
    return {f"out {i}": f"out {first.idx}" for i, first in enumerate(firsts)}


def planted(op: Op) -> tuple[int, int]:
    """Plants every fault in every contract case. Prints those that the contract accepts. Returns
    how many it planted, and how many were accepted.
    """
    count = accepted = 0
    for dtype in FLOATS:
        for case in (c for c in op.cases if "contract" in c.tags):
            for seed, layout in enumerate(contract.LAYOUTS):
                for fault in faults.plant(op, case, dtype, seed, layout):
                    count += 1
                    if not fault.caught:
                        accepted += 1
                        print(
                            f"{op.name}, {case.name}, {short(dtype)}, {layout}: "
                            f"{fault.fault} as {fault.name} holds"
                        )
    return count, accepted


def undeclared(op: Op, measured: Iterable[Row]) -> list[str]:
    """What `Judged.detects` says otherwise: less than is detected, or more than twice as much."""
    wrong = []
    for row in measured:
        if row.detected is None:
            continue
        said = op.judged.detected(getattr(torch, row.dtype), row.result)
        if not row.detected <= said or (said > DETECTED and said > 2 * row.detected):
            wrong.append(
                f"{op.name}, {row.result}, {row.dtype}: detects {row.detected:.2%}, declared "
                f"{said:.2%}; to declare it, judged=Judged(detects={{torch.{row.dtype}: "
                f'{{"{row.result}": {row.detected:.4f}}}}})'
            )
    return wrong


def text(measured: Sequence[Row], made: str) -> str:
    """JSON, a row in a line. Numbers have four significant digits, of which the page shows two."""
    lines = []
    for row in measured:
        shares = {name: float(f"{share:.4g}") for name, share in row.shares.items()}
        least = None if row.detected is None else float(f"{row.detected:.4g}")
        lines.append(json.dumps([row.op, row.result, row.dtype, shares, least]))
    return f'{{"made": {json.dumps(made)}, "rows": [\n' + ",\n".join(lines) + "\n]}\n"


def committed(file: pathlib.Path = FILE) -> str:
    """The page of a file that `text` wrote."""
    made = json.loads(file.read_text())
    return page([Row(*row) for row in made["rows"]], made["made"])


def page(measured: Sequence[Row], made: str) -> str:
    head = ["op", "result", "dtype", "error / allowed", "detected in an ordinary element"]
    rows = []
    for row in measured:
        shares = (f"{n} {s:.2f}" for n, s in row.shares.items() if n != "eager")
        least = row.detected
        rows.append(
            (
                [
                    f"`{row.op}`",
                    row.result,
                    row.dtype,
                    ", ".join(shares),
                    "one step" if least is None else "any" if not least else f"{least:.2g}",
                ],
                (),
            )
        )
    interpreted = any("triton" in row.shares for row in measured)
    return "\n".join(
        [
            "# What the contract leaves",
            "",
            f"Generated by `{COMMAND}` ({made}): do not edit this page.",
            "",
            "The largest error of each implementation that runs on a CPU, as a share of what the "
            "[numerics contract](numerics.md#the-contract) allows, in every contract case, with "
            f"contiguous, strided and expanded upstream gradients{INTERPRETED * interpreted}. "
            "`out N` are the outputs in order, the codes and scales of a quantized one each by "
            "itself. The last column is the least error of an ordinary element, relative to it, "
            "that breaks the contract in every case. Codes are held to steps of their grid and "
            "integers to equality, so that one step off breaks it; `any`: every implementation has "
            "the twin's values.",
            "",
            *table(head, rows),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--op", type=names(), metavar="OP,..", help="default: every op")
    parser.add_argument(
        "--implementation", type=names(), metavar="NAME,..", help="default: those that run here"
    )
    parser.add_argument("--faults", action="store_true", help="plant faults; write nothing")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        help="where to write JSON; default: bench/margins.json, and nowhere with --op or "
        "--implementation",
    )
    args: Any = parser.parse_args(argv)
    table_ = operations()
    ops = [table_[n] for n in chosen(parser, "--op", args.op, list(table_))]
    if args.faults:
        counts = [planted(op) for op in ops]
        count, accepted = (sum(n) for n in zip(*counts, strict=True))
        print(f"{count} faults planted, {accepted} hold the contract")
        return int(accepted > 0)
    measured, wrong = [], []
    for op in ops:
        of_op = list(rows(op, args.implementation))
        measured += of_op
        wrong += undeclared(op, of_op)
        wrong += [
            f"{op.name}[{n}], {r.result}, {r.dtype}: breaks the contract"
            for r in of_op
            for n, s in r.shares.items()
            if s > 1
        ]
    for line in wrong:
        print(line)
    meta = run.metadata("cpu", args, list(argv or ()))
    made = f"commit {report.commit(meta)}, {datetime.date.today()}, {platform.cpu_name()}"
    out = args.out or (FILE if args.op is args.implementation is None else None)
    if out is None:
        print(page(measured, made))
    else:
        out.write_text(text(measured, made))
    return int(bool(wrong))
