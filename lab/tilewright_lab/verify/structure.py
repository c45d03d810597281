"""What modules hold against what their configuration says: attributes, buffers, tied heads,
configurations of their own, merged adapters.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from tilewright.nn.lora import LoRALinear
from tilewright_lab.verify.modules import SLACK, compare
from tilewright_lab.verify.reference import Twin, Weights

SIMPLE = (bool, int, float, str, type(None))
# They tell a state or a cache, not what is computed; the loss is compared by its value.
STATES = {"training", "gradient_checkpointing", "max_seq_len_cached", "name_or_path", "loss_type"}
OF_CONFIG = {
    "use_cache", "dtype", "torch_dtype", "architectures", "transformers_version", "return_dict",
    "output_hidden_states", "output_attentions", "quantization_config", "name_or_path",
    "tie_word_embeddings",
}  # fmt: skip
Said = dict[str, list[str]]  # sentences by module


def structure(root: nn.Module, config: Any, weights: Weights, wide: Twin) -> Said:
    """Sentences about modules that hold something else than their configuration says."""
    said: Said = defaultdict(list)
    own_config = getattr(root, "config", None)
    told: set[int] = set()  # configurations, which modules share
    for path, module in root.named_modules():
        plain = weights.paths.get(path)
        twin = None if plain is None else wide.module(plain)
        if twin is None or plain is None:
            continue
        said[plain] += _attributes(module, twin) + _buffers(module, twin)
        if not _same_function(module, twin):
            said[plain].append(
                f"computes another function than {twin}, which the configuration has"
            )
        inner = getattr(module, "config", None)
        if inner is not None and inner is not own_config and id(inner) not in told:
            told.add(id(inner))
            said[plain] += _configuration(inner, getattr(twin, "config", None))
    state = wide.model.state_dict()
    adapted = {f"{a}.weight" for a in weights.adapters} | {f"{a}.bias" for a in weights.adapters}
    for name in sorted(set(weights.tensors) - set(state) - adapted):
        said[name.rpartition(".")[0]].append(
            f"has {name.rpartition('.')[2]}, which the configuration's class has not"
        )
    for path, sentence in _ties(root, config):
        said[path].append(sentence)
    adapters = getattr(root, "peft_config", {})
    for path, module in root.named_modules():
        if sentence := _merged(module):
            said[weights.paths[path]].append(sentence)
        if hasattr(module, "lora_A") and hasattr(module, "scaling"):
            said[weights.paths[path]] += _scales(path, module, adapters)
    return {path: sentences for path, sentences in said.items() if sentences}


def _attributes(module: nn.Module, twin: nn.Module) -> list[str]:
    differences = []
    for name, right in vars(twin).items():
        if name.startswith("_") or name in STATES or name not in vars(module):
            continue
        value = vars(module)[name]
        if isinstance(value, SIMPLE) and isinstance(right, SIMPLE) and value != right:
            differences.append(
                f"{_spoken(name)} {value} in the module, {right} by the configuration"
            )
    return differences


@torch.no_grad()
def _same_function(module: nn.Module, twin: nn.Module) -> bool:
    """Whether activations agree in float64: approximations of one another differ by less than a
    rounding of bfloat16, in which outputs do not tell them apart.
    """
    known = ("torch.nn.", "transformers.activations")
    if type(module) is type(twin) and repr(module) == repr(twin):
        return True
    if any(
        not type(m).__module__.startswith(known) or any(True for _ in m.children()) or m._parameters
        for m in (module, twin)
    ):
        return True
    x = torch.linspace(-6, 6, 121, dtype=torch.float64)
    try:
        return torch.allclose(module(x), twin(x), rtol=1e-6, atol=1e-6)
    except (TypeError, ValueError, RuntimeError):
        return True


def _spoken(name: str) -> str:
    return {"variance_epsilon": "eps"}.get(name, name)


def base_of(inv_freq: torch.Tensor) -> float | None:
    """The base of rotary frequencies base^(-2 i / D), or None if they are others."""
    f = inv_freq.double().flatten()
    n = len(f)
    if n < 2 or not 0 < float(f[-1]) < 1:
        return None
    base = float(f[-1]) ** (-n / (n - 1))
    expected = base ** (-torch.arange(n, dtype=torch.float64, device=f.device) / n)
    return base if torch.allclose(f, expected, rtol=2e-2) else None


def spoken_bases(ours: float, theirs: float) -> str:
    """What both are, in as few digits as tell them apart: frequencies give a base roughly."""
    own, right = ours, theirs
    close = min(0.02, abs(ours / theirs - 1) / 2)
    for digits in range(2, 17):
        own, right = (float(f"{base:.{digits}g}") for base in (ours, theirs))
        if abs(own / ours - 1) < close and abs(right / theirs - 1) < close:
            break
    return f"rotary base {own:.16g} in the module, {right:.16g} by the configuration"


def _buffers(module: nn.Module, twin: nn.Module) -> list[str]:
    """Buffers that are no part of a checkpoint, and so come from the configuration alone."""
    differences = []
    right = dict(twin.named_buffers(recurse=False))
    saved = module.state_dict()
    for name, buffer in module.named_buffers(recurse=False):
        other = right.get(name)
        if other is None or name in saved or not buffer.is_floating_point():
            continue
        if buffer.shape != other.shape:
            differences.append(
                f"{name} is {list(buffer.shape)} in the module, {list(other.shape)} by the "
                "configuration"
            )
            continue
        close = 8 * torch.finfo(buffer.dtype).eps
        if not torch.allclose(
            buffer.double(), other.double().to(buffer.device), rtol=close, atol=0
        ):
            ours, theirs = (base_of(t) if "inv_freq" in name else None for t in (buffer, other))
            # A thousandth is far above what a rounding of float32 makes of a base.
            if ours and theirs and abs(ours - theirs) > 0.9e-3 * theirs:
                text = spoken_bases(ours, theirs)
                differences += [text] if text not in differences else []
            else:
                differences.append(f"{name} is not that of the configuration")
    return differences


def _configuration(inner: Any, right: Any) -> list[str]:
    """Differences of a module's own configuration from that of its reference."""
    if not hasattr(inner, "to_dict") or not hasattr(right, "to_dict"):
        return []
    own, other = inner.to_dict(), right.to_dict()
    return [
        f"its own config has {name} {own[name]}, the model's has {value}"
        for name, value in other.items()
        if name in own
        and not name.startswith("_")
        and name not in OF_CONFIG
        and isinstance(value, (*SIMPLE, list, dict))
        and own[name] != value
    ]


