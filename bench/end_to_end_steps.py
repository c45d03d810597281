"""Optimizer steps of whole training runs on one device, each provider in a process of its own.

`trainer` is the command that a user has. The others are a loop over transformers' Llama under
autocast, with sdpa and PyTorch's fused AdamW: as it is, after this library's `accelerate`, and
after Liger's patch. All begin from the same weights and train on the same packed documents: in
transformers, `position_ids` that begin anew confine attention to a document, and the first token
of each has no label. Weights and optimizer states are float32, gradients are clipped to norm 1,
and nothing is recomputed.

A step's time is that from the end of one to the end of the next, the batch included; the first
ones are left out. Memory is the most that PyTorch allocated on a GPU, or a process's high-water
mark on a CPU, in its whole life. MFU is the trainer's: `mfu` counts attention as of one document
in a bin, `mfu_documents` within the documents that there are. A provider differs if a loss, or the
norm of the first step's gradients, is further from the trainer's than rounding explains.

With --precision the trainer runs in each of these too; how far its losses are from those of
products in bfloat16 is told, and not judged.

With --profile only the trainer runs, and step_kernels.json lists the kernels of its steps.

With --curve the trainer trains SmolLM2-135M's shape on seven plays instead, on the device and, if
that is a GPU, for the first steps on the CPU in float32, to put both curves of the loss side by
side.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from bench import commands, step_kernels
from bench.llama import DTYPES, SEED, Shape, of_transformers
from tilewright.bench import run, store, timing
from tilewright.bench.options import at_least, chosen, has_device, names
from tilewright.core import platform
from tilewright.ops.quant.low_precision_linear import RECIPES

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROVIDERS = ("trainer", "transformers", "accelerate", "liger")
# The trainer's section, of --precision.
PRECISIONS = {
    **{recipe: {"recipe": recipe} for recipe in RECIPES},
    **{kind: {"type": kind} for kind in ("mixed_precisionSR", "bf16SR")},
}
SHAPES = {
    "llama-3.2-1b": Shape(8192, 16, 2048, 8192, 32, 8, 128256, rope_theta=500000.0),
    "smollm2-135m": Shape(8192, 30),
    "tiny": Shape(128, 2, 64, 96, 4, 2, 512),
}
# The trainer's fields.
OPTIMIZER = {
    "lr": 1e-4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
}
# The largest relative differences from the trainer, by the dtype of products: a loss's, and that of
# the norm of the first step's gradients, which shows sooner that something else is trained.
AGREEMENT = {"float32": (1e-4, 1e-3), "bfloat16": (1e-2, 2e-2)}
CURVE_TOKENS = 1024
CURVE_CPU_STEPS = 20


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained, and the folder that holds all files of it.

    attention: the trainer's attn_implementation; None: its default.
    """

    shape: Shape
    device: str
    dtype: str
    steps: int
    folder: str
    attention: str | None = None

    def path(self, *parts: str) -> pathlib.Path:
        return pathlib.Path(self.folder, *parts)


# ---- the same for all: documents, weights and settings


