"""`tilewright gate`: compiles Triton kernels for several GPUs and reads the machine code.

Reported are registers, spills, stack, shared memory, and the width of accesses to global memory,
for sm_90, sm_100 and sm_120. Triton's own ptxas compiles, and no GPU is needed. A kernel that does
not compile or that needs more shared memory than the GPU has fails; limits fail more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tilewright.core import platform
from tilewright_lab.cuda_stand_in import stand_in
from tilewright_lab.emulate.command import add_call_options, attempted, number_of, prepared
from tilewright_lab.emulator.driver import Driver, active_driver, installed
from tilewright_lab.emulator.faults import Fault
from tilewright_lab.gate import machine_code
from tilewright_lab.gate import verdict as gate_verdict
from tilewright_lab.gate.compilers import (
    ARCHS,
    SHARED_LIMIT,
    Facts,
    LaunchSpec,
    Result,
    compile_all,
    paths,
)
from tilewright_lab.kernel_target import Rejected


class _Recorder(Driver):
    """Launches nothing. Its kernels are apart from those that the emulator compiles."""

    def get_current_device(self):
        return -self.arch


@contextlib.contextmanager
def recorded(arch: int, all_configs: bool = False) -> Iterator[list[LaunchSpec]]:
    """Inside, host functions launch nothing; yields what they would have compiled."""
    from triton.runtime.jit import JITFunction

    specs: list[LaunchSpec] = []
    noted: list[tuple[dict, Any]] = []

    def note(kernel, key, signature, device, constexprs, options, attrs, *_):
        specs.append(spec_of(kernel, signature, constexprs, options, attrs))
        cache = kernel.device_caches[device][0]
        noted.append((cache, key))
        dummy = cache[key] = SimpleNamespace(
            run=lambda *_: None,
            launch_metadata=lambda *_: None,
            function=None,
            packed_metadata=None,
            metadata=SimpleNamespace(shared=0),
        )
        return dummy

    driver = _Recorder(arch)
    driver.all_configs = all_configs
    with (
        stand_in(arch),
        installed(driver),
        mock.patch.object(JITFunction, "_do_compile", note),
    ):
        try:
            yield specs
        finally:
            for cache, key in noted:  # another call of this process is to find these launches
                cache.pop(key, None)


def spec_of(kernel, signature, constexprs, options, attrs) -> LaunchSpec:
    """What the compile gate compiles for a launch."""
    from triton.compiler import make_backend

    elements = paths(signature)
    names = {path: name for name, (path, _) in elements.items()}
    aligned = [
        names[path]
        for path, given in attrs.items()
        if ["tt.divisibility", 16] in [list(a) for a in given]
    ]
    pointers = [name for name, (_, kind) in elements.items() if kind.startswith("*")]
    defaults = make_backend(active_driver().get_current_target()).parse_options({})
    # Fusion as Triton's version bound it, which may be another choice than our launchers make.
    chosen = {"enable_fp_fusion": options.enable_fp_fusion} | {
        f.name: value
        for f in fields(options)
        if f.name not in ("num_warps", "num_stages")
        and (value := getattr(options, f.name)) != getattr(defaults, f.name)
    }
    return LaunchSpec(
        kernel,
        kernel.fn.__name__,
        {n: kind for n, kind in signature.items() if kind != "constexpr"},
        {names[path]: value for path, value in constexprs.items()},
        num_warps=options.num_warps,
        num_stages=options.num_stages,
        divisible=tuple(n for n in aligned if n not in pointers),
        min_arch=0,
        options=chosen,
        load=0,
        store=0,
        misaligned=tuple(n for n in pointers if n not in aligned),
    )


# ---- the verdict


@dataclass(frozen=True)
class Limits:
    """What is accepted; None: anything."""

    registers: int | None = None
    shared: int | None = None
    spills: bool = True
    stack: bool = True
    load: int | None = None
    store: int | None = None


def breaks(result: Result, limits: Limits) -> Iterator[str]:
    """Why a compiled kernel fails, one sentence each."""
    f = result.facts
    if f is None:
        yield f"does not compile: {' '.join(result.error.split())}"
        return
    if f.shared > (most := SHARED_LIMIT[result.arch]):
        yield f"needs {f.shared} bytes of shared memory, sm_{result.arch} has {most}"
    for what, have, accepted in (
        ("registers a thread", f.registers, limits.registers),
        ("bytes of shared memory", f.shared, limits.shared),
        ("bytes spilled a thread", f.spill, None if limits.spills else 0),
        ("bytes of stack and local memory a thread", f.local, None if limits.stack else 0),
    ):
        if accepted is not None and have > accepted:
            yield f"has {have} {what}; accepted: {accepted}"
    for kind, accepted in (("load", limits.load), ("store", limits.store)):
        have = widest(f, kind)
        if accepted is not None and 0 < have < accepted:  # 0: it has none
            yield f"its widest global {kind} has {have} bits; accepted: {accepted} or more"


def widest(facts: Facts, kind: str) -> int:
    """Bits of the widest access, in machine code where there is a disassembler."""
    machine = getattr(facts, f"sass_{kind}")
    return getattr(facts, kind) if machine is None else machine


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="tilewright gate",
        description=" ".join(__doc__.split(":", 1)[1].split()),
        epilog="`tilewright gate --registry` compiles the kernels of every op of the registry "
        "instead, and compares them with committed budgets; it has options of its own (--registry "
        "--help).",
    )
    add_call_options(parser)
    add = parser.add_argument
    add(
        "--arch",
        action="append",
        type=int,
        choices=ARCHS,
        help="only this compute capability (repeatable)",
    )
    add(
        "--configs",
        choices=("first", "all"),
        default="first",
        help="which configurations of an autotuned kernel are compiled (default: the first)",
    )
    add("--max-registers", type=int, metavar="N", help="registers of a thread that are accepted")
    add("--max-shared", type=int, metavar="BYTES", help="shared memory that is accepted")
    add("--no-spills", action="store_true", help="fail on spilled registers")
    add("--no-stack", action="store_true", help="fail on stack and local memory")
    add("--min-load", type=int, metavar="BITS", help="of the widest load from global memory")
    add("--min-store", type=int, metavar="BITS", help="of the widest store to global memory")
    return parser


def collected(
    args: argparse.Namespace, archs: tuple[int, ...]
) -> dict[str, tuple[LaunchSpec, set]]:
    """What a call compiles, by name, and for which of the architectures."""
    by_name: dict[str, tuple[LaunchSpec, set]] = {}
    names: dict[str, str] = {}  # by what distinguishes it
    for arch in archs:
        with recorded(arch, args.configs == "all") as specs:
            call, _ = prepared(args, grid="1")
            with contextlib.suppress(Fault):
                attempted(call.run, args)
        for spec in specs:
            same = repr((spec.kernel, spec.signature, spec.constexprs, spec.num_warps))
            same += repr((spec.num_stages, spec.divisible, spec.misaligned, spec.options))
            if same not in names:
                number = sum(n.split(" #")[0] == spec.label for n in by_name)
                names[same] = f"{spec.label} #{number + 1}" if number else spec.label
                by_name[names[same]] = spec, set()
            by_name[names[same]][1].add(arch)
    if not by_name:
        raise Rejected(f"{args.target} launched no Triton kernel")
    return by_name


def main(arguments: list[str]) -> int:
    """Exit code. 0: passed; 1: a kernel fails; 2: bad input."""
    args = _parser().parse_args(arguments)
    archs = tuple(sorted(set(args.arch or ARCHS)))
    limits = Limits(
        args.max_registers,
        args.max_shared,
        not args.no_spills,
        not args.no_stack,
        args.min_load,
        args.min_store,
    )
    try:
        if missing := platform.no_module("triton"):
            raise Rejected(missing)
        if platform.interpreting():
            raise Rejected("TRITON_INTERPRET is set, and kernels are then never compiled; unset it")
        by_name = collected(args, archs)
    except Rejected as error:
        print(f"tilewright gate: {error}", file=sys.stderr)
        return 2
    specs = {name: spec for name, (spec, _) in by_name.items()}
    tasks = [(name, arch) for name, (_, known) in by_name.items() for arch in sorted(known)]
    jobs = min(len(tasks), len(os.sched_getaffinity(0)))
    with contextlib.redirect_stdout(sys.stderr):
        results = compile_all(specs, tasks, jobs)
    failures = [f"{r.key}: {what}" for r in results for what in breaks(r, limits)]
    notes = [
        f"sm_{a}: {reason}; widths are those of PTX"
        for a in archs
        if (reason := machine_code.cannot_disassemble(a))
    ]
    if args.json:
        rows = [asdict(r) for r in results]
        print(json.dumps({"results": rows, "breaks": failures, "notes": notes}, indent=1))
    else:
        print(gate_verdict.table(results, archs))
        for line in (*notes, *(f"BREAK {line}" for line in failures)):
            print(line)
        numbers = (specs, "kernel"), (results, "compilation"), (failures, "break")
        print(", ".join(number_of(len(of), noun) for of, noun in numbers))
    return 1 if failures else 0
