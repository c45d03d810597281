"""The suite and the search for launch configurations: budgets, crashes, hangs, resuming; and both
end to end on a CPU.
"""

import argparse
import functools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import types
from dataclasses import replace

import forked
import pytest
import torch
from helpers import pause, until
from triton.runtime.interpreter import InterpretedFunction

from bench import search, suite, variants
from bench.__main__ import main
from bench.stages import checks, goals, smoke
from bench.variants import Variant
from tilewright.bench import (
    contract,
    launches,
    plan,
    run,
    runner,
    sources,
    store,
    timing,
    tune,
    tune_tables,
)
from tilewright.bench.__main__ import main as bench
from tilewright.bench.plan import Chosen
from tilewright.bench.providers import Provider
from tilewright.bench.report import PASSES
from tilewright.bench.runner import Unit, failures
from tilewright.bench.units import DTYPES, TIMED, roofline_unit
from tilewright.core.registry import (
    Case,
    Cost,
    Goal,
    Implementation,
    ImplementationUnavailable,
    Op,
    short,
)
from tilewright.kernels import tuning
from tilewright.kernels.tuning import Tunable
from tilewright.ops import OPS
from tilewright.ops.norm.rmsnorm import RMSNORM, rmsnorm_eager

# Deadlines that never come, and a moment after all others, also as JSON.
FOREVER, LATER = math.inf, 1e12
META = {"device": "a cpu", "source": "1", "versions": {}}
RAGGED = next(c for c in RMSNORM.cases if c.name == "ragged")


def counting(name, log, fail=None, limit=60.0):
    def make():
        log.append(name)
        if fail:
            raise fail
        return {"value": name}

    return Unit(name, make, {"value": None}, limit)


# ---- one process


def test_what_is_there_from_the_same_sources_is_not_made_again(tmp_path):
    log = []
    units = [
        counting("a/one", log),
        counting("a/two", log, ValueError("no\nmore")),
        counting("b", log),
    ]
    for _ in range(2):
        runner.work(units, tmp_path, FOREVER, META)
    assert log == ["a/one", "a/two", "b"]
    document = value(tmp_path, "a/one")
    assert document["value"] == "a/one" and document["meta"] == META and document["seconds"] >= 0
    assert document["attempts"] == 1
    assert value(tmp_path, "a/two")["error"] == "ValueError: no"
    assert not list(tmp_path.glob("running*"))
    for field, other in (("source", "2"), ("versions", {"torch": "9"})):
        runner.work(units[:1], tmp_path, FOREVER, {**META, field: other})
        runner.work(units[:1], tmp_path, FOREVER, META)
        assert len(log) == 5, field
        del log[3:]
    changed = {**META, "source": "2"}
    runner.work(units[:1], tmp_path, FOREVER, changed, keep=True)
    assert len(log) == 3
    runner.work(units[:1], tmp_path, FOREVER, changed)
    assert len(log) == 4
    runner.work(units[:1], tmp_path, FOREVER, {**changed, "device": "another"}, keep=True)
    assert len(log) == 5, "no number of one device may stand for another's"


def test_what_was_made_with_other_options_is_made_again(tmp_path):
    log = []
    one = replace(counting("a", log), options={"dtypes": ("float32", "bfloat16"), "slack": 8.0})
    for _ in range(2):
        runner.work([one], tmp_path, FOREVER, META)
    assert log == ["a"]
    runner.work(
        [replace(one, options={"dtypes": ["float32"], "slack": 8.0})],
        tmp_path,
        FOREVER,
        META,
        keep=True,
    )
    assert log == ["a", "a"], "--keep is for other sources, not for other questions"


def test_what_failed_is_tried_again_by_later_calls_and_not_for_ever(tmp_path):
    log = []
    unit = counting("a", log, MemoryError("full"))
    for _ in range(3):  # one call, whose worker was restarted twice
        runner.work([unit], tmp_path, FOREVER, META, since=0.0)
    assert len(log) == 1
    for _ in range(5):
        runner.work([unit], tmp_path, FOREVER, META, since=LATER)
    assert len(log) == runner.ATTEMPTS == value(tmp_path, "a")["attempts"]
    (tmp_path / store.FILE).unlink()
    runner.work([unit], tmp_path, FOREVER, META, since=LATER)
    runner.work([counting("a", log)], tmp_path, FOREVER, META, since=LATER)
    assert value(tmp_path, "a")["value"] == "a" and "error" not in value(tmp_path, "a")


def test_a_number_that_json_does_not_have_costs_one_unit(tmp_path):
    unit = Unit("a", lambda: {"value": float("nan")}, {"value": None})
    log = []
    runner.work([unit, counting("b", log)], tmp_path, FOREVER, META)
    assert (
        value(tmp_path, "a")["value"] is None
        and "ValueError" in value(tmp_path, "a")["error"]
        and log == ["b"]
    )


def test_what_there_was_no_time_for_goes_last(tmp_path):
    log = []
    store.append(tmp_path / store.FILE, "a", {"late": True})
    failed = counting("b", log, ValueError("no"))
    runner.work([failed], tmp_path, FOREVER, META)
    runner.work(
        [counting("a", log), failed, counting("c", log)],
        tmp_path,
        FOREVER,
        META,
        since=LATER,
    )
    assert log == ["b", "c", "b", "a"], "what was never tried, what failed, what took too long"


def test_each_document_has_its_own_moment(tmp_path):
    ticks = iter(range(9))
    runner.work(
        [counting("a", []), counting("b", [])],
        tmp_path,
        FOREVER,
        META,
        now=lambda: {"date": next(ticks)},
    )
    assert [value(tmp_path, n)["meta"]["date"] for n in "ab"] == [0, 1]


def test_a_folder_is_for_one_call_at_a_time(tmp_path):
    with (
        runner.locked(tmp_path / "new"),
        pytest.raises(runner.Unusable, match=r"another call is at work in .*new"),
        runner.locked(tmp_path / "new"),
    ):
        pass
    (tmp_path / "file").touch()
    with (
        pytest.raises(runner.Unusable, match=r"cannot write into .*file"),
        runner.locked(tmp_path / "file"),
    ):
        pass


def test_nothing_is_begun_when_time_is_out(tmp_path):
    log = []
    runner.work([counting("a", log)], tmp_path, 0.0, META)
    assert log == [] and not list(tmp_path.iterdir())


# ---- supervised processes

WORKER = """
import itertools, os, pathlib, subprocess, sys, time, types
from tilewright.bench import runner, timing
out, until, slot = pathlib.Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
{CLOCK}
def unit(name, make, limit=60.0):
    return runner.Unit(name, make, {"found": []}, limit)
def stuck():
    time.sleep(600)
def later(seconds):
    # The supervisor looks once, at a time so much later.
    (out / "seconds").write_text(str(seconds))
    (out / "seconds").rename(out / "later")
    from helpers import until
    until(lambda: not (out / "later").exists())
def out_of_time():
    later(40_000)  # than any clock of write_parts
    stuck()
def lose():
    raise timing.DeviceLost("triton bfloat16: an illegal memory access")
def breed():
    child = subprocess.Popen(["sleep", "600"])
    (out / "child").write_text(str(child.pid))
    out_of_time()
def write_parts():
    for i in range(1, 4):
        runner.time.time = lambda: {START} + 2000 * i
        runner.save({"found": list(range(1, i + 1))})
        later(2000 * (i + 1))
    return {"found": [1, 2, 3]}
def me():
    return {"found": [os.getpid()]}
def turn():
    with (out / "turns").open("a") as file:
        file.write("x")
        return {"found": [file.tell()]}
units = {UNITS}
runner.work(units, out, until, {"device": "a cpu", "source": "1", "versions": {}}, slot=slot)
"""


START = 1e9  # where the clocks of a supervisor and its workers begin
# A worker's passes only when it is read, so that what is later has a later time.
TICKING = f"""
ticks = itertools.count()
runner.time = types.SimpleNamespace(time=lambda: {START} + 1e-6 * next(ticks), perf_counter=float)
"""


class End(float):
    """A deadline that has passed for good once a function returns true: a machine may take a minute
    to begin a unit, or a moment.
    """

    def __new__(cls, says_so):
        return super().__new__(cls, FOREVER)

    def __init__(self, says_so):
        self.says_so, self.has_come = says_so, False

    def __le__(self, now):
        self.has_come = self.has_come or self.says_so()
        return self.has_come


class Clock:
    """That of a supervisor, whose worker says for each look how much later it is."""

    def __init__(self, out):
        self.later, self.ahead = out / "later", 0.0

    def time(self):
        return START + self.ahead

    def sleep(self, _):
        """Before each look."""
        if self.ahead:
            self.later.unlink()
        pause()
        self.ahead = float(self.later.read_text()) if self.later.exists() else 0.0


def watch(tmp_path, units, workers=1, late=lambda out: False, real=False):
    """late: whether time is up, given the folder.   real: with the system's clock, and in processes
    that were not forked. Returns the folder, the output and whether time was up.
    """
    script = tmp_path / "worker.py"
    parts = {"{UNITS}": units, "{CLOCK}": "" if real else TICKING, "{START}": str(START)}
    script.write_text(functools.reduce(lambda s, part: s.replace(*part), parts.items(), WORKER))
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    end = End(lambda: late(out))
    said = []
    with pytest.MonkeyPatch.context() as patch:
        if not real:
            clock = Clock(out)
            patch.setattr(runner, "time", types.SimpleNamespace(time=clock.time, sleep=clock.sleep))
            patch.setattr(runner, "subprocess", forked.IN_PLACE)
        runner.supervise(
            [
                [sys.executable, str(script), str(out), str(float(end)), str(i)]
                for i in range(workers)
            ],
            out,
            end,
            say=said.append,
            stream=tmp_path / "lines.jsonl",
        )
    return out, "\n".join(said), end.has_come


def at(unit):
    """Whether a worker is at this unit."""

    def is_there(out):
        try:
            return json.loads((out / "running-0.json").read_text())["unit"] == unit
        except (OSError, ValueError):
            return False

    return is_there


def value(out, name):
    return store.documents(out)[name]


