"""The fields of the trainer, each with another value than its default and what differs then.

python tests/lib/field_effects.py docs/trainer/fields.md      # writes the page's last table
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import io
import json
import pathlib
import re
import shutil
import sys
import types

import pytest
import torch
import transformers
import yaml

from tilewright import ops as tw
from tilewright.trainer import build, engine, loop, train
from tilewright.trainer.checkpoint import checkpoint, checkpoint_files, hf
from tilewright.trainer.config import Config, ConfigError, load
from tilewright.trainer.data import batches, packing
from tilewright.trainer.data import prepare as preparing
from tilewright.trainer.field_tree import leaves
from tilewright.trainer.models import recompute
from tilewright.trainer.models.initialize import init_weights
from tilewright.trainer.models.moe import MoE
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.plugins import housekeeping, records
from tilewright.trainer.plugins.callback import Step
from tilewright.trainer.section import properties

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


EXPERTS = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


WORDS = [f"w{i}" for i in range(40)]


@dataclasses.dataclass(frozen=True)
class Row:
    """field: with the index of a list's entry.   base: settings of both runs."""

    field: str
    value: object
    differs: str
    base: tuple = ()

    @property
    def path(self):
        return re.sub(r"\.\d+", "", self.field)


def row(field, value, differs, **base):
    named = {key.replace("__", "."): v for key, v in base.items()}
    return Row(field, value, differs, tuple(sorted(named.items(), key=str)))


def grouped(rows, accepted):
    """Lists of rows that share a run, which has their settings: as many as `accepted` takes."""
    groups = []
    for one in rows:
        own = {**dict(one.base), one.field: one.value}
        for changes, group in groups:
            both = changes.keys() | own.keys()
            fits = not any(apart <= both for apart in APART)
            fits = fits and all(changes.get(k, v) == v for k, v in own.items())
            if fits and accepted({**changes, **own}):
                changes |= own
                group.append(one)
                break
        else:
            assert accepted(own), one.path
            groups.append((own, [one]))
    return groups


# Fields that no run combines: it has one model, which may have no experts, one kind of data, and
# one cache.
APART = (
    {"train.load_checkpoint_path"},
    {"model.model_path", "model.config_path"},
    {"model.activation_native", "model.config_path"},
    {"model.batch_invariant", "model.config_path"},
    {"train.ffn_dropout", "model.config_path"},
    {"precision.recipe", "model.moe_implementation"},
    {"data.test_datasets", "data.datasets"},
    {"data.skip_prepare_dataset", "data.dataset_prepared_path"},
)
FSDP2 = {"train__data_parallel_mode": "fsdp2"}
MOE = {"model__config_path": "@moe"}
LORA = {"lora__enable_lora": True, "lora__lora_rank": 2}
QLORA = {**LORA, "lora__enable_qlora": True, "lora__quant_format": "nf4"} | {
    "lora__quant_group_size": 64
}
RECIPE = {"precision__recipe": "mxfp8"}
RECOMPUTE = {"train__enable_gradient_checkpointing": True}
TEXT = {"data__datasets": "@text", "model__tokenizer_path": "@tokenizer"}
EVAL = {"data__val_set_size": 4}
EVAL_STEPS = {**EVAL, "train__eval_strategy": "steps", "train__eval_steps": 2}
EVAL_BEST = {**EVAL_STEPS, "train__best_metric": "eval_loss"}
DECAY = {"train__lr_decay_style": "linear"}
STAIRS = {"train__lr_decay_style": "step", "train__lr_gamma": 0.5}
WARM = {"train__lr_warmup_ratio": 0.6}
MUON = {"train__optimizer": "muon"}
WANDB = {"train__use_wandb": True}
PROFILE = {
    "train__enable_profiling": True,
    "train__profile_trace_dir": "@trace",
    "train__profile_start_step": 1,
    "train__profile_end_step": 2,
    "train__profile_with_stack": False,
}
TWO = {"data__datasets": "@two"}
EIGHT = {"train__data_parallel_mode": "fsdp2"}
POLICY = {"train__loss": "policy", "data__datasets": "@policy"}
GRPO = {**POLICY, "policy__loss": "dr_grpo"}
PPO = {**POLICY, "policy__loss": "policy_loss"}
TIS = {**PPO, "policy__use_tis": True}
DPO = {"train__loss": "preference", "data__datasets": "@pairs"}
KTO = {"train__loss": "preference", "preference__loss": "kto", "data__datasets": "@answers"}
CUT = {**DPO, "preference__max_prompt_len": 2}
MOVING = {**DPO, "preference__reference_update_steps": 1}
TEACHER = {"train__loss": "distillation", "distillation__top_k": 3, "data__datasets": "@teacher"}
REWARD = {"train__loss": "reward", "data__datasets": "@pairs", "model__config_path": "@scored"}
STEPS = {"train__gradient_accumulation_steps": 4}
PIPELINE = {**EIGHT, **STEPS, "train__pipeline_parallel_size": 2}
MULTIPACK = {"data__sample_packing_method": "multipack"}
SHARDED = {"data__dataset_shard_num": 2, "data__dataset_shard_idx": 0}
BY_EPOCHS = {"train__max_steps": None, "train__micro_batch_size": 4}
EVAL_EPOCHS = {**EVAL, **BY_EPOCHS, "train__eval_strategy": "epoch", "train__num_train_epochs": 3}
REPLAYED = {**MOE, "data__datasets": "@routes", "train__router_replay": True}
RESUMED = {"train__load_checkpoint_path": "@checkpoint"}
OF_OTHERS = {"train__load_checkpoint_path": "@of_others"}
SAVED = {**LORA, "model__model_path": "@weights"}
FP8 = {**QLORA, "lora__quant_format": "block_fp8", "lora__quant_group_size": 16}

