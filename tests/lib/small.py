"""Small runs of a tiny Llama: one process, SGD in float32, nothing saved; or two ranks."""

import json

import torch
import yaml
from ranks import metrics, run_modes

from tilewright.trainer import build, train
from tilewright.trainer.config import load
from tilewright.trainer.parallel.mesh import Mesh

SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}


def write_run(folder, loss, file, rows=(), *, model="model", length=64, train=None, **sections):
    """The path of a configuration in a folder that has the model.

    file: (file in the folder, type of data set).   rows: which are written there, if any.
    length: tokens of a bin.   train: what differs.   sections: what differs in others.
    """
    tree = {
        "model": {"model_path": str(folder / model)},
        "data": {
            "datasets": [{"path": str(folder / file[0]), "type": file[1]}],
            "dataset_prepared_path": str(folder / "prepared"),
            "sample_packing_sequence_len": length,
            "pad_to_multiple_of": 16,
            **sections.pop("data", {}),
        },
        "train": {
            "output_dir": str(folder / "out"),
            "data_parallel_mode": "none",
            "loss": loss,
            "lr": 1e-2,
            "optimizer": "sgd",
            "lr_decay_style": "constant",
            "max_grad_norm": 0.0,
            "enable_mixed_precision": False,
            "enable_gradient_checkpointing": False,
            "save_hf_weights": False,
            "save_strategy": "no",
            **(train or {}),
        },
        **sections,
    }
    if rows:
        write_rows(folder / file[0], rows)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return str(folder / "config.yaml")


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def data_set(path, rows, kind="tokenized", field="datasets"):
    """The argument of a run on these rows, which are written there."""
    write_rows(path, rows)
    return f"--data.{field}={json.dumps([{'path': str(path), 'type': kind}])}"


def trained(settings, name, *options):
    """The steps of a run.   settings: (folder, path of a configuration, ...)."""
    folder, path, *_ = settings
    train.train(load(path, [f"--train.output_dir={folder / name}", *options]), Mesh())
    return metrics(folder / name)


def built(settings, *options):
    """What a run would train with."""
    folder, path, *_ = settings
    return build.build(load(path, [f"--train.output_dir={folder / 'unused'}", *options]), Mesh())


def by_hand(settings, model, steps, terms, lr=1e-2, after=lambda step: None):
    """The steps of a plain loop over the batches of a run: (loss, *others) of each.

    terms: a step's batches -> (loss, *others).   after: called with the steps done after each.
    """
    batches, found = built(settings).batches.steps(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        loss, *others = terms(next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after(step + 1)
        found.append((loss.item(), *map(float, others)))
    return found


def evaluations(folder):
    """The rows of evaluations that a run has written."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if "eval_loss" in row]


FSDP2 = "--train.data_parallel_mode=fsdp2"


def layouts(steps):
    """Arguments of two ranks.   steps: of accumulation, where a rank has bins of its own."""
    own = f"--train.gradient_accumulation_steps={steps}"
    return {
        "ddp": ["--train.data_parallel_mode=ddp", own],
        "fsdp2": [FSDP2, own],
        "ring": [FSDP2, "--train.ringattn_parallel_size=2"],
        "ulysses": [FSDP2, "--train.ulysses_parallel_size=2"],
        "tp": [FSDP2, "--train.tensor_parallel_size=2"],
        "pp": [FSDP2, "--train.pipeline_parallel_size=2"],
    }


def two_ranks(settings, modes):
    """The steps of runs whose arguments those are, and a folder each.   modes: as `run_modes`."""
    folder, path, *_ = settings
    same = [path, "--model.merge_qkv=false"]
    given = {n: [*same, f"--train.output_dir={folder / n}", *modes[n]] for n in modes}
    run_modes(2, folder, given)
    return {n: metrics(folder / n) for n in modes if (folder / n / "metrics.jsonl").exists()}
