"""Compiles kernels without a GPU, and reads facts from the compilers' output."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import multiprocessing
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

from tilewright.core import platform
from tilewright.core.registry import Op
from tilewright.kernels import tuning
from tilewright.kernels.spec import CuteSpec, KernelSpec
from tilewright.kernels.tuning import Tunable
from tilewright_lab.gate import cute_compiler as gate_cute
from tilewright_lab.gate import kernel_digest, machine_code, ptx_loops
from tilewright_lab.gate.alike import KEYS, alike

BUDGETS = pathlib.Path(__file__).parent / "budgets"
# Maximum shared memory per block, in bytes (CUDA C++ programming guide, technical specifications
# per compute capability). The compiler does not check it; a launch would.
SHARED_LIMIT = {90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
ARCHS = tuple(SHARED_LIMIT)


@dataclass(frozen=True)
class Facts:
    """Facts about one compilation.

    registers: per thread.
    spill, local: bytes spilled per thread, and bytes of stack and local memory per thread.
    shared: bytes per block.
    load, store, uses: from PTX (`machine_code.ptx_facts`).
    per_element: instructions per thread divided by elements per thread, for specs that give the
        elements per program.
    loop_divisions: divisions in loops of the PTX (`ptx_loops.divisions`), for specs that may have
        none.
    serialized: whether ptxas lets each wgmma wait for the one before.

    The rest comes from machine code (`machine_code.sass_facts`); None if there is no disassembler.
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
    serialized: bool = False


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
    """The compiler of one type of spec. Another type (CuTe DSL, CUDA C++) is one more entry of
    COMPILERS.

    name: also the name of the implementations whose kernels it compiles.
    missing: None, or a sentence that says why this compiler cannot run.
    version: part of its budget file's name.
    compile: (spec, arch) -> the facts without those from machine code, and the cubin, which is
        disassembled later in a batch; raises what the compiler raises.
    identity: equal for two specs with the same compilation and the same needs.
    source: the digest of the compiled source.
    archs: compute capabilities on which its kernels are launched.

    A spec of any type has label, min_arch, max_arch, and the needs that KernelSpec describes: load,
    store, uses.
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
        """Digest of everything but the compiler that affects facts and verdict: the kernel, its
        launch configuration and needs, and the code that reads machine code.
        """
        text = (
            f"{self.identity(spec)} {getattr(spec, 'elements', 0)} {self.source(spec)} {_reader()}"
        )
        if getattr(spec, "undivided", False):
            text += f" undivided {_loop_reader()}"
        if stack := getattr(spec, "stack", {}):
            text += f" stack {sorted(stack.items())}"
        if getattr(spec, "serial", False):
            text += " serial"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _reader() -> str:
    return kernel_digest.of_files([pathlib.Path(machine_code.__file__)])


@functools.cache
def _loop_reader() -> str:
    return kernel_digest.of_files([pathlib.Path(ptx_loops.__file__)])


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
            kernel_digest.module_of(spec.kernel.fn),
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
            *([spec.per_sm] if spec.per_sm > 1 else []),
        )
    )


@dataclass(frozen=True)
class LaunchSpec(KernelSpec):
    """A launch as Triton bound it. misaligned: its pointers that are not 16-byte aligned."""

    misaligned: tuple[str, ...] = ()


def _misaligned(spec: KernelSpec) -> tuple[str, ...]:
    return spec.misaligned if isinstance(spec, LaunchSpec) else ()


def compile_options(spec: KernelSpec) -> dict[str, Any]:
    """The options with which a spec's kernel is launched.

    Raises ValueError if a choice is missing that Triton's versions would make differently.
    """
    from tilewright.kernels.launch import COMPILE_OPTIONS

    options = {
        "num_warps": spec.num_warps,
        "num_stages": spec.num_stages,
        **COMPILE_OPTIONS,
        **spec.options,
    }
    if not isinstance(options.get("enable_fp_fusion"), bool):
        raise ValueError(
            "the launch does not choose enable_fp_fusion, whose default depends on Triton's version"
        )
    return options


def paths(signature: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Arguments by name, elements of tuples as "strides[2]": where they are, as Triton counts, and
    their types.
    """
    places: dict[str, tuple[tuple[int, ...], str]] = {}

    def add(name: str, path: tuple[int, ...], kind: Any) -> None:
        if not isinstance(kind, tuple):
            places[name] = path, kind
            return
        for i, one in enumerate(kind):
            add(f"{name}[{i}]", (*path, i), one)

    for i, (name, kind) in enumerate(signature.items()):
        add(name, (i,), kind)
    return places


