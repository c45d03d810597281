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
from tilewright.ops import OPS

ROOT = pathlib.Path(tilewright.__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
TUTORIAL = (ROOT / "docs/tutorials/your_own_op.md").read_text()
SCRIPT = """
import doctest, json, sys
import forked, pytest, torch
from docstrings import missing
from bench import __main__ as checkout
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
    "table": checkout.main(["ops"]),
    "new family": cli.main(["check", "shrink", "--implementation", "triton", "--device", "cpu",
                            "--dtype", "float32"]),
    "twice": torch.autograd.gradgradcheck(
        lambda x: OPS["scale"].public(x, 3.0, implementation="eager"),
        torch.ones(2, dtype=torch.float64, requires_grad=True)),
    "tested": pytest.main(["-q", "-p", "no:cacheprovider", "tests/ops/test_scale.py"]),
}))
"""


def copied(folder, *left):
    """The package in a folder, without these files."""
    left = shutil.ignore_patterns(*left, "__pyc*")
    return shutil.copytree(ROOT / "tilewright", folder / "tilewright", ignore=left)


def printed(script, argument, tree):
    """The lines that a script prints with the package in a folder, and the object of the last."""
    path = f"{tree}:{ROOT / 'tests/lib'}:{ROOT}"
    more = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", script, argument]
    run = subprocess.run(
        command, cwd=tree, env={**os.environ, **more}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    result = json.loads(lines[-1])
    assert result.pop("package") == str(tree / "tilewright/__init__.py")
    return lines, result


def imports_of(tree):
    """What import-linter says of the package in a folder, beside the laboratory and the bench."""
    command = pathlib.Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [command, "--no-cache", "--config", ROOT / "pyproject.toml"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": f"{tree}:{ROOT}:{ROOT / 'lab'}"},
        capture_output=True,
        text=True,
    ).stdout


def test_the_template_makes_an_op(tmp_path):
    pytest.importorskip("triton")
    package = copied(tmp_path, "*.so")
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", TEXT, re.S)
    assert {name: len(code.splitlines()) for name, code in blocks} == {  # it is short
        "tilewright/ops/activation/scale.py": 68,
        "tilewright/kernels/activation/scale_triton.py": 31,
        "tests/ops/test_scale.py": 11,
    }
    (tmp_path / "tests/ops").mkdir(parents=True)
    for name, code in blocks:
        (tmp_path / name).write_text(code)
        # The same by another name, in a family that is new.
        for old, new in (("activation", "signal"), ("scale", "shrink"), ("SCALE", "SHRINK")):
            name, code = name.replace(old, new), code.replace(old, new)
        if name.startswith("tilewright"):
            (tmp_path / name).parent.mkdir()
            (tmp_path / name).with_name("__init__.py").touch()
        (tmp_path / name).write_text(code)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/ops.md", tmp_path / "docs")
    lint = [sys.executable, "-m", "ruff", "check", "--config", ROOT / "pyproject.toml"]
    subprocess.run([*lint, package / "ops/activation", tmp_path / "tests"], check=True)
    lines, result = printed(SCRIPT, tmp_path / "out", tmp_path)
    assert result == {
        "documented": [[], 1, 0],
        "explain": 0,
        "contract": 0,
        "gate": ["scale/bf16", "scale/fp32"],
        "bench": 0,
        "table": 0,
        "new family": 0,
        "twice": True,
        "tested": 0,
    }
    assert any(re.match(r"scale\s+triton\s+usable", line) for line in lines)
    assert lines.count("6 hold, 0 break the contract, 0 are unsupported") == 2
    page = (tmp_path / "docs/ops.md").read_text()
    for name in ("scale", "shrink"):
        assert f"\n| `{name}` | Multiplies a tensor by a number | triton, eager |\n" in page
    assert page.count("\n| `") == len(OPS) + 2
    # Only what is put in there is against the arrows, in the new family, too.
    kernels = package / "kernels/signal/shrink_triton.py"
    kernels.write_text("from tilewright.ops.signal import shrink\n" + kernels.read_text())
    said = imports_of(tmp_path)
    assert "arrows point one way BROKEN" in said and "1 broken" in said
    assert {*re.findall(r"^- +(\S+) -> (\S+)", said, re.M)} == {
        ("tilewright.kernels.signal.shrink_triton", "tilewright.ops.signal.shrink")
    }, said
    [tutorial] = re.findall(r"<!-- template -->\n```console\n(.*?)```", TUTORIAL, re.S)
    said = [line for line in tutorial.splitlines() if not line.startswith("$ ")]
    assert len(said) == 3 and {*said} <= {*lines}
    units = [json.loads(u) for u in (tmp_path / "out/suite.jsonl").read_text().splitlines()]
    rows = [row for unit in units for row in unit.get("rows", ()) if row.get("provider")]
    assert [(r["op"], r["case"], r["provider"]) for r in rows] == [("scale", "cpu", "eager")]


KIND = (ROOT / "docs/tutorials/own_kind_of_loss.md").read_text()
KIND_SCRIPT = """
import doctest, functools, json, os, sys
import forked, helpers, torch
from docstrings import missing
from tilewright import __main__ as cli
from tilewright.ops import OPS

focal = sys.modules["tilewright.ops.loss.linear_focal"]
public = OPS["linear_focal"].public
names = "x", "weight", "bias", "lora_A", "lora_B"
shapes = (5, 8), (12, 8), (12,), (3, 8), (12, 3)
torch.manual_seed(0)
whole = {name: torch.randn(shape) for name, shape in zip(names, shapes)}
targets, upstream = torch.tensor([0, 11, -100, 5, 7]), torch.rand(5)

def computed(parts, implementation, **options):
    leaves = {name: t.clone().requires_grad_() for name, t in parts.items()}
    options |= {"lora_scale": 0.5, "implementation": implementation}
    loss = public(target=targets, **leaves, **options)
    loss.backward(upstream)
    return {"loss": loss.detach(), **{name: t.grad for name, t in leaves.items()}}

def rank(number, folder):
    group = helpers.join_group(number, 2, folder)
    shards = {n: t if n in ("x", "lora_A") else t.chunk(2)[number] for n, t in whole.items()}
    for fp32_logits in (False, True):
        options = {"fp32_logits": fp32_logits, "chunk_size": 2, "group": group}
        found = computed(shards, "triton", **options)
        for name, t in computed(whole, "eager").items():
            t = t if name in ("loss", "x", "lora_A") else t.chunk(2)[number]
            torch.testing.assert_close(found[name], t, rtol=1e-5, atol=1e-6)
    helpers.leave()

# An adapter, chunks, and the shards of two ranks, against the whole head by the eager twin.
torch.multiprocessing.start_processes(rank, (os.getcwd(),), nprocs=2, start_method="fork")
for options in ({}, {"chunk_size": 2}):
    torch.testing.assert_close(
        computed(whole, "triton", **options), computed(whole, "eager"), rtol=1e-5, atol=1e-6)
try:
    public(**{**whole, "lora_B": torch.ones(12, 4)}, target=targets)
except ValueError as error:
    refused = str(error)

forked.briefly()
fn = functools.partial(public, implementation=sys.argv[1])
x, w = torch.randn(5, 8, requires_grad=True), torch.randn(12, 8)
y = torch.arange(5)
logprob = (x @ w.T).log_softmax(-1)[y, y]
compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")

def under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        found = fn(x, w, y)
    return torch.equal(found, fn(x.bfloat16(), w.bfloat16(), y))

def ignored():  # a row of NaN whose target is ignored
    leaf = torch.full((5, 8), 0.5)
    leaf[1] = float("nan")
    leaf.requires_grad_()
    fn(leaf, w, y.masked_fill(y == 1, -100), gamma=0.5).sum().backward()
    return [bool(leaf.grad[1].any()), bool(leaf.grad.isnan().any())]

def contract(implementation):
    return cli.main(["check", "linear_focal", "--implementation", implementation, "--device",
                     "cpu", "--dtype", "float32"])

print(json.dumps({
    "package": sys.modules["tilewright"].__file__,
    "documented": [missing(OPS["linear_focal"].public),
                   *doctest.testmod(focal, extraglobs={"torch": torch})[::-1]],
    "explain": cli.main(["explain", "linear_focal", "--device", "cpu"]),
    "contract": [contract(sys.argv[1]), contract("triton")],
    "refused": "lora_B must have shape [V, r]" in refused,
    "right": torch.allclose(fn(x, w, y), -(1 - logprob.exp()) ** 2 * logprob, atol=1e-6),
    "compiled": torch.equal(compiled(x, w, y), fn(x, w, y)),
    "ignored": ignored(),
    "autocast": under_autocast(),
}))
"""


def test_the_page_makes_a_kind_of_loss_on_the_head(tmp_path):
    """In one file, without an edit; it takes the arguments of other losses."""
    pytest.importorskip("triton")
    built = OPS["linear_cross_entropy"].implementation("cpp").why_not("cpu") is None
    copied(tmp_path)
    code = (ROOT / "examples/linear_focal.py").read_text()  # the block of the page
    [name] = re.findall(r"as `(tilewright/\S+)`", KIND)
    assert not (tmp_path / name).exists()
    (tmp_path / name).write_text(code)
    lines, result = printed(KIND_SCRIPT, "cpp" if built else "eager", tmp_path)
    assert result == {
        "documented": [[], 2, 0],
        "explain": 0,
        "contract": [0, 0],
        "refused": True,
        "right": True,
        "compiled": True,
        "ignored": [False, False],
        "autocast": True,
    }
    [page] = re.findall(r"<!-- kind -->\n```console\n(.*?)```", KIND, re.S)
    said = [line for line in page.splitlines() if line != "..." and line[0] != "$"]
    assert len(said) == 3 and (not built or {*said} <= {*lines})
    assert code.count("\n") <= 30 and f"in one file of {code.count(chr(10))} lines" in KIND


def test_an_op_of_a_name_that_is_taken_is_refused(tmp_path):
    """A copied module would silently replace the op; one that cannot be read is in nobody's way."""
    norms = copied(tmp_path, "*.so") / "ops/norm"
    (norms / "notes.py").write_bytes(b"# caf\xe9, in no encoding\n")
    shutil.copy(norms / "rmsnorm.py", norms / "rmsnorm_old.py")
    command = [sys.executable, "-c", "import tilewright.ops"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode and "the name 'rmsnorm' of an op" in run.stderr
