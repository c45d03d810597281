"""Attention and the experts of Hugging Face transformers' models, computed by `ops.attention` and `ops.moe_mlp`.

    from tilewright.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilewright",
                                                 experts_implementation="tilewright")

transformers (5.7 and later) keeps tables of functions: for attention, for the masks that it is given, and for a layer's
experts. `register` adds entries to them and changes nothing else: projections, norms, the router and everything around
stay transformers'. Importing this module imports no transformers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tilewright import platform
from tilewright.ops import _checks, attention, moe_mlp
from tilewright.ops.attention import ATTENTION
from tilewright.ops.moe import MOE_MLP
from tilewright.registry import ImplementationUnavailable

NAME = "tilewright"
RENAMED = {"sdpa": "torch", "flash_attention_3": "fa3", "flash_attention_4": "fa4"}   # see `register`
OLDEST = (5, 7)   # of transformers
ACCEPTED = ("experts that compute down_proj(silu(gate) * up) without biases, with gate_up_proj [E, 2 I, H] (all gates "
            "before all ups) and down_proj [E, H, I], or both transposed")


def register(implementation: str = "auto", attn_implementation: str = "auto") -> tuple[str, ...]:
    """Adds "tilewright" to the values that transformers takes as `experts_implementation` and as `attn_implementation`,
    in `from_pretrained`, `from_config`, `set_experts_implementation` and `set_attn_implementation`.

    implementation: what "tilewright" stands for as experts, a name of moe_mlp's implementations or "auto". Beside it
        each name gets an entry of its own: "tilewright:triton", "tilewright:cpp", "tilewright:eager" and so on.
    attn_implementation: the same for attention, with the names of attention's implementations. Entries of their own are
        called "tilewright:triton", "tilewright:eager", "tilewright:native", "tilewright:torch" (sdpa), "tilewright:fa3"
        and "tilewright:fa4": transformers takes "sdpa" or "flash" anywhere in a name for a request of its own.
    Returns the names added for experts, "tilewright" first. They hold for the whole process; registering again
    replaces them.

    Attention is of the packed tokens that are no padding, so no mask of S x S is built, and what stands in padding is
    never read: its own output is 0. Documents packed into a row are told by `cu_seq_lens_q`, or by position ids that do
    not follow one another (with padding between tokens, counted or not), as for transformers' flash attention; its
    eager attention looks at them without a mask and without a cache only, and so do layers here that are given none
    (Persimmon). Sliding windows, softcaps and sinks are those of the layer. Refused when called, with
    ImplementationUnavailable: dropout, attention weights as a result, masks of four dimensions, chunked attention, and
    a window where a mask has holes within a document.

    A layer that moe_mlp cannot compute (`why_not`), and a named implementation that cannot run here, raise
    ImplementationUnavailable when the layer is called: transformers asks no sooner. Products are in the weights' dtype,
    in autocast's where that is on (which copies the weights at each call, as it does for a linear layer); the result
    is in the dtype of the hidden states. Under transformers' expert parallelism, slots of experts on other ranks add
    nothing.
    Raises ImplementationUnavailable if transformers is missing or too old, ValueError or TypeError for a name that
    does not exist.
    """
    for op, name in ((MOE_MLP, implementation), (ATTENTION, attn_implementation)):
        if name != "auto":
            op.implementation(name)
    interface = _interface()
    from transformers import AttentionInterface, AttentionMaskInterface

    entries = {NAME: implementation, **{f"{NAME}:{name}": name for name in MOE_MLP.names()}}
    for name, chosen in entries.items():
        interface.register(name, _experts(name, chosen))
    entries_of_attention = {f"{NAME}:{RENAMED.get(name, name)}": name for name in ATTENTION.names()}
    for name, chosen in {NAME: attn_implementation, **entries_of_attention}.items():
        AttentionInterface.register(name, _attention(name, chosen))
        AttentionMaskInterface.register(name, _mask)
    return tuple(entries)


def why_not(experts: torch.nn.Module) -> str | None:
    """None if moe_mlp computes what this experts module of transformers does, else the reasons, in words."""
    reasons = []
    # A version of transformers without a flag has no experts that it would tell apart.
    if not getattr(experts, "has_gate", True):
        reasons.append("have no gate")
    if getattr(experts, "has_bias", False):
        reasons.append("have biases")
    if not getattr(experts, "is_concatenated", True):
        reasons.append("interleave gates with ups")
    if getattr(experts, "has_post_expert_norm", False):
        reasons.append("normalise what each of them gives")
    # transformers puts its own function where a class has none.
    if type(experts)._apply_gate.__module__ != "transformers.integrations.moe":
        reasons.append("apply their gate in a way of their own (_apply_gate)")
    elif not _is_silu(experts.act_fn):
        reasons.append(f"are activated by {getattr(experts.act_fn, '__name__', type(experts.act_fn).__name__)}")
    return ", ".join(reasons) or None


def _is_silu(act) -> bool:
    kind = type(act)
    return act is F.silu or kind is torch.nn.SiLU or (
        kind.__module__ == "transformers.activations" and kind.__name__ == "SiLUActivation")


def _interface():
    if reason := platform.no_module("transformers"):
        raise ImplementationUnavailable(reason)
    import transformers

    # Before, the table was there or not, but from_pretrained took transformers' own names only.
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        raise ImplementationUnavailable(f"transformers {transformers.__version__} takes no experts_implementation but "
                                        f"its own; {OLDEST[0]}.{OLDEST[1]} and later do")
    from transformers.integrations.moe import ExpertsInterface

    return ExpertsInterface


def _experts(name, implementation):
    def experts_forward(self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                        top_k_weights: torch.Tensor) -> torch.Tensor:
        if reason := why_not(self):
            raise ImplementationUnavailable(
                f'{self.config.model_type}: experts_implementation="{name}" cannot compute {type(self).__name__}, '
                f'which {reason}; it takes {ACCEPTED} (others: "grouped_mm", "eager")')
        gate_up, down = self.gate_up_proj, self.down_proj
        if getattr(self, "is_transposed", False):
            gate_up, down = gate_up.mT, down.mT   # read as they lie where the implementation can
        device = hidden_states.device.type
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        if autocast:
            gate_up, down = (t.to(torch.get_autocast_dtype(device)) for t in (gate_up, down))
        if getattr(self, "_is_expert_parallel", False):
            # There any index from num_experts on is that of an expert elsewhere; moe_mlp has one for all of them.
            top_k_index = top_k_index.clamp(max=gate_up.shape[0])
        with _checks.no_autocast(hidden_states):   # moe_mlp's products are not autocast's
            y = moe_mlp(hidden_states.to(gate_up.dtype), gate_up, down, top_k_index, top_k_weights,
                        implementation=implementation)
        return y.to(hidden_states.dtype)

    return experts_forward


# ---- attention

def _mask(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, *,
          mask_function=None, attention_mask: torch.Tensor | None = None, device=None,
          **kwargs) -> torch.Tensor | None:
    """What a layer is given as its mask, [B, keys]: which keys are no padding or, where transformers found documents
    packed, the number of each key's document, from 1 (not all layers are given position ids); None if all keys are
    there, in one document a row."""
    functions = list(_functions(mask_function))
    # transformers joins masks of which one is enough by or_masks, those that must all hold by and_masks.
    if kwargs.get("use_vmap") or any(getattr(f, "__name__", "") == "or_mask" for f in functions):
        raise ImplementationUnavailable(f'attn_implementation="{NAME}" computes causal attention, with a window or '
                                        'without, and full attention; this model\'s mask lets tokens see later ones '
                                        '(others: "sdpa", "eager")')
    if attention_mask is None:
        for f in functions:
            if (documents := _held(f).get("packed_sequence_mask")) is not None:
                return documents + 1
        filled = int(q_offset) + q_length - int(kv_offset)
        # A static cache is longer than what it holds. (Where all see all, keys may be another sequence's.)
        if "allow_is_bidirectional_skip" in kwargs or kv_length <= filled:
            return None
        return torch.ones(batch_size, filled, dtype=torch.bool, device=device)
    kept = attention_mask[:, -kv_length:].bool()
    return None if kept.shape[1] == kv_length and kept.all() else kept


def _numbered(mask: torch.Tensor | None) -> bool:
    """Whether it is of documents' numbers (see `_mask`)."""
    return mask is not None and mask.dtype != torch.bool


