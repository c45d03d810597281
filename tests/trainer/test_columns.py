"""Columns of documents: from rows to batches, in any packing, on any ranks, from any position."""

import dataclasses
import itertools
import pathlib
from typing import get_args

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from preparing import config_of, prepare_of, write_rows

from tilewright.ops.attention.context_parallel import ContextParallel
from tilewright.trainer.build import columns_of
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.data.batches import Batches, Bins, collate
from tilewright.trainer.data.columns.column import COLUMNS
from tilewright.trainer.data.mixing import Mixing, mixed
from tilewright.trainer.data.prepared import split_validation
from tilewright.trainer.data.types.dataset_type import DATASETS
from tilewright.trainer.data.units import unfolded
from tilewright.trainer.losses.loss import LOSSES, Loss
from tilewright.trainer.losses.weighted import weighted_language_modeling

pytestmark = [pytest.mark.packages, pytest.mark.usefixtures("own_cache")]
# It would parse every module of the repository for numbers to try, in each process of the tests.
providers._get_local_constants = lambda: providers._local_constants

WIDE = {
    name: dataclasses.replace(COLUMNS[name], width=3, reader=None)
    for name in ("routed_experts", "teacher_ids", "teacher_logprobs")
}
# Without `prefix`, which leaves tokens out (test_shared_prefix).
ALL = {n: c for n, c in COLUMNS.items() if c.batched and n != "prefix"} | WIDE


def config(folder, *entries, **fields):
    """Prepared in the folder itself."""
    own = {"dataset_prepared_path": str(folder), "pad_to_multiple_of": 4}
    return config_of(folder, *entries, **own | {"sample_packing_sequence_len": 16} | fields)


UNUSED = pathlib.Path("unused")


# ---- properties


def set_of(lengths, pairs):
    """A set whose every number tells its document, token and column. Document i has the tokens
    100 i + 1 and on.
    """
    rows = {name: [] for name in ("input_ids", "labels", *ALL)}
    for i, n in enumerate(lengths):
        ids = np.arange(100 * i + 1, 100 * i + 1 + n)
        rows["input_ids"].append(ids)
        rows["labels"].append(ids)
        for k, (name, column) in enumerate(ALL.items()):
            if name == "pair":
                value = pairs[i]
            elif column.each == "document":
                value = 7 * i + k
            else:
                value = ids + 1000 * k
                if column.width is not None:
                    value = (value[:, None] + np.arange(column.width)).reshape(-1)
            rows[name].append(value)
    return datasets.Dataset.from_dict(rows)


def check(batch, lengths, pairs, order):
    """Every column of every document is where its tokens are, each label that of the next one.
    Returns the documents, in order.   order: the documents of an epoch.
    """
    found, ends = [], batch["cu_seqlens"].tolist()
    for j, (a, b) in enumerate(itertools.pairwise(ends)):
        ids = batch["input_ids"][0, a:b]
        assert {*batch["real"][0, a:b].tolist()} == {bool(ids[0])}
        assert batch["position_ids"][0, a:b].tolist() == [*range(b - a)]
        if not ids[0]:  # padding, or a filler
            assert (batch["labels"][0, a:b] == IGNORE).all()
            for name, column in ALL.items():
                at = batch[name][j] if column.each == "document" else batch[name][0, a:b]
                assert (at == column.fill).all(), name
            continue
        i, n = int(ids[0]) // 100, b - a
        assert n == lengths[i] and ids.tolist() == list(range(100 * i + 1, 100 * i + 1 + n))
        assert batch["labels"][0, a:b].tolist() == [*ids[1:].tolist(), IGNORE]
        assert order[batch["document"][j]] == i
        found.append(i)
        for k, (name, column) in enumerate(ALL.items()):
            if name == "pair":
                assert batch[name][j] == pairs[i]
            elif column.each == "document":
                assert batch[name][j] == 7 * i + k, name
            else:
                own, want = batch[name][0, a:b], ids + 1000 * k
                if column.width is not None:
                    want = want[:, None] + torch.arange(3)
                if column.target:  # of the token that follows
                    assert (own[-1] == column.fill).all()
                    own, want = own[:-1], want[1:]
                assert own.tolist() == want.tolist(), name
    return found