def _ties(root: Any, config: Any) -> list[tuple[str, str]]:
    get_head = getattr(root, "get_output_embeddings", None)
    head, embedding = get_head() if get_head else None, root.get_input_embeddings()
    if head is None or embedding is None:
        return []
    a, b = head._parameters.get("weight"), embedding._parameters.get("weight")
    if a is None or b is None:
        return []
    [name] = [n for n, m in root.named_modules() if m is head]
    [other] = [n for n, m in root.named_modules() if m is embedding]
    tied = bool(getattr(config, "tie_word_embeddings", False))
    if tied and a is not b and a.data_ptr() != b.data_ptr():
        same = "now equal" if a.shape == b.shape and torch.equal(a, b) else "different"
        return [
            (
                name,
                f"not tied: its weight is another tensor than {other}.weight, with {same} values, "
                "while tie_word_embeddings is true in the configuration",
            )
        ]
    if not tied and a is b:
        return [
            (
                name,
                f"tied: its weight is {other}.weight, while tie_word_embeddings is false in the "
                "configuration",
            )
        ]
    return []


def _scales(path: str, module: Any, adapters: dict[str, Any]) -> list[str]:
    """Active adapters whose scale is not the one of PEFT's configuration."""
    from peft.utils.other import get_pattern_key  # a layer of PEFT is given

    differences = []
    for name in module.active_adapters:
        config: Any = adapters.get(name)
        if name not in module.lora_A or not hasattr(config, "lora_alpha"):
            continue

        def by_pattern(pattern: dict[str, int], default: int) -> int:
            return pattern.get(get_pattern_key(list(pattern), path), default)

        alpha = by_pattern(config.alpha_pattern, config.lora_alpha)
        rank = by_pattern(config.rank_pattern, config.r)
        right = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        if not math.isclose(module.scaling[name], right, rel_tol=1e-6):
            root_of = "sqrt(r)" if config.use_rslora else "r"
            of = "" if name == "default" else f" of {name!r}"
            differences.append(
                f"its scale{of} is {module.scaling[name]}, by PEFT's configuration lora_alpha "
                f"{alpha} / {root_of} {rank} = {right}"
            )
    return differences


@torch.no_grad()
def _merged(module: Any) -> str | None:
    """Whether merging an adapter would add another product than B A scale."""
    if isinstance(module, LoRALinear):
        right = (module.lora_B.double() @ module.lora_A.double()) * module.scale
        return _delta(module.delta(), right, torch.zeros_like(right), torch.float32)
    if not hasattr(module, "lora_A") or not hasattr(module, "merge") or module.merged:
        return None
    base = module.get_base_layer()
    if type(base) is not nn.Linear or getattr(module, "lora_variant", None):
        return None
    right = torch.zeros_like(base.weight, dtype=torch.float64)
    for name in module.active_adapters:
        if name in module.lora_A:
            A, B = (m[name].weight.double() for m in (module.lora_A, module.lora_B))
            right += B @ A * module.scaling[name]
    copied = copy.deepcopy(module)
    copied.merge()
    return _delta(copied.get_base_layer().weight, right, base.weight.double(), base.weight.dtype)


def _delta(merged: torch.Tensor, delta: torch.Tensor, base: torch.Tensor, dtype) -> str | None:
    atol = SLACK.get(dtype, SLACK[torch.float32])
    eager = (base.to(dtype) + delta.to(dtype)).double()
    row = compare(merged, base + delta, eager, ("", "", "merged", ""), atol)
    if row.units <= 1:
        return None
    text = f"merging adds another delta than B A scale ({row.units:.3g} contract units)"
    square = delta.shape[0] == delta.shape[1]
    if (
        square
        and compare(merged, base + delta.T, eager, ("", "", "", ""), atol).error < row.error / 8
    ):
        text += "; it is the transpose"
    return text
