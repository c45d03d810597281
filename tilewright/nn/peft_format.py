"""PEFT's files: the settings of their configs, and the layout of adapters on experts.

PEFT adapts a three-dimensional parameter as one matrix per expert (`target_parameters`, PEFT 0.18
and later), and transformers 5 fuses gate and up of all experts in one, so that PEFT's A of rank r'
serves both. In its files, for experts at `path` (where the wrapper of down_proj encloses that of
gate_up_proj):

    path.base_layer.lora_A.weight [E r', H]    row e r' + j: row j of expert e's A for gate and up
    path.base_layer.lora_B.weight [2 I, r' E]  column j E + e: column j of expert e's B, gate first
    path.lora_A.weight, path.lora_B.weight     the same for down_proj

Gate and up with separate A, of rank r, are stored as rank 2 r:

    A = [A_gate; A_up],  B = [[B_gate, 0], [0, B_up]]
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from tilewright.core.registry import short
from tilewright.core.takes import FLOAT
from tilewright.ops.moe.moe_lora import ADAPTERS

# Settings of PEFT's config that do not affect what its tensors compute, or that are supported here.
_FREE = {
    "peft_type",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "lora_dropout",
    "modules_to_save",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "megatron_core",
    "qalora_group_size",
    "ensure_weight_tying",
    # used by init_lora_weights
    "eva_config",
    "loftq_config",
    "corda_config",
    "lora_ga_config",
}


# Supported values of other settings, beside null, false and empty ones. PiSSA and other
# initializations change the base weights, which are not in the file.
_NEUTRAL = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica")}


def unsupported(config: Mapping[str, Any]) -> str | None:
    """The name of an unsupported or unknown setting; None if there is none."""
    return next(
        (
            key
            for key, value in config.items()
            if key not in _FREE and value and value not in _NEUTRAL.get(key, ())
        ),
        None,
    )


def settings(config: Mapping[str, Any], where: object) -> tuple[int, float, bool]:
    """r, lora_alpha and use_rslora of PEFT's config. Raises ValueError, naming the setting, if one
    of them or of the two patterns is invalid.
    """

    def check(name, value, kinds, accepted):
        good = type(value) in kinds and (bool in kinds or 0 < value < math.inf)
        if not good:
            raise ValueError(
                f"{where}: {name} must be {accepted}, got "
                f"{'nothing' if value is None and name not in config else json.dumps(value)}"
            )

    for key, pattern, kinds, accepted in (
        ("r", "rank_pattern", (int,), "an int >= 1"),
        ("lora_alpha", "alpha_pattern", (int, float), "a finite number > 0"),
    ):
        check(key, config.get(key), kinds, accepted)
        values = config.get(pattern)
        if values is not None and not isinstance(values, Mapping):
            raise ValueError(f"{where}: {pattern} must be an object, got {json.dumps(values)}")
        for name, value in (values or {}).items():
            check(f"{pattern}[{name!r}]", value, kinds, accepted)
            try:
                re.compile(name)
            except re.error as error:
                raise ValueError(
                    f"{where}: {pattern} must have regular expressions, got {name!r} ({error})"
                ) from error
    for name in ("use_rslora", "use_dora"):
        if config.get(name) is not None:
            check(name, config[name], (bool,), "true or false")
    return config["r"], config["lora_alpha"], config.get("use_rslora") is True


def check_dtype(name: str, t: torch.Tensor) -> None:
    """Raises ValueError for a dtype that is unsupported for adapters."""
    if t.dtype not in FLOAT:
        raise ValueError(
            f"{name} must be one of {', '.join(map(short, FLOAT))}, got {short(t.dtype)}"
        )


def keys_of_experts(path: str) -> list[str]:
    """The keys of A and B of gate_up_proj, then of down_proj."""
    return [
        f"base_model.model.{path}.{layer}lora_{factor}.weight"
        for layer in ("base_layer.", "")
        for factor in "AB"
    ]


def peft_layout(t: torch.Tensor, key: str) -> torch.Tensor:
    """A [E, r, in] as [E r, in], or B [E, out, r] as [out, r E], on the CPU."""
    t = t.flatten(0, 1) if "lora_A" in key else t.permute(1, 2, 0).flatten(1)
    return t.to("cpu", copy=True).contiguous()


def rank_and_alpha(config: Mapping[str, Any], path: str, name: str) -> tuple[int, float]:
    """Rank and alpha of a parameter. As in PEFT, a pattern is a regular expression for the end of a
    path.
    """

    def of(patterns, default):
        for pattern, value in (patterns or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", f"{path}.{name}"):
                return value
        return default

    return (
        of(config.get("rank_pattern"), config["r"]),
        of(config.get("alpha_pattern"), config["lora_alpha"]),
    )


def read_peft(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    path: str,
    sizes: tuple[int, int, int],
    rank: int,
    scale: float,
) -> dict[str, torch.Tensor]:
    """The six factors, each for E experts, by the names in `ops.moe_lora`.

    sizes: E, H and I.   Raises ValueError for adapters that LoRAExperts of this rank and scale
    cannot represent.
    """
    _check_config(config, path)
    keys = keys_of_experts(path)
    present = {key for key in tensors if key.startswith(f"base_model.model.{path}.")}
    if missing := [key for key in keys if key not in present]:
        raise ValueError(
            f"{path}: {missing[0]} is missing; LoRAExperts has adapters on gate_up_proj and "
            "down_proj"
        )
    if more := sorted(present - set(keys)):
        raise ValueError(f"{path}: {more[0]} cannot be represented in LoRAExperts")
    E, H, I = sizes
    factors = []
    for name, inner, outer, (key_A, key_B) in (
        ("gate_up_proj", H, 2 * I, keys[:2]),
        ("down_proj", I, H, keys[2:]),
    ):
        r = _rank(config, path, name, scale)
        for key, shape in ((key_A, (E * r, inner)), (key_B, (outer, r * E))):
            check_dtype(key, tensors[key])
            if tuple(tensors[key].shape) != shape:
                raise ValueError(
                    f"{key} must have shape {list(shape)} for {E} experts of rank {r}, "
                    f"got {list(tensors[key].shape)}"
                )
        A, B = tensors[key_A].view(E, r, inner), tensors[key_B].view(outer, r, E)
        factors.append((r, A, B.permute(2, 0, 1)))
    (r, A, B), (r_down, down_A, down_B) = factors
    gate_B, up_B = B[:, :I], B[:, I:]
    if r_down != rank:
        raise ValueError(f"{path}.down_proj: the adapter's rank is {r_down}, this module's {rank}")
    if r == rank:
        return dict(zip(ADAPTERS, (A, gate_B, A, up_B, down_A, down_B), strict=True))
    if r != 2 * rank:
        raise ValueError(
            f"{path}.gate_up_proj: the adapter's rank is {r}; for this module's {rank} it must be "
            f"{rank}, or {2 * rank} with an A of its own for gate and for up"
        )
    if gate_B[:, :, rank:].any() or up_B[:, :, :rank].any():
        raise ValueError(
            f"{path}.gate_up_proj: the adapter has rank {r} for gate and up together, which rank "
            f"{rank} for each cannot represent: B is not 0 where gate would use up's A, or up "
            "gate's"
        )
    gate_B, up_B = gate_B[:, :, :rank], up_B[:, :, rank:]
    values = (A[:, :rank], gate_B, A[:, rank:], up_B, down_A, down_B)
    return dict(zip(ADAPTERS, values, strict=True))


def _check_config(config: Mapping[str, Any], path: str) -> None:
    """Raises ValueError for settings that LoRAExperts cannot represent."""
    if config.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"{path}: peft_type must be LORA, got {config['peft_type']!r}")
    separate_keys = ("bias", "modules_to_save", "trainable_token_indices")
    relevant = {k: v for k, v in config.items() if k not in separate_keys}
    of_linear = (key for key in ("lora_dropout", "use_dora") if config.get(key))
    if key := unsupported(relevant) or next(of_linear, None):
        raise ValueError(f"{path}: {key} = {config[key]!r} cannot be represented in LoRAExperts")


def _rank(config: Mapping[str, Any], path: str, name: str, scale: float) -> int:
    """The rank of a parameter's adapter. Raises ValueError if its scale differs from `scale`."""
    _, _, rslora = settings(config, path)
    r, alpha = rank_and_alpha(config, path, name)
    file_scale = alpha / (math.sqrt(r) if rslora else r)
    if not math.isclose(file_scale, scale, rel_tol=1e-6):
        raise ValueError(
            f"{path}.{name}: the adapter's scale is {file_scale:.6g} (lora_alpha {alpha}, r {r}), "
            f"this module's {scale:.6g}"
        )
    return r
