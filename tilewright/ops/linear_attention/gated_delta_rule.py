"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), linear attention whose state forgets
by a gate and is corrected by what it predicts wrongly:

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T
    o_t = scale S_t^T q_t

Shapes: B = batch, S = positions, HK / HV = key / value heads (HV a multiple of HK: key head h
serves the value heads from h HV / HK on), DK / DV = their widths, N = sequences (the packed
documents, or B). A state is [DK, DV] for each sequence and value head.

All implementations compute it a chunk of up to 64 tokens at a time. With G the sum of g from the
start of a chunk, whose state at the start is H, its rows j <= i see each other through

    A_ij = beta_i exp(G_i - G_j) k_i k_j   (j < i)       P_ij = exp(G_i - G_j) q_i k_j   (j <= i)

and all corrections of the chunk solve one triangular system:

    V = (I + A)^-1 beta (v - exp(G) k H)
    o = scale (exp(G) q H + P V)
    H' = exp(G_last) H + sum_j exp(G_last - G_j) k_j V_j^T
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from tilewright.core import checks
from tilewright.core.library import from_kernels
from tilewright.core.registry import Case, Cost, Judged, Op, in_cpp, in_triton
from tilewright.core.takes import takes
from tilewright.kernels.linear_attention.operators import (
    CHUNK,
    L2_EPS,
    DeltaOptions,
    DeltaSaved,
    delta_rule,
    delta_rule_backward,
)
from tilewright.ops import cases


class Request(NamedTuple):
    """The options of a call that an implementation may not support."""

    key_dim: int
    value_dim: int
    float32: bool = False


