"""What a run shows of its steps: bar, lines, MFU, memory, time left, TensorBoard, a picture."""

import io
import json
import resource
import types

import pytest

pytest.importorskip("pydantic")

from tilewright.core import platform
from tilewright.trainer.config import Train
from tilewright.trainer.plugins import metrics

pytestmark = pytest.mark.packages


@pytest.fixture
def reports(tmp_path, monkeypatch):
    """Metrics of a run of 100 steps, of which 10 are done, on two devices; time passes by steps."""
    clock = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: clock[0])

    def made(device="NVIDIA H100 80GB HBM3", **fields):
        monkeypatch.setattr(platform, "device_name", lambda kind: device)
        of = metrics.Metrics(
            Train(output_dir=str(tmp_path), **fields),
            main=True,
            steps=(10, 100),
            tokens=5,
            work=(1e9, 2),
            settings={},
        )
        of.open()
        return of

    def step(of, number, seconds, **values):
        clock[0] += seconds
        of.step(number, 1000, loss=1.5, lr=0.1, grad_norm=2.0, **values)

    return made, step


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_step_has_mfu_memory_and_the_time_that_is_left(reports, tmp_path, capsys):
    made, step = reports
    held = made(log_format="structured")
    step(held, 11, 2.0)
    step(held, 12, 4.0)
    held.close()
    first, second = rows(tmp_path)
    assert first["tokens_per_second"] == 500 and second["tokens"] == 2005
    # 1000 tokens of 10^9 FLOPs in two seconds, of twice the peak that NVIDIA's data sheet has
    assert first["mfu"] == pytest.approx(500e9 / (2 * 989e12))
    assert (first["seconds_left"], second["seconds_left"]) == (2 * 89, 3 * 88)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    # Linux counts pages per processor in batches: a later reading may be some pages below.
    assert 0.1 < first["memory_gb"] == pytest.approx(most, rel=0.01)
    assert second["memory_gb"] == pytest.approx(most, rel=0.01)
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith("step=12 loss=1.5 lr=0.1 grad_norm=2 tokens=2005 ")
    assert " mfu=" in line and " memory_gb=" in line and line.endswith("seconds_left=264")


def test_the_basis_of_mfu_is_said_or_why_there_is_none(reports, tmp_path):
    made, step = reports
    said = made().basis()
    assert said.startswith("mfu: tokens_per_second x 1e+09 FLOPs per token (")
    assert said.endswith(") / (2 x 9.89e+14 FLOP/s, the dense bf16 peak of NVIDIA H100 80GB HBM3)")
    assert "x 7.56e+14 FLOP/s" in made("NVIDIA H100 PCIe").basis()
    unknown = made("AMD EPYC (AVX512)")
    assert "not reported, since the peak of AMD EPYC (AVX512) is not known" in unknown.basis()
    step(unknown, 11, 1.0)
    assert "mfu" not in rows(tmp_path)[-1]


@pytest.mark.parametrize("log_steps", [1, 3])
def test_the_bar_shows_the_numbers_of_steps(log_steps, reports, monkeypatch):
    made, step = reports
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    held = made(log_steps=log_steps)
    for number in (11, 12, 13):
        step(held, number, float(number), expert_load=1.0)
    held.bar.refresh()
    held.close()
    last = terminal.getvalue().split("\r")[-1]
    assert "13/100" in last and "<" in last  # the time left, as tqdm has it
    speed = {1: "tok/s=76.923", 3: "tok/s=83.333"}[log_steps]
    for shown in ("loss=1.5", "lr=0.1", "norm=2", speed, "mfu=", "GB="):
        assert shown in last
    assert "expert_load" not in last


def test_all_that_an_evaluation_reports_is_written(reports, tmp_path, capsys):
    made, _ = reports
    held = made()
    held.evaluation(10, {"eval_loss": 2.5, "eval_accuracy": 1 / 3})
    held.close()
    assert rows(tmp_path) == [{"step": 10, "eval_loss": 2.5, "eval_accuracy": 1 / 3}]
    assert capsys.readouterr().out == "step=10 eval_loss=2.5 eval_accuracy=0.33333\n"


@pytest.mark.parametrize("form", ["structured", "progress_bar"])
def test_some_steps_are_shown_and_all_are_written(form, reports, tmp_path, capsys):
    made, step = reports
    held = made(log_format=form, log_steps=3)
    for number in range(11, 17):
        step(held, number, 1.0)
    held.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["step=12", "step=15"]
    assert [row["step"] for row in rows(tmp_path)] == [*range(11, 17)]


def test_the_picture_has_both_losses(reports, tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    made, step = reports
    real, drawn = figure.savefig, []

    def keep(self, target):
        drawn.extend([*line.get_xydata().tolist(), line.get_label()] for line in self.axes[0].lines)
        real(self, target)

    monkeypatch.setattr(figure, "savefig", keep)
    held = made(plot_loss=True)
    held.evaluation(10, {"eval_loss": 2.5})
    step(held, 11, 1.0)
    step(held, 12, 1.0)
    held.close()
    assert drawn == [[[11, 1.5], [12, 1.5], "training"], [[10, 2.5], "evaluation"]]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    metrics.draw([], tmp_path / "nothing.png")  # of a run without a step
    drawn.clear()
    made().close()
    assert not drawn


@pytest.mark.parametrize("log_dir", [None, "boards/first"])
def test_tensorboard_reads_what_is_logged(log_dir, reports, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    made, step = reports
    folder = tmp_path / (log_dir or "tensorboard")
    held = made(use_tensorboard=True, log_dir=log_dir and str(folder))
    held.evaluation(10, {"eval_loss": 2.5})
    step(held, 11, 2.0)
    step(held, 12, 2.0)
    held.close()
    read = accumulator.EventAccumulator(str(folder))
    read.Reload()
    found = {
        name: [(e.step, e.value) for e in read.Scalars(name)] for name in read.Tags()["scalars"]
    }
    assert found["loss"] == [(11, 1.5), (12, 1.5)] and found["eval_loss"] == [(10, 2.5)]
    assert found["tokens_per_second"] == [(11, 500.0), (12, 500.0)]
    assert found.keys() == {key for row in rows(tmp_path) for key in row if key != "step"}


def test_every_evaluation_reaches_wandb(reports):
    made, step = reports
    held, logged = made(wandb_log_interval=7), []
    held.wandb = types.SimpleNamespace(log=lambda row, step: logged.append((step, row)))
    for number in (11, 14):
        step(held, number, 2.0)
    held.evaluation(15, {"eval_loss": 2.5})
    held.evaluation(16, {"test_loss": 3.5})
    assert [at for at, _ in logged] == [14, 15, 16]
    assert logged[1][1] == {"eval_loss": 2.5} and logged[2][1] == {"test_loss": 3.5}
    held.wandb = None
