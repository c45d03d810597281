"""The list of faults that tests are measured by (tests/mutations) is of the code as it is, and its
results are of the list.
"""

import ast
import functools
import json
import os
import shutil
import subprocess
import sys
import textwrap

import helpers
import pytest
from mutations import choose, cpp, draw, faults, table
from mutations.faults import ROOT, Fault

FOLDER = ROOT / "tests/mutations"
FAULTS = faults.load()
ROWS = table.last_rows(FOLDER / "results.jsonl")


@functools.cache
def meaning(file):
    return ast.dump(ast.parse((ROOT / file).read_text()))


@functools.cache
def functions(file):
    return dict(faults.functions(ast.parse((ROOT / file).read_text())))


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.id for fault in FAULTS])
def test_a_fault_applies_and_has_a_result(fault):
    text = (ROOT / fault.file).read_text()
    applied = fault.applied(text)
    if fault.file.endswith(".py"):
        assert ast.dump(ast.parse(applied)) != meaning(fault.file)
    assert applied != text
    own = choose.own_files(fault.file)
    assert own or fault.seen_by
    assert all((ROOT / name).is_file() for name in own)
    row = ROWS[fault.id]
    assert (row["old"], row["new"], row["function"]) == (fault.old, fault.new, fault.function)
    if row["result"] != "red":
        assert fault.judgement.startswith(("equivalent: ", "unseen: "))
        return
    assert not fault.judgement, "it is red"
    file, _, name = row["first"].partition("::")
    # Without a name the file cannot be collected.
    assert not name or name.partition("[")[0].replace("::", ".") in functions(file)


def test_the_list_and_its_table_are_whole():
    assert len({fault.id for fault in FAULTS}) == len(FAULTS) == len(ROWS)
    drawn = sum(fault.kind != "named" for fault in FAULTS)
    assert drawn == sum(count for parts in draw.SEEDS.values() for count, _ in parts.values())
    text = table.README.read_text().partition(table.HEAD)[2]
    assert text == "\n" + table.table(FAULTS, ROWS), "python -m tests.mutations RESULTS --table"


SOURCE = textwrap.dedent('''
    """A module with 1 + 1 in its docstring."""
    import logging

    def share(a, b):
        if a < b:
            raise ValueError(f"a is {a + b} and {-a}")
        logging.info("%d", a - b)
        return a / (a + b)

    def __repr__():
        return 1 + 1
''')


def test_a_fault_follows_its_function_and_not_its_lines():
    fault = Fault("x", "x.py", "share", "a + b", "a - b", at=1, of=2)
    with pytest.raises(ValueError, match=r"x: 'a \+ b' is 2 times in x.py share, not 1"):
        fault._replace(of=1).applied(SOURCE)
    changed = fault.applied("\n\n" + SOURCE.replace("def __repr__", "def other"))
    assert "return a / (a - b)" in changed and "{a + b}" in changed
    with pytest.raises(ValueError, match="there is no other"):
        fault._replace(function="other").applied(SOURCE)


def test_what_is_drawn_is_code_that_computes():
    made = [draw.made(*change) for _, change in draw.candidates("x.py", SOURCE)]
    assert {(f.kind, f.old, f.new, f.at, f.of) for f in made} == {
        ("operator", "a < b", "a <= b", 0, 1),
        ("condition", "a < b", "not (a < b)", 0, 1),
        ("operator", "a / (a + b)", "a * (a + b)", 0, 1),
        ("operator", "a + b", "a - b", 1, 2),
    }


def test_what_is_drawn_depends_on_the_seed_alone(monkeypatch):
    part = {"core": (9, "tilewright/core/*.py")}
    monkeypatch.setattr(draw, "SEEDS", {1: part, 2: part})
    assert draw.draw(1) == draw.draw(1) != draw.draw(2)
    assert len({fault.kind for fault in draw.draw(1)}) > 5


CPP = """// 1 + 1
#include <cmath>
template <int K>
void rows(const float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {  // all
    y[i] = std::max(x[i] * 0.5f, low);
    TORCH_CHECK(n > 0, "n + 1");
  }
}
"""


def test_what_is_drawn_of_cpp_is_code_that_computes():
    found = {(kind, old, new) for kind, (_, old, new, _) in cpp.candidates("x.cpp", CPP)}
    loop = "for (int64_t i = 0; i < n; ++i) {"
    line = "y[i] = std::max(x[i] * 0.5f, low);"
    assert found == {
        ("constant", loop, loop.replace("= 0", "= 1")),
        ("operator", loop, loop.replace(" < ", " <= ")),
        ("operator", line, line.replace(" * ", " + ")),
        ("operator", line, line.replace("max", "min")),
        ("constant", line, line.replace("0.5f", "1.0f")),
    }


