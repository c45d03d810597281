"""Attention masks of transformers, as descriptions instead of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.core import torch_names
from tilewright.integrations.transformers.errors import computed_mask, not_traced
from tilewright.integrations.transformers.packing import Layout, layout_of


class Dense:
    """The mask that another implementation of attention would be given, built when it is asked for.

    make: transformers' function of that implementation, and its arguments.   dtype: the mask's.
    """

    def __init__(self, make: Callable, arguments: dict[str, Any], dtype: torch.dtype):
        self.make, self.arguments, self.dtype = make, arguments, dtype
        self._built: dict[bool, Any] = {}

    def build(self, skips: bool) -> Any:
        """skips: it may be None where the implementation needs none."""
        if skips not in self._built:
            never = {k: False for k in self.arguments if k.startswith("allow_is_")}
            self._built[skips] = self.make(**self.arguments | ({} if skips else never))
        return self._built[skips]


class Mask:
    """Describes a transformers mask, in place of the tensor [batch, 1, queries, keys], which is
    not built.

    A model may pass it on, move it and slice off its last keys. Any other use takes the tensor that
    another implementation would be given, and raises NotComputed if there is none. Once the model
    has written into that tensor, attention is the other implementation's.

    dense: the other implementation's mask, or None.
    causal, window: as in `ops.attention`; the queries are the last of the first `filled` keys.
    kept: bool [batch, filled], False for padding, or each key's document number, from 1; None: no
        padding, and one document per row.
    refused: the features that `ops.attention` does not support, in words, or None.
    """

    requires_grad = False

    def __init__(
        self,
        shape,
        device,
        *,
        causal=False,
        window=None,
        kept=None,
        filled=None,
        refused=None,
        dense: Dense | None = None,
    ):
        self.shape, self.device = torch.Size(shape), device
        self.dtype = torch.bool if dense is None else dense.dtype
        self.causal, self.window, self.kept, self.refused = causal, window, kept, refused
        self.filled = self.shape[3] if filled is None else filled
        self.dense = dense
        self._values: torch.Tensor | None = None  # what the model computed with
        self._last: tuple | None = None  # the last position ids, their version and layout

    def _like(self, shape, device, kept) -> Mask:
        return Mask(
            shape,
            device,
            causal=self.causal,
            window=self.window,
            kept=kept,
            filled=self.filled,
            refused=self.refused,
            dense=self.dense,
        )

    def _place(self, dense: Any) -> Any:
        """The other implementation's mask on this device, of these keys."""
        if not isinstance(dense, torch.Tensor):
            return dense
        return dense.to(self.device)[..., : self.shape[3]]

    def for_other(self) -> Any:
        """The mask for the other implementation."""
        assert self.dense is not None
        return self._values if self.was_written else self._place(self.dense.build(True))

    @property
    def was_written(self) -> bool:
        """Whether the model has written into the tensor, also through a view. What it only read
        leaves the mask what it was: a layer that is recomputed decides as it did before.
        """
        values = self._values
        if values is None or torch.compiler.is_compiling() or values.is_inference():
            return values is not None
        return values._version != self._as_built

    def values(self, what: str) -> torch.Tensor:
        """The tensor to compute with. what: what the model does, for the error."""
        if self._values is None:
            if self.dense is None:
                raise computed_mask(what)
            values: torch.Tensor = self._place(self.dense.build(False))
            self._values = values
            known = not torch.compiler.is_compiling() and not values.is_inference()
            self._as_built = values._version if known else 0
        return self._values

    @property
    def ndim(self) -> int:
        return 4

    def dim(self) -> int:
        return 4

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def to(self, *arguments, **options) -> Mask | torch.Tensor:
        """Moves it to another device. There are no values to cast."""
        device = torch_names.device_asked_for(*arguments, **options)
        if device is None or device == self.device:
            return self
        if self.was_written:
            return self.values("moves it").to(device)
        return self._like(self.shape, device, None if self.kept is None else self.kept.to(device))

    def contiguous(self) -> Mask:
        return self

    def __getitem__(self, index) -> Mask | torch.Tensor:
        if self.was_written:
            return self.values("indexes it")[index]
        of, index = index, index if isinstance(index, tuple) else (index,)
        *others, last = index
        whole = all(i is Ellipsis or i == slice(None) for i in others)
        if (
            whole
            and (Ellipsis in others or len(index) == 4)
            and isinstance(last, slice)
            and last.step is None
            and (last.start in (None, 0))
            and (last.stop is None or last.stop >= self.filled)
        ):
            keys = len(range(*last.indices(self.shape[3])))
            return self._like((*self.shape[:3], keys), self.device, self.kept)
        return self.values("indexes it")[of]

    def __getattr__(self, name):
        if not name.startswith("_") and hasattr(torch.Tensor, name):
            return getattr(self.values(f"calls its {name}"), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        what = f"calls {getattr(function, '__name__', function)} with it"
        arguments, options = torch_names.pytree.tree_map(
            lambda value: value.values(what) if type(value) is Mask else value,
            (tuple(arguments), options or {}),
        )
        return function(*arguments, **options)

    def layout(self, position_ids: torch.Tensor | None, B: int, S: int) -> Layout | None:
        """`layout_of` of `kept`, cached for the mask's lifetime, one forward pass: all layers need
        the same layout, and computing it synchronizes with the device.
        """
        version = (
            None if position_ids is None or position_ids.is_inference() else position_ids._version
        )
        if self._last is None or self._last[0] is not position_ids or self._last[1] != version:
            self._last = (position_ids, version, layout_of(self.kept, position_ids, B, S))
        return self._last[2]


def _define_operators():
    def of(name):
        def operator(self, *others):
            return getattr(self.values(f"calls its {name}"), name)(*others)

        return operator

    for name in ("add", "sub", "mul", "truediv", "matmul", "and", "or", "xor"):
        for side in ("", "r", "i"):
            setattr(Mask, f"__{side}{name}__", of(f"__{side}{name}__"))
    for name in (
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "neg",
        "invert",
        "bool",
        "float",
        "int",
        "len",
        "iter",
        "contains",
        "setitem",
        "array",
    ):
        setattr(Mask, f"__{name}__", of(f"__{name}__"))
    Mask.__hash__ = object.__hash__  # which goes with __eq__


_define_operators()


# Long: transformers' whole signature, argument by argument.
def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    mask_function=None,
    attention_mask: torch.Tensor | Mask | None = None,
    device=None,
    other: Callable | None = None,
    additive: bool = False,
    **kwargs,
) -> Mask:
    """The mask for a layer, from transformers' function of query and key positions and its padding
    mask.

    other: makes the mask of the implementation that computes what this library does not.
    additive: that is a mask to add, in the dtype of the model.
    """
    if isinstance(attention_mask, Mask):  # made earlier, as by generate
        return attention_mask
    dense = None
    if other is not None:
        # A static cache counts in the tensor that it gives, before the mask may be built.
        at = q_offset.clone() if isinstance(q_offset, torch.Tensor) else q_offset
        dense = Dense(
            other,
            {
                "batch_size": batch_size,
                "q_length": q_length,
                "kv_length": kv_length,
                "q_offset": at,
                "kv_offset": kv_offset,
                "mask_function": mask_function,
                "attention_mask": attention_mask,
                "device": device,
                **kwargs,
            },
            kwargs.get("dtype", torch.float32) if additive else torch.bool,
        )
    shape = (batch_size, 1, q_length, kv_length)
    if torch.compiler.is_compiling():
        return _make_traced_mask(
            shape, q_offset, kv_offset, mask_function, attention_mask, device, dense, kwargs
        )
    device = torch.device("cpu" if device is None else device)
    q_offset, kv_offset = int(q_offset), int(kv_offset)
    said = _MaskFunction()
    if attention_mask is not None and attention_mask.dim() != 2:
        said.refused.append(f"a mask of shape {list(attention_mask.shape)}")
    else:
        said.read(mask_function)
    filled = q_offset + q_length - kv_offset if said.causal else kv_length
    if not q_length <= filled <= kv_length and said.causal:
        said.refused.append(
            f"queries at {q_offset} to {q_offset + q_length - 1} of keys at {kv_offset} to "
            f"{kv_offset + kv_length - 1}"
        )
    # If all keys are in one chunk, or within reach of a window, it has no effect.
    if said.chunk is not None and kv_offset + filled > said.chunk:
        said.refused.append("chunked attention")
    if said.around is not None and max(q_offset + q_length, kv_offset + filled) - min(
        q_offset, kv_offset
    ) - 1 > (said.around):
        said.refused.append("a window that is not causal")
    if said.window is not None and not said.causal:
        said.refused.append("a window that is not causal")
    kept = None
    if not said.refused:
        window = None if said.window is None or said.window >= filled else said.window
        if attention_mask is not None:
            said.padding.append(attention_mask)
        for padding in said.padding:
            there = padding[:, kv_offset : kv_offset + filled].bool()
            there = F.pad(there, (0, filled - there.shape[1]))  # beyond the mask: padding
            kept = there if kept is None else kept & there
        if kept is not None and kept.all():
            kept = None
        if said.documents is not None:
            numbers = said.documents[:, kv_offset : kv_offset + filled] + 1
            kept = numbers if kept is None else numbers * kept
        return Mask(
            shape,
            device,
            causal=said.causal,
            window=window,
            kept=kept,
            filled=filled,
            dense=dense,
        )
    return Mask(shape, device, refused=", ".join(said.refused), dense=dense)


