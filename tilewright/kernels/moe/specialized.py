"""The launches of `gluon` among grouped products: their configurations, and the launchers of
grouped_gemm_triton.py with them. The kernels are in grouped_gemm_gluon.py.
"""

from __future__ import annotations

import functools

from tilewright.kernels.moe import grouped_gemm_triton as triton
from tilewright.kernels.moe.grouped_gemm_gluon import gemm, spec, weight, weight_spec
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import ROLES, Config, Specialized

# 192 KiB of operands, and 32 of results.
_PRODUCT: Config = {
    "BLOCK_M": 128,
    "BLOCK_N": 256,
    "BLOCK_K": 64,
    "GROUP": 8,
    "SPLIT": 1,
    "per_sm": 1,
    "num_warps": 8,
    "num_stages": 4,
    "maxnreg": None,
    ROLES: True,
}
# As many bytes of operands.
_WEIGHT: Config = {
    "BLOCK_N": 128,
    "BLOCK_K": 256,
    "BLOCK_R": 64,
    "num_warps": 8,
    "num_stages": 4,
    "GROUP": 8,
    ROLES: True,
}
_DOWN = {**_PRODUCT, "SPLIT": 0}


def _fits(by_tma: bool) -> bool:
    """by_tma: whether TMA reads the operands that are not gathered."""
    return by_tma


def _grouped(config: Config, fits: bool) -> list[Config]:
    return [{**config, "GROUP": group} for group in (4, 8, 16) if fits]


def _usual(
    N: int, K: int, itemsize: int, rows: int, aligned: bool, large: bool, plain: bool = True
) -> Config | None:
    """For tiles that products fill. Measured on an H100: 6 % faster than Triton's in the forward of
    an up-projection, 8 % in dx, a third with SwiGLU, whose result one warpgroup stores while the
    other multiplies. Biases and other gates, which fit the registers too, are not measured. A
    product with an adapter, whose N or K is its rank, is bound by memory.
    """
    fills = min(N, K) >= 512 and rows > 64
    return _PRODUCT if itemsize == 2 and aligned and large and fills else None


def _roles(
    N: int, K: int, itemsize: int, rows: int, aligned: bool, large: bool, plain: bool = True
) -> list[Config]:
    return _grouped(_PRODUCT, itemsize == 2 and aligned and large)


def _down_usual(**key) -> Config | None:
    """A product and a second kernel for its epilogue: 46 % faster than one kernel on an H100."""
    return _DOWN if _usual(**key) else None


def _down_roles(
    N: int, K: int, itemsize: int, rows: int, aligned: bool, large: bool
) -> list[Config]:
    return _grouped(_DOWN, itemsize == 2 and aligned and large)


def _down_specs(key: dict, config: Config) -> list[KernelSpec]:
    product = triton.gemm_specs("down product", triton.PLAIN, True, True, spec)(key, config)
    return [*product, *triton.dswiglu_specs(key)]


def _weight_usual(
    N: int, K: int, itemsize: int, rows: int, aligned: bool, large: bool
) -> Config | None:
    """Measured on an H100: 6 % faster where rows are gathered, as fast elsewhere."""
    fills = rows > 512 and min(N, K) >= 256
    return _WEIGHT if itemsize == 2 and aligned and large and fills else None


def _weight_roles(
    N: int, K: int, itemsize: int, rows: int, aligned: bool, large: bool
) -> list[Config]:
    return _grouped(_WEIGHT, itemsize == 2 and aligned and large)


def _weight_specs(key: dict, config: Config) -> list[KernelSpec]:
    return [
        weight_spec(triton.about_key(key), "bf16", gather, config) for gather in ("", "x", "dy")
    ]


FORWARD, BACKWARD_X, UP_SWIGLU = (
    Specialized(
        beside,
        gemm,
        _fits,
        _usual,
        _roles,
        triton.gemm_specs(label, epilogue, transposed, gather, spec),
    )
    for beside, label, epilogue, transposed, gather in (
        (triton.FORWARD, "forward", triton.PLAIN, False, False),
        (triton.BACKWARD_X, "backward x", triton.PLAIN, True, False),
        (triton.UP_SWIGLU, "up_swiglu", triton.SWIGLU, False, True),
    )
)
DOWN_DSWIGLU = Specialized(triton.DOWN_DSWIGLU, gemm, _fits, _down_usual, _down_roles, _down_specs)
BACKWARD_WEIGHT = Specialized(
    triton.BACKWARD_WEIGHT, weight, _fits, _weight_usual, _weight_roles, _weight_specs
)
TUNABLES = FORWARD, BACKWARD_X, BACKWARD_WEIGHT, *triton.TUNABLES
FUSED = UP_SWIGLU, DOWN_DSWIGLU, *triton.FUSED
_OTHERS = {t.beside: t for t in (FORWARD, BACKWARD_X, BACKWARD_WEIGHT, UP_SWIGLU, DOWN_DSWIGLU)}

forward, backward_x, backward_weight, up_swiglu, down_dswiglu = (
    functools.partial(launcher, others=_OTHERS)
    for launcher in (
        triton.forward,
        triton.backward_x,
        triton.backward_weight,
        triton.up_swiglu,
        triton.down_dswiglu,
    )
)


def gate() -> list[KernelSpec]:
    """What specialized warps compute of large products."""
    products = FORWARD, BACKWARD_X, UP_SWIGLU
    chosen = ((BACKWARD_WEIGHT, _WEIGHT), *((t, _PRODUCT) for t in products), (DOWN_DSWIGLU, _DOWN))
    large = {"N": 2048, "K": 2048, "itemsize": 2, "rows": 1024, "aligned": True, "large": True}
    return [
        each
        for t, config in chosen
        for each in t.specs({n: large.get(n, True) for n in t.fields}, config)
    ]
