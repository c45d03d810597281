"""Values that this version refuses, and fields that are used only if another field is set."""

from __future__ import annotations

# path -> why only the default, or what ACCEPTED lists, is accepted.
REFUSED: dict[str, str] = {
    "model.deepep_async_combine": "the next layer's norm reads what combine returns, so nothing "
    "could be computed meanwhile",
    "model.encoders": "samples are tokens alone: none has an image, a video or a sound that an "
    "encoder could read",
    "train.init_device": "no op and no process group here runs on NPUs",
    "train.ckpt_manager": "torch.save writes pickles, which run code when they are read",
}
ACCEPTED = {
    "train.init_device": ("auto", "cpu", "cuda", "meta"),
    "train.ckpt_manager": ("dcp",),
}
# Fields that only FSDP2 uses, with their neutral values.
FSDP2_ONLY = {
    "train.data_parallel_shard_size": (-1, 1),
    "train.data_parallel_replicate_size": (-1, 1),
    "train.reshard_after_forward": (None,),
    "train.enable_full_shard": (True,),
    "train.enable_forward_prefetch": (True,),
    "model.basic_modules": ([],),
    "train.expert_parallel_size": (1,),
    "train.ep_outside": (False,),
    "train.ulysses_parallel_size": (1,),
    "train.ringattn_parallel_size": (1,),
    "train.cp_fsdp_mode": ("all",),
}


# Fields of lora that are used only if another one is set.
LORA_ONLY = {
    **dict.fromkeys(
        (
            "lora_rank",
            "lora_alpha",
            "lora_target_modules",
            "save_lora_only",
            "save_base",
            "merge_lora_interval",
        ),
        "enable_lora",
    ),
    **dict.fromkeys(
        ("quant_format", "quant_group_size", "exclude_modules", "enable_aqn"), "enable_qlora"
    ),
    "aqn_alpha": "enable_aqn",
}

# Fields of train that only some optimizers read.
MUON_ONLY = (
    "muon_lr",
    "muon_momentum",
    "muon_nesterov",
    "muon_ns_steps",
    "muon_ns_coefficients",
    "muon_adjust_lr_fn",
)
OPTIMIZERS_ONLY = {
    **dict.fromkeys(MUON_ONLY, ("muon",)),
    "optimizer_dtype": ("anyprecision_adamw", "muon"),
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2", "adam_epsilon"), ("adamw", "anyprecision_adamw", "muon")
    ),
}
