"""Runs all compiled kernels of each op whose row is not of today's sources: python -m tests.ptx"""

import os
import pathlib
import subprocess
import sys
import tempfile

from tests.lib import shards
from tests.lib.sweeps import ROOT, go_on
from tests.ptx import sweep
from tests.ptx.verdicts import Verdicts


def emulated(names):
    """How many runs, which of them are wrong, and the seconds of all."""
    verdicts = Verdicts(names)
    wrong = [name for name in names if verdicts[name]]
    verdicts.end()
    for name in wrong:
        print(f"{name}\n{verdicts[name]}", file=sys.stderr)
    return len(names), wrong, sum(filter(None, map(verdicts.seconds.get, names)))


def tested(test):
    """The same, of a test's cases."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.xml")
        command = f"-m pytest -q -n 0 -p no:cacheprovider --junitxml={report} {test}".split()
        variables = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
        subprocess.run([sys.executable, *command], cwd=ROOT, env=variables)
        found = [(name, case) for _, name, case in shards.cases(str(report))]
    red = {"failure", "error", "skipped"}
    wrong = [name for name, case in found if red & {child.tag for child in case}]
    return len(found), wrong if found else [test], sum(float(case.get("time")) for _, case in found)


def row_of(unit):
    if unit in sweep.TESTS:
        runs, wrong, took = tested(sweep.TESTS[unit][0])
    else:
        runs, wrong, took = emulated(sweep.groups()[unit])
    return {"runs": runs, "seconds": round(took), "wrong": wrong}


if __name__ == "__main__":
    go_on(sweep.SWEEP, sweep.TABLE, ((unit, row_of(unit)) for unit in sweep.SWEEP.old()))
    sys.exit(bool(sweep.SWEEP.wrong()))
