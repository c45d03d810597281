"""Three ops with their results in FP8, as the product behind them takes its inputs: block-scaled in
blocks of 1 x 128, or MXFP8. The bfloat16 result is never written to memory, or written in the same
pass.

Each gives, byte for byte, what the op and `quantize_block_fp8(..., block=(1, 128))` or
`quantize_mxfp8` give one after
the other in the same implementation: the result is rounded to the input's dtype before it is
quantised.
"""

from __future__ import annotations

import math

import torch

from tilewright import platform
from tilewright.ops import _checks, activation, block_fp8, cases, mxfp8, quantize
from tilewright.ops._library import adopt, define
from tilewright.ops.block_fp8 import BlockFP8
from tilewright.ops.mxfp8 import MXFP8
from tilewright.ops.rmsnorm import check_norm, check_residual, norm_case, rmsnorm_eager, sum_eager
from tilewright.registry import Case, Cost, Implementation, Op

BLOCK = (1, 128)
FORMATS = ("block_fp8", "mxfp8")


@_checks.autocast("inputs")
def silu_mul_quantize(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    seed: int | None = None,
    format: str = "block_fp8",
    transpose: bool = False,
    implementation: str = "auto",
) -> BlockFP8 | MXFP8 | tuple[MXFP8, MXFP8]:
    """silu(gate) * up in FP8: what a down projection in FP8 multiplies.

    gate, up: [..., I] as in `silu_mul`, or gate [..., 2 I] = [gate; up] alone. Finite, and so must
    the product be.
    seed: as in `quantize_block_fp8`.
    format: "block_fp8", with a float32 scale for each 1 x 128 block, or "mxfp8", with a power of
        two for each 32 elements of a row.
    transpose: returns (q, that of the product's transpose), bit for bit as `quantize_mxfp8` does,
    from one read of gate
        and up (eager: two of the product): what the gradient of the projection's weight multiplies.
        Only in MXFP8, of whose transpose a program holds the blocks, 32 rows; the result has 2
        dimensions or more.
    implementation: "auto", or one of triton, cpp, eager.

    Returns a BlockFP8 or MXFP8 of shape [..., I], of gate's dtype. In float32; the product is
    rounded to gate's dtype, then quantised as by `quantize_block_fp8` or `quantize_mxfp8`: byte for
    byte what the two give in the same implementation.
    Not differentiable: for inference, and for a forward whose backward recomputes `silu_mul`.
    Deterministic. Raises TypeError or ValueError for arguments that do not fit, ValueError for a
    product that is not finite (on CUDA, where looking would wait for the device, such a block's
    scale is not finite), ImplementationUnavailable for a named implementation that cannot run here.
    """
    activation._validate(gate, up)
    quantize.source(gate, "gate")
    quantize.seed(seed)
    _checks.choice("format", format, FORMATS)
    shape = gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)
    if not isinstance(transpose, bool):
        raise TypeError(f"transpose must be a bool, got {transpose!r}")
    if transpose and format != "mxfp8":
        raise ValueError(
            f"transpose must be False with format {format!r}: no program holds 128 rows; quantise "
            "silu_mul's result by quantize_block_fp8 with transpose=True"
        )
    if transpose and len(shape) < 2:
        raise ValueError(
            f"gate must have at least 2 dimensions for a transpose, got shape {list(gate.shape)}"
        )
    gate, up = gate.detach(), None if up is None else up.detach()
    found = SILU_MUL_QUANTIZE.pick(implementation, gate)(
        gate, up, seed, format == "mxfp8", transpose
    )
    q = _made(*found[:2], shape, gate.dtype, "silu(gate) * up", format)
    if not transpose:
        return q
    return q, mxfp8.blocks_of(
        *found[2:], (*shape[:-2], shape[-1], shape[-2]), gate.dtype, looked=True
    )


