"""Memory layouts of tensors: what kernels read, and what may be overwritten."""

from __future__ import annotations

from typing import TypeVar

import torch

from tilewright.core import checks, torch_names

MaybeTensor = TypeVar("MaybeTensor", torch.Tensor, torch.Tensor | None)


def empty_dense_like(x: torch.Tensor) -> torch.Tensor:
    """Uninitialized, with x's order of dimensions in memory."""
    return torch.empty_like(x, memory_format=torch.preserve_format)


def last_contiguous(x: MaybeTensor) -> MaybeTensor:
    """x, or a copy if its last dimension is not contiguous, as kernels require."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def is_expanded(x: torch.Tensor) -> bool:
    """Whether elements share memory because a dimension is expanded."""
    return any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True))


def share_no_element(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether q and k provably share no element: their address ranges are disjoint, or both fit
    into disjoint parts of a period that their larger strides are multiples of, as slices of one
    projection do.
    """
    distance = k.data_ptr() - q.data_ptr()
    if distance < 0:
        q, k, distance = k, q, -distance
    size = q.element_size()
    dims = [
        [(n - 1, stride) for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1]
        for t in (q, k)
    ]
    if distance >= size * (1 + sum(n * stride for n, stride in dims[0])):
        return True
    if distance % size:
        return False
    for period in {stride for steps in dims for _, stride in steps}:
        width, other = (
            1 + sum(n * stride for n, stride in steps if stride % period) for steps in dims
        )
        start = distance // size % period
        if width <= start and start + other <= period:
            return True
    return False


def check_overwritable(name: str, x: torch.Tensor, compiling: bool) -> None:
    """Raises ValueError if autograd cannot track an in-place write to x, or its elements share
    memory.
    """
    if x.stride(-1) != 1 and x.numel():
        raise ValueError(
            f"inplace=True needs {name} with a contiguous last dimension, got strides "
            f"{list(x.stride())}; pass {name}.contiguous() or inplace=False"
        )
    # An empty tensor shares nothing, whatever its strides: PyTorch may have set them to 0.
    if x.numel() and is_expanded(x):
        raise ValueError(
            f"inplace=True cannot overwrite {name}, an expanded tensor whose elements share "
            f"memory; pass {name}.contiguous() or inplace=False"
        )
    if not compiling and checks.overlaps_itself(x):
        raise ValueError(
            f"inplace=True cannot overwrite {name}, whose elements share memory: shape "
            f"{list(x.shape)}, strides {list(x.stride())}; pass {name}.contiguous() or inplace=False"
        )
    if not (x.requires_grad and torch.is_grad_enabled()):
        return
    if x.is_leaf or (not compiling and torch_names.is_view(x) and torch_names.of_view(x).is_leaf):
        raise ValueError(
            f"inplace=True cannot overwrite {name}, a leaf that requires grad or a view of one; "
            "pass inplace=False"
        )
    # Dynamo cannot trace this query; it refuses such a view with its own error.
    if not compiling and torch_names.is_view(x) and not torch_names.may_be_changed(x):
        raise ValueError(
            f"inplace=True cannot overwrite {name}, a view that autograd does not let change, as "
            "split, chunk and unbind make it; take a slice instead (qkv[..., a:b]), or pass inplace=False"
        )
