"""quantized_linear and fp8_linear beyond the numerics contract (tests/ops/test_contract.py): saved
tensors, chosen kernels, noise, rejected arguments.
"""

import dataclasses
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import DEVICE, operators_of, skip_unless_usable, threads

from tilewright.bench import contract
from tilewright.core import platform
from tilewright.ops import (
    dequantize_block_fp8,
    fp8_linear,
    quantize_block_fp8,
    quantize_mxfp8,
    quantize_nf4,
    quantize_nvfp4,
    quantized_linear,
)
from tilewright.ops.quant.aqn import AQN
from tilewright.ops.quant.fp8_linear import FP8_LINEAR
from tilewright.ops.quant.quantized_linear import QUANTIZED_LINEAR, dequantize
from tilewright.ops.quant.weights import pack
from tilewright.selection import use

MODULE = sys.modules["tilewright.ops.quant.quantized_linear"]
NAMES = [i.name for i in QUANTIZED_LINEAR.implementations]
FUSED = [n for n in NAMES if n != "eager"]
FORMATS = {
    "nf4": quantize_nf4,
    "nf4 nested": lambda w: quantize_nf4(w, double_quant=True),
    "nvfp4": quantize_nvfp4,
    "block_fp8": quantize_block_fp8,
}
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS)
EVERY_NAME = pytest.mark.parametrize("name", NAMES)
EVERY_FUSED = pytest.mark.parametrize("name", FUSED)
T, N, K = 5, 24, 64
OTHER = torch.float8_e5m2


def randn(*shape, dtype=torch.float32, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * scale).to(DEVICE, dtype)


def inputs(format, dtype=torch.float32, T=T, N=N, K=K):
    """x, q and bias; x and bias require gradients."""
    return (
        randn(T, K, dtype=dtype).requires_grad_(),
        FORMATS[format](randn(N, K, seed=1, scale=K**-0.5)),
        randn(N, dtype=dtype, seed=2).requires_grad_(),
    )


def storages(*tensors):
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def close(found, expected):
    """In 16 bits equal on a CPU; on a GPU, whose products are added in another order, but for a
    rounding.
    """
    assert found.dtype == expected.dtype
    eps = torch.finfo(found.dtype).eps
    near = 1e-5 if eps < 1e-5 else 0.0 if DEVICE == "cpu" else eps
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


# ---- definition


@EVERY_FORMAT
def test_the_definition_is_what_a_reader_would_write(format):
    x, q, bias = (t.detach().double() if isinstance(t, torch.Tensor) else t for t in inputs(format))
    w = dequantize(q, dtype=torch.float64, implementation="eager")
    expected = torch.stack(
        [torch.stack([(x[t] * w[n]).sum() + bias[n] for n in range(N)]) for t in range(T)]
    )
    torch.testing.assert_close(quantized_linear(x, q, bias, implementation="eager"), expected)


