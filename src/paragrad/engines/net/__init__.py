"""The exchange over a network."""
