"""The numerics contract: an implementation's error is at most twice that of eager PyTorch in the
same dtype.

For a case, *truth* is the eager twin in float64 on the same (already rounded) inputs. `error` is a
result's deviation from it, and the contract is

    error(implementation) <= 2 * error(eager twin in this dtype) + atol

for every output and every gradient (`bounds` has the details, and `Op.judged` says what is judged
otherwise). Tests and benchmarks share it; a benchmark reports no time for a case that fails.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from tilewright.bench import bounds, grid
from tilewright.bench.bounds import ATOL, Bound, Parts
from tilewright.bench.piece import Index, Pieces
from tilewright.bench.tensors import (  # noqa: F401  callers use `contract.error`
    LAYOUTS,
    convert,
    deviation_of_parts,
    error,
    error_of_parts,
    leaves,
    upstream,
)
from tilewright.core.registry import Case, Op
from tilewright.core.torch_names import pytree


def run(
    op: Op,
    implementation: str,
    kwargs: dict[str, Any],
    layout: str = "contiguous",
    grads: list[torch.Tensor] | None = None,
    seed: int = 1,
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Runs forward and backward. Returns results by name ("out 0", "grad x") and the upstream
    gradients.

    grads: the upstream gradients; None: drawn with `seed`, in this layout.
    """
    outs = leaves(op.public(**kwargs, implementation=implementation))
    results = {f"out {i}": out.detach() for i, out in enumerate(outs)}
    differentiable = [o for o in outs if o.requires_grad]
    inputs = {n: v for n, v in kwargs.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    if not differentiable:
        return results, []
    if grads is None:
        grads = upstream(differentiable, layout, seed)
    upstream_grads = [
        g.to(o.dtype) if g.dtype != o.dtype else g
        for g, o in zip(grads, differentiable, strict=True)
    ]
    input_grads = torch.autograd.grad(
        differentiable, list(inputs.values()), upstream_grads, allow_unused=True
    )
    for name, grad in zip(inputs, input_grads, strict=True):
        if grad is not None:
            results[f"grad {name}"] = grad
    return results, grads


@dataclasses.dataclass(frozen=True)
class Finding:
    """One compared tensor: its error, the eager twin's error, the budget, the index of the worst
    element, and the unit of the three if it is not that of `error`.
    """

    name: str
    error: float
    eager: float
    budget: float
    where: tuple[int, ...]
    unit: str = ""

    @property
    def holds(self) -> bool:
        return self.error <= self.budget

    @property
    def share(self) -> float:
        """The error as a share of the budget."""
        if self.budget:
            return self.error / self.budget if self.error else 0.0
        return math.inf if self.error else 0.0

    def __str__(self) -> str:
        unit = self.unit and f" {self.unit}"
        return (
            f"{self.name}: error {self.error:.2e}{unit} at {list(self.where)} exceeds "
            f"{self.budget:.2e} (eager's is {self.eager:.2e})"
        )


def broken(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that exceed their budgets."""
    return [f for f in findings if not f.holds]


@dataclasses.dataclass(frozen=True)
class Reference:
    """The reference for results on one set of inputs; computed once for all implementations.

    truth: the eager twin's results in float64, or parts of them; for results in FP8 with scales,
        and for their scales, the values that they hold.
    bounds: the limits of each result's error, the first of them relative to the root mean square.
    scales: the codes in FP8 -> their scales.
    dtypes: dtype of each result.
    grads: the upstream gradients.
    sample: a description of the compared parts; None: all results.
    """

    truth: dict[str, Parts]
    bounds: dict[str, tuple[Bound, ...]]
    scales: dict[str, str]
    dtypes: dict[str, torch.dtype]
    grads: list[torch.Tensor]
    sample: str | None = None

    @property
    def eager(self) -> dict[str, float]:
        return {name: limits[0].eager for name, limits in self.bounds.items()}


def slack(op: Op, dtype: torch.dtype, kwargs: dict[str, Any], name: str) -> float | None:
    """What the op adds to twice the twin's error of a result; None: the default of its dtype."""
    return op.atol(dtype, kwargs, name) if callable(op.atol) else op.atol.get(dtype)


def reference(
    op: Op,
    kwargs: dict[str, Any],
    dtype: torch.dtype,
    layout: str = "contiguous",
    cut: Pieces | None = None,
) -> Reference:
    """cut: the pieces (see `bench.pieces`) in which the twin is computed; None: as a whole."""
    if cut is None:
        twin_results, grads = _twin(op, convert(kwargs, None), layout)
        if any(t.is_cuda for t in leaves(kwargs)):
            torch.cuda.empty_cache()  # blocks cached for one dtype are too small for the other
        truth_results, _ = _twin(op, convert(kwargs, torch.float64), layout, grads)
        dtypes = {n: t.dtype for n, t in twin_results.items()}
        if op.judged.together:
            twin_results, truth_results = (
                op.judged.together(r, kwargs) for r in (twin_results, truth_results)
            )
        twin, truth = (
            {n: {"()": ((), t)} for n, t in r.items()} for r in (twin_results, truth_results)
        )
    else:
        truth, twin, grads, dtypes = _by_pieces(op, kwargs, layout, cut)
        for name, parts in twin.items():
            twin[name] = {k: (at, t.to(dtypes[name])) for k, (at, t) in parts.items()}
    if op.judged.exact:
        truth = twin
    judged: dict[str, Parts] = {}
    limits: dict[str, tuple[Bound, ...]] = {}
    scales: dict[str, str] = {}
    for name, parts in truth.items():
        if name.startswith(VALUES) or name in scales.values():
            continue
        if VALUES + name in truth:
            scales[name] = scale = _next(name)
            judged[name] = judged[scale] = held = truth[VALUES + name]
            pairs = [(twin[name][k][1], twin[scale][k][1], t) for k, (_, t) in held.items()]
            limits[name], limits[scale] = bounds.on_grid(
                twin[VALUES + name], held, dtype, pairs, kwargs.get("seed") is None
            )
            continue
        judged[name] = {k: (at, bounds.in_range(t, dtypes[name])) for k, (at, t) in parts.items()}
        if op.judged.exact:
            limits[name] = (bounds.exact(parts),)
            continue
        own, of_sums = slack(op, dtype, kwargs, name), op.judged.of_sums
        if own is None:
            own, of_sums = bounds.usual(dtype, dtypes[name]), False
        limits[name] = bounds.of(twin[name], judged[name], dtypes[name], own, of_sums)
    return Reference(judged, limits, scales, dtypes, grads, cut and cut.note())


VALUES = "values "


def _twin(op, kwargs, layout, grads=None):
    """`run` of the eager twin, and the values that its results in FP8 hold."""
    results, grads = run(op, "eager", kwargs, layout, grads)
    if op.judged.quantizes:
        with torch.no_grad():
            held = op.judged.quantizes(**kwargs)
        codes = [n for n, t in results.items() if grid.is_codes(t)]
        results |= {VALUES + n: v for n, v in zip(codes, held, strict=True)}
    return results, grads


def _next(name: str) -> str:
    """The scales' name, from that of the codes."""
    return f"out {int(name.removeprefix('out ')) + 1}"


# Long: the steps of one piece, whose functions share the whole's tensors.
def _by_pieces(op: Op, kwargs: dict[str, Any], layout: str, cut: Pieces):
    """Truth and the twin's results in the inputs' dtype, by name and part; upstream gradients of
    the whole call; dtypes by name.
    """

    reduced_twin = cut.eager
    twin = op
    if reduced_twin is not None:
        twin = Op(
            op.name,
            lambda *, implementation, **piece_kwargs: reduced_twin(**piece_kwargs),
            op.eager,
            (),
            judged=op.judged,
        )

    def piece_kwargs(piece):  # contiguous: a copy with the whole's strides would be nearly as large
        return {
            n: v[piece.inputs[n]]
            .detach()
            .clone(memory_format=torch.contiguous_format)
            .requires_grad_(v.requires_grad)
            if n in piece.inputs
            else v
            for n, v in kwargs.items()
            if n not in piece.other
        }

    # For each result: the part of the whole that it belongs to, and its index within that part.
    def regions(piece, names):
        out = {}
        for name in names:
            kind, _, tensor_name = name.removeprefix(VALUES).partition(" ")
            if kind == "out":
                at, to = piece.outputs.get(int(tensor_name), ()), None
            else:
                at, to = piece.inputs.get(tensor_name, ()), piece.within.get(tensor_name)
            out[name] = (at, ()) if to is None else (to, _inside(at, to, kwargs[tensor_name].shape))
        return out

    first = twin.public(
        **convert(piece_kwargs(cut.parts[0]), None), **cut.parts[0].other, implementation="eager"
    )
    out_shapes = [
        (leaf.new_empty(()).expand(cut.shapes.get(i, leaf.shape)), leaf.requires_grad)
        for i, leaf in enumerate(leaves(first))
    ]
    places = [i for i, (_, differentiable) in enumerate(out_shapes) if differentiable]
    del first
    grads = upstream([out_shapes[i][0] for i in places], layout) if places else []
    outs = [f"out {i}" for i in range(len(out_shapes))]
    names = [
        *outs,
        *(VALUES + n for n in outs),
        *(f"grad {n}" for n in kwargs if _differentiable(kwargs, n)),
    ]
    counts: collections.Counter = collections.Counter()
    checked = set()  # parts summed over all pieces, and parts of sampled pieces
    for number, piece in enumerate(cut.parts):
        part_keys = [(n, str(at)) for n, (at, _) in regions(piece, names).items()]
        counts.update(part_keys)
        checked.update(
            r for r in part_keys if r[1] == "()" or cut.sample is None or number in cut.sample
        )
    sums: tuple[dict[str, Parts], dict[str, Parts]] = ({}, {})
    dtypes: dict[str, torch.dtype] = {}
    for piece in cut.parts:
        where = regions(piece, names)
        if not any((n, str(at)) in checked for n, (at, _) in where.items()):
            continue
        piece_grads = [g[piece.outputs.get(i, ())] for i, g in zip(places, grads, strict=True)]
        for dtype, sums_by_name in ((None, sums[1]), (torch.float64, sums[0])):
            results, _ = _twin(
                twin,
                {**convert(piece_kwargs(piece), dtype), **piece.other},
                layout,
                piece_grads,
            )
            for name in list(results):
                value, (at, inside) = results.pop(name), where[name]
                parts = sums_by_name.setdefault(name, {})
                if dtype is None:
                    dtypes[name] = value.dtype
                if (name, str(at)) not in checked:
                    continue
                # Integers, such as an order, are equal in every piece.
                if counts[name, str(at)] == 1 or not value.is_floating_point():
                    parts[str(at)] = at, value
                    continue
                if str(at) not in parts:
                    shape = kwargs[name.removeprefix("grad ")][at].shape if inside else value.shape
                    # 16-bit results of the twin are accumulated in float32 and rounded at the end.
                    parts[str(at)] = (
                        at,
                        value.new_zeros(
                            shape, dtype=torch.promote_types(value.dtype, torch.float32)
                        ),
                    )
                parts[str(at)][1][inside] += value
    return *sums, grads, dtypes


def _differentiable(kwargs: dict[str, Any], name: str) -> bool:
    return isinstance(kwargs[name], torch.Tensor) and kwargs[name].requires_grad


def _inside(at: Index, outer: Index, shape: Sequence[int]) -> Index:
    """The index `at` of a tensor, relative to its part `outer`."""
    starts = [o.indices(n)[0] for o, n in zip(outer, shape, strict=False)]
    starts += [0] * (len(at) - len(starts))
    ends = [(a.indices(n)[0], a.indices(n)[1]) for a, n in zip(at, shape, strict=False)]
    return tuple(slice(a - s, b - s) for (a, b), s in zip(ends, starts, strict=True))


def judge(op: Op, implementation: str, kwargs: dict[str, Any], by: Reference) -> list[Finding]:
    """A finding for every output and every gradient."""
    results, _ = run(op, implementation, convert(kwargs, None), grads=by.grads)
    return compared(op, results, kwargs, by)


def compared(
    op: Op, results: dict[str, torch.Tensor], kwargs: dict[str, Any], by: Reference
) -> list[Finding]:
    """`judge` of the results of a call."""
    findings = []
    inf = float("inf")
    for name in by.truth:
        first = by.bounds[name][0]
        if name not in results:
            findings.append(Finding(f"{name} (missing)", inf, first.eager, first.budget, ()))
        elif results[name].dtype != by.dtypes[name]:
            said = f"{name} (dtype {results[name].dtype}, not {by.dtypes[name]})"
            findings.append(Finding(said, inf, first.eager, first.budget, ()))
    if op.judged.together:
        results = op.judged.together(results, kwargs)
    for name, parts in by.truth.items():
        limits = by.bounds[name]
        if name in by.scales.values() or name not in results:
            continue
        if name in by.scales:
            findings += _on_grid(name, results, by)
            continue
        pairs = [(results[name][at], t, at) for at, t in parts.values()]
        wrong = [r for r, t, _ in pairs if r.shape != t.shape]
        if wrong:
            where = tuple(wrong[0].shape)
            findings.append(Finding(name, float("inf"), limits[0].eager, limits[0].budget, where))
            continue
        judged = []
        for b in limits:
            integers = not pairs[0][1].is_floating_point()
            e, where = bounds.differing(pairs) if integers else deviation_of_parts(pairs, b.scale)
            judged.append(Finding(name, e, b.eager, b.budget, where, b.unit))
        findings.append(max(judged, key=lambda f: f.share))
    return findings


def _on_grid(name: str, results: dict[str, torch.Tensor], by: Reference) -> list[Finding]:
    both = codes, scales = name, by.scales[name]
    if any(n not in results for n in both):
        return []
    pairs = [(results[codes][at], results[scales][at], t) for at, t in by.truth[name].values()]
    first = by.bounds[name][0]
    errors = bounds.errors_on_grid(pairs, first.scale, first.slack)
    return [
        Finding(n, e, b.eager, b.budget, where, b.unit)
        for n, (e, where) in zip(both, errors, strict=True)
        for b in by.bounds[n]
    ]


def check(
    op: Op,
    implementation: str,
    case: Case,
    device: str,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    layout: str = "contiguous",
) -> list[Finding]:
    """Compares one implementation on one case. Returns every tensor that breaks the contract;
    empty if it holds.
    """
    return compare(op, implementation, case.make(device, dtype, seed), dtype, layout)


def compare(
    op: Op,
    implementation: str,
    kwargs: dict[str, Any],
    dtype: torch.dtype,
    layout: str = "contiguous",
) -> list[Finding]:
    """`check` on given inputs."""
    return broken(judge(op, implementation, kwargs, reference(op, kwargs, dtype, layout)))


def check_big(
    op: Op, implementation: str, case: Case, device: str, dtype: torch.dtype
) -> list[Finding]:
    """Compares forward and backward of a case of more than 2^31 elements with the eager twin in the
    same dtype. Returns the tensors that exceed the budget.

    Only the last two slices along the first dimension are compared (all, if there are no more): a
    wrapped 32-bit offset shows there, and float64 truth would not fit. Both sides' roundings come
    to 1 eps of a 16-bit dtype; in float32 they sum in different orders. A wrapped offset causes an
    error of about 1.
    """
    kwargs = case.make(device, dtype, 0)
    expected, grads = run(op, "eager", convert(kwargs, None), "expanded")
    result, _ = run(op, implementation, kwargs, grads=grads)
    budget = (64 if dtype == torch.float32 else 8) * torch.finfo(dtype).eps
    findings = []
    for name, e in expected.items():
        r = result[name]
        if e.numel() > 2**31:
            r, e = r[-2:], e[-2:]
        worst, where = error(r, e)
        findings.append(Finding(name, worst, 0.0, budget, where))
    return broken(findings)


def no_capture(op: Op, implementation: str, case: Case) -> str | None:
    """None if a CUDA graph can capture the call on this case, else the reason."""
    reads = op.implementation(implementation).reads_host in case.tags
    return "reads values on the host, which a CUDA graph cannot capture" if reads else None


def check_capture(op: Op, implementation: str, case: Case, dtype: torch.dtype) -> list[Finding]:
    """Captures forward and backward in a CUDA graph, replays it on tensors of other values, and
    compares with a direct call.

    Raises what the capture raises: kernel launches and allocations are allowed in it,
    synchronization with the device is not.
    """
    static = case.make("cuda", dtype, 0)
    _, grads = run(op, implementation, static)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, fills caches
        run(op, implementation, static, grads=grads)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded, _ = run(op, implementation, static, grads=grads)
    # What is no tensor, such as a seed, is a constant of the graph.
    fresh = pytree.tree_map(
        lambda new, old: new if isinstance(new, torch.Tensor) else old,
        case.make("cuda", dtype, 1),
        static,
    )
    direct, _ = run(op, implementation, convert(fresh, None), grads=grads)
    with torch.no_grad():
        for static_tensor, value in zip(leaves(static), leaves(fresh), strict=True):
            static_tensor.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    findings = []
    for name, t in direct.items():
        worst, where = error(recorded[name], t)
        findings.append(Finding(name, worst, 0.0, ATOL[dtype], where))
    return broken(findings)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills every new tensor with NaN (integers: the largest value), so that unwritten elements
    show.

    PyTorch's own switch does this in the allocator's callers, C++ included.
    """
    deterministic: Any = torch.utils.deterministic  # its stub has no attributes
    before = (
        torch.are_deterministic_algorithms_enabled(),
        deterministic.fill_uninitialized_memory,
    )
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=warn_only)
        deterministic.fill_uninitialized_memory = before[1]
