"""Public functions refuse what they do not declare: each op's declaration, spoiled one argument at
a time, and the declarations themselves.
"""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from helpers import DEVICE

from tilewright.core.takes import NumberArgument, NumberOrTensorArgument, TensorArgument, takes
from tilewright.ops import OPS

MODES = ("llama", "none")
MOST = 8


@takes(
    f"1 <= D <= {2 * 8}",
    "k <= E",
    "x: mask is not None or D % 2 == 0",
    x="float [..., H, D] | [..., D]",
    weight="x | float32 [D] | [H, D]",
    experts="int32 | int64 [E, 2*I, D]",
    mask="bool [x]",
    sums="float [I] | [*L, E, I]",
    again="float [*L]",
    k="int [1, MOST]",
    eps="number (0, 1]",
    offset="number",
    count="float | int64 [] or number [0, inf)",
    mode=MODES,
    inplace="bool",
)
def declared(
    x: torch.Tensor,
    weight: torch.Tensor,
    experts: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    sums: torch.Tensor | None = None,
    again: torch.Tensor | None = None,
    k: int | None = None,
    eps: float = 0.5,
    offset: float = 0.0,
    count: float | torch.Tensor | None = None,
    mode: str = "llama",
    inplace: bool = False,
):
    """x times two."""
    return x * 2


def a(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def call(**changes):
    given = {"x": a(5, 3, 4), "weight": a(4), "experts": a(2, 6, 4, dtype=torch.int32)}
    return declared(**{**given, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"x": a(4)},
        {"x": a(5, 3, 4).bfloat16(), "weight": a(3, 4)},
        {"weight": torch.nn.Parameter(a(4))},
        {"mask": a(5, 3, 4, dtype=torch.bool)},
        {"mask": a(1, 3, dtype=torch.bool), "x": a(1, 3), "weight": a(3)}
        | {"experts": a(2, 0, 3, dtype=torch.int64)},
        {"sums": a(3)},
        {"sums": a(7, 1, 2, 3), "again": a(7, 1)},
        {"k": 2, "eps": 1, "offset": -3, "mode": "none", "inplace": True},
        {"count": 0},
        {"count": a()},
        {"count": a(dtype=torch.int64, device="meta")},
    ],
)
def test_what_is_declared_is_taken(changes):
    assert call(**changes).shape == changes.get("x", a(5, 3, 4)).shape


