"""Rehearses a first call on a GPU without one, and estimates the clock of each of its parts.

    python -m bench rehearse [--minutes 9] [--arch 90]

The suite's own units run on a simulated device (`tilewright_lab.pretend`): inputs are made, the
contract's and the clock's calls take the ops' GPU paths down to Triton's `JITFunction.run`, and
nothing is computed. What they do is counted: processes, launches, kernels that are loaded from the
cache of `gpu-cache` and those that it lacks, the truth in float64. The costs below turn counts into
seconds, and the suite's shares say which units a call of these minutes reaches. An estimate, which
shows that the plan fits, and not how fast a kernel is.
"""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from bench import commands, gpu_cache
from bench.stages import questions
from bench.suite import FIRST, GROUPS, SETTINGS, SUITE, processes, units
from tilewright import selection
from tilewright.bench import contract, pieces, run, runner, store, timing
from tilewright.bench import units as timed
from tilewright.bench.options import at_least
from tilewright.bench.plan import Chosen
from tilewright.bench.runner import Unit, failures
from tilewright.bench.units import DTYPES
from tilewright.core import registry
from tilewright_lab import pretend

# Seconds, on a machine of 16 cores and one H200; each is more rather than less.
SCRIPT = 5.0  # unpacking the cache and correcting the paths in it
# A process: Python, PyTorch and Triton, the plan, CUDA's context, a buffer to flush L2. (2 s here,
# of which a GPU's context is no part.) The first one reads them from a cold disk; sixteen together
# took half a minute on an H100's machine.
START, COLD, TOGETHER = 8.0, 20.0, 30.0
COMPILE = 2.5  # a kernel that is not in the cache: 0.3 to 3.6 s here
LOAD = 0.03  # a kernel from the cache: two files and a module
LAUNCHER = 0.25  # Triton's launcher in C, for arguments of new types: 0.22 s of gcc here
UNIT = 0.8  # nvidia-smi, freeing memory, collecting garbage, a file
LAUNCH = 50e-6  # of the host, with PyTorch's operators around it
FLUSH = 0.4e-3  # of L2, until the host has launched a call
ROOF = 8.0  # 12 copies of 2 GiB, 24 products, and float32's at full precision
HOST = 3.0  # an op's six depths, twice, 15 rounds of 4 ms, and its kernels
TOOL = 45.0  # a process under compute-sanitizer or ncu, which imports PyTorch several times slower
# Rates of an H200 (measured: copy 4.3e12 bytes/s, product 790e12 FLOP/s), and the share of them
# that a kernel reaches at least.
BYTES, FLOPS, SHARE = 4.3e12, 790e12, 0.4
# The truth: the twin in float64 and in the case's dtype, as some thirty passes over four times the
# bytes, and its products at an H200's float64 rate (67e12 FLOP/s by the data sheet).
TRUTH_PASSES, TRUTH_FLOPS = 30 * 4, 40e12
# The truth comes in blocks of rows, heads or experts: some dozens, with some dozens of operators.
PIECES = 1.0


@dataclass
class Ledger:
    """What a process, and the machine, have done.

    seconds, launches, loaded, compiled: those of the current unit.
    cached: the kernels in Triton's cache; signatures: those that have a launcher.
    """

    seconds: float = 0.0
    launches: int = 0
    loaded: int = 0
    compiled: list[str] = field(default_factory=list)
    case: registry.Case | None = None
    cached: set[tuple[str, str]] = field(default_factory=set)
    signatures: set[str] = field(default_factory=set)
    kernels: dict[int, Any] = field(default_factory=dict)  # of this process

    def begin(self, case: registry.Case | None) -> None:
        self.seconds, self.launches, self.loaded, self.compiled = UNIT, 0, 0, []
        self.case = case

    def new_process(self) -> None:
        """Kernels are loaded again."""
        for kernel in self.kernels.values():
            kernel.device_caches.clear()
        self.kernels.clear()

    def floor(self, share: float = SHARE) -> float:
        """Seconds of the case's forward and backward."""
        cost = self.case.cost(2) if self.case else registry.Cost()
        moved = (cost.forward_bytes + cost.backward_bytes) / BYTES
        return max(moved, (cost.forward_flops + cost.backward_flops) / FLOPS) / share

    def requested(self, kernel: Any, key: str, signature: Any) -> None:
        """Triton asks for a kernel that this process has not loaded."""
        self.kernels[id(kernel)] = kernel
        name = kernel.fn.__name__
        if (name, key) in self.cached:
            self.loaded += 1
            self.seconds += LOAD
        else:
            self.cached.add((name, key))
            self.compiled.append(name)
            self.seconds += COMPILE
        types = repr(sorted(dict(signature).items()))
        if types not in self.signatures:
            self.signatures.add(types)
            self.seconds += LAUNCHER


