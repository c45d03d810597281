"""Tests specific to rmsnorm and add_rmsnorm; parity with the eager twin is in test_contract.py."""

from types import SimpleNamespace

import pytest
import torch
from helpers import DEVICE, skip_unless_usable, threads

from tilewright.core import platform
from tilewright.ops import add_rmsnorm, rmsnorm
from tilewright.ops.norm.rmsnorm import ADD_RMSNORM, RMSNORM


def test_equals_torch_in_float64():
    x, w = torch.randn(3, 5, 33, dtype=torch.float64), torch.randn(33, dtype=torch.float64)
    expected = torch.nn.functional.rms_norm(x, (33,), w, 1e-5)
    torch.testing.assert_close(
        rmsnorm(x, w, 1e-5, implementation="eager"), expected, rtol=1e-14, atol=1e-14
    )


@pytest.mark.packages
def test_llama_cast_equals_transformers_bit_for_bit():
    norm = (
        pytest.importorskip("transformers.models.llama.modeling_llama")
        .LlamaRMSNorm(64, eps=1e-5)
        .to(torch.bfloat16)
    )
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(7, 64, dtype=torch.bfloat16)
    assert torch.equal(rmsnorm(x, norm.weight, 1e-5, implementation="eager"), norm(x))


@pytest.mark.packages
def test_gemma_cast_equals_transformers_bit_for_bit():
    norm = (
        pytest.importorskip("transformers.models.gemma.modeling_gemma")
        .GemmaRMSNorm(64, eps=1e-6)
        .to(torch.bfloat16)
    )
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(7, 64, dtype=torch.bfloat16)
    assert torch.equal(
        rmsnorm(x, norm.weight, offset=1.0, cast="gemma", implementation="eager"), norm(x)
    )


@pytest.mark.parametrize("name", RMSNORM.names())
def test_per_head_weight_is_a_norm_per_head(name):
    if reason := RMSNORM.implementation(name).why_not(DEVICE, torch.float32):
        pytest.skip(reason)
    x = torch.randn(2, 3, 4, 16, device=DEVICE)
    w = torch.randn(4, 16, device=DEVICE)
    y = rmsnorm(x, w, implementation=name)
    for h in range(4):
        torch.testing.assert_close(y[:, :, h], rmsnorm(x[:, :, h], w[h], implementation="eager"))


def test_cpp_gives_the_same_bits_on_any_number_of_threads():
    if reason := platform.no_cpp("cpu"):
        pytest.skip(reason)
    x = torch.randn(999, 300, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(300, requires_grad=True)
    results = []
    for n in (1, 2, 3):
        with threads(n):
            y = rmsnorm(x, w, implementation="cpp")
            results.append((y, *torch.autograd.grad(y.sum(), (x, w))))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_only_the_sum_is_used():
    """The gradient of the residual stream alone must not need the normalized output."""
    for name in ADD_RMSNORM.usable(DEVICE, torch.float32):
        x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
        r = torch.randn(4, 8, device=DEVICE, requires_grad=True)
        w = torch.ones(8, device=DEVICE, requires_grad=True)
        add_rmsnorm(x, r, w, implementation=name)[1].sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x)) and torch.equal(r.grad, x.grad), name


@pytest.mark.parametrize("name", ["auto", *RMSNORM.names()])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weight_and_bias_of_any_float_dtype(name, dtype):
    """Gradients have the parameter's dtype. Triton's interpreter cannot round to bfloat16."""
    if name != "auto":
        skip_unless_usable(RMSNORM, name, torch.float32)
    if name == "triton" and DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates on a cast to bfloat16")

    def step(call, name):
        x, r = (
            torch.randn(6, 40, generator=torch.Generator().manual_seed(i))
            .to(DEVICE)
            .requires_grad_()
            for i in (1, 2)
        )
        w, b = (
            torch.linspace(0.5, 1.5, 40, device=DEVICE).to(dtype).requires_grad_() for _ in range(2)
        )
        y = call(x, r, w, b, name)
        return [y, *torch.autograd.grad(y.square().sum(), (x, w, b))]

    def single(x, r, w, b, name):
        return rmsnorm(x, w, bias=b, implementation=name)

    def added(x, r, w, b, name):
        return add_rmsnorm(x, r, w, bias=b, implementation=name)[0]

    for call in (single,) if name == "torch" else (single, added):
        found, expected = step(call, name), step(call, "eager")
        assert [t.dtype for t in found] == [torch.float32, torch.float32, dtype, dtype]
        for f, e in zip(found, expected, strict=True):
            torch.testing.assert_close(
                f, e, rtol=1e-2 if f.dtype == dtype != torch.float64 else 1e-5, atol=1e-4
            )


@pytest.mark.parametrize("name", RMSNORM.names())
def test_an_expanded_bias(name):
    skip_unless_usable(RMSNORM, name, torch.float32)
    x, w, b = (torch.randn(n, device=DEVICE, requires_grad=True) for n in ((4, 8), (8,), (1,)))
    y, expected = (rmsnorm(x, w, bias=b.expand(8), implementation=n) for n in (name, "eager"))
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(*(torch.autograd.grad(t.sum(), b)[0] for t in (y, expected)))


# ---- the C++ operators, below the public functions' checks

X, W = torch.randn(4, 8), torch.randn(8)
R = torch.ones(4)
OPTIONS = {"eps": 1e-6, "offset": 0.0, "round_xhat": True}
FORWARD = {"x": X, "residual": X, "weight": W, "bias": None, **OPTIONS}
BACKWARD = {
    "dy": X,
    "dtotal": None,
    "x": X,
    "rstd": R,
    "weight": W,
    **OPTIONS,
    "has_bias": True,
}


