"""The section lora: adapters, quantized weights and noise on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from tilewright.nn.quantized_layers import wrong_group_size
from tilewright.trainer.section import Needs, Resume, Section, Stated, field

LORA, QLORA = Needs("enable_lora", [True]), Needs("enable_qlora", [True])
SHARED = Needs(
    "train.expert_parallel_size",
    [1],
    "the gradient of a shared factor would have to be summed over the ranks of experts",
)
AUTO = -1.0  # lora_alpha from the rank


def _alpha(value: float) -> float:
    if value <= 0 and value != AUTO:
        raise ValueError("input should be greater than 0, or -1: twice the rank, or 4 with rslora")
    return value


class Lora(Section):
    enable_lora: bool = field(
        False,
        Resume.OTHER_WEIGHTS,
        Needs(
            "model.batch_invariant",
            [False],
            "the products of adapters and of quantized weights do not claim that",
        ),
        Needs(
            "model.ep_dispatch",
            ["alltoall"],
            "tokens travel to experts with adapters by alltoall only",
        ),
    )
    """Train low-rank adapters on projections of the decoder layers; all else is frozen."""
    lora_rank: int = field(16, Resume.OTHER_WEIGHTS, LORA, ge=1)
    """Rank of the adapters."""
    lora_alpha: Annotated[float, AfterValidator(_alpha)] = field(16, Resume.OTHER_WEIGHTS, LORA)
    """Scale; the adapters are scaled by alpha / rank. -1: twice the rank, or 4 with rslora."""
    rslora: bool = field(False, Resume.OTHER_WEIGHTS, LORA, later=True)
    """Scale the adapters by alpha / sqrt(rank) (arXiv:2312.03732)."""
    use_dora: bool = field(False, Resume.OTHER_WEIGHTS, LORA, later=True)
    """DoRA (arXiv:2402.09353): learn the norms of the adapted weights' rows apart from their
    directions.
    """
    lora_target_modules: list[str] | None = field(None, Resume.OTHER_WEIGHTS, LORA, min_length=1)
    """Projections with adapters: names in their paths, or with * patterns of them; null: all, and
    not lm_head, which must be named.
    """
    moe_shared_lora: bool = field(False, Resume.OTHER_WEIGHTS, LORA, SHARED, later=True)
    """The experts of a layer share their adapters."""
    moe_hybrid_shared_lora: bool = field(False, Resume.OTHER_WEIGHTS, LORA, SHARED, later=True)
    """They share A of gate and up projections and B of down projections."""
    lora_plus_scale: float = field(1.0, Resume.OTHER_STATES, LORA, gt=0, later=True)
    """LoRA+: the learning rate of the adapters' B, over that of their A."""
    save_lora_only: bool = field(
        False,
        Resume.OTHER_WEIGHTS,
        LORA,
        Needs(
            "merge_lora_interval",
            [0],
            "merging changes the weights under the adapters, so that adapters alone would lose "
            "what was merged",
        ),
        Needs(
            "model.model_path",
            why="random weights are not stored anywhere that the adapters could be put on again",
            but=None,
        ),
        Needs("train.save_hf_weights", [True], "no Hugging Face checkpoint is written"),
        certified=False,
    )
    """true: write the adapters as peft reads them; false: dense weights with adapters merged."""
    save_base: bool = field(False, Resume.OUTPUT, LORA)
    """Store the frozen weights in every checkpoint too; false: only where no file holds them, since
    they were drawn or adapters have been merged into them.
    """
    enable_qlora: bool = field(
        False,
        Resume.OTHER_WEIGHTS,
        Needs(
            "train.expert_parallel_size",
            [1],
            "quantized experts are buffers, the same on every process, and a checkpoint holds one "
            "copy",
        ),
    )
    """Quantize the projections, layer by layer as they are read; every process has them all.
    Implies enable_lora.
    """
    quant_format: Literal["nvfp4", "block_fp8", "nf4"] = field("nvfp4", Resume.OTHER_WEIGHTS, QLORA)
    """Quantized format; of a checkpoint that is quantized already, its own."""
    quant_group_size: int = field(16, Resume.OTHER_WEIGHTS, QLORA, ge=1)
    """Elements that share a scale: 16 for nvfp4; edge of the square blocks of block_fp8, 1 to 128;
    32 to 4096, a power of two, for nf4.
    """
    exclude_modules: list[str] | None = field(None, Resume.OTHER_WEIGHTS, QLORA)
    """Modules not to quantize; null: those that a quantized checkpoint's configuration names."""
    merge_lora_interval: int = field(0, Resume.NEXT_STEP, LORA, ge=0)
    """Merge adapters into the weights, which are quantized again, every so many steps; 0: never."""
    reset_optimizer_on_merge: bool = field(
        False,
        Resume.NEXT_STEP,
        Needs("merge_lora_interval", but=0, why="there is no merge to reset at"),
    )
    """Forget optimizer states at each merge."""
    enable_aqn: bool = field(
        False,
        Resume.NEXT_STEP,
        QLORA,
        Needs(
            "train.enable_compile",
            [False],
            "the noise is another in each step, and compiled code would be recompiled for each",
        ),
    )
    """Adaptive quantization noise on quantized weights, in training only."""
    aqn_alpha: float = field(1.0, Resume.NEXT_STEP, Needs("enable_aqn", [True]), ge=0)
    """Scale of that noise, in units of the local quantization step."""

    @model_validator(mode="after")
    def _implied(self) -> Lora:
        if self.enable_qlora and "enable_lora" not in self.model_fields_set:
            self._fill(enable_lora=True)
        if self.lora_alpha == AUTO:
            self._fill(lora_alpha=4.0 if self.rslora else 2.0 * self.lora_rank)
        return self


def of_lora(lora: Lora) -> Iterator[Stated]:
    """The format has groups of this size, QLoRA is LoRA, and experts share some factors or all."""
    both = lora.moe_shared_lora and lora.moe_hybrid_shared_lora
    yield both, "experts share all factors or some", "moe_shared_lora", "moe_hybrid_shared_lora"
    alone = lora.enable_qlora and not lora.enable_lora
    yield alone, "QLoRA implies LoRA", "enable_lora", "enable_qlora"
    why = wrong_group_size(lora.quant_format, lora.quant_group_size)
    yield lora.enable_qlora, why, "quant_group_size", "quant_format"
