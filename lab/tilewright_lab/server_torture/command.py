"""`tilewright server-torture`: kills of a training server, each at a chosen point.

A server lives through kills of its API and its workers, while a client sends every kind of request
and repeats what had no answer. Results, checkpoints, adapters and what the log holds must have the
bits of a server that ran the same requests and was not disturbed. Kills go through all places in
turns; a table that is given has a row for each, and a later call goes on where it ends.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence

import numpy as np

from tilewright.core import platform
from tilewright_lab.server_torture.points import Place, places

NEEDED = ("fastapi", "uvicorn", "zstandard", "google", *platform.EXTRAS["trainer"])
BATCH = 20  # kills of one server, beside which two are started: minutes, which an interrupt loses


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilewright server-torture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 every kill left what it should, 1 one did not, 2 wrong arguments",
    )
    parser.add_argument(
        "--kills", type=int, default=200, help="all together (default: %(default)d)"
    )
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2), help="of the workers")
    parser.add_argument("--seed", type=int, default=0, help="of the requests, and of the order")
    parser.add_argument("--table", type=pathlib.Path, metavar="FILE", help="JSON lines to go on in")
    return parser


def in_turns(ranks: int, seed: int, begin: int, count: int) -> list[Place]:
    """So many places from a number on, all in an order of the seed's, and again."""
    every = places(ranks)
    order = np.random.default_rng(seed).permutation(len(every))
    return [every[order[i % len(every)]] for i in range(begin, begin + count)]


@platform.command
def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)
    if missing := [name for name in NEEDED if platform.no_module(name)]:
        print(
            f"server-torture: {platform.not_installed(*missing, extra='server')}", file=sys.stderr
        )
        return 2
    from tilewright_lab.server_torture import table as tables

    # What is within blocks is left: servers end.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    table = tables.Table.read(args.table)
    names = [tables.unit(place, args.ranks) for place in places(args.ranks)]
    while (done := table.kills(names)) < args.kills:
        every = in_turns(args.ranks, args.seed, done, min(BATCH, args.kills - done))
        seconds, wrong = _batch(every, args.ranks, (args.seed, done))
        table.add(
            {tables.unit(place, args.ranks): own for place, own in seconds.items()},
            {tables.unit(place, args.ranks): said for place, said in wrong.items()},
        )
        _tell(seconds, wrong)
        if wrong:
            return 1
    return 0


def _batch(
    every: Sequence[Place], ranks: int, seed: Sequence[int]
) -> tuple[dict[Place, list[float]], dict[Place, list[str]]]:
    """Seconds from the kills at places to the next results, and what is wrong after one of them:
    what came later is left out.
    """
    from tilewright_lab.server_torture import run
    from tilewright_lab.server_torture.client import write_model

    folder = pathlib.Path(tempfile.mkdtemp(prefix="tilewright-torture-"))
    setting = run.Setting(folder, write_model(folder / "model"), seed, ranks)
    record, wrong = run.batch(setting, every)
    seconds: dict[Place, list[float]] = {}
    for number, took in record.seconds.items():
        if number <= min(wrong, default=len(every)):
            seconds.setdefault(every[number], []).append(took)
    if wrong:
        print(f"what both servers have left is in {folder}")
    else:
        shutil.rmtree(folder)
    return seconds, {every[number]: said for number, said in wrong.items()}


def _tell(seconds: dict[Place, list[float]], wrong: dict[Place, list[str]]) -> None:
    for process in sorted({place.process for place in seconds}):
        times = [t for place, own in seconds.items() if place.process == process for t in own]
        print(
            f"{process}: {len(times)} kills; to the next result {statistics.median(times):.1f} s in "
            f"the median, {max(times):.1f} s at most",
            flush=True,
        )
    for place, sentences in wrong.items():
        print(f"{place.name}: " + "\n    ".join(sentences), flush=True)
