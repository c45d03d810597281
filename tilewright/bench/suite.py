"""Everything that a device can say about the registry: does it hold, how fast is it, what does a
call cost.

    python -m tilewright.bench suite --minutes 9 --out DIR [--goals] [--op OP,..] [--stage STAGE,..]
    [--dtype DTYPE,..]

Stages, in this order, over every op, implementation and case of the registry:

    roofline   copy bandwidth and dense matmul: what the device can do at all sanitize   a small
    launch of each op with a goal under compute-sanitizer's memcheck and racecheck (CUDA) goals
    the cases that a goal of this device speaks of: `auto` and the peers that have the op ab
    the open questions of `bench.variants`: two ways each, interleaved, on the case that decides
    parity     the numerics contract of every implementation, on every small case, in every dtype it
    takes graph      CUDA-graph capture and replay of every implementation that runs on CUDA tensors
    big        cases of more than 2^31 elements (CUDA)
    time       every timed case: implementations and peers, correctness-gated, interleaved
    overhead   what the dispatch above a kernel costs

--goals is short for the first three and the overhead of ops with a goal: what decides most, in the
first minutes. Results are one file a case. A call ends within its minutes, and the next one with
the same DIR goes on where it stopped. What was made by other sources, with other options or
versions, or on another device is made again (--keep: whatever the sources and versions), as is what
was given other tuned constants, and what raised an error, up to three times.
Exit code: 0, all is there and holds; 1, an implementation broke the contract or failed; 3, time ran
out first.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tilewright import platform, registry, selection
from tilewright.bench import (
    contract,
    launches,
    overhead,
    peers,
    performance,
    pieces,
    report,
    run,
    runner,
    sources,
    timing,
    variants,
)
from tilewright.bench.options import at_least, has_device, names
from tilewright.bench.providers import BASELINES, Provider
from tilewright.bench.runner import Unit
from tilewright.bench.variants import Variant
from tilewright.kernels import tuning
from tilewright.registry import Op, short

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
TIMED = (torch.bfloat16, torch.float32)
BY_NAME = {short(d): d for d in (*DTYPES, torch.float64)}
STAGES = ("roofline", "sanitize", "goals", "ab", "parity", "graph", "big", "time", "overhead")
FIRST = ("roofline", "sanitize", "goals", "overhead")  # of --goals
# Stages that share processes. Those of the second group can run side by side: nothing is timed
# there.
GROUPS = (
    ("roofline",),
    ("sanitize",),
    ("goals",),
    ("ab",),
    ("parity", "graph"),
    ("big", "time", "overhead"),
)


# ---- the units


def roofline_unit(device: str) -> Unit:
    def make():
        return {"roofline": timing.measure_roofline(device, TIMED).asdict()}

    return Unit("roofline", make, {"roofline": None}, options=_threads(device))


def _threads(device: str) -> dict[str, Any]:
    return {"threads": torch.get_num_threads()} if device == "cpu" else {}


def _checks(
    kind: str,
    op: Op,
    case: registry.Case,
    device: str,
    dtypes: Sequence[torch.dtype],
    make,
    limit: float = 180.0,
) -> Unit:
    """A unit whose document has "results": a status for each implementation and dtype."""
    return Unit(
        f"{kind}/{op.name}.{case.name}",
        make,
        {"op": op.name, "case": case.name, "results": []},
        limit,
        {"dtypes": [short(d) for d in dtypes], "constants": _constants(op, device)},
        _raised,
        sources.digest(op),
    )


def parity_unit(op: Op, case: registry.Case, device: str, dtypes: Sequence[torch.dtype]) -> Unit:
    def make():
        results = []
        for dtype in dtypes:
            mine = [i for i in op.implementations if i.name != "eager" and dtype in i.dtypes]
            usable = [i for i in mine if i.why_not(device, dtype) is None]
            results += [
                _result(i.name, dtype, "unavailable", i.why_not(device, dtype))
                for i in mine
                if i not in usable
            ]
            if usable:
                results += _parity(op, case, device, dtype, [i.name for i in usable])
        return {"op": op.name, "case": case.name, "results": results}

    return _checks("parity", op, case, device, dtypes, make)


def _result(implementation, dtype, status, reason=None, tensors=()):
    return {
        "implementation": implementation,
        "dtype": short(dtype),
        "status": status,
        "reason": reason,
        "tensors": list(tensors),
    }


def _parity(op, case, device, dtype, names) -> list[dict[str, Any]]:
    """A result for each implementation: of each tensor the layout of upstream gradients with
    the worst error.
    """
    worst: dict[str, dict[str, contract.Finding]] = {n: {} for n in names}
    raised: dict[str, str] = {}
    refused: dict[str, str] = {}  # variants that an implementation does not have, and says so
    with contract.poisoned():
        for seed, layout in enumerate(contract.LAYOUTS):
            kwargs = case.make(device, dtype, seed)
            by = contract.reference(op, kwargs, dtype, layout)
            for name in names:
                try:
                    found = contract.judge(op, name, kwargs, by)
                except registry.ImplementationUnavailable as error:
                    refused[name] = str(error)
                    continue
                except Exception as error:
                    timing.still_there(error, f"{name} {short(dtype)}")
                    raised[name] = f"{layout} gradients: {timing.first_line(error)}"
                    continue
                for f in found:
                    before = worst[name].get(f.name)
                    if before is None or _share(f) > _share(before):
                        worst[name][f.name] = f
    results = []
    for name in names:
        broken = contract.broken(worst[name].values())
        status = (
            "error"
            if name in raised
            else "unavailable"
            if name in refused
            else "broken"
            if broken
            else "holds"
        )
        reason = raised.get(name) or refused.get(name) or "; ".join(map(str, broken)) or None
        results.append(_result(name, dtype, status, reason, map(_tensor, worst[name].values())))
    return results


def _share(f: contract.Finding) -> float:
    return f.error / f.budget


def _tensor(f: contract.Finding) -> dict[str, Any]:
    # JSON has no infinity; a tensor that is missing or NaN is None.
    def finite(x):
        return x if math.isfinite(x) else None

    return {
        "name": f.name,
        "error": finite(f.error),
        "eager": finite(f.eager),
        "budget": finite(f.budget),
    }


def check_unit(
    kind: str,
    op: Op,
    case: registry.Case,
    device: str,
    dtypes: Sequence[torch.dtype],
    check,
    skip,
    limit: float = 180.0,
) -> Unit:
    """A unit of findings without a reference: check(op, implementation, case, dtype) -> what is
    beyond.

    skip: (op, implementation, case) -> None, or why this one is not checked.
    """

    def make():
        results = []
        for impl in op.implementations:
            for dtype in dtypes:
                if dtype not in impl.dtypes or (impl.name == "eager" and kind == "big"):
                    continue
                if reason := skip(op, impl.name, case) or impl.why_not(device, dtype):
                    results.append(_result(impl.name, dtype, "unavailable", reason))
                    continue
                try:
                    broken = check(op, impl.name, case, dtype)
                except (
                    registry.ImplementationUnavailable
                ) as error:  # a variant that it does not have
                    results.append(_result(impl.name, dtype, "unavailable", str(error)))
                    continue
                except Exception as error:
                    timing.still_there(
                        error, f"{impl.name} {short(dtype)}"
                    )  # must not be blamed on the next
                    reason = timing.first_line(error)
                    if (
                        error.__context__ is not None
                    ):  # a capture that fails ends with an error about its end
                        reason += f" (after {timing.first_line(error.__context__)})"
                    results.append(_result(impl.name, dtype, "error", reason))
                    continue
                results.append(
                    _result(
                        impl.name,
                        dtype,
                        "broken" if broken else "holds",
                        "; ".join(map(str, broken)) or None,
                    )
                )
                run.free(device, compiled=False)
        return {"op": op.name, "case": case.name, "results": results}

    return _checks(kind, op, case, device, dtypes, make, limit)


def time_unit(
    op: Op,
    case: registry.Case,
    device: str,
    dtype: torch.dtype,
    settings: run.Settings,
    out: pathlib.Path,
    only: Sequence[str] | None = None,
) -> Unit:
    def make():
        roof = json.loads((out / "roofline.json").read_text())["roofline"]
        if roof is None:
            raise RuntimeError("the roofline could not be measured")
        rows = run.measure(
            op, case, device, dtype, timing.Roofline(**roof), _clock(device), settings, only
        )
        run.free(device)
        return {"roofline": roof, "rows": rows}

    options = {"settings": vars(settings), "constants": _constants(op, device), **_threads(device)}
    return Unit(
        f"time/{op.name}.{case.name}.{short(dtype)}",
        make,
        {"roofline": None, "rows": []},
        300.0,
        options,
        _raised,
        sources.digest(op),
    )


def goal_units(
    ops: Sequence[Op],
    device: str,
    settings: run.Settings,
    out: pathlib.Path,
    cases: Sequence[str] | None,
) -> list[Unit]:
    """A unit for each case that a goal of this device speaks of, with what `auto` takes and the
    peers alone.

    Cases that are all about something else than bandwidth come first: they are of products, which
    take most of a step.
    """
    about: dict[tuple[Op, registry.Case, torch.dtype], set[str]] = {}
    for op in ops:
        for goal, case, dtype in goals_here(op, device):
            if cases is None or case.name in cases:
                about.setdefault((op, case, dtype), set()).add(goal.metric)
    ordered = sorted(about, key=lambda aim: "roofline_percent" in about[aim])
    return [
        replace(
            time_unit(
                op,
                case,
                device,
                dtype,
                settings,
                out,
                only=[op.choose(device, dtype), *peers.PEERS],
            ),
            name=f"goals/{op.name}.{case.name}.{short(dtype)}",
        )
        for op, case, dtype in ordered
    ]


def goals_here(op: Op, device: str) -> Iterator[tuple[registry.Goal, registry.Case, torch.dtype]]:
    """The goals of an op that speak of this device, with each of their cases and its dtype
    (bfloat16, if not named).
    """
    capability = "{}.{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else None
    for goal in op.goals:
        if goal.holds_for(platform.device_name(device), capability):
            for case in run.timed(op, device, goal.cases or None):
                for dtype in [BY_NAME[n] for n in goal.dtypes] or [torch.bfloat16]:
                    if any(dtype in i.dtypes for i in op.implementations if i.name != "eager"):
                        yield goal, case, dtype


def unmet(op: Op, device: str, out: pathlib.Path) -> set[tuple[str, torch.dtype]]:
    """(case, dtype) of the goals of this device that the results in a folder do not show to be met:
    also what was not measured, has no time, or lacks the provider that the goal compares with.
    """
    found = set()
    for goal, case, dtype in goals_here(op, device):
        try:
            document = json.loads(
                (out / f"goals/{op.name}.{case.name}.{short(dtype)}.json").read_text()
            )
            rows = {r["provider"]: r for r in document["rows"]}
            value = performance.goal_value(
                goal,
                next(r for r in rows.values() if r["auto"]),
                rows,
                document["roofline"]["flops_per_second"].get(short(dtype)),
            )
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            StopIteration,
        ):  # no file, half of one, no time of `auto`
            value = None
        if value is None or not performance.met(goal, value):
            found.add((case.name, dtype))
    return found


def ab_unit(
    asked: Sequence[Variant], op: Op, case: registry.Case, device: str, settings: run.Settings
) -> Unit:
    """The variants that this case decides, all interleaved: of both ways, each only if its contract
    holds, the times, and which is faster beyond the spread.
    """
    dtype = torch.bfloat16

    def make():
        kwargs = case.make(device, dtype, run.SEED)
        reference = contract.reference(op, kwargs, dtype, cut=pieces.of(op, kwargs))
        results, tasks = [], {}
        for variant in asked:
            shared = {}
            for way, what in variant.ways.items():
                impl = implementation(variant, op, what, device)
                status, reason, timed = _judged(variant, op, impl, kwargs, what, shared, reference)
                if way == "other" and status in (
                    "broken",
                    "error",
                ):  # an answer, and no fault: nothing goes this way
                    status = "rejected"
                results.append(
                    _result(impl.name, dtype, status, reason and f"{variant.name}: {way}: {reason}")
                )
                tasks |= {(variant.name, way, which): fn for which, fn in timed.items()}
        del reference
        run.free(device, compiled=False)
        timings, errors = timing.interleave(
            tasks,
            _clock(device),
            rounds=settings.rounds,
            max_seconds=settings.max_seconds,
            seed=run.SEED,
        )
        tasks.clear()
        run.free(device)
        return {
            "op": op.name,
            "case": case.name,
            "results": results,
            "timed": [found for variant in asked for found in _verdicts(variant, timings)],
            "not_timed": [f"{' '.join(key)}: {reason}" for key, reason in errors.items()],
        }

    unit = _checks("ab", op, case, device, [dtype], make, 300.0)
    options = {
        **unit.options,
        "ways": {v.name: v.ways for v in asked},
        "settings": vars(settings),
        **_threads(device),
    }
    return replace(unit, options=options, blank={**unit.blank, "timed": []})


def _judged(
    variant: Variant,
    op: Op,
    impl: registry.Implementation,
    kwargs: dict[str, Any],
    what: Mapping[str, Any] | str,
    shared: dict,
    reference: contract.Reference,
) -> tuple[str, str | None, dict[str, Any]]:
    """A way's status, the reason, and what is timed of it, by pass."""
    device, dtype = contract.leaves(kwargs)[0].device, torch.bfloat16
    if reason := impl.why_not(device.type, dtype):
        return "unavailable", reason, {}
    try:
        passes = run.passes(
            Provider(impl.name, functools.partial(op.public, implementation=impl.name)),
            contract.convert(kwargs, None) if kwargs.get("inplace") else kwargs,
        )
        goes: contextlib.AbstractContextManager = contextlib.nullcontext()
        if not isinstance(what, str):
            tunable, key = next(
                (t, k) for t, k in launches.asked_for(op, impl, kwargs) if t.name == variant.launch
            )
            config = {**tunable.heuristic(**tunable.named(key)), **what}
            goes = tunable.override(device, key, config)
            passes = {
                tunable.which: launches.timed(tunable, key, config, device, passes, shared=shared)
            }
        with goes:
            broken = contract.broken(contract.judge(op, impl.name, kwargs, reference))
    except registry.ImplementationUnavailable as error:
        return "unavailable", str(error), {}
    except Exception as error:
        timing.still_there(error, variant.name)
        return "error", timing.first_line(error), {}
    return ("broken", "; ".join(map(str, broken)), {}) if broken else ("holds", None, passes)


