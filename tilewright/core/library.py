"""`torch.library` operators that support autograd and torch.compile, from what they have in common
(`declare`) and a launcher each.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from tilewright.core import dynamic, schema, torch_names
from tilewright.core.formula import Formula
from tilewright.core.installed import PACKAGE
from tilewright.core.schema import Signature
from tilewright.core.torch_names import in_transform

_LIBRARY = torch.library.Library(PACKAGE, "FRAGMENT")
# The launchers of operators that are written in Python, by name. They take flat arguments
# (`Signature`).
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
_in_forward_mode, _in_legacy_vmap = torch_names.in_forward_mode, torch_names.in_legacy_vmap

_plain = False


@contextlib.contextmanager
def plain_operators() -> Iterator[None]:
    """Compiles operators that have a `plain` form to PyTorch's own, within a block.

    For a benchmark's `torch.compile` of an eager twin: in a user's code the compiler could fuse
    what an operator hides from it. Call a compiled function only within the block in which it was
    compiled.
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
        self,
        overload: torch_names.OpOverload,
        launch: Callable,
        signature: Signature,
        *,
        cuda: bool,
        plain: Callable | None = None,
    ):
        self.overload, self._launch, self.cuda, self.plain = overload, launch, cuda, plain
        self.signature = signature
        self._expand = signature.expand if signature.expands else None
        self._floats = dynamic.places_of_floats(overload)
        self.numbers: torch_names.OpOverload | None = None  # the overload for symbolic ones
        self.__name__ = self.__qualname__ = overload.name()  # function attributes
        self._apply: Callable | None = None  # the launcher with its derivative
        self._first: dict[tuple[type, ...], int] = {}  # argument types -> `_first_tensor`
        # The places of lists of tensors, whose elements a call inspects.
        self._lists = tuple(i for i, a in enumerate(signature.direct) if a.list_of_tensors)

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
            or _in_legacy_vmap()
            or _in_forward_mode()
            or _profiled()
            or _traced()
        ):
            if self.plain and _tracing() and _is_plain():
                return self.plain(*args)
            return self.through_dispatcher(*args)
        direct = args if self._expand is None else self._expand(args)
        types = tuple(map(type, direct))
        first = self._first.get(types)
        if first is None:
            first = self._first[types] = self._first_tensor(types)
        if first < 0:
            return self.through_dispatcher(*args)
        for i in self._lists:
            for element in direct[i]:
                if type(element) not in schema.PLAIN:
                    return self.through_dispatcher(*args)
        tensor = direct[first]
        if tensor.is_cuda and self.cuda:
            if tensor.get_device() != torch.cuda.current_device():
                with torch.cuda.device(tensor.get_device()):
                    return self(*args)
        elif not tensor.is_cpu:
            return self.through_dispatcher(*args)
        if not (_recording() and _any_requires_grad(*direct)):
            return self._launch(*args)
        if self._apply is None:
            return self.through_dispatcher(*args)
        outputs, made = self._apply(*direct), self.signature.made
        return outputs if made is None else made(outputs)

    def through_dispatcher(self, *args):
        """Calls the operator of PyTorch."""
        flat = self.signature.flat(args)
        if self.numbers is not None:
            flat, numbers = dynamic.written(flat, self._floats)
            if numbers is not None:
                return self.signature.read_result(self.numbers(*flat, numbers))
        return self.signature.read_result(self.overload(*flat))

    def launch(self, *args):
        """Calls the launcher itself, through its autograd.Function where a graph is recorded."""
        direct = self.signature.expand(args)
        if not (self._apply and _recording() and _any_requires_grad(*direct)):
            return self._launch(*args)
        outputs, made = self._apply(*direct), self.signature.made
        return outputs if made is None else made(outputs)

    def _first_tensor(self, types: tuple[type, ...]) -> int:
        """The first tensor's index in arguments of these types; -1 unless the launcher takes all of
        them.
        """
        direct = self.signature.direct
        if self.overload._schema.is_mutable or len(types) != len(direct):
            return -1
        for given, argument in zip(types, direct, strict=True):
            if argument.types and given not in argument.types:
                return -1
        return next((i for i, given in enumerate(types) if given in schema.PLAIN), -1)


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


