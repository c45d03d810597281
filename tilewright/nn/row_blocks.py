"""A linear layer whose rows have the same bits whatever else is in the batch."""

from __future__ import annotations

import torch
from torch import nn

from tilewright.nn.modules import Linear

ROWS = 128  # of a product in `linear_in_row_blocks`: a tile of most GEMMs


def linear_in_row_blocks(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """F.linear in products of 128 rows each, the last filled up with zeros.

    x: [..., K].   weight: [N, K].   bias: [N] or None.   Any dtype that F.linear takes, and
    autocast. A BLAS library chooses its kernel, and with it the order of a sum, by the number of
    rows; here it always sees the same. So a row's result has the same bits whatever else is in x,
    as far as a library's kernel treats the rows of one shape alike, which tests check. So has the
    gradient of x. Slower: use it where results must not depend on a batch.
    """
    rows = x.reshape(-1, x.shape[-1])
    n = rows.shape[0]
    filled = torch.nn.functional.pad(rows, (0, 0, 0, -n % ROWS))
    parts = [torch.nn.functional.linear(part, weight, bias) for part in filled.split(ROWS)]
    out = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out[:n].reshape(*x.shape[:-1], -1) if n else out[:n].view(*x.shape[:-1], weight.shape[0])


class RowBlockLinear(nn.Linear):
    """torch.nn.Linear through `linear_in_row_blocks`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_in_row_blocks(x, self.weight, self.bias)


def in_row_blocks(model: nn.Module) -> None:
    """Makes every torch.nn.Linear and `Linear` of a model a `RowBlockLinear`, with the
    parameters that it has.
    """
    for module in model.modules():
        if type(module) in (nn.Linear, Linear):
            module.__class__ = RowBlockLinear  # it differs in its forward only
