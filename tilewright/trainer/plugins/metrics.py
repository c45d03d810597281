"""Reports of a run: a progress bar or key=value lines, and metrics.jsonl; if configured, Weights &
Biases, TensorBoard and a picture of the loss.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import resource
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from tqdm import tqdm

from tilewright.core import platform
from tilewright.trainer.config.train import Reporting
from tilewright.trainer.plugins.records import METRICS, drop_after, rows

# Dense bf16 peak, FLOP/s, from NVIDIA's data sheets (without sparsity): the denominator of MFU. The
# first name that the device's has in it counts.
PEAK = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "A100": 312e12,
}


def _peak() -> tuple[float | None, str]:
    """The device's peak, FLOP/s, if it is known, and its name."""
    name = platform.device_name("cuda" if torch.cuda.is_available() else "cpu")
    return next((peak for device, peak in PEAK.items() if device in name), None), name


def memory_gb() -> float:
    """The most memory so far, GB (10^9 bytes): what PyTorch allocated on a GPU, or the resident set
    of a process on a CPU.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def _show(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


class Metrics:
    """Rank 0 writes; the other ranks' calls do nothing."""

    def __init__(
        self,
        train: Reporting,
        *,
        main: bool,
        steps: tuple[int, int],
        tokens: int,
        work: tuple[float, int],
        settings: dict[str, Any],
        owed: bool = False,
        tests: bool = False,
    ):
        """steps: (done, total).   tokens: in the steps done.   work: FLOPs per token, and devices.
        settings: the run's settings, for Weights & Biases.   owed: whether the run begins with the
        evaluation after its last step.   tests: whether it ends with a test.
        """
        (self.start, self.total), (self.flops, self.devices) = steps, work
        self.train, self.main, self.tokens = train, main, tokens
        self.settings, self.owed, self.tests = settings, owed, tests
        self.peak, self.device = _peak()

    def open(self) -> None:
        """Begins to write, where an earlier run of these steps may have."""
        train, start, total = self.train, self.start, self.total
        self.began = self.last = time.perf_counter()
        if not self.main:
            return
        folder = pathlib.Path(train.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        drop_after(folder, start, self.owed, total if self.tests else None)
        self.file = (folder / METRICS).open("a", buffering=1)
        bar = self.train.log_format == "progress_bar"
        self.bar = tqdm(
            total=total, initial=start, unit="step", disable=not (bar and sys.stderr.isatty())
        )
        # Without a terminal a bar becomes some twenty lines.
        few = max(1, total // 20) if bar and self.bar.disable else 1
        self.every = self.train.log_steps or few
        self.wandb = None
        if self.train.use_wandb:
            wandb = importlib.import_module("wandb")  # an optional package
            self.wandb = wandb.init(
                project=self.train.wandb_project,
                name=self.train.wandb_name,
                tags=self.train.wandb_tags,
                config=self.settings,
            )
        self.board = None
        if self.train.use_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # A run that resumes hides what an earlier one logged of the same steps.
            purge = start + 1 if start else None
            self.board = SummaryWriter(train.board_dir, purge_step=purge, flush_secs=10)

    def basis(self) -> str:
        """The formula of MFU with its numbers, or why it is not reported."""
        if self.peak is None:
            return f"mfu: not reported, since the peak of {self.device} is not known"
        return (
            f"mfu: tokens_per_second x {self.flops:.4g} FLOPs per token (forward and backward, "
            "without recomputation; attention as of one document in a bin) / "
            f"({self.devices} x {self.peak:.4g} FLOP/s, the dense bf16 peak of {self.device})"
        )

    def step(self, step: int, tokens: int, **values: float) -> None:
        """Reports optimizer step `step` (from 1), in which all ranks together processed `tokens`,
        trained on or not.
        """
        if not self.main:
            return
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        self.tokens += tokens
        row = {
            "step": step,
            **values,
            "tokens": self.tokens,
            "tokens_per_second": tokens / seconds,
            "seconds": seconds,
        }
        if self.peak is not None:
            row["mfu"] = tokens * self.flops / seconds / (self.peak * self.devices)
        row["memory_gb"] = memory_gb()
        # With evaluations and checkpoints, as in the steps of this run so far.
        row["seconds_left"] = (now - self.began) / (step - self.start) * (self.total - step)
        self.write(row)
        due = step % self.every == 0 or step == 1
        if due and not self.bar.disable:
            shown = {
                "loss": "loss",
                "lr": "lr",
                "norm": "grad_norm",
                "tok/s": "tokens_per_second",
                "mfu": "mfu",
                "GB": "memory_gb",
            }
            self.bar.set_postfix({k: _show(row[of]) for k, of in shown.items() if of in row})
        elif due:
            self.say(" ".join(f"{k}={_show(v)}" for k, v in row.items()))
        self.bar.update()

    def restart_clock(self) -> None:
        """Excludes the time since the last step (evaluation, a checkpoint) from the next one."""
        self.last = time.perf_counter()

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Reports an evaluation after a step.   values: with "eval_loss"."""
        self.restart_clock()
        if self.main:
            row = {"step": step, **values}
            self.write(row)
            self.say(" ".join(f"{k}={_show(v)}" for k, v in row.items()))

    def write(self, row: dict[str, Any]) -> None:
        """Raises OSError, naming the file."""
        try:
            self.file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise OSError(f"{self.file.name}: cannot be written ({error.strerror})") from error
        if self.wandb is not None and (
            "grad_norm" not in row or row["step"] % self.train.wandb_log_interval == 0
        ):
            self.wandb.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])
        if self.board is not None:
            for name in row.keys() - {"step"}:
                self.board.add_scalar(name, row[name], row["step"])

    def say(self, line: str) -> None:
        if self.main:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        if self.main:
            self.bar.close()
            self.file.close()
            if self.wandb is not None:
                self.wandb.finish()
            if self.board is not None:
                self.board.close()
            if self.train.plot_loss:
                folder = pathlib.Path(self.train.output_dir)
                draw(rows(folder / METRICS), folder / "loss.png")


def draw(rows: list[dict[str, Any]], target: pathlib.Path) -> None:
    """A picture of the loss of training and evaluation by optimizer steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="tight")
    axes = figure.subplots()
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "evaluation", "o-")):
        points = [(r["step"], r[key]) for r in rows if key in r]
        if points:
            axes.plot(*zip(*points, strict=True), style, linewidth=1, label=label)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(target)
