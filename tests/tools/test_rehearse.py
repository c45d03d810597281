"""The first call on a GPU, rehearsed on a simulated one."""

import dataclasses
import json
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def measured():
    """The rehearsed parts, and the units of two stages, in a process where Triton compiles."""
    from bench.rehearse import rehearse
    from bench.suite import units
    from tilewright.bench import run
    from tilewright.bench.plan import Chosen
    from tilewright.bench.units import DTYPES
    from tilewright.ops import OPS
    from tilewright_lab import pretend

    parts = rehearse(9.0)
    with pretend.gpu(90, compiles=False):
        chosen = Chosen("cuda", run.Settings(), pathlib.Path())
        plan = {s: units(s, OPS.values(), DTYPES, chosen) for s in ("products", "ab", "goals")}
    return {
        "parts": [dataclasses.asdict(p) for p in parts],
        "plan": {s: [[u.name, u.limit, dict(u.options)] for u in of] for s, of in plan.items()},
    }


@pytest.fixture(scope="module")
def found(compiling):
    variables = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT}:{ROOT / 'lab'}"}
    done = subprocess.run(
        [compiling, __file__], env=variables, cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def parts(found):
    return {p["stage"]: p for p in found["parts"]}


def test_the_goals_of_the_products_are_known_within_four_minutes(parts):
    products = parts["products"]
    assert products["reached"] == products["units"] >= 8
    assert products["launches"] > 100, "the products' own launches were counted"
    assert parts["smoke"]["end"] < 75.0 and products["end"] < 240.0


def test_a_call_of_nine_minutes_reaches_all_of_its_plan(parts):
    short = {s: (p["reached"], p["units"]) for s, p in parts.items() if p["reached"] < p["units"]}
    assert not short
    assert parts["counters"]["end"] < 9 * 60.0
    order = sorted(parts.values(), key=lambda p: p["begin"])
    assert [p["stage"] for p in order] == list(parts), "in the order of the plan"


def test_nothing_is_compiled_in_the_call_that_the_packed_cache_should_hold(parts):
    assert {s: p["compiled"] for s, p in parts.items() if p["compiled"]} == {}
    assert parts["smoke"]["loaded"] > 60


def test_every_unit_runs_on_the_simulated_device(parts):
    problems = [line for p in parts.values() for line in p["problems"]]
    # PyTorch's attention of packed documents reads their boundaries.
    assert [line for line in problems if "_32k_packed" not in line] == []
    assert all(p["launches"] for s, p in parts.items() if s in ("smoke", "products", "ab", "goals"))


@pytest.mark.parametrize(
    "problems, compiled, code",
    [
        ([], [], 0),
        (["goals/x: sdpa: Cannot copy out of meta tensor; no data!"], [], 0),
        (["goals/x: triton: KeyError: 'y'"], [], 1),
        ([], ["_gemm"], 1),
    ],
)
def test_the_exit_code_tells_a_plan_that_does_not_run(problems, compiled, code, monkeypatch):
    from bench import rehearse

    part = rehearse.Part("goals", 0.0, 1.0, compiled=compiled, problems=problems)
    monkeypatch.setattr(rehearse, "rehearse", lambda *a, **k: [part])
    monkeypatch.setattr(rehearse.pretend, "no_compiling", lambda: None)
    assert rehearse.main([]) == code


def test_the_order_of_the_goals(found):
    plan = {stage: [name.split("/")[1] for name, *_ in of] for stage, of in found["plan"].items()}
    ops = [name.split(".")[0] for name in plan["products"]]
    assert list(dict.fromkeys(ops)) == [
        "moe_mlp",
        "grouped_gemm",
        "linear_cross_entropy",
        "linear_logprob",
        "adamw_",
        "attention",
    ]
    streaming = [name.split(".")[0] for name in plan["goals"]]
    first = len(set(streaming) - {"attention", "newton_schulz"})
    assert len(set(streaming[:first])) == first, "one case of each before the second of any"
    assert streaming[-1] == "newton_schulz" and "attention" not in streaming[: 2 * first]
    limits = {stage: {limit for _, limit, _ in of} for stage, of in found["plan"].items()}
    assert limits == {"products": {60.0}, "goals": {60.0}, "ab": {30.0}}
    options = {name: options for name, _, options in found["plan"]["products"]}
    only = {name.split(".")[0].split("/")[1]: o["only"] for name, o in options.items()}
    assert {"native", "gluon", "flash-attn"} <= set(only["attention"])
    assert {"native", "gluon"} <= set(only["moe_mlp"]) and "liger" not in only["moe_mlp"]
    assert not any({"flex", "transformers"} & set(names) for names in only.values())
    assert {o["settings"]["rounds"] for o in options.values()} == {5}
    assert not any(o["settings"]["isolated"] for o in options.values())


if __name__ == "__main__":
    print(json.dumps(measured()))
