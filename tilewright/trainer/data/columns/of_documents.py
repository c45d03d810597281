"""Columns with one value per document."""

from tilewright.trainer.data.columns.column import Column
from tilewright.trainer.tables import COLUMNS

COLUMNS.add("id", Column("document", "str", default=""))
COLUMNS.add("reward", Column("document", "float32"))
# Members of a pair follow each other in the data.
COLUMNS.add("pair", Column("document", "int64", fill=-1, least=0, together=True))
COLUMNS.add("role", Column("document", "int64", fill=-1, least=0))
# How many of its first tokens are those of the chosen answer's document, and predict no label.
COLUMNS.add("prefix", Column("document", "int64", least=0))
