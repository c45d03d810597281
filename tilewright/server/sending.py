"""All weights, from the workers to an engine: a tensor is whole at a time, and a bucket is sent."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import torch

from tilewright.core.groups import Apart


class Target(NamedTuple):
    """An engine that receives weights.

    url: where it answers.   name: of the group, another one each time.   backend: "gloo" or "nccl".
    address, port: of this process, as the engine reaches it; 0: a free one.   bytes: of a bucket.
    size: of the engine, in processes.
    """

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


def send(target: Target, tensors: Iterator[tuple[str, torch.Tensor]]) -> Sent:
    """Sends tensors by the names of Hugging Face, in that order, as SGLang receives them.

    Raises Unsent. The tensors are exhausted in any case: other processes gather them, too.
    """
    try:
        with _Channel(target) as channel:
            return _buckets(tensors, target.bytes, channel.broadcast)
    except (Unsent, httpx.HTTPError, RuntimeError) as error:
        raise Unsent(f"{target.url}: {error}") from error
    finally:
        for _ in tensors:
            pass


def _buckets(
    tensors: Iterator[tuple[str, torch.Tensor]],
    most: int,
    broadcast: Callable[[list[tuple[str, torch.Tensor]]], None],
) -> Sent:
    count = total = buckets = held = 0
    bucket: list[tuple[str, torch.Tensor]] = []
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


class _Channel:
    """The group with one engine."""

    def __init__(self, target: Target):
        self.target = target
        self._client = httpx.Client(base_url=target.url, timeout=None)
        self._group: Apart | None = None

    def __enter__(self) -> _Channel:
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
        try:
            self._both("/init_weights_update_group", body, group.join)
        except BaseException:
            self._client.close()
            raise
        self._group = group
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._post("/destroy_weights_update_group", {"group_name": self.target.name})
        finally:
            self._client.close()

    def broadcast(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        group = self._group
        assert group is not None  # within the block
        device = "cuda" if self.target.backend == "nccl" else "cpu"
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [[*tensor.shape] for _, tensor in bucket],
            "group_name": self.target.name,
            "flush_cache": False,
        }

        def all_of_it() -> None:
            for _, tensor in bucket:
                group.broadcast(tensor.to(device))

        self._both("/update_weights_from_distributed", body, all_of_it)

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
            given = {"message": answer.text}
        if answer.status_code != 200 or given.get("success") is False:
            why = given.get("message") or given.get("error") or given
            raise Unsent(f"{path} answered {answer.status_code}: {why!r:.300}")