@EVERY_FORMAT
@EVERY_FUSED
def test_nothing_is_kept_but_the_codes_and_scales(format, name):
    """No copy of them, no dequantized weight, and not x."""
    dtype = torch.float32
    skip_unless_usable(QUANTIZED_LINEAR, name, dtype)
    x, q, bias = inputs(format, dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = quantized_linear(x, q, bias, implementation=name)
    assert storages(*kept) == storages(*q.tensors())
    assert sum(t.nbytes for t in kept) == q.nbytes
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    close(dx, dequantize(q, dtype=dtype).sum(0).expand(T, K))


def test_eager_keeps_autograds_own_copy():
    """The definition is plain PyTorch; also checks that the count above sees a saved weight."""
    x, q, bias = inputs("nf4")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        quantized_linear(x, q, bias, implementation="eager")
    assert sum(t.nbytes for t in kept) >= 4 * N * K


# ---- kernels for a product


@pytest.mark.skipif(DEVICE != "cpu", reason="C++ is for the CPU")
@pytest.mark.parametrize("format", ["nf4", "nvfp4", "block_fp8", "mxfp8"])
def test_a_name_fixes_what_dequantizes_whatever_is_pinned(format):
    skip_unless_usable(QUANTIZED_LINEAR, "cpp", torch.float32)
    x = torch.randn(128, K, requires_grad=True)  # more rows than the fused kernels take
    quantize = {"nf4": quantize_nf4, "nvfp4": quantize_nvfp4, "block_fp8": quantize_block_fp8}
    q = quantize.get(format, quantize_mxfp8)(torch.randn(N, K))
    with use("eager"):
        y = quantized_linear(x, q, implementation="cpp")
        ran = operators_of(lambda: y.backward(quantized_linear(x, q, implementation="cpp")))
    kind = format.removeprefix("block_").removeprefix("mx")
    assert {n: count for n, count in ran.items() if n != "nf4_map"} == {
        "quantized_linear_cpp_forward": 1,
        "quantized_linear_cpp_backward": 1,
        f"{kind}_cpp_dequantize": 2,
    }


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU no weight is dequantized in parts")
@pytest.mark.parametrize(
    "quantize, N, K",
    [
        (quantize_nf4, 300, 64),
        (FORMATS["nf4 nested"], 300, 512),
        (FORMATS["nf4 nested"], 1030, 96),  # 512 rows have 768 scales, three whole blocks
        (quantize_nvfp4, 300, 80),
        (quantize_block_fp8, 300, 200),
        (lambda w: quantize_block_fp8(w, block=(16, 16)), 300, 200),
        (quantize_mxfp8, 300, 96),
    ],
    ids=["nf4", "nf4-nested", "nf4-nested-ragged", "nvfp4", "fp8", "fp8-16", "mxfp8"],
)
def test_a_large_weight_is_multiplied_in_parts(quantize, N, K, monkeypatch):
    """In the backward their products are added; noise is a function of the whole weight."""
    skip_unless_usable(QUANTIZED_LINEAR, "cpp", torch.float32)
    q = quantize(randn(N, K, seed=1, scale=K**-0.5))
    x, bias = randn(70, K).requires_grad_(), randn(N, seed=2)
    dy = randn(70, N, seed=3)

    def run(noise=None):
        y = quantized_linear(x, q, bias, noise=noise, implementation="cpp")
        return y, *torch.autograd.grad(y, x, dy)

    def dequantized(noise=None):
        ran = operators_of(lambda: run(noise))
        return sum(count for name, count in ran.items() if name.endswith("cpp_dequantize"))

    whole, noise = run(), AQN(0.1, seed=5)
    assert dequantized() == 2
    monkeypatch.setattr(MODULE, "_PART_BYTES", 4 * 128 * K)
    for found, expected in zip(run(), whole, strict=True):
        close(found, expected)
    assert dequantized() == 2 * 3 and dequantized(noise) == 2
    monkeypatch.setattr(MODULE, "_PART_ROWS", 69)
    assert dequantized() == 2


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU no weight is dequantized in parts")
def test_parts_do_not_hide_scales_that_do_not_fit(monkeypatch):
    skip_unless_usable(QUANTIZED_LINEAR, "cpp", torch.float32)
    monkeypatch.setattr(MODULE, "_PART_BYTES", 4 * 128 * 64)
    for q, name in (
        (quantize_block_fp8(randn(300, 64)), "scale_inv"),
        (quantize_mxfp8(randn(300, 64)), "scale"),
        (quantize_nvfp4(randn(300, 64)), "scale"),
        (quantize_nf4(randn(300, 64)), "absmax"),
    ):
        scales = getattr(q, name)
        longer = torch.cat([scales, scales])
        bad = dataclasses.replace(q, **{name: longer})
        said = rf"q\.{name} must .*{re.escape(str(list(longer.shape)))}"
        with pytest.raises(ValueError, match=said):
            quantized_linear(randn(70, 64), bad, implementation="cpp")


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("K", [16 * 65, 2 * 1024 + 64])  # in pieces of 1,024, the last one short
def test_cpp_few_rows_are_as_many(format, dtype, K, monkeypatch):
    skip_unless_usable(QUANTIZED_LINEAR, "cpp", dtype)
    if K % 64 and "nf4" in format:
        K = 64 * 17
    for T, N in ((1, 1), (2, 6), (3, 13), (4, 5), (9, 20)):
        x, q, bias = inputs(format, dtype, T, N, K)
        with monkeypatch.context() as patch:
            patch.setattr(MODULE, "dense", None)  # the weight is never dequantized
            few = quantized_linear(x, q, bias, implementation="cpp")
        with monkeypatch.context() as patch:
            patch.setattr(MODULE, "_CPP_ROWS", {dtype: 0})
            many = quantized_linear(x, q, bias, implementation="cpp")
        close(few, many)
        # With very few elements eager's own error, the reference, may be zero.
        assert T * N < 100 or not broken("cpp", x, q, bias, dtype)


def broken(name, x, q, bias, dtype):
    return contract.compare(QUANTIZED_LINEAR, name, {"x": x, "q": q, "bias": bias}, dtype)


@pytest.mark.parametrize(
    "format, T, K, few",
    [
        ("nf4", 1, 64, True),
        ("nf4", 64, 64, True),
        ("nf4", 65, 64, False),
        ("nf4", 3, 96, False),
        ("nvfp4", 3, 80, True),
        ("nvfp4", 3, 72, False),
        ("block_fp8", 3, 33, True),
        ("block_fp8", 65, 64, False),
    ],
)
def test_which_way_triton_takes(format, T, K, few):
    pytest.importorskip("triton")
    from tilewright.kernels.quant import quantized_linear_triton as k

    x = torch.empty(T, K, dtype=torch.bfloat16)
    span = {"nf4": 64, "nvfp4": 16, "block_fp8": 128}[format]
    format = k.FORMATS[format]
    assert (k.constants(x, format, 24, span) is not None) == few
    # narrower than one read
    assert format != k.BLOCK_FP8 or k.constants(x, format, 24, 16) is None


@EVERY_FORMAT
def test_triton_is_right_with_any_constants(format):
    """Split sums, tiles wider and narrower than a scale, none fused."""
    skip_unless_usable(QUANTIZED_LINEAR, "triton", torch.float32)
    from tilewright.kernels.quant import quantized_linear_triton as k

    x, q, bias = inputs(format, torch.float32, 18, 20, 192)
    key = (k.FORMATS[format.split()[0]], 20, 192, 4, 32)
    # Whether it is fused, BLOCK_N, BLOCK_K and SPLIT.
    tried = (True, 16, 64, 1), (True, 32, 128, 2), (True, 64, 32, 4), (False, 16, 64, 1)
    for constants in tried:
        config = dict(zip(k._NAMES, (*constants, True, 4, 2), strict=True))
        with k.FEW_ROWS.override(x.device, key, config):
            assert not broken("triton", x, q, bias, torch.float32), config


@EVERY_FORMAT
@pytest.mark.parametrize("T", [1, 70])  # 70: two tiles of rows
def test_whoever_adds_the_pieces_adds_them_in_the_same_order(format, T, monkeypatch):
    """In one launch, whose counters are zero again, or in two, where there are none."""
    skip_unless_usable(QUANTIZED_LINEAR, "triton", torch.float32)
    from tilewright.kernels import arrivals
    from tilewright.kernels.quant import quantized_linear_triton as k

    x, q, bias = inputs(format, T=T, K=448)
    key = (k.FORMATS[format.split()[0]], N, 448, 4, 128 if T == 70 else 1)
    config = dict(zip(k._NAMES, (True, 16, 64, 4, True, 4, 2), strict=True))
    found, names, launch = [], [], k.launch

    def counted(kernel, *arguments, **constants):
        names.append(kernel.fn.__name__)
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(k, "launch", counted)
    for last in (True, False, True):
        with k.FEW_ROWS.override(x.device, key, {**config, "LAST": last}):
            found.append(quantized_linear(x, q, bias, implementation="triton"))
    assert names == ["_few_rows", "_few_rows", "_sum_pieces", "_few_rows"]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert not arrivals._devices[x.device].runs.any()


def test_launches_that_may_run_together_have_counters_of_their_own(monkeypatch):
    pytest.importorskip("triton")
    from tilewright.kernels import arrivals

    state = SimpleNamespace(capturing=True, cuda_stream=1)
    monkeypatch.setattr(arrivals, "_devices", {})
    monkeypatch.setattr(arrivals, "RUNS", 5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state)
    like = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))

    def taken(capturing, stream=1):
        state.capturing, state.cuda_stream = capturing, stream
        found = arrivals.counters(like, 3)
        return None if found is None else (found.shape, found.any().item(), found.data_ptr())

    assert taken(True) is None  # nothing may be filled now
    one, two = taken(False, 1), taken(False, 2)
    assert one[:2] == two[:2] == ((3,), False)
    assert one[2] != two[2] and taken(False, 1) == one and taken(False, 2) == two
    assert len({one, two, *(taken(True, 1) for _ in range(3))}) == 5
    assert taken(True) is None and taken(False, 3) is None and taken(False, 2) == two
    assert arrivals.counters(like, arrivals.RUN + 1) is None


