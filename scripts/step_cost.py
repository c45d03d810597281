"""Whether a commit of the trainer takes more time or memory for a step than another one.

    python scripts/step_cost.py BEFORE AFTER OUT.json      # two trees, with their C++ kernels

A process of each tree trains the same small models in turns, 40 steps a round. Recorded are the CPU
seconds of a step, from one step of the optimizer to the next, as the least and the median of each
round, the most memory that the process has had, and how many functions a step calls, Python's and
C's in the main thread, which no other work on the machine changes.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import resource
import statistics
import sys
import tempfile
import time
from typing import Any

import two_trees

ROUNDS, STEPS = 7, 40
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
LORA = {"enable_lora": True, "lora_rank": 4, "lora_alpha": 8}


def serve() -> None:
    """Trains whenever a line names a configuration and a folder; answers with what it took.   A
    third word: count calls, which takes time.
    """
    from tilewright.trainer import train
    from tilewright.trainer.engine import Engine

    ends: list[tuple[float, int]] = []
    step, calls = Engine.optim_step, 0

    def called(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def timed(self: Engine, *args: Any, **options: Any) -> Any:
        found = step(self, *args, **options)
        ends.append((time.process_time(), calls))
        return found

    Engine.optim_step = timed
    answers = two_trees.answers()
    for line in sys.stdin:
        path, out, *counts = line.split()
        ends.clear()
        sys.setprofile(called if counts else None)
        code = train.main([path, f"--train.output_dir={out}"])
        sys.setprofile(None)
        took = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(ends)]
        seconds, number = zip(*took, strict=True)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        row = {"code": code, "least": min(seconds), "median": statistics.median(seconds)}
        row |= {"calls": statistics.median_low(number), "kb": most}
        print(json.dumps(row), file=answers, flush=True)


def main(trees: dict[str, pathlib.Path], out: pathlib.Path) -> None:
    from tests.written.make import EXPERTS, SHAPE, write_model

    models = {"dense": (SHAPE, {}), "lora": (SHAPE, {"lora": LORA}), "experts": (EXPERTS, {})}
    rows: dict[str, Any] = {name: {} for name in models}
    with tempfile.TemporaryDirectory() as made:
        for name, (shape, fields) in models.items():
            more = {"max_steps": STEPS, "save_steps": 0, "save_hf_weights": False}
            folder = pathlib.Path(made, name)
            write_model(folder, {**shape, **WIDE}, {**fields, "train": more})
            config = (folder / "config.yaml").read_text()
            for what in ("model", "tokens.jsonl", "prepared"):  # paths from everywhere
                config = config.replace(f": {what}\n", f": {folder / what}\n")
            (folder / "config.yaml").write_text(config)
        own = {tree: two_trees.Served(__file__, path, made) for tree, path in trees.items()}
        for number in range(-1, ROUNDS + 1):  # the first compiles and caches, the last counts
            for name in models:
                for tree in two_trees.in_turns(trees, number):
                    folder = pathlib.Path(made, name)
                    words = [f"{folder}/config.yaml", f"{folder}/{tree}_{number}"]
                    words += ["count"] * (number == ROUNDS)
                    answer = own[tree].ask(" ".join(words))
                    assert answer.pop("code") == 0, f"{tree} did not train"
                    if number == ROUNDS:
                        rows[name][tree]["calls"] = answer["calls"]
                    elif number >= 0:
                        row = rows[name].setdefault(tree, {"least": [], "median": []})
                        row["least"].append(answer["least"])
                        row["median"].append(answer["median"])
                        row["kb"] = answer["kb"]
        for served in own.values():
            served.end()
    for name, row in rows.items():
        before, after = row["before"], row["after"]
        row["ratios"] = {
            "seconds, least of all rounds": min(after["least"]) / min(before["least"]),
            "seconds, median of rounds' least": statistics.median(
                b / a for a, b in zip(before["least"], after["least"], strict=True)
            ),
            "memory": after["kb"] / before["kb"],
            "calls": after["calls"] / before["calls"],
        }
        print(name, {what: round(ratio, 4) for what, ratio in row["ratios"].items()})
    two_trees.write(out, {"rows": rows})


if __name__ == "__main__":
    two_trees.run(serve, main)
