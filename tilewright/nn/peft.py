"""Adapters in PEFT's files: written for `peft`, and read from it."""

from __future__ import annotations

import json
import math
import pathlib
import re
import shutil
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from tilewright.files import open_tensors, publish, read_json, target_folder, written_aside
from tilewright.nn.adapt import add_lora
from tilewright.nn.experts import why_not
from tilewright.nn.lora import LoRALinear
from tilewright.nn.lora_experts import LoRAExperts
from tilewright.nn.peft_format import check_dtype, read_peft, settings, unsupported
from tilewright.nn.projections import OF_EXPERTS, all_paths, experts, matches, projections
from tilewright.nn.quantized import QuantizedLinear
from tilewright.nn.weights import adapted, shape_of

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def save_adapter(
    model: nn.Module,
    folder: str | pathlib.Path,
    *,
    base_model: str | None = None,
    files: Iterable[str | pathlib.Path] = (),
) -> None:
    """Writes the folder that `peft` loads onto the transformers model of the same weights.

    base_model: its path or Hub id, for adapter_config.json.   files: further ones to copy into the
    folder. Files of these names are replaced, once all are written (see `publish`); whatever else
    the folder holds stays. Where training is distributed, every rank must call it. Raises
    ValueError for a model without adapters or with adapters that one file cannot hold, and for a
    folder that is a file.
    """
    target = target_folder(folder)
    found = list(adapted(model))
    if not found:
        raise ValueError("the model has no adapters")
    settings = {(m.rank, m.alpha, m.rslora) for _, m in found}
    if len(settings) > 1:
        raise ValueError(
            f"adapters differ in (rank, alpha, rslora): {sorted(settings)}; one file holds one of "
            f"each"
        )
    [(rank, alpha, rslora)] = settings
    tensors: dict[str, torch.Tensor] = {}
    of_experts: dict[str, Any] = {"target_parameters": [], "rank_pattern": {}, "alpha_pattern": {}}
    paths = []
    for path, module in found:
        if isinstance(module, LoRAExperts):
            written, entries = module.to_peft(path)
            tensors |= written
            of_experts["target_parameters"] += entries["target_parameters"]
            of_experts["rank_pattern"] |= entries["rank_pattern"]
            of_experts["alpha_pattern"] |= entries["alpha_pattern"]
            continue
        for name, A, B in module.adapters():
            paths.append(part_path(path, name))
            for key, t in (("lora_A", A), ("lora_B", B)):
                tensors[f"base_model.model.{paths[-1]}.{key}.weight"] = t.to(
                    "cpu", copy=True
                ).contiguous()
    # Of a mixture of experts PEFT takes modules of these names for experts, so their weights are
    # named instead.
    mixture = any(isinstance(m, LoRAExperts) for _, m in found) or any(True for _ in experts(model))
    weights = [p for p in paths if mixture and p.rpartition(".")[2] in OF_EXPERTS]
    of_experts["target_parameters"] += [f"{p}.weight" for p in weights]
    paths = [p for p in paths if p not in weights]
    many = dist.is_available() and dist.is_initialized()
    if not many or dist.get_rank() == 0:
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": rank,
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "use_rslora": rslora,
            "target_modules": _target_names(model, paths),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
            "modules_to_save": None,
            "layers_to_transform": None,
            "rank_pattern": of_experts["rank_pattern"],
            "alpha_pattern": of_experts["alpha_pattern"],
            "target_parameters": of_experts["target_parameters"] or None,
        }
        with written_aside(target) as aside:
            save_file(tensors, aside / ADAPTER_FILE, metadata={"format": "pt"})
            (aside / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            for file in files:
                shutil.copy(file, aside)
            old = target / ADAPTER_CONFIG
            publish(
                aside,
                target,
                ADAPTER_FILE,
                ADAPTER_CONFIG,
                fits=old.is_file() and old.read_bytes() == (aside / ADAPTER_CONFIG).read_bytes(),
            )
    if many:
        dist.barrier()


def part_path(path: str, name: str) -> str:
    stem, dot, _ = path.rpartition(".")
    return f"{stem}{dot}{name}" if name else path


def _target_names(model: nn.Module, paths: list[str]) -> list[str]:
    """Last names if all modules of those names have adapters, which is what they mean to
    `peft`; else whole paths.
    """
    names = {p.rpartition(".")[2] for p in paths}
    every = {
        p
        for path, module in all_paths(model)
        for p in [path.removesuffix(".base")]
        if p.rpartition(".")[2] in names
        and isinstance(module, (nn.Linear, QuantizedLinear, LoRALinear))
    }
    return sorted(names) if every == set(paths) else sorted(paths)


def load_adapter(model: nn.Module, folder: str | pathlib.Path) -> None:
    """Puts the adapters of a folder in PEFT's format on the model; of a model that has adapters
    already, they must be the same ones, and are filled.

    Raises FileNotFoundError, or ValueError naming the file, and changes nothing, for what is not
    there, cannot be read, does not fit, or uses what is not here (DoRA, a rank for each module,
    ...).
    """
    folder = pathlib.Path(folder)
    for file in (ADAPTER_CONFIG, ADAPTER_FILE):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder}: no {file} there")
    config = read_json(folder / ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{folder}: peft_type must be LORA, got {config.get('peft_type')!r}")
    if key := unsupported(config):
        raise ValueError(f"{folder}: {key} = {config[key]!r} is not supported")
    rank, alpha, rslora = settings(config, folder / ADAPTER_CONFIG)
    with open_tensors(folder / ADAPTER_FILE) as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for key, t in tensors.items():
        check_dtype(f"{folder / ADAPTER_FILE}: {key}", t)
    mixtures = [path for path, m in model.named_modules() if isinstance(m, LoRAExperts)] or [
        path for path, _, _ in experts(model)
    ]
    wanted = [
        path
        for path in mixtures
        if any(key.startswith(f"base_model.model.{path}.") for key in tensors)
    ]
    pairs = _pairs(
        folder,
        {
            key: t
            for key, t in tensors.items()
            if not any(key.startswith(f"base_model.model.{path}.") for path in wanted)
        },
    )
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in config.get(key) or ():
            if path := next((p for p in pairs if matches(rf"re:(.*\.)?({pattern})$", p)), None):
                raise ValueError(f"{folder}: {key} = {config[key]} is not supported, as for {path}")
    new = not any(True for _ in adapted(model))
    sizes: dict[str, tuple[int, int | None]]  # of each projection: its columns and rows
    if new:
        sizes = {
            p: (module.in_features, rows)
            for _, module, parts in projections(model)
            for p, rows in parts.items()
        }
        if missing := sorted(set(pairs) - set(sizes)):
            raise ValueError(f"{folder}: the model has no projections {', '.join(missing[:4])}")
    else:
        sizes = {}
        for path, module in adapted(model):
            want = (module.rank, module.alpha, module.rslora)
            if isinstance(module, LoRALinear):
                if want != (rank, alpha, rslora):
                    raise ValueError(
                        f"{folder}: (r, lora_alpha, use_rslora) is {(rank, alpha, rslora)}, the "
                        f"model's "
                        f"{want}"
                    )
                sizes |= {
                    part_path(path, name): (module.in_features, stop - start)
                    for name, (start, stop) in module.slices.items()
                }
        if differ := sorted(
            set(pairs) ^ set(sizes)
            | {
                p
                for p in mixtures
                if p not in wanted and isinstance(model.get_submodule(p), LoRAExperts)
            }
        ):
            raise ValueError(
                f"{folder}: adapters of the file and of the model differ in {', '.join(differ[:4])}"
            )
    for path, found in pairs.items():
        columns, rows = sizes[path]
        for kind, shape in {"lora_A": (rank, columns), "lora_B": (rows, rank)}.items():
            if kind not in found or (None not in shape and tuple(found[kind].shape) != shape):
                got = list(found[kind].shape) if kind in found else "nothing"
                raise ValueError(f"{folder}: {path}.{kind} must be {list(shape)}, got {got}")
    for path in wanted:
        module: Any = model.get_submodule(path)
        if isinstance(module, LoRAExperts):
            module.peft_values(tensors, config, path)
        elif why_not(module, adapters=True) is None:  # else add_lora says why
            E, H, I = shape_of(module.down_proj)
            read_peft(
                tensors,
                config,
                path,
                (E, H, I),
                rank,
                alpha / (math.sqrt(rank) if rslora else rank),
            )
    if new:
        add_lora(
            model,
            [f"re:{re.escape(p)}$" for p in (*pairs, *wanted)],
            rank=rank,
            alpha=alpha,
            rslora=rslora,
        )
    for path, module in adapted(model):
        if isinstance(module, LoRAExperts):
            module.load_peft_(tensors, config, path)
        else:
            module.load_adapters(
                {
                    name: (found["lora_A"], found["lora_B"])
                    for name in module.slices
                    for found in [pairs[part_path(path, name)]]
                }
            )


def _pairs(
    folder: pathlib.Path, tensors: dict[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    """A and B of each module's path."""
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for key, t in tensors.items():
        path, _, kind = (
            key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        )
        if kind not in ("lora_A", "lora_B"):
            raise ValueError(f"{folder}: {key} is not supported")
        pairs.setdefault(path, {})[kind] = t
    return pairs
