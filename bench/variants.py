"""Open questions about the kernels that only a measurement can answer: two alternatives each, both
present in the code.

The stage `ab` of the suite times both, interleaved, on the case that decides. An alternative is a
launch configuration that replaces the heuristic's, timed in isolation, or an implementation, timed
in each of the op's passes. Answered questions are removed: the better alternative becomes the
heuristic, or what `auto` takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One open question.

    name: the question.
    op, case: the deciding case, in bfloat16.
    launch: "op/launch" of a Tunable; None if the alternatives are implementations.
    now: the current choice.
    other: the alternative.
    """

    name: str
    op: str
    case: str
    launch: str | None
    other: Mapping[str, Any] | str
    now: Mapping[str, Any] | str = field(default_factory=dict)

    @property
    def ways(self) -> dict[str, Mapping[str, Any] | str]:
        return {"now": self.now, "other": self.other}


_MOE, _UP = "qwen3-30b-a3b_32768", "qwen3-30b-a3b_up_32768"
_PACKED = "qwen3-30b-a3b_32k_packed"
# One block an SM, with tiles that read each operand least often.
_WIDE = {"BLOCK_M": 128, "BLOCK_N": 256, "num_warps": 8, "num_stages": 4, "per_sm": 1}
# The same tiles by specialized warps, for sm_90.
_ROLES = {**_WIDE, "maxnreg": None, "ROLES": True}
# Attention by specialized warps; and all its gradients in one kernel.
_ATTEND = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 4, "num_stages": 2, "ROLES": True}
_TOGETHER = {"BLOCK_N": 128, "BLOCK_M": 64, "num_warps": 4, "num_stages": 2, "ROLES": True}
# Those that decide designs first, and matmuls, which take most of a step, before the rest. Last
# those that need a package beside PyTorch and Triton.
VARIANTS = (
    Variant(
        "up_swiglu: specialized warps, for two blocks of 128 x 128 an SM",
        "moe_mlp",
        _MOE,
        "moe_mlp/up_swiglu",
        _ROLES,
    ),
    Variant(
        "down_dswiglu: a product by specialized warps and a second kernel, for one kernel of 64 x 128",
        "moe_mlp",
        _MOE,
        "moe_mlp/down_dswiglu",
        {**_ROLES, "SPLIT": 0},
    ),
    Variant(
        "grouped_gemm: specialized warps, for the same tiles",
        "grouped_gemm",
        _UP,
        "grouped_gemm/forward",
        _ROLES,
    ),
    Variant(
        "grouped_gemm: specialized warps in dweight, for the same tiles",
        "grouped_gemm",
        _UP,
        "grouped_gemm/backward_weight",
        {"BLOCK_N": 128, "BLOCK_K": 256, "num_stages": 4, "ROLES": True},
    ),
    Variant(
        "grouped_gemm: specialized warps in dx, for the same tiles",
        "grouped_gemm",
        _UP,
        "grouped_gemm/backward_x",
        _ROLES,
    ),
    Variant(
        "up_swiglu: one block of 128 x 256 an SM, for two of 128 x 128",
        "moe_mlp",
        _MOE,
        "moe_mlp/up_swiglu",
        {**_WIDE, "maxnreg": None},
    ),
    Variant(
        "down_dswiglu: a product of 128 x 256 and a second kernel, for one kernel of 64 x 128",
        "moe_mlp",
        _MOE,
        "moe_mlp/down_dswiglu",
        {**_WIDE, "SPLIT": 0},
    ),
    Variant(
        "fp8_linear: specialized warps and two sums in turn, for one",
        "fp8_linear",
        "block_fp8 llama-3-8b-down_8192",
        "fp8_linear/fp8",
        {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 6, "ROLES": True},
    ),
    Variant(
        "attention: specialized warps, for one loop of eight",
        "attention",
        "qwen3-30b-a3b_8k",
        "attention/forward",
        _ATTEND,
    ),
    Variant(
        "attention: all gradients in one kernel by specialized warps, for two kernels",
        "attention",
        "qwen3-30b-a3b_8k",
        "attention/backward_kv",
        _TOGETHER,
    ),
    Variant(
        "attention: head after head by specialized warps, for the last eight together",
        "attention",
        "qwen3-30b-a3b_8k",
        "attention/forward",
        {**_ATTEND, "ROLES": "in order"},
        _ATTEND,
    ),
    Variant(
        "attention: all gradients in one kernel, head after head, for the last two together",
        "attention",
        "qwen3-30b-a3b_8k",
        "attention/backward_kv",
        {**_TOGETHER, "ROLES": "in order"},
        _TOGETHER,
    ),
    # Not repeatable, and no alternative: it shows what turns cost.
    Variant(
        "attention: all gradients in one kernel without turns, for turns",
        "attention",
        "qwen3-30b-a3b_8k",
        "attention/backward_kv",
        {**_TOGETHER, "ROLES": "unordered"},
        _TOGETHER,
    ),
    Variant(
        "attention of packed documents: triton, for native",
        "attention",
        _PACKED,
        None,
        "triton",
        "native",
    ),
    Variant(
        "linear_cross_entropy: two chunks, for one",
        "linear_cross_entropy",
        "llama-3-8b",
        "linear_cross_entropy/chunk",
        {"whole": False},
    ),
    Variant(
        "dequantize_nf4: a code's value from shared memory, for two by a byte from global memory",
        "dequantize_nf4",
        "llama-3-8b-down",
        "dequantize_nf4/dequantize",
        {"GATHER": True},
    ),
    Variant(
        "newton_schulz: specialized warps, for two blocks of 128 x 128 an SM",
        "newton_schulz",
        "qwen3-8b-q",
        "newton_schulz/symmetric",
        {"num_stages": 6, "maxnreg": None, "ROLES": True},
    ),
    Variant(
        "attention: triton, for native", "attention", "qwen3-30b-a3b_8k", None, "triton", "native"
    ),
    Variant(
        "linear_cross_entropy: chunks of 128 MiB on a CPU, for 64",
        "linear_cross_entropy",
        "cpu-small",
        "linear_cross_entropy/chunk",
        {"budget_mib": 128},
    ),
    Variant("rmsnorm: cute, for triton", "rmsnorm", "qwen3-8b", None, "cute", "triton"),
    Variant(
        "cross_entropy: cute, for triton", "cross_entropy", "llama-3-8b", None, "cute", "triton"
    ),
)
