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
from tilewright.trainer.field_tree import leaves
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
    preference.truncation_mode precision.recipe precision.exclude precision.experts
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
RANKS = "test_evaluate.py::test_bits_do_not_depend_on_ranks"
# What another test sees, with several ranks, another machine or the network.
HELD = {path: test for path, test in fields.HELD.items() if path not in BY_PATH} | {
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
    "precision.implementation": "test_low_precision.py::test_evaluation_computes_as_training_does",
    "distillation.top_k": "test_distillation.py::test_a_teacher_writes_what_transformers_says",
}
# Fields of training, its checkpoints and logs, and costs: a configuration to train with has them.
SAME = [r for r in BY_PATH.values() if r.path not in {*SCORES, *SEEN, *ERRORS, *HELD}]


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


def observed(world, changes):
    """The command's scores, what it is seen to do, and its error."""
    key = "evaluated", *sorted(changes.items(), key=str)
    if str(key) in world.seen:
        return world.seen[str(key)]
    file, seen, said = world.root / "scores.jsonl", {}, io.StringIO()
    file.unlink(missing_ok=True)
    with (
        fields.packages(world),
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


def accepted(world, changes):
    try:
        with fields.packages(world):
            return bool(load(written(world, changes), training=False))
    except ConfigError:
        return False


def test_fields_of_training_alone_change_no_score(world):
    same = {one.path for one in SAME}
    for changes, group in fields.grouped(SAME, lambda changes: accepted(world, changes)):
        rest = {k: v for k, v in changes.items() if k not in same}
        if "train.use_wandb" in changes:  # as `settings_of` sets it
            rest["data.val_set_size"] = 2
        found, alone = observed(world, changes), observed(world, rest)
        assert not found["error"], (changes, found["error"])
        assert found["scores"] == alone["scores"] is not None, [one.path for one in group]


def test_every_field_has_its_place_in_evaluate():
    every = [p for p in leaves(Config) if not p.startswith("data.test_datasets.")]
    placed = [*SCORES, *SEEN, *ERRORS, *(one.path for one in SAME), *HELD]
    refused = fields.REFUSED.keys() - {*placed}
    assert sorted([*placed, *refused]) == sorted(every)
    for path, test in HELD.items():
        file, _, name = test.partition("::")
        [found] = (ROOT / "tests").rglob(file)
        assert f"def {name}(" in found.read_text(), f"{path}: there is no {test}"
