"""Tests specific to rmsnorm and add_rmsnorm, and what all norms have; parity with the eager twin is
in test_contract.py.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from helpers import DEVICE, skip_unless_usable, threads

from tilewright.core import platform
from tilewright.ops import OPS, add_rmsnorm, rmsnorm
from tilewright.ops.norm.layernorm import ADD_LAYERNORM
from tilewright.ops.norm.rmsnorm import ADD_RMSNORM, RMSNORM

F32 = torch.float32
NORMS = ("rmsnorm", "add_rmsnorm", "layernorm", "rmsnorm_gated")


def test_equals_torch_in_float64():
    x, w = torch.randn(3, 5, 33, dtype=torch.float64), torch.randn(33, dtype=torch.float64)
    expected = torch.nn.functional.rms_norm(x, (33,), w, 1e-5)
    torch.testing.assert_close(
        rmsnorm(x, w, 1e-5, implementation="eager"), expected, rtol=1e-14, atol=1e-14
    )


@pytest.mark.packages
@pytest.mark.parametrize(
    "family, options", [("Llama", {}), ("Gemma", {"offset": 1.0, "cast": "gemma"})]
)
def test_casts_equal_transformers_bit_for_bit(family, options):
    models = pytest.importorskip("transformers.models")
    module = getattr(getattr(models, family.lower()), f"modeling_{family.lower()}")
    norm = getattr(module, f"{family}RMSNorm")(64, eps=1e-5).to(torch.bfloat16)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(7, 64, dtype=torch.bfloat16)
    assert torch.equal(rmsnorm(x, norm.weight, 1e-5, **options, implementation="eager"), norm(x))


@pytest.mark.parametrize("name", RMSNORM.names())
def test_per_head_weight_is_a_norm_per_head(name):
    if reason := RMSNORM.implementation(name).why_not(DEVICE, torch.float32):
        pytest.skip(reason)
    x = torch.randn(2, 3, 4, 16, device=DEVICE)
    w = torch.randn(4, 16, device=DEVICE)
    y = rmsnorm(x, w, implementation=name)
    for h in range(4):
        torch.testing.assert_close(y[:, :, h], rmsnorm(x[:, :, h], w[h], implementation="eager"))


def inputs_of(op, rows, width, dtype=torch.float32, parameters=torch.float32):
    """Rows, then the weight and, for those that take one, the bias."""
    g = torch.Generator().manual_seed(1)
    number = 1 if op.name in ("rmsnorm", "layernorm") else 2
    drawn = [torch.randn(rows, width, generator=g).to(DEVICE, dtype) for _ in range(number)]
    weight = torch.linspace(0.5, 1.5, width, device=DEVICE).to(parameters)
    drawn += [weight] if op.name == "rmsnorm_gated" else [weight, weight.clone()]
    return [t.requires_grad_() for t in drawn]


def step(op, name, inputs):
    """The first result, and gradients of all inputs."""
    *given, last = inputs
    if op.name == "rmsnorm_gated":
        given, options = [*given, last], {}
    else:
        options = {"bias": last}
    found = op.public(*given, **options, implementation=name)
    y = found if isinstance(found, torch.Tensor) else found[0]
    return [y, *torch.autograd.grad(y.square().sum(), inputs)]


@pytest.mark.parametrize("op", ["rmsnorm", "layernorm", "rmsnorm_gated"])
def test_cpp_gives_the_same_bits_on_any_number_of_threads(op):
    skip_unless_usable(OPS[op], "cpp", torch.bfloat16)
    inputs = inputs_of(OPS[op], 999, 300, torch.bfloat16)
    results = []
    for n in (1, 2, 3):
        with threads(n):
            results.append(step(OPS[op], "cpp", inputs))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("op", [ADD_RMSNORM, ADD_LAYERNORM], ids=lambda op: op.name)
def test_only_the_sum_is_used(op):
    """The gradient of the residual stream alone must not need the normalized output."""
    for name in op.usable(DEVICE, torch.float32):
        x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
        r = torch.randn(4, 8, device=DEVICE, requires_grad=True)
        w = torch.ones(8, device=DEVICE, requires_grad=True)
        op.public(x, r, w, implementation=name)[1].sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x)) and torch.equal(r.grad, x.grad), name


@pytest.mark.parametrize(
    "op, name",
    [(op, name) for op in NORMS for name in ("auto", *OPS[op].names())],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weight_and_bias_of_any_float_dtype(op, name, dtype):
    """Gradients have the parameter's dtype. Triton's interpreter cannot round to bfloat16."""
    op = OPS[op]
    if name != "auto":
        skip_unless_usable(op, name, torch.float32)
    if name == "triton" and DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates on a cast to bfloat16")
    inputs = inputs_of(op, 6, 40, parameters=dtype)
    found, expected = step(op, name, inputs), step(op, "eager", inputs)
    assert [t.dtype for t in found[1:]] == [t.dtype for t in inputs] and found[0].dtype == F32
    atol = 1e-5 if op.name == "rmsnorm_gated" else 1e-4
    for f, e in zip(found, expected, strict=True):
        rtol = 1e-2 if f.dtype == dtype != torch.float64 else atol / 10  # one rounding
        torch.testing.assert_close(f, e, rtol=rtol, atol=atol)


# ---- the C++ operators, below the public functions' checks

X, W = torch.randn(4, 8), torch.randn(8)
R = torch.ones(4)
OPTIONS = {"eps": 1e-6, "offset": 0.0, "round_xhat": True}
FORWARD = {"x": X, "residual": X, "weight": W, "bias": None, **OPTIONS}
BACKWARD = {"dy": X, "dtotal": None, "x": X, "rstd": R, "weight": W, **OPTIONS, "has_bias": True}
OF_FORWARD = (
    ({"x": X.t(), "residual": None}, "x must be a contiguous CPU tensor"),
    ({"x": torch.tensor(1.0)}, "x must have at least one dimension"),
    ({"x": X.double(), "residual": None}, "float32 and bfloat16"),
    ({"weight": W[:2]}, r"weight must be \[D\]"),
    ({"weight": torch.ones(3, 8)}, r"weight must be \[D\], or \[H, D\]"),
    ({"weight": torch.ones(1, 4, 8)}, r"weight must be \[D\]"),
    ({"weight": torch.ones(16)[::2]}, "weight must be a contiguous"),
    ({"weight": W.half()}, "float32 and bfloat16"),
    ({"bias": W[:2]}, r"bias must be \[D\]"),
    ({"bias": torch.ones(1).expand(8)}, "bias must be a contiguous"),
    ({"bias": W.bfloat16()}, "bias must have weight's dtype"),
    ({"residual": X[:1]}, "residual must have x's shape"),
    ({"residual": X.bfloat16()}, "residual must be float32 or"),
    ({"residual": X.double()}, "residual must be float32 or"),
)
OF_BACKWARD = (
    ({"dy": X[:1]}, "dy must have x's shape"),
    ({"dy": torch.ones(8, 4).t()}, "dy must be a contiguous"),
    ({"x": X.bfloat16()}, "x must be float32 or"),
    ({"dtotal": X[:1]}, "dtotal must have x's shape"),
    ({"dtotal": X.bfloat16()}, "dtotal must have x's dtype"),
    ({"rstd": R[:2]}, "rstd must be float32 with one element"),
    ({"rstd": R.double()}, "rstd must be float32"),
    ({"weight": W[:2]}, r"weight must be \[D\]"),
)


@pytest.mark.parametrize(
    "op, right, wrongs",
    [("rmsnorm_cpp", FORWARD, OF_FORWARD), ("rmsnorm_cpp_backward", BACKWARD, OF_BACKWARD)],
)
def test_cpp_operators_themselves_check_every_tensor(op, right, wrongs):
    skip_unless_usable(RMSNORM, "cpp", torch.float32)
    RMSNORM.resolve("cpp", "cpu")
    call = getattr(torch.ops.tilewright, op)
    call(**right)
    for wrong, message in wrongs:
        with pytest.raises(RuntimeError, match=message):
            call(**{**right, **wrong})


# ---- bad input


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((X, W[:5]), {}, r"ValueError: weight .* or \[H, D\], where D = 8, H = 4, got \[5\]"),
        ((X.view(1, 4, 8), torch.ones(3, 8)), {}, r"weight .*, where D = 8, H = 4, got \[3, 8\]"),
        ((X, W), {"bias": torch.randn(7)}, r"ValueError: bias .* \[D\], where D = 8, got \[7\]"),
        (
            (X, W),
            {"bias": W.double()},
            "TypeError: bias must be weight's dtype float32, got float64",
        ),
        (
            (torch.empty(1, 65537), torch.empty(65537)),
            {},
            r"x .* 1 <= D <= 65536, got \[1, 65537\]",
        ),
        ((torch.empty(3, 0), torch.empty(0)), {}, r"x .* with 1 <= D <= 65536, got \[3, 0\]"),
        ((X, W), {"implementation": []}, r"TypeError: .*implementation .*\['auto', .*, got \[\]"),
        ((X, W), {"implementation": "tritn"}, r"'tritn'; have \['auto', 'triton'"),
        ((X, X[:2], W), {}, r"residual .*, where x = \[4, 8\], got \[2, 8\]"),
        ((X, X.half(), W), {}, "TypeError: residual must be x's dtype float32 or float32, got flo"),
    ],
)
def test_bad_input_is_one_clear_error(arguments, options, message):
    op = rmsnorm if len(arguments) == 2 else add_rmsnorm
    with pytest.raises((ValueError, TypeError)) as caught:
        op(*arguments, **options)
    assert re.search(message, f"{caught.typename}: {caught.value}")


def test_backward_programs_are_as_many_as_the_device_holds(monkeypatch):
    """Per head, so that all heads together make one wave; compiled once to find out, and
    not again.
    """
    if reason := platform.no_triton(DEVICE):
        pytest.skip(reason)
    from tilewright.kernels.norm import rmsnorm_triton as kernel

    h100 = SimpleNamespace(
        multi_processor_count=132,
        regs_per_multiprocessor=65536,
        shared_memory_per_multiprocessor=228 * 1024,
        max_threads_per_multi_processor=2048,
    )
    # Limited by registers, by shared memory, by threads; at least one block; a quarter of an SM has
    # registers for 3 warps.
    cases = ((104, 49192, 8), (32, 98376, 4), (16, 0, 16), (255, 0, 16), (0, 0, 1), (136, 0, 5))
    assert [kernel.resident(*n, h100) for n in cases] == [2, 2, 4, 1, 64, 2]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h100)
    monkeypatch.setattr(kernel, "_resident", {})
    asked = []

    def warmup(*arguments, **options):
        asked.append(options)
        return SimpleNamespace(run=None, n_regs=104, metadata=SimpleNamespace(shared=49192))

    x = SimpleNamespace(is_cuda=True, device="cuda:0")
    kernels = type("Kernel", (), {"warmup": staticmethod(warmup)})
    for T, block, heads, programs in (
        (16384, 1, 1, 264),
        (100, 1, 1, 100),
        (16384, 8, 32, 8),
        (16384, 8, 1000, 1),
    ):
        assert kernel.sharing(kernels, T, block, heads, 8, x, (), D=4096) == programs
    assert asked == [{"D": 4096, "num_warps": 8, "grid": (1,), "enable_fp_fusion": True}]


@pytest.mark.parametrize("rows, columns", [(1, 5), (32, 33), (77, 100)])
def test_the_programs_shares_are_summed_and_cast_in_one_launch(rows, columns):
    if reason := platform.no_triton(DEVICE):
        pytest.skip(reason)
    from tilewright.kernels.norm import rmsnorm_triton as kernel

    partial = torch.randn(rows, columns, device=DEVICE)
    for dtype in (torch.float32, torch.float16):
        found = kernel.summed(partial, torch.empty(columns, dtype=dtype, device=DEVICE))
        close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": rows * torch.finfo(torch.float32).eps}
        torch.testing.assert_close(found, partial.double().sum(0).to(dtype), **close)
        both = torch.stack((partial, partial.flip(0) * 3), 1)
        two = [torch.empty(columns, dtype=dtype, device=DEVICE) for _ in range(2)]
        kernel.summed(both, *two)
        for t, part in zip(two, both.double().sum(0), strict=True):
            torch.testing.assert_close(t, part.to(dtype), **close)
