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
    """

    name: str
    op: str
    case: str
    launch: str | None
    other: Mapping[str, Any] | str
    now: Mapping[str, Any] | str = field(default_factory=dict)
    whole: bool = False

    @property
    def ways(self) -> dict[str, Mapping[str, Any] | str]:
        return {"now": self.now, "other": self.other}


# Those that decide designs first, and matmuls, which take most of a step, before the rest. Last
# those that need a package beside PyTorch and Triton.
# Of attention's gradients: one kernel with specialized warps.
_TOGETHER = {"BLOCK_N": 128, "BLOCK_M": 64, "num_warps": 4, "num_stages": 2, "ROLES": True}
VARIANTS = (
    Variant(
        "attention, keys of 192 and values of 128: one kernel for the gradients, for two",
        "attention",
        "deepseek-v3_8k",
        "attention/backward_kv",
        _TOGETHER,
        whole=True,
    ),
    Variant(
        "moe_mlp, gpt-oss's gate: tiles of 128 x 128 by all warps, for specialized ones",
        "moe_mlp",
        "gpt-oss-20b_8192",
        "moe_mlp/up_swiglu",
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
    Variant("rmsnorm: cute, for triton", "rmsnorm", "qwen3-8b", None, "cute", "triton"),
    Variant(
        "cross_entropy: cute, for triton", "cross_entropy", "llama-3-8b", None, "cute", "triton"
    ),
)
