"""Searches launch configurations within a time budget, and writes the tables that the launchers
read.

    python -m tilewright.bench tune --minutes 9 [--op OP,..] [--case CASE,..] [--dtype DTYPE,..]
        [--tables DIR]

For every timed case of every op, each implementation with tunable launches is called once to record
the requested (launch, key) pairs. Each launch is then timed with all candidates, interleaved: a
kernel's launch in isolation, other constants in the pass of the op that uses them. The fastest
candidate that holds the op's numerics contract is chosen if it is faster than the heuristic by more
than the spread; else the heuristic is, and that is recorded too. Each (launch, key) is searched
once, in the first case that requests it. A call ends in time and the next one
resumes.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch

from tilewright.bench import (
    contract,
    launches,
    pieces,
    run,
    runner,
    sources,
    store,
    timing,
    tune_tables,
)
from tilewright.bench.options import names
from tilewright.bench.plan import Chosen, Plan
from tilewright.bench.providers import Provider
from tilewright.bench.runner import Unit
from tilewright.bench.units import TIMED
from tilewright.core.registry import Case, Implementation, Op, instead_of, short
from tilewright.kernels import tuning
from tilewright.kernels.tuning import Config, Tunable

STAGE = "search"


# Long: a search's steps in their order, each of which reads what came before.
def search(
    op: Op,
    impl: Implementation,
    case: Case,
    dtype: torch.dtype,
    tunable: Tunable,
    key: tuple,
    device: str,
    rounds: int = 7,
    seconds: float = 8.0,
    attempts: tuple[Sequence[Config], Callable[[Config], object]] = ((), lambda config: None),
) -> dict[str, Any]:
    """The entry for one key: {"key", "config", "heuristic", "median_us", "heuristic_us", "tried",
    "rejected"}.

    attempts: the configurations that must not be tried again, and a function that is called with
        each configuration before its first use.
    """
    crashed, trying = attempts
    kwargs = case.make(device, dtype, run.SEED)
    place = contract.leaves(kwargs)[0].device
    named = tunable.named(key)
    arch = tuning.arch_of_device() if device == "cuda" else None
    candidates = tunable.candidates(arch, **named)
    provider = Provider(impl.name, functools.partial(op.public, implementation=impl.name))
    call_kwargs = contract.convert(kwargs, None) if kwargs.get("inplace") else kwargs
    passes = run.passes(provider, call_kwargs)
    clock = timing.clock(device)
    announced: list[Config] = []

    def task(config):
        def first():
            if config not in announced:
                announced.append(config)
                trying(config)

        return launches.timed(tunable, key, config, place, passes, first, shared)

    shared: dict[tuple, torch.Tensor] = {}
    tasks = {i: task(c) for i, c in enumerate(candidates) if c not in crashed}
    # Keys are the candidates' numbers here, where `interleave` takes any.
    measure = cast(
        "Callable[..., tuple[dict[int, timing.Timing], dict[int, str]]]",
        functools.partial(timing.interleave, clock=clock, rounds=rounds, max_seconds=seconds),
    )
    timings, errors = measure(tasks, seed=run.SEED)
    rejected = {
        **errors,
        **{i: "ended its process" for i, c in enumerate(candidates) if c in crashed},
    }
    # Frees the timed calls' gradients: truth needs all the memory there is.
    for t in contract.leaves(call_kwargs):
        t.grad = None
    by = contract.reference(op, kwargs, dtype, cut=pieces.of(op, kwargs))
    best = 0
    for i in sorted(timings, key=lambda i: timings[i].median):
        if i == 0:
            break
        if 0 in timings and not timing.faster(timings[i], timings[0]):
            continue
        with tunable.override(place, key, candidates[i]):
            broken = contract.broken(contract.judge(op, impl.name, kwargs, by))
        if broken:
            rejected[i] = "; ".join(map(str, broken))
            continue
        if 0 in timings:
            # The fastest of many may only be the luckiest: it must be faster again in rounds of
            # the two alone.
            pair, _ = measure({k: tasks[k] for k in (0, i)}, seed=run.SEED + 1)
            if set(pair) != {0, i} or not timing.faster(pair[i], pair[0]):
                continue
            timings.update(pair)
        best = i
        break

    def micros(i):
        return timings[i].median * 1e6 if i in timings else None

    return {
        "key": named,
        "config": candidates[best],
        "heuristic": candidates[0],
        "median_us": micros(best),
        "heuristic_us": micros(0),
        "op": op.name,
        "case": case.name,
        "dtype": short(dtype),
        "tried": [{"config": c, "median_us": micros(i)} for i, c in enumerate(candidates)],
        "rejected": [{"config": candidates[i], "reason": r} for i, r in rejected.items()],
    }


def unit(
    op: Op,
    impl: Implementation,
    case: Case,
    device: str,
    dtype: torch.dtype,
    out: pathlib.Path,
    meta: dict[str, Any],
) -> Unit:
    """The searches of one case. Each one's result is written before the next starts."""
    name = f"{STAGE}/{op.name}.{impl.name}.{case.name}.{short(dtype)}"

    def make():
        documents = store.documents(out)
        previous = tune_tables.entries_in(documents, meta)
        entries = [{n: e[n] for n in e["own"]} for e in previous if e["unit"] == name]
        done = {tune_tables.key_of(e) for e in previous}
        crashed = tune_tables.crashed(documents.get(name), {**meta, "source": sources.digest(op)})

        def write(trying=None):
            runner.save({"entries": entries, "trying": trying, "crashed": crashed})

        for tunable, key in launches.requested_keys(op, impl, case.make(device, dtype, run.SEED)):
            of = tune_tables.key_of({"launch": tunable.name, "key": tunable.named(key)})
            if of not in done:
                attempts = (
                    [c for *o, c in crashed if tuple(o) == of],
                    lambda config, of=of: write([*of, config]),
                )
                entry = search(op, impl, case, dtype, tunable, key, device, attempts=attempts)
                entries.append({"launch": tunable.name, **entry})
                write()
            run.free(device, compiled=False)
        return {"entries": entries, "trying": None, "crashed": crashed}

    # The limit counts from candidate to candidate: compiling each may take seconds.
    blank = {"entries": [], "trying": None, "crashed": []}
    return Unit(name, make, blank, 150.0, source=sources.digest(op))


