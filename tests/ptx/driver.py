"""A Triton driver for the emulated GPU: kernels are launched as on a GPU."""

import pathlib
from types import SimpleNamespace

import torch

from ptx.counts import Counts
from ptx.kernel import Kernel
from ptx.memory import Memory
from ptx.tma import TensorMap


class Driver:
    """A Triton driver for this package's emulated GPU, so that Triton itself binds and specializes
    arguments. A device's number is its architecture, since Triton caches compiled kernels per
    device.
    """

    def __init__(self):
        from tilewright.kernels import launch as launch_cache

        # Triton's own launches pass tensors instead of addresses.
        launch_cache._caching = False
        self.arch = 90
        self.memories = []  # one per launch
        self.names = []  # the kernel of each launch
        self.change = None  # transforms PTX, to plant faults
        self.counts = None  # kernel name -> Counts, if requested
        self.pointed = {}  # address of a table of addresses -> the tensors, at its end
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
            load_binary=lambda name, cubin, shared, device: (name, name, 0, 0, 1024),
            unload_module=lambda name: None,
        )

    def translated(self, a, memory):
        """An argument; if it is a table of addresses, a copy with those in `memory`."""
        tensors = self.pointed.get(a.data_ptr()) if isinstance(a, torch.Tensor) else None
        if tensors is None:
            return a
        held = [memory.put(t, t.data_ptr() % 16) if t.numel() else 0 for t in tensors]
        return torch.cat((a[: -len(held)], torch.tensor(held)))

    def get_current_device(self):
        return self.arch

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def launcher_cls(self, source, metadata):
        from triton.runtime.cache import get_cache_manager

        text = pathlib.Path(
            get_cache_manager(metadata.hash).get_file(f"{metadata.name}.ptx")
        ).read_text()
        kernels = {}

        def launch(x, y, z, stream, function, packed, about, enter, leave, *arguments):
            if self.change not in kernels:
                kernels[self.change] = Kernel(
                    self.change(text) if self.change else text, metadata.shared
                )
            kernel = kernels[self.change]
            assert metadata.num_ctas == 1 and kernel.threads == 32 * metadata.num_warps
            assert metadata.global_scratch_size == metadata.profile_scratch_size == 0
            memory, values = Memory(), [0, 0]  # the two pointers at the end
            described = list(metadata.tensordesc_meta or ())
            for a, kind in reversed(list(zip(arguments, source.signature.values(), strict=True))):
                if kind.startswith("tensordesc"):
                    about = described.pop()
                    where = memory.put(a.base)
                    values[:0] = [
                        TensorMap(
                            where,
                            about["elem_size"],
                            a.shape,
                            a.strides,
                            about["block_size"],
                            (0, 32, 64, 128)[about["swizzle"]],
                        ),
                        *a.shape,
                        *a.strides,
                    ]
                elif kind != "constexpr":
                    a = self.translated(a, memory)
                    values.insert(
                        0,
                        memory.put(a, a.data_ptr() % 16)
                        if isinstance(a, torch.Tensor)
                        else float(a)
                        if kind == "fp32"
                        else a,
                    )
            counts = (
                None if self.counts is None else self.counts.setdefault(metadata.name, Counts())
            )
            kernel.run(memory, values, (x, y, z), counts=counts)
            memory.take_back()
            self.memories.append(memory)
            self.names.append(metadata.name)

        return launch
