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
import types
from dataclasses import replace

import forked
import pytest
import torch
from helpers import pause, until
from triton.runtime.interpreter import InterpretedFunction

from bench import search, suite, variants
from bench.__main__ import main
from bench.stages import checks, goals, smoke, tools
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
# What a search's results are marked with.
DATED = {**META, "device_type": "cpu", "date": "2026-01-01", "commit": None, "dirty": None}
ROOFLINE = {"roofline": {"copy_bytes_per_second": 1e10, "flops_per_second": {}}}
ROOT = sources.PACKAGE.parent
RAGGED = next(c for c in RMSNORM.cases if c.name == "ragged")


def counting(name, log, fail=None):
    def make():
        log.append(name)
        if fail:
            raise fail
        return {"value": name}

    return Unit(name, make, {"value": None}, 60.0)


def work(folder, *units, until=FOREVER, meta=META, **options):
    runner.work(units, folder, until, meta, **options)


# ---- one process


def test_what_is_there_is_not_made_again(tmp_path):
    log, ticks = [], iter(range(9))
    failing = counting("a/two", log, ValueError("no\nmore"))
    units = [counting("a/one", log), failing, counting("b", log)]
    work(tmp_path, *units, until=0.0)
    assert log == [] and not list(tmp_path.iterdir()), "nothing is begun when time is out"
    for _ in range(2):
        work(tmp_path, *units, now=lambda: {"date": next(ticks)})
    assert log == ["a/one", "a/two", "b"]
    document = value(tmp_path, "a/one")
    assert document["value"] == "a/one" and document["seconds"] >= 0 and document["attempts"] == 1
    assert document["meta"] == {**META, "date": 0} and value(tmp_path, "b")["meta"]["date"] == 2
    assert value(tmp_path, "a/two")["error"] == "ValueError: no"
    assert not list(tmp_path.glob("running*"))


def test_what_was_made_from_other_sources_versions_or_options_is_made_again(tmp_path):
    log = []
    one = replace(counting("a", log), options={"dtypes": ("float32", "bfloat16"), "slack": 8.0})
    narrow = replace(one, options={"dtypes": ["float32"], "slack": 8.0})
    changed, newer = {**META, "source": "2"}, {**META, "versions": {"torch": "9"}}
    elsewhere = {**changed, "device": "another"}
    for unit, meta, keep, times in (
        (one, META, False, 1),
        (one, META, False, 0),
        (one, newer, False, 1),
        (one, META, False, 1),
        (one, changed, True, 0),
        (one, changed, False, 1),
        (one, elsewhere, True, 1),  # no number of one device may stand for another's
        (narrow, elsewhere, True, 1),  # --keep is for other sources, not for other questions
    ):
        log.clear()
        work(tmp_path, unit, meta=meta, keep=keep)
        assert len(log) == times, (unit.options, meta, keep)


def test_what_failed_is_tried_again_by_later_calls_and_not_for_ever(tmp_path):
    log = []
    unit = counting("a", log, MemoryError("full"))
    for _ in range(3):  # one call, whose worker was restarted twice
        work(tmp_path, unit, since=0.0)
    assert len(log) == 1
    for _ in range(5):
        work(tmp_path, unit, since=LATER)
    assert len(log) == runner.ATTEMPTS == value(tmp_path, "a")["attempts"]
    (tmp_path / store.FILE).unlink()
    work(tmp_path, unit, since=LATER)
    work(tmp_path, counting("a", log), since=LATER)
    assert value(tmp_path, "a")["value"] == "a" and "error" not in value(tmp_path, "a")


def test_a_number_that_json_does_not_have_costs_one_unit(tmp_path):
    log = []
    unit = Unit("a", lambda: {"value": float("nan")}, {"value": None})
    work(tmp_path, unit, counting("b", log))
    found = value(tmp_path, "a")
    assert found["value"] is None and "ValueError" in found["error"] and log == ["b"]


def test_what_there_was_no_time_for_goes_last(tmp_path):
    log = []
    store.append(tmp_path / store.FILE, "a", {"late": True})
    failed = counting("b", log, ValueError("no"))
    work(tmp_path, failed)
    work(tmp_path, counting("a", log), failed, counting("c", log), since=LATER)
    assert log == ["b", "c", "b", "a"], "what was never tried, what failed, what took too long"


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


# ---- supervised processes

WORKER = """
import itertools, os, pathlib, subprocess, sys, time, types, torch
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
def lose():
    raise timing.DeviceLost("triton bfloat16: an illegal memory access")
def lose_silently():
    def sticky():
        raise RuntimeError("an illegal memory access")
    torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = sticky
    1 / 0
def breed():
    child = subprocess.Popen(["sleep", "600"])
    (out / "child").write_text(str(child.pid))
    later(40_000)  # than any clock of write_parts
    stuck()
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


def watch(tmp_path, units, late=lambda out: False, ticking=True):
    """late: whether time is up, given the folder.   ticking: with a clock of the test's, not the
    system's. Returns the folder, the output and whether time was up.
    """
    script = tmp_path / "worker.py"
    parts = {"{UNITS}": units, "{CLOCK}": TICKING if ticking else "", "{START}": str(START)}
    script.write_text(functools.reduce(lambda s, part: s.replace(*part), parts.items(), WORKER))
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    end = End(lambda: late(out))
    said = []
    command = [sys.executable, str(script), str(out), str(float(end)), "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "subprocess", forked.IN_PLACE)
        if ticking:
            clock = Clock(out)
            patch.setattr(runner, "time", types.SimpleNamespace(time=clock.time, sleep=clock.sleep))
        stream = tmp_path / "lines.jsonl"
        runner.supervise([command], out, end, say=said.append, stream=stream)
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
        ticking=False,
    )
    crash, hang = value(out, "crash"), value(out, "hang")
    assert value(out, "first")["found"] == [1] and value(out, "last")["found"] == [2]
    assert "SIGABRT" in crash["error"] and crash["found"] == []
    assert "within 1 s" in hang["error"] and hang["meta"]["device"] == "a cpu"
    assert "crash: its process died" in said and not list(out.glob("running*"))
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [line["unit"] for line in lines] == ["crash", "hang"], "the supervisor's own documents"
    assert "SIGABRT" in lines[0]["error"]


def test_a_call_ends_in_time_and_the_next_goes_on(tmp_path):
    units = """[unit("quick", lambda: {"found": [1]}), unit("slow", stuck), unit("never", turn)]"""
    out, said, up = watch(tmp_path, units, late=at("slow"))
    assert up and "quick" in store.documents(out) and not list(out.glob("running*"))
    late = value(out, "slow")
    assert "slow: out of time" in said and late["late"] and late["unfinished"]
    assert "error" not in late, "it may need just the time that was left"
    # With a part of an earlier call, which stays.
    part = {"meta": META, "unfinished": True, "found": [1]}
    store.append(out / store.FILE, "slow", part)
    watch(tmp_path, units, late=at("slow"))
    assert value(out, "slow") == {**part, "late": True} and "never" not in store.documents(out)
    out, _, _ = watch(tmp_path, units.replace("stuck", "turn"))
    assert [value(out, n)["found"] for n in ("never", "slow")] == [[1], [2]], "slow goes last"
    assert "late" not in value(out, "slow")


def test_a_lost_device_is_told_with_its_cause_and_the_rest_goes_on_in_another_process(tmp_path):
    """Also for a unit that catches nothing itself, such as the roofline."""
    units = [("before", "me"), ("lost", "lose"), ("after", "me"), ("silently", "lose_silently")]
    out, _, _ = watch(tmp_path, f"[{', '.join(f'unit({n!r}, {make})' for n, make in units)}]")
    assert value(out, "lost")["error"] == "triton bfloat16: an illegal memory access"
    assert value(out, "before")["found"] != value(out, "after")["found"]
    assert "ZeroDivisionError" in value(out, "silently")["error"]


def test_the_device_is_asked_after_an_exception(monkeypatch):
    """A sticky error is reported by the next synchronization, and by all later ones."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tasks, clock = {"bad": lambda: 1 / 0, "good": lambda: None}, timing.CpuClock(0.0)
    timings, errors = timing.interleave(tasks, clock, rounds=1)
    assert list(timings) == ["good"] and list(errors) == ["bad"]

    def sticky():
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", sticky)
    op = fake_op(broken=raises)
    check = checks.check_unit("big", op, RAGGED, "cpu", [torch.float32], raises, lambda *_: None)
    roof, settings = timing.Roofline(1e10, {}), run.Settings(rounds=1)
    given = op, RAGGED, "cpu", torch.float32, roof, clock, settings
    for what, said in (
        (lambda: timing.interleave(tasks, clock, rounds=1), "bad: ZeroDivisionError"),
        (planned(op, "parity")[0].make, "broken float32: RuntimeError: an illegal address"),
        (check.make, "broken float32: RuntimeError: an illegal address"),
        (lambda: run.measure(*given, only=["broken"]), "broken: RuntimeError"),
    ):
        with pytest.raises(timing.DeviceLost, match=said):
            what()


