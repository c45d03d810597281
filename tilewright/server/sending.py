"""All weights, from the workers to an engine: a tensor is whole at a time, and a bucket is sent."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import httpx
import torch

from tilewright.core.groups import Apart, ById
from tilewright.core.registry import short
from tilewright.ops import BlockFP8, dequantize_block_fp8, quantize_block_fp8

Bucket = list[tuple[str, torch.Tensor]]
# Matrices that no engine has in FP8: what follows a point is the end of a module's path.
PLAIN = ("embed_tokens", "lm_head", "mlp.gate", "mlp.shared_expert_gate")


class Target(NamedTuple):
    """An engine that receives weights.

    engine: which one, a row of CHANNELS.   url: where it answers.   name: of the group, another one
    each time.   backend: "gloo" or "nccl".   address, port: of this process, as the engine reaches
    it; 0: a free one.   bytes: of a bucket.   size: of the engine, in processes.
    """

    engine: str
    url: str
    name: str
    backend: str
    address: str
    port: int
    bytes: int
    size: int


class Unsent(Exception):
    """An engine has not taken weights."""


class Sent(NamedTuple):
    tensors: int
    bytes: int
    buckets: int


def send(
    target: Target, tensors: Iterator[tuple[str, torch.Tensor]], channel: Channel | None = None
) -> Sent:
    """Sends tensors by the names of Hugging Face, in that order.

    channel: to this engine, which stays open; None: one is opened, and closed.

    Raises Unsent; the channel is of no use then. The tensors are exhausted in any case: other
    processes gather them, too.
    """
    try:
        own = channel or opened(target)
        with own.telling():
            own.begin()
            sent = _buckets(tensors, target.bytes, own.broadcast)
            own.end()
        if channel is None:
            own.close()
        return sent
    finally:
        for _ in tensors:
            pass


def quantized(
    tensors: Iterator[tuple[str, torch.Tensor]], how: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """In block-FP8, as it is saved: NAME.weight in float8_e4m3fn and NAME.weight_scale_inv. Those
    of no matrices, of embeddings, the head and routers stay as they are.

    how: a quantization_config of Hugging Face: weight_block_size, and modules_to_not_convert, whole
    paths or the beginnings or the ends of some.
    """
    for name, tensor in tensors:
        if (q := _in_fp8(name, tensor, how)) is None:
            yield name, tensor
        else:
            yield name, q.data
            yield f"{name}_scale_inv", q.scale_inv


def rounded(
    name: str, tensor: torch.Tensor, how: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    """What an engine has of a tensor in this dtype that `quantized` sends: the tensor itself where
    it stays as it is.
    """
    q = _in_fp8(name, tensor.to(dtype), how)
    return tensor if q is None else dequantize_block_fp8(q).to(tensor.dtype)


def _in_fp8(name: str, tensor: torch.Tensor, how: Mapping[str, Any]) -> BlockFP8 | None:
    rows, columns = how["weight_block_size"]
    path, skipped = name.removesuffix(".weight"), (*PLAIN, *(how["modules_to_not_convert"] or ()))
    if path == name or tensor.ndim != 2 or any(f".{one}." in f".{path}." for one in skipped):
        return None
    q = quantize_block_fp8(tensor, block=(rows, columns))
    assert isinstance(q, BlockFP8)  # without its transpose
    return q


def opened(target: Target) -> Channel:
    """Raises Unsent."""
    return CHANNELS[target.engine](target)


def _buckets(
    tensors: Iterator[tuple[str, torch.Tensor]],
    most: int,
    broadcast: Callable[[Bucket], None],
) -> Sent:
    count = total = buckets = held = 0
    bucket: Bucket = []
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and held + size > most:
            broadcast(bucket)
            bucket, held, buckets = [], 0, buckets + 1
        bucket.append((name, tensor))
        count, total, held = count + 1, total + size, held + size
    if bucket:
        broadcast(bucket)
    return Sent(count, total, buckets + bool(bucket))


def _begun(do: Callable[[], None]) -> concurrent.futures.Future[None]:
    """In a thread. One that waits for an engine that has failed is left, and ends with the process:
    its group has a name of its own.
    """
    future: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(do())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Channel:
    """The group with one engine, open until `close`. Methods raise Unsent; after that a channel is
    of no use, and what it has is freed.
    """

    def __init__(self, target: Target):
        self.target = target
        self._client = httpx.Client(base_url=target.url, timeout=None)
        self.device = "cuda" if target.backend == "nccl" else "cpu"
        with self.telling():
            self._group = self._joined()

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Errors are Unsent, with the engine's address."""
        try:
            yield
        except (Unsent, httpx.HTTPError, RuntimeError, ValueError) as error:
            self._client.close()
            raise Unsent(f"{self.target.url}: {error}") from error

    def _joined(self) -> Apart | ById:
        raise NotImplementedError

    def begin(self) -> None:
        """Before the first bucket of all weights."""

    def broadcast(self, bucket: Bucket) -> None:
        path, body = self._told(bucket)

        def all_of_it() -> None:
            for _, tensor in bucket:
                self._group.broadcast(tensor.to(self.device))

        self._both(path, body, all_of_it)

    def _told(self, bucket: Bucket) -> tuple[str, Any]:
        """The call that makes the engine receive a bucket: its path and body."""
        raise NotImplementedError

    def end(self) -> None:
        """After the last bucket."""

    def close(self) -> None:
        try:
            with self.telling():
                self._leave()
        finally:
            self._group.close()
            self._client.close()

    def _leave(self) -> None:
        raise NotImplementedError

    def _both(self, path: str, body: Any, do: Callable[[], None]) -> None:
        """Tells the engine what it is to take part in, and takes part: it may refuse, and then
        does not come.
        """
        told, done = _begun(lambda: self._post(path, body)), _begun(do)
        first, _ = concurrent.futures.wait((told, done), return_when="FIRST_COMPLETED")
        if told in first:
            told.result()  # or what it has refused
        done.result()
        told.result()

    def _post(self, path: str, body: Any) -> None:
        answer = self._client.post(path, json=body)
        try:
            given = answer.json()
        except ValueError:
            given = None
        if not isinstance(given, dict):
            given = {"message": answer.text}
        if answer.status_code != 200 or given.get("success") is False:
            why = given.get("message") or given.get("error") or given.get("detail") or given
            raise Unsent(f"{path} answered {answer.status_code}: {why!r:.300}")


