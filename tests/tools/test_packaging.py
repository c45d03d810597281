"""The installed files, the cost of importing them, and operation without the optional parts."""

import email
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import forked
import pytest

ROOT = pathlib.Path(__file__).parents[2]


def inherited():
    left = ("TRITON_INTERPRET", "PYTHONPATH", "PYTEST_ADDOPTS")
    return {name: value for name, value in os.environ.items() if name not in left}


def run(*args, cwd, code=0, python=sys.executable, **variables):
    """Runs Python; returns its output."""
    environment = {**inherited(), **{k: str(v) for k, v in variables.items()}}
    command = [python, *map(str, args)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory):
    """A Python that has imported torch, as a build does, and nothing of this repository."""
    folder = tmp_path_factory.mktemp("python")
    nothing = "assert not {'triton', 'tilewright'} & set(sys.modules)"
    imports = f"import torch.utils.cpp_extension\n{nothing}"
    with forked.python(imports, folder, inherited()) as command:
        yield command


# ---- importing

# Calls are counted, as no machine's load changes their number.
IMPORT = """
import json, sys
calls = 0
def profile(frame, event, argument):
    global calls
    calls += event == "call"
sys.setprofile(profile)
import torch
before, of_torch = set(sys.modules), calls
found = []
for module in ("tilewright", "tilewright.ops"):
    __import__(module)
    share = (calls - of_torch) / of_torch
    brought = sorted({m.split(".")[0] for m in set(sys.modules) - before})
    found.append([module, share, brought])
sys.setprofile(None)
import tilewright.nn
print(json.dumps([found, "torch._dynamo" in sys.modules]))
"""


def test_importing_is_cheap_and_brings_nothing_optional():
    heavy = {"triton", "transformers", "matplotlib", "pydantic", "datasets", "pandas", "sympy"}
    found, dynamo = json.loads(run("-c", IMPORT, cwd=ROOT))
    assert not dynamo, "torch._dynamo takes more than a second, and imports Triton"
    for module, share, brought in found:
        assert module.split(".")[0] in brought and not heavy & set(brought), module
        # 0.17 for the 44 ops, which register operators and generate the checks of their arguments.
        # transformers takes 0.4, torch._dynamo 1.2.
        assert share < 0.18, f"{module}: {share:.2f} of the calls of `import torch`"


WITHOUT_TRITON = """
import pathlib, sys
sys.modules["triton"] = None   # import triton now raises ImportError
sys.path.insert(0, "lab")
import torch
import tilewright
from bench import suite
from tilewright import __main__ as cli, selection
from tilewright.bench import plan, run
from tilewright.ops import rmsnorm

x, w = torch.ones(2, 8), torch.ones(8)
rmsnorm(x, w)
try:
    rmsnorm(x, w, implementation="triton")
except tilewright.ImplementationUnavailable as error:
    print("refused:", error)
chosen = plan.Chosen("cpu", run.Settings(), pathlib.Path("nowhere"))
for stage in suite.STAGES:
    planned = suite.units(stage, selection.operations().values(), plan.DTYPES, chosen)
    print("planned:", stage, len(planned))
raise SystemExit(cli.main(["explain", "--all"]))
"""


def test_everything_else_works_without_triton(with_torch):
    """Ops, and the plan of the benchmark."""
    out = run("-c", WITHOUT_TRITON, cwd=ROOT, python=with_torch)
    reason = "the package 'triton' is not installed (pip install triton)"
    assert f"refused: rmsnorm[triton]: {reason}" in out
    rows = [line for line in out.splitlines() if " triton " in line and "refused" not in line]
    assert rows and all(line.endswith(reason) for line in rows)
    assert int(re.search(r"^planned: time (\d+)$", out, re.M)[1]) > 0


def test_the_repository_hides_no_package():
    """transformers imports a package `kernels`: a folder of that name at the root would
    shadow it.
    """
    names = ("kernels", "ops", "trainer", "triton", "quack")
    code = f"from importlib.util import find_spec\nfor n in {names}: print(find_spec(n))"
    for found in run("-c", code, cwd=ROOT).splitlines():
        assert found == "None" or "site-packages" in found


# ---- building and installing

BUILT = ("*.so", "__pycache__", "_no_extension.txt", "build", "dist", "*.egg-info")
LEFT = shutil.ignore_patterns(*BUILT, ".*", "outputs", "last_prepared_dataset")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The repository, without artifacts of earlier builds and runs."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "tilewright", ignore=LEFT)


