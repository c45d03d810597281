"""Faults planted for `tilewright verify` (plants/verify.py) are found as their rows say."""

import pytest
from helpers import keep_tables
from plants.verify import ADAPTED, FURTHER, PLANTS

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
