"""A run as a directory: record, checkpoints, validation, summary; and the display of a run."""
