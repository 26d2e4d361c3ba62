"""How stale the commits of a run were, worker by worker, and where all that staleness came from.

Staleness is counted in updates: how often the center was updated between the beginning of a window and the moment
its commit was applied. Distance is the same in the space of the weights: how far the center had moved meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from paragrad.rundir.record import effective
from paragrad.rundir.tally import Staleness
from paragrad.types import Event


@dataclass(frozen=True, slots=True)
class Sample:
    """One applied commit."""

    worker: int
    clock: int
    """The update that it was part of."""
    time: float
    """Seconds after the start; virtual ones where the run was simulated."""
    staleness: int
    distance: float | None = None
    """How far the center had moved between the window's beginning and the answer; None where nobody measured it."""


def samples(events: Iterable[Event]) -> list[Sample]:
    """The commits that the final center is made of, in the order in which they were applied.

    A worker can tell how far the center had moved only once it is answered, so that the distance travels with its
    *next* commit; here it stands where it belongs. The last commit of a worker, or of one that was lost, has none.
    """
    commits = effective(events)
    later: dict[tuple[int, int], float | None] = {}
    found: list[Sample] = []
    for event in reversed(commits):
        data = event.data
        who = (data["worker"], data.get("incarnation", 0))
        found.append(Sample(data["worker"], data["clock"], event.time, data["staleness"], later.get(who)))
        later[who] = data.get("distance")
    return found[::-1]


@dataclass(frozen=True)
class Worker:
    """The commits of one worker, replacements of a lost one included."""

    worker: int
    commits: int
    staleness: Staleness
    distance: float | None
    """The mean over the commits for which it was measured."""


def by_worker(commits: Iterable[Sample]) -> list[Worker]:
    """Mean, maximum and histogram of staleness, and the mean distance, of each worker, in the order of rank."""
    found = []
    for rank, group in groupby(sorted(commits, key=lambda sample: sample.worker), key=lambda sample: sample.worker):
        mine = list(group)
        staleness = Staleness()
        staleness.histogram.update(sample.staleness for sample in mine)
        distances = [sample.distance for sample in mine if sample.distance is not None]
        found.append(Worker(rank, len(mine), staleness, sum(distances) / len(distances) if distances else None))
    return found


@dataclass(frozen=True)
class Balance:
    """Both sides of the law of staleness: ``staleness = others - unfinished - elsewhere``."""

    commits: int
    updates: int
    staleness: int
    """The left side: Σ τ, as the center stamped it on the commits."""
    others: int
    """Σ over updates: the windows in progress (one a worker; with overlap two) whose commit was not part of the update."""
    unfinished: int
    """What windows had collected that no applied commit ended: lost in a crash, refused, or open at the end."""
    elsewhere: int
    """Σ over commits: by how many updates the window began later (+) or earlier (-) than its worker's last commit (with
    overlap: than the one before that)."""

    @property
    def explained(self) -> int:
        """The right side."""
        return self.others - self.unfinished - self.elsewhere

    @property
    def holds(self) -> bool:
        """Whether both sides are equal, to the last update."""
        return self.staleness == self.explained


