"""Whether a commit of the trainer takes more time or memory for a step than another one.

    python scripts/step_cost.py BEFORE AFTER OUT.json      # two trees, with their C++ kernels

A process of each tree trains the same small models in turns, ten steps a round. Recorded are CPU
seconds of each step but the first of a round, from one step of the optimizer to the next, and the
most memory that the process has had. Another process of each tree has another model.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROUNDS, STEPS = 7, 10
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
LORA = {"enable_lora": True, "lora_rank": 4, "lora_alpha": 8}


def serve(path: str) -> None:
    """Trains whenever a line names a folder, and answers with what it took."""
    from tilewright.trainer import train
    from tilewright.trainer.engine import Engine

    ends: list[float] = []
    step = Engine.optim_step

    def timed(self: Engine, *args: Any, **options: Any) -> Any:
        found = step(self, *args, **options)
        ends.append(time.process_time())
        return found

    Engine.optim_step = timed
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for line in sys.stdin:
        ends.clear()
        code = train.main([path, f"--train.output_dir={line.strip()}"])
        seconds = [b - a for a, b in itertools.pairwise(ends)]
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({"code": code, "seconds": seconds, "kb": most}), file=answers, flush=True)


def measured(trees: dict[str, pathlib.Path], folder: pathlib.Path) -> dict[str, Any]:
    path = str(folder / "config.yaml")
    own = {}
    for name, tree in trees.items():
        command = [sys.executable, __file__, "serve", path]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        own[name] = subprocess.Popen(command, cwd=folder, env=environment, **options)
    found: dict[str, Any] = {name: {"seconds": [], "kb": 0} for name in trees}
    for number in range(-1, ROUNDS):  # the first compiles and caches
        for name in (*trees,) if number % 2 else reversed([*trees]):
            own[name].stdin.write(f"{folder}/{name}_{number}\n")
            own[name].stdin.flush()
            answer = json.loads(own[name].stdout.readline())
            assert answer["code"] == 0, f"{name} did not train"
            found[name]["kb"] = answer["kb"]
            if number >= 0:
                found[name]["seconds"].append(answer["seconds"])
    for process in own.values():
        process.stdin.close()
        process.wait()
    return found


def main(trees: dict[str, pathlib.Path], out: pathlib.Path) -> None:
    sys.path[:0] = [str(ROOT)]
    from tests.written.make import EXPERTS, SHAPE, write_model
    from tilewright.core import platform

    shapes = {"dense": (SHAPE, {}), "lora": (SHAPE, {"lora": LORA}), "experts": (EXPERTS, {})}
    rows = {}
    for name, (shape, fields) in shapes.items():
        with tempfile.TemporaryDirectory() as made:
            more = {"max_steps": STEPS, "save_steps": 0, "save_hf_weights": False}
            write_model(pathlib.Path(made), {**shape, **WIDE}, {**fields, "train": more})
            rows[name] = found = measured(trees, pathlib.Path(made))
        least = {t: [min(each) for each in f["seconds"]] for t, f in found.items()}
        ratios = [b / a for a, b in zip(least["before"], least["after"], strict=True)]
        found["seconds_ratio"] = statistics.median(ratios)
        found["memory_ratio"] = found["after"]["kb"] / found["before"]["kb"]
        print(
            f"{name}: seconds x {found['seconds_ratio']:.3f}, memory x {found['memory_ratio']:.3f}"
        )
    about = {"date": str(datetime.date.today()), "load": os.getloadavg(), **platform.provenance()}
    out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        before, after, target = map(pathlib.Path, sys.argv[1:])
        main({"before": before.resolve(), "after": after.resolve()}, target)
