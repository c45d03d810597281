"""Faults that are planted for `tilewright verify` (plants/verify.py) are found as their rows say:
all that have a cause of their own, and a fixed sample of the others. Numbers that differ print so.
"""

import pytest
from helpers import keep_tables
from plants.verify import PLANTS

from tilewright_lab.verify import result as verify_result
from tilewright_lab.verify import structure as verify_structure

pytestmark = pytest.mark.packages

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17 or later")

CAUSES = [name for name, plant in PLANTS.items() if "differs" not in plant.words]
OTHERS = sorted(PLANTS.keys() - set(CAUSES))


@pytest.mark.parametrize("name", [*CAUSES, *OTHERS[::4]])
def test_a_plant_is_found_as_its_row_says(name, monkeypatch):
    keep_tables(monkeypatch)
    if "adapter" in name:
        pytest.importorskip("peft")
    PLANTS[name].check()


@pytest.mark.parametrize(
    "pair, shown",
    [
        ((10000.0, 500000.0), ("10000", "500000")),
        ((10010.0, 10000.0), ("10010", "10000")),
        ((1e6 + 1, 1e6), ("1000001", "1000000")),
        ((1234.0, 10000.0), ("1230", "10000")),
    ],
)
def test_two_rotary_bases_never_print_the_same(pair, shown):
    ours, theirs = shown
    text = f"rotary base {ours} in the module, {theirs} by the configuration"
    assert verify_structure.spoken_bases(*pair) == text


def test_two_numbers_that_differ_never_print_the_same():
    assert verify_result.apart(1.0000004, 1.0, 6) == ("1.0000004", "1")
    assert verify_result.apart(2.0, 1.0) == ("2", "1")
    near = 1 + 2**-52
    assert len({*verify_result.apart(near, 1.0)}) == 2 and verify_result.apart(1.0, 1.0)
