"""What scripts share that compare a commit with another: two trees, with their C++ kernels, each
served by a process of its own, which answers a line with a line.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

ROOT = pathlib.Path(__file__).resolve().parent.parent


def environment(tree: pathlib.Path) -> dict[str, str]:
    """Of a process that imports a tree."""
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


class Served:
    """A process of a tree, which runs `script` with the word "serve".   folder: where it runs."""

    def __init__(self, script: str, tree: pathlib.Path, folder: str | pathlib.Path):
        options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, script, "serve"]
        self._process: Any = subprocess.Popen(command, cwd=folder, env=environment(tree), **options)

    def answer(self) -> Any:
        return json.loads(self._process.stdout.readline())

    def ask(self, line: str) -> Any:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def answers() -> TextIO:
    """stdout of a process that serves, which prints nothing else there."""
    found = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return found


def in_turns(trees: Mapping[str, Any], number: int) -> tuple[str, ...]:
    """The order of a round."""
    return (*trees,) if number % 2 else (*reversed([*trees]),)


def write(out: pathlib.Path, found: Mapping[str, Any]) -> None:
    from tilewright.core import platform

    about = {"date": str(datetime.date.today()), "load": os.getloadavg(), **platform.provenance()}
    out.write_text(json.dumps({"about": about, **found}, indent=1) + "\n")


def run(
    serve: Callable[[], None], main: Callable[[dict[str, pathlib.Path], pathlib.Path], None]
) -> None:
    """A script's command: SCRIPT BEFORE AFTER OUT.json, or what `Served` starts."""
    if sys.argv[1] == "serve":
        serve()
    else:
        sys.path[:0] = [str(ROOT)]
        before, after, target = map(pathlib.Path, sys.argv[1:])
        main({"before": before.resolve(), "after": after.resolve()}, target)
