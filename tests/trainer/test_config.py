"""Every field is read or rejected; all errors are reported at once; a loaded configuration can be
written and reloaded.
"""

import ast
import json
import pathlib
import pickle
import re
from collections.abc import Iterator
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
    Dataset,
    Lora,
    Model,
    Train,
    dialects,
    load,
    resolved,
)
from tilewright.trainer.config import config as module
from tilewright.trainer.config.dialects import CONVERSIONS, State
from tilewright.trainer.config.overrides import unknown
from tilewright.trainer.config.readers import Scope, readers
from tilewright.trainer.config.reference import meaning, page
from tilewright.trainer.field_tree import get, kind, leaves
from tilewright.trainer.losses.loss import LOSSES, Loss
from tilewright.trainer.parallel.mesh import layout_of
from tilewright.trainer.section import (
    Broken,
    Needs,
    Resume,
    Stated,
    kept,
    needs,
    problems,
    properties,
)

pytestmark = pytest.mark.packages

ROOT = pathlib.Path(__file__).parents[2]
TRAINER = ROOT / "tilewright/trainer"
LEAVES = leaves(Config)
# Fields of which this version accepts some values only, with what they state.
REFUSED = {
    path: properties(field)
    for path, field in LEAVES.items()
    if properties(field).refused and not path.startswith("data.test_datasets.")
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


# Paths of fields whose name one section alone has, by these names; for entries, the first one's.
PATHS = {
    path.rpartition(".")[2]: path.replace("datasets.", "datasets.0.")
    for path in LEAVES
    if not path.startswith(("data.test_datasets.", "precision."))
}


def overrides_of(text):
    """--section.field=value of each word `field=value`."""
    words = (word.partition("=") for word in text.split())
    return [f"--{PATHS.get(name, name)}={value}" for name, _, value in words]


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
        there, _ = dialects.difference(path)
        assert there in ("none", "of its server's configuration"), path


def test_reference_is_current():
    text = (ROOT / "docs/trainer/fields.md").read_text()
    assert text == page(Config, text), (
        "run `python -m tilewright.trainer.config docs docs/trainer/fields.md`"
    )
    assert all(field.description.endswith((".", ")")) for field in LEAVES.values())


def test_one_field_is_explained(capsys):
    assert module.main(["--explain", "train.ep_outside", "weight_decay", "train.optimizer"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == ["train.ep_outside", "  type:    boolean", "  default: false"]
    assert said[5:7] == [
        "  read by: parallel.mesh",
        "  rule:    any value but false needs train.data_parallel_mode = fsdp2",
    ]
    assert said[8].startswith("  in xorl: place it outside the EP-FSDP mesh; here: the same")
    assert said[9:11] == ["train.weight_decay", "  type:    number | mapping, at least 0"]
    assert said[-1] == "  in transformers: optim"
    assert module.main(["--explain", "train.weight_decai"]) == 2
    assert capsys.readouterr().err == (
        "train.weight_decai: unknown key; did you mean train.weight_decay?\n"
    )


def test_every_field_can_be_explained():
    """With its own rules, those of others that speak of it, and its names in other libraries."""
    said = {path: module.explain(path) for path in LEAVES}
    for path, field in LEAVES.items():
        assert f"  meaning: {meaning(field)}" in said[path]
        assert f"  resume:  {properties(field).resume}" in said[path]
        assert all(f"\n  in {who}: " in said[path] for who in dialects.names_of(path))
        section = path.rpartition(".")[0]
        for other in (need.other for need in properties(field).needs):
            assert f"  rule:    {path}: " in said[other if "." in other else f"{section}.{other}"]
    assert (
        "refused with some values of train.eval_strategy: nothing is" in said["train.best_metric"]
    )
    assert "data.datasets: no row of these types has a prompt that is cut" in said["data.datasets"]
    assert "  rule:    What a loss reads of a batch is there" in said["train.loss"]
    assert "refused with some values of train.loss: Options are those" in said["train.loss_args"]
    assert f"  rule:    only {{}}: {REFUSED['model.encoders'].refused}" in said["model.encoders"]
    assert "  rule:    any value but 1.0 needs lora.enable_aqn = true" in said["lora.aqn_alpha"]
    assert "refused with some values of lora.enable_lora: only ad" in said["train.optimizer"]


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
    single = {path for path, own in REFUSED.items() if len(own.accepted) < 2}
    entries = {path for path in LEAVES if path.startswith("data.test_datasets.")}
    assert LEAVES.keys() - entries - readers(Config).keys() == single | {
        "train.allow_cuda_launch_blocking",
        "train.save_strategy",
    }


def test_what_reads_a_field_may_come_from_a_table():
    need = Needs("optimizer", lambda: ["muon", "lion"])
    assert need.met("muon") and not need.met("sgd")
    assert need.sentence() == "only muon and lion read this"
    wanted = "any value but 0.02 needs train.optimizer = muon or lion"
    assert need.wanted(0.02, "train.optimizer") == wanted


def test_what_is_wrong_comes_in_the_order_of_fields_and_each_rule_is_told_of_all_its_fields():
    """Sections of a function, here first an entry of lists, are told by class."""

    def short(entry: Dataset, train: Train, training: bool) -> Iterator[Stated]:
        """It is long."""
        yield training and train.seed, "is short", "path", "train.seed"
        yield train.seed, None, "name"

    sections = {"model": {"config_path": "x"}, "train": {"output_dir": "o", "muon_lr": 1}}
    entries = [{"path": "dummy"}, {"path": "dummy"}]
    broken = Broken()
    config = Config.model_validate({**sections, "data": {"datasets": entries}}, context=broken)
    assert [p.paths for p in problems(config, [short])] == [
        ("data.datasets.0.path", "train.seed"),
        ("data.datasets.1.path", "train.seed"),
        ("train.muon_lr", "train.optimizer"),
    ]
    assert broken == problems(config, [short], training=False) == problems(config, ())
    assert "It is long" in [*needs("data.datasets.name", config, [short])]
    told = "data.datasets.path: refused with some values of train.seed: is short"
    assert told in [*needs("train.seed", config, [short])]


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
        "enable_lora lora_rank lora_alpha rslora use_dora lora_target_modules moe_shared_lora "
        "moe_hybrid_shared_lora save_lora_only "
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
# Its other blocks, each of which changes the first.
BLOCKS = """
- model: {model_path: Qwen/Qwen3-8B}
- train: {init_device: meta, load_weights_mode: broadcast}
- train: {data_parallel_mode: fsdp2, enable_full_shard: true, data_parallel_shard_size: 8,
    data_parallel_replicate_size: 1}
- train: {data_parallel_shard_size: 8, data_parallel_replicate_size: 4}
- train: {data_parallel_mode: ddp, init_device: auto}
- train: {data_parallel_mode: none, init_device: cpu}
- data: {sample_packing_method: sequential, sample_packing_sequence_len: 8192}
- data: {datasets: [{path: data.jsonl, type: tokenized, max_seq_len: 4096}]}
- train: {optimizer: adamw, lr: 1e-5, weight_decay: 0.01, lr_warmup_ratio: 0.05,
    lr_decay_style: cosine}
- train: {optimizer: muon, lr: 1e-4, muon_lr: 2e-4, muon_momentum: 0.95, muon_ns_steps: 5}
- train: {ckpt_manager: dcp, save_steps: 500, save_epochs: 0.5, output_dir: outputs/my_run,
    load_checkpoint_path: "", save_hf_weights: false}
- train: {enable_gradient_checkpointing: true, recompute_modules: [self_attn, mlp]}
- train: {moe_checkpoint_method: moe_act}
- train: {log_format: structured, use_wandb: true, wandb_project: my_project,
    wandb_name: qwen3_8b_ft, wandb_log_interval: 10}
- train: {enable_activation_offload: true, activation_gpu_limit: 4.0}
"""


@pytest.mark.parametrize("changes", yaml.safe_load(BLOCKS), ids=str)
def test_each_block_of_the_page_loads_and_says_what_it_says(changes, write, monkeypatch):
    monkeypatch.setattr(platform, "no_module", lambda name: None)
    monkeypatch.setattr(platform, "no_cuda", lambda *_: None)
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
    given = {
        "train.lr": 2e-5,
        "train.output_dir": "outputs/other",
        "train.pipeline_parallel_size": 4,
        "model.attn_implementation": "flash_attention_4",
        "data.sample_packing_sequence_len": 16384,
        "lora.enable_lora": True,
        "lora.lora_rank": 32,
    }
    words = [word for path, value in given.items() for word in (f"--{path}", str(value))]
    config = load(write(PAGE), words)
    assert {path: get(config, path) for path in given} == given


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
            assert default != THEIRS[path] and dialects.difference(path), path
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
    for path in LEAVES
    if not path.startswith("data.test_datasets.")
    for who, names in dialects.names_of(path).items()
    for name in names
]


def test_names_of_other_libraries_lead_to_one_field_and_stand_in_the_reference():
    text = (ROOT / "docs/trainer/fields.md").read_text()
    for who, name, path in NAMED:
        assert name not in {p.rpartition(".")[2] for p in LEAVES}
        assert dialects.taken_by(name).ours == path
        assert f"did you mean {path}" in unknown(Config, f"{path.partition('.')[0]}.{name}")
        assert f"| {who} | `{name}` | `{path}` |" in text
    assert {"ERNIEKit", "NxDT", "transformers", "TRL", "peft"} <= {who for who, *_ in NAMED}


@pytest.mark.parametrize("who", LISTED)
def test_every_row_of_a_reference_has_its_state(who):
    rows, found = LISTED[who], [*dialects.rows(Config, who, LISTED[who])]
    names = {row.name for row in found}
    assert len({*rows}) == len(rows) <= len(found) == len(names) > 100
    assert {*rows} <= names | {n.partition(": ")[0] for n in names}
    for row in found:
        name, _, value = row.name.partition(": ")
        fields = dialects.named(Config, who, name)
        if row.state is State.FIELD:
            assert row.here == fields and {*fields} <= LEAVES.keys() and len(fields) == 1
        elif row.state is State.MISSING and not value:
            assert not fields, f"{name} is there by now"
        elif row.state is State.MISSING:
            assert dialects.by_value(Config, who, name, value) is None, f"{row.name} is there"
        elif row.state is State.REFUSED and not value:
            assert [properties(LEAVES[path]).refused for path in fields] in ([], [row.here])
    # Nothing is said of a name that the reference does not have.
    said = {n for n, e in dialects.dialects()[who].items() if who != "xorl" and e.row(n)}
    assert {n.partition(": ")[0] for n in said} <= {n.partition(": ")[0] for n in rows}


def test_a_row_without_a_state_is_an_error():
    with pytest.raises(KeyError, match="NxDT has flux, which is nothing here"):
        [*dialects.rows(Config, "NxDT", ["seed", "flux"])]
    with pytest.raises(KeyError, match=r"optim\.name: lion"):
        [*dialects.rows(Config, "NxDT", ["optim.name: lion"])]


def test_states_follow_from_fields_and_tables(monkeypatch):
    """What lands gets its state without an edit; what is gone loses it."""
    [row] = dialects.rows(Config, "NxDT", ["optim.name: rmsprop"])
    assert row == ("optim.name: rmsprop", State.SETTINGS, {"train.optimizer": "rmsprop"})
    [row] = dialects.rows(Config, "xorl", ["model.encoders"])
    assert row.state is State.REFUSED and "tokens alone" in row.here
    monkeypatch.delitem(dialects.dialects()["ERNIEKit"], "offload_optim")
    with pytest.raises(KeyError, match="offload_optim"):
        [*dialects.rows(Config, "ERNIEKit", ["offload_optim"])]


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
    assert said.endswith("`train.data_parallel_mode: fsdp2`, `train.enable_full_shard: false`")
    [said] = errors(least, "--train.neuron_rt_exec_timeout", "9")
    assert "NxDT's neuron_rt_exec_timeout: not yet: a field" in said


@pytest.mark.parametrize(
    ("who", "name"),
    [
        (w, n)
        for w, own in dialects.dialects().items()
        for n, entry in own.items()
        if entry.settings
    ],
)
def test_what_is_written_for_a_name_of_another_configuration_loads(who, name):
    given = dialects.dialects()[who][name].settings
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


def test_every_entry_of_a_dialect_names_what_there_is():
    used = set()
    for who, entries in dialects.dialects().items():
        for name, entry in entries.items():
            meant = (
                [entry.ours] if entry.ours else [re.sub(r"\.\d+", "", p) for p in entry.settings]
            )
            if who == "xorl":
                assert name in LEAVES and entry.there and entry.sentence, name
            else:
                assert bool(meant) != bool(entry.sentence) and {*meant} <= LEAVES.keys(), name
            assert entry.convert is None or entry.ours
            used |= {entry.convert} - {None}
    assert used == CONVERSIONS.keys()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("train.save_only_model=true", "train.save_optimizer = false"),
        ("train.greater_is_better=true", "train.best_mode = max"),
        ("train.do_eval=false", "train.eval_strategy = no"),
        ("distillation.loss_add_tail=false", "distillation.outside = renormalize"),
        ("train.save_top_k=-1", "train.save_total_limit = null"),
        ("train.save_top_k=3", "train.save_total_limit = 3"),
        ("train.save_top_k=all", "train.save_total_limit"),
        ("train.greater_is_better=2", "train.best_mode"),
        ("train.epochs=3", "train.num_train_epochs"),
    ],
)
def test_a_value_of_another_configuration_is_converted(given, meant, least, write):
    sentence = f"unknown key; did you mean {meant}?"
    [line] = errors(least, f"--{given}")
    assert line.endswith(f": {sentence}")
    (section, name), value = given.partition("=")[0].split("."), given.partition("=")[2]
    tree = yaml.safe_load(LEAST)
    tree.setdefault(section, {})[name] = yaml.safe_load(value)
    [line] = errors(load, write(yaml.safe_dump(tree)))
    assert line.endswith(f": {sentence}")


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
    want = load(path, ["--train.seed", "7"])
    assert load(write(printed)) == want and "seed: 7" in printed


