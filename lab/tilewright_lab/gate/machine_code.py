"""Reads facts about a compiled kernel from the text of its PTX and its machine code (SASS).

PTX is what the compiler requested; SASS is what the GPU runs, after ptxas split, merged or spilled.
The disassembler is Triton's nvdisasm. It takes 0.2 s to start, so `disassemble` passes it many
kernels at once, concatenated into one raw binary.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

# Instruction families: how their instructions begin in PTX and in SASS.
#   cluster: a block waits for, or writes into, other blocks of its cluster. Reads of another
#   block's shared memory are generic loads (LD) in SASS, which name no memory space, but no kernel
#   can use them without the barrier.
FAMILIES = {
    "wgmma": (r"wgmma\.mma_async\.", r"[HQIB]GMMA\b"),
    "tcgen05": (r"tcgen05\.mma\.", r"UTC[A-Z]*MMA\b"),
    "mma": (r"mma\.sync\.", r"[HQIOD]MMA\b"),
    # Scales applied by tensor cores. (In machine code, tcgen05's FP8 product has the same name
    # without.)
    "block_scale": (
        r"(?:tcgen05\.mma|mma\.sync)\.[\w.:]*block_scale\b",
        r"UTC[QO]MMA\b|[QO]MMA\.SF\b",
    ),
    "tma": (
        r"cp\.(?:reduce\.)?async\.bulk\.(?:tensor\.|shared::|global\.)",
        r"UTMA(?:LDG|STG|REDG)\b|UBLK(?:CP|RED)\b",
    ),
    "cp.async": (r"cp\.async\.c[ag]\.", r"LDGSTS\b"),
    "cluster": (r"barrier\.cluster\.|st\.async\.|red\.async\.", r"UCGABAR_|STAS\b|REDAS\b"),
    "e4m3": (r"cvt\.rn\.(?:satfinite\.e4m3x2\.f32|f16x2\.e4m3x2)\b", r"F2FP\.[\w.]*\bE4M3\b"),
    "e2m1": (r"cvt\.rn\.(?:satfinite\.e2m1x2\.f32|f16x2\.e2m1x2)\b", r"F2FP\.[\w.]*\bE2M1\b"),
}

# A bulk copy moves multiples of 16 bytes and is not issued per thread: it counts as the widest
# access of a thread.
BULK = 128
PTX_BULK = {
    "ld": r"cp\.async\.bulk\.(?:tensor\.\w+\.)?shared::\w+\.global\b",
    "st": r"cp\.(?:reduce\.)?async\.bulk\.(?:tensor\.\w+\.)?global\.shared::\w+\b",
}
SASS_BULK = {
    "load": r"UTMALDG\b|UBLKCP\.S\.G\b",
    "store": r"UTMASTG\b|UTMAREDG\b|UBLKCP\.G\.S\b|UBLKRED\.G\b",
}

START = r"(?<![\w.])"  # of a PTX instruction


# ---- PTX


def ptx_facts(ptx: str) -> dict[str, Any]:
    """load, store: bits of the widest access to global memory.   uses: keys of FAMILIES."""
    return {
        "load": widest(ptx, "ld"),
        "store": widest(ptx, "st"),
        "uses": tuple(
            name for name, (start, _) in FAMILIES.items() if re.search(f"{START}(?:{start})", ptx)
        ),
    }


def widest(ptx: str, op: str) -> int:
    """Bits of the widest `ld.global` or `st.global` in PTX; asynchronous copies count as loads or
    stores.
    """
    found = [0]
    for modifiers in re.findall(rf"{START}{op}\.(?:\w+\.)*global([.\w:]*)", ptx):
        vector = re.search(r"\.v(\d)\b", modifiers)
        element = re.search(r"\.[busf](\d+)$", modifiers)
        found.append(int(element[1] if element else 0) * int(vector[1] if vector else 1))
    if op == "ld":
        copies = re.findall(r"cp\.async\.c\w\.shared\S*\s*\[[^]]*\],\s*\[[^]]*\],\s*(\w+)", ptx)
        found += [8 * int(n, 0) for n in copies]
    if re.search(START + PTX_BULK[op], ptx):
        found.append(BULK)
    return max(found)


# ---- SASS

# `/*02e0*/  @!P0 LDG.E.128 R4, ... ;` as printed by cuobjdump and nvdisasm; the offset is in bytes.
INSTRUCTION = re.compile(
    r"^[ \t]*/\*[0-9a-f]{4,}\*/[ \t]+(?:@!?U?P\w+[ \t]+)?([A-Z][\w.]*)", re.MULTILINE
)
GLOBAL = {"load": re.compile(r"(?:LDG|LDGSTS)\."), "store": re.compile(r"STG\.")}


def sass_facts(text: str) -> dict[str, Any]:
    """Facts from a listing.

    sass_load, sass_store: bits of the widest access to global memory.
    sass_uses: keys of FAMILIES.
    wide_loads, wide_stores: percent of loaded or stored bytes, each instruction counted once, that
        instructions of 128 bits or more move; 100 if threads load or store none. With a budget for
        it, one stray wide access cannot hide a narrow loop.
    local_instructions: loads and stores of local memory.
    instructions: up to the last EXIT, which the slow paths of division and the like follow: those
        that a thread executes if nothing loops.
    """
    names = INSTRUCTION.findall(text)
    found: dict[str, Any] = {
        "local_instructions": sum(re.match(r"(?:LDL|STL)\b", n) is not None for n in names)
    }
    found["instructions"] = 1 + max(
        (i for i, n in enumerate(names) if n.startswith("EXIT")), default=-1
    )
    for kind, start in GLOBAL.items():
        widths = [_width(n) for n in names if start.match(n)]
        wide = sum(w for w in widths if w >= 128)
        found[f"wide_{kind}s"] = 100 * wide // sum(widths) if widths else 100
        bulk = any(re.match(SASS_BULK[kind], n) for n in names)
        found[f"sass_{kind}"] = max([BULK if bulk else 0, *widths])
    found["sass_uses"] = tuple(
        family for family, (_, start) in FAMILIES.items() if any(re.match(start, n) for n in names)
    )
    return found


def _width(name: str) -> int:
    """Bits of an access, such as LDG.E.U16, LDG.E, LDG.E.LTC128B.64 (a cache hint, then the width)
    or STG.E.ENL2.256.
    """
    parts = name.split(".")
    for part, bits in (
        ("256", 256),
        ("128", 128),
        ("64", 64),
        ("U16", 16),
        ("S16", 16),
        ("U8", 8),
        ("S8", 8),
    ):
        if part in parts:
            return bits
    return 32


@functools.cache
def cannot_disassemble(arch: int) -> str | None:
    """None if there is a disassembler for this architecture, else the reason."""
    tool = _nvdisasm()
    if tool is None:
        return "no nvdisasm (Triton brings one)"
    known = subprocess.run([tool, "--help"], capture_output=True, text=True, check=False).stdout
    return (
        None if f"'{_machine(arch)}'" in known else f"this nvdisasm does not know {_machine(arch)}"
    )


def disassemble(cubins: Sequence[bytes], arch: int) -> list[str]:
    """The SASS of each cubin; all must be for this architecture."""
    if reason := cannot_disassemble(arch):
        raise RuntimeError(f"cannot disassemble: {reason}")
    codes = [_code(c) for c in cubins]
    if not any(codes):  # nvdisasm rejects an empty file
        return [""] * len(codes)
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        run = subprocess.run(  # pyright: ignore[reportCallIssue] (`_nvdisasm` is there: see above)
            [_nvdisasm(), "--binary", _machine(arch), "--no-dataflow", file.name],  # pyright: ignore[reportArgumentType] (the same)
            capture_output=True,
            text=True,
            check=False,
        )
    if run.returncode:
        raise RuntimeError(f"nvdisasm failed: {run.stderr.strip()[:300]}")
    lines = [m[0] for m in re.finditer(r"^[ \t]*/\*[0-9a-f]{4,}\*/.*$", run.stdout, re.MULTILINE)]
    sizes = [len(c) // 16 for c in codes]  # an instruction has 16 bytes since Volta
    if len(lines) != sum(sizes):
        raise RuntimeError(f"nvdisasm printed {len(lines)} instructions of {sum(sizes)}")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return ["\n".join(lines[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _machine(arch: int) -> str:
    # "a": kernels use architecture-specific instructions.
    return f"SM{arch}a" if arch >= 90 else f"SM{arch}"


def _nvdisasm() -> str | None:
    triton = importlib.util.find_spec("triton")
    if triton is None or not triton.submodule_search_locations:
        return None
    path = pathlib.Path(triton.submodule_search_locations[0]) / "backends/nvidia/bin/nvdisasm"
    return str(path) if path.exists() else None


def _code(cubin: bytes) -> bytes:
    """The sections .text.<function> of a cubin."""
    return b"".join(data for name, data in sections(cubin) if name.startswith(b".text."))


def sections(cubin: bytes) -> list[tuple[bytes, bytes]]:
    """Name and contents of each section of a 64-bit ELF file."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a cubin: no 64-bit ELF header")
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    strings = headers[names][4]
    return [
        (
            cubin[strings + name : cubin.index(b"\0", strings + name)],
            cubin[offset : offset + length],
        )
        for name, _, _, _, offset, length in headers
    ]
