"""Muon and AdamW with states in float32 or bfloat16, in one process: torch's optimizers, the parts
of merged projections, experts, bfloat16; schedules. (Under every layout: test_trainer.py.)
"""

import math
import shutil

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("datasets")

from training import MOE, QWEN3, rows, run, schedule, write_config

from tilewright.trainer import engine
from tilewright.trainer.models.initialize import init_weights
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.ops_choice import Ops
from tilewright.trainer.optim import optim
from tilewright.trainer.optim.matrices import Parts, matrices
from tilewright.trainer.optim.muon import Muon, Settings, adjustment
from tilewright.trainer.plan import Plan


def parameters(*shapes, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=g).to(dtype)) for s in shapes]


def gradients(params, seed):
    g = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g).to(p.dtype)


def trained(params, optimizer, steps=4):
    for step in range(steps):
        gradients(params, step + 1)
        optimizer.step()
    return params


def group(params, **options):
    return [{"params": params, "lr": 0.02, "weight_decay": 0.1, **options}]


SHAPES = [(24, 16), (16, 48), (20, 20)]


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_is_torchs_muon(adjust, nesterov):
    """Which multiplies in bfloat16: the same to its rounding, and the same momentum."""
    ours, theirs = parameters(*SHAPES), parameters(*SHAPES)
    settings = Settings(
        products=torch.bfloat16, momentum=0.9, nesterov=nesterov, steps=4, adjust=adjust
    )
    muon = Muon(group(ours), settings, dict.fromkeys(ours, Parts()))
    options = {"momentum": 0.9, "nesterov": nesterov, "ns_steps": 4, "adjust_lr_fn": adjust}
    torchs = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, **options)
    start = [p.detach().clone() for p in ours]
    trained(ours, muon)
    trained(theirs, torchs)
    for p, q, before in zip(ours, theirs, start, strict=True):
        assert (p - q).norm() < 0.03 * (q - before).norm()
        torch.testing.assert_close(muon.state[p], torchs.state[q])


def test_states_of_everything_else_may_be_in_bfloat16():
    """Those of AdamW; test_each_group_decays_by_its_own_rate has them in float32."""
    ours, theirs = parameters((5, 3), (7,)), parameters((5, 3), (7,))
    muon = Muon(group(ours), Settings(betas=(0.8, 0.9), eps=1e-6, states=torch.bfloat16))
    torchs = torch.optim.AdamW(theirs, lr=0.02, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)
    start = [p.detach().clone() for p in ours]
    trained(ours, muon)
    trained(theirs, torchs)
    for p, q, before in zip(ours, theirs, start, strict=True):
        assert 1e-5 < (p - q).norm() / (q - before).norm() < 2e-2
        assert all(muon.state[p][k].dtype == torch.bfloat16 for k in ("exp_avg", "exp_avg_sq"))
        assert "compensation" not in muon.state[p]


@pytest.mark.parametrize("order", ["adamw first", "muon first"])
def test_each_group_decays_by_its_own_rate(order):
    """Both kinds of groups in one optimizer, each with decay and without, against torch's."""
    ours, theirs = parameters(*SHAPES, *SHAPES), parameters(*SHAPES, *SHAPES)
    rates = [(0.02, 2.0), (0.02, 0.0), (1e-3, 3.0), (1e-3, 0.0)]
    owners = [[0], [1, 2], [3], [4, 5]]
    groups = [
        {"params": [ours[i] for i in own], "lr": lr, "weight_decay": decay}
        for own, (lr, decay) in zip(owners, rates, strict=True)
    ]
    matrices = dict.fromkeys(ours[:3], Parts())
    settings = Settings(betas=(0.8, 0.9), products=torch.bfloat16, momentum=0.9)
    muon = Muon(groups if order == "muon first" else groups[::-1], settings, matrices)
    torchs = []
    for own, (lr, decay) in zip(owners, rates, strict=True):
        tensors = [theirs[i] for i in own]
        torchs.append(
            torch.optim.Muon(tensors, lr=lr, weight_decay=decay, momentum=0.9)
            if own[0] < 3
            else torch.optim.AdamW(tensors, lr=lr, weight_decay=decay, betas=(0.8, 0.9))
        )
    start = [p.detach().clone() for p in ours]
    for step in range(4):
        for tensors in (ours, theirs):
            gradients(tensors, step + 1)
        for optimizer in (muon, *torchs):
            optimizer.step()
    for i, (p, q, before) in enumerate(zip(ours, theirs, start, strict=True)):
        # Muon's products are in bfloat16; AdamW's steps are a hundredth of its parameters.
        assert (p - q).norm() < (0.03 if i < 3 else 1e-4) * (q - before).norm(), i
        if i >= 3:
            assert all(muon.state[p][k].dtype == torch.float32 for k in ("exp_avg", "exp_avg_sq"))


