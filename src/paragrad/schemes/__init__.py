"""How workers cooperate: one file for each algorithm, and the table of them all."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paragrad.schemes.adag import ADAG as ADAG
    from paragrad.schemes.aeasgd import AEASGD as AEASGD
    from paragrad.schemes.agn import AGN as AGN
    from paragrad.schemes.asyncdiloco import AsyncDiLoCo as AsyncDiLoCo
    from paragrad.schemes.backupworkers import BackupWorkers as BackupWorkers
    from paragrad.schemes.dcasgd import DCASGD as DCASGD
    from paragrad.schemes.deandownpour import DeanDownpour as DeanDownpour
    from paragrad.schemes.diloco import DiLoCo as DiLoCo
    from paragrad.schemes.downpour import Downpour as Downpour
    from paragrad.schemes.dynsgd import DynSGD as DynSGD
    from paragrad.schemes.eamsgd import EAMSGD as EAMSGD
    from paragrad.schemes.easgd import EASGD as EASGD
    from paragrad.schemes.gem import GEM as GEM
    from paragrad.schemes.hogwild import Hogwild as Hogwild
    from paragrad.schemes.modelaveraging import ModelAveraging as ModelAveraging
    from paragrad.schemes.ormo import OrMo as OrMo
    from paragrad.schemes.scheme import Scheme
    from paragrad.schemes.softsync import SoftSync as SoftSync
    from paragrad.schemes.stalenessaware import StalenessAware as StalenessAware
    from paragrad.schemes.syncsgd import SyncSGD as SyncSGD

TABLE = {
    "SyncSGD": "syncsgd",
    "BackupWorkers": "backupworkers",
    "SoftSync": "softsync",
    "ModelAveraging": "modelaveraging",
    "EASGD": "easgd",
    "DiLoCo": "diloco",
    "Hogwild": "hogwild",
    "Downpour": "downpour",
    "DeanDownpour": "deandownpour",
    "DynSGD": "dynsgd",
    "StalenessAware": "stalenessaware",
    "AGN": "agn",
    "ADAG": "adag",
    "AEASGD": "aeasgd",
    "EAMSGD": "eamsgd",
    "GEM": "gem",
    "DCASGD": "dcasgd",
    "OrMo": "ormo",
    "AsyncDiLoCo": "asyncdiloco",
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
