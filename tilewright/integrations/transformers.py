"""Attention and the experts of Hugging Face transformers' models, computed by `ops.attention` and
`ops.moe_mlp`.

    from tilewright.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilewright",
                                                 experts_implementation="tilewright")

transformers (5.7 and later) keeps tables of functions: for attention, for the masks that it is
given, and for a layer's experts. `register` adds entries to them and changes nothing else:
projections, norms, the router and everything around stay transformers'. Importing this module
imports no transformers.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tilewright import _torch, platform
from tilewright.ops import _checks, attention, moe_mlp
from tilewright.ops.activation import Gate, gate_eager
from tilewright.ops.attention import ATTENTION
from tilewright.ops.moe import MOE_MLP
from tilewright.registry import ImplementationUnavailable

NAME = "tilewright"
OLDEST = (5, 7)  # of transformers
ACCEPTED = (
    "experts that compute down_proj(activation(gate) * up), with or without biases, with "
    "gate_up_proj "
    "[E, 2 I, H] and down_proj [E, H, I], or both transposed, whose gate is one that ops.Gate "
    "describes"
)


def register(implementation: str = "auto", attn_implementation: str = "auto") -> tuple[str, ...]:
    """Adds "tilewright" to the values that transformers takes as `experts_implementation` and as
    `attn_implementation`, in `from_pretrained`, `from_config`, `set_experts_implementation` and
    `set_attn_implementation`.

    implementation: what "tilewright" stands for as experts, a name of moe_mlp's implementations or
    "auto". Beside it
        each name gets an entry of its own: "tilewright:triton", "tilewright:cpp",
        "tilewright:eager" and so on.
    attn_implementation: the same for attention, with the names of attention's implementations.
        Entries of their own are called "tilewright:triton", "tilewright:eager",
        "tilewright:native", "tilewright:sdpa", "tilewright:fa3" and "tilewright:fa4": transformers
        takes "flash" anywhere in a name for a request of its own, so that there is no
        "tilewright:flash_attention_3". It takes "sdpa" so, too, and refuses it to models that have
        none of its own; "tilewright:torch" is the same and is not.
    Returns the names added for experts, "tilewright" first. They hold for the whole process;
    registering again replaces them.

    Attention is what the mask says that transformers makes, whatever a layer says of itself: causal
    or not, a window, packed documents, padding. It is of the packed tokens that are no padding, so
    no mask of S x S is built, and what
    stands in padding is never read: its own output is 0. A layer without a mask follows `is_causal`
    and `sliding_window`. Documents packed into a row are told by `cu_seq_lens_q`, or by position
    ids that do not follow one another (with padding between tokens, counted or not), as for
    transformers' flash attention; its eager attention looks at them without a mask and without a
    cache only, and so do layers here that are given none (Persimmon). Softcaps and sinks are those
    of the layer. It computes in autocast's dtype where that is on. Refused when called,
    with ImplementationUnavailable: dropout, attention weights as a result, masks of four dimensions
    and custom mask functions, a model's own computation with its mask, more keys than the mask is
    of, chunks and windows that are not causal where keys reach beyond one, and a window where a
    mask has holes within a document.

    A layer that moe_mlp cannot compute (`why_not`), and a named implementation that cannot run
    here, raise ImplementationUnavailable when the layer is called: transformers asks no sooner.
    Products are in the weights' dtype, in autocast's where that is on (which copies the weights at
    each call, as it does for a linear layer); the result is in the dtype of the hidden states.
    Under transformers' expert parallelism, slots of experts on other ranks add nothing. Raises
    ImplementationUnavailable if transformers is missing or too old, ValueError or TypeError for a
    name that does not exist.
    """
    for op, name in ((MOE_MLP, implementation), (ATTENTION, attn_implementation)):
        if name != "auto":
            op.implementation(name)
    interface = _interface()
    from transformers import AttentionInterface, AttentionMaskInterface

    entries = {NAME: implementation, **{f"{NAME}:{name}": name for name in MOE_MLP.names()}}
    for name, chosen in entries.items():
        interface.register(name, _experts(name, chosen))
    # transformers takes "flash" anywhere in a name for a request of its own: fa3 and fa4 stand for
    # these.
    entries_of_attention = {
        f"{NAME}:{name}": i.name
        for i in ATTENTION.implementations
        for name in (i.name, *i.aliases)
        if "flash" not in name
    }
    for name, chosen in {NAME: attn_implementation, **entries_of_attention}.items():
        AttentionInterface.register(name, _attention(name, chosen))
        AttentionMaskInterface.register(name, _mask)
    return tuple(entries)


def why_not(experts: torch.nn.Module) -> str | None:
    """None if moe_mlp computes what this experts module of transformers does, else the reasons,
    in words.
    """
    reasons = []
    # A version of transformers without a flag has no experts that it would tell apart.
    if not getattr(experts, "has_gate", True):
        reasons.append("have no gate")
    elif isinstance(gate := _gate(experts, _said(experts)), str):
        reasons.append(gate)
    if getattr(experts, "has_post_expert_norm", False):
        reasons.append("normalise what each of them gives")
    return ", ".join(reasons) or None


# Gates and ups, each with each: dense where functions bend, and as far as limits may be.
_PROBE = torch.cat(
    [torch.linspace(-10, 10, 81), torch.logspace(1, 4, 10), -torch.logspace(1, 4, 10)]
)
_LIMITS, _SLOPES = (
    ("limit", "swiglu_limit"),
    ("alpha", "swiglu_alpha"),
)  # what classes call the constants of theirs
_gates: weakref.WeakKeyDictionary[torch.nn.Module, tuple] = weakref.WeakKeyDictionary()


def _said(experts: torch.nn.Module) -> tuple:
    """What a module says of itself that its gate may follow. In traced code this makes guards: of
    hashes, since a float that differs between two modules would be a symbol there.
    """
    return tuple(
        hash(getattr(experts, name, None)) for name in ("is_concatenated", *_LIMITS, *_SLOPES)
    )


def _gate(experts: torch.nn.Module, said: tuple) -> Gate | str:
    """What `experts` make of gates and ups: the `Gate` that gives what their `_apply_gate` gives on
    a grid, or a reason why there is none. The module is asked once, and again when what it says of
    itself has changed.
    """
    said = (*said, getattr(experts, "act_fn", None))
    known = _gates.get(experts)
    if known is None or known[0] != said:
        known = _gates[experts] = (said, _find_gate(experts))
    return known[1]


def _find_gate(experts):
    interleaved = not getattr(experts, "is_concatenated", True)
    g, u = (t.flatten() for t in torch.meshgrid(_PROBE, _PROBE, indexing="ij"))
    pre = (torch.stack((g, u), -1).flatten() if interleaved else torch.cat((g, u)))[None]
    # transformers puts its own function where a class has none.
    own = type(experts)._apply_gate.__module__ != "transformers.integrations.moe"
    reason = "apply their gate in a way of their own (_apply_gate)"
    if not own:
        act = experts.act_fn
        reason = f"are activated by {getattr(act, '__name__', type(act).__name__)}"
    try:
        with torch.no_grad(), _checks.no_autocast(pre):
            found = experts._apply_gate(pre)
    except Exception as error:
        return f"{reason}, which fails for float32 on a CPU ({type(error).__name__}: {error})"
    # 1e-5: some roundings of float32.
    return next(
        (
            gate
            for gate in _candidates(experts, interleaved)
            if found.shape == g[None].shape
            and torch.allclose(found, gate_eager(pre, gate), rtol=1e-5, atol=1e-5)
        ),
        reason,
    )


def _candidates(experts, interleaved):
    """What the gate may be, by what a module says of itself."""
    for gate in (
        Gate("silu"),
        Gate("gelu_tanh"),
        Gate("gelu"),
        Gate(alpha=1.702),
    ):  # the last is "quick_gelu"
        yield replace(gate, interleaved=interleaved)
    limit, alpha = (
        next(
            (
                float(n)
                for name in names
                if isinstance(n := getattr(experts, name, None), (int, float))
            ),
            None,
        )
        for names in (_LIMITS, _SLOPES)
    )
    if limit is not None and 0 < limit < math.inf:
        clamped = Gate(limit=limit, up_limit=limit, interleaved=interleaved)
        yield clamped
        if alpha is not None:
            yield replace(clamped, alpha=alpha, up_offset=1.0)
    caps = [
        getattr(getattr(experts.act_fn, name, None), "softcap", None)
        if hasattr(experts, "act_fn")
        else None
        for name in ("gate_softcap", "up_softcap")
    ]
    if None not in caps:
        yield Gate(
            "softcapped", limit=float(caps[0]), up_limit=float(caps[1]), interleaved=interleaved
        )


def _interface():
    if reason := platform.no_module("transformers"):
        raise ImplementationUnavailable(reason)
    import transformers

    # Before, the table was there or not, but from_pretrained took transformers' own names only.
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        raise ImplementationUnavailable(
            f"transformers {transformers.__version__} takes no experts_implementation but "
            f"its own; {OLDEST[0]}.{OLDEST[1]} and later do"
        )
    from transformers.integrations.moe import ExpertsInterface

    return ExpertsInterface


def _asked(experts: torch.nn.Module, said: tuple) -> tuple[str | None, tuple]:
    """`why_not`, and the fields of its gate where it is None. Constants, since traced code
    calls it once.
    """
    reason = why_not(experts)
    return reason, () if reason else astuple(_gate(experts, said))


if (
    torch.__version__ < "2.12"
):  # there Dynamo takes no module as an argument of a constant: the graph breaks here
    _asked = torch.compiler.disable(_asked)
else:
    _asked = _torch.constant(_asked)


def _experts(name, implementation):
    def experts_forward(
        self: torch.nn.Module,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        reason, gate = _asked(self, _said(self))
        if reason:
            raise ImplementationUnavailable(
                f'{self.config.model_type}: experts_implementation="{name}" cannot compute '
                f"{type(self).__name__}, "
                f'which {reason}; it takes {ACCEPTED} (others: "grouped_mm", "eager")'
            )
        gate_up, down = self.gate_up_proj, self.down_proj
        if getattr(self, "is_transposed", False):
            gate_up, down = gate_up.mT, down.mT  # read as they lie where the implementation can
        device = hidden_states.device.type
        autocast = _checks.autocasts(device)
        dtype = torch.get_autocast_dtype(device) if autocast else gate_up.dtype
        gate_up, down = gate_up.to(dtype), down.to(dtype)
        biases = {}
        if getattr(self, "has_bias", False):
            biases = {
                "gate_up_bias": self.gate_up_proj_bias.to(dtype),
                "down_bias": self.down_proj_bias.to(dtype),
            }
        if getattr(self, "_is_expert_parallel", False):
            # There any index from num_experts on is that of an expert elsewhere; moe_mlp has one
            # for all of them.
            top_k_index = top_k_index.clamp(max=gate_up.shape[0])
        with _checks.no_autocast(
            hidden_states
        ):  # autocast must not change the dtype of moe_mlp's products
            y = moe_mlp(
                hidden_states.to(dtype),
                gate_up,
                down,
                top_k_index,
                top_k_weights,
                gate=Gate(*gate),
                implementation=implementation,
                **biases,
            )
        return y.to(hidden_states.dtype)

    return experts_forward


# ---- attention


class Mask:
    """What transformers' mask says, in the place of the tensor [batch, 1, queries, keys] that its
    own attention is
    given: no such tensor is built.

    A model may hand it on, move it and cut off its last keys. Whatever else it does with it raises
    ImplementationUnavailable, since a value that it would compute is not there.

    causal, window: as of `ops.attention`; the queries are the last of the first `filled` keys.
    kept: bool [batch, filled], which keys are no padding, or the number of each key's document,
        from 1; None: all keys are there, in one document a row.
    refused: what of it `ops.attention` cannot compute, in words, or None.
    """

    requires_grad = False

    def __init__(
        self, shape, device, *, causal=False, window=None, kept=None, filled=None, refused=None
    ):
        self.shape, self.device, self.dtype = torch.Size(shape), device, torch.bool
        self.causal, self.window, self.kept, self.refused = causal, window, kept, refused
        self.filled = self.shape[3] if filled is None else filled
        self._found: tuple | None = None  # the layout of the last position ids

    @property
    def ndim(self) -> int:
        return 4

    def dim(self) -> int:
        return 4

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def to(self, *arguments, **options) -> Mask:
        """On another device: of its values there is nothing to convert."""
        device = _torch.device_asked_for(*arguments, **options)
        if device is None or device == self.device:
            return self
        kept = None if self.kept is None else self.kept.to(device)
        return Mask(
            self.shape,
            device,
            causal=self.causal,
            window=self.window,
            kept=kept,
            filled=self.filled,
            refused=self.refused,
        )

    def contiguous(self) -> Mask:
        return self

    def __getitem__(self, index) -> Mask:
        index = index if isinstance(index, tuple) else (index,)
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
            return Mask(
                (*self.shape[:3], keys),
                self.device,
                causal=self.causal,
                window=self.window,
                kept=self.kept,
                filled=self.filled,
                refused=self.refused,
            )
        raise _computed("indexes it")

    def __getattr__(self, name):
        if not name.startswith("_") and hasattr(torch.Tensor, name):
            raise _computed(f"calls its {name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        raise _computed(f"calls {getattr(function, '__name__', function)} with it")

    def layout(self, position_ids: torch.Tensor | None, B: int, S: int) -> _Layout | None:
        """`_layout` of what is kept. The layers of a model ask for the same, and an answer waits
        for the device: the last one is remembered, as long as the mask lives, which is one forward
        pass.
        """
        version = (
            None if position_ids is None or position_ids.is_inference() else position_ids._version
        )
        if self._found is None or self._found[0] is not position_ids or self._found[1] != version:
            self._found = (position_ids, version, _layout(self.kept, position_ids, B, S))
        return self._found[2]


def _computed(what):
    return ImplementationUnavailable(
        f'attn_implementation="{NAME}" builds no mask of queries x keys, and this model '
        f'computes with its mask ({what}) (others: "sdpa", "eager")'
    )


def _define_operators():
    def of(name):
        def operator(self, *others):
            raise _computed(f"calls its {name}")

        return operator

    for name in ("add", "sub", "mul", "truediv", "matmul", "and", "or", "xor"):
        for side in ("", "r", "i"):
            setattr(Mask, f"__{side}{name}__", of(name))
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
        setattr(Mask, f"__{name}__", of(name))
    Mask.__hash__ = object.__hash__  # which goes with __eq__


_define_operators()


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    mask_function=None,
    attention_mask: torch.Tensor | Mask | None = None,
    device=None,
    **kwargs,
) -> Mask:
    """What a layer is given as its mask: what transformers' function of a query's and a key's
    position says, and which keys are padding.
    """
    if isinstance(attention_mask, Mask):  # made before, as generate does
        return attention_mask
    shape = (batch_size, 1, q_length, kv_length)
    if torch.compiler.is_compiling():
        return _traced_mask(
            shape, q_offset, kv_offset, mask_function, attention_mask, device, kwargs
        )
    device = torch.device("cpu" if device is None else device)
    q_offset, kv_offset = int(q_offset), int(kv_offset)
    said = _Said()
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
    # Where all keys are in one chunk, or as near as a window reaches, it is as if there were none.
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
            there = F.pad(
                there, (0, filled - there.shape[1])
            )  # what a mask does not reach is not there
            kept = there if kept is None else kept & there
        if kept is not None and kept.all():
            kept = None
        if said.documents is not None:
            numbers = said.documents[:, kv_offset : kv_offset + filled] + 1
            kept = numbers if kept is None else numbers * kept
        return Mask(shape, device, causal=said.causal, window=window, kept=kept, filled=filled)
    return Mask(shape, device, refused=", ".join(said.refused))


class _Said:
    """What a function of transformers.masking_utils says, read from its name and from what it
    closes over.

    causal; window, around: how many positions up to itself, or on each side, a position sees;
    chunk: the width of the chunks that do not see each other; padding: [B, keys] masks; documents:
    [B, keys] numbers, of those that do not see each other; refused: what is none of this, in words.
    """

    def __init__(self):
        self.causal, self.window, self.around, self.chunk = False, None, None, None
        self.padding, self.documents, self.refused = [], None, []

    def read(self, function: Callable) -> None:
        name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
        short = name.removeprefix("transformers.masking_utils.")
        held = _held(function)
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
            self.read(
                held["mask_function"]
            )  # a document's positions follow one another: distances stay
        elif short != "bidirectional_mask_function":
            self.refused.append(f"the mask function {name}")


def _traced_mask(shape, q_offset, kv_offset, function, attention_mask, device, said):
    """`_mask` while torch.compile traces it: what functions close over cannot be read, so the
    arguments beside tell what transformers has made of them.
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
        raise _not_traced(
            "a causal mask, with a window or packed documents, or one that is not causal"
        )
    causal, window = "allow_is_bidirectional_skip" not in said, said.get("local_size")
    if window is not None and not causal:
        raise _not_traced("a window that is causal")
    filled = q_offset + queries - kv_offset if causal else keys
    kept = None
    if attention_mask is not None:
        kept = attention_mask[:, kv_offset : kv_offset + filled].bool()
        kept = F.pad(kept, (0, filled - kept.shape[1]))
    elif (
        not plain and queries == keys
    ):  # documents end where a position does not see the one before it
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
    )


