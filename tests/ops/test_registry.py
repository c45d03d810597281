"""Selection, over the whole registry: names, `auto`, and the reasons for rejections."""

import functools
import itertools
import json
import pathlib
import re
import subprocess
import sys

import pytest
import torch

from tilewright import __main__ as cli
from tilewright import selection
from tilewright.core import platform
from tilewright.core.registry import FLOATS, Implementation, ImplementationUnavailable, Op
from tilewright.ops import OPS
from tilewright.ops.attention.context_parallel import ContextParallel, context_parallel_attention
from tilewright.ops.linear_attention.context_parallel import (
    context_parallel_causal_conv1d,
    context_parallel_gated_delta_rule,
)
from tilewright.selection import use

ROOT = pathlib.Path(__file__).parents[2]
EVERY_OP = pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
EVERY_IMPLEMENTATION = pytest.mark.parametrize(
    "op, impl",
    [
        pytest.param(op, i, id=f"{op.name}-{i.name}")
        for op in OPS.values()
        for i in op.implementations
    ],
)


def probe(*implementations, name="probe"):
    """An op that multiplies: by 1 as the eager twin, else by the number from the implementation's
    `load`.
    """
    op = Op(name, None, lambda x: x * 1, implementations)
    op.public = lambda x, implementation="auto": op.pick(implementation, x)(x)
    return op


def times(name, factor, **options):
    return Implementation(name, lambda: lambda x: x * factor, **{"devices": ("cpu",), **options})


@pytest.fixture
def listed(monkeypatch):
    """Adds an op to the registry for one test."""

    def put(op):
        monkeypatch.setitem(OPS, op.name, op)
        return op

    return put


# ---- names


@EVERY_OP
def test_what_names_no_implementation_is_refused_with_the_names_there_are(op):
    with pytest.raises(ValueError, match="unknown implementation 'nope'") as caught:
        op.resolve("nope", "cpu")
    assert all(repr(name) in str(caught.value) for name in ("auto", *op.names()))
    op.unpinned(torch.ones(1))  # the cache entry of an unnamed call is no name either
    for name in ([], {}, 3, None):
        for ask, of in ((op.resolve, "cpu"), (op.pick, torch.ones(1))):
            said = rf"^{op.name}.*implementation must be one of \['auto', .*, got.*"
            with pytest.raises(TypeError, match=said + re.escape(repr(name))):
                ask(name, of)


def test_an_unknown_op_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match="unknown op 'nope'") as caught:
        selection.resolve("nope")
    assert all(repr(name) in str(caught.value) for name in OPS)


@EVERY_OP
def test_the_table_is_well_formed(op):
    assert OPS[op.name] is op and selection.resolve(op.name, "eager", "cpu") is op.eager
    assert op.names()[-1] == "eager" and op.names().count("eager") == 1
    assert len(set(op.names())) == len(op.implementations) and "auto" not in op.names()
    assert op.public.__doc__
    names = [case.name for case in op.cases if "contract" in case.tags]
    assert names and len(set(names)) == len(names)


# ---- a name never falls back


@EVERY_IMPLEMENTATION
def test_a_name_gives_that_implementation_or_its_reason(op, impl):
    dtypes = (*FLOATS, torch.float64, torch.int64)
    for at in itertools.product(("cpu", "cuda", "mps"), dtypes):
        reason = impl.why_not(*at)
        if reason is None:
            found = op.resolve(impl.name, *at)
            assert qualified(found) == qualified(impl.load())  # `load` may return a new closure
            continue
        with pytest.raises(ImplementationUnavailable) as caught:
            op.resolve(impl.name, *at)
        assert str(caught.value).startswith(f"{op.name}[{impl.name}]: {reason} (usable here: "), at


def qualified(fn):
    """A callable's name: of a function, a functools.partial of one, or a class."""
    fn = getattr(fn, "func", fn)
    return getattr(fn, "__qualname__", type(fn).__qualname__)


