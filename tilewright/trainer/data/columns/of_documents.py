"""Columns with one value per document."""

from tilewright.trainer.data.columns.column import COLUMNS, Column

COLUMNS.add("id", Column("document", "str", default=""))
# The data set that a document was made from, counted from 0, and its row there: "0:17".
COLUMNS.add("origin", Column("document", "str", default=""))
COLUMNS.add("reward", Column("document", "float32", instructs=True))
# Members of a pair follow each other in the data.
COLUMNS.add("pair", Column("document", "int64", instructs=True, fill=-1, least=0, together=True))
COLUMNS.add("desirable", Column("document", "int64", instructs=True, fill=-1, least=0, most=1))
COLUMNS.add("role", Column("document", "int64", instructs=True, fill=-1, least=0))
# By how much a chosen answer's reward should exceed the rejected one's. A pair's is that of the
# chosen answer.
COLUMNS.add("margin", Column("document", "float32", instructs=True, default=0.0))
# How many of its first tokens are those of the chosen answer's document, and predict no label.
COLUMNS.add("prefix", Column("document", "int64", instructs=True, least=0))
