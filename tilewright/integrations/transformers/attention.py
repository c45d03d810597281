"""Attention of transformers' models, computed by `ops.attention`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.core import checks, torch_names
from tilewright.integrations.transformers.errors import (
    NotComputed,
    hole_in_window,
    not_traced,
    warn_once,
)
from tilewright.integrations.transformers.functions import own_function
from tilewright.integrations.transformers.masks import Mask
from tilewright.integrations.transformers.packing import is_numbered
from tilewright.ops import attention
from tilewright.ops.attention.attention import ATTENTION, Request, takes_values

# What transformers' cache of continuous batching passes: itself before 5.24, or what it reads by.
PAGED = ("cache", "read_index", "block_table")


# Long: the function that it returns has transformers' whole signature.
def attention_entry(
    name: str, implementation: str, collector: Any, by_positions: bool = True
) -> Callable:
    """Returns the function that transformers calls for a layer's attention under this name.

    collector: transformers' variable that tells which outputs of layers it collects.
    by_positions: position ids that are not consecutive begin a document too, beside the documents
        of the mask.
    """

    # Long: transformers' whole signature, argument by argument.
    # Wide: the same.
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
        """query [B, Hq, S, D], key and value [B, Hk, Sk, D]; returns [B, S, Hq, D], contiguous.

        A mask alone decides which keys a query sees, as in transformers' eager attention. Without
        one, `is_causal` (or the module's) and `sliding_window` do, as in its flash attention.
        """
        S, keys = query.shape[2], key.shape[2]
        mask = attention_mask
        if mask is None:
            causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
            mask = _mask_of_layer((query.shape[0], 1, S, keys), query, causal, sliding_window)
        elif not isinstance(mask, Mask):
            refused = f"a mask of shape {list(mask.shape)}"
            mask = Mask((0, 0, S, keys), query.device, refused=refused)
        if not by_positions:
            position_ids = None
        packed_beside_mask = cu_seq_lens_q is not None and attention_mask is not None and S > 1
        if _attentions_are_collected(collector):
            kwargs["output_attentions"] = True
        drops = 0 < dropout < 1 and _drops(implementation)
        if refused := _refused(
            mask, (S, keys), 0.0 if drops else dropout, packed_beside_mask, kwargs
        ):
            raise NotComputed(
                f'{type(module).__name__}: attn_implementation="{name}" does not compute '
                f'{", ".join(refused)} (others: "sdpa", "eager")'
            )
        query, key, value = cast_together(
            query, key[:, :, : mask.filled], value[:, :, : mask.filled]
        )
        width = value.shape[-1]
        if scaling is None:
            scaling = query.shape[-1] ** -0.5
        if not _takes_values(implementation, query.shape[-1], width):
            widest = max(width, query.shape[-1])
            query, key, value = (_padded(t, widest) for t in (query, key, value))
        options = {
            "causal": mask.causal,
            "window": mask.window,
            "softcap": softcap,
            "sinks": s_aux,
            "scale": scaling,
            "implementation": implementation,
        }
        if drops:
            # The seed is drawn from the CPU's default generator, whose state checkpointing restores
            # before it recomputes a layer. No device waits for that.
            options |= {"dropout_p": dropout, "seed": int(torch.randint(2**62, (), device="cpu"))}
        with checks.no_autocast(query):
            if S > 1 and cu_seq_lens_q is not None:  # of all rows, concatenated
                if torch.compiler.is_compiling():
                    options["implementation"] = _off_host(
                        implementation, query.device.type, query.dtype
                    )
                out = attend_packed(query, key, value, None, cu_seq_lens_q, max_length_q, options)
            elif mask.causal and mask.filled == S:
                out = attend_rows(query, key, value, mask, position_ids, name, options)
            else:
                out = attend_cache(query, key, value, mask.kept, name, options)
            return out[..., :width].transpose(1, 2).contiguous(), None

    return attention_forward


def attention_or_other(ours: Callable, other: str, table: Any) -> Callable:
    """Returns an entry that calls `ours`, an `attention_entry`, and for requests that it does not
    compute the implementation `other` of transformers' table, with one warning of each kind.
    """

    def attention_forward(module, query, key, value, attention_mask, *arguments, **options):
        try:
            # Where all keys but later ones are seen, transformers gives some implementations no
            # mask, and the layer's own attribute decides.
            causal = isinstance(attention_mask, Mask) and attention_mask.causal
            if causal and getattr(module, "is_causal", True) is False:
                name = type(module).__name__
                raise NotComputed(f"{name}: a causal mask for a layer that is not causal")
            if other == "eager" and attention_mask is None and getattr(module, "is_causal", True):
                # transformers' eager attention has no mask of its own.
                raise NotComputed(f"{type(module).__name__}: eager attention without a mask")
            return ours(module, query, key, value, attention_mask, *arguments, **options)
        # Also errors of arguments: transformers checks fewer of them than ops.attention.
        except (NotComputed, TypeError, ValueError) as error:
            reason = str(error).partition(" (others:")[0]
            kind = re.sub(r"\d+", "", reason), other  # whatever its numbers
            warn_once(kind, f"{reason}; {other!r} computes it, as before accelerate")
        mask = attention_mask.for_other() if isinstance(attention_mask, Mask) else attention_mask
        # transformers' table has no eager attention: each module of models has its own.
        compute = eager_attention(type(module)) if other == "eager" else table[other]
        assert compute is not None, "`accelerate` takes eager attention only where there is one"
        return compute(module, query, key, value, mask, *arguments, **options)

    return attention_forward


def eager_attention(cls: type) -> Callable | None:
    """The eager attention that a class's forward gives transformers' table as its default."""
    own = own_function(cls.forward)
    if own is None:
        return None
    names = (n for n in own.__code__.co_names if n.endswith("attention_forward"))
    return next((own.__globals__[n] for n in names if n in own.__globals__), None)


def _drops(implementation: str) -> bool:
    """Whether an implementation computes dropout. Not in compiled code, whose graph cannot have a
    number that is drawn on the host.
    """
    if torch.compiler.is_compiling():
        return False
    chosen = None if implementation == "auto" else ATTENTION.implementation(implementation)
    return chosen is None or chosen.refuses(Request(head_dim=64, dropout=True)) is None


def _takes_values(implementation: str, D: int, Dv: int) -> bool:
    """Whether values of multi-head latent attention need no padding to the width of keys."""
    if Dv == D or implementation == "auto":
        return True
    if torch.compiler.is_compiling():
        D, Dv = len(range(D)), len(range(Dv))  # constants; int(D) is not
    return takes_values(implementation, D, Dv)


def _padded(t: torch.Tensor, width: int) -> torch.Tensor:
    return t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1]))


def _mask_of_layer(shape, query: torch.Tensor, causal: bool, window: int | None) -> Mask:
    """The mask for a layer without one."""
    S, keys = shape[2:]
    refused = []
    if window is not None and not causal:
        refused.append("a window that is not causal")
    if causal and 1 < S != keys:
        refused.append(f"{S} queries of {keys} keys without a mask")
    return Mask(shape, query.device, causal=causal, window=window, refused=", ".join(refused))


def _refused(mask: Mask, sizes: tuple[int, int], dropout, packed_beside_mask, kwargs) -> list[str]:
    """The parts of a call that `ops.attention` does not support, in words."""
    padded = mask.kept is not None and not is_numbered(mask.kept)
    words = [mask.refused] if mask.refused else []
    if mask.was_written:
        words.append("a mask that the model has written into")
    if dropout > 0:
        # No formatting of a number that torch.compile(dynamic=True) has made symbolic.
        words.append("dropout" if torch.compiler.is_compiling() else f"dropout = {dropout}")
    if kwargs.get("output_attentions"):
        words.append("output_attentions")
    if sizes != tuple(mask.shape[2:]):
        words.append(
            "other numbers of queries and keys than its mask's"
            if torch.compiler.is_compiling()
            else f"{sizes[0]} queries and {sizes[1]} keys with a mask for {mask.shape[2]} and "
            f"{mask.shape[3]}"
        )
    if packed_beside_mask and (not mask.causal or padded):
        words.append("cu_seq_lens_q beside a mask with padding, or one that is not causal")
    if any(kwargs.get(key) is not None for key in PAGED):
        words.append("a paged cache")
    others = ("position_bias", "indices", "block_indices", "sinks")
    return words + [key for key in others if kwargs.get(key) is not None]


def cast_together(q, k, v):
    """Casts to autocast's dtype, as F.scaled_dot_product_attention does. Without autocast, to that
    of v, a product with weights: a norm or rotation in float32 may have promoted q or k.
    """
    device = q.device.type
    dtype = v.dtype
    if checks.autocasts(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _attentions_are_collected(collector: Any) -> bool:
    """Whether output_attentions is set for the model. Not all models pass it to their layers:
    transformers collects layers' outputs by hooks, and drops None.
    """
    if torch.compiler.is_compiling():
        # A ContextVar cannot be traced; transformers also has a global variable.
        collected = getattr(collector, "global_var", None)
    else:
        collected = collector.get()
    return collected is not None and any("attentions" in key for key in collected)


def attend_rows(q, k, v, mask, position_ids, name, options):
    """Attention of rows as one packed sequence, without their padding."""
    if torch.compiler.is_compiling():
        return attend_traced_rows(q, k, v, mask.kept, position_ids, options)
    layout = mask.layout(position_ids, q.shape[0], q.shape[2])
    if layout is None:
        return attention(q, k, v, **options)
    if layout.holes and options["window"] is not None:
        raise hole_in_window(name)
    if layout.cu_seqlens.numel() == 1:  # only padding
        return (q * 0).sum(-1, keepdim=True).expand(*q.shape[:3], v.shape[3])
    return attend_packed(q, k, v, layout.index, layout.cu_seqlens, layout.longest, options)


def attend_traced_rows(q, k, v, kept, position_ids, options):
    """`attend_rows` with shapes that do not depend on values.

    Padding moves behind all other tokens, each a document of its own. cu_seqlens has as many
    entries as there are tokens; the last ones equal the end.
    """
    B, _, S, _ = q.shape
    if position_ids is not None and position_ids.dim() != 2:
        position_ids = None
    if kept is None and position_ids is None:
        return attention(q, k, v, **options)
    if options["window"] is not None and kept is not None and not is_numbered(kept):
        raise not_traced("no padding where there is a window")
    options = {
        **options,
        "implementation": _off_host(options["implementation"], q.device.type, q.dtype),
    }
    there = None
    place = torch.arange(B * S, device=q.device)
    if kept is not None and not is_numbered(kept):
        there, place = torch.sort(kept.flatten(), descending=True, stable=True)
    step, within = place.diff(), (place // max(S, 1)).diff() == 0
    if there is not None:
        within = within & there[1:]
    if is_numbered(kept):
        within = within & (kept.flatten().diff() == 0)
    if position_ids is not None:
        up = position_ids.expand(B, S).flatten()[place].diff()
        within = within & ((up == 1) | (up == step))
    at = torch.arange(1, B * S + 1, device=q.device)
    ends = torch.where(F.pad(within, (0, 1)), B * S, at).sort()[0]
    out = attend_packed(
        q, k, v, None if there is None else place, F.pad(ends, (1, 0)).to(torch.int32), S, options
    )
    return out if kept is None or is_numbered(kept) else out * kept[:, None, :, None]


@torch_names.constant
def _off_host(implementation: str, device_type: str, dtype: torch.dtype) -> str:
    """An implementation that does not read cu_seqlens on the host; compiled eager does not."""
    if implementation != "auto":
        return implementation
    usable = ATTENTION.usable(device_type, dtype)
    return next(
        i.name
        for i in ATTENTION.implementations
        if device_type in i.devices and i.name in usable and (i.name == "eager" or not i.reads_host)
    )


def attend_packed(q, k, v, index, cu, longest, options):
    """Attention of the tokens `index` (None: all) of the concatenated rows, in the documents of
    `cu`. Other tokens' output is 0.
    """
    B, H, S, _ = q.shape
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
        out = out.new_zeros(B * S, H, v.shape[3]).index_copy(0, index, out)
    return out.unflatten(0, (B, S)).transpose(1, 2)


def attend_cache(q, k, v, kept, name, options):
    """Attention with cached keys, or of queries that see all keys; one row at a time if some keys
    are padding.
    """
    if kept is None:
        return attention(q, k, v, **options)
    if torch.compiler.is_compiling():
        raise not_traced("no padding but that of causal attention without a cache")
    kept = kept.bool()
    if options["causal"] and not bool(kept[:, -q.shape[2] :].all()):
        raise NotComputed(
            f'attn_implementation="{name}" takes padding on the left of cached keys only '
            '(others: "sdpa", "eager")'
        )
    if options["window"] is not None and bool((kept[:, :-1] & ~kept[:, 1:]).any()):
        raise hole_in_window(name)
    rows = []
    for b in range(q.shape[0]):
        if "dropout_p" in options:
            options = {**options, "offset": b}  # another mask for each row
        row = (k[b : b + 1, :, kept[b]], v[b : b + 1, :, kept[b]])
        rows.append(attention(q[b : b + 1], *row, **options))
    return torch.cat(rows)
