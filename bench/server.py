"""A training server beside the engine that it serves, on a CPU.

    python -m bench server --out DIR [--quick]

Every measure is taken in turns with what it is compared with. Bodies are written beforehand, so
that seconds are from the first POST to the last result, as a client waits for them. Beside the
clock's seconds are the processor's, of all processes of the server, which other programs' load
changes less. --quick makes each measure small: for a test, not for its numbers.

    step           forward_backward and optim_step over HTTP, and by the same engine in this process
    empty          a forward pass of one token, or a request that drops gradients; and one fsync
    models         steps of many models in turns, and as many of one; bytes of a model
    wire           a large request in protobuf and in JSON, until it is accepted (no workers run)
    kill           from kill -9 of the workers to the next result
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import commands
from tilewright.bench import timing
from tilewright.core import platform

if TYPE_CHECKING:
    from tilewright_lab.server_torture.client import Client, Server

NEEDED = (*platform.EXTRAS["trainer"], "fastapi", "uvicorn", "zstandard", "google")
PAGE = 4096  # bytes that one fsync has to write
TICKS = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the measures are.

    shape: of the model, by transformers' names.   tokens: of a step.   document: tokens of each.
    rounds: of steps and of models.   requests: empty ones.   models: in turns.
    tokens_of_a_model: of each of their steps.   wire, wire_rounds: tokens, and how often.
    """

    shape: dict[str, int]
    tokens: int
    document: int
    rounds: int
    requests: int
    models: int
    tokens_of_a_model: int
    wire: int
    wire_rounds: int
    kills: int


# A step of FULL takes about a second on a core, so that what HTTP adds, milliseconds whatever the
# model's size, can be seen and is not the larger part of it.
FULL = Size(
    {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
    },
    tokens=8192,
    document=512,
    rounds=9,
    requests=150,
    models=64,
    tokens_of_a_model=256,
    wire=1_000_000,
    wire_rounds=3,
    kills=3,
)
QUICK = Size({}, 64, 32, 1, 4, 3, 32, 2000, 1, 1)


# ---- processes of a server


def processor_seconds(pids: Sequence[int]) -> float:
    """What these processes have spent since they began, all threads."""
    total = 0
    for pid in pids:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])  # utime and stime
    return total / TICKS


def resident_bytes(pid: int) -> int:
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


# ---- requests


Document = tuple[list[int], list[int], list[float]]


def documents(tokens: int, length: int, vocabulary: int, seed: int = 0) -> list[Document]:
    """So many tokens, of documents of a length, each token with a target and the weight 1."""
    draw = np.random.default_rng(seed)
    lengths = [min(length, tokens - at) for at in range(0, tokens, length)]
    return [
        (
            draw.integers(0, vocabulary, n).tolist(),
            draw.integers(0, vocabulary, n).tolist(),
            [1.0] * n,
        )
        for n in lengths
    ]


class Trained:
    """A model of the first protocol on a server."""

    def __init__(self, client: Client, session: str, number: int, base: str):
        self.client, self.seq = client, 0
        body = {"session_id": session, "model_seq_id": number, "base_model": base}
        body["lora_config"] = {"rank": 8, "seed": number}
        client.result(client.post("create_model", body))
        self.name = f"{session}:train:{number}"

    def _numbered(self) -> dict[str, Any]:
        self.seq += 1
        return {"model_id": self.name, "seq_id": self.seq}

    def passes(self, each: Sequence[Document], kind: str = "forward_backward") -> tuple[str, Any]:
        """A request: its path and its body."""
        from tilewright_lab.server_torture.schedule import in_protobuf

        return kind, in_protobuf(self._numbered(), each, kind)

    def step(self) -> tuple[str, Any]:
        adam = {"learning_rate": 1e-4, "eps": 1e-8}
        return "optim_step", {**self._numbered(), "adam_params": adam}

    def abort(self) -> tuple[str, Any]:
        return "abort_gradient_epoch", self._numbered()


def answered(client: Client, requests: Sequence[tuple[str, Any]]) -> float:
    """Seconds until all have results: each is sent before any result is asked for."""
    begin = time.perf_counter()
    futures = [client.post(*request) for request in requests]
    answers = [client.result(future, protobuf=True) for future in futures]
    seconds = time.perf_counter() - begin
    for (path, _), answer in zip(requests, answers, strict=True):
        if answer.status != 200 or (not answer.protobuf and "error" in answer.value):
            raise RuntimeError(f"{path}: {answer.status} {answer.body!r:.300}")
    return seconds