def test_a_crash_and_a_hang_cost_one_unit_each(tmp_path):
    """A hang that never ends, with a limit of the system's clock. The others have a minute."""
    out, said, _ = watch(
        tmp_path,
        """[
        unit("first", lambda: {"found": [1]}), unit("crash", lambda: os.abort()),
        unit("hang", stuck, 1.0), unit("last", lambda: {"found": [2]})]""",
        real=True,
    )
    assert value(out, "first")["found"] == [1] and value(out, "last")["found"] == [2]
    assert "SIGABRT" in value(out, "crash")["error"] and value(out, "crash")["found"] == []
    assert (
        "within 1 s" in value(out, "hang")["error"]
        and value(out, "hang")["meta"]["device"] == "a cpu"
    )
    assert "crash: its process died" in said and not list(out.glob("running*"))
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [line["unit"] for line in lines] == ["crash", "hang"], "the supervisor's own documents"
    assert "SIGABRT" in lines[0]["error"]


def test_a_call_ends_in_time_and_the_next_goes_on(tmp_path):
    units = """[unit("quick", lambda: {"found": [1]}), unit("slow", stuck), unit("never", turn)]"""
    out, said, up = watch(tmp_path, units, late=at("slow"))
    assert up and "quick" in store.documents(out)
    assert not list(out.glob("running*"))
    late = value(out, "slow")
    assert "slow: out of time" in said and late["late"] and late["unfinished"]
    assert "error" not in late, "it may need just the time that was left"
    out, _, _ = watch(tmp_path, units.replace("stuck", "turn"))
    assert [value(out, n)["found"] for n in ("never", "slow")] == [[1], [2]], "slow goes last"
    assert "late" not in value(out, "slow")


def test_a_lost_device_is_told_with_its_cause_and_the_rest_goes_on_in_another_process(tmp_path):
    out, _, _ = watch(tmp_path, """[unit("before", me), unit("lost", lose), unit("after", me)]""")
    assert value(out, "lost")["error"] == "triton bfloat16: an illegal memory access"
    assert value(out, "before")["found"] != value(out, "after")["found"]