def an_epoch(data, units):
    """The documents of two sets in an order that `data.mixing` gives, unit by unit.   units: the
    documents of each.
    """
    how = data.draw(st.sampled_from([*get_args(Mixing)]))
    cut = data.draw(st.integers(0, len(units)))
    parts = [np.arange(cut), np.arange(cut, len(units))]
    weights = data.draw(st.sampled_from([None, [1, 3]])) if all(map(len, parts)) else None
    count = data.draw(st.none() | st.integers(1, 2 * len(units)))
    starts = np.array([0, *np.cumsum([*map(len, units)])])
    merged = mixed(parts, how, weights, count, data.draw(st.integers(0, 9)))
    return [units[u] for u in merged], unfolded(merged, starts)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_documents_on_any_ranks_from_any_position(data):
    """The same documents in the same order, each as often as mixing takes it, with all their
    columns, where a run goes on with another number of ranks after each cut; members of a pair in
    one bin.
    """
    lengths = data.draw(st.lists(st.integers(2, 8), min_size=20, max_size=60))
    pairs = list(np.cumsum([data.draw(st.integers(0, 1)) for _ in lengths]))
    while max(sum(n for n, q in zip(lengths, pairs, strict=True) if q == p) for p in pairs) > 16:
        pairs = list(range(len(lengths)))
    taken, order = an_epoch(
        data, [[i for i, q in enumerate(pairs) if q == p] for p in dict.fromkeys(pairs)]
    )
    per_step = 4
    fields = {
        "sample_packing_method": data.draw(st.sampled_from(["sequential", "multipack"])),
        "dataloader_drop_last": False,
    }
    documents = set_of(lengths, pairs).select(order)
    bins = Bins(documents, config(UNUSED, **fields).data, columns=ALL, numbered=True)
    assert sorted(i for b in bins.bins for i in b) == list(range(len(order)))
    bin_of = {i: k for k, b in enumerate(bins.bins) for i in b}
    ends = np.cumsum([len(unit) for unit in taken])
    for unit, end in zip(taken, ends, strict=True):
        assert len({bin_of[i] for i in range(end - len(unit), end)}) == 1, "a pair is in one bin"
    steps = -(-len(bins) // per_step)

    def trained(worlds, edges):
        """The documents of an epoch's steps.   worlds: ranks from each of the edges on."""
        found, state = [], {"epoch": 0, "used": 0}
        for world, (first, stop) in zip(worlds, itertools.pairwise(edges), strict=True):
            size = {"gradient_accumulation_steps": 1, "micro_batch_size": per_step // world}
            own = config(UNUSED, train={"seed": 3, **size}, **fields)
            loaders = [
                Batches(bins, own.data, own.train, rank=rank, world_size=world)
                for rank in range(world)
            ]
            for loader in loaders:
                loader.load_state_dict(state)
            for step in itertools.islice(
                zip(*(b.steps() for b in loaders), strict=True), stop - first
            ):
                for [batch] in step:
                    found += check(batch, lengths, pairs, order)
                state = loaders[0].state_dict()
        return found

    edges = sorted({0, *(data.draw(st.integers(1, steps)) for _ in range(2)), steps})
    worlds = [data.draw(st.sampled_from([1, 2, 4])) for _ in edges[1:]]
    want = trained([1], [0, steps])
    assert sorted(want) == sorted(order)
    assert trained(worlds, edges) == want


@pytest.mark.parametrize("ulysses, ring", [(2, 1), (1, 2), (2, 2)])
def test_a_column_is_sharded_as_its_tokens_are(ulysses, ring):
    lengths, pairs = [5, 7, 3], [0, 1, 2]
    bins = Bins(set_of(lengths, pairs), config(UNUSED).data, columns=ALL)
    whole = collate([bins[0]], 8, columns=bins.columns)
    size = ulysses * ring
    for rank in range(size):
        cp = ContextParallel(ulysses, ring, rank % ulysses, rank // ulysses)
        own = collate([bins[0]], 8, cp, bins.columns)
        places = [t for a, b in cp.intervals(16) for t in range(a, b)]
        for name, column in ALL.items():
            want = whole[name] if column.each == "document" else whole[name][:, places]
            assert torch.equal(own[name], want), name


# ---- from rows


def written(path, rows, **entry):
    return {"path": write_rows(path, rows), **entry}


class Letters:
    """A tokenizer of one token per character."""

    eos_token_id = 0

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) - 90 for c in text]}


