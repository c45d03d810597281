"""The section precision: the dtypes of parameters, gradients and the optimizer, and the rounding of
products.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import nn

from tilewright.core.registry import short
from tilewright.trainer.models.fields import Model
from tilewright.trainer.models.lora_fields import Lora
from tilewright.trainer.models.shared import PLAIN
from tilewright.trainer.optim.fields import Optim
from tilewright.trainer.optim.muon import DTYPES
from tilewright.trainer.optim.row import OPTIMIZERS
from tilewright.trainer.parallel.fields import Compute
from tilewright.trainer.section import Needs, Resume, Section, Stated, field

MANUAL = Needs("type", ["manual"], "every other type sets it")
ROUNDS = Needs("recipe", but="none", why="no product is in low precision")


class Precision(Section):
    """Which dtypes parameters, gradients and the optimizer have, and how products are rounded."""

    recipe: Literal["none", "block_fp8", "mxfp8", "nvfp4"] = field("none", Resume.ROUNDING)
    """Rounds both operands of all three products of a layer (its result, and the gradients of its
    input and weight): block_fp8, E4M3 with a scale for 128 (weights: 128 x 128); mxfp8, E4M3 with a
    power of two for 32; nvfp4, E2M1 with an E4M3 scale for 16, gradients rounded stochastically.
    Weights, gradients and sums keep the dtypes that `type` gives them; see
    `ops.low_precision_linear`. The head, embeddings, routers, norms and attention are not rounded.
    """
    exclude: list[str] | None = field(None, Resume.ROUNDING, ROUNDS)
    """Projections that are not rounded: a name (o_proj), a run of names (layers.0.mlp), a pattern
    of the whole path with * or ?, or after "re:" a regular expression. null: with nvfp4 the last
    15 % of the layers, rounded up, else none.
    """
    experts: bool = field(True, Resume.ROUNDING, ROUNDS)
    """Round the products of experts too; false: they stay as model.moe_implementation computes
    them.
    """
    hadamard: bool = field(
        False,
        Resume.ROUNDING,
        Needs("recipe", ["block_fp8", "mxfp8"], "nvfp4 has a transform of its own, which it needs"),
    )
    """Transform both operands by blocks of 32 along what a product sums over, which cancels in it:
    an outlier is spread over its block. Widths must be multiples of 32.
    """
    implementation: str = field("auto", Resume.ROUNDING, ROUNDS)
    """Products of the recipe: auto, or a name of `tilewright explain low_precision_linear`; eager
    is the definition, which emulates a recipe on any device.
    """
    type: (
        Literal["mixed_precision", "mixed_precisionSR", "bf16SR", "fp32", "autocast", "manual"]
        | None
    ) = field(None, Resume.OTHER_STATES)
    """null: mixed_precision or fp32, as train.enable_mixed_precision says. mixed_precision:
    parameters, gradients and moments in float32, products in bfloat16. fp32: all in float32.
    autocast: as mixed_precision, by torch.autocast. mixed_precisionSR: parameters in bfloat16,
    which the optimizer writes by stochastic rounding from its float32 master; gradients are summed
    in float32. bf16SR: parameters and gradients in bfloat16, and moments too unless optimizer is
    anyprecision_adamw with optimizer_dtype fp32; the optimizer rounds stochastically. manual:
    parameters in bfloat16, and what the following fields say.
    """
    master_weights: bool = field(False, Resume.OTHER_STATES, MANUAL)
    """manual: the optimizer has the parameters in float32."""
    fp32_grad_acc: bool = field(False, Resume.ROUNDING, MANUAL)
    """manual: gradients are summed over micro-batches and processes in float32."""
    stochastic_rounding: bool = field(False, Resume.ROUNDING, MANUAL)
    """manual: the optimizer rounds parameters and moments in bfloat16 stochastically: up or down,
    with the probability that makes the mean right. The random bits follow from train.seed, the
    step and the element of the model's matrix, whatever the layout.
    """
    tensor_parallel_reduce_dtype: Literal["fp32", "bf16"] | None = field(
        None,
        Resume.ROUNDING,
        Needs("type", ["manual"], "activations are summed in the dtype that they have"),
        Needs("train.tensor_parallel_size", but=1, why="no layer is summed over processes"),
    )
    """manual: the dtype in which tensor parallelism sums a layer's results over processes; null:
    that of activations, bfloat16.
    """


class Recipe(NamedTuple):
    """How products are rounded: the fields of the section."""

    name: str
    exclude: tuple[str, ...] | None = None
    experts: bool = True
    hadamard: bool = False
    implementation: str = "auto"

    def told(self) -> str:
        but = "" if self.experts else " but those of experts"
        transformed = " of transformed operands" if self.hadamard else ""
        return f"products of layers{but} in {self.name}{transformed}"


class Dtypes(NamedTuple):
    """What a configuration's precision resolves to.

    parameters: of those that are trained, and of the model's other weights.
    gradients: of sums over micro-batches and processes, and as the optimizer gets them.
    products: of matrix products.   states: of moments.
    master: whether the optimizer has parameters in float32.   stochastic: whether it rounds so.
    tensor_sums: of tensor parallelism's sums over processes; None: that of activations.
    recipe: of products in low precision; None: there are none.
    """

    parameters: torch.dtype
    gradients: torch.dtype
    products: torch.dtype
    states: torch.dtype
    master: bool
    stochastic: bool
    tensor_sums: torch.dtype | None = None
    recipe: Recipe | None = None

    @property
    def half(self) -> bool:
        """Whether parameters are in bfloat16."""
        return self.parameters == torch.bfloat16

    @property
    def wide_gradients(self) -> bool:
        """Whether gradients are in float32 and their parameters are not."""
        return self.half and self.gradients == torch.float32

    def recorded(self) -> str:
        """What a checkpoint has recorded: weights and states of another kind are others."""
        if not self.half:
            return str(FULL.parameters)
        return f"{self.parameters}, {'with' if self.master else 'no'} master, {self.states} moments"

    def told(self) -> str:
        """One line."""
        parts = [f"{what} {short(getattr(self, what))}" for what in self._fields[:4]]
        parts += ["master weights float32"] * self.master
        if self.tensor_sums is not None:
            parts.append(f"tensor-parallel sums {short(self.tensor_sums)}")
        parts += ["stochastic rounding"] * self.stochastic
        return ", ".join(parts + ([] if self.recipe is None else [self.recipe.told()]))


FULL = Dtypes(torch.float32, torch.float32, torch.bfloat16, torch.float32, False, False)


def recipe_of(precision: Precision) -> Recipe | None:
    if precision.recipe == "none":
        return None
    exclude = None if precision.exclude is None else tuple(precision.exclude)
    how = precision.experts, precision.hadamard, precision.implementation
    return Recipe(precision.recipe, exclude, *how)


def resolved(precision: Precision, train: Compute, optim: Optim) -> Dtypes:
    return _of_type(precision, train, optim)._replace(recipe=recipe_of(precision))


def _of_type(precision: Precision, train: Compute, optim: Optim) -> Dtypes:
    F, B = torch.float32, torch.bfloat16
    given = "optimizer_dtype" in OPTIMIZERS[optim.optimizer].fields
    states = DTYPES[optim.optimizer_dtype] if given else F
    match precision.type:
        case "mixed_precisionSR":
            return Dtypes(B, F, B, states, True, True)
        case "bf16SR":
            return Dtypes(B, B, B, states if given else B, False, True)
        case "manual":
            master = precision.master_weights
            gradients = F if precision.fp32_grad_acc else B
            states = states if given or master else B
            reduced = precision.tensor_parallel_reduce_dtype
            sums = None if reduced is None else DTYPES[reduced]
            return Dtypes(B, gradients, B, states, master, precision.stochastic_rounding, sums)
    return Dtypes(F, F, B if train.enable_mixed_precision else F, states, False, False)


def of_precision(
    precision: Precision, train: Compute, optim: Optim, lora: Lora
) -> Iterator[Stated]:
    """Parameters in bfloat16 are written by an optimizer that can."""
    kind, mixed = precision.type, train.enable_mixed_precision
    why = f"{kind} computes in {'float32' if kind == 'fp32' else 'bfloat16'}"
    contradicts = kind is not None and mixed != (kind != "fp32")
    yield contradicts, why, "train.enable_mixed_precision", "type"
    why = "FSDP2 casts by itself, with mixed_precision; none and ddp have autocast"
    sharded = train.data_parallel_mode == "fsdp2"
    yield kind == "autocast" and sharded, why, "type", "train.data_parallel_mode"
    half = resolved(precision, train, optim).half
    able = [name for name, row in OPTIMIZERS.items() if row.of_half is not None]
    why = f"it cannot write parameters in bfloat16; {' and '.join(able)} can"
    unable = half and optim.optimizer not in able
    yield unable, why, "train.optimizer", "type"
    why = "adapters of quantized weights are trained in float32"
    yield half and lora.enable_qlora, why, "type", "lora.enable_qlora"


def of_recipe(precision: Precision, model: Model, lora: Lora) -> Iterator[Stated]:
    """A recipe computes with weights that are trained, in its own implementations."""
    on = precision.recipe != "none"
    why = (
        "adapters are trained on a frozen base, whose weights have no gradient to round; "
        "lora.quant_format keeps it in few bits"
    )
    yield on and lora.enable_lora, why, "recipe", "lora.enable_lora"
    why = "its products do not claim that a row's bits do not depend on the batch"
    yield on and model.batch_invariant, why, "recipe", "model.batch_invariant"
    named = model.moe_implementation not in (None, "auto")
    why = "the recipe computes experts; precision.implementation names how, or precision.experts: false"
    both = on and precision.experts and named
    yield both, why, "model.moe_implementation", "recipe", "experts"


def of_moments(optim: Optim, precision: Precision, train: Compute) -> Iterator[Stated]:
    """A moment in bfloat16 that is rounded to nearest decays by more than its rounding."""
    dtypes = resolved(precision, train, optim)
    why = (
        "must be at most 0.996: a state in bfloat16 that loses less than 1 / 256 in a step rounds "
        "to where it was; fp32 keeps it"
    )
    nearest = dtypes.states == torch.bfloat16 and not dtypes.stochastic
    fields = OPTIMIZERS[optim.optimizer].fields
    other = "optimizer_dtype" if "optimizer_dtype" in fields else "precision.type"
    for name in ("adam_beta1", "adam_beta2", "muon_momentum"):
        lost = nearest and name in fields and not getattr(optim, name) <= 1 - 2**-8
        yield lost, why, name, other


def halve(model: nn.Module) -> None:
    """Casts a model's parameters to bfloat16, but those that are read as they are stored."""
    for name, p in model.named_parameters():
        if p.is_floating_point() and not name.endswith(PLAIN):
            p.data = p.data.to(torch.bfloat16)