def implementation(
    variant: Variant, op: Op, what: Mapping[str, Any] | str, device: str
) -> registry.Implementation:
    """The one that a way names; or of those that have the launch the first that is usable here."""
    if isinstance(what, str):
        return op.implementation(what)
    having = [i for i in op.implementations if any(t.name == variant.launch for t in i.tunables())]
    return min(having, key=lambda i: i.why_not(device, torch.bfloat16) is not None)


def _verdicts(
    variant: Variant, timings: Mapping[tuple[str, ...], timing.Timing]
) -> list[dict[str, Any]]:
    """Of each pass that was timed both ways: microseconds, by how much the other way is faster (in
    percent of its time), and which is faster by more than the spread: None if neither is.
    """
    found = []
    for which in report.PASSES:
        now, other = (timings.get((variant.name, way, which)) for way in variant.ways)
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
            found.append(
                {
                    "question": variant.name,
                    "pass": which,
                    **us,
                    "faster_percent": 100 * (now.median / other.median - 1),
                    "better": better,
                }
            )
    return found


def sanitize_unit(op: Op, case: registry.Case, device: str, dtype: torch.dtype) -> Unit:
    """A call and its backward in a process of their own, under each of compute-sanitizer's
    tools.
    """
    code = (
        f"import torch; from tilewright.bench import contract; from tilewright.ops import OPS; "
        f"op = OPS[{op.name!r}]; "
        f"case = next(c for c in op.cases if c.name == {case.name!r} and 'contract' in c.tags); "
        f"contract.run(op, 'auto', case.make({device!r}, torch.{short(dtype)}, 0)); "
        f"torch.cuda.synchronize()"
    )

    def make():
        program, results = shutil.which("compute-sanitizer"), []
        for tool in SANITIZERS:
            if program is None:
                results.append(
                    _result(tool, dtype, "unavailable", "compute-sanitizer is not installed")
                )
                continue
            said = subprocess.run(
                [program, "--tool", tool, "--error-exitcode", "77", sys.executable, "-c", code],
                capture_output=True,
                text=True,
            )
            text = (said.stdout + said.stderr).strip()
            status = {0: "holds", 77: "broken"}.get(said.returncode, "error")
            results.append(_result(tool, dtype, status, text[-2000:] if said.returncode else None))
        return {"op": op.name, "case": case.name, "results": results}

    return _checks("sanitize", op, case, device, [dtype], make, limit=120.0)


