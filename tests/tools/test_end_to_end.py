"""The benchmark of a training step: its measurements, on a tiny shape."""

import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from bench import end_to_end
from bench.llama import Shape
from bench.page.build import build
from bench.page.text import number
from tilewright.bench import report, run, store

pytest.importorskip("transformers")
TINY = Shape(tokens=24, layers=2, hidden=32, inner=48, heads=4, kv_heads=2, vocabulary=96)


@pytest.fixture(scope="module")
def rows():
    return end_to_end.measure(
        TINY, ["float32", "bfloat16"], 3, lambda provider, shape, dtype: 100.0 + len(provider)
    )


def test_rows(rows):
    each = itertools.product(("float32", "bfloat16"), ("transformers", "trainer"))
    assert [(r["dtype"], r["provider"]) for r in rows] == list(each)
    for r in rows:
        assert r["case"] == "llama-32_2_layers_24_tokens" and len(r["samples_ms"]) == 3
        assert 0 < r["p20_ms"] <= r["median_ms"] <= r["p80_ms"]


def test_errors_are_of_the_same_function(rows):
    """Weights, tokens and labels agree, so each differs from float64 only by its arithmetic; the
    trainer's error is no larger.
    """
    for theirs, ours in zip(rows[::2], rows[1::2], strict=True):
        bound = 2e-6 if ours["dtype"] == "float32" else 3e-2
        for r in (theirs, ours):
            assert 0 < r["gradient_error"] <= r["worst_gradient_error"] < bound
            assert r["loss_error"] < bound / 10
        assert ours["gradient_error"] <= 1.5 * theirs["gradient_error"]


PEAKS = """
import json, torch
from bench.host_memory import peak_mib

def one_after_the_other():
    for _ in range(3):
        torch.ones(32 << 18)  # 32 MiB

print(json.dumps([peak_mib(one_after_the_other), peak_mib(lambda: torch.ones(96 << 18)),
                  peak_mib(lambda: None)]))
"""


def test_peak_is_of_what_is_held_at_once():
    """In a process of its own: what other tests have left in the heap decides where 32 MiB go."""
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    command = [sys.executable, "-c", PEAKS]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    several, one, nothing = json.loads(said.stdout)
    if nothing is None:
        pytest.skip("the kernel does not tell")
    # Three at once are 96 MiB. Linux counts pages by processor, in batches.
    assert 16 < several < 64 < one < 160 and nothing < 16


def test_the_page_shows_it(rows, tmp_path):
    results, page = tmp_path / "results", tmp_path / "docs/performance.md"
    meta = run.metadata("cpu", run.Settings(), ["end-to-end", "--rounds", "3"])

    def write(folder, date, rows):
        document = {"schema": report.SCHEMA, "meta": {**meta, "date": date}, "rows": rows}
        store.write_json(results / folder / "end_to_end.json", document)

    old = [{**r, "median_ms": 1.0, "p20_ms": 1.0, "p80_ms": 1.0} for r in rows]
    write("step", "2026-01-02T03:04:05+00:00", rows)
    write("older", "2025-01-02T03:04:05+00:00", old)
    text = build(results, page).text
    said = text.split("## A training step", 1)[1].split("## ", 1)[0]
    theirs, ours = rows[2:]
    line = next(found for found in said.splitlines() if "| bfloat16 | trainer |" in found)
    assert f"| {number(theirs['median_ms'] / ours['median_ms'])} |" in line and "| 0.955 |" in line
    rows_shown = [found for found in said.splitlines() if found.startswith("| llama-32")]
    assert len(rows_shown) == 4
    write("step", meta["date"], [{**rows[0], "median_ms": 0}, *rows[1:]])
    with pytest.raises(ValueError, match=r"end_to_end.json.*must be positive"):
        build(results, page)


def test_arguments_are_checked(capsys):
    with pytest.raises(SystemExit):
        end_to_end.main(["--dtype", "float64"])
    assert "float64" in capsys.readouterr().err
