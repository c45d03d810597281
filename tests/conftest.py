"""Fixtures shared by all tests. Triton's interpreter must be selected before any kernel module is
imported.
"""

import atexit
import collections
import contextlib
import gc
import importlib.metadata
import logging
import os
import re
import sys

# Threads of several tests at a time would wait for each other. Those that C++ kernels divide work
# among are a test's own matter.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Inductor would start a process that compiles, and imports torch, for each process of the tests.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Dynamo would collect garbage after each compilation.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

import pytest

gc.disable()  # until the tests have been collected: most of what that allocates stays

# Dynamo would flush the processor's caches after each compilation, to measure for its log how long
# the guards take: a tenth of the time of small compilations.
torch._C._dynamo.guards.profile_guard_manager = lambda *_: 0.0

# torch would write a structured trace of compilations, since its logger has handlers: pytest's.
# With sizes that depend on data, that takes up to a tenth of the time.
logging.getLogger("torch.__trace").addHandler = lambda handler: None

if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ModuleNotFoundError):  # without Triton
        import interpreter

        interpreter.install()


def pytest_report_header():
    """The versions of what the tests compare with, for a log that is read later."""
    names = "torch triton transformers peft trl accelerate bitsandbytes torchao compressed-tensors datasets kernels"
    found = []
    for name in names.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def pytest_sessionstart(session):
    import helpers

    if session.config.option.collectonly:
        return
    for name in helpers.REQUIRED:
        if reason := helpers.cannot_run(name):
            pytest.exit(f"TILEWRIGHT_REQUIRE: {name} cannot run here: {reason}", returncode=1)


def pytest_addoption(parser):
    parser.addoption("--shard", metavar="I/N", help="only the test files of this shard of so many")
    text = "leave out what is marked `table` (tests/lib/sweeps.py), as `make test` does"
    parser.addoption("--fixed-part", action="store_true", help=text)


def pytest_collection_modifyitems(config, items):
    from tests.lib import shards

    files = {item: os.path.relpath(item.path, shards.ROOT) for item in items}
    at = {file: i for i, file in enumerate(shards.ordered(files.values()))}
    if config.getoption("--fixed-part"):
        left = [item for item in items if item.get_closest_marker("table")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("table")]
    if given := config.getoption("--shard"):
        try:
            kept = shards.shard(at, *shards.parsed(given))
        except ValueError as error:
            raise pytest.UsageError(f"--shard: {error}") from None
        config.hook.pytest_deselected(items=[i for i in items if files[i] not in kept])
        items[:] = [item for item in items if files[item] in kept]
    items.sort(key=lambda item: at[files[item]])


KEPT = [0]


def _keep():
    """Modules and collected tests, millions of objects, are garbage at no time: no collection goes
    through them, which would take seconds. Each run of the trainer is two.
    """
    gc.freeze()
    KEPT.append(len(sys.modules))


def pytest_collection_finish():
    _keep()
    gc.set_threshold(100_000, 20, 100)  # Python's own took a sixth of the time of test_operators
    gc.enable()
    atexit.register(gc.unfreeze)  # extension modules check that nothing is left


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    import helpers

    report = yield
    # Those of test_check_layout are started by the tool that it tests.
    if helpers.STARTS or item.path.stem == "test_check_layout":
        report.user_properties.append(("ranks", True))
        helpers.STARTS.clear()
    return report


def pytest_terminal_summary(terminalreporter):
    """What was left out, by reason; and the time of the tests that start ranks."""
    tell, stats = terminalreporter.write_line, terminalreporter.stats
    reasons = collections.Counter(reason_of(report) for report in stats.get("skipped", ()))
    for reason, n in sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0])):
        tell(f"left out: {n} {reason}")
    found = [r for rs in stats.values() for r in rs if hasattr(r, "duration")]
    ranks = [r for r in found if ("ranks", True) in r.user_properties]
    if len(found) > 1000:
        took = [sum(r.duration for r in reports) for reports in (ranks, found)]
        tests = len({r.nodeid for r in ranks})
        tell(
            f"{took[0]:.0f} s of {took[1]:.0f} s of all processes in {tests} tests that start ranks"
        )


def reason_of(report):
    """Without what differs from case to case of one reason."""
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    said = re.sub(r" \(usable here: .*\)$", "", said.removeprefix("Skipped: "))
    return re.sub(r"^(\w+\[\w+\]: does not compute ).*", r"\1what a case asks for", said)


@pytest.fixture(scope="session")
def compiling():
    """The command of a Python that compiles Triton's kernels, as none does that interprets them. It
    is forked from one that has imported torch, Dynamo and Triton, and nothing of Tilewright.
    """
    import forked

    # What each would do: it hashes Triton's library, and imports its frontends.
    imports = """
import contextlib, torch._dynamo
with contextlib.suppress(ModuleNotFoundError):  # without Triton
    import triton.compiler.code_generator, triton.experimental.gluon, triton.runtime.cache
    getattr(triton.runtime.cache, "triton_key", lambda: None)()
assert "tilewright" not in sys.modules
"""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            (root, *(os.path.join(root, folder) for folder in ("lab", "tests", "tests/lib")))
        ),
        "TRITON_INTERPRET": "0",
    }
    with forked.python(imports, root, variables) as command:
        yield command


@pytest.fixture(autouse=True)
def _seeded():
    # torch.manual_seed records a stack for each kind of device, a millisecond for each test.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def _levels():
    """What a test, or a package that it imports, sets of these loggers would hide messages that
    later tests look for.
    """
    loggers = [logging.getLogger(), logging.getLogger("tilewright")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def _imported():
    yield
    if len(sys.modules) > KEPT[-1] + 100:
        gc.collect()
        _keep()


@pytest.fixture
def poisoned():
    from tilewright.bench import contract

    with contract.poisoned():
        yield
