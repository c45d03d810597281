"""The statistics of a language model's head, without materializing its logits:

    logits = x weight^T + bias + low up^T          (low = scale * x A^T, up = B: an adapter)

T = tokens, H = hidden width, V = vocabulary, r = rank of the adapter. The logits of some rows are
allocated at a time: GEMM, statistics kernel, next rows. Every kind of loss on the head is computed
from the statistics (`softmax_stats.py`), which are differentiable: backward recomputes the logits,
8 T H V flops in total. Where a loss is a sum over rows, its gradients can be computed in forward
(`linear_cross_entropy.py`): 6 T H V.

The chunk size in rows (`chunk_rows`) follows from shapes and dtypes alone, so that it, and with it
the bits, are the same in every run, on every rank, and in a captured CUDA graph. n chunks need T V
s / n bytes of logits at a time (s: bytes per logit), and from the second on 4 V H bytes, in which
the gradient of a bfloat16 weight is summed. There is one chunk if that needs no more memory than
the chunks of a fixed budget (on a GPU 1 GiB, on a CPU 64 MiB, or a tuned one for this H and V).
Chunks of a budget have budget / (V s) rows, rounded down to a multiple of 128 (CPU: 32) but at
least one such tile, balanced over the smallest number of chunks that cover T.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tilewright.core import checks
from tilewright.core.library import Operator, declare
from tilewright.core.registry import Case, Judged, Op, in_cpp, in_triton
from tilewright.core.torch_names import HAS_OUT_DTYPE, FakeTensor, ProcessGroup
from tilewright.kernels.loss.operators import (
    Scaling,
    Softmax,
    Stats,
    StatsGradients,
    Wanted,
    empty_statistics,
)
from tilewright.kernels.tuning import Tunable
from tilewright.ops import products
from tilewright.ops.loss import softmax_stats
from tilewright.ops.loss.head_cases import atol
from tilewright.ops.loss.softmax_stats import (
    Group,
    reshaped,
    stats_eager,
    without_gradient,
)
from tilewright.ops.loss.targets import TARGET, presence
from tilewright.ops.loss.vocabulary import world_size

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
ACCUMULATE = ("fp32", "bf16")

# Declarations (core.takes) of a head and its targets, and of what some losses on it take.
HEAD = {"x": "float [*T, H]", "weight": "x [V, H]", "target": TARGET}
SIZES = "H >= 1", "V >= 1"
HEAD_OPTIONS = {
    "bias": "x [V]",
    "fp32_logits": "bool",
    "chunk_size": "int [1, 2**63)",
}
ADAPTER = {"lora_A": "x [rank, H]", "lora_B": "x [V, r]", "lora_scale": "number"}
RANKS = "rank >= 1", "r == rank"


class HeadOptions(NamedTuple):
    """Options of a language model's head, as in `linear_logprob`."""

    bias: torch.Tensor | None = None
    lora_A: torch.Tensor | None = None
    lora_B: torch.Tensor | None = None
    lora_scale: float = 1.0
    temperature: float = 1.0
    softcap: float | None = None
    ignore_index: int = -100
    fp32_logits: bool = False
    chunk_size: int | None = None
    group: ProcessGroup | None = None


class Head(NamedTuple):
    """x: [T, H].   weight: [V, H], or this rank's shard of the vocabulary, as bias [V] and up are.
    low, up: [T, r] and [V, r], whose product is added to the logits.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    low: torch.Tensor | None = None
    up: torch.Tensor | None = None


class Plan(NamedTuple):
    """How the logits are computed.

    fp32_sums: sums over chunks of the gradients of weight and bias are float32 although the weight
        is not.
    fp32_logits: so are the logits.
    learns: whether weight gets a gradient at all, on which the chunks depend. Backward must use the
        chunks of forward, whose logits it recomputes.
    chunk_size: rows per chunk; None for the rule.
    """

    fp32_sums: bool = False
    fp32_logits: bool = False
    learns: bool = False
    chunk_size: int | None = None


class Needs(NamedTuple):
    """Which parts of a head get a gradient."""

    need_x: bool
    need_weight: bool
    need_bias: bool = False
    need_low: bool = False
    need_up: bool = False


class HeadGradients(NamedTuple):
    """Gradients of the parts of a head; None for a part that gets none."""

    dx: torch.Tensor | None
    dweight: torch.Tensor | None
    dbias: torch.Tensor | None
    dlow: torch.Tensor | None = None
    dup: torch.Tensor | None = None


def low_rank(
    x: torch.Tensor, A: torch.Tensor | None, B: torch.Tensor | None, scale: float
) -> torch.Tensor | None:
    """scale * x A^T [T, r], or None without an adapter. Raises ValueError for half of one."""
    if A is None and B is None:
        return None
    if A is None or B is None:
        missing = "lora_A" if A is None else "lora_B"
        raise ValueError(f"{missing} must be given with the other factor, got None")
    with checks.no_autocast(x):
        return F.linear(x.reshape(-1, x.shape[-1]), A) * scale


class _Replicated(torch.autograd.Function):
    """x, replicated over the group: its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None