@pytest.mark.parametrize(
    "op, right, wrong, message",
    [
        (
            "rmsnorm_cpp",
            FORWARD,
            {"x": X.t(), "residual": None},
            "x must be a contiguous CPU tensor",
        ),
        (
            "rmsnorm_cpp",
            FORWARD,
            {"x": torch.tensor(1.0)},
            "x must have at least one dimension",
        ),
        ("rmsnorm_cpp", FORWARD, {"x": X.double(), "residual": None}, "float32 and bfloat16"),
        ("rmsnorm_cpp", FORWARD, {"weight": W[:2]}, r"weight must be \[D\]"),
        (
            "rmsnorm_cpp",
            FORWARD,
            {"weight": torch.ones(3, 8)},
            r"weight must be \[D\], or \[H, D\]",
        ),
        ("rmsnorm_cpp", FORWARD, {"weight": torch.ones(1, 4, 8)}, r"weight must be \[D\]"),
        (
            "rmsnorm_cpp",
            FORWARD,
            {"weight": torch.ones(16)[::2]},
            "weight must be a contiguous",
        ),
        ("rmsnorm_cpp", FORWARD, {"weight": W.half()}, "float32 and bfloat16"),
        ("rmsnorm_cpp", FORWARD, {"bias": W[:2]}, r"bias must be \[D\]"),
        (
            "rmsnorm_cpp",
            FORWARD,
            {"bias": torch.ones(1).expand(8)},
            "bias must be a contiguous",
        ),
        ("rmsnorm_cpp", FORWARD, {"bias": W.bfloat16()}, "bias must have weight's dtype"),
        ("rmsnorm_cpp", FORWARD, {"residual": X[:1]}, "residual must have x's shape"),
        (
            "rmsnorm_cpp",
            FORWARD,
            {"residual": X.bfloat16()},
            "residual must be float32 or",
        ),
        (
            "rmsnorm_cpp",
            FORWARD,
            {"residual": X.double()},
            "residual must be float32 or",
        ),
        ("rmsnorm_cpp_backward", BACKWARD, {"dy": X[:1]}, "dy must have x's shape"),
        ("rmsnorm_cpp_backward", BACKWARD, {"dy": torch.ones(8, 4).t()}, "dy must be a contiguous"),
        ("rmsnorm_cpp_backward", BACKWARD, {"x": X.bfloat16()}, "x must be float32 or"),
        ("rmsnorm_cpp_backward", BACKWARD, {"dtotal": X[:1]}, "dtotal must have x's shape"),
        ("rmsnorm_cpp_backward", BACKWARD, {"dtotal": X.bfloat16()}, "dtotal must have x's dtype"),
        (
            "rmsnorm_cpp_backward",
            BACKWARD,
            {"rstd": R[:2]},
            "rstd must be float32 with one element",
        ),
        ("rmsnorm_cpp_backward", BACKWARD, {"rstd": R.double()}, "rstd must be float32"),
        ("rmsnorm_cpp_backward", BACKWARD, {"weight": W[:2]}, r"weight must be \[D\]"),
    ],
)
def test_cpp_operators_themselves_check_every_tensor(op, right, wrong, message):
    skip_unless_usable(RMSNORM, "cpp", torch.float32)
    RMSNORM.resolve("cpp", "cpu")
    call = getattr(torch.ops.tilewright, op)
    call(**right)
    with pytest.raises(RuntimeError, match=message):
        call(**{**right, **wrong})


# ---- bad input


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: rmsnorm(X, W[:5]),
            ValueError,
            r"weight must have shape \[D\] or \[H, D\], where D = 8, H = 4, got \[5\]",
        ),
        (
            lambda: rmsnorm(torch.randn(2, 4, 8), torch.randn(3, 8)),
            ValueError,
            r"weight must have shape .*, where D = 8, H = 4, got \[3, 8\]",
        ),
        (
            lambda: rmsnorm(X, W, bias=torch.randn(7)),
            ValueError,
            r"bias must have shape \[D\], where D = 8, got \[7\]",
        ),
        (
            lambda: rmsnorm(X, W, bias=torch.randn(8).double()),
            TypeError,
            "bias must be weight's dtype float32, got float64",
        ),
        (
            lambda: rmsnorm(torch.empty(1, 65537), torch.empty(65537)),
            ValueError,
            r"x must have shape .* with 1 <= D <= 65536, got \[1, 65537\]",
        ),
        (
            lambda: rmsnorm(torch.empty(3, 0), torch.empty(0)),
            ValueError,
            r"x must have shape .* with 1 <= D <= 65536, got \[3, 0\]",
        ),
        (
            lambda: rmsnorm(X, W, implementation=[]),
            TypeError,
            r"implementation must be one of \['auto', .*, got \[\]",
        ),
        (
            lambda: add_rmsnorm(X, X[:2], W),
            ValueError,
            r"residual must have shape \[x\], where x = \[4, 8\], got \[2, 8\]",
        ),
        (
            lambda: add_rmsnorm(X, X.half(), W),
            TypeError,
            "residual must be x's dtype float32 or float32, got float16",
        ),
        (
            lambda: rmsnorm(X, W, implementation="tritn"),
            ValueError,
            r"unknown implementation 'tritn'; have \['auto', 'triton'",
        ),
    ],
)
def test_bad_input_is_one_clear_error(call, error, message):
    with pytest.raises(error, match=message):
        call()


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
    # Limited by registers, by shared memory, by threads; at least one block.
    found = [
        kernel.resident(*n, h100)
        for n in (
            (104, 49192, 8),
            (32, 98376, 4),
            (16, 0, 16),
            (255, 0, 16),
            (0, 0, 1),
            (136, 0, 5),  # a quarter of an SM has registers for 3 warps
        )
    ]
    assert found == [2, 2, 4, 1, 64, 2]
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
