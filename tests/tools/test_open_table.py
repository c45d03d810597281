"""External implementations: registered by a program, or installed as entry points."""

import inspect
import json
import os
import pathlib
import subprocess

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import tilewright
from tilewright import __main__ as cli
from tilewright.core.registry import Implementation, ImplementationUnavailable, Op
from tilewright.ops import AQN, OPS, hadamard, rmsnorm
from tilewright.ops.attention.attention import ATTENTION
from tilewright.ops.norm.rmsnorm import RMSNORM, rmsnorm_eager
from tilewright.ops.quant.aqn import AQN_NOISE
from tilewright.ops.quant.hadamard import HADAMARD


def times(name, factor, **options):
    return Implementation(name, lambda: lambda x: x * factor, **{"devices": ("cpu",), **options})


@pytest.fixture
def op(monkeypatch):
    """An op of the table that multiplies: by 1 as the eager twin, by 2 as `two`."""
    op = Op("probe", None, lambda x: x * 1, (times("two", 2, aliases=("zwei",)),))
    op.public = lambda x, implementation="auto": op.pick(implementation, x)(x)
    monkeypatch.setitem(OPS, "probe", op)
    return op


@pytest.fixture
def table():
    """Implementations, restored after the test."""
    ops = HADAMARD, ATTENTION, RMSNORM, AQN_NOISE
    before = [op.implementations for op in ops]
    yield
    for op, implementations in zip(ops, before, strict=True):
        op.implementations = implementations


# ---- registered by a program


def test_an_implementation_is_added_after_ours_and_before_the_eager_twin(op):
    x = torch.ones(1)
    assert op.public(x) == 2
    tilewright.register_implementation("probe", times("three", 3))
    assert op.names() == ["two", "three", "eager"]
    assert op.public(x) == 2 and op.public(x, implementation="three") == 3
    assert tilewright.resolve("probe", "three", "cpu")(x) == 3
    with tilewright.use("three"):
        assert op.public(x) == 3


def test_auto_takes_what_comes_before_and_forgets_what_it_chose(op):
    x = torch.ones(1)
    assert op.public(x) == 2 and op.part(x)(x) == 2
    tilewright.register_implementation("probe", times("three", 3), before="zwei")
    assert op.names() == ["three", "two", "eager"]
    assert op.public(x) == 3 and op.part(x)(x) == 3
    tilewright.register_implementation("probe", times("gpu", 4, devices=("cuda",)), before="three")
    assert op.public(x) == 3, "its devices do not name the CPU"
    tilewright.register_implementation("probe", times("four", 4), before="two")
    assert op.names() == ["gpu", "three", "four", "two", "eager"] and op.public(x) == 3


def test_auto_takes_it_where_ours_cannot_run(op):
    x = torch.ones(1, dtype=torch.float64)
    assert op.public(x) == 1
    tilewright.register_implementation("probe", times("wide", 5, dtypes=(torch.float64,)))
    assert op.public(x) == 5 and op.public(x.float()) == 2


def test_compiled_code_follows(op):
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def step(x):
        return op.public(x) + 0

    x = torch.ones(1)
    assert step(x) == 2 and step(x) == 2 and counter.frame_count == 1
    tilewright.register_implementation("probe", times("three", 3), before="two")
    assert step(x) == 3 and step(x) == 3 and counter.frame_count == 2


UNASKED = "has `refuses`, which is never called: calls of this op"


@pytest.mark.parametrize(
    "name, implementation, before, error, sentence",
    [
        ("prob", times("new", 3), None, ValueError, r"unknown op 'prob'; did you mean 'probe'\?"),
        ("probe", times("two", 3), None, ValueError, "the name 'two' is taken; have"),
        ("probe", times("zwei", 3), None, ValueError, "the name 'zwei' is taken"),
        ("probe", times("new", 3, aliases=("eager",)), None, ValueError, "the name 'eager' is"),
        ("probe", times("auto", 3), None, ValueError, "the name 'auto' is taken"),
        ("probe", times("new", 3), "thre", ValueError, "unknown implementation 'thre'"),
        ("probe", lambda x: x, None, TypeError, "must be a tilewright.Implementation, got <func"),
        ("probe", times(3, 3), None, TypeError, "name must be a str, got 3"),
        ("probe", times("new", 3, refuses=lambda request: None), None, ValueError, UNASKED),
    ],
)
def test_what_cannot_be_added_is_refused(op, name, implementation, before, error, sentence):
    with pytest.raises(error, match=sentence):
        tilewright.register_implementation(name, implementation, before=before)
    assert op.names() == ["two", "eager"]