def test_the_device_is_asked_after_an_exception(monkeypatch):
    """A sticky error is reported by the next synchronization, and by all later ones."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tasks = {"bad": lambda: 1 / 0, "good": lambda: None}
    timings, errors = timing.interleave(tasks, timing.CpuClock(0.0), rounds=1)
    assert list(timings) == ["good"] and list(errors) == ["bad"]

    def sticky():
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", sticky)
    with pytest.raises(timing.DeviceLost, match="bad: ZeroDivisionError"):
        timing.interleave(tasks, timing.CpuClock(0.0), rounds=1)
    with pytest.raises(timing.DeviceLost, match="broken float32: RuntimeError: an illegal address"):
        planned(fake_op(broken=raises), "parity")[0].make()
    op = fake_op(right=rmsnorm_eager)
    unit = checks.check_unit("big", op, RAGGED, "cpu", [torch.float32], raises, lambda *_: None)
    with pytest.raises(timing.DeviceLost, match="right float32: RuntimeError: an illegal address"):
        unit.make()
    with pytest.raises(timing.DeviceLost, match="broken: RuntimeError"):
        run.measure(
            fake_op(broken=raises),
            RAGGED,
            "cpu",
            torch.float32,
            timing.Roofline(1e10, {}),
            timing.CpuClock(0.0),
            run.Settings(rounds=1),
            only=["broken"],
        )


def alive(pid):
    try:
        return "zombie" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended, perhaps while its status was read
        return False


def test_what_a_worker_has_started_ends_with_it(tmp_path):
    """Compilers run in processes of their own."""
    out, _, _ = watch(tmp_path, """[unit("hang", breed, 3000.0)]""")
    assert "within 3000 s" in value(out, "hang")["error"]
    child = (out / "child").read_text()
    until(lambda: not alive(child))  # killed with the worker, but not waited for


def test_workers_end_with_a_supervisor_that_is_killed(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, pathlib, sys, time\nfrom tilewright.bench import runner\n"
        "runner.begin_worker(os.getppid())\n"
        "pathlib.Path(sys.argv[1], 'pid').write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    boss = tmp_path / "boss.py"
    boss.write_text(
        "import pathlib, sys\nfrom tilewright.bench import runner\n"
        "runner.supervise([[sys.executable, *sys.argv[1:]]], pathlib.Path(sys.argv[2]), "
        "float('inf'))"
    )
    process = forked.Forked([sys.executable, str(boss), str(worker), str(tmp_path)])

    def begun():
        assert process.poll() is None
        return (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()

    pid = until(begun)
    process.kill()
    process.wait()
    until(lambda: not alive(pid))


def test_a_worker_whose_supervisor_is_gone_already_does_not_begin(tmp_path, capfd):
    code = "from tilewright.bench import runner; runner.begin_worker(1); print('began')"
    (tmp_path / "worker.py").write_text(code)
    assert forked.Forked([sys.executable, str(tmp_path / "worker.py")]).wait() == 1
    assert capfd.readouterr().out == ""


def test_a_hang_with_a_file_of_its_own_does_not_stop_the_rest(tmp_path):
    """A unit that failed in an earlier call, or has written a part: the next call does not begin
    with it again.
    """
    units = """[unit("first", {FIRST}), unit("second", lambda: {"found": [2]})]"""
    out = tmp_path / "out"
    part = {"meta": META, "unfinished": True, "found": [1]}
    store.append(out / store.FILE, "first", part)
    watch(tmp_path, units.replace("{FIRST}", "stuck"), late=at("first"))
    assert "second" not in store.documents(out)
    assert value(out, "first") == {**part, "late": True}
    watch(tmp_path, units.replace("{FIRST}", "stuck"), late=at("first"))
    assert value(out, "second")["found"] == [2]


def test_a_limit_counts_from_what_was_last_written(tmp_path):
    script = """[unit("parts", write_parts, 3000.0), unit("stuck", out_of_time, 3000.0)]"""
    out, _, _ = watch(tmp_path, script)
    assert value(out, "parts")["found"] == [1, 2, 3] and "error" not in value(out, "parts")
    assert "within 3000 s" in value(out, "stuck")["error"]


def test_what_a_unit_saved_before_its_call_was_killed_stays(tmp_path):
    document = {"meta": META, "found": [1, 2]}
    state = {"unit": "a", "limit": 1.0, "saved": True, "document": document}
    store.write_json(tmp_path / "running-0.json", state)
    assert runner.supervise([[sys.executable, "-c", ""]], tmp_path, FOREVER)
    assert value(tmp_path, "a") == {**document, "unfinished": True, "late": True}
    assert not list(tmp_path.glob("running*"))


def test_a_worker_that_is_silent_is_given_up(tmp_path):
    script = tmp_path / "silent.py"
    script.write_text("import time; time.sleep(600)")
    said = []
    assert (
        runner.supervise(
            [[sys.executable, str(script)]],
            tmp_path,
            FOREVER,
            say=said.append,
            silent=0.5,
        )
        is False
    )
    assert said == ["worker 0: was at no unit for 0.5 s"] * 2


def test_the_time_that_imports_took_is_in_the_budget(tmp_path, monkeypatch):
    """A command counts from the start of its process, which Linux tells (proc(5)) by ticks since it
    booted.
    """
    monkeypatch.setattr(runner, "time", types.SimpleNamespace(time=lambda: START))
    ticks = 40 * os.sysconf("SC_CLK_TCK")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/stat").write_text(f"7 (a) b) S {' '.join('1' * 18)} {ticks} 1 1\n")
    (tmp_path / "uptime").write_text("52.50 99.00\n")
    assert runner.started(tmp_path) == START - 12.5
    assert runner.started(tmp_path / "another system") == START
    assert runner.started() < START, "the format is that of this system"
    given = []
    monkeypatch.setattr(plan, "main", lambda of, argv, start_time: given.append(start_time))
    for command, name in ((main, "suite"), (bench, "run"), (bench, "tune")):
        command([name], start_time=5.0)
    assert given == [5.0] * 3


def test_an_interrupt_leaves_no_worker(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(
        f"import os, pathlib, signal, time\npathlib.Path({str(tmp_path)!r}, 'pid').write_text("
        "str(os.getpid()))\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(600)\n"
    )
    with pytest.raises(KeyboardInterrupt):
        runner.supervise([[sys.executable, str(script)]], tmp_path, FOREVER)
    assert not alive((tmp_path / "pid").read_text())


def test_an_interrupt_leaves_no_worker_that_is_being_started(tmp_path, monkeypatch):
    started = []

    class Interrupted(forked.Forked):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self.pid)
            os.kill(os.getpid(), signal.SIGTERM)

    fake = types.SimpleNamespace(Popen=Interrupted, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(runner, "subprocess", fake)
    (tmp_path / "stuck.py").write_text("import time; time.sleep(600)")
    with pytest.raises(KeyboardInterrupt):
        runner.supervise([[sys.executable, str(tmp_path / "stuck.py")]] * 2, tmp_path, FOREVER)
    assert len(started) == 1 and not alive(started[0])


def test_a_worker_that_cannot_start_is_not_started_for_ever(tmp_path):
    _, said, _ = watch(tmp_path, "no_such_name")
    assert said.count("exit code 1") == 2


# ---- units of the suite


def fake_op(**implementations):
    op = Op(
        "rmsnorm",
        None,
        rmsnorm_eager,
        tuple(
            Implementation(n, lambda fn=fn: fn, devices=("cpu",), dtypes=(torch.float32,))
            for n, fn in implementations.items()
        ),
        (RAGGED, Case("tiny", RAGGED.make, lambda itemsize: Cost(1000, 2000), frozenset({"cpu"}))),
    )

    def public(x, weight, eps=1e-6, *, bias=None, offset=0.0, cast="llama", implementation="auto"):
        return op.pick(implementation, x)(x, weight, bias, eps, offset, cast)

    op.public = public
    return op


def raises(*args):
    raise RuntimeError("an illegal address")


def planned(op, stage, out=pathlib.Path()):
    settings = run.Settings(rounds=1, sample_seconds=0.0)
    return suite.units(stage, [op], plan.DTYPES, Chosen("cpu", settings, out))


def test_parity_tells_what_holds_what_is_broken_and_what_raised():
    op = fake_op(
        right=rmsnorm_eager, wrong=lambda x, *rest: rmsnorm_eager(x, *rest) * 1.02, broken=raises
    )
    (unit,) = planned(op, "parity")
    assert (
        unit.name == "parity/rmsnorm.ragged"
        and unit.source == sources.of_measured(op, "cpu") != sources.digest()
    )
    document = unit.make()
    found = {r["implementation"]: r for r in document["results"]}
    assert {n: r["status"] for n, r in found.items()} == {
        "right": "holds",
        "wrong": "broken",
        "broken": "error",
    }
    assert [t["name"] for t in found["right"]["tensors"]] == ["out 0", "grad x", "grad weight"]
    assert all(t["error"] <= t["budget"] for t in found["right"]["tensors"])
    assert runner.raised(document) and not runner.raised(
        {**document, "results": [found["right"], found["wrong"]]}
    )
    assert "exceeds" in found["wrong"]["reason"] and "illegal address" in found["broken"]["reason"]
    assert len(failures(document)) == 2
    json.dumps(document, allow_nan=False)


def test_parity_sees_a_fault_that_only_strided_gradients_show():
    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return torch.as_strided(g, g.shape, g.contiguous().stride())  # assumes contiguous

    op = fake_op(careless=lambda x, *rest: Careless.apply(rmsnorm_eager(x, *rest)))
    (result,) = planned(op, "parity")[0].make()["results"]
    assert result["status"] in ("broken", "error")


def test_parity_sees_what_was_never_written():
    def unwritten(x, weight, bias, eps, offset, cast):
        y = torch.empty_like(x)
        y[1:] = rmsnorm_eager(x, weight, bias, eps, offset, cast)[1:]
        return y

    (result,) = planned(fake_op(unwritten=unwritten), "parity")[0].make()["results"]
    assert result["status"] == "broken"
    assert next(t for t in result["tensors"] if t["name"] == "out 0")["error"] is None, (
        "NaN: no number"
    )


def test_parity_goes_on_through_every_dtype_that_is_taken():
    """An implementation that is wrong only in the last dtype."""

    def late(x, *rest):
        return rmsnorm_eager(x, *rest) * (1.02 if x.dtype == torch.float16 else 1)

    op = fake_op(late=late)
    op.implementations = (
        replace(op.implementations[0], dtypes=(torch.float32, torch.float16)),
        *op.implementations[1:],
    )
    op._by_name = {i.name: i for i in op.implementations}
    found = planned(op, "parity")[0].make()["results"]
    assert {r["dtype"]: r["status"] for r in found} == {"float32": "holds", "float16": "broken"}


def test_pytorchs_own_failures_are_no_fault_of_this_library():
    result = {"dtype": "float32", "reason": "exceeds", "status": "broken"}
    rows = [
        {"provider": p, "status": s, "reason": "r"}
        for p, s in (
            ("compile", "error"),
            ("torch", "failed"),
            ("liger", "error"),
            ("triton", "failed"),
            ("cpp", "unavailable"),
        )
    ]
    assert failures({"results": [{**result, "implementation": n} for n in ("torch", "cpp")]}) == [
        "cpp float32: exceeds"
    ]
    assert failures({"rows": rows}) == ["triton: r"]


def test_numbers_that_json_does_not_have_are_none():
    f = contract.Finding("out 0", float("inf"), float("nan"), float("nan"), ())
    assert checks.tensor_entry(f) == {"name": "out 0", "error": None, "eager": None, "budget": None}


def test_a_failed_capture_says_what_it_failed_of():
    def check(*_):
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("capture ended")

    unit = checks.check_unit(
        "graph",
        fake_op(right=rmsnorm_eager),
        RAGGED,
        "cpu",
        [torch.float32],
        check,
        lambda *_: None,
    )
    assert "not permitted" in unit.make()["results"][0]["reason"]


def test_what_cannot_run_here_says_why():
    op = fake_op(right=rmsnorm_eager)
    op.implementations = (
        replace(op.implementations[0], missing=lambda device: f"no {device} here"),
        *op.implementations[1:],
    )
    document = planned(op, "parity")[0].make()
    assert [(r["status"], r["reason"]) for r in document["results"]] == [
        ("unavailable", "no cpu here")
    ]
    assert not failures(document)
    assert planned(OPS["silu_mul"], "graph") == [] and planned(OPS["silu_mul"], "big") == []


def test_a_new_op_is_taken_in_by_every_stage(tmp_path):
    op = fake_op(right=rmsnorm_eager)
    names = [u.name for stage in suite.STAGES for u in planned(op, stage, tmp_path)]
    assert names == [
        "smoke/rmsnorm.ragged",
        "roofline",
        "overhead/rmsnorm",
        "parity/rmsnorm.ragged",
        "time/rmsnorm.tiny.float32",
        "overhead/rmsnorm",
    ]
    runner.work(
        [
            replace(
                u,
                make=lambda: {"roofline": {"copy_bytes_per_second": 1e10, "flops_per_second": {}}},
            )
            if u.name == "roofline"
            else u
            for stage in suite.STAGES
            for u in planned(op, stage, tmp_path)
        ],
        tmp_path,
        FOREVER,
        META,
    )
    rows = value(tmp_path, "time/rmsnorm.tiny.float32")["rows"]
    assert {r["provider"]: r["status"] for r in rows}["right"] == "ok"
    document, broken = plan.conclude(
        [u for s in suite.STAGES for u in planned(op, s, tmp_path)],
        store.documents(tmp_path),
        META,
        False,
    )
    assert document["complete"] and not broken
    assert {u["status"] for u in document["units"].values()} == {"done"}


def test_host_time_without_a_gpu_is_of_ops_with_triton_kernels():
    without = fake_op(right=rmsnorm_eager)
    settings = run.Settings(sample_seconds=0.002)
    found = [
        suite.units(
            "overhead",
            [without, OPS["rope"]],
            DTYPES,
            Chosen("cpu", settings, pathlib.Path(), args=argparse.Namespace(not_launched=n)),
        )
        for n in (False, True)
    ]
    names = [[u.name for u in units] for units in found]
    assert names == [["overhead/rmsnorm", "overhead/rope"], ["overhead/rope.not-launched"]]


def test_every_registered_case_is_in_the_plan():
    @functools.cache
    def names(stage, device):
        return {
            u.name
            for u in suite.units(
                stage, OPS.values(), DTYPES, Chosen(device, run.Settings(), pathlib.Path())
            )
        }

    for op in OPS.values():
        others = [i for i in op.implementations if i.name != "eager"]
        for case in op.cases:
            if "contract" in case.tags:
                assert f"parity/{op.name}.{case.name}" in names("parity", "cpu")
                assert f"graph/{op.name}.{case.name}" in names("graph", "cuda")
            if "big" in case.tags:
                assert f"big/{op.name}.{case.name}" in names("big", "cuda")
            for device in {"cpu", "cuda"} & case.tags:
                for dtype in TIMED:
                    if any(dtype in i.dtypes for i in others):
                        assert f"time/{op.name}.{case.name}.{short(dtype)}" in names("time", device)


def test_float8_is_checked_where_an_op_takes_it():
    op = fake_op(right=rmsnorm_eager)
    assert DTYPES[-2:] == (torch.float8_e4m3fn, torch.float8_e5m2)
    op.implementations = (
        replace(op.implementations[0], dtypes=(torch.float8_e4m3fn,)),
        *op.implementations[1:],
    )
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            checks,
            "parity_results",
            lambda op, case, device, dtype, names: seen.append((dtype, names)) or [],
        )
        planned(op, "parity")[0].make()
    assert seen == [(torch.float8_e4m3fn, ["right"])]


# ---- goals first


def with_goals(*goals, **implementations):
    op = fake_op(**implementations)
    op.goals = goals
    return op


def test_the_cases_of_goals_come_before_the_others(tmp_path):
    """Of this device only, with the implementation of `auto` and the peers; each result is also a
    line of the stream.
    """
    here = Goal("", "forward", "roofline_percent", at_least=1e-9, dtypes=("float32",))
    op = with_goals(
        here,
        Goal("another", "backward", "peak_mib", at_most=1, dtypes=("bfloat16",)),
        Goal(("sm_90",), "backward", "peak_mib", at_most=1, dtypes=("bfloat16",)),
        right=rmsnorm_eager,
    )
    (unit,) = planned(op, "goals", tmp_path)
    assert (
        unit.name == "goals/rmsnorm.tiny.float32"
        and planned(fake_op(right=rmsnorm_eager), "goals") == []
    )
    assert suite.STAGES.index("goals") < min(
        suite.STAGES.index(s) for s in ("parity", "graph", "big", "time")
    )
    assert goals.unmet(op, "cpu", tmp_path) == set(), "what was not measured is not missed"
    store.append(
        tmp_path / store.FILE,
        "roofline",
        {"roofline": {"copy_bytes_per_second": 1e10, "flops_per_second": {}}},
    )
    runner.work(
        [unit, counting("bad", [], ValueError("no"))],
        tmp_path,
        FOREVER,
        META,
        stream=tmp_path / "lines.jsonl",
    )
    rows = {r["provider"]: r for r in value(tmp_path, unit.name)["rows"]}
    assert (
        rows["right"]["status"] == "ok"
        and rows["right"]["auto"]
        and not {"eager", "compile"} & set(rows)
    )
    assert goals.unmet(op, "cpu", tmp_path) == set()
    op.goals = (replace(here, at_least=1e9), here)
    assert goals.unmet(op, "cpu", tmp_path) == {("tiny", torch.float32)}
    op.goals = (Goal("", "forward", "over liger", at_least=1e9, dtypes=("float32",)),)
    assert goals.unmet(op, "cpu", tmp_path) == set(), "there is nothing to compare with"
    lines = [json.loads(text) for text in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [(d["unit"], d.get("error")) for d in lines] == [
        (unit.name, None),
        ("bad", "ValueError: no"),
    ]
    assert lines[0]["rows"] == value(tmp_path, unit.name)["rows"]


STUB = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in *search*) exit 3;; *smoke*) exit "${SMOKE:-0}";; *pytest*) exit "${TESTS:-0}";; esac
"""


