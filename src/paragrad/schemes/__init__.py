"""How workers cooperate: one file for each algorithm, and the table of them all."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paragrad.schemes.aeasgd import AEASGD as AEASGD
    from paragrad.schemes.agn import AGN as AGN
    from paragrad.schemes.deandownpour import DeanDownpour as DeanDownpour
    from paragrad.schemes.diloco import DiLoCo as DiLoCo
    from paragrad.schemes.downpour import Downpour as Downpour
    from paragrad.schemes.modelaveraging import ModelAveraging as ModelAveraging
    from paragrad.schemes.scheme import Scheme
    from paragrad.schemes.syncsgd import SyncSGD as SyncSGD

TABLE = {
    "SyncSGD": "syncsgd",
    "ModelAveraging": "modelaveraging",
    "Downpour": "downpour",
    "DeanDownpour": "deandownpour",
    "AGN": "agn",
    "AEASGD": "aeasgd",
    "DiLoCo": "diloco",
}
"""Class name -> file. A scheme that stands here is ``pg.<Name>``, in ``paragrad schemes``, and on the command line.
(The imports above are for type checkers and editors; they are not run.)"""


def names() -> tuple[str, ...]:
    """Every scheme, in the order of the table."""
    return tuple(TABLE)


def load(name: str) -> type[Scheme]:
    """The class behind a name of the table."""
    scheme: type[Scheme] = getattr(import_module(f"{__name__}.{TABLE[name]}"), name)
    return scheme
