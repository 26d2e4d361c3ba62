"""Arrival times of messages in the simulated cluster: latency, bandwidth, partitions, lost and duplicate messages."""

from __future__ import annotations

from collections import defaultdict

from paragrad.cluster import CenterCrash, Cluster, Draws, DropMessage, DuplicateMessage, Partition, Pause, Slow


class Messages:
    """The links between workers and center. Faults are data, so the fate of a message is known when it is sent."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._partitions = [fault for fault in cluster.faults if isinstance(fault, Partition)]
        self._outages = sorted((fault.at, fault.at + fault.down) for fault in cluster.faults if isinstance(fault, CenterCrash))
        self._drops: dict[tuple[int, bool], list[float]] = defaultdict(list)
        self._twice: dict[int, list[float]] = defaultdict(list)
        for fault in cluster.faults:
            if isinstance(fault, DropMessage):
                self._drops[fault.worker, fault.answer].append(fault.at)
            elif isinstance(fault, DuplicateMessage):
                self._twice[fault.worker].append(fault.at)
        calm = all(isinstance(fault, Slow | Pause) for fault in cluster.faults) and cluster.churn is None
        self.free = calm and cluster.latency == 0 and cluster.bandwidth is None and cluster.center_rate is None
        """True if messages arrive at once and none is lost."""

    def up(self, worker: int, delays: Draws, size: int, now: float) -> list[float]:
        """Return the arrival times at the center: one, or two if duplicated. A lost message is sent again."""
        while _occurs(self._drops[worker, False], now):
            now += self._cluster.retry
        arrivals = [self._crossing(worker, delays, size, now)]
        if _occurs(self._twice[worker], now):
            arrivals.append(self._crossing(worker, delays, size, now))
        return [self.received(arrival) for arrival in arrivals]

    def down(self, worker: int, delays: Draws, size: int, now: float) -> float | None:
        """Return the arrival time of an answer; None if it is lost."""
        if _occurs(self._drops[worker, True], now):
            return None
        return self._crossing(worker, delays, size, now)

    def received(self, arrival: float) -> float:
        """Return the time when the center receives a message; it is sent again if it arrives while the center is down."""
        for start, end in self._outages:
            while start <= arrival < end:
                arrival += self._cluster.retry
        return arrival

    def lost_in_queue(self, arrival: float, until: float) -> bool:
        """Return whether the center crashes while a message waits in its queue."""
        return any(arrival < start < until for start, _ in self._outages)

    def _crossing(self, worker: int, delays: Draws, size: int, now: float) -> float:
        for cut in self._partitions:
            if worker in cut.workers and cut.at <= now < cut.at + cut.seconds:
                now = cut.at + cut.seconds
        return now + delays.next() + self._cluster.transfer(worker, size)


def _occurs(times: list[float], now: float) -> bool:
    """Return whether one of these faults is due; each occurs once."""
    for at in times:
        if at <= now:
            times.remove(at)
            return True
    return False