def documents(shape: Shape, steps: int) -> Iterator[list[np.ndarray]]:
    """The documents of each step, of random lengths, as many tokens as a bin has. Small tokens are
    frequent, so that there is something to learn.
    """
    rng, shortest = np.random.default_rng(SEED), shape.tokens // 32
    for _ in range(steps):
        made, left = [], shape.tokens
        while left:
            n = int(rng.integers(shortest, shape.tokens // 4))
            n = left if left - n < shortest else n
            made.append((shape.vocabulary ** rng.random(n)).astype(np.int64) - 1)
            left -= n
        yield made


def write_inputs(job: Job) -> None:
    """Writes random weights, rounded to bfloat16 so that a file of half the size holds them, and
    the documents.
    """
    with torch.device(job.device):
        model: Any = of_transformers(job.shape)
    model.to(torch.bfloat16).save_pretrained(job.path("model"))
    del model
    run.free(job.device, compiled=False)  # for the processes that follow
    with job.path("documents.jsonl").open("w") as file:
        for step in documents(job.shape, job.steps):
            file.writelines(json.dumps({"input_ids": d.tolist()}) + "\n" for d in step)


def configuration(job: Job, precision: str | None = None, **data: Any) -> dict[str, Any]:
    """The trainer's, with an entry of PRECISIONS. It is stopped after its last step that counts,
    since it would write a checkpoint after the last one of all.
    """
    attention = {} if job.attention is None else {"attn_implementation": job.attention}
    return {
        "model": {"model_path": str(job.path("model")), **attention},
        "data": {
            "datasets": [{"path": str(job.path("documents.jsonl")), "type": "tokenized"}],
            "dataset_prepared_path": str(job.path("prepared")),
            "sample_packing_sequence_len": job.shape.tokens,
            "shuffle_before_merging_datasets": False,
            "shuffle_merged_datasets": False,
            **data,
        },
        "train": {
            "output_dir": str(job.path(provider_of(precision))),
            "data_parallel_mode": "none",
            "max_steps": 10 * job.steps,
            **OPTIMIZER,
            "enable_mixed_precision": job.dtype == "bfloat16",
            "enable_gradient_checkpointing": False,
            "save_epochs": 0,
            "save_hf_weights": False,
            "log_format": "structured",
        },
        "precision": PRECISIONS.get(precision or "", {}),
    }


def provider_of(precision: str | None) -> str:
    return "trainer" if precision is None else f"trainer-{precision}"


def flops(job: Job) -> tuple[float, float]:
    """Per token, by the trainer's formula: of one document in a bin, and of those that there
    are.
    """
    from tilewright.trainer.models.model import ModelConfig, Ops, Transformer
    from tilewright.trainer.plugins.flops import flops_per_token

    config = ModelConfig.from_hf(json.loads(job.path("model", "config.json").read_text()))
    with torch.device("meta"):
        model = Transformer(config, Ops.resolve(device_type="cpu", dtype=torch.float32))
    lengths = [len(d) for step in documents(job.shape, job.steps) for d in step]
    within = sum(n * flops_per_token(model, n) for n in lengths) / sum(lengths)
    return flops_per_token(model, job.shape.tokens), within


# ---- in a process of its own


def packed(step: list[np.ndarray], device: str) -> dict[str, torch.Tensor]:
    """The arguments of transformers' model."""
    labels = [np.append(-100, d[1:]) for d in step]
    rows = {
        "input_ids": np.concatenate(step),
        "labels": np.concatenate(labels),
        "position_ids": np.concatenate([np.arange(len(d)) for d in step]),
    }
    return {name: torch.from_numpy(row)[None].to(device) for name, row in rows.items()}


def train_transformers(job: Job, provider: str) -> None:
    """Writes a line for each step, with the trainer's names."""
    from transformers import AutoModelForCausalLM

    from tilewright.trainer.plugins.metrics import memory_gb

    model: Any = AutoModelForCausalLM.from_pretrained(
        job.path("model"), dtype=torch.float32, attn_implementation="sdpa"
    )
    model.to(job.device).train()
    if provider == "accelerate":
        from tilewright.integrations.transformers import accelerate

        accelerate(model)
    elif provider == "liger":
        liger: Any = importlib.import_module("liger_kernel.transformers")
        liger.apply_liger_kernel_to_llama(model=model)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=OPTIMIZER["lr"],
        betas=(OPTIMIZER["adam_beta1"], OPTIMIZER["adam_beta2"]),
        eps=OPTIMIZER["adam_epsilon"],
        weight_decay=OPTIMIZER["weight_decay"],
        fused=True,
    )
    half = job.dtype == "bfloat16"
    job.path(provider).mkdir()
    with job.path(provider, "metrics.jsonl").open("w", buffering=1) as file:
        last = time.perf_counter()
        for number, step in enumerate(documents(job.shape, job.steps), 1):
            with torch.autocast(job.device, torch.bfloat16, enabled=half):
                loss = model(**packed(step, job.device), use_cache=False).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["max_grad_norm"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            row = {"step": number, "loss": loss.item(), "grad_norm": norm.item()}
            now = time.perf_counter()
            row |= {"seconds": now - last, "memory_gb": memory_gb()}
            last = now
            file.write(json.dumps(row) + "\n")


def _child(asked: dict[str, Any]) -> None:
    job = Job(**{**asked["job"], "shape": Shape(**asked["job"]["shape"])})
    train_transformers(job, asked["provider"])


# ---- processes


def command(job: Job, provider: str) -> list[str]:
    environment = ["HF_HUB_OFFLINE=1", *(["CUDA_VISIBLE_DEVICES="] if job.device == "cpu" else [])]
    python = ["env", *environment, sys.executable, "-m"]
    if provider.startswith("trainer"):
        return [*python, "tilewright.trainer.train", str(job.path(f"{provider}.yaml"))]
    asked = json.dumps({"provider": provider, "job": dataclasses.asdict(job)})
    return [*python, "bench.end_to_end_steps", asked]


def launch(job: Job, provider: str, limit: float) -> tuple[list[dict], str | None, str]:
    """Runs a process until it ends, its steps are done, or the limit in seconds has passed. Returns
    the lines of its steps, why it failed or None, and the end of what else it printed.
    """
    from tilewright.trainer.plugins.records import rows

    metrics, log = job.path(provider, "metrics.jsonl"), job.path(f"{provider}.log")
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command(job, provider),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while (code := process.poll()) is None and time.monotonic() - began < limit:
                if len(rows(metrics)) >= job.steps:
                    break
                time.sleep(0.05)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    done, printed = rows(metrics), log.read_text(errors="replace").splitlines()
    said = "\n".join(line for line in printed if not line.startswith("step="))
    for path, name in ((job.folder, "FOLDER"), (str(ROOT), ".")):
        said = said.replace(path, name)
    if len(done) >= job.steps:
        return done[: job.steps], None, said[-3000:]
    why = f"exit code {code}" if code is not None else f"stopped after {limit:.3g} s"
    last = (said.strip().splitlines() or ["it printed nothing"])[-1]
    return done, f"{why}, {len(done)} of {job.steps} steps done: {last}", said[-3000:]


# ---- rows


def unavailable(provider: str, device: str) -> str | None:
    if provider != "liger":
        return None
    return platform.no_cuda() if device == "cpu" else platform.no_module("liger_kernel")


def figures(
    job: Job,
    steps: Sequence[dict[str, Any]],
    skip: int,
    work: tuple[float, float],
    peak: float | None,
) -> dict[str, Any]:
    """Times, rates and memory of the steps after the first ones.   peak: FLOP/s, if known."""
    curves: dict[str, Any] = {
        "losses": [s["loss"] for s in steps],
        "grad_norms": [s["grad_norm"] for s in steps],
    }
    samples = [s["seconds"] for s in steps[skip:]]
    if not samples:
        return curves
    t = timing.Timing.of(samples)
    rate = job.shape.tokens / t.median
    mfus = [None if peak is None else rate * each / peak for each in work]
    return {
        "median_ms": t.median * 1e3,
        "p20_ms": t.p20 * 1e3,
        "p80_ms": t.p80 * 1e3,
        "samples_ms": [s * 1e3 for s in samples],
        "tokens_per_second": rate,
        "mfu": mfus[0],
        "mfu_documents": mfus[1],
        "peak_mib": steps[-1]["memory_gb"] * 1e9 / 2**20,
        **curves,
    }


def largest_difference(values: Sequence[float], expected: Sequence[float]) -> float:
    """Relative, over the steps that both have."""
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=False))


