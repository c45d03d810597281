"""The formulas of preferences, by name."""

from typing import Any

from tilewright.ops.loss.preference import Formula
from tilewright.trainer.tables import Table

# Rows are classes, derived from Formula.
PREFERENCES: Table[Any] = Table("preferences", "tilewright.trainer.losses.preference", Formula)