def compile_triton(spec: KernelSpec, arch: int) -> tuple[Facts, bytes]:
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = spec.kernel.arg_names
    if wrong := set(names) ^ (set(spec.signature) | {n.partition("[")[0] for n in spec.constexprs}):
        raise ValueError(
            f"signature and constexprs must name {names}; missing or unknown: {sorted(wrong)}"
        )
    signature = {name: spec.signature.get(name, "constexpr") for name in names}
    elements = paths(signature)
    aligned = [
        path
        for name, (path, kind) in elements.items()
        if (kind.startswith("*") and name not in _misaligned(spec))
        or {name, names[path[0]]} & set(spec.divisible)
    ]
    source = (GluonASTSource if spec.kernel.is_gluon() else ASTSource)(
        spec.kernel,
        signature,
        {elements[name][0]: value for name, value in spec.constexprs.items()},
        {path: [["tt.divisibility", 16]] for path in aligned},
    )
    options = compile_options(spec)
    # Triton prints the output of `ptxas -v` only with this knob, and only when it compiles. Unlike
    # cuobjdump, ptxas comes with every Triton and reports spills apart from local arrays.
    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.always_compile = True
    ptxas_log = io.StringIO()
    with contextlib.redirect_stdout(ptxas_log):
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    # Triton ignores options that it does not know, and an environment variable turns this one off.
    chosen, actual = options["enable_fp_fusion"], compiled.metadata.enable_fp_fusion
    if actual is not chosen:
        raise RuntimeError(
            f"enable_fp_fusion is {actual} after compiling, and the launch's {chosen}"
        )
    ptx, log = compiled.asm["ptx"], ptxas_log.getvalue()
    return (
        Facts(
            *resources(log),
            compiled.metadata.shared,
            serialized="wgmma.mma_async instructions are serialized" in log,
            **machine_code.ptx_facts(ptx),
            loop_divisions=ptx_loops.divisions(ptx) if spec.undivided else None,
        ),
        compiled.asm["cubin"],
    )


