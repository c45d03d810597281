"""Points at which a server's processes can be killed, and the plan that says where.

`api` and `worker` are those of the server, and look at the plan, a file in the server's folder, at
each point. A kill is marked by a file before it happens: it happens once, and its place is exact.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tilewright.core.files import write_text

PLAN, MARKS = "torture.json", "torture"  # below the server's folder
# What reaches the points of a process: requests of these kinds, as the log has them.
KINDS = (
    "create_model",
    "create_from",
    "forward",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "load_weights",
    "abort_gradient_epoch",
    "sample",
    "unload_model",
)
CHECKPOINT = "checkpoint"  # no request: the workers write one after some of them
REPLAYED = ("create_model", "create_from", "forward_backward", "optim_step", "load_weights")
REPLAYED += ("abort_gradient_epoch",)


class Place(NamedTuple):
    """Where a kill is to be.

    process: "api", "rank 0" or "rank 1".

    point: the API's are arrived, before the request's commit; accepted, between the commit and the
    answer; answered, between the result's commit and its being sent. The ranks' are begun, before
    the request is applied; applied, before its result is committed; committed, after that; and
    replayed, where the request is computed again after another kill.

    kind: of the request.   fault: what is done in place of the kill, to see that it is noticed:
    "lost" leaves the result of a request out of the log, "twice" computes it twice.
    """

    process: str
    point: str
    kind: str
    fault: str | None = None

    @property
    def name(self) -> str:
        return f"{self.process} {self.point} {self.kind}"


class Kill(NamedTuple):
    """A place, and of which model's request: the first that reaches it."""

    number: int
    place: Place
    model: str


def places(ranks: int) -> list[Place]:
    """All of a server whose workers have so many ranks."""
    every = [Place("api", p, k) for p in ("arrived", "accepted", "answered") for k in KINDS]
    every += [Place("rank 0", p, k) for p in ("begun", "applied", "committed") for k in KINDS]
    every += [Place("rank 0", "applied", CHECKPOINT)]
    every += [Place("rank 0", "replayed", kind) for kind in REPLAYED]
    if ranks > 1:
        every += [Place("rank 1", p, k) for p in ("begun", "applied") for k in KINDS]
    return every


# ---- the plan: the client writes it, and the server's processes read it


def arm(root: pathlib.Path, kills: Iterable[Kill]) -> None:
    (root / MARKS).mkdir(exist_ok=True)
    write_text(root / PLAN, json.dumps([*kills]))


def mark_of(root: pathlib.Path, number: int, point: str) -> pathlib.Path:
    """The file that is there once a kill has been reached, with the time."""
    return root / MARKS / f"{number}_{point}"


class Watch:
    """What a process does at its points."""

    def __init__(self, process: str):
        self.process = process

    def planned(self, root: pathlib.Path, kind: str, model: str) -> list[Kill]:
        """The kills of this process that a request is to meet. It is asked before anything of the
        request is done: a plan that is written once its result is known is not of this request.
        """
        try:
            given = json.loads((root / PLAN).read_text())
        except FileNotFoundError:
            return []
        kills = [Kill(number, Place(*place), own) for number, place, own in given]
        wanted = (self.process, kind, model)
        return [
            kill for kill in kills if (kill.place.process, kill.place.kind, kill.model) == wanted
        ]

    @staticmethod
    def reached(root: pathlib.Path, planned: Sequence[Kill], point: str) -> str | None:
        """Ends this process where that is planned; else the fault that is, if one is."""
        for number, place, _ in planned:
            mark = mark_of(root, number, place.point)
            if place.point == point and not mark.exists():
                write_text(mark, repr(time.time()))
                if place.fault is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return place.fault
        return None
