"""Records what the modules of a model compute in one call: inputs, outputs, gradients, and by which
implementation.

Every hook is taken off afterwards. Gradients are those of the module alone: it gets views of its
inputs, whose gradients come from nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tilewright import selection
from tilewright_lab.verify.reference import Weights


def map_leaves(function: Callable[[str, Any], Any], value: Any, name: str = "") -> Any:
    """A copy of nested tuples, lists and dictionaries (such as transformers' outputs) with
    function(name, leaf) in place of leaves. Names are keys and positions, joined by dots.
    """

    def inner(key, v):
        return map_leaves(function, v, f"{name}.{key}" if name else str(key))

    if isinstance(value, dict):
        mapped = {k: inner(k, v) for k, v in value.items()}
        return mapped if type(value) is dict else type(value)(**mapped)
    if isinstance(value, (tuple, list)):
        items = [inner(i, v) for i, v in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(name, value)


def leaves(value: Any) -> dict[str, Any]:
    """Leaves by name; that of a single tensor is ""."""
    by_name: dict[str, Any] = {}
    map_leaves(by_name.__setitem__, value)
    return by_name


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a module.

    path: the module's path in the reference.   number: how many calls of it came before.
    arguments: (args, kwargs), tensors detached.   output: likewise.
    into, out: gradients of inputs and outputs, by the names of `leaves` of arguments and output;
        zeros where none arrived.
    parent, children: the nearest calls around and inside it that are recorded.
    picks: implementations that the registry took, and what autograd says of the rest.
    """

    path: str
    number: int
    arguments: tuple[tuple, dict[str, Any]]
    parent: Call | None
    output: Any = None
    into: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    out: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    children: list[Call] = dataclasses.field(default_factory=list)
    picks: dict[str, None] = dataclasses.field(default_factory=dict)

    def output_leaves(self) -> dict[str, torch.Tensor]:
        return {n: t for n, t in leaves(self.output).items() if isinstance(t, torch.Tensor)}

    @property
    def key(self) -> tuple[str, int]:
        return self.path, self.number


def observable(root: nn.Module, weights: Weights) -> dict[str, nn.Module]:
    """The modules that are recorded, by their paths in the reference: those that hold parameters or
    buffers, with the inside of adapted and quantized layers left out, and the head: losses that
    never build the logits read its weight, and leave a head with hooks alone.
    """
    get_head = getattr(root, "get_output_embeddings", None)
    head = get_head() if get_head else None
    modules: dict[str, nn.Module] = {}
    for path, module in root.named_modules():
        plain = weights.paths.get(path)
        if plain is None or plain in modules or module is head or isinstance(module, nn.ModuleList):
            continue
        if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
            modules[plain] = module
    return modules


def _same(value: torch.Tensor) -> torch.Tensor:
    return value.view_as(value)


class Recorder:
    """Records the calls of a model's modules within `recording`."""

    def __init__(self, modules: dict[str, nn.Module], *, gradients: bool):
        self.modules, self.gradients = modules, gradients
        self.calls: list[Call] = []  # in the order in which they began
        self.ended: list[Call] = []  # in the order in which they ended
        self._stack: list[Call] = []
        self._count: dict[str, int] = defaultdict(int)
        self._borders: list[dict[int, None]] = []
        self._nodes: list[Any] = []
        self._inside: list[list[Any]] = []  # nodes of each running call's inputs
        self._over: dict[int, list[Any]] = {}  # what is before a module, by a node of its output
        # Outputs of frozen embeddings: gradients are asked for down to these, so that there is one
        # of every module.
        self.starts: list[torch.Tensor] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        handles = []
        try:
            for path, module in self.modules.items():
                handles += (
                    module.register_forward_pre_hook(self._before(path), with_kwargs=True),
                    module.register_forward_hook(self._after, with_kwargs=True),
                )
            with selection.watching(self._picked):
                yield self
        finally:
            for handle in handles:
                handle.remove()
            self._stack.clear()

    def _picked(self, op: str, implementation: str) -> None:
        if self._stack:
            self._stack[-1].picks[f"{op}[{implementation}]"] = None

    def _before(self, path: str):
        def before(module, args, kwargs):
            parent = self._stack[-1] if self._stack else None
            call = Call(path, self._count[path], ((), {}), parent)
            self._count[path] += 1
            self.calls.append(call)
            if parent is not None:
                parent.children.append(call)
            self._stack.append(call)
            self._borders.append({})
            first = len(self._nodes)
            viewed = map_leaves(lambda n, t: self._view(t, n, call.into), (args, kwargs))
            self._inside.append(self._nodes[first:])
            call.arguments = map_leaves(lambda n, t: _copied(t), (args, kwargs))
            return viewed

        return before

    def _view(
        self, value: Any, name: str, gradients: dict[str, torch.Tensor], make: Callable = _same
    ) -> Any:
        """A view, or another tensor of the same values, with an autograd node of its own, whose
        gradient is kept.
        """
        if not isinstance(value, torch.Tensor) or not value.requires_grad or not self.gradients:
            return value
        viewed = make(value)
        gradients[name] = torch.zeros((), dtype=value.dtype, device=value.device).expand(
            value.shape
        )
        viewed.register_hook(lambda g: gradients.__setitem__(name, g.detach().clone()))
        for border in self._borders:
            border[id(viewed.grad_fn)] = None
        self._nodes.append(viewed.grad_fn)  # a node is told by its `id`, so it must stay alive
        return viewed

    def _after(self, module, args, kwargs, output):
        call = self._stack.pop()
        self.ended.append(call)
        border = self._borders.pop()
        call.output = map_leaves(lambda n, t: _copied(t), output)
        if not call.picks:
            call.picks = dict.fromkeys(_autograd_names(output, border, self._over))
        before = [n for node in self._inside.pop() for n, _ in node.next_functions]
        if self.gradients:
            output = self._needing_grad(module, output)
            # Copies: a caller may add to an output in place, which views of it would not survive.
            first = len(self._nodes)
            output = map_leaves(lambda n, t: self._view(t, n, call.out, torch.clone), output)
            self._over |= dict.fromkeys(map(id, self._nodes[first:]), before)
        return output

    def _needing_grad(self, module, output):
        if isinstance(module, nn.Embedding) and not module.weight.requires_grad:
            output = output.detach().requires_grad_()
            self.starts.append(output)
        return output


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _autograd_names(output: Any, border: dict[int, None], over: dict[int, list]) -> list[str]:
    """What autograd's nodes say of a module's own part: custom functions and PyTorch's fused
    attention. The walk goes over the modules within it, and ends at the views of its inputs.
    """
    names: dict[str, None] = {}
    outs = [t for t in leaves(output).values() if isinstance(t, torch.Tensor)]
    todo = [t.grad_fn for t in outs if t.grad_fn is not None]
    seen: set[int] = set()
    while todo and len(seen) < 2000:
        node = todo.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if id(node) in border:
            todo += over.get(id(node), [])
            continue
        name = node.name()
        if "ScaledDotProduct" in name:
            names["sdpa"] = None
        elif isinstance(node, torch.autograd.function.BackwardCFunction):
            names[name.removesuffix("Backward")] = None
        todo += [next_node for next_node, _ in node.next_functions]
    return list(names)