REFUSED = [
    ({"x": 3}, TypeError, "x must be a torch.Tensor, got int"),
    ({"mask": 3}, TypeError, "mask must be a torch.Tensor or None, got int"),
    (
        {"x": a(4).int()},
        TypeError,
        "x must be one of float32, bfloat16, float16, float64, got int32",
    ),
    (
        {"x": a(4).half(), "weight": a(4).double()},
        TypeError,
        "weight must be x's dtype float16 or float32, got float64",
    ),
    ({"experts": a(2, 6, 4)}, TypeError, "experts must be int32 or int64, got float32"),
    (
        {"x": a(4).to_sparse()},
        TypeError,
        "x must be a strided (dense) tensor, got layout sparse_coo",
    ),
    ({"x": a()}, ValueError, "x must have shape [..., H, D] or [..., D], got []"),
    (
        {"x": a(3, 0)},
        ValueError,
        "x must have shape [..., H, D] or [..., D] with 1 <= D <= 16, got [3, 0]",
    ),
    (
        {"weight": a(2, 4)},
        ValueError,
        "weight must have shape [D] or [H, D], where D = 4, H = 3, got [2, 4]",
    ),
    # A size that x does not give: with one dimension it has no H.
    (
        {"x": a(4), "weight": a(1, 4)},
        ValueError,
        "weight must have shape [D] or [H, D], where D = 4, got [1, 4]",
    ),
    (
        {"experts": a(2, 5, 4, dtype=torch.int32)},
        ValueError,
        "experts must have shape [E, 2*I, D], where D = 4, got [2, 5, 4]",
    ),
    (
        {"mask": a(5, 3, dtype=torch.bool)},
        ValueError,
        "mask must have shape [x], where x = [5, 3, 4], got [5, 3]",
    ),
    (
        {"x": a(3), "weight": a(3), "experts": a(2, 6, 3, dtype=torch.int32)},
        ValueError,
        "x must have shape [..., H, D] or [..., D] with mask is not None or D % 2 == 0, got [3]",
    ),
    (
        {"sums": a(7, 2, 3), "again": a(6)},
        ValueError,
        "again must have shape [*L], where L = [7], got [6]",
    ),
    ({"sums": a(3), "again": a(6)}, ValueError, "again must have shape [*L], got [6]"),
    ({"k": 9}, ValueError, "k must be an int in [1, 8] or None, got 9"),
    ({"k": 3}, ValueError, "k must be such that k <= E, where E = 2, got 3"),
    ({"k": 1.0}, TypeError, "k must be an int or None, got 1.0"),
    ({"k": True}, TypeError, "k must be an int or None, got True"),
    ({"eps": 0}, ValueError, "eps must be a number in (0, 1] in float32, got 0"),
    ({"eps": 1e-46}, ValueError, "eps must be a number in (0, 1] in float32, got 1e-46"),
    ({"eps": float("nan")}, ValueError, "eps must be a number in (0, 1] in float32, got nan"),
    ({"eps": None}, TypeError, "eps must be a number, got None"),
    ({"offset": 1e39}, ValueError, "offset must be a number in (-inf, inf) in float32, got 1e+39"),
    (
        {"count": -1},
        ValueError,
        "count must be a number in [0, inf) in float32 or a torch.Tensor or None, got -1",
    ),
    ({"count": "1"}, TypeError, "count must be a number or a torch.Tensor or None, got '1'"),
    ({"count": True}, TypeError, "count must be a number or a torch.Tensor or None, got True"),
    ({"count": a(1)}, ValueError, "count must have shape [], got [1]"),
    (
        {"count": a(dtype=torch.int32)},
        TypeError,
        "count must be one of float32, bfloat16, float16, float64 or int64, got int32",
    ),
    ({"mode": "gemma"}, ValueError, "mode must be one of ['llama', 'none'], got 'gemma'"),
    ({"inplace": 1}, TypeError, "inplace must be a bool, got 1"),
    (
        {"weight": a(4, device="meta")},
        ValueError,
        "weight is on meta, x on cpu; they must be on one device",
    ),
]


@pytest.mark.parametrize("changes, error, message", REFUSED, ids=[r[2] for r in REFUSED])
def test_what_is_not_declared_is_refused_by_name(changes, error, message):
    with pytest.raises(error) as raised:
        call(**changes)
    assert str(raised.value) == message


class Codes:
    def __init__(self, *shape, device="cpu"):
        self.shape, self.device = shape, torch.device(device)


@takes(
    "q: N % size == 0",
    q="a Codes [N, K]",
    x="float [..., K]",
    like="a Codes",
    size=(16, 32),
    dtype=(torch.float32, torch.float64),
)
def of_objects(
    x: torch.Tensor,
    q: Codes,
    like: Codes | None = None,
    size: int | None = None,
    dtype: torch.dtype = torch.float32,
):
    return x


OBJECTS = [
    ({"q": 3}, TypeError, "q must be a Codes, got int"),
    ({"q": a(4, 4)}, TypeError, "q must be a Codes, got Tensor"),
    ({"q": Codes(32)}, ValueError, "q must have shape [N, K], got [32]"),
    ({"x": a(5)}, ValueError, "x must have shape [..., K], where K = 4, got [5]"),
    ({"x": a(4, device="meta")}, ValueError, "x is on meta, q on cpu; they must be on one device"),
    ({"like": 3}, TypeError, "like must be a Codes or None, got int"),
    ({"size": 8}, ValueError, "size must be one of [16, 32] or None, got 8"),
    ({"size": 16.0}, TypeError, "size must be one of [16, 32] or None, got 16.0"),
    (
        {"size": 32, "q": Codes(48, 4)},
        ValueError,
        "q must have shape [N, K] with N % size == 0, where size = 32, got [48, 4]",
    ),
    (
        {"dtype": torch.int8},
        TypeError,
        "dtype must be one of [torch.float32, torch.float64], got torch.int8",
    ),
    ({"dtype": None}, TypeError, "dtype must be one of [torch.float32, torch.float64], got None"),
]


