"""A run has the bits of an earlier one, or says in what it differs."""

import importlib.metadata
import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from helpers import threads
from ranks import ROOT, fsdp2, run_modes
from shapes import SHAPES
from torch.cuda import nccl
from training import MOE, QWEN3, rows, run, write_config

from tilewright.core import platform
from tilewright.core.installed import Installed
from tilewright.kernels import tuning
from tilewright.ops import OPS
from tilewright.trainer import train
from tilewright.trainer.config import Config
from tilewright.trainer.data.batches import Bins
from tilewright.trainer.data.data_files import digests, moved
from tilewright.trainer.engine import Engine
from tilewright.trainer.models.initialize import init_weights
from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.model_config import ModelConfig
from tilewright.trainer.models.ops_choice import Ops
from tilewright.trainer.parallel.compiling import compile_layers
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.parallel.recomputation import recompute_activations
from tilewright.trainer.plugins.proof import certificate, checksums
from tilewright.trainer.plugins.proof.assertion import Earlier
from tilewright.trainer.plugins.proof.checksums import Checksums, checksum, factors
from tilewright.trainer.plugins.proof.computation import Outputs, in_backward
from tilewright.trainer.section import properties

CPU = torch.device("cpu")
# Layouts of four ranks. A vocabulary of 98 divides by two tensor-parallel ranks.
LAYOUTS = {
    "ddp": ["--train.data_parallel_mode=ddp"],
    "fsdp2": fsdp2(),
    "hsdp": fsdp2(data_parallel_replicate_size=2, enable_gradient_checkpointing=True),
    "tensor": fsdp2(tensor_parallel_size=2, model__merge_qkv=False),
    "pipeline": fsdp2(pipeline_parallel_size=2, gradient_accumulation_steps=2),
    "experts": fsdp2(expert_parallel_size=2),
    "ulysses_and_ring": fsdp2(ulysses_parallel_size=2, ringattn_parallel_size=2),
}
OUTPUTS = [  # of the small models here, which have two layers
    "model.embed_tokens",
    *(
        f"model.layers.{i}.{name}"
        for i in range(2)
        for name in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    ),
    "model.norm",
]
# Layouts in which a bit of the last rank's shard is flipped in the second step.
FLIPPED = ("fsdp2", "pipeline")


def again(folder, *more):
    return [f"--train.output_dir={folder}", *more]


def recorded(folder):
    return [json.loads(line) for line in (folder / "checksums.jsonl").read_text().splitlines()]


