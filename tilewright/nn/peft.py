"""Writes and reads adapters in PEFT's files."""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from tilewright.core.files import (
    copy_into,
    open_tensors,
    publish,
    read_json,
    target_folder,
    writing,
    written_aside,
)
from tilewright.nn.adapt import add_lora
from tilewright.nn.experts import why_not
from tilewright.nn.lora import LoRALinear, check_dropout
from tilewright.nn.lora_experts import LoRAExperts
from tilewright.nn.modules_to_save import is_named, saved_modules
from tilewright.nn.peft_format import check_dtype, read_peft, settings, unsupported
from tilewright.nn.projections import (
    OF_EXPERTS,
    all_paths,
    experts,
    last_name,
    matches,
    projections,
)
from tilewright.nn.quantized_layers import QuantizedLinear
from tilewright.nn.sharded import assign, whole
from tilewright.nn.weights import Adapted, adapted, shape_of

MAGNITUDE = "lora_magnitude_vector"  # its key has no ".weight"
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


# ---- writing


def save_adapter(
    model: nn.Module,
    folder: str | pathlib.Path,
    *,
    base_model: str | None = None,
    files: Iterable[str | pathlib.Path] = (),
    task_type: str = "CAUSAL_LM",
) -> None:
    """Writes a folder that `peft` loads onto the transformers model with the same weights.

    Files of the same names are replaced once all are written (see `publish`); other files in the
    folder are kept. In distributed training every rank must call it.

    Args:
        model: With adapters.
        folder: Created if necessary.
        base_model: The base model's path or Hub id, for adapter_config.json.
        files: Further files, or folders of files, to copy into the folder.
        task_type: What peft makes of the base model: "SEQ_CLS" for a model whose module `score` is
            among those to save.

    Returns:
        None.

    Raises:
        ValueError: The model has no adapters, or adapters that do not fit into one file; or the
            folder is a file.

    Example:
        >>> import pathlib, tempfile, torch
        >>> from tilewright.nn import add_lora, save_adapter
        >>> model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(64, 32)})
        >>> paths = add_lora(model, rank=4, alpha=8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapter(model, folder)
        ...     sorted(file.name for file in pathlib.Path(folder).iterdir())
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    target = target_folder(folder)
    modules = list(adapted(model))
    if not modules:
        raise ValueError("the model has no adapters")
    kinds = {(m.rank, m.alpha, m.rslora, _has_magnitudes(m)) for _, m in modules}
    if len(kinds) > 1:
        raise ValueError(
            f"adapters differ in (rank, alpha, rslora, use_dora): {sorted(kinds)}; one file holds "
            "one of each"
        )
    tensors, config = _to_files(model, modules)
    config |= {"base_model_name_or_path": base_model, "task_type": task_type}
    many = dist.is_available() and dist.is_initialized()
    if not many or dist.get_rank() == 0:
        with written_aside(target) as aside:
            with writing(target / ADAPTER_FILE):
                save_file(tensors, aside / ADAPTER_FILE, metadata={"format": "pt"})
            (aside / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            for file in files:
                copy_into(file, aside)
            old, new = target / ADAPTER_CONFIG, aside / ADAPTER_CONFIG
            fits = old.is_file() and old.read_bytes() == new.read_bytes()
            publish(aside, target, ADAPTER_FILE, ADAPTER_CONFIG, fits=fits)
    if many:
        dist.barrier()


def _to_files(
    model: nn.Module, modules: list[tuple[str, Adapted]]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors by their keys, and adapter_config.json without the base model's name."""
    tensors: dict[str, torch.Tensor] = {}
    parameters: list[str] = []
    patterns: dict[str, dict[str, Any]] = {"rank_pattern": {}, "alpha_pattern": {}}
    paths = []
    for path, module in modules:
        if isinstance(module, LoRAExperts):
            written, entries = module.to_peft(path)
            tensors |= written
            parameters += entries["target_parameters"]
            for name, pattern in patterns.items():
                pattern |= entries[name]
            continue
        for name, A, B in module.adapters():
            paths.append(part_path(path, name))
            for kind, t in (("lora_A", A), ("lora_B", B)):
                key = f"base_model.model.{paths[-1]}.{kind}.weight"
                tensors[key] = t.to("cpu", copy=True).contiguous()
        for name, t in module.magnitudes() if module.use_dora else ():
            key = f"base_model.model.{part_path(path, name)}.{MAGNITUDE}"
            tensors[key] = t.to("cpu", copy=True).contiguous()
    saved = list(saved_modules(model))
    for path, module in saved:
        for name, t in module.state_dict().items():
            key = f"base_model.model.{path}.{name}"
            tensors[key] = whole(t).to("cpu", copy=True).contiguous()
    # In mixture-of-experts models PEFT takes modules of these names for experts, so their weights
    # are named instead.
    mixture = any(isinstance(m, LoRAExperts) for _, m in modules)
    mixture = mixture or any(True for _ in experts(model))
    weights = [p for p in paths if mixture and last_name(p) in OF_EXPERTS]
    parameters += [f"{p}.weight" for p in weights]
    _, first = modules[0]
    dropout = next((m.dropout for _, m in modules if isinstance(m, LoRALinear)), 0.0)
    return tensors, {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": first.rank,
        "lora_alpha": int(first.alpha) if first.alpha == int(first.alpha) else first.alpha,
        "use_rslora": first.rslora,
        "use_dora": _has_magnitudes(first),
        "target_modules": _target_names(model, [p for p in paths if p not in weights]),
        "lora_dropout": dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": [path for path, _ in saved] or None,
        "layers_to_transform": None,
        **patterns,
        "target_parameters": parameters or None,
    }