def units(
    stage: str,
    ops: Iterable[Op],
    dtypes: Sequence[torch.dtype],
    chosen: Chosen,
    cases: Sequence[str] | None = None,
) -> list[Unit]:
    """The searches of each timed case. Raises ValueError if there is none, and for an unknown name
    of --only.
    """
    device, only = chosen.device, chosen.args.only
    named = [
        (
            f"{op.name}.{case.name}.{short(dtype)}",
            unit(op, impl, case, device, dtype, chosen.out, chosen.meta),
        )
        for dtype in TIMED
        if dtype in dtypes
        for op in ops
        for impl in launches.usable(op, device, dtype)
        for case in run.timed(op, device, cases)
    ]
    if not named:
        raise ValueError(
            f"nothing to do: no op of --op has a launch to search on {device} for a case of --case "
            "in --dtype"
        )
    known = dict(named)
    for name in only or ():
        if name not in known:
            raise ValueError(f"--only: unknown {name!r}{instead_of(name, known)}")
    return [u for name, u in named if only is None or name in only]


def _folder(text: str) -> pathlib.Path:
    """An argparse type: a folder, which is made now rather than after the search."""
    try:
        pathlib.Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return pathlib.Path(text)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        type=names(),
        metavar="NAME,..",
        help="only these of the cases, as op.case.dtype (default: every timed case)",
    )
    parser.add_argument(
        "--tables",
        type=_folder,
        default=tuning.TABLES,
        metavar="DIR",
        help="folder of the tables (default: the one that launchers read)",
    )
    parser.add_argument("--work", dest="out", type=pathlib.Path, help=argparse.SUPPRESS)  # once


def _describe(document: dict[str, Any]) -> str:
    if not document["entries"]:
        return "nothing new to search"
    return "\n" + tune_tables.table(document["entries"])


def _write(chosen: Chosen) -> None:
    documents = store.documents(chosen.out)
    for path in tune_tables.write_tables(documents, chosen.args.tables, chosen.meta):
        print(f"wrote {path}")


TUNE = Plan(
    command=("tilewright.bench", "tune"),
    about=__doc__,
    shares={STAGE: 1},
    groups=[(STAGE,)],
    units=units,
    describe=_describe,
    results="build/tune/{device}",
    dtypes=TIMED,
    options=_options,
    finish=_write,
)
