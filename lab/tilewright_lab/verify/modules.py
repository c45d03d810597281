"""Each module against its definition in float64, from what it was given.

A module's own part is replayed in a reference: with its recorded inputs, with the recorded outputs
of the modules it calls in place of theirs, and with the recorded gradients of its output and of
what it gives to them. So an error belongs to the module that makes it, and not to all that follow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tilewright.bench import contract
from tilewright.ops import OPS
from tilewright.ops.attention.attention import ATTENTION
from tilewright_lab.verify.record import Call, leaves, map_leaves
from tilewright_lab.verify.reference import Twin

CACHES = ("cache", "past_key_values", "past_key_value", "cache_params")
# Added to twice the eager twin's error, as in the contract. In float32 four times as much: a module
# is several ops, whose sums have another order elsewhere.
FLOAT32 = 4
SLACK = contract.ATOL | {torch.float32: FLOAT32 * contract.ATOL[torch.float32]}
Masks = dict[tuple[str, int], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One compared tensor of a module.

    error, eager: deviations from float64 of the model's and of the eager twin's, in the units of
        `bench.contract.error`.   budget: what the contract allows.   where: the worst element.
    factor: the factor of the projection on the truth, minus 1: an error that all elements share.
    factor_budget: what is allowed of it.
    by: the implementations that were seen.
    """

    scene: str
    path: str
    what: str
    error: float
    eager: float
    budget: float
    where: tuple[int, ...]
    factor: float
    factor_budget: float
    by: str
    rest: float = math.inf  # the error without that factor, where the contract is broken

    @property
    def units(self) -> float:
        """Contract units: 1 is what the contract allows."""
        return max(self.error / self.budget, abs(self.factor) / self.factor_budget)

    @property
    def shared(self) -> bool:
        """Whether only the error that all elements share exceeds what is allowed."""
        return self.error <= self.budget < math.inf and abs(self.factor) > self.factor_budget


@dataclasses.dataclass
class Replay:
    """What a reference computes for one call: values by name, and gradients of parameters by id."""

    values: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    parameters: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)


