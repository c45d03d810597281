"""What every sample has. Further columns are rows of the table COLUMNS."""

import pyarrow as pa

IGNORE = -100  # the label of a token that is not trained on
MISMATCHED = "mismatched"  # in a batch: another one, see `data.batches`
TOKENS = ("input_ids", "labels")
SCHEMA = pa.schema({name: pa.list_(pa.int32()) for name in TOKENS})
