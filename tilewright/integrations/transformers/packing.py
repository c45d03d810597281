"""Packs a batch's rows: which tokens are not padding, and where documents end."""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import torch


class Layout(NamedTuple):
    """index: the tokens that are not padding, among B S; None: all.   cu_seqlens: the bounds of
    their documents.   longest: the length of the longest document.   holes: whether there is
    padding within a document.
    """

    index: torch.Tensor | None
    cu_seqlens: torch.Tensor
    longest: int
    holes: bool


def is_numbered(kept: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether `Mask.kept` holds document numbers."""
    return kept is not None and kept.dtype != torch.bool


def layout_of(kept, position_ids, B, S) -> Layout | None:
    """The layout of a batch; None for whole rows of one document each.

    A token continues the document of its row's last token that is not padding if their position
    ids, where given, increase by one or by the tokens' distance (callers may count padding or not),
    and if their document numbers, where transformers gives them, are the same.
    """
    if position_ids is not None and position_ids.dim() != 2:  # several axes, as for images
        position_ids = None
    if kept is None and position_ids is None:
        return None
    if kept is None or (is_numbered(kept) and bool(kept.all())):
        given = position_ids if kept is None else kept
        assert given is not None
        index, place = None, torch.arange(B * S, device=given.device)
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


def documents_of(numbers: torch.Tensor) -> torch.Tensor:
    """cu_seqlens of the concatenated rows of document numbers [B, S]; none goes on in another row.

    In compiled code it has as many entries as there are tokens, of which the last ones equal the
    end: its shape may not depend on values.
    """
    S, flat = numbers.shape[1], numbers.flatten()
    at = torch.arange(flat.numel() + 1, dtype=torch.int32, device=flat.device)
    inner = at[1:-1]
    apart = (flat.diff() != 0) | (inner % max(S, 1) == 0)
    if torch.compiler.is_compiling():
        ends = torch.where(apart, inner, flat.numel()).sort()[0]
    else:
        ends = inner[apart]
    return torch.cat((at[:1], ends, at[-1:]))


def restarts(position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None) -> bool:
    """Whether positions of real tokens go back within a row: documents are packed in it."""
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] < 2:
        return False
    back = position_ids.diff(dim=1) <= 0
    if attention_mask is not None and attention_mask.shape == position_ids.shape:
        real = attention_mask != 0
        back = back & real[:, 1:] & real[:, :-1]
    return bool(back.any())
