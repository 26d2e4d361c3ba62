"""Builds a job, which any engine can run, from the arguments of a user or from a run.toml."""