def _has_magnitudes(module: Adapted) -> bool:
    return isinstance(module, LoRALinear) and module.use_dora


def part_path(path: str, name: str) -> str:
    """The path of a fused layer's part; with the name "" the layer's own path."""
    stem, dot, _ = path.rpartition(".")
    return f"{stem}{dot}{name}" if name else path


def _target_names(model: nn.Module, paths: list[str]) -> list[str]:
    """Last names if all modules with those names have adapters, which is how `peft` reads them;
    else full paths.
    """
    names = set(map(last_name, paths))
    linear = (nn.Linear, QuantizedLinear, LoRALinear)
    candidates = {p.removesuffix(".base") for p, m in all_paths(model) if isinstance(m, linear)}
    same_names = {p for p in candidates if last_name(p) in names}
    return sorted(names) if same_names == set(paths) else sorted(paths)


# ---- reading


class _File(NamedTuple):
    """The content of a folder in PEFT's format.

    mixtures: the paths of the model's experts.   with_adapters: those with adapters in the file.
    pairs: lora_A and lora_B, and DoRA's magnitudes, by the paths of all other modules.
    saved: by path, the state of the modules that are saved whole.
    """

    folder: pathlib.Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    rank: int
    alpha: float
    rslora: bool
    dora: bool
    mixtures: list[str]
    with_adapters: list[str]
    pairs: dict[str, dict[str, torch.Tensor]]
    saved: dict[str, dict[str, torch.Tensor]]


