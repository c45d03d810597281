"""Pipelines of stages train as one process does."""

import json
import math
import types

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import distributed_worker
from ranks import STEEP, fsdp2, nearly_same_training, run_modes, same_training, selected
from safetensors.torch import load_file
from training import (
    MOE,
    MUON,
    QWEN3,
    check_moves,
    make_bins,
    rows,
    run,
    shape_of,
    tensors,
    write_config,
)

from tilewright import nn
from tilewright.core.torch_names import no_zero_bubble
from tilewright.trainer.config import load
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.ops_choice import Ops
from tilewright.trainer.parallel.mesh import Layout, Mesh
from tilewright.trainer.parallel.pipeline import Pipeline
from tilewright.trainer.parallel.stages import length_of_hidden, split_layers

# Before torch 2.13 zero-bubble schedules are refused.
ZERO, ZERO_V = "InterleavedZeroBubble", "ZBVZeroBubble"
if no_zero_bubble():
    ZERO = ZERO_V = "Interleaved1F1B"

DENSE = {**QWEN3, "num_hidden_layers": 4}  # tied embeddings
SPARSE = {**MOE, "num_hidden_layers": 4}


def pipelined(stages, schedule="1F1B", processes=4, **more):
    """Arguments with which so many processes train on the eight bins of a step, two of them in a
    micro-batch.
    """
    more = {"micro_batch_size": 2, **more}
    sizes = (more.get(f"{axis}_parallel_size", 1) for axis in ("ringattn", "tensor"))
    data = processes // stages // math.prod(sizes)
    return fsdp2(
        pipeline_parallel_size=stages,
        pipeline_parallel_schedule=schedule,
        gradient_accumulation_steps=8 // data // more["micro_batch_size"],
        **more,
    )


TWICE = {"virtual_pipeline_size": 2}
RECOMPUTE = {"enable_gradient_checkpointing": True}
# The third step trains on what a merge after the second left.
THREE = ["--train.max_steps=3"]
ADAM = ["--train.optimizer=adamw", "--train.lr=1e-3"]
SHARDED = fsdp2(gradient_accumulation_steps=2)
LORA = ["--lora.enable_lora=true", "--lora.lora_rank=2"]
QUANTIZED = ["--lora.enable_qlora=true", "--lora.quant_format=nf4", "--lora.quant_group_size=64"]
NOISE = ["--lora.enable_aqn=true", "--lora.aqn_alpha=0.5", "--lora.merge_lora_interval=2"]
# By model, and what several modes share.
ALONE = {
    "dense": (DENSE, []),
    "sparse": (SPARSE, []),
    "apart": ({**DENSE, "vocab_size": 98}, ["--model.merge_qkv=false"]),
    "lora": (SPARSE, [*LORA, "--lora.merge_lora_interval=2", *THREE]),
    "noisy": (DENSE, [*LORA, *QUANTIZED, *NOISE, *THREE]),
    "muon": ({**SPARSE, "vocab_size": 98}, ["--model.merge_qkv=false", *MUON[1:]]),
    "there": (DENSE, ADAM),
    "back": (SPARSE, ADAM),
}
MODES = {
    "dense/train_1f1b": pipelined(4),
    "dense/train_in_two_calls": pipelined(2, micro_batch_size=1),
    "dense/train_gpipe": pipelined(
        2,
        "GPipe",
        pipeline_split=[1, 3],
        data_parallel_replicate_size=2,
        pp_variable_seq_lengths=False,
    ),
    "dense/train_in_bfloat16": pipelined(
        2, "Interleaved1F1B", enable_mixed_precision=True, reshard_after_forward=True, **TWICE
    ),
    "sparse/train_v": pipelined(2, ZERO_V, micro_batch_size=1, **TWICE, **RECOMPUTE),
    "sparse/train_experts": pipelined(2, expert_parallel_size=2, **RECOMPUTE),
    "sparse/train_ring": pipelined(2, ringattn_parallel_size=2),
    "apart/train_tensors": pipelined(2, ZERO, tensor_parallel_size=2, **TWICE),
    "lora/train_and_save": pipelined(2, "Interleaved1F1B", **TWICE),
    "noisy/train_fsdp": pipelined(4),
    "muon/train": pipelined(2, tensor_parallel_size=2),
    "there/train_and_save": pipelined(2),
    "there/train_after_loading": SHARDED,
    "back/train_and_save": [*SHARDED, "--train.expert_parallel_size=2"],
    "back/train_after_loading": pipelined(2, ZERO_V, **TWICE),
}
# Whose files tests read.
READ = [mode for mode in MODES if mode.endswith(("_save", "_loading"))]


