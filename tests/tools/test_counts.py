"""What the tests cover, from reports of pytest."""

import json

from tests.counts import cells, kept

CASE = '<testcase classname="{}" name="{}" time="1">{}</testcase>'
CASES = (
    ("tests.ops.test_contract", "test_matches_eager[rmsnorm-cpp-ragged-float32]", ""),
    ("tests.ops.test_contract", "test_matches_eager[rmsnorm-cpp-gemma-float32]", ""),
    ("tests.ops.test_contract", "test_matches_eager[rmsnorm-cute-ragged-float32]", "<skipped/>"),
    ("tests.ops.test_contract", "test_matches_eager[adamw_-triton-ragged-float32]", "<failure/>"),
    ("tests.ptx.test_triton_ptx", "test_compiled_kernels[sm_90-rope-gqa-bfloat16]", ""),
    ("tests.ops.test_takes", "test_checks_are_compiled_with_their_function[True]", ""),
    ("tests.tools.test_docs", "test_a_page[rmsnorm-cpp]", ""),
)


def test_cells_are_those_of_ops_that_a_passed_test_names(tmp_path):
    report = tmp_path / "report.xml"
    cases = "".join(CASE.format(*case) for case in CASES)
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    found = cells.found_in([str(report)])
    assert found == {
        ("test_matches_eager", "rmsnorm", "cpp", "float32"): 2,
        ("test_compiled_kernels", "rope", "", "bfloat16"): 1,
    }
    counted = cells.counted([str(report)])
    assert counted == {"test_matches_eager": [1, 2], "test_compiled_kernels": [1, 1]}
    assert cells.outcomes([str(report)]) == {"failure": 1, "passed": 5, "skipped": 1}
    text = cells.shown({"cells": counted})
    assert json.loads(text) == {"cells": counted} and '"test_matches_eager": [1, 2]' in text


def test_what_is_covered_no_longer_is_named_by_file():
    before = {"a.py": {"lines": [1, 2, 3], "branches": [[1, 2], [1, 3]]}, "b.py": {"lines": [7]}}
    after = [{"a.py": {"lines": [1, 3], "branches": [[1, 2]]}}, {"b.py": {"lines": [7, 8]}}]
    assert kept.lost(before, after) == {"a.py": {"lines": [2], "branches": [[1, 3]]}}
    assert kept.lost(before, [before]) == {}
