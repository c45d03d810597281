"""A linear layer with a trainable weight, all three of whose products are in FP8 or FP4.

    y  = Q(x)    Q(w)^T + bias        sums over K
    dx = Q(dy)   Q(w^T)^T             sums over N
    dw = Q(dy^T) Q(x^T)^T             sums over T

T = rows of x, K = its columns, N = rows of w. Q rounds a matrix with scales for blocks along the
dimension that its product sums over, so that a tensor of two products is rounded twice, from the
same values: once as it is, once transposed. Both have the same values for a weight in square
blocks.

With `hadamard`, Q transforms the matrix along that dimension before it rounds (hadamard.py). The
transform cancels in the product, and the two roundings of a weight share no values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from tilewright.core import checks, torch_names
from tilewright.core.library import declare, from_kernels
from tilewright.core.registry import Case, Cost, DispatchOn, Op, in_cpp, in_gluon, in_triton
from tilewright.core.takes import takes
from tilewright.kernels.quant.operators import FP8, Codes, NVFP4Options
from tilewright.ops import cases
from tilewright.ops.quant import aqn, fp8, quantize
from tilewright.ops.quant.block_fp8 import DEQUANTIZE_BLOCK_FP8, QUANTIZE_BLOCK_FP8
from tilewright.ops.quant.fp8_linear import Straight, no_fp8
from tilewright.ops.quant.hadamard import HADAMARD, hadamard_eager
from tilewright.ops.quant.mxfp8 import DEQUANTIZE_MXFP8, QUANTIZE_MXFP8
from tilewright.ops.quant.nvfp4 import DEQUANTIZE_NVFP4, QUANTIZE_NVFP4

RECIPES = ("block_fp8", "mxfp8", "nvfp4")
TRANSFORM = 16  # elements of NVFP4's Hadamard transform
SPREAD = 32  # elements of the transform of `hadamard`
# Stochastic rounding of the transposed gradient draws other numbers than that of the gradient.
OTHER_KEY = 2**62


class Request(NamedTuple):
    """The option of a call that an implementation may not support.

    capability: the CUDA device's compute capability, as 90; None elsewhere.
    """

    recipe: str
    capability: int | None = None


# Those that Triton or Gluon refuses.
REQUESTS = (
    Request(recipe="mxfp8", capability=90),
    Request(recipe="nvfp4", capability=90),
    Request(recipe="block_fp8", capability=100),
)


@torch_names.constant
def capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def requested(x: torch.Tensor, recipe: str, seed: int, hadamard: bool = False) -> Request:
    """Raises ValueError for a seed or a transform that the recipe has no use for."""
    if seed and recipe != "nvfp4":
        raise ValueError(
            f"seed must be 0 with recipe {recipe!r}, which rounds to nearest, got {seed}"
        )
    if hadamard and recipe == "nvfp4":
        raise ValueError(
            "hadamard must be False with recipe 'nvfp4', which has a transform of its own of what "
            "dw sums over, got True (block_fp8 and mxfp8 take it)"
        )
    return Request(recipe=recipe, capability=capability(x.device) if x.is_cuda else None)


@checks.autocast("products", "x", "w", "bias")
@takes(
    "x: K % 32 == 0 or not hadamard",
    "w: N % 32 == 0 or not hadamard",
    x="float [..., K]",
    w="x | float32 [N, K]",
    bias="w [N]",
    recipe=RECIPES,
    seed=quantize.SEED,
    hadamard="bool",
    check_finite="bool",
)
def low_precision_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recipe: str = "block_fp8",
    seed: int = 0,
    hadamard: bool = False,
    check_finite: bool = True,
    implementation: str = "auto",
) -> torch.Tensor:
    """A linear layer for training in block-scaled FP8, MXFP8 or NVFP4: y = Q(x) Q(w)^T + bias, dx =
    Q(dy) Q(w^T)^T and dw = Q(dy^T) Q(x^T)^T.

    Each Q has its scales along the dimension that the product sums over:

    - block_fp8: E4M3 with float32 scales, as `quantize_block_fp8`: x and dy in blocks of 1 x 128,
      w in blocks of 128 x 128, which the transpose shares. Sums of 128 are scaled and added in
      float32.
    - mxfp8: E4M3 with a power of two for every 32, as `quantize_mxfp8`. w is rounded anew for dx,
      along N: forward and backward see other weights where an element is 2^14 times smaller, or
      more, than the largest of one of its blocks.
    - nvfp4: E2M1 with E4M3 scales and one float32 scale per tensor, as `quantize_nvfp4`: x and dy
      in blocks of 1 x 16, w in blocks of 16 x 16, so that forward and backward see the same weight.
      dy is rounded stochastically. For dw, dy^T and x^T go through a Hadamard transform of 16 with
      random signs first, which cancels in the product. Training in FP4 commonly keeps some layers,
      such as the last ones, in a wider format.

    With hadamard, both factors of each product go through `hadamard(t, 32, seed=0)` along the
    dimension that the product sums over, in float32, before they are rounded: y = Q(H(x)) Q(H(w))^T
    and so on. H cancels in the product, and spreads an outlier, and the error of its rounding, over
    32 elements. Errors in E4M3 are relative to each element, so that they seldom are smaller for
    it, and larger where block_fp8 would round the outlier, its block's largest element, exactly. w
    is then rounded anew for dx with block_fp8 too: forward and backward see other weights.

    T, N and K may have any value, with hadamard N and K multiples of 32: incomplete blocks are
    padded with zeros. FP8 products are fast where T, N and K are multiples of 16, FP4 products
    where they are multiples of 32.

    Differentiable in x, w and bias, once (eager: any number of times, and in x alone by
    torch.func). Gradients ignore roundings: the derivative of a rounding counts as 1. That of bias
    is the sum of dy in float32, unrounded. Saved for backward: x^T in codes and scales, 1.03 bytes
    per element of x (nvfp4: 0.56) instead of x's two in 16 bits, if w requires a gradient (T
    rounded up to a multiple of 16 with nvfp4, and of 32 with hadamard); and w itself, which is
    rounded again in backward, rather than a copy in codes beside it (eager: x and w). With hadamard
    each rounding also takes a copy in float32, for as long as it lasts. Deterministic. Sums
    accumulate in float32 and are rounded once, with bias; FP8 tensor cores of compute capability
    9.0 sum 128 products with fewer bits.

    Args:
        x: [..., K] fp32 | bf16 | fp16 (fp64 with eager), any strides; finite, as are w, dy and
            their transforms (see check_finite).
        w: [N, K] in x's dtype or float32, from which it is rounded directly.
        bias: [N] in w's dtype, or None.
        recipe: "block_fp8", "mxfp8" or "nvfp4".
        seed: with nvfp4, the seed of the stochastic rounding and of the transform's signs, 0 to
            2^63 - 1. Steps and layers with the same seed draw the same numbers: pass a different
            one to each. Other recipes round to nearest, and take 0.
        hadamard: transforms what is rounded, with block_fp8 and mxfp8; nvfp4 has its own transform,
            and takes False.
        check_finite: on a CPU, raises ValueError for an infinity or a NaN in x, w or dy. With
            False, and on CUDA, values are not checked: rows and columns of y, dx and dw with terms
            of such a value's scale, in nvfp4 all, are infinite or NaN.
        implementation: "auto", or one of triton, cpp, eager. triton has block_fp8 from compute
            capability 9.0 on, and mxfp8 and nvfp4 from 10.0 on.

    Returns:
        [..., N] in x's dtype. Gradients have the dtypes of x, w and bias.

    Raises:
        TypeError, ValueError: Invalid arguments; on a CPU with check_finite, x, w or the gradient
            of y is not finite.
        ImplementationUnavailable: A named implementation that cannot run here, or does not have
            this recipe here.

    Example:
        >>> from tilewright.ops import low_precision_linear
        >>> x, w = torch.tensor([[1.0, 2.0, 4.0, 7.0]]), torch.eye(4, requires_grad=True)
        >>> y = low_precision_linear(x, w)
        >>> y.backward(torch.ones_like(y))
        >>> y.tolist(), w.grad[0].tolist()
        ([[1.0, 2.0, 4.0, 7.0]], [1.0, 2.0, 4.0, 7.0])

    Source: DeepSeek-V3, arXiv:2412.19437, section 3.3 (block_fp8); OCP Microscaling Formats 1.0
    (mxfp8); NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149 (nvfp4);
    the transform: as `hadamard`.
    """
    quantize.on_device("x", x)
    run = LOW_PRECISION_LINEAR.pick(implementation, x, requested(x, recipe, seed, hadamard))
    # Nothing is kept of x where no gradient of w follows.
    keep = torch.is_grad_enabled() and w.requires_grad
    options = Options(recipe, seed, keep, hadamard, check_finite)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return run(rows, w, bias, options).view(*x.shape[:-1], w.shape[0])


# ---- rounded matrices


class Options(NamedTuple):
    """recipe, seed, hadamard, check_finite: as given.   keep: w's gradient may follow."""

    recipe: str
    seed: int
    keep: bool
    hadamard: bool = False
    check_finite: bool = True