@_checks.autocast("norm", "x")
def rmsnorm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    offset: float = 0.0,
    cast: str = "llama",
    seed: int | None = None,
    return_normalised: bool = False,
    format: str = "block_fp8",
    implementation: str = "auto",
) -> BlockFP8 | MXFP8 | tuple[BlockFP8 | MXFP8, torch.Tensor]:
    """rmsnorm(x, weight) in FP8: what a projection in FP8 multiplies.

    x, weight, eps, bias, offset, cast: as in `rmsnorm`; the normalised rows must be finite.
    seed: as in `quantize_block_fp8`.   format: as in `silu_mul_quantize`.
    return_normalised: also return the normalised rows in x's dtype, for what is not in FP8.
    implementation: "auto", or one of triton, cpp, eager.

    Returns a BlockFP8 or MXFP8 of x's shape and dtype, or (it, normalised [..., D]). Sums in
    float32 or wider; the normalised row is rounded to x's dtype, then quantised as by
    `quantize_block_fp8` or `quantize_mxfp8`: byte for byte what the two give in the same
    implementation (Triton: with the launch constants of rmsnorm's, which decide the order of sums).
    There is no transpose of it in the same pass: a program holds a row, and a block of the
    transpose 32 of them; `quantize_mxfp8` of the normalised rows, returned or made again, gives
    one.
    Not differentiable, normalised neither: for inference, and for a forward whose backward is
    `rmsnorm`'s. Deterministic. Raises TypeError or ValueError for arguments that do not fit,
    ValueError for normalised rows that are not finite (on CUDA, where looking would wait for the
    device, such a block's scale is not finite), ImplementationUnavailable for a named
    implementation that cannot run here.
    """
    check_norm(x, weight, bias, eps, offset, cast)
    _check_options(x, seed, return_normalised, format)
    x, weight, bias = x.detach(), weight.detach(), None if bias is None else bias.detach()
    run = RMSNORM_QUANTIZE.pick(implementation, x)
    data, inverse, y, _ = run(
        x, None, weight, bias, eps, offset, cast, seed, return_normalised, format == "mxfp8"
    )
    q = _made(data, inverse, x.shape, x.dtype, "the normalised x", format)
    return (q, y.view(x.shape)) if return_normalised else q


@_checks.autocast("norm", "x", "residual")
def add_rmsnorm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    offset: float = 0.0,
    cast: str = "llama",
    seed: int | None = None,
    return_normalised: bool = False,
    format: str = "block_fp8",
    implementation: str = "auto",
) -> tuple[BlockFP8 | MXFP8 | torch.Tensor, ...]:
    """(rmsnorm(x + residual) in FP8, x + residual) in one pass over memory: the pre-norm
    transformer's residual step before a projection in FP8.

    residual: as in `add_rmsnorm`: x's shape, x's dtype or float32; the sum is rounded to its dtype
    and returned in it.
    Everything else as in `rmsnorm_quantize`: byte for byte what `add_rmsnorm` and the quantisation
    give one after the other in the same implementation. Returns (BlockFP8 or MXFP8 of x's shape and
    dtype, sum [..., D]), and with return_normalised the normalised rows in x's dtype as a third.
    Not differentiable, the sum neither. Deterministic. Raises as `rmsnorm_quantize`.
    """
    check_norm(x, weight, bias, eps, offset, cast)
    check_residual(x, residual)
    _check_options(x, seed, return_normalised, format)
    x, residual, weight = x.detach(), residual.detach(), weight.detach()
    bias = None if bias is None else bias.detach()
    run = ADD_RMSNORM_QUANTIZE.pick(implementation, x)
    data, inverse, y, total = run(
        x, residual, weight, bias, eps, offset, cast, seed, return_normalised, format == "mxfp8"
    )
    q = _made(data, inverse, x.shape, x.dtype, "the normalised x + residual", format)
    return (
        (q, total.view(x.shape), y.view(x.shape)) if return_normalised else (q, total.view(x.shape))
    )


def _check_options(x, seed, return_normalised, format):
    quantize.source(x)
    quantize.seed(seed)
    if not isinstance(return_normalised, bool):
        raise TypeError(f"return_normalised must be a bool, got {return_normalised!r}")
    _checks.choice("format", format, FORMATS)


