"""Where the configuration differs from xorl's documentation, and field names of other libraries."""

from __future__ import annotations

# field -> the default or meaning in xorl's documentation, and the reason for the difference.
# Printed by `docs`.
DIFFERENCES: dict[str, tuple[str, str]] = {
    "model.attn_implementation": (
        "flash_attention_3",
        "needs one kind of GPU; auto takes the best that runs here",
    ),
    "model.moe_implementation": (
        "eager, triton, native, quack",
        "the same, and cpp, which runs on CPUs",
    ),
    **dict.fromkeys(
        (
            "model.router_fp32",
            "model.lm_head_fp32",
            "model.rmsnorm_native",
            "model.activation_native",
            "model.rope_native",
            "model.attention_cast_bf16",
        ),
        ("of its server's configuration", "a trained model can be as its server computes it"),
    ),
    "model.batch_invariant": (
        "none",
        "ours: for numbers that do not depend on how a batch was made up",
    ),
    "model.foundation": (
        "extra configuration of a foundation model",
        "stated in full: entries that replace those of config.json",
    ),
    **dict.fromkeys(
        (
            "train.pipeline_split",
            "train.virtual_pipeline_size",
            "train.muon_ns_coefficients",
            "train.adam_beta1",
            "train.adam_beta2",
            "train.adam_epsilon",
        ),
        ("none", "ours; the default is what it has without one"),
    ),
    "train.loss": ("none", "ours: a loss is a row of a table, and a file of its own"),
    "train.optimizer_args": ("none", "ours: options of an optimizer that is added"),
    "train.callbacks": ("none", "ours: what happens beside a run's steps, added by name"),
    "train.freeze_router": ("of its server's configuration", "ours too"),
    "train.use_tensorboard": ("none", "ours, as use_wandb, without an account"),
    "train.plot_loss": ("none", "ours: a picture that needs no other program"),
    "train.ignore_memory_plan": ("none", "ours: a run that cannot fit is not started"),
    "train.checksum_steps": ("none", "ours: what a later run is compared with"),
    "train.assert_deterministic": (
        "none",
        "ours: two runs are bit-identical, or the run says where they differ",
    ),
    "train.router_replay": (
        "none",
        "ours: experts as the engine that generated the data chose them",
    ),
    "train.router_replay_compare_steps": ("none", "ours: what replaying changes"),
    "model.revision": ("none", "ours, as data sets have it: an id's main branch changes"),
    "train.allow_other_base": ("none", "ours: a run belongs to the weights that it began from"),
    "train.verify_checkpoint": ("none", "ours: a flipped bit would be trained with"),
    "lora.save_base": ("none", "ours: adapters are a small part of what a checkpoint would hold"),
    "train.save_total_limit": ("none", "ours, named as in transformers"),
    "train.enable_activation_offload": (
        "offload to CPU",
        "the same; on a CPU it is refused, since nothing would move",
    ),
    "train.expert_parallel_size": (
        "1",
        "the same; it divides the processes of a shard group, and needs fsdp2",
    ),
    "train.data_parallel_shard_size": (
        "the world's size",
        "-1 is what remains of the processes after replicas, ring and Ulysses",
    ),
    "train.cp_fsdp_mode": (
        "how context parallelism interacts with FSDP",
        "the same, in full: ranks that do not shard are replicas",
    ),
    "data.pad_to_multiple_of": (
        "128",
        "the same; with context parallelism the least common multiple of it and 2 x ring x Ulysses",
    ),
    "train.ep_outside": (
        "place it outside the EP-FSDP mesh",
        "the same: the outer dimension of a shard group",
    ),
    "data.datasets.type": (
        "tokenized only",
        "text, chat and prompt_completion are ours: tokenized on preparation with tokenizer_path",
    ),
    "data.datasets.max_seq_len": (
        "truncate and filter",
        "samples are truncated, with a count in the log",
    ),
    "data.dataloader_num_workers": (
        "8",
        "batches are slices of a memory-mapped file; processes cost memory",
    ),
    "data.dataloader_prefetch_factor": (
        "2",
        "it must be null without workers; 2 with them, as there",
    ),
    "data.dataset_shard_num": (
        "splits the merged dataset",
        "splits each one first: the rest is not prepared",
    ),
    "data.dataset_num_proc": (
        "XORL_DATASET_NUM_PROC, or the processors",
        "TILEWRIGHT_DATASET_NUM_PROC, or the processors, from 64 MiB of data on; starting some "
        "takes longer than small data",
    ),
    "data.sample_packing_mp_start_method": (
        "a start method",
        "the same; null packs in one process, which takes seconds for a million samples",
    ),
    "train.init_device": (
        "cuda",
        "fsdp2, the default, needs meta; auto takes the device that fits",
    ),
    "train.enable_mixed_precision": (
        "BF16",
        "the same; stated in full: parameters and optimizer states stay float32",
    ),
    "train.save_epochs": ("1", "the same; 0 switches it off, for runs that are counted in steps"),
    "train.empty_cache_steps": ("500", "the same; 0 switches it off"),
    "train.gc_steps": ("500", "the same; 0 leaves garbage collection to Python"),
    "train.use_wandb": ("true", "needs an account and a network: opt in"),
    "lora.quant_group_size": (
        "16 for nvfp4, 128 for block_fp8, 64 for nf4 recommended",
        "the same; a size that a format does not have is refused",
    ),
    "lora.exclude_modules": (
        "kept as bfloat16",
        "kept as other weights are: float32, computed in bfloat16",
    ),
    "lora.merge_lora_interval": (
        "with an EMA of NVFP4's largest magnitude",
        "with that of the merged weight",
    ),
    "lora.enable_aqn": (
        "new noise in each forward pass",
        "one noise a step, made again where activations are: forward and backward see the same",
    ),
    "train.wandb_project": ("Xorl", "the project's own name"),
}

# Names in transformers' TrainingArguments, TRL and peft that are too unlike the field's -> the
# field.
ELSEWHERE = {
    "learning_rate": "train.lr",
    "lr_scheduler_type": "train.lr_decay_style",
    "warmup_steps": "train.lr_warmup_ratio",
    "optim": "train.optimizer",
    "do_layer_norm_weight_decay": "train.no_decay_params",
    "beta1": "train.adam_beta1",
    "beta2": "train.adam_beta2",
    "steps": "train.max_steps",
    "per_device_train_batch_size": "train.micro_batch_size",
    "epochs": "train.num_train_epochs",
    "bf16": "train.enable_mixed_precision",
    "torch_compile": "train.enable_compile",
    "fsdp": "train.data_parallel_mode",
    "ddp": "train.data_parallel_mode",
    "resume_from_checkpoint": "train.load_checkpoint_path",
    "report_to": "train.use_wandb",
    "run_name": "train.wandb_name",
    "train_file": "data.datasets",
    "validation_file": "data.test_datasets",
    "max_length": "data.sample_packing_sequence_len",
    "max_seq_length": "data.sample_packing_sequence_len",
    "packing": "data.sample_packing_method",
    "preprocessing_num_workers": "data.dataset_num_proc",
    "r": "lora.lora_rank",
    "load_in_4bit": "lora.enable_qlora",
}