def _not_traced(what):
    return ImplementationUnavailable(
        f'attn_implementation="{NAME}" under torch.compile(fullgraph=True) takes {what}, '
        "and lengths that are no tensors; without fullgraph it takes more"
    )


def _held(function) -> dict[str, Any]:
    """What a function closes over."""
    code = getattr(function, "__code__", None)
    return (
        {}
        if code is None
        else {
            name: cell.cell_contents
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
        }
    )


def _numbered(kept: torch.Tensor | None) -> bool:
    """Whether it is of documents' numbers (see `Mask`)."""
    return kept is not None and kept.dtype != torch.bool


def _attention(name, implementation):
    def attention_forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Mask | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        is_causal: bool | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        max_length_q: int | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        """query [B, Hq, S, D], key and value [B, Hk, Sk, D]; the result is [B, S, Hq, D],
        contiguous.

        Where there is a mask it alone says who sees whom, as for transformers' eager attention;
        where a layer is given none, `is_causal` (or the module's) and `sliding_window` do, as for
        its flash attention.
        """
        S, keys = query.shape[2], key.shape[2]
        mask = attention_mask
        if mask is None:
            causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
            refused = [
                words
                for words, is_asked in (
                    ("a window that is not causal", sliding_window is not None and not causal),
                    (f"{S} queries of {keys} keys without a mask", causal and 1 < S != keys),
                )
                if is_asked
            ]
            mask = Mask(
                (query.shape[0], 1, S, keys),
                query.device,
                causal=causal,
                window=sliding_window,
                refused=", ".join(refused),
            )
        elif not isinstance(mask, Mask):
            mask = Mask(
                (0, 0, S, keys), query.device, refused=f"a mask of shape {list(mask.shape)}"
            )
        refused = [
            words
            for words, is_asked in (
                (f"dropout = {dropout}", dropout > 0),
                (
                    "output_attentions",
                    kwargs.get("output_attentions") or _attentions_are_collected(),
                ),
                (mask.refused, mask.refused),
                (
                    f"{S} queries and {keys} keys with a mask for {mask.shape[2]} and "
                    f"{mask.shape[3]}",
                    (S, keys) != mask.shape[2:],
                ),
                (
                    "cu_seq_lens_q beside a mask with padding, or one that is not causal",
                    cu_seq_lens_q is not None
                    and attention_mask is not None
                    and S > 1
                    and (not mask.causal or (mask.kept is not None and not _numbered(mask.kept))),
                ),
                ("a paged cache", kwargs.get("cache") is not None),
                *(
                    (key, kwargs.get(key) is not None)
                    for key in ("position_bias", "indices", "block_indices", "sinks")
                ),
            )
            if is_asked
        ]
        if refused:
            raise ImplementationUnavailable(
                f'{type(module).__name__}: attn_implementation="{name}" does not compute '
                f'{", ".join(refused)} (others: "sdpa", "eager")'
            )
        query, key, value = _of_one_dtype(
            query, key[:, :, : mask.filled], value[:, :, : mask.filled]
        )
        width = value.shape[-1]
        if width < query.shape[-1]:  # multi-head latent attention
            value = F.pad(value, (0, query.shape[-1] - width))
        options = {
            "causal": mask.causal,
            "window": mask.window,
            "softcap": softcap,
            "sinks": s_aux,
            "scale": scaling,
            "implementation": implementation,
        }
        with _checks.no_autocast(query):
            if S > 1 and cu_seq_lens_q is not None:  # of all rows, one after the other
                if torch.compiler.is_compiling():
                    options["implementation"] = _off_host(
                        implementation, query.device.type, query.dtype
                    )
                out = _packed(query, key, value, None, cu_seq_lens_q, max_length_q, options)
            elif mask.causal and mask.filled == S:
                out = _of_rows(query, key, value, mask, position_ids, name, options)
            else:
                out = _of_cache(query, key, value, mask.kept, name, options)
            return out[..., :width].transpose(1, 2).contiguous(), None

    return attention_forward


