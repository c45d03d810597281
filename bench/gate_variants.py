"""Compiles both alternatives of every open question (`variants.VARIANTS`) whose alternatives are
launch configurations, for the deciding case's launch on the oldest simulated GPU that has both.

    python -m bench gate-variants [options of `tilewright gate --registry`]
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from bench import variants
from bench.stages import questions
from tilewright.bench import launches
from tilewright.core.registry import Op
from tilewright.selection import operations
from tilewright_lab import pretend
from tilewright_lab.gate import compile_gate
from tilewright_lab.gate.compilers import labeled

PROG = "python -m bench gate-variants"
ARCHS = (90, 100)  # GPUs that the questions are asked on


def collect(ops: Iterable[Op]) -> dict[str, Any]:
    """Specs by name, as `compilers.collect` names those of tables."""
    by_name, specs = {op.name: op for op in ops}, {}
    older: tuple[variants.Variant, ...] = ()
    for arch in ARCHS:
        asked = variants.asked(arch)
        specs |= _collect(by_name, [v for v in asked if v not in older], arch)
        older = asked
    return specs


def _collect(
    by_name: dict[str, Op], asked: Iterable[variants.Variant], arch: int
) -> dict[str, Any]:
    specs: dict[str, Any] = {}
    with pretend.gpu(arch, compiles=False):
        for variant in asked:
            op = by_name.get(variant.op)
            if op is None or not variant.launch:
                continue
            for case in (c for c in op.cases if c.name == variant.case and "cuda" in c.tags):
                impl = questions.implementation(variant, op, variant.other, "cuda")
                assert impl is not None, "every launch here is of some implementation"
                tunable, key = next(
                    (t, key)
                    for t, key in launches.requested_keys(
                        op, impl, case.make("cuda", torch.bfloat16, 0)
                    )
                    if t.name == variant.launch
                )
                named = tunable.named(key)
                for way in filter(None, variant.ways.values()):
                    assert not isinstance(way, str), "alternatives of a launch are configurations"
                    config = {**tunable.choice(arch, **named), **way}
                    for spec in labeled(tunable, named, config, f"{variant.name}: "):
                        # Nothing counts on its blocks: it is measured, on this GPU alone.
                        only = {"min_arch": arch, "max_arch": arch}
                        specs[f"{op.name}/{spec.label}"] = replace(spec, per_sm=1, **only)
    return specs


def main(argv: Sequence[str]) -> int:
    """See `tilewright gate --registry --help` for the options."""
    ops = operations().values()
    return compile_gate.main(list(argv), functools.partial(collect, ops), [*ARCHS], PROG)
