"""The numerics contract: an implementation may lose at most twice what eager PyTorch loses in the same dtype.

For a case, *truth* is the eager twin in float64 on the same (already rounded) inputs. `error` measures a result
against it, and the contract is

    error(implementation) <= 2 * error(eager twin in this dtype) + atol

for every output and every gradient. Tests and benchmarks both call `check`; a benchmark prints no time for a case
that fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree

from tilewright.ops.quantize import Quantized
from tilewright.registry import Case, Op

# In the units of `error`. 16-bit: the one rounding on store that is left when the twin happens to be exact. float32:
# four of them, since there the sums too are in the result's own precision and their order is free.
ATOL = {torch.float32: 2 * torch.finfo(torch.float32).eps,
        torch.bfloat16: torch.finfo(torch.bfloat16).eps / 2, torch.float16: torch.finfo(torch.float16).eps / 2}
ATOL[torch.float64] = 1e-12


LARGE = 2**29   # elements of a result that waits on the host until it is compared
CHUNK = 2**26   # elements compared at a time: float64 temporaries of half a GiB each, for tensors of any size


def error(result: torch.Tensor, truth: torch.Tensor) -> tuple[float, tuple[int, ...]]:
    """Largest deviation, relative to the element or to the tensor's root mean square if that is larger; and where.

    Relative to the element, so that a wrong value is not hidden by a larger one elsewhere; but not below the root mean
    square, because an element that is small by cancellation carries the rounding of its large terms. Infinities must
    be equal; a NaN where truth has none is an infinite error, so an element that was never written is one too.
    """
    if result.shape != truth.shape:
        return float("inf"), tuple(result.shape)
    if truth.numel() == 0:
        return 0.0, ()
    r, t = result.reshape(-1), truth.reshape(-1)
    pieces = [slice(at, at + CHUNK) for at in range(0, t.numel(), CHUNK)]
    scale, worst, at = 0.0, -1.0, 0
    if truth.dtype.is_floating_point:
        squares, count = 0.0, 0
        for piece in pieces:
            finite = t[piece].double()
            finite = finite[finite.isfinite()]
            squares, count = squares + float(finite.square().sum()), count + finite.numel()
        scale = (squares / max(count, 1)) ** 0.5
    for piece in pieces:
        wrong = _deviation(r[piece], t[piece], scale)
        here = int(wrong.argmax())
        if float(wrong[here]) > worst:
            worst, at = float(wrong[here]), piece.start + here
    return worst, tuple(int(i) for i in torch.unravel_index(torch.tensor(at), truth.shape))


def _deviation(r: torch.Tensor, t: torch.Tensor, scale: float) -> torch.Tensor:
    if not t.dtype.is_floating_point:
        return (r != t).double()
    r, t = r.double(), t.double()
    inf = float("inf")
    wrong = (r - t).abs() / t.abs().clamp_min(max(scale, 1e-30))
    wrong = torch.where(t.isfinite(), wrong.nan_to_num(nan=inf, posinf=inf), inf)
    return torch.where((r == t) | (r.isnan() & t.isnan()), 0.0, wrong)


def leaves(value: Any) -> list[torch.Tensor]:
    """Tensors in a result or in arguments: a tensor, or a tuple, dictionary or quantised tensor of tensors and else."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for t in _pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def convert(kwargs: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """Fresh leaves with the same values: in `dtype`, or (None) in their own. Integers and options are passed on, and
    so is what a quantised tensor holds; `dtype` is then that in which it is read."""
    new = {}
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            # Strides are part of a case, and `to` would pack a row-strided tensor.
            fresh = torch.empty_strided(value.shape, value.stride(), dtype=dtype or value.dtype, device=value.device)
            new[name] = fresh.copy_(value.detach()).requires_grad_(value.requires_grad)
        elif isinstance(value, torch.Tensor):
            new[name] = value.clone()
        elif isinstance(value, Quantized):
            new[name] = dataclasses.replace(_pytree.tree_map_only(torch.Tensor, torch.clone, value),
                                            dtype=dtype or value.dtype)
        else:
            new[name] = value
    return new


LAYOUTS = ("contiguous", "strided", "expanded")


def upstream(outs: list[torch.Tensor], layout: str, seed: int = 1) -> list[torch.Tensor]:
    """Gradients to feed back, drawn in float64 and rounded to each output's dtype, in a memory layout of choice."""
    found = []
    for i, out in enumerate(outs):
        g = torch.Generator(device=out.device).manual_seed(seed + 1000 * i)
        if layout == "expanded":   # one value for all, stride 0: what .sum().backward() sends
            found.append(torch.randn((), device=out.device, dtype=torch.float64, generator=g).to(out.dtype)
                         .expand(out.shape))
            continue
        grad = torch.randn(out.shape, device=out.device, dtype=torch.float64, generator=g).to(out.dtype)
        if layout == "strided" and grad.dim():
            wide = torch.empty((*grad.shape[:-1], 2 * grad.shape[-1]), dtype=grad.dtype, device=grad.device)
            wide[..., ::2] = grad
            grad = wide[..., ::2]
        found.append(grad)
    return found


