"""The API of a server, which is killed at the points of a plan: as `tilewright.server.api`."""

from __future__ import annotations

import sys
from typing import Any

from tilewright.server import api
from tilewright.server.log import Log
from tilewright_lab.server_torture.points import Watch


def main() -> int:
    watch = Watch("api")
    append, sent = Log.append, Log.sent

    def appending(
        log: Log, model: str, seq: int | None, kind: str, *rest: Any, **given: Any
    ) -> str:
        root = log.file.parent
        planned = watch.planned(root, kind, model)
        watch.reached(root, planned, "arrived")
        name = append(log, model, seq, kind, *rest, **given)
        watch.reached(root, planned, "accepted")
        return name

    def sending(log: Log, request: str) -> None:
        root = log.file.parent
        kind, model = log.kind_of(request) or ("", "")
        watch.reached(root, watch.planned(root, kind, model), "answered")
        sent(log, request)

    log: Any = Log
    log.append, log.sent = appending, sending
    return api.main()


if __name__ == "__main__":
    sys.exit(main())
