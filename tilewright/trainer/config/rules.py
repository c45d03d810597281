"""Configurations that are refused although each value is valid on its own, with one sentence why.

No field is ignored: an unsupported field is refused at any value but its default.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from tilewright.core import platform
from tilewright.core.files import is_hub_id
from tilewright.nn.quantized_layers import wrong_group_size
from tilewright.ops.moe.expert_parallel import no_deepep
from tilewright.trainer.config.field_tree import default_of, get, show
from tilewright.trainer.config.parallel_rules import (
    pipeline_relations,
    replay_relations,
    tensor_relations,
)
from tilewright.trainer.config.refused import (
    ACCEPTED,
    FSDP2_ONLY,
    LORA_ONLY,
    OPTIMIZERS_ONLY,
    REFUSED,
)
from tilewright.trainer.optim.optim import wrong_options
from tilewright.trainer.tables import OPTIMIZERS

if TYPE_CHECKING:
    from tilewright.trainer.config import Config, Dataset


class Problem(NamedTuple):
    """The fields concerned, the one at fault first, and one sentence."""

    paths: tuple[str, ...]
    message: str

    def line(self, config: Config) -> str:
        return f"{', '.join(f'{p} = {show(get(config, p))}' for p in self.paths)}: {self.message}"


def problems(config: Config) -> Iterator[Problem]:
    for path, why in REFUSED.items():
        if get(config, path) not in ACCEPTED.get(path, (default_of(type(config), path),)):
            yield Problem((path,), why)
    for path, neutral in FSDP2_ONLY.items():
        if config.train.data_parallel_mode != "fsdp2" and get(config, path) not in neutral:
            yield Problem((path, "train.data_parallel_mode"), "only fsdp2 reads this")
    for kind in ("datasets", "test_datasets"):
        for i, entry in enumerate(getattr(config.data, kind)):
            yield from _dataset(f"data.{kind}.{i}.", entry)
    for broken, paths, message in _relations(config):
        if broken:
            yield Problem(tuple(paths.split()), message)


def _relations(config: Config) -> Iterator[tuple[bool, str, str]]:
    """(whether it is violated, the fields, the sentence) of every rule between fields."""
    yield from _model_and_data(config)
    yield from _numerics(config)
    yield from _experts(config)
    yield from replay_relations(config)
    yield from pipeline_relations(config)
    yield from tensor_relations(config)
    yield from _train(config)
    yield from _optimizers(config)
    yield from _lora(config)


def needs(path: str, config: Config) -> Iterator[str]:
    """The requirements of a field's values. config: any valid one."""
    if path in REFUSED:
        accepted = ACCEPTED.get(path, (default_of(type(config), path),))
        yield f"only {' or '.join(map(show, accepted))}: {REFUSED[path]}"
    if path in FSDP2_ONLY:
        neutral = " or ".join(map(show, FSDP2_ONLY[path]))
        yield f"any value but {neutral} needs train.data_parallel_mode = fsdp2"
    section, _, name = path.partition(".")
    if section == "lora" and name in LORA_ONLY:
        yield f"any value but the default needs lora.{LORA_ONLY[name]} = true"
    for _, paths, sentence in _relations(config):
        # A sentence about this machine is None if there is nothing to say.
        if path in paths.split() and sentence != "None":
            others = [p for p in paths.split() if p != path]
            some = f"refused with some values of {', '.join(others)}: " if others else ""
            yield some + sentence