def balance(events: Iterable[Event]) -> Balance:
    """Both sides of the law of staleness, from the joins, leaves and commits of a record.

    **The law.** An update makes every window that is in progress one update older, except those whose commits it is
    made of. So, summed over all windows of a run, however fast or slow the workers were:

        Σ over commits of τ  =  Σ over updates of the other workers with a window in progress
                                - what was collected by windows that no applied commit ended

    Asynchronous schemes (quorum 1) apply one commit an update and answer it at once, so that a worker has a window in
    progress from its joining until it leaves. Both sides then follow from the *order* of joins, leaves and commits
    alone, ``elsewhere`` is 0, and while n workers are there the mean of τ is n - 1, less what is unfinished.

    ``elsewhere`` is taken from the versions of the commits, and is not 0 where a window did not begin right after its
    worker's last commit:

    - positive where an answer was withheld: a bound on staleness, or a worker that waited for rows others might leave;
    - negative in *softsync*, whose worker goes on at once while its commit waits for the round: there all windows but
      that of the worker who completes the round age, so that the mean of τ is (n - 1)/c with c commits an update (less on
      an engine whose workers fetch the center when they wake up, since they then begin from a newer one);
    - negative where a worker does not adopt every answer (Dean's Downpour with a fetch of its own).

    *Synchronous rounds* of c out of n workers that wait are covered as they are: an update of c commits makes n - c
    windows older, so that the mean of τ is (n - c)/c, and 0 in a full round.

    With *overlap* (the record's first line says so) a window begins while the commit before it is in flight, from the answer
    that its worker had then. So a worker has two windows in progress: both from its joining on, and with every
    commit that is applied the older ends and another begins. An update of one commit makes 2n - 1 windows older, its own
    worker's other one too, and the mean of τ is 2n - 1; in rounds of c it is 2n/c - 1, and 1 in a full round.

    A worker that joins again was lost, and its window with it. One that has no rows left counts as having a window
    until it leaves or the record ends; what that adds to ``others`` is in ``unfinished``, too. Records without joins are read
    as if a worker joined at the version of its first commit. Where lines are missing (an event ``gap``) both sides differ.
    """
    opened: dict[int, list[int]] = {}
    """The clocks at which the windows that a worker has in progress began, the older first."""
    windows = 1
    incarnations: dict[int, int] = {}
    now = commits = updates = staleness = others = unfinished = elsewhere = 0
    for round_ in _rounds(events):
        event = round_[0]
        data = event.data
        if event.kind == "commit":
            for commit in round_:
                worker, version = commit.data["worker"], commit.data["version"]
                incarnation = commit.data.get("incarnation", 0)
                if worker not in opened:  # it joined without being heard of: it has been there since its version
                    others += windows * (now - version)
                    opened[worker] = [version] * windows
                elif incarnation > incarnations.get(worker, 0):  # and so did the replacement of a lost one
                    unfinished += sum(version - began for began in opened[worker])
                    opened[worker] = [version] * windows
                incarnations[worker] = max(incarnation, incarnations.get(worker, 0))
                # A commit more than there were windows: of two that one worker brings to one update, the second began after
                # the first.
                elsewhere += version - (opened[worker].pop(0) if opened[worker] else now)
                staleness += commit.data["staleness"]
            others += sum(map(len, opened.values()))
            commits += len(round_)
            updates += 1
            now = data["clock"]
            for mine in opened.values():
                mine += [now] * (windows - len(mine))
        elif event.kind == "start":
            windows = 1 + data.get("overlap", 0)
        elif event.kind == "resume":
            unfinished += _open(opened, now)
            opened.clear()
            incarnations.clear()
            now = data["clock"]
        else:
            worker = data["worker"]
            unfinished += sum(now - began for began in opened.pop(worker, ()))
            if event.kind != "leave":
                opened[worker] = [now] * windows
                incarnations[worker] = data.get("incarnation", incarnations.get(worker, 0))
    unfinished += _open(opened, now)
    return Balance(commits, updates, staleness, others, unfinished, elsewhere)


def _open(windows: Mapping[int, Sequence[int]], now: int) -> int:
    """What windows in progress have collected so far."""
    return sum(now - began for mine in windows.values() for began in mine)


def _rounds(events: Iterable[Event]) -> Iterator[Sequence[Event]]:
    """Commits that made one update together, and one by one whatever else begins or ends a window."""
    every = list(events)
    kept = {id(event) for event in effective(every)}
    told = [
        event
        for event in every
        if (event.kind == "commit" and id(event) in kept) or event.kind in ("start", "join", "leave", "refused", "resume")
    ]
    for kind, group in groupby(told, key=lambda event: (event.kind, event.data["clock"] if event.kind == "commit" else None)):
        if kind[0] == "commit":
            yield list(group)
        else:
            yield from ([event] for event in group)
