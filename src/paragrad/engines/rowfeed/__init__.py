"""One process that reads rows for all workers of a machine."""
