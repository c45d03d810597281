"""Every field of the trainer's configuration has its documented effect, measured on runs.

A row names a field, another value, and the expected difference between two runs of the public
command in this process that differ in nothing else (tests/lib/field_effects.py).
"""

import contextlib
import dataclasses
import io
import json
import pathlib
import re
import sys

import pytest
import torch
import yaml

pytest.importorskip("pydantic")
pytest.importorskip("datasets")
pytest.importorskip("transformers")


from field_effects import (
    HELD,
    REFUSED,
    ROWS,
    grouped,
    make_world,
    observe,
    packages,
    page,
    settings_of,
)
from torch.distributed.pipelining import PipelineStage
from whole import data_of, identity_of

from tilewright.trainer import build, train
from tilewright.trainer.checkpoint import hf
from tilewright.trainer.config import Config, ConfigError, load
from tilewright.trainer.field_tree import kind, leaves
from tilewright.trainer.models import ops_choice
from tilewright.trainer.parallel import pipeline, stages
from tilewright.trainer.parallel.mesh import Mesh, layout_of
from tilewright.trainer.section import properties

ROOT = next(p for p in pathlib.Path(__file__).resolve().parents if (p / "pyproject.toml").is_file())


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("fields"))


def seen_by(world, changes, differs):
    key = json.dumps(changes, sort_keys=True)
    if key not in world.seen:
        world.seen[key] = observe(world, changes)
    return world.seen[key][differs]


@pytest.mark.parametrize("one", ROWS, ids=lambda one: one.path)
def test_a_field_has_its_effect(one, world):
    base = dict(one.base)
    changes = {**base, one.field: one.value}
    if one.differs == "plan":
        found = [plan(world, c) for c in (base, changes)]
    elif one.path == "data.skip_prepare_dataset":  # what the run before has prepared
        cache = str(world.root / "skip")
        found = [
            seen_by(world, {**c, "data.dataset_prepared_path": cache}, one.differs)
            for c in (base, changes)
        ]
    else:
        found = [seen_by(world, c, one.differs) for c in (base, changes)]
    assert found[0] != found[1], f"{one.differs} stay {found[0]}"


def test_weights_and_biases_gets_every_evaluation_and_every_nth_step(world):
    changes = {"train.use_wandb": True, "train.wandb_log_interval": 2}
    options, *logged, last = seen_by(world, changes, "wandb")
    assert options["steps"] == 4 and last == "finish"
    found = [(step, "eval_loss" in names) for step, names in logged]
    assert found == [(0, True), (2, False), (4, False), (4, True)]


def plan(world, changes):
    """Which of eight ranks do what."""
    config = load_settings(world, changes)
    layout = layout_of(config.train, 8)
    return (
        pipeline_plan(config),
        layout.sizes,
        layout.stages().tolist(),
        layout.stages_of_experts().tolist(),
        [layout.batch_rank(r) for r in range(8)],
    )


def pipeline_plan(config):
    """The ranks of stages, their layers, who computes what when, and the length of the hidden
    states that travel in a step with micro-batches of 5 and 9 tokens.
    """
    t = config.train
    if t.pipeline_parallel_size == 1:
        return None
    from training import fake_group

    with torch.device("meta"):
        model = build.Transformer(
            hf.load_config(config.model.config_path), ops_choice.Ops.resolve()
        )
    ranks = stages.ranks_of_stages(t)
    with fake_group(t.pipeline_parallel_size):
        own = [
            PipelineStage(torch.nn.Identity(), i, len(ranks), torch.device("cpu"))
            for i, rank in enumerate(ranks)
            if rank == 0
        ]
        schedule = pipeline.make_schedule(t, own, t.gradient_accumulation_steps)
    longest = pipeline.longest_micro_batch(t.micro_batch_size, config.data, Mesh())
    length = stages.length_of_hidden(t, [5, 9], longest)
    return ranks, stages.layers_of_stages(model, t), str(schedule.pipeline_order), length


# Rows whose other value names the same contents.
SAME_CONTENTS = {"data.on_bad_row", "data.skip_prepare_dataset", "data.datasets.preprocess_shards"}
# What rows of one process leave out: values that no resumed run of it can have, or all have.
NOT_RESUMED = {
    "train.max_steps",
    "model.ep_dispatch",
    "model.deepep_buffer_size_gb",
    "model.deepep_num_sms",
    "train.load_checkpoint_path",
    "train.load_optimizer",
    "train.assert_deterministic",
    "train.verify_checkpoint",
    "train.allow_other_base",
    "train.accept_changes",
}


def resume_of(path):
    """What the field says that a change does where a run resumes: free, or refused."""
    said = properties(leaves(Config)[path]).resume
    kind, _, reason = said.partition(": ")
    assert kind in ("free", "refused", "refused with other contents") and reason, path
    return kind.split()[0]


def resumed(world, base, changes):
    """The error of a run with these changes that resumes from step 2 of one without; "" if it
    ends as it should.
    """
    key, data = ("saved", *sorted(base.items(), key=str)), "data.dataset_prepared_path"
    cache = {data: str(world.root / "resumed")} if "data.skip_prepare_dataset" in changes else {}
    key = str((*key, *cache))
    if key not in world.seen:
        ends = {"train.max_steps": 2, "train.save_hf_weights": False, "train.num_train_epochs": 2}
        world.seen[key] = attempt(world, {**base, **cache, **ends})
    out, error = world.seen[key]
    assert not error, error
    folder = str(next((out / "checkpoints").glob("global_step_2")))
    return attempt(world, {**base, **cache, **changes, "train.load_checkpoint_path": folder})[1]


