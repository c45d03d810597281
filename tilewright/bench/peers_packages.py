"""Experts of transformers, NF4 of bitsandbytes, NVFP4 of torchao and torch's AdamW, linear
cross-entropy and random values, called with the arguments of tilewright's.
"""

from __future__ import annotations

import functools
import importlib
import math
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tilewright.bench.peer import PLAIN_LOSS, Unsupported, dense, only
from tilewright.core import platform


def experts_of_transformers(name):
    def moe_mlp(x, gate_up_proj, down_proj, expert_index, expert_weight, **more):
        dense("transformers", gate_up_proj, more)
        qwen = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
        # The attributes of a module that its functions read; constructing one would draw weights.
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


def no_transformers(device: str) -> str | None:
    return platform.no_module("transformers")


_states: WeakIdKeyDictionary = WeakIdKeyDictionary()


def bitsandbytes_quantize_nf4(x, *, double_quant=False, block_size=64):
    from bitsandbytes.functional import quantize_4bit

    quantize: Any = quantize_4bit  # whose state is declared to be optional
    data, state = quantize(
        x, blocksize=block_size, quant_type="nf4", compress_statistics=double_quant
    )
    return (
        data.view(-1),
        state.absmax,
        *((state.state2.absmax, state.offset) if double_quant else ()),
    )


def _dequantize_4bit(data, state):
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(data, state)


def bitsandbytes_dequantize(run=_dequantize_4bit):
    def dequantize_nf4(q, *, dtype=None, **more):
        from bitsandbytes.functional import QuantState

        only("bitsandbytes", more, noise=None)
        if q.data not in _states:  # cached, as a layer does
            stored = q.to_safetensors("w")
            _states[q.data] = QuantState.from_dict(
                {k.removeprefix("w."): t for k, t in stored.items() if k != "w"},
                device=q.data.device,
            )
            # As one row: if a row is not a multiple of a block, its AVX-512 kernel reads the wrong
            # blocks' scales.
            _states[q.data].shape = torch.Size([1, math.prod(q.shape)])
        state = _states[q.data]
        state.dtype = q.dtype if dtype is None else dtype
        return run(q.data[:, None], state).view(q.shape)

    return dequantize_nf4


bitsandbytes_dequantize_nf4 = bitsandbytes_dequantize()


def _torchao_nvfp4(rows):
    if rows.dim() != 2 or rows.shape[1] % 16:
        raise Unsupported(
            f"torchao takes matrices whose width is a multiple of 16, not {list(rows.shape)}"
        )
    return importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")


def torchao_quantize_nvfp4(x, *, square=False, global_scale=None, **more):
    only("torchao", {"square": square, **more}, square=False, seed=None, hadamard=None)
    module = _torchao_nvfp4(x)
    if global_scale is None:
        global_scale = module.per_tensor_amax_to_scale(x.abs().max())
    scale, data = module.nvfp4_quantize(x, 16, global_scale)
    return data, scale, global_scale


def _dequantize(tensor):
    return tensor.dequantize()


def torchao_dequantize(run=_dequantize):
    def dequantize_nvfp4(q, *, dtype=None, **more):
        only("torchao", more, noise=None)
        module = _torchao_nvfp4(torch.empty(q.shape, device="meta"))
        dtype = q.dtype if dtype is None else dtype
        return run(module.NVFP4Tensor(q.data, q.scale, 16, dtype, q.global_scale))

    return dequantize_nvfp4


torchao_dequantize_nvfp4 = torchao_dequantize()


def in_compile(adapter):
    """An adapter whose calls are compiled; graph breaks, as a user would have them, are allowed."""
    if adapter is torchao_dequantize_nvfp4:  # of a tensor that a user already has
        return torchao_dequantize(torch.compile(_dequantize, dynamic=False))
    if adapter is bitsandbytes_dequantize_nf4:  # likewise, of a layer's state
        return bitsandbytes_dequantize(torch.compile(_dequantize_4bit, dynamic=False))
    return torch.compile(adapter, dynamic=False)


def no_linear_cross_entropy() -> str | None:
    return (
        None
        if hasattr(torch.nn.functional, "linear_cross_entropy")
        else "needs torch >= 2.13, for F.linear_cross_entropy"
    )


def torch_linear_cross_entropy(x, weight, target, *, bias=None, class_weight=None, reduction="mean",
                               ignore_index=-100, label_smoothing=0.0, **more):  # fmt: skip
    """As it is without options: all logits at once, which PyTorch advises unless they do not
    fit.
    """
    more.pop("chunk_size", None)  # which changes no result
    only("torch", more, **PLAIN_LOSS, softcap=None, temperature=1.0, z_loss=0.0)
    losses = torch.nn.functional.linear_cross_entropy(
        x.flatten(0, -2),
        weight,
        target.flatten(),
        linear_bias=bias,
        weight=class_weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    return losses.view(target.shape) if reduction == "none" else losses


def torch_randn(size, noise, *, device=None, dtype=torch.float32):
    return torch.randn(size, device=device, dtype=dtype)


def torch_adamw(**how):
    """torch.optim's AdamW. how: fused=True or foreach=True."""

    def adamw_(params, grads, exp_avgs, exp_avg_sqs, compensations=None, *, step, betas=(0.9, 0.999),
               eps=1e-8, weight_decay=0.01, lr, **others):  # fmt: skip
        own = {"compensations": compensations, **others}
        only("torch", own, **dict.fromkeys(own))
        if params and exp_avgs[0].dtype != params[0].dtype:
            raise Unsupported("torch.optim.AdamW's states have the parameters' dtype")
        device = params[0].device if params and "fused" in how else None
        importlib.import_module("torch.optim.adamw").adamw(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            # It counts the step itself.
            [*torch.full((len(params),), step - 1.0, device=device).unbind()],
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
            **how,
        )
        return params, exp_avgs, exp_avg_sqs

    return adamw_
