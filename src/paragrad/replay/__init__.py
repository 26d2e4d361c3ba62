"""Repeats a run from its record and compares the result."""

from paragrad.replay.compare import Replayed, replay

__all__ = ["Replayed", "replay"]
