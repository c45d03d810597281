"""Runs ranks: under torchrun, as a user does, or forked from a process that has imported what they
need, which takes most of a launch.
"""

import contextlib
import ctypes
import gc
import json
import os
import pathlib
import signal
import subprocess
import sys

import distributed_worker
import numpy as np
import torch
import torch.distributed as dist
from helpers import STARTS, processes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api as launcher

from tilewright.trainer import train
from tilewright.trainer.config import load
from tilewright.trainer.parallel.mesh import Mesh

ROOT = pathlib.Path(__file__).parents[2]


def torchrun(number, *script):
    """torchrun's process, with that many ranks on gloo."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests/lib"))),
    }
    STARTS.append(number)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return subprocess.Popen(
        [sys.executable, *start, str(number), *script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _keep_memory():
    """Freed memory stays this process's: faults of pages that it gets again for each large tensor,
    and for each small one at the end of the heap, take a third of a rank's time.
    """
    with contextlib.suppress(AttributeError):  # without glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def _rank(rank, number, folder, port):
    """What torchrun gives a rank, whose store is its agent's."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(number),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with pathlib.Path(folder, "said.txt").open("a") as said:
        os.dup2(said.fileno(), 1)
    torch.set_num_threads(1)
    _keep_memory()
    distributed_worker.main(folder)


def _agent(_, arguments, nodes, number, port, folder, main):
    """An agent of torchrun, whose ranks are forked."""
    os.setsid()
    gc.freeze()  # what has been imported: each run collects garbage
    config = launcher.LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=number,
        run_id="run",
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port}",
        rdzv_configs={"is_host": False},
        local_addr="localhost",
        max_restarts=0,
        start_method="fork",
    )
    try:
        launcher.elastic_launch(config, _of_agent)(arguments, folder, main)
    except ChildFailedError as error:  # torchrun's last words
        pathlib.Path(folder, "cause.txt").write_text(str(error))


def _of_agent(arguments, folder, main):
    with pathlib.Path(folder, f"said_{os.environ['RANK']}.txt").open("a", buffering=1) as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        sys.stdout = sys.stderr = said
        torch.set_num_threads(1)
        _keep_memory()
        code = (main or train.main)(arguments)
        if code:  # the agent waits for what a function returns
            said.flush()
            os._exit(code)


@contextlib.contextmanager
def agents(nodes, number, folder, arguments, main=None):
    """torchrun's agents, one for each node, with that many ranks each, which run the trainer: as
    its command does, but forked. Yields the agents' processes; what rank N says is in said_N.txt.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    STARTS.append(nodes * number)
    context = torch.multiprocessing.start_processes(
        _agent,
        (arguments, nodes, number, store.port, str(folder), main),
        nprocs=nodes,
        join=False,
        start_method="forkserver",
    )
    try:
        yield context.processes
    finally:
        for process in context.processes:
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


# Two steps at a rate that shows a wrong scale of gradients, which AdamW hides, and with clipping.
STEEP = {
    "train__optimizer": "sgd",
    "train__lr": 0.5,
    "train__max_grad_norm": 0.2,
    "train__max_steps": 2,
    "data__pad_to_multiple_of": 1,
}


def fsdp2(**fields):
    """Arguments of a sharded run: fields of `train`, and of other sections as model__merge_qkv."""
    names = {name: name.replace("__", ".") if "__" in name else f"train.{name}" for name in fields}
    given = [f"--{names[name]}={json.dumps(value)}" for name, value in fields.items()]
    return ["--train.data_parallel_mode=fsdp2", *given]


def run_modes(number, folder, modes):
    """Runs distributed_worker.py on these modes in that many ranks; returns what they print."""
    (folder / "modes.json").write_text(json.dumps(modes))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    processes(number, _rank, str(folder), store.port)
    return (folder / "said.txt").read_text()


def selected(request, modes, *always):
    """The modes of the tests that are to run, and `always`. Each mode is the parameter `mode` of a
    test of the fixture's module.
    """
    items = [i for i in request.session.items if i.path == request.path and hasattr(i, "callspec")]
    run = {i.callspec.params.get("mode") for i in items}
    return {mode: given for mode, given in modes.items() if mode in run.union(always)}


def together_and_alone(folder, path, bins, modes, alone):
    """Several steps in four ranks in each of these modes, and in one process with each of the
    arguments in `alone`: `found[mode]`, `alone[key]`.
    """
    torch.save(bins, folder / "bins.pt")
    run_modes(4, folder, modes)
    found = {mode: torch.load(folder / f"{mode}.pt") for mode in modes}
    return found, {
        key: distributed_worker.several_steps(
            load(path, ["--train.micro_batch_size=4", *options]), Mesh(), bins
        )[1]
        for key, options in alone.items()
    }


def same_training(found, want, rel=1e-5, weights=None):
    """Losses, norms before clipping, clipped gradients and weights of two runs of `several_steps`.

    rel: to the largest number of a tensor. weights: that of weights; for AdamW, which divides by
    the gradient's size and so amplifies rounding errors of small gradients.
    """
    np.testing.assert_allclose(found["loss"], want["loss"], rtol=1e-5)
    np.testing.assert_allclose(found["norm"], want["norm"], rtol=rel)
    for kind, bound in (("grads", rel), ("weights", weights or rel)):
        assert found[kind].keys() == want[kind].keys()
        for name, t in want[kind].items():
            away = (found[kind][name] - t).abs().max()
            assert away <= bound * t.abs().max(), f"{kind} {name}: {away}"


def nearly_same_training(found, want):
    """Losses and norms of a run in bfloat16, which differ from those of float32, but little (3e-5
    and 6e-4 at most).
    """
    # One loss alone may round to the same number.
    assert (found["loss"], found["norm"]) != (want["loss"], want["norm"])
    np.testing.assert_allclose(found["loss"], want["loss"], rtol=3e-4)
    np.testing.assert_allclose(found["norm"], want["norm"], rtol=6e-3)


def metrics(folder):
    """The rows of steps that a run has written."""
    lines = pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]