@EVERY_NAME
def test_a_format_that_no_kernel_takes_whole(name):
    """Blocks of NF4 that span rows, an odd number of columns, other blocks."""
    skip_unless_usable(QUANTIZED_LINEAR, name, torch.float32)
    for q in (
        quantize_nf4(randn(N, 40, scale=0.1)),
        quantize_nf4(randn(N, 33)),
        quantize_nvfp4(randn(N, 33)),
        quantize_block_fp8(randn(N, 40), block=(3, 5)),
        quantize_nf4(randn(N, 96), block_size=32),
        quantize_nf4(randn(N, 256), block_size=256),
    ):
        x = randn(3, q.shape[1], seed=3)
        close(quantized_linear(x, q, implementation=name), x @ dequantize(q).t())


@EVERY_FUSED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes_and_strides_change_nothing(name, dtype):
    skip_unless_usable(QUANTIZED_LINEAR, name, dtype)
    x, q, bias = inputs("nvfp4", dtype, T=6)
    x, bias = x.detach(), bias.detach()
    expected = quantized_linear(x, q, bias, implementation=name)
    wide = torch.zeros(6, 2 * K, dtype=dtype, device=DEVICE)
    wide[:, ::2] = x
    data, scale = (t.t().contiguous().t() for t in (q.data, q.scale))
    turned = dataclasses.replace(q, data=data, scale=scale)
    for given in ((wide[:, ::2], q), (x.t().contiguous().t(), q), (x, turned)):
        assert torch.equal(quantized_linear(*given, bias, implementation=name), expected)
    parts = quantized_linear(x.view(2, 1, 3, K), q, bias, implementation=name)
    assert torch.equal(parts.view(6, N), expected)
    # One row: PyTorch's matrix-vector products may sum in another order.
    close(quantized_linear(x[0], q, bias, implementation=name), expected[0])
    assert quantized_linear(x[:0].view(0, 3, K), q, implementation=name).shape == (0, 3, N)