def samples(folder, rows, *names, tokenizer=None, **entry):
    own = config(folder / "prepared", written(folder / "rows.jsonl", rows, **entry))
    columns = {n: dataclasses.replace(COLUMNS[n], asked_by="train.loss = mine") for n in names}
    return prepare_of(own, lambda: tokenizer, 97, shuffle=False, columns=columns)


def test_columns_are_read_from_rows(tmp_path):
    rows = [
        {"input_ids": [5, 6, 7], "weight": [1, 0.5, 2], "reward": 1, "id": "a"},
        {"input_ids": [8, 9], "weight": [3, 3], "reward": -0.25, "id": "b"},
        {"input_ids": [8, 9, 10, 11, 12], "reward": 0, "weight": [1, 2, 3, 4, 5]},
    ]
    found = samples(tmp_path, rows, "weight", "reward", "id", max_seq_len=4)
    assert found["weight"] == [[1, 0.5, 2], [3, 3], [1, 2, 3, 4]], "cut where the tokens are"
    assert found["reward"] == [1, -0.25, 0] and found["id"] == ["a", "b", ""]


def test_one_number_stands_for_every_token(tmp_path):
    rows = [{"input_ids": [5, 6, 7], "advantage": -2}, {"input_ids": [8, 9], "advantage": 0.5}]
    found = samples(tmp_path, rows, "advantage", "weight")
    assert found["advantage"] == [[-2] * 3, [0.5] * 2]
    assert found["weight"] == [[1] * 3, [1] * 2], "the default, where there is no such column"


def test_texts_have_columns_too(tmp_path):
    """Each of the samples that a row makes has what the row has."""
    rows = [
        {"text": "abcdef", "reward": 2, "weight": 0.5},
        {"text": "ab", "reward": 3, "weight": 1},
    ]
    of_texts = {"tokenizer": Letters(), "type": "text", "max_seq_len": 4}
    found = samples(tmp_path, rows, "reward", "weight", **of_texts)
    assert found["reward"] == [2, 2, 3] and found["weight"] == [[0.5] * 4, [0.5] * 3, [1] * 3]


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("weight", [1, 2], "weight: it has 2 values, and the row 3 tokens"),
        ("weight", [1, -1, 0], "value of token 2 is -1: accepted are 0 and more"),
        ("old_logprob", [0, 0.5, 0], "token 2 is 0.5: accepted are 0 and less"),
        ("advantage", [0, None, 0], "the value of token 2 must be a number, got None"),
        ("reward", None, "reward: it is missing"),
        ("reward", [1, 2], "reward: it must be one number, got a list"),
        ("reward", "good", "reward: it must be a number, got 'good'"),
        ("role", 0.5, "role: it must be an integer, got 0.5"),
        ("role", True, "role: it must be an integer, got True"),
        ("pair", -1, "pair: it is -1: accepted are 0 and more"),
        ("id", 0.5, "id: it must be a string or an integer, got 0.5"),
    ],
)
def test_a_wrong_value_is_named_with_its_row_and_column(name, value, said, tmp_path):
    with pytest.raises(ValueError) as caught:
        samples(tmp_path, [{"input_ids": [5, 6, 7], name: value}], name)
    assert f"{tmp_path / 'rows.jsonl'}: line 1: " in str(caught.value)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_column_that_is_not_there_is_named(tmp_path):
    said = r"train\.loss = mine: .* has no column reward, has \['inp"
    with pytest.raises(ValueError, match=said):
        samples(tmp_path, [{"input_ids": [5, 6]}], "reward")


def test_a_list_per_token_needs_rows_that_are_tokens(tmp_path):
    rows = [{"text": "abcd", "weight": [1.0, 2.0]}]
    said = "line 1: weight: a list of numbers needs rows that are to"
    with pytest.raises(ValueError, match=said):
        samples(tmp_path, rows, "weight", tokenizer=Letters(), type="text")


