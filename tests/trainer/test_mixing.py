"""Several data sets as one: their shares, their order, and what is refused."""

import collections
import json

import datasets
import numpy as np
import pytest
from preparing import prepare_of

from tilewright.trainer.config import Config
from tilewright.trainer.data.mixing import mixed

pytestmark = pytest.mark.packages

PARTS = [np.arange(0, 30), np.arange(100, 110), np.arange(200, 260)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


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
    found = mixed(PARTS, "interleave_under", [1, 1, 8], seed=1)
    assert len({*map(int, found)}) == len(found), "none twice"
    assert any({*of_set(found, i)} == {*map(int, PARTS[i])} for i in range(3)), (
        "until one has ended"
    )
    assert found.tolist() == mixed(PARTS, "interleave_under", [1, 1, 8], seed=1).tolist()
    assert found.tolist() != mixed(PARTS, "interleave_under", [1, 1, 8], seed=2).tolist()
    over = mixed(PARTS, "interleave_over", [1, 1, 8], seed=1)
    assert all({*of_set(over, i)} == {*map(int, PARTS[i])} for i in range(3)), "until all have"


def test_a_set_without_samples():
    empty = [np.arange(3), np.arange(0)]
    assert sorted(mixed(empty, "random", count=6)) == [0, 0, 1, 1, 2, 2]
    for how in ("random", "interleave_under", "interleave_over"):
        with pytest.raises(
            ValueError, match=f"data.mixing = {how}: data set 2 has a weight, and no"
        ):
            mixed(empty, how, [1, 1])


# ---- configured


def config(tmp_path, *entries, test=(), **fields):
    made = []
    for i, more in enumerate([*entries, *test]):
        file = tmp_path / f"{i}.jsonl"
        rows = [{"input_ids": [i + 1, j + 10, j + 11]} for j in range(10 * (i + 1))]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        made.append({"path": str(file), **more})
    given = {
        "datasets": made[: len(entries)],
        "test_datasets": made[len(entries) :],
        "dataset_prepared_path": str(tmp_path / "prepared"),
        "shuffle_merged_datasets": False,
        "shuffle_before_merging_datasets": False,
    }
    return Config(model={"config_path": "unused"}, data=given | fields, train={"output_dir": "out"})


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
    assert taken(config(tmp_path, {}, {}, mixing="interleave_under"))[:3] == [
        (1, 10),
        (2, 10),
        (1, 11),
    ]
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
        ([{"weight": -1}], {"mixing": "random"}, "greater than 0"),
        (
            [{"weight": 1}, {}],
            {"mixing": "random"},
            "give every data set a weight, or none of them",
        ),
        ([{}], {"samples_per_epoch": 5}, "samples_per_epoch = 5, data.mixing = concat: the other"),
        ([{}], {"mixing": "random", "val_set_size": 2}, "trained on and held out"),
        ([{}], {"mixing": "interleave_over", "val_set_size": 2}, "trained on and held out"),
        ([{"max_samples": 0}], {}, "greater than or equal to 1"),
    ],
)
def test_mixtures_that_are_refused(entries, fields, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        config(tmp_path, *entries, **fields)


def test_what_is_evaluated_on_is_not_mixed(tmp_path):
    with pytest.raises(ValueError, match="what is evaluated on is not mixed"):
        config(tmp_path, {}, test=[{"weight": 1}], mixing="random")
