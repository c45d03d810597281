"""The training loop: schedules, gradients under every split of a batch, checkpoints,
output files.
"""

import dataclasses
import enum
import functools
import gc
import json
import math
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import distributed_worker
import transformers
from ranks import nearly_same_training, run_modes, same_training, together_and_alone
from training import (
    LORA,
    MOE,
    MUON,
    NF4,
    QLORA,
    QWEN3,
    build,
    check_moves,
    engine_of,
    fake_group,
    make_bins,
    resumed_equals_never_stopped,
    rows,
    run,
    same,
    schedule,
    shape_of,
    step_in_one_process,
    stopped,
    tensors,
    write_config,
)
from whole import data_of, parts_of, planned

from tilewright import nn
from tilewright import ops as tw
from tilewright.core.registry import ImplementationUnavailable
from tilewright.nn import QuantizedLinear
from tilewright.nn.weights import adapted as adapted_layers
from tilewright.nn.weights import dense_weights, is_adapter
from tilewright.ops.loss import targets
from tilewright.ops.moe.moe_lora import MOE_LORA
from tilewright.ops.quant.aqn import AQN
from tilewright.trainer import build as build_module
from tilewright.trainer import loop, train
from tilewright.trainer.checkpoint import checkpoint, checkpoint_files, hf, run_folder
from tilewright.trainer.config import load
from tilewright.trainer.data import batches
from tilewright.trainer.data.batches import evaluation_batches
from tilewright.trainer.engine import Engine
from tilewright.trainer.losses.language_modeling import language_modeling
from tilewright.trainer.models.initialize import init_weights
from tilewright.trainer.models.model import ModelConfig, Ops, Transformer
from tilewright.trainer.optim import optim, schedules
from tilewright.trainer.parallel import compiling, exchange, mesh
from tilewright.trainer.parallel.apply import apply_layouts
from tilewright.trainer.parallel.mesh import Group, Mesh, join
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.parallel.recomputation import recompute_activations
from tilewright.trainer.plan import Plan
from tilewright.trainer.plugins import adapters, writable
from tilewright.trainer.plugins.flops import flops_per_token

AUTO = "--train.load_checkpoint_path=auto"
FSDP2 = "--train.data_parallel_mode=fsdp2"
RECOMPUTE = "--train.enable_gradient_checkpointing=true"


# ---- schedule and groups


def lr_at(step, total, settings):
    return settings.lr * schedules.schedule(step, total, settings)


def groups_of(model, train):
    no_decay = {name: getattr(train, name) for name in ("no_decay_modules", "no_decay_params")}
    return optim.parameter_groups(model, {"lr": train.lr}, train.weight_decay, no_decay)


def test_every_parameter_is_in_one_group_and_decay_follows_the_names():
    model = Transformer(ModelConfig.from_hf(QWEN3), Ops.resolve())
    groups = groups_of(
        model, schedule(weight_decay=0.1, no_decay_modules='["norm"]', no_decay_params="[]")
    )
    names = {id(p): n for n, p in model.named_parameters()}
    found = [{names[id(p)] for p in g["params"]} for g in groups]
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert found[0] | found[1] == set(names.values()) and not found[0] & found[1]
    assert found[1] == {n for n in names.values() if "norm" in n}
    by_parameter = groups_of(model, schedule(no_decay_params='["weight"]'))
    assert not by_parameter[0]["params"]
    # A parameter's own name is `weight` alone.
    for texts in ('["norm"]', '["input_layernorm", "post_attention_layernorm", "_norm", "l.norm"]'):
        _, exempt = groups_of(model, schedule(no_decay_params=texts))
        assert {names[id(p)] for p in exempt["params"]} == found[1]
    _, exempt = groups_of(model, schedule(no_decay_params='["layers.1.mlp.down"]'))
    assert [names[id(p)] for p in exempt["params"]] == ["model.layers.1.mlp.down_proj.weight"]


@pytest.mark.parametrize("field, end", [("no_decay_modules", ""), ("no_decay_params", ".weight")])
def test_a_name_without_decay_that_finds_nothing_is_refused_with_the_names(field, end):
    """Each layer's names once. A bias is nowhere in this model."""
    model = Transformer(ModelConfig.from_hf(QWEN3), Ops.resolve())
    names = f"model.embed_tokens{end}, model.layers.N.input_layernorm{end}, "
    said = f"train.{field}: no name in the model contains 'bias'; names are {names}"
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        groups_of(model, schedule(**{field: '["norm", "bias"]'}))
    assert str(error.value).count("input_layernorm") == 1
    with pytest.raises(ValueError, match=rf"train\.{field}: '' is in every name"):
        groups_of(model, schedule(**{field: '[""]'}))


def test_clipping_scales_to_the_norm_and_zero_only_measures():
    p = torch.nn.Parameter(torch.zeros(2))
    model = torch.nn.ParameterList([p])
    held = Engine(Parts(model), torch.optim.SGD([p], lr=1.0), Mesh())

    def norm(*arguments):
        p.grad = torch.tensor([6.0, 8.0])
        return float(held.divide(2.0, *arguments))

    for limit in ((), (0.0,), (10.0,)):
        assert norm(*limit) == 5.0 and p.grad.tolist() == [3.0, 4.0]
    assert norm(1.0) == 5.0
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)


# ---- the same gradients under every split of the batch


@pytest.mark.parametrize("shape", [QWEN3, MOE], ids=["qwen3", "qwen3-moe"])
def test_accumulation_gives_the_gradients_of_one_large_batch(shape, tmp_path):
    path = write_config(tmp_path, shape)
    at_once, cut = (
        step_in_one_process(
            path,
            make_bins(),
            f"--train.micro_batch_size={m}",
            f"--train.gradient_accumulation_steps={8 // m}",
        )
        for m in (8, 1)
    )
    assert at_once["tokens"] == sum((b[1:] != -100).sum() for d in make_bins() for _, b in d)
    same(cut, at_once)
    # and the loss is the mean over tokens, not over micro-batches
    config = load(path)
    model = parts_of(config, shape_of(config), Mesh(), Ops.resolve()).model
    whole = batches.collate(make_bins(), 8)
    logits = model(
        whole["input_ids"], position_ids=whole["position_ids"], cu_seqlens=whole["cu_seqlens"]
    )
    mean = torch.nn.functional.cross_entropy(logits[0].double(), whole["labels"][0])
    assert at_once["loss"] == pytest.approx(mean.item(), rel=1e-5)


def test_a_frozen_router_stays_what_it_was_and_the_rest_learns(tmp_path):
    path = write_config(
        tmp_path,
        MOE,
        train__freeze_router=True,
        train__data_parallel_mode="fsdp2",
        train__save_steps=2,
        train__max_steps=4,
        train__weight_decay=0.1,
    )
    run(path)
    resumed = str(tmp_path / "out/checkpoints/global_step_2")
    run(
        path,
        f"--train.output_dir={tmp_path / 'again/out'}",
        f"--train.load_checkpoint_path={resumed}",
    )
    late, again = tensors(tmp_path, 4), tensors(tmp_path / "again", 4)
    config = load(path)
    fresh = Transformer(shape_of(config), Ops.resolve())
    init_weights(fresh, config.train.seed)
    gates = [n for n in late if n.endswith("mlp.gate.weight")]
    assert len(gates) == 2
    for name in gates:
        assert torch.equal(late[name].float(), fresh.state_dict()[name]), name
    for name, t in late.items():
        assert torch.equal(t, again[name]), name
        if name in fresh.state_dict() and name not in gates:
            assert not torch.equal(t.float(), fresh.state_dict()[name]), name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model.moe_implementation", "eager"),
        ("model.router_fp32", False),
        ("train.moe_checkpoint_method", "moe_act"),
        ("train.freeze_router", True),
    ],
)
def test_what_experts_alone_read_is_refused_without_them(field, value, tmp_path):
    options = {field.replace(".", "__"): value, "train__enable_gradient_checkpointing": True}
    with pytest.raises(ValueError, match=rf"^{field} = {value}: the model has no experts"):
        run(write_config(tmp_path, **options))


MODES = {
    "ddp": ["--train.data_parallel_mode=ddp"],
    "fsdp2": [FSDP2],
    "fsdp2_recompute": [FSDP2, RECOMPUTE],
    "fsdp2_zero2": [FSDP2, "--train.enable_full_shard=false"],
    "hsdp": [FSDP2, "--train.data_parallel_replicate_size=2"],
}


SHAPES = {"qwen3": QWEN3, "qwen3-moe": MOE}
OVERFLOWS = {
    **{mode: MODES[mode] for mode in ("ddp", "fsdp2", "hsdp")},
    "tensor": [
        FSDP2,
        "--train.tensor_parallel_size=2",
        "--model.merge_qkv=false",
        '--model.foundation={"vocab_size": 98}',
    ],
    "pipeline": [FSDP2, "--train.pipeline_parallel_size=2"],
    "ring": [FSDP2, "--train.ringattn_parallel_size=2"],
}


def drawn(shape):
    model = Transformer(ModelConfig.from_hf(shape), Ops.resolve())
    init_weights(model, 3)
    return model


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """All two-process modes in `MODES` and `ADAPTERS`, on both shapes, one after the other in the
    same processes: imports take most of a launch.
    """
    folder, modes = tmp_path_factory.mktemp("pairs"), {}
    for name, shape in SHAPES.items():
        for kind, chosen in (("gradients", MODES), ("adapters", adapters_of(shape))):
            at, options = folder / name / kind, {}
            at.mkdir(parents=True)
            if kind == "adapters":  # from weights that one process reads and broadcasts
                hf.save_weights(drawn(shape), at / "weights")
                options = {
                    "train__optimizer": "sgd",
                    "train__lr": 1.0,
                    "train__max_steps": 2,
                    "model__model_path": str(at / "weights"),
                }
            cut = {"train__micro_batch_size": 1, "train__gradient_accumulation_steps": 4}
            write_config(at, shape, **cut, **options)
            torch.save(make_bins(), at / "bins.pt")
            modes |= {f"{name}/{kind}/{mode}": arguments for mode, arguments in chosen.items()}
    modes |= {f"qwen3/gradients/overflow_{mode}": given for mode, given in OVERFLOWS.items()}
    run_modes(2, folder, modes)
    return folder


@pytest.mark.parametrize("mode", OVERFLOWS)
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_before_a_weight_changes(mode, pairs):
    found = torch.load(pairs / f"qwen3/gradients/overflow_{mode}.pt")
    # Ranks that share matrices compute one loss, and add up their norms.
    assert {*found["errors"]} <= {"loss is nan", "norm of the gradients is nan"}
    assert found["same"]


@pytest.mark.parametrize("shape", SHAPES)
def test_two_processes_give_the_gradients_of_one(shape, pairs):
    at = pairs / shape / "gradients"
    want = step_in_one_process(
        str(at / "config.yaml"), make_bins(), "--train.gradient_accumulation_steps=8"
    )
    for mode in MODES:
        same(torch.load(at / f"{mode}.pt"), want)


