"""Imports matplotlib, which is an optional library."""

from __future__ import annotations

from typing import Any

from paragrad.config.extras import command
from paragrad.errors import UsageError


def matplotlib() -> Any:
    """Return matplotlib without pyplot, which has windows and global state."""
    try:
        import matplotlib
        import matplotlib.collections
        import matplotlib.figure
        import matplotlib.lines
        import matplotlib.ticker
    except ImportError as error:
        raise UsageError(f"Figures need matplotlib, which cannot be imported ({error}): {command('plot')}") from error
    return matplotlib
