"""Activation offload: what a layer saves for backward waits in pinned host memory.

The layers' newest activations, up to a limit, stay on the device: the backward pass reads them
first. Older ones are copied to the host on a stream of their own while the next layers compute,
and come back while the backward of the layer after them computes. Parameters and tensors below
SMALL stay. Values are copied, so results have the same bits.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tilewright.trainer.models.model import Transformer
from tilewright.trainer.models.recompute import Wrapped
from tilewright.trainer.parallel.fields import Compute
from tilewright.trainer.parallel.mesh import Mesh
from tilewright.trainer.parallel.parts import Parts
from tilewright.trainer.parallel.row import LAYOUTS, Layout

# Bytes below which a tensor stays: a copy's latency is that of about a hundred kilobytes.
SMALL = 1 << 18
# What autocast and matrix products make of a parameter before they save it.
OF_PARAMETERS = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0")


class Copies(Protocol):
    """Copies between a device and the host. A copy may end later: `wait` orders what follows."""

    def to_host(self, t: torch.Tensor) -> torch.Tensor: ...

    def to_device(self, host: torch.Tensor) -> torch.Tensor: ...

    def wait(self) -> None: ...


class StreamCopies:
    """Copies on a CUDA stream of their own."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)

    def to_host(self, t: torch.Tensor) -> torch.Tensor:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        host = torch.empty_like(t, device="cpu", pin_memory=True)
        with torch.cuda.stream(self.stream):
            host.copy_(t, non_blocking=True)
        t.record_stream(self.stream)  # its memory is not reused before the copy has ended
        return host

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        # The stream's order puts it after the copy to the host.
        with torch.cuda.stream(self.stream):
            t = torch.empty_like(host, device=self.device, pin_memory=False)
            t.copy_(host, non_blocking=True)
        t.record_stream(torch.cuda.current_stream(self.device))
        return t

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)


class Saved:
    """One tensor that autograd saved: on the device, on the host, or on its way back."""

    def __init__(self, t: torch.Tensor, layer: Layer):
        self.on_device: torch.Tensor | None = t
        self.host: torch.Tensor | None = None
        self.size, self.layer = t.numel() * t.element_size(), layer


class Layer:
    """What one call of a layer has saved.   before: the call before it."""

    def __init__(self, before: Layer | None):
        self.saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        self.before = None if before is None else weakref.ref(before)
        self.asked = False


class Offload:
    """The hooks of all layers of a model.   limit: bytes that stay on the device."""

    def __init__(self, limit: float, copies: Copies):
        self.limit, self.copies = limit, copies
        self.kept = 0  # bytes on the device that have not left it
        self._kept: dict[int, weakref.ref[Saved]] = {}  # those, oldest first
        self._last: weakref.ref[Layer] | None = None

    def run(self, module: nn.Module, forward: Callable, args: tuple, options: dict) -> Any:
        """forward(*args, **options), with what it saves offloaded."""
        layer = Layer(None if self._last is None else self._last())
        self._last = weakref.ref(layer)
        # FSDP2 has gathered the parameters by now, and frees them itself.
        own = {storage_of(t) for t in (*module.parameters(), *module.buffers())}
        # Within one call a tensor is saved once, however many operators save it. Held until the
        # call ends, so that its address is not another tensor's.
        seen: dict[tuple, tuple[torch.Tensor, Saved]] = {}

        def pack(t: torch.Tensor) -> torch.Tensor | Saved:
            if stays(t, own):
                return t
            key = (storage_of(t), t.storage_offset(), t.dtype, t.shape, t.stride(), t._version)
            if key not in seen:
                seen[key] = t, self._pack(t.detach(), layer)
            return seen[key][1]

        with saved_tensors_hooks(pack, self._unpack):
            return forward(*args, **options)

    def _pack(self, t: torch.Tensor, layer: Layer) -> Saved:
        saved = Saved(t, layer)
        layer.saved.add(saved)
        self.kept += saved.size
        leave = functools.partial(self._leave, id(saved), saved.size)
        self._kept[id(saved)] = weakref.ref(saved, leave)
        while self.kept > self.limit:
            going = next(iter(self._kept.values()))()
            # One that is gone, or has left, is not among them.
            assert going is not None and going.on_device is not None
            going.host = self.copies.to_host(going.on_device)
            going.on_device = None
            self._leave(id(going), going.size)
        return saved

    def _leave(self, name: int, size: int, _: object = None) -> None:
        if self._kept.pop(name, None) is not None:
            self.kept -= size

    def _unpack(self, saved: torch.Tensor | Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        layer = saved.layer
        if not layer.asked:
            layer.asked = True
            self._load(layer)  # nothing, if it was loaded with the layer after it
            self.copies.wait()
            if layer.before is not None and (before := layer.before()) is not None:
                self._load(before)
        elif saved.on_device is None:  # it left after the layer's backward had begun
            self._load(layer)
            self.copies.wait()
        assert saved.on_device is not None  # loaded, or never gone
        return saved.on_device

    def _load(self, layer: Layer) -> None:
        for saved in layer.saved:
            if saved.on_device is None:
                assert saved.host is not None
                saved.on_device = self.copies.to_device(saved.host)
                saved.host = None


def storage_of(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def stays(t: torch.Tensor, own: set[int]) -> bool:
    """Whether a tensor is small, or a parameter, or cast or viewed from one.   own: storages."""
    if t.numel() * t.element_size() < SMALL or storage_of(t) in own:
        return True
    made = t.grad_fn
    if made is None:
        return t.requires_grad
    return made.name() in OF_PARAMETERS and all(
        f is None or "AccumulateGrad" in f.name() for f, _ in made.next_functions
    )


class Offloaded(Wrapped):
    """A layer's forward, with what it saves offloaded."""

    def __init__(self, module: nn.Module, forward: Callable, offload: Offload):
        self.module, self.forward, self.offload = module, forward, offload

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **options)
        return self.offload.run(self.module, self.forward, args, options)


def offload_activations(model: Transformer, limit: float, copies: Copies) -> Offload:
    """Offloads what each layer saves for backward. Call it after `recompute_activations`: what a
    recomputed layer saves are its inputs.

    limit: bytes of activations that stay on the device.
    """
    offload = Offload(limit, copies)
    for block in model.model.layers:
        block.forward = Offloaded(block, block.forward, offload)
    return offload


def _apply(parts: Parts, mesh: Mesh, train: Compute) -> None:
    limit = train.activation_gpu_limit * 1e9
    offload_activations(parts.model, limit, StreamCopies(mesh.device))


LAYOUTS.add(
    "offload",
    Layout(55, lambda mesh, train: train.enable_activation_offload, _apply, (Compute,)),
)
