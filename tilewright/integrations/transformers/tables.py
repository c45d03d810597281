"""This library's entries in transformers' tables of attention, masks and experts."""

from __future__ import annotations

import functools

from tilewright.integrations.transformers.attention import attention_entry, attention_or_other
from tilewright.integrations.transformers.errors import NAME
from tilewright.integrations.transformers.experts import experts_entry
from tilewright.integrations.transformers.masks import make_mask
from tilewright.integrations.transformers.versions import part_of, require_transformers
from tilewright.ops.attention.attention import ATTENTION
from tilewright.ops.moe.moe import MOE_MLP

# What computes attention under `accelerate` where this library does not: what the model had before.
# transformers reserves "flash" anywhere in a name.
OTHERS = {"eager", "sdpa", "flex_attention", *(f"flash_attention_{n}" for n in (2, 3, 4))}


def with_other(other: str) -> str:
    """The name in transformers' tables of attention by this library, or by `other`."""
    return f"{NAME}:or_{other.replace('flash_attention_', 'fa')}"


def register(implementation: str = "auto", attn_implementation: str = "auto") -> tuple[str, ...]:
    """Adds "tilewright" to transformers' values of `experts_implementation` and
    `attn_implementation`.

    They are valid in `from_pretrained`, `from_config`, `set_experts_implementation` and
    `set_attn_implementation`, for the whole process; registering again replaces them.

    Attention follows the mask that transformers makes, whatever the layer's own attributes: causal
    or not, a window, packed documents, padding. It runs on the packed tokens that are not padding:
    no S x S mask is built, padding is never read, and padding's output is 0. A layer without a mask
    follows `is_causal` and `sliding_window`. Packed documents come from `cu_seq_lens_q`, or from
    position ids that are not consecutive (with padding between tokens, counted or not), as in
    transformers' flash attention; its eager attention reads them without a mask and without a cache
    only, and so do layers here that get no mask (Persimmon). Softcaps and sinks are the layer's.
    Under autocast the dtype is autocast's.

    Experts compute in the weights' dtype, or in autocast's (which copies the weights in each call,
    as for a linear layer); the result has the dtype of the hidden states. Under transformers'
    expert parallelism, token slots of experts on other ranks add nothing.

    A call raises ImplementationUnavailable for unsupported requests, which transformers does not
    check earlier: a layer that moe_mlp cannot compute (`why_not`) and a named implementation that
    cannot run here; dropout in compiled code or by an implementation that has none (else its mask
    follows from a number of the CPU's default generator for each call); returned attention weights,
    four-dimensional masks, custom mask functions, a model that computes with its mask, more keys
    than the mask has, chunks and non-causal windows where keys reach beyond one, and a window where
    a mask has holes within a document.

    Args:
        implementation: The experts' implementation for "tilewright": one of moe_mlp's, or "auto".
            Each also gets its own entry: "tilewright:triton", "tilewright:cpp", "tilewright:eager"
            and so on.
        attn_implementation: The same for attention. Its entries are "tilewright:triton",
            "tilewright:eager", "tilewright:native", "tilewright:sdpa", and
            "tilewright:fa2" to "tilewright:fa4": transformers reserves "flash" anywhere in a name,
            so there is no "tilewright:flash_attention_3". transformers rejects "sdpa" for models
            without an sdpa attention; "tilewright:torch" is the same for all.

    Returns:
        The names added for experts, "tilewright" first.

    Raises:
        ImplementationUnavailable: transformers is missing or too old.
        ValueError: A name does not exist.
        TypeError: A name is not a str.

    Example:
        >>> from tilewright.integrations.transformers import register
        >>> register()[:2]
        ('tilewright', 'tilewright:gluon')
    """
    for op, name in ((MOE_MLP, implementation), (ATTENTION, attn_implementation)):
        if name != "auto":
            op.implementation(name)
    require_transformers()
    attention, masks, experts = _tables()
    collector = part_of("utils.output_capturing", "_active_collector")
    for name in ("causal_mask_function", "bidirectional_mask_function"):  # by which masks are read
        part_of("masking_utils", name)
    entries = {NAME: implementation, **{f"{NAME}:{name}": name for name in MOE_MLP.names()}}
    for name, chosen in entries.items():
        experts.register(name, experts_entry(name, chosen))
    # transformers reserves "flash" anywhere in a name: fa2 to fa4 abbreviate it.
    attention_entries = {
        f"{NAME}:{name}": i.name
        for i in ATTENTION.implementations
        for name in (i.name, *i.aliases)
        if "flash" not in name
    }
    for name, chosen in {NAME: attn_implementation, **attention_entries}.items():
        attention.register(name, attention_entry(name, chosen, collector))
        masks.register(name, make_mask)
    for other in OTHERS & {"eager", *attention().valid_keys()} & set(masks().valid_keys()):
        name, flash = with_other(other), other.startswith("flash")
        ours = attention_entry(NAME, attn_implementation, collector, by_positions=flash)
        attention.register(name, attention_or_other(ours, other, attention()))
        make = functools.partial(make_mask, other=masks()[other], additive=other == "eager")
        masks.register(name, make)
    return tuple(entries)


def _tables() -> tuple:
    """transformers' tables of attention, masks and experts."""
    return (
        part_of("modeling_utils", "AttentionInterface"),
        part_of("masking_utils", "AttentionMaskInterface"),
        part_of("integrations.moe", "ExpertsInterface"),
    )


def register_once() -> None:
    """`register`, unless that happened before, perhaps with other arguments."""
    attention, _, experts = _tables()
    if any(NAME not in table().valid_keys() for table in (attention, experts)):
        register()
