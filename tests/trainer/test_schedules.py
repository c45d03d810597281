"""Schedules of the learning rate at every step of several runs, against where they come from.

Steps count from 0 everywhere. This trainer's last step of a decay has the last rate; transformers
and NeMo have it one step later, after the run: N steps here are N - 1 there (`theirs`).
"""

import functools
import math

import pytest
import torch

pytest.importorskip("pydantic")
optimization = pytest.importorskip("transformers.optimization")

from tilewright.trainer.config import ConfigError, load  # noqa: E402
from tilewright.trainer.optim.row import SCHEDULES, Schedule  # noqa: E402
from tilewright.trainer.optim.schedules import schedule  # noqa: E402
from tilewright.trainer.plan import Plan  # noqa: E402

pytestmark = pytest.mark.packages

PEAK = 2e-3
# Steps of a run, of its warmup, of its decay (with the warmup), and the last rate.
RUNS = [(40, 0, 40, 0.0), (40, 7, 40, 1e-4), (40, 7, 31, 1e-4), (3, 1, 3, 0.0), (25, 24, 25, 1e-4)]
LEAST = ["--train.output_dir=-", '--data.datasets=[{"path": "dummy"}]', "--model.config_path=-"]


def settings(style, **fields):
    fields = {"lr": PEAK, "lr_decay_style": style} | fields
    return load(None, [*LEAST, *(f"--train.{k}={v}" for k, v in fields.items())]).train


def found(style, run, **fields):
    """The rates of all steps."""
    total, warm, end, least = run
    fields = {"lr_warmup_steps": warm, "lr_min": least} | fields
    if SCHEDULES[style].ends and end != total:
        fields["lr_decay_steps"] = end
    train = settings(style, **fields)
    return [PEAK * schedule(step, total, train) for step in range(total)]


