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
from tilewright.core.torch_names import TorchDispatchMode
from tilewright.kernels import tuning
from tilewright.kernels.spec import KernelSpec
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
    """

    launches: tuple[Launch, ...]
    vendor: int = 0


# ---- facts


@functools.cache
def budgets() -> dict[str, dict[str, Any]]:
    """Those of the installed Triton; empty where it has none."""
    path = compilers.COMPILERS[KernelSpec].budget_file()
    return json.loads(path.read_text()) if path.exists() else {}


@functools.cache
def _specs() -> dict[str, list[tuple[str, KernelSpec]]]:
    """The compile gate's launches that have a budget, by kernel."""
    found: dict[str, list[tuple[str, KernelSpec]]] = {}
    for name, spec in compilers.collect(selection.operations().values(), without=("cute",)).items():
        if isinstance(spec, KernelSpec) and compilers.key_of(name, 90) in budgets():
            found.setdefault(_identity(spec.kernel), []).append((name, spec))
    return found


def _identity(kernel: Any) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"


def differences(spec: KernelSpec, values: dict[str, Any]) -> tuple[str, ...]:
    """Names of the arguments by which a launch differs from a spec."""
    found = [
        name
        for name, value in spec.constexprs.items()
        if name in values and not _same(values[name], value)
    ]
    for name, kind in spec.signature.items():
        if kind.startswith("*") and name in values:
            value = values[name]
            same = isinstance(value, torch.Tensor) and TRITON_TYPES.get(value.dtype) == kind[1:]
            found += [] if same else [name]
    defaults = {"num_warps": 4} if spec.kernel.is_gluon() else {"num_warps": 4, "num_stages": 3}
    for name, default in defaults.items():  # Gluon pipelines nothing itself
        if getattr(spec, name) != values.get(name, default):
            found.append(name)
    if spec.options.get("maxnreg") != values.get("maxnreg"):
        found.append("maxnreg")
    return tuple(found)


def _same(value: object, other: object) -> bool:
    """Tensors are compared with no constant: they are arguments."""
    return value is other or (not isinstance(value, torch.Tensor) and value == other)


def _is_decisive(name: str) -> bool:
    return name in DECISIVE or name.startswith("BLOCK")


def _facts(kernel: Any, values: dict[str, Any]) -> dict[str, Any]:
    """A `Launch`'s fields by the budget of the nearest launch where nothing decisive differs."""
    ranked = sorted(
        (
            (len(off), name, spec, off)
            for name, spec in _specs().get(_identity(kernel), ())
            if not any(map(_is_decisive, off := differences(spec, values)))
        ),
        key=lambda found: found[:2],
    )
    if not ranked:
        return {}
    _, name, spec, off = ranked[0]
    facts = budgets()[compilers.key_of(name, 90)]
    return {"budget": name, "differs": off, "facts": facts, "tile": spec.elements}


def kernels() -> set[str]:
    """Those that have a budget, as `Launch.source` names them."""
    return set(_specs())


def _nearest(kernel: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The budget of the launch of this kernel that differs in the least, whatever that is."""
    ranked = sorted(
        (len(differences(spec, values)), name) for name, spec in _specs().get(_identity(kernel), ())
    )
    return budgets()[compilers.key_of(ranked[0][1], 90)] if ranked else {}


# ---- recording


def _values(kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(kernel.arg_names, arguments, strict=False)), **options}


def _tensor(value: Any, programs: int) -> Tensor | None:
    held = getattr(value, "base", value)  # a descriptor's
    if not isinstance(held, torch.Tensor):
        return None
    partial = held.dtype == torch.float32 and bool(held.dim()) and held.shape[0] == programs
    return Tensor(tuple(held.shape), held.element_size(), partial)


def _launch(kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> Launch:
    values = _values(kernel, arguments, options)
    grid = values.pop("grid")
    blocks: Any = grid(values) if callable(grid) else grid
    programs = math.prod(blocks)
    tensors = {
        name: found for name, v in values.items() if (found := _tensor(v, programs)) is not None
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
        **_facts(kernel, values),
    )


@contextlib.contextmanager
def simulated(device: str) -> Iterator[list[Launch]]:
    """A simulated Hopper GPU of this name, and the launches on it; where Triton compiles
    (TRITON_INTERPRET=0). Nothing is compiled or launched.
    """
    from triton.runtime.jit import JITFunction

    found: list[Launch] = []
    launched = JITFunction.run
    _specs()  # asks for launch configurations of this machine

    def launch(kernel, *arguments, **options):
        given = {n: v for n, v in options.items() if n != "warmup"}
        if not options.get("warmup"):
            found.append(_launch(kernel, arguments, given))
            return launched(kernel, *arguments, **options)
        compiled: Any = launched(kernel, *arguments, **options)
        # A launcher asks how many programs fit.
        if near := _nearest(kernel, _values(kernel, arguments, given)):
            compiled.n_regs = near["registers"]
            compiled.metadata.shared = near["shared"]
        return compiled

    with (
        pretend.gpu(90, f"NVIDIA {device}", compiles=False),
        mock.patch.object(JITFunction, "run", launch),
    ):
        yield found


class _Products(TorchDispatchMode):
    """flops: of the matrix products by PyTorch's operators inside the block. PyTorch's own counter
    refuses those that write a given result.
    """

    NAMES = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            left, right = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
            self.flops += 2 * left.numel() * right.shape[-1]
        return made


def passes(
    found: list[Launch], op: Op, implementation: str, case: Case, dtype: torch.dtype
) -> dict[str, Pass]:
    """What each pass launches, as the benchmark calls it: "forward" records no graph."""
    kwargs = case.make("cuda", dtype, 0)
    plain = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}

    def counted(call):
        found.clear()
        with _Products() as products:
            made = call()
        return made, tuple(found), products.flops

    def forward():
        return op.public(**kwargs, implementation=implementation)

    contract.run(op, implementation, kwargs)  # what a first call prepares is no part of the pass
    with torch.no_grad():
        _, launches, vendor = counted(lambda: op.public(**plain, implementation=implementation))
    passes_ = {"forward": Pass(launches, vendor)}
    inputs = [v for v in kwargs.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    outs, launches, vendor = counted(forward)
    outs = [o for o in contract.leaves(outs) if o.requires_grad]
    if outs and inputs:
        grads = contract.upstream(outs, "contiguous")
        _, more, vendor_more = counted(
            lambda: torch.autograd.grad(outs, inputs, grads, allow_unused=True)
        )
        passes_["backward"] = Pass(more, vendor_more)
        passes_["forward_backward"] = Pass((*launches, *more), vendor + vendor_more)
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
    """Inside, a launch of the case has these constants in place of the heuristic's."""
    with contextlib.ExitStack() as stack:
        for tunable, key in requested_keys(op, implementation, case.make("cuda", dtype, 0)):
            if tunable.name == launch:
                usual = tunable.choice(tuning.arch_of_device(), **tunable.named(key))
                whole = {**usual, **config}
                stack.enter_context(tunable.override(pretend.CUDA, key, whole))
        yield
