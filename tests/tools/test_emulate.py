"""`tilewright emulate` and `tilewright gate`, on right kernels and on kernels with planted faults
(tests/plants/kernels.py).
"""

import contextlib
import functools
import io
import json
import re
import sys

import pytest

pytest.importorskip("triton")

from plants import kernels
from plants.kernels import ROOT, ROW, TWO

from tilewright.__main__ import main
from tilewright.core import platform
from tilewright_lab.emulate.command import shown
from tilewright_lab.emulate.emulation import Report
from tilewright_lab.emulator.faults import Fault

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
    "emulate FOLDER/notes.txt:add": r"notes\.txt is no Python file",
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
    f"emulate raises {ROW}": "raises fails: ValueError: what the function says",
    f"emulate exits {ROW}": "exits fails: SystemExit: 0",
    "emulate FOLDER/ends.py:f": r"ends\.py cannot be imported: SystemExit: 0",
    "gate FOLDER/skips.py:f": r"skips\.py cannot be imported: Skipped: needs a GPU",
    "emulate launches_nothing": "launched no Triton kernel",
    f"emulate add {TWO} --reference some_inputs": "--reference: the function fails: TypeError",
    "emulate add_on_cuda --backward": "--backward: needs a host function with floating-point",
    "gate launches_nothing": "launched no Triton kernel",
    f"gate raises {ROW}": "raises fails: ValueError: what the function says",
}
PAGE = "".join(p.read_text() for p in sorted((ROOT / "docs").glob("emulate*.md")))
SHOWN = re.findall(r"^\$ tilewright (.*)\n((?:.*\n)*?)```", PAGE, re.M)
[WORKFLOW] = re.findall(r"```yaml .*?\n(.*?)```", PAGE, re.S)
IN_WORKFLOW = re.findall(r"- run: tilewright (.*)", WORKFLOW)
OF_PAIR = f"gate of_pair {ROW}"
EVERY = [*kernels.NAMES, *REFUSED, OF_PAIR, *(command for command, _ in SHOWN), *IN_WORKFLOW]


@functools.cache
def all_ran():
    """(exit code, output, errors) of each command."""
    return dict(kernels.run(EVERY))


@pytest.mark.parametrize("command", kernels.NAMES)
def test_a_plant_is_found_and_a_right_kernel_passes(command):
    kernels.check(command, *all_ran()[command])


@pytest.mark.parametrize("command", REFUSED)
def test_bad_input_ends_in_one_sentence(command):
    code, out, err = all_ran()[command]
    said = [line for line in err.splitlines() if line.startswith("tilewright ")]
    assert code == 2 and not out and len(said) == 1, (out, err)
    assert re.search(kernels.with_lines(REFUSED[command]), said[0]), said[0]


def test_the_gate_compiles_a_kernel_with_a_tuple_as_argument():
    code, out, err = all_ran()[OF_PAIR]
    assert code == 0 and "_of_pair" in out, (out, err)


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
    folder = ROOT / "bench/results/emulated-public-2026-11-23"
    results = json.loads((folder / "results.json").read_text())
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import emulate_public
        import public_kernels
    finally:
        sys.path.pop(0)
    table = emulate_public.table(results)
    assert table in (folder / "README.md").read_text()
    assert "(../bench/results/emulated-public-2026-11-23/README.md)" in PAGE
    ran = [(r["library"], r["function"]) for r in results["functions"]]
    assert ran == [(c.library, c.name) for c in public_kernels.CASES]
    rows = results["functions"]
    assert f"{sum(r['ended'] == 'runs' for r in rows)} of {len(ran)}" in PAGE
    assert f"{sum(r.get('holds') is False for r in rows)} exceed the contract" in PAGE
    assert f"{sum(bool(r['findings']) for r in rows)} have findings" in PAGE
    assert f"{sum('error' not in r for r in rows)} were not compared" in PAGE
