"""Forward functions of two public libraries of Triton kernels, with small inputs and plain PyTorch
as reference, for scripts/emulate_public.py. The libraries are installed as packages:

    pip install --no-deps --target FOLDER liger-kernel==0.8.5 fla-core==0.6.0 \
        flash-linear-attention==0.6.0 einops
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """library, name: of the function.   inputs: its arguments.   run: calls it.   truth: the same
    in PyTorch, or None.
    """

    library: str
    name: str
    inputs: Callable[[], dict[str, Any]]
    run: Callable[..., Any]
    truth: Callable[..., Any] | None


def normal(*shape, dtype=BF16):
    return torch.randn(shape).to(dtype)


def of(*shapes, **more):
    """Normal tensors a, b, c, ... of these shapes."""
    return lambda: {
        **{name: normal(*shape) for name, shape in zip("abcdef", shapes, strict=False)},
        **{name: value() if callable(value) else value for name, value in more.items()},
    }


def get(module, name):
    return getattr(importlib.import_module(module), name)


def liger(file, name, *options):
    """The forward function of liger_kernel.ops.FILE."""
    return lambda *tensors, **named: get(f"liger_kernel.ops.{file}", name).apply(
        *tensors, *named.values(), *options
    )


def fla(module, name, first=True, **options):
    """A function of fla; its first result."""

    def call(**named):
        result = get(f"fla.{module}", name)(**named, **options)
        return result[0] if first and isinstance(result, tuple) else result

    return call


HEADS_FIRST = ("naive_retention", "delta_rule_recurrence")  # [B, H, T, D]
RENAMED = {"naive_recurrent_gla": {"g": "gk"}}


def naive(module, name, **options):
    """fla's own definition in PyTorch."""

    def call(**named):
        dtype = next(iter(named.values())).dtype
        named = {RENAMED.get(name, {}).get(n, n): v for n, v in named.items()}
        if name in HEADS_FIRST:
            named = {n: v.transpose(1, 2) for n, v in named.items()}
        result = get(f"fla.ops.{module}.naive", name)(**named, **options)
        result = result[0] if isinstance(result, tuple) else result
        return (result.transpose(1, 2) if name in HEADS_FIRST else result).to(dtype)

    return call


def at_least_float(fn):
    """Computes in float32 or float64 and rounds to the first argument's dtype."""

    def call(*tensors, **named):
        dtype = (*tensors, *named.values())[0].dtype
        wide = torch.promote_types(dtype, F32)

        def up(v):
            return v.to(wide) if isinstance(v, torch.Tensor) and v.is_floating_point() else v

        result = fn(*map(up, tensors), **{n: up(v) for n, v in named.items()})
        if isinstance(result, tuple):
            return tuple(r.to(dtype) for r in result)
        return result.to(dtype)

    return call


# ---- what both libraries compute


def rms(a, w, eps=1e-6):
    return a * torch.rsqrt(a.square().mean(-1, keepdim=True) + eps) * w