class _Clock:
    """Counts what `timing.CudaClock` does; each call is made once."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger

    def prepare(self, fn) -> int:
        fn()
        self._calls(fn, 1 + timing.CUDA_CALLS)
        return 1 if self._ledger.floor() > timing.SLOW_CALL else timing.CUDA_CALLS

    def sample(self, fn, calls: int) -> float:
        self._calls(fn, calls)
        return self._ledger.floor()

    def host_seconds(self, fn) -> float:
        return LAUNCH

    def isolated_times(self, fn):
        raise AssertionError("goals and questions take no profile")

    def _calls(self, fn, count: int) -> None:
        before = 2 if isinstance(fn, timing.After) else 1
        self._ledger.seconds += count * (FLUSH + before * (LAUNCH + self._ledger.floor()))


@contextlib.contextmanager
def _counting(ledger: Ledger, arch: int, name: str | None) -> Iterator[None]:
    """Inside, units run on the simulated device, and the ledger counts."""
    from triton.runtime.jit import JITFunction

    clock = _Clock(ledger)

    def do_compile(kernel, key, signature, device, *rest):
        ledger.requested(kernel, key, signature)
        return pretend.not_compiled(kernel, key, signature, device, *rest)

    launched = JITFunction.run

    def launch(kernel, *args, **options):
        ledger.launches += 1
        ledger.seconds += LAUNCH
        return launched(kernel, *args, **options)

    def reference(op, kwargs, dtype, layout="contiguous", cut=None):
        cost = ledger.case.cost(2) if ledger.case else registry.Cost()
        moved = TRUTH_PASSES * (cost.forward_bytes + cost.backward_bytes) / BYTES
        products = (cost.forward_flops + cost.backward_flops) / TRUTH_FLOPS
        ledger.seconds += moved + products + (PIECES if cut else 0.0)
        return SimpleNamespace(sample=None)

    def judge(op, implementation, kwargs, by):
        contract.run(op, implementation, kwargs)
        # Errors are sums over all results in float64.
        ledger.seconds += ledger.floor() + 10 * ledger.floor(1.0)
        return []

    with contextlib.ExitStack() as stack:
        stack.enter_context(pretend.gpu(arch, name, compiles=False))
        for where, what, value in (
            (JITFunction, "_do_compile", do_compile),
            (JITFunction, "run", launch),
            (contract, "reference", reference),
            (pieces, "of", lambda op, kwargs: True),  # its numbers of blocks depend on values
            (contract, "judge", judge),
            (contract, "poisoned", contextlib.nullcontext),
            (timed, "clock", lambda *_: clock),
            (questions, "clock", lambda *_: clock),
            (run, "free", lambda *_, **__: None),
            (run, "peak_mib", lambda fn: 0.0),
        ):
            stack.enter_context(mock.patch.object(where, what, value))
        yield


def _case_of(unit: Unit) -> registry.Case | None:
    """The case that a unit's name says."""
    name = unit.name.partition("/")[2]
    op = selection.operations().get(name.partition(".")[0])
    tag = "contract" if unit.name.startswith("smoke/") else "cuda"
    rest = name.partition(".")[2]
    cases = (
        [c for c in op.cases if tag in c.tags and f"{rest}.".startswith(f"{c.name}.")] if op else []
    )
    return max(cases, key=lambda c: len(c.name), default=None)


# Seconds of a unit of stages that only a real device can run.
FIXED = {"roofline": ROOF, "host": HOST, "sanitize": TOOL, "counters": TOOL}


