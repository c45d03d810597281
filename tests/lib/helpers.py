"""Helpers shared by several test modules."""

import contextlib
import gc
import importlib
import os
import sys
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.core import platform
from tilewright.core.registry import FLOATS, ImplementationUnavailable, short

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Implementations that must run, so that the suite is not green without them: `make test` sets
# TILEWRIGHT_REQUIRE=cpp,triton, and a GPU job TILEWRIGHT_REQUIRE=triton.
REQUIRED = sorted(filter(None, os.environ.get("TILEWRIGHT_REQUIRE", "").split(",")))


def cannot_run(name):
    """Why implementations of this name cannot run here; None if they can."""
    probes = {"cpp": platform.no_cpp, "cute": platform.no_cute, "triton": platform.no_triton}
    if name not in probes:
        return f"accepted are {', '.join(probes)}"
    try:
        if name != "cpp":
            importlib.import_module({"cute": "cutlass"}.get(name, name))
    except Exception as error:  # of any kind: a broken installation's
        return f"{type(error).__name__}: {error}"
    return probes[name](DEVICE)


def with_dtypes(op, names=None, dtypes=FLOATS):
    """Parametrizes a test over implementations and the dtypes of these that each takes."""
    return pytest.mark.parametrize(
        "name, dtype",
        [
            pytest.param(name, dtype, id=f"{name}-{short(dtype)}")
            for name in names or op.names()
            for dtype in dtypes
            if dtype in op.implementation(name).dtypes
        ],
    )


def skip_unless_usable(op, name, dtype):
    impl = op.implementation(name)
    if dtype not in impl.dtypes:
        pytest.skip(impl.why_not(DEVICE, dtype) or "dtype")
    if name == "triton" and DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip(
            "Triton's interpreter truncates on a cast to bfloat16; see test_triton_ptx.py for bf16"
        )
    reason = impl.why_not(DEVICE, dtype)
    if reason and name in REQUIRED:
        pytest.fail(f"{op.name}[{name}] was required: {reason}")
    if reason:
        pytest.skip(reason)


@contextlib.contextmanager
def skip_if_refused():
    """Skips a variant that the implementation rejects with a reason."""
    try:
        yield
    except ImplementationUnavailable as error:
        pytest.skip(str(error))


class OperatorNames(TorchDispatchMode):
    """names: of the operators that ran inside the block."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def operators_of(fn):
    """Counts calls of this package's operators in fn() by name, nested ones included."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        fn()
    return {
        event.key.removeprefix("tilewright::"): event.count
        for event in profile.key_averages()
        if event.key.startswith("tilewright::")
    }


def pause():
    """Between two looks at what another process does."""
    time.sleep(0.02)


def until(seen, looks=30_000):
    """Waits for seen() to be true, and returns it. Looks are counted, not seconds, and so many (ten
    minutes or more) are for what hangs.
    """
    for _ in range(looks):
        if found := seen():
            return found
        pause()
    pytest.fail(f"not seen in {looks} looks")


