"""`tilewright emulate`: runs Triton kernels on a CPU as compiled for a GPU, and checks each access.

The kernels are compiled to PTX, which is executed for every thread of the launch. Reported are
accesses outside tensors, misaligned accesses, races, reads of memory that nothing has written,
sectors of global memory and bank conflicts, and, with a reference, the error of each result.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from tilewright.bench.tensors import convert
from tilewright.core import platform
from tilewright.core.files import save_tensors
from tilewright_lab.cuda_stand_in import Unset, stand_in
from tilewright_lab.emulate.emulation import (
    Report,
    Results,
    arguments_of,
    compared,
    differentiable,
    emulate,
    interpreted,
    kernels_of,
    over_limits,
    same_bits,
)
from tilewright_lab.emulator.driver import Driver, installed
from tilewright_lab.emulator.faults import Fault, Unsupported
from tilewright_lab.emulator.undefined import FILLS
from tilewright_lab.kernel_target import Call, Rejected, call_of, load, one_line

ARCHS = (80, 90, 100, 120)
# Faults after which a launch can go on.
ALLOWED = ("race", "uninitialized", "undefined")
# Found by the way: the compiler's doing, which the source cannot change, and why that is no fault.
NOTED = {
    "replicas": "nothing to do: the compiler gave several threads copies of one element, which may "
    "differ by rounding; the line may be in Triton's own functions, such as tl.sum"
}
INTERPRETER = "interpreter"
MOST = 1_000_000


def add_call_options(parser: argparse.ArgumentParser) -> None:
    """The options that `emulate` and `gate` share: the target, its arguments, its launch."""
    add = parser.add_argument
    add(
        "target",
        metavar="FILE:NAME",
        help="a function that launches kernels, or a @triton.jit kernel; FILE is a Python file or "
        "a module that can be imported",
    )
    add(
        "--arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument: tensor(f32, [128, 64]), a number, a string (repeatable)",
    )
    add(
        "--inputs",
        metavar="[FILE:]FUNCTION",
        help="a function that returns the arguments: a dictionary by name, or a tuple",
    )
    add(
        "--constexpr", action="append", default=[], metavar="NAME=VALUE", help="a kernel's constant"
    )
    add("--grid", help="of a kernel: sizes over its arguments, such as 'cdiv(n, BLOCK)' or '4, 2'")
    add("--num-warps", type=int, help="of a kernel")
    add("--num-stages", type=int, help="of a kernel")
    add("--seed", type=int, default=0, help="of random arguments (default: 0)")
    add("--json", action="store_true", help="print one JSON object")


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="tilewright emulate", description=" ".join(__doc__.split(":", 1)[1].split())
    )
    add_call_options(parser)
    add = parser.add_argument
    add(
        "--arch",
        type=int,
        default=90,
        choices=ARCHS,
        help="compute capability to compile for (default: 90)",
    )
    add(
        "--reference",
        metavar="[FILE:]FUNCTION",
        help="a function of the same arguments, run in float64 as truth and in their dtypes as "
        f"the yardstick; {INTERPRETER!r}: the same call in Triton's interpreter",
    )
    add("--backward", action="store_true", help="also run the function's gradient")
    add(
        "--configs",
        choices=("first", "all"),
        default="first",
        help="which configurations of an autotuned kernel run (default: the first that a GPU of "
        "this architecture can launch)",
    )
    add(
        "--allow",
        action="append",
        default=[],
        choices=ALLOWED,
        help="report such findings without failing, and go on after them (repeatable)",
    )
    add("--max-conflicts", type=int, metavar="N", help="fail on more bank conflicts in a kernel")
    add(
        "--max-sectors",
        type=float,
        metavar="RATIO",
        help="fail if warps' accesses take more than RATIO times the sectors of 32 bytes that their "
        "bytes need",
    )
    add(
        "--max-instructions",
        type=int,
        default=MOST,
        metavar="N",
        help=f"end a program that executes more instructions: it may never end (default: {MOST})",
    )
    add("--results-to", help=argparse.SUPPRESS)  # the interpreter's process writes its results
    return parser


@contextlib.contextmanager
def emulated_gpu(arch: int, **options: Any) -> Iterator[tuple[Driver, Unset]]:
    """Inside, host functions launch Triton kernels on the emulated GPU."""
    with stand_in(arch) as unset, installed(Driver(arch, keeps=False, **options)) as driver:
        yield driver, unset


def prepared(args: argparse.Namespace, grid: str | None = None) -> tuple[Call, pathlib.Path | None]:
    """The call that the options describe, checked; and the file of the target.

    grid: the grid of a kernel, if the options name none.
    """
    target, file = load(args.target)
    torch.manual_seed(args.seed)
    inputs = load(args.inputs, file)[0] if args.inputs else None
    call = call_of(target, args.target, args.arg, args.constexpr, inputs)
    options = {"num_warps": args.num_warps, "num_stages": args.num_stages}
    call.options = {n: v for n, v in options.items() if v is not None}
    call.grid = args.grid or (grid if call.kernel is not None else None)
    if call.kernel is None and (
        unused := [*args.constexpr, *call.options, *filter(None, [args.grid])]
    ):
        raise Rejected(
            f"{args.target} is a function, which chooses its launches: {unused[0]} is for a kernel"
        )
    call.check(args.target)
    return call, file


def attempted(call_it, args: argparse.Namespace) -> Any:
    """Calls it; what Triton or the function raises becomes one sentence."""
    from triton.compiler.errors import CompilationError

    try:
        with contextlib.redirect_stdout(sys.stderr):  # --json prints one object
            return call_it()
    except (Fault, Unsupported, Rejected, KeyboardInterrupt):
        raise
    except BaseException as error:  # sys.exit() too: nothing more would be checked
        cause: BaseException | None = error
        while cause is not None:  # the innermost: a callee's error names its own line
            if isinstance(cause, CompilationError):
                error = cause
            cause = cause.__cause__
        if isinstance(error, CompilationError):
            raise Rejected(f"{args.target} does not compile: {reason(error)}") from error
        raise Rejected(f"{args.target} fails: {one_line(error)}") from error


def reason(error: Any) -> str:
    """Why Triton does not compile a kernel, and the line of it."""
    why = str(error.error_message or error).strip().splitlines()
    number = getattr(error.node, "lineno", 0)
    lines = (error.src or "").split("\n")
    where = (
        f" (line {number} of the kernel: `{lines[number - 1].strip()}`)"
        if (0 < number <= len(lines))
        else ""
    )
    return f"{why[-1] if why else 'no reason given'}{where}"


def run(args: argparse.Namespace, words: list[str]) -> Report:
    """The report of one command."""
    with emulated_gpu(args.arch) as (driver, unset):
        driver.counts, driver.all_configs = {}, args.configs == "all"
        driver.tolerated = frozenset((*NOTED, *args.allow))
        driver.most = args.max_instructions
        call, file = prepared(args)
        if args.backward:
            differentiable(call)
        reference = None
        if args.reference and args.reference != INTERPRETER:
            reference = load(args.reference, file)[0]
        kept = convert(arguments_of(call), None)
        report, results = Report(args.arch), None
        with contextlib.suppress(Fault):  # the driver has it too
            results = attempted(lambda: emulate(call, driver, unset, args.backward), args)
        report.kernels = kernels_of(driver)
        limits = over_limits(report.kernels, args.max_conflicts, args.max_sectors)
        once = {(f.kind, f.kernel, f.line or f.what): f for f in driver.faults}
        for fault in (*once.values(), *limits):
            (report.allowed if fault.kind in (*args.allow, *NOTED) else report.breaks).append(fault)
        if not report.kernels and not report.breaks:
            raise Rejected(f"{args.target} launched no Triton kernel")
        if results is not None and args.reference:
            report.errors = (
                interpreted(_without_reference(words), results)
                if reference is None
                else compared(call, reference, results, kept, args.backward)
            )
    fills = FILLS if driver.undefined else ()
    if results is not None and (
        fault := next(filter(None, (_undefined(args, results, fill) for fill in fills)), None)
    ):
        (report.allowed if fault.kind in args.allow else report.breaks).append(fault)
    return report


def _undefined(args: argparse.Namespace, results: Results, fill: str) -> Fault | None:
    """A fault if the results are others once masked loads without `other` give what `fill` says,
    not zero.
    """
    with emulated_gpu(args.arch) as (driver, unset):
        driver.fill, driver.all_configs = fill, args.configs == "all"
        driver.tolerated, driver.most = frozenset((*NOTED, *ALLOWED)), args.max_instructions
        call, _ = prepared(args)
        if args.backward:
            differentiable(call)
        try:
            other = attempted(lambda: emulate(call, driver, unset, args.backward), args).tensors
        except (Fault, Rejected) as error:
            reached = f"the launch ends otherwise ({error})"
        else:
            names = (n for n, t in results.tensors.items() if not same_bits(t, other[n]))
            reached = ", ".join(names)
            if not reached:
                return None
            reached = f"{reached} changes"
    fault = Fault(
        "undefined",
        f"{reached} with what a masked load without `other` gives where its mask is false, which "
        "Triton does not define: give other=",
    )
    fault.kernel = ", ".join(driver.undefined)
    lines = {f"{file}:{line}" for loads in driver.undefined.values() for file, line in loads}
    fault.line = ", ".join(sorted(lines))
    return fault


def _without_reference(words: list[str]) -> list[str]:
    """The same command without --reference and --json."""
    left, skip = [], False
    for word in words:
        if word == "--reference":
            skip = True
        elif skip:
            skip = False
        elif not word.startswith("--reference=") and word != "--json":
            left.append(word)
    return left


def interpret(args: argparse.Namespace) -> None:
    """Runs the call in Triton's interpreter and saves its results, for `interpreted`."""
    with stand_in(args.arch) as unset:
        call, _ = prepared(args)
        if args.backward:
            differentiable(call)
        results = attempted(lambda: emulate(call, Driver(args.arch), unset, args.backward), args)
        given = arguments_of(call).items()
        # Every argument is saved: the other process knows which were written.
        after = {n: t.detach() for n, t in given if isinstance(t, torch.Tensor)}
        save_tensors(args.results_to, after | results.tensors)