@pytest.mark.parametrize("changes, error, message", OBJECTS, ids=[r[2] for r in OBJECTS])
def test_objects_and_choices_are_refused_by_name(changes, error, message):
    given = {"x": a(3, 4), "q": Codes(48, 4)}
    for size in (None, 16):  # of no tensors, an object on another device is none of x's concern
        of_objects(**given, size=size, like=Codes(1, device="meta"))
    with pytest.raises(error) as raised:
        of_objects(**{**given, **changes})
    assert str(raised.value) == message


class Held(Codes):
    def __init__(self, requires_grad):
        super().__init__(4, 4)
        self.given = requires_grad

    @property
    def requires_grad(self):
        return self.given


@takes(
    x="float [N]",
    table="constant float [N]",
    limit="constant float [] or number",
    held="a Held",
    either="x",
)
def with_constants(
    x: torch.Tensor,
    table: torch.Tensor | None = None,
    limit: float | torch.Tensor = 1.0,
    held: Held | None = None,
    either: torch.Tensor | Held | None = None,
):
    return x * 1 if table is None else x * table.detach()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "argument, value, got",
    [
        ("table", a(3).requires_grad_(), "one that does; pass table.detach()"),
        ("limit", a().requires_grad_(), "one that does; pass limit.detach()"),
        ("held", Held(True), "a Held with a tensor that does; detach that"),
        ("either", Held(True), "a Held with a tensor that does; detach that"),
    ],
)
def test_a_constant_that_requires_a_gradient_is_refused_where_a_graph_is_recorded(
    argument, value, got, compiled
):
    fn = with_constants
    if compiled:
        torch._dynamo.reset()
        fn = torch.compile(fn, backend="eager")
    x = a(3).requires_grad_()
    message = f"{argument} must not require a gradient (it gets none), got {got}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fn(x, **{argument: value})
    with torch.no_grad():
        fn(x, **{argument: value})
    with torch.inference_mode():
        fn(x, **{argument: value})
    if isinstance(value, torch.Tensor):
        assert fn(x, **{argument: value.detach()}).requires_grad
    assert fn(x, either=a(3).requires_grad_(), held=Held(False)).requires_grad


def test_some_arguments_alone():
    declared.takes.check(eps=0.5, mode="none", k=8)
    for values, message in (({"eps": 2}, "eps"), ({"k": 0, "eps": 1}, "k"), ({"x": a()}, "x")):
        with pytest.raises(ValueError, match=f"^{message} must "):
            declared.takes.check(**values)


def test_function_keeps_its_name_signature_and_documentation():
    assert declared.__name__ == "declared" and declared.__doc__ == "x times two."
    assert list(inspect.signature(declared).parameters) == list(declared.__annotations__)
    lines = declared.takes.lines()
    assert (
        "k        int [1, 8] or None" in lines and "x        float [..., H, D] | [..., D]" in lines
    )


@pytest.mark.parametrize(
    "declaration, message",
    [
        ({"x": "float [D]", "n": "whole"}, "n must be declared"),
        ({"x": "float [2*D*E]"}, "2.D.E"),
        ({"x": "floats [D]"}, "floats"),
        ({"y": "float [D]"}, "y"),
        ({"x": "float [n]"}, "n"),
        ({"z": "float [E] or number"}, "E"),
    ],
)
def test_a_wrong_declaration_is_refused(declaration, message):
    def fn(x: torch.Tensor, n: int = 1, z: float | torch.Tensor = 1.0):
        return x

    with pytest.raises((ValueError, TypeError), match=message):
        takes(**declaration)(fn)
    with pytest.raises(ValueError, match="E > 0"):
        takes("E > 0", x="float [D]")(fn)


