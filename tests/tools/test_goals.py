"""The one table of goals, docs/goals.md, and what is judged by it."""

import pathlib
import re
from dataclasses import replace

import pytest

from bench import overhead
from bench.page import goals
from tilewright.core.registry import Goal
from tilewright.ops import OPS

PAGE = pathlib.Path(__file__).parents[2] / "docs/goals.md"


def rows():
    """(of, device, goal) of the table, one for each op that a row names."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for line in lines[1:]:
        _, of, device, goal = (cell.strip() for cell in line.strip("| ").split(" | "))
        for name in re.findall(r"`(\w+)`", of) or [of]:
            yield name, device, goal


def of_ops():
    return {
        (name, goals.devices_text(goal), goals.goal_text(goal))
        for name, op in OPS.items()
        for goal in op.goals
    }


def test_the_table_has_each_goal_of_an_op_and_no_other():
    table = list(rows())
    assert len(table) == len(set(table))
    others = ("host time", "trainer")
    assert {row for row in table if row[0] not in others} == of_ops()
    assert {row[0] for row in table} >= {*others, "newton_schulz", "attention"}


def test_goals_of_host_time_are_those_of_the_table():
    table = [goal for of, _, goal in rows() if of == "host time"]
    assert table == [f"at most {overhead.GOALS[grad]:g} us" for grad in (False, True)]
    row = {"grad": True, "over_launch_us": 15.1}
    assert overhead.goal_text(row) == "15 us: missed"
    assert overhead.goal_text({**row, "over_launch_us": 14.9}) == "15 us: met"
    assert overhead.goal_text({**row, "over_launch_us": None}) == "-"


def test_cases_of_goals_exist_and_are_timed_there():
    for name, op in OPS.items():
        for goal in op.goals:
            device = "cpu" if goal.device == "EPYC" else "cuda"
            timed = {c.name for c in op.cases if device in c.tags}
            assert timed and set(goal.cases) <= timed, (name, goal)
            assert not goal.by or goal.by in op.names()


def measured(ms, mib=None, auto=False, provider="triton"):
    row = {"provider": provider, "auto": auto, "forward": {"median_ms": ms, "tflop_per_s": 400.0}}
    return {**row, "peak_mib": mib}


SMALLER = Goal("H200", "forward", "median_ms", at_most=39, within_mib=1500)
TWO = replace(SMALLER, at_most=36, within_mib=3000, otherwise=SMALLER)


@pytest.mark.parametrize(
    "ms, mib, met",
    [(35, 2900, True), (35, 3100, False), (38, 1400, True), (38, 1600, False), (40, 100, False)],
)
def test_time_and_memory_together(ms, mib, met):
    judged = goals.judge(TWO, {"triton": measured(ms, mib, auto=True)}, None)
    assert (judged.value, judged.met) == (ms, met)
    assert goals.judge(TWO, {"triton": measured(ms, None, auto=True)}, None) is None
    assert "at most 36.0 ms within 2.93 GiB or at most 39.0 ms within 1.46" in goals.goal_text(TWO)


def test_a_goal_may_be_about_our_own_implementation_and_the_fastest_of_all():
    rows = {
        "native": measured(2.0, auto=True, provider="native"),
        "triton": measured(4.0),
        "flash-attn": measured(1.0, provider="flash-attn"),
    }
    own = Goal(("sm_90",), "forward", "over flash-attn", at_least=0.2, by="triton")
    assert goals.judge(own, rows, None) == goals.Judged(0.25, True)
    best = Goal(("sm_90",), "forward", "over best", at_least=0.98)
    assert goals.judge(best, rows, None) == goals.Judged(0.5, False)
    del rows["flash-attn"]
    assert goals.judge(best, rows, None) == goals.Judged(1.0, True)
    assert goals.judge(own, rows, None) is None, "there is nothing to compare with"
    del rows["triton"]
    assert goals.judge(own, {"native": rows["native"]}, None) is None
