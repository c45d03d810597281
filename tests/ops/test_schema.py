"""Operators whose arguments and results are structures (core/schema.py), by every way of a call."""

from typing import NamedTuple

import pytest
import torch

from tilewright.core import library
from tilewright.core.library import declare
from tilewright.core.schema import Signature


class Factors(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor | None


class Sum(NamedTuple):
    c: torch.Tensor
    d: torch.Tensor | None


class Options(NamedTuple):
    power: float
    total: bool


class Found(NamedTuple):
    y: torch.Tensor
    total: torch.Tensor | None


def allocate(
    factors: Factors,
    extra: Sum | None,
    by: torch.Tensor | float | None,
    options: Options,
    group: torch.distributed.ProcessGroup | None,
) -> Found:
    total = factors.a.new_empty(()) if options.total else None
    return Found(torch.empty_like(factors.a), total)


def compute(factors, extra, by, options, group):
    """y = (a b)^power + c d + by; total = its sum, if requested."""
    assert type(options) is Options and type(factors) is Factors
    assert extra is None or type(extra) is Sum
    y = factors.a if factors.b is None else factors.a * factors.b
    y = y**options.power
    if extra is not None:
        y = y + (extra.c if extra.d is None else extra.c * extra.d)
    y = y if by is None else y + by
    return Found(y, y.sum() if options.total else None)


@pytest.fixture
def operator(monkeypatch):
    """seen: what the formula was given."""
    with torch.library._scoped_library("tilewright", "FRAGMENT") as scoped:
        monkeypatch.setattr(library, "_LIBRARY", scoped)
        seen = []

        declared = declare(allocate)

        @declared.formula(found=lambda result: seen.append(result) or result.total is not None)
        def gradients(op, g, factors, extra, options, found, needs):
            seen.append((factors, extra, options, found))
            assert type(g) is Found
            (a, b), (c, d) = factors, extra or (None, None)
            grad = g.y if g.total is None else g.total.expand_as(a) + (0 if g.y is None else g.y)
            p, ab = options.power, a if b is None else a * b
            inner = grad * p * ab ** (p - 1)
            seen.append({n: needs[n] for n in "abcd"})
            return {
                "a": inner if b is None else inner * b,
                "b": inner * a,
                "c": grad if d is None else grad * d,
                "d": None if c is None else grad * c,
            }

        op = declared.define("structured", compute)
        op.seen = seen
        yield op


def given(requires_grad="a", extra=True, by=None, total=True):
    g = torch.Generator().manual_seed(0)
    a, b, c, d = (torch.rand(5, generator=g) + 0.5 for _ in range(4))
    for name, t in zip("abcd", (a, b, c, d), strict=True):
        t.requires_grad_(name in requires_grad)
    return Factors(a, b), Sum(c, d) if extra else None, by, Options(2.0, total), None


def derivatives(fn, args):
    found = fn(*args)
    leaves = [t for t in (*args[0], *(args[1] or ())) if t.requires_grad]
    outs = [t for t in found if t is not None]
    return found, torch.autograd.grad(outs, leaves, [torch.ones_like(t) for t in outs])


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("total", [True, False])
@pytest.mark.parametrize("by", [None, 3, 2.5, torch.tensor(1.5)])
def test_it_computes_the_same_directly_dispatched_and_compiled(operator, extra, total, by):
    args = given("abcd" if extra else "ab", extra, by, total)
    found, grads = derivatives(operator, args)
    torch._dynamo.reset()
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    for other in (compute, operator.through_dispatcher, compiled):
        same, same_grads = derivatives(other, args)
        assert type(same) is Found and (same.total is None) == (not total)
        for f, s in zip((*found, *grads), (*same, *same_grads), strict=True):
            assert f is s is None or torch.equal(f, s)
    assert type(found) is Found


def test_formulas_get_structures_and_only_needed_gradients_are_returned(operator):
    args = given("bc")
    for call in (operator, operator.through_dispatcher):
        del operator.seen[:]
        _, grads = derivatives(call, args)
        assert len(grads) == 2
        found, (factors, extra, options, total), needs = operator.seen
        assert type(found) is Found and type(factors) is Factors and total is True
        assert type(extra) is Sum and type(options) is Options
        assert needs == {"a": False, "b": True, "c": True, "d": False}


def test_a_formula_gets_what_it_names_as_it_was(operator):
    """Also under torch.func, whose Function has the dispatcher's keys as its first input; and in
    structures, of which only the tensors are saved by autograd.
    """
    given_back = []
    probe = declare(allocate)

    @probe.formula(parts=lambda factors, options, total: [(factors, "text"), options, total])
    def gradients(op, g, parts, by, result, factors):
        given_back.append(parts)
        ((a, b), text), options, total = parts
        assert type(parts) is list and type(parts[0]) is tuple and type(parts[0][0]) is Factors
        assert (text, type(options), by, type(result), result.total) == (
            "text",
            Options,
            2.5,
            Found,
            total,
        )
        return {"a": g.y * 2 * a * b * b}

    op = probe.define("names_of_formula", compute)
    args = given("", extra=False, by=2.5)

    def loss(a):
        return op(args[0]._replace(a=a), *args[1:]).y.sum()

    found = torch.func.grad(loss)(args[0].a)
    leaf = args[0].a.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss(leaf).backward()
    assert torch.equal(found, leaf.grad) and len(given_back) == 2
    assert sum(t.data_ptr() == args[0].b.data_ptr() for t in saved) == 2  # by `parts`, `factors`


def test_a_formula_that_names_nothing_is_refused_where_it_is_declared():
    def gradients(op, g, factors, power):
        return {}

    known = r"\['factors', 'extra', 'by', 'options', 'group', 'y', 'total'\]"
    with pytest.raises(TypeError, match=f"gradients: .* one of {known}, .* got 'power'"):
        declare(allocate).formula()(gradients)
    with pytest.raises(TypeError, match=r"lambda.*got 'nobody'"):
        declare(allocate).formula(power=lambda nobody: nobody)(gradients)
    with pytest.raises(TypeError, match="gradients: no parameter is named 'exponent'"):
        declare(allocate).formula(power=lambda options: 1, exponent=lambda by: by)(gradients)


def test_a_gradient_of_what_is_no_argument_is_refused(operator):
    probe = declare(allocate)
    probe.formula()(lambda op, g: {"factors": g.y})
    op = probe.define("gradient_of_nothing", compute)
    with pytest.raises(TypeError, match=r"gradient_of_nothing must return .*'a'.*got 'factors'"):
        op(*given()).y.sum().backward()


def test_a_missing_gradient_is_none(operator):
    """Only one result is differentiated."""
    args = given("a")
    found = operator(*args)
    (alone,) = torch.autograd.grad(found.total, args[0].a)
    torch.testing.assert_close(alone, 2 * args[0].a.detach() * args[0].b ** 2)


def test_opcheck(operator):
    for args in (given("abcd"), given("a", extra=False, by=2.0, total=False)):
        flat = tuple(operator.signature.flat(args))
        torch.library.opcheck(operator.overload, flat)
        assert list(operator.signature.read(flat)) == list(args)


def test_the_schema_has_the_fields(operator):
    assert str(operator.overload._schema) == (
        "tilewright::structured(Tensor a, Tensor? b, Tensor? c, Tensor? d, Tensor? by, "
        "float? by_number, float power, bool total, str group) -> (Tensor, Tensor)"
    )


def test_fields_with_a_tensor_subclass_go_through_the_dispatcher(operator):
    class Subclass(torch.Tensor):
        pass

    calls, real = [], operator.overload
    operator.overload = lambda *flat: calls.append(flat) or real(*flat)
    args = given("")
    args = args[0]._replace(b=args[0].b.as_subclass(Subclass)), *args[1:]
    operator.overload._schema = real._schema
    operator(*args)
    assert len(calls) == 1 and len(calls[0]) == len(operator.signature.names)


def test_two_arguments_of_one_name_are_refused():
    def twice(factors: Factors, a: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    with pytest.raises(ValueError, match=r"twice: two arguments have one name: \['a', 'b', 'a'\]"):
        Signature(twice)


class Nested(NamedTuple):
    factors: Factors


class Listed(NamedTuple):
    scales: list[torch.Tensor]


def nested(given: Nested) -> torch.Tensor:
    raise NotImplementedError


def listed(given: Listed) -> torch.Tensor:
    raise NotImplementedError


def test_tensors_two_structures_deep_are_refused():
    """Autograd looks for tensors among the arguments of a direct call."""
    with pytest.raises(TypeError, match=r"Nested\.factors must not be a structure with tensors"):
        Signature(nested)


def test_a_list_of_tensors_in_a_structure_is_inspected():
    signature = Signature(listed)
    assert signature.expands and [a.list_of_tensors for a in signature.direct] == [True]