# Expected differences. Only `plan` is not measured on a run, but computed for eight ranks.
ROWS = [
    row("model.model_path", "@weights", "losses"),
    row("model.config_path", "@deep", "losses"),
    row("model.tokenizer_path", "@tokenizer2", "losses", **TEXT),
    row("model.attn_implementation", "eager", "ops", model__attn_implementation="sdpa"),
    row("model.moe_implementation", "eager", "ops", **MOE, model__moe_implementation="native"),
    row("model.ep_dispatch", "deepep", "sentence"),
    row("model.deepep_buffer_size_gb", 3.0, "sentence"),
    row("model.deepep_num_sms", 22, "sentence"),
    row("model.merge_qkv", False, "names"),
    row("model.router_fp32", False, "losses", **MOE, train__enable_mixed_precision=True),
    row("model.lm_head_fp32", False, "losses", train__enable_mixed_precision=True),
    row("model.rmsnorm_native", True, "losses", train__enable_mixed_precision=True),
    row("model.activation_native", True, "losses", train__enable_mixed_precision=True),
    row("model.rope_native", True, "operators"),
    row("model.attention_cast_bf16", True, "losses"),
    row("model.batch_invariant", True, "operators"),
    row("model.foundation", {"num_hidden_layers": 1}, "names"),
    row("model.basic_modules", ["mlp"], "units", **FSDP2),
    row("data.datasets", "@two", "losses"),
    row("data.datasets.0.path", "@other", "losses"),
    row("data.datasets.0.type", "text", "losses", **TEXT | {"data__datasets": "@both"}),
    row("data.datasets.0.split", "train[:50%]", "size"),
    row("data.datasets.0.data_files", "b.jsonl", "losses", data__datasets="@files"),
    row("data.datasets.0.ds_type", "text", "losses", **TEXT | {"data__datasets": "@mixed"}),
    row("data.datasets.0.max_seq_len", 5, "size"),
    row("data.datasets.0.max_samples", 9, "size"),
    row("data.datasets.0.shards", 3, "size", data__datasets="@shards"),
    row("data.datasets.0.shards_idx", 1, "losses", data__datasets="@shards"),
    row("data.datasets.0.preprocess_shards", 3, "prepared"),
    row("data.test_datasets", "@tests", "evaluations"),
    row("data.mixing", "random", "losses", **TWO),
    row("data.samples_per_epoch", 5, "size", **TWO | {"data__mixing": "random"}),
    row("data.on_bad_row", "skip", "prepared"),
    row("data.dataset_prepared_path", "@prepared", "folders"),
    row("data.select_columns", ["input_ids"], "losses", data__datasets="@labels"),
    row("data.sample_packing_method", "multipack", "losses"),
    row("data.sample_packing_sequence_len", 48, "losses"),
    row("data.sample_packing_group_size", 3, "losses", **MULTIPACK),
    row("data.sample_packing_sequentially", True, "losses", **MULTIPACK),
    row(
        "data.sample_packing_mp_start_method",
        "fork",
        "packing_processes",
        **MULTIPACK,
        data__sample_packing_group_size=3,
    ),
    row("data.eval_sample_packing", False, "loaders", **EVAL),
    row("data.dataloader_num_workers", 1, "loaders"),
    row("data.dataloader_prefetch_factor", 3, "loaders", data__dataloader_num_workers=1),
    row("data.dataloader_pin_memory", False, "pinned"),
    row("data.dataloader_drop_last", False, "steps", **BY_EPOCHS),
    row("data.pad_to_multiple_of", 40, "shapes"),
    row("data.val_set_size", 4, "evaluations"),
    row("data.shuffle_merged_datasets", False, "losses"),
    row(
        "data.shuffle_before_merging_datasets",
        False,
        "losses",
        **TWO,
        data__shuffle_merged_datasets=False,
    ),
    row("data.dataset_num_proc", 1, "prepared"),
    row("data.dataset_shard_num", 3, "size", **SHARDED),
    row("data.dataset_shard_idx", 1, "losses", **SHARDED),
    row("data.num_dataset_shards_to_save", 3, "arrow"),
    row("data.skip_prepare_dataset", True, "prepared"),
    row("train.data_parallel_mode", "fsdp2", "units"),
    row("train.data_parallel_shard_size", 4, "plan", **EIGHT),
    row("train.data_parallel_replicate_size", 2, "plan", **EIGHT),
    row("train.pipeline_parallel_size", 2, "plan", **EIGHT, **STEPS),
    row("train.pipeline_parallel_schedule", "GPipe", "plan", **PIPELINE),
    row(
        "train.virtual_pipeline_size",
        3,
        "plan",
        **PIPELINE | {"model__config_path": "@deeper"},
        train__pipeline_parallel_schedule="Interleaved1F1B",
        train__virtual_pipeline_size=2,
    ),
    row("train.pipeline_split", [1, 2], "plan", **PIPELINE, model__config_path="@deep"),
    row("train.pp_variable_seq_lengths", False, "plan", **PIPELINE),
    row("train.tensor_parallel_size", 2, "plan", **EIGHT, model__merge_qkv=False),
    row("train.expert_parallel_size", 2, "plan", **EIGHT),
    row("train.ulysses_parallel_size", 2, "plan", **EIGHT),
    row("train.ringattn_parallel_size", 2, "plan", **EIGHT),
    row("train.cp_fsdp_mode", "none", "plan", **EIGHT, train__ringattn_parallel_size=2),
    row("train.ep_outside", True, "plan", **EIGHT, train__expert_parallel_size=2),
    row("train.reshard_after_forward", False, "resharded", **FSDP2),
    row("train.enable_full_shard", False, "resharded", **FSDP2),
    row("train.enable_forward_prefetch", False, "prefetched", **FSDP2),
    row("train.optimizer", "muon", "weights"),
    row("train.optimizer_dtype", "fp32", "weights", train__optimizer="anyprecision_adamw"),
    row("train.adam_beta1", 0.5, "weights"),
    row("train.adam_beta2", 0.5, "weights"),
    row("train.adam_epsilon", 1.0, "weights"),
    row("train.muon_lr", 0.1, "weights", **MUON),
    row("train.muon_momentum", 0.5, "weights", **MUON),
    row("train.muon_nesterov", False, "weights", **MUON),
    row("train.muon_ns_steps", 3, "weights", **MUON),
    row("train.muon_ns_coefficients", "polar_express", "weights", **MUON),
    row("train.muon_adjust_lr_fn", "match_rms_adamw", "weights", **MUON),
    row("train.lr", 2e-2, "weights"),
    row("train.lr_min", 5e-3, "weights", **DECAY),
    row("train.lr_start", 5e-3, "weights", **WARM),
    row("train.lr_warmup_ratio", 0.6, "weights"),
    row("train.lr_decay_style", "cosine", "weights"),
    row("train.lr_decay_ratio", 0.5, "weights", **DECAY),
    row("train.lr_warmup_steps", 2, "weights"),
    row("train.lr_decay_steps", 2, "weights", **DECAY),
    row("train.lr_constant_steps", 2, "weights", train__lr_decay_style="cosine_annealing"),
    row("train.lr_cycles", 1.5, "weights", train__lr_decay_style="cosine"),
    row("train.lr_power", 2.0, "weights", train__lr_decay_style="polynomial"),
    row("train.lr_step_size", 1, "weights", **STAIRS, train__lr_step_size=2),
    row("train.lr_gamma", 0.1, "weights", **STAIRS, train__lr_step_size=2),
    row("train.weight_decay", 0.5, "weights"),
    row("train.no_decay_modules", ["norm"], "weights", train__weight_decay=0.5),
    row("train.no_decay_params", ["layernorm"], "weights", train__weight_decay=0.5),
    row("train.layerwise_lr_bound", 0.5, "weights"),
    row("train.loss_temperature", 2.0, "losses"),
    row("train.z_loss", 0.1, "losses"),
    row("train.max_grad_norm", 1e-3, "weights", train__optimizer="sgd"),
    row("train.hidden_dropout", 0.3, "losses"),
    row("train.attention_dropout", 0.3, "losses"),
    row("train.ffn_dropout", 0.3, "losses"),
    row("train.dropout_warmup_steps", 2, "losses", train__hidden_dropout=0.3),
    row("train.micro_batch_size", 2, "tokens"),
    row("train.gradient_accumulation_steps", 2, "tokens"),
    row("train.num_train_epochs", 2, "steps", **BY_EPOCHS),
    row("train.max_steps", 2, "steps"),
    row("train.eval_strategy", "no", "evaluations", **EVAL),
    row("train.eval_steps", 3, "evaluations", **EVAL_STEPS),
    row("train.eval_epochs", 2, "evaluations", **EVAL_EPOCHS),
    row("train.eval_on_start", False, "evaluations", **EVAL),
    row("train.eval_sanity_batches", 1, "loaders", **EVAL),
    row("train.eval_max_batches", 1, "loaders", **EVAL),
    row("train.eval_micro_batch_size", 2, "loaders", **EVAL),
    row("train.enable_mixed_precision", True, "losses"),
    row("precision.recipe", "block_fp8", "losses"),
    row("precision.exclude", ["o_proj"], "losses", **RECIPE),
    row("precision.experts", False, "losses", **MOE, **RECIPE),
    row("precision.implementation", "eager", "ops", **RECIPE),
    row("train.enable_gradient_checkpointing", True, "attentions"),
    row("train.enable_reentrant", True, "recomputed", **RECOMPUTE),
    row("train.recompute_modules", ["mlp"], "recomputed", **RECOMPUTE),
    row("train.moe_checkpoint_method", "moe_act", "routed", **RECOMPUTE, **MOE),
    row("train.router_replay", True, "losses", **MOE, data__datasets="@routes"),
    row("train.router_replay_compare_steps", 2, "compared_steps", **REPLAYED),
    row("train.freeze_router", True, "gates", **MOE),
    row("train.enable_compile", True, "compiled", model__attn_implementation="sdpa"),
    row("train.load_weights_mode", "all_ranks", "read", model__model_path="@weights"),
    row(
        "train.enable_full_determinism",
        True,
        "deterministic",
        train__allow_cuda_launch_blocking=True,
    ),
    row("train.empty_cache_steps", 1, "emptied"),
    row("train.gc_steps", 1, "collected"),
    row("train.output_dir", "@elsewhere", "folders"),
    row("train.save_strategy", "best", "checkpoints", **EVAL_BEST),
    row("train.save_steps", 2, "checkpoints"),
    row("train.save_epochs", 0.125, "checkpoints"),
    row("train.save_total_limit", 1, "checkpoints", train__save_steps=1),
    row("train.best_metric", "eval_loss", "best", **EVAL_STEPS),
    row("train.best_mode", "max", "best", **EVAL_BEST),
    row("train.save_best", True, "checkpoints", **EVAL_BEST),
    row("train.save_async", True, "asynchronous"),
    row("train.save_optimizer", False, "stored"),
    row("train.save_hf_weights", True, "exported"),
    row("train.load_checkpoint_path", "@checkpoint", "logged_steps"),
    row("train.load_optimizer", False, "logged_steps", **RESUMED),
    row("train.verify_checkpoint", False, "resumed", train__load_checkpoint_path="@flipped"),
    row("train.allow_other_base", True, "resumed", model__model_path="@weights", **OF_OTHERS),
    row(
        "train.accept_changes",
        ["data"],
        "resumed",
        **TWO,
        **OF_OTHERS,
        model__model_path="@weights2",
    ),
    row("train.certify", False, "certified"),
    row("train.checksum_steps", 2, "checksums"),
    row("train.assert_deterministic", "@earlier", "asserted"),
    row("train.log_format", "structured", "said", train__max_steps=60, train__micro_batch_size=1),
    row("train.log_steps", 3, "said"),
    row("train.use_wandb", True, "wandb"),
    row("train.wandb_project", "p", "wandb", **WANDB),
    row("train.wandb_name", "n", "wandb", **WANDB),
    row("train.wandb_tags", ["t"], "wandb", **WANDB),
    row("train.wandb_log_interval", 2, "wandb", **WANDB),
    row("train.use_tensorboard", True, "board"),
    row("train.log_dir", "@elsewhere", "board", train__use_tensorboard=True),
    row("train.plot_loss", True, "pictures"),
    row("train.log_norms", ["gradients"], "reported"),
    row("train.profile_start_step", 2, "traced_steps", **PROFILE | {"train__profile_end_step": 3}),
    row("train.profile_end_step", 3, "traced_steps", **PROFILE),
    row("train.profile_trace_dir", "@trace2", "folders", **PROFILE),
    row("train.profile_record_shapes", False, "traced_shapes", **PROFILE),
    row("train.profile_profile_memory", False, "traced_memory", **PROFILE),
    row("train.profile_with_stack", True, "traced_stacks", **PROFILE),
    row("train.profile_rank0_only", False, "second_rank_profiles", **PROFILE),
    row("train.seed", 7, "losses"),
    row("lora.enable_lora", True, "names"),
    row("lora.lora_rank", 3, "parameters", **LORA),
    row("lora.lora_alpha", 4.0, "weights", **LORA),
    row("lora.rslora", True, "weights", **LORA),
    row("lora.use_dora", True, "names", **LORA),
    row("lora.lora_target_modules", ["o_proj"], "names", **LORA),
    row("lora.moe_shared_lora", True, "parameters", **MOE, **LORA),
    row("lora.moe_hybrid_shared_lora", True, "parameters", **MOE, **LORA),
    row("lora.lora_plus_scale", 4.0, "weights", **LORA),
    row("lora.save_lora_only", True, "exported", **SAVED, train__save_hf_weights=True),
    row("lora.save_base", True, "stored", **SAVED),
    row("lora.enable_qlora", True, "losses", **LORA),
    row("lora.quant_format", "nvfp4", "losses", **FP8),
    row("lora.quant_group_size", 32, "losses", **QLORA),
    row("lora.exclude_modules", ["o_proj"], "losses", **QLORA),
    row("lora.merge_lora_interval", 2, "weights", **LORA),
    row("lora.reset_optimizer_on_merge", True, "weights", **LORA, lora__merge_lora_interval=2),
    row("lora.enable_aqn", True, "losses", **QLORA),
    row("lora.aqn_alpha", 2.0, "losses", **QLORA, lora__enable_aqn=True),
    row("train.loss", "preference", "losses", **REWARD),
    row("policy.loss", "reinforce", "losses", **POLICY),
    row("policy.average", "documents", "losses", **POLICY),
    row("policy.clip_low_threshold", 0.95, "losses", **POLICY),
    row("policy.clip_high_threshold", 1.05, "losses", **POLICY),
    row("policy.dual_clip", 1.05, "losses", **PPO),
    row("policy.use_tis", True, "losses", **PPO),
    row("policy.tis_clip_low", 0.9, "losses", **TIS),
    row("policy.tis_clip_high", 1.1, "losses", **TIS),
    row("policy.icepop_beta", 1.05, "weights", **PPO),
    row("policy.beta", 0.5, "losses", **GRPO),
    row("policy.kl_type", "k1", "losses", **GRPO, policy__beta=0.5),
    row("policy.ratio_type", "sequence", "losses", **GRPO),
    row("preference.loss", "hinge", "losses", **DPO),
    row("preference.beta", 0.5, "losses", **DPO),
    row("preference.label_smoothing", 0.2, "losses", **DPO),
    row("preference.simpo_gamma", 1.5, "losses", **DPO, preference__loss="simpo"),
    row(
        "preference.dpop_lambda",
        5.0,
        "losses",
        **DPO,
        preference__loss="dpop",
        preference__reference_path="@weights2",  # which finds chosen answers more probable
    ),
    row("preference.offset_alpha", 0.5, "losses", **DPO),
    row("preference.loss_ratio", 2.0, "losses", **DPO),
    row("preference.sft_ratio", 0.5, "losses", **DPO),
    row("preference.kto_desirable_weight", 0.0, "losses", **KTO),
    row("preference.kto_undesirable_weight", 2.0, "losses", **KTO),
    row("preference.kl_scope", "step", "losses", **KTO, train__gradient_accumulation_steps=2),
    row("preference.max_prompt_len", 2, "size", **DPO),
    row("preference.truncation_mode", "keep_end", "losses", **CUT),
    row("preference.share_prefix", True, "size", **DPO),
    row("preference.reference", "none", "losses", **DPO),
    row("preference.reference_path", "@weights2", "losses", **DPO),
    row("preference.reference_update_steps", 1, "losses", **DPO),
    row("preference.reference_ema", 0.5, "losses", **MOVING),
    row("distillation.divergence", "reverse", "losses", **TEACHER),
    row("distillation.beta", 0.2, "losses", **TEACHER, distillation__divergence="jsd"),
    row("distillation.outside", "renormalize", "losses", **TEACHER),
    row("distillation.temperature", 2.0, "losses", **TEACHER),
    row("distillation.cross_entropy_share", 0.5, "losses", **TEACHER),
    row("reward.center_rewards_coefficient", 0.5, "losses", **REWARD),
    row("train.eval_accuracy", True, "evaluated", **EVAL),
]


