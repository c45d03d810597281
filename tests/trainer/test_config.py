"""Every field is read or rejected; all errors are reported at once; a loaded configuration can be
written and reloaded.
"""

import ast
import json
import pathlib
import pickle
import re
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("pydantic")

from tilewright.core import platform
from tilewright.trainer.config import (
    Config,
    ConfigError,
    Data,
    Lora,
    Model,
    Train,
    elsewhere,
    load,
    overrides,
    resolved,
)
from tilewright.trainer.config import config as module
from tilewright.trainer.config.elsewhere import SETTINGS, State
from tilewright.trainer.config.field_tree import get, kind, leaves
from tilewright.trainer.config.overrides import unknown
from tilewright.trainer.config.readers import Scope, readers
from tilewright.trainer.config.reference import meaning, page
from tilewright.trainer.config.section import Accepts, Only, Resume, kept, places, properties
from tilewright.trainer.losses.loss import Loss
from tilewright.trainer.parallel.mesh import layout_of
from tilewright.trainer.tables import LOSSES

pytestmark = pytest.mark.packages

ROOT = pathlib.Path(__file__).parents[2]
TRAINER = ROOT / "tilewright/trainer"
LEAVES = leaves(Config)
# Fields of which this version accepts some values only, with the rule.
REFUSED = {
    path: rule
    for path, field in LEAVES.items()
    for rule in properties(field).rules
    if isinstance(rule, Accepts) and not path.startswith("data.test_datasets.")
}
LEAST = (
    "model: {config_path: nowhere}\ndata: {datasets: [{path: dummy}]}\ntrain: {output_dir: out}\n"
)

# By library, lines of every name of its configuration, and of titles; and the names alone.
LISTS = {p.stem: p.read_text() for p in sorted((ROOT / "tests/trainer/references").glob("*.txt"))}
LISTED = {who: [n for n in t.splitlines() if not n.startswith("#")] for who, t in LISTS.items()}


@pytest.fixture(autouse=True)
def _plain_machine(monkeypatch):
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def least(write):
    """Loads the smallest configuration, modified by arguments."""
    path = write(LEAST)
    return lambda *arguments: load(path, list(arguments))


