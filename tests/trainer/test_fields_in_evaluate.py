"""Every field of the configuration in `tilewright.trainer.evaluate`: it changes what is computed,
changes nothing, since it is one of training alone, or is refused.

Values and settings are those of the rows of field_effects.py.
"""

import contextlib
import io

import pytest
import torch
import yaml

pytest.importorskip("pydantic")
pytest.importorskip("datasets")
pytest.importorskip("transformers")

import field_effects as fields
from field_effects import DPO, EVAL, MOE, REWARD, ROWS, row
from ranks import ROOT

from tilewright.trainer import evaluate
from tilewright.trainer.config import Config, ConfigError, load
from tilewright.trainer.config.field_tree import leaves
from tilewright.trainer.parallel.parts import Parts


def words(text):
    return text.split()


# Rows for a command that trains nothing.
OF_ADAPTERS = {"lora__enable_lora": True, "train__load_checkpoint_path": "@adapters"}
OWN = [
    row("model.model_path", "@weights2", "scores"),
    row("train.load_checkpoint_path", "@of_others", "scores"),
    row("train.load_optimizer", False, "scores", train__load_checkpoint_path="@of_others"),
    row("train.verify_checkpoint", False, "error", train__load_checkpoint_path="@flipped"),
    row("train.seed", 7, "scores", **EVAL),
    row("train.loss", "reward", "error", **DPO),
    row("train.enable_profiling", True, "scores"),
    row("data.shuffle_merged_datasets", False, "scores", **EVAL),
    row("data.shuffle_before_merging_datasets", False, "scores", **EVAL),
    row("data.mixing", "interleave_under", "scores", **EVAL, data__datasets="@two"),
    row("lora.enable_lora", True, "error", train__load_checkpoint_path="@adapters"),
    row("lora.lora_rank", 3, "error", **OF_ADAPTERS),
    row("lora.lora_alpha", 4.0, "error", **OF_ADAPTERS),
    row("lora.rslora", True, "error", **OF_ADAPTERS),
    row("lora.use_dora", True, "error", **OF_ADAPTERS),
    row("lora.lora_target_modules", ["o_proj"], "error", **OF_ADAPTERS),
]
LOADED = "train.load_checkpoint_path"
BY_PATH = {r.path: r for r in (*ROWS, *OWN)}

