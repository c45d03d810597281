"""Processes that run steps for `tilewright check-layout`: started together, and ended with
everything that they started, also where a step hangs, raises or dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import difflib
import faulthandler
import importlib
import importlib.util
import linecache
import multiprocessing
import os
import pathlib
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist

from tilewright.core import platform
from tilewright_lab.check_layout import compare
from tilewright_lab.check_layout.step import GATHERING, Refused, measure, read, written

# A collective outlives any limit on silence: the parent, which says where ranks wait, ends it.
FOREVER = datetime.timedelta(days=1)
# Seconds in which a rank that is asked where it waits answers.
ANSWER = 2.0
# What Gloo raises where another rank's process has ended.
LOST = re.compile("Connection (reset|closed|refused)|Broken pipe")
SINGLE = "single"  # the layout of one process
WHERE = signal.SIGUSR1
WORLD_SIZES = (2, 4)
# Parts of the check that are no part of a step.
COMPARING = "in the comparison"
OURS = (COMPARING, *GATHERING)


@dataclasses.dataclass(frozen=True)
class Target:
    """The function, as it was given, and how it is run."""

    name: str
    float64: bool = True
    verbose: bool = False


class Ranks:
    """The ranks of one world size. `with Ranks(...) as ranks: ranks.run("fsdp2")`

    timeout: seconds for which no rank may say anything.   folder: for one process's tensors.
    """

    def __init__(self, number: int, target: Target, folder: str, timeout: float):
        self.number, self.timeout = number, timeout
        self.folder = pathlib.Path(folder)
        self._pipes, self._processes = [], []
        self._at = ["the start"] * number
        try:
            for rank in range(number):
                self._start(rank, target)
        except BaseException:  # a signal: nobody will leave this object's block
            self.__exit__()
            raise

    def _start(self, rank: int, target: Target) -> None:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        arguments = (rank, self.number, target, str(self.folder), theirs)
        # Not a daemon: those may not have children, such as a data loader's workers.
        process = context.Process(target=_main, args=arguments, daemon=False)
        self._pipes.append(ours)
        process.start()
        self._processes.append(process)
        theirs.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_) -> None:
        for process in self._processes:
            _end(process.pid)
            process.kill()  # if it has not made its group yet
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def load(self) -> Any:
        """Imports the function on every rank, and returns its layouts."""
        self._at = ["the import"] * self.number
        return self._ask("load", None)[0]

    def run(self, layout: str) -> list[Any]:
        """What each rank's step gave: `Alone` for the layout of one process, else `Compared`."""
        return self._ask("run", layout)

    def _ask(self, command: str, layout: str | None) -> list[Any]:
        answers: dict[int, Any] = {}
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # of a rank that has ended, as is seen below
                pipe.send((command, layout))
        waiting = set(range(self.number))
        heard = time.monotonic()
        while waiting:
            left = heard + self.timeout - time.monotonic()
            ends = [self._processes[rank].sentinel for rank in waiting]
            pipes = [self._pipes[rank] for rank in waiting]
            ready = connection.wait([*pipes, *ends], max(0.0, left))
            if not ready:
                raise Refused(self._silence(layout, sorted(waiting)))
            heard = time.monotonic()
            for rank in sorted(waiting):
                if self._pipes[rank].poll():
                    self._hear(layout, rank, answers)
                elif self._processes[rank].sentinel in ready:
                    raise Refused(self._death(layout, rank))
            waiting -= set(answers)
        return [answers[rank] for rank in range(self.number)]

    def _hear(self, layout: str | None, rank: int, answers: dict[int, Any]) -> None:
        try:
            kind, value = self._pipes[rank].recv()
        except EOFError:
            raise Refused(self._death(layout, rank)) from None
        if kind == "at":
            self._at[rank] = value
        elif kind == "refused":
            raise Refused(self._cause(layout, rank, value))
        else:
            answers[rank] = value

    def _cause(self, layout: str | None, rank: int, sentence: str) -> str:
        """A rank that loses its connection to one that died may be heard before the death is."""
        if LOST.search(sentence):
            others = [other for other in range(self.number) if other != rank]
            ended = connection.wait([self._processes[other].sentinel for other in others], ANSWER)
            for other in others:
                if self._processes[other].sentinel in ended:
                    return self._death(layout, other)
        return self._about(layout, rank, sentence)

    def _about(self, layout: str | None, rank: int, sentence: str) -> str:
        if layout is None:
            return sentence
        if layout == SINGLE:
            return f"one process: {sentence}"
        if self.number == 1:
            return f"{layout} in one process: {sentence}"
        return f"{layout} on {self.number} processes, rank {rank}: {sentence}"

    def _death(self, layout: str | None, rank: int) -> str:
        process = self._processes[rank]
        process.join(ANSWER)
        with contextlib.suppress(EOFError, OSError):  # where it said that it was, last
            while self._pipes[rank].poll():
                kind, value = self._pipes[rank].recv()
                if kind == "at":
                    self._at[rank] = value
        code = process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {-code} ({signal.Signals(-code).name})"
        return self._about(layout, rank, f"the process ended in {self._at[rank]} with {how}")

    def _silence(self, layout: str | None, ranks: list[int]) -> str:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, WHERE)
        said = []
        for rank in ranks:
            at = self._at[rank]
            if at in OURS:
                said.append(f"rank {rank} waits for the others, {at}")
            else:
                place = _place(_stack(self.folder, self.number, rank))
                said.append(f"rank {rank} is in {at}{place}")
        what = f"{layout} on {self.number} process{'es' if self.number > 1 else ''}"
        what = {None: "the import of the function", SINGLE: "one process"}.get(layout, what)
        return f"{what} hangs: nothing for {self.timeout:g} s; {'; '.join(said)}"


