"""Cross-entropy and log-probability of a language model's head, without its logits in memory:

    logits  = x weight^T + bias
    loss    = cross_entropy(logits, target, ...)
    logprob = log softmax(z / temperature)_y

T = tokens, H = hidden width, V = vocabulary, y = target, z = logits, soft-capped where a cap is
given. The eager twin holds the logits [T, V], rounded to x's dtype, and does the rest as
`cross_entropy` does. The chunked implementations hold those of some rows at a time: GEMM,
statistics kernel, gradient over the logits in place, two GEMMs, next rows.

Rows in a chunk (`chunk_rows`) follow from shapes and dtypes alone, so that they, and with them the
bits, are the same in every run, on every rank, and in a recorded CUDA graph. n chunks hold T V s /
n bytes of logits at a time (s: bytes of a logit), and from the second on 4 V H bytes, in which the
gradient of a bfloat16 weight is summed. There is one chunk where that needs no more memory than the
chunks of a fixed budget (on a GPU 1 GiB, on a CPU 64 MiB, or what was
tuned for this H and V): of budget / (V s) rows, down to a multiple of 128 (CPU: 32) but no less
than one such tile, evened out over the least number of chunks that hold T.

With reduction "mean" and "sum" forward computes the gradients too, and backward scales them by the
upstream
gradient: 6 T H V flops in total. For "none" and for `linear_logprob` the upstream gradient differs
by row: forward keeps [T] statistics only, and backward computes the logits again, 8 T H V.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from tilewright import _torch, platform
from tilewright.kernels.launchers import Asked, Found, Stats
from tilewright.kernels.tuning import Tunable
from tilewright.ops import _checks, _products, _softmax_stats, cases
from tilewright.ops._library import define, differentiate, refuse_tangents
from tilewright.ops._softmax_stats import (
    across,
    capped,
    check,
    combine,
    entropy,
    group_of,
    named,
    presence,
    shard,
    stats_eager,
    weight_of,
    without_gradient,
)
from tilewright.ops.cross_entropy import (
    CrossEntropyOutput,
    floats,
    in_torch,
    losses_eager,
    losses_of_torch,
    number_or_tensor,
    reduced,
    reshaped,
)
from tilewright.ops.cross_entropy import _validate as _validate_logits
from tilewright.registry import Case, Cost, Goal, Implementation, Op

ACCUMULATE = ("fp32", "bf16")
# What is float32 though the operands are not, as one number: sums over chunks of weight's gradient,
# and logits. LEARNS: weight gets a gradient at all, on which chunks depend; those of backward must
# be those of forward, whose logits it makes again.
SUMS, LOGITS, LEARNS = 1, 2, 4
MiB = 2**20
# The budget of several chunks. On a CPU: smaller chunks read and write the weight's gradient more
# often, larger ones
# leave the caches. On a GPU: 1 GiB makes GEMMs of 4,096 rows at V = 128,256.
CHUNK = Tunable(
    "linear_cross_entropy",
    "chunk",
    ("H", "V", "itemsize", "cuda"),
    "forward_backward",
    lambda H, V, itemsize, cuda: {"budget_mib": 1024 if cuda else 64},
    lambda H, V, itemsize, cuda: [
        {"budget_mib": n} for n in ((256, 512, 2048) if cuda else (8, 16, 32, 128, 256))
    ],
)
# Of the logits' gradient, converted to float32 at a time where the GEMM needs that: a core's cache
# holds it.
BLOCK_BYTES = MiB
# ATen's GEMMs from 16-bit operands into a float32 result, and onto one: CUDA only.
HAS_OUT_DTYPE = "dtype_out" in torch.ops.aten.addmm.overloads()


@_checks.autocast("products", "x", "weight", "bias")
def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    reduction: str = "mean",
    num_tokens: int | torch.Tensor | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_argmax: bool = False,
    group: torch.distributed.ProcessGroup | None = None,
    accumulate: str = "fp32",
    fp32_logits: bool = False,
    chunk_size: int | None = None,
    implementation: str = "auto",
) -> torch.Tensor | CrossEntropyOutput:
    """`cross_entropy(x @ weight.T + bias, target, ...)`, a chunk of rows at a time.

    x: [..., H] fp32 | bf16 | fp16 (fp64 with eager), any strides.   weight: [V, H] in x's dtype.
    target: [...] int64, each in [0, V) or ignore_index, whose tokens have loss 0 and a gradient of
        0 in x. But weight's gradient is a product with all rows of x, so an ignored row that holds
        a NaN or infinity makes
        it NaN (0 * NaN): clear such rows first. Any other target is treated as in `cross_entropy`;
        on CUDA tensors its NaN is in its row of x's gradient (torch: in every row) and in all of
        weight's.
    bias: [V] in x's dtype, or None. ignore_index, label_smoothing, z_loss, softcap, class_weight,
    token_weight, reduction, num_tokens,
        return_lse, return_entropy, return_argmax: as in `cross_entropy`, and so is the result.
    group: weight and bias are this rank's shard of the vocabulary, [V / world, H] and [V / world],
        in rank order, all of one size; x, target and the rest are whole and the same on every rank.
        Each chunk costs the all-reduces of `cross_entropy`; backward all-reduces the gradient of x,
        [T, H], in x's dtype. Refused under torch.compile.
    accumulate: in what the gradients of weight and bias are summed over chunks. "fp32"; or "bf16",
        in their own dtype (so fp16 for fp16), which saves 4 bytes a weight of a 16-bit head and
        loses precision with every chunk. In fp16 it can overflow, because what is summed is not yet
        divided by the number of tokens. Makes no difference to a float32 weight. A single chunk
        needs no sum, so "fp32" costs it nothing (but for fp16, whose sum stays in float32 for the
        same reason).
    fp32_logits: keep logits as the GEMM sums them, in float32, instead of rounding them to a 16-bit
        x's dtype. A chunk then holds float32 logits and, where there are gradients, a copy in x's
        dtype for the GEMMs. On a CPU without AVX-512's bfloat16 instructions, and in float16,
        operands are converted first: no such GEMM there.
    chunk_size: rows a chunk, or None for the rule in the module's docstring. The eager twin has one
    chunk.
    Memory beside inputs and gradients: one chunk of logits in x's dtype (see fp32_logits), float32
        sums for a 16-bit weight.
    Computed in: GEMMs as torch.mm does them in x's dtype (on a CPU with AVX-512, those into float32
    by tilewright's own, summed in float32), logits rounded to it (but for fp32_logits); statistics
    and loss in fp32; the gradient of the logits rounded to x's dtype. No atomics: the same bits
    every run with the same chunks. Under torch.autocast x, weight and bias are cast to its dtype;
    the loss is float32. Differentiable once in x, weight, bias and token_weight. What does not
    require a gradient costs none: with a frozen weight (LoRA), its GEMM and its sums are left out.
    Raises TypeError or ValueError for arguments that do not fit, IndexError for a target out of
    range (as `cross_entropy`), ImplementationUnavailable for a named implementation that cannot run
    here, or not with these options.
    Source: chunks with gradients in forward as in Liger-Kernel (arXiv:2410.10989, section 3.2).
    """
    softcap = _validate(
        x,
        weight,
        bias,
        target,
        ignore_index,
        chunk_size,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        class_weight=class_weight,
        token_weight=token_weight,
        reduction=reduction,
        num_tokens=num_tokens,
        group=group,
    )
    check_chunks(accumulate, chunk_size)
    _check_fp32_logits(fp32_logits)
    if group is not None:
        if torch.compiler.is_compiling():
            raise ValueError(
                "group is refused under torch.compile: a chunk's all-reduce is a step of a loop "
                "that it cannot see; leave the sharded loss outside the compiled region"
            )
        x = _Replicated.apply(x, group)
    fn = LINEAR_CROSS_ENTROPY.pick(implementation, x)
    with _checks.no_autocast(x):
        loss, *extra = fn(
            x.reshape(-1, x.shape[-1]),
            weight,
            bias,
            target,
            class_weight,
            token_weight,
            num_tokens,
            ignore_index,
            softcap,
            float(label_smoothing),
            float(z_loss),
            reduction,
            return_lse,
            return_entropy,
            return_argmax,
            group,
            SUMS * (accumulate == "fp32") + LOGITS * fp32_logits,
            chunk_size,
        )
    loss = reshaped(loss, target.shape if reduction == "none" else ())
    if not (return_lse or return_entropy or return_argmax):
        return loss
    return CrossEntropyOutput(
        loss, *(None if t is None else t.detach().reshape(target.shape) for t in extra)
    )


@_checks.autocast("products", "x", "weight", "bias")
def linear_logprob(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    fp32_logits: bool = False,
    chunk_size: int | None = None,
    implementation: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target, and the entropy of its distribution, for reinforcement
    learning.

    x, weight, target, bias, fp32_logits, chunk_size: as in `linear_cross_entropy`.
    temperature: > 0, divides the (capped) logits.   softcap: > 0, or None for none. Both, and
        softcap / temperature, are finite in float32.
    Returns (logprob [...], entropy [...]), fp32 (fp64 for fp64), in nats: log softmax(z /
    temperature)_y, never above 0, and the entropy of softmax(z / temperature), never below 0. Both
    are 0 where target is ignore_index. Both are differentiable in x, weight and bias, once;
    backward computes the logits again. The gradients of weight and bias are summed over chunks in
    fp32. Under torch.autocast as `linear_cross_entropy`. Raises as `linear_cross_entropy`.
    """
    softcap = _validate(x, weight, bias, target, ignore_index, chunk_size, softcap=softcap)
    _check_fp32_logits(fp32_logits)
    _checks.number(
        "temperature",
        temperature,
        _checks.SMALLEST,
        _checks.LARGEST,
        "a finite number > 0 (in float32)",
    )
    if softcap and not _checks.SMALLEST <= softcap / temperature <= _checks.LARGEST:
        raise ValueError(
            "softcap / temperature must be a finite number > 0 (in float32), got "
            f"{softcap!r} / {temperature!r}"
        )
    here = presence(target, weight.shape[0], ignore_index).reshape(-1)
    fn = LINEAR_LOGPROB.pick(implementation, x)
    with _checks.no_autocast(x):
        found = fn(
            x.reshape(-1, x.shape[-1]),
            weight,
            bias,
            target.reshape(-1),
            here,
            float(temperature),
            softcap,
            SUMS + LOGITS * fp32_logits,
            chunk_size,
        )
    return tuple(reshaped(t, target.shape) for t in found)