# ---- overrides


LIST = '--data.datasets [{"path":"a/b"},{"path":"dummy"}]'


@pytest.mark.parametrize(
    "arguments, path, expected",
    [
        ("--train.lr 1e-4", "train.lr", 1e-4),
        ("--train.lr=1e-4", "train.lr", 1e-4),
        ("--train.max-steps 3", "train.max_steps", 3),
        ("--train.max-steps=3", "train.max_steps", 3),
        ("--train.data_parallel_shard_size -1", "train.data_parallel_shard_size", -1),
        ("--train.save_hf_weights false", "train.save_hf_weights", False),
        ("--train.wandb_name a=b", "train.wandb_name", "a=b"),
        ("--train.wandb_name=a=b", "train.wandb_name", "a=b"),
        ("--train.wandb_name=--x", "train.wandb_name", "--x"),
        ('--train.wandb_name "null"', "train.wandb_name", "null"),
        ("--train.wandb_name 12", "train.wandb_name", "12"),
        ("--train.max_steps null", "train.max_steps", None),
        ("--train.load_checkpoint_path ", "train.load_checkpoint_path", None),
        ('--train.wandb_tags ["a","b"]', "train.wandb_tags", ["a", "b"]),
        ("--train.wandb_tags=[a,b]", "train.wandb_tags", ["a", "b"]),
        ("--data.val_set_size 100", "data.val_set_size", 100),
        ("--data.val_set_size 0.05", "data.val_set_size", 0.05),
        ("--data.datasets.0.path hub/name", "data.datasets.0.path", "hub/name"),
        ("--data.datasets.0.max-seq-len=9", "data.datasets.0.max_seq_len", 9),
        (LIST, "data.datasets.1.path", "dummy"),
        ("--train.seed 1 --train.seed 2", "train.seed", 2),
    ],
)
def test_override(least, arguments, path, expected):
    value = get(least(*arguments.split(" ")), path)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("train.lr", ["train.lr: not an override; write --section.field value"]),
        ("--train.lr", ["--train.lr: no value given"]),
        ("--train.lr --train.seed=1", ["--train.lr: no value given"]),
        ("--lr 1", ["--lr = 1: unknown key; lr belongs under train"]),
        ("--train {}", ["--train = {}: a section; give its fields"]),
        ("--train.max_steps true", ["train.max_steps = true: input should be a valid integer, "]),
        ("--train.lr nan", ["train.lr = nan: input should be a finite number; expected number"]),
        ("--train.wandb_tags [a,]]", ["train.wandb_tags = [a,]]: not JSON:"]),
        *(
            (
                f"--{field} x",
                [
                    f"{field} = x: there is nothing at {where} to change; give the whole list, as "
                    f"""--{name} '[{{"path": "x"}}]'"""
                ],
            )
            for field, where, name in (
                ("data.datasets.1.path", "data.datasets.1", "data.datasets"),
                ("data.datasets.path", "data.datasets", "data.datasets"),
                ("data.test_datasets.0.path", "data.test_datasets.0", "data.test_datasets"),
            )
        ),
    ],
)
def test_wrong_override(least, arguments, expected):
    found = errors(least, *arguments.split())
    assert len(found) == len(expected)
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True))


