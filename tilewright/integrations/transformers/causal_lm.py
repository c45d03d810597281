"""The loss of transformers' causal language models by `ops.linear_cross_entropy`, which never
builds the logits.

The model's own forward runs, whatever it does around its head: it is given a view of the model
whose `lm_head` returns a record in place of the logits, and whose `loss_function` computes the loss
from that. If the forward does something else with the logits than scale and softcap them, they are
computed, and the loss from them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tilewright import ops
from tilewright.core import checks, torch_names
from tilewright.integrations.transformers.errors import warn_once
from tilewright.integrations.transformers.functions import own_function
from tilewright.integrations.transformers.instance import has_hooks
from tilewright.integrations.transformers.versions import part_of

LOGITS = ("eval", "never", "always")


def loss_reason(model: nn.Module) -> str | None:
    """Why `loss_forward` cannot be made for this model, or None."""
    cls = type(model)
    own = own_function(cls.forward)
    names = () if own is None else own.__code__.co_names
    if own is None or "lm_head" not in names or "loss_function" not in names:
        return "does not compute a loss from lm_head by loss_function"
    if "__class__" in own.__code__.co_freevars:  # super() needs the model itself
        return "calls a forward of its superclass"
    if "labels" not in inspect.signature(cls.forward).parameters:
        return "takes no labels"
    return _head_reason(model) or _loss_reason(model, plain_loss())


def plain_loss() -> Callable:
    """transformers' loss of causal language models, which `Logits.loss` computes."""
    return part_of("loss.loss_utils", "ForCausalLMLoss")


def _head_reason(model: Any) -> str | None:
    head = model.lm_head
    # The loss reads the head's weight outside its forward: adapters and quantized weights are
    # not in it, and hooks may gather or free it.
    if type(head) is not nn.Linear:
        return f"has an lm_head of its own kind ({type(head).__name__})"
    if has_hooks(head):
        return "has hooks on its lm_head"
    return None


def _loss_reason(model: Any, plain: Callable) -> str | None:
    if model.loss_function is not plain:
        return "has a loss_function of its own"
    return None


def loss_forward(base: type, logits: str) -> Callable:
    """The class's own forward without logits where labels are given.

    logits: "eval" returns them in evaluation mode, "never" does not.
    """
    own, plain = base.forward, plain_loss()
    at = list(inspect.signature(own).parameters).index("labels") - 1  # without self

    @functools.wraps(own)
    def forward(self, *args, **kwargs):
        labels = args[at] if len(args) > at else kwargs.get("labels")
        wanted = logits == "eval" and not self.training
        if labels is None or wanted or _head_reason(self) or _loss_reason(self, plain):
            return own(self, *args, **kwargs)
        if _is_called_by_cpt():
            return own(self, *args, **kwargs)
        view = _View if torch.compiler.is_compiling() else _SeenView
        return _without_logits(own(view(self), *args, **kwargs), logits)

    return forward


def is_cpt(module: Any) -> bool:
    """Whether PEFT's CPT is around the module, which computes a loss of its own from the logits."""
    configs = getattr(module, "peft_config", None)
    return isinstance(configs, dict) and any(
        getattr(config, "peft_type", None) == "CPT" for config in configs.values()
    )