@pytest.mark.parametrize("dynamic", [False, True])
def test_checks_are_compiled_with_their_function(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=dynamic)
    for rows in (5, 6, 7):
        assert compiled(x=a(rows, 3, 4), mask=a(rows, 3, 4, dtype=torch.bool)).shape == (rows, 3, 4)
    with pytest.raises(Exception, match="weight must have shape"):
        compiled(weight=a(5))


# ---- every op


def spoiled(argument, value):
    """(a value that the declaration excludes, the error) for each way to leave it."""
    if isinstance(argument, NumberOrTensorArgument):
        yield torch.zeros((), dtype=torch.complex64), TypeError
        yield torch.zeros(2, 3, 5), ValueError
    if isinstance(argument, TensorArgument):
        yield 3, TypeError
        if isinstance(value, torch.Tensor):
            if argument.dtypes:
                yield value.detach().to(torch.complex64), TypeError
            yield value.detach().to_sparse(), TypeError
            if argument.shapes:
                if not any(shape.batch for shape in argument.shapes):
                    yield value.detach().expand(2, 1, 1, *value.shape).clone(), ValueError
                if all(shape.sizes for shape in argument.shapes):
                    yield value.detach().new_zeros(()), ValueError
    elif isinstance(argument, NumberArgument):
        yield "1", TypeError
        yield True, TypeError
        yield 1j, TypeError
        if argument.integer:
            yield 1.5, TypeError
        for bound, beyond in ((argument.low, -1), (argument.high, 1)):
            try:
                edge = eval(bound, {})
            except NameError:  # a size
                continue
            yield (
                (int(edge) + beyond * 2**64 if argument.integer else edge + beyond * 1e39),
                ValueError,
            )
        if not argument.integer:
            yield float("nan"), ValueError
    else:
        kind = type(argument.values[0])
        yield "nonsense", ValueError if kind is str else TypeError
        if kind is int:
            yield max(argument.values) + 1, ValueError


@pytest.mark.parametrize("name", sorted(OPS))
def test_ops_refuse_what_they_do_not_declare(name):
    """One error, that names the argument, before any implementation is asked."""
    op = OPS[name]
    declaration = op.public.takes
    cases = [c for c in op.cases if "contract" in c.tags]
    tried = set()
    for case in cases:
        given = case.make(DEVICE, torch.float32, 0)
        for argument in declaration.arguments:
            value = given.get(argument.name)
            if argument.name in tried or (type(argument) is TensorArgument and value is None):
                continue
            tried.add(argument.name)
            for wrong, error in spoiled(argument, value):
                with pytest.raises(error) as raised:
                    op.public(**{**given, argument.name: wrong})
                assert str(raised.value).startswith(f"{argument.name} must "), (argument, raised)
                assert raised.type is error
            if not argument.optional:
                with pytest.raises((TypeError, ValueError), match=f"^{argument.name} must "):
                    op.public(**{**given, argument.name: None})
        tensors = [
            x.name
            for x in declaration.arguments
            if isinstance(x, TensorArgument) and isinstance(given.get(x.name), torch.Tensor)
        ]
        for other in tensors[1:]:
            with pytest.raises(ValueError, match="they must be on one device"):
                op.public(**{**given, other: given[other].detach().to("meta")})
    assert tried


def test_a_size_that_is_repeated_is_one_size():
    @takes(n="int", x="float [N, N]", y="float [2*M, M]", z="float [n*K]")
    def fn(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, n: int = 2):
        return x

    fn(a(3, 3), a(4, 2), a(6))
    for name, wrong in (("x", (a(2, 3), a(4, 2), a(6))), ("y", (a(3, 3), a(4, 9), a(6)))):
        with pytest.raises(ValueError, match=f"^{name} must have shape"):
            fn(*wrong)
    for n in (0, -2):  # no multiple of it is a size
        with pytest.raises(ValueError, match=r"^z must have shape"):
            fn(a(3, 3), a(4, 2), a(6), n)