def test_without_a_file_arguments_are_enough():
    given = overrides_of('config_path=x datasets=[{"path":"dummy"}] output_dir=o')
    assert module.from_command_line(given).data.datasets[0].path == "dummy"


# ---- the resolved configuration


@pytest.mark.parametrize(
    "given",
    [
        "",
        "dataloader_num_workers=2",
        "config_path=a/config.json",
        "data_parallel_mode=none lr=3e-7",
        "val_set_size=0.1",
        "wandb_name=null",
        'wandb_name="null"',
        "wandb_name=ünïcode:[x]",
        'optimizer=sgd recompute_modules=["mlp"]',
        'enable_qlora=true exclude_modules=["lm_head"] enable_aqn=true',
    ],
)
def test_resolved_is_a_fixed_point(least, write, given):
    config = least(*overrides_of(given))
    again = load(write(resolved(config)))
    assert again == config and resolved(again) == resolved(config)
    # In the order of the documentation.
    assert list(yaml.safe_load(resolved(config))) == list(Config.model_fields)


def test_what_is_derived(least):
    config = least()
    assert config.model.tokenizer_path == config.model.config_path == "nowhere"
    assert least(*overrides_of(QLORA)).lora.enable_lora and not config.lora.enable_lora
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


def other_values(path, own):
    """Values that the type allows, other than the accepted ones."""
    named, accepted = kind(LEAVES[path].annotation), own.accepted or (LEAVES[path].default,)
    candidates = {"boolean": [True, False], "mapping": [{"a": 1}]}.get(named, named.split(" | "))
    return [v for v in candidates if v not in accepted]