def test_other_columns_are_other_prepared_data(tmp_path):
    rows = [{"input_ids": [5, 6, 7], "reward": 1, "weight": [1, 1, 1]}]
    assert "reward" not in samples(tmp_path, rows).column_names
    assert "weight" not in samples(tmp_path, rows, "reward").column_names
    assert {"reward", "weight"} <= {*samples(tmp_path, rows, "reward", "weight").column_names}


@pytest.mark.parametrize(
    "given, said",
    [
        ([[1.0, 2.0], [1.0]], "weight: sample 1 has 1 values; accepted are 2, one per token"),
        ([[1.0, 2.0], [1.0, -1.0]], "weight: sample 1: -1.0: accepted are 0 and more"),
        ([[1.0, 2.0], [None, 1.0]], "weight: sample 1: nan: accepted are 0 and more"),
        ([1.0, 2.0], "weight: it holds float; accepted is list<item: float>"),
        ([[1.0, 2.0], [3.0, 4.0]], None),
    ],
)
def test_columns_of_a_set_that_was_saved_are_checked(given, said, tmp_path):
    kind, tokens = datasets.Value("float32"), datasets.List(datasets.Value("int64"))
    weights = datasets.List(kind) if isinstance(given[0], list) else kind
    features = datasets.Features(input_ids=tokens, labels=tokens, weight=weights)
    rows = {"input_ids": [[5, 6]] * 2, "labels": [[5, 6]] * 2, "weight": given}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path)
    asked = config(tmp_path, skip_prepare_dataset=True), None, 97
    columns = {"weight": COLUMNS["weight"]}
    if said is None:
        assert prepare_of(*asked, columns=columns)["weight"] == given
        return
    with pytest.raises(ValueError) as caught:
        prepare_of(*asked, columns=columns)
    assert str(caught.value) == f"data.skip_prepare_dataset: {tmp_path}: {said}"


def paired(tmp_path, **fields):
    """Two sets of ten pairs each, whose numbers are the same, prepared and packed."""
    entries = []
    for k in range(2):
        both = itertools.product(range(10), range(2))
        rows = [
            {"input_ids": [100 * k + p + 1] * (2 + p % 3), "pair": p, "role": role}
            for p, role in both
        ]
        entries.append(written(tmp_path / f"{k}.jsonl", rows))
    own = config(tmp_path / "prepared", *entries, **fields)
    columns = {n: COLUMNS[n] for n in ("pair", "role")}
    return own, prepare_of(own, lambda: None, 297, columns=columns), columns


def documents(bins):
    """(first token, role) of each document, bin by bin."""
    return [
        [(int(ids[0]), int(more["role"])) for ids, _, more in bins[i]] for i in range(len(bins))
    ]


def check_pairs(found, *, once=True):
    """Both members of a pair follow each other in one bin."""
    units = []
    for b in found:
        assert len(b) % 2 == 0
        for first, second in zip(b[::2], b[1::2], strict=True):
            assert first[0] == second[0] and (first[1], second[1]) == (0, 1)
            units.append(first[0])
    if once:
        assert len({*units}) == len(units)
    return units


@pytest.mark.parametrize("method", ["sequential", "multipack"])
@pytest.mark.parametrize("packed", [True, False])
def test_pairs_stay_together_whatever_is_shuffled(method, packed, tmp_path):
    own, made, columns = paired(tmp_path, sample_packing_method=method)
    units = check_pairs(documents(Bins(made, own.data, packed=packed, columns=columns)))
    assert sorted(units) == [*range(1, 11), *range(101, 111)]
    assert units != sorted(units), "and are shuffled"


def test_pairs_are_held_out_whole(tmp_path):
    own, made, columns = paired(tmp_path)
    training, held = split_validation(made, 6, 3, columns)
    first = check_pairs(documents(Bins(training, own.data, columns=columns)))
    second = check_pairs(documents(Bins(held, own.data, packed=False, columns=columns)))
    assert len(second) == 6 and sorted([*first, *second]) == [*range(1, 11), *range(101, 111)]


@pytest.mark.parametrize("mixing, count", [("random", 50), ("interleave_over", None)])
def test_pairs_are_mixed_whole(mixing, count, tmp_path):
    fields = {"mixing": mixing, "samples_per_epoch": count, "shuffle_merged_datasets": False}
    own, made, columns = paired(tmp_path, **fields)
    units = check_pairs(documents(Bins(made, own.data, columns=columns)), once=False)
    assert len(units) == (count or 20) and {*units} == {*range(1, 11), *range(101, 111)}


