"""NF4, NVFP4, block-scaled FP8 and MXFP8: the bytes, against the projects that defined them; every
implementation against the eager twins; rounding, odd sizes, checkpoints, torch.compile, rejected
arguments.
"""

import ctypes.util
import dataclasses
import functools
import importlib
import itertools
import json
import math
import os
import pathlib
import subprocess
import types

import numpy as np
import pytest
import torch
from helpers import DEVICE, skip_unless_usable
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.bench import contract
from tilewright.core.registry import FLOATS, short
from tilewright.ops import (
    dequantize_block_fp8,
    dequantize_mxfp8,
    dequantize_nf4,
    dequantize_nvfp4,
    quantize_block_fp8,
    quantize_mxfp8,
    quantize_nf4,
    quantize_nvfp4,
)
from tilewright.ops.quant import aqn, block_fp8, mxfp8, nf4, nvfp4, quantize

ROOT = pathlib.Path(__file__).parents[2]
FORMATS = {
    "nf4": (nf4.QUANTIZE_NF4, nf4.DEQUANTIZE_NF4),
    "nvfp4": (nvfp4.QUANTIZE_NVFP4, nvfp4.DEQUANTIZE_NVFP4),
    "block_fp8": (block_fp8.QUANTIZE_BLOCK_FP8, block_fp8.DEQUANTIZE_BLOCK_FP8),
    "mxfp8": (mxfp8.QUANTIZE_MXFP8, mxfp8.DEQUANTIZE_MXFP8),
}
OPS = [op for pair in FORMATS.values() for op in pair]
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS)
EVERY_DTYPE = pytest.mark.parametrize("dtype", FLOATS, ids=short)
SIZES = [(300, 256), (7, 33), (1,), (64,), (65,), (127,), (2, 3, 96)]


@functools.cache
def oracle(module):
    """A module of another project, or a skip with the reason why it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"no oracle: {error}")


def raw(t):
    """A tensor's bytes: -0.0 differs from 0.0, and NaN equals itself."""
    return t.contiguous().reshape(-1).view(torch.uint8)


def assert_same_bytes(found, expected):
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert torch.equal(raw(found), raw(expected))


def assert_same(found, expected):
    for f, e in zip(contract.leaves(found), contract.leaves(expected), strict=True):
        assert_same_bytes(f, e)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def both(format, **options):
    """quantize_* and dequantize_* of a format; block FP8 uses its small blocks."""
    up, down = FORMATS[format]
    if format == "block_fp8":
        options = {"block": (1, 16), **options}
    return functools.partial(up.public, **options), down.public


# ---- every implementation against the eager twins


def grid():
    for op in OPS:
        for impl in op.implementations:
            if impl.name == "eager":
                continue
            for case, dtype in itertools.product(op.cases, impl.dtypes):
                # Noise differs from the twin's in the last bits: see test_aqn.py.
                if "contract" not in case.tags or case.name.startswith("noise"):
                    continue
                if impl.name == "triton" and dtype == torch.float16 and "ragged" not in case.name:
                    continue  # a second in the interpreter, for the same kernel after loading
                label = f"{op.name}-{impl.name}-{case.name}-{short(dtype)}"
                yield pytest.param(op, impl.name, case, dtype, id=label)


@pytest.mark.parametrize("op, name, case, dtype", list(grid()))
def test_implementations_give_the_bytes_of_the_twin(op, name, case, dtype, poisoned):
    skip_unless_usable(op, name, dtype)
    kwargs = case.make(DEVICE, dtype, 0)
    assert_same(
        op.public(**kwargs, implementation=name), op.public(**kwargs, implementation="eager")
    )


class _Divisors(TorchDispatchMode):
    """Keeps what tensors are divided by."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket is torch.ops.aten.div:
            self.found.append(args[1])
        return function(*args, **(kwargs or {}))


@EVERY_FORMAT
def test_a_twin_divides_by_no_number(format):
    """On CUDA PyTorch multiplies with a number's rounded reciprocal, where kernels divide."""
    with _Divisors() as divisors:
        FORMATS[format][0].public(randn(4, 256), implementation="eager")
    assert all(isinstance(by, torch.Tensor) for by in divisors.found)


COMPILED = """
import json, re, unittest.mock
from tilewright.ops.quant import block_fp8, mxfp8, nf4, nvfp4
from tilewright_lab.gate import compilers, machine_code

ops = (block_fp8.QUANTIZE_BLOCK_FP8, mxfp8.QUANTIZE_MXFP8, nf4.QUANTIZE_NF4, nvfp4.QUANTIZE_NVFP4)
specs = {}
for spec in compilers.collect(ops, without=("cpp",)).values():
    if spec.min_arch <= 90 and "random" not in spec.label:
        specs.setdefault((spec.kernel, "fp8" in spec.label), spec)
found = {}
for spec in specs.values():
    with unittest.mock.patch.object(
        machine_code, "ptx_facts", side_effect=machine_code.ptx_facts
    ) as read:
        compilers.compile_triton(spec, 90)
    ptx = read.call_args[0][0]
    found[spec.label] = re.findall(r"\\b(?:div|rcp|r?sqrt)\\.[a-z.]*f32", ptx)
print(json.dumps(found))
"""


