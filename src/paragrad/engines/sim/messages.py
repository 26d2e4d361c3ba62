"""When a message of the simulated cluster arrives: latency, bandwidth, partitions, and what is lost or comes twice."""

from __future__ import annotations

from collections import defaultdict

from paragrad.cluster import CenterCrash, Cluster, Draws, DropMessage, DuplicateMessage, Partition, Pause, Slow


class Messages:
    """The links between workers and center. Faults are data: what becomes of a message is known when it is sent."""

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
        """Whether messages arrive the instant they are sent, and nothing is ever lost."""

    def up(self, worker: int, delays: Draws, size: int, now: float) -> list[float]:
        """When a message to the center arrives, once or twice; one that is lost on the way has been sent again."""
        while _strikes(self._drops[worker, False], now):
            now += self._cluster.retry
        arrivals = [self._crossing(worker, delays, size, now)]
        if _strikes(self._twice[worker], now):
            arrivals.append(self._crossing(worker, delays, size, now))
        return [self.heard(arrival) for arrival in arrivals]

    def down(self, worker: int, delays: Draws, size: int, now: float) -> float | None:
        """When an answer arrives; None where it is lost."""
        if _strikes(self._drops[worker, True], now):
            return None
        return self._crossing(worker, delays, size, now)

    def heard(self, arrival: float) -> float:
        """When the center hears of a message; one that comes while it is down is sent again."""
        for start, end in self._outages:
            while start <= arrival < end:
                arrival += self._cluster.retry
        return arrival

    def lost_in_queue(self, arrival: float, until: float) -> bool:
        """Whether the center goes down while a message waits there."""
        return any(arrival < start < until for start, _ in self._outages)

    def _crossing(self, worker: int, delays: Draws, size: int, now: float) -> float:
        for cut in self._partitions:
            if worker in cut.workers and cut.at <= now < cut.at + cut.seconds:
                now = cut.at + cut.seconds
        return now + delays.next() + self._cluster.transfer(worker, size)


def _strikes(times: list[float], now: float) -> bool:
    """Whether one of these faults is due; it strikes once."""
    for at in times:
        if at <= now:
            times.remove(at)
            return True
    return False
