"""Norms of gradients and parameters by kind of module, and what they sum to."""

import json
import math

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from ranks import run_modes
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training import MOE, QWEN3, rows, run, write_config

from tilewright.trainer.plugins.norms import kind_of

pytestmark = pytest.mark.packages

BOTH = ["gradients", "parameters"]
SHAPES = {"dense": {**QWEN3, "vocab_size": 98}, "sparse": {**MOE, "vocab_size": 98}}
SIZES = {
    "shards": {},
    "replicas": {"data_parallel_mode": "ddp"},
    "tensor": {"tensor_parallel_size": 2},
    "experts": {"expert_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
}
# Experts, routers and a head are further kinds of modules; a stage may have none of a kind.
CASES = [("dense", name) for name in SIZES if name != "experts"]
CASES += [("sparse", name) for name in ("experts", "tensor", "stages")]


def by_kind(row):
    return {key: value for key, value in row.items() if "_norm/" in key}


def of_two(sizes):
    """What two processes change: the same bins make a step."""
    settings = {"data_parallel_mode": "fsdp2", "micro_batch_size": 1, **sizes}
    if "tensor_parallel_size" in sizes:
        settings["micro_batch_size"] = 2
    if "pipeline_parallel_size" in sizes:
        settings["gradient_accumulation_steps"] = 2
    return [f"--train.{name}={json.dumps(value)}" for name, value in settings.items()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Rows of runs of one process by shape, and of two by shape and layout."""
    root, modes = tmp_path_factory.mktemp("norms"), {}

    def written(name, shape, **changes):
        short = {"train__max_steps": 2, "train__save_hf_weights": False, **changes}
        logged = {"train__max_grad_norm": 0.01, "train__log_norms": BOTH}
        return write_config(root / name, SHAPES[shape], model__merge_qkv=False, **short, **logged)

    for shape, name in CASES:
        file = written(f"{shape}_{name}", shape)
        modes[f"{shape}_{name}/run"] = [file, *of_two(SIZES[name])]
    run_modes(2, root, modes)
    for shape in SHAPES:
        run(written(shape, shape, train__micro_batch_size=2))
    alone = {shape: rows(root / shape) for shape in SHAPES}
    return alone, {(s, n): rows(root / f"{s}_{n}") for s, n in CASES}


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_two_processes_report_the_norms_of_one(case, runs):
    alone, found = runs
    for want, row in zip(alone[case[0]], found[case], strict=True):
        assert by_kind(row).keys() == by_kind(want).keys()
        assert by_kind(row) == pytest.approx(by_kind(want), rel=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_squares_of_gradients_before_clipping_sum_to_the_square_of_their_norm(shape, runs):
    for row in runs[0][shape]:
        assert row["grad_norm"] > 0.1  # so that 0.01 clips it
        squares = [v**2 for k, v in row.items() if k.startswith("grad_norm/")]
        assert math.sqrt(sum(squares)) == pytest.approx(row["grad_norm"], rel=1e-4)
    kinds = {k.partition("/")[2] for k in by_kind(row)}
    sparse = {"experts", "router", "head"} if shape == "sparse" else {"mlp"}
    assert kinds == {"attention", "norm", "embedding", *sparse}


def test_norms_of_parameters_are_those_of_the_weights_after_the_step(tmp_path):
    from safetensors.torch import load_file

    path = write_config(
        tmp_path, SHAPES["dense"], train__max_steps=1, train__log_norms=["parameters"]
    )
    run(path)
    [row] = rows(tmp_path)
    assert not any(key.startswith("grad_norm/") for key in row)
    stored = load_file(tmp_path / "out/checkpoints/global_step_1/hf/model.safetensors")
    squares = {}
    for name, t in stored.items():
        squares[kind_of(name)] = squares.get(kind_of(name), 0) + float(t.double().square().sum())
    assert {f"param_norm/{k}": math.sqrt(v) for k, v in squares.items()} == pytest.approx(
        by_kind(row), rel=1e-5
    )


def test_only_what_is_trained_counts(tmp_path):
    changes = {"lora__enable_lora": True, "lora__lora_rank": 2, "train__log_norms": BOTH}
    run(write_config(tmp_path, SHAPES["dense"], train__max_steps=1, **changes))
    [row] = rows(tmp_path)
    assert by_kind(row).keys() == {"grad_norm/adapters", "param_norm/adapters"}
    assert row["grad_norm/adapters"] == pytest.approx(row["grad_norm"], rel=1e-5)


def test_they_cost_nothing_unless_they_are_asked_for(tmp_path):
    """No callback, and no hook on the optimizer."""
    seen = []
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: seen.append(
            (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks))
        )
    )
    try:
        for name, fields in (("off", {}), ("on", {"train__log_norms": BOTH})):
            run(write_config(tmp_path / name, SHAPES["dense"], train__max_steps=1, **fields))
    finally:
        hook.remove()
    assert seen == [(0, 0), (1, 1)]
