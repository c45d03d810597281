"""The trainer: torchrun -m tilewright.trainer.train config.yaml [--section.field value ...]

Plain `python -m tilewright.trainer.train` trains in one process. With `--plan [--world N]` it
prints the memory that each rank of N processes will need, and ends.
"""

from __future__ import annotations

if __name__ == "__main__":
    from tilewright.platform import require

    require("trainer")  # else the imports below end in a traceback

import contextlib
import dataclasses
import logging
import math
import os
import pathlib
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from tilewright import platform
from tilewright.core.registry import ImplementationUnavailable
from tilewright.ops import checked_targets
from tilewright.trainer import memory_plan
from tilewright.trainer.build import build_data, build_engine, choose_ops, compute_dtype, identity
from tilewright.trainer.checkpoint import checkpoint, hf, writable
from tilewright.trainer.config import Config, ConfigError, from_command_line, resolved
from tilewright.trainer.data.batches import Batches, Bins, evaluation_batches
from tilewright.trainer.data.routes import Routes
from tilewright.trainer.data.sources import check_sources
from tilewright.trainer.engine import Batch, Engine, NotFinite, Sums, reproducible
from tilewright.trainer.interrupts import Interrupts, Stopped
from tilewright.trainer.losses.language_modeling import language_modeling
from tilewright.trainer.models.flops import flops_per_token
from tilewright.trainer.optim.plan import Plan
from tilewright.trainer.parallel.mesh import Mesh, device_of, join
from tilewright.trainer.plugins import adapters, replay
from tilewright.trainer.plugins.assertion import Witness
from tilewright.trainer.plugins.certificate import facts, files_of_data
from tilewright.trainer.plugins.housekeeping import Housekeeping
from tilewright.trainer.plugins.metrics import Metrics
from tilewright.trainer.plugins.summary import choices, summary, too_long

log = logging.getLogger("tilewright")


def train(config: Config, mesh: Mesh) -> None:
    """Trains. Raises KeyboardInterrupt with a sentence if the run is interrupted."""
    t, interrupts = config.train, Interrupts(mesh)
    with (
        reproducible(t.seed + mesh.rank, t.enable_full_determinism),
        checkpoint.claim(t.output_dir, mesh),
    ):
        run = prepare(config, mesh)
        with run.interruptible():
            loop(run, interrupts)
            run.export()
        if empty := run.engine.empty_steps:
            run.metrics.say(f"{empty} of {run.done - run.start} steps had no label, and no effect")
        for line in run.witness.summary():
            run.metrics.say(line)
        run.metrics.close()


def loop(run: Run, interrupts: Interrupts) -> None:
    t, lora, engine, plan = run.config.train, run.config.lora, run.engine, run.plan
    steps = run.batches.steps()
    if run.done == 0:
        run.evaluate()
    with interrupts.watched(), Housekeeping(t, run.mesh).running() as housekeeping:
        for step in range(run.done, plan.total):
            adapters.before_step(engine.parts, lora, t.seed, step)
            before, batches = run.batches.tokens, next(steps)
            replayed = run.compare(batches)
            # An error that names the target is worth one synchronization, in the first step: later,
            # a target out of range makes the loss NaN.
            with checked_targets() if step == run.start else contextlib.nullcontext():
                sums = engine.forward_backward(batches, language_modeling)
            with run.refusing(step + 1):
                norm = engine.optim_step(plan.factor(step), t.max_grad_norm)
            run.done = step + 1
            if adapters.merges(lora, run.done):
                # Quantized weights do not show that they were merged with what is not finite.
                run.saver.check(run.done, engine.model, engine.optimizer, "nothing is merged")
            adapters.after_step(engine.parts, engine.optimizer, lora, t.seed, run.done, run.mesh)
            run.report(sums, norm, run.batches.tokens - before, replayed)
            housekeeping.after(run.done)
            if (signum := interrupts.asked()) and run.done < plan.total:
                run.stop(signum)
            if plan.saves(run.done) or plan.ends_epoch(run.done):
                run.evaluate()
            if plan.saves(run.done):
                run.save()


