"""The exchange between workers and the center on one machine. Knows no network."""
