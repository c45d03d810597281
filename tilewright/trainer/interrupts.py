"""Ctrl-C and SIGTERM: the step in progress is finished, a checkpoint is written, the run ends.

Signals reach some ranks, at different steps, so after every step all ranks agree. torchrun passes
on the signal that it gets, once, and kills its ranks 30 seconds later (`--shutdown-timeout`). It
also sends SIGTERM when a rank of its machine has ended: then no step can be finished, and a process
that waits in a collective would never return to Python. So a thread receives the signals. By hand,
since neither torchrun nor torch lets ranks agree on the last step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from tilewright.trainer.parallel.mesh import Mesh

log = logging.getLogger("tilewright")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A scheduler sends the signal to all processes of a job, and torchrun passes it on once more.
SAME_SIGNAL = 1.0  # seconds
_END = 0  # no signal's number


class Stopped(KeyboardInterrupt):
    """A run that a signal ended, with the last sentence that it says."""

    def __init__(self, signum: int, message: str):
        super().__init__(message)
        self.code = 128 + signum


class Interrupts:
    """The signals that the ranks of a run get. Every rank must create one."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.first, self.at = mesh, 0, 0.0
        own = socket.gethostname(), os.getpid()
        self.beside = [pid for host, pid in mesh.control.gather(own) if host == own[0]]

    @contextlib.contextmanager
    def watched(self) -> Iterator[Interrupts]:
        """Signals do not raise KeyboardInterrupt in the block. Python delivers them to the main
        thread only: in another one nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        read, write = os.pipe()
        os.set_blocking(write, False)  # as set_wakeup_fd wants it
        before = {signum: signal.signal(signum, lambda *_: None) for signum in SIGNALS}
        other = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._watch, args=(read,), daemon=True)
        watcher.start()
        try:
            yield self
        finally:
            signal.set_wakeup_fd(other)
            for signum, handler in before.items():
                signal.signal(signum, handler)
            # The other end stays open where a loader's workers have inherited it.
            os.write(write, bytes([_END]))
            watcher.join()
            os.close(write)
            os.close(read)

    def _watch(self, read: int) -> None:
        while (signum := os.read(read, 1)[0]) != _END:
            if signum not in SIGNALS:
                continue
            if signum == signal.SIGTERM and not all(map(_alive, self.beside)):
                self._leave(signum, "another process of this run has ended")
            if not self.first:
                self.first, self.at = signum, time.monotonic()
                if self.mesh.main:
                    log.info(
                        "%s: this step is finished and a checkpoint written; another one ends the "
                        "run at once",
                        signal.Signals(signum).name,
                    )
            elif time.monotonic() - self.at > SAME_SIGNAL:
                self._leave(signum, "interrupted again, so no checkpoint is written")

    def _leave(self, signum: int, why: str) -> None:
        print(f"rank {self.mesh.rank}: {why}", file=sys.stderr, flush=True)
        os._exit(128 + signum)

    def asked(self) -> int:
        """The signal that some rank has received, or 0. Every rank must call it after the same
        step.
        """
        received = torch.tensor([self.first])
        if self.mesh.size > 1:  # on gloo, beside what a GPU computes
            dist.all_reduce(received, op=dist.ReduceOp.MAX, group=self.mesh.everyone.group)
        return int(received)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def ignored(worker: int) -> None:
    """Leaves signals to the process that started this one: torchrun sends them to both, and a
    loader's worker that ends would fail the step that is to be finished.
    """
    signal.set_wakeup_fd(-1)
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
