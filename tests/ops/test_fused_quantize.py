"""Quantization fused with other operations: the Hadamard transform, the transpose, silu(gate) * up,
RMSNorm, add + RMSNorm. The bytes equal those of the separate ops, in the interpreter and in
compiled Triton kernels (as in test_triton_ptx.py, by another process that prints a line of JSON per
test).
"""

import functools
import gc
import json
import os
import pathlib
import subprocess
import sys
import traceback

import pytest
import torch
from helpers import DEVICE, skip_unless_usable, with_dtypes

from tilewright.bench import bounds
from tilewright.core import platform
from tilewright.core.registry import short
from tilewright.ops import (
    add_rmsnorm,
    add_rmsnorm_quantize,
    dequantize_nvfp4,
    hadamard,
    quantize_block_fp8,
    quantize_mxfp8,
    quantize_nvfp4,
    rmsnorm,
    rmsnorm_quantize,
    silu_mul,
    silu_mul_quantize,
)
from tilewright.ops.fused_quantize.fused_quantize import (
    ADD_RMSNORM_QUANTIZE,
    RMSNORM_QUANTIZE,
    SILU_MUL_QUANTIZE,
)
from tilewright.ops.quant import block_fp8, mxfp8, nvfp4
from tilewright.selection import use

ROOT = pathlib.Path(__file__).parents[2]
OPS = {
    "nvfp4": nvfp4.QUANTIZE_NVFP4,
    "block_fp8": block_fp8.QUANTIZE_BLOCK_FP8,
    "mxfp8": mxfp8.QUANTIZE_MXFP8,
    "silu_mul": SILU_MUL_QUANTIZE,
    "rmsnorm": RMSNORM_QUANTIZE,
    "add_rmsnorm": ADD_RMSNORM_QUANTIZE,
}
BF16, F16 = torch.bfloat16, torch.float16


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def drawn(*shape, dtype=torch.float32):
    """With zero blocks in the first rows and columns, and blocks of small numbers."""
    x = randn(*shape, dtype=torch.float32)
    if shape[-2] > 16:  # else all would be zero
        x[..., :16, :] = 0
    if shape[-1] > 16:
        x[..., :, :16] = 0
    x[..., -5:, -20:] *= 1e-5
    assert x.any() or not x.numel()
    return x.to(dtype)


def raw(t):
    return (
        t.contiguous().reshape(-1).view(torch.uint8)
        if t.numel()
        else torch.zeros(0, dtype=torch.uint8)
    )


def assert_same(found, expected):
    assert (
        type(found) is type(expected)
        and found.shape == expected.shape
        and found.dtype == expected.dtype
    )
    found, expected = (
        [t] if isinstance(t, torch.Tensor) else t.tensors() for t in (found, expected)
    )
    for f, e in zip(found, expected, strict=True):
        assert f.shape == e.shape and f.dtype == e.dtype and torch.equal(raw(f), raw(e))


# ---- the Hadamard transform, then NVFP4


@with_dtypes(OPS["nvfp4"], ["triton", "cpp", "eager"])
@pytest.mark.parametrize("size, signs", [(16, None), (32, 2**40 + 1)])
def test_nvfp4_of_the_transform(name, dtype, size, signs, poisoned):
    """The transform in float32, without rounding to x's dtype."""
    skip_unless_usable(OPS["nvfp4"], name, dtype)
    x = drawn(2, 19, 3 * size, dtype=dtype)
    transform = hadamard(x.float(), size, seed=signs, implementation="eager")
    every = [{"square": True, "seed": 9}, {}, {"seed": 9}, {"square": True}]
    # The interpreter is slow; the bytes of the twin in every case are in test_quantize.py.
    for options in every[:1] if name == "triton" else every:
        expected = quantize_nvfp4(transform, **options, implementation="eager")
        found = quantize_nvfp4(
            x, hadamard=size, hadamard_seed=signs, **options, implementation=name
        )
        assert found.dtype == dtype and found.global_scale == transform.abs().max() / 2688
        for f, e in zip(found.tensors(), expected.tensors(), strict=True):
            assert torch.equal(raw(f), raw(e))


def test_nvfp4_of_the_transform_comes_back():
    x = randn(8, 256)
    x[:, 7] *= 50  # an outlier, which uses up its block's codes
    q = quantize_nvfp4(x, hadamard=16, hadamard_seed=3)
    back = hadamard(dequantize_nvfp4(q), 16, seed=3, inverse=True)
    assert (back - x).norm() / x.norm() < 0.15
    # The transform distributes an error over its block: large elements are no less accurate than
    # others.
    assert (back - x)[:, 7].abs().max() < 0.05 * x[:, 7].abs().max()


