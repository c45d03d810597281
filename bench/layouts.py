"""Training runs on a CPU, layout by layout: the trainer, and transformers' Trainer where it has the
layout.

Each run is a launch as a user makes it (torchrun, a configuration, files of weights and tokens), of
a few steps. Launches of all chosen layouts and of both providers alternate, round by round. All
train the same: weights of the same values, and in each step the same rows of random tokens, one in
one process and two on several. Each process has one thread. Weights and optimizer states are
float32; AdamW is PyTorch's fused one with the same learning rate and betas; gradients are clipped
to norm 1; attention is PyTorch's.

Seconds are those from the end of one step of the optimizer to the end of the next, so the first
step of a launch has none; CPU seconds are those of all processes together. Memory is the kernel's
high-water mark of each process in its whole life; what was resident after imports is beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from bench import commands
from bench.host_memory import status_mib
from bench.llama import SEED, Shape, of_transformers
from tilewright.bench import store, timing
from tilewright.bench.options import at_least, chosen, names
from tilewright.core import platform

# Ranks, the micro-batches of a step, of one row each, and the fields of the section train.
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "process": (1, 1, {"data_parallel_mode": "none"}),
    "ddp": (2, 1, {"data_parallel_mode": "ddp"}),
    "fsdp2": (2, 1, {"data_parallel_mode": "fsdp2"}),
    "tensor": (2, 2, {"tensor_parallel_size": 2}),
    "pipeline": (2, 2, {"pipeline_parallel_size": 2}),
    "ulysses": (3, 2, {"ulysses_parallel_size": 3}),
    "ring": (2, 2, {"ringattn_parallel_size": 2}),
}
PROVIDERS = ("transformers", "trainer")
FSDP2 = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
# Further arguments of transformers' Trainer in the layouts that it has.
PEER: dict[str, dict[str, Any]] = {
    "process": {},
    "ddp": {},
    "fsdp2": {"fsdp": True, "fsdp_config": FSDP2},
}
DTYPES = ("float32", "bfloat16")  # of products
RECOMPUTE = {  # what is recomputed in the backward pass, by provider
    "defaults": {"trainer": "layers", "transformers": "nothing"},
    "mlp": {"trainer": "mlp", "transformers": "nothing"},
    "layers": {"trainer": "layers", "transformers": "layers"},
    "nothing": {"trainer": "nothing", "transformers": "nothing"},
}
LR, BETAS = 1e-4, (0.9, 0.999)


@dataclasses.dataclass(frozen=True)
class Job:
    """One launch."""

    provider: str
    layout: str
    dtype: str
    recompute: str
    tokens: int
    steps: int
    model: str  # its folder
    data: str  # a file of rows of tokens

    @property
    def rows(self) -> int:
        """The rows of a step, on all ranks."""
        return self.micro_batches * (2 if self.layout in ("ddp", "fsdp2") else 1)

    @property
    def micro_batches(self) -> int:
        return LAYOUTS[self.layout][1]


# ---- one rank


def trainer_rank(job: Job, folder: pathlib.Path) -> dict[str, Any]:
    """Trains as `python -m tilewright.trainer.train` does."""
    from tilewright.trainer import train

    imported = status_mib("VmRSS")
    if code := train.main([str(folder / "config.yaml")]):
        sys.exit(code)
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return {"imported_mib": imported, "losses": [json.loads(line)["loss"] for line in lines]}


def configuration(job: Job, folder: pathlib.Path) -> dict[str, Any]:
    """The trainer's."""
    return {
        "model": {"model_path": job.model, "merge_qkv": job.layout != "tensor"},
        "data": {
            "datasets": [{"path": job.data, "type": "tokenized"}],
            "dataset_prepared_path": str(folder / "prepared"),
            "sample_packing_sequence_len": job.tokens,
            "shuffle_before_merging_datasets": False,
            "shuffle_merged_datasets": False,
        },
        "train": {
            "output_dir": str(folder / "run"),
            "gradient_accumulation_steps": job.micro_batches,
            "max_steps": job.steps,
            "lr": LR,
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "enable_mixed_precision": job.dtype == "bfloat16",
            "enable_gradient_checkpointing": job.recompute != "nothing",
            "recompute_modules": ["mlp"] if job.recompute == "mlp" else None,
            "save_epochs": 0,
            "save_hf_weights": False,
            "log_format": "structured",
            **LAYOUTS[job.layout][2],
        },
    }


