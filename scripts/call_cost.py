"""Whether a commit imports and calls ops slower than another one, on a CPU.

    python scripts/call_cost.py BEFORE AFTER OUT.json      # two trees, with their C++ kernels

A process of each tree calls the same ops in turns, on the first contract case of each, which is so
small that a call is mostly host time, in C++ where both trees have it, else eagerly, with and
without a graph for the gradient. Recorded are microseconds of CPU time, the least of each round,
and of fresh processes the CPU seconds of `import tilewright` and `import tilewright.ops`, beyond
those of `import torch`.
"""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import two_trees

ROUNDS, SAMPLES, SECONDS = 9, 5, 0.01
IMPORTS = ("tilewright", "tilewright.ops")
IMPORT = "import time, torch; t = time.process_time(); import {}; print(time.process_time() - t)"


def serve() -> None:
    """Answers with the implementations of its ops, then for each line, an op and an implementation,
    with the least microseconds of a call.
    """
    import torch

    from tilewright.selection import operations

    answers = two_trees.answers()
    torch.set_num_threads(1)
    ops, calls = operations(), {}
    names = {n: [*_running(op)] for n, op in ops.items() if _case(op) is not None}
    print(json.dumps(names), file=answers, flush=True)
    for line in sys.stdin:
        if line not in calls:
            name, implementation, grad = line.split()
            calls[line] = _call(ops[name], implementation, grad == "grad")
        print(_least(calls[line]) * 1e6, file=answers, flush=True)


def _running(op: Any) -> Iterator[str]:
    """Of eager and C++, those that run on this processor."""
    for name in {"eager", "cpp"} & {*op.names()}:
        # ImplementationUnavailable, which the two trees have in different modules.
        with contextlib.suppress(RuntimeError):
            _call(op, name, False)()
            yield name


def _case(op: Any) -> Any:
    return next((c for c in op.cases if "contract" in c.tags), None)


def _call(op: Any, implementation: str, grad: bool) -> Any:
    import torch

    inputs = {
        name: v.detach().requires_grad_(grad and v.requires_grad)
        if isinstance(v, torch.Tensor)
        else v
        for name, v in _case(op).make("cpu", torch.float32, 0).items()
    }
    return lambda: op.public(**inputs, implementation=implementation)


def _least(call: Any) -> float:
    number, took = 1, 0.0
    while took < SECONDS:
        number *= 2 if took else 1
        took = _seconds(call, number)
    return min(_seconds(call, number) for _ in range(SAMPLES)) / number


def _seconds(call: Any, number: int) -> float:
    start = time.process_time()
    for _ in range(number):
        call()
    return time.process_time() - start


def main(trees: dict[str, pathlib.Path], out: pathlib.Path) -> None:
    own = {tree: two_trees.Served(__file__, path, path) for tree, path in trees.items()}
    known = {tree: served.answer() for tree, served in own.items()}
    imports = {name: {tree: [] for tree in trees} for name in IMPORTS}
    calls = []
    for name in sorted(set.intersection(*(set(found) for found in known.values()))):
        both = set.intersection(*({*found[name]} for found in known.values()))
        implementation = "cpp" if "cpp" in both else "eager"
        calls += [f"{name} {implementation} {grad}" for grad in ("no_grad", "grad")]
    rows: dict[str, Any] = {call: {tree: [] for tree in trees} for call in calls}
    for number in range(-1, ROUNDS):  # the first caches
        order = two_trees.in_turns(trees, number)
        for call in calls:
            for tree in order:
                us = own[tree].ask(call)
                if number >= 0:
                    rows[call][tree].append(us)
        for name in IMPORTS:
            for tree in order:
                command = [sys.executable, "-c", IMPORT.format(name)]
                options: Any = {"env": two_trees.environment(trees[tree]), "text": True}
                found = subprocess.check_output(command, cwd=trees[tree], **options)
                if number >= 0:
                    imports[name][tree].append(float(found))
    for served in own.values():
        served.end()
    for row in (*rows.values(), *imports.values()):
        row["ratio"] = min(row["after"]) / min(row["before"])
        pairs = zip(row["before"], row["after"], strict=True)
        row["median of rounds' ratios"] = statistics.median(b / a for a, b in pairs)
    for call, row in {**imports, **rows}.items():
        least = [min(row[tree]) for tree in trees]
        print(f"{call:<50} {least[0]:10.3f} {least[1]:10.3f} {row['ratio']:6.3f}")
    mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows.values()))
    print(f"geometric mean of {len(rows)} calls' ratios: {mean:.3f}")
    two_trees.write(out, {"calls, us": rows, "mean ratio": mean, "imports, s": imports})


if __name__ == "__main__":
    two_trees.run(serve, main)