class _MaskFunction:
    """The meaning of a mask function of transformers.masking_utils, from its name and closure.

    causal: whether a position sees no later ones.
    window, around: how many positions up to itself, or on each side, a position sees.
    chunk: the width of chunks that do not see each other.
    padding: masks [B, keys].   documents: document numbers [B, keys].
    refused: anything else, in words.
    """

    def __init__(self):
        self.causal, self.window, self.around, self.chunk = False, None, None, None
        self.padding, self.documents, self.refused = [], None, []

    def read(self, function: Callable | None) -> None:
        name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
        short = name.removeprefix("transformers.masking_utils.")
        held = closed_over(function)
        if short == "causal_mask_function":
            self.causal = True
        elif short == "and_masks.<locals>.and_mask":
            for f in held["mask_functions"]:
                self.read(f)
        elif short == "sliding_window_overlay.<locals>.inner_mask":
            self.window = min(held["sliding_window"], self.window or held["sliding_window"])
        elif short == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
            self.around = min(held["sliding_window"], self.around or held["sliding_window"])
        elif short == "chunked_overlay.<locals>.inner_mask":
            self.chunk = min(held["chunk_size"], self.chunk or held["chunk_size"])
        elif short == "padding_mask_function.<locals>.inner_mask":
            self.padding.append(held["padding_mask"])
        elif (
            short == "packed_sequence_mask_function.<locals>.inner_mask" and self.documents is None
        ):
            self.documents = held["packed_sequence_mask"]
        elif short == "remap_positions_for_packed_sequence.<locals>.inner_mask":
            # Positions within a document are consecutive, so distances are unchanged.
            self.read(held["mask_function"])
        elif short != "bidirectional_mask_function":
            self.refused.append(f"the mask function {name}{_version_of(name)}")


