"""The name of this library in transformers' tables, and errors for what is unsupported."""

from __future__ import annotations

from tilewright.registry import ImplementationUnavailable

NAME = "tilewright"


def computed_mask(what: str) -> ImplementationUnavailable:
    """For a model that computes with its mask."""
    return ImplementationUnavailable(
        f'attn_implementation="{NAME}" builds no mask of queries x keys, and this model '
        f'computes with its mask ({what}) (others: "sdpa", "eager")'
    )


def not_traced(what: str) -> ImplementationUnavailable:
    """For what is supported without torch.compile only; `what` is supported with it."""
    return ImplementationUnavailable(
        f'attn_implementation="{NAME}" under torch.compile(fullgraph=True) takes {what}, '
        "and lengths that are no tensors; without fullgraph it takes more"
    )


def hole_in_window(name: str) -> ImplementationUnavailable:
    """For padding within a document where there is a window."""
    return ImplementationUnavailable(
        f'attn_implementation="{name}" takes no mask with holes in a document where there '
        'is a window, which would reach over them (others: "sdpa", "eager")'
    )