def test_compiled_kernels_divide_exactly(compiling):
    """A `/` compiles to div.full.f32, which is off by up to two units in the last place; Triton's
    interpreter and the emulator compute it exactly.
    """
    pytest.importorskip("triton")
    code = subprocess.run(
        [compiling, "-c", COMPILED],
        env={
            **{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "lab"))),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert code.returncode == 0, code.stderr[-3000:]
    found = json.loads(code.stdout.splitlines()[-1])
    assert sum(map(bool, found.values())) >= 6
    for label, instructions in found.items():
        # Block FP8's reciprocals are corrected: see the next test.
        allowed = {"div.rn.f32", "rcp.approx.ftz.f32"} if "block_fp8" in label else {"div.rn.f32"}
        assert set(instructions) <= allowed, label


@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_quotients_are_exact_where_the_reciprocal_is_not(ulps):
    """The compiled branch, in NumPy: the emulator's reciprocal is exact, a GPU's is off by up to a
    unit in the last place. That of the largest mantissa must not be below the power of two, which
    rounding to nearest excludes. NVIDIA's division has the same corrections.
    """
    pytest.importorskip("triton")
    from tilewright.kernels.quant import quantize_triton

    fma = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fma.restype, fma.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    language = types.SimpleNamespace(fma=np.vectorize(fma, otypes=[np.float32]), where=np.where)

    def reciprocal(x):
        y = np.float32(1) / x
        return np.where(np.isfinite(x), (y.view(np.int32) + ulps).view(np.float32), y)

    source = quantize_triton._fp8_quotients.fn
    quotients = types.FunctionType(
        source.__code__, {"COMPILED": True, "tl": language, "reciprocal": reciprocal}
    )
    draw = np.random.default_rng(0)
    exponent = np.r_[27:31, 120:131, 249:255].astype(np.int32)[:, None] << 23
    mantissa = np.r_[:4, 2**23 - 4 : 2**23 - 1, draw.integers(0, 2**23, 400)].astype(np.int32)
    x = np.append((exponent | mantissa).view(np.float32), np.float32([np.inf, np.nan]))
    with np.errstate(all="ignore"):
        found = [f.astype(np.float32) for f in quotients(x)]
        np.testing.assert_array_equal(found[0], np.float32(1) / x)
        np.testing.assert_array_equal(found[1], x / np.float32(448))


@EVERY_FORMAT
@EVERY_DTYPE
def test_results_are_near_what_was_quantized(format, dtype):
    """Within half the widest gap of each code, relative to the block's largest magnitude."""
    up, down = both(format)
    x = randn(40, 96, dtype=dtype)
    y = down(up(x))
    assert y.shape == x.shape and y.dtype == dtype and y.is_contiguous()
    # NF4: half of (1 - 0.696); e2m1: half of 2 in 6, and a 16th for the scale's rounding, which 6
    # may clip; e4m3: 16 in 448, or, where the scale is a power of two, in 256. bf16 adds its own.
    bound = {"nf4": 0.152, "nvfp4": 1 / 6 + 1 / 16, "block_fp8": 16 / 448, "mxfp8": 16 / 256}[
        format
    ] + 2**-8
    size = {"nf4": 64, "mxfp8": 32}.get(format, 16)
    most = x.float().view(-1, size).abs().amax(1, keepdim=True)
    assert ((y.float() - x.float()).view(-1, size).abs() <= bound * most).all()


# ---- bitsandbytes


@pytest.mark.packages
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(
    "shape, dtype",
    [*((shape, torch.float32) for shape in SIZES), *(((7, 33), dtype) for dtype in FLOATS[1:])],
    ids=str,
)
def test_nf4_is_what_bitsandbytes_writes_and_reads(shape, double, dtype):
    bnb = oracle("bitsandbytes.functional")
    x = randn(*shape, dtype=dtype)
    packed, state = bnb.quantize_4bit(x, quant_type="nf4", compress_statistics=double)
    q = quantize_nf4(x, double_quant=double)
    expected = {
        "weight": packed,
        **{f"weight.{k}": v for k, v in state.as_dict(packed=True).items()},
    }
    found = q.to_safetensors()
    assert found.keys() == expected.keys()
    for name in expected:
        assert_same_bytes(found[name], expected[name])
    # As one row: if a row is not a multiple of a block, its AVX-512 kernel uses the wrong blocks'
    # scales.
    state.shape = torch.Size([x.numel()])
    # Two float32 operations against one that may be fused: a unit in the last place, before
    # rounding.
    torch.testing.assert_close(
        dequantize_nf4(q),
        bnb.dequantize_4bit(packed, state).view(shape),
        rtol=torch.finfo(dtype).eps,
        atol=1e-7,
    )
    again = nf4.NF4.from_safetensors(expected)
    assert (again.shape, again.dtype, again.block_size) == (q.shape, q.dtype, q.block_size)
    assert_same(dequantize_nf4(again), dequantize_nf4(q))


@pytest.mark.packages
def test_nf4_scales_are_those_of_bitsandbytes():
    """Blocks have other sizes, zeros and subnormal numbers. The scales in 8 bits fill more than one
    block of 256, and a shorter one; those of the last tensor are all of one size.
    """
    bnb = oracle("bitsandbytes.functional")
    x = randn(3, 5000)
    x.view(-1)[:4096] = 0
    x.view(-1)[5000:9000] *= 1e-42  # subnormal numbers
    for block in (32, 128, 4096):
        packed, state = bnb.quantize_4bit(x, blocksize=block, quant_type="nf4")
        q = quantize_nf4(x, block_size=block)
        assert_same_bytes(q.data, packed.view(-1))
        assert_same_bytes(q.absmax, state.absmax)
    growing = randn(300, 64) * torch.arange(1, 301, device=DEVICE)[:, None]
    for x in (randn(600, 64), growing, torch.ones(10, 64, device=DEVICE)):
        _, state = bnb.quantize_4bit(x, quant_type="nf4", compress_statistics=True)
        q = quantize_nf4(x, double_quant=True)
        assert_same_bytes(q.absmax, state.absmax)
        assert_same_bytes(q.nested_absmax, state.state2.absmax)
        assert_same_bytes(q.offset, state.offset)


