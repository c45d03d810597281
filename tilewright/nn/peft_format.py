"""PEFT's files: the settings of their configs, and the layout of adapters on experts.

PEFT adapts a parameter of three dimensions as one matrix an expert (`target_parameters`, PEFT 0.18
and later), and transformers 5 keeps gate and up of all experts in one, so that PEFT's A of rank r'
serves both. In its files, for experts at `path` (where the wrapper of down_proj encloses that of
gate_up_proj):

    path.base_layer.lora_A.weight [E r', H]    rows e r' + j: row j of expert e's A for gate and up
    path.base_layer.lora_B.weight [2 I, r' E]  columns j E + e: column j of expert e's B, gate's
    rows first path.lora_A.weight, path.lora_B.weight     the same of down_proj

Gate and up with an A of their own, of rank r, are rank 2 r there: A = [A_gate; A_up], B = [[B_gate,
0], [0, B_up]].
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from tilewright.ops import _checks
from tilewright.ops.moe_lora import ADAPTERS
from tilewright.registry import short

# Settings of PEFT's config that do not change what its tensors compute, or that the readers here
# follow.
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
    "rank_pattern",
    "alpha_pattern",
    "lora_dropout",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "megatron_core",
    "qalora_group_size",
    "ensure_weight_tying",
    # what init_lora_weights reads
    "eva_config",
    "loftq_config",
    "corda_config",
    "lora_ga_config",
}


# Of others, the values that ask for nothing that is not here, beside null, false and what is empty.
# PiSSA and other ways to begin change the base weights, which are not in the file.
_NEUTRAL = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica")}


def unsupported(config: Mapping[str, Any]) -> str | None:
    """The name of a setting that asks for what is not here, also of one that is not known."""
    return next(
        (
            key
            for key, value in config.items()
            if key not in _FREE and value and value not in _NEUTRAL.get(key, ())
        ),
        None,
    )


def settings(config: Mapping[str, Any], where: object) -> tuple[int, float, bool]:
    """r, lora_alpha and use_rslora of PEFT's config. Raises ValueError, naming the setting, for
    what they and the two patterns cannot be.
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
    if config.get("use_rslora") is not None:
        check("use_rslora", config["use_rslora"], (bool,), "true or false")
    return config["r"], config["lora_alpha"], config.get("use_rslora") is True


def check_dtype(name: str, t: torch.Tensor) -> None:
    """Raises ValueError for a tensor of a file that is no adapter's."""
    if t.dtype not in _checks.ACCEPTED:
        raise ValueError(
            f"{name} must be one of {', '.join(map(short, _checks.ACCEPTED))}, got {short(t.dtype)}"
        )


def keys_of_experts(path: str) -> list[str]:
    """A and B of gate_up_proj, A and B of down_proj."""
    return [
        f"base_model.model.{path}.{layer}lora_{which}.weight"
        for layer in ("base_layer.", "")
        for which in "AB"
    ]


def peft_layout(t: torch.Tensor, key: str) -> torch.Tensor:
    """[E r, in] of A [E, r, in], or [out, r E] of B [E, out, r]."""
    t = t.flatten(0, 1) if "lora_A" in key else t.permute(1, 2, 0).flatten(1)
    return t.to("cpu", copy=True).contiguous()


def rank_and_alpha(config: Mapping[str, Any], path: str, name: str) -> tuple[int, float]:
    """Rank and alpha of a parameter. A pattern is a regular expression of the end of a path, as
    PEFT has it.
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


def read_peft(tensors, config, path, sizes, rank, scale) -> dict[str, torch.Tensor]:
    """The six factors, each of E experts; sizes: E, H and I."""
    if config.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"{path}: peft_type must be LORA, got {config['peft_type']!r}")
    own = {
        k: v
        for k, v in config.items()
        if k not in ("bias", "modules_to_save", "trainable_token_indices")
    }
    if key := unsupported(own) or ("lora_dropout" if config.get("lora_dropout") else None):
        raise ValueError(f"{path}: {key} = {config[key]!r} cannot be represented in LoRAExperts")
    _, _, rslora = settings(config, path)
    keys = keys_of_experts(path)
    there = {key for key in tensors if key.startswith(f"base_model.model.{path}.")}
    if missing := [key for key in keys if key not in there]:
        raise ValueError(
            f"{path}: {missing[0]} is missing; LoRAExperts has adapters on gate_up_proj and "
            f"down_proj"
        )
    if more := sorted(there - set(keys)):
        raise ValueError(f"{path}: {more[0]} cannot be represented in LoRAExperts")
    E, H, I = sizes
    found = []
    for name, inner, outer, (key_A, key_B) in (
        ("gate_up_proj", H, 2 * I, keys[:2]),
        ("down_proj", I, H, keys[2:]),
    ):
        r, alpha = rank_and_alpha(config, path, name)
        own = alpha / (math.sqrt(r) if rslora else r)
        if not math.isclose(own, scale, rel_tol=1e-6):
            raise ValueError(
                f"{path}.{name}: the adapter's scale is {own:.6g} (lora_alpha {alpha}, r {r}), "
                f"this "
                f"module's {scale:.6g}"
            )
        for key, shape in ((key_A, (E * r, inner)), (key_B, (outer, r * E))):
            check_dtype(key, tensors[key])
            if tuple(tensors[key].shape) != shape:
                raise ValueError(
                    f"{key} must have shape {list(shape)} for {E} experts of rank {r}, "
                    f"got {list(tensors[key].shape)}"
                )
        found += [
            r,
            tensors[key_A].view(E, r, inner),
            tensors[key_B].view(outer, r, E).permute(2, 0, 1),
        ]
    r, A, B, r_down, down_A, down_B = found
    gate_B, up_B = B[:, :I], B[:, I:]
    if r_down != rank:
        raise ValueError(f"{path}.down_proj: the adapter's rank is {r_down}, this module's {rank}")
    if r == rank:
        return dict(zip(ADAPTERS, (A, gate_B, A, up_B, down_A, down_B), strict=True))
    if r != 2 * rank:
        raise ValueError(
            f"{path}.gate_up_proj: the adapter's rank is {r}; for this module's {rank} it must be "
            f"{rank}, "
            f"or {2 * rank} with an A of its own for gate and for up"
        )
    if gate_B[:, :, rank:].any() or up_B[:, :, :rank].any():
        raise ValueError(
            f"{path}.gate_up_proj: the adapter has rank {r} for gate and up together, which rank "
            f"{rank} "
            "for each cannot represent: B is not 0 where gate would use up's A, or up gate's"
        )
    return dict(
        zip(
            ADAPTERS,
            (A[:, :rank], gate_B[:, :, :rank], A[:, rank:], up_B[:, :, rank:], down_A, down_B),
            strict=True,
        )
    )
