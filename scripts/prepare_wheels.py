"""Carries the wheels of a benchmark's peers to a machine that reaches no package registry.

    python scripts/prepare_wheels.py download --out .wheels --python 3.12 --limit-mib 40 python3
    scripts/prepare_wheels.py install .wheels/part-01 [PART ...] --into /tmp/wheels --target
    /tmp/site . /tmp/site/env.sh

`download` fetches the wheels and lays them in folders part-01, part-02, ... of at most the limit
each, for a carrier that takes only so much at a time; a larger file is cut into pieces. `install`
takes the parts in any order and in any
number of calls: exit code 3 says that pieces are still missing, 0 that all was there and is
installed. Needs Python 3.11 or later and pip, and nothing else.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

FORMAT = 1
MIB = 2**20
# of all wheels: a limit that asks for more was mistyped, and each piece is a manifest's line
PIECES_AT_MOST = 1000
INCOMPLETE = 3  # exit code of an install that waits for more parts

# Versions are named, so that a benchmark can be repeated. The DSL's "cu13" is its compiler for CUDA
# 13.
PEERS = (
    "liger-kernel==0.8.5",
    "bitsandbytes==0.50.2",
    "quack-kernels==0.6.5",
    "flash-attn-4==4.0.0b36",
    "nvidia-cutlass-dsl[cu13]==4.8.1",
)

# Packages that have pre-releases only, which pip takes when asked to.
PRE_RELEASES = frozenset({"flash-attn-4"})

# What the target machine has, of what the peers need: torch 2.11 for CUDA 13.0, triton 3.6,
# transformers 5, and what these bring along. Not carried, and never replaced there: another torch
# would be another benchmark.
ON_TARGET = frozenset(
    {
        "cuda-bindings",
        "einops",
        "numpy",
        "packaging",
        "protobuf",
        "safetensors",
        "torch",
        "transformers",
        "triton",
        "typing-extensions",
    }
)

# Needed by name and not in fact: the DSL's compiler for CUDA 12, 90 MB, which "cu13" replaces.
LEFT_OUT = frozenset({"nvidia-cutlass-dsl-libs-cu12"})

# pip matches a platform tag exactly, so each glibc up to the target's 2.39 is named, the newest
# first.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)),
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
)


class Problem(Exception):
    """Something that the caller can put right; the message says what."""


# ---- requirements


@dataclass(frozen=True)
class Requirement:
    name: str
    extras: tuple[str, ...]
    specifier: str
    marker: str


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(text: str) -> Requirement:
    """`name[extra,...] (specifier) ; marker`, the form of METADATA and of a command line."""
    found = re.fullmatch(r"\s*([\w.-]+)\s*(?:\[([^\]]*)\])?\s*\(?([^;()]*)\)?\s*(?:;(.*))?", text)
    if not found:
        raise Problem(f"cannot read the requirement {text!r}")
    name, extras, specifier, marker = found.groups(default="")
    return Requirement(
        canonical(name),
        tuple(e.strip() for e in extras.split(",") if e.strip()),
        specifier.replace(" ", ""),
        marker.strip(),
    )


def applies(marker: str, python: str, extras: tuple[str, ...]) -> bool:
    """Whether a requirement's marker holds on the target: CPython on 64-bit x86 Linux.

    Reads comparisons joined by `and` and `or`; raises Problem for one that it does not know, rather
    than guess.
    """
    values = {
        "python_version": python,
        "python_full_version": python,
        "sys_platform": "linux",
        "os_name": "posix",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    tokens = re.findall(
        r"\(|\)|\band\b|\bor\b|[\w.]+\s*(?:===?|!=|>=|<=|~=|>|<|\bnot\s+in\b|\bin\b)\s*"
        r"(?:'[^']*'|\"[^\"]*\")",
        marker,
    )
    if re.sub(r"\s", "", "".join(tokens)) != re.sub(r"\s", "", marker):
        raise Problem(f"cannot read the marker {marker!r}")

    def compare(text):
        key, op, value = re.fullmatch(
            r"([\w.]+)\s*([^\w\s'\"]+|not\s+in|in)\s*['\"](.*)['\"]", text
        ).groups()
        if key == "extra" and op == "==":
            return canonical(value) in map(canonical, extras)
        if key not in values:
            raise Problem(f"cannot read the marker {marker!r}: {key} is not known")
        mine = values[key]
        if op == "in":
            return mine in value
        if op.startswith("not"):
            return mine not in value
        if op in ("==", "==="):
            return mine == value
        if op == "!=":
            return mine != value
        if not key.startswith("python") or op == "~=":
            raise Problem(f"cannot read the marker {marker!r}: {op} of {key} is not known")
        a, b = (tuple(map(int, v.split("."))) for v in (mine, value))
        return {">=": a >= b, "<=": a <= b, ">": a > b, "<": a < b}[op]

    def either():
        value = both()
        while tokens and tokens[0] == "or":
            tokens.pop(0)
            value = both() or value
        return value

    def both():
        value = one()
        while tokens and tokens[0] == "and":
            tokens.pop(0)
            value = one() and value
        return value

    def one():
        token = tokens.pop(0)
        if token != "(":
            return compare(token)
        value = either()
        tokens.pop(0)
        return value

    return either() if marker else True


def needs(wheel: pathlib.Path) -> list[Requirement]:
    """What a wheel's METADATA asks for."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        metadata = email.message_from_bytes(archive.read(name))
    return [parse(text) for text in metadata.get_all("Requires-Dist") or ()]