def test_auto_steps_over_what_an_added_implementation_refuses(table):
    request, first = ATTENTION.requests[0], ATTENTION.implementations[0].name
    new = times("new", 3, refuses=lambda r: "takes no such call" if r == request else None)
    tilewright.register_implementation("attention", new, before=first)
    assert ATTENTION.choose("cpu", torch.float32) == "new"
    assert ATTENTION.choose("cpu", torch.float32, request) != "new"
    with pytest.raises(ImplementationUnavailable, match=r"attention\[new\]: takes no such"):
        ATTENTION.resolve("new", "cpu", torch.float32, request)


def add(op, load):
    tilewright.register_implementation(op, Implementation("acme", load, devices=("cpu",)))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_norm_draws_noise_by_the_added_implementation_of_its_name(compiled, table):
    """Also where code was compiled before it was added."""
    x, weight, noise = torch.ones(2, 16), torch.ones(16), AQN(0.5, 1)

    def norm(x):
        return rmsnorm(x, weight, noise=noise, implementation="acme")

    if compiled:
        torch._dynamo.reset()
        norm = torch.compile(norm, backend="eager", fullgraph=True)
    add("rmsnorm", lambda: rmsnorm_eager)
    expected = rmsnorm(x, weight, noise=noise, implementation="eager")
    torch.testing.assert_close(norm(x), expected)
    add("aqn_noise", lambda: lambda like, first, n, *rest: like.new_ones(n))
    torch.testing.assert_close(norm(x), torch.full((2, 16), 1.5))


def product(x, size, seed, inverse, factor=1.0):
    """The transform as a matrix product, wrong by `factor` in the first element."""
    if seed is not None:
        raise ImplementationUnavailable("acme: takes no signs")
    h = torch.ones(1, 1, device=x.device)
    while h.shape[0] < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    y = (x.float().unflatten(-1, (-1, size)) @ (h * size**-0.5)).flatten(-2)
    at = torch.zeros_like(y)
    at.view(-1)[:1] = factor - 1
    return (y * (1 + at)).to(x.dtype)


def check(*options):
    return cli.main(["check", "hadamard", "--device", "cpu", "--implementation", *options])


@pytest.mark.parametrize("factor, rc", [(1.0, 0), (1.05, 1)], ids=["right", "wrong"])
def test_it_is_held_to_the_contract_from_the_command_line(table, capsys, factor, rc):
    add("hadamard", lambda: lambda *a: product(*a, factor=factor))
    assert check("acme", "--dtype", "float32") == rc
    out = capsys.readouterr().out
    assert ("BROKEN at [0" in out) == bool(rc) and "acme: takes no signs" in out
    assert check("acme", "--dtype", "float64") == 1
    assert "takes float32, bfloat16, float16, not float64" in capsys.readouterr().err


def refuses(*arguments):
    raise ImplementationUnavailable("acme: computes nothing")


@pytest.mark.parametrize(
    "way, said",
    [(lambda x: x, "raises TypeError"), (refuses, "0 hold, 0 break")],
    ids=["raises", "computes nothing"],
)
def test_an_implementation_without_a_result_does_not_pass(table, capsys, way, said):
    add("hadamard", lambda: way)
    assert check("acme") == 1 and said in capsys.readouterr().out


def test_check_refuses_what_it_does_not_know(capsys):
    for arguments, said in (
        (["nope", "--implementation", "eager"], "unknown op 'nope'"),
        (["hadamard", "--implementation", "nope"], "unknown implementation 'nope'"),
        (["hadamard"], "check: --implementation is one of auto, triton, cpp, eager\n"),
    ):
        assert cli.main(["check", *arguments]) == 2
        assert said in capsys.readouterr().err


# ---- installed