# ---- layouts


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Each layout twice in the same four processes, the second time compared with the first."""
    folder, modes = tmp_path_factory.mktemp("layouts"), {}
    shape = {"vocab_size": 98}
    settings = {"train__max_steps": 2, "train__save_hf_weights": False}
    dense = write_config(folder / "dense", QWEN3 | shape, **settings)
    experts = write_config(folder / "moe", MOE | shape, **settings)
    for name, options in LAYOUTS.items():
        path = experts if name == "experts" else dense
        first = again(folder / name / "first", "--train.checksum_steps=1", *options)
        second = f"--train.assert_deterministic={folder / name / 'first'}"
        modes[f"{name}/run_first"] = [path, *first]
        modes[f"{name}/run_again"] = [path, *again(folder / name / "again", second, *options)]
    modes["run_tampered"] = [*modes["fsdp2/run_again"], *again(folder / "tampered")]
    (folder / "damaged").mkdir()
    (folder / "damaged/certificate.json").write_text('{"schema": 1}')
    earlier = f"--train.assert_deterministic={folder / 'damaged'}"
    modes["run_damaged"] = [dense, *again(folder / "unused", earlier, *fsdp2())]
    (folder / "unwritable/checksums.jsonl").mkdir(parents=True)
    modes["run_unwritable"] = [*modes["fsdp2/run_first"], *again(folder / "unwritable")]
    for name in FLIPPED:
        modes[f"{name}/run_flipped"] = [*modes[f"{name}/run_again"], *again(folder / name / "flip")]
    for i in range(2):
        table = folder / f"tuned_{i}" / tuning.device_folder(CPU) / "rmsnorm.json"
        table.parent.mkdir(parents=True)
        entry = {"key": {"n": 64}, "config": {"rows": 4 + i}}
        content = {"schema": 1, "launches": {"forward": [entry]}}
        table.write_text(json.dumps(content))
    return folder, run_modes(4, folder, modes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_runs_of_a_layout_are_bit_equal(name, launched):
    folder, said = launched
    assert f"deterministic: 2 steps are bit-identical to {folder / name / 'first'}, 2 also" in said
    a, b = (recorded(folder / name / which) for which in ("first", "again"))
    assert a == b and [row["step"] for row in a] == [1, 2]
    names = json.loads((folder / name / "first/certificate.json").read_text())["trained"]
    for row in a:  # every tensor counts, wherever its shards are
        assert len(row["gradients"]) == len(row["weights"]) == len(names)
        assert list(row["outputs"]) == OUTPUTS
        assert all(row["gradients"]) and all(row["weights"]) and all(row["outputs"].values())
    moved = [x != y for x, y in zip(a[0]["weights"], a[1]["weights"], strict=True)]
    assert all(moved)


MOVED = "step {} is not the same: the first tensor that moved is the gradient of model.layers.1.{}.weight"
DEVICE = platform.device_name("cpu")
# What every rank says, of the file or rank that one of them finds.
REFUSED = {
    "tampered": f"fsdp2/first: ranks differ: the tuned table of rmsnorm for {DEVICE} differs on rank 1",
    "damaged": "damaged: certificate.json is damaged: its 'start' is missing or of another type",
    "unwritable": "Is a directory: '{folder}/unwritable/checksums.jsonl'",
    **{f"{name}/flipped": MOVED.format(2, "self_attn.o_proj") for name in FLIPPED},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_rank_finds_ends_all(name, launched):
    folder, _ = launched
    for rank in range(4):
        said = (folder / f"{name}_{rank}.txt").read_text()
        assert said.partition(" (and ")[0].endswith(REFUSED[name].format(folder=folder))
    assert not (folder / "tampered/metrics.jsonl").exists()


# ---- one process


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run of four steps with checksums of each, an evaluation and a checkpoint after two."""
    folder = tmp_path_factory.mktemp("one")
    path = write_config(
        folder,
        train__max_steps=4,
        train__save_steps=2,
        train__save_hf_weights=False,
        train__checksum_steps=1,
        data__test_datasets=[{"path": samples(folder / "test.jsonl", 0)}],
    )
    run(path)
    return folder, path


def samples(file, first):
    """A file of four samples of the same lengths, whose tokens begin there."""
    lines = [json.dumps({"input_ids": [*range(first + i, first + 9 + i)]}) for i in range(4)]
    file.write_text("\n".join(lines))
    return str(file)


def refused(path, earlier, target, *more):
    """What a run says that is not the earlier one."""
    with pytest.raises((ValueError, OSError)) as caught:
        run(path, *again(target), f"--train.assert_deterministic={earlier}", *more)
    said, _, why = str(caught.value).partition(": ")
    assert said == f"train.assert_deterministic = {earlier}"
    return why


def asserting(first, target, *more):
    folder, path = first
    given = f"--train.assert_deterministic={folder / 'out'}"
    return run(path, *again(target), given, *more)


def test_a_run_is_certified_once_and_a_second_one_has_its_bits(first, tmp_path, capsys):
    asserting(first, tmp_path / "again")
    said = capsys.readouterr().out
    assert said.count("certificate: ") == 1
    assert f"deterministic: 4 steps are bit-identical to {first[0] / 'out'}, 4 also" in said
    assert "not compared" not in said
    made = json.loads((first[0] / "out/certificate.json").read_text())
    facts = made["facts"]
    assert made["start"] == 0 and facts["layout"]["processes"] == 1
    assert facts["environment"]["torch"] == torch.__version__
    assert set(facts["initial weight"]) >= set(made["trained"])
    assert {"order", "contents", "seed"} <= set(facts["data"])


OTHERS = {
    "a field": (["--train.lr=0.02"], "field train.lr is 0.02 in this run and 0.01 in that one"),
    "an implementation": (
        ["--model.rmsnorm_native=true"],
        "the implementation of rmsnorm is 'torch' in this run and 'cpp' in that one",
    ),
    "a field that was not given": (
        ["--data.eval_sample_packing=false"],
        "field data.eval_sample_packing is False in this run and not set in that one",
    ),
    "evaluation": (
        ['--data.test_datasets=[{"path": "OTHER"}]'],
        "the content of the evaluation data differs",
    ),
    "data": (
        ["--data.val_set_size=5", "--data.test_datasets=[]"],
        "the content of the data differs in this run",
    ),
}