def test_parameters_in_bfloat16_are_compensated():
    """Steps far below the last place add up."""
    start = torch.full((64,), 1.0, dtype=torch.bfloat16)
    p = torch.nn.Parameter(start.clone())
    muon = Muon([{"params": [p], "lr": 1e-4, "weight_decay": 0.0}], Settings())
    for _ in range(50):
        p.grad = torch.ones_like(p)
        muon.step()
    moved = 1 - (p.double() + muon.state[p]["compensation"].double())
    torch.testing.assert_close(moved, torch.full_like(moved, 50e-4), rtol=0.05, atol=0)


def model_of(shape, **options):
    model = Transformer(ModelConfig.from_hf(shape), Ops.resolve())
    init_weights(model, 0)
    train = schedule(
        optimizer="muon", optimizer_dtype="fp32", enable_mixed_precision="false", **options
    )
    return model, optim.build_optimizer(model, train), train


@pytest.mark.parametrize("shape", [QWEN3, MOE, {**QWEN3, "tie_word_embeddings": False}])
def test_hidden_matrices_are_muons_and_the_rest_is_adamws(shape):
    """(The rates and decays of both: test_optimizers.py.)"""
    model, muon, _ = model_of(shape)
    names = {p: n for n, p in model.named_parameters()}
    hidden = {n for n in names.values() if "proj" in n}
    assert {names[p] for p in muon.matrices} == hidden
    assert hidden and not any("gate.weight" in n or "embed" in n or "head" in n for n in hidden)


@pytest.mark.parametrize("shape", [QWEN3, MOE], ids=["dense", "experts"])
def test_merged_projections_and_experts_are_orthogonalized_one_by_one(shape):
    """One step from zero momentum, against the singular value decomposition of each part."""
    model, muon, train = model_of(
        shape, muon_ns_steps=9, muon_ns_coefficients="polar_express", weight_decay=0
    )
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    gradients(model.parameters(), 7)
    muon.step()
    counts = model.config.num_attention_heads, *[model.config.num_key_value_heads] * 2
    heads = [count * model.config.head_dim for count in counts]
    for name, p in model.named_parameters():
        if "proj" not in name:
            continue
        moved = (before[name] - p.detach()).double() / train.muon_lr
        sizes = heads if "qkv" in name else [p.shape[-2]]
        if "gate_up" in name:
            sizes = [p.shape[-2] // 2] * 2
        for part, g in zip(moved.split(sizes, -2), p.grad.double().split(sizes, -2), strict=True):
            u, _, vh = torch.linalg.svd(g, full_matrices=False)
            factor = adjustment("original", *g.shape[-2:])
            torch.testing.assert_close(part, factor * u @ vh, rtol=0, atol=3e-5)


def test_adjustments():
    found = [adjustment("original", a, b) for a, b in ((16, 4), (4, 16))]
    found += [adjustment("match_rms_adamw", a, b) for a, b in ((25, 4), (4, 25))]
    assert found == [2.0, 1.0, 1.0, 1.0]


def test_parts_in_blocks():
    """As tensor parallelism may lay them out: every rank's share of each part together."""
    rows = torch.tensor([[0.0], [1], [10], [2], [3], [11]])
    parts = Parts((4, 2), blocks=2)
    a, b = parts.split(rows)
    assert a.flatten().tolist() == [0, 1, 2, 3] and b.flatten().tolist() == [10, 11]
    assert torch.equal(parts.join([a, b]), rows)


def test_matrices_of_one_shape_may_have_other_parts():
    """The dense model's gate_up_proj gets the shape of its qkv_proj."""
    model, muon, _ = model_of({**QWEN3, "intermediate_size": 32})
    layer = model.model.layers[0]
    merged, gate_up = layer.self_attn.qkv_proj.weight, layer.mlp.gate_up_proj.weight
    assert merged.shape == gate_up.shape and muon.matrices[merged] != muon.matrices[gate_up]
    gradients(model.parameters(), 3)
    gate_up.grad = merged.grad.clone()
    start = [p.detach().clone() for p in (merged, gate_up)]
    muon.step()
    a, b = (before - p for before, p in zip(start, (merged, gate_up), strict=True))
    assert not torch.allclose(a, b, atol=1e-3)


def test_states_are_those_that_a_checkpoint_makes_of_zero_gradients():
    """DCP takes a step with zero gradients and learning rates to know an optimizer's states."""
    model, muon, _ = model_of(MOE)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for g in muon.param_groups:
        g["lr"] = 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    muon.step()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    for p in model.parameters():
        expected = {"momentum_buffer"} if p in muon.matrices else {"step", "exp_avg", "exp_avg_sq"}
        assert muon.state[p].keys() == expected


def test_what_is_frozen_is_left_alone():
    model, *_ = model_of(MOE)
    frozen = model.model.layers[0].self_attn.o_proj.weight.requires_grad_(False)
    assert frozen not in matrices(model)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"train\.optimizer = muon: the model has no trainable"):
        optim.build_optimizer(model, schedule(optimizer="muon"))


