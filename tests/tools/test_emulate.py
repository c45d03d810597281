"""`tilewright emulate` and `tilewright gate`, on right kernels and on kernels with planted faults
(faulty_kernels.py). All commands run in one other process, since kernels of this one may belong to
Triton's interpreter.
"""

import contextlib
import functools
import io
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

import forked
import pytest

pytest.importorskip("triton")

from tilewright import platform
from tilewright.__main__ import main
from tilewright.tools.emulate import shown
from tilewright.tools.emulation import Report
from tilewright.tools.emulator.faults import Fault

ROOT = pathlib.Path(__file__).parents[2]
HERE = "tests/tools/faulty_kernels.py"
ROW = "--arg 'x=tensor(f32, [200])'"
TWO = f"{ROW} --arg 'y=tensor(f32, [200])'"

# command -> exit code, and what it says
RIGHT = {
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
    "emulate product --arg 'x=tensor(bf16, [64, 64])' --arg 'y=tensor(bf16, [64, 64])' "
    "--reference plain_product": ["error out 0: "],
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
BREAKS = {
    "emulate sum_of_masked --arg 'x=tensor(bf16, [2, 50])'": [
        r"BREAK undefined: out 0 changes with what a masked load without `other` gives .*"
        r"\(_sum_of_masked, \S*faulty_kernels.py:\d"
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
    f"emulate reads_unset {ROW}": [
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
        f"emulate FOLDER/{copy}/copied.py:no_mask {ROW}": [rf"BREAK bounds: .*{copy}/copied\.py:\d"]
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
REFUSED = {
    "emulate _add --arg z=3": "the kernel has no argument z; it has x_ptr, y_ptr, out_ptr, n, BLOCK",
    "emulate _add --arg n=3": "the kernel's argument x_ptr, y_ptr, out_ptr, BLOCK is not given",
    "emulate _add --inputs for_the_kernel --constexpr BLOCK=64": "a kernel needs --grid",
    "emulate _add --inputs for_the_kernel --constexpr n=64": "n is no tl.constexpr",
    "emulate _add --inputs for_the_kernel --constexpr BLOCK=64 --grid m": "--grid m: ValueError: m is none of",
    "emulate add --arg z=3": "got an unexpected keyword argument 'z'|missing a required argument",
    "emulate add": "missing a required argument: 'x'; give it by --arg x=... or --inputs$",
    "gate add --arg x=3": "missing a required argument: 'y'; give it by --arg y=... or --inputs$",
    f"emulate add {TWO} --num-warps 4": "is a function, which chooses its launches",
    "emulate nothing": "has no nothing; it has .*_add, add, add_on_cuda",
    "emulate missing.py:add": "there is no file missing.py",
    "emulate no_such_module:add": "no_such_module cannot be imported: ModuleNotFoundError",
    "emulate HERE": "give FILE:NAME",
    "emulate add --arg x": "--arg x: give NAME=VALUE",
    "emulate add --arg 'x=tensor(f8, [3])'": "no dtype f8; accepted: f64, f32, bf16",
    "emulate add --arg 'x=tensor(f32)'": r"give tensor\(dtype, shape\)",
    "emulate add --arg 'x=tensor(f32, [3], seven)'": "a fill is randn, zeros, ones",
    "emulate add --arg x=[": "accepted values are",
    f"emulate does_not_compile {ROW}": r"does not compile: .*missing_name is not defined.* "
    r"\(line 2 of the kernel: `tl.store",
    "emulate unknown_instruction --arg 'x=tensor(i32, [128])'": r"the emulator has no instruction "
    r"`bfind\.u32 .*` \(_unknown_instruction, \S*faulty_kernels.py:{bfind.u32}",
    f"emulate in_clusters {ROW}": r"has no launch of clusters \(num_ctas = 2\) \(_add\)",
    "emulate product --arg 'x=tensor(bf16, [128, 128])' --arg 'y=tensor(bf16, [128, 128])' "
    "--arch 100": r"has no instructions tcgen05: run it for another --arch \(_too_much\)",
    f"emulate raises {ROW}": "raises fails: ValueError: what the function says",
    f"emulate exits {ROW}": "exits fails: SystemExit: 0",
    "emulate FOLDER/ends.py:f": r"ends\.py cannot be imported: SystemExit: 0",
    "gate FOLDER/skips.py:f": r"skips\.py cannot be imported: Skipped: needs a GPU",
    "emulate launches_nothing": "launched no Triton kernel",
    f"emulate add {TWO} --reference some_inputs": "--reference: the function fails: TypeError",
    "emulate add_on_cuda --backward": "--backward: needs a host function with floating-point",
    f"gate of_pair {ROW}": r"compiles no kernel with a tuple as argument \(pair\)",
    "gate launches_nothing": "launched no Triton kernel",
    f"gate raises {ROW}": "raises fails: ValueError: what the function says",
}
PAGE = (ROOT / "docs/emulate.md").read_text()
SHOWN = re.findall(r"^\$ tilewright (.*)\n((?:.*\n)*?)```", PAGE, re.M)
[WORKFLOW] = re.findall(r"```yaml .*?\n(.*?)```", PAGE, re.S)
IN_WORKFLOW = re.findall(r"- run: tilewright (.*)", WORKFLOW)
EVERY = [*RIGHT, *BREAKS, *REFUSED, *(command for command, _ in SHOWN), *IN_WORKFLOW]
# Files that commands name by FOLDER.
FILES = {
    "ends.py": "import sys\nsys.exit(0)",
    "skips.py": "import pytest\npytest.skip('needs a GPU', allow_module_level=True)",
    "late.py": "def late(x, y):\n    import copied\n    return copied.add(x, y)",
    **{f"{folder}copied.py": (ROOT / HERE).read_text() for folder in ("", "one/", "two/")},
}
RUN = """
import contextlib, io, json, sys
from tilewright.__main__ import main
sys.executable = sys.argv[1]  # that of --reference interpreter
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


def words_of(command):
    """The words of a command whose target is a name in faulty_kernels.py."""
    tool, target, *rest = shlex.split(command)
    where = target if ":" in target else HERE if target == "HERE" else f"{HERE}:{target}"
    return [tool, where, *rest]


@functools.cache
def all_ran():
    """(exit code, output, errors) of each command."""
    folder = tempfile.TemporaryDirectory()
    for name, text in FILES.items():
        path = pathlib.Path(folder.name, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    given = [words_of(c.replace("FOLDER", folder.name)) for c in EVERY]
    for words in given:
        if words[1:3] == [f"{HERE}:reads_unset", "--arg"] and "--allow" not in words:
            words.append("--json")  # that it holds the same
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    interpreting = {**environment, "TRITON_INTERPRET": "1"}
    with forked.python("import torch._dynamo, triton", ROOT, interpreting) as python:
        run = subprocess.run(
            [sys.executable, "-c", RUN, python],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env=environment,
        )
    folder.cleanup()
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    return dict(zip(EVERY, lines, strict=True))


def with_lines(pattern):
    """A pattern where {text} stands for the line of faulty_kernels.py that has this text."""
    source = (ROOT / HERE).read_text().splitlines()

    def number(m):
        text = m[1].replace("\\", "")
        return str(next(i for i, line in enumerate(source, 1) if text in line))

    return re.sub(r"\{([^}]*)\}", number, pattern)


@pytest.mark.parametrize("command", RIGHT)
def test_a_right_kernel_passes(command):
    code, out, err = all_ran()[command]
    assert code == 0, (out, err)
    assert all(text in out for text in RIGHT[command]), out


@pytest.mark.parametrize("command", BREAKS)
def test_a_planted_fault_is_named_with_its_place(command):
    code, out, err = all_ran()[command]
    assert code == 1, (out, err)
    if out.startswith("{"):
        out = "\n".join(
            f"BREAK {f['kind']}: {f['what']} ({f['kernel']}, " for f in json.loads(out)["breaks"]
        )
    for pattern in BREAKS[command]:
        assert re.search(with_lines(pattern), out), out


@pytest.mark.parametrize("command", REFUSED)
def test_bad_input_ends_in_one_sentence(command):
    code, out, err = all_ran()[command]
    said = [line for line in err.splitlines() if line.startswith("tilewright ")]
    assert code == 2 and not out and len(said) == 1, (out, err)
    assert re.search(with_lines(REFUSED[command]), said[0]), said[0]


def test_a_note_says_that_there_is_nothing_to_do():
    report = Report(90, allowed=[Fault("replicas", "two threads"), Fault("race", "writes")])
    lines = shown(report).splitlines()
    assert lines[:2] == ["note replicas: two threads", "allowed race: writes"]
    assert lines[2].startswith("    nothing to do: ") and len(lines) == 4
    assert len(shown(Report(90, allowed=report.allowed[1:])).splitlines()) == 2


@pytest.mark.parametrize("tool", ["emulate", "gate"])
def test_without_triton_and_in_its_interpreter_the_reason_is_one_sentence(tool, monkeypatch):
    def said():
        with contextlib.redirect_stderr(io.StringIO()) as err:
            assert main([tool, "x.py:f"]) == 2
        return err.getvalue().strip()

    monkeypatch.setattr(platform, "interpreting", lambda: True)
    assert re.fullmatch(rf"tilewright {tool}: TRITON_INTERPRET is set, .*; unset it", said())
    monkeypatch.setattr(platform, "no_module", platform.not_installed)
    assert said() == (
        f"tilewright {tool}: the package 'triton' is not installed (pip install triton)"
    )


# ---- docs/emulate.md


@pytest.mark.parametrize("command, lines", SHOWN, ids=[c[:60] for c, _ in SHOWN])
def test_the_page_shows_what_a_command_prints(command, lines):
    """But for numbers, which depend on Triton's version, and spaces."""
    code, out, err = all_ran()[command]
    assert code == ("BREAK" in lines), (out, err)

    def alike(text):
        return re.sub(r"\d+", "0", " ".join(text.split()))

    said = [alike(line) for line in out.splitlines()]
    for line in lines.splitlines():
        pattern = re.escape(alike(line)).replace(r"\.\.\.", ".*")
        assert any(re.fullmatch(pattern, s) for s in said), (line, out)


def test_the_page_has_the_example_and_commands_that_pass_in_continuous_integration():
    [code] = re.findall(r'```python title="[^\n]*"\n(.*?)```', PAGE, re.S)
    assert code in (ROOT / "examples/softmax_kernel.py").read_text()
    yaml = pytest.importorskip("yaml")
    steps = yaml.safe_load(WORKFLOW)["jobs"]["kernels"]["steps"]
    commands = [
        s["run"].removeprefix("tilewright ") for s in steps if "tilewright " in s.get("run", "")
    ]
    commands = [c for c in commands if not c.startswith("pip")]
    assert len(commands) == 2 and commands == IN_WORKFLOW
    assert all(all_ran()[c][0] == 0 for c in commands)


def test_the_page_and_the_results_of_public_kernels_are_one():
    folder = ROOT / "bench_results/emulated-public-2026-11-23"
    results = json.loads((folder / "results.json").read_text())
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import emulate_public
        import public_kernels
    finally:
        sys.path.pop(0)
    table = emulate_public.table(results)
    assert table in PAGE and table in (folder / "README.md").read_text()
    ran = [(r["library"], r["function"]) for r in results["functions"]]
    assert ran == [(c.library, c.name) for c in public_kernels.CASES]
    number = sum(r["ended"] == "runs" for r in results["functions"])
    assert f"{number} of {len(ran)}" in PAGE
