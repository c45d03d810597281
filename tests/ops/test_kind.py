"""Kinds of loss by `kind_op`: their public functions, and what of a declaration is refused."""

import inspect

import pytest
import torch
from docstrings import missing
from helpers import DEVICE, as_on_a_gpu, skip_unless_usable

from tilewright.core.registry import Judged
from tilewright.kernels.loss.operators import Stats, Wanted
from tilewright.ops import OPS, linear_logprob
from tilewright.ops.loss import logprob
from tilewright.ops.loss.kind import kind_op

NAMES = OPS["linear_logprob"].names()


def scaled(stats, factor: float = 2.0, power: int = 1, per_token: torch.Tensor | None = None):
    """Minus the log-probability, times numbers.

    Two paragraphs: this one is not of an option.

    factor, power: the number is factor to this
        power.
    per_token: [...], a number for each token.
    """
    loss = factor**power * (stats.log_sum - stats.picked)
    return loss if per_token is None else loss * per_token


DECLARED = {"factor": "number", "power": "int [0, 9]", "per_token": "float [*T]"}
SCALED = kind_op("linear_scaled", scaled, (), **DECLARED)


def head(dtype=torch.float32, lora=3, **more):
    g = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 3, 16), "weight": (37, 16), "bias": (37,)}
    shapes |= {"lora_A": (lora, 16), "lora_B": (37, lora)} if lora else {}
    found = {
        name: torch.randn(shape, generator=g).to(DEVICE, dtype).requires_grad_()
        for name, shape in shapes.items()
    }
    target = torch.randint(37, (2, 3), generator=g).to(DEVICE)
    target[0, 1] = 5
    return {**found, "target": target, **more}


# ---- the public function


