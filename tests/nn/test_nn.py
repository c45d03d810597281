"""Modules of tilewright.nn hold options and weights; otherwise they equal the functions of
tilewright.ops.
"""

import inspect

import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICE

from tilewright import nn, ops

DTYPE = torch.float64


def same(found, expected, *leaves):
    """Bitwise equality of the result and of the gradients of a weighted sum of it."""
    assert torch.equal(found, expected)
    if leaves:
        g = torch.randn_like(found)
        for a, b in zip(
            torch.autograd.grad(found, leaves, g),
            torch.autograd.grad(expected, leaves, g),
            strict=True,
        ):
            assert torch.equal(a, b)


def draw(*shape, dtype=DTYPE):
    return torch.randn(*shape, device=DEVICE, dtype=dtype, requires_grad=True)


# ---- RMSNorm


@pytest.mark.parametrize(
    "dim, options",
    [
        (8, {}),
        (8, {"bias": True, "eps": 1e-3}),
        (8, {"offset": 1.0, "cast": "gemma"}),
        ((3, 8), {"cast": "none"}),
    ],
)
def test_rmsnorm_is_its_function(dim, options):
    norm = nn.RMSNorm(dim, device=DEVICE, dtype=DTYPE, **options)
    for p in norm.parameters():
        torch.nn.init.normal_(p)
    x = draw(2, 3, 8)
    expected = ops.rmsnorm(
        x, norm.weight, norm.eps, bias=norm.bias, offset=norm.offset, cast=norm.cast
    )
    same(norm(x), expected, x, *norm.parameters())


def test_rmsnorm_equals_torch_with_its_checkpoint():
    theirs = torch.nn.RMSNorm(8, eps=1e-5, device=DEVICE, dtype=DTYPE)
    torch.nn.init.normal_(theirs.weight)
    ours = nn.RMSNorm(8, 1e-5, device=DEVICE, dtype=DTYPE)
    ours.load_state_dict(theirs.state_dict())
    x = draw(2, 8)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("offset, cast", [(0.0, "llama"), (1.0, "gemma")])
def test_a_new_rmsnorm_scales_by_one(offset, cast):
    norm = nn.RMSNorm(8, 0.0, offset=offset, cast=cast, bias=True, device=DEVICE)
    x = draw(5, 8, dtype=torch.float32)
    torch.testing.assert_close(norm(x).square().mean(-1), torch.ones(5, device=DEVICE))
    with torch.no_grad():
        norm.weight.fill_(3.0)
        norm.bias.fill_(3.0)
    norm.reset_parameters()
    assert (norm.weight + offset == 1).all() and not norm.bias.any()


# ---- SwiGLU


@pytest.mark.parametrize("bias", [False, True])
def test_swiglu_is_llamas_mlp(bias):
    mlp = nn.SwiGLU(6, 10, bias=bias, device=DEVICE, dtype=DTYPE)
    x = draw(2, 3, 6)
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    gate_b, up_b = mlp.gate_up_proj.bias.chunk(2) if bias else (None, None)
    expected = F.linear(
        F.silu(F.linear(x, gate, gate_b)) * F.linear(x, up, up_b),
        mlp.down_proj.weight,
        mlp.down_proj.bias,
    )
    torch.testing.assert_close(mlp(x), expected, rtol=1e-12, atol=1e-12)
    found, expected = (
        torch.autograd.grad(t.sum(), [x, *mlp.parameters()]) for t in (mlp(x), expected)
    )
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-12, atol=1e-12)


def test_swiglu_resets_both_projections():
    mlp = nn.SwiGLU(6, 10, bias=True)
    before = [p.detach().clone() for p in mlp.parameters()]
    mlp.reset_parameters()
    assert all(not torch.equal(p, b) for p, b in zip(mlp.parameters(), before, strict=True))


# ---- losses

EVERYTHING = {
    "ignore_index": 3,
    "label_smoothing": 0.1,
    "z_loss": 0.01,
    "softcap": 5.0,
    "reduction": "none",
    "return_lse": True,
    "return_entropy": True,
    "return_argmax": True,
}