class Sglang(Channel):
    """As SGLang and `tilewright.sampler` receive weights: a process group of torch's."""

    def _joined(self) -> Apart:
        target, size = self.target, 1 + self.target.size
        group = Apart(f"{target.address}:{target.port}", 0, size, target.name, target.backend)
        body = {
            "master_address": target.address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": target.name,
            "backend": target.backend,
        }
        self._both("/init_weights_update_group", body, group.join)
        return group

    def _told(self, bucket: Bucket) -> tuple[str, Any]:
        return "/update_weights_from_distributed", {
            "names": [name for name, _ in bucket],
            "dtypes": [short(tensor.dtype) for _, tensor in bucket],
            "shapes": [[*tensor.shape] for _, tensor in bucket],
            "group_name": self.target.name,
            "flush_cache": False,
        }

    def _leave(self) -> None:
        self._post("/destroy_weights_update_group", {"group_name": self.target.name})


class Vllm(Channel):
    """As vLLM receives weights with `--weight-transfer-config '{"backend": "nccl"}'`: NCCL's own
    group, joined by the id that rank 0 has made, which HTTP carries.
    """

    def _joined(self) -> ById:
        target, size = self.target, 1 + self.target.size
        if target.backend != "nccl":
            raise Unsent("vLLM takes all weights over NCCL alone: sync_inference_method")
        group = ById(size)
        about = {"rank_offset": 1, "world_size": size, "packed": False}
        about["nccl_unique_id_b64"] = base64.b64encode(group.id).decode()
        self._both("/init_weight_transfer_engine", {"init_info": about}, group.join)
        return group

    def begin(self) -> None:
        self._post("/start_weight_update", {})

    def _told(self, bucket: Bucket) -> tuple[str, Any]:
        about = {
            "names": [name for name, _ in bucket],
            "dtype_names": [short(tensor.dtype) for _, tensor in bucket],
            "shapes": [[*tensor.shape] for _, tensor in bucket],
        }
        return "/update_weights", {"update_info": about}

    def end(self) -> None:
        self._post("/finish_weight_update", {})

    def _leave(self) -> None:
        self._post("/shutdown_weight_transfer_engine", {})


CHANNELS: dict[str, type[Channel]] = {"sglang": Sglang, "embedded": Sglang, "vllm": Vllm}
