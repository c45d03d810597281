"""Sums over packed documents, in float64 and in a fixed order."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Documents(NamedTuple):
    """The documents of T consecutive tokens.   cu_seqlens: [documents + 1] int64.   index: [T], the
    document of each token.
    """

    cu_seqlens: torch.Tensor
    index: torch.Tensor

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, T: int) -> Documents:
        at = torch.arange(T, device=cu_seqlens.device)
        return cls(cu_seqlens, torch.searchsorted(cu_seqlens[1:], at, right=True))

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sums values [T] to [documents]; a document without tokens has 0."""
        # Differences of one running sum would take the digits of a small sum after large ones, and
        # index_add adds in any order on a GPU.
        sums = values.new_zeros(self.cu_seqlens.shape[0] - 1, dtype=torch.float64)
        return sums.index_put((self.index,), values.double(), accumulate=True)

    def each(self, values: torch.Tensor) -> torch.Tensor:
        """Expands values [documents] to [T]: each token gets its document's value."""
        return values[self.index]
