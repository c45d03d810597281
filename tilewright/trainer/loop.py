"""A run from its parts to its last checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import signal
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from tilewright.ops import checked_targets
from tilewright.trainer import build
from tilewright.trainer.checkpoint import checkpoint
from tilewright.trainer.checkpoint.best import Best, history, over
from tilewright.trainer.config import Config, Train, resolved
from tilewright.trainer.data import packing
from tilewright.trainer.data.batches import Bins, evaluated_bins
from tilewright.trainer.data.contents import digest
from tilewright.trainer.engine import NotFinite, reproducible
from tilewright.trainer.interrupts import Interrupts, Stopped
from tilewright.trainer.losses.preference_fields import kind_of_reference
from tilewright.trainer.not_finite import first_layer
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.plan import Plan
from tilewright.trainer.plugins import writable
from tilewright.trainer.plugins.callback import Step, add_callbacks, check_callbacks
from tilewright.trainer.plugins.flops import flops_per_token
from tilewright.trainer.plugins.metrics import Metrics
from tilewright.trainer.plugins.run import Built
from tilewright.trainer.plugins.run import Run as Parts
from tilewright.trainer.plugins.summary import choices, summary, too_long
from tilewright.trainer.resume import refuse_others, resume
from tilewright.trainer.scoring import batches_of, evaluation, reported_names
from tilewright.trainer.section import certified


def train(config: Config, mesh: Mesh) -> None:
    """Trains. Raises KeyboardInterrupt with a sentence if the run is interrupted."""
    t, interrupts = config.train, Interrupts(mesh)
    with (
        reproducible(t.seed + mesh.rank, t.enable_full_determinism),
        checkpoint.claim(t.output_dir, mesh),
    ):
        run = prepare(config, mesh)
        try:
            loop(run, interrupts)
            run.export()
            run.test()
        except Stopped:
            raise
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted after step {run.done}; {run.saver.interrupted()}"
            ) from None
        run.close()


def loop(run: Run, interrupts: Interrupts) -> None:
    engine, plan, steps = run.engine, run.plan, run.batches.steps()
    run.begin()
    with interrupts.watched(), contextlib.ExitStack() as stack:
        for callback in run.callbacks:
            stack.enter_context(callback.running())
        for number in range(run.done + 1, plan.total + 1):
            before, began = run.batches.tokens, time.perf_counter()
            step = Step(number, next(steps), waited=time.perf_counter() - began)
            for callback in run.callbacks:
                callback.before_step(step)
            # An error that names the target is worth one synchronization, in the first step: later,
            # a target out of range makes the loss NaN.
            first = number == run.start + 1
            engine.set_values(plan.values(number - 1))
            with checked_targets() if first else contextlib.nullcontext():
                step.sums = engine.forward_backward(step.batches, run.loss)
            try:
                step.norm = engine.optim_step(plan.factor(number - 1), plan.max_norm(number - 1))
            except NotFinite as error:
                where = first_layer(engine, step.batches, run.loss)
                first_at = "" if where is None else f" (first in the output of {where})"
                run.give_up(f"step {number}: the {error}{first_at}, so the step was not taken")
            run.done, step.tokens = number, run.batches.tokens - before
            run.owes = plan.evaluates(number)
            for callback in run.callbacks:
                callback.after_step(step)
            if (signum := interrupts.asked()) and run.done < plan.total:
                run.stop(signum)
            values = run.evaluate() if plan.evaluates(run.done) else None
            if run.saves(values):
                run.save(values)


@dataclasses.dataclass
class Run(Parts):
    """A run, with what happens beside its steps."""

    def begin(self) -> None:
        """Evaluates before the first step, and where the run that it resumes was stopped before it
        could: what was saved then may be the best.
        """
        # Those of the last step, which an evaluation has in a run that is not stopped.
        self.engine.set_shaping(self.plan.values(max(0, self.done - 1)))
        if number := self.config.train.eval_sanity_batches:
            self._evaluated(self.held, number)
            self.metrics.restart_clock()
        if self.plan.evaluates(self.done) and (self.done == 0 or self.owes):
            values = self.evaluate()
            if values and self.saves(values):
                self.saver.offer(self.done, values)

    def saves(self, values: Mapping[str, float] | None) -> bool:
        """Whether a checkpoint is due, which no signal has asked for.   values: of an evaluation
        of these weights.
        """
        best = self.config.train.save_best and self.saver.improves(values)
        return self.plan.saves(self.done) or best

    def _evaluated(self, held: dict[str, Bins], most: float | None = None) -> dict[str, float]:
        """What an evaluation reports of so many batches of each of these; nothing without any."""
        t = self.config.train
        size = t.eval_micro_batch_size or t.micro_batch_size
        sets = {n: batches_of(bins, size, self.mesh, most) for n, bins in held.items()}
        return evaluation(self.engine, sets, self.loss, accuracy=t.eval_accuracy)

    def evaluate(self) -> dict[str, float] | None:
        """What an evaluation reports, by name; None if there is nothing to evaluate on."""
        values = self._evaluated(self.held, self.config.train.eval_max_batches)
        self.owes = False
        if not values:
            return None
        if not math.isfinite(loss := values["eval_loss"]):
            self.give_up(f"step {self.done}: the loss of evaluation is {loss}, so it is not saved")
        for callback in self.callbacks:
            callback.evaluated(self.done, values)
        return values

    def test(self) -> None:
        """Reports an evaluation on train.do_test's data sets, in place of one that an earlier run
        of as many steps may have reported on other sets or other batches.
        """
        if not self.last:
            return
        values = self._evaluated(self.last, self.config.train.test_max_batches)
        test_values = {f"test_{name.removeprefix('eval_')}": v for name, v in values.items()}
        self.metrics.evaluation(self.done, test_values)

    def save(self, values: Mapping[str, float] | None = None) -> None:
        """values: of an evaluation of these weights."""
        for callback in self.callbacks:
            callback.saving()
        state = {
            "data": self.batches.state_dict(),
            "tokens": self.batches.tokens,
            "run": self.identity,
            "made_of": self.made_of.recorded(),
            "empty_steps": self.engine.empty_steps,
            "ops": self.ops,
            "owes_evaluation": self.owes,
        }
        self.engine.save(self.saver, self.done, state, values)
        self.metrics.restart_clock()

    def stop(self, signum: int) -> NoReturn:
        """Saves the step that is done, and ends the run, since some rank has got this signal."""
        self.save()
        self.saver.finish()
        self.metrics.close()
        # A rank that ends makes torchrun end the others, which may still be writing.
        self.mesh.control.barrier()
        raise Stopped(
            signum,
            f"{signal.Signals(signum).name} after step {self.done} of {self.plan.total}: "
            f"{self.saver.last} is written",
        )

    def export(self) -> None:
        """Waits for the last checkpoint, and writes Hugging Face's files beside it."""
        self.saver.finish()
        self.saver.prune()
        if self.config.train.save_hf_weights:
            self.engine.export(self.saver.folder(self.plan.total) / "hf", **self.export_as)

    def close(self) -> None:
        if empty := self.engine.empty_steps:
            self.metrics.say(f"{empty} of {self.done} steps had no label, and no effect")
        for callback in self.callbacks:
            callback.close()
        self.metrics.close()

    def give_up(self, why: str) -> NoReturn:
        """Waits for the last checkpoint, and ends the run with how to continue."""
        self.saver.finish()
        how, last = self.saver.go_on(), self.saver.last
        if last is not None and checkpoint.step_of(last) == self.done:
            # Its weights and this batch gave it, whatever the learning rate is now.
            earlier = [p for p in checkpoint.complete(self.config.train.output_dir) if p != last]
            before = max(
                (p for p in earlier if checkpoint.step_of(p) < self.done),
                key=checkpoint.step_of,
                default=None,
            )
            how = (
                f"{last.name} has the weights that gave this: lower train.lr or look at the data, "
                f"and {'start anew' if before is None else f'resume from {before}'}"
            )
        raise ValueError(f"{why}; {how}") from None