def compare(row: dict[str, Any], ours: dict[str, Any] | None) -> None:
    """Adds a provider's largest differences from the trainer's row, and judges them, unless it is
    the trainer in another precision.
    """
    if not (ours and ours.get("losses") and row.get("losses")):
        return
    norms = row["grad_norms"], ours["grad_norms"]
    differences = {
        "loss_difference": largest_difference(row["losses"], ours["losses"]),
        "first_grad_norm_difference": largest_difference(*(n[:1] for n in norms)),
        "grad_norm_difference": largest_difference(*norms),
    }
    row |= differences
    if row.get("provider", "").startswith("trainer-"):
        return
    for (name, apart), allowed in zip(differences.items(), AGREEMENT[row["dtype"]], strict=False):
        if row["status"] == "ok" and not apart <= allowed:
            row["status"] = "differs"
            row["reason"] = f"{name} is {apart:.2g}; {allowed:g} is allowed"


def shown(row: dict[str, Any]) -> str:
    head = f"{row['case']} {row['dtype']} {row['provider']:<17} {row['status']:<11}"
    if "median_ms" in row:
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
        head += (
            f" {row['median_ms']:.1f} ms [{row['p20_ms']:.1f}, {row['p80_ms']:.1f}]  "
            f"{row['tokens_per_second']:.0f} tokens/s  MFU {mfu}  {row['peak_mib']:.0f} MiB  "
            f"loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}"
        )
    if row.get("loss_difference") is not None:
        head += f"  losses differ by {row['loss_difference']:.1e}"
    return f"{head}  {row['reason']}" if row["reason"] else head


