"""How a command of the trainer runs in the processes of its launch, and ends: with an exit code,
and one sentence for what a user can mend.

torchrun starts, supervises and ends the ranks. By hand is what each of them tells it: with
elastic's `record` every error would have a traceback, and a rank that failed because of another,
within the same second, could be named as the cause.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

from tilewright.core import platform
from tilewright.core.registry import ImplementationUnavailable
from tilewright.trainer.field_tree import ConfigError
from tilewright.trainer.interrupts import Stopped
from tilewright.trainer.parallel.fields import Parallel
from tilewright.trainer.parallel.mesh import Mesh, device_of, join

log = logging.getLogger("tilewright")

# Backends' messages about a process that has ended, for which they have no exception.
GONE = re.compile("(closed|reset) by peer|likely closed|remote process exited")


def run(
    train: Parallel | None,
    work: Callable[[Mesh], None],
    *,
    first: Callable[[int, int, torch.device], None] = lambda rank, size, device: None,
    again: list[str] | None = None,
) -> int:
    """Runs `work` in the mesh of all processes.

    Returns the exit code: 0; 1 and one sentence for errors that a user can fix; 2 for the
    configuration; 130 for Ctrl-C, 143 for SIGTERM.

    train: by which the processes join; None: each works alone.
    first: (rank, processes, device), called before they meet.
    again: the arguments of `tilewright.trainer.train` with which a stopped run goes on, if it can.
    """
    mesh, stays = Mesh(), False
    rank, size, local = platform.launched() or (0, 1, 0)
    try:
        first(rank, size, device_of(local))
        mesh = Mesh() if train is None else join(train)
        work(mesh)
    except ConfigError as error:  # sizes that do not match the number of processes
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        stays = True
        said = str(interrupt) or "interrupted before the first step"
        if isinstance(interrupt, Stopped) and again is not None:
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


def end(main: Callable[[], int]) -> None:
    """Calls a command's `main`, and ends the process with its exit code."""
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