EXPERTS = [FSDP2, "--train.expert_parallel_size=2"]
SPREAD = {
    "train_and_save": [*EXPERTS, "--train.optimizer=adamw", "--train.lr=1e-3"],
    "train_after_loading": [
        *EXPERTS,
        "--train.optimizer=adamw",
        "--train.lr=1e-3",
        "--train.ep_outside=true",
    ],
    "train": [*EXPERTS],
    "train_outside": [*EXPERTS, "--train.ep_outside=true", "--train.enable_full_shard=false"],
    "train_all_four": [FSDP2, "--train.expert_parallel_size=4"],
    "train_replicas": [*EXPERTS, "--train.data_parallel_replicate_size=2"],
    "train_recompute": [*EXPERTS, RECOMPUTE],
    "train_moe_act": [*EXPERTS, RECOMPUTE, "--train.moe_checkpoint_method=moe_act"],
    "train_in_bfloat16": [*EXPERTS, RECOMPUTE, "--train.enable_mixed_precision=true"],
    "train_moe_act_mlp": [
        *EXPERTS,
        RECOMPUTE,
        "--train.moe_checkpoint_method=moe_act",
        '--train.recompute_modules=["mlp"]',
    ],
}
MUONS = {
    "muon/train_and_save": [*MUON, "--train.expert_parallel_size=2"],
    "muon/train_after_loading": [*MUON],
    "muon/train_replicas": [*MUON, "--train.data_parallel_replicate_size=2"],
    "muon/train_outside": [*MUON, "--train.expert_parallel_size=2", "--train.ep_outside=true"],
    "muon/train_ddp": [*MUON[1:], "--train.data_parallel_mode=ddp"],
    "muon/placements": [*MUON],
}

# Eight rows of a bin each, in layouts that pad them otherwise.
ROWS = 8
ROUTED = {
    "routed/train_experts": [*EXPERTS, "--data.pad_to_multiple_of=64"],
    "routed/train_tensor": [*EXPERTS[:1], "--train.tensor_parallel_size=2"],
    "routed/train_ring": [*EXPERTS, "--train.ringattn_parallel_size=2"],
    "routed/train_ulysses": [*EXPERTS[:1], "--train.ulysses_parallel_size=2"],
    "routed/train_stages": [*EXPERTS[:1], "--train.pipeline_parallel_size=2"],
    "routed/train_both": [
        *EXPERTS[:1],
        "--train.tensor_parallel_size=2",
        "--train.ringattn_parallel_size=2",
        "--data.pad_to_multiple_of=48",
    ],
}
for mode, data in zip(ROUTED, (4, 2, 2, 2, 2, 1), strict=True):
    ROUTED[mode].append(f"--train.gradient_accumulation_steps={ROWS // data}")


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """Two steps in four processes in each of those modes, and in one process with the
    whole batch.
    """
    folder = tmp_path_factory.mktemp("spread")
    # SGD, whose steps show a wrong gradient scale, unlike AdamW's; gradients are clipped.
    path = write_config(
        folder,
        MOE,
        train__micro_batch_size=1,
        train__gradient_accumulation_steps=2,
        train__optimizer="sgd",
        train__lr=0.5,
        train__max_grad_norm=0.2,
        train__max_steps=2,
        data__pad_to_multiple_of=1,
    )
    bins = make_bins()
    (folder / "muon").mkdir()
    torch.save(bins, folder / "muon/bins.pt")
    shutil.copy(path, folder / "muon/config.yaml")
    one = {"train__micro_batch_size": 1, "train__optimizer": "sgd", "train__max_steps": 2}
    even = {**MOE, "vocab_size": 98}  # which two ranks divide
    one |= {"model__merge_qkv": False, "data__pad_to_multiple_of": 16}
    write_config(folder / "routed", even, **one)
    torch.save(bins, folder / "routed/bins.pt")
    adam = ["--train.optimizer=adamw", "--train.lr=1e-3"]
    found, alone = together_and_alone(
        folder, path, bins, SPREAD | MUONS | ROUTED, {False: [], True: adam, "muon": MUON[1:]}
    )
    return folder, path, found, alone


@pytest.mark.parametrize("mode", SPREAD)
def test_experts_spread_over_processes_train_as_in_one(mode, spread):
    _, path, found, alone = spread
    found, want = found[mode], alone[mode in ("train_and_save", "train_after_loading")]
    assert min(want["norm"]) > 0.4  # twice the clipping norm
    if mode == "train_in_bfloat16":
        nearly_same_training(found, want)
        start = distributed_worker.several_steps(load(path, []), Mesh(), [], steps=0)[1]["weights"]
        for name, weight in want["weights"].items():  # by its movement
            moved = found["weights"][name] - start[name]
            assert moved.dtype == torch.float32
            # Less than 1 % differently, and 8 % where a token chose another expert.
            want_moved = weight - start[name]
            assert (moved - want_moved).norm() <= 0.15 * want_moved.norm(), name
        return
    adam = mode in ("train_and_save", "train_after_loading")
    same_training(found, want, weights=1e-3 if adam else None)
    for a, b in zip(found["router"], want["router"], strict=True):
        assert {*a} == {"expert_load", "worst_expert_load", "load_balance_loss", "z_loss"}
        assert a["expert_load"] == pytest.approx(b["expert_load"], rel=1e-6)
        # Losses are means over micro-batches with different token counts.
        assert a == pytest.approx(b, rel=0.1)


@pytest.fixture(scope="module")
def routed(spread):
    """In one process, without padding."""
    arguments = [f"--train.gradient_accumulation_steps={ROWS}", "--data.pad_to_multiple_of=1"]
    config = load(spread[0] / "routed/config.yaml", arguments)
    return distributed_worker.several_steps(config, Mesh(), make_bins(), 2)[1]


@pytest.mark.parametrize("mode", ROUTED)
def test_statistics_of_routers_are_those_of_rows_without_padding(mode, spread, routed):
    """In training and evaluation, with and without shards of rows."""
    found = spread[2][mode]
    every = [*found["router"], found["evaluated_router"]]
    for a, b in zip(every, [*routed["router"], routed["evaluated_router"]], strict=True):
        assert a == pytest.approx(b, rel=1e-5) and a["load_balance_loss"] > 1


@pytest.mark.parametrize("mode", [mode for mode in MUONS if mode != "muon/placements"])
def test_muon_orthogonalizes_whole_matrices_under_every_layout(mode, spread):
    _, path, found, alone = spread
    found, want = found[mode], alone["muon"]
    np.testing.assert_allclose(found["loss"], want["loss"], rtol=1e-5)
    start = distributed_worker.several_steps(load(path, []), Mesh(), [], steps=0)[1]["weights"]
    for name, weight in want["weights"].items():
        away = (found["weights"][name] - weight).abs().max()
        assert away <= 1e-5 * weight.abs().max(), (name, away)
        if "proj" in name:  # in two steps
            assert (weight - start[name]).norm() > 0.01 * weight.norm()


def test_matrices_are_whole_under_every_placement(spread):
    """Parameters sharded by FSDP2 and tensor parallelism, on a mesh of 2 x 2."""
    for name, (found, want) in spread[2]["muon/placements"].items():
        assert torch.equal(found, want), name


def test_checkpoints_of_muon_move(spread):
    folder, path, found, _ = spread
    check_moves((folder / "muon", path, {k[5:]: v for k, v in found.items()}, None), MUON)


@pytest.mark.parametrize(
    "mode, calls",
    [("train", 7), ("train_moe_act", 7), ("train_moe_act_mlp", 7), ("train_recompute", 9)],
)
def test_moe_act_sends_no_token_twice_and_nothing_exchanges_sizes_again(mode, calls, spread):
    layers, micro_batches = 2, 2
    if mode == "train_recompute" and torch.__version__ < "2.13":
        calls += 1  # torch 2.11 recomputes the last exchange, too
    assert spread[2][mode]["all_to_alls"] == layers * micro_batches * calls


def test_checkpoints_of_spread_experts_move(spread):
    folder, *_ = spread
    model, want = check_moves(spread)
    for name, weight in want["weights"].items():  # one file with separate tensors per expert
        parts = hf.split(name, weight, model.config)
        for target, part in zip(hf.sources(name, model.config), parts, strict=True):
            assert torch.equal(stored(folder)[target], part), target
    assert sum(".experts.3." in name for name in stored(folder)) == 2 * 3


def test_the_trainer_spreads_experts_and_reports_on_routers(runs):
    folder, out = runs
    folder = folder / "experts"
    assert re.search(r"^ops: .* route=\S+ moe_mlp=\S+$", out, re.MULTILINE)
    spread = rows(folder)
    run(
        str(folder / "config.yaml"),
        FSDP2,
        "--train.micro_batch_size=2",
        "--train.load_checkpoint_path",
        str(folder / "out/checkpoints/global_step_2"),
    )
    evaluations = [
        [r["eval_loss"] for r in found if "eval_loss" in r] for found in (spread, rows(folder))
    ]
    assert len(evaluations[0]) == 3 and evaluations[0] == pytest.approx(evaluations[1], rel=1e-5)
    for a, b in zip(
        *([r for r in found if "loss" in r] for found in (spread, rows(folder))), strict=True
    ):
        for key in ("step", "loss", "grad_norm", "expert_load", "worst_expert_load"):
            assert a[key] == pytest.approx(b[key], rel=1e-4), key
        assert 1 <= a["expert_load"] <= a["worst_expert_load"] <= 4 and a["z_loss"] > 0


@pytest.mark.parametrize(
    "shape, message",
    [
        (QWEN3, "train.expert_parallel_size = 2: the model has no experts"),
        ({**MOE, "num_experts": 5}, "train.expert_parallel_size = 2: 5 experts do not divide by 2"),
        (
            {**MOE, "moe_intermediate_size": 25},
            r"train.expert_parallel_size = 2: 50 rows of gate_up_proj do not divide",
        ),
    ],
)
def test_what_cannot_be_spread_is_one_sentence(shape, message, tmp_path):
    config = load(write_config(tmp_path, shape), EXPERTS)
    with torch.device("meta"):
        model = Transformer(shape_of(config), Ops.resolve())
    with pytest.raises(ValueError, match=message), fake_group(8):
        ranks = mesh.build(config.train, 0, 8, torch.device("cpu"), control_backend="fake")
        apply_layouts(Parts(model), dict(config), ranks, filled=False)