STATE = "w.quant_state.bitsandbytes__nf4"


def nf4_state(**changes):
    def change(tensors):
        state = {**json.loads(bytes(tensors[STATE].tolist())), **changes}
        text = json.dumps({k: v for k, v in state.items() if v is not ...})
        return {STATE: torch.tensor(list(text.encode()), dtype=torch.uint8)}

    return change


def first(name, value):
    """Replaces the first element of a tensor."""

    def change(tensors):
        t = tensors[name].clone()
        t.view(-1)[0] = value
        return {name: t}

    return change


def cast(name, dtype):
    return lambda tensors: {name: tensors[name].to(dtype)}


def shorter(name):
    return lambda tensors: {name: tensors[name][..., 1:]}


def instead(name, tensor):
    return lambda tensors: {name: tensor}


TOTAL = "w_global_scale"
POSITIVE = f"^{TOTAL} must be a finite number > 0, got "


BROKEN = {
    "nf4": [
        (lambda t: {"w.absmax": None}, r"w\.absmax is missing"),
        (lambda t: {"w.quant_map": t["w.quant_map"] * 2}, "must be bitsandbytes' own table"),
        (nf4_state(quant_type="fp4"), "w must be NF4, got 'fp4'"),
        *((nf4_state(**{n: ...}), f"has no {n}") for n in ("dtype", "quant_type", "shape")),
        (nf4_state(blocksize=...), "has no blocksize"),
        (nf4_state(dtype="int8"), "dtype must be one of .*float32.*, got 'int8'"),
        (nf4_state(dtype=7), "dtype must be one of .*, got 7"),
        (nf4_state(shape=[4.0, 64]), r"shape must be a list of integers of at least 0, got \[4.0"),
        (nf4_state(shape=[-4, 64]), r"shape must be a list of .*, got \[-4, 64\]"),
        (nf4_state(shape=256), "shape must be a list of .*, got 256"),
        (nf4_state(shape=[8, 64]), r"^w must have shape \[256\]"),
        (nf4_state(blocksize=64.0), r"blocksize must be one of \[32, 64, .*, got 64\.0"),
        (nf4_state(blocksize=0), "blocksize must be one of .*, got 0"),
        (instead(STATE, torch.tensor([123], dtype=torch.uint8)), f"^{STATE} must be JSON in bytes"),
        (instead(STATE, torch.tensor([91, 93], dtype=torch.uint8)), "must be a JSON object"),
        (instead(STATE, torch.ones(3)), f"^{STATE} must be a uint8 tensor"),
        (shorter("w.absmax"), r"^w\.absmax must have shape \[4\].*, got \[3\]"),
        (first("w.absmax", math.nan), r"^w\.absmax must be finite"),
        (cast("w.absmax", torch.float16), r"^w\.absmax must be a float32 tensor, got float16"),
        (lambda t: {"w": t["w"][1:]}, r"^w must have shape \[128\].*, got \[127\]"),
    ],
    "nf4 double": [
        (nf4_state(nested_offset=math.nan), "nested_offset must be a finite number, got nan"),
        (nf4_state(nested_offset="0"), "nested_offset must be a finite number, got '0'"),
        (nf4_state(nested_blocksize=...), "has no nested_blocksize"),
        (first("w.nested_absmax", math.inf), r"^w\.nested_absmax must be finite"),
        (instead("w.nested_absmax", torch.ones(2)), r"^w\.nested_absmax must have shape \[1\]"),
    ],
    "nvfp4": [
        (lambda t: {"w_packed": None}, "w_packed is missing"),
        *((first(TOTAL, value), f"{POSITIVE}{value}") for value in (0, math.nan, math.inf)),
        (first(TOTAL, 1e-40), f"^{TOTAL} must be .*e-41, whose inverse is infinite"),
        (instead(TOTAL, torch.ones(3)), rf"^{TOTAL} must be one number, got shape \[3\]"),
        (cast(TOTAL, torch.int32), f"^{TOTAL} must be a floating-point tensor, got int32"),
        (first("w_scale", math.nan), "^w_scale must be finite"),
        (shorter("w_scale"), r"^w_scale must have shape \[4, 4\].*, got \[4, 3\]"),
        (cast("w_scale", torch.float32), "^w_scale must be a float8_e4m3fn tensor, got float32"),
        (cast("w_packed", torch.float32), "^w_packed must be a uint8 tensor, got float32"),
    ],
    "nvfp4 modelopt": [
        (first("w_scale_2", -1.0), r"^w_scale_2 must be a finite number > 0, got -1"),
        (instead("w_scale_2", torch.ones(2)), r"^w_scale_2 must be one number, got shape \[2\]"),
    ],
    "block_fp8": [
        (first("w_scale_inv", math.inf), "^w_scale_inv must be finite"),
        (instead("w_scale_inv", torch.ones(2, 2)), r"^w_scale_inv must have shape \[1, 1\]"),
        (cast("w_scale_inv", torch.int64), "^w_scale_inv must be a floating-point tensor"),
        (cast("w", torch.bfloat16), "^w must be a float8_e4m3fn tensor, got bfloat16"),
    ],
}


