"""Modules that are trained whole beside adapters, and saved with them: PEFT's `modules_to_save`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from tilewright.nn.projections import as_names
from tilewright.nn.quantized_layers import QuantizedExperts, QuantizedLinear

_MARK = "saved_with_adapters"


def saved_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules that are saved with the adapters: path, module."""
    for path, module in model.named_modules():
        if getattr(module, _MARK, False):
            yield path, module


def mark(module: nn.Module, saved: bool = True) -> None:
    """Makes a module trainable and saved with the adapters, or neither."""
    module.requires_grad_(saved)
    if saved:
        setattr(module, _MARK, True)
    else:
        delattr(module, _MARK)


def is_named(name: str, path: str) -> bool:
    """Whether an entry of PEFT's list is the end of this path."""
    return path == name or path.endswith(f".{name}")


def modules_to_save_of(
    model: nn.Module, names: Iterable[str], adapted: Iterable[str]
) -> dict[str, nn.Module]:
    """The modules of these names, by path.

    adapted: paths of the modules that get adapters.   Raises ValueError for names that match
    nothing, and for modules that cannot be trained whole.
    """
    names, adapted, modules = as_names("modules_to_save", names), set(adapted), {}
    for name in names:
        paths = [path for path, _ in model.named_modules() if path and is_named(name, path)]
        if not paths:
            raise ValueError(f"modules_to_save: {name!r} matches no module of the model")
        modules |= {path: model.get_submodule(path) for path in paths}
    for path, module in modules.items():
        inside = [p for p in adapted if f"{p}.".startswith(f"{path}.")]
        if inside:
            raise ValueError(
                f"modules_to_save: {inside[0]} has an adapter; a module has one or is saved whole"
            )
        kinds = (QuantizedLinear, QuantizedExperts)
        if any(isinstance(m, kinds) for m in module.modules()):
            raise ValueError(
                f"modules_to_save: {path} is quantized, and quantized weights are not trained; leave "
                "it out when the model is quantized"
            )
        if not any(True for _ in module.parameters()):
            raise ValueError(f"modules_to_save: {path} has no parameters")
        if other := _tied_to(model, path, module):
            raise ValueError(
                f"modules_to_save: {path} shares a weight with {other}, which would be trained too "
                "and not be saved"
            )
    return modules


def _tied_to(model: nn.Module, path: str, module: nn.Module) -> str | None:
    """A module outside this one that has one of its parameters."""
    own = {id(p) for p in module.parameters()}
    return next(
        (
            name.rpartition(".")[0]
            for name, p in model.named_parameters(remove_duplicate=False)
            if id(p) in own and not name.startswith(f"{path}.")
        ),
        None,
    )
