"""The engine driven by hand, step by step, gives the bits of a whole run."""

import copy
import dataclasses
import gc
import json
import logging
import math
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from helpers import DEVICE, processes
from training import engine_of, make_bins, rows, run, shape_of, write_config
from whole import data_of, identity_of, parts_of

from tilewright.nn.sharded import whole
from tilewright.trainer.checkpoint import checkpoint
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.config import load
from tilewright.trainer.data.batches import collate, evaluation_batches
from tilewright.trainer.engine import NotFinite, Sums
from tilewright.trainer.losses.language_modeling import language_modeling
from tilewright.trainer.losses.loss import count_labels
from tilewright.trainer.memory_plan import NoCopies
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.ops_choice import Ops
from tilewright.trainer.optim.row import OPTIMIZERS
from tilewright.trainer.parallel import offload
from tilewright.trainer.parallel.apply import apply_layouts
from tilewright.trainer.parallel.mesh import Mesh, build, join
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.plan import Plan
from tilewright.trainer.plugins.callback import Step
from tilewright.trainer.plugins.housekeeping import Housekeeping


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
        data, sets = data_of(config, Mesh())
        [held] = sets.values()
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
    belongs = identity_of(config, shape_of(config), data)
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


def test_numbers_are_on_their_way_before_the_optimizer_steps(monkeypatch):
    """On a GPU a copy that is asked for later waits for the optimizer, and the device then for the
    next batch.
    """
    happened = []

    class OnDevice:
        is_cuda = True

        def __init__(self, *values):
            self.host = torch.tensor(values)

        def to(self, device, non_blocking):
            happened.append((device, non_blocking))
            return self.host

    class Event:
        def record(self):
            happened.append("recorded")

        def synchronize(self):
            happened.append("waited")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    sums = Sums(OnDevice(6.0, 2.0, 4.0), [], OnDevice([1.0, 3.0, 0.5, 0.25]), 1, ("reward",))
    assert happened == [("cpu", True), "recorded"] * 2
    assert (sums.mean, sums.denominator, sums.reported()) == (3.0, 2.0, {"reward": 2.0})
    assert sums.router()["expert_load"] == 1.5
    assert happened[4:] == ["waited"] * 4


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="what a CUDA device does at the same time")
def test_numbers_do_not_wait_for_what_a_device_does_next():
    sums, done = Sums(torch.tensor([6.0, 2.0], device="cuda").double(), []), torch.cuda.Event()
    torch.cuda._sleep(2**31)  # cycles, a second
    done.record()
    assert sums.mean == 3.0 and not done.query()
    torch.cuda.synchronize()


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


def weighing(total):
    """A loss whose weights, which follow the tokens, sum to `total` over the first six bins."""
    everything = sum(_raw(batch).sum() for batch in micro_batches()[:3])

    def loss(per_token, batch):
        weight = _raw(batch) * (total / everything)
        return (per_token.values() * weight.to(per_token.values().dtype)).sum(), weight.sum()

    return loss


def _raw(batch):
    return torch.where(batch["labels"] == IGNORE, 0.0, 1.0 + batch["input_ids"] % 5).double()


def weighted_step(config, ranks, total):
    """Loss, norm and gradients of a step of three micro-batches per rank, on the first six bins."""
    engine, size = engine_of(config, ranks), 2 // ranks.layout.data
    bins = make_bins()
    starts = ((a * ranks.layout.data + ranks.batch_rank) * size for a in range(3))
    sums = engine.forward_backward(
        [collate(bins[i : i + size], 8) for i in starts], weighing(total)
    )
    norm = float(engine.divide())
    named = engine.model.named_parameters()
    return sums.mean, norm, {name: whole(p.grad) for name, p in named}


def _weighted_rank(rank, world, folder, port):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    ranks = None
    for mode in ("ddp", "fsdp2"):
        config = load(f"{folder}/config.yaml", [f"--train.data_parallel_mode={mode}"])
        again = ranks is not None
        ranks = build(config.train, rank, world, ranks.device) if again else join(config.train)
        for total in (0.0, 0.3):
            found = weighted_step(config, ranks, total)
            if rank == 0:
                torch.save(found, f"{folder}/{mode}_{total}.pt")


