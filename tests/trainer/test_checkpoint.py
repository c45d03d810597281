"""What a checkpoint belongs to, what it holds, and how damage is found."""

import itertools
import json
import os
import re
import shutil
import threading
import types

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemWriter

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from ranks import ROOT
from training import (
    LORA,
    NF4,
    QWEN3,
    build,
    resumed_equals_never_stopped,
    rows,
    run,
    write_config,
)

from tilewright import nn
from tilewright.core import files as core_files
from tilewright.nn import peft
from tilewright.nn.weights import is_adapter
from tilewright.trainer.checkpoint import checkpoint, hf, run_folder
from tilewright.trainer.checkpoint.checkpoint_files import (
    Damaged,
    checksums,
    read_metadata,
    read_state,
    share,
    verify,
)
from tilewright.trainer.checkpoint.hf_folder import checksum_of
from tilewright.trainer.data import logprobs, packing
from tilewright.trainer.engine import Engine
from tilewright.trainer.parallel.parts import Parts

AUTO = "--train.load_checkpoint_path=auto"
FULL = "No space left on device"
UNTIED = {**QWEN3, "tie_word_embeddings": False}


def base(folder, shape=UNTIED, **changes):
    """A folder with weights of a short run."""
    run(write_config(folder, shape, train__max_steps=1, **changes))
    hf = folder / "out/checkpoints/global_step_1/hf"
    (hf / "tokenizer.json").write_text("{}")
    return hf


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Two folders with other weights of the same shapes."""
    root = tmp_path_factory.mktemp("bases")
    return [base(root / str(seed), train__seed=seed) for seed in (0, 1)]


# ---- what a checkpoint belongs to


def test_a_position_is_one_in_the_same_bins(tmp_path):
    """Both methods make four bins of these samples."""
    lengths = [24, 40, 20, 44] * 2
    file = tmp_path / "rows.jsonl"
    samples = [json.dumps({"input_ids": [i + 1] * n}) for i, n in enumerate(lengths)]
    file.write_text("\n".join(samples))
    for method in ("sequential", "multipack"):
        assert len(packing.pack(lengths, 64, method)) == 4
    path = write_config(
        tmp_path,
        train__max_steps=2,
        data__datasets=[{"path": str(file)}],
        data__sample_packing_sequence_len=64,
        data__shuffle_merged_datasets=False,
        data__shuffle_before_merging_datasets=False,
    )
    run(path)
    with pytest.raises(ValueError, match=r"another data: \{'packing': "):
        run(path, AUTO, "--data.sample_packing_method=multipack", "--train.max_steps=4")
    run(path, AUTO, "--train.max_steps=4")


@pytest.mark.parametrize("options", [{}, NF4], ids=["dense", "nf4"])
def test_a_run_goes_on_from_the_weights_it_began_from(options, bases, tmp_path):
    path = write_config(tmp_path, UNTIED, train__max_steps=2, **options)
    began, other = (f"--model.model_path={folder}" for folder in bases)
    run(path, began)
    with pytest.raises(ValueError, match=r"began from other weights .*train\.allow_other_base"):
        run(path, AUTO, other, "--train.max_steps=4")
    moved = tmp_path / "moved"
    shutil.copytree(bases[0], moved)  # the weights count, not their path
    run(path, AUTO, f"--model.model_path={moved}", "--train.max_steps=3")
    run(path, AUTO, other, "--train.max_steps=4", "--train.allow_other_base=true")
    assert [r["step"] for r in rows(tmp_path)] == [1, 2, 3, 4]


def test_another_optimizer_is_said_to_be_one(tmp_path):
    """Although it has a setting that the checkpoint does not record."""
    path = write_config(tmp_path, train__max_steps=2)
    run(path)
    with pytest.raises(ValueError, match=r"with another optimizer: \{'optimizer': \('adamw', 'any"):
        run(path, AUTO, "--train.optimizer=anyprecision_adamw", "--train.max_steps=4")


def test_weights_are_the_same_in_other_files(bases, tmp_path):
    tensors, split, changed = load_file(bases[0] / "model.safetensors"), {}, tmp_path / "changed"
    for folder in (tmp_path / "split", changed):
        folder.mkdir()
        shutil.copy(bases[0] / "config.json", folder)
    for i in range(2):
        own = sorted(tensors)[i::2]
        save_file({name: tensors[name] for name in own}, tmp_path / f"split/{i}.safetensors")
        split |= dict.fromkeys(own, f"{i}.safetensors")
    index = tmp_path / "split/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": split}))
    tensors["model.layers.1.mlp.down_proj.weight"].view(torch.int32)[3, 5] ^= 1
    save_file(tensors, changed / "model.safetensors")
    _, model = build(write_config(tmp_path, UNTIED))
    parts, found = Parts(model), []
    for folder in (bases[0], tmp_path / "split", changed):
        for mode in hf.LOAD_MODES:
            hf.load_weights(parts, folder, mode=mode)
            found.append(parts.origin)
    assert len({*found[:4]}) == 1 and found[4] == found[5] != found[0]


# ---- damage


def flip(file, position, bit=0):
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("written")
    options = {"train__save_hf_weights": False, "train__save_async": True, "train__save_steps": 1}
    path = write_config(root, train__max_steps=3, **options)
    run(path)
    return root, path


def test_every_file_of_a_checkpoint_has_its_checksum(written):
    for folder in (written[0] / "out/checkpoints").iterdir():
        files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
        assert read_state(folder)["files"].keys() == files - {"state.json"}


@pytest.mark.parametrize(
    "name", ["state.json", "random_0.safetensors", "dcp/.metadata", "dcp/__0_0.distcp"]
)
def test_a_flipped_bit_is_found_wherever_it_is(name, written, tmp_path):
    folder = shutil.copytree(written[0] / "out/checkpoints/global_step_3", tmp_path / "copy")
    file = folder / name
    whole = file.read_bytes()

    def read():
        for files in share(folder, read_state(folder), 0, 1):
            verify(folder, files)

    read()
    # All bytes of a small file; a large one's ends, and some that lie between.
    for i in range(0, len(whole), max(1, len(whole) // 100)):
        for at in (i, len(whole) - 1 - i):
            flip(file, at, i % 8)
            with pytest.raises(Damaged, match=name.rpartition("/")[2].replace(".", r"\.")):
                read()
            file.write_bytes(whole)
    file.unlink()
    with pytest.raises(Damaged):
        read()


@pytest.mark.parametrize(
    "name, value", [("step", "3"), ("written", "now"), ("run", 1), ("ops", None)]
)
def test_a_state_of_other_types_is_damage(name, value, written, tmp_path):
    root = shutil.copytree(written[0] / "out", tmp_path / "out")
    file = root / "checkpoints/global_step_3/state.json"
    state = {**read_state(file.parent), name: value}
    file.write_text(json.dumps({k: v for k, v in state.items() if k != "files"}))
    with pytest.raises(Damaged, match=rf"state\.json: {name} is "):
        read_state(file.parent)
    assert len(run_folder.candidates(str(root), "auto")) == 3


def test_auto_passes_over_a_checkpoint_with_a_flipped_bit_and_the_log_says_so(
    written, tmp_path, caplog
):
    caplog.set_level("INFO", logger="tilewright")
    root = shutil.copytree(written[0], tmp_path / "run")
    folder, path = root / "out/checkpoints", written[1]
    out = f"--train.output_dir={root / 'out'}"
    damaged = f"--train.load_checkpoint_path={folder}/global_step_3"
    for name in ("random_0.safetensors", "dcp/__0_0.distcp"):  # the latter of weights and moments
        file = folder / "global_step_3" / name
        whole = file.read_bytes()
        flip(file, len(whole) // 2)
        said = rf"{file.name}: has the checksum \w+, and state\.json says"
        with pytest.raises(Damaged, match=said):
            run(path, out, damaged)
        if "random" in name:
            file.write_bytes(whole)
    run(path, out, damaged, "--train.verify_checkpoint=false")
    caplog.clear()
    run(path, out, AUTO)
    [said] = [r.message for r in caplog.records if r.message.startswith("resumed from")]
    assert re.fullmatch(
        rf"resumed from {folder}/global_step_2, step 2; global_step_3 is passed over: \S+ has the "
        r"checksum \w+, and state\.json says \w+",
        said,
    )
    caplog.clear()
    run(write_config(tmp_path / "new", train__max_steps=1), AUTO)
    assert "holds no checkpoint to resume from: the run starts anew" in caplog.text


def test_each_rank_checks_its_share_and_all_are_checked(tmp_path):
    (tmp_path / "dcp").mkdir()
    files = {}
    for rank in range(3):
        own = [f"dcp/__{rank}_0.distcp", f"random_{rank}.safetensors"]
        own += ["dcp/.metadata"] * (not rank)
        for name in own:
            (tmp_path / name).write_text(name)
        found = checksums(tmp_path, rank)
        assert sorted(found) == sorted(own)
        files |= found

    def fails(rank, size):
        try:
            for part in share(tmp_path, {"files": files}, rank, size):
                verify(tmp_path, part)
        except Damaged:
            return True
        return False

    for size in (1, 2, 5, 9):  # ranks that resume
        for name in files:
            (tmp_path / name).write_text("changed")
            assert sum(fails(rank, size) for rank in range(size)) == 1
            (tmp_path / name).write_text(name)


# ---- the order of writing


def test_a_clock_that_is_set_back_changes_no_order(tmp_path, monkeypatch):
    path = write_config(
        tmp_path, train__save_steps=4, train__max_steps=12, train__save_hf_weights=False
    )
    times = iter([3000.0, 2000.0, 1000.0])
    monkeypatch.setattr(checkpoint, "time", types.SimpleNamespace(time=lambda: next(times)))
    run(path)
    found = [p.name for p in run_folder.candidates(str(tmp_path / "out"), "auto")]
    assert found == [f"global_step_{n}" for n in (12, 8, 4)]


@pytest.fixture
def writing(monkeypatch):
    """Functions that PyTorch's writer first calls with the folder of a checkpoint."""
    real, first = FileSystemWriter.write_data, []

    def write(self, *arguments):
        for call in first:
            call(self.path.parent)
        return real(self, *arguments)

    monkeypatch.setattr(FileSystemWriter, "write_data", write)
    return first


