"""How fast evaluations of the demo's model are, beside bare forward passes, on a CPU, in turns.

    python -m bench evaluation-speed [--batches N] [--rounds N] --out DIR

`evaluation` is what a run does between its steps, and `scores` what
`python -m tilewright.trainer.evaluate --scores` does, both from the prepared data set to their
numbers. Beside each is a bare loop: the same batches, made before, through the model with the same
loss of the head, without gradients, one number read at the end. By one thread, in seconds of the
process's CPU time, which other work on the machine hardly changes. `share` is the bare loop's time
over the other's, in each round.
"""

from __future__ import annotations

import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench import commands
from bench.data_waiting import demo
from tilewright.bench.options import at_least
from tilewright.trainer.columns import IGNORE

AGREEMENT = 1e-6  # relative, of sums of float32 numbers


def bare(model: Any, batches: list[dict[str, Any]], loss: Callable) -> float:
    """batches: as the model takes them."""
    total: Any = 0.0
    with torch.no_grad():
        for batch in batches:
            total = total + model(**batch, loss=loss).total
    return float(total)


def passes(folder: pathlib.Path, most: int) -> tuple[dict[str, tuple[Callable, Callable]], int]:
    """An evaluation and its bare loop, which return the same sum, by name; and the tokens of one
    evaluation.

    most: batches.
    """
    from tilewright.trainer import build
    from tilewright.trainer.config import load
    from tilewright.trainer.data.batches import Bins
    from tilewright.trainer.parallel.mesh import Mesh
    from tilewright.trainer.scoring import batches_of, evaluation, scores, statistics

    path, *options = demo(folder)
    config, mesh = load(path, options), Mesh()
    made = build.build(config, mesh)
    engine, loss, [held] = made.engine, made.loss, made.held.values()
    numbered = Bins(held.dataset, config.data, numbered=True)

    def read(bins: Bins) -> Any:
        return batches_of(bins, config.train.micro_batch_size, mesh, most)

    ready = [engine.parts.moved(batch) for batch in read(held)]
    labels = sum(int((batch["labels"] != IGNORE).sum()) for batch in ready)
    model = engine.parts.wrapped.eval()

    def evaluated() -> float:
        return evaluation(engine, {"held": read(held)}, loss, accuracy=False)["eval_loss"] * labels

    def scored() -> float:
        return -sum(score.logprob for some in scores(engine, read(numbered)) for score in some)

    return {
        "evaluation": (evaluated, lambda: bare(model, ready, loss)),
        "scores": (scored, lambda: bare(model, ready, statistics)),
    }, labels


def row_of(name: str, labels: int, both: Sequence[Callable], rounds: int) -> dict[str, Any]:
    """The first round, which fills caches, is not timed."""
    samples: list[list[float]] = [[], []]
    sums = [function() for function in both]
    for number in range(rounds):
        for i in (0, 1) if number % 2 else (1, 0):
            began = time.process_time()
            both[i]()
            samples[i].append(time.process_time() - began)
    shares = [alone / own for own, alone in zip(*samples, strict=True)]
    medians = [statistics.median(each) for each in samples]
    return {
        "name": name,
        "tokens": labels,
        "median_s": medians[0],
        "median_bare_s": medians[1],
        "share": medians[1] / medians[0],
        "shares": sorted(shares),
        "samples_s": samples[0],
        "samples_bare_s": samples[1],
        "sums_differ": abs(sums[0] / sums[1] - 1),
    }


def main(argv: Sequence[str]) -> int:
    """Exit code 1: the sums of an evaluation and of its bare loop differ."""
    parser = commands.parser("evaluation-speed", __doc__)
    for name, default in (("batches", 12), ("rounds", 6)):
        parser.add_argument(f"--{name}", type=at_least(1, int), default=default, metavar="N")
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="DIR", help="write evaluation_speed.json"
    )
    args = parser.parse_args(argv)
    commands.need(parser)
    settings = {"batches": args.batches, "rounds": args.rounds}
    meta = commands.metadata("evaluation-speed", argv, settings)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tilewright-") as made:
        pairs, labels = passes(pathlib.Path(made), args.batches)
        rows = [row_of(name, labels, both, args.rounds) for name, both in pairs.items()]
    torch.set_num_threads(threads)
    for row in rows:
        print(
            f"{row['name']}: {row['tokens'] / row['median_s']:.0f} tokens/s, "
            f"{row['share']:.1%} of {row['tokens'] / row['median_bare_s']:.0f} without it "
            f"({row['shares'][0]:.1%} to {row['shares'][-1]:.1%})"
        )
    if args.out:
        commands.write(args.out / "evaluation_speed.json", meta, rows)
    return int(max(row["sums_differ"] for row in rows) > AGREEMENT)