def run(op: Op, implementation: str, kwargs: dict[str, Any], layout: str = "contiguous",
        grads: list[torch.Tensor] | None = None) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Calls the op and differentiates it. Returns results by name ("out 0", "grad x") and the upstream gradients."""
    outs = leaves(op.public(**kwargs, implementation=implementation))
    results = {f"out {i}": out.detach() for i, out in enumerate(outs)}
    differentiable = [o for o in outs if o.requires_grad]
    inputs = {n: v for n, v in kwargs.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    if not differentiable:
        return results, []
    if grads is None:
        grads = upstream(differentiable, layout)
    given = [g.to(o.dtype) if g.dtype != o.dtype else g for g, o in zip(grads, differentiable, strict=True)]
    found = torch.autograd.grad(differentiable, list(inputs.values()), given, allow_unused=True)
    for name, grad in zip(inputs, found, strict=True):
        if grad is not None:
            results[f"grad {name}"] = grad
    return results, grads


@dataclasses.dataclass(frozen=True)
class Finding:
    """One compared tensor: its error, eager's own, what is allowed, and where the worst element is."""

    name: str
    error: float
    eager: float
    budget: float
    where: tuple[int, ...]

    @property
    def holds(self) -> bool:
        return self.error <= self.budget

    def __str__(self) -> str:
        return (f"{self.name}: error {self.error:.2e} at {list(self.where)} exceeds {self.budget:.2e} "
                f"(2 x eager's {self.eager:.2e} + slack)")


def broken(found: Iterable[Finding]) -> list[Finding]:
    """Those that do not hold."""
    return [f for f in found if not f.holds]


@dataclasses.dataclass(frozen=True)
class Reference:
    """What results are judged by on one set of inputs; made once for all implementations.

    truth: the eager twin's results in float64.   eager: error of each in the inputs' dtype.   dtypes: of each.
    grads: the upstream gradients.   atol: the slack.
    """

    truth: dict[str, torch.Tensor]
    eager: dict[str, float]
    dtypes: dict[str, torch.dtype]
    grads: list[torch.Tensor]
    atol: float


def reference(op: Op, kwargs: dict[str, Any], dtype: torch.dtype, layout: str = "contiguous") -> Reference:
    own, grads = run(op, "eager", convert(kwargs, None), layout)
    # Truth takes all the memory that a GPU has where logits have 2^31 elements: float64 copies of each step.
    own = {n: t.cpu() if t.numel() > LARGE else t for n, t in own.items()}
    if any(t.is_cuda for t in leaves(kwargs)):
        torch.cuda.empty_cache()   # blocks of one dtype's sizes are too small for the other's
    truth, _ = run(op, "eager", convert(kwargs, torch.float64), layout, grads)
    atol = op.atol(dtype, kwargs) if callable(op.atol) else op.atol.get(dtype, ATOL[dtype])
    return Reference(truth, {n: error(own[n].to(t.device), t)[0] for n, t in truth.items()},
                     {n: own[n].dtype for n in truth}, grads, atol)


