"""One process as any rank of a layout, beside ranks that do what it does."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from helpers import threads
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.core.torch_names import join_pretended_group, messages_kept
from tilewright.trainer.parallel import mesh


@contextmanager
def symmetric_ranks(train, size, rank=0):
    """The mesh of a rank, and its collectives: every other rank sends what this one would receive
    from itself, and one rank alone random numbers. So all values are finite, and messages have
    about the sizes that they have between ranks, while nothing is allocated but by this rank's own
    work.
    """
    join_pretended_group(rank, size)
    try:
        # One thread, as a rank's: PyTorch's attention has buffers for each thread.
        with threads(1), messages_kept(), _Copies():
            yield mesh.build(train, rank, size, torch.device("cpu"), control_backend="fake")
    finally:
        dist.destroy_process_group()


class _Copies(TorchDispatchMode):
    """Writes what collectives, which do nothing here, leave unwritten. No line of it allocates."""

    def __init__(self):
        super().__init__()
        self.draw = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls again with this rank's tensors
        result = func(*args, **kwargs or {})
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d" and name == "recv_":
            message = args[0][0]
            if message.is_floating_point():  # of zeros a router would make ties
                message.normal_(generator=self.draw)
            else:
                message.zero_()
        elif namespace == "c10d" and name in WRITES:
            WRITES[name](*args)
        elif namespace == "_c10d_functional" and name in RETURNS:
            RETURNS[name](result, *args)
        return result


def _gather(output, given, *_):
    """The same shards, shifted by their rank: equal rows of a router would be ties."""
    own = given.reshape(-1)
    for rank, shard in enumerate(output.view(-1, len(own))):
        shard[rank:].copy_(own[: len(own) - rank])
        shard[:rank].copy_(own[len(own) - rank :])


def _scatter(output, given, *_):
    output.view(-1).copy_(given.reshape(-1)[: output.numel()])


def _exchange(output, given, group, output_sizes, input_sizes, *_):
    size = dist.ProcessGroup.unbox(group).size()
    output_sizes = output_sizes or [len(output) // size] * size
    own = given[: input_sizes[0] if input_sizes else len(given) // size]
    for received in output.split(output_sizes):
        rows = min(len(own), len(received))
        received[:rows].copy_(own[:rows])
        received[rows:].zero_()


def _scatter_from(outputs, inputs, *_):
    """By which torch 2.11 distributes parameters."""
    outputs[0].copy_(inputs[0][0])


WRITES = {
    "scatter_": _scatter_from,
    "_allgather_base_": _gather,
    "_reduce_scatter_base_": _scatter,
    "alltoall_base_": _exchange,
}
RETURNS = {"all_gather_into_tensor": _gather, "reduce_scatter_tensor": _scatter}
