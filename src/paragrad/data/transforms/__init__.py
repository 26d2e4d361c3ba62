"""Transformations of columns: declared on a table, fitted on the training part, saved with the run, repeated by prediction."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, cast

from paragrad.config import options
from paragrad.data.transforms.fitted import Fitted as Fitted
from paragrad.data.transforms.fitted import fit as fit
from paragrad.data.transforms.transform import Transform as Transform

if TYPE_CHECKING:
    from paragrad.data.transforms.categories import LabelIndex as LabelIndex
    from paragrad.data.transforms.categories import OneHot as OneHot
    from paragrad.data.transforms.missing import Missing as Missing
    from paragrad.data.transforms.reshape import Reshape as Reshape
    from paragrad.data.transforms.scales import Clip as Clip
    from paragrad.data.transforms.scales import Log as Log
    from paragrad.data.transforms.scales import MinMax as MinMax
    from paragrad.data.transforms.scales import Standardise as Standardise

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
"""Class name -> file. A transformation that stands here is ``pg.<Name>`` and has a name on the command line."""


def names() -> tuple[str, ...]:
    """Every transformation, in the order of the table."""
    return tuple(TABLE)


def load(name: str) -> type[Transform]:
    """The class behind a name of the table."""
    found: type[Transform] = getattr(import_module(f"{__name__}.{TABLE[name]}"), name)
    return found


def parse(text: str) -> Transform:
    """``standardise``, ``missing:value=-999,fill=mean``, ``clip:columns=pt+eta,low=0``: several columns are joined by ``+``."""
    return cast(Transform, options.parse(text, "transformation", cast(options.Table, sys.modules[__name__])))
