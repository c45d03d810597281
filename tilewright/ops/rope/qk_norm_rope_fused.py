"""QK norm and rotary embedding on the fused kernels, and in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from tilewright.core import checks
from tilewright.core.layout import check_overwritable, last_contiguous
from tilewright.core.library import Operator, define, differentiate, on_its_device, once
from tilewright.core.torch_names import in_forward_mode, in_transform
from tilewright.ops.rope.rope import rope_eager
from tilewright.ops.rope.rope_fused import Rotation


class Heads(NamedTuple):
    """The numbers of query and key heads in qkv."""

    q: int
    kv: int


class HeadNorm(NamedTuple):
    """The RMSNorm of each head; None weights mean no norm."""

    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0


def _by_head(qkv, heads):
    total = heads.q + 2 * heads.kv
    return qkv.unflatten(-1, (total, qkv.shape[-1] // total))


def slices(qkv, heads):
    """q, k and v as views of qkv, [B, H, S, D]. Autograd allows in-place writes to them, and pads
    each one's gradient.
    """
    (hq, hk), whole = heads, _by_head(qkv, heads)
    return tuple(
        whole[:, :, a:b].transpose(1, 2) for a, b in ((0, hq), (hq, hq + hk), (hq + hk, None))
    )


def pieces(qkv, heads):
    """The same; autograd does not allow in-place writes to them, and concatenates their
    gradients.
    """
    return tuple(
        t.transpose(1, 2) for t in _by_head(qkv, heads).split((heads.q, heads.kv, heads.kv), 2)
    )


# ---- two operators


def _new_heads(like, B, S, hq, hk, D, norm):
    """Uninitialized q, k and 1 / rms."""
    q, k = (like.new_empty(B, S, h, D).transpose(1, 2) for h in (hq, hk))
    return q, k, like.new_empty((B, S, hq + hk) if norm else 0, dtype=torch.float32)


def _new_gradients(grads, q_weight, k_weight, hq, hk):
    """Uninitialized gradients of qkv and the weights."""
    d = next(g for g in grads if g is not None)
    B, _, S, D = d.shape
    return d.new_empty(B, S, (hq + 2 * hk) * D), *(
        d.new_empty(0) if w is None else torch.empty_like(w) for w in (q_weight, k_weight)
    )


def _fake(
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
    D = W // (num_heads + 2 * num_kv_heads)
    return _new_heads(qkv, B, S, num_heads, num_kv_heads, D, q_weight is not None)


def _fake_backward(
    dq, dk, dv, qkv, rstd, q_weight, k_weight, cos, sin, positions, hq, hk, offset, interleaved
):
    return _new_gradients((dq, dk, dv), q_weight, k_weight, hq, hk)


def _save(ctx, inputs, rstd):
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


def _setup(ctx, inputs, output):
    _save(ctx, inputs, output[2])
    ctx.set_materialize_grads(False)


def _gradients(ctx, backward_op, dq, dk, dv):
    if dq is None and dk is None and dv is None:
        return (None,) * 11
    saved = ctx.saved_tensors  # read once: checkpointing returns them once
    dqkv, *of_weights = backward_op(dq, dk, dv, *saved, *ctx.options)
    return dqkv, *(of_weights if saved[2] is not None else (None, None)), *(None,) * 8


def _backward(ctx, dq, dk, drstd):
    """The operator's own derivative does not include v, which cannot be its result: it
    is a view.
    """
    return _gradients(ctx, ctx.backward_op, dq, dk, None)


def _with_v(operator: Operator, backward_op: Operator, title: str) -> type[torch.autograd.Function]:
    """The operator with v as a third result, so that one kernel writes the whole
    gradient of qkv.
    """
    refusing = once(title, lambda ctx, *grads: _gradients(ctx, backward_op, *grads))

    class WithV(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            q, k, rstd = operator(*inputs)
            _save(ctx, inputs, rstd)
            # Dynamo traces with all gradients, and does not support this call.
            if not torch.compiler.is_dynamo_compiling():
                ctx.set_materialize_grads(False)
            return q, k, slices(inputs[0], Heads(inputs[6], inputs[7]))[2]

        @staticmethod
        def backward(ctx, dq, dk, dv):
            if torch.compiler.is_dynamo_compiling():  # compiled code has no second derivative
                return _gradients(ctx, backward_op, dq, dk, dv)
            return refusing(ctx, dq, dk, dv)

    return WithV


class Fused:
    """One implementation: the call, and its launchers for `in_place`.

    write, gradients: launchers as in kernels/rope/qk_norm_rope_triton.py.
    dtypes: those of weights that they read; others are cast to float32, in which the kernels
        compute.
    """

    def __init__(self, name: str, write: Callable, gradients: Callable, dtypes=checks.ACCEPTED):
        self.__name__ = self.__qualname__ = f"qk_norm_rope_{name}"  # function attributes
        self._write, self._gradients, self._dtypes = write, gradients, dtypes
        self.operator = define(f"qk_norm_rope_{name}", self._launch, _fake)
        self.backward_op = define(
            f"qk_norm_rope_{name}_backward", self._launch_backward, _fake_backward
        )
        differentiate(self.operator, _backward, _setup, backward_op=self.backward_op)
        title = self.operator.name().split(".")[0]
        self._with_v = _with_v(self.operator, self.backward_op, title)
        self.overwrite = on_its_device(self._overwrite)
        self.rotate_back = once(title, self._rotate_back)

    def __call__(self, qkv, heads, norm, rotation):
        weights = self._parameter(norm.q_weight), self._parameter(norm.k_weight)
        tensors = last_contiguous(qkv), *weights
        cos, sin, positions, interleaved = rotation.for_kernels()
        inputs = *tensors, cos, sin, positions, *heads, norm.eps, norm.offset, interleaved
        learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        if learns and not in_forward_mode() and not in_transform() and tensors[0] is qkv:
            return self._with_v.apply(*inputs)
        return *self.operator(*inputs)[:2], slices(qkv, heads)[2]

    def _parameter(self, w):
        return w if w is None else (w if w.dtype in self._dtypes else w.float()).contiguous()

    def _overwrite(self, qkv, heads, norm, rotation):
        """Writes q and k over their part of qkv."""
        q, k, _ = slices(qkv, heads)
        weights = self._parameter(norm.q_weight), self._parameter(norm.k_weight)
        cos, sin, positions, interleaved = rotation.for_kernels()
        self._write(
            qkv, *weights, q, k, None, cos, sin, positions, norm.eps, norm.offset, interleaved
        )

    def _rotate_back(self, ctx, d):
        """The gradient of qkv before a rotation in place."""
        cos, sin, positions, interleaved = Rotation(
            *ctx.saved_tensors, ctx.interleaved
        ).for_kernels()
        return self.backward_op(
            *slices(d, ctx.heads),
            None,
            None,
            None,
            None,
            cos,
            sin,
            positions,
            *ctx.heads,
            0.0,
            interleaved,
        )[0]

    def _launch(
        self,
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
        q, k, rstd = _fake(
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
        self._write(
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

    def _launch_backward(
        self,
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
        self._gradients(
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


@functools.cache
def triton() -> Fused:
    from tilewright.kernels.rope import qk_norm_rope_triton as k

    return Fused("triton", k.forward, k.backward)


def _cpp_gradients(dq, dk, dv, qkv, rstd, q_weight, k_weight, dqkv, dq_weight, dk_weight, *rest):
    dw = None
    if q_weight is not None:
        dw = q_weight.new_empty(2, q_weight.shape[0], dtype=torch.float32)
    torch.ops.tilewright.qk_norm_rope_cpp_gradients.default(
        dq, dk, dv, qkv, rstd, q_weight, k_weight, dqkv, dw, *rest
    )
    if dw is not None:
        dq_weight.copy_(dw[0])
        dk_weight.copy_(dw[1])


@functools.cache
def cpp() -> Fused:
    return Fused(
        "cpp",
        torch.ops.tilewright.qk_norm_rope_cpp_write.default,
        _cpp_gradients,
        (torch.float32, torch.bfloat16),
    )


# ---- in place


def in_place(
    fn: Callable, qkv: torch.Tensor, heads: Heads, norm: HeadNorm, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fn(qkv, ...) with q and k written over their part of qkv."""
    differentiable = [
        name
        for name, t in (("qkv", qkv), ("q_weight", norm.q_weight), ("k_weight", norm.k_weight))
        if t is not None and t.requires_grad
    ]
    if norm.q_weight is not None and differentiable and torch.is_grad_enabled():
        raise ValueError(
            "inplace=True with weights overwrites qkv, which the gradient is made from, and "
            f"{' and '.join(differentiable)} would get one; pass inplace=False, or call it under "
            "torch.no_grad()"
        )
    compiling = torch.compiler.is_compiling()
    check_overwritable("qkv", qkv, compiling)
    if compiling:
        # The compiler decides where results are stored; the copies allow it to store them here.
        new, parts = fn(qkv, heads, norm, rotation), slices(qkv, heads)
        for x, y in zip(parts[:2], new[:2], strict=True):
            x.copy_(y)
        return parts
    # Before anything is written, so that a tensor that autograd refuses is unchanged.
    _Overwritten.apply(qkv, *rotation, heads, fn)
    with torch.no_grad():
        data = qkv.detach()
        if isinstance(fn, Fused):
            fn.overwrite(data, heads, norm, rotation)
        else:
            results = fn(data, heads, norm, rotation)
            for x, y in zip(slices(data, heads)[:2], results[:2], strict=True):
                x.copy_(y)
    return pieces(qkv, heads)


def _rotate_back_eager(d, heads, rotation):
    """The gradient of qkv before a rotation, from that of the rotated one."""
    q, k, v = pieces(d, heads)
    parts = *rope_eager(q, k, rotation.inverse()), v
    return torch.cat([t.transpose(1, 2) for t in parts], 2).flatten(2)


class _Overwritten(torch.autograd.Function):
    """Registers the in-place rotation of q and k with autograd. qkv is not saved: the backward
    needs only the angles.
    """

    @staticmethod
    def forward(ctx, qkv, cos, sin, positions, interleaved, heads, fn):
        ctx.save_for_backward(cos, sin, positions)
        ctx.heads, ctx.interleaved, ctx.fn = heads, interleaved, fn
        ctx.mark_dirty(qkv)
        ctx.set_materialize_grads(False)
        return qkv

    @staticmethod
    def backward(ctx, d):
        if d is not None and isinstance(ctx.fn, Fused):
            d = ctx.fn.rotate_back(ctx, d)
        elif d is not None:
            d = _rotate_back_eager(d, ctx.heads, Rotation(*ctx.saved_tensors, ctx.interleaved))
        return d, *(None,) * 6
