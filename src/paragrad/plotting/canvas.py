"""What pictures are drawn with: matplotlib, which comes with an extra."""

from __future__ import annotations

from typing import Any

from paragrad.config.extras import command
from paragrad.errors import UsageError


def matplotlib() -> Any:
    """The library, without pyplot: no window, no state that outlives a call."""
    try:
        import matplotlib
        import matplotlib.collections
        import matplotlib.figure
        import matplotlib.lines
        import matplotlib.ticker
    except ImportError as error:
        raise UsageError(f"Pictures need matplotlib, which cannot be imported ({error}): {command('plot')}") from error
    return matplotlib
