"""Two ops with their results in block-scaled FP8, 1 x 128, as the product behind them takes its inputs: the bfloat16
result is never written to memory, or written in the same pass.

Each gives, byte for byte, what the op and `quantize_block_fp8(..., block=(1, 128))` give one after the other in the
same implementation: the result is rounded to the input's dtype before it is quantised.
"""

from __future__ import annotations

import math

import torch

from tilewright import platform
from tilewright.ops import _checks, activation, block_fp8, cases, quantize
from tilewright.ops._library import adopt, define
from tilewright.ops.block_fp8 import BlockFP8
from tilewright.ops.rmsnorm import _case as rmsnorm_case
from tilewright.ops.rmsnorm import _validate as check_rmsnorm
from tilewright.ops.rmsnorm import rmsnorm_eager
from tilewright.registry import Case, Cost, Implementation, Op

BLOCK = (1, 128)


@_checks.autocast("inputs")
def silu_mul_quantize(gate: torch.Tensor, up: torch.Tensor | None = None, *, seed: int | None = None,
                      implementation: str = "auto") -> BlockFP8:
    """silu(gate) * up in FP8 with a scale for each 1 x 128 block: what a down projection in FP8 multiplies.

    gate, up: [..., I] as in `silu_mul`, or gate [..., 2 I] = [gate; up] alone. Finite, and so must the product be.
    seed: as in `quantize_block_fp8`.   implementation: "auto", or one of triton, cpp, eager.

    Returns a BlockFP8 of shape [..., I], of gate's dtype. In float32; the product is rounded to gate's dtype, then
    quantised as by `quantize_block_fp8`: byte for byte what the two give in the same implementation.
    Not differentiable: for inference, and for a forward whose backward recomputes `silu_mul`. Deterministic.
    Raises TypeError or ValueError for arguments that do not fit, ValueError for a product that is not finite (on CUDA,
    where looking would wait for the device, such a block's scale_inv is not finite), ImplementationUnavailable for a
    named implementation that cannot run here.
    """
    activation._validate(gate, up)
    quantize.source(gate, "gate")
    quantize.seed(seed)
    gate, up = gate.detach(), None if up is None else up.detach()
    shape = gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)
    data, inverse = SILU_MUL_QUANTIZE.pick(implementation, gate)(gate, up, seed)
    return _made(data, inverse, shape, gate.dtype, "silu(gate) * up")


@_checks.autocast("norm", "x")
def rmsnorm_quantize(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, bias: torch.Tensor | None = None,
                     offset: float = 0.0, cast: str = "llama", seed: int | None = None,
                     return_normalised: bool = False,
                     implementation: str = "auto") -> BlockFP8 | tuple[BlockFP8, torch.Tensor]:
    """rmsnorm(x, weight) in FP8 with a scale for each 1 x 128 block: what a projection in FP8 multiplies.

    x, weight, eps, bias, offset, cast: as in `rmsnorm`; the normalised rows must be finite.
    seed: as in `quantize_block_fp8`.   implementation: "auto", or one of triton, cpp, eager.
    return_normalised: also return the normalised rows in x's dtype, for what is not in FP8.

    Returns a BlockFP8 of x's shape and dtype, or (it, normalised [..., D]). Sums in float32 or wider; the normalised
    row is rounded to x's dtype, then quantised as by `quantize_block_fp8`: byte for byte what the two give in the same
    implementation (Triton: with the launch constants of rmsnorm's, which decide the order of sums).
    Not differentiable, normalised neither: for inference, and for a forward whose backward is `rmsnorm`'s.
    Deterministic.
    Raises TypeError or ValueError for arguments that do not fit, ValueError for normalised rows that are not finite (on
    CUDA, where looking would wait for the device, such a block's scale_inv is not finite), ImplementationUnavailable
    for a named implementation that cannot run here.
    """
    check_rmsnorm(x, weight, bias, eps, offset, cast)
    quantize.source(x)
    quantize.seed(seed)
    if not isinstance(return_normalised, bool):
        raise TypeError(f"return_normalised must be a bool, got {return_normalised!r}")
    x, weight, bias = x.detach(), weight.detach(), None if bias is None else bias.detach()
    run = RMSNORM_QUANTIZE.pick(implementation, x)
    data, inverse, y = run(x.contiguous(), weight, bias, eps, offset, cast, seed, return_normalised)
    q = _made(data, inverse, x.shape, x.dtype, "the normalised x")
    return (q, y.view(x.shape)) if return_normalised else q


def _made(data, inverse, shape, dtype, what):
    """Of codes [rows, columns] and inverse scales [rows, blocks]."""
    rows = shape[-2] if len(shape) > 1 else 1
    return block_fp8.blocks_of(data, inverse.view(math.prod(shape[:-2]), rows, inverse.shape[-1]), tuple(shape), BLOCK,
                               dtype, what)


# ---- the definitions: the two, one after the other

def _quantised(y, seed):
    data, inverse = block_fp8.quantize_eager(y.unsqueeze(0), *BLOCK, seed)
    return data[0], inverse[0]


def silu_mul_quantize_eager(gate, up, seed):
    return _quantised(_flat(activation.act_mul_eager(gate, up)), seed)


def rmsnorm_quantize_eager(x, weight, bias, eps, offset, cast, seed, keep):
    y = _flat(rmsnorm_eager(x, weight, bias, eps, offset, cast))
    return *_quantised(y, seed), y


def _flat(t):
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1]).contiguous()


# ---- fused implementations

_loaded: dict[str, tuple] = {}