def named_arguments(arguments: tuple[tuple, dict], forward: Callable) -> dict[str, Any]:
    """Arguments by the names in a forward's signature; those that it does not take are left out."""
    args, kwargs = arguments
    parameters = inspect.signature(forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return given
    taken = {p.name for p in parameters}
    return {k: v for k, v in given.items() if k in taken}


def by_name(call: Call, forward: Callable) -> dict[str, torch.Tensor]:
    """The gradients of a call's inputs by the names of arguments."""
    names = [p.name for p in inspect.signature(forward).parameters.values()]
    gradients = {}
    for key, gradient in call.into.items():
        kind, at, *rest = key.split(".")
        name = names[int(at)] if kind == "0" and int(at) < len(names) else at
        gradients[".".join((name, *rest))] = gradient
    return gradients


class _Choices(TorchFunctionMode):
    """Takes the recorded experts where a reference's are another choice among as good ones: their
    scores agree within the rounding of the model's dtype.
    """

    def __init__(self, call: Call):
        super().__init__()
        given = [c.arguments for c in call.children]
        self.indices = [
            t
            for t in leaves([call.output, *given]).values()
            if isinstance(t, torch.Tensor) and t.dtype == torch.int64 and t.dim() > 1
        ]
        floats = [t for t in leaves(call.arguments).values() if _is_float(t)]
        self.close = 1e-3 if all(t.dtype == torch.float32 for t in floats) else 0.1

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            for recorded in self.indices:
                if recorded.shape == result.indices.shape:
                    return self._chosen(args[0], recorded, result)
        return result

    def _chosen(self, scores: torch.Tensor, recorded: torch.Tensor, result: Any) -> Any:
        if int(recorded.max()) >= scores.shape[-1] or int(recorded.min()) < 0:
            return result
        values = scores.gather(-1, recorded)
        far = (values - result.values).abs() > self.close * result.values.abs().clamp_min(1e-6)
        far = far.any(-1, keepdim=True)
        return torch.return_types.topk(
            (result.values.where(far, values), result.indices.where(far, recorded))
        )


class _RoundedSums(TorchFunctionMode):
    """Roundings of the sum in the gradient of softmax P, dS = P (dP - sum of P dP), one for a row:
    fused attention has it from its output, which was rounded. Where values are nearly equal, as
    behind a large bias, dP and the sum cancel.
    """

    def __init__(self, half: float, generator: torch.Generator):
        super().__init__()
        self.half, self.generator = half, generator

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        softmax = (torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax)
        if func in softmax and result.requires_grad and args[0].requires_grad:
            self._around(args[0], result)
        return result

    def _around(self, scores: torch.Tensor, p: torch.Tensor) -> None:
        sums: list[torch.Tensor] = []
        p.register_hook(lambda g: sums.append((p.detach() * g).abs().sum(-1, keepdim=True)))

        def moved(g: torch.Tensor) -> torch.Tensor:
            size = sums.pop()
            noise = torch.rand(size.shape, generator=self.generator, dtype=torch.float64) * 2 - 1
            return g + p.detach() * size * self.half * noise.to(g.device)

        scores.register_hook(moved)


def attention_masks(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Masks [B, 1, S, S] among a call's, by name."""
    return {n: m for n, m in arguments.items() if isinstance(m, torch.Tensor) and m.dim() == 4}


def is_positions(name: str, value: Any) -> bool:
    """Whether an argument holds the positions of tokens, or the integers of an embedding."""
    integers = isinstance(value, torch.Tensor) and value.dtype == torch.int64
    return integers and name in ("position_ids", "input")


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class Replayer:
    """Replays calls in one reference.

    masks: those that the reference made for the batch, by call.
    jitter: a generator of random roundings of all that is recorded, to see how far one rounding
        moves a result; None: none.
    """

    def __init__(self, twin: Twin, masks: Masks, jitter: torch.Generator | None = None):
        self.twin, self.masks, self.jitter = twin, masks, jitter

    def _cast(self, value: torch.Tensor) -> torch.Tensor:
        cast = self.twin.cast(value.detach())
        if self.jitter is not None:
            noise = torch.rand(cast.shape, generator=self.jitter, dtype=torch.float64) * 2 - 1
            half = torch.finfo(value.dtype).eps / 2
            cast = cast * (1 + half * noise.to(cast.device))
        return cast

    def _leaf(self, value: Any, differentiable: bool) -> Any:
        if not _is_float(value):
            return value
        cast = self._cast(value)
        return (cast.clone() if cast is value else cast).requires_grad_(differentiable)

    def arguments(self, call: Call, module: nn.Module, masks: dict[str, Any] | None = None):
        """A call's arguments for the reference's module, as new leaves."""
        gradients = by_name(call, module.forward)
        known = self.masks.get(call.key, {}) if masks is None else masks
        given = named_arguments(call.arguments, module.forward)
        for name in given:
            if name in CACHES:
                given[name] = None
            elif name == "use_cache":
                given[name] = False
            elif name in known:
                given[name] = known[name]
            else:
                given[name] = map_leaves(
                    lambda n, v: self._leaf(v, n in gradients), given[name], name
                )
        return given, gradients

    def replay(self, call: Call, masks: dict[str, Any] | None = None) -> Replay:
        """masks: in place of the reference's own, for a diagnosis."""
        module = self.twin.module(call.path)
        assert module is not None
        given, gradients = self.arguments(call, module, masks)
        replay, ends, starts = Replay(), [], []
        for name, leaf in leaves(given).items():
            if name in gradients and _is_float(leaf):
                starts.append((f"gradient of {name}", leaf))
        rounded = contextlib.nullcontext()
        if self.jitter is not None:
            eps = max((torch.finfo(g.dtype).eps for g in call.out.values()), default=0.0)
            rounded = _RoundedSums(eps / 2, self.jitter)
        inner = self._stubs(call, replay, ends, starts)
        with self.twin.computing(), _Choices(call), rounded, inner:
            output = module(**given)
        for name, leaf in leaves(output).items():
            if _is_float(leaf):
                replay.values[f"output {name}".strip()] = leaf.detach()
                if name in call.out and leaf.requires_grad:
                    ends.append((leaf, call.out[name]))
        own = self._own_parameters(call, module)
        ends = [(t, self._cast(g).reshape(t.shape)) for t, g in ends if t.numel() == g.numel()]
        wanted = [t for _, t in starts] + own
        if ends and wanted:
            with self.twin.computing():
                got = torch.autograd.grad(
                    [t for t, _ in ends], wanted, [g for _, g in ends], allow_unused=True
                )
            for (name, leaf), g in zip(starts, got, strict=False):
                replay.values[name] = torch.zeros_like(leaf) if g is None else g
            for p, g in zip(own, got[len(starts) :], strict=True):
                if g is not None:
                    replay.parameters[id(p)] = g
        return replay

    def _own_parameters(self, call: Call, module: nn.Module) -> list[nn.Parameter]:
        """The parameters of a module that are not those of recorded modules within it."""
        prefix = f"{call.path}." if call.path else ""
        inside = {f"{c.path.removeprefix(prefix)}." for c in call.children}
        own = {
            id(p): p
            for name, p in module.named_parameters(remove_duplicate=False)
            if p.requires_grad and not any(name.startswith(i) for i in inside)
        }
        return list(own.values())

    @contextlib.contextmanager
    def _stubs(self, call: Call, replay: Replay, ends: list, starts: list) -> Iterator[None]:
        """Puts recorded outputs in place of what the reference's inner modules compute."""
        queues: dict[str, deque[Call]] = defaultdict(deque)
        for child in call.children:
            queues[child.path].append(child)
        changed = []

        def stub(path: str, own: Callable, *args, **kwargs):
            if not queues[path]:
                return own(*args, **kwargs)
            child = queues[path].popleft()
            short = _short(call.path, child)
            given = leaves(named_arguments((args, kwargs), own))
            gradients = by_name(child, own)
            for name, leaf in given.items():
                if is_positions(name, leaf):
                    replay.values[f"input {name} of {short}"] = leaf.double()
                elif _is_float(leaf) and "mask" not in name:
                    replay.values[f"input {name} of {short}"] = leaf.detach()
                    if name in gradients and leaf.requires_grad:
                        ends.append((leaf, gradients[name]))

            def output(name, value):
                leaf = self._leaf(value, name in child.out)
                if name in child.out:
                    starts.append((f"gradient to {short} {name}".strip(), leaf))
                # A caller may add to it in place, and it may share memory with what is recorded.
                return leaf.clone() if _is_float(leaf) else leaf

            return _shaped(map_leaves(output, child.output), child, (args, kwargs))

        try:
            for path in queues:
                module = self.twin.module(path)
                if module is not None:
                    own = module.forward
                    module.forward = lambda *a, _p=path, _o=own, **k: stub(_p, _o, *a, **k)
                    changed.append(module)
            yield
        finally:
            for module in changed:
                del module.forward


def _shaped(output: Any, child: Call, given: tuple) -> Any:
    """A recorded output for a caller that gives rows [B S, H] where the model gave [B, S, H], or
    the other way round.
    """
    first, own = (
        next((t for t in leaves(a).values() if _is_float(t)), None)
        for a in (given, child.arguments)
    )
    if not isinstance(output, torch.Tensor) or first is None or own is None:
        return output
    if first.shape == own.shape or first.numel() != own.numel():
        return output
    return output.reshape(*first.shape[:-1], output.shape[-1])


def _short(path: str, child: Call) -> str:
    name = child.path.removeprefix(f"{path}.") if path else child.path
    return f"{name}#{child.number}" if child.number else name


def observed(call: Call, forward: Callable, forwards: dict[str, Callable]) -> dict[str, Any]:
    """The model's own values, by the names of `Replay.values`.

    forwards: forwards of the reference's modules by path, for the names of arguments.
    """
    values = {f"output {n}".strip(): t for n, t in leaves(call.output).items() if _is_float(t)}
    values |= {f"gradient of {n}": g for n, g in by_name(call, forward).items()}
    for child in call.children:
        short, own = _short(call.path, child), forwards.get(child.path)
        if own is not None:
            given = leaves(named_arguments(child.arguments, own))
            values |= {f"input {n} of {short}": t for n, t in given.items() if _is_float(t)}
            values |= {
                f"input {n} of {short}": t.double() for n, t in given.items() if is_positions(n, t)
            }
            values |= {f"gradient to {short} {n}".strip(): g for n, g in child.out.items()}
    return values


# ---- comparison


def factor_of(result: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    """The factor of a tensor's projection on the truth, minus 1; and the number of elements that
    the truth consists of, by its energy.
    """
    r, t = result.double().flatten(), truth.double().flatten()
    energy = float(t.dot(t))
    if not energy or not math.isfinite(energy):
        return 0.0, 1.0
    return float((r - t).dot(t)) / energy, energy**2 / max(float(t.pow(4).sum()), 1e-300)


def kept_rows(value: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """The rows of tokens that are not padding, of a tensor [B, S, ...] or [B S, ...]."""
    if kept is not None:
        if value.shape[:2] == kept.shape:
            return value[kept]
        if value.dim() > 1 and value.shape[0] == kept.numel():
            return value[kept.flatten()]
    return value


def slack_of(calls: Iterable[Call], what: str, kind: str) -> float:
    """What is allowed beside the eager twin's error: by the coarsest dtype of what the modules were
    given and returned; for the gradients of attention and of experts as in the contracts of
    `ops.attention` and `ops.moe_lora`, which say why.

    kind: the module's class name.
    """
    if what == "output loss":
        return SLACK[torch.float32]
    values = [
        t for c in calls for t in leaves((c.arguments, c.output)).values()
        if _is_float(t) and t.dtype in SLACK
    ]  # fmt: skip
    dtype = max((t.dtype for t in values), key=lambda d: torch.finfo(d).eps, default=torch.float32)
    if what.startswith("gradient") and "Attention" in kind:
        first = next(t for t in values if t.dim() > 1)
        q = first.new_empty((1, 1, first.shape[-2], 1))
        own = contract.slack(ATTENTION, dtype, {"q": q}, "grad q")
        assert own is not None
        # Where a first token draws nearly all attention, as in trained models, the cancellation
        # that this allows for is larger: 0.43 beyond twice eager's, SmolLM2-135M in bfloat16.
        return own * (FLOAT32 if dtype == torch.float32 else 8)
    if what.startswith("gradient") and "Experts" in kind:
        by_dtype = OPS["moe_lora"].atol
        assert isinstance(by_dtype, Mapping)
        return by_dtype[dtype]
    return SLACK[dtype]


def compare(
    result: Any, truth: torch.Tensor, eager: torch.Tensor, label: tuple[str, str, str, str],
    atol: float,
) -> Row:  # fmt: skip
    """label: scene, path, what, by.   atol: as from `slack_of`."""
    scene, path, what, by = label
    if result is None:
        result = torch.zeros_like(truth)
    if result.shape != truth.shape and result.numel() == truth.numel():
        result = result.reshape(truth.shape)
    if result.shape != truth.shape:
        text = f"{what} (shape {list(result.shape)}, not {list(truth.shape)})"
        return Row(scene, path, text, math.inf, 0.0, atol, (), 0.0, 1.0, by)
    error, where = contract.error(result, truth) if truth.numel() else (0.0, ())
    factor, count = factor_of(result, truth)
    twin, twin_factor = error, factor
    if not torch.equal(eager, result):
        twin, _ = contract.error(eager, truth) if truth.numel() else (0.0, ())
        twin_factor, _ = factor_of(eager, truth)
    slack = min(atol, SLACK[torch.bfloat16]) * max(1 / 4, min(1.0, 8 / math.sqrt(count)))
    row = Row(
        scene, path, what, error, twin, 2 * twin + atol, where,
        factor, 2 * abs(twin_factor) + slack, by,
    )  # fmt: skip
    if row.units > 1 and factor != -1:
        rest, _ = contract.error(result.double() / (1 + factor), truth)
        row = dataclasses.replace(row, rest=rest)
    return row
