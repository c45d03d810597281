"""Arguments of any strides, expanded ones too: the result of their contiguous copies, or an error
that names the argument.
"""

import pytest
import torch
from helpers import DEVICE, skip_unless_usable
from small_cases import differentiate, whole_cases

from tilewright.bench import contract
from tilewright.core.registry import ImplementationUnavailable
from tilewright.ops import OPS


def spread(t):
    """Every other element of each dimension of a larger tensor."""
    wide = t.new_zeros([2 * n + 1 for n in t.shape])
    view = wide[tuple(slice(1, None, 2) for _ in t.shape)]
    return view.copy_(t)


def transposed(t):
    """The first dimension varies fastest."""
    return t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim())))


def expanded(t):
    """The first element along the first dimension, at a stride of 0."""
    return t[:1].expand(t.shape)


LAYOUTS = {"spread": spread, "transposed": transposed, "expanded": expanded}
CALLS = [
    pytest.param(op, i.name, id=f"{op.name}-{i.name}")
    for op in OPS.values()
    for i in op.implementations
]


def tensors(kwargs):
    """(name, how to replace it) of tensors with at least one dimension, in lists too."""
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and value.dim():
            yield name, value, lambda t, name=name: {**kwargs, name: t}
        elif isinstance(value, list):
            for i, one in enumerate(value):
                if isinstance(one, torch.Tensor) and one.dim():
                    yield (
                        f"{name}[{i}]",
                        one,
                        lambda t, name=name, i=i: {
                            **kwargs,
                            name: [t if j == i else o for j, o in enumerate(kwargs[name])],
                        },
                    )


def outcome(op, name, kwargs):
    return differentiate(lambda **given: op.public(**given, implementation=name), kwargs)


def assert_close(expected, found, where):
    """Exact in integers and codes; elsewhere products of other layouts sum in another order."""
    assert len(found) == len(expected)
    for f, e in zip(found, expected, strict=True):
        if f is None or e is None:
            assert f is e, where
        elif f.is_floating_point() and f.dtype.itemsize > 1:
            size = float(e.abs().max()) if e.numel() else 0.0
            torch.testing.assert_close(
                f, e, rtol=1e-5, atol=1e-5 * size, msg=lambda m: f"{where}: {m}"
            )
        else:
            assert torch.equal(f.float(), e.float()), where


def leaf(t, like):
    return t.detach().requires_grad_(like.requires_grad)


@pytest.mark.parametrize("op, name", CALLS)
def test_strides_change_nothing_or_are_refused_by_name(op, name):
    skip_unless_usable(op, name, torch.float32)
    slow = name == "triton" and DEVICE == "cpu"  # the interpreter
    for number, case in enumerate(whole_cases(op)[: 1 if slow else 2]):
        for argument in [n for n, _, _ in tensors(case.make(DEVICE, torch.float32, 0))]:
            turn = list(LAYOUTS)[(len(argument) + number) % 3]
            for layout in [turn] if slow else LAYOUTS:
                compare(op, name, case, argument, layout)


def compare(op, name, case, argument, layout):
    results = []
    for copied in (True, False):
        kwargs = contract.convert(case.make(DEVICE, torch.float32, 0), None)
        t, replace = next((t, r) for n, t, r in tensors(kwargs) if n == argument)
        new = LAYOUTS[layout](t.detach())
        if new.is_contiguous():
            return
        try:
            results.append(outcome(op, name, replace(leaf(new.contiguous() if copied else new, t))))
        except (ValueError, IndexError, ImplementationUnavailable) as error:
            # The copy's values, such as a permutation of equal rows, may be refused, too.
            assert copied or argument in str(error), f"{argument}, {layout}: {error}"
            return
    assert_close(*results, f"{argument}, {layout} in {case.name}")


@pytest.mark.parametrize("name", OPS["linear_cross_entropy"].names())
def test_losses_of_each_row_with_every_other_target(name):
    op = OPS["linear_cross_entropy"]
    skip_unless_usable(op, name, torch.float32)
    x, weight = torch.randn(5, 8, device=DEVICE), torch.randn(7, 8, device=DEVICE)
    target = torch.arange(10, device=DEVICE).remainder(7)[::2]
    losses = [
        op.public(x, weight, t, reduction="none", implementation=name)
        for t in (target, target.clone())
    ]
    torch.testing.assert_close(*losses)
