"""How long a simulated worker's windows take: its own draws, made longer by what slows it or stops it."""

from __future__ import annotations

from paragrad.cluster import Cluster, Pause, Slow


class ComputeTime:
    """One worker's time, over all its incarnations."""

    def __init__(self, cluster: Cluster, worker: int, seed: int) -> None:
        self._cluster = cluster
        self._worker = worker
        self._seed = seed
        mine = [fault for fault in cluster.faults if isinstance(fault, Slow | Pause) and fault.worker == worker]
        self._slow = [fault for fault in mine if isinstance(fault, Slow)]
        self._pauses = sorted((fault.at, fault.seconds) for fault in mine if isinstance(fault, Pause))
        self.begin(0)

    def begin(self, incarnation: int) -> None:
        """A new incarnation draws its own times."""
        self._steps = self._cluster.steps(self._worker, incarnation, self._seed)
        self.delays = self._cluster.delays(self._worker, incarnation, self._seed)

    def end_of(self, steps: int, now: float) -> float:
        """When a window of so many steps ends that begins now."""
        if not self._slow and not self._pauses:
            return now + self._steps.total(steps)
        for _ in range(steps):
            now = self.awake(now)
            length = self._steps.next()
            for slow in self._slow:
                if slow.at <= now < slow.at + slow.seconds:
                    length *= slow.factor
            end = now + length
            for at, seconds in self._pauses:
                if now < at < end:
                    end += seconds
            now = end
        return now

    def awake(self, now: float) -> float:
        """When a worker that may stand still goes on."""
        for at, seconds in self._pauses:
            if at <= now < at + seconds:
                now = at + seconds
        return now
