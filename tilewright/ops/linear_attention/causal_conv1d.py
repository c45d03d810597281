"""The causal depthwise convolution of linear attention: each channel's own W taps over the last W
tokens.

    y[t, c] = act(b[c] + sum_j w[c, j] x[t - (W - 1) + j, c])

Shapes: B = batch, S = positions, C = channels, W = taps. x is 0 before the start of its sequence.
"""

from __future__ import annotations

import functools

import torch

from tilewright.core import checks
from tilewright.core.library import from_kernels
from tilewright.core.registry import FLOATS, Case, Cost, Op, in_cpp, in_triton
from tilewright.core.takes import takes
from tilewright.kernels.linear_attention.operators import convolve, convolve_backward
from tilewright.ops import cases


@checks.autocast("products", "x", "weight", "bias")
@takes(
    "C >= 1",
    "2 <= W <= 8",
    "bounds >= 2",
    "x: cu_seqlens is None or B == 1",
    x="float [B, S, C]",
    weight="float [C, W]",
    bias="weight [C]",
    activation=("silu",),
    cu_seqlens="int32 | int64 [bounds]",
)
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """Causal depthwise convolution: each channel of a sequence with its own 2 to 8 taps, with SiLU
    and isolated packed documents.

    Sums are in float32, and the result is rounded once. On a CPU the gradients of weight and bias
    are summed in float32 over 64 tokens, and in float64 beyond. Differentiable in x, weight and
    bias: with eager any number of times, else once; the sums are recomputed in backward. Under
    torch.autocast x, weight and bias are cast to its dtype, as by F.conv1d. Deterministic. A NaN or
    infinity in a token reaches only the W - 1 tokens after it, in its own channel and document.

    Args:
        x: [B, S, C] fp32 | bf16 | fp16 (fp64 with eager), any strides. (The transpose of what
            F.conv1d takes.)
        weight: [C, W], W from 2 to 8, any floating dtype: `conv1d.weight.squeeze(1)` of a depthwise
            nn.Conv1d. The last tap is the token's own.
        bias: [C] in weight's dtype, or None.
        activation: "silu", or None.
        cu_seqlens: int32 or int64 [n + 1], 0 .. S, non-decreasing: packed documents of a sequence
            with B = 1, which never see each other. Values are checked on a CPU.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        [B, S, C] in x's dtype.

    Raises:
        TypeError, ValueError: invalid arguments.
        ImplementationUnavailable: a named implementation that cannot run here.

    Example:
        >>> x = torch.tensor([[[1.0], [2.0], [3.0]]])
        >>> causal_conv1d(x, torch.tensor([[10.0, 1.0]])).flatten()
        tensor([ 1., 12., 23.])

    Source: arXiv:2312.00752 (Mamba), as in transformers' Qwen3NextGatedDeltaNet.
    """
    if cu_seqlens is not None:
        cu_seqlens = checks.cu_seqlens(cu_seqlens, x.shape[1], wait=cu_seqlens.is_meta)
    fn = CAUSAL_CONV1D.pick(implementation, x)
    return fn(x, weight, bias, cu_seqlens, activation == "silu")


# ---- the definition


def causal_conv1d_eager(x, weight, bias, cu_seqlens, silu):
    acc = torch.promote_types(x.dtype, torch.float32)
    S, W = x.shape[1], weight.shape[1]
    wide, w = torch.nn.functional.pad(x.to(acc), (0, 0, W - 1, 0)), weight.to(acc)
    t = torch.arange(S, device=x.device)
    begin = torch.zeros_like(t)
    if cu_seqlens is not None:
        begin = cu_seqlens[torch.searchsorted(cu_seqlens, t, right=True) - 1]
    y = wide.new_zeros(()) if bias is None else bias.to(acc)
    for j in range(W):
        at = t - (W - 1) + j
        y = y + w[:, j] * torch.where((at >= begin)[:, None], wide[:, j : j + S], 0.0)
    return (torch.nn.functional.silu(y) if silu else y).to(x.dtype)


# ---- fused implementations


@convolve.formula()
def _backward(op, dy, x, weight, bias, cu_seqlens, silu):
    dx, dweight, dbias = op(dy.contiguous(), x, weight, bias, cu_seqlens, silu)
    return {"x": dx, "weight": dweight, "bias": dbias}


