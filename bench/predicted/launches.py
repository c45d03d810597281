"""Records what a case launches on a simulated GPU, each launch with the facts of its budget."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from tilewright import selection
from tilewright.bench import contract
from tilewright.bench.launches import requested_keys
from tilewright.core.registry import Case, Implementation, Op
from tilewright.core.torch_names import TorchDispatchMode, pytree
from tilewright.kernels import device as device_properties
from tilewright.kernels import tuning
from tilewright.kernels.spec import KernelSpec, opened
from tilewright_lab import pretend
from tilewright_lab.gate import compilers

# Constants that decide a launch's tile, registers or shared memory. Where another one differs, a
# budget still tells the launch's registers and instructions, and the difference is named.
DECISIVE = (
    *("num_warps", "num_stages", "STAGES", "maxnreg", "UNROLL", "ROWS", "UNIT", "WIDTH", "N"),
    *(
        "EPILOGUE",
        "GATHER",
        "GATHER_X",
        "GATHER_DY",
        "TRANSPOSED",
        "PACKED",
        "ADD",
        "BIAS",
        "KAHAN",
    ),
)
TRITON_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
}
# Ops beside whose launches PyTorch's own operators are counted.
OPERATORS = ("low_precision_grouped_gemm", "low_precision_linear")


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    itemsize: int
    partial: bool  # float32 sums, a row for each program

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(frozen=True)
class Launch:
    """One launch.

    tensors: its tensors by the names of its arguments, those of descriptors too.
    values: its numbers and constants.
    budget: the name of the launch whose facts these are; None without one, and `facts` is empty.
    differs: constants and pointers that its own do not agree with.
    tile: elements of a program's tile, of which `facts` has instructions; 0 if it is no streaming
        kernel.
    specialized: whether loads, products and epilogue are of different warps, which overlap.
    source: the kernel with its module.
    """

    kernel: str
    programs: int
    warps: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    budget: str | None = None
    differs: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    tile: int = 0
    specialized: bool = False
    source: str = ""

    @property
    def covered(self) -> int:
        """Elements of its programs' first tiles."""
        return self.programs * self.tile

    @property
    def largest(self) -> int:
        """Elements of its largest tensor, without sums that each program leaves."""
        return max((t.elements for t in self.tensors.values() if not t.partial), default=0)


@dataclass(frozen=True)
class Pass:
    """What one pass of a case launches.

    vendor: FLOPs of matrix products that PyTorch's own operators do.
    operators: names and bytes of those of PyTorch's other operators that are in OPERATORS, each a
        launch.
    """

    launches: tuple[Launch, ...]
    vendor: int = 0
    operators: tuple[tuple[str, int], ...] = ()

    def followed_by(self, other: Pass) -> Pass:
        return Pass(
            (*self.launches, *other.launches),
            self.vendor + other.vendor,
            (*self.operators, *other.operators),
        )


# ---- facts


@functools.cache
def budgets() -> dict[str, dict[str, Any]]:
    """Those of the installed Triton; empty where it has none."""
    path = compilers.COMPILERS[KernelSpec].budget_file()
    return json.loads(path.read_text()) if path.exists() else {}


@functools.cache
def _collected() -> dict[str, Any]:
    """The compile gate's launches."""
    return compilers.collect(selection.operations().values(), without=("cute",))


@functools.cache
def _specs(arch: int) -> dict[str, list[tuple[str, KernelSpec]]]:
    """Those that have a budget, by kernel."""
    specs: dict[str, list[tuple[str, KernelSpec]]] = {}
    for name, spec in _collected().items():
        if isinstance(spec, KernelSpec) and compilers.key_of(name, arch) in budgets():
            specs.setdefault(_identity(spec.kernel), []).append((name, spec))
    return specs


def _identity(kernel: Any) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"