def attempt(world, changes):
    config, said = load_settings(world, changes), io.StringIO()
    with packages(world), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda method, *, fullgraph: method)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            code = train.main([str(world.root / "config.yaml")])
    sys.modules.pop("wandb", None)
    return pathlib.Path(config.train.output_dir), said.getvalue() if code else ""


def load_settings(world, changes):
    path = world.root / "config.yaml"
    path.write_text(yaml.safe_dump(settings_of(world, changes)))
    with packages(world):
        return load(str(path))


RESUMED = [r for r in ROWS if r.path not in NOT_RESUMED and r.differs != "plan"]
FREE = [r for r in RESUMED if resume_of(r.path) == "free" or r.path in SAME_CONTENTS]


def test_a_run_resumes_with_other_values_of_fields_that_are_free(world):
    """As many in one run as go together. Its refusal would name the one that is not."""

    def accepted(changes):
        with contextlib.suppress(ConfigError):
            return bool(load_settings(world, changes))

    # As `settings_of` sets it where a run has this field.
    board = {"train.use_wandb": (("data.val_set_size", 2),)}
    free = [dataclasses.replace(r, base=board.get(r.path, r.base)) for r in FREE]
    for _, group in grouped(free, accepted):
        base = {k: v for one in group for k, v in one.base}
        error = resumed(world, base, {one.field: one.value for one in group})
        assert not error, ([one.path for one in group], error)


@pytest.mark.parametrize("one", [r for r in RESUMED if r not in FREE], ids=lambda one: one.path)
def test_a_run_does_not_resume_with_another_value_of_another_field(one, world):
    base = dict(one.base)
    if one.path == "model.model_path":  # of random weights, and of others
        assert "other weights" in resumed(world, {}, {one.field: one.value})
        base = {"model.model_path": "@weights2"}
    error = resumed(world, base, {one.field: one.value})
    assert re.search(r"was written with another|began from other weights", error), error


def test_what_no_run_here_changes_is_not_in_the_identity(world):
    """Fields of layouts, of other machines and of the network: by themselves, whatever they name.
    They name samples by their contents.
    """
    config, free = load_settings(world, {}), {}
    shape = hf.load_config(config.model.config_path)
    data = data_of(config, Mesh(), shape.vocab_size)[0]
    paths = {r.path for r in ROWS if r.differs == "plan" or r.path in NOT_RESUMED} | HELD.keys()
    for path in paths:
        section, *_, name = path.split(".")
        if path.startswith("data.datasets."):
            entry = config.data.datasets[0].model_copy(update={name: "other"})
            part = config.data.model_copy(update={"datasets": [entry]})
        else:
            part = getattr(config, section).model_copy(update={name: "other"})
            free[path] = resume_of(path)
        changed = config.model_copy(update={section: part})
        assert identity_of(changed, shape, data) == identity_of(config, shape, data), path
    # A revision of the weights is known by their checksums, a teacher's entries by the bins that
    # they make; options are those of an optimizer that reads some, which none of these does; a
    # precision by what it resolves to.
    names = "model.revision", "train.optimizer_args", "distillation.top_k", "precision.type"
    names += ("precision.master_weights",)
    known = {free.pop(n) for n in names}
    assert known == {"refused"} and {*free.values()} == {"free"}


def test_every_field_says_what_a_change_does_where_a_run_resumes():
    for path in leaves(Config):
        assert resume_of(path), path


def test_two_runs_alike_are_alike(world):
    """What differs in the rows is the field's doing."""
    again = observe(world, {})
    for key in ("losses", "weights", "tokens", "checkpoints", "prepared", "loaders", "attentions"):
        assert seen_by(world, {}, key) == again[key], key


def test_every_field_is_in_the_table():
    fields = {p for p in leaves(Config) if not p.startswith("data.test_datasets.")}
    proven = {r.path for r in ROWS}
    for path, test in HELD.items():
        file, _, name = test.partition("::")
        [found] = (ROOT / "tests").rglob(file)
        assert f"def {name}(" in found.read_text(), f"{path}: there is no {test}"
    assert not proven & (HELD.keys() | REFUSED.keys())
    assert fields == proven | HELD.keys() | REFUSED.keys()


@pytest.mark.parametrize("path", sorted(REFUSED))
def test_what_is_refused_is_refused(path, world):
    field = leaves(Config)[path]
    other = {"boolean": not field.default, "integer": 2, "number": 0.5, "mapping": {"a": 1}}
    value = other.get(kind(field.annotation).split(" | ")[0])
    if value is None or value == field.default:
        choices = re.findall(r"\w+", kind(field.annotation))
        value = next(c for c in choices if c not in (str(field.default), "null"))
        value = 3 if value == "integer" else value
    said = observe(world, {path: value})["sentence"]
    assert REFUSED[path] in said, said


def test_the_page_is_current():
    where = "docs/trainer/fields.md"
    text = (ROOT / where).read_text()
    assert text == page(text), f"run python tests/lib/field_effects.py {where}"
