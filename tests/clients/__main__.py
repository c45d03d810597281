"""Published clients on a server: `make clients`.

    python -m tests.clients PYTHON_OF_THE_CLIENTS RESULTS.json

It writes a small model with SmolLM2's tokenizer, serves it, runs `cookbook.py` with the clients'
Python, then `rollouts.py` on a model of few words, and writes what they saw, with the commit and
the date. Fails where that is not as it should be.
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
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.lib.sweeps import now
from tilewright.server.fields import load
from tilewright.trainer import build
from tilewright.trainer.data.batches import collate
from tilewright.trainer.data.columns.column import COLUMNS
from tilewright.trainer.losses.weighted import weighted_language_modeling
from tilewright.trainer.parallel.mesh import Mesh
from tilewright_lab.server_torture.client import Server, write_model, write_server

HERE = pathlib.Path(__file__).parent
TOKENIZER = HERE.parents[1] / ".cache/smollm2"


def clients_versions(python):
    code = "import importlib.metadata as m; print(*map(m.version, ('tinker', 'tinker-cookbook')))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return dict(zip(("tinker", "tinker-cookbook"), found.stdout.split(), strict=True))


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


def write_words(model):
    """A tokenizer of as many words as the model has tokens."""
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(model)


def of_script(name, python, file, model):
    """What a script of the clients has seen; None where it has ended otherwise."""
    with Server(file) as server:
        ran = subprocess.run(
            [
                pathlib.Path(python).absolute(),
                HERE / name,
                server.root,
                model,
                file.parent / "runs",
            ],
            stdout=subprocess.PIPE,
            text=True,
            cwd=file.parent,
            env={**os.environ, "PYTHONPATH": ""},
        )
    return json.loads(ran.stdout.splitlines()[-1]) if ran.stdout.strip() else None


def main(python, results):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model = write_model(folder / "model", vocab_size=49152, max_position_embeddings=512)
        for file in TOKENIZER.iterdir():
            if "token" in file.name or file.suffix == ".jinja":
                shutil.copy(file, model)
        file = write_server(folder, model, {"sample_packing_sequence_len": 256})
        found = of_script("cookbook.py", python, file, model)
        small = write_model(folder / "words/model")
        write_words(small)
        rollouts = of_script(
            "rollouts.py", python, write_server(folder / "words", small, {}), small
        )
        if found is None or rollouts is None:
            return 1
        found["problems"] += rollouts.pop("problems")
        found |= rollouts
        sent = json.loads((folder / "runs/sent.json").read_text())
        found["sft_by_the_trainer"] = trained_alike(file, sent)
        if not np.allclose(found["sft_by_the_trainer"], found["sft"], rtol=1e-4):
            found["problems"].append("supervised training has other losses than the trainer")
        about = {**now(), **clients_versions(python), "torch": importlib.metadata.version("torch")}
        pathlib.Path(results).write_text(json.dumps({**about, **found}, indent=1) + "\n")
        print(json.dumps(found, indent=1))
        return int(bool(found["problems"]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