def load_adapter(model: nn.Module, folder: str | pathlib.Path) -> None:
    """Loads adapters from a folder in PEFT's format, adding them to the model if needed.

    Adapters that are added have the folder's lora_dropout, or none if it has adapters of experts.
    Modules that it has whole (`modules_to_save`) are overwritten.

    Args:
        model: Modified in place. Existing adapters must match the file's, and are filled.
        folder: With adapter_config.json and adapter_model.safetensors.

    Returns:
        None.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file cannot be read, does not match the model, or uses an unsupported feature
            (per-module ranks, ...). The message names the file, and the model is unchanged.

    Example:
        >>> import tempfile, torch
        >>> from tilewright.nn import add_lora, load_adapter, save_adapter
        >>> trained, new = (
        ...     torch.nn.ModuleDict({"up_proj": torch.nn.Linear(64, 32)}) for _ in range(2)
        ... )
        >>> paths = add_lora(trained, rank=4, alpha=8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapter(trained, folder)
        ...     load_adapter(new, folder)
        >>> torch.equal(new["up_proj"].lora_A, trained["up_proj"].lora_A)
        True
    """
    file = _read(model, pathlib.Path(folder))
    new = not any(True for _ in adapted(model))
    _check_sizes(file, _sizes_of_projections(model, file) if new else _sizes(model, file))
    for path in file.with_adapters:
        _check_experts(file, path, model.get_submodule(path))
    if new:
        targets = [f"re:{re.escape(p)}$" for p in (*file.pairs, *file.with_adapters)]
        dropout = 0.0 if file.with_adapters else file.config.get("lora_dropout") or 0.0
        options: dict[str, Any] = {"lora_dropout": dropout, "modules_to_save": list(file.saved)}
        options |= {"rank": file.rank, "alpha": file.alpha, "rslora": file.rslora}
        options |= {"use_dora": file.dora}
        try:
            add_lora(model, targets, **options)
        except ValueError as error:
            raise ValueError(f"{file.folder}: {error}") from error
    for path, tensors in file.saved.items():
        state = model.get_submodule(path).state_dict()
        for name, t in tensors.items():
            assign(state[name], t)
    for path, module in adapted(model):
        if isinstance(module, LoRAExperts):
            module.load_peft_(file.tensors, file.config, path)
            continue
        pairs = {name: file.pairs[part_path(path, name)] for name in module.slices}
        module.load_adapters(
            {n: (pair["lora_A"], pair["lora_B"]) for n, pair in pairs.items()},
            {n: pair[MAGNITUDE] for n, pair in pairs.items()} if module.use_dora else None,
        )


