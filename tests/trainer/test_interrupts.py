"""A run that a signal or a failing rank ends: what is saved, what is said, and that all end."""

import contextlib
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess

import forked
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from helpers import until
from ranks import ROOT, agents, torchrun
from training import rows, run, tensors, write_config

from tilewright.trainer import interrupts, loop, train
from tilewright.trainer.checkpoint import checkpoint
from tilewright.trainer.engine import Engine
from tilewright.trainer.interrupts import Interrupts


@pytest.fixture(autouse=True)
def ctrl_c():
    """A shell's background job ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def at_step(number, action):
    """Engine.optim_step that first calls action() in that step of this process."""
    real, calls = Engine.optim_step, []

    def step(*arguments, **options):
        calls.append(1)
        if len(calls) == number:
            action()
        return real(*arguments, **options)

    return step


def numbers(folder):
    return [(r["step"], r["loss"], r["grad_norm"], r["tokens"]) for r in rows(folder)]


@pytest.mark.parametrize(
    "signum, asynchronous, workers",
    [(signal.SIGINT, False, 0), (signal.SIGTERM, True, 1)],
    ids=["ctrl-c", "sigterm"],
)
def test_a_signal_ends_a_run_after_its_step_and_a_checkpoint(
    signum, asynchronous, workers, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(interrupts, "SAME_SIGNAL", 600.0)  # seconds: also where this one waits
    options = {"train__save_async": asynchronous, "data__dataloader_num_workers": workers}
    run(write_config(tmp_path / "a", **options))
    path = write_config(tmp_path / "b", **options)

    def twice(*pids):  # from a scheduler, and passed on
        for pid in pids * 2:
            os.kill(pid, signum)

    watching, real = [], Interrupts.__init__

    def kept(self, ranks):
        real(self, ranks)
        watching.append(self)

    def own():  # a step of this model may end before the thread has read the signal
        twice(os.getpid())
        until(lambda: watching[-1].first)

    def workers_first():  # torchrun sends it to a rank and the loader's workers
        twice(*(p.pid for p in multiprocessing.active_children()))

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "optim_step", at_step(1, workers_first))
            patch.setattr(Engine, "optim_step", at_step(3, own))
            patch.setattr(Interrupts, "__init__", kept)
            assert train.main([path, "--train.seed", "42"]) == 128 + signum
    finally:
        dist.destroy_process_group()
    written = tmp_path / "b/out/checkpoints/global_step_3"
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        f"{signum.name} after step 3 of 6: {written} is written; to go on: python -m "
        f"tilewright.trainer.train {path} --train.seed 42 --train.load_checkpoint_path auto"
    )
    assert [p.name for p in written.parent.iterdir()] == ["global_step_3"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run(path, "--train.load_checkpoint_path=auto")
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    final = tensors(tmp_path / "b", 6)
    assert all(torch.equal(t, final[n]) for n, t in tensors(tmp_path / "a", 6).items())


def test_the_line_that_goes_on_gives_a_field_once_and_accepts_nothing_again():
    given = ["c.yaml", "--train.lr=1", "--train.load-checkpoint-path", "auto", "--train.seed", "4"]
    more = ["--train.accept_changes=[data]", "--train.allow_other_base", "true"]
    more += ["--train.load_checkpoint_path=", "--train.load_optimizer=true", "--model.x", "auto"]
    left = ["c.yaml", "--train.lr=1", "--train.seed", "4", "--model.x", "auto"]
    assert train.without([*given, *more], *train.OF_ONE_START) == left


def test_an_interrupt_before_the_first_step_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "prepare", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        assert train.main([write_config(tmp_path)]) == 130
    finally:
        dist.destroy_process_group()
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted before the first step"


def _blocked(rank, number, path, folder):
    """A process whose first step never returns to Python. Another process of rank 1 has ended."""
    with pathlib.Path(folder, f"said_{rank}.txt").open("w") as said:
        os.dup2(said.fileno(), 2)

    def blocks():
        pathlib.Path(folder, f"blocked_{rank}").touch()
        dist.HashStore().get("never")  # as in a collective: not in Python

    real = Interrupts.__init__

    def beside(self, ranks):
        real(self, ranks)
        if rank == 1:
            gone = multiprocessing.get_context("fork").Process()
            gone.start()
            gone.join()
            self.beside.append(gone.pid)

    Interrupts.__init__, Engine.optim_step = beside, at_step(1, blocks)
    os.environ |= {"TORCHELASTIC_ERROR_FILE": f"{folder}/error_{rank}"}
    train.main([path, f"--train.output_dir={folder}/{rank}"])


def test_the_second_signal_and_one_after_another_process_ended_end_a_process_that_is_blocked(
    tmp_path,
):
    path = write_config(tmp_path)
    context = torch.multiprocessing.start_processes(
        _blocked, (2, path, str(tmp_path)), nprocs=2, join=False, start_method="forkserver"
    )
    first, second = context.processes
    try:
        until(lambda: len([*tmp_path.glob("blocked_*")]) == 2)
        os.kill(second.pid, signal.SIGTERM)
        os.kill(first.pid, signal.SIGINT)
        until(lambda: second.exitcode is not None)
        assert first.exitcode is None

        # Those within a second of when the thread has read the first are the same signal.
        def again():
            with contextlib.suppress(ProcessLookupError):  # it has ended, and was waited for
                os.kill(first.pid, signal.SIGINT)

        until(lambda: first.exitcode is not None or again())
    finally:
        for process in context.processes:
            process.kill()
    assert (first.exitcode, second.exitcode) == (130, 143)
    assert (tmp_path / "said_0.txt").read_text().splitlines()[-1] == (
        "rank 0: interrupted again, so no checkpoint is written"
    )
    assert "another process of this run has ended\n" in (tmp_path / "said_1.txt").read_text()


def said(folder, rank):
    file = folder / f"said_{rank}.txt"
    return file.read_text() if file.exists() else ""


def test_two_agents_train_as_one_and_a_signal_to_one_of_them_stops_both(tmp_path):
    """There are two nodes, and each has an agent of torchrun and a rank."""
    options = {
        "train__data_parallel_mode": "fsdp2",
        "train__log_format": "structured",
        "train__max_steps": 10**6,
    }
    path = write_config(tmp_path, **options)
    with agents(2, 1, tmp_path, [path]) as both:
        until(lambda: "step=3 " in said(tmp_path, 0))
        os.kill(both[1].pid, signal.SIGTERM)
        until(lambda: all(p.exitcode is not None for p in both))
    sentence = re.compile(
        r"SIGTERM after step (\d+) of 1000000: \S+/global_step_\1 is written; (.*)"
    )
    [found] = sentence.finditer(said(tmp_path, 0))
    assert found[2] == (
        f"to go on: torchrun --nnodes 2 ... --nproc-per-node 1 -m tilewright.trainer.train {path} "
        "--train.load_checkpoint_path auto"
    )
    assert not sentence.search(said(tmp_path, 1)) and "Traceback" not in said(tmp_path, 1)
    [written] = checkpoint.complete(str(tmp_path / "out"))
    assert written.name == f"global_step_{found[1]}" and numbers(tmp_path)[-1][0] == int(found[1])
    (tmp_path / "one").mkdir()
    path = write_config(tmp_path / "one", **options | {"train__max_steps": 3})
    with agents(1, 2, tmp_path / "one", [path]) as [one]:
        until(lambda: one.exitcode is not None)
    assert numbers(tmp_path / "one") == numbers(tmp_path)[:3]


def test_ctrl_c_of_torchrun_saves_and_says_how_to_go_on(tmp_path):
    path = write_config(tmp_path, train__data_parallel_mode="fsdp2", train__max_steps=10**6)
    with torchrun(2, "-m", "tilewright.trainer.train", path) as process:
        try:
            until(lambda: (tmp_path / "out/metrics.jsonl").exists() and len(rows(tmp_path)) > 1)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=600)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    [last] = [line for line in err.splitlines() if line.startswith("SIGINT after step")]
    assert last.endswith(
        f"is written; to go on: torchrun --nproc-per-node 2 -m tilewright.trainer.train {path} "
        "--train.load_checkpoint_path auto"
    )
    [written] = checkpoint.complete(str(tmp_path / "out"))
    assert f"after step {written.name.split('_')[-1]} of" in last and str(written) in last
    assert "another one ends the run at once" in out and "Unable to shutdown" not in err


GONE = "error: rank 0: another process has ended, and says why: "


def test_a_rank_that_is_killed_in_a_step_ends_all(tmp_path):
    """Rank 0 waits for the gradients of rank 1, for half an hour at most. It ends by itself: what
    the agent has to kill takes thirty seconds.
    """
    path = write_config(tmp_path, train__data_parallel_mode="fsdp2", train__max_steps=10**6)
    with agents(1, 2, tmp_path, [path], killed) as [agent]:
        until(lambda: agent.exitcode is not None)
    last = said(tmp_path, 0).splitlines()[-1]
    assert last.startswith(GONE) or last == "rank 0: another process of this run has ended"


def killed(arguments):
    if os.environ["RANK"] == "1":
        Engine.optim_step = at_step(2, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return train.main(arguments)


def launch_forked(number, *script):
    """torchrun and its ranks, which are all forked from a process that has imported the trainer."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    imports = "import torch.distributed.run, tilewright.trainer.train"
    with forked.python(imports, ROOT, environment) as python:
        return subprocess.run(
            [python, *start, "--no-python", str(python), *script],
            env=environment,
            capture_output=True,
            text=True,
        )


def test_torchrun_names_the_rank_that_failed_first_in_a_step(tmp_path):
    path = write_config(tmp_path, train__data_parallel_mode="fsdp2")
    (tmp_path / "fails.py").write_text(
        "import os, sys\n"
        "from tilewright.trainer import engine, train\n"
        "real = engine.Engine.optim_step\n"
        "def fails(engine, *rest):\n"
        "    if engine.optimizer.state: raise ValueError('only here')\n"
        "    return real(engine, *rest)\n"
        "if os.environ['RANK'] == '1': engine.Engine.optim_step = fails\n"
        "sys.exit(train.main(sys.argv[1:]))\n"
    )
    done = launch_forked(2, str(tmp_path / "fails.py"), path)
    assert done.returncode == 1
    cause = done.stderr.partition("Root Cause")[2]
    assert re.search(r"rank +: 1 ", cause)
    assert re.search("traceback : only here$", cause, re.MULTILINE)
    assert "error: only here" in done.stderr
    assert 'Traceback (most recent call last):\n  File "' + str(tmp_path) not in done.stderr