def _check_fp32_logits(fp32_logits):
    if not isinstance(fp32_logits, bool):
        raise TypeError(f"fp32_logits must be a bool, got {fp32_logits!r}")


def check_chunks(accumulate, chunk_size):
    """Raises ValueError for an option that no inputs could make right."""
    _checks.choice("accumulate", accumulate, ACCUMULATE)
    if chunk_size is not None and (
        not isinstance(chunk_size, int) or not 1 <= chunk_size <= _checks.INT64.max
    ):
        raise ValueError(
            f"chunk_size must be an int >= 1 (and an int64) or None, got {chunk_size!r}"
        )


def _validate(
    x,
    weight,
    bias,
    target,
    ignore_index,
    chunk_size,
    *,
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    class_weight=None,
    token_weight=None,
    reduction="mean",
    num_tokens=None,
    group=None,
):
    for name, t in (("x", x), ("weight", weight), ("bias", bias)):
        if t is None and name == "bias":
            continue
        _checks.floating(name, t)
        if t.dtype != x.dtype:
            raise TypeError(
                f"{name} must have x's dtype {x.dtype}, got {t.dtype}; cast one of the two"
            )
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have a last dimension of at least 1, got shape {list(x.shape)}")
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight must have shape [V, {x.shape[-1]}] (x's last dimension) with V >= 1, got "
            f"{list(weight.shape)}"
        )
    if bias is not None:
        _checks.shape("bias", bias, weight.shape[:1], "rows of weight")
    if isinstance(target, torch.Tensor):
        _checks.shape("target", target, tuple(x.shape[:-1]), "x without its last dimension")
    check_chunks("fp32", chunk_size)
    _checks.same_device(x=x, weight=weight, bias=bias)
    # What the logits would be, in shape, dtype and device: one element, seen V * T times.
    logits = x.new_empty(1).expand(*x.shape[:-1], weight.shape[0])
    return _validate_logits(
        logits,
        target,
        ignore_index,
        label_smoothing,
        z_loss,
        softcap,
        class_weight,
        token_weight,
        reduction,
        num_tokens,
        False,
        group,
    )