class InProcess:
    """The engine of a server's file, in this process, with one model."""

    def __init__(self, file: pathlib.Path):
        from tilewright.server.bodies import Base, create_model
        from tilewright.server.fields import load
        from tilewright.server.worker import models_of
        from tilewright.trainer.parallel.mesh import join

        server, config = load(str(file), [])
        base, lora = str(config.model.model_path), config.lora
        self.models = models_of(server, config, join(config.train))
        body = {"session_id": "s", "model_seq_id": 0, "base_model": base}
        body["lora_config"] = {"rank": 8, "seed": 0}
        call = create_model(body, Base((base,), lora.lora_rank, lora.lora_alpha, 0))
        self.name = call.model
        self.run(call.kind, call.value)

    def run(self, kind: str, value: Any, arrays: dict[str, np.ndarray] | None = None) -> None:
        self.models.run(kind, self.name, value, arrays or {})

    def of_request(self, request: tuple[str, Any]) -> Callable[[], None]:
        """Does what a request asks for, as the log has it."""
        from tilewright.server import binary, bodies
        from tilewright.server.datums import Data

        kind, body = request
        if isinstance(body, bytes):
            given = binary.PassRequest(body, backward=True)
            arrays = Data.joined(given.data()).arrays()
            value = {"loss": given.loss, "options": given.options}
            return lambda: self.run(kind, value, arrays)
        value = bodies.optim_step(body, {}).value if kind == "optim_step" else None
        return lambda: self.run(kind, value)

    def bytes_of_a_model(self) -> int:
        """Adapters, and two moments of each of their numbers."""
        return 3 * self.models.trained_bytes


# ---- measures


def quantiles(name: str, seconds: Sequence[float]) -> dict[str, Any]:
    """In milliseconds."""
    at = {"p50": 0.5, "p99": 0.99}
    return {f"{name}_{q}_ms": 1e3 * timing.quantile(seconds, x) for q, x in at.items()}


def step(size: Size, model: Trained, engine: InProcess, launcher: int) -> Iterator[dict[str, Any]]:
    """The first round of each is left out."""
    from tilewright_lab.server_torture.client import processes

    each = documents(size.tokens, size.document, size.shape.get("vocab_size", 97))
    pids = [pid for each in processes(launcher).values() for pid in each]
    clock: dict[str, list[float]] = {"http": [], "in_process": []}
    processor: dict[str, list[float]] = {"http": [], "in_process": []}
    for i in range(size.rounds + 1):
        requests = [model.passes(each), model.step()]
        calls = [engine.of_request(request) for request in requests]
        for name in [*clock] if i % 2 else reversed(clock):
            before = processor_seconds(pids), time.process_time()
            if name == "http":
                seconds = answered(model.client, requests)
                spent = processor_seconds(pids) - before[0]
            else:
                begin = time.perf_counter()
                for call in calls:
                    call()
                seconds = time.perf_counter() - begin
                spent = time.process_time() - before[1]
            if i:
                clock[name].append(seconds)
                processor[name].append(spent)
    shares = [b / a for a, b in zip(*clock.values(), strict=True)]
    medians = {name: statistics.median(own) for name, own in clock.items()}
    spent = {name: statistics.median(own) for name, own in processor.items()}
    yield {
        "measure": "step",
        "tokens": size.tokens,
        "http_s": medians["http"],
        "in_process_s": medians["in_process"],
        "share": statistics.median(shares),
        "http_processor_s": spent["http"],
        "in_process_processor_s": spent["in_process"],
        "processor_share": spent["in_process"] / spent["http"] if spent["http"] else None,
        "above_ms": 1e3 * (medians["http"] - medians["in_process"]),
        "shares": shares,
        "samples_s": clock,
    }


