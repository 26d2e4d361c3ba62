"""Built-in models, losses and toy problems, and models and losses from a user's file."""

from paragrad.models.builtin import build

__all__ = ["build"]
