"""One matrix product per expert for training, all three of whose products are in FP8 or FP4:
`grouped_gemm` with the roundings of `low_precision_linear`.

    y[r]  = Q(x)[r] Q(w[e(r)])^T       dx[r] = Q(dy)[r] Q(w[e(r)]^T)^T
    dw[e] = the sum over e's rows of Q(dy^T) Q(x^T)^T

R = rows, E = experts, K = columns of x, N = columns of y. Rows are sorted by expert, and expert e's
end at offsets[e]. Before they are rounded, rows are copied to where each expert's begin at a
multiple of 128, with zeros between: no block of a scale, and none of a transform, has rows of two
experts. P >= R is the number of these places, which does not depend on the values of offsets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from tilewright.core import checks
from tilewright.core.library import declare, define, from_kernels
from tilewright.core.registry import Case, Cost, Op, in_cpp, in_gluon, in_triton
from tilewright.core.takes import takes
from tilewright.ops import cases
from tilewright.ops.moe.grouped_gemm import contiguous_offsets
from tilewright.ops.quant import quantize
from tilewright.ops.quant.fp8_linear import no_fp8
from tilewright.ops.quant.low_precision_linear import (
    RECIPES,
    REQUESTS,
    Factor,
    Needs,
    Options,
    Result,
    Rounding,
    Saved,
    atol,
    gluon_refuses,
    requested,
    through,
    triton_refuses,
    unrounded,
    untuned,
    values,
)

BLOCK = 128  # rows of an expert begin at a multiple of it; a multiple of every recipe's blocks


@checks.autocast("products", "x", "weight")
@takes(
    "R < 2**31",
    "E >= 1",
    "x: K % 32 == 0 or not hadamard",
    "weight: N % 32 == 0 or not hadamard",
    x="float [R, K]",
    weight="x | float32 [E, N, K]",
    offsets="int32 [E]",
    recipe=RECIPES,
    seed=quantize.SEED,
    hadamard="bool",
    check_finite="bool",
)
def low_precision_grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    *,
    recipe: str = "block_fp8",
    seed: int = 0,
    hadamard: bool = False,
    check_finite: bool = True,
    implementation: str = "auto",
) -> torch.Tensor:
    """`grouped_gemm` for training in FP8 or FP4:
    y[r] = Q(weight[e]) @ Q(x)[r] for offsets[e - 1] <= r < offsets[e], and 0 from offsets[-1] on;
    the gradients of x and weight are products in FP8 or FP4 too.

    Q rounds as in `low_precision_linear` with the same recipe and hadamard, each expert's rows and
    each expert's weight in blocks of their own. With nvfp4 the scale of a tensor is one for all
    experts. With hadamard N and K must be multiples of 32.

    Differentiable in x and weight, once (eager: any number of times, and in x alone by torch.func),
    ignoring roundings; the gradient of an expert without rows is 0. Saved for backward: x^T in
    codes and scales, 1.03 bytes (nvfp4: 0.56) for each of P K elements, where P is less than
    R + 128 (E + 1), if weight requires a gradient; weight itself, which is rounded again, and
    offsets (eager: x, weight and offsets). x and dy are copied once more than in
    `low_precision_linear`, to P rows. Deterministic. Sums accumulate in float32 and are rounded
    once; FP8 tensor cores of compute capability 9.0 sum 128 products with fewer bits.

    Args:
        x: [R, K] fp32 | bf16 | fp16 (fp64 with eager), any strides; finite, as are weight, dy and
            their transforms (see check_finite), but for the rows from offsets[-1] on, which are not
            read.
        weight: [E, N, K] in x's dtype or float32, from which it is rounded directly; E > 0.
        offsets: [E] int32 on x's device: the end of each expert's rows, non-decreasing, within 0
            and R.
        recipe: "block_fp8", "mxfp8" or "nvfp4".
        seed: with nvfp4, the seed of the stochastic rounding and of the transform's signs, as in
            `low_precision_linear`; other recipes take 0.
        hadamard: transforms what is rounded, with block_fp8 and mxfp8, as in
            `low_precision_linear`; nvfp4 takes False.
        check_finite: on a CPU, raises ValueError for an infinity or a NaN in x, weight or dy. With
            False, and on CUDA, values are not checked, with results as in `low_precision_linear`;
            with nvfp4 the tail and the gradient of an expert without rows may be NaN too.
        implementation: "auto", or one of triton, cpp, eager. triton has block_fp8 from compute
            capability 9.0 on, and mxfp8 and nvfp4 from 10.0 on.

    Returns:
        [R, N], contiguous, in x's dtype. Gradients have the dtypes of x and weight.

    Raises:
        TypeError, ValueError: Invalid arguments (the values of offsets are not checked on CUDA:
            they are clamped to the rules); on a CPU with check_finite, x, weight or the gradient of
            y is not finite.
        ImplementationUnavailable: A named implementation that cannot run here, or does not have
            this recipe here.

    Example:
        >>> from tilewright.ops import low_precision_grouped_gemm
        >>> x, weight = torch.ones(3, 2), torch.ones(2, 4, 2)
        >>> low_precision_grouped_gemm(x, weight, torch.tensor([1, 3], dtype=torch.int32))[2]
        tensor([2., 2., 2., 2.])

    Source: as `low_precision_linear`; experts aligned to blocks as in DeepSeek-V3's grouped
    products (arXiv:2412.19437, section 3.3).
    """
    quantize.on_device("x", x)
    request = requested(x, recipe, seed, hadamard)
    offsets = contiguous_offsets(offsets, x.shape[0])
    run = LOW_PRECISION_GROUPED_GEMM.pick(implementation, x, request)
    keep = torch.is_grad_enabled() and weight.requires_grad
    options = Options(recipe, seed, keep, hadamard, check_finite)
    return run(x, weight, offsets, options)


# ---- where rows lie


def places(rows: int, experts: int) -> int:
    """P, enough for any offsets: each expert may add up to 127, and so may the tail."""
    return (rows + (BLOCK - 1) * (experts + 1)) // BLOCK * BLOCK


class Placed(NamedTuple):
    """ends [E]: the end of each expert's places.   expert [P / 128]: the expert of each block of
    places; E for the tail, and E + 1 for none.   row [P]: the row at each place, the tail's too; -1
    for none.   source [P]: the same, but -1 for the tail.   place [R]: the place of each row; -1
    for the tail.
    """

    ends: torch.Tensor
    expert: torch.Tensor
    row: torch.Tensor
    source: torch.Tensor
    place: torch.Tensor

    @classmethod
    def of(cls, offsets: torch.Tensor, rows: int) -> Placed:
        E, device = offsets.shape[0], offsets.device
        stops = offsets.long().clamp(0, rows).cummax(0).values
        stops = torch.cat((stops, stops.new_full((1,), rows)))
        starts = torch.cat((stops.new_zeros(1), stops[:-1]))
        ends = ((stops - starts + BLOCK - 1) // BLOCK * BLOCK).cumsum(0)
        begins = torch.cat((ends.new_zeros(1), ends[:-1]))
        at = torch.arange(places(rows, E), device=device)
        expert = torch.searchsorted(ends, at, right=True)
        e = expert.clamp_max(E)
        row = at - begins[e] + starts[e]
        row = torch.where((expert <= E) & (row < stops[e]), row, -1)
        r = torch.arange(rows, device=device)
        e = torch.searchsorted(stops, r, right=True)
        place = torch.where(e < E, r - starts[e] + begins[e], -1)
        return cls(ends[:E], expert[::BLOCK], row, torch.where(expert < E, row, -1), place)

    def spread(self, t: torch.Tensor) -> torch.Tensor:
        """Rows [R, C] at their places [P, C], with zeros elsewhere."""
        return _take(t, self.source)

    def collect(self, t: torch.Tensor) -> torch.Tensor:
        """The inverse; the tail is 0."""
        return _take(t, self.place)


def _take(t: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of t, and zeros for -1."""
    if 0 in (t.shape[0], index.shape[0]):
        return t.new_zeros(index.shape[0], t.shape[1])
    return torch.where((index >= 0)[:, None], t[index.clamp_min(0)], 0)


