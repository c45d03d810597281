"""torch.compile(dynamic=True), which makes the numbers among a call's arguments symbolic, too."""

import dataclasses

import pytest
import torch
from helpers import DEVICE

from tilewright.ops import OPS

pytestmark = pytest.mark.recorded(op="parameter")

BASIC = (bool, int, float, str, torch.dtype, type(None))
# They refuse inplace=True under torch.compile, which plans memory itself.
REFUSED = ("cross_entropy", "logprob_entropy")


def options(value, name=""):
    """(name, value) of the Python constants in an argument, those of a value's fields included."""
    if isinstance(value, BASIC):
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
