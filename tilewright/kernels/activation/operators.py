"""The operators of gated activations and of dropout: what every implementation's launchers take and
return.

I = inner width. `kind` is the activation's: 0 SiLU, 1 GELU (tanh), 2 GELU (erf).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewright.core.library import declare


class Gradients(NamedTuple):
    """Gradients of gate and up. A packed gate has one tensor: no slices are padded and added."""

    dgate: torch.Tensor
    dup: torch.Tensor | None


@declare
def act_mul(gate: torch.Tensor, up: torch.Tensor | None, kind: int) -> torch.Tensor:
    """gate, up: [..., I]; or [..., 2 I], both packed, and None. Any strides."""
    shape = gate.shape
    return gate.new_empty(shape if up is not None else (*shape[:-1], shape[-1] // 2))


@declare
def act_mul_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, kind: int
) -> Gradients:
    dup = None if up is None else up.new_empty(up.shape)
    return Gradients(gate.new_empty(gate.shape), dup)


def as_rows(t: torch.Tensor) -> torch.Tensor:
    """Reshapes [..., I] to [rows, I]: a view if the last dimension is contiguous and the leading
    ones merge, else a copy.
    """
    if t.dim() != 2:
        # reshape(-1, ...) fails for a tensor without elements.
        t = t.reshape(t.numel() // max(1, t.shape[-1]), t.shape[-1])
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


class Dropout(NamedTuple):
    """threshold: an element whose 32 random bits are below it is dropped, 0 to 2^32.
    scale: the factor of the others.   seed, offset: what the bits are drawn from.
    first, width, skip: the place of a part of a tensor, in blocks of four elements, which share a
        draw: block j of the part is block first + j + j // width * skip of the whole.
    """

    threshold: int
    scale: float
    seed: int
    offset: int
    first: int = 0
    width: int = 1
    skip: int = 0


@declare
def drop_add(
    x: torch.Tensor, residual: torch.Tensor | None, dropout: Dropout, dtype: torch.dtype
) -> torch.Tensor:
    """dropout(x), plus residual if there is one, in dtype. Both contiguous."""
    return torch.empty_like(x, dtype=dtype)