def stepped(make, total):
    """The rates of a scheduler of torch's kind."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler, rates = make(optimizer), []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def same(rates, origin):
    assert rates == pytest.approx(origin, rel=1e-9, abs=1e-15)


# ---- transformers

# For those that end after `theirs` steps: the factory, our fields, and their arguments.
OPTIONS = {
    "linear": [({}, {})],
    "cosine": [({}, {}), ({"lr_cycles": 1.25}, {"num_cycles": 1.25})],
    "cosine_with_restarts": [({}, {}), ({"lr_cycles": 3}, {"num_cycles": 3})],
    "polynomial": [({}, {}), ({"lr_power": 2.5}, {"power": 2.5})],
    "linear_annealing": [({}, {})],
}
MAKERS = {
    "linear": optimization.get_linear_schedule_with_warmup,
    "cosine": optimization.get_cosine_with_min_lr_schedule_with_warmup,
    "cosine_with_restarts": optimization.get_cosine_with_hard_restarts_schedule_with_warmup,
    "polynomial": optimization.get_polynomial_decay_schedule_with_warmup,
    "linear_annealing": optimization.get_linear_schedule_with_warmup,
}


@pytest.mark.parametrize("style", OPTIONS)
@pytest.mark.parametrize("run", RUNS)
def test_schedules_of_transformers_at_every_step(style, run):
    total, warm, end, least = run
    theirs = end - 1  # the step after which, here, the rate is the last one
    if style == "cosine":
        more = {"min_lr": least}
    elif style == "polynomial":
        more = {"lr_end": least}
    else:
        more, least = {}, 0.0  # theirs end at 0
    more |= {"num_warmup_steps": warm, "num_training_steps": theirs}
    for fields, arguments in OPTIONS[style]:
        rates = found(style, (total, warm, end, least), **fields)
        if theirs == warm:  # no step is left in which theirs would decay
            assert rates[-1] == PEAK
            continue
        origin = stepped(functools.partial(MAKERS[style], **more, **arguments), total)
        last = origin[theirs] if fields.get("lr_cycles") == 1.25 else least
        assert origin[theirs] == pytest.approx(last)
        # Theirs go on after the end, which here stays: the cosine as a wave.
        same(rates, origin[: theirs + 1] + [last] * (total - theirs - 1))


@pytest.mark.parametrize("run", RUNS)
def test_schedules_without_an_end_have_no_offset(run):
    total, warm, _, _ = run
    flat = stepped(lambda o: optimization.get_constant_schedule_with_warmup(o, warm), total)
    for style in ("constant", "constant_with_warmup"):
        train = settings(style, lr_warmup_steps=warm)
        same([PEAK * schedule(step, total, train) for step in range(total)], flat)
    root = stepped(lambda o: optimization.get_inverse_sqrt_schedule(o, warm), total)
    same(found("inverse_sqrt", (total, warm, total, 0.0)), root)
    if not warm:
        flat = stepped(optimization.get_constant_schedule, total)
        same([PEAK * schedule(s, total, settings("constant")) for s in range(total)], flat)


@pytest.mark.parametrize("cycles", [None, 1.5])
@pytest.mark.parametrize("warm, constant, end, least", [(0, 5, 30, 0.0), (6, 10, 24, 2e-4)])
def test_wsd_is_the_schedule_of_transformers(warm, constant, end, least, cycles):
    """Whose warmup begins at the least rate."""
    fields = {"lr_constant_steps": constant, "lr_start": least}
    options = {"min_lr_ratio": least / PEAK}
    if cycles:
        fields["lr_cycles"] = options["num_cycles"] = cycles
    rates = found("wsd", (30, warm, end, least), **fields)
    decay = end - 1 - warm - constant
    origin = stepped(
        lambda o: optimization.get_wsd_schedule(
            o, warm, decay, num_stable_steps=constant, **options
        ),
        30,
    )
    same(rates, origin)
    assert rates[end - 1] == pytest.approx(least) and rates[warm + constant] == PEAK


# ---- NeMo, NxDT and torch


def nemo_warmup(step, warm):
    """The warm-up of every policy but NoamAnnealing and CosineAnnealing with constant steps."""
    return PEAK * (step + 1) / (warm + 1)


def square(step, warm, last, least):
    return max(PEAK * ((last - step) / (last - warm)) ** 2, least)


def cosine(step, warm, last, least):
    wave = 0.5 * (1 + math.cos(math.pi * (step - warm) / (last - warm)))
    return (PEAK - least) * wave + least


def line(step, warm, last, least):
    return least + (1 - (step - warm) / (last - warm)) * (PEAK - least)


FORMULAS = {"square_annealing": square, "cosine_annealing": cosine, "warmup_annealing": line}


@pytest.mark.parametrize("style", FORMULAS)
@pytest.mark.parametrize("run", [r for r in RUNS if r[2] - 1 > r[1]])
def test_annealing_follows_the_formulas_of_nemo_at_every_step(style, run):
    """Their max_steps is the last step, from 0; after it comes min_lr."""
    _, warm, end, least = run
    rates = found(style, run, lr_start=PEAK / (warm + 1) if warm else 0.0)
    last = end - 1
    for step, rate in enumerate(rates):
        if step <= warm and warm:
            want = nemo_warmup(step, warm)
        else:
            want = FORMULAS[style](step, warm, last, least) if step <= last else least
        assert rate == pytest.approx(want, rel=1e-9, abs=1e-15), step
    assert rates[last] == pytest.approx(least) and rates[warm] == PEAK


@pytest.mark.parametrize("warm, constant", [(0, 5), (7, 5), (7, 20)])
def test_cosine_annealing_ends_with_its_constant_steps(warm, constant):
    """With them NeMo's warmup begins at 0, as Megatron's."""
    last, least = 39, 1e-4
    rates = found("cosine_annealing", (40, warm, 40, least), lr_constant_steps=constant)
    decay = last - constant - warm
    for step, rate in enumerate(rates):
        if warm and step <= warm:
            want = PEAK * step / warm
        elif step > warm + decay:
            want = least
        else:
            want = least + 0.5 * (math.cos(math.pi * (step - warm) / decay) + 1) * (PEAK - least)
        assert rate == pytest.approx(want, rel=1e-9), step
    assert rates[-constant - 1 :] == pytest.approx([least] * (constant + 1))
    assert rates[-constant - 2] > least


@pytest.mark.parametrize("power", [1.0, 3.0])
@pytest.mark.parametrize("warm, hold", [(0, 5), (7, 5), (7, 20)])
def test_warmup_hold_is_the_polynomial_policy_of_nemo(warm, hold, power):
    last, least = 34, 1e-4
    start = PEAK / (warm + 1) if warm else 0.0
    options = {"lr_constant_steps": hold, "lr_power": power, "lr_start": start}
    rates = found("warmup_hold", (40, warm, 35, least), **options)
    for step, rate in enumerate(rates):
        if warm and step <= warm:
            want = nemo_warmup(step, warm)
        elif step < warm + hold:
            want = PEAK
        elif step > last:
            want = least
        else:
            done = (step - warm - hold) / (last - warm - hold)
            want = (PEAK - least) * (1 - done) ** power + least
        assert rate == pytest.approx(want, rel=1e-9), step
    assert rates[warm + hold] == PEAK > rates[warm + hold + 1]


@pytest.mark.parametrize("warm", [0, 1, 6])
@pytest.mark.parametrize("least", [0.0, PEAK / 2])
def test_noam_is_the_policy_of_nemo_but_for_its_first_step(warm, least):
    """Their rate is scaled by the width: here the peak is given. In step 0 they have step 1's."""
    width = 512
    theirs = PEAK * (width * max(1, warm)) ** 0.5
    for step, rate in enumerate(found("noam", (40, warm, 40, least))):
        counted = max(1, step)
        factor = counted**-0.5
        if warm:
            factor = min(factor, counted * warm**-1.5)
        want = theirs * width**-0.5 * factor
        if counted > warm:
            want = max(want, least)
        assert rate == (0.0 if step == 0 and warm else pytest.approx(want, rel=1e-9)), step


