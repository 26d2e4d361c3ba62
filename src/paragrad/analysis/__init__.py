"""Analyses of a record: staleness, implicit momentum, the edge of stability, temporal efficiency."""