def _rows_of(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    parts, begin = [], 0
    for one, end in zip(w, ends.tolist(), strict=True):
        parts.append(x[begin:end] @ one.mT)
        begin = end
    parts.append(x.new_zeros(x.shape[0] - begin, w.shape[1]))
    return torch.cat(parts)


def _sums_of(dy: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    parts, begin = [], 0
    for end in ends.tolist():
        parts.append(dy[:, begin:end] @ x[:, begin:end].mT)
        begin = end
    return torch.stack(parts)


# Operators for compiled code: in an autograd.Function Dynamo takes no sizes that come from values.
_rows_operator = define(
    "low_precision_rows_of_experts",
    _rows_of,
    lambda x, w, ends: x.new_empty(x.shape[0], w.shape[1]),
)
_sums_operator = define(
    "low_precision_sums_of_experts",
    _sums_of,
    lambda dy, x, ends: x.new_empty(ends.shape[0], dy.shape[0], x.shape[0]),
)


def _by_expert(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [P, K] times w [E, N, K], whose rows end there."""
    return (_rows_operator if torch.compiler.is_dynamo_compiling() else _rows_of)(x, w, ends)


def _sums_by_expert(dy: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """dy [N, P] times x [K, P], summed over each expert's places."""
    return (_sums_operator if torch.compiler.is_dynamo_compiling() else _sums_of)(dy, x, ends)


# ---- the definition


class _Grouped(torch.autograd.Function):
    """Q(x) Q(w)^T of each expert, whose gradients are products of the same kind."""

    generate_vmap_rule = True  # for torch.func, as is the separate setup_context

    @staticmethod
    def forward(x, weight, offsets, options):
        placed = Placed.of(offsets, x.shape[0])
        x, weight = _forward_factors(x, weight, placed, options)
        return placed.collect(_by_expert(x, weight, placed.ends))

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, offsets, ctx.options = inputs
        ctx.save_for_backward(x, weight, offsets)
        ctx.save_for_forward(x, weight, offsets)

    @staticmethod
    def backward(ctx, dy):
        x, weight, offsets = ctx.saved_tensors
        with checks.no_autocast(dy):
            placed = Placed.of(offsets, x.shape[0])
            dx, dw = _gradients_eager(x, weight, dy, placed, ctx.options)
        return dx, dw, None, None


class _WithTangents(_Grouped):
    """`_Grouped` with a forward-mode derivative, which Dynamo does not trace."""

    @staticmethod
    def jvp(ctx, dx, dw, *_):
        x, weight, offsets = ctx.saved_tensors
        placed = Placed.of(offsets, x.shape[0])
        dx = torch.zeros_like(x) if dx is None else dx
        dw = torch.zeros_like(weight) if dw is None else dw
        x, weight = _forward_factors(x, weight, placed, ctx.options)
        dx, dw = (unrounded(t, ctx.options, x.dtype) for t in (placed.spread(dx), dw))
        tangent = _by_expert(dx, weight, placed.ends) + _by_expert(x, dw, placed.ends)
        return placed.collect(tangent)


def _forward_factors(x, weight, placed, options):
    """The values of Q(x), at their places, and of Q(weight)."""
    acc, recipe = torch.promote_types(x.dtype, torch.float32), options.recipe
    x, _ = Rounding("eager", options, "x").both(placed.spread(x), transpose=False)
    rounding = Rounding("eager", options, "weight", square=True)
    weight, _ = rounding.both(weight, transpose=False)
    return values(x, recipe, "eager", acc), values(weight, recipe, "eager", acc)


def _gradients_eager(x, weight, dy, placed, options):
    """dx and dw; to autograd, a rounded tensor is the tensor itself."""
    acc, of_x = dy.dtype, x.dtype
    x, dy = placed.spread(x), placed.spread(dy)
    dys = Rounding("eager", options, "the gradient of y", random=True).both(dy, transpose=True)
    x_turned = Rounding("eager", options, "x").turned(x)
    w_turned = Rounding("eager", options, "weight", square=True).turned(weight)

    def straight(t, factor, tokens=False):
        exact = unrounded(t, options, acc, tokens=tokens)
        return through(exact, values(factor, options.recipe, "eager", acc))

    dx = _by_expert(straight(dy, dys[0]), straight(weight.mT, w_turned), placed.ends)
    factors = straight(dy.mT, dys[1], True), straight(x.mT, x_turned, True)
    dw = _sums_by_expert(*factors, placed.ends)
    return placed.collect(dx).to(of_x), dw.to(weight.dtype)


def low_precision_grouped_gemm_eager(x, weight, offsets, options):
    function = _Grouped if torch.compiler.is_dynamo_compiling() else _WithTangents
    return function.apply(x, weight, offsets, options).to(x.dtype)


# ---- fused implementations: an operator, and one for its gradients


class Gradients(NamedTuple):
    """The gradients that are needed."""

    x: torch.Tensor | None
    weight: torch.Tensor | None


@declare
def product(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, options: Options
) -> Result:
    """x [R, K], weight [E, N, K]. x^T is kept with its columns at their places."""
    (R, K), (E, N, _) = x.shape, weight.shape
    y, P = x.new_empty((R, N)), places(R, E)
    if not options.keep:
        return Result(y, None, None, None)
    packed, span = {"block_fp8": (1, 128), "mxfp8": (1, 32), "nvfp4": (2, 16)}[options.recipe]
    fp32, total = options.recipe == "block_fp8", None
    if options.recipe == "nvfp4":
        total = x.new_empty((), dtype=torch.float32)
    data = x.new_empty((K, P // packed), dtype=torch.uint8)
    scale = x.new_empty((K, P // span), dtype=torch.float32 if fp32 else torch.uint8)
    return Result(y, data, scale, total)


@declare
def gradients(
    dy: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    turned: Saved,
    options: Options,
    needs: Needs,
) -> Gradients:
    """dy [R, N], weight [E, N, K]."""
    dx = dy.new_empty((dy.shape[0], weight.shape[2])) if needs.dx else None
    dw = weight.new_empty(weight.shape) if needs.dw else None
    return Gradients(dx, dw)


@product.formula(constants=("scale", "total"), turned=Saved)
def _backward(op, g, weight, offsets, turned, options, needs):
    needed = Needs(needs["x"], needs["weight"])
    return op(g.y, weight, offsets, turned, options, needed)._asdict()


class _Fused:
    """One implementation: its operators, and their caller.

    place: (t [R, C], offsets) -> t at its places [P, C], and what `rows` and `sums` take as placed.
    rows: (factor [P, K], factor [E, N, K], placed, options, dtype) -> [R, N].
    sums: (factor [N, P], factor [K, P], placed, options, dtype) -> [E, N, K].
    rounds: the implementation that rounds the factors; None: the one of this name.
    """

    def __init__(
        self,
        name: str,
        place: Callable,
        rows: Callable,
        sums: Callable,
        rounds: str | None = None,
    ):
        self.rounds, self.place, self.rows, self.sums = rounds or name, place, rows, sums
        op = f"low_precision_grouped_gemm_{name}"
        backward = gradients.define(f"{op}_backward", self.backward)
        self.product = product.define(f"{op}_forward", self.forward, backward)

    def forward(self, x, weight, offsets, options):
        x_placed, placed = self.place(x, offsets)
        rounding = Rounding(self.rounds, options, "x")
        factor, turned = rounding.both(x_placed, transpose=options.keep)
        del x_placed  # as large as x: not held beside what follows
        rounding = Rounding(self.rounds, options, "weight", square=True)
        w_factor, _ = rounding.both(weight, transpose=False)
        y = self.rows(factor, w_factor, placed, options, x.dtype)
        return Result(y, *(turned[:3] if turned is not None else (None, None, None)))

    def backward(self, dy, weight, offsets, turned, options, needs):
        dy_placed, placed = self.place(dy, offsets)
        rounding = Rounding(self.rounds, options, "the gradient of y", random=True)
        factor, dy_turned = rounding.both(dy_placed, transpose=needs.dw)
        del dy_placed
        dx = dw = None
        if needs.dx:
            w_turned = Rounding(self.rounds, options, "weight", square=True).turned(weight)
            dx = self.rows(factor, w_turned, placed, options, dy.dtype)
        if dy_turned is not None:
            x_turned = Factor(turned.data, turned.scale, turned.total, 1, dy_turned.columns)
            dw = self.sums(dy_turned, x_turned, placed, options, weight.dtype)
        return Gradients(dx, dw)

    def grouped_gemm(self, x, weight, offsets, options):
        return self.product(x, weight, offsets, options).y


def _place_dense(t, offsets):
    placed = Placed.of(offsets, t.shape[0])
    return placed.spread(t), placed


def _rows_dense(name, a, b, placed, options, dtype):
    """The product by PyTorch in float32."""
    a, b = (values(t, options.recipe, name, torch.float32) for t in (a, b))
    with checks.no_autocast(a):
        return placed.collect(_by_expert(a, b, placed.ends)).to(dtype)


def _sums_dense(name, a, b, placed, options, dtype):
    a, b = (values(t, options.recipe, name, torch.float32) for t in (a, b))
    with checks.no_autocast(a):
        return _sums_by_expert(a, b, placed.ends).to(dtype)


def _place_triton(kernels, t, offsets):
    return kernels.place(t, offsets, places(t.shape[0], offsets.shape[0]))


def _rows_triton(kernels, a, b, placed, options, dtype):
    N = b.data.shape[1]
    shape, device = (placed.rows, N), a.data.device
    if a.data.numel() == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    out = torch.empty(shape, dtype=dtype, device=device)
    if out.numel():
        if options.recipe == "block_fp8":
            kernels.rows(a.data, a.scale, b.data, b.scale, placed.expert, placed.row, out)
        else:
            kernels.scaled_rows(*a[:3], *b[:3], placed.expert, placed.row, out)
    return out


def _sums_triton(kernels, a, b, placed, options, dtype):
    N, K, E = a.data.shape[0], b.data.shape[0], placed.ends.shape[0]
    if N * K == 0:
        return torch.empty((E, N, K), dtype=dtype, device=a.data.device)
    if options.recipe == "block_fp8":
        return kernels.weights(a.data, a.scale, b.data, b.scale, placed.ends, dtype)
    return kernels.scaled_weights(*a[:3], *b[:3], placed.ends, dtype)


@functools.cache
def _triton():
    from tilewright.kernels.quant import low_precision_grouped_triton as kernels

    return _Fused("triton", *_launching(kernels)).grouped_gemm


@functools.cache
def _gluon():
    from tilewright.kernels.quant import specialized

    return _Fused("gluon", *_launching(specialized.experts), "triton").grouped_gemm


def _launching(kernels) -> tuple[Callable, Callable, Callable]:
    place, rows, sums = (
        functools.partial(f, kernels) for f in (_place_triton, _rows_triton, _sums_triton)
    )
    return place, rows, sums


@functools.cache
def _cpp():
    rows, sums = (functools.partial(f, "cpp") for f in (_rows_dense, _sums_dense))
    return _Fused("cpp", _place_dense, rows, sums).grouped_gemm


# ---- cases


def _case(recipe, name, counts, N, K, tail=0, tags=cases.CONTRACT, **given):
    """counts: rows of each expert.   tail: rows after them, which are NaN."""
    R, E = sum(counts) + tail, len(counts)

    def make(device, dtype, seed):
        new = {"device": device, "gen": cases.generator(device, seed)}
        x = cases.randn(R, K, dtype=dtype, requires_grad=False, **new)
        x[R - tail :] = float("nan")
        wide = torch.float32 if given.get("wide") else dtype
        weight = cases.randn(E, N, K, dtype=wide, scale=max(K, 1) ** -0.5, **new)
        ends = torch.tensor(counts).cumsum(0)
        offsets = ends.to(device, torch.int32)
        arguments = {"x": x.requires_grad_(), "weight": weight, "offsets": offsets}
        more = {name: given[name] for name in ("seed", "hadamard") if name in given}
        return {**arguments, "recipe": recipe, **more}

    def cost(itemsize):
        moved, flops = itemsize * (R * (N + K) + E * N * K), 2 * R * N * K
        return Cost(moved, 2 * moved, flops, 2 * flops)

    return Case(f"{recipe} {name}", make, cost, tags)


# Sizes as in low_precision_linear's cases, and for the same reason.
LOW_PRECISION_GROUPED_GEMM = Op(
    "low_precision_grouped_gemm",
    low_precision_grouped_gemm,
    low_precision_grouped_gemm_eager,
    (
        in_gluon(
            _gluon,
            "all products, where `auto` takes triton until one is tuned on the device",
            capabilities=(9, 10),
            refuses=gluon_refuses,
            slower_than=untuned("low_precision_grouped_gemm"),
            tunables=from_kernels("quant.specialized", "GROUPED"),
            gate=from_kernels("quant.specialized", "grouped_gate"),
        ),
        in_triton(
            _triton,
            missing=no_fp8,
            refuses=triton_refuses,
            tunables=from_kernels("quant.low_precision_grouped_triton", "TUNABLES"),
            gate=from_kernels("quant.low_precision_grouped_triton", "gate"),
        ),
        in_cpp(_cpp),
    ),
    (
        _case("block_fp8", "ragged", (9, 20, 0, 3), 20, 26),
        _case("mxfp8", "ragged", (9, 20, 0, 4), 20, 26),
        _case("nvfp4", "ragged", (9, 20, 0, 5), 20, 26, seed=2**62 + 5),
        *(_case(recipe, "tail", (10, 0, 14), 24, 32, tail=6) for recipe in RECIPES),
        _case("block_fp8", "two_scales", (140, 5, 130), 136, 144),
        # Rows for TMA: those of two experts, of one block and of two, and those of the tail.
        *(_case(recipe, "aligned", (140, 0, 128), 144, 160, tail=9) for recipe in RECIPES),
        _case("nvfp4", "two_blocks", (40, 15), 40, 48, seed=3),
        *(_case(recipe, "float32_weight", (10, 15), 48, 40, wide=True) for recipe in RECIPES),
        _case("block_fp8", "no_rows", (0, 0, 0), 8, 16),
        *(
            _case(recipe, "hadamard", (45, 3), 32, 32, tail=5, hadamard=True)
            for recipe in ("block_fp8", "mxfp8")
        ),
        # An eighth of the experts: the float64 reference of all needs 50 GiB.
        *(
            _case(
                recipe,
                "qwen3-30b-a3b-16e_up_512_rows",
                (512,) * 16,
                1536,
                2048,
                tags=cases.CUDA,
            )
            for recipe in RECIPES
        ),
    ),
    atol,
    requests=REQUESTS,
    eager_reads_host="contract",
)
