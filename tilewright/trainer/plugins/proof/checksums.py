"""Checksums of tensors: equal bits have equal checksums, on any device and however often computed.

A checksum is a sum of a tensor's words, each times an odd number that depends on its position,
modulo 2^64. Integers are added exactly, so that the order in which a device adds them does not
matter. A tensor in which one word differs always has another checksum; several differences cancel
each other in one of 2^32 cases at most (that is for sign bits alone).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts

# Words of a row, each with its factor; rows have factors too.
ROW = 1 << 16
# Rows that are multiplied at a time, by device: 512 KiB of working memory for each, which a CPU
# keeps in its cache, and a GPU fills with few launches.
ROWS = {"cpu": 1, "cuda": 64}
# Odd multipliers of splitmix64's finalizer, as signed numbers.
FIRST, SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def factors(count: int, device: torch.device) -> torch.Tensor:
    """Odd pseudorandom numbers, int64 [count]: of the positions in a row, and of rows."""
    x = torch.arange(1, count + 1, device=device) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return (x ^ (x >> 31)) | 1


@torch.no_grad()
def checksum(t: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The checksum of a tensor's bits, int64 [], on its device.   factor: see `factors`."""
    words = t.detach().contiguous().view(-1).view(WORDS[t.element_size()])
    whole, number = len(words) // len(factor) * len(factor), 0
    tail = words[whole:]
    total = (tail * factor[: len(tail)]).sum() * factor[whole // len(factor) % len(factor)]
    rows = words[:whole].view(-1, len(factor))
    for block in rows.split(min(ROWS.get(t.device.type, 1), len(factor))):
        sums = (block * factor).sum(1)
        total += (sums * factor[number % len(factor) :][: len(sums)]).sum()
        number += len(block)
    return total


class Checksums:
    """Checksums of the tensors of a model that is sharded over ranks: those of each rank's shards,
    times an odd number that depends on the rank, added over all ranks.
    """

    def __init__(self, parts: Parts, mesh: Mesh):
        self.model, self.mesh = parts.model, mesh
        whole = parts.whole
        self.names = [name for name, _ in (*whole.named_parameters(), *whole.named_buffers())]
        self.trained = [name for name, p in whole.named_parameters() if p.requires_grad]
        self.factor = factors(ROW, mesh.device)

    def weights(self) -> list[int]:
        """The checksums of all parameters and buffers, in the order of `names`."""
        held = (*self.model.named_parameters(), *self.model.named_buffers())
        return self.read(self.of(held, self.names))

    def of_gradients(self) -> torch.Tensor:
        """This rank's part for the trained parameters' gradients, in the order of `trained`."""
        held = ((name, p.grad) for name, p in self._trained() if p.grad is not None)
        return self.of(held, self.trained)

    def of_trained(self) -> torch.Tensor:
        """This rank's part for the trained parameters, in the order of `trained`."""
        return self.of(self._trained(), self.trained)

    def _trained(self) -> Iterable[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def of(self, held: Iterable[tuple[str, torch.Tensor]], names: list[str]) -> torch.Tensor:
        """int64 [names]: this rank's part, 0 for what only other ranks have."""
        at = {name: i for i, name in enumerate(names)}
        sums = torch.zeros(len(names), dtype=torch.int64, device=self.mesh.device)
        for name, t in held:
            own = t.to_local() if isinstance(t, DTensor) else t
            sums[at[name]] = checksum(own, self.factor) * (2 * self.mesh.rank + 1)
        return sums

    def read(self, part: torch.Tensor) -> list[int]:
        """The sums over ranks. Every rank must call it."""
        return self.mesh.everyone.total(part).tolist()
