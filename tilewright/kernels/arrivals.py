"""Counters with which programs of a launch find out who arrives last, to add what all have left.

They are zero between launches: who arrives last sets its own back. Launches that may run at the
same time have counters of their own: those of a stream one run of them, and each launch in a CUDA
graph another, since any stream may replay it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from tilewright.core.torch_names import FakeTensor

RUN = 256  # counters of a launch at most: split sums have fewer tiles than a GPU has SMs
RUNS = 4096  # 4 MiB per device: the launches of some ten graphs of a large model


class _Device:
    """A device's runs of counters, and those that are taken."""

    def __init__(self, device: torch.device):
        # By a thread of its own: a graph that warms up may take every allocation of this thread,
        # and reuse its memory.
        with ThreadPoolExecutor(1) as thread:
            self.runs = thread.submit(_zeros, device).result()
        self.taken = 0
        self.of_stream: dict[int, torch.Tensor | None] = {}

    def take(self) -> torch.Tensor | None:
        if self.taken == RUNS:
            return None
        self.taken += 1
        return self.runs[self.taken - 1]


def _zeros(device: torch.device) -> torch.Tensor:
    runs = torch.zeros((RUNS, RUN), dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # other streams read them
    return runs


_devices: dict[torch.device, _Device] = {}


def counters(like: torch.Tensor, tiles: int) -> torch.Tensor | None:
    """int32 zeros [tiles] for one launch on the current stream of like's device, which must leave
    them zero.

    None if there are none: for more than RUN tiles, in a CUDA graph's capture before any launch
    outside of one, and once RUNS are taken. A launcher then adds in a second launch.
    """
    if tiles > RUN:
        return None
    if isinstance(like, FakeTensor):
        return like.new_zeros(tiles, dtype=torch.int32)
    on_gpu = like.is_cuda
    capturing = on_gpu and torch.cuda.is_current_stream_capturing()
    of = _devices.get(like.device)
    if of is None:
        if capturing:
            return None
        of = _devices[like.device] = _Device(like.device)
    if capturing:
        run = of.take()
    else:
        stream = torch.cuda.current_stream(like.device).cuda_stream if on_gpu else 0
        if stream not in of.of_stream:
            of.of_stream[stream] = of.take()
        run = of.of_stream[stream]
    return None if run is None else run[:tiles]
