"""Other libraries' kernels, called with an op's arguments: what tilewright is measured against.

`PEERS` is the only list of them. A peer is imported when one of its ops is called, and not before:
importing quack changes CuTe's tensor classes for the whole process, importing flash-attn 2 loads
its CUDA extension.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tilewright import platform
from tilewright.ops.activation import Gate


class Unsupported(Exception):
    """The peer has no such variant of the op; the message says what it lacks."""


@dataclass(frozen=True)
class Peer:
    """A library that has some of the ops.

    distribution: its name at the package index, whose version goes into a result.
    missing: device type -> None, or the sentence that says why it cannot run on that device type
    here.
    ops: op name -> a function with the arguments of the op's public function, or fewer that it
    raises Unsupported for.
    consumes: names of the ops whose inputs it overwrites; it is then given its own.
    elsewhere: other distributions that are the same peer, taken if `distribution` is not installed.
    """

    distribution: str
    missing: Callable[[str], str | None]
    ops: dict[str, Callable[..., Any]] = field(default_factory=dict)
    consumes: frozenset[str] = frozenset()
    elsewhere: tuple[str, ...] = ()

    def why_not(self, op_name: str, device: str) -> str | None:
        """None if the peer can run the op on such a device here, else the reason."""
        if op_name not in self.ops:
            return f"{self.distribution} has no such op, or none with this meaning"
        return self.missing(device)

    def installed(self) -> tuple[str, str] | None:
        """The distribution that is installed, and its version."""
        for name in (self.distribution, *self.elsewhere):
            if found := _version(name):
                return name, found
        return None


def versions() -> dict[str, str]:
    """Distribution and version of every peer, or "not installed". (torch's is told beside them.)"""
    return dict(
        peer.installed() or (peer.distribution, "not installed")
        for peer in PEERS.values()
        if peer.distribution != "torch"
    )


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _on_cuda(peer: str, module: str, capability: int) -> Callable[[str], str | None]:
    def missing(device):
        if reason := platform.no_module(module):
            return reason
        if device != "cuda":
            return f"{peer} takes CUDA tensors, not {device}"
        return platform.no_cuda(capability)

    return missing


def _only(peer: str, given: dict[str, Any], **defaults) -> None:
    """Raises Unsupported if an option is set to something else than the only value that the
    peer has.
    """
    for name, value in given.items():
        tensor = isinstance(value, torch.Tensor)
        if tensor or name not in defaults or value != defaults[name]:
            raise Unsupported(f"{peer} does not take {name}" + ("" if tensor else f"={value!r}"))


_PLAIN_LOSS = {
    "token_weight": None,
    "num_tokens": None,
    "return_lse": False,
    "return_entropy": False,
    "return_argmax": False,
    "group": None,
    "fp32_logits": False,
}


def _dense(peer: str, weight: Any, more: dict[str, Any]) -> None:
    if not isinstance(weight, torch.Tensor):
        raise Unsupported(f"{peer} does not take quantised experts")
    _only(peer, more, noise=None, gate_up_bias=None, down_bias=None, gate=Gate())


# ---- Liger-Kernel


def _liger_vector(weight):
    if weight.dim() != 1:
        raise Unsupported("liger-kernel takes one weight row, not one a head")


def _liger_rmsnorm(x, weight, eps=1e-6, *, bias=None, offset=0.0, cast="llama", noise=None):
    from liger_kernel.ops import LigerRMSNormFunction

    _liger_vector(weight)
    _only("liger-kernel", {"bias": bias, "noise": noise}, bias=None, noise=None)
    # Not in place: it would overwrite the upstream gradient, which every provider is given.
    return LigerRMSNormFunction.apply(x, weight, eps, offset, cast, False)


def _liger_add_rmsnorm(
    x, residual, weight, eps=1e-6, *, bias=None, offset=0.0, cast="llama", noise=None
):
    from liger_kernel.ops import LigerFusedAddRMSNormFunction

    _liger_vector(weight)
    _only("liger-kernel", {"bias": bias, "noise": noise}, bias=None, noise=None)
    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, offset, cast, False)


