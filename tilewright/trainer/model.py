"""Decoder-only transformers, written on tilewright's ops: Llama, Qwen3 (QK norm) and Qwen3-MoE.

Parameter names are Hugging Face's, except what is fused: qkv_proj [q; k; v], gate_up_proj [gate;
up], and the experts' gate_up_proj [E, 2 I, H] and down_proj [E, H, I]; `hf.py` converts. Shape
suffixes: B batch, S sequence, T = B S tokens, H hidden, V vocabulary, E experts, K experts a token,
I inner width.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tilewright import adapt, lora
from tilewright import ops as tw
from tilewright.nn import Linear, RMSNorm, SwiGLU, in_row_blocks, linear_in_row_blocks
from tilewright.nn.lora_experts import LoRAExperts
from tilewright.nn.quantized import QuantizedExperts
from tilewright.ops.aqn import AQN
from tilewright.ops.attention import Request
from tilewright.ops.context_parallel import (
    ContextParallel,
    check_boundaries,
    context_parallel_attention,
    positions,
    shard,
)
from tilewright.ops.expert_parallel import DeepEP, ep_moe_mlp
from tilewright.ops.rope import document_positions
from tilewright.registry import ImplementationUnavailable
from tilewright.selection import operations

MODEL_TYPES = ("llama", "qwen3", "qwen3_moe")
LARGEST = (
    2**24
)  # of a size in config.json: no model has so wide a layer, and no machine holds its square


@dataclass(frozen=True)
class ModelConfig:
    """A model's shape. `from_hf` reads Hugging Face's config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: tuple[
        tuple[str, Any], ...
    ] = ()  # items of Hugging Face's dictionary, without rope_theta
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> ModelConfig:
        """Raises ValueError, naming the field, for a model or feature that is not built here."""
        if hf.get("model_type") not in MODEL_TYPES:
            raise ValueError(
                f"model_type must be one of {list(MODEL_TYPES)}, got {hf.get('model_type')!r}"
            )
        moe = hf["model_type"] == "qwen3_moe"
        for key, neutral in (
            ("attention_bias", False),
            ("mlp_bias", False),
            ("use_sliding_window", False),
            ("attention_dropout", 0.0),
            ("hidden_act", "silu"),
        ):
            if hf.get(key, neutral) not in (neutral, None):
                raise ValueError(
                    f"config.json: {key} = {hf[key]!r} is not supported; accepted: {neutral!r}"
                )

        def number(name, default, kind=int, source=hf):
            """A number that is there must be one; absent and null mean the default."""
            value = default if source.get(name) is None else source[name]
            good = (
                type(value) is int and 1 <= value <= LARGEST
                if kind is int
                else type(value) in (int, float) and 0 < value < math.inf
            )
            if not good:
                accepted = (
                    f"integer of at least 1 and at most {LARGEST}"
                    if kind is int
                    else "finite number above 0"
                )
                raise ValueError(
                    f"config.json: {name} must be a{'n' * (kind is int)} {accepted}, got {value!r}"
                )
            return kind(value)

        def flag(name):
            if not isinstance(hf.get(name), bool | None):
                raise ValueError(f"config.json: {name} must be true or false, got {hf[name]!r}")
            return bool(hf.get(name))

        rope = next((hf[key] for key in ("rope_parameters", "rope_scaling") if hf.get(key)), {})
        if not isinstance(rope, dict):
            raise ValueError(f"config.json: rope_parameters must be an object, got {rope!r}")
        rope = dict(rope)
        theta = number("rope_theta", number("rope_theta", 10000.0, float), float, rope)
        rope.pop("rope_theta", None)
        kind = rope.setdefault("rope_type", rope.pop("type", "default"))
        if not isinstance(kind, str) or kind not in ROPE_TYPES:
            raise ValueError(
                f"config.json: rope type {kind!r} is not supported; accepted: {list(ROPE_TYPES)}"
            )
        if absent := [k for k in ROPE_TYPES[kind][1] if k not in rope]:
            raise ValueError(f"config.json: rope type {kind!r} needs {', '.join(absent)}")
        for name in ROPE_TYPES[kind][1]:
            number(name, None, float, rope)
        sizes = {
            name: number(name, None)
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
            )
        }
        heads = sizes["num_attention_heads"]
        sizes |= {
            "num_key_value_heads": number("num_key_value_heads", heads),
            "head_dim": number("head_dim", sizes["hidden_size"] // heads),
            "max_position_embeddings": number(
                "max_position_embeddings", cls.max_position_embeddings
            ),
        }
        if heads % sizes["num_key_value_heads"]:
            raise ValueError(
                f"config.json: num_attention_heads = {heads} must divide by num_key_value_heads = "
                f"{sizes['num_key_value_heads']}"
            )
        if sizes["head_dim"] % 2:
            raise ValueError(f"config.json: head_dim must be even, got {sizes['head_dim']}")
        if moe:
            # transformers 5 writes num_local_experts.
            name = "num_experts" if hf.get("num_experts") is not None else "num_local_experts"
            sizes |= {
                "num_experts": number(name, None),
                **{n: number(n, None) for n in ("num_experts_per_tok", "moe_intermediate_size")},
                "decoder_sparse_step": number("decoder_sparse_step", 1),
            }
            if sizes["num_experts_per_tok"] > sizes["num_experts"]:
                raise ValueError(
                    f"config.json: num_experts_per_tok must be at most num_experts = "
                    f"{sizes['num_experts']}, got {sizes['num_experts_per_tok']}"
                )
            dense = [] if hf.get("mlp_only_layers") is None else hf["mlp_only_layers"]
            if not isinstance(dense, (list, tuple)) or not all(type(n) is int for n in dense):
                raise ValueError(
                    f"config.json: mlp_only_layers must be a list of integers, got {dense!r}"
                )
            sizes |= {"mlp_only_layers": tuple(dense), "norm_topk_prob": flag("norm_topk_prob")}
        return cls(
            hf["model_type"],
            **sizes,
            rope_theta=theta,
            rope_scaling=tuple(sorted(rope.items())) if kind != "default" else (),
            rms_norm_eps=number("rms_norm_eps", cls.rms_norm_eps, float),
            tie_word_embeddings=flag("tie_word_embeddings"),
        )

    def to_hf(self) -> dict[str, Any]:
        """config.json as transformers reads it."""
        names = {"llama": "Llama", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
        out = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("rope_theta", "rope_scaling")
        }
        if self.model_type != "qwen3_moe":
            out = {
                k: v
                for k, v in out.items()
                if "expert" not in k
                and not k.startswith("moe")
                and k not in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
            }
        else:
            out |= {
                "mlp_only_layers": list(self.mlp_only_layers),
                "num_local_experts": self.num_experts,
            }
        rope = dict(self.rope_scaling) or {"rope_type": "default"}
        # transformers 5 reads rope_parameters, 4 the other two.
        out |= {
            "rope_theta": self.rope_theta,
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
            "architectures": [f"{names[self.model_type]}ForCausalLM"],
            "hidden_act": "silu",
            "attention_bias": False,
        }
        if self.rope_scaling:
            out["rope_scaling"] = rope
        return out

    def is_moe(self, layer: int) -> bool:
        return (
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )


@dataclass(frozen=True)
class Numerics:
    """Arithmetic of the model that is chosen to agree with what serves it, rather than to be
    fast.
    """

    router_fp32: bool = True  # the router's logits are the product's float32 sums, not rounded
    lm_head_fp32: bool = True  # the head's logits, too
    rmsnorm_native: bool = False  # PyTorch's F.rms_norm, and x + residual by itself
    activation_native: bool = False  # F.silu(gate) * up, rounded in between
    rope_native: bool = False  # rotated by PyTorch's operators
    attention_cast_bf16: bool = False  # queries and keys are rounded to bfloat16 after the rotation
    batch_invariant: bool = (
        False  # a token's logits have the same bits whatever else is in the batch
    )

    def implementations(self) -> dict[str, str]:
        """What it asks for, by op."""
        asked = {"rmsnorm": "torch"} if self.rmsnorm_native else {}
        return (
            asked
            | ({"silu_mul": "torch"} if self.activation_native else {})
            | ({"rope": "eager"} if self.rope_native else {})
        )


@dataclass(frozen=True)
class Ops:
    """Which implementation of each op the model calls, each checked when this is built, and its
    `Numerics`.
    """

    attention: str
    rmsnorm: str
    add_rmsnorm: str
    silu_mul: str
    rope: str
    qk_norm_rope: str
    linear_cross_entropy: str
    cross_entropy: str
    route: str
    moe_mlp: str
    numerics: Numerics = Numerics()

    @classmethod
    def resolve(
        cls,
        attn_implementation: str = "auto",
        moe_implementation: str | None = None,
        *,
        device_type: str = "cpu",
        dtype: torch.dtype = torch.float32,
        attention_request: Request | None = None,
        numerics: Numerics = Numerics(),
        experts: bool = True,
        **names: str,
    ) -> Ops:
        """attention_request: what calls of attention will ask for.   experts: whether the model has
        any; only then must what routes and computes them be batch-invariant.

        Raises ValueError for an unknown name and ImplementationUnavailable for one that cannot run
        here, or that does not claim what `numerics.batch_invariant` asks for.
        """
        table, chosen = operations(), {}
        asked = {
            "attention": attn_implementation,
            "moe_mlp": moe_implementation or "auto",
            **numerics.implementations(),
            **names,
        }
        for field in fields(cls)[:-1]:
            op, name = table[field.name], asked.pop(field.name, "auto")
            what = (device_type, dtype, attention_request if field.name == "attention" else None)
            op.resolve(name, *what)
            if (
                numerics.batch_invariant
                and field.name in INVARIANT
                and (experts or field.name not in EXPERTS)
            ):
                chosen[field.name] = (
                    op.choose_invariant(*what) if name == "auto" else op.implementation(name).name
                )
                if device_type not in op.implementation(chosen[field.name]).batch_invariant:
                    raise ImplementationUnavailable(
                        f"{op.name}[{name}]: does not claim that a row's bits do not "
                        "depend on the batch"
                    )
            else:
                chosen[field.name] = (
                    op.choose(*what) if name == "auto" else op.implementation(name).name
                )
        if asked:
            raise ValueError(
                f"unknown ops {sorted(asked)}; have {[f.name for f in fields(cls)[:-1]]}"
            )
        return cls(**chosen, numerics=numerics)

    def names(self) -> dict[str, str]:
        return {f.name: getattr(self, f.name) for f in fields(self)[:-1]}


EXPERTS = ("route", "moe_mlp")
# What a token's logits go through; the fused loss is not called then.
INVARIANT = (
    "attention",
    "rmsnorm",
    "add_rmsnorm",
    "silu_mul",
    "rope",
    "qk_norm_rope",
    "cross_entropy",
    *EXPERTS,
)


# ---- positions


def _default(inv_freq, scaling):
    return inv_freq


def _linear(inv_freq, scaling):
    return inv_freq / scaling["factor"]


def _llama3(inv_freq, scaling):
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
    factor, low, high = (scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    smooth = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq


# type -> (inverse frequencies, the settings that it reads)
ROPE_TYPES = {
    "default": (_default, ()),
    "linear": (_linear, ("factor",)),
    "llama3": (
        _llama3,
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ),
}


def rope_tables(
    config: ModelConfig, positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [positions, head_dim / 2], float32."""
    scaling = dict(config.rope_scaling)
    exponent = (
        torch.arange(0, config.head_dim, 2, device=device, dtype=torch.int64).float()
        / config.head_dim
    )
    inv_freq = ROPE_TYPES[scaling.get("rope_type", "default")][0](
        1.0 / config.rope_theta**exponent, scaling
    )
    angle = torch.outer(torch.arange(positions, device=device).float(), inv_freq)
    return angle.cos(), angle.sin()


# ---- layers


class AddRMSNorm(RMSNorm):
    """Adds to the residual stream and normalises the sum: (normalised, sum). A residual of None
    is zero.
    """

    def __init__(self, size: int, eps: float, ops: Ops):
        super().__init__(size, eps, implementation=ops.rmsnorm)
        self.add_implementation, self.native = ops.add_rmsnorm, ops.numerics.rmsnorm_native

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return super().forward(x), x
        if self.native:
            total = x + residual
            return super().forward(total), total
        return tw.add_rmsnorm(
            x, residual, self.weight, self.eps, implementation=self.add_implementation
        )


class OnHost:
    """Boundaries of documents, as an object: of a tuple compiled code would be made anew for each
    length.

    longest: a power of two that no document is longer than, so that compiled code is made for few
    of them.
    """

    def __init__(self, ends: tuple[int, ...]):
        self.ends = ends
        self.longest = 1 << (max(b - a for a, b in itertools.pairwise(ends)) - 1).bit_length()


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, ops: Ops, merge_qkv: bool):
        super().__init__()
        H, D = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim, self.ops = (
            config.num_attention_heads,
            config.num_key_value_heads,
            D,
            ops,
        )
        widths = (self.heads * D, self.kv_heads * D, self.kv_heads * D)
        self.widths, self.merge_qkv = widths, merge_qkv
        self.apart = (
            ops.numerics.rmsnorm_native or ops.numerics.rope_native
        )  # no pass does both as PyTorch would
        if merge_qkv:
            self.qkv_proj = Linear(H, sum(widths), bias=False)
        else:
            self.q_proj, self.k_proj, self.v_proj = (Linear(H, n, bias=False) for n in widths)
        self.o_proj = Linear(widths[0], H, bias=False)
        self.qk_norm = config.model_type != "llama"
        if self.qk_norm:
            self.q_norm = RMSNorm(D, config.rms_norm_eps, implementation=ops.rmsnorm)
            self.k_norm = RMSNorm(D, config.rms_norm_eps, implementation=ops.rmsnorm)
        self.cp = ContextParallel()

    def forward(self, x, cos, sin, position_ids, cu_seqlens, ends):
        attend = self._attend_uncompiled if self.breaks and cu_seqlens is not None else self._attend
        return self.output(attend(*self.project(x, cos, sin, position_ids), cu_seqlens, ends))

    @property
    def breaks(self) -> bool:
        """Whether attention to packed documents is no part of a graph: code for a loop over
        documents would be made anew for each number of them, and ranks that share a sequence wait
        for each other.
        """
        return self.ops.attention == "sdpa" or self.cp.size > 1

    def project(self, x, cos, sin, position_ids):
        """q, k and v of x [B, S, H]: [B, heads, S, D]."""
        if self.merge_qkv and self.apart:
            q, k, v = self._heads(*self.qkv_proj(x).split(self.widths, -1), cos, sin, position_ids)
        elif self.merge_qkv:
            q, k, v = self._heads_of_merged(self.qkv_proj(x), cos, sin, position_ids)
        else:
            q, k, v = self._heads(
                self.q_proj(x), self.k_proj(x), self.v_proj(x), cos, sin, position_ids
            )
        if self.ops.numerics.attention_cast_bf16:  # and back: attention takes one dtype
            q, k = (t.bfloat16().to(t.dtype) for t in (q, k))
        return q, k, v

    def output(self, attended):
        """[B, S, H] of attention's [B, heads, S, D]."""
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _attend(self, q, k, v, cu_seqlens, ends: OnHost | None):
        if self.cp.size > 1:
            return context_parallel_attention(
                q,
                k,
                v,
                self.cp,
                cu_seqlens=cu_seqlens,
                ends=ends and ends.ends,
                implementation=self.ops.attention,
            )
        return tw.attention(
            q,
            k,
            v,
            cu_seqlens=cu_seqlens,
            max_seqlen=None if ends is None else ends.longest,
            implementation=self.ops.attention,
        )

    @torch.compiler.disable
    def _attend_uncompiled(self, *args):
        return self._attend(*args)

    def _heads(self, q, k, v, cos, sin, position_ids):
        """What attention takes of the three projections: [B, heads, S, D]."""
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return *tw.rope(q, k, cos, sin, position_ids=position_ids, implementation=self.ops.rope), v

    def _heads_of_merged(self, qkv, cos, sin, position_ids):
        """The same of the merged projection, in one pass. The norms' modules hold their weights
        and nothing more.
        """
        norms = {}
        if self.qk_norm:
            norms = {
                "q_weight": self.q_norm.weight,
                "k_weight": self.k_norm.weight,
                "eps": self.q_norm.eps,
            }
        return tw.qk_norm_rope(
            qkv,
            cos,
            sin,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            position_ids=position_ids,
            implementation=self.ops.qk_norm_rope,
            **norms,
        )


class MLP(SwiGLU):
    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__(config.hidden_size, config.intermediate_size, implementation=ops.silu_mul)


class Experts(nn.Module):
    """All experts, or with `spread` those of this rank; then its parameters are DTensors, sharded
    by expert.

    `adapt.quantize_model` makes modules of the two tensors, `adapt.add_lora` LoRAExperts of the
    whole.
    """

    noise_layers = 2  # numbers of `AQN.layer` that it may need

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__()
        E, H, I = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * I, H))
        self.down_proj = nn.Parameter(torch.empty(E, H, I))
        self.ops, self.recompute = ops, False
        self.noise: AQN | None = None
        self.group: dist.ProcessGroup | None = None

    def spread(self, group: dist.ProcessGroup, dispatch: str, deepep: DeepEP) -> None:
        """Tokens travel to the rank of `group` that has their experts."""
        self.group, self.dispatch, self.deepep = group, dispatch, deepep

    def forward(self, x_TH, index_TK, weight_TK, kept=None):
        if self.group is not None:
            gate_up, down = (
                p.to_local() if isinstance(p, DTensor) else p
                for p in (self.gate_up_proj, self.down_proj)
            )
            return ep_moe_mlp(
                x_TH,
                gate_up,
                down,
                index_TK,
                weight_TK,
                self.group,
                dispatch=self.dispatch,
                implementation=self.ops.moe_mlp,
                recompute=self.recompute,
                kept=kept,
                deepep=self.deepep,
            )
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._compute, x_TH, index_TK, weight_TK, use_reentrant=False)
        return self._compute(x_TH, index_TK, weight_TK)

    def set_noise(self, noise: AQN | None) -> None:
        """Noise on quantised experts for the forward passes to come, in training only."""
        self.noise = noise if isinstance(self.down_proj, QuantizedExperts) else None

    def _compute(self, x_TH, index_TK, weight_TK):
        gate_up, down = self.gate_up_proj, self.down_proj
        if isinstance(down, QuantizedExperts):
            return tw.moe_mlp(
                x_TH,
                gate_up.weight(),
                down.weight(),
                index_TK,
                weight_TK,
                noise=self.noise if self.training else None,
                implementation=self.ops.moe_mlp,
            )
        return tw.moe_mlp(x_TH, gate_up, down, index_TK, weight_TK, implementation=self.ops.moe_mlp)


