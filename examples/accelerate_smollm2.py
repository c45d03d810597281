"""A fine-tuning step of a transformers model of SmolLM2-135M's shape, before and after
`accelerate(model)`, on a CPU.

    # Time and peak memory of a step (forward, backward, AdamW):
    python examples/accelerate_smollm2.py step RESULTS.json
    # Time of a step with each part alone, of 2 layers:
    python examples/accelerate_smollm2.py parts RESULTS.json
    # Peak memory of one layer, head and loss, for a vocabulary of 151,936:
    python examples/accelerate_smollm2.py loss RESULTS.json

Weights are random and float32; bfloat16 is autocast's, as in Trainer with bf16=True. Times: median
over interleaved rounds on one model, which is accelerated and restored between steps. Memory: each
variant in a process of its own, the peak during a step above the level before it, so gradients
count, and weights and the optimizer's state do not.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from measurement import where

from bench.host_memory import peak_mib
from bench.llama import DTYPES, Shape, of_transformers, tokens_of
from tilewright.integrations.transformers import accelerate, restore

PARTS = ("norm", "rope", "mlp", "attention", "loss")
# name -> the parts of accelerate; None: its default.
VARIANTS = {"before": (), "after": None, **{part: (part,) for part in PARTS}, "all": PARTS}
VOCABULARY = 151936


class Run:
    """A model, its optimizer and a batch."""

    def __init__(self, shape: Shape, dtype: str, optimize: bool = True):
        self.model = of_transformers(shape).train()
        self.dtype, self.ids = DTYPES[dtype], tokens_of(shape)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, 1e-5, fused=True) if optimize else None

    def become(self, variant: str) -> None:
        restore(self.model)
        if variant != "before":
            accelerate(self.model, parts=VARIANTS[variant], quiet=True)

    def step(self, tokens: int | None = None) -> float:
        ids = self.ids[:, :tokens]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        if self.optimizer:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return loss.item()


def timed(run: Run, variants: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step, in interleaved rounds, whose first is not counted."""
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for n in range(rounds + 1):
        for variant in variants if n % 2 else reversed(variants):
            run.become(variant)
            start = time.perf_counter()
            run.step()
            if n:
                seconds[variant].append(time.perf_counter() - start)
    return seconds


def peak_of(variant: str, shape: Shape, dtype: str, optimize: bool) -> float | None:
    """`peak_mib` of a step in a process of its own, after a step of 64 tokens."""
    asked = {"variant": variant, "shape": vars(shape), "dtype": dtype, "optimize": optimize}
    asked["threads"] = torch.get_num_threads()
    command = [sys.executable, __file__, "peak", json.dumps(asked)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def peak(asked: dict[str, Any]) -> float | None:
    torch.set_num_threads(asked["threads"])
    run = Run(Shape(**asked["shape"]), asked["dtype"], asked["optimize"])
    run.become(asked["variant"])
    run.step(64)
    return peak_mib(run.step)


def main(argv: list[str]) -> int:
    if argv[:1] == ["peak"]:
        print(json.dumps(peak(json.loads(argv[1]))))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("step", "parts", "loss"))
    parser.add_argument("out", type=pathlib.Path, metavar="RESULTS.json")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=list(DTYPES), nargs="+", default=list(DTYPES))
    args = parser.parse_args(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)  # not after minutes of measuring
    layers = args.layers or {"step": 8, "parts": 2, "loss": 1}[args.what]
    shape = Shape(tokens=args.tokens, layers=layers)
    if args.what == "loss":
        shape = Shape(tokens=args.tokens, layers=layers, vocabulary=VOCABULARY)
    variants = list(VARIANTS) if args.what == "parts" else ["before", "after"]
    rows, report = [], None
    for dtype in args.dtype:
        seconds: dict[str, list[float]] = {variant: [] for variant in variants}
        if args.what != "loss":
            run = Run(shape, dtype)
            seconds = timed(run, variants, args.rounds)
            report = str(accelerate(run.model, quiet=True))
            del run
        for variant, samples in seconds.items():
            row = {"case": shape.name, "vocabulary": shape.vocabulary, "dtype": dtype}
            row["variant"] = variant
            if samples:
                ratios = [b / a for a, b in zip(samples, seconds["before"], strict=True)]
                row |= {"median_s": statistics.median(samples), "samples_s": samples}
                row["times_as_fast"] = statistics.median(ratios)
            if args.what != "parts":
                row["peak_mib"] = peak_of(variant, shape, dtype, args.what == "step")
            rows.append(row)
            print({k: v for k, v in row.items() if k != "samples_s"}, flush=True)
        about = where(threads=torch.get_num_threads(), rounds=args.rounds, report=report)
        args.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