def _liger_silu_mul(gate, up=None):
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction

    if up is not None:
        return LigerSiLUMulFunction.apply(gate, up)
    rows = LigerFusedGateUpSiLUMulFunction.apply(
        gate.reshape(-1, gate.shape[-1])
    )  # it takes two dimensions
    return rows.reshape(*gate.shape[:-1], -1)


def _liger_gelu_mul(gate, up=None, *, approximate="tanh"):
    from liger_kernel.ops import LigerGELUMulFunction

    _only("liger-kernel", {"approximate": approximate}, approximate="tanh")
    return LigerGELUMulFunction.apply(*(gate.chunk(2, -1) if up is None else (gate, up)))


def _liger_cross_entropy(
    logits,
    target,
    *,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    class_weight=None,
    reduction="mean",
    inplace=False,
    **more,
):
    from liger_kernel.transformers.functional import liger_cross_entropy

    _only("liger-kernel", more, **_PLAIN_LOSS)
    loss = liger_cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        weight=class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        lse_square_scale=z_loss,
        label_smoothing=label_smoothing,
        softcap=softcap,
    )
    # It returns the loss in the logits' dtype; the op's contract is float32.
    return (loss.reshape(target.shape) if reduction == "none" else loss).float()


def _liger_linear_cross_entropy(
    x,
    weight,
    target,
    *,
    bias=None,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    class_weight=None,
    reduction="mean",
    accumulate="fp32",
    chunk_size=None,
    **more,
):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    _only("liger-kernel", more, **_PLAIN_LOSS)
    loss = liger_fused_linear_cross_entropy(
        x.reshape(-1, x.shape[-1]),
        weight,
        target.reshape(-1),
        bias=bias,
        ce_weight=class_weight,
        ignore_index=ignore_index,
        lse_square_scale=z_loss,
        label_smoothing=label_smoothing,
        reduction=reduction,
        softcap=softcap,
        accum_dtype=torch.float32 if accumulate == "fp32" else None,
    )
    return (loss.reshape(target.shape) if reduction == "none" else loss).float()


def _liger_rope(q, k, cos, sin, *, rotary_dim=None, inplace=False, **more):
    from liger_kernel.ops import LigerRopeFunction

    _only("liger-kernel", more, interleaved=False, position_ids=None, cu_seqlens=None)
    if k is None:
        raise Unsupported("liger-kernel rotates q and k together, not q alone")
    if cos.dim() == 2:
        cos, sin = cos[: q.shape[2]], sin[: q.shape[2]]
    R = q.shape[-1] if rotary_dim is None else rotary_dim
    return LigerRopeFunction.apply(q, k, cos, sin, None, 1, R)


def _liger_moe_mlp(x, gate_up_proj, down_proj, expert_index, expert_weight, **more):
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    _dense("liger-kernel", gate_up_proj, more)
    return LigerFusedMoEFunction.apply(
        x, gate_up_proj, down_proj, expert_index.int(), expert_weight
    )


# ---- quack
# Its norms stay in float32 up to the store, which is cast="gemma". "llama" rounds once more in
# between, and "none"
# lets a kernel do the same: it takes all three, and the contract judges it.


def _quack_bias(weight, bias):
    if weight.dim() == 2 and bias is not None:
        raise Unsupported(
            "quack-kernels takes one bias a head with one weight a head, not one for all heads"
        )


def _quack_rmsnorm(x, weight, eps=1e-6, *, bias=None, offset=0.0, cast="llama", noise=None):
    from quack.rmsnorm import rmsnorm

    _only("quack-kernels", {"noise": noise}, noise=None)
    _quack_bias(weight, bias)
    return rmsnorm(x, weight, bias=bias, eps=eps, weight_offset=offset)


