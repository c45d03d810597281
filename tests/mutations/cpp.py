"""Faults of C++: changes of a line, and the build of the one object that has it.

The extension is linked anew from the objects of the last `make build` and the one that has changed,
in the variant that this processor loads; the others keep the right code.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shlex
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator

from .faults import ROOT, Fault, occurrences

SWAPS = {
    "+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "<": "<=", "<=": "<", ">": ">=", ">=": ">",
    "==": "!=", "!=": "==", "&&": "||", "||": "&&", "+=": "-=", "-=": "+=", "*=": "+=",
}  # fmt: skip
OPERATOR = re.compile(r" (\+=|-=|\*=|<=|>=|==|!=|&&|\|\||[-+*/%<>]) ")
NUMBER = re.compile(r"(?<![\w.])(\d+)(?![\w.])")
FLOAT = re.compile(r"(?<![\w.])(\d+\.\d+)f\b")
SMALLER = re.compile(r"\b(?:std::)?(min|max)\(")
# Lines that are no computation: declarations of operators, checks and what they say.
NOT_LINES = re.compile(
    r'^\s*(//|#|\*|template|using|namespace|static_assert|TW_|STABLE_|TORCH_)|m\.(def|impl)\(|"'
)
COMMENT = re.compile(r"\s*//.*$")


def candidates(file: str, text: str) -> Iterator[tuple[str, tuple[str, str, str, str]]]:
    """(kind, (file, old line, new line)) of every change of a line."""
    for line in text.splitlines():
        code = COMMENT.sub("", line)
        if not code.strip() or NOT_LINES.search(code) or "template <" in code or "#include" in code:
            continue
        for kind, start, end, new in changes(code):
            stripped = len(code) - len(code.lstrip())
            yield kind, (file, code[stripped:], code[stripped:start] + new + code[end:], kind)


def changes(code: str) -> Iterator[tuple[str, int, int, str]]:
    for found in OPERATOR.finditer(code):
        yield "operator", *found.span(1), SWAPS[found[1]]
    for found in NUMBER.finditer(code):
        yield "constant", *found.span(1), str(int(found[1]) + 1)
    for found in FLOAT.finditer(code):
        yield "constant", *found.span(1), repr(float(found[1]) * 2 or 1.0)
    for found in SMALLER.finditer(code):
        yield "operator", *found.span(1), {"min": "max", "max": "min"}[found[1]]


def made(file: str, old: str, new: str, kind: str, at: int) -> Fault:
    """at: which of the file's lines that have this text."""
    text = (ROOT / file).read_text()
    places = occurrences(text, old, 0, len(text))
    return Fault("", file, "", old, new, kind, at % len(places), len(places))


def _ninja(variant: str) -> tuple[dict[str, str], pathlib.Path]:
    [file] = (ROOT / "build").glob(f"temp.*/tilewright.{variant}/build.ninja")
    pairs = re.findall(r"^(\w+) = (.*)$", file.read_text(), re.MULTILINE)
    return dict(pairs), file.parent / "csrc/cpu"


def _compile(tree: pathlib.Path, source: pathlib.Path, variant: str, *options: str) -> list[str]:
    said, _ = _ninja(variant)
    flags = said["cflags"].replace(f"-I{ROOT}/csrc", f"-I{tree}/csrc")
    command = [said["cxx"], *shlex.split(flags), str(source), *options]
    return command + shlex.split(said["post_cflags"])


def compiles(fault: Fault) -> bool:
    text = fault.applied((ROOT / fault.file).read_text())
    with tempfile.NamedTemporaryFile("w", suffix=".cpp") as file:
        file.write(text)
        file.flush()
        command = _compile(ROOT, pathlib.Path(file.name), "_C", "-fsyntax-only", "-Werror")
        return subprocess.run(command, capture_output=True).returncode == 0


@contextlib.contextmanager
def built(tree: pathlib.Path, fault: Fault) -> Iterator[None]:
    """The tree's extension, of its sources. Raises RuntimeError if it does not compile."""
    import torch

    # As platform.no_extension loads it.
    variants = {"AVX512": "_C_avx512", "AVX2": "_C_avx2"}
    variant = variants.get(torch.backends.cpu.get_cpu_capability(), "_C")
    objects = _ninja(variant)[1]
    library = tree / "tilewright" / f"{variant}.so"
    changed = tree / "changed.o"
    compile_ = _compile(tree, tree / fault.file, variant, "-o", str(changed))
    others = [
        str(o) for o in sorted(objects.glob("*.o")) if o.stem != pathlib.Path(fault.file).stem
    ]
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    linker = shlex.split(sysconfig.get_config_var("LDCXXSHARED"))
    link = [*linker, str(changed), *others, f"-L{folder}", "-lc10", "-ltorch_cpu", "-ltorch"]
    for command in (compile_, [*link, "-o", f"{library}.new"]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{fault.id} does not compile: {done.stderr[-500:]}")
    before = library.with_suffix(".right")
    os.replace(library, before)
    os.replace(f"{library}.new", library)
    try:
        yield
    finally:
        os.replace(before, library)
        changed.unlink()
