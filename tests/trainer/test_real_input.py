"""SmolLM2-135M fine-tuned on conversations: a user's configuration, on real weights and text."""

import contextlib
import json
import math
import os
import pathlib
import re
import shutil
import signal

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import transformers
from distributed_worker import engine_of
from helpers import until
from ranks import ROOT, agents, run_modes
from safetensors.torch import load_file, save_file
from training import rows

from tilewright.trainer.build import build_data
from tilewright.trainer.config import load
from tilewright.trainer.data.batches import evaluation_batches
from tilewright.trainer.losses.language_modeling import language_modeling
from tilewright.trainer.parallel.mesh import Mesh

MODEL, CONFIG = ROOT / ".cache/smollm2", ROOT / "examples/chat_smollm2.yaml"
# Of ten conversations, each of which five passes read.
HELD_OUT = (ROOT / "examples/data/chat/heldout.jsonl").read_text().splitlines()[:4]
STEPS, SAVED, KILLED = 2, 1, 2
BIN = 128  # of 256 tokens
LAYERS = 2  # of 30, where layouts are compared
if not (MODEL / "config.json").is_file():
    pytest.skip(
        "no .cache/smollm2; `make .cache/smollm2/config.json` makes it", allow_module_level=True
    )


def options(folder, **train):
    """What the test changes in the example."""
    changed = {
        "output_dir": folder / "out",
        "max_steps": STEPS,
        "save_steps": SAVED,
        "gc_steps": 0,
        "ignore_memory_plan": "true",  # two more processes
        **train,
    }
    held_out = folder.parent / "heldout.jsonl"
    held_out.write_text("\n".join(HELD_OUT))
    return [
        f"--data.dataset_prepared_path={folder.parent / 'prepared'}",
        f"--data.test_datasets={json.dumps([{'path': str(held_out), 'type': 'chat'}])}",
        f"--data.sample_packing_sequence_len={BIN}",
        *(f"--train.{name}={value}" for name, value in changed.items()),
    ]


def children(pid):
    stats = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            stats.append(path.read_text())
    parents = [(int(s.split()[0]), int(s.rpartition(")")[2].split()[1])) for s in stats]
    return sorted(child for child, parent in parents if parent == pid)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run in two FSDP2 ranks that was killed and resumed, and what both printed.
    The second rank of the first is killed after a step that no checkpoint has.
    """
    folder = tmp_path_factory.mktemp("real") / "fsdp2"
    places = [folder.parent / name for name in ("first", "second")]
    first, second = (place / "said_0.txt" for place in places)
    for place in places:
        place.mkdir()
        with agents(1, 2, place, [str(CONFIG), *options(folder)]) as [agent]:
            if place is places[0]:
                until(lambda: first.exists() and f"step={KILLED} " in first.read_text())
                os.kill(children(agent.pid)[-1], signal.SIGKILL)
            agent.join()
        assert (place / "cause.txt").exists() == (place is places[0])
    yield folder, first.read_text(), second.read_text()
    shutil.rmtree(folder.parent)


def losses(folder):
    return [row["loss"] for row in rows(folder) if "loss" in row]


def evaluations(folder):
    return {row["step"]: row["eval_loss"] for row in rows(folder) if "eval_loss" in row}


def said_loss(said):
    return re.search(rf"^step={KILLED} loss=(\S+)", said, re.MULTILINE)[1]


@torch.no_grad()
def held_out_loss(path):
    """Of the answers in the held-out conversations, by transformers alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer, total, tokens = transformers.AutoTokenizer.from_pretrained(path), 0.0, 0
    for line in HELD_OUT:
        messages = json.loads(line)["messages"]
        kind = {"tokenize": False}
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, **kind)
        whole = tokenizer.apply_chat_template(messages, **kind).removesuffix("\n")
        ids = tokenizer(whole, return_tensors="pt").input_ids
        labels = ids.clone()
        labels[:, : len(tokenizer(prompt).input_ids)] = -100
        n = int((labels != -100).sum())
        total, tokens = total + float(model(input_ids=ids, labels=labels).loss) * n, tokens + n
    return total / tokens


def own_loss(path, folder):
    """The trainer's evaluation of these weights."""
    there = [f"--model.model_path={path}", "--train.data_parallel_mode=none"]
    config, ranks = load(str(CONFIG), [*options(folder), *there]), Mesh()
    engine = engine_of(config, ranks)
    [held] = build_data(config, ranks, engine.model.config.vocab_size)[1].values()
    return engine.evaluate(evaluation_batches(held, 1, 0, 1), language_modeling)


def test_a_killed_run_goes_on_and_lowers_the_held_out_perplexity(trained, monkeypatch):
    """To less than half."""
    monkeypatch.chdir(ROOT)
    folder, first, second = trained
    steps = [row["step"] for row in rows(folder) if "loss" in row]
    assert steps == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        assert (f"step={step} loss" in first) == (step <= KILLED)
        assert (f"step={step} loss" in second) == (step > SAVED)
    assert said_loss(first) == said_loss(second)  # of the step that both took
    ours, exported = evaluations(folder), folder / f"out/checkpoints/global_step_{STEPS}/hf"
    before, after = held_out_loss(MODEL), held_out_loss(exported)
    assert math.exp(after) < 0.5 * math.exp(before)
    # The run's evaluations are of the same tokens. Weights are exported in the dtype in which they
    # were read, bfloat16, which loses a part of so few small steps.
    assert ours[0] == pytest.approx(before, rel=1e-5)
    assert ours[STEPS] == pytest.approx(after, rel=0.05)
    assert own_loss(exported, folder) == pytest.approx(after, rel=1e-5)


def cut(folder):
    """A folder with the first layers of the model, and with all else of it."""
    folder.mkdir()
    for path in MODEL.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    shape = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": LAYERS}))
    kept = {
        name: t
        for name, t in load_file(MODEL / "model.safetensors").items()
        if not (of := re.match(r"model\.layers\.(\d+)\.", name)) or int(of[1]) < LAYERS
    }
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_other_layouts_have_the_same_losses(tmp_path, monkeypatch):
    """Two tensor-parallel ranks, each with all of the 9 heads, and two stages. A step's bins are
    the same: those of the two FSDP2 ranks are two micro-batches here.
    """
    monkeypatch.chdir(ROOT)
    alike = {"max_steps": 2, "save_steps": 0, "save_epochs": 0, "save_hf_weights": "false"}
    two = "--train.gradient_accumulation_steps=2"
    layouts = {
        "fsdp2": [],
        "tp": [two, "--train.tensor_parallel_size=2", "--model.merge_qkv=false"],
        "pp": [two, "--train.pipeline_parallel_size=2"],
    }
    here = [f"--model.model_path={cut(tmp_path / 'cut')}", "--data.test_datasets=[]"]
    runs = {
        f"{name}/run": [str(CONFIG), *options(tmp_path / name, **alike), *here, *layout]
        for name, layout in layouts.items()
    }
    run_modes(2, tmp_path, runs)
    want, *others = (losses(tmp_path / name) for name in layouts)
    assert len(want) == 2 and want[1] < want[0]
    for found in others:
        assert found == pytest.approx(want, rel=1e-5)
    shutil.rmtree(tmp_path)
