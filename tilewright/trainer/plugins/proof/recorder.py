"""checksums.jsonl, of the steps that `train.checksum_steps` names, and of those that an earlier run
has checksums of, one row a step:

    {"step", "outputs": {module: ...}, "gradients": [...], "weights": [...]}

the checksums of what modules return (`computation.py`; earlier versions have none), of clipped
gradients, and of weights after the step, both in the order of the certificate's "trained".
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch

from tilewright.trainer.plugins.callback import Callback, Step
from tilewright.trainer.plugins.proof.certificate import of_run
from tilewright.trainer.plugins.proof.computation import Outputs
from tilewright.trainer.plugins.records import CHECKSUMS
from tilewright.trainer.plugins.run import Run


class Recorder(Callback):
    """known: steps of the earlier run.   last: the row of the step that is done, {} without one."""

    def __init__(self, run: Run):
        super().__init__(run)
        self.file = pathlib.Path(run.config.train.output_dir, CHECKSUMS)
        self.checksums = of_run(run).checksums
        self.outputs = Outputs(run.engine.parts, run.mesh)
        self.known: set[int] = set()
        self.step, self.parts, self.last = run.start, list[torch.Tensor](), dict[str, Any]()

    def begin(self) -> None:
        if self.known or self.run.config.train.checksum_steps:
            optimizer = self.run.engine.optimizer
            self.outputs.record(lambda: self._due(self.step + 1))
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)

    def _due(self, step: int) -> bool:
        every = self.run.config.train.checksum_steps
        return step in self.known or (every > 0 and step % every == 0)

    def _before(self, *_: Any) -> None:
        if self._due(self.step + 1):
            self.parts = [self.outputs.part(), self.checksums.of_gradients()]

    def _after(self, *_: Any) -> None:
        if self.parts:
            self.parts.append(self.checksums.of_trained())

    def after_step(self, step: Step) -> None:
        self.last = {}
        if self.parts:
            sums = self.checksums.read(torch.cat(self.parts))
            names, count = self.outputs.names, len(self.checksums.trained)
            self.last = {
                "outputs": dict(zip(names, sums[: len(names)], strict=True)),
                "gradients": sums[len(names) : -count],
                "weights": sums[-count:],
            }
            self.parts = []
        self.outputs.drop()
        self.step = step.number  # one without a target does not reach the optimizer
        if not self.last:
            return
        with self.run.mesh.control.agreeing(OSError):
            if self.run.mesh.main:
                with self.file.open("a") as file:
                    file.write(json.dumps({"step": step.number, **self.last}) + "\n")