def test_a_closure_is_refused():
    [p] = parameters((2, 2))
    with pytest.raises(ValueError, match="closure must be None"):
        Muon(group([p]), Settings()).step(lambda: None)


# ---- schedules

# The factor in each of twelve steps: three of warmup from 0.1, then to 0.2 in the ninth step.
COSINE = [0.5 * (1 + math.cos(math.radians(degrees))) for degrees in (0, 36, 72, 108, 144, 180)]
TABLES = {
    "constant": [0.1, 0.4, 0.7] + [1.0] * 9,
    "linear": [0.1, 0.4, 0.7, 1.0, 0.84, 0.68, 0.52, 0.36, 0.2, 0.2, 0.2, 0.2],
    "cosine": [0.1, 0.4, 0.7, *(0.2 + 0.8 * c for c in COSINE), 0.2, 0.2, 0.2],
}
SCHEDULE = {
    "lr": 1e-3,
    "lr_start": 1e-4,
    "lr_min": 2e-4,
    "lr_warmup_ratio": 0.25,
    "lr_decay_ratio": 0.75,
}


@pytest.mark.parametrize("style", TABLES)
def test_schedules_follow_their_tables(style):
    train = schedule(lr_decay_style=style, max_steps=12, **SCHEDULE)
    plan = Plan(train, steps_per_epoch=5)
    assert [plan.factor(step) for step in range(12)] == pytest.approx(TABLES[style], rel=1e-12)
    # In epochs, with four steps more so far than the same data would have taken now.
    train = schedule(lr_decay_style=style, num_train_epochs=2, **SCHEDULE)
    plan = Plan(train, steps_per_epoch=6, shift=4)
    found = [plan.factor(step) for step in range(4, plan.total)]
    assert found == pytest.approx(TABLES[style], rel=1e-12)


def test_every_group_follows_its_own_peak_and_a_resumed_run_goes_on(tmp_path, monkeypatch):
    seen, real = [], engine.set_lr

    def spy(optimizer, *arguments):
        real(optimizer, *arguments)
        seen.append([group["lr"] for group in optimizer.param_groups])

    monkeypatch.setattr(engine, "set_lr", spy)
    path = write_config(
        tmp_path,
        **{f"train__{k}": v for k, v in SCHEDULE.items()},
        train__optimizer="muon",
        train__lr_decay_style="cosine",
        train__max_steps=12,
        train__muon_lr=0.05,
        train__save_steps=5,
        train__save_hf_weights=False,
    )
    run(path)
    table = torch.tensor([[f * 1e-3, f * 0.05] for f in TABLES["cosine"]], dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(seen, dtype=torch.float64), table)
    assert [r["lr"] for r in rows(tmp_path)] == pytest.approx(table[:, 0].tolist())
    weights = [r["loss"] for r in rows(tmp_path)]
    seen.clear()
    for step in (10, 12):
        shutil.rmtree(tmp_path / f"out/checkpoints/global_step_{step}")
    run(path, "--train.load_checkpoint_path=auto")
    torch.testing.assert_close(torch.tensor(seen, dtype=torch.float64), table[5:])
    assert [r["loss"] for r in rows(tmp_path)][-7:] == weights[5:]
