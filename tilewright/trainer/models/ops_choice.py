"""The implementation of each op that a model calls, and the model's numerics."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from tilewright.core.registry import ImplementationUnavailable
from tilewright.ops.attention.attention import Request, takes_values
from tilewright.ops.loss.cross_entropy import Request as LossRequest
from tilewright.selection import operations
from tilewright.trainer.models.model_config import ModelConfig


@dataclass(frozen=True)
class Numerics:
    """Numerics of the model, chosen to agree with its serving engine rather than for speed."""

    router_fp32: bool = True  # the router's logits are the product's float32 sums, not rounded
    lm_head_fp32: bool = True  # the head's logits, too
    rmsnorm_native: bool = False  # PyTorch's F.rms_norm, and x + residual separately
    activation_native: bool = False  # PyTorch's F.silu(gate) * up, rounded in between
    rope_native: bool = False  # rotated by PyTorch's operators
    attention_cast_bf16: bool = False  # queries and keys are rounded to bfloat16 after the rotation
    batch_invariant: bool = False  # a token's logits have the same bits whatever the batch

    def implementations(self) -> dict[str, str]:
        """The implementations that the switches select, by op."""
        selected = {
            "rmsnorm": ("torch", self.rmsnorm_native),
            "silu_mul": ("torch", self.activation_native),
            "gelu_mul": ("torch", self.activation_native),
            "rope": ("eager", self.rope_native),
        }
        return {op: name for op, (name, native) in selected.items() if native}


@dataclass(frozen=True)
class Ops:
    """The implementation of each op that a model calls, and its `Numerics`.

    `resolve` checks each of them.
    """

    attention: str
    rmsnorm: str
    add_rmsnorm: str
    silu_mul: str
    gelu_mul: str
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
        sharded_head: bool = False,
        numerics: Numerics = Numerics(),
        experts: bool = True,
        **names: str,
    ) -> Ops:
        """Checks and chooses the implementation of each op.

        Args:
            attn_implementation, moe_implementation: names, or auto (None).
            device_type, dtype: those of the calls' tensors.
            attention_request: the request that calls of attention will make.
            sharded_head: whether the head's rows are sharded over ranks.
            numerics: the switches; those that select an implementation have precedence.
            experts: whether the model has any; only then must routing and experts be
                batch-invariant.
            names: further ops' implementations, by op.

        Raises:
            ValueError: an unknown name.
            ImplementationUnavailable: one that cannot run here, or that is not batch-invariant
                where `numerics.batch_invariant` requires it.

        Example:
            >>> from tilewright.trainer.models.ops_choice import Ops
            >>> Ops.resolve("eager").attention
            'eager'
        """
        table, chosen = operations(), {}
        requests = {
            "attention": attention_request,
            "linear_cross_entropy": LossRequest(sharded=True) if sharded_head else None,
        }
        asked = {
            "attention": attn_implementation,
            "moe_mlp": moe_implementation or "auto",
            **numerics.implementations(),
            **names,
        }
        for field in fields(cls)[:-1]:
            op, name = table[field.name], asked.pop(field.name, "auto")
            what = (device_type, dtype, requests.get(field.name))
            op.resolve(name, *what)
            computes_logits = field.name in INVARIANT and (experts or field.name not in EXPERTS)
            invariant = numerics.batch_invariant and computes_logits
            choose = op.choose_invariant if invariant else op.choose
            made = op.implementation(choose(*what) if name == "auto" else name)
            if invariant and device_type not in made.batch_invariant:
                raise ImplementationUnavailable(
                    f"{op.name}[{name}]: does not claim that a row's bits do not depend on the "
                    "batch"
                )
            chosen[field.name] = made.name
        if asked:
            raise ValueError(
                f"unknown ops {sorted(asked)}; have {[f.name for f in fields(cls)[:-1]]}"
            )
        return cls(**chosen, numerics=numerics)

    def names(self) -> dict[str, str]:
        return {f.name: getattr(self, f.name) for f in fields(self)[:-1]}


def attention_request(
    config: ModelConfig,
    ring: bool = False,
    implementation: str = "auto",
    dropout: bool = False,
    prefixes: bool = False,
) -> Request:
    """What all layers' attention asks of an implementation, over packed documents.

    ring: whether sequences are sharded over one that sends keys and values.
    implementation: if it takes values as wide as keys alone, latent attention pads them.
    prefixes: whether documents share one.
    """
    window = config.sliding_window is not None
    D = config.head_dim
    Dv = D if config.latent is None else config.latent.v_head_dim
    return Request(
        head_dim=D,
        value_dim=Dv if Dv != D and takes_values(implementation, D, Dv) else None,
        packed=True,
        window=window,
        sinks=config.architecture.sinks and not ring,  # a ring adds them to the sum of its parts
        shorter=window if ring else prefixes,
        gradient=True,
        dropout=dropout,
        part=ring,
        prefixes=prefixes and not ring,
    )


EXPERTS = ("route", "moe_mlp")
# The ops that compute a token's logits; the fused loss is not called then.
INVARIANT = (
    "attention",
    "rmsnorm",
    "add_rmsnorm",
    "silu_mul",
    "gelu_mul",
    "rope",
    "qk_norm_rope",
    "cross_entropy",
    *EXPERTS,
)