def smallest(op):
    """The op on the smallest non-empty inputs of its cases."""
    sizes = {}
    for case in op.cases:
        if "contract" in case.tags:
            kw = case.make("cpu", torch.float32, 0)
            elements = [v.numel() for v in kw.values() if isinstance(v, torch.Tensor)]
            if all(elements):
                sizes[sum(elements)] = kw
    return functools.partial(op.public, **sizes[min(sizes)])


def called(op, implementation):
    return smallest(op)(implementation=implementation)


@EVERY_IMPLEMENTATION
def test_a_call_refuses_as_resolve_does(op, impl, monkeypatch):
    for every in OPS.values():  # clear caches before and after: cases call ops
        monkeypatch.setattr(every, "_table", {})
        monkeypatch.setattr(every, "_unpinned", {})
    monkeypatch.setattr(platform, "interpreting", lambda: False)
    monkeypatch.setattr(platform, "no_extension", lambda: "the extension is hidden by this test")
    reason = impl.why_not("cpu", torch.float32)
    if impl.name == "triton":
        assert reason == "Triton kernels take CPU tensors only under TRITON_INTERPRET=1"
    if impl.name == "cpp":
        assert reason == "the extension is hidden by this test"
    if reason is None:
        called(op, impl.name)
        return
    with pytest.raises(ImplementationUnavailable) as caught:
        called(op, impl.name)
    assert reason in str(caught.value)


def test_a_broken_import_is_unavailable_with_its_reason_and_does_not_fall_back():
    def load():
        raise ImportError("libbroken.so: cannot open shared object file")

    broken = Implementation("broken", load, devices=("cpu",))
    op = probe(broken, times("next", 2))
    for name in (
        "broken",
        "auto",
    ):  # auto chose it: silently taking the next one would hide the failure
        with pytest.raises(
            ImplementationUnavailable, match=r"probe\[broken\].*libbroken.so"
        ) as caught:
            op.public(torch.ones(1), implementation=name)
        assert isinstance(caught.value.__cause__, ImportError)
    assert op.public(torch.ones(1), implementation="next") == 2


# ---- what auto chooses


@EVERY_OP
def test_auto_is_the_first_that_is_usable_and_meant_for_the_device(op):
    for device, dtype in itertools.product(("cpu", "cuda"), (*FLOATS, torch.float64)):
        chosen = op.choose(device, dtype)
        for i in op.implementations[: op.names().index(chosen)]:
            if device in i.devices and i.why_not(device, dtype) is None:
                assert i.slower_than(device, None) == chosen
        assert chosen == "eager" or op.implementation(chosen).why_not(device, dtype) is None
        if device == "cpu":
            assert chosen != "triton", "the interpreter is for tests, never a choice"


def test_auto_depends_on_device_and_dtype(monkeypatch):
    op = probe(
        times("half", 2, dtypes=(torch.bfloat16,)),
        times("gpu", 3, devices=("cuda",)),
        times("broken", 4, missing=lambda device: "not today"),
        times("any", 5),
    )
    assert op.choose("cpu", torch.bfloat16) == "half"
    assert op.choose("cpu", torch.float32) == "any"
    assert op.choose("cuda", torch.float32) == "gpu"
    assert op.choose("cpu", torch.float64) == "eager"
    assert op.choose("mps", torch.float32) == "eager"
    assert op.public(torch.ones(1)) == 5
    assert op.public(torch.ones(1, dtype=torch.bfloat16)) == 2, (
        "a choice is remembered for one dtype"
    )


# ---- pins


def test_use_pins_restores_and_nests(listed):
    op = listed(probe(times("two", 2), times("three", 3)))
    x = torch.ones(1)
    assert op.public(x) == 2
    with use(probe="three"):
        assert op.public(x) == 3
        with use("eager"):
            assert op.public(x) == 1
            with use(probe="auto"):
                assert op.public(x) == 2
            assert op.public(x) == 1
        assert op.public(x) == 3
        assert op.public(x, implementation="two") == 2, "an explicit name wins"
        assert selection.resolve("probe", "auto", "cpu")(x) == 3
    assert op.public(x) == 2


