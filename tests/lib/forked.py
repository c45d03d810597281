"""Processes that are forked from one that has imported what they need, in place of commands: a
Python that imports torch takes seconds.
"""

import contextlib
import functools
import multiprocessing
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import types
from multiprocessing import reduction

import helpers  # noqa: F401 (what the process forked from imports)
import pytest
import torch


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
        # One that ends meanwhile is the server's child, which waits for it.
        with contextlib.suppress(ProcessLookupError):
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


class Child:
    """As Popen(command, start_new_session=True) of a bench's own command, forked from here: for a
    process of one thread, OMP_NUM_THREADS=1, since a fork has none of the pool that it waits for.
    """

    def __init__(self, command, start_new_session=True):
        assert command[1] == "-m" and command[2] in ("bench", "tilewright.bench")
        assert start_new_session
        assert torch.get_num_threads() == 1
        self.pid, self._code = os.fork(), None
        if not self.pid:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                module = __import__(f"{command[2]}.__main__", fromlist=["main"])
                os._exit(module.main(command[3:]))
            finally:
                os._exit(1)

    def poll(self):
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout):
        for _ in range(int(timeout / 0.01)):
            if self.poll() is not None:
                return
            time.sleep(0.01)


# In place of the module `subprocess` where processes are to be forked.
IN_PLACE = types.SimpleNamespace(Popen=Forked, TimeoutExpired=subprocess.TimeoutExpired)
CHILDREN = types.SimpleNamespace(Popen=Child, TimeoutExpired=subprocess.TimeoutExpired)


def briefly():
    """The bench of this process forks its workers, and hardly measures the roofline."""
    from tilewright.bench import runner, timing

    runner.subprocess = CHILDREN
    timing.measure_roofline = functools.partial(
        timing.measure_roofline, copy_bytes=2**22, matmul=64, samples=2
    )


SERVER = """
import importlib, json, os, runpy, socket, sys, threading, warnings
{imports}

def end_with(caller):
    caller.recv(1)
    os._exit(1)

def run(arguments, environment, where, numbers, files):
    for number, file in zip(numbers, files):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(where)
    importlib.invalidate_caches()
    kind = arguments[0]
    sys.argv = arguments[1:] if kind in ("-m", "-c") else arguments
    sys.path[0] = "" if kind in ("-m", "-c") else os.path.dirname(kind)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    code = 0
    try:
        if kind == "-c":
            exec(arguments[1], dict(__name__="__main__"))
        elif kind == "-m":
            # The process forked from has imported the module.
            warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

listener = socket.socket(socket.AF_UNIX)
listener.bind("{folder}/socket")
listener.listen()
print("listening", flush=True)
while True:
    caller, _ = listener.accept()
    if os.fork():
        caller.close()
        continue
    said, files, *_ = socket.recv_fds(caller, 2**20, 8)
    if worker := os.fork():
        for file in files:
            os.close(file)
        code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        caller.sendall(str(code).encode())
        os._exit(0)
    threading.Thread(target=end_with, args=(caller,), daemon=True).start()
    run(*json.loads(said), files)
"""
CALLER = """#!{python} -SE
import json, os, socket, sys

if sys.argv[1:3] in ({apart}):
    os.execv("{python}", ["{python}", *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect("{folder}/socket")
arguments = sys.argv[2:] if sys.argv[1] == "-u" else sys.argv[1:]
# And what was given to this process, by Popen's pass_fds.
open_files = [int(name) for name in os.listdir("/proc/self/fd")]
files = [n for n in open_files if n < 3 or os.path.exists(f"/proc/self/fd/{{n}}") and os.get_inheritable(n)]
call = json.dumps([arguments, dict(os.environ), os.getcwd(), files])
socket.send_fds(server, [call.encode()], files)
sys.exit(int(server.recv(9) or 1))
"""


@contextlib.contextmanager
def python(imports, where, environment, *apart):
    """The path of a command that stands for Python's: it asks a server, which has run the imports,
    to fork.

    environment: the server's. Each command has its own, whose PYTHONPATH begins with further
    folders, if any.
    apart: modules whose commands are Python's own.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        server, caller = folder / "server.py", folder / "python"
        server.write_text(SERVER.format(imports=imports, folder=folder))
        kept = "".join(f"['-m', '{module}'], " for module in apart)
        caller.write_text(CALLER.format(python=sys.executable, folder=folder, apart=kept))
        caller.chmod(0o755)
        with subprocess.Popen(
            [sys.executable, server], cwd=where, env=environment, stdout=subprocess.PIPE
        ) as process:
            try:
                assert process.stdout.readline() == b"listening\n"
                yield caller
            finally:
                process.kill()


@contextlib.contextmanager
def starts(module, imports):
    """The processes that a module of the bench starts are forked from one that has run the imports,
    which would take each of them seconds.
    """
    root = pathlib.Path(__file__).parents[2]
    imports = f"import torch\ntorch.set_num_threads(1)  # a fork has no pool of threads\n{imports}"
    variables = {"PYTHONPATH": f"{root}:{root / 'lab'}", "OMP_NUM_THREADS": "1"}
    variables = {**os.environ, **variables, "HF_HUB_OFFLINE": "1"}
    with python(imports, root, variables) as command, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "sys", types.SimpleNamespace(executable=str(command)))
        yield
