"""Norms, an MLP and losses over `tilewright.ops`: modules that hold an op's options and weights.

Invalid options raise at construction, invalid inputs in the call.
"""

from __future__ import annotations

import torch
from torch import nn

from tilewright import ops
from tilewright.core import checks
from tilewright.nn.linear import linear
from tilewright.nn.sharded import local
from tilewright.ops import products
from tilewright.ops.loss.vocabulary import world_size


def _shown(**options) -> str:
    """`name=value` for the options that are neither None nor False."""
    return ", ".join(f"{k}={v!r}" for k, v in options.items() if v is not None and v is not False)


def _known(op: str, implementation: str) -> None:
    """Raises ValueError if the op has no implementation of this name. Whether it can run depends on
    the tensors.
    """
    if implementation != "auto":
        ops.OPS[op].implementation(implementation)


class RMSNorm(nn.Module):
    """`ops.rmsnorm` with its weight: y = x / sqrt(mean(x^2) + eps) * (offset + weight) + bias.

    A new module scales by one: weight = 1 - offset (zeros for Gemma's offset of 1.0), bias = 0.

    Args:
        dim: D, or (heads, D) for a weight per head (QK norm; x is then [..., heads, D]).
        eps: As in `ops.rmsnorm`, as are `offset` and `cast`.
        offset: Added to the weight.
        cast: Where the normalized row is rounded.
        bias: Adds a bias [D].
        implementation: As in `ops.rmsnorm`.
        device: The parameters' device.
        dtype: The parameters' dtype.

    Raises:
        TypeError: An option has a wrong type.
        ValueError: An option is out of range.

    Example:
        >>> import torch
        >>> from tilewright.nn import RMSNorm
        >>> RMSNorm(64)(torch.randn(2, 64)).shape
        torch.Size([2, 64])
    """

    @checks.torch_names(
        normalized_shape="dim",
        elementwise_affine="the norm always has a weight; weight.requires_grad_(False) freezes it",
    )
    def __init__(
        self,
        dim: int | tuple[int, int],
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        cast: str = "llama",
        bias: bool = False,
        implementation: str = "auto",
        device=None,
        dtype=None,
    ):
        super().__init__()
        shape = dim if isinstance(dim, (tuple, list)) else (dim,)
        if not all(isinstance(n, int) for n in shape):
            raise TypeError(f"dim must be an int or a pair of them, got {dim!r}")
        if len(shape) not in (1, 2) or min(shape) < 1:
            raise ValueError(f"dim must be D or (heads, D), all positive, got {dim!r}")
        ops.rmsnorm.takes.check(eps=eps, offset=offset, cast=cast)
        _known("rmsnorm", implementation)
        self.eps, self.offset, self.cast, self.implementation = eps, offset, cast, implementation
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = (
            nn.Parameter(torch.empty(shape[-1], device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rmsnorm(
            x,
            local(self.weight),
            self.eps,
            bias=None if self.bias is None else local(self.bias),
            offset=self.offset,
            cast=self.cast,
            implementation=self.implementation,
        )

    def extra_repr(self) -> str:
        return _shown(
            dim=tuple(self.weight.shape),
            eps=self.eps,
            offset=self.offset or None,
            cast=self.cast,
            bias=self.bias is not None,
            implementation=self.implementation,
        )


class Linear(nn.Linear):
    """torch.nn.Linear that uses this library's float32 GEMM on a CPU with AVX-512.

    It accumulates in float32, in an order that depends on shapes alone. Under torch.autocast on
    CUDA the gradients of float32 parameters are computed in float32, not rounded to autocast's
    dtype first. It computes as torch.nn.Linear in other dtypes, under torch.compile, and, on a CPU,
    with a bias or fewer than 48 rows.

    Example:
        >>> import torch
        >>> from tilewright.nn import Linear
        >>> Linear(32, 16, bias=False)(torch.randn(64, 32)).shape
        torch.Size([64, 16])
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = local(self.weight), None if self.bias is None else local(self.bias)
        # Compiled code would recompile on either side of the minimum number of rows.
        if (
            not torch.compiler.is_compiling()
            and x.is_cpu
            and x.dtype == torch.float32 == weight.dtype
            and bias is None
            and products.takes(torch.float32)
            and not torch.is_autocast_enabled("cpu")
        ):
            return products.linear(x, weight)
        return linear(x, weight, bias)


class SwiGLU(nn.Module):
    """The MLP of Llama and Qwen: down(silu(gate(x)) * up(x)), with gate and up in one projection.

    gate_up_proj.weight is [2 I, H], gate's rows first: torch.cat((gate_proj.weight,
    up_proj.weight)) of a checkpoint with separate weights. down_proj.weight is [H, I]. Both are
    initialized as in torch.nn.Linear.

    Args:
        hidden: H, width of x [..., H] and of the result.
        inner: I, the inner width.
        bias: On both projections.
        implementation: As in `ops.silu_mul`.
        device: The parameters' device.
        dtype: The parameters' dtype.

    Raises:
        ValueError: A width is not an int >= 1, or the implementation does not exist.

    Example:
        >>> import torch
        >>> from tilewright.nn import SwiGLU
        >>> SwiGLU(32, 64)(torch.randn(2, 32)).shape
        torch.Size([2, 32])
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        *,
        bias: bool = False,
        implementation: str = "auto",
        device=None,
        dtype=None,
    ):
        super().__init__()
        for name, value in (("hidden", hidden), ("inner", inner)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int >= 1, got {value!r}")
        _known("silu_mul", implementation)
        self.hidden, self.inner, self.implementation = hidden, inner, implementation
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias, device=device, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        self.gate_up_proj.reset_parameters()
        self.down_proj.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(
            ops.silu_mul(self.gate_up_proj(x), implementation=self.implementation)
        )

    def extra_repr(self) -> str:
        return _shown(hidden=self.hidden, inner=self.inner, implementation=self.implementation)


class _Loss(nn.Module):
    """The options of a loss. `class_weight` is a buffer, so that it moves with the module."""

    class_weight: torch.Tensor | None

    def __init__(self, op: str, class_weight: torch.Tensor | None, options: dict):
        super().__init__()
        ops.OPS[op].takes.check(class_weight=class_weight, **options)
        _known(op, options["implementation"])
        world_size(options["group"])
        self.register_buffer("class_weight", class_weight)
        self.options = options

    def extra_repr(self) -> str:
        weighted = None if self.class_weight is None else tuple(self.class_weight.shape)
        return _shown(**self.options, class_weight=weighted)


class CrossEntropyLoss(_Loss):
    """`ops.cross_entropy` with its options fixed; see there for the options and the result.

    forward(logits [..., V], target [...], token_weight=None, num_tokens=None).

    Example:
        >>> import torch
        >>> from tilewright.nn import CrossEntropyLoss
        >>> CrossEntropyLoss(reduction="sum")(torch.zeros(3, 4), torch.tensor([0, 1, -100]))
        tensor(2.7726)
    """

    # Wide: what cross_entropy takes, but what each call passes.
    @checks.torch_names(weight="class_weight")
    def __init__(
        self,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        class_weight: torch.Tensor | None = None,
        reduction: str = "mean",
        return_lse: bool = False,
        return_entropy: bool = False,
        return_argmax: bool = False,
        group=None,
        implementation: str = "auto",
    ):
        super().__init__(
            "cross_entropy",
            class_weight,
            {
                "ignore_index": ignore_index,
                "label_smoothing": label_smoothing,
                "z_loss": z_loss,
                "softcap": softcap,
                "reduction": reduction,
                "return_lse": return_lse,
                "return_entropy": return_entropy,
                "return_argmax": return_argmax,
                "group": group,
                "implementation": implementation,
            },
        )

    def forward(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        token_weight: torch.Tensor | None = None,
        num_tokens: int | torch.Tensor | None = None,
    ):
        return ops.cross_entropy(
            logits,
            target,
            class_weight=self.class_weight,
            token_weight=token_weight,
            num_tokens=num_tokens,
            **self.options,
        )


class LinearCrossEntropyLoss(_Loss):
    """`ops.linear_cross_entropy` with its options fixed; see there for the options and the result.

    forward(x [..., H], weight [V, H], target [...], bias=None, token_weight=None, num_tokens=None).
    The weight is an argument, not a parameter: it belongs to the model's head, and is often tied to
    the embedding.

    Example:
        >>> import torch
        >>> from tilewright.nn import LinearCrossEntropyLoss
        >>> loss = LinearCrossEntropyLoss(reduction="sum")
        >>> loss(torch.zeros(3, 8), torch.ones(4, 8), torch.tensor([0, 1, -100]))
        tensor(2.7726)
    """

    # Wide: what linear_cross_entropy takes, but what each call passes.
    def __init__(
        self,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        class_weight: torch.Tensor | None = None,
        reduction: str = "mean",
        return_lse: bool = False,
        return_entropy: bool = False,
        return_argmax: bool = False,
        group=None,
        accumulate: str = "fp32",
        fp32_logits: bool = False,
        chunk_size: int | None = None,
        implementation: str = "auto",
    ):
        super().__init__(
            "linear_cross_entropy",
            class_weight,
            {
                "ignore_index": ignore_index,
                "label_smoothing": label_smoothing,
                "z_loss": z_loss,
                "softcap": softcap,
                "reduction": reduction,
                "return_lse": return_lse,
                "return_entropy": return_entropy,
                "return_argmax": return_argmax,
                "group": group,
                "accumulate": accumulate,
                "fp32_logits": fp32_logits,
                "chunk_size": chunk_size,
                "implementation": implementation,
            },
        )

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        token_weight: torch.Tensor | None = None,
        num_tokens: int | torch.Tensor | None = None,
    ):
        return ops.linear_cross_entropy(
            x,
            weight,
            target,
            bias=bias,
            class_weight=self.class_weight,
            token_weight=token_weight,
            num_tokens=num_tokens,
            **self.options,
        )