def _functions(function) -> Iterator[Callable]:
    """A mask's function and those that it is made of."""
    if not callable(function):
        return
    yield function
    for held in _held(function).values():
        for f in held if isinstance(held, tuple | list) else (held,):
            yield from _functions(f)


def _held(function) -> dict[str, Any]:
    """What a function closes over."""
    code = getattr(function, "__code__", None)
    return {} if code is None else {name: cell.cell_contents for name, cell in
                                    zip(code.co_freevars, function.__closure__ or (), strict=True)}


def _attention(name, implementation):
    def attention_forward(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                          attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
                          sliding_window: int | None = None, softcap: float | None = None,
                          s_aux: torch.Tensor | None = None, is_causal: bool | None = None,
                          position_ids: torch.Tensor | None = None, cu_seq_lens_q: torch.Tensor | None = None,
                          max_length_q: int | None = None, **kwargs) -> tuple[torch.Tensor, None]:
        """query [B, Hq, S, D], key and value [B, Hk, Sk, D]; the result is [B, S, Hq, D]."""
        config = getattr(module, "config", None)
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        layers, layer = getattr(config, "layer_types", None) or (), getattr(module, "layer_idx", None)
        kind = layers[layer] if layer is not None and layer < len(layers) else None
        refused = [words for words, is_asked in (
            (f"dropout = {dropout}", dropout > 0),
            ("output_attentions", kwargs.get("output_attentions")),
            (f"a mask of shape {list(attention_mask.shape) if attention_mask is not None else None}",
             attention_mask is not None and attention_mask.dim() != 2),
            ("chunked attention", kind == "chunked_attention"),
            ("a window that is not causal", sliding_window is not None and not causal),
            ("a paged cache", kwargs.get("cache") is not None),
            *((key, kwargs.get(key) is not None) for key in ("position_bias", "indices", "block_indices", "sinks")),
        ) if is_asked]
        if refused:
            raise ImplementationUnavailable(f'{type(module).__name__}: attn_implementation="{name}" does not compute '
                                            f'{", ".join(refused)} (others: "sdpa", "eager")')
        width = value.shape[-1]
        if width < query.shape[-1]:   # multi-head latent attention
            value = F.pad(value, (0, query.shape[-1] - width))
        options = {"causal": causal, "window": sliding_window, "softcap": softcap, "sinks": s_aux,
                   "scale": scaling, "implementation": implementation}
        if query.shape[2] > 1 and cu_seq_lens_q is not None:   # of all rows, one after the other
            out = _packed(query, key, value, None, cu_seq_lens_q, max_length_q, options)
        elif query.shape[2] == key.shape[2] and (causal or _numbered(attention_mask)):
            out = _of_rows(query, key, value, attention_mask, position_ids, name, options)
        else:
            out = _of_cache(query, key, value, attention_mask, name, options)
        return out[..., :width].transpose(1, 2), None

    return attention_forward