@pytest.mark.parametrize(
    "kind, change, message", [(kind, *row) for kind, rows in BROKEN.items() for row in rows]
)
def test_a_checkpoint_that_does_not_fit_together_is_refused_in_one_sentence(kind, change, message):
    format, _, option = kind.partition(" ")
    up = {"nf4": quantize_nf4, "nvfp4": quantize_nvfp4, "block_fp8": quantize_block_fp8}[format]
    q = up(randn(4, 64), **({"double_quant": True} if option == "double" else {}))
    tensors = q.to_safetensors("w", **({"layout": option} if option == "modelopt" else {}))
    assert_same(type(q).from_safetensors(tensors, "w").tensors()[0], q.tensors()[0])
    changed = {n: t for n, t in {**tensors, **change(tensors)}.items() if t is not None}
    with pytest.raises((KeyError, TypeError, ValueError), match=message) as caught:
        type(q).from_safetensors(changed, "w")
    assert "\n" not in str(caught.value)


# ---- torchao, compressed-tensors


@pytest.mark.packages
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_nvfp4_is_what_torchao_writes_and_reads(dtype):
    ao = oracle("torchao.prototype.mx_formats.nvfp4_tensor")
    x = randn(64, 256, dtype=dtype)
    x[:, :64] *= 0.05
    q = quantize_nvfp4(x)
    assert q.global_scale == x.float().abs().max() / 2688
    scale, data = ao.nvfp4_quantize(x, 16, q.global_scale)
    assert_same_bytes(q.scale, scale)
    assert_same_bytes(q.data, data)
    expected = ao.NVFP4Tensor(data, scale, 16, dtype, q.global_scale).dequantize()
    assert_same_bytes(dequantize_nvfp4(q), expected)


@pytest.mark.packages
def test_nvfp4_differs_from_torchao_as_documented():
    ao = oracle("torchao.prototype.mx_formats.nvfp4_tensor")

    def theirs(x):
        total = ao.per_tensor_amax_to_scale(x.abs().amax())
        scale, data = ao.nvfp4_quantize(x, 16, total)
        return data.view(-1), scale.view(torch.uint8).view(-1), total

    def ours(x):
        q = quantize_nvfp4(x)
        return q.data.view(-1), q.scale.view(torch.uint8).view(-1), q.global_scale

    x = randn(4, 64)
    x[1, 16:32] = 0
    (data, scale, total), (their_data, their_scale, their_total) = ours(x), theirs(x)
    assert torch.equal(data, their_data) and total == their_total
    assert (
        (scale != their_scale).nonzero().tolist() == [[5]] and scale[5] == 0 and their_scale[5] == 8
    )
    zeros = torch.zeros(2, 32, device=DEVICE)
    (data, scale, total), (_, their_scale, their_total) = ours(zeros), theirs(zeros)
    assert total == 1 and not data.any() and not scale.any()
    assert their_total == 0 and their_scale.view(torch.float8_e4m3fn).float().isnan().all()
    for most, equal in ((6e-31, True), (5e-31, False)):
        x = torch.zeros(1, 16, device=DEVICE)
        x[0, 0] = most
        assert (ours(x)[2] == theirs(x)[2]) == equal


@pytest.mark.packages
def test_nf4_differs_from_bitsandbytes_as_documented():
    bnb = oracle("bitsandbytes.functional")
    cases = (200, 0.0, False), (200, 1e-40, False), (256, 0.0, True), (200, 1e-30, True)
    for length, value, equal in cases:
        x = torch.full((length,), value, device=DEVICE)
        data, state = bnb.quantize_4bit(x, blocksize=64, compress_statistics=True, quant_type="nf4")
        q = quantize_nf4(x, double_quant=True)
        assert_same_bytes(q.data, data.view(-1))
        assert_same_bytes(q.nested_absmax, state.state2.absmax)
        assert q.offset == state.offset
        assert torch.equal(q.absmax, state.absmax) == equal, (length, value)


@pytest.mark.packages
def test_nvfp4_checkpoints_are_those_of_compressed_tensors():
    """Its own packing and reading. Its tensor scale is an inverse, so products round differently:
    codes may differ where x is at a tie, to float32's precision.
    """
    helpers = oracle("compressed_tensors.compressors.nvfp4.helpers")
    gparam = oracle("compressed_tensors.quantization.utils.helpers").generate_gparam
    x = randn(32, 128)
    q = quantize_nvfp4(x, implementation="eager")
    tensors = q.to_safetensors("layer.weight")
    assert set(tensors) == {
        "layer.weight_packed",
        "layer.weight_scale",
        "layer.weight_global_scale",
    }
    total = tensors["layer.weight_global_scale"]
    expected = gparam(x.min(), x.max())
    assert total.shape == expected.shape
    torch.testing.assert_close(total, expected, rtol=3e-7, atol=0)
    values = helpers.unpack_fp4_from_uint8(tensors["layer.weight_packed"].cpu(), 32, 128).float()
    assert_same_bytes(helpers.pack_fp4_to_uint8(values), tensors["layer.weight_packed"].cpu())
    scale = tensors["layer.weight_scale"].float().cpu().repeat_interleave(16, 1) / total.cpu()
    torch.testing.assert_close(dequantize_nvfp4(q).cpu(), values * scale, rtol=1e-6, atol=0)
    exact = (x.cpu().double() / scale.double()).clamp(-6, 6)
    grid = torch.tensor(nvfp4.VALUES, dtype=torch.float64)
    nearest = (exact.abs()[..., None] - grid).abs().amin(-1)
    assert ((exact - values).abs() <= nearest + 1e-5).all()


