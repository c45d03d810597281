"""Runs all compiled kernels of each op whose row is not of today's sources: python -m tests.ptx"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[2]

if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "lab"), str(ROOT / "tests/lib")]
    from tests.ptx import sweep
    from tests.ptx.verdicts import Verdicts

    SWEEP, digests, red = sweep.SWEEP, sweep.digests(), 0
    for op in SWEEP.old():
        names = sweep.groups()[op]
        verdicts = Verdicts(names)
        wrong = [name for name in names if verdicts[name]]
        verdicts.end()
        for name in wrong:
            print(f"{name}\n{verdicts[name]}", file=sys.stderr)
        seconds = {name: verdicts.seconds.get(name) for name in names}
        took = round(sum(filter(None, seconds.values())))
        SWEEP.write(op, digests[op], wrong, runs=len(names), seconds=took)
        print(f"{op}: {len(names)} runs in {took} s, {len(wrong) or 'none'} wrong", flush=True)
        red += len(wrong)
    print(SWEEP.told())
    sys.exit(min(red, 1))
