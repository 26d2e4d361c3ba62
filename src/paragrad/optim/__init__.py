"""Local optimisers by name."""
