"""The engine driven by hand, step by step, gives the bits of a whole run."""

import gc
import logging
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from test_trainer import QWEN3, engine_of, make_bins, rows, run, shape_of, write_config

from tilewright.trainer import checkpoint
from tilewright.trainer.batches import collate, evaluation_batches
from tilewright.trainer.build import build_data, identity
from tilewright.trainer.config import load
from tilewright.trainer.engine import NotFinite
from tilewright.trainer.housekeeping import Housekeeping
from tilewright.trainer.loss import IGNORE, count_labels, language_modeling
from tilewright.trainer.mesh import Mesh, join
from tilewright.trainer.plan import Plan


def micro_batches(size=2):
    bins = make_bins()
    return [collate(bins[i : i + size], 8) for i in range(0, len(bins), size)]


def test_an_engine_by_hand_gives_the_bits_of_the_loop(tmp_path, caplog):
    """Five steps of two micro-batches, evaluated, saved after three and loaded by another
    engine.
    """
    options = {
        "train__max_steps": 5,
        "train__gradient_accumulation_steps": 2,
        "train__lr_decay_style": "cosine",
        "train__lr_warmup_ratio": 0.4,
        "train__max_grad_norm": 0.5,
        "train__weight_decay": 0.1,
        "data__val_set_size": 4,
        "train__save_hf_weights": False,
    }
    path = write_config(tmp_path / "loop", **options)
    run(path)
    config, t = load(path), load(path).train
    with caplog.at_level(logging.INFO, "tilewright"):
        data, held = build_data(config, Mesh(), 97)
    full = 100 * sum(data.bins.lengths) / (32 * len(data.bins))
    assert f"packing: {len(data.bins)} bins, {full:.1f} % full" in caplog.messages
    plan, steps, found = Plan(t, data.steps_per_epoch), data.steps(), []
    first = engine_of(config)
    saver = checkpoint.Saver(str(tmp_path / "hand"), Mesh(), False)

    def evaluate(engine, step):
        loss = engine.evaluate(evaluation_batches(held, 1, 0, 1), language_modeling)
        found.append({"step": step, "eval_loss": loss})

    def take(engine, step):
        # One call per micro-batch: a step does not depend on how it is split.
        calls = [engine.forward_backward([batch], language_modeling) for batch in next(steps)]
        norm = engine.optim_step(plan.factor(step), t.max_grad_norm)
        totals = sum(sums.totals for sums in calls)
        found.append({"step": step + 1, "loss": float(totals[0] / totals[1]), "grad_norm": norm})

    evaluate(first, 0)
    for step in range(3):
        take(first, step)
    belongs = identity(config, shape_of(config), data)
    state = {"data": data.state_dict(), "tokens": data.tokens, "run": belongs, "ops": {}}
    folder = first.save(saver, 3, state)
    drawn, again = torch.rand(3), engine_of(config)
    assert again.load([folder], belongs, {})[1]["data"] == data.state_dict()
    assert torch.equal(torch.rand(3), drawn)  # random states come from the checkpoint
    for step in range(3, 5):
        take(again, step)
    evaluate(again, 5)
    want = [{k: r[k] for k in one} for one, r in zip(found, rows(tmp_path / "loop"), strict=True)]
    assert found == want
    again.export(tmp_path / "hf")
    assert (tmp_path / "hf/model.safetensors").is_file()


