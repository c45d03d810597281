"""A batch-invariant linear layer: a row's bits do not depend on the rest of the batch."""

from __future__ import annotations

import torch
from torch import nn

from tilewright.nn.modules import Linear

ROWS = 128  # per product: a tile of most GEMMs


def linear_in_row_blocks(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """F.linear in products of 128 rows each, the last padded with zeros: batch-invariant.

    A BLAS library chooses its kernel, and so the order of its sums, by the number of rows, which is
    constant here. A row's result and gradient therefore have the same bits whatever else is in x,
    as far as the library's kernel treats all rows of one shape alike, which tests check. Slower
    than F.linear.

    Args:
        x: [..., K], any dtype that F.linear supports; under autocast cast to its dtype.
        weight: [N, K].
        bias: [N] or None.

    Returns:
        [..., N].

    Raises:
        RuntimeError: Shapes or dtypes do not match, as in F.linear.

    Example:
        >>> import torch
        >>> from tilewright.nn import linear_in_row_blocks
        >>> linear_in_row_blocks(torch.randn(3, 5, 8), torch.randn(4, 8)).shape
        torch.Size([3, 5, 4])
    """
    rows = x.reshape(-1, x.shape[-1])
    n = rows.shape[0]
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -n % ROWS))
    parts = [torch.nn.functional.linear(part, weight, bias) for part in padded.split(ROWS)]
    out = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out[:n].reshape(*x.shape[:-1], -1) if n else out[:n].view(*x.shape[:-1], weight.shape[0])


class RowBlockLinear(nn.Linear):
    """torch.nn.Linear through `linear_in_row_blocks`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_in_row_blocks(x, self.weight, self.bias)


def in_row_blocks(model: nn.Module) -> None:
    """Converts every torch.nn.Linear and `Linear` of a model to `RowBlockLinear`, with its
    parameters.

    Other subclasses of torch.nn.Linear have a forward of their own and are left.

    Args:
        model: Modified in place. If it is itself such a layer, it is converted too.

    Returns:
        None.

    Example:
        >>> import torch
        >>> from tilewright.nn import in_row_blocks
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> in_row_blocks(model)
        >>> model[0]
        RowBlockLinear(in_features=4, out_features=4, bias=True)
    """
    for module in model.modules():
        if type(module) in (nn.Linear, Linear):
            module.__class__ = RowBlockLinear  # only the forward differs
