"""Runs forward functions of public kernel libraries, unmodified, on the emulated GPU; writes how
each ended.

    PYTHONPATH=FOLDER python scripts/emulate_public.py [--only NAME] [--into FOLDER]

FOLDER holds the libraries (scripts/public_kernels.py names them). The result is results.json: per
function its kernels and launches, the error against PyTorch in float64, what was found, or the
reason why it does not run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import re
import sys
import time

import torch
from public_kernels import CASES, Case

from tilewright.bench.tensors import convert
from tilewright_lab.emulate.command import NOTED, attempted, emulated_gpu
from tilewright_lab.emulate.emulation import compared, emulate, kernels_of
from tilewright_lab.emulator.faults import Fault, Unsupported
from tilewright_lab.kernel_target import Call, Rejected

PACKAGES = ("torch", "triton", "liger-kernel", "fla-core")


def tried(case: Case, arch: int) -> dict:
    """How a case ends: "runs", "breaks" or "refused"."""
    row = {"library": case.library, "function": case.name}
    start = time.process_time()
    with emulated_gpu(arch) as (driver, unset):
        driver.counts, driver.tolerated = {}, frozenset(NOTED)
        torch.manual_seed(0)
        call = Call(case.run, named=case.inputs())
        kept = convert(call.named, None)
        try:
            results = attempted(
                lambda: emulate(call, driver, unset), argparse.Namespace(target=case.name)
            )
            if not driver.launches:
                raise Rejected("it launched no Triton kernel")
            row["ended"] = "runs"
            if case.truth is not None:
                worst = max(compared(call, case.truth, results, kept, False), key=lambda f: f.error)
                row |= {"error": worst.error, "eager": worst.eager, "holds": worst.holds}
        except Fault:
            row["ended"] = "breaks"
        except (Rejected, Unsupported) as error:
            row |= {"ended": "refused", "reason": " ".join(str(error).split())[:400]}
        row["kernels"] = [
            {n: k[n] for n in ("kernel", "launches", "programs", "conflicts")}
            for k in kernels_of(driver)
        ]
        once = {(f.kind, f.kernel, f.line or f.what): f for f in driver.faults}
        row["findings"] = [f"{f.kind}: {' '.join(str(f).split())}" for f in once.values()]
    return row | {"cpu_seconds": round(time.process_time() - start, 1)}


KINDS = {
    "replicas": "copies of one value differ by rounding, or are read late (replicas)",
    "uninitialized": "reads uninitialized memory",
    "race": "race",
    "bounds": "outside a tensor",
    "alignment": "misaligned",
    "barrier": "barrier",
}


def table(results: dict) -> str:
    """The rows of results.json as a table in Markdown."""
    lines = [
        "| library | function | ends | launches of kernels | error (eager's) | found |",
        "|---|---|---|---|---|---|",
    ]
    for row in results["functions"]:
        launched = ", ".join(f"{k['launches']} {k['kernel'].lstrip('_')}" for k in row["kernels"])
        error = f"{row['error']:.1e} ({row['eager']:.1e})" if "error" in row else "not compared"
        error += " †" if row.get("holds") is False else ""
        kinds = dict.fromkeys(f.partition(":")[0] for f in row["findings"])
        findings = "; ".join(KINDS[k] for k in kinds) or row.get("reason", "nothing")
        cells = (row["library"], f"`{row['function']}`", row["ended"], launched, error, findings)
        lines.append(f"| {' | '.join(c.replace('|', '/') for c in cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", action="append", default=[], help="a function (repeatable)")
    parser.add_argument("--arch", type=int, default=90, choices=(80, 90, 100, 120))
    parser.add_argument("--into", type=pathlib.Path, help="folder for results.json")
    args = parser.parse_args()
    rows = []
    for case in CASES:
        if not args.only or case.name in args.only:
            rows.append(tried(case, args.arch))
            row = rows[-1]
            print(
                f"{row['library']} {row['function']}: {row['ended']}, {row['cpu_seconds']} s, "
                f"error {row.get('error', float('nan')):.1e} (eager {row.get('eager', float('nan')):.1e}) "
                f"{row.get('reason', '')} {' | '.join(row['findings'])}",
                flush=True,
            )
    if args.into:
        args.into.mkdir(parents=True, exist_ok=True)
        versions = {p: importlib.metadata.version(p) for p in PACKAGES}
        text = json.dumps({"arch": args.arch, "versions": versions, "functions": rows}, indent=1)
        text = re.sub(r"/[\w./-]*/(?=(?:liger_kernel|fla|triton)/)", "", text)  # of this machine
        (args.into / "results.json").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
