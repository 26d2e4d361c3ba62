"""Public names that are loaded on first use. A stub file (.pyi) lists them, for type checkers and for the package."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any


def homes(package: str, stub: Path) -> dict[str, str]:
    """Return the names that a stub of a package exports with the modules that define them, in the order of the stub."""
    found: dict[str, str] = {}
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            for alias in node.names:
                if alias.name == "*":
                    *inside, name = str(node.module).split(".")
                    inner = ".".join([package, *inside])
                    found |= homes(inner, stub.parent.joinpath(*inside, f"{name}.pyi"))
                elif alias.asname == alias.name:
                    found[alias.name] = f"{package}.{node.module}"
    return found


class Table:
    """The classes that the table.pyi of a package lists."""

    def __init__(self, package: str, file: str) -> None:
        self.homes = homes(package, Path(file).with_name("table.pyi"))

    def names(self) -> tuple[str, ...]:
        """Return every name, in the order of the table."""
        return tuple(self.homes)

    def load(self, name: str) -> type[Any]:
        """Return the class of that name."""
        cls: type[Any] = getattr(import_module(self.homes[name]), name)
        return cls