def replicated(x: torch.Tensor, group: Group) -> torch.Tensor:
    """x, whose gradient is summed over the ranks that shard the vocabulary. Raises ValueError under
    torch.compile.
    """
    if group is None:
        return x
    if torch.compiler.is_compiling():
        raise ValueError(
            "group is refused under torch.compile, which does not see the loop over chunks and "
            "their all-reduces; leave the sharded loss outside the compiled region"
        )
    return _Replicated.apply(x, group)


# ---- the definition


def logits_eager(head: Head, fp32_logits: bool) -> torch.Tensor:
    """[T, V], in float32 or wider if `fp32_logits`."""
    if fp32_logits:
        acc = torch.promote_types(head.x.dtype, torch.float32)
        head = Head._make(None if t is None else t.to(acc) for t in head)
    logits = F.linear(head.x, head.weight, head.bias)
    if head.low is None or head.up is None:
        return logits
    return logits + F.linear(head.low, head.up)


# ---- chunks of rows


def chunk_rows(x: torch.Tensor, weight: torch.Tensor, plan: Plan = Plan()) -> int:  # noqa: B008
    """Rows of x [T, H] per chunk, at least 1; weight: [V, H], this rank's. The module's docstring
    has the rule.
    """
    (T, H), V, chunk_size = x.shape, weight.shape[0], plan.chunk_size
    if chunk_size is None:
        cuda, size = x.device.type == "cuda", x.element_size()
        tile = 128 if cuda else 32
        # Float32 logits need their gradient in x's dtype beside them.
        logit = size if size >= 4 or not plan.fp32_logits else 4 + size
        config = CHUNK.config(x.device, H, V, size, cuda)
        budget = config["budget_mib"] * MiB
        chunk_size = max(budget // (V * logit) // tile, 1) * tile
        chunks = max(-(-T // chunk_size), 1)
        # float16 accumulates in float32 anyway: see `summed_dtype`.
        summed = plan.fp32_sums and plan.learns and weight.dtype == torch.bfloat16
        sums = 4 * V * H if summed else 0
        if config.get("whole", True) and T * V * logit <= T * V * logit / chunks + sums:
            chunks = 1
        chunk_size = -(-T // chunks // tile) * tile
    return max(min(chunk_size, T), 1)


class Sums:
    """The gradients of the factors of scale * x weight^T + bias, accumulated chunk by chunk."""

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        chunk: int,
        fp32_sums: bool,
        scale: float,
        need_x: bool,
        need_w: bool,
        need_b: bool = False,
    ):
        V, H = weight.shape
        chunks = -(-x.shape[0] // chunk)
        # A single chunk is summed inside the GEMM, in float32.
        acc = torch.float32 if fp32_sums and chunks > 1 else summed_dtype(weight.dtype, fp32_sums)
        self.x, self.weight, self.scale, self.chunks = x, weight, scale, chunks
        self.fp32_sums = fp32_sums
        self.dx = x.new_empty(x.shape) if need_x else None
        self.dw = None
        if need_w:
            self.dw = products.huge_pages_(weight.new_empty((V, H), dtype=acc))
        wide = torch.float32 if fp32_sums else weight.dtype
        self.db = weight.new_zeros(V, dtype=wide) if need_b else None
        self.wide = None  # a block of the logits' gradient and the chunk's x, in float32
        if (
            need_w
            and acc != x.dtype
            and not (x.is_cuda and HAS_OUT_DTYPE)
            and not products.multiplies(x)
        ):
            columns = min(max(BLOCK_BYTES // (4 * chunk), 64), V)
            self.wide = x.new_empty((chunk, columns), dtype=acc), x.new_empty((chunk, H), dtype=acc)

    def add(self, rows: slice, dlogits: torch.Tensor) -> None:
        x, first = self.x[rows], rows.start == 0
        dx, dw, db, dlogits = self.dx, self.dw, self.db, dlogits.to(x.dtype)
        if dx is not None:
            products.gemm_(dx[rows], dlogits, self.weight, scale=self.scale)
        if db is not None:
            db += dlogits.sum(0, dtype=db.dtype) * self.scale
        if dw is None:
            return
        if dw.dtype == x.dtype or products.multiplies(x):
            products.gemm_(dw, dlogits.t(), x, add=not first, scale=self.scale)
        elif self.wide is None:
            # Nothing is computed on fake tensors, and PyTorch 2.11's addmm fails on them with an
            # out_dtype.
            if not (dw.is_meta or isinstance(dw, FakeTensor)):
                options = {"beta": 0 if first else 1, "alpha": self.scale}
                torch.addmm(dw, dlogits.t(), x, out_dtype=torch.float32, **options, out=dw)
        else:
            n = x.shape[0]
            wide, x = self.wide[0][:n], self.wide[1][:n].copy_(x)
            for v in range(0, dlogits.shape[1], wide.shape[1]):
                part = dlogits[:, v : v + wide.shape[1]]
                part = wide[:, : part.shape[1]].copy_(part)
                block = dw[v : v + part.shape[1]]
                products.gemm_(block, part.t(), x, add=not first, scale=self.scale)

    def done(self, wide: bool) -> tuple[torch.Tensor | None, ...]:
        """dx, dw, db, in the inputs' dtype; the last two in `summed_dtype` if wide."""
        if self.chunks == 0 and self.dw is not None:
            self.dw.zero_()
        dtype = summed_dtype(self.weight.dtype, self.fp32_sums) if wide else self.weight.dtype
        return self.dx, *(None if t is None else t.to(dtype) for t in (self.dw, self.db))


def summed_dtype(dtype: torch.dtype, fp32_sums: bool) -> torch.dtype:
    """The dtype in which the gradient of the sum of losses is saved for backward, for a weight of
    this dtype. It is not yet divided by the number of tokens, so it could overflow in float16.
    """
    return torch.float32 if fp32_sums and dtype == torch.float16 else dtype


def _wide_logits(logits, x, weight, bias, scale):
    """logits = scale * (x weight^T + bias) in float32, from 16-bit operands."""
    if x.is_cuda and HAS_OUT_DTYPE:
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=logits)
    elif products.multiplies(x):
        products.gemm_(logits, x, weight.t())
    else:  # a block of the weight at a time
        x, step = x.float(), max(BLOCK_BYTES // (4 * max(weight.shape[1], 1)), 64)
        for v in range(0, weight.shape[0], step):
            torch.mm(x, weight[v : v + step].float().t(), out=logits[:, v : v + step])
    if bias is not None:
        logits += bias
    if scale != 1.0:
        logits *= scale


class Chunks:
    """The chunks of a head's rows: iterating yields rows, and their logits times `scale` in a
    buffer that the next chunk overwrites. `add` and `gradients` sum up the gradients.
    """

    def __init__(self, head: Head, plan: Plan, scale: float = 1.0, needs: Needs | None = None):
        x, weight, _, low, up = head
        self.head, self.plan, self.scale = head, plan, scale
        self.rows = chunk_rows(x, weight, plan)
        self.needed = needs is not None and any(needs)
        self._sums: list[Sums] = []
        if needs is not None:
            options = self.rows, plan.fp32_sums, scale
            self._sums = [Sums(x, weight, *options, *needs[:3])]
            if low is not None and up is not None:
                self._sums.append(Sums(low, up, *options, *needs[3:]))

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor]]:
        x, weight, bias, low, up = self.head
        T, scale = x.shape[0], self.scale
        wide = self.plan.fp32_logits and x.dtype != torch.float32
        shape = min(self.rows, T), weight.shape[0]
        buffer = x.new_empty(shape, dtype=torch.float32 if wide else x.dtype)
        for start in range(0, T, self.rows):
            rows = slice(start, min(start + self.rows, T))
            logits = buffer[: rows.stop - start]
            if wide:
                _wide_logits(logits, x[rows], weight, bias, scale)
            elif bias is not None:
                torch.addmm(bias, x[rows], weight.t(), beta=scale, alpha=scale, out=logits)
            else:
                products.gemm_(logits, x[rows], weight.t(), scale=scale)
            if low is not None and up is not None:
                here, by = low[rows], up.t()
                if wide and not products.multiplies(here):
                    here, by = here.float(), by.float()
                products.gemm_(logits, here, by, add=True, scale=scale)
            yield rows, logits

    def add(self, rows: slice, dlogits: torch.Tensor) -> None:
        """dlogits: the gradient of these rows' logits."""
        for factor in self._sums:
            factor.add(rows, dlogits)

    def gradients(self, wide: bool = False) -> HeadGradients:
        """wide: returns the gradients of weight and bias in `summed_dtype`."""
        base, *of_adapter = (factor.done(wide) for factor in self._sums)
        return HeadGradients(*base, *(of_adapter[0][:2] if of_adapter else ()))


def joined(parts: list[Stats], x: torch.Tensor, wanted: Wanted) -> Stats:
    """Statistics of all rows of x, from those of its chunks."""
    if len(parts) < 2:
        return parts[0] if parts else empty_statistics(x, wanted)
    columns = zip(*parts, strict=True)
    return Stats._make(None if pieces[0] is None else torch.cat(pieces) for pieces in columns)


# ---- the statistics as an operator


@declare
def head_statistics(
    head: Head,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    scaling: Scaling,
    wanted: Wanted,
    plan: Plan,
    group: ProcessGroup | None,
) -> Stats:
    """Differentiable in each statistic.   target: [T] int64.   class_weight: [V] float32, read for
    `weighted`.
    """
    return empty_statistics(head.x, wanted)


@declare
def head_statistics_backward(
    head: Head,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    scaling: Scaling,
    softmax: Softmax,
    gradients: StatsGradients,
    plan: Plan,
    needs: Needs,
    group: ProcessGroup | None,
) -> HeadGradients:
    return HeadGradients._make(
        None if t is None or not need else t.new_empty(t.shape)
        for t, need in zip(head, needs, strict=True)
    )


@head_statistics.formula(constants=("peak", "argmax"), **softmax_stats.OF_STATISTICS)
def _backward(op, g, head, target, weights, scaling, softmax, plan, group, needs):
    gradients = StatsGradients(
        *(None if t is None else t.contiguous() for t in (g.log_sum, g.picked, g.weighted, g.mean))
    )
    if all(t is None for t in gradients):
        return {}
    needed = Needs(*(needs[name] for name in Head._fields))
    of_head = op(head, target, weights, scaling, softmax, gradients, plan, needed, group)
    return dict(zip(Head._fields, of_head, strict=True))


def _launch(kernels, head, target, class_weight, scaling, wanted, plan, group):
    # The GEMM divides by the temperature.
    capped = Scaling(scaling.cap)
    parts = [
        kernels.of_rows(logits, target[rows], class_weight, capped, wanted, group)
        for rows, logits in Chunks(head, plan, 1 / scaling.temperature)
    ]
    return joined(parts, head.x, wanted)


def _launch_backward(
    kernels, head, target, class_weight, scaling, softmax, gradients, plan, needs, group
):
    chunks = Chunks(head, plan, 1 / scaling.temperature, needs)
    for rows, logits in chunks:
        of_rows = Softmax._make(None if t is None else t[rows] for t in softmax)
        g = StatsGradients._make(None if t is None else t[rows] for t in gradients)
        where = logits, target[rows], class_weight, Scaling(scaling.cap)
        chunks.add(rows, kernels.gradient(*where, of_rows, g, group, inplace=True))
    return chunks.gradients()


@functools.cache
def operator(name: str) -> Operator:
    """`head_statistics` on the kernels of this name."""
    kernels = softmax_stats.kernels(name)
    backward = head_statistics_backward.define(
        f"linear_stats_{name}_backward", functools.partial(_launch_backward, kernels)
    )
    launch = functools.partial(_launch, kernels)
    return head_statistics.define(f"linear_stats_{name}_forward", launch, backward)


def statistics_of(name: str) -> Callable:
    """The statistics of a head, by "eager" or by the kernels of this name: (head, target, valid,
    class_weight, scaling, wanted, plan, group) -> Stats, as `head_statistics`.

    valid: [T], 0 for rows that the loss ignores, whose gradient in their statistics must be 0.
    """

    def eager(head, target, valid, class_weight, scaling, wanted, plan, group):
        logits = without_gradient(logits_eager(head, plan.fp32_logits), valid == 0)
        return stats_eager(logits, target, class_weight, scaling, wanted, group)

    if name == "eager":
        return eager
    launch = operator(name)

    def fused(head, target, valid, class_weight, scaling, wanted, plan, group):
        head = head._replace(x=head.x.contiguous())
        plan = plan._replace(learns=torch.is_grad_enabled() and head.weight.requires_grad)
        class_weight = class_weight if wanted.weighted else None
        return launch(head, target.contiguous(), class_weight, scaling, wanted, plan, group)

    return fused


# ---- a kind of loss on the head


class HeadRows(NamedTuple):
    """A head and its targets, as a kind of loss gets them.

    target: [T] int64.   valid: [T], see `targets.presence`.   shape: the results' shape.
    """

    head: Head
    target: torch.Tensor
    valid: torch.Tensor
    plan: Plan
    group: Group
    shape: torch.Size

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        adapter: tuple[torch.Tensor | None, torch.Tensor | None, float] = (None, None, 1.0),
        ignore_index: int = -100,
        fp32_logits: bool = False,
        chunk_size: int | None = None,
        group: Group = None,
    ) -> HeadRows:
        """Makes the rows from arguments as HEAD, HEAD_OPTIONS and ADAPTER declare them.   adapter:
        (A, B, scale); A and B are None without an adapter.
        """
        low = low_rank(x, *adapter)
        valid = presence(target, world_size(group) * weight.shape[0], ignore_index).reshape(-1)
        rows = replicated(x, group).reshape(-1, x.shape[-1])
        low = None if low is None else replicated(low, group)
        plan = Plan(True, fp32_logits, False, chunk_size)
        head = Head(rows, weight, bias, low, adapter[1])
        return cls(head, target.reshape(-1), valid, plan, group, x.shape[:-1])

    @classmethod
    def with_options(
        cls, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, o: HeadOptions
    ) -> HeadRows:
        return cls.of(
            x,
            weight,
            target,
            bias=o.bias,
            adapter=(o.lora_A, o.lora_B, o.lora_scale),
            ignore_index=o.ignore_index,
            fp32_logits=o.fp32_logits,
            chunk_size=o.chunk_size,
            group=o.group,
        )


# The default of an op on the head.
JUDGED = Judged(of_sums=True)


def head_op(
    name: str,
    public: Callable,
    kind: Callable,
    cases: tuple[Case, ...],
    judged: Judged = JUDGED,
    ignores: bool = False,
    **options: Any,
) -> Op:
    """The op of a kind of loss on the head, by the eager twin and by every fused implementation.

    public: picks one of them for x, and calls it under `checks.no_autocast` with HeadRows, Scaling,
        Wanted and the kind's own options. It gets a tuple of tensors in the shape of the targets.
    kind: (Stats, valid, the options) -> tensors [T] or None, in plain PyTorch, differentiable in
        the statistics.
    ignores: the kind itself gives ignored rows a gradient of 0 in their statistics, also in those
        that are infinite or NaN.
    """

    def on(implementation: str) -> Callable:
        statistics = statistics_of(implementation)

        def computed(of: HeadRows, scaling: Scaling, wanted: Wanted, *own) -> tuple:
            stats = statistics(
                of.head, of.target, of.valid, None, scaling, wanted, of.plan, of.group
            )
            if not ignores:  # 0 times the derivative of a loss there may be NaN
                ignored = of.valid == 0
                stats = Stats._make(
                    t
                    if t is None or t.dtype == torch.int64
                    else torch.where(ignored, t.detach(), t)
                    for t in stats
                )
            outputs = kind(stats, of.valid, *own)
            return tuple(reshaped(t, of.shape) for t in outputs if t is not None)

        return computed

    fused = (
        in_triton(lambda: on("triton"), tunables=lambda: (CHUNK,)),
        in_cpp(lambda: on("cpp"), tunables=lambda: (CHUNK,)),
    )
    options.setdefault("atol", atol)
    return Op(name, public, on("eager"), fused, cases, judged=judged, **options)