class Factor(NamedTuple):
    """A rounded matrix [R, columns] of a product that sums over its columns.

    data, scale: codes and the scales of blocks of `rows` rows, as launchers take them.
    total: the tensor's scale, in NVFP4.
    """

    data: torch.Tensor
    scale: torch.Tensor
    total: torch.Tensor | None
    rows: int
    columns: int


class Rounding(NamedTuple):
    """How a tensor is rounded.

    by: the implementation of the ops that round.   what: the tensor's name, in errors.
    square: in blocks of as many rows as columns, where the recipe has them: a weight.
    random: stochastically, where the recipe does so: a gradient.
    """

    by: str
    options: Options
    what: str
    square: bool = False
    random: bool = False

    def both(self, t: torch.Tensor, *, transpose: bool) -> tuple[Factor, Factor | None]:
        """t [R, C], and its transpose for a product that sums over rows; or t [B, R, C]."""
        if self.options.hadamard:
            return self._spread(t), self.turned(t) if transpose else None
        if self.options.recipe != "nvfp4":
            return self._fp8(t, transpose)
        key = self.options.seed if self.random else None
        if self.square:
            return self._nvfp4(t, NVFP4Options(True, key, 0, None, transpose))
        rounded, _ = self._nvfp4(t, NVFP4Options(False, key, 0, None, False))
        return rounded, self._transformed(t, key) if transpose else None

    def turned(self, t: torch.Tensor) -> Factor:
        """The second of `both`, without the first one's rounding where they are two."""
        if self.options.hadamard:
            return self._spread(quantize.pad_to(t, -2, SPREAD).mT)
        _, turned = self.both(t, transpose=True)
        assert turned is not None
        return turned

    def _spread(self, t: torch.Tensor) -> Factor:
        """t transformed along its columns, in float32 so that all dtypes are rounded once."""
        t = t.contiguous().float()
        wide = HADAMARD.pick(self.by, t)(t, SPREAD, 0, False)
        return self._fp8(wide, False)[0]

    def _transformed(self, t: torch.Tensor, key: int | None) -> Factor:
        key = None if key is None else key ^ OTHER_KEY
        given = NVFP4Options(False, key, TRANSFORM, self.options.seed, False)
        return self._nvfp4(quantize.pad_to(t, -2, TRANSFORM).mT, given)[0]

    def _nvfp4(self, t: torch.Tensor, given: NVFP4Options) -> tuple[Factor, Factor | None]:
        """Rounds t with its present strides; an implementation copies t if it has to."""
        run = QUANTIZE_NVFP4.pick(self.by, t)
        total, codes = run(t if t.dim() == 3 else t[None], None, given, self._checked())
        return _factors(t, codes, total, 1, given.transpose)

    def _fp8(self, t: torch.Tensor, transpose: bool) -> tuple[Factor, Factor | None]:
        if self.options.recipe == "mxfp8":
            op, given = QUANTIZE_MXFP8, fp8.mx(None, transpose)
        else:
            rows = 128 if self.square else 1
            op, given = QUANTIZE_BLOCK_FP8, FP8(rows, 128, False, None, transpose)
        codes = op.pick(self.by, t)(_matrices(t), given)
        codes = codes._replace(scale=quantize.finite(codes.scale, self._checked()))
        return _factors(t, codes, None, given.rows, transpose)

    def _checked(self) -> str | None:
        """The name under which values are checked."""
        return self.what if self.options.check_finite else None


