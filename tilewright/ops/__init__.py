"""The public functions, and `OPS`, the table of all ops.

A module of a family, `tilewright/ops/<family>/<module>.py`, that assigns an `Op` at its left margin
(`SILU_MUL = Op(`, or a function of another name that ends in `_op`) is found and imported: no list
of ops exists. The imports below are for readers and type checkers.
"""

import importlib
import importlib.util
import pathlib
import pkgutil
import re
from typing import Any, cast

from tilewright.core.registry import Op
from tilewright.ops.activation.activation import Gate, gelu_mul, silu_mul
from tilewright.ops.activation.dropout_add import dropout_add
from tilewright.ops.attention.attention import attention
from tilewright.ops.fused_quantize.fused_quantize import (
    add_rmsnorm_quantize,
    rmsnorm_quantize,
    silu_mul_quantize,
)
from tilewright.ops.linear_attention.causal_conv1d import causal_conv1d
from tilewright.ops.linear_attention.gated_delta_rule import gated_delta_rule
from tilewright.ops.loss.cross_entropy import cross_entropy
from tilewright.ops.loss.head import HeadOptions
from tilewright.ops.loss.linear_cross_entropy import linear_cross_entropy
from tilewright.ops.loss.linear_policy_loss import SampledTokens, linear_policy_loss
from tilewright.ops.loss.linear_preference_loss import PairedAnswers, linear_preference_loss
from tilewright.ops.loss.logprob import linear_logprob, logprob_entropy
from tilewright.ops.loss.policy import (
    CISPO,
    DRO,
    GSPO,
    OPD,
    PPO,
    DrGRPO,
    GuardedPPO,
    ImportanceSampling,
    Reinforce,
)
from tilewright.ops.loss.preference import (
    BCO,
    DPO,
    DPOP,
    EXO,
    IPO,
    NCA,
    ORPO,
    SPPO,
    APODown,
    APOZero,
    Hinge,
    KTOPair,
    NormalizedDPO,
    RobustDPO,
    SimPO,
)
from tilewright.ops.loss.targets import checked_targets
from tilewright.ops.moe.grouped_gemm import grouped_gemm
from tilewright.ops.moe.low_precision_grouped_gemm import low_precision_grouped_gemm
from tilewright.ops.moe.moe import moe_mlp
from tilewright.ops.moe.moe_lora import moe_lora
from tilewright.ops.moe.permute import permute, sort_by_expert, unpermute
from tilewright.ops.moe.route import route
from tilewright.ops.norm.layernorm import add_layernorm, layernorm
from tilewright.ops.norm.rmsnorm import add_rmsnorm, rmsnorm
from tilewright.ops.norm.rmsnorm_gated import rmsnorm_gated
from tilewright.ops.optim.adamw import StochasticRounding, adamw_
from tilewright.ops.optim.newton_schulz import newton_schulz
from tilewright.ops.quant.aqn import AQN, aqn_noise, aqn_schedule
from tilewright.ops.quant.block_fp8 import BlockFP8, dequantize_block_fp8, quantize_block_fp8
from tilewright.ops.quant.fp8_linear import fp8_linear
from tilewright.ops.quant.hadamard import hadamard
from tilewright.ops.quant.low_precision_linear import low_precision_linear
from tilewright.ops.quant.mxfp8 import MXFP8, dequantize_mxfp8, quantize_mxfp8
from tilewright.ops.quant.nf4 import dequantize_nf4, quantize_nf4
from tilewright.ops.quant.nf4_format import NF4
from tilewright.ops.quant.nvfp4 import NVFP4, dequantize_nvfp4, quantize_nvfp4
from tilewright.ops.quant.quantized_linear import quantized_linear
from tilewright.ops.rope.qk_norm_rope import qk_norm_rope
from tilewright.ops.rope.rope import rope
from tilewright.ops.rope.tables import mrope_tables, rope_tables

