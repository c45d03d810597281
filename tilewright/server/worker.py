"""The workers: they take requests from the log, one after the other, and append results.

Rank 0 alone reads and writes the log. It sends each request to the other ranks over gloo, a header
in JSON and the body as bytes, and all of them do it.

    python -m tilewright.server.worker CONFIG.yaml [--server.key value ...]
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import shutil
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from tilewright.server.fields import Own, load
from tilewright.server.follow import follow
from tilewright.server.frames import packed, unpacked
from tilewright.server.log import Log, Model, Request, Result
from tilewright.server.models import CHANGES, CREATES, LOADS, SAVES, About, Done, Models, saved_as
from tilewright.server.passes import Packing
from tilewright.server.refused import Refused
from tilewright.trainer import build, launch
from tilewright.trainer.config import Config
from tilewright.trainer.field_tree import ConfigError
from tilewright.trainer.parallel.mesh import Mesh, padding

log = logging.getLogger("tilewright.server")

ATTEMPTS = 3  # of a request that ended the workers
IDLE = 60.0  # seconds after which the other ranks hear that there is nothing, and old results go
LOOK = 1.0  # seconds between looks for numbers that do not come
BRISK, SLOW, PATIENCE = 0.0005, 0.01, 2.0  # seconds between looks, and since the last request


def models_of(server: Own, config: Config, mesh: Mesh) -> Models:
    """The engine of a server, with no model yet."""
    model, lora, train = config.model, config.lora, config.train
    shape = build.shape_of_run(model, "language_model", mesh)
    ops = build.choose_ops(model, shape, mesh, build.compute_dtype(train))
    parts = build.build_model(model, lora, shape, config.data, train, mesh, ops)
    engine = build.engine_around(parts, train, mesh, lora.lora_plus_scale)
    identity = {
        "model": build.model_identity(model, lora, shape),
        "base": {"weights": parts.origin},
    }
    multiple = padding(config.data.pad_to_multiple_of, mesh.context, mesh.layout.tp)
    how = Packing(config.data.sample_packing_sequence_len, server.enable_packing, multiple)
    assert model.model_path is not None  # the server's field is required
    return Models(engine, pathlib.Path(train.output_dir), model.model_path, identity, how)


class Workers:
    """This rank's part. log: on rank 0."""

    def __init__(self, models: Models, server: Own, requests: Log | None):
        self.models, self.server, self.requests = models, server, requests
        self.mesh, self.stopped = models.mesh, False

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
        assert self.requests is not None
        self.recover()
        self.requests.tell("workers", "ready")
        last = told = swept = looked = time.monotonic()
        while not self.stopped:
            now = time.monotonic()
            if now - looked > LOOK:
                looked = now
                self.skip_gaps()
            if now - swept > IDLE:
                swept = now
                self.requests.forget(
                    after_sent=self.server.future_ttl, after=self.server.result_max_age
                )
            if (request := self.requests.next()) is not None:
                self.answer(request)
                last = told = time.monotonic()
                continue
            if now - told > IDLE:
                self._all({"do": "wait"})
                told = now
            time.sleep(BRISK if now - last < PATIENCE else SLOW)
        self.requests.tell("workers", "stopped")
        self._send({"do": "stop"})

    def skip_gaps(self) -> None:
        """Ends requests that have waited too long for one before them."""
        assert self.requests is not None
        for model, missing in self.requests.gaps(self.server.gap_timeout):
            log.warning("%s: seq_id %d has not come; what waits for it ends", model, missing)
            self.requests.skip(model, missing)

    def answer(self, request: Request) -> None:
        """Does a request, and appends its result."""
        requests = self.requests
        assert requests is not None
        if request.attempts >= ATTEMPTS:
            why = (
                f"request {request.id} ({request.kind}) has ended the workers {ATTEMPTS} times; "
                f"{_kept(requests.model(request.model))}"
            )
            self._fail(request.model, why)
            return
        requests.begin(request)
        began = time.monotonic()
        result, done = self._result(request)
        state = None
        if result.error is None:
            created = request.kind in CREATES
            ended = done is not None and done.ended
            state = "ended" if ended else "live" if created else None
        elif request.kind in CREATES:
            state = "failed"
        requests.finish(
            request,
            result,
            ran=request.kind in CHANGES,
            state=state,
            why=result.error if state == "failed" else None,
            saved=done.saved if done is not None else None,
        )
        log.info(
            "%s %s seq %s: %s, %.3f s",
            request.kind,
            request.model,
            request.seq,
            result.error or "done",
            time.monotonic() - began,
        )
        if result.error is None and self._is_due(request):
            self._checkpoint(request.model)

    def _fail(self, model: str, why: str) -> None:
        """Ends a model, and its requests that wait; the others go on."""
        assert self.requests is not None
        log.error("%s: %s", model, why)
        self._all({"do": "forget", "model": model})
        self.requests.fail(model, why)

    def _result(self, request: Request) -> tuple[Result, Done | None]:
        header = {"do": "run", "kind": request.kind, "model": request.model}
        try:
            self._refuse_known(request)
            done = self._all(header, request.body)
        except Refused as refused:
            return Result(error=str(refused), category="user"), None
        assert done is not None
        return Result(packed(done.value, done.arrays)), done

    def _refuse_known(self, request: Request) -> None:
        """Raises Refused for a name under which something is saved already."""
        if request.kind not in SAVES:
            return
        assert self.requests is not None
        value, _ = unpacked(request.body)
        path = saved_as(request.kind, request.model, value)
        if not value.get("overwrite") and self.requests.path(path) is not None:
            raise Refused(400, f"path {path} is there already; give another name, or overwrite")

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
        self._all({"do": "checkpoint", "model": model, "folder": str(folder)})
        self.requests.checkpointed(model, row.ran, str(folder))
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
        if model.folder is not None:
            about = {"about": model.about, "folder": model.folder}
            try:
                self._all({"do": "restore", "model": model.name, **about})
            except Refused as refused:
                self._fail(model.name, f"its last checkpoint cannot be read: {refused}")
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
                    f"that was stored: both are in {folder}; {_kept(model)}"
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


def _kept(model: Model | None) -> str:
    if model is None or model.folder is None:
        return "it has no checkpoint"
    return f"its last checkpoint is {model.folder}"


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
        requests = Log(pathlib.Path(config.train.output_dir)) if mesh.main else None
        workers = Workers(models_of(server, config, mesh), server, requests)

        def stop(*_: Any) -> None:
            workers.stopped = True

        # torchrun passes SIGTERM to every rank; rank 0 tells the others when it is done.
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, stop)
        workers.lead() if mesh.main else workers.follow()

    return launch.run(config.train, work)


if __name__ == "__main__":
    launch.end(main)