def _dataset(at: str, entry: Dataset) -> Iterator[Problem]:
    if entry.trust_remote_code:
        yield Problem(
            (f"{at}trust_remote_code",), "the package datasets no longer runs a dataset's own code"
        )
    if entry.data_files is not None and entry.ds_type is None:
        yield Problem((f"{at}data_files", f"{at}ds_type"), "data_files needs ds_type")
    if entry.preprocess_shards is not None and entry.shards is not None:
        yield Problem((f"{at}preprocess_shards", f"{at}shards"), "give one of them")
    if (entry.shards is None) != (entry.shards_idx is None):
        yield Problem((f"{at}shards", f"{at}shards_idx"), "give both, or neither")
    elif (
        entry.shards is not None
        and entry.shards_idx is not None
        and entry.shards_idx >= entry.shards
    ):
        yield Problem(
            (f"{at}shards_idx", f"{at}shards"), "indices run from 0 to one below the number"
        )
    if entry.path == "dummy":
        for name in ("name", "split", "revision", "data_files", "ds_type"):
            if getattr(entry, name) is not None:
                yield Problem((f"{at}{name}", f"{at}path"), "dummy data is not read from anywhere")
        if entry.type != "tokenized":
            yield Problem((f"{at}type", f"{at}path"), "dummy data is tokenized already")
    elif "://" in entry.path or pathlib.Path(entry.path).exists():
        for name in ("name", "revision"):
            if getattr(entry, name) is not None:
                yield Problem((f"{at}{name}", f"{at}path"), "only a dataset on the Hub has one")
    elif entry.data_files is not None:
        if entry.name is not None:
            yield Problem((f"{at}name", f"{at}data_files"), "give one of them")
    elif entry.ds_type is not None:
        yield Problem(
            (f"{at}ds_type", f"{at}data_files"),
            "the Hub knows the format, unless data_files are named",
        )


def _model_and_data(config: Config) -> Iterator[tuple[bool, str, str]]:
    model, data = config.model, config.data
    yield (
        model.config_path is None,
        "model.model_path model.config_path",
        "one of them must be given",
    )
    named = {model.model_path, model.config_path, model.tokenizer_path}
    on_hub = {path for path in named if path is not None and is_hub_id(path)}
    yield (
        model.revision is not None and len(on_hub) != 1,
        "model.revision model.model_path model.config_path model.tokenizer_path",
        "it is one Hub id's: local folders have none, and several ids would have different ones",
    )
    yield (
        not data.dataloader_num_workers and data.dataloader_prefetch_factor is not None,
        "data.dataloader_prefetch_factor data.dataloader_num_workers",
        "without workers it must be null",
    )
    yield (
        data.sample_packing_mp_start_method is not None
        and (data.sample_packing_method != "multipack" or bool(data.sample_packing_sequentially)),
        "data.sample_packing_mp_start_method data.sample_packing_method",
        "only multipack packs groups, in processes or not",
    )
    size = data.val_set_size
    yield (
        size is not None and not (0 < size < 1 if isinstance(size, float) else size >= 1),
        "data.val_set_size",
        "must be a number of samples (1 or more) or a fraction between 0 and 1",
    )
    yield (
        size is not None and bool(data.test_datasets),
        "data.val_set_size data.test_datasets",
        "give one of them",
    )
    num, index = data.dataset_shard_num, data.dataset_shard_idx
    yield (
        (num is None) != (index is None),
        "data.dataset_shard_num data.dataset_shard_idx",
        "give both, or neither",
    )
    yield (
        num is not None and index is not None and index >= num,
        "data.dataset_shard_idx data.dataset_shard_num",
        "indices run from 0 to one below the number",
    )
    yield (
        bool(data.push_dataset_to_hub) and not data.hf_use_auth_token,
        "data.push_dataset_to_hub data.hf_use_auth_token",
        "pushing needs hf_use_auth_token: true",
    )
    yield (
        data.skip_prepare_dataset and bool(data.push_dataset_to_hub),
        "data.push_dataset_to_hub data.skip_prepare_dataset",
        "nothing is prepared, so nothing can be pushed",
    )


def _numerics(config: Config) -> Iterator[tuple[bool, str, str]]:
    yield (
        config.model.batch_invariant and config.train.ringattn_parallel_size > 1,
        "model.batch_invariant train.ringattn_parallel_size",
        "where a ring cuts a document depends on what else is in the batch",
    )
    for native in ("rmsnorm_native", "activation_native", "rope_native"):
        yield (
            config.model.batch_invariant and getattr(config.model, native),
            f"model.batch_invariant model.{native}",
            "PyTorch's own operators do not claim that a row's bits do not depend on the batch",
        )