# The order of families in tables; others follow.
FAMILIES = (
    "norm",
    "activation",
    "rope",
    "attention",
    "linear_attention",
    "loss",
    "moe",
    "quant",
    "fused_quantize",
)
_ASSIGNS_AN_OP = re.compile(rb"^[A-Z][A-Z0-9_]* = (?:Op|\w+_op)\(", re.MULTILINE)


def _may_have_an_op(name: str) -> bool:
    """Whether the module's source assigns an op; True where there is no source to read."""
    spec = importlib.util.find_spec(name)
    if spec is None or not (spec.origin or "").endswith(".py"):
        return True
    return bool(_ASSIGNS_AN_OP.search(cast(Any, spec.loader).get_data(spec.origin)))


def _found() -> dict[str, Op]:
    """All ops by name; within a family, the parts of an op come before it. Modules without an op
    are not imported: those that communicate take long to import.
    """
    places = {name: i for i, name in enumerate(FAMILIES)}
    ops: list[tuple[int, int, Op]] = []
    for module in pkgutil.walk_packages([str(pathlib.Path(__file__).parent)], f"{__name__}."):
        if module.ispkg or not _may_have_an_op(module.name):
            continue
        place = places.get(module.name.split(".")[2], len(places))
        values = vars(importlib.import_module(module.name)).values()
        own = [v for v in values if isinstance(v, Op) and v.public.__module__ == module.name]
        ops += [(place, op.serial, op) for op in own]
    table: dict[str, Op] = {}
    for *_, op in sorted(ops):
        name = op.public.__name__
        if op.name in table or globals().get(name, _public(op)) is not _public(op):
            raise ImportError(
                f"{op.public.__module__}: the name {op.name!r} of an op, or {name!r} of its "
                "function, is taken"
            )
        table[op.name] = op
    return table


def _public(op: Op) -> Any:
    return getattr(op.public, "grouped", op.public)


OPS = _found()
globals().update({op.public.__name__: _public(op) for op in OPS.values()})

__all__ = [
    "AQN",
    "BCO",
    "CISPO",
    "DPO",
    "DPOP",
    "DRO",
    "EXO",
    "GSPO",
    "IPO",
    "MXFP8",
    "NCA",
    "NF4",
    "NVFP4",
    "OPD",
    "OPS",
    "ORPO",
    "PPO",
    "SPPO",
    "APODown",
    "APOZero",
    "BlockFP8",
    "DrGRPO",
    "Gate",
    "GuardedPPO",
    "HeadOptions",
    "Hinge",
    "ImportanceSampling",
    "KTOPair",
    "NormalizedDPO",
    "PairedAnswers",
    "Reinforce",
    "RobustDPO",
    "SampledTokens",
    "SimPO",
    "StochasticRounding",
    "adamw_",
    "add_layernorm",
    "add_rmsnorm",
    "add_rmsnorm_quantize",
    "aqn_noise",
    "aqn_schedule",
    "attention",
    "causal_conv1d",
    "checked_targets",
    "cross_entropy",
    "dequantize_block_fp8",
    "dequantize_mxfp8",
    "dequantize_nf4",
    "dequantize_nvfp4",
    "dropout_add",
    "fp8_linear",
    "gated_delta_rule",
    "gelu_mul",
    "grouped_gemm",
    "hadamard",
    "layernorm",
    "linear_cross_entropy",
    "linear_logprob",
    "linear_policy_loss",
    "linear_preference_loss",
    "logprob_entropy",
    "low_precision_grouped_gemm",
    "low_precision_linear",
    "moe_lora",
    "moe_mlp",
    "mrope_tables",
    "newton_schulz",
    "permute",
    "qk_norm_rope",
    "quantize_block_fp8",
    "quantize_mxfp8",
    "quantize_nf4",
    "quantize_nvfp4",
    "quantized_linear",
    "rmsnorm",
    "rmsnorm_gated",
    "rmsnorm_quantize",
    "rope",
    "rope_tables",
    "route",
    "silu_mul",
    "silu_mul_quantize",
    "sort_by_expert",
    "unpermute",
]
