"""`python -m bench truth`."""

import itertools
import json
import types

import pytest
import torch
from mpmath import mp

pytest.importorskip("pydantic")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from bench import truth, truth_losses
from tilewright.ops.loss import policy, preference
from tilewright.trainer.losses.loss import LOSSES

pytestmark = pytest.mark.packages
COMMITTED = truth.ROOT / "bench/results/truth/truth.json"
DRAWS = truth.DRAWS


@pytest.fixture(autouse=True)
def _two_draws(monkeypatch):
    monkeypatch.setattr(truth, "DRAWS", 2)


def shares(layout, dtype, *losses, monkeypatch):
    monkeypatch.setattr(truth, "DTYPES", {dtype: truth.DTYPES[dtype]})
    return {r["loss"]: truth.share(r) for r in truth.measure(layout, losses)}


@pytest.mark.parametrize(
    ("layout", "dtype", "losses"),
    [
        ("packed", "float32", ("sigmoid", "hinge", "orpo")),
        ("accumulation 3", "bfloat16", ("sppo_hard", "kto", "distillation jsd")),
        ("LoRA", "float32", ("sigmoid offset", "reward", "ppo by documents")),
    ],
    ids=["packed", "accumulation", "LoRA"],
)
def test_a_sample_of_the_table_holds(layout, dtype, losses, monkeypatch):
    found = shares(layout, dtype, *losses, monkeypatch=monkeypatch)
    assert len(found) == 3 and max(found.values()) < 1


def test_a_wrong_gradient_shows(monkeypatch):
    """A thousandth of what one projection gets."""

    def gradients(*arguments):
        found = right(*arguments)
        name = "model.layers.1.self_attn.k_proj.weight"
        return {**found, name: found[name] * 1.001}

    right = truth.gradients
    monkeypatch.setattr(truth, "gradients", gradients)
    found = shares("packed", "float32", "sigmoid", monkeypatch=monkeypatch)
    assert found["sigmoid"] > 5


def test_documents_that_a_step_leaves_out_show(monkeypatch):
    monkeypatch.setattr(truth_losses, "PAIRS", 14)  # of which a step's six bins hold 12
    with pytest.raises(RuntimeError, match=r"a mean over 12\.0, not 14"):
        shares("packed", "float32", "sigmoid", monkeypatch=monkeypatch)


def test_the_committed_table_holds_of_every_loss_and_layout(monkeypatch):
    monkeypatch.setattr(truth, "DRAWS", DRAWS)
    document = json.loads(COMMITTED.read_text())
    found = {(r["loss"], r["layout"], r["dtype"]): truth.share(r) for r in document["rows"]}
    assert found.keys() == {*itertools.product(truth.LOSSES, truth.LAYOUTS, truth.DTYPES)}
    assert max(found.values()) <= 1
    assert (truth.ROOT / truth.PAGE).read_text() == truth.page(document)


def test_every_loss_of_the_trainer_is_in_the_table():
    """All formulas, and all further options of pairs' losses."""
    of = {name: {} for name in ("preference", "policy", "reward", "distillation")}
    for loss in truth.LOSSES.values():
        section = truth.KINDS[loss.kind].loss
        of[section].setdefault(loss.fields.get("loss"), []).append(loss.fields)
    assert of["preference"].keys() == preference.FORMULAS.keys()
    assert of["policy"].keys() == policy.FORMULAS.keys()
    assert {*LOSSES.names()} - {*of} == {"language_modeling", "weighted_language_modeling"}


# The formulas once more, of numbers with 60 digits. c, r: log-probabilities of answers; u, d: their
# log-ratios to the reference; a bar: per token.
def logsigmoid(x):
    return -mp.log1p(mp.exp(-x)) if x > 0 else x - mp.log1p(mp.exp(x))


def sigmoid(x):
    return mp.exp(logsigmoid(x))


def smoothed(x, e):
    return -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)


def robust(x, e):
    return (-(1 - e) * logsigmoid(x) + e * logsigmoid(-x)) / (1 - 2 * e)


def log_odds(x):
    return x - mp.log(-mp.expm1(x))


def exo(z, e):
    log = (logsigmoid(z) - mp.log(1 - e), logsigmoid(-z) - mp.log(e))
    return sigmoid(z) * log[0] + sigmoid(-z) * log[1]


