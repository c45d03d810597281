"""Tables of sweeps: a row is of today's sources or is named."""

import json

import pytest

from tests.lib import sweeps
from tilewright.bench import sources


@pytest.fixture
def sweep(tmp_path):
    today = {"a": "1", "b": "2"}
    table = sweeps.Table(tmp_path / "table.jsonl")
    found = sweeps.Sweep("things", "python -m things", lambda: today, table.rows)

    def write(unit, digest, wrong=(), **further):
        table.write({"unit": unit, "wrong": [*wrong], "digest": digest, **further}, today)

    return found, today, write, table.file


def test_a_row_is_of_today_until_its_digest_changes(sweep, monkeypatch):
    sweep, today, write, _ = sweep
    assert sweep.old() == ["a", "b"] and not sweep.wrong()
    write("b", "2", runs=3)
    write("a", "1", ["a case"])
    assert not sweep.old() and sweep.wrong() == ["a"]
    assert "2 of 2 rows are of today's sources; WRONG: a" in sweep.told()
    monkeypatch.setattr(sweeps, "every", lambda: [sweep])
    assert sweeps.main([]) == 0 and sweeps.main(["--strict"]) == 1
    write("a", "1")
    assert sweeps.main(["--strict"]) == 0
    today["b"] = "3"
    assert sweep.old() == ["b"] and sweeps.main(["--strict"]) == 1
    assert "1 of 2 rows are of today's sources; not b (python -m things)" in sweep.told()


def test_rows_are_sorted_and_those_of_units_that_are_gone_go(sweep):
    _, today, write, file = sweep
    today["c"] = "4"
    for unit in "cba":
        write(unit, today[unit], runs=1)
    del today["c"]
    write("a", "5", runs=2)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["unit"], row["runs"], row["digest"]) for row in rows] == [
        ("a", 2, "5"),
        ("b", 1, "2"),
    ]
    assert all(row["commit"] and row["date"] for row in rows)
    assert not file.with_suffix(".new").exists()


def test_a_digest_is_of_what_python_means_and_of_other_text(tmp_path):
    code, text = tmp_path / "x.py", tmp_path / "x.ptx"
    code.write_text("x = 1\n")
    text.write_text("add\n")
    before = sources.of_files([code, text], "3.9.0")
    code.write_text("# a comment\nx  =  1\n")
    assert sources.of_files([text, code], "3.9.0") == before
    assert sources.of_files([code, text], "3.6.0") != before
    code.write_text("x = 2\n")
    changed = sources.of_files([code, text], "3.9.0")
    assert changed != before
    text.write_text("sub\n")
    assert sources.of_files([code, text], "3.9.0") not in (before, changed)


def test_rows_are_written_as_they_are_found(sweep, capsys):
    sweep, _, _, file = sweep
    rows = {"a": {"wrong": ["a case"], "runs": 1}, "b": {"wrong": [], "runs": 2}}
    found = sweeps.beside(sweep.old(), rows.__getitem__, 2)
    sweeps.go_on(sweep, sweeps.Table(file), found)
    assert not sweep.old() and sweep.wrong() == ["a"]
    assert {unit: row["runs"] for unit, row in sweep.rows().items()} == {"a": 1, "b": 2}
    assert "a: a case\n" in (said := capsys.readouterr().out) and said.endswith("WRONG: a\n")


def test_a_package_that_is_missing_is_told(monkeypatch, capsys):
    def digests():
        raise ModuleNotFoundError("No module named 'transformers'")

    sweep = sweeps.Sweep("things", "python -m things", digests, dict)
    monkeypatch.setattr(sweeps, "every", lambda: [sweep])
    assert sweeps.main([]) == 0 and sweeps.main(["--strict"]) == 1
    assert "things: what they depend on is not installed: No module" in capsys.readouterr().out


def test_no_committed_row_is_wrong():
    """Rows of older sources count, too: `make whole` says which are old."""
    for sweep in sweeps.every():
        assert not sweep.wrong(), sweep.what
