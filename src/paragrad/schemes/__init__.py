"""How workers cooperate: one file for each algorithm."""
