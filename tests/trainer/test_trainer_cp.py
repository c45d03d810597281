"""Training on sequences sharded over processes: the same losses, norms and weights as in one
process.
"""

import re

import pytest
import torch
from pydantic import BaseModel

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from ranks import STEEP, fsdp2, nearly_same_training, run_modes, same_training, together_and_alone
from training import (
    MOE,
    QWEN3,
    check_moves,
    fake_group,
    make_bins,
    rows,
    run,
    shape_of,
    tensors,
    write_config,
)
from whole import data_of

from tilewright.core.registry import ImplementationUnavailable
from tilewright.ops.attention.context_parallel import ContextParallel, shard
from tilewright.trainer.build import choose_ops
from tilewright.trainer.checkpoint import hf
from tilewright.trainer.config import ConfigError, Train, load
from tilewright.trainer.data import batches as data
from tilewright.trainer.losses.loss import count_labels
from tilewright.trainer.models import layers
from tilewright.trainer.models.model import Ops, Transformer
from tilewright.trainer.parallel import mesh, row
from tilewright.trainer.parallel.apply import apply_layouts
from tilewright.trainer.parallel.context_parallel import spread_sequence
from tilewright.trainer.parallel.mesh import Layout, Mesh, layout_of
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.parallel.row import LAYOUTS