def join_group(rank, world, folder):
    """Joins the gloo group of all ranks. Called in each process of `processes`."""
    store = torch.distributed.FileStore(f"{folder}/store", world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return torch.distributed.group.WORLD


def leave():
    """Ends this process with exit code 0, without finalizing the interpreter. A gloo thread may
    still hold tensors of the last collective; it takes the GIL of the finalizing interpreter to
    release them, and the process aborts ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# Processes are forked from one that has imported these, which takes a process some seconds.
torch.multiprocessing.set_forkserver_preload(
    [
        "pytest",
        "triton",
        "datasets",
        "tilewright.bench.contract",
        "tilewright.nn",
        "tilewright.trainer.train",
        "torch._dynamo.testing",
        "transformers.models.llama.modeling_llama",
        "tests.lib.preloaded",
    ]
)


def _and_leave(rank, fn, environment, *arguments):
    os.environ.update(environment)  # the process forked from has that of its start
    gc.freeze()  # what has been imported: each run collects garbage
    fn(rank, *arguments)
    leave()


@contextlib.contextmanager
def threads(number):
    """With that many OpenMP threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# One item for each time that this process has started ranks: conftest.py sums such tests' time.
STARTS = []


def processes(number, fn, *arguments):
    """Runs fn(rank, number, *arguments) in that many processes, which are terminated if the test
    fails. The test's own time limit applies.
    """
    STARTS.append(number)
    context = torch.multiprocessing.start_processes(
        _and_leave,
        (fn, dict(os.environ), number, *arguments),
        nprocs=number,
        join=False,
        start_method="forkserver",
    )
    try:
        while not context.join():
            pass
    finally:
        for process in context.processes:
            process.kill()  # no effect if it has exited


def two_processes(fn, *arguments):
    processes(2, fn, *arguments)


def forked_processes(number, fn, *arguments):
    """As `processes`, but forked from one that imports fn's module, which takes a while."""
    processes(1, _fork, fn, number, *arguments)


def _fork(rank, world, fn, number, *arguments):
    torch.multiprocessing.start_processes(
        _and_leave, (fn, {}, number, *arguments), nprocs=number, start_method="fork"
    )


# ---- losses, as they run on a GPU


def as_on_a_gpu(monkeypatch):
    """Skips checks of targets, as for CUDA tensors, and uses PyTorch's products."""
    monkeypatch.setattr("tilewright.ops.loss.targets._may_read", lambda target: False)
    monkeypatch.setattr("tilewright.ops.products.takes", lambda dtype: False)


# PyTorch operators without a launch: allocations and views, and wrappers whose copy, if any, is an
# operator of its own.
WITHOUT_A_LAUNCH = {
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "view",
        "view_as",
        "reshape",
        "_reshape_alias",
        "as_strided",
        "detach",
        "alias",
        "slice",
        "select",
        "t",
        "transpose",
        "expand",
        "contiguous",
        "to",
        "unsqueeze",
        "result_type",
        "resolve_conj",
        "resolve_neg",
    )
}


def launches(monkeypatch, run, modules=None):
    """What run() would launch on a GPU, in order: kernels of modules by name, which are not run,
    and PyTorch's operators that compute something or synchronize.

    modules: what stands before the names of each module's; default: softmax_stats_triton, nothing.
    """
    if modules is None:
        from tilewright.kernels.loss import softmax_stats_triton

        as_on_a_gpu(monkeypatch)
        modules = {softmax_stats_triton: ""}

    class Kernel:
        def __init__(self, name, kernel):
            self.name, self.arg_names = name, kernel.arg_names

        def __getitem__(self, grid):
            return self

        def __call__(self, *args, **kwargs):
            with torch.profiler.record_function(f"kernel {self.name}"):
                pass

    for module, before in modules.items():
        for name, kernel in [*vars(module).items()]:
            if hasattr(kernel, "arg_names"):
                monkeypatch.setattr(module, name, Kernel(before + name, kernel))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    found, end = [], 0
    for event in sorted(profile.events(), key=lambda e: (e.time_range.start, -e.time_range.end)):
        if event.name.startswith("kernel "):
            found.append(event.name.removeprefix("kernel "))
        elif (
            event.name.startswith("aten::")
            and event.name not in WITHOUT_A_LAUNCH
            and event.time_range.start >= end
        ):
            found.append(event.name)
            end = event.time_range.end  # nested operators are part of it
    return found


def keep_tables(monkeypatch):
    """The test starts without this library's entries in transformers' tables of attentions, masks
    and experts, whatever ran before it, and leaves the tables as they were."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    for table in (AttentionInterface, AttentionMaskInterface, ExpertsInterface):
        others = {n: v for n, v in table._global_mapping.items() if not n.startswith("tilewright")}
        monkeypatch.setattr(table, "_global_mapping", others)


def specialized(tunable):
    """A launch's configuration of specialized warps; None if it has none."""
    found = (c for key in tunable.keys for c in tunable.compiled(**tunable.named(key)))
    return next((c for c in found if c.get("ROLES")), None)
