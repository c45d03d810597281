"""What a run needs in memory: the plan, what stays on a device, and what waits in host memory."""

import dataclasses
import multiprocessing
import os
import pathlib
import re
import resource
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import whole
from helpers import as_on_a_gpu
from ranks import run_modes
from symmetric_ranks import symmetric_ranks
from training import MOE, QWEN3, engine_of, make_bins, shape_of, write_config

from bench.memory import most_allocated
from tilewright.core.torch_names import FakeTensor, no_zero_bubble
from tilewright.nn import LoRALinear
from tilewright.trainer import memory_plan, train
from tilewright.trainer.build import engine_around, unfilled
from tilewright.trainer.config import load
from tilewright.trainer.data.batches import collate
from tilewright.trainer.losses.language_modeling import language_modeling
from tilewright.trainer.memory_tracker import Tracker
from tilewright.trainer.models.ops_choice import Ops
from tilewright.trainer.parallel import offload
from tilewright.trainer.parallel.mesh import Mesh, join

CPU, ROOT = torch.device("cpu"), pathlib.Path(__file__).parents[2]


# ---- activation offload


class Host:
    """A host beside a CPU: copies between two parts of its memory, with what is left overwritten
    and what is still under way unreadable, as on a GPU's stream.
    """

    def __init__(self):
        self.out = self.back = self.bytes = 0
        self.under_way = []

    def to_host(self, t):
        self.out += 1
        self.bytes += t.numel() * t.element_size()
        return t.clone()

    def to_device(self, host):
        self.back += 1
        t = torch.full_like(host, torch.nan if host.is_floating_point() else 0)
        self.under_way.append((t, host))
        return t

    def wait(self):
        for t, host in self.under_way:
            t.copy_(host)
        self.under_way.clear()


RECOMPUTED = {"train__enable_gradient_checkpointing": True}
FSDP2 = {"train__data_parallel_mode": "fsdp2"}
OFFLOADED = {
    "dense": (QWEN3, {}),
    "layers": (QWEN3, RECOMPUTED),
    "reentrant": (QWEN3, {**RECOMPUTED, "train__enable_reentrant": True}),
    "attention": (QWEN3, {**RECOMPUTED, "train__recompute_modules": ["self_attn"]}),
    "sharded layers": (QWEN3, {**RECOMPUTED, **FSDP2}),
    "sharded experts": (MOE, {**FSDP2, "train__enable_mixed_precision": True}),
}


@pytest.mark.parametrize("case", OFFLOADED)
def test_offloaded_activations_give_the_same_bits(case, tmp_path, monkeypatch):
    """Two micro-batches; everything, some and nothing leaves; parameters never do."""
    monkeypatch.setattr(offload, "SMALL", 0)
    shape, options = OFFLOADED[case]
    config = load(write_config(tmp_path, {**shape, "num_hidden_layers": 3}, **options))
    ranks = join(config.train)
    batches = [collate(make_bins()[i : i + 4], 8) for i in (0, 4)]

    def gradients(limit=None, host=None):
        engine, seen = engine_of(config, ranks), []
        if host is not None:
            keeper = offload.offload_activations(engine.model, limit, host)
            pack = keeper._pack

            def noted(t, layer):
                packed = pack(t, layer)
                seen.append(keeper.kept)
                return packed

            monkeypatch.setattr(keeper, "_pack", noted)
        engine.forward_backward(batches, language_modeling)
        if host is not None:
            assert max(seen) <= limit and keeper.kept == 0  # all is freed with the graph
            assert host.out == host.back
        found = [p.grad for p in engine.parameters]
        return [getattr(g, "to_local", lambda g=g: g)() for g in found]

    try:
        want, everything = gradients(), Host()
        found = [gradients(0, everything)]
        some, nothing = Host(), Host()
        found += [gradients(everything.bytes / 8, some), gradients(everything.bytes, nothing)]
    finally:
        dist.destroy_process_group()
    assert everything.bytes > some.bytes > nothing.bytes == 0
    for other in found:
        assert all(torch.equal(a, b) for a, b in zip(want, other, strict=True))


# ---- the plan

# Activations, and not the head's chunk, are the larger part.
WIDE = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
PLANNED = {
    "autocast": (QWEN3, {"train__enable_mixed_precision": True}),
    "recomputed": (QWEN3, {**RECOMPUTED, "train__gradient_accumulation_steps": 2}),
    "mlp recomputed": (QWEN3, {**RECOMPUTED, "train__recompute_modules": ["mlp"]}),
    "experts": (MOE, {"train__optimizer": "sgd"}),
    "adapters": (QWEN3, {"lora__enable_lora": True, "train__enable_mixed_precision": True}),
}


