"""residual + dropout(x) in Triton, and its gradient, which is dropout without a residual. The
definition is tilewright/ops/activation/dropout_add.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.kernels.activation.operators import drop_add
from tilewright.kernels.launch import launch
from tilewright.kernels.launchers import cdiv
from tilewright.kernels.spec import KernelSpec

TILE = 1024  # elements of a program: with 4 warps, a 128-bit load of bf16 per thread
# Arguments that are not specialized: Triton would recompile for an offset of 1, and for multiples
# of 16.
NUMBERS = ["threshold", "seed", "offset", "first", "width", "skip"]


@triton.jit(do_not_specialize=NUMBERS)
def _drop_add(
    x_ptr,
    residual_ptr,
    y_ptr,
    n,
    threshold: tl.int64,
    scale,
    seed: tl.int64,
    offset: tl.int64,
    first: tl.int64,
    width: tl.int64,
    skip: tl.int64,
    DROP: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    y = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    if DROP:
        block = tl.program_id(0).to(tl.int64) * (TILE // 4) + tl.arange(0, TILE // 4)
        none = block * 0
        if PART:
            block += first + block // width * skip
        a, b, c, d = tl.philox(
            seed,
            block.to(tl.uint32),
            (block >> 32).to(tl.uint32),
            (none + offset).to(tl.uint32),
            (none + (offset >> 32) + 0x40000000).to(tl.uint32),
        )
        words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (TILE,))
        y = tl.where(words.to(tl.int64) >= threshold, y * scale, 0.0)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < n)


def forward(x, residual, dropout, dtype):
    y = drop_add(x, residual, dropout, dtype)
    if n := x.numel():
        launch(
            _drop_add,
            (cdiv(n, TILE),),
            x,
            residual,
            y,
            n,
            *dropout,
            DROP=dropout.threshold > 0,
            PART=dropout.first > 0 or dropout.skip > 0,
            TILE=TILE,
            num_warps=4,
        )
    return y


def gate() -> list[KernelSpec]:
    """Forward, also into a float32 residual stream; backward; without dropout; on a part."""
    types = {"scale": "fp32", **dict.fromkeys(NUMBERS, "i64")}
    return [
        KernelSpec.of(
            _drop_add,
            f"{'dropout' if drop else 'sum'} {x} to {y}{'' if residual else ' alone'}"
            f"{' of a part' if part else ''}",
            {"x": x, "residual": y if residual else None, "y": y},
            {"TILE": TILE, "DROP": drop, "PART": part, "num_warps": 4},
            types,
            divisible=("n",),
            elements=TILE,
        )
        for x, y, residual, drop, part in (
            ("bf16", "bf16", True, True, False),
            ("bf16", "bf16", False, True, False),
            ("bf16", "bf16", True, False, False),
            ("bf16", "fp32", True, True, False),
            ("fp32", "bf16", False, True, False),
            ("fp32", "fp32", True, True, False),
            ("bf16", "bf16", True, True, True),
            ("fp32", "fp32", True, True, True),
        )
    ]