@pytest.mark.parametrize("again", [False, True])
def test_a_checkpoint_after_one_that_failed_is_written(again, tmp_path, writing, caplog):
    """Asynchronous ones, of which one failure is survived and two in a row are not."""
    path = write_config(
        tmp_path,
        train__save_steps=2,
        train__max_steps=8,
        train__save_async=True,
        train__save_hf_weights=False,
    )
    full, tried = ["global_step_2"] + ["global_step_4"] * again, []

    def write(folder):
        tried.append(folder.name.strip(".").removesuffix(".partial"))
        if tried[-1] in full:
            raise OSError(28, FULL)

    writing.append(write)
    if again:
        with pytest.raises(OSError, match=f"global_step_4: cannot be written .*{FULL}"):
            run(path)
        assert tried == full and not checkpoint.complete(str(tmp_path / "out"))
    else:
        run(path)
        there = sorted(p.name for p in checkpoint.complete(str(tmp_path / "out")))
        assert there == [f"global_step_{n}" for n in (4, 6, 8)]
    assert re.search(f"global_step_2: cannot be written .*{FULL}.*another one", caplog.text)


# ---- adapters


def stored(folder, step):
    """The names of the weights of a checkpoint."""
    metadata = read_metadata(folder / f"out/checkpoints/global_step_{step}/dcp")
    names = metadata.state_dict_metadata
    return {n.removeprefix("model.") for n in names if n.startswith("model.")}