def full_config(folder, shape=QWEN3, **options):
    """The configuration of a run whose bins are full."""
    path = write_config(folder, {**shape, **WIDE}, data__sample_packing_sequence_len=768, **options)
    return load(path)


def planned(config, size, rank=0):
    """Without what the opposite of recomputation would save."""
    return whole.planned(config, size, rank)


@pytest.mark.parametrize("case", PLANNED)
def test_the_plan_is_what_the_allocator_counts(case, tmp_path):
    """Within 10 %, without having allocated a weight."""
    shape, options = PLANNED[case]
    config = full_config(tmp_path, shape, **options)
    found = whole.planned(config, 1, otherwise=True)
    ranks = join(config.train)
    try:
        counted = most_allocated(config, ranks)
        engine = engine_of(config, ranks)
        weights = engine.parameters
    finally:
        dist.destroy_process_group()
    assert found.total == pytest.approx(counted, rel=0.1)
    scales = 8 * sum(isinstance(m, LoRALinear) for m in engine.model.modules())  # on the CPU
    assert found.peak["parameters"] - scales == sum(p.numel() * p.element_size() for p in weights)
    learning = sum(p.numel() * p.element_size() for p in weights if p.requires_grad)
    assert found.whole["gradients"] == learning
    states = 0 if config.train.optimizer == "sgd" else 2 * learning
    assert found.peak["optimizer"] == pytest.approx(states, rel=0.01)  # and steps
    layers = [f"layers.{i}" for i in range(3)]
    assert set(layers) <= found.saved.keys() | found.otherwise.keys()
    recomputed, kept = sorted((sum(found.saved.values()), sum(found.otherwise.values())))
    assert recomputed < kept / 2 or options.get("train__recompute_modules")


@pytest.mark.parametrize("spread", [1, 2])
def test_experts_have_a_mesh_of_their_own_where_they_are_spread(spread, tmp_path):
    config = load(write_config(tmp_path, MOE, train__expert_parallel_size=spread, **FSDP2))
    memory_plan.join_pretended_group(0, 2)
    try:
        mesh = memory_plan.build(config.train, 0, 2, CPU, control_backend="fake")
        assert mesh.shards is not None and (mesh.experts is None) == (spread == 1)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def nothing(monkeypatch):
    """Plans that need nothing."""
    sizes = dict.fromkeys(memory_plan.PARTS, 0)
    found = memory_plan.RankPlan(0, sizes, sizes, {}, {})
    monkeypatch.setattr(memory_plan.Planner, "plan", lambda *_, otherwise: found)
    return found


@pytest.mark.parametrize("on", [True, False])
def test_the_plan_says_what_recomputation_saves_whether_it_is_on_or_not(on, nothing):
    less, more = ({"layers.0": n << 20} for n in (1, 3))
    saved, otherwise = (less, more) if on else (more, less)
    found = dataclasses.replace(nothing, saved=saved, otherwise=otherwise)
    train = types.SimpleNamespace(enable_gradient_checkpointing=on)
    *_, head, layer, total = memory_plan.table(found, "rank 0", train)
    assert head.split()[-2:] == ["recomputed", "kept"]
    assert layer.split() == ["layers.0", "1.00", "MiB", "3.00", "MiB"]
    assert total.split() == ["sum", "1.00", "MiB", "3.00", "MiB"]


@pytest.mark.parametrize("size, said", [(1, "rank 0"), (2, "ranks 0 to 1, each")])
def test_the_plan_says_whose_it_is_and_that_it_takes_routing_to_be_even(
    size, said, nothing, tmp_path
):
    """The latter where experts are spread."""
    options = {"train__expert_parallel_size": size, **FSDP2}
    config = full_config(tmp_path, MOE, **options)
    lines = list(memory_plan.Planner(config, size, CPU).report())
    [line] = [s for s in lines if "at the peak" in s]
    assert line.split("  ")[0] == said
    assert lines[1].startswith("for tokens routed evenly: a rank whose") == (size == 2)