@pytest.mark.parametrize("name", ["triton", "cpp", "eager"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_transform_that_is_not_finite_is_refused(name, bad):
    skip_unless_usable(OPS["nvfp4"], name, torch.float32)
    if DEVICE == "cuda":
        pytest.skip("on CUDA nothing looks")
    x = randn(3, 64)
    x[2, 40] = bad
    with pytest.raises(ValueError, match="x must be finite"):
        quantize_nvfp4(x, hadamard=16, implementation=name)
    with pytest.raises(ValueError, match="x must be finite"):  # the sum is infinite
        quantize_nvfp4(torch.full((1, 16), 3e38, device=DEVICE), hadamard=16, implementation=name)


# ---- a transposed view

TURNED = [
    ((2, 33, 70), {}),
    ((48, 67), {"hadamard": 16, "hadamard_seed": 5, "seed": 2**40 + 3}),
    ((2, 96, 20), {"hadamard": 32, "square": True}),
    ((37, 18), {"square": True, "seed": 1}),
    ((2, 19, 24), {"transpose": True, "seed": 4}),
    ((16, 1), {"hadamard": 16}),
    ((0, 3), {}),
]


def equals_a_copy(name, view, options):
    """A view gives the bytes that the eager twin gives of a contiguous copy."""
    found = quantize_nvfp4(view, **options, implementation=name)
    expected = quantize_nvfp4(view.contiguous(), **options, implementation="eager")
    if not options.get("transpose"):
        found, expected = (found,), (expected,)
    for f, e in zip(found, expected, strict=True):
        assert_same(f, e)


@pytest.mark.parametrize("name", ["triton", "cpp", "eager"])
@pytest.mark.parametrize("shape, options", TURNED, ids=str)
def test_nvfp4_of_a_transposed_view(name, shape, options, poisoned):
    """The view is that of a matrix, and of some of its columns."""
    skip_unless_usable(OPS["nvfp4"], name, torch.float32)
    x = drawn(*shape)
    equals_a_copy(name, x.mT, options)
    wider = torch.nn.functional.pad(x, (0, 3), value=1e30)
    equals_a_copy(name, wider[..., : shape[-1]].mT, options)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes calls of operators: (operator, arguments)."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"hadamard": 16, "seed": 1}, {"transpose": True}], ids=str)
def test_a_transposed_view_is_not_copied(options):
    skip_unless_usable(OPS["nvfp4"], "triton", torch.float32)
    x = randn(2, 32, 20)
    with Calls() as calls:
        quantize_nvfp4(x.mT, **options, implementation="triton")
    read = {
        func.name(): args[0].untyped_storage().data_ptr()
        for func, args in calls.found
        if args and isinstance(args[0], torch.Tensor) and args[0].numel() == x.numel()
    }
    launched = [name for name in read if name.startswith("tilewright::")]
    assert len(launched) == 2, "one for the largest magnitude, one for the codes"
    assert set(read.values()) == {x.untyped_storage().data_ptr()}, read
    with Calls() as calls:  # PyTorch copies what is not contiguous
        nvfp4._largest_of(x.mT)
    (of,) = [args[0] for func, args in calls.found if "aminmax" in func.name()]
    assert of.is_contiguous() and of.data_ptr() == x.data_ptr()


# ---- a matrix and its transpose

SHAPES = [(2, 37, 33), (130, 70), (1, 5), (3, 0, 4), (128, 256), (300, 1)]
BOTH_WAYS = {
    "nvfp4": [{}, {"square": True}, {"seed": 2}, {"square": True, "seed": 3}],
    "block_fp8": [
        *({"block": block} for block in ((1, 128), (128, 128), (1, 16), (32, 16), (3, 7))),
        {"block": (1, 128), "seed": 4},
    ],
    "mxfp8": [{}, {"seed": 2}],
}


@pytest.mark.parametrize("name", ["triton", "cpp", "eager"])
@pytest.mark.parametrize(
    "format, options", [(f, options) for f, every in BOTH_WAYS.items() for options in every]
)
def test_both_ways_give_the_bytes_of_two_calls(name, format, options, poisoned):
    skip_unless_usable(OPS[format], name, torch.float32)
    quantize, slow = OPS[format].public, name == "triton" and DEVICE == "cpu"
    for shape in SHAPES[: 1 if slow else None]:
        x = drawn(*shape)
        found = quantize(x, transpose=True, **options, implementation=name)
        for q, t in zip(found, (x, x.mT), strict=True):
            assert_same(q, quantize(t, **options, implementation=name))


@pytest.mark.parametrize("name, dtype", [("triton", F16), ("cpp", BF16), ("eager", BF16)])
def test_both_ways_of_other_dtypes_and_strides(name, dtype):
    x = drawn(70, 150, dtype=dtype)
    for format, options in (("nvfp4", {}), ("block_fp8", {"block": (1, 128)}), ("mxfp8", {})):
        if name == "triton" and format == "mxfp8" and DEVICE == "cpu":
            continue  # shares block FP8's loads
        skip_unless_usable(OPS[format], name, dtype)
        call = functools.partial(OPS[format].public, **options, implementation=name)
        for view in (x.mT, x[:, 10:140], x[::2], x[-1:].expand(20, 150)):
            q, t = call(view, transpose=True)
            assert_same(q, call(view.contiguous()))
            assert_same(t, call(view.mT.contiguous()))


# ---- silu(gate) * up and RMSNorm, then FP8


def activations(dtype, shape, packed, strided):
    n = shape[-1]
    if packed:
        return (randn(*shape[:-1], 2 * n, dtype=dtype),)
    if strided:
        return tuple(
            randn(*shape[:-1], 2 * n + 3, dtype=dtype, seed=s)[..., 1 : n + 1] for s in (1, 2)
        )
    return tuple(randn(*shape, dtype=dtype, seed=s) for s in (1, 2))


def cells(op, rows, edges):
    """Implementations, dtypes and rows. In the interpreter, where a row takes seconds, none of the
    edges, which its contract has, and one row of float16, for the same kernel after its load.
    """
    for name in ("triton", "cpp", "eager"):
        for dtype in OPS[op].implementation(name).dtypes:
            slow = name == "triton" and DEVICE == "cpu"
            every = rows[: 1 if slow and dtype == F16 else None] + edges * (not slow)
            for row in every:
                yield pytest.param(name, dtype, *row, id=f"{name}-{short(dtype)}-{row}")


FORMATS = {
    "block_fp8": lambda y, **options: quantize_block_fp8(y, block=(1, 128), **options),
    "mxfp8": quantize_mxfp8,
}


def silu_mul_both(name, dtype, shape, packed, strided, seed, formats=FORMATS, transpose=True):
    tensors = activations(dtype, shape, packed, strided)
    product = silu_mul(*tensors, implementation=name)
    for format in formats:
        found = silu_mul_quantize(*tensors, seed=seed, format=format, implementation=name)
        assert_same(found, FORMATS[format](product, seed=seed, implementation=name))
    if transpose and len(shape) > 1:
        found = silu_mul_quantize(
            *tensors, seed=seed, format="mxfp8", transpose=True, implementation=name
        )
        for q, t in zip(found, (product, product.mT), strict=True):
            assert_same(q, FORMATS["mxfp8"](t, seed=seed, implementation=name))


def rmsnorm_both(name, dtype, shape, seed, formats=FORMATS, add=None, without_rows=True, **options):
    """add: the residual's dtype.   without_rows: also without the normalized rows."""
    options = {**options, "implementation": name}
    x = randn(*shape, dtype=dtype)
    weight = randn(*shape[-2 if options.pop("per_head", False) else -1 :], dtype=dtype, seed=1)
    if options.pop("bias", False):
        options["bias"] = randn(shape[-1], dtype=dtype, seed=2)
    rows = x.numel() // max(shape[-1], 1)
    zeros = shape[-1] if rows > 1 else 0  # the first row, where it is not the only one
    x.view(-1)[:zeros] = 0
    given, whole, fused = (x, weight), rmsnorm, rmsnorm_quantize
    if add:
        residual = randn(*shape, dtype=add, seed=3)
        residual.view(-1)[:zeros] = 0
        given, whole, fused = (x, residual, weight), add_rmsnorm, add_rmsnorm_quantize
    expected = whole(*given, **options)
    y, *total = expected if add else (expected,)
    for format in formats:
        q, *totals, kept = fused(
            *given, **options, seed=seed, format=format, return_normalized=True
        )
        for f, e in zip((kept, *totals), (y, *total), strict=True):
            assert_same(f, e)
        assert_same(q, FORMATS[format](y, seed=seed, implementation=name))
    if not without_rows:
        return
    again = fused(*given, **options, seed=seed, format=format)
    for f, e in zip(again if add else (again,), (q, *totals), strict=True):
        assert_same(f, e)


@pytest.mark.parametrize(
    "name, dtype, shape, packed, strided, seed",
    cells(
        "silu_mul",
        [
            ((3, 5, 200), False, False, None),
            ((4, 128), True, False, 7),
            ((3, 300), False, True, None),
            ((2, 9000), True, False, None),
        ],
        [
            ((130,), True, False, 1),
            ((0, 64), False, False, None),
            ((3, 0), False, False, 2),
            ((1, 1), True, False, None),
        ],
    ),
)
def test_silu_mul_gives_the_bytes_of_the_two_ops(
    name, dtype, shape, packed, strided, seed, poisoned
):
    skip_unless_usable(OPS["silu_mul"], name, dtype)
    # Wide in the interpreter: one more second each.
    silu_mul_both(
        name, dtype, shape, packed, strided, seed, transpose=name != "triton" or shape[-1] < 1000
    )


@pytest.mark.parametrize(
    "name, dtype, shape, seed, options",
    cells(
        "rmsnorm",
        [
            ((3, 5, 200), None, {}),
            ((20, 128), None, {"offset": 1.0, "cast": "gemma"}),
            ((2, 3, 2, 96), None, {"per_head": True}),
            ((2, 2100), None, {"eps": 0.1, "bias": True}),
            ((2, 17000), None, {"cast": "gemma"}),
        ],
        [((130,), None, {"bias": True}), ((0, 64), None, {}), ((3, 1), 2, {})],
    ),
)
def test_rmsnorm_gives_the_bytes_of_the_two_ops(name, dtype, shape, seed, options, poisoned):
    skip_unless_usable(OPS["rmsnorm"], name, dtype)
    rmsnorm_both(name, dtype, shape, seed, **options)
    residual = torch.float32 if shape[-1] == 200 else dtype
    rmsnorm_both(name, dtype, shape, seed, ("mxfp8",), residual, **options)


@pytest.mark.parametrize("name", ["triton", "cpp", "eager"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_by_name(name, bad):
    if DEVICE == "cuda":
        pytest.skip("on CUDA nothing looks")
    for op in OPS.values():
        skip_unless_usable(op, name, torch.float32)
    ones, large = torch.ones(300), torch.full((1, 8), 1e30)
    x = randn(3, 300)
    x[1, 200] = bad

    def refused(said, fn, *given, **options):
        with pytest.raises(ValueError, match=rf"{said} must be finite"):
            fn(*given, **options, implementation=name)

    refused(r"silu\(gate\) \* up", silu_mul_quantize, large, large)  # the product alone is not
    for format, block in (("block_fp8", 1), ("mxfp8", 6)):
        # And where.
        with pytest.raises(ValueError, match=rf"finite .* in block \[0, 1, {block}\]"):
            silu_mul_quantize(x, torch.ones_like(x), format=format, implementation=name)
        refused("the normalized x", rmsnorm_quantize, x, ones, format=format)
        refused(r"the normalized x \+ residual", add_rmsnorm_quantize, x, x, ones, format=format)
    refused("x", quantize_mxfp8, x, transpose=True)
    refused("x", quantize_block_fp8, x, block=(1, 128), transpose=True)
    refused("x", quantize_nvfp4, x, transpose=True)


@pytest.mark.parametrize("name", ["triton", "cpp"])
def test_a_call_is_one_operator(name):
    for op in OPS.values():
        skip_unless_usable(op, name, torch.float32)

    x = randn(20, 64)
    with Calls() as mode:
        quantize_nvfp4(x, hadamard=32, hadamard_seed=1, seed=1, implementation=name)
        quantize_nvfp4(x[:16].mT, hadamard=16, seed=1, implementation=name)
        quantize_nvfp4(x, transpose=True, seed=1, implementation=name)
        quantize_block_fp8(x, block=(1, 32), transpose=True, implementation=name)
        quantize_block_fp8(x, block=(3, 7), seed=1, transpose=True, implementation=name)
        silu_mul_quantize(x, seed=1, implementation=name)
        silu_mul_quantize(x, format="mxfp8", transpose=True, implementation=name)
        add_rmsnorm_quantize(
            x, x.clone(), x[0], seed=1, return_normalized=True, format="mxfp8", implementation=name
        )
        quantize_mxfp8(x, transpose=True, implementation=name)
    calls = [func for func, _ in mode.found if name in func.name()]
    # In NVFP4 one more for a tensor's scale, in C++ of transforms alone.
    scales = 3 if name == "triton" else 2
    assert len(calls) == 9 + scales and len({*calls}) == 5, calls


def test_variants_of_the_twins_compile_as_one_graph():
    """Those of kernels are one operator each."""

    def everything(x, w):
        return (
            quantize_nvfp4(x, hadamard=16, hadamard_seed=3),
            quantize_nvfp4(x.mT),
            quantize_nvfp4((2 * x[:16]).mT, hadamard=16, seed=1),
            *quantize_nvfp4(x, transpose=True, square=True),
            *quantize_block_fp8(x, block=(1, 16), transpose=True),
            silu_mul_quantize(x),
            rmsnorm_quantize(x, w),
            *silu_mul_quantize(x, format="mxfp8", transpose=True),
            *add_rmsnorm_quantize(x, 2 * x, w, format="mxfp8"),
        )

    torch._dynamo.reset()
    x, w = randn(20, 48), randn(48)
    with use("eager"):
        compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
        for f, e in zip(compiled(x, w), everything(x, w), strict=True):
            assert_same(f, e)


def test_arguments_that_do_not_fit_are_refused_by_name():
    x = randn(4, 72)
    for fn, given, options, message in (
        (quantize_nvfp4, x, {"hadamard": 16}, r"x .* with C % hadamard == 0, .* got \[4, 72\]"),
        (quantize_nvfp4, x, {"hadamard_seed": 1}, "hadamard_seed must be None without hadamard"),
        (
            quantize_nvfp4,
            x[:, :64],
            {"hadamard": 16, "transpose": True},
            "transpose must be False with",
        ),
        (quantize_nvfp4, x[0], {"transpose": True}, "x must have at least 2 dimensions"),
        (silu_mul_quantize, x, {"transpose": True}, "transpose must be False with format 'block"),
        (
            silu_mul_quantize,
            x[0],
            {"format": "mxfp8", "transpose": True},
            r"gate must have at least 2 dimensions for a transpose, got shape \[72\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            fn(given, **options)


# ---- compiled by Triton

# bfloat16, which the interpreter truncates; and row widths for one warp, for several, and in
# blocks.
COMPILED = {
    "silu_mul": (
        90,
        silu_mul_both,
        BF16,
        (3, 1160),
        True,
        False,
        None,
        BLOCKS := ("block_fp8",),
        False,
    ),
    "silu_mul_odd": (100, silu_mul_both, BF16, (2, 131), False, True, 5, BLOCKS, False),
    "silu_mul_mxfp8": (90, silu_mul_both, BF16, (48, 72), True, False, None, ("mxfp8",)),
    "rmsnorm": (90, rmsnorm_both, BF16, (3, 4096), None, BLOCKS),
    "rmsnorm_100": (100, rmsnorm_both, BF16, (2, 1000), 3, BLOCKS, None, False),
    "rmsnorm_narrow": (90, rmsnorm_both, BF16, (11, 100), None, FORMATS, None, False),
    "rmsnorm_walked": (90, rmsnorm_both, BF16, (1, 16640), None, BLOCKS),
    "rmsnorm_float32": (90, rmsnorm_both, torch.float32, (2, 2100), None, BLOCKS, None, False),
    "add_rmsnorm": (90, rmsnorm_both, BF16, (2, 1000), None, FORMATS, BF16),
    "add_rmsnorm_float32": (90, rmsnorm_both, BF16, (1, 1000), None, BLOCKS, torch.float32, False),
    "add_rmsnorm_walked": (90, rmsnorm_both, BF16, (1, 16640), None, BLOCKS, BF16),
}


def transposes(name, dtype):
    x = drawn(70, 150, dtype=dtype)
    for quantize, given, options in (
        (quantize_block_fp8, x, {"block": (1, 128)}),
        (quantize_block_fp8, x, {"block": (32, 32)}),
        (quantize_mxfp8, x[:64, :148], {}),
        (quantize_mxfp8, x[:64, :148], {"seed": 1}),
        (quantize_nvfp4, x, {}),
        (quantize_nvfp4, x, {"square": True, "seed": 1}),
    ):
        found, expected = (
            quantize(given, transpose=True, **options, implementation=n) for n in (name, "eager")
        )
        for q, e in zip(found, expected, strict=True):
            assert_same(q, e)


def transforms(name, dtype):
    x = drawn(20, 160, dtype=dtype)
    assert torch.equal(*(hadamard(x, 32, seed=1, implementation=n) for n in (name, "eager")))
    for options in ({"hadamard": 16, "hadamard_seed": 7}, {"hadamard": 32, "square": True}):
        assert_same(*(quantize_nvfp4(x, **options, implementation=n) for n in (name, "eager")))


def turned(name, dtype):
    """Several tiles each way; of a matrix, and of some of its columns."""
    x = drawn(2, 96, 70, dtype=dtype)
    for options in ({"hadamard": 32, "seed": 1}, {"square": True}):
        equals_a_copy(name, x.mT, options)
    for options in ({"hadamard": 16, "hadamard_seed": 7}, {"seed": 2}):
        equals_a_copy(name, x[:, :80, :65].mT, options)


COMPILED |= {
    "turned": (90, turned, BF16),
    "turned_100": (100, turned, BF16),
    "turned_float32": (100, turned, torch.float32),
    "transposes": (90, transposes, BF16),
    "transposes_100": (100, transposes, torch.float32),
    "transforms": (90, transforms, BF16),
    "transforms_100": (100, transforms, BF16),
}


# What `make test` runs of these: one of each kind. All are in the table of `python -m tests.ptx`.
FIXED = ("silu_mul", "rmsnorm", "add_rmsnorm", "turned", "transposes", "transforms")


@pytest.fixture(scope="module")
def verdicts(request, compiling):
    pytest.importorskip("triton")
    test = test_compiled_kernels_give_the_bytes.__name__
    items = [i for i in request.session.items if i.path == request.path and i.originalname == test]
    names = [item.callspec.params["case"] for item in items]
    variables = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "DISABLE_PTXAS_OPT": "1",  # what ptxas makes of the PTX is not run
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/lib'}",
    }
    run = subprocess.run(
        [compiling, __file__, *names],
        env=variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {
        **dict.fromkeys(names, f"no verdict: {run.stderr[-3000:]}"),
        **{v["name"]: v["wrong"] for v in lines},
    }


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=[pytest.mark.table] * (n not in FIXED)) for n in COMPILED]
)
def test_compiled_kernels_give_the_bytes(case, verdicts):
    assert not verdicts[case], verdicts[case]


def main():
    from tilewright_lab.emulator.driver import Driver, installed

    platform.interpreting = lambda: (
        True
    )  # Triton accepts CPU tensors, and this is not the interpreter
    # The product or norm and the fused kernel are compiled; test_triton_ptx.py compiles those that
    # only quantize, and they give the twin's bytes.
    for format, quantize in list(FORMATS.items()):
        FORMATS[format] = lambda y, implementation, quantize=quantize, **options: quantize(
            y, **options, implementation="eager"
        )
    gc.freeze()  # what has been imported
    gc.set_threshold(100_000, 20, 100)
    with installed(Driver()) as driver:
        for case in sys.argv[1:]:
            driver.arch, test, *arguments = COMPILED[case]
            driver.memories, driver.names = [], []
            try:
                test("triton", *arguments)
                wrong = ""
            except Exception:  # any exception is a verdict
                wrong = traceback.format_exc()
            print(json.dumps({"name": case, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()


def test_a_judgement_in_steps_needs_no_exact_logarithm(monkeypatch):
    """That of a power of two may be off by a unit in the last place, as on CUDA."""
    x = drawn(4, 64)
    x[0, :4] = torch.tensor([448.0, 2.0**-6, 2.0**-7, 2.0**-9], device=DEVICE)
    values, q = x.double(), quantize_mxfp8(x, implementation="eager")
    exact = torch.Tensor.log2
    for toward in (-torch.inf, torch.inf):
        monkeypatch.setattr(
            torch.Tensor,
            "log2",
            lambda t, to=toward: exact(t).nextafter(exact(t).new_tensor(to)),
        )
        (codes, _), (scales, _) = bounds.errors_on_grid([(q.data, q.scale, values)], 1.0, 0.0)
        assert 0 < codes <= 0.5
        assert scales == 0