def differences(spec: KernelSpec, values: dict[str, Any]) -> tuple[str, ...]:
    """Names of the arguments by which a launch differs from a spec."""
    names = [
        name
        for name, value in opened(spec.constexprs).items()
        if name in values and not _same(values[name], value)
    ]
    for name, kind in spec.signature.items():
        if kind[0] == "*" and name in values:
            value = values[name]
            same = isinstance(value, torch.Tensor) and TRITON_TYPES.get(value.dtype) == kind[1:]
            names += [] if same else [name]
    defaults = {"num_warps": 4} if spec.kernel.is_gluon() else {"num_warps": 4, "num_stages": 3}
    for name, default in defaults.items():  # Gluon pipelines nothing itself
        if getattr(spec, name) != values.get(name, default):
            names.append(name)
    if spec.options.get("maxnreg") != values.get("maxnreg"):
        names.append("maxnreg")
    return tuple(names)


def _same(value: object, other: object) -> bool:
    """Tensors are compared with no constant: they are arguments."""
    return value is other or (not isinstance(value, torch.Tensor) and value == other)


def _is_decisive(name: str) -> bool:
    return name in DECISIVE or name.startswith("BLOCK")


def _facts(kernel: Any, values: dict[str, Any], arch: int) -> dict[str, Any]:
    """A `Launch`'s fields by the budget of the nearest launch where nothing decisive differs."""
    ranked = sorted(
        (
            (len(off), name, spec, off)
            for name, spec in _specs(arch).get(_identity(kernel), ())
            if not any(map(_is_decisive, off := differences(spec, values)))
        ),
        key=lambda entry: entry[:2],
    )
    if not ranked:
        return {}
    _, name, spec, off = ranked[0]
    facts = budgets()[compilers.key_of(name, arch)]
    return {"budget": name, "differs": off, "facts": facts, "tile": spec.elements}


def kernels(arch: int = 90) -> set[str]:
    """Those that have a budget, as `Launch.source` names them."""
    return set(_specs(arch))


def _nearest(kernel: Any, values: dict[str, Any], arch: int) -> dict[str, Any]:
    """The budget of the launch of this kernel that differs in the least, whatever that is."""
    ranked = sorted(
        (len(differences(spec, values)), name)
        for name, spec in _specs(arch).get(_identity(kernel), ())
    )
    return budgets()[compilers.key_of(ranked[0][1], arch)] if ranked else {}


# ---- recording


def _values(kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(kernel.arg_names, arguments, strict=False)), **opened(options)}


def _tensor(value: Any, programs: int) -> Tensor | None:
    held = getattr(value, "base", value)  # a descriptor's
    if not isinstance(held, torch.Tensor):
        return None
    partial = held.dtype == torch.float32 and bool(held.dim()) and held.shape[0] == programs
    return Tensor(tuple(held.shape), held.element_size(), partial)


def _launch(kernel: Any, arguments: Sequence[Any], options: dict[str, Any], arch: int) -> Launch:
    values = _values(kernel, arguments, options)
    grid = values.pop("grid")
    blocks: Any = grid(values) if callable(grid) else grid
    programs = math.prod(blocks)
    tensors = {
        name: tensor for name, v in values.items() if (tensor := _tensor(v, programs)) is not None
    }
    plain = {n: v for n, v in values.items() if isinstance(v, (int, float, str, bool))}
    return Launch(
        kernel.fn.__name__,
        programs,
        values.get("num_warps", 4),
        tensors,
        plain,
        specialized=kernel.is_gluon(),
        source=_identity(kernel),
        **_facts(kernel, values, arch),
    )


def _forget_device() -> None:
    """Clears what is cached of "cuda:0", which is another device for each simulation."""
    for function in vars(device_properties).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@contextlib.contextmanager
