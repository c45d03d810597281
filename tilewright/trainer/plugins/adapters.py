"""The configuration's section `lora`: adapters, quantized weights, noise on them, merging."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from tilewright.nn.adapt import add_lora, check_merge
from tilewright.nn.lora_experts import LoRAExperts
from tilewright.nn.quantize import quantize_model
from tilewright.nn.quantized_layers import QuantFormat
from tilewright.nn.weights import Adapted, adapted, is_adapter, trainable_parameters
from tilewright.ops.moe.moe_lora import MOE_LORA
from tilewright.ops.quant.aqn import AQN
from tilewright.trainer.callbacks import CALLBACKS, Plugin
from tilewright.trainer.checkpoint import hf
from tilewright.trainer.config import Lora, Model
from tilewright.trainer.models.head import AdaptedHead
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.stored import QKV
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.plugins.callback import Callback, Step
from tilewright.trainer.section import Resume, kept


def add(model: Transformer, wanted: Lora, names: Model) -> None:
    """Quantizes the layers of a model without values yet, if configured, and adds adapters."""
    path = names.model_path
    if wanted.enable_qlora:
        exclude = wanted.exclude_modules
        if exclude is None:
            exclude = hf.excluded(hf.local_folder(path, names.revision)) if path else []
        try:
            done = quantize_model(
                model,
                QuantFormat(wanted.quant_format, wanted.quant_group_size),
                exclude=exclude,
                strict=wanted.exclude_modules is not None,
            )
        except ValueError as error:
            raise ValueError(f"lora.exclude_modules = {exclude}: {error}") from error
        if not done:
            raise ValueError(f"lora.exclude_modules = {exclude}: leaves nothing to quantize")
    kind = {"rank": wanted.lora_rank, "alpha": wanted.lora_alpha, "rslora": wanted.rslora}
    kind |= {"use_dora": wanted.use_dora, "experts_mode": mode_of_experts(wanted)}
    try:
        # A new head says nothing before it is trained.
        whole = [model.head.module] if model.config.head == "reward" else []
        paths = add_lora(model, wanted.lora_target_modules, **kind, modules_to_save=whole)
    except ValueError as error:
        raise ValueError(f"lora.lora_target_modules: {error}") from error
    if "qkv_proj" in model.one_adapter and any(path.rpartition(".")[2] in QKV for path in paths):
        raise ValueError(
            f"lora.lora_target_modules: {model.config.model_type} stores {', '.join(QKV)} as one "
            "tensor, which has one adapter; set model.merge_qkv to true, or name other projections"
        )
    tied = isinstance(model.head_layer, AdaptedHead) and model.config.tied
    if wanted.merge_lora_interval and tied:
        raise ValueError(
            f"lora.merge_lora_interval = {wanted.merge_lora_interval}: lm_head is tied to the "
            "embedding, which would change with it; train without merging (an export merges), or "
            "without an adapter on lm_head"
        )
    if mode_of_experts(wanted) != "per_expert" and not mixtures(model):
        name = "moe_shared_lora" if wanted.moe_shared_lora else "moe_hybrid_shared_lora"
        raise ValueError(f"lora.{name} = True: there are no experts with adapters")
    for module in mixtures(model):  # the configured name, or none: raises if it cannot run here
        module.implementation = names.moe_implementation or "auto"
        MOE_LORA.resolve(module.implementation)


def mode_of_experts(wanted: Lora) -> str:
    """As LoRAExperts has it."""
    if wanted.moe_hybrid_shared_lora:
        return "hybrid_shared"
    return "shared" if wanted.moe_shared_lora else "per_expert"


def mixtures(model: Transformer) -> list[LoRAExperts]:
    """The experts with adapters."""
    return [module for _, module in adapted(model) if isinstance(module, LoRAExperts)]


def operations(model: Transformer, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The implementations of experts with adapters, which `Ops` does not list."""
    names = [module.implementation for module in mixtures(model)]  # the same of each
    if not names:
        return {}
    return {"moe_lora": MOE_LORA.choose(device.type, dtype) if names[0] == "auto" else names[0]}


