"""Repeats a run from its record and compares the result."""

# paragrad/__init__.py takes pg.replay from here, so that this package does not hide the function.
from paragrad.replay.compare import replay as replay