def _fused(operator, *dtypes):
    """dtypes: those of weight and bias that the kernels read, which compute in float32."""

    def run(x, weight, bias, cu_seqlens, silu):
        if weight.dtype not in dtypes:
            weight, bias = weight.float(), None if bias is None else bias.float()
        bias = None if bias is None else bias.contiguous()
        return operator(x, weight.contiguous(), bias, cu_seqlens, silu)

    return run


@functools.cache
def _triton():
    from tilewright.kernels.linear_attention import causal_conv1d_triton as k

    backward = convolve_backward.define("causal_conv1d_triton_backward", k.backward)
    return _fused(convolve.define("causal_conv1d_triton", k.forward, backward), *FLOATS)


@functools.cache
def _cpp():
    backward = convolve_backward.adopt("causal_conv1d_cpp_backward")
    operator = convolve.adopt("causal_conv1d_cpp", backward)
    return _fused(operator, torch.float32, torch.bfloat16)


# ---- cases


def _case(
    name,
    B,
    S,
    C,
    W,
    *,
    bias=False,
    documents=None,
    strided=False,
    activation: str | None = "silu",
    tags=cases.CONTRACT,
):
    def make(device, dtype, seed):
        new = {"device": device, "dtype": dtype, "gen": cases.generator(device, seed)}
        if strided:  # rows of a wider tensor, and a weight whose taps are not contiguous
            x = cases.randn(B, S, 3 * C, **new, requires_grad=False)[..., C : 2 * C]
            weight = cases.randn(W, C, **new, requires_grad=False).mT
        else:
            x = cases.randn(B, S, C, **new, requires_grad=False)
            weight = cases.randn(C, W, **new, requires_grad=False)
        kw = {"x": x.requires_grad_(), "weight": weight.requires_grad_()}
        if bias:
            kw["bias"] = cases.randn(C, **new)
        if documents:
            kw["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32, device=device)
        return {**kw, "activation": activation}

    def cost(itemsize):  # forward: x in, y out; backward: x, dy in, dx out
        n = B * S * C
        return Cost(2 * n * itemsize, 3 * n * itemsize, 2 * W * n, 6 * W * n)

    return Case(name, make, cost, tags)


def _atol(dtype, kwargs, name):
    """Gradients of weight and bias are sums over all tokens. Where upstream gradients are equal,
    the twin's order may be exact by chance; a tile's rows, added one by one, are 3 eps off at 140
    rows.
    """
    wide = dtype == torch.float32 and name in ("grad weight", "grad bias")
    return 8 * torch.finfo(dtype).eps if wide else None


# The channels of Qwen3-Next-80B-A3B: 16 heads of q, 16 of k and 32 of v, each 128 wide.
_CHANNELS = 8192
CAUSAL_CONV1D = Op(
    "causal_conv1d",
    causal_conv1d,
    causal_conv1d_eager,
    (
        in_triton(
            _triton,
            tunables=from_kernels("linear_attention.causal_conv1d_triton", "TUNABLES"),
            gate=from_kernels("linear_attention.causal_conv1d_triton", "gate"),
        ),
        in_cpp(_cpp),
    ),
    (
        _case("ragged", 2, 37, 20, 4, bias=True),
        _case("documents", 1, 41, 24, 4, documents=(0, 1, 6, 6, 39, 41)),
        _case("no_activation", 3, 70, 17, 3, bias=True, activation=None),
        _case("one_token", 2, 1, 32, 4),
        _case("no_tokens", 1, 0, 16, 4, bias=True),
        _case("eight_taps", 1, 19, 8, 8, bias=True, documents=(0, 3, 19)),
        _case("strided", 2, 11, 12, 2, strided=True),
        _case("qwen3-next-80b-a3b", 1, cases.TOKENS["cuda"] // 2, _CHANNELS, 4, tags=cases.CUDA),
        _case("qwen3-next-80b-a3b", 1, cases.TOKENS["cpu"], _CHANNELS, 4, tags=cases.CPU),
        _case("big", 2, 2**17 + 1, 8192, 4, tags=cases.BIG),
    ),
    atol=_atol,
    goals=(*cases.near_copy(92, "forward"), *cases.near_copy(85, "backward")),
)
