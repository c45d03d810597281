"""Tensor parallelism with sequence-parallel residual streams (arXiv 1909.08053, 2205.05198).

Ranks of a tp group read the same tokens. Between layers each has a shard [B, S / tp, H] of the
residual stream, along the sequence. Attention and MLP gather it, compute with a shard of their
matrices, and reduce-scatter the sum over ranks:

    norm            on the shard             weight whole; its gradient is a sum over ranks
    biases, sinks   of own rows and heads    whole, gradients summed
    q, k, v         [B, S, H] -> own heads   rows (column parallel)
    QK norm, rope,  on own heads             weights whole, gradients summed
    attention
    o_proj          -> sum over ranks        columns (row parallel)
    gate_up, down   the same                 rows of gate and of up; columns
    embedding       own rows of the table    rows of the vocabulary; sum over ranks
    head and loss   own logits               rows of the vocabulary; `group=` of the fused loss
    experts         whole, on own tokens     as with data parallelism: see `parallel.py`

Parameters are DTensors on the axis tp with the names and shapes of the whole model, so that FSDP2,
checkpoints, norms and exports treat them as usual; layers compute with their local shards.

Where the heads do not divide by tp, or have one norm, each rank has the weights of attention whole,
computes it for the whole sequence, and keeps its shard of the result.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tilewright.core import torch_names
from tilewright.nn import Linear
from tilewright.nn.linear import linear
from tilewright.nn.lora import LoRALinear
from tilewright.nn.sharded import local
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.shared import PLAIN, RepeatedAttention, TensorParallel, dim_of
from tilewright.trainer.parallel.precision import Dtypes
from tilewright.trainer.parallel.row import LAYOUTS, Axis, Layout

# Modules whose matrices are sharded by rows, and by columns.
BY_ROWS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "q_b_proj",
    "kv_b_proj",
    "gate_up_proj",
    "embed_tokens",
    "lm_head",
)
BY_COLUMNS = ("o_proj", "down_proj")


class VocabularyEmbedding(nn.Embedding):
    """A table sharded by rows. Returns this rank's shard [B, S / tp, H] of the vectors."""

    tp = TensorParallel()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] % self.tp.size:
            raise ValueError(
                f"train.tensor_parallel_size = {self.tp.size}: {input_ids.shape[1]} tokens of a "
                f"sequence do not divide by {self.tp.size}; batches.collate pads them"
            )
        table = local(self.weight)
        row = input_ids - self.tp.rank * len(table)
        inside = (row >= 0) & (row < len(table))
        embeddings = F.embedding(row.where(inside, 0), table)
        return self.tp.reduce_scatter(embeddings * inside.unsqueeze(-1))


