"""Model shapes that cases are named after, from the models' published configurations, and random
inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.core.registry import Case, Cost, Goal

CONTRACT = frozenset({"contract"})
CPU = frozenset({"cpu"})
CUDA = frozenset({"cuda"})
BIG = frozenset({"big"})
HOST = frozenset({"contract", "host"})
# Where Triton's row kernels are batch-invariant: their launch configuration depends on the width of
# a row, not on the number of rows, and rows within a program are independent. (For rows at aligned
# addresses; others compile to other loads.)
ANYWHERE = ("cuda", "cpu")


@dataclass(frozen=True)
class Model:
    """hidden: model width. inner: MLP (or expert) width. heads, kv_heads, head_dim: attention.
    vocab: tokens.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


MODELS = {
    "qwen3-8b": Model(4096, 12288, 32, 8, 128, 151936),
    "qwen3-30b-a3b": Model(2048, 768, 32, 4, 128, 151936),
    "llama-3-8b": Model(4096, 14336, 32, 8, 128, 128256),
    "gemma-3-4b": Model(2560, 10240, 8, 4, 256, 262144),
    "deepseek-v3": Model(7168, 2048, 128, 128, 192, 129280),
}

# Tokens in a timed case: enough to fill a GPU (64 MiB and more), few enough for a CPU to time in a
# minute.
TOKENS = {"cuda": 16384, "cpu": 1024}


# H100 and H200. Their goals are shares of each device's measured rates. Blackwell has none while no
# such device has been measured.
HOPPER = ("sm_90",)


def near_copy(percent: float, *passes: str, only: tuple[str, ...] = ()) -> tuple[Goal, ...]:
    """Goals of ops that only move memory: this percentage of the measured copy bandwidth, in each
    pass.

    only: names of cases; default: all.
    """
    return tuple(
        Goal(HOPPER, pass_name, "roofline_percent", at_least=percent, cases=only)
        for pass_name in passes
    )


def representable(value: float, dtype: torch.dtype) -> float:
    """value, or half of the dtype's largest finite value if that is smaller."""
    return min(value, torch.finfo(dtype).max / 2)


def generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def randn(
    *shape: int,
    device: str,
    dtype: torch.dtype,
    gen: torch.Generator,
    scale: float = 1.0,
    shift: float = 0.0,
    requires_grad: bool = True,
) -> torch.Tensor:
    """Normal values, drawn in float32 and rounded to `dtype`, so that all dtypes get the same
    values.
    """
    t = torch.randn(*shape, device=device, generator=gen) * scale + shift
    return t.to(dtype).requires_grad_(requires_grad)


def of_shapes(
    name: str,
    tags: frozenset[str] = CONTRACT,
    *,
    moved: tuple[int, int] = (0, 0),
    flops: tuple[int, int] = (0, 0),
    **arguments: Any,
) -> Case:
    """A case whose tensors are normal values in its dtype, which get gradients.

    moved, flops: elements that are read and written, and floating-point operations, in forward and
        backward (see `Cost`).
    arguments: a tuple is a tensor's shape; other values are passed as they are.
    """

    def make(device, dtype, seed):
        new = {"device": device, "dtype": dtype, "gen": generator(device, seed)}
        return {n: randn(*v, **new) if isinstance(v, tuple) else v for n, v in arguments.items()}

    def cost(itemsize):
        return Cost(moved[0] * itemsize, moved[1] * itemsize, *flops)

    return Case(name, make, cost, tags)
