"""The chunk loop of the fused linear losses: rows per chunk, their logits, and the gradients that
are summed over chunks.

The chunk size in rows (`chunk_rows`) follows from shapes and dtypes alone, so that it, and with it
the bits, are the same in every run, on every rank, and in a captured CUDA graph. n chunks need T V
s / n bytes of logits at a time (s: bytes per logit), and from the second on 4 V H bytes, in which
the gradient of a bfloat16 weight is summed. There is one chunk if that needs no more memory than
the chunks of a fixed budget (on a GPU 1 GiB, on a CPU 64 MiB, or a tuned one for this H and V).
Chunks of a budget have budget / (V s) rows, rounded down to a multiple of 128 (CPU: 32) but at
least one such tile, balanced over the smallest number of chunks that cover T.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from tilewright.kernels.tuning import Tunable
from tilewright.ops import products

MiB = 2**20
# The budget of several chunks. On a CPU smaller chunks read and write the weight's gradient more
# often, and larger ones exceed the caches. On a GPU 1 GiB gives GEMMs of 4,096 rows at V=128,256.
# whole: whether there is one chunk if that needs no more memory; on a CPU always.
CHUNK = Tunable(
    "linear_cross_entropy",
    "chunk",
    ("H", "V", "itemsize", "cuda"),
    "forward_backward",
    lambda H, V, itemsize, cuda: (
        {"budget_mib": 1024, "whole": True} if cuda else {"budget_mib": 64}
    ),
    lambda H, V, itemsize, cuda: (
        [
            {"budget_mib": n, "whole": whole}
            for n in (256, 512, 1024, 2048)
            for whole in (True, False)
        ]
        if cuda
        else [{"budget_mib": n} for n in (8, 16, 32, 128, 256)]
    ),
)
# The block of the logits' gradient that is cast to float32 at a time where the GEMM needs that. It
# fits in a core's cache.
BLOCK_BYTES = MiB
# ATen's GEMMs from 16-bit operands into, and accumulating onto, a float32 result: CUDA only.
HAS_OUT_DTYPE = "dtype_out" in torch.ops.aten.addmm.overloads()


class Precision(NamedTuple):
    """What is float32 although the operands are not.

    fp32_sums: sums over chunks of the gradients of weight and bias.
    fp32_logits: the logits.
    learns: whether weight gets a gradient at all, on which the chunks depend. Backward must use the
        chunks of forward, whose logits it recomputes.
    """

    fp32_sums: bool = False
    fp32_logits: bool = False
    learns: bool = False


def chunk_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    chunk_size: int | None = None,
    precision: Precision = Precision(),  # noqa: B008 (a constant)
) -> int:
    """Rows of x [T, H] per chunk, at least 1; weight: [V, H], this rank's. The module's docstring
    has the rule.
    """
    (T, H), V = x.shape, weight.shape[0]
    if chunk_size is None:
        cuda, size = x.device.type == "cuda", x.element_size()
        tile = 128 if cuda else 32
        # Float32 logits need their gradient in x's dtype beside them.
        logit = size if size >= 4 or not precision.fp32_logits else 4 + size
        config = CHUNK.config(x.device, H, V, size, cuda)
        budget = config["budget_mib"] * MiB
        chunk_size = max(budget // (V * logit) // tile, 1) * tile
        chunks = max(-(-T // chunk_size), 1)
        # float16 accumulates in float32 anyway: see `summed_dtype`.
        summed = precision.fp32_sums and precision.learns and weight.dtype == torch.bfloat16
        sums = 4 * V * H if summed else 0
        if config.get("whole", True) and T * V * logit <= T * V * logit / chunks + sums:
            chunks = 1
        chunk_size = -(-T // chunks // tile) * tile
    return max(min(chunk_size, T), 1)


def _multiplies_here(t: torch.Tensor) -> bool:
    """Whether `products` multiplies factors like t into float32."""
    return t.is_cpu and products.takes(t.dtype)


def _gemm(out, a, b, add: bool, alpha: float = 1.0) -> None:
    """out (+)= alpha * a b. out: in the factors' dtype, or float32 where `_multiplies_here`."""
    if out.dtype == torch.float32 and _multiplies_here(a):
        products.product_(out, a, b, add=add, scale=alpha)
    elif not add and alpha == 1.0:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(out, a, b, beta=1 if add else 0, alpha=alpha, out=out)