class Declaration:
    """What all implementations of an operator have in common: arguments, results, derivative.

    Made by `declare` from a function. Its annotations are the operator's (`core.schema`), and it
    returns uninitialized results: it is the operator's fake, and launchers call it to allocate.
    """

    def __init__(self, allocate: Callable, annotated: Callable | None = None):
        self.allocate, self.signature = allocate, Signature(annotated or allocate)
        functools.update_wrapper(self, allocate)
        self._formula: Formula | None = None

    def __call__(self, *args):
        return self.allocate(*args)

    def formula(
        self, *, constants: Sequence[str] = (), twice: bool = False, **computed: Callable
    ) -> Callable[[Callable], Formula]:
        """A decorator that sets the autograd formula of all operators that are defined afterwards;
        see `Formula`.
        """

        def decorate(gradients: Callable) -> Formula:
            self._formula = Formula(gradients, self.signature, computed, constants, twice)
            return self._formula

        return decorate

    def define(
        self,
        name: str,
        launch: Callable,
        backward_op: Any = None,
        *,
        mutates: Sequence[str] = (),
        plain: Callable | None = None,
    ) -> Operator:
        """Registers `tilewright::name` for CPU and CUDA tensors and returns the operator.

        launch: arguments -> results, of the declaration's types.
        backward_op: the operators that the formula launches; default: the operator itself.
        mutates: names of arguments that `launch` writes.
        plain: the same computation by PyTorch's operators alone, without checks of values; see
            `plain_operators`.

        It uses the low-level Library, not torch.library.custom_op: the operator is the same, and a
        call takes about half the host time.
        """
        launcher = self._flat(launch)
        _LIBRARY.define(name + self.signature.schema(mutates), tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, launcher, "CPU")
        _LIBRARY.impl(name, on_its_device(launcher), "CUDA")
        LAUNCHERS[f"{PACKAGE}::{name}"] = launcher
        op = Operator(self._overload(name), launch, self.signature, cuda=True, plain=plain)
        if op.has_lists:  # PyTorch's own vmap fallback does not support lists
            rule = functools.partial(_one_by_one, op.overload)
            torch.library.register_vmap(f"{PACKAGE}::{name}", rule, lib=_LIBRARY)
        return self._differentiated(op, backward_op)

    def adopt(self, name: str, backward_op: Any = None) -> Operator:
        """Registers the fake and the formula of an operator that the C++ extension has defined with
        these arguments, and returns the operator.
        """
        overload, signature = self._overload(name), self.signature
        kernel, flat = torch_names.cpu_kernel(overload), signature.flat
        made: Any = signature.made

        def structured(*args):
            return made(kernel(*flat(args)))

        def flattened(*args):
            return kernel(*flat(args))

        launch = kernel if not signature.structured else structured if made else flattened
        op = Operator(overload, launch, signature, cuda=False)
        return self._differentiated(op, backward_op)

    def _flat(self, function: Callable) -> Callable:
        """Adapts the function to flat arguments and results."""
        signature = self.signature
        if not signature.structured:
            return function

        @functools.wraps(function)
        def flat_function(*flat):
            return signature.flat_result(function(*signature.read(flat)))

        return flat_function

    def _overload(self, name: str):
        torch.library.register_fake(f"{PACKAGE}::{name}", self._flat(self.allocate), lib=_LIBRARY)
        overload = getattr(getattr(torch.ops, PACKAGE), name).default
        _count_writes(overload)
        return overload

    def _differentiated(self, op: Operator, backward_op: Any) -> Operator:
        self._take_numbers(op)
        if self._formula is not None:
            _differentiate(op, self._formula, op if backward_op is None else backward_op)
        return op

    def _take_numbers(self, op: Operator) -> None:
        """Registers the overload for floats that compiled code has as symbols; see `dynamic`."""
        if not (places := op._floats):
            return
        tags = (torch.Tag.pt2_compliant_tag,)
        _LIBRARY.define(dynamic.schema_of(op.overload), tags=tags)
        name = op.overload.name().split("::")[1]
        with_numbers = f"{name}.{dynamic.OVERLOAD}"
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(with_numbers, dynamic.reading(op.overload, places), key)
        fake = dynamic.faking(self._flat(self.allocate), places)
        torch.library.register_fake(f"{PACKAGE}::{with_numbers}", fake, lib=_LIBRARY)
        op.numbers = getattr(getattr(getattr(torch.ops, PACKAGE), name), dynamic.OVERLOAD)
        _count_writes(op.numbers)


