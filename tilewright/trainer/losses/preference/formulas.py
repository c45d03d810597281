"""The formulas of the library's ops."""

from tilewright.ops.loss.preference import FORMULAS
from tilewright.trainer.losses.preference.row import PREFERENCES

for name, row in FORMULAS.items():
    PREFERENCES.add(name, row)
