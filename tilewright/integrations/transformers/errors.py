"""The name that transformers knows this library by, and what it is not asked to compute."""

from __future__ import annotations

from tilewright.registry import ImplementationUnavailable

NAME = "tilewright"


def computed_mask(what):
    return ImplementationUnavailable(
        f'attn_implementation="{NAME}" builds no mask of queries x keys, and this model '
        f'computes with its mask ({what}) (others: "sdpa", "eager")'
    )


def not_traced(what):
    return ImplementationUnavailable(
        f'attn_implementation="{NAME}" under torch.compile(fullgraph=True) takes {what}, '
        "and lengths that are no tensors; without fullgraph it takes more"
    )


def hole_in_window(name):
    return ImplementationUnavailable(
        f'attn_implementation="{name}" takes no mask with holes in a document where there '
        'is a window, which would reach over them (others: "sdpa", "eager")'
    )