@pytest.mark.parametrize("change, message", OTHERS.values(), ids=OTHERS)
def test_a_run_that_is_another_is_refused_and_says_in_what(change, message, first, tmp_path):
    change = [c.replace("OTHER", samples(tmp_path / "other.jsonl", 1)) for c in change]
    said = refused(first[1], first[0] / "out", tmp_path / "again", *change)
    assert said.startswith("this run is not that one") and message in said
    assert not (tmp_path / "again/certificate.json").exists()


def test_other_initial_weights_are_named(first, tmp_path, monkeypatch):
    real = Checksums.weights

    def other(self):
        self.model.model.layers[1].mlp.down_proj.weight.data[3, 5] += 1e-7
        return real(self)

    monkeypatch.setattr(Checksums, "weights", other)
    said = refused(first[1], first[0] / "out", tmp_path / "again")
    name = "model.layers.1.mlp.down_proj.weight"
    assert said.endswith(f": the initial weight of {name} differs in this run")


def test_the_number_of_threads_is_a_fact(first, tmp_path):
    number = torch.get_num_threads() + 1
    sentence = f"the number of threads is '{number}' in this run"
    with threads(number), pytest.raises(ValueError, match=sentence):
        asserting(first, tmp_path / "again")


@pytest.mark.parametrize("name", ["layers.0.self_attn", "norm"])
def test_a_fault_of_a_forward_is_named_by_its_module(name, first, tmp_path, monkeypatch):
    """The lowest bit of one number that a module returns in the second step."""
    real = Outputs.record

    def record(self, wanted):
        calls = []

        def flip(module, args, output):
            calls.append(torch.is_grad_enabled())
            if sum(calls) == 2 and calls[-1]:
                t = output[0] if isinstance(output, tuple) else output
                t.detach().view(-1).view(torch.int32)[5] ^= 1

        self.parts.model.model.get_submodule(name).register_forward_hook(flip)
        real(self, wanted)

    monkeypatch.setattr(Outputs, "record", record)
    said = refused(first[1], first[0] / "out", tmp_path / "again")
    assert said.startswith("step 2 is not the same: ")
    # After the norm, the loss may round to the same bits.
    moved = rf"the first tensor that moved is the output of model\.{name}(?: \(and |$)"
    assert re.search(moved, said)