# Each hook of a backend is a process, and imports torch.
BUILD = """
import sys
sys.executable = sys.argv.pop(1)
from build.__main__ import main
main(sys.argv[1:])
"""


def build(python, source, out, *options, **variables):
    # The check is of setuptools and ninja: each asks setup.py, which takes torch.
    way = ("--no-isolation", "--skip-dependency-check", "--outdir", out, *options)
    run("-c", BUILD, python, *way, source, cwd=source, **variables)
    return out


# A compiler that leaves out what `make build` does. It packs the objects that this repository was
# built to, if no source is newer, and looks up their includes. If there are none, it compiles one
# variant, unoptimized, and packs it as the others, too.
COMPILER = r"""#!/bin/sh
before= source= object=
for word; do
    case $before in -c) source=$word ;; -o) object=$word ;; esac
    before=$word
done
[ -n "$source" ] || exec c++ "$@"
plain=$(printf %s "$object" | sed 's/[.]_C_avx[0-9]*/._C/')
built="ROOT/build/${object##*/build/}"
if [ -f "$built" ] && [ -z "$(find "ROOT/csrc" -newer "$built")" ]; then
    [ "$plain" != "$object" ] || c++ "$@" -E || exit
    exec cp "$built" "$object"
elif [ "$plain" != "$object" ] && [ -f "$plain" ]; then
    exec cp "$plain" "$object"
fi
exec c++ "$@" -O0
"""


@pytest.fixture(scope="module")
def built(with_torch, source, tmp_path_factory):
    """The sdist, and the wheel built from it."""
    out = tmp_path_factory.mktemp("dist")
    compiler = out / "compiler"
    compiler.write_text(COMPILER.replace("ROOT", str(ROOT)))
    compiler.chmod(0o755)
    build(with_torch, source, out, TILEWRIGHT_REQUIRE_CPP="1", CXX=compiler)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    assert "without" not in wheel.name
    return sdist, wheel


def installed(wheel, folder):
    way = ("-q", "--no-deps", "--no-index", "--no-compile", "--target", folder)
    run("-m", "pip", "install", *way, wheel, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def site(built, tmp_path_factory):
    """The wheel, installed."""
    return installed(built[1], tmp_path_factory.mktemp("site"))


def test_the_sdist_holds_the_repository_and_its_tests_are_found(
    built, source, with_torch, tmp_path
):
    with tarfile.open(built[0]) as archive:
        safely = hasattr(tarfile, "data_filter")  # Python 3.11.4
        archive.extractall(tmp_path, **({"filter": "data"} if safely else {}))
    (root,) = tmp_path.iterdir()
    files = [p.relative_to(source) for p in source.rglob("*") if p.is_file()]
    # Others come from builds made there.
    files = [p for p in files if p.parts[0] != "build" and (ROOT / p).exists()]
    assert (root / "csrc").is_dir() and not [p for p in files if not (root / p).exists()]
    # Tests that import the helper modules beside conftest.py; collecting all tests takes a minute.
    some = ("tests/tools/test_pieces.py", "tests/benchmark")
    command = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *some)
    found = run(*command, cwd=root, python=with_torch)
    assert all(name in found for name in some)


def test_the_wheel_holds_one_package_with_its_extension_and_data(built):
    names = zipfile.ZipFile(built[1]).namelist()
    info = {n.split("/")[0] for n in names if n.split("/")[0].endswith(".dist-info")}
    assert {n.split("/")[0] for n in names} - info == {"tilewright"}
    package = (ROOT / "tilewright").rglob("*")
    files = {str(p.relative_to(ROOT)) for p in package if p.suffix in (".py", ".json", ".toml")}
    assert files <= set(names)
    assert "tilewright/_C.so" in names
    assert "cp311-abi3" in built[1].name, "one wheel for every Python from 3.11"
    archive = zipfile.ZipFile(built[1])
    for name in names:
        if name.endswith(".so"):
            data = archive.read(name)
            # What auditwheel and abi3audit look for; csrc/cpu/portable.cpp for the second.
            assert b"PyInit_" not in data and b"GLIBC_2.32" not in data, name