def resources(log: str) -> tuple[int, int, int]:
    """(registers, spilled bytes, bytes of stack and local memory) per thread, from the output of
    `ptxas -v`.
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


def _compile_cute(spec: CuteSpec, arch: int) -> tuple[Facts, bytes]:
    facts, cubin = gate_cute.compile(spec, arch)
    return Facts(spill=0, **facts), cubin


COMPILERS: dict[type, Compiler] = {
    KernelSpec: Compiler(
        "triton",
        _triton_missing,
        _triton_version,
        compile_triton,
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


def collect(ops: Iterable[Op], space: bool = False, without: Iterable[str] = ()) -> dict[str, Any]:
    """Specs by name, "op/label". A spec shared by two ops is compiled once, under the first op's
    name.

    A tunable launch contributes what it takes for representative keys and all entries of the
    committed tables; with `space`, all candidates of a search instead.
    without: names of implementations to leave out.
    """
    specs, identities = {}, set()
    for op in ops:
        for impl in op.implementations:
            if impl.name in without:
                continue
            of_impl = (*([] if space else impl.gate()), *_tunable_specs(impl.tunables(), space))
            for spec in (each for one in of_impl for each in alike(op.name, one)):
                if type(spec) not in COMPILERS:
                    raise TypeError(
                        f"{op.name}[{impl.name}]: gate() must return one of "
                        f"{[t.__name__ for t in COMPILERS]}, got {type(spec).__name__}"
                    )
                identity = COMPILERS[type(spec)].identity(spec)
                if identity in identities:
                    continue
                identities.add(identity)
                name = f"{op.name}/{spec.label}"
                if name in specs:
                    raise ValueError(
                        f"{op.name}[{impl.name}]: two specs have the label {spec.label!r}"
                    )
                specs[name] = spec
    return specs


def _tunable_specs(tunables: Iterable[Tunable], space: bool) -> Iterator[Any]:
    for tunable in tunables:
        more = () if space else KEYS.get((tunable.op, tunable.launch), ())
        for key in map(tunable.named, (*tunable.keys, *more)):
            if space:
                for config in tunable.compiled(**key):
                    for spec in labeled(tunable, key, config, ""):
                        # Nothing counts on a candidate's blocks: it is measured.
                        yield replace(spec, per_sm=1) if isinstance(spec, KernelSpec) else spec
            else:
                yield from tunable.specs(key, tunable.heuristic(**key))
                yield from tunable.specs(key, tunable.choice(90, **key))
        for folder, key, config in () if space else tuning.tuned(tunable):
            yield from labeled(tunable, key, config, f"{folder}: ")


def labeled(
    tunable: Tunable, key: dict[str, Any], config: dict[str, Any], where: str
) -> Iterator[Any]:
    constants = " ".join(f"{name}={value}" for name, value in config.items())
    for spec in tunable.specs(key, config):
        yield replace(spec, label=f"{spec.label} [{where}{_key_text(key)}; {constants}]")


def _key_text(key: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in key.items())


_specs: dict[str, Any] = {}  # inherited by forked workers: kernels cannot be pickled


def _work(task: tuple[str, int]) -> tuple[Result, bytes]:
    name, arch = task
    spec = _specs[name]
    try:
        compiler = next(c for kind, c in COMPILERS.items() if isinstance(spec, kind))
        facts, cubin = compiler.compile(spec, arch)
        return Result(name, arch, facts), cubin
    except Exception as error:  # compilers' failures have no common base class; each is a verdict
        message = str(error).strip()
        if len(message) > 1000:  # Triton puts the reason last, ptxas first
            message = f"{message[:500]} [...] {message[-500:]}"
        return Result(name, arch, None, f"{type(error).__name__}: {message}"), b""


def _read(task: tuple[int, list[bytes]]) -> list[dict[str, Any]]:
    arch, cubins = task
    return [machine_code.sass_facts(text) for text in machine_code.disassemble(cubins, arch)]


def _per_element(spec: Any, instructions: int) -> float | None:
    elements = getattr(spec, "elements", 0)
    return round(instructions * 32 * spec.num_warps / elements, 1) if elements else None


def launched(specs: dict[str, Any], archs: Sequence[int]) -> list[tuple[str, int]]:
    """(spec name, architecture) for each architecture that launches the spec."""
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
            # One disassembly per architecture: see machine_code.
            by_arch = {
                a: [i for i, (r, _) in enumerate(compiled) if r.arch == a and r.facts]
                for a in archs
                if machine_code.cannot_disassemble(a) is None
            }
            listings = pool.map(
                _read, [(a, [compiled[i][1] for i in indices]) for a, indices in by_arch.items()]
            )
            results = [r for r, _ in compiled]
            for indices, read in zip(by_arch.values(), listings, strict=True):
                for i, sass in zip(indices, read, strict=True):
                    name, facts = results[i].name, results[i].facts
                    assert facts is not None  # by_arch has those that compiled
                    count = _per_element(specs[name], sass["instructions"])
                    results[i] = replace(
                        results[i], facts=replace(facts, **sass, per_element=count)
                    )
            return results
    except BrokenProcessPool:
        raise SystemExit(
            "tilewright gate: a compiler crashed and took its process with it; "
            "run again with --jobs 1 and --op to find the kernel"
        ) from None
