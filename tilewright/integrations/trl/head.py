"""Statistics of tokens from a model's head, dense or with LoRA, wherever its parameters are.

The head's parameters may be there only while its modules run: FSDP2 and ZeRO-3 gather them before a
module's forward and before its backward, and reduce their gradients after it, by hooks. So the
computation runs as the forward of each module of the head that has hooks, which get a tuple of
statistics as its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tilewright import ops
from tilewright.core.registry import ImplementationUnavailable
from tilewright.integrations.trl.policy import Carried, Expected
from tilewright.nn.sharded import is_sharded

# The size of the logits that `mean_logits` computes at a time under a softcap.
BUDGET_BYTES = 64 * 2**20
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class Scaling(NamedTuple):
    """How TRL scales logits z: softcap * tanh(scale * z / softcap) / temperature."""

    temperature: float
    softcap: float | None
    scale: float
    fp32: bool  # products in float32, outside autocast


class Adapter(NamedTuple):
    """logits += scale * B(A(x))."""

    A: nn.Linear
    B: nn.Linear
    scale: float


class Head(NamedTuple):
    """modules: all that have to run for the parameters to be there, from the outside in."""

    base: nn.Linear
    adapters: tuple[Adapter, ...]
    modules: tuple[nn.Module, ...]


def resolve(head: nn.Module) -> Head:
    """The head as it computes now: adapters may be switched off, or merged.

    Raises ImplementationUnavailable for a head that cannot be computed.
    """
    modules: list[nn.Module] = [head]
    adapters: tuple[Adapter, ...] = ()
    inner: Any = head
    if kind := _peft_class(inner, "peft.utils.other", "ModulesToSaveWrapper"):
        _check_forward(inner, kind)
        active = () if inner.disable_adapters else inner.active_adapters[:1]
        copies = [inner.modules_to_save[name] for name in active if name in inner.modules_to_save]
        inner = copies[0] if copies else inner.original_module
        modules.append(inner)
    if kind := _peft_class(inner, "peft.tuners.lora.layer", "Linear"):
        _check_forward(inner, kind)
        adapters = _adapters(inner)
        inner = inner.base_layer
        modules += [inner, *(m for adapter in adapters for m in adapter[:2])]
    for module in (inner, *(m for adapter in adapters for m in adapter[:2])):
        _check_forward(module, nn.Linear)
    return Head(inner, adapters, tuple(modules))


def _peft_class(module: Any, where: str, name: str) -> Any:
    """PEFT's class of this name, which need not be imported, if the module is an instance."""
    for c in type(module).__mro__:
        if (c.__module__, c.__name__) == (where, name):
            return c
    return None


def _check_forward(module: nn.Module, kind: Any) -> None:
    """Raises ImplementationUnavailable if a module has another forward than `kind`, whether its
    class defines it (FSDP2's class has nn.Linear's own) or it is set on the module. The forward
    that accelerate sets for a device map is allowed: it only moves inputs, as is done here.
    """
    if type(module).forward is not kind.forward:
        cls = type(module)
        raise ImplementationUnavailable(
            "the head must be a torch.nn.Linear, with or without PEFT's LoRA, got "
            f"{cls.__module__}.{cls.__qualname__}"
        )
    own = vars(module).get("forward")
    if own is not None and type(vars(module).get("_hf_hook")).__name__ == "AlignDevicesHook":
        own = vars(module)["_old_forward"]
    if own is not None and getattr(own, "__func__", None) is not kind.forward:
        name = getattr(own, "__qualname__", type(own).__qualname__)
        raise ImplementationUnavailable(
            f"the forward of the head's {type(module).__name__} must be its class's, got "
            f"{name}, which was set on the module and is not computed here"
        )


def _adapters(layer: Any) -> tuple[Adapter, ...]:
    if layer.disable_adapters:
        if layer.merged:
            layer.unmerge()  # as its own forward does
        return ()
    if layer.merged:
        return ()
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    for name in names:
        check_adapter(layer, name)
    return tuple(Adapter(layer.lora_A[n], layer.lora_B[n], float(layer.scaling[n])) for n in names)


def check_adapter(layer: Any, name: str) -> None:
    """Raises ImplementationUnavailable for an adapter on the head that cannot be computed."""
    dropout = getattr(layer.lora_dropout[name], "p", 0.0)
    for option, value, accepted in (
        ("use_dora or another variant", name in layer.lora_variant, "plain LoRA"),
        ("lora_bias", bool(layer.lora_bias[name]), "False"),
        ("lora_dropout", dropout if dropout > 0 else False, "0"),
    ):
        if value:
            raise ImplementationUnavailable(
                f"{option} must not be set for adapter {name!r} on the head, got {value!r} "
                f"(accepted: {accepted})"
            )


def check_adapters(head: nn.Module) -> None:
    """`check_adapter` for all adapters of the head, active or not."""
    for name in getattr(head, "lora_A", ()):
        check_adapter(head, name)


# ---- the computation