def rotate(x, cos, sin):
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def angles(T, D, halves=2):
    def make():
        at = torch.arange(T)[:, None] / 10000 ** (torch.arange(D // 2)[None] * 2 / D)
        return at.repeat(1, halves)

    return make


def targets(n, V):
    def make():
        y = torch.randint(V, (n,))
        y[1] = -100
        return y

    return make


LIGER = [
    (
        "rms_norm",
        of((12, 512), (512,)),
        liger("rms_norm", "LigerRMSNormFunction", 1e-6),
        lambda a, b: rms(a, b),
    ),
    (
        "layer_norm",
        of((12, 512), (512,), (512,)),
        liger("layer_norm", "LigerLayerNormFunction", 1e-5),
        lambda a, b, c: F.layer_norm(a, (512,), b, c, 1e-5),
    ),
    (
        "fused_add_rms_norm",
        of((12, 512), (12, 512), (512,)),
        liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", 1e-6),
        lambda a, b, c: (rms(a + b, c), a + b),
    ),
    (
        "group_norm",
        of((3, 8, 64), (8,), (8,)),
        liger("group_norm", "LigerGroupNormFunction", 8, 4, 1e-5),
        lambda a, b, c: F.group_norm(a, 4, b, c, 1e-5),
    ),
    (
        "poly_norm",
        of((12, 512), (3,), (1,)),
        liger("poly_norm", "LigerPolyNormFunction"),
        lambda a, b, c: sum(b[i] * rms(a ** (3 - i), 1) for i in range(3)) + c,
    ),
    (
        "dyt",
        of((12, 512), (1,), (512,), (512,)),
        liger("dyt", "LigerDyTFunction"),
        lambda a, b, c, d: torch.tanh(b * a) * c + d,
    ),
    (
        "silu_mul",
        of((12, 512), (12, 512)),
        liger("swiglu", "LigerSiLUMulFunction"),
        lambda a, b: F.silu(a) * b,
    ),
    (
        "gelu_mul",
        of((12, 512), (12, 512)),
        liger("geglu", "LigerGELUMulFunction"),
        lambda a, b: F.gelu(a, approximate="tanh") * b,
    ),
    (
        "relu_squared",
        of((12, 512)),
        liger("relu_squared", "LigerReLUSquaredFunction"),
        lambda a: F.relu(a).square(),
    ),
    ("softmax", of((12, 500)), liger("softmax", "LigerSoftmaxFunction"), lambda a: a.softmax(-1)),
    (
        "sparsemax",
        of((12, 256)),
        liger("sparsemax", "LigerSparsemaxFunction", -1),
        lambda a: sparsemax(a),
    ),
    (
        "rope",
        of((2, 4, 24, 64), (2, 2, 24, 64), t=angles(24, 64)),
        lambda a, b, t: get("liger_kernel.ops.rope", "LigerRopeFunction").apply(
            a, b, t.cos()[None], t.sin()[None]
        ),
        lambda a, b, t: (rotate(a, t.cos(), t.sin()), rotate(b, t.cos(), t.sin())),
    ),
    (
        "llama4_rope",
        of((2, 24, 4, 64), (2, 24, 2, 64), t=angles(24, 64, 1)),
        lambda a, b, t: get("liger_kernel.ops.llama4_rope", "LigerLlama4RopeFunction").apply(
            a, b, torch.polar(torch.ones_like(t), t)
        ),
        None,
    ),
    (
        "qwen2vl_mrope",
        of((2, 4, 24, 64), (2, 2, 24, 64), t=angles(24, 64)),
        lambda a, b, t: get("liger_kernel.ops.qwen2vl_mrope", "LigerQwen2VLMRopeFunction").apply(
            a,
            b,
            t.cos().expand(3, 2, -1, -1).contiguous(),
            t.sin().expand(3, 2, -1, -1).contiguous(),
            [8, 12, 12],
        ),
        lambda a, b, t: (rotate(a, t.cos(), t.sin()), rotate(b, t.cos(), t.sin())),
    ),
    (
        "embedding",
        of((60, 96), i=lambda: torch.randint(60, (3, 17))),
        liger("experimental.embedding", "LigerEmbeddingFunction"),
        lambda a, i: a[i],
    ),
    (
        "cross_entropy",
        of((10, 1000), y=targets(10, 1000)),
        lambda a, y: get("liger_kernel.ops.cross_entropy", "LigerCrossEntropyFunction").apply(
            a.requires_grad_(), y, None, -100, 0.0, 0.1, "mean", 30.0
        )[0],
        lambda a, y: F.cross_entropy(30 * torch.tanh(a / 30), y, label_smoothing=0.1),
    ),
    (
        "fused_linear_cross_entropy",
        of((24, 64), (500, 64), y=targets(24, 500)),
        lambda a, b, y: get(
            "liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"
        ).apply(a.requires_grad_(), b.requires_grad_(), y)[0],
        lambda a, b, y: F.cross_entropy(a @ b.T, y),
    ),
    (
        "kl_div",
        of((10, 300), (10, 300)),
        lambda a, b: get("liger_kernel.ops.kl_div", "LigerKLDivLossFunction").apply(
            a.float().log_softmax(-1), b.float().softmax(-1), "batchmean"
        ),
        lambda a, b: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean"),
    ),
    (
        "jsd",
        of((10, 300), (10, 300)),
        lambda a, b: get("liger_kernel.ops.jsd", "LigerJSDFunction").apply(
            a.float().log_softmax(-1), b.float().log_softmax(-1), None, 0.5, -100, "triton"
        ),
        lambda a, b: jsd(a.log_softmax(-1), b.log_softmax(-1)),
    ),
    (
        "tvd",
        of((10, 300), (10, 300)),
        lambda a, b: get("liger_kernel.ops.tvd", "LigerTVDLossFunction").apply(
            a.float().softmax(-1), b.float().softmax(-1)
        ),
        lambda a, b: (a.softmax(-1) - b.softmax(-1)).abs().sum() / 2 / len(a),
    ),
    (
        "fused_neighborhood_attention",
        of((1, 2, 64, 32), (1, 2, 64, 32), (1, 2, 64, 32)),
        liger("fused_neighborhood_attention", "LigerFusedNeighborhoodAttentionFunction"),
        None,
    ),
    (
        "grpo_loss",
        of(
            (2, 9, 200),
            old=None,
            ref=lambda: normal(2, 8, dtype=F32),
            i=lambda: torch.randint(200, (2, 8)),
            adv=lambda: normal(2, dtype=F32),
            mask=None,
        ),
        liger("grpo_loss", "GrpoLossFunction", 0.9, 0.04, 0.2, 0.2, False),
        None,
    ),
]


def sparsemax(a):
    order = a.sort(-1, descending=True).values
    k = torch.arange(1, a.shape[-1] + 1)
    support = (1 + k * order > order.cumsum(-1)).sum(-1, keepdim=True)
    tau = (order.cumsum(-1).gather(-1, support - 1) - 1) / support
    return (a - tau).clamp_min(0)


def jsd(p, q):
    m = (p.exp() + q.exp()).log() - torch.log(torch.tensor(2.0)).item()
    return ((p.exp() * (p - m)).sum() + (q.exp() * (q - m)).sum()) / 2 / len(p)


# ---- flash-linear-attention

B, T, H, D = 1, 96, 2, 32


def qkv(**more):
    """q, k, v [B, T, H, D], and more by shape: the log of a decay ("decay"), or in (0, 1)."""

    def make():
        tensors = {n: normal(B, T, H, D) for n in "qkv"}
        tensors["k"] = F.normalize(tensors["k"].float(), dim=-1).to(BF16)
        for name, (kind, shape) in more.items():
            x = torch.randn(shape)
            tensors[name] = (F.logsigmoid(x) if kind == "decay" else x.sigmoid()).to(
                F32 if kind == "decay" else BF16
            )
        return tensors

    return make


PER_HEAD, PER_ELEMENT = (B, T, H), (B, T, H, D)
LINEAR = [
    ("chunk_linear_attn", "linear_attn", "naive_recurrent_linear_attn", {}, {"normalize": False}),
    (
        "fused_recurrent_linear_attn",
        "linear_attn",
        "naive_recurrent_linear_attn",
        {},
        {"normalize": False},
    ),
    ("chunk_retention", "retention", "naive_retention", {}, {}),
    ("parallel_retention", "retention", "naive_retention", {}, {}),
    ("fused_recurrent_retention", "retention", "naive_retention", {}, {}),
    (
        "chunk_simple_gla",
        "simple_gla",
        "naive_recurrent_simple_gla",
        {"g": ("decay", PER_HEAD)},
        {},
    ),
    (
        "parallel_simple_gla",
        "simple_gla",
        "naive_recurrent_simple_gla",
        {"g": ("decay", PER_HEAD)},
        {},
    ),
    (
        "fused_recurrent_simple_gla",
        "simple_gla",
        "naive_recurrent_simple_gla",
        {"g": ("decay", PER_HEAD)},
        {},
    ),
    ("chunk_gla", "gla", "naive_recurrent_gla", {"g": ("decay", PER_ELEMENT)}, {}),
    ("fused_recurrent_gla", "gla", "naive_recurrent_gla", {"gk": ("decay", PER_ELEMENT)}, {}),
    ("chunk_delta_rule", "delta_rule", "delta_rule_recurrence", {"beta": ("part", PER_HEAD)}, {}),
    (
        "fused_recurrent_delta_rule",
        "delta_rule",
        "delta_rule_recurrence",
        {"beta": ("part", PER_HEAD)},
        {},
    ),
    (
        "chunk_gated_delta_rule",
        "gated_delta_rule",
        "naive_recurrent_gated_delta_rule",
        {"beta": ("part", PER_HEAD), "g": ("decay", PER_HEAD)},
        {},
    ),
    (
        "fused_recurrent_gated_delta_rule",
        "gated_delta_rule",
        "naive_recurrent_gated_delta_rule",
        {"beta": ("part", PER_HEAD), "g": ("decay", PER_HEAD)},
        {},
    ),
    (
        "chunk_kda",
        "kda",
        "naive_recurrent_kda",
        {"g": ("decay", PER_ELEMENT), "beta": ("part", PER_HEAD)},
        {},
    ),
    (
        "fused_recurrent_kda",
        "kda",
        "naive_recurrent_kda",
        {"g": ("decay", PER_ELEMENT), "beta": ("part", PER_HEAD)},
        {},
    ),
    ("parallel_attn", "attn", "naive_parallel_attn", {}, {}),
    (
        "parallel_forgetting_attn",
        "forgetting_attn",
        "naive_forgetting_attn",
        {"g": ("decay", PER_HEAD)},
        {},
    ),
]

FLA = [
    *(
        (
            name,
            qkv(**more),
            fla(f"ops.{room}", name, **options),
            None if slow is None else naive(room, slow, **options),
        )
        for name, room, slow, more, options in LINEAR
    ),
    (
        "chunk_hgrn",
        lambda: {"x": normal(1, 64, 64), "g": F.logsigmoid(normal(1, 64, 64))},
        fla("ops.hgrn", "chunk_hgrn"),
        naive("hgrn", "naive_recurrent_hgrn"),
    ),
    (
        "fused_recurrent_hgrn",
        lambda: {"x": normal(1, 64, 64), "g": F.logsigmoid(normal(1, 64, 64))},
        fla("ops.hgrn", "fused_recurrent_hgrn"),
        naive("hgrn", "naive_recurrent_hgrn"),
    ),
    (
        "chunk_local_cumsum",
        lambda: {"g": normal(1, 96, 2, dtype=F32)},
        fla("ops.utils", "chunk_local_cumsum", chunk_size=32),
        lambda g: g.view(1, 3, 32, 2).cumsum(2).view(1, 96, 2),
    ),
    (
        "mean_pooling",
        lambda: {"x": normal(1, 96, 2, 32)},
        fla("ops.utils.pooling", "mean_pooling", chunk_size=32),
        lambda x: x.view(1, 3, 32, 2, 32).mean(2),
    ),
    (
        "l2norm",
        lambda: {"x": normal(20, 64)},
        fla("modules.norm.l2norm", "l2norm"),
        lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6),
    ),
    (
        "rms_norm",
        lambda: {"x": normal(20, 64), "weight": normal(64)},
        fla("modules.norm.layernorm", "rms_norm", bias=None, eps=1e-6),
        lambda x, weight: rms(x, weight),
    ),
    (
        "rms_norm_gated",
        lambda: {"x": normal(20, 64), "g": normal(20, 64), "weight": normal(64)},
        fla("modules.norm.fused_norm_gate", "rms_norm_gated", bias=None, eps=1e-6),
        lambda x, g, weight: rms(x, weight) * F.silu(g),
    ),
    (
        "rotary_embedding",
        lambda: {"x": normal(1, 24, 2, 32), "t": angles(24, 32, 1)()},
        lambda x, t: get("fla.modules.rotary.ops", "rotary_embedding")(
            x, t.cos().to(x.dtype), t.sin().to(x.dtype)
        ),
        lambda x, t: rotate(x, t.cos().repeat(1, 2)[:, None], t.sin().repeat(1, 2)[:, None]),
    ),
    (
        "causal_conv1d",
        lambda: {"x": normal(1, 40, 64), "weight": normal(64, 4)},
        fla("modules.causal_conv1d", "causal_conv1d", activation="silu"),
        lambda x, weight: F.silu(
            F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), weight[:, None], groups=64)
        ).transpose(1, 2),
    ),
    (
        "token_shift",
        lambda: {"x": normal(1, 24, 64)},
        fla("modules.token_shift", "token_shift"),
        lambda x: F.pad(x, (0, 0, 1, -1)) - x,
    ),
    (
        "cross_entropy_loss",
        lambda: {"logits": normal(10, 500), "target": targets(10, 500)()},
        fla("modules.fused_cross_entropy.ops", "cross_entropy_loss"),
        lambda logits, target: F.cross_entropy(logits, target, reduction="none"),
    ),
    (
        "logsigmoid",
        lambda: {"x": normal(20, 64)},
        fla("modules.activations.ops", "logsigmoid"),
        lambda x: F.logsigmoid(x),
    ),
]

CASES = [
    *(Case("liger-kernel", n, i, r, t and at_least_float(t)) for n, i, r, t in LIGER),
    *(Case("flash-linear-attention", n, i, r, t and at_least_float(t)) for n, i, r, t in FLA),
]