def test_nvfp4_layouts_come_back():
    x = randn(3, 5, 33, dtype=torch.bfloat16)
    q = quantize_nvfp4(x)
    modelopt = q.to_safetensors("w", "modelopt")
    assert set(modelopt) == {"w", "w_scale", "w_scale_2"}
    assert_same(nvfp4.NVFP4.from_safetensors(modelopt, "w", shape=x.shape), q)
    again = nvfp4.NVFP4.from_safetensors(q.to_safetensors("w"), "w", shape=x.shape)
    values = (dequantize_nvfp4(t, dtype=torch.float32) for t in (again, q))
    torch.testing.assert_close(*values, rtol=3e-7, atol=0)
    with pytest.raises(
        ValueError, match=r"one of \['compressed-tensors', 'modelopt'\], got 'gguf'"
    ):
        q.to_safetensors("w", "gguf")


# ---- transformers


@pytest.mark.packages
@EVERY_DTYPE
def test_block_fp8_is_what_transformers_writes(dtype):
    module = oracle("transformers.integrations.finegrained_fp8")
    config = types.SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    x = randn(256, 384, dtype=dtype)
    x[:128, :128] = 0
    x[128:, :128] *= 1e-6
    found = quantize_block_fp8(x).to_safetensors("a.weight")
    expected = module.Fp8Quantize(types.SimpleNamespace(quantization_config=config)).convert(
        {"a.weight": x}
    )
    assert found.keys() == expected.keys()
    assert_same_bytes(found["a.weight"], expected["a.weight"])
    # It inverts 448 / m; tilewright divides m by 448.
    torch.testing.assert_close(
        found["a.weight_scale_inv"], expected["a.weight_scale_inv"], rtol=3e-7, atol=0
    )
    again = block_fp8.BlockFP8.from_safetensors(expected, "a.weight", dtype=dtype)
    torch.testing.assert_close(
        dequantize_block_fp8(again), dequantize_block_fp8(quantize_block_fp8(x))
    )


def test_block_fp8_of_activations_by_hand():
    x = randn(5, 300)
    q = quantize_block_fp8(x, block=(1, 128))
    for r in range(5):
        for b in range(3):
            part = x[r, 128 * b : 128 * (b + 1)]
            most = part.abs().max()
            assert q.scale_inv[r, b] == most / 448
            assert_same_bytes(
                q.data[r, 128 * b : 128 * (b + 1)],
                (part * (1 / most * 448)).to(torch.float8_e4m3fn),
            )


# ---- torchao, compressed-tensors


@pytest.mark.packages
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_mxfp8_is_what_torchao_writes_and_reads(dtype):
    module = oracle("torchao.prototype.mx_formats.mx_tensor")
    x = randn(64, 256, dtype=dtype)
    x[:4] *= 1e-30
    x[4:8] *= 1e30
    x[8, :32] = 448 * 2.0**-5  # the largest value of its scale, and its neighbors
    x[9, :32] = 450 * 2.0**-5
    x[10, :64] = 0
    q = quantize_mxfp8(x)
    scale, data = module.to_mx(x, torch.float8_e4m3fn, 32, module.ScaleCalculationMode.RCEIL)
    assert_same_bytes(q.data, data)
    assert_same_bytes(q.scale, scale)
    assert q.scale[8, 0].float() == 2.0**-5 and q.scale[9, 0].float() == 2.0**-4
    assert_same_bytes(
        dequantize_mxfp8(q), module.to_dtype(data, scale, torch.float8_e4m3fn, 32, dtype)
    )


@pytest.mark.packages
def test_mxfp8_has_the_keys_of_compressed_tensors():
    compressor = oracle("compressed_tensors.compressors.mxfp8.base").MXFP8QuantizationCompressor
    scheme = oracle("compressed_tensors.quantization").preset_name_to_scheme("MXFP8", ["Linear"])
    q = quantize_mxfp8(randn(4, 96, dtype=torch.bfloat16))
    found = q.to_safetensors("weight")
    assert {n: t.dtype for n, t in found.items()} == {
        "weight": torch.float8_e4m3fn,
        "weight_scale": torch.uint8,
    }
    there = compressor.decompress({n: t.cpu() for n, t in found.items()}, scheme)
    assert torch.equal(there["weight"].float(), dequantize_mxfp8(q).float().cpu())
    for tensors in (found, {**found, "weight_scale": q.scale}):
        again = mxfp8.MXFP8.from_safetensors(tensors)
        assert again.dtype == q.dtype
        assert_same(again, q)
    with pytest.raises(KeyError, match="w_scale is missing"):
        mxfp8.MXFP8.from_safetensors({"w": q.data}, "w")
    broken = found["weight_scale"].clone()
    broken[2, 1] = 255
    with pytest.raises(ValueError, match="weight_scale must be finite"):
        mxfp8.MXFP8.from_safetensors({**found, "weight_scale": broken})
    with pytest.raises(ValueError, match="weight_scale must have shape"):
        mxfp8.MXFP8.from_safetensors({**found, "weight_scale": broken[:, 1:]})


