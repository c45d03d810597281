"""Modules of tilewright.nn hold options and weights; otherwise they equal the functions of
tilewright.ops.
"""

import inspect
import re

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
        pair = (torch.autograd.grad(t, leaves, g) for t in (found, expected))
        assert all(map(torch.equal, *pair))


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
    given = {"bias": norm.bias, "offset": norm.offset, "cast": norm.cast}
    expected = ops.rmsnorm(x, norm.weight, norm.eps, **given)
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
    h = F.silu(F.linear(x, gate, gate_b)) * F.linear(x, up, up_b)
    expected = F.linear(h, mlp.down_proj.weight, mlp.down_proj.bias)
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

LOSSES = {
    nn.CrossEntropyLoss: (ops.cross_entropy, {"logits", "inplace"}),
    nn.LinearCrossEntropyLoss: (
        ops.linear_cross_entropy,
        {"x", "weight", "bias", "lora_A", "lora_B", "lora_scale"},
    ),
}
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
    linear = nn.LinearCrossEntropyLoss(**options)(x, w, y, b, **given)
    of_logits = nn.CrossEntropyLoss(**options)(logits, y, **given)
    pairs = [
        (of_logits, ops.cross_entropy(logits, y, **options, **given), (logits,)),
        (linear, ops.linear_cross_entropy(x, w, y, bias=b, **options, **given), (x, w, b)),
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


@pytest.mark.parametrize("module", LOSSES)
def test_losses_have_the_options_of_their_functions(module):
    """With the same defaults. inplace is excluded: overwriting logits should be explicit at the
    call.
    """
    function, given = LOSSES[module]
    given = {*given, "target", "token_weight", "num_tokens"}

    def options(f):
        found = inspect.signature(f).parameters
        return {n: p.default for n, p in found.items() if n not in given}

    assert options(module) == options(function)


def test_class_weight_moves_with_its_module_and_is_saved():
    loss = nn.CrossEntropyLoss(class_weight=torch.rand(5))
    assert loss.to(torch.float64).class_weight.dtype == torch.float64
    assert loss.to("meta").class_weight.device.type == "meta"
    assert list(loss.state_dict()) == ["class_weight"] and not list(loss.parameters())


# ---- all of them

SWIGLU = {"gate_up_proj.weight": (20, 6), "down_proj.weight": (6, 10)}
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
        ("swiglu", SWIGLU),
        ("swiglu_bias", {**SWIGLU, "gate_up_proj.bias": (20,), "down_proj.bias": (6,)}),
        ("loss", {}),
        ("linear_loss", {"class_weight": (5,)}),
    ],
)
def test_names_and_shapes_in_a_checkpoint(name, shapes):
    assert {n: tuple(t.shape) for n, t in NEW[name]().state_dict().items()} == shapes


OF_BOTH_LOSSES = ("ignore_index=-100", "label_smoothing=0.0", "z_loss=0.0", "reduction='mean'")


@pytest.mark.parametrize(
    "name, expected",
    [
        ("rmsnorm", ("dim=(8,)", "eps=1e-06", "cast='llama'")),
        ("rmsnorm_bias", ("dim=(3, 8)", "eps=1e-06", "offset=1.0", "cast='gemma'", "bias=True")),
        ("swiglu", ("hidden=6", "inner=10")),
        ("loss", OF_BOTH_LOSSES),
        (
            "linear_loss",
            {*OF_BOTH_LOSSES, "softcap=30.0", "accumulate='fp32'", "chunk_size=64"}
            | {"class_weight=(5,)"},
        ),
    ],
)
def test_what_they_print(name, expected):
    found = re.split(r", (?=\w+=)", NEW[name]().extra_repr())
    assert sorted(found) == sorted([*expected, "implementation='auto'"])


REFUSED = (  # module, arguments, options
    (nn.RMSNorm, (0,), {}, r"ValueError: dim must be D or \(heads, D\), all positive, got 0"),
    (nn.RMSNorm, ((2, 3, 4),), {}, r"ValueError: dim must be D or .*got \(2, 3, 4\)"),
    (nn.RMSNorm, ((),), {}, r"ValueError: dim must be D or .*got \(\)"),
    (nn.RMSNorm, (2.5,), {}, r"TypeError: dim must be an int or a pair of them, got 2\.5"),
    (nn.RMSNorm, (8,), {"cast": "lama"}, r"ValueError: cast must be .*\['llama', .*got 'lama'"),
    (nn.RMSNorm, (8,), {"eps": "1e-6"}, "TypeError: eps must be a number, got '1e-6'"),
    (nn.RMSNorm, (8,), {"eps": -1.0}, r"ValueError: eps must be .*\[0, inf\) .*got -1\.0"),
    (nn.RMSNorm, (8,), {"offset": None}, "TypeError: offset must be a number, got None"),
    (
        nn.RMSNorm,
        (8,),
        {"implementation": []},
        r"TypeError: .*implementation .*\['auto', .*got \[\]",
    ),
    (nn.RMSNorm, (8,), {"implementation": "tritn"}, "ValueError: rmsnorm: unknown .*'tritn'"),
    (nn.SwiGLU, (0, 4), {}, "ValueError: hidden must be an int >= 1, got 0"),
    (nn.SwiGLU, (4, 2.5), {}, r"ValueError: inner must be an int >= 1, got 2\.5"),
    (nn.SwiGLU, (4, 4), {"implementation": "tritn"}, "ValueError: silu_mul: unknown .*'tritn'"),
)
REFUSED_OF_LOSSES = (
    ({"group": "x"}, "TypeError: group must be a torch.* or None, got str"),
    ({"reduction": "avg"}, "ValueError: reduction must be one of .*got 'avg'"),
    ({"label_smoothing": 2}, r"ValueError: label_smoothing must be .*\[0, 1\], got 2"),
    ({"z_loss": -1.0}, r"ValueError: z_loss must be .*\[0, inf\) in float32, got -1\.0"),
    ({"implementation": "tritn"}, "ValueError: .*cross_entropy: unknown .*'tritn'"),
    ({"class_weight": [1.0]}, "TypeError: class_weight must be a torch.Tensor or None, got list"),
)
REFUSED_OF_LINEAR = (
    ({"softcap": 0.0}, r"ValueError: softcap must be .*\(0, inf\) in float32 or None, got 0\.0"),
    ({"accumulate": "fp8"}, "ValueError: accumulate must be one of .*got 'fp8'"),
    ({"chunk_size": 0}, r"ValueError: chunk_size must be an int in \[1, 2\*\*63\) or None, got 0"),
)
OF_LOSSES = [
    *((loss, (), *row) for loss in LOSSES for row in REFUSED_OF_LOSSES),
    *((nn.LinearCrossEntropyLoss, (), *row) for row in REFUSED_OF_LINEAR),
]


@pytest.mark.parametrize("module, arguments, options, message", [*REFUSED, *OF_LOSSES])
def test_a_bad_argument_is_refused_when_the_module_is_made(module, arguments, options, message):
    """Not hours later, at the first step."""
    with pytest.raises((TypeError, ValueError)) as caught:
        module(*arguments, **options)
    assert re.search(message, f"{caught.typename}: {caught.value}")