@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum"}, EVERYTHING], ids=["plain", "sum", "everything"]
)
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_are_their_functions(options, weighted):
    x, w, b = draw(4, 6), draw(9, 6), draw(9)
    y = torch.tensor([0, 3, 8, 1], device=DEVICE)
    u = torch.rand(4, device=DEVICE, dtype=DTYPE)
    class_weight = torch.rand(9, device=DEVICE, dtype=DTYPE) if weighted else None
    options = {**options, "class_weight": class_weight}
    given = {"token_weight": u, "num_tokens": 7}
    logits = draw(4, 9)
    pairs = [
        (
            nn.CrossEntropyLoss(**options)(logits, y, **given),
            ops.cross_entropy(logits, y, **options, **given),
            (logits,),
        ),
        (
            nn.LinearCrossEntropyLoss(**options)(x, w, y, b, **given),
            ops.linear_cross_entropy(x, w, y, bias=b, **options, **given),
            (x, w, b),
        ),
    ]
    for found, expected, leaves in pairs:
        if isinstance(expected, torch.Tensor):
            same(found, expected, *leaves)
            continue
        same(found.loss, expected.loss, *leaves)
        for f, e in zip(found[1:], expected[1:], strict=True):
            same(f, e)


def test_linear_loss_passes_on_how_to_sum_and_to_chunk(monkeypatch):
    seen = {}
    monkeypatch.setattr(ops, "linear_cross_entropy", lambda *a, **kw: seen.update(kw))
    nn.LinearCrossEntropyLoss(accumulate="bf16", chunk_size=5, implementation="eager")(1, 2, 3)
    assert (seen["accumulate"], seen["chunk_size"], seen["implementation"]) == ("bf16", 5, "eager")


@pytest.mark.parametrize(
    "module, function, not_options",
    [
        (
            nn.CrossEntropyLoss,
            ops.cross_entropy,
            {"logits", "target", "token_weight", "num_tokens", "inplace"},
        ),
        (
            nn.LinearCrossEntropyLoss,
            ops.linear_cross_entropy,
            {"x", "weight", "target", "bias", "token_weight", "num_tokens"},
        ),
    ],
)
def test_losses_have_the_options_of_their_functions(module, function, not_options):
    """With the same defaults. inplace is excluded: overwriting logits should be explicit at the
    call.
    """

    def options(f):
        return {
            n: p.default for n, p in inspect.signature(f).parameters.items() if n not in not_options
        }

    assert options(module) == options(function)


def test_class_weight_moves_with_its_module_and_is_saved():
    loss = nn.CrossEntropyLoss(class_weight=torch.rand(5))
    assert loss.to(torch.float64).class_weight.dtype == torch.float64
    assert loss.to("meta").class_weight.device.type == "meta"
    assert list(loss.state_dict()) == ["class_weight"] and not list(loss.parameters())


# ---- all of them

NEW = {
    "rmsnorm": lambda: nn.RMSNorm(8),
    "rmsnorm_bias": lambda: nn.RMSNorm((3, 8), offset=1.0, cast="gemma", bias=True),
    "swiglu": lambda: nn.SwiGLU(6, 10),
    "swiglu_bias": lambda: nn.SwiGLU(6, 10, bias=True, implementation="eager"),
    "loss": nn.CrossEntropyLoss,
    "linear_loss": lambda: nn.LinearCrossEntropyLoss(
        softcap=30.0, class_weight=torch.ones(5), chunk_size=64
    ),
}


@pytest.mark.parametrize(
    "name, shapes",
    [
        ("rmsnorm", {"weight": (8,)}),
        ("rmsnorm_bias", {"weight": (3, 8), "bias": (8,)}),
        ("swiglu", {"gate_up_proj.weight": (20, 6), "down_proj.weight": (6, 10)}),
        (
            "swiglu_bias",
            {
                "gate_up_proj.weight": (20, 6),
                "gate_up_proj.bias": (20,),
                "down_proj.weight": (6, 10),
                "down_proj.bias": (6,),
            },
        ),
        ("loss", {}),
        ("linear_loss", {"class_weight": (5,)}),
    ],
)
def test_names_and_shapes_in_a_checkpoint(name, shapes):
    assert {n: tuple(t.shape) for n, t in NEW[name]().state_dict().items()} == shapes


