"""Leases of mini-batches: each is leased to one worker, and retired when the commit that used it is applied."""

from __future__ import annotations

from typing import Any

from paragrad.errors import UsageError
from paragrad.types import Batches


class Leases:
    """State of every position of the stream: not leased yet, returned, leased to one worker, or retired.

    *Dealt*: position k of an epoch belongs to worker k mod n, so the k-th mini-batches of all workers form one large batch.
    *Stolen*: a worker that asks takes the next position.
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
        self._leased: list[list[int]] = [[] for _ in range(workers)]
        self._returned: list[list[int]] = [[] for _ in range(workers)]
        self._abandoned: list[int] = []
        self._returned_count = 0
        """Number of returned positions that no worker has taken again."""

    @property
    def floor(self) -> int:
        """Lowest position that is not retired; ``total`` if all are."""
        ahead = [position for column in range(self._columns) if (position := self._next(column)) is not None]
        lists = (ahead, *self._leased, *self._returned)
        return min((position for positions in lists for position in positions), default=self.total)

    def held(self, worker: int) -> Batches:
        """Return the positions leased to this worker, in the order in which it took them."""
        return tuple(self._leased[worker])

    def count(self, worker: int) -> int:
        """Return the number of positions leased to this worker."""
        return len(self._leased[worker])

    def remain(self, worker: int) -> bool:
        """Return whether this worker has leases or can still take some."""
        if self._leased[worker] or (self._returned_count and any(self._returned[source] for source in self._sources(worker))):
            return True
        return any(self._next(column) is not None for column in self._shares(worker))

    def take(self, worker: int, count: int, *, aligned: bool = False) -> Batches:
        """Lease up to ``count`` further mini-batches to a worker.

        With ``aligned``, ``count`` is a number of rounds. In the last round of an epoch, which may be incomplete, a worker
        may then get no mini-batch and stays idle.
        """
        taken: list[int] = []
        if self._returned_count:
            for source in self._sources(worker):
                room = count - len(taken)
                taken += self._returned[source][:room]
                self._returned[source] = self._returned[source][room:]
            self._returned_count -= len(taken)
        if not (aligned and taken):
            for column in self._shares(worker):
                while len(taken) < count and (position := self._next(column)) is not None:
                    if aligned and position != self._at(column, self._cursors[column]):
                        self._cursors[column] += 1
                        count -= 1
                        continue
                    self._cursors[column] = self._round_of(position) + 1
                    taken.append(position)
        self._leased[worker] += taken
        return tuple(taken)

    def retire(self, worker: int, batches: Batches) -> None:
        """Mark mini-batches as used by an applied commit. Raise if one is not leased to the worker."""
        held = self._leased[worker]
        if len(batches) == 1 and batches[0] in held:
            held.remove(batches[0])
            self.used += 1
            return
        unleased = set(batches).difference(held)
        if unleased:
            raise UsageError(
                f"Worker {worker} committed mini-batch {min(unleased)}, which is not leased to it: use leased ones only."
            )
        if len(set(batches)) < len(batches):
            raise UsageError(f"Worker {worker} committed a mini-batch twice, in {batches}: name each once.")
        for position in batches:
            held.remove(position)
        self.used += len(batches)

    def give_back(self, worker: int, keep: Batches = ()) -> None:
        """Return a worker's leases to be trained on again, except those to ``keep``: it is lost, or its commit was rejected."""
        back = [position for position in self._leased[worker] if position not in keep]
        self._returned[worker] = sorted(self._returned[worker] + back)
        self._returned_count += len(back)
        self._leased[worker] = [position for position in self._leased[worker] if position in keep]

    def abandon(self, worker: int, keep: Batches = ()) -> None:
        """Let the others take over the leases and the share of a worker that will not be replaced."""
        self.give_back(worker, keep)
        if not self.stolen and worker not in self._abandoned:
            self._abandoned.append(worker)

    def welcome(self, worker: int) -> None:
        """Give an abandoned worker that returns the rest of its share back."""
        if worker in self._abandoned:
            self._abandoned.remove(worker)

    def state(self) -> dict[str, Any]:
        """Return the state as plain numbers, for a checkpoint."""
        return {
            "batches": self.batches,
            "epochs": self.epochs,
            "workers": self.workers,
            "stolen": self.stolen,
            "used": self.used,
            "cursors": list(self._cursors),
            "held": [list(h) for h in self._leased],
            "returned": [list(r) for r in self._returned],
            "orphans": list(self._abandoned),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Leases:
        """Return the leases that ``state`` describes."""
        leases = cls(batches=state["batches"], epochs=state["epochs"], workers=state["workers"], stolen=state["stolen"])
        leases.used = state["used"]
        leases._cursors = list(state["cursors"])
        leases._leased = [list(h) for h in state["held"]]
        leases._returned = [list(r) for r in state["returned"]]
        leases._abandoned = list(state["orphans"])
        leases._returned_count = sum(len(positions) for positions in leases._returned)
        return leases

    def _sources(self, worker: int) -> list[int]:
        """Return the workers whose returned leases this worker may take, itself first."""
        return [worker, *(range(self.workers) if self.stolen else self._abandoned)]

    def _shares(self, worker: int) -> list[int]:
        """Return the columns of the table of rounds that this worker may take from, its own first."""
        return [0] if self.stolen else [worker, *self._abandoned]

    def _at(self, column: int, round_: int) -> int | None:
        epoch, place = divmod(round_, self._rounds)
        batch = place * self._columns + column
        return epoch * self.batches + batch if batch < self.batches else None

    def _round_of(self, position: int) -> int:
        epoch, batch = divmod(position, self.batches)
        return epoch * self._rounds + batch // self._columns

    def _next(self, column: int) -> int | None:
        rounds = range(self._cursors[column], self._rounds * self.epochs)
        return next((position for round_ in rounds if (position := self._at(column, round_)) is not None), None)
