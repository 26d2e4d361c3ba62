"""What a record tells: how stale commits were and why, implicit momentum, the edge of stability, temporal efficiency."""
