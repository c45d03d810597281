"""Trains one small model on real text in each precision, and compares them.

    python examples/precision.py            # 2 M parameters, 80 steps: minutes on two cores
    python examples/precision.py --whole    # 10 M parameters, 300 steps, and a low learning rate

Prints a table, and writes it as table.md beside the curves, loss.png. An interrupted call goes on
where it ended. Needs tokenizers, transformers, pydantic, datasets and matplotlib.

- loss: nats per token on a part of the held-out play after the last step.
- cosine: of the gradient of the first step and that of float32.
- bytes: of parameters, gradients and the optimizer, per parameter.
- computed by: the implementation of products in FP8 and FP4. `cpp` and `eager` multiply the rounded
  values in float32, as a device without such tensor cores has to; `eager` is the definition.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import pathlib
import subprocess
import sys
from typing import Any

import demo
import torch
import yaml

from tilewright.core import platform
from tilewright.ops.quant.low_precision_linear import RECIPES

ROOT = demo.ROOT
# Parameters in bfloat16, written to nearest: an update below 1/512 of a weight is lost.
NEAREST = {"type": "manual"}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"type": "fp32"},
    "bfloat16 products": {"type": "mixed_precision"},
    "bf16SR": {"type": "bf16SR"},
    **{recipe: {"type": "mixed_precision", "recipe": recipe} for recipe in RECIPES},
    "block_fp8, hadamard": {
        "type": "mixed_precision",
        "recipe": "block_fp8",
        "hadamard": True,
    },
}
# At a rate at which rounding to nearest loses most updates.
SLOW = {
    "float32 parameters, slow": PRECISIONS["bfloat16 products"],
    "bf16SR, slow": PRECISIONS["bf16SR"],
    "bfloat16 to nearest, slow": NEAREST,
}


@dataclasses.dataclass(frozen=True)
class Size:
    """shape: entries that replace those of the demo's model."""

    shape: dict[str, int]
    steps: int
    evaluated: int  # bins of the held-out play
    precisions: dict[str, dict[str, Any]]


