"""The workers: they take requests from the log, one after the other, and append results.

Rank 0 alone reads and writes the log. It sends each request to the other ranks over gloo, a header
in JSON and the body as bytes, and all of them do it.

    python -m tilewright.server.worker CONFIG.yaml [--server.key value ...]
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import pathlib
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tilewright.core.files import folder_size, locked, replace_folder
from tilewright.core.follow import follow
from tilewright.server import bodies
from tilewright.server.fields import Own, load, size
from tilewright.server.frames import packed, unpacked
from tilewright.server.log import ASLEEP, SYNC, Log, Model, Request, Result
from tilewright.server.models import (
    APART,
    CHANGES,
    CREATES,
    LOADS,
    MEMORY,
    SAVES,
    About,
    Done,
    Models,
    Settings,
    saved_as,
)
from tilewright.server.names import folder_of, path_of, synced_as
from tilewright.server.passes import Packing
from tilewright.server.refused import Refused
from tilewright.trainer import build, launch
from tilewright.trainer.checkpoint.checkpoint import aside_of
from tilewright.trainer.config import Config
from tilewright.trainer.engine import reproducible
from tilewright.trainer.field_tree import ConfigError
from tilewright.trainer.parallel.mesh import Mesh, padding

log = logging.getLogger("tilewright.server")

INITIAL = "000000"  # the name of a model's weights when it was created
ATTEMPTS = 2  # of a request that ended the workers: fewer than worker_max_retries
IDLE = 60.0  # seconds after which the other ranks hear that there is nothing, and old results go
LOOK = 1.0  # seconds between looks for numbers that do not come
BRISK, SLOW, PATIENCE = 0.0002, 0.01, 2.0  # seconds between looks, and since the last request


def models_of(server: Own, config: Config, mesh: Mesh) -> Models:
    """The engine of a server, with no model yet."""
    model, lora, train = config.model, config.lora, config.train
    shape = build.shape_of_run(model, "language_model", mesh)
    ops = build.choose_ops(model, shape, mesh, build.compute_dtype(train))
    if server.ce_mode == "eager":
        ops = dataclasses.replace(ops, linear_cross_entropy="eager")
    experts = any(map(shape.is_moe, range(shape.num_hidden_layers)))
    if server.freeze_router and experts and not lora.enable_lora:
        train = train.model_copy(update={"freeze_router": True})
    parts = build.build_model(model, lora, shape, config.data, train, mesh, ops)
    engine = build.engine_around(parts, train, mesh, lora.lora_plus_scale)
    identity = {
        "model": build.model_identity(model, lora, shape),
        "base": {"weights": parts.origin},
    }
    multiple = padding(config.data.pad_to_multiple_of, mesh.context, mesh.layout.tp)
    how = Packing(config.data.sample_packing_sequence_len, server.enable_packing, multiple)
    assert model.model_path is not None  # the server's field is required
    exported = build.exported(model, save=True, adapters_alone=False)
    settings = Settings(
        server.log_gradient_norms,
        server.log_router_stats,
        size(server.storage_limit),
        exported["dtype"],
        exported["tokenizer"],
        server.sampler == "embedded",
    )
    return Models(
        engine,
        pathlib.Path(train.output_dir),
        model.model_path,
        identity,
        how,
        functools.partial(build.read_weights, parts, model, shape, train),
        settings,
    )


class Workers:
    """This rank's part. log: on rank 0.   exact: whether what is computed again has the same
    bits.
    """

    def __init__(self, models: Models, server: Own, requests: Log | None, *, exact: bool = True):
        self.models, self.server, self.requests = models, server, requests
        self.mesh, self.stopped, self.exact = models.mesh, False, exact

    # ---- what all ranks do

    def follow(self) -> None:
        """The other ranks: they do what rank 0 sends."""
        while True:
            header, body = self._send()
            if header["do"] == "stop":
                return
            with contextlib.suppress(Refused):  # rank 0 answers
                self._do(header, body)

    def _do(self, header: dict[str, Any], body: bytes) -> Done | None:
        """What a header says, on every rank."""
        model = header.get("model", "")
        match header["do"]:
            case "run":
                return self.models.run(header["kind"], model, *unpacked(body))
            case "checkpoint":
                self.models.checkpoint(model, pathlib.Path(header["folder"]))
            case "restore":
                folder = pathlib.Path(header["folder"])
                self.models.restore(model, About.of(header["about"]), folder)
            case "forget":
                self.models.forget(model)
            case "test":
                self.models.self_test()
        return None

    def _all(self, header: dict[str, Any], body: bytes = b"") -> Done | None:
        """Rank 0: sends, and does it too."""
        return self._do(*self._send(header, body))

    def _send(
        self, header: dict[str, Any] | None = None, body: bytes = b""
    ) -> tuple[dict[str, Any], bytes]:
        """Rank 0's header and body on every rank."""
        control = self.mesh.control
        header = control.broadcast(None if header is None else {**header, "bytes": len(body)})
        assert header is not None  # rank 0 has one
        if control.size == 1 or not header["bytes"]:
            return header, body
        sent = torch.empty(header["bytes"], dtype=torch.uint8)
        if self.mesh.main:
            sent = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        dist.broadcast(sent, 0, group=control.group)
        return header, sent.numpy().tobytes()

    # ---- rank 0

    def lead(self) -> None:
        """Rank 0: recovers the models, and does requests until it is told to stop."""
        requests = self.requests
        assert requests is not None
        if not self.exact:
            log.warning(
                "a kill returns models to their checkpoints: without enable_full_determinism "
                "nothing is computed again with the same bits on a GPU"
            )
        if self.server.enable_self_test:
            self._all({"do": "test"})
        self.recover()
        requests.tell(ASLEEP, "")
        self._committed(lambda: requests.tell("workers", "ready"))
        last = told = swept = looked = time.monotonic()
        while not self.stopped:
            now = time.monotonic()
            if now - looked > LOOK:
                looked = now
                self.skip_gaps()
            if now - swept > IDLE:
                swept = now
                with contextlib.suppress(sqlite3.OperationalError):  # of a full disk: later
                    self.sweep()
            if (request := self.next()) is not None:
                self.answer(request)
                last = told = time.monotonic()
                continue
            if now - told > IDLE:
                self._all({"do": "wait"})
                told = now
            time.sleep(BRISK if now - last < PATIENCE else SLOW)
        requests.tell("workers", "stopped")
        self._send({"do": "stop"})

    def next(self) -> Request | None:
        """What is to be done: when the workers sleep, nothing but to wake up, or sleep on."""
        assert self.requests is not None
        return self.requests.next(MEMORY if self.models.asleep else ())

    def sweep(self) -> None:
        """Drops old results, checkpoints whose time is over, and models that nobody uses."""
        requests, server = self.requests, self.server
        assert requests is not None
        requests.forget(after_sent=server.future_ttl, after=server.result_max_age)
        seconds = server.idle_session_timeout
        gone = dict.fromkeys(requests.expired(), "its ttl_seconds are over")
        unused = f"nobody has asked it for {seconds:g} s (idle_session_timeout)"
        gone |= dict.fromkeys(requests.idle_samplers(seconds or math.inf), unused)
        gone |= dict.fromkeys(requests.sent_of_ended(), "its model has ended")
        for path, why in gone.items():
            log.info("%s: %s", path, why)
            shutil.rmtree(self.models.folder(path), ignore_errors=True)
            requests.drop(path)
        for model in requests.idle(seconds or math.inf):
            why = f"nobody asked for it for {seconds:g} s (idle_session_timeout)"
            if self.models.steps.get(model.name):
                name = f"idle_{model.ran:06d}"
                path = path_of(model.name, "weights", name)
                if requests.path(path) is None:  # it is unloaded once it is saved
                    requests.ask(model, "save_weights", bodies.saving(name, overwrite=True))
                    continue
                why += f"; it is saved as {path}"
            log.info("%s: %s", model.name, why)
            requests.ask(model, "unload_model", why)

    def skip_gaps(self) -> None:
        """Ends requests that have waited too long for one before them."""
        assert self.requests is not None
        for model, missing in self.requests.gaps(self.server.gap_timeout):
            log.warning("%s: seq_id %d has not come; what waits for it ends", model, missing)
            self._committed(functools.partial(self.requests.skip, model, missing))

    def answer(self, request: Request) -> None:
        """Does a request, and appends its result."""
        requests = self.requests
        assert requests is not None
        if request.attempts >= ATTEMPTS:
            why = f"request {request.id} ({request.kind}) has ended the workers {ATTEMPTS} times"
            self._fail(request.model, why)
            return
        self._committed(lambda: requests.begin(request))
        began = time.monotonic()
        result, done = self._result(request)
        state, why, saved = None, None, {}
        if done is not None:
            created = request.kind in CREATES
            state = "ended" if done.ended else "live" if created else None
            why, saved = done.why, done.saved
            if request.kind == CREATES[0] and not self.server.skip_initial_checkpoint:
                saved = self._initial(request.model)
            elif request.kind == "optim_step":
                saved = self._for_engines(request.model)
        elif request.kind in CREATES:
            state, why = "failed", result.error
        self._committed(
            lambda: requests.finish(
                request, result, ran=request.kind in CHANGES, state=state, why=why, saved=saved
            )
        )
        log.info(
            "%s %s seq %s: %s, %.3f s",
            request.kind,
            request.model,
            request.seq,
            result.error or "done",
            time.monotonic() - began,
        )
        if request.kind in MEMORY and result.error is None:
            asleep = "yes" if self.models.asleep else ""
            self._committed(functools.partial(requests.tell, ASLEEP, asleep))
        if result.error is None and self._is_due(request):
            self._checkpoint(request.model)

    def _committed(self, write: Callable[[], None]) -> None:
        """Tries to write the log until the disk has room: no result may be lost."""
        assert self.requests is not None
        while True:
            try:
                write()
                return
            except sqlite3.OperationalError as error:
                if self.stopped:
                    raise
                log.error("%s cannot be written, and is tried again: %s", self.requests.file, error)
                time.sleep(LOOK)

    def _initial(self, model: str) -> dict[str, Any]:
        """Saves a model as it begins: what the log is to have of it. Clients may save under its
        name.
        """
        saved = self._saved(model, SAVES[0], bodies.saving(INITIAL, overwrite=True), INITIAL)
        return {path: {**about, "initial": True} for path, about in saved.items()}

    def _saved(self, model: str, kind: str, value: Any, name: str) -> dict[str, Any]:
        """Saves a model where no client asked for it: what the log is to have of it; {}: it was
        refused.
        """
        try:
            done = self._all({"do": "run", "kind": kind, "model": model}, packed(value))
        except Refused as refused:
            log.warning("%s: not saved as %s: %s", model, name, refused)
            return {}
        assert done is not None
        return done.saved

    def _for_engines(self, model: str) -> dict[str, Any]:
        """Saves a model that engines are to be sent after this step, and tells the API: what the
        log is to have of it.
        """
        every, step = self.server.sync_every_steps, self.models.steps[model]
        if not every or step % every:
            return {}
        assert self.requests is not None
        weights = synced_as(model, time.time_ns())
        if saved := self._saved(model, SAVES[1], bodies.synced(weights), weights):
            self._committed(functools.partial(self.requests.tell, SYNC + model, weights))
        return saved

    def _fail(self, model: str, why: str, *, damaged: bool = False) -> None:
        """Ends a model, and its requests that wait; the others go on. Its last checkpoint becomes
        one that a client can load, unless it is damaged.
        """
        assert self.requests is not None
        row = self.requests.model(model)
        if not damaged:
            why = f"{why}; {'it has no checkpoint' if row is None else self._kept(row)}"
        log.error("%s: %s", model, why)
        self._all({"do": "forget", "model": model})
        self._committed(functools.partial(self.requests.fail, model, why))

    def _result(self, request: Request) -> tuple[Result, Done | None]:
        header = {"do": "run", "kind": request.kind, "model": request.model}
        try:
            done = self._all(header, self._named(request))
        except Refused as refused:
            return Result(error=str(refused), category=refused.category), None
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            # What it has done to its model is not known. Other ranks may wait for this one: then
            # the workers end, and begin again.
            if self.mesh.control.size > 1:
                raise
            log.exception("%s %s", request.kind, request.id)
            why = f"{request.kind} {request.id} has failed: {type(error).__name__}: {error}"
            if request.kind not in APART:
                self._fail(request.model, why)
            return Result(error=why, category="server"), None
        assert done is not None
        return Result(packed(done.value, done.arrays)), done

    def _named(self, request: Request) -> bytes:
        """The body, with a name for what is to be saved without one.

        Raises Refused for a name under which something is saved already.
        """
        if request.kind not in SAVES:
            return request.body
        requests, (value, _) = self.requests, unpacked(request.body)
        assert requests is not None
        model = requests.model(request.model)
        if value["name"] is None and value.get("sampler") is None and model is not None:
            for i in itertools.count():  # by what has run, and once more
                value["name"] = f"{model.ran:06d}" + f"_{i}" * bool(i)
                if requests.path(saved_as(request.kind, request.model, value)) is None:
                    return packed(value)
        path = saved_as(request.kind, request.model, value)
        _, known = requests.path(path) or (None, None)
        # Published loops name their first checkpoint as the server names its own.
        free = known is None or value["overwrite"] or known.get("initial")
        if not free:
            raise Refused(400, f"path {path} is there already; give another name, or overwrite")
        return request.body

    def _is_due(self, request: Request) -> bool:
        """Whether what a request has led to is written, so that less is computed again after a
        kill: every so many steps, and at once what was read from files, which may be deleted.
        """
        if request.kind == "optim_step":
            return self.models.steps[request.model] % self.server.checkpoint_every == 0
        return request.kind in LOADS

    def _checkpoint(self, model: str) -> None:
        assert self.requests is not None
        row = self.requests.model(model)
        assert row is not None  # it has just trained
        folder = self._state(model) / str(row.ran)
        try:
            self._all({"do": "checkpoint", "model": model, "folder": str(folder)})
        except Refused as refused:
            log.error("%s: no checkpoint, so that more is computed again: %s", model, refused)
            return
        self._committed(functools.partial(self.requests.checkpointed, model, row.ran, str(folder)))
        for other in self._state(model).iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    def _state(self, model: str) -> pathlib.Path:
        return self.models.root / "models" / model / "state"

    # ---- after a kill

    def recover(self) -> None:
        """Models as they were: their checkpoints, and what has run since once more. One whose
        results have other bits then is failed, and both are kept.
        """
        assert self.requests is not None
        for model in self.requests.models():
            if model.state == "live":
                self._recover(model)

    def _recover(self, model: Model) -> None:
        requests = self.requests
        assert requests is not None
        began, count = time.monotonic(), 0
        if not self.exact and model.ran > model.saved:
            self._fail(
                model.name,
                f"the workers have ended, and {model.ran - model.saved} requests cannot be computed "
                "again with the same bits without enable_full_determinism",
            )
            return
        if model.folder is not None:
            about = {"about": model.about, "folder": model.folder}
            try:
                self._all({"do": "restore", "model": model.name, **about})
            except Refused as refused:
                why = f"its last checkpoint cannot be read: {refused}"
                self._fail(model.name, why, damaged=True)
                return
        for request, before in requests.ran(model.name, model.saved):
            result, _ = self._result(request)
            count += 1
            if (result.body, result.error) != (before.body, before.error):
                folder = self._state(model.name) / f"differs_{request.number}"
                folder.mkdir(parents=True, exist_ok=True)
                for name, one in (("before", before), ("again", result)):
                    (folder / f"{name}.safetensors").write_bytes(one.body or packed(one.error))
                why = (
                    f"{request.kind} {request.id}, computed again, has other bits than the result "
                    f"that was stored: both are in {folder}"
                )
                self._fail(model.name, why)
                return
        log.info(
            "%s: as it was, from %s and %d requests since, %.1f s",
            model.name,
            model.folder or "its creation",
            count,
            time.monotonic() - began,
        )

    def _kept(self, model: Model) -> str:
        """Gives a model's last checkpoint a path, and says which."""
        requests, source = self.requests, pathlib.Path(model.folder or "")
        assert requests is not None
        if model.folder is None or not source.is_dir():
            return "it has no checkpoint"
        path = path_of(model.name, "weights", f"failed_{model.saved:06d}")
        if requests.path(path) is None:
            try:
                size = _copied(source, folder_of(self.models.root, path))
                about = {n: model.about[n] for n in bodies.ABOUT}
                about |= {"model": model.name, "kind": "training", "user_metadata": None}
                requests.remember(path, model.owner, {**about, "size": size})
            except (OSError, sqlite3.OperationalError) as error:
                return f"its last checkpoint is {source}, which cannot be copied: {error}"
        return f"its last checkpoint is {path}"


def _copied(source: pathlib.Path, target: pathlib.Path) -> int:
    """Copies a folder, which has its name when it is complete, and returns its bytes."""
    aside = aside_of(target)
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(source, aside)
    replace_folder(aside, target)
    return folder_size(target)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        server, config = load(argv[0], argv[1:])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    logging.basicConfig(level=server.log_level, format="%(asctime)s %(levelname)s %(message)s")
    follow()

    def work(mesh: Mesh) -> None:
        root, requests = pathlib.Path(config.train.output_dir), None
        if mesh.main:
            held.enter_context(locked(root / "workers.lock", f"other workers are on {root}"))
            requests = Log(root)
        deterministic = config.train.enable_full_determinism
        exact = mesh.device.type == "cpu" or deterministic
        workers = Workers(models_of(server, config, mesh), server, requests, exact=exact)

        def stop(*_: Any) -> None:
            workers.stopped = True

        # torchrun passes SIGTERM to every rank; rank 0 tells the others when it is done.
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, stop)
        with reproducible(config.train.seed, deterministic):
            workers.lead() if mesh.main else workers.follow()

    with contextlib.ExitStack() as held:
        return launch.run(config.train, work)


if __name__ == "__main__":
    launch.end(main)