def test_a_dry_run_of_the_gpu_script_keeps_the_order_and_the_minutes(tmp_path):
    """The most decisive stages come first, in one call of the suite; every stage gets its share of
    the remaining time; results are packed after each.
    """
    root = pathlib.Path(run.__file__).parents[2]
    (tmp_path / "bench").mkdir()
    shutil.copy(root / "bench/gpu.sh", tmp_path / "bench")
    stub, out = tmp_path / "python", tmp_path / "out"
    stub.write_text(STUB)
    stub.chmod(0o755)
    out.mkdir()
    env = {**os.environ, "PYTHON": str(stub), "CALLS": str(tmp_path / "calls"), "OUT": str(out)}
    env.pop("TRITON_CACHE_DIR", None)

    def call(*stages, minutes="10.5", **variables):
        (tmp_path / "calls").unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", "bench/gpu.sh", "results", minutes, *stages],
            cwd=tmp_path,
            env=env | variables,
            capture_output=True,
            text=True,
        )
        calls = tmp_path / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return done.returncode, lines, done.stdout + done.stderr

    code, calls, said = call()
    assert code == 3, said  # no time was left for the search
    bench = [c.removeprefix("-m bench ") for c in calls if c.startswith("-m bench")]
    assert [b.split()[0] for b in bench] == [
        "suite", "search", "suite", "suite", "end-to-end", "end-to-end", "report"
    ]  # fmt: skip
    first = "smoke,roofline,products,ab,goals,host,sanitize,counters"
    assert f"--stage {first}" in bench[0] and "--goals results" in bench[1]
    assert "--stage roofline,products,goals" in bench[2] and "--stage" not in bench[3]
    assert "--skip smoke" in bench[3], "ops that fail in smoke would end this call, too"
    assert all(f"--stream {out}/results.jsonl" in b for b in bench if b.startswith("suite"))
    assert all("--commit results/commit.json" in b for b in bench[:6])
    tests = [c for c in calls if c.startswith("-m pytest")]
    assert len(tests) == 1 and "-q -n 6" in tests[0]
    packed = f"bench/carry.py cache {tmp_path}/build/triton-cache {out}"
    assert calls.count(packed) == 7 and (out / "results.tar.gz").exists()

    def minutes_of(bench):
        return [float(b.split("--minutes ")[1].split()[0]) for b in bench if "--minutes" in b]

    # 100 of the sum of the weights is the first call's; nothing was used, so the rest has all.
    weights = [(100, 375), (60, 275), (30, 215), (80, 185)]
    expected = [10.0 * own / of for own, of in weights]
    found = minutes_of(bench)
    assert found == pytest.approx(expected, rel=0.1), (found, said)
    code, calls, said = call("smoke", "products", "search", "ab", SMOKE="4")
    assert code == 4 and "nothing else is run" in said and (out / "results.tar.gz").exists()
    assert sum("-m bench" in c for c in calls) == 1
    code, calls, said = call("tests", "report", TESTS="4")  # as where pytest-xdist is missing
    assert code == 1 and "nothing else is run" not in said
    assert calls[-2].endswith("bench report"), "the page is written all the same"
    code, calls, said = call("goals", "search", "ab", "host")
    stages = [c.split("--stage ")[1].split()[0] for c in calls if "--stage" in c]
    assert stages == ["goals", "ab,host"]
    of_steps, of_contract = call("kernels", "parity")[1][0::2]
    assert "end-to-end --device cuda --profile" in of_steps
    assert "--stage parity,graph,big --dtype bfloat16" in of_contract
    assert call("reprt")[0] == 2
    assert "--commit abc" in call("goals", COMMIT="abc")[1][0]


def test_pieces_of_a_larger_cache_that_stayed_are_no_part_of_this_one(tmp_path):
    """carry.py names how many pieces there are; RESULTS may have those of an earlier call, too."""
    root = pathlib.Path(run.__file__).parents[2]
    (tmp_path / "bench").mkdir()
    (tmp_path / "results").mkdir()
    shutil.copy(root / "bench/gpu.sh", tmp_path / "bench")
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\n")
    stub.chmod(0o755)
    (tmp_path / "kernel.cubin").write_bytes(os.urandom(4000))
    with tarfile.open(tmp_path / "whole", "w:gz") as archive:
        archive.add(tmp_path / "kernel.cubin", "hash/kernel.cubin")
    whole = (tmp_path / "whole").read_bytes()
    for i in (0, 1):
        name = f"triton-cache.tar.gz.0{i + 1}of02"
        (tmp_path / "results" / name).write_bytes(whole[i * 2500 :][:2500])
    (tmp_path / "results/triton-cache.tar.gz.03of03").write_bytes(b"of an earlier call")
    unpacked = tmp_path / "cache/hash/kernel.cubin"

    def call(**asked):
        return subprocess.run(
            ["bash", "bench/gpu.sh", "results", "1", "report"],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHON": str(stub),
                "TRITON_CACHE_DIR": str(tmp_path / "cache"),
                **asked,
            },
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    # What it holds would run: not without being asked for.
    assert "triton-cache.tar.gz.01of02 is not unpacked: UNPACK_CACHE=1 does" in call()
    assert not unpacked.exists()
    assert "is not unpacked" not in call(UNPACK_CACHE="1")
    assert unpacked.read_bytes() == (tmp_path / "kernel.cubin").read_bytes()


def test_a_tool_that_hangs_leaves_no_process_behind(monkeypatch):
    """The process under the tool holds the GPU, which the next unit needs."""
    from bench.stages import tools

    monkeypatch.setattr(tools, "SECONDS", 0.5)
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    said, problem = tools._output(["sh", "-c", f"{sys.executable} -c '{child}' & wait"])
    while not said.strip():  # a slow machine had not started it yet
        tools.SECONDS *= 2
        said, problem = tools._output(["sh", "-c", f"{sys.executable} -c '{child}' & wait"])
    assert problem and problem.startswith("did not end")

    def ended():  # some time after its signal; as a zombie until init has seen it
        try:
            stat = pathlib.Path(f"/proc/{int(said)}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        return stat.split(")")[1].split()[0] == "Z"

    until(ended, looks=5_000)  # which takes a tenth of the time that the process would sleep


# ---- end to end


def suite_command(tmp_path, *more):
    return main(
        [
            "suite",
            "--minutes",
            "50",
            "--out",
            str(tmp_path),
            "--device",
            "cpu",
            "--op",
            "rmsnorm",
            "--dtype",
            "float32",
            "--stage",
            "parity",
            *more,
        ]
    )


@pytest.fixture
def forks(monkeypatch):
    """The suite forks its workers."""
    monkeypatch.setattr(runner, "subprocess", forked.IN_PLACE)


def stored(out):
    """The documents of a packed suite, by name."""
    assert [p.name for p in sorted(out.iterdir())] == [".lock", store.FILE]
    return {name: document for name, _, document in store.read(out)}


def test_the_command_end_to_end_and_resumed(tmp_path, capfd, monkeypatch):
    assert suite_command(tmp_path, "--case", "ragged,gemma") == 0
    monkeypatch.setattr(runner, "subprocess", forked.IN_PLACE)
    first = stored(tmp_path)
    whole = first.pop("suite")
    assert set(whole["units"]) > {
        "parity/rmsnorm.ragged",
        "time/rope.qwen3-8b.bfloat16",
        "roofline",
    }
    assert not whole["complete"], "a part does not stand for the whole"
    assert whole["meta"]["source"] and whole["meta"]["argv"][0] == "suite"
    assert set(first) == {"parity/rmsnorm.ragged", "parity/rmsnorm.gemma"}
    # A worker runs for new units; it must keep the others, also those of another commit.
    old = {**first["parity/rmsnorm.ragged"]}
    old["meta"] = {**old["meta"], "source": "of another commit"}
    store.append(tmp_path / store.FILE, "parity/rmsnorm.ragged", old)
    capfd.readouterr()
    assert suite_command(tmp_path, "--case", "ragged,gemma,one_row", "--keep") == 0
    second = stored(tmp_path)
    assert second["parity/rmsnorm.ragged"] == old and "parity/rmsnorm.one_row" in second
    assert second["parity/rmsnorm.gemma"] == first["parity/rmsnorm.gemma"]
    assert "parity/rmsnorm.ragged" not in capfd.readouterr().out
    # Other options are other units.
    assert suite_command(tmp_path, "--case", "ragged", "--dtype", "bfloat16,float32", "--keep") == 0
    results = stored(tmp_path)["parity/rmsnorm.ragged"]["results"]
    assert {r["dtype"] for r in results} == {"bfloat16", "float32"}


def test_suite_json_tells_of_all_there_is_to_do(tmp_path, monkeypatch):
    """Made with the full call's own dtypes, a result of a narrow call counts there."""
    monkeypatch.setattr(plan, "DTYPES", (torch.float32,))
    monkeypatch.setattr(
        plan.selection, "operations", lambda: {"rmsnorm": OPS["rmsnorm"], "rope": OPS["rope"]}
    )
    monkeypatch.setattr(plan.runner, "supervise", lambda *_, **__: True)
    for name, stage in (("parity/rmsnorm.ragged", "parity"), ("roofline", "roofline")):
        unit = next(u for u in planned(OPS["rmsnorm"], stage, tmp_path) if u.name == name)
        meta = unit.about(run.metadata("cpu", run.Settings(), []))
        result = {
            "implementation": "cpp",
            "dtype": "float32",
            "status": "broken",
            "reason": "grad x",
        }
        store.append(
            tmp_path / store.FILE,
            name,
            {
                "schema": 1,
                "meta": meta,
                "options": dict(unit.options),
                "seconds": 1,
                "results": [result],
                "roofline": {},
            },
        )
    assert suite_command(tmp_path, "--case", "gemma") == 3
    units = stored(tmp_path)["suite"]["units"]
    assert units["parity/rmsnorm.ragged"]["status"] == "error" and "overhead/rope" in units


def test_only_what_times_nothing_runs_side_by_side(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        plan.runner, "supervise", lambda commands, *_, **__: started.append(commands) or True
    )
    assert (
        main(
            [
                "suite",
                "--minutes",
                "1",
                "--out",
                str(tmp_path),
                "--device",
                "cpu",
                "--op",
                "rope",
                "--jobs",
                "4",
            ]
        )
        == 3
    )
    tasks = [[runner.parse_task(c)[1] for c in commands] for commands in started]
    # Smoke has one unit; the others are begun once more, since nothing was done.
    once = [(0, 1, {1}), (1, 1, {1}), (2, 4, {4}), (3, 1, {1})]
    assert [(t[0]["group"], len(t), {x["of"] for x in t}) for t in tasks] == 2 * once
    assert [x["worker"] for x in tasks[2]] == [0, 1, 2, 3] and {
        x["parent"] for t in tasks for x in t
    } == {os.getpid()}