def _experts(config: Config) -> Iterator[tuple[bool, str, str]]:
    m, t = config.model, config.train
    deep, alone = m.ep_dispatch == "deepep", t.expert_parallel_size == 1
    yield (
        deep and alone,
        "model.ep_dispatch train.expert_parallel_size",
        "one process has all experts: nothing travels",
    )
    yield (
        t.ep_outside and alone,
        "train.ep_outside train.expert_parallel_size",
        "there is nothing to place",
    )
    for name in ("deepep_buffer_size_gb", "deepep_num_sms"):
        yield (
            not deep and getattr(m, name) != default_of(type(config), f"model.{name}"),
            f"model.{name} model.ep_dispatch",
            "only deepep reads this",
        )
    yield m.deepep_num_sms % 2 == 1, "model.deepep_num_sms", "must be even"
    missing = no_deepep("cuda")
    yield deep and missing is not None, "model.ep_dispatch", str(missing)
    yield (
        deep and not t.enable_mixed_precision,
        "model.ep_dispatch train.enable_mixed_precision",
        "DeepEP carries bfloat16",
    )
    act = t.moe_checkpoint_method == "moe_act"
    yield (
        act and t.recompute_modules is not None and "mlp" not in t.recompute_modules,
        "train.moe_checkpoint_method train.recompute_modules",
        "without mlp the experts are not recomputed",
    )
    yield (
        act and t.enable_reentrant,
        "train.moe_checkpoint_method train.enable_reentrant",
        "the experts' activations are recomputed without reentering the backward",
    )


def _train(config: Config) -> Iterator[tuple[bool, str, str]]:
    t = config.train
    for name in ("data_parallel_shard_size", "data_parallel_replicate_size"):
        size = getattr(t, name)
        yield size != -1 and size < 1, f"train.{name}", "must be -1, or 1 or more"
    yield (
        t.cp_fsdp_mode != "all" and t.context_parallel_size == 1,
        "train.cp_fsdp_mode train.ringattn_parallel_size train.ulysses_parallel_size",
        "no sequence is spread",
    )
    cuda = platform.no_cuda()
    yield (
        t.data_parallel_mode == "fsdp2" and t.init_device in ("cpu", "cuda"),
        "train.init_device train.data_parallel_mode",
        "fsdp2 builds the model on meta; leave it at auto",
    )
    yield (
        t.data_parallel_mode != "fsdp2" and t.init_device == "meta",
        "train.init_device train.data_parallel_mode",
        "only fsdp2 builds the model on meta; leave it at auto",
    )
    yield t.init_device == "cuda" and cuda is not None, "train.init_device", str(cuda)
    yield (
        not t.enable_full_shard and t.reshard_after_forward is True,
        "train.reshard_after_forward train.enable_full_shard",
        "ZeRO-2 keeps parameters after the forward pass",
    )
    decays = t.lr_decay_style != "constant"
    yield decays and t.lr_min > t.lr, "train.lr_min train.lr", "the decay would rise"
    yield (
        t.lr_warmup_ratio > 0 and t.lr_start > t.lr,
        "train.lr_start train.lr",
        "the warmup would fall",
    )
    yield (
        decays and t.lr_decay_ratio < t.lr_warmup_ratio,
        "train.lr_decay_ratio train.lr_warmup_ratio",
        "the decay would end before the warmup",
    )
    for name, neutral in (
        ("enable_reentrant", False),
        ("recompute_modules", None),
        ("moe_checkpoint_method", None),
    ):
        yield (
            not t.enable_gradient_checkpointing and getattr(t, name) != neutral,
            f"train.{name} train.enable_gradient_checkpointing",
            "nothing is recomputed",
        )
    yield (
        t.enable_activation_offload and cuda is not None,
        "train.enable_activation_offload",
        f"activations are in CPU memory already: {cuda}",
    )
    yield (
        t.activation_gpu_limit > 0 and not t.enable_activation_offload,
        "train.activation_gpu_limit train.enable_activation_offload",
        "nothing is offloaded",
    )
    yield (
        t.enable_full_determinism and not t.allow_cuda_launch_blocking,
        "train.enable_full_determinism train.allow_cuda_launch_blocking",
        "full determinism needs allow_cuda_launch_blocking: true",
    )
    yield (
        platform.env_flag("CUDA_LAUNCH_BLOCKING") and not t.allow_cuda_launch_blocking,
        "train.allow_cuda_launch_blocking",
        "CUDA_LAUNCH_BLOCKING is set, which slows training down; unset it",
    )
    for name, package in (
        ("use_wandb", "wandb"),
        ("use_tensorboard", "tensorboard"),
        ("plot_loss", "matplotlib"),
    ):
        missing = platform.no_module(package)
        yield getattr(t, name) and missing is not None, f"train.{name}", str(missing)
    yield (
        t.profile_end_step <= t.profile_start_step,
        "train.profile_end_step train.profile_start_step",
        "profiling must end after it starts",
    )