def test_router_statistics_are_of_the_whole_step(tmp_path):
    path = write_config(
        tmp_path,
        MOE,
        data__pad_to_multiple_of=1,
        train__gradient_accumulation_steps=4,
        train__micro_batch_size=2,
    )
    config = load(path)
    held = engine_of(config)
    logits = [[], []]
    for seen, block in zip(logits, held.model.model.layers, strict=True):
        block.mlp.gate.register_forward_hook(
            lambda module, args, out, seen=seen: seen.append(out.detach())
        )
    bins = make_bins()
    step = [batches.collate(bins[i : i + 2], 1) for i in range(0, 8, 2)]
    found = held.forward_backward(step, language_modeling).router()
    parts = [
        [tw.route(x, 2, renormalize=True, implementation="eager") for x in seen] for seen in logits
    ]
    loads = []
    for layer in parts:
        tokens = sum(p.tokens_per_expert for p in layer).double()
        assert tokens.sum() == 2 * sum(len(ids) for d in bins for ids, _ in d)
        loads.append(float(tokens.max() / tokens.mean()))
    every = [p for layer in parts for p in layer]
    assert found == pytest.approx(
        {
            "expert_load": sum(loads) / 2,
            "worst_expert_load": max(loads),
            "load_balance_loss": float(sum(p.load_balance_loss for p in every)) / 8,
            "z_loss": float(sum(p.z_loss for p in every)) / 8,
        },
        rel=1e-5,
    )


def stored(folder):
    from safetensors.torch import load_file

    return load_file(folder / "hf/model.safetensors")


COUNT = {
    "train__max_steps": None,
    "train__num_train_epochs": 2,
    "train__save_hf_weights": False,
    "data__sample_packing_sequence_len": 20,
    "data__pad_to_multiple_of": 4,
}


def ten_samples(folder):
    """Options of a run over two epochs of ten bins of one sample, of 11 to 20 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ten.jsonl").write_text(
        "".join(
            json.dumps({"input_ids": [(s + i) % 97 for i in range(11 + s)]}) + "\n"
            for s in range(10)
        )
    )
    return {**COUNT, "data__datasets": [{"path": str(folder / "ten.jsonl")}]}


# Shapes and lengths at which activations, and not the head's chunk, are the larger part.
WIDE = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}
FULL = {"train__enable_gradient_checkpointing": True, "data__sample_packing_sequence_len": 768}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Whole runs on two ranks, one after the other in the same processes: the folder, and their
    results.
    """
    folder = tmp_path_factory.mktemp("runs")
    # First: nothing is left from other modes.
    modes = {"memory": [write_config(folder / "memory", {**QWEN3, **WIDE}, **FULL), FSDP2]}

    def add(name, path, *arguments):
        modes[f"run_{name}"] = [path, FSDP2, *arguments]

    path = write_config(
        folder / "experts",
        MOE,
        train__max_steps=3,
        train__enable_gradient_checkpointing=True,
        data__pad_to_multiple_of=1,
        data__val_set_size=6,
    )
    add("experts", path, *EXPERTS, "--train.moe_checkpoint_method=moe_act", "--train.save_steps=2")
    path = write_config(
        folder / "moves", train__micro_batch_size=2, train__save_steps=2, train__lr_warmup_ratio=0.5
    )
    run(path, FSDP2)
    (folder / "moves/out/metrics.jsonl").rename(folder / "moves/alone.jsonl")
    (folder / "moves/out/checkpoints/global_step_6").rename(folder / "moves/alone")
    # the same global batch, with one bin per rank, from the second step on
    add(
        "moves",
        path,
        "--train.micro_batch_size=1",
        "--train.log_format=structured",
        f"--train.load_checkpoint_path={folder}/moves/out/checkpoints/global_step_2",
    )
    for name in ("now", "later"):
        add(
            name,
            write_config(folder / name, train__max_steps=10),
            "--train.save_steps=2",
            f"--train.save_async={name == 'later'}",
            "--train.save_hf_weights=false",
        )
    options = ten_samples(folder)
    run(write_config(folder / "ten", train__save_steps=4, **options), FSDP2)
    for step in (4, 12):
        add(
            f"from_{step}",
            write_config(folder / f"from_{step}", **options),
            f"--train.load_checkpoint_path={folder}/ten/out/checkpoints/global_step_{step}",
        )
    return folder, run_modes(2, folder, modes)


def test_the_plan_of_two_ranks_is_what_their_allocators_count(runs):
    folder, _ = runs
    config = load(str(folder / "memory/config.yaml"), [FSDP2])
    for rank in range(2):
        found = planned(config, 2, rank)
        assert found.total == pytest.approx(int((folder / f"memory_{rank}").read_text()), rel=0.1)


def test_fsdp2_trains_in_one_process_and_a_checkpoint_moves_to_two(runs):
    folder, out = runs
    alone, found = (
        [json.loads(line) for line in (folder / "moves" / file).read_text().splitlines()]
        for file in ("alone.jsonl", "out/metrics.jsonl")
    )
    assert [r["step"] for r in found] == [3, 4, 5, 6]
    np.testing.assert_allclose(
        [r["loss"] for r in found], [r["loss"] for r in alone[2:]], rtol=1e-5
    )
    assert [(r["lr"], r["tokens"]) for r in found] == [(r["lr"], r["tokens"]) for r in alone[2:]]
    for name, tensor in tensors(folder / "moves", 6).items():
        torch.testing.assert_close(
            tensor, stored(folder / "moves/alone")[name], rtol=1e-4, atol=1e-5
        )
    line = next(line for line in out.splitlines() if "step=3 " in line)
    assert {"loss", "lr", "grad_norm", "tokens", "tokens_per_second"} <= {
        w.split("=")[0] for w in line.split()
    }


def test_checkpoints_written_while_two_ranks_train_change_nothing(runs):
    folder, _ = runs
    now, later = (
        [(r["step"], r["loss"], r["grad_norm"]) for r in rows(folder / n)] for n in ("now", "later")
    )
    assert len(now) == 10 and now == later
    for name in ("now", "later"):
        found = checkpoint.complete(str(folder / name / "out"))
        assert sorted(int(p.name.split("_")[-1]) for p in found) == [2, 4, 6, 8, 10]
        assert len([*found[0].glob("random_*")]) == 2 and not [*found[0].parent.glob(".*")]


def test_an_epoch_is_all_samples_whatever_ranks_and_accumulation_a_run_goes_on_with(runs, tmp_path):
    folder, _ = runs
    tokens = 2 * sum(range(11, 21))
    assert [rows(folder / "ten")[-1][k] for k in ("step", "tokens")] == [20, tokens]
    for step in (4, 12):
        found = rows(folder / f"from_{step}")
        assert [r["step"] for r in found] == list(range(step + 1, step + 1 + (20 - step) // 2))
        assert found[-1]["tokens"] == tokens
    options = ten_samples(tmp_path)
    run(
        write_config(tmp_path, **options),
        "--train.gradient_accumulation_steps=2",
        "--train.lr_decay_style=linear",
        FSDP2,
        "--train.save_epochs=1",
        f"--train.load_checkpoint_path={folder}/ten/out/checkpoints/global_step_4",
    )
    found = rows(tmp_path)
    assert [r["step"] for r in found] == list(range(5, 13)) and found[-1]["tokens"] == tokens
    plain = schedule(lr=1e-2, lr_decay_style="linear")  # ten steps of two samples, two of them done
    assert [r["lr"] for r in found] == [lr_at(i, 10, plain) for i in range(2, 10)]
    ends = [p.name for p in checkpoint.complete(str(tmp_path / "out"))]
    assert ends == ["global_step_12", "global_step_7"]


@pytest.mark.parametrize(
    "then, now", [((1, 1), (2, 1)), ((2, 1), (1, 1)), ((1, 2), (1, 3)), ((3, 1), (2, 2))]
)
@pytest.mark.parametrize("drop", [True, False])
def test_no_sample_is_skipped_or_repeated_where_a_run_goes_on_otherwise(then, now, drop, tmp_path):
    """(ranks, accumulation) of a run of two epochs, before and after each of its steps."""
    options = {**ten_samples(tmp_path), "data__dataloader_drop_last": drop}
    config = load(write_config(tmp_path, **options))
    bins = data_of(config, Mesh())[0].bins

    def handed_out(ranks, accumulation):
        changed = load(
            write_config(tmp_path, **options),
            [f"--train.gradient_accumulation_steps={accumulation}"],
        )
        return [
            batches.Batches(bins, changed.data, changed.train, rank=r, world_size=ranks)
            for r in range(ranks)
        ], changed.train

    def take(all_ranks, count):
        """The first tokens, distinct for each sample, that all ranks get in that many steps."""
        steps = [b.steps() for b in all_ranks]
        return [
            int(batch["input_ids"][0, 0])
            for _ in range(count)
            for own in steps
            for batch in next(own)
            if (batch["labels"] != batches.IGNORE).any()
        ]

    per_step = [ranks * accumulation for ranks, accumulation in (then, now)]
    for done in range(1, handed_out(*then)[0][0].steps_per_epoch * 2):
        before, _ = handed_out(*then)
        seen = take(before, done)
        after, t = handed_out(*now)
        for b in after:
            b.load_state_dict(before[0].state_dict())
        plan = Plan(t, after[0].steps_per_epoch, done - after[0].position)
        seen += take(after, plan.total - done)
        assert after[0].position == plan.total - plan.shift
        counts = np.bincount(seen, minlength=10)
        if drop:  # each epoch drops at most an incomplete step
            assert counts.max() <= 2 and counts.sum() >= 20 - 2 * (max(per_step) - 1)
        else:
            assert counts.tolist() == [2] * 10


def test_a_number_of_processes_that_does_not_fit_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mesh.platform, "launched", lambda: (0, 2, 0))
    assert train.main([write_config(tmp_path)]) == 2
    assert (
        "train.data_parallel_mode = none: trains one process, but 2 were started"
        in capsys.readouterr().err
    )


# ---- runs


def test_a_run_learns_and_writes_what_transformers_loads(tmp_path):
    with open(tmp_path / "count.jsonl", "w") as file:  # each token's successor is the next number
        for start in range(200):
            file.write(json.dumps({"input_ids": [(start + i) % 97 for i in range(30)]}) + "\n")
    path = write_config(
        tmp_path,
        train__max_steps=60,
        train__micro_batch_size=4,
        train__lr=2e-2,
        data__datasets=[{"path": str(tmp_path / "count.jsonl")}],
        data__val_set_size=8,
    )
    config = load(path)
    run(path)
    found = rows(tmp_path)
    losses = [r["loss"] for r in found if "loss" in r]
    assert losses[0] == pytest.approx(math.log(97), abs=0.1)
    assert losses[-1] < 0.5
    evaluations = {r["step"]: r["eval_loss"] for r in found if "eval_loss" in r}
    assert evaluations[0] == pytest.approx(math.log(97), abs=0.1) and evaluations[60] < 0.5
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out/checkpoints/global_step_60/hf"
    ).eval()
    ours = Transformer(hf.load_config(tmp_path / "model"), Ops.resolve())
    hf.load_weights(ours, tmp_path / "out/checkpoints/global_step_60/hf")
    ids = torch.arange(20)[None]
    torch.testing.assert_close(ours(ids), model(ids).logits, rtol=1e-4, atol=1e-4)
    resolved = load(str(tmp_path / "out/resolved_config.yaml"))
    assert resolved == config


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    run(write_config(tmp_path, train__max_steps=2))
    for shape, changes, message in (
        ({**QWEN3, "hidden_size": 48}, {}, r"another model: \{'hidden_size': \[?\(32, 48\)\]?\}"),
        (QWEN3, {"model__merge_qkv": False}, r"model: \{'merge_qkv': \(True, False\)\}"),
        (QWEN3, {"train__optimizer": "sgd"}, r"optimizer: \{'optimizer': \('adamw', 'sgd'\)\}"),
        (QWEN3, {"train__no_decay_modules": ["norm"]}, r"optimizer: \{'no_decay_modules'"),
        (QWEN3, {"train__seed": 1}, r"another data: .*'seed': \(42, 1\)"),
        (QWEN3, {"data__sample_packing_sequence_len": 64}, "another data: .*'bins'"),
        (QWEN3, {"train__max_steps": 1}, "is at step 2, and the run ends at step 1"),
    ):
        path = write_config(tmp_path, shape, **changes)
        with pytest.raises(ValueError, match=message):
            run(path, AUTO)