def empty(
    size: Size, model: Trained, engine: InProcess, root: pathlib.Path
) -> Iterator[dict[str, Any]]:
    """An fsync is that of a file beside the log, to which a page was added."""
    one = [([1], [2], [1.0])]
    kinds = {
        "forward": lambda: model.passes(one, "forward"),
        "abort_gradient_epoch": model.abort,
    }
    for name, make in kinds.items():
        samples: dict[str, list[float]] = {"fsync": [], "request": [], "in_process": []}
        with (root / "beside").open("ab", buffering=0) as file:
            for _ in range(size.requests + 1):  # the first is left out
                begin = time.perf_counter()
                file.write(bytes(PAGE))
                os.fsync(file.fileno())
                samples["fsync"].append(time.perf_counter() - begin)
                request = make()
                samples["request"].append(answered(model.client, [request]))
        # Afterwards: it would have the server's processes wait for a core.
        call = engine.of_request(request)
        for _ in range(size.requests + 1):
            begin = time.perf_counter()
            call()
            samples["in_process"].append(time.perf_counter() - begin)
        samples = {kind: seconds[1:] for kind, seconds in samples.items()}
        row = {k: v for kind in samples for k, v in quantiles(kind, samples[kind]).items()}
        above = {q: row[f"request_{q}_ms"] - row[f"fsync_{q}_ms"] for q in ("p50", "p99")}
        yield {
            "measure": "empty",
            "kind": name,
            **row,
            **{f"above_fsync_{q}_ms": value for q, value in above.items()},
            "samples_ms": [round(1e3 * s, 3) for s in samples["request"]],
            "fsync_samples_ms": [round(1e3 * s, 3) for s in samples["fsync"]],
        }


