"""SmolLM2-135M fine-tuned on conversations: a user's configuration, on real weights and text."""

import json
import math
import re
import shutil

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import transformers
from distributed_worker import engine_of
from ranks import ROOT, run_modes
from safetensors.torch import load_file, save_file
from training import rows
from whole import data_of

from tilewright.trainer.config import load
from tilewright.trainer.data.batches import evaluation_batches
from tilewright.trainer.losses.language_modeling import language_modeling
from tilewright.trainer.parallel.mesh import Mesh

MODEL, CONFIG = ROOT / ".cache/smollm2", ROOT / "examples/chat_smollm2.yaml"
# Two of ten conversations, each of which five passes read.
HELD_OUT = (ROOT / "examples/data/chat/heldout.jsonl").read_text().splitlines()[:2]
STEPS = 2
BIN = 128  # of 256 tokens
LAYERS = 2  # of 30, where layouts are compared
TWO = "--train.gradient_accumulation_steps=2"
LAYOUTS = {
    "fsdp2": [],
    "tp": [TWO, "--train.tensor_parallel_size=2", "--model.merge_qkv=false"],
    "pp": [TWO, "--train.pipeline_parallel_size=2"],
}
if not (MODEL / "config.json").is_file():
    pytest.skip(
        "no .cache/smollm2; `make .cache/smollm2/config.json` makes it", allow_module_level=True
    )


def options(folder, **train):
    """What the test changes in the example."""
    changed = {
        "output_dir": folder / "out",
        "max_steps": STEPS,
        "save_steps": 0,
        "save_epochs": 0,
        "save_optimizer": "false",
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of runs in two ranks: of the whole model, and of its first layers in each layout.
    A step's bins are the same: those of the two FSDP2 ranks are two micro-batches of others.
    """
    root = tmp_path_factory.mktemp("real")
    few = [f"--model.model_path={cut(root / 'cut')}", "--data.test_datasets=[]"]
    few.append("--train.save_hf_weights=false")
    modes = {"whole/run": options(root / "whole")}
    modes |= {f"{name}/run": [*options(root / name), *few, *LAYOUTS[name]] for name in LAYOUTS}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        run_modes(2, root, {name: [str(CONFIG), *given] for name, given in modes.items()})
        yield root
    shutil.rmtree(root)


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


@torch.no_grad()
def held_out_loss(path):
    """The loss of the answers in the held-out conversations, by transformers alone."""
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
    [held] = data_of(config, ranks, engine.model.config.vocab_size)[1].values()
    return engine.evaluate(evaluation_batches(held, 1, 0, 1), language_modeling)


def test_a_run_lowers_the_held_out_perplexity(trained):
    """To less than half."""
    folder = trained / "whole"
    assert [row["step"] for row in rows(folder) if "loss" in row] == [*range(1, STEPS + 1)]
    ours = {row["step"]: row["eval_loss"] for row in rows(folder) if "eval_loss" in row}
    exported = folder / f"out/checkpoints/global_step_{STEPS}/hf"
    before, after = held_out_loss(MODEL), held_out_loss(exported)
    assert math.exp(after) < 0.5 * math.exp(before)
    # The run's evaluations are of the same tokens. Weights are exported in the dtype in which they
    # were read, bfloat16, which loses a part of so few small steps.
    assert ours[0] == pytest.approx(before, rel=1e-5)
    assert ours[STEPS] == pytest.approx(after, rel=0.05)
    assert own_loss(exported, folder) == pytest.approx(after, rel=1e-5)


def test_layouts_have_the_same_losses(trained):
    """FSDP2, two tensor-parallel ranks, each with all of the 9 heads, and two stages."""
    found = {name: [r["loss"] for r in rows(trained / name) if "loss" in r] for name in LAYOUTS}
    want = found["fsdp2"]
    assert len(want) == STEPS and want[1] < want[0]
    assert found["tp"] == pytest.approx(want, rel=1e-5)
    assert found["pp"] == pytest.approx(want, rel=1e-5)
