"""Linear layers over a frozen quantised weight, with the gradients of x and of bias.

    quantized_linear   y = x @ dequant(q)^T + bias fp8_linear         y = dequant(fp8(x)) @
    dequant(q)^T + bias, of which both factors are multiplied in FP8

T = rows of x, K = its columns, N = rows of q. What is kept for the backward is q's own tensors: the
backward dequantises again, and neither needs x, since no gradient of the weight is made.

With many rows the weight is dequantised once, into x's dtype, and multiplied by PyTorch's GEMM; the
copy lives as long as that product. With few rows, where reading and writing a copy would take
longest, the codes become numbers on their way to the product. The gradient of x is always of the
first kind: few rows are what generation has, which needs no gradients, and a training step with
that few is bound elsewhere.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tilewright import platform
from tilewright.ops import _checks, cases, nf4, quantize
from tilewright.ops._library import define, differentiate
from tilewright.ops.aqn import AQN
from tilewright.ops.block_fp8 import (
    DEQUANTIZE_BLOCK_FP8,
    BlockFP8,
    dequantize_block_fp8,
    quantize_block_fp8,
)
from tilewright.ops.mxfp8 import BLOCK as MX_BLOCK
from tilewright.ops.mxfp8 import DEQUANTIZE_MXFP8, E8M0, MXFP8
from tilewright.ops.nf4 import DEQUANTIZE_NF4, NF4, quantize_nf4
from tilewright.ops.nvfp4 import DEQUANTIZE_NVFP4, NVFP4, quantize_nvfp4
from tilewright.ops.quantize import Quantized
from tilewright.registry import Case, Cost, Implementation, On, Op, short

_DEQUANTIZE = {
    NF4: DEQUANTIZE_NF4,
    NVFP4: DEQUANTIZE_NVFP4,
    BlockFP8: DEQUANTIZE_BLOCK_FP8,
    MXFP8: DEQUANTIZE_MXFP8,
}


def dequantize(
    q: Quantized,
    *,
    dtype: torch.dtype | None = None,
    noise: AQN | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """`dequantize_nf4`, `dequantize_nvfp4`, `dequantize_block_fp8` or `dequantize_mxfp8`, by q's
    format, whose arguments these are.
    """
    if type(q) not in _DEQUANTIZE:
        raise TypeError(f"q must be an NF4, NVFP4, BlockFP8 or MXFP8, got {type(q).__name__}")
    options = {} if noise is None else {"noise": noise}
    return _DEQUANTIZE[type(q)].public(q, dtype=dtype, implementation=implementation, **options)


@_checks.autocast("products", "x", "bias")
def quantized_linear(
    x: torch.Tensor,
    q: Quantized,
    bias: torch.Tensor | None = None,
    *,
    noise: AQN | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """y = x @ dequant(q)^T + bias.

    x: [..., K] fp32 | bf16 | fp16 (fp64 with eager), any strides.
    q: NF4, NVFP4, BlockFP8 or MXFP8 of shape [N, K]; frozen. It is read in x's dtype, whatever
        dtype it was quantised from.
    bias: [N] in x's dtype, or None.
    noise: what `dequantize_*` adds to the weight, the same in forward and backward; None for
    nothing. Returns [..., N] in x's dtype. The weight is dequantised in float32 and rounded to x's
    dtype; products are summed in float32 and rounded once, with bias (in float32, PyTorch's GEMM
    follows torch.backends.cuda.matmul.allow_tf32). Under torch.autocast x and bias are cast to its
    dtype. Differentiable in x and bias, any number of times: dx = dy @ dequant(q). Kept for the
    backward: q's tensors, not a copy of them, and not x. Deterministic. Raises TypeError or
    ValueError for arguments that do not fit, ImplementationUnavailable for a named implementation
    that cannot run here.
    Source: QLoRA, arXiv:2305.14314, equation 5.
    """
    _validate(x, q, bias)
    checked_noise(noise)
    return QUANTIZED_LINEAR.pick(implementation, x)(x, q, bias, noise)


@_checks.autocast("products", "x", "bias")
def fp8_linear(
    x: torch.Tensor, q: BlockFP8, bias: torch.Tensor | None = None, *, implementation: str = "auto"
) -> torch.Tensor:
    """y = dequant(fp8(x)) @ dequant(q)^T + bias: x too is rounded to FP8, and FP8 is what is
    multiplied.

    x: [..., K] fp32 | bf16 | fp16 (fp64 with eager), any strides; finite. It is quantised as
        `quantize_block_fp8(x, block=(1, 128))` does: a scale for each 128 columns of a row.
    q: BlockFP8 of shape [N, K] with blocks of 128 x 128.   bias: [N] in x's dtype, or None. Returns
    [..., N] in x's dtype. Products within 128 columns are summed by the tensor cores, in their
    precision; they are scaled and added up in float32, and rounded once, with bias. Under
    torch.autocast as `quantized_linear`. Its own op, and never what `quantized_linear` chooses,
    because a result differs by what x loses: half a unit in the last of three bits of mantissa, 3 %
    of a product on average. Differentiable in x and bias, with the rounding of x left out of the
    gradient: that of `quantized_linear`, dx = dy @ dequant(q) with the weight in x's dtype. Kept
    for the backward: q's tensors. Deterministic. Raises as `quantized_linear`, ValueError for other
    blocks.
    Source: DeepSeek-V3, arXiv:2412.19437, section 3.3.2.
    """
    _validate(x, q, bias)
    quantize.instance(q, BlockFP8)
    if tuple(q.block) != (128, 128):
        raise ValueError(f"q.block must be (128, 128), got {tuple(q.block)}")
    return FP8_LINEAR.pick(implementation, x)(x, q, bias)


def _validate(x, q, bias):
    quantize.source(x)
    if type(q) not in _DEQUANTIZE:
        raise TypeError(f"q must be an NF4, NVFP4, BlockFP8 or MXFP8, got {type(q).__name__}")
    if len(q.shape) != 2:
        raise ValueError(f"q must have shape [N, K], got {list(q.shape)}")
    _checks.same_device(x=x, q=q.tensors()[0], bias=bias)
    N, K = q.shape
    if x.dim() == 0 or x.shape[-1] != K:
        raise ValueError(f"x must have shape [..., {K}], with q's K, got {list(x.shape)}")
    if bias is not None:
        _checks.floating("bias", bias)
        _checks.shape("bias", bias, (N,), "[N], with q's N")
        if bias.dtype != x.dtype:
            raise TypeError(f"bias must have x's dtype {short(x.dtype)}, got {short(bias.dtype)}")


def checked_noise(noise):
    if noise is not None and not isinstance(noise, AQN):
        raise TypeError(f"noise must be an AQN or None, got {type(noise).__name__}")


# ---- a quantised tensor, and noise, as arguments of an operator


class Packed(NamedTuple):
    """data, scale, first, second: q's tensors, those that its format has not None; FP8 as bytes,
    which share memory.

    format: "nf4", "nvfp4", "block_fp8" or "mxfp8".   shape: q's.   block: NF4's block_size, block
        FP8's rows and columns.
    alpha, key: of the noise, its scale and (seed, step, layer).
    """

    data: torch.Tensor
    scale: torch.Tensor
    first: torch.Tensor | None
    second: torch.Tensor | None
    format: str
    shape: list[int]
    block: list[int]
    alpha: float
    key: list[int]


def pack(q: Quantized, noise: AQN | None) -> Packed:
    """Raises TypeError for FP8 of another kind: its bytes would be taken for those of this one."""
    for cls, name, dtype in (
        (NVFP4, "scale", quantize.E4M3),
        (BlockFP8, "data", quantize.E4M3),
        (MXFP8, "data", quantize.E4M3),
        (MXFP8, "scale", E8M0),
    ):
        if isinstance(q, cls) and (t := getattr(q, name)).dtype != dtype:
            raise TypeError(f"q.{name} must be a {short(dtype)} tensor, got {short(t.dtype)}")
    of_noise = (
        (0.0, [0, 0, 0])
        if noise is None
        else (float(noise.alpha), [noise.seed, noise.step, noise.layer])
    )
    if isinstance(q, NF4):
        return Packed(
            q.data,
            q.absmax,
            q.nested_absmax,
            q.offset,
            "nf4",
            list(q.shape),
            [q.block_size],
            *of_noise,
        )
    if isinstance(q, NVFP4):
        return Packed(
            q.data,
            q.scale.view(torch.uint8),
            q.global_scale,
            None,
            "nvfp4",
            list(q.shape),
            [],
            *of_noise,
        )
    if isinstance(q, MXFP8):
        return Packed(
            q.data.view(torch.uint8),
            q.scale.view(torch.uint8),
            None,
            None,
            "mxfp8",
            list(q.shape),
            [],
            *of_noise,
        )
    return Packed(
        q.data.view(torch.uint8),
        q.scale_inv,
        None,
        None,
        "block_fp8",
        list(q.shape),
        list(q.block),
        *of_noise,
    )


def unpack(p: Packed, dtype: torch.dtype) -> tuple[Quantized, AQN | None]:
    if p.format == "nf4":
        q = NF4(p.data, p.scale, p.first, p.second, tuple(p.shape), dtype, p.block[0])
    elif p.format == "nvfp4":
        q = NVFP4(p.data, p.scale.view(quantize.E4M3), p.first, tuple(p.shape), dtype)
    elif p.format == "mxfp8":
        q = MXFP8(p.data.view(quantize.E4M3), p.scale.view(E8M0), dtype)
    else:
        q = BlockFP8(p.data.view(quantize.E4M3), p.scale, tuple(p.block), dtype)
    return q, AQN(p.alpha, *p.key) if p.alpha else None


def dense(p: Packed, dtype: torch.dtype, implementation: str | None) -> torch.Tensor:
    """The tensor that a packed one stands for. implementation: of dequantize_*; None: the
    `unpinned` one.
    """
    q, noise = unpack(p, dtype)
    if implementation is None:
        implementation = _DEQUANTIZE[type(q)].unpinned(On(p.data.device, dtype))
    return dequantize(q, dtype=dtype, noise=noise, implementation=implementation)


def _check_parts(p: Packed) -> None:
    """For kernels that read a matrix's codes themselves: what `dequantize_*` checks."""
    N, K = p.shape
    if p.format == "nf4":
        blocks = -(-N * K // p.block[0])
        quantize.part("q.data", p.data, torch.uint8, (-(-N * K // 2),), p.data)
        nested = p.second is not None
        quantize.part(
            "q.absmax", p.scale, torch.uint8 if nested else torch.float32, (blocks,), p.data
        )
        if nested:
            quantize.part(
                "q.nested_absmax", p.first, torch.float32, (-(-blocks // nf4.NESTED_BLOCK),), p.data
            )
            quantize.part("q.offset", p.second, torch.float32, (), p.data)
    elif p.format == "nvfp4":
        quantize.part("q.data", p.data, torch.uint8, (N, -(-K // 2)), p.data)
        quantize.part("q.scale", p.scale, torch.uint8, (N, -(-K // 16)), p.data)
        quantize.part("q.global_scale", p.first, torch.float32, (), p.data)
    else:
        rows, columns = p.block
        quantize.part(
            "q.scale_inv", p.scale, torch.float32, (-(-N // rows), -(-K // columns)), p.data
        )


# ---- the definitions


def quantized_linear_eager(x, q, bias, noise):
    acc = torch.promote_types(x.dtype, torch.float32)
    w = dequantize(q, dtype=x.dtype, noise=noise, implementation="eager")
    return _product_eager(x.to(acc), w.to(acc), bias).to(x.dtype)


def _product_eager(x, w, bias):
    y = x @ w.t()
    return y if bias is None else y + bias.to(y.dtype)


class _Straight(torch.autograd.Function):
    """The second of two tensors, with its gradient for the first."""

    @staticmethod
    def forward(ctx, x, rounded):
        return rounded.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def fp8_linear_eager(x, q, bias):
    acc = torch.promote_types(x.dtype, torch.float32)
    codes = quantize_block_fp8(x, block=(1, 128), implementation="eager")
    rounded = dequantize_block_fp8(codes, dtype=acc, implementation="eager")
    w = dequantize_block_fp8(q, dtype=acc, implementation="eager")
    return _product_eager(_Straight.apply(x.to(acc), rounded), w, bias).to(x.dtype)


# ---- fused implementations

_loaded: dict[str, object] = {}


def _fake_forward(x, bias, data, scale, first, second, format, shape, block, alpha, key):
    return x.new_empty((x.shape[0], shape[0]))


def _fake_backward(dy, data, scale, first, second, format, shape, block, alpha, key):
    return dy.new_empty((dy.shape[0], shape[1]))


def _mm(x, w, bias):
    """x @ w + bias by PyTorch, whatever autocast would make of it."""
    with _checks.no_autocast(x):
        return torch.mm(x, w) if bias is None else torch.addmm(bias, x, w)


def _register(name, few_rows):
    """The product's operator, the one of its gradient, and what calls them. few_rows: (x, bias,
    packed) -> y, or None where the weight should be dequantised.
    """

    def forward(
        x: torch.Tensor,
        bias: torch.Tensor | None,
        data: torch.Tensor,
        scale: torch.Tensor,
        first: torch.Tensor | None,
        second: torch.Tensor | None,
        format: str,
        shape: list[int],
        block: list[int],
        alpha: float,
        key: list[int],
    ) -> torch.Tensor:
        packed = Packed(data, scale, first, second, format, shape, block, alpha, key)
        y = few_rows(x, bias, packed) if alpha == 0 else None
        return _mm(x, dense(packed, x.dtype, name).t(), bias) if y is None else y

    def backward(
        dy: torch.Tensor,
        data: torch.Tensor,
        scale: torch.Tensor,
        first: torch.Tensor | None,
        second: torch.Tensor | None,
        format: str,
        shape: list[int],
        block: list[int],
        alpha: float,
        key: list[int],
    ) -> torch.Tensor:
        packed = Packed(data, scale, first, second, format, shape, block, alpha, key)
        return _mm(dy, dense(packed, dy.dtype, name), None)

    product = define(f"quantized_linear_{name}_forward", forward, _fake_forward)
    transposed = define(f"quantized_linear_{name}_backward", backward, _fake_backward)

    def setup(ctx, inputs, output):
        ctx.save_for_backward(*inputs[2:6])
        ctx.options = inputs[6:]

    def formula(ctx, dy):
        dx = transposed(dy, *ctx.saved_tensors, *ctx.options) if ctx.needs_input_grad[0] else None
        return dx, _of_bias(dy) if ctx.needs_input_grad[1] else None, *[None] * 9

    def setup_transposed(ctx, inputs, output):
        ctx.save_for_backward(*inputs[1:5])
        ctx.options = inputs[5:]

    def formula_transposed(ctx, ddx):
        return product(ddx, None, *ctx.saved_tensors, *ctx.options), *[None] * 9

    # Each is linear, and the other is its gradient.
    differentiate(product, formula, setup, twice=True)
    differentiate(transposed, formula_transposed, setup_transposed, twice=True)

    def call(x, q, bias, noise):
        y = product(
            x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1]),
            bias,
            *pack(q, noise),
        )
        return (
            y if x.dim() == 2 else y.view(*x.shape[:-1], q.shape[0])
        )  # no view where none is needed

    return call


def _of_bias(dy):
    return dy.sum(0, dtype=torch.float32).to(dy.dtype)


_tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


def _nf4_tables(like):
    """The values of NF4's codes and those of the codes of scales, made once a device. Within an
    operator, where no compiler looks.
    """
    if like.device not in _tables:
        _tables[like.device] = nf4.codes_of().to(like.device), nf4.dynamic_map().to(like.device)
    return _tables[like.device]


def _read_by_kernel(x, bias, packed):
    """Arguments that the fused kernels share: bias, data, scale, nested scales, their codes'
    values, the number that goes with all scales, the codes' values.
    """
    _check_parts(packed)
    values, table, nested, extra = None, None, None, None
    if packed.format == "nf4":
        values, table = _nf4_tables(x)
        nested, extra = packed.first, packed.second
    elif packed.format == "nvfp4":
        extra = packed.first
    return (
        None if bias is None else bias.contiguous(),
        packed.data.contiguous(),
        packed.scale.contiguous(),
        nested,
        table if nested is not None else None,
        extra,
        values,
    )


def _triton():
    if "triton" not in _loaded:
        from tilewright.kernels import quantized_linear_triton as k

        def few_rows(x, bias, packed):
            if (
                packed.format == "mxfp8"
            ):  # a step of the kernel takes more columns than share a scale
                return None
            config = k.constants(x, packed.format, packed.shape[0], packed.block)
            if config is None:
                return None
            return k.few_rows(
                x,
                *_read_by_kernel(x, bias, packed),
                packed.format,
                packed.shape[0],
                packed.block,
                config,
            )

        _loaded["triton"] = _register("triton", few_rows)
    return _loaded["triton"]


def _cpp():
    if "cpp" not in _loaded:
        product = torch.ops.tilewright.quantized_linear_cpp_few_rows.default

        def few_rows(x, bias, packed):
            N, K = packed.shape
            rows, span = {
                "nf4": (1, *packed.block),
                "nvfp4": (1, 16),
                "mxfp8": (1, MX_BLOCK),
                "block_fp8": packed.block,
            }[packed.format]
            # Codes are taken 16 at a time, of one scale.
            if (
                not 0 < x.shape[0] <= _CPP_ROWS[x.dtype]
                or N * K == 0
                or K % 16
                or span % 16
                or (packed.format == "nf4" and K % span)
            ):
                return None
            if (
                packed.format == "mxfp8"
            ):  # with float32 scales, an eighth of the weight's bytes; values are the same
                quantize.part(
                    "q.scale", packed.scale, torch.uint8, (N, -(-K // MX_BLOCK)), packed.data
                )
                packed = packed._replace(
                    scale=packed.scale.view(E8M0).float(), format="block_fp8", block=[rows, span]
                )
            bias, data, scale, nested, table, extra, _ = _read_by_kernel(x, bias, packed)
            return product(
                x.contiguous(),
                bias,
                data,
                scale,
                nested,
                table,
                extra,
                _CPP_FORMATS[packed.format],
                N,
                rows,
                span,
            )

        _loaded["cpp"] = _register("cpp", few_rows)
    return _loaded["cpp"]


_CPP_FORMATS = {"nf4": 0, "nvfp4": 1, "block_fp8": 2}
# Rows up to which the fused C++ product is faster than dequantising and PyTorch's GEMM. Measured on
# two (shared) cores of an AMD EPYC with 2,048 x 2,048 and 4,096 x 14,336 weights of each format: in
# float32 1.4 to 5 times as fast up to 64 rows and about even at 256; in bfloat16 1.1 to 3 times up
# to 16, even at 64, slower at 256.
_CPP_ROWS = {torch.float32: 64, torch.bfloat16: 32}


# ---- FP8 by FP8


def _fake_fp8(x, bias, data, scale):
    return x.new_empty((x.shape[0], data.shape[0]))


def _fp8_triton():
    if "fp8" not in _loaded:
        from tilewright.kernels import quantize_triton, quantized_linear_triton

        _triton()
        transposed = torch.ops.tilewright.quantized_linear_triton_backward.default

        def forward(
            x: torch.Tensor, bias: torch.Tensor | None, data: torch.Tensor, scale: torch.Tensor
        ) -> torch.Tensor:
            _check_parts(
                Packed(data, scale, None, None, "block_fp8", list(data.shape), [128, 128], 0.0, [])
            )
            codes, x_scale = quantize_triton.block_fp8_quantize(x.contiguous()[None], 1, 128, None)
            return quantized_linear_triton.fp8(
                codes[0].view(quantize.E4M3),
                x_scale[0],
                data.contiguous().view(quantize.E4M3),
                scale.contiguous(),
                None if bias is None else bias.contiguous(),
                x.dtype,
            )

        product = define("fp8_linear_triton_forward", forward, _fake_fp8)

        def setup(ctx, inputs, output):
            ctx.save_for_backward(*inputs[2:])

        def formula(ctx, dy):
            data, scale = ctx.saved_tensors
            dx = (
                transposed(
                    dy,
                    data,
                    scale,
                    None,
                    None,
                    "block_fp8",
                    list(data.shape),
                    [128, 128],
                    0.0,
                    [0, 0, 0],
                )
                if ctx.needs_input_grad[0]
                else None
            )
            return dx, _of_bias(dy) if ctx.needs_input_grad[1] else None, None, None

        differentiate(product, formula, setup, twice=True)

        def call(x, q, bias):
            rows = math.prod(x.shape[:-1])
            y = product(x.reshape(rows, x.shape[-1]), bias, q.data.view(torch.uint8), q.scale_inv)
            return y.view(*x.shape[:-1], q.shape[0])

        _loaded["fp8"] = call
    return _loaded["fp8"]


def _no_fp8(device_type: str) -> str | None:
    if reason := platform.no_triton(device_type):
        return reason
    return platform.no_cuda(90) if device_type == "cuda" else None


def _kernels(what):
    def load():
        from tilewright.kernels import quantized_linear_triton as k

        return {"gate": k.gate, "few_rows": lambda: (k.FEW_ROWS,), "fp8": lambda: (k.FP8,)}[what]()

    return load


# ---- cases

_QUANTIZE = {
    "nf4": quantize_nf4,
    "nf4 nested": lambda w: quantize_nf4(w, double_quant=True),
    "nvfp4": quantize_nvfp4,
    "block_fp8": quantize_block_fp8,
    "block_fp8 16": lambda w: quantize_block_fp8(w, block=(16, 16)),
}
_BITS = {"nf4": 4.5, "nf4 nested": 4.13, "nvfp4": 4.5, "block_fp8": 8.002}


def _case(name, format, T, N, K, bias=False, lead=None, tags=cases.CONTRACT, differentiable=True):
    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        draw = {"device": device, "dtype": dtype, "gen": g}
        w = cases.randn(N, K, scale=max(K, 1) ** -0.5, requires_grad=False, **draw)
        found = {
            "x": cases.randn(*(lead or (T,)), K, requires_grad=differentiable, **draw),
            "q": _QUANTIZE[format](w),
        }
        if bias:
            found["bias"] = cases.randn(N, requires_grad=differentiable, **draw)
        return found

    def cost(itemsize):
        moved = int(_BITS.get(format, 8) / 8 * N * K) + itemsize * T * (N + K)
        return Cost(
            moved,
            moved if differentiable else 0,
            2 * T * N * K,
            2 * T * N * K if differentiable else 0,
        )

    return Case(f"{format} {name}", make, cost, tags)


def _timed(formats, differentiable=True):
    """The down projection of Llama 3 8B, whose rows are longest: with one token, with small batches
    of them, and with those of a training step. On a CPU only what has a fused implementation there.
    """
    model = cases.MODELS["llama-3-8b"]
    found = []
    for format in formats:
        for tags, rows in (
            (cases.CUDA, (1, 16, 64, 8192)),
            (cases.CPU, (1, 16, 256) if differentiable else ()),
        ):
            found += [
                _case(
                    f"llama-3-8b-down_{T}",
                    format,
                    T,
                    model.hidden,
                    model.inner,
                    tags=tags,
                    differentiable=differentiable,
                )
                for T in rows
            ]
    return found


_CASES = (
    *(_case("aligned", format, 5, 24, 64, bias=True) for format in ("nf4", "nvfp4", "block_fp8")),
    *(
        _case("three_dimensions", format, 6, 20, 32, lead=(2, 3))
        for format in ("nf4", "nvfp4", "block_fp8")
    ),
    *(_case("ragged", format, 7, 19, 33) for format in ("nf4", "nvfp4", "block_fp8")),
    *(
        _case("two_scales", format, 3, 20, 192, bias=True)
        for format in ("nf4 nested", "nvfp4", "block_fp8")
    ),
    _case("small_blocks", "block_fp8 16", 4, 40, 48),
    _case("many_rows", "nf4", 67, 12, 64, bias=True),
    _case("no_rows", "nf4", 0, 8, 64),
    _case("no_rows", "nvfp4", 0, 8, 16),
    _case("no_outputs", "nf4", 4, 0, 64),
    *_timed(("nf4", "nvfp4", "block_fp8")),
)

QUANTIZED_LINEAR = Op(
    "quantized_linear",
    quantized_linear,
    quantized_linear_eager,
    (
        Implementation(
            "triton",
            _triton,
            platform.no_triton,
            gate=_kernels("gate"),
            tunables=_kernels("few_rows"),
        ),
        Implementation("cpp", _cpp, platform.no_cpp, ("cpu",), (torch.float32, torch.bfloat16)),
    ),
    _CASES,
)

# x is not differentiated in these cases: finite differences of a step function are not its
# gradient.
FP8_LINEAR = Op(
    "fp8_linear",
    fp8_linear,
    fp8_linear_eager,
    (Implementation("triton", _fp8_triton, _no_fp8, tunables=_kernels("fp8")),),
    (
        *(
            _case(name, "block_fp8", T, N, K, bias, lead, differentiable=False)
            for name, T, N, K, bias, lead in (
                ("aligned", 5, 24, 64, True, None),
                ("ragged", 7, 19, 33, False, None),
                ("two_scales", 3, 136, 272, True, None),
                ("three_dimensions", 6, 20, 32, False, (2, 3)),
                ("no_rows", 0, 8, 16, False, None),
            )
        ),
        *_timed(("block_fp8",), differentiable=False),
    ),
)