def _of_one_dtype(q, k, v):
    """In autocast's dtype, as F.scaled_dot_product_attention takes them; without it in v's, which
    is that of a product with weights, where norms or a rotation in float32 have left q or k
    another.
    """
    device = q.device.type
    dtype = v.dtype
    if _checks.autocasts(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _attentions_are_collected() -> bool:
    """Whether a model is asked for output_attentions. Not all tell their layers: transformers takes
    what these return by hooks, and leaves out what is None.
    """
    from transformers.utils import output_capturing

    collector = getattr(output_capturing, "_active_collector", None)
    if (
        torch.compiler.is_compiling()
    ):  # which cannot trace a ContextVar: transformers has a global one beside it
        collected = getattr(collector, "global_var", None)
    else:
        collected = None if collector is None else collector.get()
    return collected is not None and any("attentions" in key for key in collected)


def _of_rows(q, k, v, mask, position_ids, name, options):
    """Rows of a batch, without their padding, and the documents packed in them, as one sequence."""
    if torch.compiler.is_compiling():
        return _traced_rows(q, k, v, mask.kept, position_ids, options)
    found = mask.layout(position_ids, q.shape[0], q.shape[2])
    if found is None:
        return attention(q, k, v, **options)
    if found.holes and options["window"] is not None:
        raise _hole(name)
    if found.cu.numel() == 1:  # nothing but padding
        return q * 0
    return _packed(q, k, v, found.index, found.cu, found.longest, options)


def _traced_rows(q, k, v, kept, position_ids, options):
    """`_of_rows` where no length may depend on values: padding is put behind all other tokens, each
    a document of its own, and as many boundaries as there are tokens are given, of which the last
    are all the end.
    """
    B, _, S, _ = q.shape
    if position_ids is not None and position_ids.dim() != 2:
        position_ids = None
    if kept is None and position_ids is None:
        return attention(q, k, v, **options)
    if options["window"] is not None and kept is not None and not _numbered(kept):
        raise _not_traced("no padding where there is a window")
    options = {
        **options,
        "implementation": _off_host(options["implementation"], q.device.type, q.dtype),
    }
    there = None
    place = torch.arange(B * S, device=q.device)
    if kept is not None and not _numbered(kept):
        there, place = torch.sort(kept.flatten(), descending=True, stable=True)
    step, within = place.diff(), (place // max(S, 1)).diff() == 0
    if there is not None:
        within = within & there[1:]
    if _numbered(kept):
        within = within & (kept.flatten().diff() == 0)
    if position_ids is not None:
        up = position_ids.expand(B, S).flatten()[place].diff()
        within = within & ((up == 1) | (up == step))
    at = torch.arange(1, B * S + 1, device=q.device)
    ends = torch.where(F.pad(within, (0, 1)), B * S, at).sort()[0]
    out = _packed(
        q, k, v, None if there is None else place, F.pad(ends, (1, 0)).to(torch.int32), S, options
    )
    return out if kept is None or _numbered(kept) else out * kept[:, None, :, None]


@_torch.constant
def _off_host(implementation: str, device_type: str, dtype: torch.dtype) -> str:
    """The implementation for boundaries that are not to be read on the host: in compiled code
    eager does not.
    """
    if implementation != "auto":
        return implementation
    usable = ATTENTION.usable(device_type, dtype)
    return next(
        i.name
        for i in ATTENTION.implementations
        if device_type in i.devices and i.name in usable and (i.name == "eager" or not i.reads_host)
    )


def _packed(q, k, v, index, cu, longest, options):
    """Of the tokens of all rows, one row after the other, those that `index` names (None: all), in
    documents between the boundaries `cu`. The rest is 0.
    """
    B, H, S, D = q.shape
    rows = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    packed = (t if index is None else t.index_select(0, index) for t in rows)
    out = attention(
        *(t.transpose(0, 1).unsqueeze(0) for t in packed),
        cu_seqlens=cu,
        max_seqlen=longest,
        **options,
    )
    out = out.squeeze(0).transpose(0, 1)
    if index is not None:
        out = out.new_zeros(B * S, H, D).index_copy(0, index, out)
    return out.unflatten(0, (B, S)).transpose(1, 2)


def _hole(name):
    return ImplementationUnavailable(
        f'attn_implementation="{name}" takes no mask with holes in a document where there '
        'is a window, which would reach over them (others: "sdpa", "eager")'
    )


class _Layout(NamedTuple):
    index: torch.Tensor | None  # which tokens of the B S are no padding; None: all
    cu: torch.Tensor  # boundaries of documents among these
    longest: int
    holes: bool  # there is padding within a document


def _layout(kept, position_ids, B, S) -> _Layout | None:
    """None for whole rows of one document each. A token belongs to the document of the one before
    it in its row that is no padding, if position ids, where they are given, go up by one or by the
    number of places (they count padding or not, as a caller likes), and both have the same number
    of a document, where transformers gave these.
    """
    if (
        position_ids is not None and position_ids.dim() != 2
    ):  # of several axes, as for images: not of a text
        position_ids = None
    if kept is None and position_ids is None:
        return None
    if kept is None or (_numbered(kept) and bool(kept.all())):
        index, place = (
            None,
            torch.arange(B * S, device=(position_ids if kept is None else kept).device),
        )
    else:
        index = place = kept.flatten().nonzero().squeeze(1)
    step, within = place.diff(), (place // max(S, 1)).diff() == 0
    if _numbered(kept):
        within &= kept.flatten()[place].diff() == 0
    if position_ids is not None:
        up = position_ids.expand(B, S).flatten()[place].diff()
        within &= (up == 1) | (up == step)
    first = torch.ones_like(place[:1], dtype=torch.bool)
    ends = torch.cat((first, ~within)).nonzero().squeeze(1)
    if index is None and ends.numel() == B:
        return None
    cu = torch.cat((ends, ends.new_tensor([place.numel()]))).to(torch.int32)
    if not place.numel():
        return _Layout(index, cu, 0, False)
    longest, holes = torch.stack((cu.diff().max(), (within & (step > 1)).any())).tolist()
    return _Layout(index, cu, longest, bool(holes))


def _of_cache(q, k, v, kept, name, options):
    """The last tokens of rows, whose earlier keys are cached, or queries that see all keys; a row
    at a time where some keys are padding.
    """
    if kept is None:
        return attention(q, k, v, **options)
    if torch.compiler.is_compiling():
        raise _not_traced("no padding but that of causal attention without a cache")
    kept = kept.bool()
    if options["causal"] and not bool(kept[:, -q.shape[2] :].all()):
        raise ImplementationUnavailable(
            f'attn_implementation="{name}" takes padding on the left of cached keys only '
            '(others: "sdpa", "eager")'
        )
    if options["window"] is not None and bool((kept[:, :-1] & ~kept[:, 1:]).any()):
        raise _hole(name)
    return torch.cat(
        [
            attention(q[b : b + 1], k[b : b + 1, :, kept[b]], v[b : b + 1, :, kept[b]], **options)
            for b in range(q.shape[0])
        ]
    )