def test_the_metadata_are_complete_and_leave_triton_to_torch(built):
    archive = zipfile.ZipFile(built[1])
    [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    found = email.message_from_bytes(archive.read(name))
    required = [r for r in found.get_all("Requires-Dist") if "extra ==" not in r]
    assert {re.match(r"[\w-]+", r)[0] for r in required} == {"torch", "numpy", "safetensors"}
    assert "Typing :: Typed" in found.get_all("Classifier")
    assert "tilewright/py.typed" in archive.namelist()
    assert len(found.get_all("Project-URL")) >= 5
    table = (ROOT / "docs" / "install.md").read_text()
    rows = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.M))))
    assert set(found.get_all("Provides-Extra")) <= rows


SMOKE = """
import json, torch, tilewright
from tilewright.ops import OPS, rmsnorm
x, w = torch.randn(3, 64, requires_grad=True), torch.ones(64)
reasons = {op.name: op.implementation("cpp").why_not("cpu") for op in OPS.values() if "cpp" in op.names()}
if reasons["rmsnorm"] is None:
    y = rmsnorm(x, w, implementation="cpp")
    y.sum().backward()
    torch.testing.assert_close(y, rmsnorm(x, w, implementation="eager"))
print(json.dumps([tilewright.__file__, reasons, rmsnorm(x, w).isfinite().all().item()]))
"""


COMMAND = """
import runpy, sys
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_an_installed_wheel_works_away_from_the_repository(site, with_torch):
    command = (site / "bin" / "tilewright", "explain", "--all")
    said = run("-c", SMOKE + COMMAND, *command, cwd=site, python=with_torch)
    smoke, _, out = said.partition("\n")
    file, reasons, finite = json.loads(smoke)
    assert pathlib.Path(file).is_relative_to(site), "another copy was imported"
    assert set(reasons.values()) == {None} and finite
    assert any("* cpp " in line and line.endswith("usable") for line in out.splitlines())


# Hides packages from this process and from the workers that it starts.
ALONE = """
import sys
sys.modules.update(dict.fromkeys(("bench", "tilewright_lab", "triton")))
"""
# The op whose timed cases are the smallest.
ROUTE = ("--op", "route", "--case", "mixtral-8x7b", "--provider", "cpp", "--dtype", "float32")


def test_an_installed_wheel_times_an_op_without_the_checkouts_bench(site, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ALONE)
    path, least = f"{tmp_path}:{site}", ("--device", "cpu", "--rounds", "1", "--sample-ms", "0")
    command = ("-m", "tilewright.bench", "run", *ROUTE, *least)
    said = run(*command, "--out", tmp_path / "out", cwd=tmp_path, PYTHONPATH=path)
    lines = (tmp_path / "out/suite.jsonl").read_text().splitlines()
    [timed] = [unit for unit in map(json.loads, lines) if unit["unit"].startswith("time/")]
    assert "2 of 2 units" in said and timed["meta"]["commit"] is None
    [row] = timed["rows"]
    assert (row["provider"], row["contract"]) == ("cpp", "holds")
    assert len(row["forward_backward"]["samples_ms"]) == 1


def test_the_laboratorys_wheel_adds_its_commands(site, source, with_torch, tmp_path):
    wheel_of_pip(None, source / "lab", tmp_path / "dist")
    [wheel] = (tmp_path / "dist").glob("tilewright_lab-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    lab = ROOT / "lab"
    package = (lab / "tilewright_lab").rglob("*")
    files = {str(p.relative_to(lab)) for p in package if p.suffix in (".py", ".json")}
    assert files <= set(names)
    target = installed(wheel, tmp_path)
    command = (site / "bin" / "tilewright", "gate", "--help")
    where = "import tilewright_lab\nprint(tilewright_lab.__file__)"
    said = run("-c", where + COMMAND, *command, cwd=site, python=with_torch, PYTHONPATH=target)
    file, _, usage = said.partition("\n")
    assert pathlib.Path(file).is_relative_to(target), "another copy was imported"
    assert usage.startswith("usage: tilewright gate ")


def wheel_of_pip(_, source, out, **variables):
    """What pip prints, which hides what a build does."""
    way = ("--no-deps", "--no-index", "--no-build-isolation")
    return run("-m", "pip", "wheel", *way, "-w", out, source, cwd=source, **variables)


def wheel_of_build(python, source, out, **variables):
    build(python, source, out, "--wheel", **variables)


NO_COMPILER = ": CalledProcessError: Command '['/bin/false', '--version']' "


@pytest.mark.parametrize(
    "make, variables, why",
    [
        (wheel_of_pip, {"TILEWRIGHT_SKIP_CPP": "1"}, ": TILEWRIGHT_SKIP_CPP=1 ("),
        (wheel_of_build, dict.fromkeys(("CC", "CXX"), "/bin/false"), NO_COMPILER),
    ],
    ids=["skipped", "no_compiler"],
)
def test_a_build_without_the_extension_says_so_and_leaves_the_rest_working(
    with_torch, source, tmp_path, make, variables, why
):
    python = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    earlier = source / f"build/lib.{python}/tilewright"
    earlier.mkdir(parents=True, exist_ok=True)
    (earlier / "_C.so").touch()  # from an earlier, successful build
    dist, target = tmp_path / "dist", tmp_path / "site"
    said = make(with_torch, source, dist, **variables)
    (wheel,) = dist.glob("*.whl")
    assert wheel.name.endswith("-0_without_cpp-py3-none-any.whl")
    assert said is None or wheel.name in said
    archive = zipfile.ZipFile(wheel)
    assert not [name for name in archive.namelist() if name.endswith(".so")]
    archive.extractall(target)
    explained = SMOKE + "from tilewright.__main__ import main\nmain(['explain'])"
    said = run("-c", explained, cwd=target, python=with_torch)
    smoke, _, out = said.partition("\n")
    file, reasons, finite = json.loads(smoke)
    assert pathlib.Path(file).is_relative_to(target) and finite
    for reason in reasons.values():
        assert "is not built" + why in reason and reason in out


ISOLATE = """
import sys, sysconfig
sys.path[:] = [p for p in sys.path if p != sysconfig.get_path("platlib")]
"""


@pytest.mark.parametrize("hidden", ["by pip", "and not installed"])
def test_an_isolated_build_finds_the_torch_of_the_environment(source, tmp_path, hidden):
    """pip runs an isolated build with this interpreter, and takes its packages off sys.path."""
    for name in ("setuptools", "_distutils_hack"):
        found = pathlib.Path(importlib.util.find_spec(name).origin).parent
        (tmp_path / name).symlink_to(found)
    elsewhere = f"sysconfig.get_path = lambda name: {str(tmp_path / 'empty')!r}\n"
    code = ISOLATE if hidden == "by pip" else ISOLATE + elsewhere
    (tmp_path / "sitecustomize.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "--name"],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    without = "building without the C++ extension: No module named 'torch'; install torch first"
    assert (without in done.stderr) == (hidden != "by pip"), done.stderr


LOAD = """
import sys, torch, tilewright
from tilewright.core import platform
from tilewright.ops import rmsnorm
x, w = torch.randn(3, 64), torch.ones(64)
print(platform.no_extension())
rmsnorm(x, w)
try:
    rmsnorm(x, w, implementation="cpp")
