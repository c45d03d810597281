"""A worker of a server, which is killed at the points of a plan: as `tilewright.server.worker`."""

from __future__ import annotations

from typing import Any

from tilewright.core import platform
from tilewright.server import worker
from tilewright.server.frames import Arrays
from tilewright.server.log import Log, Request
from tilewright.server.models import Done, Models
from tilewright.server.worker import Workers
from tilewright.trainer import launch
from tilewright_lab.server_torture.points import CHECKPOINT, Watch


def main() -> int:
    rank, _, _ = platform.launched() or (0, 1, 0)
    watch, replaying = Watch(f"rank {rank}"), [False]
    run, recover = Models.run, Workers.recover
    finish, checkpointed = Log.finish, Log.checkpointed

    def running(models: Models, kind: str, model: str, value: Any, arrays: Arrays) -> Done:
        planned = watch.planned(models.root, kind, model)
        point = "replayed" if replaying[0] else "begun"
        if watch.reached(models.root, planned, point) == "twice":
            run(models, kind, model, value, arrays)
        done = run(models, kind, model, value, arrays)
        if rank:  # rank 0 reaches it in `finishing`
            watch.reached(models.root, planned, "applied")
        return done

    def recovering(workers: Workers) -> None:
        replaying[0] = True
        recover(workers)
        replaying[0] = False

    def finishing(log: Log, request: Request, *rest: Any, **given: Any) -> None:
        root = log.file.parent
        planned = watch.planned(root, request.kind, request.model)
        if watch.reached(root, planned, "applied") == "lost":
            return
        finish(log, request, *rest, **given)
        watch.reached(root, planned, "committed")

    def checkpointing(log: Log, model: str, *rest: Any) -> None:
        root = log.file.parent
        watch.reached(root, watch.planned(root, CHECKPOINT, model), "applied")
        checkpointed(log, model, *rest)

    log: Any = Log
    models: Any = Models
    workers: Any = Workers
    log.finish, log.checkpointed = finishing, checkpointing
    models.run, workers.recover = running, recovering
    return worker.main()


if __name__ == "__main__":
    launch.end(main)
