"""Data parallelism of replicas."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from tilewright.trainer.parallel.fields import Parallel
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.parallel.precision import Dtypes
from tilewright.trainer.parallel.row import LAYOUTS, Layout


def wrap(parts: Parts, mesh: Mesh, train: Parallel, dtypes: Dtypes) -> None:
    if dtypes.wide_gradients:
        # DDP's buckets have the parameters' dtype.
        parts.average = mesh.params.group
        return
    # The buffers are frozen weights, the same on all ranks.
    parts.wrapped = DistributedDataParallel(
        parts.model,
        process_group=mesh.params.group,
        device_ids=[mesh.device.index] if mesh.device.type == "cuda" else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,  # else gradients would be in memory twice
    )


def _applies(mesh: Mesh, train: Parallel, dtypes: Dtypes) -> bool:
    return train.data_parallel_mode == "ddp" and mesh.params.size > 1


LAYOUTS.add("ddp", Layout(70, _applies, wrap, (Parallel, Dtypes), filled=True))
