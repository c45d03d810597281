"""Process groups beside the default one, of processes that were started apart: a trainer and the
engines that it sends weights to.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

LIMIT = 600.0  # seconds of one collective, and of waiting for the others: NCCL's default
exported: Any = dist  # stores are documented there, and not in its __all__
cuda: Any = torch.cuda  # which imports nccl, and does not say so


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its bytes where the backend may lack the dtype: FP8."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


class Apart:
    """A group that other libraries join as `_new_process_group_helper` of torch has it: SGLang's
    init_weights_update_group, which is what the prefixes of the store are for.

    Args:
        address: of rank 0, which listens on the port; "HOST:PORT", for rank 0 with port 0 a free
            one, see `port`.
        rank: this process's; rank 0 sends.
        size: of the group.
        name: the group's.
        backend: "gloo", for tensors on a CPU, or "nccl".

    Raises RuntimeError where the others do not come.
    """

    def __init__(self, address: str, rank: int, size: int, name: str, backend: str):
        host, _, port = address.rpartition(":")
        limit = datetime.timedelta(seconds=LIMIT)
        self.size, self.rank, self.name, self.backend = size, rank, name, backend
        self._limit = limit
        self._store = exported.TCPStore(
            host.strip("[]"), int(port), size, rank == 0, limit, wait_for_workers=False
        )
        self.port = self._store.port
        self._group: Any = None  # a backend, which is no ProcessGroup

    def join(self) -> None:
        """Waits for the others."""
        store = self._store
        device = "cuda" if self.backend == "nccl" else "cpu"
        for prefix in (self.name, f"{self.name}/", f"{device}/"):
            store = exported.PrefixStore(prefix, store)
        if self.backend == "nccl":
            options = exported.ProcessGroupNCCL.Options()
            self._group = exported.ProcessGroupNCCL(store, self.rank, self.size, options)
        else:
            self._group = exported.ProcessGroupGloo(store, self.rank, self.size, self._limit)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's values into a contiguous tensor of every rank."""
        assert self._group is not None  # it has joined
        options = exported.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([_sendable(tensor)], options).wait()

    def close(self) -> None:
        self._group = None


class ById:
    """Rank 0 of a group of NCCL alone, which others join by its id: no store, and no process group.

    Args:
        size: of the group.

    Raises RuntimeError where this PyTorch has no NCCL, or there is no GPU.
    """

    def __init__(self, size: int):
        if not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise RuntimeError("NCCL needs a GPU, and a PyTorch that was built with it")
        self.size, self.id = size, bytes(cuda.nccl.unique_id())
        self._communicator: Any = None

    def join(self) -> None:
        """Waits for the others, and sums one number, as vLLM's ranks do first."""
        device = torch.cuda.current_device()
        self._communicator = cuda.nccl.init_rank(self.size, self.id, 0)
        first = [torch.zeros(1, device=device)]
        cuda.nccl.all_reduce(first, comms=[self._communicator])
        torch.cuda.synchronize()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """As `Apart.broadcast`, of a tensor on the GPU."""
        cuda.nccl.broadcast([_sendable(tensor)], comms=[self._communicator])
        torch.cuda.synchronize()

    def close(self) -> None:
        self._communicator = None