def test_use_auto_takes_every_outer_pin_back(listed):
    op = listed(probe(times("two", 2)))
    with use("eager"):
        assert op.public(torch.ones(1)) == 1
        with use("auto"):
            assert op.public(torch.ones(1)) == 2
        with use("auto", probe="eager"):
            assert op.public(torch.ones(1)) == 1
        assert op.public(torch.ones(1)) == 1


def test_use_restores_after_an_exception(listed):
    op = listed(probe(times("two", 2)))
    with pytest.raises(KeyError), use("eager"):
        raise KeyError
    assert op.public(torch.ones(1)) == 2


def test_one_name_for_all_leaves_ops_without_it_alone(listed):
    op = listed(probe(times("two", 2), times("only_here", 7)))
    with use("only_here"):
        assert op.public(torch.ones(1)) == 7
        assert all(called(other, "auto") is not None for other in OPS.values() if other is not op)


def test_a_pin_never_falls_back(listed):
    absent = times("absent", 3, missing=lambda device: "it is not there")
    op = listed(probe(times("two", 2), absent))
    with use(probe="absent"), pytest.raises(ImplementationUnavailable, match="it is not there"):
        op.public(torch.ones(1))


def in_context_parallel():
    q = torch.randn(1, 2, 4, 8)
    return functools.partial(context_parallel_attention, q, q, q, ContextParallel())


def rule_in_context_parallel():
    q, gate = torch.randn(1, 4, 2, 8), -torch.rand(1, 4, 2)
    return functools.partial(
        context_parallel_gated_delta_rule, q, q, q, gate, -gate, ContextParallel()
    )


def convolution_in_context_parallel():
    x, weight = torch.randn(1, 4, 2), torch.randn(2, 3)
    return functools.partial(context_parallel_causal_conv1d, x, weight, ContextParallel())


# Calls of composed ops, without the implementation. test_operators.py also tests those of the
# registry in compiled code and for gradients.
COMPOSED = {
    **{
        name: functools.partial(smallest, OPS[name])
        for name in (
            "linear_cross_entropy",
            "linear_logprob",
            "linear_policy_loss",
            "linear_preference_loss",
            "qk_norm_rope",
            "moe_mlp",
            "moe_lora",
            "quantized_linear",
            "fp8_linear",
            "low_precision_linear",
            "low_precision_grouped_gemm",
        )
    },
    "context_parallel_attention": in_context_parallel,
    "context_parallel_gated_delta_rule": rule_in_context_parallel,
    "context_parallel_causal_conv1d": convolution_in_context_parallel,
}


@pytest.mark.parametrize("name", COMPOSED)
def test_a_named_implementation_asks_no_part_by_auto(name, monkeypatch):
    """`auto` would follow `use`; a name fixes the parts too."""
    call, asked, pick = COMPOSED[name](), [], Op.pick
    monkeypatch.setattr(
        Op, "pick", lambda op, part, *a: (asked.append((op.name, part)), pick(op, part, *a))[1]
    )
    op = OPS[name.removeprefix("context_parallel_")]
    for impl in op.implementations:
        if impl.name == "triton" or impl.why_not("cpu", torch.float32):
            continue  # minutes in Triton's interpreter; its parts are chosen the same way
        with use("eager"):
            call(implementation=impl.name)
        assert (op.name, impl.name) in asked
    assert not [ask for ask in asked if ask[1] == "auto"]


