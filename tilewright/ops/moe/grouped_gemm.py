"""One matrix product per expert: y[r] = weight[e(r)] x[r], where e(r) is the expert of row r.

R = rows, E = experts, K = columns of x, N = columns of y. Rows are sorted by expert; expert e's
rows end at offsets[e]. The rows from offsets[-1] on, the tail, belong to no expert:

    dx[r] = weight[e(r)]^T dy[r]        dweight[e] = the sum over e's rows of dy[r] x[r]^T

The tail of y and dx is 0; the tail of x and dy is not read, so NaN in it does not propagate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tilewright.core import checks, platform
from tilewright.core.library import Operator, define, from_kernels
from tilewright.core.registry import (
    Goal,
    Implementation,
    Op,
    in_cpp,
    in_gluon,
    in_triton,
    short,
)
from tilewright.core.takes import takes
from tilewright.kernels.moe.operators import (
    product,
    product_backward_weight,
    product_backward_x,
)
from tilewright.ops import cases
from tilewright.ops.moe.grouped_gemm_cases import CASES


@checks.autocast("products", "x", "weight")
@takes("R < 2**31", "E >= 1", x="float [R, K]", weight="x [E, N, K]", offsets="int32 [E]")
def grouped_gemm(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, *, implementation: str = "auto"
) -> torch.Tensor:
    """Multiplies each expert's rows by its weight:
    y[r] = weight[e] @ x[r] for offsets[e - 1] <= r < offsets[e], and 0 from offsets[-1] on.

    Accumulated in float32, rounded once. float32 is multiplied in full precision. Under
    torch.autocast x and weight are cast to its dtype, as by F.linear (not by grouped_mm).
    Differentiable once in x and weight; the gradient of an expert without rows is 0. Saved for
    backward: x, weight, offsets. Deterministic: no atomics.

    Args:
        x: [R, K] fp32 | bf16 | fp16 (fp64 with eager), any strides; rows of a wider tensor are read
            in place.
        weight: [E, N, K] in x's dtype, E > 0; the transpose of a contiguous [E, K, N] is read in
            place too.
        offsets: [E] int32 on x's device: the end of each expert's rows, non-decreasing, within 0
            and R.
        implementation: "auto", or one that `tilewright explain grouped_gemm` lists.

    Returns:
        [R, N], contiguous, in x's dtype.

    Raises:
        TypeError, ValueError: Invalid arguments (the values of offsets are not checked on CUDA,
            where a check would synchronize: they are clamped to these rules).
        ImplementationUnavailable: A named implementation that cannot run here.

    Example:
        >>> from tilewright.ops import grouped_gemm
        >>> x, weight = torch.ones(3, 2), torch.ones(2, 4, 2)
        >>> grouped_gemm(x, weight, torch.tensor([1, 3], dtype=torch.int32)).shape
        torch.Size([3, 4])

    Source: the per-expert linear layers of a mixture of experts (arXiv:2101.03961), without padding
    or dropped tokens as in MegaBlocks, arXiv:2211.15841; the signature is that of
    torch.nn.functional.grouped_mm.
    """
    run = GROUPED_GEMM.pick(implementation, x)
    return run(x, weight, contiguous_offsets(offsets, x.shape[0]))


def contiguous_offsets(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """offsets, contiguous; their values are checked if that does not synchronize."""
    if offsets.is_cuda or offsets.is_meta:
        return offsets.contiguous()
    return checked_offsets(offsets, rows)


def _look_at_offsets(offsets, rows):
    last = 0
    for e, end in enumerate(offsets.tolist() if not offsets.is_cuda else ()):
        if not last <= end <= rows:
            raise ValueError(
                f"offsets must not decrease and lie within 0 and {rows}, the number of rows; got "
                f"{end} at "
                f"index {e}" + (f" after {last}" if e else "")
            )
        last = end
    return offsets.clone(memory_format=torch.contiguous_format)


def _empty_offsets(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.empty_like(offsets, memory_format=torch.contiguous_format)


# An operator, so that compiled code checks at run time; the caller uses its result.
checked_offsets = define(
    "checked_offsets", _look_at_offsets, _empty_offsets, plain=lambda offsets, rows: offsets
)


# ---- the definition


def grouped_gemm_eager(x, weight, offsets):
    acc = torch.promote_types(x.dtype, torch.float32)
    parts, begin = [], 0
    for w, end in zip(weight, offsets.tolist(), strict=True):
        parts.append((x[begin:end].to(acc) @ w.to(acc).t()).to(x.dtype))
        begin = end
    parts.append(x.new_zeros(x.shape[0] - begin, weight.shape[1]))
    return torch.cat(parts)


# ---- fused implementations


@product.formula()
def _backward(ops, dy, x, weight, offsets, needs):
    backward_x, backward_weight = ops
    return {
        "x": backward_x(dy, weight, offsets) if needs["x"] else None,
        "weight": backward_weight(dy, x, offsets) if needs["weight"] else None,
    }


class Fused(NamedTuple):
    """The three operators of one implementation."""

    forward: Operator
    backward_x: Operator
    backward_weight: Operator

    @classmethod
    def define(cls, name: str, launches) -> Fused:
        """launches: an object with the three launchers."""
        name = f"grouped_gemm_{name}"
        backward = (
            product_backward_x.define(f"{name}_backward_x", launches.backward_x),
            product_backward_weight.define(f"{name}_backward_weight", launches.backward_weight),
        )
        return cls(product.define(f"{name}_forward", launches.forward, backward), *backward)


def operators(name: str) -> Fused:
    """The operators of an implementation, for ops that are composed of them."""
    return _LOADERS[name]()


@functools.cache
def _triton():
    from tilewright.kernels.moe import grouped_gemm_triton

    return Fused.define("triton", grouped_gemm_triton)


@functools.cache
def _gluon():
    from tilewright.kernels.moe import specialized

    return Fused.define("gluon", specialized)


@functools.cache
def _cpp():
    backward = (
        product_backward_x.adopt("grouped_gemm_cpp_backward_x"),
        product_backward_weight.adopt("grouped_gemm_cpp_backward_weight"),
    )
    return Fused(product.adopt("grouped_gemm_cpp_forward", backward), *backward)


# ---- kernels of other libraries: rows times one matrix per expert, and a sum over rows. They need
# rows aligned to 16 bytes, and may leave the tail and experts without rows unwritten.


def _padded(t: torch.Tensor) -> torch.Tensor:
    """A contiguous t, zero-padded to a multiple of 16 bytes in its last dimension, and in the last
    but one of 3.
    """
    step = 16 // t.element_size()
    missing = [-n % step for n in reversed(t.shape[1:])]
    return F.pad(t, [n for m in missing for n in (0, m)]) if any(missing) else t.contiguous()


class _Library:
    """The launchers over another library's two products, both with padded sizes.

    rows_by_matrix: (x [R, K], w [E, K, N], offsets) -> [R, N].
    sum_over_rows: (a [N, R], b [R, K], offsets) -> [E, N, K].
    """

    def __init__(self, rows_by_matrix: Callable, sum_over_rows: Callable):
        self.rows_by_matrix, self.sum_over_rows = rows_by_matrix, sum_over_rows

    def forward(self, x, weight, offsets):
        return self._product(x, _padded(weight).mT, weight.shape[1], offsets)

    def backward_x(self, dy, weight, offsets):
        return self._product(dy, _padded(weight), weight.shape[2], offsets)

    def _product(self, rows, matrix, columns, offsets):
        if rows.numel() == 0 or matrix.numel() == 0:
            return rows.new_zeros(rows.shape[0], columns)
        y = self.rows_by_matrix(_padded(rows), matrix, offsets)
        tail = torch.arange(y.shape[0], device=y.device) >= offsets[-1]
        return y[:, :columns].contiguous().masked_fill_(tail[:, None], 0)

    def backward_weight(self, dy, x, offsets):
        N, K = dy.shape[1], x.shape[1]
        if dy.numel() == 0 or x.numel() == 0:
            return dy.new_zeros(offsets.shape[0], N, K)
        dweight = self.sum_over_rows(_padded(dy).t(), _padded(x), offsets)[:, :N, :K].contiguous()
        idle = torch.diff(offsets, prepend=offsets.new_zeros(1)) == 0
        return dweight.masked_fill_(idle[:, None, None], 0)


def _grouped_mm(a, b, offsets):
    return F.grouped_mm(a, b, offs=offsets)


@functools.cache
def _native():
    return Fused.define("native", _Library(_grouped_mm, _grouped_mm))


def _no_native(device_type: str) -> str | None:
    if not hasattr(F, "grouped_mm"):
        return (
            f"torch {torch.__version__} has no torch.nn.functional.grouped_mm (2.10 and later have)"
        )
    if device_type not in ("cpu", "cuda"):
        return f"torch's grouped_mm takes CPU and CUDA tensors, not {device_type}"
    return _not_hopper_or_blackwell("torch's grouped_mm") if device_type == "cuda" else None


def _not_hopper_or_blackwell(library: str) -> str | None:
    if reason := platform.no_cuda():
        return reason
    major, minor = torch.cuda.get_device_capability()
    fits = (major, minor) == (9, 0) or major == 10
    return (
        None
        if fits
        else f"{library} has kernels for compute capability 9.0 and 10.x, this device has {major}.{minor}"
    )


@dataclass(frozen=True)
class _Native(Implementation):
    """On CUDA torch's kernels support bfloat16 only; other dtypes run in a loop that
    synchronizes.
    """

    def why_not(
        self, device_type: str, dtype: torch.dtype | None = None, request: object = None
    ) -> str | None:
        reason = super().why_not(device_type, dtype, request)
        if reason is None and device_type == "cuda" and dtype not in (None, torch.bfloat16):
            return f"torch's grouped_mm has CUDA kernels for bfloat16, not {short(dtype)}"
        return reason


def _cu_seqlens(offsets):
    return F.pad(offsets, (1, 0))


@functools.cache
def _quack():
    from quack.gemm_interface import gemm

    # tuned=False: quack would tune at the first call for every number of rows.
    library = _Library(
        lambda a, b, offsets: gemm(a, b, cu_seqlens_m=_cu_seqlens(offsets), tuned=False),
        lambda a, b, offsets: gemm(a, b, cu_seqlens_k=_cu_seqlens(offsets), tuned=False),
    )
    return Fused.define("quack", library)


_LOADERS = {"gluon": _gluon, "triton": _triton, "cpp": _cpp, "native": _native, "quack": _quack}


def _no_quack(device_type: str) -> str | None:
    if reason := platform.no_module("quack"):
        return reason
    if device_type != "cuda":
        return f"quack takes CUDA tensors, not {device_type}"
    return _not_hopper_or_blackwell("quack's varlen GEMM")


_QWEN_32768 = ("qwen3-30b-a3b_up_32768", "qwen3-30b-a3b_down_32768")

GROUPED_GEMM = Op(
    "grouped_gemm",
    grouped_gemm,
    grouped_gemm_eager,
    (
        in_gluon(
            lambda: _gluon().forward,
            "large products whose operands TMA reads",
            gate=from_kernels("moe.specialized", "gate"),
            tunables=from_kernels("moe.specialized", "TUNABLES"),
        ),
        in_triton(
            lambda: _triton().forward,
            gate=from_kernels("moe.grouped_gemm_triton", "gate"),
            tunables=from_kernels("moe.grouped_gemm_triton", "TUNABLES"),
        ),
        in_cpp(lambda: _cpp().forward),
        _Native("native", lambda: _native().forward, _no_native, devices=("cuda", "cpu")),
        # Never chosen by auto: for explicit use and comparison.
        Implementation(
            "quack",
            lambda: _quack().forward,
            _no_quack,
            devices=(),
            dtypes=(torch.bfloat16, torch.float16),
        ),
    ),
    CASES,
    # The goals of moe_mlp, which consists of these products: 520 and 440 TFLOP/s where a matrix
    # product reaches 790.
    goals=tuple(
        Goal(
            cases.HOPPER,
            pass_name,
            "matmul_percent",
            at_least=least,
            cases=_QWEN_32768,
            dtypes=("bfloat16",),
        )
        for pass_name, least in (("forward", 66), ("backward", 56))
    ),
    eager_reads_host="contract",
)