def test_a_set_that_was_saved_without_a_column_has_its_default(tmp_path):
    rows = {"input_ids": [[5, 6], [7, 8, 9]], "labels": [[5, 6], [7, 8, 9]]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path)
    own = config(tmp_path, skip_prepare_dataset=True)
    columns = {"weight": COLUMNS["weight"]}
    made = prepare_of(own, None, 97, columns=columns)
    batch = collate([Bins(made, own.data, columns=columns)[0]], 1, columns=columns)
    assert batch["weight"].tolist() == [[1, 0, 1, 1, 0]]
    with pytest.raises(ValueError, match="has no column reward"):
        prepare_of(own, None, 97, columns={"reward": COLUMNS["reward"]})


def test_a_pair_longer_than_a_bin_is_refused():
    tokens = [[1] * 9] * 3
    bins = datasets.Dataset.from_dict({"input_ids": tokens, "labels": tokens, "pair": [0, 1, 1]})
    said = "documents 1 to 2 of one pair have 18 tokens, a bin holds"
    with pytest.raises(ValueError, match=said):
        Bins(bins, config(UNUSED).data, columns={"pair": COLUMNS["pair"]})


# ---- losses that read them


class Values:
    """A head's values, given."""

    def __init__(self, values):
        self.given = values

    def values(self):
        return self.given


def test_tokens_weigh_what_their_column_says():
    labels = torch.tensor([[3, IGNORE, 5]])
    nll = torch.tensor([[1.0, 0.0, 4.0]], requires_grad=True)
    batch = {"labels": labels, "weight": torch.tensor([[0.5, 9.0, 2.0]])}
    total, denominator = weighted_language_modeling(Values(nll), batch)
    assert total.item() == 8.5 and float(denominator) == 2.5, "not that of an ignored label"
    total.backward()
    assert nll.grad.tolist() == [[0.5, 0.0, 2.0]]


def test_a_run_reads_the_columns_of_its_loss(monkeypatch):
    mine = Loss(lambda *_: (), columns=("labels", "weight", "reward"))
    monkeypatch.setattr(LOSSES, "_rows", LOSSES._rows | {"mine": mine})
    train = config(UNUSED, "p", train={"loss": "mine"}).train
    found = columns_of(train, mine, shape=None, share_prefix=False)
    assert [*found] == ["weight", "reward"]
    assert found["reward"].asked_by == "train.loss = mine"


def test_a_column_that_no_data_can_have_is_refused(monkeypatch):
    losses = {
        "unknown": Loss(lambda *_: (), columns=("labels", "weights")),
        "rewarded": Loss(lambda *_: (), columns=("labels", "reward")),
    }
    monkeypatch.setattr(LOSSES, "_rows", LOSSES._rows | losses)
    config(UNUSED, train={"loss": "weighted_language_modeling"})  # by the column's default
    for loss, said in (
        ("unknown", "reads weights of a batch; columns are input_ids, labels, a"),
        ("rewarded", "reads reward of a batch, which dummy data do not have"),
    ):
        with pytest.raises(ValueError, match=said):
            config(UNUSED, train={"loss": loss})


def test_a_type_may_yield_columns_of_its_own(monkeypatch, tmp_path):
    kind = dataclasses.replace(
        DATASETS["tokenized"],
        samples=lambda asked: lambda row: [([5, 6], [5, 6], {"weight": [0.5, 2]})],
        yields=("weight",),
    )
    monkeypatch.setattr(DATASETS, "_rows", DATASETS._rows | {"own": kind})
    found = samples(tmp_path, [{"input_ids": [1, 2]}], "weight", type="own")
    assert found["weight"] == [[0.5, 2]]
    silent = dataclasses.replace(kind, yields=())
    monkeypatch.setattr(DATASETS, "_rows", DATASETS._rows | {"own": silent})
    with pytest.raises(ValueError, match="a sample has weight, which its type does not say it yie"):
        samples(tmp_path / "more", [{"input_ids": [1, 2, 3]}], "weight", type="own")