# What differs where the row's other value is given: the scores, what the run is seen to do, or the
# error of what does not fit to the weights.
SCORES = words(
    """
    model.model_path model.tokenizer_path model.attn_implementation model.moe_implementation
    model.merge_qkv model.router_fp32 model.lm_head_fp32 model.rmsnorm_native
    model.activation_native model.rope_native model.attention_cast_bf16 data.datasets
    data.datasets.path data.datasets.type data.datasets.split data.datasets.data_files
    data.datasets.ds_type data.datasets.max_seq_len data.datasets.max_samples
    data.datasets.shards data.datasets.shards_idx data.test_datasets data.select_columns
    data.val_set_size data.dataset_shard_num data.dataset_shard_idx
    data.shuffle_merged_datasets data.shuffle_before_merging_datasets data.mixing
    train.eval_max_batches train.enable_mixed_precision train.router_replay
    train.load_checkpoint_path train.seed lora.enable_qlora lora.quant_format
    lora.quant_group_size lora.exclude_modules preference.max_prompt_len
    preference.truncation_mode
    """
)
SEEN = words(
    """
    data.datasets.preprocess_shards data.on_bad_row data.sample_packing_method
    data.sample_packing_sequence_len data.sample_packing_group_size
    data.sample_packing_sequentially data.sample_packing_mp_start_method
    data.eval_sample_packing data.dataloader_num_workers data.dataloader_prefetch_factor
    data.dataset_num_proc data.pad_to_multiple_of train.micro_batch_size
    train.eval_micro_batch_size train.enable_compile train.load_weights_mode
    train.enable_full_determinism
    """
)
ERRORS = words(
    """
    train.loss model.config_path model.foundation data.skip_prepare_dataset train.verify_checkpoint
    lora.enable_lora lora.lora_rank lora.lora_alpha lora.rslora lora.use_dora
    lora.lora_target_modules
    """
)
# Of training, of its checkpoints and logs, and of costs: a configuration to train with has them.
SAME = words(
    """
    model.basic_modules data.dataset_prepared_path data.dataloader_drop_last
    data.dataloader_pin_memory data.num_dataset_shards_to_save data.samples_per_epoch
    train.data_parallel_mode train.reshard_after_forward train.enable_full_shard
    train.enable_forward_prefetch train.optimizer train.optimizer_dtype train.adam_beta1
    train.adam_beta2 train.adam_epsilon train.muon_lr train.muon_momentum train.muon_nesterov
    train.muon_ns_steps train.muon_ns_coefficients train.muon_adjust_lr_fn train.lr
    train.lr_min train.lr_start train.lr_warmup_ratio train.lr_decay_style
    train.lr_decay_ratio train.lr_warmup_steps train.lr_decay_steps train.lr_constant_steps
    train.lr_cycles train.lr_power train.lr_step_size train.lr_gamma train.weight_decay
    train.no_decay_modules train.no_decay_params train.layerwise_lr_bound train.z_loss
    train.max_grad_norm train.hidden_dropout train.attention_dropout train.ffn_dropout
    train.dropout_warmup_steps train.gradient_accumulation_steps train.num_train_epochs
    train.max_steps train.eval_strategy train.eval_steps train.eval_epochs train.eval_on_start
    train.eval_sanity_batches train.eval_accuracy train.enable_gradient_checkpointing
    train.enable_reentrant train.recompute_modules train.moe_checkpoint_method
    train.router_replay_compare_steps train.freeze_router train.empty_cache_steps
    train.gc_steps train.output_dir train.save_strategy train.save_steps train.save_epochs
    train.save_total_limit train.best_metric train.best_mode train.save_best train.save_async
    train.save_optimizer train.save_hf_weights train.load_optimizer train.checksum_steps
    train.assert_deterministic train.log_format train.log_steps train.use_wandb
    train.wandb_project train.wandb_name train.wandb_tags train.wandb_log_interval
    train.use_tensorboard train.log_dir train.plot_loss train.log_norms train.enable_profiling
    train.profile_start_step train.profile_end_step train.profile_trace_dir
    train.profile_record_shapes train.profile_profile_memory train.profile_with_stack
    train.profile_rank0_only train.loss_temperature lora.lora_plus_scale lora.save_lora_only
    lora.save_base lora.merge_lora_interval lora.reset_optimizer_on_merge lora.enable_aqn
    lora.aqn_alpha policy.loss policy.average policy.clip_low_threshold
    policy.clip_high_threshold policy.dual_clip policy.use_tis policy.tis_clip_low
    policy.tis_clip_high policy.icepop_beta policy.beta policy.kl_type policy.ratio_type
    preference.loss preference.beta preference.label_smoothing preference.simpo_gamma
    preference.dpop_lambda preference.offset_alpha preference.loss_ratio preference.sft_ratio
    preference.kto_desirable_weight preference.kto_undesirable_weight preference.kl_scope
    preference.share_prefix preference.reference preference.reference_path
    preference.reference_update_steps preference.reference_ema distillation.divergence
    distillation.beta distillation.outside distillation.temperature
    distillation.cross_entropy_share reward.center_rewards_coefficient
    """
)
RANKS = "test_evaluate.py::test_bits_do_not_depend_on_ranks"
# As in training.
ALSO_HELD = words(
    """
    model.revision data.datasets.name data.datasets.revision data.datasets.weight
    data.hf_use_auth_token train.allow_cuda_launch_blocking train.init_device
    train.optimizer_args train.callbacks train.layout_args train.enable_activation_offload
    train.activation_gpu_limit train.ignore_memory_plan train.ckpt_manager
    data.datasets.trust_remote_code preference.reference_cache
    """
)
# What another test sees: of several ranks, of another machine or of the network.
HELD = {path: fields.HELD[path] for path in ALSO_HELD} | {
    **{r.path: RANKS for r in ROWS if r.differs == "plan"},
    "model.batch_invariant": "test_evaluate.py::test_bits_do_not_depend_on_batches",
    "model.ep_dispatch": "test_config.py::test_rules_of_the_machine",
    "model.deepep_buffer_size_gb": "test_config.py::test_rule",
    "model.deepep_num_sms": "test_config.py::test_rule",
    "data.push_dataset_to_hub": "test_evaluate.py::test_evaluating_pushes_nothing",
    "train.do_test": "test_evaluate.py::test_a_run_s_limits_of_batches_are_those_of_evaluate",
    "train.test_max_batches": "test_evaluate.py::test_a_run_s_limits_of_batches_are_those_of_evaluate",
    "train.accept_changes": "test_resume.py::test_a_run_goes_on_with_what_it_was_made_of",
    "train.allow_other_base": "test_evaluate.py::test_adapters_over_other_weights_are_refused",
    "distillation.top_k": "test_distillation.py::test_a_teacher_writes_what_transformers_says",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    made = fields.make_world(tmp_path_factory.mktemp("evaluated"))
    weights = {"train.save_hf_weights": True}
    for name, base in (("moe", MOE), ("scored", REWARD)):
        run = fields.observe(made, {**dotted(base), **weights})
        made.names[f"{name}_weights"] = str(run["output"] / "checkpoints/global_step_4/hf")
    adapted = {"model.model_path": "@weights", "lora.enable_lora": True}
    run = fields.observe(made, adapted)
    made.names["adapters"] = str(run["output"] / "checkpoints/global_step_4")
    return made


def dotted(base):
    return {key.replace("__", "."): value for key, value in base.items()}


def with_weights(changes):
    """With those of the shape that they name."""
    shape = {"@moe": "@moe_weights", "@scored": "@scored_weights"}.get(
        changes.get("model.config_path"), "@weights"
    )
    made = {k: v for k, v in changes.items() if k != "model.config_path" or shape == "@weights"}
    return {"model.model_path": shape, **made}


def written(world, changes):
    file, given = world.root / "evaluate.yaml", with_weights(changes)
    tree = fields.settings_of(world, given)
    if shape := given.get("model.config_path"):  # beside the weights
        tree["model"]["config_path"] = world.names[shape[1:]]
    file.write_text(yaml.safe_dump(tree))
    return str(file)


@contextlib.contextmanager
def forwards(seen):
    """Lengths of batches, and whether algorithms are deterministic."""
    seen["forwards"], real = [], Parts.forward

    def forward(self, batches, loss):
        lengths = [b["input_ids"].shape[1] for b in batches]
        seen["forwards"].append((lengths, torch.are_deterministic_algorithms_enabled()))
        return real(self, batches, loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parts, "forward", forward)
        yield


@contextlib.contextmanager
def packages(world):
    """With those that fields ask for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(world.root / "wandb_here")
        yield


def observed(world, changes):
    """The command's scores, what it is seen to do, and its error."""
    key = "evaluated", *sorted(changes.items(), key=str)
    if str(key) in world.seen:
        return world.seen[str(key)]
    file, seen, said = world.root / "scores.jsonl", {}, io.StringIO()
    file.unlink(missing_ok=True)
    with (
        packages(world),
        fields.spies(seen),
        forwards(seen),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(said),
    ):
        code = evaluate.main([written(world, changes), "--scores", str(file)])
    found = {
        "scores": file.read_text() if file.exists() else None,
        "seen": seen,
        "error": said.getvalue() if code else "",
    }
    world.seen[str(key)] = found
    return found


@pytest.mark.parametrize("path", [*SCORES, *SEEN, *ERRORS])
def test_a_field_changes_what_is_evaluated(path, world):
    one = BY_PATH[path]
    differs = "scores" if path in SCORES else "seen" if path in SEEN else "error"
    base = dict(one.base)
    found = [observed(world, changes) for changes in (base, {**base, one.field: one.value})]
    if path not in ERRORS:
        assert not any(f["error"] for f in found)
    assert found[0][differs] != found[1][differs]


def grouped(world):
    """Settings that hold as many rows of SAME as fit together, with the fields that they test."""
    groups = []
    for path in SAME:
        one = BY_PATH[path]
        own = {**dict(one.base), one.field: one.value}
        for changes, paths in groups:
            # Weights and checkpoints are of one model.
            both = changes.keys() | own.keys()
            apart = LOADED in both or {"model.model_path", "model.config_path"} <= both
            fits = not apart and all(changes.get(k, v) == v for k, v in own.items())
            if fits and accepted(world, {**changes, **own}):
                changes |= own
                paths.append(path)
                break
        else:
            assert accepted(world, own), path
            groups.append((own, [path]))
    return groups


def accepted(world, changes):
    try:
        with packages(world):
            return bool(load(written(world, changes), training=False))
    except ConfigError:
        return False


def test_fields_of_training_alone_change_no_score(world):
    tested = []
    for changes, paths in grouped(world):
        rest = {k: v for k, v in changes.items() if k not in SAME}
        if "train.use_wandb" in changes:  # as `settings_of` sets it
            rest["data.val_set_size"] = 2
        found, alone = observed(world, changes), observed(world, rest)
        assert not found["error"], (changes, found["error"])
        assert found["scores"] == alone["scores"] is not None, paths
        tested += paths
    assert sorted(tested) == sorted(SAME)


def test_every_field_has_its_place_in_evaluate():
    every = [p for p in leaves(Config) if not p.startswith("data.test_datasets.")]
    placed = [*SCORES, *SEEN, *ERRORS, *SAME, *HELD]
    refused = fields.REFUSED.keys() - {*placed}
    assert sorted([*placed, *refused]) == sorted(every)
    for path, test in HELD.items():
        file, _, name = test.partition("::")
        [found] = (ROOT / "tests").rglob(file)
        assert f"def {name}(" in found.read_text(), f"{path}: there is no {test}"
