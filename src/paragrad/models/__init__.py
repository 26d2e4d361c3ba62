"""Built-in models, losses and toy problems, and those that a user's file names."""

from paragrad.models.builtin import build

__all__ = ["build"]
