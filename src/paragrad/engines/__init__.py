"""Where workers run, and how a commit reaches the center."""
