"""The compile gate's entry for CuTe DSL kernels: facts from a kernel's PTX and cubin."""

from __future__ import annotations

import functools
import pathlib
import re
import struct
import tempfile
from typing import Any

from tilewright import kernels
from tilewright.core import platform
from tilewright.kernels.spec import CuteSpec
from tilewright_lab.gate import kernel_digest, machine_code

ARCHS = (90, 100)  # as in platform.no_cute


def missing() -> str | None:
    return platform.no_cutlass()


def version() -> str:
    from importlib.metadata import version

    return version("nvidia-cutlass-dsl")


def identity(spec: CuteSpec) -> str:
    return repr(
        (
            spec.function.__module__,
            spec.function.__qualname__,
            spec.types,
            spec.min_arch,
            spec.load,
            spec.store,
            sorted(spec.uses.items()),
        )
    )


@functools.cache
def source() -> str:
    """The digest of all CuTe DSL kernel modules. They share functions, so a change in one counts
    for all.
    """
    folder = pathlib.Path(kernels.__file__).parent
    return kernel_digest.of_files([folder / "cute.py", *folder.rglob("*_cute.py")])


def compile(spec: CuteSpec, arch: int) -> tuple[dict[str, Any], bytes]:
    """Returns (registers, local, shared and `machine_code.ptx_facts`; the cubin).

    Spills are part of local, the stack per thread. The architecture is passed explicitly:
    CUTE_DSL_ARCH or a present GPU would set one for all.
    """
    from tilewright.kernels import cute

    with tempfile.TemporaryDirectory() as folder:
        kernel = cute.compiled(
            spec.function, spec.types, arch, f"--keep-ptx --keep-cubin --dump-dir {folder}"
        )
        ptx, cubin = kernel.__ptx__, kernel.__cubin__
    return {**resources(cubin), "shared": shared(ptx), **machine_code.ptx_facts(ptx)}, cubin


def shared(ptx: str) -> int:
    """Bytes of shared memory per block, as the kernel declares them; dynamic shared memory is not
    in PTX.
    """
    if ".extern .shared" in ptx:
        raise ValueError(
            "uses dynamic shared memory, whose size PTX does not tell; use cute.arch.alloc_smem"
        )
    size = 0
    for align, count in re.findall(r"\.shared \.align (\d+) \.b8 \S+\[(\d+)\]", ptx):
        size = -(-size // int(align)) * int(align) + int(count)
    return size


# Attribute numbers in a section .nv.info, each with payload (symbol, value).
REGISTERS, FRAME, STACK = 0x2F, 0x11, 0x12


def resources(cubin: bytes) -> dict[str, int]:
    """registers and local (the larger of frame and stack, in bytes) per thread, from the section
    .nv.info.
    """
    info = next((data for name, data in machine_code.sections(cubin) if name == b".nv.info"), b"")
    values: dict[int, int] = {}
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        # Only form 4 is followed by a payload; the others store it in place of the size.
        if form != 4:
            continue
        if attribute in (REGISTERS, FRAME, STACK) and size == 8:
            values[attribute] = max(
                values.get(attribute, 0), struct.unpack_from("<II", info, at)[1]
            )
        at += size
    if REGISTERS not in values:
        raise RuntimeError("the cubin names no register count")
    return {
        "registers": values[REGISTERS],
        "local": max(values.get(FRAME, 0), values.get(STACK, 0)),
    }
