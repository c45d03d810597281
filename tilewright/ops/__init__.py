"""The public functions, and `OPS`, the table of all ops."""

from tilewright.ops.activation import GELU_MUL, SILU_MUL, gelu_mul, silu_mul
from tilewright.ops.attention import ATTENTION, attention
from tilewright.ops.block_fp8 import (
    DEQUANTIZE_BLOCK_FP8,
    QUANTIZE_BLOCK_FP8,
    BlockFP8,
    dequantize_block_fp8,
    quantize_block_fp8,
)
from tilewright.ops.cross_entropy import CROSS_ENTROPY, cross_entropy
from tilewright.ops.grouped_gemm import GROUPED_GEMM, grouped_gemm
from tilewright.ops.linear_cross_entropy import (
    LINEAR_CROSS_ENTROPY,
    LINEAR_LOGPROB,
    linear_cross_entropy,
    linear_logprob,
)
from tilewright.ops.moe import MOE_MLP, moe_mlp
from tilewright.ops.nf4 import DEQUANTIZE_NF4, NF4, QUANTIZE_NF4, dequantize_nf4, quantize_nf4
from tilewright.ops.nvfp4 import DEQUANTIZE_NVFP4, NVFP4, QUANTIZE_NVFP4, dequantize_nvfp4, quantize_nvfp4
from tilewright.ops.permute import PERMUTE, UNPERMUTE, permute, sort_by_expert, unpermute
from tilewright.ops.rmsnorm import ADD_RMSNORM, RMSNORM, add_rmsnorm, rmsnorm
from tilewright.ops.rope import ROPE, rope
from tilewright.ops.route import ROUTE, route

OPS = {op.name: op for op in (RMSNORM, ADD_RMSNORM, SILU_MUL, GELU_MUL, ROPE, ATTENTION, CROSS_ENTROPY,
                              LINEAR_CROSS_ENTROPY, LINEAR_LOGPROB, ROUTE, PERMUTE, UNPERMUTE, GROUPED_GEMM,
                              MOE_MLP, QUANTIZE_NF4, DEQUANTIZE_NF4, QUANTIZE_NVFP4, DEQUANTIZE_NVFP4,
                              QUANTIZE_BLOCK_FP8, DEQUANTIZE_BLOCK_FP8)}

__all__ = ["NF4", "NVFP4", "OPS", "BlockFP8", "add_rmsnorm", "attention", "cross_entropy", "dequantize_block_fp8",
           "dequantize_nf4", "dequantize_nvfp4", "gelu_mul", "grouped_gemm", "linear_cross_entropy",
           "linear_logprob", "moe_mlp", "permute", "quantize_block_fp8", "quantize_nf4", "quantize_nvfp4",
           "rmsnorm", "rope", "route", "silu_mul", "sort_by_expert", "unpermute"]