def measure(
    job: Job,
    case: str,
    providers: Sequence[str],
    skip: int,
    limits: tuple[float, float],
    device_name: str,
) -> Iterator[dict[str, Any]]:
    """Yields a row for each provider as soon as it is there.   limits: seconds of each process, and
    of all.
    """
    from tilewright.trainer.plugins.metrics import PEAK

    began, (each, total) = time.monotonic(), limits
    write_inputs(job)
    work = flops(job)
    peak = next((peak for name, peak in PEAK.items() if name in device_name), None)
    for precision in (None, *PRECISIONS):
        file = job.path(f"{provider_of(precision)}.yaml")
        store.write_json(file, configuration(job, precision))  # JSON is YAML
    ours = None
    for provider in providers:
        row: dict[str, Any] = {"case": case, "dtype": job.dtype, "provider": provider}
        started = time.monotonic()
        limit = min(each, total - (started - began))
        if reason := unavailable(provider, job.device):
            row |= {"status": "unavailable", "reason": reason}
        elif limit <= 0:
            row |= {"status": "error", "reason": f"no time is left of {total:g} s"}
        else:
            steps, reason, said = launch(job, provider, limit)
            row |= {"status": "error" if reason else "ok", "reason": reason}
            row |= figures(job, steps, skip, work, peak)
            row |= {"flops_per_token": work[0], "flops_per_token_documents": work[1]}
            row |= {"process_s": time.monotonic() - started, "printed": said}
        if provider == "trainer":
            ours = row
        else:
            compare(row, ours)
        yield row


# ---- kernels of a step


def profile(job: Job, limit: float) -> dict[str, Any]:
    """The kernels of the trainer's steps; see `bench/step_kernels.py`."""
    write_inputs(job)
    config = configuration(job)
    config["train"] |= step_kernels.fields(job.path("trace"))
    store.write_json(job.path("trainer.yaml"), config)
    steps, reason, said = launch(job, "trainer", limit)
    row = {"status": "error" if reason else "ok", "reason": reason, "printed": said}
    row |= {"samples_ms": [s["seconds"] * 1e3 for s in steps]}
    if reason:
        return row
    return row | step_kernels.summary(step_kernels.read(job.path("trace")))


# ---- curves of the loss


def curve(shape: Shape, device: str, dtype: str, steps: int, limit: float) -> Iterator[dict]:
    """Yields the losses of the trainer on real text, on the device, then on the CPU."""
    jobs = [(device, dtype, steps)]
    if device != "cpu":
        jobs.append(("cpu", "float32", min(steps, CURVE_CPU_STEPS)))
    demo = runpy.run_path(str(ROOT / "examples/demo.py"))
    shape = dataclasses.replace(shape, tokens=CURVE_TOKENS, vocabulary=demo["VOCAB"])
    text = [{"path": str(demo["TEXT"] / "train"), "type": "text"}]
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        demo["write_model"](pathlib.Path(folder, "model"))
        of_transformers(shape).save_pretrained(pathlib.Path(folder, "model"))
        for where, half, count in jobs:
            job = Job(shape, where, half, count, str(pathlib.Path(folder, where)))
            job.path().mkdir()
            config = configuration(job, datasets=text)
            config["model"] = {"model_path": str(pathlib.Path(folder, "model"))}
            store.write_json(job.path("trainer.yaml"), config)
            rows, reason, said = launch(job, "trainer", limit)
            losses = [s["loss"] for s in rows]
            yield {
                "device": where,
                "dtype": half,
                "status": "error" if reason else "ok",
                "reason": reason,
                "losses": losses,
                "printed": said,
            }


# ---- the command


