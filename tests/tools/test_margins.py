"""`python -m bench margins`."""

import json
from dataclasses import replace

import pytest
import torch

from bench import margins
from tilewright.bench import contract
from tilewright.ops import OPS


@pytest.fixture
def command(tmp_path):
    def run(*arguments):
        out = tmp_path / "margins.json"
        code = margins.main([*arguments, "--implementation", "torch,eager", "--out", str(out)])
        return code, margins.committed(out) if out.exists() else None

    return run


def test_the_page_has_each_result_of_an_op_in_each_dtype(command):
    code, page = command("--op", "rope,adamw_")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    found = {(r[0].strip("| `"), r[1], r[2]) for r in rows}
    assert code == 0 and "commit" in page
    results = [("rope", name) for name in ("out 0", "out 1", "grad q", "grad k")]
    results += [("adamw_", f"out {i}") for i in range(4)]
    dtypes = ("float32", "bfloat16", "float16")
    assert found == {(*result, dtype) for result in results for dtype in dtypes}


def test_the_page_of_some_ops_is_printed_and_replaces_no_page_of_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(margins, "FILE", tmp_path / "margins.json")
    assert margins.main(["--op", "dropout_add"]) == 0
    assert "| `dropout_add` | out 0 | float32 |" in capsys.readouterr().out
    assert not margins.FILE.exists()


def test_the_site_shows_each_committed_row():
    made = json.loads(margins.FILE.read_text())
    lines = [line.split(" | ") for line in margins.committed().splitlines() if "| `" in line]
    shown = [[line[0].strip("| `"), *line[1:3]] for line in lines]
    assert shown == [row[:3] for row in made["rows"]] and {r[0] for r in shown} <= {*OPS}
    assert f"({made['made']})" in margins.committed()


@pytest.mark.parametrize("declared, code", [(0.04, 1), (0.018, 0), (0.01, 1)])
def test_a_wrong_declaration_is_named(declared, code, command, monkeypatch, capsys):
    op = OPS["silu_mul"]
    judged = replace(op.judged, detects={torch.bfloat16: {"out 0": declared}})
    monkeypatch.setattr(op, "judged", judged)
    assert command("--op", "silu_mul")[0] == code
    said = "silu_mul, out 0, bfloat16: detects 1.5"
    out = capsys.readouterr().out
    assert (said in out) == bool(code)
    assert ('judged=Judged(detects={torch.bfloat16: {"out 0": 0.015' in out) == bool(code)


def test_an_implementation_that_breaks_the_contract_is_named(command, monkeypatch, capsys):
    judge = contract.compared

    def wrong(op, results, kwargs, by):
        return judge(op, {n: t * 1.1 for n, t in results.items()}, kwargs, by)

    monkeypatch.setattr(contract, "compared", wrong)
    assert command("--op", "silu_mul")[0] == 1
    out = capsys.readouterr().out
    assert "silu_mul[torch], ragged, float32: out 0: error 1.0" in out
    assert "silu_mul[torch], out 0, float32: breaks the contract" in out


def test_faults_that_hold_are_counted(command, monkeypatch, capsys):
    assert command("--op", "silu_mul", "--faults") == (0, None)
    assert "faults planted, 0 hold the contract" in capsys.readouterr().out
    op = OPS["silu_mul"]
    monkeypatch.setattr(op, "atol", {torch.bfloat16: 1.5})
    assert command("--op", "silu_mul", "--faults")[0] == 1
    assert "silu_mul, ragged, bfloat16, contiguous: zeros as out 0 holds" in capsys.readouterr().out