@dataclass
class Part:
    """A stage of the call: when it runs, and what of it.

    begin, end: seconds since the call began.
    problems: those of units that could not be rehearsed.
    """

    stage: str
    begin: float
    end: float
    units: int = 0
    reached: int = 0
    launches: int = 0
    loaded: int = 0
    compiled: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def rehearse(
    minutes: float = 9.0,
    stages: Sequence[str] = FIRST,
    arch: int = 90,
    name: str | None = None,
    cores: int = 16,
) -> list[Part]:
    """The parts of a call of `bench/gpu.sh` with this many minutes, whose cache holds what
    `gpu-cache` compiles; in a process where Triton compiles (TRITON_INTERPRET=0).
    """
    ledger, ops = Ledger(), list(selection.operations().values())
    with tempfile.TemporaryDirectory() as folder, _counting(ledger, arch, name):
        for call in gpu_cache.calls([w for w in gpu_cache.WHAT if w != "search"], ops):
            # NotImplementedError: it reads values, which are not there.
            with contextlib.suppress(NotImplementedError, registry.ImplementationUnavailable):
                call.run()
        out = pathlib.Path(folder)
        roof = timing.Roofline(BYTES, {"bfloat16": FLOPS}).asdict()
        store.append(out / store.FILE, "roofline", {"roofline": roof})
        ledger.signatures.clear()
        chosen = Chosen("cuda", SETTINGS, out)
        plan = {s: units(s, ops, DTYPES, chosen) for s in stages}
        until = 60 * minutes - 30.0 - runner.FINISH
        limits = SUITE.ends(stages, SCRIPT + COLD, until)
        now, parts = SCRIPT + COLD, []
        for group in GROUPS:
            mine = [s for s in group if s in stages]
            if not mine:
                continue
            with mock.patch("os.cpu_count", lambda: cores):
                workers = processes(group, "cuda", None)
            clocks = [now + (START if workers == 1 else TOGETHER)] * workers
            for stage in mine:
                parts.append(_part(stage, plan[stage], ledger, clocks, (limits[stage], until)))
            now = max(clocks)
    return parts


def _part(
    stage: str,
    units_: Sequence[Unit],
    ledger: Ledger,
    clocks: list[float],
    limits: tuple[float, float],
) -> Part:
    """Runs the units of a stage in turn on as many processes as there are clocks, and advances
    these.

    limits: when no unit begins any more, and when the one that runs is killed.
    """
    part = Part(stage, min(clocks), max(clocks), len(units_))
    for k in range(len(clocks)):
        if len(clocks) > 1:
            ledger.new_process()
        for unit in units_[k :: len(clocks)]:
            if clocks[k] >= limits[0]:
                break
            ledger.begin(_case_of(unit))
            if stage in FIXED:
                ledger.seconds += FIXED[stage]
            else:
                part.problems += _problems(unit)
            clocks[k] = min(clocks[k] + ledger.seconds, limits[1])
            part.reached += clocks[k] < limits[1]
            part.launches += ledger.launches
            part.loaded += ledger.loaded
            part.compiled += ledger.compiled
    part.end = max(clocks)
    return part


# PyTorch's words where an implementation reads a tensor's values on the host, as packed attention
# by PyTorch reads where documents end; tensors here have none.
READS_VALUES = "Cannot copy out of meta tensor"


def _problems(unit: Unit) -> list[str]:
    """Runs a unit; why it, or one of our implementations in it, could not be run here."""
    try:
        return [f"{unit.name}: {line}" for line in failures(unit.make())]
    except Exception as error:  # the others are still rehearsed
        return [f"{unit.name}: {timing.first_line(error)}"]


def table(parts: Sequence[Part]) -> str:
    """The parts as a table in Markdown."""
    lines = ["| stage | from, s | to, s | units | launches | kernels loaded | compiled |"]
    lines.append("|---|---|---|---|---|---|---|")
    lines += [
        f"| `{p.stage}` | {p.begin:.0f} | {p.end:.0f} | {p.reached} of {p.units} | {p.launches} | "
        f"{p.loaded} | {len(p.compiled)} |"
        for p in parts
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1: a unit failed or compiles; 2: nothing can be rehearsed here, with the reason."""
    p = commands.parser("rehearse", __doc__)
    p.add_argument("--minutes", type=at_least(1, float), default=9.0)
    p.add_argument("--arch", type=int, choices=list(pretend.DEVICES), default=90)
    p.add_argument("--name", help="the device's (default: as for gpu-cache)")
    args = p.parse_args(argv)
    if reason := pretend.no_compiling():
        print(f"rehearse: {reason}")
        return 2
    parts = rehearse(args.minutes, arch=args.arch, name=args.name)
    print(table(parts))
    lines = [
        line
        for part in parts
        for line in (*part.problems, *(f"{part.stage}: compiles {n}" for n in part.compiled))
    ]
    for line in lines:
        print(f"{line} (not rehearsed: it reads values)" if READS_VALUES in line else line)
    return int(any(READS_VALUES not in line for line in lines))