def spread(ring, ulysses, processes=4, **more):
    """Arguments with which four processes train on the eight bins of a step in two micro-
    batches.
    """
    sizes = {"ringattn_parallel_size": ring, "ulysses_parallel_size": ulysses}
    return fsdp2(**sizes, micro_batch_size=ring * ulysses * 4 // processes, **more)


ADAM = {"optimizer": "adamw", "lr": 1e-3}
RECOMPUTE = {"enable_gradient_checkpointing": True}
EXPERTS = {"expert_parallel_size": 2}
MODES = {
    "train_and_save": spread(2, 2, **ADAM),
    "train_after_loading": spread(1, 2, **ADAM, **EXPERTS),
    "train_ulysses": spread(1, 2, **RECOMPUTE),
    "train_ulysses_4": spread(1, 4),  # more ranks than key heads
    "train_ring": spread(2, 1, enable_full_shard=False),
    "train_ring_4": spread(4, 1, **RECOMPUTE, enable_reentrant=True),
    "train_replicas": spread(2, 1, data_parallel_replicate_size=2),
    "train_all": spread(2, 2),
    "train_ring_only": spread(2, 2, cp_fsdp_mode="ring_only"),
    "train_experts": spread(2, 1, **EXPERTS, cp_fsdp_mode="none", **RECOMPUTE),
    "train_experts_over_sequences": spread(2, 2, **EXPERTS, cp_fsdp_mode="ulysses_only"),
    "train_in_bfloat16": spread(2, 2, enable_mixed_precision=True, **RECOMPUTE),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two steps in four processes in each of those modes, and in one process."""
    folder = tmp_path_factory.mktemp("spread")
    path = write_config(folder, MOE, train__gradient_accumulation_steps=2, **STEEP)
    adam = [f"--train.{name}={value}" for name, value in ADAM.items()]
    found, alone = together_and_alone(folder, path, make_bins(), MODES, {False: [], True: adam})
    return folder, path, found, alone


@pytest.mark.parametrize("mode", MODES)
def test_spread_sequences_train_as_in_one_process(mode, trained):
    _, _, found, alone = trained
    adam = '--train.optimizer="adamw"' in MODES[mode]
    found, want = found[mode], alone[adam]
    assert min(want["norm"]) > 0.4  # twice the clipping norm
    if mode == "train_in_bfloat16":
        nearly_same_training(found, want)
        return
    same_training(found, want, weights=1e-3 if adam else None)
    # They count padding, of which there is more.
    for a, b in zip(found["router"], want["router"], strict=True):
        assert a.keys() == b.keys() and a["expert_load"] == pytest.approx(b["expert_load"], rel=0.3)


def test_ulysses_exchanges_once_each_way(trained):
    layers, micro_batches = 2, 2
    counts = {mode: trained[2][mode]["all_to_alls"] / (layers * micro_batches) for mode in MODES}
    assert counts["train_ring"] == 0
    assert counts["train_all"] == counts["train_ulysses_4"] == 4  # two forward, two backward
    assert counts["train_ulysses"] == 6  # recomputed
    older = torch.__version__ < "2.13"  # torch 2.11 recomputes the last exchange, too
    assert counts["train_experts"] == 9 + older and counts["train_experts_over_sequences"] == 4 + 7


def test_checkpoints_move_between_layouts(trained):
    check_moves(trained)


# Rings of whole heads give the bits of one process; the attention that each kind of ring computes.
RINGS = {"parts": (False, "cpp|eager"), "heads": (True, "cpp|sdpa")}


@pytest.fixture(scope="module")
def rings(tmp_path_factory):
    """Whole runs in two processes, and what they print."""
    folder, modes = tmp_path_factory.mktemp("rings"), {}
    for kind, (invariant, _) in RINGS.items():
        path = write_config(
            folder / kind,
            train__max_steps=4,
            data__val_set_size=6,
            data__pad_to_multiple_of=6,
            train__gradient_accumulation_steps=2,
            train__data_parallel_mode="fsdp2",
            train__save_steps=2,
            model__batch_invariant=invariant,
        )
        modes[f"{kind}/run"] = [path, "--train.ringattn_parallel_size=2"]
    return folder, run_modes(2, folder, modes)


@pytest.mark.parametrize("kind", RINGS)
def test_a_run_goes_on_in_one_process_where_a_ring_left_it(kind, rings):
    folder, said = rings[0] / kind, rings[1]
    assert "a sequence on 2 ring x 1 Ulysses ranks, padded to a multiple of 12 tokens" in said
    attentions = re.findall(r"^ops: .*?\battention=(\w+)", said, re.MULTILINE)
    assert re.fullmatch(RINGS[kind][1], attentions[[*RINGS].index(kind)])
    ring, weights = rows(folder), tensors(folder, 4)
    checkpoint = folder / "out/checkpoints/global_step_2"
    run(str(folder / "config.yaml"), "--train.load_checkpoint_path", str(checkpoint))
    alone = rows(folder)
    evaluations = [[r["eval_loss"] for r in found if "eval_loss" in r] for found in (ring, alone)]
    assert len(evaluations[0]) > 1 and evaluations[0] == pytest.approx(evaluations[1], rel=1e-5)
    for a, b in zip(*([r for r in found if "loss" in r] for found in (ring, alone)), strict=True):
        assert a["step"] == b["step"] and a["tokens"] == b["tokens"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    for name, tensor in tensors(folder, 4).items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-5)


# ---- in one process


def test_ranks_of_one_sequence_read_the_same_bins_and_have_all_of_a_batch(tmp_path):
    config = load(
        write_config(tmp_path), ["--data.dataloader_num_workers=1", "--data.pad_to_multiple_of=6"]
    )
    held, _ = data_of(config, Mesh())

    def batch(**options):
        read = data.Batches(held.bins, config.data, config.train, rank=1, world_size=3, **options)
        return next(read.steps())[0]

    assert mesh.padding(config.data.pad_to_multiple_of, ContextParallel(2, 2)) == 24
    layouts = [ContextParallel(2, 2, u, r) for r in range(2) for u in range(2)]
    whole, parts = batch(), [batch(cp=cp) for cp in layouts]
    n = whole["input_ids"].shape[1]
    total = int(parts[0]["cu_seqlens"][-1])
    assert total % 24 == 0 and total - n < 24
    padded = n % 6 == 0 and int((whole["labels"] != -100).sum())
    real = int(whole["cu_seqlens"][-2]) if padded else n
    for name in ("input_ids", "labels", "position_ids"):
        joined = torch.empty(1, total, dtype=torch.int64)
        for cp, part in zip(layouts, parts, strict=True):
            joined[0, shard(torch.arange(total), 0, cp)] = part[name][0]
        assert joined[:, :real].equal(whole[name][:, :real]), name
    assert all(part["cu_seqlens"].equal(parts[0]["cu_seqlens"]) for part in parts)
    assert sum(map(count_labels, parts)) == count_labels(whole)


@pytest.mark.parametrize(
    "mode, table",
    [
        ("all", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("ulysses_only", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("ring_only", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("none", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_which_ranks_shard_parameters(mode, table, tmp_path):
    train = load(write_config(tmp_path), spread(2, 2, cp_fsdp_mode=mode)).train
    assert layout_of(train, 8).stages()[0, 0, ..., 0].tolist() == table
    train = train.model_copy(update={"data_parallel_replicate_size": 2})
    replicas = layout_of(train, 8)
    found = replicas.stages()[0, 0, ..., 0]
    assert found.shape == replicas.parameters and sorted(found.flatten().tolist()) == list(range(8))
    # A replica has its own.
    assert all({r // 4 for r in group} == {group[0] // 4} for group in found.tolist())


def test_ranks_of_one_sequence_are_neighbors(tmp_path):
    config = load(write_config(tmp_path), spread(2, 2))
    with fake_group(8):
        cpu = torch.device("cpu")
        cp = mesh.context_parallel(layout_of(config.train, 8), cpu)
        assert cp.layout() == ContextParallel(2, 2, 0, 0)
        assert ranks_of(cp.ulysses) == [0, 1] and ranks_of(cp.ring) == [0, 2]
        assert mesh.context_parallel(Layout(replicate=8), cpu) == ContextParallel()
    layout = Layout(shard=2, ring=2, ulysses=2)
    assert [layout.batch_rank(rank) for rank in range(8)] == [rank // 4 for rank in range(8)]
    assert layout.data == 2


@pytest.mark.parametrize(
    "outside, table",
    [(False, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]), (True, [[[0, 2], [1, 3]], [[4, 6], [5, 7]]])],
)
def test_which_ranks_share_experts(outside, table):
    layout = Layout(replicate=2, shard=4, expert=2, ep_outside=outside)
    assert layout.stages_of_experts()[0, 0].tolist() == table


def test_the_axes_count_in_their_order():
    layout = Layout(pp=2, replicate=3, shard=2, ring=2, ulysses=1, tp=2)
    assert layout.size == 48 and layout.data == 6
    assert layout.coordinates(47) == {
        **dict.fromkeys(("pp", "shard", "tp"), 1),
        "replicate": 2,
        "ring": 1,
        "ulysses": 0,
    }
    # Each rank's stage and slice: half of the ranks are in the other stage.
    assert layout.stages()[0, 1, ..., 1].flatten().tolist() == list(range(25, 48, 2))
    assert layout.batch_rank(47) == 5 and layout.batch_rank(44) == layout.batch_rank(45) == 5


def ranks_of(group):
    return torch.distributed.get_process_group_ranks(group)


def test_groups_of_a_mesh_of_all_axes():
    """Rank 0 of 16: two stages of two replicas of two shards of two tensor-parallel ranks."""
    t = Train(
        output_dir="nowhere",
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
        expert_parallel_size=2,
        data_parallel_replicate_size=2,
    )
    with fake_group(16):
        found = mesh.build(t, 0, 16, torch.device("cpu"), control_backend="fake")
        assert [*found.layout.sizes.values()] == [2, 2, 2, 1, 1, 2] and found.layout.averaged == 4
        assert ranks_of(found.loss.group) == list(range(0, 16, 2)) and found.loss.size == 8
        assert ranks_of(found.stage.group) == list(range(8)) and found.stage.size == 8
        assert ranks_of(found.params.group) == list(range(16)) and found.params.size == 16
        assert ranks_of(found.pipeline.group) == [0, 8] and found.pipeline.size == 2
        assert ranks_of(found.tensor.get_group()) == [0, 1]
        assert found.shards.mesh.tolist() == [[0, 2], [4, 6]]
        assert found.experts.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        assert found.shards.mesh_dim_names == ("replicate", "shard")
        assert found.layout.batch_rank(5) == found.layout.batch_rank(12) == 2
    with fake_group(4):  # replicas, for DDP
        t = Train(output_dir="nowhere", data_parallel_mode="ddp", pipeline_parallel_size=2)
        found = mesh.build(t, 0, 4, torch.device("cpu"), control_backend="fake")
        assert [*found.layout.sizes.values()] == [2, 2, 1, 1, 1, 1] and found.shards is None
        assert ranks_of(found.pipeline.group) == [0, 2]
        assert ranks_of(found.loss.group) == [0, 1, 2, 3]


class Copies(BaseModel):
    copies: int = 1


def with_axis(monkeypatch, order, name="far"):
    LAYOUTS.names()
    made = row.Layout(axes=(row.Axis(name, order, "copies"),), options=Copies)
    monkeypatch.setitem(LAYOUTS._rows, "far", made)


@pytest.mark.parametrize(
    "order, apart, shards, copy, batches",
    [
        (0, [0, 8], [0, 2], [*range(8)], [0, 1, 0, 1, 2, 3, 2, 3]),
        (35, [0, 2], [0, 4], [0, 1, 4, 5, 8, 9, 12, 13], [0, 1, 2, 3, 0, 1, 2, 3]),
    ],
)
def test_copies_are_along_an_axis_of_another_row(order, apart, shards, copy, batches, monkeypatch):
    """Rank 0 of 16: two copies of two stages of two shards of two tensor-parallel ranks. What is
    told of batches and losses is of all copies, what is of gradients of one.
    """
    with_axis(monkeypatch, order)
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    t = Train(output_dir="nowhere", layout_args={"far": {"copies": 2}}, **sizes)
    with fake_group(16):
        found = mesh.build(t, 0, 16, torch.device("cpu"), control_backend="fake")
        layout = found.layout
        twos = {axis for axis, size in layout.sizes.items() if size == 2}
        assert twos == {"far", "pp", "shard", "tp"} and layout.size == 16
        assert layout.copies == layout.averaged == 2 and layout.data == 4
        assert ranks_of(found.apart["far"].group) == apart
        assert ranks_of(found.params.group) == copy and found.params.size == 8
        assert ranks_of(found.loss.group) == [*range(0, 16, 2)]
        assert ranks_of(found.everyone.group) == [*range(16)] and found.stage.size == 8
        assert found.shards.mesh.tolist() == layout.stages()[0, 0, 0, :, 0].tolist() == shards
        assert ranks_of(found.tensor.get_group()) == [0, 1]
        assert [layout.batch_rank(r) for r in range(0, 16, 2)] == batches
    with pytest.raises(ConfigError, match=r"far\.copies = 2, .*: 6 processes do not divide by 8"):
        layout_of(t, 6)
    few = t.model_copy(update={"data_parallel_shard_size": 4})
    with pytest.raises(ConfigError, match="not make 16 processes of 4 for each batch of 2 copies"):
        layout_of(few, 16)
    with pytest.raises(ConfigError, match=r"layout_args\.far\.copies = 0: must be 1 or more"):
        layout_of(t.model_copy(update={"layout_args": {"far": {"copies": 0}}}), 16)
    with_axis(monkeypatch, order, "expert")  # a field of Layout's, and no axis
    alone = Train(output_dir="nowhere", expert_parallel_size=2)
    assert layout_of(alone, 2).size == 2 and layout_of(alone, 2).expert == 2
    with_axis(monkeypatch, order, "tp")
    with pytest.raises(ValueError, match="two axes of the mesh are called tp"):
        layout_of(t, 16)


def test_an_axis_between_those_of_a_sequence_leaves_them_as_they_are(monkeypatch):
    with_axis(monkeypatch, 45)
    with fake_group(8):
        layout = Layout(ring=2, ulysses=2, apart={"far": 2})
        cp = mesh.context_parallel(layout, torch.device("cpu"))
        assert ranks_of(cp.ulysses) == [0, 1] and ranks_of(cp.ring) == [0, 4]
        assert [layout.batch_rank(r) for r in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_tensor_parallel_ranks_share_a_shard_of_a_sequence():
    with fake_group(16):
        layout = Layout(pp=2, ring=2, ulysses=2, tp=2)
        cp = mesh.context_parallel(layout, torch.device("cpu"))
        assert ranks_of(cp.ulysses) == [0, 2] and ranks_of(cp.ring) == [0, 4]


def test_what_cannot_be_spread_is_one_sentence(tmp_path):
    config = load(write_config(tmp_path, {**QWEN3, "num_attention_heads": 6}), spread(1, 4))
    decoder, context = Transformer(shape_of(config), Ops.resolve()), ContextParallel(4)
    said = r"ulysses_parallel_size = 4: the model's 6 query heads do not divide by 4"
    with pytest.raises(ValueError, match=said):
        apply_layouts(Parts(decoder), dict(config), Mesh(context=context), filled=False)
    config = load(write_config(tmp_path), [*spread(2, 1), "--model.attn_implementation=native"])
    ring = Mesh(context=ContextParallel(1, 2))
    with pytest.raises(ImplementationUnavailable, match=r"attention\[native\]"):
        choose_ops(config.model, shape_of(config), ring, torch.float32)


def test_positions_that_are_not_given_are_those_of_the_whole_sequence():
    """Rank by rank in one process: attention, which needs the other ranks, is left out."""
    decoder = Transformer(hf.ModelConfig.from_hf(QWEN3), Ops.resolve())
    seen = []
    decoder.model.layers[0].self_attn.forward = lambda x, sequence: (
        seen.append((len(sequence.cos), sequence.position_ids)) or x
    )
    decoder.model.layers[1].self_attn.forward = lambda x, sequence: x
    ids, cu = torch.randint(0, 97, (1, 16)), torch.tensor([0, 5, 16])
    for cp in (ContextParallel(1, 2, 0, r) for r in range(2)):
        spread_sequence(decoder, cp)
        decoder(shard(ids, 1, cp), cu_seqlens=cu)
        assert seen.pop() == (16, SeenPositions(torch.cat((torch.arange(5), torch.arange(11))), cp))
        decoder(shard(ids, 1, cp).repeat(2, 1))
        assert seen.pop() == (16, SeenPositions(torch.arange(16).repeat(2, 1), cp))


def test_compiled_layers_are_not_made_anew_for_other_documents(monkeypatch, backend):
    seen, made = [], []

    def attention(q, *_, ends, **__):
        seen.append(ends)
        return q.clone()

    monkeypatch.setattr(layers, "context_parallel_attention", attention)
    shape, cp = hf.ModelConfig.from_hf({**QWEN3, "num_hidden_layers": 1}), ContextParallel(1, 2)
    decoder = Transformer(shape, Ops.resolve())
    spread_sequence(decoder, cp)
    decoder.model.layers[0].compile()
    position_ids = shard(torch.arange(16)[None], 1, cp)
    for ends in ((0, 16), (0, 5, 16), (0, 7, 8, 16), (0, 1, 2, 3, 16)):
        decoder(position_ids, position_ids=position_ids, cu_seqlens=torch.tensor(ends), ends=ends)
        assert seen[-1] == ends
        made.append(backend.frame_count)
    assert made[0] > 0 and made[2:] == made[1:2] * 2


class SeenPositions:
    """Equals a tensor of this rank's positions."""

    def __init__(self, whole, cp):
        self.own = shard(whole, whole.dim() - 1, cp).reshape(-1, 8)

    def __eq__(self, other):
        return self.own.equal(other)