# ---- download


def fetch(requirement: str, name: str, python: str, folder: pathlib.Path) -> pathlib.Path:
    """The wheel of one requirement for the target, and of nothing that it needs."""
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--implementation",
            "cp",
            "--python-version",
            python,
            *(word for p in PLATFORMS for word in ("--platform", p)),
            *(["--pre"] if name in PRE_RELEASES else []),
            "--dest",
            aside,
            requirement,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        found = list(pathlib.Path(aside).glob("*.whl"))
        if done.returncode or len(found) != 1:
            raise Problem(
                f"pip found no wheel of {requirement} for Python {python}:\n{done.stderr.strip()}"
            )
        return found[0].rename(folder / found[0].name)


def gather(
    requirements: list[str],
    python: str,
    folder: pathlib.Path,
    fetch: Callable[[str, str, str, pathlib.Path], pathlib.Path] = fetch,
) -> list[pathlib.Path]:
    """Wheels of the requirements and of what these need and the target lacks, in `folder`.

    A package that several wheels need is fetched again when a further one narrows its versions.
    """
    specifiers: dict[str, set[str]] = {}
    extras: dict[str, set[str]] = {}
    fetched: dict[str, tuple[frozenset[str], pathlib.Path]] = {}
    waiting = [parse(r) for r in requirements]
    while waiting:
        for r in waiting:
            specifiers.setdefault(r.name, set()).update(s for s in r.specifier.split(",") if s)
            extras.setdefault(r.name, set()).update(r.extras)
        waiting = []
        for name, wanted in list(specifiers.items()):
            asked = frozenset(wanted | {f"[{e}]" for e in extras[name]})
            before = fetched.get(name)
            if before and before[0] == asked:
                continue
            wheel = fetch(name + ",".join(sorted(wanted)), name, python, folder)
            fetched[name] = asked, wheel
            print(f"  {wheel.name}  {wheel.stat().st_size / MIB:.1f} MiB", flush=True)
            waiting += [
                r
                for r in needs(wheel)
                if r.name not in ON_TARGET | LEFT_OUT
                and applies(r.marker, python, tuple(extras[name]))
            ]
    return sorted(wheel for _, wheel in fetched.values())


def download(out: pathlib.Path, python: str, limit: int, requirements: list[str]) -> int:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as aside:
        wheels = gather(requirements, python, pathlib.Path(aside))
        parts = pack(wheels, out, limit)
    for part in parts:
        print(
            f"{part}: {size(part)} of {limit} bytes: "
            + ", ".join(sorted(p.name for p in part.iterdir() if p.name != "manifest.json"))
        )
    return 0


# ---- parts


def digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size(part: pathlib.Path) -> int:
    return sum(p.stat().st_size for p in part.iterdir())


