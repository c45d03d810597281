"""Experts whose base is frozen, each with low-rank adapters: what `moe_mlp` computes with W + scale
B A for every W.

Letters are those of moe.py, and r = rank. Of each expert's three projections, with W frozen, A [E,
r, in] and B [E, out, r]:

    pre[r] = [gate; up]    p = W_p x[token] + scale B_p (A_p x[token])   for p = gate, up y[t]   =
    the sum over t's rows of w(r) (W_down h[r] + scale B_down (A_down h[r])),   h[r] = silu(gate) *
    up

Each base weight is multiplied once, as in `moe_mlp`, and is never added to, copied or joined; the
rest are products of rank r. A factor that all experts share has a leading size of 1 and stays so:
where it stands at the side of tokens (A of gate and up, B of down), it is one product over the T
tokens, not over their T K rows.

What is kept for the backward is x, pre, the routing and A's results (`saved_bytes`). With u = scale
B^T dy,

    dA = the sum over rows of u input^T     dB = scale times the sum of dy (A input)^T     dinput =
    W^T dy + A^T u

and of a base weight no gradient is computed. A quantised one is dequantised in each of the two
passes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch

from tilewright.ops import _checks, cases
from tilewright.ops._library import define, differentiate
from tilewright.ops.activation import SILU, SILU_MUL, act_mul_eager
from tilewright.ops.aqn import AQN
from tilewright.ops.block_fp8 import quantize_block_fp8
from tilewright.ops.grouped_gemm import GROUPED_GEMM, grouped_gemm_eager, operators
from tilewright.ops.moe import _between, _noises, _of_slots, _routing, checked_routing
from tilewright.ops.nf4 import quantize_nf4
from tilewright.ops.nvfp4 import quantize_nvfp4
from tilewright.ops.permute import PERMUTE, UNPERMUTE, permute_eager, unpermute_eager
from tilewright.ops.quantize import Quantized
from tilewright.ops.quantized_linear import Packed, checked_noise, dense, dequantize, pack
from tilewright.registry import FLOATS, Case, Cost, Op, no_kernels, short

ADAPTERS = ("gate_A", "gate_B", "up_A", "up_B", "down_A", "down_B")


@_checks.autocast(
    "products",
    "x",
    "gate_up_proj",
    "down_proj",
    "gate_A",
    "gate_B",
    "up_A",
    "up_B",
    "down_A",
    "down_B",
)
def moe_lora(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor | Quantized,
    down_proj: torch.Tensor | Quantized,
    expert_index: torch.Tensor,
    expert_weight: torch.Tensor,
    gate_A: torch.Tensor,
    gate_B: torch.Tensor,
    up_A: torch.Tensor,
    up_B: torch.Tensor,
    down_A: torch.Tensor,
    down_B: torch.Tensor,
    *,
    scale: float,
    noise: AQN | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """`moe_mlp` with W + scale * B A in place of each W: of gate and up (the halves of
    gate_up_proj) and of down_proj.

    x: [T, H] fp32 | bf16 | fp16 (fp64 with eager), any strides.
    gate_up_proj: [E, 2 I, H], gates before ups, and down_proj: [E, H, I], frozen: in x's dtype, or
    quantised.
    expert_index: [T, K] int32 or int64, 0 to E - 1; E for a slot whose expert is not here: it adds
        nothing and gets no gradient.
    expert_weight: [T, K], any floating dtype, used in float32.
    gate_A, up_A: [E, r, H], gate_B, up_B: [E, I, r], down_A: [E, r, I], down_B: [E, H, r], in x's
        dtype; each projection may have an r of its own. A leading size of 1 is a factor that all
        experts share; gate and up share alike.
    scale: of the adapters, a number.
    noise: of quantised weights, as in `dequantize_nf4`: gate_up_proj takes noise.layer, down_proj
    the one after it. Returns [T, H], contiguous, in x's dtype. Products are summed in float32 and
    rounded to x's dtype, and so are sums of base and adapter, gate, up, and silu(gate) * up; the
    sum over k is in float32, rounded once. Under torch.autocast x, adapters and base weights that
    are tensors are cast to its dtype. Differentiable in x, expert_weight and the adapters, once. A
    factor's gradient is 0 for an expert without tokens; a shared one's is the sum over experts. x
    of a token without experts here is read, and must be finite.
    Kept for the backward: the arguments, gate and up, A's results, and the order of rows
    (`saved_bytes`). Of a quantised weight that is what it is made of: it is dequantised again.
    Deterministic. Raises TypeError or ValueError for arguments that do not fit, also for a base
    weight that requires a gradient; IndexError for an index outside (on CUDA, where looking would
    wait for the device, it counts as E), ImplementationUnavailable for a named implementation that
    cannot run here.
    Source: LoRA, arXiv:2106.09685, on the experts of `moe_mlp`.
    """
    adapters = (gate_A, gate_B, up_A, up_B, down_A, down_B)
    index = _validate(
        x, gate_up_proj, down_proj, expert_index, expert_weight, adapters, scale, noise
    )
    weight = expert_weight.to(torch.promote_types(x.dtype, torch.float32))
    return MOE_LORA.pick(implementation, x)(
        x, gate_up_proj, down_proj, index, weight, *adapters, float(scale), noise
    )


def saved_bytes(
    T: int,
    K: int,
    E: int,
    H: int,
    I: int,
    ranks: tuple[int, int, int],
    itemsize: int,
    *,
    shared_A: bool = False,
    shared_B: bool = False,
) -> int:
    """Bytes that one call of a fused implementation keeps for its backward, beside base and
    adapters: x, gate and up, A's results, the weights of the routing, and slots, positions and
    offsets.

    ranks: of gate, up and down.   shared_A: of gate and up; then their results are of tokens, not
    of rows.
    shared_B: of down, likewise.
    """
    R, (gate, up, down) = T * K, ranks
    low = (T if shared_A else R) * (gate + up) + (T if shared_B else R) * down
    return itemsize * (T * H + R * 2 * I + low) + 4 * (3 * R + E)


def _validate(x, gate_up_proj, down_proj, expert_index, expert_weight, adapters, scale, noise):
    _checks.floating("x", x)
    _checks.floating("expert_weight", expert_weight)
    if x.dim() != 2:
        raise ValueError(f"x must have shape [T, H], got {list(x.shape)}")
    first = {}
    for name, w in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        if isinstance(w, Quantized):
            first[name] = w.tensors()[0]
            continue
        _checks.floating(name, w)
        if w.dtype != x.dtype:
            raise TypeError(f"{name} must have x's dtype {short(x.dtype)}, got {short(w.dtype)}")
        if w.requires_grad:
            raise ValueError(f"{name} must not require a gradient: under adapters it is frozen")
        first[name] = w
    for name, t in zip(ADAPTERS, adapters, strict=True):
        _checks.floating(name, t)
    _checks.same_device(
        x=x,
        **first,
        expert_index=expert_index,
        expert_weight=expert_weight,
        **dict(zip(ADAPTERS, adapters, strict=True)),
    )
    if len(gate_up_proj.shape) != 3 or gate_up_proj.shape[1] % 2:
        raise ValueError(
            f"gate_up_proj must have shape [E, 2 I, H], got {list(gate_up_proj.shape)}"
        )
    E, I, H = gate_up_proj.shape[0], gate_up_proj.shape[1] // 2, x.shape[1]
    _checks.shape("gate_up_proj", gate_up_proj, (E, 2 * I, H), "[E, 2 I, H], with x's H")
    _checks.shape("down_proj", down_proj, (E, H, I), "[E, H, I] of gate_up_proj")
    for i, (inner, outer) in enumerate(((H, I), (H, I), (I, H))):
        _pair(*ADAPTERS[2 * i : 2 * i + 2], *adapters[2 * i : 2 * i + 2], E, inner, outer, x.dtype)
    for one, other in ((0, 2), (1, 3)):
        if adapters[one].shape[0] != adapters[other].shape[0]:
            raise ValueError(
                f"{ADAPTERS[one]} and {ADAPTERS[other]} must both be shared or both be of each "
                f"expert, "
                f"got {adapters[one].shape[0]} and {adapters[other].shape[0]} for {E} experts"
            )
    _checks.number("scale", scale, -_checks.LARGEST, _checks.LARGEST, "a finite number")
    checked_noise(noise)
    if noise is not None and not (
        isinstance(gate_up_proj, Quantized) and isinstance(down_proj, Quantized)
    ):
        raise ValueError("noise is for quantised weights, got it with tensors")
    return checked_routing(x, expert_index, expert_weight, E)


def _pair(name_A, name_B, A, B, E, inner, outer, dtype):
    for name, t, columns in ((name_A, A, inner), (name_B, B, A.shape[1] if A.dim() == 3 else None)):
        shape = "[E or 1, r, in]" if name == name_A else "[E or 1, out, r]"
        if t.dim() != 3 or t.shape[0] not in (1, E) or A.shape[1] == 0:
            raise ValueError(
                f"{name} must have shape {shape}, with E = {E} and r not 0, got {list(t.shape)}"
            )
        rows = t.shape[1] if name == name_A else outer
        _checks.shape(name, t, (t.shape[0], rows, columns), f"{shape}, in = {inner}, out = {outer}")
        if t.dtype != dtype:
            raise TypeError(f"{name} must have x's dtype {short(dtype)}, got {short(t.dtype)}")


# ---- a base weight as arguments of an operator: a quantized one's, or a dense one in their place


def _packed(w, noise):
    return (
        pack(w, noise)
        if isinstance(w, Quantized)
        else Packed(w, None, None, None, "dense", list(w.shape), [], 0.0, [0, 0, 0])
    )


def _weight(implementation, dtype, *packed):
    """The dense weight."""
    return packed[0] if packed[4] == "dense" else dense(Packed(*packed), dtype, implementation)


# ---- the definition


def moe_lora_eager(
    x,
    gate_up_proj,
    down_proj,
    expert_index,
    expert_weight,
    gate_A,
    gate_B,
    up_A,
    up_B,
    down_A,
    down_B,
    scale,
    noise,
):
    gate_up, down = (
        dequantize(w, dtype=x.dtype, noise=own, implementation="eager")
        if isinstance(w, Quantized)
        else w.detach()
        for w, own in zip((gate_up_proj, down_proj), _noises(noise), strict=True)
    )
    rows, offsets, _, position = permute_eager(x, expert_index, gate_up.shape[0])
    gate, up = grouped_gemm_eager(rows, gate_up, offsets).chunk(2, -1)
    gate = _adapted(gate, rows, gate_A, gate_B, offsets, scale)
    up = _adapted(up, rows, up_A, up_B, offsets, scale)
    h = act_mul_eager(torch.cat((gate, up), -1), None, SILU)
    down = _adapted(grouped_gemm_eager(h, down, offsets), h, down_A, down_B, offsets, scale)
    return unpermute_eager(down, expert_weight, position)


def _adapted(base, rows, A, B, offsets, scale):
    E = offsets.shape[0]
    low = grouped_gemm_eager(rows, A.expand(E, -1, -1), offsets)
    delta = grouped_gemm_eager(low, B.expand(E, -1, -1), offsets)
    acc = torch.promote_types(base.dtype, torch.float32)
    return (base.to(acc) + scale * delta.to(acc)).to(base.dtype)


# ---- fused implementations, composed of a grouped GEMM's

_T = torch.Tensor


def _fake_forward(
    x, index, weight, gate_A, gate_B, up_A, up_B, down_A, down_B, scale, keep, *packed
):
    T, R = x.shape[0] if keep else 0, index.shape[0] * index.shape[1]
    rows = R if keep else 0
    return (
        x.new_empty(x.shape),
        x.new_empty(rows, 2 * gate_B.shape[1]),
        x.new_empty(T if _is_shared(gate_A) else rows, gate_A.shape[1] + up_A.shape[1]),
        x.new_empty(T if _is_shared(down_B) else rows, down_A.shape[1]),
        x.new_empty(packed[5][0], dtype=torch.int32),
        x.new_empty(R, dtype=torch.int32),
        x.new_empty(index.shape, dtype=torch.int32),
    )


def _fake_backward(
    dy,
    x,
    weight,
    gate_A,
    gate_B,
    up_A,
    up_B,
    down_A,
    down_B,
    pre,
    low,
    low_down,
    offsets,
    slots,
    position,
    scale,
    needs,
    *packed,
):
    like = (x, weight, gate_A, gate_B, up_A, up_B, down_A, down_B)
    return tuple(t.new_empty(t.shape if need else 0) for t, need in zip(like, needs, strict=True))


def _register(name, forward, backward):
    """forward: (two functions that give the dense weights, E, x, index, weight, the adapters,
    scale, keep) -> y; pre and A's results of gate and up, and of down (all without rows unless
    keep); offsets, slots, position.
    backward: -> the gradients of x, weight and the adapters, empty where `needs` does not ask. No
    size is 0 in either.
    """
    dequantizes = "triton" if name == "triton" else None

    def weights(packed, dtype):
        return [partial(_weight, dequantizes, dtype, *p) for p in (packed[:9], packed[9:])]

    # An operator's arguments are written out: 9 of `Packed` for each weight.
    def whole_forward(
        x: _T,
        index: _T,
        weight: _T,
        gate_A: _T,
        gate_B: _T,
        up_A: _T,
        up_B: _T,
        down_A: _T,
        down_B: _T,
        scale: float,
        keep: bool,
        base_data: _T,
        base_scale: _T | None,
        base_first: _T | None,
        base_second: _T | None,
        base_format: str,
        base_shape: list[int],
        base_block: list[int],
        base_alpha: float,
        base_key: list[int],
        last_data: _T,
        last_scale: _T | None,
        last_first: _T | None,
        last_second: _T | None,
        last_format: str,
        last_shape: list[int],
        last_block: list[int],
        last_alpha: float,
        last_key: list[int],
    ) -> tuple[_T, _T, _T, _T, _T, _T, _T]:
        packed = (
            base_data,
            base_scale,
            base_first,
            base_second,
            base_format,
            base_shape,
            base_block,
            base_alpha,
            base_key,
            last_data,
            last_scale,
            last_first,
            last_second,
            last_format,
            last_shape,
            last_block,
            last_alpha,
            last_key,
        )
        arguments = (x, index, weight, gate_A, gate_B, up_A, up_B, down_A, down_B, scale, keep)
        if x.numel() and gate_B.numel():
            with _checks.no_autocast(x):
                return forward(*weights(packed, x.dtype), base_shape[0], *arguments)
        return tuple(t.zero_() for t in _fake_forward(*arguments, *packed))

    def whole_backward(
        dy: _T,
        x: _T,
        weight: _T,
        gate_A: _T,
        gate_B: _T,
        up_A: _T,
        up_B: _T,
        down_A: _T,
        down_B: _T,
        pre: _T,
        low: _T,
        low_down: _T,
        offsets: _T,
        slots: _T,
        position: _T,
        scale: float,
        needs: list[bool],
        base_data: _T,
        base_scale: _T | None,
        base_first: _T | None,
        base_second: _T | None,
        base_format: str,
        base_shape: list[int],
        base_block: list[int],
        base_alpha: float,
        base_key: list[int],
        last_data: _T,
        last_scale: _T | None,
        last_first: _T | None,
        last_second: _T | None,
        last_format: str,
        last_shape: list[int],
        last_block: list[int],
        last_alpha: float,
        last_key: list[int],
    ) -> tuple[_T, _T, _T, _T, _T, _T, _T, _T]:
        packed = (
            base_data,
            base_scale,
            base_first,
            base_second,
            base_format,
            base_shape,
            base_block,
            base_alpha,
            base_key,
            last_data,
            last_scale,
            last_first,
            last_second,
            last_format,
            last_shape,
            last_block,
            last_alpha,
            last_key,
        )
        arguments = (
            dy,
            x,
            weight,
            gate_A,
            gate_B,
            up_A,
            up_B,
            down_A,
            down_B,
            pre,
            low,
            low_down,
            offsets,
            slots,
            position,
            scale,
            needs,
        )
        if x.numel() and gate_B.numel():
            with _checks.no_autocast(x):
                return backward(*weights(packed, x.dtype), *arguments)
        return tuple(t.zero_() for t in _fake_backward(*arguments))

    forward_op = define(f"moe_lora_{name}_forward", whole_forward, _fake_forward)
    backward_op = define(f"moe_lora_{name}_backward", whole_backward, _fake_backward)
    differentiable = (0, *range(2, 9))  # x, weight and the adapters

    def setup(ctx, inputs, output):
        base, last = inputs[11:20], inputs[20:]
        ctx.save_for_backward(
            *(inputs[i] for i in differentiable), *output[1:], *base[:4], *last[:4]
        )
        ctx.options = inputs[9], base[4:], last[4:]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    def formula(ctx, dy, *_):
        grads = [None] * 29
        if dy is None:
            return tuple(grads)
        needs = [ctx.needs_input_grad[i] for i in differentiable]
        saved, (scale, base, last) = ctx.saved_tensors, ctx.options
        found = backward_op(dy, *saved[:14], scale, needs, *saved[14:18], *base, *saved[18:], *last)
        for i, need, grad in zip(differentiable, needs, found, strict=True):
            grads[i] = grad if need else None
        return tuple(grads)

    differentiate(forward_op, formula, setup)

    def call(x, gate_up_proj, down_proj, index, weight, *rest):
        *adapters, scale, noise = rest
        keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, *adapters))
        base, last = (
            _packed(w, own)
            for w, own in zip((gate_up_proj, down_proj), _noises(noise), strict=True)
        )
        return forward_op(x, index, weight.contiguous(), *adapters, scale, keep, *base, *last)[0]

    return call


def _compose(name):
    product, backward_x, backward_weight = operators(name)

    # A factor by rows, its transpose by rows, and its gradient: dense if it is shared. Rows of the
    # tail are 0 in `upstream`, and finite in `rows`.
    def times(rows, factor, offsets):
        return rows @ factor[0].t() if _is_shared(factor) else product(rows, factor, offsets)

    def times_transposed(rows, factor, offsets):
        return rows @ factor[0] if _is_shared(factor) else backward_x(rows, factor, offsets)

    def gradient(upstream, rows, factor, offsets):
        return (
            (upstream.t() @ rows)[None]
            if _is_shared(factor)
            else backward_weight(upstream, rows, offsets)
        )

    def forward(
        gate_up, down, E, x, index, weight, gate_A, gate_B, up_A, up_B, down_A, down_B, scale, keep
    ):
        _, offsets, slots, position = PERMUTE.part(x)(None, index, E)
        token = slots // index.shape[1]
        rows = x[token]
        A = torch.cat((gate_A, up_A), 1)  # one pass over the rows for both
        low = times(x if _is_shared(A) else rows, A, offsets)  # of tokens if A is shared
        low_rows = _at_rows(low, token, offsets) if _is_shared(A) else low
        pre = product(rows, gate_up(), offsets)
        del rows
        for half, part, B in zip(
            pre.chunk(2, -1), _split(low_rows, gate_A, up_A), (gate_B, up_B), strict=True
        ):
            half.add_(times(part, B, offsets), alpha=scale)
        h = SILU_MUL.part(pre)(pre, None, SILU)
        pre = pre if keep else pre.new_empty(0, pre.shape[1])
        low_down = times(h, down_A, offsets)
        rows = product(h, down(), offsets)
        del h
        collect = UNPERMUTE.part(x)
        if _is_shared(down_B):
            low_down = collect(
                low_down, weight, position
            )  # of tokens, with the weights of their experts
            y = collect(rows, weight, position).add_(low_down @ down_B[0].t(), alpha=scale)
        else:
            y = collect(
                rows.add_(product(low_down, down_B, offsets), alpha=scale), weight, position
            )
        if not keep:
            low, low_down = low.new_empty(0, low.shape[1]), low_down.new_empty(0, low_down.shape[1])
        return y, pre, low, low_down, offsets, slots, position

    def backward(
        gate_up,
        down,
        dy,
        x,
        weight,
        gate_A,
        gate_B,
        up_A,
        up_B,
        down_A,
        down_B,
        pre,
        low,
        low_down,
        offsets,
        slots,
        position,
        scale,
        needs,
    ):
        (
            need_x,
            need_weight,
            need_gate_A,
            need_gate_B,
            need_up_A,
            need_up_B,
            need_down_A,
            need_down_B,
        ) = needs
        need_A, need_B = need_gate_A or need_up_A, (need_gate_B, need_up_B)
        token = slots // position.shape[1]
        of_rows = weight.flatten()[slots][:, None]
        rows = dy[token]
        if _is_shared(down_B):
            upstream = _at_rows((dy @ down_B[0]).mul_(scale), token, offsets)
        else:
            upstream = backward_x(rows, down_B, offsets).mul_(scale)
        dh = backward_x(rows, down(), offsets).add_(times_transposed(upstream, down_A, offsets))
        h, dpre, dots = _between(dh, pre, of_rows)  # h with the weights of its rows
        del dh
        ddown_A = gradient(upstream, h, down_A, offsets) if need_down_A else dy.new_empty(0)
        del h
        if not need_down_B:
            ddown_B = dy.new_empty(0)
        elif _is_shared(down_B):
            ddown_B = (dy.t() @ (low_down * scale))[None]
        else:
            ddown_B = backward_weight(
                rows, (scale * of_rows * low_down.float()).to(dy.dtype), offsets
            )
        del rows

        A = torch.cat((gate_A, up_A), 1)
        dB, upstream = [], []
        low_rows = _at_rows(low, token, offsets) if any(need_B) and _is_shared(A) else low
        for half, part, B, need in zip(
            dpre.chunk(2, -1), _split(low_rows, gate_A, up_A), (gate_B, up_B), need_B, strict=True
        ):
            upstream.append(times_transposed(half, B, offsets).mul_(scale))
            dB.append(gradient(half, part * scale, B, offsets) if need else dy.new_empty(0))
        upstream = torch.cat(upstream, 1)
        collect = UNPERMUTE.part(dy)
        dA, dx = dy.new_empty(1, 0, 0), dy.new_empty(0)
        if _is_shared(A):
            upstream = collect(upstream, None, position)  # of tokens
            if need_A:
                dA = (upstream.t() @ x)[None]
            if need_x:
                dx = collect(backward_x(dpre, gate_up(), offsets), None, position).add_(
                    upstream @ A[0]
                )
        else:
            if need_A:
                dA = backward_weight(upstream, x[token], offsets)
            if need_x:
                dx = collect(
                    backward_x(dpre, gate_up(), offsets).add_(backward_x(upstream, A, offsets)),
                    None,
                    position,
                )
        # Copies: two results of an operator may not share memory.
        dgate_A, dup_A = (
            part.clone(memory_format=torch.contiguous_format) if need else dy.new_empty(0)
            for part, need in (
                (dA[:, : gate_A.shape[1]], need_gate_A),
                (dA[:, gate_A.shape[1] :], need_up_A),
            )
        )
        dweight = _of_slots(dots, position) if need_weight else dots.new_empty(0)
        return dx, dweight, dgate_A, dB[0], dup_A, dB[1], ddown_A, ddown_B

    return _register(name, forward, backward)


def _is_shared(factor):
    return factor.shape[0] == 1


def _at_rows(of_tokens, token, offsets):
    """Rows of the rank of an adapter from those of tokens; the tail is 0, as a grouped GEMM
    leaves it.
    """
    tail = torch.arange(token.shape[0], device=token.device) >= offsets[-1]
    return of_tokens[token].masked_fill_(tail[:, None], 0)


def _split(low, gate_A, up_A):
    return low.split((gate_A.shape[1], up_A.shape[1]), -1)


def _of(implementation):
    """This op on a grouped GEMM's implementation, which can run where that can."""
    return replace(
        implementation, load=cache(partial(_compose, implementation.name)), gate=no_kernels
    )


