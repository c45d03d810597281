"""The experts of a mixture-of-experts layer as one op: gather, up-projection, SwiGLU,
down-projection, weighted sum.

T = tokens, K = experts a token, R = T K rows, E = experts, H = width of the model, I = inner width
of an expert. With rows in the order of their experts (`sort_by_expert`), and token(r), e(r), w(r)
of a row r:

    pre[r] = gate_up_proj[e(r)] x[token(r)] + gate_up_bias[e(r)]
    h[r]   = silu(gate) * up, where pre[r] = [gate; up], or what another `Gate` makes of them
    y[t]   = the sum over t's rows of w(r) (down_proj[e(r)] h[r] + down_bias[e(r)])

What is kept for the backward is x, pre and the routing (`saved_bytes`), because the backward needs
neither the result of the down-projection nor its gradient. With dh[r] = down_proj[e(r)]^T
dy[token(r)],

    dw(r) = <dh[r], h[r]> + <dy[token(r)], down_bias[e(r)]>         dpre[r] = dSwiGLU(pre[r], w(r)
    dh[r]) ddown_proj[e] = the sum over e's rows of dy[token(r)] (w(r) h[r])^T, and ddown_bias[e]
    that of w(r) dy[token(r)]

as in SonicMoE, arXiv:2512.14080. x is gathered in the products, so no copy of it in the order of
the experts is kept.

Quantised weights are frozen. Each is dequantised, all experts in one launch, for the one product
that it is in, and again in the backward. What is kept is their codes and scales, pre and the
routing; x is not, since only gradients of weights need it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch

from tilewright import platform
from tilewright.ops import _checks, cases, moe_quack
from tilewright.ops._library import define, differentiate
from tilewright.ops.activation import ACTIVATIONS, SILU, SILU_MUL, Gate, gate_eager, gate_parts
from tilewright.ops.aqn import AQN
from tilewright.ops.block_fp8 import quantize_block_fp8
from tilewright.ops.grouped_gemm import GROUPED_GEMM, grouped_gemm_eager, operators
from tilewright.ops.nf4 import quantize_nf4
from tilewright.ops.nvfp4 import quantize_nvfp4
from tilewright.ops.permute import PERMUTE, UNPERMUTE, checked_index, permute_eager, unpermute_eager
from tilewright.ops.quantize import Quantized
from tilewright.ops.quantized_linear import Packed, checked_noise, dense, dequantize, pack
from tilewright.registry import Case, Cost, Goal, Implementation, Op, no_kernels, short

SWIGLU = Gate()


@_checks.autocast("products", "x", "gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
def moe_mlp(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor | Quantized,
    down_proj: torch.Tensor | Quantized,
    expert_index: torch.Tensor,
    expert_weight: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate: Gate = SWIGLU,
    noise: AQN | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """y[t] = sum_k expert_weight[t, k] * (down_proj[e] (silu(gate) * up) + down_bias[e]),
    [gate; up] = gate_up_proj[e] x[t] + gate_up_bias[e], e = expert_index[t, k].

    x: [T, H] fp32 | bf16 | fp16 (fp64 with eager), any strides.
    gate_up_proj: [E, 2 I, H], gates before ups, and down_proj: [E, H, I], in x's dtype; or both
        quantised (NF4, NVFP4, BlockFP8), and then frozen, and read in x's dtype.
    expert_index: [T, K] int32 or int64, 0 to E - 1; E for a slot whose expert is not here: it adds
        nothing and gets no gradient.
    expert_weight: [T, K], any floating dtype, used in float32.
    gate_up_bias: [E, 2 I], in the order of gate_up_proj's rows, and down_bias: [E, H], in x's
        dtype; None for none. Not with quantised weights.
    gate: what stands in the place of silu(gate) * up, and whether gates and ups are interleaved
        (see `Gate`). Only the default with quantised weights.
    noise: of quantised weights, what `dequantize_*` adds: to gate_up_proj noise, to down_proj noise
        of the next layer (noise.layer + 1); the same in forward and backward. None for nothing.
    Returns [T, H], contiguous, in x's dtype; of quantised weights, bit for bit what dequantised
    ones give. Products are summed in float32; gate, up, silu(gate) * up and the rows of the
    down-projection are each rounded to x's dtype (products once more where a bias is added after
    that), the sum over k (in its order) is in float32, rounded once. Under torch.autocast x, biases
    and weights that are tensors are cast to its dtype. Differentiable in x, gate_up_proj,
    down_proj, expert_weight and biases, once; the gradient of an expert without
    tokens is 0. Kept for the backward: the arguments (but gate_up_bias), gate and up, and the order
    of rows (`saved_bytes`); with quantised weights their own tensors, not a dequantised one, and
    not x. Deterministic. Raises TypeError or ValueError for arguments that do not fit, IndexError
    for an index outside (on CUDA, where looking would wait for the device, it counts as E),
    ImplementationUnavailable for a named implementation that cannot run here.
    Source: the experts of Mixtral, arXiv:2401.04088, and Qwen3-MoE, in the layout of transformers
    5; biases and `Gate`: gpt-oss, arXiv:2508.10925. See the module's docstring for the backward.
    """
    index = _validate(
        x,
        gate_up_proj,
        down_proj,
        expert_index,
        expert_weight,
        noise,
        gate_up_bias,
        down_bias,
        gate,
    )
    weight = expert_weight.to(torch.promote_types(x.dtype, torch.float32))
    return MOE_MLP.pick(implementation, x)(
        x, gate_up_proj, down_proj, index, weight, noise, gate_up_bias, down_bias, gate
    )


def saved_bytes(
    T: int,
    K: int,
    E: int,
    H: int,
    I: int,
    itemsize: int,
    quantized: bool = False,
    triton: bool = False,
) -> int:
    """Bytes that one call of a fused implementation keeps for its backward, beside weights and
    biases: x (not if those are quantised), gate and up, the weights of the routing, slots,
    positions and offsets, and of Triton the map of tiles.
    """
    tiles = _map_size(T * K, E) if triton else 0
    return (
        itemsize * (0 if quantized else T * H)
        + itemsize * T * K * 2 * I
        + 4 * (3 * T * K + E + tiles)
    )


def _validate(
    x, gate_up_proj, down_proj, expert_index, expert_weight, noise, gate_up_bias, down_bias, gate
):
    weights = {"gate_up_proj": gate_up_proj, "down_proj": down_proj}
    frozen = [name for name, t in weights.items() if isinstance(t, Quantized)]
    if len(frozen) == 1:
        raise TypeError(
            f"gate_up_proj and down_proj must both be tensors or both be quantised, got only "
            f"{frozen[0]} "
            "quantised"
        )
    for name, t in {"x": x, **({} if frozen else weights), "expert_weight": expert_weight}.items():
        _checks.floating(name, t)
    checked_noise(noise)
    if noise is not None and not frozen:
        raise ValueError("noise is for quantised weights, got it with tensors")
    if not isinstance(gate, Gate):
        raise TypeError(f"gate must be a Gate, got {type(gate).__name__}")
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    for name, given in {
        **{name: t is not None for name, t in biases.items()},
        "gate": gate != SWIGLU,
    }.items():
        if given and frozen:
            raise ValueError(f"{name} is for weights that are tensors, got it with quantised ones")
    held = {name: t.tensors()[0] if frozen else t for name, t in weights.items()}
    _checks.same_device(
        x=x, **held, expert_index=expert_index, expert_weight=expert_weight, **biases
    )
    if x.dim() != 2:
        raise ValueError(f"x must have shape [T, H], got {list(x.shape)}")
    if len(gate_up_proj.shape) != 3 or gate_up_proj.shape[1] % 2:
        raise ValueError(
            f"gate_up_proj must have shape [E, 2 I, H], got {list(gate_up_proj.shape)}"
        )
    E, I, H = gate_up_proj.shape[0], gate_up_proj.shape[1] // 2, x.shape[1]
    _checks.shape("gate_up_proj", gate_up_proj, (E, 2 * I, H), "[E, 2 I, H], with x's H")
    _checks.shape("down_proj", down_proj, (E, H, I), "[E, H, I] of gate_up_proj")
    for name, t in weights.items():
        if not frozen and t.dtype != x.dtype:
            raise TypeError(f"{name} must have x's dtype {short(x.dtype)}, got {short(t.dtype)}")
    if I == 0 and down_bias is not None:
        raise ValueError(
            "down_bias needs an inner width I that is not 0, got gate_up_proj of shape "
            f"{list(gate_up_proj.shape)}"
        )
    for (name, t), expected in zip(biases.items(), ((E, 2 * I), (E, H)), strict=True):
        if t is not None:
            _checks.floating(name, t)
            _checks.shape(name, t, expected, "that of its weight without the last dimension")
            if t.dtype != x.dtype:
                raise TypeError(
                    f"{name} must have x's dtype {short(x.dtype)}, got {short(t.dtype)}"
                )
    return checked_routing(x, expert_index, expert_weight, E)


def checked_routing(
    x: torch.Tensor, expert_index: torch.Tensor, expert_weight: torch.Tensor, E: int
) -> torch.Tensor:
    """The index, as `checked_index` gives it, if it and its weights fit x [T, H]. Raises as
    `moe_mlp` does.
    """
    index = checked_index(expert_index, E)
    if index.shape[0] != x.shape[0]:
        raise ValueError(
            f"expert_index must have a row for each of x's {x.shape[0]}, got {list(index.shape)}"
        )
    _checks.shape("expert_weight", expert_weight, tuple(index.shape), "that of expert_index")
    return index


# ---- the definition


def moe_mlp_eager(
    x,
    gate_up_proj,
    down_proj,
    expert_index,
    expert_weight,
    noise=None,
    gate_up_bias=None,
    down_bias=None,
    gate=SWIGLU,
):
    if isinstance(gate_up_proj, Quantized):
        gate_up_proj, down_proj = (
            dequantize(q, dtype=x.dtype, noise=own, implementation="eager")
            for q, own in zip((gate_up_proj, down_proj), _noises(noise), strict=True)
        )
    rows, offsets, _, position = permute_eager(x, expert_index, gate_up_proj.shape[0])
    pre = _biased(grouped_gemm_eager(rows, gate_up_proj, offsets), gate_up_bias, offsets)
    down = _biased(
        grouped_gemm_eager(gate_eager(pre, gate), down_proj, offsets), down_bias, offsets
    )
    return unpermute_eager(down, expert_weight, position)


def _biased(rows, bias, offsets):
    """The rows of each expert and its bias, rounded. (To the tail is added what it would be of the
    last expert: nobody reads that.)
    """
    return (
        rows
        if bias is None
        else rows + bias[_expert(torch.arange(rows.shape[0], device=rows.device), offsets)]
    )


def _expert(rows, offsets):
    """Of rows in the order of the experts, by their numbers. The last one's, of the tail."""
    return torch.searchsorted(offsets, rows.to(torch.int32), right=True).clamp_(
        max=offsets.shape[0] - 1
    )