@pytest.mark.parametrize("name", ["triton", "cpp"])
@pytest.mark.parametrize("T", [7, 90])
def test_the_same_twice_and_on_any_number_of_threads(name, T):
    skip_unless_usable(QUANTIZED_LINEAR, name, torch.float32)
    x, q, bias = inputs("nf4", T=T)
    results = []
    for n in (2, 2, 1):
        with threads(n):
            y = quantized_linear(x, q, bias, implementation=name)
            results.append((y, *torch.autograd.grad(y, (x, bias), torch.ones_like(y))))
    assert all(
        torch.equal(a, b)
        for other in results[1 : 2 if T > 64 else 3]
        for a, b in zip(results[0], other, strict=True)
    )


# ---- noise


@EVERY_FORMAT
@EVERY_NAME
def test_noise_is_that_of_the_dequantized_weight_in_both_passes(format, name):
    skip_unless_usable(QUANTIZED_LINEAR, name, torch.float32)
    x, q, bias = inputs(format)
    noise = AQN(2.0, 7, step=3, layer=2)
    w = dequantize(q, noise=noise, dtype=torch.float32)
    dy = randn(T, N, seed=5)
    y = quantized_linear(x, q, bias, noise=noise, implementation=name)
    dx, db = torch.autograd.grad(y, (x, bias), dy)
    close(y, x @ w.t() + bias)
    close(dx, dy @ w)
    close(db, dy.sum(0))
    plain = quantized_linear(x, q, bias, implementation=name)
    assert (plain - y).abs().max() > 1e-3
    other = quantized_linear(
        x, q, bias, noise=dataclasses.replace(noise, step=4), implementation=name
    )
    assert not torch.equal(other, y)
    assert torch.equal(quantized_linear(x, q, bias, noise=AQN(0.0, 7), implementation=name), plain)


