"""What `make test` runs: all of it in any number of shards, each part in one of them."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.lib import shards

pytest_plugins = ["pytester"]
ROOT = pathlib.Path(__file__).parents[2]
FILES = {p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("n", [1, 3, 400])
def test_shards_are_disjoint_and_whole(n):
    found = [shards.shard(FILES, i, n) for i in range(1, n + 1)]
    assert set().union(*found) == FILES and sum(map(len, found)) == len(FILES)
    parts = [shards.in_turn(["a", "b", "c"], i, n) for i in range(1, n + 1)]
    assert sorted(name for part in parts for name in part) == ["a", "b", "c"]


def test_shards_take_about_as_long():
    """By the seconds that are committed: none more than the longest file above the mean."""
    known = shards.seconds()
    for n in (2, 4):
        sums = [sum(known.get(f, 0) for f in shards.shard(FILES, i, n)) for i in range(1, n + 1)]
        assert max(sums) <= sum(sums) / n + max(known.values())


def test_the_seconds_are_of_files_that_are_there():
    assert shards.seconds().keys() <= FILES
    assert len(FILES - shards.seconds().keys()) < 20, "write them by tests/lib/shards.py"


def test_pytest_runs_what_its_shard_has_the_longest_file_first(pytester, monkeypatch):
    (pytester.path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    for name in ("test_a", "test_b", "test_c"):
        (pytester.path / f"{name}.py").write_text("def test(): pass\n")
    monkeypatch.setattr(shards, "ROOT", pytester.path)
    monkeypatch.setattr(shards, "seconds", lambda: {"test_a.py": 5, "test_b.py": 9, "test_c.py": 3})

    def names(*options):
        found = pytester.inline_run("-p", "no:xdist", *options)
        return [report.nodeid for report in found.getreports() if report.when == "call"]

    assert names() == ["test_b.py::test", "test_a.py::test", "test_c.py::test"]
    assert names("--shard=1/2") == ["test_b.py::test"]
    assert names("--shard=2/2") == ["test_a.py::test", "test_c.py::test"]


SKIPPED = """
import pytest

@pytest.mark.parametrize("what", ["a softcap", "sinks"])
def test_an_option(what):
    pytest.skip(f"attention[sdpa]: does not compute {what} (usable here: ['triton', 'eager'])")

@pytest.mark.parametrize("i", range(3))
def test_a_device(i):
    pytest.skip("no CUDA device")

def test_it(): pass
"""


def test_what_is_left_out_is_counted_by_reason(pytester):
    (pytester.path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (pytester.path / "test_skipped.py").write_text(SKIPPED)
    said = pytester.runpytest_inprocess("-p", "no:xdist", "-p", "no:randomly")
    found = [line for line in said.outlines if line.startswith("left out")]
    assert found == [
        "left out: 3 no CUDA device",
        "left out: 2 attention[sdpa]: does not compute what a case asks for",
    ]


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "1/0", "a/b", "-1/2"])
def test_a_shard_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=re.escape(f"such as 2/4, got {text!r}")):
        shards.parsed(text)


def test_what_runs_beside_the_tests_is_in_one_shard_each():
    """As the Makefile asks."""
    made = (ROOT / "Makefile").read_text()
    [names] = re.findall(r"tests/lib/shards\.py \$\(SHARD\) ([^)]*)\)", made)
    found = []
    for i in (1, 2):
        command = [sys.executable, "tests/lib/shards.py", f"{i}/2", *names.split()]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found += said.stdout.split()
    assert sorted(found) == sorted(names.split()) and len(found) > 3
    assert all(re.search(rf"^{name}:", made, re.M) for name in found)


@pytest.mark.parametrize("shard, fails", [("1/2", False), ("9/2", True)])
def test_a_shard_that_is_none_does_not_pass_beside_the_tests(shard, fails):
    """Though nothing would be left to run."""
    made = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    [recipe] = re.findall(r"^beside:.*\n\t(.*)", made, re.M)
    for old, new in (
        ("$(BIN)/python", sys.executable),
        ("$(SHARD)", shard),
        ("$(MAKE)", "echo"),
        ("$$", "$"),
    ):
        recipe = recipe.replace(old, new)
    done = subprocess.run(["sh", "-c", recipe], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode != 0) == fails and bool(done.stdout.split()) != fails


def test_what_a_gpu_is_judged_by_starts_first():
    assert shards.FIRST in FILES and shards.ordered(FILES)[0] == shards.FIRST


def test_the_seconds_are_those_of_a_report(tmp_path, monkeypatch):
    (tmp_path / "report.xml").write_text(
        '<testsuites><testsuite><testcase classname="tests.tools.test_shards" name="a" time="1.5"/>'
        '<testcase classname="tests.tools.test_shards.Class" name="b" time="2"/>'
        '<testcase classname="tests.gone" name="c" time="9"/></testsuite></testsuites>'
    )
    monkeypatch.setattr(shards, "FILE", tmp_path / "seconds.json")
    shards.write([str(tmp_path / "report.xml")])
    assert (tmp_path / "seconds.json").read_text() == '{\n"tests/tools/test_shards.py": 4\n}\n'