@pytest.mark.parametrize("name", ["triton", "cpp", "eager"])
def test_mxfp8_scales_are_the_least_that_saturate_nothing(name, poisoned):
    """Every exponent, with the largest value for a scale, and the next one above; also subnormal
    numbers.
    """
    skip_unless_usable(mxfp8.QUANTIZE_MXFP8, name, torch.float32)
    exponents = torch.arange(-149, 120, device=DEVICE, dtype=torch.float64)
    if name == "triton" and DEVICE == "cpu":  # the interpreter is slow
        exponents = exponents[(exponents % 16 == 0) | ((exponents + 127).abs() < 4)]
    for factor, byte in ((448.0, 127), (448 + 2.0**-15, 128), (256.0, 127), (224 + 2.0**-16, 127)):
        most = factor * 2.0**exponents
        x = torch.zeros(len(most), 40, device=DEVICE)
        x[:, 3] = -most.float()
        x[:, 35] = 2.0  # in the short block
        q = quantize_mxfp8(x, implementation=name)
        expected = (exponents + byte).clamp_min(0)
        fits = exponents >= -127  # below, the scale is the smallest one
        assert torch.equal(raw(q.scale[:, 0]).double()[fits], expected[fits])
        assert (raw(q.scale[:, 0])[exponents < -128] == 0).all()
        assert (raw(q.scale[:, 1]) == 127 - 7).all()
        values = dequantize_mxfp8(q, implementation=name)
        assert ((values[:, 3].double() + most).abs()[fits] <= most[fits] / 16).all()
        assert (values[:, 35] == 2).all()
    assert not raw(
        quantize_mxfp8(torch.zeros(2, 40, device=DEVICE), implementation=name).scale
    ).any()


@pytest.mark.parametrize("name", ["triton", "cpp", "eager"])
def test_mxfp8_values_of_every_code_and_scale(name):
    """Exact in float32, including subnormal results and the extreme scales."""
    skip_unless_usable(mxfp8.DEQUANTIZE_MXFP8, name, torch.float32)
    data = torch.arange(256, dtype=torch.uint8).repeat(32, 1).view(torch.float8_e4m3fn).to(DEVICE)
    scale = torch.arange(256, dtype=torch.uint8).view(32, 8).view(torch.float8_e8m0fnu).to(DEVICE)
    found = dequantize_mxfp8(mxfp8.MXFP8(data, scale, torch.float32), implementation=name)
    expected = data.double() * scale.double().repeat_interleave(32, 1)
    assert torch.equal(found.isnan(), expected.isnan()) and expected.isnan().sum() == 2 * 32 + 31
    assert torch.equal(found.nan_to_num(7.0), expected.float().nan_to_num(7.0))


# ---- rounding


def test_e4m3_is_rounded_as_torch_rounds_it():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].sort().values
    ties = (every[1:] + every[:-1]) / 2
    v = torch.cat(
        [
            every,
            ties,
            ties.nextafter(torch.tensor(9e9)),
            ties.nextafter(torch.tensor(-9e9)),
            torch.tensor([1e-30, -1e-30, 1e-42, 500.0, -1e30]),
            randn(1000).cpu() * 100,
        ]
    )
    expected = v.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(quantize.to_e4m3(v), expected)


def test_e2m1_is_rounded_to_the_nearest_and_ties_to_even():
    v = torch.tensor(
        [0.0, 0.25, 0.26, 0.5, 0.75, 1.25, 1.75, 1.76, 2.5, 2.51, 3.5, 5.0, 5.01, 6.0, 9.0]
    )
    codes = torch.tensor([0, 0, 1, 1, 2, 2, 4, 4, 4, 5, 6, 6, 7, 7, 7], dtype=torch.uint8)
    assert torch.equal(quantize.to_e2m1(v), codes)
    assert torch.equal(quantize.to_e2m1(-v), codes | 8)


@pytest.mark.parametrize("options", [{}, {"noise": aqn.SOME}], ids=["plain", "noise"])
@pytest.mark.parametrize("double", [False, True])
def test_nf4_values_from_shared_memory_are_those_from_global_memory(double, options):
    """The bits of both ways to look values up: all codes, and a shorter last block."""
    skip_unless_usable(nf4.DEQUANTIZE_NF4, "triton", torch.float32)
    from tilewright.kernels.quant.quantize_triton import NF4_DEQUANTIZE

    q = quantize_nf4(randn(5, 1000), double_quant=double)
    q.data.view(-1)[:256] = torch.arange(256, dtype=torch.uint8, device=q.data.device)
    usual = dequantize_nf4(q, implementation="triton", **options)
    with NF4_DEQUANTIZE.override(q.data.device, (64,), {"GATHER": True}):
        gathered = dequantize_nf4(q, implementation="triton", **options)
    assert torch.equal(gathered.view(torch.int32), usual.view(torch.int32))


def test_codes_are_converted_by_gpus_that_can(monkeypatch):
    """The results are tested in test_triton_ptx.py."""
    pytest.importorskip("triton")
    from tilewright.kernels.quant import quantize_triton

    has = quantize_triton.conversions.__wrapped__
    for capability, expected in {(8, 0): 0, (8, 9): 1, (9, 0): 1, (10, 0): 2, (12, 1): 2}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert has(torch.device("cuda", 0)) == expected
    assert has(torch.device("cpu")) == 0