def models(
    size: Size, make: Callable[[int], Trained], engine: InProcess, launcher: int
) -> Iterator[dict[str, Any]]:
    """All are trained once before, so that each has its moments."""
    from tilewright_lab.server_torture.client import processes

    [worker] = processes(launcher)["worker"]
    vocabulary = size.shape.get("vocab_size", 97)
    each = documents(size.tokens_of_a_model, size.document, vocabulary)

    def steps(of: Sequence[Trained]) -> float:
        return answered(
            of[0].client, [request for m in of for request in (m.passes(each), m.step())]
        )

    many = [make(1)]
    steps(many)
    before = resident_bytes(worker)
    many += [make(number) for number in range(2, size.models + 1)]
    steps(many)
    resident = (resident_bytes(worker) - before) / (size.models - 1)
    seconds: dict[str, list[float]] = {"many": [], "one": []}
    for i in range(1 + size.rounds // 3):
        for name in [*seconds] if i % 2 else reversed(seconds):
            seconds[name].append(steps(many if name == "many" else many[:1] * size.models))
    tokens = size.models * size.tokens_of_a_model
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    yield {
        "measure": "models",
        "models": size.models,
        "tokens_of_a_step": size.tokens_of_a_model,
        "many_tokens_per_s": tokens / medians["many"],
        "one_tokens_per_s": tokens / medians["one"],
        "share": statistics.median(b / a for a, b in zip(*seconds.values(), strict=True)),
        "switch_ms": 1e3 * (medians["many"] - medians["one"]) / size.models,
        "counted_bytes": engine.bytes_of_a_model(),
        "resident_bytes": resident,
        "samples_s": seconds,
    }


def kills(size: Size, model: Trained, launcher: int) -> Iterator[dict[str, Any]]:
    """The workers are idle; their model has one step since its creation, to be computed again."""
    from tilewright_lab.server_torture.client import processes

    one = [([1], [2], [1.0])]
    answered(model.client, [model.passes(one), model.step()])
    seconds = []
    for _ in range(size.kills):
        request = model.passes(one, "forward")
        begin = time.perf_counter()
        os.kill(processes(launcher)["worker"][0], signal.SIGKILL)
        answered(model.client, [request])
        seconds.append(time.perf_counter() - begin)
    yield {"measure": "kill", "seconds": statistics.median(seconds), "samples_s": seconds}


def wire(size: Size, client: Client, base: str) -> Iterator[dict[str, Any]]:
    """On an API without workers, so that its processors are its own."""
    from tilewright_lab.server_torture.schedule import in_json, in_protobuf

    session = client.post("create_session", {}).value["session_id"]
    lora = {"rank": 8, "seed": 0}
    names = {"protobuf": f"{session}:train:0", "json": "named"}
    about = {"base_model": base, "lora_config": lora}
    client.post("create_model", {**about, "session_id": session, "model_seq_id": 0})
    client.post("create_model", {**about, "model_id": names["json"]})
    each = documents(size.wire, size.document, size.shape.get("vocab_size", 97))
    kind, seconds, sizes = "forward_backward", {name: [] for name in names}, {}
    for i in range(size.wire_rounds):
        for name in [*names] if i % 2 else reversed(names):
            numbered = {"model_id": names[name], "seq_id": i + 1}
            if name == "json":
                text = json.dumps(in_json(numbered, each, kind), separators=(",", ":"))
                body, more = text.encode(), {}
            else:
                body = in_protobuf(numbered, each, kind)
                more = {"Content_Type": "application/x-protobuf"}
            sizes[name] = len(body)
            begin = time.perf_counter()
            answer = client.call("POST", f"/api/v1/{kind}", body, **more)
            seconds[name].append(time.perf_counter() - begin)
            if answer.status != 200:
                raise RuntimeError(f"{name}: {answer.status} {answer.body!r:.300}")
    for name in names:
        yield {
            "measure": "wire",
            "encoding": name,
            "tokens": size.wire,
            "bytes": sizes[name],
            "seconds": statistics.median(seconds[name]),
            "times_protobuf": statistics.median(
                a / b for a, b in zip(seconds[name], seconds["protobuf"], strict=True)
            ),
            "samples_s": seconds[name],
        }


# ---- the command


def measured(size: Size, folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    from tilewright_lab.server_torture.client import Server, write_model, write_server

    base = write_model(folder / "model", **size.shape)
    changes = {"sample_packing_sequence_len": size.document, "max_pending": 10_000}
    file = write_server(folder / "served", base, changes)
    engine = InProcess(write_server(folder / "inside", base, changes))
    with Server(file) as server, server.client() as client:
        yield from _of_server(size, server, client, engine, str(base))
    file = write_server(folder / "alone", base, changes)
    with Server(file, options=("--mode", "connect")) as server, server.client() as client:
        yield from wire(size, client, str(base))


def _of_server(
    size: Size, server: Server, client: Client, engine: InProcess, base: str
) -> Iterator[dict[str, Any]]:
    session = client.post("create_session", {}).value["session_id"]
    launcher = server.process.pid
    # First, while there is little to be computed again.
    model = Trained(client, session, 0, base)
    yield from kills(size, model, launcher)
    yield from empty(size, model, engine, server.root)
    yield from step(size, model, engine, launcher)

    def make(number: int) -> Trained:
        return Trained(client, session, number, base)

    yield from models(size, make, engine, launcher)


def shown(row: dict[str, Any]) -> str:
    told = {k: v for k, v in row.items() if not isinstance(v, list | dict)}
    return "  ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in told.items()
    )


def in_rows(
    name: str,
    about: str | None,
    argv: Sequence[str],
    needed: Sequence[str],
    sizes: tuple[Any, Any],
    measured: Callable[..., Iterator[dict[str, Any]]],
    **options: str,
) -> int:
    """A command that prints each row of a measurement, and writes NAME.json after each.

    sizes: in full, and of --quick.   measured: the rows, by the size, an empty folder, and what
    `options` are given, None without.   options: those further ones, with their help.
    """
    parser = commands.parser(name, about)
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help=f"write {name}.json")
    parser.add_argument("--quick", action="store_true", help="small measures, for a test")
    for option, help in options.items():
        parser.add_argument(f"--{option}", help=help)
    args = parser.parse_args(argv)
    commands.need(parser, needed)
    size, rows = sizes[args.quick], []
    given = {option: getattr(args, option) for option in options}
    meta = commands.metadata(name, argv, dataclasses.asdict(size))
    load = {"processors": os.cpu_count(), "at_start": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        for row in measured(size, pathlib.Path(folder), **given):
            print(shown(row), flush=True)
            rows.append(row)
            if args.out:
                # How many processes wanted these processors, over a minute.
                load["at_end"] = os.getloadavg()[0]
                commands.write(args.out / f"{name}.json", meta, rows, load=load)
    return 0


def main(argv: Sequence[str]) -> int:
    return in_rows("server", __doc__, argv, NEEDED, (FULL, QUICK), measured)