class Killed(BaseException):
    """An exception that nothing handles, like SIGKILL."""


def test_a_finished_asynchronous_checkpoint_has_its_name_at_the_next_step(tmp_path, monkeypatch):
    """Not only at the next checkpoint."""
    real = checkpoint.state_dict_saver.async_save

    def save(*arguments, **options):
        future = real(*arguments, **options)
        future.result()
        return future

    monkeypatch.setattr(checkpoint.state_dict_saver, "async_save", save)
    path = write_config(tmp_path, train__save_steps=2, train__save_async=True)
    with stopped(4, Killed()), pytest.raises(Killed):
        run(path)
    assert run_folder.candidates(str(tmp_path / "out"), "auto")[0].name == "global_step_2"


def test_what_a_killed_run_left_is_put_in_order(tmp_path, caplog):
    path = write_config(tmp_path, train__save_steps=2, train__max_steps=4)
    run(path)
    folder = tmp_path / "out/checkpoints"
    # Complete, but killed before the rename; unfinished; and complete, but of another step.
    (folder / "global_step_4").rename(folder / ".global_step_4.partial")
    shutil.copytree(folder / "global_step_2", folder / ".global_step_6.partial")
    (folder / ".global_step_6.partial/dcp/.metadata").unlink()
    (folder / "global_step_2/.hf.partial").mkdir()
    shutil.copytree(folder / "global_step_2", folder / ".global_step_8.partial")
    run_folder.recover(str(tmp_path / "out"), Mesh(), alone=False)
    assert sum("another run may be writing it" in r.message for r in caplog.records) == 4
    run(path, AUTO)
    assert sorted(p.name for p in folder.iterdir()) == ["global_step_2", "global_step_4"]
    assert not (folder / "global_step_2/.hf.partial").exists()
    said = "partial: an unfinished checkpoint of an earlier run, removed"
    assert f".global_step_6.{said}" in caplog.text
    assert f".global_step_8.{said} (its state is of step 2)" in caplog.text


def test_a_second_run_does_not_write_where_one_is_writing(tmp_path):
    path = write_config(tmp_path, train__max_steps=1, train__save_hf_weights=False)
    (tmp_path / "out/checkpoints/.global_step_1.partial").mkdir(parents=True)
    holds = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); "
        "print('held', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holds, str(tmp_path / "out/.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(
            ValueError, match=r"train\.output_dir = .*: another run is writing there"
        ):
            run(path)
        assert (tmp_path / "out/checkpoints/.global_step_1.partial").exists()
        other.stdin.close()
    run(path)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_interrupt_is_one_sentence_that_names_the_last_checkpoint(
    asynchronous, tmp_path, capsys
):
    path = write_config(tmp_path, train__save_steps=2, train__save_async=asynchronous)
    try:  # of an asynchronous one, while the second checkpoint is under way
        with stopped(5, KeyboardInterrupt()):
            assert train.main([path]) == 130
    finally:
        dist.destroy_process_group()
    said, last = capsys.readouterr().err, tmp_path / "out/checkpoints/global_step_4"
    assert said.splitlines()[-1] == f"interrupted after step 4; the last whole checkpoint is {last}"
    assert "Traceback" not in said
    assert run_folder.candidates(str(tmp_path / "out"), "auto")[0].name == "global_step_4"


def test_a_checkpoint_that_an_interrupt_cuts_off_is_said_to_be_given_up(tmp_path):
    with fake_group(1):
        saver = checkpoint.Saver(str(tmp_path), Mesh(), False)
        assert saver.interrupted() == "no checkpoint has been written"

        class Interrupted:
            def result(self):
                raise KeyboardInterrupt

        saver.pending = (Interrupted(), saver.folder(4))
        assert (
            saver.interrupted()
            == "no checkpoint has been written; global_step_4 was being written and is given up"
        )


def test_a_step_that_is_not_finite_reaches_no_weight_and_no_checkpoint(tmp_path):
    options = {"train__save_steps": 1, "train__max_steps": 4}
    run(write_config(tmp_path / "a", **options))
    path, real, steps = write_config(tmp_path / "b", **options), Engine.forward_backward, []

    def overflows(self, *arguments):
        out = real(self, *arguments)
        steps.append(1)
        if len(steps) == 3:
            self.parameters[0].grad[0, 0] = math.inf
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "forward_backward", overflows)
        with pytest.raises(
            ValueError,
            match=r"step 3: the norm of the gradients is inf, .*; global_step_2 has the weights "
            r"that gave this: .* and resume from .*global_step_1$",
        ):
            run(path)
    run(path, AUTO)
    assert [r["loss"] for r in rows(tmp_path / "a")] == [r["loss"] for r in rows(tmp_path / "b")]
    a, b = (tensors(tmp_path / name, 4) for name in "ab")
    assert all(torch.equal(t, b[n]) for n, t in a.items())
    with pytest.raises(
        ValueError, match=r"step 1: \S+ or its moments are not finite, so that no checkpoint is"
    ):
        run(write_config(tmp_path / "c", **options, train__lr=1e39))  # with finite gradients
    assert not checkpoint.complete(str(tmp_path / "c/out"))


def test_a_ruined_checkpoint_is_not_what_a_run_is_told_to_go_on_with(tmp_path):
    """Step 1 makes huge weights, which are finite, and saved."""
    path = write_config(tmp_path, train__save_steps=1, train__lr=1e30)
    said = r"^step 2: .* not taken; global_step_1 has the weights that gave this: .* start anew$"
    with pytest.raises(ValueError, match=said):
        run(path)
    later = write_config(tmp_path / "later", train__save_steps=2, train__max_steps=8)
    real, steps = Engine.optim_step, []

    def ruins(self, factor, *arguments):
        steps.append(1)
        return real(self, 1e30 if len(steps) == 6 else factor, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "optim_step", ruins)
        with pytest.raises(ValueError, match=r"^step 7: .* and resume from \S*global_step_4$"):
            run(later)


def test_weights_that_are_not_finite_are_named_before_training(tmp_path):
    source = drawn(QWEN3)
    with torch.no_grad():
        source.model.layers[1].mlp.down_proj.weight[3, 5] = math.nan
    hf.save_weights(source, tmp_path / "weights")
    path = write_config(tmp_path, model__model_path=str(tmp_path / "weights"))
    said = r"weights: model.layers.1.mlp.down_proj.weight holds NaN or infinity as it is stored$"
    with pytest.raises(ValueError, match=rf"^model.model_path = {tmp_path}/{said}"):
        run(path)
    assert not (tmp_path / "out/metrics.jsonl").exists()


def test_samples_beyond_the_models_positions_are_warned_of(tmp_path, capsys):
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps({"input_ids": [5] * n}) + "\n" for n in (64, 65, 80)))
    options = {
        "data__datasets": [{"path": str(data)}],
        "data__test_datasets": [{"path": str(data), "max_seq_len": 64}],
        "data__sample_packing_sequence_len": 96,
        "train__max_steps": 1,
    }
    run(write_config(tmp_path, **options))
    warned = [line for line in capsys.readouterr().out.splitlines() if "warning: " in line]
    assert len(warned) == 1 and warned[0].startswith(
        "warning: 2 of 3 samples of training are longer than the model's max_position_embeddings "
        "= 64 (up to 80 tokens)"
    )


@pytest.mark.parametrize("field", ["checkpoints", "tensorboard", "log_dir", "profile_trace_dir"])
def test_folders_are_tried_before_the_first_step(field, tmp_path, monkeypatch):
    """/proc takes no files, not even root's."""
    place = tmp_path / "out" / field
    place.parent.mkdir()
    place.symlink_to("/proc", target_is_directory=True)
    changes = {
        "tensorboard": {"train__use_tensorboard": True},
        "log_dir": {"train__use_tensorboard": True, "train__log_dir": str(place)},
        "profile_trace_dir": {
            "train__enable_profiling": True,
            "train__profile_trace_dir": str(place),
        },
    }.get(field, {})
    monkeypatch.setattr(build_module, "build_data", lambda *_: pytest.fail("data were built"))
    name = field if field.endswith("_dir") else "output_dir"
    with pytest.raises(OSError, match=rf"^train.{name}: {place} cannot be written: \w+"):
        run(write_config(tmp_path, **changes))


def test_trying_a_folder_leaves_no_file(tmp_path):
    config = load(write_config(tmp_path, train__use_tensorboard=True))
    writable.check(config.train, Mesh())
    assert sorted(p.name for p in tmp_path.rglob("out/**/*")) == ["checkpoints", "tensorboard"]
    (tmp_path / "out/checkpoints").rmdir()
    (tmp_path / "out/checkpoints").write_text("")
    with pytest.raises(OSError, match="out/checkpoints cannot be written: File exists"):
        writable.check(config.train, Mesh())


@pytest.mark.parametrize("kind", ["lora", "nvfp4"])
def test_adapters_that_are_not_finite_are_not_merged(kind, tmp_path):
    path = write_config(
        tmp_path,
        train__lr=1e39,
        train__save_steps=1,
        train__save_async=True,
        lora__merge_lora_interval=1,
        lora__enable_aqn=kind != "lora",
        **KINDS[kind],
    )
    merged = tmp_path / "merged"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters, "after_step", lambda *_: merged.touch())
        message = r"step 1: \S+ or its moments are not finite, so that nothing is merged; .* anew"
        with pytest.raises(ValueError, match=message):
            run(path)
    assert not checkpoint.complete(str(tmp_path / "out")) and not merged.exists()


def test_a_loss_of_evaluation_that_is_not_finite_ends_the_run_before_a_checkpoint(tmp_path):
    path = write_config(tmp_path, train__save_steps=2, data__val_set_size=4)
    losses = iter([4.0, 3.5, math.nan])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "evaluation", lambda *_, **__: {"eval_loss": next(losses)})
        message = r"step 4: the loss of evaluation is nan, so it is not saved; .*/global_step_2$"
        with pytest.raises(ValueError, match=message):
            run(path)
    assert [p.name for p in checkpoint.complete(str(tmp_path / "out"))] == ["global_step_2"]
    assert all(math.isfinite(value) for row in rows(tmp_path) for value in row.values())