# ---- where a rank is


def _stack(folder: pathlib.Path, number: int, rank: int) -> pathlib.Path:
    """The file into which a rank writes its main thread's number, and where it is when asked."""
    return folder / f"stack_{number}_{rank}"


def _place(path: pathlib.Path) -> str:
    """` at file.py:12 in step: `line``, from what faulthandler writes."""
    end, text, before = time.monotonic() + ANSWER, "", None
    while time.monotonic() < end and not ("File" in text and text == before):
        time.sleep(0.05)
        text, before = path.read_text() if path.exists() else "", text
    main, _, stacks = text.partition("\n")
    for block in re.split(r"\n(?=Current thread |Thread )", "\n" + stacks):
        if main and re.match(rf"\n*(Current thread|Thread) 0x0*{main}\b", block):
            frames = re.findall(r'File "(.*?)", line (\d+) in (\S+)', block)
            return _shown([(file, int(line), name) for file, line, name in frames])
    return ""


def _shown(frames: list[tuple[str, int, str]]) -> str:
    """The innermost of frames (innermost first) that is the user's."""
    if not frames:
        return ""
    outside = [f for f in frames if not _is_in_a_package(f[0])]
    others = [f for f in frames if not _is_torchs(f[0])]
    file, line, name = (outside or others or frames)[0]
    source = linecache.getline(file, line).strip()
    source = source if len(source) <= 100 else f"{source[:100]} ..."
    return f" at {os.path.basename(file)}:{line} in {name}" + (f": `{source}`" if source else "")


def _is_torchs(file: str) -> bool:
    return pathlib.PurePath(file).is_relative_to(os.path.dirname(torch.__file__))


def _is_in_a_package(file: str) -> bool:
    path = pathlib.PurePath(os.path.abspath(file))
    ours = (pathlib.Path(__file__).parents[1], pathlib.Path(platform.__file__).parent)
    folders = (sysconfig.get_path("stdlib"), *ours)
    return (
        file.startswith("<")
        or bool({"site-packages", "dist-packages"} & set(path.parts))
        or any(path.is_relative_to(folder) for folder in folders)
    )