def _fake_silu_mul(gate, up, seed):
    rows, columns = gate.shape
    return (gate.new_empty((rows, columns), dtype=torch.uint8),
            gate.new_empty((rows, (columns + 127) // 128), dtype=torch.float32))


def _fake_rmsnorm(x, weight, bias, eps, offset, round_xhat, seed, keep):
    D = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    return (x.new_empty((rows, D), dtype=torch.uint8), x.new_empty((rows, (D + 127) // 128), dtype=torch.float32),
            x.new_empty((rows if keep else 0, D)))


def _register(silu_mul, rmsnorm, dtypes=_checks.ACCEPTED):
    """dtypes: what rmsnorm's kernels read weight and bias in; others come to them as float32."""

    def run_silu_mul(gate, up, seed):
        if up is None:
            both = activation._rows(gate)
            gate, up = both.chunk(2, -1) if both.shape[-1] else (both, both)
        return silu_mul(activation._rows(gate), activation._rows(up), seed)

    def run_rmsnorm(x, weight, bias, eps, offset, cast, seed, keep):
        if weight.dtype not in dtypes:   # bias has weight's dtype
            weight, bias = weight.float(), None if bias is None else bias.float()
        return rmsnorm(x, weight.contiguous(), None if bias is None else bias.contiguous(), eps, offset,
                       cast == "llama", seed, keep)

    return run_silu_mul, run_rmsnorm


def _triton():
    if "triton" not in _loaded:
        from tilewright.kernels import fused_quantize_triton as k

        _loaded["triton"] = _register(define("silu_mul_triton_quantize", k.silu_mul_quantize, _fake_silu_mul),
                                      define("rmsnorm_triton_quantize", k.rmsnorm_quantize, _fake_rmsnorm))
    return _loaded["triton"]


def _cpp():
    if "cpp" not in _loaded:
        _loaded["cpp"] = _register(adopt("silu_mul_cpp_quantize", _fake_silu_mul),
                                   adopt("rmsnorm_cpp_quantize", _fake_rmsnorm), (torch.float32, torch.bfloat16))
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
    return Case(name, lambda *a: {**_without_gradients(case.make(*a)), **dict(options)},
                lambda itemsize: Cost(2 * n * itemsize + int(n * 8.25 / 8), 0, 5 * n, 0), tags)


def _norm_case(name, shape, *, tags=cases.CONTRACT, options=(), **parameters):
    n, keep = math.prod(shape), dict(options).get("return_normalised", False)
    case = rmsnorm_case(name, shape, **parameters)
    return Case(name, lambda *a: {**_without_gradients(case.make(*a)), **dict(options)},
                lambda itemsize: Cost((1 + keep) * n * itemsize + int(n * 8.25 / 8), 0, 4 * n, 0), tags)


def _timed(make, models):
    return [make(name, cases.TOKENS[device], cases.MODELS[name], tags)
            for device, tags in (("cuda", cases.CUDA), ("cpu", cases.CPU)) for name in models]


# A code of e4m3 has 3 bits of mantissa: where the twin's value and another's, a rounding apart, lie on two sides of a
# tie, the codes are neighbours, 1/8 of the smaller apart. Tests compare bytes with the two ops of one implementation.
ATOL = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 0.125)

SILU_MUL_QUANTIZE = Op(
    "silu_mul_quantize", silu_mul_quantize, silu_mul_quantize_eager,
    (Implementation("triton", lambda: _triton()[0], platform.no_triton, gate=_gate("silu_mul_gate")),
     Implementation("cpp", lambda: _cpp()[0], platform.no_cpp, ("cpu",), (torch.float32, torch.bfloat16))),
    (_silu_case("ragged", (3, 7), 100), _silu_case("packed", (5, 3), 300, packed=True),
     _silu_case("strided", (4, 3), 36, strided=True), _silu_case("no_rows", (0,), 64, packed=True),
     _silu_case("no_columns", (3,), 0), _silu_case("wide", (2,), 1200, packed=True),
     _silu_case("vector", (), 130), _silu_case("random", (3,), 140, options=[("seed", 3)]),
     *_timed(lambda name, tokens, model, tags: _silu_case(name, (tokens,), model.inner, packed=True, tags=tags),
             ("qwen3-8b", "deepseek-v3"))),
    atol=ATOL, goals=cases.near_copy(90, "forward"),
)
RMSNORM_QUANTIZE = Op(
    "rmsnorm_quantize", rmsnorm_quantize, rmsnorm_quantize_eager,
    (Implementation("triton", lambda: _triton()[1], platform.no_triton, gate=_gate("rmsnorm_gate")),
     Implementation("cpp", lambda: _cpp()[1], platform.no_cpp, ("cpu",), (torch.float32, torch.bfloat16))),
    (_norm_case("ragged", (3, 7, 100)), _norm_case("odd", (5, 257), offset=1.0, cast="gemma"),
     _norm_case("bias", (2, 3, 64), bias=True, cast="none", options=[("return_normalised", True)]),
     _norm_case("qk_norm", (2, 5, 4, 128), weight_shape=(4, 128)), _norm_case("fp32_weight", (6, 96), mixed=True),
     _norm_case("no_rows", (0, 64)), _norm_case("vector", (130,)),
     _norm_case("random", (4, 300), options=[("seed", 9)]),
     _norm_case("wide", (2, 16512), options=[("return_normalised", True)]),
     *_timed(lambda name, tokens, model, tags: _norm_case(name, (tokens, model.hidden), tags=tags),
             ("qwen3-8b", "deepseek-v3"))),
    atol=ATOL, goals=cases.near_copy(90, "forward"),
)