def stepped():
    """A layer and its optimizer, after a step."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_moments_that_are_not_finite_reach_no_checkpoint(tmp_path):
    model, optimizer = stepped()
    optimizer.state[model.bias]["exp_avg_sq"][1] = math.nan
    with pytest.raises(ValueError, match=r"step 1: bias or its moments are not finite"):
        checkpoint.Saver(str(tmp_path), Mesh(), False).save(
            1, Parts(model), optimizer, {"data": {}, "run": {}, "ops": {}}
        )
    assert not checkpoint.complete(str(tmp_path))


class Calls:
    """Unpickling makes a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_reading_a_checkpoint_runs_no_code_of_its(tmp_path):
    model, optimizer = stepped()
    saver = checkpoint.Saver(str(tmp_path), Mesh(), False)

    def save(step):
        return saver.save(step, Parts(model), optimizer, {"data": {}, "run": {}, "ops": {}})

    def load(folder):
        return checkpoint.restore(
            folder, Parts(model), optimizer, Mesh(), run={}, ops={}, checked=False
        )

    touched = tmp_path / "touched"
    touch = Calls(pathlib.Path.touch, touched)
    whole = save(1)
    assert load(whole)["step"] == 1
    state = optimizer.state[model.weight]
    state["more"] = touch
    crafted = save(2)
    state["more"] = 0
    with pytest.raises(
        checkpoint.Damaged, match=r"global_step_2: cannot be read .*Weights only load failed"
    ):
        load(crafted)
    del state["more"]
    metadata = pickle.loads((whole / "dcp/.metadata").read_bytes())
    tensor = next(m for m in metadata.state_dict_metadata.values() if hasattr(m, "properties"))
    kind = type(tensor.properties.__getstate__()[3])
    assert issubclass(kind, enum.Enum)
    metadata.planner_data = Calls(getattr, kind, next(iter(kind)).name)
    (whole / "dcp/.metadata").write_bytes(pickle.dumps(metadata))
    assert load(whole)["step"] == 1  # as Python 3.11.0 to 3.11.3 write an enum's member
    piece = next(iter(metadata.storage_data.values()))
    for changed, message in (
        (Calls(getattr, pathlib.PosixPath, "touch"), r"it names builtins\.getattr of"),
        (touch, r"it names pathlib\.Path\.touch"),
        (Calls(exec, f"open({str(touched)!r}, 'w')"), r"it names builtins\.exec"),
        (Calls(torch.save, 1, str(touched)), r"it names torch\.serialization\.save"),
        (dataclasses.replace(piece, relative_path=str(touched)), "is not a file in the folder"),
        (dataclasses.replace(piece, relative_path="absent.distcp"), "absent.distcp: is absent"),
    ):
        metadata.storage_data["more"] = changed
        (whole / "dcp/.metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(checkpoint.Damaged, match=message):
            load(whole)
    (whole / "dcp/.metadata").write_bytes(b"no pickle")
    with pytest.raises(
        checkpoint.Damaged, match=r"\.metadata: is not the metadata of a checkpoint"
    ):
        load(whole)
    assert not touched.exists()


def test_auto_goes_to_the_checkpoint_before_one_that_is_damaged(tmp_path, caplog):
    path = write_config(
        tmp_path, train__save_steps=1, train__max_steps=4, train__save_hf_weights=False
    )
    run(path)
    folder = tmp_path / "out/checkpoints"
    [file] = (folder / "global_step_4/dcp").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-100])
    [file] = (folder / "global_step_3/dcp").glob("*.distcp")
    file.write_bytes(b"x" * file.stat().st_size)
    (folder / "global_step_2/random_0.safetensors").write_bytes(b"x")
    with pytest.raises(
        ValueError, match=r"global_step_4/dcp/\S+\.distcp: is cut off after \d+ bytes"
    ):
        run(path, f"--train.load_checkpoint_path={folder}/global_step_4")
    run(path, AUTO)
    said = [r.message for r in caplog.records if "going on from the one before it" in r.message]
    assert [re.search(r"global_step_\d", line).group() for line in said] == [
        f"global_step_{n}" for n in (4, 3, 2)
    ]
    assert [r["step"] for r in rows(tmp_path)] == [1, 2, 3, 4]


def test_other_data_of_the_same_lengths_are_not_gone_on_with(tmp_path):
    options = ten_samples(tmp_path)
    path = write_config(tmp_path, train__save_steps=4, **options)
    run(path)
    file = tmp_path / "ten.jsonl"
    file.write_text(file.read_text().replace("96, 0", "96, 1").replace("[9, 10", "[9, 11"))
    with pytest.raises(ValueError, match=r"another data: \{'contents'"):
        run(path, AUTO)
    folder = run_folder.candidates(str(tmp_path / "out"), "auto")[0]
    then = checkpoint_files.read_state(folder)
    del then["run"]["data"]["contents"], then["made_of"]
    checkpoint_files.write_state(folder, then)
    with pytest.raises(ValueError, match="written by a version that did not record data: contents"):
        run(path, AUTO)