SANITIZERS = ("memcheck", "racecheck")


def _constants(op: Op, device: str) -> list[list[Any]]:
    """The tuned constants that this op's launches may be given on this device in place of the
    heuristic's.
    """
    found = []
    for t in dict.fromkeys(
        t for i in op.implementations if i.why_not(device) is None for t in i.tunables()
    ):
        folder = platform.slug(platform.device_name(device))
        found += [
            [t.name, e["key"], e["config"]]
            for e in tuning.table(folder, t.op).get(t.launch, ())
            if set(e["key"]) == set(t.fields) and e["config"] != t.heuristic(**e["key"])
        ]
    return found


@functools.cache  # a CUDA clock measures its own flush first
def _clock(device):
    return timing.clock(device)


def overhead_unit(op: Op, device: str, dtypes: Sequence[torch.dtype]) -> Unit:
    def make():
        return {"rows": [r for d in dtypes for r in overhead.overhead([op], device, d, rounds=15)]}

    return Unit(
        f"overhead/{op.name}",
        make,
        {"rows": []},
        options={
            "dtypes": [short(d) for d in dtypes],
            "constants": _constants(op, device),
            **_threads(device),
        },
        source=sources.digest(op),
    )


def units(
    stage: str,
    ops: Iterable[Op],
    device: str,
    dtypes: Sequence[torch.dtype],
    settings: run.Settings,
    out: pathlib.Path,
    cases: Sequence[str] | None = None,
) -> list[Unit]:
    """The work of a stage, most telling first."""
    ops = list(ops)

    def tagged(tag):
        return [
            (op, case)
            for op in ops
            for case in op.cases
            if tag in case.tags and (cases is None or case.name in cases)
        ]

    taken = {
        op.name: [
            d for d in dtypes if any(d in i.dtypes for i in op.implementations if i.name != "eager")
        ]
        for op in ops
    }
    if stage == "roofline":
        return [roofline_unit(device)]
    if stage == "sanitize" and device == "cuda":
        small = {op.name: case for op, case in reversed(tagged("contract"))}  # the first of each
        return [
            sanitize_unit(op, small[op.name], device, torch.bfloat16)
            for op in ops
            if op.name in small and any(goals_here(op, device)) and torch.bfloat16 in taken[op.name]
        ]
    if stage == "goals":
        return goal_units(ops, device, settings, out, cases)
    if stage == "ab" and torch.bfloat16 in dtypes:
        deciding = {}
        for v in variants.VARIANTS:  # in their order, and not the registry's
            for op, case in tagged(device):
                if (op.name, case.name) == (v.op, v.case) and implementation(
                    v, op, v.now, device
                ).why_not(device, torch.bfloat16) is None:
                    deciding.setdefault((op.name, case.name), (op, case, []))[2].append(v)
        return [ab_unit(asked, op, case, device, settings) for op, case, asked in deciding.values()]
    if stage == "parity":
        return [
            parity_unit(op, case, device, taken[op.name])
            for op, case in tagged("contract")
            if taken[op.name]
        ]
    if stage == "graph" and device == "cuda":
        return [
            check_unit(
                "graph",
                op,
                case,
                device,
                taken[op.name][:1],
                contract.check_capture,
                contract.no_capture,
            )
            for op, case in tagged("contract")
            if taken[op.name]
        ]
    if stage == "big" and device == "cuda":

        def check(op, name, case, dtype):
            return contract.check_big(op, name, case, device, dtype)

        return [
            check_unit("big", op, case, device, taken[op.name], check, lambda *_: None, limit=300.0)
            for op, case in tagged("big")
            if taken[op.name]
        ]
    if stage == "time":
        return [
            time_unit(op, case, device, dtype, settings, out)
            for dtype in TIMED
            for op, case in tagged(device)
            if dtype in taken[op.name]
        ]
    if stage == "overhead":
        found = {op.name: [d for d in TIMED if d in taken[op.name]][:1] for op in ops}
        return [overhead_unit(op, device, found[op.name]) for op in ops if found[op.name]]
    if stage in STAGES:
        return []
    raise ValueError(f"stage must be one of {list(STAGES)}, got {stage!r}")


