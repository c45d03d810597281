"""The launches of `gluon` among products of quantized factors: their configurations, and Triton's
launchers with them.

    fp8_gluon.py          FP8, of `fp8_linear`, of `low_precision_linear`, and of each expert's rows
    fp8_dweight_gluon.py  gradients of weights in block-scaled FP8, of a layer and of each expert
    block_scaled_gluon.py MXFP8 and NVFP4, of all

Operands take up to 192 KiB. Only FP8's is measured: the others are Triton's launches where
`auto` chooses, until a table of a device has them.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from tilewright.kernels.quant import (
    block_scaled_gluon,
    fp8_dweight_gluon,
    fp8_gluon,
    low_precision_triton,
    quantized_linear_triton,
)
from tilewright.kernels.quant import low_precision_grouped_triton as grouped
from tilewright.kernels.spec import KernelSpec
from tilewright.kernels.tuning import ROLES, Config, Specialized

_ROWS = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 6, ROLES: True}
_WIDE = {"BLOCK_M": 128, "BLOCK_N": 256, "num_warps": 4, "num_stages": 4, ROLES: True}
_WEIGHTS = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 4, "num_stages": 6, ROLES: True}
_GROUP = {"GROUP": grouped.GROUP}


def _wide(config: Config) -> str:
    return " wide" if config["BLOCK_N"] == 256 else ""


# ---- FP8


def _fp8_usual(N: int, K: int, rows: int, large: bool) -> Config | None:
    """Measured on an H100: 36 % faster than one sum by all warps."""
    return {**_ROWS, **_GROUP} if large and rows > 64 else None


def _fp8_roles(N: int, K: int, rows: int, large: bool) -> list[Config]:
    return [{**_ROWS, **_GROUP}, {**_WIDE, **_GROUP}] if large else []


def _fp8_specs(key: dict, config: Config) -> list[KernelSpec]:
    label = f"fp8 specialized{_wide(config)} {key['rows']} rows large"
    return [fp8_gluon.spec(label, False, config)]


def _none(**key) -> None:
    return None


def _by_rows_roles(M: int, N: int, tokens: int, large: bool) -> list[Config]:
    return [{**_WEIGHTS, **_GROUP}] if large else []


def _by_rows_specs(key: dict, config: Config) -> list[KernelSpec]:
    return [
        fp8_dweight_gluon.spec(f"fp8 by rows specialized {out} large", False, out, config)
        for out in ("bf16", "fp32")
    ]


def _rows_usual(N: int, K: int, rows: int, large: bool) -> Config | None:
    return _ROWS if large else None


def _rows_roles(N: int, K: int, rows: int, large: bool) -> list[Config]:
    return [_ROWS, _WIDE] if large else []


def _rows_specs(key: dict, config: Config) -> list[KernelSpec]:
    label = f"fp8 rows specialized{_wide(config)} large"
    return [fp8_gluon.spec(label, True, {**config, **_GROUP})]


def _weights_usual(N: int, K: int, rows: int, large: bool) -> Config | None:
    return _WEIGHTS if large else None


def _weights_roles(N: int, K: int, rows: int, large: bool) -> list[Config]:
    return [_WEIGHTS] if large else []


def _weights_specs(key: dict, config: Config) -> list[KernelSpec]:
    label, given = "fp8 weights specialized", {**config, **_GROUP}
    return [
        fp8_dweight_gluon.spec(f"{label} {out} large", True, out, given) for out in ("bf16", "fp32")
    ]


# ---- MXFP8 and NVFP4


def _scaled(e2m1: bool, n: int, warps: int, stages: int) -> Config:
    step = {"BLOCK_K": 256 if e2m1 else 128}
    tile = {"BLOCK_M": 128, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
    return {**tile, **_GROUP, **step, ROLES: True}


def _scaled_roles(e2m1: bool, large: bool, **key) -> list[Config]:
    return [_scaled(e2m1, 256, 8, 4), _scaled(e2m1, 128, 4, 6)] if large else []


def _scaled_usual(e2m1: bool, large: bool, **key) -> Config | None:
    return _scaled(e2m1, 128, 4, 6) if large else None


def _scaled_specs(kind: str, outs: tuple[str, ...]):
    """kind: as `block_scaled_gluon.spec` has it."""

    def specs(key: dict, config: Config) -> list[KernelSpec]:
        recipe, launches = "nvfp4" if key["e2m1"] else "mxfp8", []
        for out in outs:
            wide = f"specialized{_wide(config)}"
            label = {
                "dense": f"{recipe} {wide} {out} large",
                "rows": f"{recipe} rows {wide} large",
                "weights": f"{recipe} weights {out} {wide} large",
            }[kind]
            launches.append(block_scaled_gluon.spec(label, key["e2m1"], out, kind, config))
        return launches

    return specs


# ---- launches

FP8 = Specialized(
    quantized_linear_triton.FP8,
    fp8_gluon.fp8,
    fp8_gluon.fits,
    _fp8_usual,
    _fp8_roles,
    _fp8_specs,
)
BY_ROWS = Specialized(
    low_precision_triton.BY_ROWS,
    fp8_dweight_gluon.dweight,
    fp8_dweight_gluon.fits,
    _none,
    _by_rows_roles,
    _by_rows_specs,
)
ROWS = Specialized(
    grouped.ROWS, fp8_gluon.fp8, fp8_gluon.fits, _rows_usual, _rows_roles, _rows_specs
)
WEIGHTS = Specialized(
    grouped.WEIGHTS,
    fp8_dweight_gluon.dweight,
    fp8_dweight_gluon.fits,
    _weights_usual,
    _weights_roles,
    _weights_specs,
)
SCALED, SCALED_ROWS, SCALED_WEIGHTS = (
    Specialized(
        beside,
        block_scaled_gluon.scaled,
        block_scaled_gluon.fits,
        _scaled_usual,
        _scaled_roles,
        _scaled_specs(kind, outs),
    )
    for beside, kind, outs in (
        (low_precision_triton.SCALED, "dense", ("bf16", "fp32")),
        (grouped.SCALED_ROWS, "rows", ("bf16",)),
        (grouped.SCALED_WEIGHTS, "weights", ("bf16", "fp32")),
    )
)
_OTHERS = {t.beside: t for t in (FP8, BY_ROWS, ROWS, WEIGHTS, SCALED, SCALED_ROWS, SCALED_WEIGHTS)}


def _with_others(module: Any, *names: str) -> SimpleNamespace:
    """Triton's launchers, each with these launches beside its own."""
    return SimpleNamespace(
        **{n: functools.partial(getattr(module, n), others=_OTHERS) for n in names}
    )


fp8 = _with_others(quantized_linear_triton, "fp8").fp8
dense = _with_others(low_precision_triton, "by_rows", "scaled")
experts = _with_others(grouped, "rows", "weights", "scaled_rows", "scaled_weights")
experts.place = grouped.place
FP8_LINEAR = FP8, quantized_linear_triton.FP8
DENSE = BY_ROWS, SCALED, *low_precision_triton.TUNABLES
GROUPED = ROWS, WEIGHTS, SCALED_ROWS, SCALED_WEIGHTS, *grouped.TUNABLES


# ---- for the compile gate: what no launch takes until a table says so


def _all(*launches: Specialized) -> list[KernelSpec]:
    return [
        spec
        for t in launches
        for key in map(t.named, t.keys)
        for config in t.compiled(**key)
        for spec in t.specs(key, config)
    ]


def fp8_gate() -> list[KernelSpec]:
    return FP8.specs(FP8.named(FP8.keys[-1]), {**_WIDE, **_GROUP})


def gate() -> list[KernelSpec]:
    return _all(BY_ROWS, SCALED)


def grouped_gate() -> list[KernelSpec]:
    return _all(ROWS, WEIGHTS, SCALED_ROWS, SCALED_WEIGHTS)