def plan(wheels: list[tuple[str, int]], room: int) -> list[list[tuple[str, int, int, int, int]]]:
    """Parts of at most `room` bytes: lists of (wheel, piece from 1, pieces, offset, bytes).

    The largest first, each where it still fits; a wheel beyond `room` is cut into pieces of `room`.
    """
    pieces = []
    for name, length in wheels:
        count = max(1, -(-length // room))
        pieces += [
            (name, i + 1, count, i * room, min(room, length - i * room)) for i in range(count)
        ]
    parts: list[list[tuple]] = []
    used: list[int] = []
    for piece in sorted(pieces, key=lambda p: -p[4]):
        at = next((i for i, u in enumerate(used) if u + piece[4] <= room), len(parts))
        if at == len(parts):
            parts.append([])
            used.append(0)
        parts[at].append(piece)
        used[at] += piece[4]
    return parts


def slices(wheel: pathlib.Path, offset: int, length: int) -> Iterator[bytes]:
    with wheel.open("rb") as file:
        file.seek(offset)
        while length > 0 and (block := file.read(min(MIB, length))):
            length -= len(block)
            yield block


def manifests(wheels: list[pathlib.Path], room: int) -> list[tuple[list[tuple], bytes]]:
    """Each part's pieces, and its manifest.

    A manifest lists the pieces of all parts, so that whoever has one knows what is missing, and
    where it is.
    """
    whole = {w.name: (w, w.stat().st_size, digest(w)) for w in wheels}
    parts = plan([(name, length) for name, (_, length, _) in whole.items()], room)
    files = []
    for number, pieces in enumerate(parts, 1):
        for name, piece, count, offset, length in pieces:
            wheel, total, sha256 = whole[name]
            if count == 1:
                own = sha256
            else:
                hashed = hashlib.sha256()
                for block in slices(wheel, offset, length):
                    hashed.update(block)
                own = hashed.hexdigest()
            files.append(
                {
                    "file": name if count == 1 else f"{name}.piece-{piece}-of-{count}",
                    "part": f"part-{number:02}",
                    "wheel": name,
                    "piece": piece,
                    "pieces": count,
                    "size": length,
                    "sha256": own,
                    "wheel_size": total,
                    "wheel_sha256": sha256,
                }
            )
    files.sort(key=lambda f: (f["wheel"], f["piece"]))
    return [
        (
            pieces,
            json.dumps(
                {"format": FORMAT, "part": f"part-{number:02}", "files": files}, indent=0
            ).encode(),
        )
        for number, pieces in enumerate(parts, 1)
    ]


def pack(wheels: list[pathlib.Path], out: pathlib.Path, limit: int) -> list[pathlib.Path]:
    """Writes the parts, manifests included, each of at most `limit` bytes. Replaces the parts
    that `out` holds.
    """
    if not wheels:
        raise Problem("there are no wheels to pack")
    manifest = 0  # bytes; how many there are is known only once it is known what they describe
    total = sum(w.stat().st_size for w in wheels)
    while True:
        if limit <= manifest or total // (limit - manifest) > PIECES_AT_MOST:
            raise Problem(
                f"parts of {limit} bytes are too small for {total} bytes of wheels and a manifest "
                f"in each"
            )
        made = manifests(wheels, limit - manifest)
        largest = max(len(text) for _, text in made)
        if largest <= manifest:
            break
        manifest = largest
    by_name = {w.name: w for w in wheels}
    with tempfile.TemporaryDirectory(dir=out) as aside:
        for number, (pieces, text) in enumerate(made, 1):
            part = pathlib.Path(aside, f"part-{number:02}")
            part.mkdir()
            for name, piece, count, offset, length in pieces:
                with (part / (name if count == 1 else f"{name}.piece-{piece}-of-{count}")).open(
                    "wb"
                ) as file:
                    file.writelines(slices(by_name[name], offset, length))
            (part / "manifest.json").write_bytes(text)
        for old in out.glob("part-[0-9]*"):
            shutil.rmtree(old)
        return [part.rename(out / part.name) for part in sorted(pathlib.Path(aside).iterdir())]


# ---- install


def read(path: pathlib.Path) -> dict:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Problem(f"{path}: not readable as a manifest: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise Problem(f"{path}: not a manifest of format {FORMAT}")
    return document


def arrived(path: pathlib.Path, length: int, sha256: str) -> bool:
    return path.is_file() and path.stat().st_size == length and digest(path) == sha256


def aside(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def copy(sources: list[pathlib.Path], to: pathlib.Path, sha256: str) -> None:
    """Sources one after the other, beside `to` and then renamed. Raises Problem if that is not
    what was packed.
    """
    beside = aside(to)
    try:
        with beside.open("wb") as file:
            for source in sources:
                with source.open("rb") as opened:
                    shutil.copyfileobj(opened, file, MIB)
        if (actual := digest(beside)) != sha256:
            raise Problem(
                f"{sources[0] if len(sources) == 1 else to}: corrupt: expected sha256 {sha256}, "
                f"actual {actual}"
            )
        beside.replace(to)
    finally:
        beside.unlink(missing_ok=True)


def collect(parts: list[pathlib.Path], into: pathlib.Path) -> tuple[list[pathlib.Path], list[dict]]:
    """Brings what the parts hold into `into`: the wheels that are whole, and the pieces that
    are missing.
    """
    into.mkdir(parents=True, exist_ok=True)
    known = into / "manifest.json"
    given = [(part, read(part / "manifest.json")) for part in parts]
    first, files = (
        (known, read(known)["files"]) if known.exists() else (given[0][0], given[0][1]["files"])
    )
    for part, document in given:
        if document["files"] != files:
            raise Problem(
                f"{part} belongs to another set of wheels than {first}; take the parts of one "
                f"download, and "
                f"an empty folder for --into"
            )
    if not known.exists():
        beside = aside(known)
        beside.write_text(json.dumps({"format": FORMAT, "part": None, "files": files}, indent=0))
        beside.replace(known)

    wheels: dict[str, list[dict]] = {}
    for file in files:
        wheels.setdefault(file["wheel"], []).append(file)
    folders = {document["part"]: part for part, document in given}
    whole, missing = [], []
    for name, pieces in wheels.items():
        wheel, sha256 = into / name, pieces[0]["wheel_sha256"]
        if not arrived(wheel, pieces[0]["wheel_size"], sha256):
            lacking = []
            for f in pieces:
                at = into / f["file"]
                if arrived(at, f["size"], f["sha256"]):
                    continue
                source = folders[f["part"]] / f["file"] if f["part"] in folders else None
                if source is None or not source.exists():
                    lacking.append(f)
                else:
                    copy([source], at, f["sha256"])
            missing += lacking
            if lacking:
                continue
            if len(pieces) > 1:
                copy([into / f["file"] for f in pieces], wheel, sha256)
        if len(pieces) > 1:
            for f in pieces:
                (into / f["file"]).unlink(missing_ok=True)
        whole.append(wheel)
    return whole, missing


def search_path(target: pathlib.Path) -> list[str]:
    """What PYTHONPATH must hold for a folder that pip filled: .pth files, which Python reads in its
    own site-packages alone, add folders too.
    """
    script = (
        "import site, sys; known = list(sys.path); site.addsitedir(sys.argv[1]); "
        "print(*(p for p in sys.path if p not in known), sep='\\n')"
    )
    # Without the packages of this Python, among which the same ones might be, and already on the
    # path.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, str(target)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = done.stdout.split("\n")
    return [str(target), *(p for p in found if p and p != str(target))]


def install(parts: list[pathlib.Path], into: pathlib.Path, target: pathlib.Path | None) -> int:
    """target: gets site-packages, and env.sh that puts it on Python's path. None joins the wheels
    only.

    The folder must have that name: quack tells installed code by it, and refuses to be imported
    beside a DSL that it takes for somebody's own.
    """
    whole, missing = collect(parts, into)
    print(f"{len(whole)} wheels are whole in {into}")
    if missing:
        for f in missing:
            print(f"missing: {f['file']} of {f['part']}")
        return INCOMPLETE
    if target is None:
        return 0
    target = target.resolve()
    packages = target / "site-packages"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--no-cache-dir",
            "--upgrade",
            "--target",
            str(packages),
            *map(str, whole),
        ]
    )
    if done.returncode:
        raise Problem(f"pip exited with {done.returncode}")
    env = target / "env.sh"
    beside = aside(env)
    folders = shlex.quote(os.pathsep.join(search_path(packages)))
    beside.write_text(f'export PYTHONPATH={folders}"${{PYTHONPATH:+:$PYTHONPATH}}"\n')
    beside.replace(env)
    print(f"installed into {packages}; to use it:  . {env}")
    return 0


# ---- command


def mebibytes(text: str) -> int:
    value = int(float(text) * MIB)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text!r}")
    return value


def version(text: str) -> str:
    if not re.fullmatch(r"3\.\d+", text):
        raise argparse.ArgumentTypeError(f"must be like 3.12, got {text!r}")
    return text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("download", help="fetch the wheels and lay them in parts")
    one.add_argument(
        "requirements", nargs="*", metavar="NAME==VERSION", help=f"instead of {', '.join(PEERS)}"
    )
    one.add_argument(
        "--out", type=pathlib.Path, required=True, help="folder for part-01, part-02, ..."
    )
    one.add_argument(
        "--python", type=version, default="3.12", help="the target's Python (default 3.12)"
    )
    one.add_argument(
        "--limit-mib",
        type=mebibytes,
        default=40 * MIB,
        dest="limit",
        help="most that one part may hold, its manifest included (default 40)",
    )
    two = commands.add_parser(
        "install", help="join parts and install what they hold, once all have come"
    )
    two.add_argument("parts", nargs="+", type=pathlib.Path, metavar="PART")
    two.add_argument(
        "--into", type=pathlib.Path, required=True, help="folder that collects the wheels"
    )
    two.add_argument("--target", type=pathlib.Path, help="folder for site-packages and env.sh")
    two.add_argument("--no-install", action="store_true", help="join the wheels only")
    args = parser.parse_args(argv)
    if args.command == "install" and not (args.target or args.no_install):
        parser.error("install needs --target, or --no-install")
    try:
        if args.command == "download":
            return download(args.out, args.python, args.limit, args.requirements or list(PEERS))
        return install(args.parts, args.into, None if args.no_install else args.target)
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