def in_one_process(folder, shape, arguments):
    """Writes what `run_modes` reads, and trains."""
    path = write_config(folder, shape, data__sample_packing_sequence_len=16, **STEEP)
    torch.save(make_bins(), folder / "bins.pt")
    config = load(path, ["--train.micro_batch_size=8", *arguments])
    return distributed_worker.several_steps(config, Mesh(), make_bins())


@pytest.fixture(scope="module")
def trained(tmp_path_factory, request):
    """Two steps in four processes in each of those modes, or three, and in one process."""
    folder, alone = tmp_path_factory.mktemp("pipelines"), {}
    for kind, (shape, arguments) in ALONE.items():
        alone[kind] = in_one_process(folder / kind, shape, arguments)
    layouts = selected(request, MODES, *READ)
    modes = {mode: [*layout, *ALONE[mode.partition("/")[0]][1]] for mode, layout in layouts.items()}
    # A whole run, and one that goes on from its second step with other stages.
    path = write_config(
        folder / "runs",
        DENSE,
        train__optimizer="sgd",
        train__max_steps=4,
        train__save_steps=2,
        train__save_hf_weights=True,
        data__val_set_size=4,
    )
    outputs = {name: folder / name / "out" for name in ("run", "run_on")}
    modes["runs/run"] = [path, *pipelined(2), f"--train.output_dir={outputs['run']}"]
    modes["runs/run_on"] = [
        path,
        *pipelined(2, "Interleaved1F1B", **TWICE),
        f"--train.output_dir={outputs['run_on']}",
        f"--train.load_checkpoint_path={outputs['run'] / 'checkpoints/global_step_2'}",
    ]
    run_modes(4, folder, modes)
    return folder, {mode: torch.load(folder / f"{mode}.pt") for mode in layouts}, alone


@pytest.mark.parametrize("mode", MODES)
def test_a_pipeline_trains_as_one_process(mode, trained):
    kind, _, name = mode.partition("/")
    found, want = trained[1][mode], trained[2][kind][1]
    assert min(want["norm"]) > 0.2  # the clipping norm
    if name == "train_in_bfloat16":
        nearly_same_training(found, want)
        return
    same_training(found, want, weights=1e-3 if kind in ("there", "back") else None)
    assert found["evaluated"] == pytest.approx(want["evaluated"], rel=1e-5)
    for a, b in zip(found["router"], want["router"], strict=True):
        if a:  # rings and sharded matrices count padding; the losses are no sums over tokens
            loads = 0.3 if name == "train_ring" or kind == "muon" else 1e-5
            assert a["expert_load"] == pytest.approx(b["expert_load"], rel=loads)
            assert a == pytest.approx(b, rel=0.3)


def test_four_dimensions_on_eight_ranks_train_as_one_process(tmp_path):
    """Stages, shards, matrices and experts."""
    apart = ["--model.merge_qkv=false"]
    want = in_one_process(tmp_path / "eight", {**SPARSE, "vocab_size": 98}, apart)[1]
    layout = pipelined(2, processes=8, tensor_parallel_size=2, expert_parallel_size=2)
    run_modes(8, tmp_path, {"eight/train": [*layout, *apart]})
    found = torch.load(tmp_path / "eight/train.pt")
    same_training(found, want)


def test_whole_runs_log_and_export_as_one_process_does(trained):
    """Evaluation, resuming with other stages, and the last export."""
    folder, _, _ = trained
    run(str(folder / "runs/config.yaml"), "--train.gradient_accumulation_steps=8")
    want, found, last = (rows(folder / name) for name in ("runs", "run", "run_on"))
    assert [r["step"] for r in last] == [3, 4, 4]
    for logged in (found, last):
        for one, same in zip(logged, want[-len(logged) :], strict=True):
            for key in {"step", "tokens", "loss", "grad_norm", "eval_loss"} & same.keys():
                assert one[key] == pytest.approx(same[key], rel=1e-5), key
    for name in ("run", "run_on"):
        stored, same = tensors(folder / name, 4), tensors(folder / "runs", 4)
        assert stored.keys() == same.keys()
        assert all(torch.allclose(stored[n], t, rtol=1e-4, atol=1e-6) for n, t in same.items())


@pytest.mark.parametrize("kind", ["there", "back"])
def test_checkpoints_move_between_pipelines_and_other_layouts(kind, trained):
    folder, found, _ = trained
    arguments = ["--train.micro_batch_size=8", *ALONE[kind][1]]
    moves = {name: found[f"{kind}/{name}"] for name in ("train_and_save", "train_after_loading")}
    check_moves((folder / kind, str(folder / kind / "config.yaml"), moves, arguments))