def judge(op: Op, implementation: str, kwargs: dict[str, Any], by: Reference) -> list[Finding]:
    """A finding for every output and every gradient."""
    result, _ = run(op, implementation, convert(kwargs, None), grads=by.grads)
    found = []
    for name, t in by.truth.items():
        own = by.eager[name]
        budget = 2 * own + by.atol
        if name not in result:
            found.append(Finding(f"{name} (missing)", float("inf"), own, budget, ()))
            continue
        e, where = error(result[name], t)
        found.append(Finding(name, e, own, budget, where))
        if result[name].dtype != by.dtypes[name]:
            found.append(Finding(f"{name} (dtype {result[name].dtype}, not {by.dtypes[name]})", float("inf"), own,
                                 budget, ()))
    return found


def check(op: Op, implementation: str, case: Case, device: str, dtype: torch.dtype, *, seed: int = 0,
          layout: str = "contiguous") -> list[Finding]:
    """Compares one implementation on one case; returns every tensor that breaks the contract (none: it holds)."""
    return compare(op, implementation, case.make(device, dtype, seed), dtype, layout)


def compare(op: Op, implementation: str, kwargs: dict[str, Any], dtype: torch.dtype,
            layout: str = "contiguous") -> list[Finding]:
    """`check` on inputs that are at hand."""
    return broken(judge(op, implementation, kwargs, reference(op, kwargs, dtype, layout)))


def check_big(op: Op, implementation: str, case: Case, device: str, dtype: torch.dtype) -> list[Finding]:
    """For a case of more than 2^31 elements: forward and backward against the eager twin in the same dtype.

    Of tensors that large, the last two along the first dimension (all, where there are no more): a wrapped 32-bit
    offset lands there, and float64 truth would not fit.
    What both sides round is 1 eps of a 16-bit dtype; in float32 they sum in different orders. A wrapped offset is
    wrong by about 1. Returns what is beyond.
    """
    kwargs = case.make(device, dtype, 0)
    expected, grads = run(op, "eager", convert(kwargs, None), "expanded")
    result, _ = run(op, implementation, kwargs, grads=grads)
    budget = (64 if dtype == torch.float32 else 8) * torch.finfo(dtype).eps
    found = []
    for name, e in expected.items():
        r = result[name]
        if e.numel() > 2**31:
            r, e = r[-2:], e[-2:]
        worst, where = error(r, e)
        found.append(Finding(name, worst, 0.0, budget, where))
    return broken(found)


def no_capture(op: Op, implementation: str, case: Case) -> str | None:
    """None if a call of this implementation on this case can be recorded in a CUDA graph, else the reason."""
    told = any("host" in c.tags for c in op.cases)
    if implementation in (op.on_host or op.names()) and ("host" in case.tags or (op.on_host and not told)):
        return "looks at values on the host, which a CUDA graph cannot record"
    return None


def check_capture(op: Op, implementation: str, case: Case, dtype: torch.dtype) -> list[Finding]:
    """Records forward and backward in a CUDA graph, replays it on other values, and compares with a direct call.

    Raises what recording raises: a kernel launch or an allocation is allowed there, waiting for the device is not.
    """
    static = case.make("cuda", dtype, 0)
    _, grads = run(op, implementation, static)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):   # compiles, fills caches
        run(op, implementation, static, grads=grads)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded, _ = run(op, implementation, static, grads=grads)
    fresh = case.make("cuda", dtype, 1)
    direct, _ = run(op, implementation, convert(fresh, None), grads=grads)
    with torch.no_grad():
        for held, value in zip(leaves(static), leaves(fresh), strict=True):
            held.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    found = []
    for name, t in direct.items():
        worst, where = error(recorded[name], t)
        found.append(Finding(name, worst, 0.0, ATOL[dtype], where))
    return broken(found)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills every fresh tensor with NaN (integers: the largest value), so that an element left unwritten is seen.

    PyTorch's own switch does it inside the allocator's callers, C++ included.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