class _Replicated(torch.autograd.Function):
    """x, which every rank of the group holds: its gradient is the sum of what the ranks find."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None


# ---- the definition


def _head(x, weight, bias, fp32):
    if fp32 & LOGITS:
        acc = torch.promote_types(x.dtype, torch.float32)
        x, weight, bias = x.to(acc), weight.to(acc), None if bias is None else bias.to(acc)
    return F.linear(x, weight, bias)


def linear_cross_entropy_eager(
    x,
    weight,
    bias,
    target,
    class_weight,
    token_weight,
    num_tokens,
    ignore_index,
    softcap,
    label_smoothing,
    z_loss,
    reduction,
    lse,
    want_entropy,
    argmax,
    group,
    fp32,
    chunk_size,
):
    return in_torch(losses_eager)(
        _head(x, weight, bias, fp32),
        target,
        class_weight,
        token_weight,
        num_tokens,
        ignore_index,
        softcap,
        label_smoothing,
        z_loss,
        reduction,
        lse,
        want_entropy,
        argmax,
        False,
        group,
    )


def linear_logprob_eager(x, weight, bias, target, here, temperature, softcap, fp32, chunk_size):
    logits = without_gradient(_head(x, weight, bias, fp32), here == 0)
    z = capped(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap)
    return _logprob(stats_eager(z / temperature, target, None, 0.0, False, True, False), here)


def _logprob(stats: Stats, here):
    # A cap is rounded: z_y may be an ulp above the peak, and lse an ulp below z_y, where p = 1 and
    # the gradient is 0.
    return (
        torch.where(here == 0, 0.0, (stats.target - stats.log_sum).clamp_max(0.0) * here),
        torch.where(here == 0, 0.0, entropy(stats).clamp_min(0.0) * here),
    )


# ---- PyTorch's own: chunked for the options of F.linear_cross_entropy, else with all logits


def _no_torch(device_type: str) -> str | None:
    return (
        None
        if hasattr(F, "linear_cross_entropy")
        else "needs torch >= 2.13, for F.linear_cross_entropy"
    )


def linear_cross_entropy_torch(
    x,
    weight,
    bias,
    target,
    class_weight,
    token_weight,
    num_tokens,
    ignore_index,
    softcap,
    label_smoothing,
    z_loss,
    reduction,
    lse,
    want_entropy,
    argmax,
    group,
    fp32,
    chunk_size,
):
    if group is not None:
        raise ValueError(
            "linear_cross_entropy[torch]: group must be None: PyTorch's own takes whole rows of "
            f"logits only, got {group!r}; the other implementations accept one"
        )
    if label_smoothing or softcap or z_loss or lse or want_entropy or argmax:
        return in_torch(losses_of_torch)(
            F.linear(x, weight, bias),
            target,
            class_weight,
            token_weight,
            num_tokens,
            ignore_index,
            softcap,
            label_smoothing,
            z_loss,
            reduction,
            lse,
            want_entropy,
            argmax,
            False,
            None,
        )
    refuse_tangents("linear_cross_entropy[torch]", x, weight, bias)
    here, target = presence(target, weight.shape[0], ignore_index).reshape(-1), target.reshape(-1)
    options = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=chunk_size,
        chunking_method="auto" if chunk_size is None else None,
        acc_policy="accurate" if fp32 & SUMS else "compact",
        allow_retain_graph=torch.compiler.is_compiling(),
    )  # what it does then anyway, with a warning
    losses = F.linear_cross_entropy(
        x,
        weight,
        torch.where(here == 1, target, -100),
        linear_bias=bias,
        weight=None if class_weight is None else class_weight.to(x.dtype),
        reduction="sum" if reduction != "none" and token_weight is None else "none",
        ignore_index=-100,
        options=options,
    )
    # What is out of range was ignored above, and makes the loss and the gradient NaN here: of all
    # rows, if summed.
    losses = losses * (1 + 0 * (here if losses.dim() else here.sum()))
    y_weight = weight_of(target, floats(class_weight))
    return reduced(losses, here, y_weight, token_weight, reduction, num_tokens), None, None, None


# ---- the chunk loop, shared by all statistics kernels


def chunk_rows(
    x: torch.Tensor, weight: torch.Tensor, chunk_size: int | None = None, fp32: int = 0
) -> int:
    """Rows of x [T, H] in a chunk, at least 1; weight: [V, H], this rank's. The module's
    docstring has the rule.
    """
    (T, H), V = x.shape, weight.shape[0]
    if chunk_size is None:
        cuda, size = x.device.type == "cuda", x.element_size()
        tile = 128 if cuda else 32
        # Float32 logits have their gradient in x's dtype beside them.
        held = size if size >= 4 or not fp32 & LOGITS else 4 + size
        budget = CHUNK.config(x.device, H, V, size, cuda)["budget_mib"] * MiB
        chunk_size = max(budget // (V * held) // tile, 1) * tile
        chunks = max(-(-T // chunk_size), 1)
        # In float16 sums are wide anyway: see `summed_dtype`.
        sums = 4 * V * H if fp32 & SUMS and fp32 & LEARNS and weight.dtype == torch.bfloat16 else 0
        if T * V * held <= T * V * held / chunks + sums:
            chunks = 1
        chunk_size = -(-T // chunks // tile) * tile
    return max(min(chunk_size, T), 1)


def _own(t: torch.Tensor) -> bool:
    """Whether products of factors like t into float32 are made here."""
    return t.is_cpu and _products.takes(t.dtype)


def _gemm(out, a, b, add: bool, alpha: float = 1.0) -> None:
    """out (+)= alpha * a b. out: of the factors' dtype, or float32 where `_own`."""
    if out.dtype == torch.float32 and _own(a):
        _products.product_(out, a, b, add=add, scale=alpha)
    elif not add and alpha == 1.0:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(out, a, b, beta=1 if add else 0, alpha=alpha, out=out)