@pytest.mark.parametrize(
    "args, kwargs, sentence",
    [
        (("nope",), {}, r"no op has an implementation 'nope'; have \['auto', 'triton', "),
        (
            ("trition",),
            {},
            r"no op has an implementation 'trition'; did you mean 'triton'\? have \['auto', ",
        ),
        ((), {"nope": "eager"}, "unknown op 'nope'; "),
        ((), {"rmsnrom": "eager"}, r"unknown op 'rmsnrom'; did you mean 'rmsnorm'\? have \["),
        ((), {next(iter(OPS)): "nope"}, "unknown implementation 'nope'"),
    ],
)
def test_use_refuses_unknown_names(args, kwargs, sentence):
    with pytest.raises(ValueError, match=sentence), use(*args, **kwargs):
        pytest.fail("the block ran")


# ---- tilewright explain


def test_explain_shows_every_row_with_its_reason_and_marks_the_choice(capsys):
    assert cli.main(["explain", "--all", "--device", "cpu", "--dtype", "bfloat16"]) == 0
    rows = capsys.readouterr().out.splitlines()[4:]
    states = set()
    for op in OPS.values():
        for impl in op.implementations:
            mark = "*" if impl.name == op.choose("cpu", torch.bfloat16) else " "
            state = impl.why_not("cpu", torch.bfloat16) or "usable"
            row = rows.pop(0)
            assert row.endswith(f"  {state}") and row.removesuffix(state).split() == [
                op.name,
                *mark.split(),
                impl.name,
            ], row
            states.add(len(row) - len(state))
    assert not rows and len(states) == 1, "a column of states"


def test_explain_opens_with_the_choice_for_every_op(capsys):
    assert cli.main(["explain", "--device", "cpu", "--dtype", "bfloat16"]) == 0
    head, *rows = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert head.split() == ["op", "auto", "also", "usable"] and len(rows) == len(OPS)
    for op, row in zip(OPS.values(), rows, strict=True):
        name, auto, *others = row.replace(",", "").split()
        assert (name, auto) == (op.name, op.choose("cpu", torch.bfloat16))
        assert {auto, *others} == set(op.usable("cpu", torch.bfloat16))


def test_explain_groups_the_unusable_by_reason(capsys):
    assert cli.main(["explain", "--device", "cpu"]) == 0
    [*_, unusable, _] = capsys.readouterr().out.split("\n\n")
    reasons = {
        (i.name, reason)
        for op in OPS.values()
        for i in op.implementations
        if (reason := i.why_not("cpu", torch.float32))
    }
    assert unusable.startswith("not usable here:\n") == bool(reasons)
    lines = unusable.splitlines()[1:]
    assert len(lines) == len(reasons)
    for name, reason in reasons:
        assert any(line.split()[0] == name and reason in line for line in lines), (name, reason)


def test_explain_prints_json(capsys):
    assert cli.main(["explain", "--json", "--device", "cpu"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["device"], told["dtype"]) == ("cpu", "float32") and told["environment"]["torch"]
    assert list(told["ops"]) == list(OPS)
    for op in OPS.values():
        row = told["ops"][op.name]
        assert row["auto"] == op.choose("cpu", torch.float32)
        for impl in op.implementations:
            reason = impl.why_not("cpu", torch.float32)
            assert row["implementations"][impl.name]["reason"] == reason
            assert row["implementations"][impl.name]["usable"] == (reason is None)


@EVERY_OP
def test_explain_one_op_shows_its_contract(op, capsys):
    assert cli.main(["explain", op.name, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert op.public.__doc__.strip().splitlines()[0] in out
    assert not any(f"\n{other} " in out for other in OPS if other != op.name)
    refused = [r for i in op.implementations for q in op.requests if (r := i.refuses(q))]
    assert all(reason in out for reason in refused) and bool(refused) == bool(op.requests)


def test_explain_refuses_what_it_does_not_know(capsys):
    assert cli.main(["explain", "nope"]) == 2
    assert "unknown op 'nope'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        cli.main(["explain", "--dtype", "int8"])
    assert caught.value.code == 2


def test_explain_is_a_command():
    run = subprocess.run(
        [sys.executable, "-m", "tilewright", "explain"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert all(op in run.stdout for op in OPS)