@torch_names.constant
def _is_called_by_cpt() -> bool:
    """Whether a forward of CPT is calling: nothing in the model or in the call tells of it."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name.endswith("forward") and is_cpt(frame.f_locals.get("self")):
            return True
        frame = frame.f_back
    return False


class _View:
    """A model, but for its head and loss."""

    def __init__(self, model):
        self.__dict__["_model"] = model

    def __getattr__(self, name):
        return getattr(self.__dict__["_model"], name)

    def __setattr__(self, name, value):
        setattr(self.__dict__["_model"], name, value)

    @property
    def lm_head(self):
        return _Head(self.__dict__["_model"])

    def loss_function(self, logits, labels, *args, **kwargs):
        if _is_record(logits):
            loss = logits.loss(labels, *args, **kwargs)
            if loss is not None:
                return loss
            logits = logits.tensor("its loss needs them")
        return self.__dict__["_model"].loss_function(logits, labels, *args, **kwargs)


class _SeenView(_View):
    """For isinstance in the forward; Dynamo knows no such class."""

    @property
    def __class__(self):
        return type(self.__dict__["_model"])


class _Head:
    """A head that describes its logits."""

    def __init__(self, model):
        self.__dict__["_model"] = model

    def __getattr__(self, name):
        return getattr(self.__dict__["_model"].lm_head, name)

    def __call__(self, hidden_states):
        model = self.__dict__["_model"]
        record = Logits if torch.compiler.is_compiling() else SeenLogits
        return record(type(model).__name__, model.lm_head, hidden_states)


# Methods that are recorded, and what of them.
RECORDED = {
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), "mul"),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), "div"),
    **dict.fromkeys(("float", "to"), "float"),
    "tanh": "tanh",
    "contiguous": "contiguous",
}
IN_PLACE = {
    **dict.fromkeys(("mul_", "multiply_", "__imul__"), "mul"),
    **dict.fromkeys(("div_", "divide_", "true_divide_", "__itruediv__"), "div"),
    "tanh_": "tanh",
}


class Logits:
    """Stands for the logits: a record of what happens to head(x).

    Scaling by numbers, tanh, casts to float32 and `contiguous` are recorded as steps, in place or
    not. For any other operation the logits so far are computed, once, and from then on this object
    stands for that tensor: what is written into it, or into a view of it, is in the loss.

    steps: (name, number) in order: "mul" and "div" by a number, "tanh", "float".
    """

    def __init__(
        self,
        model: str,
        head: nn.Linear,
        x: torch.Tensor,
        steps: tuple = (),
        parent: Logits | None = None,
    ):
        self._model, self._head, self._x, self._steps = model, head, x, steps
        # The logits are computed later, but as if it were here.
        self._grad = torch.is_grad_enabled() and (parent is None or parent._grad)
        self._x_version = _version_of(x) if parent is None else parent._x_version
        self._autocast = _autocast(x.device.type) if parent is None else parent._autocast
        self._tensor: torch.Tensor | None = None
        self._later: list[Logits] = []  # what was made of these logits, and not in place

    def __setattr__(self, name, value):
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.tensor(f"sets {name}"), name, value)

    def tensor(self, what: str = "") -> torch.Tensor:
        """The logits. what: what needs them before the loss, for a warning."""
        if self._tensor is None:
            if what:
                warn_once(
                    (self._model, what),
                    f"{self._model} computes with its logits before its loss ({what}): they are "
                    "built, and the loss is computed from them",
                )
            self._check_x()
            with torch.set_grad_enabled(self._grad), _as_in(self._autocast, self._x.device.type):
                logits = self._head(self._x)
            self._fill(logits, self._steps)
        assert self._tensor is not None
        return self._tensor

    def _fill(self, logits: torch.Tensor, steps: tuple) -> None:
        """Becomes the tensor, and so does what was made of it: hooks and gradients of one are the
        other's, too.
        """
        with torch.set_grad_enabled(self._grad):
            for step, number in steps:
                if step == "tanh":
                    logits = torch.tanh(logits)
                elif step == "float":
                    logits = logits.float()
                else:
                    logits = logits / number if step == "div" else logits * number
        self._tensor = logits
        for other in self._later:
            if other._tensor is None and other._steps[: len(self._steps)] == self._steps:
                other._fill(logits, other._steps[len(self._steps) :])

    def _check_x(self) -> None:
        if _version_of(self._x) != self._x_version:
            raise RuntimeError(
                f"{self._model} writes into the hidden states after its head has read them, before "
                'its loss: accelerate(model, logits="always") leaves its loss alone'
            )

    def _apply(self, name: str, arguments: tuple, options: dict) -> Any:
        """What a method of the tensor returns: a record of it, or the tensor's result."""
        if self._tensor is None and (steps := self._after(name, arguments, options)) is not None:
            if name not in IN_PLACE:
                if steps == self._steps:  # contiguous, or a move to where it is
                    return self
                made = type(self)(self._model, self._head, self._x, steps, self)
                self._later.append(made)
                return made
            if torch.is_grad_enabled() == self._grad:
                self._steps = steps
                return self
        result = getattr(self.tensor(name), name)(*arguments, **options)
        return self if result is self._tensor else result

    def _after(self, name: str, arguments: tuple, options: dict) -> tuple | None:
        """The steps after a method, or None if it is not recorded."""
        step = (RECORDED | IN_PLACE).get(name)
        number = arguments[0] if len(arguments) == 1 else None
        if options or step is None:
            return None
        if step == "contiguous" and not arguments:
            return self._steps
        if name == "to" and isinstance(number, torch.device) and number == self._x.device:
            return self._steps
        if step == "float" and ((name == "float" and not arguments) or number is torch.float32):
            return self._steps if self.dtype == torch.float32 else (*self._steps, (step, 1.0))
        if step == "tanh" and not arguments:
            return (*self._steps, (step, 1.0))
        if type(number) in (int, float) and (step == "mul" or (step == "div" and number != 0)):
            return (*self._steps, (step, number))
        return None

    def __getattr__(self, name):
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self._tensor is None:
            if name == "dtype":
                cast = any(step == "float" for step, _ in self._steps)
                return torch.float32 if cast else _dtype_of(self._head, self._x)
            if name == "device":
                return self._x.device
            if name == "shape":
                return torch.Size((*self._x.shape[:-1], self._head.weight.shape[0]))
            if callable(getattr(torch.Tensor, name)):
                return functools.partial(_call, self, name)
        return getattr(self.tensor(name), name)

    @classmethod
    def __torch_function__(cls, function: Callable, types, arguments=(), options=None):
        options, name = options or {}, getattr(function, "__name__", str(function))
        if arguments and _is_record(arguments[0]) and hasattr(torch.Tensor, name):
            first, *rest = arguments
            others = torch_names.pytree.tree_leaves((rest, options))
            if function in (getattr(torch, name, None), getattr(torch.Tensor, name)) and not any(
                _is_record(value) for value in others
            ):
                return first._apply(name, tuple(rest), options)
        arguments, options = torch_names.pytree.tree_map(
            lambda value: value.tensor(name) if _is_record(value) else value,
            (tuple(arguments), options),
        )
        return function(*arguments, **options)

    def loss(
        self,
        labels: torch.Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor | None:
        """transformers' ForCausalLMLoss of these logits, or None if the op does not compute it."""
        scaling = None if self._tensor is not None else _scale_and_cap(self._steps)
        weight, bias = self._head.weight, self._head.bias
        if scaling is None or (scaling[0] != 1 and bias is not None):
            return None
        scale, cap = scaling
        x = self._x if scale == 1 else self._x * scale
        if not self._grad:  # the head was called under no_grad
            x, weight, bias = x.detach(), weight.detach(), None if bias is None else bias.detach()
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        self._check_x()
        shape = ()
        if not isinstance(num_items_in_batch, (int, float, torch.Tensor, NoneType)):
            num_items_in_batch = num_items_in_batch.item()  # NumPy's
        if isinstance(num_items_in_batch, torch.Tensor):  # by which transformers' loss broadcasts
            shape = num_items_in_batch.shape
            if num_items_in_batch.numel() != 1:
                return None
            num_items_in_batch = num_items_in_batch.to(x.device).reshape(())
        if _autocast(x.device.type) != self._autocast:
            return None  # the product is another's dtype than the loss's
        loss = ops.linear_cross_entropy(
            x.reshape(-1, x.shape[-1]),
            weight,
            shift_labels.reshape(-1).to(x.device),
            bias=bias,
            ignore_index=ignore_index,
            softcap=cap,
            num_tokens=num_items_in_batch,
        )
        return loss.reshape(shape)


class SeenLogits(Logits):
    """For isinstance and torch.is_tensor in the forward; Dynamo knows no such class."""

    @property
    def __class__(self):
        return torch.Tensor


def _is_record(value: Any) -> bool:
    return issubclass(type(value), Logits)


def _version_of(x: torch.Tensor) -> int:
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _as_in(state: tuple[bool, torch.dtype], device: str) -> Any:
    """A block under this state of autocast."""
    if _autocast(device) == state:
        return contextlib.nullcontext()
    return torch.autocast(device, dtype=state[1], enabled=state[0])


def _call(logits: Logits, name: str, *arguments, **options) -> Any:
    return logits._apply(name, arguments, options)


def _dtype_of(head: nn.Linear, x: torch.Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if checks.autocasts(device) else head.weight.dtype


def _define_operators():
    def of(name):
        def operator(self, *others):
            return self._apply(name, others, {})

        return operator

    both = "add sub mul truediv floordiv mod matmul pow and or xor"
    one = "neg abs invert eq ne lt le gt ge len iter bool float int getitem setitem"
    names = [side + name for name in both.split() for side in ("", "r", "i")] + one.split()
    for name in (f"__{name}__" for name in names):
        if hasattr(torch.Tensor, name):
            setattr(Logits, name, of(name))
    Logits.__hash__ = object.__hash__  # which goes with __eq__


_define_operators()


def _scale_and_cap(steps: tuple) -> tuple[float, float | None] | None:
    """(scale, cap) for logits = cap * tanh(scale * z / cap), or scale * z without a cap; None for
    other steps.
    """
    before, after, capped = 1.0, 1.0, False
    for step, number in steps:
        if step == "tanh":
            if capped:
                return None
            capped = True
        elif step != "float":  # the loss is computed in float32
            factor = 1 / number if step == "div" else number
            before, after = (before, after * factor) if capped else (before * factor, after)
    if not capped:
        return before, None
    scale = before * after
    if after <= 0:
        return None
    return (1.0 if abs(scale - 1) < 1e-12 else scale), after


def _without_logits(output: Any, logits: str) -> Any:
    """An output without records in place of logits; logits that were computed are returned. A
    tuple's items keep their places: its logits are computed, or None with logits="never".
    """
    if isinstance(output, tuple):
        if logits == "never":
            return tuple(None if _is_record(v := _computed(value)) else v for value in output)
        return tuple(value.tensor() if _is_record(value) else value for value in output)
    values = {k: _computed(v) for k, v in output.items()}
    return type(output)(**{k: v for k, v in values.items() if not _is_record(v)})


def _computed(value: Any) -> Any:
    is_computed = _is_record(value) and value._tensor is not None
    return value._tensor if is_computed else value