@pytest.mark.parametrize("failing, code, groups", [(4, 4, [0]), (3, 1, [0, 2])])
def test_a_call_ends_if_many_ops_fail_on_small_cases(
    failing, code, groups, tmp_path, monkeypatch, capfd
):
    ops = ["rmsnorm", "rope", "route", "silu_mul"]
    started = []

    def supervise(commands, out, until, stream):
        task = runner.parse_task(commands[0])[1]
        started.append(task["group"])
        for i, name in enumerate(ops if task["group"] == 0 else ()):
            (unit,) = suite.units("smoke", [OPS[name]], DTYPES, Chosen("cpu", run.Settings(), out))
            meta = unit.about(run.metadata("cpu", run.Settings(), []))
            status = "broken" if i < failing else "holds"
            results = [checks.result("cpp", torch.bfloat16, status, "out 0 exceeds")]
            document = {"meta": meta, "options": dict(unit.options), "results": results}
            store.append(out / store.FILE, unit.name, document)
        return True

    monkeypatch.setattr(plan.runner, "supervise", supervise)
    monkeypatch.setattr(plan, "WORTHWHILE", float("inf"))  # no group is begun once more
    argv = ["suite", "--device", "cpu", "--op", ",".join(ops), "--stage", "smoke,parity"]
    assert main([*argv, "--minutes", "60", "--out", str(tmp_path)]) == code
    assert started == groups
    assert capfd.readouterr().out.count("FAILED smoke/") == 2 * failing, "at once, and at the end"


def test_small_cases_are_of_our_own_kernels():
    """Of Triton by name: `auto` may be another library's kernel."""
    chosen = Chosen("cuda", run.Settings(), pathlib.Path())
    units = suite.units("smoke", OPS.values(), DTYPES, chosen)
    assert [u.name.partition("/")[2].partition(".")[0] for u in units] == list(OPS)
    assert {u.limit for u in units} == {20.0}
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            smoke, "parity_results", lambda op, *rest: asked.append((op.name, rest[2:])) or []
        )
        for unit in units:
            unit.make()
    assert asked == [(n, (torch.bfloat16, ["triton"], contract.LAYOUTS[:1])) for n in OPS]


def test_the_share_of_each_stage():
    """Of the time, in the stages' order; all of it is given away."""
    found = suite.SUITE.ends(["goals", "smoke", "products"], 100.0, 168.0)
    assert found == {"smoke": 117.0, "products": 117.0 + 51 * 30 / 54, "goals": 168.0}
    first = suite.SUITE.ends(suite.FIRST, 0.0, 480.0)
    assert list(first) == list(suite.FIRST) and first["counters"] == 480.0
    assert first["products"] < 250.0 and first["smoke"] < 90.0
    assert sum(suite.SHARES[s] for s in suite.FIRST) == 100
    assert sorted(suite.STAGES) == sorted(s for g in suite.GROUPS for s in g)


@pytest.mark.parametrize(
    "command",
    [
        [main, "suite", "--op", "rope", "--out"],
        [bench, "run", "--op", "rope", "--out"],
        [bench, "tune", "--op", "linear_cross_entropy", "--out"],
    ],
)
def test_two_calls_do_not_share_a_folder(command, tmp_path, capsys):
    with runner.locked(tmp_path), pytest.raises(SystemExit) as ended:
        command[0]([*command[1:], str(tmp_path), "--minutes", "1", "--device", "cpu"])
    assert ended.value.code == 2 and "another call is at work" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "suite", "--op", "rope", "--stage", "parity", "--out"],
        ["tilewright.bench", "tune", "--op", "linear_cross_entropy", "--out"],
    ],
)
def test_a_worker_of_a_command_ends_with_its_supervisor(command, tmp_path):
    task = json.dumps({"until": LATER, "since": 0, "group": 1, "worker": 0, "of": 1, "parent": 1})
    process = forked.Forked(
        [
            sys.executable,
            "-m",
            *command,
            str(tmp_path),
            "--minutes",
            "1",
            "--device",
            "cpu",
            "--task",
            task,
        ]
    )
    assert process.wait() == 1 and not list(tmp_path.rglob("*.json"))


def test_tables_that_cannot_be_written_are_found_out_first(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        bench(
            ["tune", "--minutes", "1", "--device", "cpu", "--tables", str(tmp_path / "file/tables")]
        )
    assert "argument --tables:" in capsys.readouterr().err


def test_what_a_result_depends_on(tables, monkeypatch):
    """On this op's constants, where they differ from the heuristic's; times on settings, checks on
    dtypes.
    """
    op = OPS["linear_cross_entropy"]

    usual, changed = run.Settings(), run.Settings(rounds=3)

    def options(stage, settings=usual, dtypes=DTYPES):
        return [
            dict(u.options)
            for u in suite.units(stage, [op], dtypes, Chosen("cpu", settings, pathlib.Path()))
        ]

    before = {s: options(s) for s in suite.STAGES}
    chunk = op.implementation("cpp").tunables()[0]
    key = {"H": 64, "V": 512, "itemsize": 4, "cuda": False}
    assert set(key) == set(chunk.fields), chunk.fields
    folder = tables / tuning.platform.slug(tuning.platform.cpu_name())

    def write(name, config):
        store.write_json(
            folder / f"{name}.json",
            {
                "schema": 1,
                "device": "a",
                "device_type": "cpu",
                "launches": {"chunk": [{"key": key, "config": config}]},
            },
        )
        tuning.table.cache_clear()

    write("rmsnorm", {"budget_mib": 1})
    write("linear_cross_entropy", chunk.heuristic(**key))
    assert {s: options(s) for s in suite.STAGES} == before
    write("linear_cross_entropy", {"budget_mib": 1})
    assert [s for s in suite.STAGES if options(s) != before[s]] == [
        "smoke",
        "ab",
        "parity",
        "time",
        "overhead",
    ]
    assert all(a != b for a, b in zip(options("time"), options("time", changed), strict=True))
    now = {s: options(s) for s in suite.STAGES}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert [s for s in suite.STAGES if options(s) != now[s]] == [
        "roofline",
        "ab",
        "time",
        "overhead",
    ]
    assert all(
        a != b for a, b in zip(options("parity"), options("parity", dtypes=DTYPES[:1]), strict=True)
    )


def digests():
    sources.digest.cache_clear()
    sources._operators.cache_clear()
    return {"": sources.digest(), **{n: sources.digest(op) for n, op in OPS.items()}}


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """The folder of a copy of the sources, whose digests are asked for."""
    root = sources.PACKAGE.parent
    left = shutil.ignore_patterns("*.so", "__pycache__", "results")
    for folder in ("tilewright", "csrc", "bench", "lab/tilewright_lab"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=left)
    for name in ("PACKAGE", "CSRC"):
        monkeypatch.setattr(sources, name, tmp_path / getattr(sources, name).relative_to(root))
    monkeypatch.setattr(sources, "CORE", [tmp_path / p.relative_to(root) for p in sources.CORE])
    sources._operators.cache_clear()
    yield tmp_path
    sources.digest.cache_clear()
    sources._operators.cache_clear()


def test_an_edit_makes_stale_what_comes_from_it(copied):
    """And nothing else: comments, docstrings, goals, tables and the trainer invalidate nothing."""
    rows = {"rmsnorm", "add_rmsnorm", "layernorm", "add_layernorm"}
    fused = rows | {"qk_norm_rope", "silu_mul_quantize", "rmsnorm_quantize", "add_rmsnorm_quantize"}
    edits = [
        (("tilewright/ops/rope/rope.py", "", "# another\n"), set()),
        (("tilewright/ops/rope/rope.py", '"""', '"""Another word. '), set()),
        (
            ("tilewright/kernels/norm/rmsnorm_triton.py", "NARROW = 512", "NARROW  =  512   # why"),
            set(),
        ),
        (("tilewright/ops/norm/rmsnorm.py", "near_copy(92", "near_copy(91"), set()),
        (("csrc/cpu/rope.cpp", "", "// another\n/* and more */\n"), set()),
        (("tilewright/trainer/config/config.py", "", "another = 1\n"), set()),
        (("tilewright/bench/plan.py", "", "another = 1\n"), set()),
        (("tilewright/bench/sources.py", "", "another = 1\n"), set()),
        (("tilewright/bench/store.py", "", "another = 1\n"), set()),
        (("bench/suite.py", "", "another = 1\n"), set()),
        (("tilewright/kernels/tuned/h200/rmsnorm.json", "", "{}"), set()),
        (("tilewright/kernels/moe/route_triton.py", "", "another = 1\n"), {"route"}),
        (("csrc/cpu/route.cpp", "", "int another;\n"), {"route"}),
        (("csrc/cpu/rope.h", "", "int another;\n"), {"rope", "qk_norm_rope"}),
        (("tilewright/kernels/norm/rmsnorm_cute.py", "", "another = 1\n"), fused),
        (("tilewright/kernels/attention/attention_triton.py", "", "another = 1\n"), {"attention"}),
        (
            ("tilewright/ops/loss/head.py", "", "another = 1\n"),
            {n for n in OPS if n.startswith("linear_")}
            | {"logprob_entropy"},  # which has a file with linear_logprob
        ),
        (("tilewright/core/checks.py", "", "another = 1\n"), set(OPS)),
        (("tilewright/bench/timing.py", "", "another = 1\n"), {"", *OPS}),
        (("bench/overhead.py", "", "another = 1\n"), {"", *OPS}),
        (("lab/tilewright_lab/pretend.py", "", "another = 1\n"), {"", *OPS}),
        (
            (
                "tilewright/bench/bounds.py",
                "2 * e + atol",
                "3 * e + atol",
            ),
            {"", *OPS},
        ),
    ]
    before = digests()
    for edit, stale in edits:
        name, old, new = edit
        path = copied / name
        text = path.read_text() if path.exists() else None
        assert text is None or old in text, edit
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(new if text is None else text.replace(old, new, 1) if old else text + new)
        assert {n for n, d in digests().items() if d != before[n]} == stale, edit
        path.unlink() if text is None else path.write_text(text)


def test_a_module_that_moves_makes_nothing_stale(copied):
    def again(found):
        rest = f"from tilewright.core import {found[1][2:]}\n" if found[1] else ""
        return f"{rest}from tilewright.ops import argument_checks as checks"

    before = digests()
    moved = copied / "tilewright/ops/argument_checks.py"
    (copied / "tilewright/core/checks.py").rename(moved)
    for path in (copied / "tilewright").rglob("*.py"):
        text = re.sub(r"from tilewright\.core import checks\b((?:, \w+)*)", again, path.read_text())
        path.write_text(text.replace("tilewright.core.checks", "tilewright.ops.argument_checks"))
    assert digests() == before
    moved.write_text(moved.read_text() + "another = 1\n")
    after = digests()
    assert {n for n in before if after[n] != before[n]} == set(OPS)


def test_a_name_from_another_module_is_another(copied):
    before = digests()
    path = copied / "tilewright/ops/quant/aqn.py"
    text = path.read_text()
    [line] = re.findall(r"^from tilewright.core import .*checks.*$", text, re.M)
    other = line.replace("checks", "layout as checks")
    path.write_text(text.replace(line, other))
    after = digests()
    assert after["aqn_noise"] != before["aqn_noise"] and after["route"] == before["route"]


def test_every_source_belongs_to_an_op():
    """So that every change of a kernel is noticed."""
    seen = {p for op in OPS.values() for p in sources.files(sources._modules_of(op))}
    kernels = {
        p
        for p in (
            *(sources.PACKAGE / "kernels").rglob("*.py"),
            *(sources.PACKAGE / "ops").rglob("*.py"),
            *sources.CSRC.rglob("*.*"),
        )
        if p.name != "__init__.py"
    }
    apart = {
        sources.PACKAGE / "ops" / f"{n}.py"
        for n in (
            "attention/context_parallel",
            "attention/ring",
            "attention/ring_plan",
            "attention/ulysses",
            "linear_attention/context_parallel",
            "moe/expert_parallel",
            "moe/expert_transport",
        )
    }  # several devices
    apart.add(sources.PACKAGE / "ops" / "rope" / "tables.py")  # of inputs, in plain PyTorch
    apart.add(sources.PACKAGE / "ops" / "loss" / "kind.py")  # makes ops of others
    apart.add(sources.CSRC / "cpu" / "portable.cpp")  # of the linker alone
    assert kernels - seen <= apart


def test_results_of_interpreted_kernels_are_of_everything(monkeypatch):
    for said, device in (("1", None), ("0", "cpu")):
        monkeypatch.setenv("TRITON_INTERPRET", said)
        assert sources.of_measured(OPS["rope"], "cpu") == sources.digest(OPS["rope"], device)
        assert sources.of_measured(OPS["rope"], "cuda") == sources.digest(OPS["rope"], "cuda")


def test_an_edit_of_a_gpus_kernel_makes_no_result_of_a_cpu_stale_nor_the_other_way_round(copied):
    def both(op):
        sources.digest.cache_clear()
        return [sources.digest(op, device) for device in ("cpu", "cuda")]

    ops = OPS["rmsnorm"], OPS["route"]
    before = [both(op) for op in ops]
    for name, stale in (
        ("tilewright/kernels/norm/rmsnorm_triton.py", [False, True]),
        ("tilewright/kernels/norm/rmsnorm_cute.py", [False, True]),
        ("csrc/cpu/rmsnorm.cpp", [True, False]),
        ("tilewright/kernels/norm/operators.py", [True, True]),
        ("tilewright/ops/norm/rmsnorm.py", [True, True]),
    ):
        path = copied / name
        text = path.read_text()
        path.write_text(f"{text}\nint another;\n" if path.suffix == ".cpp" else f"{text}\nx = 1\n")
        after = [both(op) for op in ops]
        found = [a != b for a, b in zip(after[0], before[0], strict=True)]
        assert found == stale and after[1] == before[1], name
        path.write_text(text)


def test_a_broken_result_is_exit_code_1_and_a_missing_one_3(tmp_path, forks):
    assert suite_command(tmp_path, "--case", "ragged") == 0
    document = stored(tmp_path)["parity/rmsnorm.ragged"]
    document["results"][0].update(status="broken", reason="grad x: error 1")
    store.append(tmp_path / store.FILE, "parity/rmsnorm.ragged", document)
    assert suite_command(tmp_path, "--case", "ragged") == 1
    assert (
        main(
            [
                "suite",
                "--minutes",
                "0.05",
                "--out",
                str(tmp_path),
                "--device",
                "cpu",
                "--op",
                "rope",
                "--stage",
                "parity",
                "--case",
                "gqa",
            ]
        )
        == 3
    )


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--op", "rmsnrom"], "unknown 'rmsnrom'; did you mean 'rmsnorm'? have ['rmsnorm'"),
        (["--stage", "party"], "unknown 'party'; did you mean 'parity'? have"),
        (["--dtype", "half"], "unknown 'half'; have"),
        (["--minutes", "0"], "at least 0.05, got '0'"),
        (["--case", "nosuch"], "unknown 'nosuch'; have"),
        (["--stage", "graph"], "nothing to do: no op of --op"),
        (["--op", "rope", "--case", "ragged", "--stage", "time"], "nothing to do"),
    ],
)
def test_bad_arguments_are_named(argv, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["suite", "--minutes", "1", "--out", str(tmp_path), "--device", "cpu", *argv])
    assert message in capsys.readouterr().err