def alive(pid):
    try:
        return "zombie" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended, perhaps while its status was read
        return False


def test_a_limit_counts_from_what_was_last_written_and_ends_what_a_worker_has_started(tmp_path):
    """Compilers run in processes of their own."""
    script = """[unit("parts", write_parts, 3000.0), unit("hang", breed, 3000.0)]"""
    out, _, _ = watch(tmp_path, script)
    assert value(out, "parts")["found"] == [1, 2, 3] and "error" not in value(out, "parts")
    assert "within 3000 s" in value(out, "hang")["error"]
    child = (out / "child").read_text()
    until(lambda: not alive(child))  # killed with the worker, but not waited for


def test_workers_end_with_a_supervisor_that_is_killed(tmp_path):
    worker, boss = tmp_path / "worker.py", tmp_path / "boss.py"
    worker.write_text(
        "import os, pathlib, sys, time\nfrom tilewright.bench import runner\n"
        "runner.begin_worker(os.getppid())\n"
        "pathlib.Path(sys.argv[1], 'pid').write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    boss.write_text(
        "import pathlib, sys\nfrom tilewright.bench import runner\n"
        "command = [sys.executable, *sys.argv[1:]]\n"
        "runner.supervise([command], pathlib.Path(sys.argv[2]), float('inf'))"
    )
    process = forked.Forked([sys.executable, str(boss), str(worker), str(tmp_path)])

    def begun():
        assert process.poll() is None
        return (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()

    pid = until(begun)
    process.kill()
    process.wait()
    until(lambda: not alive(pid))


def test_what_a_unit_saved_before_its_call_was_killed_stays(tmp_path):
    document = {"meta": META, "found": [1, 2]}
    state = {"unit": "a", "limit": 1.0, "saved": True, "document": document}
    store.write_json(tmp_path / "running-0.json", state)
    assert runner.supervise([[sys.executable, "-c", ""]], tmp_path, FOREVER)
    assert value(tmp_path, "a") == {**document, "unfinished": True, "late": True}
    assert not list(tmp_path.glob("running*"))


@pytest.mark.parametrize(
    "code, silent, reason",
    [
        ("import time; time.sleep(600)", 0.5, "was at no unit for 0.5 s"),
        ("exit(1)", 60.0, "its process died: exit code 1"),
    ],
    ids=["silent", "cannot start"],
)
def test_a_worker_that_comes_to_no_unit_is_given_up(code, silent, reason, tmp_path):
    said, command = [], [sys.executable, "-c", code]
    going = runner.supervise([command], tmp_path, FOREVER, say=said.append, silent=silent)
    assert going is False and said == [f"worker 0: {reason}"] * 2


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


# ---- units of the suite


def fake_op(options=None, goals=(), **implementations):
    """options: of each implementation."""
    options = {"devices": ("cpu",), "dtypes": (torch.float32,), **(options or {})}
    tiny = Case("tiny", RAGGED.make, lambda itemsize: Cost(1000, 2000), frozenset({"cpu"}))
    op = Op(
        "rmsnorm",
        None,
        rmsnorm_eager,
        tuple(Implementation(n, lambda fn=fn: fn, **options) for n, fn in implementations.items()),
        (RAGGED, tiny),
        goals=goals,
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


class Careless(torch.autograd.Function):
    """Assumes contiguous gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return torch.as_strided(g, g.shape, g.contiguous().stride())


def unwritten(x, *rest):
    y = torch.empty_like(x)
    y[1:] = rmsnorm_eager(x, *rest)[1:]
    return y


def test_parity_tells_what_holds_what_is_broken_and_what_raised():
    """In every dtype that is taken: `late` is wrong in the last."""
    op = fake_op(
        {"dtypes": (torch.float32, torch.float16)},
        right=rmsnorm_eager,
        wrong=lambda x, *rest: rmsnorm_eager(x, *rest) * 1.02,
        late=lambda x, *rest: rmsnorm_eager(x, *rest) * (1.02 if x.itemsize == 2 else 1),
        careless=lambda x, *rest: Careless.apply(rmsnorm_eager(x, *rest)),
        unwritten=unwritten,
        broken=raises,
    )
    (unit,) = planned(op, "parity")
    assert unit.name == "parity/rmsnorm.ragged"
    assert unit.source == sources.of_measured(op, "cpu") != sources.digest()
    document = unit.make()
    found = {(r["implementation"], r["dtype"]): r for r in document["results"]}
    statuses = {n: found[n, "float32"]["status"] for n in op.names() if n != "eager"}
    assert statuses.pop("careless") in ("broken", "error")
    assert statuses == {
        "right": "holds",
        "wrong": "broken",
        "late": "holds",
        "unwritten": "broken",
        "broken": "error",
    }
    assert found["late", "float16"]["status"] == "broken"
    assert found["right", "float16"]["status"] == "holds"
    right, wrong = found["right", "float32"], found["wrong", "float32"]
    assert [t["name"] for t in right["tensors"]] == ["out 0", "grad x", "grad weight"]
    assert all(t["error"] <= t["budget"] for t in right["tensors"])
    assert found["unwritten", "float32"]["tensors"][0]["error"] is None, "NaN: no number"
    assert "exceeds" in wrong["reason"]
    assert "illegal address" in found["broken", "float32"]["reason"]
    assert runner.raised(document)
    assert not runner.raised({**document, "results": [right, wrong]})
    assert len(failures({**document, "results": [right, wrong]})) == 1
    json.dumps(document, allow_nan=False)


def test_pytorchs_own_failures_are_no_fault_of_this_library():
    result = {"dtype": "float32", "reason": "exceeds", "status": "broken"}
    results = [{**result, "implementation": n} for n in ("torch", "cpp")]
    assert failures({"results": results}) == ["cpp float32: exceeds"]
    statuses = {
        "compile": "error",
        "torch": "failed",
        "liger": "error",
        "triton": "failed",
        "cpp": "unavailable",
    }
    rows = [{"provider": p, "status": s, "reason": "r"} for p, s in statuses.items()]
    assert failures({"rows": rows}) == ["triton: r"]


def test_a_failed_capture_says_what_it_failed_of():
    def check(*_):
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("capture ended")

    op = fake_op(right=rmsnorm_eager)
    unit = checks.check_unit("graph", op, RAGGED, "cpu", [torch.float32], check, lambda *_: None)
    assert "not permitted" in unit.make()["results"][0]["reason"]


def test_what_cannot_run_here_says_why():
    op = fake_op({"missing": lambda device: f"no {device} here"}, right=rmsnorm_eager)
    document = planned(op, "parity")[0].make()
    found = [(r["status"], r["reason"]) for r in document["results"]]
    assert found == [("unavailable", "no cpu here")] and not failures(document)
    assert planned(OPS["silu_mul"], "graph") == [] and planned(OPS["silu_mul"], "big") == []


def test_a_new_op_is_taken_in_by_every_stage(tmp_path):
    op = fake_op(right=rmsnorm_eager)
    units = [u for stage in suite.STAGES for u in planned(op, stage, tmp_path)]
    assert [u.name for u in units] == [
        "smoke/rmsnorm.ragged",
        "roofline",
        "overhead/rmsnorm",
        "parity/rmsnorm.ragged",
        "time/rmsnorm.tiny.float32",
        "overhead/rmsnorm",
    ]
    made = [replace(u, make=lambda: ROOFLINE) if u.name == "roofline" else u for u in units]
    work(tmp_path, *made)
    rows = value(tmp_path, "time/rmsnorm.tiny.float32")["rows"]
    assert {r["provider"]: r["status"] for r in rows}["right"] == "ok"
    document, broken = plan.conclude(units, store.documents(tmp_path), META, False)
    assert document["complete"] and not broken
    assert {u["status"] for u in document["units"].values()} == {"done"}


def test_host_time_without_a_gpu_is_of_ops_with_triton_kernels():
    ops, names = [fake_op(right=rmsnorm_eager), OPS["rope"]], []
    for not_launched in (False, True):
        args = argparse.Namespace(not_launched=not_launched)
        chosen = Chosen("cpu", run.Settings(sample_seconds=0.002), pathlib.Path(), args=args)
        names.append([u.name for u in suite.units("overhead", ops, DTYPES, chosen)])
    assert names == [["overhead/rmsnorm", "overhead/rope"], ["overhead/rope.not-launched"]]


def test_every_registered_case_is_in_the_plan():
    @functools.cache
    def names(stage, device):
        chosen = Chosen(device, run.Settings(), pathlib.Path())
        return {u.name for u in suite.units(stage, OPS.values(), DTYPES, chosen)}

    for op in OPS.values():
        dtypes = {d for i in op.implementations if i.name != "eager" for d in i.dtypes}
        for case in op.cases:
            name = f"{op.name}.{case.name}"
            if "contract" in case.tags:
                assert f"parity/{name}" in names("parity", "cpu")
                assert f"graph/{name}" in names("graph", "cuda")
            if "big" in case.tags:
                assert f"big/{name}" in names("big", "cuda")
            for device in {"cpu", "cuda"} & case.tags:
                timed = {f"time/{name}.{short(dtype)}" for dtype in TIMED if dtype in dtypes}
                assert timed <= names("time", device)


def test_float8_is_checked_where_an_op_takes_it(monkeypatch):
    assert DTYPES[-2:] == (torch.float8_e4m3fn, torch.float8_e5m2)
    op = fake_op({"dtypes": (torch.float8_e4m3fn,)}, right=rmsnorm_eager)
    seen = []
    monkeypatch.setattr(checks, "parity_results", lambda *given: seen.append(given[3:]) or [])
    planned(op, "parity")[0].make()
    assert seen == [(torch.float8_e4m3fn, ["right"])]


# ---- goals first


def test_the_cases_of_goals_come_before_the_others(tmp_path):
    """Only goals of this device are measured, with the implementation of `auto` and the peers. Each
    result is also a line of the stream.
    """
    here = Goal("", "forward", "roofline_percent", at_least=1e-9, dtypes=("float32",))
    elsewhere = [
        Goal(device, "backward", "peak_mib", at_most=1, dtypes=("bfloat16",))
        for device in ("another", ("sm_90",))
    ]
    op = fake_op(goals=(here, *elsewhere), right=rmsnorm_eager)
    (unit,) = planned(op, "goals", tmp_path)
    assert unit.name == "goals/rmsnorm.tiny.float32"
    assert planned(fake_op(right=rmsnorm_eager), "goals") == []
    at = suite.STAGES.index
    assert all(at("goals") < at(stage) for stage in ("parity", "graph", "big", "time"))
    assert goals.unmet(op, "cpu", tmp_path) == set(), "what was not measured is not missed"
    store.append(tmp_path / store.FILE, "roofline", ROOFLINE)
    stream = tmp_path / "lines.jsonl"
    work(tmp_path, unit, counting("bad", [], ValueError("no")), stream=stream)
    rows = {r["provider"]: r for r in value(tmp_path, unit.name)["rows"]}
    assert rows["right"]["status"] == "ok" and rows["right"]["auto"]
    assert not {"eager", "compile"} & set(rows)
    assert goals.unmet(op, "cpu", tmp_path) == set()
    op.goals = (replace(here, at_least=1e9), here)
    assert goals.unmet(op, "cpu", tmp_path) == {("tiny", torch.float32)}
    op.goals = (replace(here, metric="over liger", at_least=1e9),)
    assert goals.unmet(op, "cpu", tmp_path) == set(), "there is nothing to compare with"
    lines = [json.loads(text) for text in stream.read_text().splitlines()]
    found = [(d["unit"], d.get("error")) for d in lines]
    assert found == [(unit.name, None), ("bad", "ValueError: no")]
    assert lines[0]["rows"] == value(tmp_path, unit.name)["rows"]


STUB = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in *search*) exit 3;; *smoke*) exit "${SMOKE:-0}";; *pytest*) exit "${TESTS:-0}";; esac
"""


@pytest.fixture
def script(tmp_path):
    """Calls a copy of bench/gpu.sh whose Python is a stub: its exit code, the commands that it has
    called, and what it said.
    """
    (tmp_path / "bench").mkdir()
    shutil.copy(ROOT / "bench/gpu.sh", tmp_path / "bench")
    stub, calls = tmp_path / "python", tmp_path / "calls"
    stub.write_text(STUB)
    stub.chmod(0o755)
    env = {**os.environ, "PYTHON": str(stub), "CALLS": str(calls)}
    env.pop("TRITON_CACHE_DIR", None)

    def call(*stages, **variables):
        calls.write_text("")
        command = ["bash", "bench/gpu.sh", "results", "10.5", *stages]
        done = subprocess.run(
            command, cwd=tmp_path, env=env | variables, capture_output=True, text=True
        )
        return done.returncode, calls.read_text().splitlines(), done.stdout + done.stderr

    return call


def test_a_dry_run_of_the_gpu_script_keeps_the_order_and_the_minutes(script, tmp_path):
    """The most decisive stages come first, in one call of the suite; every stage gets its share of
    the remaining time; results are packed after each.
    """
    out = tmp_path / "out"
    out.mkdir()
    call = functools.partial(script, OUT=str(out))
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
    # 100 of the sum of the weights is the first call's; nothing was used, so the rest has all.
    weights = [(100, 375), (60, 275), (30, 215), (80, 185)]
    found = [float(b.split("--minutes ")[1].split()[0]) for b in bench if "--minutes" in b]
    assert found == pytest.approx([10.0 * own / of for own, of in weights], rel=0.1), (found, said)
    code, calls, said = call("smoke", "products", "search", "ab", SMOKE="4")
    assert code == 4 and "nothing else is run" in said and (out / "results.tar.gz").exists()
    assert sum("-m bench" in c for c in calls) == 1
    code, calls, said = call("tests", "report", TESTS="4")  # as where pytest-xdist is missing
    assert code == 1 and "nothing else is run" not in said
    assert calls[-2].endswith("bench report"), "the page is written all the same"
    calls = call("goals", "search", "ab", "host")[1]
    assert [c.split("--stage ")[1].split()[0] for c in calls if "--stage" in c] == [
        "goals",
        "ab,host",
    ]
    of_steps, of_contract = call("kernels", "parity")[1][0::2]
    assert "end-to-end --device cuda --profile" in of_steps
    assert "--stage parity,graph,big --dtype bfloat16" in of_contract
    assert call("reprt")[0] == 2
    assert "--commit abc" in call("goals", COMMIT="abc")[1][0]


def test_pieces_of_a_larger_cache_that_stayed_are_no_part_of_this_one(script, tmp_path):
    """carry.py names how many pieces there are; RESULTS may have those of an earlier call, too."""
    results = tmp_path / "results"
    results.mkdir()
    (tmp_path / "kernel.cubin").write_bytes(os.urandom(4000))
    with tarfile.open(tmp_path / "whole", "w:gz") as archive:
        archive.add(tmp_path / "kernel.cubin", "hash/kernel.cubin")
    whole = (tmp_path / "whole").read_bytes()
    for i, piece in enumerate((whole[:2500], whole[2500:]), 1):
        (results / f"triton-cache.tar.gz.0{i}of02").write_bytes(piece)
    (results / "triton-cache.tar.gz.03of03").write_bytes(b"of an earlier call")
    cache, unpacked = tmp_path / "cache", tmp_path / "cache/hash/kernel.cubin"
    call = functools.partial(script, "report", TRITON_CACHE_DIR=str(cache))
    # What it holds would run: not without being asked for.
    code, _, said = call()
    assert code == 0 and not unpacked.exists()
    assert "triton-cache.tar.gz.01of02 is not unpacked: UNPACK_CACHE=1 does" in said
    code, _, said = call(UNPACK_CACHE="1")
    assert code == 0 and "is not unpacked" not in said
    assert unpacked.read_bytes() == (tmp_path / "kernel.cubin").read_bytes()


def test_a_tool_that_hangs_leaves_no_process_behind(monkeypatch):
    """The process under the tool holds the GPU, which the next unit needs."""
    monkeypatch.setattr(tools, "SECONDS", 0.25)
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    said = ""
    while not said.strip():  # a slow machine has not started it yet
        tools.SECONDS *= 2
        said, problem = tools._output(["sh", "-c", f"{sys.executable} -c '{child}' & wait"])
    assert problem and problem.startswith("did not end")
    # Some time after its signal, which takes a tenth of the time that the process would sleep.
    until(lambda: not alive(int(said)), looks=5_000)


# ---- end to end


def suite_command(out, arguments):
    return main(["suite", "--device", "cpu", "--out", str(out), *arguments.split()])


# Its cases are appended.
PARITY = "--minutes 50 --op rmsnorm --stage parity --dtype float32 --case "


@pytest.fixture
def forks(monkeypatch):
    """The suite forks its workers from here, and hardly measures the roofline."""
    brief = {"copy_bytes": 2**22, "matmul": 64, "samples": 2}
    measure = functools.partial(timing.measure_roofline, **brief)
    monkeypatch.setattr(timing, "measure_roofline", measure)
    monkeypatch.setattr(runner, "subprocess", forked.CHILDREN)


def stored(out):
    """The documents of a packed suite, by name."""
    assert [p.name for p in sorted(out.iterdir())] == [".lock", store.FILE]
    return {name: document for name, _, document in store.read(out)}


def test_the_command_end_to_end_and_resumed(tmp_path, capfd, monkeypatch):
    assert suite_command(tmp_path, PARITY + "ragged,gemma") == 0
    monkeypatch.setattr(runner, "subprocess", forked.IN_PLACE)
    first = stored(tmp_path)
    whole = first.pop("suite")
    others = {"time/rope.qwen3-8b.bfloat16", "roofline"}
    assert set(whole["units"]) > {"parity/rmsnorm.ragged", *others}
    assert not whole["complete"], "a part does not stand for the whole"
    assert whole["meta"]["source"] and whole["meta"]["argv"][0] == "suite"
    assert set(first) == {"parity/rmsnorm.ragged", "parity/rmsnorm.gemma"}
    # A worker runs for new units; it must keep the others, also those of another commit.
    old = {**first["parity/rmsnorm.ragged"]}
    old["meta"] = {**old["meta"], "source": "of another commit"}
    store.append(tmp_path / store.FILE, "parity/rmsnorm.ragged", old)
    capfd.readouterr()
    assert suite_command(tmp_path, PARITY + "ragged,gemma,one_row --keep") == 0
    second = stored(tmp_path)
    assert second["parity/rmsnorm.ragged"] == old and "parity/rmsnorm.one_row" in second
    assert second["parity/rmsnorm.gemma"] == first["parity/rmsnorm.gemma"]
    assert "parity/rmsnorm.ragged" not in capfd.readouterr().out
    # Other options are other units.
    assert suite_command(tmp_path, PARITY + "ragged --dtype bfloat16,float32 --keep") == 0
    results = stored(tmp_path)["parity/rmsnorm.ragged"]["results"]
    assert {r["dtype"] for r in results} == {"bfloat16", "float32"}


def test_suite_json_tells_of_all_there_is_to_do(tmp_path, monkeypatch):
    """Made with the full call's own dtypes, a result of a narrow call counts there."""
    monkeypatch.setattr(plan, "DTYPES", (torch.float32,))
    some = {name: OPS[name] for name in ("rmsnorm", "rope")}
    monkeypatch.setattr(plan.selection, "operations", lambda: some)
    monkeypatch.setattr(plan.runner, "supervise", lambda *_, **__: True)
    result = {"implementation": "cpp", "dtype": "float32", "status": "broken", "reason": "grad x"}
    found = {"schema": 1, "seconds": 1, "results": [result], "roofline": {}}
    for name, stage in (("parity/rmsnorm.ragged", "parity"), ("roofline", "roofline")):
        unit = next(u for u in planned(OPS["rmsnorm"], stage, tmp_path) if u.name == name)
        meta = unit.about(run.metadata("cpu", run.Settings(), []))
        document = {**found, "meta": meta, "options": dict(unit.options)}
        store.append(tmp_path / store.FILE, name, document)
    assert suite_command(tmp_path, PARITY + "gemma") == 3
    units = stored(tmp_path)["suite"]["units"]
    assert units["parity/rmsnorm.ragged"]["status"] == "error" and "overhead/rope" in units


def test_only_what_times_nothing_runs_side_by_side(tmp_path, monkeypatch):
    started = []
    supervise = lambda commands, *_, **__: started.append(commands) or True  # noqa: E731
    monkeypatch.setattr(plan.runner, "supervise", supervise)
    assert suite_command(tmp_path, "--minutes 1 --op rope --jobs 4") == 3
    tasks = [[runner.parse_task(c)[1] for c in commands] for commands in started]
    # Smoke has one unit; the others are begun once more, since nothing was done.
    once = [(0, 1, {1}), (1, 1, {1}), (2, 4, {4}), (3, 1, {1})]
    assert [(t[0]["group"], len(t), {x["of"] for x in t}) for t in tasks] == 2 * once
    assert [x["worker"] for x in tasks[2]] == [0, 1, 2, 3]
    assert {x["parent"] for t in tasks for x in t} == {os.getpid()}


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
    arguments = f"--minutes 60 --op {','.join(ops)} --stage smoke,parity"
    assert suite_command(tmp_path, arguments) == code
    assert started == groups
    assert capfd.readouterr().out.count("FAILED smoke/") == 2 * failing, "at once, and at the end"


def test_small_cases_are_of_our_own_kernels(monkeypatch):
    """Triton is asked for by name: `auto` may be another library's kernel."""
    chosen = Chosen("cuda", run.Settings(), pathlib.Path())
    units = suite.units("smoke", OPS.values(), DTYPES, chosen)
    assert [u.name.partition("/")[2].partition(".")[0] for u in units] == list(OPS)
    assert {u.limit for u in units} == {20.0}
    asked = []
    results = lambda op, *rest: asked.append((op.name, rest[2:])) or []  # noqa: E731
    monkeypatch.setattr(smoke, "parity_results", results)
    for unit in units:
        unit.make()
    assert asked == [(n, (torch.bfloat16, ["triton"], contract.LAYOUTS[:1])) for n in OPS]


def test_the_share_of_each_stage():
    """The stages share the time in their order, and all of it is given away."""
    found = suite.SUITE.ends(["goals", "smoke", "products"], 100.0, 168.0)
    assert found == {"smoke": 117.0, "products": 117.0 + 51 * 30 / 54, "goals": 168.0}
    first = suite.SUITE.ends(suite.FIRST, 0.0, 480.0)
    assert list(first) == list(suite.FIRST) and first["counters"] == 480.0
    assert first["products"] < 250.0 and first["smoke"] < 90.0
    assert sum(suite.SHARES[s] for s in suite.FIRST) == 100
    assert sorted(suite.STAGES) == sorted(s for g in suite.GROUPS for s in g)


def test_a_folder_is_of_one_call_and_of_one_command(tmp_path, capsys):
    """Its document says whether that command's whole plan was reached."""
    with runner.locked(tmp_path), pytest.raises(SystemExit) as ended:
        suite_command(tmp_path, "--minutes 1 --op rope")
    assert ended.value.code == 2 and "another call is at work" in capsys.readouterr().err
    summary = {"meta": {"argv": ["suite", "--minutes", "1"]}, "units": {}}
    store.write(tmp_path, {store.SUMMARY: summary, "roofline": {}})
    with pytest.raises(SystemExit):
        bench(["run", "--op", "rmsnorm", "--device", "cpu", "--out", str(tmp_path)])
    assert "has the results of `suite`; take another folder" in capsys.readouterr().err


def test_a_worker_whose_supervisor_is_gone_does_not_begin(tmp_path):
    task = {"until": LATER, "since": 0, "group": 1, "worker": 0, "of": 1, "parent": 1}
    command = ["bench", "suite", "--op", "rope", "--stage", "parity", "--minutes", "1"]
    given = ["--device", "cpu", "--out", str(tmp_path), "--task", json.dumps(task)]
    process = forked.Forked([sys.executable, "-m", *command, *given])
    assert process.wait() == 1 and not list(tmp_path.rglob("*.json"))


def test_tables_that_cannot_be_written_are_found_out_first(tmp_path, capsys):
    (tmp_path / "file").touch()
    tables = str(tmp_path / "file/tables")
    with pytest.raises(SystemExit):
        bench(["tune", "--minutes", "1", "--device", "cpu", "--tables", tables])
    assert "argument --tables:" in capsys.readouterr().err


def test_what_a_result_depends_on(tables, monkeypatch):
    """On this op's constants, where they differ from the heuristic's; times on settings, checks on
    dtypes.
    """
    op, usual = OPS["linear_cross_entropy"], run.Settings()

    def options(stage, settings=usual, dtypes=DTYPES):
        units = suite.units(stage, [op], dtypes, Chosen("cpu", settings, pathlib.Path()))
        return [dict(u.options) for u in units]

    def all_differ(stage, **changed):
        pairs = zip(options(stage), options(stage, **changed), strict=True)
        return all(a != b for a, b in pairs)

    def of_stages():
        return {s: options(s) for s in suite.STAGES}

    chunk = op.implementation("cpp").tunables()[0]
    key = {"H": 64, "V": 512, "itemsize": 4, "cuda": False}
    assert set(key) == set(chunk.fields), chunk.fields
    folder = tables / tuning.platform.slug(tuning.platform.cpu_name())

    def write(name, config):
        launches = {"chunk": [{"key": key, "config": config}]}
        table = {"schema": 1, "device": "a", "device_type": "cpu", "launches": launches}
        store.write_json(folder / f"{name}.json", table)
        tuning.table.cache_clear()

    before = of_stages()
    write("rmsnorm", {"budget_mib": 1})
    write("linear_cross_entropy", chunk.heuristic(**key))
    assert of_stages() == before
    write("linear_cross_entropy", {"budget_mib": 1})
    now = of_stages()
    changed = [s for s in suite.STAGES if now[s] != before[s]]
    assert changed == ["smoke", "ab", "parity", "time", "overhead"]
    assert all_differ("time", settings=run.Settings(rounds=3))
    assert all_differ("parity", dtypes=DTYPES[:1])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    changed = [s for s, found in of_stages().items() if found != now[s]]
    assert changed == ["roofline", "ab", "time", "overhead"]


def digests():
    sources.digest.cache_clear()
    sources._operators.cache_clear()
    return {"": sources.digest(), **{n: sources.digest(op) for n, op in OPS.items()}}


def edit(path, old, new):
    """Puts a new text in place of the first old one; of none, at the end."""
    text = path.read_text() if path.exists() else ""
    assert old in text, path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace(old, new, 1) if old else text + new)


def add_a_name(path):
    edit(path, "", "\nint another;\n" if path.suffix in (".cpp", ".h") else "\nanother = 1\n")


@pytest.fixture(scope="module")
def sources_once(tmp_path_factory):
    """A copy of the sources, and their contents."""
    folder, left = tmp_path_factory.mktemp("sources"), ("*.so", "__pycache__", "results")
    for part in ("tilewright", "csrc", "bench", "lab/tilewright_lab"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns(*left))
    return folder, {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def copied(sources_once, monkeypatch):
    """The folder of a copy of the sources, whose digests are asked for; restored after the test."""
    folder, contents = sources_once
    for name in ("PACKAGE", "CSRC"):
        monkeypatch.setattr(sources, name, folder / getattr(sources, name).relative_to(ROOT))
    monkeypatch.setattr(sources, "CORE", [folder / p.relative_to(ROOT) for p in sources.CORE])
    sources._operators.cache_clear()
    yield folder
    for path in folder.rglob("*"):
        if path.is_file() and path not in contents:
            path.unlink()
    for path, content in contents.items():
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
    sources.digest.cache_clear()
    sources._operators.cache_clear()


def test_an_edit_makes_stale_what_comes_from_it(copied):
    """And nothing else: comments, docstrings, goals, tables and the trainer invalidate nothing."""
    before = digests()
    for name, old, new in (
        ("tilewright/ops/rope/rope.py", "", "# another\n"),
        ("tilewright/ops/rope/rope.py", '"""', '"""Another word. '),
        ("tilewright/kernels/norm/rmsnorm_triton.py", "NARROW = 512", "NARROW  =  512   # why"),
        ("tilewright/ops/norm/rmsnorm.py", "near_copy(92", "near_copy(91"),
        ("csrc/cpu/rope.cpp", "", "// another\n/* and more */\n"),
        ("tilewright/kernels/tuned/h200/rmsnorm.json", "", "{}"),
    ):
        edit(copied / name, old, new)
    for name in (
        "tilewright/trainer/config/config.py",
        "tilewright/bench/plan.py",
        "tilewright/bench/sources.py",
        "tilewright/bench/store.py",
        "bench/suite.py",
    ):
        add_a_name(copied / name)
    assert digests() == before
    rows = {"rmsnorm", "add_rmsnorm", "layernorm", "add_layernorm"}
    fused = rows | {"qk_norm_rope", "silu_mul_quantize", "rmsnorm_quantize", "add_rmsnorm_quantize"}
    # logprob_entropy has a file with linear_logprob.
    of_head = {"logprob_entropy", *(n for n in OPS if n.startswith("linear_"))}
    for name, stale in {
        "tilewright/kernels/moe/route_triton.py": {"route"},
        "csrc/cpu/route.cpp": {"route"},
        "csrc/cpu/rope.h": {"rope", "qk_norm_rope"},
        "tilewright/kernels/norm/rmsnorm_cute.py": fused,
        "tilewright/kernels/attention/attention_triton.py": {"attention"},
        "tilewright/ops/loss/head.py": of_head,
        "tilewright/core/checks.py": set(OPS),
        "tilewright/bench/timing.py": {"", *OPS},
        "bench/overhead.py": {"", *OPS},
        "lab/tilewright_lab/pretend.py": {"", *OPS},
    }.items():
        path = copied / name
        text = path.read_text()
        add_a_name(path)
        assert {n for n, d in digests().items() if d != before[n]} == stale, name
        path.write_text(text)
    edit(copied / "tilewright/bench/bounds.py", "2 * e + atol", "3 * e + atol")
    assert not digests().items() & before.items()


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
    kernels = {p for part in ("kernels", "ops") for p in (sources.PACKAGE / part).rglob("*.py")}
    kernels |= {*sources.CSRC.rglob("*.*")}
    of_several_devices = (
        "attention/context_parallel",
        "attention/ring",
        "attention/ring_plan",
        "attention/ulysses",
        "linear_attention/context_parallel",
        "moe/expert_parallel",
        "moe/expert_transport",
    )
    of_inputs, makes_ops_of_others, of_the_linker = "rope/tables", "loss/kind", "cpu/portable.cpp"
    modules = (*of_several_devices, of_inputs, makes_ops_of_others)
    apart = {sources.PACKAGE / "ops" / f"{name}.py" for name in modules}
    apart.add(sources.CSRC / of_the_linker)
    assert {p for p in kernels - seen if p.name != "__init__.py"} <= apart


def test_results_of_interpreted_kernels_are_of_everything(monkeypatch):
    for said, device in (("1", None), ("0", "cpu")):
        monkeypatch.setenv("TRITON_INTERPRET", said)
        assert sources.of_measured(OPS["rope"], "cpu") == sources.digest(OPS["rope"], device)
        assert sources.of_measured(OPS["rope"], "cuda") == sources.digest(OPS["rope"], "cuda")


def test_an_edit_of_a_gpus_kernel_makes_no_result_of_a_cpu_stale_nor_the_other_way_round(copied):
    def both(op):
        sources.digest.cache_clear()
        return [sources.digest(OPS[op], device) for device in ("cpu", "cuda")]

    other, before = both("route"), both("rmsnorm")
    for name, stale in (
        ("tilewright/kernels/norm/rmsnorm_triton.py", [False, True]),
        ("tilewright/kernels/norm/rmsnorm_cute.py", [False, True]),
        ("csrc/cpu/rmsnorm.cpp", [True, False]),
        ("tilewright/kernels/norm/operators.py", [True, True]),
        ("tilewright/ops/norm/rmsnorm.py", [True, True]),
    ):
        add_a_name(copied / name)
        after = both("rmsnorm")
        assert [a != b for a, b in zip(after, before, strict=True)] == stale, name
        before = after
    assert both("route") == other


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
    add_a_name(moved)
    after = digests()
    assert {n for n in before if after[n] != before[n]} == set(OPS)


def test_a_damaged_line_is_measured_again_a_broken_result_is_exit_code_1_a_missing_one_3(
    tmp_path, forks
):
    file, name = tmp_path / store.FILE, "parity/rmsnorm.ragged"
    assert suite_command(tmp_path, PARITY + "ragged") == 0
    whole = file.read_text()
    for damaged in (whole[: len(whole) // 2], whole.replace('"unit"', "unit", 1)):
        file.write_text(damaged)
        assert suite_command(tmp_path, PARITY + "ragged") == 0
        assert set(stored(tmp_path)) == {"suite", name}
    document = stored(tmp_path)[name]
    document["results"][0].update(status="broken", reason="grad x: error 1")
    store.append(file, name, document)
    assert suite_command(tmp_path, PARITY + "ragged") == 1
    assert suite_command(tmp_path, "--minutes 0.05 --op rope --stage parity --case gqa") == 3


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--stage party", "unknown 'party'; did you mean 'parity'? have"),
        ("--minutes 0", "at least 0.05, got '0'"),
        ("--stage graph", "nothing to do: no op of --op"),
        ("--op rope --case ragged --stage time", "nothing to do"),
    ],
)
def test_bad_arguments_are_named(argv, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        suite_command(tmp_path, f"--minutes 1 {argv}")
    assert message in capsys.readouterr().err


# ---- launch configurations and their search


def tunable(pass_name="forward"):
    return Tunable(
        "fake",
        "step",
        ("D", "itemsize"),
        pass_name,
        lambda D, itemsize: {"WAIT": 4},
        lambda D, itemsize: [{"WAIT": w} for w in (1, 2, 4, 9)],
    )


CPU = torch.device("cpu")


def write_table(root, config, key=None, device="a-cpu"):
    launches = {"step": [{"key": key or {"D": 64, "itemsize": 4}, "config": config}]}
    table = {"schema": 1, "device": device, "launches": launches}
    store.write_json(root / device / "fake.json", table)


@pytest.fixture
def tables(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    monkeypatch.setattr(tuning, "device_folder", lambda device: "a-cpu")
    tuning.table.cache_clear()
    yield tmp_path
    tuning.table.cache_clear()


def test_a_tuned_entry_wins_over_the_heuristic_for_its_key_and_device_alone(tables, monkeypatch):
    write_table(tables, {"WAIT": 1})
    t = tunable()
    assert t.config(CPU, 64, 4) == {"WAIT": 1} and t.config(CPU, 65, 4) == {"WAIT": 4}
    with t.override(CPU, (64, 4), {"WAIT": 9}):
        assert t.config(CPU, 64, 4) == {"WAIT": 9}
    assert t.config(CPU, 64, 4) == {"WAIT": 1}
    tuning.table.cache_clear()
    monkeypatch.setattr(tuning, "device_folder", lambda device: "another")
    assert tunable().config(CPU, 64, 4) == {"WAIT": 4}


def test_a_table_that_no_launch_could_use_is_refused(tables):
    (tables / "a-cpu").mkdir()
    (tables / "a-cpu/fake.json").write_text('{"schema": 1, "launches": {"step": [{"key": 3}]}}')
    with pytest.raises(ValueError, match=r"a-cpu.fake\.json: not a table"):
        tunable().config(CPU, 64, 4)
    write_table(tables, {"STALL": 1})
    said = r"fake\.json: step: the config .* must name \['WAIT'\], got \['STALL'\]"
    with pytest.raises(ValueError, match=said):
        tunable().config(CPU, 64, 4)
    with pytest.raises(ValueError, match="STALL"):
        list(tuning.tuned(tunable()))
    write_table(tables, {"WAIT": 1}, key={"D": 64})
    with pytest.raises(ValueError, match="itemsize"):
        list(tuning.tuned(tunable()))


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_every_candidate_names_what_the_heuristic_does_and_committed_tables_have_candidates(op):
    """What a search does not try was not found by one."""
    for t in (t for impl in op.implementations for t in impl.tunables()):
        assert {t.op, op.name} <= set(OPS) and t.pass_name in PASSES
        candidates = {key: t.candidates(**t.named(key)) for key in t.keys}
        for key, found in candidates.items():
            assert found[0] == t.heuristic(**t.named(key))
        assert not t.keys or any(len(found) > 1 for found in candidates.values())
        for folder, key, config in tuning.tuned(t):
            assert folder and config in t.candidates(**key)


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

    return t, fake_op({"tunables": lambda: (t,), "dtypes": (dtype,)}, fake=compute)


def searched(monkeypatch, spoil=()):
    t, op = waiting(monkeypatch, spoil, torch.float32)
    impl, case = op.implementations[0], op.cases[0]
    ((asked, key),) = launches.requested_keys(op, impl, case.make("cpu", torch.float32, 0))
    assert asked is t and key == (100, 4)
    return tune.search(op, impl, case, torch.float32, t, key, "cpu", rounds=5)


def test_the_fastest_constants_that_are_right_are_found(tables, monkeypatch):
    entry = searched(monkeypatch)
    assert entry["config"] == {"WAIT": 1} and entry["heuristic"] == {"WAIT": 4}
    assert entry["median_us"] < entry["heuristic_us"]
    assert len(entry["tried"]) == 4 and not entry["rejected"]
    entry = searched(monkeypatch, spoil=(1,))
    assert entry["config"] == {"WAIT": 2}
    [rejected] = entry["rejected"]
    assert rejected["config"] == {"WAIT": 1} and "exceeds" in rejected["reason"]


def test_found_constants_reach_the_launchers(tables, tmp_path):
    meta = {**DATED, "commit": "c", "dirty": False}
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
    older = {"meta": {**meta, "source": "0"}, "entries": [{**entry, "config": {"WAIT": 1}}]}
    found = {"search/x": {"meta": meta, "entries": [entry]}, "search/old": older}
    write_table(tables, {"WAIT": 9}, key={"D": 65, "itemsize": 4})
    tuning.table.cache_clear()
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
        same = {"config": {"W": 1}, "heuristic": {"W": 1}, "median_us": 1.0, "heuristic_us": 1.0}
        return {"key": tunable.named(key), **same}

    monkeypatch.setattr(tune, "search", search)
    monkeypatch.setattr(launches, "requested_keys", lambda *_: [(t, (8,)) for t in asked])
    op = fake_op(right=rmsnorm_eager)
    given = op, op.implementations[0], op.cases[1], "cpu", torch.float32, tmp_path

    def go():
        unit = tune.unit(*given, DATED)
        work(tmp_path, unit, meta=DATED, since=LATER)
        document = value(tmp_path, unit.name)
        found = [e["launch"].removeprefix("fake/") for e in document["entries"]]
        return found, document.get("error"), document.get("unfinished")

    assert go() == (["one"], "MemoryError: full", None)
    assert go() == (["one", "two", "three"], None, None)
    assert seen == ["one", "two", "two", "three"]
    monkeypatch.setattr(sources, "digest", lambda op: "2")
    assert go()[0] == ["one", "two", "three"] and len(seen) == 7


def test_a_search_times_the_pass_that_the_launch_belongs_to(tables, monkeypatch):
    timed, called = {}, []

    def interleave(tasks, clock, **options):
        timed.update(tasks)
        return {i: timing.Timing.of([1.0]) for i in tasks}, {}

    def traced(*given):
        called.append("forward")
        y = rmsnorm_eager(*given)
        if y.requires_grad:
            y.register_hook(lambda g: called.append("backward"))
        return y

    op = fake_op(fake=traced)
    monkeypatch.setattr(timing, "interleave", interleave)
    given = op, op.implementations[0], op.cases[0], torch.float32, tunable("backward"), (100, 4)
    tune.search(*given, "cpu")
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
    stub, said = tmp_path / "python", tmp_path / "said"
    stub.write_text(
        f'#!/bin/sh\nsleep 600 &\necho "$CUDA_VISIBLE_DEVICES|$*|$!" >{tmp_path}/new\n'
        f"mv {tmp_path}/new {said}\nwait\n"
    )
    stub.chmod(0o755)
    waits = []

    class Impatient(subprocess.Popen):
        """Its limit has passed once the command is at work."""

        def wait(self, timeout=None):
            waits.append(timeout)
            if timeout is None:
                return super().wait()
            until(said.exists)
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
    devices, command, child = said.read_text().strip().split("|")
    until(lambda: not alive(child))
    gpu_cache = "-m bench gpu-cache --what search --arch 90 --name an H200 --op rope,rmsnorm "
    assert devices == "" and command.startswith(gpu_cache)
    assert f"--goals {tmp_path}" in command and "--minutes 2.00 " in command
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    said.unlink()
    search.compile_beforehand(["rope"], tmp_path, START + 600)
    assert not said.exists(), "kernels of another capability are not what is launched"


def test_searches_of_another_device_or_with_other_versions_are_none():
    entry, found = {"launch": "fake/step", "key": {"D": 1}}, {}
    for field in ("none", "device", "versions", "source"):
        found[field] = {"meta": {**DATED, field: "other"}, "entries": [entry]}
    assert [e["unit"] for e in tune_tables.entries_in(found, DATED)] == ["none"]


def test_constants_that_end_the_process_are_not_tried_again(tables, tmp_path, monkeypatch):
    """A candidate is on disk before it is called; after a crash it is rejected, and the search
    continues.
    """
    t, override = tunable(), Tunable.override
    op = fake_op(fake=lambda x, *rest: rmsnorm_eager(x, *rest))
    monkeypatch.setattr(launches, "requested_keys", lambda *_: [(t, (100, 4))])
    monkeypatch.setattr(tune, "search", functools.partial(tune.search, rounds=1, seconds=0.0))
    given = op, op.implementations[0], op.cases[1], "cpu", torch.float32, tmp_path
    unit = tune.unit(*given, DATED)

    def fatal(self, device, key, config):
        if config == {"WAIT": 2}:
            raise timing.DeviceLost("an illegal memory access")
        return override(self, device, key, config)

    monkeypatch.setattr(Tunable, "override", fatal)
    saved = {"meta": unit.about(DATED), "error": "an illegal memory access"}
    monkeypatch.setattr(runner, "save", saved.update)
    with pytest.raises(timing.DeviceLost):
        unit.make()
    assert saved["trying"][2] == {"WAIT": 2}
    store.append(tmp_path / store.FILE, unit.name, saved)
    (entry,) = unit.make()["entries"]
    assert entry["rejected"] == [{"config": {"WAIT": 2}, "reason": "ended its process"}]
    assert len(entry["tried"]) == 4


def of_triton(op, kwargs):
    """The passes of an op's Triton kernels."""
    return run.passes(
        Provider("triton", functools.partial(op.public, implementation="triton")), kwargs
    )


def test_a_launch_is_timed_by_itself(monkeypatch):
    """The passes of moe_mlp start the same kernel for several launches. Only the one asked about is
    timed.
    """
    op = OPS["moe_mlp"]
    kwargs = next(c for c in op.cases if "contract" in c.tags).make("cpu", torch.float32, 0)
    passes = of_triton(op, kwargs)
    found = launches.requested_keys(op, op.implementation("triton"), kwargs)
    asked = [(t, k) for t, k in found if t.op in ("moe_mlp", "grouped_gemm")]
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
        weights = t.launch == "backward_weight"
        assert options["GROUP"] == 3 and name == ("_dweight" if weights else "_gemm")
        epilogue = {"up_swiglu": 1, "down_dswiglu": 2, "backward_weight": None}.get(t.launch, 0)
        assert options.get("EPILOGUE") == epilogue, t.name
        started.clear()


def test_a_launch_that_no_pass_starts_is_said():
    op = OPS["rmsnorm"]
    passes = of_triton(op, RAGGED.make("cpu", torch.float32, 0))
    forward, key = op.implementation("triton").tunables()[0], (99, 4, False)
    said = r"no pass of the op starts a kernel of rmsnorm/forward for .*'D': 99"
    with pytest.raises(RuntimeError, match=said):
        launches.timed(forward, key, forward.heuristic(*key), CPU, passes)()


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
    asked = Variant("a shorter wait", "rmsnorm", "tiny", "fake/step", {"WAIT": other})
    of_another = replace(asked, name="of another op", op="rope")
    monkeypatch.setattr(variants, "VARIANTS", (asked, of_another))
    (unit,) = planned(op, "ab")
    assert unit.name == "ab/rmsnorm.tiny.a-shorter-wait"
    document = unit.make()
    assert [r["status"] for r in document["results"]] == ["holds", status]
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


# A timed case of one round.
ONE_ROUND = "--op rmsnorm --case gemma-3-4b --dtype float32 --provider eager,cpp --rounds 1 "
ONE_ROUND += "--sample-ms 0"


def test_without_a_roofline_nothing_is_timed_and_the_next_call_measures_it(
    tmp_path, monkeypatch, forks
):
    failed = {
        "meta": run.metadata("cpu", run.Settings(), []),
        "options": dict(roofline_unit("cpu").options),
        "roofline": None,
        "error": "out of memory",
    }

    def fail(*_, **__):
        store.append(tmp_path / store.FILE, "roofline", failed)
        return True

    fail()
    arguments = f"--minutes 50 --stage time {ONE_ROUND}"
    with monkeypatch.context() as patch:
        patch.setattr(runner, "supervise", fail)
        assert suite_command(tmp_path, arguments) == 1
    assert set(stored(tmp_path)) == {"suite", "roofline"}
    assert suite_command(tmp_path, arguments) == 0
    document = stored(tmp_path)["time/rmsnorm.gemma-3-4b.float32"]
    assert next(r for r in document["rows"] if r["auto"])["status"] == "ok"
    assert {r["provider"] for r in document["rows"]} == {"eager", "cpp"}
    assert "--task" not in document["meta"]["argv"] and document["meta"]["argv"][0] == "suite"


@pytest.mark.parametrize(
    "argv, message",
    [
        ("search --goals nowhere", "argument --goals: nowhere has no results of the suite"),
        ("search --goals . --only a.b.c", "argument --only: search takes the cases"),
        ("search --goal .", "python -m bench search: error: "),
        ("gate-variants --space", "--space and --update are of the registry's own kernels"),
    ],
)
def test_what_a_command_does_not_do_is_refused(argv, message, capsys):
    minutes = " --minutes 1 --device cpu" if argv.startswith("search") else ""
    with pytest.raises(SystemExit) as ended:
        main(f"{argv}{minutes}".split())
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_search_without_a_missed_goal_says_so(tmp_path, capsys):
    (tmp_path / store.FILE).touch()
    argv = ["search", "--goals", str(tmp_path), "--minutes", "1", "--device", "cpu"]
    assert main(argv) == 0
    assert "was missed: nothing is searched" in capsys.readouterr().out


def test_a_variant_that_is_refused_is_no_failure(monkeypatch):
    judge = contract.judge

    def refusing(op, name, kwargs, by):
        if name == "torch":
            raise ImplementationUnavailable("rmsnorm[torch]: has no such variant")
        return judge(op, name, kwargs, by)

    monkeypatch.setattr(contract, "judge", refusing)
    names = ["torch", "eager"]
    results = checks.parity_results(RMSNORM, RAGGED, "cpu", torch.float32, names)
    found = {r["implementation"]: (r["status"], r["reason"]) for r in results}
    assert found["torch"][0] == "unavailable" and "no such variant" in found["torch"][1]
    assert found["eager"][0] == "holds"