def test_a_step_is_divided_by_the_sum_of_its_weights_however_small(tmp_path):
    """0.3, and 0: against float64, in one process and in two, three micro-batches per rank."""
    config = load(write_config(tmp_path))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    processes(2, _weighted_rank, str(tmp_path), store.port)
    eager = Ops(**{f.name: "eager" for f in dataclasses.fields(Ops) if f.name != "numerics"})
    model = parts_of(config, shape_of(config), Mesh(), eager).model.double()
    total = 0.0
    for batch in micro_batches()[:3]:
        places = {k: batch[k] for k in ("position_ids", "cu_seqlens")}
        scores = model(batch["input_ids"], **places)[0].log_softmax(-1)
        label = batch["labels"][0].clamp_min(0)[:, None]
        total = total - (scores.gather(1, label)[:, 0] * _raw(batch)[0]).sum()
    mean = total / sum(_raw(batch).sum() for batch in micro_batches()[:3])
    mean.backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    norm = float(torch.nn.utils.get_total_norm(want.values()))
    for mode in ("none", "ddp", "fsdp2"):
        alone = mode == "none"
        loss, found_norm, gradients = (
            weighted_step(config, Mesh(), 0.3) if alone else torch.load(tmp_path / f"{mode}_0.3.pt")
        )
        assert loss == pytest.approx(mean.item(), rel=1e-6), mode
        assert found_norm == pytest.approx(norm, rel=1e-5), mode
        for name, gradient in gradients.items():
            # float32 against float64
            assert (gradient - want[name]).abs().max() <= 1e-5 * want[name].abs().max(), (
                mode,
                name,
            )
        loss, found_norm, gradients = (
            weighted_step(config, Mesh(), 0.0) if alone else torch.load(tmp_path / f"{mode}_0.0.pt")
        )
        assert math.isnan(loss) and found_norm == 0, mode
        assert not any(g.any() for g in gradients.values()), mode


@pytest.mark.parametrize("optimizer", OPTIMIZERS.names())
def test_a_step_without_labels_has_no_effect_and_is_counted(optimizer, tmp_path):
    """Weight decay included, also where moments would move weights."""
    ignored = "weight_decay" in OPTIMIZERS[optimizer].ignores
    given = [f"--train.optimizer={optimizer}", f"--train.weight_decay={0 if ignored else 0.5}"]
    engine = engine_of(load(write_config(tmp_path), given))
    engine.forward_backward(micro_batches(), language_modeling)
    assert engine.optim_step() > 0 and engine.empty_steps == 0
    before = [p.detach().clone() for p in engine.parameters]
    state = copy.deepcopy(engine.optimizer.state_dict())
    [batch] = micro_batches(8)
    batch["labels"].fill_(IGNORE)
    assert math.isnan(engine.forward_backward([batch], language_modeling).mean)
    assert engine.optim_step(max_norm=1.0) == 0 and engine.empty_steps == 1
    assert all(torch.equal(p, b) for p, b in zip(engine.parameters, before, strict=True))
    for i, moments in engine.optimizer.state_dict()["state"].items():
        for name, value in moments.items():
            value, earlier = (torch.as_tensor(v) for v in (value, state["state"][i][name]))
            assert torch.equal(value, earlier)
    assert math.isnan(engine.evaluate([batch], language_modeling))
    # It still shows a loss that is not finite.
    engine.forward_backward(
        [batch], lambda per_token, _: (per_token.sum() + math.nan, torch.zeros(()))
    )
    with pytest.raises(NotFinite, match="loss is nan"):
        engine.optim_step()