def _noises(noise):
    """Of gate_up_proj and of down_proj."""
    return (None, None) if noise is None else (noise, replace(noise, layer=noise.layer + 1))


# ---- fused implementations

_loaded: dict[str, object] = {}


def _map_size(R, E):
    """Elements of Triton's map of tiles; tests hold it to kernels.grouped_gemm_triton.map_size,
    which needs Triton.
    """
    return 3 * ((R + (E + 1) * 127) // 128) + 1


def _fake_forward(x, gate_up, expert_index, keep, triton):
    """gate_up: the shape of gate_up_proj."""
    (E, N, _), R = gate_up, expert_index.shape[0] * expert_index.shape[1]
    return (
        x.new_empty(x.shape),
        x.new_empty((R, N) if keep else (0, N)),
        x.new_empty(E, dtype=torch.int32),
        x.new_empty(R, dtype=torch.int32),
        x.new_empty(expert_index.shape, dtype=torch.int32),
        x.new_empty(_map_size(R, E) if triton else 0, dtype=torch.int32),
    )


def _fake_backward(
    dy,
    x,
    gate_up_proj,
    down_proj,
    expert_weight,
    down_bias,
    pre,
    offsets,
    slots,
    position,
    tiles,
    activation,
    interleaved,
    numbers,
    needs,
):
    (E, N, H), like = gate_up_proj.shape, (x, gate_up_proj, down_proj, expert_weight, dy, dy)
    shapes = (x.shape, gate_up_proj.shape, down_proj.shape, expert_weight.shape, (E, N), (E, H))
    return tuple(
        t.new_empty(shape if need else 0)
        for t, shape, need in zip(like, shapes, needs, strict=True)
    )


def _operands(gate: Gate) -> tuple[int, bool, list[float]]:
    """Of an operator, which a gate stands for; 0 for no limit."""
    return (
        ACTIVATIONS.index(gate.activation),
        gate.interleaved,
        [
            float(gate.alpha),
            float(gate.limit or 0),
            float(gate.up_limit or 0),
            float(gate.up_offset),
        ],
    )


def _gate(activation, interleaved, numbers):
    alpha, limit, up_limit, offset = numbers
    return Gate(
        ACTIVATIONS[activation], alpha, limit or None, up_limit or None, offset, interleaved
    )


class _Frozen(NamedTuple):
    """A quantised weight, of which `_weight` makes a tensor for one product."""

    packed: Packed
    dtype: torch.dtype
    implementation: str | None

    @property
    def shape(self) -> list[int]:
        return self.packed.shape


def _weight(w):
    return dense(*w) if isinstance(w, _Frozen) else w


def _register(name, forward, backward, dequantizes=None):
    """forward: (x, gate_up_proj, down_proj, index, weight, keep, gate_up_bias, down_bias, gate) ->
    y, pre (without rows unless keep), offsets, slots, position, tiles (of Triton; else empty).
    backward: -> the gradients of x, both weights, the routing's and both biases, empty where
    `needs` does not ask; x is None unless that of gate_up_proj is asked for. No size is 0 in
    either. The weights are tensors or `_Frozen`.
    dequantizes: the implementation that does; None: the `unpinned` one.
    """
    frozen = _register_frozen(name, forward, backward, dequantizes)

    def whole_forward(
        x: torch.Tensor,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        expert_index: torch.Tensor,
        expert_weight: torch.Tensor,
        keep: bool,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        activation: int,
        interleaved: bool,
        numbers: list[float],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        arguments = (
            x,
            gate_up_proj,
            down_proj,
            expert_index,
            expert_weight,
            keep,
            gate_up_bias,
            down_bias,
        )
        if x.numel() and down_proj.numel():
            return forward(*arguments, _gate(activation, interleaved, numbers))
        return tuple(t.zero_() for t in fake_forward(*arguments))

    def fake_forward(x, gate_up_proj, down_proj, expert_index, expert_weight, keep, *_):
        return _fake_forward(x, gate_up_proj.shape, expert_index, keep, name == "triton")

    def whole_backward(
        dy: torch.Tensor,
        x: torch.Tensor,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        expert_weight: torch.Tensor,
        down_bias: torch.Tensor | None,
        pre: torch.Tensor,
        offsets: torch.Tensor,
        slots: torch.Tensor,
        position: torch.Tensor,
        tiles: torch.Tensor,
        activation: int,
        interleaved: bool,
        numbers: list[float],
        needs: list[bool],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        arguments = (
            dy,
            x,
            gate_up_proj,
            down_proj,
            expert_weight,
            down_bias,
            pre,
            offsets,
            slots,
            position,
            tiles,
        )
        if x.numel() and down_proj.numel():
            return backward(*arguments, _gate(activation, interleaved, numbers), needs)
        return tuple(
            g.zero_() for g in _fake_backward(*arguments, activation, interleaved, numbers, needs)
        )

    forward_op = define(f"moe_mlp_{name}_forward", whole_forward, fake_forward)
    backward_op = define(f"moe_mlp_{name}_backward", whole_backward, _fake_backward)

    def setup(ctx, inputs, output):
        x, gate_up_proj, down_proj, _, weight, _, _, down_bias, *ctx.gate = inputs
        ctx.save_for_backward(x, gate_up_proj, down_proj, weight, down_bias, *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    def formula(ctx, dy, *_):
        if dy is None:
            return (None,) * 11
        needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 4, 6, 7)]
        found = backward_op(dy, *ctx.saved_tensors, *ctx.gate, needs)
        dx, dgate_up, ddown, dweight, *dbiases = (
            g if need else None for g, need in zip(found, needs, strict=True)
        )
        return dx, dgate_up, ddown, None, dweight, None, *dbiases, None, None, None

    differentiate(forward_op, formula, setup)

    def call(
        x,
        gate_up_proj,
        down_proj,
        expert_index,
        expert_weight,
        noise=None,
        gate_up_bias=None,
        down_bias=None,
        gate=SWIGLU,
    ):
        if isinstance(gate_up_proj, Quantized):
            return frozen(x, gate_up_proj, down_proj, expert_index, expert_weight, noise)
        leaves = (x, gate_up_proj, down_proj, expert_weight, gate_up_bias, down_bias)
        keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in leaves)
        return forward_op(
            x,
            gate_up_proj,
            down_proj,
            expert_index,
            expert_weight.contiguous(),
            keep,
            gate_up_bias,
            down_bias,
            *_operands(gate),
        )[0]

    return call


def _fake_frozen_backward(dy, expert_weight, pre, offsets, slots, position, tiles, needs, *packed):
    return (
        dy.new_empty(dy.shape if needs[0] else 0),
        expert_weight.new_empty(expert_weight.shape if needs[1] else 0),
    )


def _register_frozen(
    name: str, forward: Callable, backward: Callable, dequantizes: str | None
) -> Callable:
    """The same of quantised weights. An operator's arguments are written out: 9 of `Packed` for
    each weight.
    """

    def weights(packed, dtype):
        return [_Frozen(Packed(*p), dtype, dequantizes) for p in (packed[:9], packed[9:])]

    def whole_forward(
        x: torch.Tensor,
        expert_index: torch.Tensor,
        expert_weight: torch.Tensor,
        keep: bool,
        up_data: torch.Tensor,
        up_scale: torch.Tensor,
        up_first: torch.Tensor | None,
        up_second: torch.Tensor | None,
        up_format: str,
        up_shape: list[int],
        up_block: list[int],
        up_alpha: float,
        up_key: list[int],
        down_data: torch.Tensor,
        down_scale: torch.Tensor,
        down_first: torch.Tensor | None,
        down_second: torch.Tensor | None,
        down_format: str,
        down_shape: list[int],
        down_block: list[int],
        down_alpha: float,
        down_key: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        packed = (
            up_data,
            up_scale,
            up_first,
            up_second,
            up_format,
            up_shape,
            up_block,
            up_alpha,
            up_key,
            down_data,
            down_scale,
            down_first,
            down_second,
            down_format,
            down_shape,
            down_block,
            down_alpha,
            down_key,
        )
        if x.numel() and all(down_shape):
            return forward(
                x, *weights(packed, x.dtype), expert_index, expert_weight, keep, None, None, SWIGLU
            )
        return tuple(t.zero_() for t in fake_forward(x, expert_index, expert_weight, keep, *packed))

    def fake_forward(x, expert_index, expert_weight, keep, *packed):
        return _fake_forward(x, packed[5], expert_index, keep, name == "triton")

    def whole_backward(
        dy: torch.Tensor,
        expert_weight: torch.Tensor,
        pre: torch.Tensor,
        offsets: torch.Tensor,
        slots: torch.Tensor,
        position: torch.Tensor,
        tiles: torch.Tensor,
        needs: list[bool],
        up_data: torch.Tensor,
        up_scale: torch.Tensor,
        up_first: torch.Tensor | None,
        up_second: torch.Tensor | None,
        up_format: str,
        up_shape: list[int],
        up_block: list[int],
        up_alpha: float,
        up_key: list[int],
        down_data: torch.Tensor,
        down_scale: torch.Tensor,
        down_first: torch.Tensor | None,
        down_second: torch.Tensor | None,
        down_format: str,
        down_shape: list[int],
        down_block: list[int],
        down_alpha: float,
        down_key: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        packed = (
            up_data,
            up_scale,
            up_first,
            up_second,
            up_format,
            up_shape,
            up_block,
            up_alpha,
            up_key,
            down_data,
            down_scale,
            down_first,
            down_second,
            down_format,
            down_shape,
            down_block,
            down_alpha,
            down_key,
        )
        if dy.numel() and all(down_shape):
            needs = [needs[0], False, False, needs[1], False, False]
            dx, _, _, dweight, *_ = backward(
                dy,
                None,
                *weights(packed, dy.dtype),
                expert_weight,
                None,
                pre,
                offsets,
                slots,
                position,
                tiles,
                SWIGLU,
                needs,
            )
            return dx, dweight
        return tuple(
            g.zero_()
            for g in _fake_frozen_backward(
                dy, expert_weight, pre, offsets, slots, position, tiles, needs
            )
        )

    forward_op = define(f"moe_mlp_{name}_frozen_forward", whole_forward, fake_forward)
    backward_op = define(f"moe_mlp_{name}_frozen_backward", whole_backward, _fake_frozen_backward)

    def setup(ctx, inputs, output):
        up, down = inputs[4:13], inputs[13:]
        ctx.save_for_backward(inputs[2], *output[1:], *up[:4], *down[:4])
        ctx.options = up[4:], down[4:]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    def formula(ctx, dy, *_):
        if dy is None:
            return (None,) * 22
        needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        saved, (up, down) = ctx.saved_tensors, ctx.options
        dx, dweight = backward_op(dy, *saved[:6], needs, *saved[6:10], *up, *saved[10:], *down)
        return dx if needs[0] else None, None, dweight if needs[1] else None, *[None] * 19

    differentiate(forward_op, formula, setup)

    def call(x, gate_up_proj, down_proj, expert_index, expert_weight, noise):
        keep = torch.is_grad_enabled() and (x.requires_grad or expert_weight.requires_grad)
        up, down = (
            pack(q, own) for q, own in zip((gate_up_proj, down_proj), _noises(noise), strict=True)
        )
        return forward_op(x, expert_index, expert_weight.contiguous(), keep, *up, *down)[0]

    return call


def _triton():
    if "triton" not in _loaded:
        from tilewright.kernels import grouped_gemm_triton as g
        from tilewright.kernels import permute_triton as p

        def forward(
            x,
            gate_up_proj,
            down_proj,
            expert_index,
            expert_weight,
            keep,
            gate_up_bias,
            down_bias,
            gate,
        ):
            offsets, slots, position = p.sort(expert_index, gate_up_proj.shape[0])
            tiles = g.tile_map(
                offsets, slots.shape[0], whole=True
            )  # of this pass and of its backward
            pre, h = g.up_swiglu(
                x,
                _weight(gate_up_proj),
                offsets,
                slots,
                expert_index.shape[1],
                keep,
                gate_up_bias,
                _constants(gate),
                tiles,
            )
            y = p.collect(
                g.forward(h, _weight(down_proj), offsets, down_bias, tiles), expert_weight, position
            )
            return (
                y,
                x.new_empty(0, gate_up_proj.shape[1]) if pre is None else pre,
                offsets,
                slots,
                position,
                tiles,
            )

        def backward(
            dy,
            x,
            gate_up_proj,
            down_proj,
            expert_weight,
            down_bias,
            pre,
            offsets,
            slots,
            position,
            tiles,
            gate,
            needs,
        ):
            K, none = position.shape[1], partial(dy.new_empty, 0)  # results may not share memory
            dpre, dweight, weighted = g.down_dswiglu(
                dy,
                _weight(down_proj),
                pre,
                expert_weight,
                offsets,
                slots,
                position,
                needs[2],
                down_bias if needs[3] else None,
                _constants(gate),
                tiles,
            )
            ddown = (
                g.backward_weight(dy, weighted, offsets, slots, K, gather="dy")
                if needs[2]
                else none()
            )
            del weighted  # as large as half of pre
            dgate_up = g.backward_weight(dpre, x, offsets, slots, K) if needs[1] else none()
            dx = (
                p.collect(g.backward_x(dpre, _weight(gate_up_proj), offsets, tiles), None, position)
                if needs[0]
                else none()
            )
            dgate_up_bias = (
                g.backward_weight(dpre, _ones(dpre), offsets)[..., 0] if needs[4] else none()
            )
            ddown_bias = (
                g.backward_weight(
                    dy, _column(expert_weight, slots, dy.dtype), offsets, slots, K, gather="dy"
                )[..., 0]
                if needs[5]
                else none()
            )
            return (
                dx,
                dgate_up,
                ddown,
                dweight if needs[3] else dweight.new_empty(0),
                dgate_up_bias.contiguous(),
                ddown_bias.contiguous(),
            )

        _loaded["triton"] = _register("triton", forward, backward, "triton")
    return _loaded["triton"]


def _constants(gate):
    """Of the Triton kernels."""
    return {
        "ACTIVATION": ACTIVATIONS.index(gate.activation),
        "INTERLEAVED": gate.interleaved,
        "ALPHA": gate.alpha,
        "LIMIT": gate.limit,
        "UP_LIMIT": gate.up_limit,
        "OFFSET": gate.up_offset,
    }


# The gradient of a bias is a product, too: of an expert's rows with a column of ones, or of the
# routing's weights.


def _ones(rows):
    return rows.new_ones(rows.shape[0], 1)


def _column(expert_weight, slots, dtype):
    return expert_weight.flatten()[slots][:, None].to(dtype)


def _composed(name):
    """forward and backward of the grouped GEMM of this name; the rest is what `auto` would take,
    whatever is pinned. The gathered rows are a copy, which lives as long as one product.
    """
    product, backward_x, backward_weight = operators(name)

    def forward(
        x, gate_up_proj, down_proj, expert_index, expert_weight, keep, gate_up_bias, down_bias, gate
    ):
        _, offsets, slots, position = PERMUTE.part(x)(None, expert_index, gate_up_proj.shape[0])
        pre = _biased(
            product(x[slots // expert_index.shape[1]], _weight(gate_up_proj), offsets),
            gate_up_bias,
            offsets,
        )
        h = SILU_MUL.part(pre)(pre, None, SILU) if gate == SWIGLU else gate_eager(pre, gate)
        y = UNPERMUTE.part(h)(
            _biased(product(h, _weight(down_proj), offsets), down_bias, offsets),
            expert_weight,
            position,
        )
        return (
            y,
            pre if keep else pre.new_empty(0, pre.shape[1]),
            offsets,
            slots,
            position,
            offsets.new_empty(0),
        )  # of tiles

    def backward(
        dy,
        x,
        gate_up_proj,
        down_proj,
        expert_weight,
        down_bias,
        pre,
        offsets,
        slots,
        position,
        tiles,
        gate,
        needs,
    ):
        token = slots // position.shape[1]
        rows = dy[token]
        dh = backward_x(rows, _weight(down_proj), offsets)
        weight = expert_weight.flatten()[slots][:, None]
        weighted, dpre, dots = _between(dh, pre, weight, gate)
        none = partial(dy.new_empty, 0)  # results may not share memory
        ddown = backward_weight(rows, weighted, offsets) if needs[2] else none()
        ddown_bias = (
            _of_bias(backward_weight, rows, weight.to(dy.dtype), offsets) if needs[5] else none()
        )
        del rows, dh, weighted
        dgate_up = backward_weight(dpre, x[token], offsets) if needs[1] else none()
        dgate_up_bias = (
            _of_bias(backward_weight, dpre, _ones(dpre), offsets) if needs[4] else none()
        )
        dx = (
            UNPERMUTE.part(dy)(backward_x(dpre, _weight(gate_up_proj), offsets), None, position)
            if needs[0]
            else none()
        )
        dweight = (
            _of_routing(dots, dy, down_bias, offsets, position) if needs[3] else dots.new_empty(0)
        )
        return dx, dgate_up, ddown, dweight, dgate_up_bias, ddown_bias

    return forward, backward


def _compose(name):
    return _register(name, *_composed(name))


def _quack():
    """What QuACK's epilogues have is fused; other gates and widths, and its versions that lack
    them, are composed.
    """
    from quack import gemm_interface

    composed_forward, composed_backward = composed = _composed("quack")
    if moe_quack.lacking(gemm_interface):
        return _register("quack", *composed)
    fused_forward, fused_backward = moe_quack.launchers(
        gemm_interface,
        lambda x, index, E: PERMUTE.part(x)(None, index, E)[1:],
        lambda rows, weight, position: UNPERMUTE.part(rows)(rows, weight, position),
        _weight,
    )
    _, _, backward_weight = operators("quack")

    def forward(x, gate_up_proj, *rest):
        fused = moe_quack.fits(gate_up_proj, x.element_size(), rest[-1])
        return (fused_forward if fused else composed_forward)(x, gate_up_proj, *rest)

    def backward(
        dy,
        x,
        gate_up_proj,
        down_proj,
        expert_weight,
        down_bias,
        pre,
        offsets,
        slots,
        position,
        tiles,
        gate,
        needs,
    ):
        if not moe_quack.fits(gate_up_proj, dy.element_size(), gate):
            return composed_backward(
                dy,
                x,
                gate_up_proj,
                down_proj,
                expert_weight,
                down_bias,
                pre,
                offsets,
                slots,
                position,
                tiles,
                gate,
                needs,
            )
        *found, dots, dpre = fused_backward(
            dy,
            x,
            gate_up_proj,
            down_proj,
            expert_weight,
            pre,
            offsets,
            slots,
            position,
            gate,
            needs,
        )
        none = partial(dy.new_empty, 0)  # results may not share memory
        dweight = (
            _of_routing(dots, dy, down_bias, offsets, position) if needs[3] else dots.new_empty(0)
        )
        dgate_up_bias = (
            _of_bias(backward_weight, dpre, _ones(dpre), offsets) if needs[4] else none()
        )
        ddown_bias = (
            _of_bias(
                backward_weight,
                dy[slots // position.shape[1]],
                _column(expert_weight, slots, dy.dtype),
                offsets,
            )
            if needs[5]
            else none()
        )
        return *(none() if d is None else d for d in found), dweight, dgate_up_bias, ddown_bias

    return _register("quack", forward, backward)


def _of_bias(backward_weight, rows, column, offsets):
    return backward_weight(rows, column, offsets)[..., 0].contiguous()


def _of_routing(dots, dy, down_bias, offsets, position):
    """The gradient of the routing's weights, of <dh, h> of rows."""
    dweight = _of_slots(dots, position)
    return (
        dweight if down_bias is None else dweight.add_(_bias_dots(dy, down_bias, offsets, position))
    )


def _of_slots(of_rows, position):
    """[T, K] from a number for each row; 0 for a slot without one."""
    return torch.where(position < 0, 0, of_rows[position.clamp_min(0)])


def _bias_dots(dy, down_bias, offsets, position):
    """[T, K]: <dy[t], down_bias[e]> in float32; 0 for a slot without a row."""
    found = dy.float() @ down_bias.float().t()
    return torch.where(position < 0, 0, found.gather(1, _expert(position, offsets)))


def _between(dh, pre, weight, gate=SWIGLU):
    """(weight * h, dpre, <dh, h>) of rows: what stands between the two products of the backward, in
    float32. It may
    overwrite dh. In place where it can be: rows are as many as tokens times experts a token.
    """
    a, da, v, dv = gate_parts(pre, gate)
    dh = dh.float()
    h = (a * v).to(pre.dtype).float()  # as the forward rounded it
    dots = (dh * h).sum(-1)
    weighted = h.mul_(weight).to(pre.dtype)
    del h
    dpre = torch.empty_like(pre)
    dgate, dup = gate.split(dpre)
    dh.mul_(weight)
    dup.copy_(a.mul_(dh).mul_(dv))
    dgate.copy_(dh.mul_(v).mul_(da))
    return weighted, dpre, dots


def _tunables():
    from tilewright.kernels import grouped_gemm_triton, permute_triton

    return (*grouped_gemm_triton.FUSED, *grouped_gemm_triton.TUNABLES, permute_triton.COLLECT)


def _of(name):
    """This op on a grouped GEMM's implementation, which can run where that can."""
    return replace(
        GROUPED_GEMM.implementation(name),
        load=cache(partial(_compose, name)),
        gate=no_kernels,
        tunables=no_kernels,
    )


# ---- cases


def _routing(device, gen, T, E, K, kind):
    """kind: "uniform"; "skewed" (Zipf); "half", where half of the experts get nothing; "one", where
    the last gets all (K is 1); "sentinels", where two fifths of the slots have no expert here;
    "none", where all have none.
    """
    if kind in ("one", "none"):
        return torch.full((T, K), E - 1 if kind == "one" else E, device=device)
    scores = (
        torch.rand(T, E, device=device, generator=gen).log().neg().log().neg()
    )  # Gumbel: top-k draws K experts
    if kind == "skewed":
        scores = scores - torch.arange(1, E + 1, device=device).log()
    if kind == "half":
        scores[:, ::2] -= 1e3
    index = scores.topk(K, -1).indices
    if kind == "sentinels":
        index[torch.rand(T, K, device=device, generator=gen) < 0.4] = E
    return index


_FORMATS = {
    "nf4": (quantize_nf4, 4.5),
    "nvfp4": (quantize_nvfp4, 4.5),
    "block_fp8": (lambda w: quantize_block_fp8(w, block=(16, 16)), 8.13),
}


_GPT_OSS = Gate(alpha=1.702, limit=7.0, up_limit=7.0, up_offset=1.0, interleaved=True)


def _case(
    name,
    T,
    E,
    K,
    H,
    I,
    kind="uniform",
    tags=cases.CONTRACT,
    format=None,
    biases=False,
    gate=None,
    transposed=False,
):
    """biases: with both.   transposed: weights that lie [E, H, 2 I] and [E, I, H]. Of a small case
    whose gate has limits, x and what makes gates and ups are multiples of 1 and 1/8: then sums are
    exact in every dtype, and none is near a limit, where a rounding would decide whether there is a
    gradient.
    """

    def make(device, dtype, seed):
        g = cases.generator(device, seed)
        draw = {"device": device, "dtype": dtype, "gen": g}
        exact = gate is not None and gate.limit is not None and tags == cases.CONTRACT

        def near(t, step):
            return ((t.detach() / step).round() * step).requires_grad_() if exact else t

        def lie(t):
            return t.detach().mT.contiguous().mT.requires_grad_() if transposed else t

        x = near(cases.randn(T, H, **draw), 1)
        weights = (
            lie(near(cases.randn(E, 2 * I, H, scale=H**-0.5, **draw), 1 / 8)),
            lie(cases.randn(E, H, I, scale=max(I, 1) ** -0.5, **draw)),
        )
        more = {} if gate is None else {"gate": gate}
        if biases:
            more |= {
                "gate_up_bias": near(cases.randn(E, 2 * I, **draw), 1 / 8),
                "down_bias": cases.randn(E, H, **draw),
            }
        if format is not None:
            weights = [_FORMATS[format][0](w.detach()) for w in weights]
        return {
            "x": x,
            "gate_up_proj": weights[0],
            "down_proj": weights[1],
            "expert_index": _routing(device, g, T, E, K, kind),
            "expert_weight": cases.randn(T, K, device=device, dtype=torch.float32, gen=g)
            .detach()
            .softmax(-1)
            .requires_grad_(),
            **more,
        }

    def cost(itemsize):
        R, weights = T * K, 3 * E * H * I
        forward = itemsize * (weights + 2 * T * H + 2 * R * 2 * I)  # pre is written and read
        if format is not None:
            moved = int(_FORMATS[format][1] / 8 * weights) + itemsize * (2 * T * H + 2 * R * 2 * I)
            return Cost(moved, moved, 6 * R * H * I, 6 * R * H * I)
        return Cost(
            forward,
            itemsize * (2 * weights + 3 * T * H + 2 * R * 2 * I),
            6 * R * H * I,
            12 * R * H * I,
        )

    return Case(name, make, cost, tags)


_QWEN, _MIXTRAL = (128, 8, 2048, 768), (8, 2, 4096, 14336)

_CASES = (
    _case("ragged", 37, 5, 2, 24, 19),
    _case("aligned", 48, 4, 2, 64, 32),
    _case("half_idle", 29, 8, 3, 16, 24, "half"),
    _case("one_expert_has_all", 33, 5, 1, 16, 16, "one"),
    _case("sentinels", 31, 4, 2, 20, 16, "sentinels"),
    _case("only_sentinels", 7, 3, 2, 16, 8, "none"),
    _case("one_expert", 21, 1, 1, 12, 10),
    _case("every_expert", 9, 4, 4, 16, 16),
    _case("no_tokens", 0, 3, 2, 16, 8),
    _case("skewed", 64, 16, 4, 32, 16, "skewed"),
    _case("biases", 37, 5, 2, 24, 19, "sentinels", biases=True),
    # Limits between the eighths that gates and ups are.
    _case(
        "gpt_oss",
        37,
        5,
        2,
        24,
        19,
        "half",
        biases=True,
        transposed=True,
        gate=replace(_GPT_OSS, limit=1.06, up_limit=0.94),
    ),
    _case(
        "gpt_oss_aligned",
        48,
        4,
        2,
        64,
        32,
        biases=True,
        gate=replace(_GPT_OSS, limit=1.06, up_limit=0.94),
    ),
    _case("clamped", 21, 3, 2, 16, 8, gate=Gate(limit=0.81, up_limit=1.19)),
    _case("interleaved", 21, 3, 2, 20, 10, "sentinels", gate=Gate(interleaved=True)),
    _case("gelu_tanh", 17, 3, 2, 16, 8, gate=Gate("gelu_tanh")),
    _case("gelu", 17, 3, 2, 16, 8, gate=Gate("gelu")),
    _case(
        "softcapped", 17, 3, 2, 16, 8, biases=True, gate=Gate("softcapped", limit=1.5, up_limit=2.5)
    ),
    _case("no_tokens_biases", 0, 3, 2, 16, 8, biases=True, gate=_GPT_OSS),
    *(
        _case(f"frozen_{format}", 13, 4, 2, 24, 10, "sentinels", format=format)
        for format in _FORMATS
    ),
    _case("frozen_aligned", 21, 3, 2, 32, 16, format="nvfp4"),
    _case("frozen_no_tokens", 0, 3, 2, 16, 8, format="nf4"),
    _case("qwen3-30b-a3b_8192", 8192, *_QWEN, tags=cases.CUDA),
    _case("qwen3-30b-a3b_32768", 32768, *_QWEN, tags=cases.CUDA),
    _case("qwen3-30b-a3b_32768_skewed", 32768, *_QWEN, "skewed", tags=cases.CUDA),
    *(
        _case(f"qwen3-30b-a3b_8192_{format}", 8192, *_QWEN, tags=cases.CUDA, format=format)
        for format in _FORMATS
    ),
    _case("mixtral-8x7b_8192", 8192, *_MIXTRAL, tags=cases.CUDA),
    _case(
        "gpt-oss-20b_8192",
        8192,
        32,
        4,
        2880,
        2880,
        tags=cases.CUDA,
        biases=True,
        gate=_GPT_OSS,
        transposed=True,
    ),
    # A quarter of DeepSeek-V3's experts, and of Qwen3's on a CPU: all of them, with gradients and
    # float64 truth, are more than the memory there is.
    _case("deepseek-v3-64e_8192", 8192, 64, 8, 7168, 2048, tags=cases.CUDA),
    _case("qwen3-30b-a3b-32e_128", 128, 32, *_QWEN[1:], tags=cases.CPU),
    _case("qwen3-30b-a3b-32e_512", 512, 32, *_QWEN[1:], tags=cases.CPU),
    _case("qwen3-30b-a3b-32e_128_skewed", 128, 32, *_QWEN[1:], "skewed", tags=cases.CPU),
)


MOE_MLP = Op(
    "moe_mlp",
    moe_mlp,
    moe_mlp_eager,
    (
        Implementation("triton", _triton, platform.no_triton, tunables=_tunables),
        _of("cpp"),
        _of("native"),
        replace(_of("quack"), load=cache(_quack), does=moe_quack.explain),
    ),
    _CASES,
    # The gradient of a weight is <dh, h> in the fused ones and <dy, row> in the twin: one number by
    # two ways, each of which cancels where the other does not. Over 12 seeds and all cases the
    # excess beyond twice the twin's own error reached 5 eps in float32; in 16 bits roundings of the
    # operands are larger than that.
    atol={torch.float32: 8 * torch.finfo(torch.float32).eps},
    goals=(
        *(
            Goal(
                cases.DATACENTER,
                which,
                "matmul_percent",
                at_least=least,
                cases=("qwen3-30b-a3b_32768",),
                dtypes=("bfloat16",),
            )
            for which, least in (("forward", 63), ("backward", 53))
        ),
        *(
            Goal(
                cases.DATACENTER,
                "forward_backward",
                f"over {other}",
                at_least=least,
                cases=("qwen3-30b-a3b_32768",),
                dtypes=("bfloat16",),
            )
            for other, least in (("native", 1.3), ("liger", 1.4))
        ),
        *(
            Goal("EPYC", "forward_backward", f"over {other}", at_least=least)
            for other, least in (("transformers", 1.5), ("transformers-grouped", 1.1))
        ),
    ),
    eager_reads_host="contract",
)
