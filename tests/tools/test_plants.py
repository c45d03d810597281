"""Faults planted for `tilewright verify` (plants/verify.py) are found as their rows say. Numbers
that differ print so.
"""

import pytest
from helpers import keep_tables
from plants.verify import ADAPTED, FURTHER, PLANTS

from tilewright_lab.verify import result, structure

pytestmark = pytest.mark.packages

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17 or later")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.table] * (n in FURTHER)) for n in PLANTS]
)
def test_a_plant_is_found_as_its_row_says(name, monkeypatch):
    keep_tables(monkeypatch)
    if PLANTS[name].module == ADAPTED or "adapter" in name:
        pytest.importorskip("peft")
    PLANTS[name].check()


@pytest.mark.parametrize(
    "ours, theirs, shown",
    [
        (10000.0, 500000.0, ("10000", "500000")),
        (10010.0, 10000.0, ("10010", "10000")),
        (1e6 + 1, 1e6, ("1000001", "1000000")),
        (1234.0, 10000.0, ("1230", "10000")),
    ],
)
def test_two_rotary_bases_never_print_the_same(ours, theirs, shown):
    said = "rotary base {} in the module, {} by the configuration".format(*shown)
    assert structure.spoken_bases(ours, theirs) == said


def test_two_numbers_that_differ_never_print_the_same():
    assert result.apart(1.0000004, 1.0, 6) == ("1.0000004", "1")
    assert result.apart(2.0, 1.0) == ("2", "1")
    near = 1 + 2**-52
    assert len({*result.apart(near, 1.0)}) == 2 and result.apart(1.0, 1.0)