class _Gradients:
    """The gradients that are wanted, filled chunk by chunk."""

    def __init__(self, x, weight, chunk, fp32, scale, need_x, need_w, need_b):
        V, H = weight.shape
        chunks = -(-x.shape[0] // chunk)
        # A single chunk is summed inside the GEMM, in float32.
        acc = torch.float32 if fp32 & SUMS and chunks > 1 else summed_dtype(weight.dtype, fp32)
        self.x, self.weight, self.fp32, self.scale, self.chunks = x, weight, fp32, scale, chunks
        self.dx = x.new_empty(x.shape if need_x else (0,))
        self.dw = weight.new_empty((V, H) if need_w else (0,), dtype=acc)
        new = weight.new_zeros if need_b else weight.new_empty
        self.db = new(
            (V,) if need_b else (0,), dtype=torch.float32 if fp32 & SUMS else weight.dtype
        )
        self.need_x, self.need_w, self.need_b = need_x, need_w, need_b
        self.wanted = need_x or need_w or need_b
        self.wide = None  # a block of the logits' gradient and the chunk's x, in float32
        if need_w and acc != x.dtype and not (x.is_cuda and HAS_OUT_DTYPE) and not _own(x):
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
        if self.dw.dtype == x.dtype or _own(x):
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
        dtype = summed_dtype(self.weight.dtype, self.fp32) if wide else self.weight.dtype
        return self.dx, self.dw.to(dtype), self.db.to(dtype)


def later(x: torch.Tensor) -> bool:
    """Whether "mean" divides after the gradients are made: in float16 a logit's gradient, divided
    by the number of tokens, would underflow.
    """
    return x.dtype == torch.float16


def summed_dtype(dtype: torch.dtype, fp32: int) -> torch.dtype:
    """In what the gradient of the sum of losses, for a weight of this dtype, waits for backward. It
    is not divided by the number of tokens yet, so in float16 it could be too large.
    """
    return torch.float32 if fp32 & SUMS and dtype == torch.float16 else dtype


def _chunks(
    x, weight, bias, chunk: int, scale: float, fp32: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows, and scale * (x weight^T + bias) of them in a buffer that the next chunk overwrites."""
    T = x.shape[0]
    wide = bool(fp32 & LOGITS) and x.dtype != torch.float32
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
        yield rows, logits


def _wide_logits(logits, x, weight, bias, scale):
    """logits = scale * (x weight^T + bias) in float32, from 16-bit operands."""
    if x.is_cuda and HAS_OUT_DTYPE:
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=logits)
    elif _own(x):
        _gemm(logits, x, weight.t(), False)
    else:  # a block of the weight at a time
        x, step = x.float(), max(BLOCK_BYTES // (4 * max(weight.shape[1], 1)), 64)
        for v in range(0, weight.shape[0], step):
            torch.mm(x, weight[v : v + step].float().t(), out=logits[:, v : v + step])
    if bias is not None:
        logits += bias
    if scale != 1.0:
        logits *= scale


def _joined(
    parts: list[Stats], like: torch.Tensor, wanted: tuple[str, ...] = Stats._fields
) -> Stats:
    """Statistics of all rows; an empty tensor stands for one that was not asked for."""
    found = []
    for name in Stats._fields:
        pieces = [p for part in parts if name in wanted and (p := getattr(part, name)) is not None]
        dtype = torch.int64 if name == "argmax" else torch.float32
        found.append(
            pieces[0]
            if len(pieces) == 1
            else torch.cat(pieces)
            if pieces
            else like.new_empty(0, dtype=dtype)
        )
    return Stats(*found)


def _scale(acc: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """acc *= factor [] float32, in float32. Where acc is bfloat16, a CUDA factor without dimensions
    would be rounded to it first; on a CPU one is not, and one with a dimension makes a float32 copy
    of acc.
    """
    return acc.mul_(factor.reshape(1) if acc.is_cuda else factor)


def _upstream(
    acc: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, scale_: Callable
) -> torch.Tensor:
    """acc * factor in dtype: in acc's memory if nobody will ask for it again, where scale_(acc,
    factor) leaves it alone if the factor is 1.
    """
    if type(acc) is not torch.Tensor or _torch.keeps_graph():  # other types: torch.compile traces
        return _scale(acc.clone(), factor).to(dtype)
    scale_(acc, factor)
    return acc.to(dtype)


def _register(name: str, kernels: SimpleNamespace) -> SimpleNamespace:
    """Operators around one set of statistics kernels."""

    def statistics(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        softcap: float,
        scale: float,
        smooth: bool,
        entropy: bool,
        argmax: bool,
        fp32: int,
        chunk_size: int | None,
        group: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        process_group = group_of(group)
        _, target, class_weight = shard(weight.shape[0], target, class_weight, process_group)
        chunk = chunk_rows(x, weight, chunk_size, fp32)
        parts = []
        for rows, logits in _chunks(x, weight, bias, chunk, scale, fp32):
            part = kernels.forward(
                logits, target[rows], class_weight, softcap, smooth, entropy, argmax
            )
            if process_group is not None:
                part = across(part, logits, target[rows], class_weight, process_group)
            parts.append(part)
        return tuple(_joined(parts, x))

    def statistics_backward(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        softcap: float,
        scale: float,
        peak: torch.Tensor,
        log_sum: torch.Tensor,
        mean: torch.Tensor | None,
        g_log_sum: torch.Tensor | None,
        g_target: torch.Tensor | None,
        g_weighted: torch.Tensor | None,
        g_mean: torch.Tensor | None,
        fp32: int,
        need_x: bool,
        need_w: bool,
        need_b: bool,
        chunk_size: int | None,
        group: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        _, target, class_weight = shard(weight.shape[0], target, class_weight, group_of(group))
        chunk = chunk_rows(x, weight, chunk_size, fp32)
        grads = _Gradients(x, weight, chunk, fp32, scale, need_x, need_w, need_b)
        for rows, logits in _chunks(x, weight, bias, chunk, scale, fp32):
            given = [
                None if t is None else t[rows]
                for t in (mean, g_log_sum, g_target, g_weighted, g_mean)
            ]
            grads.add(
                rows,
                kernels.backward(
                    logits,
                    target[rows],
                    class_weight,
                    softcap,
                    peak[rows],
                    log_sum[rows],
                    *given,
                    None,
                    True,
                ),
            )
        return grads.done(wide=False)

    def fused(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        token_weight: torch.Tensor | None,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
        number: float | None,
        ignore_index: int,
        softcap: float,
        label_smoothing: float,
        z_loss: float,
        mean: bool,
        want_lse: bool,
        want_entropy: bool,
        argmax: bool,
        fp32: int,
        need_x: bool,
        need_w: bool,
        need_b: bool,
        chunk_size: int | None,
        group: str,
    ) -> tuple[
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
    ]:
        """The sum of the losses times their token weights, divided if `mean` (but for float16: see
        `later`), the losses, lse, entropy and argmax, the gradients of the sum, and the divisor.
        """
        smooth, flat = label_smoothing != 0, target.view(-1)
        process_group = group_of(group)
        V, mine, shard_weight = shard(weight.shape[0], flat, class_weight, process_group)
        check(target, V, ignore_index)
        chunk = chunk_rows(x, weight, chunk_size, fp32)
        grads = _Gradients(x, weight, chunk, fp32, 1.0, need_x, need_w, need_b)
        asked = Asked(
            flat,
            V,
            ignore_index,
            class_weight,
            class_weight.sum() if smooth and class_weight is not None else None,
            token_weight,
            number if num_tokens is None else num_tokens,
            label_smoothing,
            z_loss,
            divide=mean and not later(x),
        )
        divisor, total = x.new_empty((), dtype=torch.float32), None
        result = Found(vector(x), divisor if mean else None)
        if x.shape[0] == 0:
            total, *_ = kernels.losses(
                Stats(*(vector(x) for _ in range(4))), slice(0, 0), asked, result, None
            )
        parts = []
        for rows, logits in _chunks(x, weight, bias, chunk, 1.0, fp32):
            part = kernels.forward(
                logits, mine[rows], shard_weight, softcap, smooth, want_entropy, argmax
            )
            if process_group is not None:
                part = across(part, logits, mine[rows], shard_weight, process_group)
            parts.append(part)
            total, *coefficients = kernels.losses(part, rows, asked, result, total)
            if grads.wanted:
                grads.add(
                    rows,
                    kernels.backward(
                        logits,
                        mine[rows],
                        shard_weight,
                        softcap,
                        part.peak,
                        part.log_sum,
                        None,
                        *coefficients,
                        None,
                        None,
                        True,
                    ),
                )
        stats = _joined(parts, x, Stats._fields if want_lse or want_entropy else ("argmax",))
        return (
            total,
            result.losses,
            stats.lse if want_lse else vector(x, False),
            entropy(stats) if want_entropy else vector(x, False),
            stats.argmax,
            *grads.done(wide=True),
            divisor if mean else vector(x, False),
        )

    # -- what torch.compile is told, and autograd

    def vector(x, wanted=True, dtype=torch.float32):
        return x.new_empty(x.shape[0] if wanted else 0, dtype=dtype)

    def fake_statistics(
        x,
        weight,
        bias,
        target,
        class_weight,
        softcap,
        scale,
        smooth,
        entropy,
        argmax,
        fp32,
        chunk_size,
        group,
    ):
        return (
            vector(x),
            vector(x),
            vector(x),
            vector(x, smooth),
            vector(x, entropy),
            vector(x, argmax, torch.int64),
        )

    def fake_backward(
        x,
        weight,
        bias,
        target,
        class_weight,
        softcap,
        scale,
        peak,
        log_sum,
        mean,
        g_log_sum,
        g_target,
        g_weighted,
        g_mean,
        fp32,
        need_x,
        need_w,
        need_b,
        chunk_size,
        group,
    ):
        return (
            x.new_empty(x.shape if need_x else (0,)),
            weight.new_empty(weight.shape if need_w else (0,)),
            weight.new_empty(weight.shape[:1] if need_b else (0,)),
        )

    def fake_fused(
        x,
        weight,
        bias,
        token_weight,
        target,
        class_weight,
        num_tokens,
        number,
        ignore_index,
        softcap,
        label_smoothing,
        z_loss,
        mean,
        want_lse,
        want_entropy,
        argmax,
        fp32,
        need_x,
        need_w,
        need_b,
        chunk_size,
        group,
    ):
        dtype = summed_dtype(weight.dtype, fp32)
        return (
            x.new_empty((), dtype=torch.float32),
            vector(x),
            vector(x, want_lse),
            vector(x, want_entropy),
            vector(x, argmax, torch.int64),
            x.new_empty(x.shape if need_x else (0,)),
            weight.new_empty(weight.shape if need_w else (0,), dtype=dtype),
            weight.new_empty(weight.shape[:1] if need_b else (0,), dtype=dtype),
            x.new_empty(() if mean else (0,), dtype=torch.float32),
        )

    statistics_op = define(f"linear_stats_{name}_forward", statistics, fake_statistics)
    backward_op = define(f"linear_stats_{name}_backward", statistics_backward, fake_backward)
    fused_op = define(f"linear_cross_entropy_{name}_forward", fused, fake_fused)

    def setup(ctx, inputs, output):
        x, weight, bias, target, class_weight, softcap, scale, smooth, want_mean, _, *rest = inputs
        peak, log_sum, _, _, mean, argmax = output
        ctx.save_for_backward(
            x,
            weight,
            bias,
            target,
            class_weight if smooth else None,
            peak,
            log_sum,
            mean if want_mean else None,
        )
        ctx.options = softcap, scale
        ctx.asked = smooth, want_mean
        ctx.rest = rest
        ctx.mark_non_differentiable(peak, argmax)
        ctx.set_materialize_grads(False)

    def formula(ctx, g_peak, g_log_sum, g_target, g_weighted, g_mean, g_argmax):
        none = (None,) * 10
        # What was not asked for is an empty tensor, and so is its gradient.
        g_weighted, g_mean = (
            g if on else None for g, on in zip((g_weighted, g_mean), ctx.asked, strict=True)
        )
        if g_log_sum is None and g_target is None and g_weighted is None and g_mean is None:
            return (None, None, None, *none)
        x, weight, bias, target, class_weight, peak, log_sum, mean = ctx.saved_tensors
        fp32, chunk_size, group = ctx.rest
        need = ctx.needs_input_grad[:3]
        given = [
            None if g is None else g.contiguous() for g in (g_log_sum, g_target, g_weighted, g_mean)
        ]
        found = backward_op(
            x,
            weight,
            bias,
            target,
            class_weight,
            *ctx.options,
            peak,
            log_sum,
            mean,
            *given,
            fp32,
            *need,
            chunk_size,
            group,
        )
        return (*(g if n else None for g, n in zip(found, need, strict=True)), *none)

    differentiate(statistics_op, formula, setup)

    def fused_setup(ctx, inputs, output):
        x, weight, *_ = inputs
        _, losses, lse, found, argmax, dx, dw, db, by = output
        ctx.save_for_backward(losses, by if inputs[12] and not later(x) else None, dx, dw, db)
        ctx.dtypes = x.dtype, weight.dtype, weight.dtype
        ctx.mark_non_differentiable(losses, lse, found, argmax, dx, dw, db, by)
        ctx.set_materialize_grads(False)

    def fused_formula(ctx, g, *others):
        none = (None,) * 18
        if g is None:
            return (None, None, None, None, *none)
        losses, by, *grads = ctx.saved_tensors
        need = ctx.needs_input_grad[:4]
        found = [
            _upstream(grad, g, dtype, kernels.scale_) if n else None
            for grad, dtype, n in zip(grads, ctx.dtypes, need[:3], strict=True)
        ]
        if need[3]:
            found.append(g * losses if by is None else g * losses / by)
        return (*found, *(() if need[3] else (None,)), *none)

    differentiate(fused_op, fused_formula, fused_setup)

    # -- the callables that the public functions reach

    def wanted(*tensors):
        on = torch.is_grad_enabled()
        return [on and t is not None and t.requires_grad for t in tensors]

    def cross_entropy_chunked(
        x,
        weight,
        bias,
        target,
        class_weight,
        token_weight,
        num_tokens,
        ignore_index,
        softcap,
        label_smoothing,
        z_loss,
        reduction,
        lse,
        want_entropy,
        argmax,
        group,
        fp32,
        chunk_size,
    ):
        x, weights = x.contiguous(), floats(class_weight)
        token_weight = None if token_weight is None else token_weight.reshape(-1)
        need = wanted(x, weight, bias)
        fp32 |= LEARNS * need[1]
        if reduction != "none":
            total, _, *extra, _, _, _, by = fused_op(
                x,
                weight,
                bias,
                None if token_weight is None else token_weight.contiguous(),
                target.contiguous(),
                weights,
                *number_or_tensor(num_tokens),
                ignore_index,
                softcap,
                label_smoothing,
                z_loss,
                reduction == "mean",
                lse,
                want_entropy,
                argmax,
                fp32,
                *need,
                chunk_size,
                named(group),
            )
            return total / by if reduction == "mean" and later(x) else total, *(
                t if n else None for t, n in zip(extra, (lse, want_entropy, argmax), strict=True)
            )
        V = weight.shape[0] * (1 if group is None else torch.distributed.get_world_size(group))
        here, target = presence(target, V, ignore_index).reshape(-1), target.reshape(-1)
        smooth = label_smoothing != 0
        found = Stats(
            *statistics_op(
                x,
                weight,
                bias,
                target,
                weights if smooth else None,
                softcap,
                1.0,
                smooth,
                want_entropy,
                argmax,
                fp32,
                chunk_size,
                named(group),
            )
        )
        losses = combine(
            found,
            here,
            weight_of(target, weights),
            V=V,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            weight_sum=None if weights is None else weights.sum(),
        )
        return (
            reduced(losses, here, None, token_weight, "none", None),
            found.lse if lse else None,
            entropy(found) if want_entropy else None,
            found.argmax if argmax else None,
        )

    def logprob_chunked(x, weight, bias, target, here, temperature, softcap, fp32, chunk_size):
        # z / t = (c / t) tanh((logits / t) / (c / t)): a temperature divides the logits and the
        # cap.
        fp32 |= LEARNS * wanted(weight)[0]
        found = Stats(
            *statistics_op(
                x.contiguous(),
                weight,
                bias,
                target,
                None,
                softcap / temperature,
                1 / temperature,
                False,
                True,
                False,
                fp32,
                chunk_size,
                "",
            )
        )
        return _logprob(found, here)

    return SimpleNamespace(
        cross_entropy=cross_entropy_chunked,
        logprob=logprob_chunked,
        operators=(statistics_op, backward_op, fused_op),
    )


_loaded: dict[str, SimpleNamespace] = {}


def _chunked(name: str) -> SimpleNamespace:
    if name not in _loaded:
        _loaded[name] = _register(name, getattr(_softmax_stats, name)())
    return _loaded[name]


# ---- cases


def _atol(dtype, kwargs):
    """The contract's own, but for fp32_logits: the twin then rounds nothing between its inputs and
    its gradients, while a GEMM of 16-bit operands needs the gradient of the logits in 16 bits. That
    is half an eps of each of a row's terms, of which the largest weigh most. And in float32:
    products with another order of sums than ATen's are as precise (dW
    of eleven rows, AVX-512, 60 seeds: errors of 9.5e-7, the twin's 8.8e-7), but where the twin is
    lucky, twice its error is not enough (once in 60, by half an eps).
    """
    if dtype in (torch.float32, torch.float64):
        return 4 * torch.finfo(dtype).eps if dtype == torch.float32 else 1e-12
    return (2 if kwargs.get("fp32_logits") else 0.5) * torch.finfo(dtype).eps


def _logprob_atol(dtype, kwargs):
    """In float32: the entropy's gradient has the factor z - mean, which loses digits where the two
    are close, and in a
    case of five rows the twin may be lucky: the others are beyond twice its error by up to 13 eps
    (AVX2).
    """
    return 16 * torch.finfo(dtype).eps if dtype == torch.float32 else _atol(dtype, kwargs)


def _case(
    name,
    T,
    H,
    V,
    *,
    tags=cases.CONTRACT,
    logprob=False,
    bias=False,
    ignored="some",
    token_weight=False,
    class_weight=False,
    frozen=False,
    offset=0.0,
    **options,
):
    """offset: of the bias. x and weight are then multiples of 1/4 and 1/2, and few: all sums
    are exact in float32.
    """
    shape = T if isinstance(T, tuple) else (T,)
    rows = math.prod(shape)

    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        new = {"device": device, "dtype": dtype, "gen": g}
        kw = {
            "x": cases.randn(*shape, H, **new),
            "weight": cases.randn(V, H, scale=2 / math.sqrt(H), requires_grad=not frozen, **new),
            "target": torch.randint(V, shape, device=device, generator=g),
        }
        if ignored == "all":
            kw["target"].fill_(-100)
        elif ignored == "some":
            kw["target"].flatten()[1::3] = -100
        if offset:
            for t, steps in ((kw["x"], 4), (kw["weight"], 2)):
                t.detach().mul_(steps).round_().div_(steps)
            kw["bias"] = torch.full(
                (V,), cases.held(offset, dtype), device=device, dtype=dtype, requires_grad=True
            )
        if bias:
            kw["bias"] = cases.randn(V, requires_grad=not frozen, **new)
        if token_weight:
            kw["token_weight"] = cases.randn(
                *shape, device=device, dtype=torch.float32, gen=g, scale=0.5, shift=1.0
            )
        if class_weight:
            kw["class_weight"] = torch.rand(V, device=device, generator=g) + 0.5
        return {**kw, **options}

    def cost(itemsize):
        # x and weight in; in backward the same, and their gradients. A GEMM is 2 T H V: one, then
        # two.
        n, flops = (rows + V) * H * itemsize, 2 * rows * H * V
        return Cost(n, 2 * n, flops, (3 if logprob else 2) * flops)

    return Case(name, make, cost, tags)


def _timed(logprob=False):
    found = []
    for name in ("llama-3-8b", "qwen3-8b", "gemma-3-4b", "deepseek-v3"):
        m = cases.MODELS[name]
        options = {"softcap": 30.0} if name.startswith("gemma") else {}
        found.append(
            _case(
                name,
                8192,
                m.hidden,
                m.vocab,
                tags=cases.CUDA,
                ignored="none",
                logprob=logprob,
                **options,
            )
        )
    for name, H in (
        ("cpu-small", 512),
        ("qwen3-30b-a3b-32k", cases.MODELS["qwen3-30b-a3b"].hidden),
    ):
        found.append(_case(name, 256, H, 32768, tags=cases.CPU, ignored="none", logprob=logprob))
    return found


def _offsets(**options):
    """In float32, whatever x is: rounded to 16 bits, such logits would differ by whole numbers
    from truth's.
    """
    return [
        _case(
            f"offset_{offset:.0e}".replace("+0", ""),
            11,
            8,
            100,
            offset=offset,
            fp32_logits=True,
            **options,
        )
        for offset in (1e3, 1e4, 1e6)
    ]


def _all_cases():
    returns = {"return_lse": True, "return_entropy": True, "return_argmax": True}
    everything = {
        "bias": True,
        "label_smoothing": 0.1,
        "z_loss": 1e-2,
        "softcap": 5.0,
        "token_weight": True,
        "class_weight": True,
        "chunk_size": 4,
        **returns,
    }
    return (
        _case("ragged", (3, 7), 33, 203),
        _case("tiny", 5, 3, 7, chunk_size=2),
        _case("chunks", 11, 32, 100, chunk_size=4),
        _case("bias", 11, 32, 100, bias=True, chunk_size=4),
        _case("sum", 11, 32, 100, chunk_size=4, reduction="sum", ignored="none"),
        _case("frozen_weight", 11, 32, 100, chunk_size=4, bias=True, frozen=True),
        _case("all_ignored", 6, 32, 100, ignored="all", chunk_size=4, z_loss=1e-2),
        _case("no_rows", 0, 16, 64, bias=True),
        _case("none", (2, 5), 32, 100, reduction="none", bias=True, chunk_size=4),
        _case("bf16_sums", 11, 32, 100, chunk_size=6, accumulate="bf16", ignored="none"),
        _case("num_tokens", 11, 32, 100, chunk_size=4, num_tokens=17, token_weight=True),
        _case("smoothing", 11, 32, 100, chunk_size=4, label_smoothing=0.2, class_weight=True),
        _case("softcap", 11, 32, 100, chunk_size=4, softcap=5.0),
        _case("everything", (2, 5), 32, 300, **everything),
        _case("fp32_logits", 11, 32, 100, chunk_size=4, bias=True, fp32_logits=True),
        _case("everything_none", (2, 5), 32, 300, reduction="none", **everything),
        *_offsets(chunk_size=4, label_smoothing=0.1),
        *_timed(),
    )


def _logprob_cases():
    return (
        _case("ragged", (3, 7), 33, 203, logprob=True),
        _case("tiny", 5, 3, 7, chunk_size=2, logprob=True),
        _case("all_ignored", 6, 32, 100, ignored="all", chunk_size=4, logprob=True),
        _case("no_rows", 0, 16, 64, logprob=True),
        _case(
            "everything",
            (2, 5),
            32,
            300,
            chunk_size=4,
            bias=True,
            temperature=0.7,
            softcap=5.0,
            logprob=True,
        ),
        _case(
            "fp32_logits",
            11,
            32,
            100,
            chunk_size=4,
            bias=True,
            temperature=0.7,
            fp32_logits=True,
            logprob=True,
        ),
        *_offsets(chunk_size=4, temperature=0.5, logprob=True),
        *_timed(logprob=True),
    )


def _implementations(which: str) -> tuple[Implementation, ...]:
    return (
        Implementation(
            "triton",
            lambda: getattr(_chunked("triton"), which),
            platform.no_triton,
            tunables=lambda: (CHUNK,),
        ),
        Implementation(
            "cpp",
            lambda: getattr(_chunked("cpp"), which),
            platform.no_cpp,
            ("cpu",),
            (torch.float32, torch.bfloat16),
            tunables=lambda: (CHUNK,),
        ),
    )


LINEAR_CROSS_ENTROPY = Op(
    "linear_cross_entropy",
    linear_cross_entropy,
    linear_cross_entropy_eager,
    (
        *_implementations("cross_entropy"),
        Implementation(
            "torch", lambda: linear_cross_entropy_torch, _no_torch, (), (torch.float32,)
        ),
    ),
    _all_cases(),
    _atol,
    # 42 ms is 78 % of what its 6 T H V flops take at an H200's 790 TFLOP/s. One chunk of logits,
    # 2,004 MiB, beside the gradients of x and weight, 64 and 1,002 MiB; and a tenth for what the
    # allocator rounds.
    goals=(
        Goal(
            "H200",
            "forward_backward",
            "median_ms",
            at_most=42,
            cases=("llama-3-8b",),
            dtypes=("bfloat16",),
        ),
        Goal(
            cases.DATACENTER,
            "forward_backward",
            "matmul_percent",
            at_least=78,
            cases=("llama-3-8b",),
            dtypes=("bfloat16",),
        ),
        Goal(
            cases.DATACENTER,
            "forward_backward",
            "peak_mib",
            at_most=3400,
            cases=("llama-3-8b",),
            dtypes=("bfloat16",),
        ),
    ),
)
LINEAR_LOGPROB = Op(
    "linear_logprob",
    linear_logprob,
    linear_logprob_eager,
    _implementations("logprob"),
    _logprob_cases(),
    atol=_logprob_atol,
)
