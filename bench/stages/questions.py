"""The stage `ab`: open questions between two alternatives each."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from bench.stages.checks import checks, result
from bench.variants import Variant
from tilewright.bench import contract, launches, pieces, report, run, timing
from tilewright.bench.providers import Provider
from tilewright.bench.runner import Unit
from tilewright.bench.units import clock, threads
from tilewright.core import platform, registry
from tilewright.core.registry import Op
from tilewright.kernels import tuning

SECONDS = 30.0  # of a question: its launches take milliseconds
ROUNDS = 5


# Long: the functions of one unit, which share its inputs.
def ab_unit(
    variant: Variant,
    op: Op,
    case: registry.Case,
    device: str,
    settings: run.Settings,
    keep: bool = False,
) -> Unit:
    """A unit of one question: times of both alternatives, interleaved, each only if its contract
    holds, and which is faster by more than the spread.

    keep: whether the inputs and the truth are kept for the next unit, which is about them too.
    """
    dtype = torch.bfloat16

    def make():
        try:
            return answer()
        finally:
            if not keep:
                _inputs.cache_clear()
            run.free(device)

    def answer():
        kwargs, reference = _inputs(op, case, device)
        results, shared = [], {}
        tasks: dict[Hashable, Callable[[], object]] = {}  # by (way, pass)
        for way, alternative in variant.ways.items():
            impl = implementation(variant, op, alternative, device)
            assert impl is not None, "a question is asked where its implementation is usable"
            status, reason, timed = _judged(
                variant, op, impl, kwargs, alternative, shared, reference
            )
            # An answer rather than a failure: no call takes this alternative.
            if way == "other" and status in ("broken", "error"):
                status = "rejected"
            results.append(
                result(impl.name, dtype, status, reason and f"{variant.name}: {way}: {reason}")
            )
            tasks |= {(way, pass_name): fn for pass_name, fn in timed.items()}
        run.free(device, compiled=False)
        timings, errors = timing.interleave(
            tasks,
            clock(device, settings.sample_seconds),
            rounds=min(settings.rounds, ROUNDS),
            max_seconds=settings.max_seconds,
            seed=run.SEED,
        )
        failed = cast("dict[tuple[str, str], str]", errors)
        tasks.clear()
        for t in contract.leaves(kwargs):
            t.grad = None
        return {
            "op": op.name,
            "case": case.name,
            "results": results,
            "timed": _verdicts(variant, timings),
            "not_timed": [f"{' '.join(key)}: {reason}" for key, reason in failed.items()],
        }

    unit = checks("ab", op, case, device, [dtype], make, SECONDS)
    options = {
        **unit.options,
        "ways": {variant.name: variant.ways},
        "settings": vars(settings),
        **threads(device),
    }
    name = f"{unit.name}.{platform.slug(variant.name)}"
    return replace(unit, name=name, options=options, blank={**unit.blank, "timed": []})


@functools.lru_cache(maxsize=1)  # questions about one case follow one another
def _inputs(op: Op, case: registry.Case, device: str) -> tuple[dict, contract.Reference]:
    kwargs = case.make(device, torch.bfloat16, run.SEED)
    return kwargs, contract.reference(op, kwargs, torch.bfloat16, cut=pieces.of(op, kwargs))


def _judged(
    variant: Variant,
    op: Op,
    impl: registry.Implementation,
    kwargs: dict[str, Any],
    alternative: Mapping[str, Any] | str,
    shared: dict,
    reference: contract.Reference,
) -> tuple[str, str | None, dict[str, Any]]:
    """An alternative's status, the reason, and its timed callables by pass."""
    device, dtype = contract.leaves(kwargs)[0].device, torch.bfloat16
    if reason := impl.why_not(device.type, dtype):
        return "unavailable", reason, {}
    try:
        passes = run.passes(
            Provider(impl.name, functools.partial(op.public, implementation=impl.name)),
            contract.convert(kwargs, None) if kwargs.get("inplace") else kwargs,
        )
        override: contextlib.AbstractContextManager = contextlib.nullcontext()
        if not isinstance(alternative, str):
            tunable, key = next(
                (t, k)
                for t, k in launches.requested_keys(op, impl, kwargs)
                if t.name == variant.launch
            )
            usual = tunable.choice(tuning.arch_of_device(), **tunable.named(key))
            config = {**usual, **alternative}
            override = tunable.override(device, key, config)
            fixed = functools.partial(tunable.override, device, key, config)
            passes = (
                {name: _within(fixed, fn) for name, fn in passes.items()}
                if variant.whole
                else {
                    tunable.pass_name: launches.timed(
                        tunable, key, config, device, passes, shared=shared
                    )
                }
            )
        with override:
            broken = contract.broken(contract.judge(op, impl.name, kwargs, reference))
    except registry.ImplementationUnavailable as error:
        return "unavailable", str(error), {}
    except Exception as error:
        timing.raise_if_lost(error, variant.name)
        return "error", timing.first_line(error), {}
    return ("broken", "; ".join(map(str, broken)), {}) if broken else ("holds", None, passes)


def _within(
    context: Callable[[], contextlib.AbstractContextManager], fn: Callable[[], object]
) -> Callable[[], object]:
    if isinstance(fn, timing.After):
        return timing.After(_within(context, fn.before), _within(context, fn.fn))

    def call():
        with context():
            return fn()

    return call


def implementation(
    variant: Variant, op: Op, alternative: Mapping[str, Any] | str, device: str
) -> registry.Implementation | None:
    """The implementation that is named, or the first usable one here that has the launch: to know
    the launches of another one may take a package that is not installed.
    """
    if isinstance(alternative, str):
        return op.implementation(alternative)
    usable = (i for i in op.implementations if i.why_not(device, torch.bfloat16) is None)
    return next((i for i in usable if variant.launch in {t.name for t in i.tunables()}), None)


def _verdicts(variant: Variant, timings: Mapping[Hashable, timing.Timing]) -> list[dict[str, Any]]:
    """The verdict of each pass with both times: microseconds, by how much the other alternative is
    faster (in percent of its time), and which one is faster by more than the spread, or None.
    """
    verdicts = []
    for pass_name in report.PASSES:
        now, other = (timings.get((way, pass_name)) for way in variant.ways)
        if now and other:
            better = (
                "other"
                if timing.faster(other, now)
                else "now"
                if timing.faster(now, other)
                else None
            )
            us = {
                way: {n: getattr(t, n) * 1e6 for n in ("median", "p20", "p80")}
                for way, t in zip(variant.ways, (now, other), strict=True)
            }
            verdicts.append(
                {
                    "question": variant.name,
                    "pass": pass_name,
                    **us,
                    "faster_percent": 100 * (now.median / other.median - 1),
                    "better": better,
                }
            )
    return verdicts
