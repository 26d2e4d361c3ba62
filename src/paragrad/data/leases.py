"""Who works on which mini-batch: each is leased to one worker and retired by the commit that holds it."""

from __future__ import annotations

from typing import Any

from paragrad.errors import UsageError
from paragrad.types import Batches


class Leases:
    """Every position of the stream is in exactly one place: not dealt yet, returned, leased to a worker, or retired.

    *Dealt*: position k of an epoch belongs to worker k mod n, so that the k-th mini-batches of all workers
    are together one large batch of the epoch. *Stolen*: whoever asks takes the next one.
    """

    def __init__(self, *, batches: int, epochs: int, workers: int, stolen: bool = False) -> None:
        self.batches = batches
        self.epochs = epochs
        self.workers = workers
        self.stolen = stolen
        self.used = 0
        self.total = batches * epochs
        """Positions in the whole stream."""
        self._columns = 1 if stolen else workers
        self._rounds = -(-batches // self._columns)
        self._cursors = [0] * self._columns
        self._held: list[list[int]] = [[] for _ in range(workers)]
        self._returned: list[list[int]] = [[] for _ in range(workers)]
        self._orphans: list[int] = []
        self._loose = 0
        """How many positions have been returned and not been taken again."""

    @property
    def floor(self) -> int:
        """The lowest position that is not retired yet; ``total`` where all are."""
        ahead = [position for column in range(self._columns) if (position := self._next(column)) is not None]
        lists = (ahead, *self._held, *self._returned)
        return min((position for positions in lists for position in positions), default=self.total)

    def held(self, worker: int) -> Batches:
        """What this worker has on lease, in the order in which it was given."""
        return tuple(self._held[worker])

    def count(self, worker: int) -> int:
        """How many this worker has on lease."""
        return len(self._held[worker])

    def remain(self, worker: int) -> bool:
        """Whether this worker holds, or can still be given, anything."""
        if self._held[worker] or (self._loose and any(self._returned[source] for source in self._sources(worker))):
            return True
        return any(self._next(column) is not None for column in self._shares(worker))

    def take(self, worker: int, count: int, *, aligned: bool = False) -> Batches:
        """Lease up to ``count`` further mini-batches to a worker.

        ``aligned`` counts places in the table of rounds instead: at the end of an epoch that does not
        divide evenly a worker may then get fewer, or none, and sits that round out.
        """
        taken = self._take_returned(worker, count) if self._loose else []
        if not (aligned and taken):
            for column in self._shares(worker):
                while len(taken) < count and (position := self._next(column)) is not None:
                    here = self._cursors[column]
                    if aligned and position != self._at(column, here):
                        self._cursors[column] += 1
                        count -= 1
                        continue
                    self._cursors[column] = self._round_of(position) + 1
                    taken.append(position)
        self._held[worker] += taken
        return tuple(taken)

    def retire(self, worker: int, batches: Batches) -> None:
        """An applied commit used these."""
        held = self._held[worker]
        if len(batches) == 1 and batches[0] in held:
            held.remove(batches[0])
            self.used += 1
            return
        strange = sorted(set(batches).difference(held))
        if strange:
            raise UsageError(
                f"Worker {worker} committed mini-batch {strange[0]}, which is not leased to it: use leased ones only."
            )
        if len(set(batches)) < len(batches):
            raise UsageError(f"Worker {worker} committed a mini-batch twice, in {batches}: name each once.")
        for position in batches:
            held.remove(position)
        self.used += len(batches)

    def give_back(self, worker: int, keep: Batches = ()) -> None:
        """The worker is gone, or its commit was not applied: its leases are to be done again, but for those to ``keep``."""
        back = [position for position in self._held[worker] if position not in keep]
        self._returned[worker] = sorted(self._returned[worker] + back)
        self._loose += len(back)
        self._held[worker] = [position for position in self._held[worker] if position in keep]

    def abandon(self, worker: int, keep: Batches = ()) -> None:
        """The worker will not be replaced: others take over its leases and its share."""
        self.give_back(worker, keep)
        if not self.stolen and worker not in self._orphans:
            self._orphans.append(worker)

    def welcome(self, worker: int) -> None:
        """A worker given up is back: what is left of its share is its own again."""
        if worker in self._orphans:
            self._orphans.remove(worker)

    def state(self) -> dict[str, Any]:
        """All of it as plain numbers, for a checkpoint."""
        return {
            "batches": self.batches,
            "epochs": self.epochs,
            "workers": self.workers,
            "stolen": self.stolen,
            "used": self.used,
            "cursors": list(self._cursors),
            "held": [list(h) for h in self._held],
            "returned": [list(r) for r in self._returned],
            "orphans": list(self._orphans),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Leases:
        """The inverse of ``state``."""
        leases = cls(batches=state["batches"], epochs=state["epochs"], workers=state["workers"], stolen=state["stolen"])
        leases.used = state["used"]
        leases._cursors = list(state["cursors"])
        leases._held = [list(h) for h in state["held"]]
        leases._returned = [list(r) for r in state["returned"]]
        leases._orphans = list(state["orphans"])
        leases._loose = sum(len(positions) for positions in leases._returned)
        return leases

    def _sources(self, worker: int) -> list[int]:
        """Whose returned leases this worker may take, its own first."""
        return [worker, *(range(self.workers) if self.stolen else self._orphans)]

    def _shares(self, worker: int) -> list[int]:
        """The columns of the table of rounds that this worker may take from, its own first."""
        return [0] if self.stolen else [worker, *self._orphans]

    def _take_returned(self, worker: int, count: int) -> list[int]:
        taken: list[int] = []
        for source in self._sources(worker):
            room = count - len(taken)
            taken += self._returned[source][:room]
            self._returned[source] = self._returned[source][room:]
        self._loose -= len(taken)
        return taken

    def _at(self, column: int, round_: int) -> int | None:
        epoch, place = divmod(round_, self._rounds)
        batch = place * self._columns + column
        return epoch * self.batches + batch if epoch < self.epochs and batch < self.batches else None

    def _round_of(self, position: int) -> int:
        epoch, batch = divmod(position, self.batches)
        return epoch * self._rounds + batch // self._columns

    def _next(self, column: int) -> int | None:
        round_ = self._cursors[column]
        while round_ < self._rounds * self.epochs:
            position = self._at(column, round_)
            if position is not None:
                return position
            round_ += 1
        return None