def test_nvfp4_codes_make_up_for_the_rounding_of_the_scale():
    """The block's scale rounds from 1.0625 to 1: codes of x / 1.0625 would be different."""
    x = torch.zeros(1, 32, device=DEVICE)
    x[0, 0], x[0, 16], x[0, 17] = 2688.0, 6 * 1.0625, 2.6  # 2.6 / 1.0625 is nearer to 2
    q = quantize_nvfp4(x)
    assert q.scale.float().tolist() == [[448.0, 1.0]]
    assert dequantize_nvfp4(q)[0, :18].tolist() == [2688.0, *[0.0] * 15, 6.0, 3.0]


@pytest.mark.parametrize("format", ["nvfp4", "block_fp8", "mxfp8"])
@pytest.mark.parametrize("value", [0.1, 0.9, 2.3, 5.3])
def test_random_rounding_has_the_right_mean(format, value):
    """Up with probability p in n draws: within 5 standard deviations of the mean."""
    n = 40000
    x = torch.full((1, n), value, device=DEVICE)
    x[:, ::16] = 6.0  # the same scale for every block, 448 times 6 / 2688
    up, down = both(format, seed=11)
    found = down(up(x))[x != 6]
    assert_same_bytes(found, down(up(x))[x != 6])
    low, high = found.min().double(), found.max().double()
    assert low < value < high and set(found.tolist()) == {float(low), float(high)}
    deviation = (high - low) / 2 / math.sqrt(found.numel())
    assert abs(found.double().mean() - value) < 5 * deviation
    other = both(format, seed=12)[0](x)
    assert not torch.equal(raw(other.data), raw(up(x).data))


@pytest.mark.parametrize(
    "format, largest", [("nvfp4", 6.0), ("block_fp8", 448.0), ("mxfp8", 448.0)]
)
def test_random_rounding_leaves_what_needs_none(format, largest):
    x = torch.tensor([[largest, -largest, 3, 1.5, -0.5, 0, 2, 4] * 4], device=DEVICE)
    up, down = both(format, seed=3)
    assert torch.equal(down(up(x)), x)


# ---- sizes, zeros, extremes


@EVERY_FORMAT
@pytest.mark.parametrize("shape", [(17,), (2, 3, 21)], ids=str)
def test_a_short_last_block_is_one_with_zeros(format, shape):
    up, down = both(format)
    x = randn(*shape)
    y = down(up(x))
    assert y.shape == x.shape
    if format != "nf4":  # whose blocks span rows
        longer = torch.nn.functional.pad(x, (0, 11))
        assert torch.equal(down(up(longer))[..., : shape[-1]], y)


@EVERY_FORMAT
def test_zeros_stay_zeros_and_keep_their_sign(format):
    up, down = both(format)
    x = torch.zeros(2, 64, device=DEVICE)
    assert_same_bytes(down(up(x)), x)
    if format != "nf4":  # its code has only one zero
        assert_same_bytes(down(up(-x)), -x)
    x[0, 0] = 1.0
    assert torch.equal(down(up(x)), x)


@EVERY_FORMAT
@pytest.mark.parametrize("power", [-149, -140, -126, -110, 100, 127])
def test_powers_of_two_at_the_ends_of_float32(format, power):
    x = torch.full((1, 64), math.ldexp(1.0, power), device=DEVICE)
    up, down = both(format)
    found = down(up(x))
    assert found.isfinite().all()
    # Below, a floor on the scale makes them smaller.
    if power >= -100 or (format == "nf4" and power >= -126):
        torch.testing.assert_close(found, x, rtol=1e-6, atol=0)
    else:
        assert (found.abs() <= x * 1.5).all()


def test_nvfp4_block_scales_are_subnormal_before_they_are_nothing():
    """A block far below the tensor's largest magnitude keeps the precision of the
    smallest scale.
    """
    x = torch.zeros(1, 48, device=DEVICE)
    x[0, 0] = 2688.0  # the tensor's scale is 1
    x[0, 16] = 6 * 3 * 2.0**-9
    x[0, 32] = 2.0**-9  # its scale would round to 0
    for name in nvfp4.QUANTIZE_NVFP4.usable(DEVICE, torch.float32):
        q = quantize_nvfp4(x, implementation=name)
        assert q.scale.view(torch.uint8).tolist() == [[0x7E, 3, 1]]
        assert torch.equal(dequantize_nvfp4(q, implementation=name), x)


@EVERY_FORMAT
@pytest.mark.parametrize("at, bad", [(0, math.nan), (37, math.inf), (79, -math.inf)])
def test_what_is_not_finite_is_refused_by_name(format, at, bad):
    if DEVICE == "cuda":
        pytest.skip("on CUDA nothing looks")
    up, _ = both(format)
    x = randn(1, 80)
    x[0, at] = bad
    for name in FORMATS[format][0].usable(DEVICE, torch.float32):
        with pytest.raises(ValueError, match="x must be finite"):
            up(x, implementation=name)


def test_nvfp4_square_blocks_have_the_transposes_values():
    x = randn(2, 40, 56)
    q = quantize_nvfp4(x, square=True)
    t = quantize_nvfp4(x.mT, square=True)
    assert torch.equal(dequantize_nvfp4(q).mT, dequantize_nvfp4(t))
    assert q.scale.shape == (2, 40, 4)
    assert torch.equal(q.scale[:, 0].view(torch.uint8), q.scale[:, 15].view(torch.uint8))
    assert not torch.equal(q.scale[:, 0].view(torch.uint8), q.scale[:, 16].view(torch.uint8))


