"""Callbacks that show what a run is and whether it is right. Each module is imported by the runs
whose fields ask for it.
"""

from __future__ import annotations

from tilewright.trainer.callbacks import CALLBACKS, Plugin
from tilewright.trainer.config import Train
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.plugins.run import Run

HERE = __name__


def _check_earlier(train: Train, mesh: Mesh) -> None:
    if train.assert_deterministic is not None:
        from tilewright.trainer.plugins.proof.assertion import earlier

        earlier(train, mesh)


def _begins_with_reference(run: Run) -> bool:
    compared = run.engine.reference is not None or "reference_logprob" in run.batches.bins.columns
    return run.done == 0 and compared and run.config.train.loss == "preference"


def _records(run: Run) -> bool:
    t = run.config.train
    return t.checksum_steps > 0 or t.assert_deterministic is not None


CALLBACKS.add(
    "certificate",
    Plugin(f"{HERE}.certificate:Certificate", 0, lambda run: run.config.train.certify),
)
CALLBACKS.add(
    "replay",
    Plugin(
        f"{HERE}.replay:Comparison",
        20,
        lambda run: run.config.train.router_replay_compare_steps > 0,
    ),
)
CALLBACKS.add("step_zero", Plugin(f"{HERE}.step_zero:StepZero", 35, _begins_with_reference))
# After the report, whose numbers are compared.
CALLBACKS.add("checksums", Plugin(f"{HERE}.recorder:Recorder", 55, _records))
CALLBACKS.add(
    "assertion",
    Plugin(
        f"{HERE}.assertion:Assertion",
        60,
        lambda run: run.config.train.assert_deterministic is not None,
        _check_earlier,
    ),
)
