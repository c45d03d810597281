"""A compiled kernel, from its PTX."""

from __future__ import annotations

import functools
import itertools
import re

import numpy as np

from tilewright_lab.emulator.cluster import Cluster
from tilewright_lab.emulator.counts import Counts, instruction_class
from tilewright_lab.emulator.memory import Memory


def of_one_line(assembly: re.Match) -> str:
    """Inline assembly without its lines of the source: LLVM counts them on from line to line. Its
    labels become others than those of the same assembly elsewhere.
    """
    text = re.sub(r"^\s*\.loc\s[^\n]*", "", assembly[0], flags=re.MULTILINE)
    for label in re.findall(r"^\s*([A-Za-z]\w*):\s", text, flags=re.MULTILINE):
        text = re.sub(rf"(?<![\w$%.]){label}\b", f"${label}_{assembly.start()}", text)
    return text


def _instruction(s: str, local: dict[str, str]) -> tuple:
    """(predicate, whether it is negated, the parts of the name, operands) of a statement.

    local: labels of blocks, which other blocks may have too.
    """
    m = re.match(r"(?:@(!?)(%?\w+) )?(\S+) ?(.*)", s)
    assert m is not None  # s is not empty and begins with no space
    operands = [
        o.strip() for o in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,]+", m[4].replace(", ", ","))
    ]
    operands = [local.get(o, o) if m[3].startswith("bra") else o for o in operands if o]
    return m[2], m[1] == "!", m[3].split("."), operands


class Kernel:
    def __init__(self, ptx: str, dynamic_shared: int = 0):
        """dynamic_shared: bytes of the shared memory whose size is set by the launch, not
        the PTX.
        """
        body = re.sub(r"// begin inline asm.*?// end inline asm", of_one_line, ptx, flags=re.DOTALL)
        body = re.sub(r"//[^\n]*", "", body)
        body = re.sub(r"^(\s*\.loc\s+\d+\s+\d+)[^\n]*", r"\1;", body, flags=re.MULTILINE)
        self.files = {
            int(number): name for number, name in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', ptx)
        }
        outer = re.findall(r"\.extern \.shared \.align \d+ \.b8 (\S+)\[\];", body)
        head, body = body[body.index(".entry") :].split("{", 1)
        body = re.split(r"^\s*\.(?:file|section)\s", body, maxsplit=1, flags=re.MULTILINE)[0]
        lines = [line.strip() for line in head.splitlines()]
        self.parameters = [
            line.split()[-1].rstrip(",").split("[")[0]
            for line in lines
            if line.startswith(".param")
        ]
        threads = re.search(r"\.reqntid (\d+)", head)
        if threads is None:
            raise ValueError("the PTX has no .reqntid")
        self.threads = int(threads[1])
        self.shared, self.shared_size = dict.fromkeys(outer, 1024), 1024 + dynamic_shared
        self.widths = {
            name: 1 if kind == "pred" else int(kind[1:])
            for kind, name in re.findall(r"\.reg \.(\w+)\s+(%[a-z]+)<", body)
        }
        self.code, self.labels, local = [], {}, {}
        self.targets, label = {}, ""  # of brx.idx, by the label of its table
        self.local, self.local_size = {}, 0  # memory of each thread
        self.texts, self.lines, line = [], [], (0, 0)  # per instruction
        for statement in re.split(r"(?<=;)|(?<=:)(?=\s)", body):
            s = " ".join(statement.split()).rstrip(";").lstrip("{} ").strip()
            if m := re.match(r"\.shared \.align (\d+) \.b8 (\S+)\[(\d+)\]", s):
                self.shared_size = -(-self.shared_size // int(m[1])) * int(m[1])
                self.shared[m[2]] = self.shared_size
                self.shared_size += int(m[3])
            elif m := re.match(r"\.local \.align (\d+) \.b8 (\S+)\[(\d+)\]", s):
                self.local_size = -(-self.local_size // int(m[1])) * int(m[1])
                self.local[m[2]] = self.local_size
                self.local_size += int(m[3])
            elif m := re.match(r"\.loc (\d+) (\d+)", s):
                line = int(m[1]), int(m[2])
            elif m := re.match(r"(\$?\w+):$", s):
                if not m[1].startswith(
                    "$"
                ):  # of a block of its own, and there may be others with this name
                    local[m[1]] = f"{m[1]} {len(self.code)}"
                label = m[1]
                self.labels[local.get(label, label)] = len(self.code)
            elif s.startswith(".branchtargets"):
                self.targets[label] = s.split(None, 1)[1].replace(" ", "").split(",")
            elif s and not s.startswith("."):
                self.code.append(_instruction(s, local))
                self.texts.append(s)
                self.lines.append(line)
        self.classes = [instruction_class(op) for _, _, op, _ in self.code]
        self.synchronizes = any(op[0] in ("bar", "barrier") for _, _, op, _ in self.code)
        self.registers = int((re.findall(r"\.maxnreg (\d+)", head) or [0])[0])  # at the start

    @functools.cached_property
    def specialized(self) -> bool:
        """Whether warps run code of their own."""
        return any(op[0] == "setmaxnreg" for _, _, op, _ in self.code)

    @functools.cached_property
    def tensor_memory(self) -> bool:
        """Whether it uses the tensor cores of sm_100."""
        return any(op[0] == "tcgen05" for _, _, op, _ in self.code)

    def where(self, pc: int) -> str:
        """The line of the source that an instruction comes from; empty if the PTX names none."""
        file, line = self.lines[pc]
        return f"{self.files[file]}:{line}" if line and file in self.files else ""

    def run(
        self,
        memory: Memory,
        values: list,
        grid: tuple[int, int, int],
        cluster: int = 1,
        counts: Counts | None = None,
        most: int | None = None,
    ) -> None:
        """most: instructions that a program may execute."""
        named = dict(zip(self.parameters, values, strict=True))
        with np.errstate(all="ignore"):
            for z, y, first in itertools.product(
                range(grid[2]), range(grid[1]), range(0, grid[0], cluster)
            ):
                Cluster(self, memory, named, (first, y, z), cluster, grid, counts, most).run()
