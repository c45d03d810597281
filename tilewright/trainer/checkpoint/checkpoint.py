"""Training checkpoints in PyTorch's distributed format (DCP): written under a temporary name and
renamed; found and resumed from.

{output_dir}/checkpoints/global_step_N/ holds the model and optimizer (DCP, resharded on load as
needed), each rank's random state, state.json (step, samples used, compatibility keys, op choices,
checksums of the files before), and, in the last one, hf/.

The frozen weights of a model with adapters are left out where the folder that they were read from
still holds them (`adapters_suffice`). Tied weights are stored once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import pathlib
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from tilewright.core.files import no_space, writing
from tilewright.nn.sharded import shard
from tilewright.nn.weights import adapted
from tilewright.trainer.checkpoint.best import Best
from tilewright.trainer.checkpoint.checkpoint_files import (
    Damaged,
    Planner,
    Reader,
    SavePlanner,
    checksums,
    read_metadata,
    read_state,
    share,
    verify,
    write_state,
)
from tilewright.trainer.checkpoint.made_of import ACCEPTS, NOTHING, MadeOf
from tilewright.trainer.checkpoint.run_folder import (
    claim,
    complete,
    earlier,
    prune,
    publish,
    step_of,
    time_after,
)
from tilewright.trainer.models.lora_fields import Lora
from tilewright.trainer.optim.fields import Optim
from tilewright.trainer.parallel.mesh import Group, Mesh, checkpoint_group
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.parallel.precision import FULL
from tilewright.trainer.section import Resume, unrecorded

__all__ = [
    "Damaged",
    "Saver",
    "claim",
    "complete",
    "earlier",
    "restore",
    "resume",
    "step_of",
]
log = logging.getLogger("tilewright")
Reference = Mapping[str, dict[str, torch.Tensor]]  # `reference.Compared.moved`


@contextlib.contextmanager
def _first_failure(
    kind: type[Exception], what: str, written: pathlib.Path | None = None
) -> Iterator[None]:
    """DCP's exception collects the failures of all ranks, with their traces, and is not an
    Exception: reduces it to one sentence.   written: a folder on the disk that was written to.
    """
    try:
        yield
    except CheckpointException as error:
        [(rank, (first, _)), *_] = error.failures.items()
        if isinstance(first, KeyboardInterrupt):
            raise first from None
        reason = f"rank {rank}: {type(first).__name__}: {str(first).partition(chr(10))[0]}"
        if written is not None and (full := no_space(written)):
            reason = f"{full}; {reason}"
        raise kind(f"{what} ({reason})") from first


@contextlib.contextmanager
def _named(folder: pathlib.Path, done: str) -> Iterator[None]:
    """Says in an OSError what cannot be done with a folder."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{folder}: cannot be {done} ({error})") from error


def _not_finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """The name of a parameter on this rank that is not finite or has non-finite moments."""
    names, finite = [], []
    for name, p in model.named_parameters():
        for t in (p, *optimizer.state.get(p, {}).values()):
            if torch.is_tensor(t) and t.is_floating_point():
                names.append(name)
                finite.append(shard(t).isfinite().all().to(p.device))
    good = torch.stack(finite).tolist()  # the only synchronization
    return None if all(good) else names[good.index(False)]


def adapters_suffice(parts: Parts) -> bool:
    """Whether all else than adapters is what a folder holds: read from it, and not merged since."""
    read = parts.origin is not None and not parts.merged
    return read and any(True for _ in adapted(parts.whole))


