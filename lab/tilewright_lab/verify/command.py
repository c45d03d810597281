"""The command `tilewright verify`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
from torch import nn

from tilewright.core import platform
from tilewright.core.registry import ImplementationUnavailable
from tilewright_lab.check_layout.ranks import load_function
from tilewright_lab.check_layout.step import Refused
from tilewright_lab.verify.page import check_folder, save
from tilewright_lab.verify.reference import Unverifiable, check_path, first_line, read_config, said
from tilewright_lab.verify.scenes import LEAST_TOKENS

DTYPES = ("float32", "bfloat16", "float16")


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="tilewright verify",
        description="Compares every module of a transformers model, its gradients, masks, cache "
        "and loss with their definition in float64. Exits with 1 if one breaks the contract.",
    )
    p.add_argument(
        "model",
        metavar="MODEL",
        help="a folder, a name on the Hub, or module:function or path/file.py:function, which is "
        "called without arguments and returns a model, or a model and a batch",
    )
    p.add_argument("--accelerate", action="store_true", help="patch it by this library first")
    p.add_argument("--dtype", choices=DTYPES, help="of its parameters; default: as it is stored")
    p.add_argument("--tokens", type=int, default=48, help="the length of the random rows (48)")
    p.add_argument(
        "--lengths",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[],
        metavar="N,..",
        help="further rows of random tokens of these lengths, as those that generation reaches",
    )
    p.add_argument("--config", metavar="FOLDER", help="with the configuration that is right")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--all", action="store_true", help="a line for every module")
    p.add_argument("--out", metavar="FOLDER", help="write verify.html with pictures into it")
    return p


@platform.command
def main(arguments: list[str]) -> int:
    """Returns 0, 1 for a break, 2 for a model that cannot be verified."""
    args = _parser().parse_args(arguments)
    try:
        verification = _verified(args)
        print(verification.table(args.all))
        if args.out:
            print(f"\nwritten: {save(verification, args.out)}")
    except (Unverifiable, ImplementationUnavailable, OSError, MemoryError) as error:
        print(f"tilewright verify: {first_line(error)}", file=sys.stderr)
        return 2
    return 0 if verification.ok else 1


def _verified(args: argparse.Namespace):
    for package in ("transformers", *(["matplotlib"] if args.out else [])):
        if reason := platform.no_module(package):
            raise ImplementationUnavailable(reason)
    from tilewright_lab.verify.verify import verify

    # Before what takes minutes.
    if args.tokens < LEAST_TOKENS:
        raise Unverifiable(f"--tokens must be {LEAST_TOKENS} or more, got {args.tokens}")
    if args.lengths and min(args.lengths) < LEAST_TOKENS:
        raise Unverifiable(f"--lengths must be {LEAST_TOKENS} or more, got {min(args.lengths)}")
    if args.out:
        check_folder(args.out)
    config = None if args.config is None else read_config(args.config)
    model, batch = load(args.model, args.dtype, args.device)
    if args.accelerate:
        from tilewright.integrations.transformers import accelerate

        print(accelerate(model, quiet=True), end="\n\n")
    return verify(model, batch, config=config, tokens=args.tokens, lengths=args.lengths)


def load(name: str, dtype: str | None, device: str) -> tuple[nn.Module, Any]:
    """A model, and a batch if its function returns one.

    Raises:
        Unverifiable: It cannot be built; the message says why.
    """
    if ":" in name and not os.path.exists(name):
        model, batch = _called(name)
        if dtype is not None:
            for p in model.parameters():  # and no buffers: frequencies would be rounded
                if p.is_floating_point():
                    p.data = p.data.to(getattr(torch, dtype))
    else:
        model, batch = _pretrained(name, dtype), None
    try:
        return model.to(device), batch
    except (RuntimeError, AssertionError) as error:  # the latter: PyTorch built without CUDA
        raise Unverifiable(f"{name} cannot be moved to {device}: {first_line(error)}") from error


def _called(name: str) -> tuple[nn.Module, Any]:
    try:
        function = load_function(name)
    except Refused as error:
        raise Unverifiable(str(error)) from error
    try:
        returned = function()
    except (Exception, SystemExit) as error:  # anyone's code
        raise Unverifiable(f"{name} cannot be called: {said(error)}") from error
    model, batch = (
        returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    )
    if not isinstance(model, nn.Module):
        raise Unverifiable(
            f"{name} must return a torch.nn.Module, or one and a batch; it returned "
            f"{type(model).__name__}"
        )
    return model, batch


def _pretrained(name: str, dtype: str | None) -> nn.Module:
    from transformers import AutoModelForCausalLM

    file = f"{name.removesuffix('.py')}.py"
    if os.path.isfile(file) and not os.path.isdir(name):
        raise Unverifiable(f"{name} names no function: give {file}:FUNCTION")
    check_path(name)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype="auto" if dtype is None else getattr(torch, dtype),
            trust_remote_code=False,  # else transformers asks the terminal
            output_loading_info=True,
        )
        model, report = loaded
    except Exception as error:  # of transformers' loaders, of any class
        text = said(error)
        if "custom code" in text or "trust_remote_code" in text:
            text = "its class is code beside its weights; load it in a function, by module:function"
        raise Unverifiable(f"{name!r} cannot be loaded: {text}") from error
    if missing := sorted(report["missing_keys"]):
        raise Unverifiable(
            f"{name!r} has no weights for {missing[0]}"
            f"{f' and {len(missing) - 1} more' if missing[1:] else ''}, which would be random"
        )
    return model
