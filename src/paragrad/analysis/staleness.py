"""The staleness of commits per worker, and its causes.

Staleness is the number of updates of the center between the start of a window and the application of its commit. Distance is
how far the center has moved meanwhile, in the space of the weights.
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
    """Update that it was part of."""
    time: float
    """Seconds after the start; virtual seconds in a simulated run."""
    staleness: int
    distance: float | None = None
    """Movement of the center between the start of the window and the answer; None if it was not measured."""


def samples(events: Iterable[Event]) -> list[Sample]:
    """Return the commits that led to the final center, in the order in which they were applied.

    A worker knows the distance only after the answer, and sends it with its *next* commit. Here it is assigned to the right
    commit. The last commit of a worker, or of a lost one, has no distance.
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
    """The commits of one worker, including replacements of a lost one."""

    worker: int
    commits: int
    staleness: Staleness
    distance: float | None
    """Mean over the commits for which it was measured."""


def by_worker(commits: Iterable[Sample]) -> list[Worker]:
    """Return the staleness and the mean distance per worker, in the order of rank."""
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
    """Left side: Σ τ over the commits, as the center recorded it."""
    others: int
    """Σ over updates: windows in progress (one per worker; with overlap two) whose commit was not part of the update."""
    unfinished: int
    """Staleness of windows without an applied commit: lost in a crash, rejected, or open at the end."""
    elsewhere: int
    """Σ over commits: updates by which the window began later (+) or earlier (-) than its worker's last commit (with overlap:
    than the one before that)."""

    @property
    def explained(self) -> int:
        """Right side."""
        return self.others - self.unfinished - self.elsewhere

    @property
    def holds(self) -> bool:
        """True if both sides are equal, to the last update."""
        return self.staleness == self.explained


def balance(events: Iterable[Event]) -> Balance:
    """Compute both sides of the law of staleness, from the joins, leaves and commits of a record.

    **The law.** An update makes every window in progress one update older, except those whose commits it applies. So, summed
    over all windows of a run, whatever the speeds of the workers:

        Σ over commits of τ  =  Σ over updates of the other windows in progress
                                - staleness of windows without an applied commit

    Asynchronous schemes (quorum 1) apply one commit per update and answer it at once, so that a worker has a window in progress
    from its join until it leaves. Both sides then follow from the *order* of joins, leaves and commits alone, ``elsewhere`` is
    0, and with n workers the mean of τ is n - 1, less the unfinished part.

    ``elsewhere`` is computed from the versions of the commits. It is not 0 if a window did not begin right after its worker's
    last commit:

    - positive if an answer was delayed: by a bound on staleness, or because a worker waited for rows of other workers;
    - negative in *softsync*, whose workers continue at once while their commits wait for the round. All windows age except that
      of the worker that completes the round, so that the mean of τ is (n - 1)/c with c commits per update. (It is less on an
      engine whose workers fetch the center when they wake up, because they then begin from a newer one.)
    - negative if a worker does not adopt every answer (DeanDownpour with ``fetch``).

    *Synchronous rounds* of c out of n waiting workers need no correction: an update of c commits makes n - c windows older, so
    that the mean of τ is (n - c)/c, and 0 in a full round.

    With *overlap* (see the event ``start``) a window begins while the previous commit is in flight, from the last answer that
    its worker had. So a worker has two windows in progress: both begin with its join, and every applied commit ends the older
    one and begins another. An update of one commit makes 2n - 1 windows older, including the other window of its own worker,
    and the mean of τ is 2n - 1; in rounds of c commits it is 2n/c - 1, and 1 in a full round.

    A worker that joins again was lost, and its window too. A worker without rows counts as having a window until it leaves or
    the record ends; this adds the same to ``others`` and ``unfinished``. In a record without joins, a worker joins at the
    version of its first commit. If lines are missing (an event ``gap``), both sides differ.
    """
    opened: dict[int, list[int]] = {}
    """Clocks at which the windows in progress of each worker began, the older first."""
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
                if worker not in opened:  # the record has no join: it joined at its version
                    others += windows * (now - version)
                    opened[worker] = [version] * windows
                elif incarnation > incarnations.get(worker, 0):  # the same for the replacement of a lost worker
                    unfinished += sum(version - began for began in opened[worker])
                    opened[worker] = [version] * windows
                incarnations[worker] = max(incarnation, incarnations.get(worker, 0))
                # If a worker has two commits in one update, the second window began after the first.
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
    """Return the staleness of the windows in progress so far."""
    return sum(now - began for mine in windows.values() for began in mine)


def _rounds(events: Iterable[Event]) -> Iterator[Sequence[Event]]:
    """Yield the commits of each update together, and every other event that begins or ends a window alone."""
    every = list(events)
    kept = {id(event) for event in effective(every)}
    others = ("start", "join", "leave", "refused", "resume")
    relevant = [event for event in every if event.kind in others or id(event) in kept]
    for clock, group in groupby(relevant, key=lambda event: event.data["clock"] if event.kind == "commit" else None):
        if clock is not None:
            yield list(group)
        else:
            yield from ([event] for event in group)
