"""Measures rollouts beside what they are made of, on a CPU or a GPU.

    python -m bench rollout --out DIR [--quick] [--vllm PYTHON]

    sample    tokens per second of prompts that are sampled at once, beside transformers' generate,
              of one prompt after the other and of all in one padded batch
    switch    the same tokens of two adapters in turns, beside one adapter's
    publish   after a step, from a request to save weights to the first token that is sampled with
              them, beside the save alone, by a server and its sampler
    sync      bytes per second of all weights, in buckets over gloo to a sampler's process, beside
              the same tensors, and beside as many bytes in buckets, broadcast to a process that
              does nothing but receive; and what the sender's memory grows by where each tensor is
              gathered first: a tensor and a bucket
    vllm      with the Python of an environment with vLLM: the same tokens by the sampler's process
              and by vLLM's, over HTTP, with one thread each (vLLM without compilation)

Each is measured in turns with what it is compared with; the raw file has every round.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.server import FULL as SERVED
from bench.server import NEEDED as BY_SERVER
from bench.server import in_rows
from tilewright.core import platform

NEEDED = (*BY_SERVER, "httpx")


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the measures are.

    shape: of the model, by transformers' names.   prompt: tokens of each.   new: of what follows
    each prompt.   rounds: of each measure.   sent: the shape of the model that is sent, beside
    `shape`.   bucket: bytes.
    """

    shape: dict[str, int]
    prompt: int
    new: tuple[int, ...]
    rounds: int
    sent: dict[str, int]
    bucket: int


