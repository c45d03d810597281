"""The formulas of preferences, by name."""

from tilewright.ops.loss.preference import Formula
from tilewright.trainer.tables import Table

PREFERENCES = Table("preferences", "tilewright.trainer.losses.preference", Formula)