def _made(data, inverse, shape, dtype, what, format):
    """Of codes [rows, columns] and inverse scales [rows, blocks]."""
    rows = shape[-2] if len(shape) > 1 else 1
    inverse = inverse.view(math.prod(shape[:-2]), rows, inverse.shape[-1])
    if format == "mxfp8":
        return mxfp8.blocks_of(data, inverse, tuple(shape), dtype, what)
    return block_fp8.blocks_of(data, inverse, tuple(shape), BLOCK, dtype, what)


# ---- the definitions: the two, one after the other


def _quantised(y, seed, mx):
    found = (
        mxfp8.quantize_eager(y.unsqueeze(0), seed)
        if mx
        else block_fp8.quantize_eager(y.unsqueeze(0), *BLOCK, seed)
    )
    return tuple(t[0] for t in found)


def silu_mul_quantize_eager(gate, up, seed, mx, transpose):
    y = activation.act_mul_eager(gate, up)
    return (
        mxfp8.quantize_eager(quantize.as_3d(y), seed, True)
        if transpose
        else _quantised(_flat(y), seed, mx)
    )


def rmsnorm_quantize_eager(x, residual, weight, bias, eps, offset, cast, seed, keep, mx):
    total = x if residual is None else sum_eager(x, residual)
    y = _flat(rmsnorm_eager(total, weight, bias, eps, offset, cast).to(x.dtype))
    return *_quantised(y, seed, mx), y, total


def _flat(t):
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1]).contiguous()


# ---- fused implementations

_loaded: dict[str, tuple] = {}