# ---- gradients, compilers


@EVERY_FUSED
def test_it_is_linear_so_that_higher_derivatives_are_right(name):
    skip_unless_usable(QUANTIZED_LINEAR, name, torch.float32)

    def third(name):
        x, q, bias = inputs("block_fp8")
        y = quantized_linear(x, q, bias, implementation=name)
        first = torch.autograd.grad(y.pow(3).sum(), (x, bias), create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), (x, bias))

    for found, expected in zip(third(name), third("eager"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["eager", "cpp"])
def test_compiled_with_noise_whose_step_changes(name):
    skip_unless_usable(QUANTIZED_LINEAR, name, torch.float32)
    torch._dynamo.reset()
    x, q, bias = inputs("nvfp4")

    def layer(x, bias, q, step):
        return quantized_linear(
            x * 2, q, bias, noise=AQN(0.5, 1, step=step), implementation=name
        ).relu()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for step in (0, 1, 5):
        found, expected = compiled(x, bias, q, step), layer(x, bias, q, step)
        assert torch.equal(found, expected)
        grads = (torch.autograd.grad(y.sum(), (x, bias)) for y in (found, expected))
        assert all(map(torch.equal, *grads))
    torch._dynamo.reset()


# ---- FP8 by FP8


@pytest.mark.parametrize("name", ["eager", "triton"])
def test_fp8_rounds_x_as_quantising_it_does(name):
    """So it differs from quantized_linear by a few percent; every 128 columns have their
    own scale.
    """
    skip_unless_usable(FP8_LINEAR, name, torch.float32)
    x = randn(9, 300)
    x[:, :128] *= 1e-3
    x[:, 256:] *= 1e3
    w = randn(150, 300, seed=1)
    w[:, :128] *= 1e3
    w[128:] *= 20
    w[:, 256:] *= 1e-3
    q, bias = quantize_block_fp8(w), randn(150, seed=2)
    rounded = dequantize_block_fp8(quantize_block_fp8(x, block=(1, 128)))
    found = fp8_linear(x, q, bias, implementation=name)
    exact = (
        rounded.double() @ dequantize(q, dtype=torch.float64, implementation="eager").t()
        + bias.double()
    )
    assert contract.error(found, exact)[0] < 1e-5
    beside = contract.error(found, quantized_linear(x, q, bias, implementation="eager"))[0]
    assert 1e-3 < beside < 0.3


@pytest.mark.parametrize("name", ["eager", "triton"])
def test_fp8_has_the_gradient_of_the_unrounded_product(name):
    skip_unless_usable(FP8_LINEAR, name, torch.float32)
    x, q, bias = inputs("block_fp8")
    dy = randn(T, N, seed=3)
    found = torch.autograd.grad(fp8_linear(x, q, bias, implementation=name), (x, bias), dy)
    expected = torch.autograd.grad(quantized_linear(x, q, bias, implementation=name), (x, bias), dy)
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-6, atol=1e-6)


def test_fp8_keeps_only_the_codes_and_passes_opcheck_with_gradients():
    skip_unless_usable(FP8_LINEAR, "triton", torch.float32)
    x, q, bias = inputs("block_fp8")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fp8_linear(x, q, bias, implementation="triton")
    assert storages(*kept) == storages(*q.tensors())
    torch.library.opcheck(
        torch.ops.tilewright.fp8_linear_triton_forward.default,
        (x, bias, *pack(q)),
    )


