"""The trainer: torchrun -m tilewright.trainer.train config.yaml [--section.field value ...]

Plain `python -m tilewright.trainer.train` trains in one process. With `--plan [--world N]` it
prints the memory that each rank of N processes will need, and ends; with `--report DIR` it draws a
page of the run at its end.
"""

from __future__ import annotations

if __name__ == "__main__":
    from tilewright.core.platform import require

    require("trainer")  # else the imports below end in a traceback

import logging
import pathlib
import sys

import torch

from tilewright.core import platform
from tilewright.core.files import check_writable
from tilewright.trainer import launch, memory_plan, report
from tilewright.trainer.config import Data, from_command_line
from tilewright.trainer.data.sources import check_sources
from tilewright.trainer.loop import train
from tilewright.trainer.parallel.mesh import Mesh


def check_data(data: Data) -> None:
    """Raises ValueError or OSError for data that are not there, as far as can be seen without
    reading them.
    """
    if not data.skip_prepare_dataset:
        check_sources(
            [*data.datasets, *data.test_datasets],
            cached=pathlib.Path(data.dataset_prepared_path).is_dir(),
        )


OPTIONS = {
    "--plan [--world N]": "Print the memory that each rank of N processes will need, and end. "
    "Default: the processes of this launch.",
    "--report DIR": f"At the run's end, draw its numbers on a page, DIR/{report.PAGE}.",
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


def asked_report(argv: list[str]) -> tuple[pathlib.Path | None, list[str]]:
    """The page of `--report DIR`, and the other arguments. Exits with 2 without DIR or with
    `--plan`, with 1 without the packages.
    """
    if "--report" not in argv:
        return None, argv
    at = argv.index("--report")
    folder, rest = argv[at + 1 : at + 2], argv[:at] + argv[at + 2 :]
    if not folder or folder[0].startswith("--") or "--plan" in rest:
        wrong = "is of a run, and --plan ends before it" if "--plan" in rest else "needs a DIR"
        print(f"--report {wrong}", file=sys.stderr)
        sys.exit(2)
    platform.require("bench")
    return pathlib.Path(folder[0], report.PAGE), rest


# What a stopped run has done: its own checkpoint is of what it has accepted.
OF_ONE_START = (
    "train.load_checkpoint_path",
    "train.load_optimizer",
    "train.accept_changes",
    "train.allow_other_base",
)


def without(argv: list[str], *fields: str) -> list[str]:
    """Arguments without these overrides, each `--field value` or `--field=value`."""
    kept, rest = [], [*argv]
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name.replace("-", "_") not in fields:
            kept.append(word)
        elif not equals:
            rest[:1] = []
    return kept


@platform.command
def main(argv: list[str] | None = None) -> int:
    """Returns the exit code, as `launch.run` has it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    page, argv = asked_report(sys.argv[1:] if argv is None else argv)
    only_plan, world, argv = asked_plan(argv)
    # Exits with 2 and every error, or with 0 after --help.
    config = from_command_line(argv, options=OPTIONS)

    def plan(rank: int, size: int, device: torch.device) -> None:
        if rank == 0:
            print("\n".join(memory_plan.Planner(config, world or size, device).report()))

    def check(rank: int, size: int, device: torch.device) -> None:
        if page is not None and rank == 0:
            if page.parent.exists() and not page.parent.is_dir():
                raise ValueError(f"--report {page.parent}: is no folder")
            page.parent.mkdir(parents=True, exist_ok=True)
            check_writable(page, "--report")
        check_data(config.data)  # before a model is downloaded for its plan
        memory_plan.Planner(config, size, device).check(rank)

    def work(mesh: Mesh) -> None:
        train(config, mesh)
        if page is not None and mesh.main:
            report.write([config.train.output_dir], page)
            print(page)

    # A run that began with the weights of a checkpoint goes on from its own.
    rest = [] if config.train.load_optimizer else ["--train.load_optimizer", "true"]
    rest += [] if page is None else ["--report", str(page.parent)]
    again = [*without(argv, *OF_ONE_START), *rest, "--train.load_checkpoint_path", "auto"]
    if only_plan:
        return launch.run(None, lambda mesh: None, first=plan)
    return launch.run(
        config.train, work, first=check, again=again if config.train.save_optimizer else None
    )


if __name__ == "__main__":
    launch.end(main)
