"""The trainer: torchrun -m tilewright.trainer.train config.yaml [--section.field value ...]

Plain `python -m tilewright.trainer.train` trains in one process. With `--plan [--world N]` it
prints the memory that each rank of N processes will need, and ends.
"""

from __future__ import annotations

if __name__ == "__main__":
    from tilewright.core.platform import require

    require("trainer")  # else the imports below end in a traceback

import logging
import os
import pathlib
import re
import sys
import traceback

import torch.distributed as dist

from tilewright.core import platform
from tilewright.core.registry import ImplementationUnavailable
from tilewright.trainer import memory_plan
from tilewright.trainer.config import Config, ConfigError, from_command_line
from tilewright.trainer.data.sources import check_sources
from tilewright.trainer.interrupts import Stopped
from tilewright.trainer.loop import train
from tilewright.trainer.parallel.mesh import Mesh, device_of, join

log = logging.getLogger("tilewright")


def check_data(config: Config) -> None:
    """Raises ValueError or OSError for data that are not there, as far as can be seen without
    reading them.
    """
    if not config.data.skip_prepare_dataset:
        check_sources(
            [*config.data.datasets, *config.data.test_datasets],
            cached=pathlib.Path(config.data.dataset_prepared_path).is_dir(),
        )


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
