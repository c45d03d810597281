"""Columns of samples and batches, by their names."""

import pyarrow as pa

IGNORE = -100  # the label of a token that is not trained on
COLUMNS = ("input_ids", "labels")
ROUTES = "routed_experts"  # of a tokenized row: experts that an engine chose
SCHEMA = pa.schema({name: pa.list_(pa.int32()) for name in COLUMNS})
# Experts are below 4,096.
REPLAYED = SCHEMA.append(pa.field(ROUTES, pa.list_(pa.int16())))