def test_a_fault_of_cpp_is_compiled_into_its_object_alone(tmp_path):
    """And is gone afterwards. Another, which is no C++, is an error that says so."""
    if reason := helpers.cannot_run("cpp"):
        pytest.skip(reason)
    if not list((ROOT / "build").glob("temp.*/*/build.ninja")):
        pytest.skip("no objects of a build: `make build`")
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / "tilewright").mkdir()
    libraries = sorted((ROOT / "tilewright").glob("_C*.so"))
    for library in libraries:
        shutil.copy(library, tmp_path / "tilewright")

    def bytes_():
        return [(tmp_path / "tilewright" / library.name).read_bytes() for library in libraries]

    file, before = "csrc/cpu/hadamard.cpp", bytes_()
    *_, change = (
        c for kind, c in cpp.candidates(file, (ROOT / file).read_text()) if kind == "operator"
    )
    fault = cpp.made(*change, at=0)
    assert cpp.compiles(fault) and not cpp.compiles(fault._replace(new="("))
    path = tmp_path / file
    right = path.read_text()
    path.write_text(fault.applied(right))
    with cpp.built(tmp_path, fault):
        assert sum(a != b for a, b in zip(bytes_(), before, strict=True)) == 1
    assert bytes_() == before
    path.write_text("(")
    with pytest.raises(RuntimeError, match="does not compile"), cpp.built(tmp_path, fault):
        pass
    assert bytes_() == before


THING = "def grown(x):\n    return x + 1\n\ndef kept(x):\n    return x\n"
TESTS = """
    from tilewright.nn.thing import grown, kept

    def test_grown():
        assert grown(1) == 2

    def test_kept():
        assert kept(1) in (1, 2)
"""
PLANTED = [
    Fault("seen", "tilewright/nn/thing.py", "grown", "x + 1", "x - 1"),
    Fault("ends", "tilewright/nn/thing.py", "grown", "x + 1", "__import__('os')._exit(0)"),
    Fault("green", "tilewright/nn/thing.py", "kept", "return x", "return x + 1"),
]


def test_faults_are_planted_in_a_copy_and_judged_by_its_tests(tmp_path):
    root, out = tmp_path / "tree", tmp_path / "out.jsonl"
    shutil.copytree(FOLDER, root / "tests/mutations")
    for name, text in (
        ("tilewright/nn/thing.py", THING),
        ("tests/nn/test_thing.py", textwrap.dedent(TESTS)),
        ("pytest.ini", "[pytest]\n"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    faults.write(PLANTED, root / "tests/mutations/faults.json")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)

    def run(*arguments):
        command = [sys.executable, "-m", "tests.mutations", out, *arguments]
        environment = {**os.environ, "PYTHONPATH": ""}
        subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True)
        return [json.loads(line) for line in out.read_text().splitlines()]

    seen, ends, green = run()
    assert (seen["result"], seen["first"]) == ("red", "tests/nn/test_thing.py::test_grown")
    assert seen["why"].startswith("assert 0 == 2") and seen["ran"] == 1 and seen["chosen"] == 2
    assert (ends["result"], ends["first"]) == ("red", "tests/nn/test_thing.py::test_grown")
    assert ends["why"].startswith("hangs, or ends the process")
    assert (green["result"], green["ran"], green["first"]) == ("green", 2, "")
    assert (root / "tilewright/nn/thing.py").read_text() == THING
    assert len(run()) == 3, "all have a result"
    assert run("--only", "green", "--limit", "0")[-1]["result"] == "unfinished"
    assert run("--only", "green")[-1]["result"] == "green"
    assert len(run("--old")) == 5, "and are of these sources"
    (root / "tests/nn/test_thing.py").write_text("# Said anew.\n" + textwrap.dedent(TESTS))
    assert len(run("--old")) == 5
    source = root / "tilewright/nn/thing.py"
    source.write_text(THING + "\nx = 1\n")
    assert [row["id"] for row in run("--old")[5:]] == ["seen", "ends", "green"]
    source.write_text(THING)
    run("--clean")


def test_a_fault_is_found_again_where_its_code_is_now():
    fault = next(f for f in FAULTS if f.id == "jvp-times-2")
    assert faults.moved(fault._replace(file="tilewright/ops/elsewhere.py")) == fault
    assert faults.moved(fault._replace(old="dx.clone() ")) is None
