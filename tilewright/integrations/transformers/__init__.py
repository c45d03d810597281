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

from tilewright import platform
from tilewright.integrations.transformers.attention import attention_entry
from tilewright.integrations.transformers.errors import NAME
from tilewright.integrations.transformers.experts import experts_entry
from tilewright.integrations.transformers.masks import make_mask
from tilewright.nn.experts import why_not
from tilewright.ops.attention import ATTENTION
from tilewright.ops.moe import MOE_MLP
from tilewright.registry import ImplementationUnavailable

__all__ = ["register", "why_not"]


OLDEST = (5, 7)  # of transformers


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
    interface = _experts_interface()
    from transformers import AttentionInterface, AttentionMaskInterface

    entries = {NAME: implementation, **{f"{NAME}:{name}": name for name in MOE_MLP.names()}}
    for name, chosen in entries.items():
        interface.register(name, experts_entry(name, chosen))
    # transformers takes "flash" anywhere in a name for a request of its own: fa3 and fa4 stand for
    # these.
    entries_of_attention = {
        f"{NAME}:{name}": i.name
        for i in ATTENTION.implementations
        for name in (i.name, *i.aliases)
        if "flash" not in name
    }
    for name, chosen in {NAME: attn_implementation, **entries_of_attention}.items():
        AttentionInterface.register(name, attention_entry(name, chosen))
        AttentionMaskInterface.register(name, make_mask)
    return tuple(entries)


def _experts_interface():
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