def test_gradients_are_named_in_the_order_of_the_backward(first, tmp_path, monkeypatch):
    """The lowest bit of one number of three gradients has moved in the third step. The run is also
    compared with checksums of an earlier version, which had none of outputs.
    """
    old = tmp_path / "old"
    shutil.copytree(first[0] / "out", old)
    lines = [{k: v for k, v in row.items() if k != "outputs"} for row in recorded(old)]
    (old / "checksums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    real, steps = Engine.divide, []

    def divide(self, *args):
        norm = real(self, *args)
        steps.append(norm)
        for name in ("embed_tokens", "layers.0.mlp.down_proj", "layers.1.input_layernorm"):
            module = self.parts.model.model.get_submodule(name)
            module.weight.grad.view(-1).view(torch.int32)[7] ^= len(steps) % 3 == 0
        return norm

    monkeypatch.setattr(Engine, "divide", divide)
    for earlier in (first[0] / "out", old):
        steps.clear()
        target = tmp_path / f"again_{earlier.name}"
        said = refused(first[1], earlier, target)
        assert said.partition(" (and ")[0] == MOVED.format(3, "input_layernorm")
        assert len(rows_of(target)) == 3


@pytest.mark.parametrize(
    "modules, reentrant",
    [("null", False), ("[self_attn]", False), ("null", True)],
)
def test_outputs_are_those_of_the_training_forward(modules, reentrant, first, tmp_path):
    """They are of one step, not of an evaluation, which the first run has, or a recomputation."""
    run(
        first[1],
        *again(tmp_path / "again", "--train.checksum_steps=2", "--data.test_datasets=[]"),
        "--train.enable_gradient_checkpointing=true",
        f"--train.recompute_modules={modules}",
        f"--train.enable_reentrant={reentrant}",
    )
    assert recorded(tmp_path / "again") == recorded(first[0] / "out")[1::2]


def rows_of(folder):
    return [json.loads(s) for s in (folder / "metrics.jsonl").read_text().splitlines() if "lr" in s]


@pytest.mark.parametrize(
    "name, more",
    [
        ("loss", "; no tensor can be named: that run has no checksums of this step"),
        ("eval_loss", ""),
    ],
)
def test_a_number_that_moved_is_said_with_both_values(name, more, first, tmp_path):
    """Against a copy of the first run's log, without checksums."""
    shutil.copy(first[0] / "out/certificate.json", tmp_path)
    found = rows(first[0])
    [row] = [row for row in found if row["step"] == 2 and name in row]
    there, other = row[name], math.nextafter(row[name], 9)
    row[name] = other
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    assert refused(first[1], tmp_path, tmp_path / "again") == (
        f"step 2 is not the same: the {name} is {there!r} in this run and {other!r} in that one"
        f"{more}"
    )


def test_a_resumed_run_is_compared_from_where_it_starts(first, tmp_path, capsys):
    """Also with its own folder, whose later steps it writes again, and whose certificate stays."""
    at = f"--train.load_checkpoint_path={first[0] / 'out/checkpoints/global_step_2'}"
    asserting(first, tmp_path / "resumed", at)
    said = capsys.readouterr().out
    assert "deterministic: 2 steps are bit-identical to" in said
    assert "in certificate_2.json" in said and "not compared" not in said
    assert [row["step"] for row in recorded(tmp_path / "resumed")] == [3, 4]
    own = tmp_path / "own"
    shutil.copytree(first[0] / "out", own)
    before, made = recorded(own), (own / "certificate.json").read_text()
    (own / "certificate_3.json").write_text(made)  # of a resumption whose steps are run again
    run(first[1], *again(own, at, f"--train.assert_deterministic={own}"))
    assert "deterministic: 2 steps are bit-identical to" in capsys.readouterr().out
    assert recorded(own) == before
    assert (own / "certificate.json").read_text() == made
    assert sorted(p.name for p in own.glob("certificate*")) == [
        "certificate.json",
        "certificate_2.json",
    ]
    # A whole run has the steps of both: the initial weights, and what the resumption was.
    run(first[1], *again(tmp_path / "whole", f"--train.assert_deterministic={own}"))
    assert "deterministic: 4 steps are bit-identical to" in capsys.readouterr().out
    later = json.loads((own / "certificate_2.json").read_text())
    later["facts"]["layout"]["processes"] = 2
    (own / "certificate_2.json").write_text(json.dumps(later))
    message = "not that one from step 3 on: the number of processes is 1 in this run and 2 in that"
    with pytest.raises(ValueError, match=message):
        run(first[1], *again(tmp_path / "refused", f"--train.assert_deterministic={own}"))


def test_a_run_resumes_in_a_later_epoch(tmp_path, capsys):
    """The orders of both epochs are those of the certificate, and its last steps are not in it."""
    path = write_config(
        tmp_path,
        train__save_steps=5,
        train__save_hf_weights=False,
        data__datasets=[{"path": samples(tmp_path / "train.jsonl", 0)}],
        train__micro_batch_size=1,
        data__sample_packing_sequence_len=10,
    )
    run(path)  # six steps of two epochs of four samples
    at = f"--train.load_checkpoint_path={tmp_path / 'out/checkpoints/global_step_5'}"
    given = f"--train.assert_deterministic={tmp_path / 'out'}"
    run(path, *again(tmp_path / "again", at, given, "--train.max_steps=9"))
    said = capsys.readouterr().out
    assert "deterministic: 1 step is bit-identical to" in said
    assert "not compared: 3 of 4 steps, 7 to 9\n" in said


def test_what_is_no_earlier_run_is_one_sentence(first, tmp_path):
    folder, path = first
    made = json.loads((folder / "out/certificate.json").read_text())
    (tmp_path / "old").mkdir()
    (tmp_path / "old/certificate.json").write_text(json.dumps({**made, "schema": 0}))
    late = [{**row, "step": row["step"] + 4} for row in rows(first[0])]
    for name, found in (("cut", []), ("late", late)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "certificate.json").write_text(json.dumps(made))
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, found)))
    nothing = (
        "nothing can be compared: that run has no step after 0, where this one starts, up to 4, "
        "where it ends"
    )
    for given, message in (
        (tmp_path / "nowhere", "holds no certificate.json; give the output_dir of a run"),
        (tmp_path / "old", "certificate.json has the schema 0; accepted is 1"),
        (tmp_path / "cut/certificate.json", nothing),
        (tmp_path / "late", nothing),
    ):
        assert refused(path, given, tmp_path / "again") == message


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("certificate.json", {"start": None}, "its 'start' is"),
        ("certificate.json", {"facts": {"data": 1}}, "its 'facts' is"),
        ("certificate.json", {"files": {"contents": [{"file": "a"}]}}, "its 'files' is"),
        ("certificate_2.json", {"trained": None}, "its 'trained'"),
        ("metrics.jsonl", {"loss": 1.0}, "{'loss': 1.0} is no row"),
        ("metrics.jsonl", 7, "7 is no row of it"),
        ("checksums.jsonl", {"step": 1}, "{'step': 1} is no row"),
        (
            "checksums.jsonl",
            {"step": 1, "gradients": [1], "weights": [2]},
            "{'step': 1, 'gradients'",
        ),
        ("checksums.jsonl", {"step": 1, "outputs": []}, "{'step': 1, 'outputs': [], "),
    ],
)
def test_a_damaged_file_of_an_earlier_run_is_one_sentence(name, content, said, first, tmp_path):
    made = json.loads((first[0] / "out/certificate.json").read_text())
    (tmp_path / "certificate.json").write_text(json.dumps(made))
    if name.startswith("certificate"):
        content = {**made, **content}
    elif "outputs" in said:  # all else is whole
        count = len(made["trained"])
        content = {**content, "gradients": [1] * count, "weights": [2] * count}
    (tmp_path / name).write_text(json.dumps(content) + "\n")
    with pytest.raises(ValueError) as caught:
        Earlier(str(tmp_path))
    found = str(caught.value)
    assert found.startswith(f"train.assert_deterministic = {tmp_path}: {name} is damaged: {said}")


