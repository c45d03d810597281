"""The loss of transformers' causal language models by `ops.linear_cross_entropy`, which never
builds the logits.

The model's own forward runs, whatever it does around its head: it is given a view of the model
whose `lm_head` returns a description of the logits in place of the tensor, and whose
`loss_function` computes the loss from that. If the forward does something else with the logits
than scale and softcap them, they are computed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tilewright import _torch, ops
from tilewright.integrations.transformers.instance import own_function
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
    if type(head) is not nn.Linear or "forward" in head.__dict__:
        return f"has an lm_head of its own kind ({type(head).__name__})"
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks:
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
        return _without_logits(own(_View(self), *args, **kwargs))

    return forward


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
        return _Head(self.__dict__["_model"].lm_head)

    def loss_function(self, logits, labels, *args, **kwargs):
        if type(logits) is Logits:
            loss = logits.loss(labels, *args, **kwargs)
            if loss is not None:
                return loss
            logits = logits.tensor()
        return self.__dict__["_model"].loss_function(logits, labels, *args, **kwargs)


class _Head:
    """A head that describes its logits."""

    def __init__(self, head):
        self.__dict__["_head"] = head

    def __getattr__(self, name):
        return getattr(self.__dict__["_head"], name)

    def __call__(self, hidden_states):
        return Logits(self.__dict__["_head"], hidden_states, ())


class Logits:
    """Describes steps(head(x)), in place of the tensor, which is computed if it is used other than
    scaled, softcapped, cast to float32 or given to the loss.

    steps: (name, number) in order: "div" and "mul" by a number, "tanh".
    """

    def __init__(self, head: nn.Linear, x: torch.Tensor, steps: tuple):
        self.head, self.x, self.steps = head, x, steps

    def tensor(self) -> torch.Tensor:
        logits = self.head(self.x)
        for step, number in self.steps:
            if step == "tanh":
                logits = torch.tanh(logits)
            else:
                logits = logits / number if step == "div" else logits * number
        return logits

    def _then(self, step: str, number: float = 1.0) -> Logits:
        return Logits(self.head, self.x, (*self.steps, (step, number)))

    def __truediv__(self, other):
        return (
            self._then("div", other) if isinstance(other, (int, float)) else self.tensor() / other
        )

    def __mul__(self, other):
        return (
            self._then("mul", other) if isinstance(other, (int, float)) else self.tensor() * other
        )

    __rmul__ = __mul__

    def tanh(self) -> Logits:
        return self._then("tanh")

    def float(self) -> Logits:
        return self  # the loss is computed in float32

    def contiguous(self) -> Logits:
        return self

    def __getitem__(self, index):
        return self.tensor()[index]

    def __getattr__(self, name):
        if not name.startswith("__") and hasattr(torch.Tensor, name):
            return getattr(self.tensor(), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function in (torch.tanh, torch.Tensor.tanh) and len(arguments) == 1 and not options:
            return arguments[0].tanh()
        arguments, options = _torch.pytree.tree_map(
            lambda value: value.tensor() if type(value) is Logits else value,
            (tuple(arguments), options or {}),
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
        found = _scale_and_cap(self.steps)
        weight, bias = self.head.weight, self.head.bias
        if found is None or (found[0] != 1 and bias is not None):
            return None
        scale, cap = found
        x = self.x if scale == 1 else self.x * scale
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(x.device)
        return ops.linear_cross_entropy(
            x.reshape(-1, x.shape[-1]),
            weight,
            shift_labels.reshape(-1).to(x.device),
            bias=bias,
            ignore_index=ignore_index,
            softcap=cap,
            num_tokens=num_items_in_batch,
        )


def _define_operators():
    def of(name):
        def operator(self, *others):
            return getattr(self.tensor(), name)(*others)

        return operator

    names = "add radd sub rsub rtruediv matmul pow neg abs eq ne lt le gt ge len iter bool"
    for name in (f"__{name}__" for name in names.split()):
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
        else:
            factor = 1 / number if step == "div" else number
            before, after = (before, after * factor) if capped else (before * factor, after)
    if not capped:
        return before, None
    scale = before * after
    if after <= 0:
        return None
    return (1.0 if abs(scale - 1) < 1e-12 else scale), after


def _without_logits(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(value for value in output if type(value) is not Logits)
    return type(output)(**{k: v for k, v in output.items() if type(v) is not Logits})
