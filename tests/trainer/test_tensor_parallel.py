"""Training with matrices sharded over processes: the same losses, gradients, norms and weights as
in one process.
"""

import copy
import functools

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import distributed_worker
from ranks import STEEP, fsdp2, nearly_same_training, run_modes, same_training, selected
from torch.distributed.device_mesh import init_device_mesh
from training import (
    MOE,
    QWEN3,
    check_moves,
    fake_group,
    make_bins,
    rows,
    run,
    tensors,
    write_config,
)

from tilewright.nn import Linear, LoRALinear
from tilewright.ops.attention.context_parallel import ContextParallel
from tilewright.trainer.config import Train, load
from tilewright.trainer.models.model import Ops, Transformer
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.positions import Sequence, rope_tables
from tilewright.trainer.models.shared import RepeatedAttention, TensorParallel
from tilewright.trainer.parallel import tensor_parallel
from tilewright.trainer.parallel.compiling import compile_layers, compiled_parts
from tilewright.trainer.parallel.context_parallel import spread_sequence
from tilewright.trainer.parallel.mesh import Mesh, padding

SHARDED = {
    "vocab_size": 100,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
}
TIED = {**QWEN3, **SHARDED}
EXPERTS = {**MOE, **SHARDED, "mlp_only_layers": [0]}
APART = {**TIED, "model_type": "llama", "tie_word_embeddings": False}
# Heads that do not divide by 2.
ODD = {**TIED, "num_attention_heads": 3, "num_key_value_heads": 1}


def sharded(tp, data=None, **more):
    """Options of four processes that train on the eight bins of a step in two micro-batches."""
    micro_batch = 4 // (4 // tp if data is None else data)
    return fsdp2(tensor_parallel_size=tp, micro_batch_size=micro_batch, **more)


RECOMPUTE = {"enable_gradient_checkpointing": True}
ADAM = {"optimizer": "adamw", "lr": 1e-3}
LORA = {"lora__enable_lora": True, "lora__lora_rank": 4}
MODES = {
    # A checkpoint of the first is read by the second of a shape, and by one process.
    "tied/train_and_save": sharded(2, **ADAM),
    "tied/train_after_loading": sharded(4, **ADAM),
    "experts/train_and_save": sharded(1, **ADAM, expert_parallel_size=2),
    "experts/train_after_loading": sharded(2, **ADAM, expert_parallel_size=4),
    "tied/train_fsdp_tp": sharded(2, model__basic_modules=["mlp"], enable_full_shard=False),
    "apart/train_ulysses": sharded(2, 1, ulysses_parallel_size=2, cp_fsdp_mode="none", **RECOMPUTE),
    "apart/train_in_bfloat16": sharded(2, enable_mixed_precision=True, **RECOMPUTE),
    "experts/train_whole": sharded(2, data_parallel_shard_size=1, **RECOMPUTE),
    "experts/train_spread": sharded(
        2, expert_parallel_size=2, moe_checkpoint_method="moe_act", **RECOMPUTE
    ),
    "experts/train_ring": sharded(2, 1, ringattn_parallel_size=2, expert_parallel_size=4),
    "adapters/train_tp": sharded(
        4,
        **LORA,
        **RECOMPUTE,
        enable_reentrant=True,
        lora__lora_target_modules=["q_proj", "up_proj", "down_proj"],
        lora__merge_lora_interval=2,
        max_steps=3,  # the third trains on what a merge left
    ),
    "adapted_experts/train_tp": sharded(2, **LORA, expert_parallel_size=2),
    "odd/train_tp": sharded(2, **RECOMPUTE),
    "odd/train_ring": sharded(2, 1, ringattn_parallel_size=2),
    "odd/train_adapters": sharded(4, **LORA),
}
# Whose checkpoints move.
MOVED = ("tied", "experts")
SHAPES = {
    "odd": ODD,
    "tied": TIED,
    "apart": APART,
    "experts": EXPERTS,
    "adapters": TIED,
    "adapted_experts": EXPERTS,
}