# Fields whose effect needs another machine or the network: the test that covers them.
HELD = {
    "train.sparse_head": "test_sparse_head.py::test_ranks_train_as_without",
    "precision.hadamard": "test_low_precision.py::test_a_transform_changes_what_is_rounded",
    "precision.type": "test_precision.py::test_a_run_trains_as_in_float32",
    "precision.master_weights": "test_precision.py::test_a_run_trains_as_in_float32",
    "precision.fp32_grad_acc": "test_precision.py::test_what_a_type_resolves_to",
    "precision.stochastic_rounding": "test_precision.py::test_a_run_trains_as_in_float32",
    "precision.tensor_parallel_reduce_dtype": "test_precision.py::test_sums_of_a_layer_have_a_dtype",
    "data.datasets.weight": "test_mixing.py::test_a_run_is_given_the_mixture",
    "train.enable_profiling": "test_trainer.py::test_a_profile_is_written_when_asked_for",
    "train.do_test": "test_evaluation.py::test_a_test_split_is_evaluated_once_after_the_last_step",
    "train.test_max_batches": "test_evaluation.py::test_a_test_split_is_cut_to_its_own_limit",
    "model.revision": "test_commands.py::test_what_the_hub_is_asked_for",
    "data.datasets.name": "test_data.py::test_what_the_network_is_asked_for",
    "data.datasets.revision": "test_data.py::test_what_the_network_is_asked_for",
    "data.hf_use_auth_token": "test_data.py::test_what_the_network_is_asked_for",
    "data.push_dataset_to_hub": "test_data.py::test_what_is_pushed",
    "data.datasets.trust_remote_code": "test_config.py::test_unsupported_fields_are_refused_with_their_sentence",
    "train.allow_cuda_launch_blocking": "test_config.py::test_rules_of_the_machine",
    "train.init_device": "test_config.py::test_rules_of_the_machine",
    "preference.reference_cache": "test_references.py::test_another_reference_is_refused_with_both",
    "distillation.top_k": "test_distillation.py::test_a_step_is_that_of_a_plain_loop_over_all_logits",
    "train.optimizer_args": "test_extend.py::test_each_file_of_the_page_is_a_row",
    "train.callbacks": "test_extend.py::test_each_file_of_the_page_is_a_row",
    "data.datasets.type_args": "test_extend.py::test_rows_of_another_package_have_options",
    "train.loss_args": "test_extend.py::test_rows_of_another_package_have_options",
    "train.lr_decay_args": "test_extend.py::test_rows_of_another_package_have_options",
    "train.callback_args": "test_extend.py::test_rows_of_another_package_have_options",
    "train.layout_args": "test_extend.py::test_copies_of_the_page_train_apart",
    "train.enable_activation_offload": "test_memory.py::test_offloaded_activations_give_the_same_bits",
    "train.activation_gpu_limit": "test_memory.py::test_offloaded_activations_give_the_same_bits",
    "train.ignore_memory_plan": "test_memory.py::test_what_does_not_fit_is_not_started",
    "train.ckpt_manager": "test_checkpoint.py::test_an_asynchronous_checkpoint_is_of_its_step",
}


