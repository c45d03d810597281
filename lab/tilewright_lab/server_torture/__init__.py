"""A training server whose processes are killed at chosen points: `tilewright server-torture`."""
