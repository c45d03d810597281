"""Rows of a batch as packed documents: which tokens are no padding, and where documents end."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Layout(NamedTuple):
    index: torch.Tensor | None  # which tokens of the B S are no padding; None: all
    cu: torch.Tensor  # boundaries of documents among these
    longest: int
    holes: bool  # there is padding within a document


def is_numbered(kept: torch.Tensor | None) -> bool:
    """Whether it is of documents' numbers (see `Mask`)."""
    return kept is not None and kept.dtype != torch.bool


def layout_of(kept, position_ids, B, S) -> Layout | None:
    """None for whole rows of one document each. A token belongs to the document of the one before
    it in its row that is no padding, if position ids, where they are given, go up by one or by the
    number of places (they count padding or not, as a caller likes), and both have the same number
    of a document, where transformers gave these.
    """
    if (
        position_ids is not None and position_ids.dim() != 2
    ):  # of several axes, as for images: not of a text
        position_ids = None
    if kept is None and position_ids is None:
        return None
    if kept is None or (is_numbered(kept) and bool(kept.all())):
        index, place = (
            None,
            torch.arange(B * S, device=(position_ids if kept is None else kept).device),
        )
    else:
        index = place = kept.flatten().nonzero().squeeze(1)
    step, within = place.diff(), (place // max(S, 1)).diff() == 0
    if is_numbered(kept):
        within &= kept.flatten()[place].diff() == 0
    if position_ids is not None:
        up = position_ids.expand(B, S).flatten()[place].diff()
        within &= (up == 1) | (up == step)
    first = torch.ones_like(place[:1], dtype=torch.bool)
    ends = torch.cat((first, ~within)).nonzero().squeeze(1)
    if index is None and ends.numel() == B:
        return None
    cu = torch.cat((ends, ends.new_tensor([place.numel()]))).to(torch.int32)
    if not place.numel():
        return Layout(index, cu, 0, False)
    longest, holes = torch.stack((cu.diff().max(), (within & (step > 1)).any())).tolist()
    return Layout(index, cu, longest, bool(holes))