def _by(train: Train, fields: dict[str, Any], made: Built, mesh: Mesh) -> str:
    """A hash of what the values of evaluations depend on beside weights and data sets.   fields:
    what `certified` returns.
    """
    size, most = train.eval_micro_batch_size or train.micro_batch_size, train.eval_max_batches
    some = {
        name: packing.fingerprint(first)
        for name, bins in made.held.items()
        if len(first := evaluated_bins(bins, size, mesh.layout.data, most)) < len(bins)
    }
    section = made.loss.section
    own = {k: v for k, v in fields.items() if k.startswith(f"{section}.")}
    if train.loss_args:
        own["train.loss_args"] = train.loss_args
    reference = made.made_of.now.get("reference")
    temperature = str(train.loss_temperature) if section == "policy" else None
    return digest([train.loss, own, some, reference and reference.digest, temperature])


# Long: the parts of a run in the order in which mistakes are found, and a field of Run for each.
def prepare(config: Config, mesh: Mesh) -> Run:
    """Builds everything, and resumes if configured. Steps that can fail by a user's mistake come
    first.
    """
    t = config.train
    folders = checkpoint.earlier(t.output_dir, t.load_checkpoint_path, not t.load_optimizer)
    writable.check(t, mesh)
    check_callbacks(t, mesh)
    kind = kind_of_reference(config)
    made = build.build(config, mesh, functools.partial(refuse_others, t, kind, mesh, folders))
    engine, batches, held, loss = made.engine, made.batches, made.held, made.loss
    resumed, state = resume(t, kind, mesh, made, folders)
    start = state.get("step", 0)
    plan = Plan(t, batches.steps_per_epoch, start - batches.position)
    if start > plan.total:
        raise ValueError(f"{resumed} is at step {start}, and the run ends at step {plan.total}")
    if problem := plan.problem():
        raise ValueError(problem)
    names = reported_names(held, loss, accuracy=t.eval_accuracy)
    by = _by(t, certified(config), made, mesh)
    of = over([bins.fingerprint() for bins in held.values()], by, t.eval_max_batches)
    best = history(t, Best.of(t, of, names), state)
    flops = flops_per_token(engine.parts.whole, config.data.sample_packing_sequence_len)
    metrics = Metrics(
        t,
        main=mesh.main,
        steps=(start, plan.total),
        tokens=batches.tokens,
        work=(flops, mesh.size),
        settings=config.model_dump(mode="json"),
        tests=t.do_test,
        owed=(owes := state.get("owes_evaluation", False)) and plan.evaluates(start),
    )
    run = Run(
        **vars(made),
        config=config,
        mesh=mesh,
        plan=plan,
        metrics=metrics,
        saver=checkpoint.Saver(
            t.output_dir,
            mesh,
            t.save_async,
            resumed,
            keep=t.save_total_limit or 0,
            base=config.lora.save_base,
            best=best.best,
            former=best.former,
            states=t.save_optimizer,
        ),
        start=start,
        done=start,
        owes=owes,
    )
    add_callbacks(run)
    if mesh.main:
        pathlib.Path(t.output_dir, "resolved_config.yaml").write_text(resolved(config))
    metrics.open()
    for line in (
        *summary(engine, batches, plan, mesh, config.data.pad_to_multiple_of, t.enable_compile),
        *too_long(made.shape.max_position_embeddings, {"training": batches.bins} | held),
        metrics.basis(),
        *choices(made.ops, engine.model.ops.numerics),
    ):
        metrics.say(line)
    for callback in run.callbacks:
        callback.begin()
    for line in best.told:
        metrics.say(line)
    return run
