"""Makes a pair of launchers a `torch.library` operator that supports autograd and torch.compile."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from tilewright.core import torch_names
from tilewright.core.installed import PACKAGE
from tilewright.core.torch_names import in_transform

_LIBRARY = torch.library.Library(PACKAGE, "FRAGMENT")
# The launchers of operators that are written in Python, by name.
LAUNCHERS: dict[str, Callable] = {}
_ADVICE = "use implementation='eager'"


# Queried in each operator call. The first is a constant under Dynamo, which then traces no other.
_tracing, _recording = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_modes, _function_modes = torch_names.torch_dispatch_modes, torch_names.torch_function_modes
_profiled, _traced, _any_requires_grad = (
    torch_names.profiled,
    torch_names.traced_by_jit,
    torch_names.any_requires_grad,
)
_in_forward_mode = torch_names.in_forward_mode

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Schema type -> types that launchers take unchanged. The dispatcher converts or refuses others.
_TYPES = {
    "Tensor": _PLAIN,
    "float": (float,),
    "int": (int,),
    "SymInt": (int,),
    "bool": (bool,),
    "str": (str,),
    "ScalarType": (torch.dtype,),
    "List[int]": (list,),
    "List[SymInt]": (list,),
    "List[float]": (list,),
    "List[bool]": (list,),
    "List[Tensor]": (list,),  # whose elements a call inspects
}


_plain = False


@contextlib.contextmanager
def plain_operators() -> Iterator[None]:
    """Compiles operators that have a `plain` form to PyTorch's own, within a block.

    For a benchmark's `torch.compile` of an eager twin, in which an operator would hide what a user
    would let the compiler fuse. What was compiled within the block is called within it too.
    """
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


@torch_names.constant
def _is_plain() -> bool:  # a constant, so that other compiled code has no guard on it
    return _plain


class Operator:
    """A `torch.library` operator whose calls bypass the dispatcher where possible.

    A call through the dispatcher converts its arguments three times, which takes longer than a
    launch. So plain tensors on a CPU or a CUDA device go directly to the launcher; where a graph is
    recorded, through an autograd.Function. Everything that traces, transforms or observes operators
    (torch.compile, tensor subclasses, modes, torch.func, forward-mode derivatives, torch.jit.trace,
    the profiler) gets the operator itself: `overload`.
    """

    def __init__(
        self, overload: Callable, launch: Callable, *, cuda: bool, plain: Callable | None = None
    ):
        self.overload, self._launch, self.cuda, self.plain = overload, launch, cuda, plain
        self.__name__ = self.__qualname__ = overload.name()  # function attributes
        self._apply: Callable | None = None  # the launcher with its derivative
        self._first: dict[tuple[type, ...], int] = {}  # argument types -> `_first_tensor`
        self._lists = tuple(
            i
            for i, a in enumerate(overload._schema.arguments)
            if "List[Tensor]" in str(a.real_type)
        )

    def name(self) -> str:
        return self.overload.name()

    @property
    def has_lists(self) -> bool:
        """Whether an argument is a list of tensors."""
        return bool(self._lists)

    def __call__(self, *args):
        if (
            _tracing()
            or _modes()
            or _function_modes()
            or in_transform()
            or _in_forward_mode()
            or _profiled()
            or _traced()
        ):
            if self.plain and _tracing() and _is_plain():
                return self.plain(*args)
            return self.overload(*args)
        types = tuple(map(type, args))
        first = self._first.get(types)
        if first is None:
            first = self._first[types] = self._first_tensor(types)
        if first < 0:
            return self.overload(*args)
        for i in self._lists:
            for element in args[i]:
                if type(element) not in _PLAIN:
                    return self.overload(*args)
        tensor = args[first]
        if tensor.is_cuda and self.cuda:
            if tensor.get_device() != torch.cuda.current_device():
                with torch.cuda.device(tensor.get_device()):
                    return self(*args)
        elif not tensor.is_cpu:
            return self.overload(*args)
        if not (_recording() and _any_requires_grad(*args)):
            return self._launch(*args)
        return (self._apply or self.overload)(*args)

    def launch(self, *args):
        """Calls the launcher itself, through its autograd.Function where a graph is recorded."""
        if self._apply and _recording() and _any_requires_grad(*args):
            return self._apply(*args)
        return self._launch(*args)

    def _first_tensor(self, types: tuple[type, ...]) -> int:
        """The first tensor's index in arguments of these types; -1 unless the launcher takes all of
        them.
        """
        schema = self.overload._schema
        if schema.is_mutable or len(types) != len(schema.arguments):
            return -1
        for given_type, argument in zip(types, schema.arguments, strict=True):
            kind = str(argument.real_type)
            base_kind = (
                kind.removeprefix("Optional[").removesuffix("]")
                if kind.startswith("Optional[")
                else kind
            )
            if given_type not in _TYPES.get(base_kind, ()) and not (
                base_kind != kind and given_type is type(None)
            ):
                return -1
        return next((i for i, given_type in enumerate(types) if given_type in _PLAIN), -1)


def from_kernels(module: str, name: str) -> Callable[[], Any]:
    """A function that imports `tilewright.kernels.<module>` when called and returns its attribute
    `name`, or, if that is a function, its result.

    For `Implementation.tunables` and `Implementation.gate`, so that importing an op imports no
    kernel.
    """

    def fetch():
        given_type = getattr(importlib.import_module(f"{PACKAGE}.kernels.{module}"), name)
        return given_type() if callable(given_type) else given_type

    return fetch


def define(
    name: str,
    fn: Callable,
    fake: Callable,
    *,
    mutates: Sequence[str] = (),
    plain: Callable | None = None,
) -> Operator:
    """Registers `tilewright::name` for CPU and CUDA tensors and returns the operator.

    fn: the launcher; its annotations give the schema (see torch.library.infer_schema).
    fake: same signature, returns empty tensors of the right shapes, dtypes and strides.
    mutates: names of arguments that `fn` writes.
    plain: same arguments and results, of PyTorch's operators alone, without checks of values; see
        `plain_operators`.

    It uses the low-level Library, not torch.library.custom_op: same operator, about half the host
    time per call.
    """
    _LIBRARY.define(
        name + torch.library.infer_schema(fn, mutates_args=mutates),
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    _LIBRARY.impl(name, fn, "CPU")
    _LIBRARY.impl(name, on_its_device(fn), "CUDA")
    torch.library.register_fake(f"{PACKAGE}::{name}", fake, lib=_LIBRARY)
    LAUNCHERS[f"{PACKAGE}::{name}"] = fn
    overload = getattr(getattr(torch.ops, PACKAGE), name).default
    _count_writes(overload)
    op = Operator(overload, fn, cuda=True, plain=plain)
    if op.has_lists:  # PyTorch's own vmap fallback does not support lists
        rule = functools.partial(_one_by_one, op.overload)
        torch.library.register_vmap(f"{PACKAGE}::{name}", rule, lib=_LIBRARY)
    return op


def _one_by_one(overload, info, in_dims, *args):
    """A torch.vmap rule: calls the operator for each element of the batch."""

    def element(i, arg, dim):
        if isinstance(dim, (list, tuple)):
            return [element(i, *pair) for pair in zip(arg, dim, strict=True)]
        return arg if dim is None else arg.select(dim, i)

    results = [
        overload(*(element(i, *pair) for pair in zip(args, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])


def _tensors(args: Iterable[object]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, including those in lists."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, list):
            yield from (t for t in arg if isinstance(t, torch.Tensor))


def on_its_device(fn: Callable) -> Callable:
    """fn(*args), run with the device of its first CUDA tensor current, on whose stream kernels are
    launched. Nothing is switched if it is current already.
    """

    @functools.wraps(fn)
    def guarded(*args):
        for t in _tensors(args):
            if t.is_cuda:
                if t.get_device() == torch.cuda.current_device():
                    break
                with torch.cuda.device(t.get_device()):
                    return fn(*args)
        return fn(*args)

    return guarded


def adopt(name: str, fake: Callable) -> Operator:
    """Adds a fake to an operator that the C++ extension has defined, and returns the operator."""
    torch.library.register_fake(f"{PACKAGE}::{name}", fake, lib=_LIBRARY)
    overload = getattr(getattr(torch.ops, PACKAGE), name).default
    _count_writes(overload)
    on_cpu = functools.partial(overload.redispatch, torch_names.CPU_KERNELS)
    return Operator(overload, on_cpu, cuda=False)


def _count_writes(overload) -> None:
    """Makes an operator that writes its arguments raise their version counters, by which autograd
    knows that a tensor that it saved was changed. PyTorch does that for its own operators and for
    torch.library.custom_op's.

    Only where the name ends in "_": others write into new tensors.
    """
    arguments = overload._schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
    name = overload._schema.name.split("::")[1]
    if not written or not name.endswith("_"):
        return

    def counted(keyset, *args):
        tensors = _tensors(args[i] for i in written)
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])
        with torch_names.BelowCounters():
            return overload.redispatch(keyset & torch_names.BELOW_COUNTERS, *args)

    _LIBRARY.impl(name, counted, "ADInplaceOrView", with_keyset=True)


# Long: the functions that autograd is given, which close over the operator's.
def differentiate(
    op: Operator,
    backward: Callable,
    setup_context: Callable,
    *,
    backward_op: Callable | None = None,
    twice: bool = False,
) -> None:
    """Gives an operator its autograd formula, and refuses derivatives that it does not have.

    backward_op: the operator that the formula launches, available as `ctx.backward_op`. So one
        formula, a module-level function, serves all implementations of an op.
    twice: the formula consists of differentiable calls only.

    Kernels have no formulas of their own, so autograd would treat the results of a formula as
    constants: a second derivative would be silently wrong. Forward-mode tangents would be dropped
    as silently.

    Tensors in a list (`Tensor[]`) have no gradient: the formula returns None for the list.
    """
    name = op.name().split(".")[0]
    formula = backward if twice else once(name, backward)

    def save(ctx, inputs, output):
        ctx.backward_op = backward_op
        setup_context(ctx, inputs, output)

    def listed(ctx, *grads):  # where PyTorch makes each element of a list a separate input
        results = formula(ctx, *grads)
        return tuple(
            [None] * len(need) if isinstance(need, list) else grad
            for grad, need in zip(results, ctx.needs_input_grad, strict=True)
        )

    kernel = torch_names.make_autograd_impl(
        op.overload, torch_names.Info(listed if op.has_lists else formula, save)
    )
    launch = op._launch

    def forward(ctx, *args):
        result = launch(*args)
        save(ctx, args, result)
        return result

    # The same, bypassing the dispatcher.
    direct = type(
        name.replace("::", "_"),
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(formula)},
    )
    # Skips Function's own apply, which prepares for torch.func.
    op._apply = super(torch.autograd.Function, direct).apply

    class InTransform(torch_names.SingleLevelFunction):
        """The Function that `kernel` applies, for the level of torch.func's transforms at which the
        operator is dispatched.
        """

        @staticmethod
        def forward(ctx, keyset, *args):
            _refuse_beneath(name, args)
            with torch_names.BelowAutograd():
                result = op.overload.redispatch(keyset & torch_names.BELOW_AUTOGRAD, *args)
            save(ctx, args, result)
            return result

        @staticmethod
        def backward(ctx, *grads):
            _refuse_beneath(name, grads)
            ctx = _WithoutFirst(ctx)
            results = formula(ctx, *grads)
            return None, *(results if isinstance(results, tuple) else (results,))

    def guarded(keyset, *args):
        refuse_tangents(name, *args)
        if in_transform() and torch.is_grad_enabled() and _any_requires_grad(*args):
            with _single_level():
                return InTransform.apply(keyset, *args)
        return kernel(keyset, *args)

    # What torch.library.register_autograd does, with the guard around its kernel.
    _LIBRARY.impl(name.split("::")[1], guarded, "Autograd", with_keyset=True)


def refuse_tangents(name: str, *args: object) -> None:
    """Raises RuntimeError, naming an operator that would drop it, if an argument has a forward-mode
    tangent.
    """
    if _in_forward_mode():
        for arg in _tensors(args):
            if forward_ad.unpack_dual(arg).tangent is not None:
                raise RuntimeError(f"{name} has no forward-mode derivative; {_ADVICE}")


@contextlib.contextmanager
def _single_level():
    """Enables a Function for a single level of torch.func's transforms, which PyTorch refuses by
    default.
    """
    allowed = torch_names.single_level_allowed()
    torch_names.allow_single_level(True)
    try:
        yield
    finally:
        torch_names.allow_single_level(allowed)


def _refuse_beneath(name, tensors):
    """Refuses grad of grad, and grad of tensors that autograd records: an outer level would not see
    this one.
    """
    for t in _tensors(tensors):
        while torch_names.is_wrapped(t):
            t = torch_names.unwrapped(t)
            if t.requires_grad:
                raise RuntimeError(_again(name))


class _WithoutFirst:
    """A context without its first input."""

    def __init__(self, ctx):
        self._ctx, self.needs_input_grad = ctx, ctx.needs_input_grad[1:]

    def __getattr__(self, name):
        return getattr(self._ctx, name)


def _again(name: str) -> str:
    return f"{name} is differentiable once; {_ADVICE} for higher derivatives"


def once(name: str, backward: Callable) -> Callable:
    """A backward(ctx, *grads) that refuses derivatives of its results, naming an operator."""
    again = _again(name)

    def refusing(ctx, *grads):
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        ctx = _ReadOnce(ctx)
        behind = [t for t in ctx.saved_tensors if t is not None and t.requires_grad]
        if not behind:
            # As where the forward computes gradients: there is no tensor to attach an error to.
            raise RuntimeError(
                f"{name} has no derivative within torch.func; {_ADVICE}"
                if in_transform()
                else again
            )
        with torch.no_grad():
            results = backward(ctx, *grads)
        behind += [g for g in grads if g is not None and g.requires_grad]
        # torch.autograd.function.once_differentiable attaches its error to new leaves, so that
        # autograd.grad with respect to the real ones bypasses it. This one is attached to the
        # inputs of the result.
        several = isinstance(results, tuple)
        results = results if several else (results,)
        error = torch_names.DelayedError(again.encode(), len(results) + len(behind))
        refused = error(*results, *behind)[: len(results)]
        return refused if several else refused[0]

    return refusing


def once_across(name: str) -> Callable[[Callable], Callable]:
    """A decorator of a backward that communicates, naming an op. Communication has no graph: a
    second derivative would silently leave out everything that went through it.
    """

    def decorate(backward: Callable) -> Callable:
        @functools.wraps(backward)
        def guarded(ctx, *grads):
            if torch.is_grad_enabled():  # create_graph=True
                raise RuntimeError(
                    f"{name} is differentiable once; there are no higher derivatives across "
                    f"processes"
                )
            return backward(ctx, *grads)

        return guarded

    return decorate


class _ReadOnce:
    """A context whose saved tensors can be read twice: checkpointing returns them once."""

    def __init__(self, ctx):
        self._ctx = ctx

    def __getattr__(self, name):  # called only for missing attributes
        value = self.__dict__[name] = getattr(self._ctx, name)
        return value