def _quack_add_rmsnorm(
    x, residual, weight, eps=1e-6, *, bias=None, offset=0.0, cast="llama", noise=None
):
    from quack.rmsnorm import rmsnorm

    _only("quack-kernels", {"noise": noise}, noise=None)
    _quack_bias(weight, bias)
    return rmsnorm(
        x,
        weight,
        bias=bias,
        residual=residual,
        residual_dtype=residual.dtype,
        eps=eps,
        prenorm=True,
        weight_offset=offset,
    )


_QUACK_LOSS = {**_PLAIN_LOSS, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None}


def _quack_cross_entropy(
    logits, target, *, ignore_index=-100, class_weight=None, reduction="mean", inplace=False, **more
):
    from quack.cross_entropy import cross_entropy

    _only("quack-kernels", more, **_QUACK_LOSS)
    loss = cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        weight=class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        inplace_backward=inplace,
    )
    return (loss.reshape(target.shape) if reduction == "none" else loss).float()


def _quack_linear_cross_entropy(
    x,
    weight,
    target,
    *,
    bias=None,
    ignore_index=-100,
    reduction="mean",
    accumulate="fp32",
    chunk_size=None,
    **more,
):
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    _only(
        "quack-kernels",
        {"bias": bias, "accumulate": accumulate, **more},
        bias=None,
        accumulate="fp32",
        class_weight=None,
        **_QUACK_LOSS,
    )
    if reduction == "none":
        raise Unsupported("quack-kernels' chunked loss does not take reduction='none'")
    rows, chunk = target.numel(), {} if chunk_size is None else {"chunk_size": chunk_size}
    for name, length in (
        ("rows", rows),
        ("columns of x", x.shape[-1]),
        ("classes", weight.shape[0]),
        *(("rows a chunk", c) for c in chunk.values()),
    ):
        if length % 8:  # its copies are of 16 bytes; it does not look everywhere
            raise Unsupported(
                f"quack-kernels' chunked loss takes {name} in multiples of 8, not {length}"
            )
    return chunked_linear_cross_entropy(
        x.reshape(-1, x.shape[-1]),
        weight,
        target.reshape(-1),
        ignore_index=ignore_index,
        reduction=reduction,
        **chunk,
    ).float()


# ---- FlashAttention

# Distribution, module, least compute capability of forward and backward. The modules of 2 and 4
# share a package name, so that what is installed is told by the distribution.
_FLASH = (
    ("flash-attn-4", "flash_attn.cute", 90),
    ("flash-attn-3", "flash_attn_interface", 90),
    ("flash-attn", "flash_attn", 80),
)


def _flash_installed() -> tuple[str, str, int] | None:
    return next((found for found in _FLASH if _version(found[0])), None)


def _no_flash(device: str) -> str | None:
    found = _flash_installed()
    if found is None:
        return (
            f"none of the packages {', '.join(name for name, *_ in _FLASH)} is installed "
            f"({platform.INSTALL[_FLASH[0][0]]})"
        )
    distribution, module, capability = found
    return _on_cuda(distribution, module.partition(".")[0], capability)(device)


# Longest document of a cu_seqlens: a training loop knows it from its loader. To read it from the
# device at each call would be timed as if it were the peer's.
_longest: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _max_seqlen(cu_seqlens):
    if cu_seqlens not in _longest:
        _longest[cu_seqlens] = int(cu_seqlens.diff().max())
    return _longest[cu_seqlens]


