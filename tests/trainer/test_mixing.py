"""Several data sets as one: their shares, their order, and what is refused."""

import collections

import numpy as np
import pytest
from preparing import IN_ORDER, config_of, prepare_of, write_rows

from tilewright.trainer.data.mixing import mixed

pytestmark = [pytest.mark.packages, pytest.mark.usefixtures("own_cache")]

PARTS = [np.arange(0, 30), np.arange(100, 110), np.arange(200, 260)]


def of_set(found, i):
    return [int(s) for s in found if s // 100 == i]


@pytest.mark.parametrize("weights", [None, [1, 1, 1], [0.7, 0.2, 0.1], [1, 5, 14]])
def test_random_takes_the_shares_of_the_weights(weights):
    n = 100_000
    found = mixed(PARTS, "random", weights, n, seed=3)
    shares = np.array(weights or [30, 10, 60], float)
    shares /= shares.sum()
    for i, share in enumerate(shares):
        own = of_set(found, i)
        assert abs(len(own) - n * share) <= 3 * (n * share * (1 - share)) ** 0.5
        assert own == np.resize(PARTS[i], len(own)).tolist(), "in order, and from the beginning"
    assert (found == mixed(PARTS, "random", weights, n, seed=3)).all()
    assert (found != mixed(PARTS, "random", weights, n, seed=4)).any()
    assert len(mixed(PARTS, "random", weights)) == 100, "as many as there are"


def test_interleaved_in_turns():
    found = mixed(PARTS, "interleave_under").tolist()
    assert found[:6] == [0, 100, 200, 1, 101, 201] and len(found) == 30
    found = mixed(PARTS, "interleave_over")
    counts = collections.Counter(int(s) // 100 for s in found)
    assert {*counts.values()} == {60} and {*of_set(found, 2)} == {*range(200, 260)}


def test_interleaved_by_weights():
    def interleaved(how="interleave_under", seed=1):
        return mixed(PARTS, how, [1, 1, 8], seed=seed)

    found = interleaved()
    assert len({*map(int, found)}) == len(found), "none twice"
    ended = [{*of_set(found, i)} == {*map(int, PARTS[i])} for i in range(3)]
    assert any(ended), "until one has ended"
    assert found.tolist() == interleaved().tolist() != interleaved(seed=2).tolist()
    over = interleaved("interleave_over")
    assert all({*of_set(over, i)} == {*map(int, PARTS[i])} for i in range(3)), "until all have"


def test_a_set_without_samples():
    empty = [np.arange(3), np.arange(0)]
    assert sorted(mixed(empty, "random", count=6)) == [0, 0, 1, 1, 2, 2]
    for how in ("random", "interleave_under", "interleave_over"):
        said = f"data.mixing = {how}: data set 2 has a weight, and no"
        with pytest.raises(ValueError, match=said):
            mixed(empty, how, [1, 1])


# ---- configured


def config(folder, *entries, test=(), **fields):
    """Set i has 10 (i + 1) samples, which begin with i + 1."""

    def written(i, more):
        rows = [{"input_ids": [i + 1, j + 10, j + 11]} for j in range(10 * (i + 1))]
        return {"path": write_rows(folder / f"{i}.jsonl", rows), **more}

    made = [written(i, more) for i, more in enumerate([*entries, *test])]
    trained, held = made[: len(entries)], made[len(entries) :]
    return config_of(folder, *trained, test=held, **IN_ORDER | fields)


def taken(own, **options):
    made = prepare_of(own, lambda: None, 97, **options)
    return [tuple(ids[:2]) for ids in made["input_ids"]]


def test_a_run_is_given_the_mixture(tmp_path):
    own = config(tmp_path, {"weight": 3}, {"weight": 1}, mixing="random", samples_per_epoch=400)
    found = taken(own)
    shares = collections.Counter(first for first, _ in found)
    assert len(found) == 400 and abs(shares[1] - 300) < 27
    assert [j for i, j in found if i == 1][:12] == [*range(10, 20), 10, 11]
    assert found != taken(config(tmp_path, {"weight": 1}, {"weight": 1}, mixing="random"))
    turns = taken(config(tmp_path, {}, {}, mixing="interleave_under"))
    assert turns[:3] == [(1, 10), (2, 10), (1, 11)]
    plain = taken(config(tmp_path, {}, {}))
    assert len(plain) == 30 == len({*plain})
    # What is evaluated on has every sample once.
    assert sorted(taken(own, shuffle=False)) == sorted(plain)


def test_max_samples_are_the_first_rows(tmp_path):
    own = config(tmp_path, {"max_samples": 3}, {"max_samples": 500})
    assert [j for i, j in taken(own) if i == 1] == [10, 11, 12]
    assert len(taken(own)) == 3 + 20
    assert len(taken(config(tmp_path, {}, {}))) == 30, "other prepared data"


@pytest.mark.parametrize(
    "entries, fields, said",
    [
        ([{"weight": 1}], {}, "weight = 1.0, data.mixing = concat: concat takes every sample once"),
        ([{"weight": 0}], {"mixing": "random"}, "greater than 0"),
        ([{"weight": 1}, {}], {"mixing": "random"}, "give every data set a weight, or none of"),
        ([{}], {"samples_per_epoch": 5}, "samples_per_epoch = 5, data.mixing = concat: the other"),
        ([{}], {"mixing": "random", "val_set_size": 2}, "trained on and held out"),
        ([{}], {"mixing": "interleave_over", "val_set_size": 2}, "trained on and held out"),
        ([{"max_samples": 0}], {}, "greater than or equal to 1"),
        (
            *([{}], {"mixing": "random", "test": [{"weight": 1}]}),
            "what is evaluated on is not mixed",
        ),
    ],
)
def test_mixtures_that_are_refused(entries, fields, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        config(tmp_path, *entries, **fields)
