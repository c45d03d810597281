"""The measurements of data and of evaluations: what they count, and what they compare."""

import json
import subprocess
import sys

import pytest

from bench.__main__ import main

pytest.importorskip("pydantic")
datasets = pytest.importorskip("datasets")
pytest.importorskip("transformers")
pytestmark = pytest.mark.packages

from bench import data_memory, data_waiting, evaluation_speed  # noqa: E402


def test_what_is_prepared_is_read_and_watched_from_before_the_first_row(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", None)  # restored, as `work` sets it
    path, tokens = tmp_path / "data.jsonl", 200_000 / 4
    data_memory.write_text(path, 200_000)
    given = str(path), str(tmp_path), ""
    data_memory.work("prepare", *given)
    assert int(capsys.readouterr().out.split()[-1]) >= len(path.read_text().splitlines())
    falling = iter([100, *range(300, 0, -1)])
    row = data_memory.watched(("read", *given), lambda _: {"own": next(falling, 0) << 20})
    assert row["begun_mib"] == {"own": 100} and row["peak_mib"] == {"own": 300}
    assert 0.8 * tokens < row["counted"] < 1.1 * tokens and row["processes"] >= 1


def test_memory_is_that_of_a_process_and_of_those_that_it_starts():
    code = "x = bytearray(1 << 26); print(1, flush=True); input()"
    both = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", both], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        child.stdout.readline()
        assert len(data_memory.family(child.pid)) == 2
        found = data_memory.memory(child.pid)
        child.stdin.write("\n")
    assert (1 << 26) < found["anonymous"] < (1 << 27) and found["pss"] >= found["anonymous"]


def test_a_step_waits_as_long_as_the_slowest_rank():
    first = [{"waited": w, "ended": e} for w, e in ((9.0, 1.0), (0.1, 3.0), (0.2, 7.0))]
    second = [{"waited": w, "ended": e} for w, e in ((9.0, 1.0), (0.4, 3.1), (0.1, 7.1))]
    row = data_waiting.figures([first, second])
    assert row["waits_s"] == [0.4, 0.2] and row["step_s"] == [2.0, 4.0]
    assert row["share"] == pytest.approx(0.1) and row["share_of_a_step"]["most"] == 0.2


def test_an_evaluation_and_its_bare_loop_have_the_same_sum(tmp_path, capsys):
    given = ["--batches", "1", "--rounds", "2", "--out", str(tmp_path)]
    assert main(["evaluation-speed", *given]) == 0, "the sums agree"
    rows = json.loads((tmp_path / "evaluation_speed.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["evaluation", "scores"]
    for row in rows:
        assert 400 < row["tokens"] < 512 and len(row["samples_s"]) == len(row["shares"]) == 2
        assert row["share"] == row["median_bare_s"] / row["median_s"]
    assert "without it" in capsys.readouterr().out
    row = evaluation_speed.row_of("x", 1, (lambda: 2.0, lambda: 1.0), 1)
    assert row["sums_differ"] == 1.0
