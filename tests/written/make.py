"""Writes what a version of the library writes, so that a later one can be held to read it.

    python -m tests.written.make FOLDER

FOLDER gets runs/<kind>, each a configuration, its data and a checkpoint after two steps, with the
losses of four; quantized/<format>, a saved model and its logits; adapter, LoRA weights in PEFT's
files with the logits of the model that had them; and written.json, which says by what. Made once a
version, from a clean commit, and committed: tests/trainer/test_written.py reads it.
"""

import contextlib
import json
import pathlib
import random
import shutil
import subprocess
import sys

import torch

sys.path.append(str(pathlib.Path(__file__).parents[1] / "lib"))
from training import MOE, QWEN3, write_config

SHAPE = {
    **QWEN3,
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
}
EXPERTS = {
    **MOE,
    **SHAPE,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
}
LORA = {"enable_lora": True, "lora_rank": 4, "lora_alpha": 8}
NF4 = {**LORA, "enable_qlora": True, "quant_format": "nf4", "quant_group_size": 64}
STEPS, STOPPED = 4, 2
OF_BASE = {"model__config_path": None, "model__model_path": "../../base"}
# kind -> model, ranks, what differs as section__field
RUNS = {
    "dense": (SHAPE, 1, {"train__optimizer": "muon"}),
    "lora": (SHAPE, 1, {**OF_BASE, **{f"lora__{k}": v for k, v in LORA.items()}}),
    "qlora": (SHAPE, 1, {**OF_BASE, **{f"lora__{k}": v for k, v in NF4.items()}}),
    "experts": (EXPERTS, 1, {}),
    "two_ranks": (SHAPE, 2, {"train__data_parallel_mode": "fsdp2"}),
}
FORMATS = ("nf4", "nvfp4", "mxfp8", "block_fp8")
TOKENS = [[(5 * i + j * j) % 64 for j in range(16)] for i in range(2)]


def train(folder, ranks, *arguments):
    """A user's command, in the folder that the configuration's paths are relative to."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launch, "-m", "tilewright.trainer.train", "config.yaml", *arguments]
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def losses(folder):
    lines = (folder / "out/metrics.jsonl").read_text().splitlines()
    return {str(row["step"]): row["loss"] for row in map(json.loads, lines) if "loss" in row}


def write_run(folder, shape, ranks, changes):
    folder.mkdir(parents=True)
    draw = random.Random(0)
    samples = ([draw.randrange(1, 64) for _ in range(draw.randrange(8, 28))] for _ in range(40))
    text = "".join(json.dumps({"input_ids": s}) + "\n" for s in samples)
    (folder / "tokens.jsonl").write_text(text)
    steps = {"train__max_steps": STEPS, "train__save_steps": STOPPED}
    data = {"data__datasets": [{"path": "tokens.jsonl"}]}
    with contextlib.chdir(folder):  # paths are relative to it
        write_config(pathlib.Path(), shape, **data, **steps, **changes)
    train(folder, ranks)
    (folder / "losses.json").write_text(json.dumps(losses(folder), indent=1) + "\n")
    for path in (*(folder / "out").iterdir(), folder / "prepared"):
        if path.name != "checkpoints":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(folder / f"out/checkpoints/global_step_{STEPS}")


def logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.float()


def small_model():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    more = {k: v for k, v in SHAPE.items() if k not in ("model_type", "architectures")}
    return Qwen3ForCausalLM(Qwen3Config(**more)).eval()


def write_models(folder):
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from tilewright.integrations.transformers import TilewrightConfig
    from tilewright.nn import add_lora, save_adapter

    base = folder / "base"
    small_model().to(torch.bfloat16).save_pretrained(base)  # as NVFP4 and FP8 are read
    for name in FORMATS:
        to = folder / "quantized" / name
        how = TilewrightConfig(name)
        model = AutoModelForCausalLM.from_pretrained(
            base, quantization_config=how, dtype=torch.bfloat16
        )
        model.save_pretrained(to)
        save_file({"logits": logits(model)}, to / "expected.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base)
    add_lora(model, rank=4, alpha=8)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    save_adapter(model, folder / "adapter")
    save_file({"logits": logits(model)}, folder / "adapter/expected.safetensors")


def main(folder):
    from tilewright import _version

    write_models(folder)
    for kind, (shape, ranks, changes) in RUNS.items():
        write_run(folder / "runs" / kind, shape, ranks, changes)
    commit, date = subprocess.run(
        ["git", "show", "-s", "--format=%h %cs"], capture_output=True, text=True, check=True
    ).stdout.split()
    about = {"version": _version.__version__, "commit": commit, "date": date}
    about["torch"] = torch.__version__
    (folder / "written.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).absolute())