class Router(nn.Linear):
    """Logits of experts. fp32: in float32, of x and weight as they are where it is called."""

    def __init__(self, hidden: int, experts: int, fp32: bool):
        super().__init__(hidden, experts, bias=False)
        self.fp32 = fp32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.fp32:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float())


class MoE(nn.Module):
    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__()
        self.gate = Router(config.hidden_size, config.num_experts, ops.numerics.router_fp32)
        self.experts = Experts(config, ops)
        self.top_k, self.renormalise, self.ops = (
            config.num_experts_per_tok,
            config.norm_topk_prob,
            ops,
        )

    def forward(self, x, kept=None):
        """The layer's output, and what the router did: tokens of each expert, load-balance loss,
        z-loss, [E + 2].

        kept: as in `ep_moe_mlp`, for a call that will be repeated in the backward.
        """
        x_TH = x.reshape(-1, x.shape[-1])
        routing = tw.route(
            self.gate(x_TH), self.top_k, renormalize=self.renormalise, implementation=self.ops.route
        )
        index_TK, weight_TK, tokens_E, *losses = routing
        report = torch.cat((tokens_E.float(), torch.stack(losses))).detach()
        # As F.linear's result is no view either: FSDP2 warns of one, since operations in place
        # would pass its hooks by.
        return torch.ops.aten._unsafe_view(
            self.experts(x_TH, index_TK, weight_TK, kept), x.shape
        ), report


