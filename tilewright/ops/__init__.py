"""The public functions, and `OPS`, the table of all ops."""

from tilewright.ops.rmsnorm import ADD_RMSNORM, RMSNORM, add_rmsnorm, rmsnorm

OPS = {op.name: op for op in (RMSNORM, ADD_RMSNORM)}

__all__ = ["OPS", "add_rmsnorm", "rmsnorm"]