@pytest.mark.parametrize(
    "path, value", [(path, v) for path, own in REFUSED.items() for v in other_values(path, own)]
)
def test_unsupported_fields_are_refused_with_their_sentence(least, path, value):
    at = path.replace("datasets.", "datasets.0.")
    found = [
        line
        for line in errors(least, f"--{at}", value if isinstance(value, str) else json.dumps(value))
        if line.startswith(f"{at} = ")
    ]
    assert (
        [line for line in found if line.endswith(f": {REFUSED[path].refused}")] == found[:1] != []
    )


def test_every_refused_field_has_another_value_and_takes_its_default(least):
    for path, own in REFUSED.items():
        assert other_values(path, own)
        at = path.replace("datasets.", "datasets.0.")
        value = get(least(), at)
        least(f"--{at}={value if isinstance(value, str) else json.dumps(value)}")


NONE, DDP, FSDP2 = (f"data_parallel_mode={mode}" for mode in ("none", "ddp", "fsdp2"))
MUON, BFLOAT16 = "optimizer=muon", "optimizer=anyprecision_adamw"
LORA, QLORA = "enable_lora=true", "enable_qlora=true"
SCHEDULE, STAGES = "pipeline_parallel_schedule", "virtual_pipeline_size"
PIPELINE = "pipeline_parallel_size=2 gradient_accumulation_steps=2"
INTERLEAVED, ZERO_BUBBLE = f"{SCHEDULE}=Interleaved1F1B", f"{SCHEDULE}=ZBVZeroBubble"
TENSOR = "tensor_parallel_size=2 merge_qkv=false"
RECOMPUTED = "enable_gradient_checkpointing"
HELD = "val_set_size=4"
BEST = f"{HELD} best_metric=eval_loss"
MULTIPACK = "sample_packing_method=multipack"
DPO = "train.loss=preference path=/ type=preference_tokenized"
KTO = "train.loss=preference path=/ type=unpaired_preference_tokenized preference.loss=kto"
NO_WEIGHTS = "kto_desirable_weight=0 kto_undesirable_weight=0"
TEACHER = "train.loss=distillation path=/"
EVALUATED = [
    "eval_on_start=true",
    "eval_sanity_batches=1",
    "eval_max_batches=1",
    "eval_micro_batch_size=1",
    "best_metric=eval_loss",
]
OF_MUON = """muon_lr=1 muon_momentum=0 muon_nesterov=false muon_ns_steps=1
    muon_ns_coefficients=polar_express muon_adjust_lr_fn=original"""
OF_LORA = """lora_rank=2 lora_alpha=2 rslora=true use_dora=true lora_plus_scale=2 save_lora_only=true
    lora_target_modules=["q_proj"] merge_lora_interval=3"""
