"""Numbers that change from step to step: their values, what is refused, and runs with them."""

import json
import math
import shutil

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("datasets")

import yaml
from training import rows, run, tensors, write_config

from tilewright.trainer import engine
from tilewright.trainer.columns import IGNORE
from tilewright.trainer.config import ConfigError, load, resolved
from tilewright.trainer.models.head import Around, Shaping, TokenLosses
from tilewright.trainer.models.ops_choice import Ops
from tilewright.trainer.optim.matrices import Parts
from tilewright.trainer.optim.muon import Muon, Settings
from tilewright.trainer.optim.optim import build_optimizer, kinds, peaks, set_values
from tilewright.trainer.optim.row import SCHEDULES, Schedule
from tilewright.trainer.optim.schedules import schedule
from tilewright.trainer.plan import Plan

pytestmark = pytest.mark.packages

LEAST = ["--train.output_dir=-", '--data.datasets=[{"path": "dummy"}]', "--model.config_path=-"]


def settings(**fields):
    return load(None, [*LEAST, *(f"--train.{k}={v}" for k, v in fields.items())])


def test_values_follow_their_schedule_from_end_to_end():
    given = "{schedule: linear, from: 0.1, to: 0.02, steps: 5, start: 2}"
    decay = settings(weight_decay=given).train.weight_decay
    want = [0.1, 0.1, 0.1, 0.08, 0.06, 0.04, 0.02, 0.02]
    assert [decay.at(step) for step in range(8)] == pytest.approx(want)
    assert (decay.at(2), decay.at(6)) == (0.1, 0.02)  # exactly
    rising = settings(adam_beta2="{schedule: cosine, from: 0.9, to: 0.99, steps: 4}").train
    want = [0.99 - 0.09 * 0.5 * (1 + math.cos(math.pi * k / 3)) for k in range(4)]
    assert [rising.adam_beta2.at(step) for step in range(4)] == pytest.approx(want)
    once = settings(max_grad_norm="{schedule: linear, from: 2, to: 1, steps: 1}").train
    assert [once.max_grad_norm.at(step) for step in range(3)] == [2, 1, 1]
    assert settings(weight_decay="0.25").train.weight_decay == 0.25


FIELDS = {
    "cosine": {"cycles": 1.5},
    "cosine_annealing": {"constant_steps": 3},
    "cosine_with_restarts": {"cycles": 2},
    "exponential": {"gamma": 0.8},
    "polynomial": {"power": 2},
    "step": {"step_size": 3, "gamma": 0.5},
    "warmup_hold": {"constant_steps": 2, "power": 2},
    "wsd": {"constant_steps": 2, "cycles": 0.5},
}
CHANGING = [name for name in SCHEDULES.names() if SCHEDULES[name].decays]


@pytest.mark.parametrize("start", [0, 4])
@pytest.mark.parametrize("name", CHANGING)
def test_a_number_has_the_values_of_the_rate_with_the_same_schedule(name, start):
    """After the steps before it, which a rate has as its warmup."""
    steps, first, last = 11, 0.5, 0.03
    row, fields = SCHEDULES[name], FIELDS.get(name, {})
    given = {"schedule": name, "from": first, "to": last, "start": start, **fields}
    rate = {"lr": first, "lr_min": last, "lr_decay_style": name, "lr_warmup_steps": start}
    if row.ends:
        given["steps"], rate["lr_decay_steps"] = steps, start + steps
    rate |= {f"lr_{field}": value for field, value in fields.items()}
    number, train = settings(weight_decay=given).train.weight_decay, settings(**rate).train
    want = [first * schedule(step, 25, train) for step in range(start, 25)]
    assert [number.at(step) for step in range(start, 25)] == pytest.approx(want, rel=1e-12)
    assert {number.at(step) for step in range(start)} <= {first}
    assert len({*want}) > 2


