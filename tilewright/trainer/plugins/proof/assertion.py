"""Compares a run with an earlier one, bit for bit: `train.assert_deterministic`.

Before the first step, certificates: what is known to change the two runs' bits. After each step,
what the earlier run has of it: the row of metrics.jsonl, and that of checksums.jsonl
(`recorder.py`).
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from tilewright.trainer.config import Train
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.plugins.callback import Callback, Step
from tilewright.trainer.plugins.proof import certificate
from tilewright.trainer.plugins.proof.certificate import Difference, listed, of_run
from tilewright.trainer.plugins.proof.computation import in_backward
from tilewright.trainer.plugins.proof.recorder import Recorder
from tilewright.trainer.plugins.records import CHECKSUMS, METRICS, certificates, rows
from tilewright.trainer.plugins.run import Run

FIELD = "train.assert_deterministic"
# Items of a row of metrics.jsonl that the bits of the run do not decide.
OF_TIME = ("tokens_per_second", "data_seconds", "seconds", "seconds_left", "mfu", "memory_gb")


class Earlier:
    """An earlier run, as its folder shows it. Raises FileNotFoundError or ValueError."""

    def __init__(self, path: str):
        given = pathlib.Path(path)
        folder, self.path = given.parent if given.is_file() else given, path
        files = certificates(folder) if folder.is_dir() else []
        if not files:
            raise FileNotFoundError(
                f"{FIELD} = {path}: holds no {certificate.FILE}; give the output_dir of a run"
            )
        try:
            # The run's, and one for each time that it resumed in its folder.
            self.certificates = [certificate.read(file) for _, file in files]
            metrics = self._rows(folder / METRICS)
            self.checksums = {row["step"]: row for row in self._rows(folder / CHECKSUMS)}
        except ValueError as error:
            raise ValueError(f"{FIELD} = {path}: {error}") from error
        self.files: str | None = None  # in what the data's files are not this run's
        self.steps = {row["step"]: row for row in metrics if "grad_norm" in row}
        self.evaluations = {row["step"]: row for row in metrics if "eval_loss" in row}

    def _rows(self, file: pathlib.Path) -> list[dict[str, Any]]:
        """Raises ValueError for a row that no run writes."""
        entries, count = rows(file), len(self.certificates[0]["trained"])
        for row in entries:
            fits = isinstance(row, dict) and type(row.get("step")) is int
            if fits and file.name == CHECKSUMS:
                sums = [row.get(kind) for kind in ("gradients", "weights")]
                fits = all(isinstance(s, list) and len(s) == count for s in sums)
                fits = fits and isinstance(row.get("outputs", {}), dict)
            if not fits:
                raise ValueError(f"{file.name} is damaged: {str(row)[:60]} is no row of it")
        return entries

    def check(self, ours: dict[str, Any], total: int) -> None:
        """Raises ValueError if it has not the steps of this run.   total: where this run ends."""
        start = ours["start"]
        begun = [c["start"] for c in self.certificates]
        first = max((s for s in begun if s <= start), default=0)  # of step start + 1
        for theirs in self.certificates:
            if not first <= theirs["start"] < total:
                continue
            self.files = self.files or certificate.files_apart(ours, theirs)
            said = certificate.between_runs(ours, theirs)
            if said:
                where = f" from step {theirs['start'] + 1} on" if theirs["start"] > start else ""
                raise ValueError(
                    f"{FIELD} = {self.path}: this run is not that one{where}: {listed(said)}"
                )
        if not any(start < step <= total for step in self.steps):
            raise ValueError(
                f"{FIELD} = {self.path}: nothing can be compared: that run has no step after "
                f"{start}, where this one starts, up to {total}, where it ends"
            )


def earlier(train: Train, mesh: Mesh) -> Earlier | None:
    """The run that `train.assert_deterministic` names, on rank 0; raises on every rank."""
    path = train.assert_deterministic
    with mesh.control.agreeing(OSError, ValueError):
        return Earlier(path) if path is not None and mesh.main else None


class Assertion(Callback):
    """Ends the run where it differs from the earlier one, which rank 0 alone reads."""

    def __init__(self, run: Run):
        """Raises ValueError on every rank if the run may not start."""
        super().__init__(run)
        t, mesh = run.config.train, run.mesh
        self.earlier, own, total = earlier(t, mesh), of_run(run), run.plan.total
        if own.apart:
            raise ValueError(f"{FIELD} = {t.assert_deterministic}: ranks differ: {own.apart}")
        with mesh.control.agreeing(ValueError):
            if self.earlier is not None:
                self.earlier.check(own.made, total)
        self.recorder = next(c for c in run.callbacks if isinstance(c, Recorder))
        there = sorted(self.earlier.checksums) if self.earlier else []
        self.recorder.known.update(mesh.control.broadcast(there))
        self.steps = range(run.start + 1, total + 1)
        self.compared: set[int] = set()  # steps
        self.compared_tensors = 0

    def after_step(self, step: Step) -> None:
        said, number = None, step.number
        if self.earlier is not None and number in self.earlier.steps:
            self.compared.add(number)
            theirs = self.earlier.steps[number]
            said = self._said(number, step.values, theirs, self.recorder.last)
        self.run.end_if(self.run.mesh.control.broadcast(said))

    def evaluated(self, done: int, values: Mapping[str, float]) -> None:
        said = None
        if self.earlier is not None and done in self.earlier.evaluations:
            said = self._said(done, values, self.earlier.evaluations[done], {})
        self.run.end_if(self.run.mesh.control.broadcast(said))

    def close(self) -> None:
        for line in self.summary():
            self.run.metrics.say(line)

    def _said(
        self, step: int, ours: Mapping[str, Any], theirs: dict[str, Any], checksums: dict[str, Any]
    ) -> str | None:
        assert self.earlier is not None
        moved = [
            Difference("the", name, value, theirs[name]).said("in this run", "in that one")
            for name, value in ours.items()
            if name in theirs and name not in OF_TIME and value != theirs[name]
        ]
        there = self.earlier.checksums.get(step)
        tensors = "no tensor can be named: that run has no checksums of this step"
        if checksums and there is not None:
            self.compared_tensors += 1
            names = moved_tensors(self.recorder.checksums.trained, checksums, there)
            kinds = "outputs, gradients" if "outputs" in there else "gradients"
            tensors = f"all {kinds} and weights are the same"
            if names:
                more = f" (and {len(names) - 1} more)" if names[1:] else ""
                moved.append(tensors := f"the first tensor that moved is {names[0]}{more}")
        if not moved:
            return None
        if tensors not in moved and "eval_loss" not in ours:
            moved.append(tensors)
        if self.earlier.files is not None:
            moved.append(f"of the data's files {self.earlier.files}")
        return f"{FIELD} = {self.earlier.path}: step {step} is not the same: {'; '.join(moved)}"

    def summary(self) -> list[str]:
        """Lines for the log at the end."""
        if self.earlier is None:
            return []
        count = len(self.compared)
        lines = [
            f"deterministic: {count} step{' is' if count == 1 else 's are'} bit-identical to "
            f"{self.earlier.path}, {self.compared_tensors} also by the checksums of all gradients "
            "and weights"
        ]
        if rest := [step for step in self.steps if step not in self.compared]:
            lines.append(f"not compared: {len(rest)} of {len(self.steps)} steps, {spans(rest)}")
        return lines


def moved_tensors(
    trained: list[str], checksums: dict[str, Any], there: dict[str, Any]
) -> list[str]:
    """What moved in a step, in the order of the computation."""
    outputs = there.get("outputs", {})
    pairs = {"output": [(n, a, outputs.get(n, a)) for n, a in checksums["outputs"].items()]}
    for kind in ("gradients", "weights"):
        pairs[kind[:-1]] = list(zip(trained, checksums[kind], there[kind], strict=True))
    moved = {kind: [n for n, a, b in of if a != b] for kind, of in pairs.items()}
    moved["gradient"] = in_backward(moved["gradient"])
    return [f"the {kind} of {name}" for kind, names in moved.items() for name in names]


def spans(steps: list[int]) -> str:
    """Ascending numbers, runs of them by their ends: [1, 2, 3, 7] as "1 to 3, 7"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][-1] + 1 == step:
            runs[-1][1:] = [step]
        else:
            runs.append([step])
    return listed([" to ".join(map(str, run)) for run in runs])