@pytest.mark.parametrize("gamma, size", [(0.9, 4), (0.5, 1)])
def test_step_and_exponential_are_those_of_torch(gamma, size):
    """After the warmup, which torch's have not, and down to lr_min."""
    schedulers = torch.optim.lr_scheduler
    steps = stepped(lambda o: schedulers.StepLR(o, size, gamma), 40)
    powers = stepped(lambda o: schedulers.ExponentialLR(o, gamma), 40)
    for warm in (0, 5):
        for least in (0.0, PEAK / 8):
            run, rising = (40, warm, 40, least), [PEAK * s / warm for s in range(warm)]
            rates = found("step", run, lr_step_size=size, lr_gamma=gamma)
            same(rates, rising + [max(r, least) for r in steps[: 40 - warm]])
            rates = found("exponential", run, lr_gamma=gamma)
            same(rates, rising + [max(r, least) for r in powers[: 40 - warm]])


# ---- the table


def test_every_schedule_is_checked_here():
    checked = {*OPTIONS, *FORMULAS, "constant", "constant_with_warmup", "inverse_sqrt", "wsd"}
    assert {*SCHEDULES.names()} == checked | {"warmup_hold", "noam", "step", "exponential"}


def test_the_first_three_have_the_bits_they_had():
    """As they were computed before there were others."""
    old = {
        "constant": lambda done: 1.0,
        "linear": lambda done: 1 - done,
        "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    }
    for style, share in old.items():
        train = settings(style, lr_warmup_ratio=0.17, lr_decay_ratio=0.83, lr_min=1e-7)
        warm, end, least = round(0.17 * 211), round(0.83 * 211), 1e-7 / PEAK
        for step in range(warm, 211):
            done = min(1.0, (step - warm) / (end - warm - 1))
            want = 1.0 if style == "constant" else least + (1 - least) * share(done)
            assert schedule(step, 211, train) == want
        assert [schedule(step, 211, train) for step in range(warm)] == [
            0.0 + (1 - 0.0) * step / warm for step in range(warm)
        ]


def test_a_row_may_read_the_step_and_further_fields(monkeypatch):
    late = Schedule(
        lambda at, lr_power: float(at.step < at.end - lr_power), fields=("lr_power",), by_step=True
    )
    monkeypatch.setitem(SCHEDULES._rows, "late", late)
    rates = found("late", (10, 2, 8, 0.0), lr_power=3)
    assert rates == [0, PEAK / 2, *[PEAK] * 3, *[0] * 5]


def test_a_field_that_the_schedule_does_not_read_is_refused():
    values = {
        "lr_decay_steps": 20,
        "lr_constant_steps": 5,
        "lr_cycles": 2,
        "lr_power": 2,
        "lr_step_size": 3,
        "lr_gamma": 0.5,
    }
    for style, row in SCHEDULES.items():
        needed = {name: values[name] for name in row.needs}
        assert settings(style, **needed).lr_decay_style == style
        for name, value in values.items():
            if name in row.fields or (name == "lr_decay_steps" and row.ends):
                assert getattr(settings(style, **needed | {name: value}), name) == value
                continue
            with pytest.raises(ConfigError, match=rf"^train\.{name} = .*: only .* this$"):
                settings(style, **needed | {name: value})
        for name in row.needs:
            rest = {k: v for k, v in needed.items() if k != name}
            with pytest.raises(ConfigError, match=rf"train\.{name} = .*: {style} needs it"):
                settings(style, **rest)


def test_steps_that_do_not_fit_into_the_run_are_refused_once_it_is_known():
    train = settings("wsd", lr_warmup_steps=4, lr_constant_steps=6, num_train_epochs=2)
    said = "train.lr_decay_style = wsd: 4 steps of warmup and 6 of a constant rate leave no decay"
    assert Plan(train, 5).problem() == f"{said} of 10"
    assert Plan(train, 6).problem() is None
    # 12 steps of today's size, two fewer than were taken for the same data
    assert Plan(train, 5, shift=2).problem() == f"{said} of 10"
    train = settings("linear", lr_warmup_steps=30, num_train_epochs=2)
    assert "would end before the warmup: after 10 steps, and 30" in Plan(train, 5).problem()
    assert Plan(settings("constant", lr_warmup_steps=30), 5).problem() is None