class Block(nn.Module):
    """Returns the layer's output, the residual stream and, of a layer with experts, the
    router's report.
    """

    def __init__(self, config: ModelConfig, ops: Ops, layer: int, merge_qkv: bool):
        super().__init__()
        self.input_layernorm = AddRMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.self_attn = Attention(config, ops, merge_qkv)
        self.post_attention_layernorm = AddRMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.mlp = MoE(config, ops) if config.is_moe(layer) else MLP(config, ops)
        self.recompute: tuple[str, ...] = ()
        self.reentrant = False

    def _run(self, name, *args):
        module = getattr(self, name)
        if name in self.recompute and torch.is_grad_enabled():
            return checkpoint(module, *args, use_reentrant=self.reentrant)
        return module(*args)

    def _before_mlp(self, x, residual, cos, sin, position_ids, cu_seqlens, ends):
        x, residual = self.input_layernorm(x, residual)
        x = self._run("self_attn", x, cos, sin, position_ids, cu_seqlens, ends)
        return self.post_attention_layernorm(x, residual)

    def _layer(self, x, residual, cos, sin, position_ids, cu_seqlens, ends, kept):
        x, residual = self._run(
            "_before_mlp", x, residual, cos, sin, position_ids, cu_seqlens, ends
        )
        if not isinstance(self.mlp, MoE):
            return self._run("mlp", x), residual
        x, report = self._run("mlp", x, kept)
        return x, residual, report

    def forward(self, *args):
        again = {"_layer", "mlp"} & {*self.recompute} and torch.is_grad_enabled()
        spread = isinstance(self.mlp, MoE) and self.mlp.experts.group is not None
        return self._run("_layer", *args, [] if again and spread else None)


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, ops: Ops, merge_qkv: bool):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, ops, i, merge_qkv) for i in range(config.num_hidden_layers)
        )
        self.norm = AddRMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.config = config
        self.reports: torch.Tensor | None = (
            None  # of the routers in the last call, [layers with experts, E + 2]
        )
        self.cp = ContextParallel()

    def forward(self, input_ids, position_ids, cu_seqlens, ends=None):
        x, residual = self.embed_tokens(input_ids), None
        S = input_ids.shape[1] * self.cp.size  # of the whole sequence
        own = position_ids is not None and cu_seqlens is None
        if position_ids is None and cu_seqlens is not None:
            whole = document_positions(cu_seqlens, input_ids.numel() * self.cp.size)
            position_ids = shard(whole, 0, self.cp).view_as(input_ids)
        elif position_ids is None and self.cp.size > 1:
            position_ids = positions(S, self.cp, input_ids.device).expand_as(input_ids)
        # Made for each call rather than kept: a buffer would have to survive meta-device
        # construction, and this costs less than one row of one matrix product. Positions that
        # restart in each document are below S.
        cos, sin = rope_tables(
            self.config, max(S, self.config.max_position_embeddings) if own else S, input_ids.device
        )
        if self.layers[0].reentrant and torch.is_grad_enabled() and not x.requires_grad:
            # reentrant recomputation gives gradients only to what has an input with one
            x.requires_grad_()
        if ends is not None:
            ends = OnHost(check_boundaries(cu_seqlens, ends, len(input_ids), S)[1])
        reports = []
        for layer in self.layers:
            x, residual, *report = layer(x, residual, cos, sin, position_ids, cu_seqlens, ends)
            reports += report
        self.reports = torch.stack(reports) if reports else None
        return self.norm(x, residual)[0]