def _measured(args: argparse.Namespace, meta: dict[str, Any]) -> Iterator[dict[str, Any]]:
    shape = SHAPES[args.shape]
    if args.tokens:
        shape = dataclasses.replace(shape, tokens=args.tokens)
    if args.curve:
        for row in curve(shape, args.device, args.dtype, args.steps, args.seconds):
            print(
                f"{row['device']} {row['dtype']} {row['status']}: {row['reason'] or ''} loss "
                f"{' '.join(f'{x:.4f}' for x in row['losses'][:CURVE_CPU_STEPS])}",
                flush=True,
            )
            yield row
        return
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        job = Job(shape, args.device, args.dtype, args.steps, folder, args.attention)
        if args.profile:
            row = profile(job, args.seconds)
            print(row["reason"] or step_kernels.table(row), flush=True)
            yield row
            return
        case, limits = f"{args.shape}_{shape.tokens}_tokens", (args.seconds, args.budget)
        providers = (*args.providers, *map(provider_of, args.precision))
        for row in measure(job, case, providers, args.skip, limits, meta["device"]):
            print(shown(row), flush=True)
            yield row


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser("end-to-end", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--shape", choices=SHAPES, help="default: llama-3.2-1b, or smollm2-135m")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16; float32 on a CPU")
    parser.add_argument(
        "--providers", type=names(), metavar="NAME,...", help=f"default: {','.join(PROVIDERS)}"
    )
    parser.add_argument(
        "--precision",
        type=names(),
        metavar="NAME,...",
        help=f"all, or some of {', '.join(PRECISIONS)}",
    )
    parser.add_argument(
        "--tokens",
        type=at_least(128, int),
        metavar="N",
        help="of a step, a multiple of 128; default: the shape's",
    )
    parser.add_argument("--steps", type=at_least(1, int), help="default: 25, with --curve 200")
    parser.add_argument(
        "--skip", type=at_least(0, int), default=5, help="untimed first steps, default %(default)s"
    )
    parser.add_argument("--attention", metavar="NAME", help="of the trainer (default: its default)")
    parser.add_argument(
        "--seconds", type=at_least(1, float), default=60.0, help="of a process, default %(default)s"
    )
    parser.add_argument(
        "--budget",
        type=at_least(1, float),
        default=150.0,
        help="seconds of all processes; default %(default)s",
    )
    parser.add_argument("--curve", action="store_true", help="the loss on real text: curve.json")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="the kernels of the trainer's steps: step_kernels.json",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="DIR", help="write end_to_end.json there"
    )
    parser.add_argument(
        "--commit",
        metavar="COMMIT|FILE",
        help="the commit of these sources, or gpu-cache's commit.json, if git does not know it",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    args.providers = chosen(parser, "--providers", args.providers, PROVIDERS)
    given: list[str] = args.precision or []
    every = tuple(PRECISIONS)
    args.precision = every if "all" in given else chosen(parser, "--precision", given, every)
    if args.tokens and args.tokens % 128:  # else the trainer would pad
        parser.error("argument --tokens: must be a multiple of 128")
    has_device(parser, args.device)
    commands.need(parser)
    args.shape = args.shape or ("smollm2-135m" if args.curve else "llama-3.2-1b")
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    if args.precision and args.dtype != "bfloat16":
        parser.error("argument --precision: needs --dtype bfloat16, of products in it")
    if args.profile and args.curve:
        parser.error("argument --profile: not with --curve")
    if args.profile and (args.steps or step_kernels.AFTER + 2) < step_kernels.AFTER + 2:
        parser.error(f"argument --steps: with --profile at least {step_kernels.AFTER + 2}")
    args.steps = args.steps or (
        200 if args.curve else step_kernels.AFTER + 2 if args.profile else 25
    )
    name = "curve" if args.curve else "step_kernels" if args.profile else "end_to_end"
    fields = {k: v for k, v in vars(args).items() if k not in ("out", "commit")}
    meta = commands.metadata("end-to-end", argv, fields, args.device, args.commit)
    rows: list[dict[str, Any]] = []
    for row in _measured(args, meta):
        rows.append(row)
        if args.out:
            commands.write(args.out / f"{name}.json", meta, rows)
    return int(any(row["status"] not in ("ok", "unavailable") for row in rows))


if __name__ == "__main__":
    _child(json.loads(sys.argv[1]))