def _read(model: nn.Module, folder: pathlib.Path) -> _File:
    """Reads the two files. Raises for adapters of an unsupported kind."""
    for name in (ADAPTER_CONFIG, ADAPTER_FILE):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}")
    config = read_json(folder / ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{folder}: peft_type must be LORA, got {config.get('peft_type')!r}")
    if key := unsupported(config):
        raise ValueError(f"{folder}: {key} = {config[key]!r} is not supported")
    rank, alpha, rslora = settings(config, folder / ADAPTER_CONFIG)
    check_dropout(f"{folder / ADAPTER_CONFIG}: lora_dropout", config.get("lora_dropout") or 0.0)
    with open_tensors(folder / ADAPTER_FILE) as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    mixtures = [path for path, m in model.named_modules() if isinstance(m, LoRAExperts)]
    mixtures = mixtures or [path for path, _, _ in experts(model)]

    def is_of(key: str, path: str) -> bool:
        return key.startswith(f"base_model.model.{path}.")

    with_adapters = [path for path in mixtures if any(is_of(key, path) for key in tensors)]
    saved = _saved(model, folder, config, tensors)
    apart = [*with_adapters, *saved]
    others = {k: t for k, t in tensors.items() if not any(is_of(k, p) for p in apart)}
    for key, t in tensors.items():  # of modules that are saved whole, buffers may have any
        if not any(is_of(key, path) for path in saved):
            check_dtype(f"{folder / ADAPTER_FILE}: {key}", t)
    dora = config.get("use_dora") is True
    pairs = _pairs(folder, others, dora)
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in config.get(key) or ():
            if path := next((p for p in pairs if matches(rf"re:(.*\.)?({pattern})$", p)), None):
                raise ValueError(f"{folder}: {key} = {config[key]} is not supported, as for {path}")
    return _File(
        folder, config, tensors, rank, alpha, rslora, dora, mixtures, with_adapters, pairs, saved
    )


def _saved(
    model: nn.Module, folder: pathlib.Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    """The state of the modules that the file has whole, by path."""
    names = config.get("modules_to_save") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{folder}: modules_to_save must be a list of names, got {names!r}")
    saved = {}
    for path, module in model.named_modules():
        prefix = f"base_model.model.{path}."
        if not path or not any(is_named(name, path) for name in names):
            continue
        state = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        expected = {name: tuple(t.shape) for name, t in module.state_dict().items()}
        actual = {name: tuple(t.shape) for name, t in state.items()}
        if expected != actual:
            raise ValueError(
                f"{folder}: modules_to_save has {path} with {actual}, the model {expected}"
            )
        saved[path] = state
    return saved


def _pairs(
    folder: pathlib.Path, tensors: dict[str, torch.Tensor], dora: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """lora_A and lora_B, and magnitudes with DoRA, by the path of their module."""
    kinds = ("lora_A", "lora_B", *([MAGNITUDE] if dora else ()))
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for key, t in tensors.items():
        stem = key.removeprefix("base_model.model.").removesuffix(".weight")
        path, _, kind = stem.rpartition(".")
        if kind not in kinds:
            raise ValueError(f"{folder}: {key} is not supported")
        pairs.setdefault(path, {})[kind] = t
    return pairs


_Sizes = dict[str, tuple[int, int | None]]  # columns and rows by the path of a projection


def _sizes_of_projections(model: nn.Module, file: _File) -> _Sizes:
    """The sizes for a model without adapters."""
    sizes: _Sizes = {
        path: (module.in_features, rows)
        for _, module, parts in projections(model, heads=True)
        for path, rows in parts.items()
    }
    if missing := sorted(set(file.pairs) - set(sizes)):
        raise ValueError(f"{file.folder}: the model has no projections {', '.join(missing[:4])}")
    return sizes


def _sizes(model: nn.Module, file: _File) -> _Sizes:
    """The sizes for a model with adapters, which must be the file's."""
    sizes: _Sizes = {}
    for path, module in adapted(model):
        if not isinstance(module, LoRALinear):
            continue
        expected, actual = (
            (module.rank, module.alpha, module.rslora),
            (file.rank, file.alpha, file.rslora),
        )
        if expected != actual:
            raise ValueError(
                f"{file.folder}: (r, lora_alpha, use_rslora) is {actual}, the model's {expected}"
            )
        if module.use_dora != file.dora:
            raise ValueError(
                f"{file.folder}: use_dora is {file.dora}, the model's {module.use_dora}"
            )
        for name, (start, stop) in module.slices.items():
            sizes[part_path(path, name)] = (module.in_features, stop - start)
    without = {
        path
        for path in file.mixtures
        if path not in file.with_adapters and isinstance(model.get_submodule(path), LoRAExperts)
    }
    without |= {path for path, _ in saved_modules(model)} ^ set(file.saved)
    if differ := sorted(set(file.pairs) ^ set(sizes) | without):
        names = ", ".join(differ[:4])
        raise ValueError(f"{file.folder}: adapters of the file and of the model differ in {names}")
    return sizes


def _check_sizes(file: _File, sizes: _Sizes) -> None:
    """Raises ValueError for a factor that is missing or has another shape."""
    for path, pair in file.pairs.items():
        columns, rows = sizes[path]
        shapes = {"lora_A": (file.rank, columns), "lora_B": (rows, file.rank)}
        for kind, shape in (shapes | ({MAGNITUDE: (rows,)} if file.dora else {})).items():
            if kind not in pair or (None not in shape and tuple(pair[kind].shape) != shape):
                got = list(pair[kind].shape) if kind in pair else "nothing"
                raise ValueError(f"{file.folder}: {path}.{kind} must be {list(shape)}, got {got}")


def _check_experts(file: _File, path: str, module: Any) -> None:
    """Raises ValueError for unsupported adapters on experts."""
    if isinstance(module, LoRAExperts):
        module.peft_values(file.tensors, file.config, path)
    elif why_not(module, adapters=True) is None:  # otherwise add_lora gives the reason
        E, H, I = shape_of(module.down_proj)
        scale = file.alpha / (math.sqrt(file.rank) if file.rslora else file.rank)
        read_peft(file.tensors, file.config, path, (E, H, I), file.rank, scale)
