"""Open questions about the kernels that only a measurement can answer: two alternatives each, both
present in the code.

The stage `ab` of the suite times both, interleaved, on the case that decides. An alternative is a
launch configuration that replaces the usual one, timed in isolation or in the op's passes, or an
implementation, timed in the latter. Answered questions are removed: the better alternative becomes
what a launch, or `auto`, takes.
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
    whole: whether the op's passes are timed rather than the launch, since one alternative launches
        what another launch does with the other.
    arch: the lowest compute capability that has both alternatives, as 90.
    """

    name: str
    op: str
    case: str
    launch: str | None
    other: Mapping[str, Any] | str
    now: Mapping[str, Any] | str = field(default_factory=dict)
    whole: bool = False
    arch: int = 0

    @property
    def ways(self) -> dict[str, Mapping[str, Any] | str]:
        return {"now": self.now, "other": self.other}


# Those that decide designs first, and matmuls, which take most of a step, before the rest. Last
# those that need a package beside PyTorch and Triton.
# Attention: specialized warps, forward and in one kernel for the gradients. There is no question
# about that kernel for heads of 64 with a softcap, which no model that is known here has.
_FORWARD = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 4, "num_stages": 2, "ROLES": True}
_TOGETHER = {"BLOCK_N": 128, "BLOCK_M": 64, "num_warps": 4, "num_stages": 2, "ROLES": True}
# FP8: two sums in turn by two warpgroups; or a sum each, of warpgroups that take turns, which
# leaves registers for tiles of 256 columns.
_FP8_ROWS = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 6, "ROLES": True}
_FP8_DWEIGHT = {**_FP8_ROWS, "num_warps": 4}
_FP8_WIDE = {**_FP8_DWEIGHT, "BLOCK_N": 256, "num_stages": 4}
_SCALED = {"BLOCK_N": 256, "num_warps": 8, "num_stages": 4, "ROLES": True}
# Triton's, where gluon's launches take specialized warps.
_FP8_BY_ALL = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3, "ROLES": False}
_SCALED_BY_ALL = {"BLOCK_N": 128, "num_warps": 4, "num_stages": 3, "ROLES": False}
VARIANTS = (
    Variant(
        "attention, keys of 192 and values of 128: one kernel for the gradients, for two",
        "attention",
        "deepseek-v3_8k",
        "attention/backward_kv_gluon",
        _TOGETHER,
        whole=True,
    ),
    Variant(
        "attention, heads of 256: specialized warps forward, for one loop of all warps",
        "attention",
        "gemma-3-12b_8k",
        "attention/forward_gluon",
        _FORWARD,
    ),
    Variant(
        "fp8_linear: tiles of 256 columns, for 128",
        "fp8_linear",
        "block_fp8 llama-3-8b-down_8192",
        "fp8_linear/fp8_gluon",
        _FP8_WIDE,
    ),
    Variant(
        "low_precision_linear: specialized warps for a weight's gradient in FP8, for all warps",
        "low_precision_linear",
        "block_fp8 llama-3-8b-out_8192",
        "low_precision_linear/by_rows_gluon",
        _FP8_DWEIGHT,
        whole=True,  # with the transposes of scales
    ),
    *(
        Variant(
            f"low_precision_linear: specialized warps for products in {name}, for all warps",
            "low_precision_linear",
            f"{recipe} llama-3-8b-out_8192",
            "low_precision_linear/scaled_gluon",
            _SCALED,
            _SCALED_BY_ALL,
            arch=100,
        )
        for recipe, name in (("mxfp8", "MXFP8"), ("nvfp4", "NVFP4"))
    ),
    Variant(
        "low_precision_grouped_gemm: specialized warps for rows in FP8, for all warps",
        "low_precision_grouped_gemm",
        "block_fp8 qwen3-30b-a3b-16e_up_512_rows",
        "low_precision_grouped_gemm/rows_gluon",
        _FP8_ROWS,
        _FP8_BY_ALL,
    ),
    Variant(
        "low_precision_grouped_gemm: specialized warps and tiles of 256 columns, for all warps",
        "low_precision_grouped_gemm",
        "block_fp8 qwen3-30b-a3b-16e_up_512_rows",
        "low_precision_grouped_gemm/rows_gluon",
        _FP8_WIDE,
        _FP8_BY_ALL,
    ),
    Variant(
        "low_precision_grouped_gemm: specialized warps for weights' gradients in FP8, for all",
        "low_precision_grouped_gemm",
        "block_fp8 qwen3-30b-a3b-16e_up_512_rows",
        "low_precision_grouped_gemm/weights_gluon",
        _FP8_DWEIGHT,
        _FP8_BY_ALL,
        whole=True,
    ),
    *(
        Variant(
            f"low_precision_grouped_gemm: specialized warps for {what} in {name}, for all warps",
            "low_precision_grouped_gemm",
            f"{recipe} qwen3-30b-a3b-16e_up_512_rows",
            f"low_precision_grouped_gemm/{launch}_gluon",
            _SCALED,
            _SCALED_BY_ALL,
            whole=launch == "scaled_weights",  # with scales that are copied to longer rows
            arch=100,
        )
        for launch, what in (("scaled_rows", "rows"), ("scaled_weights", "weights' gradients"))
        for recipe, name in (("mxfp8", "MXFP8"), ("nvfp4", "NVFP4"))
    ),
    Variant(
        "moe_mlp, gpt-oss's gate: tiles of 128 x 128 by all warps, for specialized ones",
        "moe_mlp",
        "gpt-oss-20b_8192",
        "moe_mlp/up_swiglu_gluon",
        {"BLOCK_N": 128, "num_stages": 5, "ROLES": False},
    ),
    Variant(
        "linear_cross_entropy: chunks of 128 MiB on a CPU, for 64",
        "linear_cross_entropy",
        "cpu-small",
        "linear_cross_entropy/chunk",
        {"budget_mib": 128},
    ),
    Variant(
        "quantized_linear: 128 columns a step for one row, for 64",
        "quantized_linear",
        "nf4 llama-3-8b-down_1",
        "quantized_linear/few_rows",
        {"BLOCK_K": 128},
    ),
    Variant(
        "quantized_linear: a second launch adds the pieces of K, for a tile's last program",
        "quantized_linear",
        "nf4 llama-3-8b-down_1",
        "quantized_linear/few_rows",
        {"LAST": False},
        whole=True,
    ),
    # The steps of a run follow each other; each program reads the counts of all runs.
    Variant(
        "permute: the sort in 256 runs, for 128",
        "permute",
        "qwen3-30b-a3b",
        "permute/sort",
        {"RUNS": 256},
    ),
    Variant("rmsnorm: cute, for triton", "rmsnorm", "qwen3-8b", None, "cute", "triton"),
    Variant(
        "cross_entropy: cute, for triton", "cross_entropy", "llama-3-8b", None, "cute", "triton"
    ),
)


def asked(arch: int | None) -> tuple[Variant, ...]:
    """The questions of a compute capability; None: of a CPU, and of every GPU."""
    return tuple(v for v in VARIANTS if v.arch <= (arch or 0))