def _optimizers(config: Config) -> Iterator[tuple[bool, str, str]]:
    t = config.train
    for name, readers in OPTIMIZERS_ONLY.items():
        yield (
            t.optimizer not in readers
            and getattr(t, name) != default_of(type(config), f"train.{name}"),
            f"train.{name} train.optimizer",
            f"only {' and '.join(readers)} read{'s' * (len(readers) == 1)} this",
        )
    wrong = wrong_options(OPTIMIZERS[t.optimizer], t.optimizer_args)
    yield wrong is not None, "train.optimizer_args train.optimizer", str(wrong)
    half = t.optimizer_dtype == "bf16" and t.optimizer in OPTIMIZERS_ONLY["optimizer_dtype"]
    for name in ("adam_beta1", "adam_beta2", "muon_momentum"):
        yield (
            half
            and getattr(t, name) > 1 - 2**-8
            and (name != "muon_momentum" or t.optimizer == "muon"),
            f"train.{name} train.optimizer_dtype",
            "must be at most 0.996: a state in bfloat16 that loses less than 1 / 256 in a step "
            "rounds to where it was; fp32 keeps it",
        )
    yield (
        t.optimizer == "muon" and config.lora.enable_lora,
        "train.optimizer lora.enable_lora",
        "only adapters are trained, and those by AdamW: muon would have no matrix",
    )


def _lora(config: Config) -> Iterator[tuple[bool, str, str]]:
    lora, t = config.lora, config.train
    yield (
        lora.enable_qlora and not lora.enable_lora,
        "lora.enable_lora lora.enable_qlora",
        "QLoRA implies LoRA",
    )
    for name, switch in LORA_ONLY.items():
        yield (
            not getattr(lora, switch)
            and getattr(lora, name) != default_of(type(config), f"lora.{name}"),
            f"lora.{name} lora.{switch}",
            f"only {switch} makes something read this",
        )
    wrong = wrong_group_size(lora.quant_format, lora.quant_group_size)
    yield (
        lora.enable_qlora and wrong is not None,
        "lora.quant_group_size lora.quant_format",
        str(wrong),
    )
    yield (
        lora.reset_optimizer_on_merge and not lora.merge_lora_interval,
        "lora.reset_optimizer_on_merge lora.merge_lora_interval",
        "there is no merge to reset at",
    )
    yield (
        lora.save_lora_only and lora.merge_lora_interval > 0,
        "lora.save_lora_only lora.merge_lora_interval",
        "merging changes the weights under the adapters, so that adapters alone would lose what "
        "was merged",
    )
    yield (
        lora.save_lora_only and config.model.model_path is None,
        "lora.save_lora_only model.model_path",
        "random weights are not stored anywhere that the adapters could be put on again",
    )
    yield (
        lora.save_lora_only and not t.save_hf_weights,
        "lora.save_lora_only train.save_hf_weights",
        "no Hugging Face checkpoint is written",
    )
    yield (
        lora.enable_lora and config.model.batch_invariant,
        "lora.enable_lora model.batch_invariant",
        "the products of adapters and of quantized weights do not claim that",
    )
    yield (
        lora.enable_aqn and t.enable_compile,
        "lora.enable_aqn train.enable_compile",
        "the noise is another in each step, and compiled code would be recompiled for each",
    )
    yield (
        lora.enable_qlora and t.expert_parallel_size > 1,
        "lora.enable_qlora train.expert_parallel_size",
        "quantized experts are buffers, the same on every process, and a checkpoint holds one copy",
    )
    yield (
        lora.enable_lora and config.model.ep_dispatch == "deepep",
        "lora.enable_lora model.ep_dispatch",
        "tokens travel to experts with adapters by alltoall only",
    )
