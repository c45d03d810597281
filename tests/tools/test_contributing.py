"""CONTRIBUTING.md's template of an op, in a copy of the package."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import tilewright

ROOT = pathlib.Path(tilewright.__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
TUTORIAL = (ROOT / "docs/tutorials/your_own_op.md").read_text()
SCRIPT = """
import doctest, json, sys
import forked, torch
from tools.test_docstrings import missing
from tilewright import __main__ as cli
from tilewright.bench import __main__ as bench
from tilewright_lab.gate import compile_gate
from tilewright.ops import OPS

scale = sys.modules["tilewright.ops.activation.scale"]
forked.briefly()
print(json.dumps({
    "package": sys.modules["tilewright"].__file__,
    "documented": [missing(OPS["scale"].public), *doctest.testmod(scale)[::-1]],
    "explain": cli.main(["explain", "scale", "--device", "cpu"]),
    "contract": cli.main(["check", "scale", "--implementation", "triton", "--device", "cpu",
                          "--dtype", "float32"]),
    "gate": list(compile_gate.collect([OPS["scale"]])),
    "bench": bench.main(["run", "--op", "scale", "--provider", "eager", "--device", "cpu",
                         "--dtype", "float32", "--rounds", "1", "--out", sys.argv[1]]),
    "twice": torch.autograd.gradgradcheck(
        lambda x: OPS["scale"].public(x, 3.0, implementation="eager"),
        torch.ones(2, dtype=torch.float64, requires_grad=True)),
}))
"""


def test_the_template_makes_an_op(tmp_path):
    pytest.importorskip("triton")
    package = tmp_path / "tilewright"
    shutil.copytree(ROOT / "tilewright", package, ignore=shutil.ignore_patterns("*.so", "__pyc*"))
    blocks = re.findall(r"```python\n# (tilewright/\S+)\n(.*?)```", TEXT, re.S)
    assert [name for name, _ in blocks] == [
        "tilewright/ops/activation/scale.py",
        "tilewright/kernels/activation/scale_triton.py",
    ]
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    table = package / "ops/__init__.py"
    text = table.read_text()
    for line, added in (
        (
            "from tilewright.ops.activation.activation import GELU_MUL, SILU_MUL, Gate, gelu_mul, silu_mul\n",
            "from tilewright.ops.activation.scale import SCALE, scale\n",
        ),
        ("        SILU_MUL,\n", "        SCALE,\n"),
        ('    "route",\n', '    "scale",\n'),
    ):
        assert text.count(line) == 1
        text = text.replace(line, line + added)
    table.write_text(text)
    lint = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--config",
        ROOT / "pyproject.toml",
        package / "ops",
    ]
    subprocess.run(lint, check=True)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "out"],
        cwd=tmp_path,
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}:{ROOT}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    result = json.loads(lines[-1])
    assert result.pop("package") == str(package / "__init__.py")
    assert result == {
        "documented": [[], 1, 0],
        "explain": 0,
        "contract": 0,
        "gate": ["scale/bf16", "scale/fp32"],
        "bench": 0,
        "twice": True,
    }
    assert any(re.match(r"scale\s+triton\s+usable", line) for line in lines)
    assert "6 hold, 0 break the contract, 0 are unsupported" in lines
    [tutorial] = re.findall(r"<!-- template -->\n```console\n(.*?)```", TUTORIAL, re.S)
    said = [line for line in tutorial.splitlines() if not line.startswith("$ ")]
    assert len(said) == 3 and {*said} <= {*lines}
    units = [json.loads(u) for u in (tmp_path / "out/suite.jsonl").read_text().splitlines()]
    rows = [row for unit in units for row in unit.get("rows", ()) if row.get("provider")]
    assert [(r["op"], r["case"], r["provider"]) for r in rows] == [("scale", "cpu", "eager")]