def test_a_schedule_whose_fields_a_mapping_does_not_have_is_none_of_them(monkeypatch):
    odd = Schedule(lambda done, warm: done, fields=("lr_warmup_steps",))
    monkeypatch.setitem(SCHEDULES._rows, "odd", odd)
    with pytest.raises(ConfigError, match=r"must be one of cosine.*, got odd"):
        settings(weight_decay="{schedule: odd, from: 1, to: 0, steps: 2}")


@pytest.mark.parametrize(
    "given",
    [
        {"schedule": "linear", "from": 0.1, "to": 0.0, "steps": 5},
        {"schedule": "step", "from": 0.1, "to": 0.0, "step_size": 2, "gamma": 0.5},
    ],
)
def test_a_resolved_mapping_is_what_was_given(given):
    config = settings(weight_decay=given)
    tree = yaml.safe_load(resolved(config))
    assert tree["train"]["weight_decay"] == {**given, "start": 0}
    assert type(config).model_validate(tree) == config


@pytest.mark.parametrize(
    "field, given, said",
    [
        ("weight_decay", "{schedule: linear, from: 1, to: -1, steps: 5}", "greater than or equal"),
        ("weight_decay", "{schedule: linear, from: 1, to: 0, steps: 0}", "steps: Input should be"),
        ("weight_decay", "{schedule: linear, from: 1, to: 0}", "steps: linear needs it"),
        ("weight_decay", "{schedule: linear, from: 1, to: .inf, steps: 2}", "to: Input should be"),
        ("weight_decay", "{schedule: linear, from: true, to: 0, steps: 2}", "a boolean"),
        ("weight_decay", "{schedule: linear, from: 1, to: 0, steps: 2, end: 3}", "end: Extra"),
        ("weight_decay", "{schedule: liner, from: 1, to: 0, steps: 2}", "must be one of cosine, "),
        ("weight_decay", "{schedule: noam, from: 1, to: 0, steps: 2}", "steps: noam does not read"),
        ("weight_decay", "{schedule: noam, from: 0, to: 1}", "to: noam falls, so it must be at m"),
        ("weight_decay", "{schedule: step, from: 1, to: 0, gamma: 0.5}", "step_size: step needs"),
        ("weight_decay", "{schedule: wsd, from: 1, to: 0, steps: 2}", "constant_steps: wsd needs"),
        (
            "weight_decay",
            "{schedule: wsd, from: 1, to: 0, steps: 2, constant_steps: 2}",
            "constant_steps: leaves no decay of 2 steps",
        ),
        (
            "weight_decay",
            "{schedule: linear, from: 1, to: 0, steps: 2, power: 2}",
            "power: linear does not read it",
        ),
        (
            "weight_decay",
            "{schedule: cosine_with_restarts, from: 1, to: 0, steps: 2, cycles: 1.5}",
            "cycles: hard restarts need a whole number of them, got 1.5",
        ),
        ("weight_decay", "{schedule: constant, from: 1, to: 0, steps: 2}", "got constant"),
        ("weight_decay", "0.1 * step", "input should be a valid number"),
        ("max_grad_norm", "{schedule: linear, from: 1, to: 0, steps: 5}", "at 0 end; end it above"),
        ("adam_beta1", "{schedule: linear, from: 0.9, to: 1, steps: 5}", "less than 1"),
        ("muon_momentum", "{schedule: linear, from: 0.9, to: 0.8, steps: 5}", "only muon reads"),
    ],
)
def test_what_is_no_such_number_is_refused(field, given, said):
    with pytest.raises(ConfigError, match=rf"^train\.{field} = .*{said}"):
        settings(**{field: given})


def test_moments_in_bfloat16_limit_both_ends():
    given = "{schedule: linear, from: 0.9, to: 0.999, steps: 5}"
    with pytest.raises(ConfigError, match="must be at most 0"):
        settings(adam_beta2=given, optimizer="anyprecision_adamw")
    settings(adam_beta2=given, optimizer="anyprecision_adamw", optimizer_dtype="fp32")


