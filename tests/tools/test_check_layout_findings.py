"""Findings and notes of `tilewright check-layout` on gradients that are made here, by no ranks."""

import dataclasses
import math

import pytest
import torch

from tilewright_lab.check_layout.compare import Alone, Compared, deviation
from tilewright_lab.check_layout.findings import find
from tilewright_lab.check_layout.notes import notes, notes_of_one

NAMES = ("a", "b", "c", "d")
TOKENS = (6, 4)
MEANS = (0.5, 2.0)  # of each rank's own tokens
_draw = torch.Generator().manual_seed(0)
WANT = {n: torch.randn(20, dtype=torch.float64, generator=_draw) for n in NAMES}
NOISE = torch.randn(20, dtype=torch.float64, generator=_draw)
WANT["d"] = 1e-16 * NOISE  # as of a bias before a softmax: zero but for rounding
ONE = Alone(
    loss=1.1,  # (6 * 0.5 + 4 * 2.0) / 10
    tokens=sum(TOKENS),
    norm=3.0,
    reported=1.1,
    dtype=torch.float64,
    order=list(NAMES),
    squares={n: float(w.square().sum()) for n, w in WANT.items()},
    steps=True,
    idle=[],
    drew=False,
    buffers=[],
)


def beside(found, want, slack=1e-15):
    return {n: deviation(found.get(n, w), w, 1e-9, slack) for n, w in want.items()}


def rank(which, gradients=None, **given):
    """A rank that is right, but for these gradients."""
    right = Compared(
        loss=MEANS[which],
        tokens=TOKENS[which],
        norm=3.0,
        reported=1.1,
        dtype=torch.float64,
        number=torch.float64,
        kinds=dict.fromkeys(NAMES, "part"),
        weights={},
        gradients=beside(gradients or {}, WANT),
        updates=beside({}, WANT),
        together={},
        drew=False,
    )
    return dataclasses.replace(right, **given)


def ranks(gradients=None, **given):
    return [rank(0, gradients, **given), rank(1, gradients, **given)]


def noisy(*names):
    return {n: WANT[n] + 0.3 * NOISE for n in names}


def scaled(factor, *names):
    return {n: factor * WANT[n] for n in names}


def test_ranks_that_are_right_are_equal():
    assert not find(ONE, ranks()) and not notes(ONE, ranks(), False) and not notes_of_one(ONE)


SOME = "only {} of 4 gradients: they are "
# Steps in which all gradients have one fault are in plants/layout.py.
HINTS = {
    "a fault of one": (noisy("a"), "", ""),  # a divisor of the loss would change all
    "two of them twice": (scaled(2, "a", "b"), SOME.format(2) + "summed over 2", "the others are"),
    "one half": (scaled(0.5, "b"), SOME.format(1) + "divided by 2 once more", "for all of it"),
    "others otherwise": (
        scaled(2, "a") | scaled(7, "b") | noisy("c"),
        SOME.format(1) + "summed over 2",
        "as the others are; 2 more differ by no such factor",
    ),
    "another otherwise": (
        scaled(0.5, "a") | noisy("c"),
        SOME.format(1) + "divided by 2",
        "; 1 more differs by no such factor",
    ),
    "a rank's tokens": (
        scaled(10 / 6, "a", "b", "c"),
        "the loss is divided by the 6 tokens",
        "all",
    ),
    "one of that factor": (scaled(10 / 6, "a"), "", ""),
    "not finite": ({"a": WANT["a"] * math.nan}, "", ""),
}


@pytest.mark.parametrize("fault", HINTS)
def test_a_hint_speaks_for_those_gradients_that_it_fits(fault):
    gradients, start, end = HINTS[fault]
    [found] = [f for f in find(ONE, ranks(gradients)) if f.kind == "gradient"]
    assert found.hint.startswith(start) and found.hint.endswith(end)
    assert bool(found.hint) == bool(start)
    assert found.name == min(gradients) and found.differing == len(gradients)
    assert found.text.endswith(" on every rank")


def test_a_small_rest_is_no_percentage():
    [found] = find(ONE, ranks({"a": WANT["a"] + 1e-5 * NOISE}))
    assert "(nearest 1 times, but for " in found.text and "e-0" in found.text
    [found] = find(ONE, ranks(noisy("b")))
    assert "% unrelated)" in found.text


def test_one_process_that_reports_zero():
    [found] = find(dataclasses.replace(ONE, reported=0.0), ranks())
    assert found.text == "1.1 on every rank, in one process 0" and found.factor is None


BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    "dtype, number, equal, other",
    [  # computed in, the loss rounded to, and relative differences on both sides of the limit
        (F64, F64, 9e-10, 3e-9),
        (F32, F32, 9e-5, 3e-4),
        (F16, F32, 9e-3, 0.015),
        (F16, F16, 0.013, 0.025),
        (BF16, F32, 9e-3, 0.015),
        (BF16, BF16, 0.04, 0.06),
    ],
)
def test_numbers_differ_by_less_than_their_rounding(dtype, number, equal, other):
    given = {"dtype": dtype, "number": number}
    for off in (1 + equal, 1 - equal, 1 + other, 1 - other):
        changed = {
            "loss": [dataclasses.replace(r, loss=r.loss * off) for r in ranks(**given)],
            "norm": ranks(norm=3.0 * off, **given),
            "reported loss": ranks(reported=1.1 * off, **given),
        }
        for kind, found in changed.items():
            kinds = [f.kind for f in find(ONE, found)]
            assert kinds == [kind] * (abs(off - 1) > 1.1 * equal), (kind, off)


def test_a_sum_of_rounded_losses_is_equal():
    """Sums over tokens in bfloat16, divided by the tokens of all: 1.07 % off."""
    sums = torch.tensor([40.5, 60.5, 102.0], dtype=BF16)
    first, second, whole = (sums / 28).tolist()
    one = dataclasses.replace(ONE, loss=whole, reported=whole, dtype=BF16)
    found = [
        rank(r, loss=loss, reported=first + second, dtype=BF16, number=BF16)
        for r, loss in enumerate((first, second))
    ]
    assert abs((first + second) / whole - 1) > 0.0106 and not find(one, found)
    narrow = [dataclasses.replace(r, number=F32) for r in found]
    assert [f.kind for f in find(one, narrow)] == ["loss", "reported loss"]


def test_numbers_of_tokens_are_exact():
    one = dataclasses.replace(ONE, tokens=1000, loss=1.1)
    for more in (0, 5):
        tokens = enumerate((600, 400 + more))
        found = [rank(r, tokens=n, dtype=BF16, number=BF16) for r, n in tokens]
        assert [f.kind for f in find(one, found)] == ["tokens"] * bool(more)


@pytest.mark.parametrize(
    "one, first, sentence",
    [
        ({}, {"norm": None}, "no norm is compared: there is none on rank 0"),
        ({"norm": None}, {}, "no norm is compared: one process has none"),
        ({}, {"reported": None}, "no reported loss is compared: there is none on rank 0"),
        ({}, {"updates": {}}, "no optimizer step is compared on rank 0"),
        ({"steps": False}, {"updates": {}}, "no optimizer step is compared: one process has none"),
    ],
)
def test_what_is_not_compared_is_noted(one, first, sentence):
    found = [rank(0, **first), rank(1)]
    one = dataclasses.replace(ONE, **one)
    assert not find(one, found) and notes(one, found, False) == [sentence]


def test_what_no_rank_has_is_noted_if_one_process_has_it():
    none = ranks(norm=None, reported=None, updates={})
    assert notes(ONE, none, False) == [
        "no norm is compared: the ranks have none",
        "no optimizer step is compared: the ranks have none",
        "no reported loss is compared: the ranks have none",
    ]
    without = dataclasses.replace(ONE, norm=None, reported=None, steps=False)
    assert not notes(without, none, False)


def test_a_step_below_the_rounding_of_weights_is_noted():
    below = beside({"b": torch.zeros(20)}, WANT, 10.0)
    found = ranks(updates={n: below[n] if n in "bc" else d for n, d in beside({}, WANT).items()})
    assert not find(ONE, found)
    said = "the step of 2 of 4 parameters, such as b, is below the rounding of its weights"
    assert notes(ONE, found, False) == [said + ": nothing of it shows"]


def test_tokens_that_all_ranks_have_are_noted():
    same = {"tokens": 10, "loss": 1.1}
    [shared] = notes(ONE, ranks(**same), False)
    [copies] = notes(ONE, ranks(**same, kinds=dict.fromkeys(NAMES, "copy")), False)
    for note in (shared, copies):
        assert note.startswith("the ranks have 2 times the tokens of one process between them: ")
    assert "right where ranks share a batch" in shared and "they do the same work" in copies
    stages = [rank(r, **same, kinds=dict.fromkeys(NAMES[2 * r :][:2], "copy")) for r in (0, 1)]
    assert not notes(ONE, stages, False)
    assert not notes(ONE, ranks(tokens=3), False)


def test_several_names_in_a_note():
    one = dataclasses.replace(ONE, idle=["x", "y"], buffers=["m", "n", "o"])
    assert notes_of_one(one) == [
        "x and 1 more require gradients and have none in one process",
        "buffers are not compared, and the step changes m and 2 more",
    ]