@EVERY_FUSED
@pytest.mark.parametrize("rows, K", [(3, 80), (70, 64), (3, 33)])
def test_mxfp8_is_read_as_the_others(name, rows, K, monkeypatch):
    """For few rows C++ does not dequantize the weight."""
    skip_unless_usable(QUANTIZED_LINEAR, name, torch.float32)
    x, q, bias = (
        randn(rows, K).requires_grad_(),
        quantize_mxfp8(randn(24, K, seed=1)),
        randn(24, seed=2),
    )
    w = dequantize(q)
    kept = []
    with (
        monkeypatch.context() as patch,
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        if name == "cpp" and rows < 64 and K % 16 == 0:
            patch.setattr(MODULE, "dense", None)
        y = quantized_linear(x, q, bias, implementation=name)
    assert storages(*kept) == storages(*q.tensors())
    close(y, x @ w.t() + bias)
    close(torch.autograd.grad(y.sum(), x)[0], w.sum(0).expand(rows, K))


# ---- refusals


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": quantize_nf4(torch.ones(2, 3, 64))}, r"q must have shape \[N, K\], got \[2, 3, 64"),
        ({"q": torch.ones(24, 64)}, "q must be an NF4, NVFP4, BlockFP8 or MXFP8, got Tensor"),
        ({"x": torch.ones(5, 63)}, r"x must have shape \[\.\.\., K\], where K = 64, got \[5, 63"),
        ({"bias": torch.ones(23)}, r"bias must have shape \[N\], where N = 24, got \[23\]"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"x": torch.ones(5, 64), "q": quantize_nf4(torch.ones(24, 64))}
    with pytest.raises((TypeError, ValueError), match=message):
        quantized_linear(**{**arguments, **change})


@EVERY_NAME
@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize(
    "quantize, part, change, message",
    [
        (quantize_nf4, "data", lambda t: t[1:], "have shape"),
        (quantize_nf4, "absmax", lambda t: t.half(), "be a float32 tensor, got float16"),
        (FORMATS["nf4 nested"], "nested_absmax", lambda t: t[1:], "have shape"),
        (quantize_nvfp4, "scale", lambda t: t[1:], "have shape"),
        (quantize_nvfp4, "scale", lambda t: t.view(OTHER), "be a float8_e4m3fn tensor"),
        (quantize_nvfp4, "global_scale", lambda t: t[None], "have shape"),
        (quantize_block_fp8, "scale_inv", lambda t: t.double(), "be a float32 .* got float64"),
        (quantize_block_fp8, "data", lambda t: t.view(OTHER), "be a float8_e4m3fn tensor"),
        (quantize_mxfp8, "scale", lambda t: t[1:], "have shape"),
        (quantize_mxfp8, "scale", lambda t: t.view(torch.uint8), "be a float8_e8m0fnu tensor"),
        (quantize_mxfp8, "data", lambda t: t.view(OTHER), "be a float8_e4m3fn"),
    ],
)
def test_a_quantized_tensor_that_does_not_fit_together_is_named(
    name, rows, quantize, part, change, message
):
    skip_unless_usable(QUANTIZED_LINEAR, name, torch.float32)
    q = quantize(randn(N, K))
    bad = dataclasses.replace(q, **{part: change(getattr(q, part))})
    with pytest.raises((TypeError, ValueError), match=rf"q\.{part} must {message}"):
        quantized_linear(randn(rows, K), bad, implementation=name)


def test_fp8_needs_a_gpu_that_multiplies_it(monkeypatch):
    why = FP8_LINEAR.implementation("triton").why_not
    monkeypatch.setattr(platform, "no_triton", lambda device_type: None)
    monkeypatch.setattr(platform, "no_cuda", lambda capability=0: f"below {capability}")
    assert (why("cuda"), why("cpu")) == ("below 90", None)


def test_fp8_refuses_other_formats_and_blocks():
    x = torch.ones(3, 64)
    with pytest.raises(TypeError, match="q must be a BlockFP8, got NF4"):
        fp8_linear(x, quantize_nf4(torch.ones(24, 64)))
    with pytest.raises(ValueError, match=re.escape("q.block must be (128, 128), got (64, 64)")):
        fp8_linear(x, quantize_block_fp8(torch.ones(24, 64), block=(64, 64)))