TWO_FILES = 'datasets=[{"path":"x"},{"path":"x","max_samples":3}]'
TWO_SPLITS = 'datasets=[{"path":"x","split":"a"},{"path":"x","split":"b"}]'
# A violation of a rule, its error, and what mends it.
RULES = [
    *(
        (field, "there is nothing to evaluate on", HELD)
        for field in [*EVALUATED, "eval_strategy=epoch", "eval_strategy=steps eval_steps=2"]
    ),
    *(
        (f"{HELD} eval_strategy=no {field}", "nothing is evaluated", "eval_strategy=auto")
        for field in [*EVALUATED, "eval_sample_packing=false"]
    ),
    ("eval_on_start=true", "nothing to evaluate on", "eval_on_start=false"),
    ("eval_sample_packing=true", "nothing to evaluate on", HELD),
    (f"{HELD} best_mode=max", "no checkpoint is the best", BEST),
    (f"{HELD} save_best=true", "no checkpoint is the best", BEST),
    ("save_strategy=best", "no checkpoint is the best", BEST),
    (f"{HELD} best_metric=eval_reward", "does not follow from its name", "best_mode=max"),
    *(
        (f"{BEST} save_strategy={given}", sentence, f"save_strategy={right}")
        for given, sentence, right in (
            ("no save_epochs=1", "it would save by epochs", "epoch"),
            ("steps save_steps=2 save_epochs=1", "it would save by epochs", "steps save_epochs=0"),
            ("best save_epochs=1", "it would save by epochs", "epoch"),
            ("no save_steps=2", "it would save by steps", "steps"),
            ("epoch save_steps=2", "it would save by steps", "epoch save_steps=0"),
            ("best save_steps=2", "it would save by steps", "auto"),
            ("no save_best=true", "it would save the best", "best"),
            ("steps", "say every how many", "steps save_steps=1"),
            ("epoch save_epochs=0", "say every how many", "epoch save_epochs=1"),
            ("best save_best=false", "it would not save the best", "best save_best=true"),
        )
    ),
    (f"{HELD} eval_strategy=steps", "say every how many", "eval_steps=1"),
    (f"{HELD} eval_steps=2", "only eval_strategy: steps counts steps", "eval_strategy=steps"),
    (f"{HELD} eval_epochs=2", "only eval_strategy: epoch counts epochs", "eval_strategy=epoch"),
    *(
        (f"{HELD} eval_max_batches={n}", "or a share up to 1.0", "eval_max_batches=0.5")
        for n in ("-1", "1.5", "3.0", "-0.5")
    ),
    ("test_max_batches=1", "nothing is tested", 'do_test=true test_datasets=[{"path":"dummy"}]'),
    ("load_optimizer=false", "nothing is loaded", "load_checkpoint_path=x/global_step_2"),
    (
        "load_optimizer=false load_checkpoint_path=auto",
        "name the folder whose weights to begin from",
        "load_optimizer=true",
    ),
    ("ckpt_manager=torch", "torch.save writes pickles", "ckpt_manager=dcp"),
    (
        "model.revision=v1 tokenizer_path=some/tokenizer",
        "several ids would have different ones",
        "tokenizer_path=nowhere",
    ),
    (f"model.revision=v1 config_path={ROOT}", "local folders have none", "model_path=some/model"),
    *(
        (f"{NONE} {field}", "there is one stage", f"{FSDP2} {PIPELINE} {more}")
        for field, more in (
            (f"{SCHEDULE}=GPipe", ""),
            (f"{STAGES}=2", INTERLEAVED),
            ("pipeline_split=[2,3]", ""),
            ("pp_variable_seq_lengths=false", ""),
        )
    ),
    *(
        (
            f"{PIPELINE} {mode}",
            "data_parallel_shard_size: 1 makes replicas of pipelines",
            f"{FSDP2} data_parallel_shard_size=1",
        )
        for mode in (NONE, DDP)
    ),
    *(
        (f"{PIPELINE} {SCHEDULE}={name} {STAGES}=2", "run one stage on each", f"{STAGES}=1")
        for name in ("1F1B", "GPipe")
    ),
    *(
        (f"{PIPELINE} {SCHEDULE}={name}", "needs two or more stages on each", f"{STAGES}=3")
        for name in ("Interleaved1F1B", "InterleavedZeroBubble")
    ),
    (
        f"{PIPELINE} {ZERO_BUBBLE} {STAGES}=2 {RECOMPUTED}=true enable_reentrant=true",
        "reentrant recomputation cannot compute",
        INTERLEAVED,
    ),
    (f"{PIPELINE} {ZERO_BUBBLE} {STAGES}=3", "needs two stages on each process", f"{STAGES}=2"),
    (
        f"{PIPELINE} pipeline_split=[1,2,3]",
        "needs a number for each stage, of which there are",
        f"{INTERLEAVED} {STAGES}=2 pipeline_split=[1,2,3,1]",
    ),
    (f"{PIPELINE} pipeline_split=[2,0]", "one layer or more", "pipeline_split=[2,1]"),
    (
        f"{PIPELINE} gradient_accumulation_steps=1",
        "1F1B needs at least as many micro-batches as the 2 stages; GPipe takes any",
        f"{SCHEDULE}=GPipe",
    ),
    (
        f"{PIPELINE} gradient_accumulation_steps=5 {INTERLEAVED} {STAGES}=2",
        "Interleaved1F1B runs them in 2 rounds of equal size, so their number must divide by 2",
        "gradient_accumulation_steps=3",
    ),
    (
        f"{PIPELINE} {ZERO_BUBBLE} {STAGES}=2 enable_compile=true",
        "compiled code computes the gradients of inputs and weights at once",
        f"{SCHEDULE}=1F1B {STAGES}=1",
    ),
    ("tensor_parallel_size=2", "merged matrix; set merge_qkv: false", "merge_qkv=false"),
    (f"{TENSOR} batch_invariant=true", "in which order the ranks' sums", "batch_invariant=false"),
    *(
        (
            f"{TENSOR} {mode}",
            "only fsdp2 takes parameters that are sharded already; with it, "
            "data_parallel_shard_size: 1 makes replicas of tensor-parallel groups",
            f"{FSDP2} data_parallel_shard_size=1",
        )
        for mode in (NONE, DDP)
    ),
    (
        f"{TENSOR} {QLORA}",
        "every process has all of a quantized matrix",
        f"enable_qlora=false {LORA}",
    ),
    *(
        (f"batch_invariant=true {native}=true", "PyTorch's own operators", f"{native}=false")
        for native in ("rmsnorm_native", "activation_native", "rope_native")
    ),
    (f"batch_invariant=true {LORA}", "the products of adapters", "batch_invariant=false"),
    (f"{DDP} data_parallel_shard_size=2", "only fsdp2 reads this", "data_parallel_shard_size=1"),
    *(
        (f"{DDP} {name}_size=2", "only fsdp2 reads this", FSDP2)
        for name in ("data_parallel_replicate", "expert_parallel", "ulysses_parallel")
    ),
    (f"{DDP} ringattn_parallel_size=2", "only fsdp2 reads this", FSDP2),
    *(
        (f"{NONE} {field}", "only fsdp2 reads this", FSDP2)
        for field in (
            "reshard_after_forward=false",
            "enable_full_shard=false",
            "enable_forward_prefetch=false",
            'basic_modules=["x"]',
        )
    ),
    (f"{NONE} ep_outside=true", "only fsdp2", f"{FSDP2} expert_parallel_size=2"),
    *((f"{BFLOAT16} {field}", "only muon reads this", MUON) for field in OF_MUON.split()),
    ("optimizer=sgd optimizer_dtype=fp32", "only anyprecision_adamw and muon read this", BFLOAT16),
    *(
        (
            f"optimizer=sgd {field}",
            "only adam and adamax and adamw and anyprecision_adamw and muon and nadam and novograd",
            MUON,
        )
        for field in ("adam_beta1=0.5", "adam_beta2=0.9", "adam_epsilon=1")
    ),
    *(
        (f"{MUON} {name}=0.997", "must be at most 0.996: a state in", "optimizer_dtype=fp32")
        for name in ("adam_beta1", "adam_beta2", "muon_momentum")
    ),
    (f"{BFLOAT16} adam_beta2=0.999", "must be at most 0.996", "optimizer=adamw"),
    (f"{MUON} {LORA}", "muon would have no matrix", "optimizer=adamw"),
    (
        'optimizer=sgd optimizer_args={"dampening":0.5}',
        "dampening does nothing without momentum",
        'optimizer_args={"dampening":0.5,"momentum":0.9}',
    ),
    ("path=a/b data_files=f", "data_files needs ds_type", "ds_type=csv"),
    ("preprocess_shards=2 shards=2 shards_idx=0", "give one of them", "preprocess_shards=null"),
    ("shards=2", "give both, or neither", "shards_idx=1"),
    ("shards_idx=0", "give both, or neither", "shards=1"),
    ("shards=2 shards_idx=2", "from 0 to one below", "shards_idx=0"),
    *(
        (field, "not read from anywhere", "path=a/b")
        for field in ("name=x", "split=x", "data.datasets.0.revision=x", "data_files=x ds_type=csv")
    ),
    ("ds_type=csv", "not read from anywhere", f"path={__file__}"),
    ("type=text", "tokenized already", "type=tokenized"),
    (f"path={__file__} name=x", "only a dataset on the Hub", "path=a/b"),
    ("path=s3://b/f.csv data.datasets.0.revision=x", "only a dataset on the Hub", "path=a/b"),
    (
        "path=a/b data_files=f ds_type=csv name=x",
        "give one of them",
        "name=null data.datasets.0.revision=x",
    ),
    ("path=a/b ds_type=csv", "the Hub knows the format", "path=s3://b/f"),
    ("config_path=null", "one of them must be given", "model_path=x"),
    ("dataloader_prefetch_factor=2", "without workers it must be null", "dataloader_num_workers=1"),
    ("sample_packing_mp_start_method=fork", "only multipack packs groups", MULTIPACK),
    ("sample_packing_group_size=9", "only multipack packs groups", MULTIPACK),
    *(
        (
            f"{MULTIPACK} sample_packing_sequentially=true {field}",
            "only multipack packs groups",
            "sample_packing_sequentially=false",
        )
        for field in ("sample_packing_mp_start_method=fork", "sample_packing_group_size=9")
    ),
    ("val_set_size=0", "a number of samples", "val_set_size=1"),
    ("val_set_size=1.5", "a number of samples", "val_set_size=0.5"),
    ("val_set_size=-0.5", "a number of samples", "val_set_size=2"),
    ('val_set_size=1 test_datasets=[{"path":"dummy"}]', "give one of them", "val_set_size=null"),
    (f"val_set_size=1 {TWO_FILES}", "rows that are given twice", TWO_SPLITS),
    (
        'test_datasets=[{"path":"dummy","shards":2}]',
        "give both, or neither",
        'test_datasets=[{"path":"dummy","shards":2,"shards_idx":1}]',
    ),
    ("dataset_shard_num=2", "give both, or neither", "dataset_shard_idx=1"),
    ("dataset_shard_idx=0", "give both, or neither", "dataset_shard_num=1"),
    ("dataset_shard_num=2 dataset_shard_idx=2", "from 0 to one below", "dataset_shard_idx=1"),
    ("push_dataset_to_hub=a/b", "pushing needs hf_use_auth_token", "hf_use_auth_token=true"),
    (
        "push_dataset_to_hub=a/b hf_use_auth_token=true skip_prepare_dataset=true",
        "nothing is prepared",
        "push_dataset_to_hub=null",
    ),
    ("data_parallel_shard_size=0", "must be -1, or 1 or more", "data_parallel_shard_size=1"),
    (
        "data_parallel_replicate_size=-2",
        "must be -1, or 1 or more",
        "data_parallel_replicate_size=-1",
    ),
    ("init_device=cpu", "fsdp2 builds the model on meta", NONE),
    (f"{DDP} init_device=meta", "only fsdp2 builds the model on meta", FSDP2),
    (
        "enable_full_shard=false reshard_after_forward=true",
        "ZeRO-2 keeps parameters",
        "reshard_after_forward=false",
    ),
    ("lr_decay_style=cosine lr_min=1e-3", "the decay would rise", "lr_decay_style=constant"),
    ("lr_warmup_ratio=0.1 lr_start=1", "the warmup would fall", "lr_warmup_ratio=0"),
    (
        "lr_decay_style=linear lr_warmup_ratio=0.5 lr_decay_ratio=0.4",
        "the decay would end",
        "lr_decay_ratio=0.5",
    ),
    ("lr_warmup_steps=3 lr_warmup_ratio=0.1", "the warmup has two lengths", "lr_warmup_ratio=0"),
    ("lr_warmup_steps=3 lr_start=1", "the warmup would fall", "lr_start=1e-6"),
    (
        "lr_decay_style=linear lr_decay_steps=9 lr_decay_ratio=0.4",
        "the decay has two ends",
        "lr_decay_ratio=1",
    ),
    (
        "lr_decay_style=linear lr_decay_steps=9 lr_warmup_steps=10",
        "the decay would end before the warmup: after 9 steps, and 10",
        "lr_warmup_steps=9",
    ),
    (
        "lr_decay_style=wsd max_steps=9 lr_constant_steps=9",
        "leave no decay of 9",
        "lr_constant_steps=8",
    ),
    ("lr_decay_style=noam lr_decay_ratio=0.4", "noam has no end", "lr_decay_style=constant"),
    (
        "lr_decay_style=cosine_with_restarts lr_cycles=1.5",
        "a whole number of cycles",
        "lr_decay_style=cosine",
    ),
    ("lr_decay_style=step lr_step_size=3", "step needs it", "lr_gamma=0.5"),
    *(
        (f"{RECOMPUTED}=false {field}", "nothing is recomputed", f"{RECOMPUTED}=true")
        for field in (
            "enable_reentrant=true",
            'recompute_modules=["mlp"]',
            "moe_checkpoint_method=moe_act",
        )
    ),
    (
        'moe_checkpoint_method=moe_act recompute_modules=["self_attn"]',
        "experts are not recomputed",
        'recompute_modules=["mlp"]',
    ),
    (
        "moe_checkpoint_method=moe_act enable_reentrant=true",
        "without reentering",
        "enable_reentrant=false",
    ),
    (
        "enable_full_determinism=true",
        "needs allow_cuda_launch_blocking",
        "allow_cuda_launch_blocking=true",
    ),
    ("profile_start_step=2", "profiling must end after it starts", "profile_end_step=3"),
    ("ep_outside=true", "there is nothing to place", "expert_parallel_size=2"),
    ("activation_gpu_limit=1", "nothing is offloaded", "activation_gpu_limit=0"),
    ("ep_dispatch=deepep", "one process has all experts", "ep_dispatch=alltoall"),
    ("deepep_buffer_size_gb=1", "only deepep reads this", "deepep_buffer_size_gb=2"),
    ("deepep_num_sms=24", "only deepep reads this", "deepep_num_sms=20"),
    ("deepep_num_sms=21", "must be even", "deepep_num_sms=20"),
    ("ep_dispatch=deepep enable_mixed_precision=false", "carries bfloat16", "ep_dispatch=alltoall"),
    ("cp_fsdp_mode=none", "no sequence is spread", "ringattn_parallel_size=2"),
    # An option that cannot act where it is given.
    *(
        (f"train.loss=policy path=/ policy.loss={given}", sentence, right)
        for given, sentence, right in (
            ("dr_grpo kl_type=k1", "needs beta above 0", "policy.beta=0.1"),
            ("dr_grpo policy.beta=0 kl_type=k3", "needs beta above 0", "policy.beta=0.1"),
            ("policy_loss tis_clip_low=0.5", "needs use_tis", "use_tis=true"),
            ("policy_loss use_tis=false tis_clip_high=5", "needs use_tis", "use_tis=true"),
            (
                "ppo clip_low_threshold=1.3 clip_high_threshold=1.1",
                "must be at most clip_high_threshold = 1.1",
                "clip_low_threshold=1.1",
            ),
            ("gspo clip_low_threshold=1.3", "must be at most clip_high", "policy.loss=cispo"),
            ("dr_grpo clip_high_threshold=0.7", "must be at least clip_low", "policy.loss=cispo"),
            ("policy_loss use_tis=true tis_clip_low=3", "must be at most tis", "tis_clip_high=4"),
            (
                "policy_loss use_tis=true tis_clip_high=0.05",
                "must be at least tis_clip_low = 0.1",
                "tis_clip_high=0.5",
            ),
            (
                "policy_loss use_tis=true tis_clip_low=0 tis_clip_high=0",
                "or nothing is learned",
                "tis_clip_high=2",
            ),
            ("cispo clip_high_threshold=0", "or nothing is learned", "clip_high_threshold=2"),
        )
    ),
    (f"{KTO} {NO_WEIGHTS}", "both weights are 0", "kto_undesirable_weight=1"),
    (
        f"{KTO} {NO_WEIGHTS} preference.loss=apo_zero_unpaired",
        "both weights are 0",
        "preference.sft_ratio=1",
    ),
    (f"{KTO} share_prefix=true", "are not paired", f"{DPO} preference.loss=sigmoid"),
    *(
        (
            f"{TEACHER} cross_entropy_share=1 divergence={given}",
            "nothing of the divergence",
            "cross_entropy_share=0.9",
        )
        for given in ("reverse", "jsd distillation.beta=0.2")
    ),
    ("load_weights_mode=all_ranks", "weights are drawn", "model_path=x"),
    (f"{QLORA} enable_lora=false", "QLoRA implies LoRA", "enable_qlora=false"),
    *((field, "only enable_lora makes", f"{LORA} model_path=x") for field in OF_LORA.split()),
    *(
        (f"{LORA} {field}", "only enable_qlora makes", QLORA)
        for field in (
            "quant_format=block_fp8",
            'exclude_modules=["x"]',
            "enable_aqn=true",
            "quant_group_size=64 quant_format=nf4",
        )
    ),
    (f"{QLORA} aqn_alpha=2", "only enable_aqn makes", "enable_aqn=true"),
    (f"{QLORA} quant_group_size=32", "nvfp4 has groups of 16", "quant_group_size=16"),
    (f"{QLORA} quant_format=nf4", "nf4 has groups of 32, 64", "quant_group_size=4096"),
    (
        f"{QLORA} quant_format=block_fp8 quant_group_size=129",
        "block_fp8 has groups of 1 to 128",
        "quant_group_size=128",
    ),
    (f"{LORA} reset_optimizer_on_merge=true", "no merge to reset at", "merge_lora_interval=2"),
    (
        f"{LORA} save_lora_only=true model_path=x merge_lora_interval=2",
        "would lose what was merged",
        "merge_lora_interval=0",
    ),
    (f"{LORA} save_lora_only=true", "random weights are not stored", "model_path=x"),
    (
        f"{LORA} save_lora_only=true model_path=x save_hf_weights=false",
        "no Hugging Face checkpoint",
        "save_hf_weights=true",
    ),
    (f"{QLORA} enable_aqn=true enable_compile=true", "would be recompiled", "enable_aqn=false"),
    (
        f"{QLORA} expert_parallel_size=2",
        "quantized experts are buffers",
        f"enable_qlora=false {LORA}",
    ),
]


