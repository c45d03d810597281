"""Samples of a model over HTTP, on loopback: python -m tilewright.sampler --model PATH."""

from __future__ import annotations

import argparse
import pathlib
import socket
import sys
from typing import Any

import torch
import uvicorn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tilewright.core.follow import follow
from tilewright.sampler.app import Served, application
from tilewright.sampler.engine import DTYPES, Engine

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tilewright.sampler", description=__doc__)
    parser.add_argument("--model", required=True, help="a folder, or a name on the Hub")
    parser.add_argument("--tokenizer", help="where it is; default: the model's, if it has one")
    parser.add_argument(
        "--dtype", choices=(*DTYPES, "auto"), default="auto", help="the weights' (default: stored)"
    )
    parser.add_argument("--device", default=None, help="default: cuda if there is one, else cpu")
    parser.add_argument("--host", choices=LOOPBACK, default=LOOPBACK[0], help="loopback alone")
    parser.add_argument("--port", type=int, default=30000, help="0: a free one")
    parser.add_argument("--fd", type=int, help="a socket that listens already, in place of a port")
    parser.add_argument(
        "--cache-tokens", type=int, default=32768, help="tokens that keys and values are kept of"
    )
    return parser


def has_words(path: str) -> bool:
    """Whether there is a tokenizer: without its files transformers makes an empty one."""
    folder = pathlib.Path(path)
    return not folder.is_dir() or any(folder.glob("*token*"))


def block_of(path: str) -> tuple[int, int] | None:
    """Rows and columns of the blocks of FP8 that weights are stored in; None: they are not."""
    given = getattr(AutoConfig.from_pretrained(path), "quantization_config", None) or {}
    if given.get("quant_method") != "fp8":
        return None
    rows, columns = given.get("weight_block_size") or (128, 128)
    return rows, columns


def served(path: str, tokenizer: str | None, dtype: str, device: str | None, tokens: int) -> Served:
    """Reads a model."""
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    block = block_of(path)  # before transformers drops it
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES.get(dtype, dtype))
    model.to(chosen)
    where = tokenizer or path
    words = AutoTokenizer.from_pretrained(where) if has_words(where) else None
    ends = model.generation_config.eos_token_id
    ends = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
    text = None if words is None else words.decode
    engine = Engine(model, path, tokens=tokens, text=text, block=block)
    return Served(engine, words, ends, path)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    listening = None
    if args.fd is not None:
        follow()
        listening = socket.socket(fileno=args.fd)
    made = served(args.model, args.tokenizer, args.dtype, args.device, args.cache_tokens)
    if listening is None:
        # By its number: asyncio sets TCP_NODELAY on sockets that know their protocol alone, and
        # without it each answer waits for the client's delayed acknowledgment, 40 ms.
        listening = socket.socket(fileno=socket.create_server((args.host, args.port)).detach())
        print(f"http://{args.host}:{listening.getsockname()[1]}", flush=True)
    config = uvicorn.Config(application(made), log_level="warning", timeout_graceful_shutdown=10)
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        made.engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