def has_base(folder, step):
    """Whether a checkpoint has more than adapters."""
    kinds = {is_adapter(name) for name in stored(folder, step)}
    assert True in kinds
    return False in kinds


@pytest.mark.parametrize("kind, mode", [(LORA, "none"), (NF4, "fsdp2")], ids=["lora", "nf4"])
def test_a_checkpoint_of_adapters_holds_no_base(kind, mode, bases, tmp_path):
    """And a resumed run has the bits of one that was never stopped."""
    options = {**kind, "model__model_path": str(bases[0]), "train__data_parallel_mode": mode}
    resumed_equals_never_stopped(tmp_path, **options)
    assert not any(has_base(tmp_path / "b", step) for step in (2, 4, 6))
    asked = write_config(tmp_path / "c", **options, train__max_steps=2, lora__save_base=True)
    run(asked)
    run(asked, AUTO, "--lora.save_base=false", "--train.max_steps=3")
    assert [has_base(tmp_path / "c", step) for step in (2, 3)] == [True, False]


def test_a_base_that_no_file_holds_is_stored(bases, tmp_path):
    """Drawn weights, and those that adapters were merged into, also once the interval is 0."""
    run(write_config(tmp_path / "drawn", UNTIED, train__max_steps=1, **LORA))
    assert has_base(tmp_path / "drawn", 1)
    merged = {**LORA, "model__model_path": str(bases[0]), "lora__merge_lora_interval": 3}
    resumed_equals_never_stopped(tmp_path, **merged)
    path = write_config(tmp_path / "b", **{**merged, "lora__merge_lora_interval": 0})
    run(path, AUTO, "--train.max_steps=7")
    assert [has_base(tmp_path / "b", step) for step in (2, 4, 6, 7)] == [False, True, True, True]


