"""FSDP2, with optional replication (HSDP); experts are sharded over some of the ranks that
shard the rest.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from tilewright.nn.lora import LoRALinear
from tilewright.nn.lora_experts import LoRAExperts
from tilewright.ops.moe.expert_parallel import DeepEP
from tilewright.trainer.models.fields import Model
from tilewright.trainer.models.model import Block
from tilewright.trainer.models.moe import Experts, MoE
from tilewright.trainer.models.shared import PLAIN
from tilewright.trainer.parallel.fields import Compute
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.parallel.precision import Dtypes
from tilewright.trainer.parallel.row import LAYOUTS, Axis, Layout
from tilewright.trainer.parallel.tensor_parallel import check_shards, fsdp_placement, register


def _shard_experts(
    experts: Experts | LoRAExperts,
    names: Model,
    mesh: Mesh,
    reshard: bool,
    policy: MixedPrecisionPolicy,
) -> None:
    """Shards the experts of a layer that is built on meta: whole experts along the mesh's last
    dimension, and FSDP2 over the others, along rows, so that an expert's shards need not be a whole
    number of experts.

    Beside tensor parallelism that is done for one rank per layer's experts too: each rank has
    tokens of its own there, as with data parallelism, so FSDP2 shards over the tp ranks too.
    """
    over = mesh.experts
    assert over is not None and over.mesh_dim_names is not None
    own, shards = over["expert"], over["expert_shard"].size()
    sizes = {"expert": own.size()} | ({} if mesh.tensor is None else {"tensor": mesh.layout.tp})
    shown = ", ".join(f"train.{axis}_parallel_size = {n}" for axis, n in sizes.items())
    for name, p in list(experts.named_parameters()):
        E, rows = p.shape[:2]
        for what, size, parts in (
            ("experts", E, own.size()),
            (f"rows of {name}", rows, shards),
        ):
            if size % parts:
                raise ValueError(f"{shown}: {size} {what} do not divide by {parts}")
        if own.size() > 1:
            register(experts, name, p, own, Shard(0))
    if own.size() > 1:
        experts.spread(
            own.get_group(),
            names.ep_dispatch,
            DeepEP(names.deepep_buffer_size_gb, names.deepep_num_sms),
        )
    fully_shard(
        experts,
        mesh=over[over.mesh_dim_names[:-1]],
        reshard_after_forward=reshard,
        mp_policy=policy,
        shard_placement_fn=lambda p: Shard(1),
    )
    assert isinstance(experts, FSDPModule)
    # An expert's gradient is already summed over the ranks that sent tokens to it. Dividing by all
    # ranks, as for every other parameter, makes it the average over ranks too.
    experts.set_gradient_divide_factor(float(mesh.layout.averaged))
    # gloo cannot divide while it sums, so FSDP2 has to divide afterwards; in a shard group of one
    # it always does, and setting this would divide twice.
    if mesh.device.type == "cpu" and shards > 1:
        experts.set_force_sum_reduction_for_comms(True)


def shard_parameters(
    parts: Parts, mesh: Mesh, train: Compute, names: Model, dtypes: Dtypes
) -> None:
    # A block ends in a matrix product, whose result is a view where torch flattens its input. What
    # follows adds it out of place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    model = parts.model
    half = torch.bfloat16 if train.enable_mixed_precision else None
    reshard = train.reshard
    # Activations have the weights' dtype from the embedding on. Any other floating-point input
    # would be float32 and stay so.
    policy = MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=dtypes.gradients if half else None, cast_forward_inputs=False
    )
    options: dict[str, Any] = {"mesh": mesh.shards, "mp_policy": policy}
    options["ignored_params"] = {p for n, p in model.named_parameters() if n.endswith(PLAIN)}
    if mesh.tensor is not None:
        options["shard_placement_fn"] = fsdp_placement
        check_shards(model, mesh.layout.parameters[1])
    blocks, spread = model.model.blocks, []
    if mesh.experts is not None:
        spread = [block.mlp.experts for block in blocks if isinstance(block.mlp, MoE)]
        wanted = mesh.layout.expert > 1
        if wanted and not any(map(model.config.is_moe, range(model.config.num_hidden_layers))):
            raise ValueError(
                f"train.expert_parallel_size = {mesh.layout.expert}: the model has no experts"
            )
        for experts in spread:
            _shard_experts(experts, names, mesh, reshard, policy)
    _shard_basic_modules(parts, names, reshard, options)
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    for root in parts.roots:
        # The root's weights (embedding, head) are needed again at once, in the backward: keep them
        # gathered.
        fully_shard(root, reshard_after_forward=False, **options)
        if train.enable_forward_prefetch:
            inside = {id(module) for module in root.modules()}
            _prefetch([block for block in blocks if id(block) in inside], spread)


def _prefetch(blocks: list[Block], spread: Collection[nn.Module]) -> None:
    """Gathers a layer's sharded experts, and the next layer, while the layer runs."""
    for block, following in itertools.zip_longest(blocks, blocks[1:]):
        own = [block.mlp.experts] if isinstance(block.mlp, MoE) else []
        own = [experts for experts in own if experts in spread]
        if ahead := [*own, *([] if following is None else [following])]:
            assert isinstance(block, FSDPModule)
            block.set_modules_to_forward_prefetch(ahead)


def _shard_basic_modules(
    parts: Parts, names: Model, reshard: bool, options: dict[str, Any]
) -> None:
    """Makes each module that `basic_modules` names a unit of FSDP2. Raises ValueError for a name
    that matches no module, and for a module whose weight another module's kernel reads.
    """
    extra, matched, modules = set(names.basic_modules), set(), dict(parts.model.named_modules())
    for path, module in parts.whole.named_modules():
        last = path.rpartition(".")[2]
        hits = extra & {type(module).__name__, last}
        if hits and (
            last in ("lm_head", "score")
            or (last in ("q_norm", "k_norm") and names.merge_qkv)
            or (last == "base" and _reads_base(parts.whole, path[: -len(".base")]))
        ):
            raise ValueError(
                f"model.basic_modules: {path} ({', '.join(sorted(hits))}) cannot be a unit of its "
                "own: another module's kernel reads its weight"
            )
        if hits and any(True for _ in module.parameters()):
            matched |= hits
            own = modules.get(path)  # None: on another stage
            if own is None or isinstance(own, FSDPModule):  # experts are units of their own already
                continue
            fully_shard(own, reshard_after_forward=reshard, **options)
    if extra - matched:
        raise ValueError(f"model.basic_modules: no module is called {sorted(extra - matched)}")


def _reads_base(model: nn.Module, path: str) -> bool:
    """Whether the weight of the layer under a module with an adapter is read elsewhere: by DoRA's
    norms, or by losses.
    """
    module = model.get_submodule(path)
    return isinstance(module, LoRALinear) and (module.use_dora or path == "lm_head")


LAYOUTS.add(
    "fsdp2",
    Layout(
        60,
        lambda mesh, train, names, dtypes: train.data_parallel_mode == "fsdp2",
        shard_parameters,
        (Compute, Model, Dtypes),
        axes=(Axis("replicate", 20, None), Axis("shard", 30, None)),
    ),
)