def _flash_attention(q, k, v, *, cu_seqlens=None, causal=True, scale=None, **more):
    distribution, module, _ = _flash_installed()
    _only(distribution, more, window=None, softcap=None, sinks=None, max_seqlen=None)
    if k.shape[2] != q.shape[2]:
        raise Unsupported(f"{distribution} is called here with as many keys as queries only")
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise Unsupported(
            f"{distribution} takes bfloat16 and float16, not {str(q.dtype).removeprefix('torch.')}"
        )
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        raise Unsupported(
            f"{distribution} takes head widths that are multiples of 8 up to 256, not {q.shape[-1]}"
        )
    flash = importlib.import_module(module)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, S, H, D]
    if cu_seqlens is None:
        out = flash.flash_attn_func(q, k, v, softmax_scale=scale, causal=causal)
    else:
        longest, ends = _max_seqlen(cu_seqlens), cu_seqlens.to(torch.int32)
        out = flash.flash_attn_varlen_func(
            *(t.squeeze(0) for t in (q, k, v)),
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=scale,
            causal=causal,
        )
    out = out[0] if isinstance(out, tuple) else out  # 4, and early 3, return the log-sum-exp too
    return (out if cu_seqlens is None else out.unsqueeze(0)).transpose(1, 2)


# ---- PyTorch's flex_attention, compiled. Each case makes its block mask once, as a training loop
# would.

_masks: WeakIdKeyDictionary = WeakIdKeyDictionary()


@functools.cache
def _flex():
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    return flex, torch.compile(flex.flex_attention, dynamic=False)