def test_seconds_and_tokens_are_those_of_the_steps(tmp_path, monkeypatch):
    """Without the time for checkpoints and evaluations; all tokens, trained on or not; through a
    run in two folders. The learning rate is that of the step, too.
    """
    options = ten_samples(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "ten.jsonl").read_text().splitlines()]
    for line in lines:
        line["labels"] = [-100] * 8 + line["input_ids"][8:]
    (tmp_path / "ten.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    clock, save, evaluate = [0.0], checkpoint.Saver.save, loop.evaluation

    def now():
        clock[0] += 1
        return clock[0]

    def slow(*arguments):
        clock[0] += 1000
        return save(*arguments)

    def evaluates(*arguments, **options):
        clock[0] += 1000
        return evaluate(*arguments, **options)

    monkeypatch.setattr(loop.Metrics.__init__.__globals__["time"], "perf_counter", now)
    monkeypatch.setattr(checkpoint.Saver, "save", slow)
    monkeypatch.setattr(loop, "evaluation", evaluates)
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    test = [{"path": str(tmp_path / "two.jsonl")}]
    options |= {"train__lr_decay_style": "linear", "data__test_datasets": test}
    path = write_config(tmp_path / "a", train__save_steps=4, **options)
    run(path)
    found = [r for r in rows(tmp_path / "a") if "loss" in r]
    assert len(rows(tmp_path / "a")) > len(found) + 5, "an epoch ends where nothing is saved"
    assert max(r["seconds"] for r in found) < 1000
    settings = load(path).train
    assert [r["lr"] for r in found] == [lr_at(i, len(found), settings) for i in range(len(found))]
    lengths = [
        r["tokens"] - before["tokens"]
        for before, r in zip([{"tokens": 0}, *found], found, strict=False)
    ]
    assert sorted(lengths) == sorted([*range(11, 21)] * 2)
    assert [r["tokens_per_second"] for r in found] == [
        n / r["seconds"] for n, r in zip(lengths, found, strict=True)
    ]
    run(
        write_config(tmp_path / "b", **options),
        f"--train.load_checkpoint_path={tmp_path}/a/out/checkpoints/global_step_8",
    )
    resumed = [r for r in rows(tmp_path / "b") if "loss" in r]
    assert [(r["tokens"], r["lr"]) for r in resumed] == [(r["tokens"], r["lr"]) for r in found[8:]]


def test_determinism_ends_with_the_run_and_the_look_at_targets_with_its_first_step(tmp_path):
    seen, real = [], targets.check

    def check(target, *arguments):
        look = targets._may_read(types.SimpleNamespace(is_cuda=True))
        seen.append((torch.are_deterministic_algorithms_enabled(), look))
        return real(target, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(targets, "check", check)
        run(
            write_config(
                tmp_path,
                train__enable_full_determinism=True,
                train__allow_cuda_launch_blocking=True,
                train__max_steps=2,
            )
        )
    losses = len(seen) // 2  # per step
    assert losses and seen == [(True, True)] * losses + [(True, False)] * losses
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_missing_or_broken_checkpoint_is_one_sentence(tmp_path):
    path = write_config(tmp_path, train__max_steps=1)
    run(path)
    with pytest.raises(FileNotFoundError, match="no checkpoint there"):
        run(path, "--train.load_checkpoint_path", str(tmp_path / "nowhere"))
    assert run_folder.candidates(str(tmp_path / "fresh"), "auto") == []
    folder = tmp_path / "out/checkpoints/global_step_1"
    (folder / "dcp/.metadata").unlink()
    with pytest.raises(FileNotFoundError, match="not a whole checkpoint"):
        run(path, AUTO)
    (folder / "state.json").write_text('{"step": 1')
    with pytest.raises(ValueError, match=r"state\.json: is not valid JSON"):
        run(path, AUTO)


def test_a_run_does_not_start_over_an_earlier_one_and_auto_takes_what_was_written_last(tmp_path):
    path = write_config(tmp_path, train__save_steps=2, train__save_hf_weights=False)
    run(path)
    with pytest.raises(
        ValueError, match=r"holds global_step_6 of an earlier run; set train\.load_checkpoint_path"
    ):
        run(path)
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:  # resumed from step 2, and stopped after step 4
        patch.setattr(
            loop.Metrics,
            "step",
            lambda self, step, *a, **k: (
                (_ for _ in ()).throw(KeyboardInterrupt) if step == 5 else None
            ),
        )
        with pytest.raises(KeyboardInterrupt):
            run(path, "--train.load_checkpoint_path", str(out / "checkpoints/global_step_2"))
    assert run_folder.candidates(str(out), "auto")[0].name == "global_step_4"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_checkpoints_stay(asynchronous, tmp_path):
    """The one resumed from too; none is half removed."""
    options = {"train__save_steps": 1, "train__save_hf_weights": False}
    path = write_config(tmp_path, **options, train__save_async=asynchronous)
    folder = tmp_path / "out/checkpoints"

    def there():
        return sorted(int(p.name.split("_")[-1]) for p in folder.glob("global_step_*"))

    run(path, "--train.max_steps=4")
    assert there() == [1, 2, 3, 4]
    seen, real = [], checkpoint.Saver.finish

    def finish(saver):
        real(saver)
        seen.append(there())

    gone = folder / ".global_step_9.deleted"  # killed while it was removed
    gone.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.Saver, "finish", finish)
        run(
            path,
            "--train.save_total_limit=2",
            f"--train.load_checkpoint_path={folder}/global_step_2",
        )
    # Nothing is removed before the first new one is complete.
    assert seen[0] == [1, 2, 3, 4] and there() == [2, 6]
    assert not [*folder.glob(".*")]


def test_checkpoints_for_a_gpu_are_staged_in_page_locked_memory(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(checkpoint, "DefaultStager", lambda options: given.append(options))
    monkeypatch.setattr(checkpoint, "checkpoint_group", lambda: None)
    with fake_group(1):
        for asynchronous in (False, True):
            for device in ("cpu", "cuda"):
                mesh = Mesh(device=torch.device(device))
                checkpoint.Saver(str(tmp_path), mesh, asynchronous)
    [options] = given
    assert options.use_pinned_memory and options.use_non_blocking_copy
    assert not options.use_async_staging  # weights change in the next step


def test_a_finished_run_is_not_run_again_and_an_incomplete_checkpoint_is_ignored(tmp_path, caplog):
    path = write_config(tmp_path, train__max_steps=2, train__save_hf_weights=False)
    run(path)
    before = (tmp_path / "out/metrics.jsonl").read_text()
    (tmp_path / "out/checkpoints/global_step_3/dcp").mkdir(parents=True)
    run(path, AUTO)
    assert "global_step_3: is not complete (no state.json), so it is ignored" in caplog.text
    assert (tmp_path / "out/metrics.jsonl").read_text() == before


def test_a_kill_while_a_checkpoint_is_replaced_loses_nothing(tmp_path):
    path = write_config(tmp_path, train__save_steps=2, train__max_steps=4)
    run(path)
    folder = tmp_path / "out/checkpoints"
    # Killed between the two renames.
    (folder / "global_step_4").rename(folder / ".global_step_4.old")
    run_folder.recover(str(tmp_path / "out"), Mesh())
    assert run_folder.candidates(str(tmp_path / "out"), "auto")[0].name == "global_step_4"
    (folder / ".global_step_4.old/x").mkdir(parents=True)  # killed before the old one was removed
    with open(tmp_path / "out/metrics.jsonl", "a") as file:  # and while a line was written
        file.write('{"step": 4, "lo')
    run(path, "--train.load_checkpoint_path", str(folder / "global_step_2"))
    assert sorted(p.name for p in folder.iterdir()) == ["global_step_2", "global_step_4"]
    assert [r["step"] for r in rows(tmp_path)] == [1, 2, 3, 4]


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32_weights(tmp_path):
    path = write_config(tmp_path, train__micro_batch_size=8)
    exact, mixed = (
        step_in_one_process(path, make_bins(), f"--train.enable_mixed_precision={m}")
        for m in ("false", "true")
    )
    assert mixed["loss"] == pytest.approx(exact["loss"], rel=2e-2)
    for name, grad in exact["grads"].items():
        # The losses alone may round to the same number.
        assert mixed["grads"][name].dtype == torch.float32 and not mixed["grads"][name].equal(grad)
        assert (mixed["grads"][name] - grad).norm() <= 0.05 * grad.norm(), name


@pytest.mark.parametrize("mode, merge_qkv", [("none", False), ("fsdp2", True)])
def test_mixed_precision_rounds_no_angle_no_count_and_no_sum_of_gradients(
    mode, merge_qkv, tmp_path, monkeypatch
):
    found = {}

    def spy(name, what):
        real = getattr(tw, name)

        def called(*args, **options):
            found[name] = what(args, options)
            return real(*args, **options)

        monkeypatch.setattr(tw, name, called)

    spy("linear_cross_entropy", lambda args, options: args[0].dtype)
    spy("qk_norm_rope", lambda args, options: (args[0].dtype, args[1].dtype, args[2].dtype))
    spy("rope", lambda args, options: (args[0].dtype, args[2].dtype, args[3].dtype))
    config = load(
        write_config(tmp_path, train__micro_batch_size=8, model__merge_qkv=merge_qkv),
        ["--train.enable_mixed_precision=true", f"--train.data_parallel_mode={mode}"],
    )
    ranks = join(config.train)
    try:
        ids, engine = np.arange(260) % 97, engine_of(config, ranks)
        micro_batches = [batches.collate([[(ids[i:], ids[i:])]], 1) for i in (0, 100)]
        sums = engine.forward_backward(micro_batches, language_modeling)
        grads = [distributed_worker.full(p.grad) for p in engine.parameters]
    finally:
        dist.destroy_process_group()
    half = torch.bfloat16
    assert found.pop("linear_cross_entropy") == half
    assert sums.denominator == 259 + 159  # in bfloat16 the first would be 260
    # Gradients are summed in float32: a sum of two in bfloat16 would be one of its numbers.
    assert all(g.dtype == torch.float32 and not torch.equal(g, g.to(half).float()) for g in grads)
    assert found == {"qk_norm_rope" if merge_qkv else "rope": (half, torch.float32, torch.float32)}


def test_no_layer_asks_the_device_how_long_documents_are(tmp_path, monkeypatch):
    given, real = [], tw.attention
    monkeypatch.setattr(tw, "attention", lambda *a, **k: given.append(k) or real(*a, **k))
    step_in_one_process(write_config(tmp_path, train__micro_batch_size=8), make_bins())
    assert len(given) == QWEN3["num_hidden_layers"]
    for k in given:
        assert k["cu_seqlens"].diff().max() == k["max_seqlen"] == 16


def test_compiled_layers_give_the_same_gradients(tmp_path):
    path = write_config(tmp_path, train__micro_batch_size=8)
    plain, compiled = (
        step_in_one_process(path, make_bins(), f"--train.enable_compile={c}")
        for c in ("false", "true")
    )
    same(compiled, plain, 1e-4)


PARTS = {
    "AddRMSNorm.forward": 24,
    "Attention.project": 12,
    "Attention.output": 12,
    "MLP.forward": 12,
}
MIXED = {**MOE, "mlp_only_layers": [0, 5]}
RECOMPUTED = {"train__enable_gradient_checkpointing": True, "train__data_parallel_mode": "fsdp2"}
COMPILED = {
    "whole": ({"model__attn_implementation": "eager"}, {"Block.forward": 12}),
    "parts": (
        {"model__attn_implementation": "sdpa", "train__moe_checkpoint_method": "moe_act"},
        {**PARTS, "MLP.forward": 2},
    ),
}


@pytest.mark.parametrize("case", COMPILED)
def test_every_layer_is_compiled_and_stays_so(case, tmp_path, backend, capsys):
    options, parts = COMPILED[case]
    path = write_config(
        tmp_path,
        {**MIXED, "num_hidden_layers": 12},
        **{
            "train__save_hf_weights": False,
            "data__val_set_size": 2,
            "train__max_steps": 6,
            "train__micro_batch_size": 2,
            **RECOMPUTED,
            **options,
        },
    )
    ran, real, counts = set(), compiling.Compiled.__call__, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            compiling.Compiled, "__call__", lambda self, *a: ran.add(self) or real(self, *a)
        )
        patch.setattr(loop.Metrics, "step", lambda *a, **k: counts.append(backend.frame_count))
        run(path, "--train.enable_compile=true")
    assert (
        "compiled: " + ", ".join(f"{n} x {name}" for name, n in parts.items()) + "\n"
        in capsys.readouterr().out
    )
    assert len(ran) == len(parts) + (case == "whole") and all(c.run is not c.plain for c in ran)
    # With gradients and without, for the first layer and the others, for one length of documents
    # and then any: not per layer, batch or number of documents.
    assert counts[0] > 0 and counts[-1] <= 6 * len(ran)


@pytest.mark.parametrize(
    "shape, arguments, parts",
    [
        (QWEN3, ["--model.attn_implementation=sdpa"], PARTS),
        (QWEN3, [], {"Block.forward": 12}),
        (QWEN3, [RECOMPUTE, '--train.recompute_modules=["self_attn"]'], PARTS),
        (MOE, EXPERTS, {k: n for k, n in PARTS.items() if k != "MLP.forward"}),
        (QWEN3, [FSDP2, '--model.basic_modules=["o_proj"]'], "o_proj would be gathered in"),
    ],
)
def test_what_of_a_layer_is_compiled_is_chosen_by_what_can_be(
    shape, arguments, parts, tmp_path, backend
):
    options = {"train__enable_compile": True, "model__attn_implementation": "eager"}
    path = write_config(tmp_path, {**shape, "num_hidden_layers": 12}, **options)
    config = load(path, arguments)
    model = Transformer(shape_of(config), Ops.resolve(config.model.attn_implementation))
    arguments = (model, config.train, config.train, config.model.basic_modules)
    if isinstance(parts, str):
        with pytest.raises(ValueError, match=parts):
            compiling.compile_layers(*arguments)
    else:
        compiling.compile_layers(*arguments)
        recompute_activations(model, config.train.recompute_modules)
        assert compiling.compiled_parts(model) == parts


def test_what_is_no_longer_compiled_says_so(caplog, backend):
    grows = compiling.Compiled(Grows.call)
    for n in range(12):
        assert grows(Grows(n), torch.ones(2)).tolist() == [1 + n] * 2
    [said] = [r.message for r in caplog.records if "train.enable_compile" in r.message]
    assert said.startswith(
        "train.enable_compile: Grows.call has been compiled 8 times and runs uncompiled"
    )
    with pytest.raises(
        ValueError, match=r"train\.enable_compile = True: Grows\.breaks cannot be compiled: "
    ):
        compiling.Compiled(Grows.breaks)(Grows(1), torch.ones(2))


class Grows:
    def __init__(self, n):
        self.text = str(n)

    def call(self, x):
        return x + len("x" * int(self.text))

    def breaks(self, x):
        torch._dynamo.graph_break()
        return x + 1


def test_a_profile_is_written_when_asked_for(tmp_path):
    path = write_config(
        tmp_path,
        train__max_steps=3,
        train__enable_profiling=True,
        train__profile_trace_dir=str(tmp_path / "trace"),
    )
    run(path)
    [trace] = (tmp_path / "trace").glob("*.json")
    events = json.loads(trace.read_text())["traceEvents"]
    assert any("tilewright" in e.get("name", "") for e in events)


UNREAD = {"profile_start_step": 50, "profile_end_step": 51, "enable_profiling": True}
TWO_THETAS = {"rope_parameters": {"rope_theta": 5.0}, "rope_theta": 7.0}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"train__output_dir": "FILE"}, "File exists|Not a directory"),
        (
            {"train__lr": 1e30},
            r"step 2: the (loss|norm of the gradients) is (nan|inf), so the step",
        ),
        (
            {"train__no_decay_modules": ["nosuch"]},
            "no_decay_modules: no name in the model contains",
        ),
        ({f"train__{k}": v for k, v in UNREAD.items()}, "profile_start_step = 50: the run has 6"),
        ({"model__config_path": "no/such/folder"}, "no/such/folder: no such file or folder"),
        (
            {"model__foundation": {"hiden_size": 64}},
            "foundation: hiden_size is no entry that a qwen3 model .* did you mean hidden_size?",
        ),
        ({"model__foundation": {"bos_token_id": 3}}, "bos_token_id is no entry that a qwen3 model"),
        ({"model__foundation": TWO_THETAS}, r"foundation: rope_theta = 7\.0 would be 5\.0 all the"),
        ({"model__foundation": {"head_dim": 7}}, "config.json: head_dim must be even, got 7"),
        ({"data__datasets": [{"path": "TEXT", "type": "text"}]}, "holds no tokenizer"),
        ({"data__datasets": [{"path": "EMPTY"}]}, "empty.jsonl: there is nothing in it"),
        (
            {
                "data__datasets": [{"path": "FOLDER"}],
                "data__dataset_prepared_path": "FOLDER/prepared",
            },
            "dataset_prepared_path = .* lies in the data set",
        ),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(change, message, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "text.txt").write_text("Some words.")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    places = {"FILE": "file", "TEXT": "text.txt", "EMPTY": "empty.jsonl", "FOLDER": "folder"}

    def real(value):
        if isinstance(value, list):
            return [real(v) for v in value]
        if isinstance(value, dict):
            return {k: real(v) for k, v in value.items()}
        head, slash, rest = str(value).partition("/")
        return str(tmp_path / places[head]) + slash + rest if head in places else value

    with pytest.raises((ValueError, OSError), match=message):
        run(write_config(tmp_path, **{k: real(v) for k, v in change.items()}))
    assert gc.isenabled()  # restored