def _of_rows(q, k, v, kept, position_ids, name, options):
    """Rows of a batch, without their padding, and the documents packed in them, as one sequence."""
    found = _layout(kept, position_ids, q.shape[0], q.shape[2])
    if found is None:
        return attention(q, k, v, **options)
    if found.holes and options["window"] is not None:
        raise _hole(name)
    if found.cu.numel() == 1:   # nothing but padding
        return q * 0
    return _packed(q, k, v, found.index, found.cu, found.longest, options)


def _packed(q, k, v, index, cu, longest, options):
    """Of the tokens of all rows, one row after the other, those that `index` names (None: all), in documents between
    the boundaries `cu`. The rest is 0."""
    B, H, S, D = q.shape
    rows = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    packed = (t if index is None else t.index_select(0, index) for t in rows)
    out = attention(*(t.transpose(0, 1).unsqueeze(0) for t in packed), cu_seqlens=cu, max_seqlen=longest, **options)
    out = out.squeeze(0).transpose(0, 1)
    if index is not None:
        out = out.new_zeros(B * S, H, D).index_copy(0, index, out)
    return out.unflatten(0, (B, S)).transpose(1, 2)


def _hole(name):
    return ImplementationUnavailable(f'attn_implementation="{name}" takes no mask with holes in a document where there '
                                     'is a window, which would reach over them (others: "sdpa", "eager")')


class _Layout(NamedTuple):
    index: torch.Tensor | None   # which tokens of the B S are no padding; None: all
    cu: torch.Tensor             # boundaries of documents among these
    longest: int
    holes: bool                  # there is padding within a document


_last: tuple | None = None   # what the last call of `_layout` was asked, and found


def _layout(kept, position_ids, B, S) -> _Layout | None:
    """None for whole rows of one document each."""
    global _last   # the layers of a model ask the same, and an answer waits for the device
    if position_ids is not None and position_ids.dim() != 2:   # of several axes, as for images: not of a text
        position_ids = None
    if kept is None and position_ids is None:
        return None
    asked = (kept, position_ids)
    if any(t is not None and t.is_inference() for t in asked):   # nothing tells whether it is as it was
        return _find_layout(*asked, B, S)
    if _last is not None:
        refs, versions, shape, found = _last
        if shape == (B, S) and all(version is None if t is None else ref is not None and ref() is t
                                   and t._version == version
                                   for ref, version, t in zip(refs, versions, asked, strict=True)):
            return found
    found = _find_layout(*asked, B, S)
    _last = ([None if t is None else weakref.ref(t) for t in asked], [None if t is None else t._version for t in asked],
             (B, S), found)
    return found


def _find_layout(kept, position_ids, B, S):
    """A token belongs to the document of the one before it in its row that is no padding, if position ids, where they
    are given, go up by one or by the number of places (they count padding or not, as a caller likes), and both have the
    same number of a document, where transformers gave these."""
    if kept is None or (_numbered(kept) and bool(kept.all())):
        index, place = None, torch.arange(B * S, device=(position_ids if kept is None else kept).device)
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
    """The last tokens of rows, whose earlier keys are cached; a row at a time where some keys are padding."""
    if kept is None:
        return attention(q, k, v, **options)
    k, v = k[:, :, :kept.shape[1]], v[:, :, :kept.shape[1]]   # a static cache is longer than what it holds
    if options["causal"] and q.shape[2] == k.shape[2]:
        return _of_rows(q, k, v, kept, None, name, options)
    kept = kept.bool()
    if options["causal"] and not bool(kept[:, -q.shape[2]:].all()):
        raise ImplementationUnavailable(f'attn_implementation="{name}" takes padding on the left of cached keys only '
                                        '(others: "sdpa", "eager")')
    window = options["window"]
    if window is not None and window < kept.shape[1] and bool((kept[:, :-1] & ~kept[:, 1:]).any()):
        raise _hole(name)
    return torch.cat([attention(q[b:b + 1], k[b:b + 1, :, kept[b]], v[b:b + 1, :, kept[b]], **options)
                      for b in range(q.shape[0])])
