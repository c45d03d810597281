"""Compares a run with an earlier one, bit for bit: `train.assert_deterministic`.

Before the first step, certificates: what the two runs' bits depend on. After each step, what the
earlier run has of it: the row of metrics.jsonl, and checksums.jsonl (of the steps that
`train.checksum_steps` names), one row a step:

    {"step", "gradients": [...], "weights": [...]}

the checksums of clipped gradients and of weights after the step, in the order of the certificate's
"trained".
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch

from tilewright.files import read_json
from tilewright.trainer import certificate
from tilewright.trainer.certificate import Difference, Facts, differences, listed
from tilewright.trainer.checksums import Checksums
from tilewright.trainer.config import Train
from tilewright.trainer.engine import Engine
from tilewright.trainer.mesh import Mesh
from tilewright.trainer.metrics import rows

CHECKSUMS = "checksums.jsonl"
FIELD = "train.assert_deterministic"
# Of a row of metrics.jsonl, what no bits of the run decide.
OF_TIME = ("tokens_per_second", "seconds", "seconds_left", "mfu", "memory_gb")


class Earlier:
    """An earlier run, as its folder shows it. Raises FileNotFoundError or ValueError."""

    def __init__(self, path: str):
        given = pathlib.Path(path)
        folder = given.parent if given.is_file() else given
        self.path, file = path, folder / certificate.FILE
        if not file.is_file():
            raise FileNotFoundError(
                f"{FIELD} = {path}: holds no {certificate.FILE}; give the output_dir of a run"
            )
        self.certificate = read_json(file)
        if self.certificate.get("schema") != certificate.SCHEMA:
            raise ValueError(
                f"{FIELD} = {path}: its certificate has the schema "
                f"{self.certificate.get('schema')!r}; accepted is {certificate.SCHEMA}"
            )
        metrics = rows(folder / "metrics.jsonl")
        self.steps = {row["step"]: row for row in metrics if "loss" in row}
        self.evaluations = {row["step"]: row["eval_loss"] for row in metrics if "eval_loss" in row}
        self.checksums = {row["step"]: row for row in rows(folder / CHECKSUMS)}

    def check(self, ours: dict[str, Any]) -> None:
        """Raises ValueError if it did not start as this run does."""
        theirs = self.certificate
        facts = {k: v for k, v in theirs["facts"].items() if k in ours["facts"]}
        mine = dict(ours["facts"])
        if ours["start"] != theirs["start"]:
            mine.pop("initial weight")  # of other steps
            facts.pop("initial weight")
        if found := list(differences(mine, facts)):
            said = listed([one.said("in this run", "in that one") for one in found])
            raise ValueError(f"{FIELD} = {self.path}: this run is not that one: {said}")
        if not any(step > ours["start"] for step in self.steps):
            raise ValueError(
                f"{FIELD} = {self.path}: that run has no step after {ours['start']}, where this "
                "one starts"
            )


class Witness:
    """Records a run, and compares it with an earlier one. Every rank must make the same calls; rank
    0 alone reads and writes files.
    """

    def __init__(self, train: Train, mesh: Mesh):
        """Reads the earlier run, if there is one, before this one writes anything."""
        self.train, self.mesh = train, mesh
        self.earlier: Earlier | None = None
        self.asserts = train.assert_deterministic is not None
        problem = None
        if self.asserts and mesh.main:
            try:
                self.earlier = Earlier(train.assert_deterministic)
            except (OSError, ValueError) as error:
                problem = error
        if self.asserts:
            mesh.control.agree(problem)
        self.compared = self.compared_tensors = 0

    def start(self, engine: Engine, own: Facts, start: int) -> list[str]:
        """Certifies the run, and begins to record it. Returns lines for the log.

        own: this rank's `certificate.facts`.
        Raises ValueError on every rank if the run may not start.
        """
        apart = certificate.between_ranks(own, self.mesh)
        if apart and self.asserts:
            raise ValueError(f"{FIELD} = {self.train.assert_deterministic}: ranks differ: {apart}")
        self.checksums = Checksums(engine.model, self.mesh)
        made, problem = certificate.certify(own, self.checksums, start), None
        if self.earlier is not None:
            try:
                self.earlier.check(made)
            except ValueError as error:
                problem = error
        if self.asserts:
            self.mesh.control.agree(problem)
        self.step, self.parts = start, []
        there = sorted(self.earlier.checksums) if self.earlier else []
        self.known = set(self.mesh.control.broadcast(there)) if self.asserts else set()
        if self.known or self.train.checksum_steps:
            engine.optimizer.register_step_pre_hook(self._before)
            engine.optimizer.register_step_post_hook(self._after)
        if not self.mesh.main:
            return []
        self._keep(start)
        digest = certificate.write(self.train.output_dir, made)
        lines = [f"certificate: {digest[:16]} in {certificate.FILE}"]
        if apart:
            lines.append(f"ranks differ: {apart}")
        return lines

    def _keep(self, start: int) -> None:
        """Steps that a resumed run repeats are not recorded twice."""
        self.file = pathlib.Path(self.train.output_dir, CHECKSUMS)
        if self.file.is_file():
            kept = [row for row in rows(self.file) if row["step"] <= start]
            self.file.write_text("".join(json.dumps(row) + "\n" for row in kept if start))

    # ---- around the optimizer's step

    def _due(self) -> bool:
        every = self.train.checksum_steps
        return self.step in self.known or (every > 0 and self.step % every == 0)

    def _before(self, *_: Any) -> None:
        self.step += 1
        self.parts = [self.checksums.of_gradients()] if self._due() else []

    def _after(self, *_: Any) -> None:
        if self.parts:
            self.parts.append(self.checksums.of_trained())

    # ---- after it

    def problem(self, step: int, values: dict[str, float]) -> str | None:
        """What differs from the earlier run after a step, one sentence, on every rank.

        values: of the step, by their names in metrics.jsonl.
        """
        found: dict[str, list[int]] = {}
        if self.parts:
            both = self.checksums.read(torch.stack(self.parts))
            found = dict(zip(("gradients", "weights"), both, strict=True))
            self.parts = []
            if self.mesh.main:
                with self.file.open("a") as file:
                    file.write(json.dumps({"step": step, **found}) + "\n")
        if not self.asserts:
            return None
        said = None
        if self.earlier is not None and step in self.earlier.steps:
            self.compared += 1
            said = self._said(step, values, self.earlier.steps[step], found)
        return self.mesh.control.broadcast(said)

    def evaluation(self, step: int, loss: float) -> str | None:
        """The same for a loss of evaluation."""
        if not self.asserts:
            return None
        said = None
        if self.earlier is not None and step in self.earlier.evaluations:
            there = {"eval_loss": self.earlier.evaluations[step]}
            said = self._said(step, {"eval_loss": loss}, there, {})
        return self.mesh.control.broadcast(said)

    def _said(
        self, step: int, ours: dict[str, Any], theirs: dict[str, Any], found: dict[str, list[int]]
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
            names = [
                f"the {kind[:-1]} of {name}"
                for kind, own in found.items()
                for name, a, b in zip(self.checksums.trained, own, there[kind], strict=True)
                if a != b
            ]
            tensors = "all gradients and weights are the same"
            if names:
                more = f" (and {len(names) - 1} more)" if names[1:] else ""
                moved.append(tensors := f"the first tensor that moved is {names[0]}{more}")
        if not moved:
            return None
        if tensors not in moved and "eval_loss" not in ours:
            moved.append(tensors)
        return f"{FIELD} = {self.earlier.path}: step {step} is not the same: {'; '.join(moved)}"

    def summary(self) -> list[str]:
        """Lines for the log at the end."""
        if self.earlier is None:
            return []
        return [
            f"deterministic: {self.compared} steps have the bits of {self.earlier.path}, "
            f"{self.compared_tensors} of them by the checksums of all gradients and weights too"
        ]
