#!/usr/bin/env python3
"""Files for a machine that takes a few tens of MiB a call and gives back a few files of 16 MiB.

    bench/carry.py wheels --out DIR NAME[==VERSION]...   wheels from the package index, in parts
    bench/carry.py parts --out DIR FILE...               files, in parts
    bench/carry.py join PART... --to DIR                 there: the files of these parts
    bench/carry.py cache CACHE OUT                       there: our kernels of Triton's cache

A part is a folder, part-1, part-2 and so on, smaller than --limit-mib: whole files, or pieces of a
larger file, and parts.json with the digests of all files. It needs Python's standard library alone.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence

MIB = 2**20
KERNELS = pathlib.Path(__file__).parents[1] / "tilewright" / "kernels"
MANIFEST = "parts.json"
# In the same 64 MiB travel the sources of this repository, 11, and the compiled kernels, 7.
PART_MIB = 45
BACK_MIB = 15  # of a file that comes back: 16, less what a compressed file's size is rounded by
BACK_FILES, BACK_TOTAL_MIB = 8, 64
INDEX = ("--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp")
# pip matches the versions of glibc exactly.
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 24, 17)]


def wheels(names: Sequence[str], out: pathlib.Path, limit: int) -> int:
    platforms = [word for p in (*PLATFORMS, "manylinux2014_x86_64") for word in ("--platform", p)]
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", *INDEX, *platforms, "-d", folder]
        if code := subprocess.run([*pip, *names]).returncode:
            return code
        return parts(sorted(pathlib.Path(folder).iterdir()), out, limit)


def parts(files: Iterable[pathlib.Path], out: pathlib.Path, limit: int) -> int:
    """Writes the files into folders of at most `limit` bytes: the largest first, each where there
    is room.
    """
    chunks: list[tuple[str, pathlib.Path, int, int]] = []
    manifest = {}
    for file in files:
        size = file.stat().st_size
        of = max(1, math.ceil(size / limit))
        step = math.ceil(size / of)
        names = [file.name if of == 1 else f"{file.name}.piece-{i + 1}-of-{of}" for i in range(of)]
        chunks += [(n, file, i * step, min(step, size - i * step)) for i, n in enumerate(names)]
        manifest[file.name] = {"sha256": _digest(file), "pieces": names}
    for earlier in out.glob("part-*"):  # which `join` would take for parts of these files
        shutil.rmtree(earlier)
    folders: list[tuple[pathlib.Path, int]] = []
    for name, file, start, size in sorted(chunks, key=lambda chunk: -chunk[3]):
        at = next((i for i, (_, full) in enumerate(folders) if full + size <= limit), len(folders))
        if at == len(folders):
            folders.append((out / f"part-{at + 1}", 0))
            folders[at][0].mkdir(parents=True)
            (folders[at][0] / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        folder, full = folders[at]
        folders[at] = folder, full + size
        with file.open("rb") as source, (folder / name).open("wb") as target:
            source.seek(start)
            target.write(source.read(size))
    for folder, full in folders:
        held = ", ".join(sorted(p.name for p in folder.iterdir() if p.name != MANIFEST))
        print(f"{folder}: {full / MIB:.1f} MiB: {held}")
    return 0


def _digest(file: pathlib.Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def join(folders: Sequence[pathlib.Path], to: pathlib.Path) -> int:
    """Writes the files whose pieces are all in these folders. Exit code 3 if some are missing, 1 if
    a file is not what it was.
    """
    to.mkdir(parents=True, exist_ok=True)
    manifest = {}
    held: dict[str, pathlib.Path] = {}
    for folder in folders:
        manifest |= json.loads((folder / MANIFEST).read_text())
        held |= {p.name: p for p in folder.iterdir()}
    code = 0
    for name, about in manifest.items():
        missing = [piece for piece in about["pieces"] if piece not in held]
        if missing:
            print(f"{name}: not here: {', '.join(missing)}")
            code = code or 3
            continue
        with (to / name).open("wb") as target:
            for piece in about["pieces"]:
                with held[piece].open("rb") as source:
                    shutil.copyfileobj(source, target)
        if _digest(to / name) != about["sha256"]:
            (to / name).unlink()
            print(f"{name}: damaged")
            code = 1
        else:
            print(to / name)
    return code


# ---- Triton's cache


def own_kernels() -> set[str]:
    """The names of this library's Triton kernels."""
    return {
        node.name
        for path in KERNELS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any("jit" in ast.unparse(d) for d in node.decorator_list)
    }


def needed(cache: pathlib.Path) -> list[pathlib.Path]:
    """The files of the cache that our launches read: machine code and its description, and Triton's
    compiled launchers. What torch.compile and other libraries compiled is left out.
    """
    names = own_kernels()
    files = []
    for folder in sorted(p for p in cache.iterdir() if p.is_dir()):
        ours = any(p.stem in names for p in folder.glob("*.cubin"))
        wanted = (".cubin", ".json") if ours else (".so",)
        files += [p for p in sorted(folder.iterdir()) if p.suffix in wanted]
    return files


def cache(source: pathlib.Path, out: pathlib.Path, limit: int) -> int:
    """Packs the cache into OUT, in several files if one would be over the limit, and says what is
    over it.
    """
    whole = out / "triton-cache.tar.gz"
    for old in out.glob(f"{whole.name}*"):
        old.unlink()
    with tarfile.open(whole, "w:gz") as archive:
        for file in needed(source):
            archive.add(file, file.relative_to(source).as_posix())
    data = whole.read_bytes()
    if len(data) > limit:
        starts = range(0, len(data), limit)
        for i, start in enumerate(starts, 1):
            piece = out / f"{whole.name}.{i:02}of{len(starts):02}"
            piece.write_bytes(data[start : start + limit])
        whole.unlink()
    files = {p.name: p.stat().st_size for p in out.iterdir() if p.is_file()}
    for name, size in files.items():
        if size > limit:
            print(f"OVER THE LIMIT: {name} has {size / MIB:.1f} MiB, and at most 16 come back")
    if len(files) > BACK_FILES or sum(files.values()) > BACK_TOTAL_MIB * MIB:
        print(
            f"OVER THE LIMIT: {len(files)} files, {sum(files.values()) / MIB:.1f} MiB; "
            f"{BACK_FILES} and {BACK_TOTAL_MIB} MiB come back"
        )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = p.add_subparsers(dest="command", required=True)
    for name, what in (("wheels", "NAME"), ("parts", "FILE")):
        c = commands.add_parser(name)
        c.add_argument("what", nargs="+", metavar=what)
        c.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
        c.add_argument("--limit-mib", type=float, default=PART_MIB)
    c = commands.add_parser("join")
    c.add_argument("what", nargs="+", type=pathlib.Path, metavar="PART")
    c.add_argument("--to", type=pathlib.Path, required=True, metavar="DIR")
    c = commands.add_parser("cache")
    c.add_argument("what", type=pathlib.Path, metavar="CACHE")
    c.add_argument("out", type=pathlib.Path, metavar="OUT")
    c.add_argument("--limit-mib", type=float, default=BACK_MIB)
    args = p.parse_args(argv)
    if args.command == "join":
        return join(args.what, args.to)
    limit = int(args.limit_mib * MIB)
    if args.command == "cache":
        return cache(args.what, args.out, limit)
    if args.command == "wheels":
        return wheels(args.what, args.out, limit)
    return parts(map(pathlib.Path, args.what), args.out, limit)


if __name__ == "__main__":
    sys.exit(main())