# Other fields of which one value is accepted, and why.
REFUSED = {
    path: why
    for path, field in leaves(Config).items()
    if (why := properties(field).refused)
    and not path.startswith("data.test_datasets.")
    and path not in HELD
}


def make_world(root):
    """Files that values with @ name, and observations of finished runs."""

    def rows(name, *samples):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(s) + "\n" for s in samples))
        return str(path)

    def ids(seed, n=16):
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(6, 28, (n,), generator=draw).tolist()
        return [torch.randint(0, 97, (k,), generator=draw).tolist() for k in lengths]

    def model(name, shape):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(shape))
        return str(root / name)

    def tokenizer(name, words):
        from tokenizers import Tokenizer, models, pre_tokenizers

        made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["[UNK]", *words])}, "[UNK]"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=made, unk_token="[UNK]"
        ).save_pretrained(root / name)
        return str(root / name)

    main = rows("main.jsonl", *({"input_ids": x} for x in ids(0)))
    other = rows("other.jsonl", *({"input_ids": x} for x in ids(1)))
    texts = [" ".join(WORDS[(i * j) % 40] for j in range(1, 20)) for i in range(16)]
    both = rows(
        "both.jsonl",
        *({"input_ids": x, "text": t} for x, t in zip(ids(2), texts, strict=True)),
    )
    masked = [{"input_ids": x, "labels": [-100] * 3 + x[3:]} for x in ids(3)]
    routes = [
        {"input_ids": x, "routed_experts": [[[2 * (i % 2), 3], [i % 3, 3]] for i in range(len(x))]}
        for x in ids(6)
    ]
    policy, teacher = [], []
    for x in ids(8):
        near = [-4.6 + 0.3 * ((5 * t) % 3 - 1) for t in x]
        older = [p + 0.2 * (t % 3 - 1) for p, t in zip(near, x, strict=True)]
        named = {"old_logprob": near, "rollout_logprob": older, "reference_logprob": older}
        policy.append({"input_ids": x, "advantage": [(t % 5) - 2.0 for t in x], **named})
        entries = [[t, (t + 1) % 97, (t + 2) % 97] for t in x]
        logprobs = [[-0.7, -1.5, -2.5 - (t % 2)] for t in x]
        teacher.append({"input_ids": x, "teacher_ids": entries, "teacher_logprobs": logprobs})
    pairs, answers = [], []
    for i, x in enumerate(ids(9)):
        parts = {"prompt_ids": x[:4], "chosen_ids": x[4:8], "rejected_ids": x[3:9][::-1]}
        parts = {k: v + [i + 1] * (4 if k == "prompt_ids" else 2) for k, v in parts.items()}
        pairs.append({**parts, "chosen_score": 2.0 + i, "rejected_score": 1.0})
        answer = {"prompt_ids": parts["prompt_ids"], "completion_ids": parts["chosen_ids"]}
        answers.append({**answer, "label": i % 2 == 0})
    rows("files/a.jsonl", *({"input_ids": x} for x in ids(4)))
    rows("files/b.jsonl", *({"input_ids": x} for x in ids(5)))
    rows("mixed/a.jsonl", *({"text": t} for t in texts))
    for i, text in enumerate(reversed(texts)):
        (root / f"mixed/{i}.txt").write_text(text)
    names = {
        "main": [{"path": main}],
        "two": [{"path": main}, {"path": other}],
        "tests": [{"path": other}],
        "text": [{"path": both, "type": "text"}],
        "both": [{"path": both}],
        "routes": [{"path": rows("routes.jsonl", *routes)}],
        "labels": [{"path": rows("labels.jsonl", *masked)}],
        "policy": [{"path": rows("policy.jsonl", *policy)}],
        "teacher": [{"path": rows("teacher.jsonl", *teacher)}],
        "pairs": [{"path": rows("pairs.jsonl", *pairs), "type": "preference_tokenized"}],
        "answers": [
            {"path": rows("answers.jsonl", *answers), "type": "unpaired_preference_tokenized"}
        ],
        "scored": model("scored", {**DENSE, "pad_token_id": 0}),
        "shards": [{"path": main, "shards": 2, "shards_idx": 0}],
        "files": [{"path": str(root / "files"), "data_files": "a.jsonl", "ds_type": "json"}],
        "mixed": [{"path": str(root / "mixed"), "ds_type": "json", "type": "text"}],
        "other": other,
        "dense": model("dense", DENSE),
        "deep": model("deep", {**DENSE, "num_hidden_layers": 3}),
        "deeper": model("deeper", {**DENSE, "num_hidden_layers": 6}),
        "moe": model("moe", EXPERTS),
        "tokenizer": tokenizer("tokenizer", WORDS),
        "tokenizer2": tokenizer("tokenizer2", WORDS[::-1]),
    }
    for name in FOLDERS:
        names[name] = str(root / name)
    (root / "wandb_here").mkdir()
    (root / "wandb_here/wandb.py").write_text(
        "calls = []\n"
        "class Run:\n"
        "    def log(self, values, step): calls.append((step, sorted(values)))\n"
        "    def finish(self): calls.append('finish')\n"
        "def init(config, **options):\n"
        "    calls.append({'steps': config['train']['max_steps'], **options})\n"
        "    return Run()\n"
    )
    (root / "wandb_here/tensorboard.py").touch()
    world = types.SimpleNamespace(root=root, names=names, seen={}, count=0)
    saved = observe(world, {"train.save_hf_weights": True})
    world.names["earlier"] = str(saved["output"])
    world.names["checkpoint"] = str(saved["output"] / "checkpoints/global_step_4")
    world.names["weights"] = str(saved["output"] / "checkpoints/global_step_4/hf")
    others = observe(world, {"train.save_hf_weights": True, "train.seed": 7})
    world.names["weights2"] = str(others["output"] / "checkpoints/global_step_4/hf")
    of_others = observe(world, {"model.model_path": "@weights2", "train.max_steps": 2})
    flipped = world.names["flipped"] = str(root / "flipped")
    shutil.copytree(world.names["checkpoint"], flipped)
    metadata = checkpoint_files.read_metadata(pathlib.Path(flipped, "dcp"))
    piece = max(metadata.storage_data.values(), key=lambda piece: piece.length)
    file = pathlib.Path(flipped, "dcp", piece.relative_path)
    data = bytearray(file.read_bytes())
    data[piece.offset + piece.length // 2] ^= 1  # of the tensor, not of what describes it
    file.write_bytes(data)
    world.names["of_others"] = str(of_others["output"] / "checkpoints/global_step_2")
    return world


FOLDERS = ("prepared", "elsewhere", "trace", "trace2")  # that fields name


def settings_of(world, changes):
    world.count += 1
    for name in FOLDERS:  # what a run before has left
        shutil.rmtree(world.root / name, ignore_errors=True)
    tree = {
        "model": {"config_path": "@dense"},
        "data": {
            "datasets": "@main",
            "sample_packing_sequence_len": 32,
            "dataset_prepared_path": str(world.root / f"cache{world.count}"),
            "pad_to_multiple_of": 4,
        },
        "train": {
            "output_dir": str(world.root / f"out{world.count}"),
            "data_parallel_mode": "none",
            "lr": 1e-2,
            "max_steps": 4,
            "enable_mixed_precision": False,
            "enable_gradient_checkpointing": False,
            "save_epochs": 0,
            "save_hf_weights": False,
            "gc_steps": 0,
        },
        **{name: {} for name in Config.model_fields if name not in ("model", "data", "train")},
    }

    def value(v):
        if isinstance(v, str) and v.startswith("@"):
            v = world.names[v[1:]]
        return json.loads(json.dumps(v))

    for section in tree.values():
        for name in section:
            section[name] = value(section[name])
    for path, v in sorted(changes.items(), key=lambda item: item[0].count(".")):
        *parents, last = path.split(".")
        node = tree
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node[part]
        node[last] = value(v)
    if "model.model_path" in changes:
        del tree["model"]["config_path"]
    if changes.get("train.use_wandb"):
        tree["data"]["val_set_size"] = 2
    return tree


@contextlib.contextmanager
def spies(seen):
    """Counts and records effects of a run that its files do not show."""
    with pytest.MonkeyPatch.context() as patch:

        def spy(owner, name, note):
            real = getattr(owner, name)

            @functools.wraps(real)
            def called(*args, **options):
                note(*args, **options)
                return real(*args, **options)

            patch.setattr(owner, name, called)

        def keep(key, pick):
            seen[key] = []
            return lambda *args, **options: seen[key].append(pick(*args, **options))

        spy(torch.utils.data, "DataLoader", keep("loaders", loader_options))
        spy(tw, "attention", keep("attentions", lambda *a, **k: 1))
        spy(tw, "qk_norm_rope", keep("operators", lambda *a, **k: "qk_norm_rope"))
        spy(tw, "linear_cross_entropy", lambda *a, **k: seen["operators"].append("fused head"))
        spy(recompute, "checkpoint", keep("recomputed", recompute_options))
        spy(tw, "route", keep("routed", lambda *a, **k: 1))
        spy(
            hf,
            "load_weights",
            keep("read", lambda *a, mode, **k: mode),
        )
        spy(checkpoint.state_dict_saver, "async_save", keep("asynchronous", lambda *a, **k: 1))
        spy(
            engine.Engine,
            "forward_backward",
            keep("shapes", lambda self, given, loss: [b["input_ids"].shape[1] for b in given]),
        )
        spy(gc, "collect", keep("collected", lambda *a, **k: 1))
        spy(
            preparing,
            "encoded",
            keep("prepared", lambda source, encoder, count: (count, encoder.use.skips)),
        )
        spy(
            packing,
            "ProcessPoolExecutor",
            keep("packing_processes", lambda n, mp_context, **_: mp_context.get_start_method()),
        )
        spy(
            engine.Engine,
            "optim_step",
            keep("deterministic", lambda *a, **k: torch.are_deterministic_algorithms_enabled()),
        )
        real_prepare = loop.prepare
        seen["compiled"] = []

        def uncompiled(method, *, fullgraph):
            """Runs the method as it is: that Dynamo takes it is test_trainer.py's."""
            return lambda *args: seen["compiled"].append(method.__name__) or method(*args)

        patch.setattr(torch, "compile", uncompiled)

        def prepare(*args):
            seen["run"] = real_prepare(*args)
            return seen["run"]

        patch.setattr(loop, "prepare", prepare)
        yield


def loader_options(bins, *, batch_sampler, num_workers, prefetch_factor, pin_memory, **_):
    return num_workers, prefetch_factor, pin_memory, len(bins), len(batch_sampler)


def recompute_options(function, *args, use_reentrant):
    function = getattr(function, "func", function)
    return type(getattr(function, "__self__", None)).__name__, use_reentrant


class Board:
    """A SummaryWriter that keeps what it is given."""

    def __init__(self, kept, folder, **_):
        self.kept = kept
        kept.append(pathlib.Path(folder).name)

    def add_scalar(self, *given):
        self.kept.append(given)

    def close(self):
        self.kept.append("closed")


@contextlib.contextmanager
def packages(world):
    """With those that fields ask for. Yields what a board is given."""
    kept = []
    board = types.SimpleNamespace(SummaryWriter=functools.partial(Board, kept))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(world.root / "wandb_here")
        patch.setitem(sys.modules, "torch.utils.tensorboard", board)
        yield kept


def observe(world, changes):
    """Runs the command and returns its observations by name. "sentence": its error
    message instead.
    """
    tree, seen = settings_of(world, changes), {}
    path = world.root / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    said = io.StringIO()
    with packages(world) as seen["board"]:
        try:
            config = load(str(path))
        except ConfigError as error:
            return {"sentence": str(error)}
        with spies(seen), contextlib.redirect_stdout(said):
            code = train.main([str(path)])
    if changes.get("train.load_checkpoint_path") in ("@of_others", "@flipped"):
        return {"resumed": code == 0}
    out = pathlib.Path(config.train.output_dir)
    assert code == 0, f"{changes}: {said.getvalue()}"
    return seen | outcome(seen.pop("run"), config, out, said.getvalue(), world)


def outcome(run, config, out, said, world):
    model = run.engine.model
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    logged = [r for r in rows if "loss" in r]
    state = {n: p.detach() for n, p in model.named_parameters()}
    checkpoints = out / "checkpoints"
    units = [
        (n, m) for n, m in model.named_modules() if isinstance(m, torch.distributed.fsdp.FSDPModule)
    ]
    groups = [m._get_fsdp_state()._fsdp_param_group for _, m in units]
    wandb = sys.modules.pop("wandb", None)
    prepared = pathlib.Path(config.data.dataset_prepared_path)
    return {
        "sentence": "",
        "output": out,
        "losses": [r["loss"] for r in logged],
        "tokens": [r["tokens"] for r in logged],
        "steps": run.plan.total,
        "logged_steps": [r["step"] for r in logged],
        "compared_steps": [r["step"] for r in logged if "logprob_difference" in r],
        "certified": (out / "certificate.json").is_file(),
        "checksums": [r["step"] for r in records.rows(out / "checksums.jsonl")],
        "reported": sorted({key for r in logged for key in r}),
        "asserted": [line for line in said.splitlines() if line.startswith("deterministic:")],
        "evaluated": sorted({key for r in rows if "eval_loss" in r for key in r}),
        "evaluations": [r["step"] for r in rows if "eval_loss" in r],
        "weights": fingerprint(state),
        "gates": torch.equal(*gates(model, config)),
        "names": sorted(state),
        "parameters": sum(p.numel() for p in state.values()),
        "size": run.batches.bins.tokens,
        "ops": next(line for line in said.splitlines() if line.startswith("ops:")),
        "said": sum(line.startswith("step=") for line in said.splitlines()),
        "units": [n for n, _ in units],
        "resharded": [g.post_forward_mesh_info is not None for g in groups],
        "prefetched": [len(m._get_fsdp_state()._states_to_forward_prefetch) for _, m in units],
        "checkpoints": sorted(p.name for p in checkpoints.glob("global_step_*")),
        "stored": [
            [checkpoint_files.read_state(p)[part] for part in ("weights", "optimizer")]
            for p in sorted(checkpoints.glob("global_step_*"))
        ],
        "best": [checkpoint_files.read_state(p).get("best") for p in sorted(checkpoints.glob("*"))],
        "pictures": sorted(p.name for p in out.glob("*.png")),
        "exported": sorted(p.name for p in checkpoints.glob("*/hf/*")),
        "folders": [
            pathlib.Path(p).is_dir()
            for p in (world.root / "prepared", world.root / "elsewhere", world.root / "trace2")
        ],
        "arrow": len([*prepared.rglob("*.arrow")]),
        "wandb": None if wandb is None else wandb.calls,
        "pinned": pinned(run, config),
        "emptied": emptied(config),
        "second_rank_profiles": housekeeping.profiler(config.train, Mesh(rank=1)) is not None,
        **traces(config),
    }


def fingerprint(state):
    digest = hashlib.sha256()
    for name in sorted(state):
        t = state[name]
        digest.update(
            name.encode() + (t.full_tensor() if hasattr(t, "full_tensor") else t).numpy().tobytes()
        )
    return digest.hexdigest()


def gates(model, config):
    """The routers' weights now and at the start."""
    now = [m.gate.weight.detach() for m in model.modules() if isinstance(m, MoE)]
    if not now:
        return torch.zeros(1), torch.zeros(1)
    fresh = build.Transformer(model.config, model.ops)
    init_weights(fresh, config.train.seed)
    then = [m.gate.weight.detach() for m in fresh.modules() if isinstance(m, MoE)]
    return torch.stack(now), torch.stack(then)


def pinned(run, config):
    """Whether batches for a GPU are pinned."""
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.utils.data, "DataLoader", lambda *a, **k: kept.append(k["pin_memory"]) or [[]]
        )
        list(batches.evaluation_batches(run.batches.bins, 1, 0, 1, pin=True))
    return kept


