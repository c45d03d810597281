"""How long the steps of the demo wait for their batches, on two ranks.

    python -m bench data-waiting [--steps N] [--workers N] --out DIR

`make demo`'s run with DDP over gloo, of one thread a rank, and no evaluation. A step waits as long
as the rank that waits longest; its seconds are from the end of the step before. The first step,
whose seconds are those of the run's first computation, is left out of both.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from bench import commands
from tilewright.bench.options import at_least

ROOT = pathlib.Path(__file__).resolve().parents[1]
RANKS = 2
CODE = "from bench.data_waiting import rank; rank()"


def demo(folder: pathlib.Path) -> list[str]:
    """The arguments of the demo's run within a folder, where its model's files are written."""
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples/demo.py")
    assert spec is not None and spec.loader is not None  # the file is there
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write_model(folder / "model")
    return [
        str(ROOT / "examples/demo.yaml"),
        f"--model.config_path={folder / 'model'}",
        f"--model.tokenizer_path={folder / 'model'}",
        f"--data.dataset_prepared_path={folder / 'prepared'}",
        f"--train.output_dir={folder / 'out'}",
        "--train.plot_loss=false",
    ]


def rank() -> None:
    """One of torchrun's processes: the trainer, which also writes each step's waits."""
    from tilewright.trainer import launch, train
    from tilewright.trainer.callbacks import CALLBACKS, Plugin
    from tilewright.trainer.plugins.callback import Callback, Step

    folder = pathlib.Path(sys.argv.pop(1))

    class Waits(Callback):
        def after_step(self, step: Step) -> None:
            row = {"waited": step.waited, "ended": time.perf_counter()}
            with (folder / f"{self.run.mesh.rank}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")

    CALLBACKS.add("bench_waits", Plugin(Waits, 90, lambda run: True))
    launch.end(train.main)


def figures(ranks: Sequence[Sequence[dict[str, float]]]) -> dict[str, Any]:
    """ranks: of each, what it has waited and when each step has ended."""
    seconds = [b["ended"] - a["ended"] for a, b in itertools.pairwise(ranks[0])]
    waited = [
        max(each) for each in zip(*([r["waited"] for r in own[1:]] for own in ranks), strict=True)
    ]
    return {
        "steps": len(seconds),
        "waited_s": sum(waited),
        "seconds": sum(seconds),
        "share": sum(waited) / sum(seconds),
        "share_of_a_step": {
            "median": statistics.median(w / s for w, s in zip(waited, seconds, strict=True)),
            "most": max(w / s for w, s in zip(waited, seconds, strict=True)),
        },
        "waits_s": waited,
        "step_s": seconds,
    }


def main(argv: Sequence[str]) -> int:
    parser = commands.parser("data-waiting", __doc__)
    parser.add_argument("--steps", type=at_least(2, int), default=60, metavar="N")
    parser.add_argument("--workers", type=at_least(0, int), default=0, metavar="N")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="write data_waiting.json")
    args = parser.parse_args(argv)
    commands.need(parser)
    settings = {"steps": args.steps, "workers": args.workers, "ranks": RANKS}
    meta = commands.metadata("data-waiting", argv, settings)
    with tempfile.TemporaryDirectory(prefix="tilewright-") as made:
        folder = pathlib.Path(made)
        options = {
            "train.data_parallel_mode": "ddp",
            "train.max_steps": args.steps + 1,
            "train.eval_strategy": "no",
            "train.save_steps": 0,
            "data.dataloader_num_workers": args.workers,
        }
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        start += [f"--nproc-per-node={RANKS}", "--no-python", sys.executable, "-c", CODE, made]
        given = [*demo(folder), *(f"--{name}={value}" for name, value in options.items())]
        done = subprocess.run([*start, *given], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
            return 1
        files = [folder / f"{i}.jsonl" for i in range(RANKS)]
        row = figures([[json.loads(r) for r in f.read_text().splitlines()] for f in files])
    print(
        f"{row['steps']} steps: waited {row['waited_s']:.3f} of {row['seconds']:.1f} s, "
        f"{row['share']:.3%}; of a step {row['share_of_a_step']['most']:.2%} at most"
    )
    if args.out:
        commands.write(args.out / "data_waiting.json", meta, [row])
    return 0
