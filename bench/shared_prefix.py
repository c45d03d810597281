"""Passes of DPO with and without `preference.share_prefix`, on a CPU, in turns.

    python -m bench shared-prefix --out DIR [--layers N] [--tokens N] [--rounds N]

The model has SmolLM2-135M's shape with fewer layers, and random weights; the reference is a second
one. A step is a pair of documents of `tokens` each, of which the prompt is 1/2, 3/4 and 8/9. Timed
are both forward passes and the backward, by one thread, in seconds of the process's CPU time, which
other work on the machine hardly changes; the optimizer has no tokens. `promised` is the share of
tokens that are left out, `saved` that of the time, from medians. Log-probabilities of the rejected
answers must agree: the losses are ln 2 without a step of the optimizer.
"""

from __future__ import annotations

import json
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

from bench import commands
from bench.end_to_end import SEED, Shape, of_transformers
from bench.end_to_end_steps import largest_difference
from tilewright.bench import store
from tilewright.bench.options import at_least

PARTS = (1, 3, 8)  # of a prompt, to one of an answer
AGREEMENT = 1e-4  # relative, of sums in float32


def write_pairs(path: pathlib.Path, tokens: int, part: int, count: int, vocabulary: int) -> None:
    rng, answer = random.Random(SEED), tokens // (part + 1)
    names = {"prompt_ids": tokens - answer, "chosen_ids": answer, "rejected_ids": answer}
    rows = (
        {name: [rng.randrange(vocabulary) for _ in range(n)] for name, n in names.items()}
        for _ in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def configuration(folder: pathlib.Path, part: int, tokens: int, share: bool) -> dict[str, Any]:
    return {
        "model": {"model_path": str(folder / "model")},
        "data": {
            "datasets": [{"path": str(folder / f"{part}.jsonl"), "type": "preference_tokenized"}],
            "dataset_prepared_path": str(folder / "prepared"),
            "sample_packing_sequence_len": 2 * tokens,
            "sample_packing_sequentially": True,
            "shuffle_before_merging_datasets": False,
            "shuffle_merged_datasets": False,
            "pad_to_multiple_of": 1,
            "dataloader_num_workers": 0,
        },
        "train": {
            "output_dir": str(folder / "out"),
            "data_parallel_mode": "none",
            "loss": "preference",
            "enable_mixed_precision": False,
            "enable_gradient_checkpointing": False,
        },
        "preference": {"share_prefix": share},
    }


def passes(folder: pathlib.Path, part: int, tokens: int, share: bool) -> Any:
    """A generator of (tokens, log-probability, seconds of CPU time), one a step."""
    from tilewright.trainer import build
    from tilewright.trainer.config import load
    from tilewright.trainer.parallel.mesh import Mesh

    path = folder / f"{part}-{share}.yaml"
    store.write_json(path, configuration(folder, part, tokens, share))  # JSON is YAML
    config = load(str(path))
    made = build.build(config, Mesh())
    for batches in made.batches.steps():
        made.engine.zero()
        began = time.process_time()
        sums = made.engine.forward_backward(batches, made.loss)
        seconds = time.process_time() - began
        yield batches[0]["input_ids"].shape[1], sums.reported()["logprob_rejected"], seconds


def figures(part: int, by_share: dict[bool, list[tuple[int, float, float]]]) -> dict[str, Any]:
    """by_share: by whether prompts are shared; without the first step, which fills caches."""
    tokens = {share: sum(step[0] for step in steps[1:]) for share, steps in by_share.items()}
    samples = {share: [step[2] for step in steps[1:]] for share, steps in by_share.items()}
    times = {share: statistics.median(s) for share, s in samples.items()}
    logprobs = [[step[1] for step in by_share[share]] for share in (False, True)]
    promised, saved = 1 - tokens[True] / tokens[False], 1 - times[True] / times[False]
    return {
        "prompt_to_answer": f"{part}:1",
        "tokens": tokens[False],
        "tokens_shared": tokens[True],
        "samples_s": samples[False],
        "samples_shared_s": samples[True],
        "median_s": times[False],
        "median_shared_s": times[True],
        "promised": promised,
        "saved": saved,
        "saved_of_promised": saved / promised,
        "logprobs_differ": largest_difference(*logprobs),
    }


def main(argv: Sequence[str]) -> int:
    """Exit code 1: log-probabilities differ."""
    parser = commands.parser("shared-prefix", __doc__)
    for name, default in (("layers", 8), ("tokens", 1024), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=at_least(1, int), default=default, metavar="N")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="write shared_prefix.json")
    args = parser.parse_args(argv)
    commands.need(parser)
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    meta = commands.metadata("shared-prefix", argv, settings)
    shape, rows, threads = Shape(layers=args.layers), [], torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tilewright-") as made:
        folder = pathlib.Path(made)
        of_transformers(shape).save_pretrained(folder / "model")
        for part in PARTS:
            file, count = folder / f"{part}.jsonl", args.rounds + 1
            write_pairs(file, args.tokens, part, count, shape.vocabulary)
            runs = {share: passes(folder, part, args.tokens, share) for share in (False, True)}
            by_share: dict[bool, list] = {share: [] for share in runs}
            for _ in range(count):
                for share, steps in runs.items():
                    by_share[share].append(next(steps))
            rows.append(row := figures(part, by_share))
            print(
                f"{row['prompt_to_answer']}  {row['median_s']:.2f} s, shared "
                f"{row['median_shared_s']:.2f} s: saved {row['saved']:.1%} of {row['promised']:.1%} "
                f"of the tokens, {row['saved_of_promised']:.0%} of what they promise",
                flush=True,
            )
    torch.set_num_threads(threads)
    if args.out:
        commands.write(args.out / "shared_prefix.json", meta, rows)
    return int(max(row["logprobs_differ"] for row in rows) > AGREEMENT)