def statistics(
    head: nn.Module,
    x: torch.Tensor,
    target: torch.Tensor,
    scaling: Scaling,
    outputs: Sequence[str],
    expected: Expected | None = None,
) -> dict[str, torch.Tensor]:
    """The statistics of OUTPUTS that `outputs` names, float32 [T] (is_top1: bool), of rows x [T, H]
    with their target [T]. log_probs and entropy are differentiable. With `expected` the gradient of
    log_probs is that of this loss, and entropy has none.
    """
    resolved = resolve(head)
    told = expected if {*outputs} <= {"log_probs", "entropy"} else None

    def compute(x):
        if told is not None:
            return _of_policy(resolved, x, target, scaling, told)
        return _compute(resolved, x, target, scaling, outputs)

    values = within([m for m in resolved.modules if _has_hooks(m)], compute, x)
    if not isinstance(values, tuple) or len(values) != len(OUTPUTS):
        raise ImplementationUnavailable(
            "forward hooks on the head must leave its output as it is, here a tuple of "
            f"{len(OUTPUTS)} statistics, got {type(values).__name__} from one"
        )
    return {name: t for name, t in zip(OUTPUTS, values, strict=True) if t is not None}


def within(modules: Sequence[nn.Module], compute: Callable, x: torch.Tensor) -> Any:
    """compute(x), as the forward of all modules at once: their hooks run around it."""
    if not modules:
        return compute(x)
    module, *rest = modules
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = lambda x: within(rest, compute, x)
    try:
        return module(x)
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


def _has_hooks(module: nn.Module) -> bool:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, kind) for kind in kinds)


def _of_policy(head: Head, x, target, scaling: Scaling, told: Expected) -> tuple:
    x, target, options, temperature = _operands(head, x, target, scaling)
    result = ops.linear_policy_loss(
        x,
        head.base.weight,
        ops.SampledTokens(target, **told.tokens),
        told.formula,
        ops.HeadOptions(**options, temperature=temperature),
    )
    slopes = told.slopes(result.logprob)
    logprob = Carried.apply(result.logprob, result.loss, slopes, told.check)
    return logprob, result.entropy, None, None, None


def _operands(head: Head, x, target, scaling: Scaling) -> tuple[Any, Any, dict[str, Any], float]:
    """x, target, and the options and the temperature of the head's ops."""
    weight = head.base.weight
    _check_present(head)
    x, target = x.to(weight.device, weight.dtype), target.to(weight.device)
    options: dict[str, Any] = {
        "bias": head.base.bias,
        "softcap": None if scaling.softcap is None else scaling.softcap / scaling.scale,
        "fp32_logits": scaling.fp32,
        **low_rank(head.adapters, x.dtype),
    }
    return x, target, options, scaling.temperature / scaling.scale


def _compute(head: Head, x, target, scaling: Scaling, outputs) -> tuple[torch.Tensor | None, ...]:
    x, target, options, temperature = _operands(head, x, target, scaling)
    weight = head.base.weight
    top1 = "is_top1" in outputs
    logprob, entropy, *best = ops.linear_logprob(
        x, weight, target, temperature=temperature, return_argmax=top1, **options
    )
    squares = mean = None
    with torch.no_grad():
        if "log_sum_sq_probs" in outputs:
            # log sum p^2 = lse(2 z) - 2 lse(z), where log p_y = z_y - lse(z).
            half, _ = ops.linear_logprob(x, weight, target, temperature=temperature / 2, **options)
            squares = 2 * logprob - half
        if "mean_logits" in outputs:
            with torch.autocast(x.device.type, enabled=False):
                mean = mean_logits(x, weight, options) / temperature
    is_top1 = best[0] == target if top1 else None
    return logprob, entropy if "entropy" in outputs else None, squares, mean, is_top1


def _check_present(head: Head) -> None:
    parameters = [
        p for m in (head.base, *(m for a in head.adapters for m in a[:2])) for p in m.parameters()
    ]
    if any(is_sharded(p) for p in parameters):
        raise ImplementationUnavailable(
            "the head's weight must be whole where the head runs, got a DTensor (tensor "
            "parallelism); keep lm_head out of the tensor-parallel plan"
        )
    if any(p.is_meta or p.numel() == 0 for p in parameters):
        raise ImplementationUnavailable(
            "the head's weight must be on a device where the head runs, got one that is "
            "offloaded or not gathered"
        )


def low_rank(adapters: Sequence[Adapter], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of `ops.linear_logprob` for the sum of adapters."""
    if not adapters:
        return {}
    factors = [(a.A.weight.to(dtype), a.B.weight.to(dtype), a.scale) for a in adapters]
    if len(factors) == 1:
        A, B, scale = factors[0]
    else:
        A = torch.cat([scale * A for A, _, scale in factors])
        B, scale = torch.cat([B for _, B, _ in factors], 1), 1.0
    return {"lora_A": A, "lora_B": B, "lora_scale": scale}


def mean_logits(x: torch.Tensor, weight: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The mean over the vocabulary of the (capped) logits of each row, in float32."""
    bias, softcap = options["bias"], options["softcap"]
    adapted = "lora_A" in options
    if softcap is None:  # the logits of the mean row
        mean = x.float() @ weight.mean(0, dtype=torch.float32)
        if adapted:
            A, B = options["lora_A"], options["lora_B"]
            low = (x @ A.T).float() @ B.mean(0, dtype=torch.float32)
            mean = mean + options["lora_scale"] * low
        return mean if bias is None else mean + bias.float().mean()
    rows = max(BUDGET_BYTES // (4 * weight.shape[0]), 1)
    means = [x.new_zeros(0, dtype=torch.float32)]
    for part in x.split(rows):
        z = F.linear(part, weight, bias).float()
        if adapted:
            low = F.linear(F.linear(part, options["lora_A"]), options["lora_B"])
            z += options["lora_scale"] * low.float()
        means.append((softcap * torch.tanh(z / softcap)).mean(-1))
    return torch.cat(means)