def contents(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = (), adapters_alone: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a checkpoint stores, or is to fill; and the optimizers' whole state dictionary.

    optimizers: those of different parameters of the model; none: weights alone.
    """
    if not optimizers:  # of one without states, DCP's function would make some, of a step
        weights, moments = get_model_state_dict(model), None
    else:
        with _gradients_of_any_dtype(model):
            weights, moments = get_state_dict(model, optimizers)
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    # Adapters, and what is trained beside them.
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    again = every.difference(name for name, _ in model.named_parameters())  # of tied weights
    stored = {
        name: t
        for name, t in weights.items()
        if name not in again and (name in trained or not adapters_alone)
    }
    if moments is None:
        return {"model": stored}, {}
    # Without the groups: their settings are the configuration's, and a pipeline's stages have
    # different parameters in them.
    return {"model": stored, "optimizer": {"state": moments["state"]}}, moments


def aside_of(target: pathlib.Path) -> pathlib.Path:
    """Where a checkpoint is written before it gets its name."""
    return target.with_name(f".{target.name}.partial")


class Saver:
    """Writes checkpoints; with save_async, one may be in progress while training continues.

    Every rank must create one, and call its methods at the same steps.   last: the newest complete
    checkpoint; at first the one resumed from.   keep: `run_folder.publish`'s.   base: store frozen
    weights in any case.   best: the best so far, one that is being written included.   states: of
    the optimizer, store them too.   former: the best by other evaluations, which stay.
    """

    def __init__(
        self,
        output_dir: str,
        mesh: Mesh,
        asynchronous: bool,
        last: pathlib.Path | None = None,
        keep: int = 0,
        base: bool = False,
        best: Best | None = None,
        states: bool = True,
        former: tuple[Best, ...] = (),
    ):
        self.root, self.mesh = pathlib.Path(output_dir, "checkpoints"), mesh
        self.last, self.keep, self.base = last, keep, base
        self.best = self._best_before = best
        self.states, self.former = states, former
        here = last is not None and last.resolve().parent == self.root.resolve()
        self.resumed = last if here else None
        self.pending: tuple[Future[None], pathlib.Path] | None = (
            None  # published, and under what name
        )
        self.group = checkpoint_group() if asynchronous else None
        # Host memory that is page-locked takes copies at the bus's speed; it is allocated once.
        self.stager = None
        if asynchronous and mesh.device.type == "cuda":
            options = {"use_shared_memory": False, "use_async_staging": False}
            self.stager = DefaultStager(StagingOptions(use_pinned_memory=True, **options))

    def folder(self, step: int) -> pathlib.Path:
        return self.root / f"global_step_{step}"

    def improves(self, values: Mapping[str, float] | None) -> bool:
        """Whether there was an evaluation, and better than that of the best checkpoint."""
        return self.best is not None and self.best.improved_by(values or {})

    def offer(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the checkpoint that the run goes on from for the best, if these values of an
        evaluation that it could not wait for are better.
        """
        if self.best is not None and self.resumed is not None and step_of(self.resumed) == step:
            self.best = self._best_before = self.best.at(step, values)

    def save(
        self,
        step: int,
        parts: Parts,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        values: Mapping[str, float] | None = None,
        reference: Reference | None = None,
    ) -> pathlib.Path:
        """state: JSON. The folder gets its final name only when it is complete.   values: what an
        evaluation of these weights reports, if there was one.   reference: that moves, stored with
        the states.

        Raises ValueError, and writes nothing, if a weight or a moment is not finite. If the one
        before could not be written, this one is waited for.
        """
        again = self._failed()
        self.check(step, parts.model, optimizer, "no checkpoint is written")
        adapters_alone = adapters_suffice(parts) and not self.base
        tensors, _ = contents(parts.model, [optimizer] if self.states else [], adapters_alone)
        if reference and self.states:
            tensors["reference"] = reference
        state = {
            "step": step,
            "weights": "adapters" if adapters_alone else "all",
            "merged": parts.merged,
            "optimizer": self.states,
            "reference": list(tensors.get("reference", ())),
            **self._with_best(step, values or {}),
            **state,
        }
        return self.write(self.folder(step), tensors, state, at_once=again)

    def write(
        self,
        target: pathlib.Path,
        tensors: dict[str, Any],
        state: dict[str, Any],
        *,
        at_once: bool = False,
    ) -> pathlib.Path:
        """Writes a checkpoint of any name, which it gets when it is complete. Every rank must call
        it.

        tensors: as `contents` gives them.   state: JSON.   at_once: wait for it, although it is
        asynchronous.
        """
        aside = aside_of(target)
        self._begin(aside)
        if self.group is not None:
            written = state_dict_saver.async_save(
                tensors,
                checkpoint_id=aside / "dcp",
                planner=SavePlanner(),
                process_group=self.group,
                async_stager=self.stager,
            )
            assert isinstance(written, Future)  # the stager is not asynchronous
            self.pending = self._published_by_itself(written, aside, target, state), target
            if at_once:
                self.finish()
        else:
            with _first_failure(OSError, f"{aside}: cannot be written", self.root):
                state_dict_saver.save(tensors, checkpoint_id=aside / "dcp", planner=SavePlanner())
            self._publish(self.mesh.control, aside, target, state)
            self.last = target
        return target

    def _begin(self, aside: pathlib.Path) -> None:
        """Makes the folder, with every rank's random state. Raises OSError on all of them."""
        with self.mesh.control.agreeing(OSError):
            if self.mesh.main:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
        random = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            random["cuda"] = torch.cuda.get_rng_state()
        file = aside / f"random_{self.mesh.rank}.safetensors"
        with self.mesh.control.agreeing(OSError), writing(file):
            save_file(random, file)

    def _with_best(self, step: int, values: Mapping[str, float]) -> dict[str, Any]:
        """What a checkpoint of this step says of the best ones: itself, if it is better."""
        if self.best is not None:
            self._best_before, self.best = self.best, self.best.at(step, values)
        return self._bests()

    def _bests(self) -> dict[str, Any]:
        """What checkpoints say of the best ones."""
        former = [dataclasses.asdict(one) for one in self.former]
        best = {} if self.best is None else {"best": dataclasses.asdict(self.best)}
        return best | ({"former_bests": former} if former else {})

    def _spared(self, state: dict[str, Any]) -> list[str]:
        """The names of checkpoints that stay whatever their age."""
        steps = [b["step"] for b in (state.get("best"), *state.get("former_bests", ())) if b]
        names = [] if self.resumed is None else [self.resumed.name]
        return [*names, *(self.folder(step).name for step in steps if step is not None)]

    def prune(self) -> None:
        """Removes what a run that was killed when it had written its last checkpoint could not."""
        if self.mesh.main and self.last is not None and self.last.parent == self.root:
            prune(self.root, self.keep, {self.last.name, *self._spared(self._bests())})

    def _failed(self) -> bool:
        """Waits for a checkpoint in progress; whether it could not be written. What there is of it
        is removed: the next one may need its space.
        """
        _, target = self.pending or (None, None)
        try:
            self.finish()
        except OSError as error:
            self.best = self._best_before
            if self.mesh.main and target is not None:
                log.warning("%s; another one is written now", error)
                shutil.rmtree(aside_of(target), ignore_errors=True)
            return True
        return False

    def _publish(
        self, group: Group, aside: pathlib.Path, target: pathlib.Path, state: dict[str, Any]
    ) -> None:
        """Writes the state, with the checksums of all ranks' files, and renames the checkpoint.
        Every rank of the group must call it once it has written its files; raises on all of them.
        """
        with group.agreeing(OSError), _named(aside, "read back"):
            own = checksums(aside, self.mesh.rank)
        files = dict(itertools.chain.from_iterable(one.items() for one in group.gather(own)))
        with group.agreeing(OSError), _named(aside, "written"):
            if self.mesh.main:
                written = time_after(target.parent, time.time())
                write_state(aside, {"written": written, **state, "files": files})
                # Those of other names are no checkpoints of steps, of which old ones go.
                keep = self.keep if target.parent == self.root else 0
                publish(aside, target, keep, self._spared(state))

    def check(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, spared: str
    ) -> None:
        """Raises ValueError, on every rank, if a weight or a moment of any rank is not finite.

        spared: what therefore does not happen.
        """
        wrong = _not_finite(model, optimizer)
        self.mesh.control.agree(
            None
            if wrong is None
            else ValueError(
                f"step {step}: {wrong} or its moments are not finite, so that {spared}; "
                f"{self.go_on()}"
            )
        )

    def _published_by_itself(
        self,
        written: Future[None],
        aside: pathlib.Path,
        target: pathlib.Path,
        state: dict[str, Any],
    ) -> Future[None]:
        """Once all ranks have written their parts, a thread publishes the checkpoint."""
        published: Future[None] = Future()

        def wait_and_publish() -> None:
            try:
                written.result()
                self._publish(Group(self.group, self.mesh.size), aside, target, state)
            except BaseException as error:  # of any kind: `finish` raises it
                published.set_exception(error)
            else:
                published.set_result(None)

        threading.Thread(target=wait_and_publish, daemon=True).start()
        return published

    def finish(self) -> None:
        """Waits for a checkpoint in progress."""
        if self.pending is not None:
            (published, target), self.pending = self.pending, None
            with _first_failure(OSError, f"{target}: cannot be written", self.root):
                published.result()
            self.last = target

    def go_on(self) -> str:
        """How to continue, for the message of a run that must stop."""
        last = (
            f"and resume from {self.last}"
            if self.last
            else "and start anew: no checkpoint has been written"
        )
        return f"lower train.lr or look at the data, {last}"

    def interrupted(self) -> str:
        """The newest complete checkpoint, for the last message of a run.

        Waits for one in progress; an interrupt abandons it. The other processes may be gone: no
        message is sent.
        """
        lost = ""
        if self.pending is not None:
            (published, target), self.pending = self.pending, None
            if self.mesh.main:
                log.info("waiting for %s to be written; interrupt again to give it up", target)
            try:
                published.result()
                self.last = target
            except (Exception, CheckpointException, KeyboardInterrupt):
                lost = f"; {target.name} was being written and is given up"
        return (
            f"the last whole checkpoint is {self.last}"
            if self.last
            else "no checkpoint has been written"
        ) + lost


# ---- resuming


def resume(
    folders: list[pathlib.Path],
    parts: Parts,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    **options: Any,
) -> tuple[pathlib.Path, dict[str, Any]]:
    """`restore` of the first folder that is not damaged, with its options; also returns which one.
    Raises Damaged if all are.
    """
    passed = []
    for folder, following in zip(folders, [*folders[1:], None], strict=True):
        try:
            state = restore(folder, parts, optimizer, mesh, **options)
        except Damaged as error:
            if following is None:
                raise
            passed.append(f"{folder.name} is passed over: {error}")
            if mesh.main:
                log.warning("%s; going on from the one before it, %s", error, following)
        else:
            if mesh.main:
                how = "resumed" if options.get("states", True) else "begun with the weights"
                log.info("; ".join([f"{how} from {folder}, step {state['step']}", *passed]))
            return folder, state
    raise ValueError("there is no checkpoint to resume from")


# Long: what can be wrong is collected before ranks agree, and states are set only after that.
def restore(
    folder: pathlib.Path,
    parts: Parts,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    *,
    run: dict[str, dict[str, Any]],
    ops: dict[str, str],
    checked: bool = True,
    states: bool = True,
    reference: Reference | None = None,
    made_of: MadeOf = NOTHING,
) -> dict[str, Any]:
    """Fills the parts and the optimizer, and returns the saved state. Every rank must call it.

    states: false: fills the parts alone, and restores no random state.
    reference: one that moves. It is filled with the states if it moved in the checkpoint's run.

    run: compatibility keys that must equal the checkpoint's, by kind (model, optimizer, data,
    base).   checked: compare the checksums of all files.   made_of: the resumed run's.
    Raises ValueError if a key differs, and Damaged, on all ranks, if the checkpoint cannot be read
    or has changed since it was written; warns if ops were computed by other implementations.
    """
    with mesh.control.agreeing(OSError, ValueError):
        state = read_state(folder)
        check(folder, state, run, made_of)
        if states and not state.get("optimizer", True):
            raise ValueError(
                f"{folder} holds no states of the optimizer (train.save_optimizer was false), so no "
                "run can go on from it; train.load_optimizer = false begins one with its weights"
            )
        if states:
            _check_reference(folder, state, reference or {})
        small, large = share(folder, state, mesh.rank, mesh.size) if checked else ({}, {})
        verify(folder, small)
        metadata = read_metadata(folder / "dcp")
        random = _random_states(folder, mesh.rank) if states else {}
        adapters_alone = _without_base(folder, state, parts)
    if mesh.main and (
        changed := {k: (v, ops.get(k)) for k, v in state["ops"].items() if ops.get(k) != v}
    ):
        log.warning(
            "ops are computed differently from when %s was written: %s (then, now)", folder, changed
        )
    for line in made_of.told(state) if mesh.main else ():
        log.warning("%s: %s", folder, line)
    tensors, moments = contents(parts.model, [optimizer] if states else [], adapters_alone)
    if states and state.get("reference"):
        tensors["reference"] = reference  # filled in place
    _load(folder, tensors, metadata, mesh, large)
    # Names of tied weights, and of weights that are not the checkpoint's, are left out.
    some = StateDictOptions(strict=False)
    if states:
        with _gradients_of_any_dtype(parts.model):
            set_state_dict(
                parts.model,
                optimizer,
                model_state_dict=tensors["model"],
                optim_state_dict={**moments, **tensors["optimizer"]},
                options=some,
            )
    else:
        set_model_state_dict(parts.model, tensors["model"], options=some)
    parts.merged = state.get("merged", False)
    if random:
        torch.set_rng_state(random["cpu"])
        if "cuda" in random and torch.cuda.is_available():
            torch.cuda.set_rng_state(random["cuda"])
    return state


def _random_states(folder: pathlib.Path, rank: int) -> dict[str, torch.Tensor]:
    """By device; {} for a new rank, which starts from its seed."""
    file = folder / f"random_{rank}.safetensors"
    try:
        return load_file(file) if file.is_file() else {}
    except SafetensorError as error:
        raise Damaged(f"{file}: cannot be read as safetensors: {error}") from error


def _load(
    folder: pathlib.Path,
    tensors: dict[str, Any],
    metadata: Metadata,
    mesh: Mesh,
    files: dict[str, dict[str, Any]],
) -> None:
    """Fills tensors. While they are read a thread compares the checksums of `files`. Raises Damaged
    on all ranks.
    """
    problem = None
    with ThreadPoolExecutor(1) as pool:
        verified = pool.submit(verify, folder, files)
        try:
            with _first_failure(Damaged, f"{folder}: cannot be read"):
                state_dict_loader.load(
                    tensors, storage_reader=Reader(folder / "dcp", metadata), planner=Planner()
                )
        except Damaged as error:  # of which the checksums name the file
            problem = error
        mesh.control.agree(verified.exception())
    if problem is not None:
        raise problem


def _without_base(folder: pathlib.Path, state: dict[str, Any], parts: Parts) -> bool:
    """Whether adapters alone are read: the checkpoint holds no others, or the run goes on from
    other weights than it began from. Raises ValueError if the model has no other weights.
    """
    origin = parts.origin
    if state.get("weights") == "adapters":
        if origin is None:
            raise ValueError(
                f"{folder} holds adapters alone: set model.model_path to the weights below them"
            )
        return True
    began = state["run"].get("base", {}).get("weights", origin)
    return began != origin and not state.get("merged") and adapters_suffice(parts)


def _check_reference(folder: pathlib.Path, state: dict[str, Any], reference: Reference) -> None:
    """Raises ValueError if a checkpoint's reference has moved, and the run's does not, or is of
    another kind.
    """
    stored, own = state.get("reference", []), [*reference]
    if stored and stored != own:
        raise ValueError(
            f"{folder} holds a reference that has moved ({stored[0]}), and the run's is "
            f"{own[0] if own else 'one that does not'}: preference.reference and whether there are "
            "preference.reference_update_steps must be as they were"
        )


_ANEW = "To start anew from its weights, set model.model_path to its hf folder"


@contextlib.contextmanager
def _gradients_of_any_dtype(model: nn.Module) -> Iterator[None]:
    """DCP makes the states of a new optimizer by a step with gradients of the parameters' dtype."""
    summed = [p for p in model.parameters() if p.grad_dtype not in (None, p.dtype)]
    kinds = [p.grad_dtype for p in summed]
    for p in summed:
        p.grad_dtype = None
    try:
        yield
    finally:
        for p, kind in zip(summed, kinds, strict=True):
            p.grad_dtype = kind


# What checkpoints of earlier versions have not recorded, since there was no such field, by kind: a
# run had what is the default now.
ADDED: dict[str, dict[str, Any]] = {
    "model": {
        "head": "language_model",
        "pad_token_id": None,
        "lora": unrecorded(Lora, Resume.OTHER_WEIGHTS),
    },
    "optimizer": {
        **unrecorded(Optim, Resume.OTHER_STATES),
        **unrecorded(Lora, Resume.OTHER_STATES),
        "precision": FULL.recorded(),
    },
}


def _completed(had: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint has recorded, and what it could not."""
    inner = {
        k: _completed(v, added[k])
        for k, v in had.items()
        if isinstance(v, dict) and isinstance(added.get(k), dict)
    }
    return {**added, **had, **inner}


def check(
    folder: pathlib.Path,
    state: dict[str, Any],
    run: dict[str, dict[str, Any]],
    made_of: MadeOf = NOTHING,
) -> None:
    """Raises ValueError if a run is not the one that wrote a checkpoint. See `restore`."""
    now = json.loads(json.dumps(run))  # tuples as lists
    then = {kind: _completed(state["run"].get(kind, {}), ADDED.get(kind, {})) for kind in now}
    # Differences first: another optimizer may have keys that this checkpoint's has not. The base
    # before the data: what is read from its folder are other things, too.
    for kind in sorted(now, key=lambda kind: kind == "data"):
        had, keys = then[kind], now[kind]
        differ = {k: (had[k], v) for k, v in keys.items() if k in had and had[k] != v}
        if differ and kind == "base":
            places = made_of.changed(state).get("base")
            read = f"{places[0]} then, {places[1]} now. " if places else ""
            raise ValueError(
                f"{folder} belongs to a run that began from other weights than those of "
                f"model.model_path: {differ} (checkpoint, configuration). {read}Set "
                "model.model_path to the former ones, or train.allow_other_base to true to go on "
                "with these"
            )
        if kind == "data":
            differ = made_of.unexplained(state, differ)
            if why := made_of.refused(state, differ):
                raise ValueError(f"{folder} {why}")
        if differ:
            old = "contents" in differ and "made_of" not in state
            accept = f"; {ACCEPTS} = [data] goes on with these" if old else ""
            raise ValueError(
                f"{folder} was written with another {kind}: {differ} (checkpoint, configuration). "
                f"{_ANEW}{accept}"
            )
    for kind, keys in now.items():
        if absent := keys.keys() - then[kind].keys():
            raise ValueError(
                f"{folder} was written by a version that did not record {kind}: "
                f"{', '.join(sorted(absent))}. It cannot be compared with this run's. {_ANEW}"
            )