class Gradients:
    """The gradients of x, weight and bias, accumulated chunk by chunk. need: which of the three."""

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        chunk: int,
        fp32_sums: bool,
        scale: float,
        need: tuple[bool, bool, bool],
    ):
        V, H = weight.shape
        chunks = -(-x.shape[0] // chunk)
        # A single chunk is summed inside the GEMM, in float32.
        acc = torch.float32 if fp32_sums and chunks > 1 else summed_dtype(weight.dtype, fp32_sums)
        self.x, self.weight, self.scale, self.chunks = x, weight, scale, chunks
        self.need_x, self.need_w, self.need_b = need_x, need_w, need_b = need
        self.needed = any(need)
        self.fp32_sums = fp32_sums
        self.dx = x.new_empty(x.shape if need_x else (0,))
        self.dw = weight.new_empty((V, H) if need_w else (0,), dtype=acc)
        new = weight.new_zeros if need_b else weight.new_empty
        self.db = new((V,) if need_b else (0,), dtype=torch.float32 if fp32_sums else weight.dtype)
        self.wide = None  # a block of the logits' gradient and the chunk's x, in float32
        if (
            need_w
            and acc != x.dtype
            and not (x.is_cuda and HAS_OUT_DTYPE)
            and not _multiplies_here(x)
        ):
            columns = min(max(BLOCK_BYTES // (4 * chunk), 64), V)
            self.wide = self.dw.new_empty((chunk, columns)), self.dw.new_empty((chunk, H))

    def add(self, rows: slice, dlogits: torch.Tensor) -> None:
        x, first = self.x[rows], rows.start == 0
        dlogits = dlogits.to(x.dtype)
        if self.need_x:
            _gemm(self.dx[rows], dlogits, self.weight, False, self.scale)
        if self.need_b:
            self.db += dlogits.sum(0, dtype=self.db.dtype) * self.scale
        if not self.need_w:
            return
        if self.dw.dtype == x.dtype or _multiplies_here(x):
            _gemm(self.dw, dlogits.t(), x, not first, self.scale)
        elif self.wide is None:
            torch.addmm(
                self.dw,
                dlogits.t(),
                x,
                out_dtype=torch.float32,
                beta=0 if first else 1,
                alpha=self.scale,
                out=self.dw,
            )
        else:
            n = x.shape[0]
            wide, x = self.wide[0][:n], self.wide[1][:n].copy_(x)
            for v in range(0, dlogits.shape[1], wide.shape[1]):
                part = dlogits[:, v : v + wide.shape[1]]
                part = wide[:, : part.shape[1]].copy_(part)
                _gemm(self.dw[v : v + part.shape[1]], part.t(), x, not first, self.scale)

    def done(self, wide: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dx, dw, db, in the inputs' dtype; the last two in `summed_dtype` if wide."""
        if self.chunks == 0:
            self.dw.zero_()
        dtype = summed_dtype(self.weight.dtype, self.fp32_sums) if wide else self.weight.dtype
        return self.dx, self.dw.to(dtype), self.db.to(dtype)


def divides_later(x: torch.Tensor) -> bool:
    """Whether "mean" divides after the gradients are computed: in float16 a logit's gradient,
    divided by the number of tokens, would underflow.
    """
    return x.dtype == torch.float16


def summed_dtype(dtype: torch.dtype, fp32_sums: bool) -> torch.dtype:
    """The dtype in which the gradient of the sum of losses is saved for backward, for a weight of
    this dtype. It is not yet divided by the number of tokens, so it could overflow in float16.
    """
    return torch.float32 if fp32_sums and dtype == torch.float16 else dtype


def logits_chunks(
    head: tuple[torch.Tensor | None, ...], chunk: int, scale: float, fp32_logits: bool
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields rows, and scale * (x weight^T + bias + low up^T) of them in a buffer that the next
    chunk overwrites.

    head: x, weight and bias; and low and up, or not.
    """
    x, weight, bias, low, up = (*head, None, None)[:5]
    assert x is not None and weight is not None
    T = x.shape[0]
    wide = fp32_logits and x.dtype != torch.float32
    buffer = x.new_empty((min(chunk, T), weight.shape[0]), dtype=torch.float32 if wide else x.dtype)
    for start in range(0, T, chunk):
        rows = slice(start, min(start + chunk, T))
        logits = buffer[: rows.stop - start]
        if wide:
            _wide_logits(logits, x[rows], weight, bias, scale)
        elif bias is not None:
            torch.addmm(bias, x[rows], weight.t(), beta=scale, alpha=scale, out=logits)
        else:
            _gemm(logits, x[rows], weight.t(), False, scale)
        if low is not None and up is not None:
            here, by = low[rows], up.t()
            if wide and not _multiplies_here(here):
                here, by = here.float(), by.float()
            _gemm(logits, here, by, True, scale)
        yield rows, logits


def _wide_logits(logits, x, weight, bias, scale):
    """logits = scale * (x weight^T + bias) in float32, from 16-bit operands."""
    if x.is_cuda and HAS_OUT_DTYPE:
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=logits)
    elif _multiplies_here(x):
        _gemm(logits, x, weight.t(), False)
    else:  # a block of the weight at a time
        x, step = x.float(), max(BLOCK_BYTES // (4 * max(weight.shape[1], 1)), 64)
        for v in range(0, weight.shape[0], step):
            torch.mm(x, weight[v : v + step].float().t(), out=logits[:, v : v + step])
    if bias is not None:
        logits += bias
    if scale != 1.0:
        logits *= scale
