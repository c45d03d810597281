"""Reports of a run: a progress bar or key=value lines, metrics.jsonl always, Weights & Biases if
configured.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
import time
from typing import Any

import torch
from tqdm import tqdm

from tilewright.trainer.config import Train

# Dense bf16 peak, FLOP/s, from NVIDIA's data sheets (without sparsity): the denominator of MFU.
PEAK = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12}


def _show(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a file whose last line may be incomplete after a killed run."""
    rows = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


class Metrics:
    """Rank 0 writes; the other ranks' calls do nothing."""

    def __init__(
        self,
        train: Train,
        *,
        main: bool,
        steps: tuple[int, int],
        tokens: int,
        work: tuple[float, int],
        settings: dict[str, Any],
    ):
        """steps: (done, total).   tokens: of the steps done.   work: FLOPs per token, and devices.
        settings: of the run, for Weights & Biases.
        """
        (start, total), (self.flops, self.devices) = steps, work
        self.train, self.main = train, main
        self.last, self.tokens = time.perf_counter(), tokens
        if not main:
            return
        folder = pathlib.Path(self.train.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        rows = _rows(path) if start and path.is_file() else []
        # Steps that a resumed run repeats are not reported twice.
        kept = [r for r in rows if r["step"] <= start]
        path.write_text("".join(json.dumps(r) + "\n" for r in kept))
        self.file = path.open("a", buffering=1)
        bar = self.train.log_format == "progress_bar"
        self.bar = tqdm(
            total=total, initial=start, unit="step", disable=not (bar and sys.stderr.isatty())
        )
        # Without a terminal a bar becomes some twenty lines.
        self.every = 1 if not bar else max(1, total // 20)
        self.wandb = None
        if self.train.use_wandb:
            import wandb

            self.wandb = wandb.init(
                project=self.train.wandb_project,
                name=self.train.wandb_name,
                tags=self.train.wandb_tags,
                config=settings,
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
        if torch.cuda.is_available():
            row["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
            peak = next(
                (p for name, p in PEAK.items() if name in torch.cuda.get_device_name()), None
            )
            if peak:
                row["mfu"] = tokens * self.flops / seconds / (peak * self.devices)
        self.write(row)
        if not self.bar.disable:
            self.bar.set_postfix(
                {k: _show(row[k]) for k in ("loss", "lr", "grad_norm", "tokens_per_second")}
            )
            self.bar.update()
        elif self.train.log_format == "structured" or step % self.every == 0 or step == 1:
            self.say(" ".join(f"{k}={_show(v)}" for k, v in row.items()))

    def restart_clock(self) -> None:
        """Excludes the time since the last step (evaluation, a checkpoint) from the next one."""
        self.last = time.perf_counter()

    def evaluation(self, step: int, loss: float) -> None:
        self.restart_clock()
        if self.main:
            self.write({"step": step, "eval_loss": loss})
            self.say(f"step={step} eval_loss={loss:.5g}")

    def write(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row) + "\n")
        if self.wandb is not None and (
            "eval_loss" in row or row["step"] % self.train.wandb_log_interval == 0
        ):
            self.wandb.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])

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
