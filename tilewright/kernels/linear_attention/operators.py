"""The operators of linear attention and of its convolution: what every implementation's launchers
take and return.

B = batch, S = positions, C = channels, W = taps, HK / HV = key / value heads, DK / DV = their
widths, N = sequences (the packed documents, or B). q and k are [B, S, HK, DK], v [B, S, HV, DV], g
and beta [B, S, HV] float32, states [N, HV, DK, DV] float32. cu_seqlens are the bounds of packed
documents, int64, with B = 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewright.core.library import declare

# Tokens of the gated delta rule that are computed at a time: at most, and in float32, whose
# products run on FMA units and hold their operands in registers.
CHUNK, CHUNK_FLOAT32 = 64, 16
L2_EPS = 1e-6  # of normalized rows, as in transformers and flash-linear-attention


def chunk(DK: int, itemsize: int) -> int:
    """The tokens of a chunk in kernels: with 64 of 256 wide keys, ptxas spills."""
    return CHUNK_FLOAT32 if itemsize == 4 else CHUNK if DK <= 128 else CHUNK // 2


def chunk_of(q: torch.Tensor) -> int:
    return chunk(q.shape[-1], q.element_size())


class Delta(NamedTuple):
    """o: like v.   state: at the end of each sequence.   decay: [B, S, HV] float32, the sum of g
    from the start of a chunk.   solved: [B, S, HV, C], the rows of each chunk's (I + A)^-1.
    """

    o: torch.Tensor
    state: torch.Tensor
    decay: torch.Tensor
    solved: torch.Tensor


class DeltaGradients(NamedTuple):
    """Gradients of the arguments of these names."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dg: torch.Tensor
    dbeta: torch.Tensor
    dinitial_state: torch.Tensor | None


class DeltaSaved(NamedTuple):
    """What the backward takes of the forward: arguments, and the results of these names."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    decay: torch.Tensor
    solved: torch.Tensor


class DeltaOptions(NamedTuple):
    """scale: q's factor.   normalize: whether rows of q and k are divided by their norms."""

    scale: float
    normalize: bool


@declare
def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    options: DeltaOptions,
) -> Delta:
    (B, S, HV, DV), DK = v.shape, q.shape[3]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return Delta(
        v.new_empty(v.shape),
        v.new_empty((N, HV, DK, DV), dtype=torch.float32),
        v.new_empty((B, S, HV), dtype=torch.float32),
        v.new_empty((B, S, HV, chunk_of(q))),
    )


@declare
def delta_rule_backward(
    do: torch.Tensor, dstate: torch.Tensor | None, saved: DeltaSaved, options: DeltaOptions
) -> DeltaGradients:
    """do, dstate: contiguous."""
    initial_state = saved.initial_state
    return DeltaGradients(
        saved.q.new_empty(saved.q.shape),
        saved.k.new_empty(saved.k.shape),
        saved.v.new_empty(saved.v.shape),
        saved.decay.new_empty(saved.decay.shape),
        saved.decay.new_empty(saved.decay.shape),
        None if initial_state is None else initial_state.new_empty(initial_state.shape),
    )


class ConvGradients(NamedTuple):
    """Gradients of x, of weight, and of bias if there is one."""

    dx: torch.Tensor
    dweight: torch.Tensor
    dbias: torch.Tensor | None


@declare
def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """x: [B, S, C].   weight: [C, W] and bias [C], contiguous."""
    return x.new_empty(x.shape)


@declare
def convolve_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    silu: bool,
) -> ConvGradients:
    """dy: like x."""
    return ConvGradients(
        x.new_empty(x.shape),
        torch.empty_like(weight),
        None if bias is None else torch.empty_like(bias),
    )
