"""What every sample has. Further columns are rows of the table COLUMNS."""

import pyarrow as pa

IGNORE = -100  # the label of a token that is not trained on
MISMATCHED = "mismatched"  # in a batch: another one, see `data.batches`
TOKENS = ("input_ids", "labels")
# In prepared sets: the row of the data that a sample was made of, so that all of it is held out or
# none. Rows that a column joins (see `data.units`) have one number.
ROW = "source_row"
SCHEMA = pa.schema({name: pa.list_(pa.int32()) for name in TOKENS})