# ---- what came out


def describe(document: dict[str, Any]) -> str:
    """A document in a few words, for the terminal."""
    if "roofline" in document and "rows" not in document:
        return report.roofline_text(document["roofline"])
    if "results" in document:
        count = {}
        for r in document["results"]:
            count[r["status"]] = count.get(r["status"], 0) + 1
        bad = [
            f"{r['implementation']} {r['dtype']}: {r['reason']}"
            for r in document["results"]
            if r["status"] in ("broken", "error", "rejected")
        ]
        bad += [
            f"{t['question']}: {t['pass']} {t['now']['median']:.1f} us now, "
            f"{t['other']['median']:.1f} otherwise "
            f"({t['faster_percent']:+.1f} %): {t['better'] or 'neither'} is faster"
            for t in document.get("timed", ())
        ]
        return ", ".join(f"{n} {s}" for s, n in count.items()) + "".join(f"\n    {b}" for b in bad)
    if document["rows"] and "provider" in document["rows"][0]:
        return "".join(
            "\n    " + report.line(r) for r in document["rows"] if r["status"] != "unavailable"
        )
    return "\n" + overhead.table(document["rows"])


def _ours(document: dict[str, Any], kinds: Sequence[str]) -> Iterator[str]:
    """What became of this library's implementations: not a peer that fails, nor what cannot run
    here.
    """
    for r in document.get("results", ()):
        if r["status"] in kinds and r["implementation"] not in BASELINES:
            yield f"{r['implementation']} {r['dtype']}: {r['reason']}"
    for r in document.get("rows", ()):
        if r.get("status") in kinds and r["provider"] not in BASELINES:
            yield f"{r['provider']}: {r['reason']}"


