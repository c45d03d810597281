"""Products in low precision: which layers of a model compute them, whatever else is done to it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from tilewright.core.registry import ImplementationUnavailable
from tilewright.nn import Linear
from tilewright.nn.sharded import local
from tilewright.ops.moe.low_precision_grouped_gemm import LOW_PRECISION_GROUPED_GEMM
from tilewright.ops.quant.low_precision_linear import (
    LOW_PRECISION_LINEAR,
    SPREAD,
    Request,
    capability,
)
from tilewright.trainer.models.low_precision import (
    LowPrecisionLinear,
    Products,
    chosen,
    last_layers,
    seed_of,
)
from tilewright.trainer.models.moe import Experts
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.parallel.precision import Dtypes, Recipe
from tilewright.trainer.parallel.row import LAYOUTS, Layout
from tilewright.trainer.parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear


class LowPrecisionColumnParallel(LowPrecisionLinear, ColumnParallelLinear):
    def own_bias(self) -> torch.Tensor:
        return ColumnParallelLinear.own_bias(self)


class LowPrecisionRowParallel(LowPrecisionLinear, RowParallelLinear):
    def own_bias(self) -> torch.Tensor:
        return RowParallelLinear.own_bias(self)


CLASSES: dict[type, type] = {
    Linear: LowPrecisionLinear,
    ColumnParallelLinear: LowPrecisionColumnParallel,
    RowParallelLinear: LowPrecisionRowParallel,
}


def operations(
    recipe: Recipe | None, device: torch.device, dtype: torch.dtype, experts: bool
) -> dict[str, str]:
    """The implementation of each op that a recipe calls.   experts: whether the model has any.

    Raises ValueError for an implementation that does not exist or cannot run here.
    """
    if recipe is None:
        return {}
    cuda = capability(device) if device.type == "cuda" else None
    asked = Request(recipe=recipe.name, capability=cuda)
    ops = [LOW_PRECISION_LINEAR] + [LOW_PRECISION_GROUPED_GEMM] * (experts and recipe.experts)
    names, given = {}, recipe.implementation
    for op in ops:
        try:
            op.resolve(given, device.type, dtype, asked)
        except (ValueError, ImplementationUnavailable) as error:
            raise ValueError(
                f"precision.implementation = {given}, precision.recipe = {recipe.name}: {error}"
            ) from error
        names[op.name] = op.choose(device.type, dtype, asked) if given == "auto" else given
    return names


def exclude_of(recipe: Recipe, layers: int) -> list[str]:
    if recipe.exclude is not None:
        return [*recipe.exclude]
    return last_layers(layers) if recipe.name == "nvfp4" else []


def convert(parts: Parts, recipe: Recipe) -> None:
    """Converts the projections and experts of the model that this rank has.

    Raises ValueError for `exclude`, and for a width that the transform cannot take.
    """
    config, own = parts.whole.config, dict(parts.model.named_modules())
    exclude = exclude_of(recipe, config.num_hidden_layers)
    try:
        paths = chosen(parts.whole, exclude, recipe.experts)
    except ValueError as error:
        raise ValueError(f"precision.exclude = {exclude}: {error}") from error
    for path in paths:
        if (module := own.get(path)) is None:  # on another stage
            continue
        if recipe.hadamard:
            _check_widths(path, module)
        products = Products(recipe.name, recipe.hadamard, recipe.implementation)
        if isinstance(module, Experts):
            products.activation = module.ops.silu_mul
            module.compute = products.moe_mlp
        else:
            module.__class__ = CLASSES[type(module)]  # only the forward differs
            cast(LowPrecisionLinear, module).products = products


def _check_widths(path: str, module: nn.Module) -> None:
    weights = [local(p) for name, p in module.named_parameters() if not name.endswith("bias")]
    for n in (n for weight in weights for n in weight.shape[-2:]):
        if n % SPREAD:
            raise ValueError(
                f"precision.hadamard = True: {path} has a width of {n} on a process, which is not "
                f"a multiple of {SPREAD}"
            )


def products_of(model: nn.Module) -> dict[str, Products]:
    """Those of each converted layer, by its path."""
    made = {}
    for path, module in model.named_modules():
        if isinstance(module, LowPrecisionLinear):
            made[path] = module.products
        elif isinstance(module, Experts) and module.compute is not None:
            made[path] = cast(Any, module.compute).__self__
    return made


def set_seeds(parts: Parts, mesh: Mesh, run: int, step: int) -> None:
    """Sets the seeds of a step's random numbers, the same in forward and recomputation. They do not
    depend on the stage of a pipeline that has a layer.

    run: the run's seed.   step: optimizer steps done.
    """
    place = mesh.layout.coordinates(mesh.rank)
    others = [n for axis, n in place.items() if axis != "pp"]
    for path, products in products_of(parts.model).items():
        if products.recipe == "nvfp4":
            products.seed = seed_of(run, step, others, path)


LAYOUTS.add(
    "low_precision",
    Layout(
        25,
        lambda mesh, dtypes: dtypes.recipe is not None,
        lambda parts, mesh, dtypes: convert(parts, dtypes.recipe),
        (Dtypes,),
    ),
)