# ---- cases

MODES = {  # leading sizes of gate_A and up_A, gate_B and up_B, down_A, down_B; 0 stands for E
    "per_expert": (0, 0, 0, 0),
    "shared": (1, 1, 1, 1),
    "hybrid_shared": (1, 0, 0, 1),
}
_QUANTIZE = {
    "nf4": lambda w: quantize_nf4(w, block_size=32, double_quant=True),
    "nvfp4": quantize_nvfp4,
    "block_fp8": lambda w: quantize_block_fp8(w, block=(16, 16)),
}


def _case(
    name,
    T,
    E,
    K,
    H,
    I,
    ranks,
    mode="per_expert",
    kind="uniform",
    quantized=None,
    tags=cases.CONTRACT,
):
    gate, up, down = (ranks,) * 3 if isinstance(ranks, int) else ranks

    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        draw = {"device": device, "dtype": dtype, "gen": g}
        shared_A, shared_B, down_A, down_B = (n or E for n in MODES[mode])
        base = {
            "gate_up_proj": cases.randn(E, 2 * I, H, scale=H**-0.5, requires_grad=False, **draw),
            "down_proj": cases.randn(E, H, I, scale=max(I, 1) ** -0.5, requires_grad=False, **draw),
        }
        if quantized:
            base = {n: _QUANTIZE[quantized](w) for n, w in base.items()}
        weight = cases.randn(T, K, device=device, dtype=torch.float32, gen=g).detach().softmax(-1)
        return {
            "x": cases.randn(T, H, **draw),
            **base,
            "expert_index": _routing(device, g, T, E, K, kind),
            "expert_weight": weight.requires_grad_(),
            "gate_A": cases.randn(shared_A, gate, H, scale=H**-0.5, **draw),
            "gate_B": cases.randn(shared_B, I, gate, scale=gate**-0.5, **draw),
            "up_A": cases.randn(shared_A, up, H, scale=H**-0.5, **draw),
            "up_B": cases.randn(shared_B, I, up, scale=up**-0.5, **draw),
            "down_A": cases.randn(down_A, down, I, scale=max(I, 1) ** -0.5, **draw),
            "down_B": cases.randn(down_B, H, down, scale=down**-0.5, **draw),
            "scale": 0.75,
        }

    def cost(itemsize):
        R, weights, rank = T * K, 3 * E * H * I, gate + up + down
        rows = itemsize * R * (4 * I + 2 * rank)  # pre and A's results are written and read
        base, low = 6 * R * H * I, 2 * R * rank * (H + I)
        return Cost(
            itemsize * (weights + 2 * T * H) + rows,
            itemsize * (weights + 3 * T * H) + rows,
            base + low,
            base + 2 * low,
        )

    return Case(name, make, cost, tags)