def bins():
    """As `make_bins`; the second of two ranks has no labels in the first step."""
    made = make_bins()
    for i in (2, 3, 6, 7):
        for _, labels in made[i]:
            labels[:] = -100
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory, request):
    """Two steps in four processes in each of those modes, or three, and in one process."""
    root = tmp_path_factory.mktemp("sharded")
    paths = {
        name: write_config(
            root / name,
            shape,
            model__merge_qkv=False,
            train__gradient_accumulation_steps=2,
            **STEEP,
        )
        for name, shape in SHAPES.items()
    }
    for name in SHAPES:
        torch.save(bins(), root / name / "bins.pt")
    whole = write_config(
        root / "whole",
        TIED,
        model__merge_qkv=False,
        train__max_steps=4,
        train__gradient_accumulation_steps=2,
        train__save_steps=2,
        train__save_async=True,
        data__val_set_size=6,
        data__pad_to_multiple_of=3,
    )
    runs = {"whole/run": [whole, *fsdp2(tensor_parallel_size=4)]}
    moved = [f"{kind}/train_{what}" for kind in MOVED for what in ("and_save", "after_loading")]
    modes = selected(request, MODES, *moved)
    said = run_modes(4, root, modes | runs)
    assert "on 4 tensor-parallel ranks, micro-batches padded to a multiple of 12" in said
    return root, paths, {mode: torch.load(root / f"{mode}.pt") for mode in modes}


# What a mode does not change of the training in one process.
SAME = ("train.optimizer=", "train.lr=", "train.max_steps=", "lora.")


@functools.cache
def in_one_process(path, options):
    return distributed_worker.several_steps(load(path, list(options)), Mesh(), bins())[1]


@pytest.mark.parametrize("mode", MODES)
def test_sharded_matrices_train_as_in_one_process(mode, trained):
    _, paths, found = trained
    options = [a for a in MODES[mode] if a.removeprefix("--").startswith(SAME)]
    options.append("--train.micro_batch_size=4")
    found, want = found[mode], in_one_process(paths[mode.partition("/")[0]], tuple(options))
    if mode.endswith("bfloat16"):
        nearly_same_training(found, want)
        return
    same_training(found, want, weights=1e-3 if '--train.optimizer="adamw"' in options else None)


@pytest.mark.parametrize("shape", MOVED)
def test_checkpoints_move_between_layouts(shape, trained):
    """Weights and moments, and Hugging Face's files, bit for bit: into another layout and into one
    process.
    """
    root, paths, found = trained
    alike = {mode.partition("/")[2]: f for mode, f in found.items() if mode.startswith(f"{shape}/")}
    check_moves(
        (root / shape, paths[shape], alike, None),
        ("--train.optimizer=adamw", "--model.merge_qkv=false"),
    )


def test_a_run_goes_on_in_one_process(trained):
    """From an asynchronous checkpoint; both have the same losses, norms and final weights."""
    folder = trained[0] / "whole"
    sharded, weights = rows(folder), tensors(folder, 4)
    checkpoint = folder / "out/checkpoints/global_step_2"
    run(str(folder / "config.yaml"), "--train.load_checkpoint_path", str(checkpoint))
    alone = rows(folder)
    assert len(alone) == len(sharded) == 4 + 3
    for a, b in zip(sharded, alone, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() & {"loss", "grad_norm", "eval_loss", "tokens"}:
            assert a[name] == pytest.approx(b[name], rel=1e-4), name
    for name, tensor in tensors(folder, 4).items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-5)


# ---- in one process


def model_of(shape):
    return Transformer(ModelConfig.from_hf(shape), Ops.resolve(), merge_qkv=False)


def test_a_model_that_cannot_be_sharded_is_one_sentence():
    for change, sentence in (
        ({"intermediate_size": 50}, "50 columns of the MLP do not divide by 4"),
        ({"vocab_size": 97}, "97 tokens of the vocabulary do not divide by 4"),
    ):
        with pytest.raises(ValueError, match=f"tensor_parallel_size = 4: the model's {sentence}"):
            tensor_parallel.check(ModelConfig.from_hf({**TIED, **change}), 4)
    tensor_parallel.check(ModelConfig.from_hf(TIED), 4)
    with fake_group(8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("shard", "tp"))
        with torch.device("meta"):
            model = model_of({**TIED, "hidden_size": 34})
        tensor_parallel.shard_matrices(model, mesh["tp"])
        tensor_parallel.check_shards(model, 2)
        with pytest.raises(ValueError, match=r"embed_tokens\.weight has 34 columns, which do"):
            tensor_parallel.check_shards(model, 4)


