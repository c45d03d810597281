"""The fields of the sections model, data and lora."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from tilewright.trainer.section import Section, field


class Model(Section):
    model_path: str | None = field(None, "Folder (or Hub id) with weights; null: random weights.")
    config_path: str | None = field(
        None, "Folder with config.json, or the file; null: as model_path."
    )
    tokenizer_path: str | None = field(None, "Folder with the tokenizer; null: as config_path.")
    attn_implementation: str = field(
        "auto",
        "Attention: auto, eager, sdpa, native, triton or flash_attention_2 to _4 (fa2 to fa4).",
    )
    moe_implementation: str | None = field(
        None, "Experts: null (automatic), or a name of `tilewright explain moe_mlp`."
    )
    ep_dispatch: Literal["alltoall", "deepep"] = field(
        "alltoall",
        "How tokens travel to their experts; deepep needs the package deep_ep, and is untested on "
        "GPUs.",
    )
    deepep_buffer_size_gb: float = field(2.0, "DeepEP's buffer per GPU, in GB.", gt=0)
    deepep_num_sms: int = field(
        20, "Streaming multiprocessors that DeepEP uses; an even number.", gt=0
    )
    deepep_async_combine: bool = field(False, "Overlap DeepEP's combine with the next layer.")
    merge_qkv: bool = field(True, "Keep the query, key and value projections as one qkv_proj.")
    router_fp32: bool = field(
        True, "Keep the router's logits in float32 rather than rounding them to bfloat16."
    )
    lm_head_fp32: bool = field(
        True, "Keep the head's logits in float32 rather than rounding them to bfloat16."
    )
    rmsnorm_native: bool = field(
        False, "PyTorch's F.rms_norm instead of the fused kernels, and x + residual by itself."
    )
    activation_native: bool = field(
        False,
        "F.silu(gate) * up, rounded in between, instead of the fused kernel; in layers without "
        "experts.",
    )
    rope_native: bool = field(False, "PyTorch's operators instead of the fused rotation.")
    attention_cast_bf16: bool = field(
        False,
        "Round queries and keys to bfloat16 after the rotation; in bfloat16 training they are "
        "that already.",
    )
    batch_invariant: bool = field(
        False,
        "A token's logits have the same bits whatever else is in the batch: implementations that "
        "claim it, matrix products of 128 rows at a time, and all logits of a batch in memory. "
        "Slower.",
    )
    basic_modules: list[str] = field(
        [], "Further module names to shard as FSDP units of their own."
    )
    foundation: dict[str, Any] = field({}, "Further configuration of a foundation model.")
    encoders: dict[str, Any] = field({}, "Multimodal encoders by kind (image, video, audio).")

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
    )
    type: Literal["tokenized", "text", "chat", "prompt_completion"] = field(
        "tokenized",
        "tokenized: rows with input_ids and, if there, labels; text: rows with text, tokenized; "
        "chat: rows with messages, rendered by the tokenizer's chat template, loss on the "
        "assistant's answers; prompt_completion: rows with prompt and completion, loss on the "
        "completion.",
    )
    name: str | None = field(None, "Configuration (subset) of a Hub dataset.")
    split: str | None = field(
        None, "Split, such as train or train[:10%]; null: the only one. Files are one split, train."
    )
    revision: str | None = field(None, "Commit or tag of a Hub dataset.")
    trust_remote_code: bool = field(False, "Run a dataset's own code.")
    data_files: str | list[str] | None = field(
        None, "Files or patterns within path (a folder, Hub id or address); needs ds_type."
    )
    ds_type: Literal["json", "csv", "parquet", "arrow", "text"] | None = field(
        None, "Format of the files; null: by their suffix. Of a folder, only such files are read."
    )
    max_seq_len: int | None = field(
        None,
        "Tokens kept of a longer sample (text: of a piece of a document).",
        ge=2,
    )
    shards: int | None = field(None, "Take one of this many parts of the dataset.", ge=1)
    shards_idx: int | None = field(None, "Which part, from 0.", ge=0)
    preprocess_shards: int | None = field(
        None, "Prepare in this many chunks, one after the other.", ge=1
    )


class Data(Section):
    datasets: list[Dataset] = field(..., "What to train on.", min_length=1)
    test_datasets: list[Dataset] = field([], "What to evaluate on.")
    dataset_prepared_path: str = field("last_prepared_dataset", "Folder for prepared datasets.")
    select_columns: list[str] | None = field(None, "Columns to read; null: those that type names.")
    sample_packing_method: Literal["sequential", "multipack"] = field(
        "sequential", "sequential: in order; multipack: first-fit decreasing within a group."
    )
    sample_packing_sequence_len: int = field(32000, "Tokens of a packed bin, at most.", ge=2)
    sample_packing_group_size: int = field(100000, "Samples that multipack packs together.", ge=1)
    sample_packing_sequentially: bool | None = field(None, "true: sequential whatever the method.")
    sample_packing_mp_start_method: Literal["fork", "spawn", "forkserver"] | None = field(
        None, "Start method of packing processes."
    )
    eval_sample_packing: bool | None = field(None, "false: one document a bin in evaluation.")
    dataloader_num_workers: int = field(0, "Worker processes that read batches; 0: none.", ge=0)
    dataloader_prefetch_factor: int | None = field(
        None, "Batches read ahead by each worker; null: 2 with workers.", ge=1
    )
    dataloader_pin_memory: bool = field(True, "Pin batches in memory where there is a CUDA device.")
    dataloader_drop_last: bool = field(
        True, "Drop the last incomplete global batch of an epoch; false: fill it with empty bins."
    )
    pad_to_multiple_of: int = field(
        128,
        "Micro-batches are padded to a multiple of this many tokens; with context parallelism to "
        "the least common multiple of this and 2 x ring x Ulysses.",
        ge=1,
    )
    val_set_size: int | float | None = field(
        None, "Held out of datasets for evaluation: a number of samples, or a fraction below 1."
    )
    shuffle_merged_datasets: bool = field(True, "Shuffle all samples, and the bins in every epoch.")
    shuffle_before_merging_datasets: bool = field(True, "Shuffle each dataset before merging.")
    dataset_num_proc: int | None = field(
        None, "Processes for preparation; null: this one alone.", ge=1
    )
    dataset_shard_num: int | None = field(
        None, "Take one of this many parts of every dataset.", ge=1
    )
    dataset_shard_idx: int | None = field(None, "Which of those parts, from 0.", ge=0)
    num_dataset_shards_to_save: int | None = field(
        None, "Files of a prepared dataset; null: one.", ge=1
    )
    skip_prepare_dataset: bool = field(False, "Load dataset_prepared_path as it is.")
    push_dataset_to_hub: str | None = field(
        None, "Push what was prepared to this Hub repository, privately."
    )
    hf_use_auth_token: bool | None = field(None, "Send the Hub token; null: if there is one.")

    @model_validator(mode="after")
    def _prefetch(self) -> Data:
        if self.dataloader_num_workers and self.dataloader_prefetch_factor is None:
            self._fill(dataloader_prefetch_factor=2)
        return self


class Lora(Section):
    enable_lora: bool = field(
        False, "Train low-rank adapters on projections of the decoder layers; all else is frozen."
    )
    lora_rank: int = field(16, "Rank of the adapters.", ge=1)
    lora_alpha: float = field(16, "Scale; the adapters are scaled by alpha / rank.", gt=0)
    lora_target_modules: list[str] | None = field(
        None,
        "Projections with adapters: names in their paths, or with * patterns of them; null: all.",
        min_length=1,
    )
    save_lora_only: bool = field(
        False,
        "true: write the adapters as peft reads them; false: dense weights with the adapters "
        "merged.",
    )
    enable_qlora: bool = field(
        False,
        "Quantize the projections, layer by layer as they are read; every process has them all. "
        "Implies enable_lora.",
    )
    quant_format: Literal["nvfp4", "block_fp8", "nf4"] = field(
        "nvfp4", "Quantized format; of a checkpoint that is quantized already, its own."
    )
    quant_group_size: int = field(
        16,
        "Elements that share a scale: 16 for nvfp4; edge of the square blocks of block_fp8, 1 to "
        "128; 32 to 4096, a power of two, for nf4.",
        ge=1,
    )
    exclude_modules: list[str] | None = field(
        None,
        "Modules that are not quantized; null: those that a quantized checkpoint's configuration "
        "names.",
    )
    merge_lora_interval: int = field(
        0,
        "Merge adapters into the weights, which are quantized again, every so many steps; 0: "
        "never.",
        ge=0,
    )
    reset_optimizer_on_merge: bool = field(False, "Forget optimizer states at each merge.")
    enable_aqn: bool = field(
        False, "Adaptive quantization noise on quantized weights, in training only."
    )
    aqn_alpha: float = field(
        1.0, "Scale of that noise, in units of the local quantization step.", ge=0
    )

    @model_validator(mode="after")
    def _implied(self) -> Lora:
        if self.enable_qlora and "enable_lora" not in self.model_fields_set:
            self._fill(enable_lora=True)
        return self
