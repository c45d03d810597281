"""Argument types and checks shared by the parsers of the bench's commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection

import torch

from tilewright.core.registry import instead_of


def at_least(least: float, kind: type) -> Callable[[str], int | float]:
    """An argparse type: a number of this kind, at least `least`."""

    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not value >= least:
            expected = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(
                f"must be {expected} of at least {least}, got {text!r}"
            )
        return value

    return parse


def names(known: Collection[str] | None = None) -> Callable[[str], list[str]]:
    """An argparse type: comma-separated known names (None: checked later, see `chosen`)."""

    def parse(text: str) -> list[str]:
        parsed = [n.strip() for n in text.split(",") if n.strip()]
        for name in parsed:
            if known is not None and name not in known:
                raise argparse.ArgumentTypeError(f"unknown {name!r}{instead_of(name, known)}")
        return parsed

    return parse


def chosen(
    parser: argparse.ArgumentParser, option: str, values: list[str] | None, known: Collection[str]
) -> list[str]:
    """The given names, or all known ones; exits with an error for an unknown name."""
    for name in values or ():
        if name not in known:
            parser.error(f"argument {option}: unknown {name!r}{instead_of(name, known)}")
    return list(known) if values is None else values


def has_device(parser: argparse.ArgumentParser, device: str) -> None:
    """Exits with an error if CUDA was requested and is unavailable."""
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: 'cuda' was asked for, but there is no CUDA device")