declare = Declaration


def define(name: str, launch: Callable, allocate: Callable, **options: Any) -> Operator:
    """A declaration and its only operator. The annotations may be those of `launch`."""
    annotated = allocate if "return" in getattr(allocate, "__annotations__", ()) else launch
    return Declaration(allocate, annotated).define(name, launch, **options)


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
    columns = list(zip(*results, strict=True))
    batched = (None if column[0] is None else torch.stack(column) for column in columns)
    return tuple(batched), tuple(None if column[0] is None else 0 for column in columns)


def _tensors(args: Iterable[object]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, including those in lists."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, list):
            yield from (t for t in arg if isinstance(t, torch.Tensor))


def on_its_device(fn: Callable) -> Callable:
    """Calls fn(*args) with the device of the first CUDA tensor as the current one, so that kernels
    are launched on its stream.
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


def _count_writes(overload) -> None:
    """Makes an operator increment the version counters of the arguments that it overwrites, by
    which autograd detects that a saved tensor was modified. PyTorch does that for its own operators
    and for those of torch.library.custom_op.

    Only operators whose names end in "_" do so: the others write into new tensors.
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

    _LIBRARY.impl(overload.name().split("::")[1], counted, "ADInplaceOrView", with_keyset=True)


class _Needs:
    """Whether the gradient of an argument is needed, by its name."""

    def __init__(self, flags: Sequence[bool], places: dict[str, int]):
        self._flags, self._places = flags, places

    def __getitem__(self, name: str) -> bool:
        return self._flags[self._places[name]]


# Long: the functions that autograd is given, which close over the operator's.
def _differentiate(op: Operator, declared: Formula, backward_op: Any) -> None:
    """Gives an operator the autograd formula of its declaration, and refuses derivatives that it
    does not have.

    Kernels have no formulas of their own, so autograd would treat the results of a formula as
    constants: a second derivative would be silently wrong. Forward-mode tangents would be dropped
    as silently.

    Tensors in a list (`Tensor[]`) have no gradient.
    """
    name, signature = op.name().split(".")[0], op.signature
    made = signature.made

    def formula_of(names):
        """The formula for arguments of these names."""
        places = {argument: i for i, argument in enumerate(names)}

        def by_name(ctx, *grads):
            need, grad = ctx.needs_input_grad, grads[0] if made is None else made(grads)
            needs = _Needs(need, places) if declared.asks else None
            gradients = declared(ctx, grad, needs, backward_op)
            in_order: list[torch.Tensor | None] = [None] * len(need)
            for argument, grad in gradients.items():
                if argument not in places:
                    raise TypeError(
                        f"the formula of {name} must return gradients of {names}, got {argument!r}"
                    )
                i = places[argument]
                if need[i]:
                    in_order[i] = grad
            return tuple(in_order)

        return by_name if declared.twice else once(name, by_name)

    formula = formula_of(signature.names)

    def prepare(ctx, args, result):
        if made is not None:
            ctx.set_materialize_grads(False)
        if declared.constants:
            constants = (result[i] for i in declared.constants)
            ctx.mark_non_differentiable(*[t for t in constants if t is not None])
        declared.keep(ctx, args, result)

    def save(ctx, inputs, output):
        prepare(ctx, signature.read(inputs), signature.read_result(output))

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

    def forward(ctx, *direct):
        args = signature.collect(direct) if signature.expands else direct
        result = launch(*args)
        prepare(ctx, args, result)
        return result if made is None else tuple(result)

    # The same, bypassing the dispatcher.
    direct = type(
        name.replace("::", "_"),
        (torch.autograd.Function,),
        {
            "forward": staticmethod(forward),
            "backward": staticmethod(formula_of([a.name for a in signature.direct])),
        },
    )
    # Skips Function's own apply, which prepares for torch.func.
    beneath: Any = super(torch.autograd.Function, direct)
    op._apply = beneath.apply

    class InTransform(torch_names.SingleLevelFunction):
        """The Function that `kernel` applies, for the level of torch.func's transforms at which the
        operator is dispatched.
        """

        @staticmethod
        def forward(ctx, keyset, *args):
            _refuse_beneath(name, args)
            with torch_names.BelowAutograd():
                result = op.overload.redispatch(keyset & torch_names.BELOW_AUTOGRAD, *args)
            # A tensor of this level, as long as the level lasts.
            ctx.level = next(t for t in _tensors(args) if t.requires_grad).new_empty(0)
            save(_WithoutFirst(ctx), args, result)
            return result

        @staticmethod
        def backward(ctx, *grads):
            _refuse_beneath(name, grads)
            ctx = _WithoutFirst(ctx)
            ended = torch_names.unwrapped_if_ended
            return None, *formula(ctx, *(g if g is None else ended(g) for g in grads))

    def guarded(keyset, *args):
        refuse_tangents(name, *args)
        if in_transform() and torch.is_grad_enabled() and _any_requires_grad(*args):
            with _single_level():
                return InTransform.apply(keyset, *args)
        return kernel(keyset, *args)

    # What torch.library.register_autograd does, with the guard around its kernel.
    _LIBRARY.impl(name.split("::")[1], guarded, "Autograd", with_keyset=True)
    if op.numbers is None:
        return

    def save_numbers(ctx, inputs, output):
        save(ctx, dynamic.known(inputs, op._floats), output)

    of_numbers = torch_names.make_autograd_impl(
        op.numbers, torch_names.Info(listed if op.has_lists else formula, save_numbers)
    )
    _LIBRARY.impl(op.numbers.name().split("::")[1], of_numbers, "Autograd", with_keyset=True)


def refuse_tangents(name: str, *args: object) -> None:
    """Raises RuntimeError, naming the operator, if an argument has a forward-mode tangent, which
    the operator would drop.
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
    """A context without its first input.

    torch.func.vjp's backward may run when the level of its forward has ended: launchers cannot read
    that level's tensors, and nothing can ask for a derivative of the gradients in its inputs.
    """

    def __init__(self, ctx):
        self.__dict__.update(_ctx=ctx, needs_input_grad=ctx.needs_input_grad[1:])

    @property
    def has_ended(self):
        return torch_names.has_ended(self._ctx.level)

    @property
    def saved_tensors(self):
        ended = torch_names.unwrapped_if_ended
        return tuple(t if t is None else ended(t) for t in self._ctx.saved_tensors)

    def __getattr__(self, name):
        return getattr(self._ctx, name)

    def __setattr__(self, name, value):
        setattr(self._ctx, name, value)


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
        if not behind and not getattr(ctx, "has_ended", False):
            # As where the forward computes gradients: there is no tensor to attach an error to.
            raise RuntimeError(
                f"{name} has no derivative within torch.func; {_ADVICE}"
                if in_transform()
                else again
            )
        with torch.no_grad():
            results = backward(ctx, *grads)
        behind += [g for g in grads if g is not None and g.requires_grad]
        if not behind:
            return results
        # torch.autograd.function.once_differentiable attaches its error to new leaves, so that
        # autograd.grad with respect to the real ones bypasses it. This one is attached to the
        # inputs of the result.
        error = torch_names.DelayedError(again.encode(), len(results) + len(behind))
        return error(*results, *behind)[: len(results)]

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