@pytest.mark.parametrize("name", NAMES)
def test_a_kind_has_the_bits_of_a_loss_that_is_written_out(name):
    """Several results, an integer among them, of an op with every option of the head."""
    # In 16 bits, where fp32_logits matters; Triton's interpreter has no bfloat16.
    dtype = torch.float16 if name == "triton" else torch.bfloat16
    skip_unless_usable(OPS["linear_logprob"], name, dtype)

    def again(stats):
        found = logprob.results(stats, torch.ones_like(stats.picked))
        return tuple(found)

    fn = kind_op("linear_again", again, (), wanted=Wanted(mean=True, argmax=True)).public
    options = {"lora_scale": 0.5, "temperature": 0.7, "softcap": 5.0, "ignore_index": 5}
    options |= {"chunk_size": 4, "fp32_logits": True, "implementation": name}

    def computed(fn, **more):
        given = head(dtype)
        found = fn(**given, **options, **more)
        (found[0].sum() - 2 * found[1].sum()).backward()
        leaves = [t for t in given.values() if t.requires_grad]
        assert all(t.grad.any() for t in leaves)
        return [*found, *(t.grad for t in leaves)]

    found = computed(fn)
    for mine, theirs in zip(found, computed(linear_logprob, return_argmax=True), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    assert found[0][0, 1] == found[1][0, 1] == 0 and found[2].dtype == torch.int64


def test_a_kind_takes_what_linear_logprob_takes_and_its_own_options_after_the_targets():
    theirs = inspect.signature(linear_logprob, eval_str=True).parameters
    mine = inspect.signature(SCALED.public).parameters
    common = [n for n in theirs if n != "return_argmax"]
    assert list(mine) == [*common[:3], *DECLARED, *common[3:]]
    assert all(mine[n] == theirs[n] for n in common)
    assert mine["power"].annotation is int and mine["power"].default == 1
    declared = {a.name: a for a in linear_logprob.takes.arguments if a.name != "return_argmax"}
    assert {a.name: a for a in SCALED.takes.arguments if a.name not in DECLARED} == declared
    assert SCALED.takes.conditions == linear_logprob.takes.conditions
    assert SCALED.autocast == OPS["linear_logprob"].autocast
    with pytest.raises(ValueError, match=r"^power must be an int in \[0, 9\], got 10"):
        SCALED.public(**head(), power=10)
    with pytest.raises(ValueError, match=r"^softcap / temperature must be a finite"):
        SCALED.public(**head(), softcap=1e30, temperature=1e-20)


def test_the_function_is_the_kinds_module():
    """By which the op is found."""
    fn = SCALED.public
    assert (fn.__name__, fn.__qualname__, fn.__module__) == (
        "linear_scaled",
        "linear_scaled",
        __name__,
    )
    assert inspect.unwrap(fn).__module__ == __name__


def test_its_documentation_has_the_kinds_options_among_the_arguments():
    text = inspect.getdoc(SCALED.public)
    assert missing(SCALED.public) == []
    first, about, *_ = text.split("\n\n")
    assert first == "Minus the log-probability, times numbers." and "is not of an option" in about
    assert text.count("factor, power: ") == 1
    own = "    factor, power: the number is factor to this\n        power.\n    per_token: [...], "
    assert own in text.partition("\nArgs:\n")[2].partition("\n\n")[0]

    def bare(stats):
        """Minus the log-probability.

        Source: a line of no option.
        """
        return stats.log_sum - stats.picked

    text = inspect.getdoc(fn := kind_op("linear_bare", bare, ()).public)
    assert missing(fn) == [] and "\n\nSource: a line of no option.\n\n" in text
    assert "cross_entropy`.\n    lora_A, " in text


@pytest.mark.parametrize("name", NAMES)
def test_options_of_tokens_reach_the_kind_as_rows(name):
    skip_unless_usable(OPS["linear_logprob"], name, torch.float32)
    given, factor = head(lora=0), torch.rand(2, 3, device=DEVICE, requires_grad=True)
    found = SCALED.public(**given, per_token=factor, power=2, implementation=name)
    expected = -4 * linear_logprob(**given, implementation=name)[0]
    torch.testing.assert_close(found, expected * factor)
    found.sum().backward()
    torch.testing.assert_close(factor.grad, expected)
    assert given["x"].grad.any()


@pytest.mark.parametrize("name", NAMES)
def test_ignored_rows_get_0_and_rows_out_of_range_nan(name, monkeypatch):
    """Whatever the kind makes of them."""
    skip_unless_usable(OPS["linear_logprob"], name, torch.float32)
    as_on_a_gpu(monkeypatch)
    fn = kind_op("linear_infinite", lambda stats: 1 / (stats.picked - stats.picked), ()).public
    given = head(lora=0)
    target = torch.tensor([[-100, 37, 1], [2, -1, -100]], device=DEVICE)
    found = fn(**{**given, "target": target}, implementation=name)
    inf, nan = float("inf"), float("nan")
    expected = torch.tensor([[0, nan, inf], [inf, nan, 0]], device=DEVICE)
    torch.testing.assert_close(found, expected, equal_nan=True)
    loss = SCALED.public(**{**given, "target": target}, implementation=name)
    loss.sum().backward()
    ignored, outside = (
        given["x"].grad[target == -100],
        given["x"].grad[(target == 37) | (target < -99)],
    )
    assert not ignored.any() and outside.isnan().any()


def test_a_kind_that_returns_no_rows_is_refused():
    """A sum would be the loss of each row."""
    op = kind_op("linear_sum", lambda stats: (stats.log_sum - stats.picked).sum(), ())
    with pytest.raises(ValueError, match=r"^a result of linear_sum's kind must have shape \[6\]"):
        op.public(**head())


def test_the_op_is_judged_as_is_said():
    judged = Judged(of_sums=True, detects={torch.bfloat16: {"grad x": 0.1}})

    def atol(dtype, kwargs, name):
        return 1.0

    op = kind_op(
        "linear_judged", scaled, OPS["linear_logprob"].cases, judged=judged, atol=atol, **DECLARED
    )
    assert op.judged is judged and op.atol is atol and op.cases is OPS["linear_logprob"].cases
    other = OPS["linear_preference_loss"]
    assert SCALED.atol is other.atol and SCALED.judged == Judged(of_sums=True)


# ---- the declaration


def no_annotation(stats, gamma=2.0):
    return stats.picked


def no_default(stats, gamma: float):
    return stats.picked


def with_gamma(stats: Stats, gamma: float = 2.0):
    return stats.picked


def with_atol(stats, atol: float = 2.0):
    return stats.picked


def with_bias(stats, bias: float = 2.0):
    return stats.picked


@pytest.mark.parametrize(
    "kind, declared, message",
    [
        (with_gamma, {}, "option gamma of with_gamma() must be declared, such as gamma="),
        (
            with_gamma,
            {"gama": "number"},
            "gama is declared, but is no option of with_gamma(); did you mean 'gamma'? have ['gamma']",
        ),
        (with_gamma, {"gamma": "number", "beta": "number"}, "beta is declared, but is no option"),
        (
            no_default,
            {"gamma": "number"},
            "option gamma of no_default() must have an annotation and a default",
        ),
        (
            no_annotation,
            {"gamma": "number"},
            "option gamma of no_annotation() must have an annotation and a default",
        ),
        (
            with_bias,
            {"bias": "number"},
            "option bias of with_bias() has the name of an argument of all kinds",
        ),
        (with_atol, {}, "option atol of with_atol() has the name of an argument of all kinds"),
    ],
)
def test_a_wrong_declaration_is_refused_at_import(kind, declared, message):
    with pytest.raises(TypeError) as raised:
        kind_op("linear_wrong", kind, (), **declared)
    assert str(raised.value).startswith(f"linear_wrong: {message}")
