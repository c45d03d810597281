"""The quantization error of SmolLM2-135M, and its QLoRA training, on a CPU, in each format.

    make .cache/smollm2/config.json
    # The logits against those of the bfloat16 weights:
    python examples/qlora_smollm2.py errors RESULTS.json
    # Training, with and without noise (AQN):
    python examples/qlora_smollm2.py train RESULTS.json [nf4 | nvfp4 | block_fp8 ...]

The held-out text is The Tempest: every thirtieth window of 256 tokens. `train` exits with 1 if a
held-out loss does not fall.
"""

from __future__ import annotations

import json
import math
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from measurement import ROOT, where
from torch.nn import functional as F

from tilewright import nn, ops
from tilewright.nn import QuantFormat
from tilewright.trainer.checkpoint import hf
from tilewright.trainer.models.model import Ops, Transformer

WEIGHTS, OUT = ROOT / ".cache/smollm2", ROOT / "outputs/qlora_smollm2"
WINDOW, EVERY = 256, 30
ERRORS = {
    "nf4, 64": QuantFormat("nf4", 64),
    "nf4, 64, scales quantized": lambda w: ops.quantize_nf4(w, double_quant=True),
    "nvfp4, 16": QuantFormat("nvfp4", 16),
    "block_fp8, 128": QuantFormat("block_fp8", 128),
}
TRAINED = {"nf4": 64, "nvfp4": 16, "block_fp8": 128}


def heldout() -> torch.Tensor:
    """Tokens [windows, 256]."""
    from transformers import AutoTokenizer

    text = (ROOT / "examples/data/shakespeare/heldout/tempest.txt").read_text()
    ids = torch.tensor(
        AutoTokenizer.from_pretrained(WEIGHTS)(text, add_special_tokens=False)["input_ids"]
    )
    return ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)[::EVERY]


def model(format=None) -> Transformer:
    """In float32, with the bfloat16 weights, or with the projections quantized to a format."""
    with torch.device("meta"):
        made = Transformer(hf.load_config(WEIGHTS), Ops.resolve())
    if format is not None:
        nn.quantize_model(made, format)
    made.to_empty(device="cpu")
    made.tie()
    hf.load_weights(made, WEIGHTS)
    return made.eval()


@torch.no_grad()
def errors(write: Callable[[list], None]) -> list[dict[str, Any]]:
    windows = heldout()
    plain = model()
    want = [plain(w[None])[0] for w in windows]

    def row(name, made):
        worst = total = divergence = loss = 0.0
        for window, reference in zip(windows, want, strict=True):
            logits = made(window[None])[0]
            difference = (logits - reference).abs()
            worst, total = max(worst, difference.max().item()), total + difference.mean().item()
            divergence += (
                F.kl_div(
                    logits.log_softmax(-1),
                    reference.log_softmax(-1),
                    log_target=True,
                    reduction="none",
                )
                .sum(-1)
                .mean()
                .item()
            )
            loss += F.cross_entropy(logits[:-1], window[1:]).item()
        n = len(windows)
        weights = [
            (math.prod(nn.shape_of(p)), q.nbytes)
            for _, p in nn.base_weights(made)
            for q in nn.quantized(p)
        ]
        bits = 16.0 if not weights else 8 * sum(b for _, b in weights) / sum(e for e, _ in weights)
        return {
            "format": name,
            "bits_per_weight": bits,
            "max_abs_error": worst,
            "mean_abs_error": total / n,
            "kl": divergence / n,
            "perplexity": math.exp(loss / n),
            "tokens": n * WINDOW,
        }

    rows = [row("bfloat16", plain)]
    for name, format in ERRORS.items():
        rows.append(row(name, model(format)))
        write(rows)
    print(
        "| format | bits a weight | max abs error | mean abs error | KL | perplexity "
        "|\n|---|---|---|---|---|---|"
    )
    for r in rows:
        print(
            f"| {r['format']} | {r['bits_per_weight']:.2f} | {r['max_abs_error']:.3f} | "
            f"{r['mean_abs_error']:.4f} | "
            f"{r['kl']:.5f} | {r['perplexity']:.3f} |"
        )
    return rows


def train(write: Callable[[list], None], formats: list[str]) -> list[dict[str, Any]]:
    OUT.mkdir(parents=True, exist_ok=True)
    file = OUT / f"heldout-{'-'.join(formats)}.jsonl"
    file.write_text("".join(json.dumps({"input_ids": w.tolist()}) + "\n" for w in heldout()))
    rows = []
    for format in formats:
        for noise in (False, True):
            size = TRAINED[format]
            folder = OUT / f"{format}{'-aqn' if noise else ''}"
            shutil.rmtree(folder, ignore_errors=True)
            arguments = [
                f"--train.output_dir={folder}",
                f"--lora.quant_format={format}",
                f"--lora.quant_group_size={size}",
                f"--lora.enable_aqn={str(noise).lower()}",
                "--data.test_datasets",
                json.dumps([{"path": str(file)}]),
                f"--data.dataset_prepared_path={OUT / ('prepared-' + '-'.join(formats))}",
            ]
            command = [
                sys.executable,
                "-m",
                "tilewright.trainer.train",
                "examples/qlora_smollm2.yaml",
                *arguments,
            ]
            subprocess.run(command, cwd=ROOT, check=True)
            records = [
                json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
            ]
            losses = [r["loss"] for r in records if "loss" in r]
            held = [r["eval_loss"] for r in records if "eval_loss" in r]
            rows.append(
                {
                    "format": format,
                    "group_size": size,
                    "aqn": noise,
                    "heldout_first": held[0],
                    "heldout_last": held[-1],
                    "loss": losses,
                    "seconds": [r["seconds"] for r in records if "loss" in r],
                }
            )
            write(rows)
    print("| format | AQN | held out, first | held out, last |\n|---|---|---|---|")
    for r in rows:
        print(
            f"| {r['format']}, {r['group_size']} | {r['aqn']} | {r['heldout_first']:.4f} | "
            f"{r['heldout_last']:.4f} |"
        )
    return rows


def main(what: str, target: pathlib.Path, formats: list[str]) -> None:
    about = where()
    target.parent.mkdir(parents=True, exist_ok=True)

    def write(rows):
        target.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")

    if what == "errors":
        errors(write)
    elif any(r["heldout_last"] >= r["heldout_first"] for r in train(write, formats)):
        sys.exit("a held-out loss did not fall")


if __name__ == "__main__":
    if (
        len(sys.argv) < 3
        or sys.argv[1] not in ("errors", "train")
        or not {*sys.argv[3:]} <= {*TRAINED}
    ):
        sys.exit(__doc__)
    main(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:] or list(TRAINED))