def _fake_inverse(x, rows, columns, mx):
    if mx:
        return x.new_empty((rows, (columns + 31) // 32), dtype=torch.uint8)
    return x.new_empty((rows, (columns + 127) // 128), dtype=torch.float32)


def _fake_silu_mul(gate, up, seed, mx):
    return gate.new_empty(gate.shape, dtype=torch.uint8), _fake_inverse(gate, *gate.shape, mx)


def _fake_silu_mul_both(gate, up, rows, seed):
    return mxfp8.fake_both(
        gate.new_empty((gate.shape[0] // max(rows, 1), rows, gate.shape[1])), seed
    )


def _fake_rmsnorm(x, residual, weight, bias, eps, offset, round_xhat, seed, keep, mx):
    D = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    total = x.new_empty((0, D)) if residual is None else residual.new_empty((rows, D))
    return (
        x.new_empty((rows, D), dtype=torch.uint8),
        _fake_inverse(x, rows, D, mx),
        x.new_empty((rows if keep else 0, D)),
        total,
    )


def _register(silu_mul, silu_mul_both, rmsnorm, dtypes=_checks.ACCEPTED):
    """dtypes: what rmsnorm's kernels read weight and bias in; others come to them as float32."""

    def run_silu_mul(gate, up, seed, mx, transpose):
        rows = gate.shape[-2] if gate.dim() > 1 else 1
        if up is None:
            both = activation._rows(gate)
            gate, up = both.chunk(2, -1) if both.shape[-1] else (both, both)
        gate, up = activation._rows(gate), activation._rows(up)
        return silu_mul_both(gate, up, rows, seed) if transpose else silu_mul(gate, up, seed, mx)

    def run_rmsnorm(x, residual, weight, bias, eps, offset, cast, seed, keep, mx):
        if weight.dtype not in dtypes:  # bias has weight's dtype
            weight, bias = weight.float(), None if bias is None else bias.float()
        # The llama cast rounds to the dtype that is normalised, which for a float32 residual stream
        # is no rounding.
        round_xhat = cast == "llama" and (residual is None or residual.dtype == x.dtype)
        return rmsnorm(
            x.contiguous(),
            None if residual is None else residual.contiguous(),
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            eps,
            offset,
            round_xhat,
            seed,
            keep,
            mx,
        )

    return run_silu_mul, run_rmsnorm


def _triton():
    if "triton" not in _loaded:
        from tilewright.kernels import fused_quantize_triton as k

        _loaded["triton"] = _register(
            define("silu_mul_triton_quantize", k.silu_mul_quantize, _fake_silu_mul),
            define("silu_mul_triton_mxfp8_both", k.silu_mul_mxfp8_both, _fake_silu_mul_both),
            define("rmsnorm_triton_quantize", k.rmsnorm_quantize, _fake_rmsnorm),
        )
    return _loaded["triton"]


def _cpp():
    if "cpp" not in _loaded:
        _loaded["cpp"] = _register(
            adopt("silu_mul_cpp_quantize", _fake_silu_mul),
            adopt("silu_mul_cpp_mxfp8_both", _fake_silu_mul_both),
            adopt("rmsnorm_cpp_quantize", _fake_rmsnorm),
            (torch.float32, torch.bfloat16),
        )
    return _loaded["cpp"]


def _gate(which):
    def specs():
        from tilewright.kernels import fused_quantize_triton

        return getattr(fused_quantize_triton, which)()

    return specs


# ---- cases


def _without_gradients(kwargs):
    return {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}


def _silu_case(name, rows, inner, *, tags=cases.CONTRACT, options=(), **layout):
    n = math.prod(rows) * inner
    case = activation._case(name, rows, inner, **layout)
    results = 1 + dict(options).get("transpose", False)
    return Case(
        name,
        lambda *a: {**_without_gradients(case.make(*a)), **dict(options)},
        lambda itemsize: Cost(2 * n * itemsize + int(results * n * 8.25 / 8), 0, 5 * n, 0),
        tags,
    )


def _norm_case(name, shape, *, add=False, tags=cases.CONTRACT, options=(), **parameters):
    n, moved = (
        math.prod(shape),
        1 + dict(options).get("return_normalised", False) + 2 * add,
    )  # x, residual, sum
    case = norm_case(name, shape, add=add, **parameters)
    return Case(
        name,
        lambda *a: {**_without_gradients(case.make(*a)), **dict(options)},
        lambda itemsize: Cost(moved * n * itemsize + int(n * 8.25 / 8), 0, 4 * n, 0),
        tags,
    )


def _timed(make, models):
    return [
        make(name, cases.TOKENS[device], cases.MODELS[name], tags)
        for device, tags in (("cuda", cases.CUDA), ("cpu", cases.CPU))
        for name in models
    ]


# A code of e4m3 has 3 bits of mantissa: where the twin's value and another's, a rounding apart, lie
# on two sides of a tie, the codes are neighbours, 1/8 of the smaller apart. In MXFP8 a block's
# largest magnitude may lie so on two sides
# of 448 times a power of two: the scale is then twice the other, and codes are halves. Tests
# compare bytes with the two ops of one implementation.
def _atol(dtype, kwargs):
    return 1.25 if kwargs.get("format") == "mxfp8" else 0.125


MX = ("format", "mxfp8")
SILU_MUL_QUANTIZE = Op(
    "silu_mul_quantize",
    silu_mul_quantize,
    silu_mul_quantize_eager,
    (
        Implementation(
            "triton", lambda: _triton()[0], platform.no_triton, gate=_gate("silu_mul_gate")
        ),
        Implementation(
            "cpp", lambda: _cpp()[0], platform.no_cpp, ("cpu",), (torch.float32, torch.bfloat16)
        ),
    ),
    (
        _silu_case("ragged", (3, 7), 100),
        _silu_case("packed", (5, 3), 300, packed=True),
        _silu_case("strided", (4, 3), 36, strided=True),
        _silu_case("no_rows", (0,), 64, packed=True),
        _silu_case("no_columns", (3,), 0),
        _silu_case("wide", (2,), 1200, packed=True),
        _silu_case("vector", (), 130),
        _silu_case("random", (3,), 140, options=[("seed", 3)]),
        _silu_case("mxfp8", (3, 7), 100, options=[MX]),
        _silu_case("mxfp8_transpose", (2, 33), 36, packed=True, options=[MX, ("transpose", True)]),
        *_timed(
            lambda name, tokens, model, tags: _silu_case(
                name, (tokens,), model.inner, packed=True, tags=tags
            ),
            ("qwen3-8b", "deepseek-v3"),
        ),
        *_timed(
            lambda name, tokens, model, tags: _silu_case(
                f"{name}-mxfp8", (tokens,), model.inner, packed=True, tags=tags, options=[MX]
            ),
            ("qwen3-8b",),
        ),
        *_timed(
            lambda name, tokens, model, tags: _silu_case(
                f"{name}-mxfp8-transpose",
                (tokens,),
                model.inner,
                packed=True,
                tags=tags,
                options=[MX, ("transpose", True)],
            ),
            ("deepseek-v3",),
        ),
    ),
    atol=_atol,
    goals=cases.near_copy(90, "forward"),
)
RMSNORM_QUANTIZE = Op(
    "rmsnorm_quantize",
    rmsnorm_quantize,
    rmsnorm_quantize_eager,
    (
        Implementation(
            "triton", lambda: _triton()[1], platform.no_triton, gate=_gate("rmsnorm_gate")
        ),
        Implementation(
            "cpp", lambda: _cpp()[1], platform.no_cpp, ("cpu",), (torch.float32, torch.bfloat16)
        ),
    ),
    (
        _norm_case("ragged", (3, 7, 100)),
        _norm_case("odd", (5, 257), offset=1.0, cast="gemma"),
        _norm_case(
            "bias", (2, 3, 64), bias=True, cast="none", options=[("return_normalised", True)]
        ),
        _norm_case("qk_norm", (2, 5, 4, 128), weight_shape=(4, 128)),
        _norm_case("fp32_weight", (6, 96), mixed=True),
        _norm_case("no_rows", (0, 64)),
        _norm_case("vector", (130,)),
        _norm_case("random", (4, 300), options=[("seed", 9)]),
        _norm_case("wide", (2, 16512), options=[("return_normalised", True)]),
        _norm_case("mxfp8", (3, 7, 100), options=[MX]),
        *_timed(
            lambda name, tokens, model, tags: _norm_case(name, (tokens, model.hidden), tags=tags),
            ("qwen3-8b", "deepseek-v3"),
        ),
        *_timed(
            lambda name, tokens, model, tags: _norm_case(
                f"{name}-mxfp8", (tokens, model.hidden), tags=tags, options=[MX]
            ),
            ("qwen3-8b",),
        ),
    ),
    atol=_atol,
    goals=cases.near_copy(90, "forward"),
)
ADD_RMSNORM_QUANTIZE = Op(
    "add_rmsnorm_quantize",
    add_rmsnorm_quantize,
    rmsnorm_quantize_eager,
    (
        Implementation(
            "triton", lambda: _triton()[1], platform.no_triton, gate=_gate("add_rmsnorm_gate")
        ),
        Implementation(
            "cpp", lambda: _cpp()[1], platform.no_cpp, ("cpu",), (torch.float32, torch.bfloat16)
        ),
    ),
    (
        _norm_case("ragged", (3, 7, 100), add=True),
        _norm_case(
            "bias",
            (2, 3, 64),
            add=True,
            bias=True,
            cast="none",
            options=[("return_normalised", True)],
        ),
        _norm_case("fp32_residual", (6, 96), add=True, mixed=True),
        _norm_case("no_rows", (0, 64), add=True),
        _norm_case("random", (4, 300), add=True, options=[("seed", 9)]),
        _norm_case("wide", (2, 16512), add=True),
        _norm_case(
            "mxfp8",
            (5, 257),
            add=True,
            offset=1.0,
            cast="gemma",
            options=[MX, ("return_normalised", True)],
        ),
        *_timed(
            lambda name, tokens, model, tags: _norm_case(
                name, (tokens, model.hidden), add=True, tags=tags
            ),
            ("qwen3-8b",),
        ),
        *_timed(
            lambda name, tokens, model, tags: _norm_case(
                f"{name}-mxfp8", (tokens, model.hidden), add=True, tags=tags, options=[MX]
            ),
            ("qwen3-8b",),
        ),
    ),
    atol=_atol,
    goals=cases.near_copy(90, "forward"),
)
