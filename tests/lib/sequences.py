"""Sequences that are sharded over ranks, and what ranks exchange."""

import torch
import torch.distributed as dist

from tilewright.ops.attention.context_parallel import ContextParallel

# world size -> (ring, Ulysses)
LAYOUTS = {2: ((1, 2), (2, 1)), 4: ((1, 4), (4, 1), (2, 2))}


def close(found, want, what, tolerance=1e-5):
    assert found.shape == want.shape, what
    error = (found.double() - want).abs().max()
    assert error <= tolerance * max(want.abs().max(), 0.1), (
        what,
        float(error),
    )  # with only one visible key, dq is 0


class Count:
    """Records the shapes of all-to-alls and of sent messages."""

    def __enter__(self):
        self.real = dist.all_to_all_single, dist.batch_isend_irecv
        self.all_to_alls, self.sent, self.received = [], [], []

        def all_to_all(out, message, *args, **kwargs):
            self.all_to_alls.append(tuple(message.shape))
            return self.real[0](out, message, *args, **kwargs)

        def batch(ops):
            for op in ops:
                found = self.sent if op.op is dist.isend else self.received
                found.append((tuple(op.tensor.shape), op.tensor.dtype))
            return self.real[1](ops)

        dist.all_to_all_single, dist.batch_isend_irecv = all_to_all, batch
        return self

    def __exit__(self, *_):
        dist.all_to_all_single, dist.batch_isend_irecv = self.real


def of_this(ring, ulysses):
    """The groups of rank = ring rank * ulysses + Ulysses rank."""
    world, rank, mine = dist.get_world_size(), dist.get_rank(), []
    for by_row in (True, False):  # every rank creates every group
        table = torch.arange(world).view(ring, ulysses)
        for members in (table if by_row else table.t()).tolist():
            group = dist.new_group(members)
            if rank in members:
                mine.append(group)
    return ContextParallel.of(*mine)
