"""Measures rollouts beside what they are made of, on a CPU or a GPU.

    python -m bench rollout --out DIR [--quick]

    sample    tokens per second of prompts that are sampled at once, beside transformers' generate,
              of one prompt after the other and of all in one padded batch
    switch    the same tokens of two adapters in turns, beside one adapter's
    publish   from a request to save weights to the first token that is sampled with them, beside
              the save alone, by a server and its sampler

Each is measured in turns with what it is compared with; the raw file has every round.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.server import FULL as SERVED
from bench.server import NEEDED as BY_SERVER
from bench.server import in_rows

NEEDED = (*BY_SERVER, "httpx")


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the measures are.

    shape: of the model, by transformers' names.   prompt: tokens of each.   new: of what follows
    each prompt.   rounds: of each measure.
    """

    shape: dict[str, int]
    prompt: int
    new: tuple[int, ...]
    rounds: int


# 16 requests of 8 to 256 new tokens.
FULL = Size(SERVED.shape, 32, tuple(8 + round(i * 248 / 15) for i in range(16)), 5)
QUICK = Size({"max_position_embeddings": 64}, 4, (2, 5), 1)


def in_turns(measures: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each, which return tokens; once before without being measured."""
    rates: dict[str, list[float]] = {name: [] for name in measures}
    for i in range(rounds + 1):
        for name in [*measures] if i % 2 else reversed(measures):
            begin = time.perf_counter()
            tokens = measures[name]()
            if i:
                rates[name].append(tokens / (time.perf_counter() - begin))
    return rates


def row(name: str, rates: dict[str, list[float]], **more: Any) -> dict[str, Any]:
    """The medians, and those of each round's ratio to the first."""
    first, *others = rates
    medians = {f"{n}_tokens_per_s": statistics.median(r) for n, r in rates.items()}
    ratios = {
        f"times_{n}": statistics.median(a / b for a, b in zip(rates[first], rates[n], strict=True))
        for n in others
    }
    return {"measure": name, **more, **medians, **ratios, "samples_tokens_per_s": rates}


def generated(model: Any, prompts: Any, new: Sequence[int], *, together: bool) -> int:
    """The tokens that were asked for, by transformers' generate: of one prompt after the other, or
    of all in one batch, which goes on until the longest has ended.
    """
    import torch

    each = [(prompts, max(new))] if together else [*zip(prompts.split(1), new, strict=True)]
    for rows, most in each:
        given = {"attention_mask": torch.ones_like(rows), "do_sample": True, "pad_token_id": 0}
        model.generate(rows, **given, max_new_tokens=most, eos_token_id=None)
    return sum(new)


def sampled(size: Size, base: pathlib.Path, folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """sample and switch, in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    from tilewright.nn import add_lora, save_adapter
    from tilewright.sampler.asked import Asked
    from tilewright.sampler.engine import BASE, Engine

    new, draw = size.new, torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    prompts = torch.randint(1, model.config.vocab_size, (len(new), size.prompt), generator=draw)
    engine = Engine(model, str(base), tokens=4 * sum(new) + 16 * size.prompt)
    each = [
        Asked(p, n, sample=i) for i, (p, n) in enumerate(zip(prompts.tolist(), new, strict=True))
    ]

    def embedded(*names: str) -> int:
        futures = []
        for i, asked in enumerate(each):
            futures += engine.submit(names[i % len(names)], [asked])
        return sum(len(future.result().tokens) for future in futures)

    about = {"requests": len(new), "new_tokens": sum(new)}
    by_generate = functools.partial(generated, model, prompts, new)
    try:
        rates = in_turns(
            {
                "embedded": functools.partial(embedded, BASE),
                "one_by_one": functools.partial(by_generate, together=False),
                "one_batch": functools.partial(by_generate, together=True),
            },
            size.rounds,
        )
        yield row("sample", rates, **about)
        for name in ("a", "b"):
            other = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            add_lora(other, rank=8)
            save_adapter(other, folder / name)
            engine.load(name, folder / name)
        rates = in_turns(
            {
                "two_adapters": functools.partial(embedded, "a", "b"),
                "one_adapter": functools.partial(embedded, "a"),
            },
            size.rounds,
        )
        yield row("switch", rates, **about)
    finally:
        engine.close()


def published(size: Size, base: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    from tilewright_lab.server_torture.client import Server, write_server

    file = write_server(folder / "served", base, {"sample_packing_sequence_len": 64})
    saved, first = [], []
    with Server(file) as server, server.client() as client:
        session = client.post("create_session", {}).value["session_id"]
        created = {"session_id": session, "model_seq_id": 0, "base_model": str(base)}
        model = client.result(client.post("create_model", created)).value["model_id"]
        chunks = [{"type": "encoded_text", "tokens": [1, 2, 3]}]
        for i in range(size.rounds + 1):  # the first starts the sampler
            begin = time.perf_counter()
            save = {"model_id": model, "seq_id": i + 1, "sampling_session_seq_id": i}
            answer = client.result(client.post("save_weights_for_sampler", save)).value
            between = time.perf_counter()
            asked = {"sampling_session_id": answer["sampling_session_id"], "seq_id": i}
            asked |= {"prompt": {"chunks": chunks}, "sampling_params": {"max_tokens": 2}}
            sequences = client.result(client.post("asample", asked)).value["sequences"]
            if not sequences[0]["tokens"]:
                raise RuntimeError("no token was sampled")
            if i:
                saved.append(between - begin)
                first.append(time.perf_counter() - begin)
    return {
        "measure": "publish",
        "saved_s": statistics.median(saved),
        "first_tokens_s": statistics.median(first),
        "samples_s": {"saved": saved, "first_tokens": first},
    }


def measured(size: Size, folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    from tilewright_lab.server_torture.client import write_model

    base = write_model(folder / "model", **size.shape)
    yield from sampled(size, base, folder)
    yield published(size, base, folder)


def main(argv: Sequence[str]) -> int:
    return in_rows("rollout", __doc__, argv, NEEDED, (FULL, QUICK), measured)
