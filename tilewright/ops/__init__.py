"""The public functions, and `OPS`, the table of all ops."""

from tilewright.ops.activation import GELU_MUL, SILU_MUL, gelu_mul, silu_mul
from tilewright.ops.attention import ATTENTION, attention
from tilewright.ops.rmsnorm import ADD_RMSNORM, RMSNORM, add_rmsnorm, rmsnorm
from tilewright.ops.rope import ROPE, rope

OPS = {op.name: op for op in (RMSNORM, ADD_RMSNORM, SILU_MUL, GELU_MUL, ROPE, ATTENTION)}

__all__ = ["OPS", "add_rmsnorm", "attention", "gelu_mul", "rmsnorm", "rope", "silu_mul"]
