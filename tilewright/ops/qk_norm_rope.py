"""What stands between a merged projection and attention: RMSNorm over each head of q and k (QK
norm, as in Qwen3), then rotary position embedding of both. v stays where it is.

Shapes: B = batch, S = sequence, D = head width, Hq and Hk = query and key heads, R = rotated
features (the first R of D), P = table rows. qkv [B, S, (Hq + 2 Hk) D] holds a token's heads next to
each other: q's, k's, v's.
"""

from __future__ import annotations

import torch

from tilewright import platform
from tilewright._torch import in_forward_mode, in_transform
from tilewright.ops import _checks, cases
from tilewright.ops._library import define, differentiate, on_its_device, once
from tilewright.ops.rmsnorm import check_options, rmsnorm_eager
from tilewright.ops.rope import (
    check_overwritable,
    check_tables,
    last_contiguous,
    prepare_tables,
    rope_eager,
)
from tilewright.registry import Case, Cost, Implementation, Op

MAX_D = 1024  # the fused kernels hold a head in registers


@_checks.autocast("inputs")
def qk_norm_rope(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    position_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inplace: bool = False,
    implementation: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v) for attention from the result of a merged projection: `rmsnorm` over each head of q
    and of k, `rope` of both, in one pass over memory.

    qkv: [B, S, (Hq + 2 Hk) D] fp32 | bf16 | fp16 (fp64 with eager), D <= 1,024; any strides; the
        fused kernels read a contiguous last dimension in place.
    num_heads, num_kv_heads: Hq and Hk.
    q_weight, k_weight: [D] each, of any float dtype, or both None: then there is no norm.
    eps, offset: as in `rmsnorm`.
    cos, sin, position_ids, cu_seqlens, interleaved, rotary_dim: as in `rope`.
    inplace: write q and k over their part of qkv; the backward of what made qkv must not need it.
        ValueError as for `rope`, and with weights where anything requires a gradient, which is made
        from what would be overwritten.
    Returns q [B, Hq, S, D], k and v [B, Hk, S, D] in qkv's dtype, in the order [B, S, H, D] in
    memory. v is a view of qkv, and so are q and k with inplace=True. Norm and rotation are computed
    in float32 and rounded once, at the end; `rmsnorm` and `rope` one after the other round twice
    (three times with cast="llama"). Differentiable once in qkv and the weights (eager: any number
    of times). The backward is one pass that writes the gradient of qkv whole, v's part included;
    the weights' gradients accumulate in float32, on a CPU over about 64 heads and in fp64 beyond
    (fixed order, no atomics). It keeps qkv, 4 bytes for each head of q and k, and the tables;
    without weights only the tables. Raises TypeError, ValueError and IndexError as `rmsnorm` and
    `rope` do; a token outside the tables that is not looked at becomes NaN in q and k.
    Source: QK norm as in transformers' Qwen3Attention; arXiv:1910.07467 and arXiv:2104.09864.
    """
    R = _validate(
        qkv,
        q_weight,
        k_weight,
        num_heads,
        num_kv_heads,
        eps,
        offset,
        cos,
        sin,
        rotary_dim,
        position_ids,
        cu_seqlens,
    )
    cos, sin, position_ids = prepare_tables(
        qkv.shape[0], qkv.shape[1], R, cos, sin, position_ids, cu_seqlens
    )
    fn = QK_NORM_ROPE.pick(implementation, qkv)
    given = (
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        position_ids,
        num_heads,
        num_kv_heads,
        eps,
        offset,
        interleaved,
    )
    return _in_place(fn, *given) if inplace else fn(*given)


def _validate(
    qkv,
    q_weight,
    k_weight,
    num_heads,
    num_kv_heads,
    eps,
    offset,
    cos,
    sin,
    rotary_dim,
    position_ids,
    cu_seqlens,
):
    for name, t in (("qkv", qkv), ("cos", cos), ("sin", sin)):
        _checks.floating(name, t)
    for name, n in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if not isinstance(n, int) or isinstance(n, bool):
            raise TypeError(f"{name} must be an int, got {n!r}")
        if n < 1:
            raise ValueError(f"{name} must be at least 1, got {n}")
    heads = num_heads + 2 * num_kv_heads
    if qkv.dim() != 3 or qkv.shape[2] % heads:
        raise ValueError(
            f"qkv must have shape [B, S, {heads} D] for num_heads {num_heads} and num_kv_heads "
            f"{num_kv_heads}, got {list(qkv.shape)}"
        )
    B, S, D = qkv.shape[0], qkv.shape[1], qkv.shape[2] // heads
    if not 2 <= D <= MAX_D:
        raise ValueError(
            f"qkv must have a head width of 2 to {MAX_D}, got {D}: {list(qkv.shape)} with {heads} "
            f"heads"
        )
    if (q_weight is None) != (k_weight is None):
        given, absent = ("k_weight", "q_weight") if q_weight is None else ("q_weight", "k_weight")
        raise ValueError(
            f"q_weight and k_weight must be given both or neither, got {given} without {absent}"
        )
    for name, w in (("q_weight", q_weight), ("k_weight", k_weight)):
        if w is not None:
            _checks.floating(name, w)
            _checks.shape(name, w, (D,), "the head width")
    check_options(eps, offset, "gemma")
    R = check_tables(B, S, D, cos, sin, rotary_dim, position_ids, cu_seqlens)
    _checks.same_device(
        qkv=qkv,
        q_weight=q_weight,
        k_weight=k_weight,
        cos=cos,
        sin=sin,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
    )
    return R


def _whole(qkv, hq, hk):
    return qkv.unflatten(-1, (hq + 2 * hk, qkv.shape[-1] // (hq + 2 * hk)))


def _slices(qkv, hq, hk):
    """q, k and v as they lie in qkv, [B, H, S, D]. Autograd lets them be overwritten, and pads
    each one's gradient.
    """
    whole = _whole(qkv, hq, hk)
    return tuple(
        whole[:, :, a:b].transpose(1, 2) for a, b in ((0, hq), (hq, hq + hk), (hq + hk, None))
    )


def _pieces(qkv, hq, hk):
    """The same; autograd does not let them be overwritten, and puts their gradients next to
    each other.
    """
    return tuple(t.transpose(1, 2) for t in _whole(qkv, hq, hk).split((hq, hk, hk), 2))


# ---- the definition


def qk_norm_rope_eager(
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    position_ids,
    num_heads,
    num_kv_heads,
    eps=1e-6,
    offset=0.0,
    interleaved=False,
):
    acc = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = _pieces(qkv, num_heads, num_kv_heads)
    q, k = q.to(acc), k.to(acc)
    if q_weight is not None:
        q, k = (
            rmsnorm_eager(x, w, None, eps, offset, "gemma")
            for x, w in ((q, q_weight), (k, k_weight))
        )
    q, k = (
        x.transpose(1, 2).to(qkv.dtype).contiguous().transpose(1, 2)
        for x in rope_eager(q, k, cos, sin, position_ids, interleaved)
    )
    return q, k, v


def _turned_back_eager(d, cos, sin, position_ids, num_heads, num_kv_heads, interleaved):
    """The gradient of qkv before a rotation, from that of what is left of it."""
    parts = qk_norm_rope_eager(
        d, None, None, cos, -sin, position_ids, num_heads, num_kv_heads, interleaved=interleaved
    )
    return torch.cat([t.transpose(1, 2) for t in parts], 2).flatten(2)


# ---- fused implementations


def _new_heads(like, B, S, hq, hk, D, norm):
    """Uninitialised q, k and 1 / rms."""
    q, k = (like.new_empty(B, S, h, D).transpose(1, 2) for h in (hq, hk))
    return q, k, like.new_empty((B, S, hq + hk) if norm else 0, dtype=torch.float32)


def _new_gradients(grads, q_weight, k_weight, hq, hk):
    """Uninitialised gradients of qkv and the weights."""
    d = next(g for g in grads if g is not None)
    B, _, S, D = d.shape
    return d.new_empty(B, S, (hq + 2 * hk) * D), *(
        d.new_empty(0) if w is None else torch.empty_like(w) for w in (q_weight, k_weight)
    )


def _register(name, write, gradients, dtypes=_checks.ACCEPTED):
    """write, gradients: as in kernels/qk_norm_rope_triton.py.   dtypes: those of weights that they
    read; others come to them as float32, in which they compute.
    """

    def forward(
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor | None,
        num_heads: int,
        num_kv_heads: int,
        eps: float,
        offset: float,
        interleaved: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, rstd = fake(
            qkv,
            q_weight,
            k_weight,
            cos,
            sin,
            positions,
            num_heads,
            num_kv_heads,
            eps,
            offset,
            interleaved,
        )
        write(
            qkv,
            q_weight,
            k_weight,
            q,
            k,
            None if q_weight is None else rstd,
            cos,
            sin,
            positions,
            eps,
            offset,
            interleaved,
        )
        return q, k, rstd

    def fake(
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        positions,
        num_heads,
        num_kv_heads,
        eps,
        offset,
        interleaved,
    ):
        B, S, W = qkv.shape
        return _new_heads(
            qkv,
            B,
            S,
            num_heads,
            num_kv_heads,
            W // (num_heads + 2 * num_kv_heads),
            q_weight is not None,
        )

    def backward(
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
        qkv: torch.Tensor | None,
        rstd: torch.Tensor | None,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor | None,
        num_heads: int,
        num_kv_heads: int,
        offset: float,
        interleaved: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grads = [last_contiguous(d) for d in (dq, dk, dv)]
        dqkv, dq_weight, dk_weight = _new_gradients(
            grads, q_weight, k_weight, num_heads, num_kv_heads
        )
        of_weights = (None, None) if q_weight is None else (dq_weight, dk_weight)
        gradients(
            *grads,
            qkv,
            rstd,
            q_weight,
            k_weight,
            dqkv,
            *of_weights,
            cos,
            sin,
            positions,
            num_heads,
            num_kv_heads,
            offset,
            interleaved,
        )
        return dqkv, dq_weight, dk_weight

    op = define(f"qk_norm_rope_{name}", forward, fake)
    backward_op = define(
        f"qk_norm_rope_{name}_backward",
        backward,
        lambda dq, dk, dv, qkv, rstd, q_weight, k_weight, cos, sin, positions, hq, hk, *options: (
            _new_gradients((dq, dk, dv), q_weight, k_weight, hq, hk)
        ),
    )
    title = op.name().split(".")[0]

    def keep(ctx, inputs, rstd):
        qkv, q_weight, k_weight, cos, sin, positions, hq, hk, _, offset, interleaved = inputs
        ctx.options = hq, hk, offset, interleaved
        ctx.save_for_backward(
            *((qkv, rstd) if q_weight is not None else (None, None)),
            q_weight,
            k_weight,
            cos,
            sin,
            positions,
        )

    def formula(ctx, dq, dk, dv):
        if dq is None and dk is None and dv is None:
            return (None,) * 11
        saved = ctx.saved_tensors  # asked for once: checkpointing gives them out once
        dqkv, *of_weights = backward_op(dq, dk, dv, *saved, *ctx.options)
        return dqkv, *(of_weights if saved[2] is not None else (None, None)), *(None,) * 8

    def setup(ctx, inputs, output):
        keep(ctx, inputs, output[2])
        ctx.set_materialize_grads(False)

    # The operator's own derivative does not know of v, which cannot be its result: it is a view.
    differentiate(op, lambda ctx, dq, dk, drstd: formula(ctx, dq, dk, None), setup)
    refusing = once(title, formula)

    class Fused(torch.autograd.Function):
        """Takes v along, so that one kernel writes the whole gradient of qkv."""

        @staticmethod
        def forward(ctx, *inputs):
            q, k, rstd = op(*inputs)
            keep(ctx, inputs, rstd)
            if (
                not torch.compiler.is_dynamo_compiling()
            ):  # which traces with all gradients, and knows no such call
                ctx.set_materialize_grads(False)
            return q, k, _slices(inputs[0], inputs[6], inputs[7])[2]

        @staticmethod
        def backward(ctx, dq, dk, dv):
            if torch.compiler.is_dynamo_compiling():  # compiled code has no second derivative
                return formula(ctx, dq, dk, dv)
            return refusing(ctx, dq, dk, dv)

    def tables(cos, sin):
        return cos.float().contiguous(), sin.float().contiguous()

    def parameter(w):
        return w if w is None else (w if w.dtype in dtypes else w.float()).contiguous()

    def fused(
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        position_ids,
        num_heads,
        num_kv_heads,
        eps,
        offset,
        interleaved,
    ):
        inputs = (
            last_contiguous(qkv),
            parameter(q_weight),
            parameter(k_weight),
            *tables(cos, sin),
            position_ids,
            num_heads,
            num_kv_heads,
            eps,
            offset,
            interleaved,
        )
        wanted = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in inputs[:3]
        )
        if wanted and not in_forward_mode() and not in_transform() and inputs[0] is qkv:
            return Fused.apply(*inputs)
        return *op(*inputs)[:2], _slices(qkv, num_heads, num_kv_heads)[2]

    def overwrite(
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        positions,
        num_heads,
        num_kv_heads,
        eps,
        offset,
        interleaved,
    ):
        q, k, _ = _slices(qkv, num_heads, num_kv_heads)
        write(
            qkv,
            parameter(q_weight),
            parameter(k_weight),
            q,
            k,
            None,
            *tables(cos, sin),
            positions,
            eps,
            offset,
            interleaved,
        )

    def turned_back(ctx, d):
        cos, sin, positions = ctx.saved_tensors
        hq, hk, interleaved = ctx.options
        return backward_op(
            *_slices(d, hq, hk),
            None,
            None,
            None,
            None,
            *tables(cos, sin),
            positions,
            hq,
            hk,
            0.0,
            interleaved,
        )[0]

    fused.overwrite, fused.turned_back = (
        on_its_device(overwrite),
        once(title, turned_back),
    )  # for inplace=True
    return fused


# ---- in place


def _in_place(fn, qkv, q_weight, k_weight, cos, sin, positions, hq, hk, eps, offset, interleaved):
    learning = [
        name
        for name, t in (("qkv", qkv), ("q_weight", q_weight), ("k_weight", k_weight))
        if t is not None and t.requires_grad
    ]
    if q_weight is not None and learning and torch.is_grad_enabled():
        raise ValueError(
            "inplace=True with weights overwrites qkv, which the gradient is made from, and "
            f"{' and '.join(learning)} would get one; pass inplace=False, or call it under "
            "torch.no_grad()"
        )
    compiling = torch.compiler.is_compiling()
    check_overwritable("qkv", qkv, compiling)
    given = q_weight, k_weight, cos, sin, positions, hq, hk, eps, offset, interleaved
    if (
        compiling
    ):  # the compiler decides where results lie; the copies tell it that they may lie here
        new, own = fn(qkv, *given), _slices(qkv, hq, hk)
        for x, y in zip(own[:2], new[:2], strict=True):
            x.copy_(y)
        return own
    # Before anything is written, so that what autograd refuses is left as it was.
    _Overwritten.apply(qkv, cos, sin, positions, hq, hk, interleaved, fn)
    with torch.no_grad():
        data = qkv.detach()
        if hasattr(fn, "overwrite"):
            fn.overwrite(data, *given)
        else:
            for x, y in zip(_slices(data, hq, hk)[:2], fn(data, *given)[:2], strict=True):
                x.copy_(y)
    return _pieces(qkv, hq, hk)


class _Overwritten(torch.autograd.Function):
    """Tells autograd that q and k are rotated where they lie in qkv. Nothing of it is kept: the
    backward needs only the angles.
    """

    @staticmethod
    def forward(ctx, qkv, cos, sin, positions, hq, hk, interleaved, fn):
        ctx.save_for_backward(cos, sin, positions)
        ctx.options, ctx.fn = (hq, hk, interleaved), fn
        ctx.mark_dirty(qkv)
        ctx.set_materialize_grads(False)
        return qkv

    @staticmethod
    def backward(ctx, d):
        if d is not None and hasattr(ctx.fn, "turned_back"):
            d = ctx.fn.turned_back(ctx, d)
        elif d is not None:
            d = _turned_back_eager(d, *ctx.saved_tensors, *ctx.options)
        return d, *(None,) * 7


_loaded: dict[str, object] = {}


def _triton():
    if "triton" not in _loaded:
        from tilewright.kernels import qk_norm_rope_triton as k

        _loaded["triton"] = _register("triton", k.forward, k.backward)
    return _loaded["triton"]


def _cpp():
    if "cpp" not in _loaded:

        def gradients(dq, dk, dv, qkv, rstd, q_weight, k_weight, dqkv, dq_weight, dk_weight, *rest):
            dw = (
                None
                if q_weight is None
                else q_weight.new_empty(2, q_weight.shape[0], dtype=torch.float32)
            )
            torch.ops.tilewright.qk_norm_rope_cpp_gradients.default(
                dq, dk, dv, qkv, rstd, q_weight, k_weight, dqkv, dw, *rest
            )
            if dw is not None:
                dq_weight.copy_(dw[0])
                dk_weight.copy_(dw[1])

        _loaded["cpp"] = _register(
            "cpp",
            torch.ops.tilewright.qk_norm_rope_cpp_write.default,
            gradients,
            (torch.float32, torch.bfloat16),
        )
    return _loaded["cpp"]


def _tunables():
    from tilewright.kernels import qk_norm_rope_triton

    return qk_norm_rope_triton.TUNABLES


# ---- cases


def _case(
    name,
    B,
    hq,
    hk,
    S,
    D,
    *,
    R=None,
    norm=True,
    weight=None,
    ids=False,
    documents=None,
    strided=False,
    tags=cases.CONTRACT,
    **options,
):
    """weight: dtype of the weights where it is not that of qkv.   strided: qkv is a part of
    wider rows.
    """
    R = R or D
    if R != D:
        options["rotary_dim"] = R
    rows = 3 * S if ids else S
    W = (hq + 2 * hk) * D

    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        new = {"device": device, "gen": g, "requires_grad": False}
        qkv = cases.randn(B, S, W + 8 if strided else W, dtype=dtype, **new)[..., :W]
        angle = torch.outer(
            torch.arange(rows, device=device).float(),
            10000.0 ** (-torch.arange(0, R, 2, device=device).float() / R),
        )
        kw = {
            "qkv": qkv.requires_grad_(),
            "cos": angle.cos(),
            "sin": angle.sin(),
            "num_heads": hq,
            "num_kv_heads": hk,
            **options,
        }
        if norm:
            for w in ("q_weight", "k_weight"):
                kw[w] = cases.randn(
                    D, dtype=weight or dtype, scale=0.2, shift=1.0, **new
                ).requires_grad_()
        if ids:
            kw["position_ids"] = torch.randint(0, rows, (B, S), device=device, generator=g)
        if documents:
            kw["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32, device=device)
        return kw

    def cost(itemsize):
        q_k, v = B * S * (hq + hk) * D, B * S * hk * D
        # forward: q and k in and out. backward: their gradients and v's in, qkv's out, and with a
        # norm q and k in.
        return Cost(
            2 * q_k * itemsize,
            ((3 if norm else 2) * q_k + 2 * v) * itemsize,
            (7 if norm else 3) * q_k,
            (11 if norm else 3) * q_k,
        )

    return Case(name, make, cost, tags)


def _all_cases():
    small = [
        _case("gqa", 2, 4, 2, 5, 16),
        _case("no_norm", 2, 3, 1, 4, 12, norm=False),
        _case("partial", 1, 2, 2, 5, 24, R=10, offset=1.0),
        _case("interleaved", 2, 3, 1, 4, 20, interleaved=True),
        _case("partial_interleaved", 1, 2, 1, 5, 20, R=8, interleaved=True),
        _case("partial_no_norm", 1, 2, 1, 3, 11, R=6, norm=False),
        _case("positions", 2, 2, 1, 6, 16, ids=True),
        _case("documents", 1, 2, 1, 11, 8, documents=(0, 4, 5, 11)),
        _case("fp32_weight", 1, 5, 3, 3, 12, weight=torch.float32, eps=1e-2),
        _case("strided", 2, 2, 1, 3, 16, strided=True),
        _case("wide", 1, 3, 2, 2, 128),
        _case("no_tokens", 1, 2, 1, 0, 16),
    ]
    timed = []
    for device, tags in (("cuda", cases.CUDA), ("cpu", cases.CPU)):
        for name in ("qwen3-8b", "qwen3-30b-a3b", "llama-3-8b"):
            m = cases.MODELS[name]
            timed.append(
                _case(
                    name,
                    1,
                    m.heads,
                    m.kv_heads,
                    cases.TOKENS[device],
                    m.head_dim,
                    norm=name.startswith("qwen3"),
                    tags=tags,
                )
            )
    return (*small, *timed, _case("big", 1, 16, 8, 2**19 + 1, 128, tags=cases.BIG))


QK_NORM_ROPE = Op(
    "qk_norm_rope",
    qk_norm_rope,
    qk_norm_rope_eager,
    (
        Implementation(
            "triton",
            _triton,
            platform.no_triton,
            batch_invariant=cases.ANYWHERE,
            tunables=_tunables,
        ),
        Implementation(
            "cpp",
            _cpp,
            platform.no_cpp,
            ("cpu",),
            (torch.float32, torch.bfloat16),
            batch_invariant=("cpu",),
        ),
    ),
    _all_cases(),
    # A gradient is a rotation (two products and a sum) and then a difference of two terms, which a
    # head of small values
    # makes large: eager's error is 2.5e-7 in the mean of small cases and 5.6e-7 in the worst of 80,
    # Triton's 2.5e-7 and 8.2e-7. Where eager is lucky, 2 eps of slack are too few.
    atol={torch.float32: 4 * torch.finfo(torch.float32).eps},
    goals=cases.near_copy(85, "forward", "backward"),
)
