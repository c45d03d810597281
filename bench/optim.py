"""Times steps of AdamW beside torch's and torchao's, on a CPU or a GPU.

    python -m bench optim --out DIR [--quick]

Each round times every way once, in turns, over one tensor of 1e8 parameters (--quick: 1e6):

    float32         `adamw_`, and torch.optim.AdamW(fused=True)
    bf16 states     `adamw_` with parameters in float32 and moments in bfloat16
    bf16SR          `adamw_` with all in bfloat16, rounded stochastically, and torchao's _AdamW with
                    bf16_stochastic_round (compiled; parameters and moments in bfloat16)
    master          `adamw_` with parameters in float32, and copies in bfloat16

The raw file has every round; a row's median is beside that of `adamw_` in float32, by the ratios of
the rounds.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.server import in_rows
from tilewright.core import platform


@dataclasses.dataclass(frozen=True)
class Size:
    parameters: int
    rounds: int


FULL, QUICK = Size(100_000_000, 9), Size(1_000_000, 2)
# Bytes that a step reads and writes of a parameter.
BYTES = {"float32": 28, "float32 torch": 28, "bf16 states": 20, "bf16SR": 14, "master": 30}
BYTES["bf16SR torchao"] = BYTES["bf16SR"]


def _ways(n: int, device: str) -> dict[str, Callable[[], Any]]:
    """A step by each way, which changes tensors in place."""
    import torch

    from tilewright.ops import StochasticRounding, adamw_

    F, B = torch.float32, torch.bfloat16

    def tensors(params: torch.dtype, states: torch.dtype) -> list[list[torch.Tensor]]:
        gen = torch.Generator(device).manual_seed(0)
        p, g, m, v = (torch.randn(n, generator=gen, device=device) for _ in range(4))
        return [[p.to(params)], [(g * 0.1).to(params)], [m.to(states)], [v.abs().to(states)]]

    def ours(params: torch.dtype, states: torch.dtype, **options: Any) -> Callable[[], Any]:
        given = tensors(params, states)
        return lambda: adamw_(*given, step=3, lr=1e-3, **options)

    def optimizer(kind: Any, dtype: torch.dtype, **options: Any) -> Callable[[], Any]:
        given = tensors(dtype, dtype)
        p = torch.nn.Parameter(given[0][0])
        p.grad = given[1][0]
        return kind([p], lr=1e-3, **options).step

    ways = {
        "float32": ours(F, F),
        "float32 torch": optimizer(torch.optim.AdamW, F, fused=True),
        "bf16 states": ours(F, B),
        "bf16SR": ours(B, B, rounding=StochasticRounding(0)),
        "master": ours(F, F, copies=[torch.zeros(n, dtype=B, device=device)]),
    }
    if platform.no_module("torchao") is None:
        import torchao.optim

        kind: Any = torchao.optim._AdamW
        ways["bf16SR torchao"] = optimizer(kind, B, bf16_stochastic_round=True)
    return ways


def measured(size: Size, folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    import torch

    device = "cpu" if platform.no_cuda() else "cuda"
    ways = _ways(size.parameters, device)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(size.rounds + 1):
        for name, step in ways.items():
            start = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            if i:  # the first one compiles, and maps memory
                seconds[name].append(time.perf_counter() - start)
    for name, own in seconds.items():
        ratios = [base / mine for base, mine in zip(seconds["float32"], own, strict=True)]
        yield {
            "way": name,
            "median_ms": round(1e3 * statistics.median(own), 3),
            "times_as_fast_as_float32": round(statistics.median(ratios), 3),
            "bytes_a_parameter": BYTES[name],
            "GB_s": round(size.parameters * BYTES[name] / statistics.median(own) / 1e9, 2),
            "seconds": [round(t, 6) for t in own],
        }


def main(argv: Sequence[str]) -> int:
    return in_rows("optim", __doc__, argv, (), (FULL, QUICK), measured)
