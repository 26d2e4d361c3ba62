"""The exchange between workers and the center on one machine, without a network."""