def test_heads_are_divided_among_tensor_parallel_and_ulysses_ranks():
    model = model_of(TIED)
    for block in model.model.layers:
        block.self_attn.tp = TensorParallel(size=4)
    with pytest.raises(ValueError, match=r"model's 2 query heads of a tensor-parallel rank \(of 4"):
        spread_sequence(model, ContextParallel(4))
    spread_sequence(model, ContextParallel(2))
    for block in model.model.layers:
        block.self_attn.tp = RepeatedAttention(size=4)
    spread_sequence(model, ContextParallel(8))


def test_sequences_are_padded_to_a_multiple_of_all_ranks():
    assert padding(6, ContextParallel(2, 2), 2) == 48 and padding(1, ContextParallel(), 4) == 4
    embedding = tensor_parallel.VocabularyEmbedding(4, 2)
    embedding.tp = TensorParallel(size=4)
    with pytest.raises(ValueError, match="tensor_parallel_size = 4: 6 tokens of a sequence"):
        embedding(torch.zeros(1, 6, dtype=torch.int64))


def test_collectives_are_in_the_graph_of_a_layer():
    from torch._dynamo.testing import CompileCounter

    with fake_group(2):
        mesh, counter = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), CompileCounter()
        with torch.device("meta"):
            model = model_of(TIED)
        tensor_parallel.shard_matrices(model, mesh)
        model.to_empty(device="cpu")
        block = model.model.layers[0]
        assert block.mlp.down_proj.weight.to_local().shape == (32, 24)
        layer = torch.compile(block, backend=counter, fullgraph=True)
        for S in (16, 24, 32):
            x, tables = torch.zeros(1, S // 2, 32), rope_tables(model.config, S, "cpu")
            for t, dim in ((x, 1), *((t, 0) for t in tables)):
                torch._dynamo.maybe_mark_dynamic(t, dim)
            out, residual = layer(x, None, Sequence(*tables))
            assert out.shape == residual.shape == x.shape
        assert counter.frame_count == 1


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_that_fsdp2_gathers_by_themselves_are_not_compiled(tp):
    model = model_of({**EXPERTS, "mlp_only_layers": []})
    t = Train(output_dir="o", tensor_parallel_size=tp, enable_compile=True)
    compile_layers(model, t, t, [])
    whole = any(part in ("MoE.forward", "Block.forward") for part in compiled_parts(model))
    assert whole == (tp == 1)


@pytest.mark.parametrize("kind", [torch.nn.Linear, Linear])
@pytest.mark.parametrize("targets", [["gate_proj", "up_proj"], ["up_proj"]])
def test_adapters_of_a_shard_are_those_of_its_rows(kind, targets):
    parts = {"gate_proj": 8, "up_proj": 8}
    layer = LoRALinear(kind(8, 16, bias=False), rank=2, alpha=4, parts=parts, targets=targets)
    x = torch.randn(50, 8)
    torch.nn.init.normal_(layer.lora_B)
    want = layer(x)
    for rank in range(2):
        rows = torch.arange(16).view(2, 2, 4)[:, rank].flatten()  # of each part
        own = copy.deepcopy(layer)
        own.base.weight = torch.nn.Parameter(layer.base.weight[rows])
        B = layer.lora_B.unflatten(0, (len(targets), 2, 4))[:, rank].flatten(0, 1)
        own.lora_B = torch.nn.Parameter(B)
        torch.testing.assert_close(own(x), want[:, rows])


@pytest.mark.parametrize(
    "kind", [tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear]
)
def test_biased_projections_are_asked_for_float32_gradients(kind, monkeypatch):
    """On a GPU under autocast PyTorch's would be rounded."""
    layer, asked = kind(8, 6), []
    monkeypatch.setattr(
        "tilewright.nn.linear.rounds_gradients", lambda x, weight: asked.append(weight)
    )
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert len(asked) == 1 and asked[0] is layer.weight
