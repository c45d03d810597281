"""What `make lint` checks the types of: launchers, and no kernel."""

import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("check_types", ROOT / "scripts/check_types.py")
check_types = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_types)

SOURCE = """
from typing import Any

import quack.rmsnorm
import quackery


def language() -> Any: ...


triton = gluon = language()


@triton.jit
def kernel(x, n: 3, SIZE: int = "4"):
    def of_kernel() -> str:
        return 1

    return [x].there


@gluon.jit(do_not_specialize=[1 + "n"])
def other(x):
    return [x].there


def launch(n: int) -> str:
    return n
"""


def test_only_what_is_outside_kernels_is_found(tmp_path):
    pytest.importorskip("basedpyright")
    (tmp_path / "pyproject.toml").write_text('[tool.basedpyright]\ntypeCheckingMode = "basic"\n')
    (tmp_path / "launcher.py").write_text(SOURCE)
    found = check_types.errors(tmp_path)
    lines = [SOURCE.splitlines()[int(re.search(r"\.py:(\d+)", one)[1]) - 1] for one in found]
    assert lines == [
        "import quackery",
        '@gluon.jit(do_not_specialize=[1 + "n"])',
        "    return n",
    ], found


def test_kernels_of_this_project_are_told_from_launchers():
    path = ROOT / "tilewright/kernels/norm/rmsnorm_triton.py"
    text, inside = path.read_text().splitlines(), check_types.kernels(path)
    assert {text[lines.start - 2].split("(")[0] for lines in inside} == {"@triton.jit"}
    assert len(inside) == sum(line.startswith("@triton.jit") for line in text)
    launcher = text.index("def backward(dy, dtotal, x, rstd, weight, norm, has_bias):") + 1
    assert not any(launcher in lines for lines in inside)