def _version_of(name: str) -> str:
    """Where transformers' own function is not known: another version may have renamed it."""
    if not name.startswith("transformers."):
        return ""
    import transformers

    return f" of transformers {transformers.__version__}"


def _make_traced_mask(shape, q_offset, kv_offset, function, attention_mask, device, dense, said):
    """`make_mask` traced by torch.compile: closures cannot be read, so the meaning of transformers'
    function is inferred from the other arguments.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    batch, _, queries, keys = shape
    plain = function is causal_mask_function or function is bidirectional_mask_function
    if any(
        (
            said.get("use_vmap"),
            not plain and function.__name__ != "and_mask",
            isinstance(q_offset, torch.Tensor),
            getattr(said.get("config"), "attention_chunk_size", None) is not None,
            attention_mask is not None and attention_mask.dim() != 2,
        )
    ):
        takes = "a causal mask, with a window or packed documents, or one that is not causal"
        if dense is None:
            raise not_traced(takes)
        return Mask(shape, device, refused="a mask that cannot be traced", dense=dense)
    causal, window = "allow_is_bidirectional_skip" not in said, said.get("local_size")
    if window is not None and not causal:
        if dense is None:
            raise not_traced("a window that is causal")
        return Mask(shape, device, refused="a window that is not causal", dense=dense)
    filled = q_offset + queries - kv_offset if causal else keys
    kept = None
    if attention_mask is not None:
        kept = attention_mask[:, kv_offset : kv_offset + filled].bool()
        kept = F.pad(kept, (0, filled - kept.shape[1]))
    elif not plain and queries == keys:
        # A document ends where a position does not see the previous one.
        at = torch.arange(1, keys, device=device)[None, None, :, None]
        rows = torch.arange(batch, device=device)[:, None, None, None]
        apart = ~function(rows, torch.zeros_like(rows[:1]), at, at - 1).expand(batch, 1, -1, 1)[
            :, 0, :, 0
        ]
        kept = F.pad(apart.cumsum(1), (1, 0)) + 1
    return Mask(
        shape,
        device,
        causal=causal,
        window=None if window is None or window >= filled else window,
        kept=kept,
        filled=filled,
        dense=dense,
    )


def closed_over(function) -> dict[str, Any]:
    """The variables that a function closes over."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}