# ---- the order of the computation


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("name", [*SHAPES, "qwen3", "moe"])
def test_the_order_of_gradients_is_that_of_the_backward(name, merged):
    """Gradients that one operator makes have any order."""
    shape = {**SHAPES, "qwen3": QWEN3, "moe": MOE}[name]
    model = Transformer(ModelConfig.from_hf(shape), Ops.resolve("eager"), merged)
    init_weights(model, 0)
    made = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p, name=name: made.append(name))
    ids = torch.arange(12)[None] % 7
    model(ids, labels=ids).backward()
    assert len(made) > 10

    def operator(name):
        name = name.removesuffix(".bias").removesuffix(".weight")
        name = re.sub("experts[.](gate_up|down)_proj(_bias)?", "experts", name)
        return re.sub("[qk]_norm", "qk_norm", name) if merged else name

    assert [*map(operator, in_backward(made))] == [*map(operator, made)]
    assert [*map(operator, in_backward(sorted(made)))] == [*map(operator, made)]


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_are_in_the_order_of_the_forward(name):
    model, called = Transformer(ModelConfig.from_hf(SHAPES[name]), Ops.resolve("eager")), []
    init_weights(model, 0)
    names = Outputs(Parts(model), Mesh()).names
    for path in names:
        model.get_submodule(path).register_forward_hook(lambda *_, path=path: called.append(path))
    model(torch.arange(12)[None])
    assert called == names


def test_outputs_of_compiled_layers_are_those_of_whole_layers():
    """Within a graph nothing can be recorded."""
    config = Config(
        model={"config_path": "unused"},
        data={"datasets": [{"path": "dummy"}]},
        train={"output_dir": "unused", "data_parallel_mode": "none"},
    )
    layers = {}
    for attention, recomputed in (("eager", None), ("sdpa", None), ("eager", ["mlp"])):
        model = Transformer(ModelConfig.from_hf(QWEN3), Ops.resolve(attention))
        settings = {"recompute_modules": recomputed, "enable_gradient_checkpointing": True}
        train = config.train.model_copy(update=settings)
        compile_layers(model, train, train, [])
        recompute_activations(model, recomputed)
        layers[attention, bool(recomputed)] = Outputs(Parts(model), Mesh()).names
    whole = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
    assert layers == {("eager", False): whole, ("sdpa", False): OUTPUTS, ("eager", True): OUTPUTS}


