"""Whether a commit imports and calls ops slower than another one, on a CPU.

    python scripts/call_cost.py BEFORE AFTER OUT.json      # two trees, with their C++ kernels

A process of each tree calls the same ops in turns, on the first contract case of each, which is so
small that a call is mostly host time, in C++ where both trees have it, else eagerly, with and
without a graph for the gradient. Recorded are microseconds of CPU time, the least of each round,
and of fresh processes the CPU seconds of `import tilewright` and `import tilewright.ops`, beyond
those of `import torch`.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROUNDS, SAMPLES, SECONDS = 9, 5, 0.01
IMPORTS = ("tilewright", "tilewright.ops")
IMPORT = "import time, torch; t = time.process_time(); import {}; print(time.process_time() - t)"


def serve() -> None:
    """Answers with the implementations of its ops, then for each line, an op and an implementation,
    with the least microseconds of a call.
    """
    import torch

    from tilewright.selection import operations

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    ops, calls = operations(), {}
    names = {n: [*op.names()] for n, op in ops.items() if _case(op) is not None}
    print(json.dumps(names), file=answers, flush=True)
    for line in sys.stdin:
        if line not in calls:
            name, implementation, grad = line.split()
            calls[line] = _call(ops[name], implementation, grad == "grad")
        print(_least(calls[line]) * 1e6, file=answers, flush=True)


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
    sys.path[:0] = [str(ROOT)]
    from tilewright.core import platform

    own, known, imports = {}, {}, {name: {tree: [] for tree in trees} for name in IMPORTS}
    environments = {
        tree: {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
        for tree, path in trees.items()
    }
    for tree, path in trees.items():
        options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, __file__, "serve"]
        own[tree] = subprocess.Popen(command, cwd=path, env=environments[tree], **options)
        known[tree] = json.loads(own[tree].stdout.readline())
    calls = []
    for name in sorted(set.intersection(*(set(found) for found in known.values()))):
        both = set.intersection(*({*found[name]} for found in known.values()))
        implementation = "cpp" if "cpp" in both else "eager"
        calls += [f"{name} {implementation} {grad}" for grad in ("no_grad", "grad")]
    rows: dict[str, Any] = {call: {tree: [] for tree in trees} for call in calls}
    for number in range(-1, ROUNDS):  # the first caches
        order = (*trees,) if number % 2 else (*reversed([*trees]),)
        for call in calls:
            for tree in order:
                own[tree].stdin.write(call + "\n")
                own[tree].stdin.flush()
                us = float(own[tree].stdout.readline())
                if number >= 0:
                    rows[call][tree].append(us)
        for name in IMPORTS:
            for tree in order:
                command = [sys.executable, "-c", IMPORT.format(name)]
                found = subprocess.check_output(
                    command, cwd=trees[tree], env=environments[tree], text=True
                )
                if number >= 0:
                    imports[name][tree].append(float(found))
    for process in own.values():
        process.stdin.close()
        process.wait()
    for row in (*rows.values(), *imports.values()):
        row["ratio"] = min(row["after"]) / min(row["before"])
        pairs = zip(row["before"], row["after"], strict=True)
        row["median of rounds' ratios"] = statistics.median(b / a for a, b in pairs)
    for call, row in {**imports, **rows}.items():
        least = [min(row[tree]) for tree in trees]
        print(f"{call:<50} {least[0]:10.3f} {least[1]:10.3f} {row['ratio']:6.3f}")
    mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows.values()))
    print(f"geometric mean of {len(rows)} calls' ratios: {mean:.3f}")
    about = {"date": str(datetime.date.today()), "load": os.getloadavg(), **platform.provenance()}
    found = {"about": about, "calls, us": rows, "mean ratio": mean, "imports, s": imports}
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        before, after, target = map(pathlib.Path, sys.argv[1:])
        main({"before": before.resolve(), "after": after.resolve()}, target)