def failures(document: dict[str, Any]) -> list[str]:
    """What is this library's fault."""
    return (
        [document["error"]]
        if document.get("error")
        else list(_ours(document, ("broken", "failed", "error")))
    )


def _raised(document: dict[str, Any]) -> bool:
    return bool(document.get("error")) or any(_ours(document, ("error",)))


def conclude(
    all_units: Sequence[Unit], out: pathlib.Path, meta: dict[str, Any], keep: bool
) -> tuple[dict, list[str]]:
    """suite.json's content, and one line for each failure."""
    found, broken = {}, []
    for unit in all_units:
        document = runner.current(unit, out, meta, keep)
        if document is None:
            found[unit.name] = {"status": "not reached", "seconds": None, "reason": None}
            continue
        bad = failures(document)
        broken += [f"{unit.name}: {b}" for b in bad]
        found[unit.name] = {
            "status": "error" if bad else "done",
            "seconds": document.get("seconds"),
            "reason": "; ".join(bad) or None,
        }
    complete = all(u["status"] != "not reached" for u in found.values())
    return {
        "schema": runner.SCHEMA,
        "kind": "suite",
        "meta": meta,
        "complete": complete,
        "units": found,
    }, broken


def _failed(path: pathlib.Path) -> bool:
    """Whether a unit's file says that it could not be made."""
    try:
        return bool(json.loads(path.read_text()).get("error"))
    except OSError:
        return False
    except ValueError:
        return True


