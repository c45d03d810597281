"""The compiled baseline: torch.compile of what a user of PyTorch would write."""

import functools

import pytest
import torch
from functorch.compile import make_boxed_func
from helpers import DEVICE
from small_cases import whole_cases
from torch._functorch.aot_autograd import aot_module_simplified

from tilewright.bench import contract, providers
from tilewright.core.torch_names import TorchDispatchMode
from tilewright.ops import OPS

# Loops over experts with PyTorch's products, which Dynamo does not trace in an autograd.Function.
LOOPS = {f"tilewright.low_precision_{name}_of_experts.default" for name in ("rows", "sums")}


def named(targets):
    return {t for t in map(str, targets) if t.startswith("tilewright")} - LOOPS


class Called(TorchDispatchMode):
    """Collects the operators of tilewright that are called."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found |= named([func])
        return func(*args, **(kwargs or {}))


def deciding_cases(op):
    """The smallest case, and one for each further operator that the twin calls; without those whose
    operators all are in the others, since each takes a compilation.
    """
    chosen, found = {}, set()
    for case in whole_cases(op):
        with Called() as called:
            op.public(**case.make(DEVICE, torch.float32, 0), implementation="eager")
        if called.found - found or not chosen:
            chosen[case] = called.found
            found |= called.found
    for case, own in [*chosen.items()]:
        others = [operators for other, operators in chosen.items() if other is not case]
        if others and own <= set().union(*others):
            del chosen[case]
    return [*chosen]


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_compiled_baseline_is_a_graph_of_pytorchs_operators(op):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = functools.partial(aot_module_simplified, fw_compiler=keep, bw_compiler=keep)
    for case in deciding_cases(op):
        torch.compiler.reset()
        graphs.clear()
        kwargs = case.make(DEVICE, torch.float32, 0)
        reference = contract.reference(op, kwargs, torch.float32)
        baseline = providers.Provider("compile", providers.compiled(op, backend))
        assert providers.gate(op, baseline, kwargs, reference) == [], case.name
        differentiable = any(t.requires_grad for t in contract.leaves(kwargs))
        assert len(graphs) >= 1 + differentiable, case.name
        opaque = named(n.target for g in graphs for n in g.graph.nodes)
        assert not opaque, f"{case.name}: {sorted(opaque)}"


def test_others_compiled_code_keeps_the_checks_of_values():
    """Only the baseline leaves them out, also after it was compiled."""
    op = OPS["cross_entropy"]
    kwargs = {"logits": torch.randn(3, 5), "target": torch.tensor([0, 4, 5])}
    providers.compiled(op, "eager")(**kwargs)
    twin = torch.compile(
        functools.partial(op.public, implementation="eager"), backend="eager", fullgraph=True
    )
    with pytest.raises(IndexError, match="target"):
        twin(**kwargs)
