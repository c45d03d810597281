"""How much of an op's training pass on a CPU its matrix products take: a floor of its time.

    python scripts/products_alone.py OUT.json [--rounds 9]

For each case, four calls are timed in turns, in float32: the op as `auto` chooses it, its twin
under torch.compile, and the products alone of both. Results of products are allocated beforehand.

linear_logprob: keeps no logits; by chunks, the logits twice, dx and dweight. The twin keeps them
    and has three products of whole matrices, as `linear_cross_entropy` has by chunks.
quantized_linear: y and dx, of weights that are dequantized beforehand, for both.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any

import torch

from tilewright.bench import run, timing
from tilewright.bench.providers import Provider, compiled
from tilewright.ops import OPS, products
from tilewright.ops.loss.head import Plan, chunk_rows
from tilewright.ops.quant.weights import dequantize

CASES = (
    ("linear_logprob", "cpu-small"),
    ("linear_logprob", "qwen3-30b-a3b-32k"),
    ("linear_cross_entropy", "cpu-small"),
    ("linear_cross_entropy", "qwen3-30b-a3b-32k"),
    ("quantized_linear", "block_fp8 llama-3-8b-down_256"),
)


def of_head(kwargs: dict[str, Any], rows: int, logits: int) -> Callable[[], None]:
    """Products of chunks of so many rows, whose logits are computed so many times."""
    x, weight = kwargs["x"].detach(), kwargs["weight"].detach()
    x = x.reshape(-1, x.shape[-1])
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    buffer = x.new_empty(min(rows, x.shape[0]), weight.shape[0])

    def multiply() -> None:
        for i, (part, of_part) in enumerate(zip(x.split(rows), dx.split(rows), strict=True)):
            chunk = buffer[: part.shape[0]]
            for _ in range(logits):
                products.gemm_(chunk, part, weight.t())
            products.gemm_(of_part, chunk, weight)
            products.gemm_(dweight, chunk.t(), part, add=i > 0)

    return multiply


def of_weight(kwargs: dict[str, Any]) -> Callable[[], None]:
    x, weight = kwargs["x"].detach(), dequantize(kwargs["q"], dtype=torch.float32)
    y, dx = x.new_empty(x.shape[0], weight.shape[0]), torch.empty_like(x)

    def multiply() -> None:
        torch.mm(x, weight.t(), out=y)
        torch.mm(y, weight, out=dx)

    return multiply


def measured(name: str, case_name: str, rounds: int) -> dict[str, Any]:
    op = OPS[name]
    case = next(c for c in run.timed(op, "cpu") if c.name == case_name)
    kwargs = case.make("cpu", torch.float32, run.SEED)
    tasks: dict[str, Callable[[], object]] = {
        way: run.passes(Provider(way, call), kwargs)["forward_backward"]
        for way, call in (("auto", op.public), ("compile", compiled(op)))
    }
    if name == "quantized_linear":
        tasks["products of auto"] = tasks["products of compile"] = of_weight(kwargs)
    else:
        x, weight = kwargs["x"].detach().flatten(0, -2), kwargs["weight"].detach()
        chunk = chunk_rows(x, weight, Plan(True, learns=True))
        tasks["products of auto"] = of_head(kwargs, chunk, 2 if name == "linear_logprob" else 1)
        tasks["products of compile"] = of_head(kwargs, x.shape[0], 1)
    found, errors = timing.interleave(tasks, timing.clock("cpu"), rounds=rounds)
    if errors:
        raise RuntimeError(f"{name} {case_name}: {errors}")
    ms = {
        way: {p: round(getattr(t, p) * 1e3, 3) for p in ("median", "p20", "p80")}
        for way, t in found.items()
    }
    return {"op": name, "case": case_name, "dtype": "float32", "rounds": rounds, "ms": ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    settings = run.Settings(rounds=args.rounds)
    document = run.metadata("cpu", settings, ["scripts/products_alone.py", str(args.out)])
    document["rows"] = rows = []
    for name, case in CASES:
        rows.append(measured(name, case, args.rounds))
        medians = ", ".join(f"{way} {t['median']:.0f} ms" for way, t in rows[-1]["ms"].items())
        print(f"{name} {case}: {medians}", flush=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