def test_adapters_go_on_with_the_base_that_the_export_names(bases, tmp_path, monkeypatch):
    """Whether the checkpoint holds the former base or not."""
    path = write_config(
        tmp_path, UNTIED, **LORA, train__max_steps=2, train__lr=0.0001, lora__save_lora_only=True
    )
    began, other = (f"--model.model_path={folder}" for folder in bases)
    down, held, real = "model.layers.0.mlp.down_proj.weight", [], checkpoint.Saver.save

    def save(self, step, parts, *arguments):
        held.append(dict(nn.base_weights(parts.model))[down].detach().clone())
        return real(self, step, parts, *arguments)

    monkeypatch.setattr(checkpoint.Saver, "save", save)
    for base in ("false", "true"):
        out = f"--train.output_dir={tmp_path / base}"
        run(path, began, out, f"--lora.save_base={base}")
        run(path, other, out, AUTO, "--train.max_steps=3", "--train.allow_other_base=true")
        assert torch.equal(held[-1], load_file(bases[1] / "model.safetensors")[down])
        adapter = tmp_path / base / "checkpoints/global_step_3/hf/adapter_config.json"
        assert json.loads(adapter.read_text())["base_model_name_or_path"] == str(bases[1])


def test_adapters_alone_need_a_base(bases, tmp_path):
    path = write_config(tmp_path, UNTIED, **LORA, train__max_steps=2)
    run(path, f"--model.model_path={bases[0]}")
    for more in ([], ["--train.allow_other_base=true"]):
        with pytest.raises(
            ValueError, match=r"other weights|adapters alone: set model\.model_path"
        ):
            run(path, AUTO, "--train.max_steps=4", *more)


def fills(real, step):
    """A writer whose disk is full from that call on, and that says so as safetensors does."""
    calls = itertools.count(1)

    def write(tensors, file, *rest, **options):
        if next(calls) < step:
            return real(tensors, file, *rest, **options)
        raise SafetensorError(f"Error while serializing: I/O error: {FULL} (os error 28)")

    return write


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["random state", "tensors"])
def test_a_full_disk_is_one_sentence_that_speaks_of_space(
    where, asynchronous, tmp_path, monkeypatch, writing, caplog
):
    """Whoever could not write, and at the second attempt, too. PyTorch's writer says where it stood
    in the file; the folder is then asked.
    """
    options = {"train__save_async": asynchronous, "train__save_hf_weights": False}
    path, calls = write_config(tmp_path, **options, train__save_steps=1), itertools.count(1)

    def write(folder):
        if next(calls) > 1:
            said = "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"
            raise RuntimeError(said)

    if where == "random state":
        monkeypatch.setattr(checkpoint, "save_file", fills(checkpoint.save_file, 2))
    else:
        writing.append(write)
        monkeypatch.setattr(checkpoint, "no_space", lambda folder: FULL)
    with pytest.raises(OSError, match=f"cannot be written .*{FULL}") as caught:
        run(path)
    assert "\n" not in str(caught.value) and str(tmp_path / "out/checkpoints") in str(caught.value)
    again = asynchronous and where == "tensors"
    assert caplog.text.count("; another one is written now") == again
    run(path, "--train.max_steps=1", AUTO, "--train.save_async=false")


def test_what_an_attempt_has_written_makes_room_for_the_next(tmp_path, writing):
    """A disk that holds one checkpoint: the first one could not be written whole."""
    path = write_config(tmp_path, train__save_async=True, train__save_steps=1, train__max_steps=2)
    there = []

    def write(folder):
        there.append([p.name for p in folder.parent.glob(".*.partial")])
        if len(there) == 1:
            raise OSError(28, FULL)

    writing.append(write)
    run(path, "--train.save_hf_weights=false")
    assert there == [[".global_step_1.partial"], [".global_step_2.partial"]]


