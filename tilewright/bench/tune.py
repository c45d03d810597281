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
import contextlib
import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import torch

from tilewright import selection
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
from tilewright.bench.options import at_least, has_device, names
from tilewright.bench.providers import Provider
from tilewright.bench.runner import Unit
from tilewright.core import platform
from tilewright.core.registry import Case, Implementation, Op, instead_of, short
from tilewright.kernels import tuning
from tilewright.kernels.tuning import Config, Tunable

DTYPES = (torch.bfloat16, torch.float32)


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
    # Of the candidates' numbers, where `interleave` takes any keys.
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


# Long: the functions of one unit, which share its state file.
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
    name = f"{op.name}.{impl.name}.{case.name}.{short(dtype)}"

    def make():
        previous = tune_tables.entries_in(out, meta)
        entries = [{n: e[n] for n in e["own"]} for e in previous if e["unit"] == name]
        done = {tune_tables.key_of(e) for e in previous}
        about = {**meta, "source": sources.digest(op)}
        crashed = tune_tables.crashed(out / f"{name}.json", about)

        def write(trying=None):
            stamped = {**about, "date": datetime.now(UTC).isoformat(timespec="seconds")}
            store.write_json(
                out / f"{name}.json",
                {
                    "schema": runner.SCHEMA,
                    "meta": stamped,
                    "entries": entries,
                    "trying": trying,
                    "crashed": crashed,
                    "unfinished": True,
                },
            )

        for tunable, key in launches.requested_keys(op, impl, case.make(device, dtype, run.SEED)):
            of = tune_tables.key_of({"launch": tunable.name, "key": tunable.named(key)})
            if of not in done:
                entries.append(
                    {
                        "launch": tunable.name,
                        **search(
                            op,
                            impl,
                            case,
                            dtype,
                            tunable,
                            key,
                            device,
                            attempts=(
                                [c for *o, c in crashed if tuple(o) == of],
                                lambda config, of=of: write([*of, config]),
                            ),
                        ),
                    }
                )
                write()
            run.free(device, compiled=False)
        return {"entries": entries, "trying": None, "crashed": crashed}

    # The limit counts from candidate to candidate: compiling each may take seconds.
    return Unit(
        name, make, {"entries": [], "trying": None, "crashed": []}, 150.0, source=sources.digest(op)
    )


def units(
    ops: Sequence[Op],
    device: str,
    dtypes: Sequence[torch.dtype],
    out: pathlib.Path,
    meta: dict[str, Any],
    cases: Sequence[str] | None = None,
) -> list[Unit]:
    return [
        unit(op, impl, case, device, dtype, out, meta)
        for dtype in dtypes
        for op in ops
        for impl in launches.usable(op, device, dtype)
        for case in run.timed(op, device, cases)
    ]


def parser(prog: str = "python -m tilewright.bench tune", about: str | None = __doc__):
    ops = selection.operations()
    p = argparse.ArgumentParser(
        prog=prog,
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = p.add_argument
    add("--minutes", type=at_least(0.05, float), required=True, help="time budget of this call")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    add("--op", type=names(ops), default=list(ops), metavar="OP,..", help="default: every op")
    add(
        "--case",
        type=names({c.name for op in ops.values() for c in op.cases}),
        metavar="CASE,..",
        help="default: every timed case",
    )
    add(
        "--dtype",
        type=names([short(d) for d in DTYPES]),
        default=[short(d) for d in DTYPES],
        metavar="DTYPE,..",
        help="default: %(default)s",
    )
    add(
        "--only",
        type=names(),
        metavar="NAME,..",
        help="only these of the cases, as op.case.dtype (default: every timed case)",
    )
    add(
        "--tables",
        type=pathlib.Path,
        default=tuning.TABLES,
        metavar="DIR",
        help="folder of the tables (default: the one that launchers read)",
    )
    add(
        "--work",
        type=pathlib.Path,
        metavar="DIR",
        help="folder of the searches' state (default: build/tune/<device>)",
    )
    add(
        "--commit",
        metavar="COMMIT|FILE",
        help="the commit of these sources, or gpu-cache's commit.json, if git cannot tell",
    )
    return p


def searches(
    args: argparse.Namespace, argv: Sequence[str]
) -> tuple[list[Unit], pathlib.Path, dict[str, Any]]:
    """What a call was asked to search, the folder of its state, and its metadata.

    Raises ValueError if that is nothing, or a case that is none.
    """
    ops = selection.operations()
    meta = run.metadata(args.device, run.Settings(), ["tune", *argv], commit=args.commit)
    out = args.work or pathlib.Path("build/tune") / platform.slug(meta["device"])
    plan = units(
        [ops[n] for n in args.op],
        args.device,
        [d for d in DTYPES if short(d) in args.dtype],
        out,
        meta,
        args.case,
    )
    # A unit's name is op.implementation.case.dtype.
    by_case = [".".join(u.name.split(".", 1)[:1] + u.name.split(".", 2)[2:]) for u in plan]
    if args.only is not None:
        for name in args.only:
            if name not in by_case:
                raise ValueError(f"--only: unknown {name!r}{instead_of(name, by_case)}")
        plan = [u for u, case in zip(plan, by_case, strict=True) if case in args.only]
    if not plan:
        raise ValueError(
            f"nothing to do: no op of --op has a launch to search on {args.device} for a case of "
            "--case in --dtype"
        )
    return plan, out, meta


def main(argv: Sequence[str], start_time: float | None = None) -> int:
    start_time = start_time or time.time()
    argv, task = runner.parse_task(argv)
    p = parser()
    args = p.parse_args(argv)
    has_device(p, args.device)
    try:
        plan, out, meta = searches(args, argv)
    except ValueError as error:
        p.error(str(error))
    if task is not None:
        runner.begin_worker(task["parent"])
        runner.work(
            plan,
            out,
            task["until"],
            meta,
            since=task["since"],
            describe=lambda d: (
                "\n" + tune_tables.table(d["entries"]) if d["entries"] else "nothing new to search"
            ),
            now=functools.partial(run.moment, args.device),
        )
        runner.done()
    until = start_time + 60 * args.minutes - runner.FINISH
    going = True
    try:
        args.tables.mkdir(parents=True, exist_ok=True)  # fails now rather than after the search
    except OSError as error:
        p.error(f"argument --tables: {error}")
    try:
        with runner.locked(out):
            # After an interrupt, the results so far are still written.
            with contextlib.suppress(KeyboardInterrupt):
                command = ["tilewright.bench", "tune", *argv]
                going = runner.supervise(
                    [runner.worker_command(command, until=until, since=start_time)], out, until
                )
            for path in tune_tables.write_tables(out, args.tables, meta):
                print(f"wrote {path}")
    except (runner.Unusable, OSError) as error:
        p.error(f"argument --work: {error}")
    done = [runner.current(u, out, meta) for u in plan]
    failed = [
        f"{u.name}: {d['error']}" for u, d in zip(plan, done, strict=True) if d and d.get("error")
    ]
    print(
        f"{sum(d is not None for d in done)} of {len(plan)} searches done, "
        f"{time.time() - start_time:.0f} s"
    )
    if not going:
        failed.append("the worker ended twice between units; what it said is above")
    for line in failed:
        print(f"FAILED {line}")
    return 1 if failed else 0 if all(done) else 3