@pytest.mark.parametrize(
    "name, expected",
    [
        ("rmsnorm", "dim=(8,), eps=1e-06, cast='llama', implementation='auto'"),
        (
            "rmsnorm_bias",
            "dim=(3, 8), eps=1e-06, offset=1.0, cast='gemma', bias=True, implementation='auto'",
        ),
        ("swiglu", "hidden=6, inner=10, implementation='auto'"),
        (
            "loss",
            "ignore_index=-100, label_smoothing=0.0, z_loss=0.0, reduction='mean', "
            "implementation='auto'",
        ),
        (
            "linear_loss",
            "ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=30.0, reduction='mean', "
            "accumulate='fp32', chunk_size=64, implementation='auto', class_weight=(5,)",
        ),
    ],
)
def test_what_they_print(name, expected):
    assert NEW[name]().extra_repr() == expected


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: nn.RMSNorm(0), ValueError, r"dim must be D or \(heads, D\), all positive, got 0"),
        (lambda: nn.RMSNorm((2, 3, 4)), ValueError, r"dim must be D or .*got \(2, 3, 4\)"),
        (lambda: nn.RMSNorm(()), ValueError, r"dim must be D or .*got \(\)"),
        (lambda: nn.RMSNorm(2.5), TypeError, r"dim must be an int or a pair of them, got 2\.5"),
        (
            lambda: nn.RMSNorm(8, cast="lama"),
            ValueError,
            r"cast must be one of \['llama', .*got 'lama'",
        ),
        (lambda: nn.RMSNorm(8, eps="1e-6"), TypeError, "eps must be a number, got '1e-6'"),
        (
            lambda: nn.RMSNorm(8, eps=-1.0),
            ValueError,
            r"eps must be a number in \[0, inf\) in float32, got -1\.0",
        ),
        (lambda: nn.RMSNorm(8, offset=None), TypeError, "offset must be a number, got None"),
        (
            lambda: nn.RMSNorm(8, implementation=[]),
            TypeError,
            r"implementation must be one of \['auto', .*, got \[\]",
        ),
        (
            lambda: nn.CrossEntropyLoss(group="x"),
            TypeError,
            "group must be a torch.distributed.ProcessGroup or None, got str",
        ),
        (
            lambda: nn.LinearCrossEntropyLoss(group=1),
            TypeError,
            "group must be a torch.* or None, got int",
        ),
        (lambda: nn.SwiGLU(0, 4), ValueError, "hidden must be an int >= 1, got 0"),
        (lambda: nn.SwiGLU(4, 2.5), ValueError, r"inner must be an int >= 1, got 2\.5"),
        (
            lambda: nn.CrossEntropyLoss(reduction="avg"),
            ValueError,
            "reduction must be one of .*got 'avg'",
        ),
        (
            lambda: nn.CrossEntropyLoss(label_smoothing=2),
            ValueError,
            r"label_smoothing must be a number in \[0, 1\], got 2",
        ),
        (
            lambda: nn.CrossEntropyLoss(z_loss=-1.0),
            ValueError,
            r"z_loss must be a number in \[0, inf\) in float32, got -1\.0",
        ),
        (
            lambda: nn.LinearCrossEntropyLoss(softcap=0.0),
            ValueError,
            r"softcap must be a number in \(0, inf\) in float32 or None, got 0\.0",
        ),
        (
            lambda: nn.LinearCrossEntropyLoss(accumulate="fp8"),
            ValueError,
            "accumulate must be one of .*got 'fp8'",
        ),
        (
            lambda: nn.LinearCrossEntropyLoss(chunk_size=0),
            ValueError,
            r"chunk_size must be an int in \[1, 2\*\*63\) or None, got 0",
        ),
        (
            lambda: nn.RMSNorm(8, implementation="tritn"),
            ValueError,
            "rmsnorm: unknown implementation 'tritn'",
        ),
        (
            lambda: nn.SwiGLU(4, 4, implementation="tritn"),
            ValueError,
            "silu_mul: unknown implementation 'tritn'",
        ),
        (
            lambda: nn.CrossEntropyLoss(implementation="tritn"),
            ValueError,
            "cross_entropy: unknown .*'tritn'",
        ),
        (
            lambda: nn.LinearCrossEntropyLoss(implementation="tritn"),
            ValueError,
            "linear_cross_entropy: unknown .*'tritn'",
        ),
        (
            lambda: nn.CrossEntropyLoss(class_weight=[1.0]),
            TypeError,
            "class_weight must be a torch.Tensor or None, got list",
        ),
    ],
)
def test_a_bad_argument_is_refused_when_the_module_is_made(make, error, message):
    """Not hours later, at the first step."""
    with pytest.raises(error, match=message):
        make()