def test_a_rope_type_needs_its_entries():
    scaling = {"rope_type": "llama3", "factor": 8.0}
    with pytest.raises(ValueError, match="rope type 'llama3' needs low_freq_factor"):
        ModelConfig.from_hf({**QWEN3, "rope_scaling": scaling})


def test_weights_that_are_not_safetensors_are_named(tmp_path):
    write_config(tmp_path)
    (tmp_path / "model/model.safetensors").write_text("not tensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read as safetensors"):
        hf.load_weights(Transformer(ModelConfig.from_hf(QWEN3), Ops.resolve()), tmp_path / "model")


# ---- adapters

FP8 = {**QLORA, "lora__quant_format": "block_fp8", "lora__quant_group_size": 16}
KINDS = {"lora": LORA, "nvfp4": QLORA, "nf4": NF4, "block_fp8": FP8}


def adapter_names(model):
    return {n for n, _ in model.named_parameters() if is_adapter(n)}


OF_SHAPES = {"qwen3": ("lora", "nf4", "block_fp8"), "qwen3-moe": ("lora", "nvfp4")}


@pytest.mark.parametrize("name, kind", [(n, k) for n, own in OF_SHAPES.items() for k in own])
def test_adapters_alone_learn(name, kind, tmp_path):
    shape = SHAPES[name]
    path = write_config(
        tmp_path,
        shape,
        train__micro_batch_size=4,
        train__weight_decay=0.1,
        train__lr=0.02,
        train__gradient_accumulation_steps=2,
        **KINDS[kind],
    )
    config, fresh = build(path)
    plain = Transformer(shape_of(config), Ops.resolve())
    init_weights(plain, config.train.seed)
    ids = torch.arange(12)[None]
    if kind == "lora":
        # Experts with adapters use another op than experts without.
        assert (fresh(ids) - plain(ids)).abs().max() <= (1e-6 if shape is MOE else 0)
    else:
        error = (fresh(ids) - plain(ids)).abs().max() / plain(ids).abs().max()
        assert 1e-3 < error < 0.3
    held, found = distributed_worker.several_steps(config, Mesh(), make_bins(), steps=8)
    model, optimizer = held.model, held.optimizer
    before, after = fresh.state_dict(), model.state_dict()
    assert found["loss"][-1] < found["loss"][0] - 0.05
    for name, t in after.items():
        assert torch.equal(t, before[name]) != is_adapter(name), name
    assert (
        {n for n, p in model.named_parameters() if p in optimizer.state}
        == adapter_names(model)
        != set()
    )
    quantized = [name for name, p in nn.base_weights(model) if nn.quantized(p)]
    assert len(quantized) == (0 if kind == "lora" else 8)


def flags(options):
    return [f"--{key.replace('__', '.')}={value}" for key, value in options.items()]


# The third step trains on what a merge after the second left.
MERGED = ["--lora.enable_lora=true", "--lora.merge_lora_interval=2", "--train.max_steps=3"]
AQN_TRAINED = ["--lora.enable_qlora=true", "--lora.enable_aqn=true"]
ADAPTERS = {
    "train_lora_ddp": [*flags(LORA), *MODES["ddp"]],
    "train_lora_fsdp2": [*flags(LORA), *MODES["fsdp2_recompute"]],
    "train_lora_hsdp": [*flags(LORA), *MODES["hsdp"]],
    "train_nf4_ddp": [*flags(NF4), *MODES["ddp"]],
    "train_nf4_hsdp": [*flags(NF4), *MODES["hsdp"]],
    "train_nvfp4_fsdp2": [*flags(QLORA), *MODES["fsdp2_recompute"]],
    "train_lora_merge": [*MERGED, *MODES["fsdp2"]],
    "train_aqn": [*AQN_TRAINED, *MODES["fsdp2_recompute"]],
    "train_aqn_ddp": [*AQN_TRAINED, *MODES["ddp"]],
}
ALONE = {"lora_merge": MERGED, "aqn": AQN_TRAINED}


def adapters_of(shape):
    """The adapters that two processes train."""
    if shape is QWEN3:
        return ADAPTERS
    few = ("train_lora_fsdp2", "train_nf4_ddp", "train_nvfp4_fsdp2", "train_lora_merge")
    spread = {"train_spread": ["--lora.enable_lora=true", *EXPERTS]}
    return {k: ADAPTERS[k] for k in few} | spread


@pytest.mark.parametrize("shape", SHAPES)
def test_two_processes_train_adapters_as_one(shape, pairs):
    at, bins = pairs / shape / "adapters", make_bins()
    path = str(at / "config.yaml")

    cut = ["--train.micro_batch_size=4", "--train.gradient_accumulation_steps=2"]

    @functools.cache
    def in_one_process(*arguments):
        config = load(path, [*cut, *arguments])
        return distributed_worker.several_steps(config, Mesh(), bins)[1]

    for mode in adapters_of(SHAPES[shape]):
        kind = mode.split("_")[1]
        alone = (
            ALONE["lora_merge" if "merge" in mode else kind]
            if "merge" in mode or kind == "aqn"
            else (["--lora.enable_lora=true"] if kind == "spread" else flags(KINDS[kind]))
        )
        found = torch.load(at / f"{mode}.pt")
        same_training(found, in_one_process(*alone), rel=1e-4)


@pytest.mark.parametrize("kind, mode", [("lora", "none"), ("nf4", "fsdp2"), ("nvfp4", "none")])
def test_resuming_adapters_equals_never_stopping(kind, mode, tmp_path):
    """Through merges, with noise, and with the quantized weights in the checkpoint."""
    noise = {} if kind == "lora" else {"lora__enable_aqn": True}
    resumed_equals_never_stopped(
        tmp_path,
        **KINDS[kind],
        **noise,
        train__data_parallel_mode=mode,
        lora__merge_lora_interval=3,
        lora__reset_optimizer_on_merge=True,
    )


class Others(Group):
    """A group in which another rank has found this problem."""

    def gather(self, value):
        return [value, exchange.described(ValueError("layers.9.mlp: nothing is merged: inf"))]


