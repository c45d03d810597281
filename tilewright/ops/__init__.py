"""The public functions, and `OPS`, the table of all ops."""

import pathlib

from tilewright.ops.activation.activation import GELU_MUL, SILU_MUL, Gate, gelu_mul, silu_mul
from tilewright.ops.attention.attention import ATTENTION, attention
from tilewright.ops.fused_quantize.fused_quantize import (
    ADD_RMSNORM_QUANTIZE,
    RMSNORM_QUANTIZE,
    SILU_MUL_QUANTIZE,
    add_rmsnorm_quantize,
    rmsnorm_quantize,
    silu_mul_quantize,
)
from tilewright.ops.loss.cross_entropy import CROSS_ENTROPY, cross_entropy
from tilewright.ops.loss.linear_cross_entropy import LINEAR_CROSS_ENTROPY, linear_cross_entropy
from tilewright.ops.loss.logprob import (
    LINEAR_LOGPROB,
    LOGPROB_ENTROPY,
    linear_logprob,
    logprob_entropy,
)
from tilewright.ops.loss.targets import checked_targets
from tilewright.ops.moe.grouped_gemm import GROUPED_GEMM, grouped_gemm
from tilewright.ops.moe.moe import MOE_MLP, moe_mlp
from tilewright.ops.moe.moe_lora import MOE_LORA, moe_lora
from tilewright.ops.moe.permute import PERMUTE, UNPERMUTE, permute, sort_by_expert, unpermute
from tilewright.ops.moe.route import ROUTE, route
from tilewright.ops.norm.rmsnorm import ADD_RMSNORM, RMSNORM, add_rmsnorm, rmsnorm
from tilewright.ops.optim.adamw import ADAMW, adamw_
from tilewright.ops.optim.newton_schulz import NEWTON_SCHULZ, newton_schulz
from tilewright.ops.quant.aqn import AQN, AQN_NOISE, aqn_noise, aqn_schedule
from tilewright.ops.quant.block_fp8 import (
    DEQUANTIZE_BLOCK_FP8,
    QUANTIZE_BLOCK_FP8,
    BlockFP8,
    dequantize_block_fp8,
    quantize_block_fp8,
)
from tilewright.ops.quant.fp8_linear import FP8_LINEAR, fp8_linear
from tilewright.ops.quant.hadamard import HADAMARD, hadamard
from tilewright.ops.quant.mxfp8 import (
    DEQUANTIZE_MXFP8,
    MXFP8,
    QUANTIZE_MXFP8,
    dequantize_mxfp8,
    quantize_mxfp8,
)
from tilewright.ops.quant.nf4 import DEQUANTIZE_NF4, QUANTIZE_NF4, dequantize_nf4, quantize_nf4
from tilewright.ops.quant.nf4_format import NF4
from tilewright.ops.quant.nvfp4 import (
    DEQUANTIZE_NVFP4,
    NVFP4,
    QUANTIZE_NVFP4,
    dequantize_nvfp4,
    quantize_nvfp4,
)
from tilewright.ops.quant.quantized_linear import QUANTIZED_LINEAR, quantized_linear
from tilewright.ops.rope.qk_norm_rope import QK_NORM_ROPE, qk_norm_rope
from tilewright.ops.rope.rope import ROPE, rope

OPS = {
    op.name: op
    for op in (
        RMSNORM,
        ADD_RMSNORM,
        SILU_MUL,
        GELU_MUL,
        ROPE,
        QK_NORM_ROPE,
        ATTENTION,
        CROSS_ENTROPY,
        LINEAR_CROSS_ENTROPY,
        LINEAR_LOGPROB,
        LOGPROB_ENTROPY,
        ROUTE,
        PERMUTE,
        UNPERMUTE,
        GROUPED_GEMM,
        MOE_MLP,
        MOE_LORA,
        QUANTIZE_NF4,
        DEQUANTIZE_NF4,
        QUANTIZE_NVFP4,
        DEQUANTIZE_NVFP4,
        QUANTIZE_BLOCK_FP8,
        DEQUANTIZE_BLOCK_FP8,
        QUANTIZE_MXFP8,
        DEQUANTIZE_MXFP8,
        HADAMARD,
        SILU_MUL_QUANTIZE,
        RMSNORM_QUANTIZE,
        ADD_RMSNORM_QUANTIZE,
        QUANTIZED_LINEAR,
        FP8_LINEAR,
        AQN_NOISE,
        NEWTON_SCHULZ,
        ADAMW,
    )
}

__path__.append(str(pathlib.Path(__file__).parents[1] / "_moved/ops"))

__all__ = [
    "AQN",
    "MXFP8",
    "NF4",
    "NVFP4",
    "OPS",
    "BlockFP8",
    "Gate",
    "adamw_",
    "add_rmsnorm",
    "add_rmsnorm_quantize",
    "aqn_noise",
    "aqn_schedule",
    "attention",
    "checked_targets",
    "cross_entropy",
    "dequantize_block_fp8",
    "dequantize_mxfp8",
    "dequantize_nf4",
    "dequantize_nvfp4",
    "fp8_linear",
    "gelu_mul",
    "grouped_gemm",
    "hadamard",
    "linear_cross_entropy",
    "linear_logprob",
    "logprob_entropy",
    "moe_lora",
    "moe_mlp",
    "newton_schulz",
    "permute",
    "qk_norm_rope",
    "quantize_block_fp8",
    "quantize_mxfp8",
    "quantize_nf4",
    "quantize_nvfp4",
    "quantized_linear",
    "rmsnorm",
    "rmsnorm_quantize",
    "rope",
    "route",
    "silu_mul",
    "silu_mul_quantize",
    "sort_by_expert",
    "unpermute",
]