def test_a_run_counts_steps_without_labels_and_goes_on(tmp_path, capsys):
    """Steps of one bin, every other one without a label; and the run is compared with itself."""
    documents = [
        {"input_ids": [1 + i] * 32, "labels": [5 if i % 2 else IGNORE] * 32} for i in range(6)
    ]
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in documents))
    path = write_config(
        tmp_path,
        data__datasets=[{"path": str(data)}],
        data__shuffle_merged_datasets=False,
        data__shuffle_before_merging_datasets=False,
        train__weight_decay=0.5,
        train__checksum_steps=1,
    )
    run(path)
    found = rows(tmp_path)
    assert [r.get("empty_steps") for r in found] == [1, None, 2, None, 3, None]
    assert ["loss" in r for r in found] == [False, True] * 3
    said = capsys.readouterr().out
    assert said.count("step 1: no token of it has a label, so no weight has changed") == 1
    assert "3 of 6 steps had no label, and no effect" in said
    sums = (tmp_path / "out/checksums.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in sums] == [2, 4, 6]
    again = f"--train.output_dir={tmp_path / 'again'}"
    run(path, again, f"--train.assert_deterministic={tmp_path / 'out'}")
    assert "deterministic: 6 steps are bit-identical" in capsys.readouterr().out


def test_a_part_of_the_data_without_a_target_starts_no_run(tmp_path):
    """One of two samples has a label; one is held out."""
    said = set()
    for labeled in range(2):
        folder = tmp_path / str(labeled)
        folder.mkdir()
        labels = [[i, i, i] if i == labeled else [IGNORE] * 3 for i in range(2)]
        rows = [{"input_ids": [1, 2, 3], "labels": each} for each in labels]
        data = folder / "a.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {"data__val_set_size": 0.5, "data__datasets": [{"path": str(data)}]}
        with pytest.raises(ValueError, match="none of the 1 samples has a label") as raised:
            run(write_config(folder, **options))
        said.add(str(raised.value).partition(":")[0])
    assert said == {"the data sets to train on", "the data set to evaluate on, held_out"}


def test_optimizers_have_the_settings_that_are_documented(tmp_path):
    path = write_config(tmp_path)
    adam, sgd = (
        engine_of(load(path, [f"--train.optimizer={name}"])).optimizer for name in ("adamw", "sgd")
    )
    settings = {"betas": (0.9, 0.95), "eps": 1e-8, "fused": True, "amsgrad": False}
    assert isinstance(adam, torch.optim.AdamW) and settings.items() <= adam.defaults.items()
    assert isinstance(sgd, torch.optim.SGD) and sgd.defaults["momentum"] == 0


@pytest.mark.parametrize(
    "what, denominator, error, said",
    [
        ("loss", None, NotFinite, "loss is inf"),
        ("gradient", None, NotFinite, "gradients is inf"),
        ("denominator", -0.5, ValueError, "denominator must be at least 0, got -0.5"),
        ("denominator", math.nan, NotFinite, "denominator is nan"),
        ("denominator", math.inf, NotFinite, "denominator is inf"),
    ],
)
def test_what_is_not_finite_changes_no_weight(what, denominator, error, said, tmp_path):
    engine = engine_of(load(write_config(tmp_path)))
    before = [p.detach().clone() for p in engine.parameters]

    def overflows(per_token, batch):
        return per_token.sum() + math.inf, count_labels(batch)

    engine.forward_backward(micro_batches(), overflows if what == "loss" else language_modeling)
    if what == "gradient":
        engine.parameters[0].grad[0, 0] = math.inf
    with pytest.raises(error, match=said):
        engine.optim_step(max_norm=1.0, denominator=denominator)
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
    """All weights of runs with different seeds differ; those of equal seeds do not."""
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
    config, collected = load(write_config(tmp_path, train__gc_steps=2)), []
    keeper = Housekeeping(SimpleNamespace(config=config, mesh=Mesh()))
    monkeypatch.setattr(gc, "collect", lambda: collected.append(gc.isenabled()))
    with keeper.running():
        assert collected == [True] and not gc.isenabled()
        for done in range(1, 5):
            keeper.after_step(Step(done, []))
    assert collected == [True, False, False] and gc.isenabled()


def test_offload_is_a_layout_like_the_others(tmp_path, monkeypatch):
    """Refused on a CPU, where it moves nothing: here with copies that move nothing."""
    monkeypatch.setattr(offload, "StreamCopies", NoCopies)
    config = load(write_config(tmp_path))
    train = config.train.model_copy(update={"enable_activation_offload": True})
    parts = Parts(Transformer(shape_of(config), Ops.resolve()))
    forward = parts.model.model.layers[0].forward
    made = apply_layouts(parts, {**dict(config), "train": train}, Mesh(), filled=False)
    assert made is parts and parts.model.model.layers[0].forward != forward