def test_a_tied_weight_is_exported_once(trained):
    folder, found, _ = trained
    stored = load_file(folder / "there/hf/model.safetensors")
    weights = found["there/train_and_save"]["weights"]
    assert torch.equal(stored["model.embed_tokens.weight"], weights["model.embed_tokens.weight"])
    assert "lm_head.weight" not in stored


def test_adapters_of_all_stages_are_exported(trained, tmp_path):
    folder, _, alone = trained
    nn.save_adapter(alone["lora"][0].model, tmp_path, base_model="base")
    names = (nn.ADAPTER_FILE, nn.ADAPTER_CONFIG)
    (found, config), (want, same) = (
        (load_file(at / names[0]), (at / names[1]).read_text())
        for at in (folder / "lora/adapter", tmp_path)
    )
    assert found.keys() == want.keys() and json.loads(config) == json.loads(same)
    assert all(torch.allclose(found[name], t, atol=1e-6) for name, t in want.items())


def test_layers_are_split_by_parameters_with_embedding_and_head():
    for weights, ends, want in (
        ([1] * 5, (0, 2), [3, 2]),
        ([1] * 6, (3, 3), [1, 4, 1]),
        ([4, 1, 1, 1, 1], (0, 0), [1, 4]),
        ([1, 1], (50, 50), [1, 1]),
    ):
        assert split_layers(weights, ends, len(want)) == want


def settings_of(tmp_path, shape, *arguments):
    """A model on meta, and what a configuration says of stages."""
    path = write_config(tmp_path, shape)
    config = load(path, [*pipelined(2), *arguments])
    with torch.device("meta"):
        model = Transformer(shape_of(config), Ops.resolve())
    return model, config.train


@pytest.mark.parametrize(
    "shape, arguments, sentence",
    [
        (
            QWEN3,
            [*pipelined(4)],
            r"train\.pipeline_parallel_size = 4, train\.virtual_pipeline_size = 1: the model's 2 "
            "layers do not make 4 stages",
        ),
        (
            DENSE,
            ["--train.pipeline_split=[1,2]"],
            r"train\.pipeline_split = \[1, 2\]: makes 3 layers, and the model has 4",
        ),
        pytest.param(
            DENSE,
            pipelined(2, "ZBVZeroBubble", **TWICE),
            r"train\.pipeline_parallel_schedule = ZBVZeroBubble: the first and the last stage are "
            "on one process, and the embedding and the head, which are tied",
            marks=pytest.mark.skipif(bool(no_zero_bubble()), reason=str(no_zero_bubble())),
        ),
    ],
)
def test_what_a_model_cannot_be_cut_into_is_refused(shape, arguments, sentence, tmp_path):
    model, train = settings_of(tmp_path, shape, *arguments)
    with pytest.raises(ValueError, match=sentence):
        Pipeline(model, train, Mesh(Layout(pp=train.pipeline_parallel_size)), 32)


def test_gathered_weights_are_kept_between_micro_batches_unless_told(tmp_path):
    assert not settings_of(tmp_path, DENSE)[1].reshard
    assert settings_of(tmp_path, DENSE, "--train.reshard_after_forward=true")[1].reshard


def test_micro_batches_that_a_schedule_cannot_run_are_refused(tmp_path, monkeypatch):
    _, train = settings_of(tmp_path, DENSE, "--train.pp_variable_seq_lengths=false")
    with pytest.raises(ValueError, match=r"pp_variable_seq_lengths = False: a micro-batch has 33"):
        length_of_hidden(train, [3, 33], 32)
    assert length_of_hidden(train, [3, 31], 32) == 32
    varying = train.model_copy(update={"pp_variable_seq_lengths": True})
    assert [length_of_hidden(varying, [3, n], 32) for n in (8, 9, 32, 33)] == [8, 12, 32, 36]
    pipeline = object.__new__(Pipeline)
    pipeline.train, pipeline.mesh, pipeline._made_for = train, Mesh(Layout(pp=2)), None
    pipeline.model = types.SimpleNamespace(config=types.SimpleNamespace(hidden_size=8))
    with pytest.raises(ValueError, match=r"^1 micro-batches: 1F1B needs at least as many"):
        pipeline._scheduled(1, 32)

    def other(tensor, op, group):
        tensor += torch.tensor([0, 1, 0, 0, 0, 0])  # the longest of another rank

    monkeypatch.setattr(torch.distributed, "all_reduce", other)
    with pytest.raises(ValueError, match=r"a pipeline must be given the same micro-batches"):
        pipeline._agree([3, 4])