SMALL = Size(
    {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
    80,
    16,
    PRECISIONS,
)
WHOLE = Size({}, 300, 64, PRECISIONS | SLOW)


def configuration(out: pathlib.Path, name: str, size: Size) -> pathlib.Path:
    """Writes the demo's configuration with a precision; learning rates are constant when slow."""
    tree = yaml.safe_load((ROOT / "examples/demo.yaml").read_text())
    folder = out / name.replace(", ", "_").replace(" ", "_")
    tree["model"] = {"config_path": str(out / "model"), "tokenizer_path": str(out / "model")}
    tree["model"]["foundation"] = size.shape
    tree["data"]["dataset_prepared_path"] = str(out / "prepared")
    for part in ("datasets", "test_datasets"):
        for one in tree["data"][part]:
            one["path"] = str(ROOT / one["path"])
    tree["precision"] = size.precisions[name]
    tree["train"] |= {
        "output_dir": str(folder),
        "max_steps": size.steps,
        "enable_mixed_precision": name != "float32",
        "eval_on_start": False,
        "eval_max_batches": size.evaluated,
        "save_steps": 100,
        "save_hf_weights": False,
        "save_total_limit": 1,
        "plot_loss": False,
        "load_checkpoint_path": "auto",
    }
    if name.endswith("slow"):
        tree["train"] |= {"lr": 1e-5, "lr_min": 0.0, "lr_decay_style": "constant"}
        tree["train"]["lr_warmup_ratio"] = 0.0
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder


def first_step(folder: pathlib.Path) -> tuple[torch.Tensor, float, str]:
    """The gradient of the first step, bytes per parameter once it is taken, and what computes
    products of a recipe.
    """
    from tilewright.trainer.build import build
    from tilewright.trainer.config import load
    from tilewright.trainer.parallel.mesh import join

    config = load(str(folder / "config.yaml"), ["--train.load_checkpoint_path=null"])
    mesh = join(config.train)
    try:
        made = build(config, mesh)
        engine = made.engine
        engine.forward_backward(next(made.batches.steps()), made.loss)
        engine.divide()
        grads = [p.grad for p in engine.parameters if p.grad is not None]
        gradient = torch.cat([g.flatten().float() for g in grads])
        engine.optimizer.step()
        states = [t for s in engine.optimizer.state.values() for t in s.values()]
        held = [*engine.parameters, *grads, *(t for t in states if t.numel() > 1)]
        per_parameter = sum(t.nbytes for t in held) / sum(p.numel() for p in engine.parameters)
        return gradient, per_parameter, made.ops.get("low_precision_linear", "")
    finally:
        torch.distributed.destroy_process_group()


def trained(folder: pathlib.Path) -> None:
    from tilewright.trainer import train
    from tilewright.trainer.config import load
    from tilewright.trainer.parallel.mesh import join

    config = load(str(folder / "config.yaml"))
    try:
        train.train(config, join(config.train))
    finally:
        torch.distributed.destroy_process_group()


def row_of(folder: pathlib.Path, name: str, gradient: torch.Tensor) -> dict[str, Any]:
    """Trains. gradient: float32's, of the first step."""
    own, per_parameter, by = first_step(folder)
    cosine = torch.nn.functional.cosine_similarity(own.double(), gradient.double(), 0)
    trained(folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "precision": name,
        "losses": [round(r["loss"], 5) for r in rows if "loss" in r],
        "loss": [r["eval_loss"] for r in rows if "eval_loss" in r][-1],
        "cosine": float(cosine),
        "bytes": per_parameter,
        "by": by,
        "tilewright": commit(),
        "date": datetime.date.today().isoformat(),
        "device": platform.describe()["cpu"],
        "torch": torch.__version__,
    }


def commit() -> str:
    said = ["git", "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(said, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def table(rows: list[dict[str, Any]], size: Size) -> str:
    """Losses are beside those of products in bfloat16, the slow ones beside float32."""
    by_name = {row["precision"]: row for row in rows}
    lines = [
        f"{size.steps} steps; {rows[0]['device']}, torch {rows[0]['torch']}",
        "",
        "| precision | loss | beside | cosine | bytes | computed by | commit, date |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        slow = row["precision"].endswith("slow")
        base = by_name.get("float32 parameters, slow" if slow else "bfloat16 products", row)["loss"]
        lines.append(
            f"| {row['precision']} | {row['loss']:.4f} | {100 * (row['loss'] / base - 1):+.2f} % | "
            f"{row['cosine']:.4f} | {row['bytes']:.1f} | {row['by']} | {row['tilewright']}, "
            f"{row['date']} |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], file: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for row in rows:
        losses = torch.tensor(row["losses"])
        smooth = losses.unfold(0, min(10, len(losses)), 1).mean(-1)
        axes.plot(range(1, len(smooth) + 1), smooth, label=row["precision"], linewidth=1)
    axes.set(xlabel="step", ylabel="loss, nats per token (mean of ten steps)")
    axes.legend()
    figure.savefig(file, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--whole", action="store_true", help="10 M parameters and 300 steps")
    parser.add_argument("--steps", type=int, help="default: 80, or 300")
    parser.add_argument("--only", nargs="*", help="precisions, by their names")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "outputs/precision")
    given = parser.parse_args(arguments)
    size = WHOLE if given.whole else SMALL
    size = dataclasses.replace(size, steps=given.steps or size.steps)
    out = given.out.resolve() / ("whole" if given.whole else "small")
    names = given.only or [*size.precisions]
    if unknown := {*names} - {*size.precisions}:
        parser.error(f"--only: unknown {sorted(unknown)}; there are {', '.join(size.precisions)}")
    demo.write_model(out / "model")
    gradient, rows = None, []
    for name in names:
        folder = configuration(out, name, size)
        file = folder / "row.json"
        if not file.exists():
            if gradient is None:
                gradient, *_ = first_step(configuration(out, "float32", size))
            row = row_of(folder, name, gradient)
            aside = file.with_suffix(".new")
            aside.write_text(json.dumps(row) + "\n")
            aside.replace(file)
        rows.append(json.loads(file.read_text()))
        print(f"{name}: loss {rows[-1]['loss']:.4f}", flush=True)
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (out / "table.md").write_text(table(rows, size))
    draw(rows, out / "loss.png")
    print(f"\n{table(rows, size)}\n{out / 'loss.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