# Wide: flash-linear-attention's signature, by which transformers calls it.
@checks.autocast("products", "q", "k", "v")
@checks.torch_names(
    query="q",
    key="k",
    value="v",
    use_qk_l2norm_in_kernel="use_qk_l2norm",
    head_first="tensors are [B, S, H, D]",
    chunk_size="a chunk has 64 tokens",
)
@takes(
    "HK >= 1",
    "DK >= 1",
    "HV % HK == 0",
    "DV >= 1",
    "bounds >= 2",
    "q: cu_seqlens is None or B == 1",
    "initial_state: cu_seqlens is not None or N == B",
    "initial_state: N == bounds - 1",
    q="float [B, S, HK, DK]",
    k="q [q]",
    v="q [B, S, HV, DV]",
    g="float [B, S, HV]",
    beta="float [B, S, HV]",
    scale="number (0, inf)",
    cu_seqlens="int32 | int64 [bounds]",
    initial_state="float [N, HV, DK, DV]",
    output_final_state="bool",
    use_qk_l2norm="bool",
)
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    implementation: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Linear attention by the gated delta rule, as in Qwen3-Next, with grouped value heads, initial
    and last states, isolated packed documents.

    Products accumulate in float32, and states are float32. Differentiable in q, k, v, g, beta and
    initial_state: with eager any number of times, else once. Under torch.autocast q, k and v are
    cast to its dtype. Deterministic.

    Keys are expected to have a norm of about 1 (`use_qk_l2norm`), and beta to lie in [0, 1]: where
    beta times a key's squared norm exceeds 2, the state grows without bound. A NaN or infinity in a
    token, and keys whose products overflow, may reach all tokens of its chunk of 64, also the
    earlier ones, and all later tokens, but only in its own head and document; in q it reaches its
    own token alone.

    Args:
        q, k: [B, S, HK, DK] fp32 | bf16 | fp16 (fp64 with eager).
        v: [B, S, HV, DV] in q's dtype.
        g: [B, S, HV], finite logarithms of the decay, at most 0; any floating dtype, used in
            float32 (16 bits would round the decay of distant tokens).
        beta: [B, S, HV], the share of a correction that is written; any floating dtype, used in
            float32.
        scale: a finite number > 0 (in float32); default DK ** -0.5.
        initial_state: [N, HV, DK, DV], any floating dtype, used in float32; None: zeros.
        output_final_state: also returns each sequence's last state.
        use_qk_l2norm: divides each row of q and k by sqrt(its sum of squares + 1e-6), in float32.
        cu_seqlens: int32 or int64 [n + 1], 0 .. S, non-decreasing: packed documents of a sequence
            with B = 1, each of which starts from its own state. Values are checked on a CPU.
        implementation: "auto", or one of triton, cpp, eager.

    Returns:
        (o [B, S, HV, DV] in q's dtype; the last states [N, HV, DK, DV] in float32, or None).

    Raises:
        TypeError, ValueError: invalid arguments.
        ImplementationUnavailable: a named implementation that cannot run here, or that does not
            support these widths.

    Example:
        >>> q = torch.ones(1, 2, 1, 1)  # the second token finds what the first wrote
        >>> g, beta = torch.zeros(1, 2, 1), torch.ones(1, 2, 1)
        >>> o, state = gated_delta_rule(q, q, 3 * q, g, beta, output_final_state=True)
        >>> o.flatten().tolist(), state.flatten().tolist()
        ([3.0, 3.0], [3.0])

    Source: arXiv:2412.06464; chunks and the triangular system: arXiv:2406.06484; conventions as
    in transformers' Qwen3NextGatedDeltaNet.
    """
    if cu_seqlens is not None:
        cu_seqlens = checks.cu_seqlens(cu_seqlens, q.shape[1], wait=cu_seqlens.is_meta)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    DK, DV = q.shape[3], v.shape[3]
    if torch.compiler.is_dynamo_compiling():  # a Request requires constants; int(DK) is none
        DK, DV = len(range(DK)), len(range(DV))
    request = Request(key_dim=DK, value_dim=DV, float32=q.dtype == torch.float32)
    fn = GATED_DELTA_RULE.pick(implementation, q, request)
    o, state = fn(q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm)
    return o, state if output_final_state else None


# ---- the definition


def l2_normalized(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def gated_delta_rule_eager(q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm):
    acc, dtype = torch.promote_types(q.dtype, torch.float32), q.dtype
    (B, S, HK, DK), (HV, DV) = q.shape, v.shape[2:]
    q, k, v, g, beta = (t.to(acc) for t in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = l2_normalized(q), l2_normalized(k)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    start = q.new_zeros(N, HV, DK, DV) if initial_state is None else initial_state.to(acc)
    chunks = _chunks(S, cu_seqlens, q.device)
    q, k = (t.repeat_interleave(HV // HK, 2) for t in (q * scale, k))
    q, k, v, g, beta = (chunks.cut(t) for t in (q, k, v, g[..., None], beta[..., None]))

    G = g.cumsum(-2)
    decay = (G - G.mT).tril().exp().tril()  # [.., i, j]: from token j to token i
    A, P = (beta * k @ k.mT * decay).tril(-1), q @ k.mT * decay
    right = torch.cat((beta * v, beta * G.exp() * k), -1)
    solved = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True)
    U, W = solved.split((DV, DK), -1)
    last = G[..., -1:, :]
    q, k, last = q * G.exp(), k * (last - G).exp(), last.exp()
    H, out, states = start, [], []
    for c in range(q.shape[1]):
        H = chunks.begin(c, H, start)
        V = U[:, c] - W[:, c] @ H
        out.append(q[:, c] @ H + P[:, c] @ V)
        H = last[:, c] * H + k[:, c].mT @ V
        states.append(H)
    o = torch.stack(out, 1) if out else P @ (U - W @ start[:, None])  # empty
    return chunks.join(o, S).to(dtype), chunks.last(states, start)


class _Chunks(NamedTuple):
    """The chunks of [B, S, ..] tensors, each of one document.

    token: [n, 64], S where there is none.   The other fields are set for packed documents, whose
    chunks follow each other.   document: [n].   first: [n], whether a chunk is its document's
    first.   ends: [N], the number of chunks up to the end of each document.
    """

    token: torch.Tensor
    document: torch.Tensor | None = None
    first: torch.Tensor | None = None
    ends: torch.Tensor | None = None

    def cut(self, t: torch.Tensor) -> torch.Tensor:
        """[B, S, H, D] as [B, n, H, 64, D], with zeros where there is no token."""
        return torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 1))[:, self.token].transpose(2, 3)

    def join(self, t: torch.Tensor, S: int) -> torch.Tensor:
        """[B, n, H, 64, D] as [B, S, H, D]."""
        return t.transpose(2, 3).flatten(1, 2)[:, self.token.flatten().argsort()[:S]]

    def begin(self, c: int, H: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """The state at the start of chunk c, from that at the end of the one before."""
        if self.document is None or self.first is None:
            return H
        return torch.where(self.first[c], start[self.document[c]], H[:1])

    def last(self, states: list[torch.Tensor], start: torch.Tensor) -> torch.Tensor:
        """The states at the ends of the sequences, from those at the ends of chunks."""
        if not states:
            return start
        if self.ends is None:
            return states[-1]
        some = self.ends.diff(prepend=self.ends.new_zeros(1)) > 0
        at_ends = torch.cat(states)[(self.ends - 1).clamp_min(0)]
        return torch.where(some[:, None, None, None], at_ends, start)


def _chunks(S: int, cu_seqlens: torch.Tensor | None, device: torch.device) -> _Chunks:
    """Found without reading cu_seqlens on the host."""
    i = torch.arange(CHUNK, device=device)
    if cu_seqlens is None:
        c = torch.arange(-(-S // CHUNK), device=device)
        return _Chunks((c[:, None] * CHUNK + i).clamp_max(S))
    N = cu_seqlens.shape[0] - 1
    counts = (cu_seqlens.diff() + CHUNK - 1) // CHUNK
    ends = counts.cumsum(0)
    # Each document has at most one partial chunk; what is left over has no tokens.
    c = torch.arange((S + N * (CHUNK - 1)) // CHUNK, device=device)
    document = torch.searchsorted(ends, c, right=True).clamp_max(N - 1)
    own = c - (ends - counts)[document]  # which of its document's chunks
    token = cu_seqlens[document][:, None] + own[:, None] * CHUNK + i
    token = torch.where(token < cu_seqlens[document + 1][:, None], token, S)
    return _Chunks(token, document, own == 0, ends)


# ---- fused implementations


@delta_rule.formula(constants=("decay", "solved"), saved=DeltaSaved)
def _backward(op, grad, saved, options):
    if grad.o is None and grad.state is None:
        return {}
    do = torch.zeros_like(saved.v) if grad.o is None else grad.o
    dstate = None if grad.state is None else grad.state.contiguous()
    gradients = op(do.contiguous(), dstate, saved, options)
    return {
        name: getattr(gradients, f"d{name}")
        for name in ("q", "k", "v", "g", "beta", "initial_state")
    }


def _fused(operator):
    def run(q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm):
        if initial_state is not None:
            initial_state = initial_state.float().contiguous()
        options = DeltaOptions(scale, use_qk_l2norm)
        g, beta = g.float().contiguous(), beta.float().contiguous()
        outputs = operator(q, k, v, g, beta, initial_state, cu_seqlens, options)
        return outputs.o, outputs.state

    return run


@functools.cache
def _triton():
    from tilewright.kernels.linear_attention import gated_delta_rule_triton as kernels

    backward = delta_rule_backward.define("gated_delta_rule_triton_backward", kernels.backward)
    return _fused(delta_rule.define("gated_delta_rule_triton", kernels.forward, backward))


@functools.cache
def _cpp():
    backward = delta_rule_backward.adopt("gated_delta_rule_cpp_backward")
    return _fused(delta_rule.adopt("gated_delta_rule_cpp", backward))


WIDTHS = (64, 128, 256)


def _triton_refuses(request: Request) -> str | None:
    for name, width in (("q and k", request.key_dim), ("v", request.value_dim)):
        if width not in WIDTHS:
            return f"takes {name} of width {', '.join(map(str, WIDTHS))}, not {width}"
    if request.float32 and request.key_dim == WIDTHS[-1]:  # a state's columns fill the registers
        return f"takes q and k of width {WIDTHS[-1]} in 16 bits, not in float32"
    return None


# ---- cases


class _Shape(NamedTuple):
    """The sizes of q, k and v."""

    B: int
    S: int
    HK: int
    HV: int
    DK: int
    DV: int


def _case(
    name,
    shape: _Shape,
    *,
    documents=None,
    state=False,
    strided=False,
    tags=cases.CONTRACT,
    **options,
):
    B, S, HK, HV, DK, DV = shape
    N = len(documents) - 1 if documents else B

    def make(device, dtype, seed):
        new = {"device": device, "gen": cases.generator(device, seed)}
        # Rows of a norm of about 1, unless they are normalized; as slices of one projection.
        size = 1.0 if options.get("use_qk_l2norm") else DK**-0.5
        widths, kw = (HK * DK, HK * DK, HV * DV), {}
        rows = cases.randn(B, S, sum(widths), dtype=dtype, **new, requires_grad=False)
        for n, t, H, by in zip(
            "qkv", rows.split(widths, -1), (HK, HK, HV), (size, size, 1.0), strict=True
        ):
            t = (t * by).to(dtype) if not strided else t.mul_(by)
            kw[n] = t.unflatten(-1, (H, -1)).requires_grad_()
        for n in ("g", "beta"):
            t = cases.randn(B, S, HV, dtype=torch.float32, **new, requires_grad=False)
            kw[n] = (-0.2 * t.exp() if n == "g" else t.sigmoid()).requires_grad_()
        if state:
            kw["initial_state"] = cases.randn(
                N, HV, DK, DV, dtype=torch.float32, scale=DK**-0.5, **new
            )
        if documents:
            kw["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32, device=device)
        return {**kw, **options}

    def cost(itemsize):
        # Beside the rows themselves, each chunk's state is written once and read once, forward and
        # in both directions backward.
        rows = itemsize * B * S * (2 * HK * DK + HV * DV)
        states = itemsize * B * -(-S // CHUNK) * HV * DK * DV
        products = 2 * B * S * HV * (2 * CHUNK * (DK + DV) + 3 * DK * DV)
        return Cost(
            rows + itemsize * B * S * HV * DV, 3 * rows + 2 * states, products, 3 * products
        )

    return Case(name, make, cost, tags)


def _atol(dtype, kwargs, name):
    """Operands of products (P, the inverse, V, X, states) are rounded to 16 bits where the twin
    keeps float32: half an eps of each term of a sum, of which the largest element has three or
    four times the root mean square. Measured beyond twice the twin's own: in float16, over seven
    seeds of each case, 2.9 eps in results and 3.3 eps in gradients; in bfloat16, over four, 3.3 and
    3.2 eps. The largest of 2^26 elements, in models, has six times the root mean square. In float32
    gradients are sums in another order, and the inverse is computed by blocks: 14 eps.
    """
    if dtype == torch.float32:
        return 16 * torch.finfo(dtype).eps
    return (8 if kwargs["v"].numel() > 2**20 else 4) * torch.finfo(dtype).eps


def _qwen(S: int) -> _Shape:
    """Heads and widths of Qwen3-Next-80B-A3B."""
    return _Shape(1, S, 16, 32, 128, 128)


# With it, tokens have gradients from results as large as from the last states, which reach only
# the last few of them: no element is far below the root mean square.
_LARGE = 8.0

GATED_DELTA_RULE = Op(
    "gated_delta_rule",
    gated_delta_rule,
    gated_delta_rule_eager,
    (
        in_triton(
            _triton,
            refuses=_triton_refuses,
            tunables=from_kernels("linear_attention.gated_delta_rule_triton", "TUNABLES"),
            gate=from_kernels("linear_attention.gated_delta_rule_triton", "gate"),
        ),
        in_cpp(_cpp),
    ),
    (
        _case("one_token", _Shape(2, 1, 2, 4, 64, 64), use_qk_l2norm=True),
        _case("few", _Shape(1, 5, 1, 2, 64, 64), scale=0.3, output_final_state=True),
        _case(
            "ragged",
            _Shape(2, 70, 1, 2, 64, 64),
            scale=_LARGE,
            state=True,
            output_final_state=True,
            use_qk_l2norm=True,
        ),
        _case(
            "documents",
            _Shape(1, 137, 1, 2, 64, 64),
            scale=_LARGE,
            documents=(0, 1, 66, 66, 137),
            state=True,
            output_final_state=True,
            tags=cases.HOST,
        ),
        _case("strided", _Shape(1, 66, 2, 2, 64, 128), strided=True),
        _case("wide", _Shape(1, 65, 1, 1, 128, 64), use_qk_l2norm=True),
        _case("no_tokens", _Shape(1, 0, 1, 1, 64, 64), state=True, output_final_state=True),
        _case("qwen3-next-80b-a3b", _qwen(8192), tags=cases.CUDA, use_qk_l2norm=True),
        _case("qwen3-next-80b-a3b", _qwen(1024), tags=cases.CPU, use_qk_l2norm=True),
    ),
    atol=_atol,
    # The slack is relative to the root mean square, here up to four times an ordinary element.
    judged=Judged(
        of_sums=True,
        detects={
            torch.bfloat16: {
                "out 0": 0.16,
                "out 1": 0.07,
                "grad q": 0.1,
                "grad k": 0.14,
                "grad v": 0.19,
                "grad g": 0.1,
                "grad beta": 0.14,
                "grad initial_state": 0.07,
            },
            torch.float16: {"grad v": 0.023},
        },
    ),
    requests=(
        Request(key_dim=96, value_dim=128),
        Request(key_dim=128, value_dim=512),
        Request(key_dim=256, value_dim=128, float32=True),
    ),
    eager_reads_host="host",
)
