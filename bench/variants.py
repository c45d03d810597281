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


_PACKED = "qwen3-30b-a3b_32k_packed"
# Specialized warps, for sm_90.
_ROLES_FORWARD = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 4, "num_stages": 2, "ROLES": True}
_ROLES_BACKWARD = {"BLOCK_N": 128, "BLOCK_M": 64, "num_warps": 4, "num_stages": 2, "ROLES": True}
# Those that decide designs first, and matmuls, which take most of a step, before the rest. Last
# those that need a package beside PyTorch and Triton.
VARIANTS = (
    Variant(
        "moe_mlp: specialized warps in dweight of gathered rows, for the same tiles",
        "moe_mlp",
        "qwen3-30b-a3b_32768",
        "grouped_gemm/backward_weight",
        {"BLOCK_N": 128, "BLOCK_K": 256, "num_stages": 4, "ROLES": True},
    ),
    Variant(
        "attention: all gradients in one kernel by specialized warps, for two kernels",
        "attention",
        "qwen3-30b-a3b_8k",
        "attention/backward_kv",
        _ROLES_BACKWARD,
        whole=True,
    ),
    Variant(
        "attention: head after head by specialized warps, for the last eight together",
        "attention",
        "qwen3-30b-a3b_8k",
        "attention/forward",
        {**_ROLES_FORWARD, "ROLES": "in order"},
    ),
    Variant(
        "attention: all gradients in one kernel, head after head, for the last two together",
        "attention",
        "qwen3-30b-a3b_8k",
        "attention/backward_kv",
        {**_ROLES_BACKWARD, "ROLES": "in order"},
        _ROLES_BACKWARD,
    ),
    # Not repeatable, and no alternative: it shows what turns cost.
    Variant(
        "attention: all gradients in one kernel without turns, for turns",
        "attention",
        "qwen3-30b-a3b_8k",
        "attention/backward_kv",
        {**_ROLES_BACKWARD, "ROLES": "unordered"},
        _ROLES_BACKWARD,
    ),
    Variant(
        "attention with sinks, rows of 64: specialized warps, for one loop of eight",
        "attention",
        "gpt-oss-20b_8k",
        "attention/forward",
        _ROLES_FORWARD,
    ),
    Variant(
        "attention with sinks, rows of 64: all gradients in one kernel, for two kernels",
        "attention",
        "gpt-oss-20b_8k",
        "attention/backward_kv",
        _ROLES_BACKWARD,
        whole=True,
    ),
    Variant(
        "latent attention: one loop of eight warps, for specialized ones",
        "attention",
        "deepseek-v3_8k",
        "attention/forward",
        {"BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2, "ROLES": False},
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
