"""The registry's timed cases under pytest-benchmark, for its history: `pytest tests/benchmark`.

The contract gates each timing: a baseline that breaks it is skipped with the reason, an
implementation of this library fails. Providers are timed one after the other here; `python -m
tilewright.bench run`, the source of published results, interleaves them.
"""

import pytest
import torch
from helpers import DEVICE

pytest.importorskip("pytest_benchmark")

from tilewright.bench import contract, run
from tilewright.bench.peer import Unsupported
from tilewright.bench.peers import PEERS
from tilewright.bench.providers import BASELINES, gate, providers
from tilewright.core.registry import short
from tilewright.ops import OPS


def grid():
    for op in OPS.values():
        for case in run.timed(op, DEVICE):
            for dtype in (torch.float32, torch.bfloat16):
                for name in dict.fromkeys(("eager", "compile", *op.names(), *PEERS)):
                    yield pytest.param(
                        op, case, dtype, name, id=f"{op.name}-{case.name}-{short(dtype)}-{name}"
                    )


@pytest.mark.parametrize("op, case, dtype, name", list(grid()))
def test_speed(op, case, dtype, name, benchmark):
    provider = next(p for p in providers(op, DEVICE, dtype) if p.name == name)
    if provider.reason:
        pytest.skip(provider.reason)
    kwargs = case.make(DEVICE, dtype, run.SEED)
    try:
        broken = gate(op, provider, kwargs, contract.reference(op, kwargs, dtype))
    except Unsupported as reason:
        pytest.skip(str(reason))
    if broken and name in BASELINES:  # a wrong baseline is skipped, not timed
        pytest.skip(f"breaks the contract: {'; '.join(map(str, broken))}")
    assert not broken, "; ".join(map(str, broken))
    timed = run.passes(provider, kwargs)
    step = timed.get("forward_backward", timed["forward"])

    def finished():
        step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark.group = f"{op.name} {case.name} {short(dtype)}"
    benchmark.extra_info["cost"] = vars(case.cost(dtype.itemsize))
    benchmark.pedantic(finished, warmup_rounds=2, rounds=10)
    run.free(DEVICE)
