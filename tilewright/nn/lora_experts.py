"""Low-rank adapters on the experts of a mixture, over `ops.moe_lora`.

`peft_format.py` has their layout in PEFT's files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tilewright import ops
from tilewright.core import checks
from tilewright.nn.lora import adapter_scale, init_A
from tilewright.nn.peft_format import (
    keys_of_experts,
    peft_layout,
    rank_and_alpha,
    read_peft,
    settings,
)
from tilewright.nn.quantized_layers import QuantizedExperts, quantize_as
from tilewright.nn.sharded import assign, is_sharded, local, share, whole
from tilewright.ops.moe.expert_parallel import DeepEP, combine, dispatch
from tilewright.ops.moe.moe_lora import ADAPTERS, MODES, MOE_LORA
from tilewright.ops.quant.aqn import AQN
from tilewright.ops.quant.quantize import Quantized
from tilewright.ops.quant.quantized_linear import dequantize

_NAMES = tuple(f"lora_{name}" for name in ADAPTERS)


class LoRAExperts(nn.Module):
    """The frozen experts of a layer with adapters: each projection W becomes W + scale B A
    (`ops.moe_lora`).

    lora_gate_A, lora_up_A [E or 1, r, H] and lora_down_A [E or 1, r, I] are initialized uniformly
    in +- 1 / sqrt(columns), as in PEFT and nn.Linear; lora_gate_B, lora_up_B [E or 1, I, r] and
    lora_down_B [E or 1, H, r] with zeros, so that the initial output is the base's.

    Args:
        gate_up_proj: [E, 2 I, H], gates before ups: a tensor, which is frozen and not copied, or
            quantized.
        down_proj: [E, H, I]; quantized if `gate_up_proj` is.
        rank: r.
        alpha: The scale is alpha / rank, or with `rslora` alpha / sqrt(rank) (arXiv 2312.03732).
        rslora: See `alpha`.
        mode: The factors that experts share. "per_expert": none. "shared": all. "hybrid_shared": A
            of gate and up and B of down, the factors of model width.
        dtype: The adapters' dtype. They compute in x's dtype, or in autocast's.
        implementation: As in `ops.moe_lora`.

    Raises:
        TypeError: A weight is neither a tensor nor quantized, or only one is quantized.
        ValueError: Shapes do not match, or an option does not exist.

    Example:
        >>> import torch
        >>> from tilewright.nn.lora_experts import LoRAExperts
        >>> experts = LoRAExperts(torch.randn(4, 16, 32), torch.randn(4, 32, 8), rank=2, alpha=4)
        >>> index, weight = torch.tensor([[0, 3]]), torch.tensor([[0.5, 0.5]])
        >>> experts(torch.randn(1, 32), index, weight).shape
        torch.Size([1, 32])
    """

    noise_layers = 2  # number of `AQN.layer` values that it uses
    gate_up_proj: nn.Parameter | QuantizedExperts
    down_proj: nn.Parameter | QuantizedExperts
    lora_gate_A: nn.Parameter
    lora_down_A: nn.Parameter

    def __init__(
        self,
        gate_up_proj: torch.Tensor | Quantized,
        down_proj: torch.Tensor | Quantized,
        rank: int,
        alpha: float,
        *,
        rslora: bool = False,
        mode: str = "per_expert",
        dtype: torch.dtype = torch.float32,
        implementation: str = "auto",
    ):
        super().__init__()
        base = {"gate_up_proj": gate_up_proj, "down_proj": down_proj}
        for name, w in base.items():
            if not isinstance(w, (torch.Tensor, Quantized)):
                raise TypeError(f"{name} must be a tensor or quantized, got {type(w).__name__}")
        if isinstance(gate_up_proj, Quantized) != isinstance(down_proj, Quantized):
            raise TypeError("gate_up_proj and down_proj must both be tensors or both be quantized")
        if len(gate_up_proj.shape) != 3 or gate_up_proj.shape[1] % 2:
            raise ValueError(
                f"gate_up_proj must have shape [E, 2 I, H], got {list(gate_up_proj.shape)}"
            )
        E, I, H = gate_up_proj.shape[0], gate_up_proj.shape[1] // 2, gate_up_proj.shape[2]
        if tuple(down_proj.shape) != (E, H, I):
            raise ValueError(
                f"down_proj must have shape {[E, H, I]} ([E, H, I] of gate_up_proj), "
                f"got {list(down_proj.shape)}"
            )
        scale = adapter_scale(rank, alpha, rslora)
        checks.choice("mode", mode, tuple(MODES))
        if implementation != "auto":
            MOE_LORA.implementation(implementation)
        for name, w in base.items():
            if isinstance(w, Quantized):
                setattr(self, name, QuantizedExperts(w))
            else:
                # A parameter is kept as the same object: it may be a DTensor, or tied.
                p = w if isinstance(w, nn.Parameter) else nn.Parameter(w, False)
                p.requires_grad = False
                self.register_parameter(name, p)
        self.rank, self.alpha, self.rslora, self.scale = rank, alpha, rslora, scale
        self.mode, self.implementation = mode, implementation
        # The experts of this module; before they are sharded, of all ranks.
        self.num_experts = E
        first, second, down_A, down_B = (n or E for n in MODES[mode])
        shapes = ((first, rank, H), (second, I, rank)) * 2 + ((down_A, rank, I), (down_B, H, rank))
        for name, shape in zip(_NAMES, shapes, strict=True):
            self.register_parameter(
                name, nn.Parameter(torch.empty(shape, device=gate_up_proj.device, dtype=dtype))
            )
        self.recompute, self.noise = False, None
        self.group: dist.ProcessGroup | None = None
        self.replaced: nn.Module | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initializes the adapters again.

        generator: on the CPU, for values that depend neither on the device nor on sharding.
        """
        for name, p in self.adapters().items():
            if p.is_meta:
                continue
            if name.endswith("B"):
                p.zero_()
            else:
                init_A(p, generator)

    def take_the_place_of(self, module: nn.Module) -> None:
        """Stores the module that it replaces, without the two weights, for
        `adapt.merge_and_unload` to restore.
        """
        for name in ("gate_up_proj", "down_proj"):
            delattr(module, name)
        self.__dict__["replaced"] = module  # not a submodule: it is not part of the model meanwhile

    def adapters(self) -> dict[str, nn.Parameter]:
        """The six factors, by their argument names in `ops.moe_lora`."""
        return {name: getattr(self, f"lora_{name}") for name in ADAPTERS}

    def set_noise(self, noise: AQN | None) -> None:
        """Sets noise on a quantized base for future forward passes, in training mode only.

        It uses noise.layer and the one after it. Ignored by a dense base.
        """
        self.noise = noise if isinstance(self.down_proj, QuantizedExperts) else None

    def spread(
        self, group: dist.ProcessGroup, dispatch: str = "alltoall", deepep: DeepEP | None = None
    ) -> None:
        """Shards the experts over the ranks of `group`: tokens are sent to the rank of their
        experts. Each rank holds the base and adapters of its own experts, as tensors or as DTensors
        sharded along the first dimension.

        Raises ValueError for a mode that shares factors, for a quantized base, and for DeepEP.
        """
        if self.mode != "per_expert":
            raise ValueError(
                f"mode = {self.mode!r} is unsupported for experts sharded over ranks: "
                "the gradient of a shared factor would have to be summed over them; accepted: "
                "'per_expert'"
            )
        if dispatch != "alltoall":
            raise ValueError(
                f"dispatch must be 'alltoall' for experts with adapters, got {dispatch!r}"
            )
        if isinstance(self.down_proj, QuantizedExperts):
            raise ValueError("quantized experts cannot be sharded over ranks")
        self.group = group

    def forward(
        self,
        x_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weight_TK: torch.Tensor,
        kept: list | None = None,
    ) -> torch.Tensor:
        """kept: as in `ep_moe_mlp`; ignored: a recomputed layer sends sizes again."""
        if self.group is not None:
            rows, index, weight, plan = dispatch(
                x_TH,
                index_TK,
                weight_TK,
                local(cast(nn.Parameter, self.down_proj)).shape[0] * self.group.size(),
                self.group,
            )
            return combine(self._recomputed(rows, index, weight), plan)
        return self._recomputed(x_TH, index_TK, weight_TK)

    def _recomputed(self, *arguments):
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(
                self._compute, *arguments, use_reentrant=False, preserve_rng_state=False
            )
        return self._compute(*arguments)

    def _compute(self, x, index, weight):
        # As in moe_lora, before the weights are cast to x's dtype.
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        base = [
            w.weight() if isinstance(w, QuantizedExperts) else local(w).to(x.dtype)
            for w in (self.gate_up_proj, self.down_proj)
        ]
        factors = {name: local(p).to(x.dtype) for name, p in self.adapters().items()}
        return ops.moe_lora(
            x,
            *base,
            index,
            weight,
            **factors,
            scale=self.scale,
            noise=self.noise if self.training else None,
            implementation=self.implementation,
        )

    # ---- merging

    @torch.no_grad()
    def merge_(self, generator: torch.Generator | None = None) -> None:
        """Adds the adapters to the base and initializes new ones.

        The sum is in float32, then rounded to the base's dtype, in place, or quantized again in its
        format (NVFP4 with one scale per row's block, whatever it had). Every rank of sharded
        experts must call it.
        """
        for w, pairs in self._weights():
            if isinstance(w, QuantizedExperts):
                w.fill(self._sum(w, pairs))
            elif is_sharded(w):
                delta = torch.cat([(B @ A).expand(w.shape[0], -1, -1) for A, B in pairs], 1).mul_(
                    self.scale
                )
                local_shard = w.to_local()
                local_shard.copy_(local_shard.float() + share(delta, w))
            else:
                self.add_adapters(w, pairs)
        self.reset_parameters(generator)

    @torch.no_grad()
    def check_merge(self) -> None:
        """Raises ValueError if `merge_` would, and changes nothing."""
        for w, pairs in self._weights():
            if isinstance(w, QuantizedExperts):
                self._sum(w, pairs)

    def _weights(self):
        """Both weights, with the pairs A, B of each, float32."""
        gate_A, gate_B, up_A, up_B, down_A, down_B = (
            whole(p).float() for p in self.adapters().values()
        )
        yield self.gate_up_proj, ((gate_A, gate_B), (up_A, up_B))
        yield self.down_proj, ((down_A, down_B),)

    def _sum(self, w: QuantizedExperts, pairs):
        q = w.weight()
        dense = dequantize(q, dtype=torch.float32)
        self.add_adapters(dense, pairs)
        return quantize_as(q, dense)

    def add_adapters(self, weight, pairs):
        """Adds the products B A, concatenated along rows, to a weight [E, out, in], in place."""
        for e, expert in enumerate(weight):  # one at a time: a float32 sum of all would be large
            delta = torch.cat([_of_expert(B, e) @ _of_expert(A, e) for A, B in pairs])
            expert.copy_(expert.float().add_(delta, alpha=self.scale))

    # ---- PEFT

    def to_peft(self, path: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The adapters in PEFT's layout. Every rank of sharded experts must call it.

        If gate and up have the same A, their adapters are written with it; if their A differ, as
        after training, they are written with rank 2 r (`rank_pattern`, `alpha_pattern`). Factors
        that experts share are copied for each expert.

        Args:
            path: The experts' path in the transformers model, e.g. "model.layers.0.mlp.experts".

        Returns:
            The tensors by key, and entries of adapter_config.json. A model's layers share one
            config: merge their target_parameters and their patterns.

        Raises:
            ValueError: The experts are sharded as plain tensors.
        """
        if self.group is not None and not is_sharded(self.lora_gate_A):
            raise ValueError(
                "adapters of experts sharded over ranks as plain tensors cannot be written: no rank "
                "has the adapters of the others"
            )
        full = {name: whole(p).detach() for name, p in self.adapters().items()}
        E = self.num_experts if self.group is None else full["gate_A"].shape[0]
        gate_A, gate_B, up_A, up_B, down_A, down_B = (t.expand(E, -1, -1) for t in full.values())
        config: dict[str, Any] = {
            "target_parameters": [f"{path}.{name}" for name in ("gate_up_proj", "down_proj")],
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.rslora,
            "rank_pattern": {},
            "alpha_pattern": {},
        }
        if torch.equal(gate_A, up_A):
            A, B = gate_A, torch.cat((gate_B, up_B), 1)
        else:
            A = torch.cat((gate_A, up_A), 1)
            B = torch.cat(
                (
                    nn.functional.pad(gate_B, (0, self.rank)),
                    nn.functional.pad(up_B, (self.rank, 0)),
                ),
                1,
            )
            pattern = f"{re.escape(path)}.gate_up_proj"
            config["rank_pattern"][pattern] = 2 * self.rank
            same_scale = self.alpha * (math.sqrt(2) if self.rslora else 2)
            config["alpha_pattern"][pattern] = same_scale
        keys = keys_of_experts(path)
        return {
            key: peft_layout(t, key) for key, t in zip(keys, (A, B, down_A, down_B), strict=True)
        }, config

    @torch.no_grad()
    def load_peft_(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], path: str
    ) -> None:
        """Loads the adapters that PEFT wrote for the experts at `path`.

        PEFT's A of gate_up_proj, of rank r, becomes the A of gate and the A of up, which then train
        independently.

        Args:
            tensors: The file's; those of other modules are ignored.
            config: adapter_config.json.
            path: The experts' path in the file.

        Raises:
            ValueError: They are unsupported: one projection has no adapters; ranks or scales differ
                from this module's; DoRA and the like; or experts differ in a factor that this
                module's experts share.
        """
        for name, t in self.peft_values(tensors, config, path).items():
            p = getattr(self, f"lora_{name}")
            assign(p, t.to(p.dtype))

    def peft_values(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], path: str
    ) -> dict[str, torch.Tensor]:
        """The values that `load_peft_` would load, by the names of `adapters()`; raises the same
        errors and changes nothing.
        """
        values = read_peft(tensors, config, path, self._sizes(), self.rank, self.scale)
        for name, t in values.items():
            if getattr(self, f"lora_{name}").shape[0] != t.shape[0]:
                differs = [e for e in range(1, t.shape[0]) if not torch.equal(t[e], t[0])]
                if differs:
                    raise ValueError(
                        f"{path}: {name} of expert {differs[0]} differs from expert 0's; mode = "
                        f"{self.mode!r} has one for all experts"
                    )
                values[name] = t[:1]
        return values

    @classmethod
    def from_peft(
        cls,
        gate_up_proj: torch.Tensor | Quantized,
        down_proj: torch.Tensor | Quantized,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        path: str,
        **options: Any,
    ) -> LoRAExperts:
        """Makes a module with a file's rank and alpha, and loads the file.

        options: mode, dtype, implementation.
        """
        _, _, rslora = settings(config, path)
        rank, alpha = rank_and_alpha(config, path, "down_proj")
        module = cls(gate_up_proj, down_proj, rank, alpha, rslora=rslora, **options)
        module.load_peft_(tensors, config, path)
        return module

    def _sizes(self):
        """E, H and I."""
        return self.num_experts, self.lora_gate_A.shape[2], self.lora_down_A.shape[2]

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, rank={self.rank}, alpha={self.alpha}, "
            f"rslora={self.rslora}, mode={self.mode!r}, implementation={self.implementation!r}"
        )


def _of_expert(factor: torch.Tensor, expert: int) -> torch.Tensor:
    return factor[0 if factor.shape[0] == 1 else expert]
