"""A training step under FSDP2 and under DDP, for `tilewright check-layout`, and DDP with a fault.

tilewright check-layout examples/check_layout_fsdp2.py:train_step
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tilewright_lab.check_layout import Step

LENGTHS = (11, 4, 7, 9)  # tokens of each document


def train_step(layout, rank, world_size):
    """A rank's step. In one process the layout is "single"."""
    model = nn.Sequential(
        nn.Embedding(50, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 50, bias=False)
    )
    documents = [torch.randint(50, (n + 1,)) for n in LENGTHS]  # the same on every rank
    mine = documents[rank::world_size]
    ids, targets = torch.cat([d[:-1] for d in mine]), torch.cat([d[1:] for d in mine])

    if layout == "fsdp2":
        fully_shard(model)
    elif layout.startswith("ddp"):
        model = DistributedDataParallel(model)
    # DDP and FSDP2 average gradients over ranks.
    divisor = sum(LENGTHS) / world_size
    if layout == "ddp, means":
        divisor = len(targets)  # a fault: ranks have other numbers of tokens

    return Step(
        model=model,
        loss=lambda: F.cross_entropy(model(ids), targets, reduction="sum") / divisor,
        tokens=len(targets),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    )


train_step.layouts = {"fsdp2": (2, 4), "ddp": 2, "ddp, means": 2}