def _matrices(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous() if t.dim() == 3 else t.contiguous()[None]


def _factors(
    t: torch.Tensor, codes: Codes, total: torch.Tensor | None, rows: int, transpose: bool
) -> tuple[Factor, Factor | None]:
    """The factors from the codes of t, which was rounded as [matrices, rows, columns]."""

    def one(data, scale, columns):
        parts = (data, scale) if t.dim() == 3 else (data[0], scale[0])
        return Factor(*parts, total=total, rows=rows, columns=columns)

    turned = one(codes.turned, codes.turned_scale, t.shape[-2]) if transpose else None
    return one(codes.data, codes.scale, t.shape[-1]), turned


def values(factor: Factor, recipe: str, by: str, dtype: torch.dtype) -> torch.Tensor:
    """The values of a factor."""
    data, scale, total, rows, columns = factor
    on, shape = DispatchOn(data.device, dtype), (*data.shape[:-1], columns)
    if total is not None:
        run = DEQUANTIZE_NVFP4.pick(by, on)
        R, wide = math.prod(shape[:-1]), (data.shape[-1], scale.shape[-1])
        given = data.view(R, wide[0]), scale.view(R, wide[1])
        return run(*given, total, columns, dtype, aqn.NONE).view(shape)
    if recipe == "mxfp8":
        run, wide = DEQUANTIZE_MXFP8.pick(by, on), fp8.MX_BLOCK
    else:
        run, wide = DEQUANTIZE_BLOCK_FP8.pick(by, on), 128
    return run(_matrices(data), _matrices(scale), rows, wide, dtype, aqn.NONE).view(shape)


# ---- the definition


class _Linear(torch.autograd.Function):
    """Q(x) Q(w)^T, whose gradients are products of the same kind."""

    generate_vmap_rule = True  # for torch.func, as is the separate setup_context

    @staticmethod
    def forward(x, w, options):
        x, w = _forward_factors(x, w, options)
        return x @ w.mT

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        with checks.no_autocast(dy):
            dx, dw = _gradients_eager(x, w, dy, ctx.options)
        return dx, dw, None


class _WithTangents(_Linear):
    """`_Linear` with a forward-mode derivative, which Dynamo does not trace."""

    @staticmethod
    def jvp(ctx, dx, dw, _):
        x, w = ctx.saved_tensors
        dx = torch.zeros_like(x) if dx is None else dx
        dw = torch.zeros_like(w) if dw is None else dw
        x, w = _forward_factors(x, w, ctx.options)
        dx, dw = (unrounded(t, ctx.options, w.dtype) for t in (dx, dw))
        return dx @ w.mT + x @ dw.mT


def _forward_factors(x, w, options):
    """The values of Q(x) and Q(w)."""
    acc, recipe = torch.promote_types(x.dtype, torch.float32), options.recipe
    x, _ = Rounding("eager", options, "x").both(x, transpose=False)
    w, _ = Rounding("eager", options, "w", square=True).both(w, transpose=False)
    return values(x, recipe, "eager", acc), values(w, recipe, "eager", acc)


def through(t: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Rounded values of t, whose gradient is t's. Compiled code, which has no second derivative, is
    not differentiated here.
    """
    return rounded if torch.compiler.is_dynamo_compiling() else Straight.apply(t, rounded)


def unrounded(
    t: torch.Tensor, options: Options, dtype: torch.dtype, *, tokens: bool = False
) -> torch.Tensor:
    """What a factor rounds: t, or its transform.   tokens: dw sums over t's columns."""
    t = t.to(dtype)
    if options.hadamard:
        size, seed = SPREAD, 0
    elif tokens and options.recipe == "nvfp4":
        size, seed = TRANSFORM, options.seed
    else:
        return t
    return hadamard_eager(quantize.pad_to(t, -1, size).contiguous(), size, seed, False)


def _gradients_eager(x, w, dy, options):
    """dx and dw; to autograd, a rounded tensor is the tensor itself."""
    acc = dy.dtype
    dys = Rounding("eager", options, "the gradient of y", random=True).both(dy, transpose=True)
    x_turned = Rounding("eager", options, "x").turned(x)
    w_turned = Rounding("eager", options, "w", square=True).turned(w)

    def straight(t, factor, tokens=False):
        exact = unrounded(t, options, acc, tokens=tokens)
        return through(exact, values(factor, options.recipe, "eager", acc))

    dx = straight(dy, dys[0]) @ straight(w.mT, w_turned).mT
    dw = straight(dy.mT, dys[1], tokens=True) @ straight(x.mT, x_turned, tokens=True).mT
    return dx.to(x.dtype), dw.to(w.dtype)


def low_precision_linear_eager(x, w, bias, options):
    function = _Linear if torch.compiler.is_dynamo_compiling() else _WithTangents
    y = function.apply(x, w, options)
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)


# ---- fused implementations: an operator, and one for its gradients


class Result(NamedTuple):
    """y, and x^T as a factor, or None."""

    y: torch.Tensor
    data: torch.Tensor | None
    scale: torch.Tensor | None
    total: torch.Tensor | None


class Needs(NamedTuple):
    """Whether these gradients are needed."""

    dx: bool
    dw: bool


class Gradients(NamedTuple):
    """The gradients that are needed."""

    x: torch.Tensor | None
    w: torch.Tensor | None


class Saved(NamedTuple):
    """x^T as a factor, or None."""

    data: torch.Tensor | None
    scale: torch.Tensor | None
    total: torch.Tensor | None


@declare
def product(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, options: Options
) -> Result:
    """x [T, K], w [N, K]."""
    (T, K), y = x.shape, x.new_empty((x.shape[0], w.shape[0]))
    if not options.keep:
        return Result(y, None, None, None)
    if options.recipe == "nvfp4":
        wide = -(-T // TRANSFORM) * TRANSFORM
        data, scale = (x.new_empty((K, wide // n), dtype=torch.uint8) for n in (2, 16))
        return Result(y, data, scale, x.new_empty((), dtype=torch.float32))
    mx = options.recipe == "mxfp8"
    scales, span = (torch.uint8, fp8.MX_BLOCK) if mx else (torch.float32, 128)
    wide = -(-T // SPREAD) * SPREAD if options.hadamard else T
    data = x.new_empty((K, wide), dtype=torch.uint8)
    return Result(y, data, x.new_empty((K, -(-wide // span)), dtype=scales), None)


@declare
def gradients(
    dy: torch.Tensor, w: torch.Tensor, turned: Saved, options: Options, needs: Needs
) -> Gradients:
    """dy [T, N], w [N, K]."""
    dx = dy.new_empty((dy.shape[0], w.shape[1])) if needs.dx else None
    return Gradients(dx, torch.empty_like(w) if needs.dw else None)


@product.formula(constants=("scale", "total"), turned=Saved)
def _backward(op, g, w, bias, turned, options, needs):
    gradients = {}
    if needs["x"] or needs["w"]:
        needed = Needs(needs["x"], needs["w"])
        gradients = op(g.y, w, turned, options, needed)._asdict()
    if needs["bias"]:
        gradients["bias"] = g.y.sum(0, dtype=torch.float32).to(bias.dtype)
    return gradients


class _Fused:
    """One implementation: its operators, and their caller.

    multiply: (factor [M, K], factor [N, K], bias, options, dtype) -> [M, N].
    rounds: the implementation that rounds the factors; None: the one of this name.
    """

    def __init__(self, name: str, multiply: Callable, rounds: str | None = None):
        self.rounds, self.multiply = rounds or name, multiply
        backward = gradients.define(f"low_precision_linear_{name}_backward", self.backward)
        self.product = product.define(
            f"low_precision_linear_{name}_forward", self.forward, backward
        )

    def forward(self, x, w, bias, options):
        x_factor, turned = Rounding(self.rounds, options, "x").both(x, transpose=options.keep)
        w_factor, _ = Rounding(self.rounds, options, "w", square=True).both(w, transpose=False)
        y = self.multiply(x_factor, w_factor, bias, options, x.dtype)
        return Result(y, *(turned[:3] if turned is not None else (None, None, None)))

    def backward(self, dy, w, turned, options, needs):
        rounding = Rounding(self.rounds, options, "the gradient of y", random=True)
        dy_factor, dy_turned = rounding.both(dy, transpose=needs.dw)
        dx = dw = None
        if needs.dx:
            w_turned = Rounding(self.rounds, options, "w", square=True).turned(w)
            dx = self.multiply(dy_factor, w_turned, None, options, dy.dtype)
        if dy_turned is not None:
            x_turned = Factor(turned.data, turned.scale, turned.total, 1, dy_turned.columns)
            dw = self.multiply(dy_turned, x_turned, None, options, w.dtype)
        return Gradients(dx, dw)

    def low_precision_linear(self, x, w, bias, options):
        return self.product(x, w, bias, options).y


def _multiply_dense(name, a, b, bias, options, dtype):
    """The product by PyTorch in float32."""
    a, b = (values(t, options.recipe, name, torch.float32) for t in (a, b))
    with checks.no_autocast(a):
        y = torch.mm(a, b.mT) if bias is None else torch.addmm(bias.float(), a, b.mT)
    return y.to(dtype)


def _multiply_triton(kernels, fp8_product, a, b, bias, options, dtype):
    M, N = a.data.shape[0], b.data.shape[0]
    if M * N * a.columns == 0:
        y = torch.zeros((M, N), dtype=dtype, device=a.data.device)
        return y if bias is None else y + bias.to(dtype)
    if options.recipe != "block_fp8":
        factors = a.data, a.scale, a.total, b.data, b.scale, b.total
        return kernels.scaled(*factors, bias, dtype)
    if b.rows == 1:
        return kernels.by_rows(a.data, a.scale, b.data, b.scale, dtype)
    a_data, b_data = (t.data.view(quantize.E4M3) for t in (a, b))
    return fp8_product(a_data, a.scale, b_data, b.scale, bias, dtype)


@functools.cache
def _triton():
    from tilewright.kernels.quant import low_precision_triton, quantized_linear_triton

    kernels = low_precision_triton, quantized_linear_triton.fp8
    return _Fused("triton", functools.partial(_multiply_triton, *kernels)).low_precision_linear


@functools.cache
def _gluon():
    from tilewright.kernels.quant import specialized as kernels

    multiply = functools.partial(_multiply_triton, kernels.dense, kernels.fp8)
    return _Fused("gluon", multiply, "triton").low_precision_linear


@functools.cache
def _cpp():
    return _Fused("cpp", functools.partial(_multiply_dense, "cpp")).low_precision_linear


def triton_refuses(request: Request) -> str | None:
    recipe, capability = request
    if recipe == "block_fp8" or capability is None or capability >= 100:
        return None
    return (
        f"needs compute capability 10.0 for recipe {recipe!r}, this device has "
        f"{capability / 10:.1f}"
    )


def gluon_refuses(request: Request) -> str | None:
    recipe, capability = request
    needed = 90 if recipe == "block_fp8" else 100
    if capability is None or capability // 10 == needed // 10:
        return None
    return (
        f"needs compute capability {needed // 10}.x for recipe {recipe!r}, this device has "
        f"{capability / 10:.1f}"
    )


def untuned(op: str) -> Callable[[str, Request | None], str | None]:
    """`Implementation.slower_than` of an op's kernels that no GPU has measured: Triton's are taken
    until a table of this device has one of them.
    """

    def slower_than(device_type: str, request: Request | None) -> str | None:
        from tilewright.kernels import tuning

        return None if tuning.gives_gluon(op) else "triton"

    return slower_than


def _slower_than(device_type: str, request: Request | None) -> str | None:
    """Only FP8's products of Gluon, of compute capability 9.0, are measured."""
    hopper = torch.cuda.get_device_capability()[0] == 9
    if hopper and (request is None or request.recipe == "block_fp8"):
        return None
    return untuned("low_precision_linear")(device_type, request)


# ---- cases


def _case(recipe, name, *shape, lead=None, bias=False, tags=cases.CONTRACT, **given):
    """shape: T, N, K.   learns: whether x and w do.   wide: w in float32."""
    T, N, K = shape
    learns, wide, seed = given.get("learns", True), given.get("wide", False), given.get("seed", 0)

    def make(device, dtype, draw):
        new = {"device": device, "gen": cases.generator(device, draw)}
        w_new = {**new, "dtype": torch.float32 if wide else dtype}
        arguments = {
            "x": cases.randn(*(lead or (T,)), K, dtype=dtype, requires_grad=learns, **new),
            "w": cases.randn(N, K, scale=max(K, 1) ** -0.5, requires_grad=learns, **w_new),
        }
        if bias:
            arguments["bias"] = cases.randn(N, **w_new)
        more = {"seed": seed} if seed else {}
        if given.get("hadamard"):
            more["hadamard"] = True
        return {**arguments, "recipe": recipe, **more}

    def cost(itemsize):
        forward = itemsize * (T * N + T * K + N * K)
        flops = 2 * T * N * K
        return Cost(forward, 2 * forward if learns else 0, flops, 2 * flops if learns else 0)

    return Case(f"{recipe} {name}", make, cost, tags)


def _timed():
    """The projection of an attention's result: with wider layers, the float64 reference of a check
    and its copies need more memory than a check may.
    """
    width = cases.MODELS["llama-3-8b"].hidden
    for tags, rows, recipes in ((cases.CUDA, 8192, RECIPES), (cases.CPU, 256, RECIPES[:1])):
        for recipe in recipes:
            yield _case(recipe, f"llama-3-8b-out_{rows}", rows, width, width, tags=tags)


def atol(dtype: torch.dtype, kwargs: dict, name: str) -> float | None:
    """FP8 tensor cores of compute capability 9.0 align what they add to the largest term, of which
    they keep about 14 bits (DeepSeek-V3, section 3.3.2), and sums are of 128. bfloat16 allows as
    much by its own roundings.
    """
    narrow = kwargs["x"].is_cuda and kwargs["recipe"] == "block_fp8" and name != "grad bias"
    learns = kwargs.get(name.removeprefix("grad "))  # whose dtype the gradient has
    of = dtype if learns is None else learns.dtype
    return 2**-9 if narrow and of != torch.bfloat16 else None


# Finite differences of a step function are not its gradient. So gradcheck, which takes cases of up
# to 2,500 differentiable elements, finds those in which x and w learn larger, or without elements.
LOW_PRECISION_LINEAR = Op(
    "low_precision_linear",
    low_precision_linear,
    low_precision_linear_eager,
    (
        in_gluon(
            _gluon,
            "products of block_fp8 with more than 64 rows, and those of mxfp8 and nvfp4",
            capabilities=(9, 10),
            refuses=gluon_refuses,
            slower_than=_slower_than,
            tunables=from_kernels("quant.specialized", "DENSE"),
            gate=from_kernels("quant.specialized", "gate"),
        ),
        in_triton(
            _triton,
            missing=no_fp8,
            refuses=triton_refuses,
            tunables=from_kernels("quant.low_precision_triton", "TUNABLES"),
        ),
        in_cpp(_cpp),
    ),
    (
        _case("block_fp8", "frozen", 3, 8, 20, bias=True, learns=False),
        *(
            _case(recipe, "ragged", 33, 40, 37, bias=True, seed=5 * (recipe == "nvfp4"))
            for recipe in RECIPES
        ),
        *(_case(recipe, "three_dimensions", 30, 48, 40, lead=(2, 15)) for recipe in RECIPES),
        _case("nvfp4", "frozen", 3, 8, 20, bias=True, learns=False, seed=2**62 + 3),
        *(_case(recipe, "two_scales", 130, 132, 136, bias=True) for recipe in RECIPES),
        _case("block_fp8", "aligned", 144, 176, 160),  # for TMA
        *(_case(recipe, "float32_weight", 20, 48, 64, bias=True, wide=True) for recipe in RECIPES),
        *(_case(recipe, "no_rows", 0, 8, 16, bias=True) for recipe in RECIPES),
        _case("block_fp8", "no_columns", 3, 8, 0, bias=True),
        _case("block_fp8", "hadamard", 45, 64, 32, bias=True, hadamard=True),
        _case("mxfp8", "hadamard", 33, 32, 64, hadamard=True),
        _case("nvfp4", "no_outputs", 3, 0, 16),
        *_timed(),
    ),
    atol,
    requests=REQUESTS,
)
