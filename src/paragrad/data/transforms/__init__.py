"""Transformations of columns: declared on a table, fitted on the training part, saved with the run, reused in prediction."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import cast

from paragrad.config import options
from paragrad.data.transforms.fitted import Fitted as Fitted
from paragrad.data.transforms.fitted import fit as fit
from paragrad.data.transforms.transform import Transform as Transform

TABLE = {
    "Standardise": "scales",
    "MinMax": "scales",
    "Clip": "scales",
    "Log": "scales",
    "Missing": "missing",
    "OneHot": "categories",
    "LabelIndex": "categories",
    "Reshape": "reshape",
}
"""Class name -> module. Each of these transformations is ``pg.<Name>`` and has a name on the command line."""


def names() -> tuple[str, ...]:
    """Return the names of all transformations, in the order of the table."""
    return tuple(TABLE)


def load(name: str) -> type[Transform]:
    """Return the class for a name in the table."""
    found: type[Transform] = getattr(import_module(f"{__name__}.{TABLE[name]}"), name)
    return found


def parse(text: str) -> Transform:
    """Parse a text such as ``missing:value=-999,fill=mean`` or ``clip:columns=pt+eta,low=0``."""
    return cast(Transform, options.parse(text, "transformation", cast(options.Table, sys.modules[__name__])))
