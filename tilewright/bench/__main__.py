"""python -m tilewright.bench: what can be timed here, timing it, tuning it, reporting it, and
the compile gate.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import pathlib
import sys

import torch

from tilewright import platform, registry, selection
from tilewright.bench.options import at_least, chosen, has_device, names

# Commands with a parser of their own: name -> (module with main(argv) -> int, help). Imported when
# called.
ELSEWHERE = {
    "compile-gate": (
        "tilewright.bench.compile_gate",
        "compile every GPU kernel without a GPU, against its budgets",
    ),
    "suite": (
        "tilewright.bench.suite",
        "check and time every op here within a budget of minutes, resumably",
    ),
    "tune": (
        "tilewright.bench.tune",
        "search launch constants within a budget of minutes, and write them down",
    ),
    "gpu-cache": (
        "tilewright.bench.gpu_cache",
        "compile what a GPU launches first into Triton's cache, without a GPU",
    ),
    "end-to-end": (
        "tilewright.trainer.end_to_end",
        "a training step of the trainer's model beside transformers', on a CPU",
    ),
    "report": (
        "tilewright.bench.performance",
        "write docs/performance.md from committed raw results",
    ),
}
DTYPES = {registry.short(d): d for d in (*registry.FLOATS, torch.float64)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tilewright.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command")

    def command(name, help_, dtype="float32,bfloat16"):
        p = commands.add_parser(name, help=help_, description=help_)
        p.add_argument("--op", type=names(), metavar="OP,..", help="default: every op")
        p.add_argument(
            "--device",
            default="cuda" if torch.cuda.is_available() else "cpu",
            choices=["cpu", "cuda"],
        )
        p.add_argument(
            "--dtype",
            type=names(),
            default=names()(dtype),
            metavar="DTYPE,..",
            help=f"default: {dtype}",
        )
        return p

    command("list", "ops, their cases and providers: usable here, or the reason why not")

    p = command("run", "time every provider of every op; write JSON, a table and a picture")
    p.add_argument(
        "--case", type=names(), metavar="CASE,..", help="default: every case tagged with the device"
    )
    p.add_argument("--provider", type=names(), metavar="NAME,..", help="default: all")
    p.add_argument(
        "--rounds",
        type=at_least(1, int),
        default=15,
        help="at least so many a case (default %(default)s)",
    )
    p.add_argument(
        "--min-seconds",
        type=at_least(0, float),
        default=0.0,
        help="go on with rounds until a case has taken so long (default %(default)s)",
    )
    p.add_argument(
        "--max-seconds",
        type=at_least(0, float),
        default=60.0,
        help="begin no round after so long, but do three (default %(default)s)",
    )
    p.add_argument(
        "--baseline-slack",
        type=at_least(1, float),
        default=1.0,
        metavar="FACTOR",
        help="time a baseline whose error is within so many times the contract's budget, and mark "
        "it (default %(default)s: the contract itself)",
    )
    p.add_argument(
        "--out", type=pathlib.Path, metavar="DIR", help="default: bench_results/<device>-<date>"
    )

    q = command(
        "overhead", "host time of dispatch above an op's kernel, in microseconds", "float32"
    )
    q.add_argument("--rounds", type=at_least(1, int), default=30, help="default %(default)s")
    q.add_argument(
        "--not-launched",
        action="store_true",
        help="of Triton's implementations on CPU tensors: compiled, bound and specialized as for "
        "a GPU of "
        "compute capability 9.0, but not launched",
    )
    q.add_argument("--out", type=pathlib.Path, metavar="DIR", help="write overhead.json there")
    for each, length in ((p, 8.0), (q, 4.0)):
        each.add_argument("--threads", type=at_least(1, int), metavar="N", help="default: torch's")
        each.add_argument(
            "--sample-ms",
            type=at_least(0, float),
            default=length,
            help="a sample on a CPU is as many calls in a row as take so long (default "
            "%(default)s)",
        )

    c = commands.add_parser(
        "compare", help="two results.json row by row; exit code 1 on a regression"
    )
    c.add_argument("before", type=pathlib.Path)
    c.add_argument("after", type=pathlib.Path)
    c.add_argument(
        "--threshold",
        type=at_least(0, float),
        default=0.05,
        help="a significant slow-down beyond this share is a regression (default %(default)s)",
    )
    for name, (_, help_) in ELSEWHERE.items():
        commands.add_parser(name, help=help_, add_help=False)
    return parser


@platform.command
def main(argv: list[str] | None = None, begun: float | None = None) -> int:
    """begun: when the process was, for commands with a budget of time (default: now)."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ELSEWHERE:
        command = importlib.import_module(ELSEWHERE[argv[0]][0]).main
        return (
            command(argv[1:], begun) if argv[0] in ("suite", "tune") else command(argv[1:])
        ) or 0
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2

    if args.command == "compare":
        from tilewright.bench import report

        try:
            text, regressions = report.compare(
                report.read_json(args.before), report.read_json(args.after), args.threshold
            )
        except ValueError as error:
            print(f"compare: {error}", file=sys.stderr)
            return 2
        print(text)
        return 1 if regressions else 0

    table = selection.operations()
    ops = [table[n] for n in chosen(parser, "--op", args.op, list(table))]
    dtypes = [DTYPES[n] for n in chosen(parser, "--dtype", args.dtype, list(DTYPES))]
    has_device(parser, args.device)
    if getattr(args, "threads", None):
        torch.set_num_threads(args.threads)

    from tilewright.bench import report, run
    from tilewright.bench.providers import BASELINES

    if args.command == "list":
        print(run.listing(ops, args.device, dtypes))
        return 0

    if args.command == "overhead":
        from tilewright.bench import overhead, pretend

        if args.not_launched and (reason := pretend.no_compiling()):
            parser.error(f"--not-launched: {reason}")
        settings = run.Settings(rounds=args.rounds, sample_seconds=args.sample_ms / 1e3)
        device, of = ("cpu", "triton") if args.not_launched else (args.device, None)
        with overhead.not_launched() if args.not_launched else contextlib.nullcontext():
            rows = [
                r
                for dtype in dtypes
                for r in overhead.overhead(
                    ops,
                    device,
                    dtype,
                    rounds=args.rounds,
                    implementation=of,
                    sample_seconds=settings.sample_seconds,
                )
            ]
        print(overhead.table(rows))
        if args.out:
            meta = run.metadata(args.device, settings, argv)
            report.write_json(
                args.out / "overhead.json", {"schema": report.SCHEMA, "meta": meta, "rows": rows}
            )
        return 0

    known = list(dict.fromkeys((*BASELINES, *(n for op in ops for n in op.names()))))
    only = chosen(parser, "--provider", args.provider, known)
    cases = chosen(
        parser,
        "--case",
        args.case,
        list(dict.fromkeys(c.name for op in ops for c in run.timed(op, args.device))),
    )
    settings = run.Settings(
        args.rounds,
        args.min_seconds,
        args.max_seconds,
        args.sample_ms / 1e3,
        baseline_slack=args.baseline_slack,
    )
    document, folder = run.run(
        ops, args.device, dtypes, settings, cases=cases, only=only, out=args.out, argv=argv
    )
    print("\n" + "\n".join(report.summary_lines(document)))
    print(f"written to {folder}")
    broken = [r for r in document["rows"] if r["status"] in ("failed", "error")]
    for r in broken:
        print(f"{' '.join(report.key(r))}: {r['status']}: {r['reason']}")
    if not document["complete"]:
        return 130
    # A fused implementation that breaks the contract is a fault of this library; a baseline's is a
    # finding.
    return 1 if any(r["provider"] not in BASELINES for r in broken) else 0


if __name__ == "__main__":
    from tilewright.bench.runner import started

    sys.exit(main(begun=started()))
