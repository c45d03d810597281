"""First calls, registrations and blocks of `use` in several threads, tasks and generators."""

import asyncio
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import tilewright
from tilewright import Implementation, ops, selection
from tilewright.core.registry import PINS, Op
from tilewright.ops import OPS

THREADS = 8


def python(source):
    """Runs it in a new process, in which no op has been called."""
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def test_first_calls_of_every_op_come_from_eight_threads():
    """Each thread starts with another op, and all call all: every usable implementation is loaded
    by several threads at once.
    """
    source = """
        import sys, threading
        import torch
        sys.setswitchinterval(1e-5)
        from tilewright.ops import OPS

        errors, barrier = [], threading.Barrier(THREADS)
        ops = list(OPS.values())

        def first_calls(number):
            barrier.wait()
            for op in ops[number:] + ops[:number]:
                for implementation in op.implementations:
                    if implementation.why_not("cpu", torch.float32) is None:
                        try:
                            op.resolve(implementation.name, "cpu", torch.float32)
                        except Exception as error:
                            errors.append(f"{op.name}[{implementation.name}]: {error}")

        threads = [threading.Thread(target=first_calls, args=(n,)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print("\\n".join(errors) or "no error", sum(len(op.usable("cpu")) for op in ops))
    """.replace("THREADS", str(THREADS))
    text, _, usable = python(source).strip().rpartition(" ")
    assert text == "no error" and int(usable) > 2 * len(OPS)


def test_installed_implementations_are_there_for_every_thread():
    """An entry point whose module imports slowly, as those of large packages do."""
    source = """
        import importlib.metadata, sys, threading
        import torch
        from tilewright import Implementation, ops
        from tilewright.core import installed
        from tilewright.ops import OPS

        importing, go_on = threading.Event(), threading.Event()

        class Point:
            name, value, group, dist, module = "rmsnorm.slow", "", "", None, "slow"

            def load(self):
                importing.set()
                go_on.wait(5)
                return Implementation("slow", lambda: None, devices=())

        importlib.metadata.entry_points = lambda group: [Point()]
        names = []
        threads = [
            threading.Thread(target=lambda: names.append(OPS["rmsnorm"].names())) for _ in range(8)
        ]
        threads[0].start()
        importing.wait()
        for thread in threads[1:]:
            thread.start()
        go_on.set()
        for thread in threads:
            thread.join()
        print(len(names), all("slow" in n for n in names))
    """
    assert python(source).strip() == "8 True"


# ---- blocks of `use`


def test_blocks_that_overlap_leave_no_pin():
    def block(name):
        with tilewright.use(rmsnorm=name):
            yield PINS.get("rmsnorm")

    first, second = block("eager"), block("torch")
    assert (next(first), next(second)) == ("eager", "torch")
    first.close()
    assert PINS == {"rmsnorm": "torch"}
    second.close()
    assert PINS == {}
    first, second = block("eager"), block("torch")
    next(first), next(second)
    second.close()
    assert PINS == {"rmsnorm": "eager"}
    first.close()
    assert PINS == {}


def test_the_same_block_twice_at_once():
    with tilewright.use("eager"):
        inside = dict(PINS)
        with tilewright.use("eager"):
            assert inside == PINS
        assert inside == PINS
    assert PINS == {}


def test_tasks_that_overlap_leave_no_pin():
    async def task(name, entered, leave):
        with tilewright.use(rope=name):
            entered.set()
            await leave.wait()

    async def both():
        entered, leave = [[asyncio.Event() for _ in range(2)] for _ in range(2)]
        tasks = [
            asyncio.create_task(task(*arguments))
            for arguments in zip(("eager", "cpp"), entered, leave, strict=True)
        ]
        for event in entered:
            await event.wait()
        assert PINS == {"rope": "cpp"}
        for event, running in zip(leave, tasks, strict=True):
            event.set()
            await running
        return dict(PINS)

    assert asyncio.run(both()) == {} == PINS


def test_threads_that_overlap_leave_no_pin():
    barrier = threading.Barrier(THREADS)

    def run(number):
        barrier.wait()
        for n in range(50):
            with tilewright.use(rmsnorm=("eager", "torch")[(number + n) % 2]):
                pass

    threads = [threading.Thread(target=run, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert PINS == {}


# ---- registration during use


@pytest.fixture
def op(monkeypatch):
    """An op of the test's own, whose eager twin returns its name."""
    monkeypatch.setattr(tilewright.ops, "OPS", {**OPS})
    made = Op("planted", lambda x: made.pick("auto", x)(x), lambda x: "eager", ())
    ops.OPS["planted"] = made
    return made


def first_of_all(load=lambda: lambda x: "added"):
    return Implementation("added", load, devices=("cpu",))


def test_blocks_that_watch_may_overlap():
    x, weight = torch.ones(2, 4), torch.ones(4)
    seen: dict[str, list[str]] = {"one": [], "other": []}
    one = selection.watching(lambda op, name: seen["one"].append(op))
    other = selection.watching(lambda op, name: seen["other"].append(op))
    one.__enter__()
    ops.rmsnorm(x, weight)
    other.__enter__()
    ops.rmsnorm(x, weight)
    one.__exit__(None, None, None)
    ops.rmsnorm(x, weight)
    ops.rmsnorm(x, weight)
    other.__exit__(None, None, None)
    ops.rmsnorm(x, weight)
    assert len(seen["one"]) == 2 and len(seen["other"]) == 3
    table = OPS["rmsnorm"]._table
    ops.rmsnorm(x, weight)
    assert table is OPS["rmsnorm"]._table and len(table) == 1, "choices are cached again"


def test_auto_takes_what_was_registered_within_a_block_that_watches(op):
    x = torch.ones(1)
    assert op.public(x) == "eager"
    with tilewright.selection.watching(lambda *_: None):
        op.add(first_of_all())
        assert op.public(x) == "added"
    assert op.public(x) == "added"


def test_auto_takes_what_was_registered_while_it_was_chosen(op):
    """A thread chooses among the former implementations while another one registers."""
    choosing, registered = threading.Event(), threading.Event()

    def slow():
        choosing.set()
        registered.wait(10)
        return "not here"

    slow_one = Implementation("slow", lambda: None, lambda _: slow(), devices=("cpu",))
    op.add(slow_one)
    x, results = torch.ones(1), []
    thread = threading.Thread(target=lambda: results.append(op.public(x)))
    thread.start()
    choosing.wait()
    op.add(first_of_all(), before="slow")
    registered.set()
    thread.join()
    assert results == ["eager"], "chosen before"
    assert op.public(x) == "added"
