"""Where workers run, and how a commit reaches the center; and the table of engines."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paragrad.engines.local import Local as Local
    from paragrad.engines.network import Network as Network
    from paragrad.engines.vector import Vector as Vector

TABLE = {"local": ("local", "Local"), "vector": ("vector", "Vector"), "network": ("network", "Network")}
"""Name on the command line -> (file, class)."""


def names() -> tuple[str, ...]:
    """Every engine, in the order of the table."""
    return tuple(TABLE)


def load(name: str) -> type[Any]:
    """The class behind a name of the table."""
    module, cls = TABLE[name]
    engine: type[Any] = getattr(import_module(f"{__name__}.{module}"), cls)
    return engine
