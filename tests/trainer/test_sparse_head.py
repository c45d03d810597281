"""`train.sparse_head`: tokens without a label leave before the head."""

import distributed_worker
import numpy as np
import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("datasets")

from ranks import fsdp2, run_modes
from training import MOE, engine_of, write_config
from whole import planned

from tilewright import ops as tw
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.config import ConfigError, load
from tilewright.trainer.losses.language_modeling import language_modeling
from tilewright.trainer.models import head
from tilewright.trainer.models.head import Around, TokenLosses, labeled_rows
from tilewright.trainer.models.ops_choice import Numerics, Ops
from tilewright.trainer.parallel.mesh import Mesh

pytestmark = pytest.mark.packages
B, S, H, V = 2, 150, 16, 40


def labels_of(share, seed=0):
    """Labels [B, S] of which a share is there."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(V, (B, S), generator=generator)
    return labels.masked_fill(torch.rand(B, S, generator=generator) > share, IGNORE)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 0.6])
def test_rows_with_a_label_are_all_there(share):
    labels = labels_of(share)
    rows, n = labeled_rows(labels), int((labels != IGNORE).sum())
    assert len(rows) == max(1, -(-n // 128)) * 128
    assert rows.diff().gt(0).all() and rows[0] >= 0 and rows[-1] < B * S
    assert (labels.flatten()[rows] != IGNORE).sum() == n


def test_nothing_is_left_out_where_it_would_not_help():
    assert labeled_rows(labels_of(1.0)) is None
    assert labeled_rows(labels_of(0.9)) is None  # 270 labels: three times 128 rows are more
    assert labeled_rows(labels_of(0.5)[:, :32]) is None


# ---- each thing that a loss reads


def policy(losses, g):
    tokens = {n: torch.randn(B, S, generator=g) for n in ("advantage", "old_logprob")}
    tokens["old_logprob"] = -tokens["old_logprob"].abs()
    total, logprob = losses.policy(tw.PPO(clip=0.2), **tokens)
    return total, logprob


def listed(losses, g):
    ids = torch.stack([torch.randperm(V, generator=g)[:3] for _ in range(B * S)]).view(B, S, 3)
    own = losses.listed(ids, 1.5)
    there = labels_of(0.3) != IGNORE
    return (own.logprobs[there].sum() + 2 * own.others[there].sum() + own.label[there].sum(),)


READ = {
    "sum": lambda losses, _: (losses.sum(),),
    "values": lambda losses, g: (
        (losses.values() * torch.rand(B, S, generator=g)).sum(),
        losses.values(),
    ),
    "policy": policy,
    "listed": listed,
}


@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch_invariant"])
@pytest.mark.parametrize("what", READ)
def test_losses_and_gradients_are_those_of_all_rows(what, invariant, monkeypatch):
    if invariant and what == "policy":
        pytest.skip("with batch_invariant the head computes no policy loss")
    labels = labels_of(0.3)
    numerics = Numerics(batch_invariant=invariant)
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(B, S, H, generator=g), torch.randn(V, H, generator=g) / 4
    got, rows = {}, []
    in_autocast = head.in_autocast
    monkeypatch.setattr(
        head, "in_autocast", lambda *t: (rows.append(t[0].numel() // H), in_autocast(*t))[1]
    )
    for labeled in (None, labeled_rows(labels)):
        x, w = (t.clone().requires_grad_() for t in (hidden, weight))
        around = Around(Ops.resolve(numerics=numerics, experts=False), labeled=labeled)
        read = READ[what](TokenLosses(x, w, labels, around), torch.Generator().manual_seed(2))
        read[0].backward()
        got[labeled is None] = (*read, x.grad, w.grad)
    assert {*rows} == {B * S, 128}
    for one, all_rows in zip(got[False], got[True], strict=True):
        torch.testing.assert_close(one, all_rows, rtol=1e-5, atol=2e-6)
    assert not got[False][-2][labels == IGNORE].any()


def test_scores_are_those_of_all_rows():
    """An evaluation reads them; and what asks for every token gets it."""
    labels, g = labels_of(0.3), torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(B, S, H, generator=g), torch.randn(V, H, generator=g) / 4
    some, every = (
        TokenLosses(hidden, weight, labels, Around(Ops.resolve(), labeled=rows))
        for rows in (labeled_rows(labels), None)
    )
    for one, all_rows in zip(some.statistics(), every.statistics(), strict=True):
        torch.testing.assert_close(one, all_rows, rtol=1e-5, atol=1e-6)
    for one, all_rows in zip(some.most_probable(3), every.most_probable(3), strict=True):
        assert torch.equal(one, all_rows)
    chosen = labels == IGNORE
    assert torch.equal(some.logits_of(chosen), every.logits_of(chosen))


# ---- runs

MODES = {
    "train_fsdp2": fsdp2(sparse_head=True),
    "train_tensor": fsdp2(sparse_head=True, tensor_parallel_size=2),
    "train_ulysses": fsdp2(sparse_head=True, ulysses_parallel_size=2),
    "train_pipeline": fsdp2(
        sparse_head=True, pipeline_parallel_size=2, gradient_accumulation_steps=2
    ),
}


def bins_with_prompts():
    """Bins of one document of 256 tokens, of which some are answers; one has none."""
    rng, bins = np.random.default_rng(3), []
    for answers in (40, 150, 0, 90):
        ids = rng.integers(0, 97, 256)
        labels = ids.copy()
        labels[answers:] = IGNORE
        bins.append([(ids, labels)])
    return bins


def test_ranks_train_as_without(tmp_path, monkeypatch):
    """Ranks of one sequence leave out as many rows as each has."""
    shape = {**MOE, "vocab_size": 98, "max_position_embeddings": 256}
    given = {"data__sample_packing_sequence_len": 256, "train__max_steps": 2, "train__lr": 1e-3}
    path = write_config(tmp_path, shape, model__merge_qkv=False, **given)
    torch.save(bins_with_prompts(), tmp_path / "bins.pt")
    run_modes(2, tmp_path, MODES)
    alone = {}
    for accumulated in (1, 2):
        config = load(path, [f"--train.gradient_accumulation_steps={accumulated}"])
        assert not engine_of(config).parts.sparse_head
        _, alone[accumulated] = distributed_worker.several_steps(
            config, Mesh(), bins_with_prompts()
        )
    for mode in MODES:
        wanted = alone[1 if mode in ("train_tensor", "train_ulysses") else 2]
        found = torch.load(tmp_path / f"{mode}.pt")
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5), mode
        for name, grad in wanted["grads"].items():
            assert (found["grads"][name] - grad).abs().max() <= 2e-5 * grad.abs().max(), name


def test_the_head_computes_as_many_rows_as_there_are_labels(tmp_path, monkeypatch):
    path = write_config(tmp_path, data__sample_packing_sequence_len=256)
    rows, computes = [], tw.linear_cross_entropy
    monkeypatch.setattr(
        tw,
        "linear_cross_entropy",
        lambda x, *rest, **more: (rows.append(x.shape[:2]), computes(x, *rest, **more))[1],
    )
    engine = engine_of(load(path, ["--train.sparse_head=true"]))
    batches = distributed_worker.micro_batches(
        load(path, ["--train.gradient_accumulation_steps=4"]), Mesh(), bins_with_prompts()
    )
    engine.forward_backward(batches, language_modeling)
    assert rows == [(1, 128), (1, 256), (1, 128), (1, 128)]


def test_a_head_of_scores_has_no_labels_to_read():
    least = ["--train.output_dir=-", "--model.config_path=-", "--train.loss=reward"]
    least += ['--data.datasets=[{"path": "-", "type": "preference"}]']
    with pytest.raises(ConfigError, match=r"sparse_head.*one number for each document"):
        load(None, [*least, "--train.sparse_head=true"])


def test_a_plan_has_bins_in_which_each_token_has_a_label(tmp_path):
    """The head's memory is at most that."""
    path = write_config(tmp_path)
    plans = [planned(load(path, [f"--train.sparse_head={on}"]), 1) for on in ("false", "true")]
    assert plans[0].total == plans[1].total