ROOT = pathlib.Path(tilewright.__file__).parents[1]
PACKAGE = """
import sys
import torch
from tilewright import Implementation, ImplementationUnavailable

def load():
    import tilewright.ops  # what an implementation needs is imported when it is used
    from acme_product import product
    from tilewright.ops.quant.hadamard import hadamard_eager

    def matrix(x, size, seed, inverse):
        way = product if seed is None else hadamard_eager
        return way(x, size, seed, inverse)

    return matrix

matrix = Implementation("matrix", load, devices=("cpu",))
taken = Implementation("cpp", load)
other = Implementation("another", load)
aliased = Implementation("aliased", load, aliases=("triton",))
picky = Implementation("picky", load, refuses=lambda request: "never asked")
number = 3
"""
POINTS = """
[tilewright.implementations]
hadamard.matrix = acme:matrix
hadamard.broken = acme_broken:matrix
hadamard.number = acme:number
hadamard.cpp = acme:taken
hadamard.renamed = acme:other
hadamard.aliased = acme:aliased
hadamard.picky = acme:picky
hadamard = acme:matrix
hadamrd.matrix = acme:matrix
"""
# One for every other op, which needs the package.
EARLY = """
from tilewright import Implementation
from tilewright.ops import AQN

early = Implementation("early", lambda: None, missing=lambda device: "says no")
"""
SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[2])
import forked, tilewright.ops
early = {"acme", "acme_early"} & set(sys.modules)
assert not early, "nothing is imported before it is looked at"
from tilewright import __main__ as cli
from tilewright.bench import __main__ as bench
forked.briefly()
codes = [
    cli.main(["explain", "--all", "--device", "cpu"]),
    cli.main(["check", "hadamard", "--implementation", "matrix", "--device", "cpu",
              "--dtype", "float32"]),
    bench.main(["run", "--op", "hadamard", "--provider", "matrix", "--case", "qwen3-8b",
                "--dtype", "float32", "--device", "cpu", "--rounds", "1",
                "--sample-ms", "0", "--out", sys.argv[1]]),
]
print(json.dumps(codes))
"""


def test_a_distribution_adds_implementations_by_entry_points(compiling, tmp_path):
    """One is good; the others are listed with their faults, never hidden, and never break
    the rest.
    """
    site, out = tmp_path / "site", tmp_path / "out"
    info = site / "acme_kernels-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.2\n")
    others = [f"{name}.early = acme_early:early\n" for name in OPS if name != "hadamard"]
    (info / "entry_points.txt").write_text("".join((POINTS, *others)))
    (site / "acme_early.py").write_text(EARLY)
    (site / "acme.py").write_text(PACKAGE)
    (site / "acme_broken.py").write_text("import a_missing_package\n")
    head = "import torch\nfrom tilewright import ImplementationUnavailable\n\n"
    (site / "acme_product.py").write_text(head + inspect.getsource(product))
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [compiling, "-c", SCRIPT, out, site]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    rows = {line.split()[1]: line for line in lines if line.startswith("hadamard ")}
    assert sum(" early " in line and "says no" in line for line in lines) == len(OPS) - 1
    assert rows["matrix"].endswith("usable")
    package = "of acme-kernels 1.2"
    for name, reason in {
        "broken": "does not import: ModuleNotFoundError: No module named 'a_missing",
        "number": "is no tilewright.Implementation, but 3",
        "acme:cpp": "the name 'cpp' is taken",
        "renamed": "holds an implementation called 'another'",
        "aliased": "the name 'triton' is taken",
        "picky": f"{UNASKED} pass no request",
    }.items():
        point = name.removeprefix("acme:")
        assert f"entry point 'hadamard.{point}' {package}: {reason}" in rows[name]
    assert f"entry point 'hadamard' {package}: has no name" in rows["acme:"]
    unknown = f"entry point 'hadamrd.matrix' {package}: unknown op 'hadamrd'; did you"
    assert any(line.startswith(unknown) for line in lines)
    assert json.loads(lines[-1]) == [0, 0, 0]
    units = [json.loads(line) for line in (out / "suite.jsonl").read_text().splitlines()]
    timed = [row for unit in units for row in unit.get("rows", ()) if row.get("provider")]
    assert [r["provider"] for r in timed] == ["matrix"] and timed[0]["forward"], timed


def test_nothing_installed_changes_no_op():
    assert hadamard(torch.ones(16)).shape == (16,)
    assert all("." not in name and ":" not in name for op in OPS.values() for name in op.names())