def peer_rank(job: Job, folder: pathlib.Path) -> dict[str, Any]:
    """Trains with transformers' Trainer."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    imported = status_mib("VmRSS")

    more: dict[str, Any] = dict(PEER[job.layout])
    if job.recompute == "layers":
        more["gradient_checkpointing"] = True
    arguments = TrainingArguments(
        output_dir=str(folder / "run"),
        use_cpu=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=job.micro_batches,
        max_steps=job.steps,
        learning_rate=LR,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        lr_scheduler_type="constant",
        bf16=job.dtype == "bfloat16",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        train_sampling_strategy="sequential",
        disable_tqdm=True,
        **more,
    )
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    lines = pathlib.Path(job.data).read_text().splitlines()
    rows = [json.loads(line)["input_ids"] for line in lines]
    data: Any = [{"input_ids": ids, "labels": ids} for ids in rows]  # a list will do
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {"imported_mib": imported, "losses": losses}


def rank(folder: pathlib.Path) -> None:
    """Runs one rank of the launch described in `folder`, and writes what it measured there."""
    job, clocks = Job(**json.loads((folder / "job.json").read_text())), []
    hook = register_optimizer_step_post_hook(
        lambda *_: clocks.append((time.perf_counter(), time.process_time()))
    )
    measured = (trainer_rank if job.provider == "trainer" else peer_rank)(job, folder)
    hook.remove()
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(clocks)]
    measured["seconds"], measured["cpu_seconds"] = map(list, zip(*steps, strict=True))
    measured["peak_mib"] = status_mib("VmHWM")
    number, _, _ = platform.launched() or (0, 1, 0)
    (folder / f"rank{number}.json").write_text(json.dumps(measured))


# ---- launches


def launch(job: Job) -> dict[str, Any]:
    """Runs a job in processes of its own, of one thread each. Raises RuntimeError with their last
    lines.
    """
    ranks = LAYOUTS[job.layout][0]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        store.write_json(folder / "job.json", dataclasses.asdict(job))
        if job.provider == "trainer":  # JSON is YAML
            store.write_json(folder / "config.yaml", configuration(job, folder))
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        done = subprocess.run(
            [
                *(sys.executable, "-m", *(torchrun if ranks > 1 else [])),
                *("bench.layouts", name),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            last = "\n".join(done.stdout.splitlines()[-30:])
            raise RuntimeError(f"{job.provider} {job.layout}: {last}")
        by_rank = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    return {
        **by_rank[0],
        "peak_mib": max(each["peak_mib"] for each in by_rank),
        "imported_mib": max(each["imported_mib"] for each in by_rank),
        "cpu_seconds": [sum(s) for s in zip(*(r["cpu_seconds"] for r in by_rank), strict=True)],
    }


def write_inputs(folder: pathlib.Path, shape: Shape, steps: int, model: str | None) -> list[str]:
    """Writes weights, unless there is a model, and rows of tokens. Returns both paths."""
    if model is None:
        model = str(folder / "model")
        of_transformers(shape).save_pretrained(model)
    generator = torch.Generator().manual_seed(SEED + 1)
    rows = torch.randint(shape.vocabulary, (steps * 2, shape.tokens), generator=generator)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": r}) + "\n" for r in rows.tolist()))
    return [model, str(path)]


def measure(
    shape: Shape,
    jobs: Sequence[Job],
    rounds: int,
) -> list[dict[str, Any]]:
    """One row per job, from launches of all jobs in turn; every other round is backwards."""
    by_job: dict[Job, list[dict[str, Any]]] = {job: [] for job in jobs}
    for i in range(rounds):
        for job in jobs if i % 2 == 0 else reversed(jobs):
            by_job[job].append(one := launch(job))
            seconds, cpu = (
                " ".join(f"{s:.1f}" for s in one[n]) for n in ("seconds", "cpu_seconds")
            )
            print(
                f"{job.layout} {job.dtype} {job.provider}: seconds {seconds}, of CPU {cpu}, "
                f"peak {one['peak_mib']:.0f} MiB",
                file=sys.stderr,
                flush=True,
            )
    rows = []
    for job, runs in by_job.items():
        samples = [s for each in runs for s in each["seconds"]]
        t = timing.Timing.of(samples)
        rows.append(
            {
                "case": shape.name,
                **{k: getattr(job, k) for k in ("layout", "provider", "dtype", "recompute")},
                "ranks": LAYOUTS[job.layout][0],
                "tokens_per_second": job.rows * job.tokens / t.median,
                "median_s": t.median,
                "p20_s": t.p20,
                "p80_s": t.p80,
                "samples_s": samples,
                "peak_mib": max(each["peak_mib"] for each in runs),
                "imported_mib": max(each["imported_mib"] for each in runs),
                "cpu_s": timing.quantile((s for each in runs for s in each["cpu_seconds"]), 0.5),
                "losses": runs[0]["losses"],
            }
        )
    return rows


def peers(rows: Iterable[dict[str, Any]]) -> dict[tuple, dict[str, Any]]:
    """The rows of transformers' Trainer by layout and dtype."""
    return {(r["layout"], r["dtype"]): r for r in rows if r["provider"] == "transformers"}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    out = [
        "| layout | products | | recomputed | tokens/s | times as fast | CPU s per step | less by "
        "| peak memory of a rank, MiB | of Trainer's | last loss |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    known = peers(rows)
    for r in rows:
        peer = known.get((r["layout"], r["dtype"]), r)
        faster, less, work = "", "", ""
        if peer is not r:
            faster = f"{peer['median_s'] / r['median_s']:.2f}"
            work = f"{peer['cpu_s'] / r['cpu_s']:.2f}"
            less = f"{r['peak_mib'] / peer['peak_mib']:.2f}"
        name = "tilewright" if r["provider"] == "trainer" else "Trainer"
        out.append(
            f"| {r['layout']} | {r['dtype']} | {name} | {r['recompute']} "
            f"| {r['tokens_per_second']:.0f} | {faster} | {r['cpu_s']:.1f} | {work} "
            f"| {r['peak_mib']:.0f} ({r['imported_mib']:.0f} after imports) | {less} "
            f"| {r['losses'][-1]:.4f} |"
        )
    return "\n".join(out)


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser("layouts", __doc__)
    parser.add_argument(
        "--layout", type=names(), metavar="LAYOUT,..", help=f"default: {','.join(LAYOUTS)}"
    )
    parser.add_argument(
        "--provider", type=names(), metavar="PROVIDER,..", help=f"default: {','.join(PROVIDERS)}"
    )
    parser.add_argument(
        "--dtype", type=names(), metavar="DTYPE,..", help="default: float32,bfloat16 (autocast)"
    )
    parser.add_argument(
        "--recompute",
        choices=RECOMPUTE,
        default="mlp",
        help="defaults: the trainer's layers; mlp (default): its MLPs; layers, nothing: of both",
    )
    for option, least, default in (
        ("rounds", 1, 2),
        ("steps", 2, 3),
        ("tokens", 2, 1024),
        ("layers", 1, 30),
    ):
        parser.add_argument(
            f"--{option}", type=at_least(least, int), default=default, help="default %(default)s"
        )
    parser.add_argument(
        "--model", metavar="DIR", help="weights; default: random ones of SmolLM2-135M's shape"
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="write layouts.json there")
    return parser


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    asked = {
        name: chosen(parser, f"--{name}", getattr(args, name), known)
        for name, known in (("layout", LAYOUTS), ("provider", PROVIDERS), ("dtype", DTYPES))
    }
    commands.need(parser, ("transformers", "accelerate", "pydantic"))
    shape = Shape(tokens=args.tokens, layers=args.layers)
    meta = commands.metadata("layouts", argv, {**vars(args), "out": None})
    with tempfile.TemporaryDirectory() as folder:
        inputs = write_inputs(pathlib.Path(folder), shape, args.steps, args.model)
        jobs = [
            Job(
                *(provider, layout, dtype, RECOMPUTE[args.recompute][provider]),
                *(args.tokens, args.steps, *inputs),
            )
            for dtype in asked["dtype"]
            for layout in asked["layout"]
            for provider in asked["provider"]
            if provider == "trainer" or layout in PEER
        ]
        rows = measure(shape, jobs, args.rounds)
    print(table(rows))
    if args.out:
        commands.write(args.out / "layouts.json", meta, rows)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank(pathlib.Path(sys.argv[1]))
