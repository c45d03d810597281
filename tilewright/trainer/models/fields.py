"""The section model: what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import model_validator

from tilewright.core.files import is_hub_id
from tilewright.ops.moe.expert_parallel import no_deepep
from tilewright.trainer.section import Needs, Resume, Section, Stated, field

DEEPEP = Needs("ep_dispatch", ["deepep"])


class Model(Section):
    model_path: str | None = field(None, Resume.OTHER_CONTENTS, certified=False)
    """Folder (or Hub id) with weights; null: random weights."""
    revision: str | None = field(None, Resume.OTHER_CONTENTS, certified=False)
    """Commit, tag or branch of the Hub id; null: what its main branch is."""
    config_path: str | None = field(None, Resume.OTHER_CONTENTS, certified=False)
    """Folder with config.json, or the file; null: as model_path."""
    tokenizer_path: str | None = field(None, Resume.OTHER_CONTENTS, certified=False)
    """Folder with the tokenizer; null: as config_path."""
    attn_implementation: str = field("auto", Resume.ROUNDING)
    """Attention: auto, eager, cpp, sdpa, native, triton or flash_attention_2 to _4 (fa2 to fa4)."""
    moe_implementation: str | None = field(None, Resume.ROUNDING)
    """Experts: null (automatic), or a name of `tilewright explain moe_mlp`."""
    ep_dispatch: Literal["alltoall", "deepep"] = field(
        "alltoall",
        Resume.COST,
        Needs(
            "train.expert_parallel_size", but=1, why="one process has all experts: nothing travels"
        ),
        Needs("train.enable_mixed_precision", [True], "DeepEP carries bfloat16"),
    )
    """How tokens travel to their experts; deepep needs deep_ep, and is untested on GPUs."""
    deepep_buffer_size_gb: float = field(2.0, Resume.COST, DEEPEP, gt=0)
    """DeepEP's buffer per GPU, in GB."""
    deepep_num_sms: int = field(20, Resume.COST, DEEPEP, gt=0)
    """Streaming multiprocessors that DeepEP uses; an even number."""
    deepep_async_combine: bool = field(
        False,
        Resume.COST,
        refused="the next layer's norm reads what combine returns, so nothing could be computed "
        "meanwhile",
    )
    """Overlap DeepEP's combine with the next layer."""
    merge_qkv: bool = field(True, Resume.OTHER_WEIGHTS)
    """Keep the query, key and value projections as one qkv_proj; DeepSeek-V3 has none to merge."""
    router_fp32: bool = field(True, Resume.ROUNDING)
    """Keep the router's logits in float32 rather than rounding them to bfloat16."""
    lm_head_fp32: bool = field(True, Resume.ROUNDING)
    """Keep the head's logits in float32 rather than rounding them to bfloat16."""
    rmsnorm_native: bool = field(False, Resume.ROUNDING)
    """PyTorch's F.rms_norm instead of the fused kernels, and x + residual by itself."""
    activation_native: bool = field(False, Resume.ROUNDING)
    """F.silu(gate) * up (Gemma: F.gelu), rounded in between, instead of the fused kernel; in layers
    without experts.
    """
    rope_native: bool = field(False, Resume.ROUNDING)
    """PyTorch's operators instead of the fused rotation."""
    attention_cast_bf16: bool = field(False, Resume.ROUNDING)
    """Round queries and keys to bfloat16 after the rotation, as bfloat16 training does anyway."""
    batch_invariant: bool = field(
        False,
        Resume.ROUNDING,
        *(
            Needs(
                native,
                [False],
                "PyTorch's own operators do not claim that a row's bits do not depend on the batch",
            )
            for native in ("rmsnorm_native", "activation_native", "rope_native")
        ),
    )
    """A token's logits have the same bits whatever else is in the batch: implementations that claim
    it, matrix products of 128 rows at a time, and all logits of a batch in memory. Slower.
    """
    basic_modules: list[str] = field(
        [], Resume.LAYOUT, Needs("train.data_parallel_mode", ["fsdp2"])
    )
    """Further module names to shard as FSDP units of their own."""
    foundation: dict[str, Any] = field({}, Resume.OTHER_SHAPE)
    """Entries that replace those of config.json, such as rope_parameters."""
    encoders: dict[str, Any] = field(
        {},
        Resume.OTHER_SHAPE,
        refused="samples are tokens alone: none has an image, a video or a sound that an encoder could "
        "read",
    )
    """Multimodal encoders by kind (image, video, audio)."""

    @model_validator(mode="after")
    def _paths(self) -> Model:
        self._fill(config_path=self.config_path or self.model_path)
        folder = self.config_path
        if folder is not None and folder.endswith(".json"):
            folder = folder.rpartition("/")[0] or "."
        self._fill(tokenizer_path=self.tokenizer_path or folder)
        return self


def of_model(model: Model) -> Iterator[Stated]:
    """Paths, and what carries tokens to experts on this machine, are there."""
    why = "one of them must be given"
    yield model.config_path is None, why, "model_path", "config_path"
    named = {model.model_path, model.config_path, model.tokenizer_path}
    on_hub = {path for path in named if path is not None and is_hub_id(path)}
    yield (
        model.revision is not None and len(on_hub) != 1,
        "it is one Hub id's: local folders have none, and several ids would have different ones",
        "revision",
        "model_path",
        "config_path",
        "tokenizer_path",
    )
    yield model.ep_dispatch != "alltoall", no_deepep("cuda"), "ep_dispatch"
    yield model.deepep_num_sms % 2 == 1, "must be even", "deepep_num_sms"


class Dropouts(Section):
    """Masks of layers in training."""

    hidden_dropout: float = field(0.0, Resume.NEXT_STEP, ge=0, lt=1)
    """Probability of an element of attention's or an MLP's output to be dropped before it is added
    to the residual stream; the others are divided by 1 - p. Off in evaluation.
    """
    attention_dropout: float = field(
        0.0,
        Resume.NEXT_STEP,
        Needs(
            "ringattn_parallel_size",
            [1],
            "a mask draws the bits of four keys of a document at once, and a ring cuts documents at "
            "any key",
        ),
        ge=0,
        lt=1,
    )
    """The same for attention's weights after the softmax."""
    ffn_dropout: float = field(0.0, Resume.NEXT_STEP, ge=0, lt=1)
    """The same for the inner activations of MLPs that are no experts."""
    dropout_warmup_steps: int = field(0, Resume.NEXT_STEP, ge=0)
    """Optimizer steps over which dropout's probabilities rise linearly from 0."""

    @property
    def drops(self) -> bool:
        """Whether anything is dropped."""
        return max(self.hidden_dropout, self.attention_dropout, self.ffn_dropout) > 0


def of_dropouts(dropouts: Dropouts) -> Iterator[Stated]:
    """What is dropped has a probability."""
    never = dropouts.dropout_warmup_steps and not dropouts.drops
    fields = "hidden_dropout", "attention_dropout", "ffn_dropout"
    yield never, "nothing is dropped", "dropout_warmup_steps", *fields