def test_set_values_leaves_groups_without_decay_and_names_what_has_no_place():
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": w} for w in (0.5, 0)]
    adamw = torch.optim.AdamW(groups, lr=1.0)
    known = kinds(adamw), peaks(adamw)
    set_values(adamw, *known, {"weight_decay": 0.25, "adam_beta2": 0.5})
    found = [(g["weight_decay"], g["betas"]) for g in adamw.param_groups]
    assert found == [(0.25, (0.9, 0.5)), (0, (0.9, 0.5))]
    set_values(adamw, *known, {"weight_decay": 0.0})
    set_values(adamw, *known, {"weight_decay": 0.75})  # from 0 up again
    assert [g["weight_decay"] for g in adamw.param_groups] == [0.75, 0]
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    with pytest.raises(
        ValueError, match=r"train\.adam_beta1: the optimizer's groups have no betas"
    ):
        set_values(sgd, kinds(sgd), peaks(sgd), {"adam_beta1": 0.5})


def test_muon_takes_the_values_of_its_groups():
    """As one that was built with them, in both of its parts."""

    def trained(settings, values):
        draw = torch.Generator().manual_seed(0)
        ps = [torch.nn.Parameter(torch.randn(6, 4, generator=draw)) for _ in range(2)]
        made = Muon([{"params": ps, "lr": 0.1}], settings, {ps[0]: Parts()})
        for _ in range(3):
            for p in ps:
                p.grad = torch.randn(6, 4, generator=draw)
            set_values(made, kinds(made), peaks(made), values)
            made.step()
        return ps

    values = {"adam_beta1": 0.5, "adam_beta2": 0.75, "muon_momentum": 0.25}
    want = trained(Settings(betas=(0.5, 0.75), momentum=0.25), {})
    plain, found = trained(Settings(), {}), trained(Settings(), values)
    for p, q, other in zip(found, want, plain, strict=True):
        assert torch.equal(p, q) and not torch.equal(p, other)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_sets_them_before_each_step_and_a_resumed_run_has_the_same_bits(
    optimizer, tmp_path, monkeypatch
):
    seen, norms = [], []
    real, divide = engine.set_values, engine.Engine.divide

    def spy(made, *arguments):
        real(made, *arguments)
        groups = made.param_groups
        decays = [g["weight_decay"] for g in groups if g["weight_decay"]]
        exempt = [g for g in groups if not g["weight_decay"]]
        assert decays and exempt and len({*decays}) == 1
        seen.append((decays[0], groups[0]["betas"], groups[0].get("momentum")))

    def clipped(self, denominator=None, max_norm=0.0):
        norms.append(max_norm)
        return divide(self, denominator, max_norm)

    monkeypatch.setattr(engine, "set_values", spy)
    monkeypatch.setattr(engine.Engine, "divide", clipped)

    def line(first, last, start=0):
        return {"schedule": "linear", "from": first, "to": last, "steps": 4, "start": start}

    muon = optimizer == "muon"
    path = write_config(
        tmp_path,
        train__optimizer=optimizer,
        train__no_decay_modules=["norm"],
        train__weight_decay=line(0.4, 0.1),
        train__adam_beta1=line(0.5, 0.8, start=1),
        train__max_grad_norm=line(0.1, 0.4),
        train__max_steps=6,
        train__save_steps=3,
        **{"train__muon_momentum": line(0.6, 0.9)} if muon else {},
    )
    run(path)
    decay, norm = [0.4, 0.3, 0.2, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4, 0.4, 0.4]
    beta, momentum = [0.5, 0.5, 0.6, 0.7, 0.8, 0.8], [0.6, 0.7, 0.8, 0.9, 0.9, 0.9]
    assert [d for d, _, _ in seen] == pytest.approx(decay) and norms == pytest.approx(norm)
    assert [b for _, (b, _), _ in seen] == pytest.approx(beta)
    assert {b for _, (_, b), _ in seen} == {0.95}
    if muon:
        assert [m for _, _, m in seen] == pytest.approx(momentum)
    whole = tensors(tmp_path, 6)
    shutil.rmtree(tmp_path / "out/checkpoints/global_step_6")
    before, seen[:], norms[:] = seen[3:], [], []
    run(path, "--train.load_checkpoint_path=auto")
    assert seen == before and norms == pytest.approx(norm[3:])
    for name, tensor in tensors(tmp_path, 6).items():
        assert torch.equal(tensor, whole[name]), name


