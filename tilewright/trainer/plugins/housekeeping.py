"""Tasks beside training: the profiler, garbage collection, the allocator's cache."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch

from tilewright.trainer.callbacks import CALLBACKS, Plugin
from tilewright.trainer.config.train import Reporting
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.plugins.callback import Callback, Step
from tilewright.trainer.plugins.run import Run


def profiler(t: Reporting, mesh: Mesh) -> torch.profiler.profile | None:
    if not t.enable_profiling or (t.profile_rank0_only and not mesh.main):
        return None
    return torch.profiler.profile(
        # The step before the first recorded one starts the tracer, whose start-up is then not
        # recorded.
        schedule=torch.profiler.schedule(
            wait=max(0, t.profile_start_step - 1),
            warmup=min(1, t.profile_start_step),
            active=t.profile_end_step - t.profile_start_step,
            repeat=1,
        ),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(
            t.profile_trace_dir, f"rank{mesh.rank}"
        ),
        record_shapes=t.profile_record_shapes,
        profile_memory=t.profile_profile_memory,
        with_stack=t.profile_with_stack,
    )


class Housekeeping(Callback):
    def __init__(self, run: Run):
        super().__init__(run)
        self.train, self.cuda = run.config.train, run.mesh.device.type == "cuda"
        self.profile = profiler(self.train, run.mesh)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Restores the state of Python's garbage collection at the end."""
        was_on = gc.isenabled()
        try:
            if self.train.gc_steps:
                gc.collect()
                gc.disable()  # collected between steps instead, at the same time on all ranks
            if self.profile:
                self.profile.start()
            yield
            if self.profile:
                self.profile.stop()
        finally:
            if was_on:
                gc.enable()

    def after_step(self, step: Step) -> None:
        done = step.number
        if self.profile:
            self.profile.step()
        if self.train.gc_steps and done % self.train.gc_steps == 0:
            gc.collect()
        if self.cuda and self.train.empty_cache_steps and done % self.train.empty_cache_steps == 0:
            torch.cuda.empty_cache()


CALLBACKS.add("housekeeping", Plugin(Housekeeping, 100, lambda run: True))