def generator(seed: int, step: int) -> torch.Generator:
    """The generator of adapters initialized after that many optimizer steps."""
    return torch.Generator().manual_seed(seed << 31 | step)


def reset(parts: Parts, draw: torch.Generator) -> None:
    """Initializes all adapters."""
    for module in _in_order(parts, draw):
        module.reset_parameters(draw)


def _in_order(parts: Parts, draw: torch.Generator) -> Iterator[Adapted]:
    """The modules with adapters. Where other stages of a pipeline have some, the generator skips
    their values, so that each module has those of one process.
    """
    own = dict(adapted(parts.model))
    for path, module in adapted(parts.whole):
        if path in own:
            yield own[path]
            continue
        for name, p in module.named_parameters():
            if is_adapter(name) and name.endswith("A"):
                torch.empty(p.shape).uniform_(generator=draw)


def _set_noise(parts: Parts, noise: AQN) -> None:
    """As `adapt.set_noise`, with the layers numbered as in the whole model."""
    own: dict[str, Any] = dict(parts.model.named_modules())
    layer = noise.layer
    module: Any
    for path, module in parts.whole.named_modules():
        if not hasattr(module, "set_noise"):
            continue
        if path in own:
            own[path].set_noise(dataclasses.replace(noise, layer=layer))
        layer += module.noise_layers


def before_step(parts: Parts, wanted: Lora, seed: int, step: int) -> None:
    """step: optimizer steps done."""
    if wanted.enable_aqn:
        _set_noise(parts, AQN(wanted.aqn_alpha, seed, step))


def merges(wanted: Lora, done: int) -> bool:
    """Whether adapters are merged after that many optimizer steps."""
    return wanted.merge_lora_interval > 0 and done % wanted.merge_lora_interval == 0


def after_step(
    parts: Parts,
    optimizer: torch.optim.Optimizer,
    wanted: Lora,
    seed: int,
    done: int,
    mesh: Mesh,
) -> None:
    """done: optimizer steps done. Raises ValueError, on every rank, if the sum of a quantized
    weight and its adapter is not finite on any: no rank has then merged.
    """
    if not merges(wanted, done):
        return
    with mesh.control.agreeing(ValueError):
        check_merge(parts.model)
    draw = generator(seed, done)
    for module in _in_order(parts, draw):
        module.merge_(draw)
    parts.merged = True
    if wanted.reset_optimizer_on_merge:
        # Zeros are an optimizer's initial state, step counts included.
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()


def identity(wanted: Lora) -> dict[str, Any] | None:
    """The compatibility key of a checkpoint with adapters."""
    return kept(wanted, Resume.OTHER_WEIGHTS) if wanted.enable_lora else None


def size(model: Transformer) -> str:
    """The number of parameters, and of trainable ones."""
    trained, every = trainable_parameters(model)
    adapters = any(True for _ in adapted(model))
    return f"{every / 1e6:.1f} M parameters" + (
        f", {trained / 1e6:.2f} M of them in adapters," if adapters else ""
    )


class Adapters(Callback):
    """Noise before a step; a merge after it."""

    def before_step(self, step: Step) -> None:
        config = self.run.config
        before_step(self.run.engine.parts, config.lora, config.train.seed, step.number - 1)

    def after_step(self, step: Step) -> None:
        run, engine, lora = self.run, self.run.engine, self.run.config.lora
        if merges(lora, step.number):
            # Quantized weights do not show that they were merged with what is not finite.
            run.saver.check(step.number, engine.model, engine.optimizer, "nothing is merged")
        seed = run.config.train.seed
        after_step(engine.parts, engine.optimizer, lora, seed, step.number, run.mesh)


CALLBACKS.add("adapters", Plugin(Adapters, 10, lambda run: run.config.lora.enable_lora))