class ColumnParallelLinear(Linear):
    """A projection whose matrix is sharded by rows. Its bias is whole on every rank, as norms'
    weights are, and each adds the part of its rows.
    """

    tp = TensorParallel()

    def own_bias(self) -> torch.Tensor:
        """What this rank adds."""
        return self.tp.own(local(self.bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, local(self.weight), self.own_bias())


class RowParallelLinear(ColumnParallelLinear):
    """A projection whose matrix is sharded by columns: the first rank alone adds the bias to the
    sum over ranks.
    """

    def own_bias(self) -> torch.Tensor:
        return local(self.bias) * float(self.tp.rank == 0)


def check(config: ModelConfig, size: int) -> None:
    """Raises ValueError for a model that so many ranks cannot shard evenly."""
    dense = not all(config.is_moe(layer) for layer in range(config.num_hidden_layers))
    for what, n in (
        ("columns of the MLP", config.intermediate_size if dense else 0),
        (
            "columns of the shared experts",
            (config.n_shared_experts or 0) * config.moe_intermediate_size,
        ),
        ("tokens of the vocabulary", config.vocab_size),
    ):
        if n % size:
            raise ValueError(
                f"train.tensor_parallel_size = {size}: the model's {n} {what} do not divide by "
                f"{size}"
            )


def undivided(model: Transformer, size: int) -> str | None:
    """Why so many ranks cannot each have as many heads; None: they can."""
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    if heads % size or kv_heads % size:
        return f"{heads} and {kv_heads} heads do not divide by {size}"
    return next((b.self_attn.undivided for b in model.model.blocks if b.self_attn.undivided), None)


def shard_matrices(model: Transformer, mesh: DeviceMesh, sums: torch.dtype | None = None) -> None:
    """Shards a model that is built on meta over the ranks of a mesh (tp,).   sums: their dtype."""
    tp = TensorParallel.of(mesh, sums)
    check(model.config, tp.size)
    shares = undivided(model, tp.size) is None
    for path, module in model.named_modules():
        if ".experts" not in path:
            for name, p in list(module.named_parameters(recurse=False)):
                whole = not shares and ".self_attn." in path
                at = Replicate() if whole else _placement(model, path, name)
                if name not in PLAIN:
                    register(module, name, p, mesh, at)
    model.tie()
    module: Any
    for path, module in model.named_modules():
        projection = path.removesuffix(".base").rpartition(".")[2]
        whole = not shares and ".self_attn" in path
        biased = getattr(module, "bias", None) is not None and not whole
        # Only the forward differs.
        if isinstance(module, nn.Embedding):
            module.__class__ = VocabularyEmbedding
        elif biased and projection in BY_ROWS:
            module.__class__ = ColumnParallelLinear
        elif biased and projection in BY_COLUMNS:
            module.__class__ = RowParallelLinear
        if hasattr(module, "tp"):
            cast(Any, module).tp = RepeatedAttention.of(mesh, sums) if whole else tp


def _placement(model: nn.Module, path: str, name: str) -> Placement:
    """name: of a parameter of the module at a path; adapters follow the projection's weight."""
    owner = path.removesuffix(".base")
    projection, adapted = owner.rpartition(".")[2], model.get_submodule(owner)
    if projection in BY_ROWS and name in ("weight", "lora_B"):
        # Each rank has rows of every part of a fused projection.
        parts = 2 if projection == "gate_up_proj" else 1
        if name == "lora_B" and isinstance(adapted, LoRALinear):
            if len(adapted.parts) > 1:
                parts = len(adapted.slices)
            elif parts > 1 and adapted.use_dora:
                raise ValueError(
                    f"lora.use_dora = True, train.tensor_parallel_size: {path} has one adapter, "
                    "whose magnitudes ranks cannot share; name other projections in "
                    "lora.lora_target_modules"
                )
        return Shard(0) if parts == 1 else torch_names.strided_shard(0, parts)
    if projection in BY_COLUMNS and name in ("weight", "lora_A"):
        return Shard(1)
    return Replicate()


def register(
    module: nn.Module, name: str, p: nn.Parameter, mesh: DeviceMesh, placement: Placement
) -> None:
    """Replaces a parameter on meta by a DTensor of its shape on a mesh of one dimension."""
    shape = list(p.shape)
    if (dim := dim_of(placement)) >= 0:
        shape[dim] //= mesh.size()
    part = torch.empty(shape, dtype=p.dtype, device=p.device)
    whole = DTensor.from_local(part, mesh, [placement], run_check=False)
    module.register_parameter(name, nn.Parameter(whole, p.requires_grad))


def fsdp_placement(p: nn.Parameter) -> Shard:
    """The dimension along which FSDP2 shards a parameter: another one than tp."""
    rows = isinstance(p, DTensor) and any(dim_of(at) == 0 for at in p.placements)
    return Shard(1 if rows else 0)


def check_shards(model: nn.Module, shards: int) -> None:
    """Raises ValueError for a parameter that FSDP2 cannot shard evenly along the other dimension,
    which it requires of all but the first.
    """
    for name, p in model.named_parameters():
        if fsdp_placement(p).dim == 1 and p.shape[1] % shards:
            raise ValueError(
                f"train.tensor_parallel_size, train.data_parallel_shard_size: {name} has "
                f"{p.shape[1]} columns, which do not divide by the {shards} processes that shard "
                "them beside tensor parallelism"
            )


LAYOUTS.add(
    "tensor",
    Layout(
        20,
        lambda mesh, dtypes: mesh.tensor is not None,
        lambda parts, mesh, dtypes: shard_matrices(
            parts.model, cast(DeviceMesh, mesh.tensor), dtypes.tensor_sums
        ),
        (Dtypes,),
        axes=(Axis("tp", 60, "tensor_parallel_size"),),
    ),
)