PIPELINE = {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 4}
UNTIED = {**QWEN3, "tie_word_embeddings": False}
TURNS = {"pipeline_parallel_schedule": "Interleaved1F1B", "virtual_pipeline_size": 2}
# Stages of two ranks: the shape, the options of `train`, and each rank's layers.
HALVES = [[0, 1], [2, 3]]
STAGES = {
    "gpipe": (QWEN3, {"pipeline_parallel_schedule": "GPipe"}, HALVES),
    "interleaved": (QWEN3, TURNS, [[0, 2], [1, 3]]),
    "recomputed": (QWEN3, {"enable_gradient_checkpointing": True}, HALVES),
}
if no_zero_bubble() is None:
    V = {**TURNS, "pipeline_parallel_schedule": "ZBVZeroBubble"}
    STAGES["v"] = (UNTIED, V, [[0, 3], [1, 2]])


def staged(folder, shape=QWEN3, **options):
    """The path of the configuration of a pipeline of two ranks and four layers."""
    train = {f"train__{name}": value for name, value in {**PIPELINE, **options}.items()}
    four = {**shape, **WIDE, "num_hidden_layers": 4}
    return write_config(folder, four, data__sample_packing_sequence_len=768, **FSDP2, **train)


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    """Two ranks run one pipeline after the other, and write what their allocators count."""
    folder = tmp_path_factory.mktemp("pipelines")
    modes = {
        f"{case}/memory": [staged(folder / case, shape, **options)]
        for case, (shape, options, _) in STAGES.items()
    }
    run_modes(2, folder, modes)
    return folder


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("case", STAGES)
def test_the_plan_of_a_stage_is_what_the_allocator_of_its_rank_counts(case, rank, pipelines):
    """Within 5 %; the plan has all micro-batches in its second step only."""
    config = load(str(pipelines / case / "config.yaml"))
    otherwise = case == "recomputed"  # in which the last layer of a stage saves nothing
    found = whole.planned(config, 2, rank, otherwise)
    counted = int((pipelines / case / f"memory_{rank}").read_text())
    assert found.total == pytest.approx(counted, rel=0.05)
    many = config.train.model_copy(update={"gradient_accumulation_steps": 64})
    length = config.data.sample_packing_sequence_len
    bound = memory_plan.most(many, length, eager=False, shape=shape_of(config))
    assert bound > 16 * counted  # of four, which GPipe keeps all
    layers = STAGES[case][2]
    own = {f"layers.{i}" for i in layers[rank]}
    own |= {name for name, i in (("embed_tokens", 0), ("head", 3)) if i in layers[rank]}
    assert found.saved.keys() | found.otherwise.keys() == own
    # The buffers of hidden states and gradients, which each micro-batch has.
    assert found.whole["communication"] > 4 * 768 * 64 * 4
    assert found.whole["head"] == 0 or "head" in own


def test_a_plan_of_a_pipeline_is_printed_for_each_of_its_ranks(
    tmp_path, monkeypatch, nothing, capsys
):
    asked = []

    def planned(planner, rank, otherwise):
        asked.append((planner.size, rank, otherwise))
        return dataclasses.replace(nothing, rank=rank, saved={f"layers.{rank}": 1 << 20})

    monkeypatch.setattr(memory_plan.Planner, "apart", planned)
    for world, options in (("8", []), ("2", [f"--train.{n}={v}" for n, v in TURNS.items()])):
        assert train.main([staged(tmp_path), "--plan", "--world", world, *options]) == 0
    said = capsys.readouterr().out
    assert asked == [(8, 0, True), (8, 4, True), (2, 0, True), (2, 1, True)]
    heads = [line[:40].strip() for line in said.splitlines() if "at the peak" in line]
    assert heads == [
        "ranks 0 to 3, each, stage 0",
        "ranks 4 to 7, each, stage 1",
        "rank 0, stages 0, 2",
        "rank 1, stages 1, 3",
    ]
    assert "layers.4" in said


def test_a_rank_of_a_pipeline_is_not_started_if_its_own_stage_does_not_fit(tmp_path, monkeypatch):
    """The first stage keeps the activations of two micro-batches, the last those of one."""
    config = load(staged(tmp_path))
    plans = [planned(config, 2, rank) for rank in range(2)]
    first, last = (found.total for found in plans)
    assert first > last
    there = (first + last) // 2
    monkeypatch.setattr(memory_plan, "available", lambda device: (there, "this machine has"))
    monkeypatch.setattr(memory_plan.Planner, "apart", lambda _, rank: plans[rank])
    planner = memory_plan.Planner(config, 2, CPU)
    planner.check(1)
    with pytest.raises(ValueError, match=r"^rank 0 needs \d+\.\d\d MiB \(parameters"):
        planner.check(0)


