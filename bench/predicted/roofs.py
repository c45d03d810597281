"""The rates that predictions divide by, each with its source."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass, replace
from typing import Any

from tilewright.bench import store


@dataclass(frozen=True)
class Roofs:
    """A device's rates and sizes.

    arch: the compute capability, as 90, whose budgets and SMs (`tilewright.kernels.device`) it has.
    copy: bytes/s of a large copy, read and written.
    flops: FLOP/s of a large matrix product, by dtype.
    l2: bytes/s from L2 to the shared memories of all SMs.
    sms, clock: multiprocessors, and their cycles/s.
    ipc: warp instructions that an SM issues in a cycle.
    launch: seconds from a launch to the next one's first instruction.
    latency: seconds from a tile's first load to its last store, beside its traffic.
    measured: what was read from results, and is not the default.
    """

    device: str
    copy: float
    flops: dict[str, float]
    l2: float = 7e12
    sms: int = 132
    clock: float = 1.98e9
    ipc: float = 2.5
    launch: float = 3e-6
    latency: float = 0.8e-6
    arch: int = 90
    measured: tuple[str, ...] = ()

    @property
    def issue(self) -> float:
        """Warp instructions/s of the device."""
        return self.sms * self.clock * self.ipc


# Hopper's matrix product is the same on both: 989e12 FLOP/s by the data sheet, of which cuBLAS
# reaches four fifths at the clock that its power allows. FP8 is twice that by the data sheet.
E4M3, E2M1 = "float8_e4m3fn", "float4_e2m1fn_x2"
_FLOPS = {"bfloat16": 790e12, "float16": 790e12, E4M3: 1580e12}
# Blackwell architecture brief, HGX B200 of 1,000 W, without sparsity: 2,250e12 FLOP/s, in FP8 twice
# and in FP4 four times that, with scales of blocks or without; the same four fifths.
_BLACKWELL = {"bfloat16": 1800e12, "float16": 1800e12, E4M3: 3600e12, E2M1: 7200e12}
DEVICES = {
    # Data sheet: 4.8e12 bytes/s, of which a copy takes 90 %.
    "h200": Roofs("H200", 4.3e12, _FLOPS),
    # Data sheet: 3.35e12 bytes/s; the same 90 % of it.
    "h100": Roofs("H100", 3.0e12, _FLOPS),
    # Data sheet: 8e12 bytes/s. The device says 3,996 MHz and 7,680 bits, 7.67e12, and 1,965 MHz of
    # its SMs (OpenXLA, target_config/specs/b200.txtpb; torchao, pull request 4002); 90 % of that.
    # L2 gives an SM as many bytes a cycle as Hopper's, an estimate too.
    "b200": Roofs("B200", 6.9e12, _BLACKWELL, l2=7.8e12, sms=148, clock=1.965e9, arch=100),
}
# The words beside the numbers in the page, by dtype for products. "Estimate": no data sheet has it,
# and no result here.
SOURCES: dict[str, str | dict[str, str]] = {
    "copy": "bytes/s of a copy: 90 % of the data sheet's memory bandwidth (B200: of 7.67e12 by "
    "the device's own clock and bus, where the data sheet says 8e12)",
    "flops": {
        "bfloat16": "FLOP/s of a matrix product in bfloat16: 80 % of the data sheet's 989e12 "
        "(B200: 2,250e12, HGX, without sparsity)",
        E4M3: "the same in FP8 and MXFP8: 80 % of the data sheet's, twice bfloat16's",
        E2M1: "the same in NVFP4: 80 % of the data sheet's 9,000e12",
    },
    "l2": "bytes/s from L2 to all SMs: estimate, about 27 bytes a cycle and SM",
    "sms": "SMs: data sheet (SXM; B200: what the device says)",
    "clock": "cycles/s: data sheet's boost clock (B200: the highest that the device says)",
    "ipc": "warp instructions a cycle and SM: estimate for streaming kernels; the limit is 4",
    "launch": "s a launch: estimate, launches back to back on one stream",
    "latency": "s from a tile's first load to its last store, beside its traffic: estimate, a load "
    "from memory and a store",
}


def documents(path: pathlib.Path) -> dict[str, Any]:
    """The suite's documents by name, of a folder of results, or of one's roofline.json.

    Raises ValueError, naming the file, if one cannot be read.
    """
    if path.is_file() and path.name != store.FILE:
        try:
            return {"roofline": store.parse(path.read_text())}
        except ValueError as error:
            raise ValueError(f"{path}: not readable as JSON: {error}") from error
    folder = path if path.is_dir() else path.parent
    return {name: document for name, _, document in store.read(folder)}


def read(roofs: Roofs, path: pathlib.Path) -> Roofs:
    """The rates with those that the suite's stage `roofline` measured.

    Raises ValueError, naming the path, if it holds none.
    """
    try:
        rates = documents(path)["roofline"]["roofline"]
        copy, flops = rates["copy_bytes_per_second"], dict(rates["flops_per_second"])
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(
            "roofs must be a folder of the suite's results or its roofline.json, got "
            f"{path}: {type(error).__name__}: {error}"
        ) from error
    return replace(
        roofs, copy=copy, flops={**roofs.flops, **flops}, measured=("copy", *map(str, flops))
    )