def test_a_folder_is_asked_for_space(tmp_path, monkeypatch):
    assert core_files.no_space(tmp_path) is None and not [*tmp_path.iterdir()]
    assert core_files.no_space(tmp_path / "absent") is None
    monkeypatch.setattr(os, "fsync", raising(OSError(28, FULL)))
    assert core_files.no_space(tmp_path) == FULL and not [*tmp_path.iterdir()]
    monkeypatch.setattr(os, "fsync", raising(OSError(122, "Disk quota exceeded")))
    assert core_files.no_space(tmp_path) == "Disk quota exceeded"


def raising(error):
    def raised(*_):
        raise error

    return raised


def test_what_safetensors_cannot_write_is_an_os_error(tmp_path, monkeypatch):
    tensors, keys = {"a": torch.zeros(2)}, {b"k" * 32: np.zeros(2, np.float32)}
    adapted = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(4, 4)})
    nn.add_lora(adapted, ["q_proj"], rank=2, alpha=4)
    # Each module whose functions give tensors to safetensors.
    writers = {
        core_files: lambda: core_files.save_tensors(tmp_path / "f", tensors),
        logprobs: lambda: logprobs.write(tmp_path, keys, {}),
        peft: lambda: peft.save_adapter(adapted, tmp_path, base_model="b"),
    }
    for module, write in writers.items():
        monkeypatch.setattr(module, "save_file", fills(module.save_file, 1))
        with pytest.raises(OSError, match=f"{tmp_path}.*cannot be written .*{FULL}"):
            write()
    # One more module is tested by `test_a_full_disk_is_one_sentence_that_speaks_of_space`.
    files = {module.__file__ for module in (*writers, checkpoint)}
    source = (ROOT / "tilewright").rglob("*.py")
    assert {str(f) for f in source if re.search(r"\bsave_file\(", f.read_text())} == files


def test_tied_weights_are_stored_once(written):
    names = stored(written[0], 3)  # of QWEN3
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_random_numbers_go_on_where_a_run_stopped(tmp_path, monkeypatch):
    """A step of this model draws none: the test does."""
    drawn, step = [], Engine.optim_step

    def drawing(self, *arguments):
        drawn.append(torch.rand(()).item())
        return step(self, *arguments)

    monkeypatch.setattr(Engine, "optim_step", drawing)
    options = {"train__save_hf_weights": False, "train__max_steps": 3}
    run(write_config(tmp_path / "whole", **options))
    stopped = write_config(tmp_path / "stopped", **options)
    run(stopped, "--train.max_steps=1")
    run(stopped, AUTO)
    assert len(drawn) == 6 and len(set(drawn)) == 3 and drawn[3:] == drawn[:3]


# ---- asynchronous checkpoints


@pytest.mark.parametrize("mode", ["none", "fsdp2"])
def test_an_asynchronous_checkpoint_is_of_its_step(mode, tmp_path, monkeypatch, writing):
    """Its writer is held until two more steps have changed weights and moments."""
    options = {"train__max_steps": 5, "train__save_hf_weights": False, "train__save_steps": 2}
    options |= {"train__data_parallel_mode": mode}
    run(write_config(tmp_path / "now", **options))
    done, taken, steps, step = threading.Event(), [], itertools.count(1), Engine.optim_step

    def held(folder):
        if "step_2" in folder.name:
            taken.append(done.wait(600))

    def stepped(self, *arguments):
        norm = step(self, *arguments)
        if next(steps) == 4:
            done.set()
        return norm

    writing.append(held)
    monkeypatch.setattr(Engine, "optim_step", stepped)
    run(write_config(tmp_path / "later", **options, train__save_async=True))
    assert taken == [True]
    a, b = (
        tensors_of(tmp_path / name / "out/checkpoints/global_step_2") for name in ("now", "later")
    )
    assert a.keys() == b.keys() and any(".exp_avg_sq" in name for name in a)
    assert not [name for name, t in a.items() if not torch.equal(t, b[name])]


def tensors_of(folder):
    """All tensors of a checkpoint, by name."""
    metadata = read_metadata(folder / "dcp")
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "properties")
    }
    dcp.load(found, checkpoint_id=folder / "dcp")
    return found


def test_a_checksum_is_of_values_whatever_their_strides():
    t = torch.randn(3, 4)
    found = checksum_of(t.T)
    assert found == checksum_of(t.T.contiguous()) != checksum_of(t)
    assert found != checksum_of(t.T.to(torch.bfloat16))