SPREAD = {
    "replicas": (4, QWEN3, {"data_parallel_replicate_size": 2}),
    "ulysses": (2, QWEN3, {"ulysses_parallel_size": 2}),
    "ring": (2, QWEN3, {"ringattn_parallel_size": 2}),
    "ring of heads": (2, QWEN3, {"ringattn_parallel_size": 2, "model__batch_invariant": True}),
    "tensors": (2, QWEN3, {"tensor_parallel_size": 2}),
    "experts": (2, MOE, {"expert_parallel_size": 2}),
    "stages x tensors": (4, QWEN3, {**PIPELINE, "tensor_parallel_size": 2}),
    "stages x experts": (4, MOE, {**PIPELINE, "expert_parallel_size": 2}),
}


@pytest.mark.parametrize("case", SPREAD)
def test_the_plan_of_a_layout_is_what_the_allocator_counts(case, tmp_path, recwarn):
    """Within 1 %, of one rank; with experts, whose messages depend on the router, within 6 %."""
    size, shape, options = SPREAD[case]
    options = {n if "__" in n else f"train__{n}": value for n, value in options.items()}
    config = full_config(tmp_path, shape, model__merge_qkv=False, **FSDP2, **options)
    found = planned(config, size)
    with symmetric_ranks(config.train, size) as ranks:
        counted = most_allocated(config, ranks)
    assert found.total == pytest.approx(counted, rel=0.06 if "experts" in case else 0.01)
    # There is no warning of the views that blocks return: nothing works on them in place.
    assert not [w for w in recwarn if "FSDP2-wrapped module" in str(w.message)]


def test_gradients_of_replicas_are_in_memory_once(tmp_path):
    """DDP's buckets hold them, all the time."""
    config = full_config(tmp_path, train__data_parallel_mode="ddp")
    found = planned(config, 2)
    assert found.peak["gradients"] == found.peak["parameters"]
    assert found.peak["communication"] == 0
    with symmetric_ranks(config.train, 2) as ranks:
        wrapped = engine_of(config, ranks).parts.wrapped
        assert wrapped.gradient_as_bucket_view


def test_autocast_keeps_no_casts_of_weights(tmp_path):
    config, seen = full_config(tmp_path, train__enable_mixed_precision=True), []

    def loss(per_token, batch):
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
        return language_modeling(per_token, batch)

    batch = memory_plan.full_batch(config.data, 1, {}, Mesh(), mismatched=False)
    engine_of(config).forward_backward([batch], loss)
    assert seen == [(True, False)]


LARGE = {
    **QWEN3,
    "vocab_size": 2**14,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}