def test_a_weight_decay_that_begins_with_0_rises():
    """Groups that have none stay at 0."""
    rising = {"schedule": "linear", "from": 0.0, "to": 0.3, "steps": 4}
    decay = [f"--train.weight_decay={json.dumps(rising)}", '--train.no_decay_modules=["norm"]']
    train = load(None, [*LEAST, *decay]).train
    model = torch.nn.ModuleDict({"norm": torch.nn.Linear(2, 2), "proj": torch.nn.Linear(2, 2)})
    made = build_optimizer(model, train)
    known = kinds(made), peaks(made)
    for step, value in enumerate((0.0, 0.1, 0.2, 0.3, 0.3)):
        set_values(made, *known, Plan(train, 4).values(step))
        found = {p: g["weight_decay"] for g in made.param_groups for p in g["params"]}
        for name, p in model.named_parameters():
            assert found[p] == pytest.approx(0.0 if "norm" in name else value), name


# ---- losses


def of_head(values, shaping=None):
    """A loss of a tiny head and its gradient, from values of fields."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 5, 8, generator=generator, requires_grad=True)
    weight = torch.randn(11, 8, generator=generator)
    labels = torch.tensor([[3, IGNORE, 0, 10, 7]])
    around = Around(Ops.resolve(), shaping=Shaping(**values))
    losses = TokenLosses(hidden, weight, labels, around)
    total = losses.sum()
    total.backward()
    logits = (hidden.detach().double() @ weight.double().T)[0]
    return total.detach(), hidden.grad, logits, labels[0]


@pytest.mark.parametrize("temperature, z_loss", [(1.0, 0.0), (2.0, 0.0), (1.0, 0.3), (0.7, 0.1)])
def test_losses_are_shaped_as_the_formula_says(temperature, z_loss):
    values = {"loss_temperature": temperature, "z_loss": z_loss}
    total, grad, logits, labels = of_head(values)
    logits = (logits / temperature).requires_grad_()
    lse = logits.logsumexp(-1)
    seen = labels != IGNORE
    each = lse - logits.gather(1, labels.clamp_min(0)[:, None])[:, 0] + z_loss * lse**2
    want = each[seen].sum()
    torch.testing.assert_close(total.double(), want.detach(), rtol=1e-5, atol=1e-5)
    plain = of_head({})[1]
    assert torch.equal(grad, plain) == (values == {"loss_temperature": 1.0, "z_loss": 0.0})


def test_losses_change_from_step_to_step_and_evaluations_do_not(tmp_path):
    """Each step's loss is that of a run whose field has that step's value; with lr 0 no weight
    changes.
    """
    common = {"train__max_steps": 3, "train__save_hf_weights": False, "data__val_set_size": 3}
    common |= {"train__lr": 1e-30, "train__lr_min": 0.0}

    def losses(name, **more):
        run(write_config(tmp_path / name, **common, **more))
        found = rows(tmp_path / name)
        return (
            [row["loss"] for row in found if "loss" in row],
            [row["eval_loss"] for row in found if "eval_loss" in row],
        )

    falling = {"schedule": "linear", "from": 3.0, "to": 1.0, "steps": 3}
    found, evaluated = losses("falling", train__loss_temperature=falling)
    for step, value in enumerate((3.0, 2.0, 1.0)):
        plain, same = losses(f"plain{step}", train__loss_temperature=value)
        assert found[step] == plain[step] and evaluated == same
    shaped, same = losses("z", train__z_loss={**falling, "to": 0.0, "from": 0.2})
    assert shaped[2] == plain[2] and shaped[0] > plain[0] and same == evaluated
