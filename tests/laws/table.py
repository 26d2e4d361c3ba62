"""All schemes, with the options that make another algorithm of them."""

from __future__ import annotations

from dataclasses import dataclass

import paragrad as pg
from paragrad import schemes
from paragrad.engines.serial import Serial
from paragrad.types import Commit

TABLE = [
    (pg.SyncSGD(), True),
    (pg.ModelAveraging(window=3), True),
    (pg.ModelAveraging(window=1000), True),
    (pg.ModelAveraging(window=2, starts="own"), False),
    (pg.BackupWorkers(backups=0), True),
    (pg.BackupWorkers(), False),
    (pg.BackupWorkers(backups=2), False),
    (pg.SoftSync(), True),
    (pg.SoftSync(splits=2), False),
    (pg.SoftSync(splits=3, bound=1), False),
    (pg.EASGD(window=2), False),
    (pg.EASGD(window=3, alpha=0.2), False),
    (pg.EASGD(window=2, form="mean"), False),
    (pg.EASGD(window=4, ends="thesis"), False),
    (pg.EASGD(window=4, ends="relative"), False),
    (pg.EASGD(window=2, starts="own"), False),
    (pg.Hogwild(), True),
    (pg.Hogwild(window=3), True),
    (pg.Downpour(), True),
    (pg.Downpour(window=4), True),
    (pg.Downpour(window=2, bound=1), True),
    (pg.Downpour(window=4, zealous=True), True),
    (pg.Downpour(window=4, zealous=True, bound=1), True),
    (pg.DeanDownpour(rate=0.1), False),
    (pg.DeanDownpour(rate=0.1, window=4, fetch=2), False),
    (pg.DeanDownpour(rate=0.1, window=4, fetch=3, bound=1), False),
    (pg.DeanDownpour(rate=0.1, window=2, fetch=5, warm=4), False),
    (pg.AGN(window=1), True),
    (pg.AGN(window=5), False),
    (pg.AGN(window=3, bound=2), False),
    (pg.AEASGD(window=2), False),
    (pg.AEASGD(window=3, alpha=0.3, atomic=False), False),
    (pg.EAMSGD(window=2), False),
    (pg.EAMSGD(window=3, alpha=0.5, momentum=0.5, bound=1), False),
    (pg.DynSGD(), True),
    (pg.DynSGD(window=1, bound=2), True),
    (pg.StalenessAware(), True),
    (pg.StalenessAware(window=3), False),
    (pg.StalenessAware(bound=1), True),
    (pg.ADAG(window=1), True),
    (pg.ADAG(window=1, form="eta", place="sends"), True),
    (pg.ADAG(window=1, form="invariant", place="pulls"), True),
    (pg.ADAG(window=3, form="eta"), False),
    (pg.ADAG(window=3, form="invariant", place="sends"), False),
    (pg.ADAG(window=3, gamma=0.1, place="pulls"), False),
    (pg.ADAG(window=3, gamma=0.1, bound=1), False),
    (pg.GEM(), False),
    (pg.GEM(window=3, kappa=1.5, momentum=0.5, bound=2), False),
    (pg.DCASGD(), True),
    (pg.DCASGD(adaptive=True), True),
    (pg.DCASGD(window=2, strength=0.2, bound=1), False),
    (pg.OrMo(), False),
    (pg.OrMo(momentum=0.0), True),
    (pg.OrMo(window=2, momentum=0.5, bound=2), False),
    (pg.AsyncDiLoCo(window=2, outer_lr=0.5, outer_momentum=0.5), False),
    (pg.AsyncDiLoCo(window=2, delay=1), False),
    (pg.AsyncDiLoCo(window=2, outer_lr=0.7, delay=2, c=0.3, outer_momentum=0.5), False),
    (pg.AsyncDiLoCo(window=4, outer_lr=0.5, dylu=True, bound=2), False),
    (pg.AsyncDiLoCo(window=4, outer_lr=1.0, outer_momentum=0.0, delay=1), True),
    (pg.DiLoCo(window=3), False),
    (pg.DiLoCo(window=3, outer_lr=1.0, outer_momentum=0.0), True),
    (pg.Downpour(overlap=1), True),
    (pg.Downpour(window=3, overlap=1, bound=1), True),
    (pg.AGN(window=3, overlap=1), False),
    (pg.DynSGD(window=2, overlap=1), False),
    (pg.DeanDownpour(rate=0.1, window=2, overlap=1), False),
    (pg.AEASGD(window=2, overlap=1), False),
    (pg.EASGD(window=2, starts="own", overlap=1), False),
    (pg.ModelAveraging(window=3, overlap=1), True),
    (pg.DiLoCo(window=3, outer_lr=0.3, outer_momentum=0.5, overlap=1), False),
    (pg.AsyncDiLoCo(window=4, outer_lr=0.2, outer_momentum=0.5, dylu=True, overlap=1), False),
    (pg.SyncSGD(overlap=1), False),
    (pg.SoftSync(splits=2, overlap=1), False),
    (pg.StalenessAware(window=2, overlap=1), False),
    (pg.OrMo(momentum=0.5, overlap=1), False),
]
"""Scheme, and whether one worker is plain training."""
TABLE += [
    (schemes.load(name)(), False)
    for name in schemes.names()
    if name not in {type(scheme).__name__ for scheme, _ in TABLE}  # one that is new is tried as it is
]
"""(scheme, whether one worker with it is plain training)."""


@dataclass
class Holding(Serial):
    """Commits can be held back, between a worker and the center."""

    holds: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._held: dict[int, Commit] = {}

    def receive(self, actor, commit) -> None:
        if self.holds:
            self._held[actor.me.rank] = commit
        else:
            super().receive(actor, commit)

    def let_go(self, rank: int) -> None:
        """Let the center receive a commit that was held back."""
        super().receive(self.actors[rank], self._held.pop(rank))
