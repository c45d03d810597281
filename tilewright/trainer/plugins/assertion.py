"""Compares a run with an earlier one, bit for bit: `train.assert_deterministic`.

Before the first step, certificates: what is known to change the two runs' bits. After each step,
what the earlier run has of it: the row of metrics.jsonl, and checksums.jsonl (of the steps that
`train.checksum_steps` names), one row a step:

    {"step", "outputs": {module: ...}, "gradients": [...], "weights": [...]}

the checksums of what modules return (`computation.py`; earlier versions have none), of clipped
gradients, and of weights after the step, both in the order of the certificate's "trained".
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import torch

from tilewright.trainer.config.train import Reporting
from tilewright.trainer.engine import Engine
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.plugins import certificate
from tilewright.trainer.plugins.certificate import Difference, Facts, listed
from tilewright.trainer.plugins.checksums import Checksums
from tilewright.trainer.plugins.computation import Outputs, in_backward
from tilewright.trainer.plugins.metrics import drop_after, rows

CHECKSUMS = "checksums.jsonl"
FIELD = "train.assert_deterministic"
# Of a row of metrics.jsonl, what no bits of the run decide.
OF_TIME = ("tokens_per_second", "data_seconds", "seconds", "seconds_left", "mfu", "memory_gb")


class Earlier:
    """An earlier run, as its folder shows it. Raises FileNotFoundError or ValueError."""

    def __init__(self, path: str):
        given = pathlib.Path(path)
        folder, self.path = given.parent if given.is_file() else given, path
        files = certificate.files(folder) if folder.is_dir() else []
        if not files:
            raise FileNotFoundError(
                f"{FIELD} = {path}: holds no {certificate.FILE}; give the output_dir of a run"
            )
        try:
            # The run's, and one for each time that it resumed in its folder.
            self.certificates = [certificate.read(file) for _, file in files]
            metrics = self._rows(folder / "metrics.jsonl")
            self.checksums = {row["step"]: row for row in self._rows(folder / CHECKSUMS)}
        except ValueError as error:
            raise ValueError(f"{FIELD} = {path}: {error}") from error
        self.files: str | None = None  # in what the data's files are not this run's
        self.steps = {row["step"]: row for row in metrics if "grad_norm" in row}
        self.evaluations = {row["step"]: row for row in metrics if "eval_loss" in row}

    def _rows(self, file: pathlib.Path) -> list[dict[str, Any]]:
        """Raises ValueError for a row that no run writes."""
        found, count = rows(file), len(self.certificates[0]["trained"])
        for row in found:
            fits = isinstance(row, dict) and type(row.get("step")) is int
            if fits and file.name == CHECKSUMS:
                sums = [row.get(kind) for kind in ("gradients", "weights")]
                fits = all(isinstance(s, list) and len(s) == count for s in sums)
                fits = fits and isinstance(row.get("outputs", {}), dict)
            if not fits:
                raise ValueError(f"{file.name} is damaged: {str(row)[:60]} is no row of it")
        return found

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


class Witness:
    """Records a run, and compares it with an earlier one. Every rank must make the same calls; rank
    0 alone reads and writes files.
    """

    def __init__(self, train: Reporting, mesh: Mesh):
        """Reads the earlier run, if there is one, before this one writes anything."""
        self.train, self.mesh = train, mesh
        self.file = pathlib.Path(train.output_dir, CHECKSUMS)
        self.earlier: Earlier | None = None
        path = train.assert_deterministic
        self.asserts = path is not None
        problem = None
        if path is not None and mesh.main:
            try:
                self.earlier = Earlier(path)
            except (OSError, ValueError) as error:
                problem = error
        if self.asserts:
            mesh.control.agree(problem)
        self.compared: set[int] = set()  # steps
        self.compared_tensors = 0

    def start(
        self, engine: Engine, own: Facts, files: dict[str, Any], start: int, total: int
    ) -> list[str]:
        """Certifies the run, and begins to record it. Returns lines for the log.

        own: this rank's `certificate.facts`.   files: `certificate.files_of_data`, on rank 0.
        start, total: steps that are done, and in all.
        Raises ValueError on every rank if the run may not start.
        """
        apart = certificate.between_ranks(own, self.mesh)
        if apart and self.asserts:
            raise ValueError(f"{FIELD} = {self.train.assert_deterministic}: ranks differ: {apart}")
        self.checksums = Checksums(engine.parts, self.mesh)
        self.outputs = Outputs(engine.parts, self.mesh)
        made, problem, lines = certificate.certify(own, self.checksums, start, files), None, []
        if self.mesh.main:
            try:
                if self.earlier is not None:
                    self.earlier.check(made, total)
                if self.file.is_file():
                    drop_after(self.file, start)
                name, digest = certificate.write(self.train.output_dir, made)
                lines.append(f"certificate: {digest[:16]} in {name}")
            except (OSError, ValueError) as error:
                problem = error
        self.mesh.control.agree(problem)
        self.step, self.parts, self.steps = start, [], range(start + 1, total + 1)
        there = sorted(self.earlier.checksums) if self.earlier else []
        self.known = set(self.mesh.control.broadcast(there)) if self.asserts else set()
        if self.known or self.train.checksum_steps:
            self.outputs.record(lambda: self._due(self.step + 1))
            engine.optimizer.register_step_pre_hook(self._before)
            engine.optimizer.register_step_post_hook(self._after)
        return [*lines, f"ranks differ: {apart}"] if apart else lines

    # ---- around the optimizer's step

    def _due(self, step: int) -> bool:
        every = self.train.checksum_steps
        return step in self.known or (every > 0 and step % every == 0)

    def _before(self, *_: Any) -> None:
        if self._due(self.step + 1):
            self.parts = [self.outputs.part(), self.checksums.of_gradients()]

    def _after(self, *_: Any) -> None:
        if self.parts:
            self.parts.append(self.checksums.of_trained())

    # ---- after it

    def problem(self, step: int, values: dict[str, float]) -> str | None:
        """What differs from the earlier run after a step, one sentence, on every rank.

        values: of the step, by their names in metrics.jsonl.
        """
        found: dict[str, Any] = {}
        if self.parts:
            sums = self.checksums.read(torch.cat(self.parts))
            names, count = self.outputs.names, len(self.checksums.trained)
            found = {
                "outputs": dict(zip(names, sums[: len(names)], strict=True)),
                "gradients": sums[len(names) : -count],
                "weights": sums[-count:],
            }
            self.parts = []
        self.outputs.drop()
        self.step = step  # one without a target does not reach the optimizer
        said, problem = None, None
        if self.mesh.main:
            try:
                said = self._recorded(step, values, found)
            except OSError as error:
                problem = error
        if self.asserts or found:
            self.mesh.control.agree(problem)
            said = self.mesh.control.broadcast(said)
        return said

    def _recorded(self, step: int, values: dict[str, float], found: dict[str, Any]) -> str | None:
        if found:
            with self.file.open("a") as file:
                file.write(json.dumps({"step": step, **found}) + "\n")
        if self.earlier is None or step not in self.earlier.steps:
            return None
        self.compared.add(step)
        return self._said(step, values, self.earlier.steps[step], found)

    def evaluation(self, step: int, values: Mapping[str, float]) -> str | None:
        """The same for what an evaluation reports."""
        if not self.asserts:
            return None
        said = None
        if self.earlier is not None and step in self.earlier.evaluations:
            said = self._said(step, values, self.earlier.evaluations[step], {})
        return self.mesh.control.broadcast(said)

    def _said(
        self, step: int, ours: Mapping[str, Any], theirs: dict[str, Any], found: dict[str, Any]
    ) -> str | None:
        assert self.earlier is not None
        moved = [
            Difference("the", name, value, theirs[name]).said("in this run", "in that one")
            for name, value in ours.items()
            if name in theirs and name not in OF_TIME and value != theirs[name]
        ]
        there = self.earlier.checksums.get(step)
        tensors = "no tensor can be named: that run has no checksums of this step"
        if found and there is not None:
            self.compared_tensors += 1
            names = self._moved(found, there)
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

    def _moved(self, found: dict[str, Any], there: dict[str, Any]) -> list[str]:
        """What moved in a step, in the order of the computation."""
        trained, outputs = self.checksums.trained, there.get("outputs", {})
        pairs = {"output": [(n, a, outputs.get(n, a)) for n, a in found["outputs"].items()]}
        for kind in ("gradients", "weights"):
            pairs[kind[:-1]] = list(zip(trained, found[kind], there[kind], strict=True))
        moved = {kind: [n for n, a, b in of if a != b] for kind, of in pairs.items()}
        moved["gradient"] = in_backward(moved["gradient"])
        return [f"the {kind} of {name}" for kind, names in moved.items() for name in names]

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


def spans(steps: list[int]) -> str:
    """Ascending numbers, runs of them by their ends: [1, 2, 3, 7] as "1 to 3, 7"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][-1] + 1 == step:
            runs[-1][1:] = [step]
        else:
            runs.append([step])
    return listed([" to ".join(map(str, run)) for run in runs])
