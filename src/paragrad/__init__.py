"""Parallel gradient descent for PyTorch and Keras. Public names are imported on first use."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

if sys.platform != "linux":
    raise ImportError(
        f"paragrad needs Linux, and this is {sys.platform}: its workers share memory through memfd and eventfd, and a fork "
        "server starts them. On Windows use WSL; on macOS use a Linux container or machine."
    )

from paragrad.config.lazy import homes

__version__ = "0.1.0"

_HOMES = homes(__name__, Path(__file__).with_suffix(".pyi"))
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paragrad' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]


class _Package(ModuleType):
    """Module class that keeps functions reachable: importing the module ``paragrad.train`` must not hide ``pg.train``."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Pickle by name: a user's function that uses ``pg.`` carries this module to the workers."""
        return import_module, (__name__,)


sys.modules[__name__].__class__ = _Package