def simulated(device: str, arch: int = 90) -> Iterator[list[Launch]]:
    """A simulated GPU of this name and compute capability, and the launches on it; where Triton
    compiles (TRITON_INTERPRET=0). Nothing is compiled or launched.
    """
    from triton.runtime.jit import JITFunction

    recorded: list[Launch] = []
    launched = JITFunction.run
    _specs(arch)  # asks for launch configurations of this machine

    def launch(kernel, *arguments, **options):
        given = {n: v for n, v in options.items() if n != "warmup"}
        if not options.get("warmup"):
            recorded.append(_launch(kernel, arguments, given, arch))
            return launched(kernel, *arguments, **options)
        compiled: Any = launched(kernel, *arguments, **options)
        # A launcher asks how many programs fit.
        if near := _nearest(kernel, _values(kernel, arguments, given), arch):
            compiled.n_regs = near["registers"]
            compiled.metadata.shared = near["shared"]
        return compiled

    with (
        contextlib.ExitStack() as stack,
        pretend.gpu(arch, f"NVIDIA {device}", compiles=False),
        mock.patch.object(JITFunction, "run", launch),
    ):
        _forget_device()
        stack.callback(_forget_device)
        yield recorded


class _Operators(TorchDispatchMode):
    """Counts PyTorch's operators inside the block.

    flops: FLOPs of matrix products. PyTorch's own counter refuses those that write a given result.
    others: the name of each that is none and computes something, and the bytes of its tensors.
    """

    NAMES = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")

    def __init__(self):
        super().__init__()
        self.flops, self.others = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            left, right = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
            self.flops += 2 * left.numel() * right.shape[-1]
        elif "empty" not in name:
            given, results = _tensors((args, kwargs)), _tensors(made)
            held = {t.untyped_storage()._cdata for t in given}
            view = all(t.untyped_storage()._cdata in held for t in results)
            if not view or func._schema.is_mutable:
                distinct = {id(t): t.numel() * t.element_size() for t in [*given, *results]}
                self.others.append((name, sum(distinct.values())))
        return made


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def passes(
    recorded: list[Launch], op: Op, implementation: str, case: Case, dtype: torch.dtype
) -> dict[str, Pass]:
    """What each pass launches, as the benchmark calls it: "forward" records no graph."""
    kwargs = case.make("cuda", dtype, 0)
    plain = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}

    counts = op.name in OPERATORS

    def counted(call):
        recorded.clear()
        with _Operators() as operators:
            made = call()
        others = tuple(operators.others) if counts else ()
        return made, Pass(tuple(recorded), operators.flops, others)

    def forward():
        return op.public(**kwargs, implementation=implementation)

    contract.run(op, implementation, kwargs)  # what a first call prepares is no part of the pass
    with torch.no_grad():
        _, plainly = counted(lambda: op.public(**plain, implementation=implementation))
    passes_ = {"forward": plainly}
    inputs = [v for v in kwargs.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    outs, first = counted(forward)
    outs = [o for o in contract.leaves(outs) if o.requires_grad]
    if outs and inputs:
        grads = contract.upstream(outs, "contiguous")
        _, then = counted(lambda: torch.autograd.grad(outs, inputs, grads, allow_unused=True))
        passes_["backward"], passes_["forward_backward"] = then, first.followed_by(then)
    return passes_


@contextlib.contextmanager
def configured(
    op: Op,
    implementation: Implementation,
    case: Case,
    dtype: torch.dtype,
    launch: str,
    config: dict,
) -> Iterator[None]:
    """Inside, a launch of the case has these constants in place of the heuristic's. Where `auto`
    does not take `gluon`, its other launches are Triton's.
    """
    arch, aside = tuning.arch_of_device(), op.choose("cuda", dtype) != "gluon"
    with contextlib.ExitStack() as stack:
        for tunable, key in requested_keys(op, implementation, case.make("cuda", dtype, 0)):
            named = tunable.named(key)
            if tunable.name == launch:
                whole = {**tunable.choice(arch, **named), **config}
            elif aside and isinstance(tunable, tuning.Specialized):
                whole = {**tunable.beside.choice(arch, **named), tuning.ROLES: False}
            else:
                continue
            stack.enter_context(tunable.override(pretend.CUDA, key, whole))
        yield
