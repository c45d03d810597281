"""Faults planted in Triton kernels (tests/tools/faulty_kernels.py) for `tilewright emulate` and
`tilewright gate`: each has what is found, and where. And kernels that are right.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator

import forked

ROOT = pathlib.Path(__file__).parents[2]
HERE = "tests/tools/faulty_kernels.py"
ROWS = "--arg 'x=tensor(f32, [3, 40])'"
LANES = "--arg 'x=tensor(f32, [128])'"
ROW = "--arg 'x=tensor(f32, [200])'"
FIFTH = "--arg 'x=tensor(bf16, [128, 64])' --arg 'y=tensor(bf16, [128, 64])' --arch 100"
TWO = f"{ROW} --arg 'y=tensor(f32, [200])'"

# command: what its output has.
RIGHT = {
    "emulate shifted --arg 'x=tensor(f32, [257])' --reference plain_shifted": ["error out 0: none"],
    "emulate add_on_cuda": ["_add  ", "sm_90: 1 launch, no breaks"],
    "emulate add --arg 'x=tensor(bf16, [200])' --arg 'y=tensor(bf16, [200], ones)' "
    "--reference plain_add": ["error out 0: "],
    "emulate _add --inputs for_the_kernel --constexpr BLOCK=64 --grid 'cdiv(n, BLOCK)' "
    "--num-warps 2 --reference by_name --arch 100": ["_add  ", " 4  ", "  64  ", "error out_ptr: "],
    "emulate less_shared --arg 'x=tensor(f32, [128])'": ["     32      16 "],  # the last, the most
    f"emulate sets_first {ROW}": ["no breaks"],
    f"emulate doubled {ROW} --backward --reference twice": ["error grad x: ", "2 launches"],
    "emulate total --arg 'x=tensor(f32, [512])' --reference plain_total": ["error out 0: "],
    "emulate reverse --arg 'x=tensor(f32, [128])' --reference plain_reverse": ["error out 0: "],
    "emulate functions --arg 'x=tensor(f32, [256])' --reference plain_functions": ["error out 0: "],
    "emulate product --arg 'x=tensor(e4m3, [64, 64])' --arg 'y=tensor(e4m3, [64, 64])' "
    "--reference plain_product": ["error out 0: "],
    "emulate product --arg 'x=tensor(bf16, [128, 128])' --arg 'y=tensor(bf16, [128, 128])' "
    "--reference plain_product --arch 100": ["error out 0: ", "sm_100: 1 launch, no breaks"],
    f"emulate tuned {ROW}": ["no breaks"],
    "emulate masked_afterwards --arg 'x=tensor(bf16, [2, 50])'": ["no breaks"],
    "emulate sum_of_masked --arg 'x=tensor(bf16, [2, 50])' --allow undefined": [
        "allowed undefined: out 0 changes with what a masked load without `other` gives",
    ],
    "emulate normed --arg 'x=tensor(bf16, [3, 4096])' --reference plain_normed": ["error out 0: "],
    f"emulate reads_unset {ROW} --allow uninitialized": ["allowed uninitialized: reads y_ptr[0]"],
    f"emulate add {TWO} --reference interpreter": ["error out 0: none"],
    f"emulate with_sum {ROW} --backward --reference plain_with_sum": ["error grad x: none"],
    f"emulate stores_the_same {TWO} --reference interpreter": ["error x: none", "error y: none"],
    "emulate one_place --allow race --reference the_last": [
        "allowed race: writes out_ptr[0]",
        "error out 0: none",
        "1 launch, no breaks",
    ],
    f"emulate handed {LANES} --reference twice": ["error out 0: none"],
    f"emulate in_tensor_memory {FIFTH} --reference plain_rows_product": ["error out 0: "],
    f"emulate FOLDER/late.py:late {TWO}": ["_add  ", "1 launch, no breaks"],
    "gate fill --arch 90 --min-load 128": [
        "for sm_90  registers",
        "\n_fill      ",
        "1 kernel, 1 compilation, no breaks",
    ],
    f"gate in_clusters {ROW} --arch 90": ["  cluster\n"],
    f"gate tuned {ROW} --configs all --arch 90": ["_tuned #2", "2 kernels, 2 compilations"],
    "gate _add --inputs for_the_kernel --arg n=1024 --constexpr BLOCK=1024 --min-load 128 "
    "--max-registers 64 --no-spills --no-stack": ["128/128", "3 compilations, no breaks"],
}
# command: patterns of its output, the finding with its cause; {text} stands for the line of
# faulty_kernels.py that has this text.
PLANTS = {
    # memory
    f"emulate to_the_next_row {ROWS}": [
        r"BREAK bounds: writes just past the end of out_ptr \[3, 40\], .*{one too far}",
    ],
    f"emulate out_of_its_view {ROWS}": [
        r"BREAK bounds: writes just past the end of out_ptr \[3, 40\], .*{one too far}",
    ],
    f"emulate reads_on {ROWS}": [
        r"BREAK bounds: reads just past the end of x_ptr \[3, 40\], in 48 of 128 threads .*"
        r"program \(2, 0, 0\), .*{of the last one past the end}",
    ],
    f"emulate sums_rows {ROWS}": [
        r"BREAK race: reads out_ptr\[0\], which block 0 of the grid writes .*{no atomic}",
    ],
    "emulate by_scratch --arg 'x=tensor(f32, [256])'": [
        r"BREAK race: reads scratch_ptr\[\d+\], which another thread of the program writes .*"
        r"{no barrier}",
    ],
    f"emulate handed_too_soon {LANES}": [
        r"BREAK race: \w+ shared memory that another warp .* with no barrier between that both "
        r"have passed .*faulty_kernels.py:\d",
    ],
    f"emulate in_tensor_memory_too_soon {FIFTH}": [
        r"BREAK race: reads tensor memory that tensor cores may still access: nobody has waited "
        r"for a tcgen05\.commit since .*{total.load(of_row)}",
    ],
    # sums in bfloat16
    "emulate normed_in_bfloat16 --arg 'x=tensor(bf16, [1, 16384])' --reference plain_normed": [
        r"BREAK out 0: row 0 is 1\.\d+ times the right one, .* not accumulated in float32"
    ],
    "emulate normed_in_bfloat16 --arg 'x=tensor(bf16, [3, 4096])' "
    "--reference plain_normed_in_float32": [
        r"BREAK out 0: row \d is \d\.\d+ times the right one, .* not accumulated in float32"
    ],
    # and others
    "emulate sum_of_masked --arg 'x=tensor(bf16, [2, 50])'": [
        r"BREAK undefined: out 0 changes with what a masked load without `other` gives .*"
        r"\(_sum_of_masked, \S*faulty_kernels.py:\d"
    ],
    "emulate least_of_masked --arg 'x=tensor(f32, [2, 50])'": [
        r"BREAK undefined: out 0 changes .*\(_least_of_masked, \S*faulty_kernels.py:\d"
    ],
    "emulate least_of_masked --arg 'x=tensor(i32, [2, 50], randint(-9, 9))'": [
        r"BREAK undefined: out 0 changes .*\(_least_of_masked, \S*faulty_kernels.py:\d"
    ],
    "emulate normed_in_bfloat16 --arg 'x=tensor(bf16, [3, 4096])' --reference plain_normed": [
        r"BREAK out 0: row \d is \d\.\d+ times the right one, .* not accumulated in float32"
    ],
    f"emulate no_mask {ROW}": [
        r"BREAK bounds: reads just past the end of x_ptr \[200\], in 56 of 128 threads "
        r"\(the first: 72\) \(_no_mask, program \(1, 0, 0\), \S*faulty_kernels.py:{the mask is missing}"
    ],
    "emulate says_aligned --arg 'x=tensor(f32, [3, 513])'": [
        r"BREAK alignment: reads 16 bytes at x_ptr\[1, 0\], whose address is no multiple of 16"
    ],
    "emulate one_place": [
        r"BREAK race: writes out_ptr\[0\], which block 0 of the grid writes another value to"
    ],
    "emulate shift --arg 'x=tensor(f32, [257])'": [
        r"BREAK race: writes x_ptr\[64\], which another thread of the program reads .*"
        r"faulty_kernels.py:{another thread may not}"
    ],
    "emulate gather --inputs every_32nd --reference plain_gather --max-conflicts 0": [
        r"224 bank conflicts of _gather at \S*faulty_kernels.py:{tl.gather}",
        r"BREAK limit: has 224 bank conflicts, most of them at \S*; accepted: 0",
        "error out 0: none",
    ],
    "emulate column --arg 'x=tensor(f32, [128, 40])' --max-sectors 1.5": [
        r"BREAK limit: has 8.00 times the sectors read that its bytes need, most of them at "
        r"\S*faulty_kernels.py:{at \* stride}; accepted: 1.5"
    ],
    f"emulate reads_unset {ROW} --json": [
        r"BREAK uninitialized: reads y_ptr\[0\], which nothing has written \(_add, "
    ],
    f"emulate in_part {TWO}": [
        r"BREAK uninitialized: out 0 \[200\] is returned with 100 elements that nothing wrote"
    ],
    f"emulate tripled {ROW} --backward --reference twice": [r"BREAK grad x: 5\.00e-01 at"],
    "emulate add --inputs some_inputs --reference plain_subtract": [
        r"BREAK out 0: \d\.\d\de\+00 at \[\d+\], accepted \d\.\d\de-0[67]"
    ],
    "emulate adds_two_percent --arg 'x=tensor(bf16, [200])' --arg 'y=tensor(bf16, [200])' "
    "--reference plain_add": [r"BREAK out 0: 2\.\d\de-02 at \[\d+\], accepted \d\.\d\de-0[23]"],
    "emulate races_on --allow race": [
        r"allowed race: writes out_ptr\[0\], which block 0 of the grid writes another value to",
        r"BREAK bounds: writes just past the end of out_ptr \[3\], .*{one program too many}",
        "1 launch, 1 break",
    ],
    "emulate waits --max-instructions 500": [
        r"BREAK limit: has executed 500 instructions and not ended; .* \(_waits, program "
        r"\(0, 0, 0\), \S*faulty_kernels.py:{for a later program}"
    ],
    "emulate add --arg 'x=tensor(f16, [200], 60000)' --arg 'y=tensor(f16, [200])' "
    "--reference squared": [
        "BREAK out 0: the error of the reference in float16 is infinite, and sets no bound"
    ],
    f"emulate forgets_y {TWO} --backward --reference plain_added": [
        "error grad x: none",
        "BREAK grad y: the reference has it, and the call gives none",
    ],
    f"emulate added {TWO} --backward --reference of_x": [r"BREAK grad y: \d\.\d\de\+\d+ at"],
    **{
        f"emulate FOLDER/{copy}/copied.py:reads_on {ROWS}": [
            rf"BREAK bounds: .*{copy}/copied\.py:\d"
        ]
        for copy in ("one", "two")
    },
    f"emulate tuned {ROW} --configs all": [r"BREAK bounds: reads just past the end of x_ptr"],
    "gate spills --arg 'x=tensor(f32, [16384])' --no-spills --arch 90": [
        r"BREAK _spills sm_90: has \d+ bytes spilled a thread; accepted: 0"
    ],
    "gate too_much --arg 'x=tensor(f32, [128, 128])' --max-registers 10 --arch 90 --arch 120": [
        r"BREAK _too_much sm_120: needs 131072 bytes of shared memory, sm_120 has 101376",
        r"BREAK _too_much sm_90: has \d+ registers a thread; accepted: 10",
    ],
    "gate column --arg 'x=tensor(f32, [128, 40])' --min-load 128 --arch 90": [
        "BREAK _column sm_90: its widest global load has 32 bits; accepted: 128 or more"
    ],
    "gate from_the_second --arg 'x=tensor(f32, [1025])' --min-load 128 --arch 90": [
        "BREAK _add sm_90: its widest global load has 32 bits; accepted: 128 or more"
    ],
    f"gate does_not_compile {ROW} --arch 90": [
        r"BREAK _does_not_compile sm_90: does not compile: .*missing_name is not defined"
    ],
}
# Files that commands name by FOLDER.
FILES = {
    "ends.py": "import sys\nsys.exit(0)",
    "notes.txt": "",
    "skips.py": "import pytest\npytest.skip('needs a GPU', allow_module_level=True)",
    "late.py": "def late(x, y):\n    import copied\n    return copied.add(x, y)",
    **{f"{folder}copied.py": (ROOT / HERE).read_text() for folder in ("", "one/", "two/")},
}
RUN = """
import contextlib, io, json, sys
from tilewright.__main__ import main
sys.executable = sys.argv[1]  # that of --reference interpreter
for words in json.loads(sys.argv[2]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""
NAMES = [*PLANTS, *RIGHT]


def words_of(command: str) -> list[str]:
    """The words of a command whose target is a name in faulty_kernels.py."""
    tool, target, *rest = shlex.split(command)
    where = target if ":" in target else HERE if target == "HERE" else f"{HERE}:{target}"
    return [tool, where, *rest]


def run(commands: Iterable[str]) -> Iterator[tuple[str, tuple[int, str, str]]]:
    """(command, (exit code, output, errors)) of each, all in one other process: kernels of this one
    may belong to Triton's interpreter.
    """
    path = f"{ROOT}{os.pathsep}{ROOT / 'lab'}"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    interpreting = {**environment, "TRITON_INTERPRET": "1"}
    with (
        tempfile.TemporaryDirectory() as folder,
        forked.python("import torch._dynamo, triton", ROOT, interpreting) as python,
    ):
        for name, text in FILES.items():
            path = pathlib.Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        given = json.dumps([words_of(c.replace("FOLDER", folder)) for c in commands])
        start = [sys.executable, "-c", RUN, python, given]
        errors = pathlib.Path(folder, "errors.txt")
        options = {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT, "env": environment}
        with errors.open("w") as err, subprocess.Popen(start, stderr=err, **options) as process:
            said = (json.loads(line) for line in process.stdout if line.startswith("["))
            # Fewer, if the process ends early, which is told below.
            yield from zip(commands, map(tuple, said), strict=False)
        assert process.returncode == 0, errors.read_text()


def with_lines(pattern):
    """A pattern where {text} stands for the line of faulty_kernels.py that has this text."""
    source = (ROOT / HERE).read_text().splitlines()

    def number(m):
        text = m[1].replace("\\", "")
        return str(next(i for i, line in enumerate(source, 1) if text in line))

    return re.sub(r"\{([^}]*)\}", number, pattern)


def check(command: str, code: int, out: str, err: str) -> None:
    """Raises AssertionError unless a command's row is right."""
    assert code == (command in PLANTS), (out, err)
    if command in RIGHT:
        assert all(text in out for text in RIGHT[command]), out
        return
    if out.startswith("{"):
        out = "\n".join(
            f"BREAK {f['kind']}: {f['what']} ({f['kernel']}, " for f in json.loads(out)["breaks"]
        )
    for pattern in PLANTS[command]:
        assert re.search(with_lines(pattern), out), out


def results(names: list[str]) -> Iterator[tuple[str, str]]:
    for command, said in run(names):
        try:
            check(command, *said)
            yield command, "as said"
        except AssertionError as error:
            yield command, str(error)
