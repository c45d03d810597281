"""The cases of the ops with FP8 results: those of the unfused ops, with less precise results."""

from __future__ import annotations

import math

import torch

from tilewright.core.registry import Case, Cost
from tilewright.ops import cases
from tilewright.ops.activation.activation import case as activation_case
from tilewright.ops.norm.cases import norm_case

MX = ("format", "mxfp8")


def _without_gradients(kwargs):
    return {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}


def _silu_case(name, rows, inner, *, tags=cases.CONTRACT, options=(), **layout):
    n = math.prod(rows) * inner
    case = activation_case(name, rows, inner, **layout)
    results = 1 + dict(options).get("transpose", False)
    return Case(
        name,
        lambda *a: {**_without_gradients(case.make(*a)), **dict(options)},
        lambda itemsize: Cost(2 * n * itemsize + int(results * n * 8.25 / 8), 0, 5 * n, 0),
        tags,
    )


def _norm_case(name, shape, *, add=False, tags=cases.CONTRACT, options=(), **parameters):
    # moved: x, residual, sum
    n, moved = (
        math.prod(shape),
        1 + dict(options).get("return_normalized", False) + 2 * add,
    )
    case = norm_case(name, shape, add=add, **parameters)
    return Case(
        name,
        lambda *a: {**_without_gradients(case.make(*a)), **dict(options)},
        lambda itemsize: Cost(moved * n * itemsize + int(n * 8.25 / 8), 0, 4 * n, 0),
        tags,
    )


def _timed(make, models):
    return [
        make(name, cases.TOKENS[device], cases.MODELS[name], tags)
        for device, tags in (("cuda", cases.CUDA), ("cpu", cases.CPU))
        for name in models
    ]


SILU_CASES = (
    _silu_case("ragged", (3, 7), 100),
    _silu_case("packed", (5, 3), 300, packed=True),
    _silu_case("strided", (4, 3), 36, strided=True),
    _silu_case("no_rows", (0,), 64, packed=True),
    _silu_case("no_columns", (3,), 0),
    _silu_case("wide", (2,), 1200, packed=True),
    _silu_case("vector", (), 130),
    _silu_case("random", (3,), 140, options=[("seed", 3)]),
    _silu_case("mxfp8", (3, 7), 100, options=[MX]),
    _silu_case("mxfp8_transpose", (2, 33), 36, packed=True, options=[MX, ("transpose", True)]),
    *_timed(
        lambda name, tokens, model, tags: _silu_case(
            name, (tokens,), model.inner, packed=True, tags=tags
        ),
        ("qwen3-8b", "deepseek-v3"),
    ),
    *_timed(
        lambda name, tokens, model, tags: _silu_case(
            f"{name}-mxfp8", (tokens,), model.inner, packed=True, tags=tags, options=[MX]
        ),
        ("qwen3-8b",),
    ),
    *_timed(
        lambda name, tokens, model, tags: _silu_case(
            f"{name}-mxfp8-transpose",
            (tokens,),
            model.inner,
            packed=True,
            tags=tags,
            options=[MX, ("transpose", True)],
        ),
        ("deepseek-v3",),
    ),
)

NORM_CASES = (
    _norm_case("ragged", (3, 7, 100)),
    _norm_case("odd", (5, 257), offset=1.0, cast="gemma"),
    _norm_case("bias", (2, 3, 64), bias=True, cast="none", options=[("return_normalized", True)]),
    _norm_case("qk_norm", (2, 5, 4, 128), weight_shape=(4, 128)),
    _norm_case("fp32_weight", (6, 96), mixed=True),
    _norm_case("no_rows", (0, 64)),
    _norm_case("vector", (130,)),
    _norm_case("random", (4, 300), options=[("seed", 9)]),
    _norm_case("wide", (2, 16512), options=[("return_normalized", True)]),
    _norm_case("mxfp8", (3, 7, 100), options=[MX]),
    *_timed(
        lambda name, tokens, model, tags: _norm_case(name, (tokens, model.hidden), tags=tags),
        ("qwen3-8b", "deepseek-v3"),
    ),
    *_timed(
        lambda name, tokens, model, tags: _norm_case(
            f"{name}-mxfp8", (tokens, model.hidden), tags=tags, options=[MX]
        ),
        ("qwen3-8b",),
    ),
)

ADD_NORM_CASES = (
    _norm_case("ragged", (3, 7, 100), add=True),
    _norm_case(
        "bias",
        (2, 3, 64),
        add=True,
        bias=True,
        cast="none",
        options=[("return_normalized", True)],
    ),
    _norm_case("fp32_residual", (6, 96), add=True, mixed=True),
    _norm_case("no_rows", (0, 64), add=True),
    _norm_case("random", (4, 300), add=True, options=[("seed", 9)]),
    _norm_case("wide", (2, 16512), add=True),
    _norm_case(
        "mxfp8",
        (5, 257),
        add=True,
        offset=1.0,
        cast="gemma",
        options=[MX, ("return_normalized", True)],
    ),
    *_timed(
        lambda name, tokens, model, tags: _norm_case(
            name, (tokens, model.hidden), add=True, tags=tags
        ),
        ("qwen3-8b",),
    ),
    *_timed(
        lambda name, tokens, model, tags: _norm_case(
            f"{name}-mxfp8", (tokens, model.hidden), add=True, tags=tags, options=[MX]
        ),
        ("qwen3-8b",),
    ),
)