except tilewright.ImplementationUnavailable as error:
    print(error)
platform.no_extension.cache_clear()
torch.__version__ = torch.torch_version.TorchVersion("2.9.1")
print(platform.no_extension())
"""


def test_an_extension_that_this_torch_cannot_load_leaves_the_rest_working(with_torch, tmp_path):
    shutil.copytree(ROOT / "tilewright", tmp_path / "tilewright", ignore=LEFT)
    source, library = tmp_path / "later.c", tmp_path / "tilewright" / "_C.so"
    source.write_text("int aoti_torch_of_later(); int call() { return aoti_torch_of_later(); }")
    command = ["c++", "-x", "c", "-shared", "-fPIC", "-o", library, source]
    subprocess.run(command, check=True)
    out = run("-c", LOAD, cwd=tmp_path, python=with_torch)
    assert out.count("the C++ extension tilewright._C does not load: ") == 2
    assert out.count("undefined symbol: aoti_torch_of_later") == 2
    assert "the C++ extension tilewright._C needs torch 2.10 or later, this is 2.9.1" in out


def test_a_build_that_requires_the_extension_does_not_skip_it(source, tmp_path):
    environment = {"TILEWRIGHT_SKIP_CPP": "1", "TILEWRIGHT_REQUIRE_CPP": "1"}
    run("setup.py", "-q", "build_ext", "--build-lib", tmp_path, cwd=source, code=1, **environment)