# ---- launch configurations and their search


def tunable(**more):
    return Tunable(
        "fake",
        "step",
        ("D", "itemsize"),
        "forward",
        lambda D, itemsize: {"WAIT": 4},
        lambda D, itemsize: [{"WAIT": w} for w in (1, 2, 4, 9)],
        **more,
    )


CPU = torch.device("cpu")


def write_table(root, config, key=None, device="a-cpu"):
    entry = {"key": key or {"D": 64, "itemsize": 4}, "config": config}
    store.write_json(
        root / device / "fake.json", {"schema": 1, "device": device, "launches": {"step": [entry]}}
    )


@pytest.fixture
def tables(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    monkeypatch.setattr(tuning, "device_folder", lambda device: "a-cpu")
    tuning.table.cache_clear()
    yield tmp_path
    tuning.table.cache_clear()


def test_a_tuned_entry_wins_over_the_heuristic_for_its_key_alone(tables):
    write_table(tables, {"WAIT": 1})
    t = tunable()
    assert t.config(CPU, 64, 4) == {"WAIT": 1} and t.config(CPU, 65, 4) == {"WAIT": 4}
    with t.override(CPU, (64, 4), {"WAIT": 9}):
        assert t.config(CPU, 64, 4) == {"WAIT": 9}
    assert t.config(CPU, 64, 4) == {"WAIT": 1}


def test_another_devices_table_is_not_read(tables, monkeypatch):
    write_table(tables, {"WAIT": 1})
    monkeypatch.setattr(tuning, "device_folder", lambda device: "another")
    assert tunable().config(CPU, 64, 4) == {"WAIT": 4}


def test_a_malformed_table_is_named(tables):
    (tables / "a-cpu").mkdir()
    (tables / "a-cpu/fake.json").write_text('{"schema": 1, "launches": {"step": [{"key": 3}]}}')
    with pytest.raises(ValueError, match=r"a-cpu.fake\.json: not a table"):
        tunable().config(CPU, 64, 4)


def test_an_entry_that_no_launch_could_use_is_refused(tables):
    write_table(tables, {"STALL": 1})
    with pytest.raises(
        ValueError, match=r"fake\.json: step: the config .* must name \['WAIT'\], got \['STALL'\]"
    ):
        tunable().config(CPU, 64, 4)
    with pytest.raises(ValueError, match="STALL"):
        list(tuning.tuned(tunable()))
    write_table(tables, {"WAIT": 1}, key={"D": 64})
    with pytest.raises(ValueError, match="itemsize"):
        list(tuning.tuned(tunable()))


def test_the_committed_tables_can_be_used():
    for op in OPS.values():
        for impl in op.implementations:
            for t in impl.tunables():
                for folder, key, config in tuning.tuned(t):
                    assert folder and config in t.candidates(**key), (
                        "what a search does not try was not found by one"
                    )


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_every_candidate_names_what_the_heuristic_does(op):
    for impl in op.implementations:
        for t in impl.tunables():
            assert {t.op, op.name} <= set(OPS) and t.pass_name in PASSES
            for key in t.keys:
                assert t.candidates(**t.named(key))[0] == t.heuristic(**t.named(key))
            assert not t.keys or any(len(t.candidates(**t.named(key))) > 1 for key in t.keys), (
                "nothing to search"
            )


def waiting(monkeypatch, spoil, dtype):
    """An op whose time is its constant, on a clock that nothing else advances, and which is wrong
    for the constants in `spoil`.
    """
    t, now = tunable(), [0.0]
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def compute(x, weight, bias, eps, offset, cast):
        wait = t.config(x.device, x.shape[-1], x.element_size())["WAIT"]
        now[0] += wait * 5e-3
        return rmsnorm_eager(x, weight, bias, eps, offset, cast) * (1.02 if wait in spoil else 1)

    op = fake_op(fake=compute)
    op.implementations = (
        replace(op.implementations[0], tunables=lambda: (t,), dtypes=(dtype,)),
        *op.implementations[1:],
    )
    op._by_name = {i.name: i for i in op.implementations}
    return t, op


def searched(monkeypatch, spoil=()):
    t, op = waiting(monkeypatch, spoil, torch.float32)
    impl, case = op.implementations[0], op.cases[0]
    ((asked, key),) = launches.requested_keys(op, impl, case.make("cpu", torch.float32, 0))
    assert asked is t and key == (100, 4)
    return tune.search(op, impl, case, torch.float32, t, key, "cpu", rounds=5)


def test_the_fastest_constants_are_found(tables, monkeypatch):
    entry = searched(monkeypatch)
    assert entry["config"] == {"WAIT": 1} and entry["heuristic"] == {"WAIT": 4}
    assert (
        entry["median_us"] < entry["heuristic_us"]
        and len(entry["tried"]) == 4
        and not entry["rejected"]
    )


def test_fast_and_wrong_is_rejected(tables, monkeypatch):
    entry = searched(monkeypatch, spoil=(1,))
    assert entry["config"] == {"WAIT": 2}
    assert (
        entry["rejected"][0]["config"] == {"WAIT": 1}
        and "exceeds" in entry["rejected"][0]["reason"]
    )


def test_found_constants_reach_the_launchers(tables, tmp_path):
    meta = {
        "device": "a cpu",
        "device_type": "cpu",
        "date": "2026-01-01",
        "commit": "c",
        "dirty": False,
        "source": "1",
        "versions": {},
    }
    entry = {
        "launch": "fake/step",
        "key": {"D": 64, "itemsize": 4},
        "config": {"WAIT": 2},
        "heuristic": {"WAIT": 4},
        "median_us": 2.0,
        "heuristic_us": 4.0,
        "tried": [],
        "rejected": [],
    }
    found = {"search/x": {"meta": meta, "entries": [entry]}}
    write_table(tables, {"WAIT": 9}, key={"D": 65, "itemsize": 4})
    tuning.table.cache_clear()
    older = {"meta": {**meta, "source": "0"}, "entries": [{**entry, "config": {"WAIT": 1}}]}
    found["search/old"] = older
    assert tune_tables.write_tables(found, tables, meta) == [tables / "a-cpu/fake.json"]
    t = tunable()
    assert t.config(CPU, 64, 4) == {"WAIT": 2} and t.config(CPU, 65, 4) == {"WAIT": 9}
    kept = tuning.read(tables / "a-cpu/fake.json")["launches"]["step"]
    assert [e.get("commit") for e in kept] == ["c", None] and "2.00x" in tune_tables.table([entry])


def test_a_search_that_ended_in_the_middle_goes_on_where_it_was(tmp_path, monkeypatch):
    """Each key is written when it is found; an older search's file, from other sources,
    is ignored.
    """
    asked = [
        Tunable("fake", n, ("D",), "forward", lambda D: {"W": 1}, lambda D: [])
        for n in ("one", "two", "three")
    ]
    seen = []

    def search(op, impl, case, dtype, tunable, key, device, **options):
        seen.append(tunable.launch)
        if len(seen) == 2:
            raise MemoryError("full")
        return {
            "key": tunable.named(key),
            "config": {"W": 1},
            "heuristic": {"W": 1},
            "median_us": 1.0,
            "heuristic_us": 1.0,
        }

    monkeypatch.setattr(tune, "search", search)
    monkeypatch.setattr(launches, "requested_keys", lambda *_: [(t, (8,)) for t in asked])
    op = fake_op(right=rmsnorm_eager)
    meta = {**META, "date": "2026-01-01T00:00:00", "commit": None, "dirty": None}

    def go(meta):
        unit = tune.unit(
            op, op.implementations[0], op.cases[1], "cpu", torch.float32, tmp_path, meta
        )
        runner.work([unit], tmp_path, FOREVER, meta, since=LATER)
        document = value(tmp_path, unit.name)
        return (
            [e["launch"] for e in document["entries"]],
            document.get("error"),
            document.get("unfinished"),
        )

    assert go(meta) == (["fake/one"], "MemoryError: full", None)
    assert go(meta) == (["fake/one", "fake/two", "fake/three"], None, None)
    assert seen == ["one", "two", "two", "three"]
    monkeypatch.setattr(sources, "digest", lambda op: "2")
    assert go(meta)[0] == ["fake/one", "fake/two", "fake/three"] and len(seen) == 7


def test_a_search_times_the_pass_that_the_launch_belongs_to(tables, monkeypatch):
    timed = {}

    def interleave(tasks, clock, **options):
        timed.update(tasks)
        return {i: timing.Timing.of([1.0]) for i in tasks}, {}

    called = []

    class Traced(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            called.append("forward")
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            called.append("backward")
            return g

    t = Tunable(
        "fake",
        "step",
        ("D", "itemsize"),
        "backward",
        lambda D, itemsize: {"W": 1},
        lambda D, itemsize: [],
    )
    op = fake_op(fake=lambda x, *rest: Traced.apply(rmsnorm_eager(x, *rest)))
    monkeypatch.setattr(timing, "interleave", interleave)
    tune.search(op, op.implementations[0], op.cases[0], torch.float32, t, (100, 4), "cpu")
    task = timed[0]
    task.before()
    called.clear()
    task.fn()
    assert called == ["backward"]


def test_recording_sees_every_launch_and_key_in_order():
    one, two = (
        Tunable("fake", n, ("D",), "forward", lambda D: {"W": D}, lambda D: [])
        for n in ("one", "two")
    )
    with tuning.recording() as seen:
        for t, D in ((one, 1), (two, 1), (one, 2), (one, 1)):
            t.config(CPU, D)
    assert list(seen) == [(one, (1,)), (two, (1,)), (one, (2,))]
    with tuning.recording() as after:
        pass
    assert not after


def test_the_chunk_of_rows_follows_its_table(monkeypatch):
    from tilewright.ops.loss.head import CHUNK, chunk_rows

    x, weight = (
        torch.empty(4096, 64, dtype=torch.bfloat16),
        torch.empty(32768, 64, dtype=torch.bfloat16),
    )
    key = (64, 32768, 2, False)
    with CHUNK.override(x.device, key, {"budget_mib": 16}):
        assert chunk_rows(x, weight) == 256
    with CHUNK.override(x.device, key, {"budget_mib": 32}):
        assert chunk_rows(x, weight) == 512


def test_contract_of_an_op_holds_with_every_candidate(monkeypatch):
    """On a CPU only the chunk is tunable; Triton's configurations are checked by a search itself,
    on a GPU.
    """
    from tilewright.ops.loss import head

    monkeypatch.setattr(head, "MiB", 4096)  # several chunks of small inputs
    op, g = OPS["linear_cross_entropy"], torch.Generator().manual_seed(0)
    kwargs = {
        "x": torch.randn(200, 8, generator=g).requires_grad_(),
        "weight": torch.randn(256, 8, generator=g).requires_grad_(),
        "target": torch.randint(256, (200,), generator=g),
    }
    by, rows = contract.reference(op, kwargs, torch.float32), []
    for t, key in launches.requested_keys(op, op.implementation("cpp"), kwargs):
        for config in t.candidates(**t.named(key)):
            with t.override(CPU, key, config):
                rows.append(head.chunk_rows(kwargs["x"], kwargs["weight"]))
                assert all(f.holds for f in contract.judge(op, "cpp", kwargs, by))
    assert {32, 64, 128, 200} <= set(rows)


@pytest.mark.parametrize(
    "ours, theirs, faster",
    [
        ((1.0, 1.0, 1.0), (2.0, 2.0, 2.0), True),
        ((1.0, 1.0, 3.0), (2.0, 2.0, 2.0), False),
        ((1.995, 1.995, 1.995), (2.0, 2.0, 2.0), False),
    ],
    ids=["clear", "overlapping", "half a percent"],
)
def test_what_counts_as_faster(ours, theirs, faster):
    assert timing.faster(timing.Timing.of(ours), timing.Timing.of(theirs)) is faster


def test_candidates_are_compiled_beforehand_in_half_of_the_time(tmp_path, monkeypatch):
    """By a process that sees no GPU, for this one's capability; it and its children end in time."""
    stub = tmp_path / "python"
    stub.write_text(
        f'#!/bin/sh\nsleep 600 &\necho "$CUDA_VISIBLE_DEVICES|$*|$!" >{tmp_path}/new\n'
        f"mv {tmp_path}/new {tmp_path}/said\nwait\n"
    )
    stub.chmod(0o755)
    waits = []

    class Impatient(subprocess.Popen):
        """Its limit has passed once the command is at work."""

        def wait(self, timeout=None):
            waits.append(timeout)
            if timeout is None:
                return super().wait()
            until((tmp_path / "said").exists)
            raise subprocess.TimeoutExpired(self.args, timeout)

    fake = types.SimpleNamespace(Popen=Impatient, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(search, "subprocess", fake)
    monkeypatch.setattr(search, "time", types.SimpleNamespace(time=lambda: START))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(search.sys, "executable", str(stub))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(search.platform, "device_name", lambda device: "an H200")
    search.compile_beforehand(["rope", "rmsnorm"], tmp_path, START + 240)
    assert waits == [120 + runner.DYING]
    devices, said, child = (tmp_path / "said").read_text().strip().split("|")
    until(lambda: not alive(child))
    assert devices == "" and said.startswith(
        "-m bench gpu-cache --what search --arch 90 --name an H200 --op rope,rmsnorm "
    )
    assert f"--goals {tmp_path}" in said and "--minutes 2.00 " in said
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    (tmp_path / "said").unlink()
    search.compile_beforehand(["rope"], tmp_path, START + 600)
    assert not (tmp_path / "said").exists(), (
        "kernels of another capability are not what is launched"
    )


def test_searches_of_another_device_or_with_other_versions_are_none():
    meta = {**META, "date": "2026-01-01", "device_type": "cpu"}
    entry, found = {"launch": "fake/step", "key": {"D": 1}}, {}
    for i, field in enumerate(("none", "device", "versions", "source")):
        found[str(i)] = {"meta": {**meta, field: "other"}, "entries": [entry]}
    assert [e["unit"] for e in tune_tables.entries_in(found, meta)] == ["0"]


def test_constants_that_end_the_process_are_not_tried_again(tables, tmp_path, monkeypatch):
    """A candidate is on disk before it is called; after a crash it is rejected, and the search
    continues.
    """
    t = tunable()
    op = fake_op(fake=lambda x, *rest: rmsnorm_eager(x, *rest))
    monkeypatch.setattr(launches, "requested_keys", lambda *_: [(t, (100, 4))])
    monkeypatch.setattr(tune, "search", functools.partial(tune.search, rounds=1, seconds=0.0))
    meta = {**META, "date": "2026-01-01T00:00:00", "commit": None, "dirty": None}
    unit = tune.unit(op, op.implementations[0], op.cases[1], "cpu", torch.float32, tmp_path, meta)
    override = Tunable.override

    def fatal(self, device, key, config):
        if config == {"WAIT": 2}:
            raise timing.DeviceLost("an illegal memory access")
        return override(self, device, key, config)

    monkeypatch.setattr(Tunable, "override", fatal)
    saved = {"meta": unit.about(meta), "error": "an illegal memory access"}
    monkeypatch.setattr(runner, "save", saved.update)
    with pytest.raises(timing.DeviceLost):
        unit.make()
    assert saved["trying"][2] == {"WAIT": 2}
    store.append(tmp_path / store.FILE, unit.name, saved)
    (entry,) = unit.make()["entries"]
    assert entry["rejected"] == [{"config": {"WAIT": 2}, "reason": "ended its process"}]
    assert len(entry["tried"]) == 4


def test_a_lost_device_ends_the_process_whatever_raised(tmp_path):
    """For a unit that catches nothing itself, such as the roofline."""
    script = tmp_path / "worker.py"
    script.write_text(
        textwrap.dedent(f"""
        import pathlib, time, torch
        from tilewright.bench import runner
        def sticky(): raise RuntimeError("an illegal memory access")
        torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
        torch.cuda.synchronize = sticky
        runner.work([runner.Unit("a", lambda: 1 / 0, {{}})], pathlib.Path({str(tmp_path)!r}), float('inf'),
                    {{"device": "a cpu"}})""")
    )
    assert forked.Forked([sys.executable, str(script)]).wait() == runner.LOST
    assert "ZeroDivisionError" in json.loads((tmp_path / "running-0.json").read_text())["lost"]


def test_a_launch_is_timed_by_itself(monkeypatch):
    """Of moe_mlp, whose passes start the same kernel for several launches: only that of the one
    asked about.
    """
    op = OPS["moe_mlp"]
    impl, case = op.implementation("triton"), next(c for c in op.cases if "contract" in c.tags)
    kwargs = case.make("cpu", torch.float32, 0)
    passes = run.passes(
        Provider("triton", functools.partial(op.public, implementation="triton")), kwargs
    )
    asked = [
        (t, k)
        for t, k in launches.requested_keys(op, impl, kwargs)
        if t.op in ("moe_mlp", "grouped_gemm")
    ]
    assert len(asked) >= 6
    started, real = [], InterpretedFunction.run

    def watching(kernel, *args, **options):
        started.append((kernel.fn.__name__, options))
        return real(kernel, *args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", watching)
    shared = {}
    for t, k in asked:
        config = {**t.heuristic(**t.named(k)), "GROUP": 3}
        again = launches.timed(t, k, config, CPU, passes, shared=shared)
        again()
        assert len(started) > 1, "the first call is the pass"
        started.clear()
        again()
        ((name, options),) = started
        assert options["GROUP"] == 3 and name == (
            "_dweight" if t.launch == "backward_weight" else "_gemm"
        )
        epilogue = {"up_swiglu": 1, "down_dswiglu": 2, "backward_weight": None}.get(t.launch, 0)
        assert options.get("EPILOGUE") == epilogue, t.name
        started.clear()


def test_a_launch_that_no_pass_starts_is_said():
    op = OPS["rmsnorm"]
    kwargs = RAGGED.make("cpu", torch.float32, 0)
    passes = run.passes(
        Provider("triton", functools.partial(op.public, implementation="triton")), kwargs
    )
    forward = op.implementation("triton").tunables()[0]
    with pytest.raises(
        RuntimeError, match=r"no pass of the op starts a kernel of rmsnorm/forward for .*'D': 99"
    ):
        launches.timed(forward, (99, 4, False), forward.heuristic(99, 4, False), CPU, passes)()


@pytest.mark.parametrize(
    "other, spoil, status, better",
    [(1, (), "holds", "other"), (9, (), "holds", "now"), (1, (1,), "rejected", None)],
    ids=["faster", "slower", "wrong"],
)
def test_which_of_two_ways_is_faster(tables, monkeypatch, other, spoil, status, better):
    """Both are checked by the contract and timed in the same rounds; a wrong one has no time, and
    is no failure.
    """
    _, op = waiting(monkeypatch, spoil, torch.bfloat16)
    monkeypatch.setattr(
        variants,
        "VARIANTS",
        (
            Variant("a shorter wait", "rmsnorm", "tiny", "fake/step", {"WAIT": other}),
            Variant("of another op", "rope", "tiny", "fake/step", {"WAIT": other}),
        ),
    )
    (unit,) = planned(op, "ab")
    document = unit.make()
    assert unit.name == "ab/rmsnorm.tiny.a-shorter-wait" and [
        r["status"] for r in document["results"]
    ] == [
        "holds",
        status,
    ]
    assert [v["better"] for v in document["timed"]] == ([better] if better else [])
    for v in document["timed"]:
        assert v["pass"] == "forward" and (v["faster_percent"] > 0) == (better == "other")
        assert v["now"]["p20"] <= v["now"]["median"] <= v["now"]["p80"]
        assert f"{better} is faster" in suite.describe(document)
    assert not failures(document)
    json.dumps(document, allow_nan=False)


def test_a_question_of_a_whole_pass_times_each_way_with_its_configuration(tables, monkeypatch):
    t, op = waiting(monkeypatch, (), torch.bfloat16)
    passes = run.passes

    def with_a_launch(*args):  # the backward here has none, and its clock stands still
        return {name: fn for name, fn in passes(*args).items() if name != "backward"}

    monkeypatch.setattr(run, "passes", with_a_launch)
    shorter = Variant("all of it", "rmsnorm", "tiny", "fake/step", {"WAIT": 1}, whole=True)
    monkeypatch.setattr(variants, "VARIANTS", (shorter,))
    (unit,) = planned(op, "ab")
    document = unit.make()
    assert [r["status"] for r in document["results"]] == ["holds", "holds"], document
    verdicts = {v["pass"]: v["better"] for v in document["timed"]}
    assert verdicts == {"forward": "other", "forward_backward": "other"}
    assert t.config(CPU, 100, 2)["WAIT"] == 4, "as before"


def test_luck_is_not_taken_for_speed(tables, monkeypatch):
    """A configuration that is fast among all, but not in rounds of two, is no gain."""
    measured = []

    def interleave(tasks, clock, **options):
        measured.append(list(tasks))
        lucky = {i: 1.0 if i == 1 and len(tasks) > 2 else 4.0 for i in tasks}
        return {i: timing.Timing.of([t, t, t]) for i, t in lucky.items()}, {}

    monkeypatch.setattr(timing, "interleave", interleave)
    assert searched(monkeypatch)["config"] == {"WAIT": 4}
    assert measured == [[0, 1, 2, 3], [0, 1]]


def test_without_a_roofline_nothing_is_timed_and_the_next_call_measures_it(
    tmp_path, monkeypatch, forks
):
    argv = [
        "suite",
        "--stage",
        "time",
        "--minutes",
        "50",
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
        "--op",
        "rmsnorm",
        "--dtype",
        "float32",
        "--case",
        "gemma-3-4b",
        "--rounds",
        "1",
        "--sample-ms",
        "0",
        "--provider",
        "eager,cpp",
    ]
    meta = run.metadata("cpu", run.Settings(), [])
    failed = {
        "meta": meta,
        "options": dict(roofline_unit("cpu").options),
        "roofline": None,
        "error": "out of memory",
    }

    def fail(*_, **__):
        store.append(tmp_path / store.FILE, "roofline", failed)
        return True

    fail()
    with monkeypatch.context() as patch:
        patch.setattr(
            runner,
            "supervise",
            fail,
        )
        assert main(argv) == 1
    assert set(stored(tmp_path)) == {"suite", "roofline"}
    assert main(argv) == 0
    document = stored(tmp_path)["time/rmsnorm.gemma-3-4b.float32"]
    assert next(r for r in document["rows"] if r["auto"])["status"] == "ok"
    assert {r["provider"] for r in document["rows"]} == {"eager", "cpp"}
    assert "--task" not in document["meta"]["argv"] and document["meta"]["argv"][0] == "suite"


def test_run_times_what_is_missing(tmp_path, forks):
    roof, meta = roofline_unit("cpu"), run.metadata("cpu", run.Settings(), [])
    document = {"roofline": {"copy_bytes_per_second": 1e10, "flops_per_second": {}}}
    document |= {"schema": 1, "meta": roof.about(meta), "options": dict(roof.options)}
    store.append(tmp_path / store.FILE, roof.name, document)
    argv = ["run", "--op", "rmsnorm", "--case", "gemma-3-4b", "--provider", "eager,cpp"]
    argv += ["--device", "cpu", "--dtype", "float32", "--rounds", "1", "--sample-ms", "0"]
    for _ in range(2):
        assert bench([*argv, "--out", str(tmp_path)]) == 0
    found = stored(tmp_path)
    assert found["roofline"]["roofline"] == document["roofline"], "it is there, and kept"
    assert next(iter(found["suite"]["units"])) == "roofline"
    rows = found["time/rmsnorm.gemma-3-4b.float32"]["rows"]
    assert {r["provider"]: r["status"] for r in rows} == {"eager": "ok", "cpp": "ok"}
    assert found["time/rmsnorm.gemma-3-4b.float32"]["meta"]["argv"][0] == "run"


def test_a_packed_line_that_cannot_be_read_is_measured_again(tmp_path, forks):
    assert suite_command(tmp_path, "--case", "ragged") == 0
    whole = (tmp_path / store.FILE).read_text()
    for damaged in (whole[: len(whole) // 2], whole.replace('"unit"', "unit", 1)):
        (tmp_path / store.FILE).write_text(damaged)
        assert suite_command(tmp_path, "--case", "ragged") == 0
        assert set(stored(tmp_path)) == {"suite", "parity/rmsnorm.ragged"}


def test_a_folder_is_of_one_command(tmp_path, capsys):
    """Its document says whether that command's whole plan was reached."""
    summary = {"meta": {"argv": ["suite", "--minutes", "1"]}, "units": {}}
    store.write(tmp_path, {store.SUMMARY: summary, "roofline": {}})
    argv = ["run", "--op", "rmsnorm", "--device", "cpu", "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        bench(argv)
    assert "has the results of `suite`; take another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, message",
    [
        (["search", "--goals", "nowhere"], "argument --goals: nowhere has no results of the suite"),
        (["search", "--goals", ".", "--only", "a.b.c"], "argument --only: search takes the cases"),
        (["search", "--goal", "."], "python -m bench search: error: "),
        (["gate-variants", "--space"], "--space and --update are of the registry's own kernels"),
    ],
)
def test_what_a_command_does_not_do_is_refused(argv, message, capsys):
    minutes = ["--minutes", "1", "--device", "cpu"] if argv[0] == "search" else []
    with pytest.raises(SystemExit) as ended:
        main([*argv, *minutes])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_search_without_a_missed_goal_says_so(tmp_path, capsys):
    (tmp_path / store.FILE).touch()
    argv = ["search", "--goals", str(tmp_path), "--minutes", "1", "--device", "cpu"]
    assert main(argv) == 0
    assert "was missed: nothing is searched" in capsys.readouterr().out


def test_a_variant_that_is_refused_is_no_failure(monkeypatch):
    op = OPS["rmsnorm"]
    case = next(c for c in op.cases if c.name == "ragged")
    judge = contract.judge

    def refusing(op, name, kwargs, by):
        if name == "torch":
            raise ImplementationUnavailable("rmsnorm[torch]: has no such variant")
        return judge(op, name, kwargs, by)

    monkeypatch.setattr(contract, "judge", refusing)
    found = {
        r["implementation"]: r
        for r in checks.parity_results(op, case, "cpu", torch.float32, ["torch", "eager"])
    }
    assert (
        found["torch"]["status"] == "unavailable" and "no such variant" in found["torch"]["reason"]
    )
    assert found["eager"]["status"] == "holds"