def test_no_rank_merges_if_one_cannot(tmp_path):
    path = write_config(tmp_path, lora__merge_lora_interval=3, **KINDS["nf4"])
    config, model = build(path)
    optimizer = optim.build_optimizer(model, config.train)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"^layers\.9\.mlp: nothing is merged"):
        adapters.after_step(Parts(model), optimizer, config.lora, 0, 3, Mesh(control=Others()))
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("kind, reset", zip(KINDS, (False, True, False, True), strict=True))
def test_merging_happens_every_so_many_steps_and_may_forget_moments(kind, reset, tmp_path):
    path = write_config(
        tmp_path, lora__merge_lora_interval=3, lora__reset_optimizer_on_merge=reset, **KINDS[kind]
    )
    config, model = build(path)
    optimizer = optim.build_optimizer(model, config.train)
    ids = torch.arange(12)[None]
    for step in range(2):
        model(ids, labels=ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        adapters.after_step(
            Parts(model), optimizer, config.lora, config.train.seed, step + 1, Mesh()
        )
    before = {n: t.clone() for n, t in model.state_dict().items()}
    moments = [v.clone() for s in optimizer.state.values() for v in s.values()]
    assert all(m.any() for m in moments)
    dense = {n: t.clone() for n, t, _ in dense_weights(model)}
    want = model(ids)
    adapters.after_step(Parts(model), optimizer, config.lora, config.train.seed, 3, Mesh())
    assert all(
        not torch.equal(t, before[n]) for n, t in model.state_dict().items() if is_adapter(n)
    )
    if kind == "lora":  # bitwise equal; quantized weights are rounded again
        assert (model(ids) - want).abs().max() <= 1e-6
    for name, full, _ in dense_weights(model):
        error = (full - dense[name]).norm() / dense[name].norm()
        assert error <= (1e-6 if kind == "lora" else 0.15), name
    now = [v for s in optimizer.state.values() for v in s.values()]
    assert all(
        not v.any() if reset else torch.equal(v, m) for v, m in zip(now, moments, strict=True)
    )
    again = build(path)[1]  # the new adapters differ from the initial ones
    name = next(n for n in adapter_names(model) if n.endswith("lora_A"))
    assert not torch.equal(model.state_dict()[name], again.state_dict()[name])


@pytest.mark.parametrize("kind, mode", [("lora", "none"), ("nf4", "fsdp2")])
def test_adapters_that_are_written_alone_give_what_merging_writes(kind, mode, tmp_path):
    peft = pytest.importorskip("peft")
    run(write_config(tmp_path / "start", train__max_steps=1))
    start = tmp_path / "start/out/checkpoints/global_step_1/hf"
    (start / "tokenizer.json").write_text("{}")
    options = {
        **KINDS[kind],
        "model__model_path": str(start),
        "model__config_path": None,
        "train__data_parallel_mode": mode,
        "lora__lora_target_modules": ["q_proj", "mlp"],
    }
    for name, alone in (("merged", False), ("alone", True)):
        run(write_config(tmp_path / name, lora__save_lora_only=alone, **options))
    merged, alone = (
        tmp_path / f"{name}/out/checkpoints/global_step_6/hf" for name in ("merged", "alone")
    )
    assert sorted(p.name for p in alone.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    ]
    settings = json.loads((alone / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(start)
    assert settings["target_modules"] == ["down_proj", "gate_proj", "q_proj", "up_proj"]
    ids = torch.arange(20)[None]
    base = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()
    with torch.no_grad():
        want = base(ids).logits
        if kind == "lora":
            on = transformers.AutoModelForCausalLM.from_pretrained(start)
        else:  # adapters of quantized weights need the quantized base
            _, model = build(
                write_config(tmp_path / "dense", **{**options, "train__data_parallel_mode": "none"})
            )
            hf.save_weights(model, tmp_path / "dequantized")
            on = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dequantized")
        torch.testing.assert_close(
            peft.PeftModel.from_pretrained(on.eval(), alone)(ids).logits, want, rtol=1e-4, atol=1e-5
        )
        assert (on(ids).logits - want).abs().max() < 1e-4  # peft added them to this very model
        plain = transformers.AutoModelForCausalLM.from_pretrained(start).eval()
        assert (plain(ids).logits - want).abs().max() > 1e-2


def test_the_export_has_the_dtype_of_the_base(tmp_path):
    """The dtype of the loaded weights; for random ones that of config.json; float32 if it
    has none.
    """

    def exported(name, *arguments, **changes):
        run(write_config(tmp_path / name, train__max_steps=1, **changes), *arguments)
        folder = tmp_path / name / "out/checkpoints/global_step_1/hf"
        [dtype] = {t.dtype for t in tensors(tmp_path / name, 1).values()}
        assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix(
            "torch."
        )
        return folder, dtype

    folder, dtype = exported("random")
    assert dtype == torch.float32
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    half, dtype = exported(
        "half", model__config_path=str(tmp_path / "config.json"), model__tokenizer_path=str(folder)
    )
    assert dtype == torch.bfloat16
    for kind in ("lora", "nf4"):
        _, dtype = exported(
            kind, model__model_path=str(half), model__config_path=None, **KINDS[kind]
        )
        assert dtype == torch.bfloat16, kind


def test_each_field_of_lora_shapes_the_model(tmp_path):
    def layers(*arguments, **changes):
        model = build(write_config(tmp_path, **{**LORA, **changes}), *arguments)[1]
        return dict(adapted_layers(model)), dict(nn.base_weights(model))

    found, _ = layers()
    assert {m.rank for m in found.values()} == {4} and {m.scale for m in found.values()} == {2.0}
    assert len(found) == 8
    found, _ = layers(lora__lora_rank=8, lora__lora_alpha=2)
    assert {(m.rank, m.scale, m.lora_B.shape[1]) for m in found.values()} == {(8, 0.25, 8)}
    for rslora, alpha, resolved, scale in (
        (True, 8, 8, 4.0),
        (False, -1, 8, 2.0),
        (True, -1, 4, 2.0),
    ):
        found, _ = layers(lora__rslora=rslora, lora__lora_alpha=alpha)
        kinds = {(m.alpha, m.scale, m.rslora) for m in found.values()}
        assert kinds == {(resolved, scale, rslora)}
    found, _ = layers(lora__lora_target_modules=["v_proj", "layers.1.mlp"])
    assert {p.removeprefix("model.layers."): [*m.slices] for p, m in found.items()} == {
        "0.self_attn.qkv_proj": ["v_proj"],
        "1.self_attn.qkv_proj": ["v_proj"],
        "1.mlp.gate_up_proj": ["gate_proj", "up_proj"],
        "1.mlp.down_proj": [""],
    }
    for kind, size in (("nvfp4", 16), ("nf4", 64), ("block_fp8", 16)):
        _, weights = layers(**KINDS[kind])
        [q] = weights["model.layers.0.self_attn.o_proj.weight"].weights()
        assert nn.QuantFormat(kind, size) == nn.format_of(q)
    _, weights = layers(**{**NF4, "lora__quant_group_size": 512})
    assert weights["model.layers.0.self_attn.o_proj.weight"].weights()[0].block_size == 512
    _, weights = layers(**NF4, lora__exclude_modules=["layers.1", "gate_proj", "up_proj"])
    assert [n for n, w in weights.items() if isinstance(w, QuantizedLinear)] == [
        f"model.layers.0.{n}.weight"
        for n in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.down_proj")
    ]
    for changes, message in (
        ({"lora__lora_target_modules": ["score"]}, "lora.lora_target_modules: .*'score'"),
        ({**NF4, "lora__exclude_modules": ["nosuch"]}, "exclude_modules = .*'nosuch' match no"),
        ({**NF4, "lora__exclude_modules": ["layers"]}, "leaves nothing to quantize"),
    ):
        with pytest.raises(ValueError, match=message):
            layers(**changes)


def test_what_a_quantized_checkpoint_leaves_out_is_left_out_unless_the_user_says_otherwise(
    tmp_path,
):
    hf.save_weights(drawn(QWEN3), tmp_path / "weights")
    file = tmp_path / "weights/config.json"
    shape = json.loads(file.read_text())
    file.write_text(
        json.dumps(
            {**shape, "quantization_config": {"ignore": ["lm_head", "re:.*layers[.]1[.]mlp"]}}
        )
    )
    path = write_config(tmp_path, **NF4, model__model_path=str(tmp_path / "weights"))
    for arguments, count in (([], 6), (["--lora.exclude_modules=[]"], 8)):
        quantized = [n for n, p in nn.base_weights(build(path, *arguments)[1]) if nn.quantized(p)]
        assert len(quantized) == count and ("model.layers.1.mlp.down_proj.weight" in quantized) == (
            count == 8
        )


@pytest.mark.parametrize(
    "adapted, owner", [(["q_proj", "o_proj"], "Experts"), (["mlp"], "LoRAExperts")]
)
def test_quantized_experts_have_noise_in_training_alone(adapted, owner, tmp_path):
    """With adapters, which have a forward pass of their own, and without."""
    options = {**NF4, "lora__lora_target_modules": adapted}
    built = engine_of(load(write_config(tmp_path, MOE, **options)))
    few = [batches.collate([one], 8) for one in make_bins()[:2]]
    want = built.evaluate(few, language_modeling)
    trained = built.forward_backward(few, language_modeling).mean
    assert trained == pytest.approx(want, rel=1e-6)
    layers = [m for m in built.model.modules() if type(m).__name__ == owner]
    assert len(layers) == 2
    for i, layer in enumerate(layers):
        layer.set_noise(AQN(2.0, 1, layer=2 * i))
    assert built.evaluate(few, language_modeling) == want
    assert built.forward_backward(few, language_modeling).mean != trained


def test_noise_is_trained_with_and_not_evaluated_with(tmp_path):
    options = {**NF4, "data__val_set_size": 4, "train__max_steps": 3}
    runs = {
        "plain": {},
        "none": {"lora__enable_aqn": True, "lora__aqn_alpha": 0},
        "some": {"lora__enable_aqn": True},
        "again": {"lora__enable_aqn": True, "train__enable_gradient_checkpointing": True},
        "more": {"lora__enable_aqn": True, "lora__aqn_alpha": 2},
    }
    for name, changes in runs.items():
        run(write_config(tmp_path / name, **options, **changes))
    found = {
        name: [
            (r["step"], r.get("loss"), r.get("grad_norm"), r.get("eval_loss"))
            for r in rows(tmp_path / name)
        ]
        for name in runs
    }
    assert found["plain"] == found["none"] and found["some"] == found["again"]
    # Evaluated before the first step.
    assert found["plain"][0] == found["some"][0] and found["plain"][0][3]
    losses = [[row[1] for row in found[name] if row[1]] for name in ("plain", "some", "more")]
    assert all(len(set(step)) == 3 for step in zip(*losses, strict=True))
    config = load(write_config(tmp_path / "eval", **options))
    [held] = data_of(config, Mesh())[1].values()
    built = engine_of(config)
    model, few = built.model, list(evaluation_batches(held, 1, 0, 1))
    want = built.evaluate(few, language_modeling)
    nn.set_noise(model, AQN(1.0, 1))
    assert built.evaluate(few, language_modeling) == want
    adapters.before_step(Parts(model), load(str(tmp_path / "more/config.yaml")).lora, 6, 5)
    used = {n for m in model.modules() if isinstance(m, QuantizedLinear) for n in m.noise}
    assert {(n.alpha, n.seed, n.step) for n in used} == {(2.0, 6, 5)} and len(used) == 8


@pytest.mark.parametrize("kind", ["lora", "nvfp4"])
def test_compiled_layers_with_adapters_give_the_same_gradients(kind, tmp_path, backend):
    path = write_config(tmp_path, train__micro_batch_size=8, **KINDS[kind])
    plain, compiled = (
        step_in_one_process(path, make_bins(), f"--train.enable_compile={c}")
        for c in ("false", "true")
    )
    assert backend.frame_count > 0
    same(compiled, plain, 1e-4)


@pytest.mark.parametrize(
    "kind, mode, tolerance",
    [("all", "fsdp2", 1e-2), ("lora", "none", 1.5e-3), ("nvfp4", "fsdp2", 1.5e-3)],
)
def test_mixed_precision_with_recomputation(kind, mode, tolerance, tmp_path):
    """With FSDP2 the defaults, which all other runs here disable."""
    options = {**KINDS.get(kind, {}), "train__micro_batch_size": 2, "train__max_steps": 4}
    run(write_config(tmp_path / "exact", **options))
    run(
        write_config(tmp_path / "mixed", **options),
        f"--train.data_parallel_mode={mode}",
        "--train.enable_mixed_precision=true",
        RECOMPUTE,
    )
    exact, mixed = ([r["loss"] for r in rows(tmp_path / name)] for name in ("exact", "mixed"))
    assert exact != mixed
    np.testing.assert_allclose(mixed, exact, rtol=tolerance)
    a, b = tensors(tmp_path / "exact", 4), tensors(tmp_path / "mixed", 4)
    assert a.keys() == b.keys() and all(t.dtype == torch.float32 for t in b.values())


def test_a_checkpoint_with_other_adapters_is_refused(tmp_path):
    run(write_config(tmp_path, **NF4, train__max_steps=2))
    for changes in ({}, {**NF4, "lora__lora_rank": 2}, QLORA):
        with pytest.raises(ValueError, match=r"another model: \{'lora': "):
            run(write_config(tmp_path, **changes), AUTO)


def test_a_run_cannot_come_to_save_adapters_alone(tmp_path):
    """Previously merged weights would be lost."""
    merged = {**LORA, "lora__merge_lora_interval": 2, "lora__save_lora_only": False}
    alone = {**LORA, "lora__save_lora_only": True}
    then, now = (
        load(write_config(tmp_path, model__model_path=str(tmp_path), **options)).lora
        for options in (merged, alone)
    )
    assert adapters.identity(then) != adapters.identity(now)


@pytest.mark.parametrize("asked, taken", [("eager", "eager"), (None, "auto")])
def test_experts_with_adapters_take_the_implementation_that_was_asked_for(asked, taken, tmp_path):
    path = write_config(tmp_path, MOE, model__moe_implementation=asked, **LORA)
    _, model = build(path)
    assert [m.implementation for m in adapters.mixtures(model)] == [taken] * 2
    found = adapters.operations(model, torch.device("cpu"), torch.float32)
    assert found == {"moe_lora": asked or MOE_LORA.choose("cpu", torch.float32)}
    with pytest.raises(ImplementationUnavailable, match=r"moe_lora\[quack\]"):
        build(write_config(tmp_path, MOE, model__moe_implementation="quack", **LORA))


def test_adapters_of_experts_are_counted_as_routed(tmp_path):
    path = write_config(tmp_path, MOE, **LORA)
    config, model = build(path)
    shape = shape_of(config)
    plain = flops_per_token(Transformer(shape, Ops.resolve()), 0)
    of_experts, others = (
        sum(
            p.numel()
            for n, p in model.named_parameters()
            if is_adapter(n) and (".experts." in n) == which
        )
        for which in (True, False)
    )
    routed = of_experts * shape.num_experts_per_tok / shape.num_experts
    assert (
        flops_per_token(model, 0) == pytest.approx(plain * 4 / 6 + 6 * (others + routed))
        and of_experts
        and others
    )
