"""Published clients on a server: `make clients`.

    python -m tests.clients PYTHON_OF_THE_CLIENTS RESULTS.json

It writes a small model with SmolLM2's tokenizer, serves it, runs `cookbook.py` with the clients'
Python, and writes what they saw, with the commit and the date. Fails where that is not as it should
be.
"""

import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import numpy as np
import torch
import yaml

from tests.lib.sweeps import now
from tilewright.server.fields import load
from tilewright.trainer import build
from tilewright.trainer.data.batches import collate
from tilewright.trainer.data.columns.column import COLUMNS
from tilewright.trainer.losses.weighted import weighted_language_modeling
from tilewright.trainer.parallel.mesh import Mesh

HERE = pathlib.Path(__file__).parent
TOKENIZER = HERE.parents[1] / ".cache/smollm2"
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def write_model(folder):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(folder)
    for file in TOKENIZER.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)


def clients_versions(python):
    code = "import importlib.metadata as m; print(*map(m.version, ('tinker', 'tinker-cookbook')))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return dict(zip(("tinker", "tinker-cookbook"), found.stdout.split(), strict=True))


def ready(launcher, root):
    """Waits until the server answers that it is ready."""
    from urllib.error import HTTPError
    from urllib.request import urlopen

    from tests.lib.helpers import until

    def seen():
        if launcher.poll() is not None:
            raise SystemExit("the server has ended")
        if not (root / "url").is_file():
            return False
        try:
            return urlopen((root / "url").read_text().strip() + "/health").status == 200
        except HTTPError:
            return False

    until(seen)


def trained_alike(file, sent):
    """The losses of the trainer's engine with a server's settings, on what a client has sent."""
    _, config = load(str(file), [])
    mesh, model, lora, train = Mesh(), config.model, config.lora, config.train
    shape = build.shape_of_run(model, "language_model", mesh)
    ops = build.choose_ops(model, shape, mesh, torch.float32)
    parts = build.build_model(model, lora, shape, config.data, train, mesh, ops)
    engine = build.engine_around(parts, train, mesh, lora.lora_plus_scale)
    losses, columns = [], {"weight": COLUMNS["weight"]}
    values = {"lr": 3e-2, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8}
    for step in sent:
        documents = [
            (np.array(ids), np.array(targets), {"weight": np.array(weights, np.float32)})
            for ids, targets, weights in step
        ]
        batches = [collate([[one]], 1, mesh.context, columns, aligned=True) for one in documents]
        engine.set_values({**values, "weight_decay": 0.0})
        losses.append(engine.forward_backward(batches, weighted_language_modeling).mean)
        engine.optim_step(denominator=1.0)
    return losses


def main(python, results):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_model(folder / "model")
        settings = {
            "model_path": str(folder / "model"),
            "output_dir": str(folder / "out"),
            "lora_rank": 8,
            "sample_packing_sequence_len": 256,
            "enable_mixed_precision": False,
            "data_parallel_mode": "none",
            "api_port": 0,
            "worker_connection_timeout": 900,
        }
        (folder / "server.yaml").write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "tilewright.server.launcher"]
        launcher = subprocess.Popen([*command, "--config", str(folder / "server.yaml")])
        try:
            ready(launcher, folder / "out")
            arguments = [folder / "out", folder / "model", folder / "runs"]
            ran = subprocess.run(
                [python, HERE / "cookbook.py", *arguments],
                stdout=subprocess.PIPE,
                text=True,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": ""},
            )
        finally:
            launcher.terminate()
            launcher.wait()
        if not ran.stdout.strip():
            return ran.returncode or 1
        found = json.loads(ran.stdout.splitlines()[-1])
        sent = json.loads((folder / "runs/sent.json").read_text())
        found["sft_by_the_trainer"] = trained_alike(folder / "server.yaml", sent)
        if not np.allclose(found["sft_by_the_trainer"], found["sft"], rtol=1e-4):
            found["problems"].append("supervised training has other losses than the trainer")
        about = {**now(), **clients_versions(python), "torch": importlib.metadata.version("torch")}
        pathlib.Path(results).write_text(json.dumps({**about, **found}, indent=1) + "\n")
        print(json.dumps(found, indent=1))
        return int(bool(found["problems"]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
