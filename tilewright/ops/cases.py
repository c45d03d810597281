"""Model shapes that cases are named after, and how inputs are drawn. Configurations are the
models' published ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.registry import Goal

CONTRACT = frozenset({"contract"})
CPU = frozenset({"cpu"})
CUDA = frozenset({"cuda"})
BIG = frozenset({"big"})
HOST = frozenset({"contract", "host"})
# Where Triton's kernels of rows are batch-invariant: their constants depend on the width of a row,
# not on how many there are, and a program's rows do not meet. (Of rows at aligned addresses; others
# compile to other loads.)
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

# Tokens in a timed case: enough on a GPU to fill it (64 MiB and more), few enough on a CPU to time
# in a minute.
TOKENS = {"cuda": 16384, "cpu": 1024}


# Hopper and Blackwell: H100, H200, B200. Goals of them are shares of what each device has measured.
DATACENTER = ("sm_90", "sm_100")


def near_copy(percent: float, *which: str) -> tuple[Goal, ...]:
    """Goals of ops that only move memory: that share of the measured copy bandwidth, in each
    pass.
    """
    return tuple(Goal(DATACENTER, w, "roofline_percent", at_least=percent) for w in which)


def held(value: float, dtype: torch.dtype) -> float:
    """value, or half of the largest number of a dtype that holds less."""
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
    """Normal values, drawn in float32 and rounded to `dtype`, so that every dtype sees the same
    numbers.
    """
    t = torch.randn(*shape, device=device, generator=gen) * scale + shift
    return t.to(dtype).requires_grad_(requires_grad)