def test_outputs_that_are_swapped_are_told_apart():
    model = Transformer(ModelConfig.from_hf(QWEN3), Ops.resolve())
    init_weights(model, 0)
    outputs, sums = Outputs(Parts(model), Mesh()), []
    wanted = [True]
    outputs.record(lambda: wanted[0])
    batches = torch.arange(12)[None], torch.arange(20, 32)[None]
    for order in (batches, batches[::-1]):
        for ids in order:
            model(ids)
        sums.append(outputs.part())
        outputs.drop()
    assert (sums[0] != sums[1]).all()
    wanted[0] = False
    model(batches[0])
    assert not outputs.part().any()


# ---- the files of the data


@pytest.mark.parametrize("count", [1, 5, 256, 257, 1500])
def test_lines_that_differ_are_in_the_interval(count, tmp_path):
    lines = [f"{i:04}\n".encode() for i in range(count)]

    def made(name, lines, **more):
        (tmp_path / name).write_bytes(b"".join(lines))
        return {"file": name, **digests(str(tmp_path / name)).within(**more)._asdict()}

    ours = made("a.txt", lines, most=300)
    assert ours["lines"] == count and len(ours["blocks"].split()) <= 256
    for at in {0, count // 3, count - 1}:
        changed, inserted = lines[:], lines[:]
        changed[at] = b"other\n"
        inserted.insert(at, b"other\n")
        unended = [*changed[:-1], changed[-1].strip()]
        for others in (changed, inserted, unended, lines[:at]):
            for most in (300, 7):
                said = moved([ours], [made("b.txt", others, most=most)])
                found = re.fullmatch(r"a.txt differs in lines? (\d+)(?: to (\d+))?", said)
                first, last = (int(n) for n in (found[1], found[2] or found[1]))
                assert first <= at + 1 <= last <= count + 1
                assert most == 7 or last - first < max(1, count / 100)
    cut = made("a.txt", lines[: count // 8 * 8], most=300)
    if count > cut["lines"]:
        said = f"a.txt ends before line {cut['lines'] + 1}, where that one goes on"
        assert moved([cut], [ours]) == said


def test_files_that_are_not_there_are_named(tmp_path):
    def file(name, content="x"):
        return {"file": name, "sha256": content, "lines": 0, "every": 0, "blocks": ""}

    a, b, c = file("a.parquet", "1"), file("f/b.parquet", "2"), file("c.parquet", "3")
    assert moved([a, c], [a, b]) == "c.parquet differs"
    assert moved([a, b, c], [a, b]) == "c.parquet is not in that one"
    assert moved([a], [a, b]) == "f/b.parquet is not in this run"
    assert moved([b, a], [a, b]) == "the same files are read in another order"
    assert moved([a, b], [a, b]) == "its files are the same, and prepared otherwise"
    other = [file("d/a.parquet", "4"), file("b.parquet", "5"), c]
    assert moved(other, [b, a]) == "d/a.parquet differs (and 2 more files)"


def test_a_token_that_differs_is_found_in_its_file(tmp_path):
    """One of line 900 in the second of two files; then with what an earlier version wrote."""
    lines = [json.dumps({"input_ids": [i % 90, *range(8)]}) + "\n" for i in range(1000)]
    data = tmp_path / "data"
    data.mkdir()
    for name in ("a", "b"):
        (data / f"{name}.jsonl").write_text("".join(lines))
    path = write_config(
        tmp_path,
        train__max_steps=1,
        train__save_hf_weights=False,
        data__datasets=[{"path": str(data)}],
    )
    run(path)
    lines[899] = lines[899].replace("5", "6")
    (data / "b.jsonl").write_text("".join(lines))
    differs = "this run is not that one: the content of the data differs in this run"
    said = refused(path, tmp_path / "out", tmp_path / "again")
    assert said == f"{differs}: {data / 'b.jsonl'} differs in lines 897 to 900"
    made = json.loads((tmp_path / "out/certificate.json").read_text())
    assert len(json.dumps(made.pop("files"))) < 20_000
    (tmp_path / "out/certificate.json").write_text(json.dumps(made))
    assert refused(path, tmp_path / "out", tmp_path / "again") == differs


def test_a_file_that_differs_is_named_by_the_step_that_reads_it(tmp_path, monkeypatch):
    """Where no sample that is hashed shows it; and nothing is said of the same file elsewhere."""
    monkeypatch.setattr(Bins, "fingerprint", lambda self: "of other samples")
    file, elsewhere = tmp_path / "train.jsonl", tmp_path / "moved.jsonl"
    path = write_config(
        tmp_path,
        train__save_hf_weights=False,
        train__micro_batch_size=1,
        data__datasets=[{"path": samples(file, 0)}],
        data__sample_packing_sequence_len=10,
    )
    run(path, "--train.max_steps=4")
    shutil.copy(file, elsewhere)
    file.write_text(file.read_text().replace("[2, 3", "[90, 3"))
    given = path, tmp_path / "out", tmp_path / "again", "--train.max_steps=4"
    said = refused(*given)
    assert re.match(r"step [1-4] is not the same: the loss is", said)
    assert said.endswith(f"; of the data's files {file} differs in line 3")
    there = f'--data.datasets=[{{"path": "{elsewhere}"}}]'
    log = tmp_path / "out/metrics.jsonl"
    log.write_text(log.read_text().replace('"grad_norm": ', '"grad_norm": 9'))
    said = refused(*given, there)
    assert said.startswith("step 1 is not the same: the grad_norm is") and "files" not in said


# ---- facts


def test_what_is_left_out_are_fields_that_change_no_step():
    sections = {name: field.annotation.model_fields for name, field in Config.model_fields.items()}
    fields = {f"{s}.{n}": field for s, own in sections.items() for n, field in own.items()}
    left_out = {path for path, field in fields.items() if not properties(field).certified}
    # A table that another test makes from runs: field, other value, what differs, in what.
    page = (ROOT / "docs/trainer/fields.md").read_text().split("## What each field changes")[1]
    differs = dict(re.findall(r"^\| `([\w.]+)` \| .* \| ([\w ]+) \| [^|]*\|$", page, re.M))
    assert differs["train.weight_decay"] == "weights" and len(differs) > 100
    changing = {
        "losses",
        "weights",
        "operators",
        "ops",
        "names",
        "gates",
        "tokens",
        "deterministic",
    }
    # Their contents are facts.
    hashed = {
        *("model.model_path", "model.config_path", "model.tokenizer_path"),
        *("data.datasets", "data.select_columns", "data.dataset_shard_idx"),
        "preference.reference_path",
    }
    assert {f for f in left_out if differs.get(f) in changing} == hashed


def test_the_libraries_of_a_gpu_and_the_environment_are_facts(monkeypatch):
    plain = platform.provenance()
    assert re.fullmatch("[0-9a-f]{64}", plain["code"]) and "NCCL_ALGO" not in plain
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "0")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")  # changes no bits
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    # A torch for CUDA would compare it with the capabilities of GPUs.
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    monkeypatch.setattr(nccl, "version", lambda: (2, 30, 1))
    found = platform.provenance()
    assert found["NCCL_ALGO"] == "Ring" and found["CUBLASLT_WORKSPACE_SIZE"] == "0"
    assert "NCCL_DEBUG" not in found and found["nccl"] == "2.30.1"
    assert found["cuda device"] == "GPU" and {"driver", "cuda"} <= found.keys()
    assert found["cudnn"] == "92000"


def test_the_packages_of_implementations_are_facts(monkeypatch):
    plain = {"rmsnorm": "cpp", "attention": "sdpa"}
    assert certificate.packages(plain, deep_ep=False) == {}
    versions = {"flash-attn": "2.8.0", "acme": "1.5"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError
        return versions[name]

    point = SimpleNamespace(name="rmsnorm.fast", dist=SimpleNamespace(name="acme"))
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(certificate, "installed", lambda: {"rmsnorm": [Installed(point)]})
    chosen = {"rmsnorm": "fast", "attention": "flash_attention_2", "moe_mlp": "cute"}
    assert certificate.packages(chosen, deep_ep=True) == {
        "acme": "1.5",
        "flash-attn": "2.8.0",
        "nvidia-cutlass-dsl": "unknown",
        "deep_ep": "unknown",
    }


def test_a_constant_that_differs_is_another_fact():
    found = [i for op in OPS.values() for i in op.implementations if i.tunables()]
    assert found
    [op] = [op for op in OPS.values() if op.name == "rmsnorm"]
    tunable = next(iter(op.implementation("triton").tunables()))
    before = certificate.launches({"rmsnorm": "triton"}, CPU)
    config = {k: 2 * v for k, v in tunable.config(CPU, *tunable.keys[0]).items()}
    with tunable.override(CPU, tunable.keys[0], config):
        after = certificate.launches({"rmsnorm": "triton"}, CPU)
    assert [name for name in before if before[name] != after[name]] == [tunable.name]


# ---- checksums


def by_definition(t, factor):
    data = t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    n = t.element_size()
    words = [
        int.from_bytes(data[i : i + n], "little", signed=n > 1) for i in range(0, len(data), n)
    ]
    row, weights = len(factor), factor.tolist()
    total = sum(w * weights[i % row] * weights[i // row % row] for i, w in enumerate(words))
    total %= 1 << 64
    return total - (1 << 64) if total >= 1 << 63 else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_a_checksum_is_the_sum_of_its_definition(dtype, monkeypatch):
    t = (100 * torch.randn(7, 5, generator=torch.Generator().manual_seed(0))).to(dtype)
    for row, at_once in ((4, 1), (4, 2), (8, 4), (64, 1)):
        factor = factors(row, CPU)
        monkeypatch.setitem(checksums.ROWS, "cpu", at_once)
        for tensor in (t, t.T, t[:0], t[0, 0]):
            assert int(checksum(tensor, factor)) == by_definition(tensor, factor)


def test_checksums_see_what_sums_do_not():
    """Every bit, numbers and rows that change places, and signs in the same place of two rows."""
    factor, t = factors(16, CPU), torch.randn(4, 25, generator=torch.Generator().manual_seed(1))

    def flipped(values, bits, words):
        for i in range(bits):
            other = values.clone()
            other.view(words)[2, 3] ^= 1 << i if i < bits - 1 else -(1 << i)
            yield other

    flat = t.view(-1)
    swapped, signs = flat.clone(), flat.clone()
    swapped[[3, 40]] = swapped[[40, 3]]
    signs[[5, 21]] *= -1
    of_32 = [t, *flipped(t, 32, torch.int32), swapped, signs, t[[1, 0, 2, 3]], -t]
    of_64 = [t.double(), *flipped(t.double(), 64, torch.int64)]
    for tensors in (of_32, of_64):
        assert len({int(checksum(x, factor)) for x in tensors}) == len(tensors)


def test_shards_are_told_apart_by_rank():
    """Two ranks that swap their shards have another sum."""
    factor = factors(16, CPU)
    a, b = torch.randn(8), torch.randn(8)
    model = torch.nn.Linear(4, 2)
    parts = []
    for order in ((a, b), (b, a)):
        total = 0
        for rank, t in enumerate(order):
            sums = Checksums(Parts(model), Mesh(rank=rank))
            sums.factor = factor
            total += int(sums.of([("weight", t)], ["weight"]))
        parts.append(total)
    assert parts[0] != parts[1]


# ---- the page


def test_the_example_of_the_page(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs/trainer/determinism.md").read_text()
    commands, said, *_ = re.findall(r"```\w+\n(.*?)```", page, re.DOTALL)
    (tmp_path / "outputs").mkdir()
    write_config(
        tmp_path,
        train__max_steps=4,
        train__save_hf_weights=False,
    )
    monkeypatch.chdir(tmp_path)
    for line in commands.splitlines():
        program, arguments = line.split()[:3], line.split()[3:]
        assert program == ["python", "-m", "tilewright.trainer.train"]
        assert train.main(arguments) == 0
    assert said.strip() in capsys.readouterr().out
    again = ["config.yaml", "--train.output_dir", "outputs/other", "--train.lr", "0.02"]
    assert train.main([*again, "--train.assert_deterministic", "outputs/first"]) == 1
    assert capsys.readouterr().err.strip() in page
