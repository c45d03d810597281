"""What the gate compiles and counts beside what kernels' modules name: launches, and elements of
tiles, of the cases that `python -m bench predict` predicts.

It is here because a kernel's module is among the sources that a committed result was measured with,
and what is only compiled changes no result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tilewright.kernels.spec import KernelSpec

# Keys of tunables, by op and launch: rows of Qwen3-30B-A3B.
KEYS: dict[tuple[str, str], tuple[tuple, ...]] = {
    ("rmsnorm", "forward"): ((2048, 2, False), (2048, 2, True)),
    ("rmsnorm", "backward"): ((2048, 2),),
}

_TWO = {"K": 2, "UNROLL": 2}  # experts of a token
_FEW = {"WIDTH": 16, "ROWS": 256}  # experts: 16 at most
_ONE = {"PACKED": False, "tiles_ptr": None, "cu_ptr": None}  # document
_BARE = {"BIAS": False, "bias_ptr": None}
_HEADS = {"D": 64, "WIDTH": 64}
_SCORES = "gated_delta_rule/scores one DK=128 DV=128 bf16"
# By the name of a spec: the end of another one's label, and the arguments that it differs in.
CHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "permute/spread bf16 H=2048": ("K=2", _TWO),
    "unpermute/collect bf16 H=2048": ("K=2", _TWO),
    "unpermute/backward bf16 H=2048": ("K=2", _TWO),
    "permute/place E=128": ("of 16", _FEW),
    "grouped_gemm/router gradient": ("4 parts", {"BLOCK": 256, "TILES": 4}),
    "quantized_linear/block_fp8 bf16 64 rows split last": ("bare", _BARE),
    _SCORES: ("again", {"SOLVE": False, "g_ptr": None, "solved_ptr": None}),
    "attention/forward packed window sinks D=64 bf16": ("one", _ONE),
    "attention/backward roles packed window sinks D=64 bf16": ("one", _ONE),
    "attention/backward_q packed D=192 DV=128 bf16": ("one", _ONE),
    "attention/backward_kv packed D=192 DV=128 bf16": ("one", _ONE),
    "attention/delta": ("D=64", _HEADS),
    "attention/round": ("D=64", _HEADS),
}

_LOGITS, _GEMM, _WEIGHT = ("BLOCK",), ("BLOCK_M", "BLOCK_N"), ("BLOCK_N", "BLOCK_K")
_DELTA = "gated_delta_rule/{} one DK=128 DV=128 bf16"
# By the name of a spec: the constants whose product is the elements of a tile, by which its
# instructions are counted. A product has the tile of its result.
TILES: dict[str, tuple[str, ...]] = {
    **{f"cross_entropy/{which} bf16": _LOGITS for which in ("forward", "backward")},
    **{f"cross_entropy/{which} bf16 softcap": _LOGITS for which in ("forward", "backward")},
    **{f"logprob_entropy/{which} bf16 scaled": _LOGITS for which in ("forward", "backward")},
    **{f"route/forward {model} bf16": ("ROWS", "E") for model in ("qwen", "deepseek")},
    **{f"route/backward {model} bf16": ("ROWS", "E") for model in ("qwen", "deepseek")},
    **{f"route/finish E={E}": ("ROWS", "E") for E in (128, 256)},
    **{
        f"grouped_gemm/{which} bf16 large": _GEMM
        for which in (
            "forward specialized",
            "backward x specialized",
            "up_swiglu specialized",
            "down product specialized",
        )
    },
    "grouped_gemm/forward bf16 large short": _GEMM,
    "grouped_gemm/backward x bf16 large short": _GEMM,
    "grouped_gemm/backward weight bf16": _WEIGHT,
    "grouped_gemm/backward weight bf16 large": _WEIGHT,
    **{
        f"grouped_gemm/backward weight {which}specialized bf16 large": _WEIGHT
        for which in ("", "gathered x ", "gathered dy ")
    },
    "newton_schulz/bf16 128 specialized": ("BLOCK", "BLOCK"),
    "newton_schulz/bf16 128 specialized add": ("BLOCK", "BLOCK"),
    "quantized_linear/block_fp8 bf16 64 rows split last bare": _WEIGHT,
    "quantize_nvfp4/nvfp4 largest bf16 hadamard 16": ("TILE",),
    "attention/delta D=64": ("ROWS", "WIDTH"),
    "attention/round D=64": ("ROWS", "WIDTH"),
    _SCORES: ("C", "C"),
    f"{_SCORES} again": ("C", "C"),
    _DELTA.format("states"): ("C", "BV"),
    _DELTA.format("outputs"): ("C", "BV"),
    _DELTA.format("state_gradients"): ("C", "BV"),
    _DELTA.format("pair_gradients"): ("C", "C"),
    _DELTA.format("row_gradients"): ("C", "BK"),
}


def alike(op: str, spec: Any) -> Iterator[Any]:
    """The spec, and what is compiled beside it."""
    specs = [spec]
    if (more := CHANGED.get(f"{op}/{spec.label}")) and isinstance(spec, KernelSpec):
        label, changed = more
        specs.append(spec.changed(changed, label=f"{spec.label} {label}"))
    for one in specs:
        tile = TILES.get(f"{op}/{one.label}")
        of_tile = tile and math.prod(one.constants[n] for n in tile)
        yield replace(one, elements=of_tile) if of_tile else one