BETA, SMOOTHING, GAMMA, LAMBDA = mp.mpf("0.125"), mp.mpf("0.25"), mp.mpf("0.5"), mp.mpf(50)
KL_CHOSEN, KL_REJECTED = 0.75, 1.5
EXACT = {
    "sigmoid": lambda s: smoothed(BETA * (s.u - s.d), SMOOTHING),
    "robust": lambda s: robust(BETA * (s.u - s.d), SMOOTHING),
    "sigmoid_norm": lambda s: smoothed(BETA * (s.u_bar - s.d_bar), SMOOTHING),
    "hinge": lambda s: max(mp.mpf(0), 1 - BETA * (s.u - s.d)),
    "ipo": lambda s: (s.u_bar - s.d_bar - 1 / (2 * BETA)) ** 2,
    "exo_pair": lambda s: exo(BETA * (s.u - s.d), SMOOTHING),
    "nca_pair": lambda s: (
        -logsigmoid(BETA * s.u) - logsigmoid(-BETA * s.u) / 2 - logsigmoid(-BETA * s.d) / 2
    ),
    "bco_pair": lambda s: -logsigmoid(BETA * s.u) - logsigmoid(-BETA * s.d),
    "sppo_hard": lambda s: (s.u - 1 / (2 * BETA)) ** 2 + (s.d + 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda s: sigmoid(-BETA * s.u) + sigmoid(BETA * s.d),
    "apo_down": lambda s: sigmoid(BETA * s.u) + sigmoid(-BETA * (s.u - s.d)),
    "kto_pair": lambda s: (
        2 - sigmoid(BETA * (s.u - KL_REJECTED)) - sigmoid(BETA * (KL_CHOSEN - s.d))
    ),
    "dpop": lambda s: -logsigmoid(BETA * (s.u - s.d - LAMBDA * max(mp.mpf(0), -s.u))),
    "simpo": lambda s: -logsigmoid(BETA * (s.c_bar - s.r_bar) - GAMMA),
    "orpo": lambda s: -BETA * logsigmoid(log_odds(s.c_bar) - log_odds(s.r_bar)),
}
# Margins of 1e4, answers that are certain, of one token, and equal ones.
NUMBERS = [
    (-1.0, -10001.0, -3.0, -2.0, 1, 7),
    (-10001.0, -1.0, -3.0, -2.0, 7, 1),
    (-1e-12, -5.0, -2.5, -3.0, 1, 1),
    (-5.0, -1e-12, -2.0, -3.0, 3, 1),
    (-4.0, -4.0, -4.0, -4.0, 5, 5),
    (-2.0, -3.0, -2.5, -2.5, 1, 2),
]


def exact(name, numbers):
    """The loss, and its derivatives by both log-probabilities."""
    *fixed, chosen, rejected = numbers[2:]

    def loss(c, r):
        u, d = c - fixed[0], r - fixed[1]
        bars = {"c_bar": c / chosen, "r_bar": r / rejected}
        bars |= {"u_bar": u / chosen, "d_bar": d / rejected}
        return EXACT[name](types.SimpleNamespace(u=u, d=d, **bars))

    c, r = map(mp.mpf, numbers[:2])
    step = mp.mpf(10) ** -25
    return (
        loss(c, r),
        (loss(c + step, r) - loss(c - step, r)) / (2 * step),
        (loss(c, r + step) - loss(c, r - step)) / (2 * step),
    )


def test_formulas_of_pairs_have_an_exact_one():
    assert EXACT.keys() == {name for name, f in preference.FORMULAS.items() if f.paired}


@pytest.mark.parametrize("name", EXACT)
def test_the_extremes_of_a_formula_have_their_digits(name):
    row, options = preference.FORMULAS[name], {"beta": 0.125, "label_smoothing": 0.25}
    formula = row(**{n: v for n, v in options.items() if n in row.reads})
    with mp.workdps(60):
        for numbers in NUMBERS:
            c, r, *more = (torch.tensor([float(n)], dtype=torch.float64) for n in numbers)
            both = c.requires_grad_(), r.requires_grad_()
            loss = formula(preference.Pairs(*both, *more, None, KL_CHOSEN, KL_REJECTED))
            if name == "dpop" and numbers[0] == numbers[2]:  # a kink
                continue
            for found, truth_ in zip(
                (loss, *torch.autograd.grad(loss.sum(), both, allow_unused=True)),
                exact(name, numbers),
                strict=True,
            ):
                value = 0.0 if found is None else found.item()
                assert abs(value - truth_) <= abs(truth_) * 1e-13 + 1e-300, (numbers, value)


@pytest.mark.parametrize("desirable", [True, False])
@pytest.mark.parametrize("numbers", [(-1.0, -10001.0), (-10001.0, -1.0), (-1e-12, -2.0), (-3, -3)])
def test_the_extremes_of_kto_have_their_digits(numbers, desirable):
    answer = torch.tensor([numbers[0]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([numbers[1]], dtype=torch.float64)
    answers = preference.Answers(answer, reference, torch.ones(1), torch.tensor([desirable]), 0.75)
    kto = preference.KTO(beta=0.125, kto_desirable_weight=1.5, kto_undesirable_weight=0.25)
    loss = kto(answers)
    [slope] = torch.autograd.grad(loss.sum(), answer)
    with mp.workdps(60):
        z = BETA * (mp.mpf(numbers[0]) - mp.mpf(numbers[1]) - mp.mpf(0.75))
        weight, sign = (mp.mpf(1.5), -1) if desirable else (mp.mpf(0.25), 1)
        expected = weight * sigmoid(sign * z)
        derivative = sign * BETA * weight * sigmoid(z) * sigmoid(-z)
        assert abs(loss.item() - expected) <= abs(expected) * 1e-13 + 1e-300
        assert abs(slope.item() - derivative) <= abs(derivative) * 1e-13 + 1e-300