def emptied(config):
    """How often a GPU's cache is emptied in four steps."""
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "empty_cache", lambda: kept.append(1))
        quiet = config.train.model_copy(update={"enable_profiling": False, "gc_steps": 0})
        run = types.SimpleNamespace(
            config=types.SimpleNamespace(train=quiet), mesh=Mesh(device=torch.device("cuda"))
        )
        keeper = housekeeping.Housekeeping(run)
        for number in range(1, 5):
            keeper.after_step(Step(number, []))
    return kept


def traces(config):
    folder = pathlib.Path(config.train.profile_trace_dir)
    found = sorted(folder.glob("*.json")) if config.train.enable_profiling else []
    names = ("traced", "traced_steps", "traced_shapes", "traced_memory", "traced_stacks")
    if not found:
        return dict.fromkeys(names, 0)
    text = found[-1].read_text()
    for file in found:
        file.unlink()
    steps = sorted(set(re.findall(r"ProfilerStep#\d+", text)))
    stacks = text.count('"python_function"') > 0
    return dict(
        zip(names, (1, steps, "Input Dims" in text, '"[memory]"' in text, stacks), strict=True)
    )


BEGIN, END = "<!-- changes: generated -->", "<!-- end of changes -->"


def table():
    lines = [
        "Written by `python tests/lib/field_effects.py docs/trainer/fields.md`. A test runs the trainer",
        "twice for each row, with nothing else changed, and checks that the two runs differ as the row",
        "says.",
        "",
        "| field | other value | what differs | in runs with |",
        "|---|---|---|---|",
    ]
    for r in ROWS:
        value = f"`{json.dumps(r.value)}`".replace("|", "\\|")
        base = ", ".join(f"{k} = {json.dumps(v)}" for k, v in r.base)
        lines.append(f"| `{r.path}` | {value} | {r.differs.replace('_', ' ')} | {base} |")
    lines += [f"| `{path}` | | held by `{test}` | |" for path, test in HELD.items()]
    lines += [f"| `{path}` | | refused: {why} | |" for path, why in REFUSED.items()]
    return "\n".join(lines)


def page(text):
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    file = pathlib.Path(sys.argv[1])
    file.write_text(page(file.read_text()))