_QWEN = (128, 8, 2048, 768)
_CASES = (
    *(
        _case(f"sentinels_{mode}", 13, 4, 2, 20, 19, (3, 5, 2), mode, "sentinels")
        for mode in ("per_expert", "shared")
    ),
    _case("aligned", 48, 4, 2, 64, 32, 8),
    _case("half_idle_hybrid_shared", 29, 8, 3, 16, 24, 4, "hybrid_shared", "half"),
    _case("only_sentinels", 7, 3, 2, 16, 8, 2, "hybrid_shared", "none"),
    _case("one_expert", 11, 1, 1, 12, 10, 13, kind="sentinels"),  # and ranks above the widths
    _case("no_tokens_shared", 0, 3, 2, 16, 8, 2, "shared"),
    _case("nf4", 9, 3, 2, 16, 12, 2, quantized="nf4"),
    _case("nvfp4_hybrid_shared", 9, 3, 2, 32, 16, (2, 3, 4), "hybrid_shared", "sentinels", "nvfp4"),
    _case("block_fp8_shared", 9, 3, 2, 16, 24, 2, "shared", quantized="block_fp8"),
    *(
        _case(f"qwen3-30b-a3b_{mode}_{T}", T, *_QWEN, 16, mode, tags=cases.CUDA)
        for T, mode in ((8192, "per_expert"), (32768, "per_expert"), (32768, "hybrid_shared"))
    ),
    *(
        _case(f"qwen3-30b-a3b-32e_{mode}_128", 128, 32, *_QWEN[1:], 16, mode, tags=cases.CPU)
        for mode in MODES
    ),
)


MOE_LORA = Op(
    "moe_lora",
    moe_lora,
    moe_lora_eager,
    tuple(_of(i) for i in GROUPED_GEMM.implementations if i.name != "eager"),
    _CASES,
    # Root mean squares of errors are the twin's (0.9 to 1.1 times, by tensor, over 6 seeds and all
    # cases). But a factor's gradient is a sum over few rows of what has been rounded nine times or
    # so, in another order here, and its
    # largest error is that of a few rows: beyond twice the twin's it reached 5 eps in float32, 6 in
    # bfloat16 with AVX-512, and 8.1 in float32 with AVX2 (12 seeds, every layout of gradients).
    atol={t: (16 if t == torch.float32 else 8) * torch.finfo(t).eps for t in FLOATS},
    eager_reads_host="contract",
)
