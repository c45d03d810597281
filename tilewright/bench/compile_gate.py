"""The compile gate: every GPU kernel of the registry, compiled for the GPUs it is meant for,
without one.

The launches of each implementation (`tunables`, `gate`) give specs: for their heuristics' constants
and for all constants in the committed tables. Each spec is compiled for every architecture. Red
are: a kernel that does not compile; spilled registers or any local memory; more shared memory than
the GPU has; what a spec needs (wide loads and stores, matrix or copy instructions) and PTX or
machine code does not have; and anything worse than the committed budget: more registers or shared
memory, more instructions an element in a streaming kernel, narrower global loads or stores, a
smaller share of wide ones, a matrix or copy instruction no longer used, a kernel without a budget,
a budget without a kernel. A budget belongs to one version of one compiler
(budgets/triton-3.9.0.json); with a version that has no such file, only the rules that need none are
checked.

A budget names the digest of the source, constants and needs that it was written for. Kernels whose
digest is another are compiled, and of the rest a tenth, drawn at random; with --all, everything.

    python -m tilewright.bench compile-gate [--op OP] [--arch 90] [--all] [--update] [--space]
    [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import io
import json
import multiprocessing
import os
import pathlib
import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from typing import Any

from tilewright import platform
from tilewright.bench import gate_cute, kernel_digest, machine_code, ptx_loops
from tilewright.kernels import tuning
from tilewright.kernels.spec import CuteSpec, KernelSpec
from tilewright.kernels.tuning import Tunable
from tilewright.registry import Op, operations

BUDGETS = pathlib.Path(__file__).parent / "budgets"

# Shared memory that one block may ask for, bytes (CUDA C++ programming guide, technical
# specifications per compute capability). The compiler does not check it; a launch would.
SHARED_LIMIT = {90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
ARCHS = tuple(SHARED_LIMIT)


@dataclass(frozen=True)
class Facts:
    """What one compilation gave.

    registers: a thread.   spill, local: bytes a thread spills, and bytes of stack and local memory
    it has.
    shared: bytes a block.   load, store, uses: as `machine_code.ptx_facts` reads them from PTX.
    The rest: as `machine_code.sass_facts` reads it from machine code; None where nothing can
    disassemble it.
    per_element: instructions a thread divided by its elements, of specs that say how many elements
    a program takes.
    loop_divisions: divisions in loops, as `ptx_loops.divisions` counts them in PTX, of specs that
    may have none.
    """

    registers: int
    spill: int
    local: int
    shared: int
    load: int
    store: int
    uses: tuple[str, ...]
    sass_load: int | None = None
    sass_store: int | None = None
    wide_loads: int | None = None
    wide_stores: int | None = None
    local_instructions: int | None = None
    sass_uses: tuple[str, ...] | None = None
    instructions: int | None = None
    per_element: float | None = None
    loop_divisions: int | None = None


@dataclass(frozen=True)
class Result:
    """One kernel for one architecture: its facts, or why it did not compile."""

    name: str
    arch: int
    facts: Facts | None
    error: str = ""

    @property
    def key(self) -> str:
        return key_of(self.name, self.arch)


def key_of(name: str, arch: int) -> str:
    return f"{name} sm_{arch}"


@dataclass(frozen=True)
class Compiler:
    """What compiles one type of spec. Another type (CuTe DSL, CUDA C++) is one more entry of
    COMPILERS.

    missing: None, or the sentence that says why this compiler cannot run.   version: names its
    budget file.
    compile: (spec, arch) -> the facts without those of the machine code, and the cubin, which is
    disassembled later, many at once; raises what the compiler raises.
    identity: what makes two specs the same compilation and the same needs.   source: the digest of
    what is compiled.
    archs: compute capabilities that its kernels are launched on. Its name is also that of the
    implementations whose kernels it compiles. A spec, of whatever type, has label, min_arch,
    max_arch, and the needs that KernelSpec describes: load, store, uses.
    """

    name: str
    missing: Callable[[], str | None]
    version: Callable[[], str]
    compile: Callable[[Any, int], tuple[Facts, bytes]]
    identity: Callable[[Any], str]
    source: Callable[[Any], str]
    archs: tuple[int, ...] = ARCHS

    def budget_file(self) -> pathlib.Path:
        return BUDGETS / f"{self.name}-{self.version()}.json"

    def digest(self, spec: Any) -> str:
        """Of all that decides about facts and verdict but the compiler: the kernel, its constants
        and needs, and what reads machine code.
        """
        text = (
            f"{self.identity(spec)} {getattr(spec, 'elements', 0)} {self.source(spec)} {_reader()}"
        )
        if getattr(spec, "undivided", False):
            text += f" undivided {_loop_reader()}"
        if stack := getattr(spec, "stack", {}):
            text += f" stack {sorted(stack.items())}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _reader() -> str:
    return kernel_digest.of_files([pathlib.Path(machine_code.__file__)])


@functools.cache
def _loop_reader() -> str:
    return kernel_digest.of_files([pathlib.Path(ptx_loops.__file__)])


# ---- Triton


def _triton_missing() -> str | None:
    if platform.interpreting():
        return "TRITON_INTERPRET is set: kernels are then Python functions, which nothing compiles; unset it"
    return platform.no_module("triton")


def _triton_version() -> str:
    import triton

    return triton.__version__.split("+")[0]


def _triton_identity(spec: KernelSpec) -> str:
    return repr(
        (
            spec.kernel.fn.__module__,
            spec.kernel.fn.__qualname__,
            sorted(spec.signature.items()),
            sorted((n, repr(v)) for n, v in spec.constexprs.items()),
            spec.num_warps,
            spec.num_stages,
            sorted(spec.divisible),
            sorted(spec.options.items()),
            spec.min_arch,
            spec.max_arch,
            spec.load,
            spec.store,
            sorted(spec.uses.items()),
        )
    )


def _compile_triton(spec: KernelSpec, arch: int) -> tuple[Facts, bytes]:
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = spec.kernel.arg_names
    if wrong := set(names) ^ (set(spec.signature) | set(spec.constexprs)):
        raise ValueError(
            f"signature and constexprs must name {names}; missing or unknown: {sorted(wrong)}"
        )
    signature = {name: spec.signature.get(name, "constexpr") for name in names}
    aligned = [
        i for i, n in enumerate(names) if signature[n].startswith("*") or n in spec.divisible
    ]
    source = ASTSource(
        spec.kernel,
        signature,
        dict(spec.constexprs),
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, **spec.options}
    # Triton runs `ptxas -v` and prints what it said only if asked, and only when it does compile.
    # That is preferred to cuobjdump, which not every Triton has and which does not tell spills from
    # local arrays.
    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.always_compile = True
    said = io.StringIO()
    with contextlib.redirect_stdout(said), warnings.catch_warnings():
        # 3.9 announces another default of fp fusion; the launchers use the default, so the gate
        # does.
        warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = compiled.asm["ptx"]
    return (
        Facts(
            *resources(said.getvalue()),
            compiled.metadata.shared,
            **machine_code.ptx_facts(ptx),
            loop_divisions=ptx_loops.divisions(ptx) if spec.undivided else None,
        ),
        compiled.asm["cubin"],
    )


def resources(log: str) -> tuple[int, int, int]:
    """(registers, spilled bytes, bytes of stack and local memory) a thread, from what `ptxas
    -v` says.
    """
    registers = re.findall(r"Used (\d+) registers", log)
    if not registers:
        raise RuntimeError(f"ptxas named no register count: {log.strip()[:300]!r}")

    def most(pattern):
        return max(map(int, re.findall(pattern, log)), default=0)

    return (
        max(map(int, registers)),
        most(r"(\d+) bytes spill (?:stores|loads)"),
        most(r"(\d+) bytes (?:stack frame|cumulative stack size)") + most(r"(\d+) bytes lmem"),
    )


_of_kernel = functools.cache(kernel_digest.of_kernel)


# ---- CuTe DSL


def _compile_cute(spec: CuteSpec, arch: int) -> tuple[Facts, bytes]:
    facts, cubin = gate_cute.compile(spec, arch)
    return Facts(spill=0, **facts), cubin


COMPILERS: dict[type, Compiler] = {
    KernelSpec: Compiler(
        "triton",
        _triton_missing,
        _triton_version,
        _compile_triton,
        _triton_identity,
        lambda spec: _of_kernel(spec.kernel),
    ),
    CuteSpec: Compiler(
        "cute",
        gate_cute.missing,
        gate_cute.version,
        _compile_cute,
        gate_cute.identity,
        lambda spec: gate_cute.source(),
        gate_cute.ARCHS,
    ),
}


# ---- collecting and compiling


def collect(ops: Iterable[Op], space: bool = False, without: Iterable[str] = ()) -> dict[str, Any]:
    """Specs by name, "op/label". What two ops share is compiled once, under the first one's name.
    without: implementations that are left out.

    Of a launch that can be tuned: its heuristic's constants for the keys that stand for all, and
    whatever constants are in a committed table; with `space`, all candidates of a search instead.
    """
    found, seen = {}, set()
    for op in ops:
        for impl in op.implementations:
            if impl.name in without:
                continue
            for spec in (*([] if space else impl.gate()), *_tunable_specs(impl.tunables(), space)):
                if type(spec) not in COMPILERS:
                    raise TypeError(
                        f"{op.name}[{impl.name}]: gate() must return one of "
                        f"{[t.__name__ for t in COMPILERS]}, got {type(spec).__name__}"
                    )
                identity = COMPILERS[type(spec)].identity(spec)
                if identity in seen:
                    continue
                seen.add(identity)
                name = f"{op.name}/{spec.label}"
                if name in found:
                    raise ValueError(
                        f"{op.name}[{impl.name}]: two specs have the label {spec.label!r}"
                    )
                found[name] = spec
    return found


def _tunable_specs(tunables: Iterable[Tunable], space: bool) -> Iterator[Any]:
    for tunable in tunables:
        for key in map(tunable.named, tunable.keys):
            if space:
                for config in tunable.candidates(**key):
                    yield from _labelled(tunable, key, config, "")
            else:
                yield from tunable.specs(key, tunable.heuristic(**key))
        for folder, key, config in () if space else tuning.tuned(tunable):
            yield from _labelled(tunable, key, config, f"{folder}: ")


def _labelled(
    tunable: Tunable, key: dict[str, Any], config: dict[str, Any], where: str
) -> Iterator[Any]:
    constants = " ".join(f"{name}={value}" for name, value in config.items())
    for spec in tunable.specs(key, config):
        yield replace(spec, label=f"{spec.label} [{where}{_key_text(key)}; {constants}]")


def _key_text(key: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in key.items())


def budgeted(name: str) -> bool:
    """Whether a kernel has budgets: searched constants change with every search, and answer to
    the rules alone.
    """
    return "[" not in name


_specs: dict[str, Any] = {}  # for the workers, which inherit it: kernels cannot be pickled


def _work(task: tuple[str, int]) -> tuple[Result, bytes]:
    name, arch = task
    spec = _specs[name]
    try:
        facts, cubin = COMPILERS[type(spec)].compile(spec, arch)
        return Result(name, arch, facts), cubin
    except Exception as error:  # compilers' failures have no common base class; each is a verdict
        said = str(error).strip()
        if len(said) > 1000:  # Triton puts the reason last, ptxas first
            said = f"{said[:500]} [...] {said[-500:]}"
        return Result(name, arch, None, f"{type(error).__name__}: {said}"), b""


def _read(task: tuple[int, list[bytes]]) -> list[dict[str, Any]]:
    arch, cubins = task
    return [machine_code.sass_facts(text) for text in machine_code.disassemble(cubins, arch)]


def _per_element(spec: Any, instructions: int) -> float | None:
    elements = getattr(spec, "elements", 0)
    return round(instructions * 32 * spec.num_warps / elements, 1) if elements else None


def launched(specs: dict[str, Any], archs: Sequence[int]) -> list[tuple[str, int]]:
    """Names of specs, and architectures that launch them."""
    return [
        (name, arch)
        for name, spec in specs.items()
        for arch in archs
        if spec.min_arch <= arch <= spec.max_arch and arch in COMPILERS[type(spec)].archs
    ]


def compile_all(specs: dict[str, Any], tasks: Sequence[tuple[str, int]], jobs: int) -> list[Result]:
    """Compiles these specs for these architectures, in `jobs` processes."""
    archs = sorted({arch for _, arch in tasks})
    _specs.clear()
    _specs.update(specs)
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork"))
    try:
        with pool:
            compiled = list(pool.map(_work, tasks))
            # One disassembly for each architecture: see machine_code.
            by_arch = {
                a: [i for i, (r, _) in enumerate(compiled) if r.arch == a and r.facts]
                for a in archs
                if machine_code.cannot_disassemble(a) is None
            }
            listings = pool.map(
                _read, [(a, [compiled[i][1] for i in mine]) for a, mine in by_arch.items()]
            )
            results = [r for r, _ in compiled]
            for mine, read in zip(by_arch.values(), listings, strict=True):
                for i, sass in zip(mine, read, strict=True):
                    count = _per_element(specs[results[i].name], sass["instructions"])
                    results[i] = replace(
                        results[i], facts=replace(results[i].facts, **sass, per_element=count)
                    )
            return results
    except BrokenProcessPool:
        raise SystemExit(
            "compile-gate: a compiler crashed and took its process with it; "
            "run again with --jobs 1 and --op to find the kernel"
        ) from None


# ---- the verdict

BUDGETED = (
    "registers",
    "shared",
    "load",
    "store",
    "uses",
    "sass_load",
    "sass_store",
    "wide_loads",
    "wide_stores",
    "sass_uses",
    "per_element",
)


def problems(result: Result, spec: Any = None) -> list[str]:
    """What is wrong with a kernel whatever its budget. spec: may accept bytes of stack."""
    f = result.facts
    if f is None:
        return [f"does not compile: {result.error}"]
    found = []
    stack = getattr(spec, "stack", {}).get(result.arch, 0)
    accepted = not f.spill and f.local <= stack
    if not accepted:
        found.append(
            f"spills {f.spill} bytes a thread, has {f.local} bytes of stack and local memory; "
            "accepted: 0"
        )
    if f.local_instructions and not (accepted and f.local):
        found.append(
            f"has {f.local_instructions} loads and stores of local memory (LDL, STL); accepted: 0"
        )
    limit = SHARED_LIMIT[result.arch]
    if f.shared > limit:
        found.append(f"needs {f.shared} bytes of shared memory, sm_{result.arch} has {limit}")
    return found


def unmet(result: Result, spec: Any) -> list[str]:
    """What the spec needs and the kernel does not have, whatever its budget."""
    f = result.facts
    if f is None:
        return []
    found = []
    if f.loop_divisions:
        found.append(f"has {f.loop_divisions} divisions in loops; accepted: 0")
    for kind in ("load", "store"):
        need, have = (
            getattr(spec, kind),
            {"PTX": getattr(f, kind), "SASS": getattr(f, f"sass_{kind}")},
        )
        if any(bits is not None and bits < need for bits in have.values()):
            found.append(
                f"needs a global {kind} of {need} bits, the widest has "
                + " and ".join(
                    f"{bits} in {where}" for where, bits in have.items() if bits is not None
                )
            )
    for name in spec.uses.get(result.arch, ()):
        have = {"PTX": f.uses, "SASS": f.sass_uses}
        if any(uses is not None and name not in uses for uses in have.values()):
            found.append(
                f"needs {name}, uses "
                + " and ".join(
                    f"{'+'.join(uses) or 'none such'} in {where}"
                    for where, uses in have.items()
                    if uses is not None
                )
            )
    return found


def over_budget(result: Result, budget: dict[str, Any] | None) -> list[str]:
    """What is worse than the budget."""
    f = result.facts
    if f is None:
        return []
    if budget is None:
        return ["has no budget; --update writes one"]
    found = [
        f"{what}: {getattr(f, key)}, budget {budget[key]}"
        for key, what in (("registers", "registers a thread"), ("shared", "bytes of shared memory"))
        if getattr(f, key) > budget[key]
    ]
    if _known(f, budget, "per_element") and f.per_element > budget["per_element"]:
        found.append(f"instructions an element: {f.per_element}, budget {budget['per_element']}")
    least = (
        ("load", "widest global load", " bits"),
        ("store", "widest global store", " bits"),
        ("sass_load", "widest global load in SASS", " bits"),
        ("sass_store", "widest global store in SASS", " bits"),
        ("wide_loads", "loaded by 128 bits or more", "%"),
        ("wide_stores", "stored by 128 bits or more", "%"),
    )
    found += [
        f"{what}: {getattr(f, key)}{unit}, budget {budget[key]}"
        for key, what, unit in least
        if _known(f, budget, key) and getattr(f, key) < budget[key]
    ]
    return found + [
        f"no longer uses {name}{where}"
        for key, where in (("uses", ""), ("sass_uses", " in SASS"))
        if _known(f, budget, key)
        for name in budget[key]
        if name not in getattr(f, key)
    ]


def _known(facts: Facts, budget: dict[str, Any], key: str) -> bool:
    """False for machine code that could not be read here, or where the budget was written."""
    return getattr(facts, key) is not None and key in budget


def judge(
    results: Sequence[Result],
    specs: dict[str, Any],
    budgets: dict[str, Any] | None,
    stale: Iterable[str],
) -> list[str]:
    """One sentence a failure. budgets None: there are none for this compiler, and nothing is
    compared.   stale: keys of budgets whose kernels are gone.
    """
    found = [
        f"{r.key}: {p}"
        for r in results
        for p in [
            *problems(r, specs[r.name]),
            *unmet(r, specs[r.name]),
            *(
                []
                if budgets is None or not budgeted(r.name)
                else over_budget(r, budgets.get(r.key))
            ),
        ]
    ]
    return found + [f"{key}: has a budget but no kernel; --update removes it" for key in stale]


def write_budgets(path: pathlib.Path, budgets: dict[str, Any]) -> None:
    lines = [f"  {json.dumps(key)}: {json.dumps(budgets[key])}" for key in sorted(budgets)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")  # a line a kernel, for a readable diff


def table(results: Sequence[Result], archs: Sequence[int]) -> str:
    """A line a kernel. Numbers for the architectures in turn, or one number if they agree."""
    by_name: dict[str, list[Result]] = {}
    for r in results:
        by_name.setdefault(r.name, []).append(r)
    width = max(map(len, by_name))
    row = f"{{:<{width}}}  {{:<12}}{{:<13}}{{:<20}}{{:<17}}{{:<13}}{{:<22}}{{:<18}}{{}}"
    heads = "for " + ", ".join(f"sm_{a}" for a in archs)
    lines = [
        row.format(
            heads,
            "registers",
            "spill+local",
            "shared",
            "load/store bits",
            "in SASS",
            "wide bytes, %",
            "an element",
            "uses",
        )
    ]
    for name, found in by_name.items():

        def each(show, found=found):
            values = [show(r.facts) if r.facts else "-" for r in found]
            return values[0] if len(set(values)) == 1 else " ".join(values)

        lines.append(
            row.format(
                name,
                each(lambda f: str(f.registers)),
                each(lambda f: str(f.spill + f.local)),
                each(lambda f: str(f.shared)),
                each(lambda f: f"{f.load}/{f.store}"),
                each(lambda f: "-" if f.sass_load is None else f"{f.sass_load}/{f.sass_store}"),
                each(lambda f: "-" if f.sass_load is None else f"{f.wide_loads}/{f.wide_stores}"),
                each(lambda f: "-" if f.per_element is None else str(f.per_element)),
                each(lambda f: "+".join(f.uses) or "-"),
            )
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """0: green; 1: a failure; 2: the gate cannot run here, with the reason."""
    ops = operations()
    parser = argparse.ArgumentParser(prog="compile-gate", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--op", action="append", choices=list(ops), help="only this op's kernels (may be repeated)")
    add("--arch", action="append", type=int, choices=ARCHS, help="only this one (may be repeated)")
    add(
        "--all",
        action="store_true",
        help="compile what did not change since its budget was written, too, and not "
        "only a tenth of it",
    )
    add(
        "--seed",
        type=int,
        default=random.randrange(2**31),
        help="of that draw (default: another each time)",
    )
    add("--update", action="store_true", help="write the budgets instead of comparing with them")
    add(
        "--space",
        action="store_true",
        help="compile every candidate of every search instead: none may spill, "
        "need more shared memory than there is, or have narrower accesses than its kernel needs",
    )
    add(
        "--require",
        type=lambda names: names.split(","),
        default=["triton"],
        metavar="COMPILERS",
        help="compilers that must be here, by commas; others' kernels are skipped, with the "
        "reason (default: triton)",
    )
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="processes (default: one a core)",
    )
    args = parser.parse_args(argv)
    start = time.time()
    if unknown := set(args.require) - {c.name for c in COMPILERS.values()}:
        parser.error(
            f"argument --require: no compiler {', '.join(sorted(unknown))}; have "
            f"{', '.join(c.name for c in COMPILERS.values())}"
        )
    absent = {c.name: reason for c in COMPILERS.values() if (reason := c.missing())}
    for name, reason in absent.items():
        if name in args.require:
            print(f"compile-gate: {reason}", file=sys.stderr)
            return 2
    archs = tuple(sorted(set(args.arch or ARCHS)))
    specs = collect(ops.values(), args.space, absent)
    if args.space and args.update:
        parser.error("argument --update: candidates of a search have no budgets")
    if args.op:
        specs = {name: spec for name, spec in specs.items() if name.split("/")[0] in args.op}
    if not specs:
        print(
            f"compile-gate: no kernels to compile for {', '.join(args.op or ops)}", file=sys.stderr
        )
        return 2

    def in_scope(key: str) -> bool:
        return (
            not args.space
            and (not args.op or key.split("/")[0] in args.op)
            and int(key.rsplit("_", 1)[1]) in archs
        )

    tasks, failures = launched(specs, archs), []
    notes = [
        f"sm_{a}: {reason}; of its machine code nothing was checked"
        for a in archs
        if (reason := machine_code.cannot_disassemble(a))
    ]
    notes += [f"kernels in {name} were skipped: {reason}" for name, reason in absent.items()]
    files = {
        compiler.name: compiler.budget_file()
        for compiler in COMPILERS.values()
        if compiler.name not in absent
    }
    known = {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}
    digests = {name: COMPILERS[type(spec)].digest(spec) for name, spec in specs.items()}
    same = [
        (name, arch)
        for name, arch in tasks
        if not args.all
        and budgeted(name)
        and digests[name]
        == known.get(COMPILERS[type(specs[name])].name, {})
        .get(key_of(name, arch), {})
        .get("digest")
    ]
    left_out = {*same} - {*random.Random(args.seed).sample(same, -(-len(same) // 10))}
    if same:
        notes.append(
            f"{len(same)} of {len(tasks)} did not change since their budgets were written: "
            f"{len(left_out)} of "
            f"them were not compiled (--all compiles them), the others were drawn by --seed "
            f"{args.seed}"
        )
    results = compile_all(specs, [task for task in tasks if task not in left_out], args.jobs)
    for kind, compiler in COMPILERS.items():
        if compiler.name in absent:
            continue
        path, budgets = files[compiler.name], known.get(compiler.name)
        mine = [r for r in results if type(specs[r.name]) is kind]
        present = {key_of(*task) for task in tasks}
        stale = [key for key in budgets or () if key not in present and in_scope(key)]
        if args.update:
            budgets = {key: b for key, b in (budgets or {}).items() if key not in stale}
            for r in mine:
                if r.facts and budgeted(r.name):  # what fails is compiled again next time
                    fails = problems(r, specs[r.name]) or unmet(r, specs[r.name])
                    facts = {
                        k: v for k, v in asdict(r.facts).items() if k in BUDGETED and v is not None
                    }
                    budgets[r.key] = facts if fails else {"digest": digests[r.name], **facts}
            write_budgets(path, budgets)
            notes.append(f"wrote {path.name}: {len(budgets)} budgets")
            stale = []
        elif budgets is None:
            have = (
                ", ".join(sorted(p.stem for p in BUDGETS.glob(f"{compiler.name}-*.json"))) or "none"
            )
            notes.append(
                f"no budgets for {compiler.name} {compiler.version()} (there are: {have}): only "
                "compilation, spills, local memory, needs and the GPUs' limits were checked"
            )
        failures += judge(mine, specs, budgets, stale)

    versions = {c.name: c.version() for c in COMPILERS.values() if c.name not in absent}
    if args.json:
        print(
            json.dumps(
                {
                    "compilers": versions,
                    "results": [asdict(r) for r in results],
                    "failures": failures,
                    "notes": notes,
                },
                indent=1,
            )
        )
        return 1 if failures else 0
    print(table(results, archs))
    for line in notes:
        print(line)
    for line in failures:
        print(f"FAILED {line}")
    by = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(
        f"{len(specs)} kernels, {len(results)} compilations by {by} in {time.time() - start:.0f} "
        f"s: "
        f"{len(failures) or 'no'} failures"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