class Transformer(nn.Module):
    """A causal language model. Build it under torch.device("meta") for FSDP2, then `to_empty`
    and `init_weights`.
    """

    def __init__(self, config: ModelConfig, ops: Ops, merge_qkv: bool = True):
        super().__init__()
        self.config, self.ops, self.merge_qkv = config, ops, merge_qkv
        self.model = Decoder(config, ops, merge_qkv)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if ops.numerics.batch_invariant:
            in_row_blocks(self)
        self.tie()

    def tie(self) -> None:
        """Shares the embedding with the head again; call it after `to_empty`, which separates
        them.
        """
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def init_weights(self, seed: int, std: float = 0.02) -> None:
        """Normal weights, norms of one. Each parameter has a generator of its own, so that the
        values depend on the seed and the parameter's name only, not on how the model is sharded.
        Adapters are left alone.
        """
        from torch.distributed.tensor import DTensor, distribute_tensor

        with torch.device("meta"):  # without adapters, whose values are their own matter
            order = [
                name
                for name, _ in Transformer(self.config, self.ops, self.merge_qkv).named_parameters()
            ]
        for name, p in adapt.base_weights(self):
            if name.endswith("norm.weight"):
                p.fill_(1.0)
                continue
            generator = torch.Generator(device="cpu").manual_seed(
                seed * 1_000_003 + order.index(name)
            )
            full = torch.randn(adapt.shape_of(p), generator=generator) * std
            if like := adapt.quantized(p):
                adapt.fill(p, [lora.quantize_as(like[0], full.to(like[0].device))])
            elif isinstance(p, DTensor):
                p.copy_(distribute_tensor(full.to(p.device, p.dtype), p.device_mesh, p.placements))
            else:
                p.copy_(full)

    def recompute_activations(
        self, modules: list[str] | None = None, reentrant: bool = False, experts_alone: bool = False
    ) -> None:
        """Recompute in the backward: whole layers (None), or only "self_attn" and/or "mlp" of each.

        experts_alone: of layers with experts, what precedes the router as ever, and of the rest
        only what the experts
        compute: the choice of experts is kept, and no token travels to its experts a second time.
        """
        if unknown := set(modules or ()) - {"self_attn", "mlp"}:
            raise ValueError(f"recompute_modules accepts self_attn and mlp, got {sorted(unknown)}")
        for block in self.model.layers:
            names = set(modules or ("_layer",))
            if experts_alone and isinstance(block.mlp, MoE) and names & {"_layer", "mlp"}:
                block.mlp.experts.recompute = True
                names = {"_before_mlp"} if "_layer" in names else names - {"mlp"}
            block.recompute, block.reentrant = tuple(names), reentrant

    def spread_sequence(self, cp: ContextParallel) -> None:
        """Each rank of `cp` is called with its part of a sequence. Raises ValueError if heads
        cannot be spread so.
        """
        if self.config.num_attention_heads % cp.ulysses_size:
            raise ValueError(
                f"train.ulysses_parallel_size = {cp.ulysses_size}: the model's "
                f"{self.config.num_attention_heads} query heads do not divide by {cp.ulysses_size}"
            )
        self.model.cp = cp
        for block in self.model.layers:
            block.self_attn.cp = cp

    def freeze_router(self) -> None:
        """The choice of experts stays what it is for a token, and learns nothing. Raises
        ValueError without experts.
        """
        gates = [block.mlp.gate for block in self.model.layers if isinstance(block.mlp, MoE)]
        if not gates:
            raise ValueError("train.freeze_router = True: the model has no experts")
        for gate in gates:
            gate.requires_grad_(False)

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        ends: tuple[int, ...] | None = None,
        num_tokens: torch.Tensor | float | None = None,
    ) -> torch.Tensor:
        """Logits [B, S, V] (float32 with `lm_head_fp32`), or the loss if labels are given.

        input_ids: [B, S]; with cu_seqlens [n + 1], packed documents and B = 1.
        labels: [B, S], already shifted: labels[t] is the token that follows t; -100 is ignored.
        num_tokens: what the summed token losses are divided by; default: the labels that count.
        ends: cu_seqlens' values on the host, which spares a ring, flash-attn and native waiting for
        the device in every layer. After `spread_sequence` all of these are this rank's part, but
        for cu_seqlens and ends, the whole sequence's.
        """
        hidden = self.model(input_ids, position_ids, cu_seqlens, ends)
        weight, numerics = self.lm_head.weight, self.ops.numerics
        if torch.is_autocast_enabled(hidden.device.type):  # which is off around the products below
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        if labels is None or numerics.batch_invariant:
            if numerics.lm_head_fp32:
                hidden, weight = hidden.float(), weight.float()
            with torch.autocast(hidden.device.type, enabled=False):
                logits = (linear_in_row_blocks if numerics.batch_invariant else F.linear)(
                    hidden, weight
                )
            return (
                logits
                if labels is None
                else tw.cross_entropy(
                    logits, labels, num_tokens=num_tokens, implementation=self.ops.cross_entropy
                )
            )
        return tw.linear_cross_entropy(
            hidden,
            weight,
            labels,
            num_tokens=num_tokens,
            fp32_logits=numerics.lm_head_fp32,
            implementation=self.ops.linear_cross_entropy,
        )

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, sequence: int) -> float:
        """Floating-point operations of forward and backward for one token, experts counted as
        routed.
        """
        c = self.config
        attention = c.hidden_size * c.head_dim * 2 * (c.num_attention_heads + c.num_key_value_heads)
        score = (
            c.num_attention_heads * c.head_dim * sequence
        )  # causal: half of 2 S for each of two products
        dense = 3 * c.hidden_size * c.intermediate_size
        sparse = (
            3 * c.hidden_size * c.moe_intermediate_size * c.num_experts_per_tok
            + c.hidden_size * c.num_experts
        )
        mlp = sum(sparse if c.is_moe(i) else dense for i in range(c.num_hidden_layers))
        matrix = c.num_hidden_layers * attention + mlp + c.hidden_size * c.vocab_size
        # Twice a product forward, and twice again for each factor's gradient; a frozen matrix has
        # none.
        routed = c.num_experts_per_tok / max(1, c.num_experts)
        adapters = sum(
            p.numel() * (routed if isinstance(module, LoRAExperts) else 1.0)
            for _, module in adapt.adapted(self)
            for name, p in module.named_parameters()
            if adapt.is_adapter(name)
        )
        return (4.0 if adapters else 6.0) * matrix + 6.0 * (c.num_hidden_layers * score + adapters)