# ---- the command


def parser() -> argparse.ArgumentParser:
    ops = selection.operations()
    p = argparse.ArgumentParser(
        prog="python -m tilewright.bench suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = p.add_argument
    add("--minutes", type=at_least(0.05, float), required=True, help="the call ends within so many")
    add("--out", type=pathlib.Path, required=True, metavar="DIR", help="where results are, and go")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    add("--op", type=names(ops), default=list(ops), metavar="OP,..", help="default: every op")
    add(
        "--stage",
        type=names(STAGES),
        default=list(STAGES),
        metavar="STAGE,..",
        help="default: every stage",
    )
    add(
        "--goals",
        action="store_true",
        help=f"only what decides first: {', '.join(FIRST)}, of ops with a goal here",
    )
    add(
        "--stream",
        type=pathlib.Path,
        metavar="FILE",
        help="append each document to FILE when it is made, a line each",
    )
    add(
        "--case",
        type=names({c.name for op in ops.values() for c in op.cases}),
        metavar="CASE,..",
        help="default: every case",
    )
    add(
        "--dtype",
        type=names(BY_NAME),
        default=[short(d) for d in DTYPES],
        metavar="DTYPE,..",
        help="default: %(default)s",
    )
    add(
        "--jobs",
        type=at_least(1, int),
        help="processes of the stages in which nothing is timed (default: half the "
        "cores, 8 at most; on a CPU 1)",
    )
    add("--rounds", type=at_least(1, int), default=9, help="of a timed case (default %(default)s)")
    add(
        "--case-seconds",
        type=at_least(0, float),
        default=6.0,
        help="begin no further round of a timed case after so long (default %(default)s)",
    )
    add(
        "--baseline-slack",
        type=at_least(1, float),
        default=8.0,
        help="as in `run` (default %(default)s)",
    )
    add(
        "--keep", action="store_true", help="take results of other sources and versions as they are"
    )
    add("--commit", help="the commit of these sources, where git cannot tell")
    return p


def main(argv: Sequence[str], begun: float | None = None) -> int:
    begun = begun or time.time()
    argv, task = runner.a_task(argv)
    p = parser()
    args = p.parse_args(argv)
    has_device(p, args.device)
    settings = run.Settings(
        rounds=args.rounds, max_seconds=args.case_seconds, baseline_slack=args.baseline_slack
    )
    table = selection.operations()
    dtypes = [d for n, d in BY_NAME.items() if n in args.dtype]
    chosen = [table[n] for n in args.op if not args.goals or any(goals_here(table[n], args.device))]
    plan = functools.partial(
        units,
        ops=chosen,
        device=args.device,
        dtypes=dtypes,
        settings=settings,
        out=args.out,
        cases=args.case,
    )
    # The roofline is measured whatever was asked for: times mean nothing without it.
    asked = [s for s in args.stage if s in FIRST] if args.goals else args.stage
    stages = [
        s for s in STAGES if s in asked or (s == "roofline" and {"time", "goals"} & set(asked))
    ]
    groups = [[u for stage in group if stage in stages for u in plan(stage)] for group in GROUPS]
    if not any(groups[1:]) and "roofline" not in args.stage:
        p.error(
            f"nothing to do: no op of --op has a case of --case that takes --dtype in --stage on "
            f"{args.device}"
        )
    meta = run.metadata(args.device, settings, ["suite", *argv], commit=args.commit)
    if task is not None:
        runner.end_with_parent(task["parent"])
        runner.work(
            runner.split(groups[task["group"]], task["worker"], task["of"]),
            args.out,
            task["until"],
            meta,
            keep=args.keep,
            since=task["since"],
            slot=str(task["worker"]),
            say=functools.partial(print, flush=True),
            describe=describe,
            now=functools.partial(run.moment, args.device),
            stream=args.stream,
        )
        runner.done()
    # suite.json tells of everything there is to do here, whatever part of it this call was asked
    # for.
    whole = [
        u
        for stage in STAGES
        for u in units(stage, table.values(), args.device, DTYPES, settings, args.out)
    ]
    try:
        with runner.alone(args.out):
            return _supervise(args, argv, groups, whole, meta, begun)
    except (runner.Unusable, OSError) as error:
        p.error(f"argument --out: {error}")


def _supervise(args, argv, groups, whole, meta, begun) -> int:
    until = begun + 60 * args.minutes - runner.FINISH
    jobs = args.jobs or (min(8, max(1, (os.cpu_count() or 1) // 2)) if args.device == "cuda" else 1)
    roof = args.out / "roofline.json"
    if groups[0] and _failed(roof):  # nothing can be timed without it, however often that failed
        roof.unlink()
    print(
        f"{meta['device']}, {', '.join(f'{k} {v}' for k, v in meta['versions'].items())}, commit "
        f"{report.commit(meta)}, clocks {meta.get('clocks') or 'unknown'}",
        flush=True,
    )
    going = True
    try:
        for i, (group, units_) in enumerate(zip(GROUPS, groups, strict=True)):
            if time.time() >= until or all(
                runner.current(u, args.out, meta, args.keep, begun) for u in units_
            ):
                continue
            if {"time", "goals"} & set(group) and groups[0] and _failed(roof):
                print("no roofline: nothing is timed")
                break
            of = jobs if "parity" in group else 1
            task = {"until": until, "since": begun, "group": i, "of": of}
            going &= runner.supervise(
                [runner.again(["suite", *argv], worker=k, **task) for k in range(of)],
                args.out,
                until,
            )
    except KeyboardInterrupt:
        print("interrupted: what was found is kept")
    report.write_json(args.out / "suite.json", conclude(whole, args.out, meta, args.keep)[0])
    wanted = [u for units_ in groups for u in units_]
    document, broken = conclude(wanted, args.out, meta, args.keep)
    reached = sum(u["status"] != "not reached" for u in document["units"].values())
    print(f"\n{reached} of {len(wanted)} units in {args.out}, {time.time() - begun:.0f} s")
    if not going:
        broken.append("workers ended twice between units; what they said is above")
    for line in broken:
        print(f"FAILED {line}")
    return 1 if broken else 0 if document["complete"] else 3
