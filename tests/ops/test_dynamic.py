"""torch.compile with numbers among a call's arguments that are symbolic: with dynamic=True, or
because they change from call to call.
"""

import dataclasses
import functools
import inspect

import pytest
import torch
from helpers import DEVICE
from small_cases import differentiate, inputs, small_cases
from torch._dynamo.utils import counters

from tilewright import ops
from tilewright.core.takes import NumberArgument
from tilewright.ops import OPS

BASIC = (bool, int, float, str, torch.dtype, type(None))
# They refuse inplace=True under torch.compile, which plans memory itself.
REFUSED = ("cross_entropy", "logprob_entropy")


def options(value, name=""):
    """(name, value) of the Python constants in an argument, those of a value's fields included. A
    number is its type and sign: others are told apart by branches alone, which read 0 and 1.
    """
    if type(value) in (int, float) and value not in (0, 1):
        yield name, (type(value), value > 0)
    elif isinstance(value, BASIC):
        yield name, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from options(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for field in value._fields:
            yield from options(getattr(value, field), f"{name}.{field}")


def chosen(name, op):
    """Few of an op's contract cases that have each value of each option."""
    seen, cases = set(), []
    for case in op.cases:
        if "contract" in case.tags:
            arguments = case.make("cpu", torch.float32, 0)
            if arguments.get("inplace") and name in REFUSED:
                continue
            found = {o for name, value in arguments.items() for o in options(value, name)}
            if not cases or found - seen:
                seen |= found
                cases.append(case)
    return cases


CALLS = [(name, case) for name, op in OPS.items() for case in chosen(name, op)]


def flat(result):
    return torch.utils._pytree.tree_leaves(result)


@pytest.mark.parametrize("name, case", CALLS, ids=[f"{n}-{c.name}" for n, c in CALLS])
def test_a_call_with_its_options_is_one_graph(name, case):
    op = OPS[name]
    if name == "newton_schulz" and torch.__version__ < "2.13":
        pytest.skip(f"torch {torch.__version__} does not trace sums of comparisons of a number")
    arguments = case.make(DEVICE, torch.float32, 0)
    if op.choose(DEVICE, torch.float32) == "eager":
        pytest.skip("the eager twin is compiled by tests of the contract")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda **given: op.public(**given), dynamic=True, fullgraph=True, backend="eager"
    )
    expected = flat(op.public(**case.make(DEVICE, torch.float32, 0)))
    for found, want in zip(flat(compiled(**arguments)), expected, strict=True):
        torch.testing.assert_close(found, want, equal_nan=True)


# ---- numbers that change with the step

STEPS = 10


def rows_of_values(value, integer):
    """Candidates: ten values each, none of them 0 or 1, for which PyTorch makes graphs of their
    own.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        value = None
    if integer or type(value) is int:
        for start in (value, 2):
            for step in (1, -1, 4):
                if start is not None and step * start >= 0 and start not in (0, 1):
                    yield [start + step * i for i in range(STEPS)]
        yield [128 + 4 * i for i in range(STEPS)]
        return
    for start in filter(None, (value, 0.25, 1.25)):
        yield [start * (1 + (i + 1) / 32) for i in range(STEPS)]


def varied(op):
    """{case: {argument: ten values that it takes there}}, with each number that the op takes and
    does not declare constant in one case.
    """
    found, defaults = {}, inspect.signature(op.public).parameters
    cases = [case for case in small_cases(op) if not inputs(case).get("inplace")]
    for a in op.public.takes.arguments:
        if not isinstance(a, NumberArgument) or a.static:
            continue
        # First where the case gives the number, so that the call depends on it.
        ordered = sorted(cases, key=lambda case: inputs(case).get(a.name) is None)
        default = defaults[a.name].default
        tried = (
            (case, values)
            for case in ordered
            for values in rows_of_values(inputs(case).get(a.name, default), a.integer)
        )
        accepted = next((pair for pair in tried if takes(op, *pair, a.name)), None)
        assert accepted is not None, f"no case of {op.name} takes other values of {a.name}"
        found.setdefault(accepted[0], {})[a.name] = accepted[1]
    return found


def takes(op, case, values, name):
    try:
        for value in (values[0], values[-1]):
            op.public(**inputs(case) | {name: value})
    except (ValueError, TypeError, IndexError):
        return False
    return True


def counted(fn):
    """fn, compiled whole; from here `graphs` counts."""
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(fn, backend="aot_eager", fullgraph=True)


def graphs():
    return counters["stats"]["unique_graphs"]


def assert_two_graphs(fn, calls):
    """fn(**call), compiled whole, has the results and gradients that it has without, in two graphs:
    that of the first call and one for any numbers. call(i): the arguments of call i, made anew.
    """
    compiled = counted(fn)
    for i in range(STEPS):
        found, wanted = differentiate(compiled, calls(i)), differentiate(fn, calls(i))
        for f, w in zip(found, wanted, strict=True):
            if w is None or f is None:
                assert f is w
            else:
                f, w = (t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (f, w))
                torch.testing.assert_close(f, w, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert graphs() <= 2


@pytest.mark.parametrize("name", OPS)
def test_numbers_that_change_from_call_to_call_make_two_graphs(name):
    op = OPS[name]
    for case, values in varied(op).items():
        assert_two_graphs(
            op.public,
            lambda i, case=case, values=values: (
                inputs(case) | {argument: row[i] for argument, row in values.items()}
            ),
        )


def test_every_constant_number_is_one_of_a_model_or_a_recipe():
    """What a step's schedule or state decides is none."""
    constant = {
        a.name
        for op in OPS.values()
        for a in op.public.takes.arguments
        if isinstance(a, NumberArgument) and a.static
    }
    assert constant == {
        *("num_heads", "num_kv_heads", "rotary_dim", "num_experts"),
        *("groups", "topk_groups", "k", "steps"),  # of Newton-Schulz
        *("p", "dropout_p"),
    }


@pytest.mark.parametrize("pair", [(0.5, 0.75), (0.9, 0.95)])
def test_decays_that_change_make_two_graphs(pair):
    def step(p, g, m, v, betas):
        return ops.adamw_([p], [g], [m], [v], step=7, lr=0.1, betas=betas)

    def call(i):
        g = torch.Generator().manual_seed(i)
        tensors = (torch.rand(5, generator=g) for _ in range(4))
        return {
            **dict(zip("pgmv", tensors, strict=True)),
            "betas": tuple(b + i / 1000 for b in pair),
        }

    assert_two_graphs(step, call)


def test_noise_that_changes_with_the_step_makes_two_graphs():
    packed = ops.quantize_nf4(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))

    def noisy(alpha, seed, step):
        noise = ops.AQN(alpha, seed, step)
        return ops.aqn_noise(9, noise), ops.dequantize_nf4(packed, noise=noise)

    assert_two_graphs(noisy, lambda i: {"alpha": 0.5 / (i + 2), "seed": 5 + i, "step": 9 + i})


def test_zero_has_a_graph_of_its_own():
    """It may decide on what is computed."""
    fn = functools.partial(ops.cross_entropy, target=torch.tensor([0, 2]))
    compiled = counted(fn)
    logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    for z_loss in (0.5, 0.25, 0.0, 0.125, 0.0):
        torch.testing.assert_close(compiled(logits, z_loss=z_loss), fn(logits, z_loss=z_loss))
    assert graphs() == 3
