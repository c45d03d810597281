"""`python -m tilewright.bench run`: times every provider of every op on its timed cases.

Providers are an op's implementations, its eager twin, the twin compiled, and other libraries where
they are installed. A provider has a time only if its result holds the numerics contract. Where one
crashes or hangs, the next one is measured. Each case has one result file; a call with the same
--out resumes.

    python -m tilewright.bench run [--op OP,..] [--case CASE,..] [--dtype DTYPE,..] [--out DIR]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from tilewright.bench import run
from tilewright.bench.plan import Chosen, Plan, supported, tagged
from tilewright.bench.runner import Unit
from tilewright.bench.units import TIMED, describe, roofline_unit, time_unit
from tilewright.core.registry import Op


def units(
    stage: str,
    ops: Iterable[Op],
    dtypes: Sequence[torch.dtype],
    chosen: Chosen,
    cases: Sequence[str] | None = None,
) -> list[Unit]:
    """The units of the stages `roofline` and `time`."""
    device, settings = chosen.device, chosen.settings
    if stage == "roofline":
        return [roofline_unit(device)]
    here = tagged(ops, device, cases)
    return [
        time_unit(op, case, device, dtype, settings, chosen.out, chosen.only, chosen.say)
        for dtype in TIMED
        for op, case in here
        if dtype in supported(op, dtypes)
    ]


RUN = Plan(
    command=("tilewright.bench", "run"),
    about=__doc__,
    shares={"roofline": 4, "time": 60},
    groups=[("roofline", "time")],
    units=units,
    describe=describe,
    on_roof=("time",),
    dtypes=TIMED,
    settings=run.Settings(),
    minutes=1440.0,
)