def _flex_attention(
    q, k, v, *, cu_seqlens=None, causal=True, window=None, softcap=None, scale=None, **more
):
    _only("flex_attention", more, sinks=None, max_seqlen=None)
    flex, compiled = _flex()
    S, Sk = q.shape[2], k.shape[2]
    masks = _masks.setdefault(q if cu_seqlens is None else cu_seqlens, {})
    if (key := (causal, window, S, Sk)) not in masks:
        document = (
            None
            if cu_seqlens is None
            else torch.searchsorted(cu_seqlens.long(), torch.arange(S, device=q.device), right=True)
        )

        def seen(b, h, i, j):
            mask = i + (Sk - S) >= j if causal else i >= 0
            if window is not None:
                mask = mask & (i + (Sk - S) - j < window)
            return mask if document is None else mask & (document[i] == document[j])

        masks[key] = flex.create_block_mask(seen, None, None, S, Sk, device=q.device)

    def capped(score, b, h, i, j):
        return softcap * torch.tanh(score / softcap)

    return compiled(
        q,
        k,
        v,
        score_mod=capped if softcap else None,
        block_mask=masks[key],
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


# ---- transformers: its experts, as a loop over them and on torch's grouped_mm


def _experts_of_transformers(name):
    def moe_mlp(x, gate_up_proj, down_proj, expert_index, expert_weight, **more):
        _dense("transformers", gate_up_proj, more)
        qwen = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
        # What its functions read of a module; to make one would draw weights.
        experts = SimpleNamespace(
            gate_up_proj=gate_up_proj,
            down_proj=down_proj,
            num_experts=gate_up_proj.shape[0],
            act_fn=torch.nn.functional.silu,
            config=SimpleNamespace(_experts_implementation=name),
            has_gate=True,
            has_bias=False,
            has_post_expert_norm=False,
            is_transposed=False,
            is_concatenated=True,
            _is_expert_parallel=False,
        )
        experts._apply_gate = functools.partial(qwen.Qwen3MoeExperts._apply_gate, experts)
        return qwen.Qwen3MoeExperts.forward(experts, x, expert_index, expert_weight)

    return moe_mlp


def _no_transformers(device: str) -> str | None:
    return platform.no_module("transformers")


# ---- bitsandbytes: NF4

_states: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _bitsandbytes_quantize_nf4(x, *, double_quant=False, block_size=64):
    from bitsandbytes.functional import quantize_4bit

    data, state = quantize_4bit(
        x, blocksize=block_size, quant_type="nf4", compress_statistics=double_quant
    )
    return (
        data.view(-1),
        state.absmax,
        *((state.state2.absmax, state.offset) if double_quant else ()),
    )


def _bitsandbytes_dequantize_nf4(q, *, dtype=None, **more):
    from bitsandbytes.functional import QuantState, dequantize_4bit

    _only("bitsandbytes", more, noise=None)
    if q.data not in _states:  # a layer keeps it
        stored = q.to_safetensors("w")
        _states[q.data] = QuantState.from_dict(
            {k.removeprefix("w."): t for k, t in stored.items() if k != "w"}, device=q.data.device
        )
        # As one row: where a row is no multiple of a block, its kernel for AVX-512 takes the wrong
        # blocks' scales.
        _states[q.data].shape = torch.Size([math.prod(q.shape)])
    state = _states[q.data]
    state.dtype = q.dtype if dtype is None else dtype
    return dequantize_4bit(q.data[:, None], state).view(q.shape)


# ---- torchao: NVFP4


def _torchao_nvfp4(rows):
    if rows.dim() != 2 or rows.shape[1] % 16:
        raise Unsupported(
            f"torchao takes matrices whose width is a multiple of 16, not {list(rows.shape)}"
        )
    return importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")


def _torchao_quantize_nvfp4(x, *, square=False, global_scale=None, **more):
    _only("torchao", {"square": square, **more}, square=False, seed=None, hadamard=None)
    module = _torchao_nvfp4(x)
    if global_scale is None:
        global_scale = module.per_tensor_amax_to_scale(x.abs().max())
    scale, data = module.nvfp4_quantize(x, 16, global_scale)
    return data, scale, global_scale


def _torchao_dequantize_nvfp4(q, *, dtype=None, **more):
    _only("torchao", more, noise=None)
    module = _torchao_nvfp4(torch.empty(q.shape, device="meta"))
    return module.NVFP4Tensor(
        q.data, q.scale, 16, q.dtype if dtype is None else dtype, q.global_scale
    ).dequantize()


# ---- the table

PEERS: dict[str, Peer] = {
    "liger": Peer(
        "liger-kernel",
        _on_cuda("liger-kernel", "liger_kernel", 80),
        {
            "rmsnorm": _liger_rmsnorm,
            "add_rmsnorm": _liger_add_rmsnorm,
            "silu_mul": _liger_silu_mul,
            "gelu_mul": _liger_gelu_mul,
            "rope": _liger_rope,
            "cross_entropy": _liger_cross_entropy,
            "linear_cross_entropy": _liger_linear_cross_entropy,
            "moe_mlp": _liger_moe_mlp,
        },
        consumes=frozenset({"cross_entropy", "rope"}),
    ),  # by the gradient, and the rotated rows
    "quack": Peer(
        "quack-kernels",
        _on_cuda("quack-kernels", "quack", 90),
        {
            "rmsnorm": _quack_rmsnorm,
            "add_rmsnorm": _quack_add_rmsnorm,
            "cross_entropy": _quack_cross_entropy,
            "linear_cross_entropy": _quack_linear_cross_entropy,
        },
    ),
    "flash-attn": Peer(
        "flash-attn-4",
        _no_flash,
        {"attention": _flash_attention},
        elsewhere=("flash-attn-3", "flash-attn"),
    ),
    "flex": Peer(
        "torch",
        lambda device: (
            platform.no_cuda()
            if device == "cuda"
            else f"flex_attention has gradients for CUDA tensors, not {device}"
        ),
        {"attention": _flex_attention},
    ),
    "transformers": Peer(
        "transformers", _no_transformers, {"moe_mlp": _experts_of_transformers("eager")}
    ),
    "transformers-grouped": Peer(
        "transformers", _no_transformers, {"moe_mlp": _experts_of_transformers("grouped_mm")}
    ),
    "bitsandbytes": Peer(
        "bitsandbytes",
        lambda device: platform.no_module("bitsandbytes"),
        {
            "quantize_nf4": _bitsandbytes_quantize_nf4,
            "dequantize_nf4": _bitsandbytes_dequantize_nf4,
        },
    ),
    "torchao": Peer(
        "torchao",
        lambda device: platform.no_module("torchao"),
        {"quantize_nvfp4": _torchao_quantize_nvfp4, "dequantize_nvfp4": _torchao_dequantize_nvfp4},
    ),
}