def number_of(n: int, noun: str) -> str:
    """ "1 launch", "2 launches", "no breaks"."""
    many = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{n or 'no'} {noun if n == 1 else many}"


def shown(report: Report) -> str:
    """The report as text."""
    out = io.StringIO()
    columns = (
        "kernel",
        "launches",
        "programs",
        "threads",
        "shared",
        "sectors read",
        "written",
        "conflicts",
        "instructions",
    )
    rows: list[tuple[str, ...]] = [columns]
    for k in report.kernels:
        sectors = [
            f"{k['requested'][kind]} ({k['requested'][kind] / least:.2f})" if least else "0"
            for kind, least in k["needed"].items()
        ]
        issued = str(sum(k["issued"].values()))
        rows.append(
            (
                k["kernel"],
                *(str(k[n]) for n in ("launches", "programs", "threads", "shared")),
                *sectors,
                str(k["conflicts"]),
                issued,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if report.kernels else ():
        cells = (
            c.ljust(w) if not i else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells), file=out)
    for k in report.kernels:
        for line, number in k["conflicts by line"].items():
            if line:
                print(f"{number} bank conflicts of {k['kernel']} at {line}", file=out)
    for f in report.errors:
        text = "BREAK" if not f.holds else "error"
        said = f"{f.error:.2e} at {list(f.where)}, accepted {f.budget:.2e}"
        if f.why or (f.holds and not f.error):
            said = f.why or "none"
        print(f"{text} {f.name}: {said}", file=out)
    for fault in report.allowed:
        word = "note" if fault.kind in NOTED else "allowed"
        print(f"{word} {fault.kind}: {fault}", file=out)
    for kind in dict.fromkeys(f.kind for f in report.allowed if f.kind in NOTED):
        print(f"    {NOTED[kind]}", file=out)
    for fault in report.breaks:
        print(f"BREAK {fault.kind}: {fault}", file=out)
    number = len(report.breaks) + sum(not f.holds for f in report.errors)
    launches = number_of(sum(k["launches"] for k in report.kernels), "launch")
    print(f"sm_{report.arch}: {launches}, {number_of(number, 'break')}", file=out, end="")
    return out.getvalue()


@platform.command
def main(arguments: list[str]) -> int:
    """Exit code. 0: no break; 1: a break; 2: bad input, or what the emulator does not have."""
    args = _parser().parse_args(arguments)
    try:
        if missing := platform.no_module("triton"):
            raise Rejected(missing)
        if args.results_to:
            interpret(args)
            return 0
        if platform.interpreting():
            raise Rejected("TRITON_INTERPRET is set, and kernels are then never compiled; unset it")
        report = run(args, arguments)
    except (Rejected, Unsupported) as error:
        print(f"tilewright emulate: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.facts(), indent=1) if args.json else shown(report))
    return 1 if report.breaks or any(not f.holds for f in report.errors) else 0
