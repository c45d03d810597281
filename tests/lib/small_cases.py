"""The smallest contract cases of an op, for tests that walk over all ops."""

import functools

import torch
from helpers import DEVICE

from tilewright.bench import contract

LARGE = 5000  # elements; larger cases take seconds in Triton's interpreter and add no coverage


@functools.cache
def small_cases(op):
    """Contract cases by number of elements, smallest first; those with a result or gradient of
    zeros behind the others, since two of those are equal whatever is wrong; empty ones last.
    """
    sizes = {}
    for case in op.cases:
        if "contract" in case.tags:
            made = contract.leaves(case.make(DEVICE, torch.float32, 0))
            size = sum(t.numel() for t in made)
            if size <= LARGE:
                results = differentiate(
                    functools.partial(op.public, implementation="eager"), inputs(case)
                )
                zeros = any(t is not None and not t.float().any() for t in results)
                sizes[case] = (any(t.numel() == 0 for t in made), zeros, size)
    assert sizes, f"{op.name} has no contract case of at most {LARGE} elements"
    return sorted(sizes, key=sizes.get)


def inputs(case):
    return contract.convert(case.make(DEVICE, torch.float32, 0), None)


def differentiate(fn, kwargs):
    """Results and gradients of fn(**kwargs)."""
    outs = contract.leaves(fn(**kwargs))
    wanted = [o for o in outs if o.requires_grad]
    leaves = [t for t in contract.leaves(kwargs) if t.requires_grad]
    if not wanted:
        return [o.detach() for o in outs]
    grads = torch.autograd.grad(
        wanted, leaves, contract.upstream(wanted, "contiguous"), allow_unused=True
    )
    return [*(o.detach() for o in outs), *grads]


def whole_cases(op):
    """Those without empty tensors."""
    return [
        case for case in small_cases(op) if all(t.numel() for t in contract.leaves(inputs(case)))
    ]


def whole_case(op):
    return whole_cases(op)[0]


@functools.cache
def differentiable(op):
    """Whether an input of the op is: its first case has all."""
    made = next(c for c in op.cases if "contract" in c.tags).make("cpu", torch.float32, 0)
    return any(t.requires_grad for t in contract.leaves(made))