@pytest.mark.parametrize("broken, sentence, mend", RULES, ids=[broken for broken, _, _ in RULES])
def test_rule(least, broken, sentence, mend, monkeypatch):
    # as with a newer torch
    monkeypatch.setattr("tilewright.trainer.parallel.fields.no_zero_bubble", lambda: None)
    given = overrides_of(broken)
    found = errors(least, *given)
    fields = {a[2:].partition("=")[0] for a in given}
    assert any(
        sentence in line and any(re.search(rf"{f}\b.* = ", line) for f in fields) for line in found
    ), found
    least(*given, *overrides_of(mend))


def test_an_empty_repository_is_none(least):
    """As in configurations that other programs write: it asks for no token."""
    least("--data.push_dataset_to_hub=")
    least("--data.push_dataset_to_hub=", "--data.skip_prepare_dataset=true")


def test_only_the_field_at_fault_is_named(least):
    for field, value in (("loss_temperature", "0.5"), ("z_loss", "0.1")):
        [line] = errors(least, *overrides_of(f"{DPO} {field}={value}"))
        assert line.startswith(f"train.{field} = {value}, train.loss = preference: a preference is")


def test_the_best_is_the_least_or_the_most_as_its_name_says(least):
    for name, mode in (
        ("eval_loss", "min"),
        ("eval_perplexity/accuracy", "min"),
        ("eval_accuracy/loss", "max"),
    ):
        given = overrides_of(f"{HELD} best_metric={name}")
        assert least(*given).train.mode_of_best == mode
        other = least(*given, "--train.best_mode=max")
        assert other.train.mode_of_best == "max"
    assert least().train.mode_of_best is None