@dataclasses.dataclass
class Run:
    """The parts of a run, and its position. done: optimizer steps."""

    config: Config
    mesh: Mesh
    engine: Engine
    batches: Batches
    held: Bins | None
    plan: Plan
    metrics: Metrics
    witness: Witness
    saver: checkpoint.Saver
    identity: dict[str, dict[str, Any]]
    ops: dict[str, str]
    export_as: dict[str, Any]
    start: int
    done: int

    def evaluate(self) -> None:
        if self.held is None:
            return
        batches = evaluation_batches(
            self.held,
            self.config.train.micro_batch_size,
            self.mesh.batch_rank,
            self.mesh.layout.data,
            pin=self.mesh.device.type == "cuda",
            cp=self.mesh.context,
            tp=self.mesh.layout.tp,
        )
        loss = self.engine.evaluate(batches, language_modeling)
        if not math.isfinite(loss):
            self.give_up(f"step {self.done}: the loss of evaluation is {loss}, so it is not saved")
        self.metrics.evaluation(self.done, loss)
        self.end_if(self.witness.evaluation(self.done, loss))

    def compare(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Log-probabilities with and without recorded routes, in the steps that report them."""
        every = self.config.train.router_replay_compare_steps
        return replay.compare(self.engine, batches) if every and not (self.done + 1) % every else {}

    def report(self, sums: Sums, norm: float, tokens: int, more: dict[str, float]) -> None:
        lr, loss = self.config.train.lr * self.plan.factor(self.done - 1), sums.mean
        # The step was finite, so NaN means that it had no target. JSON has no NaN.
        losses = {"empty_steps": self.engine.empty_steps} if math.isnan(loss) else {"loss": loss}
        values = {**losses, "lr": lr, "grad_norm": norm, **sums.router(), **more}
        if losses.get("empty_steps") == 1:
            self.metrics.say(
                f"step {self.done}: no token of it has a label, so no weight has changed; later "
                "steps without one are counted"
            )
        self.metrics.step(self.done, tokens, **values)
        self.end_if(self.witness.problem(self.done, values))

    def save(self) -> None:
        state = {
            "data": self.batches.state_dict(),
            "tokens": self.batches.tokens,
            "run": self.identity,
            "ops": self.ops,
        }
        self.engine.save(self.saver, self.done, state)
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
        if self.config.train.save_hf_weights:
            self.engine.export(self.saver.folder(self.plan.total) / "hf", **self.export_as)

    @contextlib.contextmanager
    def refusing(self, step: int) -> Iterator[None]:
        """Adds to the error of a step that is not finite how to continue."""
        try:
            yield
        except NotFinite as error:
            self.give_up(f"step {step}: the {error}, so the step was not taken")

    def give_up(self, why: str) -> NoReturn:
        """Waits for the last checkpoint, and ends the run with how to continue."""
        self.saver.finish()
        how, last = self.saver.go_on(), self.saver.last
        if last is not None and step_of(last) == self.done:
            # Its weights and this batch gave it, whatever the learning rate is now.
            earlier = [p for p in checkpoint.complete(self.config.train.output_dir) if p != last]
            before = max((p for p in earlier if step_of(p) < self.done), key=step_of, default=None)
            how = (
                f"{last.name} has the weights that gave this: lower train.lr or look at the data, "
                f"and {'start anew' if before is None else f'resume from {before}'}"
            )
        raise ValueError(f"{why}; {how}") from None

    def end_if(self, problem: str | None) -> None:
        """Waits for the last checkpoint, and ends the run with a sentence, if there is one."""
        if problem is not None:
            self.saver.finish()
            raise ValueError(problem)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        try:
            yield
        except Stopped:
            raise
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted after step {self.done}; {self.saver.interrupted()}"
            ) from None


def prepare(config: Config, mesh: Mesh) -> Run:
    """Builds everything, and resumes if configured. Steps that can fail by a user's mistake come
    first.
    """
    m, t = config.model, config.train
    folders = checkpoint.earlier(t.output_dir, t.load_checkpoint_path)
    writable.check(t, mesh)
    witness = Witness(t, mesh)
    shape = hf.shape_of(m)
    # Checked now, not after the last step: a missing tokenizer or an unsupported dtype.
    export_as = exported(config)
    dtype = compute_dtype(t)
    ops = choose_ops(m, shape, mesh, dtype)
    routes = Routes.of(shape) if t.router_replay else None
    batches, held = build_data(config, mesh, shape.vocab_size, routes)
    engine = build_engine(config, shape, mesh, ops)
    belongs = identity(config, shape, batches, engine.parts.origin)
    chosen = ops.names() | adapters.operations(engine.parts.whole, mesh.device, dtype)
    start, resumed = 0, None
    if folders:
        wanted = {k: v for k, v in belongs.items() if k != "base" or not t.allow_other_base}
        resumed, state = engine.load(folders, wanted, chosen, t.verify_checkpoint)
        start = state["step"]
        batches.load_state_dict(state["data"])
        batches.tokens = state.get("tokens", 0)
    elif t.load_checkpoint_path and mesh.main:
        log.info("%s holds no checkpoint to resume from: the run starts anew", t.output_dir)
    plan = Plan(t, batches.steps_per_epoch, start - batches.position)
    if start > plan.total:
        raise ValueError(f"{resumed} is at step {start}, and the run ends at step {plan.total}")
    if t.enable_profiling and t.profile_start_step >= plan.total:
        raise ValueError(
            f"train.profile_start_step = {t.profile_start_step}: the run has {plan.total} steps"
        )
    own = facts(config, mesh, (batches, held), belongs, chosen)
    files = files_of_data(config) if mesh.main else {}
    certified = witness.start(engine, own, files, start, plan.total)
    if mesh.main:
        pathlib.Path(t.output_dir, "resolved_config.yaml").write_text(resolved(config))
    flops = flops_per_token(engine.parts.whole, config.data.sample_packing_sequence_len)
    metrics = Metrics(
        t,
        main=mesh.main,
        steps=(start, plan.total),
        tokens=batches.tokens,
        work=(flops, mesh.size),
        settings=config.model_dump(mode="json"),
    )
    for line in (
        *summary(config, mesh, engine, batches, plan),
        *too_long(shape.max_position_embeddings, {"training": batches.bins, "evaluation": held}),
        metrics.basis(),
        *choices(chosen, ops.numerics),
        *certified,
    ):
        metrics.say(line)
    saver = checkpoint.Saver(
        t.output_dir,
        mesh,
        t.save_async,
        resumed,
        keep=t.save_total_limit or 0,
        base=config.lora.save_base,
    )
    return Run(
        config=config,
        mesh=mesh,
        engine=engine,
        batches=batches,
        held=held,
        plan=plan,
        metrics=metrics,
        witness=witness,
        saver=saver,
        identity=belongs,
        ops=chosen,
        export_as=export_as,
        start=start,
        done=start,
    )


def step_of(folder: pathlib.Path) -> int:
    """The step of a checkpoint, by its name; -1 for a folder that has been renamed."""
    number = folder.name.rpartition("_")[2]
    return int(number) if number.isdecimal() else -1


def check_data(config: Config) -> None:
    """Raises ValueError or OSError for data that are not there, as far as can be seen without
    reading them.
    """
    if not config.data.skip_prepare_dataset:
        check_sources(
            [*config.data.datasets, *config.data.test_datasets],
            cached=pathlib.Path(config.data.dataset_prepared_path).is_dir(),
        )


def exported(config: Config) -> dict[str, Any]:
    """How to export the last checkpoint: the arguments of `Engine.export`."""
    m, save = config.model, config.train.save_hf_weights
    base, tokenizer = m.model_path, m.tokenizer_path
    described = base or m.config_path
    assert described is not None and tokenizer is not None  # at least config_path is given
    folder = hf.local_folder(described, m.revision)
    dtype = hf.stored_dtype(folder, weights=base is not None)
    return {
        "tokenizer": hf.local_folder(tokenizer, m.revision) if save else None,
        "dtype": dtype,
        "adapter_of": base if config.lora.save_lora_only else None,
    }


OPTIONS = {
    "--plan [--world N]": "Print the memory that each rank of N processes will need, and end. "
    "Default: the processes of this launch."
}


def asked_plan(argv: list[str]) -> tuple[bool, int | None, list[str]]:
    """Whether `--plan` is given, the N of `--world N`, and the other arguments. Exits with 2 for an
    N that is not a number of processes, or without `--plan`.
    """
    rest, world = [a for a in argv if a != "--plan"], None
    if "--world" in rest:
        if len(rest) == len(argv):
            print("--world N needs --plan; torchrun starts processes", file=sys.stderr)
            sys.exit(2)
        at = rest.index("--world")
        given = "".join(rest[at + 1 : at + 2])
        if not given.isdecimal() or int(given) < 1:
            print(f"--world must be a number of processes, got {given!r}", file=sys.stderr)
            sys.exit(2)
        world = int(given)
        del rest[at : at + 2]
    return len(rest) < len(argv), world, rest


# Backends' messages about a process that has ended, for which they have no exception.
GONE = re.compile("(closed|reset) by peer|likely closed|remote process exited")


@platform.command
def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0; 1 and one sentence for errors that a user can fix; 2 for the
    configuration; 130 for Ctrl-C, 143 for SIGTERM.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    only_plan, world, argv = asked_plan(sys.argv[1:] if argv is None else argv)
    # Exits with 2 and every error, or with 0 after --help.
    config = from_command_line(argv, options=OPTIONS)
    mesh, stays = Mesh(), False
    rank, size, local = platform.launched() or (0, 1, 0)
    device = device_of(local)
    try:
        if only_plan:
            if rank == 0:
                print("\n".join(memory_plan.report(config, world or size, device)))
            return 0
        check_data(config)  # before a model is downloaded for its plan
        memory_plan.check(config, size, rank, device)
        mesh = join(config.train)
        train(config, mesh)
    except ConfigError as error:  # sizes that do not match the number of processes
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        stays = True
        said = str(interrupt) or "interrupted before the first step"
        if isinstance(interrupt, Stopped):
            again = [*argv, "--train.load_checkpoint_path", "auto"]
            said += f"; to go on: {platform.launch_line('tilewright.trainer.train', again)}"
        # torchrun shows it for a rank that no signal has reached, and that ends like the others.
        platform.report_failure(said, later=False)
        if rank == 0:
            print(said, file=sys.stderr)
        return getattr(interrupt, "code", 130)
    except Exception as error:
        stays = mesh.size > 1
        # Errors that a user can fix are one sentence; others keep their traceback.
        mendable = isinstance(error, ImplementationUnavailable | OSError | ValueError)
        if victim := isinstance(error, RuntimeError) and GONE.search(str(error)) is not None:
            error = f"rank {mesh.rank}: another process has ended, and says why: {error}"
        platform.report_failure(
            str(error) if mendable or victim else traceback.format_exc(), later=victim
        )
        if not (mendable or victim):
            raise
        print(f"error: {error}", file=sys.stderr)
        log.debug("", exc_info=True)
        return 1
    finally:
        # Not where other processes, or a thread that writes a checkpoint, may be using the group.
        if dist.is_initialized() and not stays:
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written. Threads of communication and data libraries can outlive the interpreter, and
    # the process then aborts ("terminate called without an active exception"), which torchrun takes
    # for a failed run. After an error or an interrupt they may wait for processes that are gone.
    os._exit(code)