def test_a_plan_is_printed_before_any_weight_is_made_and_for_ranks_that_are_not_there(
    tmp_path, capsys
):
    path = write_config(
        tmp_path,
        LARGE,
        **FSDP2,
        **RECOMPUTED,
        train__enable_mixed_precision=True,
        data__sample_packing_sequence_len=2048,
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert train.main([path, "--plan", "--world", "64", "--train.ulysses_parallel_size=8"]) == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB: of 7 GiB
    said = capsys.readouterr().out
    assert said.startswith("plan of memory, 8 shard x 8 ulysses, on cpu\n")
    lines = {line[:40].strip(): line[40:].split() for line in said.splitlines()}
    layer = 8192 * (8192 * 2 + 1024 * 2 + 3 * 28672 + 2) + 2 * 128
    share = 4 * (2 * layer + 2 * 2**14 * 8192 + 8192) / 64
    assert lines["ranks 0 to 63, each"] == ["at", "the", "peak", "at", "most"]
    for name, size in (("parameters", share), ("optimizer states", 2 * share)):
        value, unit = lines[name][:2]
        assert float(value) * {"MiB": 2**20, "GiB": 2**30}[unit] == pytest.approx(size, rel=1e-3)
    for name in ("gradients", "activations", "logits and loss head", "communication buffers"):
        assert float(lines[name][2]) > 0
    assert "layers.1" in lines and "this machine has available for each" in said
    assert not dist.is_initialized()


def test_what_does_not_fit_is_not_started(tmp_path, monkeypatch, capsys):
    path = write_config(tmp_path, train__max_steps=1, train__save_hf_weights=False)
    config = load(path)
    found = planned(config, 1)
    there = [found.total - 1]
    monkeypatch.setattr(memory_plan, "available", lambda device: (there[0], "this machine has"))
    # A process for the plan, forked from one that has imported what a spawned one would import.
    context = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    assert train.main([path]) == 1
    said = capsys.readouterr().err
    assert re.search(
        r"error: rank 0 needs 0\.\d\d MiB \(parameters 0\.\d\d MiB, .*\) and this machine has "
        r"0\.\d\d MiB; .* or set train\.ignore_memory_plan to true to start nevertheless\n",
        said,
    )
    assert not (tmp_path / "out").exists()
    assert not dist.is_initialized()
    monkeypatch.setattr(memory_plan.Planner, "apart", lambda _, rank: found)
    ignoring = load(path, ["--train.ignore_memory_plan=true"])
    memory_plan.Planner(ignoring, 1, CPU).check(0)
    there[0] = found.total
    memory_plan.Planner(config, 1, CPU).check(0)


@pytest.mark.parametrize(
    "given, said",
    [
        (["--plan", "--world", "0"], "--world must be a number of processes, got '0'"),
        (["--plan", "--world", "two"], "--world must be a number of processes, got 'two'"),
        (["--plan", "--world"], "--world must be a number of processes, got ''"),
        (["--world", "2"], "--world N needs --plan; torchrun starts processes\n"),
    ],
)
def test_a_world_that_is_no_number_or_has_no_plan_is_refused(given, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main([write_config(tmp_path), *given])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


# ---- waiting for the device


class Reads(Tracker):
    """Counts what the host reads of tensors that are on a device: those without values."""

    def __init__(self):
        super().__init__(CPU)
        self.reads = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            self.reads.append(args[0].untyped_storage()._cdata)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _launch(self, launch, args):  # what a kernel for a CPU reads, costs nothing
        pass


@pytest.mark.parametrize("mode", ["none", "fsdp2"])
@pytest.mark.parametrize("shape", [QWEN3, MOE], ids=["dense", "experts"])
def test_a_step_waits_for_the_device_once(shape, mode, tmp_path, monkeypatch):
    """Beside the report, which reads the loss. A tensor's elements are one transfer."""
    as_on_a_gpu(monkeypatch)
    config = load(write_config(tmp_path, shape, train__data_parallel_mode=mode))
    ranks = join(config.train)
    try:
        with Reads().watching() as tracker:
            sections = config.model, config.lora, shape_of(config), config.data, config.train
            parts = unfilled(*sections, ranks, Ops.resolve(), CPU)
            engine = engine_around(parts, config.train, ranks, 1.0)
            batches = [collate(make_bins()[i : i + 4], 8) for i in (0, 4)]
            sums = engine.forward_backward(batches, language_modeling)
            assert tracker.reads == []
            engine.optim_step(1.0, max_norm=1.0)
            step = len(set(tracker.reads))
            sums.mean  # noqa: B018
            assert step == 1 and len(set(tracker.reads)) == 2
    finally:
        dist.destroy_process_group()


# ---- kills


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path):
    """Two ranks, FSDP2, asynchronous checkpoints: two kills at random moments."""
    script = str(ROOT / "scripts/kill_test.py")
    arguments = ["--kills", "2", "--steps", "8", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.startswith("2 kills, 2 resumes, ")


def test_a_loss_that_reads_columns_has_a_plan(tmp_path):
    """Its batches have them."""
    found = planned(full_config(tmp_path, train__loss="weighted_language_modeling"), 1)
    plain = planned(full_config(tmp_path), 1)
    # It keeps no gradient of the head from its forward pass, and has a column of small numbers.
    assert found.total == pytest.approx(plain.total, rel=0.02)


# ---- ZeRO-1


def test_gradients_wait_whole_for_the_last_micro_batch_and_states_are_sharded(tmp_path):
    """What others call ZeRO-1, by bytes that two ranks' allocators count: with several
    micro-batches each holds whole gradients, and half of the states.
    """
    shape = {**QWEN3, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    path = write_config(tmp_path, shape, data__sample_packing_sequence_len=16)
    fsdp2 = ["--train.data_parallel_mode=fsdp2", "--train.enable_full_shard=false"]
    modes = {
        "memory_one": [path, *fsdp2],
        "memory_two": [path, *fsdp2, "--train.gradient_accumulation_steps=2"],
        "memory_sgd": [
            path,
            *fsdp2,
            "--train.optimizer=sgd",
            "--train.gradient_accumulation_steps=2",
        ],
    }
    run_modes(2, tmp_path, modes)
    one, two, sgd = (int((tmp_path / f"{mode}_0").read_text()) for mode in modes)
    weights = sum(p.numel() * 4 for p in engine_of(load(path)).parameters)
    # Without accumulation a layer's gradients are reduced while others are computed.
    assert 0.5 * weights < two - one < weights
    assert two - sgd == pytest.approx(weights, rel=0.1)  # two moments, a half of each
