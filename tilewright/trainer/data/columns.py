"""Columns of samples and batches, by their names."""

IGNORE = -100  # the label of a token that is not trained on
