"""Processes that are forked from one that has imported what they need, in place of commands: a
Python that imports torch takes seconds.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import time
import types
from multiprocessing import reduction

import helpers  # noqa: F401 (what the process forked from imports)


class _Outputs:
    """stdout and stderr of the process that starts another."""

    def __reduce__(self):
        return tuple, ([reduction.DupFd(1), reduction.DupFd(2)],)


def _run(arguments, environment, folder, parent, outputs):
    os.setsid()
    for number, output in enumerate(outputs, 1):
        os.dup2(output.detach(), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.getppid = lambda: parent
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


class Forked:
    """As subprocess.Popen(command, start_new_session=True), where the command is this Python's."""

    def __init__(self, command, start_new_session=True):
        assert command[0] == sys.executable and start_new_session
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_run,
            args=(command[1:], dict(os.environ), os.getcwd(), os.getpid(), _Outputs()),
            daemon=True,
        )
        self._process.start()
        self.pid = self._process.pid
        while self.poll() is None and os.getpgid(self.pid) != self.pid:
            time.sleep(0.001)

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self.poll()

    def kill(self):
        self._process.kill()


# In place of the module `subprocess` where processes are to be forked.
IN_PLACE = types.SimpleNamespace(Popen=Forked, TimeoutExpired=subprocess.TimeoutExpired)