def errors(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return caught.value.problems


# ---- the fields


def test_every_field_of_the_reference_exists_and_others_say_that_it_has_none():
    expected = {*LISTED["xorl"]}
    entries = {path for path in LEAVES if path.startswith("data.test_datasets.")}
    assert entries == {
        p.replace("datasets", "test_datasets") for p in LEAVES if p.startswith("data.datasets.")
    }
    others = {*LEAVES} - entries - expected
    assert len(others) == len(LEAVES) - len(entries) - len(expected)
    for path in others:
        there, _ = properties(LEAVES[path]).differs
        assert there in ("none", "of its server's configuration"), path


def test_reference_is_current():
    text = (ROOT / "docs/trainer/fields.md").read_text()
    assert text == page(Config, text), (
        "run `python -m tilewright.trainer.config docs docs/trainer/fields.md`"
    )
    assert all(field.description.endswith((".", ")")) for field in LEAVES.values())


def test_one_field_is_explained(capsys):
    assert module.main(["--explain", "train.ep_outside", "weight_decay"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == ["train.ep_outside", "  type:    boolean", "  default: false"]
    assert said[5:9] == [
        "  read by: parallel.mesh",
        "  rule:    any value but false needs train.data_parallel_mode = fsdp2",
        "  rule:    any value but false needs train.expert_parallel_size != 1: there is nothing to "
        "place",
        "  in xorl: place it outside the EP-FSDP mesh; here: the same: the outer dimension of a shard "
        "group",
    ]
    assert said[9:11] == ["train.weight_decay", "  type:    number | mapping, at least 0"]
    assert module.main(["--explain", "lora.aqn_alpha", "model.encoders", "train.optimizer"]) == 0
    said = capsys.readouterr().out
    assert "  rule:    any value but 1.0 needs lora.enable_aqn = true\n" in said
    assert f"  rule:    only {{}}: {REFUSED['model.encoders'].why}" in said
    assert "refused with some values of lora.enable_lora: only adapters are trained" in said
    assert "  rule:    train.muon_lr: any value but 0.02 needs train.optimizer = muon\n" in said
    assert said.endswith("  in transformers: optim\n")
    assert module.main(["--explain", "train.weight_decai"]) == 2
    assert capsys.readouterr().err == (
        "train.weight_decai: unknown key; did you mean train.weight_decay?\n"
    )


def test_every_field_can_be_explained():
    for path, field in LEAVES.items():
        said = module.explain(path)
        assert f"  meaning: {meaning(field)}" in said
        assert f"  resume:  {properties(field).resume}" in said
        for other in (o for rule in properties(field).rules for o in rule.others):
            section = path.rpartition(".")[0]
            sentences = module.explain(other if "." in other else f"{section}.{other}")
            assert f"  rule:    {path}: " in sentences


READ = """
class Run:
    config: Config

class Part:
    def __init__(self, train: Train | None, unknown):
        self.options = train
        self.first = unknown.seed, unknown.train.lr, self.train.max_steps

def run(config: Config, made: Run, other: Other):
    t, d = config.train, config.data
    made.config.lora.enable_lora
    for entry in d.datasets:
        print(entry.shards, t.seed, other.max_steps, t.context_parallel_size)
    return Subset(**{name: getattr(config.model, name) for name in names})

def read(one: Subset):
    return one.router_fp32
"""


def test_readers_are_found_by_what_an_attribute_is_of():
    classes = {kind.__name__: kind for kind in (Config, Train)}
    scope = Scope([*ast.walk(ast.parse(READ))], classes, {})
    scope.bind()
    assert {(kind.__name__, name) for kind, name in scope.reads()} == {
        ("Config", "train"),
        ("Config", "data"),
        ("Config", "lora"),
        ("Config", "model"),
        ("Data", "datasets"),
        ("Dataset", "shards"),
        ("Lora", "enable_lora"),
        ("Model", "router_fp32"),
        ("Train", "seed"),
        ("Train", "max_steps"),
        ("Train", "context_parallel_size"),
    }
    assert readers(Config)["train.enable_full_shard"] == ["parallel.fsdp"]  # by a property


def test_every_field_is_read():
    """But those of which there is one value, one that only rules need, and one that stands for
    values of others.
    """
    single = {path for path, rule in REFUSED.items() if len(rule.values) < 2}
    entries = {path for path in LEAVES if path.startswith("data.test_datasets.")}
    assert LEAVES.keys() - entries - readers(Config).keys() == single | {
        "train.allow_cuda_launch_blocking",
        "train.save_strategy",
    }


def test_what_reads_a_field_may_come_from_a_table():
    rule = Only("optimizer", table=lambda: ["muon", "lion"])
    parts = {"model": {"config_path": "x"}, "data": {"datasets": [{"path": "dummy"}]}}
    config = Config(**parts, train={"output_dir": "o", "optimizer": "muon", "muon_lr": 1})
    [at] = [at for at in places(config) if at.path == "train.muon_lr"]
    assert not rule.broken(at)
    sgd = config.train.model_copy(update={"optimizer": "sgd"})
    at = at._replace(config=config.model_copy(update={"train": sgd}))
    assert rule.broken(at) and rule.sentence(at) == "only muon and lion read this"
    assert rule.wanted(at) == "any value but 0.02 needs train.optimizer = muon or lion"


def test_the_identity_of_a_run_has_the_names_and_the_order_of_earlier_checkpoints():
    states = ["optimizer", "no_decay_modules", "no_decay_params", "layerwise_lr_bound"]
    states.append("freeze_router")
    for optimizer, more in (
        ("adamw", []),
        ("sgd", ["optimizer_args"]),
        ("muon", ["optimizer_dtype"]),
    ):
        train = Train(output_dir="o", optimizer=optimizer)
        assert [*kept(train, Resume.OTHER_STATES, unread=False)] == states + more
    assert " ".join(kept(Lora(), Resume.OTHER_WEIGHTS)) == (
        "enable_lora lora_rank lora_alpha rslora use_dora lora_target_modules save_lora_only "
        "enable_qlora quant_format quant_group_size exclude_modules"
    )
    orders = [
        kept(section, Resume.OTHER_ORDER) for section in (train, Data(datasets=[{"path": "dummy"}]))
    ]
    assert orders == [{"seed": 42}, {"shuffle": True}]
    assert kept(Model(), Resume.OTHER_WEIGHTS) == {"merge_qkv": True}


def test_the_schema_has_every_field_with_its_meaning(capsys):
    assert module.main(["--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    for path, field in LEAVES.items():
        node = schema
        for part in path.split("."):
            node = node.get("items", node)
            node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
            node = node["properties"][part]
        assert node["description"] == meaning(field)
    assert schema["$defs"]["Train"]["additionalProperties"] is False


def test_editors_check_a_file_with_the_schema(capsys):
    jsonschema = pytest.importorskip("jsonschema")
    assert module.main(["--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    check = jsonschema.validators.validator_for(schema, default=None)
    check.check_schema(schema)
    good = yaml.safe_load(LEAST)
    for text in (LEAST, PAGE, resolved(Config(**good))):
        assert not [*check(schema).iter_errors(yaml.safe_load(text.replace("1e-5", "1.0e-5")))]
    for wrong in (
        {"data": {"datasets": []}},
        {"train": {"output_dir": "o", "lrr": 1}},
        {"train": {"output_dir": "o", "lr": 0}},
        {"train": {}},
        {"train": {"output_dir": "o", "optimizer": "adan"}},
        {"lora": {"lora_rank": "many"}},
    ):
        assert [*check(schema).iter_errors({**good, **wrong})], wrong


# ---- the documentation that the fields follow

# The first configuration of its page, as it is there.
PAGE = """
model:
  model_path: Qwen/Qwen3-8B # HF Hub ID or local path
  attn_implementation: flash_attention_3
  # moe_implementation: triton # for MoE models
data:
  datasets:
    - path: /data/train.jsonl
      type: tokenized
      max_seq_len: 4096
  select_columns: [input_ids, labels]
  sample_packing_method: sequential
  sample_packing_sequence_len: 4096
train:
  output_dir: outputs/my_run
  data_parallel_mode: fsdp2
  micro_batch_size: 1
  gradient_accumulation_steps: 4
  num_train_epochs: 1
  optimizer: adamw
  lr: 1e-5
  lr_warmup_ratio: 0.05
  lr_decay_style: cosine
  weight_decay: 0.01
  max_grad_norm: 1.0
  enable_mixed_precision: true
  enable_gradient_checkpointing: true
  enable_full_shard: true
  init_device: meta
  load_weights_mode: broadcast
  save_steps: 500
  ckpt_manager: dcp
"""
# Its other blocks, each of which changes the first; and what one needs that may not be here.
BLOCKS = [
    ("model: {model_path: Qwen/Qwen3-8B}", None),
    ("train: {init_device: meta, load_weights_mode: broadcast}", None),
    (
        "train: {data_parallel_mode: fsdp2, enable_full_shard: true, data_parallel_shard_size: 8, "
        "data_parallel_replicate_size: 1}",
        None,
    ),
    ("train: {data_parallel_shard_size: 8, data_parallel_replicate_size: 4}", None),
    ("train: {data_parallel_mode: ddp, init_device: auto}", None),
    ("train: {data_parallel_mode: none, init_device: cpu}", None),
    ("data: {sample_packing_method: sequential, sample_packing_sequence_len: 8192}", None),
    ("data: {datasets: [{path: data.jsonl, type: tokenized, max_seq_len: 4096}]}", None),
    (
        "train: {optimizer: adamw, lr: 1e-5, weight_decay: 0.01, lr_warmup_ratio: 0.05, "
        "lr_decay_style: cosine}",
        None,
    ),
    (
        "train: {optimizer: muon, lr: 1e-4, muon_lr: 2e-4, muon_momentum: 0.95, muon_ns_steps: 5}",
        None,
    ),
    (
        "train: {ckpt_manager: dcp, save_steps: 500, save_epochs: 0.5, output_dir: outputs/my_run, "
        'load_checkpoint_path: "", save_hf_weights: false}',
        None,
    ),
    (
        "train: {enable_gradient_checkpointing: true, recompute_modules: [self_attn, mlp]}",
        None,
    ),
    ("train: {moe_checkpoint_method: moe_act}", None),
    (
        "train: {log_format: structured, use_wandb: true, wandb_project: my_project, "
        "wandb_name: qwen3_8b_ft, wandb_log_interval: 10}",
        "wandb",
    ),
    ("train: {enable_activation_offload: true, activation_gpu_limit: 4.0}", "CUDA"),
]


@pytest.mark.parametrize("block, needs", BLOCKS, ids=[block for block, _ in BLOCKS])
def test_each_block_of_the_page_loads_and_says_what_it_says(block, needs, write, monkeypatch):
    monkeypatch.setattr(platform, "no_module", lambda name: None)
    if needs == "CUDA":
        monkeypatch.setattr(platform, "no_cuda", lambda *_: None)
    changes = yaml.safe_load(block)
    tree = yaml.safe_load(PAGE)
    for section, values in changes.items():
        tree[section] |= values
    config = load(write(yaml.safe_dump(tree)))
    for section, values in changes.items():
        for name, value in values.items():
            found = getattr(getattr(config, section), name)
            if name == "datasets":
                assert found[0].max_seq_len == 4096
            elif name in ("lr", "muon_lr"):  # a string to YAML 1.1
                assert found == float(value)
            else:
                assert found == (value if value not in ("", "auto") else found)


def test_the_commands_of_the_page_are_taken(write):
    config = load(
        write(PAGE),
        [
            *("--train.lr", "2e-5"),
            *("--train.output_dir", "outputs/other"),
            *("--train.pipeline_parallel_size", "4"),
            *("--model.attn_implementation", "flash_attention_4"),
            *("--data.sample_packing_sequence_len", "16384"),
            *("--lora.enable_lora", "true"),
            *("--lora.lora_rank", "32"),
        ],
    )
    assert (config.train.lr, config.train.output_dir) == (2e-5, "outputs/other")
    assert config.train.pipeline_parallel_size == 4 and config.lora.lora_rank == 32
    assert config.data.sample_packing_sequence_len == 16384


# Its defaults that are not ours.
THEIRS = {
    "model.attn_implementation": "flash_attention_3",
    "data.dataloader_num_workers": 8,
    "data.dataloader_prefetch_factor": 2,
    "train.init_device": "cuda",
    "train.use_wandb": True,
    "train.wandb_project": "Xorl",
}
DEFAULTS = """
model: {ep_dispatch: alltoall, deepep_buffer_size_gb: 2.0, deepep_num_sms: 20, deepep_async_combine: false,
  merge_qkv: true, basic_modules: [], foundation: {}, encoders: {}}
data: {test_datasets: [], dataset_prepared_path: last_prepared_dataset, sample_packing_method: sequential,
  sample_packing_sequence_len: 32000, sample_packing_group_size: 100000, dataloader_pin_memory: true,
  dataloader_drop_last: true, pad_to_multiple_of: 128, shuffle_merged_datasets: true,
  shuffle_before_merging_datasets: true, skip_prepare_dataset: false}
data.datasets: {type: tokenized, trust_remote_code: false}
train: {data_parallel_mode: fsdp2, data_parallel_shard_size: -1, data_parallel_replicate_size: -1,
  tensor_parallel_size: 1, pipeline_parallel_size: 1, pipeline_parallel_schedule: 1F1B,
  pp_variable_seq_lengths: true, expert_parallel_size: 1, ulysses_parallel_size: 1, ringattn_parallel_size: 1,
  cp_fsdp_mode: all, ep_outside: false, optimizer: adamw, optimizer_dtype: bf16, lr: 5.0e-5, lr_min: 1.0e-7,
  lr_start: 0.0, lr_warmup_ratio: 0.0, lr_decay_style: constant, lr_decay_ratio: 1.0, weight_decay: 0.0,
  no_decay_modules: [], no_decay_params: [], max_grad_norm: 1.0, muon_lr: 0.02, muon_momentum: 0.95,
  muon_nesterov: true, muon_ns_steps: 5, micro_batch_size: 1, gradient_accumulation_steps: 1,
  num_train_epochs: 1, enable_mixed_precision: true, enable_gradient_checkpointing: true,
  enable_reentrant: false, enable_full_shard: true, enable_forward_prefetch: true,
  enable_activation_offload: false, activation_gpu_limit: 0.0, enable_compile: false,
  load_weights_mode: broadcast, enable_full_determinism: false, allow_cuda_launch_blocking: false,
  empty_cache_steps: 500, gc_steps: 500, ckpt_manager: dcp, save_steps: 0, save_epochs: 1, save_async: false,
  save_hf_weights: true, log_format: progress_bar, wandb_log_interval: 1, enable_profiling: false,
  profile_start_step: 1, profile_end_step: 2, profile_trace_dir: ./trace, profile_record_shapes: true,
  profile_profile_memory: true, profile_with_stack: true, profile_rank0_only: true, seed: 42}
lora: {enable_lora: false, lora_rank: 16, lora_alpha: 16, save_lora_only: false, enable_qlora: false,
  quant_format: nvfp4, quant_group_size: 16, merge_lora_interval: 0, reset_optimizer_on_merge: false,
  enable_aqn: false, aqn_alpha: 1.0}
"""


def test_a_default_is_that_of_the_documentation_or_the_difference_is_explained():
    theirs = {
        f"{section}.{name}": value
        for section, values in yaml.safe_load(DEFAULTS).items()
        for name, value in values.items()
    }
    for path in LISTED["xorl"]:
        default = LEAVES[path].default
        if path in THEIRS:
            assert default != THEIRS[path] and properties(LEAVES[path]).differs, path
        elif path not in ("data.datasets", "data.datasets.path", "train.output_dir"):
            assert default == theirs.get(path), path


# ---- reading


def test_misspelt_keys_are_all_reported_with_the_nearest(write):
    path = write(
        "model: {config_path: x, merge_qvk: true}\ndata: {datasets: [{path: dummy, "
        "max_seq_length: 8}]}\n"
        "trian: {lr: 1}\ntrain: {output_dir: o, weigth_decay: 0.1, lora_rank: 3, zzz: 1, "
        "save_steps: -1}\n"
    )
    found = errors(load, path, ["--data.pack.method", "x", "--train.gradient-acumulation-steps=2"])
    for expected in (
        "model.merge_qvk = true: unknown key; did you mean model.merge_qkv?",
        "data.datasets.0.max_seq_length = 8: unknown key; did you mean data.datasets.max_seq_len?",
        'trian = {"lr": 1}: unknown key; did you mean train?',
        "train.weigth_decay = 0.1: unknown key; did you mean train.weight_decay?",
        "train.lora_rank = 3: unknown key; lora_rank belongs under lora",
        "train.zzz = 1: unknown key",
        "--train.gradient-acumulation-steps = 2: unknown key; "
        "did you mean train.gradient_accumulation_steps?",
    ):
        assert expected in found
    assert any(line.startswith("--data.pack.method = x: unknown key") for line in found)
    assert any(line.startswith("train.save_steps = -1: input should be greater") for line in found)
    assert len(found) == 9


def test_wrong_types_and_broken_rules_are_reported_together(write):
    found = errors(load, write("data: {datasets: [{path: dummy, shards: 2}]}\ntrain: {lr: fast}"))
    assert [line.split(":")[0] for line in found] == [
        "train.lr = fast",
        "train.output_dir",
        "model.model_path = null, model.config_path = null",
        "data.datasets.0.shards = 2, data.datasets.0.shards_idx = null",
    ]


def test_what_stands_in_for_a_wrong_value_is_not_judged(write):
    """A missing path is checked as dummy, which has no text; a wrong lr as the default, which is
    below lr_min.
    """
    text = "data: {datasets: [{type: text}]}\ntrain: {lr: fast, lr_min: 1, lr_decay_style: linear, output_dir: o}"
    assert errors(load, write(text), ["--model.config_path", "x"]) == [
        "data.datasets.0.path: required",
        "train.lr = fast: input should be a valid number, unable to parse string as a number; "
        "expected number",
    ]


@pytest.mark.parametrize(
    "given, meant",
    [
        ("learning_rate", "train.lr"),
        ("warmup_ratio", "train.lr_warmup_ratio"),
        ("epochs", "train.num_train_epochs"),
        ("per_device_train_batch_size", "train.micro_batch_size"),
        ("bf16", "train.enable_mixed_precision"),
        ("gradient_checkpointing", "train.enable_gradient_checkpointing"),
        ("optim", "train.optimizer"),
        ("target_modules", "lora.lora_target_modules"),
        ("r", "lora.lora_rank"),
        ("maxsteps", "train.max_steps"),
        ("steps", "train.max_steps"),
        ("sead", "train.seed"),
        ("logging_steps", "train.log_steps"),
        ("adam_betas", "train.adam_beta1 or train.adam_beta2"),
        ("adam_eps", "train.adam_epsilon"),
        ("beta2", "train.adam_beta2"),
        ("tokenizer_name", "model.tokenizer_path"),
        ("lora_r", "lora.lora_rank"),
        ("zzz", None),
    ],
)
def test_keys_that_are_alike_and_other_libraries_names_are_known(least, given, meant):
    """Letters alone would suggest train.log_format for learning_rate."""
    expected = f"unknown key; did you mean {meant}?" if meant else "unknown key"
    assert errors(least, f"--train.{given}", "1") == [f"--train.{given} = 1: {expected}"]


NAMED = [
    (who, name, path)
    for path, field in LEAVES.items()
    for who, names in properties(field).names.items()
    for name in names
]


def test_names_of_other_libraries_lead_to_one_field_and_stand_in_the_reference():
    text = (ROOT / "docs/trainer/fields.md").read_text()
    for who, name, path in NAMED:
        assert name not in {p.rpartition(".")[2] for p in LEAVES}
        assert overrides.elsewhere(Config)[name] == path
        assert f"did you mean {path}" in unknown(Config, f"{path.partition('.')[0]}.{name}")
        assert f"| {who} | `{name}` | `{path}` |" in text
        assert f"\n  in {who}: " in module.explain(path)
    assert {"ERNIEKit", "NxDT", "transformers", "TRL", "peft"} <= {who for who, *_ in NAMED}


@pytest.mark.parametrize("who", LISTED)
def test_every_row_of_a_reference_has_its_state(who):
    rows, found = LISTED[who], [*elsewhere.rows(Config, who, LISTED[who])]
    names = {row.name for row in found}
    assert len({*rows}) == len(rows) <= len(found) == len(names) > 100
    assert {*rows} <= names | {n.partition(": ")[0] for n in names}
    for row in found:
        name, _, value = row.name.partition(": ")
        fields = elsewhere.named(Config, who, name)
        if row.state is State.FIELD:
            assert row.here == fields and {*fields} <= LEAVES.keys() and len(fields) == 1
        elif row.state is State.MISSING and not value:
            assert not fields, f"{name} is there by now"
        elif row.state is State.MISSING:
            assert elsewhere.by_value(Config, who, name, value) is None, f"{row.name} is there"
        elif row.state is State.REFUSED and not value:
            assert [r.why for path in fields for r in properties(LEAVES[path]).rules] in (
                [],
                [row.here],
            )
    # Nothing is said of a name that the reference does not have.
    assert {n.partition(": ")[0] for n in SETTINGS.get(who, ())} <= {
        n.partition(": ")[0] for n in rows
    }


def test_a_row_without_a_state_is_an_error():
    with pytest.raises(KeyError, match="NxDT has flux, which is nothing here"):
        [*elsewhere.rows(Config, "NxDT", ["seed", "flux"])]
    with pytest.raises(KeyError, match=r"optim\.name: lion"):
        [*elsewhere.rows(Config, "NxDT", ["optim.name: lion"])]


def test_states_follow_from_fields_and_tables(monkeypatch):
    """What lands gets its state without an edit; what is gone loses it."""
    [row] = elsewhere.rows(Config, "NxDT", ["optim.name: rmsprop"])
    assert row == ("optim.name: rmsprop", State.SETTINGS, {"train.optimizer": "rmsprop"})
    [row] = elsewhere.rows(Config, "xorl", ["model.encoders"])
    assert row.state is State.REFUSED and "tokens alone" in row.here
    monkeypatch.delitem(SETTINGS["ERNIEKit"], "offload_optim")
    with pytest.raises(KeyError, match="offload_optim"):
        [*elsewhere.rows(Config, "ERNIEKit", ["offload_optim"])]


def test_the_page_of_other_configurations_is_current(tmp_path):
    made = tmp_path / "references.md"
    assert module.main(["references", str(ROOT / "tests/trainer/references"), str(made)]) == 0
    assert made.read_text() == (ROOT / "docs/trainer/references.md").read_text(), (
        "run `python -m tilewright.trainer.config references tests/trainer/references "
        "docs/trainer/references.md`"
    )


def test_a_key_of_another_configuration_is_refused_with_its_sentence(least):
    [said] = errors(least, "--train.sequence_parallel", "true")
    assert "unknown key; ERNIEKit's sequence_parallel: true is what" in said and "; NxDT's" in said
    [said] = errors(least, "--model.lnc", "2")
    assert said.endswith("NxDT's lnc: refused: logical cores of Neuron's; a GPU is one device")
    [said] = errors(least, "--train.zero1", "true")
    assert "NxDT's zero1: not yet: sharded states alone" in said


@pytest.mark.parametrize(
    ("who", "name"),
    [(w, n) for w, own in SETTINGS.items() for n, here in own.items() if isinstance(here, dict)],
)
def test_what_is_written_for_a_name_of_another_configuration_loads(who, name):
    given = SETTINGS[who][name]
    data: dict = {"datasets": [{"path": "x.jsonl", "type": "text"}]}
    if "data.mixing" not in given:
        data["val_set_size"] = 4
    tree = {"model": {"model_path": "x"}, "data": data, "train": {"output_dir": "o"}}
    for path, value in given.items():
        *parts, last = path.split(".")
        at: Any = tree
        for part in parts:
            at = at[int(part)] if part.isdigit() else at.setdefault(part, {})
        at[last] = value
    config = Config.model_validate(tree, context=(broken := []))
    assert not broken
    assert all(get(config, path) == value for path, value in given.items())


def test_the_section_that_was_named_comes_before_other_libraries_names():
    for key, meant in (
        ("data.datasets.max_seq_length", "data.datasets.max_seq_len"),
        ("data.max_seq_length", "data.sample_packing_sequence_len"),
    ):
        assert unknown(Config, key) == f"unknown key; did you mean {meant}?"


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "model:\ndata: {datasets: [null, 3]}\ntrain: 4\nlora: []",
            [
                "data.datasets.0 = null: expected a mapping",
                "data.datasets.1 = 3: expected a mapping",
                "train = 4: expected a mapping",
                "lora = []: expected a mapping",
                "model.model_path = null, model.config_path = null: one of them must be given",
            ],
        ),
        (
            "data: {datasets: []}",
            ["data.datasets = []: list should have at least 1 item", "train.output_dir: required"],
        ),
        ("data: {datasets: 3}", ["data.datasets = 3: input should be a valid list"]),
        ("a: [1]", ["a = [1]: unknown key", "data.datasets: required"]),
        ("", ["data.datasets: required", "train.output_dir: required"]),
        ("- a", ["holds list, not sections"]),
        ("3", ["holds integer, not sections"]),
        ("train: {lr: 1, lr: 2}", ["key 'lr' is given twice"]),
        ("train: {}\ntrain: {}", ["key 'train' is given twice"]),
        ("train: {max-steps: 1, max_steps: 2}", ["key 'max_steps' is given twice"]),
        ("train: {max_steps: 1, max-steps: 2}", ["key 'max-steps' is given twice"]),
        ("1: 2", ["key 1 is not a string"]),
        ("a: [", ["config.yaml: while parsing"]),
        ("x: !!python/object/apply:os.getcwd []", ["could not determine a constructor"]),
        (f"seed: {'9' * 5000}", ["numbers of more than 100 characters are not read"]),
        (f"seed: 0x{'f' * 5000}", ["numbers of more than 100 characters are not read"]),
        ("a: 2020-02-31", ["'2020-02-31' is no timestamp"]),
        ("a: !!bool x", ["'x' is no bool"]),
        ("a: !!timestamp x", ["'x' is no timestamp"]),
        ("a: !!int x", ["'x' is no int"]),
        ("a: " + "[" * 5000, ["the file has more than 50 levels of nesting"]),
        ("- " * 2000, ["the file has more than 50 levels of nesting"]),
        (
            "".join(" " * i + "a:\n" for i in range(2000)),
            ["the file has more than 50 levels of nesting"],
        ),
        ("a: &a [1, *a]", ["alias *a is within what it stands for"]),
        ("a: &a {b: {<<: *a}}", ["alias *a is within what it stands for"]),
        *(
            (
                "\n".join(
                    [
                        f"a0: &a0 {first}",
                        *(f"a{i}: &a{i} {f(', '.join([f'*a{i - 1}'] * 9))}" for i in range(1, 8)),
                    ]
                ),
                [
                    "the file has more than 100,000 values (an alias counts as everything it "
                    "stands for)"
                ],
            )
            for first, f in (("[x]", "[{}]".format), ("{x: 1}", "{{<<: [{}]}}".format))
        ),
    ],
)
def test_malformed_files(write, text, expected):
    found = errors(load, write(text))
    for line in expected:
        assert any(line in f for f in found), (line, found)


def test_unreadable_files(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfd")
    assert "can't decode" in errors(load, str(tmp_path / "binary"))[0]
    assert errors(load, str(tmp_path / "none")) == [
        f"{tmp_path / 'none'}: No such file or directory"
    ]
    assert "directory" in errors(load, str(tmp_path))[0].lower()


def test_merge_keys_of_yaml_work(write):
    text = LEAST.replace("train:", "lora: &d {}\ntrain:").replace(
        "output_dir: out", "<<: *d, output_dir: out"
    )
    assert load(write(text)).train.output_dir == "out"


@pytest.mark.parametrize(
    "path, values",
    [
        ("train.micro_batch_size", ["true", "1.5", ".nan", "null", "[]", "many"]),
        ("train.lr", ["true", ".nan", ".inf", "-.inf", "null", "{}"]),
        ("train.save_epochs", [".inf", "yes"]),
        ("train.max_steps", ["false", "0"]),
        ("model.model_path", ["true", "[a]"]),
        ("data.val_set_size", ["true", ".nan"]),
        ("train.save_async", ["3", "[]"]),
        ("train.optimizer", ["adan"]),
        ("train.adam_beta2", ["1", "-0.1", "true"]),
        ("train.adam_epsilon", ["0", "none"]),
        ("train.muon_ns_coefficients", ["cubic"]),
        ("train.recompute_modules", ["[]", "[norm]"]),
        ("train.no_decay_params", ["bias", "[[a]]"]),
        ("data.select_columns", ["3"]),
    ],
)
def test_values_of_another_type_are_refused(write, path, values):
    section, name = path.split(".")
    for value in values:
        text = re.sub(rf"({section}: {{)", rf"\g<1>{name}: {value}, ", LEAST)
        found = errors(load, write(text))
        assert len(found) == 1 and re.match(rf"{path}(\.0)? = ", found[0]), (value, found)


# The first value that is refused, by fields.
TOO_SMALL = {
    1: "data.sample_packing_sequence_len",
    0: """model.deepep_buffer_size_gb model.deepep_num_sms data.sample_packing_group_size
        data.dataloader_prefetch_factor data.pad_to_multiple_of data.dataset_num_proc
        data.dataset_shard_num data.num_dataset_shards_to_save train.tensor_parallel_size
        train.pipeline_parallel_size train.virtual_pipeline_size train.expert_parallel_size
        train.ulysses_parallel_size train.ringattn_parallel_size train.adam_epsilon train.lr
        train.muon_lr train.muon_ns_steps train.micro_batch_size train.gradient_accumulation_steps
        train.layerwise_lr_bound lora.lora_plus_scale train.lr_decay_steps
        train.lr_cycles train.lr_power train.lr_step_size train.lr_gamma
        train.num_train_epochs train.max_steps train.save_total_limit train.wandb_log_interval train.profile_end_step
        lora.lora_rank lora.lora_alpha lora.quant_group_size""",
    -1: """train.lr_warmup_steps train.lr_constant_steps
        data.dataloader_num_workers data.dataset_shard_idx train.router_replay_compare_steps
        train.empty_cache_steps train.gc_steps train.save_steps
        train.checksum_steps train.profile_start_step train.seed lora.merge_lora_interval""",
    -1e-9: """train.adam_beta1 train.adam_beta2 train.lr_min train.lr_start train.lr_warmup_ratio
        train.lr_decay_ratio train.weight_decay train.max_grad_norm train.muon_momentum
        train.activation_gpu_limit train.save_epochs lora.aqn_alpha""",
}
TOO_LARGE = {
    1: "train.adam_beta1 train.adam_beta2 train.muon_momentum",
    1.001: "train.lr_warmup_ratio train.lr_decay_ratio train.lr_gamma train.layerwise_lr_bound",
    2**32: "train.seed",
}
BEYOND = [
    (name, value)
    for table in (TOO_SMALL, TOO_LARGE)
    for value, names in table.items()
    for name in names.split()
]


def test_numbers_beyond_their_limits_are_refused(least):
    for name, value in BEYOND:
        found = errors(least, f"--{name}={value}")
        assert any(
            re.match(rf"{name} = {value}: input should be (less|greater) than", line)
            for line in found
        ), (name, value, found)


def test_what_is_near_the_limits_is_read(least, write):
    deep, shared = "[" * 48 + "]" * 48, "[&a [" + "x, " * 9000 + "y], " + "*a, " * 9 + "*a]"
    assert [line.split(":")[0].split(" = ")[0] for line in errors(least, "--a.b", deep)] == [
        "--a.b"
    ]
    names = [f"{i}.json" for i in range(500)]
    assert least(f"--data.select_columns={names}").data.select_columns == names
    [line] = errors(load, write(f"a: {shared}\n{LEAST}"))
    assert line.endswith(": unknown key") and len(line) < 300


def test_integers_that_no_array_could_hold_are_refused(least, write):
    """Python's integers are unbounded."""
    assert least(f"--train.max_steps={2**63 - 1}").train.max_steps == 2**63 - 1
    for value in (2**63, 10**90):
        sentence = [f"train.max_steps = {value}: does not fit in 64 bits; expected integer | null"]
        assert errors(least, f"--train.max_steps={value}") == sentence
    assert (
        errors(load, write(LEAST.replace("output_dir", f"max_steps: {value}, output_dir")))
        == sentence
    )


def test_numbers_may_be_strings_as_yaml_makes_them(write):
    """YAML 1.1 reads 1e-5, without a point, as a string."""
    assert load(write(LEAST.replace("output_dir", "lr: 1e-5, output_dir"))).train.lr == 1e-5


def test_bad_file_ends_with_code_2_and_only_messages(write, capsys):
    from tilewright.trainer import train

    text = "model: {config_paht: x}\ndata: {datasets: [{path: dummy}]}\ntrain: {output_dir: o, lr: -1}\n"
    with pytest.raises(SystemExit) as ended:
        train.main([write(text)])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert said.err.splitlines() == [
        "model.config_paht = x: unknown key; did you mean model.config_path?",
        "train.lr = -1: input should be greater than 0; expected number",
        "model.model_path = null, model.config_path = null: one of them must be given",
    ]


def test_help_names_every_field(capsys):
    for arguments, code in (["--help"], 0), ([], 2):
        with pytest.raises(SystemExit) as stopped:
            module.from_command_line(arguments)
        assert stopped.value.code == code
        text = capsys.readouterr().out
        assert all(f"--{path} (" in text for path in LEAVES) and "--plan" not in text


def test_help_of_the_trainer_names_its_own_arguments(capsys):
    from tilewright.trainer import train

    with pytest.raises(SystemExit) as stopped:
        train.main(["--help"])
    assert stopped.value.code == 0
    usage, *lines = capsys.readouterr().out.splitlines()
    assert usage == (
        "usage: python -m tilewright.trainer.train config.yaml [--section.field value ...] "
        "[--plan [--world N]] [--report DIR]"
    )
    assert (
        "--plan [--world N]" in lines
        and "processes" in lines[lines.index("--plan [--world N]") + 1]
    )


def test_check_prints_what_loads_again(write, capsys):
    path = write(LEAST)
    assert module.main(["check", path, "--train.seed", "7"]) == 0
    printed = capsys.readouterr().out
    assert load(write(printed)) == load(
        path, ["--train.seed", "7"]
    )  # the same file: `path` now holds the printed
    assert "seed: 7" in printed


# ---- overrides


@pytest.mark.parametrize(
    "arguments, path, expected",
    [
        (["--train.lr", "1e-4"], "train.lr", 1e-4),
        (["--train.lr=1e-4"], "train.lr", 1e-4),
        (["--train.max-steps", "3"], "train.max_steps", 3),
        (["--train.max-steps=3"], "train.max_steps", 3),
        (["--train.data_parallel_shard_size", "-1"], "train.data_parallel_shard_size", -1),
        (["--train.save_hf_weights", "false"], "train.save_hf_weights", False),
        (["--train.wandb_name", "a=b"], "train.wandb_name", "a=b"),
        (["--train.wandb_name=a=b"], "train.wandb_name", "a=b"),
        (["--train.wandb_name=--x"], "train.wandb_name", "--x"),
        (["--train.wandb_name", '"null"'], "train.wandb_name", "null"),
        (["--train.wandb_name", "12"], "train.wandb_name", "12"),
        (["--train.max_steps", "null"], "train.max_steps", None),
        (["--train.load_checkpoint_path", ""], "train.load_checkpoint_path", None),
        (["--train.wandb_tags", '["a", "b"]'], "train.wandb_tags", ["a", "b"]),
        (["--train.wandb_tags=[a, b]"], "train.wandb_tags", ["a", "b"]),
        (["--data.val_set_size", "100"], "data.val_set_size", 100),
        (["--data.val_set_size", "0.05"], "data.val_set_size", 0.05),
        (["--data.datasets.0.path", "hub/name"], "data.datasets.0.path", "hub/name"),
        (["--data.datasets.0.max-seq-len=9"], "data.datasets.0.max_seq_len", 9),
        (
            ["--data.datasets", '[{"path": "a/b"}, {"path": "dummy"}]'],
            "data.datasets.1.path",
            "dummy",
        ),
        (["--train.seed", "1", "--train.seed", "2"], "train.seed", 2),
    ],
)
def test_override(least, arguments, path, expected):
    value = get(least(*arguments), path)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (
            ["train.lr", "1"],
            [
                "train.lr: not an override; write --section.field value",
                "1: not an override; write --section.field value",
            ],
        ),
        (["--train.lr"], ["--train.lr: no value given"]),
        (["--train.lr", "--train.seed=1"], ["--train.lr: no value given"]),
        (["--lr", "1"], ["--lr = 1: unknown key; lr belongs under train"]),
        (["--train", "{}"], ["--train = {}: a section; give its fields"]),
        (
            ["--data.datasets.1.path", "x"],
            [
                "data.datasets.1.path = x: there is nothing at data.datasets.1 to change; give the "
                """whole list, as --data.datasets '[{"path": "x"}]'"""
            ],
        ),
        (
            ["--data.datasets.path", "x"],
            [
                "data.datasets.path = x: there is nothing at data.datasets to change; give the "
                """whole list, as --data.datasets '[{"path": "x"}]'"""
            ],
        ),
        (
            ["--data.test_datasets.0.path", "x"],
            [
                "data.test_datasets.0.path = x: there is nothing at data.test_datasets.0 to change; give the "
                """whole list, as --data.test_datasets '[{"path": "x"}]'"""
            ],
        ),
        (
            ["--train.max_steps", "true"],
            [
                "train.max_steps = true: input should be a valid integer, unable to parse string "
                "as an integer; expected integer | null"
            ],
        ),
        (
            ["--train.lr", "nan"],
            ["train.lr = nan: input should be a finite number; expected number"],
        ),
    ],
)
def test_wrong_override(least, arguments, expected):
    assert errors(least, *arguments) == expected


def test_broken_json_is_named(least):
    [line] = errors(least, "--train.wandb_tags", "[a,]]")
    assert line.startswith("train.wandb_tags = [a,]]: not JSON:")


def test_without_a_file_arguments_are_enough():
    arguments = [
        "--model.config_path",
        "x",
        "--data.datasets",
        '[{"path": "dummy"}]',
        "--train.output_dir",
        "o",
    ]
    assert module.from_command_line(arguments).data.datasets[0].path == "dummy"


# ---- the resolved configuration


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--data.dataloader_num_workers", "2"],
        ["--model.config_path", "a/config.json"],
        ["--train.data_parallel_mode", "none", "--train.lr", "3e-7"],
        ["--data.val_set_size", "0.1"],
        ["--train.wandb_name", "null"],
        ["--train.wandb_name", '"null"'],
        ["--train.wandb_name", "ünïcode: [x]"],
        ["--train.optimizer", "sgd", "--train.recompute_modules", '["mlp"]'],
        [
            "--lora.enable_qlora",
            "true",
            "--lora.exclude_modules",
            '["lm_head"]',
            "--lora.enable_aqn",
            "true",
        ],
    ],
)
def test_resolved_is_a_fixed_point(least, write, arguments):
    config = least(*arguments)
    again = load(write(resolved(config)))
    assert again == config and resolved(again) == resolved(config)
    # In the order of the documentation.
    assert list(yaml.safe_load(resolved(config))) == list(Config.model_fields)


def test_what_is_derived(least):
    config = least()
    assert config.model.tokenizer_path == config.model.config_path == "nowhere"
    assert least(QLORA).lora.enable_lora and not config.lora.enable_lora
    assert config.train.init_device == "meta" and config.data.dataloader_prefetch_factor is None
    assert least("--data.dataloader_num_workers", "2").data.dataloader_prefetch_factor == 2
    here = "cpu" if platform.no_cuda() else "cuda"
    assert least("--train.data_parallel_mode", "ddp").train.init_device == here
    model = least("--model.config_path", "null", "--model.model_path", "m/x").model
    assert (model.config_path, model.tokenizer_path) == ("m/x", "m/x")
    assert least("--model.config_path", "m/config.json").model.tokenizer_path == "m"


def test_configurations_do_not_change(least):
    with pytest.raises(ValueError, match="frozen"):
        least().train.lr = 1


# ---- rejected values


def other_values(path, rule):
    """Values that the type allows, other than the accepted ones."""
    named, accepted = kind(LEAVES[path].annotation), rule.values or (LEAVES[path].default,)
    candidates = {"boolean": [True, False], "mapping": [{"a": 1}]}.get(named, named.split(" | "))
    return [v for v in candidates if v not in accepted]


@pytest.mark.parametrize(
    "path, value", [(path, v) for path, rule in REFUSED.items() for v in other_values(path, rule)]
)
def test_unsupported_fields_are_refused_with_their_sentence(least, path, value):
    at = path.replace("datasets.", "datasets.0.")
    found = [
        line
        for line in errors(least, f"--{at}", value if isinstance(value, str) else json.dumps(value))
        if line.startswith(f"{at} = ")
    ]
    assert [line for line in found if line.endswith(f": {REFUSED[path].why}")] == found[:1] != []


def test_every_refused_field_has_another_value_and_takes_its_default(least):
    for path, rule in REFUSED.items():
        assert other_values(path, rule)
        at = path.replace("datasets.", "datasets.0.")
        value = get(least(), at)
        least(f"--{at}={value if isinstance(value, str) else json.dumps(value)}")


NONE, DDP = "--train.data_parallel_mode=none", "--train.data_parallel_mode=ddp"
FIRST = "--data.datasets.0."
MUON = "--train.optimizer=muon"
LORA, QLORA, WEIGHTS = "--lora.enable_lora=true", "--lora.enable_qlora=true", "--model.model_path=x"
PP, STEPS = "--train.pipeline_parallel_size=2", "--train.gradient_accumulation_steps"
SCHEDULE, STAGES = "--train.pipeline_parallel_schedule", "--train.virtual_pipeline_size"
EVAL_PACKING, ALL_READ = "--data.eval_sample_packing=true", "--train.load_weights_mode=all_ranks"
SHARED_PREFIX = "--preference.share_prefix=true"
TP = "--train.tensor_parallel_size=2 --model.merge_qkv=false"
REENTRANT = "--train.enable_gradient_checkpointing=true --train.enable_reentrant=true"
HELD = "--data.val_set_size=4"
BEST = f"{HELD} --train.best_metric=eval_loss"
DPO = f"--train.loss=preference {FIRST}path=/ {FIRST}type=preference_tokenized"
KTO = f"{DPO} --preference.loss=kto {FIRST}type=unpaired_preference_tokenized"
NO_WEIGHTS = "--preference.kto_desirable_weight=0 --preference.kto_undesirable_weight=0"
POLICY = f"--train.loss=policy {FIRST}path=/"
TEACHER = f"--train.loss=distillation {FIRST}path=/"
# A violation of the rule, the error, and a similar value that is accepted.
RULES = [
    *(
        (f"--train.{given}", "there is nothing to evaluate on", f"{HELD} --train.{given}")
        for given in (
            "eval_strategy=epoch",
            "eval_strategy=steps --train.eval_steps=2",
            "eval_on_start=true",
            "eval_sanity_batches=1",
            "eval_max_batches=1",
            "eval_micro_batch_size=1",
            "best_metric=eval_loss",
        )
    ),
    *(
        (
            f"{HELD} --train.eval_strategy=no --train.{given}",
            "nothing is evaluated",
            f"{HELD} --train.{given}",
        )
        for given in (
            "eval_on_start=true",
            "eval_sanity_batches=1",
            "eval_max_batches=1",
            "eval_micro_batch_size=1",
            "best_metric=eval_loss",
        )
    ),
    *(
        (f"{HELD} {given}", "no checkpoint is the best", f"{BEST} {given}")
        for given in ("--train.best_mode=max", "--train.save_best=true")
    ),
    (
        f"{HELD} --train.best_metric=eval_reward",
        "does not follow from its name",
        f"{HELD} --train.best_metric=eval_reward --train.best_mode=max",
    ),
    *(
        (f"{BEST} --train.save_strategy={given}", sentence, f"{BEST} --train.save_strategy={right}")
        for given, sentence, right in (
            ("no --train.save_epochs=1", "it would save by epochs", "epoch --train.save_epochs=1"),
            ("steps --train.save_steps=2 --train.save_epochs=1", "it would save by epochs", "no"),
            ("best --train.save_epochs=1", "it would save by epochs", "best"),
            ("no --train.save_steps=2", "it would save by steps", "steps --train.save_steps=2"),
            ("epoch --train.save_steps=2", "it would save by steps", "epoch"),
            ("best --train.save_steps=2", "it would save by steps", "auto --train.save_steps=2"),
            ("no --train.save_best=true", "it would save the best", "best --train.save_best=true"),
            ("steps", "say every how many", "steps --train.save_steps=1"),
            ("epoch --train.save_epochs=0", "say every how many", "epoch"),
            ("best --train.save_best=false", "it would not save the best", "best"),
        )
    ),
    (
        "--train.save_strategy=best",
        "no checkpoint is the best",
        f"{BEST} --train.save_strategy=best",
    ),
    (
        f"{HELD} --train.eval_strategy=steps",
        "say every how many",
        f"{HELD} --train.eval_strategy=steps --train.eval_steps=1",
    ),
    (
        f"{HELD} --train.eval_steps=2",
        "only eval_strategy: steps counts steps",
        f"{HELD} --train.eval_strategy=steps --train.eval_steps=2",
    ),
    (
        f"{HELD} --train.eval_epochs=2",
        "only eval_strategy: epoch counts epochs",
        f"{HELD} --train.eval_strategy=epoch --train.eval_epochs=2",
    ),
    *(
        (
            f"{HELD} --train.eval_max_batches={given}",
            "must be a number of batches (0: all) or a share up to 1.0",
            f"{HELD} --train.eval_max_batches=0.5",
        )
        for given in ("-1", "1.5", "3.0", "-0.5")
    ),
    (
        "--train.test_max_batches=1",
        "nothing is tested",
        '--train.test_max_batches=1 --train.do_test=true --data.test_datasets=[{"path":"dummy"}]',
    ),
    ("--train.eval_on_start=true", "nothing to evaluate on", "--train.eval_on_start=false"),
    (
        "--train.load_optimizer=false",
        "nothing is loaded",
        "--train.load_optimizer=false --train.load_checkpoint_path=x/global_step_2",
    ),
    (
        "--train.load_optimizer=false --train.load_checkpoint_path=auto",
        "name the folder whose weights to begin from",
        "--train.load_optimizer=true --train.load_checkpoint_path=auto",
    ),
    ("--train.ckpt_manager=torch", "torch.save writes pickles", "--train.ckpt_manager=dcp"),
    (
        "--model.revision=v1 --model.tokenizer_path=some/tokenizer",
        "several ids would have different ones",
        "--model.revision=v1 --model.tokenizer_path=nowhere",
    ),
    (
        f"--model.revision=v1 --model.config_path={ROOT}",
        "local folders have none",
        f"--model.revision=v1 --model.config_path={ROOT} --model.model_path=some/model",
    ),
    *(
        (f"{NONE} {value}", "there is one stage", f"{PP} {STEPS}=2 {value} {more}")
        for value, more in (
            (f"{SCHEDULE}=GPipe", ""),
            (f"{STAGES}=2", f"{SCHEDULE}=Interleaved1F1B"),
            ("--train.pipeline_split=[2,3]", ""),
            ("--train.pp_variable_seq_lengths=false", ""),
        )
    ),
    *(
        (
            f"{mode} {PP} {STEPS}=2",
            "data_parallel_shard_size: 1 makes replicas of pipelines",
            f"{PP} {STEPS}=2 --train.data_parallel_shard_size=1",
        )
        for mode in (NONE, DDP)
    ),
    *(
        (
            f"{PP} {STEPS}=2 {SCHEDULE}={name} {STAGES}=2",
            "1F1B and GPipe run one stage on each process",
            f"{PP} {STEPS}=2 {SCHEDULE}={name} {STAGES}=1",
        )
        for name in ("1F1B", "GPipe")
    ),
    *(
        (
            f"{PP} {STEPS}=2 {SCHEDULE}={name}",
            "an interleaved schedule needs two or more stages on each process",
            f"{PP} {STEPS}=2 {SCHEDULE}={name} {STAGES}=3",
        )
        for name in ("Interleaved1F1B", "InterleavedZeroBubble")
    ),
    (
        f"{PP} {STEPS}=2 {SCHEDULE}=ZBVZeroBubble {STAGES}=2 {REENTRANT}",
        "reentrant recomputation cannot compute",
        f"{PP} {STEPS}=2 {SCHEDULE}=Interleaved1F1B {STAGES}=2 {REENTRANT}",
    ),
    (
        f"{PP} {STEPS}=2 {SCHEDULE}=ZBVZeroBubble {STAGES}=3",
        "ZBVZeroBubble needs two stages on each process",
        f"{PP} {STEPS}=2 {SCHEDULE}=ZBVZeroBubble {STAGES}=2",
    ),
    (
        f"{PP} {STEPS}=2 --train.pipeline_split=[1,2,3]",
        "needs a number for each stage, of which there are",
        f"{PP} {STEPS}=2 {SCHEDULE}=Interleaved1F1B {STAGES}=2 --train.pipeline_split=[1,2,3,1]",
    ),
    (
        f"{PP} {STEPS}=2 --train.pipeline_split=[2,0]",
        "a stage has one layer or more",
        f"{PP} {STEPS}=2 --train.pipeline_split=[2,1]",
    ),
    (
        f"{PP} {STEPS}=1",
        "1F1B needs at least as many micro-batches as the 2 stages; GPipe takes any",
        f"{PP} {STEPS}=1 {SCHEDULE}=GPipe",
    ),
    (
        f"{PP} {STEPS}=5 {SCHEDULE}=Interleaved1F1B {STAGES}=2",
        "Interleaved1F1B runs them in 2 rounds of equal size, so their number must divide by 2",
        f"{PP} {STEPS}=3 {SCHEDULE}=Interleaved1F1B {STAGES}=2",
    ),
    (
        f"{PP} {STEPS}=2 {SCHEDULE}=ZBVZeroBubble {STAGES}=2 --train.enable_compile=true",
        "compiled code computes the gradients of inputs and weights at once",
        f"{PP} {STEPS}=2 --train.enable_compile=true",
    ),
    (
        "--train.tensor_parallel_size=2",
        "not one shard of a merged matrix; set merge_qkv: false",
        TP,
    ),
    (
        f"{TP} --model.batch_invariant=true",
        "in which order the ranks' sums are added depends on where",
        f"{TP} --model.router_fp32=false",
    ),
    *(
        (
            f"{TP} {mode}",
            "only fsdp2 takes parameters that are sharded already; with it, "
            "data_parallel_shard_size: 1 makes replicas of tensor-parallel groups",
            f"{TP} --train.data_parallel_shard_size=1",
        )
        for mode in (NONE, DDP)
    ),
    (
        f"{TP} {QLORA}",
        "every process has all of a quantized matrix",
        f"{TP} {LORA}",
    ),
    *(
        (
            f"--model.batch_invariant=true --model.{native}=true",
            "PyTorch's own operators do not claim that a row's bits",
            "--model.batch_invariant=true --model.router_fp32=true",
        )
        for native in ("rmsnorm_native", "activation_native", "rope_native")
    ),
    (
        "--model.batch_invariant=true --lora.enable_lora=true",
        "the products of adapters",
        "--lora.enable_lora=true",
    ),
    (
        f"{DDP} --train.data_parallel_shard_size=2",
        "only fsdp2 reads this",
        f"{DDP} --train.data_parallel_shard_size=1",
    ),
    (
        f"{DDP} --train.data_parallel_replicate_size=2",
        "only fsdp2",
        "--train.data_parallel_replicate_size=2",
    ),
    (
        f"{NONE} --train.reshard_after_forward=false",
        "only fsdp2 reads this",
        "--train.reshard_after_forward=false",
    ),
    (
        f"{NONE} --train.enable_full_shard=false",
        "only fsdp2 reads this",
        "--train.enable_full_shard=false",
    ),
    (
        f"{NONE} --train.enable_forward_prefetch=false",
        "only fsdp2",
        "--train.enable_forward_prefetch=false",
    ),
    (f'{NONE} --model.basic_modules=["x"]', "only fsdp2 reads this", '--model.basic_modules=["x"]'),
    *(
        (f"{other} --train.{field}", sentence, f"{one} --train.{field}")
        for one, other, sentence, fields in (
            (
                MUON,
                "--train.optimizer=anyprecision_adamw",
                "only muon reads this",
                "muon_lr=1 muon_momentum=0 muon_nesterov=false muon_ns_steps=1 "
                "muon_ns_coefficients=polar_express muon_adjust_lr_fn=original",
            ),
            (
                "--train.optimizer=anyprecision_adamw",
                "--train.optimizer=sgd",
                "only anyprecision_adamw and muon read this",
                "optimizer_dtype=fp32",
            ),
            (
                MUON,
                "--train.optimizer=sgd",
                "only adam and adamax and adamw and anyprecision_adamw and muon and nadam and novograd",
                "adam_beta1=0.5 adam_beta2=0.9 adam_epsilon=1",
            ),
        )
        for field in fields.split()
    ),
    *(
        (
            f"{MUON} --train.{name}=0.997",
            "must be at most 0.996: a state in bfloat16",
            f"{MUON} --train.{name}=0.997 --train.optimizer_dtype=fp32",
        )
        for name in ("adam_beta1", "adam_beta2", "muon_momentum")
    ),
    ("--train.adam_beta2=0.999 --train.optimizer=anyprecision_adamw", "must be at most 0.996", ""),
    (f"{MUON} {LORA}", "muon would have no matrix", LORA),
    (
        f"{FIRST}path=a/b {FIRST}data_files=f",
        "data_files needs ds_type",
        f"{FIRST}path=a/b {FIRST}data_files=f {FIRST}ds_type=csv",
    ),
    (
        f"{FIRST}preprocess_shards=2 {FIRST}shards=2 {FIRST}shards_idx=0",
        "give one of them",
        f"{FIRST}preprocess_shards=2",
    ),
    (f"{FIRST}shards=2", "give both, or neither", f"{FIRST}shards=2 {FIRST}shards_idx=1"),
    (f"{FIRST}shards_idx=0", "give both, or neither", f"{FIRST}shards=1 {FIRST}shards_idx=0"),
    (
        f"{FIRST}shards=2 {FIRST}shards_idx=2",
        "from 0 to one below",
        f"{FIRST}shards=2 {FIRST}shards_idx=0",
    ),
    (f"{FIRST}name=x", "not read from anywhere", f"{FIRST}path=a/b {FIRST}name=x"),
    (f"{FIRST}split=x", "not read from anywhere", f"{FIRST}path=a/b {FIRST}split=x"),
    (f"{FIRST}revision=x", "not read from anywhere", f"{FIRST}path=a/b {FIRST}revision=x"),
    (f"{FIRST}ds_type=csv", "not read from anywhere", f"{FIRST}path={__file__} {FIRST}ds_type=csv"),
    (f"{FIRST}data_files=x {FIRST}ds_type=csv", "not read from anywhere", ""),
    (f"{FIRST}type=text", "tokenized already", f"{FIRST}type=tokenized"),
    (
        f"{FIRST}path={__file__} {FIRST}name=x",
        "only a dataset on the Hub",
        f"{FIRST}path={__file__}",
    ),
    (
        f"{FIRST}path=s3://b/f.csv {FIRST}revision=x",
        "only a dataset on the Hub",
        f"{FIRST}path=s3://b/f.csv",
    ),
    (
        f"{FIRST}path=a/b {FIRST}data_files=f {FIRST}ds_type=csv {FIRST}name=x",
        "give one of them",
        f"{FIRST}path=a/b {FIRST}data_files=f {FIRST}ds_type=csv {FIRST}revision=x",
    ),
    (
        f"{FIRST}path=a/b {FIRST}ds_type=csv",
        "the Hub knows the format",
        f"{FIRST}path=s3://b/f {FIRST}ds_type=csv",
    ),
    (
        "--model.config_path=null",
        "one of them must be given",
        "--model.config_path=null --model.model_path=x",
    ),
    (
        "--data.dataloader_prefetch_factor=2",
        "without workers it must be null",
        "--data.dataloader_prefetch_factor=2 --data.dataloader_num_workers=1",
    ),
    (
        "--data.sample_packing_mp_start_method=fork",
        "only multipack packs groups",
        "--data.sample_packing_mp_start_method=fork --data.sample_packing_method=multipack",
    ),
    (
        "--data.sample_packing_mp_start_method=fork --data.sample_packing_method=multipack "
        "--data.sample_packing_sequentially=true",
        "only multipack packs groups",
        "--data.sample_packing_sequentially=true",
    ),
    ("--data.val_set_size=0", "a number of samples", "--data.val_set_size=1"),
    ("--data.val_set_size=1.5", "a number of samples", "--data.val_set_size=0.5"),
    ("--data.val_set_size=-0.5", "a number of samples", "--data.val_set_size=2"),
    (
        '--data.val_set_size=1 --data.test_datasets=[{"path":"dummy"}]',
        "give one of them",
        '--data.test_datasets=[{"path":"dummy"}]',
    ),
    (
        '--data.val_set_size=1 --data.datasets=[{"path":"x"},{"path":"x","max_samples":3}]',
        "rows that are given twice",
        '--data.val_set_size=1 --data.datasets=[{"path":"x","split":"a"},{"path":"x","split":"b"}]',
    ),
    (
        '--data.test_datasets=[{"path":"dummy","shards":2}]',
        "give both, or neither",
        '--data.test_datasets=[{"path":"dummy","shards":2,"shards_idx":1}]',
    ),
    (
        "--data.dataset_shard_num=2",
        "give both, or neither",
        "--data.dataset_shard_num=2 --data.dataset_shard_idx=1",
    ),
    (
        "--data.dataset_shard_idx=0",
        "give both, or neither",
        "--data.dataset_shard_num=1 --data.dataset_shard_idx=0",
    ),
    ("--data.dataset_shard_num=2 --data.dataset_shard_idx=2", "from 0 to one below", ""),
    (
        "--data.push_dataset_to_hub=a/b",
        "pushing needs hf_use_auth_token",
        "--data.push_dataset_to_hub=a/b --data.hf_use_auth_token=true",
    ),
    (
        "--data.push_dataset_to_hub=a/b --data.hf_use_auth_token=true "
        "--data.skip_prepare_dataset=true",
        "nothing is prepared",
        "--data.hf_use_auth_token=true --data.skip_prepare_dataset=true",
    ),
    (
        "--train.data_parallel_shard_size=0",
        "must be -1, or 1 or more",
        "--train.data_parallel_shard_size=1",
    ),
    (
        "--train.data_parallel_replicate_size=-2",
        "must be -1, or 1 or more",
        "--train.data_parallel_replicate_size=-1",
    ),
    (
        "--train.init_device=cpu",
        "fsdp2 builds the model on meta",
        f"{NONE} --train.init_device=cpu",
    ),
    (
        f"{DDP} --train.init_device=meta",
        "only fsdp2 builds the model on meta",
        "--train.init_device=meta",
    ),
    (
        "--train.enable_full_shard=false --train.reshard_after_forward=true",
        "ZeRO-2 keeps parameters",
        "--train.enable_full_shard=false --train.reshard_after_forward=false",
    ),
    (
        "--train.lr_decay_style=cosine --train.lr_min=1e-3",
        "the decay would rise",
        "--train.lr_min=1e-3",
    ),
    (
        "--train.lr_warmup_ratio=0.1 --train.lr_start=1",
        "the warmup would fall",
        "--train.lr_start=1",
    ),
    (
        "--train.lr_decay_style=linear --train.lr_warmup_ratio=0.5 --train.lr_decay_ratio=0.4",
        "the decay would end",
        "--train.lr_decay_style=linear --train.lr_warmup_ratio=0.4 --train.lr_decay_ratio=0.5",
    ),
    (
        "--train.lr_warmup_steps=3 --train.lr_warmup_ratio=0.1",
        "the warmup has two lengths",
        "--train.lr_warmup_steps=3",
    ),
    (
        "--train.lr_warmup_steps=3 --train.lr_start=1",
        "the warmup would fall",
        "--train.lr_warmup_steps=3 --train.lr_start=1e-6",
    ),
    (
        "--train.lr_decay_style=linear --train.lr_decay_steps=9 --train.lr_decay_ratio=0.4",
        "the decay has two ends",
        "--train.lr_decay_style=linear --train.lr_decay_steps=9",
    ),
    (
        "--train.lr_decay_style=linear --train.lr_decay_steps=9 --train.lr_warmup_steps=10",
        "the decay would end before the warmup: after 9 steps, and 10",
        "--train.lr_decay_style=linear --train.lr_decay_steps=9 --train.lr_warmup_steps=9",
    ),
    (
        "--train.lr_decay_style=wsd --train.max_steps=9 --train.lr_constant_steps=9",
        "leave no decay of 9",
        "--train.lr_decay_style=wsd --train.max_steps=9 --train.lr_constant_steps=8",
    ),
    (
        "--train.lr_decay_style=noam --train.lr_decay_ratio=0.4",
        "noam has no end",
        "--train.lr_decay_ratio=0.4",
    ),
    (
        "--train.lr_decay_style=cosine_with_restarts --train.lr_cycles=1.5",
        "a whole number of cycles",
        "--train.lr_decay_style=cosine --train.lr_cycles=1.5",
    ),
    (
        "--train.lr_decay_style=step --train.lr_step_size=3",
        "step needs it",
        "--train.lr_decay_style=step --train.lr_step_size=3 --train.lr_gamma=0.5",
    ),
    (
        "--train.enable_gradient_checkpointing=false --train.enable_reentrant=true",
        "nothing is recomputed",
        "--train.enable_reentrant=true",
    ),
    (
        '--train.enable_gradient_checkpointing=false --train.recompute_modules=["mlp"]',
        "nothing is recomputed",
        '--train.recompute_modules=["mlp"]',
    ),
    (
        "--train.enable_full_determinism=true",
        "needs allow_cuda_launch_blocking",
        "--train.enable_full_determinism=true --train.allow_cuda_launch_blocking=true",
    ),
    (
        "--train.profile_start_step=2",
        "profiling must end after it starts",
        "--train.profile_start_step=2 --train.profile_end_step=3",
    ),
    (
        f"{DDP} --train.expert_parallel_size=2",
        "only fsdp2 reads this",
        "--train.expert_parallel_size=2",
    ),
    (
        f"{NONE} --train.ep_outside=true",
        "only fsdp2",
        "--train.ep_outside=true --train.expert_parallel_size=2",
    ),
    ("--train.ep_outside=true", "there is nothing to place", ""),
    ("--train.activation_gpu_limit=1", "nothing is offloaded", ""),
    ("--model.ep_dispatch=deepep", "one process has all experts", "--model.ep_dispatch=alltoall"),
    (
        "--model.deepep_buffer_size_gb=1",
        "only deepep reads this",
        "--model.deepep_buffer_size_gb=2",
    ),
    ("--model.deepep_num_sms=24", "only deepep reads this", "--model.deepep_num_sms=20"),
    ("--model.deepep_num_sms=21", "must be even", ""),
    ("--model.ep_dispatch=deepep --train.enable_mixed_precision=false", "carries bfloat16", ""),
    (
        "--train.enable_gradient_checkpointing=false --train.moe_checkpoint_method=moe_act",
        "nothing is recomputed",
        "--train.moe_checkpoint_method=moe_act",
    ),
    (
        '--train.moe_checkpoint_method=moe_act --train.recompute_modules=["self_attn"]',
        "experts are not recomputed",
        '--train.moe_checkpoint_method=moe_act --train.recompute_modules=["mlp"]',
    ),
    (
        "--train.moe_checkpoint_method=moe_act --train.enable_reentrant=true",
        "without reentering",
        "",
    ),
    (
        f"{DDP} --train.ulysses_parallel_size=2",
        "only fsdp2 reads this",
        "--train.ulysses_parallel_size=2",
    ),
    (
        f"{DDP} --train.ringattn_parallel_size=2",
        "only fsdp2 reads this",
        "--train.ringattn_parallel_size=2",
    ),
    (
        "--train.cp_fsdp_mode=none",
        "no sequence is spread",
        "--train.cp_fsdp_mode=none --train.ringattn_parallel_size=2",
    ),
    (f"{QLORA} --lora.enable_lora=false", "QLoRA implies LoRA", QLORA),
    (f"{HELD} --train.eval_strategy=no --data.eval_sample_packing=false", "nothing is eval", HELD),
    ("--data.eval_sample_packing=true", "nothing to evaluate on", f"{HELD} {EVAL_PACKING}"),
    # An option that cannot act where it is given.
    *(
        (f"{POLICY} --policy.loss={given}", sentence, f"{POLICY} --policy.loss={right}")
        for given, sentence, right in (
            ("dr_grpo --policy.kl_type=k1", "needs beta above 0", "dr_grpo --policy.beta=0.1"),
            (
                "dr_grpo --policy.beta=0 --policy.kl_type=k3",
                "needs beta above 0",
                "dr_grpo --policy.beta=0.1 --policy.kl_type=k3",
            ),
            (
                "policy_loss --policy.tis_clip_low=0.5",
                "needs use_tis",
                "policy_loss --policy.use_tis=true --policy.tis_clip_low=0.5",
            ),
            (
                "policy_loss --policy.use_tis=false --policy.tis_clip_high=5",
                "needs use_tis",
                "policy_loss --policy.use_tis=true --policy.tis_clip_high=5",
            ),
            (
                "ppo --policy.clip_low_threshold=1.3 --policy.clip_high_threshold=1.1",
                "must be at most clip_high_threshold = 1.1",
                "ppo --policy.clip_low_threshold=1.1 --policy.clip_high_threshold=1.1",
            ),
            (
                "gspo --policy.clip_low_threshold=1.3",
                "must be at most clip_high_threshold = 1.2",
                "cispo --policy.clip_low_threshold=1.3",
            ),
            (
                "dr_grpo --policy.clip_high_threshold=0.7",
                "must be at least clip_low_threshold = 0.8",
                "cispo --policy.clip_high_threshold=0.7",
            ),
            (
                "policy_loss --policy.use_tis=true --policy.tis_clip_low=3",
                "must be at most tis_clip_high = 2",
                "policy_loss --policy.use_tis=true --policy.tis_clip_low=3 --policy.tis_clip_high=4",
            ),
            (
                "policy_loss --policy.use_tis=true --policy.tis_clip_high=0.05",
                "must be at least tis_clip_low = 0.1",
                "policy_loss --policy.use_tis=true --policy.tis_clip_high=0.5",
            ),
            (
                "policy_loss --policy.use_tis=true --policy.tis_clip_low=0 --policy.tis_clip_high=0",
                "or nothing is learned",
                "policy_loss --policy.use_tis=true --policy.tis_clip_low=0",
            ),
            ("cispo --policy.clip_high_threshold=0", "or nothing is learned", "cispo"),
        )
    ),
    (f"{KTO} {NO_WEIGHTS}", "both weights are 0", f"{KTO} {NO_WEIGHTS.split()[0]}"),
    (
        f"{KTO} {NO_WEIGHTS} --preference.loss=apo_zero_unpaired",
        "both weights are 0",
        f"{KTO} {NO_WEIGHTS} --preference.sft_ratio=1",
    ),
    (f"{KTO} --preference.share_prefix=true", "are not paired", f"{DPO} {SHARED_PREFIX}"),
    *(
        (
            f"{TEACHER} --distillation.cross_entropy_share=1 --distillation.{given}",
            "nothing of the divergence",
            f"{TEACHER} --distillation.cross_entropy_share=0.9 --distillation.{given}",
        )
        for given in ("divergence=reverse", "divergence=jsd --distillation.beta=0.2")
    ),
    (
        "--data.sample_packing_group_size=9",
        "only multipack packs groups",
        "--data.sample_packing_group_size=9 --data.sample_packing_method=multipack",
    ),
    (
        "--data.sample_packing_method=multipack --data.sample_packing_sequentially=true "
        "--data.sample_packing_group_size=9",
        "only multipack packs groups",
        "",
    ),
    (
        '--train.optimizer=sgd --train.optimizer_args={"dampening":0.5}',
        "dampening does nothing without momentum",
        '--train.optimizer=sgd --train.optimizer_args={"dampening":0.5,"momentum":0.9}',
    ),
    ("--train.load_weights_mode=all_ranks", "weights are drawn", f"{WEIGHTS} {ALL_READ}"),
    *(
        (f"--lora.{field}", "only enable_lora makes", f"{LORA} --lora.{field} {WEIGHTS}")
        for field in (
            "lora_rank=2",
            "lora_alpha=2",
            "rslora=true",
            "use_dora=true",
            "lora_plus_scale=2",
            'lora_target_modules=["q_proj"]',
            "save_lora_only=true",
            "merge_lora_interval=3",
        )
    ),
    *(
        (f"{LORA} --lora.{field}", "only enable_qlora makes", f"{QLORA} --lora.{field}")
        for field in ("quant_format=block_fp8", 'exclude_modules=["x"]', "enable_aqn=true")
    ),
    (
        f"{LORA} --lora.quant_group_size=64",
        "only enable_qlora makes",
        f"{QLORA} --lora.quant_format=nf4 --lora.quant_group_size=64",
    ),
    (
        f"{QLORA} --lora.aqn_alpha=2",
        "only enable_aqn makes",
        f"{QLORA} --lora.enable_aqn=true --lora.aqn_alpha=2",
    ),
    (
        f"{QLORA} --lora.quant_group_size=32",
        "nvfp4 has groups of 16",
        f"{QLORA} --lora.quant_group_size=16",
    ),
    (
        f"{QLORA} --lora.quant_format=nf4",
        "nf4 has groups of 32, 64",
        f"{QLORA} --lora.quant_format=nf4 --lora.quant_group_size=4096",
    ),
    (
        f"{QLORA} --lora.quant_format=block_fp8 --lora.quant_group_size=129",
        "block_fp8 has groups of 1 to 128",
        f"{QLORA} --lora.quant_format=block_fp8 --lora.quant_group_size=128",
    ),
    (
        f"{LORA} --lora.reset_optimizer_on_merge=true",
        "no merge to reset at",
        f"{LORA} --lora.reset_optimizer_on_merge=true --lora.merge_lora_interval=2",
    ),
    (
        f"{LORA} --lora.save_lora_only=true {WEIGHTS} --lora.merge_lora_interval=2",
        "would lose what was merged",
        f"{LORA} --lora.save_lora_only=true {WEIGHTS}",
    ),
    (f"{LORA} --lora.save_lora_only=true", "random weights are not stored", ""),
    (
        f"{LORA} --lora.save_lora_only=true {WEIGHTS} --train.save_hf_weights=false",
        "no Hugging Face checkpoint",
        "",
    ),
    (
        f"{QLORA} --lora.enable_aqn=true --train.enable_compile=true",
        "compiled code would be recompiled",
        f"{QLORA} --train.enable_compile=true",
    ),
    (
        f"{QLORA} --train.expert_parallel_size=2",
        "quantized experts are buffers",
        f"{LORA} --train.expert_parallel_size=2",
    ),
]


@pytest.mark.parametrize(
    "broken, sentence, neighbor", RULES, ids=[b.replace("--", "") for b, _, _ in RULES]
)
def test_rule(least, broken, sentence, neighbor, monkeypatch):
    # as with a newer torch
    monkeypatch.setattr("tilewright.trainer.config.train.no_zero_bubble", lambda: None)
    found = errors(least, *broken.split())
    fields = {a[2:].partition("=")[0] for a in broken.split()}
    assert any(
        sentence in line and any(re.search(rf"{f}\b.* = ", line) for f in fields) for line in found
    ), found
    least(*neighbor.split())


def test_an_empty_repository_is_none(least):
    """As in configurations that other programs write: it asks for no token."""
    least("--data.push_dataset_to_hub=")
    least("--data.push_dataset_to_hub=", "--data.skip_prepare_dataset=true")


def test_only_the_field_at_fault_is_named(least):
    for field, value in (("loss_temperature", "0.5"), ("z_loss", "0.1")):
        [line] = errors(least, *DPO.split(), f"--train.{field}={value}")
        assert line.startswith(f"train.{field} = {value}, train.loss = preference: a preference is")


def test_the_best_is_the_least_or_the_most_as_its_name_says(least):
    for name, mode in (
        ("eval_loss", "min"),
        ("eval_perplexity/accuracy", "min"),
        ("eval_accuracy/loss", "max"),
    ):
        assert least(HELD, f"--train.best_metric={name}").train.mode_of_best == mode
        other = least(HELD, f"--train.best_metric={name}", "--train.best_mode=max")
        assert other.train.mode_of_best == "max"
    assert least().train.mode_of_best is None


def test_a_strategy_of_saving_stands_for_other_fields(least):
    for given, want in (
        ("no", (0, 0, False)),
        ("steps --train.save_steps=3", (3, 0, False)),
        ("epoch", (0, 1, False)),
        ("epoch --train.save_epochs=0.5", (0, 0.5, False)),
        ("best", (0, 0, True)),
        ("auto", (0, 1, False)),
    ):
        t = least(*BEST.split(), *f"--train.save_strategy={given}".split()).train
        assert (t.save_steps, t.save_epochs, t.save_best) == want


def test_no_is_a_word_without_quotes(write):
    text = LEAST.replace("out}", "out, save_strategy: no, eval_strategy: no}")
    found = load(write(text)).train
    assert (found.eval_strategy, found.save_strategy) == ("no", "no")
    wrong = errors(load, write(text.replace("eval_strategy: no", "eval_strategy: yes")))
    assert wrong == [
        "train.eval_strategy = true: a boolean does not fit here; expected auto | no | steps | epoch"
    ]


def test_rules_of_the_machine(least, monkeypatch):
    if platform.no_cuda():
        assert errors(least, NONE, "--train.init_device=cuda") == [
            "train.init_device = cuda: no CUDA device"
        ]
        assert errors(least, "--train.enable_activation_offload=true") == [
            "train.enable_activation_offload = true: activations are in CPU memory already: no "
            "CUDA device"
        ]
    monkeypatch.setattr(platform, "no_module", lambda name: f"no {name} here")
    deep = "--model.ep_dispatch=deepep", "--train.expert_parallel_size=2"
    assert errors(least, *deep) == ["model.ep_dispatch = deepep: no deep_ep here"]
    for field, package in (
        ("use_wandb", "wandb"),
        ("use_tensorboard", "tensorboard"),
        ("plot_loss", "matplotlib"),
    ):
        sentence = f"train.{field} = true: no {package} here"
        assert errors(least, f"--train.{field}=true") == [sentence]
    monkeypatch.setattr(platform, "no_module", lambda name: None)
    if platform.no_cuda():
        assert errors(least, *deep) == ["model.ep_dispatch = deepep: no CUDA device"]
    assert least("--train.use_wandb=true").train.use_wandb
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    [line] = errors(least)
    assert "CUDA_LAUNCH_BLOCKING is set" in line
    assert least("--train.allow_cuda_launch_blocking=true")


def test_zero_bubble_schedules_are_refused_where_torch_computes_other_gradients(least, monkeypatch):
    zero = *PP.split(), f"{STEPS}=2", f"{STAGES}=2", f"{SCHEDULE}=ZBVZeroBubble"
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    least(*zero)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    [line] = errors(least, *zero)
    assert line.startswith(
        "train.pipeline_parallel_schedule = ZBVZeroBubble: torch 2.11.0+cu130 adds"
    )
    least(*zero[:-1], f"{SCHEDULE}=Interleaved1F1B")


def test_building_without_a_file_follows_the_rules_too():
    parts = {"model": {"config_path": "x"}, "data": {"datasets": [{"path": "dummy"}]}}
    assert Config(**parts, train={"output_dir": "o"})
    with pytest.raises(ValueError, match="1F1B needs at least as many micro-batches"):
        Config(**parts, train={"output_dir": "o", "pipeline_parallel_size": 2})


# ---- the mesh

BOTH = {"ringattn_parallel_size": 2, "ulysses_parallel_size": 2}


@pytest.mark.parametrize(
    "values, world, expected",
    [
        ({}, 1, (1, 1)),
        ({}, 8, (1, 8)),
        ({"data_parallel_shard_size": 4}, 8, (2, 4)),
        ({"data_parallel_replicate_size": 2}, 8, (2, 4)),
        ({"data_parallel_shard_size": 1}, 4, (4, 1)),
        ({"data_parallel_shard_size": 2, "data_parallel_replicate_size": 3}, 6, (3, 2)),
        ({"data_parallel_mode": "ddp"}, 4, (4, 1)),
        ({"data_parallel_mode": "none"}, 1, (1, 1)),
        ({"data_parallel_mode": "none"}, 2, "none: trains one process, but 2 were started"),
        ({"data_parallel_shard_size": 3}, 8, "do not make 8 processes"),
        ({"data_parallel_shard_size": 16}, 8, "do not make 8 processes"),
        ({"data_parallel_replicate_size": 3}, 8, "do not make 8 processes"),
        ({"data_parallel_replicate_size": 16}, 8, "do not make 8 processes"),
        (
            {"data_parallel_shard_size": 2, "data_parallel_replicate_size": 2},
            8,
            "do not make 8 processes",
        ),
        ({"expert_parallel_size": 2}, 4, (1, 4)),
        (
            {"expert_parallel_size": 3},
            4,
            "expert_parallel_size = 3: does not divide the 4 processes of a shard group",
        ),
        (
            {"expert_parallel_size": 4, "data_parallel_replicate_size": 2},
            4,
            "does not divide the 2 processes",
        ),
        ({**BOTH}, 8, (1, 8)),
        ({**BOTH, "cp_fsdp_mode": "none"}, 8, (4, 2)),
        ({**BOTH, "cp_fsdp_mode": "ulysses_only"}, 16, (2, 8)),
        ({**BOTH, "cp_fsdp_mode": "ring_only", "data_parallel_replicate_size": 2}, 16, (4, 4)),
        ({**BOTH, "data_parallel_shard_size": 1}, 8, (2, 4)),
        (
            {**BOTH},
            6,
            "ringattn_parallel_size = 2, train.ulysses_parallel_size = 2: 6 processes do not "
            "divide by 4",
        ),
        ({**BOTH}, 2, "2 processes do not divide by 4"),
        ({"tensor_parallel_size": 2}, 8, (1, 4)),
        ({"tensor_parallel_size": 2, "ringattn_parallel_size": 2}, 8, (1, 4)),
        ({"tensor_parallel_size": 2, "data_parallel_shard_size": 1}, 8, (4, 1)),
        ({"tensor_parallel_size": 2, "expert_parallel_size": 8}, 8, (1, 4)),
        (
            {"tensor_parallel_size": 2},
            3,
            "train.tensor_parallel_size = 2: 3 processes do not divide by 2",
        ),
        (
            {"tensor_parallel_size": 2, "expert_parallel_size": 3},
            8,
            "expert_parallel_size = 3: does not divide the 8 processes of a shard group",
        ),
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
            6,
            "train.pipeline_parallel_size = 2, train.tensor_parallel_size = 2: 6 processes do not "
            "divide by 4",
        ),
        (
            {"data_parallel_mode": "none", "pipeline_parallel_size": 2},
            4,
            "none: trains 2 processes, but 4 were started",
        ),
        (
            {**BOTH, "data_parallel_shard_size": 4},
            8,
            "do not make 8 processes of 4 for each batch",
        ),
        (
            {**BOTH, "data_parallel_replicate_size": 3},
            8,
            "do not make 8 processes of 4 for each batch",
        ),
        (
            {**BOTH, "cp_fsdp_mode": "none", "expert_parallel_size": 4},
            8,
            "does not divide the 2 processes of a shard",
        ),
    ],
)
def test_mesh(values, world, expected):
    train = Train(output_dir="o", **values)
    if isinstance(expected, tuple):
        assert layout_of(train, world).parameters == expected
    else:
        assert expected in errors(layout_of, train, world)[0]


def test_reshard_follows_full_shard_unless_it_is_given():
    assert (
        Train(output_dir="o").reshard and not Train(output_dir="o", enable_full_shard=False).reshard
    )
    assert not Train(output_dir="o", reshard_after_forward=False).reshard


def test_an_error_comes_whole_from_another_process():
    error = pickle.loads(pickle.dumps(ConfigError(["one", "two"])))
    assert str(error) == "one\ntwo" and error.problems == ["one", "two"]


def test_a_loss_that_reads_what_no_batch_has_is_refused(monkeypatch):
    rows = {**LOSSES._rows, "weighted": Loss(lambda *_: (), columns=("labels", "weights"))}
    monkeypatch.setattr(LOSSES, "_rows", rows)
    parts = {"model": {"config_path": "x"}, "data": {"datasets": [{"path": "dummy"}]}}
    said = "train.loss = weighted: reads weights of a batch; columns are input_ids, labels, adv"
    with pytest.raises(ValueError, match=said):
        Config(**parts, train={"output_dir": "o", "loss": "weighted"})
