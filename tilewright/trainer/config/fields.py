"""The fields of the sections model, data and lora."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import model_validator

from tilewright.trainer.config.section import (
    COST,
    EVALUATION,
    LAYOUT,
    NEXT_STEP,
    OTHER_BINS,
    OTHER_CONTENTS,
    OTHER_ORDER,
    OTHER_WEIGHTS,
    OUTPUT,
    PLACE,
    ROUNDING,
    THIS_START,
    RowOf,
    Section,
    field,
)
from tilewright.trainer.tables import DATASETS


class Model(Section):
    model_path: str | None = field(
        None, "Folder (or Hub id) with weights; null: random weights.", OTHER_CONTENTS
    )
    revision: str | None = field(
        None, "Commit, tag or branch of the Hub id; null: what its main branch is.", OTHER_CONTENTS
    )
    config_path: str | None = field(
        None, "Folder with config.json, or the file; null: as model_path.", OTHER_CONTENTS
    )
    tokenizer_path: str | None = field(
        None, "Folder with the tokenizer; null: as config_path.", OTHER_CONTENTS
    )
    attn_implementation: str = field(
        "auto",
        "Attention: auto, eager, sdpa, native, triton or flash_attention_2 to _4 (fa2 to fa4).",
        ROUNDING,
    )
    moe_implementation: str | None = field(
        None, "Experts: null (automatic), or a name of `tilewright explain moe_mlp`.", ROUNDING
    )
    ep_dispatch: Literal["alltoall", "deepep"] = field(
        "alltoall",
        "How tokens travel to their experts; deepep needs the package deep_ep, and is untested on "
        "GPUs.",
        COST,
    )
    deepep_buffer_size_gb: float = field(2.0, "DeepEP's buffer per GPU, in GB.", COST, gt=0)
    deepep_num_sms: int = field(
        20, "Streaming multiprocessors that DeepEP uses; an even number.", COST, gt=0
    )
    deepep_async_combine: bool = field(False, "Overlap DeepEP's combine with the next layer.", COST)
    merge_qkv: bool = field(
        True,
        "Keep the query, key and value projections as one qkv_proj; DeepSeek-V3 has none to merge.",
        OTHER_WEIGHTS,
    )
    router_fp32: bool = field(
        True, "Keep the router's logits in float32 rather than rounding them to bfloat16.", ROUNDING
    )
    lm_head_fp32: bool = field(
        True, "Keep the head's logits in float32 rather than rounding them to bfloat16.", ROUNDING
    )
    rmsnorm_native: bool = field(
        False,
        "PyTorch's F.rms_norm instead of the fused kernels, and x + residual by itself.",
        ROUNDING,
    )
    activation_native: bool = field(
        False,
        "F.silu(gate) * up (Gemma: F.gelu), rounded in between, instead of the fused kernel; in "
        "layers without experts.",
        ROUNDING,
    )
    rope_native: bool = field(False, "PyTorch's operators instead of the fused rotation.", ROUNDING)
    attention_cast_bf16: bool = field(
        False,
        "Round queries and keys to bfloat16 after the rotation; in bfloat16 training they are "
        "that already.",
        ROUNDING,
    )
    batch_invariant: bool = field(
        False,
        "A token's logits have the same bits whatever else is in the batch: implementations that "
        "claim it, matrix products of 128 rows at a time, and all logits of a batch in memory. "
        "Slower.",
        ROUNDING,
    )
    basic_modules: list[str] = field(
        [], "Further module names to shard as FSDP units of their own.", LAYOUT
    )
    foundation: dict[str, Any] = field(
        {}, "Entries that replace those of config.json, such as rope_parameters.", OTHER_WEIGHTS
    )
    encoders: dict[str, Any] = field(
        {}, "Multimodal encoders by kind (image, video, audio).", OTHER_WEIGHTS
    )

    @model_validator(mode="after")
    def _paths(self) -> Model:
        self._fill(config_path=self.config_path or self.model_path)
        folder = self.config_path
        if folder is not None and folder.endswith(".json"):
            folder = folder.rpartition("/")[0] or "."
        self._fill(tokenizer_path=self.tokenizer_path or folder)
        return self


class Dataset(Section):
    path: str = field(
        ...,
        "File, folder, Hub id, s3://, gs://, abfs:// or https:// address (which need the extra s3, "
        "gs, abfs or http), or dummy.",
        OTHER_CONTENTS,
    )
    type: Annotated[str, RowOf(DATASETS)] = field(
        "tokenized",
        "tokenized: rows with input_ids and, if there, labels; text: rows with text, tokenized; "
        "chat: rows with messages, rendered by the tokenizer's chat template, loss on the "
        "assistant's answers; prompt_completion: rows with prompt and completion, loss on the "
        "completion.",
        OTHER_CONTENTS,
    )
    name: str | None = field(None, "Configuration (subset) of a Hub dataset.", OTHER_CONTENTS)
    split: str | None = field(
        None,
        "Split, such as train or train[:10%]; null: the only one. Files are one split, train.",
        OTHER_CONTENTS,
    )
    revision: str | None = field(None, "Commit or tag of a Hub dataset.", OTHER_CONTENTS)
    trust_remote_code: bool = field(False, "Run a dataset's own code.", THIS_START)
    data_files: str | list[str] | None = field(
        None,
        "Files or patterns within path (a folder, Hub id or address); needs ds_type.",
        OTHER_CONTENTS,
    )
    ds_type: Literal["json", "csv", "parquet", "arrow", "text"] | None = field(
        None,
        "Format of the files; null: by their suffix. Of a folder, only such files are read.",
        OTHER_CONTENTS,
    )
    max_seq_len: int | None = field(
        None,
        "Tokens kept of a longer sample (text: of a piece of a document).",
        OTHER_CONTENTS,
        ge=2,
    )
    shards: int | None = field(
        None, "Take one of this many parts of the dataset.", OTHER_CONTENTS, ge=1
    )
    shards_idx: int | None = field(None, "Which part, from 0.", OTHER_CONTENTS, ge=0)
    preprocess_shards: int | None = field(
        None, "Prepare in this many chunks, one after the other.", COST, ge=1
    )


class Data(Section):
    datasets: list[Dataset] = field(..., "What to train on.", OTHER_CONTENTS, min_length=1)
    test_datasets: list[Dataset] = field([], "What to evaluate on.", EVALUATION)
    dataset_prepared_path: str = field(
        "last_prepared_dataset", "Folder for prepared datasets.", PLACE
    )
    select_columns: list[str] | None = field(
        None, "Columns to read; null: those that type names.", OTHER_CONTENTS
    )
    sample_packing_method: Literal["sequential", "multipack"] = field(
        "sequential",
        "sequential: in order; multipack: first-fit decreasing within a group.",
        OTHER_BINS,
    )
    sample_packing_sequence_len: int = field(
        32000, "Tokens of a packed bin, at most.", OTHER_BINS, ge=2
    )
    sample_packing_group_size: int = field(
        100000, "Samples that multipack packs together.", OTHER_BINS, ge=1
    )
    sample_packing_sequentially: bool | None = field(
        None, "true: sequential whatever the method.", OTHER_BINS
    )
    sample_packing_mp_start_method: Literal["fork", "spawn", "forkserver"] | None = field(
        None,
        "Pack the groups of multipack in processes that are started so; null: in this process.",
        COST,
    )
    eval_sample_packing: bool | None = field(
        None, "false: one document a bin in evaluation.", EVALUATION
    )
    dataloader_num_workers: int = field(
        0, "Worker processes that read batches; 0: none.", COST, ge=0
    )
    dataloader_prefetch_factor: int | None = field(
        None, "Batches read ahead by each worker; null: 2 with workers.", COST, ge=1
    )
    dataloader_pin_memory: bool = field(
        True, "Pin batches in memory where there is a CUDA device.", COST
    )
    dataloader_drop_last: bool = field(
        True,
        "Drop the last incomplete global batch of an epoch; false: fill it with empty bins.",
        NEXT_STEP,
    )
    pad_to_multiple_of: int = field(
        128,
        "Micro-batches are padded to a multiple of this many tokens; with context parallelism to "
        "the least common multiple of this and 2 x ring x Ulysses.",
        ROUNDING,
        ge=1,
    )
    val_set_size: int | float | None = field(
        None,
        "Held out of datasets for evaluation: a number of samples, or a fraction below 1.",
        OTHER_CONTENTS,
    )
    shuffle_merged_datasets: bool = field(
        True, "Shuffle all samples, and the bins in every epoch.", OTHER_ORDER
    )
    shuffle_before_merging_datasets: bool = field(
        True, "Shuffle each dataset before merging.", OTHER_CONTENTS
    )
    dataset_num_proc: int | None = field(
        None,
        "Processes for preparation; null: TILEWRIGHT_DATASET_NUM_PROC or the number of CPUs for a "
        "dataset of more than 64 MiB, this process alone for a smaller one.",
        COST,
        ge=1,
    )
    dataset_shard_num: int | None = field(
        None, "Take one of this many parts of every dataset.", OTHER_CONTENTS, ge=1
    )
    dataset_shard_idx: int | None = field(
        None, "Which of those parts, from 0.", OTHER_CONTENTS, ge=0
    )
    num_dataset_shards_to_save: int | None = field(
        None, "Files of a prepared dataset; null: one.", OUTPUT, ge=1
    )
    skip_prepare_dataset: bool = field(
        False, "Load dataset_prepared_path as it is.", OTHER_CONTENTS
    )
    push_dataset_to_hub: str | None = field(
        None, "Push what was prepared to this Hub repository, privately.", OUTPUT
    )
    hf_use_auth_token: bool | None = field(
        None, "Send the Hub token; null: if there is one.", THIS_START
    )

    @model_validator(mode="after")
    def _prefetch(self) -> Data:
        if self.dataloader_num_workers and self.dataloader_prefetch_factor is None:
            self._fill(dataloader_prefetch_factor=2)
        return self


class Lora(Section):
    enable_lora: bool = field(
        False,
        "Train low-rank adapters on projections of the decoder layers; all else is frozen.",
        OTHER_WEIGHTS,
    )
    lora_rank: int = field(16, "Rank of the adapters.", OTHER_WEIGHTS, ge=1)
    lora_alpha: float = field(
        16, "Scale; the adapters are scaled by alpha / rank.", OTHER_WEIGHTS, gt=0
    )
    lora_target_modules: list[str] | None = field(
        None,
        "Projections with adapters: names in their paths, or with * patterns of them; null: all.",
        OTHER_WEIGHTS,
        min_length=1,
    )
    save_lora_only: bool = field(
        False,
        "true: write the adapters as peft reads them; false: dense weights with the adapters "
        "merged.",
        OTHER_WEIGHTS,
    )
    save_base: bool = field(
        False,
        "Store the frozen weights in every checkpoint too; false: only where no file holds them, "
        "since they were drawn or adapters have been merged into them.",
        OUTPUT,
    )
    enable_qlora: bool = field(
        False,
        "Quantize the projections, layer by layer as they are read; every process has them all. "
        "Implies enable_lora.",
        OTHER_WEIGHTS,
    )
    quant_format: Literal["nvfp4", "block_fp8", "nf4"] = field(
        "nvfp4",
        "Quantized format; of a checkpoint that is quantized already, its own.",
        OTHER_WEIGHTS,
    )
    quant_group_size: int = field(
        16,
        "Elements that share a scale: 16 for nvfp4; edge of the square blocks of block_fp8, 1 to "
        "128; 32 to 4096, a power of two, for nf4.",
        OTHER_WEIGHTS,
        ge=1,
    )
    exclude_modules: list[str] | None = field(
        None,
        "Modules that are not quantized; null: those that a quantized checkpoint's configuration "
        "names.",
        OTHER_WEIGHTS,
    )
    merge_lora_interval: int = field(
        0,
        "Merge adapters into the weights, which are quantized again, every so many steps; 0: "
        "never.",
        NEXT_STEP,
        ge=0,
    )
    reset_optimizer_on_merge: bool = field(
        False, "Forget optimizer states at each merge.", NEXT_STEP
    )
    enable_aqn: bool = field(
        False, "Adaptive quantization noise on quantized weights, in training only.", NEXT_STEP
    )
    aqn_alpha: float = field(
        1.0, "Scale of that noise, in units of the local quantization step.", NEXT_STEP, ge=0
    )

    @model_validator(mode="after")
    def _implied(self) -> Lora:
        if self.enable_qlora and "enable_lora" not in self.model_fields_set:
            self._fill(enable_lora=True)
        return self