def test_nvfp4_shares_a_scale_that_is_given():
    x = randn(4, 32)
    total = torch.tensor(0.01, device=DEVICE)
    q = quantize_nvfp4(x, global_scale=total)
    assert q.global_scale == total
    whole = quantize_nvfp4(torch.cat([x, randn(4, 32, seed=1)]), global_scale=total)
    assert torch.equal(whole.data[:4], q.data)


# ---- as pytrees and in compiled code


@EVERY_FORMAT
def test_a_quantized_tensor_is_a_pytree(format):
    up, down = both(format, **({"double_quant": True} if format == "nf4" else {}))
    q = up(randn(6, 64))
    leaves, spec = pytree.tree_flatten(q)
    assert list(map(id, leaves)) == list(map(id, q.tensors()))
    again = pytree.tree_map(torch.clone, q)
    assert type(again) is type(q) and again.shape == q.shape
    assert spec == pytree.tree_structure(again)
    assert_same(down(again), down(q))
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.data = None


@pytest.mark.skipif(DEVICE != "cpu", reason="values are checked on a CPU")
@EVERY_FORMAT
@pytest.mark.parametrize("name", ["triton", "cpp", "eager"])
def test_compiled_code_checks_that_x_is_finite(format, name):
    skip_unless_usable(FORMATS[format][0], name, torch.float32)
    up, _ = both(format, implementation=name)
    torch._dynamo.reset()
    compiled = torch.compile(up, fullgraph=True, backend="aot_eager")
    x = randn(5, 70)
    compiled(x)
    x[3, 8] = math.nan
    with pytest.raises(ValueError, match=r"^x must be finite \(in float32\)"):
        compiled(x)


@pytest.mark.parametrize("hadamard", [0, 16])
@pytest.mark.parametrize("given", [None, 0.3])
@pytest.mark.parametrize(
    "change", ["", "empty", "zeros", "-zeros", "nan", "-nan", "inf", "tiny", "first", "last"]
)
def test_kernels_find_the_scale_of_a_tensor(change, given, hadamard, monkeypatch):
    """In the bits of the definition, where programs take several steps."""
    skip_unless_usable(FORMATS["nvfp4"][0], "triton", torch.float32)
    from tilewright.kernels.fused_quantize import fused_quantize_triton as fused
    from tilewright.ops.quant import nvfp4

    monkeypatch.setattr(fused, "PARTS", 2)
    monkeypatch.setattr(fused, "TOTAL", {**fused.TOTAL, "BLOCK": 2})
    x = randn(2, 48 if change != "empty" else 0, 80)
    flat = x.view(-1)
    if change in ("zeros", "-zeros"):
        flat.zero_()
        flat[7] = float(change[:-5] + "0.0")
    elif change in ("nan", "-nan", "inf"):
        flat[-5] = float(change)
    elif change == "tiny":
        flat *= 1e-36
    elif change:
        flat[0 if change == "first" else -1 :][:1] = -77.0
    apart = torch.cat((x.mT, x.mT), 2)[:, :, : x.shape[1]].mT  # columns are contiguous, no more
    given = None if given is None else torch.tensor(given, device=DEVICE)
    for t in (x, x.mT.contiguous().mT, apart):
        t = fused.readable(t, False)
        found = fused.nvfp4_scale(t, given, hadamard, 5 if hadamard else None)
        most = nvfp4.largest_eager(t, hadamard, 5) if hadamard else nvfp4._largest(t)
        for f, e in zip(found, (most, nvfp4.scale_eager(most, given)), strict=True):
            torch.testing.assert_close(f, e, rtol=1e-6 if hadamard else 0, atol=0, equal_nan=True)


# ---- refusals


@EVERY_FORMAT
def test_arguments_that_do_not_fit_are_refused_by_name(format):
    up, down = both(format)
    q = up(randn(4, 64))
    for changes, message in (
        ({"dtype": torch.int8}, r"q\.dtype must be one of \[torch.float32, .*, got torch.int8"),
        ({"data": q.data[:1]}, r"q\.\w+ must have shape"),
        ({"data": q.data.float()}, r"q\.data must be a \w+ tensor"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            down(dataclasses.replace(q, **changes))


@pytest.mark.parametrize(
    "up, rows, options, message",
    [
        (quantize_nvfp4, 4, {"seed": 2**63}, r"seed must be an int in \[0, 2\*\*63\) or None"),
        (quantize_nvfp4, None, {"square": True}, "x must have at least 2 dimensions"),
        (quantize_nvfp4, 4, {"global_scale": torch.ones(1)}, r"global_scale must have shape \[\]"),
        (quantize_mxfp8, None, {"transpose": True}, "x must have at least 2 dimensions"),
        (quantize_block_fp8, None, {}, "x must have at least 2 dimensions"),
        (quantize_block_fp8, 4, {"block": 128}, "block must be two positive ints .* got 128"),
        (quantize_block_fp8, 4, {"block": (129, 128)}, r"block must be .* got \(129, 128\)"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(up, rows, options, message):
    x = torch.ones(64) if rows is None else torch.ones(rows, 64)
    with pytest.raises(ValueError, match=message):
        up(x, **options)