def test_a_strategy_of_saving_stands_for_other_fields(least):
    for given, want in (
        ("no", (0, 0, False)),
        ("steps save_steps=3", (3, 0, False)),
        ("epoch", (0, 1, False)),
        ("epoch save_epochs=0.5", (0, 0.5, False)),
        ("best", (0, 0, True)),
        ("auto", (0, 1, False)),
    ):
        t = least(*overrides_of(f"{BEST} save_strategy={given}")).train
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
        assert errors(least, *overrides_of(f"{NONE} init_device=cuda")) == [
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
    zero = overrides_of(f"{PIPELINE} {STAGES}=2 {ZERO_BUBBLE}")
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    least(*zero)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    [line] = errors(least, *zero)
    assert line.startswith(
        "train.pipeline_parallel_schedule = ZBVZeroBubble: torch 2.11.0+cu130 adds"
    )
    least(*zero, *overrides_of(INTERLEAVED))


def test_building_without_a_file_follows_the_rules_too():
    parts = {"model": {"config_path": "x"}, "data": {"datasets": [{"path": "dummy"}]}}
    assert Config(**parts, train={"output_dir": "o"})
    with pytest.raises(ValueError, match="1F1B needs at least as many micro-batches"):
        Config(**parts, train={"output_dir": "o", "pipeline_parallel_size": 2})


# ---- the mesh

CONTEXT = "ringattn_parallel_size=2 ulysses_parallel_size=2"
TENSOR_ALONE, PIPELINE_ALONE = "tensor_parallel_size=2", "pipeline_parallel_size=2"


@pytest.mark.parametrize(
    "values, world, expected",
    [
        ("", 1, (1, 1)),
        ("", 8, (1, 8)),
        ("data_parallel_shard_size=4", 8, (2, 4)),
        ("data_parallel_replicate_size=2", 8, (2, 4)),
        ("data_parallel_shard_size=1", 4, (4, 1)),
        ("data_parallel_shard_size=2 data_parallel_replicate_size=3", 6, (3, 2)),
        (DDP, 4, (4, 1)),
        (NONE, 1, (1, 1)),
        (NONE, 2, "none: trains one process, but 2 were started"),
        ("data_parallel_shard_size=3", 8, "do not make 8 processes"),
        ("data_parallel_shard_size=16", 8, "do not make 8 processes"),
        ("data_parallel_replicate_size=3", 8, "do not make 8 processes"),
        ("data_parallel_replicate_size=16", 8, "do not make 8 processes"),
        ("data_parallel_shard_size=2 data_parallel_replicate_size=2", 8, "do not make 8 processes"),
        ("expert_parallel_size=2", 4, (1, 4)),
        (
            "expert_parallel_size=3",
            4,
            "expert_parallel_size = 3: does not divide the 4 processes of a shard group",
        ),
        (
            "expert_parallel_size=4 data_parallel_replicate_size=2",
            4,
            "does not divide the 2 processes",
        ),
        (CONTEXT, 8, (1, 8)),
        (f"{CONTEXT} cp_fsdp_mode=none", 8, (4, 2)),
        (f"{CONTEXT} cp_fsdp_mode=ulysses_only", 16, (2, 8)),
        (f"{CONTEXT} cp_fsdp_mode=ring_only data_parallel_replicate_size=2", 16, (4, 4)),
        (f"{CONTEXT} data_parallel_shard_size=1", 8, (2, 4)),
        (CONTEXT, 6, "train.ulysses_parallel_size = 2: 6 processes do not divide by 4"),
        (CONTEXT, 2, "2 processes do not divide by 4"),
        (TENSOR_ALONE, 8, (1, 4)),
        (f"{TENSOR_ALONE} ringattn_parallel_size=2", 8, (1, 4)),
        (f"{TENSOR_ALONE} data_parallel_shard_size=1", 8, (4, 1)),
        (f"{TENSOR_ALONE} expert_parallel_size=8", 8, (1, 4)),
        (TENSOR_ALONE, 3, "train.tensor_parallel_size = 2: 3 processes do not divide by 2"),
        (f"{TENSOR_ALONE} expert_parallel_size=3", 8, "does not divide the 8 processes of a shard"),
        (
            f"{PIPELINE_ALONE} {TENSOR_ALONE}",
            6,
            "train.pipeline_parallel_size = 2, train.tensor_parallel_size = 2: 6 processes do not ",
        ),
        (f"{NONE} {PIPELINE_ALONE}", 4, "none: trains 2 processes, but 4 were started"),
        (f"{CONTEXT} data_parallel_shard_size=4", 8, "make 8 processes of 4 for each batch"),
        (f"{CONTEXT} data_parallel_replicate_size=3", 8, "make 8 processes of 4 for each batch"),
        (
            f"{CONTEXT} cp_fsdp_mode=none expert_parallel_size=4",
            8,
            "does not divide the 2 processes of a shard",
        ),
    ],
)
def test_mesh(values, world, expected):
    train = Train(output_dir="o", **dict(word.split("=") for word in values.split()))
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
