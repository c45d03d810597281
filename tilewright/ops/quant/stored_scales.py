"""Checks the values of scales that a file holds."""

from __future__ import annotations

from collections.abc import Callable

import torch


def check(name: str, t: torch.Tensor, blank: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raises ValueError for scales that are infinite, NaN or negative, and for a scale of 0 whose
    block has values other than 0. The message has the first such scale and its index. Works on any
    device; on meta nothing is checked.

    blank: takes a mask of the scales that are 0, and returns those whose block can be one of zeros
        by its codes.
    """
    if t.is_meta:
        return
    values = t.float()
    _refuse(~(values.isfinite() & (values >= 0)), name, values, "be finite numbers of at least 0")
    zero = values == 0
    if zero.any():
        must = "be > 0 where a block's codes are not of zeros"
        _refuse(zero & ~blank(zero), name, values, must)


def _refuse(wrong: torch.Tensor, name: str, values: torch.Tensor, must: str) -> None:
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name} must {must}, got {values[tuple(at)].item():g} at {at}")
