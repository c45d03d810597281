"""The parts of a model that a rank holds, and how it runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from tilewright.core import torch_names
from tilewright.ops.attention.prefixes import prefixes_of
from tilewright.trainer.models.head import LossFunction, labeled_rows
from tilewright.trainer.models.model import Outcome, Transformer
from tilewright.trainer.parallel import exchange
from tilewright.trainer.parallel.mesh import Group
from tilewright.trainer.parallel.precision import FULL

Weights = Iterator[tuple[str, torch.Tensor, torch.dtype]]  # name, full, dtype


class Parts:
    """All layers of a model, whose parameters are whole or shards. `Pipeline` holds stages.

    Attributes:
        model: with this rank's weights, under their names in the whole.
        whole: with the names, shapes and order of all weights: the model, or one on meta.
        roots: the modules that run by themselves, each a root of FSDP2.
        wrapped: what is called: the model, or DDP around it.
        device: to which micro-batches are moved, one at a time.
        sparse_head: whether tokens without a label leave before the head.
        autocast: the dtype of matrix products where FSDP2 does not cast by itself, or None.
        origin: identifies the weights that were read from a folder; None: they were drawn.
        merged: whether adapters have been merged into the weights since.
        dtypes: those that it was made with.
        average: the ranks over which gradients are averaged after the last backward, where neither
            FSDP2 nor DDP does it; or None.
    """

    def __init__(self, model: Transformer):
        self.model = self.whole = model
        self.roots: list[nn.Module] = [model]
        self.wrapped: nn.Module = model
        self.device = torch.device("cpu")
        self.autocast: torch.dtype | None = None
        self.sparse_head = False
        self.origin: str | None = None
        self.merged = False
        self.dtypes = FULL
        self.average: dist.ProcessGroup | None = None

    # ---- forward and backward of micro-batches

    def forward_backward(
        self, batches: Sequence[Mapping[str, Any]], loss: LossFunction
    ) -> list[Outcome]:
        """An outcome for each micro-batch. The last backward averages gradients over ranks."""
        outcomes = []
        for i, batch in enumerate(batches):
            with self._synchronizing(last=i == len(batches) - 1):
                outcome = self._outcome(self.moved(batch), loss)
                outcome.total.backward()
                outcomes.append(outcome._replace(total=outcome.total.detach()))
        return outcomes

    def forward(self, batches: Iterable[Mapping[str, Any]], loss: LossFunction) -> list[Outcome]:
        return [self._outcome(self.moved(batch), loss) for batch in batches]

    def moved(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A micro-batch on the device."""
        rows = labeled_rows(batch["labels"]) if self.sparse_head and "labels" in batch else None
        batch = batch if rows is None else {**batch, "labeled": rows}
        moved = {
            k: v.to(self.device, non_blocking=True) if torch.is_tensor(v) else v
            for k, v in batch.items()
        }
        # Read here, on the host: otherwise each layer would synchronize.
        ends = tuple(batch["cu_seqlens"].tolist())
        shared = batch["prefix"].tolist() if "prefix" in batch else [0] * (len(ends) - 1)
        return {**moved, "ends": ends, "prefixes": prefixes_of(ends, shared)}

    def _outcome(self, batch: Mapping[str, Any], loss: LossFunction) -> Outcome:
        device, half = batch["input_ids"].device.type, self.autocast
        # The cache would hold the casts of all weights until the end of the forward pass. A weight
        # is used once in it.
        with torch.autocast(device, half, enabled=half is not None, cache_enabled=False):
            return self.wrapped(**batch, loss=loss)

    @contextlib.contextmanager
    def _synchronizing(self, last: bool) -> Iterator[None]:
        """Averages gradients over ranks in the last micro-batch's backward only."""
        if isinstance(self.wrapped, FSDPModule):
            self.wrapped.set_requires_gradient_sync(last)
            yield
        elif isinstance(self.wrapped, DistributedDataParallel) and not last:
            with self.wrapped.no_sync():
                yield
        else:
            yield
            if self.average is not None and last:
                for p in self.model.parameters():
                    if p.grad is not None:
                        dist.all_reduce(p.grad.div_(self.average.size()), group=self.average)

    def sum_in_float32(self) -> None:
        """Gradients of parameters in bfloat16 are summed in float32, and stay so."""
        for p in self.model.parameters():
            if p.requires_grad:
                p.grad_dtype = torch.float32
        for root in self.roots:
            if isinstance(root, FSDPModule):
                torch_names.keep_reduced_gradients_in_float32(root)

    def reshard(self) -> None:
        """Frees gathered parameters."""
        for root in self.roots:
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def move(self, device: torch.device) -> None:
        """Moves weights and gradients."""
        self.reshard()
        self.model.to(device)

    # ---- parameters that two ranks hold

    def sum_copies(self) -> None:
        """Adds the gradients of the copies of a parameter; all then have the same bits."""

    @property
    def copies(self) -> Collection[nn.Parameter]:
        """Parameters that count on another rank."""
        return ()

    # ---- weights of all ranks

    @property
    def reader(self) -> int:
        """The rank that reads this rank's weights from a folder, and sends them to `readers`."""
        return 0

    @property
    def readers(self) -> dist.ProcessGroup | None:
        return None

    def agree(self, problem: BaseException | None) -> None:
        """`Group.agree` of all ranks, on what a reader has found."""
        Group(dist.group.WORLD if many() else None).agree(problem)

    def read_by_all(self, checksums: dict[str, str]) -> dict[str, str]:
        """The checksums that all readers have read."""
        return exchange.broadcast(checksums) if many() else checksums

    def of_all_ranks(self, weights: Weights) -> Weights:
        """This rank's weights, and on rank 0 those of all. Every rank must exhaust it."""
        return weights

    def with_all_adapters(self) -> Transformer:
        """The model with the adapters of all ranks. Every rank must call it."""
        return self.model


def parts_of(model: Transformer | Parts) -> Parts:
    return model if isinstance(model, Parts) else Parts(model)


def many() -> bool:
    """Whether there are other ranks."""
    return dist.is_initialized() and dist.get_world_size() > 1