# 16 requests of 8 to 256 new tokens.
FULL = Size(
    SERVED.shape,
    prompt=32,
    new=tuple(8 + round(i * 248 / 15) for i in range(16)),
    rounds=5,
    sent={"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "head_dim": 64},
    bucket=64 << 20,
)
QUICK = Size({"max_position_embeddings": 64}, 4, (2, 5), 1, {}, 1 << 16)


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
        datum = {"model_input": {"chunks": chunks}, "loss_fn_inputs": {"target_tokens": [2, 3, 4]}}
        learn = {"data": [datum], "loss_fn": "cross_entropy"}
        for i in range(size.rounds + 1):  # the first starts the sampler
            own = {"model_id": model, "seq_id": 3 * i + 1, "forward_backward_input": learn}
            client.result(client.post("forward_backward", own))
            step = {"model_id": model, "seq_id": 3 * i + 2, "adam_params": {"learning_rate": 1e-4}}
            client.result(client.post("optim_step", step))
            begin = time.perf_counter()
            save = {"model_id": model, "seq_id": 3 * i + 3, "sampling_session_seq_id": i}
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


# A process that receives the broadcasts of a group, and nothing else.
RECEIVES = """
import sys, torch
from tilewright.core.groups import Apart
address, rounds, *sizes = sys.argv[1:]
group = Apart(address, 1, 2, "plain", "gloo")
group.join()
whole = torch.empty(sum(map(int, sizes)))
for _ in range(int(rounds)):
    for tensor in whole.split([*map(int, sizes)]):
        group.broadcast(tensor)
"""


@contextlib.contextmanager
def sampler(model: pathlib.Path, threads: int | None = None) -> Iterator[str]:
    """The address of a sampler in a process of its own."""
    command = [sys.executable, "-m", "tilewright.sampler", "--model", str(model), "--port", "0"]
    own = {} if threads is None else {"OMP_NUM_THREADS": f"{threads}"}
    process = subprocess.Popen(
        [*command, "--dtype", "float32"],
        stdout=subprocess.PIPE,
        text=True,
        env=platform.with_variables(**own),
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def broadcasts(tensors: Sequence[Any], rounds: int) -> Iterator[Callable[[], int]]:
    """Sends float32 tensors to a process that does nothing but receive them; so often, and once
    more before it is measured.
    """
    from tilewright.core.groups import Apart

    sizes = [t.numel() for t in tensors]
    group = Apart("127.0.0.1:0", 0, 2, "plain", "gloo")
    about = [f"127.0.0.1:{group.port}", f"{rounds + 1}", *map(str, sizes)]
    receiver = subprocess.Popen([sys.executable, "-c", RECEIVES, *about])
    try:
        group.join()

        def send() -> int:
            for tensor in tensors:
                group.broadcast(tensor)
            return 4 * sum(sizes)

        yield send
    finally:
        receiver.wait()


def synced(size: Size, folder: pathlib.Path) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    from bench.host_memory import peak_mib
    from tilewright.server import sending
    from tilewright_lab.server_torture.client import write_model

    base = write_model(folder / "sent", **{**size.shape, **size.sent})
    tensors = load_file(base / "model.safetensors")
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    with contextlib.ExitStack() as ended:
        url = ended.enter_context(sampler(base))
        target = sending.Target("embedded", url, "g", "gloo", "127.0.0.1", 0, size.bucket, 1)
        channel = sending.opened(target)
        ended.callback(channel.close)

        def sync() -> int:
            return sending.send(target, iter(tensors.items()), channel).bytes

        def gathered() -> int:
            """As of a model that is sharded: each is a tensor of its own."""
            given = ((name, t.clone()) for name, t in tensors.items())
            return sending.send(target, given, channel).bytes

        flat, rounds = torch.zeros(total // 4), 4 * size.rounds  # a tenth of a second each
        buckets = flat.split(size.bucket // 4)
        measures = {
            "sync": sync,
            "broadcast": ended.enter_context(broadcasts([*tensors.values()], rounds)),
            "buckets": ended.enter_context(broadcasts(buckets, rounds)),
        }
        rates = in_turns(measures, rounds)
        grown = peak_mib(gathered)
    largest = max(t.numel() * t.element_size() for t in tensors.values())
    return {
        "measure": "sync",
        "bytes": total,
        "bucket_bytes": size.bucket,
        "largest_tensor_bytes": largest,
        **{f"{n}_gb_per_s": statistics.median(own) / 1e9 for n, own in rates.items()},
        **{
            f"of_{n}": statistics.median(
                a / b for a, b in zip(rates["sync"], rates[n], strict=True)
            )
            for n in ("broadcast", "buckets")
        },
        "peak_mib": grown,
        "samples_bytes_per_s": rates,
    }


def beside_vllm(size: Size, base: pathlib.Path, folder: pathlib.Path, python: str) -> Any:
    import torch

    from tilewright.server.engines import Embedded, Engine, Vllm, Wanted
    from tilewright.server.inference import client_of
    from tilewright_lab.vllm import vllm

    new, draw = size.new, torch.Generator().manual_seed(0)
    vocabulary = size.shape.get("vocab_size", 97)
    prompts = torch.randint(1, vocabulary, (len(new), size.prompt), generator=draw).tolist()

    def sampled_by(kind: type[Engine], url: str) -> int:
        async def all_of_them() -> int:
            async with client_of(url) as client:
                engine = kind(client)
                await engine.facts()
                each = [
                    engine.generate(Wanted(f"{i}", p, 1, n, 1.0, -1, 1.0, i, [], [], 0), None)
                    for i, (p, n) in enumerate(zip(prompts, new, strict=True))
                ]
                return sum(len(one.tokens) for [one] in await asyncio.gather(*each))

        return asyncio.run(all_of_them())

    longest = size.prompt + max(new)
    with (
        sampler(base, threads=1) as own,
        vllm(python, base, folder, threads=1, max_model_len=longest) as theirs,
    ):
        rates = in_turns(
            {
                "embedded": functools.partial(sampled_by, Embedded, own),
                "vllm": functools.partial(sampled_by, Vllm, theirs),
            },
            size.rounds,
        )
    return row("vllm", rates, requests=len(new), new_tokens=sum(new))


def measured(size: Size, folder: pathlib.Path, vllm: str | None = None) -> Iterator[dict[str, Any]]:
    from tilewright_lab.server_torture.client import write_model

    base = write_model(folder / "model", **size.shape)
    yield from sampled(size, base, folder)
    yield published(size, base, folder)
    yield synced(size, folder)
    if vllm is not None:
        yield beside_vllm(size, base, folder, vllm)


def main(argv: Sequence[str]) -> int:
    vllm = "the Python of an environment with vLLM, which is measured, too"
    return in_rows("rollout", __doc__, argv, NEEDED, (FULL, QUICK), measured, vllm=vllm)