def _raised(error: BaseException) -> str:
    """One line of an exception, with the user's line that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    stack = [(f.filename, f.lineno or 0, f.name) for f in reversed(frames)]
    text = " ".join(str(error).split())
    if len(text) > 300:
        text = text[:300] + " ..."
    users = [frame for frame in stack if not _is_in_a_package(frame[0])]
    return f"{type(error).__name__}{': ' if text else ''}{text}{_shown(users)}"


# ---- in a rank


def _main(rank: int, number: int, target: Target, folder: str, pipe: Any) -> None:
    if not os.path.isdir(folder):  # a signal has ended the parent since
        return
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    stack = _stack(pathlib.Path(folder), number, rank).open("w", buffering=1)
    stack.write(f"{threading.get_ident():x}\n")
    faulthandler.register(WHERE, stack, all_threads=True)
    if not target.verbose:  # Gloo and the step may print; standard output is the command's
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    if target.float64:
        torch.set_default_dtype(torch.float64)
    platform.become_rank(rank, number)
    path = os.path.join(folder, f"store_{number}")
    store = dist.FileStore(path, number)  # pyright: ignore[reportPrivateImportUsage] (it is documented)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=number, timeout=FOREVER)
    # For the comparison, so that a collective that a step leaves out does not meet another.
    group = dist.new_group(timeout=FOREVER)
    assert isinstance(group, dist.ProcessGroup)
    function = None

    def at(part: str) -> None:
        pipe.send(("at", part))

    try:
        while True:
            command, layout = pipe.recv()
            try:
                if command == "load":
                    function = load_function(target.name)
                    answer = named(getattr(function, "layouts", None))
                else:
                    answer = _run(function, layout, group, folder, at)
                pipe.send(("done", answer))
            except Refused as error:
                pipe.send(("refused", str(error)))
            except BaseException as error:  # SystemExit too: the parent ends this process
                if target.verbose:
                    traceback.print_exc()
                pipe.send(("refused", _raised(error)))
    finally:  # the parent has ended, and this thread may be the first to see it
        _end(os.getpid())


def _end_with_parent() -> None:
    """A rank whose parent is killed would wait for it forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        _end(os.getpid())


def _end(rank: int) -> None:
    """Kills a rank's process with those that it has started: its group, and where they made
    sessions of their own, its descendants, which Linux tells.
    """
    for pid in _descendants(rank):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    pids, todo = [], [pid]
    while todo:
        new = children.get(todo.pop(), [])
        pids += new
        todo += new
    return pids


def _run(
    function: Any,
    layout: str,
    group: dist.ProcessGroup,
    folder: str,
    at: Callable[[str], None],
) -> compare.Alone | compare.Compared:
    path = os.path.join(folder, "single.safetensors")
    step, measured = measure(function, layout, group, at)
    if layout == SINGLE:
        written(measured, path)
        return compare.alone(measured)
    at(COMPARING)
    return compare.compare(step, measured, read(path), group)


def named(given: Any) -> dict[str, tuple[int, ...]]:
    """The function's `layouts`, with the numbers of processes of each. All are plain strings and
    integers: a member of the function's own enumeration could not be loaded elsewhere.
    """
    said = (
        "the function's layouts must be names, or numbers of processes (1 or more) by name, "
        f"got {given!r}"
    )
    if given is None:
        given = ("default",)
    if isinstance(given, Mapping):
        by_name = {n: (s,) if isinstance(s, int) else s for n, s in given.items()}
    elif isinstance(given, list | tuple):
        by_name = {n: WORLD_SIZES for n in given if isinstance(n, str)}
        if len(by_name) < len(given):
            raise Refused(said)
    else:
        raise Refused(said)
    for name, sizes in by_name.items():
        if not isinstance(name, str) or name == SINGLE or not isinstance(sizes, list | tuple):
            raise Refused(
                said if name != SINGLE else f"the layout {SINGLE!r} is that of one process"
            )
        if not sizes or not all(_is_number(size) for size in sizes):
            raise Refused(said)
    if not by_name:
        raise Refused(said)
    return {
        str.__str__(name): tuple(dict.fromkeys(map(int, sizes))) for name, sizes in by_name.items()
    }


def _is_number(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 1


def load_function(name: str) -> Any:
    """The function of `module:function` or `path/file.py:function`."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise Refused(f"{name!r} must be module:function or path/file.py:function")
    try:
        module = _from_file(where) if where.endswith(".py") else _from_module(where)
    except Refused:
        raise
    except BaseException as error:
        raise Refused(f"{where} cannot be imported: {_raised(error)}") from error
    value = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            near = difflib.get_close_matches(part, dir(value), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise Refused(f"{where} has no {attribute!r}{hint} (it has {_functions(module)})")
        value = getattr(value, part)
    if not callable(value):
        raise Refused(f"{name} is of type {type(value).__name__}; it must be a function")
    return value


def _functions(module: Any) -> str:
    """Names of what it defines and may be meant."""
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and not isinstance(value, type) and not name.startswith("_")
        if hasattr(value, "layouts") or getattr(value, "__module__", None) == module.__name__
    ]
    return ", ".join(own) or "no function of its own"


def _from_file(where: str) -> Any:
    path = pathlib.Path(where).resolve()
    if not path.is_file():
        raise Refused(f"{where}: no such file")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _from_module(where: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            raise Refused(f"there is no module {error.name!r}") from error
        raise