def test_gradients_do_not_depend_on_how_a_step_is_called(tmp_path):
    config = load(write_config(tmp_path))
    whole, parts = engine_of(config), engine_of(config)
    sums = whole.forward_backward(micro_batches(), language_modeling)
    for batch in micro_batches():
        parts.forward_backward([batch], language_modeling)
    assert sums.denominator == sum(int(count_labels(b)) for b in micro_batches())
    assert float(whole.divide()) == float(parts.divide())
    for a, b in zip(whole.parameters, parts.parameters, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_loss_of_values_is_the_loss_of_the_sum_and_weighs_tokens(tmp_path):
    """Per-token values, with gradients, and their results; a custom denominator."""
    config = load(write_config(tmp_path))
    fused, plain, halves = (engine_of(config) for _ in range(3))

    def values(per_token, batch):
        return per_token.values().sum(), count_labels(batch)

    def weighted(per_token, batch):
        return (per_token.values() * batch["weight"]).sum(), batch["weight"].sum()

    batches = micro_batches()
    a, b = (
        fused.forward_backward(batches, language_modeling),
        plain.forward_backward(batches, values),
    )
    assert a.per_token == [None] * len(batches) and a.mean == pytest.approx(b.mean, rel=1e-6)
    for batch, value in zip(batches, b.per_token, strict=True):
        assert value.shape == batch["labels"].shape and not value.requires_grad
        assert ((value > 0) == (batch["labels"] != IGNORE)).all()
    fused.divide(), plain.divide()
    for p, q in zip(fused.parameters, plain.parameters, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-7)
    for batch in batches:
        batch["weight"] = torch.full(batch["labels"].shape, 0.5)
    c = halves.forward_backward(batches, weighted)
    assert c.denominator == sum(b["labels"].numel() for b in batches) / 2
    norm = float(halves.divide(a.denominator / 2))
    assert norm == pytest.approx(float(plain.divide(1.0)), rel=1e-5)


def test_forward_leaves_no_gradient_and_zero_forgets_them(tmp_path):
    engine = engine_of(load(write_config(tmp_path)))
    mean = engine.forward(micro_batches(), language_modeling).mean
    assert mean == pytest.approx(math.log(97), abs=0.1)
    assert all(p.grad is None for p in engine.parameters)
    with pytest.raises(ValueError, match="there is no gradient: call forward_backward first"):
        engine.optim_step()
    engine.forward_backward(micro_batches(), language_modeling)
    engine.zero()
    assert all(p.grad is None for p in engine.parameters)
    with pytest.raises(ValueError, match="there is no gradient"):
        engine.optim_step()
    engine.forward_backward(micro_batches(), language_modeling)
    assert engine.optim_step() > 0
    assert all(p.grad is None for p in engine.parameters)


def test_a_step_without_labels_is_a_step_of_zero(tmp_path):
    engine = engine_of(load(write_config(tmp_path)))
    [batch] = micro_batches(8)
    batch["labels"].fill_(IGNORE)
    assert engine.forward_backward([batch], language_modeling).mean == 0
    assert engine.optim_step() == 0 and all(p.isfinite().all() for p in engine.parameters)


def test_optimizers_have_the_settings_that_are_documented(tmp_path):
    path = write_config(tmp_path)
    adam, sgd = (
        engine_of(load(path, [f"--train.optimizer={name}"])).optimizer for name in ("adamw", "sgd")
    )
    settings = {"betas": (0.9, 0.95), "eps": 1e-8, "fused": True, "amsgrad": False}
    assert type(adam) is torch.optim.AdamW and settings.items() <= adam.defaults.items()
    assert type(sgd) is torch.optim.SGD and sgd.defaults["momentum"] == 0


@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_what_is_not_finite_changes_no_weight(what, tmp_path):
    engine = engine_of(load(write_config(tmp_path, QWEN3)))
    before = [p.detach().clone() for p in engine.parameters]

    def overflows(per_token, batch):
        return per_token.sum() + math.inf, count_labels(batch)

    engine.forward_backward(micro_batches(), overflows if what == "loss" else language_modeling)
    if what == "gradient":
        engine.parameters[0].grad[0, 0] = math.inf
    with pytest.raises(NotFinite, match="loss is inf" if what == "loss" else "gradients is inf"):
        engine.optim_step(max_norm=1.0)
    assert all(torch.equal(p, b) for p, b in zip(engine.parameters, before, strict=True))
    assert not engine.optimizer.state


def test_gradients_are_exchanged_in_the_last_micro_batch_alone(tmp_path, monkeypatch):
    calls = []
    real = FSDPModule.set_requires_gradient_sync

    def recorded(self, exchange, **more):
        calls.append(exchange)
        real(self, exchange, **more)

    monkeypatch.setattr(FSDPModule, "set_requires_gradient_sync", recorded)
    config = load(write_config(tmp_path, train__data_parallel_mode="fsdp2"))
    ranks = join(config.train)
    try:
        engine_of(config, ranks).forward_backward(micro_batches(4), language_modeling)
    finally:
        dist.destroy_process_group()
    assert calls == [False, True]


def test_weights_and_adapters_start_from_the_seed(tmp_path):
    """Of runs with different seeds all weights differ; of equal ones none does."""
    path = write_config(tmp_path, lora__enable_lora=True)
    first, again, other = (
        dict(engine_of(load(path, [f"--train.seed={seed}"])).model.named_parameters())
        for seed in (1, 1, 2)
    )
    drawn = {n for n, p in first.items() if not n.endswith(("norm.weight", "lora_B"))}
    assert {n for n in drawn if "lora_A" in n} and len(drawn) > len(first) / 3
    for name, p in first.items():
        assert torch.equal(p, again[name]) and torch.equal(p, other[name]) == (name not in drawn)


def test_garbage_is_collected_at_the_start_and_between_steps_only(tmp_path, monkeypatch):
    train, collected = load(write_config(tmp_path, train__gc_steps=2)).train, []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(gc.isenabled()))
    with Housekeeping(train, Mesh()).running() as keeper:
        assert collected == [True] and not gc.isenabled()
        for done in range(1, 5):
            keeper.after(done)
    assert collected == [True, False, False] and gc.isenabled()
